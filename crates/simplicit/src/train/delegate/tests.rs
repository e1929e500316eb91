//! Training with a delegate gives the same bits as without, and tasks that do not fit are refused.

use super::double::Elsewhere;
use crate::arrays::Array;
use crate::backend::Device;
use crate::compress::{Settings, compress};
use crate::equilibrium::{Equilibrium, EquilibriumSettings};
use crate::layout::{Activation, Layer, Layout};
use crate::linalg::Matrix;
use crate::model::{DenseLayer, ImplicitModel};
use crate::network::{Network, Shape, Window};
use crate::parallel::{Cancel, Threads};
use crate::problem::{Connectivity, RowProblem, penalty::L1};
use crate::random::Random;
use crate::solver::CardinalitySettings;
use crate::states::{ArrayStates, Collected, StateMap};
use crate::statistics::BLOCK;
use crate::train::{
    AllowedWeights, Forget, Keep, ModelSettings, Objective, RowsTask, Run, Shard, StatisticsTask, Step, SumsTask,
    TrainInput, TrainSettings, WalkTask, WorkSettings, importance_on, train,
};

fn states(samples: usize) -> (ImplicitModel, ArrayStates) {
    let mut random = Random::new(3);
    let mut weights = |rows, cols| Matrix::from_fn(rows, cols, |_, _| (0.4 * random.normal()) as f32);
    let hidden = DenseLayer::new("first", weights(5, 6), Activation::Relu).with_bias(vec![0.1; 5]);
    let second = DenseLayer::new("second", weights(4, 5), Activation::Relu);
    let model =
        ImplicitModel::from_layers(&[hidden, second], &DenseLayer::new("y", weights(2, 4), Activation::Identity))
            .unwrap();
    let mut random = Random::new(4);
    let u = Matrix::from_fn(samples, 6, |_, _| random.normal() as f32);
    let run = Equilibrium::new(&model, EquilibriumSettings::default()).unwrap().run(&u).unwrap();
    let array = |name, m: &Matrix<f32>| Array::from_matrix(name, m);
    let relu = Activation::Relu;
    let layout = Layout::new(vec![Layer::dense("second", 4, relu), Layer::dense("first", 5, relu)]);
    let arrays = ArrayStates::new(array("U", &u), array("Z", &run.z), array("X", &run.x), array("Y", &run.y), layout);
    (model, arrays.unwrap())
}

#[test]
fn work_done_elsewhere_has_the_same_bits() {
    let (baseline, source) = states(5 * BLOCK + 100);
    for (connectivity, kappa) in [(Connectivity::Baseline, None), (Connectivity::NoSelfLoop, Some(0.9))] {
        let settings = TrainSettings {
            objective: Objective::Convex(std::sync::Arc::new(L1::new(1e-3).unwrap())),
            strength: 1.0,
            allowed: AllowedWeights { connectivity, kappa, ..Default::default() },
            ..TrainSettings::default()
        };
        let input = TrainInput {
            source: &source,
            baseline: Some(&baseline),
            importance: None,
            preprocessing: Default::default(),
        };
        let with = |keep: &dyn Keep| {
            let (cancel, mut ignore) = (Cancel::new(), |_| {});
            let mut run = Run { threads: Threads::new(2), cancel: &cancel, keep, progress: &mut ignore };
            train(&input, &settings, &mut run).unwrap()
        };
        let (here, there) = (with(&Forget), with(&Elsewhere::new(&source, &settings)));
        assert_eq!(here.model.to_bytes(), there.model.to_bytes());
        assert_eq!(here.report.rows, there.report.rows);
        assert!(here.model.sparsity().nonzeros > 10);
    }
}

/// A convolution, a residual sum, a grouped convolution, an average and a classifier on small images.
fn convolutional() -> Network {
    let mut random = Random::new(5);
    let mut weights = |rows, cols| Matrix::from_fn(rows, cols, |_, _| (0.4 * random.normal()) as f32);
    let start = Network::builder(Shape::map(2, 6, 6))
        .and_then(|b| b.convolution(weights(4, 18), Window::square(3, 1, 1), Some(vec![0.1; 4])))
        .and_then(|b| b.activation(Activation::Relu))
        .unwrap();
    let skip = start.here();
    start
        .convolution(weights(4, 36), Window::square(3, 1, 1), None)
        .and_then(|b| b.plus(skip))
        .and_then(|b| b.activation(Activation::Relu))
        .and_then(|b| b.grouped_convolution(weights(6, 18), Window::square(3, 2, 1), 2, None))
        .and_then(|b| b.activation(Activation::Relu))
        .and_then(|b| b.global_average())
        .and_then(|b| b.linear(weights(3, 6), Some(vec![0.2; 3])))
        .and_then(|b| b.build())
        .unwrap()
}

