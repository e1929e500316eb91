//! Running an implicit model: the equilibrium x = φ(Ax + Bu + b) with a certified error, and exact input gradients.
//!
//! Acyclic states are computed in one pass in single precision; only true cycles iterate, in double precision. Models with
//! tap blocks run layer by layer with their weights shared. A sample's result depends neither on the batch it is in nor on
//! the number of threads, bit by bit.

mod adjoint;
mod cycle;
mod gradient;
mod layered;
mod onnx;
mod operand;
mod operator;
mod prepared;
mod program;
mod run;
mod schedule;

pub use gradient::{GradientSolution, InputGradient};
pub use layered::LayerSum;
pub use onnx::{OnnxSettings, export_onnx, export_onnx_like, to_onnx};
pub(crate) use operand::Packing;
pub use prepared::{BlockKernel, Prepared, Workspace};
pub use run::SampleDiagnostics;
pub use schedule::{Schedule, Stage};

use std::sync::{Mutex, OnceLock};

use crate::layout::{Activation, Layout};
use crate::linalg::Matrix;
use crate::linalg::lanes::{from_lanes, to_lanes};
use crate::model::ImplicitModel;
use crate::parallel::{self, Threads};
use crate::states::{StateBlock, StateMap, StateShape};
use crate::{Error, Result};
use cycle::Limits;
use layered::{LayerProgram, LayerRoom};
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
    engine: Engine,
    fast: Option<Fast>,
}

/// Outputs of a model whose layers form no cycle, packed when a batch of a size is first run.
struct Fast {
    model: ImplicitModel,
    /// One per number of samples that run side by side.
    prepared: [OnceLock<Option<Prepared>>; 7],
}

impl Fast {
    fn new(model: &ImplicitModel) -> Self {
        Self { model: model.clone(), prepared: Default::default() }
    }

    fn of(&self, batch: usize) -> Option<&Prepared> {
        // Sizes in between run in lanes of the next one.
        const SIZES: [usize; 7] = [1, 2, 4, 8, 16, 32, 64];
        let place = SIZES.iter().position(|size| batch <= *size).unwrap_or(SIZES.len() - 1);
        self.prepared[place].get_or_init(|| Prepared::new(&self.model, SIZES[place]).ok()).as_ref()
    }
}

