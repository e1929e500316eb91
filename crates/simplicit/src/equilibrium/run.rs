//! Running a program on a few samples side by side, with the error bound of every stage.

use std::ops::Range;

use super::cycle::{CycleWorkspace, Limits, certified};
use super::program::{Norm, Program, Reads, StageCode};
use crate::layout::Activation;
use crate::linalg::lanes::{Aligned, MAX_LANES, largest_magnitudes, to_lanes};
use crate::linalg::tiles::{Lane, TILE, accumulate};
use crate::linalg::vectorised;

/// Relative size of one rounding, with a margin that covers any order of summation.
pub(super) const SINGLE: f64 = f32::EPSILON as f64;

/// Iterations, errors and cost of one sample.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct SampleDiagnostics {
    /// Steps of the cycle that took longest; 1 for an acyclic model, which needs one pass.
    pub iterations: usize,
    /// Largest last step of a cycle, max |x_k − x_{k−1}| (Σ for a gradient); 0 for an acyclic model.
    pub residual: f64,
    /// Certified: no state is further than this from the exact equilibrium, rounding included (for a gradient: the
    /// sum over states). Infinite if no contraction could be shown.
    pub state_error: f64,
    /// The same bound for the outputs.
    pub output_error: f64,
    /// Whether every cycle reached the tolerance.
    pub converged: bool,
    /// Multiply-adds that this sample took.
    pub multiply_adds: u64,
}

impl SampleDiagnostics {
    /// The diagnostics of a sample that needs no iteration, before any error is known.
    pub(super) fn of_one_pass(multiply_adds: u64) -> Self {
        Self { iterations: 1, residual: 0.0, state_error: 0.0, output_error: 0.0, converged: true, multiply_adds }
    }
}

/// The memory of a thread that runs a block; nothing is allocated while running.
#[derive(Debug)]
pub(super) struct RunWorkspace {
    tile: Aligned<f32>,
    wide_tile: Aligned<f64>,
    /// Pre-activations in schedule order, then the outputs.
    pub(super) z: Aligned<f32>,
    pub(super) x: Aligned<f32>,
    w: Aligned<f64>,
    cycle: CycleWorkspace,
    /// Gates of an adjoint, in schedule order.
    pub(super) gates: Vec<f32>,
    bounds: Bounds,
    pub(super) samples: Vec<SampleDiagnostics>,
}

/// Magnitudes and errors for every stage and lane.
#[derive(Debug, Default)]
struct Bounds {
    inputs: Vec<f64>,
    sizes: Vec<f64>,
    errors: Vec<f64>,
}

impl RunWorkspace {
    pub(super) fn new(program: &Program, lanes: usize, memory: usize) -> Self {
        let cyclic = program.cyclic_units > 0;
        let gates = if program.gated { program.units() * lanes } else { 0 };
        Self {
            tile: Aligned::zeros(TILE * lanes),
            wide_tile: Aligned::zeros(if cyclic { TILE * lanes } else { 0 }),
            z: Aligned::zeros((program.units() + program.outputs) * lanes),
            x: Aligned::zeros(program.padded_units() * lanes),
            w: Aligned::zeros(program.cyclic_units * lanes),
            cycle: CycleWorkspace::new(program.largest_cycle(), lanes, memory),
            gates: vec![0.0; gates],
            bounds: Bounds {
                inputs: vec![0.0; lanes],
                sizes: vec![0.0; program.stages.len() * lanes],
                errors: vec![0.0; program.stages.len() * lanes],
            },
            samples: Vec::with_capacity(lanes),
        }
    }