#[test]
fn feature_maps_that_walk_elsewhere_have_the_same_bits() {
    let (network, mut random) = (convolutional(), Random::new(6));
    // Two whole shards and a part of one, with positions that do not fill a block of samples.
    let u = Matrix::from_fn(4 * WalkTask::PIECE + 300, 72, |_, _| random.normal() as f32);
    let baseline = ImplicitModel::from_network(&network).unwrap();
    let source = Collected::new(&network, &u).unwrap();
    let convex = Objective::Convex(std::sync::Arc::new(L1::new(1e-2).unwrap()));
    let staged = ModelSettings { stages: Some(true), output_refit: Some(1), ..Default::default() };
    for (target_sparsity, objective, model) in [
        (Some(0.5), Objective::Cardinality, ModelSettings::default()),
        (None, convex, ModelSettings::default()),
        // Two stages: the outputs to match differ from those of the model that is walked through.
        (Some(0.75), Objective::Cardinality, staged),
    ] {
        let positions = 5;
        let settings = TrainSettings {
            objective,
            target_sparsity,
            model,
            work: WorkSettings { positions, ..Default::default() },
            ..TrainSettings::default()
        };
        let with = |keep: &dyn Keep| {
            let (cancel, mut ignore) = (Cancel::new(), |_| {});
            let mut run = Run { threads: Threads::new(2), cancel: &cancel, keep, progress: &mut ignore };
            let weights = importance_on(Device::Cpu, &network, &u, 2, 3, &run).unwrap();
            let input = TrainInput {
                source: &source,
                baseline: Some(&baseline),
                importance: Some(&weights),
                preprocessing: Default::default(),
            };
            train(&input, &settings, &mut run).unwrap()
        };
        let mut there = Elsewhere::new(&source, &settings);
        there.network = Some(convolutional());
        let (here, there_trained) = (with(&Forget), with(&there));
        assert_eq!(here.model.to_bytes(), there_trained.model.to_bytes());
        assert_eq!(here.report.rows, there_trained.report.rows);
        assert_eq!(here.report.rows_bounded().is_some(), target_sparsity.is_some());
        let walks = there.walks.lock().unwrap();
        assert!(!walks.is_empty() && there.shards.lock().unwrap().is_empty());
        assert_eq!(walks.iter().any(|(task, _)| task.outputs.is_some()), settings.model.stages.is_some());
    }
}

#[test]
fn the_error_of_the_outputs_has_the_same_bits_elsewhere() {
    let (network, mut random) = (convolutional(), Random::new(8));
    // A whole shard and a part of one.
    let u = Matrix::from_fn(2 * WalkTask::PIECE + 300, 72, |_, _| random.normal() as f32);
    let source = Collected::new(&network, &u).unwrap();
    let train = TrainSettings {
        target_sparsity: Some(0.5),
        work: WorkSettings { positions: 5, ..Default::default() },
        ..TrainSettings::default()
    };
    let mut there = Elsewhere::new(&source, &train);
    there.network = Some(convolutional());
    let with = |keep: &dyn Keep| {
        let (cancel, mut ignore) = (Cancel::new(), |_| {});
        let mut run = Run { threads: Threads::new(2), cancel: &cancel, keep, progress: &mut ignore };
        let settings = Settings { train: train.clone(), ..Settings::default() };
        compress(&network, &u, &settings, &mut run).unwrap()
    };
    let (here, elsewhere) = (with(&Forget), with(&there));
    assert_eq!(here.model.to_bytes(), elsewhere.model.to_bytes());
    assert_eq!(here.output_error.to_bits(), elsewhere.output_error.to_bits());
    assert_eq!(*there.asked.lock().unwrap().last().unwrap(), "errors");
    // Computed from the definition: the outputs of both networks.
    let y = Equilibrium::new(&here.model, EquilibriumSettings::default()).unwrap().run(&u).unwrap().y;
    let right = network.states(&u).unwrap().y;
    let square = |(a, b): (&f32, &f64)| (f64::from(*a) - b).powi(2);
    let off: f64 = y.as_slice().iter().zip(right.as_slice()).map(square).sum();
    let all: f64 = right.as_slice().iter().map(|v| v.powi(2)).sum();
    assert!(here.output_error > 0.01 && (here.output_error - (off / all).sqrt()).abs() < 1e-5 * here.output_error);
}

