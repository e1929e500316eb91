//! Running an implicit model: the equilibrium x = φ(Ax + Bu + b) with a certified error, and exact input gradients.
//!
//! Acyclic states are computed in one pass in single precision; only true cycles iterate, in double precision. A sample's
//! result depends neither on the batch it is in nor on the number of threads, bit by bit.

mod cycle;
mod gradient;
mod onnx;
mod program;
mod run;
mod schedule;

pub use gradient::{GradientSolution, InputGradient};
pub use onnx::{OnnxSettings, export_onnx, to_onnx};
pub use run::SampleDiagnostics;
pub use schedule::{Schedule, Stage};

use std::sync::Mutex;

use crate::layout::{Activation, Layout};
use crate::linalg::Matrix;
use crate::linalg::lanes::{from_lanes, to_lanes};
use crate::model::ImplicitModel;
use crate::parallel::{self, Threads};
use crate::states::{StateBlock, StateMap, StateShape};
use crate::{Error, Result};
use cycle::Limits;
use program::{Equation, Norm, Program};
use run::Room;

/// Samples that run side by side in an acyclic model; cycles keep more per sample in the cache and take half.
const LANES: usize = 32;
/// Samples a thread takes at a time.
const CHUNK: usize = 64;

/// How far and how fast.
///
/// | setting | default | purpose |
/// |---|---|---|
/// | `tolerance` | 1e-6 | certified distance from the equilibrium, relative to max(1, ‖x‖∞), before rounding to f32 |
/// | `max_iterations` | 2000 | steps per cycle; a sample that needs more is reported, not an error |
/// | `memory` | 5 | steps that Anderson acceleration remembers, at most 16; 0 is plain Picard |
/// | `threads` | all | threads for a batch |
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EquilibriumSettings {
    /// Certified distance from the equilibrium at which a cycle stops, relative to max(1, ‖x‖∞).
    pub tolerance: f64,
    /// Most steps per cycle.
    pub max_iterations: usize,
    /// Steps that Anderson acceleration remembers; 0 is plain Picard.
    pub memory: usize,
    /// Threads for a batch.
    pub threads: Threads,
}

impl Default for EquilibriumSettings {
    fn default() -> Self {
        Self { tolerance: 1e-6, max_iterations: 2000, memory: 5, threads: Threads::available() }
    }
}

impl EquilibriumSettings {
    fn check(&self) -> Result<Limits> {
        if !(self.tolerance > 0.0 && self.tolerance.is_finite()) {
            return Err(Error::setting("tolerance", "a positive number", self.tolerance));
        }
        if self.max_iterations == 0 {
            return Err(Error::setting("max_iterations", "at least 1", 0));
        }
        if self.memory > cycle::MAX_MEMORY {
            return Err(Error::setting("memory", format!("at most {}", cycle::MAX_MEMORY), self.memory));
        }
        Ok(Limits { tolerance: self.tolerance, max_iterations: self.max_iterations, memory: self.memory })
    }
}

/// States and outputs of a batch, one sample a row.
#[derive(Debug, Clone, PartialEq)]
pub struct EquilibriumSolution {
    /// Pre-activations, m × n.
    pub z: Matrix<f32>,
    /// The equilibrium, m × n.
    pub x: Matrix<f32>,
    /// Outputs, m × q.
    pub y: Matrix<f32>,
    /// One per sample.
    pub diagnostics: Vec<SampleDiagnostics>,
}

/// Outputs of a batch, one sample a row.
#[derive(Debug, Clone, PartialEq)]
pub struct OutputSolution {
    /// Outputs, m × q.
    pub y: Matrix<f32>,
    /// One per sample.
    pub diagnostics: Vec<SampleDiagnostics>,
}

/// The samples that did not converge.
pub fn not_converged(diagnostics: &[SampleDiagnostics]) -> Vec<usize> {
    (0..diagnostics.len()).filter(|&k| !diagnostics[k].converged).collect()
}

/// A model made ready to run.
pub struct Equilibrium {
    layout: Layout,
    shape: StateShape,
    limits: Limits,
    threads: Threads,
    /// All states, for [`Equilibrium::run`].
    states: Runner,
    /// Only states that outputs depend on; `None` if those are all.
    outputs: Option<Runner>,
}

