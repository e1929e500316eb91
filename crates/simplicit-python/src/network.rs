//! Baselines for Python: from ONNX, or built node by node.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use numpy::{Element, PyArray2};
use pyo3::prelude::*;
use simplicit::arrays::Preprocessing;
use simplicit::layout::Activation;
use simplicit::linalg::{Matrix, Scalar};
use simplicit::model::ImplicitModel;
use simplicit::network::{self, BatchNorm, NetworkBuilder, NodeId, Shape, Window};
use simplicit::onnx::OnnxSelection;
use simplicit::parallel;
use simplicit::states::{InputSource, StateMap, StateShape};
use simplicit::{Error, Result};

use crate::arrays::{Lent, ViewInputs, to_numpy};
use crate::door::{self, enter};
use crate::errors::of_library;
use crate::model::Model;

/// Samples that a thread takes at a time.
const BLOCK: usize = 256;

/// A trained network.
#[pyclass(frozen, module = "simplicit._core")]
pub(crate) struct Network {
    pub(crate) network: Arc<network::Network>,
    /// Size in bytes of the file that it comes from.
    pub(crate) bytes: Option<u64>,
}

impl Network {
    /// The axes of a sample.
    fn axes(&self) -> Option<Vec<usize>> {
        self.network.input_shape().dims().sizes().get(1..).map(<[usize]>::to_vec)
    }
}

/// U, Z, X, Y of a batch.
type States<'py> = [Bound<'py, PyArray2<f64>>; 4];

/// Runs `work` on blocks of samples, in order, until all are done or Ctrl-C is pressed.
fn blocks<T: Send>(
    py: Python<'_>,
    inputs: &ViewInputs<'_>,
    threads: Option<usize>,
    work: impl Fn(&Matrix<f32>) -> Result<T> + Sync,
) -> PyResult<Vec<T>> {
    let total = inputs.samples();
    enter(py, None, |inside| {
        Ok(parallel::map(door::threads(threads), total.div_ceil(BLOCK), |block| {
            inside.cancel.check()?;
            work(&inputs.rows(block * BLOCK..((block + 1) * BLOCK).min(total))?)
        })?)
    })
}

/// Blocks of samples, stacked into one array.
fn stacked<T: Element + Scalar>(
    py: Python<'_>,
    rows: usize,
    cols: usize,
    blocks: impl Iterator<Item = Matrix<T>>,
) -> PyResult<Bound<'_, PyArray2<T>>> {
    let all = Matrix::from_vec(rows, cols, blocks.flat_map(Matrix::into_vec).collect());
    to_numpy(py, all.map_err(|e| of_library(&e))?)
}

#[pymethods]
impl Network {
    #[staticmethod]
    #[pyo3(signature = (path, input=None, output=None, input_shape=None, fill=None))]
    fn from_onnx(
        path: PathBuf,
        input: Option<String>,
        output: Option<String>,
        input_shape: Option<Vec<usize>>,
        fill: Option<Vec<(String, f32)>>,
    ) -> PyResult<Self> {
        let selection = OnnxSelection { input, output, input_shape, fill: fill.unwrap_or_default() };
        let network = network::Network::from_onnx_selected(&path, &selection).map_err(|e| of_library(&e))?;
        let bytes = std::fs::metadata(&path).map(|about| about.len()).ok();
        Ok(Self { network: Arc::new(network), bytes })
    }

    #[staticmethod]
    #[pyo3(signature = (bytes, input=None, output=None, input_shape=None, fill=None))]
    fn from_onnx_bytes(
        bytes: &[u8],
        input: Option<String>,
        output: Option<String>,
        input_shape: Option<Vec<usize>>,
        fill: Option<Vec<(String, f32)>>,
    ) -> PyResult<Self> {
        let selection = OnnxSelection { input, output, input_shape, fill: fill.unwrap_or_default() };
        let network = network::Network::from_onnx_bytes_selected(bytes, &selection).map_err(|e| of_library(&e))?;
        Ok(Self { network: Arc::new(network), bytes: Some(bytes.len() as u64) })
    }

