//! Export to ONNX: a model without cycles layer by layer as Gemm, Conv, pooling, activations and the operators of its
//! network; cycles as a Loop.
//!
//! Initialisers are dense f32, which every runtime reads and which takes 4 bytes per entry of every block, zero or
//! not; our own model file is smaller. The graph takes inputs that are already preprocessed.

mod activation;
mod cycles;
mod layers;
mod like;
mod structure;
mod writer;

pub use like::export_onnx_like;

use std::path::Path;

use prost::Message;

use super::proto::{GraphProto, ModelProto, OperatorSetIdProto};
use crate::files::write_bytes_atomically;
use crate::model::ImplicitModel;
use crate::{Error, Result};
use writer::{Writer, floats, value};

/// Opset 17 and IR 8, which every runtime since 2022 can read.
const OPSET: i64 = 17;
const IR_VERSION: i64 = 8;

/// The conditions under which the Loop of a cycle stops.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OnnxSettings {
    /// The certified absolute distance of the states from the equilibrium.
    pub tolerance: f64,
    /// The most steps; an ONNX graph cannot report that it reached this limit.
    pub max_iterations: usize,
}

impl Default for OnnxSettings {
    fn default() -> Self {
        Self { tolerance: 1e-7, max_iterations: 10_000 }
    }
}

/// Writes the bytes of [`to_onnx`] to a file, whole or not at all.
pub fn export_onnx(model: &ImplicitModel, path: impl AsRef<Path>, settings: OnnxSettings) -> Result<()> {
    write_bytes_atomically(path, &to_onnx(model, settings)?)
}

/// The bytes of an ONNX file with input `u` (batch × p, preprocessed; batch × channels × height × width where a
/// convolution reads it in that shape) and output `y` (batch × q).
///
/// Cycles run in double precision by plain Picard steps, all samples together, until the slowest is within the
/// tolerance; a cycle whose contraction cannot be shown is refused.
pub fn to_onnx(model: &ImplicitModel, settings: OnnxSettings) -> Result<Vec<u8>> {
    let shape = model.shape();
    if shape.inputs == 0 || shape.outputs == 0 {
        return Err(Error::unsupported(
            format!("export of a model with {} inputs and {} outputs", shape.inputs, shape.outputs),
            "an ONNX graph needs at least one of each",
        ));
    }
    let mut writer = Writer::default();
    let input = if model.layers_are_acyclic() {
        layers::write(model, &mut writer)?
    } else {
        // Residual sums of a model with cycles become entries of A.
        let plain = model.without_taps().ok_or_else(|| {
            Error::unsupported("export of a cycle through tap blocks", "such a model cannot be run either")
        })?;
        cycles::write(&plain, settings, &mut writer)?
    };
    // Outputs are in the baseline's units, as everywhere.
    let factor = model.metadata().scaling.as_ref().map_or(1.0, |s| s.outputs) as f32;
    if factor != 1.0
        && let Some(last) = writer.nodes.last_mut()
    {
        last.op_type = "Mul".into();
        last.input.push("output_factor".into());
        writer.initialisers.push(floats("output_factor", &[1], &[factor]));
    }
    let graph = GraphProto {
        name: "implicit_model".into(),
        doc_string: "x = φ(Ax + Bu + b), y = Cx + Du + d; u is the input after preprocessing".into(),
        node: writer.nodes,
        initializer: writer.initialisers,
        input: vec![input],
        output: vec![value("y", &[shape.outputs])],
        ..Default::default()
    };
    Ok(ModelProto {
        ir_version: Some(IR_VERSION),
        producer_name: "simplicit".into(),
        producer_version: env!("CARGO_PKG_VERSION").into(),
        opset_import: vec![OperatorSetIdProto { domain: String::new(), version: Some(OPSET) }],
        graph: Some(graph),
        ..Default::default()
    }
    .encode_to_vec())
}
