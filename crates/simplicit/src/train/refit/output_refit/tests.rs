//! Tests of the refit against its definition.

use super::problem::STATES;
use super::*;
use crate::layout::Activation;
use crate::linalg::{Csr, Matrix};
use crate::model::TapWeights;
use crate::network::{Network, Shape, Window};
use crate::parallel::Cancel;
use crate::problem::Connectivity;
use crate::random::Random;
use crate::states::Collected;
use crate::train::{
    AllowedWeights, Forget, ModelSettings, Objective, TrainInput, Trained, WorkSettings, importance, train,
};

fn network() -> Network {
    let mut random = Random::new(3);
    let mut weights =
        |rows, cols| Matrix::from_fn(rows, cols, |_, _| (random.normal() * random.uniform().powi(3)) as f32);
    Network::builder(Shape::Vector(12))
        .and_then(|b| b.linear(weights(10, 12), Some(vec![0.1; 10])))
        .and_then(|b| b.activation(Activation::Relu))
        .and_then(|b| b.linear(weights(6, 10), None))
        .and_then(|b| b.activation(Activation::Relu))
        .and_then(|b| b.linear(weights(4, 6), None))
        .and_then(|b| b.build())
        .unwrap()
}

fn inputs() -> Matrix<f32> {
    let mut random = Random::new(4);
    Matrix::from_fn(1500, 12, |_, _| random.normal() as f32)
}

fn trained(settings: &TrainSettings, weights: Option<&[f64]>, threads: usize) -> Trained {
    let (network, u, cancel) = (network(), inputs(), Cancel::new());
    let baseline = ImplicitModel::from_network(&network).unwrap();
    let source = Collected::new(&network, &u).unwrap();
    let input = TrainInput {
        source: &source,
        baseline: Some(&baseline),
        importance: weights,
        preprocessing: Default::default(),
    };
    let mut run = Run { threads: Threads::new(threads), cancel: &cancel, keep: &Forget, progress: &mut |_| {} };
    train(&input, settings, &mut run).unwrap()
}

fn weights() -> Vec<f64> {
    importance(&network(), &inputs(), 2, 0, Threads::one(), &Cancel::new()).unwrap()
}

/// The objective from its definition, in double precision, sample by sample.
fn objective(model: &ImplicitModel, weights: &[f64]) -> f64 {
    let (network, u) = (network(), inputs());
    let ours = Equilibrium::new(model, EquilibriumSettings::default()).unwrap().run(&u).unwrap();
    let theirs = crate::states::StateMap::states(&network, &u).unwrap();
    let log_probabilities = |y: Vec<f64>| -> Vec<f64> {
        let total = y.iter().map(|v| v.exp()).sum::<f64>().ln();
        y.iter().map(|v| v - total).collect()
    };
    let mut sum = 0.0;
    for s in 0..u.rows() {
        let p = log_probabilities(theirs.y.row(s).to_vec());
        let q = log_probabilities(ours.y.row(s).iter().map(|v| f64::from(*v)).collect());
        sum += p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q)).sum::<f64>();
        for (i, weight) in weights.iter().take(16).enumerate() {
            sum += 0.5 * STATES * weight * (f64::from(ours.x[(s, i)]) - theirs.x[(s, i)]).powi(2);
        }
    }
    sum / u.rows() as f64
}

