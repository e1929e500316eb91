//! One array: its shape and type are known, its rows are read on demand.

use std::ops::Range;
use std::path::{Path, PathBuf};

use super::bytes::Bytes;
use super::element::Element;
use super::file::ArrayFile;
use super::{image, npy};
use crate::linalg::{Matrix, Scalar};
use crate::{Error, Result};

/// An array in a file or in memory; its first axis is samples. Cheap to clone: clones share the file.
#[derive(Debug, Clone)]
pub struct Array {
    data: Bytes,
    element: Element,
    big_endian: bool,
    shape: Vec<usize>,
    /// Product of the trailing axes.
    features: usize,
    order: Order,
    kind: Kind,
}

/// Where row i begins.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Order {
    /// Rows of consecutive values, every `stride` bytes from byte `first` on.
    Rows { first: u64, stride: u64 },
    /// Fortran order: first axis fastest.
    Columns,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    /// An array of numbers.
    Plain,
    /// An image file of bytes.
    Idx,
    /// Records that each consist of this many label bytes and an image.
    Cifar { labels: u64 },
}

impl Array {
    /// Opens a file: `file.npy`, `file.npz:key`, `file.safetensors:key`, IDX or CIFAR, each also as `.gz`. Without a
    /// key an `.npz` or `.safetensors` must hold exactly one array.
    pub fn open(file: impl AsRef<Path>) -> Result<Self> {
        let (path, key) = split_key(file.as_ref());
        let file = ArrayFile::open(&path)?;
        match key {
            Some(key) => file.array(&key),
            None => file.only_array(),
        }
    }

    /// The samples as rows of a matrix; copied. Errors refer to the array as `name`.
    pub fn from_matrix<T: Scalar>(name: &str, matrix: &Matrix<T>) -> Self {
        // Every value of either type is exact in f64; the bytes of the type itself are kept.
        let wide = size_of::<T>() == 8;
        let mut bytes = Vec::with_capacity(size_of_val(matrix.as_slice()));
        for value in matrix.as_slice() {
            if wide {
                bytes.extend_from_slice(&value.to_f64().to_le_bytes());
            } else {
                bytes.extend_from_slice(&(value.to_f64() as f32).to_le_bytes());
            }
        }
        Self {
            data: Bytes::memory(Path::new(name), bytes),
            element: if wide { Element::F64 } else { Element::F32 },
            big_endian: false,
            shape: vec![matrix.rows(), matrix.cols()],
            features: matrix.cols(),
            order: Order::Rows { first: 0, stride: (matrix.cols() * size_of::<T>()) as u64 },
            kind: Kind::Plain,
        }
    }

    /// Little-endian, row-major numbers in memory. Errors refer to the array as `name`.
    pub fn from_le_bytes(name: &str, element: Element, shape: &[usize], bytes: Vec<u8>) -> Result<Self> {
        Self::packed(Bytes::memory(Path::new(name), bytes), element, shape.to_vec(), Kind::Plain)
    }

    /// Consecutive row-major values that fill `data`, little-endian.
    fn packed(data: Bytes, element: Element, shape: Vec<usize>, kind: Kind) -> Result<Self> {
        if shape.is_empty() {
            return Err(Error::file(
                data.path(),
                "expected an array with samples as its first axis, got a single number",
            ));
        }
        let features = shape[1..].iter().try_fold(1usize, |size, axis| size.checked_mul(*axis));
        let stride = features.and_then(|f| f.checked_mul(element.size()));
        let len = stride.and_then(|s| s.checked_mul(shape[0]));
        let (Some(features), Some(stride), Some(len)) = (features, stride, len) else {
            return Err(Error::file(data.path(), format!("the shape {} is too large", Shape(&shape))));
        };
        data.require_len(len as u64)?;
        let order = Order::Rows { first: 0, stride: stride as u64 };
        Ok(Self { data, element, big_endian: false, shape, features, order, kind })
    }

    pub(super) fn plain(data: Bytes, element: Element, shape: Vec<usize>) -> Result<Self> {
        Self::packed(data, element, shape, Kind::Plain)
    }

    pub(super) fn from_npy(bytes: &Bytes) -> Result<Self> {
        let (header, data) = npy::parse(bytes)?;
        let mut array = Self::packed(data, header.element, header.shape, Kind::Plain)?;
        array.big_endian = header.big_endian;
        if header.fortran_order && array.shape.len() > 1 {
            array.order = Order::Columns;
        }
        Ok(array)
    }

    pub(super) fn from_idx(bytes: &Bytes, element: Element, shape: Vec<usize>, header: u64) -> Result<Self> {
        // The whole file is checked, so that the sizes in an error are those that `ls` shows.
        let size = shape.iter().try_fold(element.size() as u64, |size, axis| size.checked_mul(*axis as u64));
        bytes.require_len(size.and_then(|s| s.checked_add(header)).unwrap_or(u64::MAX))?;
        let mut array = Self::packed(bytes.slice(header, bytes.len() - header)?, element, shape, Kind::Idx)?;
        array.big_endian = true;
        Ok(array)
    }

    pub(super) fn from_cifar(bytes: &Bytes) -> Result<Self> {
        let labels = image::cifar_labels(bytes.path(), bytes.len())?;
        let stride = image::cifar_record(labels);
        let samples = usize::try_from(bytes.len() / stride).unwrap_or(usize::MAX);
        Ok(Self {
            data: bytes.clone(),
            element: Element::U8,
            big_endian: false,
            shape: vec![samples, 3, 32, 32],
            features: 3072,
            order: Order::Rows { first: labels, stride },
            kind: Kind::Cifar { labels },
        })
    }

