//! Products against differences and against each other.

use super::*;
use crate::equilibrium::{Equilibrium, EquilibriumSettings};
use crate::graph::{Binary, Dims, Structure};
use crate::layout::{Activation, Layer};
use crate::linalg::Csr;
use crate::model::ModelParts;
use crate::network::{Network, Shape, Window};
use crate::random::Random;

const SAMPLES: usize = 5;

/// A model with tanh, so that differences approximate the derivative; `density` may be zero where a layer reads
/// itself or a later one.
fn model(cyclic: bool, random: &mut Random) -> ImplicitModel {
    let layout =
        Layout::new(vec![Layer::dense("second", 3, Activation::Tanh), Layer::dense("first", 4, Activation::Tanh)]);
    let mut sparse = |rows: usize, cols: usize, size: f64, allowed: &dyn Fn(usize, usize) -> bool| {
        Csr::from_dense(&Matrix::from_fn(rows, cols, |i, j| {
            if allowed(i, j) && random.uniform() < 0.6 { (size * random.normal()) as f32 } else { 0.0 }
        }))
    };
    ImplicitModel::new(ModelParts {
        a: sparse(7, 7, 0.15, &|i, j| cyclic || (i < 3 && j >= 3)),
        b: sparse(7, 6, 0.7, &|_, _| true),
        c: sparse(2, 7, 0.7, &|_, _| true),
        d: sparse(2, 6, 0.7, &|_, _| true),
        state_bias: vec![0.1, 0.0, -0.2, 0.3, 0.0, 0.2, 0.1],
        output_bias: vec![0.4, 0.0],
        layout,
        ..Default::default()
    })
    .unwrap()
}

/// The place of every non-zero in (A B b; C D d), found by its value.
fn places(support: &Linearised, model: &ImplicitModel) -> Vec<(usize, usize)> {
    let numbers: Vec<f64> = (0..support.entries().len()).map(|k| k as f64 + 1.0).collect();
    let marked = support.with_weights(model, &numbers, false).unwrap();
    let (n, p) = (marked.shape().states, marked.shape().inputs);
    let mut out = vec![(usize::MAX, 0); numbers.len()];
    for (first, column, matrix) in [(0, 0, marked.a()), (0, n, marked.b()), (n, 0, marked.c()), (n, n, marked.d())] {
        for i in 0..matrix.rows() {
            matrix.row(i).for_each(|(j, v)| out[v as usize - 1] = (first + i, column + j));
        }
    }
    let biases = marked.state_bias().iter().chain(marked.output_bias()).enumerate();
    biases.filter(|(_, v)| **v != 0.0).for_each(|(i, v)| out[*v as usize - 1] = (i, n + p));
    out
}

/// z and y in double precision by their definition: plain iteration until nothing changes.
fn reference(places: &[(usize, usize)], w: &[f64], u: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let (n, p) = (7, 6);
    let row = |x: &[f64], i: usize| -> f64 {
        let feature = |j: usize| {
            if j < n {
                x[j]
            } else if j < n + p {
                u[j - n]
            } else {
                1.0
            }
        };
        places.iter().zip(w).filter(|((r, _), _)| *r == i).map(|((_, j), w)| w * feature(*j)).sum()
    };
    let mut z = vec![0.0; n];
    for _ in 0..500 {
        let x: Vec<f64> = z.iter().map(|z: &f64| z.tanh()).collect();
        z = (0..n).map(|i| row(&x, i)).collect();
    }
    let x: Vec<f64> = z.iter().map(|z: &f64| z.tanh()).collect();
    (z, (n..n + 2).map(|i| row(&x, i)).collect())
}

/// ⟨v, δy⟩ + ⟨c, δz⟩ is the gradient times the change.
fn transposes(support: &Linearised, w: &[f64], at: &Samples, random: &mut Random) {
    let change: Vec<f64> = w.iter().map(|_| random.normal()).collect();
    let m = support.dense(w);
    let (dz, dy) = support.forward(&m, &support.dense(&change), at);
    let v = Matrix::from_fn(dy.rows(), dy.cols(), |_, _| random.normal() as f32);
    let c = Matrix::from_fn(dz.rows(), dz.cols(), |_, _| random.normal() as f32);
    let gradient = support.spread(&support.backward(&m, &v, &c, at));
    let pairs = || v.as_slice().iter().zip(dy.as_slice()).chain(c.as_slice().iter().zip(dz.as_slice()));
    let expected: f64 = pairs().map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
    let got: f64 = gradient.iter().zip(&change).map(|(g, c)| g * c).sum();
    // Relative to the norms of both sides, because sums of many terms of both signs are only accurate relative to
    // these.
    let size = pairs().map(|(a, _)| f64::from(*a).powi(2)).sum::<f64>().sqrt()
        * pairs().map(|(_, b)| f64::from(*b).powi(2)).sum::<f64>().sqrt();
    assert!((got - expected).abs() < 1e-5 * size, "{got} against {expected}, size {size}");
}

