//! Training's heavy steps on an engine that Python runs (Ray, processes): the driver's side and the workers' side.

use std::sync::{Mutex, PoisonError};

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use simplicit::parallel::{self, Cancel, Threads};
use simplicit::solver::Design;
use simplicit::states::{Collected, StateMap, StateSource};
use simplicit::statistics::{Statistics, Tree};
use simplicit::train::{Delegate, Keep, RowsTask, StatisticsTask};
use simplicit::{Error, Result};
use simplicit_cli::front::settings_from;

use crate::arrays::Lent;
use crate::door::enter;
use crate::errors::of_library;
use crate::train::{GivenStates, baseline_of};

/// A Python object with `start_statistics(task, samples)`, `start_rows(statistics, features, targets, tasks)` and `next(handle)`,
/// which returns the next result in order, or None after a moment in which none came.
pub(crate) struct Engine<'a> {
    pub(crate) object: Py<PyAny>,
    pub(crate) cancel: &'a Cancel,
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

    /// Results in order until `count` of them are there.
    fn results(
        &self,
        handle: &Py<PyAny>,
        count: usize,
        mut take: impl FnMut(usize, &[u8]) -> Result<()>,
    ) -> Result<()> {
        let mut done = 0;
        while done < count {
            self.cancel.check()?;
            let next: Option<Vec<u8>> = self.call(|object| {
                let next = object.call_method1("next", (handle,))?;
                Ok(if next.is_none() { None } else { Some(next.cast::<PyBytes>()?.as_bytes().to_vec()) })
            })?;
            if let Some(bytes) = next {
                take(done, &bytes)?;
                done += 1;
            }
        }
        Ok(())
    }
}

impl Keep for Engine<'_> {
    fn get(&self, _: &str) -> Result<Option<Vec<u8>>> {
        Ok(None)
    }

    fn put(&self, _: &str, _: &[u8]) -> Result<()> {
        Ok(())
    }

    fn delegate(&self) -> Option<&dyn Delegate> {
        Some(self)
    }
}

impl Delegate for Engine<'_> {
    fn statistics(&self, task: &StatisticsTask) -> Result<Statistics> {
        let (d, r) = task.shape();
        let (handle, shards) = self.call(|object| {
            let bytes = PyBytes::new(object.py(), &task.to_bytes());
            object.call_method1("start_statistics", (bytes, task.samples()))?.extract::<(Py<PyAny>, usize)>()
        })?;
        let mut tree = Tree::default();
        self.results(&handle, shards, |_, bytes| {
            let got = || Error::shape("statistics of a shard", format!("{d} features, {r} targets"), "other bytes");
            tree.push(Statistics::from_bytes(bytes, d, r).ok_or_else(got)?)
        })?;
        tree.finish()
    }

    fn rows(
        &self,
        statistics: &Statistics,
        tasks: &[RowsTask],
        take: &mut dyn FnMut(usize, Vec<f64>) -> Result<()>,
    ) -> Result<()> {
        let (d, r) = (statistics.features(), statistics.targets());
        let handle = self.call(|object| {
            let py = object.py();
            let bytes = PyBytes::new(py, &statistics.to_bytes());
            let tasks: Vec<_> = tasks.iter().map(|task| PyBytes::new(py, &task.to_bytes())).collect();
            Ok(object.call_method1("start_rows", (bytes, d, r, tasks))?.unbind())
        })?;
        self.results(&handle, tasks.len(), |k, bytes| {
            let (numbers, tail) = bytes.as_chunks::<8>();
            let expected = tasks[k].length(d);
            if numbers.len() != expected || !tail.is_empty() {
                return Err(Error::shape("a block of rows", format!("{expected} numbers"), numbers.len()));
            }
            take(k, numbers.iter().map(|c| f64::from_le_bytes(*c)).collect())
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

/// A worker's rows: some blocks over one design, each as bytes. `decided` is what the driver's settings came to.
#[pyfunction]
#[pyo3(signature = (decided, statistics, features, targets, tasks, threads))]
pub(crate) fn run_rows<'py>(
    py: Python<'py>,
    decided: &str,
    statistics: &[u8],
    features: usize,
    targets: usize,
    tasks: Vec<Vec<u8>>,
    threads: usize,
) -> PyResult<Vec<Bound<'py, PyBytes>>> {
    let rows = enter(py, None, |inside| {
        let settings = settings_from(decided)?;
        let bad = || Error::shape("statistics", format!("{features} features, {targets} targets"), "other bytes");
        let statistics = Statistics::from_bytes(statistics, features, targets).ok_or_else(bad)?;
        let design = Design::new(&statistics)?;
        let tasks = tasks.iter().map(|task| RowsTask::from_bytes(task)).collect::<Result<Vec<_>>>()?;
        Ok(parallel::map(Threads::new(threads), tasks.len(), |k| {
            inside.cancel.check()?;
            let rows = tasks[k].run(&design, &settings, inside.cancel)?;
            Ok(rows.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>())
        })?)
    })?;
    Ok(rows.iter().map(|bytes| PyBytes::new(py, bytes)).collect())
}
