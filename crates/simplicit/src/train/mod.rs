//! The SIM algorithm: states in, a sparse implicit model and its report out.
//!
//! Rows are solved in groups that share a design: layer by layer for acyclic connectivity (with the cascade, each layer
//! sees the states of the model built so far), all states at once for cyclic connectivity. The same walk serves every
//! objective: statistics, row problems, solve, reweight, refit, round to f32.
//!
//! Convolutions are no exception: a row is an output channel, its features are taps, its samples positions.

mod block_source;
mod blocks;
mod checkpoint;
mod delegate;
mod evidence;
mod fit;
mod keep;
mod plan;
mod refit;
mod rows;
mod search;

pub use block_source::{BlockRows, BlockSource, LinearBlock};
pub use blocks::{TrainedBlocks, train_blocks};
pub use checkpoint::Checkpoint;
pub use delegate::Delegate;
#[doc(hidden)] // what workers of the command line and the Python package are sent
pub use delegate::{RowsTask, StatisticsTask, numbers_from_bytes, numbers_to_bytes};
pub use evidence::importance::{importance, importance_on};
#[doc(hidden)]
pub use evidence::shard::{Shard, Step, WalkTask};
#[doc(hidden)]
pub use evidence::sums_task::SumsTask;
pub use keep::{Forget, Keep};
pub use plan::estimate::{Estimate, estimate};
pub use refit::bound_refit::BoundRefit;
pub use refit::output_refit::OutputRefit;
pub use rows::build::RowReport;
pub use rows::method::{RowGroup, RowMethod};
pub use search::Found;
pub use search::allocate::Allocation;
pub use search::max_drop::train_to_max_drop;
pub use search::path::path;

use std::sync::Arc;

use crate::arrays::Preprocessing;
use crate::backend::cuda::Cuda;
use crate::backend::{Cpu, Device, GroupBackend};
use crate::layout::Layout;
use crate::model::{ImplicitModel, ModelMetadata};
use crate::parallel::{Cancel, Threads};
use crate::problem::{Connectivity, Matching, Penalty};
use crate::solver::{CardinalitySettings, SolverSettings};
use crate::states::StateSource;
use crate::{Error, Result};

/// What is minimised besides the mismatch.
#[derive(Debug, Clone)]
pub enum Objective {
    /// A convex penalty, certified row by row.
    Convex(Arc<dyn Penalty>),
    /// The number of non-zeros, at a price each.
    Cardinality,
    /// Rows by a method of your own; such rows have no bound and no gap.
    Method(Arc<dyn RowMethod>),
}

/// Which cardinality rows get a lower bound, a convex solve each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bounds {
    /// None.
    Off,
    /// Some of every group: one from each of eight strata of the row weight, drawn by the seed, and none where the group
    /// has more than 2,048 features.
    Sampled,
    /// All.
    All,
}

