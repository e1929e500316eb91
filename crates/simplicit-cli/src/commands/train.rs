//! `simplicit train`: a sparse implicit model from a network, a model or plain states.

mod origin;

use std::collections::BTreeMap;
use std::io::{BufRead, Read};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::Args;
use simplicit::arrays::{Array, Augment, InputSource, Inputs, Labels, Preprocessing, Selection, content_hash};
use simplicit::backend::Device;
use simplicit::evaluate::{accuracy, equilibrium_error};
use simplicit::linalg::{Csr, Matrix};
use simplicit::model::{ImplicitModel, components};
use simplicit::parallel::Cancel;
use simplicit::problem::Mask;
use simplicit::train::{Checkpoint, Forget, Keep};

use crate::args::{JsonArgs, NameArgs, PictureArgs, PreprocessingArgs, RunArgs, SelectionArgs, Switch, number};
use crate::baseline::{Baseline, require_order};
use crate::commands::report::{About, page_about};
use crate::exit::Outcome;
use crate::interrupt::set_how_to_go_on;
use crate::measure::{Runner, agreement, run_on};
use crate::paths::{Paths, same_file};
use crate::progress::Watcher;
use crate::recipe::beside;
use crate::remote::Remote;
use crate::results::{Results, Staged, Stopwatch};
use crate::settings::{BoundsKind, ConnectivityKind, Effective, MatchingKind, PenaltyKind, Preset, resolve};
use crate::summary::summary;
use crate::table::count;
use crate::training::Job;
use origin::{Origin, Row};

/// A larger distance from a target than this ends the command with exit code 1, so that a script sees it.
const MISSED: f64 = 0.002;
/// The first line of a recipe that a run writes, around the version.
const RECIPE_HEAD: &str = "# simplicit ";
const RECIPE_TAIL: &str = " train --recipe THIS";
/// From this relative error of the outputs on, the table names a likely reason.
const FAR_OFF: f64 = 0.4;

const HELP: &str = "\
Defaults: penalty cardinality with --mu 2e-6 (l1: --beta 3e-4; perspective: --alpha 1.5e-3
--break 0.1; elastic-net: --beta 3e-4 --alpha 1e-4; ridge: --alpha 1.5e-3; with --normalize off
all 1e-3), relaxed matching, lambda1 = lambda2 = 1, normalize on, 3 rounds and a refit for convex
penalties, 4 rounds of output refit, cascade on, output-aware on for ONNX networks. Connectivity:
baseline for a network, full for --states. Kappa: 0.99 where cycles are allowed, none elsewhere.
With --matching exact: penalty l1, one round, no refit of any kind, cascade or output-aware weights.

What was decided for you is written beside the output, model.safetensors having
model.recipe.toml; train --recipe repeats the run.

Examples:
  simplicit train net.onnx --inputs images.npy --out model.safetensors
  simplicit train net.onnx --inputs u.npy --target-sparsity 0.8 --out m.safetensors
  simplicit train net.onnx --inputs u.npy --max-drop 0.5 --out m.safetensors
  simplicit train --states states.safetensors --penalty l1 --beta 1e-3 --out m.safetensors
  simplicit train net.onnx --inputs u.npy --preset paper --rescale --out p.safetensors
  simplicit train --recipe m.recipe.toml --checkpoint run1";

