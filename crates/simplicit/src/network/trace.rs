//! Running a network, forwards and backwards, on the calling thread.

use std::borrow::Cow;

use super::Network;
use super::convolution::Convolution;
use super::graph::{Node, Op};
use super::shape::Shape;
use crate::graph::{Structure, Value};
use crate::layout::MapShape;
use crate::linalg::{Matrix, gemm};
use crate::states::StateBlock;
use crate::{Error, Result};

/// All values of a network on a batch: its outputs, its states, and what gradients need.
#[derive(Debug, Clone)]
pub struct Trace<'a> {
    network: &'a Network,
    values: Vec<Matrix<f32>>,
}

/// Cotangents of a batch: how Σ dY·Y changes with the inputs and with every pre-activation.
#[derive(Debug, Clone, PartialEq)]
pub struct Gradient {
    /// With respect to the inputs, m × p.
    pub du: Matrix<f32>,
    /// With respect to the pre-activations, m × n in the order of Z (last layer first).
    pub dz: Matrix<f32>,
}

impl Network {
    /// The outputs of a batch (one sample a row), on the calling thread.
    pub fn forward(&self, u: &Matrix<f32>) -> Result<Matrix<f32>> {
        self.require_inputs(u)?;
        let mut uses = self.uses.clone();
        let mut values: Vec<Matrix<f32>> = Vec::with_capacity(self.graph.nodes.len());
        for node in &self.graph.nodes {
            node.inputs.iter().for_each(|&input| uses[input] -= 1);
            let value = match node.inputs.split_first() {
                None => start(node, u),
                Some(_) if matches!(node.op, Op::Structure(_)) => self.operate(node, &values, u.rows()),
                Some((&first, rest)) => {
                    // The last reader takes the value over and may work in place.
                    let x = if uses[first] == 0 && !rest.contains(&first) {
                        Cow::Owned(std::mem::take(&mut values[first]))
                    } else {
                        Cow::Borrowed(&values[first])
                    };
                    evaluate(node, &self.graph.nodes, x, rest.iter().map(|&input| &values[input]))
                }
            };
            node.inputs.iter().filter(|&&input| uses[input] == 0).for_each(|&input| values[input] = Matrix::default());
            values.push(value);
        }
        Ok(values.swap_remove(self.graph.output))
    }

    /// All values of a batch (one sample a row), on the calling thread; for states and gradients.
    pub fn trace(&self, u: &Matrix<f32>) -> Result<Trace<'_>> {
        self.require_inputs(u)?;
        let mut values: Vec<Matrix<f32>> = Vec::with_capacity(self.graph.nodes.len());
        for node in &self.graph.nodes {
            values.push(match node.inputs.split_first() {
                None => start(node, u),
                Some(_) if matches!(node.op, Op::Structure(_)) => self.operate(node, &values, u.rows()),
                Some((&first, rest)) => {
                    let rest = rest.iter().map(|&input| &values[input]);
                    evaluate(node, &self.graph.nodes, Cow::Borrowed(&values[first]), rest)
                }
            });
        }
        Ok(Trace { network: self, values })
    }

    /// Gradients of Σ dY·Y at a batch; [`Network::trace`] serves several `dy` with one forward pass.
    pub fn backward(&self, u: &Matrix<f32>, dy: &Matrix<f32>) -> Result<Gradient> {
        self.trace(u)?.backward(dy)
    }

    /// The value of an operator, sample by sample.
    fn operate(&self, node: &Node, values: &[Matrix<f32>], samples: usize) -> Matrix<f32> {
        let mut out = Matrix::zeros(samples, node.shape.size());
        let Op::Structure(structure) = &node.op else { return out };
        for sample in 0..samples {
            structure.forward(&self.operands(node, values, sample), out.row_mut(sample));
        }
        out
    }

    /// What an operator reads of one sample.
    fn operands<'a>(&self, node: &Node, values: &'a [Matrix<f32>], sample: usize) -> Vec<Value<'a>> {
        let operand = |&input: &usize| {
            let data = row_of(&self.graph.nodes[input], &values[input], sample);
            Value { dims: self.graph.nodes[input].shape.dims(), data }
        };
        node.inputs.iter().map(operand).collect()
    }

    fn require_inputs(&self, u: &Matrix<f32>) -> Result<()> {
        if u.cols() == self.input_shape().size() {
            return Ok(());
        }
        let expected = format!("{} values per sample ({})", self.input_shape().size(), self.input_shape());
        Err(Error::shape("inputs", expected, format!("{} values per sample", u.cols())))
    }
}