#[test]
fn products_match_differences_and_each_other_with_and_without_cycles() {
    for cyclic in [false, true] {
        let mut random = Random::new(11);
        let model = model(cyclic, &mut random);
        let (support, w) = Linearised::of(&model);
        assert_eq!(support.acyclic, !cyclic);
        assert_eq!(w.len() as u64, model.sparsity().nonzeros);
        assert_eq!(support.with_weights(&model, &w, false).unwrap().to_bytes(), model.to_bytes());
        let places = places(&support, &model);
        let u = Matrix::from_fn(SAMPLES, 6, |_, _| random.normal() as f32);
        let solution = Equilibrium::new(&model, EquilibriumSettings::default()).unwrap().run(&u).unwrap();
        let gates = gates(model.layout(), &solution.z);
        let at = Samples { u: &u, x: &solution.x, gates: &gates };
        let change: Vec<f64> = w.iter().map(|_| random.normal()).collect();
        let m = support.dense(&w);
        let (dz, dy) = support.forward(&m, &support.dense(&change), &at);
        let h = 1e-5;
        for s in 0..SAMPLES {
            let input: Vec<f64> = u.row(s).iter().map(|v| f64::from(*v)).collect();
            let moved = |sign: f64| {
                let w: Vec<f64> = w.iter().zip(&change).map(|(w, c)| w + sign * h * c).collect();
                reference(&places, &w, &input)
            };
            let (up, down) = (moved(1.0), moved(-1.0));
            for (k, got) in dz.row(s).iter().enumerate() {
                let expected = (up.0[k] - down.0[k]) / (2.0 * h);
                assert!((f64::from(*got) - expected).abs() < 1e-4 * expected.abs().max(1.0), "{got} {expected}");
            }
            for (k, got) in dy.row(s).iter().enumerate() {
                let expected = (up.1[k] - down.1[k]) / (2.0 * h);
                assert!((f64::from(*got) - expected).abs() < 1e-4 * expected.abs().max(1.0), "{got} {expected}");
            }
        }
        transposes(&support, &w, &at, &mut random);
    }
}

/// Stride, grouped and padded convolutions, a residual sum, both poolings, a linear layer behind a pooling.
fn convolutional(random: &mut Random) -> ImplicitModel {
    let mut weights = |rows, cols| {
        Matrix::from_fn(rows, cols, |_, _| if random.uniform() < 0.6 { 0.4 * random.normal() as f32 } else { 0.0 })
    };
    let first = Network::builder(Shape::map(2, 7, 6))
        .and_then(|b| b.convolution(weights(4, 18), Window::square(3, 1, 1), Some(vec![0.1, 0.0, -0.2, 0.3])))
        .and_then(|b| b.activation(Activation::Tanh))
        .unwrap();
    let residual = first.here();
    let network = first
        .grouped_convolution(weights(4, 18), Window::square(3, 1, 1), 2, None)
        .and_then(|b| b.plus(residual))
        .and_then(|b| b.activation(Activation::Tanh))
        .and_then(|b| b.max_pool(Window::square(2, 1, 0)))
        .and_then(|b| b.convolution(weights(6, 36), Window::square(3, 2, 1), Some(vec![0.2; 6])))
        .and_then(|b| b.activation(Activation::Tanh))
        .and_then(|b| b.average_pool(Window::square(2, 1, 0), false))
        .and_then(|b| b.flatten())
        .and_then(|b| b.linear(weights(5, 24), Some(vec![0.1; 5])))
        .and_then(|b| b.activation(Activation::Tanh))
        .and_then(|b| b.linear(weights(3, 5), None))
        .and_then(|b| b.build())
        .unwrap();
    ImplicitModel::from_network(&network).unwrap()
}

