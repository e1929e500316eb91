//! A module that Python runs as a source of linear blocks: its callbacks are called with the interpreter's lock held,
//! an exception that they raise ends the training, and Ctrl-C is checked between batches.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use numpy::{PyReadonlyArray1, PyReadonlyArray2, PyReadonlyArray3, PyUntypedArrayMethods};
use pyo3::prelude::*;
use simplicit::linalg::{Matrix, Scalar};
use simplicit::parallel::Cancel;
use simplicit::statistics::Statistics;
use simplicit::train::{BlockRows, BlockSource, Checkpoint, Forget, Keep, LinearBlock, Progress, Run as TrainRun};
use simplicit::{Error, Result};
use simplicit_cli::front::{Run, Training};

use crate::arrays::to_numpy;
use crate::door::{self, enter};
use crate::errors::of_any;

/// Name, groups, weights, constants, whether they are counted, whether positions share it, stage.
type Given<'py> = (String, usize, PyReadonlyArray2<'py, f32>, Option<PyReadonlyArray1<'py, f32>>, bool, bool, usize);

/// Trains a module in place. `source` has `blocks()`, `fixed_nonzeros()`, `samples()`, `begin(blocks, samples, own)`,
/// `begin_weights()`, `begin_errors(rows)`, `step()`, `finish()`, `install(block, weights, constant)` and `reset()`.
/// Returns the results (JSON) and the notices for the user.
#[pyfunction]
#[pyo3(signature = (flags, source, *, threads=None, checkpoint=None, hashes=None, progress=None))]
pub(crate) fn train_blocks<'py>(
    py: Python<'py>,
    flags: Vec<String>,
    source: &Bound<'py, PyAny>,
    threads: Option<usize>,
    checkpoint: Option<PathBuf>,
    hashes: Option<BTreeMap<String, String>>,
    progress: Option<&Bound<'py, PyAny>>,
) -> PyResult<(String, Vec<String>)> {
    let training = Training::of_blocks(&flags).map_err(|e| of_any(&e))?;
    let given: Vec<Given<'py>> = source.call_method0("blocks")?.extract()?;
    let blocks = given.into_iter().map(|(name, groups, weights, constant, counts_constant, shared, stage)| {
        let weights = matrix(&weights.as_array());
        let constant = constant.map(|c| c.as_array().to_vec());
        LinearBlock { name, groups, weights, constant, counts_constant, shared, stage }
    });
    let raised = Mutex::new(None);
    let mut module = Module {
        object: source.clone().unbind(),
        blocks: blocks.collect(),
        fixed: source.call_method0("fixed_nonzeros")?.extract()?,
        samples: source.call_method0("samples")?.extract()?,
        raised: &raised,
    };
    let threads = door::threads(threads);
    let trained = enter(py, progress, |inside| {
        let kept = match &checkpoint {
            Some(directory) => {
                let mut fingerprint = hashes.unwrap_or_default();
                fingerprint.insert("settings".into(), training.decided()?);
                Some(Checkpoint::open(directory, &fingerprint)?)
            }
            None => None,
        };
        let keep: &dyn Keep = match &kept {
            Some(checkpoint) => checkpoint,
            None => &Forget,
        };
        training.run_blocks(&mut module, &Run { threads, cancel: inside.cancel, keep, listener: inside.tell })
    });
    match raised.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some(error) => Err(error),
        None => trained,
    }
}

fn matrix<T: Scalar>(view: &numpy::ndarray::ArrayView2<'_, T>) -> Matrix<T> {
    Matrix::from_fn(view.nrows(), view.ncols(), |i, j| view[(i, j)])
}

struct Module<'a> {
    object: Py<PyAny>,
    blocks: Arc<[LinearBlock]>,
    fixed: u64,
    samples: usize,
    /// The exception that Python raised, to be raised again in the caller.
    raised: &'a Mutex<Option<PyErr>>,
}

impl Module<'_> {
    fn call<T>(&self, work: impl FnOnce(&Bound<'_, PyAny>) -> PyResult<T>) -> Result<T> {
        Python::attach(|py| work(self.object.bind(py))).map_err(|error| {
            *self.raised.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
            Error::Cancelled
        })
    }

    /// Runs batches until there are none left.
    fn steps(&self, cancel: &Cancel, mut done: impl FnMut(usize)) -> Result<()> {
        while let Some(samples) = self.call(|object| object.call_method0("step")?.extract::<Option<usize>>())? {
            cancel.check()?;
            done(samples);
        }
        Ok(())
    }
}

