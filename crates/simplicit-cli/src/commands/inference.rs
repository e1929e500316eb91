//! `simplicit bench inference`: how fast a model runs on this machine, compared with the dense network it came from.

use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::{Args, ValueEnum};
use serde_json::json;
use simplicit::equilibrium::{BlockKernel, LayerTime, Prepared};
use simplicit::files::write_bytes_atomically;
use simplicit::kernels::Instructions;
use simplicit::linalg::Matrix;
use simplicit::model::ImplicitModel;
use simplicit::onnx::{OnnxSettings, export_onnx};
use simplicit::parallel::{Cancel, Threads};
use simplicit::states::InputSource;

use crate::args::{JsonArgs, NameArgs, PreprocessingArgs, RunArgs, open_inputs};
use crate::baseline::{Baseline, require_order};
use crate::exit::{Outcome, say};
use crate::operands::load_model;
use crate::paths::Paths;
use crate::progress::Watcher;
use crate::table::{Table, count, or_dash, percent};

const BATCHES: [usize; 3] = [1, 8, 64];
/// Time spent on one measurement, and the fewest calls that it makes.
const PATIENCE: Duration = Duration::from_millis(1500);
const LEAST: usize = 5;
/// Runs of a layer; the best time is reported.
const ROUNDS: usize = 5;

/// Of `bench inference` alone.
#[derive(Debug, Args)]
#[command(next_help_heading = "Inference")]
pub(crate) struct InferenceArgs {
    /// The model to time beside --network
    #[arg(long, value_name = "FILE")]
    model: Option<PathBuf>,
    /// Time another runtime on the dense network too, where SIMPLICIT_PYTHON [default: python3] can import it
    #[arg(long, value_name = "RUNTIME")]
    beside: Option<Beside>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Beside {
    Onnxruntime,
}

impl InferenceArgs {
    /// Refuses flags that would be ignored because no inference is measured.
    pub(crate) fn refuse(&self) -> anyhow::Result<()> {
        if self.model.is_some() || self.beside.is_some() {
            bail!("bench: expected bench inference with --model or --beside");
        }
        Ok(())
    }
}

/// Flags that all kinds of bench share.
pub(crate) struct Shared<'a> {
    pub(crate) network: Option<&'a PathBuf>,
    pub(crate) inputs: Option<&'a PathBuf>,
    pub(crate) json: &'a JsonArgs,
}

/// Microseconds per call: median, 90th and 99th percentile.
#[derive(Clone, Copy)]
struct Latency {
    median: f64,
    p90: f64,
    p99: f64,
}

struct Row {
    batch: usize,
    threads: usize,
    ours: Latency,
    dense: Latency,
    beside: Option<f64>,
}

impl Row {
    fn fastest(&self) -> f64 {
        self.beside.unwrap_or(f64::INFINITY).min(self.dense.median)
    }
}

/// Every layer of the model for the largest batch, and how long the dense network's layer of the same name takes.
struct Layers<'a> {
    kernels: &'a [BlockKernel],
    times: Vec<LayerTime>,
    dense: Vec<LayerTime>,
}

impl Layers<'_> {
    fn dense_us(&self, layer: &str) -> Option<f64> {
        self.dense.iter().find(|t| t.layer == layer).map(|t| 1e6 * t.seconds)
    }
}

