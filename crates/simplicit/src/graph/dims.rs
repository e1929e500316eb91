//! The dimensions of one sample's value.

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// The most axes of a value.
const MAX_RANK: usize = 8;

/// Up to eight axes, as ONNX has them for a batch of one sample; values are stored row by row, the last axis first.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "Vec<usize>", into = "Vec<usize>")]
pub struct Dims {
    sizes: [usize; MAX_RANK],
    rank: usize,
}

impl Dims {
    /// Dimensions of these sizes; an error beyond eight axes, or where the number of values overflows.
    pub fn new(sizes: &[usize]) -> Result<Self> {
        if sizes.len() > MAX_RANK {
            return Err(Error::shape("dimensions", format!("at most {MAX_RANK} axes"), format!("{sizes:?}")));
        }
        // Zeros are left out of the product, so that strides cannot overflow either.
        if sizes.iter().try_fold(1usize, |p, &s| p.checked_mul(s.max(1))).is_none() {
            return Err(Error::shape("dimensions", "a size that fits into memory", format!("{sizes:?}")));
        }
        Ok(Self::filled(sizes))
    }

    /// 1 × n.
    pub fn vector(size: usize) -> Self {
        Self::filled(&[1, size])
    }

    /// 1 × channels × height × width.
    pub fn map(channels: usize, height: usize, width: usize) -> Self {
        Self::filled(&[1, channels, height, width])
    }

    fn filled(sizes: &[usize]) -> Self {
        let mut all = [1; MAX_RANK];
        all[..sizes.len()].copy_from_slice(sizes);
        Self { sizes: all, rank: sizes.len() }
    }

    /// The sizes of all axes.
    pub fn sizes(&self) -> &[usize] {
        &self.sizes[..self.rank]
    }

    /// Number of axes.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Number of values.
    pub fn size(&self) -> usize {
        self.sizes().iter().product()
    }

    /// The distance between neighbours along every axis.
    pub fn strides(&self) -> [usize; MAX_RANK] {
        let mut strides = [1; MAX_RANK];
        for axis in (0..self.rank.saturating_sub(1)).rev() {
            strides[axis] = strides[axis + 1] * self.sizes[axis + 1];
        }
        strides
    }
}

impl std::fmt::Debug for Dims {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", self.sizes())
    }
}

impl std::fmt::Display for Dims {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let sizes: Vec<String> = self.sizes().iter().map(ToString::to_string).collect();
        f.write_str(&sizes.join(" × "))
    }
}

impl TryFrom<Vec<usize>> for Dims {
    type Error = Error;
    fn try_from(sizes: Vec<usize>) -> Result<Self> {
        Self::new(&sizes)
    }
}

impl From<Dims> for Vec<usize> {
    fn from(dims: Dims) -> Self {
        dims.sizes().to_vec()
    }
}
