//! Cardinality rows for any backend, held to demands that are recomputed in f64 from the statistics.

use simplicit::backend::GroupBackend;
use simplicit::linalg::Matrix;
use simplicit::parallel::{Cancel, Threads};
use simplicit::problem::RowProblem;
use simplicit::random::Random;
use simplicit::solver::{CardinalitySettings, Design, solve_cardinality};
use simplicit::statistics::Statistics;

/// Mean squared mismatch + price·non-zeros + ridge, in the units of the row, recomputed from the statistics.
pub(crate) fn value(design: &Design, problem: &RowProblem, level: f64, ridge: f64, weights: &[f64]) -> f64 {
    let rms = design.target_rms(problem.target);
    let mut value = problem.fit * design.mean_square_mismatch(problem.target, weights);
    for (j, w) in weights.iter().enumerate().filter(|(_, w)| **w != 0.0) {
        let omega = problem.weights.as_ref().map_or(1.0, |weights| weights[j]);
        let normalised = w * design.rms(j) / rms;
        value += level * omega + problem.fit * rms * rms * ridge * normalised * normalised;
    }
    value
}

/// Least squares with the ridge on a support, by elimination in f64 written out here.
pub(crate) fn least_squares(statistics: &Statistics, target: usize, support: &[usize], ridge: f64) -> Vec<f64> {
    let k = support.len();
    let mut a: Vec<Vec<f64>> = support
        .iter()
        .map(|&i| {
            let mut row: Vec<f64> = support.iter().map(|&j| statistics.gram()[(i, j)]).collect();
            row.push(statistics.cross(target)[i]);
            row
        })
        .collect();
    for i in 0..k {
        a[i][i] *= 1.0 + ridge;
    }
    for p in 0..k {
        for i in 0..k {
            if i != p {
                let factor = a[i][p] / a[p][p];
                for j in p..=k {
                    a[i][j] -= factor * a[p][j];
                }
            }
        }
    }
    let mut out = vec![0.0; statistics.features()];
    for (p, &j) in support.iter().enumerate() {
        out[j] = a[p][k] / a[p][p];
    }
    out
}

pub(crate) fn support(weights: &[f64]) -> Vec<usize> {
    (0..weights.len()).filter(|&j| weights[j] != 0.0).collect()
}

/// No entry that leaves lowers the row's value, and none that comes of the `likeliest`, which have the largest residuals;
/// the weights of the others follow each.
pub(crate) fn no_move_pays(
    statistics: &Statistics,
    problem: &RowProblem,
    level: f64,
    ridge: f64,
    answer: &[f64],
    likeliest: usize,
) {
    let design = Design::new(statistics).unwrap();
    let own = support(answer);
    let here = value(&design, problem, level, ridge, answer);
    let residual = |j: usize| {
        let explained: f64 = own.iter().map(|&i| statistics.gram()[(j, i)] * answer[i]).sum();
        (statistics.cross(problem.target)[j] - explained).abs() / design.rms(j)
    };
    let mut outside: Vec<usize> = (0..statistics.features()).filter(|j| answer[*j] == 0.0).collect();
    outside.sort_by(|a, b| residual(*b).total_cmp(&residual(*a)));
    for &j in own.iter().chain(outside.iter().take(likeliest)) {
        let mut other: Vec<usize> = own.iter().copied().filter(|i| *i != j).collect();
        if other.len() == own.len() {
            other.push(j);
        }
        let weights = least_squares(statistics, problem.target, &other, ridge);
        let there = value(&design, problem, level, ridge, &weights);
        assert!(there >= here - 1e-5 * level, "row {}: {j} should have moved: {there} < {here}", problem.target);
    }
}

