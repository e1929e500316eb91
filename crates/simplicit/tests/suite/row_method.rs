//! Rows by a method of one's own in the library's walk, on dense layers and on taps.

#![allow(clippy::unwrap_used, clippy::panic)] // helpers of tests are tests

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use crate::common::{Notes, data};
use simplicit::arrays::{Array, Inputs, Preprocessing, Selection};
use simplicit::equilibrium::{Equilibrium, EquilibriumSettings};
use simplicit::layout::Activation;
use simplicit::linalg::Matrix;
use simplicit::model::{DenseLayer, ImplicitModel, TapWeights};
use simplicit::network::{Network, Shape, Window};
use simplicit::parallel::{Cancel, Threads};
use simplicit::random::Random;
use simplicit::states::{Collected, InputSource, StateMap};
use simplicit::train::{
    AllowedWeights, Forget, Keep, ModelSettings, Objective, RowGroup, RowMethod, Run, TrainInput, TrainSettings,
    Trained, train,
};

fn images(count: usize) -> Matrix<f32> {
    let array = Array::open(data("fashion_train_images.idx.gz")).unwrap();
    Inputs::new(array, None, &Selection::all()).unwrap().rows(0..count).unwrap()
}

fn dense() -> Network {
    Network::from_onnx(data("fashion_fc.onnx")).unwrap()
}

/// A strided convolution, a residual block, a pooling, a classifier; biases everywhere.
fn convolutional() -> Network {
    let mut random = Random::new(5);
    let mut weights = |rows: usize, cols: usize| {
        let scale = (2.0 / cols as f64).sqrt();
        Matrix::from_fn(rows, cols, |_, _| (scale * random.normal()) as f32)
    };
    let [first, second, last] = [weights(4, 9), weights(4, 36), weights(3, 4)];
    let bias = |rows: usize| Some((0..rows).map(|k| 0.1 + 0.05 * k as f32).collect::<Vec<_>>());
    let start = Network::builder(Shape::map(1, 28, 28))
        .and_then(|b| b.convolution(first, Window::square(3, 2, 1), bias(4)))
        .and_then(|b| b.activation(Activation::Relu))
        .unwrap();
    let skip = start.here();
    start
        .convolution(second, Window::square(3, 1, 1), bias(4))
        .and_then(|b| b.plus(skip))
        .and_then(|b| b.activation(Activation::Relu))
        .and_then(|b| b.global_average())
        .and_then(|b| b.linear(last, bias(3)))
        .and_then(|b| b.build())
        .unwrap()
}

fn with(method: impl RowMethod + 'static) -> TrainSettings {
    TrainSettings {
        objective: Objective::Method(Arc::new(method)),
        model: ModelSettings { output_refit: Some(0), ..Default::default() },
        ..TrainSettings::default()
    }
}

fn run(
    map: &dyn StateMap,
    baseline: &ImplicitModel,
    u: &dyn InputSource,
    settings: &TrainSettings,
    keep: &dyn Keep,
) -> simplicit::Result<Trained> {
    let source = Collected::new(map, u)?;
    let preprocessing = Preprocessing::default();
    let input = TrainInput { source: &source, baseline: Some(baseline), importance: None, preprocessing };
    let cancel = Cancel::new();
    train(&input, settings, &mut Run { threads: Threads::new(2), cancel: &cancel, keep, progress: &mut |_| {} })
}

fn outputs(model: &ImplicitModel, u: &Matrix<f32>) -> Matrix<f32> {
    Equilibrium::new(model, EquilibriumSettings::default()).unwrap().outputs(u).unwrap().y
}

/// Every weight of a model, whatever kind of row it is in.
fn weights(model: &ImplicitModel) -> Vec<f32> {
    let taps = model.taps().iter().filter_map(|b| match &b.weights {
        TapWeights::Taps(taps) => Some(taps),
        _ => None,
    });
    let all = [model.a(), model.b(), model.c(), model.d()].into_iter().chain(taps);
    all.flat_map(|matrix| (0..matrix.rows()).flat_map(|i| matrix.row(i).map(|(_, v)| v))).collect()
}

/// The baseline's rows, and what was seen of them.
#[derive(Debug, Default)]
struct Baseline(Arc<Mutex<Vec<String>>>);

impl RowMethod for Baseline {
    fn rows(&self, group: &RowGroup) -> simplicit::Result<Vec<Vec<f64>>> {
        self.0.lock().unwrap().push(group.name.to_string());
        Ok(group.problems.iter().map(|p| p.start.clone().unwrap()).collect())
    }
}

#[test]
fn the_baselines_rows_give_the_baseline_back() {
    for network in [dense(), convolutional()] {
        let (baseline, u) = (ImplicitModel::from_network(&network).unwrap(), images(100));
        for cascade in [true, false] {
            let seen = Arc::default();
            let settings = TrainSettings {
                model: ModelSettings { cascade, ..with(Baseline(Arc::clone(&seen))).model },
                ..with(Baseline(Arc::clone(&seen)))
            };
            let Trained { model, report } = run(&network, &baseline, &u, &settings, &Forget).unwrap();
            assert_eq!(outputs(&model, &u), outputs(&baseline, &u));
            assert_eq!(weights(&model), weights(&baseline));
            assert_eq!(model.sparsity().sparsity, 0.0);
            assert!(report.training_error < 1e-5, "{}", report.training_error);
            assert!(report.rows.iter().all(|r| r.bound_distance.is_none() && r.relative_gap.is_none()));
            // Once each, in the order of the network.
            let layers = network.layout().layers().iter().rev().map(|l| l.name.clone());
            assert_eq!(*seen.lock().unwrap(), layers.chain(["outputs".to_string()]).collect::<Vec<_>>());
        }
    }
}

