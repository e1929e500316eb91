//! A row-major matrix: samples are rows, features are columns.

use crate::{Error, Result};

/// The two floating-point types the data may have.
pub trait Scalar:
    faer::traits::ComplexField + Copy + Default + Send + Sync + PartialEq + std::fmt::Debug + 'static
{
    /// The value in f64, which is exact for both types.
    fn to_f64(self) -> f64;
    /// The nearest value of this type.
    fn from_f64(value: f64) -> Self;
}

impl Scalar for f32 {
    fn to_f64(self) -> f64 {
        f64::from(self)
    }
    fn from_f64(value: f64) -> Self {
        value as f32
    }
}

impl Scalar for f64 {
    fn to_f64(self) -> f64 {
        self
    }
    fn from_f64(value: f64) -> Self {
        value
    }
}

/// A matrix that owns its values, stored row by row without gaps.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Matrix<T = f64> {
    rows: usize,
    cols: usize,
    data: Vec<T>,
}

impl<T: Scalar> Matrix<T> {
    /// A matrix of zeros.
    pub fn zeros(rows: usize, cols: usize) -> Self {
        Self { rows, cols, data: vec![T::default(); rows * cols] }
    }

    /// From row-major data; the length must be rows × cols.
    pub fn from_vec(rows: usize, cols: usize, data: Vec<T>) -> Result<Self> {
        if rows.checked_mul(cols) != Some(data.len()) {
            return Err(Error::shape(
                "matrix data",
                format!("{rows} × {cols} values"),
                format!("{} values", data.len()),
            ));
        }
        Ok(Self { rows, cols, data })
    }

    /// A matrix whose entry (i, j) is f(i, j).
    pub fn from_fn(rows: usize, cols: usize, mut f: impl FnMut(usize, usize) -> T) -> Self {
        let mut data = Vec::with_capacity(rows * cols);
        for i in 0..rows {
            for j in 0..cols {
                data.push(f(i, j));
            }
        }
        Self { rows, cols, data }
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// One row.
    pub fn row(&self, i: usize) -> &[T] {
        &self.data[i * self.cols..(i + 1) * self.cols]
    }

    /// One row, writable.
    pub fn row_mut(&mut self, i: usize) -> &mut [T] {
        &mut self.data[i * self.cols..(i + 1) * self.cols]
    }

    /// All values, row-major.
    pub fn as_slice(&self) -> &[T] {
        &self.data
    }

    /// All values, row-major, writable.
    pub fn as_mut_slice(&mut self) -> &mut [T] {
        &mut self.data
    }

    /// The values, row-major.
    pub fn into_vec(self) -> Vec<T> {
        self.data
    }

    /// The transpose, copied.
    pub fn transposed(&self) -> Self {
        const TILE: usize = 32;
        let mut out = Self::zeros(self.cols, self.rows);
        for i0 in (0..self.rows).step_by(TILE) {
            for j0 in (0..self.cols).step_by(TILE) {
                for i in i0..(i0 + TILE).min(self.rows) {
                    for j in j0..(j0 + TILE).min(self.cols) {
                        out.data[j * self.rows + i] = self.data[i * self.cols + j];
                    }
                }
            }
        }
        out
    }

    /// The same numbers in the other (or the same) precision.
    pub fn cast<S: Scalar>(&self) -> Matrix<S> {
        Matrix { rows: self.rows, cols: self.cols, data: self.data.iter().map(|v| S::from_f64(v.to_f64())).collect() }
    }

    /// An error naming array, row and column of the first NaN or infinity.
    pub fn require_finite(&self, array: &str, first_row: usize) -> Result<()> {
        // To check all of them is faster than to stop at the first, because nearly always there is none.
        if self.data.iter().fold(true, |finite, v| finite & v.to_f64().is_finite()) {
            return Ok(());
        }
        match self.data.iter().position(|v| !v.to_f64().is_finite()) {
            None => Ok(()),
            Some(k) => Err(Error::NotFinite {
                array: array.to_string(),
                row: first_row + k / self.cols,
                column: k % self.cols,
                value: self.data[k].to_f64(),
            }),
        }
    }
}

impl<T> std::ops::Index<(usize, usize)> for Matrix<T> {
    type Output = T;
    fn index(&self, (i, j): (usize, usize)) -> &T {
        assert!(j < self.cols, "column {j} of {}", self.cols);
        &self.data[i * self.cols + j]
    }
}

impl<T> std::ops::IndexMut<(usize, usize)> for Matrix<T> {
    fn index_mut(&mut self, (i, j): (usize, usize)) -> &mut T {
        assert!(j < self.cols, "column {j} of {}", self.cols);
        &mut self.data[i * self.cols + j]
    }
}