/// Train a sparse implicit model from a network, a model or plain states
///
/// Every row of (A B; C D) is a problem of its own: match the pre-activations (or outputs) of the baseline on the given
/// inputs with as few weights as possible. NETWORK and --inputs, or --states, and --out are enough.
#[derive(Debug, Args)]
#[command(after_help = HELP, allow_negative_numbers = true)]
pub(crate) struct TrainArgs {
    /// The baseline: an ONNX network, or a model, whose equilibrium states are then matched (also as --network FILE)
    #[arg(value_name = "NETWORK", required_unless_present_any = ["states", "network"], requires = "inputs")]
    positional: Option<PathBuf>,
    #[arg(long, value_name = "FILE", requires = "inputs", hide = true)]
    pub(crate) network: Option<PathBuf>,
    /// Inputs of the network: .npy, .npz[:key], .safetensors[:key], IDX or CIFAR binary, each also .gz, or a folder of JPEG and PNG files;
    /// no labels needed
    #[arg(long, value_name = "FILE", conflicts_with = "states")]
    pub(crate) inputs: Option<PathBuf>,
    /// Train on every image and copies of it: flip (mirrored), shift:N (moved by up to N pixels), mix:N (N copies, each mixed with another image in random shares), or several as in flip,shift:2,mix:3; drawn by --seed [default: none]
    #[arg(long, value_name = "HOW", conflicts_with = "states")]
    pub(crate) augment: Option<Augment>,
    /// States instead of a network: a file with U, Z, X, Y (see collect), or a folder with U.npy, Z.npy, X.npy, Y.npy
    #[arg(long, value_name = "FILE", conflicts_with_all = ["network", "positional"])]
    pub(crate) states: Option<PathBuf>,
    /// The model file to write
    #[arg(long, value_name = "FILE")]
    pub(crate) out: PathBuf,
    /// Flags from a TOML file, keys are the long flag names; flags given here win
    #[arg(long, value_name = "FILE")]
    pub(crate) recipe: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) names: NameArgs,
    #[command(flatten)]
    pub(crate) pictures: PictureArgs,
    #[command(flatten)]
    pub(crate) selection: SelectionArgs,
    /// Activation of --states without a layout: relu, leaky-relu:0.1, tanh, sigmoid, identity [default: relu]
    #[arg(long, value_name = "PHI")]
    pub(crate) activation: Option<String>,

    /// How sparse: the share of the baseline's non-zeros to remove, counted over the whole model
    #[arg(long, value_name = "T", conflicts_with = "max_drop", value_parser = number, help_heading = "What is asked for")]
    pub(crate) target_sparsity: Option<f64>,
    /// The smallest model whose predictions agree with the baseline's within X points on held-out inputs, the last tenth
    #[arg(long, value_name = "X", value_parser = number, help_heading = "What is asked for")]
    pub(crate) max_drop: Option<f64>,
    /// A set of defaults; other flags override it
    #[arg(long, help_heading = "What is asked for")]
    pub(crate) preset: Option<Preset>,

    /// What a weight costs [default: cardinality]
    #[arg(long, help_heading = "The problem")]
    pub(crate) penalty: Option<PenaltyKind>,
    /// Weight of |x| (l1, elastic-net)
    #[arg(long, value_name = "B", value_parser = number, help_heading = "The problem")]
    pub(crate) beta: Option<f64>,
    /// Weight of x² (perspective, elastic-net, ridge; cardinality: relative to the features' squares [default: 1e-5])
    #[arg(long, value_name = "A", value_parser = number, help_heading = "The problem")]
    pub(crate) alpha: Option<f64>,
    /// Price of a non-zero (cardinality, perspective)
    #[arg(long, value_name = "M", value_parser = number, help_heading = "The problem")]
    pub(crate) mu: Option<f64>,
    /// Where perspective turns from |x| into x², in place of --mu: mu = alpha·break²
    #[arg(long = "break", value_name = "X", conflicts_with = "mu", value_parser = number, help_heading = "The problem")]
    pub(crate) break_point: Option<f64>,
    /// Which connections the model may have [default: baseline for a network, full for --states]
    #[arg(long, help_heading = "The problem")]
    pub(crate) connectivity: Option<ConnectivityKind>,
    /// Layers to train, by name (as inspect lists them; * stands for anything, a name also for what is below it) or by kind: dense, convolution, grouped convolution; the others keep the baseline's weights [default: all]
    #[arg(long, value_name = "LAYER[,LAYER…]", value_delimiter = ',', help_heading = "The problem")]
    pub(crate) include: Vec<String>,
    /// Layers that keep the baseline's weights, said in the same way [default: none]
    #[arg(long, value_name = "LAYER[,LAYER…]", value_delimiter = ',', help_heading = "The problem")]
    pub(crate) exclude: Vec<String>,
    /// (states + outputs) × (states + inputs) array, non-zero where a weight may be
    #[arg(long, value_name = "FILE", help_heading = "The problem")]
    pub(crate) mask: Option<PathBuf>,
    /// Hold every row of |A| to a sum of at most K [default: 0.99 where cycles are allowed, none elsewhere]
    #[arg(long, value_name = "K", value_parser = number, help_heading = "The problem")]
    pub(crate) kappa: Option<f64>,
    /// Diagonal rescaling to ‖A‖∞ ≤ kappa: of the baseline before training under kappa, else of the trained model
    #[arg(long, help_heading = "The problem")]
    pub(crate) rescale: bool,
    /// The paper's layered scaling first: every layer's weights over G·max‖W‖∞, G > 1
    #[arg(long, value_name = "G", value_parser = number, help_heading = "The problem")]
    pub(crate) gamma: Option<f64>,
    /// How states and outputs are matched [default: relaxed]
    #[arg(long, help_heading = "The problem")]
    pub(crate) matching: Option<MatchingKind>,
    /// Weight of the mismatch of states [default: 1]
    #[arg(long, value_name = "L", value_parser = number, help_heading = "The problem")]
    pub(crate) lambda1: Option<f64>,
    /// Weight of the mismatch of outputs [default: 1]
    #[arg(long, value_name = "L", value_parser = number, help_heading = "The problem")]
    pub(crate) lambda2: Option<f64>,
    /// Unit-RMS features and targets, so that units of the inputs do not matter [default: on]
    #[arg(long, help_heading = "The problem")]
    pub(crate) normalize: Option<Switch>,
    /// Weight each row by how strongly its error changes the outputs, taken as scores of classes; off for outputs that are
    /// none, such as embeddings [default: on for ONNX networks with --normalize on]
    #[arg(long, help_heading = "The problem")]
    pub(crate) output_aware: Option<Switch>,
    /// A constant in every row; off means only where the baseline has a bias [default: off]
    #[arg(long, help_heading = "The problem")]
    pub(crate) bias: Option<Switch>,

    /// Convex solves with reweighting between them [default: 3]
    #[arg(long, value_name = "N", help_heading = "The method")]
    pub(crate) rounds: Option<usize>,
    /// Least squares on the chosen weights at the end [default: on]
    #[arg(long, help_heading = "The method")]
    pub(crate) refit: Option<Switch>,
    /// Refit the weights between two joints together, so that values K joints ahead match the network's; a joint is a layer that everything computed later goes through, such as a residual sum [default: 0, no such refit]
    #[arg(long, value_name = "K", help_heading = "The method")]
    pub(crate) reconstruct: Option<usize>,
    /// Rounds of least squares over all non-zeros together, in the metric of the outputs [default: 4; 0 with --refit off, --robust or exact matching, and for networks with convolutions]
    #[arg(long, value_name = "N", help_heading = "The method")]
    pub(crate) output_refit: Option<usize>,
    /// Approach a target in stages, each of which makes the refitted model before it sparser; needs --output-refit and cardinality [default: on where both are so; off for networks with convolutions]
    #[arg(long, help_heading = "The method")]
    pub(crate) stages: Option<Switch>,
    /// Rounds of moving non-zeros between layers to where they are worth most to the outputs of inputs that were not fitted; needs a target and cardinality [default: 0]
    #[arg(long, value_name = "N", help_heading = "The method")]
    pub(crate) allocate: Option<usize>,
    /// Later rows see the states of the model built so far [default: on]
    #[arg(long, help_heading = "The method")]
    pub(crate) cascade: Option<Switch>,
    /// Train N times more, every weight priced by what it adds to the certificate of the model before [default: 0]
    #[arg(long, value_name = "N", help_heading = "The method")]
    pub(crate) robust: Option<usize>,
    /// Refit the non-zeros in the end so that linear bounds certify more samples under changes of at most E, such as 1/255 [default: no]
    #[arg(long, value_name = "E", value_parser = number, help_heading = "The method")]
    pub(crate) robust_refit: Option<f64>,
    /// Prove rows optimal by branch and bound, for at most so many seconds each once the model is found
    #[arg(long, value_name = "SECONDS", value_parser = number, help_heading = "The method")]
    pub(crate) prove: Option<f64>,
    /// How many feature maps back feedforward may draw taps from, for networks with convolutions [default: 2]
    #[arg(long, value_name = "K", help_heading = "The problem")]
    pub(crate) reach: Option<usize>,
    /// Positions of a feature map that each sample gives, for networks with convolutions [default: 64]
    #[arg(long, value_name = "N", help_heading = "The method")]
    pub(crate) positions: Option<usize>,
    /// Cardinality rows that get a lower bound [default: as many as cost less than training does, counted in operations]
    #[arg(long, help_heading = "The method")]
    pub(crate) bounds: Option<BoundsKind>,

    #[command(flatten)]
    pub(crate) preprocessing: PreprocessingArgs,

    /// Measure accuracy on these inputs afterwards
    #[arg(long, value_name = "FILE", help_heading = "Results")]
    pub(crate) test_inputs: Option<PathBuf>,
    /// Labels of the test inputs; a CIFAR file is its own
    #[arg(long, value_name = "FILE", requires = "test_inputs", help_heading = "Results")]
    pub(crate) test_labels: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) json: JsonArgs,
    /// Write the HTML report about the model, measured on the test inputs where there are some
    #[arg(long, value_name = "FILE", help_heading = "Results")]
    pub(crate) report: Option<PathBuf>,

    /// Keep finished statistics and rows in this directory; the same command goes on from there after any interruption
    #[arg(long, value_name = "DIR", help_heading = "Running")]
    pub(crate) checkpoint: Option<PathBuf>,
    /// Who solves cardinality rows and gathers statistics of feature maps: auto, cpu, cuda or cuda:N; auto takes a GPU that is there [default: auto]
    #[arg(long, value_name = "WHERE", help_heading = "Running")]
    pub(crate) device: Option<Device>,
    /// Memory to stay within, bytes or K, M, G of 1024: layers of all samples go to files beyond it, in the checkpoint's folder or that of temporary files; results do not depend on it [default: half of what is free]
    #[arg(long, value_name = "SIZE", value_parser = size, help_heading = "Running")]
    pub(crate) memory: Option<u64>,
    /// Do the heavy steps on the Ray cluster at this address, auto or HOST:PORT, with the same bits; needs the Python package
    /// with Ray (pip install 'simplicit[ray]') for SIMPLICIT_PYTHON [default: python3]
    #[arg(long, value_name = "ADDRESS", help_heading = "Running")]
    pub(crate) ray: Option<String>,
    #[command(flatten)]
    pub(crate) run: RunArgs,
}

