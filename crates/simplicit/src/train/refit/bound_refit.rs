//! Refit of all non-zeros so that linear bounds prove more: gradient steps on what they prove of the training samples.
//!
//! For a sample whose class is c by the baseline, let m_j be the linear bound of y_c − y_j over all changes of size ε
//! ([`certify`]). Steps lower the mean of log(1 + Σ_j e^−m_j), an upper bound of the loss under any such change. Derivatives are
//! taken with the bounds' lines held ([`Certifier::lowest`]), so that each class gives one sample of an outer product:
//! [`Linearised::outer`]. Every tenth sample is not fitted; the model returned is the one of which most of these are certified,
//! after some pass or before the first. No labels.

use super::linearised::{Linearised, Samples};
use crate::arrays::PerFeature;
use crate::certify::{Bound, Certifier, CertifySettings};
use crate::linalg::Matrix;
use crate::model::ImplicitModel;
use crate::random::Random;
use crate::train::{Progress, Run, TrainInput, Trained};
use crate::{Error, Result, parallel};

/// Passes over the samples.
const PASSES: usize = 6;
/// Samples of a step.
const BATCH: usize = 32;
/// The first step moves a weight by about this share of the RMS of its layer's weights; steps shrink to nothing.
const RATE: f64 = 1e-2;
/// Of the running means of the gradient and of its square.
const MEANS: (f64, f64) = (0.9, 0.99);
/// One sample of so many is not fitted.
const HELD_OUT: usize = 10;

/// What the refit by linear bounds did.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BoundRefit {
    /// Largest change of an input, in raw·scale units.
    pub epsilon: f64,
    /// Share of held-out samples that are certified to keep the baseline's class, before.
    pub held_out_before: f64,
    /// The same of the model returned; never less.
    pub held_out_after: f64,
    /// Passes that led to it.
    pub passes: usize,
}

/// What bounds are asked for.
fn asked(epsilon: f64) -> CertifySettings {
    CertifySettings { epsilon: vec![epsilon], bound: Bound::Linear, ..CertifySettings::default() }
}

/// An error where linear bounds cannot be refitted to.
pub(in crate::train) fn check(model: &ImplicitModel, input: &TrainInput, epsilon: f64) -> Result<()> {
    if !(epsilon > 0.0 && epsilon.is_finite()) {
        return Err(Error::setting("robust-refit", "a positive number such as 1/255", epsilon));
    }
    if model.shape().outputs < 2 {
        return Err(Error::setting("robust-refit", "a network with two classes at least", "one output"));
    }
    Certifier::new(model, &spread(input), &asked(epsilon)).map(drop)
}

fn spread(input: &TrainInput) -> PerFeature {
    let (p, preprocessing) = (input.source.shape().inputs, &input.preprocessing);
    let each = |values: &[f64]| {
        let positions = p / values.len().max(1);
        values.iter().flat_map(|v| std::iter::repeat_n(*v, positions)).collect()
    };
    PerFeature { scale: preprocessing.scale, mean: each(&preprocessing.mean), std: each(&preprocessing.std) }
}

/// A trained model with its non-zeros refitted at ε.
pub(in crate::train) fn refitted(
    trained: Trained,
    input: &TrainInput,
    epsilon: f64,
    seed: u64,
    run: &mut Run,
) -> Result<Trained> {
    let Trained { mut model, mut report } = trained;
    let (support, mut w) = Linearised::of(&model);
    let features = spread(input);
    let problem = Problem { support: &support, features: &features, settings: &asked(epsilon), input };
    let samples = input.source.samples();
    let is_fitted = |s: &usize| samples < HELD_OUT || s % HELD_OUT != HELD_OUT - 1;
    let (mut fitted, held_out): (Vec<usize>, Vec<usize>) = (0..samples).partition(is_fitted);
    let scale = scales(&support, &w);
    let before = problem.certified(&model, &held_out, run)?;
    let mut best = (before, 0, model.clone());
    let (mut mean, mut square) = (vec![0.0; w.len()], vec![0.0; w.len()]);
    let steps = PASSES * fitted.len().div_ceil(BATCH);
    let mut step = 0;
    let mut random = Random::new(seed ^ 0x5707_d1e5);
    for pass in 0..PASSES {
        (1..fitted.len()).rev().for_each(|k| fitted.swap(k, random.below(k + 1)));
        for batch in fitted.chunks(BATCH) {
            let gradient = problem.gradient(&model, batch, run)?;
            let size = RATE * (1.0 - step as f64 / steps as f64);
            step += 1;
            let correct = (1.0 - MEANS.0.powi(step), 1.0 - MEANS.1.powi(step));
            for (k, g) in gradient.into_iter().enumerate() {
                mean[k] = MEANS.0 * mean[k] + (1.0 - MEANS.0) * g;
                square[k] = MEANS.1 * square[k] + (1.0 - MEANS.1) * g * g;
                let root = (square[k] / correct.1).sqrt();
                if root > 0.0 && root.is_finite() {
                    w[k] += size * scale[k] * (mean[k] / correct.0) / root;
                }
            }
            model = support.with_weights(&model, &w, false)?;
        }
        let now = problem.certified(&model, &held_out, run)?;
        (run.progress)(Progress::BoundRefit { pass: pass + 1, passes: PASSES, certified: now });
        if now > best.0 {
            best = (now, pass + 1, model.clone());
        }
    }
    let (after, passes, model) = best;
    report.bound_refit = Some(BoundRefit { epsilon, held_out_before: before, held_out_after: after, passes });
    Ok(Trained { model, report })
}

