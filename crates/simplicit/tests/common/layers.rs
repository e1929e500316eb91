//! Networks with every kind of layer, for devices that run them.

use std::collections::HashMap;
use std::sync::Mutex;

use simplicit::arrays::Preprocessing;
use simplicit::backend::Device;
use simplicit::backend::cuda::Cuda;
use simplicit::equilibrium::{DeviceModel, Prepared};
use simplicit::graph::{Binary, Dims, Reduction, Structure, Unary};
use simplicit::layout::Activation;
use simplicit::linalg::Matrix;
use simplicit::model::ImplicitModel;
use simplicit::network::{Network, Shape, Window};
use simplicit::parallel::{Cancel, Threads};
use simplicit::random::Random;
use simplicit::states::{Collected, StateMap};
use simplicit::train::{
    Forget, Keep, Key, ModelSettings, Run, TrainInput, TrainSettings, WorkSettings, importance, importance_on, train,
};

/// Networks with every kind of layer in odd shapes: strides, uneven padding, dilation, groups, poolings, residual sums,
/// vectors read as maps, operators.
fn odd_networks() -> Vec<(&'static str, Network)> {
    let mut random = Random::new(11);
    let mut weights = |rows: usize, cols: usize| {
        let scale = (2.0 / cols as f64).sqrt();
        Matrix::from_fn(rows, cols, |_, _| (random.normal() * scale) as f32)
    };
    let window = |kernel, stride, padding, dilation| Window { kernel, stride, padding, dilation };
    let plain = Network::builder(Shape::map(3, 9, 7))
        .unwrap()
        .convolution(weights(6, 27), window([3, 3], [2, 1], [1, 0, 2, 1], [1, 1]), Some(vec![0.1; 6]))
        .unwrap()
        .activation(Activation::LeakyRelu { slope: 0.1 })
        .unwrap();
    let first = plain.here();
    let residual = plain
        .convolution(weights(6, 54), window([3, 3], [1, 1], [2, 2, 2, 2], [2, 2]), Some(vec![-0.1; 6]))
        .unwrap()
        .plus(first)
        .unwrap()
        .activation(Activation::Relu)
        .unwrap()
        .max_pool(window([3, 2], [2, 2], [1, 0, 1, 1], [1, 1]))
        .unwrap()
        .convolution(weights(4, 6), window([1, 1], [1, 1], [0; 4], [1, 1]), None)
        .unwrap()
        .activation(Activation::Gelu)
        .unwrap()
        .global_average()
        .unwrap()
        .linear(weights(5, 4), Some(vec![0.2; 5]))
        .unwrap()
        .build()
        .unwrap();
    let grouped = Network::builder(Shape::map(4, 6, 5))
        .unwrap()
        .grouped_convolution(weights(8, 18), window([3, 3], [1, 2], [1, 1, 1, 1], [1, 1]), 2, Some(vec![0.3; 8]))
        .unwrap()
        .activation(Activation::HardSwish)
        .unwrap()
        .grouped_convolution(weights(8, 9), window([3, 3], [2, 1], [1, 2, 1, 1], [1, 1]), 8, None)
        .unwrap()
        .activation(Activation::Silu)
        .unwrap()
        .average_pool(window([2, 2], [1, 1], [1, 0, 0, 1], [1, 1]), true)
        .unwrap()
        .flatten()
        .unwrap();
    let size = grouped.shape().size();
    let grouped = grouped
        .linear(weights(7, size), Some(vec![0.1; 7]))
        .unwrap()
        .activation(Activation::Sigmoid)
        .unwrap()
        .linear(weights(4, 7), None)
        .unwrap()
        .build()
        .unwrap();
    let dims = |sizes: &[usize]| Dims::new(sizes).unwrap();
    let tokens = Network::builder(Shape::Vector(15))
        .unwrap()
        .linear(weights(24, 15), Some(vec![0.1; 24]))
        .unwrap()
        .activation(Activation::Tanh)
        .unwrap()
        .structure(Structure::Reshape { dims: dims(&[1, 4, 6]) }, &[])
        .unwrap();
    let values = tokens.here();
    let tokens = tokens.structure(Structure::Transpose { order: vec![0, 2, 1] }, &[]).unwrap();
    let keys = tokens.here();
    let tokens = tokens
        .at(values)
        .unwrap()
        .structure(Structure::MatMul, &[keys])
        .unwrap()
        .structure(Structure::Softmax { axis: 2 }, &[])
        .unwrap()
        .structure(Structure::MatMul, &[values])
        .unwrap()
        .structure(Structure::Normalise { axis: 2, epsilon: 1e-5 }, &[])
        .unwrap();
    let attended = tokens.here();
    let tokens = tokens.constant(dims(&[6]), (0..6).map(|k| 0.5 + 0.1 * k as f32).collect(), true).unwrap();
    let scale = tokens.here();
    let tokens = tokens
        .at(attended)
        .unwrap()
        .structure(Structure::Binary(Binary::Multiply), &[scale])
        .unwrap()
        .structure(Structure::Binary(Binary::Add), &[values])
        .unwrap();
    let all = tokens.here();
    let attention = tokens
        .structure(Structure::Slice { axis: 1, start: 3, step: -2, count: 2 }, &[])
        .unwrap()
        .structure(Structure::Concat { axis: 1 }, &[all])
        .unwrap()
        .structure(Structure::Reduce { reduction: Reduction::Mean, axes: vec![1], keep: false }, &[])
        .unwrap()
        .linear(weights(3, 6), None)
        .unwrap()
        .build()
        .unwrap();
    let on_cpu = Network::builder(Shape::Vector(12))
        .unwrap()
        .linear(weights(9, 12), Some(vec![0.1; 9]))
        .unwrap()
        .activation(Activation::Tanh)
        .unwrap()
        .structure(Structure::Unary(Unary::Sine), &[])
        .unwrap()
        .linear(weights(3, 9), None)
        .unwrap()
        .build()
        .unwrap();
    vec![
        ("a residual network", residual),
        ("groups of channels", grouped),
        ("attention", attention),
        ("an operator of the CPU's", on_cpu),
    ]
}

