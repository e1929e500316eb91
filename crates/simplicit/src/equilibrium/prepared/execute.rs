//! Running a prepared model on one block of samples, layer by layer, with the error of every layer bounded if asked.

use super::plan::View;
use super::{Part, Prepared, Step, Weights, Workspace};
use crate::equilibrium::program::Norm;
use crate::equilibrium::run::{SINGLE, SampleDiagnostics, or_infinite, sizes, underflow};
use crate::kernels::{Finish, Residual};
use crate::linalg::lanes::{MAX_LANES, from_lanes, to_lanes};
use crate::model::Target;
use crate::network::Source;

impl Prepared {
    /// Runs up to [`Prepared::lanes`] samples (`u` and `y` row-major, whole rows) in a workspace of this model; with
    /// `certified` the error of every sample is bounded too. The first sample with a NaN or infinity is the error.
    pub(super) fn run(
        &self,
        u: &[f32],
        y: &mut [f32],
        room: &mut Workspace,
        certified: bool,
    ) -> std::result::Result<(), usize> {
        let (p, lanes) = (self.inputs, self.lanes);
        let count = u.len().checked_div(p).unwrap_or(y.len() / self.outputs.max(1)).min(lanes);
        let mut unread = false;
        for s in 0..count {
            let sample = &u[s * p..(s + 1) * p];
            if !all_finite(sample) {
                let bad = |j: usize| !sample[j].is_finite() && self.read.as_ref().is_none_or(|read| read[j]);
                if (0..p).any(bad) {
                    return Err(s);
                }
                unread = true;
            }
        }
        let map = self.input.map;
        for c in 0..map.channels {
            // A vector is one channel per unit, but its units lie side by side.
            if map.positions() == 1 && self.input.channel == 1 {
                read_in(&mut room.values[self.input.origin * lanes..], u, p, count, p, lanes);
                break;
            }
            for y in 0..map.height {
                let from = (c * map.height + y) * map.width;
                let to = self.input.at(c, y) * lanes;
                read_in(&mut room.values[to..], &u[from.min(u.len())..], p, count, map.width, lanes);
            }
        }
        if unread {
            // Kernels may multiply by zero what nobody reads.
            let at = self.input.origin * lanes;
            let values = &mut room.values[at..at + p * lanes];
            values.iter_mut().filter(|v| !v.is_finite()).for_each(|v| *v = 0.0);
        }
        if certified {
            self.begin_bounds(room, count);
        }
        for step in &self.steps {
            for part in &step.parts {
                self.part(step, part, room);
            }
            if certified {
                self.bound(step, room, count);
            }
        }
        let at = self.output.origin * lanes;
        let values = &room.values[at..at + self.outputs * lanes];
        if lanes == 1 {
            y.copy_from_slice(values);
        } else {
            from_lanes(y, self.outputs, values, count, self.outputs, lanes);
        }
        Ok(())
    }

