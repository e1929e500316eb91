//! Sums of products of single-precision features: in single precision over [`CHUNK`] samples, in double precision from there
//! on. That costs half of double precision throughout. Rounding errors of n additions grow like √n, so an entry is off by about
//! √CHUNK·2⁻²⁴, 1e-6, of √(G_ii·G_jj) where one chunk is all, and by less the more chunks average: far below the ridge of every
//! problem that reads it.

use std::ops::Range;

use super::{Form, Statistics, mirror};
use crate::linalg::{Matrix, View, gemm, gram_lower};
use crate::{Error, Result};

/// Features from which on this is the way to sum, and samples for each of them: with fewer of either the sums are not what
/// costs time, and with few samples G is nearly singular, so that its last digits are read.
const FEATURES: usize = 128;
const SAMPLES_PER_FEATURE: usize = 4;
/// Samples whose products are summed in single precision.
pub(super) const CHUNK: usize = 256;

/// Whether products of so many samples and features are summed this way.
pub(crate) fn are_single(samples: usize, features: usize) -> bool {
    features >= FEATURES && samples >= SAMPLES_PER_FEATURE * features
}

/// Σ t² of every target, one sample a row.
pub(super) fn squares(targets: &Matrix) -> Vec<f64> {
    let mut out = vec![0.0; targets.cols()];
    for i in 0..targets.rows() {
        out.iter_mut().zip(targets.row(i)).for_each(|(e, t)| *e += t * t);
    }
    out
}

/// Some rows of a matrix.
fn part<'a>(m: &'a Matrix<f32>, rows: &Range<usize>) -> View<'a, f32> {
    View::new(&m.as_slice()[rows.start * m.cols()..], rows.len(), m.cols(), m.cols())
}

impl Statistics {
    /// The statistics of some samples: features and targets with one sample per row.
    pub(crate) fn of_single(features: &Matrix<f32>, targets: &Matrix) -> Result<Self> {
        let (d, r, samples) = (features.cols(), targets.cols(), features.rows());
        if targets.rows() != samples {
            return Err(Error::shape("targets", format!("{samples} samples"), format!("{} samples", targets.rows())));
        }
        features.require_finite("features", 0)?;
        targets.require_finite("targets", 0)?;
        let of_targets = targets.cast::<f32>();
        let (mut gram, mut cross) = (Matrix::zeros(d, d), Matrix::zeros(r, d));
        let (mut square, mut product) = (Matrix::<f32>::zeros(d, d), Matrix::<f32>::zeros(r, d));
        for rows in super::cuts(samples, CHUNK) {
            let (f, t) = (part(features, &rows), part(&of_targets, &rows));
            square.as_mut_slice().fill(0.0);
            gram_lower(&mut square, f);
            for i in 0..d {
                gram.row_mut(i)[..=i].iter_mut().zip(square.row(i)).for_each(|(g, s)| *g += f64::from(*s));
            }
            gemm(product.as_mut_slice(), d, false, 1.0, t.t(), f);
            cross.as_mut_slice().iter_mut().zip(product.as_slice()).for_each(|(c, p)| *c += f64::from(*p));
        }
        mirror(&mut gram);
        Ok(Self { samples, form: Form::Gram(gram), cross, energy: squares(targets) })
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::random::Random;

    /// Compares sums of single-precision features with those in double precision throughout.
    pub(in super::super) fn assert_close(got: &Statistics, exact: &Statistics, most: f64) {
        let (d, r) = (exact.features(), exact.targets());
        assert_eq!((got.samples(), got.features(), got.targets()), (exact.samples(), d, r));
        for i in 0..d {
            for j in 0..d {
                let size = (exact.gram()[(i, i)] * exact.gram()[(j, j)]).sqrt();
                let off = (got.gram()[(i, j)] - exact.gram()[(i, j)]).abs();
                assert!(off <= most * size, "{i}, {j}: off by {off:e} of {size}");
            }
        }
        for k in 0..r {
            assert!((got.energy(k) - exact.energy(k)).abs() <= 1e-12 * exact.energy(k));
            for j in 0..d {
                let size = (exact.energy(k) * exact.gram()[(j, j)]).sqrt();
                assert!((got.cross(k)[j] - exact.cross(k)[j]).abs() <= most * size);
            }
        }
    }

    #[test]
    fn sums_of_single_precision_are_the_exact_ones_within_it() {
        let mut random = Random::new(5);
        for (m, d, r) in [(3 * CHUNK + 77, 150, 4), (CHUNK, 1, 1), (5, 40, 2)] {
            // Features whose mean is not zero, as after a ReLU.
            let f = Matrix::from_fn(m, d, |_, _| random.normal().max(0.0) as f32);
            let t = Matrix::from_fn(m, r, |i, k| f64::from(f[(i, k % d)]) + 0.1 * random.normal());
            let most = (CHUNK as f64).sqrt() * 2f64.powi(-24);
            assert_close(&Statistics::of_single(&f, &t).unwrap(), &Statistics::of(&f.cast(), &t).unwrap(), most);
        }
        let (f, t) = (Matrix::zeros(3, 2), Matrix::zeros(4, 1));
        assert!(Statistics::of_single(&f, &t).unwrap_err().to_string().contains("4 samples"));
        let mut f = Matrix::zeros(4, 2);
        f[(2, 1)] = f32::NAN;
        assert!(Statistics::of_single(&f, &t).unwrap_err().to_string().contains("features"));
    }
}
