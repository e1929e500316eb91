//! The path: every level met from one set-up, judged on samples it was not trained on.

#![allow(clippy::unwrap_used)]

use simplicit::arrays::Preprocessing;
use simplicit::evaluate::agreement;
use simplicit::layout::Activation::Relu;
use simplicit::linalg::Matrix;
use simplicit::model::ImplicitModel;
use simplicit::network::{Network, Shape, Window};
use simplicit::parallel::{Cancel, Threads};
use simplicit::random::Random;
use simplicit::states::{Collected, StateSlice};
use simplicit::train::{Forget, ModelSettings, Run, TrainInput, TrainSettings, importance, path, train};

#[test]
fn every_level_is_met_and_is_what_training_for_it_alone_gives() {
    let mut random = Random::new(3);
    let mut weights =
        |rows, cols| Matrix::from_fn(rows, cols, |_, _| (random.normal() * random.uniform().powi(3)) as f32);
    let network = Network::builder(Shape::Vector(24))
        .and_then(|b| b.linear(weights(20, 24), None))
        .and_then(|b| b.activation(Relu))
        .and_then(|b| b.linear(weights(12, 20), None))
        .and_then(|b| b.activation(Relu))
        .and_then(|b| b.linear(weights(4, 12), None))
        .and_then(|b| b.build())
        .unwrap();
    let mut random = Random::new(4);
    let u = Matrix::from_fn(2500, 24, |_, _| random.normal() as f32);
    let baseline = ImplicitModel::from_network(&network).unwrap();
    let all = Collected::new(&network, &u).unwrap();
    let (head, tail) = (StateSlice::new(&all, 0..2000).unwrap(), StateSlice::new(&all, 2000..2500).unwrap());
    let input = TrainInput {
        source: &head,
        baseline: Some(&baseline),
        importance: None,
        preprocessing: Preprocessing::identity(),
    };
    // Without stages every level is a model of its own.
    let settings = TrainSettings {
        strength: 1e-4,
        model: ModelSettings { output_refit: Some(0), ..Default::default() },
        ..TrainSettings::default()
    };
    let cancel = Cancel::new();
    let mut models = 0;
    let mut count = |p| models += usize::from(matches!(p, simplicit::train::Progress::Model { .. }));
    let mut run = Run { threads: Threads::new(2), cancel: &cancel, keep: &Forget, progress: &mut count };
    let points = path(&input, Some(&tail), &[0.7, 0.3, 0.5], &settings, &mut run).unwrap();
    assert_eq!(points.len(), 3);
    // One weight is 0.14 points of this network.
    for (point, level) in points.iter().zip([0.3, 0.5, 0.7]) {
        let sparsity = point.model.sparsity().sparsity;
        assert!((sparsity - level).abs() < 0.003, "{sparsity} for {level}");
        assert!(point.report.rows.iter().all(|r| r.bound_distance.is_some()), "certified");
        let held_out = Matrix::from_fn(500, 24, |i, j| u[(2000 + i, j)]);
        let equilibrium = simplicit::equilibrium::Equilibrium::new(&point.model, Default::default()).unwrap();
        let y = equilibrium.outputs(&held_out).unwrap().y;
        assert_eq!(point.report.agreement, Some(agreement(&y, &network.forward(&held_out).unwrap()).unwrap()));
    }
    // The same strength alone gives the same model: nothing leaks from level to level.
    let strength = points[1].report.strength;
    let mut run = Run { threads: Threads::one(), cancel: &cancel, keep: &Forget, progress: &mut |_| {} };
    let alone = train(&input, &TrainSettings { strength, ..settings.clone() }, &mut run).unwrap();
    assert_eq!(alone.model.a(), points[1].model.a());
    assert_eq!(alone.model.b(), points[1].model.b());
    assert!(path(&input, None, &[1.0], &settings, &mut run).is_err());
    for (settings, named) in [
        (TrainSettings { target_sparsity: Some(0.5), ..settings.clone() }, "target-sparsity: expected none for a path"),
        (
            TrainSettings { model: ModelSettings { robust_rounds: 1, ..settings.model.clone() }, ..settings.clone() },
            "robust: expected 0 for a path",
        ),
    ] {
        let message = path(&input, None, &[0.5], &settings, &mut run).unwrap_err().to_string();
        assert!(message.starts_with(named), "{message}");
    }
    assert!(models < 36, "{models} models: a level must profit from those before it");

    // In stages every level starts from the one before; the first is what training for it alone gives.
    let settings =
        TrainSettings { model: ModelSettings { output_refit: Some(2), ..settings.model.clone() }, ..settings };
    let staged = path(&input, None, &[0.3, 0.5, 0.7], &settings, &mut run).unwrap();
    for (point, level) in staged.iter().zip([0.3, 0.5, 0.7]) {
        let sparsity = point.model.sparsity().sparsity;
        assert!((sparsity - level).abs() < 0.003, "{sparsity} for {level}");
        assert!(point.report.rows.iter().all(|r| r.bound_distance.is_some()), "certified");
    }
    let alone = train(&input, &TrainSettings { target_sparsity: Some(0.3), ..settings }, &mut run).unwrap();
    assert_eq!(alone.model.to_bytes(), staged[0].model.to_bytes());
    assert!(staged[2].report.training_error < points[2].report.training_error, "stages pay at the far end");
}

#[test]
fn every_level_of_a_convolutional_network_is_what_training_for_it_gives() {
    let mut random = Random::new(5);
    let mut weights = |rows, cols| Matrix::from_fn(rows, cols, |_, _| (0.5 * random.normal()) as f32);
    let network = Network::builder(Shape::map(2, 8, 8))
        .and_then(|b| b.convolution(weights(8, 18), Window::square(3, 1, 1), Some(vec![0.1; 8])))
        .and_then(|b| b.activation(Relu))
        .and_then(|b| b.convolution(weights(8, 72), Window::square(3, 2, 1), Some(vec![0.1; 8])))
        .and_then(|b| b.activation(Relu))
        .and_then(|b| b.global_average())
        .and_then(|b| b.linear(weights(4, 8), None))
        .and_then(|b| b.build())
        .unwrap();
    let u = Matrix::from_fn(120, 128, |_, _| random.normal() as f32);
    let baseline = ImplicitModel::from_network(&network).unwrap();
    let cancel = Cancel::new();
    let weights = importance(&network, &u, 2, 0, Threads::one(), &cancel).unwrap();
    let source = Collected::new(&network, &u).unwrap();
    let input = TrainInput {
        source: &source,
        baseline: Some(&baseline),
        importance: Some(&weights),
        preprocessing: Preprocessing::identity(),
    };
    let mut run = Run { threads: Threads::new(2), cancel: &cancel, keep: &Forget, progress: &mut |_| {} };
    let settings = TrainSettings::default();
    let points = path(&input, None, &[0.6, 0.4], &settings, &mut run).unwrap();
    for (point, level) in points.iter().zip([0.4, 0.6]) {
        // Row weights of errors that come together and steered prices included: the same bytes.
        let alone =
            train(&input, &TrainSettings { target_sparsity: Some(level), ..settings.clone() }, &mut run).unwrap();
        assert_eq!(alone.model.to_bytes(), point.model.to_bytes());
        let sparsity = point.model.sparsity().sparsity;
        // One weight is 0.13 points of this network.
        assert!((sparsity - level).abs() < 0.004, "{sparsity} for {level}");
    }
}
