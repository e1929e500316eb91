//! Training's heavy steps on an engine that Python runs (Ray, processes): the driver's side and the workers' side.

use std::sync::{Arc, Mutex, PoisonError};

use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::PyBytes;
use simplicit::backend::{Device, Inverses};
use simplicit::memory;
use simplicit::parallel::Threads;
use simplicit::solver;
use simplicit::states::{Collected, InputSource, StateMap, StateSource};
use simplicit::statistics::{Statistics, Tree};
use simplicit::train::{self, RowsTask, StatisticsTask, Step, SumsTask, TrainSettings, WalkTask, numbers_to_bytes};
use simplicit::{Error, Result};
use simplicit_cli::front::{Courier, read_statistics, settings_from};

use crate::arrays::Lent;
use crate::door::enter;
use crate::errors::of_library;
use crate::network::Network;
use crate::train::{GivenStates, baseline_of};

/// A Python object with `start(method, numbers, parts)` and `next(call)`.
pub(crate) struct Engine<'a> {
    pub(crate) object: Py<PyAny>,
    /// The exception that Python raised, to be raised again in the caller.
    pub(crate) raised: &'a Mutex<Option<PyErr>>,
}

impl Engine<'_> {
    fn call<T>(&self, work: impl FnOnce(&Bound<'_, PyAny>) -> PyResult<T>) -> Result<T> {
        Python::attach(|py| work(self.object.bind(py))).map_err(|error| {
            *self.raised.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
            Error::Cancelled
        })
    }
}

impl Courier for Engine<'_> {
    fn start(&self, method: &str, numbers: &[usize], parts: &[Vec<u8>]) -> Result<u64> {
        self.call(|object| {
            let parts: Vec<_> = parts.iter().map(|part| PyBytes::new(object.py(), part)).collect();
            object.call_method1("start", (method, numbers.to_vec(), parts))?.extract()
        })
    }

    fn next(&self, call: u64, take: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<bool> {
        self.call(|object| {
            let next = object.call_method1("next", (call,))?;
            if next.is_none() {
                return Ok(Ok(false));
            }
            Ok(take(next.cast::<PyBytes>()?.as_bytes()).map(|()| true))
        })?
    }
}

/// Adds up the statistics of consecutive shards. A branch of the tree of sums that a single process would build.
#[pyclass(module = "simplicit._core")]
pub(crate) struct Branch {
    tree: Tree,
}

#[pymethods]
impl Branch {
    #[new]
    fn new() -> Self {
        Self { tree: Tree::default() }
    }

    /// Adds a sum over the next `shards` shards, given as bytes.
    fn add(&mut self, py: Python<'_>, shards: usize, sum: &[u8], features: usize, targets: usize) -> PyResult<()> {
        enter(py, None, |_| Ok(self.tree.push_branch(shards, read_statistics(sum, features, targets)?)?))
    }

    /// Returns the sum as bytes, and begins the next one.
    fn finish<'py>(&mut self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let sum = enter(py, None, |_| Ok(std::mem::take(&mut self.tree).finish()?.to_bytes()))?;
        Ok(PyBytes::new(py, &sum))
    }
}

/// Sixteen bytes that identify statistics.
#[pyfunction]
pub(crate) fn fingerprint<'py>(py: Python<'py>, statistics: &[u8]) -> Bound<'py, PyBytes> {
    PyBytes::new(py, &Statistics::fingerprint_of(statistics))
}

/// A worker's shard: adds the statistics of a task over some samples.
#[pyfunction]
#[pyo3(signature = (branch, task, baseline, u, states, preprocessing, threads))]
#[allow(clippy::too_many_arguments)]
pub(crate) fn run_statistics<'py>(
    py: Python<'py>,
    branch: &mut Branch,
    task: &[u8],
    baseline: Option<&Bound<'py, PyAny>>,
    u: Option<Lent<'py>>,
    states: Option<GivenStates<'py>>,
    preprocessing: &str,
    threads: usize,
) -> PyResult<()> {
    let task = StatisticsTask::from_bytes(task).map_err(|e| of_library(&e))?;
    let baseline = baseline.map(baseline_of).transpose()?;
    let preprocessing = serde_json::from_str(preprocessing).map_err(|e| crate::errors::of_any(&e.into()))?;
    let inputs = u.as_ref().map(|u| u.inputs(&preprocessing, None)).transpose()?;
    let states = states.as_ref().map(GivenStates::source).transpose()?;
    enter(py, None, |inside| {
        let run = |source: &dyn StateSource| task.run(source, Threads::new(threads), inside.cancel, |_| {});
        let statistics = match (&baseline, &inputs, &states) {
            (Some(baseline), Some(inputs), None) => {
                let map: &dyn StateMap = baseline.map();
                run(&Collected::new(map, inputs)?)?
            }
            (None, None, Some(states)) => run(states)?,
            _ => return Err(Error::setting("shard", "a baseline with inputs, or states", "something else").into()),
        };
        Ok(branch.tree.push(statistics)?)
    })
}

/// The data that the rows of a group share on a worker, kept from call to call.
#[pyclass(module = "simplicit._core", frozen)]
pub(crate) struct Design {
    design: solver::Design<'static>,
}

#[pymethods]
impl Design {
    #[new]
    fn new(py: Python<'_>, statistics: &[u8], features: usize, targets: usize) -> PyResult<Self> {
        enter(py, None, |_| {
            let statistics = read_statistics(statistics, features, targets)?;
            Ok(Self { design: solver::Design::kept(Arc::new(statistics))? })
        })
    }

