//! `simplicit certify`: how many inputs no perturbation can change the class of.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use simplicit::arrays::Labels;
use simplicit::certify::{Arithmetic, Bound, CertifyReport, CertifySettings, certify};
use simplicit::parallel::Cancel;
use simplicit::states::InputSource;

use crate::args::{InputArgs, JsonArgs, RunArgs, number};
use crate::exit::Outcome;
use crate::measure::Runner;
use crate::operands::{ModelOperand, load_model};
use crate::paths::Paths;
use crate::progress::Watcher;
use crate::results::{Results, Stopwatch};
use crate::robustness::{BoundCurve, NormKind, RobustnessResults, cell, epsilon_text};
use crate::table::{Table, count, percent};

const HELP: &str = "\
Every value of an input may change by at most epsilon, in raw·scale units (before mean and std), and
stays in [0, 1]; with --norm l2 the Euclidean length of the change is at most epsilon. Certified
means proved: no such change makes another class the largest output, neither in exact arithmetic nor
in this program's run on a processor. A GPU and other programs add in another order: --arithmetic
any-order proves it for these too. --arithmetic exact proves it for exact arithmetic alone, which is
what other tools claim at most. Bounds from cheap to tight, each tried where the one before does
not suffice: global, |C|(I-|A|)^-1|B| + |D| on differences of classes; interval, the box of every
value; linear, every activation between two lines, substituted back to the inputs; with --slopes N,
the slopes of these lines improved by N gradient steps. A sample that is not certified at some
epsilon is not tried at larger ones. A baseline is certified after simplicit convert.

Examples:
  simplicit certify m.safetensors --inputs u.npy --labels y.npy --epsilon 1/255,2/255
  simplicit certify m.safetensors --inputs u.npy --labels y.npy --slopes 20
  simplicit certify m.safetensors --inputs u.npy --labels y.npy --bound global --json c.json";

/// The tightest bound to try.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum BoundKind {
    /// One number per pair of classes
    Global,
    /// And the box of states of each input
    Interval,
    /// And lines in place of activations
    Linear,
}

/// Whose outputs keep their class.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ArithmeticKind {
    /// Exact ones and those of this program's run on a processor, in single precision
    Single,
    /// In addition those of any other run in single precision, on a GPU or by another program
    AnyOrder,
    /// Exact ones alone
    Exact,
}

/// Prove which inputs keep their class under any small change
#[derive(Debug, Args)]
#[command(after_help = HELP)]
pub(crate) struct CertifyArgs {
    #[command(flatten)]
    model: ModelOperand,
    /// Labels, in the formats of the inputs; a CIFAR file is its own, and so is a folder with a folder of pictures for every class
    #[arg(long, value_name = "FILE")]
    labels: PathBuf,
    #[command(flatten)]
    data: InputArgs,
    /// Largest changes, in raw·scale units
    #[arg(long, value_name = "E[,E…]", value_delimiter = ',', value_parser = number, default_value = "1/255,2/255", help_heading = "The certificate")]
    epsilon: Vec<f64>,
    /// The tightest bound to try
    #[arg(long, value_name = "B", default_value = "linear", help_heading = "The certificate")]
    bound: BoundKind,
    /// Gradient steps on the slopes of the lines, for samples that the linear bound leaves open
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = "The certificate")]
    slopes: usize,
    /// How a change is measured: its largest value, or its Euclidean length
    #[arg(long, value_name = "NORM", default_value = "linf", help_heading = "The certificate")]
    norm: NormKind,
    /// Whose outputs keep their class
    #[arg(long, value_name = "A", default_value = "single", help_heading = "The certificate")]
    arithmetic: ArithmeticKind,
    /// Multiply-adds that the intervals of one sample at one epsilon may cost; a sample that needs more is given up
    #[arg(long, value_name = "N", value_parser = number, default_value = "2.2e12", help_heading = "The certificate")]
    work: f64,
    #[command(flatten)]
    run: RunArgs,
    #[command(flatten)]
    json: JsonArgs,
}

