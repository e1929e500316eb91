//! Running the parts of a layer on one block of samples.

use super::layer::{Part, Step, Weights};
use super::plan::View;
use crate::equilibrium::operator::OperatorWorkspace;
use crate::kernels::{Crew, Finish, Instructions, Residual};
use crate::layout::{Activation, Operator};
use crate::linalg::lanes::Aligned;

/// The values of one block of samples, and the memory to compute them in.
#[derive(Debug)]
pub(super) struct Buffers {
    pub(super) values: Aligned<f32>,
    scratch: [Aligned<f32>; 4],
    operator: OperatorWorkspace,
}

impl Buffers {
    /// Memory for this many positions of values and of scratch.
    pub(super) fn new(positions: usize, scratch: [usize; 4], lanes: usize) -> Self {
        Self {
            values: Aligned::zeros(positions * lanes),
            scratch: scratch.map(|positions| Aligned::zeros(positions * lanes)),
            operator: OperatorWorkspace::default(),
        }
    }
}

impl Step {
    /// Runs all parts of the layer, without an activation that is left, for `count` samples in `lanes` lanes.
    pub(super) fn sum(
        &self,
        buffers: &mut Buffers,
        batch: (usize, usize),
        instructions: Instructions,
        crew: &Crew<'_>,
    ) {
        for part in &self.parts {
            self.part(part, buffers, batch, instructions, crew);
        }
    }

    /// Applies the activation, if the parts have not done so.
    pub(super) fn activate(&self, buffers: &mut Buffers, lanes: usize) {
        if self.activation == Activation::Identity {
            return;
        }
        self.view
            .for_rows(|at, length| self.activation.apply_slice(&mut buffers.values[at * lanes..(at + length) * lanes]));
    }

    fn part(
        &self,
        part: &Part,
        buffers: &mut Buffers,
        (lanes, count): (usize, usize),
        instructions: Instructions,
        crew: &Crew<'_>,
    ) {
        let view = self.view;
        match part {
            Part::Bias => {
                for (c, bias) in self.bias.iter().enumerate() {
                    for y in 0..view.map.height {
                        let at = view.at(c, y) * lanes;
                        buffers.values[at..at + view.map.width * lanes].fill(*bias);
                    }
                }
            }
            Part::Operator { operator: Operator::Constant { values, .. }, .. } => {
                for (unit, value) in values.iter().enumerate() {
                    let at = view.unit(unit) * lanes;
                    buffers.values[at..at + lanes].fill(*value);
                }
            }
            Part::Operator { operator, operands } => {
                for (k, operand) in operands.iter().enumerate() {
                    let size = operand.map.size();
                    let into = buffers.operator.operand(k, size * count);
                    operand.write_rows(&buffers.values, into, size, (lanes, count));
                }
                let size = view.map.size();
                let result = buffers.operator.forward(operator, size, count);
                view.read_rows(&mut buffers.values, result, size, (lanes, count));
            }
            Part::Residual { operand, factors } => {
                operand.fetch(&buffers.values, &mut buffers.scratch, lanes);
                let from = operand.view;
                // Channels and rows of the result; a residual of another shape has the same units in the same order.
                for c in 0..view.map.channels {
                    for y in 0..view.map.height {
                        let to = view.at(c, y) * lanes;
                        let length = view.map.width * lanes;
                        let unit = (c * view.map.height + y) * view.map.width;
                        let factor = factors.as_ref().map_or(1.0, |(f, positions)| f[unit / positions]);
                        let at = from.unit(unit) * lanes;
                        if operand.moved {
                            let x = &buffers.scratch[0][at..at + length];
                            buffers.values[to..to + length].iter_mut().zip(x).for_each(|(s, x)| *s += factor * x);
                        } else {
                            let (low, high, swapped) = apart(&mut buffers.values, at, to, length);
                            let (x, sums) = if swapped { (high, low) } else { (low, high) };
                            sums.iter_mut().zip(x.iter()).for_each(|(s, x)| *s += factor * x);
                        }
                    }
                }
            }
            Part::Taps { operand, weights, bias, before, after, relu, .. } => {
                operand.fetch(&buffers.values, &mut buffers.scratch, lanes);
                // The result does not overlap with anything that it reads; it lies before or after it.
                let end = (view.origin + view.extent()) * lanes;
                let (low, rest) = buffers.values.split_at_mut(view.origin * lanes);
                let (own, high) = rest.split_at_mut(end - view.origin * lanes);
                let (low, high) = (&*low, &*high);
                let read = |at: usize| if at * lanes < end { &low[at * lanes..] } else { &high[at * lanes - end..] };
                let residual =
                    |v: &Option<View>| v.map(|v| Residual { from: read(v.origin), row: v.row, channel: v.channel });
                let finish = Finish {
                    bias: bias.then_some(&self.bias[..]),
                    before: residual(before),
                    after: residual(after),
                    relu: *relu,
                };
                match weights {
                    Weights::Grid(laid) => {
                        let [moved, _, padded, unfolded] = &mut buffers.scratch;
                        let source = if operand.phases.is_some() || operand.padded.is_some() {
                            &padded[laid.start * lanes..]
                        } else if operand.moved {
                            &moved[laid.start * lanes..]
                        } else {
                            read(laid.start)
                        };
                        match &laid.unfold {
                            Some(unfold) => unfold.run(laid, (crew, instructions), source, own, &finish, unfolded),
                            None => laid.weights.run_on(crew, instructions, &laid.grid, source, own, &finish),
                        }
                    }
                    Weights::Rows(weights) => {
                        let at = operand.view.origin;
                        let source = if operand.moved { &buffers.scratch[0][at * lanes..] } else { read(at) };
                        weights.run_on(crew, source, own, finish.bias, finish.relu);
                    }
                }
            }
        }
    }
}

/// Two ranges of one slice as (lower, upper), and whether the first range is the upper one.
fn apart(values: &mut [f32], a: usize, b: usize, length: usize) -> (&mut [f32], &mut [f32], bool) {
    let (low, high) = (a.min(b), a.max(b));
    let (left, right) = values.split_at_mut(high);
    (&mut left[low..low + length], &mut right[..length], b < a)
}
