//! Models whose layers form no cycle, packed once for a batch size and run many times: one pass, layer by layer, every
//! block by the kernel that suits it.
//!
//! Maps lie in a workspace with their padding around them, so a convolution reads its operand where the layer before
//! wrote it; bias, residual sum and ReLU are part of the last block of a layer. An operator takes its operands out of the
//! workspace, sample by sample, and puts its value back. A sample's outputs are the same, bit by bit, whatever the batch
//! and whether states are asked for.

mod bounds;
mod execute;
mod layer;
mod layer_sum;
mod operand;
mod places;
mod plan;

pub use layer::BlockKernel;
pub(crate) use layer::Sum;
pub use layer_sum::LayerSum;

use std::sync::Mutex;

use super::run::SampleDiagnostics;
use crate::kernels::{Choice, Crew, FEW, Instructions, thread_seconds, with_crew};
use crate::linalg::Matrix;
use crate::linalg::lanes::MAX_LANES;
use crate::model::{ImplicitModel, TapWeights, Target};
use crate::network::Source;
use crate::parallel::{self, Threads};
use crate::{Error, Result};
use bounds::Bounds;
use execute::Buffers;
use layer::{Step, is_direct, own_map, own_margin};
use places::Places;
use plan::{View, Way, all_finite};

/// A model ready to run on batches of about one size; shared between threads.
pub struct Prepared {
    inputs: usize,
    outputs: usize,
    /// Number of units of all layers, if states are asked for.
    states: Option<usize>,
    lanes: usize,
    instructions: Instructions,
    input: View,
    output: View,
    steps: Vec<Step>,
    /// Positions of the workspace, and of its scratch.
    positions: usize,
    scratch: [usize; 4],
    layers: usize,
    /// Which inputs are read, if they are a vector; all inputs of a map are.
    read: Option<Vec<bool>>,
    multiply_adds: u64,
    kernels: Vec<BlockKernel>,
    idle: Mutex<Vec<Workspace>>,
}

impl std::fmt::Debug for Prepared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Prepared").field("lanes", &self.lanes).field("kernels", &self.kernels).finish_non_exhaustive()
    }
}

/// Memory for one block of samples. If several threads run a model, each keeps one.
#[derive(Debug)]
pub struct Workspace {
    buffers: Buffers,
    bounds: Bounds,
    part: Part,
    /// Seconds of every step, if they are to be measured.
    clock: Option<Vec<f64>>,
}

/// The time that a layer of a prepared model takes.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerTime {
    /// Its name, or `output`.
    pub layer: String,
    /// Seconds for one batch.
    pub seconds: f64,
}

/// The results for a block of samples, one per row. It has pre-activations and states only if the model was prepared
/// for them, and bounded errors only if they were asked for.
#[derive(Debug, Default)]
pub(super) struct Part {
    pub(super) z: Vec<f32>,
    pub(super) x: Vec<f32>,
    pub(super) y: Vec<f32>,
    pub(super) diagnostics: Vec<SampleDiagnostics>,
}

/// A thread is worth waking for this many multiply-adds of a block of samples, because waking it takes about as long
/// as a few million of them.
const WORTH_A_THREAD: u64 = 4_000_000;

/// Number of samples side by side for a batch of this size.
fn lanes_for(batch: usize, maps: bool) -> usize {
    match batch {
        0..8 => batch.max(1),
        8 => 8,
        9..=16 => 16,
        _ if maps => 16,
        17..=32 => 32,
        _ => MAX_LANES,
    }
}

impl Prepared {
    /// Packs a model for batches of `batch` samples (batches of other sizes run too). Models with cycles are refused:
    /// [`Equilibrium`](super::Equilibrium) iterates those.
    pub fn new(model: &ImplicitModel, batch: usize) -> Result<Self> {
        Self::with(model, batch, (Instructions::detect(), None), false)
    }

    /// As [`Prepared::new`] with dense panels only, or sparse rows only, even where they are slower: to compare, and
    /// to test.
    pub fn only(model: &ImplicitModel, batch: usize, choice: Choice) -> Result<Self> {
        Self::with(model, batch, (Instructions::detect(), Some(choice)), false)
    }

    /// As [`Prepared::new`] with given instructions, which must be [available](Instructions::available): to compare,
    /// and to test.
    pub fn with_instructions(model: &ImplicitModel, batch: usize, instructions: Instructions) -> Result<Self> {
        Self::with(model, batch, (instructions, None), false)
    }

