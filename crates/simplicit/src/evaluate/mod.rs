//! What a model is worth: accuracy, where it was lost, how far the outputs moved.

mod accuracy;
mod layers;

pub use accuracy::{ClassChange, accuracy, agreement, class_changes, equilibrium_error, predictions};
pub use layers::{LayerError, layer_errors};
