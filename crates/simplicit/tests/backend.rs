//! One suite for every device: the same problems, the same demands. Those of CUDA run where there is a GPU
//! (`cargo test --test backend -- --include-ignored`) and are listed as ignored elsewhere.

#![allow(clippy::unwrap_used)] // helpers of tests are tests

use std::sync::Arc;

use simplicit::Result;
use simplicit::arrays::Preprocessing;
use simplicit::backend::cuda::Cuda;
use simplicit::backend::{Cpu, Device, GroupBackend};
use simplicit::layout::Activation;
use simplicit::linalg::Matrix;
use simplicit::model::ImplicitModel;
use simplicit::network::{Network, Shape, Window};
use simplicit::parallel::{Cancel, Threads};
use simplicit::problem::RowProblem;
use simplicit::random::Random;
use simplicit::solver::{CardinalitySettings, Design, solve_cardinality};
use simplicit::states::Collected;
use simplicit::statistics::{BLOCK, Statistics};
use simplicit::train::{
    Forget, ModelSettings, Objective, Run, TrainInput, TrainSettings, Trained, WorkSettings, importance, train,
};

#[path = "common/device_rows.rs"]
mod device_rows;
#[path = "common/layers.rs"]
mod layers;

use device_rows::{least_squares, support, value};

/// Who solves.
#[derive(Clone, Copy, PartialEq)]
enum On {
    Cpu,
    Cuda,
}

impl On {
    fn solve(
        self,
        design: &Design,
        problems: &[RowProblem],
        level: f64,
        settings: &CardinalitySettings,
    ) -> Vec<Vec<f64>> {
        let (threads, cancel) = (Threads::available(), Cancel::new());
        let backend = self.backend();
        solve_cardinality(design, problems, level, settings, backend.as_ref(), threads, &cancel, |_| {}).unwrap()
    }

    fn backend(self) -> Arc<dyn GroupBackend> {
        match self {
            On::Cpu => Arc::new(Cpu),
            On::Cuda => Arc::new(Cuda::open(0).unwrap()),
        }
    }
}

