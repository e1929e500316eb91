//! NumPy arrays as the library reads them: any stride, float32, float64 or uint8, block by block, never copied whole.

use std::ops::Range;

use numpy::ndarray::{Array2, ArrayViewD, Axis};
use numpy::{IntoPyArray, PyArray2, PyReadonlyArrayDyn};
use pyo3::prelude::*;
use simplicit::arrays::{PerFeature, Preprocessing, require_order};
use simplicit::layout::Layout;
use simplicit::linalg::Matrix;
use simplicit::states::{InputSource, StateBlock, StateShape, StateSource, require_activation};
use simplicit::{Error, Result};

use crate::dlpack::{HostTensor, Tensor};
use crate::errors;

/// An array that Python lends to a call: it is valid until the call returns.
pub(crate) enum Lent<'py> {
    F32(PyReadonlyArrayDyn<'py, f32>),
    F64(PyReadonlyArrayDyn<'py, f64>),
    U8(PyReadonlyArrayDyn<'py, u8>),
    /// A tensor in host memory.
    Tensor(HostTensor<'py>),
}

impl<'a, 'py> FromPyObject<'a, 'py> for Lent<'py> {
    type Error = PyErr;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        if let Ok(array) = object.extract() {
            return Ok(Lent::F32(array));
        }
        if let Ok(array) = object.extract() {
            return Ok(Lent::F64(array));
        }
        if let Ok(array) = object.extract() {
            return Ok(Lent::U8(array));
        }
        match Tensor::of(&object)? {
            Some(tensor) => tensor.in_host_memory().map(Lent::Tensor),
            None => {
                let got = object.get_type().name().map_or_else(|_| String::new(), |n| n.to_string());
                Err(errors::of_library(&Error::shape(
                    "array",
                    "a float32, float64 or uint8 array of NumPy or DLPack",
                    got,
                )))
            }
        }
    }
}

impl Lent<'_> {
    /// The numbers in a form that may be sent to other threads.
    pub(crate) fn numbers(&self) -> Numbers<'_> {
        match self {
            Lent::Tensor(tensor) => tensor.numbers(),
            Lent::F32(array) => Numbers::F32(array.as_array()),
            Lent::F64(array) => Numbers::F64(array.as_array()),
            Lent::U8(array) => Numbers::U8(array.as_array()),
        }
    }

    /// The array as raw inputs, its axes in the order that is expected, where that is known.
    pub(crate) fn inputs(&self, preprocessing: &Preprocessing, axes: Option<&[usize]>) -> PyResult<ViewInputs<'_>> {
        ViewInputs::new(self.numbers(), preprocessing, None, axes).map_err(|e| errors::of_library(&e))
    }

    /// The whole array as float32, for what a network or model takes at once.
    pub(crate) fn matrix(&self, name: &str) -> Result<Matrix<f32>> {
        let numbers = self.numbers();
        numbers.require(name)?;
        let mut out = Matrix::zeros(numbers.samples(), numbers.features());
        let mut row = vec![0.0; numbers.features()];
        for i in 0..numbers.samples() {
            numbers.read(i, &mut row);
            out.row_mut(i).iter_mut().zip(&row).for_each(|(o, v)| *o = *v as f32);
        }
        Ok(out)
    }
}

/// A view of an array; its first axis is samples.
pub(crate) enum Numbers<'a> {
    F32(ArrayViewD<'a, f32>),
    F64(ArrayViewD<'a, f64>),
    U8(ArrayViewD<'a, u8>),
}

impl Numbers<'_> {
    fn shape(&self) -> &[usize] {
        match self {
            Numbers::F32(view) => view.shape(),
            Numbers::F64(view) => view.shape(),
            Numbers::U8(view) => view.shape(),
        }
    }

    fn require(&self, name: &str) -> Result<()> {
        if self.shape().is_empty() || self.samples() == 0 || self.features() == 0 {
            let got = format!("{:?}", self.shape());
            return Err(Error::shape(name, "at least one sample of at least one value, samples first", got));
        }
        Ok(())
    }

    pub(crate) fn samples(&self) -> usize {
        self.shape().first().copied().unwrap_or(0)
    }

    pub(crate) fn features(&self) -> usize {
        self.shape().iter().skip(1).product()
    }

    /// Sample i, trailing axes flattened in row-major order.
    fn read(&self, i: usize, out: &mut [f64]) {
        fn fill<T: Copy + Into<f64>>(view: &ArrayViewD<'_, T>, i: usize, out: &mut [f64]) {
            out.iter_mut().zip(view.index_axis(Axis(0), i)).for_each(|(o, v)| *o = (*v).into());
        }
        match self {
            Numbers::F32(view) => fill(view, i, out),
            Numbers::F64(view) => fill(view, i, out),
            Numbers::U8(view) => fill(view, i, out),
        }
    }

    /// Some samples, in double precision.
    pub(crate) fn block(&self, samples: Range<usize>) -> Matrix {
        let mut out = Matrix::zeros(samples.len(), self.features());
        for (k, i) in samples.enumerate() {
            self.read(i, out.row_mut(k));
        }
        out
    }

    /// Distance from 1 to the next number of the type.
    fn epsilon(&self) -> f64 {
        match self {
            Numbers::F32(_) => f64::from(f32::EPSILON),
            Numbers::F64(_) | Numbers::U8(_) => f64::EPSILON,
        }
    }
}

/// Raw inputs, preprocessed as they are read.
pub(crate) struct ViewInputs<'a> {
    numbers: Numbers<'a>,
    per_feature: PerFeature,
    indices: Option<Vec<usize>>,
}

