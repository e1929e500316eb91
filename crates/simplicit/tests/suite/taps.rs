//! Models with tap blocks: convolutional networks as implicit models, run, differentiated, stored, counted.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr)] // helpers of tests are tests

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::common::adjoint::slopes;
use crate::common::data;
use simplicit::arrays::{Array, Inputs, Labels, Preprocessing, Selection};
use simplicit::equilibrium::{Equilibrium, EquilibriumSettings, EquilibriumSolution, InputGradient, LayerSum};
use simplicit::evaluate::{equilibrium_error, layer_errors};
use simplicit::layout::{Activation, Layer, Layout, MapShape};
use simplicit::linalg::{Csr, Matrix};
use simplicit::model::{ImplicitModel, ModelParts, TapBlock, TapWeights, Target};
use simplicit::network::{Network, Shape, Source, Window};
use simplicit::onnx::{OnnxSettings, to_onnx};
use simplicit::parallel::{Cancel, Threads};
use simplicit::random::Random;
use simplicit::states::{InputSource, StateMap};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data")
}

fn random(rows: usize, cols: usize, seed: u64) -> Matrix<f32> {
    let mut r = Random::new(seed);
    let scale = 1.0 / (cols as f64).sqrt();
    // A third of the weights are zero, so that kernels have gaps.
    Matrix::from_fn(rows, cols, |_, _| if r.uniform() < 0.33 { 0.0 } else { (r.normal() * scale) as f32 })
}

fn bias(rows: usize, seed: u64) -> Option<Vec<f32>> {
    let mut r = Random::new(seed);
    Some((0..rows).map(|_| (0.3 * r.normal()) as f32).collect())
}

/// Convolution, maximum, convolution, residual block with a stride-2 1 × 1 shortcut, an average, dense layers.
fn small() -> Network {
    let start = Network::builder(Shape::map(1, 28, 28))
        .unwrap()
        .convolution(
            random(4, 9, 1),
            Window { kernel: [3, 3], stride: [2, 2], padding: [1, 0, 0, 1], dilation: [1; 2] },
            bias(4, 2),
        )
        .unwrap()
        .activation(Activation::Relu)
        .unwrap()
        .max_pool(Window { kernel: [3, 2], stride: [2, 2], padding: [1, 0, 0, 0], dilation: [1; 2] })
        .unwrap();
    let here = start.shape();
    let pooled = start.here();
    let block = start
        .convolution(random(6, 4 * 9, 3), Window::square(3, 2, 1), bias(6, 4))
        .unwrap()
        .activation(Activation::LeakyRelu { slope: 0.2 })
        .unwrap()
        .convolution(random(6, 6 * 9, 5), Window::square(3, 1, 1), bias(6, 6))
        .unwrap();
    assert!(matches!(here, Shape::Map(MapShape { channels: 4, .. })), "{here}");
    let inner = block.here();
    let joined = block
        .at(pooled)
        .unwrap()
        .convolution(random(6, 4, 7), Window::square(1, 2, 0), bias(6, 8))
        .unwrap()
        .plus(inner)
        .unwrap()
        .activation(Activation::Relu)
        .unwrap();
    let skip = joined.here();
    joined
        .convolution(
            random(6, 6 * 6, 9),
            Window { kernel: [2, 3], stride: [1, 1], padding: [1, 1, 0, 1], dilation: [1; 2] },
            None,
        )
        .unwrap()
        .plus(skip)
        .unwrap()
        .activation(Activation::Tanh)
        .unwrap()
        .average_pool(Window { kernel: [2, 2], stride: [1, 2], padding: [0, 1, 1, 0], dilation: [1; 2] }, false)
        .unwrap()
        .flatten()
        .unwrap()
        .linear(random(7, 6 * 4 * 2, 11), bias(7, 12))
        .unwrap()
        .activation(Activation::Relu)
        .unwrap()
        .linear(random(5, 7, 13), bias(5, 14))
        .unwrap()
        .build()
        .unwrap()
}

