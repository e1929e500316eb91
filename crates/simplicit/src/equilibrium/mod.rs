//! Running an implicit model: the equilibrium x = φ(Ax + Bu + b) with a certified error, and exact input gradients.
//!
//! A model whose layers form no cycle runs layer by layer, in one pass and in single precision ([`Prepared`]). Otherwise
//! states are scheduled one by one, and true cycles iterate, in double precision. A sample's result depends neither on the
//! batch it is in nor on the number of threads, bit by bit.

mod adjoint;
mod cycle;
mod device;
mod gradient;
mod operand;
mod operator;
mod prepared;
mod program;
mod run;
mod schedule;

#[doc(hidden)] // for the command line
pub use device::DeviceModel;
pub(crate) use device::{DeviceChange, DeviceGiven, DeviceLayer, DevicePass, geometry, operand as device_operand};
pub use gradient::{GradientSolution, InputGradient};
pub(crate) use operand::Packing;
pub(crate) use prepared::Sum;
pub use prepared::{BlockKernel, LayerSum, LayerTime, Prepared, Workspace};
pub use run::SampleDiagnostics;
pub(crate) use schedule::Schedule;

use std::sync::{Mutex, OnceLock};

use crate::layout::{Activation, Layout};
use crate::linalg::Matrix;
use crate::linalg::lanes::{from_lanes, to_lanes};
use crate::model::ImplicitModel;
use crate::parallel::{self, Threads};
use crate::states::{StateBlock, StateMap, StateShape};
use crate::{Error, Result};
use cycle::Limits;
use prepared::Part;
use program::{Equation, Norm, Program};
use run::RunWorkspace;

/// Samples that run side by side in a scheduled model. Cycles keep more numbers per sample in the cache, so they use
/// half as many.
const LANES: usize = 32;
/// Samples a thread takes at a time.
const CHUNK: usize = 64;

/// Settings of accuracy and speed.
///
/// | setting | default | purpose |
/// |---|---|---|
/// | `tolerance` | 1e-6 | certified distance from the equilibrium, relative to max(1, ‖x‖∞), before rounding to f32 |
/// | `max_iterations` | 2000 | steps per cycle; a sample that needs more is reported, not an error |
/// | `memory` | 5 | steps that Anderson acceleration remembers, at most 16; 0 is plain Picard |
/// | `threads` | all | threads for a batch |
/// | `certified` | yes | bound the error of every sample; without it a model without cycles runs a little faster |
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
    /// Whether the error of every sample is bounded; without bounds the errors of models without cycles are infinite.
    pub certified: bool,
}

impl Default for EquilibriumSettings {
    fn default() -> Self {
        Self { tolerance: 1e-6, max_iterations: 2000, memory: 5, threads: Threads::available(), certified: true }
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
    /// Diagnostics of every sample.
    pub diagnostics: Vec<SampleDiagnostics>,
}

/// Outputs of a batch, one sample a row.
#[derive(Debug, Clone, PartialEq)]
pub struct OutputSolution {
    /// Outputs, m × q.
    pub y: Matrix<f32>,
    /// Diagnostics of every sample.
    pub diagnostics: Vec<SampleDiagnostics>,
}

/// The samples that did not converge.
pub fn not_converged(diagnostics: &[SampleDiagnostics]) -> Vec<usize> {
    (0..diagnostics.len()).filter(|&k| !diagnostics[k].converged).collect()
}

/// A model prepared to run.
pub struct Equilibrium {
    layout: Layout,
    shape: StateShape,
    limits: Limits,
    threads: Threads,
    certified: bool,
    engine: Engine,
}

/// How a model is run.
enum Engine {
    /// Layer by layer, once.
    Layered(Box<Layered>),
    /// State by state in the order of their components, cycles iterated; `outputs` has only the states that outputs depend
    /// on (`None` if those are all).
    Scheduled { states: Box<Runner>, outputs: Option<Box<Runner>> },
}

/// A model whose layers form no cycle; it is packed when a batch of a new size is first run.
struct Layered {
    model: ImplicitModel,
    /// The most samples that run side by side: few if there are feature maps.
    most: usize,
    /// One for each number of samples that run side by side: first for the outputs alone, then for all states.
    prepared: [[OnceLock<Prepared>; 7]; 2],
}

impl Layered {
    fn new(model: &ImplicitModel) -> Self {
        let maps = model.layout().layers().iter().any(|l| l.map.is_some_and(|m| m.positions() > 1));
        Self { model: model.clone(), most: if maps { 16 } else { 64 }, prepared: Default::default() }
    }

    fn of(&self, batch: usize, states: bool) -> Result<&Prepared> {
        // Numbers of lanes; a batch between two of them uses the next larger one.
        const SIZES: [usize; 7] = [1, 2, 4, 8, 16, 32, 64];
        let place = SIZES.iter().position(|size| batch.min(self.most) <= *size).unwrap_or(SIZES.len() - 1);
        let cell = &self.prepared[usize::from(states)][place];
        if let Some(prepared) = cell.get() {
            return Ok(prepared);
        }
        let size = SIZES[place];
        let new = if states { Prepared::with_states(&self.model, size)? } else { Prepared::new(&self.model, size)? };
        Ok(cell.get_or_init(|| new))
    }
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
        let engine = if model.layers_are_acyclic() {
            Engine::Layered(Box::new(Layered::new(model)))
        } else {
            let plain = scheduled(model)?;
            let activations = plain.layout().activations();
            let equation = forward(&plain, &activations);
            let live = Schedule::read_by_outputs(plain.a(), plain.c());
            let all = live.iter().all(|l| *l);
            Engine::Scheduled {
                states: Box::new(Runner::new(Program::new(&equation, |_| true), "U")),
                outputs: (!all).then(|| Box::new(Runner::new(Program::new(&equation, |i| live[i]), "U"))),
            }
        };
        Ok(Self {
            layout: model.layout().clone(),
            shape: model.shape(),
            limits,
            threads: settings.threads,
            certified: settings.certified,
            engine,
        })
    }

