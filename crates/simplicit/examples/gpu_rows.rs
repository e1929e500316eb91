//! Seconds of the cardinality rows of one group on a GPU, statistics given: `gpu_rows [d] [rows] [price] [cpu rows]`.
//! The peaks of the device are measured first, and every part of the work is set against the one that binds it.
//! Some of the rows are also solved on the CPU, and the objective and the non-zeros of both are printed.
#![allow(clippy::print_stdout, clippy::unwrap_used)]

use std::time::Instant;

use simplicit::backend::Cpu;
use simplicit::backend::cuda::Cuda;
use simplicit::linalg::Matrix;
use simplicit::parallel::{Cancel, Threads};
use simplicit::problem::RowProblem;
use simplicit::random::Random;
use simplicit::solver::{CardinalitySettings, Design, solve_cardinality};
use simplicit::statistics::Statistics;

fn main() -> simplicit::Result<()> {
    let numbers: Vec<f64> = std::env::args().skip(1).map(|a| a.parse().unwrap()).collect();
    let number = |k: usize, usual: f64| numbers.get(k).copied().unwrap_or(usual);
    let (d, rows, price, on_cpu) =
        (number(0, 4608.0) as usize, number(1, 512.0) as usize, number(2, 1e-4), number(3, 0.0) as usize);
    let (threads, cancel) = (Threads::available(), Cancel::new());
    // Channels mixed at random, taps of a channel alike, half of the values cut off as by a ReLU.
    let samples = 4 * d;
    let mut random = Random::new(1);
    let hidden = Matrix::from_fn(64, d, |_, j| if j % 9 == 0 { random.normal() } else { 0.0 });
    let mix = |j: usize, h: usize| hidden[(h, j / 9 * 9)];
    let truth = Matrix::from_fn(rows, d, |_, _| random.normal() * random.uniform().powi(3));
    let cuda = Cuda::open(0)?;
    println!("{}, {} MiB free", cuda.describe(), cuda.memory()?.0 >> 20);
    let peaks = cuda.peaks()?;
    println!(
        "measured peaks: {:.1} Tflop/s f32, {:.1} Tflop/s f64, {:.0} GB/s; Gram matrices {:.1} Tflop/s, {:.0} % of f64",
        peaks.single / 1e12,
        peaks.double / 1e12,
        peaks.bytes / 1e9,
        peaks.gram / 1e12,
        100.0 * peaks.gram / peaks.double
    );
    let clock = Instant::now();
    let read = |range: std::ops::Range<usize>| {
        let mut random = Random::new(1000 + range.start as u64);
        let mut features = Matrix::zeros(range.len(), d);
        let mut targets = Matrix::zeros(range.len(), rows);
        let mut code = [0.0; 64];
        for s in 0..range.len() {
            code.iter_mut().for_each(|c| *c = random.normal());
            for channel in 0..d.div_ceil(9) {
                let j = channel * 9;
                let common: f64 = (0..64).map(|h| mix(j.min(d - 1), h) * code[h]).sum::<f64>() / 8.0;
                for j in j..(j + 9).min(d) {
                    features[(s, j)] = (common + 0.7 * random.normal()).max(0.0);
                }
            }
        }
        simplicit::linalg::gemm(targets.as_mut_slice(), rows, false, 1.0, features.view(), truth.view().t());
        Ok((features, targets))
    };
    let statistics = Statistics::stream_on(cuda, samples, threads, &cancel, read, |_| {})?;
    println!("statistics of {samples} samples on the device: {:.3} s", clock.elapsed().as_secs_f64());
    let clock = Instant::now();
    let design = Design::new(&statistics)?;
    let problems: Vec<RowProblem> = (0..rows).map(|k| RowProblem::new(k, 1.0 / design.target_rms(k).powi(2))).collect();
    let settings = CardinalitySettings::default();
    for run in 0..3 {
        let clock = Instant::now();
        let out = solve_cardinality(&design, &problems, price, &settings, &cuda, threads, &cancel, |_| {})?;
        let seconds = clock.elapsed().as_secs_f64();
        let non_zeros: usize = out.iter().flatten().filter(|w| **w != 0.0).count();
        println!("run {run}: {seconds:.3} s, {:.1} % non-zero", 100.0 * non_zeros as f64 / (d * rows) as f64,);
        for phase in cuda.last_phases() {
            let work = phase.work;
            println!(
                "  {:24} {:.3} s  {:7.2} Tflop f32  {:7.2} Tflop f64  {:8.1} GB  {:3.0} % of what binds",
                phase.name,
                phase.seconds,
                work.single / 1e12,
                work.double / 1e12,
                work.bytes / 1e9,
                100.0 * phase.share(&peaks)
            );
        }
        if run == 2 && on_cpu > 0 {
            let clock = Instant::now();
            let some = &problems[..on_cpu.min(rows)];
            let answers = solve_cardinality(&design, some, price, &settings, &Cpu, threads, &cancel, |_| {})?;
            let value = |k: usize, w: &[f64]| {
                let rms = design.target_rms(k);
                let squares: f64 = w.iter().enumerate().map(|(j, w)| (w * design.rms(j) / rms).powi(2)).sum();
                let count = w.iter().filter(|w| **w != 0.0).count() as f64;
                problems[k].fit * design.mean_square_mismatch(k, w) + price * count + settings.ridge * squares
            };
            let total =
                |rows: &[Vec<f64>]| rows.iter().take(some.len()).enumerate().map(|(k, w)| value(k, w)).sum::<f64>();
            let count = |rows: &[Vec<f64>]| rows.iter().take(some.len()).flatten().filter(|w| **w != 0.0).count();
            println!(
                "{} rows on the CPU: {:.3} s; objective {:.6} and {} non-zeros, device {:.6} and {}",
                some.len(),
                clock.elapsed().as_secs_f64(),
                total(&answers),
                count(&answers),
                total(&out),
                count(&out)
            );
        }
    }
    println!("all: {:.3} s", clock.elapsed().as_secs_f64());
    Ok(())
}
