//! The terms of every pre-activation: the network as an implicit model sees it.
//!
//! z = Σ terms + bias, where a term is a layer or the input, possibly pooled, times weights. Layers are numbered as in
//! the layout, last first, so a term of layer k only reads layers above k.

use std::sync::Arc;

use super::fixed::FixedMap;
use super::graph::{Node, Op};
use super::normalise::Graph;
use super::shape::{Shape, Window};
use crate::layout::{MapShape, Operand, Operator, Source};
use crate::linalg::Matrix;

/// The weights by which a term's operand enters the pre-activation.
#[derive(Debug, Clone, PartialEq)]
pub enum Weights {
    /// Weights out × in.
    Dense(Arc<Matrix<f32>>),
    /// A convolution: out × (in/groups·kh·kw), column (c·kh + dy)·kw + dx with c counted within the row's group of input
    /// channels, shared over positions.
    Taps {
        /// The taps, one row per output channel.
        weights: Arc<Matrix<f32>>,
        /// Kernel, stride and (zero) padding.
        window: Window,
        /// Equal parts of the output channels, each of which reads its own part of the input channels.
        groups: usize,
        /// Shape of the operand.
        input: MapShape,
        /// Shape of the result.
        output: MapShape,
    },
    /// The operand itself (a residual): structure, which is not counted.
    Identity,
}

impl Weights {
    /// Number of non-zero weights, each tap counted once.
    pub fn nonzeros(&self) -> usize {
        match self {
            Weights::Dense(weights) | Weights::Taps { weights, .. } => count(weights.as_slice()),
            Weights::Identity => 0,
        }
    }

    /// Non-zeros of the unrolled matrix; taps that fall on padding are not counted.
    pub fn multiply_adds(&self) -> u64 {
        match self {
            Weights::Dense(weights) => count(weights.as_slice()) as u64,
            Weights::Taps { weights, window, input, output, .. } => {
                let uses = window.uses(*input, *output);
                let used = weights.as_slice().iter().zip(uses.iter().cycle()).filter(|(w, _)| **w != 0.0);
                used.map(|(_, uses)| uses).sum()
            }
            Weights::Identity => 0,
        }
    }
}

/// One summand of a pre-activation.
#[derive(Debug, Clone, PartialEq)]
pub struct Term {
    /// The value that it starts from.
    pub source: Source,
    /// Pooling between the source and the weights, in order; mostly none.
    pub maps: Vec<FixedMap>,
    /// The weights that multiply the (pooled) source.
    pub weights: Weights,
}

/// z of one layer, or the output y: the sum of its terms and its bias.
#[derive(Debug, Clone, PartialEq)]
pub struct PreActivation {
    /// Shape of the sum.
    pub shape: Shape,
    /// The summands.
    pub terms: Vec<Term>,
    /// One number per channel of a map or per unit; the biases of all summands together. `None` without biases.
    pub bias: Option<Vec<f32>>,
    /// The operator, if one computes the layer; it then has neither terms nor a bias.
    pub operator: Option<Operator>,
}

impl PreActivation {
    /// Non-zero weights and biases, and parameters that stay.
    pub fn nonzeros(&self) -> usize {
        let weights: usize = self.terms.iter().map(|t| t.weights.nonzeros()).sum();
        let fixed = match &self.operator {
            Some(Operator::Constant { values, parameter: true }) => count(values),
            _ => 0,
        };
        fixed + weights + self.bias.as_deref().map_or(0, count)
    }

    /// The bias of every unit.
    pub fn unit_bias(&self) -> Option<Vec<f32>> {
        self.bias.as_deref().map(|bias| spread(bias, self.shape.size()))
    }
}

fn count(values: &[f32]) -> usize {
    values.iter().filter(|v| **v != 0.0).count()
}

fn spread(values: &[f32], size: usize) -> Vec<f32> {
    let each = size / values.len().max(1);
    values.iter().flat_map(|&v| std::iter::repeat_n(v, each)).collect()
}

/// The pre-activations of all layers (last first) and of the output.
pub(crate) fn resolve(graph: &Graph) -> (Vec<PreActivation>, PreActivation) {
    let nodes = &graph.nodes;
    let layers: Vec<usize> = (0..nodes.len()).rev().filter(|&id| nodes[id].op.is_layer()).collect();
    let mut sources = vec![Source::Input; nodes.len()];
    for (layer, &id) in layers.iter().enumerate() {
        sources[id] = Source::Layer(layer);
    }
    let states = layers.iter().map(|&id| layer(nodes, &sources, id)).collect();
    (states, pre_activation(nodes, &sources, graph.output))
}