fn size(text: &str) -> Result<u64, String> {
    simplicit::memory::parse(text).map_err(|e| e.to_string())
}

impl TrainArgs {
    /// Uses the network that was given as a positional argument; it replaces that of a recipe.
    pub(crate) fn settle(&mut self) -> anyhow::Result<()> {
        if let Some(path) = self.positional.take() {
            if let (Some(flag), None) = (&self.network, &self.recipe) {
                bail!("expected one network, got {} and --network {}", path.display(), flag.display());
            }
            self.network = Some(path);
        }
        Ok(())
    }
}

pub(crate) fn run(args: &TrainArgs, cancel: &Cancel) -> anyhow::Result<Outcome> {
    let mut stopwatch = Stopwatch::start();
    let recipe_path = beside(&args.out);
    Paths::default()
        .reads("NETWORK", args.network.as_deref())
        .reads("--inputs", args.inputs.as_deref())
        .reads("--states", args.states.as_deref())
        .reads("--mask", args.mask.as_deref())
        .reads("--test-inputs", args.test_inputs.as_deref())
        .reads("--test-labels", args.test_labels.as_deref())
        // A recipe may be written again where it lies: see below.
        .reads("--recipe", args.recipe.as_deref().filter(|recipe| !same_file(recipe, &recipe_path)))
        .writes("--out", Some(&args.out))
        .writes("the recipe of --out", Some(&recipe_path))
        .writes("--json", args.json.file())
        .writes("--report", args.report.as_deref())
        .check()?;
    require_own(&recipe_path)?;
    set_how_to_go_on(match &args.checkpoint {
        Some(_) => "the same command goes on from the checkpoint".to_string(),
        None => "no model was written; with --checkpoint DIR the same command could go on where it was".to_string(),
    });
    let watcher = Watcher::new(args.run.progress);
    watcher.phase("reading");
    let threads = args.run.threads();
    let origin = Origin::open(args)?;
    let mask = args.mask.as_deref().map(read_mask).transpose()?;
    let sizes = origin.sizes();
    let mask_is_cyclic = mask.as_ref().is_some_and(|m| is_cyclic(m, sizes.states));
    let effective = resolve(args, origin.facts(), mask_is_cyclic)?;
    let test = Test::open(args, &origin)?;
    let provenance = provenance(args, &effective)?;
    let checkpoint = match &args.checkpoint {
        Some(directory) => {
            let mut fingerprint = provenance.clone();
            fingerprint.insert("preprocessing".into(), serde_json::to_string(origin.preprocessing())?);
            Some(Checkpoint::open(directory, &fingerprint)?)
        }
        None => None,
    };
    let store: &dyn Keep = checkpoint.as_ref().map_or(&Forget, |checkpoint| checkpoint);
    let cluster = match &args.ray {
        Some(address) => Some(Remote::new(origin.join(address, args, &effective)?, cancel, store)),
        None => None,
    };
    let keep = cluster.as_ref().map_or(store, |cluster| cluster);
    stopwatch.lap("load");
    let job = Job {
        effective: &effective,
        mask,
        preprocessing: origin.preprocessing().clone(),
        provenance,
        keep,
        threads,
        cancel,
        watcher: &watcher,
    };
    let trained = job.run(&origin.samples(), &mut stopwatch).map_err(|error| {
        match cluster.as_ref().and_then(|cluster| cluster.courier().failure()) {
            Some(failure) => anyhow::anyhow!("--ray: {failure}"),
            None => error,
        }
    })?;
    drop(cluster);
    let mut results = Results::of_model(&trained.model);
    results.add_training(&trained.report);
    results.add_device(&effective.device, &trained.report, Some(&trained.model))?;
    results.seed = Some(effective.seed);
    results.threads = Some(threads.get());
    results.samples = Some(sizes.samples);
    results.equilibrium_error = Some(trained.output_error);
    results.not_converged = Some(trained.not_converged);
    results.on_training_inputs = test.is_none();
    // What took long is kept, whatever becomes of measuring it.
    watcher.phase("writing");
    let recipe = recipe(args, &effective, origin.preprocessing())?;
    let mut files = Staged::default();
    files.stage(&recipe_path, recipe.as_bytes())?.stage(&args.out, &trained.model.to_bytes())?.finish()?;
    set_how_to_go_on(format!("the model is in {}; evaluate measures it", args.out.display()));
    let written = || format!("the model is in {}, but what follows it failed", args.out.display());
    let mut measure = || -> anyhow::Result<()> {
        let Some(test) = &test else { return Ok(()) };
        watcher.phase("test inputs");
        let runner = Runner::of_model(&trained.model, threads)?;
        let device: Device = effective.device.parse()?;
        let of_model = run_on(device, &trained.model, &runner, &test.inputs, cancel, &watcher)?;
        results.samples = Some(of_model.outputs.rows());
        results.not_converged = Some(of_model.not_converged());
        results.not_finite = Some(of_model.not_finite());
        results.first_not_finite = of_model.first_not_finite();
        results.accuracy = test.accuracy(&of_model.outputs)?;
        results.milliseconds = Some(runner.milliseconds(&test.inputs, cancel)?);
        // Plain states have no baseline to compare with.
        results.equilibrium_error = None;
        if let Some(baseline) = origin.baseline() {
            let runner = Runner::of_baseline(baseline, threads)?;
            let of_baseline = run_on(device, &baseline.implicit()?, &runner, &test.inputs, cancel, &watcher)?;
            results.baseline_accuracy = test.accuracy(&of_baseline.outputs)?;
            results.baseline_milliseconds = Some(runner.milliseconds(&test.inputs, cancel)?);
            results.agreement = agreement(&of_model.outputs, &of_baseline.outputs)?;
            results.equilibrium_error = Some(equilibrium_error(&of_model.outputs, &of_baseline.outputs)?);
        }
        stopwatch.lap("test");
        Ok(())
    };
    measure().with_context(written)?;
    results.seconds = stopwatch.seconds();
    let write = || -> anyhow::Result<()> {
        let mut files = Staged::default();
        files.stage_optional(args.json.file(), results.text()?.as_bytes())?;
        if let Some(path) = &args.report {
            let about =
                About { title: &args.out, model: &trained.model, baseline: origin.baseline(), results: &results };
            let measured = test.as_ref().map(|test| (&test.inputs, test.labels.as_ref()));
            files.stage(path, page_about(&about, measured, threads, cancel, &watcher)?.as_bytes())?;
        }
        files.finish()
    };
    write().with_context(written)?;
    watcher.finish();
    let mut table = summary(&results, origin.baseline().and_then(|b| b.bytes));
    table.push_str(&format!("model           {}\nrecipe          {}\n", args.out.display(), recipe_path.display()));
    if let Some(path) = &args.report {
        table.push_str(&format!("report          {}\n", path.display()));
    }
    let again = origin.baseline().and_then(Baseline::network).map_or(0, |network| network.repeated_weights());
    if again > 0 {
        table.push_str(&format!(
            "again           {} of the baseline's parameters: its file uses weights in several places; each is counted\n",
            count(again as u64)
        ));
    }
    let row = origin.widest_row(&effective);
    if let Some(Row { weights, positions }) = row.filter(|row| row.weights > sizes.samples * row.positions) {
        let at = if positions > 1 { format!(" at {positions} positions each") } else { String::new() };
        table.push_str(&format!(
            "advice          {} samples{at} for rows of up to {} weights: on other inputs the error will be larger; a few thousand \
             are usual\n",
            count(sizes.samples as u64),
            count(weights as u64)
        ));
    }
    let classes = trained.model.shape().outputs > 1;
    let far_off = results.equilibrium_error.is_some_and(|error| error > FAR_OFF);
    if effective.output_aware.is_on() && classes && far_off {
        table.push_str(
            "advice          outputs are far off; if they are no scores of classes, add --output-aware off\n",
        );
    }
    results.print(&args.json, &table)?;
    let mut notices = results.notices();
    notices.extend(missed(&effective, &trained.model, trained.report.agreement));
    Ok(Outcome::with_notices(&notices))
}

