//! `simplicit lab frontier`: our whole trade-off curve from one set-up.

use std::path::PathBuf;

use std::sync::Arc;

use anyhow::bail;
use clap::Args;
use serde_json::json;
use simplicit::arrays::Inputs;
use simplicit::compress::{self, First};
use simplicit::evaluate::accuracy;
use simplicit::files::write_bytes_atomically;
use simplicit::parallel::Cancel;
use simplicit::states::{Collected, InputSource, StateSlice};
use simplicit::train::{AllowedWeights, Forget, Run, TrainInput, TrainSettings, Trained, importance, path};

use crate::args::{JsonArgs, PreprocessingArgs, RunArgs, SelectionArgs, number, open_inputs};
use crate::baseline::{Baseline, Kind};
use crate::commands::inference::Shared;
use crate::embedded;
use crate::exit::{Outcome, emit, say};
use crate::measure::Runner;
use crate::paths::Paths;
use crate::progress::Watcher;
use crate::table::{Table, count, or_dash, percent};

const LEVELS: [f64; 9] = [0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.93, 0.95];

/// Of `lab frontier`; network, inputs and JSON also of `bench inference`.
#[derive(Debug, Args)]
#[command(next_help_heading = "Frontier")]
pub(crate) struct FrontierArgs {
    /// The baseline, an ONNX network [default: the embedded one]
    #[arg(long, value_name = "FILE", requires = "inputs")]
    pub(crate) network: Option<PathBuf>,
    /// Its inputs; the last tenth is held out [default: the embedded images]
    #[arg(long, value_name = "FILE")]
    inputs: Option<PathBuf>,
    /// Sparsities [default: 0.5,0.6,0.7,0.75,0.8,0.85,0.9,0.93,0.95]
    #[arg(long, value_name = "T[,T…]", value_delimiter = ',', value_parser = number)]
    levels: Vec<f64>,
    /// Layers to train, as for train [default: all]
    #[arg(long, value_name = "LAYER[,LAYER…]", value_delimiter = ',')]
    include: Vec<String>,
    /// Layers that keep the baseline's weights, as for train [default: none]
    #[arg(long, value_name = "LAYER[,LAYER…]", value_delimiter = ',')]
    exclude: Vec<String>,
    #[command(flatten)]
    selection: SelectionArgs,
    #[command(flatten)]
    pub(crate) json: JsonArgs,
}

impl FrontierArgs {
    /// The flags that `bench inference` also uses.
    pub(crate) fn shared(&self) -> Shared<'_> {
        Shared { network: self.network.as_ref(), inputs: self.inputs.as_ref(), json: &self.json }
    }

    fn is_given(&self) -> bool {
        let lists = !(self.levels.is_empty() && self.include.is_empty() && self.exclude.is_empty());
        lists || self.selection.samples.is_some() || self.selection.seed != 0
    }

    /// Refuses the flags of a frontier, which `bench inference` would ignore.
    pub(crate) fn refuse_levels(&self) -> anyhow::Result<()> {
        if self.is_given() {
            bail!("bench inference: expected no --levels, --include, --exclude, --samples or --seed");
        }
        Ok(())
    }

    /// Refuses flags that would be ignored because no frontier is computed.
    pub(crate) fn refuse(&self) -> anyhow::Result<()> {
        if self.network.is_some() || self.inputs.is_some() || self.is_given() {
            bail!("bench: expected lab frontier with --network, --levels, --samples or --seed, got bench");
        }
        Ok(())
    }
}

