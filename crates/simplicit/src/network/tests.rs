//! Every kernel and every gradient against a reference in double precision that reads nothing but the terms.

use super::*;
use crate::equilibrium::{EquilibriumSettings, InputGradient};
use crate::layout::{Activation, MapShape};
use crate::model::ImplicitModel;
use crate::random::Random;

/// Evaluation by the definition of the terms, with z of unit k shifted by `nudge`; returns (z, x, y).
fn reference(network: &Network, u: &[f64], nudge: Option<(usize, f64)>) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
    let layout = network.layout();
    let mut z = vec![0.0; layout.size()];
    let mut x = z.clone();
    for (k, layer) in layout.layers().iter().enumerate().rev() {
        let range = layout.range(k);
        let rows = &network.pre_activations()[k];
        assert_eq!(rows.shape.size(), layer.size);
        for term in &rows.terms {
            assert!(matches!(term.source, Source::Input) || matches!(term.source, Source::Layer(s) if s > k));
        }
        let sums = sum(rows, u, &x, layout);
        for (i, value) in range.zip(sums) {
            z[i] = value + nudge.filter(|n| n.0 == i).map_or(0.0, |n| n.1);
            x[i] = layer.activation.apply_f64(z[i]);
        }
    }
    let y = sum(network.output(), u, &x, layout);
    (z, x, y)
}

fn sum(rows: &PreActivation, u: &[f64], x: &[f64], layout: &Layout) -> Vec<f64> {
    let size = rows.shape.size();
    let mut out: Vec<f64> = rows.unit_bias().map_or(vec![0.0; size], |b| b.iter().map(|&v| f64::from(v)).collect());
    for term in &rows.terms {
        let mut value = match term.source {
            Source::Input => u.to_vec(),
            Source::Layer(k) => x[layout.range(k)].to_vec(),
        };
        for map in &term.maps {
            value = pooled(*map, &value);
        }
        let product = match &term.weights {
            Weights::Identity => value,
            Weights::Dense(w) => {
                (0..w.rows()).map(|o| w.row(o).iter().zip(&value).map(|(&w, v)| f64::from(w) * v).sum()).collect()
            }
            Weights::Taps { weights, window, input, output, .. } => {
                convolved(weights, *window, *input, *output, &value)
            }
        };
        assert_eq!(product.len(), size);
        out.iter_mut().zip(product).for_each(|(o, p)| *o += p);
    }
    out
}

fn at(value: &[f64], map: MapShape, c: usize, y: isize, x: isize) -> Option<f64> {
    let inside = y >= 0 && x >= 0 && (y as usize) < map.height && (x as usize) < map.width;
    inside.then(|| value[(c * map.height + y as usize) * map.width + x as usize])
}

fn convolved(w: &Matrix<f32>, window: Window, input: MapShape, output: MapShape, value: &[f64]) -> Vec<f64> {
    let mut out = Vec::new();
    for o in 0..output.channels {
        for oy in 0..output.height {
            for ox in 0..output.width {
                let mut total = 0.0;
                for c in 0..input.channels {
                    for dy in 0..window.kernel[0] {
                        for dx in 0..window.kernel[1] {
                            let iy = (oy * window.stride[0] + dy) as isize - window.padding[0] as isize;
                            let ix = (ox * window.stride[1] + dx) as isize - window.padding[1] as isize;
                            let tap = f64::from(w[(o, (c * window.kernel[0] + dy) * window.kernel[1] + dx)]);
                            total += tap * at(value, input, c, iy, ix).unwrap_or(0.0);
                        }
                    }
                }
                out.push(total);
            }
        }
    }
    out
}

