//! `simplicit export`: a model as ONNX.

use std::path::PathBuf;

use clap::Args;
use simplicit::equilibrium::{OnnxSettings, export_onnx};
use simplicit::model::ImplicitModel;

use crate::exit::{Outcome, say};
use crate::table::bytes;

const HELP: &str = "\
The graph has one input u (batch × inputs, or batch × channels × height × width for convolutions,
already preprocessed) and one output y. Acyclic models are a straight line of Gemm, Conv and
activations; cycles become a Loop. Weights are dense in ONNX: the model file is the small one.

Example:
  simplicit export --model model.safetensors --out sparse.onnx";

/// Write a model as an ONNX file that any runtime reads
#[derive(Debug, Args)]
#[command(after_help = HELP)]
pub(crate) struct ExportArgs {
    /// The model
    #[arg(long, value_name = "FILE")]
    model: PathBuf,
    /// The ONNX file to write
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
}

pub(crate) fn run(args: &ExportArgs) -> anyhow::Result<Outcome> {
    let model = ImplicitModel::load(&args.model)?;
    export_onnx(&model, &args.out, OnnxSettings::default())?;
    let size = std::fs::metadata(&args.out).map_or(0, |m| m.len());
    let p = model.preprocessing();
    say(&format!(
        "wrote {} ({}); it expects u = (raw·{} − {:?})/{:?}\n",
        args.out.display(),
        bytes(size),
        p.scale,
        p.mean,
        p.std
    ))?;
    Ok(Outcome::Done)
}
