//! ONNX files: the schema, and reading networks.

mod attributes;
mod axes;
mod dimensions;
mod import;
mod nodes;
pub(crate) mod proto;
mod tensor;
mod weights;

#[cfg(test)]
mod tests;
