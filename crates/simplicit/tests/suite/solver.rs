//! The row solver against the conic reference and against certificates recomputed from the samples.

#![allow(clippy::unwrap_used, clippy::panic)] // Helpers of tests are tests.

use crate::common::paper;
use crate::common::reference::{
    ConicPenalty, ReferenceForm, ReferenceSettings, ReferenceSolution, ReferenceStatus, solve_by_cones,
};
use crate::common::rows::{BallKind, BoundKind, Case, known_optimum, random_case, square};
use simplicit::linalg::{Matrix, toward_zero};
use simplicit::parallel::{Cancel, Threads};
use simplicit::problem::penalty::L1;
use simplicit::problem::{Ball, Penalty, RowProblem, Units};
use simplicit::random::Random;
use simplicit::solver::{Design, RowSolution, SolverSettings, Status, solve_rows, solve_rows_into};
use simplicit::statistics::Statistics;
use simplicit::{Error, Result};

/// The default tolerance, which every row called solved must meet by an independent count.
const TOLERANCE: f64 = 1e-6;

const BALLS: [BallKind; 4] = [BallKind::None, BallKind::Tight, BallKind::Slack, BallKind::Zero];
const BOUNDS: [BoundKind; 3] = [BoundKind::None, BoundKind::Sign, BoundKind::Box];

fn statistics(case: &Case) -> Statistics {
    let target = Matrix::from_vec(case.samples(), 1, case.target.clone()).unwrap();
    Statistics::of(&case.features, &target).unwrap()
}

fn solve_problem(case: &Case, problem: &RowProblem) -> RowSolution {
    let statistics = statistics(case);
    let design = Design::new(&statistics).unwrap();
    let penalty = case.penalty.penalty().unwrap();
    let (settings, cancel) = (SolverSettings::default(), Cancel::new());
    let problems = [problem.clone()];
    solve_rows(&design, &*penalty, &problems, &settings, Threads::one(), &cancel, |_| {}).unwrap().remove(0)
}

fn solve(case: &Case) -> RowSolution {
    solve_problem(case, &case.problem)
}

fn by_cones(case: &Case, form: ReferenceForm, tolerance: f64, size: f64) -> ReferenceSolution {
    let settings = ReferenceSettings { form, exact: false, tolerance, size: Some(size) };
    solve_by_cones(&statistics(case), case.penalty, &case.problem, &settings).unwrap()
}

/// The first form and tolerance at which the conic solver calls itself successful. `size` is about the optimal value.
fn reference(case: &Case, size: f64) -> ReferenceSolution {
    let residual = ReferenceForm::Residual { features: &case.features, target: &case.target };
    let gram = ReferenceForm::Gram;
    for (form, tolerance) in [(residual, 1e-9), (residual, 1e-8), (gram, 1e-9), (gram, 1e-8)] {
        let solution = by_cones(case, form, tolerance, size);
        if solution.status == ReferenceStatus::Solved {
            return solution;
        }
    }
    panic!("no reference for {}", case.name)
}

/// Everything a solved row promises, from the samples: optimal within the tolerance, feasible to the last bit, in
/// float32 too, and its own numbers right.
fn check(case: &Case, row: &RowSolution) {
    let (name, w) = (&case.name, &row.weights);
    assert_eq!(row.status, Status::Solved, "{name}: gap {}", row.relative_gap);
    assert!(row.relative_gap <= TOLERANCE, "{name}");
    assert!(case.is_feasible(w), "{name}: {w:?}");
    let rounded: Vec<f64> = w.iter().map(|w| f64::from(toward_zero(*w))).collect();
    assert!(case.is_feasible(&rounded), "{name}: float32");
    let objective = case.objective(w);
    let scale = case.scale(objective);
    let gap = case.gap(w);
    // What is certified are the statistics, and their rounding is relative to the value at zero.
    let rounding = 1e-14 * case.objective_at_zero();
    let reported = row.relative_gap;
    assert!(gap <= TOLERANCE * scale + rounding, "{name}: gap {:.2e} where {reported:.2e} is reported", gap / scale);
    assert!((row.primal - objective).abs() <= 1e-9 * scale + 10.0 * rounding, "{name}: objective");
}

