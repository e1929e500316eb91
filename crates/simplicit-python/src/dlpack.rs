//! Tensors of PyTorch and others as they lie in memory, by the DLPack protocol. Tensors in host memory become arrays;
//! tensors on a GPU become rows that the library's CUDA backend reads there.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_void};

use numpy::PyArray2;
use numpy::ndarray::{ArrayViewD, IxDyn, ShapeBuilder};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use simplicit::Error;
use simplicit::backend::cuda::LentRows;

use crate::arrays::{Numbers, to_numpy};
use crate::errors::of_library;

/// The numbers that the protocol gives to devices and types.
const CPU: i32 = 1;
const CUDA: i32 = 2;
const UNSIGNED: u8 = 1;
const FLOAT: u8 = 2;
/// The name of a capsule that has not been consumed.
const UNTAKEN: &CStr = c"dltensor";
/// The default stream, in CUDA's numbering of the protocol: the producer's pending writes are ordered before it.
const DEFAULT_STREAM: i32 = 1;

/// The protocol's `DLTensor`.
#[repr(C)]
struct Described {
    data: *mut c_void,
    device: [i32; 2],
    axes: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

/// A tensor, for as long as its capsule is held: the capsule is not consumed, so it frees the tensor itself.
pub(crate) struct Tensor<'py> {
    _capsule: Bound<'py, PyAny>,
    at: usize,
    device: [i32; 2],
    code: u8,
    bits: u8,
    shape: Vec<usize>,
    /// The strides, in elements.
    strides: Vec<usize>,
}

/// The kind and number of the device that an object's tensor is on; `None` for an object that is not a tensor.
fn device_of(object: &Bound<'_, PyAny>) -> Option<(i32, i32)> {
    object.call_method0("__dlpack_device__").ok()?.extract().ok()
}

/// Whether an object is a tensor on an NVIDIA GPU. It does not ask for a capsule, because a read-only array of NumPy
/// cannot give one.
pub(crate) fn on_gpu(object: &Bound<'_, PyAny>) -> bool {
    device_of(object).is_some_and(|(kind, _)| kind == CUDA)
}

