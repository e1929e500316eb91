//! For other front ends: the flags, defaults, training and report of the command line, applied to data in memory.

use std::collections::BTreeMap;

use anyhow::bail;
use clap::Parser;
use simplicit::arrays::{Augment, Labels, Preprocessing, Selection};
use simplicit::model::ImplicitModel;
use simplicit::parallel::{Cancel, Threads};
use simplicit::problem::Mask;
use simplicit::states::InputSource;
use simplicit::train::{self, BlockSource, Keep, TrainSettings, train_blocks};

pub use crate::baseline::Baseline;
pub use crate::progress::Event;
pub use crate::remote::{Courier, Remote, read_statistics};
pub use crate::training::Samples;

use crate::commands::report::{self, Page};
use crate::commands::train::{TrainArgs, decided, is_cyclic, missed, missed_target};
use crate::program::usage;
use crate::progress::Watcher;
use crate::results::{Results, Stopwatch};
use crate::settings::{Effective, Facts, resolve};
use crate::training::{Job, moved};

#[derive(Parser)]
#[command(name = "train", disable_help_flag = true)]
struct Line {
    #[command(flatten)]
    args: TrainArgs,
}

/// The settings that `simplicit train` would choose for some flags.
pub struct Training {
    effective: Effective,
    preprocessing: Preprocessing,
    mask: Option<Mask>,
}

/// A trained model, its results as `--json` has them, and notices for the user.
pub struct Trained {
    /// The model, with its provenance.
    pub model: ImplicitModel,
    /// The JSON that `train --json` writes.
    pub results: String,
    /// Messages that the command line prints before it ends with exit code 1.
    pub notices: Vec<String>,
}

/// How a command runs: on which threads, how it is stopped, where it keeps results, and to whom it reports.
pub struct Run<'a> {
    /// The threads to use.
    pub threads: Threads,
    /// A request to stop.
    pub cancel: &'a Cancel,
    /// Where intermediate results are kept.
    pub keep: &'a dyn Keep,
    /// Called with progress events.
    pub listener: &'a (dyn Fn(Event) + Sync),
}

impl Training {
    /// `flags` are those of `simplicit train` without files; `own` is the preprocessing of a baseline or of states,
    /// which flags override.
    pub fn new(
        flags: &[String],
        baseline: Option<&Baseline>,
        states: usize,
        own: Option<&Preprocessing>,
        mask: Option<Mask>,
    ) -> anyhow::Result<Self> {
        // The files are placeholders: they are never opened, because their content is in memory.
        let files: &[&str] = if baseline.is_some() {
            &["train", "--network=-", "--inputs=-", "--out=-"]
        } else {
            &["train", "--states=-", "--out=-"]
        };
        let placeholder = mask.as_ref().map(|_| "--mask=-");
        let words = files.iter().copied().chain(placeholder).chain(flags.iter().map(String::as_str));
        let args = match Line::try_parse_from(words) {
            Ok(line) => line.args,
            Err(error) => bail!(usage(&error).trim_end_matches("; see --help").to_string()),
        };
        let identity = Preprocessing::identity();
        let preprocessing =
            args.preprocessing.over(own.or_else(|| baseline.and_then(Baseline::preprocessing)).unwrap_or(&identity))?;
        let facts = baseline.map_or_else(Facts::default, Facts::of);
        let cyclic = mask.as_ref().is_some_and(|mask| is_cyclic(mask, states));
        Ok(Self { effective: resolve(&args, facts, cyclic)?, preprocessing, mask })
    }

    /// As [`Training::new`], for linear blocks of a network that runs elsewhere; settings that need the network
    /// itself are refused.
    pub fn of_blocks(flags: &[String]) -> anyhow::Result<Self> {
        let words = ["train", "--network=-", "--inputs=-", "--out=-"].into_iter();
        let args = match Line::try_parse_from(words.chain(flags.iter().map(String::as_str))) {
            Ok(line) => line.args,
            Err(error) => bail!(usage(&error).trim_end_matches("; see --help").to_string()),
        };
        let identity = Preprocessing::identity();
        let needs_network = [
            ("--preset", args.preset.is_some()),
            ("--max-drop", args.max_drop.is_some()),
            ("--rescale", args.rescale),
            ("--gamma", args.gamma.is_some()),
            ("--samples", args.selection.samples.is_some()),
            ("--augment", args.augment.is_some()),
            ("--scale, --mean, --std", args.preprocessing.over(&identity)? != identity),
        ];
        if let Some((flag, _)) = needs_network.iter().find(|(_, given)| *given) {
            bail!("{flag}: expected nothing for a module that runs itself; convert it to a network for this");
        }
        let facts = Facts { network: true, baseline: true, maps: true, baseline_cyclic: false };
        Ok(Self { effective: resolve(&args, facts, false)?, preprocessing: identity, mask: None })
    }

