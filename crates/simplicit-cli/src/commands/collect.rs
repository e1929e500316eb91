//! `simplicit collect`: the states of a baseline on some inputs, as a file.

use std::path::PathBuf;

use clap::Args;
use simplicit::parallel::Cancel;
use simplicit::states::{Collected, StateSource, StatesMetadata, write_states};

use crate::args::{InputArgs, JsonArgs, NameArgs, RunArgs};
use crate::baseline::Baseline;
use crate::exit::Outcome;
use crate::operands::NetworkOperand;
use crate::paths::Paths;
use crate::progress::Watcher;
use crate::results::{Results, Stopwatch};
use crate::table::{bytes, count};

const HELP: &str = "\
The file is safetensors with U, Z, X, Y (float32, one sample a row, last layer first) and the
layout in its metadata; simplicit train --states reads it, and so does anything that reads
safetensors.

Example:
  simplicit collect net.onnx --inputs u.npy --samples 5000 --out s.safetensors";

/// Write the states of a network on some inputs
#[derive(Debug, Args)]
#[command(after_help = HELP)]
pub(crate) struct CollectArgs {
    #[command(flatten)]
    network: NetworkOperand,
    /// The states file to write
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    #[command(flatten)]
    names: NameArgs,
    #[command(flatten)]
    data: InputArgs,
    #[command(flatten)]
    run: RunArgs,
    #[command(flatten)]
    json: JsonArgs,
}

pub(crate) fn run(args: &CollectArgs, cancel: &Cancel) -> anyhow::Result<Outcome> {
    let stopwatch = Stopwatch::start();
    Paths::default()
        .reads("NETWORK", Some(args.network.path()))
        .reads("--inputs", Some(&args.data.inputs))
        .writes("--out", Some(&args.out))
        .writes("--json", args.json.file())
        .check()?;
    let watcher = Watcher::new(args.run.progress);
    let baseline = Baseline::open_selected(args.network.path(), &args.names.selection()?)?;
    let inputs = args.data.open(baseline.preprocessing())?;
    baseline.require_order(&inputs)?;
    let source = Collected::new(baseline.map(), &inputs)?;
    let metadata = StatesMetadata {
        baseline_nonzeros: Some(baseline.size().0),
        preprocessing: Some(inputs.preprocessing().clone()),
    };
    watcher.phase("states");
    write_states(&args.out, &source, &metadata, args.run.threads(), cancel)?;
    watcher.finish();
    let shape = source.shape();
    let line = format!(
        "wrote {} ({}): {} samples of {} inputs, {} states, {} outputs\n",
        args.out.display(),
        bytes(std::fs::metadata(&args.out).map_or(0, |m| m.len())),
        count(source.samples() as u64),
        count(shape.inputs as u64),
        count(shape.states as u64),
        count(shape.outputs as u64)
    );
    let (nonzeros, multiply_adds) = baseline.size();
    let results = Results {
        samples: Some(source.samples()),
        baseline_nonzeros: Some(nonzeros),
        baseline_multiply_adds: Some(multiply_adds),
        threads: Some(args.run.threads().get()),
        seed: Some(args.data.selection.seed),
        seconds: stopwatch.seconds(),
        ..Results::new()
    };
    results.deliver(&args.json, &line)?;
    Ok(Outcome::Done)
}