fn compare(case: &Case, row: &RowSolution) {
    let ours = case.objective(&row.weights);
    let scale = case.scale(ours);
    let theirs = case.objective(&case.made_feasible(&reference(case, scale).weights));
    assert!((ours - theirs).abs() <= 1e-6 * scale, "{}: ours {ours:.9e}, reference {theirs:.9e}", case.name);
}

#[test]
fn ours_and_the_reference_agree_on_hundreds_of_problems() {
    let (mut seed, mut rows_not_zero) = (0, 0);
    for ball in BALLS {
        for bounds in BOUNDS {
            for (weighted, rms_units) in [(false, false), (false, true), (true, false), (true, true)] {
                for family in 0..5 {
                    for _ in 0..3 {
                        seed += 1;
                        let case = random_case(seed, family, ball, bounds, weighted, rms_units);
                        let row = solve(&case);
                        check(&case, &row);
                        compare(&case, &row);
                        rows_not_zero += usize::from(row.weights.iter().any(|w| *w != 0.0));
                    }
                }
            }
        }
    }
    assert_eq!(seed, 720);
    assert!(rows_not_zero > 500, "{rows_not_zero}");
}

#[test]
fn the_references_two_forms_agree() {
    for seed in 0..60 {
        let ball = BALLS[seed as usize % 4];
        let case = random_case(seed + 5000, seed as usize, ball, BOUNDS[seed as usize % 3], seed % 2 == 0, false);
        let residual = ReferenceForm::Residual { features: &case.features, target: &case.target };
        let size = case.scale(solve(&case).primal);
        let (gram, residual) =
            (by_cones(&case, ReferenceForm::Gram, 1e-9, size), by_cones(&case, residual, 1e-9, size));
        for solution in [&gram, &residual] {
            assert_ne!(solution.status, ReferenceStatus::Infeasible, "{}", case.name);
            if solution.status == ReferenceStatus::Solved {
                let again = case.objective(&solution.weights);
                let resolved = 1e-6 * case.scale(again) + 1e-8 * case.objective_at_zero();
                assert!((again - solution.objective).abs() <= resolved, "{} {again} {solution:?}", case.name);
                assert!(
                    (gram.objective - residual.objective).abs() <= 2.0 * resolved,
                    "{} {gram:?} {residual:?}",
                    case.name
                );
            }
        }
    }
}

#[test]
fn a_known_optimum_is_found() {
    for seed in 0..200 {
        let (case, optimum) = known_optimum(seed);
        let row = solve(&case);
        check(&case, &row);
        let best = case.objective(&optimum);
        // Built as an optimum: the certificate, recomputed from the samples, must know it.
        assert!(case.is_feasible(&optimum) && case.gap(&optimum) <= 1e-9 * best, "{}", case.name);
        let excess = case.objective(&row.weights) - best;
        assert!(excess <= TOLERANCE * best, "{}: {excess:.2e} above {best:.2e}", case.name);
        // λ‖Ũᵀ(w − w*)‖² ≤ gap.
        let apart: Vec<f64> =
            case.residual(&row.weights).iter().zip(case.residual(&optimum)).map(|(a, b)| a - b).collect();
        let lambda = case.problem.fit / case.samples() as f64;
        assert!(lambda * square(&apart) <= row.gap + 1e-9 * best, "{}", case.name);
    }
}

/// Rows of the paper's problem as cases over some of its features.
fn paper_rows(features: &[usize], targets: &[usize], ball: bool, penalty: ConicPenalty) -> Vec<Case> {
    let (u, z, x, y) = paper::states();
    let n = paper::STATES;
    let value = |i: usize, j: usize| if j < n { x[(i, j)] } else { u[(i, j - n)] };
    targets
        .iter()
        .map(|&t| {
            let mut problem = RowProblem::new(0, 0.1 * paper::SAMPLES as f64);
            if ball && t < n {
                let weights = features.iter().map(|&j| f64::from(u8::from(j < n))).collect();
                problem.ball = Some(Ball { radius: paper::KAPPA, weights });
            }
            Case {
                name: format!("paper row {t} {penalty:?}"),
                features: Matrix::from_fn(paper::SAMPLES, features.len(), |i, k| value(i, features[k])),
                target: (0..paper::SAMPLES).map(|i| if t < n { z[(i, t)] } else { y[(i, t - n)] }).collect(),
                penalty,
                problem,
            }
        })
        .collect()
}

