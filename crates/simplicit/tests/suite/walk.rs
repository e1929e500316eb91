//! The whole walk on the shipped network and images: network, states, statistics, rows, model, equilibrium, outputs.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr)] // helpers of tests, outside #[test] functions

use std::process::Command;

use crate::common::data;
use simplicit::arrays::{Array, Inputs, Labels, Selection};
use simplicit::equilibrium::{Equilibrium, EquilibriumSettings};
use simplicit::evaluate::accuracy;
use simplicit::linalg::{Csr, Matrix};
use simplicit::model::{ImplicitModel, ModelParts};
use simplicit::network::Network;
use simplicit::onnx::{OnnxSettings, to_onnx};
use simplicit::parallel::{Cancel, Threads};
use simplicit::problem::Connectivity;
use simplicit::random::Random;
use simplicit::states::{Collected, InputSource, StateMap};
use simplicit::statistics::Statistics;
use simplicit::train::{
    AllowedWeights, Bounds, Forget, RowSettings, Run, TrainInput, TrainSettings, Trained, importance, train,
};

fn network() -> Network {
    Network::from_onnx(data("fashion_fc.onnx")).unwrap()
}

fn images(name: &str, count: usize) -> Matrix<f32> {
    let array = Array::open(data(name)).unwrap();
    Inputs::new(array, None, &Selection::all()).unwrap().rows(0..count).unwrap()
}

fn test_set() -> (Matrix<f32>, Vec<u32>) {
    let labels = Labels::read(data("fashion_test_labels.idx.gz"), &Selection::all()).unwrap();
    (images("fashion_test_images.idx.gz", 10_000), labels.as_slice().to_vec())
}

fn outputs(model: &ImplicitModel, u: &Matrix<f32>) -> Matrix<f32> {
    Equilibrium::new(model, EquilibriumSettings::default()).unwrap().run(u).unwrap().y
}

#[test]
fn the_network_its_implicit_model_and_onnx_runtime_have_the_same_accuracy() {
    let (u, labels) = test_set();
    let network = network();
    let model = ImplicitModel::from_network(&network).unwrap();
    assert_eq!(accuracy(&network.forward(&u).unwrap(), &labels).unwrap(), 0.8798);
    assert_eq!(accuracy(&outputs(&model, &u), &labels).unwrap(), 0.8798);
    assert_eq!(model.sparsity().nonzeros, 52_896);
    // Rescaled by powers of two: other coordinates, the same bits out.
    let rescaled = model.rescale(0.99).unwrap().model;
    assert!(rescaled.a().norm_inf() <= 0.99);
    assert_eq!(outputs(&rescaled, &u), outputs(&model, &u));

    let python = std::env::var("SIMPLICIT_PYTHON").unwrap_or_else(|_| "python3".into());
    let script = "import sys, gzip, numpy, onnxruntime
images = numpy.frombuffer(gzip.open(sys.argv[2]).read(), numpy.uint8, offset=16).reshape(-1, 1, 28, 28)
labels = numpy.frombuffer(gzip.open(sys.argv[3]).read(), numpy.uint8, offset=8)
session = onnxruntime.InferenceSession(sys.argv[1])
entry = session.get_inputs()[0]
shape = [len(images)] + [d for d in entry.shape[1:]]
y = session.run(None, {entry.name: (images / numpy.float32(255)).astype(numpy.float32).reshape(shape)})[0]
print((y.argmax(1) == labels).sum())";
    let mut command = Command::new(python);
    command.args(["-c", script]);
    for name in ["fashion_fc.onnx", "fashion_test_images.idx.gz", "fashion_test_labels.idx.gz"] {
        command.arg(data(name));
    }
    match command.output() {
        Ok(out) if out.status.success() => assert_eq!(String::from_utf8_lossy(&out.stdout).trim(), "8798"),
        other => {
            assert!(std::env::var("CI").as_deref() != Ok("true"), "ONNX Runtime did not run: {other:?}");
            eprintln!("skipped: no Python with numpy and onnxruntime; set SIMPLICIT_PYTHON");
        }
    }
}

#[test]
fn a_network_and_its_implicit_model_give_the_same_statistics() {
    let u = images("fashion_train_images.idx.gz", 1500);
    let network = network();
    let model = ImplicitModel::from_network(&network).unwrap();
    let equilibrium = Equilibrium::new(&model, EquilibriumSettings::default()).unwrap();
    assert_eq!(network.layout(), StateMap::layout(&equilibrium));
    let of = |map: &dyn StateMap, threads: usize| {
        let source = Collected::new(map, &u).unwrap();
        Statistics::of_states(&source, true, Threads::new(threads), &Cancel::new(), |_| {}).unwrap()
    };
    let (by_network, by_model) = (of(&network, 2), of(&equilibrium, 1));
    assert_eq!(by_network, of(&network, 1));
    assert_eq!((by_network.features(), by_network.targets()), (112 + 784 + 1, 122));
    for (a, b) in by_network.gram().as_slice().iter().zip(by_model.gram().as_slice()) {
        assert!((a - b).abs() <= 1e-5 * a.abs().max(1.0), "{a} against {b}");
    }
}

