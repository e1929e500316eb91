//! `simplicit quickstart`: the whole walk on embedded data.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use crate::report;
use anyhow::Context;
use clap::Args;
use simplicit::evaluate::{accuracy, class_changes, equilibrium_error, layer_errors};
use simplicit::parallel::Cancel;
use simplicit::train::Forget;

use crate::args::{JsonArgs, RunArgs, Switch};
use crate::baseline::{Baseline, Kind};
use crate::embedded;
use crate::exit::Outcome;
use crate::interrupt::set_how_to_go_on;
use crate::measure::{Runner, agreement};
use crate::paths::Paths;
use crate::progress::Watcher;
use crate::results::{Results, Staged, Stopwatch};
use crate::settings::{ConnectivityKind, Effective, MatchingKind, PenaltyKind};
use crate::summary::summary;
use crate::training::{Job, Samples};

/// The model keeps an accuracy of 87.82 % of the network's 87.98 % with these 2,000 images (`simplicit quickstart`),
/// well within one point.
const TARGET: f64 = 0.75;

const HELP: &str = "\
Everything is part of the program: a trained 784-64-32-16-10 network for FashionMNIST (52,896
parameters), 2,000 training images, and the 10,000 test images with labels. Takes seconds and
writes model.safetensors, report.html and run.json.

Then try:
  simplicit inspect simplicit-quickstart/model.safetensors
  simplicit export simplicit-quickstart/model.safetensors --out sparse.onnx";

/// See it work: train and measure a sparse model on embedded data
#[derive(Debug, Args)]
#[command(after_help = HELP)]
pub(crate) struct QuickstartArgs {
    /// Directory for the model, the report and the results
    #[arg(long, value_name = "DIR", default_value = "simplicit-quickstart")]
    out: PathBuf,
    #[command(flatten)]
    json: JsonArgs,
    #[command(flatten)]
    run: RunArgs,
}