    /// (inputs, states, outputs).
    #[getter]
    fn shape(&self) -> (usize, usize, usize) {
        let shape = self.network.shape();
        (shape.inputs, shape.states, shape.outputs)
    }

    #[getter]
    fn layout(&self) -> String {
        self.network.layout().to_json()
    }

    #[getter]
    fn nonzeros(&self) -> usize {
        self.network.nonzeros()
    }

    #[getter]
    fn multiply_adds(&self) -> u64 {
        self.network.multiply_adds()
    }

    /// Outputs of inputs that are already preprocessed.
    #[pyo3(signature = (u, *, threads=None))]
    fn forward<'py>(
        &self,
        py: Python<'py>,
        u: Lent<'py>,
        threads: Option<usize>,
    ) -> PyResult<Bound<'py, PyArray2<f32>>> {
        let inputs = u.inputs(&Preprocessing::identity(), self.axes().as_deref())?;
        let blocks = blocks(py, &inputs, threads, |u| self.network.forward(u))?;
        stacked(py, inputs.samples(), self.network.shape().outputs, blocks.into_iter())
    }

    /// U, Z, X, Y of inputs that are already preprocessed.
    fn states<'py>(&self, py: Python<'py>, u: Lent<'py>) -> PyResult<States<'py>> {
        let inputs = u.inputs(&Preprocessing::identity(), self.axes().as_deref())?;
        let blocks = blocks(py, &inputs, None, |u| self.network.states(u))?;
        let (m, StateShape { inputs: p, states: n, outputs: q }) = (inputs.samples(), self.network.shape());
        let (mut u, mut z, mut x, mut y) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for block in blocks {
            u.push(block.u);
            z.push(block.z);
            x.push(block.x);
            y.push(block.y);
        }
        let part = |cols, blocks: Vec<Matrix>| stacked(py, m, cols, blocks.into_iter());
        Ok([part(p, u)?, part(n, z)?, part(n, x)?, part(q, y)?])
    }

    /// The equivalent implicit model, counted against its own non-zeros or those of the network it was made from.
    #[pyo3(signature = (baseline_nonzeros=None))]
    fn implicit(&self, baseline_nonzeros: Option<u64>) -> PyResult<Model> {
        let model = ImplicitModel::from_network(&self.network).and_then(|model| match baseline_nonzeros {
            None => Ok(model),
            Some(_) => {
                let mut parts = model.into_parts();
                parts.metadata.baseline_nonzeros = baseline_nonzeros;
                ImplicitModel::new(parts)
            }
        });
        model.map(Model::of).map_err(|e| of_library(&e))
    }
}

/// Builds a network; every method returns the number of the node it made.
#[pyclass(frozen, module = "simplicit._core")]
pub(crate) struct Builder {
    state: Mutex<Option<(NetworkBuilder, Vec<NodeId>)>>,
}

impl Builder {
    /// Adds a node. After an error the builder cannot be used any more.
    fn step(
        &self,
        at: usize,
        work: impl FnOnce(NetworkBuilder, &[NodeId]) -> Result<NetworkBuilder>,
    ) -> PyResult<usize> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let (builder, mut nodes) = state.take().ok_or_else(spent)?;
        let node =
            *nodes.get(at).ok_or_else(|| of_library(&Error::shape("node", format!("below {}", nodes.len()), at)))?;
        let builder = builder.at(node).and_then(|b| work(b, &nodes)).map_err(|e| of_library(&e))?;
        nodes.push(builder.here());
        let made = nodes.len() - 1;
        *state = Some((builder, nodes));
        Ok(made)
    }
}

fn spent() -> PyErr {
    of_library(&Error::setting("builder", "one that has not failed or been built", "a spent one"))
}

