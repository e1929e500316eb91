//! `simplicit export`: a model as ONNX.

use std::path::{Path, PathBuf};

use anyhow::bail;
use clap::Args;
use simplicit::model::ImplicitModel;
use simplicit::model::{TapBlock, TapWeights, Target};
use simplicit::network::Network;
use simplicit::onnx::{OnnxSelection, OnnxSettings, export_onnx, export_onnx_like};

use crate::args::{JsonArgs, NameArgs};
use crate::baseline::was_made_from;
use crate::exit::{Outcome, complain};
use crate::operands::{ModelOperand, load_model, no_network};
use crate::paths::Paths;
use crate::results::{Results, Stopwatch};
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
    Paths::default()
        .reads("MODEL", Some(args.model.path()))
        .reads("--like", args.like.as_deref())
        .writes("--out", Some(&args.out))
        .writes("--json", args.json.file())
        .check()?;
    let model = load_model(args.model.path())?;
    match &args.like {
        Some(original) => {
            let selection = args.names.selection_for(Some(&model))?;
            let other = was_made_from(&model, original) == Some(false);
            if other {
                require_same_form(&model, original, &selection)?;
            }
            export_onnx_like(&model, original, &selection, &args.out)?;
            if other {
                complain(&format!(
                    "note: {} is not the file that the model was made from, by its SHA-256; the graph is the same, and all weights \
                     in it are the model's",
                    original.display()
                ));
            }
        }
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

/// An error if a network is another one than the model's: if it computes its layers otherwise, or keeps other parameters.
fn require_same_form(model: &ImplicitModel, original: &Path, selection: &OnnxSelection) -> anyhow::Result<()> {
    let network = Network::from_onnx_selected(original, selection).map_err(|e| no_network(original, e))?;
    let other = ImplicitModel::from_network(&network)?;
    let refuse = |what: &str| -> anyhow::Error {
        anyhow::anyhow!(
            "--like {}: expected the network that the model was made from, got another one: {what}",
            original.display()
        )
    };
    let (own, theirs) = (model.layout().layers(), other.layout().layers());
    let shapes = (model.shape(), other.shape());
    if own.len() != theirs.len() || (shapes.0.inputs, shapes.0.outputs) != (shapes.1.inputs, shapes.1.outputs) {
        return Err(refuse("it has other layers, inputs or outputs"));
    }
    for (own, theirs) in own.iter().zip(theirs) {
        if (own.size, own.map, own.activation, &own.operator)
            != (theirs.size, theirs.map, theirs.activation, &theirs.operator)
        {
            return Err(refuse(&format!("its layer {:?} computes something else than {:?}", theirs.name, own.name)));
        }
    }
    let fixed = |model: &ImplicitModel| {
        let blocks = model.taps().iter().filter(|block| !matches!(block.weights, TapWeights::Taps(_)));
        blocks.cloned().collect::<Vec<TapBlock>>()
    };
    let (sums, others) = (fixed(model), fixed(&other));
    if sums.len() != others.len() || !sums.iter().all(|block| others.contains(block)) {
        return Err(refuse("its residual sums are others"));
    }
    for name in &model.metadata().kept {
        let target = own.iter().position(|layer| layer.name == *name).map_or(Target::Output, Target::Layer);
        if model.summands(target) != other.summands(target) {
            return Err(refuse(&format!("its layer {name:?}, which the model keeps as it was, has other weights")));
        }
    }
    Ok(())
}
