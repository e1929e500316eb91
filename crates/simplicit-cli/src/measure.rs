//! Runs models and baselines over inputs and measures outputs, time and samples that did not converge.

use std::time::{Duration, Instant};

use simplicit::backend::Device;
use simplicit::equilibrium::{DeviceModel, Equilibrium, EquilibriumSettings, SampleDiagnostics, not_converged};
use simplicit::evaluate;
use simplicit::layout::Layout;
use simplicit::linalg::Matrix;
use simplicit::model::ImplicitModel;
use simplicit::network::Network;
use simplicit::parallel::{self, Cancel, Threads};
use simplicit::states::{InputSource, StateMap};
use simplicit::{Error, Result};

use crate::baseline::{Baseline, Kind};
use crate::progress::Watcher;

/// Samples that are read and run together. Memory holds one such chunk, whatever the number of samples.
const CHUNK: usize = 4096;
/// Samples that a thread of a network takes at a time.
const BLOCK: usize = 256;
/// Samples that are timed, at least and at most; how often, at least and at most; and the time after which it is enough.
const TIMED: [usize; 2] = [64, 10_000];
const TURNS: [usize; 2] = [3, 5];
const PATIENCE: Duration = Duration::from_secs(1);

/// The outputs of all samples, one a row, in the units of the network that everything started from.
pub(crate) struct Measured {
    pub(crate) outputs: Matrix<f32>,
    /// Seconds of running; reading is not included.
    pub(crate) seconds: f64,
    /// Diagnostics of every sample; empty for a network.
    pub(crate) diagnostics: Vec<SampleDiagnostics>,
}

impl Measured {
    /// Samples without equilibrium; those that are no numbers are counted apart.
    pub(crate) fn not_converged(&self) -> u64 {
        not_converged(&self.diagnostics).into_iter().filter(|&sample| self.is_finite(sample)).count() as u64
    }

    /// Samples with an output that is NaN or infinite.
    pub(crate) fn not_finite(&self) -> u64 {
        (0..self.outputs.rows()).filter(|&sample| !self.is_finite(sample)).count() as u64
    }

    /// The first of them, as a row of the outputs.
    pub(crate) fn first_not_finite(&self) -> Option<usize> {
        (0..self.outputs.rows()).find(|&sample| !self.is_finite(sample))
    }

    fn is_finite(&self, sample: usize) -> bool {
        self.outputs.row(sample).iter().all(|v| v.is_finite())
    }

    /// The largest certified error of an output, in units of the outputs; `None` where some sample has no bound.
    pub(crate) fn certified_error(&self) -> Option<f64> {
        let largest = self.diagnostics.iter().map(|d| d.output_error).reduce(f64::max)?;
        largest.is_finite().then_some(largest)
    }

    /// Milliseconds for 1,000 samples.
    pub(crate) fn milliseconds(&self) -> f64 {
        1e6 * self.seconds / self.outputs.rows().max(1) as f64
    }
}

/// The share of samples that both predict alike; nothing where there is one output and no class to predict.
pub(crate) fn agreement(ours: &Matrix<f32>, theirs: &Matrix<f32>) -> Result<Option<f64>> {
    (ours.cols() > 1).then(|| evaluate::agreement(ours, theirs)).transpose()
}

/// Something that runs a batch on some threads.
pub(crate) enum Runner<'a> {
    Network(&'a Network, Threads),
    /// A model, with the factor from stored outputs to the original network's.
    Model(Box<Equilibrium>, f64),
    /// The same on a GPU, where errors are not bounded.
    Gpu(Box<DeviceModel>, f64),
}

impl<'a> Runner<'a> {
    pub(crate) fn of_model(model: &ImplicitModel, threads: Threads) -> Result<Self> {
        Self::of_certified_model(model, threads, false)
    }

    /// A runner for a model; with `certified` the error of every sample is bounded.
    pub(crate) fn of_certified_model(model: &ImplicitModel, threads: Threads, certified: bool) -> Result<Self> {
        let equilibrium = Equilibrium::new(model, EquilibriumSettings { threads, certified, ..Default::default() })?;
        Ok(Runner::Model(Box::new(equilibrium), model.metadata().scaling.as_ref().map_or(1.0, |s| s.outputs)))
    }

    pub(crate) fn of_baseline(baseline: &'a Baseline, threads: Threads) -> Result<Self> {
        match &baseline.kind {
            Kind::Network(network) => Ok(Runner::Network(network, threads)),
            Kind::Model(model, _) => Self::of_model(model, threads),
        }
    }

    /// The layers, where they are at hand.
    fn layout(&self) -> Option<&Layout> {
        match self {
            Runner::Network(network, _) => Some(network.layout()),
            Runner::Model(equilibrium, _) => Some(equilibrium.layout()),
            Runner::Gpu(..) => None,
        }
    }