/// Two convolutions with a residual, a global average and a classifier; a maximum of the inputs in front.
fn headed() -> Network {
    let start = Network::builder(Shape::map(3, 9, 7))
        .unwrap()
        .max_pool(Window::square(2, 1, 0))
        .unwrap()
        .convolution(random(5, 27, 21), Window::square(3, 1, 1), bias(5, 22))
        .unwrap()
        .activation(Activation::Relu)
        .unwrap();
    let skip = start.here();
    start
        .convolution(random(5, 45, 23), Window::square(3, 1, 1), None)
        .unwrap()
        .plus(skip)
        .unwrap()
        .activation(Activation::Relu)
        .unwrap()
        .global_average()
        .unwrap()
        .linear(random(4, 5, 24), bias(4, 25))
        .unwrap()
        .build()
        .unwrap()
}

/// A dense network with a skip around a layer.
fn dense_residual() -> Network {
    let start = Network::builder(Shape::Vector(6))
        .unwrap()
        .linear(random(5, 6, 31), bias(5, 32))
        .unwrap()
        .activation(Activation::Relu)
        .unwrap();
    let skip = start.here();
    start
        .linear(random(5, 5, 33), None)
        .unwrap()
        .plus(skip)
        .unwrap()
        .activation(Activation::Relu)
        .unwrap()
        .linear(random(3, 5, 34), None)
        .unwrap()
        .build()
        .unwrap()
}

fn networks() -> Vec<(&'static str, Network)> {
    vec![("small", small()), ("headed", headed()), ("dense residual", dense_residual())]
}

fn inputs(network: &Network, samples: usize, seed: u64) -> Matrix<f32> {
    let mut r = Random::new(seed);
    Matrix::from_fn(samples, network.shape().inputs, |_, _| r.normal() as f32)
}

fn assert_close(what: &str, ours: &[f32], theirs: &[f32], tolerance: f32) {
    assert_eq!(ours.len(), theirs.len(), "{what}");
    let scale = theirs.iter().fold(1e-3f32, |m, v| m.max(v.abs()));
    for (k, (a, b)) in ours.iter().zip(theirs).enumerate() {
        assert!((a - b).abs() <= tolerance * scale, "{what}[{k}]: {a} is not {b}");
    }
}

fn one_thread() -> EquilibriumSettings {
    EquilibriumSettings { threads: Threads::one(), ..Default::default() }
}

