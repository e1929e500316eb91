//! The implicit model for Python: its numbers are lent, never copied.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use numpy::ndarray::aview1;
use numpy::{Element, PyArray1, PyArray2, PyReadonlyArray1};
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyBytes, PyDict};
use simplicit::arrays::Preprocessing;
use simplicit::equilibrium::{Equilibrium, EquilibriumSettings, InputGradient, SampleDiagnostics};
use simplicit::layout::Layout;
use simplicit::linalg::{Csr, Matrix};
use simplicit::model::{ImplicitModel, ModelMetadata, ModelParts};
use simplicit::onnx::{OnnxSettings, export_onnx};
use simplicit::states::InputSource;
use simplicit::{Error, Result};

use crate::arrays::{Lent, ViewInputs, to_numpy};
use crate::door::{self, enter};
use crate::errors::{of_any, of_library};
use crate::taps;

/// Samples that run together. A request to stop takes effect after such a chunk.
const CHUNK: usize = 4096;

/// An implicit model.
#[pyclass(frozen, module = "simplicit._core")]
pub(crate) struct Model {
    pub(crate) model: Arc<ImplicitModel>,
    /// The model ready to run, with the settings of the last call.
    ready: Mutex<Option<(EquilibriumSettings, Arc<Equilibrium>)>>,
}

impl Model {
    pub(crate) fn of(model: ImplicitModel) -> Self {
        Self { model: Arc::new(model), ready: Mutex::new(None) }
    }

    fn equilibrium(&self, settings: EquilibriumSettings) -> Result<Arc<Equilibrium>> {
        let mut ready = self.ready.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((known, equilibrium)) = ready.as_ref()
            && *known == settings
        {
            return Ok(equilibrium.clone());
        }
        let equilibrium = Arc::new(Equilibrium::new(&self.model, settings)?);
        *ready = Some((settings, equilibrium.clone()));
        Ok(equilibrium)
    }

    fn inputs<'a>(&self, u: &'a Lent<'_>, preprocess: bool) -> PyResult<ViewInputs<'a>> {
        let identity = Preprocessing::identity();
        let preprocessing = if preprocess { self.model.preprocessing() } else { &identity };
        u.inputs(preprocessing, self.model.input_axes().as_deref())
    }

    fn csr_of(&self, letter: &str) -> PyResult<&Csr<f32>> {
        match letter {
            "A" => Ok(self.model.a()),
            "B" => Ok(self.model.b()),
            "C" => Ok(self.model.c()),
            "D" => Ok(self.model.d()),
            other => Err(of_library(&Error::setting("letter", "A, B, C or D", other))),
        }
    }
}

/// Numbers of a model as a read-only array that keeps the model alive.
#[allow(unsafe_code)]
pub(crate) fn lend<'py, T: Element>(owner: &Bound<'py, Model>, numbers: &[T]) -> PyResult<Bound<'py, PyArray1<T>>> {
    // SAFETY: `numbers` belongs to the model behind `owner`'s Arc, which nothing changes or drops while `owner`, the
    // array's base, is alive; the array is made read-only before anybody sees it.
    let array = unsafe { PyArray1::borrow_from_array(&aview1(numbers), owner.clone().into_any()) };
    array.call_method("setflags", (), Some(&[("write", false)].into_py_dict(owner.py())?))?;
    Ok(array)
}

/// indptr, indices, data and shape.
type CsrArrays<'py> =
    (Bound<'py, PyArray1<usize>>, Bound<'py, PyArray1<u32>>, Bound<'py, PyArray1<f32>>, (usize, usize));

/// indptr, indices and data of a matrix that Python made.
type GivenCsr<'py> = (PyReadonlyArray1<'py, i64>, PyReadonlyArray1<'py, i64>, PyReadonlyArray1<'py, f32>);

fn csr(name: &str, rows: usize, cols: usize, given: &GivenCsr) -> PyResult<Csr<f32>> {
    let bad = || of_library(&Error::shape(name, "indices below 2^32", "others"));
    let indptr: Option<Vec<usize>> = given.0.as_array().iter().map(|v| usize::try_from(*v).ok()).collect();
    let indices: Option<Vec<u32>> = given.1.as_array().iter().map(|v| u32::try_from(*v).ok()).collect();
    let data = given.2.as_array().to_vec();
    Csr::new(name, rows, cols, indptr.ok_or_else(bad)?, indices.ok_or_else(bad)?, data).map_err(|e| of_library(&e))
}

fn of_json<T>(result: serde_json::Result<T>) -> PyResult<T> {
    result.map_err(|e| of_any(&e.into()))
}

#[pymethods]
impl Model {
    #[staticmethod]
    fn load(path: PathBuf) -> PyResult<Self> {
        ImplicitModel::load(path).map(Self::of).map_err(|e| of_library(&e))
    }

    #[staticmethod]
    fn from_bytes(bytes: &[u8]) -> PyResult<Self> {
        ImplicitModel::from_bytes(bytes, "model").map(Self::of).map_err(|e| of_library(&e))
    }

