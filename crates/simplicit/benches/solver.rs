//! The paper's problem (n = 112, p = 784, q = 10, m = 1000, λ = 0.1, β = 1e-3, κ = 0.99, unscaled sums) by our solver
//! and, on a sample of rows, by Clarabel in both forms at the same accuracy; then how our cost grows.
//! `cargo bench -p simplicit --bench solver`, one thread throughout; with `-- --ours N` our own rows alone, N times.

#![allow(clippy::print_stdout, clippy::unwrap_used, missing_docs, unreachable_pub)]

#[path = "../tests/common/paper.rs"]
#[allow(dead_code)]
mod paper;
#[path = "../tests/common/reference.rs"]
#[allow(dead_code)]
mod reference;

use std::time::Instant;

/// Seconds this thread has been running: other work on the machine does not count. Wall time where it is not known.
fn busy() -> f64 {
    static START: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
    let wall = START.get_or_init(Instant::now).elapsed().as_secs_f64();
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    text.split_whitespace().next().and_then(|ns| ns.parse::<f64>().ok()).map_or(wall, |ns| 1e-9 * ns)
}

use reference::{ConicPenalty, ReferenceForm, ReferenceSettings, solve_by_cones};
use simplicit::linalg::{Matrix, axpy, dot};
use simplicit::parallel::{Cancel, Threads};
use simplicit::problem::penalty::L1;
use simplicit::problem::{Ball, RowProblem};
use simplicit::solver::{Design, RowSolution, SolverSettings, Status, solve_rows};
use simplicit::statistics::Statistics;

const LAMBDA: f64 = 0.1;
const BETA: f64 = 1e-3;
/// Two rows of every layer and of the outputs.
const SAMPLE: [usize; 8] = [0, 7, 20, 40, 60, 111, 112, 118];
/// Tolerances asked of Clarabel, relative to the optimum (it is told its size): the loosest that reaches 1e-6 counts.
const TOLERANCES: [f64; 3] = [1e-6, 1e-7, 1e-8];

