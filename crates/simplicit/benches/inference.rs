//! Inference of randomly pruned networks on one thread, beside the dense network prepared the same way and ONNX Runtime:
//! `cargo bench -p simplicit --bench inference [-- dense|convolutions|cycles|kernels|calibrate]`. ONNX Runtime is timed where
//! `SIMPLICIT_PYTHON` (default `python3`) can import it; `SIMPLICIT_RESNET18` names a second convolutional network.

#![allow(clippy::print_stdout, clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::hint::black_box;
use std::process::Command;
use std::time::{Duration, Instant};

use simplicit::equilibrium::{Equilibrium, EquilibriumSettings, Prepared, SampleDiagnostics};
use simplicit::kernels::{Choice, Cost, Finish, Grid, GridWeights, Instructions, RowWeights, thread_seconds};
use simplicit::layout::{Activation, Layer, Layout};
use simplicit::linalg::lanes::Aligned;
use simplicit::linalg::{Csr, Matrix};
use simplicit::model::{DenseLayer, ImplicitModel, ModelParts, TapWeights};
use simplicit::network::Network;
use simplicit::onnx::{OnnxSettings, export_onnx};
use simplicit::parallel::Threads;
use simplicit::random::Random;

const SPARSITIES: [f64; 6] = [0.0, 0.5, 0.65, 0.8, 0.9, 0.95];

fn main() {
    let asked: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    let parts: [(&str, fn()); 5] = [
        ("dense", dense),
        ("convolutions", convolutions),
        ("cycles", cycles),
        ("kernels", kernels),
        ("calibrate", calibrate),
    ];
    for (name, part) in parts {
        if asked.iter().any(|a| a == name) || asked.is_empty() && name != "calibrate" {
            part();
        }
    }
}

fn header() {
    println!();
    println!("| network | sparsity | batch | ours µs | ours dense µs | ONNX Runtime µs | faster of both / ours |");
    println!("|---|---|---|---|---|---|---|");
}

/// One model after the other at every batch size, beside the first, which is dense.
fn table(name: &str, models: &[(f64, ImplicitModel)], batches: &[usize]) {
    let theirs = onnx_runtime(&models[0].1, batches);
    let inputs = models[0].1.shape().inputs;
    for &batch in batches {
        let mut random = Random::new(batch as u64);
        let u = Matrix::from_fn(batch, inputs, |_, _| random.uniform() as f32);
        let time = |model: &ImplicitModel| {
            let prepared = Prepared::new(model, batch).unwrap();
            best(|| {
                black_box(prepared.outputs(black_box(&u), Threads::one()).unwrap());
            })
        };
        let dense = time(&models[0].1);
        let ort = theirs.get(&batch).copied();
        for (sparsity, model) in models {
            let ours = if *sparsity == 0.0 { dense } else { time(model) };
            println!(
                "| {name} | {:.0} % | {batch} | {:.1} | {:.1} | {} | {:.2} |",
                100.0 * sparsity,
                1e6 * ours,
                1e6 * dense,
                ort.map_or("–".to_string(), |t| format!("{:.1}", 1e6 * t)),
                ort.unwrap_or(f64::INFINITY).min(dense) / ours,
            );
        }
    }
}

fn dense() {
    header();
    for sizes in [&[784, 64, 32, 16, 10][..], &[784, 512, 512, 10]] {
        let models: Vec<_> = SPARSITIES.iter().map(|s| (*s, model(&network(sizes, *s)))).collect();
        let name = sizes.iter().map(usize::to_string).collect::<Vec<_>>().join("-");
        table(&name, &models, &[1, 8, 256]);
    }
}

/// Networks for 3 × 32 × 32 images with a random share of their taps set to zero.
fn convolutions() {
    header();
    let bundled = concat!(env!("CARGO_MANIFEST_DIR"), "/../../data/resnet20_cifar100.onnx").to_string();
    let mut networks = vec![("ResNet-20", bundled)];
    networks.extend(std::env::var("SIMPLICIT_RESNET18").ok().map(|path| ("ResNet-18", path)));
    for (name, path) in networks {
        let full = ImplicitModel::from_network(&Network::from_onnx(path).unwrap()).unwrap();
        let models: Vec<_> = SPARSITIES.iter().map(|s| (*s, thinned(&full, *s))).collect();
        table(name, &models, &[1, 8, 64]);
    }
}

fn thinned(full: &ImplicitModel, sparsity: f64) -> ImplicitModel {
    let mut random = Random::new(1);
    let mut parts = full.clone().into_parts();
    for block in &mut parts.taps {
        if let TapWeights::Taps(taps) = &block.weights {
            let rows: Vec<Vec<(usize, f32)>> =
                (0..taps.rows()).map(|o| taps.row(o).filter(|_| random.uniform() >= sparsity).collect()).collect();
            block.weights = TapWeights::Taps(Csr::from_rows(taps.cols(), rows));
        }
    }
    ImplicitModel::new(parts).unwrap()
}