#[test]
fn states_and_outputs_are_the_networks_whatever_the_batch() {
    for (name, network) in networks() {
        let model = ImplicitModel::from_network(&network).unwrap();
        assert_eq!(model.layout(), network.layout(), "{name}");
        let u = inputs(&network, 37, 5);
        let wanted = network.states(&u).unwrap();
        let equilibrium = Equilibrium::new(&model, one_thread()).unwrap();
        let solution = equilibrium.run(&u).unwrap();
        let found = equilibrium.states(&u).unwrap();
        for (what, ours, theirs) in [("z", &found.z, &wanted.z), ("x", &found.x, &wanted.x), ("y", &found.y, &wanted.y)]
        {
            let cast = |m: &Matrix| m.cast::<f32>().into_vec();
            assert_close(&format!("{name} {what}"), &cast(ours), &cast(theirs), 1e-5);
        }
        assert_eq!(equilibrium.outputs(&u).unwrap().y, solution.y, "{name}");
        for (i, sample) in solution.diagnostics.iter().enumerate() {
            assert!(sample.converged && sample.iterations == 1 && sample.residual == 0.0, "{name}");
            // The certificate covers the distance to double precision, and is not absurd.
            let y = solution
                .y
                .row(i)
                .iter()
                .zip(wanted.y.row(i))
                .map(|(a, b)| (f64::from(*a) - b).abs())
                .fold(0.0, f64::max);
            assert!(y <= 2.0 * sample.output_error && sample.output_error < 1.0, "{name}: {y} {}", sample.output_error);
        }
        // A sample alone, few, a full block: the same bits.
        for count in [1, 3, 8, 11, 16] {
            let few = Matrix::from_vec(count, u.cols(), u.as_slice()[..count * u.cols()].to_vec()).unwrap();
            let alone = equilibrium.run(&few).unwrap();
            for i in 0..count {
                assert_eq!((alone.x.row(i), alone.y.row(i)), (solution.x.row(i), solution.y.row(i)), "{name} {count}");
            }
        }
        let threaded = Equilibrium::new(&model, EquilibriumSettings { threads: Threads::new(3), ..Default::default() });
        let threaded = threaded.unwrap().run(&u).unwrap();
        // One by one: a whole solution would fill pages.
        for i in 0..u.rows() {
            assert_eq!(threaded.diagnostics[i], solution.diagnostics[i], "{name} {i}");
            let rows = |s: &EquilibriumSolution| [s.z.row(i).to_vec(), s.x.row(i).to_vec(), s.y.row(i).to_vec()];
            for (a, b) in rows(&threaded).iter().zip(&rows(&solution)) {
                for (k, (a, b)) in a.iter().zip(b).enumerate() {
                    assert_eq!(a, b, "{name}, sample {i}, unit {k}");
                }
            }
        }
        let mut bad = u.clone();
        bad[(20, 1)] = f32::NAN;
        let message = equilibrium.outputs(&bad).unwrap_err().to_string();
        assert!(message.contains("row 20, column 1"), "{name}: {message}");
    }
}

#[test]
fn counts_are_the_networks() {
    for (name, network) in networks() {
        let model = ImplicitModel::from_network(&network).unwrap();
        let counted = model.sparsity();
        assert_eq!(counted.nonzeros, network.nonzeros() as u64, "{name}");
        assert_eq!(counted.multiply_adds, network.multiply_adds(), "{name}");
        assert_eq!(counted.sparsity, 0.0, "{name}");
        let rows: usize = counted.layers.iter().map(|l| l.rows).sum();
        assert_eq!(rows, model.state_bias().len(), "{name}");
        let per_layer: usize = counted.layers.iter().map(|l| l.nonzeros).sum();
        assert_eq!(per_layer, counted.letters.a + counted.letters.b + counted.letters.state_bias, "{name}");
        assert_eq!(counted.bytes, model.to_bytes().len() as u64, "{name}");
    }
    let identity = ImplicitModel::from_network(&dense_residual()).unwrap();
    assert!(matches!(identity.taps(), [TapBlock { weights: TapWeights::Identity, .. }]));
}

#[test]
fn channels_nobody_reads_are_counted() {
    let mut parts = ImplicitModel::from_network(&headed()).unwrap().into_parts();
    for block in &mut parts.taps {
        // Nothing reads channel 2 of the last layer any more; the first layer is read by a residual.
        if let (Target::Output, TapWeights::Taps(taps)) = (block.target, &block.weights) {
            let rows: Vec<Vec<_>> = (0..taps.rows()).map(|o| taps.row(o).filter(|(j, _)| *j != 2).collect()).collect();
            block.weights = TapWeights::Taps(Csr::from_rows(taps.cols(), rows));
        }
    }
    let layers = ImplicitModel::new(parts).unwrap().sparsity().layers;
    assert_eq!(layers.iter().map(|l| (l.rows, l.unread)).collect::<Vec<_>>(), [(5, 1), (5, 0)]);
}