    fn part(&self, step: &Step, part: &Part, room: &mut Workspace) {
        let lanes = self.lanes;
        let view = step.view;
        match part {
            Part::Bias => {
                for (c, bias) in step.bias.iter().enumerate() {
                    for y in 0..view.map.height {
                        let at = view.at(c, y) * lanes;
                        room.values[at..at + view.map.width * lanes].fill(*bias);
                    }
                }
            }
            Part::Activation(activation) => {
                for c in 0..view.map.channels {
                    for y in 0..view.map.height {
                        let at = view.at(c, y) * lanes;
                        activation.apply_slice(&mut room.values[at..at + view.map.width * lanes]);
                    }
                }
            }
            Part::Residual { operand, factors } => {
                operand.fetch(&room.values, &mut room.scratch, lanes);
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
                            let x = &room.scratch[0][at..at + length];
                            room.values[to..to + length].iter_mut().zip(x).for_each(|(s, x)| *s += factor * x);
                        } else {
                            let (low, high, swapped) = apart(&mut room.values, at, to, length);
                            let (x, sums) = if swapped { (high, low) } else { (low, high) };
                            sums.iter_mut().zip(x.iter()).for_each(|(s, x)| *s += factor * x);
                        }
                    }
                }
            }
            Part::Taps { operand, weights, bias, before, after, relu, .. } => {
                operand.fetch(&room.values, &mut room.scratch, lanes);
                // The result lies apart from everything it reads, before or behind it.
                let end = (view.origin + view.extent()) * lanes;
                let (low, rest) = room.values.split_at_mut(view.origin * lanes);
                let (own, high) = rest.split_at_mut(end - view.origin * lanes);
                let (low, high) = (&*low, &*high);
                let read = |at: usize| if at * lanes < end { &low[at * lanes..] } else { &high[at * lanes - end..] };
                let residual =
                    |v: &Option<View>| v.map(|v| Residual { from: read(v.origin), row: v.row, channel: v.channel });
                let finish = Finish {
                    bias: bias.then_some(&step.bias[..]),
                    before: residual(before),
                    after: residual(after),
                    relu: *relu,
                };
                match weights {
                    Weights::Grid(weights, grid, start) => {
                        let source = if operand.phases.is_some() || operand.padded.is_some() {
                            &room.scratch[2][start * lanes..]
                        } else if operand.moved {
                            &room.scratch[0][start * lanes..]
                        } else {
                            read(*start)
                        };
                        weights.run(self.instructions, grid, source, own, &finish);
                    }
                    Weights::Rows(weights) => {
                        let at = operand.view.origin;
                        let source = if operand.moved { &room.scratch[0][at..] } else { read(at) };
                        weights.run(source, own, finish.bias, finish.relu);
                    }
                }
            }
        }
    }

    fn begin_bounds(&self, room: &mut Workspace, count: usize) {
        let lanes = self.lanes;
        room.input_sizes.fill(0.0);
        let at = self.input.origin * lanes;
        sizes(&mut room.input_sizes, Norm::Max, &room.values[at..at + self.input.extent() * lanes], lanes);
        room.samples.clear();
        room.samples.resize(
            count,
            SampleDiagnostics {
                iterations: 1,
                residual: 0.0,
                state_error: 0.0,
                output_error: 0.0,
                converged: true,
                multiply_adds: self.multiply_adds,
            },
        );
    }

    /// The error of a layer's values from those of what it reads.
    fn bound(&self, step: &Step, room: &mut Workspace, count: usize) {
        let lanes = self.lanes;
        let mut own = [0.0; MAX_LANES];
        let at = step.view.origin * lanes;
        // Margins are zeros and do not matter to a maximum.
        sizes(&mut own[..lanes], Norm::Max, &room.values[at..at + step.view.extent() * lanes], lanes);
        let bound = &step.bound;
        for lane in 0..count {
            let (mut carried, mut size) = (0.0, bound.largest_bias);
            for (source, norm) in &bound.reads {
                match source {
                    Source::Input => size += norm * room.input_sizes[lane],
                    Source::Layer(j) => {
                        carried += norm * room.errors[j * lanes + lane];
                        size += norm * room.sizes[j * lanes + lane];
                    }
                }
            }
            let rounding = (bound.terms as f64 + 2.0) * SINGLE * size;
            let sample = &mut room.samples[lane];
            sample.converged &= own[lane].is_finite();
            match step.target {
                Target::Layer(k) => {
                    // Four more roundings cover the activation.
                    let error = carried + rounding + 4.0 * SINGLE * own[lane] + underflow(bound.terms);
                    room.sizes[k * lanes + lane] = own[lane];
                    room.errors[k * lanes + lane] = error;
                    sample.state_error = or_infinite(Norm::Max.add(sample.state_error, error));
                }
                Target::Output => sample.output_error = or_infinite(carried + rounding + underflow(bound.terms)),
            }
        }
    }
}

/// Two ranges of one slice, the lower first, and whether that is the second.
fn apart(values: &mut [f32], a: usize, b: usize, length: usize) -> (&mut [f32], &mut [f32], bool) {
    let (low, high) = (a.min(b), a.max(b));
    let (left, right) = values.split_at_mut(high);
    (&mut left[low..low + length], &mut right[..length], b < a)
}

fn all_finite(values: &[f32]) -> bool {
    crate::linalg::vectorised(
        #[inline(always)]
        || values.iter().fold(0u32, |worst, v| worst.max(v.to_bits() & 0x7fff_ffff)) < 0x7f80_0000,
    )
}

fn read_in(out: &mut [f32], samples: &[f32], stride: usize, count: usize, features: usize, lanes: usize) {
    if lanes == 1 {
        out[..features].copy_from_slice(&samples[..features]);
    } else {
        to_lanes(out, samples, stride, count, features, lanes);
    }
}