    /// The equilibrium of every sample (one per row), its outputs, and bounds on the errors of both.
    pub fn run(&self, u: &Matrix<f32>) -> Result<EquilibriumSolution> {
        self.run_on(u, self.threads, self.certified)
    }

    fn run_on(&self, u: &Matrix<f32>, threads: Threads, certified: bool) -> Result<EquilibriumSolution> {
        self.require_inputs(u)?;
        let (n, q) = (self.shape.states, self.shape.outputs);
        let mut solution = EquilibriumSolution {
            z: Matrix::zeros(u.rows(), n),
            x: Matrix::zeros(u.rows(), n),
            y: Matrix::zeros(u.rows(), q),
            diagnostics: vec![SampleDiagnostics::default(); u.rows()],
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
            solution.diagnostics[first..][..part.diagnostics.len()].copy_from_slice(&part.diagnostics);
        };
        match &self.engine {
            Engine::Scheduled { states, .. } => {
                let order = &states.program.order;
                let take = |first, part: Part| take(Some(order), first, &part);
                states.batch(u, None, true, self.limits, threads, take)?;
            }
            Engine::Layered(layered) => {
                layered.of(u.rows(), true)?.batch(u, threads, certified, |first, part| take(None, first, part))?;
            }
        }
        Ok(solution)
    }

    /// The outputs alone: states that no output depends on are skipped, and no state is written out.
    pub fn outputs(&self, u: &Matrix<f32>) -> Result<OutputSolution> {
        self.require_inputs(u)?;
        let q = self.shape.outputs;
        let mut solution =
            OutputSolution { y: Matrix::zeros(u.rows(), q), diagnostics: vec![SampleDiagnostics::default(); u.rows()] };
        // Blocks arrive in any order.
        let mut take = |first: usize, part: &Part| {
            solution.y.as_mut_slice()[first * q..][..part.y.len()].copy_from_slice(&part.y);
            solution.diagnostics[first..][..part.diagnostics.len()].copy_from_slice(&part.diagnostics);
        };
        match &self.engine {
            Engine::Layered(layered) => layered.of(u.rows(), false)?.batch(u, self.threads, self.certified, take)?,
            Engine::Scheduled { states, outputs } => {
                let runner = outputs.as_ref().unwrap_or(states);
                runner.batch(u, None, false, self.limits, self.threads, |first, part| take(first, &part))?;
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
        // The error of the states is not returned, so it is not bounded; only that they are finite is checked.
        let solution = self.run_on(u, Threads::one(), false)?;
        let samples = not_converged(&solution.diagnostics);
        if !samples.is_empty() {
            return Err(Error::NotConverged { samples });
        }
        Ok(StateBlock { u: u.cast(), z: solution.z.cast(), x: solution.x.cast(), y: solution.y.cast() })
    }
}

/// The model as A, B, C and D alone; a model with cycles has nothing else.
fn scheduled(model: &ImplicitModel) -> Result<std::borrow::Cow<'_, ImplicitModel>> {
    model.without_taps().ok_or_else(|| {
        Error::unsupported(
            "a cycle through tap blocks",
            "convolutions, poolings and operators run once, layer by layer",
        )
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

/// Memory that threads work in, kept between batches.
struct Workspaces<R>(Mutex<Vec<R>>);

impl<R: Send> Workspaces<R> {
    fn new() -> Self {
        Self(Mutex::new(Vec::new()))
    }

    /// Runs `samples` in chunks, each in memory of its own, and hands the results to `take` in order.
    fn batch<T: Send>(
        &self,
        (samples, chunk): (usize, usize),
        threads: Threads,
        workspace: impl Fn() -> R + Sync,
        work: impl Fn(&mut R, std::ops::Range<usize>) -> Result<T> + Sync,
        mut take: impl FnMut(usize, T),
    ) -> Result<()> {
        let lock = || self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        parallel::fold(
            threads,
            samples.div_ceil(chunk),
            |k| {
                let free = lock().pop();
                let mut own = free.unwrap_or_else(&workspace);
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

/// A program with the memory that it runs in.
struct Runner {
    program: Program,
    /// What errors call its inputs.
    inputs: &'static str,
    workspaces: Workspaces<RunWorkspace>,
}

impl Runner {
    fn new(program: Program, inputs: &'static str) -> Self {
        Self { program, inputs, workspaces: Workspaces::new() }
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
        self.workspaces.batch(
            (u.rows(), CHUNK),
            threads,
            || RunWorkspace::new(&self.program, self.lanes(), limits.memory),
            |workspace, samples| self.chunk(workspace, u, gates, samples, states, limits),
            take,
        )
    }

    fn chunk(
        &self,
        workspace: &mut RunWorkspace,
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
                to_lanes(&mut workspace.gates, &gates.as_slice()[first * units..], units, count, units, lanes);
            }
            workspace
                .run(&self.program, &u.as_slice()[first * p..(first + count) * p], (lanes, count), limits)
                .map_err(|sample| not_finite(self.inputs, u, first + sample))?;
            let at = first - samples.start;
            if states {
                from_lanes(&mut part.z[at * units..], units, &workspace.z, count, units, lanes);
                from_lanes(&mut part.x[at * units..], units, &workspace.x, count, units, lanes);
            }
            from_lanes(&mut part.y[at * q..], q, &workspace.z[units * lanes..], count, q, lanes);
            part.diagnostics.extend_from_slice(&workspace.samples);
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
