//! Exact matching against the conic reference, on the samples, and where it cannot be.

#![allow(clippy::unwrap_used, clippy::panic)] // Helpers of tests are tests.

use crate::common::paper;
use crate::common::reference::{ReferenceForm, ReferenceSettings, ReferenceStatus, solve_by_cones};
use crate::common::rows::{BallKind, BoundKind, Case, random_case, square};
use simplicit::arrays::Array;
use simplicit::layout::Activation;
use simplicit::linalg::Matrix;
use simplicit::parallel::{Cancel, Threads};
use simplicit::problem::penalty::{L1, Ridge};
use simplicit::problem::{Ball, RowProblem};
use simplicit::random::Random;
use simplicit::solver::{Design, RowSolution, SolverSettings, Status, largest_mismatch, solve_rows_exactly};
use simplicit::states::ArrayStates;
use simplicit::statistics::Statistics;
use simplicit::{Error, Result};

fn statistics(case: &Case) -> Statistics {
    let target = Matrix::from_vec(case.samples(), 1, case.target.clone()).unwrap();
    Statistics::of(&case.features, &target).unwrap()
}

fn solve(case: &Case) -> Result<RowSolution> {
    let statistics = statistics(case);
    let design = Design::new(&statistics)?;
    let penalty = case.penalty.penalty()?;
    let (settings, cancel) = (SolverSettings::default(), Cancel::new());
    let rows = solve_rows_exactly(
        &design,
        &*penalty,
        std::slice::from_ref(&case.problem),
        &settings,
        Threads::one(),
        &cancel,
        |_| {},
    )?;
    Ok(rows.into_iter().next().unwrap())
}

/// The smallest cost the conic solver finds, in the first form in which it succeeds; `None` if infeasible.
fn reference(case: &Case, size: f64) -> Option<f64> {
    let statistics = statistics(case);
    let residual = ReferenceForm::Residual { features: &case.features, target: &case.target };
    for (form, tolerance) in [(ReferenceForm::Gram, 1e-9), (residual, 1e-9), (ReferenceForm::Gram, 1e-7)] {
        let settings = ReferenceSettings { form, exact: true, tolerance, size: Some(size) };
        let solution = solve_by_cones(&statistics, case.penalty, &case.problem, &settings).unwrap();
        match solution.status {
            ReferenceStatus::Solved => return Some(solution.objective),
            ReferenceStatus::Infeasible => return None,
            _ => {}
        }
    }
    panic!("no reference for {}", case.name)
}

/// A target that some feasible weights match exactly: those weights, made from the case's own constraints.
fn with_a_matching_row(mut case: Case, seed: u64) -> Case {
    let mut r = Random::new(seed);
    let d = case.features.cols();
    let wild: Vec<f64> = (0..d).map(|_| if r.uniform() < 0.5 { r.normal() } else { 0.0 }).collect();
    let w = case.made_feasible(&wild);
    case.target = vec![0.0; case.samples()];
    let target: Vec<f64> = case.residual(&w).iter().map(|r| -r).collect();
    case.target = target;
    case
}

const BALLS: [BallKind; 4] = [BallKind::None, BallKind::Tight, BallKind::Slack, BallKind::Zero];
const BOUNDS: [BoundKind; 3] = [BoundKind::None, BoundKind::Sign, BoundKind::Box];

#[test]
fn ours_and_the_reference_agree() {
    let mut compared = 0;
    for seed in 0..240u64 {
        let s = seed as usize;
        let case = random_case(seed, s, BALLS[s / 5 % 4], BOUNDS[s / 20 % 3], s / 60 % 2 == 1, s / 120 % 2 == 1);
        let case = with_a_matching_row(case, seed);
        let row = solve(&case).unwrap_or_else(|e| panic!("{}: {e}", case.name));
        assert_eq!(row.status, Status::Solved, "{}: {:.1e}", case.name, row.relative_gap);
        assert!(case.is_feasible(&row.weights), "{}", case.name);
        let mismatch = (square(&case.residual(&row.weights)) / square(&case.target).max(1e-300)).sqrt();
        assert!(mismatch <= 1.1e-6, "{}: mismatch {mismatch:.1e}", case.name);
        let cost = case.cost(&row.weights);
        assert!((cost - row.primal).abs() <= 1e-9 * cost, "{}", case.name);
        // Where unpenalised entries match alone the cost is rounding: a part in 1e-14 of what weights of one cost.
        let rounding = 1e-14 * case.cost(&case.made_feasible(&vec![1.0; case.features.cols()]));
        if cost > rounding {
            let theirs = reference(&case, cost).unwrap_or_else(|| panic!("{}: infeasible", case.name));
            let apart = (cost - theirs).abs();
            assert!(apart <= 1e-6 * cost + rounding, "{}: ours {cost:.9e}, reference {theirs:.9e}", case.name);
            compared += 1;
        }
    }
    assert!(compared > 150, "{compared}");
}

