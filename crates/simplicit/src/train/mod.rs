//! The SIM algorithm: from states to a sparse implicit model and its report.
//!
//! Rows are solved in groups that share a design: layer by layer for acyclic connectivity (with the cascade, each
//! layer sees the states of the model built so far), all states at once for cyclic connectivity. The steps are the
//! same for every objective: statistics, row problems, solve, reweight, refit, round to f32.
//!
//! Convolutions are treated in the same way: a row is an output channel, its features are taps, its samples are
//! positions.

mod block_source;
mod blocks;
mod check;
mod checkpoint;
mod delegate;
mod evidence;
mod fit;
mod keep;
mod key;
mod plan;
mod refit;
mod report;
mod rows;
mod run;
mod search;
mod settings;

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
pub use key::Key;
pub use plan::estimate::{Estimate, estimate};
pub use refit::bound_refit::BoundRefit;
pub use refit::output_refit::OutputRefit;
pub use refit::reconstruct::Reconstruction;
pub use report::{TrainReport, TriedModel};
pub use rows::build::RowReport;
pub use rows::method::{RowGroup, RowMethod};
pub use run::{Phase, Progress, Run};
pub use search::Found;
pub use search::allocate::Allocation;
pub use search::max_drop::train_to_max_drop;
pub use search::path::path;
pub use settings::{AllowedWeights, Bounds, ModelSettings, Objective, RowSettings, TrainSettings, WorkSettings};

use crate::Result;
use crate::arrays::Preprocessing;
use crate::layout::Layout;
use crate::model::{ImplicitModel, ModelMetadata};
use crate::states::StateSource;

/// The data that training starts from.
pub struct TrainInput<'a> {
    /// The samples and their states.
    pub source: &'a dyn StateSource,
    /// The baseline as an implicit model: its connections, the weights to start from, and the counts to compare with.
    /// If it has feature maps, it is also run, layer by layer.
    pub baseline: Option<&'a ImplicitModel>,
    /// λ_i per row of the layout, then per output; see [`importance`].
    pub importance: Option<&'a [f64]>,
    /// How raw inputs become u; stored in the model.
    pub preprocessing: Preprocessing,
}

impl TrainInput<'_> {
    /// The same input with other row weights, if there are any.
    fn weighed<'a>(&'a self, importance: Option<&'a [f64]>) -> TrainInput<'a> {
        TrainInput { importance: importance.or(self.importance), preprocessing: self.preprocessing.clone(), ..*self }
    }
}

/// A model and its report.
#[derive(Debug, Clone)]
pub struct Trained {
    /// The model.
    pub model: ImplicitModel,
    /// Its report.
    pub report: TrainReport,
}

/// Trains a model.
pub fn train(input: &TrainInput, settings: &TrainSettings, run: &mut Run) -> Result<Trained> {
    check::training(input, settings, run.threads)?;
    check::for_a_target(settings)?;
    let trained = search::search(input, settings, run)?;
    match settings.model.robust_refit {
        Some(epsilon) => refit::bound_refit::refitted(trained, input, epsilon, settings.work.seed, run),
        None => Ok(trained),
    }
}

/// Whether a model is walked through layer by layer: because weights are shared, or because of poolings, residual
/// sums or operators in between.
fn shares_weights(model: &ImplicitModel) -> bool {
    !model.taps().is_empty() || model.layout().has_operators()
}

/// The layout whose rows are trained: the baseline's if weights are shared, which may split a map that its network
/// declares.
fn layout<'a>(input: &'a TrainInput) -> &'a Layout {
    match input.baseline {
        Some(baseline) if shares_weights(baseline) => baseline.layout(),
        _ => input.source.layout(),
    }
}

/// The metadata that every trained model has, except for the names of layers that were left out.
fn metadata(input: &TrainInput, settings: &TrainSettings) -> ModelMetadata {
    let shape = input.source.shape();
    let dense = ((shape.states + shape.outputs) * (shape.states + shape.inputs)) as u64;
    let known = input.baseline.map(|b| b.metadata());
    ModelMetadata {
        kappa: settings.allowed.kappa,
        scaling: known.and_then(|m| m.scaling.clone()),
        baseline_nonzeros: Some(
            known.and_then(|m| m.baseline_nonzeros).or(input.source.baseline_nonzeros()).unwrap_or(dense),
        ),
        baseline_multiply_adds: known.and_then(|m| m.baseline_multiply_adds),
        ..ModelMetadata::default()
    }
}