/// A notice where a target was not reached.
pub(crate) fn missed(effective: &Effective, model: &ImplicitModel, agreement: Option<f64>) -> Option<String> {
    let about = model.sparsity();
    if let Some(missed) = missed_target(effective, about.sparsity, about.baseline_nonzeros) {
        return Some(missed);
    }
    let (drop, agreement) = (effective.max_drop?, agreement?);
    (100.0 * (1.0 - agreement) > drop + 1e-9)
        .then(|| format!("max-drop {drop} missed: {:.2} points on the held-out inputs", 100.0 * (1.0 - agreement)))
}

/// A notice if the target sparsity was missed. With few parameters the sparsity cannot come nearer than one of them.
pub(crate) fn missed_target(effective: &Effective, sparsity: f64, parameters: u64) -> Option<String> {
    let within = MISSED.max(1.0 / parameters.max(1) as f64) + 1e-12;
    let target = effective.target_sparsity.filter(|target| (sparsity - target).abs() > within)?;
    Some(format!("target sparsity {target} missed: {sparsity:.4}"))
}

/// An error if a file is where the recipe goes and no run of this program wrote it.
fn require_own(recipe: &Path) -> anyhow::Result<()> {
    let Ok(file) = std::fs::File::open(recipe) else { return Ok(()) };
    let mut first = String::new();
    // What is no text is no recipe of ours.
    let read = std::io::BufReader::new(file.take(RECIPE_HEAD.len() as u64 + 64)).read_line(&mut first);
    if read.is_ok() && first.starts_with(RECIPE_HEAD) && first.trim_end().ends_with(RECIPE_TAIL) {
        return Ok(());
    }
    bail!(
        "{}: the recipe of this run goes here, and simplicit did not write the file that is there; move it, or choose another \
         --out",
        recipe.display()
    )
}