#[test]
fn rows_that_cannot_match_are_named_with_the_best_residual() {
    let mut r = Random::new(8);
    let (m, d) = (50, 20);
    let features = Matrix::from_fn(m, d, |_, _| r.normal());
    let targets = Matrix::from_fn(m, 3, |i, t| match t {
        1 => r.normal(),
        _ => features[(i, 0)] * 0.5 - features[(i, t + 4)] * 0.25,
    });
    let statistics = Statistics::of(&features, &targets).unwrap();
    let design = Design::new(&statistics).unwrap();
    let penalty = L1::new(0.1).unwrap();
    let settings = SolverSettings::default();
    let solve = |problems: &[RowProblem]| {
        solve_rows_exactly(&design, &penalty, problems, &settings, Threads::one(), &Cancel::new(), |_| {})
    };
    // Noise with more samples than features; the residual of plain least squares, by an independent factorisation.
    let problems: Vec<RowProblem> = (0..3).map(|t| RowProblem::new(t, 1.0)).collect();
    let Err(Error::Infeasible { rows }) = solve(&problems) else { panic!("noise matched") };
    assert_eq!(rows.len(), 1);
    assert_eq!(rows[0].name, "row 1");
    let gram = Matrix::from_fn(d, d, |a, b| (0..m).map(|i| features[(i, a)] * features[(i, b)]).sum());
    let mut factor = simplicit::linalg::Cholesky::with_capacity(d);
    assert!(factor.factor(d, |a| a.copy_from_slice(gram.as_slice())));
    let mut w: Vec<f64> = (0..d).map(|j| (0..m).map(|i| features[(i, j)] * targets[(i, 1)]).sum()).collect();
    factor.solve(&mut w, 1);
    let residual = |i: usize| targets[(i, 1)] - (0..d).map(|j| features[(i, j)] * w[j]).sum::<f64>();
    let energy: f64 = (0..m).map(|i| targets[(i, 1)].powi(2)).sum();
    let best = ((0..m).map(|i| residual(i).powi(2)).sum::<f64>() / energy).sqrt();
    assert!((rows[0].relative_residual - best).abs() <= 1e-6 * best, "{} {best}", rows[0].relative_residual);

    // κ too small: 0.5|x₀| + 0.25|x₄| needs 0.75.
    let ball = |radius| RowProblem { ball: Some(Ball::on_states(radius, d, d)), ..RowProblem::new(0, 1.0) };
    solve(&[ball(0.75 + 1e-9)]).unwrap();
    let Err(Error::Infeasible { rows }) = solve(&[ball(0.7)]) else { panic!("outside the ball") };
    assert!(rows[0].relative_residual > 1e-3 && rows[0].relative_residual < 0.2, "{rows:?}");
    // A mask without the connection it takes.
    let mut weights = vec![1.0; d];
    weights[0] = f64::INFINITY;
    let masked = RowProblem { weights: Some(weights), ..RowProblem::new(0, 1.0) };
    let message = solve(&[masked]).unwrap_err().to_string();
    assert!(message.starts_with("exact matching is infeasible for 1 row(s): row 0 (best residual"), "{message}");
    // The others are fine.
    let rows = solve(&[RowProblem::new(2, 1.0), RowProblem::new(0, 1.0)]).unwrap();
    assert!(rows.iter().all(|row| row.status == Status::Solved));
    assert!((rows[1].weights[0] - 0.5).abs() < 1e-6 && (rows[1].weights[4] + 0.25).abs() < 1e-6);
}

/// The paper's states as a source, with their statistics.
fn paper_source() -> ArrayStates {
    let (u, z, x, y) = paper::states();
    let array = Array::from_matrix::<f64>;
    ArrayStates::without_layout(array("u", &u), array("z", &z), array("x", &x), array("y", &y), Activation::Relu)
        .unwrap()
}

