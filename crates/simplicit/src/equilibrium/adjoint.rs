//! Input gradients of models with tap blocks: the transpose of every layer, last layer first.
//!
//! A layer's cotangent is the sum of what its readers send back, times φ′(z). A maximum sends all of it to the first
//! largest value of its window, as in PyTorch. Errors are bounded in the ℓ1 norm, in which the
//! transpose of a block is as large as the block is in the maximum norm.

use std::ops::Range;

use super::operand::Packing;
use super::operator::OperatorWorkspace;
use super::program::Norm;
use super::run::{SINGLE, SampleDiagnostics, or_infinite, sizes, underflow};
use crate::layout::{Activation, Operator};
use crate::linalg::lanes::{Aligned, from_lanes, to_lanes};
use crate::linalg::{Stencil, vectorised};
use crate::model::{ImplicitModel, TapBlock, TapWeights, Target};
use crate::network::{FixedMap, Source};

/// Samples that run side by side: one feature of all of them fills one or two vectors.
pub(super) const LANES: usize = 16;

/// One summand of a layer, transposed.
struct Op {
    source: Source,
    maps: Vec<FixedMap>,
    weights: OpWeights,
    operand: usize,
    norm: f64,
    /// Number of addends that one value of the source receives.
    terms: usize,
}

enum OpWeights {
    /// A 1 × 1 kernel that is applied at every position.
    Plain(Stencil),
    /// Taps over the packed operand, with the size of the packed cotangent.
    Packed(Packing, Stencil, usize),
    Residual(Option<(Vec<f32>, usize)>),
}

struct Step {
    target: Target,
    range: Range<usize>,
    activation: Activation,
    ops: Vec<Op>,
    operator: Option<Operator>,
}

/// The transpose of a model, prepared for running.
pub(super) struct AdjointProgram {
    pub(super) inputs: usize,
    pub(super) outputs: usize,
    pub(super) states: usize,
    ranges: Vec<Range<usize>>,
    activations: Vec<Activation>,
    /// The output first, then layers in an order in which each is read only by earlier ones.
    steps: Vec<Step>,
    multiply_adds: u64,
}

impl AdjointProgram {
    /// Whether a maximum or another operator reads the inputs themselves, so that its slope does not follow from
    /// pre-activations alone.
    pub(super) fn needs_inputs(&self) -> bool {
        let operators = self.steps.iter().filter_map(|s| s.operator.as_ref()).flat_map(|o| o.operands());
        self.steps.iter().flat_map(|s| &s.ops).any(|op| op.needs_values() && op.source == Source::Input) || {
            operators
        }
        .any(|o| o.source == Source::Input)
    }
}

/// The memory of a thread; only the scratch of a pooling is allocated while running.
pub(super) struct AdjointWorkspace {
    z: Aligned<f32>,
    /// The inputs, only if the program needs them.
    u: Aligned<f32>,
    v: Aligned<f32>,
    /// Cotangents of the pre-activations.
    pub(super) w: Aligned<f32>,
    pub(super) du: Aligned<f32>,
    /// The states x of a source behind a maximum, then the result of each of its maps.
    values: Vec<Vec<f32>>,
    /// Cotangents of the operand and of the inputs of its maps.
    cotangents: [Vec<f32>; 2],
    packed: [Vec<f32>; 2],
    operator: OperatorWorkspace,
    sizes: Vec<f64>,
    received: Vec<f64>,
    errors: Vec<f64>,
    terms: Vec<usize>,
    pub(super) samples: Vec<SampleDiagnostics>,
}

impl Op {
    fn new(block: &TapBlock) -> Self {
        let (weights, own) = match &block.weights {
            TapWeights::Taps(taps) => {
                let packing = Packing::new(block.input, block.window, block.output);
                let stencil = packing.transposed(taps);
                let mut per_channel = vec![0usize; block.input.channels];
                taps.indices().iter().for_each(|&j| per_channel[j as usize / block.window.area()] += 1);
                let most = per_channel.into_iter().max().unwrap_or(0);
                let weights = if packing.is_plain() && block.window.area() == 1 {
                    OpWeights::Plain(stencil)
                } else {
                    OpWeights::Packed(packing, stencil, packing.cotangent_size(block.output.channels))
                };
                (weights, most)
            }
            TapWeights::Identity => (OpWeights::Residual(None), 1),
            TapWeights::Diagonal(factors) => {
                (OpWeights::Residual(Some((factors.clone(), block.output.positions()))), 1)
            }
        };
        Self {
            source: block.source,
            maps: block.maps.clone(),
            weights,
            operand: block.input.size(),
            norm: block.norm_inf() * (1.0 + 1e-9),
            // A value is in at most `terms` windows of each average.
            terms: block.maps.iter().map(|m| m.terms().max(1)).product::<usize>() * own + block.maps.len(),
        }
    }

