//! `simplicit attack`: accuracy of a model on inputs that were changed to fool it.

use std::path::PathBuf;

use anyhow::bail;
use clap::{Args, ValueEnum};
use simplicit::arrays::Labels;
use simplicit::attack::{AttackInput, AttackReport, AttackSettings, Classifier, Gradient, Method, attack};
use simplicit::model::ImplicitModel;
use simplicit::parallel::Cancel;
use simplicit::states::InputSource;

use crate::args::{InputArgs, JsonArgs, NameArgs, RunArgs, number};
use crate::baseline::{Baseline, Kind, require_order};
use crate::exit::Outcome;
use crate::operands::{ModelOrNetwork, load_model};
use crate::paths::Paths;
use crate::progress::Watcher;
use crate::results::{Results, Stopwatch};
use crate::robustness::{AttackCurve, NormKind, RobustnessResults, cell, epsilon_text};
use crate::table::{Table, count, percent};

const HELP: &str = "\
Every value of an input may change by at most epsilon, in raw·scale units (before mean and std), and
stays in [0, 1]; with --norm l2 the Euclidean length of the change is at most epsilon; with
--pixels 0.5 only half of the values of each input change, chosen at random. FGSM and the first
start of PGD follow the exact gradient of the cross-entropy, each further start of PGD that of one
other class's output less the right one's, largest output first; the square search follows none.
With a network beside the model,
attacks along the baseline's gradient are transferred too, and the white-box attacks try their
points as well. The last column is the worst case over all attacks, example by example; what fools
the model at some epsilon counts at every larger one. A network alone can be attacked too.

Examples:
  simplicit attack m.safetensors --inputs u.npy --labels y.npy --epsilon 1/255,2/255
  simplicit attack m.safetensors net.onnx --inputs u.npy --labels y.npy \\
    --gradient baseline --method fgsm --pixels 0.5 --json attack.json";

/// How to look for a perturbation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum MethodKind {
    /// One step along the sign of the gradient
    Fgsm,
    /// Projected steps, from FGSM's point, and from random ones towards one other class each
    Pgd,
    /// Random search, no gradient
    Square,
    /// All of them
    All,
}

/// Whose gradient.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum GradientKind {
    /// The attacked model's own, through the equilibrium; with a network the baseline's as well
    Model,
    /// The baseline's alone: transferred attacks
    Baseline,
}

/// Attack a model with FGSM, PGD and a gradient-free search
#[derive(Debug, Args)]
#[command(after_help = HELP)]
pub(crate) struct AttackArgs {
    #[command(flatten)]
    files: ModelOrNetwork,
    /// Labels, in the formats of the inputs; a CIFAR file is its own, and so is a folder with a folder of pictures for every class
    #[arg(long, value_name = "FILE")]
    labels: PathBuf,
    #[command(flatten)]
    data: InputArgs,
    /// Largest changes, in raw·scale units
    #[arg(long, value_name = "E[,E…]", value_delimiter = ',', value_parser = number, default_value = "1/255,2/255", help_heading = "The attack")]
    epsilon: Vec<f64>,
    /// How to look for a perturbation
    #[arg(long, value_name = "M", default_value = "all", help_heading = "The attack")]
    method: MethodKind,
    /// Whose gradient to follow
    #[arg(long, value_name = "WHOSE", default_value = "model", help_heading = "The attack")]
    gradient: GradientKind,
    /// Share of the values of an input that may change, chosen at random for each
    #[arg(long, value_name = "P", value_parser = number, default_value = "1", help_heading = "The attack")]
    pixels: f64,
    /// Steps of PGD per start
    #[arg(long, value_name = "N", default_value_t = 10, help_heading = "The attack")]
    iterations: usize,
    /// Starts of PGD: FGSM's point, then random ones, each towards one other class
    #[arg(long, value_name = "N", default_value_t = 5, help_heading = "The attack")]
    restarts: usize,
    /// Size of PGD's first step, in raw·scale units; the steps after it shrink to nothing [default: epsilon]
    #[arg(long, value_name = "S", value_parser = number, help_heading = "The attack")]
    step: Option<f64>,
    /// Outputs that the square search may ask for at each epsilon
    #[arg(long, value_name = "N", default_value_t = 300, help_heading = "The attack")]
    queries: usize,
    /// How a change is measured: its largest value, or its Euclidean length
    #[arg(long, value_name = "NORM", default_value = "linf", help_heading = "The attack")]
    norm: NormKind,
    #[command(flatten)]
    names: NameArgs,
    #[command(flatten)]
    run: RunArgs,
    #[command(flatten)]
    json: JsonArgs,
}