#[test]
fn rows_of_the_paper_match_and_a_second_pass_confirms_it() {
    let source = paper_source();
    let cancel = Cancel::new();
    let statistics = Statistics::of_states(&source, false, Threads::available(), &cancel, |_| {}).unwrap();
    let design = Design::new(&statistics).unwrap();
    let (n, d) = (paper::STATES, paper::STATES + paper::INPUTS);
    let problems: Vec<RowProblem> = [0, 9, 30, 70, 111, 112, 118]
        .into_iter()
        .map(|t| RowProblem { ball: (t < n).then(|| Ball::on_states(paper::KAPPA, n, d)), ..RowProblem::new(t, 1.0) })
        .collect();
    let penalty = L1::new(1e-3).unwrap();
    let settings = SolverSettings::default();
    let solve = |threads| {
        solve_rows_exactly(&design, &penalty, &problems, &settings, Threads::new(threads), &cancel, |_| {}).unwrap()
    };
    let rows = solve(1);
    assert_eq!(rows, solve(2));
    let weights: Vec<(usize, &[f64])> =
        problems.iter().zip(&rows).map(|(p, row)| (p.target, row.weights.as_slice())).collect();
    let mismatch = largest_mismatch(&source, false, &weights, Threads::available(), &cancel).unwrap();
    let (a, b, c) = (paper::stored("A"), paper::stored("B"), paper::stored("C"));
    for ((problem, row), mismatch) in problems.iter().zip(&rows).zip(mismatch) {
        let t = problem.target;
        assert_eq!(row.status, Status::Solved, "row {t}: {:.1e}", row.relative_gap);
        let size: f64 = row.weights[..n].iter().map(|w| w.abs()).sum();
        assert!(t >= n || size <= paper::KAPPA, "row {t}: {size}");
        let rms = design.target_rms(t);
        assert!(mismatch <= 1e-4 * rms, "row {t}: {:.1e}", mismatch / rms);
        // The baseline's own row is one that matches: the optimum cannot cost more.
        let own: f64 = if t < n {
            a.row(t).iter().chain(b.row(t)).map(|w| w.abs()).sum()
        } else {
            c.row(t - n).iter().map(|w| w.abs()).sum()
        };
        assert!(row.primal <= 1e-3 * own * (1.0 + 1e-6), "row {t}: {} above {}", row.primal, 1e-3 * own);
    }
    // The confirmation can fail: a row that is not the answer.
    let wrong = vec![0.0; d];
    let mismatch = largest_mismatch(&source, false, &[(5, &wrong)], Threads::one(), &cancel).unwrap();
    let block = paper::states().1;
    let largest = (0..paper::SAMPLES).map(|i| block[(i, 5)].abs()).fold(0.0, f64::max);
    assert_eq!(mismatch, [largest]);
    assert!(largest_mismatch(&source, true, &[(5, &wrong)], Threads::one(), &cancel).is_err());
    assert!(largest_mismatch(&source, false, &[(122, &wrong)], Threads::one(), &cancel).is_err());
}

#[test]
fn zero_targets_constants_and_cancelled_runs() {
    let mut r = Random::new(12);
    let features = Matrix::from_fn(20, 30, |_, j| if j == 29 { 1.0 } else { r.normal() });
    let targets = Matrix::from_fn(20, 2, |_, t| if t == 0 { 0.0 } else { 3.0 });
    let statistics = Statistics::of(&features, &targets).unwrap();
    let design = Design::new(&statistics).unwrap();
    let penalty = Ridge::new(0.5).unwrap();
    let mut weights = vec![1.0; 30];
    weights[29] = 0.0;
    let problems: Vec<RowProblem> =
        (0..2).map(|t| RowProblem { weights: Some(weights.clone()), ..RowProblem::new(t, 1.0) }).collect();
    let settings = SolverSettings::default();
    let mut told = Vec::new();
    let solve = |cancel: &Cancel, progress: &mut dyn FnMut(usize)| {
        solve_rows_exactly(&design, &penalty, &problems, &settings, Threads::one(), cancel, progress)
    };
    let rows = solve(&Cancel::new(), &mut |n| told.push(n)).unwrap();
    assert_eq!(told.last(), Some(&2));
    assert_eq!(rows[0].weights, [0.0; 30]);
    // The unpenalised constant alone matches the constant target, for nothing.
    assert_eq!(rows[1].status, Status::Solved);
    assert!((rows[1].weights[29] - 3.0).abs() < 1e-6 && rows[1].primal < 1e-9, "{:?}", rows[1]);
    let cancel = Cancel::new();
    cancel.cancel();
    assert!(matches!(solve(&cancel, &mut |_| {}), Err(Error::Cancelled)));
}