/// A layer by one kernel: useful multiply-adds in billions a second, zeros not counted.
fn rate(channels: usize, side: usize, kernel: usize, lanes: usize, density: f64, choice: Choice) -> f64 {
    let mut random = Random::new(7);
    let row = side + kernel - 1;
    // Not a multiple of a kilobyte, as prepared models lay it out.
    let channel = row * row + 1 + 15 / lanes;
    let mut source = Aligned::zeros(channels * channel * lanes);
    source.iter_mut().for_each(|v| *v = random.normal() as f32);
    let mut out = Aligned::zeros(channels * side * side * lanes);
    let area = kernel * kernel;
    let offsets: Vec<usize> =
        (0..channels * area).map(|j| j / area * channel + j / kernel % kernel * row + j % kernel).collect();
    let weights: Vec<Vec<(usize, f32)>> = (0..channels)
        .map(|_| (0..offsets.len()).filter(|_| random.uniform() < density).map(|j| (j, 0.01)).collect())
        .collect();
    let footprint = (kernel + 1) * (4 * 16usize.div_ceil(lanes) + kernel) * lanes * 4;
    let packed = GridWeights::new(&weights, &offsets, area, footprint, Cost::only(choice));
    let bias = vec![0.1; channels];
    let grid = Grid {
        height: side,
        width: side,
        lanes,
        source_row: row,
        source_step: 1,
        out_row: side,
        out_channel: side * side,
    };
    let finish = Finish { bias: Some(&bias), relu: true, ..Default::default() };
    let seconds = best(|| packed.run(Instructions::detect(), &grid, &source, &mut out, &finish));
    let nonzeros: usize = weights.iter().map(Vec::len).sum();
    nonzeros as f64 * (side * side * lanes) as f64 / seconds / 1e9
}

/// Multiply-adds a second of every kernel beside what the core does on registers alone.
fn kernels() {
    println!();
    println!("Peak on registers: {:.1} G multiply-adds a second, one core, {}.", peak(), Instructions::detect().name());
    println!();
    println!("| layer | samples side by side | dense | sparse 50 % | 80 % | 90 % | 95 % |");
    println!("|---|---|---|---|---|---|---|");
    for (channels, side, kernel) in [(16, 32, 3), (32, 16, 3), (64, 8, 3), (64, 16, 1), (256, 8, 3)] {
        for lanes in [16, 1] {
            let sparse = [0.5, 0.2, 0.1, 0.05].map(|d| rate(channels, side, kernel, lanes, d, Choice::Sparse));
            println!(
                "| {channels} → {channels}, {side} × {side}, {kernel} × {kernel} | {lanes} | {:.1} | {} |",
                rate(channels, side, kernel, lanes, 1.0, Choice::Dense),
                sparse.map(|r| format!("{r:.1}")).join(" | ")
            );
        }
    }
}

/// Time of a multiply-add of a sparse row over one of a dense panel: the table in `kernels/cost.rs`.
fn calibrate() {
    println!();
    println!("| samples side by side | sparse over dense at 80 % density | 50 % | 30 % |");
    println!("|---|---|---|---|");
    for lanes in [1, 2, 4, 8, 16] {
        let dense = rate(32, 16, 3, lanes, 1.0, Choice::Dense);
        let ratios = [0.8, 0.5, 0.3].map(|d| dense / rate(32, 16, 3, lanes, d, Choice::Sparse));
        println!("| {lanes} | {} |", ratios.map(|r| format!("{r:.2}")).join(" | "));
    }
    println!();
    println!("| one sample, 512 × 784, density | dense µs | sparse µs | weights with filling |");
    println!("|---|---|---|---|");
    for density in [0.5, 0.35, 0.2, 0.1, 0.05, 0.02] {
        let mut random = Random::new(3);
        let rows: Vec<Vec<(usize, f32)>> =
            (0..512).map(|_| (0..784).filter(|_| random.uniform() < density).map(|j| (j, 0.01)).collect()).collect();
        let x = vec![0.5; 784];
        let mut out = vec![0.0; 512];
        let [sparse, dense] = [false, true].map(|dense| {
            let packed = RowWeights::only(&rows, 784, Instructions::detect(), dense);
            (1e6 * best(|| packed.run(black_box(&x), &mut out, None, false)), packed.weights())
        });
        println!("| {density} | {:.1} | {:.1} | {} of {} |", dense.0, sparse.0, sparse.1, dense.1);
    }
}

/// Billions of multiply-adds a second on registers alone.
fn peak() -> f64 {
    let (seconds, count) = simplicit::kernels::register_peak(Instructions::detect());
    count as f64 / seconds / 1e9
}

