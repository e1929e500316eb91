//! ONNX files: the schema, and reading networks.

mod attributes;
mod dimensions;
mod import;
mod nodes;
pub(crate) mod proto;
mod tensor;