/// The RMS of the weights of every non-zero's target.
fn scales(support: &Linearised, w: &[f64]) -> Vec<f64> {
    let mut scale = vec![0.0; w.len()];
    for target in support.targets() {
        let own = &w[target.entries.clone()];
        let rms = (own.iter().map(|v| v * v).sum::<f64>() / own.len().max(1) as f64).sqrt();
        scale[target.entries].fill(rms);
    }
    scale
}

struct Problem<'a> {
    support: &'a Linearised,
    features: &'a PerFeature,
    settings: &'a CertifySettings,
    input: &'a TrainInput<'a>,
}

impl Problem<'_> {
    /// A sample and its class by the baseline.
    fn sample(&self, s: usize) -> Result<(Matrix<f32>, usize)> {
        let (u, y) = self.input.source.ends(s..s + 1)?;
        let class = (0..y.cols()).fold(0, |best, j| if y[(0, j)] > y[(0, best)] { j } else { best });
        Ok((u, class))
    }

    /// Share of some samples that linear bounds certify to have the baseline's class.
    fn certified(&self, model: &ImplicitModel, samples: &[usize], run: &Run) -> Result<f64> {
        let certifier = Certifier::new(model, self.features, self.settings)?;
        let proved = parallel::map(run.threads, samples.len(), |k| {
            let (u, class) = self.sample(samples[k])?;
            let found = certifier.lowest(u.row(0), class, run.cancel)?;
            Ok(found.is_some_and(|found| found.margins.iter().all(|m| *m > 0.0)))
        })?;
        Ok(proved.iter().filter(|p| **p).count() as f64 / samples.len().max(1) as f64)
    }

    /// Minus the gradient of Σ log(1 + Σ_j e^−m_j), one number per non-zero.
    fn gradient(&self, model: &ImplicitModel, samples: &[usize], run: &Run) -> Result<Vec<f64>> {
        let certifier = Certifier::new(model, self.features, self.settings)?;
        let mut total: Vec<f64> = Vec::new();
        let work = |k: usize| {
            let (u, class) = self.sample(samples[k])?;
            let Some(mut found) = certifier.lowest(u.row(0), class, run.cancel)? else { return Ok(None) };
            // e^−m_j over 1 + their sum, without overflow.
            let top = found.margins.iter().fold(0.0f64, |top, m| top.max(-m));
            let sum = (-top).exp() + found.margins.iter().map(|m| (-m - top).exp()).sum::<f64>();
            for (j, m) in found.margins.iter().enumerate() {
                let share = ((-m - top).exp() / sum) as f32;
                found.r.row_mut(j).iter_mut().chain(found.v.row_mut(j)).for_each(|c| *c *= share);
            }
            let at = Samples { u: &found.u, x: &found.x, gates: &Matrix::zeros(0, 0) };
            Ok(Some(self.support.outer(&found.r, &found.v, &at)))
        };
        parallel::fold(run.threads, samples.len(), work, |_, part| {
            match part {
                Some(part) if total.is_empty() => total = part,
                Some(part) => total.iter_mut().zip(part).for_each(|(t, p)| *t += p),
                None => {}
            }
            Ok(())
        })?;
        Ok(total)
    }
}
