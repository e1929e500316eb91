//! Training to a largest drop, and what states files know about their baseline.

#![allow(clippy::unwrap_used)]

use simplicit::arrays::{Array, Preprocessing};
use simplicit::evaluate::agreement;
use simplicit::layout::Activation::Relu;
use simplicit::linalg::Matrix;
use simplicit::model::ImplicitModel;
use simplicit::network::{Network, Shape};
use simplicit::parallel::{Cancel, Threads};
use simplicit::problem::Connectivity;
use simplicit::random::Random;
use simplicit::states::{ArrayStates, Collected, StateMap, StateSlice, StateSource, StatesMetadata, write_states};
use simplicit::train::{AllowedWeights, Forget, Run, TrainInput, TrainSettings, Trained, train, train_to_max_drop};

/// A 12-10-6-4 network with weights of very different sizes, so that there is something to remove.
fn network() -> Network {
    let mut random = Random::new(3);
    let mut weights =
        |rows, cols| Matrix::from_fn(rows, cols, |_, _| (random.normal() * random.uniform().powi(4)) as f32);
    Network::builder(Shape::Vector(12))
        .and_then(|b| b.linear(weights(10, 12), None))
        .and_then(|b| b.activation(Relu))
        .and_then(|b| b.linear(weights(6, 10), None))
        .and_then(|b| b.activation(Relu))
        .and_then(|b| b.linear(weights(4, 6), None))
        .and_then(|b| b.build())
        .unwrap()
}

fn inputs(samples: usize) -> Matrix<f32> {
    let mut random = Random::new(4);
    Matrix::from_fn(samples, 12, |_, _| random.normal() as f32)
}

fn with_run<T>(work: impl FnOnce(&mut Run) -> T) -> T {
    let cancel = Cancel::new();
    work(&mut Run { threads: Threads::new(2), cancel: &cancel, keep: &Forget, progress: &mut |_| {} })
}

fn to_max_drop(drop: f64) -> (Trained, f64) {
    let (network, u) = (network(), inputs(1500));
    let baseline = ImplicitModel::from_network(&network).unwrap();
    let all = Collected::new(&network, &u).unwrap();
    let (head, tail) = (StateSlice::new(&all, 0..1000).unwrap(), StateSlice::new(&all, 1000..1500).unwrap());
    let input = TrainInput {
        source: &head,
        baseline: Some(&baseline),
        importance: None,
        preprocessing: Preprocessing::identity(),
    };
    let settings = TrainSettings { strength: 1e-3, ..TrainSettings::default() };
    let trained = with_run(|run| train_to_max_drop(&input, &tail, drop, &settings, run)).unwrap();
    // Agreement once more, by another way: all held-out outputs at once.
    let held_out = Matrix::from_fn(500, 12, |i, j| u[(1000 + i, j)]);
    let equilibrium = simplicit::equilibrium::Equilibrium::new(&trained.model, Default::default()).unwrap();
    let y = equilibrium.outputs(&held_out).unwrap().y;
    let measured = agreement(&y, &network.forward(&held_out).unwrap()).unwrap();
    (trained, measured)
}

#[test]
fn the_model_agrees_and_a_larger_drop_gives_a_smaller_model() {
    let mut last = -1.0;
    for drop in [0.0, 2.0, 10.0] {
        let (trained, measured) = to_max_drop(drop);
        assert_eq!(trained.report.agreement, Some(measured));
        assert!(measured >= 1.0 - drop / 100.0, "{measured} for {drop}");
        let sparsity = trained.model.sparsity().sparsity;
        assert!(sparsity > last, "{sparsity} for {drop} after {last}");
        // A stronger one was tried and refused for its agreement.
        assert!(trained.report.path.iter().any(|tried| tried.strength > trained.report.strength));
        last = sparsity;
    }
}

#[test]
fn nonsense_is_refused() {
    let (network, u) = (network(), inputs(50));
    let all = Collected::new(&network, &u).unwrap();
    let input = TrainInput { source: &all, baseline: None, importance: None, preprocessing: Preprocessing::identity() };
    let settings = TrainSettings {
        allowed: AllowedWeights { connectivity: Connectivity::Full, kappa: Some(0.9), ..Default::default() },
        ..TrainSettings::default()
    };
    for drop in [-1.0, 101.0, f64::NAN] {
        let message = with_run(|run| train_to_max_drop(&input, &all, drop, &settings, run)).unwrap_err().to_string();
        assert!(message.starts_with("max-drop: expected points between 0 and 100"), "{message}");
    }
}

#[test]
fn states_files_know_their_layers_and_their_count() {
    let (network, u) = (network(), inputs(300));
    let all = Collected::new(&network, &u).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s.safetensors");
    let metadata = StatesMetadata { baseline_nonzeros: Some(204), preprocessing: None };
    write_states(&path, &all, &metadata, Threads::one(), &Cancel::new()).unwrap();
    let declared = ArrayStates::open(&path, Relu).unwrap();
    let train_with = |source: &dyn StateSource, connectivity: Connectivity| {
        let input = TrainInput { source, baseline: None, importance: None, preprocessing: Preprocessing::identity() };
        let settings = TrainSettings {
            strength: 1e-12,
            allowed: AllowedWeights { connectivity, ..Default::default() },
            ..TrainSettings::default()
        };
        with_run(|run| train(&input, &settings, run))
    };
    // The layered pattern of the layout is the network's own: nothing outside it, and nearly all of it is found again.
    let model = train_with(&declared, Connectivity::Baseline).unwrap().model;
    let own = ImplicitModel::from_network(&network).unwrap();
    for (found, own) in [(model.a(), own.a()), (model.b(), own.b()), (model.c(), own.c()), (model.d(), own.d())] {
        for i in 0..own.rows() {
            let allowed: Vec<usize> = own.row(i).map(|(j, _)| j).collect();
            assert!(found.row(i).all(|(j, _)| allowed.contains(&j)), "row {i}");
        }
    }
    assert_eq!(model.sparsity().baseline_nonzeros, 204);
    assert!(train_with(&declared, Connectivity::Feedforward).is_ok());
    // Without a layout both are refused, and the count is (n + q)(n + p).
    let array = |key: &str| Array::open(format!("{}:{key}", path.display())).unwrap();
    let plain = ArrayStates::without_layout(array("U"), array("Z"), array("X"), array("Y"), Relu).unwrap();
    for connectivity in [Connectivity::Baseline, Connectivity::Feedforward] {
        let message = train_with(&plain, connectivity).unwrap_err().to_string();
        assert!(message.starts_with("connectivity: expected full, no-self-loop or mask"), "{message}");
    }
    assert_eq!(plain.shape(), network.shape());
}

#[test]
fn the_layered_scaling_of_a_network_is_that_of_its_layers() {
    let network = network();
    let model = ImplicitModel::from_network_scaled(&network, 1.5).unwrap();
    let own = ImplicitModel::from_network(&network).unwrap();
    assert!(model.a().norm_inf() <= 1.0 / 1.5 + 1e-6);
    assert_eq!(model.sparsity().nonzeros, own.sparsity().nonzeros);
    let u = inputs(20);
    let factor = model.metadata().scaling.as_ref().unwrap().outputs;
    let scaled = simplicit::equilibrium::Equilibrium::new(&model, Default::default()).unwrap();
    let (y, expected) = (scaled.outputs(&u).unwrap().y, network.forward(&u).unwrap());
    for (y, expected) in y.as_slice().iter().zip(expected.as_slice()) {
        assert!((f64::from(*y) * factor - f64::from(*expected)).abs() < 1e-5, "{y} against {expected}");
    }
}