#[test]
fn a_shard_refuses_what_does_not_fit() {
    let (network, settings) = (convolutional(), TrainSettings::default());
    let model = ImplicitModel::from_network(&network).unwrap();
    let task = WalkTask { model, samples: 300, cascade: true, outputs: Some(Matrix::zeros(300, 3)) };
    let bytes = task.to_bytes();
    let read = WalkTask::from_bytes(&bytes).unwrap();
    assert_eq!((read.to_bytes(), read.outputs), (bytes.clone(), task.outputs.clone()));
    for length in [12, 40, 24 + 300 * 3 * 4 - 1] {
        assert!(WalkTask::from_bytes(&bytes[..length]).is_err());
    }
    // Outputs of another number of samples.
    let fewer = [&299u64.to_le_bytes(), &bytes[8..]].concat();
    assert!(WalkTask::from_bytes(&fewer).is_err());
    let shard = |rows, cols, first| Shard::new(task.clone(), &settings, Matrix::zeros(rows, cols), first, 1.0);
    assert!(shard(10, 71, 0).is_err() && shard(10, 72, 7).is_err() && shard(45, 72, 256).is_err());
    let mut shard = shard(44, 72, 256).unwrap();
    let mut step = |step| shard.step(step, Threads::one(), &Cancel::new());
    assert!(step(Step::Enter(99)).is_err() && step(Step::Leave(0, vec![vec![(1000, 1.0)]])).is_err());
    assert!(step(Step::Enter(0)).is_ok());
    let step = Step::Leave(3, vec![vec![(2, 0.5)], vec![]]);
    let bytes = step.to_bytes();
    assert_eq!(Step::from_bytes(&bytes).unwrap(), step);
    assert!(Step::from_bytes(&bytes[..bytes.len() - 8]).is_err() && Step::from_bytes(&bytes[1..]).is_err());
}

#[test]
fn sums_refuse_what_does_not_fit() {
    let network = convolutional();
    let model = ImplicitModel::from_network(&network).unwrap();
    let other = || Box::new(model.clone());
    let errors = SumsTask::Errors { samples: 40, baseline: other(), model: other() };
    assert_eq!(SumsTask::from_bytes(&errors.to_bytes()).unwrap().to_bytes(), errors.to_bytes());
    let task = SumsTask::Joint { samples: 40, baseline: other(), rough: other() };
    let bytes = task.to_bytes();
    assert_eq!(SumsTask::from_bytes(&bytes).unwrap().to_bytes(), bytes);
    assert!(SumsTask::from_bytes(&bytes[..20]).is_err() && SumsTask::from_bytes(&bytes[..99]).is_err());
    let run = |task: &SumsTask, network: Option<&Network>, cols, first| {
        task.run(network, &Matrix::zeros(40, cols), first, Threads::one(), &Cancel::new())
    };
    assert!(run(&task, None, 71, 0).is_err() && run(&task, None, 72, 3).is_err());
    assert_eq!(run(&task, None, 72, 0).unwrap().len(), 2);
    assert!(run(&errors, None, 71, 0).is_err() && run(&errors, None, 72, 32).is_err());
    assert_eq!(run(&errors, None, 72, 256).unwrap()[0][0], 0.0);
    let dense = Box::new(states(10).0);
    let of_dense = SumsTask::Errors { samples: 40, baseline: dense.clone(), model: dense };
    assert!(run(&of_dense, None, 6, 0).is_err());
    let own = |size| SumsTask::Own { samples: 40, size, draws: 1, seed: 0, maps: true };
    assert!(run(&own(256), None, 72, 0).is_err() && run(&own(3), Some(&network), 72, 0).is_err());
    assert!(run(&own(128), Some(&network), 72, 0).is_err() && run(&own(256), Some(&network), 72, 0).is_ok());
}

#[test]
fn damaged_tasks_are_refused() {
    let task = StatisticsTask {
        rows: vec![1, 2],
        columns: vec![0, 3],
        beside: vec![4],
        stage: Some(states(10).0),
        model: Some(states(10).0),
        samples: 9,
    };
    let bytes = task.to_bytes();
    assert_eq!(StatisticsTask::from_bytes(&bytes).unwrap(), task);
    assert!(StatisticsTask::from_bytes(&bytes[..bytes.len() - 1]).is_err());
    assert!(StatisticsTask::from_bytes(&[255; 40]).is_err());
    let cardinality = CardinalitySettings { moves: false, ..Default::default() };
    let (problems, answers) = (vec![RowProblem::new(0, 1.0)], Some(vec![vec![1.0, 2.0]]));
    let rows = RowsTask { strength: 1.0, cardinality: cardinality.clone(), problems, answers, inverses: 0 };
    let bytes = rows.to_bytes();
    let read = RowsTask::from_bytes(&bytes).unwrap();
    assert_eq!((read.cardinality, &read.answers), (cardinality, &rows.answers));
    assert!(RowsTask::from_bytes(&bytes[8..]).is_err());
    assert!(RowsTask::from_bytes(&[&bytes[..], &[0; 8]].concat()).is_err());
}