/// A model of each gives the outputs of its network.
pub(crate) fn outputs_are_the_networks_own(on_gpu: bool) {
    for (name, network) in odd_networks() {
        let mut random = Random::new(12);
        let u = Matrix::from_fn(37, network.shape().inputs, |_, _| random.normal() as f32);
        let model = ImplicitModel::from_network(&network).unwrap();
        let (threads, cancel) = (Threads::available(), Cancel::new());
        let y = if on_gpu {
            let model = DeviceModel::new(Cuda::open(0).unwrap(), &model, threads).unwrap();
            assert_eq!(model.on_cpu().len(), usize::from(name.contains("CPU")), "{name}: {:?}", model.on_cpu());
            model.outputs(&u, &cancel).unwrap()
        } else {
            Prepared::new(&model, 37).unwrap().outputs(&u, threads).unwrap()
        };
        let expected = network.forward(&u).unwrap();
        let size = expected.as_slice().iter().fold(0f32, |m, v| m.max(v.abs()));
        for (got, expected) in y.as_slice().iter().zip(expected.as_slice()) {
            assert!((got - expected).abs() < 2e-5 * size, "{name}: {got} {expected}");
        }
    }
}

/// Row weights of a device are the CPU's.
pub(crate) fn row_weights_are_those_of_the_cpu(on_gpu: bool) {
    let device = if on_gpu { Device::Cuda(0) } else { Device::Auto };
    for (name, network) in odd_networks() {
        let mut random = Random::new(13);
        let u = Matrix::from_fn(50, network.shape().inputs, |_, _| random.normal() as f32);
        let (threads, cancel) = (Threads::available(), Cancel::new());
        let run = Run { threads, cancel: &cancel, keep: &Forget, progress: &mut |_| {} };
        let got = importance_on(device, &network, &u, 2, 5, &run).unwrap();
        let expected = importance(&network, &u, 2, 5, threads, &cancel).unwrap();
        let size = expected.iter().fold(0f64, |m, v| m.max(*v));
        for (got, expected) in got.iter().zip(&expected) {
            assert!((got - expected).abs() < 1e-4 * expected + 1e-7 * size, "{name}: {got} {expected}");
        }
    }
}

/// Keeps all results of training but those of refits, which it lists.
#[derive(Default)]
struct Rows {
    kept: Mutex<HashMap<String, Vec<u8>>>,
    refitted: Mutex<Vec<(String, Vec<f64>)>>,
}

