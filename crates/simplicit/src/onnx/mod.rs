//! ONNX files: the schema.

pub(crate) mod proto;
