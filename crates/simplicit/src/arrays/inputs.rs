//! Inputs of a network: an array with its preprocessing, and which of its samples are used.

use std::ops::Range;

use super::InputSource;
use super::array::{Array, Shape};
use super::preprocessing::{PerFeature, Preprocessing};
use super::selection::Selection;
use crate::linalg::Matrix;
use crate::{Error, Result};

/// Samples as a network expects them, read in blocks from a file or from memory.
#[derive(Debug, Clone)]
pub struct Inputs {
    array: Array,
    preprocessing: Preprocessing,
    per_feature: PerFeature,
    /// Rows of the array in the order used; all in order if `None`.
    indices: Option<Vec<usize>>,
}

impl Inputs {
    /// `preprocessing` defaults to u = raw / 255 for IDX and CIFAR files and u = raw for other arrays.
    pub fn new(array: Array, preprocessing: Option<Preprocessing>, selection: &Selection) -> Result<Self> {
        let default = || if array.is_image_file() { Preprocessing::bytes() } else { Preprocessing::identity() };
        let preprocessing = preprocessing.unwrap_or_else(default);
        if array.samples() == 0 || array.features() == 0 {
            return Err(Error::shape(
                format!("inputs {}", array.path().display()),
                "at least one sample of at least one value",
                Shape(array.shape()),
            ));
        }
        let per_feature = preprocessing.per_feature(&array.shape()[1..])?;
        let indices = selection.indices(array.samples())?;
        Ok(Self { array, preprocessing, per_feature, indices })
    }

    /// The preprocessing in use.
    pub fn preprocessing(&self) -> &Preprocessing {
        &self.preprocessing
    }

    /// The same, spread over the values of a sample.
    pub fn per_feature(&self) -> &PerFeature {
        &self.per_feature
    }

    /// Axes of one sample, such as 3 × 32 × 32.
    pub fn sample_shape(&self) -> &[usize] {
        &self.array.shape()[1..]
    }

    /// Reads consecutive rows of the array into `out`, one row for each; `raw` and `values` are buffers.
    fn read(&self, rows: Range<usize>, raw: &mut Vec<u8>, values: &mut [f64], out: &mut [f32]) -> Result<()> {
        let features = self.array.features();
        self.array.read_rows(rows.clone(), raw, values)?;
        for ((row, values), u) in rows.zip(values.chunks_exact(features)).zip(out.chunks_exact_mut(features)) {
            self.per_feature.apply(values, u);
            let finite = u.iter().fold(true, |finite, v| finite & v.is_finite());
            if !finite && let Some(column) = u.iter().position(|v| !v.is_finite()) {
                return Err(Error::NotFinite {
                    array: format!("inputs {}", self.array.path().display()),
                    row,
                    column,
                    value: f64::from(u[column]),
                });
            }
        }
        Ok(())
    }
}

impl InputSource for Inputs {
    fn samples(&self) -> usize {
        self.indices.as_ref().map_or(self.array.samples(), Vec::len)
    }

    fn features(&self) -> usize {
        self.array.features()
    }

    fn rows(&self, samples: Range<usize>) -> Result<Matrix<f32>> {
        if samples.start > samples.end || samples.end > self.samples() {
            let expected = format!("a range within 0..{}", self.samples());
            return Err(Error::shape("rows of the inputs", expected, format!("{samples:?}")));
        }
        let features = self.array.features();
        let mut out = Matrix::zeros(samples.len(), features);
        let mut raw = Vec::new();
        match &self.indices {
            None => {
                let mut values = vec![0.0; samples.len() * features];
                self.read(samples, &mut raw, &mut values, out.as_mut_slice())?;
            }
            Some(indices) => {
                let mut values = vec![0.0; features];
                for (i, &row) in indices[samples].iter().enumerate() {
                    self.read(row..row + 1, &mut raw, &mut values, out.row_mut(i))?;
                }
            }
        }
        Ok(out)
    }
}