#[test]
fn the_objective_falls_zeros_stay_and_kappa_holds() {
    let weights = weights();
    for (connectivity, kappa) in
        [(Connectivity::Baseline, None), (Connectivity::Feedforward, None), (Connectivity::Full, Some(0.6))]
    {
        let cyclic = kappa.is_some();
        let without = TrainSettings {
            strength: 2e-4,
            allowed: AllowedWeights { connectivity, kappa, ..Default::default() },
            model: ModelSettings { output_refit: Some(0), ..Default::default() },
            ..TrainSettings::default()
        };
        let with = TrainSettings {
            model: ModelSettings { output_refit: Some(3), ..without.model.clone() },
            ..without.clone()
        };
        let (rows, refit) = (trained(&without, Some(&weights), 2), trained(&with, Some(&weights), 2));
        let report = refit.report.output_refit.unwrap();
        for (model, reported) in [(&rows.model, report.before), (&refit.model, report.after)] {
            let expected = objective(model, &weights);
            assert!((reported - expected).abs() <= 1e-4 * expected, "{reported}, from scratch {expected}");
        }
        assert!(report.rounds > 0 && report.after < 0.9 * report.before, "{report:?}");
        assert!(rows.report.output_refit.is_none());
        assert_eq!(refit.model.well_posedness().acyclic, !cyclic);
        for (before, after) in [
            (rows.model.a(), refit.model.a()),
            (rows.model.b(), refit.model.b()),
            (rows.model.c(), refit.model.c()),
            (rows.model.d(), refit.model.d()),
        ] {
            assert!(before.nonzeros() > 0 || after.nonzeros() == 0);
            for i in 0..before.rows() {
                let columns: Vec<usize> = before.row(i).map(|(j, _)| j).collect();
                assert!(after.row(i).all(|(j, _)| columns.contains(&j)), "row {i} gained a non-zero");
                if let Some(kappa) = kappa.filter(|_| before.cols() == before.rows()) {
                    let sum: f64 = after.row(i).map(|(_, v)| f64::from(v).abs()).sum();
                    assert!(sum <= kappa, "row {i}: {sum}");
                }
            }
        }
        assert_eq!(trained(&with, Some(&weights), 1).model.to_bytes(), refit.model.to_bytes());
        let stored: usize = refit.report.rows.iter().map(|r| r.nonzeros).sum();
        assert_eq!(stored as u64, refit.model.sparsity().nonzeros);
    }
}

#[test]
fn without_row_weights_outputs_are_matched_in_squares() {
    let penalty = crate::problem::penalty::L1::new(3e-2).unwrap();
    let objective = Objective::Convex(std::sync::Arc::new(penalty));
    let settings = TrainSettings {
        objective,
        strength: 1.0,
        model: ModelSettings { output_refit: Some(3), ..Default::default() },
        ..TrainSettings::default()
    };
    let refit = trained(&settings, None, 2);
    let rows = trained(
        &TrainSettings { model: ModelSettings { output_refit: Some(0), ..settings.model.clone() }, ..settings },
        None,
        2,
    );
    assert!(refit.report.training_error < rows.report.training_error);
}

/// A unit that the network never uses must not keep the others from being refitted, if the model uses it by mistake.
#[test]
fn states_that_are_always_zero_do_not_stop_the_refit() {
    let network = |bias: f32, noise: f32| {
        let mut random = Random::new(3);
        let mut weights = |rows, cols| {
            Matrix::from_fn(rows, cols, |_, _| random.normal() as f32 * (1.0 + noise * random.uniform() as f32))
        };
        Network::builder(Shape::Vector(12))
            .and_then(|b| b.linear(weights(10, 12), Some([vec![bias; 1], vec![0.1; 9]].concat())))
            .and_then(|b| b.activation(Activation::Relu))
            .and_then(|b| b.linear(weights(4, 10), None))
            .and_then(|b| b.build())
            .unwrap()
    };
    let (theirs, ours, u) = (network(-30.0, 0.0), network(-3.0, 0.3), inputs());
    let baseline = ImplicitModel::from_network(&theirs).unwrap();
    let (source, cancel) = (Collected::new(&theirs, &u).unwrap(), Cancel::new());
    let states = crate::states::StateMap::states(&theirs, &u).unwrap().x;
    let of_unit = baseline.layout().range(0).start;
    assert!((0..u.rows()).all(|s| states[(s, of_unit)] == 0.0));
    let input =
        TrainInput { source: &source, baseline: Some(&baseline), importance: None, preprocessing: Default::default() };
    let settings = TrainSettings {
        model: ModelSettings { output_refit: Some(3), ..Default::default() },
        ..TrainSettings::default()
    };
    let mut run = Run { threads: Threads::one(), cancel: &cancel, keep: &Forget, progress: &mut |_| {} };
    let model = ImplicitModel::from_network(&ours).unwrap();
    let report = super::output_refit(model, &input, &settings, 1.0, &mut run).unwrap().1.unwrap();
    assert!(report.rounds > 0 && report.held_out_after < 0.1 * report.held_out_before, "{report:?}");
}