fn pooled(map: FixedMap, value: &[f64]) -> Vec<f64> {
    let (input, output) = (map.input(), map.output().unwrap());
    let (window, max, padding) = match map {
        FixedMap::GlobalAverage { .. } => (
            Window { kernel: [input.height, input.width], stride: [1; 2], padding: [0; 4], dilation: [1; 2] },
            false,
            false,
        ),
        FixedMap::MaxPool { window, .. } => (window, true, false),
        FixedMap::AveragePool { window, count_padding, .. } => (window, false, count_padding),
    };
    let mut out = Vec::new();
    for c in 0..output.channels {
        for oy in 0..output.height {
            for ox in 0..output.width {
                let places = (0..window.area()).filter_map(|k| {
                    let iy = (oy * window.stride[0] + k / window.kernel[1]) as isize - window.padding[0] as isize;
                    let ix = (ox * window.stride[1] + k % window.kernel[1]) as isize - window.padding[1] as isize;
                    at(value, input, c, iy, ix)
                });
                let values: Vec<f64> = places.collect();
                let count = if padding { window.area() } else { values.len() };
                out.push(if max {
                    values.iter().copied().fold(f64::NEG_INFINITY, f64::max)
                } else {
                    values.iter().sum::<f64>() / count as f64
                });
            }
        }
    }
    out
}

fn random(rows: usize, cols: usize, r: &mut Random) -> Matrix<f32> {
    let scale = (1.0 / cols as f64).sqrt();
    Matrix::from_fn(rows, cols, |_, _| (r.normal() * scale) as f32)
}

fn bias(size: usize, r: &mut Random) -> Option<Vec<f32>> {
    Some((0..size).map(|_| r.normal() as f32).collect())
}

fn norm(size: usize, r: &mut Random) -> BatchNorm {
    let mut draw = |f: fn(f64) -> f64| (0..size).map(|_| f(r.normal()) as f32).collect::<Vec<_>>();
    BatchNorm { scale: draw(|v| v), shift: draw(|v| v), mean: draw(|v| v), variance: draw(|v| v * v), epsilon: 1e-5 }
}

fn zoo() -> Vec<(&'static str, Network)> {
    use Activation::{Identity, LeakyRelu, Relu, Sigmoid, Tanh};
    let r = &mut Random::new(7);
    let dense = Network::builder(Shape::Vector(5)).unwrap();
    let dense = dense.linear(random(7, 5, r), bias(7, r)).unwrap().activation(Tanh).unwrap();
    let dense = dense.linear(random(6, 7, r), None).unwrap().activation(LeakyRelu { slope: 0.1 }).unwrap();
    let dense = dense.linear(random(4, 6, r), bias(4, r)).unwrap().activation(Sigmoid).unwrap();
    let dense = dense.linear(random(3, 4, r), bias(3, r)).unwrap().build().unwrap();

    let uneven = Window { kernel: [3, 2], stride: [2, 1], padding: [1, 0, 2, 1], dilation: [1; 2] };
    let conv = Network::builder(Shape::map(2, 7, 6)).unwrap();
    let conv = conv.convolution(random(3, 12, r), uneven, bias(3, r)).unwrap().activation(Relu).unwrap();
    let conv =
        conv.max_pool(Window { kernel: [2, 3], stride: [1, 2], padding: [1, 1, 0, 1], dilation: [1; 2] }).unwrap();
    let conv = conv.convolution(random(4, 27, r), Window::square(3, 1, 1), None).unwrap().activation(Tanh).unwrap();
    let conv = conv.average_pool(Window::square(2, 1, 1), false).unwrap();
    let conv = conv
        .average_pool(Window { kernel: [2, 2], stride: [2, 1], padding: [0, 1, 1, 0], dilation: [1; 2] }, true)
        .unwrap();
    let conv = conv.flatten().unwrap();
    let size = conv.shape().size();
    let conv = conv.linear(random(3, size, r), bias(3, r)).unwrap().build().unwrap();

    let start = Network::builder(Shape::map(3, 6, 6)).unwrap();
    let start = start.convolution(random(4, 27, r), Window::square(3, 1, 1), bias(4, r)).unwrap();
    let start = start.activation(Relu).unwrap();
    let skip = start.here();
    let block = start.convolution(random(4, 36, r), Window::square(3, 1, 1), None).unwrap().activation(Relu).unwrap();
    let block = block.convolution(random(4, 36, r), Window::square(3, 1, 1), bias(4, r)).unwrap();
    let block = block.plus(skip).unwrap().activation(Relu).unwrap();
    let skip = block.here();
    let block = block.convolution(random(5, 36, r), Window::square(3, 2, 1), bias(5, r)).unwrap();
    let main = block.here();
    let block = block.at(skip).unwrap().convolution(random(5, 4, r), Window::square(1, 2, 0), bias(5, r)).unwrap();
    let block = block.plus(main).unwrap().activation(Relu).unwrap();
    let residual = block.global_average().unwrap().linear(random(3, 5, r), bias(3, r)).unwrap().build().unwrap();

    // Pooling and sums without an activation after them, a sum that is read twice, an activation at the output.
    let odd = Network::builder(Shape::map(2, 6, 6)).unwrap();
    let odd = odd.convolution(random(3, 18, r), Window::square(3, 1, 1), bias(3, r)).unwrap();
    let odd = odd.max_pool(Window::square(2, 2, 0)).unwrap().activation(Relu).unwrap();
    let odd = odd.convolution(random(3, 3, r), Window::square(1, 1, 0), None).unwrap();
    let twice = odd.here();
    let odd = odd.activation(Relu).unwrap().plus(twice).unwrap().average_pool(Window::square(2, 1, 0), false).unwrap();
    let odd = odd.flatten().unwrap().linear(random(4, 12, r), bias(4, r)).unwrap();
    let odd = odd.linear(random(4, 4, r), None).unwrap().activation(Identity).unwrap();
    let odd = odd.activation(Tanh).unwrap();
    let same = odd.here();
    let odd = odd.plus(same).unwrap().activation(Sigmoid).unwrap().build().unwrap();

    vec![("dense", dense), ("conv", conv), ("residual", residual), ("odd", odd)]
}