impl<'py> Tensor<'py> {
    /// The tensor of an object; `None` for an object without the protocol.
    pub(crate) fn of(object: &Bound<'py, PyAny>) -> PyResult<Option<Self>> {
        let Some((kind, number)) = device_of(object) else { return Ok(None) };
        let refused = |expected: &str, got: String| Err(of_library(&Error::shape("tensor", expected, got)));
        if kind != CPU && kind != CUDA {
            return refused("one in host memory or on an NVIDIA GPU", format!("device type {kind} of DLPack"));
        }
        let how = PyDict::new(object.py());
        if kind == CUDA {
            how.set_item("stream", DEFAULT_STREAM)?;
        }
        let capsule = object.call_method("__dlpack__", (), Some(&how))?;
        // SAFETY: the interpreter is held; a capsule of another name, or no capsule, gives null and raises.
        let at = unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), UNTAKEN.as_ptr()) };
        if at.is_null() {
            return Err(PyErr::fetch(object.py()));
        }
        // SAFETY: the protocol puts a `DLTensor` first behind this name, alive as long as the capsule is.
        let described = unsafe { &*at.cast::<Described>() };
        let axes = usize::try_from(described.axes).unwrap_or(0);
        // SAFETY: the protocol gives one number per axis; null strides mean row-major.
        let (shape, strides) = unsafe {
            let list =
                |from: *const i64| (0..axes).map(|k| usize::try_from(*from.add(k)).ok()).collect::<Option<Vec<_>>>();
            (
                list(described.shape),
                if described.strides.is_null() { Some(Vec::new()) } else { list(described.strides) },
            )
        };
        let (Some(shape), Some(mut strides)) = (shape, strides) else {
            return refused("sizes and strides that are not negative", "negative ones".into());
        };
        if strides.is_empty() {
            strides = row_major(&shape);
        }
        if described.device != [kind, number] || described.lanes != 1 {
            let got = format!("device {:?} and {} lanes", described.device, described.lanes);
            return refused("a capsule as its object describes it", got);
        }
        let at = described.data as usize + described.byte_offset as usize;
        Ok(Some(Self {
            at,
            device: described.device,
            code: described.code,
            bits: described.bits,
            _capsule: capsule,
            shape,
            strides,
        }))
    }

    fn is_on_gpu(&self) -> bool {
        self.device[0] == CUDA
    }

    pub(crate) fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The name of the type, such as `float32`.
    fn element(&self) -> String {
        let kind = match self.code {
            0 => "int",
            UNSIGNED => "uint",
            FLOAT => "float",
            4 => "bfloat",
            _ => "type of DLPack number ",
        };
        format!("{kind}{}", self.bits)
    }

    /// A tensor in host memory, of a type that the library reads.
    pub(crate) fn in_host_memory(self) -> PyResult<HostTensor<'py>> {
        if self.is_on_gpu() {
            let got = format!("one on cuda:{}", self.device[1]);
            return Err(of_library(&Error::shape("tensor", "one in host memory; copy it there with .cpu()", got)));
        }
        let kind = match (self.code, self.bits) {
            (FLOAT, 32) => Kind::F32,
            (FLOAT, 64) => Kind::F64,
            (UNSIGNED, 8) => Kind::U8,
            _ => return Err(of_library(&Error::shape("tensor", "float32, float64 or uint8 numbers", self.element()))),
        };
        Ok(HostTensor { tensor: self, kind })
    }

    /// Samples on a GPU, trailing axes flattened.
    pub(crate) fn rows(&self) -> PyResult<LentRows> {
        let refused = |expected: &str, got: String| Err(of_library(&Error::shape("tensor on a GPU", expected, got)));
        if (self.code, self.bits) != (FLOAT, 32) {
            return refused("float32 numbers; convert it with .float()", self.element());
        }
        // The stride of an axis with one element is not used.
        let plain = self.shape.iter().zip(&self.strides).zip(row_major(&self.shape));
        if plain.into_iter().any(|((size, stride), expected)| *size > 1 && *stride != expected) {
            return refused("contiguous numbers; call .contiguous()", format!("strides {:?}", self.strides));
        }
        let number = usize::try_from(self.device[1]).unwrap_or(usize::MAX);
        let rows = self.shape.first().copied().unwrap_or(0);
        let cols = self.shape.iter().skip(1).product();
        // SAFETY: the capsule keeps the memory, the producer has ordered its writes before the default stream, and whoever
        // lends a tensor to a call does not change it meanwhile.
        unsafe { LentRows::new(number, self.at as u64, rows, cols) }.map_err(|e| of_library(&e))
    }
}

/// The types that the library reads.
enum Kind {
    F32,
    F64,
    U8,
}

/// A tensor in host memory.
pub(crate) struct HostTensor<'py> {
    tensor: Tensor<'py>,
    kind: Kind,
}

impl HostTensor<'_> {
    pub(crate) fn numbers(&self) -> Numbers<'_> {
        let Tensor { at, shape, strides, .. } = &self.tensor;
        let layout = IxDyn(shape).strides(IxDyn(strides));
        // SAFETY: the capsule keeps the numbers; shape, strides and type are the tensor's own, and whoever lends a tensor to
        // a call does not change it meanwhile.
        unsafe {
            match self.kind {
                Kind::F32 => Numbers::F32(ArrayViewD::from_shape_ptr(layout, *at as *const f32)),
                Kind::F64 => Numbers::F64(ArrayViewD::from_shape_ptr(layout, *at as *const f64)),
                Kind::U8 => Numbers::U8(ArrayViewD::from_shape_ptr(layout, *at as *const u8)),
            }
        }
    }
}

fn row_major(shape: &[usize]) -> Vec<usize> {
    let mut strides = vec![1; shape.len()];
    for k in (1..shape.len()).rev() {
        strides[k - 1] = strides[k] * shape[k].max(1);
    }
    strides
}

/// Reads some rows of a tensor on a GPU, trailing axes flattened, for work that runs on the CPU.
#[pyfunction]
pub(crate) fn read_tensor<'py>(
    py: Python<'py>,
    tensor: &Bound<'py, PyAny>,
    first: usize,
    end: usize,
) -> PyResult<Bound<'py, PyArray2<f32>>> {
    let Some(tensor) = Tensor::of(tensor)?.filter(Tensor::is_on_gpu) else {
        return Err(of_library(&Error::shape("tensor", "one on an NVIDIA GPU", tensor.get_type())));
    };
    let rows = tensor.rows()?;
    let out = py.detach(|| rows.read(first..end)).map_err(|e| of_library(&e))?;
    to_numpy(py, out)
}