pub(crate) fn run(args: &QuickstartArgs, cancel: &Cancel) -> anyhow::Result<Outcome> {
    let mut stopwatch = Stopwatch::start();
    std::fs::create_dir_all(&args.out).with_context(|| args.out.display().to_string())?;
    let [model_path, report_path, run_path] =
        ["model.safetensors", "report.html", "run.json"].map(|name| args.out.join(name));
    Paths::default()
        .writes("the model", Some(&model_path))
        .writes("the report", Some(&report_path))
        .writes("the results", Some(&run_path))
        .writes("--json", args.json.file())
        .check()?;
    set_how_to_go_on("it takes seconds; run it again".into());
    let watcher = Watcher::new(args.run.progress);
    let threads = args.run.threads();
    watcher.phase("reading");
    let baseline =
        Baseline { kind: Kind::Network(Arc::new(embedded::network()?)), bytes: Some(embedded::NETWORK.len() as u64) };
    let (images, test, labels) = (embedded::train_images()?, embedded::test_images()?, embedded::test_labels()?);
    stopwatch.lap("load");
    let effective = settings();
    let provenance = BTreeMap::from([
        ("settings".to_string(), serde_json::to_string(&effective)?),
        ("seed".to_string(), effective.seed.to_string()),
        ("inputs".to_string(), "quickstart".to_string()),
        ("version".to_string(), env!("CARGO_PKG_VERSION").to_string()),
    ]);
    let job = Job {
        effective: &effective,
        mask: None,
        preprocessing: images.preprocessing().clone(),
        provenance,
        keep: &Forget,
        threads,
        cancel,
        watcher: &watcher,
    };
    let trained = job.run(&Samples::Inputs(&baseline, &images), &mut stopwatch)?;
    let model = &trained.model;
    let mut results = Results::of_model(model);
    results.add_training(&trained.report);
    results.seed = Some(effective.seed);
    results.threads = Some(threads.get());

    watcher.phase("test images");
    let (of_model, of_baseline) = (Runner::of_model(model, threads)?, Runner::of_baseline(&baseline, threads)?);
    let ours = of_model.run(&test, cancel, &watcher)?;
    let theirs = of_baseline.run(&test, cancel, &watcher)?;
    results.samples = Some(ours.outputs.rows());
    results.accuracy = Some(accuracy(&ours.outputs, labels.as_slice())?);
    results.baseline_accuracy = Some(accuracy(&theirs.outputs, labels.as_slice())?);
    results.agreement = agreement(&ours.outputs, &theirs.outputs)?;
    results.equilibrium_error = Some(equilibrium_error(&ours.outputs, &theirs.outputs)?);
    results.not_converged = Some(ours.not_converged());
    results.milliseconds = Some(of_model.milliseconds(&test, cancel)?);
    results.baseline_milliseconds = Some(of_baseline.milliseconds(&test, cancel)?);
    let implicit = baseline.implicit()?;
    let layers = layer_errors(model, &implicit, &test, threads, cancel)?;
    stopwatch.lap("test");

    watcher.phase("writing");
    results.seconds = stopwatch.seconds();
    let classes = class_changes(&ours.outputs, &theirs.outputs, labels.as_slice())?;
    let phases: Vec<(String, f64)> =
        results.seconds.iter().filter(|(name, _)| *name != "total").map(|(n, s)| (n.clone(), *s)).collect();
    let names = embedded::CLASSES.map(String::from);
    let page = report::render(&report::Input {
        baseline: Some(&implicit),
        baseline_bytes: baseline.bytes,
        test_samples: results.samples,
        accuracy: results.accuracy,
        baseline_accuracy: results.baseline_accuracy,
        agreement: results.agreement,
        equilibrium_error: results.equilibrium_error,
        milliseconds: results.milliseconds,
        baseline_milliseconds: results.baseline_milliseconds,
        threads: results.threads,
        rows: &trained.report.rows,
        tried: &trained.report.path,
        classes: &classes,
        class_names: &names,
        layer_errors: &layers,
        diagnostics: &ours.diagnostics,
        seconds: results.seconds.get("total").copied(),
        phases: &phases,
        ..report::Input::new("quick start", model)
    });
    let text = results.text()?;
    let mut files = Staged::default();
    files.stage(&report_path, page.as_bytes())?.stage(&run_path, text.as_bytes())?;
    files.stage_optional(args.json.file(), text.as_bytes())?.stage(&model_path, &model.to_bytes())?.finish()?;
    watcher.finish();
    let mut table = summary(&results, baseline.bytes);
    table.push_str(&format!(
        "\nmodel   {}\nreport  {}\nresults {}\n",
        model_path.display(),
        report_path.display(),
        run_path.display()
    ));
    results.print(&args.json, &table)?;
    Ok(Outcome::with_notices(&results.notices()))
}

/// The defaults of `train` for a network, with a target.
fn settings() -> Effective {
    Effective {
        samples: None,
        seed: 0,
        penalty: PenaltyKind::Cardinality,
        beta: None,
        alpha: None,
        mu: Some(2e-6),
        augment: None,
        target_sparsity: Some(TARGET),
        max_drop: None,
        connectivity: ConnectivityKind::Baseline,
        include: Vec::new(),
        exclude: Vec::new(),
        reach: None,
        positions: None,
        bounds: None,
        kappa: None,
        rescale: false,
        gamma: None,
        matching: MatchingKind::Relaxed,
        lambda1: Some(1.0),
        lambda2: Some(1.0),
        normalize: Switch::On,
        rounds: None,
        refit: None,
        reconstruct: None,
        output_refit: crate::settings::OUTPUT_REFIT,
        stages: None,
        allocate: None,
        cascade: Switch::On,
        robust: None,
        robust_refit: None,
        prove: None,
        output_aware: Switch::On,
        bias: Switch::Off,
        activation: None,
        // The processor, so that the figures are the same on every machine.
        device: "cpu".to_string(),
        memory: None,
    }
}