#[test]
fn stages_reach_the_target_and_do_no_worse_than_one() {
    let weights = weights();
    let settings = TrainSettings {
        target_sparsity: Some(0.8),
        model: ModelSettings { output_refit: Some(3), ..Default::default() },
        ..TrainSettings::default()
    };
    assert!(crate::train::search::stages::rungs(None, 0.8).len() > 1);
    let staged = trained(&settings, Some(&weights), 2);
    let count = staged.model.sparsity();
    assert!((count.sparsity - 0.8).abs() < 0.01, "{}", count.sparsity);
    assert_eq!(trained(&settings, Some(&weights), 1).model.to_bytes(), staged.model.to_bytes());
    let rows = trained(
        &TrainSettings { model: ModelSettings { output_refit: Some(0), ..settings.model.clone() }, ..settings },
        Some(&weights),
        2,
    );
    assert!(objective(&staged.model, &weights) < objective(&rows.model, &weights));
}

/// A small network with a stride, a residual sum, both poolings and a linear layer behind a mean.
fn convolutional() -> Network {
    let mut random = Random::new(8);
    let mut normal = |rows, cols, size: f64| Matrix::from_fn(rows, cols, |_, _| (size * random.normal()) as f32);
    // The outputs are so small that no class is certain; otherwise divergences would consist of rounding.
    let outputs = normal(3, 6, 0.05);
    let mut weights = |rows, cols| normal(rows, cols, 0.5);
    let first = Network::builder(Shape::map(2, 6, 6))
        .and_then(|b| b.convolution(weights(4, 18), Window::square(3, 1, 1), Some(vec![0.1; 4])))
        .and_then(|b| b.activation(Activation::Relu))
        .unwrap();
    let residual = first.here();
    first
        .convolution(weights(4, 36), Window::square(3, 1, 1), Some(vec![0.05; 4]))
        .and_then(|b| b.plus(residual))
        .and_then(|b| b.activation(Activation::Relu))
        .and_then(|b| b.max_pool(Window::square(2, 2, 0)))
        .and_then(|b| b.convolution(weights(6, 36), Window::square(3, 2, 1), Some(vec![0.2; 6])))
        .and_then(|b| b.activation(Activation::Relu))
        .and_then(|b| b.global_average())
        .and_then(|b| b.linear(outputs, None))
        .and_then(|b| b.build())
        .unwrap()
}

fn images(samples: usize) -> Matrix<f32> {
    let mut random = Random::new(9);
    Matrix::from_fn(samples, 72, |_, _| random.normal() as f32)
}

/// E KL(network ‖ model) over every tenth sample, computed from the definition in double precision.
fn held_out_divergence(network: &Network, model: &ImplicitModel, u: &Matrix<f32>) -> f64 {
    let ours = Equilibrium::new(model, EquilibriumSettings::default()).unwrap().run(u).unwrap().y;
    let theirs = network.forward(u).unwrap();
    let log_probabilities = |y: &[f32]| -> Vec<f64> {
        let total = y.iter().map(|v| f64::from(*v).exp()).sum::<f64>().ln();
        y.iter().map(|v| f64::from(*v) - total).collect()
    };
    let chosen: Vec<usize> = (9..u.rows()).step_by(10).collect();
    let sample = |&s: &usize| -> f64 {
        let (p, q) = (log_probabilities(theirs.row(s)), log_probabilities(ours.row(s)));
        p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q)).sum()
    };
    chosen.iter().map(sample).sum::<f64>() / chosen.len() as f64
}