fn inputs(network: &Network, samples: usize) -> Matrix<f32> {
    let r = &mut Random::new(11);
    Matrix::from_fn(samples, network.input_shape().size(), |_, _| r.normal() as f32)
}

fn close(what: &str, ours: impl Iterator<Item = f64>, reference: &[f64], tolerance: f64) {
    let ours: Vec<f64> = ours.collect();
    assert_eq!(ours.len(), reference.len());
    let scale = reference.iter().fold(1e-3f64, |m, v| m.max(v.abs()));
    for (k, (a, b)) in ours.iter().zip(reference).enumerate() {
        assert!((a - b).abs() <= tolerance * scale, "{what}[{k}]: {a} is not {b}");
    }
}

#[test]
fn forward_and_states_equal_the_reference() {
    for (name, network) in zoo() {
        let u = inputs(&network, 3);
        let y = network.forward(&u).unwrap();
        let block = network.states(&u).unwrap();
        let shape = StateMap::shape(&network);
        assert_eq!(
            (block.z.cols(), block.x.cols(), block.y.cols()),
            (shape.states, shape.states, shape.outputs),
            "{name}"
        );
        assert_eq!(y.cast::<f64>(), block.y, "{name}");
        for sample in 0..3 {
            let (z, x, y) = reference(&network, block.u.row(sample), None);
            close(name, block.z.row(sample).iter().copied(), &z, 2e-6);
            close(name, block.x.row(sample).iter().copied(), &x, 2e-6);
            close(name, block.y.row(sample).iter().copied(), &y, 2e-6);
        }
    }
}

