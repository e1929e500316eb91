//! `simplicit report`: the HTML page about a model.

use std::path::{Path, PathBuf};

use crate::report::{self, Robustness, RobustnessCurve, RobustnessKind};
use anyhow::Context;
use clap::Args;
use serde::Deserialize;
use simplicit::arrays::{Inputs, Labels};
use simplicit::attack::Norm;
use simplicit::evaluate::{accuracy, class_changes, equilibrium_error, layer_errors};
use simplicit::files::{read_capped, write_bytes_atomically};
use simplicit::model::ImplicitModel;
use simplicit::parallel::{Cancel, Threads};
use simplicit::states::InputSource;
use simplicit::train::{RowReport, TriedModel};

use crate::args::{JsonArgs, NameArgs, PreprocessingArgs, RunArgs, SelectionArgs, open_inputs};
use crate::baseline::{Baseline, require_order};
use crate::exit::Outcome;
use crate::measure::{Runner, agreement};
use crate::operands::{ModelAndBaseline, load_model};
use crate::paths::Paths;
use crate::progress::Watcher;
use crate::results::{ModelDetails, Results, RowDetails, Stopwatch};
use crate::robustness::AttackCurve;

const MAX_RUN: u64 = 256 << 20;

const HELP: &str = "\
One self-contained HTML file: sizes, the pattern of (A B; C D), non-zeros per layer and input,
singular values of A. What it cannot know from the model alone comes from --run (what train --json
wrote: rows, gaps, accuracies, times), the network (the pattern before) and, with --inputs and
--labels, from measuring again (classes, layers, iterations). Accuracy against the size of a
perturbation comes from --attack and --certify, the JSON that these commands wrote; both may be
given once for each norm.

train and evaluate write the page themselves with --report FILE.

Example:
  simplicit train net.onnx --inputs u.npy --json run.json --out m.safetensors
  simplicit report m.safetensors net.onnx --run run.json --out r.html";

/// Write the HTML report about a model
#[derive(Debug, Args)]
#[command(after_help = HELP)]
pub(crate) struct ReportArgs {
    #[command(flatten)]
    files: ModelAndBaseline,
    /// What train --json wrote
    #[arg(long, value_name = "FILE")]
    run: Option<PathBuf>,
    /// What attack --json wrote; once for each norm
    #[arg(long, value_name = "FILE")]
    attack: Vec<PathBuf>,
    /// What certify --json wrote; once for each norm
    #[arg(long, value_name = "FILE")]
    certify: Vec<PathBuf>,
    /// The page to write
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// Inputs to measure on
    #[arg(long, value_name = "FILE")]
    inputs: Option<PathBuf>,
    /// Their labels
    #[arg(long, value_name = "FILE", requires = "inputs")]
    labels: Option<PathBuf>,
    #[command(flatten)]
    selection: SelectionArgs,
    #[command(flatten)]
    preprocessing: PreprocessingArgs,
    #[command(flatten)]
    running: RunArgs,
    #[command(flatten)]
    json: JsonArgs,
}

/// The keys of a training's JSON that the page shows.
#[derive(Default, Deserialize)]
pub(crate) struct Run {
    accuracy: Option<f64>,
    baseline_accuracy: Option<f64>,
    agreement: Option<f64>,
    equilibrium_error: Option<f64>,
    milliseconds: Option<f64>,
    baseline_milliseconds: Option<f64>,
    threads: Option<usize>,
    samples: Option<usize>,
    nonzeros: Option<u64>,
    #[serde(default)]
    seconds: std::collections::BTreeMap<String, f64>,
    #[serde(default)]
    row_details: Vec<RowDetails>,
    /// Absent in files of earlier versions.
    #[serde(default)]
    models_tried: Vec<ModelDetails>,
}

/// The name of a JSON file, for messages, and its content.
pub(crate) type Json<'a> = (&'a str, &'a [u8]);