fn main() {
    let (u, z, x, y) = paper::states();
    let (features, targets) = (beside(&[&x, &u]), beside(&[&z, &y]));

    let mut arguments = std::env::args().skip_while(|a| a != "--ours").skip(1);
    if let Some(times) = arguments.next().and_then(|n| n.parse::<usize>().ok()) {
        for _ in 0..times {
            let start = busy();
            let statistics = Statistics::of(&features, &targets).unwrap();
            let problems: Vec<RowProblem> = (0..statistics.targets()).map(|k| problem(k, &statistics)).collect();
            let rows = solve(&Design::new(&statistics).unwrap(), &problems);
            let worst = rows.iter().map(|r| r.relative_gap).fold(0.0, f64::max);
            let systems: usize = rows.iter().map(|r| r.newton_steps).sum();
            println!("{:.0} ms, {systems} systems, worst relative gap {worst:.1e}", 1e3 * (busy() - start));
        }
        return;
    }

    println!("## The paper's problem, 122 rows, one thread\n");
    let start = busy();
    let statistics = Statistics::of(&features, &targets).unwrap();
    let gathered = busy() - start;
    let design = Design::new(&statistics).unwrap();
    let problems: Vec<RowProblem> = (0..statistics.targets()).map(|k| problem(k, &statistics)).collect();
    let rows = solve(&design, &problems);
    let total = busy() - start;
    let worst = rows.iter().map(|r| r.relative_gap).fold(0.0, f64::max);
    let limit = rows.iter().filter(|r| r.status != Status::Solved).count();
    let newton: usize = rows.iter().map(|r| r.newton_steps).sum();
    println!("| | |\n|---|---|");
    println!("| statistics | {:.0} ms |", 1e3 * gathered);
    println!("| all rows, set-up counted | {:.0} ms, {:.2} ms a row |", 1e3 * total, 1e3 * total / rows.len() as f64);
    println!("| splitting steps a row | {:.1} |", rows.iter().map(|r| r.splitting_steps).sum::<usize>() as f64 / 122.0);
    println!("| linear systems a row | {:.1} |", newton as f64 / rows.len() as f64);
    println!("| worst relative gap | {worst:.1e}, {limit} rows at a limit |");
    println!("| peak memory of the process | {} |", peak_memory());

    println!("\n## Clarabel on {} of these rows, one thread\n", SAMPLE.len());
    println!("| row | form | tolerance asked | iterations | seconds | objective above ours | ours is faster by |");
    println!("|---|---|---|---|---|---|---|");
    // Ours again before every row of theirs, so that both meet the same other work.
    let (mut theirs, mut ours) = (0.0, 0.0);
    for k in SAMPLE {
        let start = busy();
        let again = Statistics::of(&features, &targets).unwrap();
        solve(&Design::new(&again).unwrap(), &problems);
        let per_row = (busy() - start) / rows.len() as f64;
        ours += per_row / SAMPLE.len() as f64;
        let target: Vec<f64> = (0..targets.rows()).map(|i| targets[(i, k)]).collect();
        let residual = ReferenceForm::Residual { features: &features, target: &target };
        for (name, form) in [("Gram", ReferenceForm::Gram), ("residual", residual)] {
            // The residual form is ten times slower: once is enough to see it.
            if name == "residual" && k != SAMPLE[0] {
                continue;
            }
            // The loosest tolerance that reaches 1e-6, or the tightest tried.
            for tolerance in TOLERANCES {
                let size = Some(rows[k].primal);
                let settings = ReferenceSettings { form, tolerance, size, exact: false };
                let penalty = ConicPenalty::L1 { beta: BETA };
                let start = busy();
                let Ok(solved) = solve_by_cones(&statistics, penalty, &problems[k], &settings) else { break };
                let seconds = busy() - start;
                let above = (solved.objective - rows[k].primal) / rows[k].primal;
                if above.abs() <= 1e-6 || tolerance == TOLERANCES[TOLERANCES.len() - 1] {
                    println!(
                        "| {k} | {name} | {tolerance:.0e} | {} | {seconds:.2} | {above:.1e} | {:.0} × |",
                        solved.iterations,
                        seconds / per_row
                    );
                    theirs += if name == "Gram" { seconds / SAMPLE.len() as f64 } else { 0.0 };
                    break;
                }
            }
        }
    }
    println!("\nMean of the Gram form: {theirs:.2} s a row; ours {:.2} ms: **{:.0} ×**.", 1e3 * ours, theirs / ours);

    println!("\n## Two phases, and a third method\n");
    println!(
        "| splitting steps, at most | linear systems a row | most | seconds, 122 rows | rows at a limit |\n|---|---|---|---|---|"
    );
    for splitting_steps in [0, 20, 40, 80, 160] {
        let design = Design::new(&statistics).unwrap();
        let start = busy();
        let rows = solve_with(&design, &problems, &SolverSettings { splitting_steps, ..SolverSettings::default() });
        let seconds = busy() - start;
        let steps: usize = rows.iter().map(|r| r.newton_steps).sum();
        let most = rows.iter().map(|r| r.newton_steps).max().unwrap_or(0);
        let limit = rows.iter().filter(|r| r.status != Status::Solved).count();
        println!("| {splitting_steps} | {:.1} | {most} | {seconds:.2} | {limit} |", steps as f64 / rows.len() as f64);
    }
    println!("\n| output row | coordinate-descent epochs | seconds | objective above ours |\n|---|---|---|---|");
    for k in [112, 118] {
        for epochs in [100, 1000, 4000] {
            let start = busy();
            let objective = coordinate_descent(&statistics, k, epochs);
            let above = (objective - rows[k].primal) / rows[k].primal;
            println!("| {k} | {epochs} | {:.2} | {above:.1e} |", busy() - start);
        }
    }

    println!(
        "\n## Growth\n\n| samples | statistics | rows (set-up included) | linear systems a row |\n|---|---|---|---|"
    );
    for copies in [1, 5, 20, 50] {
        let (many, goals) = (repeated(&features, copies), repeated(&targets, copies));
        let start = busy();
        let statistics = Statistics::of(&many, &goals).unwrap();
        let gathered = busy() - start;
        let design = Design::new(&statistics).unwrap();
        let problems: Vec<RowProblem> = (0..statistics.targets()).map(|k| problem(k, &statistics)).collect();
        let start = busy();
        let rows = solve(&design, &problems);
        let seconds = busy() - start;
        let steps: usize = rows.iter().map(|r| r.newton_steps).sum();
        println!(
            "| {} | {:.0} ms | {:.0} ms | {:.1} |",
            many.rows(),
            1e3 * gathered,
            1e3 * seconds,
            steps as f64 / rows.len() as f64
        );
    }
    println!("\n| rows | seconds | | features | seconds for 122 rows |\n|---|---|---|---|---|");
    for (count, width) in [(16, 112), (32, 304), (64, 504), (122, 896)] {
        let design = Design::new(&statistics).unwrap();
        let start = busy();
        solve(&design, &problems[..count]);
        let some_rows = busy() - start;
        let narrow = Design::with_features(&statistics, (0..width).collect()).unwrap();
        let narrowed: Vec<RowProblem> = problems
            .iter()
            .map(|p| {
                let ball = p.ball.as_ref().map(|b| Ball { weights: b.weights[..width].to_vec(), ..b.clone() });
                RowProblem { ball, ..p.clone() }
            })
            .collect();
        let start = busy();
        solve(&narrow, &narrowed);
        println!("| {count} | {some_rows:.2} | | {width} | {:.2} |", busy() - start);
    }
}

