//! Training's heavy steps on an engine that Python runs (Ray, processes): the driver's side and the workers' side.

use std::sync::{Arc, Mutex, PoisonError};

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use simplicit::backend::{Device, Inverses};
use simplicit::memory;
use simplicit::parallel::Threads;
use simplicit::solver;
use simplicit::states::{Collected, InputSource, StateMap, StateSource};
use simplicit::statistics::Tree;
use simplicit::train::{self, RowsTask, StatisticsTask, Step, TrainSettings, WalkTask, WeightsTask};
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
    /// What Python raised, for whoever called.
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

    fn next(&self, call: u64) -> Result<Option<Vec<u8>>> {
        self.call(|object| {
            let next = object.call_method1("next", (call,))?;
            Ok(if next.is_none() { None } else { Some(next.cast::<PyBytes>()?.as_bytes().to_vec()) })
        })
    }
}

/// A worker's shard: the statistics of a task over some samples, as bytes.
#[pyfunction]
#[pyo3(signature = (task, baseline, u, states, preprocessing, threads))]
pub(crate) fn run_statistics<'py>(
    py: Python<'py>,
    task: &[u8],
    baseline: Option<&Bound<'py, PyAny>>,
    u: Option<Lent<'py>>,
    states: Option<GivenStates<'py>>,
    preprocessing: &str,
    threads: usize,
) -> PyResult<Bound<'py, PyBytes>> {
    let task = StatisticsTask::from_bytes(task).map_err(|e| of_library(&e))?;
    let baseline = baseline.map(baseline_of).transpose()?;
    let preprocessing = serde_json::from_str(preprocessing).map_err(|e| crate::errors::of_any(&e.into()))?;
    let inputs = u.as_ref().map(|u| u.inputs(&preprocessing)).transpose()?;
    let states = states.as_ref().map(GivenStates::source).transpose()?;
    let bytes = enter(py, None, |inside| {
        let run = |source: &dyn StateSource| task.run(source, Threads::new(threads), inside.cancel, |_| {});
        let statistics = match (&baseline, &inputs, &states) {
            (Some(baseline), Some(inputs), None) => {
                let map: &dyn StateMap = baseline.map();
                run(&Collected::new(map, inputs)?)?
            }
            (None, None, Some(states)) => run(states)?,
            _ => return Err(Error::setting("shard", "a baseline with inputs, or states", "something else").into()),
        };
        Ok(statistics.to_bytes())
    })?;
    Ok(PyBytes::new(py, &bytes))
}

/// What the rows of a group share on a worker, kept from call to call.
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

    /// Bytes that it holds by now.
    #[getter]
    fn bytes(&self) -> u64 {
        self.design.bytes()
    }

    /// Inverses of cardinality rows that were made here.
    #[getter]
    fn made(&self) -> usize {
        self.design.inverses().map_or(0, Inverses::made)
    }

    /// Consecutive blocks of rows, each as bytes. `decided` is what the driver's settings came to.
    fn rows<'py>(
        &self,
        py: Python<'py>,
        decided: &str,
        tasks: Vec<Vec<u8>>,
        threads: usize,
        device: &str,
    ) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let rows = enter(py, None, |inside| {
            let settings = settings_of(decided, device)?;
            let tasks = tasks.iter().map(|task| RowsTask::from_bytes(task)).collect::<Result<Vec<_>>>()?;
            Ok(RowsTask::run_all(&tasks, &self.design, &settings, Threads::new(threads), inside.cancel)?)
        })?;
        Ok(rows.iter().map(|block| PyBytes::new(py, &bytes_of(block))).collect())
    }

    /// One of the inverses that the rows of a task need, for other workers.
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

    /// One that another worker made.
    fn know(&self, py: Python<'_>, task: &[u8], number: usize, inverse: &[u8]) -> PyResult<()> {
        enter(py, None, |_| Ok(RowsTask::from_bytes(task)?.know(&self.design, number, inverse)?))
    }
}

/// Bytes of memory that are free now, where the system says.
#[pyfunction]
pub(crate) fn free_memory() -> Option<u64> {
    memory::free()
}

/// A worker's part of row weights: the sums of every block of its samples, each as bytes.
#[pyfunction]
#[pyo3(signature = (task, baseline, u, first, preprocessing, threads))]
pub(crate) fn run_weights<'py>(
    py: Python<'py>,
    task: &[u8],
    baseline: &Bound<'_, PyAny>,
    u: Lent<'py>,
    first: usize,
    preprocessing: &str,
    threads: usize,
) -> PyResult<Vec<Bound<'py, PyBytes>>> {
    let task = WeightsTask::from_bytes(task).map_err(|e| of_library(&e))?;
    let network = baseline.cast::<Network>().ok().map(|n| n.get().network.clone());
    let preprocessing = serde_json::from_str(preprocessing).map_err(|e| crate::errors::of_any(&e.into()))?;
    let inputs = u.inputs(&preprocessing)?;
    let sums = enter(py, None, |inside| {
        let inputs = inputs.rows(0..inputs.samples())?;
        Ok(task.run(network.as_deref(), &inputs, first, Threads::new(threads), inside.cancel)?)
    })?;
    Ok(sums.iter().map(|block| PyBytes::new(py, &bytes_of(block))).collect())
}

/// Numbers on their way to the driver.
fn bytes_of(block: &[f64]) -> Vec<u8> {
    block.iter().flat_map(|v| v.to_le_bytes()).collect()
}

/// The settings on a worker. Its device is its own: a GPU that happens to be there would give other bits.
fn settings_of(decided: &str, device: &str) -> anyhow::Result<TrainSettings> {
    Ok(TrainSettings { device: device.parse::<Device>()?, ..settings_from(decided)? })
}

/// The sum of the statistics of consecutive shards, 2ᵏ of them or what is left: a branch of the tree that one process
/// sums in.
#[pyfunction]
pub(crate) fn merge_statistics<'py>(
    py: Python<'py>,
    parts: Vec<Vec<u8>>,
    features: usize,
    targets: usize,
) -> PyResult<Bound<'py, PyBytes>> {
    let bytes = enter(py, None, |_| {
        let mut tree = Tree::default();
        for part in &parts {
            tree.push(read_statistics(part, features, targets)?)?;
        }
        Ok(tree.finish()?.to_bytes())
    })?;
    Ok(PyBytes::new(py, &bytes))
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
        let inputs = u.inputs(&preprocessing)?;
        enter(py, None, |_| {
            let (task, settings) = (WalkTask::from_bytes(task)?, settings_of(decided, device)?);
            let inputs = inputs.rows(0..inputs.samples())?;
            let shard = train::Shard::new(task, &settings, inputs, first, share)?;
            Ok(Self { shard, threads: Threads::new(threads) })
        })
    }

    /// Does a step that the driver told all shards.
    fn step(&mut self, py: Python<'_>, step: &[u8]) -> PyResult<()> {
        enter(py, None, |inside| Ok(self.shard.step(Step::from_bytes(step)?, self.threads, inside.cancel)?))
    }

    /// Statistics of the group entered last, as bytes.
    fn statistics<'py>(&mut self, py: Python<'py>, group: usize) -> PyResult<Bound<'py, PyBytes>> {
        let bytes =
            enter(py, None, |inside| Ok(self.shard.statistics(group, self.threads, inside.cancel)?.to_bytes()))?;
        Ok(PyBytes::new(py, &bytes))
    }
}