impl Run {
    /// What training reported about this model.
    pub(crate) fn of(given: Option<Json<'_>>, model: &ImplicitModel) -> anyhow::Result<Self> {
        let Some((name, json)) = given else { return Ok(Self::default()) };
        let run: Self =
            serde_json::from_slice(json).with_context(|| format!("{name}: expected what train --json writes"))?;
        let counted = model.sparsity().nonzeros;
        match run.nonzeros {
            Some(nonzeros) if nonzeros != counted => anyhow::bail!(
                "{name}: expected the run of this model with {counted} non-zeros, got one of {nonzeros}; give the JSON of its \
                 own training"
            ),
            _ => Ok(run),
        }
    }
}

pub(crate) fn run(args: &ReportArgs, cancel: &Cancel) -> anyhow::Result<Outcome> {
    let stopwatch = Stopwatch::start();
    let found = args.attack.iter().map(|path| ("--attack", path));
    let found = found.chain(args.certify.iter().map(|path| ("--certify", path)));
    let paths = found.fold(Paths::default(), |paths, (name, path)| paths.reads(name, Some(path)));
    paths
        .reads("MODEL", Some(args.files.model()))
        .reads("NETWORK", args.files.network())
        .reads("--run", args.run.as_deref())
        .reads("--inputs", args.inputs.as_deref())
        .reads("--labels", args.labels.as_deref())
        .writes("--out", Some(&args.out))
        .writes("--json", args.json.file())
        .check()?;
    let watcher = Watcher::new(args.running.progress);
    let threads = args.running.threads();
    let model = load_model(args.files.model())?;
    let baseline = args.files.network();
    let baseline = baseline.map(|path| Baseline::open_beside(path, &NameArgs::default(), Some(&model))).transpose()?;
    let read = |paths: &[PathBuf]| {
        let files = paths.iter().map(|path| Ok((path.display().to_string(), read_capped(path, MAX_RUN)?)));
        files.collect::<anyhow::Result<Vec<_>>>()
    };
    let (run, attack, certify) = (read(args.run.as_slice())?, read(&args.attack)?, read(&args.certify)?);
    fn lent(files: &[(String, Vec<u8>)]) -> Vec<Json<'_>> {
        files.iter().map(|(name, bytes)| (name.as_str(), bytes.as_slice())).collect()
    }
    let run = Run::of(lent(&run).first().copied(), &model)?;
    let robustness = robustness(&lent(&attack), &lent(&certify), &model)?;
    let selection = args.selection.selection();
    let inputs = match &args.inputs {
        Some(path) => Some(open_inputs(path, &args.preprocessing, Some(model.preprocessing()), &selection)?),
        None => None,
    };
    if let Some(inputs) = &inputs {
        require_order(inputs, Some(&model), baseline.as_ref())?;
    }
    let labels = args.labels.as_ref().map(|path| Labels::read(path, &selection)).transpose()?;
    if let (Some(inputs), Some(labels)) = (&inputs, &labels) {
        labels.require(inputs.samples(), model.shape().outputs)?;
    }
    let title = args.files.model().file_name().unwrap_or_default().to_string_lossy().into_owned();
    let page = page(Page {
        title: &title,
        model: &model,
        baseline: baseline.as_ref(),
        inputs: inputs.as_ref().map(|inputs| inputs as &dyn InputSource),
        labels: labels.as_ref(),
        robustness,
        run,
        threads,
        cancel,
        watcher: &watcher,
    })?;
    watcher.finish();
    write_bytes_atomically(&args.out, page.as_bytes())?;
    let results = Results { seconds: stopwatch.seconds(), ..Results::of_model(&model) };
    results.deliver(&args.json, &format!("wrote {}\n", args.out.display()))?;
    Ok(Outcome::Done)
}

/// What another command knows when it writes a page for `--report`.
pub(crate) struct About<'a> {
    /// The model's file, which names the page.
    pub(crate) title: &'a Path,
    pub(crate) model: &'a ImplicitModel,
    pub(crate) baseline: Option<&'a Baseline>,
    pub(crate) results: &'a Results,
}

