//! How to train: what is asked for, and by subject how it is reached.

use std::sync::Arc;

use crate::backend::{Cpu, Device, GroupBackend};
use crate::problem::{Connectivity, Matching, Penalty};
use crate::solver::{CardinalitySettings, SolverSettings};
use crate::train::RowMethod;

/// How to train. Every field has the default of [`TrainSettings::default`]; a setting that does not apply is an error.
///
/// ```
/// use simplicit::train::{Bounds, RowSettings, TrainSettings};
///
/// let settings = TrainSettings {
///     target_sparsity: Some(0.8),
///     rows: RowSettings { bounds: Some(Bounds::All), ..Default::default() },
///     ..Default::default()
/// };
/// # assert_eq!(settings.rows.rounds, 3);
/// ```
#[derive(Debug, Clone)]
pub struct TrainSettings {
    /// What is minimised. Default: cardinality.
    pub objective: Objective,
    /// Factor on the penalty, or the price of a non-zero. Default 2e-6. With a target it is where the search starts; with
    /// feature maps and cardinality a survey says where, whatever stands here.
    pub strength: f64,
    /// Share of the baseline's non-zeros to remove, over the whole model.
    pub target_sparsity: Option<f64>,
    /// Which weights a model may have.
    pub allowed: AllowedWeights,
    /// What a row's problem is, and how it is solved.
    pub rows: RowSettings,
    /// How rows become one model.
    pub model: ModelSettings,
    /// On which samples and which machine the work is done.
    pub work: WorkSettings,
}

impl Default for TrainSettings {
    fn default() -> Self {
        Self {
            objective: Objective::Cardinality,
            strength: 2e-6,
            target_sparsity: None,
            allowed: AllowedWeights::default(),
            rows: RowSettings::default(),
            model: ModelSettings::default(),
            work: WorkSettings::default(),
        }
    }
}

/// Which weights a model may have.
#[derive(Debug, Clone)]
pub struct AllowedWeights {
    /// Which connections are allowed. Default: the baseline's.
    pub connectivity: Connectivity,
    /// Layers to train, by name (`*` stands for anything, a name also for everything below it) or by kind (`dense`,
    /// `convolution`, `grouped convolution`). The others keep the baseline's weights. Default: all.
    pub include: Vec<String>,
    /// Layers not to train, said in the same way. Default: none.
    pub exclude: Vec<String>,
    /// How many maps before a feature map `feedforward` may draw taps from. Default 2.
    pub reach: usize,
    /// ‖A‖∞ ≤ κ on the stored model. Default: none.
    pub kappa: Option<f64>,
    /// A constant for every row, also where the baseline has no bias. Default off.
    pub bias: bool,
}

impl Default for AllowedWeights {
    fn default() -> Self {
        let connectivity = Connectivity::Baseline;
        Self { connectivity, include: Vec::new(), exclude: Vec::new(), reach: 2, kappa: None, bias: false }
    }
}

/// What a row's problem is, and how it is solved.
#[derive(Debug, Clone)]
pub struct RowSettings {
    /// Exact or relaxed. Default: relaxed, λ₁ = λ₂ = 1. Exact needs a convex penalty, one round, no refit, no cascade
    /// and no target; rows that no weights match are [`Error::Infeasible`](crate::Error::Infeasible).
    pub matching: Matching,
    /// Unit-RMS features and targets (default), or the paper's sums in raw units. Must be on with row weights, which set the
    /// units of every row.
    pub normalise: bool,
    /// Convex solves with reweighting between them; 1 is a single solve. Default 3. Cardinality needs none.
    pub rounds: usize,
    /// Least squares on the support at the end. Default on; cardinality rows always end so.
    pub refit: bool,
    /// When a convex row counts as solved.
    pub solver: SolverSettings,
    /// How hard cardinality tries.
    pub cardinality: CardinalitySettings,
    /// Which cardinality rows get a lower bound. Default: as many as cost less than training does, by counted
    /// operations: of every group half of what solving its rows once takes, and a little more for the first ones.
    pub bounds: Option<Bounds>,
    /// Seconds for each cardinality row to prove its answer optimal, once the model is found. Default: none, a bound only.
    pub prove: Option<f64>,
}

impl Default for RowSettings {
    fn default() -> Self {
        Self {
            matching: Matching::default(),
            normalise: true,
            rounds: 3,
            refit: true,
            solver: SolverSettings::default(),
            cardinality: CardinalitySettings::default(),
            bounds: None,
            prove: None,
        }
    }
}

/// How rows become one model.
#[derive(Debug, Clone)]
pub struct ModelSettings {
    /// Later rows see the states of the model built so far. Default on.
    pub cascade: bool,
    /// Whether targets are approached in stages, each of which makes the refitted model before it sparser. Needs
    /// cardinality, a refit in the output metric and no robust rounds. Default: wherever that is so but for models with
    /// convolutions or operators.
    pub stages: Option<bool>,
    /// Rounds in which layers' prices are moved by what their non-zeros are worth to the outputs of samples that were not
    /// fitted, on rough models. Needs cardinality, a target, a cascade and a model without cycles. Default 0.
    pub allocate: usize,
    /// How many joints ahead values are matched when the blocks between two joints are refitted together, on the support that
    /// was found; a joint is a layer that everything computed later goes through, such as a residual sum. 0 is no such refit.
    /// Needs a network without cycles. Default 0.
    pub reconstruct: usize,
    /// Rounds of the refit of all non-zeros together, in the metric of the output; 0 is none. Default: 4, and none for
    /// models with convolutions or operators and with exact matching.
    pub output_refit: Option<usize>,
    /// Times that the whole model is trained again with every weight priced by what it adds to the certificate of the
    /// last one. Default 0.
    pub robust_rounds: usize,
    /// ε in raw·scale units at which the non-zeros are refitted in the end, so that linear bounds certify more. Default:
    /// none.
    pub robust_refit: Option<f64>,
}

impl Default for ModelSettings {
    fn default() -> Self {
        Self {
            cascade: true,
            stages: None,
            allocate: 0,
            reconstruct: 0,
            output_refit: None,
            robust_rounds: 0,
            robust_refit: None,
        }
    }
}

/// On which samples and which machine the work is done.
#[derive(Debug, Clone)]
pub struct WorkSettings {
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
    /// Who solves groups of cardinality rows that no GPU takes. Default: this machine's processor.
    pub backend: Arc<dyn GroupBackend>,
}

impl Default for WorkSettings {
    fn default() -> Self {
        Self { positions: 64, seed: 0, device: Device::Cpu, memory: None, backend: Arc::new(Cpu) }
    }
}

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