#[test]
fn gradients_are_those_of_the_terms_and_finite_differences() {
    for (name, network) in networks() {
        let model = ImplicitModel::from_network(&network).unwrap();
        let u = inputs(&network, 19, 6);
        let mut r = Random::new(7);
        let v = Matrix::from_fn(19, network.shape().outputs, |_, _| r.normal() as f32);
        let gradient = InputGradient::new(&model, one_thread()).unwrap();
        let (solution, found) = gradient.run(&u, &v).unwrap();
        let wanted = slopes(&network, &u, &v);
        let du: Vec<f32> = wanted.iter().flat_map(|w| w.du.iter().map(|v| *v as f32)).collect();
        assert_close(name, found.gradient.as_slice(), &du, 2e-5);
        match gradient.at(&solution.z, &v) {
            Ok(at) => assert_eq!(at, found, "{name}"),
            // A maximum of the inputs cannot be found again from z.
            Err(e) => assert!(name == "headed" && e.to_string().contains("use InputGradient::run"), "{name}: {e}"),
        }
        for (i, sample) in found.diagnostics.iter().enumerate() {
            let error: f64 =
                found.gradient.row(i).iter().zip(&wanted[i].du).map(|(a, b)| (f64::from(*a) - b).abs()).sum();
            assert!(sample.converged && error <= sample.output_error, "{name}: {error} {}", sample.output_error);
        }
        // The slope of v·y along a direction, where no kink is near: most samples must agree.
        let equilibrium = gradient.equilibrium();
        let direction = inputs(&network, 19, 8);
        let step = 1e-3;
        let moved = |sign: f32| {
            let at = Matrix::from_fn(19, u.cols(), |i, j| u[(i, j)] + sign * step * direction[(i, j)]);
            equilibrium.outputs(&at).unwrap().y
        };
        let (up, down) = (moved(1.0), moved(-1.0));
        let mut close = 0;
        for i in 0..19 {
            let slope: f64 = (0..v.cols())
                .map(|k| {
                    f64::from(v[(i, k)]) * (f64::from(up[(i, k)]) - f64::from(down[(i, k)])) / f64::from(2.0 * step)
                })
                .sum();
            let exact: f64 = (0..u.cols()).map(|j| f64::from(found.gradient[(i, j)] * direction[(i, j)])).sum();
            close += usize::from((slope - exact).abs() <= 0.05 * (0.1 + exact.abs()));
        }
        assert!(close >= 15, "{name}: {close} of 19 slopes agree");
    }
}

#[test]
fn one_layer_at_a_time() {
    for (name, network) in networks() {
        let model = ImplicitModel::from_network(&network).unwrap();
        let u = inputs(&network, 21, 9);
        let solution = Equilibrium::new(&model, one_thread()).unwrap().run(&u).unwrap();
        let part = |all: &Matrix<f32>, k: usize| {
            let range = model.layout().range(k);
            Matrix::from_fn(all.rows(), range.len(), |i, j| all[(i, range.start + j)])
        };
        let layers: Vec<Matrix<f32>> = (0..model.layout().layers().len()).map(|k| part(&solution.x, k)).collect();
        let source = |place: Source| match place {
            Source::Input => &u,
            Source::Layer(k) => &layers[k],
        };
        let values = |place: Source| source(place).as_slice();
        for k in 0..layers.len() {
            let sum = LayerSum::new(&model, Target::Layer(k));
            let z = sum.pre_activations(21, values).unwrap();
            assert_close(&format!("{name} layer {k}"), z.as_slice(), part(&solution.z, k).as_slice(), 1e-6);
            assert!(sum.pre_activations(22, values).is_err());
        }
        let y = LayerSum::new(&model, Target::Output).pre_activations(21, values).unwrap();
        assert_close(&format!("{name} output"), y.as_slice(), solution.y.as_slice(), 1e-6);
        // Summand by summand: bias, entries and what every block gives add up to the whole.
        let bias = model.unit_bias();
        for k in 0..layers.len() {
            let range = model.layout().range(k);
            let mut z = Matrix::from_fn(21, range.len(), |s, j| {
                let entries =
                    |m: &Csr<f32>, x: &Matrix<f32>| m.row(range.start + j).map(|(i, v)| v * x[(s, i)]).sum::<f32>();
                bias[range.start + j] + entries(model.a(), &solution.x) + entries(model.b(), &u)
            });
            for block in model.taps().iter().filter(|b| b.target == Target::Layer(k)) {
                let more = block.apply(source(block.source)).unwrap();
                z.as_mut_slice().iter_mut().zip(more.as_slice()).for_each(|(z, v)| *z += v);
                assert!(block.apply(&Matrix::zeros(21, 1)).is_err());
            }
            assert_close(&format!("{name} summands of {k}"), z.as_slice(), part(&solution.z, k).as_slice(), 1e-5);
        }
    }
}

