//! Measurements of a model: accuracy, where it was lost, how far the outputs moved, the rank of A.

mod accuracy;
mod divergence;
mod layers;
mod on_states;
mod ranges;
mod rank;

pub use accuracy::{
    ClassChange, NO_CLASS, accuracy, agreement, class_changes, equilibrium_error, mean_squared_error, predictions,
    top_accuracy,
};
pub use divergence::divergence;
pub(crate) use divergence::{log_sum_exp, row_divergence};
pub use layers::{LayerError, layer_errors};
pub(crate) use on_states::{OutputErrors, error_on_gpu, error_on_states};
pub use ranges::state_ranges;
pub use rank::{Rank, rank};