#[test]
fn ours_and_the_reference_agree_on_fashion_mnist_rows() {
    let every_sixth: Vec<usize> = (0..paper::STATES + paper::INPUTS).step_by(6).collect();
    for penalty in [
        ConicPenalty::L1 { beta: 1e-3 },
        ConicPenalty::Perspective { alpha: 1e-3, mu: 1e-3 },
        ConicPenalty::Perspective { alpha: 1e-1, mu: 1e-5 },
        ConicPenalty::ElasticNet { beta: 1e-2, alpha: 1e-3 },
        ConicPenalty::Ridge { alpha: 1e-3 },
    ] {
        for case in paper_rows(&every_sixth, &[0, 20, 60, 111, 112, 121], true, penalty) {
            let row = solve(&case);
            check(&case, &row);
            compare(&case, &row);
        }
    }
}

#[test]
fn rows_over_all_features_agree_too() {
    let all: Vec<usize> = (0..paper::STATES + paper::INPUTS).collect();
    for case in paper_rows(&all, &[60, 112], true, ConicPenalty::L1 { beta: 1e-3 }) {
        let row = solve(&case);
        check(&case, &row);
        let ours = case.objective(&row.weights);
        // The Gram form: the other takes ten times as long.
        let reference = by_cones(&case, ReferenceForm::Gram, 1e-7, ours);
        let theirs = case.objective(&case.made_feasible(&reference.weights));
        assert!((ours - theirs).abs() <= 1e-6 * ours, "{}: ours {ours:.9e}, reference {theirs:.9e}", case.name);
    }
}

#[test]
fn every_row_of_the_papers_problem_is_certified() {
    let (u, z, x, y) = paper::states();
    let beside = |a: &Matrix, b: &Matrix| {
        Matrix::from_fn(
            a.rows(),
            a.cols() + b.cols(),
            |i, j| if j < a.cols() { a[(i, j)] } else { b[(i, j - a.cols())] },
        )
    };
    let statistics = Statistics::of(&beside(&x, &u), &beside(&z, &y)).unwrap();
    let design = Design::new(&statistics).unwrap();
    let n = paper::STATES;
    let problems: Vec<RowProblem> = (0..n + paper::OUTPUTS)
        .map(|t| {
            let ball = (t < n).then(|| Ball::on_states(paper::KAPPA, n, n + paper::INPUTS));
            RowProblem { ball, ..RowProblem::new(t, 0.1 * paper::SAMPLES as f64) }
        })
        .collect();
    let penalty = L1::new(1e-3).unwrap();
    let (settings, cancel) = (SolverSettings::default(), Cancel::new());
    let rows = solve_rows(&design, &penalty, &problems, &settings, Threads::available(), &cancel, |_| {}).unwrap();
    let all: Vec<usize> = (0..n + paper::INPUTS).collect();
    let mut targets: Vec<usize> = (0..n + paper::OUTPUTS).step_by(11).collect();
    targets.push(n + 3);
    for (case, target) in paper_rows(&all, &targets, true, ConicPenalty::L1 { beta: 1e-3 }).iter().zip(targets) {
        check(case, &rows[target]);
    }
    assert!(rows.iter().all(|row| row.status == Status::Solved));
}

#[test]
fn where_it_starts_does_not_matter() {
    let mut r = Random::new(9);
    for seed in 0..40 {
        let case =
            random_case(seed + 900, seed as usize, BALLS[seed as usize % 4], BOUNDS[seed as usize % 3], false, true);
        let cold = solve(&case);
        check(&case, &cold);
        let d = cold.weights.len();
        let perturbed = cold.weights.iter().map(|w| w * (1.0 + 0.1 * r.normal())).collect();
        for start in [cold.weights.clone(), perturbed, vec![0.0; d], (0..d).map(|_| 100.0 * r.normal()).collect()] {
            let warm = solve_problem(&case, &RowProblem { start: Some(start), ..case.problem.clone() });
            check(&case, &warm);
            let scale = case.scale(case.objective(&cold.weights));
            let apart = (case.objective(&warm.weights) - case.objective(&cold.weights)).abs();
            assert!(apart <= TOLERANCE * scale, "{}: {:.1e}", case.name, apart / scale);
        }
    }
}

