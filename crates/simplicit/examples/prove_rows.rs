//! Cardinality rows of the FashionMNIST network, solved as training solves them and then searched for a proof: a table.
//!
//! `cargo run --release -p simplicit --example prove_rows [ROWS] [SECONDS] [RIDGE]`, from the root of the repository: the
//! first ROWS units of every layer (default 4), SECONDS a row (default 60), the ridge of the row's problem (default 1e-5).

#![allow(clippy::print_stdout)]

use std::time::Instant;

use simplicit::Result;
use simplicit::arrays::{Array, Inputs, Selection};
use simplicit::backend::Cpu;
use simplicit::linalg::Matrix;
use simplicit::network::Network;
use simplicit::parallel::{Cancel, Threads};
use simplicit::problem::{RowProblem, Units};
use simplicit::solver::prove::{ProveSettings, Verdict};
use simplicit::solver::{CardinalitySettings, Design, PricedRows, solve_cardinality};
use simplicit::states::{Collected, InputSource, StateSource};
use simplicit::statistics::Statistics;

fn main() -> Result<()> {
    let number = |k: usize, default: f64| std::env::args().nth(k).and_then(|a| a.parse().ok()).unwrap_or(default);
    let (count, seconds, ridge) = (number(1, 4.0) as usize, number(2, 60.0), number(3, 1e-5));
    let network = Network::from_onnx("data/fashion_fc.onnx")?;
    let images = Inputs::new(Array::open("data/fashion_train_images.idx.gz")?, None, &Selection::all())?;
    let states = Collected::new(&network, &images)?.block(0..images.samples())?;
    // Last layer first: 16 units that read 32, 32 that read 64, 64 that read the inputs.
    let part = |m: &Matrix, columns: std::ops::Range<usize>| {
        Matrix::from_fn(m.rows(), columns.len(), |i, j| m[(i, columns.start + j)])
    };
    let (x, z) = (&states.x, &states.z);
    let layers = [
        ("first", states.u.clone(), part(z, 48..112)),
        ("second", part(x, 48..112), part(z, 16..48)),
        ("third", part(x, 16..48), part(z, 0..16)),
        ("outputs", part(x, 0..16), states.y.clone()),
    ];
    let (one, cancel) = (Threads::one(), Cancel::new());
    println!("| layer | features | price | non-zeros | first bound | after the search | cases | s | verdict |");
    println!("|---|---|---|---|---|---|---|---|---|");
    for (name, features, targets) in layers {
        let statistics = Statistics::of(&features, &targets)?;
        let design = Design::new(&statistics)?;
        for price in [1e-4, 1e-3] {
            let problem = |k: usize| {
                let rms = design.target_rms(k);
                let units = Units::Rms { factor: 1.0 / rms };
                RowProblem { units, ..RowProblem::new(k, 1.0 / (rms * rms)) }
            };
            let problems: Vec<RowProblem> =
                (0..targets.cols()).filter(|k| design.target_rms(*k) > 0.0).take(count).map(problem).collect();
            let settings = CardinalitySettings { ridge, ..CardinalitySettings::default() };
            let answers = solve_cardinality(&design, &problems, 2.0 * price, &settings, &Cpu, one, &cancel, |_| {})?;
            let rows = PricedRows::new(&design, 2.0 * price, ridge)?;
            for (problem, answer) in problems.iter().zip(&answers) {
                let Some((row, weights)) = rows.row(problem, answer)? else { continue };
                let begin = Instant::now();
                let (first, _) = row.bound()?;
                let proof = row.prove(&weights, &ProveSettings { seconds, ..ProveSettings::default() }, &cancel)?;
                let verdict = match proof.verdict {
                    Verdict::Optimal => "proven optimal".to_string(),
                    Verdict::Beaten => format!("better by {:.2} % is known", 100.0 * (1.0 - proof.best / proof.value)),
                    Verdict::Open => "open".to_string(),
                };
                println!(
                    "| {name} | {} | {price:e} | {} | {:.1} % | {:.2} % | {} | {:.1} | {verdict} |",
                    row.features(),
                    weights.iter().filter(|w| **w != 0.0).count(),
                    100.0 * (1.0 - first / proof.value),
                    100.0 * proof.distance(),
                    proof.certificate.cases.len(),
                    begin.elapsed().as_secs_f64(),
                );
            }
        }
    }
    Ok(())
}
