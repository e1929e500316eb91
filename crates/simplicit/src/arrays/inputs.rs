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

    /// An error if these are the axes that a network expects, in another order: see [`require_order`].
    pub fn require_order(&self, expected: &[usize]) -> Result<()> {
        require_order(&format!("inputs {}", self.array.path().display()), self.sample_shape(), expected)
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

/// An error if the axes of a sample are those that a network expects in another order, such as 32 × 32 × 3 for 3 × 32 × 32:
/// the number of values would fit and every value would be another one. Axes of one value make no difference, and samples
/// with fewer or more axes, flat ones say, are taken in the order in which they lie.
pub fn require_order(name: &str, axes: &[usize], expected: &[usize]) -> Result<()> {
    let long = |axes: &[usize]| axes.iter().copied().filter(|size| *size != 1).collect::<Vec<_>>();
    let sorted = |mut axes: Vec<usize>| {
        axes.sort_unstable();
        axes
    };
    let (own, other) = (long(axes), long(expected));
    if own == other || sorted(own) != sorted(other) {
        return Ok(());
    }
    Err(Error::shape(name, Shape(expected), format!("{}: transpose the samples", Shape(axes))))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_in_another_order_are_refused_and_nothing_else() {
        let said = require_order("inputs", &[32, 32, 3], &[3, 32, 32]).unwrap_err().to_string();
        assert_eq!(said, "inputs: expected 3 × 32 × 32, got 32 × 32 × 3: transpose the samples");
        assert!(require_order("inputs", &[16, 24], &[24, 16]).is_err());
        for (axes, expected) in [
            (&[3, 32, 32][..], &[3, 32, 32][..]),
            (&[3072], &[3, 32, 32]),
            (&[28, 28, 1], &[1, 28, 28]),
            (&[28, 28], &[784]),
            // Another number of values is for others to say.
            (&[32, 32, 4], &[3, 32, 32]),
        ] {
            assert!(require_order("inputs", axes, expected).is_ok(), "{axes:?} for {expected:?}");
        }
    }
}