/// Many rows over one design.
fn many_rows(rows: usize) -> (Statistics, Vec<RowProblem>) {
    let mut r = Random::new(77);
    let (m, d) = (60, 40);
    let features = Matrix::from_fn(m, d, |_, _| r.normal());
    let targets = Matrix::from_fn(m, rows, |_, _| r.normal());
    let statistics = Statistics::of(&features, &targets).unwrap();
    let problems = (0..rows)
        .map(|t| RowProblem {
            ball: (t % 2 == 0).then(|| Ball::on_states(0.5, d / 2, d)),
            ..RowProblem::new(t, 0.3 * m as f64)
        })
        .collect();
    (statistics, problems)
}

#[test]
fn the_number_of_threads_changes_no_bit() {
    let (statistics, problems) = many_rows(300);
    let penalty = L1::new(0.8).unwrap();
    let solve = |threads| {
        let design = Design::new(&statistics).unwrap();
        let (settings, cancel) = (SolverSettings::default(), Cancel::new());
        let mut told = Vec::new();
        let rows =
            solve_rows(&design, &penalty, &problems, &settings, Threads::new(threads), &cancel, |n| told.push(n));
        assert!(told.is_sorted() && told.last() == Some(&300), "{told:?}");
        rows.unwrap()
    };
    let one = solve(1);
    assert!(one.iter().all(|row| row.status == Status::Solved));
    for threads in [2, 5] {
        for (a, b) in one.iter().zip(solve(threads)) {
            assert_eq!(a, &b);
            assert!(a.weights.iter().zip(&b.weights).all(|(a, b)| a.to_bits() == b.to_bits()));
        }
    }
}

#[test]
fn a_cancelled_run_hands_over_what_is_finished() {
    let (statistics, problems) = many_rows(300);
    let penalty = L1::new(0.8).unwrap();
    let design = Design::new(&statistics).unwrap();
    let settings = SolverSettings::default();
    let all = solve_rows(&design, &penalty, &problems, &settings, Threads::one(), &Cancel::new(), |_| {}).unwrap();
    for threads in [1, 2] {
        let cancel = Cancel::new();
        let mut taken = Vec::new();
        let result =
            solve_rows_into(&design, &penalty, &problems, &settings, Threads::new(threads), &cancel, |k, row| {
                assert_eq!(k, taken.len());
                taken.push(row);
                cancel.cancel();
                Ok(())
            });
        assert!(matches!(result, Err(Error::Cancelled)));
        assert!(!taken.is_empty() && taken.len() < 300, "{}", taken.len());
        assert_eq!(taken, all[..taken.len()]);
    }
    let cancel = Cancel::new();
    cancel.cancel();
    let result = solve_rows(&design, &penalty, &problems, &settings, Threads::one(), &cancel, |_| {});
    assert!(matches!(result, Err(Error::Cancelled)));
    // Whoever takes the rows may refuse one.
    let result: Result<()> =
        solve_rows_into(&design, &penalty, &problems, &settings, Threads::one(), &Cancel::new(), |_, _| {
            Err(Error::setting("disk", "room", "none"))
        });
    assert!(matches!(result, Err(Error::Setting { .. })));
}