fn trained(settings: &TrainSettings, threads: usize) -> Trained {
    let u = images("fashion_train_images.idx.gz", 1200);
    let network = network();
    let baseline = ImplicitModel::from_network(&network).unwrap();
    let cancel = Cancel::new();
    let weights = importance(&network, &u, 2, 0, Threads::new(threads), &cancel).unwrap();
    let source = Collected::new(&network, &u).unwrap();
    let input = TrainInput {
        source: &source,
        baseline: Some(&baseline),
        importance: Some(&weights),
        preprocessing: Default::default(),
    };
    let mut run = Run { threads: Threads::new(threads), cancel: &cancel, keep: &Forget, progress: &mut |_| {} };
    train(&input, settings, &mut run).unwrap()
}

#[test]
fn training_hits_its_target_keeps_accuracy_and_does_not_depend_on_threads() {
    let settings = TrainSettings {
        target_sparsity: Some(0.6),
        rows: RowSettings { bounds: Some(Bounds::All), ..Default::default() },
        ..TrainSettings::default()
    };
    let two = trained(&settings, 2);
    let sparsity = two.model.sparsity();
    assert!((sparsity.sparsity - 0.6).abs() <= 0.002, "{}", sparsity.sparsity);
    // The count from scratch.
    let model = &two.model;
    let matrices = [model.a(), model.b(), model.c(), model.d()];
    let stored: usize = matrices.iter().map(|m| m.data().iter().filter(|v| **v != 0.0).count()).sum();
    let biases = model.state_bias().iter().chain(model.output_bias()).filter(|v| **v != 0.0).count();
    assert_eq!(sparsity.nonzeros as usize, stored + biases);
    assert_eq!(1.0 - (stored + biases) as f64 / 52_896.0, sparsity.sparsity);
    let (u, labels) = test_set();
    assert!(accuracy(&outputs(model, &u), &labels).unwrap() > 0.8698);
    assert!(two.report.rows.iter().all(|r| r.bound_distance.is_some_and(|d| (0.0..=1.0).contains(&d))));
    assert_eq!(trained(&settings, 1).model.to_bytes(), model.to_bytes());
}

#[test]
fn cyclic_training_respects_kappa_in_the_stored_numbers_and_runs_to_its_equilibrium() {
    let penalty = simplicit::problem::penalty::L1::new(1e-3).unwrap();
    let settings = TrainSettings {
        objective: simplicit::train::Objective::Convex(std::sync::Arc::new(penalty)),
        strength: 1.0,
        allowed: AllowedWeights { connectivity: Connectivity::Full, kappa: Some(0.5), ..Default::default() },
        ..TrainSettings::default()
    };
    let Trained { model, report } = trained(&settings, 2);
    for i in 0..model.a().rows() {
        let sum: f64 = model.a().row(i).map(|(_, v)| f64::from(v).abs()).sum();
        assert!(sum <= 0.5, "row {i}: {sum}");
    }
    assert!(!model.well_posedness().acyclic);
    assert_eq!(report.rows_at_limit(), 0);
    assert!(report.max_relative_gap().unwrap() <= 1e-6);
    let (u, labels) = test_set();
    let solution = Equilibrium::new(&model, EquilibriumSettings::default()).unwrap().run(&u).unwrap();
    assert!(solution.diagnostics.iter().all(|d| d.converged));
    assert!(accuracy(&solution.y, &labels).unwrap() > 0.80);
}

#[test]
fn what_we_export_comes_back_the_same_and_cycles_are_refused() {
    let u = images("fashion_test_images.idx.gz", 50);
    let model = trained(&TrainSettings::default(), 2).model;
    let exported = to_onnx(&model, OnnxSettings::default()).unwrap();
    let back = Network::from_onnx_bytes(&exported).unwrap();
    let (theirs, ours) = (back.forward(&u).unwrap(), outputs(&model, &u));
    for (a, b) in theirs.as_slice().iter().zip(ours.as_slice()) {
        assert!((a - b).abs() <= 1e-4 * b.abs().max(1.0), "{a} against {b}");
    }
    // Outputs that a layered scaling divided come out in the baseline's units.
    let network = Network::from_onnx(data("fashion_fc.onnx")).unwrap();
    let scaled = ImplicitModel::from_network_scaled(&network, 1.5).unwrap();
    assert!(scaled.metadata().scaling.as_ref().unwrap().outputs > 2.0);
    let back = Network::from_onnx_bytes(&to_onnx(&scaled, OnnxSettings::default()).unwrap()).unwrap();
    for (a, b) in back.forward(&u).unwrap().as_slice().iter().zip(network.forward(&u).unwrap().as_slice()) {
        assert!((a - b).abs() <= 1e-4 * b.abs().max(1.0), "{a} against {b}");
    }
    // A cycle becomes a Loop in double precision, which no network has.
    let mut random = Random::new(3);
    let mut parts = ModelParts {
        a: Csr::from_dense(&Matrix::from_fn(4, 4, |_, _| 0.1 * random.normal() as f32)),
        b: Csr::from_dense(&Matrix::from_fn(4, 3, |_, _| random.normal() as f32)),
        c: Csr::from_dense(&Matrix::from_fn(2, 4, |_, _| random.normal() as f32)),
        d: Csr::empty(2, 3),
        state_bias: vec![0.0; 4],
        output_bias: vec![0.0; 2],
        ..ModelParts::default()
    };
    parts.layout = simplicit::layout::Layout::new(vec![simplicit::layout::Layer::dense("x", 4, Default::default())]);
    let cyclic = ImplicitModel::new(parts).unwrap();
    let exported = to_onnx(&cyclic, OnnxSettings::default()).unwrap();
    let refused = Network::from_onnx_bytes(&exported).unwrap_err().to_string();
    assert!(refused.contains("not supported"), "{refused}");
}
