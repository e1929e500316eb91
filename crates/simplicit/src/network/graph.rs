//! The nodes of a network, in topological order.

use std::sync::Arc;

use super::fixed::FixedMap;
use super::shape::{Shape, Window};
use crate::graph::Structure;
use crate::layout::Activation;
use crate::linalg::Matrix;

/// The operation that a node computes from its inputs.
#[derive(Debug, Clone)]
pub(crate) enum Op {
    /// The sample itself; always node 0 and only there.
    Input,
    /// W x + bias; W is out × in.
    Linear { weights: Arc<Matrix<f32>>, bias: Option<Vec<f32>> },
    /// Taps over windows + one bias per channel; W is out × (in/groups·kh·kw). The output channels fall into `groups`
    /// equal parts, each of which reads its own part of the input channels.
    Convolution { weights: Arc<Matrix<f32>>, window: Window, groups: usize, bias: Option<Vec<f32>> },
    /// The sum of its inputs.
    Add,
    /// φ, unit by unit: a layer of states.
    Activation(Activation),
    /// Pooling.
    Fixed(FixedMap),
    /// The same numbers under another shape.
    Reshape,
    /// An operator without weights: a layer of its own.
    Structure(Structure),
    /// Numbers that do not depend on the sample; whether they count as parameters of the network.
    Constant { values: Arc<Vec<f32>>, parameter: bool },
    /// A batch norm that waits to be folded into what follows; only while building.
    ScaleShift { scale: Vec<f64>, shift: Vec<f64> },
}

impl Op {
    /// The name for messages.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Op::Input => "the input",
            Op::Linear { .. } => "a linear map",
            Op::Convolution { .. } => "a convolution",
            Op::Add => "an addition",
            Op::Activation(_) => "an activation",
            Op::Fixed(FixedMap::AveragePool { .. }) => "average pooling",
            Op::Fixed(FixedMap::MaxPool { .. }) => "max pooling",
            Op::Fixed(FixedMap::GlobalAverage { .. }) => "a global average",
            Op::Reshape => "a reshape",
            Op::Structure(structure) => structure.name(),
            Op::Constant { .. } => "a constant",
            Op::ScaleShift { .. } => "a batch norm",
        }
    }

    /// Whether the value is a layer of the layout, which sums can read.
    pub(crate) fn is_layer(&self) -> bool {
        matches!(self, Op::Activation(_) | Op::Structure(_) | Op::Constant { .. })
    }

    /// Whether the value is a sum of weighted values, which becomes (part of) a pre-activation.
    pub(crate) fn is_affine(&self) -> bool {
        matches!(self, Op::Linear { .. } | Op::Convolution { .. } | Op::Add)
    }
}

/// One node.
#[derive(Debug, Clone)]
pub(crate) struct Node {
    pub(crate) name: String,
    pub(crate) op: Op,
    pub(crate) inputs: Vec<usize>,
    pub(crate) shape: Shape,
}

/// How often each node is used; the output counts as a use.
pub(crate) fn count_uses(nodes: &[Node], output: usize) -> Vec<usize> {
    let mut uses = vec![0; nodes.len()];
    for input in nodes.iter().flat_map(|n| &n.inputs) {
        uses[*input] += 1;
    }
    uses[output] += 1;
    uses
}