    /// As [`Prepared::new`], for all states and not only the outputs.
    pub(super) fn with_states(model: &ImplicitModel, batch: usize) -> Result<Self> {
        Self::with(model, batch, (Instructions::detect(), None), true)
    }

    fn with(
        model: &ImplicitModel,
        batch: usize,
        (instructions, only): (Instructions, Option<Choice>),
        states: bool,
    ) -> Result<Self> {
        if !model.layers_are_acyclic() {
            return Err(Error::unsupported(
                "a prepared model with layers that read each other",
                "cycles iterate; run it through Equilibrium",
            ));
        }
        let layout = model.layout();
        let inputs = model.shape().inputs;
        // The layers in an order in which they can be computed; for the outputs alone, only those that the outputs
        // depend on.
        let mut sums: Vec<Sum> = model.layer_order().into_iter().map(|k| Sum::new(model, Target::Layer(k))).collect();
        sums.push(Sum::new(model, Target::Output));
        if !states {
            keep_live(&mut sums, layout.layers().len());
        }
        let blocks = || sums.iter().flat_map(|s| &s.blocks);
        let lanes = lanes_for(batch, blocks().any(|b| b.output.positions() > 1));
        // The layout of a value is decided by its readers. The place of a value that is no longer read is used again
        // for one of the same shape; margins then stay zero. In a model of vectors alone, all values of a sample lie
        // side by side if there are few samples, because the kernels for that leave out zeros best.
        let apart =
            (2..=FEW).contains(&lanes) && instructions == Instructions::Avx512 && sums.iter().all(Sum::is_plain);
        let mut places = Places::new(lanes, apart);
        let take = |places: &mut Places, source: Source| {
            let map = own_map(layout, inputs, source, sums.iter());
            places.take(map, own_margin(source, map, sums.iter()))
        };
        let input = take(&mut places, Source::Input);
        let mut views: Vec<Option<View>> = vec![None; layout.layers().len()];
        let mut steps: Vec<Step> = Vec::new();
        let mut kernels = Vec::new();
        for (at, sum) in sums.iter().enumerate() {
            let view = match sum.target {
                Target::Layer(k) => take(&mut places, Source::Layer(k)),
                Target::Output => places.take(sum.map(), [0; 4]),
            };
            if sum.sources().any(|source| matches!(source, Source::Layer(k) if views[k].is_none())) {
                return Err(Error::unsupported("a layer that is read before it is computed", "this is a defect"));
            }
            let view_of = |source: Source| match source {
                Source::Input => input,
                Source::Layer(k) => views[k].unwrap_or(input),
            };
            steps.push(Step::new(sum, view, view_of, !states, Way { lanes, apart, instructions, only }, &mut kernels));
            if let Target::Layer(k) = sum.target {
                views[k] = Some(view);
            }
            // Frees the places that no later step reads.
            let read_later = |source: Source| sums[at + 1..].iter().any(|s| s.sources().any(|s| s == source));
            for (k, view) in views.iter().enumerate() {
                if let Some(view) = view.filter(|_| !read_later(Source::Layer(k))) {
                    places.give_back(Source::Layer(k), view);
                }
            }
        }
        let output = steps.last().map_or(input, |s| s.view);
        Ok(Self {
            inputs,
            outputs: model.shape().outputs,
            states: states.then_some(model.shape().states),
            lanes,
            instructions,
            input,
            output,
            positions: places.end(),
            scratch: steps.iter().map(Step::scratch).fold([0; 4], |a, b| [0, 1, 2, 3].map(|k| a[k].max(b[k]))),
            layers: layout.layers().len(),
            read: (input.map.positions() == 1).then(|| inputs_read(&sums, inputs, input)),
            multiply_adds: kernels.iter().map(|k: &BlockKernel| k.multiply_adds).sum(),
            steps,
            kernels,
            idle: Mutex::new(Vec::new()),
        })
    }

    /// Number of samples that run side by side.
    pub fn lanes(&self) -> usize {
        self.lanes
    }

    /// The kernel of every block with weights, in the order in which they run.
    pub fn kernels(&self) -> &[BlockKernel] {
        &self.kernels
    }

    /// New memory to run in.
    pub fn workspace(&self) -> Workspace {
        Workspace {
            buffers: Buffers::new(self.positions, self.scratch, self.lanes),
            bounds: Bounds::new(self.layers, self.lanes),
            part: Part::default(),
            clock: None,
        }
    }