#[test]
fn gradients_of_the_model_equal_finite_differences_of_the_network() {
    const H: f64 = 1e-6;
    for (name, network) in zoo() {
        let u = inputs(&network, 2);
        let r = &mut Random::new(3);
        let dy = Matrix::from_fn(2, network.output_shape().size(), |_, _| r.normal() as f32);
        let model = ImplicitModel::from_network(&network).unwrap();
        let gradient = InputGradient::new(&model, EquilibriumSettings::default()).unwrap();
        let (solution, found) = gradient.run(&u, &dy).unwrap();
        let (du_of_model, dz_of_model) = (found.gradient, gradient.pre_activations(&solution.z, &u, &dy).unwrap());
        for sample in 0..2 {
            let at: Vec<f64> = u.row(sample).iter().map(|&v| f64::from(v)).collect();
            let loss = |u: &[f64], nudge| -> f64 {
                reference(&network, u, nudge).2.iter().zip(dy.row(sample)).map(|(y, &d)| y * f64::from(d)).sum()
            };
            let du: Vec<f64> = (0..at.len())
                .map(|k| {
                    let (mut up, mut down) = (at.clone(), at.clone());
                    up[k] += H;
                    down[k] -= H;
                    (loss(&up, None) - loss(&down, None)) / (2.0 * H)
                })
                .collect();
            close(&format!("{name} du"), du_of_model.row(sample).iter().map(|&v| f64::from(v)), &du, 1e-5);
            let dz: Vec<f64> = (0..network.layout().size())
                .map(|k| (loss(&at, Some((k, H))) - loss(&at, Some((k, -H)))) / (2.0 * H))
                .collect();
            close(&format!("{name} dz"), dz_of_model.row(sample).iter().map(|&v| f64::from(v)), &dz, 1e-5);
        }
    }
}

#[test]
fn layers_are_numbered_from_the_last() {
    let networks = zoo();
    let layers = networks[0].1.layout().layers().to_vec();
    assert_eq!(layers.iter().map(|l| l.size).collect::<Vec<_>>(), [4, 6, 7]);
    assert_eq!((layers[2].activation, layers[2].name.as_str()), (Activation::Tanh, "layer_1"));
    let residual = &networks[2].1;
    let first = &residual.pre_activations()[0];
    assert_eq!(first.terms.iter().map(|t| t.source).collect::<Vec<_>>(), [Source::Layer(1); 2]);
    assert_eq!(first.bias.as_ref().unwrap().len(), 5, "two biases of one row are one");
    let second = &residual.pre_activations()[1];
    assert_eq!(second.terms[1], Term { source: Source::Layer(3), maps: vec![], weights: Weights::Identity });
    assert_eq!(residual.layout().layers()[0].map, Some(MapShape { channels: 5, height: 3, width: 3 }));
}

#[test]
fn an_activation_moves_in_front_of_max_pooling() {
    let odd = &zoo()[3].1;
    let layers = odd.layout().layers();
    let first = layers.last().unwrap();
    assert_eq!((first.size, first.activation), (3 * 36, Activation::Relu), "no layer for the pooled sum");
    assert_eq!(layers.iter().filter(|l| l.activation == Activation::Identity).count(), 4);
}

#[test]
fn parameters_and_multiply_adds_are_counted() {
    let taps = Matrix::from_vec(1, 9, vec![1.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0]).unwrap();
    let start = Network::builder(Shape::map(1, 3, 3)).unwrap();
    let network = start.convolution(taps, Window::square(3, 1, 1), Some(vec![0.0])).unwrap().build().unwrap();
    assert_eq!(network.nonzeros(), 7);
    // Corner taps meet 4 positions each, left and right 6, the centre 9.
    assert_eq!(network.multiply_adds(), 4 * 4 + 2 * 6 + 9);
}

