//! Singular values of A, and how many of them exceed rounding errors.

use crate::linalg::{Csr, Matrix, singular_values};
use crate::{Error, Result};

/// Rows or columns (the fewer of the two, empty ones not counted) of the largest matrix that is decomposed, which
/// takes a few seconds.
const LARGEST: usize = 2048;

/// The singular values of a matrix and its numerical rank.
#[derive(Debug, Clone, PartialEq)]
pub struct Rank {
    /// All min(rows, columns) singular values, largest first.
    pub singular_values: Vec<f64>,
    /// max(rows, columns)·ε·σ₁ with the ε of f32, in which the entries are stored: smaller values are rounding
    /// errors.
    pub tolerance: f64,
    /// Number of singular values above the tolerance.
    pub rank: usize,
}

/// Decomposes `a`, such as a model's A, in double precision.
pub fn rank(a: &Csr<f32>) -> Result<Rank> {
    // Empty rows and columns only add zeros, and a layered A is mostly those.
    let rows: Vec<usize> = (0..a.rows()).filter(|&i| a.indptr()[i] < a.indptr()[i + 1]).collect();
    let mut place = vec![usize::MAX; a.cols()];
    for &j in a.indices() {
        place[j as usize] = 0;
    }
    let mut columns = 0;
    for p in place.iter_mut().filter(|p| **p == 0) {
        *p = columns;
        columns += 1;
    }
    if rows.len().min(columns) > LARGEST {
        return Err(Error::unsupported(
            format!("the rank of a matrix with {} × {columns} non-empty rows and columns", rows.len()),
            format!("the decomposition is dense; at most {LARGEST} of the fewer of the two"),
        ));
    }
    let mut dense = Matrix::zeros(rows.len(), columns);
    for (k, &i) in rows.iter().enumerate() {
        for (j, value) in a.row(i) {
            dense[(k, place[j])] = f64::from(value);
        }
    }
    let mut values = singular_values(&dense).ok_or_else(|| {
        Error::unsupported("the rank of this matrix", "the singular value iteration did not converge")
    })?;
    values.resize(a.rows().min(a.cols()), 0.0);
    let largest = values.first().copied().unwrap_or(0.0);
    let tolerance = a.rows().max(a.cols()) as f64 * f64::from(f32::EPSILON) * largest;
    let rank = values.iter().filter(|v| **v > tolerance).count();
    Ok(Rank { singular_values: values, tolerance, rank })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    #[test]
    fn a_product_of_thin_factors_has_their_rank() {
        let mut r = Random::new(3);
        let (left, right) = (Matrix::from_fn(40, 5, |_, _| r.normal()), Matrix::from_fn(5, 40, |_, _| r.normal()));
        // Rows and columns 0..10 stay empty.
        let product = Matrix::from_fn(50, 50, |i, j| {
            if i < 10 || j < 10 {
                return 0.0;
            }
            (0..5).map(|k| left[(i - 10, k)] * right[(k, j - 10)]).sum::<f64>() as f32
        });
        let found = rank(&Csr::from_dense(&product)).unwrap();
        assert_eq!((found.rank, found.singular_values.len()), (5, 50));
        assert!(found.singular_values.windows(2).all(|w| w[0] >= w[1]));
        let energy: f64 = product.as_slice().iter().map(|v| f64::from(*v).powi(2)).sum();
        let sum: f64 = found.singular_values.iter().map(|v| v * v).sum();
        assert!((sum - energy).abs() < 1e-10 * energy, "Σσ² = ‖A‖²");
    }

    #[test]
    fn small_singular_values_are_accurate() {
        // diag(1, 1e-12) turned by two rotations: AᵀA would lose the second to rounding.
        let turn = |t: f64| Matrix::from_vec(2, 2, vec![t.cos(), -t.sin(), t.sin(), t.cos()]).unwrap();
        let (p, q) = (turn(0.3), turn(1.1));
        let a = Matrix::from_fn(2, 2, |i, j| p[(i, 0)] * q[(0, j)] + 1e-12 * p[(i, 1)] * q[(1, j)]);
        let values = singular_values(&a).unwrap();
        assert!((values[0] - 1.0).abs() < 1e-14 && (values[1] - 1e-12).abs() < 1e-15, "{values:?}");
    }

    #[test]
    fn nothing_has_rank_zero() {
        assert_eq!(rank(&Csr::empty(4, 4)).unwrap(), Rank { singular_values: vec![0.0; 4], tolerance: 0.0, rank: 0 });
        assert_eq!(rank(&Csr::empty(0, 0)).unwrap().rank, 0);
    }
}