#[test]
fn convolutions_are_refitted_and_held_out_samples_never_lose() {
    let network = convolutional();
    let baseline = ImplicitModel::from_network(&network).unwrap();
    let cancel = Cancel::new();
    // Many samples, and fewer samples than weights.
    for (samples, pays) in [(600, true), (40, false)] {
        let u = images(samples);
        let weights = importance(&network, &u, 2, 0, Threads::one(), &cancel).unwrap();
        let source = Collected::new(&network, &u).unwrap();
        let input = TrainInput {
            source: &source,
            baseline: Some(&baseline),
            importance: Some(&weights),
            preprocessing: Default::default(),
        };
        let model = |settings: &TrainSettings, threads: usize| {
            let mut run = Run { threads: Threads::new(threads), cancel: &cancel, keep: &Forget, progress: &mut |_| {} };
            train(&input, settings, &mut run).unwrap()
        };
        let without = TrainSettings { target_sparsity: Some(0.5), ..TrainSettings::default() };
        let with = TrainSettings {
            model: ModelSettings { output_refit: Some(2), ..without.model.clone() },
            ..without.clone()
        };
        let (rows, refit) = (model(&without, 2), model(&with, 2));
        assert!(rows.report.output_refit.is_none(), "off by default where weights are shared");
        let report = refit.report.output_refit.unwrap();
        for (model, reported) in [(&rows.model, report.held_out_before), (&refit.model, report.held_out_after)] {
            let expected = held_out_divergence(&network, model, &u);
            assert!((reported - expected).abs() <= 1e-4 * expected, "{reported}, from scratch {expected}");
        }
        assert!(report.held_out_after <= report.held_out_before, "{report:?}");
        if pays {
            assert!(report.rounds > 0 && report.held_out_after < 0.9 * report.held_out_before, "{report:?}");
        }
        assert_eq!(refit.model.taps().len(), rows.model.taps().len());
        for (before, after) in rows.model.taps().iter().zip(refit.model.taps()) {
            let (TapWeights::Taps(before), TapWeights::Taps(after)) = (&before.weights, &after.weights) else {
                continue;
            };
            for o in 0..before.rows() {
                let columns: Vec<usize> = before.row(o).map(|(j, _)| j).collect();
                assert!(after.row(o).all(|(j, _)| columns.contains(&j)), "row {o} gained a non-zero");
            }
        }
        assert_eq!(model(&with, 1).model.to_bytes(), refit.model.to_bytes());
        let stored: usize = refit.report.rows.iter().map(|r| r.nonzeros).sum();
        assert_eq!(stored as u64, refit.model.sparsity().nonzeros);
        // Samples for which there is no memory are computed again, with the same bits.
        let mut run = Run { threads: Threads::one(), cancel: &cancel, keep: &Forget, progress: &mut |_| {} };
        let settings = TrainSettings { work: WorkSettings { memory: Some(1), ..with.work.clone() }, ..with };
        let (streamed, _) = super::output_refit(rows.model.clone(), &input, &settings, 1.0, &mut run).unwrap();
        assert_eq!(streamed.to_bytes(), refit.model.to_bytes());
    }
}

/// The least-squares fit of every row's own features to its targets, on samples that are fitted, by elimination.
fn least_squares(
    features: &dyn Fn(usize, usize) -> Vec<f64>,
    targets: &dyn Fn(usize, usize) -> f64,
    positions: usize,
    samples: usize,
) -> Vec<f64> {
    let width = features(0, 0).len();
    let mut m = vec![vec![0.0; width + 1]; width];
    for s in (0..samples).filter(|s| s % 10 != 9) {
        for at in 0..positions {
            let (f, t) = (features(s, at), targets(s, at));
            for i in 0..width {
                (0..width).for_each(|j| m[i][j] += f[i] * f[j]);
                m[i][width] += f[i] * t;
            }
        }
    }
    for i in 0..width {
        for r in 0..width {
            if r != i {
                let share = m[r][i] / m[i][i];
                let pivot = m[i].clone();
                m[r].iter_mut().zip(pivot).for_each(|(a, b)| *a -= share * b);
            }
        }
    }
    (0..width).map(|i| m[i][width] / m[i][i]).collect()
}

