//! `simplicit inspect`: what a model file or a network holds.

use anyhow::bail;
use clap::Args;
use simplicit::model::ImplicitModel;

use super::inspect_network;
use crate::args::{JsonArgs, NameArgs};
use crate::exit::Outcome;
use crate::operands::{ModelOperand, is_model, load_model};
use crate::paths::Paths;
use crate::results::{Results, Stopwatch};
use crate::table::{Table, bytes, count, or_dash, percent};

/// Show what a model file or an ONNX network holds: sizes, layers, well-posedness, what cannot be read
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  simplicit inspect model.safetensors\n  simplicit inspect network.onnx --samples 2000 --json -"
)]
pub(crate) struct InspectArgs {
    #[command(flatten)]
    model: ModelOperand,
    /// Say what memory and time training an ONNX network on so many samples would take
    #[arg(long, value_name = "N")]
    samples: Option<usize>,
    #[command(flatten)]
    names: NameArgs,
    #[command(flatten)]
    json: JsonArgs,
}

pub(crate) fn run(args: &InspectArgs) -> anyhow::Result<Outcome> {
    let stopwatch = Stopwatch::start();
    Paths::default().reads("MODEL", Some(args.model.path())).writes("--json", args.json.file()).check()?;
    if !is_model(args.model.path())? {
        return inspect_network::run(args.model.path(), &args.names.selection()?, args.samples, &args.json);
    }
    if args.samples.is_some() {
        bail!("--samples: expected an ONNX network, whose training is estimated; got a model");
    }
    if !args.names.given().is_empty() {
        bail!("--input, --output, --input-shape, --fill: expected an ONNX network, which leaves a choice; got a model");
    }
    let model = load_model(args.model.path())?;
    let mut results = Results::of_model(&model);
    let seed = model.metadata().provenance.get("seed");
    results.seed = seed.and_then(|s| s.parse().ok());
    results.seconds = stopwatch.seconds();
    results.deliver(&args.json, &describe(&model))?;
    Ok(Outcome::Done)
}

fn describe(model: &ImplicitModel) -> String {
    let (shape, sparsity, posed) = (model.shape(), model.sparsity(), model.well_posedness());
    let about = model.metadata();
    let letters = sparsity.letters;
    let mut table = Table::new();
    let count = |n: usize| count(n as u64);
    table.row(&[
        "inputs, states, outputs",
        &format!("{}, {}, {}", count(shape.inputs), count(shape.states), count(shape.outputs)),
    ]);
    table.row(&[
        "non-zeros",
        &format!(
            "{} of the baseline's {}",
            count(sparsity.nonzeros as usize),
            count(sparsity.baseline_nonzeros as usize)
        ),
    ]);
    table.row(&["sparsity", &percent(sparsity.sparsity)]);
    table.row(&[
        "of A, B, C, D, b, d",
        &[letters.a, letters.b, letters.c, letters.d, letters.state_bias, letters.output_bias].map(count).join(", "),
    ]);
    table.row(&[
        "multiply-adds",
        &format!(
            "{} (baseline {})",
            count(sparsity.multiply_adds as usize),
            or_dash(sparsity.baseline_multiply_adds, |n| count(n as usize))
        ),
    ]);
    table.row(&["file", &bytes(sparsity.bytes)]);
    table.row(&["‖A‖∞", &format!("{:.6}", posed.norm_a_inf)]);
    let verdict = match (posed.acyclic, posed.is_shown()) {
        (true, _) => "acyclic, well-posed",
        (false, true) => "well-posed",
        (false, false) => "not shown to be well-posed",
    };
    table.row(&["λ_pf(|A|) at most", &format!("{:.6}, {verdict}", posed.lambda_pf_upper)]);
    table.row(&["kappa", &or_dash(about.kappa, |k| k.to_string())]);
    let scaling = about.scaling.as_ref().map(|s| s.states.iter().copied().fold(0.0, f64::max));
    table.row(&["largest state factor", &or_dash(scaling, |s| s.to_string())]);
    let p = model.preprocessing();
    table.row(&["preprocessing", &format!("u = (raw·{} − {:?})/{:?}", p.scale, p.mean, p.std)]);
    for (key, value) in &about.provenance {
        table.row(&[key, value]);
    }
    let mut layers = Table::with_head(&["layer", "activation", "units", "non-zeros", "unread units"]);
    for (layer, about) in sparsity.layers.iter().zip(model.layout().layers()) {
        layers.row(&[
            &layer.name,
            &about.activation.to_string(),
            &about.map.map_or_else(|| count(layer.units), |map| map.to_string()),
            &count(layer.nonzeros),
            &match about.map {
                Some(_) => format!("{} channels", count(layer.unread)),
                None => count(layer.unread),
            },
        ]);
    }
    layers.row(&["outputs", "", &count(shape.outputs), &count(letters.c + letters.d + letters.output_bias), ""]);
    format!("{}\n{}", table.show(), layers.show())
}
