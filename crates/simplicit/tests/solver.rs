//! The row solver against the conic reference and against certificates recomputed from the samples.

#![allow(clippy::unwrap_used)] // Helpers of tests are tests.

mod common;

use common::rows::{BallKind, BoundKind, Case, random_case};
use simplicit::linalg::Matrix;
use simplicit::parallel::{Cancel, Threads};
use simplicit::solver::reference::{ReferenceForm, ReferenceSettings, ReferenceStatus, solve_by_cones};
use simplicit::solver::{Design, RowSolution, SolverSettings, Status, solve_rows};
use simplicit::statistics::Statistics;

/// The default tolerance, which every row called solved must meet by an independent count.
const TOLERANCE: f64 = 1e-6;

fn statistics(case: &Case) -> Statistics {
    let target = Matrix::from_vec(case.samples(), 1, case.target.clone()).unwrap();
    Statistics::of(&case.features, &target).unwrap()
}

fn solve(case: &Case) -> RowSolution {
    let statistics = statistics(case);
    let design = Design::new(&statistics).unwrap();
    let penalty = case.penalty.penalty().unwrap();
    let settings = SolverSettings::default();
    let problems = [case.problem.clone()];
    solve_rows(&design, &*penalty, &problems, &settings, Threads::one(), &Cancel::new(), |_| {}).unwrap().remove(0)
}

#[test]
fn explore() {
    let mut seed = 0;
    let (mut solved, mut limit, mut bad) = (0, 0, 0);
    let mut tally = [0; 4];
    let (mut t_ours, mut t_ref) = (0.0, 0.0);
    for ball in [BallKind::None, BallKind::Tight, BallKind::Slack, BallKind::Zero] {
        for bounds in [BoundKind::None, BoundKind::Sign, BoundKind::Box] {
            for weighted in [false, true] {
                for units in [false, true] {
                    for family in 0..5 {
                        for _ in 0..3 {
                            seed += 1;
                            let case = random_case(seed, family, ball, bounds, weighted, units);
                            let t0 = std::time::Instant::now();
                            let ours = solve(&case);
                            t_ours += t0.elapsed().as_secs_f64();
                            let st = statistics(&case);
                            let design = Design::new(&st).unwrap();
                            let reference = solve_by_cones(&design, case.penalty, &case.problem, &ReferenceSettings{form: ReferenceForm::Residual{features:&case.features,target:&case.target},tolerance:1e-11,..Default::default()}).unwrap();
                            t_ref += reference.seconds;
                            tally[reference.status as usize] += 1;
                            let p = case.objective(&ours.weights);
                            let scale = case.scale(p);
                            let p_ref = case.objective(&case.made_feasible(&reference.weights));
                            let gap = case.gap(&ours.weights) / scale;
                            if ours.status == Status::Solved { solved += 1; } else { limit += 1; }
                            let feasible = case.is_feasible(&ours.weights);
                            let wrong = ours.status == Status::Limit || !feasible || gap > TOLERANCE || (p - p_ref) / scale > 1e-6 || (reference.status == ReferenceStatus::Solved && (p_ref - p) / scale > 1e-6);
                            if wrong {
                                bad += 1;
                                println!("{} {:?} rel {:.1e} gap {gap:.1e} feasible {feasible} ours {p:.9e} ref {p_ref:.9e} diff {:.1e} {:?} P0 {:.2e}", case.name, ours.status, ours.relative_gap, (p - p_ref) / scale, reference.status, case.objective_at_zero());
                            }
                        }
                    }
                }
            }
        }
    }
    println!("solved {solved} limit {limit} bad {bad} reference {tally:?} t {t_ours} {t_ref}");
}