#[test]
fn batch_norm_folds_into_what_stands_before_or_after() {
    let r = &mut Random::new(5);
    let (taps, second, fc) = (random(3, 18, r), random(4, 27, r), random(2, 4, r));
    let norms = [norm(3, r), norm(3, r), norm(4, r), norm(4, r)];
    let bias = bias(4, r).unwrap();
    let window = Window::square(3, 1, 1);
    let open = Window::square(3, 1, 0);
    let start = || Network::builder(Shape::map(2, 6, 6)).unwrap();
    let network = start().convolution(taps.clone(), window, None).unwrap().batch_norm(&norms[0]).unwrap();
    let network = network.activation(Activation::Relu).unwrap().batch_norm(&norms[1]).unwrap();
    let network = network.convolution(second.clone(), open, Some(bias.clone())).unwrap().batch_norm(&norms[2]).unwrap();
    let network = network.activation(Activation::Relu).unwrap().batch_norm(&norms[3]).unwrap();
    let network = network.global_average().unwrap().linear(fc.clone(), None).unwrap().build().unwrap();
    assert_eq!(network.layout().layers().len(), 2);

    // The same by hand, batch norm applied to values.
    let u = inputs(&network, 1);
    let apply = |norm: &BatchNorm, x: &mut Vec<f64>, positions: usize| {
        for (k, v) in x.iter_mut().enumerate() {
            let c = k / positions;
            let scale = f64::from(norm.scale[c]) / (f64::from(norm.variance[c]) + f64::from(norm.epsilon)).sqrt();
            *v = (*v - f64::from(norm.mean[c])) * scale + f64::from(norm.shift[c]);
        }
    };
    let relu = |x: &mut Vec<f64>| x.iter_mut().for_each(|v| *v = v.max(0.0));
    let shape = |channels, side| MapShape { channels, height: side, width: side };
    let mut x: Vec<f64> = u.row(0).iter().map(|&v| f64::from(v)).collect();
    x = convolved(&taps, window, shape(2, 6), shape(3, 6), &x);
    apply(&norms[0], &mut x, 36);
    relu(&mut x);
    apply(&norms[1], &mut x, 36);
    x = convolved(&second, open, shape(3, 6), shape(4, 4), &x);
    x.iter_mut().enumerate().for_each(|(k, v)| *v += f64::from(bias[k / 16]));
    apply(&norms[2], &mut x, 16);
    relu(&mut x);
    apply(&norms[3], &mut x, 16);
    x = x.chunks(16).map(|c| c.iter().sum::<f64>() / 16.0).collect();
    let y: Vec<f64> = (0..2).map(|o| fc.row(o).iter().zip(&x).map(|(&w, v)| f64::from(w) * v).sum()).collect();
    let ours = network.forward(&u).unwrap();
    close("folded", ours.row(0).iter().map(|&v| f64::from(v)), &y, 1e-5);
}

#[test]
fn batch_norm_that_cannot_be_folded_is_computed() {
    let r = &mut Random::new(5);
    let window = Window::square(3, 1, 1);
    let taps = random(3, 18, r);
    let u = random(1, 72, r);
    let padded = |norm: &BatchNorm| {
        let start = Network::builder(Shape::map(2, 6, 6)).unwrap().activation(Activation::Relu).unwrap();
        start.batch_norm(norm).unwrap().convolution(taps.clone(), window, None).unwrap().build().unwrap()
    };
    let by_hand = |norm: &BatchNorm| {
        let (scale, shift) = norm.scale_shift(2).unwrap();
        let x: Vec<f64> = u.row(0).iter().map(|&v| f64::from(v.max(0.0))).collect();
        x.iter().enumerate().map(|(k, v)| scale[k / 36] * v + shift[k / 36]).collect::<Vec<_>>()
    };
    let shape = |channels| MapShape { channels, height: 6, width: 6 };
    // With a shift, the zeros of the padding must stay zeros; without one they do so anyway, and the norm is folded.
    let unshifted = BatchNorm { shift: vec![0.0; 2], mean: vec![0.0; 2], ..norm(2, r) };
    for (norm, layers) in [(norm(2, r), 6), (unshifted, 2)] {
        let network = padded(&norm);
        assert_eq!(network.layout().layers().len(), layers);
        let y = convolved(&taps, window, shape(2), shape(3), &by_hand(&norm));
        close("norm", network.forward(&u).unwrap().row(0).iter().map(|&v| f64::from(v)), &y, 1e-5);
    }
    let norm = norm(2, r);
    let start = Network::builder(Shape::map(2, 6, 6)).unwrap().activation(Activation::Relu).unwrap();
    let at_the_end = start.batch_norm(&norm).unwrap().build().unwrap();
    close("end", at_the_end.forward(&u).unwrap().row(0).iter().map(|&v| f64::from(v)), &by_hand(&norm), 1e-6);
    assert_eq!(at_the_end.nonzeros(), 4, "its scales and shifts are parameters");
    let negative = BatchNorm { variance: vec![-1.0; 2], ..norm };
    assert!(Network::builder(Shape::Vector(2)).unwrap().batch_norm(&negative).is_err());
}

