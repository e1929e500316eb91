//! ONNX files: the schema, reading networks, and writing models.

mod activations;
mod attention;
mod attributes;
mod constant;
mod einsum;
mod elementwise;
mod evaluate;
mod export;
mod external;
mod import;
mod linear;
mod logic;
mod lower;
mod nodes;
mod origin;
mod picks;
mod pool;
mod proto;
mod recognise;
mod resize;
mod signature;
mod tensor;
mod transposed;
mod views;

#[cfg(test)]
mod tests;

pub use export::{OnnxSettings, export_onnx, export_onnx_like, to_onnx};
pub use import::{OnnxFile, OnnxSelection, UnsupportedNode};