pub(crate) fn run(args: &FrontierArgs, run: &RunArgs, cancel: &Cancel) -> anyhow::Result<Outcome> {
    Paths::default()
        .reads("NETWORK", args.network.as_deref())
        .reads("--inputs", args.inputs.as_deref())
        .writes("--json", args.json.file())
        .check()?;
    let watcher = Watcher::new(run.progress);
    let threads = run.threads();
    let selection = args.selection.selection();
    let (baseline, inputs) = match (&args.network, &args.inputs) {
        (Some(network), Some(inputs)) => {
            let baseline = Baseline::open(network)?;
            let inputs = open_inputs(inputs, &PreprocessingArgs::default(), baseline.preprocessing(), &selection)?;
            baseline.require_order(&inputs)?;
            (baseline, inputs)
        }
        (None, Some(_)) => bail!("--inputs: expected the network that they are for as well, got none"),
        _ => {
            let baseline = Baseline { kind: Kind::Network(Arc::new(embedded::network()?)), bytes: None };
            (baseline, Inputs::new(embedded::train_array()?, None, &selection)?)
        }
    };
    let Some(network) = baseline.network() else {
        bail!("--network: expected an ONNX network, whose gradients weigh the rows; got a model");
    };
    let total = inputs.samples();
    let held_out = compress::held_out(total)?;
    let part = total - held_out;
    watcher.phase("output-aware weights");
    let weights = importance(network, &First(&inputs, part), compress::DRAWS, args.selection.seed, threads, cancel)?;
    let implicit = baseline.implicit()?;
    let all = Collected::new(network, &inputs)?;
    let (source, judge) = (StateSlice::new(&all, 0..part)?, StateSlice::new(&all, part..total)?);
    let input = TrainInput {
        source: &source,
        baseline: Some(&implicit),
        importance: Some(&weights),
        preprocessing: inputs.preprocessing().clone(),
    };
    let mut progress = |p| watcher.training(&p);
    let mut work = Run { threads, cancel, keep: &Forget, progress: &mut progress };
    let levels = if args.levels.is_empty() { LEVELS.to_vec() } else { args.levels.clone() };
    let (include, exclude) = (args.include.clone(), args.exclude.clone());
    let settings = TrainSettings {
        allowed: AllowedWeights { include, exclude, ..Default::default() },
        ..TrainSettings::default()
    };
    let points = path(&input, Some(&judge), &levels, &settings, &mut work)?;
    // Only the embedded data come with labels.
    let accuracies = match args.network {
        Some(_) => None,
        None => {
            let (test, labels) = (embedded::test_images()?, embedded::test_labels()?);
            watcher.phase("test images");
            let of = |runner: Runner| -> anyhow::Result<f64> {
                Ok(accuracy(&runner.run(&test, cancel, &watcher)?.outputs, labels.as_slice())?)
            };
            let models =
                points.iter().map(|p| of(Runner::of_model(&p.model, threads)?)).collect::<Result<Vec<_>, _>>()?;
            Some((of(Runner::of_baseline(&baseline, threads)?)?, models))
        }
    };
    watcher.finish();
    if let Some(path) = args.json.file() {
        write_bytes_atomically(path, text(&points, accuracies.as_ref())?.as_bytes())?;
    }
    if args.json.to_stdout() {
        emit(&text(&points, accuracies.as_ref())?)?;
    } else {
        say(&table(&points, accuracies.as_ref(), part, held_out))?;
    }
    let at_limit: usize = points.iter().map(|p| p.report.rows_at_limit()).sum();
    let notices = (at_limit > 0).then(|| format!("{at_limit} row(s) ended at a limit"));
    Ok(Outcome::with_notices(&notices.into_iter().collect::<Vec<_>>()))
}

/// The accuracies of the baseline and of every point.
type Accuracies = (f64, Vec<f64>);

fn table(points: &[Trained], accuracies: Option<&Accuracies>, samples: usize, held_out: usize) -> String {
    let mut head = vec!["sparsity", "non-zeros", "agreement"];
    if accuracies.is_some() {
        head.push("accuracy");
    }
    head.extend(["largest gap", "median bound distance", "largest", "price"]);
    let mut table = Table::with_head(&head);
    for (k, point) in points.iter().enumerate() {
        let sparsity = point.model.sparsity();
        let mut cells =
            vec![percent(sparsity.sparsity), count(sparsity.nonzeros), or_dash(point.report.agreement, percent)];
        if let Some((_, models)) = accuracies {
            cells.push(percent(models[k]));
        }
        cells.push(or_dash(point.report.max_relative_gap(), |g| format!("{g:.1e}")));
        cells.push(or_dash(point.report.median_bound_distance(), percent));
        cells.push(or_dash(point.report.max_bound_distance(), percent));
        cells.push(format!("{:.2e}", point.report.strength));
        table.row(&cells.iter().map(String::as_str).collect::<Vec<_>>());
    }
    let baseline = accuracies.map_or_else(String::new, |(a, _)| format!(", baseline accuracy {}", percent(*a)));
    format!(
        "{}{} samples, agreement with the baseline on {} held out{baseline}\n",
        table.show(),
        count(samples as u64),
        count(held_out as u64)
    )
}

fn text(points: &[Trained], accuracies: Option<&Accuracies>) -> anyhow::Result<String> {
    let rows: Vec<serde_json::Value> = points
        .iter()
        .enumerate()
        .map(|(k, point)| {
            let sparsity = point.model.sparsity();
            json!({
                "sparsity": sparsity.sparsity,
                "nonzeros": sparsity.nonzeros,
                "agreement": point.report.agreement,
                "accuracy": accuracies.map(|(_, models)| models[k]),
                "max_relative_gap": point.report.max_relative_gap(),
                "rows_proven": point.report.rows_proven(),
                "median_bound_distance": point.report.median_bound_distance(),
                "max_bound_distance": point.report.max_bound_distance(),
                "rows_at_limit": point.report.rows_at_limit(),
                "strength": point.report.strength,
            })
        })
        .collect();
    let all = json!({ "baseline_accuracy": accuracies.map(|(a, _)| a), "points": rows });
    Ok(serde_json::to_string_pretty(&all)? + "\n")
}