/// How often weights stand in a network, and what it computes.
fn weighted(network: &Network) -> usize {
    let rows = network.pre_activations().iter().chain([network.output()]);
    rows.flat_map(|rows| &rows.terms).filter(|term| term.weights != Weights::Identity).count()
}

#[test]
fn a_map_that_is_read_with_and_without_a_batch_norm_stands_once() {
    let r = &mut Random::new(9);
    let (taps, norms) = (random(3, 3, r), [norm(3, r), norm(3, r)]);
    let start = || Network::builder(Shape::Vector(3)).unwrap().linear(taps.clone(), None).unwrap();
    let normed = |k: usize, x: &[f64]| {
        let (scale, shift) = norms[k].scale_shift(3).unwrap();
        (0..3).map(|c| scale[c] * x[c] + shift[c]).collect::<Vec<_>>()
    };
    let relu = |x: Vec<f64>| x.into_iter().map(|v| v.max(0.0)).collect::<Vec<_>>();
    let plus = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a + b).collect::<Vec<_>>();
    let check = |network: &Network, maps: usize, wanted: &dyn Fn(&[f64]) -> Vec<f64>| {
        assert_eq!(weighted(network), maps);
        let u = inputs(network, 1);
        let h: Vec<f64> = (0..3)
            .map(|o| taps.row(o).iter().zip(u.row(0)).map(|(&w, &v)| f64::from(w) * f64::from(v)).sum())
            .collect();
        close("shared", network.forward(&u).unwrap().row(0).iter().map(|&v| f64::from(v)), &wanted(&h), 1e-5);
    };

    // The map itself and one norm of it.
    let builder = start();
    let plain = builder.here();
    let network = builder.batch_norm(&norms[0]).unwrap().plus(plain).unwrap().build().unwrap();
    check(&network, 1, &|h| plus(&normed(0, h), h));
    // Two norms of it, and neither without.
    let builder = start();
    let plain = builder.here();
    let builder = builder.batch_norm(&norms[0]).unwrap().activation(Activation::Relu).unwrap();
    let first = builder.here();
    let builder = builder.at(plain).unwrap().batch_norm(&norms[1]).unwrap().plus(first).unwrap();
    check(&builder.build().unwrap(), 1, &|h| plus(&relu(normed(0, h)), &normed(1, h)));
    // What all of them have in common stays folded: one layer for the map with its norm.
    let builder = start().batch_norm(&norms[0]).unwrap();
    let plain = builder.here();
    let builder = builder.batch_norm(&norms[1]).unwrap().activation(Activation::Relu).unwrap().plus(plain).unwrap();
    let network = builder.build().unwrap();
    check(&network, 1, &|h| plus(&relu(normed(1, &normed(0, h))), &normed(0, h)));
    assert_eq!(network.nonzeros(), 9 + 3 + 6, "weights, the bias of the first norm, scales and shifts of the second");
    // Norms one after the other, read once: all folded.
    let builder = start().batch_norm(&norms[0]).unwrap().batch_norm(&norms[1]).unwrap();
    let network = builder.activation(Activation::Relu).unwrap().build().unwrap();
    check(&network, 1, &|h| relu(normed(1, &normed(0, h))));
    assert_eq!(network.nonzeros(), 12);
}