/// Features that hardly change from sample to sample and are more than the samples, as behind a network that was never
/// trained: supports start with more entries than Ĝ has ranks.
pub(crate) fn more_features_than_samples(backend: &dyn GroupBackend, samples: usize, d: usize, rows: usize) {
    let mut random = Random::new(21);
    let mean: Vec<f64> = (0..d).map(|_| random.uniform()).collect();
    let features = Matrix::from_fn(samples, d, |_, j| mean[j] + 0.1 * random.normal());
    let truth = Matrix::from_fn(rows, d, |_, _| random.normal());
    let targets = Matrix::from_fn(samples, rows, |s, k| (0..d).map(|j| truth[(k, j)] * features[(s, j)]).sum());
    let whole = Statistics::of(&features, &targets).unwrap();
    let few = Statistics::of_few(features, &targets).unwrap();
    let settings = CardinalitySettings::default();
    let fit = |k: usize| Design::new(&whole).unwrap().target_rms(k).powi(-2);
    let problems: Vec<RowProblem> =
        (0..rows).map(|k| RowProblem { start: Some(truth.row(k).to_vec()), ..RowProblem::new(k, fit(k)) }).collect();
    for level in [2e-5, 2e-4] {
        let mut values = Vec::new();
        for statistics in [&whole, &few] {
            let design = Design::new(statistics).unwrap();
            let (threads, cancel) = (Threads::available(), Cancel::new());
            let answers =
                solve_cardinality(&design, &problems, level, &settings, backend, threads, &cancel, |_| {}).unwrap();
            let mut total = 0.0;
            for (problem, answer) in problems.iter().zip(&answers) {
                let own = support(answer);
                assert!(!own.is_empty() && own.len() <= samples, "{} entries of {samples} samples", own.len());
                let best = least_squares(&whole, problem.target, &own, settings.ridge);
                let size = best.iter().fold(0f64, |m, w| m.max(w.abs()));
                assert!(answer.iter().zip(&best).all(|(w, b)| (w - b).abs() <= 1e-6 * size), "not least squares");
                total += value(&design, problem, level, settings.ridge, answer);
            }
            values.push((total, answers));
        }
        for (problem, answer) in problems.iter().zip(&values[0].1) {
            no_move_pays(&whole, problem, level, settings.ridge, answer, 8);
        }
        // In sample space a CPU moves the likeliest entries only.
        assert!(values[1].0 <= 1.1 * values[0].0, "{} in samples, {} in features", values[1].0, values[0].0);
    }
}

/// Supports do not depend on the units of features and targets, however small, and rows with next to nothing in them are
/// zero.
pub(crate) fn any_size(backend: &dyn GroupBackend) {
    let (samples, d) = (90, 24);
    let mut random = Random::new(22);
    let features = Matrix::from_fn(samples, d, |_, _| random.normal());
    let targets = Matrix::from_fn(samples, 2, |s, k| {
        (0..d).filter(|j| j % 3 == k).map(|j| features[(s, j)]).sum::<f64>() + 0.1 * random.normal()
    });
    let supports = |feature: f64, target: f64, start: f64| -> Vec<Vec<usize>> {
        let scaled = |m: &Matrix, by: f64| Matrix::from_fn(m.rows(), m.cols(), |i, j| m[(i, j)] * by);
        let statistics = Statistics::of(&scaled(&features, feature), &scaled(&targets, target)).unwrap();
        let design = Design::new(&statistics).unwrap();
        let row = |k: usize| RowProblem { start: Some(vec![start; d]), ..RowProblem::new(k, (1.0 / target).powi(2)) };
        let problems: Vec<RowProblem> = (0..2).map(row).collect();
        let (settings, cancel) = (CardinalitySettings::default(), Cancel::new());
        let threads = Threads::available();
        let answers = solve_cardinality(&design, &problems, 0.05, &settings, backend, threads, &cancel, |_| {});
        answers.unwrap().iter().map(|row| support(row)).collect()
    };
    let usual = supports(1.0, 1.0, 0.0);
    assert!(usual.iter().all(|set| set.len() == d / 3), "{usual:?}");
    assert_eq!(supports(1e-60, 1e-50, 0.0), usual);
    assert_eq!(supports(1e-12, 1e30, 0.0), usual);
    // A start that single precision cannot hold.
    assert_eq!(supports(1.0, 1e-60, 1.0), usual);
    assert_eq!(supports(1.0, 1e-150, 0.0), vec![Vec::<usize>::new(); 2]);
}