#[test]
fn the_unit_of_the_inputs_does_not_change_the_support() {
    let mut r = Random::new(31);
    let (m, states, inputs) = (80, 10, 30);
    let d = states + inputs;
    let features = Matrix::from_fn(m, d, |_, _| r.normal().max(0.0));
    let truth: Vec<f64> = (0..d).map(|_| if r.uniform() < 0.3 { 0.3 * r.normal() } else { 0.0 }).collect();
    let target: Vec<f64> = (0..m)
        .map(|i| features.row(i).iter().zip(&truth).map(|(f, w)| f * w).sum::<f64>() + 0.05 * r.normal())
        .collect();
    let rms = (square(&target) / m as f64).sqrt();
    let solve = |unit: f64, units: Units, beta: f64| {
        let scaled = Matrix::from_fn(m, d, |i, j| features[(i, j)] * if j < states { 1.0 } else { unit });
        let problem = RowProblem { units, ball: Some(Ball::on_states(0.4, states, d)), ..RowProblem::new(0, 1.0) };
        let penalty = ConicPenalty::L1 { beta };
        let case = Case { name: format!("unit {unit}"), features: scaled, target: target.clone(), penalty, problem };
        let row = solve(&case);
        check(&case, &row);
        row.weights
    };
    let support = |w: &[f64]| w.iter().map(|w| *w != 0.0).collect::<Vec<_>>();
    let normalised = Units::Rms { factor: 1.0 / rms };
    let (one, other) = (solve(1.0, normalised, 0.02), solve(255.0, normalised, 0.02));
    assert_eq!(support(&one), support(&other));
    let nonzeros = support(&one).iter().filter(|s| **s).count();
    assert!(nonzeros > 3 && nonzeros < d, "{nonzeros}");
    for j in 0..d {
        let back = other[j] * if j < states { 1.0 } else { 255.0 };
        assert!((one[j] - back).abs() <= 1e-3 * one[j].abs().max(1e-3), "{j}: {} {back}", one[j]);
    }
    // In stored units it does: the same β charges a weight on bytes 255 times less for the same effect.
    assert_ne!(support(&solve(1.0, Units::Stored, 0.02)), support(&solve(255.0, Units::Stored, 0.02)));
}

#[test]
fn targets_and_features_that_are_always_zero() {
    let mut r = Random::new(3);
    let mut features = Matrix::from_fn(30, 6, |_, _| r.normal());
    (0..30).for_each(|i| features[(i, 2)] = 0.0);
    let zeros = Matrix::zeros(30, 1);
    let statistics = Statistics::of(&features, &zeros).unwrap();
    let penalty = L1::new(0.1).unwrap();
    let solve = |statistics: &Statistics| {
        let design = Design::new(statistics).unwrap();
        let (settings, cancel) = (SolverSettings::default(), Cancel::new());
        let problems = [RowProblem::new(0, 1.0)];
        solve_rows(&design, &penalty, &problems, &settings, Threads::one(), &cancel, |_| {}).unwrap().remove(0)
    };
    let row = solve(&statistics);
    assert_eq!((row.status, row.primal, row.gap), (Status::Solved, 0.0, 0.0));
    assert_eq!(row.weights, [0.0; 6]);
    // No live feature at all.
    let target = Matrix::from_fn(30, 1, |i, _| i as f64);
    let row = solve(&Statistics::of(&Matrix::zeros(30, 4), &target).unwrap());
    assert_eq!(row.weights, [0.0; 4]);
    assert_eq!(row.status, Status::Solved);
    let mean_square: f64 = (0..30).map(|i| f64::from(i * i)).sum::<f64>() / 30.0;
    assert!((row.primal - mean_square).abs() < 1e-9);
}

#[test]
fn a_limit_is_a_status_with_an_honest_gap() {
    let case = random_case(1234, 0, BallKind::Tight, BoundKind::None, false, false);
    let statistics = statistics(&case);
    let design = Design::new(&statistics).unwrap();
    let penalty = case.penalty.penalty().unwrap();
    let best = case.objective(&solve(&case).weights);
    let settings =
        SolverSettings { tolerance: 1e-15, splitting_steps: 2, max_newton_steps: 1, ..SolverSettings::default() };
    let problems = [case.problem.clone()];
    let rows = solve_rows(&design, &*penalty, &problems, &settings, Threads::one(), &Cancel::new(), |_| {}).unwrap();
    let row = &rows[0];
    assert_eq!(row.status, Status::Limit);
    assert!(case.is_feasible(&row.weights));
    let excess = case.objective(&row.weights) - best;
    assert!(excess <= row.gap * (1.0 + 1e-9) + TOLERANCE * best, "excess {excess:.3e}, gap {:.3e}", row.gap);
}