#[test]
fn shapes_that_do_not_fit_are_errors() {
    let vector = || Network::builder(Shape::Vector(4)).unwrap();
    assert!(Network::builder(Shape::Vector(0)).is_err());
    assert!(vector().linear(Matrix::zeros(2, 5), None).is_err());
    assert!(vector().linear(Matrix::zeros(2, 4), Some(vec![0.0; 3])).is_err());
    assert!(vector().linear(Matrix::from_fn(2, 4, |_, _| f32::NAN), None).is_err());
    assert!(vector().max_pool(Window::square(2, 2, 0)).is_err());
    assert!(vector().reshape(Shape::map(1, 2, 3)).is_err());
    assert!(vector().activation(Activation::LeakyRelu { slope: f32::NAN }).is_err());
    assert!(vector().at(NodeId(5)).is_err());
    let map = Network::builder(Shape::map(1, 4, 4)).unwrap();
    assert!(map.clone().linear(Matrix::zeros(2, 16), None).is_err());
    assert!(map.clone().convolution(Matrix::zeros(2, 8), Window::square(3, 1, 1), None).is_err());
    assert!(map.max_pool(Window::square(2, 2, 2)).is_err());
    let network = vector().build().unwrap();
    assert_eq!(network.layout().size(), 0);
    assert!(network.forward(&Matrix::zeros(1, 3)).is_err());
}

/// An activation that decreases somewhere must not move in front of a maximum.
#[test]
fn only_activations_that_do_not_decrease_move_in_front_of_a_max_pooling() {
    let r = &mut Random::new(91);
    let taps = random(2, 9, r);
    for activation in [Activation::Silu, Activation::Relu] {
        let network = Network::builder(Shape::map(1, 6, 6))
            .and_then(|b| b.convolution(taps.clone(), Window::square(3, 1, 1), None))
            .and_then(|b| b.max_pool(Window::square(2, 2, 0)))
            .and_then(|b| b.activation(activation))
            .and_then(NetworkBuilder::build)
            .unwrap();
        let moved = network.layout().layers().len() == 1;
        assert_eq!(moved, activation == Activation::Relu);
        let u = random(3, 36, r);
        let y = network.forward(&u).unwrap();
        for s in 0..3 {
            let at = |c: usize, i: usize, j: usize| -> f64 {
                let mut sum = 0.0;
                for (k, w) in taps.row(c).iter().enumerate() {
                    let (row, column) = (i + k / 3, j + k % 3);
                    if (1..7).contains(&row) && (1..7).contains(&column) {
                        sum += f64::from(*w) * f64::from(u[(s, (row - 1) * 6 + column - 1)]);
                    }
                }
                sum
            };
            for k in 0..18 {
                let (c, i, j) = (k / 9, k / 3 % 3 * 2, k % 3 * 2);
                let largest = [at(c, i, j), at(c, i, j + 1), at(c, i + 1, j), at(c, i + 1, j + 1)];
                let expected = activation.apply_f64(largest.into_iter().fold(f64::NEG_INFINITY, f64::max));
                assert!((f64::from(y[(s, k)]) - expected).abs() < 1e-5, "{activation} {s} {k}");
            }
        }
        assert_eq!(network.states(&u).unwrap().y, y.cast());
    }
}