#[test]
fn files_survive_bit_by_bit() {
    for (name, network) in networks() {
        let model = ImplicitModel::from_network(&network).unwrap();
        let bytes = model.to_bytes();
        let read = ImplicitModel::from_bytes(&bytes, "m").unwrap();
        assert!(read == model, "{name}");
        assert_eq!(read.to_bytes(), bytes, "{name}");
        safetensors::SafeTensors::deserialize(&bytes).unwrap();
        // Damage is refused or harmless, never a panic.
        let mut r = Random::new(3);
        for _ in 0..2000 {
            let mut damaged = bytes.clone();
            let at = r.below(damaged.len().min(6000));
            damaged[at] ^= 1 << r.below(8);
            if let Ok(model) = ImplicitModel::from_bytes(&damaged, "m") {
                let _ = model.sparsity();
            }
        }
    }
}

#[test]
fn cycles_and_misfits_are_refused() {
    let layer = |name: &str| Layer::map(name, MapShape { channels: 2, height: 3, width: 3 }, Activation::Relu);
    let taps = |seed| TapWeights::Taps(Csr::from_dense(&random(2, 18, seed)));
    let map = MapShape { channels: 2, height: 3, width: 3 };
    let block = |from: usize, to: usize| TapBlock {
        target: Target::Layer(to),
        source: Source::Layer(from),
        maps: vec![],
        window: Window::square(3, 1, 1),
        input: map,
        output: map,
        groups: 1,
        weights: taps(1),
    };
    let build = |blocks: Vec<TapBlock>| {
        ImplicitModel::new(ModelParts {
            a: Csr::empty(36, 36),
            b: Csr::empty(36, 2),
            c: Csr::empty(1, 36),
            d: Csr::empty(1, 2),
            state_bias: vec![0.0; 4],
            output_bias: vec![0.0],
            taps: blocks,
            layout: Layout::new(vec![layer("last"), layer("first")]),
            ..Default::default()
        })
    };
    build(vec![block(1, 0)]).unwrap();
    let message = build(vec![block(1, 0), block(0, 1)]).unwrap_err().to_string();
    assert!(message.contains("cycle") && message.contains("last") && message.contains("first"), "{message}");
    assert!(build(vec![block(0, 0)]).is_err());
    let mut wrong = block(1, 0);
    wrong.window.padding = [0; 4];
    assert!(build(vec![wrong]).unwrap_err().to_string().contains("2 × 3 × 3"));
    let mut huge = block(1, 0);
    huge.window = Window { kernel: [1 << 40, 3], stride: [1, 1], padding: [1 << 39, 1, 1 << 39, 1], dilation: [1; 2] };
    assert!(build(vec![huge]).is_err());
}