/// How to train. Every field has the default of [`TrainSettings::default`].
#[derive(Debug, Clone)]
pub struct TrainSettings {
    /// What is minimised. Default: cardinality.
    pub objective: Objective,
    /// Factor on the penalty, or the price of a non-zero. Default 2e-6. With a target it is where the search starts.
    pub strength: f64,
    /// Share of the baseline's non-zeros to remove, over the whole model.
    pub target_sparsity: Option<f64>,
    /// Which connections are allowed. Default: the baseline's.
    pub connectivity: Connectivity,
    /// Layers to train, by name (`*` stands for anything, a name also for everything below it) or by kind (`dense`,
    /// `convolution`, `grouped convolution`). The others keep the baseline's weights. Default: all.
    pub include: Vec<String>,
    /// Layers not to train, said in the same way. Default: none.
    pub exclude: Vec<String>,
    /// How many maps before a feature map `feedforward` may draw taps from. Default 2.
    pub reach: usize,
    /// ‖A‖∞ ≤ κ on the stored model.
    pub kappa: Option<f64>,
    /// Exact or relaxed. Default: relaxed, λ₁ = λ₂ = 1. Exact needs a convex penalty, one round, no refit, no cascade
    /// and no target; rows that no weights match are [`Error::Infeasible`].
    pub matching: Matching,
    /// Unit-RMS features and targets (default), or the paper's sums in raw units.
    pub normalise: bool,
    /// Convex solves with reweighting between them; 1 is a single solve. Default 3. Cardinality needs none.
    pub rounds: usize,
    /// Least squares on the support at the end. Default on.
    pub refit: bool,
    /// Rounds of the refit of all non-zeros together, in the metric of the output; 0 is none. Default: 4, and none for
    /// models with convolutions or operators and with exact matching.
    pub output_refit: Option<usize>,
    /// Whether targets are approached in stages, each of which makes the refitted model before it sparser. Needs
    /// cardinality, a refit in the output metric and no robust rounds. Default: wherever that is so but for models with
    /// convolutions or operators.
    pub stages: Option<bool>,
    /// Rounds in which layers' prices are moved by what their non-zeros are worth to the outputs of samples that were not
    /// fitted, on rough models. For models with convolutions or operators, cardinality and a target. Default 0.
    pub allocate: usize,
    /// Later rows see the states of the model built so far. Default on.
    pub cascade: bool,
    /// A constant for every row, also where the baseline has no bias. Default off.
    pub bias: bool,
    /// Times that the whole model is trained again with every weight priced by what it adds to the certificate of the
    /// last one. Default 0.
    pub robust_rounds: usize,
    /// ε in raw·scale units at which the non-zeros are refitted in the end, so that linear bounds certify more. Default: none.
    pub robust_refit: Option<f64>,
    /// Positions of a feature map that every sample gives to the statistics; more where 20 samples per feature need
    /// it. Default 64.
    pub positions: usize,
    /// Of the choice of positions. Default 0.
    pub seed: u64,
    /// Who runs the layers of networks with feature maps, gathers their statistics and solves cardinality rows. Default: the
    /// CPU, whose results are the same to the bit on every machine. Convex rows and bounds are the CPU's in any case.
    pub device: Device,
    /// Bytes that this process may hold; layers of all samples go to a file beyond them, and bits do not depend on it.
    /// Default: half of what is free when training begins. An error where the largest group of rows alone needs more.
    pub memory: Option<u64>,
    /// When a row counts as solved.
    pub solver: SolverSettings,
    /// Which cardinality rows get a lower bound. Default: as many as cost less than training does, by counted
    /// operations: of every group half of what solving its rows once takes, and a little more for the first ones.
    pub bounds: Option<Bounds>,
    /// How hard cardinality tries.
    pub cardinality: CardinalitySettings,
    /// Who solves groups of cardinality rows that no GPU takes. Default: this machine's processor.
    pub backend: Arc<dyn GroupBackend>,
    /// Seconds for each cardinality row to prove its answer optimal, once the model is found. Default: none, a bound only.
    pub prove: Option<f64>,
}

impl Default for TrainSettings {
    fn default() -> Self {
        Self {
            objective: Objective::Cardinality,
            strength: 2e-6,
            target_sparsity: None,
            connectivity: Connectivity::Baseline,
            include: Vec::new(),
            exclude: Vec::new(),
            reach: 2,
            kappa: None,
            matching: Matching::default(),
            normalise: true,
            rounds: 3,
            refit: true,
            output_refit: None,
            stages: None,
            allocate: 0,
            cascade: true,
            bias: false,
            robust_rounds: 0,
            robust_refit: None,
            positions: 64,
            seed: 0,
            device: Device::Cpu,
            memory: None,
            solver: SolverSettings::default(),
            bounds: None,
            cardinality: CardinalitySettings::default(),
            backend: Arc::new(Cpu),
            prove: None,
        }
    }
}

/// The large steps of a compression.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Rows are weighed by what their errors do to the outputs.
    RowWeights,
    /// Models are fitted.
    Training {
        /// Groups of rows in each of them.
        groups: usize,
    },
    /// The model found is run on the samples.
    Measuring,
}

