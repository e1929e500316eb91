//! `simplicit convert`: a network as the equivalent implicit model, without training.

use std::path::PathBuf;

use clap::Args;
use simplicit::arrays::{Preprocessing, content_hash};
use simplicit::model::ImplicitModel;

use crate::args::{JsonArgs, NameArgs, PreprocessingArgs};
use crate::baseline::Baseline;
use crate::exit::Outcome;
use crate::operands::NetworkOperand;
use crate::paths::Paths;
use crate::results::Results;
use crate::table::{bytes, count};

const HELP: &str = "\
The model computes what the network computes: its matrices hold the network's own weights, last
layer on top, and convolutions as tap blocks with every weight once. Preprocessing is stored in the
model, and later commands use it: say here how raw inputs become what the network expects.

Example:
  simplicit convert net.onnx --scale 1/255 --out model.safetensors";

/// Turn a network into the equivalent implicit model, without training
#[derive(Debug, Args)]
#[command(after_help = HELP)]
pub(crate) struct ConvertArgs {
    #[command(flatten)]
    network: NetworkOperand,
    /// The model file to write
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    #[command(flatten)]
    names: NameArgs,
    #[command(flatten)]
    preprocessing: PreprocessingArgs,
    #[command(flatten)]
    json: JsonArgs,
}

pub(crate) fn run(args: &ConvertArgs) -> anyhow::Result<Outcome> {
    Paths::default()
        .reads("NETWORK", Some(args.network.path()))
        .writes("--out", Some(&args.out))
        .writes("--json", args.json.file())
        .check()?;
    let baseline = Baseline::open_selected(args.network.path(), &args.names.selection()?)?;
    let mut parts = baseline.implicit()?.into_parts();
    let identity = Preprocessing::identity();
    parts.preprocessing = args.preprocessing.over(baseline.preprocessing().unwrap_or(&identity))?;
    let provenance = &mut parts.metadata.provenance;
    provenance.insert("network".into(), content_hash(args.network.path())?);
    provenance.extend(args.names.given().into_iter().map(|(name, value)| (name.to_string(), value.to_string())));
    provenance.insert("version".into(), env!("CARGO_PKG_VERSION").into());
    let model = ImplicitModel::new(parts)?;
    model.save(&args.out)?;
    let (shape, sparsity) = (model.shape(), model.sparsity());
    let line = format!(
        "wrote {} ({}): {} inputs, {} states, {} outputs, {} non-zeros\n",
        args.out.display(),
        bytes(sparsity.bytes),
        count(shape.inputs as u64),
        count(shape.states as u64),
        count(shape.outputs as u64),
        count(sparsity.nonzeros)
    );
    Results::of_model(&model).deliver(&args.json, &line)?;
    Ok(Outcome::Done)
}