#[test]
fn every_stored_network_becomes_a_model() {
    let bytes = std::fs::read(folder().join("references.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let arrays: BTreeMap<String, Matrix<f32>> = file
        .tensors()
        .into_iter()
        .map(|(name, view)| {
            let values: Vec<f32> = view.data().as_chunks::<4>().0.iter().map(|&b| f32::from_le_bytes(b)).collect();
            let rows = view.shape()[0];
            (name, Matrix::from_vec(rows, values.len() / rows, values).unwrap())
        })
        .collect();
    let mut files = 0;
    for (name, u) in arrays.iter().filter_map(|(key, u)| Some((key.strip_suffix(".input")?, u))) {
        if !name.starts_with("hand_") && !name.starts_with("torch_") {
            continue;
        }
        let network = Network::from_onnx(folder().join(format!("{name}.onnx"))).unwrap();
        let model = ImplicitModel::from_network(&network).unwrap_or_else(|e| panic!("{name}: {e}"));
        let read = ImplicitModel::from_bytes(&model.to_bytes(), name).unwrap();
        assert!(read == model, "{name}");
        let y = Equilibrium::new(&read, one_thread()).unwrap().outputs(u).unwrap().y;
        assert_close(name, y.as_slice(), arrays[&format!("{name}.output")].as_slice(), 1e-5);
        assert_eq!(read.sparsity().multiply_adds, network.multiply_adds(), "{name}");
        files += 1;
    }
    assert!(files > 50);
}

#[test]
fn the_residual_network_is_the_network() {
    let path = data("resnet20_cifar100.onnx");
    let network = Network::from_onnx(path).unwrap();
    let model = ImplicitModel::from_network(&network).unwrap();
    let counted = model.sparsity();
    assert_eq!((counted.nonzeros, counted.multiply_adds), (277_444, network.multiply_adds()));
    assert_eq!(model.state_bias().len(), 688);
    let u = inputs(&network, 3, 1);
    let y = Equilibrium::new(&model, one_thread()).unwrap().outputs(&u).unwrap().y;
    assert_close("resnet20", y.as_slice(), network.forward(&u).unwrap().as_slice(), 1e-5);
}

/// A of the unrolled model, column by column: what one state alone does to all pre-activations, without the bias. With
/// `magnitudes` every summand counts with its magnitude: a residual and a tap of the other sign do not cancel.
fn unrolled(model: &ImplicitModel, magnitudes: bool) -> Vec<Vec<f64>> {
    let n = model.shape().states;
    let size = |v: f64| if magnitudes { v.abs() } else { v };
    let mut a = vec![vec![0.0; n]; n];
    for i in 0..n {
        for (j, v) in model.a().row(i) {
            a[i][j] += size(f64::from(v));
        }
    }
    for block in model.taps() {
        let (Target::Layer(target), Source::Layer(source)) = (block.target, block.source) else { continue };
        let (into, from) = (model.layout().range(target), model.layout().range(source));
        for j in 0..from.len() {
            let mut unit = Matrix::zeros(1, from.len());
            unit[(0, j)] = 1.0;
            let z = block.apply(&unit).unwrap();
            (0..into.len()).for_each(|i| a[into.start + i][from.start + j] += size(f64::from(z[(0, i)])));
        }
    }
    a
}

#[test]
fn the_norm_of_the_unrolled_operator_is_bounded_and_rescaling_keeps_every_bit() {
    for (name, network, shared) in [("headed", headed(), true), ("dense residual", dense_residual(), false)] {
        let model = ImplicitModel::from_network(&network).unwrap();
        let found = model.well_posedness();
        let rows = |model: &ImplicitModel, magnitudes: bool| {
            unrolled(model, magnitudes).iter().map(|row| row.iter().map(|v| v.abs()).sum::<f64>()).fold(0.0, f64::max)
        };
        // Interior positions use all taps, and residuals are inside; exact without shared weights.
        let (bound, exact) = (rows(&model, shared), rows(&model, false));
        assert!((found.norm_a_inf - bound).abs() < 1e-5 && exact <= bound, "{name}: {} {bound}", found.norm_a_inf);
        assert!(found.norm_a_inf > 1.0 && found.acyclic && found.lambda_pf_upper == 0.0, "{name}");
        let contraction = found.contraction.unwrap();
        for (i, row) in unrolled(&model, false).iter().enumerate() {
            let read: f64 = row.iter().zip(&contraction.scaling).map(|(v, s)| v.abs() * s).sum();
            assert!(read <= contraction.rho * contraction.scaling[i] * (1.0 + 1e-6), "{name} {i}");
        }
        let rescaled = model.rescale(0.9).unwrap();
        assert!(rescaled.exact && rows(&rescaled.model, shared) <= 0.9, "{name}");
        assert!(rescaled.model.well_posedness().norm_a_inf <= 0.9);
        assert_eq!(rescaled.model.sparsity().nonzeros, model.sparsity().nonzeros, "{name}");
        let read = ImplicitModel::from_bytes(&rescaled.model.to_bytes(), "m").unwrap();
        assert!(read == rescaled.model, "{name}");
        let u = inputs(&network, 20, 3);
        let run = |model: &ImplicitModel| Equilibrium::new(model, one_thread()).unwrap().run(&u).unwrap();
        let (before, after) = (run(&model), run(&read));
        assert_eq!(before.y, after.y, "{name}: outputs keep every bit");
        let factors = &read.metadata().scaling.as_ref().unwrap().states;
        for i in 0..20 {
            for (j, factor) in factors.iter().enumerate() {
                assert_eq!(f64::from(before.x[(i, j)]), f64::from(after.x[(i, j)]) * factor, "{name}");
            }
        }
        let v = Matrix::from_fn(20, model.shape().outputs, |i, j| (i + j) as f32 - 3.0);
        let gradient = |model: &ImplicitModel| InputGradient::new(model, one_thread()).unwrap().run(&u, &v).unwrap().1;
        assert_eq!(gradient(&model).gradient, gradient(&read).gradient, "{name}");
    }
    let smooth = ImplicitModel::from_network(&small()).unwrap();
    assert!(smooth.rescale(0.9).unwrap_err().to_string().contains("tanh"));
    let path = data("resnet20_cifar100.onnx");
    let resnet = ImplicitModel::from_network(&Network::from_onnx(path).unwrap()).unwrap();
    let message = resnet.rescale(0.99).unwrap_err().to_string();
    assert!(message.contains("factors reach") && message.contains("f32"), "{message}");
    let norm = resnet.well_posedness().norm_a_inf;
    assert!((222.0..224.0).contains(&norm), "{norm}");
}

#[test]
fn exported_networks_read_back_as_the_same_model() {
    let mut all = networks();
    for name in ["conv_new", "residual_old", "average_head_new", "average_old", "views_new", "mlp_norm_new"] {
        all.push((name, Network::from_onnx(folder().join(format!("torch_{name}.onnx"))).unwrap()));
    }
    for (name, network) in all {
        let model = ImplicitModel::from_network(&network).unwrap();
        let bytes = to_onnx(&model, OnnxSettings::default()).unwrap();
        let again = Network::from_onnx_bytes(&bytes).unwrap_or_else(|e| panic!("{name}: {e}"));
        let read = ImplicitModel::from_network(&again).unwrap();
        assert_eq!(read.layout(), model.layout(), "{name}");
        assert!(read == model, "{name}");
        let u = inputs(&network, 5, 4);
        let y = again.forward(&u).unwrap();
        assert_close(name, y.as_slice(), network.forward(&u).unwrap().as_slice(), 1e-5);
    }
    // Rescaled residuals have factors, which our reader does not take but every runtime does.
    let rescaled = ImplicitModel::from_network(&headed()).unwrap().rescale(0.9).unwrap().model;
    to_onnx(&rescaled, OnnxSettings::default()).unwrap();
}

/// The model with a share of its taps set to zero.
fn pruned(model: &ImplicitModel, share: f64) -> ImplicitModel {
    let mut r = Random::new(17);
    let mut parts = model.clone().into_parts();
    for block in &mut parts.taps {
        if let TapWeights::Taps(taps) = &block.weights {
            let rows: Vec<Vec<_>> =
                (0..taps.rows()).map(|o| taps.row(o).filter(|_| r.uniform() >= share).collect()).collect();
            block.weights = TapWeights::Taps(Csr::from_rows(taps.cols(), rows));
        }
    }
    ImplicitModel::new(parts).unwrap()
}

#[test]
fn layer_errors_mix_model_and_baseline() {
    let network = small();
    let images = Array::open(data("fashion_test_images.idx.gz")).unwrap();
    let u = Inputs::new(images, None, &Selection::all()).unwrap().rows(0..50).unwrap();
    let baseline = ImplicitModel::from_network(&network).unwrap();
    let run = |model: &ImplicitModel, threads| {
        layer_errors(model, &baseline, &u, Threads::new(threads), &Cancel::new()).unwrap()
    };
    assert!(run(&baseline, 1).iter().all(|e| e.output_error == 0.0 && e.state_error.unwrap_or(0.0) == 0.0));
    let sparse = pruned(&baseline, 0.3);
    let found = run(&sparse, 1);
    assert_eq!(found, run(&sparse, 3));
    let layers = network.layout().layers().len();
    assert_eq!(found.len(), layers + 1);
    let y = |model: &ImplicitModel| Equilibrium::new(model, one_thread()).unwrap().outputs(&u).unwrap().y;
    let total = equilibrium_error(&y(&sparse), &y(&baseline)).unwrap();
    assert!(total > 0.01 && (found[layers].output_error - total).abs() < 1e-9);
    // Up to layer k the model's blocks, behind it the baseline's: the same mixture as one model.
    for (step, error) in found[..layers].iter().enumerate() {
        let k = layers - 1 - step;
        let mut parts = baseline.clone().into_parts();
        for (block, other) in parts.taps.iter_mut().zip(sparse.taps()) {
            if matches!(block.target, Target::Layer(target) if target >= k) {
                *block = other.clone();
            }
        }
        let mixed = y(&ImplicitModel::new(parts).unwrap());
        let expected = equilibrium_error(&mixed, &y(&baseline)).unwrap();
        assert!((error.output_error - expected).abs() <= 1e-6 * (1.0 + expected), "{k}: {error:?} {expected}");
    }
}

#[test]
fn the_residual_network_on_cifar_100() {
    let Ok(folder) = std::env::var("SIMPLICIT_CIFAR100") else {
        eprintln!("skipped: set SIMPLICIT_CIFAR100 to the folder with the binary files of CIFAR-100");
        return;
    };
    let network = Network::from_onnx(data("resnet20_cifar100.onnx")).unwrap();
    let model = ImplicitModel::from_network(&network).unwrap();
    let path = Path::new(&folder).join("test.bin.gz");
    let mean = vec![0.50707516, 0.48654887, 0.44091784];
    let std = vec![0.26733429, 0.25643846, 0.27615047];
    let preprocessing = Preprocessing::new(1.0 / 255.0, mean, std).unwrap();
    let inputs = Inputs::new(Array::open(&path).unwrap(), Some(preprocessing), &Selection::all()).unwrap();
    let labels = Labels::read(&path, &Selection::all()).unwrap();
    let equilibrium = Equilibrium::new(&model, EquilibriumSettings::default()).unwrap();
    let (mut right, mut largest, mut size) = (0, 0.0f32, 0.0f32);
    for first in (0..10_000).step_by(500) {
        let u = inputs.rows(first..first + 500).unwrap();
        let y = equilibrium.outputs(&u).unwrap().y;
        let found = simplicit::evaluate::predictions(&y);
        right += found.iter().zip(&labels.as_slice()[first..]).filter(|(a, b)| a == b).count();
        if first == 0 {
            let theirs = network.forward(&u).unwrap();
            for (a, b) in y.as_slice().iter().zip(theirs.as_slice()) {
                largest = largest.max((a - b).abs());
                size = size.max(b.abs());
            }
        }
    }
    assert_eq!(right, 6862);
    assert!(largest <= 1e-5 * size, "{largest} of {size}");
}
