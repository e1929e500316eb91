//! How far a model's outputs are from those that a source has for its samples.

use crate::backend::Device;
use crate::equilibrium::{DeviceModel, Equilibrium, EquilibriumSettings, not_converged};
use crate::linalg::Matrix;
use crate::model::ImplicitModel;
use crate::parallel::{self, Cancel, Threads};
use crate::states::StateSource;
use crate::{Error, Result};

/// Samples a thread takes at a time.
const BLOCK: usize = 256;
/// Samples read for a GPU at a time.
const CHUNK: usize = 4096;

/// RMS of (model − source outputs) / RMS of the source's over all its samples, and how many did not converge. The source's
/// outputs are computed by `baseline`, whose states it has, where that is faster.
pub fn error_on_states(
    model: &ImplicitModel,
    baseline: Option<&ImplicitModel>,
    source: &dyn StateSource,
    threads: Threads,
    cancel: &Cancel,
) -> Result<(f64, u64)> {
    // Whether a sample has an equilibrium is known without a bound on its error.
    let settings = EquilibriumSettings { threads: Threads::one(), certified: false, ..Default::default() };
    let equilibrium = Equilibrium::new(model, settings)?;
    let fast = baseline.filter(|b| b.layers_are_acyclic() && !b.taps().is_empty());
    let baseline = fast.map(|b| Equilibrium::new(b, settings)).transpose()?;
    let samples = source.samples();
    let (mut difference, mut energy, mut lost) = (0.0, 0.0, 0);
    parallel::fold(
        threads,
        samples.div_ceil(BLOCK),
        |block| {
            cancel.check()?;
            let range = block * BLOCK..((block + 1) * BLOCK).min(samples);
            let (u, y) = match &baseline {
                None => source.ends(range)?,
                Some(baseline) => {
                    let first = range.start;
                    let u = source.inputs(range)?;
                    let y: Matrix = baseline.outputs(&u)?.y.cast();
                    y.require_finite("Y", first)?;
                    (u, y)
                }
            };
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

/// [`error_on_states`] on a GPU, with the outputs of `baseline`, whose states the source has; `None`: the CPU has to do it.
pub fn error_on_gpu(
    device: Device,
    model: &ImplicitModel,
    baseline: Option<&ImplicitModel>,
    source: &dyn StateSource,
    threads: Threads,
    cancel: &Cancel,
) -> Result<Option<(f64, u64)>> {
    let on = |model| DeviceModel::on(device, model, threads);
    let (Some(model), Some(Some(baseline))) = (on(model)?, baseline.map(on).transpose()?) else { return Ok(None) };
    let samples = source.samples();
    let (mut difference, mut energy, mut lost) = (0.0, 0.0, 0);
    for first in (0..samples).step_by(CHUNK) {
        let u = source.inputs(first..(first + CHUNK).min(samples))?;
        let outputs = model.outputs(&u, cancel).and_then(|y| Ok((y, baseline.outputs(&u, cancel)?)));
        let (y, exact) = match outputs {
            Err(Error::Device { .. }) if device == Device::Auto => return Ok(None),
            outputs => outputs?,
        };
        for (y, exact) in y.as_slice().iter().zip(exact.as_slice()) {
            difference += (f64::from(*y) - f64::from(*exact)).powi(2);
            energy += f64::from(*exact).powi(2);
        }
        lost += (0..y.rows()).filter(|&i| y.row(i).iter().any(|v| !v.is_finite())).count() as u64;
    }
    Ok(Some((if energy > 0.0 { (difference / energy).sqrt() } else { 0.0 }, lost)))
}