#[test]
fn where_outputs_are_linear_in_the_weights_the_refit_is_least_squares() {
    // One convolution as the output: 3 channels of 4 × 5 positions from 2; some of its taps are left, at wrong values.
    let mut random = Random::new(12);
    let weights = Matrix::from_fn(3, 18, |_, _| random.normal() as f32);
    let network = Network::builder(Shape::map(2, 4, 5))
        .and_then(|b| b.convolution(weights, Window::square(3, 1, 1), None))
        .and_then(|b| b.flatten())
        .and_then(|b| b.build())
        .unwrap();
    let u = Matrix::from_fn(200, 40, |_, _| random.normal() as f32);
    let baseline = ImplicitModel::from_network(&network).unwrap();
    let mut parts = baseline.clone().into_parts();
    let kept: Vec<Vec<usize>> = (0..3).map(|o| (0..18).filter(|j| (j * 7 + o) % 3 != 0).collect()).collect();
    let start = kept.iter().map(|row| row.iter().map(|&j| (j, 0.1f32)).collect::<Vec<_>>());
    parts.taps[0].weights = TapWeights::Taps(Csr::from_rows(18, start));
    let model = ImplicitModel::new(parts).unwrap();
    let (source, cancel) = (Collected::new(&network, &u).unwrap(), Cancel::new());
    let input =
        TrainInput { source: &source, baseline: Some(&baseline), importance: None, preprocessing: Default::default() };
    let settings = TrainSettings {
        model: ModelSettings { output_refit: Some(12), ..Default::default() },
        ..TrainSettings::default()
    };
    let mut run = Run { threads: Threads::one(), cancel: &cancel, keep: &Forget, progress: &mut |_| {} };
    let (refit, report) = super::output_refit(model, &input, &settings, 1.0, &mut run).unwrap();
    assert!(report.unwrap().rounds > 0);
    let y = network.forward(&u).unwrap();
    let TapWeights::Taps(got) = &refit.taps()[0].weights else { panic!("taps") };
    for (o, kept) in kept.iter().enumerate() {
        let value = |s: usize, c: usize, y: isize, x: isize| {
            let inside = (0..4).contains(&y) && (0..5).contains(&x);
            if inside { f64::from(u[(s, c * 20 + y as usize * 5 + x as usize)]) } else { 0.0 }
        };
        let feature = |s: usize, at: usize, j: usize| {
            let (c, dy, dx) = (j / 9, (j / 3 % 3) as isize, (j % 3) as isize);
            value(s, c, (at / 5) as isize + dy - 1, (at % 5) as isize + dx - 1)
        };
        // If the output is a map, it is a layer of states too: both terms of the objective weigh its units.
        let square = |unit: usize| (0..200).map(|s| f64::from(y[(s, unit)]).powi(2)).sum::<f64>() / 200.0;
        let energy: f64 = (0..60).map(square).sum();
        let states = baseline.shape().states as f64;
        let of_states = |unit: usize| if states > 0.0 { STATES / (square(unit) * states) } else { 0.0 };
        let roots: Vec<f64> = (0..20).map(|at| (1.0 / energy + of_states(o * 20 + at)).sqrt()).collect();
        let exact = least_squares(
            &|s, at| kept.iter().map(|&j| roots[at] * feature(s, at, j)).collect(),
            &|s, at| roots[at] * f64::from(y[(s, o * 20 + at)]),
            20,
            200,
        );
        // A ridge keeps the refit near its start, and rounds end when they gain less than WORTH.
        let got: Vec<f64> = got.row(o).map(|(_, v)| f64::from(v)).collect();
        let error = |w: &[f64]| {
            let fitted = (0..200).filter(|s| s % 10 != 9).flat_map(|s| (0..20).map(move |at| (s, at)));
            let sum = |s, at| kept.iter().zip(w).map(|(&j, w)| w * feature(s, at, j)).sum::<f64>();
            fitted.map(|(s, at)| (roots[at] * (f64::from(y[(s, o * 20 + at)]) - sum(s, at))).powi(2)).sum::<f64>()
        };
        let (ours, least) = (error(&got), error(&exact));
        assert!(
            ours >= least * (1.0 - 1e-9) && ours <= (1.0 + super::WORTH) * least,
            "row {o}: {ours}, by elimination {least}"
        );
        assert!(error(&vec![0.1; kept.len()]) > 1.5 * least);
    }
}