pub(crate) fn run(
    args: &InferenceArgs,
    shared: &Shared<'_>,
    run: &RunArgs,
    cancel: &Cancel,
) -> anyhow::Result<Outcome> {
    let (Some(path), Some(network), Some(inputs)) = (&args.model, shared.network, shared.inputs) else {
        bail!("bench inference: expected --model, --network and --inputs");
    };
    Paths::default()
        .reads("--model", Some(path))
        .reads("--network", Some(network))
        .reads("--inputs", Some(inputs))
        .writes("--json", shared.json.file())
        .check()?;
    let watcher = Watcher::new(run.progress);
    let model = load_model(path)?;
    let dense = Baseline::open_beside(network, &NameArgs::default(), Some(&model))?.implicit()?;
    if dense.shape().inputs != model.shape().inputs {
        bail!(
            "--network: expected the network of the model, of {} inputs, got {}",
            model.shape().inputs,
            dense.shape().inputs
        );
    }
    let selection = simplicit::arrays::Selection::all();
    let inputs = open_inputs(inputs, &PreprocessingArgs::default(), Some(model.preprocessing()), &selection)?;
    require_order(&inputs, Some(&dense), None)?;
    let largest = BATCHES.iter().copied().max().unwrap_or(1);
    let some = inputs.rows(0..inputs.samples().min(largest))?;
    if some.rows() == 0 {
        bail!("--inputs: expected at least one sample, got none");
    }
    // A batch larger than the number of samples repeats them.
    let u = Matrix::from_fn(largest, some.cols(), |i, j| some[(i % some.rows(), j)]);
    let theirs = match args.beside {
        Some(Beside::Onnxruntime) => {
            watcher.phase("onnxruntime");
            Some(onnx_runtime(&dense, run.threads())?)
        }
        None => None,
    };
    let mut rows = Vec::new();
    watcher.phase("inference");
    for (k, batch) in BATCHES.into_iter().enumerate() {
        let u = InputSource::rows(&u, 0..batch)?;
        let [ours, dense] = [&model, &dense].map(|m| latency(m, &u, run.threads(), cancel));
        rows.push(Row {
            batch,
            threads: run.threads().get(),
            ours: ours?,
            dense: dense?,
            beside: theirs.as_ref().and_then(|t| t.get(k).copied()),
        });
    }
    watcher.finish();
    let kernels = Prepared::new(&model, largest)?;
    let times = [&kernels, &Prepared::new(&dense, largest)?].map(|p| p.layer_seconds(&u, ROUNDS));
    let [times, dense_times] = times;
    let layers = Layers { kernels: kernels.kernels(), times: times?, dense: dense_times? };
    let text = || -> anyhow::Result<String> {
        let listed: Vec<_> = rows
            .iter()
            .map(|r| {
                json!({
                    "batch": r.batch, "threads": r.threads, "ours_us": r.ours.median, "dense_us": r.dense.median,
                    "ours_p90_us": r.ours.p90, "ours_p99_us": r.ours.p99, "dense_p90_us": r.dense.p90,
                    "dense_p99_us": r.dense.p99, "onnxruntime_us": r.beside,
                    "samples_per_second": 1e6 * r.batch as f64 / r.ours.median,
                    "dense_samples_per_second": 1e6 * r.batch as f64 / r.fastest(),
                })
            })
            .collect();
        let blocks: Vec<_> = kernels
            .kernels()
            .iter()
            .map(|k| {
                json!({
                    "layer": k.layer, "rows": k.shape[0], "taps": k.shape[1], "positions": k.positions,
                    "density": k.density, "kernel": k.kernel, "break_even": k.break_even,
                    "multiply_adds": k.multiply_adds,
                })
            })
            .collect();
        let layers: Vec<_> = layers
            .times
            .iter()
            .map(|t| json!({ "layer": t.layer, "ours_us": 1e6 * t.seconds, "dense_us": layers.dense_us(&t.layer) }))
            .collect();
        let all = json!({
            "sparsity": model.sparsity().sparsity, "instructions": Instructions::detect().name(),
            "rows": listed, "blocks": blocks, "layers": layers, "blocks_batch": largest, "version": env!("CARGO_PKG_VERSION"),
        });
        Ok(serde_json::to_string_pretty(&all)? + "\n")
    };
    if let Some(path) = shared.json.file() {
        write_bytes_atomically(path, text()?.as_bytes())?;
    }
    if shared.json.to_stdout() {
        say(&text()?)?;
    } else {
        say(&show(&model, &rows, &layers))?;
    }
    Ok(Outcome::Done)
}

/// Runs a batch many times and measures the time of every call.
fn latency(model: &ImplicitModel, u: &Matrix<f32>, threads: Threads, cancel: &Cancel) -> anyhow::Result<Latency> {
    let prepared = Prepared::new(model, u.rows())?;
    prepared.outputs(u, threads)?;
    let mut times = Vec::new();
    let begin = Instant::now();
    while times.len() < LEAST || begin.elapsed() < PATIENCE {
        cancel.check()?;
        let start = Instant::now();
        prepared.outputs(u, threads)?;
        times.push(1e6 * start.elapsed().as_secs_f64());
    }
    times.sort_by(f64::total_cmp);
    let at = |share: f64| times[((times.len() - 1) as f64 * share).round() as usize];
    Ok(Latency { median: at(0.5), p90: at(0.9), p99: at(0.99) })
}

