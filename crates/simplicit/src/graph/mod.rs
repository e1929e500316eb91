//! Definitions that networks and models share: shapes of values, and the operators between linear maps.
//!
//! A value is what one sample has at a node. Its dimensions are those that ONNX gives it for a batch of one sample,
//! the leading 1 included; so axes have the same numbers as in the file, also where a network folds the batch into
//! another axis (windows of an attention, for example). Samples never mix: a batch is run sample by sample, or side
//! by side.

mod dims;
pub(crate) mod error_function;
mod ops;

pub use dims::Dims;
pub(crate) use ops::bounds::Shape as BoundShape;
pub(crate) use ops::chooses_a_row;
pub use ops::{Binary, Pooling, Reduction, Structure, Unary, Value};