/// Test inputs and their labels, opened before the work begins so that errors come early.
struct Test {
    inputs: Inputs,
    labels: Option<Labels>,
}

impl Test {
    /// Whatever would fail after the training fails here.
    fn open(args: &TrainArgs, origin: &Origin) -> anyhow::Result<Option<Self>> {
        let Some(path) = &args.test_inputs else { return Ok(None) };
        let (all, preprocessing, shape) = (Selection::all(), Some(origin.preprocessing()), origin.shape());
        let inputs = args.pictures.open_inputs(path, &PreprocessingArgs::default(), preprocessing, &all)?;
        require_order(&inputs, None, origin.baseline())?;
        if inputs.features() != shape.inputs {
            bail!(
                "--test-inputs {}: expected {} values per sample, got {}",
                path.display(),
                shape.inputs,
                inputs.features()
            );
        }
        let labels = args.test_labels.as_ref().map(|path| Labels::read(path, &all)).transpose()?;
        if let Some(labels) = &labels {
            labels.require(inputs.samples(), shape.outputs).context("--test-labels")?;
        }
        Ok(Some(Self { inputs, labels }))
    }

    fn accuracy(&self, outputs: &Matrix<f32>) -> anyhow::Result<Option<f64>> {
        let Some(labels) = &self.labels else { return Ok(None) };
        labels.require(outputs.rows(), outputs.cols())?;
        Ok(Some(accuracy(outputs, labels.as_slice())?))
    }
}

