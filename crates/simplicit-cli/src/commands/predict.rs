//! `simplicit predict`: the outputs of a model or a network on some inputs.

use std::path::{Path, PathBuf};

use anyhow::bail;
use clap::Args;
use simplicit::arrays::write_npy;
use simplicit::parallel::Cancel;

use crate::args::{InputArgs, JsonArgs, NameArgs, RunArgs};
use crate::baseline::{Baseline, Kind};
use crate::exit::Outcome;
use crate::measure::Runner;
use crate::operands::{ModelOrNetwork, load_model};
use crate::paths::Paths;
use crate::progress::Watcher;
use crate::results::{Results, Stopwatch};
use crate::summary::certified;
use crate::table::count;

const HELP: &str = "\
Outputs are in the units of the network the model was made from. A sample whose equilibrium was
not reached within the limit is written as far as it got, counted on stderr, and makes the exit
code 1.

Example:
  simplicit predict model.safetensors --inputs images.npy --out outputs.npy";

/// Write the outputs of a model or a network on some inputs
#[derive(Debug, Args)]
#[command(after_help = HELP)]
pub(crate) struct PredictArgs {
    #[command(flatten)]
    files: ModelOrNetwork,
    #[command(flatten)]
    names: NameArgs,
    /// The outputs to write, a float32 .npy with one sample a row
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// Bound how far outputs are from those of exact arithmetic, and say the largest bound
    #[arg(long)]
    certified: bool,
    #[command(flatten)]
    data: InputArgs,
    #[command(flatten)]
    run: RunArgs,
    #[command(flatten)]
    json: JsonArgs,
}

pub(crate) fn run(args: &PredictArgs, cancel: &Cancel) -> anyhow::Result<Outcome> {
    let mut stopwatch = Stopwatch::start();
    let [model, network] = args.files.named();
    Paths::default()
        .reads(model.0, model.1)
        .reads(network.0, network.1)
        .reads("--inputs", Some(&args.data.inputs))
        .writes("--out", Some(&args.out))
        .writes("--json", args.json.file())
        .check()?;
    let watcher = Watcher::new(args.run.progress);
    let (model, network) = args.files.paths()?;
    let (baseline, mut results) = match (model, network) {
        (Some(_), Some(_)) => bail!("expected a model or a network, got both"),
        (Some(_), None) if !args.names.given().is_empty() => bail!(
            "--input, --output, --input-shape, --fill: expected an ONNX network, which leaves a choice; got a model"
        ),
        (Some(path), None) => {
            let model = load_model(path)?;
            let results = Results::of_model(&model);
            (Baseline::of_model(model)?, results)
        }
        (None, network) => {
            let path = network.unwrap_or(Path::new(""));
            (Baseline::open_selected(path, &args.names.selection()?)?, Results::new())
        }
    };
    let inputs = args.data.open(baseline.preprocessing())?;
    baseline.require_order(&inputs)?;
    watcher.phase("outputs");
    stopwatch.lap("load");
    let threads = args.run.threads();
    let runner = match (&baseline.kind, args.certified) {
        (Kind::Model(model, _), certified) => Runner::of_certified_model(model, threads, certified)?,
        (Kind::Network(_), true) => {
            bail!(
                "--certified: expected a model, whose errors can be bounded; got a network (convert makes it a model)"
            )
        }
        (Kind::Network(_), false) => Runner::of_baseline(&baseline, threads)?,
    };
    let measured = runner.run(&inputs, cancel, &watcher)?;
    write_npy(&args.out, &measured.outputs)?;
    watcher.finish();
    stopwatch.lap("outputs");
    let line = format!(
        "wrote {}: {} samples of {} outputs, {:.2} ms per 1,000 samples{}\n",
        args.out.display(),
        count(measured.outputs.rows() as u64),
        measured.outputs.cols(),
        measured.milliseconds(),
        if args.certified { format!(", {}", certified(measured.certified_error())) } else { String::new() }
    );
    results.certified_error = measured.certified_error();
    results.samples = Some(measured.outputs.rows());
    results.not_converged = Some(measured.not_converged());
    results.not_finite = Some(measured.not_finite());
    results.first_not_finite = measured.first_not_finite();
    results.milliseconds = Some(measured.milliseconds());
    results.threads = Some(threads.get());
    results.seed = Some(args.data.selection.seed);
    results.seconds = stopwatch.seconds();
    results.deliver(&args.json, &line)?;
    Ok(Outcome::with_notices(&results.notices()))
}
