//! What one cardinality group costs: seconds, multiply-adds counted, and peak memory, for more and more features, samples
//! below and above them, and more and more rows; and the exponents with which each of them grows.
//! `cargo bench -p simplicit --bench scale` takes some minutes, with `-- --quick` (up to 2,048 features) one.

#![allow(clippy::print_stdout, clippy::unwrap_used, missing_docs)]

use std::time::Instant;

use simplicit::backend::Cpu;
use simplicit::linalg::{Matrix, gemm};
use simplicit::parallel::{Cancel, Threads};
use simplicit::problem::RowProblem;
use simplicit::random::Random;
use simplicit::solver::{CardinalitySettings, Design, solve_cardinality};
use simplicit::statistics::Statistics;

/// Rows whose growth with the features is told.
const ROWS: usize = 64;

fn main() {
    let quick = std::env::args().any(|a| a == "--quick");
    let sizes: &[usize] = if quick { &[256, 512, 1024, 2048] } else { &[256, 512, 1024, 2048, 4096, 8192] };
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
    let mut lines: Vec<Line> = Vec::new();
    for &d in sizes {
        // The largest designs with fewer cells, for time.
        let all: &[usize] = &[16, ROWS, 512];
        let few = if d <= 2048 { all } else { &all[1..2] };
        let many = if d <= 4096 { all } else { &all[1..2] };
        for (m, rows) in [(d / 4, few), (2 * d, many)] {
            for line in cells(d, m, rows, threads) {
                let least = line.products / (speed * threads.get() as f64);
                println!(
                    "| {d} | {m} | {} | {:.2} | {:.2} | {:.1} | {:.1} | {:.1} | {:.0} |",
                    line.rows,
                    line.gathered,
                    line.solved,
                    line.products,
                    line.solved / least,
                    100.0 * line.kept,
                    line.peak
                );
                lines.push(line);
            }
        }
    }
    println!("\nExponents from d = {} to {}, {ROWS} rows:\n", sizes[1], sizes[sizes.len() - 1]);
    println!("| samples | statistics, s | group, s | products | peak, MB |\n|---|---|---|---|---|");
    for (name, few) in [("d/4", true), ("2d", false)] {
        let grown: Vec<&Line> =
            lines.iter().filter(|l| l.rows == ROWS && l.d >= sizes[1] && (l.m < l.d) == few).collect();
        let exponent = |of: &dyn Fn(&Line) -> f64| {
            let (first, last) = (grown[0], grown[grown.len() - 1]);
            (of(last) / of(first)).ln() / (last.d as f64 / first.d as f64).ln()
        };
        let [gathered, solved, products, peak] =
            [exponent(&|l| l.gathered), exponent(&|l| l.solved), exponent(&|l| l.products), exponent(&|l| l.peak)];
        println!("| {name} | {gathered:.2} | {solved:.2} | {products:.2} | {peak:.2} |");
    }
}

struct Line {
    d: usize,
    m: usize,
    rows: usize,
    gathered: f64,
    solved: f64,
    products: f64,
    kept: f64,
    peak: f64,
}

/// One design, and groups of some of its rows.
fn cells(d: usize, m: usize, rows: &[usize], threads: Threads) -> Vec<Line> {
    let most = rows.iter().copied().max().unwrap_or(0);
    let mut random = Random::new((d * 31 + m) as u64);
    // Factors with a falling spectrum and noise: neighbours are alike, as features of networks are.
    let factors = 32;
    let mixing = Matrix::from_fn(factors, d, |i, _| random.normal() / (1.0 + i as f64).sqrt());
    let truth = Matrix::from_fn(d, most, |_, _| random.normal() * random.uniform().powi(6));
    let read = |range: std::ops::Range<usize>| {
        let mut random = Random::new(range.start as u64);
        let scores = Matrix::from_fn(range.len(), factors, |_, _| random.normal());
        let mut features = Matrix::from_fn(range.len(), d, |_, _| 0.5 * random.normal());
        gemm(features.as_mut_slice(), d, true, 1.0, scores.view(), mixing.view());
        let mut targets = Matrix::from_fn(range.len(), most, |_, _| 0.1 * random.normal());
        gemm(targets.as_mut_slice(), most, true, 1.0, features.view(), truth.view());
        Ok((features, targets))
    };
    forget_peak();
    let start = Instant::now();
    let statistics = Statistics::stream(m, threads, &Cancel::new(), read, |_| {}).unwrap();
    let gathered = start.elapsed().as_secs_f64();
    let mut peak = peak_megabytes();
    let solve = |&rows: &usize| {
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
        // Of the ladder and the splitting, in the smaller of the two spaces; the moves depend on the data.
        let (size, width) = (d as f64, m as f64);
        let few = width < 0.41 * size;
        let (inverse, step) = if few {
            (width.powi(3) / 6.0 + 2.0 * width * width * size, 2.0 * width * size)
        } else {
            (size.powi(3) / 2.0, size * size)
        };
        // An f32 product costs half of an f64 one.
        let products = 1e-9 * (settings.rungs as f64 * inverse + 0.5 * (settings.steps * rows) as f64 * step);
        // Gathering and solving, whichever takes more.
        peak = peak.max(peak_megabytes());
        forget_peak();
        Line { d, m, rows, gathered, solved: seconds, products, kept: nonzeros as f64 / (rows * d) as f64, peak }
    };
    rows.iter().map(solve).collect()
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

/// The most memory this process had since it was told to forget; where the system does not forget, in all.
fn peak_megabytes() -> f64 {
    simplicit::memory::peak().map_or(f64::NAN, |bytes| bytes as f64 / f64::from(1 << 20))
}

fn forget_peak() {
    let _ = std::fs::write("/proc/self/clear_refs", "5");
}
