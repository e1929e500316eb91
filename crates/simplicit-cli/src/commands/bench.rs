//! `simplicit bench`: how fast this machine is, on embedded data.

use std::sync::Arc;
use std::time::Instant;

use clap::Args;
use serde_json::json;
use simplicit::model::ImplicitModel;
use simplicit::parallel::Cancel;
use simplicit::problem::penalty::L1;
use simplicit::problem::{Ball, RowProblem};
use simplicit::solver::{Design, SolverSettings, solve_rows};
use simplicit::states::{Collected, StateSlice, StateSource};
use simplicit::statistics::Statistics;
use simplicit::train::{Forget, Run, TrainInput, TrainSettings, importance, train};

use crate::args::RunArgs;
use crate::baseline::{Baseline, Kind};
use crate::commands::frontier::{self, FrontierArgs};
use crate::commands::inference::{self, InferenceArgs};
use crate::commands::lab::moved;
use crate::embedded;
use crate::exit::Outcome;
use crate::measure::Runner;
use crate::paths::Paths;
use crate::progress::Watcher;
use crate::results::deliver;
use crate::table::{Table, count, percent};

/// The paper's problem: 1,000 samples, λ = 0.1, β = 1e-3, κ = 0.99.
const SAMPLES: usize = 1000;
const LAMBDA: f64 = 0.1;
const BETA: f64 = 1e-3;
const KAPPA: f64 = 0.99;

const HELP: &str = "\
Measures the row solver on the paper's problem (122 rows of 896 features, 1,000 samples, l1 with
kappa 0.99, every row certified) and inference of a sparse model against the dense network it came
from. Takes seconds.

bench inference times --model beside the dense --network on --inputs: latency percentiles and
throughput for batches of 1, 8 and 64, and which kernel every block of weights runs by.

Examples:
  simplicit bench
  simplicit bench inference --model m.safetensors --network net.onnx --inputs images.npy --threads 1";

/// Measure solver and inference on this machine
#[derive(Debug, Args)]
#[command(after_help = HELP)]
pub(crate) struct BenchArgs {
    /// What to measure: nothing for the quick measurement, inference for the speed of a model; frontier has moved to simplicit lab frontier
    #[arg(value_name = "WHAT", value_parser = ["frontier", "inference"])]
    what: Option<String>,
    #[command(flatten)]
    frontier: FrontierArgs,
    #[command(flatten)]
    inference: InferenceArgs,
    #[command(flatten)]
    run: RunArgs,
}

pub(crate) fn run(args: &BenchArgs, cancel: &Cancel) -> anyhow::Result<Outcome> {
    if args.what.as_deref() == Some("inference") {
        args.frontier.refuse_levels()?;
        return inference::run(&args.inference, &args.frontier.shared(), &args.run, cancel);
    }
    args.inference.refuse()?;
    if args.what.is_some() {
        moved("bench frontier", "lab frontier");
        return frontier::run(&args.frontier, &args.run, cancel);
    }
    args.frontier.refuse()?;
    Paths::default().writes("--json", args.frontier.json.file()).check()?;
    let watcher = Watcher::new(args.run.progress);
    let threads = args.run.threads();
    let network = embedded::network()?;
    let images = embedded::train_images()?;
    let mut table = Table::new();
    table.row(&["threads", &threads.get().to_string()]);

    watcher.phase("solver");
    // The paper's coordinates: the baseline rescaled so that it satisfies κ itself.
    let scaled = Kind::of_model(ImplicitModel::from_network(&network)?.rescale(KAPPA)?.model)?;
    let scaled = Baseline { kind: scaled, bytes: None };
    let all = Collected::new(scaled.map(), &images)?;
    let source = StateSlice::new(&all, 0..SAMPLES)?;
    let shape = source.shape();
    let begin = Instant::now();
    let statistics = Statistics::of_states(&source, false, threads, cancel, |done| watcher.samples(done, SAMPLES))?;
    let gathered = begin.elapsed().as_secs_f64();
    let features = shape.states + shape.inputs;
    let problems: Vec<RowProblem> = (0..shape.states + shape.outputs)
        .map(|i| RowProblem {
            ball: (i < shape.states).then(|| Ball::on_states(KAPPA, shape.states, features)),
            ..RowProblem::new(i, LAMBDA * SAMPLES as f64)
        })
        .collect();
    let begin = Instant::now();
    let design = Design::new(&statistics)?;
    let penalty = L1::new(BETA)?;
    let total = problems.len();
    let rows = solve_rows(&design, &penalty, &problems, &SolverSettings::default(), threads, cancel, |done| {
        watcher.samples(done, total);
    })?;
    let solved = begin.elapsed().as_secs_f64();
    let gap = rows.iter().map(|r| r.relative_gap).fold(0.0, f64::max);
    table.row(&[
        "statistics",
        &format!("{:.0} ms for {} samples, {features} features", 1e3 * gathered, count(SAMPLES as u64)),
    ]);
    table.row(&[
        "solver",
        &format!("{:.0} rows/s ({total} rows in {solved:.2} s, largest relative gap {gap:.1e})", total as f64 / solved),
    ]);

    watcher.phase("inference");
    let baseline = Baseline::of_network(Arc::new(network), None);
    let implicit = baseline.implicit()?;
    let source = Collected::new(baseline.map(), &images)?;
    let weights = match baseline.network() {
        Some(network) => Some(importance(network, &images, 1, 0, threads, cancel)?),
        None => None,
    };
    let input = TrainInput {
        source: &source,
        baseline: Some(&implicit),
        importance: weights.as_deref(),
        preprocessing: images.preprocessing().clone(),
    };
    let mut progress = |p| watcher.training(&p);
    let mut run = Run { threads, cancel, keep: &Forget, progress: &mut progress };
    let begin = Instant::now();
    let model = train(&input, &TrainSettings::default(), &mut run)?.model;
    let fitted = begin.elapsed().as_secs_f64();
    table.row(&[
        "one whole model",
        &format!("{fitted:.2} s for {} samples by cardinality", count(source.samples() as u64)),
    ]);
    let test = embedded::test_images()?;
    let dense = Runner::of_baseline(&baseline, threads)?.milliseconds(&test, cancel)?;
    let sparse = Runner::of_model(&model, threads)?.milliseconds(&test, cancel)?;
    table.row(&["dense network", &format!("{dense:.2} ms per 1,000 samples")]);
    table.row(&[
        "sparse model",
        &format!(
            "{sparse:.2} ms per 1,000 samples at {}: {:.1} × as fast",
            percent(model.sparsity().sparsity),
            dense / sparse
        ),
    ]);
    watcher.finish();
    let results = json!({
        "threads": threads.get(),
        "statistics_seconds": gathered,
        "rows": total,
        "rows_per_second": total as f64 / solved,
        "max_relative_gap": gap,
        "model_seconds": fitted,
        "sparsity": model.sparsity().sparsity,
        "milliseconds": sparse,
        "baseline_milliseconds": dense,
        "version": env!("CARGO_PKG_VERSION"),
    });
    deliver(&results, &args.frontier.json, &table.show())?;
    Ok(Outcome::Done)
}
