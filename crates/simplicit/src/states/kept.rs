//! States of blocks that are read repeatedly, kept up to a number of bytes.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use crate::Result;
use crate::linalg::Matrix;

/// Z, X and Y of blocks of samples, found by their range.
#[derive(Default)]
pub(crate) struct Kept {
    /// Number of bytes that may still be taken.
    budget: u64,
    held: Mutex<Held>,
}

#[derive(Default)]
struct Held {
    bytes: u64,
    blocks: BTreeMap<(usize, usize), Arc<[Matrix; 3]>>,
}

impl Kept {
    /// Keeps at most this many bytes.
    pub(crate) fn new(bytes: u64) -> Self {
        Self { budget: bytes, ..Self::default() }
    }

    /// The block as it was kept, or computed now. Two threads that ask for the same block at the same time may both
    /// compute it.
    pub(crate) fn get_or(
        &self,
        samples: &Range<usize>,
        compute: impl FnOnce() -> Result<[Matrix; 3]>,
    ) -> Result<[Matrix; 3]> {
        let key = (samples.start, samples.end);
        let lock = || self.held.lock().unwrap_or_else(PoisonError::into_inner);
        // The lock is held only while the block is found, not while it is copied.
        let found = lock().blocks.get(&key).cloned();
        if let Some(block) = found {
            return Ok((*block).clone());
        }
        let block = compute()?;
        let size = 8 * block.iter().map(|m| m.as_slice().len() as u64).sum::<u64>();
        if lock().bytes + size <= self.budget {
            let copy = Arc::new(block.clone());
            let held = &mut *lock();
            if held.bytes + size <= self.budget && held.blocks.insert(key, copy).is_none() {
                held.bytes += size;
            }
        }
        Ok(block)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_computed_once_while_there_is_room() {
        let computed = std::sync::atomic::AtomicUsize::new(0);
        let kept = Kept::new(8 * 30);
        let read = |samples: Range<usize>| {
            let block = kept.get_or(&samples, || {
                computed.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                Ok(std::array::from_fn(|k| {
                    Matrix::from_fn(samples.len(), 2, |i, j| (samples.start + i + j + k) as f64)
                }))
            });
            block.unwrap()
        };
        // Five samples of six numbers fit, another four do not.
        for _ in 0..3 {
            assert_eq!(read(0..5)[1].row(4), [5.0, 6.0]);
            assert_eq!(read(5..9)[2].row(0), [7.0, 8.0]);
        }
        assert_eq!(computed.into_inner(), 1 + 3);
        assert!(Kept::default().get_or(&(0..1), || Err(crate::Error::Cancelled)).is_err());
    }
}
