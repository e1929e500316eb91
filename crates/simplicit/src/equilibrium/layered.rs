//! Models with tap blocks, run layer by layer: one pass, several samples side by side, the error of every layer bounded.

use std::ops::Range;

use super::operand::Packing;
use super::operator::OperatorRoom;
use super::program::Norm;
use super::run::{SINGLE, SampleDiagnostics, or_infinite, sizes, underflow};
use crate::layout::{Activation, Layout, Operand, Operator};
use crate::linalg::lanes::{Aligned, from_lanes, to_lanes};
use crate::linalg::{Csr, Matrix, Stencil, vectorised};
use crate::model::{ImplicitModel, TapBlock, TapWeights, Target};
use crate::network::{FixedMap, Source};
use crate::{Error, Result};

/// Samples that run side by side: a feature of all of them is one or two vectors.
pub(super) const LANES: usize = 16;

/// One summand of a layer.
pub(super) struct Op {
    pub(super) source: Source,
    pub(super) maps: Vec<FixedMap>,
    pub(super) weights: OpWeights,
    /// Units of the source.
    source_size: usize,
    /// Norm of the block, and addends of one result.
    norm: f64,
    terms: usize,
}

pub(super) enum OpWeights {
    /// Reads the operand as it is.
    Plain(Stencil),
    /// Reads it padded and split by stride.
    Packed(Packing, Stencil),
    /// A residual sum, with a factor per channel of so many positions in a rescaled model.
    Residual(Option<(Vec<f32>, usize)>),
}

/// A layer, or the output: its bias, what it sums, and φ.
pub(super) struct Step {
    pub(super) target: Target,
    pub(super) range: Range<usize>,
    /// One per row of `positions` units.
    bias: Vec<f32>,
    positions: usize,
    pub(super) activation: Activation,
    pub(super) ops: Vec<Op>,
    /// What computes the layer instead of the sum.
    pub(super) operator: Option<Operator>,
    largest_bias: f64,
}

/// A model laid out for running.
pub(super) struct LayerProgram {
    pub(super) inputs: usize,
    pub(super) outputs: usize,
    pub(super) states: usize,
    /// Units of every layer.
    pub(super) ranges: Vec<Range<usize>>,
    /// Layers in an order in which they can be computed, the output last.
    pub(super) steps: Vec<Step>,
    multiply_adds: u64,
}

/// Room for pooled and packed operands.
#[derive(Default)]
pub(super) struct Scratch {
    pooled: [Vec<f32>; 2],
    packed: Vec<f32>,
}

/// Everything a thread needs to run a block; nothing is allocated while running.
pub(super) struct LayerRoom {
    u: Aligned<f32>,
    pub(super) x: Aligned<f32>,
    pub(super) y: Aligned<f32>,
    /// Pre-activations, only where they are asked for.
    pub(super) z: Aligned<f32>,
    scratch: Scratch,
    operator: OperatorRoom,
    input_sizes: Vec<f64>,
    sizes: Vec<f64>,
    errors: Vec<f64>,
    pub(super) samples: Vec<SampleDiagnostics>,
}

impl Op {
    fn new(block: &TapBlock) -> Self {
        let (weights, own) = match &block.weights {
            TapWeights::Taps(taps) => {
                let packing = Packing::new(block.input, block.window, block.output);
                let stencil = packing.stencil(taps);
                let weights =
                    if packing.is_plain() { OpWeights::Plain(stencil) } else { OpWeights::Packed(packing, stencil) };
                (weights, longest_row(taps))
            }
            TapWeights::Identity => (OpWeights::Residual(None), 1),
            TapWeights::Diagonal(factors) => {
                (OpWeights::Residual(Some((factors.clone(), block.output.positions()))), 1)
            }
        };
        let terms = own + block.maps.iter().map(|m| m.terms()).sum::<usize>();
        Self {
            source: block.source,
            maps: block.maps.clone(),
            weights,
            source_size: block.maps.first().map_or(block.input, |m| m.input()).size(),
            // Summed in double precision: this margin covers the rounding.
            norm: block.norm_inf() * (1.0 + 1e-9),
            terms,
        }
    }

