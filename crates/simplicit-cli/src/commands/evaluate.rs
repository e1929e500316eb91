//! `simplicit evaluate`: accuracy of a model, of its baseline, and the distance between them.

use std::path::PathBuf;

use anyhow::bail;
use clap::Args;
use simplicit::arrays::Labels;
use simplicit::evaluate::{accuracy, agreement, equilibrium_error};
use simplicit::files::write_bytes_atomically;
use simplicit::model::ImplicitModel;
use simplicit::parallel::Cancel;

use crate::args::{InputArgs, JsonArgs, RunArgs};
use crate::baseline::Baseline;
use crate::commands::report::{About, page_about};
use crate::exit::Outcome;
use crate::measure::Runner;
use crate::operands::ModelOrNetwork;
use crate::progress::Watcher;
use crate::results::{Results, Stopwatch, require_writable};
use crate::summary::summary;

const HELP: &str = "\
Give a model, a network, or both: with both, the table also says how often they agree and how far
the outputs are apart. Inputs are preprocessed as the model says, unless flags override it.

Example:
  simplicit evaluate m.safetensors net.onnx --inputs u.npy --labels y.npy";

/// Measure the accuracy of a model and of its baseline
#[derive(Debug, Args)]
#[command(after_help = HELP)]
pub(crate) struct EvaluateArgs {
    #[command(flatten)]
    files: ModelOrNetwork,
    /// Labels, in the formats of the inputs; a CIFAR file is its own [default: none, and no accuracy]
    #[arg(long, value_name = "FILE")]
    labels: Option<PathBuf>,
    #[command(flatten)]
    data: InputArgs,
    #[command(flatten)]
    run: RunArgs,
    #[command(flatten)]
    json: JsonArgs,
    /// Write the HTML report about the model, measured on these inputs
    #[arg(long, value_name = "FILE", help_heading = "Results")]
    report: Option<PathBuf>,
}

pub(crate) fn run(args: &EvaluateArgs, cancel: &Cancel) -> anyhow::Result<Outcome> {
    let mut stopwatch = Stopwatch::start();
    require_writable(args.json.file().into_iter().chain(args.report.as_deref()))?;
    let watcher = Watcher::new(args.run.progress);
    let threads = args.run.threads();
    let (model_path, network) = args.files.paths()?;
    let model = model_path.map(ImplicitModel::load).transpose()?;
    let baseline = network.map(Baseline::open).transpose()?;
    if args.labels.is_none() && (model.is_none() || baseline.is_none()) {
        bail!("--labels: expected a file with the labels, or both a model and a network to compare; got neither");
    }
    if args.report.is_some() && model.is_none() {
        bail!("--report: expected a model, which the page is about; got a network alone");
    }
    let own = model.as_ref().map(ImplicitModel::preprocessing);
    let own = own.or(baseline.as_ref().and_then(Baseline::preprocessing));
    let inputs = args.data.open(own)?;
    let labels = args.labels.as_ref().map(|path| Labels::read(path, &args.data.selection.selection())).transpose()?;
    stopwatch.lap("load");
    let mut results = model.as_ref().map_or_else(Results::new, Results::of_model);
    results.seed = Some(args.data.selection.seed);
    results.threads = Some(threads.get());
    if let Some(baseline) = &baseline {
        let (nonzeros, multiply_adds) = baseline.size();
        results.baseline_nonzeros = results.baseline_nonzeros.or(Some(nonzeros));
        results.baseline_multiply_adds = results.baseline_multiply_adds.or(Some(multiply_adds));
    }
    watcher.phase("model");
    let of_model = match &model {
        Some(model) => {
            let runner = Runner::of_model(model, threads)?;
            results.milliseconds = Some(runner.milliseconds(&inputs, cancel)?);
            Some(runner.run(&inputs, cancel, &watcher)?)
        }
        None => None,
    };
    stopwatch.lap("model");
    watcher.phase("baseline");
    let of_baseline = match &baseline {
        Some(baseline) => {
            let runner = Runner::of_baseline(baseline, threads)?;
            results.baseline_milliseconds = Some(runner.milliseconds(&inputs, cancel)?);
            Some(runner.run(&inputs, cancel, &watcher)?)
        }
        None => None,
    };
    stopwatch.lap("baseline");
    for measured in [&of_model, &of_baseline].into_iter().flatten() {
        results.samples = Some(measured.outputs.rows());
        if let Some(labels) = &labels {
            labels.require(measured.outputs.rows(), measured.outputs.cols())?;
        }
    }
    let score = |measured: &crate::measure::Measured| {
        labels.as_ref().map(|labels| accuracy(&measured.outputs, labels.as_slice())).transpose()
    };
    if let Some(measured) = &of_model {
        results.accuracy = score(measured)?;
        results.not_converged = Some(measured.not_converged());
    }
    if let Some(measured) = &of_baseline {
        results.baseline_accuracy = score(measured)?;
    }
    if let (Some(model), Some(baseline)) = (&of_model, &of_baseline) {
        results.agreement = Some(agreement(&model.outputs, &baseline.outputs)?);
        results.equilibrium_error = Some(equilibrium_error(&model.outputs, &baseline.outputs)?);
    }
    results.seconds = stopwatch.seconds();
    if let (Some(path), Some(model), Some(title)) = (&args.report, &model, model_path) {
        let about = About { title, model, baseline: baseline.as_ref(), results: &results };
        let page = page_about(&about, Some((&inputs, labels.as_ref())), threads, cancel, &watcher)?;
        write_bytes_atomically(path, page.as_bytes())?;
    }
    watcher.finish();
    results.deliver(&args.json, &summary(&results, baseline.as_ref().and_then(|b| b.bytes)))?;
    Ok(Outcome::with_notices(&results.notices()))
}
