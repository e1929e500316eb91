//! `simplicit predict`: a model's outputs on some inputs.

use std::path::PathBuf;

use clap::Args;
use simplicit::arrays::write_npy;
use simplicit::model::ImplicitModel;
use simplicit::parallel::Cancel;

use crate::args::{InputArgs, RunArgs};
use crate::exit::{Outcome, say};
use crate::measure::Runner;
use crate::progress::Watcher;
use crate::results::require_writable;
use crate::table::count;

const HELP: &str = "\
Outputs are in the units of the network the model was made from. A sample whose equilibrium was
not reached within the limit is written as far as it got, counted on stderr, and makes the exit
code 1.

Example:
  simplicit predict --model model.safetensors --inputs images.npy --out outputs.npy";

/// Write a model's outputs on some inputs
#[derive(Debug, Args)]
#[command(after_help = HELP)]
pub(crate) struct PredictArgs {
    /// The model
    #[arg(long, value_name = "FILE")]
    model: PathBuf,
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
    let model = ImplicitModel::load(&args.model)?;
    let inputs = args.data.open(Some(model.preprocessing()))?;
    watcher.phase("outputs");
    let measured = Runner::of_model(&model, args.run.threads())?.run(&inputs, cancel, &watcher)?;
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