impl Keep for Rows {
    fn get(&self, key: &Key) -> simplicit::Result<Option<Vec<u8>>> {
        Ok(self.kept.lock().unwrap().get(&format!("{key:?}")).cloned())
    }

    fn put(&self, key: &Key, value: &[u8]) -> simplicit::Result<()> {
        let key = format!("{key:?}");
        if key.contains("Reconstruction") || key.contains("OutputRefit") {
            let numbers = value.chunks_exact(8).map(|v| f64::from_le_bytes(v.try_into().unwrap()));
            self.refitted.lock().unwrap().push((key, numbers.collect()));
        } else {
            self.kept.lock().unwrap().insert(key, value.to_vec());
        }
        Ok(())
    }
}

/// From the same rows, a refit on a device is the CPU's, and leaves as large errors of rows and outputs. Where blocks are refitted
/// together every step is the same: weights, values and ridge. All layers together take more steps of conjugate gradients,
/// which enlarge differences of rounding along directions that hardly matter; then the objective falls as far.
pub(crate) fn refits_are_those_of_the_cpu(on_gpu: bool) {
    let device = if on_gpu { Device::Cuda(0) } else { Device::Auto };
    for (name, network) in odd_networks() {
        let mut random = Random::new(14);
        let u = Matrix::from_fn(600, network.shape().inputs, |_, _| random.normal() as f32);
        let (threads, cancel, rows) = (Threads::available(), Cancel::new(), Rows::default());
        let weights = importance(&network, &u, 2, 5, threads, &cancel).unwrap();
        let (source, baseline) =
            (Collected::new(&network, &u).unwrap(), ImplicitModel::from_network(&network).unwrap());
        for (importance, strength, blocks) in [
            (Some(&weights[..]), 1e-4, true),
            (None, 3e-3, true),
            (Some(&weights[..]), 1e-4, false),
            (None, 3e-3, false),
        ] {
            let preprocessing = Preprocessing::default();
            let input = TrainInput { source: &source, baseline: Some(&baseline), importance, preprocessing };
            let refitted = |device| {
                let mut run = Run { threads, cancel: &cancel, keep: &rows, progress: &mut |_| {} };
                let (reconstruct, rounds) = if blocks { (2, 0) } else { (0, 1) };
                let settings = TrainSettings {
                    strength,
                    model: ModelSettings { reconstruct, output_refit: Some(rounds), ..Default::default() },
                    work: WorkSettings { device, ..Default::default() },
                    ..Default::default()
                };
                let report = train(&input, &settings, &mut run).unwrap().report;
                (report, std::mem::take(&mut *rows.refitted.lock().unwrap()))
            };
            let ((expected, steps), (got, on_device)) = (refitted(Device::Cpu), refitted(device));
            let near = |what: &str, got: f64, expected: f64, tolerance: f64| {
                assert!((got - expected).abs() < tolerance, "{name}, {what}: {got} {expected}");
            };
            assert!(!steps.is_empty() && steps.len() == on_device.len(), "{name}: {} {}", steps.len(), on_device.len());
            for ((key, expected), (same, got)) in steps.iter().zip(&on_device).filter(|_| blocks) {
                assert_eq!((key, expected.len()), (same, got.len()), "{name}");
                let size = expected.iter().fold(0f64, |m, v| m.max(v.abs()));
                expected.iter().zip(got).for_each(|(expected, got)| near(key, *got, *expected, 1e-4 * size));
            }
            if let (Some(expected), Some(got)) = (expected.output_refit, got.output_refit) {
                assert!(expected.rounds == 1 && expected.after < 0.98 * expected.before, "{name}: {expected:?}");
                near("objective before", got.before, expected.before, 1e-5 * expected.before);
                near("objective after", got.after, expected.after, 0.02 * (expected.before - expected.after));
            }
            let tolerance = if blocks { 1e-4 } else { 1e-2 };
            near("outputs", got.training_error, expected.training_error, tolerance * expected.training_error);
            for (got, expected) in got.rows.iter().zip(&expected.rows) {
                near(
                    "a row",
                    got.relative_residual,
                    expected.relative_residual,
                    tolerance * expected.relative_residual,
                );
            }
        }
    }
}
