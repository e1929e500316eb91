//! `simplicit evaluate`: accuracy of a model, of its baseline, and the distance between them.

use std::path::{Path, PathBuf};

use anyhow::bail;
use clap::Args;
use simplicit::arrays::{Array, Element, InputSource, Labels, Selection};
use simplicit::evaluate::{accuracy, equilibrium_error, mean_squared_error, top_accuracy};
use simplicit::files::write_bytes_atomically;
use simplicit::linalg::Matrix;
use simplicit::model::ImplicitModel;
use simplicit::parallel::Cancel;

use crate::args::{InputArgs, JsonArgs, NameArgs, RunArgs};
use crate::baseline::{Baseline, require_order};
use crate::commands::report::{About, page_about};
use crate::exit::Outcome;
use crate::measure::{Measured, Runner, agreement};
use crate::operands::{ModelOrNetwork, load_model};
use crate::paths::Paths;
use crate::progress::Watcher;
use crate::results::{Results, Stopwatch};
use crate::summary::{certified, summary};

const HELP: &str = "\
Give a model, a network, or both: with both, the table also says how often they agree and how far
the outputs are apart. Inputs are preprocessed as the model says, unless flags override it.
Measured is the share of samples whose label is the largest output (accuracy) and among the five
largest (top-5); labels that are no integers, or several a sample, are targets: then it is the
mean squared error.

Example:
  simplicit evaluate m.safetensors net.onnx --inputs u.npy --labels y.npy";

/// Measure the accuracy of a model and of its baseline
#[derive(Debug, Args)]
#[command(after_help = HELP)]
pub(crate) struct EvaluateArgs {
    #[command(flatten)]
    files: ModelOrNetwork,
    /// Labels or targets, in the formats of the inputs; a CIFAR file is its own, and so is a folder with a folder of pictures for every class [default: none, and no accuracy]
    #[arg(long, value_name = "FILE")]
    labels: Option<PathBuf>,
    #[command(flatten)]
    names: NameArgs,
    /// Bound how far outputs are from those of exact arithmetic, and say the largest bound
    #[arg(long)]
    certified: bool,
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
    let [model, network] = args.files.named();
    Paths::default()
        .reads(model.0, model.1)
        .reads(network.0, network.1)
        .reads("--inputs", Some(&args.data.inputs))
        .reads("--labels", args.labels.as_deref())
        .writes("--json", args.json.file())
        .writes("--report", args.report.as_deref())
        .check()?;
    let watcher = Watcher::new(args.run.progress);
    let threads = args.run.threads();
    let (model_path, network) = args.files.paths()?;
    let model = model_path.map(load_model).transpose()?;
    let baseline = network.map(|n| Baseline::open_beside(n, &args.names, model.as_ref())).transpose()?;
    if args.labels.is_none() && (model.is_none() || baseline.is_none()) {
        bail!("--labels: expected a file with the labels, or both a model and a network to compare; got neither");
    }
    if args.certified && model.is_none() {
        bail!("--certified: expected a model, whose errors can be bounded; got a network alone");
    }
    if args.report.is_some() && model.is_none() {
        bail!("--report: expected a model, which the page is about; got a network alone");
    }
    let own = model.as_ref().map(ImplicitModel::preprocessing);
    let own = own.or(baseline.as_ref().and_then(Baseline::preprocessing));
    let inputs = args.data.open(own)?;
    require_order(&inputs, model.as_ref(), baseline.as_ref())?;
    let outputs = model.as_ref().map(ImplicitModel::shape).or(baseline.as_ref().map(|b| b.map().shape()));
    let outputs = outputs.map_or(0, |shape| shape.outputs);
    let selection = args.data.selection.selection();
    let answers = args.labels.as_ref().map(|path| Answers::read(path, &selection, outputs)).transpose()?;
    if let Some(Answers::Classes(labels)) = &answers {
        labels.require(inputs.samples(), outputs)?;
    }
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
            let runner = Runner::of_certified_model(model, threads, args.certified)?;
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
    }
    let score = |measured: &Measured| answers.as_ref().map(|answers| answers.score(&measured.outputs)).transpose();
    if let Some(measured) = &of_model {
        let scores = score(measured)?.unwrap_or_default();
        (results.accuracy, results.top5_accuracy, results.mean_squared_error) = scores.into_parts();
        results.not_converged = Some(measured.not_converged());
        results.not_finite = Some(measured.not_finite());
        results.first_not_finite = measured.first_not_finite();
        results.certified_error = measured.certified_error();
    }
    if let Some(measured) = &of_baseline {
        let scores = score(measured)?.unwrap_or_default();
        (results.baseline_accuracy, results.baseline_top5_accuracy, results.baseline_mean_squared_error) =
            scores.into_parts();
    }
    if let (Some(model), Some(baseline)) = (&of_model, &of_baseline) {
        results.agreement = agreement(&model.outputs, &baseline.outputs)?;
        results.equilibrium_error = Some(equilibrium_error(&model.outputs, &baseline.outputs)?);
    }
    results.seconds = stopwatch.seconds();
    if let (Some(path), Some(model), Some(title)) = (&args.report, &model, model_path) {
        let about = About { title, model, baseline: baseline.as_ref(), results: &results };
        let page = page_about(
            &about,
            Some((&inputs, answers.as_ref().and_then(Answers::classes))),
            threads,
            cancel,
            &watcher,
        )?;
        write_bytes_atomically(path, page.as_bytes())?;
    }
    watcher.finish();
    let mut text = summary(&results, baseline.as_ref().and_then(|b| b.bytes));
    if args.certified {
        text.push_str(&format!("{}\n", certified(results.certified_error)));
    }
    results.deliver(&args.json, &text)?;
    let mut notices = results.notices();
    let theirs = of_baseline.as_ref().and_then(|measured| Some((measured.not_finite(), measured.first_not_finite()?)));
    notices.extend(theirs.map(|(count, first)| {
        format!(
            "the baseline's outputs of {count} sample(s) are no finite numbers (NaN or infinite), first in row {first}"
        )
    }));
    Ok(Outcome::with_notices(&notices))
}