fn read_mask(path: &Path) -> anyhow::Result<Mask> {
    let array = Array::open(path)?;
    Ok(Mask::from_pattern(&array.rows(0..array.samples())?))
}

/// Whether the part of the mask between states allows a cycle.
pub(crate) fn is_cyclic(mask: &Mask, states: usize) -> bool {
    let (rows, cols) = mask.shape();
    if rows < states || cols < states {
        // A mask of the wrong shape is refused by training, in a message with both shapes.
        return true;
    }
    let allowed = |i: usize| (0..states).filter(move |&j| mask.allows(i, j)).map(|j| (j, 1.0f32)).collect::<Vec<_>>();
    components(&Csr::from_rows(states, (0..states).map(allowed))).cyclic.contains(&true)
}

/// Settings, seed, hashes and version: the model's provenance and, with the preprocessing, the checkpoint's fingerprint.
fn provenance(args: &TrainArgs, effective: &Effective) -> anyhow::Result<BTreeMap<String, String>> {
    let mut map = BTreeMap::from(decided(effective)?);
    let files = [("network", &args.network), ("inputs", &args.inputs), ("states", &args.states), ("mask", &args.mask)];
    for (name, path) in files {
        if let Some(path) = path {
            map.insert(name.into(), hash(path)?);
        }
    }
    map.extend(args.names.given().into_iter().map(|(name, value)| (name.to_string(), value.to_string())));
    map.extend(args.pictures.given().into_iter().map(|(name, value)| (name.to_string(), value.to_string())));
    Ok(map)
}