    /// Runs `count` samples of `inputs` (row-major, whole rows) side by side in `lanes` lanes. Afterwards `z`, `x`,
    /// `samples` hold the result, outputs being the last rows of `z`. The first sample with a NaN or infinity among the
    /// inputs that are read is the error.
    pub(super) fn run(
        &mut self,
        program: &Program,
        inputs: &[f32],
        (lanes, count): (usize, usize),
        limits: Limits,
    ) -> Result<(), usize> {
        let units = program.units();
        for (row, &bias) in self.z[..(units + program.outputs) * lanes].chunks_exact_mut(lanes).zip(&program.bias) {
            row.fill(bias);
        }
        self.read_inputs(program, inputs, lanes, count);
        if let Some(bad) = self.bounds.inputs[..count].iter().position(|v| !v.is_finite()) {
            return Err(bad);
        }
        self.samples.clear();
        self.samples.resize(count, SampleDiagnostics::of_one_pass(program.multiply_adds));
        for (s, stage) in program.stages.iter().enumerate() {
            if stage.cycle.is_some() {
                self.run_cycle(program, s, stage, (lanes, count), limits);
            } else {
                let rows = stage.range.start * lanes..stage.range.end * lanes;
                accumulate(&stage.from_stages, &mut self.z[rows.clone()], &self.x, lanes);
                let gates = program.gated.then(|| &self.gates[rows.clone()]);
                apply(&stage.segments, gates, &self.z[rows.clone()], &mut self.x[rows.clone()], lanes);
                let bounds = &mut self.bounds;
                let own = &mut bounds.sizes[s * lanes..(s + 1) * lanes];
                own.fill(0.0);
                sizes(own, program.norm, &self.x[rows], lanes);
                bounds.acyclic(s, &stage.reads, program.norm, stage.range.len(), lanes, count);
            }
        }
        let outputs = &mut self.z[units * lanes..(units + program.outputs) * lanes];
        accumulate(&program.outputs_from_stages, outputs, &self.x, lanes);
        let outputs = &self.z[units * lanes..(units + program.outputs) * lanes];
        for (k, sample) in self.samples.iter_mut().enumerate() {
            let (carried, rounding) = self.bounds.reads(&program.output_reads, k, lanes, 0.0);
            let rounding = rounding * (program.output_reads.terms as f64 + 2.0) * SINGLE;
            sample.output_error = or_infinite(carried + rounding + underflow(program.output_reads.terms));
            let stages = program.stages.len();
            let of_lane = |values: &[f64]| {
                let all = values.iter().skip(k).step_by(lanes).take(stages);
                all.fold(0.0, |total, v| program.norm.add(total, *v))
            };
            sample.state_error = or_infinite(of_lane(&self.bounds.errors));
            // If values overflow, there is no equilibrium, whatever the iteration says.
            sample.converged &=
                of_lane(&self.bounds.sizes).is_finite() && outputs.iter().skip(k).step_by(lanes).all(|y| y.is_finite());
        }
        Ok(())
    }

    /// Passes the inputs through a buffer of one tile: each tile is transposed once and serves all rows while it is
    /// in the cache.
    fn read_inputs(&mut self, program: &Program, inputs: &[f32], lanes: usize, count: usize) {
        let p = program.inputs;
        self.w.fill(0.0);
        self.bounds.inputs[..lanes].fill(0.0);
        for tile in &program.input_tiles {
            let first = tile.tile * TILE;
            to_lanes(&mut self.tile, &inputs[first..], p, count, tile.features, lanes);
            let used = &self.tile[..tile.features * lanes];
            sizes(&mut self.bounds.inputs[..lanes], program.norm, used, lanes);
            if let Some(k) = tile.single {
                f32::accumulate_tile(&program.from_inputs, k, &mut self.z, &self.tile, lanes);
            }
            if let Some(k) = tile.double {
                widen(&mut self.wide_tile, &self.tile[..TILE * lanes]);
                f64::accumulate_tile(&program.cycles_from_inputs, k, &mut self.w, &self.wide_tile, lanes);
            }
        }
    }

    fn run_cycle(
        &mut self,
        program: &Program,
        s: usize,
        stage: &StageCode,
        (lanes, count): (usize, usize),
        limits: Limits,
    ) {
        let Some(cycle) = &stage.cycle else { return };
        let n = stage.range.len() * lanes;
        let w = &mut self.w[cycle.first * lanes..][..n];
        for (row, bias) in w.chunks_exact_mut(lanes).zip(&cycle.bias) {
            row.iter_mut().for_each(|v| *v += bias);
        }
        for (k, tile) in cycle.from_stages.occupied().enumerate() {
            widen(&mut self.wide_tile, &self.x[tile * TILE * lanes..][..TILE * lanes]);
            f64::accumulate_tile(&cycle.from_stages, k, w, &self.wide_tile, lanes);
        }
        let rows = stage.range.start * lanes..stage.range.end * lanes;
        let gates = program.gated.then(|| &self.gates[rows.clone()]);
        self.cycle.solve(stage, cycle, w, gates, (lanes, count), limits);
        let (z, x) = (&mut self.z[rows.clone()], &mut self.x[rows]);
        for at in 0..n {
            z[at] = self.cycle.z_out[at] as f32;
            x[at] = self.cycle.x_out[at] as f32;
        }
        let bounds = &mut self.bounds;
        let lightest = cycle.weights.iter().copied().fold(f64::INFINITY, f64::min);
        for (k, sample) in self.samples.iter_mut().enumerate() {
            let status = self.cycle.status[k];
            let (carried, rounding) = bounds.reads(&stage.reads, k, lanes, cycle.inside_norm * status.size);
            let terms = (stage.reads.terms + 4) as f64;
            let inflow = carried + rounding * terms * f64::EPSILON;
            let error = if cycle.rho < 1.0 {
                certified(cycle, status.weighted_residual) + inflow / (1.0 - cycle.rho) / lightest
            } else {
                f64::INFINITY
            };
            // Other stages read the states in single precision.
            bounds.sizes[s * lanes + k] = status.size;
            bounds.errors[s * lanes + k] = error + SINGLE * status.size + underflow(stage.range.len());
            sample.iterations = sample.iterations.max(status.iterations);
            sample.residual = sample.residual.max(status.residual);
            sample.converged &= status.converged;
            sample.multiply_adds += (cycle.inside_nonzeros * status.iterations) as u64;
        }
    }
}

