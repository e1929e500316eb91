//! The main entry point: from a trained network and some of its inputs to a sparse model and its report, in one call.
//!
//! ```
//! use simplicit::compress::{Settings, compress};
//! use simplicit::layout::Activation;
//! use simplicit::linalg::Matrix;
//! use simplicit::network::{Network, Shape};
//! use simplicit::random::Random;
//! use simplicit::train::Run;
//!
//! # fn main() -> simplicit::Result<()> {
//! let mut random = Random::new(0);
//! let mut dense = |rows, cols| Matrix::from_fn(rows, cols, |_, _| random.normal() as f32 / (cols as f32).sqrt());
//! let network = Network::builder(Shape::Vector(20))? // yours: Network::from_onnx("network.onnx")?
//!     .linear(dense(16, 20), None)?
//!     .activation(Activation::Relu)?
//!     .linear(dense(4, 16), None)?
//!     .build()?;
//! let inputs = dense(300, 20); // yours: Inputs::open("images.npy", …)?; one sample a row, no labels
//!
//! let sparse = compress(&network, &inputs, &Settings::to_sparsity(0.5), &mut Run::default())?;
//! assert!((sparse.model.sparsity().sparsity - 0.5).abs() < 0.05);
//! println!("error of the outputs: {:.1} %", 100.0 * sparse.output_error);
//! # Ok(())
//! # }
//! ```

use std::ops::Range;

use crate::arrays::{DeviceInputs, InputSource, Preprocessing};
use crate::backend::Device;
use crate::equilibrium::{Equilibrium, EquilibriumSettings};
use crate::evaluate::{OutputErrors, error_on_gpu, error_on_states};
use crate::linalg::Matrix;
use crate::model::ImplicitModel;
use crate::network::Network;
use crate::parallel::Threads;
use crate::states::{Collected, StateMap, StateSlice, StateSource};
use crate::train::{
    Phase, Progress, Run, SumsTask, TrainInput, TrainReport, TrainSettings, estimate, importance_on, train,
    train_to_max_drop,
};
use crate::{Error, Result};

/// Draws from the network's softmax per sample. With this many, the noise of the row weights is far below their
/// spread.
pub const DRAWS: usize = 4;
/// Samples for the row weights of a network with feature maps, and draws for each sample. Few suffice, because each
/// is an average over many positions.
pub const WEIGHED: usize = 1000;
const MAP_DRAWS: usize = 2;
/// One sample in this many is held out where results are judged on held-out samples, and at least this number.
const HELD_OUT_SHARE: usize = 10;
const HELD_OUT_LEAST: usize = 100;
/// The most bytes of inputs, and of states, that are held in memory.
const HELD: u64 = 256 << 20;

/// The network or model that is made sparse.
#[derive(Clone, Copy)]
pub enum Baseline<'a> {
    /// A trained network.
    Network(&'a Network),
    /// An implicit model instead of a network; it has no row weights.
    Model(&'a ImplicitModel),
}

impl<'a> From<&'a Network> for Baseline<'a> {
    fn from(network: &'a Network) -> Self {
        Self::Network(network)
    }
}

impl<'a> From<&'a ImplicitModel> for Baseline<'a> {
    fn from(model: &'a ImplicitModel) -> Self {
        Self::Model(model)
    }
}

/// The settings of [`compress()`]. The default trains at a fixed price of a non-zero; most callers want
/// [`Settings::to_sparsity`].
#[derive(Debug, Clone)]
pub struct Settings {
    /// The settings of the training, with its target sparsity.
    pub train: TrainSettings,
    /// Instead of a target sparsity, the largest share of disagreement, in percentage points: the sparsest model is
    /// sought whose predictions differ from the baseline's on at most this share of the held-out samples (the last
    /// tenth).
    pub max_drop: Option<f64>,
    /// Whether rows are weighed by the effect of their errors on the outputs. Default on; networks only.
    pub row_weights: bool,
    /// Rescale the states so that ‖A‖∞ is below this number: before a training that has a κ, otherwise after it.
    pub rescale: Option<f64>,
    /// The paper's layered scaling: the weights of every layer are divided by this factor times the largest ‖W‖∞ of
    /// all layers.
    pub gamma: Option<f64>,
    /// How raw inputs became those that are given; stored in the model.
    pub preprocessing: Preprocessing,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            train: TrainSettings::default(),
            max_drop: None,
            row_weights: true,
            rescale: None,
            gamma: None,
            preprocessing: Preprocessing::identity(),
        }
    }
}

impl Settings {
    /// Settings for a target sparsity: this share of the baseline's non-zeros is removed.
    pub fn to_sparsity(share: f64) -> Self {
        let train = TrainSettings { target_sparsity: Some(share), ..TrainSettings::default() };
        Self { train, ..Self::default() }
    }
}

/// A sparse model and measurements of it.
#[derive(Debug, Clone)]
pub struct Compressed {
    /// The model.
    pub model: ImplicitModel,
    /// What training reports, row by row.
    pub report: TrainReport,
    /// RMS of the change of the outputs divided by the RMS of the outputs, on the given samples.
    pub output_error: f64,
    /// Number of given samples whose equilibrium was not found; 0 in models without cycles.
    pub not_converged: u64,
}