/// Weights smaller than the strength go; the constant stays.
#[derive(Debug)]
struct Smallest;

impl RowMethod for Smallest {
    fn rows(&self, group: &RowGroup) -> simplicit::Result<Vec<Vec<f64>>> {
        let row = |k: usize| -> Vec<f64> {
            let (start, entry) =
                (group.problems[k].start.as_ref().unwrap(), group.problems[k].weights.as_ref().unwrap());
            let stays = |(w, e): (&f64, &f64)| if *e == 0.0 || w.abs() >= group.strength { *w } else { 0.0 };
            start.iter().zip(entry).map(stays).collect()
        };
        Ok((0..group.problems.len()).map(row).collect())
    }
}

#[test]
fn a_target_is_searched_with_the_methods_own_strength() {
    for (network, near) in [(dense(), 0.001), (convolutional(), 0.01)] {
        let (baseline, u) = (ImplicitModel::from_network(&network).unwrap(), images(50));
        let settings = TrainSettings { target_sparsity: Some(0.5), strength: 0.01, ..with(Smallest) };
        let Trained { model, report } = run(&network, &baseline, &u, &settings, &Forget).unwrap();
        assert!((model.sparsity().sparsity - 0.5).abs() <= near, "{} {:?}", model.sparsity().sparsity, report.path);
        let expected: Vec<f32> =
            weights(&baseline).into_iter().filter(|w| f64::from(w.abs()) >= report.strength).collect();
        assert_eq!(weights(&model), expected);
        assert_eq!((model.state_bias(), model.output_bias()), (baseline.state_bias(), baseline.output_bias()));
    }
}

/// Whatever the test says.
struct By<F>(F);

impl<F> std::fmt::Debug for By<F> {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.write_str("By")
    }
}

impl<F: Fn(&RowGroup, Vec<Vec<f64>>) -> Vec<Vec<f64>> + Send + Sync> RowMethod for By<F> {
    fn rows(&self, group: &RowGroup) -> simplicit::Result<Vec<Vec<f64>>> {
        Ok((self.0)(group, group.problems.iter().map(|p| p.start.clone().unwrap()).collect()))
    }
}

#[test]
fn rows_that_would_break_the_models_promises_are_refused() {
    let mut random = Random::new(1);
    let mut weights = |rows, cols| Matrix::from_fn(rows, cols, |_, _| (0.3 * random.normal()) as f32);
    // The first layer lacks a connection.
    let mut first = weights(4, 5);
    first[(1, 2)] = 0.0;
    let layers =
        [DenseLayer::new("one", first, Activation::Relu), DenseLayer::new("two", weights(3, 4), Activation::Relu)];
    let baseline =
        ImplicitModel::from_layers(&layers, &DenseLayer::new("y", weights(2, 3), Activation::Identity)).unwrap();
    let u = weights(50, 5);
    let map = Equilibrium::new(&baseline, EquilibriumSettings::default()).unwrap();
    let message = |settings: TrainSettings| run(&map, &baseline, &u, &settings, &Forget).unwrap_err().to_string();
    let changed = |change: fn(&mut Vec<Vec<f64>>)| {
        with(By(move |_: &RowGroup, mut rows| {
            change(&mut rows);
            rows
        }))
    };
    for (change, said) in [
        ((|rows| drop(rows.pop())) as fn(&mut Vec<Vec<f64>>), "rows of one: expected 4, got 3"),
        (|rows| rows[2].push(1.0), "weights of row 2 of one: expected 5, got 6"),
        (|rows| rows[0][1] = f64::NAN, "weight of row 0 of one: expected a finite number, got NaN"),
        (|rows| rows[1][2] = 0.5, "weight of row 1 of one: expected zero for feature 2"),
    ] {
        let got = message(changed(change));
        assert!(got.contains(said), "{got}");
    }
    let tight =
        TrainSettings { allowed: AllowedWeights { kappa: Some(0.01), ..changed(|_| ()).allowed }, ..changed(|_| ()) };
    let got = message(tight);
    assert!(got.contains("sum of |w| of row 0 of two: expected at most 0.01"), "{got}");
}

/// Inputs that count how often they are read.
struct Counted(Matrix<f32>, AtomicUsize);

impl InputSource for Counted {
    fn samples(&self) -> usize {
        Matrix::rows(&self.0)
    }

    fn features(&self) -> usize {
        self.0.cols()
    }

    fn rows(&self, samples: std::ops::Range<usize>) -> simplicit::Result<Matrix<f32>> {
        self.1.fetch_add(1, Ordering::Relaxed);
        InputSource::rows(&self.0, samples)
    }
}

#[test]
fn kept_statistics_of_the_baselines_states_spare_the_walk() {
    for network in [dense(), convolutional()] {
        let baseline = ImplicitModel::from_network(&network).unwrap();
        let (u, notes) = (Counted(images(100), AtomicUsize::new(0)), Notes::default());
        let settings = |strength: f64| TrainSettings {
            strength,
            model: ModelSettings { cascade: false, ..with(Smallest).model },
            ..with(Smallest)
        };
        let first = run(&network, &baseline, &u, &settings(0.05), &notes).unwrap();
        assert!(u.1.swap(0, Ordering::Relaxed) > 0);
        let second = run(&network, &baseline, &u, &settings(0.1), &notes).unwrap();
        assert_eq!(u.1.load(Ordering::Relaxed), 0, "another strength, the same statistics");
        assert!(second.model.sparsity().nonzeros < first.model.sparsity().nonzeros);
        let fresh = run(&network, &baseline, &u, &settings(0.1), &Forget).unwrap();
        assert_eq!(second.model.to_bytes(), fresh.model.to_bytes());
        assert_eq!(second.report.rows, fresh.report.rows);
    }
}