/// What training is doing, for whoever watches.
#[derive(Debug, Clone, PartialEq)]
pub enum Progress {
    /// A large step begins.
    Phase(Phase),
    /// Samples of a group have been gathered.
    Samples {
        /// The group.
        group: String,
        /// Samples so far.
        done: usize,
        /// Samples in all.
        total: usize,
    },
    /// Rows of a group have been solved.
    Rows {
        /// The group.
        group: String,
        /// Rows so far.
        done: usize,
        /// Rows in all.
        total: usize,
    },
    /// A whole model was fitted on the way to a target.
    Model {
        /// Factor on the penalty.
        strength: f64,
        /// The sparsity it gave.
        sparsity: f64,
    },
    /// A pass over all groups begins, where each of them is expensive. Work is counted in one unit over a whole training.
    Pass {
        /// Work of this pass.
        work: f64,
        /// Work expected after it.
        left: f64,
    },
    /// A group of that pass is done.
    Group {
        /// The share of the pass that is behind.
        share: f64,
    },
    /// What the training to come holds in memory, in bytes, before it begins.
    Memory {
        /// With all layers of all samples in memory.
        needed: u64,
        /// With all of them in a file.
        least: u64,
        /// What is allowed; `None` where nothing is said and nobody knows what is free.
        budget: Option<u64>,
    },
    /// A round of the refit in the output metric is done.
    OutputRefit {
        /// Rounds so far.
        round: usize,
        /// Rounds at most.
        rounds: usize,
        /// What it minimises, now.
        objective: f64,
    },
    /// The refit by linear bounds begins.
    BoundRefitBegins {
        /// Samples that it takes.
        samples: usize,
        /// Samples that there are.
        of: usize,
        /// What their intervals cost in all rounds, by the first samples.
        multiply_adds: u64,
    },
    /// A round of the refit by linear bounds is done.
    BoundRefit {
        /// Rounds so far.
        round: usize,
        /// Rounds in all.
        rounds: usize,
        /// Share of held-out samples that are certified now.
        certified: f64,
    },
}

/// What training starts from.
pub struct TrainInput<'a> {
    /// The samples and their states.
    pub source: &'a dyn StateSource,
    /// The baseline as an implicit model: its connections, its weights to start from, what is counted against. Where it
    /// has feature maps it is also run, layer by layer.
    pub baseline: Option<&'a ImplicitModel>,
    /// λ_i per row of the layout, then per output; see [`importance`].
    pub importance: Option<&'a [f64]>,
    /// Stored in the model.
    pub preprocessing: Preprocessing,
}

/// Who works, who may stop it, where results are kept, who watches.
pub struct Run<'a> {
    /// Threads to use.
    pub threads: Threads,
    /// A request to stop.
    pub cancel: &'a Cancel,
    /// Intermediate results.
    pub keep: &'a dyn Keep,
    /// Told now and then.
    pub progress: &'a mut dyn FnMut(Progress),
}

/// All threads of the machine; nothing is kept, nobody watches or stops it.
impl Default for Run<'_> {
    fn default() -> Self {
        static NEVER: std::sync::LazyLock<Cancel> = std::sync::LazyLock::new(Cancel::new);
        // A closure without captures takes no memory, so nothing leaks.
        let progress = Box::leak(Box::new(|_: Progress| {}));
        Self { threads: Threads::available(), cancel: &NEVER, keep: &Forget, progress }
    }
}

/// A model on the way to the one that was asked for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TriedModel {
    /// Factor on the penalty, or the price of a non-zero.
    pub strength: f64,
    /// Share of the baseline's non-zeros that it removed.
    pub sparsity: f64,
    /// Error of its outputs on the training samples, relative to the baseline's, before any refit in the output metric.
    pub output_error: f64,
}

/// What training has to say about its model.
#[derive(Debug, Clone)]
pub struct TrainReport {
    /// One per row, states then outputs.
    pub rows: Vec<RowReport>,
    /// The factor on the penalty that was used.
    pub strength: f64,
    /// RMS of the mismatch of the outputs over the RMS of the outputs, on the training samples at the model's own
    /// states.
    pub training_error: f64,
    /// The models of the search, in the order they were fitted.
    pub path: Vec<TriedModel>,
    /// What the refit in the output metric did, where there was one.
    pub output_refit: Option<OutputRefit>,
    /// What the refit by linear bounds did, where it was asked for.
    pub bound_refit: Option<BoundRefit>,
    /// What the allocation over layers did, where it was asked for.
    pub allocation: Option<Allocation>,
    /// Share of held-out samples with the baseline's prediction, where [`train_to_max_drop`] or
    /// [`path`] measured it.
    pub agreement: Option<f64>,
}