/// Settings, seed and version.
pub(crate) fn decided(effective: &Effective) -> anyhow::Result<[(String, String); 3]> {
    Ok([
        ("settings".to_string(), serde_json::to_string(effective)?),
        ("seed".to_string(), effective.seed.to_string()),
        ("version".to_string(), env!("CARGO_PKG_VERSION").to_string()),
    ])
}

fn hash(path: &Path) -> anyhow::Result<String> {
    if path.join("U.npy").exists() {
        let parts = ["U.npy", "Z.npy", "X.npy", "Y.npy"].map(|name| content_hash(path.join(name)));
        return Ok(parts.into_iter().collect::<Result<Vec<_>, _>>()?.join(" "));
    }
    Ok(content_hash(path)?)
}

/// The effective recipe: everything that decides the result, and the files it was decided on.
fn recipe(args: &TrainArgs, effective: &Effective, preprocessing: &Preprocessing) -> anyhow::Result<String> {
    let mut table = toml::Table::new();
    let files = [
        ("network", &args.network),
        ("inputs", &args.inputs),
        ("states", &args.states),
        ("mask", &args.mask),
        ("test-inputs", &args.test_inputs),
        ("test-labels", &args.test_labels),
    ];
    for (name, path) in files {
        if let Some(path) = path {
            table.insert(name.into(), path.display().to_string().into());
        }
    }
    table.extend(args.names.given().into_iter().map(|(name, value)| (name.to_string(), value.into())));
    table.extend(args.pictures.given().into_iter().map(|(name, value)| (name.to_string(), (value as i64).into())));
    table.insert("out".into(), args.out.display().to_string().into());
    table.insert("scale".into(), preprocessing.scale.into());
    table.insert("mean".into(), preprocessing.mean.clone().into());
    table.insert("std".into(), preprocessing.std.clone().into());
    table.extend(toml::Table::try_from(effective)?);
    Ok(format!("{RECIPE_HEAD}{}{RECIPE_TAIL}\n{table}", env!("CARGO_PKG_VERSION")))
}