    /// Values of one sample that its scratch must hold: pooled, packed.
    fn room(&self) -> (usize, usize) {
        let pooled = self.maps.iter().map(|m| m.output().map_or(0, |o| o.size())).max().unwrap_or(0);
        let packed = match &self.weights {
            OpWeights::Packed(packing, _) => packing.size(),
            _ => 0,
        };
        (pooled, packed)
    }

    /// `sums += block × source`, both units × lanes.
    fn add(&self, source: &[f32], sums: &mut [f32], scratch: &mut Scratch, lanes: usize) {
        let Scratch { pooled: [even, odd], packed } = scratch;
        let (mut from, mut into) = (even, odd);
        let mut operand = source;
        for (k, map) in self.maps.iter().enumerate() {
            // Each map reads what the last one wrote.
            std::mem::swap(&mut from, &mut into);
            let size = map.output().map_or(0, |o| o.size()) * lanes;
            let x = if k == 0 { source } else { &from[..map.input().size() * lanes] };
            map.apply_lanes(x, &mut into[..size], lanes);
        }
        if let Some(map) = self.maps.last() {
            operand = &into[..map.output().map_or(0, |o| o.size()) * lanes];
        }
        match &self.weights {
            OpWeights::Plain(stencil) => stencil.accumulate(sums, operand, lanes),
            OpWeights::Packed(packing, stencil) => {
                let packed = &mut packed[..packing.size() * lanes];
                packing.pack(operand, packed, lanes);
                stencil.accumulate(sums, packed, lanes);
            }
            OpWeights::Residual(factors) => add_residual(sums, operand, factors.as_ref(), lanes),
        }
    }
}

/// `sums += factor × operand`, one factor per channel, 1 without.
pub(super) fn add_residual(sums: &mut [f32], operand: &[f32], factors: Option<&(Vec<f32>, usize)>, lanes: usize) {
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

fn longest_row(m: &Csr<f32>) -> usize {
    m.indptr().windows(2).map(|w| w[1] - w[0]).max().unwrap_or(0)
}

impl Scratch {
    fn for_ops<'a>(ops: impl Iterator<Item = &'a Op>, lanes: usize) -> Self {
        let (pooled, packed) = ops.map(Op::room).fold((0, 0), |(a, b), (c, d)| (a.max(c), b.max(d)));
        Self { pooled: [vec![0.0; pooled * lanes], vec![0.0; pooled * lanes]], packed: vec![0.0; packed * lanes] }
    }
}

impl Step {
    fn new(model: &ImplicitModel, target: Target) -> Self {
        let layout = model.layout();
        let bias = match target {
            Target::Layer(k) => &model.state_bias()[layout.row_range(k)],
            Target::Output => model.output_bias(),
        };
        Self::of_blocks(layout, model.shape().outputs, target, &model.summands(target), bias.to_vec())
    }

    fn of_blocks(layout: &Layout, outputs: usize, target: Target, blocks: &[TapBlock], bias: Vec<f32>) -> Self {
        let (range, positions, activation, operator) = match target {
            Target::Layer(k) => {
                let layer = &layout.layers()[k];
                let positions = layer.map.map_or(1, |m| m.positions());
                (layout.range(k), positions, layer.activation, layer.operator.clone())
            }
            Target::Output => (0..outputs, 1, Activation::Identity, None),
        };
        let ops = blocks.iter().map(Op::new).collect();
        let largest_bias = bias.iter().map(|b| f64::from(b.abs())).fold(0.0, f64::max);
        Self { target, range, bias, positions, activation, ops, operator, largest_bias }
    }

    /// What the layer reads.
    fn sources(&self) -> impl Iterator<Item = Source> {
        self.ops.iter().map(|op| op.source).chain(operands(self.operator.as_ref()).iter().map(|o| o.source))
    }

    /// The bias, then every summand; `source` gives units × lanes.
    fn sum<'a>(&self, sums: &mut [f32], source: impl Fn(Source) -> &'a [f32], scratch: &mut Scratch, lanes: usize) {
        for (row, bias) in sums.chunks_exact_mut((self.positions * lanes).max(1)).zip(&self.bias) {
            row.fill(*bias);
        }
        for op in &self.ops {
            op.add(source(op.source), sums, scratch, lanes);
        }
    }

    fn terms(&self) -> usize {
        self.ops.iter().map(|op| op.terms).sum::<usize>() + 1
    }
}