#[test]
fn problems_that_make_no_sense_are_refused() {
    let (statistics, problems) = many_rows(2);
    let design = Design::new(&statistics).unwrap();
    let penalty = L1::new(0.8).unwrap();
    let good = &problems[0];
    let refused = |problem: RowProblem| {
        let (settings, cancel) = (SolverSettings::default(), Cancel::new());
        let result = solve_rows(&design, &penalty, &[problem], &settings, Threads::one(), &cancel, |_| {});
        result.unwrap_err().to_string()
    };
    for (problem, message) in [
        (RowProblem { target: 2, ..good.clone() }, "target: expected below 2, got 2"),
        (RowProblem { fit: 0.0, ..good.clone() }, "lambda of row 0: expected a positive number, got 0"),
        (RowProblem { weights: Some(vec![1.0; 3]), ..good.clone() }, "entry weights of row 0: expected 40, got 3"),
        (
            RowProblem { weights: Some(vec![-1.0; 40]), ..good.clone() },
            "entry weight of row 0: expected zero or more, got -1",
        ),
        (
            RowProblem { ball: Some(Ball::on_states(-1.0, 3, 40)), ..good.clone() },
            "kappa: expected zero or a positive number, got -1",
        ),
        (
            RowProblem { bounds: Some(vec![(0.5, 1.0); 40]), ..good.clone() },
            "bounds of row 0: expected intervals that contain 0, got [0.5, 1]",
        ),
        (
            RowProblem { start: Some(vec![f64::NAN; 40]), ..good.clone() },
            "start of row 0: expected finite weights, got NaN",
        ),
        (
            RowProblem { units: Units::Rms { factor: f64::NAN }, ..good.clone() },
            "unit factor of row 0: expected a positive number, got NaN",
        ),
    ] {
        assert_eq!(refused(problem), message);
    }
}

/// β·Huber: x²/(2δ) up to δ, |x| − δ/2 beyond. Bounded slope and no kink: unlike every built-in penalty.
#[derive(Debug)]
struct Huber {
    beta: f64,
    delta: f64,
}

impl Penalty for Huber {
    fn value(&self, x: f64) -> f64 {
        let x = x.abs();
        self.beta * if x <= self.delta { x * x / (2.0 * self.delta) } else { x - 0.5 * self.delta }
    }

    fn prox(&self, v: f64, tau: f64) -> f64 {
        let step = tau * self.beta;
        if v.abs() <= self.delta + step { v / (1.0 + step / self.delta) } else { v - step.copysign(v) }
    }

    fn conjugate(&self, g: f64) -> f64 {
        if g.abs() <= self.beta { self.delta * g * g / (2.0 * self.beta) } else { f64::INFINITY }
    }

    fn slope(&self, x: f64) -> f64 {
        self.beta * (x / self.delta).min(1.0)
    }

    fn curvature(&self, x: f64) -> f64 {
        if x <= self.delta { self.beta / self.delta } else { 0.0 }
    }
}

#[test]
fn a_users_penalty_without_a_kink() {
    let mut r = Random::new(66);
    let (m, d, lambda) = (40, 25, 0.7);
    let features = Matrix::from_fn(m, d, |_, _| r.normal());
    let target = Matrix::from_fn(m, 1, |_, _| 3.0 * r.normal());
    let statistics = Statistics::of(&features, &target).unwrap();
    let design = Design::new(&statistics).unwrap();
    let penalty = Huber { beta: 20.0, delta: 0.1 };
    let settings = SolverSettings { tolerance: 1e-12, ..SolverSettings::default() };
    let problems = [RowProblem::new(0, lambda * m as f64)];
    let rows = solve_rows(&design, &penalty, &problems, &settings, Threads::one(), &Cancel::new(), |_| {}).unwrap();
    let w = &rows[0].weights;
    assert_eq!(rows[0].status, Status::Solved);
    let residual: Vec<f64> =
        (0..m).map(|i| target[(i, 0)] - features.row(i).iter().zip(w).map(|(f, w)| f * w).sum::<f64>()).collect();
    // Smooth, so optimal is stationary: 2λŨr = f′(w).
    let (mut bent, mut straight) = (0, 0);
    for j in 0..d {
        let gradient = 2.0 * lambda * (0..m).map(|i| features[(i, j)] * residual[i]).sum::<f64>();
        let slope = penalty.slope(w[j].abs()).copysign(w[j]);
        assert!((gradient - slope).abs() <= 1e-4 * penalty.beta, "{j}: {gradient} {slope}");
        if w[j].abs() <= penalty.delta { bent += 1 } else { straight += 1 }
    }
    assert!(bent > 0 && straight > 0, "{bent} {straight}");
}