    /// Outputs and diagnostics of a batch.
    pub(crate) fn batch(&self, u: &Matrix<f32>) -> Result<(Matrix<f32>, Vec<SampleDiagnostics>)> {
        match self {
            Runner::Network(network, threads) => {
                let blocks = parallel::map(*threads, u.rows().div_ceil(BLOCK), |block| {
                    let rows = block * BLOCK..((block + 1) * BLOCK).min(u.rows());
                    network.forward(&InputSource::rows(u, rows)?)
                })?;
                let cols = blocks.first().map_or(0, Matrix::cols);
                let values = blocks.into_iter().flat_map(Matrix::into_vec).collect();
                Ok((Matrix::from_vec(u.rows(), cols, values)?, Vec::new()))
            }
            Runner::Gpu(model, factor) => {
                let mut y = model.outputs(u, &Cancel::new())?;
                y.as_mut_slice().iter_mut().for_each(|y| *y = (f64::from(*y) * factor) as f32);
                let of = |i: usize| SampleDiagnostics {
                    iterations: 1,
                    residual: 0.0,
                    state_error: f64::INFINITY,
                    output_error: f64::INFINITY,
                    converged: y.row(i).iter().all(|v| v.is_finite()),
                    multiply_adds: 0,
                };
                let diagnostics = (0..y.rows()).map(of).collect();
                Ok((y, diagnostics))
            }
            Runner::Model(equilibrium, factor) => {
                let mut solution = equilibrium.outputs(u)?;
                if *factor != 1.0 {
                    let outputs = solution.y.as_mut_slice();
                    outputs.iter_mut().for_each(|y| *y = (f64::from(*y) * factor) as f32);
                    solution.diagnostics.iter_mut().for_each(|d| d.output_error *= factor.abs());
                }
                Ok((solution.y, solution.diagnostics))
            }
        }
    }

    /// Runs all samples, a chunk at a time.
    pub(crate) fn run(&self, inputs: &dyn InputSource, cancel: &Cancel, watcher: &Watcher) -> Result<Measured> {
        let samples = inputs.samples();
        let (mut values, mut cols, mut seconds, mut diagnostics) = (Vec::new(), 0, 0.0, Vec::new());
        for first in (0..samples).step_by(CHUNK) {
            cancel.check()?;
            let u = inputs.rows(first..(first + CHUNK).min(samples))?;
            if let Some(layout) = self.layout() {
                layout.require_rows_of_tables(&u, first)?;
            }
            let start = Instant::now();
            let (y, more) = self.batch(&u)?;
            seconds += start.elapsed().as_secs_f64();
            cols = y.cols();
            values.extend(y.into_vec());
            diagnostics.extend(more);
            watcher.samples((first + CHUNK).min(samples), samples);
        }
        Ok(Measured { outputs: Matrix::from_vec(samples, cols, values)?, seconds, diagnostics })
    }

    /// Milliseconds per 1,000 samples: the best of several runs after one to warm up; reading is not counted. A
    /// network is timed as a model with all of its weights, by the kernels that the sparse model has: its own forward
    /// pass is slower.
    pub(crate) fn milliseconds(&self, inputs: &dyn InputSource, cancel: &Cancel) -> Result<f64> {
        if let Runner::Network(network, threads) = self {
            let model = ImplicitModel::from_network(network)?;
            return Runner::of_model(&model, *threads)?.milliseconds(inputs, cancel);
        }
        let few = inputs.rows(0..inputs.samples().min(TIMED[0]))?;
        let start = Instant::now();
        self.batch(&few)?;
        // So many samples that several turns fit into the time there is: other work on the machine spoils a single one.
        let each = start.elapsed().as_secs_f64() / few.rows().max(1) as f64;
        let turn = PATIENCE.as_secs_f64() / TURNS[1] as f64;
        let enough = ((turn / each.max(1e-9)) as usize).clamp(TIMED[0], TIMED[1]);
        let u = inputs.rows(0..inputs.samples().min(enough))?;
        let begin = Instant::now();
        self.batch(&u)?;
        let mut best = f64::INFINITY;
        for done in 1..=TURNS[1] {
            cancel.check()?;
            let start = Instant::now();
            self.batch(&u)?;
            best = best.min(start.elapsed().as_secs_f64());
            if done >= TURNS[0] && begin.elapsed() > PATIENCE {
                break;
            }
        }
        Ok(1e6 * best / u.rows().max(1) as f64)
    }
}

/// Runs all samples of a model: on the GPU that a device names, or with the runner given.
pub(crate) fn run_on(
    device: Device,
    model: &ImplicitModel,
    on_cpu: &Runner,
    inputs: &dyn InputSource,
    cancel: &Cancel,
    watcher: &Watcher,
) -> Result<Measured> {
    if let Some(on_gpu) = DeviceModel::on(device, model, Threads::available())? {
        let factor = model.metadata().scaling.as_ref().map_or(1.0, |s| s.outputs);
        match Runner::Gpu(Box::new(on_gpu), factor).run(inputs, cancel, watcher) {
            Err(Error::Device { .. }) if device == Device::Auto => {}
            measured => return measured,
        }
    }
    on_cpu.run(inputs, cancel, watcher)
}