/// One layer's pre-activations (or the output) from the states of its sources, for a batch: what a cascade needs.
pub struct LayerSum(Step);

impl std::fmt::Debug for LayerSum {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LayerSum").field("target", &self.0.target).finish_non_exhaustive()
    }
}

impl LayerSum {
    /// Of a layer of the model, or its output.
    ///
    /// # Panics
    /// If there is no such layer.
    pub fn new(model: &ImplicitModel, target: Target) -> Self {
        Self(Step::new(model, target))
    }

    /// Of a layer with these summands and biases, or the output: a model of which no more is known yet.
    pub(crate) fn of_blocks(
        layout: &Layout,
        outputs: usize,
        target: Target,
        blocks: &[TapBlock],
        bias: Vec<f32>,
    ) -> Self {
        Self(Step::of_blocks(layout, outputs, target, blocks, bias))
    }

    /// What it reads, each once.
    pub fn sources(&self) -> Vec<Source> {
        let mut found = Vec::new();
        for source in self.0.sources() {
            if !found.contains(&source) {
                found.push(source);
            }
        }
        found
    }

    /// z (or the value of an operator), m × units, on the calling thread; `source` gives the inputs or a layer's states, one sample a row.
    pub fn pre_activations<'a>(
        &self,
        samples: usize,
        source: impl Fn(Source) -> &'a Matrix<f32>,
    ) -> Result<Matrix<f32>> {
        let units = self.0.range.len();
        let mut z = Matrix::zeros(samples, units);
        if let Some(operator) = &self.0.operator {
            let operands = operands(Some(operator));
            for operand in operands {
                require_rows(
                    &format!("values of {:?}", operand.source),
                    source(operand.source),
                    samples,
                    operand.dims.size(),
                )?;
            }
            for sample in 0..samples {
                let values: Vec<&[f32]> = operands.iter().map(|o| source(o.source).row(sample)).collect();
                operator.forward(&values, z.row_mut(sample));
            }
            return Ok(z);
        }
        let mut lanes = Vec::new();
        for place in self.sources() {
            let width = self.0.ops.iter().find(|op| op.source == place).map_or(0, |op| op.source_size);
            require_rows(&format!("states of {place:?}"), source(place), samples, width)?;
            lanes.push((place, vec![0.0; width * LANES]));
        }
        let mut scratch = Scratch::for_ops(self.0.ops.iter(), LANES);
        let mut sums = vec![0.0; units * LANES];
        for first in (0..samples).step_by(LANES) {
            let count = LANES.min(samples - first);
            for (place, lanes) in &mut lanes {
                rows_to_lanes(source(*place), first, count, lanes);
            }
            let found = |place: Source| lanes.iter().find(|(s, _)| *s == place).map_or(&[][..], |(_, x)| &x[..]);
            self.0.sum(&mut sums, found, &mut scratch, LANES);
            lanes_to_rows(&sums, first, count, &mut z);
        }
        Ok(z)
    }
}

impl TapBlock {
    /// `z += block × source` for a batch, one sample a row: `source` the inputs or the states of the source's layer, `z` of
    /// the target's.
    pub fn add_to(&self, source: &Matrix<f32>, z: &mut Matrix<f32>) -> Result<()> {
        let op = Op::new(self);
        require_rows("source", source, z.rows(), op.source_size)?;
        require_rows("z", z, source.rows(), self.output.size())?;
        let mut scratch = Scratch::for_ops(std::iter::once(&op), LANES);
        let (mut x, mut sums) = (vec![0.0; source.cols() * LANES], vec![0.0; z.cols() * LANES]);
        for first in (0..z.rows()).step_by(LANES) {
            let count = LANES.min(z.rows() - first);
            rows_to_lanes(source, first, count, &mut x);
            rows_to_lanes(z, first, count, &mut sums);
            op.add(&x, &mut sums, &mut scratch, LANES);
            lanes_to_rows(&sums, first, count, z);
        }
        Ok(())
    }
}

/// What an operator reads; nothing without one.
pub(super) fn operands(operator: Option<&Operator>) -> &[Operand] {
    match operator {
        Some(Operator::Structure { operands, .. }) => operands,
        _ => &[],
    }
}