impl Trace<'_> {
    /// Y, m × q.
    pub fn outputs(&self) -> &Matrix<f32> {
        &self.values[self.network.graph.output]
    }

    /// U, Z, X and Y.
    pub fn states(&self) -> StateBlock {
        let samples = self.outputs().rows();
        let mut z = Matrix::zeros(samples, self.network.layout.size());
        let mut x = z.clone();
        for (&id, range) in self.network.activations.iter().zip(self.network.ranges()) {
            let node = &self.network.graph.nodes[id];
            // An operator has no pre-activation: both are its value.
            let before = match (&node.op, node.inputs.first()) {
                (Op::Activation(_), Some(&input)) => &self.values[input],
                _ => &self.values[id],
            };
            for (into, from) in [(&mut z, before), (&mut x, &self.values[id])] {
                for sample in 0..samples {
                    let row = &mut into.row_mut(sample)[range.clone()];
                    row.iter_mut().zip(row_of(node, from, sample)).for_each(|(a, &b)| *a = f64::from(b));
                }
            }
        }
        StateBlock { u: self.values[0].cast(), z, x, y: self.outputs().cast() }
    }

    /// Gradients of Σ dY·Y, dY being m × q. At a kink the derivative from the left, at a tie the first maximum.
    pub fn backward(&self, dy: &Matrix<f32>) -> Result<Gradient> {
        let graph = &self.network.graph;
        let samples = self.outputs().rows();
        if (dy.rows(), dy.cols()) != (samples, self.outputs().cols()) {
            let expected = format!("{samples} × {}", self.outputs().cols());
            return Err(Error::shape("dY", expected, format!("{} × {}", dy.rows(), dy.cols())));
        }
        let mut cotangents: Vec<Option<Matrix<f32>>> = vec![None; graph.nodes.len()];
        cotangents[graph.output] = Some(dy.clone());
        let mut dz = Matrix::zeros(samples, self.network.layout.size());
        let mut layers = self.network.activations.iter().zip(self.network.ranges());
        for (id, node) in graph.nodes.iter().enumerate().skip(1).rev() {
            let range = node.op.is_layer().then(|| layers.next()).flatten().map(|(_, range)| range);
            let Some(mut cotangent) = cotangents[id].take() else { continue };
            if let Op::Activation(activation) = &node.op {
                let z = &self.values[node.inputs[0]];
                for (d, &z) in cotangent.as_mut_slice().iter_mut().zip(z.as_slice()) {
                    *d *= activation.derivative(z);
                }
            }
            if let Some(range) = range {
                for sample in 0..samples {
                    dz.row_mut(sample)[range.clone()].copy_from_slice(cotangent.row(sample));
                }
            }
            if let Op::Structure(structure) = &node.op {
                self.pull_back_operator(node, structure, &self.values[id], &cotangent, &mut cotangents);
                continue;
            }
            for &input in &node.inputs {
                let into = cotangents[input].get_or_insert_with(|| Matrix::zeros(samples, self.values[input].cols()));
                pull_back(node, &graph.nodes, &self.values[input], &cotangent, into);
            }
        }
        let du = cotangents[0].take().unwrap_or_else(|| Matrix::zeros(samples, self.values[0].cols()));
        Ok(Gradient { du, dz })
    }
}

impl Trace<'_> {
    /// Adds to the cotangents of an operator's inputs, sample by sample; constants take none.
    fn pull_back_operator(
        &self,
        node: &Node,
        structure: &Structure,
        value: &Matrix<f32>,
        cotangent: &Matrix<f32>,
        cotangents: &mut [Option<Matrix<f32>>],
    ) {
        let samples = cotangent.rows();
        // An input that is read twice (x·x) must be borrowed once: every input has a buffer of its own here.
        let mut into: Vec<Option<Matrix<f32>>> = node
            .inputs
            .iter()
            .map(|&input| {
                let takes = !matches!(self.network.graph.nodes[input].op, Op::Constant { .. });
                takes.then(|| Matrix::zeros(samples, self.values[input].cols()))
            })
            .collect();
        for sample in 0..samples {
            let operands = self.network.operands(node, &self.values, sample);
            let out = Value { dims: node.shape.dims(), data: value.row(sample) };
            let mut rows: Vec<Option<&mut [f32]>> =
                into.iter_mut().map(|m| m.as_mut().map(|m| m.row_mut(sample))).collect();
            structure.adjoint(&operands, out, cotangent.row(sample), &mut rows);
        }
        for (&input, own) in node.inputs.iter().zip(into) {
            match (&mut cotangents[input], own) {
                (_, None) => {}
                (Some(total), Some(own)) => {
                    total.as_mut_slice().iter_mut().zip(own.as_slice()).for_each(|(a, b)| *a += b);
                }
                (empty, own) => *empty = own,
            }
        }
    }
}

/// The value of a node without inputs: the batch itself, or one row for all samples.
fn start(node: &Node, u: &Matrix<f32>) -> Matrix<f32> {
    match &node.op {
        Op::Constant { values, .. } => Matrix::from_fn(1, values.len(), |_, j| values[j]),
        _ => u.clone(),
    }
}

/// One sample's row; a constant has one row for all.
fn row_of<'a>(node: &Node, value: &'a Matrix<f32>, sample: usize) -> &'a [f32] {
    value.row(if matches!(node.op, Op::Constant { .. }) { 0 } else { sample })
}

