//! Which node of a file every linear map and convolution of the network comes from, so that new weights can be
//! written there.

use std::path::Path;

use prost::Message;

use super::import::{Importer, OnnxSelection, Value, import_graph, read_file};
use super::proto::{GraphProto, ModelProto, NodeProto};
use crate::network::{Network, Op};
use crate::{Error, Result};

/// The node from which a linear map or convolution was read, and the value that it now computes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Origin {
    /// The place of the Conv, ConvTranspose, Gemm, MatMul or Einsum in the file.
    pub(crate) node: usize,
    /// The dimensions of the weights as the node reads them, also where they are computed from others.
    pub(crate) weights: Vec<usize>,
    /// The order of their axes in which an Einsum reads them as units × features.
    pub(crate) turned: Option<Vec<usize>>,
    /// The value that it reads; if a batch norm in front was folded, the value that this read.
    pub(crate) input: String,
    /// The value it computes with all that was folded into it: the node's own, or that of a norm or sum behind it.
    pub(crate) output: String,
    /// Scales and shifts after a reshape or transpose that were folded into it: the value that each computes, and the
    /// value that it reads and now equals.
    pub(crate) passed: Vec<(String, String)>,
}

/// A file, the network in it, and the origin of every linear map and convolution in the order of the network's nodes.
pub(crate) struct Traced {
    pub(crate) model: ModelProto,
    pub(crate) network: Network,
    pub(crate) origins: Vec<Option<Origin>>,
}

impl Traced {
    pub(crate) fn read(path: &Path, selection: &OnnxSelection) -> Result<Self> {
        let bytes = read_file(path)?;
        let model = ModelProto::decode(bytes.as_slice());
        let model = model.map_err(|e| Error::file(path, format!("not an ONNX file: {e}")))?;
        let (network, origins) = import_graph(&bytes, path, selection)?;
        Ok(Self { model, network, origins })
    }
}

impl Importer<'_> {
    /// Notes the origins of the linear maps and convolutions that a node of the file has added since `first`.
    pub(super) fn note_origins(
        &mut self,
        graph: &GraphProto,
        node: &NodeProto,
        first: usize,
        inputs: &[Option<Value>],
    ) {
        for id in first..self.builder.count() {
            if !matches!(self.builder.op(id), Op::Linear { .. } | Op::Convolution { .. }) {
                continue;
            }
            let output = node.output.first().cloned().unwrap_or_default();
            let origin = if matches!(node.op_type.as_str(), "Conv" | "ConvTranspose" | "Gemm" | "MatMul" | "Einsum") {
                let place = graph.node.iter().position(|n| std::ptr::eq(n, node));
                place.and_then(|place| {
                    let weights = inputs.get(1)?.as_ref().map(|weights| self.dims(weights))?;
                    let input = self.unfolded_input(graph, node)?;
                    Some(Origin { node: place, weights, turned: self.turned.take(), input, output, passed: Vec::new() })
                })
            } else {
                // The network has a copy of the earlier map with a scale or shift folded in.
                let source = inputs.iter().zip(&node.input).find_map(|(v, read)| match v {
                    Some(Value::Node(id)) => Some((self.origins.get(&self.moved_from(*id)).cloned()?, read)),
                    _ => None,
                });
                source.map(|(mut origin, read)| {
                    if *read == origin.output {
                        origin.output = output;
                    } else {
                        // A node that only moves numbers is in between, and stays.
                        origin.passed.push((output, read.clone()));
                    }
                    origin
                })
            };
            if let Some(origin) = origin {
                self.origins.insert(id, origin);
            }
        }
    }

    /// The node whose numbers a value has, only moved.
    fn moved_from(&self, mut id: usize) -> usize {
        use crate::graph::Structure;
        while let (Op::Reshape | Op::Structure(Structure::Transpose { .. }), [input]) =
            (self.builder.op(id), self.builder.inputs(id))
        {
            id = *input;
        }
        id
    }

    /// The first input of a node, or what a scale and shift that waited in front of it reads.
    fn unfolded_input(&self, graph: &GraphProto, node: &NodeProto) -> Option<String> {
        let mut name = node.input.first()?;
        for _ in 0..graph.node.len() {
            let waits = match self.known(name) {
                Some(Value::Node(id)) => matches!(self.builder.op(self.moved_from(*id)), Op::ScaleShift { .. }),
                _ => false,
            };
            if !waits {
                return Some(name.clone());
            }
            let producer = graph.node.iter().find(|n| n.output.contains(name))?;
            // After a reshape the scale has another form, so such a norm cannot be traced to a node.
            if !matches!(producer.op_type.as_str(), "BatchNormalization" | "Add" | "Sub" | "Mul" | "Div" | "Scaler") {
                return None;
            }
            name = producer.input.iter().find(|n| matches!(self.known(n), Some(Value::Node(_))))?;
        }
        None
    }
}