/// The answers that the outputs are compared with: classes, or numbers.
enum Answers {
    Classes(Labels),
    Targets(Matrix<f32>),
}

/// How well outputs match the answers.
#[derive(Default)]
struct Scores {
    top1: Option<f64>,
    top5: Option<f64>,
    squared_error: Option<f64>,
}

impl Scores {
    fn into_parts(self) -> (Option<f64>, Option<f64>, Option<f64>) {
        (self.top1, self.top5, self.squared_error)
    }
}

impl Answers {
    /// The classes, if the answers are classes.
    fn classes(&self) -> Option<&Labels> {
        if let Answers::Classes(labels) = self { Some(labels) } else { None }
    }

    /// One integer a sample is its class; several numbers, or numbers that are not integers, are targets. So is anything
    /// for a network with one output, which has no classes.
    fn read(path: &Path, selection: &Selection, outputs: usize) -> anyhow::Result<Self> {
        let array = Labels::open(path)?;
        if outputs == 1 && array.own_labels().is_none() && array.features() == 1 {
            return Self::targets(&array, selection);
        }
        let is_class =
            array.own_labels().is_some() || array.features() == 1 && Labels::from_array(&array, selection).is_ok();
        let is_float = matches!(array.element(), Element::F32 | Element::F64);
        if is_class || array.features() == 1 && !is_float {
            return Ok(Answers::Classes(Labels::from_array(&array, selection)?));
        }
        Self::targets(&array, selection)
    }

    fn targets(array: &Array, selection: &Selection) -> anyhow::Result<Self> {
        let all: Matrix<f32> = array.rows(0..array.samples())?;
        Ok(Answers::Targets(match selection.indices(array.samples())? {
            None => all,
            Some(rows) => Matrix::from_fn(rows.len(), all.cols(), |i, j| all[(rows[i], j)]),
        }))
    }

    fn score(&self, outputs: &Matrix<f32>) -> anyhow::Result<Scores> {
        Ok(match self {
            Answers::Classes(labels) => {
                labels.require(outputs.rows(), outputs.cols())?;
                let labels = labels.as_slice();
                let top5 = top_accuracy(outputs, labels, 5)?;
                Scores { top1: Some(accuracy(outputs, labels)?), top5, squared_error: None }
            }
            Answers::Targets(targets) => {
                Scores { squared_error: Some(mean_squared_error(outputs, targets)?), ..Default::default() }
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file of little-endian numbers.
    fn file(folder: &Path, name: &str, kind: &str, shape: &str, bytes: &[u8]) -> std::path::PathBuf {
        let header = format!("{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}");
        let padding = (64 - (10 + header.len() + 1) % 64) % 64;
        let mut all = b"\x93NUMPY\x01\x00".to_vec();
        all.extend(((header.len() + padding + 1) as u16).to_le_bytes());
        all.extend(header.bytes());
        all.extend(std::iter::repeat_n(b' ', padding));
        all.push(b'\n');
        all.extend(bytes);
        let path = folder.join(name);
        std::fs::write(&path, all).unwrap();
        path
    }

    #[test]
    fn classes_targets_and_several_labels_a_sample_are_told_apart() {
        let folder = tempfile::tempdir().unwrap();
        let outputs = Matrix::from_fn(2, 6, |i, j| if j == i { 1.0 } else { 0.25 * (j % 2) as f32 });
        let score = |name: &str, kind: &str, shape: &str, bytes: Vec<u8>| {
            let path = file(folder.path(), name, kind, shape, &bytes);
            Answers::read(&path, &Selection::all(), outputs.cols()).unwrap().score(&outputs).unwrap().into_parts()
        };
        let ints = |values: &[i64]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>();
        let floats = |values: &[f32]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>();
        // The second sample's class has the smallest output, and is not among the five largest.
        let (top1, top5, square) = score("classes.npy", "<i8", "(2,)", ints(&[0, 4]));
        assert_eq!((top1, top5, square), (Some(0.5), Some(0.5), None));
        let labels = [1, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 1];
        let by_hand: f64 =
            (0..12).map(|k| (f64::from(outputs.as_slice()[k]) - labels[k] as f64).powi(2)).sum::<f64>() / 12.0;
        for (name, kind, bytes) in
            [("several.npy", "<i8", ints(&labels)), ("targets.npy", "<f4", floats(&labels.map(|v| v as f32)))]
        {
            let (top1, top5, square) = score(name, kind, "(2, 6)", bytes);
            assert_eq!((top1, top5), (None, None));
            assert!((square.unwrap() - by_hand).abs() < 1e-6, "{name}: {square:?} is not {by_hand}");
        }
    }
}
