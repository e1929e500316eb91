//! Which node of a file every linear map and convolution of the network comes from, so that new weights can be
//! written there.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use prost::Message;

use super::import::{Importer, OnnxSelection, Value, import_graph, read_file};
use super::proto::{GraphProto, ModelProto, NodeProto};
use crate::graph::Structure;
use crate::network::{FixedMap, Network, Op};
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
    /// The nodes between that value and the map, in order, if a batch norm that was folded stands in front of them. They
    /// only move numbers or average them, and the map reads what they compute from the value before the norm.
    pub(crate) through: Vec<usize>,
    /// The value it computes with all that was folded into it: the node's own, or that of a norm or sum behind it.
    pub(crate) output: String,
    /// Scales and shifts after a reshape or transpose that were folded into it: the value that each computes, and the
    /// value that it reads and now equals.
    pub(crate) passed: Vec<(String, String)>,
}

/// Operators that become a scale and shift beside a constant.
const SCALES: [&str; 7] = ["BatchNormalization", "Add", "Sum", "Sub", "Mul", "Div", "Scaler"];

/// A file, the network in it, and the origin of every linear map and convolution in the order of the network's nodes; a
/// map that no node of the file can take back has its name instead.
pub(crate) struct Traced {
    pub(crate) model: ModelProto,
    pub(crate) network: Network,
    pub(crate) origins: Vec<Result<Origin, String>>,
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

/// How many weights have several of these origins: the file uses them in several places.
pub(super) fn repeated_weights(graph: &GraphProto, origins: &[Result<Origin, String>]) -> usize {
    let mut producers: HashMap<&str, &NodeProto> = HashMap::new();
    for node in &graph.node {
        producers.extend(node.output.iter().map(|name| (name.as_str(), node)));
    }
    let mut seen = HashSet::new();
    let mut count = 0usize;
    for origin in origins.iter().flatten() {
        let Some(mut name) = graph.node.get(origin.node).and_then(|node| node.input.get(1)) else { continue };
        // What only moves weights gives the same ones.
        for _ in &graph.node {
            let mover = producers.get(name.as_str());
            let mover = mover.filter(|n| matches!(n.op_type.as_str(), "Identity" | "Cast" | "Transpose" | "Reshape"));
            let Some(input) = mover.and_then(|node| node.input.first()) else { break };
            name = input;
        }
        if !seen.insert(name) {
            count = count.saturating_add(origin.weights.iter().product());
        }
    }
    count
}

impl Importer<'_> {
    /// Notes the origins of the linear maps and convolutions that a node of the file has added since `first`; the node
    /// computes `value`.
    pub(super) fn note_origins(
        &mut self,
        graph: &GraphProto,
        node: &NodeProto,
        first: usize,
        inputs: &[Option<Value>],
        value: Option<&Value>,
    ) {
        for id in first..self.builder.count() {
            if !matches!(self.builder.op(id), Op::Linear { .. } | Op::Convolution { .. }) {
                continue;
            }
            let is_value = matches!(value, Some(Value::Node(value)) if self.moved_from(*value) == id);
            let origin = match node.op_type.as_str() {
                // What these do beside the convolution is written with it.
                "Conv" | "ConvTranspose" => self.own_origin(graph, node, id, inputs),
                // With more than a constant to add, the node computes more than the map.
                "Gemm" | "MatMul" | "Einsum" if is_value => self.own_origin(graph, node, id, inputs),
                "Gemm" | "MatMul" | "Einsum" => None,
                _ if is_value => self.scaled_origin(node, inputs),
                _ => None,
            };
            if let Some(origin) = origin {
                self.origins.insert(id, origin);
            }
        }
    }

    /// The node itself has the weights.
    fn own_origin(
        &mut self,
        graph: &GraphProto,
        node: &NodeProto,
        id: usize,
        inputs: &[Option<Value>],
    ) -> Option<Origin> {
        let place = graph.node.iter().position(|n| std::ptr::eq(n, node))?;
        let weights = inputs.get(1)?.as_ref().map(|weights| self.dims(weights))?;
        let (input, through) = self.unscaled_input(graph, node, id)?;
        let (output, turned) = (node.output.first()?.clone(), self.turned.take());
        Some(Origin { node: place, weights, turned, input, through, output, passed: Vec::new() })
    }

    /// A copy of the map before it with a scale or shift folded in.
    fn scaled_origin(&self, node: &NodeProto, inputs: &[Option<Value>]) -> Option<Origin> {
        let (mut origin, read) = inputs.iter().zip(&node.input).find_map(|(v, read)| match v {
            Some(Value::Node(id)) => Some((self.origins.get(&self.moved_from(*id)).cloned()?, read)),
            _ => None,
        })?;
        let output = node.output.first()?.clone();
        if *read == origin.output {
            origin.output = output;
        } else {
            // Something that only moves numbers stands between, and stays.
            origin.passed.push((output, read.clone()));
        }
        Some(origin)
    }

    /// The node whose numbers a value has, only moved.
    fn moved_from(&self, mut id: usize) -> usize {
        while let (Op::Reshape | Op::Structure(Structure::Transpose { .. }), [input]) =
            (self.builder.op(id), self.builder.inputs(id))
        {
            id = *input;
        }
        id
    }

    /// The node whose numbers a value has, only moved or averaged: a scale and shift can stand in front or behind.
    fn gathered_from(&self, id: usize) -> usize {
        let mut id = self.moved_from(id);
        while let (Op::Fixed(FixedMap::GlobalAverage { .. }), [input]) = (self.builder.op(id), self.builder.inputs(id))
        {
            id = self.moved_from(*input);
        }
        id
    }

    /// What the weighted node `id`, which was made from `node`, reads: the first input of `node`. If a scale and shift in
    /// front was folded, it is the value before that, and the nodes in between come with it.
    fn unscaled_input(&self, graph: &GraphProto, node: &NodeProto, id: usize) -> Option<(String, Vec<usize>)> {
        let reads = self.gathered_from(*self.builder.inputs(id).first()?);
        // A scale that could not be folded is a product and a sum, and the map reads the sum. Then the scale stays.
        let is_folded = |name: &str| match self.known(name) {
            Some(Value::Node(value)) => match (self.builder.op(*value), self.builder.inputs(*value)) {
                (Op::ScaleShift { .. }, [source]) => self.gathered_from(*source) == reads,
                _ => false,
            },
            _ => false,
        };
        let mut name = node.input.first()?;
        let mut through = Vec::new();
        for _ in 0..=graph.node.len() {
            if !is_folded(name) {
                through.reverse();
                return Some((name.clone(), through));
            }
            let place = graph.node.iter().position(|n| n.output.contains(name))?;
            let producer = &graph.node[place];
            if SCALES.contains(&producer.op_type.as_str()) {
                name = producer.input.iter().find(|n| matches!(self.known(n), Some(Value::Node(_))))?;
            } else {
                // Anything else that a scale has passed only moves or averages.
                name = producer.input.first().filter(|name| is_folded(name))?;
                through.push(place);
            }
        }
        None
    }
}
