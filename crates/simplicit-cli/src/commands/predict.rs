//! `simplicit predict`: the outputs of a model or a network on some inputs.

use std::path::{Path, PathBuf};

use clap::Args;
use simplicit::arrays::write_npy;
use simplicit::model::ImplicitModel;
use simplicit::parallel::Cancel;

use crate::args::{InputArgs, NameArgs, RunArgs};
use crate::baseline::Baseline;
use crate::exit::{Outcome, say};
use crate::measure::Runner;
use crate::progress::Watcher;
use crate::results::require_writable;
use crate::table::count;

const HELP: &str = "\
Outputs are in the units of the network the model was made from; with --network those of a network. A sample whose equilibrium was
not reached within the limit is written as far as it got, counted on stderr, and makes the exit
code 1.

Example:
  simplicit predict --model model.safetensors --inputs images.npy --out outputs.npy";

/// Write the outputs of a model or a network on some inputs
#[derive(Debug, Args)]
#[command(after_help = HELP)]
pub(crate) struct PredictArgs {
    /// The model
    #[arg(long, value_name = "FILE", required_unless_present = "network", conflicts_with = "network")]
    model: Option<PathBuf>,
    /// An ONNX network in its place
    #[arg(long, value_name = "FILE")]
    network: Option<PathBuf>,
    #[command(flatten)]
    names: NameArgs,
    /// The outputs to write, a float32 .npy with one sample a row
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    #[command(flatten)]
    data: InputArgs,
    #[command(flatten)]
    run: RunArgs,
}

pub(crate) fn run(args: &PredictArgs, cancel: &Cancel) -> anyhow::Result<Outcome> {
    require_writable([args.out.as_path()])?;
    let watcher = Watcher::new(args.run.progress);
    let baseline = match (&args.model, &args.network) {
        (Some(model), _) => Baseline::of_model(ImplicitModel::load(model)?)?,
        (None, network) => {
            Baseline::open_selected(network.as_deref().unwrap_or(Path::new("")), &args.names.selection())?
        }
    };
    let inputs = args.data.open(baseline.preprocessing())?;
    watcher.phase("outputs");
    let measured = Runner::of_baseline(&baseline, args.run.threads())?.run(&inputs, cancel, &watcher)?;
    write_npy(&args.out, &measured.outputs)?;
    watcher.finish();
    say(&format!(
        "wrote {}: {} samples of {} outputs, {:.2} ms per 1,000 samples\n",
        args.out.display(),
        count(measured.outputs.rows() as u64),
        measured.outputs.cols(),
        measured.milliseconds()
    ))?;
    let lost = measured.not_converged();
    let notices = if lost > 0 { vec![format!("the equilibrium of {lost} sample(s) was not reached")] } else { vec![] };
    Ok(Outcome::with_notices(&notices))
}