impl<'a> ViewInputs<'a> {
    pub(crate) fn new(
        numbers: Numbers<'a>,
        preprocessing: &Preprocessing,
        indices: Option<Vec<usize>>,
        axes: Option<&[usize]>,
    ) -> Result<Self> {
        numbers.require("U")?;
        if let Some(axes) = axes {
            require_order("U", &numbers.shape()[1..], axes)?;
        }
        let per_feature = preprocessing.per_feature(&numbers.shape()[1..])?;
        Ok(Self { numbers, per_feature, indices })
    }
}

impl ViewInputs<'_> {
    /// The preprocessing, spread over the values of a sample.
    pub(crate) fn per_feature(&self) -> &PerFeature {
        &self.per_feature
    }

    /// Axes of one sample.
    pub(crate) fn sample_shape(&self) -> &[usize] {
        &self.numbers.shape()[1..]
    }
}

impl InputSource for ViewInputs<'_> {
    fn samples(&self) -> usize {
        self.indices.as_ref().map_or(self.numbers.samples(), Vec::len)
    }

    fn features(&self) -> usize {
        self.numbers.features()
    }

    fn rows(&self, samples: Range<usize>) -> Result<Matrix<f32>> {
        let mut out = Matrix::zeros(samples.len(), self.features());
        let mut raw = vec![0.0; self.features()];
        for (k, sample) in samples.enumerate() {
            let row = self.indices.as_ref().map_or(sample, |indices| indices[sample]);
            self.numbers.read(row, &mut raw);
            self.per_feature.apply(&raw, out.row_mut(k));
            if let Some(column) = out.row(k).iter().position(|v| !v.is_finite()) {
                return Err(Error::NotFinite { array: "U".into(), row, column, value: raw[column] });
            }
        }
        Ok(out)
    }
}

/// States that are given as four arrays.
pub(crate) struct ViewStates<'a> {
    u: Numbers<'a>,
    z: Numbers<'a>,
    x: Numbers<'a>,
    y: Numbers<'a>,
    layout: Layout,
    known: bool,
    nonzeros: Option<u64>,
}

impl<'a> ViewStates<'a> {
    /// Checks the shapes, and X = φ(Z) on the first samples.
    pub(crate) fn new(
        [u, z, x, y]: [Numbers<'a>; 4],
        layout: Layout,
        known: bool,
        nonzeros: Option<u64>,
    ) -> Result<Self> {
        let (samples, states) = (u.samples(), layout.size());
        for (name, array, columns) in
            [("U", &u, u.features()), ("Z", &z, states), ("X", &x, states), ("Y", &y, y.features())]
        {
            array.require(name)?;
            if (array.samples(), array.features()) != (samples, columns) {
                let got = format!("{} × {}", array.samples(), array.features());
                return Err(Error::shape(name, format!("{samples} × {columns}"), got));
            }
        }
        let epsilon = z.epsilon().max(x.epsilon());
        let all = Self { u, z, x, y, layout, known, nonzeros };
        require_activation(&all, epsilon)?;
        Ok(all)
    }
}

impl StateSource for ViewStates<'_> {
    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn shape(&self) -> StateShape {
        StateShape { inputs: self.u.features(), states: self.z.features(), outputs: self.y.features() }
    }

    fn samples(&self) -> usize {
        self.u.samples()
    }

    fn block(&self, samples: Range<usize>) -> Result<StateBlock> {
        let block = StateBlock {
            u: self.u.block(samples.clone()),
            z: self.z.block(samples.clone()),
            x: self.x.block(samples.clone()),
            y: self.y.block(samples.clone()),
        };
        block.require_finite(samples.start)?;
        Ok(block)
    }

    fn layers_are_known(&self) -> bool {
        self.known
    }

    fn baseline_nonzeros(&self) -> Option<u64> {
        self.nonzeros
    }
}

/// Gives a matrix to NumPy, which owns it from now on.
pub(crate) fn to_numpy<T: numpy::Element + simplicit::linalg::Scalar>(
    py: Python<'_>,
    matrix: Matrix<T>,
) -> PyResult<Bound<'_, PyArray2<T>>> {
    let shape = (matrix.rows(), matrix.cols());
    let array = Array2::from_shape_vec(shape, matrix.into_vec());
    array.map(|a| a.into_pyarray(py)).map_err(|e| errors::of_any(&e.into()))
}