    /// Seconds of processor time that every layer takes for a batch on one thread, in the order in which they run:
    /// the minimum over `rounds` runs for each.
    pub fn layer_seconds(&self, u: &Matrix<f32>, rounds: usize) -> Result<Vec<LayerTime>> {
        let mut workspace = self.workspace();
        let mut y = vec![0.0; u.rows() * self.outputs];
        let mut least = vec![f64::INFINITY; self.steps.len()];
        for _ in 0..=rounds {
            workspace.clock = Some(vec![0.0; self.steps.len()]);
            self.run_in(u.as_slice(), &mut y, &mut workspace)?;
            for (least, seconds) in least.iter_mut().zip(workspace.clock.iter().flatten()) {
                *least = least.min(*seconds);
            }
        }
        let named = self.steps.iter().zip(least);
        Ok(named.map(|(step, seconds)| LayerTime { layer: step.name.clone(), seconds }).collect())
    }

    /// The outputs of a batch, one sample a row. Nothing is allocated besides them once as many threads have run before.
    pub fn outputs(&self, u: &Matrix<f32>, threads: Threads) -> Result<Matrix<f32>> {
        let mut y = Matrix::zeros(u.rows(), self.outputs);
        self.batch(u, threads, false, |first, part| {
            y.as_mut_slice()[first * self.outputs..][..part.y.len()].copy_from_slice(&part.y);
        })?;
        Ok(y)
    }

    /// The outputs of a batch (`u` and `y` row-major, whole rows) on the calling thread, in the caller's own workspace:
    /// allocates nothing once it has run before.
    pub fn run_in(&self, u: &[f32], y: &mut [f32], workspace: &mut Workspace) -> Result<()> {
        let (p, q) = (self.inputs, self.outputs);
        let samples = u.len().checked_div(p).unwrap_or(y.len() / q.max(1));
        if u.len() != samples * p || y.len() != samples * q {
            let expected = format!("{samples} × {p} inputs and {samples} × {q} outputs");
            return Err(Error::shape("batch", expected, format!("{} inputs and {} outputs", u.len(), y.len())));
        }
        if workspace.buffers.values.len() != self.positions * self.lanes {
            return Err(Error::setting("workspace", "one of this prepared model", "another's"));
        }
        for first in (0..samples).step_by(self.lanes) {
            let end = (first + self.lanes).min(samples);
            self.run(&u[first * p..end * p], end - first, workspace, false, &Crew::alone()).map_err(|sample| {
                let row = first + sample;
                let column = u[row * p..(row + 1) * p].iter().position(|v| !v.is_finite()).unwrap_or(0);
                Error::NotFinite { array: "U".into(), row, column, value: f64::from(u[row * p + column]) }
            })?;
            y[first * q..end * q].copy_from_slice(&workspace.part.y);
        }
        Ok(())
    }

