//! The settings of training: what is asked for and, by subject, how it is reached.

use std::sync::Arc;

use crate::backend::{Cpu, Device, GroupBackend};
use crate::problem::{Connectivity, Matching, Penalty};
use crate::solver::{CardinalitySettings, SolverSettings};
use crate::train::RowMethod;

/// The settings of training. Every field has the default of [`TrainSettings::default`]; a setting that does not apply
/// is an error.
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
    /// Factor on the penalty, or the price of a non-zero. Default 2e-6. With a target, the search starts there,
    /// except that with feature maps and cardinality a survey finds the starting point and this number is not used.
    pub strength: f64,
    /// Share of the baseline's non-zeros to remove, over the whole model.
    pub target_sparsity: Option<f64>,
    /// The weights that a model may have.
    pub allowed: AllowedWeights,
    /// What the problem of a row is, and how it is solved.
    pub rows: RowSettings,
    /// How rows become one model.
    pub model: ModelSettings,
    /// Which samples are used, and how the machine does the work.
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

/// The weights that a model may have.
#[derive(Debug, Clone)]
pub struct AllowedWeights {
    /// The connections that are allowed. Default: the baseline's.
    pub connectivity: Connectivity,
    /// Layers to train, by name (`*` stands for anything, a name also for everything below it) or by kind (`dense`,
    /// `convolution`, `grouped convolution`). The others keep the baseline's weights. Default: all.
    pub include: Vec<String>,
    /// Layers not to train, given in the same way. Default: none.
    pub exclude: Vec<String>,
    /// How many maps before a feature map `feedforward` may draw taps from. Default 2.
    pub reach: usize,
    /// κ of the bound ‖A‖∞ ≤ κ on the stored model. Default: no bound.
    pub kappa: Option<f64>,
    /// Whether every row has a constant, also if the baseline has no bias. Default off.
    pub bias: bool,
}

impl Default for AllowedWeights {
    fn default() -> Self {
        let connectivity = Connectivity::Baseline;
        Self { connectivity, include: Vec::new(), exclude: Vec::new(), reach: 2, kappa: None, bias: false }
    }
}

/// What the problem of a row is, and how it is solved.
#[derive(Debug, Clone)]
pub struct RowSettings {
    /// Exact or relaxed. Default: relaxed, λ₁ = λ₂ = 1. Exact needs a convex penalty, one round, no refit, no cascade
    /// and no target; rows that no weights match are [`Error::Infeasible`](crate::Error::Infeasible).
    pub matching: Matching,
    /// Whether features and targets have unit RMS (default), or sums are those of the paper, in raw units. Must be on
    /// with row weights, which set the units of every row.
    pub normalise: bool,
    /// Number of convex solves, with reweighting between them; 1 means a single solve. Default 3. Cardinality does
    /// not use it.
    pub rounds: usize,
    /// Whether least squares on the support come at the end. Default on; cardinality rows always end with them.
    pub refit: bool,
    /// When a convex row counts as solved.
    pub solver: SolverSettings,
    /// How much effort cardinality rows get.
    pub cardinality: CardinalitySettings,
    /// Which cardinality rows get a lower bound. Default: as many as cost less than training does, by counted
    /// operations: for every group half of the work of solving its rows once, and a little more for the first ones.
    pub bounds: Option<Bounds>,
    /// Seconds that are spent on each cardinality row to prove its answer optimal, after the model is found. Default:
    /// none, so that there is only a bound.
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
    /// Whether later rows are fitted to the states of the model built so far. Default on.
    pub cascade: bool,
    /// Whether targets are approached in stages, each of which makes the refitted model before it sparser. Needs
    /// cardinality, a refit in the output metric and no robust rounds. Default: on wherever these conditions hold,
    /// except for models with convolutions or operators.
    pub stages: Option<bool>,
    /// Rounds in which the prices of layers are changed by how much their non-zeros are worth to the outputs of
    /// held-out samples, measured on rough models. Needs cardinality, a target, a cascade and a model without cycles.
    /// Default 0.
    pub allocate: usize,
    /// How many joints ahead values are matched when the blocks between two joints are refitted together, on the
    /// support that was found; a joint is a layer that everything computed later goes through, such as a residual
    /// sum. 0 means no such refit. Needs a network without cycles. Default 0.
    pub reconstruct: usize,
    /// Rounds of the refit of all non-zeros together, in the metric of the output; 0 means none. Default: 4, but none
    /// for models with convolutions or operators, and with exact matching.
    pub output_refit: Option<usize>,
    /// How many times the whole model is trained again, with every weight priced by what it adds to the certificate
    /// of the last model. Default 0.
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

/// Which samples are used, and how the machine does the work.
#[derive(Debug, Clone)]
pub struct WorkSettings {
    /// Positions of a feature map that every sample gives to the statistics; more if that gives fewer than 20 samples
    /// per feature. Default 64.
    pub positions: usize,
    /// Seed of the choice of positions. Default 0.
    pub seed: u64,
    /// The device that runs the layers of networks with feature maps, gathers their statistics and solves cardinality
    /// rows. Default: the CPU, whose results are the same to the bit on every machine. Convex rows and bounds always
    /// run on the CPU.
    pub device: Device,
    /// Bytes that this process may hold; beyond that, layers of all samples go to a file. The bits of results do not
    /// depend on it. Default: half of what is free when training begins. An error if the largest group of rows alone
    /// needs more.
    pub memory: Option<u64>,
    /// The solver of groups of cardinality rows that no GPU solves. Default: this machine's processor.
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
    /// A convex penalty; every row is certified.
    Convex(Arc<dyn Penalty>),
    /// The number of non-zeros, each of which has a price.
    Cardinality,
    /// A row method of the user's own; its rows have no bound and no gap.
    Method(Arc<dyn RowMethod>),
}

/// Which cardinality rows get a lower bound; each takes a convex solve.
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