    /// The labels inside a CIFAR file (the fine ones in CIFAR-100); `None` for every other array.
    pub fn own_labels(&self) -> Option<Self> {
        let Kind::Cifar { labels } = self.kind else { return None };
        let order = Order::Rows { first: labels - 1, stride: image::cifar_record(labels) };
        Some(Self { shape: vec![self.shape[0]], features: 1, order, kind: Kind::Plain, ..self.clone() })
    }

    /// Whether this is an IDX or CIFAR file, whose bytes are scaled by 1/255 by default.
    pub fn is_image_file(&self) -> bool {
        self.kind != Kind::Plain
    }

    /// The file, with its key if it has one; a name for arrays in memory.
    pub fn path(&self) -> &Path {
        self.data.path()
    }

    /// All axes, samples first.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The type of its numbers.
    pub fn element(&self) -> Element {
        self.element
    }

    /// Length of the first axis.
    pub fn samples(&self) -> usize {
        self.shape[0]
    }

    /// Values per sample: the product of the trailing axes.
    pub fn features(&self) -> usize {
        self.features
    }

    /// Some consecutive samples, one a row, trailing axes flattened in row-major order.
    pub fn rows<T: Scalar>(&self, samples: Range<usize>) -> Result<Matrix<T>> {
        self.require_range(&samples)?;
        let mut out = Matrix::zeros(samples.len(), self.features);
        self.read_rows(samples, &mut Vec::new(), out.as_mut_slice())?;
        Ok(out)
    }

    /// The same into `out`, which must have the right length; `raw` is a buffer that is used again.
    pub(super) fn read_rows<T: Scalar>(&self, samples: Range<usize>, raw: &mut Vec<u8>, out: &mut [T]) -> Result<()> {
        self.require_range(&samples)?;
        if out.is_empty() {
            return Ok(());
        }
        match self.order {
            Order::Rows { first, stride } => {
                self.read_records(first, stride, samples, raw)?;
                for (row, out) in raw.chunks(stride as usize).zip(out.chunks_exact_mut(self.features)) {
                    self.element.decode(row, out);
                }
            }
            Order::Columns => {
                let size = self.element.size();
                for j in 0..self.features {
                    let at = (self.column_of(j) * self.samples() + samples.start) * size;
                    self.read_little_endian(at as u64, (samples.len() * size) as u64, raw)?;
                    for (value, row) in raw.chunks_exact(size).zip(out.chunks_exact_mut(self.features)) {
                        self.element.decode(value, &mut row[j..=j]);
                    }
                }
            }
        }
        Ok(())
    }

    /// Some rows (at least one), from the first value of the first to the last value of the last.
    fn read_records(&self, first: u64, stride: u64, samples: Range<usize>, raw: &mut Vec<u8>) -> Result<()> {
        let row = (self.features * self.element.size()) as u64;
        let len = (samples.len() as u64 - 1) * stride + row;
        // The swap also reverses bytes between rows, which is harmless: only records of single bytes have bytes
        // between rows.
        self.read_little_endian(first + samples.start as u64 * stride, len, raw)
    }

    fn read_little_endian(&self, at: u64, len: u64, raw: &mut Vec<u8>) -> Result<()> {
        self.data.read_into(at, len, raw)?;
        if self.big_endian {
            self.element.swap_bytes(raw);
        }
        Ok(())
    }

    /// Labels: the first value of every sample, which must be a small integer.
    pub(super) fn small_integers(&self) -> Result<Vec<u32>> {
        let size = self.element.size();
        let mut labels = Vec::new();
        if self.samples() > 0 && self.features > 0 {
            let (first, stride) = match self.order {
                Order::Rows { first, stride } => (first, stride),
                Order::Columns => (0, size as u64),
            };
            let mut raw = Vec::new();
            self.read_records(first, stride, 0..self.samples(), &mut raw)?;
            labels = raw.chunks(stride as usize).flat_map(|row| &row[..size]).copied().collect();
        }
        self.element.decode_small_integers(&labels).map_err(|(row, value)| {
            Error::file(self.path(), format!("expected class numbers (0, 1, 2, …), got {value} at row {row}"))
        })
    }

    /// Position among the columns of a Fortran-ordered array of the j-th value of a row-major sample.
    fn column_of(&self, mut j: usize) -> usize {
        // Takes the axes from the last to the first (in row-major order the last is fastest) and weighs them with the
        // first axis fastest.
        let mut weight = self.features;
        let mut column = 0;
        for axis in self.shape[1..].iter().rev() {
            weight /= axis;
            column += (j % axis) * weight;
            j /= axis;
        }
        column
    }

    fn require_range(&self, samples: &Range<usize>) -> Result<()> {
        if samples.start > samples.end || samples.end > self.samples() {
            return Err(Error::shape(
                format!("rows of {}", self.path().display()),
                format!("a range within 0..{}", self.samples()),
                format!("{samples:?}"),
            ));
        }
        Ok(())
    }
}

/// A shape as text, such as `784 × 10`.
pub(super) struct Shape<'a>(pub(super) &'a [usize]);

impl std::fmt::Display for Shape<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (i, axis) in self.0.iter().enumerate() {
            write!(f, "{}{axis}", if i > 0 { " × " } else { "" })?;
        }
        Ok(())
    }
}

/// `file.npz:key` is a file and a key, unless a file of that whole name exists.
pub(super) fn split_key(file: &Path) -> (PathBuf, Option<String>) {
    let whole = (file.to_path_buf(), None);
    let Some(text) = file.to_str().filter(|_| !file.exists()) else { return whole };
    match text.rsplit_once(':') {
        Some((path, key)) if ArrayFile::name_may_have_keys(Path::new(path)) => (path.into(), Some(key.into())),
        _ => whole,
    }
}
