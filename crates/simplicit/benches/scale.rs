//! What one cardinality group costs: seconds, multiply-adds counted, and peak memory, for more and more features, samples
//! below and above them, and more and more rows.
//! `cargo bench -p simplicit --bench scale` goes up to 2,048 features, with `-- --full` up to 8,192.

#![allow(clippy::print_stdout, clippy::unwrap_used, missing_docs)]

use std::time::Instant;

use simplicit::backend::Cpu;
use simplicit::linalg::{Matrix, gemm};
use simplicit::parallel::{Cancel, Threads};
use simplicit::problem::RowProblem;
use simplicit::random::Random;
use simplicit::solver::{CardinalitySettings, Design, solve_cardinality};
use simplicit::statistics::Statistics;

fn main() {
    let full = std::env::args().any(|a| a == "--full");
    let sizes: &[usize] = if full { &[256, 512, 1024, 2048, 4096, 8192] } else { &[256, 512, 1024, 2048] };
    let threads = Threads::available();
    let speed = gemm_speed();
    println!(
        "One f64 product of 512 × 512 matrices on one thread: {speed:.1} G multiply-adds a second; {} threads.\n",
        threads.get()
    );
    println!(
        "| d | m | rows | statistics, s | group, s | products, G | group over its products | non-zeros % | peak, MB |"
    );
    println!("|---|---|---|---|---|---|---|---|---|");
    let mut grown: Vec<(usize, f64)> = Vec::new();
    for &d in sizes {
        for (m, rows) in [(d / 4, 64), (4 * d, 16), (4 * d, 64), (4 * d, 512)] {
            let line = one(d, m, rows, threads);
            let least = line.products / (speed * threads.get() as f64);
            println!(
                "| {d} | {m} | {rows} | {:.2} | {:.2} | {:.1} | {:.1} | {:.1} | {} |",
                line.gathered,
                line.solved,
                line.products,
                line.solved / least,
                100.0 * line.kept,
                peak_megabytes()
            );
            if (m, rows) == (4 * d, 64) {
                grown.push((d, line.solved));
            }
        }
    }
    if let [(a, first), .., (b, last)] = grown[..] {
        let exponent = (last / first).ln() / (b as f64 / a as f64).ln();
        println!("\n64 rows, m = 4d: seconds grow as d^{exponent:.2} from d = {a} to {b}.");
    }
}

struct Line {
    gathered: f64,
    solved: f64,
    products: f64,
    kept: f64,
}

fn one(d: usize, m: usize, rows: usize, threads: Threads) -> Line {
    let mut random = Random::new((d * 31 + m) as u64);
    // Factors with a falling spectrum and noise: neighbours are alike, as features of networks are.
    let factors = 32;
    let mixing = Matrix::from_fn(factors, d, |i, _| random.normal() / (1.0 + i as f64).sqrt());
    let truth = Matrix::from_fn(d, rows, |_, _| random.normal() * random.uniform().powi(6));
    let read = |range: std::ops::Range<usize>| {
        let mut random = Random::new(range.start as u64);
        let scores = Matrix::from_fn(range.len(), factors, |_, _| random.normal());
        let mut features = Matrix::from_fn(range.len(), d, |_, _| 0.5 * random.normal());
        gemm(features.as_mut_slice(), d, true, 1.0, scores.view(), mixing.view());
        let mut targets = Matrix::from_fn(range.len(), rows, |_, _| 0.1 * random.normal());
        gemm(targets.as_mut_slice(), rows, true, 1.0, features.view(), truth.view());
        Ok((features, targets))
    };
    let start = Instant::now();
    let statistics = Statistics::stream(m, threads, &Cancel::new(), read, |_| {}).unwrap();
    let gathered = start.elapsed().as_secs_f64();
    let design = Design::new(&statistics).unwrap();
    let problem = |k: usize| {
        let rms = design.target_rms(k);
        RowProblem { start: Some((0..d).map(|j| truth[(j, k)]).collect()), ..RowProblem::new(k, 1.0 / (rms * rms)) }
    };
    let problems: Vec<RowProblem> = (0..rows).map(problem).collect();
    let settings = CardinalitySettings::default();
    // A price at which about a fifth stays on these data.
    let price = 0.2 / d as f64 / 10.0;
    let start = Instant::now();
    let solved =
        solve_cardinality(&design, &problems, price, &settings, &Cpu, threads, &Cancel::new(), |_| {}).unwrap();
    let seconds = start.elapsed().as_secs_f64();
    let nonzeros: usize = solved.iter().map(|w| w.iter().filter(|w| **w != 0.0).count()).sum();
    let kept = nonzeros as f64 / (rows * d) as f64;
    // Of the ladder and the splitting, in the smaller of the two spaces; the moves depend on the data.
    let (size, width) = (d as f64, m as f64);
    let few = width < 0.41 * size;
    let (inverse, step) = if few {
        (width.powi(3) / 6.0 + 2.0 * width * width * size, 2.0 * width * size)
    } else {
        (size.powi(3) / 2.0, size * size)
    };
    // An f32 product costs half of an f64 one.
    let products = settings.rungs as f64 * inverse + 0.5 * (settings.steps * rows) as f64 * step;
    Line { gathered, solved: seconds, products: 1e-9 * products, kept }
}

/// G multiply-adds a second of a large f64 product on one thread.
fn gemm_speed() -> f64 {
    let n = 512;
    let a = Matrix::from_fn(n, n, |i, j| ((i * 7 + j * 3) % 11) as f64);
    let mut out = vec![0.0; n * n];
    let run = |out: &mut Vec<f64>| {
        let start = Instant::now();
        gemm(out, n, false, 1.0, a.view(), a.view());
        start.elapsed().as_secs_f64()
    };
    let best = (0..5).map(|_| run(&mut out)).fold(f64::INFINITY, f64::min);
    1e-9 * (n * n * n) as f64 / best
}

/// The largest memory this process had, so far.
fn peak_megabytes() -> String {
    let text = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = text.lines().find_map(|l| l.strip_prefix("VmHWM:")).unwrap_or("").trim().trim_end_matches(" kB");
    line.parse::<f64>().map_or("–".into(), |kb| format!("{:.0}", kb / 1024.0))
}