impl std::fmt::Debug for Equilibrium {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Equilibrium").field("shape", &self.shape).field("limits", &self.limits).finish_non_exhaustive()
    }
}

impl Equilibrium {
    /// Schedules the model.
    pub fn new(model: &ImplicitModel, settings: EquilibriumSettings) -> Result<Self> {
        let limits = settings.check()?;
        let activations = activations(model.layout());
        let equation = forward(model, &activations);
        let live = Schedule::read_by_outputs(model.a(), model.c());
        let all = live.iter().all(|l| *l);
        Ok(Self {
            layout: model.layout().clone(),
            shape: model.shape(),
            limits,
            threads: settings.threads,
            states: Runner::new(Program::new(&equation, |_| true), "U"),
            outputs: (!all).then(|| Runner::new(Program::new(&equation, |i| live[i]), "U")),
        })
    }

    /// The equilibrium of every sample (one a row), its outputs, and how far both are from exact.
    pub fn run(&self, u: &Matrix<f32>) -> Result<EquilibriumSolution> {
        self.run_on(u, self.threads)
    }

    fn run_on(&self, u: &Matrix<f32>, threads: Threads) -> Result<EquilibriumSolution> {
        self.require_inputs(u)?;
        let (n, q) = (self.shape.states, self.shape.outputs);
        let mut solution = EquilibriumSolution {
            z: Matrix::zeros(u.rows(), n),
            x: Matrix::zeros(u.rows(), n),
            y: Matrix::zeros(u.rows(), q),
            diagnostics: Vec::with_capacity(u.rows()),
        };
        let order = &self.states.program.order;
        self.states.batch(u, None, true, self.limits, threads, |first, part| {
            for (k, sample) in (first..first + part.diagnostics.len()).enumerate() {
                let (z, x) = (&part.z[k * n..(k + 1) * n], &part.x[k * n..(k + 1) * n]);
                let row = solution.z.row_mut(sample);
                order.iter().zip(z).for_each(|(&i, v)| row[i] = *v);
                let row = solution.x.row_mut(sample);
                order.iter().zip(x).for_each(|(&i, v)| row[i] = *v);
            }
            solution.y.as_mut_slice()[first * q..][..part.y.len()].copy_from_slice(&part.y);
            solution.diagnostics.extend_from_slice(&part.diagnostics);
        })?;
        Ok(solution)
    }

    /// The outputs alone: states that no output depends on are skipped, and no state is written out.
    pub fn outputs(&self, u: &Matrix<f32>) -> Result<OutputSolution> {
        self.require_inputs(u)?;
        let q = self.shape.outputs;
        let mut solution = OutputSolution { y: Matrix::zeros(u.rows(), q), diagnostics: Vec::with_capacity(u.rows()) };
        let runner = self.outputs.as_ref().unwrap_or(&self.states);
        runner.batch(u, None, false, self.limits, self.threads, |first, part| {
            solution.y.as_mut_slice()[first * q..][..part.y.len()].copy_from_slice(&part.y);
            solution.diagnostics.extend_from_slice(&part.diagnostics);
        })?;
        Ok(solution)
    }

    fn require_inputs(&self, u: &Matrix<f32>) -> Result<()> {
        if u.cols() == self.shape.inputs {
            return Ok(());
        }
        Err(Error::shape(
            "inputs",
            format!("{} values per sample", self.shape.inputs),
            format!("{} values per sample", u.cols()),
        ))
    }
}

impl StateMap for Equilibrium {
    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn shape(&self) -> StateShape {
        self.shape
    }

    /// Z, X and Y at the equilibrium; a sample that does not converge is an error, since its states would be wrong.
    fn states(&self, u: &Matrix<f32>) -> Result<StateBlock> {
        let solution = self.run_on(u, Threads::one())?;
        let samples = not_converged(&solution.diagnostics);
        if !samples.is_empty() {
            return Err(Error::NotConverged { samples });
        }
        Ok(StateBlock { u: u.cast(), z: solution.z.cast(), x: solution.x.cast(), y: solution.y.cast() })
    }
}