/// The page of `--report`: the command's own results, and measurements on inputs (and labels).
pub(crate) fn page_about(
    about: &About,
    measured: Option<(&Inputs, Option<&Labels>)>,
    threads: Threads,
    cancel: &Cancel,
    watcher: &Watcher,
) -> anyhow::Result<String> {
    watcher.phase("report");
    let text = about.results.text()?;
    page(Page {
        title: &about.title.file_name().unwrap_or_default().to_string_lossy(),
        model: about.model,
        baseline: about.baseline,
        inputs: measured.map(|(inputs, _)| inputs as &dyn InputSource),
        labels: measured.and_then(|(_, labels)| labels),
        robustness: Vec::new(),
        run: Run::of(Some(("results", text.as_bytes())), about.model)?,
        threads,
        cancel,
        watcher,
    })
}

/// Everything that a page is made from.
pub(crate) struct Page<'a> {
    pub(crate) title: &'a str,
    pub(crate) model: &'a ImplicitModel,
    pub(crate) baseline: Option<&'a Baseline>,
    pub(crate) inputs: Option<&'a dyn InputSource>,
    pub(crate) labels: Option<&'a Labels>,
    pub(crate) robustness: Vec<Robustness>,
    pub(crate) run: Run,
    pub(crate) threads: Threads,
    pub(crate) cancel: &'a Cancel,
    pub(crate) watcher: &'a Watcher<'a>,
}

/// Measures everything that the given inputs and labels allow, and renders the page.
pub(crate) fn page(of: Page) -> anyhow::Result<String> {
    let Page { title, model, baseline, inputs, labels, robustness, mut run, threads, cancel, watcher } = of;
    let implicit = baseline.map(Baseline::implicit).transpose()?;
    let (mut classes, mut layers, mut diagnostics) = (Vec::new(), Vec::new(), Vec::new());
    if let Some(inputs) = inputs {
        watcher.phase("measuring");
        let runner = Runner::of_model(model, threads)?;
        let ours = runner.run(inputs, cancel, watcher)?;
        run.samples = Some(ours.outputs.rows());
        run.threads = Some(threads.get());
        run.milliseconds = Some(runner.milliseconds(inputs, cancel)?);
        if let Some(labels) = labels {
            labels.require(ours.outputs.rows(), ours.outputs.cols())?;
            run.accuracy = Some(accuracy(&ours.outputs, labels.as_slice())?);
        }
        if let (Some(baseline), Some(implicit)) = (baseline, &implicit) {
            let runner = Runner::of_baseline(baseline, threads)?;
            let theirs = runner.run(inputs, cancel, watcher)?;
            run.baseline_milliseconds = Some(runner.milliseconds(inputs, cancel)?);
            run.agreement = agreement(&ours.outputs, &theirs.outputs)?;
            run.equilibrium_error = Some(equilibrium_error(&ours.outputs, &theirs.outputs)?);
            if let Some(labels) = labels {
                run.baseline_accuracy = Some(accuracy(&theirs.outputs, labels.as_slice())?);
                classes = class_changes(&ours.outputs, &theirs.outputs, labels.as_slice())?;
            }
            layers = layer_errors(model, implicit, inputs, threads, cancel)?;
        }
        diagnostics = ours.diagnostics;
    }
    let rows: Vec<RowReport> = run.row_details.into_iter().map(RowReport::from).collect();
    let tried: Vec<TriedModel> = run.models_tried.into_iter().map(TriedModel::from).collect();
    let total = run.seconds.remove("total");
    let phases: Vec<(String, f64)> = run.seconds.into_iter().collect();
    Ok(report::render(&report::Input {
        baseline: implicit.as_ref(),
        baseline_bytes: baseline.and_then(|b| b.bytes),
        test_samples: run.samples,
        accuracy: run.accuracy,
        baseline_accuracy: run.baseline_accuracy,
        agreement: run.agreement,
        equilibrium_error: run.equilibrium_error,
        milliseconds: run.milliseconds,
        baseline_milliseconds: run.baseline_milliseconds,
        threads: run.threads,
        rows: &rows,
        tried: &tried,
        classes: &classes,
        layer_errors: &layers,
        diagnostics: &diagnostics,
        robustness: &robustness,
        seconds: total,
        phases: &phases,
        ..report::Input::new(title, model)
    }))
}