/// Makes a network or a model sparse, on inputs without labels.
pub fn compress<'b>(
    baseline: impl Into<Baseline<'b>>,
    inputs: &dyn InputSource,
    settings: &Settings,
    run: &mut Run,
) -> Result<Compressed> {
    let baseline = baseline.into();
    let held = held_inputs(&baseline, inputs, settings)?;
    // If the inputs of all samples are held in memory, their states are too, up to this many bytes.
    let states = held.as_ref().map_or(0, |_| held_bytes(settings));
    let inputs = held.as_ref().map_or(inputs, |rows| rows as &dyn InputSource);
    let part = settings.training_part(inputs.samples())?.end;
    let own = match baseline {
        Baseline::Network(network) => ImplicitModel::from_network(network)?,
        Baseline::Model(model) => model.clone(),
    };
    let moved = moved_from(baseline, &own, settings)?;
    let weights = match baseline {
        Baseline::Network(network) if settings.row_weights => {
            if settings.train.work.memory.is_some() {
                // If there is too little memory, this is reported before the first sample is read, not after minutes
                // of work on row weights.
                let all = Collected::new(network, inputs)?;
                let source = &StateSlice::new(&all, 0..part)?;
                let preprocessing = Preprocessing::identity();
                let input = TrainInput { source, baseline: Some(&own), importance: None, preprocessing };
                estimate(&input, &settings.train, run.threads)?;
            }
            (run.progress)(Progress::Phase(Phase::RowWeights));
            Some(row_weights(
                network,
                inputs,
                part,
                moved.as_ref(),
                (settings.train.work.seed, settings.train.work.device),
                run,
            )?)
        }
        _ => None,
    };
    let weights = weights.as_deref();
    match (moved, baseline) {
        (None, Baseline::Network(network)) => {
            on_source(&Collected::new(network, inputs)?.keeping(states), Some(&own), weights, settings, run)
        }
        (moved, _) => {
            let model = moved.as_ref().unwrap_or(&own);
            let alone = EquilibriumSettings { threads: Threads::one(), ..EquilibriumSettings::default() };
            let equilibrium = Equilibrium::new(model, alone)?;
            on_source(&Collected::new(&equilibrium, inputs)?.keeping(states), Some(model), weights, settings, run)
        }
    }
}

/// All inputs as a matrix, if they are small: every model of a search over dense layers reads all of them.
fn held_inputs(baseline: &Baseline, inputs: &dyn InputSource, settings: &Settings) -> Result<Option<Matrix<f32>>> {
    let layout = match baseline {
        Baseline::Network(network) => network.layout(),
        Baseline::Model(model) => model.layout(),
    };
    let bytes = 4 * (inputs.samples() * inputs.features()) as u64;
    let walked = layout.has_operators() || layout.layers().iter().any(|layer| layer.map.is_some());
    if walked || bytes > held_bytes(settings) { Ok(None) } else { inputs.rows(0..inputs.samples()).map(Some) }
}

fn held_bytes(settings: &Settings) -> u64 {
    settings.train.work.memory.map_or(HELD, |budget| HELD.min(budget / 8))
}

/// The model whose states are matched, if it differs from the baseline: the baseline in other coordinates, for gamma,
/// or for rescaling before a training with κ.
pub fn moved<'b>(baseline: impl Into<Baseline<'b>>, settings: &Settings) -> Result<Option<ImplicitModel>> {
    match baseline.into() {
        _ if settings.gamma.is_none() && settings.rescale.is_none() => Ok(None),
        Baseline::Network(network) => moved_from(network.into(), &ImplicitModel::from_network(network)?, settings),
        Baseline::Model(model) => moved_from(model.into(), model, settings),
    }
}

fn moved_from(baseline: Baseline, own: &ImplicitModel, settings: &Settings) -> Result<Option<ImplicitModel>> {
    Ok(match (settings.gamma, settings.rescale, baseline) {
        (Some(_), Some(kappa), _) => {
            return Err(Error::setting("rescale", "none with gamma: both choose the coordinates", kappa));
        }
        (Some(gamma), None, Baseline::Network(network)) => Some(ImplicitModel::from_network_scaled(network, gamma)?),
        (Some(gamma), None, Baseline::Model(_)) => {
            return Err(Error::setting("gamma", "a network, whose layers are scaled", gamma));
        }
        (None, Some(kappa), _) if settings.train.allowed.kappa.is_some() => Some(own.rescale(kappa)?.model),
        _ => None,
    })
}

/// As [`compress()`], from states that were computed elsewhere.
pub fn compress_states(states: &dyn StateSource, settings: &Settings, run: &mut Run) -> Result<Compressed> {
    if let Some(gamma) = settings.gamma {
        return Err(Error::setting("gamma", "a network, whose layers are scaled", gamma));
    }
    on_source(states, None, None, settings, run)
}

