//! Inverses of many symmetric positive definite matrices at once, in place.
//!
//! Gauss-Jordan elimination a panel at a time: everything but the small diagonal blocks is a matrix product over the whole
//! batch, so hundreds of matrices of a thousand rows keep the device busy where one factorisation each would not. Pivots
//! are Schur complements of a positive definite matrix, so no exchange of rows is needed.

use super::dense::{Panel, Sizes};
use super::memory::Buffer;
use super::{Session, arguments};
use crate::Result;

/// Columns eliminated at once; `kernels.cu` has the same number.
pub(super) const PANEL: usize = 64;

/// `n` rounded up to a multiple of the panel.
pub(super) fn padded(n: usize) -> usize {
    n.max(1).next_multiple_of(PANEL)
}

impl Session {
    /// Inverts `batch` matrices of n × n; n is a multiple of [`PANEL`].
    pub(super) fn invert(&self, matrices: &Buffer<f64>, n: usize, batch: usize) -> Result<()> {
        let kernels = &self.cuda.kernels;
        let diagonal = self.allocate::<f64>(batch * PANEL * PANEL)?;
        let columns = self.allocate::<f64>(batch * n * PANEL)?;
        let rows = self.allocate::<f64>(batch * n * PANEL)?;
        let whole = Panel::batch(matrices.address(), n, n * n);
        for q in (0..n).step_by(PANEL) {
            let (d, c, r) = (
                Panel::batch(diagonal.address(), PANEL, PANEL * PANEL),
                Panel::batch(columns.address(), n, n * PANEL),
                Panel::batch(rows.address(), PANEL, n * PANEL),
            );
            self.launch(kernels.invert_diagonal, (batch, 1), 512, arguments!(matrices, &diagonal, n, q))?;
            self.each(kernels.take_columns, n * PANEL, batch, arguments!(matrices, &columns, n, q))?;
            let pivot_rows = Panel::batch(matrices.at(q), n, n * n);
            self.products(r, 0.0, 1.0, d, pivot_rows, Sizes(PANEL, n, PANEL), batch)?;
            self.launch(kernels.fill_pivot, (batch, 1), 512, arguments!(&rows, &diagonal, n, q))?;
            self.products(whole, 1.0, -1.0, c, r, Sizes(n, n, PANEL), batch)?;
            self.each(kernels.put_rows, n * PANEL, batch, arguments!(matrices, &rows, n, q))?;
        }
        Ok(())
    }
}