/// One cycle of 112 states on 784 inputs, every row of A at the bound: what the iteration costs.
fn cycles() {
    println!();
    println!("| states | κ | density | batch | ours µs | steps | multiply-adds to tolerance |");
    println!("|---|---|---|---|---|---|---|");
    let (n, p, q, batch) = (112, 784, 10, 256);
    for kappa in [0.5, 0.9, 0.99] {
        for density in [0.2, 0.05] {
            let mut random = Random::new(2);
            let mut sparse = |rows: usize, cols: usize, sum: Option<f64>| {
                let rows: Vec<Vec<(usize, f32)>> = (0..rows)
                    .map(|_| {
                        let row: Vec<f64> = (0..cols)
                            .map(|_| (random.normal(), random.uniform()))
                            .map(|(v, keep)| if keep < density { v / (cols as f64 * density).sqrt() } else { 0.0 })
                            .collect();
                        let total: f64 = row.iter().map(|v| v.abs()).sum();
                        let scale = sum.map_or(1.0, |s| (1.0 - 1e-6) * s / total.max(1e-9));
                        row.iter().enumerate().map(|(j, v)| (j, (v * scale) as f32)).collect()
                    })
                    .collect();
                Csr::from_rows(cols, rows)
            };
            let model = ImplicitModel::new(ModelParts {
                a: sparse(n, n, Some(kappa)),
                b: sparse(n, p, None),
                c: sparse(q, n, None),
                d: sparse(q, p, None),
                state_bias: vec![0.1; n],
                output_bias: vec![0.0; q],
                layout: Layout::new(vec![Layer::dense("x", n, Activation::Relu)]),
                ..Default::default()
            })
            .unwrap();
            let settings = EquilibriumSettings { threads: Threads::one(), ..Default::default() };
            let equilibrium = Equilibrium::new(&model, settings).unwrap();
            let u = Matrix::from_fn(batch, p, |_, _| random.uniform() as f32);
            let solution = equilibrium.outputs(&u).unwrap();
            assert!(simplicit::equilibrium::not_converged(&solution.diagnostics).is_empty());
            let mean =
                |f: fn(&SampleDiagnostics) -> f64| solution.diagnostics.iter().map(f).sum::<f64>() / batch as f64;
            let ours = best(|| {
                black_box(equilibrium.outputs(black_box(&u)).unwrap());
            });
            println!(
                "| {n} | {kappa} | {:.0} % | {batch} | {:.0} | {:.1} | {:.0} |",
                100.0 * density,
                1e6 * ours,
                mean(|d| d.iterations as f64),
                mean(|d| d.multiply_adds as f64)
            );
        }
    }
}

/// Random weights with a random share set to zero; biases stay.
fn network(sizes: &[usize], sparsity: f64) -> Vec<DenseLayer> {
    let mut random = Random::new(1);
    let count = sizes.len() - 1;
    (0..count)
        .map(|k| {
            let (inputs, outputs) = (sizes[k], sizes[k + 1]);
            let weights = Matrix::from_fn(outputs, inputs, |_, _| {
                let value = random.normal() / (inputs as f64).sqrt();
                if random.uniform() < sparsity { 0.0 } else { value as f32 }
            });
            let activation = if k + 1 < count { Activation::Relu } else { Activation::Identity };
            DenseLayer::new(format!("layer{k}"), weights, activation)
                .with_bias((0..outputs).map(|_| 0.1 * random.normal() as f32).collect())
        })
        .collect()
}

fn model(layers: &[DenseLayer]) -> ImplicitModel {
    let (output, hidden) = layers.split_last().unwrap();
    ImplicitModel::from_layers(hidden, output).unwrap()
}

/// Best seconds of processor time per call over half a second, in rounds long enough for the clock: one thread works, and
/// what others do on the machine is not counted.
fn best(mut work: impl FnMut()) -> f64 {
    let start = Instant::now();
    work();
    let rounds = (Duration::from_millis(2).as_nanos() / start.elapsed().as_nanos().max(1)).clamp(1, 1000) as u32;
    let (mut best, start) = (f64::INFINITY, Instant::now());
    while start.elapsed() < Duration::from_millis(500) {
        let round = thread_seconds();
        for _ in 0..rounds {
            work();
        }
        best = best.min((thread_seconds() - round) / f64::from(rounds));
    }
    best
}

/// Seconds per batch, empty where ONNX Runtime is not installed.
fn onnx_runtime(model: &ImplicitModel, batches: &[usize]) -> BTreeMap<usize, f64> {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("baseline.onnx");
    export_onnx(model, &path, OnnxSettings::default()).unwrap();
    let python = std::env::var("SIMPLICIT_PYTHON").unwrap_or_else(|_| "python3".into());
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../bench/inference_ort.py");
    let run = Command::new(python).arg(script).arg(&path).args(batches.iter().map(usize::to_string)).output();
    let Ok(run) = run else { return BTreeMap::new() };
    String::from_utf8_lossy(&run.stdout)
        .lines()
        .filter_map(|line| line.split_once(' ').and_then(|(b, t)| Some((b.parse().ok()?, t.parse().ok()?))))
        .collect()
}
