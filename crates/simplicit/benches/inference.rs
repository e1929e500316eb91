//! Inference of randomly pruned networks on one thread, beside our dense forward pass and ONNX Runtime on the unpruned
//! network: `cargo bench -p simplicit --bench inference [-- dense|cycles|convolutions]`. ONNX Runtime is timed where
//! `SIMPLICIT_PYTHON` (default `python3`) can import it.

#![allow(clippy::print_stdout, clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::hint::black_box;
use std::process::Command;
use std::time::{Duration, Instant};

use simplicit::equilibrium::{Equilibrium, EquilibriumSettings, OnnxSettings, SampleDiagnostics, export_onnx};
use simplicit::layout::{Activation, Layer, Layout};
use simplicit::linalg::{Csr, Matrix, gemm};
use simplicit::model::{DenseLayer, ImplicitModel, ModelParts, TapWeights};
use simplicit::network::Network;
use simplicit::parallel::Threads;
use simplicit::random::Random;

const BATCHES: [usize; 3] = [1, 16, 256];
const SPARSITIES: [f64; 6] = [0.0, 0.5, 0.8, 0.9, 0.95, 0.98];

fn main() {
    let asked: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    let parts: [(&str, fn()); 3] = [("dense", dense), ("cycles", cycles), ("convolutions", convolutions)];
    for (name, part) in parts {
        if asked.is_empty() || asked.iter().any(|a| a == name) {
            part();
        }
    }
}

fn dense() {
    println!(
        "| network | sparsity | multiply-adds | file bytes | batch | ours µs | dense µs | ONNX Runtime µs | faster of both / ours |"
    );
    println!("|---|---|---|---|---|---|---|---|---|");
    for sizes in [&[784, 64, 32, 16, 10][..], &[784, 512, 512, 10]] {
        let dense = network(sizes, 0.0);
        let theirs = onnx_runtime(&model(&dense), &BATCHES);
        for sparsity in SPARSITIES {
            let model = model(&network(sizes, sparsity));
            let counted = model.sparsity();
            let settings = EquilibriumSettings { threads: Threads::one(), ..Default::default() };
            let equilibrium = Equilibrium::new(&model, settings).unwrap();
            for batch in BATCHES {
                let mut random = Random::new(batch as u64);
                let u = Matrix::from_fn(batch, sizes[0], |_, _| random.uniform() as f32);
                let ours = best(|| {
                    black_box(equilibrium.outputs(black_box(&u)).unwrap());
                });
                let mut buffers: Vec<Vec<f32>> = dense.iter().map(|l| vec![0.0; batch * l.weights.rows()]).collect();
                let ours_dense = best(|| forward(&dense, black_box(&u), &mut buffers));
                let ort = theirs.get(&batch).copied();
                let fastest = ort.unwrap_or(f64::INFINITY).min(ours_dense);
                println!(
                    "| {} | {:.0} % | {} | {} | {batch} | {:.1} | {:.1} | {} | {:.2} |",
                    sizes.iter().map(usize::to_string).collect::<Vec<_>>().join("-"),
                    100.0 * sparsity,
                    counted.multiply_adds,
                    counted.bytes,
                    1e6 * ours,
                    1e6 * ours_dense,
                    ort.map_or("–".to_string(), |t| format!("{:.1}", 1e6 * t)),
                    fastest / ours,
                );
            }
        }
    }
}

/// ResNet-20 for 3 × 32 × 32 images with a random share of its taps set to zero.
fn convolutions() {
    const BATCHES: [usize; 3] = [1, 16, 64];
    println!();
    println!(
        "| network | sparsity | multiply-adds | file bytes | batch | ours µs | dense µs | ONNX Runtime µs | faster of both / ours |"
    );
    println!("|---|---|---|---|---|---|---|---|---|");
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../data/resnet20_cifar100.onnx");
    let network = Network::from_onnx(path).unwrap();
    let full = ImplicitModel::from_network(&network).unwrap();
    let theirs = onnx_runtime(&full, &BATCHES);
    for sparsity in [0.0, 0.5, 0.65, 0.8, 0.9] {
        let mut random = Random::new(1);
        let mut parts = full.clone().into_parts();
        for block in &mut parts.taps {
            if let TapWeights::Taps(taps) = &block.weights {
                let rows: Vec<Vec<(usize, f32)>> =
                    (0..taps.rows()).map(|o| taps.row(o).filter(|_| random.uniform() >= sparsity).collect()).collect();
                block.weights = TapWeights::Taps(Csr::from_rows(taps.cols(), rows));
            }
        }
        let model = ImplicitModel::new(parts).unwrap();
        let counted = model.sparsity();
        let settings = EquilibriumSettings { threads: Threads::one(), ..Default::default() };
        let equilibrium = Equilibrium::new(&model, settings).unwrap();
        for batch in BATCHES {
            let u = Matrix::from_fn(batch, 3072, |_, _| random.normal() as f32);
            let ours = best(|| {
                black_box(equilibrium.outputs(black_box(&u)).unwrap());
            });
            let ours_dense = best(|| {
                black_box(network.forward(black_box(&u)).unwrap());
            });
            let ort = theirs.get(&batch).copied();
            println!(
                "| ResNet-20 | {:.0} % | {} | {} | {batch} | {:.0} | {:.0} | {} | {:.2} |",
                100.0 * sparsity,
                counted.multiply_adds,
                counted.bytes,
                1e6 * ours,
                1e6 * ours_dense,
                ort.map_or("–".to_string(), |t| format!("{:.0}", 1e6 * t)),
                ort.unwrap_or(f64::INFINITY).min(ours_dense) / ours,
            );
        }
    }
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

/// The dense baseline: one matrix product per layer, bias and ReLU in place.
fn forward(layers: &[DenseLayer], u: &Matrix<f32>, buffers: &mut [Vec<f32>]) {
    for (k, layer) in layers.iter().enumerate() {
        let (before, after) = buffers.split_at_mut(k);
        let x = before.last().map_or(u.as_slice(), |x| x);
        let (rows, inputs, outputs) = (u.rows(), layer.weights.cols(), layer.weights.rows());
        let x = simplicit::linalg::View::new(x, rows, inputs, inputs);
        gemm(&mut after[0], outputs, false, 1.0, x, layer.weights.view().t());
        let bias = layer.bias.as_ref().unwrap();
        for row in after[0].chunks_exact_mut(outputs) {
            for (z, b) in row.iter_mut().zip(bias) {
                *z += b;
                if layer.activation == Activation::Relu {
                    *z = z.max(0.0);
                }
            }
        }
    }
    black_box(buffers);
}

/// Best seconds per call over half a second, in rounds long enough for the clock.
fn best(mut work: impl FnMut()) -> f64 {
    let start = Instant::now();
    work();
    let rounds = (Duration::from_millis(2).as_nanos() / start.elapsed().as_nanos().max(1)).clamp(1, 1000) as u32;
    let (mut best, start) = (f64::INFINITY, Instant::now());
    while start.elapsed() < Duration::from_millis(500) {
        let round = Instant::now();
        for _ in 0..rounds {
            work();
        }
        best = best.min(round.elapsed().as_secs_f64() / f64::from(rounds));
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