fn problem(k: usize, statistics: &Statistics) -> RowProblem {
    let ball = (k < paper::STATES).then(|| Ball::on_states(paper::KAPPA, paper::STATES, statistics.features()));
    RowProblem { ball, ..RowProblem::new(k, LAMBDA * statistics.samples() as f64) }
}

fn solve(design: &Design, problems: &[RowProblem]) -> Vec<RowSolution> {
    solve_with(design, problems, &SolverSettings::default())
}

fn solve_with(design: &Design, problems: &[RowProblem], settings: &SolverSettings) -> Vec<RowSolution> {
    let penalty = L1::new(BETA).unwrap();
    solve_rows(design, &penalty, problems, settings, Threads::one(), &Cancel::new(), |_| {}).unwrap()
}

/// Cyclic coordinate descent on the Gram matrix for a row without a ball: the objective after some epochs.
fn coordinate_descent(statistics: &Statistics, k: usize, epochs: usize) -> f64 {
    let (gram, h) = (statistics.gram(), statistics.cross(k));
    let d = statistics.features();
    let mut w = vec![0.0f64; d];
    // h − Gw, kept up to date.
    let mut slack = h.to_vec();
    for _ in 0..epochs {
        for j in 0..d {
            let diagonal = gram[(j, j)];
            if diagonal == 0.0 {
                continue;
            }
            let pull = 2.0 * LAMBDA * (slack[j] + diagonal * w[j]);
            let next = (pull.abs() - BETA).max(0.0).copysign(pull) / (2.0 * LAMBDA * diagonal);
            let step = next - w[j];
            if step != 0.0 {
                w[j] = next;
                axpy(&mut slack, -step, gram.row(j));
            }
        }
    }
    let residual = statistics.energy(k) - dot(&w, h) - dot(&w, &slack);
    LAMBDA * residual + BETA * w.iter().map(|v| v.abs()).sum::<f64>()
}

fn beside(parts: &[&Matrix]) -> Matrix {
    let cols = parts.iter().map(|p| p.cols()).sum();
    let data = (0..parts[0].rows()).flat_map(|i| parts.iter().flat_map(move |p| p.row(i).to_vec())).collect();
    Matrix::from_vec(parts[0].rows(), cols, data).unwrap()
}

/// The same samples again and again, faintly scaled so that no two blocks are equal.
fn repeated(m: &Matrix, copies: usize) -> Matrix {
    Matrix::from_fn(copies * m.rows(), m.cols(), |i, j| m[(i % m.rows(), j)] * (1.0 + 1e-3 * (i / m.rows()) as f64))
}

fn peak_memory() -> String {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"));
    line.map_or("not known on this system".into(), |l| l.trim().to_string())
}
