//! `simplicit export`: a model as ONNX.

use std::path::PathBuf;

use anyhow::bail;
use clap::Args;
use simplicit::model::ImplicitModel;
use simplicit::onnx::{OnnxSettings, export_onnx, export_onnx_like};

use crate::args::{JsonArgs, NameArgs};
use crate::exit::Outcome;
use crate::operands::ModelOperand;
use crate::results::{Results, Stopwatch, require_writable};
use crate::table::bytes;

const HELP: &str = "\
The graph has one input u (batch × inputs, or batch × channels × height × width for convolutions,
already preprocessed) and one output y. Acyclic models are a straight line of Gemm, Conv and
activations; cycles become a Loop. Weights are dense in ONNX: the model file is the small one.
With --like the graph is that of the network: its operators, names and inputs, with new weights.

Example:
  simplicit export model.safetensors --out sparse.onnx";

/// Write a model as an ONNX file that any runtime reads
#[derive(Debug, Args)]
#[command(after_help = HELP)]
pub(crate) struct ExportArgs {
    #[command(flatten)]
    model: ModelOperand,
    /// Write this network, which the model was trained from, with the model's weights in its own graph
    #[arg(long, value_name = "NET.onnx")]
    like: Option<PathBuf>,
    /// The ONNX file to write
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    #[command(flatten)]
    names: NameArgs,
    #[command(flatten)]
    json: JsonArgs,
}

pub(crate) fn run(args: &ExportArgs) -> anyhow::Result<Outcome> {
    let stopwatch = Stopwatch::start();
    require_writable([args.out.as_path()].into_iter().chain(args.json.file()))?;
    let model = ImplicitModel::load(args.model.path())?;
    match &args.like {
        Some(original) => export_onnx_like(&model, original, &args.names.selection_for(Some(&model))?, &args.out)?,
        None if !args.names.given().is_empty() => {
            bail!("--input, --output, --input-shape, --fill: expected --like NET.onnx as well, which they are about")
        }
        None => export_onnx(&model, &args.out, OnnxSettings::default())?,
    }
    let size = std::fs::metadata(&args.out).map_or(0, |m| m.len());
    let p = model.preprocessing();
    let line = format!(
        "wrote {} ({}); it expects u = (raw·{} − {:?})/{:?}\n",
        args.out.display(),
        bytes(size),
        p.scale,
        p.mean,
        p.std
    );
    let results = Results { seconds: stopwatch.seconds(), ..Results::of_model(&model) };
    results.deliver(&args.json, &line)?;
    Ok(Outcome::Done)
}
