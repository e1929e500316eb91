//! ONNX files: the schema, and reading networks.

mod activations;
mod attributes;
mod constant;
mod elementwise;
mod evaluate;
mod external;
mod import;
mod linear;
mod lower;
mod nodes;
mod pool;
pub(crate) mod proto;
mod recognise;
mod tensor;
mod views;

#[cfg(test)]
mod tests;

pub use import::{OnnxFile, OnnxSelection, UnsupportedNode};