impl TrainReport {
    /// Rows whose last convex solve ended at a limit.
    pub fn rows_at_limit(&self) -> usize {
        self.rows.iter().filter(|r| r.at_limit).count()
    }

    /// The largest relative gap of the last convex solve of every row; `None` without a convex solve.
    pub fn max_relative_gap(&self) -> Option<f64> {
        self.rows.iter().filter_map(|r| r.relative_gap).reduce(f64::max)
    }

    /// Rows of cardinality that have a lower bound; `None` if none has.
    pub fn rows_bounded(&self) -> Option<usize> {
        self.distances().map(|d| d.len())
    }

    /// Rows of cardinality whose answers are proven optimal; `None` if no row has a bound.
    pub fn rows_proven(&self) -> Option<usize> {
        self.distances().map(|_| self.rows.iter().filter(|r| r.proven).count())
    }

    /// The middle one of the distances of rows to their lower bounds, the upper of two; `None` if no row has a bound.
    pub fn median_bound_distance(&self) -> Option<f64> {
        self.distances().map(|d| d[d.len() / 2])
    }

    /// The largest distance of a row to its lower bound; `None` if no row has a bound.
    pub fn max_bound_distance(&self) -> Option<f64> {
        self.distances().and_then(|d| d.last().copied())
    }

    /// All distances, smallest first.
    fn distances(&self) -> Option<Vec<f64>> {
        let mut distances: Vec<f64> = self.rows.iter().filter_map(|r| r.bound_distance).collect();
        distances.sort_unstable_by(f64::total_cmp);
        (!distances.is_empty()).then_some(distances)
    }

    /// RMS of the mismatch of all rows over the RMS of their targets: a unit that hardly fires hardly counts.
    pub fn refit_residual(&self) -> f64 {
        let residual: f64 = self.rows.iter().map(|r| (r.relative_residual * r.target_rms).powi(2)).sum();
        let energy: f64 = self.rows.iter().map(|r| r.target_rms.powi(2)).sum();
        if energy > 0.0 { (residual / energy).sqrt() } else { 0.0 }
    }
}

/// A model and what is known about it.
#[derive(Debug, Clone)]
pub struct Trained {
    /// The model.
    pub model: ImplicitModel,
    /// Its report.
    pub report: TrainReport,
}

/// Trains a model.
pub fn train(input: &TrainInput, settings: &TrainSettings, run: &mut Run) -> Result<Trained> {
    check(input, settings, run.threads)?;
    check_stages_here(input, settings, run)?;
    if settings.allocate > 0 && settings.target_sparsity.is_none() {
        return Err(Error::setting("allocate", "0 without a target sparsity", settings.allocate));
    }
    if settings.stages == Some(true) && settings.target_sparsity.is_none() {
        return Err(Error::setting("stages", "off without a target sparsity", "on"));
    }
    let trained = search::search(input, settings, run)?;
    match settings.robust_refit {
        Some(epsilon) => refit::bound_refit::refitted(trained, input, epsilon, settings.seed, run),
        None => Ok(trained),
    }
}