    /// Bytes that it holds now.
    #[getter]
    fn bytes(&self) -> u64 {
        self.design.bytes()
    }

    /// Number of inverses for cardinality rows that were made on this worker.
    #[getter]
    fn made(&self) -> usize {
        self.design.inverses().map_or(0, Inverses::made)
    }

    /// Solves consecutive blocks of rows and returns each as bytes. `decided` are the settings as the driver decided
    /// them.
    fn rows<'py>(
        &self,
        py: Python<'py>,
        decided: &str,
        tasks: Vec<PyBackedBytes>,
        threads: usize,
        device: &str,
    ) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let rows = enter(py, None, |inside| {
            let settings = settings_of(decided, device)?;
            let tasks = tasks.iter().map(|task| RowsTask::from_bytes(task)).collect::<Result<Vec<_>>>()?;
            Ok(RowsTask::run_all(&tasks, &self.design, &settings, Threads::new(threads), inside.cancel)?)
        })?;
        Ok(rows.iter().map(|block| PyBytes::new(py, &numbers_to_bytes(block))).collect())
    }

    /// One of the inverses that the rows of a task need, for use on other workers.
    fn inverse<'py>(
        &self,
        py: Python<'py>,
        task: &[u8],
        number: usize,
        threads: usize,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let inverse = || RowsTask::from_bytes(task)?.inverse(&self.design, number, Threads::new(threads));
        let bytes = enter(py, None, |_| Ok(inverse()?))?;
        Ok(PyBytes::new(py, &bytes))
    }

    /// Takes over an inverse that another worker made.
    fn know(&self, py: Python<'_>, task: &[u8], number: usize, inverse: &[u8]) -> PyResult<()> {
        enter(py, None, |_| Ok(RowsTask::from_bytes(task)?.know(&self.design, number, inverse)?))
    }
}

/// Bytes of memory that are free now, where the system reports them.
#[pyfunction]
pub(crate) fn free_memory() -> Option<u64> {
    memory::free()
}

/// A worker's part of row weights or of the error of the outputs: the sums of every block of its samples, each as bytes.
#[pyfunction]
#[pyo3(signature = (task, baseline, u, first, preprocessing, threads))]
pub(crate) fn run_sums<'py>(
    py: Python<'py>,
    task: &[u8],
    baseline: Option<&Bound<'_, PyAny>>,
    u: Lent<'py>,
    first: usize,
    preprocessing: &str,
    threads: usize,
) -> PyResult<Vec<Bound<'py, PyBytes>>> {
    let task = SumsTask::from_bytes(task).map_err(|e| of_library(&e))?;
    let network = baseline.and_then(|b| b.cast::<Network>().ok()).map(|n| n.get().network.clone());
    let preprocessing = serde_json::from_str(preprocessing).map_err(|e| crate::errors::of_any(&e.into()))?;
    let inputs = u.inputs(&preprocessing, None)?;
    let sums = enter(py, None, |inside| {
        let inputs = inputs.rows(0..inputs.samples())?;
        Ok(task.run(network.as_deref(), &inputs, first, Threads::new(threads), inside.cancel)?)
    })?;
    Ok(sums.iter().map(|block| PyBytes::new(py, &numbers_to_bytes(block))).collect())
}

/// The settings on a worker. The device is chosen for the worker: a GPU that only some workers have would give other
/// bits.
fn settings_of(decided: &str, device: &str) -> anyhow::Result<TrainSettings> {
    let mut settings = settings_from(decided)?;
    settings.work.device = device.parse::<Device>()?;
    Ok(settings)
}

/// Some samples on their way through the layers of a network with feature maps.
#[pyclass(module = "simplicit._core")]
pub(crate) struct Shard {
    shard: train::Shard,
    threads: Threads,
}

#[pymethods]
impl Shard {
    /// Samples in a piece of a shard.
    #[classattr]
    const PIECE: usize = WalkTask::PIECE;

    #[new]
    #[pyo3(signature = (task, decided, u, first, preprocessing, threads, device, share))]
    #[allow(clippy::too_many_arguments)]
    fn new(
        py: Python<'_>,
        task: &[u8],
        decided: &str,
        u: Lent<'_>,
        first: usize,
        preprocessing: &str,
        threads: usize,
        device: &str,
        share: f64,
    ) -> PyResult<Self> {
        let preprocessing = serde_json::from_str(preprocessing).map_err(|e| crate::errors::of_any(&e.into()))?;
        let inputs = u.inputs(&preprocessing, None)?;
        enter(py, None, |_| {
            let (task, settings) = (WalkTask::from_bytes(task)?, settings_of(decided, device)?);
            let inputs = inputs.rows(0..inputs.samples())?;
            let shard = train::Shard::new(task, &settings, inputs, first, share)?;
            Ok(Self { shard, threads: Threads::new(threads) })
        })
    }

    /// Does a step that the driver sent to all shards.
    fn step(&mut self, py: Python<'_>, step: &[u8]) -> PyResult<()> {
        enter(py, None, |inside| Ok(self.shard.step(Step::from_bytes(step)?, self.threads, inside.cancel)?))
    }

    /// Adds the statistics of the group that was entered last.
    fn statistics(&mut self, py: Python<'_>, group: usize, branch: &mut Branch) -> PyResult<()> {
        enter(py, None, |inside| {
            let statistics = self.shard.statistics(group, self.threads, inside.cancel)?;
            Ok(branch.tree.push(statistics)?)
        })
    }
}
