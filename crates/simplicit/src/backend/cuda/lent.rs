//! Samples that other code keeps on a GPU, read in place.

use std::ffi::c_void;
use std::ops::Range;

use super::library::Address;
use super::{Argument, Cuda, Session, Values};
use crate::linalg::Matrix;
use crate::{Error, Result};

/// Rows of single-precision numbers, one after the other, in device memory that other code owns.
#[derive(Debug)]
pub struct LentRows {
    cuda: &'static Cuda,
    address: Address,
    rows: usize,
    cols: usize,
}

impl LentRows {
    /// Rows on the GPU of this number.
    ///
    /// # Safety
    ///
    /// `address` is memory of the device's primary context and holds `rows` · `cols` numbers. Nobody frees it or
    /// writes to it as long as this value lives, and earlier writes are complete for the default stream.
    #[allow(unsafe_code)]
    pub unsafe fn new(number: usize, address: u64, rows: usize, cols: usize) -> Result<Self> {
        if rows == 0 || cols == 0 || address == 0 {
            let got = format!("{rows} × {cols}");
            return Err(Error::shape("tensor on a GPU", "at least one sample of at least one value", got));
        }
        Ok(Self { cuda: Cuda::open(number)?, address, rows, cols })
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Numbers per row.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The GPU that holds them.
    pub(crate) fn cuda(&self) -> &'static Cuda {
        self.cuda
    }

    /// Some consecutive rows, copied to the host.
    pub fn read(&self, rows: Range<usize>) -> Result<Matrix<f32>> {
        if rows.start > rows.end || rows.end > self.rows {
            return Err(Error::shape("rows of a tensor", format!("within 0..{}", self.rows), format!("{rows:?}")));
        }
        let mut out = Matrix::zeros(rows.len(), self.cols);
        if rows.is_empty() {
            return Ok(out);
        }
        let session = self.cuda.session()?;
        let (from, numbers) = (self.address + (rows.start * self.cols * 4) as Address, out.as_mut_slice());
        // SAFETY: the creator of `self` promised that many numbers there; the host's side holds as many bytes.
        let status =
            unsafe { (self.cuda.driver.download)(numbers.as_mut_ptr().cast::<c_void>(), from, size_of_val(numbers)) };
        session.driver("copying from the device", status)?;
        drop(session);
        Ok(out)
    }
}

impl Session {
    /// Whether this session uses the GPU that holds these rows.
    pub(crate) fn has(&self, lent: &LentRows) -> bool {
        std::ptr::eq(self.cuda, lent.cuda)
    }

    /// (raw·scale − mean)/std of chosen rows, one per sample: computed in f64 and rounded once, as on the host.
    pub(crate) fn taken(
        &self,
        lent: &LentRows,
        chosen: &[i32],
        scale: f64,
        mean: &[f64],
        std: &[f64],
    ) -> Result<Values> {
        let (d, count) = (lent.cols, chosen.len());
        let outside = chosen.iter().find(|row| usize::try_from(**row).map_or(true, |row| row >= lent.rows));
        if let Some(row) = outside.copied().or((mean.len() != d || std.len() != d).then_some(-1)) {
            return Err(Error::shape("rows of a tensor", format!("within 0..{} and {d} values", lent.rows), row));
        }
        let out = self.no_values(1, count, d)?;
        let (chosen, mean, std) = (self.uploaded(chosen)?, self.uploaded(mean)?, self.uploaded(std)?);
        let (raw, n) = (Argument::Address(lent.address), (count * d) as u64);
        self.each(
            self.cuda.kernels.take_rows,
            count * d,
            1,
            &mut [
                (&out.data).into(),
                raw,
                (&chosen).into(),
                scale.into(),
                (&mean).into(),
                (&std).into(),
                d.into(),
                n.into(),
            ],
        )?;
        Ok(out)
    }
}