pub(crate) fn run(args: &AttackArgs, cancel: &Cancel) -> anyhow::Result<Outcome> {
    let mut stopwatch = Stopwatch::start();
    let [model, network] = args.files.named();
    Paths::default()
        .reads(model.0, model.1)
        .reads(network.0, network.1)
        .reads("--inputs", Some(&args.data.inputs))
        .reads("--labels", Some(&args.labels))
        .writes("--json", args.json.file())
        .check()?;
    let watcher = Watcher::new(args.run.progress);
    let threads = args.run.threads();
    let (model, network) = args.files.paths()?;
    let model = model.map(load_model).transpose()?;
    let baseline = network.map(|n| Baseline::open_beside(n, &args.names, model.as_ref())).transpose()?;
    if args.gradient == GradientKind::Baseline && (model.is_none() || baseline.is_none()) {
        bail!(
            "--gradient baseline: expected a model to attack and a network to take the gradient from, got one of them"
        );
    }
    let own = model.as_ref().map(ImplicitModel::preprocessing);
    let own = own.or(baseline.as_ref().and_then(Baseline::preprocessing));
    let inputs = args.data.open(own)?;
    require_order(&inputs, model.as_ref(), baseline.as_ref())?;
    let labels = Labels::read(&args.labels, &args.data.selection.selection())?;
    stopwatch.lap("load");
    let of_model = model.as_ref().map(Classifier::new).transpose()?;
    let of_baseline = baseline.as_ref().map(classifier).transpose()?;
    let (target, source) = match (&of_model, &of_baseline) {
        (Some(model), baseline) => (model, baseline.as_ref()),
        (None, Some(baseline)) => (baseline, None),
        (None, None) => bail!("expected a model or a network, got neither"),
    };
    labels.require(inputs.samples(), target.classes())?;
    let settings = AttackSettings {
        epsilon: args.epsilon.clone(),
        methods: match args.method {
            MethodKind::Fgsm => vec![Method::Fgsm],
            MethodKind::Pgd => vec![Method::Pgd],
            MethodKind::Square => vec![Method::Square],
            MethodKind::All => vec![Method::Fgsm, Method::Pgd, Method::Square],
        },
        gradients: match args.gradient {
            GradientKind::Baseline => vec![Gradient::Baseline],
            GradientKind::Model if source.is_some() => vec![Gradient::Baseline, Gradient::Model],
            GradientKind::Model => vec![Gradient::Model],
        },
        pixels: args.pixels,
        step: args.step,
        iterations: args.iterations,
        restarts: args.restarts,
        queries: args.queries,
        seed: args.data.selection.seed,
        norm: args.norm.norm(),
    };
    let input = AttackInput {
        target,
        baseline: source,
        inputs: &inputs,
        labels: labels.as_slice(),
        per_feature: inputs.per_feature(),
        sample_shape: inputs.sample_shape(),
    };
    watcher.phase("attacking");
    let samples = inputs.samples();
    let report = attack(&input, &settings, threads, cancel, |done| watcher.samples(done, samples))?;
    stopwatch.lap("attack");
    watcher.finish();
    let mut results = model.as_ref().map_or_else(Results::new, Results::of_model);
    results.accuracy = Some(report.clean_accuracy);
    results.seed = Some(args.data.selection.seed);
    results.threads = Some(threads.get());
    results.samples = Some(samples);
    results.seconds = stopwatch.seconds();
    let table = table(&report, results.seconds.get("total").copied().unwrap_or(0.0));
    let results = RobustnessResults {
        results,
        epsilon: report.epsilon,
        clean_accuracy: report.clean_accuracy,
        attacked_accuracy: Some(report.attacked_accuracy),
        certified_accuracy: None,
        attacks: report
            .attacks
            .into_iter()
            .map(|a| AttackCurve {
                method: a.method.to_string(),
                gradient: a.gradient.map(|g| g.to_string()),
                accuracy: a.accuracy,
            })
            .collect(),
        bounds: Vec::new(),
        pixels: Some(args.pixels),
        norm: args.norm.norm().to_string(),
        arithmetic: None,
        given_up: None,
    };
    results.deliver(&args.json, &table)?;
    Ok(Outcome::Done)
}

fn classifier(baseline: &Baseline) -> simplicit::Result<Classifier> {
    match &baseline.kind {
        Kind::Network(network) => Classifier::of_network(network),
        Kind::Model(model, _) => Classifier::new(model),
    }
}

fn table(report: &AttackReport, seconds: f64) -> String {
    let names: Vec<String> = report
        .attacks
        .iter()
        .map(|a| match a.gradient {
            Some(Gradient::Baseline) => format!("{}, transferred", a.method),
            _ => a.method.to_string(),
        })
        .collect();
    let mut head = vec!["epsilon"];
    head.extend(names.iter().map(String::as_str));
    head.push("worst case");
    let mut table = Table::with_head(&head);
    for (k, epsilon) in report.epsilon.iter().enumerate() {
        let mut cells = vec![epsilon_text(*epsilon)];
        cells.extend(report.attacks.iter().map(|a| cell(&a.accuracy, k)));
        cells.push(cell(&report.attacked_accuracy, k));
        table.row(&cells.iter().map(String::as_str).collect::<Vec<_>>());
    }
    format!(
        "clean accuracy  {} of {} samples\n{}time            {seconds:.1} s\n",
        percent(report.clean_accuracy),
        count(report.samples as u64),
        table.show()
    )
}
