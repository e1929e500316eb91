//! Refits all non-zeros so that linear bounds prove more: gradient steps on the bounds of the training samples.
//!
//! For a sample whose class is c by the baseline, let m_j be the linear bound of y_c − y_j over all changes of size ε
//! ([`certify`]). Steps raise the mean of 1/(1 + Σ_j e^(−s·m_j)), a smooth count of the samples that are proved: a
//! sample that is far from proved, or proved with a large margin, hardly counts, the less the larger s is. This term
//! alone would sacrifice accuracy without any change. So the objective has a second term: minus the divergence of the
//! outputs without change from the baseline's.
//!
//! A bound needs its intervals and a substitution of the margins, which is about ten times cheaper. So intervals are
//! computed only once. During the passes they follow the weights as plain intervals do, each with a factor
//! ([`Spread`]). The gradient has four parts: with lines held, each class gives one sample of an outer product
//! ([`Linearised::outer`]); lines move with the clean values; lines move with the intervals' widths, which magnitudes
//! of weights carry from layer to layer; and the divergence, which shares the adjoint of the clean values.
//!
//! Every fifth sample is not fitted. Of the models before and after the steps, the one with more of these certified
//! is returned. No labels are needed.
//!
//! [`certify`]: crate::certify

use super::linearised::{Linearised, Samples, Weights, gates};
use super::output_metric::Metric;
use crate::arrays::PerFeature;
use crate::certify::{Bound, Certifier, CertifySettings, Spread};
use crate::linalg::Matrix;
use crate::model::ImplicitModel;
use crate::parallel::Cancel;
use crate::random::Random;
use crate::train::{Progress, Run, TrainInput, Trained};
use crate::{Error, Result, parallel};

/// How often intervals are computed.
const ROUNDS: usize = 1;
/// Passes over the samples in each round, and the fewest steps in all: few samples have more passes.
const PASSES: usize = 6;
const LEAST_STEPS: usize = 225;
/// Number of samples in a step.
const BATCH: usize = 32;
/// The first step moves a weight by about this share of the RMS of its layer's weights; steps shrink to nothing.
const RATE: f64 = 2e-3;
/// Factors of the running means of the gradient and of its square.
const MEANS: (f64, f64) = (0.9, 0.99);
/// The objective that steps raise.
const AIM: Aim = Aim { sharpness: 2.0, keep: 1.0 };
/// One sample in this many is not fitted.
const HELD_OUT: usize = 5;
/// The most multiply-adds for all intervals, about half an hour of one core. If there are more samples than that
/// allows, only the first ones are used.
const MOST_WORK: u64 = 1 << 46;
/// Fewer samples than these are not worth a refit.
const LEAST_SAMPLES: usize = 100;
/// Number of samples whose cost is measured before the rest.
const PROBES: usize = 8;

/// The objective that steps raise, for one sample: 1/(1 + Σ_j e^(−sharpness·m_j)) − keep·KL(p*‖p), where p* and p are
/// the baseline's and the model's class probabilities without any change.
#[derive(Debug, Clone, Copy)]
struct Aim {
    sharpness: f64,
    keep: f64,
}

/// How the outputs of samples without any change are compared with the baseline's.
const CLEAN: Metric = Metric::Softmax { scale: 1.0 };

/// The results of the refit by linear bounds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BoundRefit {
    /// Largest change of an input, in raw·scale units.
    pub epsilon: f64,
    /// Number of samples that were used, those held out included.
    pub samples: usize,
    /// Share of held-out samples that are certified to keep the baseline's class, before the refit.
    pub held_out_before: f64,
    /// The same share for the returned model; never less.
    pub held_out_after: f64,
    /// Number of rounds that led to the returned model.
    pub rounds: usize,
}

/// The settings of the bounds.
fn asked(epsilon: f64) -> CertifySettings {
    let work = MOST_WORK / (LEAST_SAMPLES * (ROUNDS + 1)) as u64;
    CertifySettings { epsilon: vec![epsilon], bound: Bound::Linear, work, ..CertifySettings::default() }
}

/// An error for models and inputs for which there are no linear bounds.
pub(in crate::train) fn check(model: &ImplicitModel, input: &TrainInput, epsilon: f64) -> Result<()> {
    if !(epsilon > 0.0 && epsilon.is_finite()) {
        return Err(Error::setting("robust-refit", "a positive number such as 1/255", epsilon));
    }
    if model.shape().outputs < 2 {
        return Err(Error::setting("robust-refit", "a network with two classes at least", "one output"));
    }
    let (features, settings) = (per_feature(input)?, asked(epsilon));
    let certifier = Certifier::new(model, &features, &settings)?;
    let (u, _) = input.source.ends(0..1)?;
    if certifier.spread(u.row(0), &Cancel::new())?.is_none() {
        let expected =
            format!("a network whose intervals take at most {:.0e} multiply-adds a sample", settings.work as f64);
        return Err(Error::setting("robust-refit", expected, "one that takes more"));
    }
    Ok(())
}