pub(crate) fn run(args: &CertifyArgs, cancel: &Cancel) -> anyhow::Result<Outcome> {
    let mut stopwatch = Stopwatch::start();
    Paths::default()
        .reads("MODEL", Some(args.model.path()))
        .reads("--inputs", Some(&args.data.inputs))
        .reads("--labels", Some(&args.labels))
        .writes("--json", args.json.file())
        .check()?;
    let watcher = Watcher::new(args.run.progress);
    let threads = args.run.threads();
    let model = load_model(args.model.path())?;
    let inputs = args.data.open(Some(model.preprocessing()))?;
    if let Some(axes) = model.input_axes() {
        inputs.require_order(&axes)?;
    }
    let labels = Labels::read(&args.labels, &args.data.selection.selection())?;
    let samples = inputs.samples();
    labels.require(samples, model.shape().outputs)?;
    stopwatch.lap("load");
    let settings = CertifySettings {
        epsilon: args.epsilon.clone(),
        bound: match args.bound {
            BoundKind::Global => Bound::Global,
            BoundKind::Interval => Bound::Interval,
            BoundKind::Linear if args.slopes > 0 => Bound::Slopes,
            BoundKind::Linear => Bound::Linear,
        },
        slopes: args.slopes,
        norm: args.norm.norm(),
        arithmetic: match args.arithmetic {
            ArithmeticKind::Single => Arithmetic::Single,
            ArithmeticKind::AnyOrder => Arithmetic::AnyOrder,
            ArithmeticKind::Exact => Arithmetic::Exact,
        },
        work: args.work as u64,
    };
    watcher.phase("certifying");
    let (labels, features) = (labels.as_slice(), inputs.per_feature());
    let report =
        certify(&model, &inputs, labels, features, &settings, threads, cancel, |done| watcher.samples(done, samples))?;
    stopwatch.lap("certify");
    let milliseconds = Runner::of_model(&model, threads)?.milliseconds(&inputs, cancel)?;
    stopwatch.lap("forward");
    watcher.finish();
    let mut results = Results::of_model(&model);
    results.accuracy = Some(report.clean_accuracy);
    results.not_converged = Some(report.not_converged as u64);
    results.milliseconds = Some(milliseconds);
    results.seed = Some(args.data.selection.seed);
    results.threads = Some(threads.get());
    results.samples = Some(samples);
    results.seconds = stopwatch.seconds();
    let seconds = results.seconds.get("certify").copied().unwrap_or(0.0);
    let table = table(&report, seconds, seconds / (1e-6 * milliseconds * samples as f64));
    let mut notices = results.notices();
    if report.given_up > 0 {
        let (count, work) = (report.given_up, args.work);
        notices.push(format!(
            "{count} sample(s) given up: their intervals cost more than {work:.1e} multiply-adds; --work allows more"
        ));
    }
    let results = RobustnessResults {
        results,
        epsilon: report.epsilon,
        clean_accuracy: report.clean_accuracy,
        attacked_accuracy: None,
        certified_accuracy: Some(report.certified_accuracy),
        attacks: Vec::new(),
        bounds: report
            .by_bound
            .into_iter()
            .map(|(bound, accuracy)| BoundCurve { bound: bound.to_string(), accuracy })
            .collect(),
        pixels: None,
        norm: args.norm.norm().to_string(),
        arithmetic: Some(settings.arithmetic.to_string()),
        given_up: Some(report.given_up),
    };
    results.deliver(&args.json, &table)?;
    Ok(Outcome::with_notices(&notices))
}

fn table(report: &CertifyReport, seconds: f64, passes: f64) -> String {
    let names: Vec<String> = report.by_bound.iter().map(|(bound, _)| bound.to_string()).collect();
    let mut head = vec!["epsilon"];
    head.extend(names.iter().map(String::as_str));
    let mut table = Table::with_head(&head);
    // A row of two cells would be shown as a remark.
    if head.len() == 2 {
        table = Table::new();
    }
    for (k, epsilon) in report.epsilon.iter().enumerate() {
        let mut cells = vec![epsilon_text(*epsilon)];
        cells.extend(report.by_bound.iter().map(|(_, accuracy)| cell(accuracy, k)));
        table.row(&cells.iter().map(String::as_str).collect::<Vec<_>>());
    }
    format!(
        "clean accuracy  {} of {} samples\n{}time            {seconds:.2} s, as {passes:.0} forward passes\n",
        percent(report.clean_accuracy),
        count(report.samples as u64),
        table.show()
    )
}