    /// Whether the place of a maximum has to be found again.
    fn needs_values(&self) -> bool {
        self.maps.iter().any(|m| !m.is_linear())
    }

    /// Adds the contribution of the result's cotangent to the operand's cotangent.
    fn transpose(&self, dout: &[f32], dx: &mut [f32], packed: &mut [Vec<f32>; 2], lanes: usize) {
        match &self.weights {
            OpWeights::Plain(stencil) => stencil.accumulate(dx, dout, lanes),
            OpWeights::Packed(packing, stencil, size) => {
                let [above, below] = packed;
                let above = &mut above[..size * lanes];
                packing.pack_cotangent(dout, above, lanes);
                let below = &mut below[..packing.size() * lanes];
                below.fill(0.0);
                stencil.accumulate(below, above, lanes);
                packing.unpack_add(below, dx, lanes);
            }
            OpWeights::Residual(factors) => add_residual(dx, dout, factors.as_ref(), lanes),
        }
    }
}

/// `sums += factor × operand`, with one factor per channel, or 1 if there are none.
fn add_residual(sums: &mut [f32], operand: &[f32], factors: Option<&(Vec<f32>, usize)>, lanes: usize) {
    match factors {
        None => vectorised(
            #[inline(always)]
            || sums.iter_mut().zip(operand).for_each(|(s, x)| *s += x),
        ),
        Some((factors, positions)) => {
            let rows = sums.chunks_exact_mut(positions * lanes).zip(operand.chunks_exact(positions * lanes));
            for ((sums, x), factor) in rows.zip(factors) {
                sums.iter_mut().zip(x).for_each(|(s, x)| *s += factor * x);
            }
        }
    }
}

impl AdjointProgram {
    pub(super) fn new(model: &ImplicitModel) -> Self {
        let layout = model.layout();
        let mut multiply_adds = 0;
        let step = |target: Target| {
            let (range, activation, operator) = match target {
                Target::Layer(k) => {
                    (layout.range(k), layout.layers()[k].activation, layout.layers()[k].operator.clone())
                }
                Target::Output => (0..model.shape().outputs, Activation::Identity, None),
            };
            let blocks = model.summands(target);
            multiply_adds += blocks.iter().map(TapBlock::multiply_adds).sum::<u64>();
            let ops = blocks.iter().map(Op::new).collect();
            Step { target, range, activation, ops, operator }
        };
        let order = model.layer_order().into_iter().rev().map(Target::Layer);
        let steps = std::iter::once(Target::Output).chain(order).map(step).collect();
        Self {
            inputs: model.shape().inputs,
            outputs: model.shape().outputs,
            states: model.shape().states,
            ranges: (0..layout.layers().len()).map(|k| layout.range(k)).collect(),
            activations: layout.layers().iter().map(|l| l.activation).collect(),
            steps,
            multiply_adds,
        }
    }
}

impl AdjointWorkspace {
    pub(super) fn new(program: &AdjointProgram) -> Self {
        let ops = || program.steps.iter().flat_map(|s| &s.ops);
        let most = |f: &dyn Fn(&Op) -> usize| ops().map(f).max().unwrap_or(0);
        let map_output = |m: &FixedMap| m.output().map_or(0, |o| o.size());
        let pooled = |op: &Op| op.maps.iter().map(|m| m.input().size().max(map_output(m))).max().unwrap_or(0);
        let cotangent = most(&|op| if op.maps.is_empty() { 0 } else { pooled(op).max(op.operand) });
        let chain = most(&|op| if op.needs_values() { op.maps.len() } else { 0 });
        let value = most(&|op| if op.needs_values() { pooled(op) } else { 0 });
        let [above, below] = [0, 1].map(|side| {
            most(&|op| match &op.weights {
                OpWeights::Packed(_, _, size) if side == 0 => *size,
                OpWeights::Packed(packing, ..) => packing.size(),
                _ => 0,
            })
        });
        let layers = program.ranges.len() + 1;
        Self {
            z: Aligned::zeros(program.states * LANES),
            u: Aligned::zeros(if program.needs_inputs() { program.inputs * LANES } else { 0 }),
            v: Aligned::zeros(program.outputs * LANES),
            w: Aligned::zeros(program.states * LANES),
            du: Aligned::zeros(program.inputs * LANES),
            values: vec![vec![0.0; value * LANES]; chain],
            cotangents: [vec![0.0; cotangent * LANES], vec![0.0; cotangent * LANES]],
            packed: [vec![0.0; above * LANES], vec![0.0; below * LANES]],
            operator: OperatorWorkspace::default(),
            sizes: vec![0.0; layers * LANES],
            received: vec![0.0; layers * LANES],
            errors: vec![0.0; layers * LANES],
            terms: vec![0; layers],
            samples: Vec::with_capacity(LANES),
        }
    }

