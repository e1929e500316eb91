//! The error of a model's outputs against the outputs that a source of states has for its samples.

use crate::backend::Device;
use crate::equilibrium::{DeviceModel, Equilibrium, EquilibriumSettings, not_converged};
use crate::linalg::Matrix;
use crate::model::ImplicitModel;
use crate::parallel::{self, Cancel, Threads};
use crate::states::StateSource;
use crate::{Error, Result};

/// Samples that are read for a GPU at a time.
const CHUNK: usize = 4096;

/// Computes the contribution of a block of samples to the error of a model's outputs: Σ(model − baseline)², Σ
/// baseline² and how many samples did not converge.
pub(crate) struct OutputErrors {
    model: Equilibrium,
    /// The baseline, if it computes outputs faster than their source does.
    baseline: Option<Equilibrium>,
}

impl OutputErrors {
    /// Number of samples in a block.
    pub(crate) const BLOCK: usize = 256;

    /// For a model against the outputs of a baseline, or of a source.
    pub(crate) fn new(model: &ImplicitModel, baseline: Option<&ImplicitModel>) -> Result<Self> {
        // Whether a sample has an equilibrium is known without bounding its error.
        let settings = EquilibriumSettings { threads: Threads::one(), certified: false, ..Default::default() };
        let baseline = baseline.filter(|b| Self::need_inputs_alone(b));
        let baseline = baseline.map(|b| Equilibrium::new(b, settings)).transpose()?;
        Ok(Self { model: Equilibrium::new(model, settings)?, baseline })
    }

    /// Whether this baseline can compute the outputs to compare with, so that inputs alone are needed.
    pub(crate) fn need_inputs_alone(baseline: &ImplicitModel) -> bool {
        baseline.layers_are_acyclic() && !baseline.taps().is_empty()
    }

    /// The contribution of samples from their inputs alone; `first` is the number of the first of them. `None`
    /// without a baseline.
    pub(crate) fn of_inputs(&self, u: &Matrix<f32>, first: usize) -> Result<Option<[f64; 3]>> {
        self.baseline.as_ref().map(|baseline| self.beside(baseline, u, first)).transpose()
    }

    fn beside(&self, baseline: &Equilibrium, u: &Matrix<f32>, first: usize) -> Result<[f64; 3]> {
        let y: Matrix = baseline.outputs(u)?.y.cast();
        y.require_finite("Y", first)?;
        self.against(u, &y)
    }

    fn against(&self, u: &Matrix<f32>, y: &Matrix) -> Result<[f64; 3]> {
        let solution = self.model.outputs(u)?;
        let (mut difference, mut energy) = (0.0, 0.0);
        for (model, baseline) in solution.y.as_slice().iter().zip(y.as_slice()) {
            difference += (f64::from(*model) - baseline).powi(2);
            energy += baseline.powi(2);
        }
        Ok([difference, energy, not_converged(&solution.diagnostics).len() as f64])
    }

    /// RMS of the difference divided by that of the baseline, and the number of samples that did not converge, from
    /// the sums over all blocks.
    pub(crate) fn total(sums: [f64; 3]) -> (f64, u64) {
        let [difference, energy, lost] = sums;
        (if energy > 0.0 { (difference / energy).sqrt() } else { 0.0 }, lost as u64)
    }
}

/// RMS of (model − source outputs) / RMS of the source's over all its samples, and how many did not converge. Where
/// it is faster, the source's outputs are computed by `baseline`, which is the model that its states belong to.
pub(crate) fn error_on_states(
    model: &ImplicitModel,
    baseline: Option<&ImplicitModel>,
    source: &dyn StateSource,
    threads: Threads,
    cancel: &Cancel,
) -> Result<(f64, u64)> {
    let errors = OutputErrors::new(model, baseline)?;
    let (size, samples, mut total) = (OutputErrors::BLOCK, source.samples(), [0.0; 3]);
    parallel::fold(
        threads,
        samples.div_ceil(size),
        |block| {
            cancel.check()?;
            let range = block * size..((block + 1) * size).min(samples);
            let first = range.start;
            match &errors.baseline {
                Some(baseline) => errors.beside(baseline, &source.inputs(range)?, first),
                None => source.ends(range).and_then(|(u, y)| errors.against(&u, &y)),
            }
        },
        |_, sums| {
            total.iter_mut().zip(sums).for_each(|(total, sum)| *total += sum);
            Ok(())
        },
    )?;
    Ok(OutputErrors::total(total))
}

/// [`error_on_states`] on a GPU, with the outputs of `baseline`, the model that the source's states belong to; `None`
/// if the CPU has to compute it.
pub(crate) fn error_on_gpu(
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