/// For every linear map and convolution, in the order of the nodes, its layer (none for the output) and the number of
/// its term.
pub(crate) fn weighted_terms(graph: &Graph) -> Vec<(Option<usize>, usize)> {
    let nodes = &graph.nodes;
    let layers = (0..nodes.len()).rev().filter(|&id| nodes[id].op.is_layer()).enumerate();
    let sums = layers.filter_map(|(layer, id)| match nodes[id].op {
        Op::Activation(_) => Some((Some(layer), nodes[id].inputs[0])),
        _ => None,
    });
    let mut found = Vec::new();
    for (target, root) in sums.chain([(None, graph.output)]) {
        // The terms in the order of `pre_activation`.
        let (mut todo, mut term) = (vec![root], 0);
        while let Some(id) = todo.pop() {
            let id = unshaped(nodes, id);
            match &nodes[id].op {
                Op::Add => todo.extend(nodes[id].inputs.iter().rev()),
                op => {
                    if matches!(op, Op::Linear { .. } | Op::Convolution { .. }) {
                        found.push((id, (target, term)));
                    }
                    term += 1;
                }
            }
        }
    }
    found.sort_by_key(|(id, _)| *id);
    found.into_iter().map(|(_, place)| place).collect()
}

/// The pre-activation of a layer: the sum in front of its activation, or its operator.
fn layer(nodes: &[Node], sources: &[Source], id: usize) -> PreActivation {
    let node = &nodes[id];
    let operator = match &node.op {
        Op::Structure(structure) => {
            let operand =
                |&input: &usize| Operand { source: sources[unshaped(nodes, input)], dims: nodes[input].shape.dims() };
            Operator::Structure { structure: structure.clone(), operands: node.inputs.iter().map(operand).collect() }
        }
        Op::Constant { values, parameter } => Operator::Constant { values: values.clone(), parameter: *parameter },
        _ => return pre_activation(nodes, sources, node.inputs[0]),
    };
    PreActivation { shape: node.shape, terms: Vec::new(), bias: None, operator: Some(operator) }
}

/// The node whose numbers these are, before any reshape.
fn unshaped(nodes: &[Node], mut id: usize) -> usize {
    while let Op::Reshape = nodes[id].op {
        id = nodes[id].inputs[0];
    }
    id
}

fn pre_activation(nodes: &[Node], sources: &[Source], root: usize) -> PreActivation {
    let root = unshaped(nodes, root);
    let mut sum = PreActivation { shape: nodes[root].shape, terms: Vec::new(), bias: None, operator: None };
    // Left to right without recursion, because files may nest sums as deeply as they like.
    let mut todo = vec![root];
    while let Some(id) = todo.pop() {
        let id = unshaped(nodes, id);
        let node = &nodes[id];
        match &node.op {
            Op::Add => todo.extend(node.inputs.iter().rev()),
            Op::Linear { weights, bias } => {
                let (source, maps) = operand(nodes, sources, node.inputs[0]);
                sum.terms.push(Term { source, maps, weights: Weights::Dense(weights.clone()) });
                add_bias(&mut sum, bias.as_deref());
            }
            Op::Convolution { weights, window, groups, bias } => {
                let (source, maps) = operand(nodes, sources, node.inputs[0]);
                if let (Shape::Map(input), Shape::Map(output)) = (nodes[node.inputs[0]].shape, node.shape) {
                    let (weights, window, groups) = (weights.clone(), *window, *groups);
                    let weights = Weights::Taps { weights, window, groups, input, output };
                    sum.terms.push(Term { source, maps, weights });
                    add_bias(&mut sum, bias.as_deref());
                }
            }
            _ => {
                let (source, maps) = operand(nodes, sources, id);
                sum.terms.push(Term { source, maps, weights: Weights::Identity });
            }
        }
    }
    sum
}

/// A layer or the input, with the poolings between it and `id`; normalisation leaves nothing else in between.
fn operand(nodes: &[Node], sources: &[Source], mut id: usize) -> (Source, Vec<FixedMap>) {
    let mut maps = Vec::new();
    loop {
        match &nodes[id].op {
            Op::Fixed(map) => maps.push(*map),
            Op::Reshape => {}
            _ => break,
        }
        id = nodes[id].inputs[0];
    }
    maps.reverse();
    (sources[id], maps)
}

/// Adds up the biases of several summands; there is one number per unit only if one of them has that.
fn add_bias(sum: &mut PreActivation, bias: Option<&[f32]>) {
    let Some(bias) = bias else { return };
    let total = match sum.bias.take() {
        None => bias.to_vec(),
        Some(old) => {
            let size = if old.len() == bias.len() { bias.len() } else { sum.shape.size() };
            spread(&old, size).iter().zip(spread(bias, size)).map(|(a, b)| a + b).collect()
        }
    };
    sum.bias = Some(total);
}
