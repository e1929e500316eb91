//! Statistics that are gathered batch by batch, and the allowed connections.

use std::sync::{Mutex, PoisonError};

use numpy::{PyArray1, PyArray2};
use pyo3::prelude::*;
use simplicit::layout::Layout;
use simplicit::linalg::Matrix;
use simplicit::problem::Connectivity;
use simplicit::statistics::{BLOCK, Statistics as Sums, Tree};
use simplicit::{Error, Result};

use crate::arrays::{Lent, to_numpy};
use crate::door::enter;
use crate::errors::of_library;

/// Rows that do not fill a block yet, and the sum of the blocks before them.
#[derive(Default)]
struct Gathered {
    features: Vec<f64>,
    targets: Vec<f64>,
    samples: usize,
    tree: Tree,
}

/// Statistics of features [X U 1] against targets [Z Y], in fixed blocks whatever the batches are.
#[pyclass(frozen, module = "simplicit._core")]
pub(crate) struct Statistics {
    shape: (usize, usize),
    state: Mutex<Option<Gathered>>,
}

impl Statistics {
    fn flush(shape: (usize, usize), gathered: &mut Gathered, all: bool) -> Result<()> {
        let (d, r) = shape;
        while gathered.samples >= BLOCK || (all && gathered.samples > 0) {
            let count = gathered.samples.min(BLOCK);
            let features = Matrix::from_vec(count, d, gathered.features.drain(..count * d).collect())?;
            let targets = Matrix::from_vec(count, r, gathered.targets.drain(..count * r).collect())?;
            gathered.tree.push(Sums::of(&features, &targets)?)?;
            gathered.samples -= count;
        }
        Ok(())
    }
}

#[pymethods]
impl Statistics {
    #[new]
    fn new(features: usize, targets: usize) -> Self {
        Self { shape: (features, targets), state: Mutex::new(Some(Gathered::default())) }
    }

    /// Adds samples, one per row.
    fn push(&self, py: Python<'_>, features: Lent<'_>, targets: Lent<'_>) -> PyResult<()> {
        let (features, targets) = (features.numbers(), targets.numbers());
        let got = (features.features(), targets.features());
        if got != self.shape || features.samples() != targets.samples() {
            let expected = format!("{} features and {} targets of as many samples", self.shape.0, self.shape.1);
            let got = format!("{} and {} of {} and {}", got.0, got.1, features.samples(), targets.samples());
            return Err(of_library(&Error::shape("batch", expected, got)));
        }
        enter(py, None, |_| {
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            let gathered =
                state.as_mut().ok_or_else(|| Error::setting("statistics", "some that are open", "finished"))?;
            gathered.features.extend(features.block(0..features.samples()).into_vec());
            gathered.targets.extend(targets.block(0..targets.samples()).into_vec());
            gathered.samples += features.samples();
            Ok(Self::flush(self.shape, gathered, false)?)
        })
    }

    /// Returns the number of samples m, G, H (one target per row) and e. No more samples can be added afterwards.
    #[allow(clippy::type_complexity)]
    fn finish<'py>(
        &self,
        py: Python<'py>,
    ) -> PyResult<(usize, Bound<'py, PyArray2<f64>>, Bound<'py, PyArray2<f64>>, Bound<'py, PyArray1<f64>>)> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let mut gathered = state.take().unwrap_or_default();
        let finish = |gathered: &mut Gathered| {
            Self::flush(self.shape, gathered, true)?;
            std::mem::take(&mut gathered.tree).finish()
        };
        let sums = finish(&mut gathered).map_err(|e| of_library(&e))?;
        let (d, r) = self.shape;
        let cross = Matrix::from_fn(r, d, |i, j| sums.cross(i)[j]);
        let energy = PyArray1::from_iter(py, (0..r).map(|i| sums.energy(i)));
        Ok((sums.samples(), to_numpy(py, sums.gram().clone())?, to_numpy(py, cross)?, energy))
    }
}

/// The allowed connections as an (n + q) × (n + p) array: 1 where a weight may be.
#[pyfunction]
pub(crate) fn connections<'py>(
    py: Python<'py>,
    connectivity: &str,
    layout: &str,
    inputs: usize,
    outputs: usize,
) -> PyResult<Bound<'py, PyArray2<f32>>> {
    let kind = match connectivity {
        "full" => Connectivity::Full,
        "no-self-loop" => Connectivity::NoSelfLoop,
        "feedforward" => Connectivity::Feedforward,
        other => {
            return Err(of_library(&Error::setting("connectivity", "full, no-self-loop or feedforward", other)));
        }
    };
    let mask = Layout::from_json(layout).and_then(|layout| kind.mask(&layout, inputs, outputs, None));
    let mask = mask.map_err(|e| of_library(&e))?;
    let (rows, cols) = mask.shape();
    to_numpy(py, Matrix::from_fn(rows, cols, |i, j| f32::from(u8::from(mask.allows(i, j)))))
}