fn activations(layout: &Layout) -> Vec<Activation> {
    layout.layers().iter().flat_map(|l| std::iter::repeat_n(l.activation, l.size)).collect()
}

fn forward<'a>(model: &'a ImplicitModel, activations: &'a [Activation]) -> Equation<'a> {
    Equation {
        a: model.a(),
        b: model.b(),
        c: model.c(),
        d: model.d(),
        state_bias: model.state_bias(),
        output_bias: model.output_bias(),
        activations: Some(activations),
        norm: Norm::Max,
        contracting: model.a(),
    }
}

/// A program with room to run it in, kept between batches.
struct Runner {
    program: Program,
    /// What its inputs are called in errors.
    inputs: &'static str,
    rooms: Mutex<Vec<Room>>,
}

/// The results of one chunk of samples; `z` and `x` in schedule order and only if asked for.
struct Part {
    z: Vec<f32>,
    x: Vec<f32>,
    y: Vec<f32>,
    diagnostics: Vec<SampleDiagnostics>,
}

impl Runner {
    fn new(program: Program, inputs: &'static str) -> Self {
        Self { program, inputs, rooms: Mutex::new(Vec::new()) }
    }

    fn lanes(&self) -> usize {
        if self.program.cyclic_units > 0 { LANES / 2 } else { LANES }
    }

    /// Runs all samples of `u`, handing chunks to `take` in order. `gates` (m × units, schedule order) drive an adjoint.
    fn batch(
        &self,
        u: &Matrix<f32>,
        gates: Option<&Matrix<f32>>,
        states: bool,
        limits: Limits,
        threads: Threads,
        mut take: impl FnMut(usize, Part),
    ) -> Result<()> {
        parallel::fold(
            threads,
            u.rows().div_ceil(CHUNK),
            |chunk| {
                let samples = chunk * CHUNK..((chunk + 1) * CHUNK).min(u.rows());
                let mut rooms = self.rooms.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                let room = rooms.pop();
                drop(rooms);
                let mut room = room.unwrap_or_else(|| Room::new(&self.program, self.lanes(), limits.memory));
                let part = self.chunk(&mut room, u, gates, samples, states, limits);
                self.rooms.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(room);
                part
            },
            |chunk, part| {
                take(chunk * CHUNK, part);
                Ok(())
            },
        )
    }

    fn chunk(
        &self,
        room: &mut Room,
        u: &Matrix<f32>,
        gates: Option<&Matrix<f32>>,
        samples: std::ops::Range<usize>,
        states: bool,
        limits: Limits,
    ) -> Result<Part> {
        let (units, q, p) = (self.program.units(), self.program.outputs, self.program.inputs);
        let kept = if states { samples.len() * units } else { 0 };
        let mut part = Part {
            z: vec![0.0; kept],
            x: vec![0.0; kept],
            y: vec![0.0; samples.len() * q],
            diagnostics: Vec::with_capacity(samples.len()),
        };
        let mut first = samples.start;
        while first < samples.end {
            let left = samples.end - first;
            let lanes = left.next_power_of_two().clamp(8, self.lanes());
            let count = left.min(lanes);
            if let Some(gates) = gates {
                to_lanes(&mut room.gates, &gates.as_slice()[first * units..], units, count, units, lanes);
            }
            room.run(&self.program, &u.as_slice()[first * p..(first + count) * p], (lanes, count), limits)
                .map_err(|sample| not_finite(self.inputs, u, first + sample))?;
            let at = first - samples.start;
            if states {
                from_lanes(&mut part.z[at * units..], units, &room.z, count, units, lanes);
                from_lanes(&mut part.x[at * units..], units, &room.x, count, units, lanes);
            }
            from_lanes(&mut part.y[at * q..], q, &room.z[units * lanes..], count, q, lanes);
            part.diagnostics.extend_from_slice(&room.samples);
            first += count;
        }
        Ok(part)
    }
}

fn not_finite(array: &str, u: &Matrix<f32>, row: usize) -> Error {
    let column = u.row(row).iter().position(|v| !v.is_finite()).unwrap_or(0);
    Error::NotFinite {
        array: array.into(),
        row,
        column,
        value: u.row(row).get(column).map_or(f64::NAN, |v| f64::from(*v)),
    }
}