/// Attention over tokens, a layer norm, squeeze and excite, a concatenation and a grouped, dilated convolution.
fn with_operators(r: &mut Random) -> Network {
    use crate::graph::{Binary, Dims, Reduction, Structure};
    let tokens = Dims::new(&[1, 6, 4]).unwrap();
    let transpose = |order: &[usize]| Structure::Transpose { order: order.to_vec() };
    let window = Window { dilation: [2, 1], ..Window::square(3, 1, 1) };
    let start = Network::builder(Shape::map(4, 5, 3))
        .and_then(|b| b.grouped_convolution(random(4, 18, r), window, 2, Some(vec![0.1; 4])))
        .and_then(|b| b.activation(Activation::Gelu))
        .unwrap();
    let map = start.here();
    // Squeeze: the mean of every channel, through a linear map and a sigmoid, times the map.
    let squeeze = start
        .structure(Structure::Reduce { reduction: Reduction::Mean, axes: vec![2, 3], keep: false }, &[])
        .and_then(|b| b.linear(random(4, 4, r), None))
        .and_then(|b| b.activation(Activation::Sigmoid))
        .and_then(|b| b.structure(Structure::Reshape { dims: Dims::new(&[1, 4, 1, 1]).unwrap() }, &[]))
        .and_then(|b| b.structure(Structure::Binary(Binary::Multiply), &[map]))
        .unwrap();
    let excited = squeeze.here();
    let size = squeeze.shape().size();
    let tokens_of = Dims::new(&[1, size / 4, 4]).unwrap();
    assert_eq!(size % 4, 0);
    let scale = squeeze.constant(Dims::new(&[1, 1, 4]).unwrap(), vec![0.5, 1.5, -1.0, 2.0], true).unwrap();
    let scale_at = scale.here();
    let normed = scale
        .at(excited)
        .and_then(|b| b.structure(Structure::Reshape { dims: tokens_of }, &[]))
        .and_then(|b| b.structure(Structure::Slice { axis: 1, start: 0, step: 1, count: 6 }, &[]))
        .and_then(|b| b.structure(Structure::Normalise { axis: 2, epsilon: 1e-3 }, &[]))
        .and_then(|b| b.structure(Structure::Binary(Binary::Multiply), &[scale_at]))
        .unwrap();
    assert_eq!(normed.shape().dims(), tokens);
    let x = normed.here();
    let keys = normed.structure(transpose(&[0, 2, 1]), &[]).unwrap();
    let keys_at = keys.here();
    let attended = keys
        .at(x)
        .and_then(|b| b.structure(Structure::MatMul, &[keys_at]))
        .and_then(|b| b.structure(Structure::Softmax { axis: 2 }, &[]))
        .and_then(|b| b.structure(Structure::MatMul, &[x]))
        .and_then(|b| b.structure(Structure::Concat { axis: 2 }, &[x]))
        .unwrap();
    attended.flatten().and_then(|b| b.linear(random(3, 48, r), None)).and_then(NetworkBuilder::build).unwrap()
}

#[test]
fn gradients_through_operators_are_what_differences_say() {
    let r = &mut Random::new(92);
    let network = with_operators(r);
    let (u, dy) = (random(2, 60, r), random(2, 3, r));
    let y = network.forward(&u).unwrap();
    assert_eq!(network.states(&u).unwrap().y, y.cast());
    let model = ImplicitModel::from_network(&network).unwrap();
    let gradient = InputGradient::new(&model, EquilibriumSettings::default()).unwrap();
    let du = gradient.run(&u, &dy).unwrap().1.gradient;
    let loss = |u: &Matrix<f32>| -> f64 {
        let y = network.forward(u).unwrap();
        y.as_slice().iter().zip(dy.as_slice()).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
    };
    let largest = du.as_slice().iter().fold(0.0f64, |m, v| m.max(f64::from(v.abs())));
    assert!(largest > 0.01);
    for k in 0..120 {
        let (s, j, h) = (k / 60, k % 60, 4e-3f32);
        let moved = |by: f32| {
            let mut u = u.clone();
            u[(s, j)] += by;
            loss(&u)
        };
        let numeric = (moved(h) - moved(-h)) / (2.0 * f64::from(h));
        // Rounding of the outputs over 2h is about 10⁻⁴ of them; h² times a third derivative is less.
        let off = (numeric - f64::from(du[(s, j)])).abs();
        assert!(off < 2e-3 * (1.0 + largest), "{s} {j}: {numeric} and {}", du[(s, j)]);
    }
}