    /// Pulls `count` cotangents `v` of the outputs back to the inputs, at pre-activations `z` (and inputs `u`, where they are
    /// needed); all row-major. The first sample whose cotangent is not finite is the error.
    pub(super) fn run(
        &mut self,
        program: &AdjointProgram,
        (z, u): (&[f32], Option<&[f32]>),
        v: &[f32],
        (lanes, count): (usize, usize),
    ) -> Result<(), usize> {
        let (n, q, p) = (program.states, program.outputs, program.inputs);
        if let Some(u) = u.filter(|_| !self.u.is_empty()) {
            to_lanes(&mut self.u[..p * lanes], u, p, count, p, lanes);
        }
        to_lanes(&mut self.z[..n * lanes], z, n, count, n, lanes);
        to_lanes(&mut self.v[..q * lanes], v, q, count, q, lanes);
        self.w[..n * lanes].fill(0.0);
        self.du[..p * lanes].fill(0.0);
        self.received.fill(0.0);
        self.errors.fill(0.0);
        self.terms.fill(0);
        // The inputs are treated as one more place after the layers.
        let input_place = program.ranges.len();
        let mut output_sizes = [0.0; LANES];
        sizes(&mut output_sizes[..lanes], Norm::Sum, &self.v[..q * lanes], lanes);
        if let Some(bad) = output_sizes[..count].iter().position(|v| !v.is_finite()) {
            return Err(bad);
        }
        for step in &program.steps {
            if let Target::Layer(k) = step.target {
                self.gate(step, k, (lanes, count));
            }
            if let Some(operator) = &step.operator {
                self.pull_operator(program, step, operator, (lanes, count));
                for operand in operator.operands() {
                    let place = match operand.source {
                        Source::Input => input_place,
                        Source::Layer(j) => j,
                    };
                    // No bound on an operator's derivative is known.
                    self.errors[place * LANES..place * LANES + count].fill(f64::INFINITY);
                }
            }
            for op in &step.ops {
                let place = match op.source {
                    Source::Input => input_place,
                    Source::Layer(j) => j,
                };
                self.terms[place] += op.terms;
                for lane in 0..count {
                    let (size, error) = match step.target {
                        Target::Output => (output_sizes[lane], 0.0),
                        Target::Layer(k) => (self.sizes[k * LANES + lane], self.errors[k * LANES + lane]),
                    };
                    self.received[place * LANES + lane] += op.norm * size;
                    self.errors[place * LANES + lane] += op.norm * error;
                }
                self.pull(program, step, op, lanes);
            }
        }
        let mut gradient_sizes = [0.0; LANES];
        sizes(&mut gradient_sizes[..lanes], Norm::Sum, &self.du[..p * lanes], lanes);
        self.samples.clear();
        for (lane, size) in gradient_sizes[..count].iter().enumerate() {
            let of_layers = |values: &[f64]| (0..input_place).map(|k| values[k * LANES + lane]).sum::<f64>();
            let at = input_place * LANES + lane;
            let terms = self.terms[input_place];
            let rounding = (terms as f64 + 2.0) * SINGLE * self.received[at];
            self.samples.push(SampleDiagnostics {
                iterations: 1,
                residual: 0.0,
                state_error: or_infinite(of_layers(&self.errors)),
                output_error: or_infinite(self.errors[at] + rounding + underflow(terms * p)),
                converged: of_layers(&self.sizes).is_finite() && size.is_finite(),
                multiply_adds: program.multiply_adds,
            });
        }
        Ok(())
    }

    /// w ← φ′(z) w for a layer that has received all of its cotangent, and the bound of its error.
    fn gate(&mut self, step: &Step, k: usize, (lanes, count): (usize, usize)) {
        let rows = step.range.start * lanes..step.range.end * lanes;
        let w = &mut self.w[rows.clone()];
        for (w, z) in w.iter_mut().zip(&self.z[rows]) {
            *w *= step.activation.derivative(*z);
        }
        let totals = &mut self.sizes[k * LANES..k * LANES + lanes];
        totals.fill(0.0);
        sizes(totals, Norm::Sum, w, lanes);
        for lane in 0..count {
            let at = k * LANES + lane;
            let rounding = (self.terms[k] as f64 + 2.0) * SINGLE * self.received[at] + 4.0 * SINGLE * self.sizes[at];
            self.errors[at] += rounding + underflow(self.terms[k] * step.range.len());
            if !step.activation.is_non_expansive() {
                self.errors[at] = f64::INFINITY;
            }
        }
    }