fn require_rows(what: &str, m: &Matrix<f32>, rows: usize, cols: usize) -> Result<()> {
    if (m.rows(), m.cols()) == (rows, cols) {
        return Ok(());
    }
    Err(Error::shape(what, format!("{rows} × {cols}"), format!("{} × {}", m.rows(), m.cols())))
}

fn rows_to_lanes(m: &Matrix<f32>, first: usize, count: usize, lanes: &mut [f32]) {
    to_lanes(lanes, &m.as_slice()[first * m.cols()..], m.cols(), count, m.cols(), LANES);
}

fn lanes_to_rows(lanes: &[f32], first: usize, count: usize, m: &mut Matrix<f32>) {
    let width = m.cols();
    from_lanes(&mut m.as_mut_slice()[first * width..], width, lanes, count, width, LANES);
}

impl LayerProgram {
    /// All layers, or only those that the outputs depend on.
    pub(super) fn new(model: &ImplicitModel, all: bool) -> Self {
        let layout = model.layout();
        let order = model.layer_order();
        let mut steps: Vec<Step> = order.iter().map(|&k| Step::new(model, Target::Layer(k))).collect();
        steps.push(Step::new(model, Target::Output));
        if !all {
            let mut live = vec![false; layout.layers().len()];
            for step in steps.iter().rev() {
                if matches!(step.target, Target::Layer(k) if !live[k]) {
                    continue;
                }
                for source in step.sources() {
                    if let Source::Layer(k) = source {
                        live[k] = true;
                    }
                }
            }
            steps.retain(|s| !matches!(s.target, Target::Layer(k) if !live[k]));
        }
        let run = |target: Target| steps.iter().any(|s| s.target == target);
        let shared: u64 = model.taps().iter().filter(|b| run(b.target)).map(TapBlock::multiply_adds).sum();
        let count = |m: &Csr<f32>, rows: &Range<usize>| (m.indptr()[rows.end] - m.indptr()[rows.start]) as u64;
        let plain: u64 = steps
            .iter()
            .map(|s| match s.target {
                Target::Layer(_) => count(model.a(), &s.range) + count(model.b(), &s.range),
                Target::Output => (model.c().nonzeros() + model.d().nonzeros()) as u64,
            })
            .sum();
        Self {
            inputs: model.shape().inputs,
            outputs: model.shape().outputs,
            states: model.shape().states,
            ranges: (0..layout.layers().len()).map(|k| layout.range(k)).collect(),
            steps,
            multiply_adds: shared + plain,
        }
    }

    /// Whether every layer is run.
    pub(super) fn is_complete(&self) -> bool {
        self.steps.len() == self.ranges.len() + 1
    }

    pub(super) fn multiply_adds(&self) -> u64 {
        self.multiply_adds
    }
}

impl LayerRoom {
    pub(super) fn new(program: &LayerProgram, states: bool) -> Self {
        let layers = program.ranges.len();
        Self {
            u: Aligned::zeros(program.inputs * LANES),
            x: Aligned::zeros(program.states * LANES),
            y: Aligned::zeros(program.outputs * LANES),
            z: Aligned::zeros(if states { program.states * LANES } else { 0 }),
            scratch: Scratch::for_ops(program.steps.iter().flat_map(|s| &s.ops), LANES),
            operator: OperatorRoom::default(),
            input_sizes: vec![0.0; LANES],
            sizes: vec![0.0; layers * LANES],
            errors: vec![0.0; layers * LANES],
            samples: Vec::with_capacity(LANES),
        }
    }

