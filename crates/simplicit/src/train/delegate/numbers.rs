//! Tasks and results as numbers, written to bytes and read from them.

use crate::{Error, Result};

/// Numbers as bytes, little-endian.
pub fn to_bytes(numbers: &[f64]) -> Vec<u8> {
    let mut out = vec![0; 8 * numbers.len()];
    out.as_chunks_mut::<8>().0.iter_mut().zip(numbers).for_each(|(word, v)| *word = v.to_le_bytes());
    out
}

/// The inverse of [`to_bytes`].
pub fn from_bytes(bytes: &[u8]) -> Result<Vec<f64>> {
    match bytes.as_chunks::<8>() {
        (numbers, []) => Ok(numbers.iter().map(|c| f64::from_le_bytes(*c)).collect()),
        _ => Err(Error::shape("numbers of a worker", "8 bytes each", format!("{} bytes", bytes.len()))),
    }
}

/// The numbers that are left to read.
pub(in crate::train) struct Numbers<'a>(pub(in crate::train) &'a [[u8; 8]]);

impl Numbers<'_> {
    pub(in crate::train) fn next(&mut self) -> Option<f64> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(f64::from_le_bytes(*first))
    }

    /// A number of things that follow; there cannot be more of them than numbers are left.
    pub(in crate::train) fn count(&mut self) -> Option<usize> {
        self.next().filter(|v| *v >= 0.0 && v.fract() == 0.0 && *v < 9e15).map(|v| v as usize)
    }

    /// A list of numbers, or `Some(None)` if there is none.
    #[allow(clippy::option_option)]
    pub(in crate::train) fn list(&mut self) -> Option<Option<Vec<f64>>> {
        let length = self.next()?;
        if length == -1.0 {
            return Some(None);
        }
        let length = Some(length).filter(|v| *v >= 0.0 && *v <= self.0.len() as f64)? as usize;
        let (values, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(Some(values.iter().map(|c| f64::from_le_bytes(*c)).collect()))
    }
}