    /// Sends a layer's cotangent back through its operator.
    fn pull_operator(
        &mut self,
        program: &AdjointProgram,
        step: &Step,
        operator: &Operator,
        (lanes, count): (usize, usize),
    ) {
        for (k, operand) in operator.operands().iter().enumerate() {
            let size = operand.dims.size();
            let into = self.operator.operand(k, size * count);
            // The operands are the values after the layers' activations.
            match operand.source {
                Source::Input => from_lanes(into, size, &self.u, count, size, lanes),
                Source::Layer(j) => {
                    from_lanes(into, size, &self.z[program.ranges[j].start * lanes..], count, size, lanes);
                    program.activations[j].apply_slice(into);
                }
            }
        }
        let width = step.range.len();
        let [value, dout] = self.operator.result(width * count);
        let own = step.range.start * lanes;
        from_lanes(value, width, &self.z[own..], count, width, lanes);
        from_lanes(dout, width, &self.w[own..], count, width, lanes);
        let cotangents = self.operator.adjoint(operator, count);
        for (operand, cotangent) in operator.operands().iter().zip(cotangents) {
            let into = match operand.source {
                Source::Input => &mut self.du[..program.inputs * lanes],
                Source::Layer(j) => &mut self.w[program.ranges[j].start * lanes..program.ranges[j].end * lanes],
            };
            let width = operand.dims.size();
            for (unit, into) in into.chunks_exact_mut(lanes).enumerate() {
                for (sample, into) in into[..count].iter_mut().enumerate() {
                    *into += cotangent[sample * width + unit];
                }
            }
        }
    }

    /// Sends a target's cotangent back through one summand.
    fn pull(&mut self, program: &AdjointProgram, step: &Step, op: &Op, lanes: usize) {
        let place = |source: Source| match source {
            Source::Layer(j) => program.ranges[j].start * lanes..program.ranges[j].end * lanes,
            Source::Input => 0..program.inputs * lanes,
        };
        if op.needs_values() {
            let rows = place(op.source);
            let first = &mut self.values[0][..rows.len()];
            match op.source {
                Source::Input => first.copy_from_slice(&self.u[rows]),
                Source::Layer(j) => {
                    let phi = program.activations[j];
                    first.iter_mut().zip(&self.z[rows]).for_each(|(x, z)| *x = phi.apply(*z));
                }
            }
        }
        let (dout, source): (&[f32], &mut [f32]) = match (step.target, op.source) {
            (Target::Output, Source::Input) => (&self.v[..program.outputs * lanes], &mut self.du[place(op.source)]),
            (Target::Output, Source::Layer(_)) => (&self.v[..program.outputs * lanes], &mut self.w[place(op.source)]),
            (Target::Layer(_), Source::Input) => {
                (&self.w[step.range.start * lanes..step.range.end * lanes], &mut self.du[place(op.source)])
            }
            (Target::Layer(_), Source::Layer(_)) => {
                let (target, source) = (step.range.start * lanes..step.range.end * lanes, place(op.source));
                if target.end <= source.start {
                    let (before, after) = self.w.split_at_mut(source.start);
                    (&before[target], &mut after[..source.len()])
                } else {
                    let (before, after) = self.w.split_at_mut(target.start);
                    (&after[..target.len()], &mut before[source])
                }
            }
        };
        let Some(last) = op.maps.last() else { return op.transpose(dout, source, &mut self.packed, lanes) };
        let [near, far] = &mut self.cotangents;
        let (mut near, mut far) = (near, far);
        let size = |m: &FixedMap| m.output().map_or(0, |o| o.size()) * lanes;
        if op.needs_values() {
            for (k, map) in op.maps[..op.maps.len() - 1].iter().enumerate() {
                let (done, next) = self.values.split_at_mut(k + 1);
                map.apply_lanes(&done[k][..map.input().size() * lanes], &mut next[0][..size(map)], lanes);
            }
        }
        near[..size(last)].fill(0.0);
        op.transpose(dout, &mut near[..size(last)], &mut self.packed, lanes);
        for (k, map) in op.maps.iter().enumerate().rev() {
            let x = self.values.get(k).filter(|_| op.needs_values()).map_or(&[][..], |x| &x[..]);
            if k == 0 {
                map.pull_back_lanes(x, &near[..size(map)], source, lanes);
            } else {
                let into = &mut far[..map.input().size() * lanes];
                into.fill(0.0);
                map.pull_back_lanes(x, &near[..size(map)], into, lanes);
                std::mem::swap(&mut near, &mut far);
            }
        }
    }
}
