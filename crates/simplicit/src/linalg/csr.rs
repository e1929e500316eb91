//! Compressed sparse rows in SciPy's layout: `indptr`, `indices`, `data`.

use super::{Matrix, Scalar};
use crate::{Error, Result};

/// Sorts the entries of a row by column and adds up those of one column.
pub(crate) fn add_up<T: Copy + std::ops::AddAssign>(row: &mut Vec<(usize, T)>) {
    row.sort_by_key(|(j, _)| *j);
    row.dedup_by(|later, kept| {
        let same = later.0 == kept.0;
        if same {
            kept.1 += later.1;
        }
        same
    });
}

/// A sparse matrix by rows; indices ascend within a row and no stored value is zero.
#[derive(Debug, Clone, PartialEq)]
pub struct Csr<T = f32> {
    rows: usize,
    cols: usize,
    indptr: Vec<usize>,
    indices: Vec<u32>,
    data: Vec<T>,
}

impl<T: Scalar> Csr<T> {
    /// A matrix without non-zeros.
    pub fn empty(rows: usize, cols: usize) -> Self {
        Self { rows, cols, indptr: vec![0; rows + 1], indices: Vec::new(), data: Vec::new() }
    }

    /// Checked construction: lengths, monotone pointers, ascending columns in range, finite non-zero values.
    pub fn new(
        name: &str,
        rows: usize,
        cols: usize,
        indptr: Vec<usize>,
        indices: Vec<u32>,
        data: Vec<T>,
    ) -> Result<Self> {
        if indptr.len() != rows + 1 {
            return Err(Error::shape(format!("{name}.indptr"), format!("{} entries", rows + 1), indptr.len()));
        }
        if indices.len() != data.len() {
            return Err(Error::shape(format!("{name}.data"), format!("{} values", indices.len()), data.len()));
        }
        if indptr[0] != 0 || indptr[rows] != indices.len() || indptr.windows(2).any(|w| w[0] > w[1]) {
            return Err(Error::shape(
                format!("{name}.indptr"),
                format!("non-decreasing from 0 to {}", indices.len()),
                "something else",
            ));
        }
        for i in 0..rows {
            let row = &indices[indptr[i]..indptr[i + 1]];
            if row.windows(2).any(|w| w[0] >= w[1]) || row.last().is_some_and(|&j| j as usize >= cols) {
                return Err(Error::shape(
                    format!("{name}.indices in row {i}"),
                    format!("ascending columns below {cols}"),
                    "unordered, repeated or too large",
                ));
            }
            for k in indptr[i]..indptr[i + 1] {
                let value = data[k].to_f64();
                if !value.is_finite() {
                    return Err(Error::NotFinite {
                        array: name.to_string(),
                        row: i,
                        column: indices[k] as usize,
                        value,
                    });
                }
                if value == 0.0 {
                    return Err(Error::shape(format!("{name}.data in row {i}"), "non-zero values", "a stored zero"));
                }
            }
        }
        Ok(Self { rows, cols, indptr, indices, data })
    }

    /// Keeps the non-zero entries of `(column, value)` lists, one list per row, columns ascending.
    pub fn from_rows<R: IntoIterator<Item = (usize, T)>>(cols: usize, rows: impl IntoIterator<Item = R>) -> Self {
        let mut out = Self { rows: 0, cols, indptr: vec![0], indices: Vec::new(), data: Vec::new() };
        for row in rows {
            for (j, value) in row {
                debug_assert!(j < cols, "column {j} of {cols}");
                if value.to_f64() != 0.0 {
                    out.indices.push(j as u32);
                    out.data.push(value);
                }
            }
            out.rows += 1;
            out.indptr.push(out.indices.len());
        }
        out
    }

    /// The non-zeros of a dense matrix.
    pub fn from_dense(dense: &Matrix<T>) -> Self {
        Self::from_rows(dense.cols(), (0..dense.rows()).map(|i| dense.row(i).iter().copied().enumerate()))
    }

    /// The matrix as a dense one.
    pub fn to_dense(&self) -> Matrix<T> {
        let mut out = Matrix::zeros(self.rows, self.cols);
        for i in 0..self.rows {
            for (j, value) in self.row(i) {
                out[(i, j)] = value;
            }
        }
        out
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Number of stored (non-zero) entries.
    pub fn nonzeros(&self) -> usize {
        self.data.len()
    }

    /// Row offsets into `indices` and `data`; one more than rows.
    pub fn indptr(&self) -> &[usize] {
        &self.indptr
    }

    /// Column of every entry.
    pub fn indices(&self) -> &[u32] {
        &self.indices
    }

    /// Value of every entry.
    pub fn data(&self) -> &[T] {
        &self.data
    }

    /// `(column, value)` of one row, columns ascending.
    pub fn row(&self, i: usize) -> impl Iterator<Item = (usize, T)> + '_ {
        let span = self.indptr[i]..self.indptr[i + 1];
        self.indices[span.clone()].iter().zip(&self.data[span]).map(|(&j, &v)| (j as usize, v))
    }

    /// The transpose.
    pub fn transposed(&self) -> Self {
        let mut indptr = vec![0; self.cols + 1];
        for &j in &self.indices {
            indptr[j as usize + 1] += 1;
        }
        for j in 0..self.cols {
            indptr[j + 1] += indptr[j];
        }
        let mut next = indptr.clone();
        let mut indices = vec![0; self.indices.len()];
        let mut data = vec![T::default(); self.data.len()];
        for i in 0..self.rows {
            for (j, value) in self.row(i) {
                indices[next[j]] = i as u32;
                data[next[j]] = value;
                next[j] += 1;
            }
        }
        Self { rows: self.cols, cols: self.rows, indptr, indices, data }
    }

    /// Largest row sum of magnitudes, ‖·‖∞, summed in f64.
    pub fn norm_inf(&self) -> f64 {
        (0..self.rows).map(|i| self.row(i).map(|(_, v)| v.to_f64().abs()).sum::<f64>()).fold(0.0, f64::max)
    }
}