fn geometry(node: &Node, nodes: &[Node]) -> Option<Convolution> {
    match (&node.op, nodes[node.inputs[0]].shape, node.shape) {
        (Op::Convolution { window, groups, .. }, Shape::Map(input), Shape::Map(output)) => {
            let part = |map: MapShape| MapShape { channels: map.channels / groups, ..map };
            Some(Convolution { input: part(input), output: part(output), window: *window })
        }
        _ => None,
    }
}

/// The weights of the output channels of every group.
fn weights_of_groups(weights: &Matrix<f32>, convolution: Convolution) -> impl Iterator<Item = Matrix<f32>> {
    let (rows, columns) = (convolution.output.channels, weights.cols());
    let groups = weights.rows() / rows.max(1);
    (0..groups).map(move |g| Matrix::from_fn(rows, columns, |i, j| weights[(g * rows + i, j)]))
}

/// The value of a node from its first input and the others.
fn evaluate<'a>(
    node: &Node,
    nodes: &[Node],
    x: Cow<'_, Matrix<f32>>,
    others: impl Iterator<Item = &'a Matrix<f32>>,
) -> Matrix<f32> {
    match &node.op {
        Op::Linear { weights, bias } => {
            let mut out = Matrix::zeros(x.rows(), weights.rows());
            if let Some(bias) = bias {
                out.as_mut_slice().chunks_exact_mut(bias.len()).for_each(|row| row.copy_from_slice(bias));
            }
            gemm(out.as_mut_slice(), weights.rows(), true, 1.0, x.view(), weights.view().t());
            out
        }
        Op::Convolution { weights, bias, .. } => {
            let mut out = Matrix::zeros(x.rows(), node.shape.size());
            let Some(convolution) = geometry(node, nodes) else { return out };
            let mut rooms: Vec<_> = weights_of_groups(weights, convolution).map(|w| convolution.room(&w)).collect();
            for sample in 0..x.rows() {
                let row = out.row_mut(sample);
                if let Some(bias) = bias {
                    let positions = convolution.output.positions();
                    row.chunks_exact_mut(positions).zip(bias).for_each(|(channel, &b)| channel.fill(b));
                }
                let groups = x.row(sample).chunks_exact(convolution.input.size());
                let parts = row.chunks_exact_mut(convolution.output.size());
                for ((x, out), room) in groups.zip(parts).zip(&mut rooms) {
                    convolution.add(x, room, out);
                }
            }
            out
        }
        Op::Add => {
            let mut x = x.into_owned();
            for other in others {
                x.as_mut_slice().iter_mut().zip(other.as_slice()).for_each(|(a, b)| *a += b);
            }
            x
        }
        Op::Activation(activation) => {
            let mut x = x.into_owned();
            activation.apply_slice(x.as_mut_slice());
            x
        }
        Op::Fixed(map) => {
            let mut out = Matrix::zeros(x.rows(), node.shape.size());
            (0..x.rows()).for_each(|sample| map.apply(x.row(sample), out.row_mut(sample)));
            out
        }
        Op::Input | Op::Reshape | Op::Structure(_) | Op::Constant { .. } | Op::ScaleShift { .. } => x.into_owned(),
    }
}

/// Adds to `into` the cotangent that a node's cotangent gives its input x.
fn pull_back(node: &Node, nodes: &[Node], x: &Matrix<f32>, cotangent: &Matrix<f32>, into: &mut Matrix<f32>) {
    match &node.op {
        Op::Linear { weights, .. } => {
            gemm(into.as_mut_slice(), weights.cols(), true, 1.0, cotangent.view(), weights.view());
        }
        Op::Convolution { weights, .. } => {
            let Some(convolution) = geometry(node, nodes) else { return };
            let mut rooms: Vec<_> = weights_of_groups(weights, convolution)
                .map(|w| {
                    let room = convolution.back_room(&w);
                    (w, room)
                })
                .collect();
            for sample in 0..x.rows() {
                let groups = cotangent.row(sample).chunks_exact(convolution.output.size());
                let parts = into.row_mut(sample).chunks_exact_mut(convolution.input.size());
                for ((dout, dx), (weights, room)) in groups.zip(parts).zip(&mut rooms) {
                    convolution.pull_back(weights, dout, room, dx);
                }
            }
        }
        Op::Fixed(map) => {
            for sample in 0..x.rows() {
                map.pull_back(x.row(sample), cotangent.row(sample), into.row_mut(sample));
            }
        }
        // An activation's own derivative is already in the cotangent.
        Op::Activation(_)
        | Op::Add
        | Op::Reshape
        | Op::Input
        | Op::Structure(_)
        | Op::Constant { .. }
        | Op::ScaleShift { .. } => {
            into.as_mut_slice().iter_mut().zip(cotangent.as_slice()).for_each(|(a, b)| *a += b);
        }
    }
}