    /// Runs `count` samples of `inputs` (row-major, whole rows) side by side in `lanes` lanes. Afterwards `x`, `y` and
    /// `samples` hold the result, and `z` where there is room for it. The first sample with a NaN or infinity is the error.
    pub(super) fn run(
        &mut self,
        program: &LayerProgram,
        inputs: &[f32],
        (lanes, count): (usize, usize),
    ) -> Result<(), usize> {
        let u = &mut self.u[..program.inputs * lanes];
        to_lanes(u, inputs, program.inputs, count, program.inputs, lanes);
        self.input_sizes.fill(0.0);
        sizes(&mut self.input_sizes[..lanes], Norm::Max, u, lanes);
        if let Some(bad) = self.input_sizes[..count].iter().position(|v| !v.is_finite()) {
            return Err(bad);
        }
        self.samples.clear();
        self.samples.resize(
            count,
            SampleDiagnostics {
                iterations: 1,
                residual: 0.0,
                state_error: 0.0,
                output_error: 0.0,
                converged: true,
                multiply_adds: program.multiply_adds,
            },
        );
        let u = &self.u[..];
        for step in &program.steps {
            let Target::Layer(k) = step.target else {
                let (x, y) = (&self.x[..], &mut self.y[..program.outputs * lanes]);
                let source = |source: Source| match source {
                    Source::Input => &u[..program.inputs * lanes],
                    Source::Layer(j) => &x[program.ranges[j].start * lanes..program.ranges[j].end * lanes],
                };
                step.sum(y, source, &mut self.scratch, lanes);
                continue;
            };
            let rows = step.range.start * lanes..step.range.end * lanes;
            let (before, rest) = self.x.split_at_mut(rows.start);
            let (own, after) = rest.split_at_mut(rows.len());
            let source = |source: Source| match source {
                Source::Input => &u[..program.inputs * lanes],
                Source::Layer(j) => {
                    let from = &program.ranges[j];
                    if from.end * lanes <= rows.start {
                        &before[from.start * lanes..from.end * lanes]
                    } else {
                        &after[from.start * lanes - rows.end..from.end * lanes - rows.end]
                    }
                }
            };
            match &step.operator {
                Some(operator) => {
                    let operands = operands(Some(operator)).iter().map(|o| source(o.source));
                    self.operator.forward(operator, operands, own, (lanes, count));
                }
                None => step.sum(own, source, &mut self.scratch, lanes),
            }
            if !self.z.is_empty() {
                self.z[rows.clone()].copy_from_slice(own);
            }
            match step.activation {
                Activation::Relu => vectorised(
                    #[inline(always)]
                    || own.iter_mut().for_each(|x| *x = if *x > 0.0 { *x } else { 0.0 }),
                ),
                other => other.apply_slice(own),
            }
            let totals = &mut self.sizes[k * LANES..k * LANES + lanes];
            totals.fill(0.0);
            sizes(totals, Norm::Max, own, lanes);
            for lane in 0..count {
                let (carried, size) = self.reads(step, lane);
                let at = k * LANES + lane;
                let terms = step.terms();
                // Four more roundings cover the activation.
                let rounding = (terms as f64 + 2.0) * SINGLE * size + 4.0 * SINGLE * self.sizes[at];
                self.errors[at] = match &step.operator {
                    // Nothing is known about how an operator or an expansive activation passes errors on.
                    Some(Operator::Structure { .. }) => f64::INFINITY,
                    None if !step.activation.is_non_expansive() => f64::INFINITY,
                    _ => carried + rounding + underflow(terms),
                };
            }
        }
        let Some(last) = program.steps.last() else { return Ok(()) };
        let mut output_sizes = [0.0; LANES];
        sizes(&mut output_sizes[..lanes], Norm::Max, &self.y[..program.outputs * lanes], lanes);
        for lane in 0..count {
            let (carried, size) = self.reads(last, lane);
            let rounding = (last.terms() as f64 + 2.0) * SINGLE * size;
            let largest = |values: &[f64]| {
                let of_layers = program.steps.iter().filter_map(|s| match s.target {
                    Target::Layer(k) => Some(values[k * LANES + lane]),
                    Target::Output => None,
                });
                of_layers.fold(0.0, |total, v| Norm::Max.add(total, v))
            };
            let sample = &mut self.samples[lane];
            sample.output_error = or_infinite(carried + rounding + underflow(last.terms()));
            sample.state_error = or_infinite(largest(&self.errors));
            // An overflow is not an equilibrium.
            sample.converged = largest(&self.sizes).is_finite() && output_sizes[lane].is_finite();
        }
        Ok(())
    }

    /// Error carried over from what is read, and the sum of magnitudes whose rounding is to be bounded.
    fn reads(&self, step: &Step, lane: usize) -> (f64, f64) {
        step.ops.iter().fold((0.0, step.largest_bias), |(carried, size), op| match op.source {
            Source::Input => (carried, size + op.norm * self.input_sizes[lane]),
            Source::Layer(j) => {
                let at = j * LANES + lane;
                (carried + op.norm * self.errors[at], size + op.norm * self.sizes[at])
            }
        })
    }
}