fn check(input: &TrainInput, settings: &TrainSettings, threads: Threads) -> Result<()> {
    check_settings(settings)?;
    let shape = input.source.shape();
    if let Some(baseline) = input.baseline
        && baseline.shape() != shape
    {
        return Err(Error::shape(
            "baseline",
            format!("{} inputs, {} states, {} outputs", shape.inputs, shape.states, shape.outputs),
            format!("{:?}", baseline.shape()),
        ));
    }
    if let Some(weights) = input.importance {
        let rows = layout(input).rows() + shape.outputs;
        if weights.len() != rows {
            return Err(Error::shape("row weights", rows, weights.len()));
        }
        if let Some(bad) = weights.iter().find(|w| !(w.is_finite() && **w >= 0.0)) {
            return Err(Error::setting("row weight", "zero or a positive number", bad));
        }
    }
    check_allocation(input, settings)?;
    check_stages(input, settings)?;
    plan::choice::check(input, settings)?;
    if let Some(epsilon) = settings.robust_refit {
        let Some(baseline) = input.baseline else {
            return Err(Error::setting("robust-refit", "a network, whose classes it keeps", "states alone"));
        };
        if !matches!(settings.connectivity, Connectivity::Baseline | Connectivity::Feedforward) {
            let expected = "connectivity baseline or feedforward: it needs a model without cycles";
            return Err(Error::setting("robust-refit", expected, epsilon));
        }
        refit::bound_refit::check(baseline, input, epsilon)?;
    }
    if let Some(layer) = layout(input).layers().iter().find(|l| !l.activation.is_non_expansive()) {
        let about = format!("layer {:?}, whose activation {} is expansive", layer.name, layer.activation);
        if let Some(kappa) = settings.kappa {
            return Err(Error::setting("kappa", format!("none with {about}: it would prove nothing"), kappa));
        }
        if let Connectivity::Full | Connectivity::NoSelfLoop = settings.connectivity {
            let expected = format!("feedforward or baseline with {about}, which no cycle may go through");
            return Err(Error::setting("connectivity", expected, "one with cycles"));
        }
    }
    plan::budget::check(input, settings, threads)
}

/// An allocation over layers moves the prices of a survey, and holds samples out.
fn check_allocation(input: &TrainInput, settings: &TrainSettings) -> Result<()> {
    let shares = input.baseline.is_some_and(shares_weights);
    let expected = match settings.allocate {
        0 => return Ok(()),
        _ if !shares => "0 for a network without convolutions or operators",
        _ if !matches!(settings.objective, Objective::Cardinality) => "0 without the penalty cardinality",
        _ if !settings.cascade => "0 without a cascade",
        _ if settings.robust_rounds > 0 => "0 with robust rounds, which price every weight",
        _ if input.source.samples() < search::allocate::LEAST_SAMPLES => {
            let expected = format!("0 with fewer than {} samples", search::allocate::LEAST_SAMPLES);
            return Err(Error::setting("allocate", expected, settings.allocate));
        }
        _ => return Ok(()),
    };
    Err(Error::setting("allocate", expected, settings.allocate))
}

/// Stages price non-zeros, and every one starts from a refitted model.
fn check_stages(input: &TrainInput, settings: &TrainSettings) -> Result<()> {
    let expected = match settings.stages {
        None | Some(false) => return Ok(()),
        _ if !matches!(settings.objective, Objective::Cardinality) => "off without the penalty cardinality",
        _ if refit::output_refit::rounds(input.baseline, settings) == 0 => {
            "off without a refit in the output metric (output-refit)"
        }
        _ if settings.robust_rounds > 0 => "off with robust rounds, which train the whole model again",
        _ => return Ok(()),
    };
    Err(Error::setting("stages", expected, "on"))
}

/// Workers walk through the layers of a network and take its outputs as they come out: those of a stage's model.
fn check_stages_here(input: &TrainInput, settings: &TrainSettings, run: &Run) -> Result<()> {
    if settings.stages == Some(true) && run.keep.delegate().is_some() && input.baseline.is_some_and(shares_weights) {
        let expected = "off for networks with convolutions or operators on a cluster";
        return Err(Error::setting("stages", expected, "on"));
    }
    Ok(())
}

/// What makes no sense where the sparsity is not one target: on a path, or where a drop decides.
fn check_untargeted(what: &str, settings: &TrainSettings) -> Result<()> {
    if let Some(target) = settings.target_sparsity {
        return Err(Error::setting("target-sparsity", format!("none for {what}"), target));
    }
    if settings.robust_rounds > 0 {
        return Err(Error::setting("robust", format!("0 for {what}"), settings.robust_rounds));
    }
    if let Some(epsilon) = settings.robust_refit {
        return Err(Error::setting("robust-refit", format!("none for {what}"), epsilon));
    }
    Ok(())
}