/// G, H and e of every group of a block; where there are few samples, its features and targets instead.
fn statistics_of(gathered: &Bound<'_, PyAny>) -> PyResult<Vec<Result<Statistics>>> {
    let samples: Option<usize> = gathered.get_item(0)?.extract()?;
    let first: PyReadonlyArray3<'_, f64> = gathered.get_item(1)?.extract()?;
    let second: PyReadonlyArray3<'_, f64> = gathered.get_item(2)?.extract()?;
    let groups = first.shape()[0];
    let (first, second) = (first.as_array(), second.as_array());
    let part =
        |array: &numpy::ndarray::ArrayView3<'_, f64>, g: usize| matrix(&array.index_axis(numpy::ndarray::Axis(0), g));
    match samples {
        Some(samples) => {
            let energy: PyReadonlyArray2<'_, f64> = gathered.get_item(3)?.extract()?;
            let energy = energy.as_array();
            let of =
                |g: usize| Statistics::from_sums(samples, part(&first, g), part(&second, g), energy.row(g).to_vec());
            Ok((0..groups).map(of).collect())
        }
        None => Ok((0..groups).map(|g| Statistics::of_few(part(&first, g), &part(&second, g))).collect()),
    }
}

impl BlockSource for Module<'_> {
    fn blocks(&self) -> Arc<[LinearBlock]> {
        self.blocks.clone()
    }

    fn fixed_nonzeros(&self) -> u64 {
        self.fixed
    }

    fn samples(&self) -> usize {
        self.samples
    }

    fn statistics(
        &mut self,
        blocks: &[usize],
        samples: usize,
        own: bool,
        run: &mut TrainRun,
    ) -> Result<Vec<Vec<Statistics>>> {
        let group = match blocks {
            [one] => self.blocks[*one].name.clone(),
            several => format!("{} blocks", several.len()),
        };
        self.call(|object| object.call_method1("begin", (blocks.to_vec(), samples, own)).map(drop))?;
        let (cancel, progress) = (run.cancel, &mut *run.progress);
        self.steps(cancel, |done| progress(Progress::Samples { group: group.clone(), done, total: samples }))?;
        let gathered = self.call(|object| {
            object.call_method0("finish")?.try_iter()?.map(|block| statistics_of(&block?)).collect::<PyResult<Vec<_>>>()
        })?;
        gathered.into_iter().map(|groups| groups.into_iter().collect()).collect()
    }

    fn install(&mut self, block: usize, rows: &BlockRows) -> Result<()> {
        self.call(|object| {
            let py = object.py();
            let weights = to_numpy(py, rows.weights.clone())?;
            let constant = rows.constant.as_ref().map(|c| numpy::PyArray1::from_slice(py, c));
            object.call_method1("install", (block, weights, constant)).map(drop)
        })
    }

    fn reset(&mut self) -> Result<()> {
        self.call(|object| object.call_method0("reset").map(drop))
    }

    fn row_weights(&mut self, run: &mut TrainRun) -> Result<Option<Vec<Vec<f64>>>> {
        let total = self.call(|object| object.call_method0("begin_weights")?.extract())?;
        let (cancel, progress) = (run.cancel, &mut *run.progress);
        let group = "row weights".to_string();
        self.steps(cancel, |done| progress(Progress::Samples { group: group.clone(), done, total }))?;
        self.call(|object| object.call_method0("finish")?.extract())
    }

    fn joint_errors(&mut self, rows: &[BlockRows], run: &TrainRun) -> Result<Vec<(f64, Vec<f64>)>> {
        self.call(|object| {
            let py = object.py();
            let rows = rows.iter().map(|rows| {
                let constant = rows.constant.as_ref().map(|c| numpy::PyArray1::from_slice(py, c));
                Ok((to_numpy(py, rows.weights.clone())?, constant))
            });
            object.call_method1("begin_errors", (rows.collect::<PyResult<Vec<_>>>()?,)).map(drop)
        })?;
        self.steps(run.cancel, |_| {})?;
        self.call(|object| object.call_method0("finish")?.extract())
    }
}