fn window(kernel: [usize; 2], stride: [usize; 2], padding: [usize; 4]) -> Window {
    Window { kernel, stride, padding, dilation: [1; 2] }
}

#[pymethods]
impl Builder {
    /// A builder whose input is a vector (size,) or a map (channels, height, width).
    #[new]
    fn new(shape: Vec<usize>) -> PyResult<Self> {
        let shape = match shape[..] {
            [size] => Ok(Shape::Vector(size)),
            [channels, height, width] => Ok(Shape::map(channels, height, width)),
            _ => Err(of_library(&Error::shape(
                "input shape",
                "(size,) or (channels, height, width)",
                format!("{shape:?}"),
            ))),
        }?;
        let builder = network::Network::builder(shape).map_err(|e| of_library(&e))?;
        let nodes = vec![builder.here()];
        Ok(Self { state: Mutex::new(Some((builder, nodes))) })
    }

    #[pyo3(signature = (at, weights, bias=None))]
    fn linear(&self, at: usize, weights: Lent<'_>, bias: Option<Vec<f32>>) -> PyResult<usize> {
        let weights = weights.matrix("weights").map_err(|e| of_library(&e))?;
        self.step(at, |b, _| b.linear(weights, bias))
    }

    #[pyo3(signature = (at, weights, kernel, stride, padding, bias=None))]
    fn convolution(
        &self,
        at: usize,
        weights: Lent<'_>,
        kernel: [usize; 2],
        stride: [usize; 2],
        padding: [usize; 4],
        bias: Option<Vec<f32>>,
    ) -> PyResult<usize> {
        let weights = weights.matrix("weights").map_err(|e| of_library(&e))?;
        self.step(at, |b, _| b.convolution(weights, window(kernel, stride, padding), bias))
    }

    fn batch_norm(
        &self,
        at: usize,
        scale: Vec<f32>,
        shift: Vec<f32>,
        mean: Vec<f32>,
        variance: Vec<f32>,
        epsilon: f32,
    ) -> PyResult<usize> {
        self.step(at, |b, _| b.batch_norm(&BatchNorm { scale, shift, mean, variance, epsilon }))
    }

    fn activation(&self, at: usize, activation: String, name: &str) -> PyResult<usize> {
        self.step(at, |b, _| Ok(b.activation(Activation::try_from(activation)?)?.named(name)))
    }

    fn plus(&self, at: usize, other: usize) -> PyResult<usize> {
        self.step(at, |b, nodes| {
            let other =
                nodes.get(other).ok_or_else(|| Error::shape("node", format!("below {}", nodes.len()), other))?;
            b.plus(*other)
        })
    }

    fn average_pool(
        &self,
        at: usize,
        kernel: [usize; 2],
        stride: [usize; 2],
        padding: [usize; 4],
        count_padding: bool,
    ) -> PyResult<usize> {
        self.step(at, |b, _| b.average_pool(window(kernel, stride, padding), count_padding))
    }

    fn max_pool(&self, at: usize, kernel: [usize; 2], stride: [usize; 2], padding: [usize; 4]) -> PyResult<usize> {
        self.step(at, |b, _| b.max_pool(window(kernel, stride, padding)))
    }

    fn global_average(&self, at: usize) -> PyResult<usize> {
        self.step(at, |b, _| b.global_average())
    }

    fn flatten(&self, at: usize) -> PyResult<usize> {
        self.step(at, |b, _| b.flatten())
    }

    /// The network whose output is node `at`.
    fn build(&self, at: usize) -> PyResult<Network> {
        self.step(at, |b, _| Ok(b))?;
        let (builder, _) = self.state.lock().unwrap_or_else(PoisonError::into_inner).take().ok_or_else(spent)?;
        let network = builder.build().map_err(|e| of_library(&e))?;
        Ok(Network { network: Arc::new(network), bytes: None })
    }
}