/// Four tokens of three channels: a map of all tokens, softmax of products of every two, their mixture, layer norm, and a
/// product of the layer with itself.
fn attending(random: &mut Random) -> ImplicitModel {
    let mut weights = |rows, cols| Matrix::from_fn(rows, cols, |_, _| 0.6 * random.normal() as f32);
    let plain = Window::square(1, 1, 0);
    let tokens = Network::builder(Shape::map(3, 2, 2))
        .and_then(|b| b.convolution(weights(3, 3), plain, Some(vec![0.1, -0.1, 0.2])))
        .and_then(|b| b.activation(Activation::Tanh))
        .and_then(|b| b.structure(Structure::Reshape { dims: Dims::new(&[1, 3, 4]).unwrap() }, &[]))
        .unwrap();
    let at = tokens.here();
    let turned = tokens.structure(Structure::Transpose { order: vec![0, 2, 1] }, &[]).unwrap();
    let turned_at = turned.here();
    let normed = turned
        .structure(Structure::MatMul, &[at])
        .and_then(|b| b.structure(Structure::Softmax { axis: 2 }, &[]))
        .and_then(|b| b.structure(Structure::MatMul, &[turned_at]))
        .and_then(|b| b.structure(Structure::Normalise { axis: 2, epsilon: 0.1 }, &[]))
        .unwrap();
    let normed_at = normed.here();
    let network = normed
        .structure(Structure::Binary(Binary::Multiply), &[normed_at])
        .and_then(|b| b.flatten())
        .and_then(|b| b.linear(weights(5, 12), None))
        .and_then(|b| b.activation(Activation::Tanh))
        .and_then(|b| b.linear(weights(2, 5), Some(vec![0.3, 0.1])))
        .and_then(|b| b.build())
        .unwrap();
    ImplicitModel::from_network(&network).unwrap()
}

/// For every sample, the place of the largest value in every window of every maximum.
fn maxima(model: &ImplicitModel, x: &Matrix<f32>) -> Vec<Vec<usize>> {
    let layers = model.taps().iter().filter(|b| b.maps.iter().any(|map| !map.is_linear()));
    let mut out = vec![Vec::new(); x.rows()];
    for block in layers {
        let Source::Layer(k) = block.source else { panic!("a maximum of the inputs") };
        let positions = block.maps[0].input().positions();
        for (sample, out) in out.iter_mut().enumerate() {
            for channel in x.row(sample)[model.layout().range(k)].chunks_exact(positions) {
                let largest =
                    |window: &Vec<usize>| window.iter().copied().max_by(|a, b| channel[*a].total_cmp(&channel[*b]));
                out.extend(block.maps[0].windows().iter().filter_map(largest));
            }
        }
    }
    out
}

#[test]
fn products_of_convolutions_poolings_residuals_and_operators_match_differences_and_each_other() {
    let mut random = Random::new(21);
    for model in [convolutional(&mut random), attending(&mut random)] {
        let (support, w) = Linearised::of(&model);
        assert_eq!(w.len() as u64, model.sparsity().nonzeros);
        assert_eq!(support.with_weights(&model, &w, false).unwrap().to_bytes(), model.to_bytes());
        let u = Matrix::from_fn(4 * SAMPLES, model.shape().inputs, |_, _| random.normal() as f32);
        let run =
            |model: &ImplicitModel| Equilibrium::new(model, EquilibriumSettings::default()).unwrap().run(&u).unwrap();
        let solution = run(&model);
        let gates = gates(model.layout(), &solution.z);
        let at = Samples { u: &u, x: &solution.x, gates: &gates };
        transposes(&support, &w, &at, &mut random);
        let m = support.dense(&w);
        // One layer's weights at a time, then all together: an error in one block must not hide behind the others.
        let rows: Vec<Range<usize>> = support.targets().iter().map(|t| t.entries.clone()).collect();
        for moving in rows.iter().cloned().chain(std::iter::once(0..w.len())) {
            let change: Vec<f64> =
                (0..w.len()).map(|k| if moving.contains(&k) { random.normal() } else { 0.0 }).collect();
            let (dz, dy) = support.forward(&m, &support.dense(&change), &at);
            let h = 5e-4;
            let moved = |sign: f64| {
                let w: Vec<f64> = w.iter().zip(&change).map(|(w, c)| w + sign * h * c).collect();
                run(&support.with_weights(&model, &w, false).unwrap())
            };
            let (up, down) = (moved(1.0), moved(-1.0));
            // If the largest value of a window changes its place within the step, differences give another slope.
            let places = [&up, &down, &solution].map(|s| maxima(&model, &s.x));
            let smooth: Vec<usize> = (0..u.rows()).filter(|&s| places.iter().all(|p| p[s] == places[2][s])).collect();
            assert!(4 * smooth.len() >= u.rows(), "{} samples without a kink", smooth.len());
            for (got, up, down) in [(&dz, &up.z, &down.z), (&dy, &up.y, &down.y)] {
                let size = got.as_slice().iter().fold(0.1f32, |a, v| a.max(v.abs()));
                for &s in &smooth {
                    for (k, got) in got.row(s).iter().enumerate() {
                        // Allows for single precision divided by 2h, and the third derivative times h²/6.
                        let expected = (up[(s, k)] - down[(s, k)]) / (2.0 * h as f32);
                        assert!((got - expected).abs() < 3e-3 * size, "sample {s}, {k}: {got} {expected} of {size}");
                    }
                }
            }
        }
    }
}
