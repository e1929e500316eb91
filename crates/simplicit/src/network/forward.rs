//! Runs a network on the calling thread: its outputs, or all of its states.
//!
//! There is no backward pass here: gradients of a network are those of the implicit model that computes it.

use std::borrow::Cow;

use super::Network;
use super::convolution::Convolution;
use super::graph::{Node, Op};
use super::shape::Shape;
use crate::graph::Value;
use crate::layout::MapShape;
use crate::linalg::{Matrix, gemm};
use crate::states::StateBlock;
use crate::{Error, Result};

impl Network {
    /// The outputs of a batch (one sample a row), on the calling thread.
    pub fn forward(&self, u: &Matrix<f32>) -> Result<Matrix<f32>> {
        Ok(self.values(u, false)?.swap_remove(self.graph.output))
    }

    /// The values of all nodes on a batch; unless `keep` is set, values that nothing reads any more are empty.
    fn values(&self, u: &Matrix<f32>, keep: bool) -> Result<Vec<Matrix<f32>>> {
        self.require_inputs(u.cols())?;
        let mut uses = self.uses.clone();
        let mut values: Vec<Matrix<f32>> = Vec::with_capacity(self.graph.nodes.len());
        for node in &self.graph.nodes {
            node.inputs.iter().for_each(|&input| uses[input] -= 1);
            let read = |input: usize| !keep && uses[input] == 0;
            let value = match node.inputs.split_first() {
                None => start(node, u),
                Some(_) if matches!(node.op, Op::Structure(_)) => self.operate(node, &values, u.rows()),
                Some((&first, rest)) => {
                    // The last reader takes over the value and may change it in place.
                    let x = if read(first) && !rest.contains(&first) {
                        Cow::Owned(std::mem::take(&mut values[first]))
                    } else {
                        Cow::Borrowed(&values[first])
                    };
                    evaluate(node, &self.graph.nodes, x, rest.iter().map(|&input| &values[input]))
                }
            };
            node.inputs.iter().filter(|&&input| read(input)).for_each(|&input| values[input] = Matrix::default());
            values.push(value);
        }
        Ok(values)
    }

    /// U, Z, X and Y of a batch (one sample a row), on the calling thread.
    pub(super) fn states_of(&self, u: &Matrix<f32>) -> Result<StateBlock> {
        let values = self.values(u, true)?;
        let mut z = Matrix::zeros(u.rows(), self.layout.size());
        let mut x = z.clone();
        for (&id, range) in self.activations.iter().zip(self.ranges()) {
            let node = &self.graph.nodes[id];
            // An operator has no pre-activation; Z and X both hold its value.
            let before = match (&node.op, node.inputs.first()) {
                (Op::Activation(_), Some(&input)) => &values[input],
                _ => &values[id],
            };
            for (into, from) in [(&mut z, before), (&mut x, &values[id])] {
                for sample in 0..u.rows() {
                    let row = &mut into.row_mut(sample)[range.clone()];
                    row.iter_mut().zip(row_of(node, from, sample)).for_each(|(a, &b)| *a = f64::from(b));
                }
            }
        }
        Ok(StateBlock { u: u.cast(), z, x, y: values[self.graph.output].cast() })
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

    /// The operands of an operator for one sample.
    fn operands<'a>(&self, node: &Node, values: &'a [Matrix<f32>], sample: usize) -> Vec<Value<'a>> {
        let operand = |&input: &usize| {
            let data = row_of(&self.graph.nodes[input], &values[input], sample);
            Value { dims: self.graph.nodes[input].shape.dims(), data }
        };
        node.inputs.iter().map(operand).collect()
    }

    /// An error that names the shape of a sample if inputs have another number of values.
    pub(crate) fn require_inputs(&self, values: usize) -> Result<()> {
        if values == self.input_shape().size() {
            return Ok(());
        }
        let expected = format!("{} values per sample ({})", self.input_shape().size(), self.input_shape());
        Err(Error::shape("inputs", expected, format!("{values} values per sample")))
    }
}

/// The value of a node without inputs: the batch itself, or one row for all samples.
fn start(node: &Node, u: &Matrix<f32>) -> Matrix<f32> {
    match &node.op {
        Op::Constant { values, .. } => Matrix::from_fn(1, values.len(), |_, j| values[j]),
        _ => u.clone(),
    }
}

/// The row of one sample; a constant has one row for all samples.
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
            let mut workspaces: Vec<_> =
                weights_of_groups(weights, convolution).map(|w| convolution.workspace(&w)).collect();
            for sample in 0..x.rows() {
                let row = out.row_mut(sample);
                if let Some(bias) = bias {
                    let positions = convolution.output.positions();
                    row.chunks_exact_mut(positions).zip(bias).for_each(|(channel, &b)| channel.fill(b));
                }
                let groups = x.row(sample).chunks_exact(convolution.input.size());
                let parts = row.chunks_exact_mut(convolution.output.size());
                for ((x, out), workspace) in groups.zip(parts).zip(&mut workspaces) {
                    convolution.add(x, workspace, out);
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