impl Settings {
    /// The samples that are trained on; the others are for judging.
    fn training_part(&self, total: usize) -> Result<Range<usize>> {
        if self.max_drop.is_none() { Ok(0..total) } else { Ok(0..total - held_out(total)?) }
    }
}

/// How many of `total` samples are held out to judge a model that was trained on the others; these are the last ones.
pub fn held_out(total: usize) -> Result<usize> {
    let held_out = (total / HELD_OUT_SHARE).max(HELD_OUT_LEAST);
    if total < 2 * held_out {
        let expected = format!("at least {}, of which the last are held out", 2 * HELD_OUT_LEAST);
        return Err(Error::setting("samples", expected, total));
    }
    Ok(held_out)
}

/// Output-aware weights from the first `part` samples, in the coordinates of `moved`.
fn row_weights(
    network: &Network,
    inputs: &dyn InputSource,
    part: usize,
    moved: Option<&ImplicitModel>,
    (seed, device): (u64, Device),
    run: &Run,
) -> Result<Vec<f64>> {
    let maps = network.layout().layers().iter().any(|l| l.map.is_some());
    let (part, draws) = if maps { (part.min(WEIGHED), MAP_DRAWS) } else { (part, DRAWS) };
    let mut weights = importance_on(device, network, &First(inputs, part), draws, seed, run)?;
    if let Some((moved, scaling)) = moved.and_then(|m| Some((m, m.metadata().scaling.as_ref()?))) {
        // baseline = factor × stored, so the square of a stored error counts factor² times. A channel has one factor.
        let layers = moved.layout().layers().iter();
        let units = layers.flat_map(|l| std::iter::repeat_n(l.size / l.rows().max(1), l.rows()));
        let first = units.scan(0, |next, units| Some(std::mem::replace(next, *next + units)));
        let factors = first.map(|unit| scaling.states[unit]).chain(std::iter::repeat(scaling.outputs));
        weights.iter_mut().zip(factors).for_each(|(w, f)| *w *= f * f);
    }
    Ok(weights)
}

fn on_source(
    source: &dyn StateSource,
    baseline: Option<&ImplicitModel>,
    weights: Option<&[f64]>,
    settings: &Settings,
    run: &mut Run,
) -> Result<Compressed> {
    let total = source.samples();
    let part = settings.training_part(total)?;
    let judge = part.end..total;
    let training = StateSlice::new(source, part)?;
    let preprocessing = settings.preprocessing.clone();
    let input = TrainInput { source: &training, baseline, importance: weights, preprocessing };
    (run.progress)(Progress::Phase(Phase::Training { groups: source.layout().layers().len() + 1 }));
    let trained = match settings.max_drop {
        None => train(&input, &settings.train, run)?,
        Some(drop) => train_to_max_drop(&input, &StateSlice::new(source, judge)?, drop, &settings.train, run)?,
    };
    (run.progress)(Progress::Phase(Phase::Measuring));
    let on_gpu = error_on_gpu(settings.train.work.device, &trained.model, baseline, source, run.threads, run.cancel)?;
    let (output_error, not_converged) = match on_gpu {
        Some(found) => found,
        None => match error_elsewhere(&trained.model, baseline, source, run)? {
            Some(found) => found,
            None => error_on_states(&trained.model, baseline, source, run.threads, run.cancel)?,
        },
    };
    let moved_before = baseline.is_some() && settings.train.allowed.kappa.is_some();
    let model = match settings.rescale.filter(|_| !moved_before) {
        Some(kappa) => trained.model.rescale(kappa)?.model,
        None => trained.model,
    };
    Ok(Compressed { model, report: trained.report, output_error, not_converged })
}

/// [`error_on_states`] by a run's delegate, with the same bits; `None` if this process has to compute it.
fn error_elsewhere(
    model: &ImplicitModel,
    baseline: Option<&ImplicitModel>,
    source: &dyn StateSource,
    run: &Run,
) -> Result<Option<(f64, u64)>> {
    let baseline = baseline.filter(|b| OutputErrors::need_inputs_alone(b));
    let (Some(delegate), Some(baseline)) = (run.keep.delegate(), baseline) else { return Ok(None) };
    let (baseline, model) = (Box::new(baseline.clone()), Box::new(model.clone()));
    let task = SumsTask::Errors { samples: source.samples(), baseline, model };
    let mut total = [0.0; 3];
    delegate.sums(&task, &mut |_, sums| {
        if sums.len() != total.len() {
            return Err(Error::shape("errors of a block", total.len(), sums.len()));
        }
        total.iter_mut().zip(sums).for_each(|(total, sum)| *total += sum);
        Ok(())
    })?;
    Ok(Some(OutputErrors::total(total)))
}

/// The first samples of some inputs.
pub struct First<'a>(pub &'a dyn InputSource, pub usize);

impl InputSource for First<'_> {
    fn samples(&self) -> usize {
        self.1
    }

    fn features(&self) -> usize {
        self.0.features()
    }

    fn rows(&self, samples: Range<usize>) -> Result<Matrix<f32>> {
        self.0.rows(samples)
    }

    fn on_device(&self) -> Option<&DeviceInputs> {
        self.0.on_device()
    }
}
