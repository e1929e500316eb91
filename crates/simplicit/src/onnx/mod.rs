//! ONNX files: the schema, and reading networks.

mod activations;
mod attributes;
pub(crate) mod constant;
mod elementwise;
mod evaluate;
pub(crate) mod external;
mod import;
mod linear;
mod lower;
mod nodes;
mod origin;
mod pool;
pub(crate) mod proto;
mod recognise;
mod resize;
pub(crate) mod tensor;
mod views;

#[cfg(test)]
mod tests;

pub(crate) use origin::{Origin, Traced};

pub use import::{OnnxFile, OnnxSelection, UnsupportedNode};