impl Bounds {
    /// The error carried over from what is read, and the sum of magnitudes whose rounding is to be bounded.
    fn reads(&self, reads: &Reads, lane: usize, lanes: usize, inside: f64) -> (f64, f64) {
        let (mut carried, mut size) = (0.0, reads.bias + reads.inputs * self.inputs[lane] + inside);
        for &(stage, norm) in &reads.stages {
            carried += norm * self.errors[stage * lanes + lane];
            size += norm * self.sizes[stage * lanes + lane];
        }
        (carried, size)
    }

    fn acyclic(&mut self, s: usize, reads: &Reads, norm: Norm, units: usize, lanes: usize, count: usize) {
        for lane in 0..count {
            let (carried, size) = self.reads(reads, lane, lanes, 0.0);
            let at = s * lanes + lane;
            // Four more roundings cover the activation.
            let rounding = (reads.terms as f64 + 2.0) * SINGLE * size + 4.0 * SINGLE * self.sizes[at];
            let few = if norm == Norm::Sum { units } else { 1 };
            self.errors[at] = carried + rounding + underflow(few * reads.terms);
        }
    }
}

/// The error, or infinity if it is not a number.
pub(super) fn or_infinite(error: f64) -> f64 {
    if error.is_nan() { f64::INFINITY } else { error }
}

/// The most that a sum can lose below the smallest normal number.
pub(super) fn underflow(terms: usize) -> f64 {
    terms as f64 * f64::from(f32::MIN_POSITIVE)
}

fn widen(out: &mut [f64], source: &[f32]) {
    vectorised(
        #[inline(always)]
        || {
            for (o, v) in out.iter_mut().zip(source) {
                *o = f64::from(*v);
            }
        },
    );
}

/// Adds the magnitudes of `rows` (features × lanes) to the running norm of every lane; NaN and infinity both give a
/// result that is not finite.
pub(super) fn sizes(totals: &mut [f64], norm: Norm, rows: &[f32], lanes: usize) {
    match norm {
        Norm::Max => {
            let mut largest = [0.0; MAX_LANES];
            largest_magnitudes(&mut largest[..lanes], rows);
            for (total, largest) in totals.iter_mut().zip(&largest[..lanes]) {
                *total = norm.add(*total, f64::from(*largest));
            }
        }
        Norm::Sum => {
            for row in rows.chunks_exact(lanes) {
                totals.iter_mut().zip(row).for_each(|(total, v)| *total += f64::from(v.abs()));
            }
        }
    }
}

fn apply(segments: &[(Range<usize>, Activation)], gates: Option<&[f32]>, z: &[f32], x: &mut [f32], lanes: usize) {
    if let Some(gates) = gates {
        for ((x, z), gate) in x.iter_mut().zip(z).zip(gates) {
            *x = z * gate;
        }
    }
    for (range, activation) in segments {
        let rows = range.start * lanes..range.end * lanes;
        let pairs = x[rows.clone()].iter_mut().zip(&z[rows]);
        // The common activations have loops of their own, which the compiler vectorises.
        match activation {
            Activation::Relu => vectorised(
                #[inline(always)]
                || pairs.for_each(|(x, z)| *x = if *z > 0.0 { *z } else { 0.0 }),
            ),
            Activation::Identity => pairs.for_each(|(x, z)| *x = *z),
            other => pairs.for_each(|(x, z)| *x = other.apply(*z)),
        }
    }
}

/// φ in double precision, or the gates.
pub(super) fn apply_f64(
    segments: &[(Range<usize>, Activation)],
    gates: Option<&[f32]>,
    z: &[f64],
    x: &mut [f64],
    lanes: usize,
) {
    if let Some(gates) = gates {
        for ((x, z), gate) in x.iter_mut().zip(z).zip(gates) {
            *x = z * f64::from(*gate);
        }
    }
    for (range, activation) in segments {
        let rows = range.start * lanes..range.end * lanes;
        let pairs = x[rows.clone()].iter_mut().zip(&z[rows]);
        // The common activation is chosen outside the loop: a choice for every value would prevent the use of vector
        // registers.
        match activation {
            Activation::Relu => vectorised(
                #[inline(always)]
                || pairs.for_each(|(x, z)| *x = Activation::Relu.apply_f64(*z)),
            ),
            other => pairs.for_each(|(x, z)| *x = other.apply_f64(*z)),
        }
    }
}