/// The same test on each device.
macro_rules! on_every_device {
    ($($test:ident),* $(,)?) => {
        mod cpu {
            $(#[test] fn $test() { super::$test(super::On::Cpu); })*
        }
        mod cuda {
            $(#[test] #[ignore = "needs a GPU"] fn $test() { super::$test(super::On::Cuda); })*
        }
    };
}

on_every_device!(
    no_single_move_is_left_that_pays,
    weights_are_least_squares_on_their_support,
    the_answer_is_as_good_as_the_cpus,
    free_and_forbidden_entries_and_dead_rows_are_kept,
    prices_at_the_ends_give_everything_and_nothing,
    more_features_than_samples_have_rows_that_no_move_betters,
    targets_and_features_of_any_size_have_the_same_rows,
    statistics_are_their_definition,
    a_convolutional_network_is_trained_as_well_as_on_the_cpu,
    outputs_are_the_networks_own,
    row_weights_are_those_of_the_cpu,
    refits_are_those_of_the_cpu,
);

/// Neighbouring features are alike, as taps are; rows have many small weights and few large ones.
fn statistics(samples: usize, d: usize, rows: usize, seed: u64) -> Statistics {
    let mut random = Random::new(seed);
    let raw = Matrix::from_fn(samples, d, |_, _| random.normal());
    let scale: Vec<f64> = (0..d).map(|_| 0.2 + random.uniform()).collect();
    let features =
        Matrix::from_fn(samples, d, |s, j| scale[j] * (raw[(s, j)] + 0.9 * raw[(s, j / 3 * 3)] + 0.4 * raw[(s, 0)]));
    let truth = Matrix::from_fn(rows, d, |_, _| random.normal() * random.uniform().powi(4));
    let mut targets = Matrix::zeros(samples, rows);
    for s in 0..samples {
        for k in 0..rows {
            let fit: f64 = (0..d).map(|j| truth[(k, j)] * features[(s, j)]).sum();
            targets[(s, k)] = fit + 0.05 * random.normal();
        }
    }
    Statistics::of(&features, &targets).unwrap()
}

fn no_single_move_is_left_that_pays(on: On) {
    let (d, rows) = (70, 9);
    let statistics = statistics(500, d, rows, 1);
    let design = Design::new(&statistics).unwrap();
    let settings = CardinalitySettings::default();
    let level = 2e-3;
    let problems: Vec<RowProblem> = (0..rows).map(|k| RowProblem::new(k, 1.0)).collect();
    let answers = on.solve(&design, &problems, level, &settings);
    for (problem, answer) in problems.iter().zip(&answers) {
        let own = support(answer);
        assert!(own.len() > 5 && own.len() < d - 5, "{} of {d}", own.len());
        device_rows::no_move_pays(&statistics, problem, level, settings.ridge, answer, d);
    }
}

fn weights_are_least_squares_on_their_support(on: On) {
    // More than one panel of columns, and supports of very different sizes.
    let (d, rows) = (200, 40);
    let statistics = statistics(900, d, rows, 2);
    let design = Design::new(&statistics).unwrap();
    let settings = CardinalitySettings::default();
    let fits: Vec<f64> = (0..rows).map(|k| 10f64.powf(k as f64 / 10.0 - 2.0)).collect();
    let problems: Vec<RowProblem> = fits.iter().enumerate().map(|(k, &fit)| RowProblem::new(k, fit)).collect();
    let answers = on.solve(&design, &problems, 1e-3, &settings);
    let mut sizes = Vec::new();
    for (k, answer) in answers.iter().enumerate() {
        let own = support(answer);
        let reference = least_squares(&statistics, k, &own, settings.ridge);
        let size = reference.iter().fold(0f64, |m, w| m.max(w.abs()));
        for (j, (w, r)) in answer.iter().zip(&reference).enumerate() {
            assert!((w - r).abs() <= 1e-7 * size, "row {k}, weight {j}: {w} against {r}");
        }
        sizes.push(own.len());
    }
    assert!(sizes.iter().max().unwrap() > &(3 * sizes.iter().min().unwrap()), "{sizes:?}");
}

fn the_answer_is_as_good_as_the_cpus(on: On) {
    let (d, rows) = (300, 48);
    let statistics = statistics(1500, d, rows, 3);
    let design = Design::new(&statistics).unwrap();
    let settings = CardinalitySettings::default();
    let problems: Vec<RowProblem> = (0..rows).map(|k| RowProblem::new(k, 1.0)).collect();
    for level in [3e-4, 3e-3] {
        let total = |answers: &[Vec<f64>]| -> f64 {
            problems.iter().zip(answers).map(|(p, w)| value(&design, p, level, settings.ridge, w)).sum()
        };
        let (own, reference) = (
            total(&on.solve(&design, &problems, level, &settings)),
            total(&On::Cpu.solve(&design, &problems, level, &settings)),
        );
        assert!(own <= 1.01 * reference, "price {level}: {own} against {reference}");
    }
}

fn free_and_forbidden_entries_and_dead_rows_are_kept(on: On) {
    let (samples, d) = (300, 66);
    let mut random = Random::new(4);
    let mut features = Matrix::from_fn(samples, d, |_, _| random.normal());
    let mut targets = Matrix::from_fn(samples, 3, |_, _| random.normal());
    for s in 0..samples {
        // A feature and a target that never move, and two features that are the same.
        features[(s, 7)] = 0.0;
        features[(s, 9)] = features[(s, 8)];
        targets[(s, 1)] = 0.0;
        targets[(s, 0)] = features[(s, 8)] + 0.5 * features[(s, 20)] + 0.01 * targets[(s, 0)];
    }
    let statistics = Statistics::of(&features, &targets).unwrap();
    let design = Design::new(&statistics).unwrap();
    let mut weights = vec![1.0; d];
    weights[0] = 0.0;
    weights[20] = f64::INFINITY;
    let problem = |k| RowProblem { weights: Some(weights.clone()), ..RowProblem::new(k, 1.0) };
    let problems: Vec<RowProblem> = (0..3).map(problem).collect();
    let answers = on.solve(&design, &problems, 0.02, &CardinalitySettings::default());
    assert!(answers[1].iter().all(|w| *w == 0.0));
    for answer in [&answers[0], &answers[2]] {
        assert!(answer[0] != 0.0 && answer[20] == 0.0 && answer[7] == 0.0);
        assert!(answer.iter().all(|w| w.is_finite()));
    }
    assert!((answers[0][8] + answers[0][9] - 1.0).abs() < 0.1, "{:?}", &answers[0][8..10]);
}

fn prices_at_the_ends_give_everything_and_nothing(on: On) {
    let (d, rows) = (130, 5);
    let statistics = statistics(400, d, rows, 5);
    let design = Design::new(&statistics).unwrap();
    let problems: Vec<RowProblem> = (0..rows).map(|k| RowProblem::new(k, 1.0)).collect();
    let settings = CardinalitySettings::default();
    let all = on.solve(&design, &problems, 0.0, &settings);
    assert!(all.iter().all(|row| support(row).len() == d));
    let none = on.solve(&design, &problems, 1e9, &settings);
    assert!(none.iter().all(|row| support(row).is_empty()));
}

fn more_features_than_samples_have_rows_that_no_move_betters(on: On) {
    device_rows::more_features_than_samples(on.backend().as_ref(), 64, 400, 6);
}

fn targets_and_features_of_any_size_have_the_same_rows(on: On) {
    device_rows::any_size(on.backend().as_ref());
}

fn statistics_are_their_definition(on: On) {
    let (samples, d, r) = (2 * BLOCK + 77, 37, 5);
    let mut random = Random::new(6);
    let f = Matrix::from_fn(samples, d, |_, _| random.normal());
    let t = Matrix::from_fn(samples, r, |_, _| random.normal());
    let part = |m: &Matrix, range: &std::ops::Range<usize>| {
        Matrix::from_fn(range.len(), m.cols(), |s, j| m[(range.start + s, j)])
    };
    let read = |range: std::ops::Range<usize>| Ok((part(&f, &range), part(&t, &range)));
    let (threads, cancel) = (Threads::available(), Cancel::new());
    let statistics = match on {
        On::Cpu => Statistics::stream(samples, threads, &cancel, read, |_| {}).unwrap(),
        On::Cuda => Statistics::stream_on(Cuda::open(0).unwrap(), samples, threads, &cancel, read, |_| {}).unwrap(),
    };
    assert_eq!(statistics.samples(), samples);
    let column = |m: &Matrix, j: usize| (0..samples).map(|s| m[(s, j)]).collect::<Vec<f64>>();
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let close = |got: f64, expected: f64| assert!((got - expected).abs() < 1e-9 * samples as f64, "{got} {expected}");
    for j in 0..d {
        for i in 0..d {
            close(statistics.gram()[(i, j)], dot(&column(&f, i), &column(&f, j)));
        }
        for k in 0..r {
            close(statistics.cross(k)[j], dot(&column(&t, k), &column(&f, j)));
        }
    }
    for k in 0..r {
        close(statistics.energy(k), dot(&column(&t, k), &column(&t, k)));
    }
}

fn a_convolutional_network_is_trained_as_well_as_on_the_cpu(on: On) {
    let weights = |rows: usize, cols: usize, seed: u64| {
        let mut random = Random::new(seed);
        Matrix::from_fn(rows, cols, |_, _| (random.normal() * (2.0 / cols as f64).sqrt()) as f32)
    };
    let network = Network::builder(Shape::map(3, 10, 10))
        .unwrap()
        .convolution(weights(8, 27, 1), Window::square(3, 1, 1), Some(vec![0.1; 8]))
        .unwrap()
        .activation(Activation::Relu)
        .unwrap()
        .convolution(weights(12, 72, 2), Window::square(3, 2, 1), Some(vec![-0.1; 12]))
        .unwrap()
        .activation(Activation::Relu)
        .unwrap()
        .global_average()
        .unwrap()
        .linear(weights(5, 12, 3), None)
        .unwrap()
        .build()
        .unwrap();
    let mut random = Random::new(7);
    let images = Matrix::from_fn(300, 300, |_, _| random.normal() as f32);
    let baseline = ImplicitModel::from_network(&network).unwrap();
    let (threads, cancel) = (Threads::available(), Cancel::new());
    let row_weights = importance(&network, &images, 2, 0, threads, &cancel).unwrap();
    let source = Collected::new(&network, &images).unwrap();
    let trained = |device: Device| -> Trained {
        let input = TrainInput {
            source: &source,
            baseline: Some(&baseline),
            importance: Some(&row_weights),
            preprocessing: Preprocessing::default(),
        };
        let settings = TrainSettings {
            target_sparsity: Some(0.5),
            model: ModelSettings { output_refit: Some(0), ..Default::default() },
            work: WorkSettings { device, ..Default::default() },
            ..Default::default()
        };
        let mut run = Run { threads, cancel: &cancel, keep: &Forget, progress: &mut |_| {} };
        train(&input, &settings, &mut run).unwrap()
    };
    let (own, reference) = match on {
        On::Cpu => (trained(Device::Auto), trained(Device::Cpu)),
        On::Cuda => (trained(Device::Cuda(0)), trained(Device::Cpu)),
    };
    if on == On::Cuda {
        // Of 8 rows of 28 features, 12 of 73 and 5 of 13 only the second are worth a launch.
        assert_eq!(own.report.rows.iter().filter(|row| row.on_gpu).count(), 12);
    }
    assert!(reference.report.rows.iter().all(|row| !row.on_gpu));
    assert!((own.model.sparsity().sparsity - 0.5).abs() < 0.01);
    let (error, expected) = (own.report.training_error, reference.report.training_error);
    assert!(error < 1.1 * expected, "{error} against {expected}");
}

fn outputs_are_the_networks_own(on: On) {
    layers::outputs_are_the_networks_own(on == On::Cuda);
}

fn row_weights_are_those_of_the_cpu(on: On) {
    layers::row_weights_are_those_of_the_cpu(on == On::Cuda);
}

fn refits_are_those_of_the_cpu(on: On) {
    layers::refits_are_those_of_the_cpu(on == On::Cuda);
}

/// A GPU solves cardinality rows; what it would not do is refused, not ignored.
#[test]
fn a_gpu_for_a_convex_penalty_is_refused() {
    let mut random = Random::new(8);
    let layer = Matrix::from_fn(3, 4, |_, _| random.normal() as f32);
    let network = Network::builder(Shape::Vector(4)).unwrap().linear(layer, None).unwrap().build().unwrap();
    let inputs = Matrix::from_fn(30, 4, |_, _| random.normal() as f32);
    let source = Collected::new(&network, &inputs).unwrap();
    let input =
        TrainInput { source: &source, baseline: None, importance: None, preprocessing: Preprocessing::default() };
    let penalty = simplicit::problem::penalty::L1::new(1e-3).unwrap();
    let objective = Objective::Convex(Arc::new(penalty));
    let settings = TrainSettings {
        objective,
        work: WorkSettings { device: Device::Cuda(0), ..Default::default() },
        ..Default::default()
    };
    let cancel = Cancel::new();
    let mut run = Run { threads: Threads::one(), cancel: &cancel, keep: &Forget, progress: &mut |_| {} };
    let message = train(&input, &settings, &mut run).unwrap_err().to_string();
    assert!(message.starts_with("device: expected cpu or auto") && message.ends_with("cuda:0"), "{message}");
}

/// Without a GPU this is one line, with one it opens; never a panic.
#[test]
fn a_gpu_that_is_not_there_is_one_clear_line() {
    let far: Result<_> = Cuda::open(4096);
    let message = far.unwrap_err().to_string();
    assert!(message.starts_with("cuda:4096: ") && !message.contains('\n'), "{message}");
}