/// Times ONNX Runtime: median microseconds per batch, one line each.
const SCRIPT: &str = "
import sys, time
import numpy as np, onnxruntime
options = onnxruntime.SessionOptions()
options.intra_op_num_threads, options.inter_op_num_threads = int(sys.argv[2]), 1
session = onnxruntime.InferenceSession(sys.argv[1], options, providers=['CPUExecutionProvider'])
given = session.get_inputs()[0]
for batch in map(int, sys.argv[3:]):
    feed = {given.name: np.random.default_rng(0).random((batch, *given.shape[1:]), dtype=np.float32)}
    session.run(None, feed)
    times, end = [], time.perf_counter() + 1.5
    while len(times) < 5 or time.perf_counter() < end:
        start = time.perf_counter()
        session.run(None, feed)
        times.append(time.perf_counter() - start)
    print(1e6 * sorted(times)[len(times) // 2])
";

fn onnx_runtime(dense: &ImplicitModel, threads: Threads) -> anyhow::Result<Vec<f64>> {
    let directory = tempfile::tempdir()?;
    let path = directory.path().join("dense.onnx");
    export_onnx(dense, &path, OnnxSettings::default())?;
    let python = std::env::var("SIMPLICIT_PYTHON").unwrap_or_else(|_| "python3".into());
    let output = Command::new(&python)
        .args(["-c", SCRIPT])
        .arg(&path)
        .arg(threads.get().to_string())
        .args(BATCHES.iter().map(usize::to_string))
        .output()
        .with_context(|| format!("--beside onnxruntime: {python} cannot be started; set SIMPLICIT_PYTHON"))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        let last = said.lines().last().unwrap_or("nothing said").to_string();
        bail!("--beside onnxruntime: {python} failed ({last}); install it with pip install onnxruntime");
    }
    Ok(String::from_utf8_lossy(&output.stdout).lines().filter_map(|line| line.trim().parse().ok()).collect())
}

fn show(model: &ImplicitModel, rows: &[Row], layers: &Layers<'_>) -> String {
    let mut table = Table::with_head(&[
        "batch",
        "ours µs",
        "p90",
        "p99",
        "samples/s",
        "dense µs",
        "p90",
        "p99",
        "onnxruntime µs",
        "speed-up",
    ]);
    for r in rows {
        let cells = [
            r.batch.to_string(),
            format!("{:.1}", r.ours.median),
            format!("{:.1}", r.ours.p90),
            format!("{:.1}", r.ours.p99),
            count((1e6 * r.batch as f64 / r.ours.median) as u64),
            format!("{:.1}", r.dense.median),
            format!("{:.1}", r.dense.p90),
            format!("{:.1}", r.dense.p99),
            or_dash(r.beside, |t| format!("{t:.1}")),
            format!("{:.2} ×", r.fastest() / r.ours.median),
        ];
        table.row(&cells.each_ref().map(String::as_str));
    }
    let mut blocks =
        Table::with_head(&["layer", "weights", "positions", "density", "zeros pay below", "kernel", "µs", "dense µs"]);
    for time in &layers.times {
        let micros = format!("{:.1}", 1e6 * time.seconds);
        let dense = or_dash(layers.dense_us(&time.layer), |t| format!("{t:.1}"));
        let mut own = layers.kernels.iter().filter(|k| k.layer == time.layer).peekable();
        if own.peek().is_none() {
            blocks.row(&[&time.layer, "–", "–", "–", "–", "no weights", &micros, &dense]);
        }
        // The first block of a layer has the layer's time in its row.
        for (k, block) in own.enumerate() {
            let cells = [
                if k == 0 { block.layer.clone() } else { String::new() },
                format!("{} × {}", block.shape[0], block.shape[1]),
                block.positions.to_string(),
                percent(block.density),
                percent(block.break_even),
                block.kernel.clone(),
                if k == 0 { micros.clone() } else { String::new() },
                if k == 0 { dense.clone() } else { String::new() },
            ];
            blocks.row(&cells.each_ref().map(String::as_str));
        }
    }
    format!(
        "{}sparsity {}, {} thread(s), {}; a speed-up is over the faster of dense and onnxruntime\n\n{}batches of {} on \
         one thread; a block is dense where its density is above the one at which zeros pay, by measured costs\n",
        table.show(),
        percent(model.sparsity().sparsity),
        rows.first().map_or(1, |r| r.threads),
        Instructions::detect().name(),
        blocks.show(),
        BATCHES[BATCHES.len() - 1],
    )
}