/// The preprocessing of every value of a sample; the number of values is known, the shape is not.
fn per_feature(input: &TrainInput) -> Result<PerFeature> {
    let (inputs, preprocessing) = (input.source.shape().inputs, &input.preprocessing);
    let channels = preprocessing.mean.len().max(preprocessing.std.len()).max(1);
    preprocessing.per_feature(&[channels, inputs / channels, 1])
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
    let features = per_feature(input)?;
    let problem = Problem { support: &support, features: &features, settings: &asked(epsilon), input };
    let all = input.source.samples();
    let (samples, work) = problem.affordable(&model, all, run)?;
    (run.progress)(Progress::BoundRefitBegins { samples, of: all, multiply_adds: work });
    let is_fitted = |s: &usize| samples < HELD_OUT || s % HELD_OUT != HELD_OUT - 1;
    let (fitted, held_out): (Vec<usize>, Vec<usize>) = (0..samples).partition(is_fitted);
    let scale = scales(&support, &w);
    let before = problem.certified(&model, &held_out, run)?;
    let mut best = (before, 0, model.clone());
    let (mut mean, mut square) = (vec![0.0; w.len()], vec![0.0; w.len()]);
    let batches = fitted.len().div_ceil(BATCH).max(1);
    let passes = PASSES.max(LEAST_STEPS.div_ceil(ROUNDS * batches));
    let steps = ROUNDS * passes * batches;
    let mut step = 0;
    let mut random = Random::new(seed ^ 0x5707_d1e5);
    let mut order: Vec<usize> = (0..fitted.len()).collect();
    for round in 0..ROUNDS {
        let spreads = problem.spreads(&model, &fitted, run)?;
        for _ in 0..passes {
            (1..order.len()).rev().for_each(|k| order.swap(k, random.below(k + 1)));
            for batch in order.chunks(BATCH) {
                let batch: Vec<(usize, &Spread)> =
                    batch.iter().filter_map(|&k| Some((fitted[k], spreads[k].as_ref()?))).collect();
                let gradient = problem.gradient(&model, &support.dense(&w), &batch, &AIM, run)?;
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
        }
        let now = problem.certified(&model, &held_out, run)?;
        (run.progress)(Progress::BoundRefit { round: round + 1, rounds: ROUNDS, certified: now });
        if now > best.0 {
            best = (now, round + 1, model.clone());
        }
    }
    let (after, rounds, model) = best;
    report.bound_refit = Some(BoundRefit { epsilon, samples, held_out_before: before, held_out_after: after, rounds });
    Ok(Trained { model, report })
}

/// The number of samples to use, if each costs `each` multiply-adds.
fn taken(samples: usize, each: u64) -> usize {
    samples.min((MOST_WORK / each.max(1)) as usize).max(samples.min(LEAST_SAMPLES))
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
    /// A sample and the baseline's outputs for it.
    fn sample(&self, s: usize) -> Result<(Matrix<f32>, Matrix<f32>)> {
        let (u, y) = self.input.source.ends(s..s + 1)?;
        Ok((u, y.cast()))
    }

    /// The number of samples to use, and the multiply-adds of their intervals in all rounds, estimated from the first
    /// samples.
    fn affordable(&self, model: &ImplicitModel, samples: usize, run: &Run) -> Result<(usize, u64)> {
        let probes: Vec<usize> = (0..samples.min(PROBES)).collect();
        let found = self.spreads(model, &probes, run)?;
        let total: u64 = found.iter().map(|s| s.as_ref().map_or(self.settings.work, |s| s.work)).sum();
        let each = (total / probes.len().max(1) as u64).max(1) * (ROUNDS + 1) as u64;
        let taken = taken(samples, each);
        Ok((taken, each * taken as u64))
    }

    /// The intervals of some samples.
    fn spreads(&self, model: &ImplicitModel, samples: &[usize], run: &Run) -> Result<Vec<Option<Spread>>> {
        let certifier = Certifier::new(model, self.features, self.settings)?;
        parallel::map(run.threads, samples.len(), |k| {
            let (u, _) = self.sample(samples[k])?;
            certifier.spread(u.row(0), run.cancel)
        })
    }

    /// Share of some samples that linear bounds certify to have the baseline's class.
    fn certified(&self, model: &ImplicitModel, samples: &[usize], run: &Run) -> Result<f64> {
        let certifier = Certifier::new(model, self.features, self.settings)?;
        let proved = parallel::map(run.threads, samples.len(), |k| {
            let (u, y) = self.sample(samples[k])?;
            let found = certifier.proved(u.row(0), largest(&y), run.cancel)?;
            Ok(found.is_some_and(|margins| margins.iter().all(|m| *m > 0.0)))
        })?;
        Ok(proved.iter().filter(|p| **p).count() as f64 / samples.len().max(1) as f64)
    }

    /// The gradient of the objective, summed over some samples: one number per non-zero.
    fn gradient(
        &self,
        model: &ImplicitModel,
        weights: &Weights,
        samples: &[(usize, &Spread)],
        aim: &Aim,
        run: &Run,
    ) -> Result<Vec<f64>> {
        let certifier = Certifier::new(model, self.features, self.settings)?;
        let mut total: Vec<f64> = Vec::new();
        let work = |k: usize| {
            let (s, spread) = samples[k];
            let (u, y) = self.sample(s)?;
            Ok(ascent(&certifier, self.support, weights, (&u, &y), spread, aim)?.1)
        };
        parallel::fold(run.threads, samples.len(), work, |_, part| {
            if total.is_empty() {
                total = part;
            } else {
                total.iter_mut().zip(part).for_each(|(t, p)| *t += p);
            }
            Ok(())
        })?;
        Ok(total)
    }
}

/// The class with the largest output.
fn largest(y: &Matrix<f32>) -> usize {
    (0..y.cols()).fold(0, |best, j| if y[(0, j)] > y[(0, best)] { j } else { best })
}

/// The objective for a sample with the baseline's outputs, and its gradient.
fn ascent(
    certifier: &Certifier,
    support: &Linearised,
    weights: &Weights,
    (u, y): (&Matrix<f32>, &Matrix<f32>),
    spread: &Spread,
    aim: &Aim,
) -> Result<(f64, Vec<f64>)> {
    let mut found = certifier.lowest(u.row(0), spread, largest(y))?;
    // e^−m_j over 1 + their sum, without overflow.
    let exponents: Vec<f64> = found.margins.iter().map(|m| -aim.sharpness * m).collect();
    let top = exponents.iter().copied().fold(0.0f64, f64::max);
    let sum = (-top).exp() + exponents.iter().map(|e| (e - top).exp()).sum::<f64>();
    let probability = (-top).exp() / sum;
    let apart = CLEAN.value(found.outputs.row(0), y.row(0));
    let mut pull = CLEAN.gradient(&found.outputs, y).1;
    pull.as_mut_slice().iter_mut().for_each(|v| *v *= -aim.keep as f32);
    let states = found.ends.len();
    let (mut by_low, mut by_high) = (vec![0.0f32; states], vec![0.0f32; states]);
    for (j, e) in exponents.iter().enumerate() {
        let share = (aim.sharpness * probability * (e - top).exp() / sum) as f32;
        found.r.row_mut(j).iter_mut().chain(found.v.row_mut(j)).for_each(|c| *c *= share);
        let add = |total: &mut [f32], own: &[f32]| total.iter_mut().zip(own).for_each(|(t, o)| *t += share * o);
        add(&mut by_low, found.by_low.row(j));
        add(&mut by_high, found.by_high.row(j));
    }
    let (none, no_outputs) = (Matrix::zeros(0, 0), Matrix::zeros(1, found.v.cols()));
    let mut gradient = support.outer(&found.r, &found.v, &Samples { u: &found.u, x: &found.x, gates: &none });
    // An end is z − below·R or z + above·R, R = |W|h over the half-widths h of what the unit reads; h is half of the
    // upper end of an unstable unit and half of the width of an active one. (This is for a ReLU; widths after other
    // activations are assumed to change in the same way.)
    let (mut own, mut gains) = (Matrix::<f32>::zeros(1, states), Matrix::<f32>::zeros(1, states));
    for i in 0..states {
        let ((low, high), below, above) = (found.ends[i], spread.below[i], spread.above[i]);
        own[(0, i)] = above * by_high[i] - below * by_low[i];
        gains[(0, i)] = match (low >= 0.0, high > 0.0) {
            (true, _) => 0.5 * (above + below),
            (false, true) => 0.5 * above,
            _ => 0.0,
        };
    }
    let mut magnitudes = weights.clone();
    magnitudes.iter_mut().flat_map(|m| m.as_mut_slice()).for_each(|w| *w = w.abs());
    let at = Samples { u: &found.half.0, x: &found.half.1, gates: &gains };
    let by_width = support.adjoint(&magnitudes, &no_outputs, &own, &at);
    let widths = support.outer(&by_width, &no_outputs, &at);
    support.add_signed(weights, &widths, &mut gradient);
    let (z, x) = &found.clean;
    let mut by_clean = Matrix::<f32>::zeros(1, states);
    for i in 0..states {
        let (gain, unstable) = (gains[(0, i)], found.ends[i].0 < 0.0 && found.ends[i].1 > 0.0);
        let through = if unstable && gain > 0.0 { 0.5 * (by_width[(0, i)] - own[(0, i)]) / gain } else { 0.0 };
        by_clean[(0, i)] = by_low[i] + by_high[i] + through;
    }
    let gates = gates(certifier.layout(), z);
    let clean = support.backward(weights, &pull, &by_clean, &Samples { u, x, gates: &gates });
    gradient.iter_mut().zip(clean).for_each(|(g, c)| *g += c);
    Ok((probability - aim.keep * apart, gradient))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::certify::tests::{SMALL, random_model};
    use crate::layout::{Activation, Layer, Layout};

    /// Of many samples as many are used as half an hour of one core allows, but at least a hundred.
    #[test]
    fn samples_are_limited_by_their_cost() {
        for each in [1, 1_000_000, 10_000_000_000, 1_000_000_000_000] {
            for samples in [10, 100, 5000, 100_000_000] {
                let taken = taken(samples, each);
                let cost = |n: usize| n as u128 * u128::from(each);
                assert!(taken <= samples && taken >= samples.min(100), "{each} {samples}: {taken}");
                assert!(taken <= 100 || cost(taken) <= 1 << 46, "{each} {samples}: {taken}");
                assert!(taken == samples || cost(taken + 1) > 1 << 46, "{each} {samples}: {taken}");
            }
        }
    }

    /// The gradient agrees with differences, where lines and intervals follow the weights.
    #[test]
    fn the_gradient_is_that_of_the_bound() {
        let mut r = Random::new(47);
        let (mut seen, mut unstable, mut size, mut error) = (0, 0, 0.0f64, 0.0f64);
        for round in 0..12 {
            let mut parts = random_model(&mut r, false, 0.8).into_parts();
            let relu = |name: &str, size| Layer::dense(name, size, Activation::Relu);
            parts.layout = Layout::new(vec![relu("third", 4), relu("second", 5), relu("first", 5)]);
            let model = ImplicitModel::new(parts).unwrap();
            let u = Matrix::from_vec(1, SMALL, (0..SMALL).map(|_| r.uniform() as f32).collect()).unwrap();
            let features = PerFeature { scale: 1.0, mean: vec![0.0; SMALL], std: vec![0.5; SMALL] };
            let settings = CertifySettings { epsilon: vec![0.03], ..CertifySettings::default() };
            let first = Certifier::new(&model, &features, &settings).unwrap();
            let spread = first.spread(u.row(0), &Cancel::new()).unwrap().unwrap();
            let (support, w) = Linearised::of(&model);
            let aim = Aim { sharpness: [1.0, 3.0][round % 2], keep: [0.0, 0.3, 2.0][round % 3] };
            // Some outputs of a baseline, the first of them the largest.
            let wanted =
                Matrix::from_fn(1, model.shape().outputs, |_, j| if j == 0 { 2.0 } else { r.uniform() as f32 });
            let at = |w: &[f64]| {
                let model = support.with_weights(&model, w, false).unwrap();
                let certifier = Certifier::new(&model, &features, &settings).unwrap();
                ascent(&certifier, &support, &support.dense(w), (&u, &wanted), &spread, &aim).unwrap()
            };
            let (value, gradient) = at(&w);
            let found = first.lowest(u.row(0), &spread, 0).unwrap();
            unstable += found.ends.iter().filter(|(low, high)| *low < 0.0 && *high > 0.0).count();
            for k in (0..w.len()).step_by(3) {
                let moved = |by: f64| {
                    let mut w = w.clone();
                    w[k] += by;
                    at(&w).0
                };
                let (up, down) = ((moved(2e-3) - value) / 2e-3, (value - moved(-2e-3)) / 2e-3);
                // A line that changes its branch within the step has no derivative there.
                if (up - down).abs() > 0.05 * (0.02 + up.abs()) {
                    continue;
                }
                let expected = 0.5 * (up + down);
                let off = (gradient[k] - expected).abs();
                assert!(off < 0.05 * (0.02 + expected.abs()), "{round} {k}: {} {expected}", gradient[k]);
                seen += usize::from(expected.abs() > 0.01);
                error += off;
                size += expected.abs();
            }
        }
        assert!(seen > 100 && unstable > 10 && error < 0.02 * size, "{seen} {unstable} {error} {size}");
    }
}
