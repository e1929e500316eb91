//! FGSM and PGD: steps along the sign of a gradient inside the box, or along the gradient itself inside the ball.
//!
//! PGD's first start is FGSM's point, and it climbs the cross-entropy. The others are random points, each of which
//! climbs towards one other class: the second start towards the one with the largest output, the third towards the
//! next. The cross-entropy mixes the gradients of all other classes; a start with one target class follows that class
//! alone. Steps shrink to nothing.

use super::classifier::{Classifier, Loss, fooled};
use super::region::{Part, pick, stream};
use super::{AttackSettings, Method};
use crate::Result;
use crate::random::Random;

const START: u64 = 2;

/// The number of steps and their size.
pub(super) struct Steps {
    /// For every value, the factor from raw·scale units to its own units.
    inverse: Vec<f64>,
    /// Size of PGD's first step, and of FGSM's step, in raw·scale units.
    step: f64,
    epsilon: f64,
    /// Number of steps; 0 means FGSM.
    iterations: usize,
    restarts: usize,
    seed: u64,
    first: usize,
}

impl Steps {
    pub(super) fn of(settings: &AttackSettings, method: Method, epsilon: f64, std: &[f64], first: usize) -> Self {
        let step = settings.step.unwrap_or(epsilon);
        let (iterations, restarts) = match method {
            Method::Pgd => (settings.iterations, settings.restarts),
            _ => (0, 1),
        };
        let inverse = std.iter().map(|s| 1.0 / s).collect();
        Self { inverse, step, epsilon, iterations, restarts, seed: settings.seed, first }
    }
}

/// For every sample, whether some point on the way fooled the target. `source` is the model that gives the gradient,
/// if that is not the target.
pub(super) fn search(
    target: &Classifier,
    source: Option<&Classifier>,
    part: &Part,
    steps: &Steps,
) -> Result<Vec<bool>> {
    let mut found = vec![false; part.samples.len()];
    // Samples that are not yet fooled, and the points that they have reached.
    let mut open: Vec<usize> = (0..found.len()).collect();
    let (clean, first) = source.unwrap_or(target).loss_gradient(&part.u, &part.labels, Loss::CrossEntropy)?;
    let ranked: Vec<Vec<u32>> = (0..found.len()).map(|s| others(clean.row(s), part.labels[s])).collect();
    let mut start = part.u.clone();
    for s in 0..start.rows() {
        if part.ball.is_some() {
            part.along(s, first.row(s), steps.epsilon, start.row_mut(s));
            continue;
        }
        for k in 0..start.cols() {
            start[(s, k)] = towards(first[(s, k)], part.low[(s, k)], part.u[(s, k)], part.high[(s, k)]);
        }
    }
    let mut streams: Vec<Random> = part.samples.iter().map(|&s| stream(steps.seed, steps.first + s, START)).collect();
    for restart in 0..steps.restarts {
        if restart > 0 {
            for &s in &open {
                for k in 0..start.cols() {
                    let (low, high) = (part.low[(s, k)], part.high[(s, k)]);
                    start[(s, k)] = (low + streams[s].uniform() as f32 * (high - low)).clamp(low, high);
                }
                part.draw_into_ball(s, start.row_mut(s));
            }
        }
        let mut x = pick(&start, &open);
        for iteration in 0..=steps.iterations {
            let labels: Vec<u32> = open.iter().map(|&s| part.labels[s]).collect();
            let last = iteration == steps.iterations;
            let classes: Option<Vec<u32>> = match restart {
                0 => None,
                _ => open.iter().map(|&s| ranked[s].get((restart - 1) % ranked[s].len().max(1)).copied()).collect(),
            };
            let loss = classes.as_deref().map_or(Loss::CrossEntropy, Loss::Towards);
            // White box: the target's outputs come with its gradient.
            let (logits, gradient) = match (source, last) {
                (None, false) => {
                    let (logits, gradient) = target.loss_gradient(&x, &labels, loss)?;
                    (logits, Some(gradient))
                }
                (_, true) => (target.logits(&x)?, None),
                (Some(source), false) => (target.logits(&x)?, Some(source.loss_gradient(&x, &labels, loss)?.1)),
            };
            let hit = fooled(&logits, &labels);
            open.iter().zip(&hit).filter(|(_, hit)| **hit).for_each(|(&s, _)| found[s] = true);
            let keep: Vec<usize> = (0..open.len()).filter(|&i| !hit[i]).collect();
            if let Some(gradient) = gradient {
                let mut next = pick(&x, &keep);
                let size = steps.step * (1.0 - iteration as f64 / steps.iterations as f64);
                for (row, &i) in keep.iter().enumerate() {
                    let s = open[i];
                    if part.ball.is_some() {
                        part.along(s, gradient.row(i), size, next.row_mut(row));
                        continue;
                    }
                    for k in 0..next.cols() {
                        let size = (size * steps.inverse[k]) as f32;
                        let step = towards(gradient[(i, k)], -size, 0.0, size);
                        next[(row, k)] = (next[(row, k)] + step).clamp(part.low[(s, k)], part.high[(s, k)]);
                    }
                }
                x = next;
            }
            open = keep.into_iter().map(|i| open[i]).collect();
            if open.is_empty() {
                return Ok(found);
            }
        }
    }
    Ok(found)
}

/// The classes other than the label, the one with the largest output first.
fn others(logits: &[f32], label: u32) -> Vec<u32> {
    let mut classes: Vec<u32> = (0..logits.len() as u32).filter(|c| *c != label).collect();
    classes.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]));
    classes
}

/// A step by the sign of the gradient; a NaN moves nothing.
fn towards(gradient: f32, below: f32, here: f32, above: f32) -> f32 {
    if gradient > 0.0 {
        above
    } else if gradient < 0.0 {
        below
    } else {
        here
    }
}
