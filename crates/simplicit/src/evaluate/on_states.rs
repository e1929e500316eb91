//! How far a model's outputs are from those that a source has for its samples.

use crate::Result;
use crate::equilibrium::{Equilibrium, EquilibriumSettings, not_converged};
use crate::model::ImplicitModel;
use crate::parallel::{self, Cancel, Threads};
use crate::states::StateSource;

/// Samples a thread takes at a time.
const BLOCK: usize = 256;

/// RMS of (model − source outputs) / RMS of the source's over all its samples, and how many did not converge.
pub fn error_on_states(
    model: &ImplicitModel,
    source: &dyn StateSource,
    threads: Threads,
    cancel: &Cancel,
) -> Result<(f64, u64)> {
    let settings = EquilibriumSettings { threads: Threads::one(), ..Default::default() };
    let equilibrium = Equilibrium::new(model, settings)?;
    let samples = source.samples();
    let (mut difference, mut energy, mut lost) = (0.0, 0.0, 0);
    parallel::fold(
        threads,
        samples.div_ceil(BLOCK),
        |block| {
            cancel.check()?;
            let (u, y) = source.ends(block * BLOCK..((block + 1) * BLOCK).min(samples))?;
            let solution = equilibrium.outputs(&u)?;
            let (mut d, mut e) = (0.0, 0.0);
            for (model, baseline) in solution.y.as_slice().iter().zip(y.as_slice()) {
                d += (f64::from(*model) - baseline).powi(2);
                e += baseline.powi(2);
            }
            Ok((d, e, not_converged(&solution.diagnostics).len() as u64))
        },
        |_, (d, e, n)| {
            difference += d;
            energy += e;
            lost += n;
            Ok(())
        },
    )?;
    Ok((if energy > 0.0 { (difference / energy).sqrt() } else { 0.0 }, lost))
}
