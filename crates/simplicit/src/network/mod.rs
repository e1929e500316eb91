//! Baselines: small feed-forward graphs of linear maps, convolutions, sums, activations and poolings.
//!
//! ```text
//! z = Σ W · pool(x or u) + bias,   x = φ(z)        for every layer, and y the same without φ
//! ```
//!
//! A layered network is written in five lines:
//! ```
//! use simplicit::layout::Activation::Relu;
//! use simplicit::linalg::Matrix;
//! use simplicit::network::{Network, Shape};
//!
//! # fn main() -> simplicit::Result<()> {
//! # let (w1, w2) = (Matrix::from_fn(3, 4, |i, j| (i + j) as f32), Matrix::from_fn(2, 3, |i, j| (i * j) as f32));
//! # let bias = vec![0.5, -0.5, 1.0];
//! let network = Network::builder(Shape::Vector(4))?
//!     .linear(w1, Some(bias))?
//!     .activation(Relu)?
//!     .linear(w2, None)?
//!     .build()?;
//! let y = network.forward(&Matrix::from_vec(1, 4, vec![0.1, 0.2, 0.3, 0.4])?)?;
//! # assert_eq!((y.rows(), y.cols()), (1, 2));
//! # Ok(())
//! # }
//! ```
//! Trained networks come from ONNX files: [`Network::from_onnx`].

mod builder;
mod convolution;
mod fixed;
mod fold;
mod forward;
mod graph;
mod normalise;
mod phases;
mod shape;
mod summary;
mod terms;

pub use builder::{NetworkBuilder, NodeId};
pub(crate) use convolution::Convolution;
pub use fixed::FixedMap;
pub use fold::BatchNorm;
pub(crate) use phases::Phases;
pub use shape::{Shape, Window};
pub use summary::LayerSummary;
pub use terms::{PreActivation, Term, Weights};

pub use crate::layout::Source;

pub(crate) use graph::Op;
use normalise::Graph;

use crate::layout::{Activation, Layer, Layout};
use crate::linalg::Matrix;
use crate::states::{StateBlock, StateMap, StateShape};
use crate::{Error, Result};

/// A trained network, batch norm folded, with its layers and the terms of their pre-activations.
///
/// A layer is an activation of the graph. The graph differs from the written one in two ways, which do not change any
/// bit of the outputs: a non-decreasing activation after a max pooling is applied before it, and a sum that is
/// pooled, multiplied or read twice without an activation becomes a layer with the identity.
#[derive(Debug)]
pub struct Network {
    graph: Graph,
    /// Number of readers of each node.
    uses: Vec<usize>,
    /// The nodes of the layers (activations, operators, constants), last layer first.
    activations: Vec<usize>,
    layout: Layout,
    pre_activations: Vec<PreActivation>,
    output: PreActivation,
    /// Weights that stand in several places because the file uses them again.
    repeated: usize,
}

impl Network {
    /// Starts a network with one input of this shape.
    pub fn builder(input: Shape) -> Result<NetworkBuilder> {
        NetworkBuilder::new(input)
    }

    fn new(graph: Graph) -> Result<Self> {
        let (pre_activations, output) = terms::resolve(&graph);
        let mut activations = Vec::with_capacity(pre_activations.len());
        let mut layers = Vec::with_capacity(pre_activations.len());
        let mut states = 0usize;
        for (id, node) in graph.nodes.iter().enumerate().rev() {
            if node.op.is_layer() {
                let activation =
                    if let Op::Activation(activation) = node.op { activation } else { Activation::Identity };
                let about = &pre_activations[activations.len()];
                let layer = match (&about.operator, about.shape) {
                    (Some(operator), shape) => Layer::operator(&node.name, shape.size(), operator.clone()),
                    (None, Shape::Map(map)) => Layer::map(&node.name, map, activation),
                    (None, shape) => Layer::dense(&node.name, shape.size(), activation),
                };
                states = states.saturating_add(layer.size);
                activations.push(id);
                layers.push(layer);
            }
        }
        if states > u32::MAX as usize {
            return Err(Error::shape("network", "at most 2^32 − 1 states", states));
        }
        let uses = graph::count_uses(&graph.nodes, graph.output);
        Ok(Self { graph, uses, activations, layout: Layout::new(layers), pre_activations, output, repeated: 0 })
    }

    /// The shape of a sample.
    pub fn input_shape(&self) -> Shape {
        self.graph.nodes[0].shape
    }

    /// The shape of an output.
    pub fn output_shape(&self) -> Shape {
        self.graph.nodes[self.graph.output].shape
    }

    /// The terms of every layer's pre-activation, in the order of the layout (last layer first).
    pub fn pre_activations(&self) -> &[PreActivation] {
        &self.pre_activations
    }

    /// The terms of the output.
    pub fn output(&self) -> &PreActivation {
        &self.output
    }

    /// Non-zero weights and biases, batch norm folded; each tap weight is counted once, and so is the bias that a row
    /// shares.
    pub fn nonzeros(&self) -> usize {
        self.all_rows().map(PreActivation::nonzeros).sum()
    }

    /// Multiply-adds per sample: non-zero weights of the unrolled matrices (taps on padding do not exist).
    pub fn multiply_adds(&self) -> u64 {
        self.all_rows().flat_map(|rows| &rows.terms).map(|term| term.weights.multiply_adds()).sum()
    }

    /// Weights that are counted although the file stores them only once: it uses them in several places (a layer that is
    /// applied three times, for example), and every place has its own weights here.
    pub fn repeated_weights(&self) -> usize {
        self.repeated
    }

    pub(crate) fn set_repeated_weights(&mut self, count: usize) {
        self.repeated = count;
    }

    /// For every linear map and convolution, in order: the layer it feeds (none for the output) and its term there.
    pub(crate) fn weighted_terms(&self) -> Vec<(Option<usize>, usize)> {
        terms::weighted_terms(&self.graph)
    }

    fn all_rows(&self) -> impl Iterator<Item = &PreActivation> {
        self.pre_activations.iter().chain(std::iter::once(&self.output))
    }

    /// Columns of Z and X of every layer, last layer first.
    fn ranges(&self) -> impl Iterator<Item = std::ops::Range<usize>> {
        self.layout.layers().iter().scan(0, |start, layer| {
            let range = *start..*start + layer.size;
            *start = range.end;
            Some(range)
        })
    }
}

impl StateMap for Network {
    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn shape(&self) -> StateShape {
        StateShape {
            inputs: self.input_shape().size(),
            states: self.layout.size(),
            outputs: self.output_shape().size(),
        }
    }

    fn states(&self, u: &Matrix<f32>) -> Result<StateBlock> {
        self.states_of(u)
    }

    fn outputs_of(&self, u: &Matrix<f32>) -> Result<Matrix<f32>> {
        self.forward(u)
    }
}

#[cfg(test)]
mod tests;