/// How a model is run: `states` has all states, `outputs` only those that outputs depend on (`None` if those are all).
enum Engine {
    /// State by state in the order of their components, cycles iterated.
    Scheduled { states: Box<Runner>, outputs: Option<Box<Runner>> },
    /// Layer by layer with shared weights.
    Layered { states: Box<LayerRunner>, outputs: Option<Box<LayerRunner>> },
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
        let mut fast = None;
        let engine = match model.without_taps() {
            Some(plain) => {
                let activations = activations(plain.layout());
                let equation = forward(&plain, &activations);
                let live = Schedule::read_by_outputs(plain.a(), plain.c());
                let all = live.iter().all(|l| *l);
                let states = Program::new(&equation, |_| true);
                // Only where both sum in the same order: an output has the same bits however it is asked for.
                if plain.layers_are_acyclic() && in_layer_order(&plain, &states.order) {
                    fast = Some(Fast::new(&plain));
                }
                Engine::Scheduled {
                    states: Box::new(Runner::new(states, "U")),
                    outputs: (!all).then(|| Box::new(Runner::new(Program::new(&equation, |i| live[i]), "U"))),
                }
            }
            None => {
                fast = Some(Fast::new(model));
                let live = LayerProgram::new(model, false);
                Engine::Layered {
                    outputs: (!live.is_complete()).then(|| Box::new(LayerRunner::new(live))),
                    states: Box::new(LayerRunner::new(LayerProgram::new(model, true))),
                }
            }
        };
        Ok(Self {
            layout: model.layout().clone(),
            shape: model.shape(),
            limits,
            threads: settings.threads,
            engine,
            fast,
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
        let mut take = |order: Option<&[usize]>, first: usize, part: &Part| {
            for (k, sample) in (first..first + part.diagnostics.len()).enumerate() {
                let (z, x) = (&part.z[k * n..(k + 1) * n], &part.x[k * n..(k + 1) * n]);
                for (into, from) in [(solution.z.row_mut(sample), z), (solution.x.row_mut(sample), x)] {
                    match order {
                        Some(order) => order.iter().zip(from).for_each(|(&i, v)| into[i] = *v),
                        None => into.copy_from_slice(from),
                    }
                }
            }
            solution.y.as_mut_slice()[first * q..][..part.y.len()].copy_from_slice(&part.y);
            solution.diagnostics.extend_from_slice(&part.diagnostics);
        };
        match &self.engine {
            Engine::Scheduled { states, .. } => {
                let order = &states.program.order;
                let take = |first, part: Part| take(Some(order), first, &part);
                states.batch(u, None, true, self.limits, threads, take)?;
            }
            Engine::Layered { states, .. } => states.batch(u, true, threads, |first, part| take(None, first, &part))?,
        }
        Ok(solution)
    }

    /// The outputs alone: states that no output depends on are skipped, and no state is written out.
    pub fn outputs(&self, u: &Matrix<f32>) -> Result<OutputSolution> {
        self.require_inputs(u)?;
        let q = self.shape.outputs;
        let mut solution = OutputSolution { y: Matrix::zeros(u.rows(), q), diagnostics: Vec::with_capacity(u.rows()) };
        if let Some(prepared) = self.fast.as_ref().and_then(|fast| fast.of(u.rows())) {
            prepared.batch(u, self.threads, true, |first, y, diagnostics| {
                solution.y.as_mut_slice()[first * q..][..y.len()].copy_from_slice(y);
                solution.diagnostics.extend_from_slice(diagnostics);
            })?;
            return Ok(solution);
        }
        let take = |first: usize, part: Part| {
            solution.y.as_mut_slice()[first * q..][..part.y.len()].copy_from_slice(&part.y);
            solution.diagnostics.extend_from_slice(&part.diagnostics);
        };
        match &self.engine {
            Engine::Scheduled { states, outputs } => {
                outputs.as_ref().unwrap_or(states).batch(u, None, false, self.limits, self.threads, take)?;
            }
            Engine::Layered { states, outputs } => {
                outputs.as_ref().unwrap_or(states).batch(u, false, self.threads, take)?;
            }
        }
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

/// Whether every row reads states in the order of their places in `order` when it reads layer by layer, first those of the
/// first layer of the layout.
fn in_layer_order(model: &ImplicitModel, order: &[usize]) -> bool {
    let mut place = vec![0; order.len()];
    order.iter().enumerate().for_each(|(k, &i)| place[i] = k);
    [model.a(), model.c()].iter().all(|m| {
        (0..m.rows()).all(|i| {
            let mut last = None;
            m.row(i).all(|(j, _)| last.replace(place[j]).is_none_or(|before| before < place[j]))
        })
    })
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

/// Rooms that threads work in, kept between batches.
struct Rooms<R>(Mutex<Vec<R>>);

impl<R: Send> Rooms<R> {
    fn new() -> Self {
        Self(Mutex::new(Vec::new()))
    }

    /// Runs `samples` in chunks, each in a room of its own, and hands the results to `take` in order.
    fn batch<T: Send>(
        &self,
        (samples, chunk): (usize, usize),
        threads: Threads,
        room: impl Fn() -> R + Sync,
        work: impl Fn(&mut R, std::ops::Range<usize>) -> Result<T> + Sync,
        mut take: impl FnMut(usize, T),
    ) -> Result<()> {
        let lock = || self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        parallel::fold(
            threads,
            samples.div_ceil(chunk),
            |k| {
                let free = lock().pop();
                let mut own = free.unwrap_or_else(&room);
                let part = work(&mut own, k * chunk..((k + 1) * chunk).min(samples));
                lock().push(own);
                part
            },
            |k, part| {
                take(k * chunk, part);
                Ok(())
            },
        )
    }
}

/// A program with room to run it in.
struct Runner {
    program: Program,
    /// What its inputs are called in errors.
    inputs: &'static str,
    rooms: Rooms<Room>,
}

/// The same for a model with tap blocks; separate rooms with and without space for pre-activations.
struct LayerRunner {
    program: LayerProgram,
    rooms: Rooms<LayerRoom>,
    rooms_with_states: Rooms<LayerRoom>,
}

impl LayerRunner {
    fn new(program: LayerProgram) -> Self {
        Self { program, rooms: Rooms::new(), rooms_with_states: Rooms::new() }
    }

    /// Runs all samples of `u`, handing chunks to `take` in order.
    fn batch(&self, u: &Matrix<f32>, states: bool, threads: Threads, take: impl FnMut(usize, Part)) -> Result<()> {
        let (n, q, p) = (self.program.states, self.program.outputs, self.program.inputs);
        let rooms = if states { &self.rooms_with_states } else { &self.rooms };
        rooms.batch(
            (u.rows(), layered::LANES),
            threads,
            || LayerRoom::new(&self.program, states),
            |room, samples| {
                let count = samples.len();
                let lanes = lanes_for(count);
                room.run(&self.program, &u.as_slice()[samples.start * p..samples.end * p], (lanes, count))
                    .map_err(|sample| not_finite("U", u, samples.start + sample))?;
                let kept = if states { count * n } else { 0 };
                let mut part = Part {
                    z: vec![0.0; kept],
                    x: vec![0.0; kept],
                    y: vec![0.0; count * q],
                    diagnostics: room.samples.clone(),
                };
                if states {
                    from_lanes(&mut part.z, n, &room.z, count, n, lanes);
                    from_lanes(&mut part.x, n, &room.x, count, n, lanes);
                }
                from_lanes(&mut part.y, q, &room.y, count, q, lanes);
                Ok(part)
            },
            take,
        )
    }
}

/// Lanes for so many samples: whole vectors where they are many, no more than needed where they are few.
fn lanes_for(count: usize) -> usize {
    match count {
        0..8 => count,
        8 => 8,
        _ => layered::LANES,
    }
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
        Self { program, inputs, rooms: Rooms::new() }
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
        take: impl FnMut(usize, Part),
    ) -> Result<()> {
        self.rooms.batch(
            (u.rows(), CHUNK),
            threads,
            || Room::new(&self.program, self.lanes(), limits.memory),
            |room, samples| self.chunk(room, u, gates, samples, states, limits),
            take,
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