/// The keys of an attack's or a certificate's results that the page shows.
#[derive(Clone, Deserialize)]
struct OverEpsilon {
    nonzeros: Option<u64>,
    epsilon: Vec<f64>,
    clean_accuracy: f64,
    attacked_accuracy: Option<Vec<f64>>,
    certified_accuracy: Option<Vec<f64>>,
    attacks: Vec<AttackCurve>,
    /// Results of version 0.1 have no norm; they are linf.
    #[serde(default)]
    norm: Option<String>,
}

impl OverEpsilon {
    fn norm(&self) -> Norm {
        if self.norm.as_deref() == Some("l2") { Norm::L2 } else { Norm::Linf }
    }

    fn of((name, json): Json<'_>, command: &str, model: &ImplicitModel) -> anyhow::Result<Self> {
        let read: Self =
            serde_json::from_slice(json).with_context(|| format!("{name}: expected what {command} --json writes"))?;
        let counted = model.sparsity().nonzeros;
        match read.nonzeros {
            Some(nonzeros) if nonzeros != counted => anyhow::bail!(
                "{name}: expected results of this model with {counted} non-zeros, got one of {nonzeros}; run {command} on it"
            ),
            _ => Ok(read),
        }
    }

    fn curve(&self, kind: RobustnessKind, accuracy: &[f64]) -> RobustnessCurve {
        RobustnessCurve { kind, points: self.epsilon.iter().copied().zip(accuracy.iter().copied()).collect() }
    }
}

/// For each norm with results: curves of transferred attacks, of white-box attacks and of the certificate.
pub(crate) fn robustness(
    attack: &[Json<'_>],
    certify: &[Json<'_>],
    model: &ImplicitModel,
) -> anyhow::Result<Vec<Robustness>> {
    let read = |files: &[Json<'_>], command: &str| {
        files.iter().map(|json| OverEpsilon::of(*json, command, model)).collect::<anyhow::Result<Vec<_>>>()
    };
    let (attacked, certified) = (read(attack, "attack")?, read(certify, "certify")?);
    let mut found = Vec::new();
    for norm in [Norm::Linf, Norm::L2] {
        let of = |all: &[OverEpsilon], command: &str| {
            let mut own = all.iter().filter(|results| results.norm() == norm).cloned();
            match (own.next(), own.next()) {
                (_, Some(_)) => anyhow::bail!("--{command}: expected one file for each norm, got two with {norm}"),
                (first, None) => Ok(first),
            }
        };
        found.extend(curves(of(&attacked, "attack")?, of(&certified, "certify")?, norm));
    }
    Ok(found)
}

fn curves(attacked: Option<OverEpsilon>, certified: Option<OverEpsilon>, norm: Norm) -> Option<Robustness> {
    let clean = attacked.as_ref().or(certified.as_ref())?.clean_accuracy;
    let mut curves = Vec::new();
    if let Some(results) = &attacked {
        let of = |whose: &str| -> Option<Vec<f64>> {
            let curves = results.attacks.iter().filter(|a| a.gradient.as_deref() == Some(whose));
            // The strongest attack includes the points of the others.
            curves.map(|a| a.accuracy.clone()).min_by(|a, b| a.iter().sum::<f64>().total_cmp(&b.iter().sum()))
        };
        curves.extend(of("baseline").map(|a| results.curve(RobustnessKind::Transfer, &a)));
        if of("model").is_some() || of("baseline").is_none() {
            curves.extend(results.attacked_accuracy.as_ref().map(|a| results.curve(RobustnessKind::WhiteBox, a)));
        }
    }
    if let Some(results) = &certified {
        curves.extend(results.certified_accuracy.as_ref().map(|a| results.curve(RobustnessKind::Certified, a)));
    }
    Some(Robustness { clean, curves, norm })
}