    /// Runs a batch in blocks of `lanes`, and passes the results and (if `certified`) their error bounds to `take`,
    /// in any order.
    pub(super) fn batch(
        &self,
        u: &Matrix<f32>,
        threads: Threads,
        certified: bool,
        take: impl FnMut(usize, &Part) + Send,
    ) -> Result<()> {
        if u.cols() != self.inputs {
            let expected = format!("{} values per sample", self.inputs);
            return Err(Error::shape("inputs", expected, format!("{} values per sample", u.cols())));
        }
        let lock = || self.idle.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let block = |k: usize, workspace: &mut Workspace, crew: &Crew<'_>| {
            let samples = k * self.lanes..((k + 1) * self.lanes).min(u.rows());
            let part = &u.as_slice()[samples.start * self.inputs..samples.end * self.inputs];
            self.run(part, samples.len(), workspace, certified, crew)
                .map_err(|sample| super::not_finite("U", u, samples.start + sample))
        };
        let blocks = u.rows().div_ceil(self.lanes);
        // Threads without a block of their own share the layers of another block, if these are large enough.
        let worth = self.multiply_adds * self.lanes as u64 / WORTH_A_THREAD;
        let shared = (threads.get() / blocks.max(1)).min(worth as usize).max(1);
        let take = Mutex::new(take);
        parallel::each(threads, blocks, |k| {
            let free = lock().pop();
            let mut workspace = free.unwrap_or_else(|| self.workspace());
            let result = with_crew(shared, |crew| block(k, &mut workspace, crew));
            if result.is_ok() {
                let mut take = take.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                take(k * self.lanes, &workspace.part);
            }
            lock().push(workspace);
            result
        })
    }

    /// Runs `count` samples of `u` (row-major, whole rows), at most [`Prepared::lanes`], and leaves the results in the
    /// workspace; with `certified` the error of every sample is bounded too. The first sample with a NaN or infinity among
    /// the inputs that are read is the error.
    fn run(
        &self,
        u: &[f32],
        count: usize,
        workspace: &mut Workspace,
        certified: bool,
        crew: &Crew<'_>,
    ) -> Result<(), usize> {
        let Workspace { buffers, bounds, part, clock } = workspace;
        let (p, lanes) = (self.inputs, self.lanes);
        if !self.input.read_rows(&mut buffers.values, u, p, (lanes, count)) {
            self.check_finite(u, count)?;
            // Kernels may multiply inputs that no weight reads by zero; what is not finite among these is set to zero
            // first.
            let at = self.input.origin * lanes;
            let values = &mut buffers.values[at..at + p * lanes];
            values.iter_mut().filter(|v| !v.is_finite()).for_each(|v| *v = 0.0);
        }
        part.diagnostics.clear();
        part.diagnostics.resize(count, SampleDiagnostics::of_one_pass(self.multiply_adds));
        if certified {
            bounds.begin(buffers, self.input, lanes);
        }
        let states = self.states.unwrap_or(0);
        part.z.resize(count * states, 0.0);
        part.x.resize(count * states, 0.0);
        part.y.resize(count * self.outputs, 0.0);
        for (k, step) in self.steps.iter().enumerate() {
            let begun = clock.as_ref().map(|_| thread_seconds());
            step.sum(buffers, (lanes, count), self.instructions, crew);
            let rows = step.range.start..;
            match step.target {
                Target::Layer(_) if self.states.is_some() => {
                    step.view.write_rows(&buffers.values, &mut part.z[rows.clone()], states, (lanes, count));
                    step.activate(buffers, lanes);
                    step.view.write_rows(&buffers.values, &mut part.x[rows], states, (lanes, count));
                }
                _ => step.activate(buffers, lanes),
            }
            if certified {
                bounds.add(step, buffers, &mut part.diagnostics, lanes);
            }
            if let (Some(clock), Some(begun)) = (clock.as_mut(), begun) {
                clock[k] += thread_seconds() - begun;
            }
        }
        self.output.write_rows(&buffers.values, &mut part.y, self.outputs, (lanes, count));
        if !certified {
            // The results must be finite; how far they are from exact is not bounded.
            for (k, sample) in part.diagnostics.iter_mut().enumerate() {
                let row = |values: &[f32], width: usize| all_finite(&values[k * width..(k + 1) * width]);
                sample.converged = row(&part.y, self.outputs) && row(&part.x, states) && row(&part.z, states);
                (sample.state_error, sample.output_error) = (f64::INFINITY, f64::INFINITY);
            }
        }
        Ok(())
    }

    /// The first sample with an input that is read and not finite is the error.
    fn check_finite(&self, u: &[f32], count: usize) -> Result<(), usize> {
        let p = self.inputs;
        let bad = |s: &usize| {
            let sample = &u[s * p..(s + 1) * p];
            (0..p).any(|j| !sample[j].is_finite() && self.read.as_ref().is_none_or(|read| read[j]))
        };
        (0..count).find(bad).map_or(Ok(()), Err)
    }
}

/// Drops the layers that no output depends on.
fn keep_live(sums: &mut Vec<Sum>, layers: usize) {
    let mut live = vec![false; layers];
    for sum in sums.iter().rev() {
        if matches!(sum.target, Target::Layer(k) if !live[k]) {
            continue;
        }
        for source in sum.sources() {
            if let Source::Layer(k) = source {
                live[k] = true;
            }
        }
    }
    sums.retain(|s| !matches!(s.target, Target::Layer(k) if !live[k]));
}

/// Which inputs are read at all.
fn inputs_read(sums: &[Sum], inputs: usize, view: View) -> Vec<bool> {
    let mut read = vec![false; inputs];
    for sum in sums {
        if sum.operator.iter().flat_map(|o| o.operands()).any(|o| o.source == Source::Input) {
            read.fill(true);
        }
        for block in sum.blocks.iter().filter(|b| b.source == Source::Input) {
            match &block.weights {
                TapWeights::Taps(taps) if is_direct(block, view.map) => {
                    taps.indices().iter().for_each(|j| read[*j as usize] = true);
                }
                _ => read.fill(true),
            }
        }
    }
    read
}
