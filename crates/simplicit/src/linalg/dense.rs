//! The only access to the dense kernels (faer), always single-threaded: see [`crate::parallel`].

use faer::diag::Diag;
use faer::dyn_stack::{MemBuffer, MemStack};
use faer::linalg::matmul::{self, triangular};
use faer::linalg::{cholesky::llt, svd, triangular_solve};
use faer::traits::ComplexField;
use faer::{Accum, MatMut, MatRef, Par, Side};

use super::{Matrix, Scalar};

/// A borrowed row-major matrix, possibly read as its transpose.
#[derive(Debug, Clone, Copy)]
pub struct View<'a, T> {
    data: &'a [T],
    rows: usize,
    cols: usize,
    stride: usize,
    transposed: bool,
}

impl<'a, T> View<'a, T> {
    /// `rows × cols` values, consecutive rows `stride` apart.
    ///
    /// # Panics
    /// If the slice is too short; sizes come from the caller's own arithmetic, never from data.
    pub fn new(data: &'a [T], rows: usize, cols: usize, stride: usize) -> Self {
        assert!(rows == 0 || (cols <= stride || rows == 1) && (rows - 1) * stride + cols <= data.len());
        Self { data, rows, cols, stride, transposed: false }
    }

    /// The transpose, without copying.
    pub fn t(self) -> Self {
        Self { transposed: !self.transposed, ..self }
    }

    /// Whether there is no entry, so that a product with it adds nothing.
    pub fn is_empty(&self) -> bool {
        self.rows == 0 || self.cols == 0
    }
}

impl<T: Scalar> Matrix<T> {
    /// The whole matrix as an operand of [`gemm`].
    pub fn view(&self) -> View<'_, T> {
        View::new(self.as_slice(), self.rows(), self.cols(), self.cols())
    }
}

fn faer_view<T: ComplexField>(view: View<'_, T>) -> MatRef<'_, T> {
    let used = if view.rows == 0 || view.cols == 0 { 0 } else { (view.rows - 1) * view.stride + view.cols };
    let stride = view.stride.max(view.cols).max(1);
    let m = MatRef::from_row_major_slice_with_stride(&view.data[..used], view.rows, view.cols, stride);
    if view.transposed { m.transpose() } else { m }
}

/// `out = alpha·a·b` (or `out += …`), `out` row-major with rows `stride` apart.
///
/// # Panics
/// If the shapes do not agree.
pub fn gemm<T: Scalar + ComplexField>(
    out: &mut [T],
    stride: usize,
    accumulate: bool,
    alpha: T,
    a: View<'_, T>,
    b: View<'_, T>,
) {
    let (a, b) = (faer_view(a), faer_view(b));
    let (rows, cols) = (a.nrows(), b.ncols());
    if rows == 0 || cols == 0 {
        return;
    }
    let used = (rows - 1) * stride + cols;
    // faer 0.24.4's from_row_major_slice_with_stride_mut swaps the strides and writes out of bounds.
    let out = MatMut::from_column_major_slice_with_stride_mut(&mut out[..used], cols, rows, stride).transpose_mut();
    matmul::matmul(out, if accumulate { Accum::Add } else { Accum::Replace }, a, b, alpha, Par::Seq);
}

/// Adds FᵀF to the lower triangle of the d × d matrix `gram` (the rest is left alone), F having d columns.
pub(crate) fn gram_lower<T: Scalar>(gram: &mut Matrix<T>, f: View<'_, T>) {
    let d = f.cols;
    assert_eq!((gram.rows(), gram.cols()), (d, d));
    if f.is_empty() {
        return;
    }
    let f = faer_view(f);
    triangular::matmul(
        MatMut::from_row_major_slice_mut(gram.as_mut_slice(), d, d),
        triangular::BlockStructure::TriangularLower,
        Accum::Add,
        f.transpose(),
        triangular::BlockStructure::Rectangular,
        f,
        triangular::BlockStructure::Rectangular,
        T::from_f64(1.0),
        Par::Seq,
    );
}

/// Eigenvalues (ascending) and eigenvectors (as columns) of a symmetric matrix, read from its lower triangle. `None`
/// if the iteration fails, which happens only with a NaN.
pub fn symmetric_eigen(a: &Matrix) -> Option<(Vec<f64>, Matrix)> {
    let n = a.rows();
    let eigen = faer_view(a.view()).self_adjoint_eigen(Side::Lower).ok()?;
    let values = (0..n).map(|i| eigen.S()[i]).collect();
    let vectors = Matrix::from_fn(n, n, |i, j| eigen.U()[(i, j)]);
    Some((values, vectors))
}

/// Singular values, largest first. `None` if the iteration fails, which happens only with a NaN.
pub fn singular_values(a: &Matrix) -> Option<Vec<f64>> {
    let (rows, cols) = (a.rows(), a.cols());
    let count = rows.min(cols);
    if count == 0 {
        return Some(Vec::new());
    }
    let mut values = Diag::<f64>::zeros(count);
    let (no, params) = (svd::ComputeSvdVectors::No, Default::default());
    let mut scratch = MemBuffer::new(svd::svd_scratch::<f64>(rows, cols, no, no, Par::Seq, params));
    let stack = MemStack::new(&mut scratch);
    svd::svd(faer_view(a.view()), values.as_mut(), None, None, Par::Seq, stack, params).ok()?;
    Some((0..count).map(|i| values[i]).collect())
}

/// A Cholesky factor L Lᵀ = A with the memory to compute it: matrices can be factored in place again and again
/// without allocating.
pub struct Cholesky {
    size: usize,
    factor: Vec<f64>,
    scratch: MemBuffer,
    capacity: usize,
}

impl std::fmt::Debug for Cholesky {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cholesky").field("size", &self.size).field("capacity", &self.capacity).finish()
    }
}

