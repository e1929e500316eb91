//! The observed range of every pre-activation.

use crate::parallel::{self, Cancel, Threads};
use crate::states::StateSource;
use crate::{Error, Result};

/// Samples that are read together.
const BLOCK: usize = 256;

/// Smallest and largest z_i over all samples of a source, one per state.
pub fn state_ranges(source: &dyn StateSource, threads: Threads, cancel: &Cancel) -> Result<Vec<(f64, f64)>> {
    let samples = source.samples();
    if samples == 0 {
        return Err(Error::shape("samples", "at least one", 0));
    }
    let mut ranges = vec![(f64::INFINITY, f64::NEG_INFINITY); source.shape().states];
    parallel::fold(
        threads,
        samples.div_ceil(BLOCK),
        |block| {
            cancel.check()?;
            Ok(source.block(block * BLOCK..((block + 1) * BLOCK).min(samples))?.z)
        },
        |_, z| {
            for i in 0..z.rows() {
                for (range, &value) in ranges.iter_mut().zip(z.row(i)) {
                    *range = (range.0.min(value), range.1.max(value));
                }
            }
            Ok(())
        },
    )?;
    Ok(ranges)
}
