//! `simplicit reduce`: fewer states, the same outputs.

use std::path::PathBuf;

use anyhow::bail;
use clap::Args;
use simplicit::arrays::write_npy;
use simplicit::evaluate::{rank, state_ranges};
use simplicit::linalg::Matrix;
use simplicit::model::{ImplicitModel, Ranges};
use simplicit::parallel::Cancel;
use simplicit::states::Collected;

use crate::args::{JsonArgs, PreprocessingArgs, RunArgs, SelectionArgs, number, open_inputs};
use crate::baseline::{Baseline, Kind};
use crate::exit::Outcome;
use crate::operands::{ModelOperand, load_model};
use crate::paths::Paths;
use crate::progress::Watcher;
use crate::results::{Results, Stopwatch, deliver};
use crate::table::{Table, bytes, count};

const HELP: &str = "\
Removed are states that no output depends on, states with one value whatever the input, and states
that are always linear, the latter folded into their readers where that takes no more non-zeros.
Of feature maps whole channels go; nothing is folded there, and channels that a residual sum ties
together go together or stay.
Outputs stay the same, to rounding: for every input; with --range for every input in that range,
proven by interval arithmetic; with --observed on these inputs, nothing being proven elsewhere.

Examples:
  simplicit reduce model.safetensors --range 0,1 --out small.safetensors
  simplicit reduce model.safetensors --observed images.npy --out small.safetensors";

/// Remove states that do not matter, without changing outputs
#[derive(Debug, Args)]
#[command(after_help = HELP, allow_negative_numbers = true)]
pub(crate) struct ReduceArgs {
    #[command(flatten)]
    model: ModelOperand,
    /// The model file to write
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// Every input lies in this range, in raw·scale units: 0,1 for images
    #[arg(long, value_name = "L,H", value_delimiter = ',', value_parser = number, conflicts_with = "observed")]
    range: Vec<f64>,
    /// Assume that states behave on every input as they do on these
    #[arg(long, value_name = "FILE")]
    observed: Option<PathBuf>,
    #[command(flatten)]
    selection: SelectionArgs,
    /// Turn rows of low rank into extra identity states where that has fewer non-zeros (acyclic models)
    #[arg(long)]
    factorise: bool,
    /// Also remove inputs that nothing reads, and write the numbers of those that stay; samples must be cut to them
    #[arg(long, value_name = "FILE.npy")]
    drop_inputs: Option<PathBuf>,
    #[command(flatten)]
    run: RunArgs,
    #[command(flatten)]
    json: JsonArgs,
}

/// The results that every command has, here of the smaller model, and what was removed.
#[derive(serde::Serialize)]
struct Reduced {
    #[serde(flatten)]
    results: Results,
    states: usize,
    unread_states: usize,
    constant_states: usize,
    linear_states: usize,
    unread_inputs: usize,
}

pub(crate) fn run(args: &ReduceArgs, cancel: &Cancel) -> anyhow::Result<Outcome> {
    let stopwatch = Stopwatch::start();
    Paths::default()
        .reads("MODEL", Some(args.model.path()))
        .reads("--observed", args.observed.as_deref())
        .writes("--out", Some(&args.out))
        .writes("--drop-inputs", args.drop_inputs.as_deref())
        .writes("--json", args.json.file())
        .check()?;
    if args.observed.is_none() && (args.selection.samples.is_some() || args.selection.seed != 0) {
        bail!("--samples, --seed: expected --observed, whose inputs are chosen from; got none");
    }
    let model = load_model(args.model.path())?;
    let watcher = Watcher::new(args.run.progress);
    let ranges = match (&args.range[..], &args.observed) {
        ([], None) => Ranges::Unknown,
        ([], Some(path)) => {
            watcher.phase("states");
            let own = Some(model.preprocessing());
            let inputs = open_inputs(path, &PreprocessingArgs::default(), own, &args.selection.selection())?;
            let baseline = Baseline { kind: Kind::of_model(model.clone())?, bytes: None };
            baseline.require_order(&inputs)?;
            Ranges::Observed(state_ranges(&Collected::new(baseline.map(), &inputs)?, args.run.threads(), cancel)?)
        }
        ([low, high], _) if low <= high => Ranges::Inputs(input_ranges(&model, *low, *high)),
        (other, _) => bail!("--range: expected two numbers, the smaller first, such as 0,1; got {other:?}"),
    };
    let reduced = model.reduce(&ranges)?;
    let mut small = reduced.model;
    let mut table = Table::new();
    let states = |list: &[usize]| count(list.len() as u64);
    table.row(&["unread states", &states(&reduced.unread)]);
    table.row(&["constant states", &states(&reduced.constant)]);
    table.row(&["linear states, folded", &states(&reduced.linear)]);
    if args.factorise {
        let factorised = small.factorise()?;
        small = factorised.model;
        let blocks: Vec<String> =
            factorised.blocks.iter().map(|(name, rank)| format!("{name} (rank {rank})")).collect();
        table.row(&["factorised", if blocks.is_empty() { "nothing".into() } else { blocks.join(", ") }.as_str()]);
    }
    match &args.drop_inputs {
        Some(path) => {
            let (without, kept) = small.without_unread_inputs()?;
            small = without;
            // Numbers of inputs are far below 2²⁴, up to which f32 is exact.
            write_npy(path, &Matrix::from_fn(kept.len(), 1, |i, _| kept[i] as f32))?;
            table.row(&["unread inputs, removed", &states(&reduced.unread_inputs)]);
        }
        None => {
            table.row(&["unread inputs", &states(&reduced.unread_inputs)]);
        }
    }
    small.save(&args.out)?;
    watcher.finish();
    let (before, after) = (model.sparsity(), small.sparsity());
    let change = |a: u64, b: u64| format!("{} of {}", count(b), count(a));
    table.row(&["states left", &change(model.shape().states as u64, small.shape().states as u64)]);
    table.row(&["non-zeros left", &change(before.nonzeros, after.nonzeros)]);
    // With tap blocks A is only what they leave.
    if let Ok(of_a) = rank(small.a())
        && small.taps().is_empty()
    {
        table.row(&["rank of A", &format!("{} of {}", of_a.rank, small.shape().states)]);
    }
    table.row(&["file", &format!("{} ({}, before {})", args.out.display(), bytes(after.bytes), bytes(before.bytes))]);
    let results = Reduced {
        results: Results { seconds: stopwatch.seconds(), ..Results::of_model(&small) },
        states: small.shape().states,
        unread_states: reduced.unread.len(),
        constant_states: reduced.constant.len(),
        linear_states: reduced.linear.len(),
        unread_inputs: reduced.unread_inputs.len(),
    };
    deliver(&results, &args.json, &table.show())?;
    Ok(Outcome::Done)
}

/// The range of every input u = (v − mean)/std where v lies in [low, high].
fn input_ranges(model: &ImplicitModel, low: f64, high: f64) -> Vec<(f64, f64)> {
    let (inputs, about) = (model.shape().inputs, model.preprocessing());
    // Mean and std are one number for all inputs or one per channel, and channels have equal sizes, which the model
    // has checked.
    let of = |values: &[f64], j: usize| values[j * values.len() / inputs.max(1)];
    let at = |v: f64, j: usize| (v - of(&about.mean, j)) / of(&about.std, j);
    (0..inputs).map(|j| (at(low, j), at(high, j))).collect()
}