/// What makes no sense whatever is trained.
fn check_settings(settings: &TrainSettings) -> Result<()> {
    if let Device::Cuda(number) = settings.device {
        if !matches!(settings.objective, Objective::Cardinality) {
            let expected = "cpu or auto with a convex penalty or a method of your own: a GPU solves cardinality rows";
            return Err(Error::setting("device", expected, settings.device));
        }
        Cuda::open(number)?;
    }
    if settings.matching == Matching::Exact {
        // One convex solve is all there is: what follows it would undo the match, and the strength is no trade-off.
        let wants = |what: &str, got: String| Err(Error::setting("exact matching", what, got));
        match &settings.objective {
            Objective::Cardinality => return wants("a convex penalty", "cardinality".into()),
            Objective::Method(_) => return wants("a convex penalty", "a row method".into()),
            _ if settings.rounds != 1 => return wants("one round", format!("{} rounds", settings.rounds)),
            _ if settings.refit => return wants("no refit", "a refit".into()),
            _ if settings.cascade => return wants("no cascade", "a cascade".into()),
            _ if settings.output_refit.is_some_and(|rounds| rounds > 0) => {
                return wants("no refit in the output metric", "one".into());
            }
            _ if settings.target_sparsity.is_some() => {
                return wants("no target sparsity", "a target; the match decides the sparsity".into());
            }
            Objective::Convex(_) => {}
        }
    }
    if !(settings.strength > 0.0 && settings.strength.is_finite()) {
        return Err(Error::setting("strength", "a positive number", settings.strength));
    }
    if let Some(target) = settings.target_sparsity
        && !(target < 1.0 && target.is_finite())
    {
        return Err(Error::setting("target-sparsity", "a number below 1, such as 0.8", target));
    }
    if let Some(kappa) = settings.kappa
        && !(kappa > 0.0 && kappa < 1.0)
    {
        return Err(Error::setting("kappa", "a number between 0 and 1", kappa));
    }
    if let Matching::Relaxed { states, outputs } = settings.matching
        && !(states > 0.0 && outputs > 0.0 && states.is_finite() && outputs.is_finite())
    {
        return Err(Error::setting("lambda1, lambda2", "positive numbers", format!("{states}, {outputs}")));
    }
    if settings.rounds == 0 {
        return Err(Error::setting("rounds", "at least 1", 0));
    }
    if let Some(seconds) = settings.prove {
        if !(seconds >= 0.0 && seconds.is_finite()) {
            return Err(Error::setting("prove", "seconds a row", seconds));
        }
        if !matches!(settings.objective, Objective::Cardinality) {
            return Err(Error::unsupported(
                "a proof of rows that are not priced by their non-zeros",
                "use cardinality",
            ));
        }
    }
    if settings.positions == 0 {
        return Err(Error::setting("positions", "at least 1", 0));
    }
    Ok(())
}

/// Whether a model is walked through layer by layer: weights are shared, poolings or residual sums stand between, or operators.
fn shares_weights(model: &ImplicitModel) -> bool {
    !model.taps().is_empty() || model.layout().has_operators()
}

/// Whose rows are trained: the baseline's where weights are shared, which may split a map that its network declares.
fn layout<'a>(input: &'a TrainInput) -> &'a Layout {
    match input.baseline {
        Some(baseline) if shares_weights(baseline) => baseline.layout(),
        _ => input.source.layout(),
    }
}

/// The metadata every trained model carries but the names of layers that were left out.
fn metadata(input: &TrainInput, settings: &TrainSettings) -> ModelMetadata {
    let shape = input.source.shape();
    let dense = ((shape.states + shape.outputs) * (shape.states + shape.inputs)) as u64;
    let known = input.baseline.map(|b| b.metadata());
    ModelMetadata {
        kappa: settings.kappa,
        scaling: known.and_then(|m| m.scaling.clone()),
        baseline_nonzeros: Some(
            known.and_then(|m| m.baseline_nonzeros).or(input.source.baseline_nonzeros()).unwrap_or(dense),
        ),
        baseline_multiply_adds: known.and_then(|m| m.baseline_multiply_adds),
        ..ModelMetadata::default()
    }
}