    /// Trains the blocks of a source, which then holds the new weights. Returns the results as JSON, and notices for
    /// the user.
    pub fn run_blocks(&self, source: &mut dyn BlockSource, run: &Run) -> anyhow::Result<(String, Vec<String>)> {
        let mut stopwatch = Stopwatch::start();
        let mut progress = |p| (run.listener)(Event::Training(p));
        let mut inner =
            train::Run { threads: run.threads, cancel: run.cancel, keep: run.keep, progress: &mut progress };
        let trained = train_blocks(source, &self.settings()?, self.effective.output_aware.is_on(), &mut inner)?;
        stopwatch.lap("train");
        let mut results = Results::new();
        results.sparsity = Some(trained.sparsity());
        results.nonzeros = Some(trained.nonzeros);
        results.baseline_nonzeros = Some(trained.baseline_nonzeros);
        results.add_training(&trained.report);
        results.add_device(&self.effective.device, &trained.report, None)?;
        results.seed = Some(self.effective.seed);
        results.threads = Some(run.threads.get());
        results.samples = Some(source.samples());
        results.seconds = stopwatch.seconds();
        let mut notices = results.notices();
        notices.extend(missed_target(&self.effective, trained.sparsity(), trained.baseline_nonzeros));
        Ok((results.text()?, notices))
    }

    /// How raw inputs become u.
    pub fn preprocessing(&self) -> &Preprocessing {
        &self.preprocessing
    }

    /// The samples to use.
    pub fn selection(&self) -> Selection {
        self.effective.samples.map_or_else(Selection::all, |count| Selection::random(count, self.effective.seed))
    }

    /// How copies of images are changed, if copies were asked for.
    pub fn augment(&self) -> Option<(Augment, u64)> {
        self.effective.augment.map(|augment| (augment, self.effective.seed))
    }

    /// The baseline in the coordinates of the training, where these differ from its own.
    pub fn moved(&self, baseline: &Baseline) -> anyhow::Result<Option<ImplicitModel>> {
        moved(baseline, &self.effective)
    }

    /// Everything that was decided, as JSON under the names of the flags.
    pub fn decided(&self) -> anyhow::Result<String> {
        Ok(serde_json::to_string(&self.effective)?)
    }

    /// The library's settings.
    pub fn settings(&self) -> anyhow::Result<TrainSettings> {
        self.effective.settings(self.mask.clone())
    }

    /// Trains and measures on the training samples; `hashes` go into the model's provenance and say which samples
    /// these were.
    pub fn run(&self, samples: &Samples, hashes: &BTreeMap<String, String>, run: &Run) -> anyhow::Result<Trained> {
        let watcher = Watcher::telling(run.listener);
        let mut stopwatch = Stopwatch::start();
        let mut provenance = BTreeMap::from(decided(&self.effective)?);
        provenance.extend(hashes.clone());
        let job = Job {
            effective: &self.effective,
            mask: self.mask.clone(),
            preprocessing: self.preprocessing.clone(),
            provenance,
            keep: run.keep,
            threads: run.threads,
            cancel: run.cancel,
            watcher: &watcher,
        };
        let trained = job.run(samples, &mut stopwatch)?;
        let mut results = Results::of_model(&trained.model);
        results.add_training(&trained.report);
        results.add_device(&self.effective.device, &trained.report, Some(&trained.model))?;
        results.seed = Some(self.effective.seed);
        results.threads = Some(run.threads.get());
        results.samples = Some(match samples {
            Samples::Inputs(_, inputs) => inputs.samples(),
            Samples::States(states) => states.samples(),
        });
        results.equilibrium_error = Some(trained.output_error);
        results.not_converged = Some(trained.not_converged);
        results.seconds = stopwatch.seconds();
        let mut notices = results.notices();
        notices.extend(missed(&self.effective, &trained.model, trained.report.agreement));
        Ok(Trained { model: trained.model, results: results.text()?, notices })
    }
}

/// The library's settings from [`Training::decided`], for use on another machine. A mask is not part of them, because
/// the row problems contain it already.
pub fn settings_from(decided: &str) -> anyhow::Result<TrainSettings> {
    serde_json::from_str::<Effective>(decided)?.settings(None)
}

/// Earlier results about a model, as the JSON of the commands.
#[derive(Debug, Default, Clone, Copy)]
pub struct Found<'a> {
    /// From `train`.
    pub training: Option<&'a str>,
    /// From `attack`.
    pub attack: Option<&'a str>,
    /// From `certify`.
    pub certify: Option<&'a str>,
}

/// The page of `simplicit report`; with inputs (and labels) the model is measured on them.
#[allow(clippy::too_many_arguments)]
pub fn page(
    title: &str,
    model: &ImplicitModel,
    baseline: Option<&Baseline>,
    found: Found<'_>,
    inputs: Option<&dyn InputSource>,
    labels: Option<&Labels>,
    threads: Threads,
    cancel: &Cancel,
) -> anyhow::Result<String> {
    let run = report::Run::of(found.training.map(|json| ("results", json.as_bytes())), model)?;
    let attack = found.attack.map(|json| ("attack", json.as_bytes()));
    let certify = found.certify.map(|json| ("certify", json.as_bytes()));
    let robustness = report::robustness(attack.as_slice(), certify.as_slice(), model)?;
    let silent = |_: Event| {};
    let watcher = Watcher::telling(&silent);
    report::page(Page { title, model, baseline, inputs, labels, robustness, run, threads, cancel, watcher: &watcher })
}