impl Cholesky {
    /// Memory for matrices of up to `capacity` rows.
    pub fn with_capacity(capacity: usize) -> Self {
        Self { size: 0, factor: vec![0.0; capacity * capacity], scratch: Self::scratch(capacity), capacity }
    }

    fn scratch(size: usize) -> MemBuffer {
        MemBuffer::new(llt::factor::cholesky_in_place_scratch::<f64>(size, Par::Seq, Default::default()))
    }

    /// Number of rows of the matrix that was factored last.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Factors the `size × size` matrix that `fill` writes into the upper triangle (row i, columns i.. of a row-major
    /// buffer, which is the lower triangle column by column, as the kernels read it). False if it is not numerically positive definite; the factor is then unusable.
    #[must_use]
    pub fn factor(&mut self, size: usize, fill: impl FnOnce(&mut [f64])) -> bool {
        if size > self.capacity {
            self.capacity = size;
            self.factor.resize(size * size, 0.0);
            self.scratch = Self::scratch(size);
        }
        self.size = size;
        if size == 0 {
            return true;
        }
        let buffer = &mut self.factor[..size * size];
        fill(buffer);
        let a = MatMut::from_column_major_slice_mut(buffer, size, size);
        let stack = MemStack::new(&mut self.scratch);
        llt::factor::cholesky_in_place(a, Default::default(), Par::Seq, stack, Default::default()).is_ok()
            && (0..size).all(|i| self.factor[i * size + i].is_finite())
    }

    /// Solves A x = b for `columns` right-hand sides; `b` is row-major `size × columns`.
    pub fn solve(&self, b: &mut [f64], columns: usize) {
        self.solve_lower(b, columns);
        self.solve_upper(b, columns);
    }

    /// Solves Lᵀx = b.
    pub(crate) fn solve_upper(&self, b: &mut [f64], columns: usize) {
        let n = self.size;
        if n == 0 || columns == 0 {
            return;
        }
        let l = MatRef::from_column_major_slice(&self.factor[..n * n], n, n);
        let b = MatMut::from_row_major_slice_mut(&mut b[..n * columns], n, columns);
        triangular_solve::solve_upper_triangular_in_place(l.transpose(), b, Par::Seq);
    }

    /// Solves L x = b.
    pub(crate) fn solve_lower(&self, b: &mut [f64], columns: usize) {
        let n = self.size;
        if n == 0 || columns == 0 {
            return;
        }
        let l = MatRef::from_column_major_slice(&self.factor[..n * n], n, n);
        let b = MatMut::from_row_major_slice_mut(&mut b[..n * columns], n, columns);
        triangular_solve::solve_lower_triangular_in_place(l, b, Par::Seq);
    }
}