    /// From CSR matrices, biases and a layout.
    #[staticmethod]
    #[pyo3(signature = (matrices, state_bias, output_bias, layout, inputs, outputs, kappa=None, baseline_nonzeros=None, provenance=None, preprocessing=None))]
    #[allow(clippy::too_many_arguments)]
    fn from_parts(
        matrices: [GivenCsr<'_>; 4],
        state_bias: Vec<f32>,
        output_bias: Vec<f32>,
        layout: &str,
        inputs: usize,
        outputs: usize,
        kappa: Option<f64>,
        baseline_nonzeros: Option<u64>,
        provenance: Option<std::collections::BTreeMap<String, String>>,
        preprocessing: Option<&str>,
    ) -> PyResult<Self> {
        let layout = Layout::from_json(layout).map_err(|e| of_library(&e))?;
        let n = layout.size();
        let [a, b, c, d] = matrices;
        let preprocessing: Option<Preprocessing> = of_json(preprocessing.map(serde_json::from_str).transpose())?;
        // A model given as matrices has no tap blocks or operators.
        #[allow(clippy::needless_update)]
        let parts = ModelParts {
            a: csr("A", n, n, &a)?,
            b: csr("B", n, inputs, &b)?,
            c: csr("C", outputs, n, &c)?,
            d: csr("D", outputs, inputs, &d)?,
            state_bias,
            output_bias,
            layout,
            preprocessing: preprocessing.unwrap_or_default(),
            metadata: ModelMetadata {
                kappa,
                baseline_nonzeros,
                provenance: provenance.unwrap_or_default(),
                ..Default::default()
            },
            ..Default::default()
        };
        ImplicitModel::new(parts).map(Self::of).map_err(|e| of_library(&e))
    }

    fn to_bytes<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.model.to_bytes())
    }

    fn save(&self, path: PathBuf) -> PyResult<()> {
        self.model.save(path).map_err(|e| of_library(&e))
    }

    /// (inputs, states, outputs).
    #[getter]
    fn shape(&self) -> (usize, usize, usize) {
        let shape = self.model.shape();
        (shape.inputs, shape.states, shape.outputs)
    }

    fn csr<'py>(slf: &Bound<'py, Self>, letter: &str) -> PyResult<CsrArrays<'py>> {
        let matrix = slf.get().csr_of(letter)?;
        let shape = (matrix.rows(), matrix.cols());
        Ok((lend(slf, matrix.indptr())?, lend(slf, matrix.indices())?, lend(slf, matrix.data())?, shape))
    }

    /// The blocks of shared weights, as one dictionary per block.
    fn taps<'py>(slf: &Bound<'py, Self>) -> PyResult<Vec<Bound<'py, PyDict>>> {
        taps::blocks(slf)
    }

    #[getter]
    fn state_bias<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyArray1<f32>>> {
        lend(slf, slf.get().model.state_bias())
    }

    #[getter]
    fn output_bias<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyArray1<f32>>> {
        lend(slf, slf.get().model.output_bias())
    }

    #[getter]
    fn layout(&self) -> String {
        self.model.layout().to_json()
    }

    #[getter]
    fn preprocessing(&self) -> PyResult<String> {
        of_json(serde_json::to_string(self.model.preprocessing()))
    }

    /// The factor that brings outputs into the units of the original network.
    #[getter]
    fn output_factor(&self) -> f64 {
        self.model.metadata().scaling.as_ref().map_or(1.0, |s| s.outputs)
    }

    #[getter]
    fn kappa(&self) -> Option<f64> {
        self.model.metadata().kappa
    }

    #[getter]
    fn provenance(&self) -> std::collections::BTreeMap<String, String> {
        self.model.metadata().provenance.clone()
    }

    fn sparsity(&self) -> PyResult<String> {
        of_json(serde_json::to_string(&self.model.sparsity()))
    }

    fn well_posedness<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let model = self.model.clone();
        let posed = enter(py, None, move |_| Ok(model.well_posedness()))?;
        let out = PyDict::new(py);
        out.set_item("norm_a_inf", posed.norm_a_inf)?;
        out.set_item("lambda_pf_upper", posed.lambda_pf_upper)?;
        out.set_item("acyclic", posed.acyclic)?;
        out.set_item("is_shown", posed.is_shown())?;
        Ok(out)
    }

    /// Outputs (and states) of raw inputs, with what is known about every sample.
    #[pyo3(signature = (u, *, preprocess=true, states=false, threads=None, tolerance=1e-6, max_iterations=2000, memory=5))]
    #[allow(clippy::too_many_arguments)]
    fn run<'py>(
        &self,
        py: Python<'py>,
        u: Lent<'py>,
        preprocess: bool,
        states: bool,
        threads: Option<usize>,
        tolerance: f64,
        max_iterations: usize,
        memory: usize,
    ) -> PyResult<Bound<'py, PyDict>> {
        let settings =
            EquilibriumSettings { tolerance, max_iterations, memory, threads: door::threads(threads), certified: true };
        let inputs = self.inputs(&u, preprocess)?;
        let factor = self.output_factor();
        let ran = enter(py, None, |inside| {
            let equilibrium = self.equilibrium(settings)?;
            let total = inputs.samples();
            let (mut y, mut z, mut x) = (Vec::new(), Vec::new(), Vec::new());
            let mut diagnostics = Vec::with_capacity(total);
            for first in (0..total).step_by(CHUNK) {
                inside.cancel.check()?;
                let u = inputs.rows(first..(first + CHUNK).min(total))?;
                if states {
                    let solution = equilibrium.run(&u)?;
                    z.extend(solution.z.into_vec());
                    x.extend(solution.x.into_vec());
                    y.extend(solution.y.into_vec());
                    diagnostics.extend(solution.diagnostics);
                } else {
                    let solution = equilibrium.outputs(&u)?;
                    y.extend(solution.y.into_vec());
                    diagnostics.extend(solution.diagnostics);
                }
            }
            if factor != 1.0 {
                // Outputs are returned in the units of the original network, as the command line returns them.
                y.iter_mut().for_each(|v| *v = (f64::from(*v) * factor) as f32);
            }
            let shape = self.model.shape();
            let rows = if states { total } else { 0 };
            Ok((
                Matrix::from_vec(total, shape.outputs, y)?,
                Matrix::from_vec(rows, if states { shape.states } else { 0 }, z)?,
                Matrix::from_vec(rows, if states { shape.states } else { 0 }, x)?,
                diagnostics,
            ))
        })?;
        let (y, z, x, diagnostics) = ran;
        let out = PyDict::new(py);
        out.set_item("y", to_numpy(py, y)?)?;
        if states {
            out.set_item("z", to_numpy(py, z)?)?;
            out.set_item("x", to_numpy(py, x)?)?;
        }
        add_diagnostics(&out, &diagnostics)?;
        Ok(out)
    }

    /// vᵀ dy/du at raw inputs, with respect to the preprocessed input.
    #[pyo3(signature = (u, v, *, preprocess=true, threads=None, tolerance=1e-6, max_iterations=2000))]
    #[allow(clippy::too_many_arguments)]
    fn input_gradient<'py>(
        &self,
        py: Python<'py>,
        u: Lent<'py>,
        v: Lent<'py>,
        preprocess: bool,
        threads: Option<usize>,
        tolerance: f64,
        max_iterations: usize,
    ) -> PyResult<Bound<'py, PyArray2<f32>>> {
        let threads = door::threads(threads);
        let settings = EquilibriumSettings { tolerance, max_iterations, threads, ..Default::default() };
        let inputs = self.inputs(&u, preprocess)?;
        let v = v.matrix("cotangents").map_err(|e| of_library(&e))?;
        let factor = self.output_factor();
        let gradient = enter(py, None, |inside| {
            let total = inputs.samples();
            if v.rows() != total {
                return Err(Error::shape("cotangents", format!("{total} samples"), v.rows()).into());
            }
            let gradient = InputGradient::new(&self.model, settings)?;
            let mut out = Vec::with_capacity(total * self.model.shape().inputs);
            for first in (0..total).step_by(CHUNK) {
                inside.cancel.check()?;
                let rows = first..(first + CHUNK).min(total);
                let part = Matrix::from_fn(rows.len(), v.cols(), |i, j| v.row(first + i)[j]);
                out.extend(gradient.run(&inputs.rows(rows)?, &part)?.1.gradient.into_vec());
            }
            if factor != 1.0 {
                // The gradient belongs to the outputs that `run` returns, so it has the same factor.
                out.iter_mut().for_each(|v| *v = (f64::from(*v) * factor) as f32);
            }
            Ok(Matrix::from_vec(total, self.model.shape().inputs, out)?)
        })?;
        to_numpy(py, gradient)
    }

    #[pyo3(signature = (path, *, tolerance=1e-7, max_iterations=10_000))]
    fn to_onnx(&self, path: PathBuf, tolerance: f64, max_iterations: usize) -> PyResult<()> {
        export_onnx(&self.model, path, OnnxSettings { tolerance, max_iterations }).map_err(|e| of_library(&e))
    }

    fn rescale(&self, kappa: f64) -> PyResult<(Self, bool)> {
        let rescaled = self.model.rescale(kappa).map_err(|e| of_library(&e))?;
        Ok((Self::of(rescaled.model), rescaled.exact))
    }
}

fn add_diagnostics(out: &Bound<'_, PyDict>, diagnostics: &[SampleDiagnostics]) -> PyResult<()> {
    let py = out.py();
    let numbers = |of: fn(&SampleDiagnostics) -> f64| PyArray1::from_iter(py, diagnostics.iter().map(of));
    out.set_item("iterations", PyArray1::from_iter(py, diagnostics.iter().map(|d| d.iterations as i64)))?;
    out.set_item("residual", numbers(|d| d.residual))?;
    out.set_item("state_error", numbers(|d| d.state_error))?;
    out.set_item("output_error", numbers(|d| d.output_error))?;
    out.set_item("converged", PyArray1::from_iter(py, diagnostics.iter().map(|d| d.converged)))
}