impl Cholesky {
    /// A⁻¹, full symmetric.
    pub fn inverse(&self) -> Matrix {
        let n = self.size;
        let mut out = Matrix::zeros(n, n);
        if n == 0 {
            return out;
        }
        let mut scratch = MemBuffer::new(llt::inverse::inverse_scratch::<f64>(n, Par::Seq));
        llt::inverse::inverse(
            MatMut::from_column_major_slice_mut(out.as_mut_slice(), n, n),
            MatRef::from_column_major_slice(&self.factor[..n * n], n, n),
            Par::Seq,
            MemStack::new(&mut scratch),
        );
        // The lower triangle from the upper one, in squares that stay in the cache.
        const SQUARE: usize = 32;
        let data = out.as_mut_slice();
        for top in (0..n).step_by(SQUARE) {
            for left in (0..=top).step_by(SQUARE) {
                for i in top..(top + SQUARE).min(n) {
                    for j in left..(left + SQUARE).min(i) {
                        data[i * n + j] = data[j * n + i];
                    }
                }
            }
        }
        out
    }
}

/// Runs a loop compiled for the best vector instructions this processor has.
#[inline(always)]
pub(crate) fn vectorised<R>(work: impl FnOnce() -> R) -> R {
    pulp::Arch::new().dispatch(work)
}

/// Σ aᵢbᵢ over 8 running sums, so that the order of additions does not depend on the processor.
#[inline]
pub fn dot(a: &[f64], b: &[f64]) -> f64 {
    vectorised(
        #[inline(always)]
        || {
            let mut sums = [0.0; 16];
            let (a16, a_rest) = a.as_chunks::<16>();
            let (b16, b_rest) = b.as_chunks::<16>();
            for (x, y) in a16.iter().zip(b16) {
                for k in 0..16 {
                    sums[k] += x[k] * y[k];
                }
            }
            let mut rest = 0.0;
            for (x, y) in a_rest.iter().zip(b_rest) {
                rest += x * y;
            }
            sums.iter().sum::<f64>() + rest
        },
    )
}

/// y += alpha·x.
#[inline]
pub fn axpy(y: &mut [f64], alpha: f64, x: &[f64]) {
    vectorised(
        #[inline(always)]
        || {
            for (y, x) in y.iter_mut().zip(x) {
                *y += alpha * x;
            }
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    fn random(rows: usize, cols: usize, seed: u64) -> Matrix {
        let mut r = Random::new(seed);
        Matrix::from_fn(rows, cols, |_, _| r.normal())
    }

    #[test]
    fn products_of_views_match_the_definition() {
        let (a, b) = (random(7, 5, 1), random(5, 9, 2));
        let mut out = vec![1.0; 7 * 9];
        gemm(&mut out, 9, false, 2.0, a.view(), b.view());
        let (at, bt) = (a.transposed(), b.transposed());
        let mut other = vec![0.0; 7 * 9];
        gemm(&mut other, 9, false, 2.0, at.view().t(), bt.view().t());
        for i in 0..7 {
            for j in 0..9 {
                let expected: f64 = (0..5).map(|k| 2.0 * a[(i, k)] * b[(k, j)]).sum();
                assert!((out[i * 9 + j] - expected).abs() < 1e-12);
                assert!((other[i * 9 + j] - expected).abs() < 1e-12);
            }
        }
    }

    #[test]
    fn gram_cholesky_and_eigen_agree() {
        let f = random(60, 40, 3);
        let mut g = Matrix::zeros(40, 40);
        gram_lower(&mut g, f.view());
        let mut chol = Cholesky::with_capacity(10);
        let full = Matrix::from_fn(40, 40, |i, j| g[(i.max(j), i.min(j))]);
        assert!(chol.factor(40, |a| a.copy_from_slice(full.as_slice())));
        let x = random(40, 3, 4);
        let mut b = vec![0.0; 120];
        gemm(&mut b, 3, false, 1.0, full.view(), x.view());
        chol.solve(&mut b, 3);
        for (got, want) in b.iter().zip(x.as_slice()) {
            assert!((got - want).abs() < 1e-9);
        }
        let inverse = chol.inverse();
        let mut identity = vec![0.0; 1600];
        gemm(&mut identity, 40, false, 1.0, full.view(), inverse.view());
        for (k, v) in identity.iter().enumerate() {
            assert!((v - f64::from(u8::from(k / 40 == k % 40))).abs() < 1e-9);
        }
        let (values, vectors) = symmetric_eigen(&g).unwrap();
        for i in 0..40 {
            let column: Vec<f64> = (0..40).map(|k| vectors[(k, i)]).collect();
            for r in 0..40 {
                assert!((dot(full.row(r), &column) - values[i] * column[r]).abs() < 1e-9);
            }
        }
        assert!(!chol.factor(2, |a| a.copy_from_slice(&[1.0, 2.0, 0.0, 1.0])));
    }
}
