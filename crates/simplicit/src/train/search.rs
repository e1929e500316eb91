//! The strength that hits a target sparsity, by whole models: allocation over layers is the method's own.

use super::fit::{self, Fitted, Workshop};
use super::{Forget, Progress, Run, TrainInput, TrainReport, TrainSettings, Trained};
use crate::Result;
use crate::solver::CardinalitySettings;
use crate::states::StateSlice;

/// Accepted distance from the target, half of the 0.2 points promised.
pub(super) const CLOSE: f64 = 0.001;
/// Whole models fitted at most for one target.
pub(super) const MAX_MODELS: usize = 24;
/// First factor between two strengths while the target is not yet between two models.
const STRIDE: f64 = 4.0;
/// The same for rough models, their accepted distance, and how many of them.
const ROUGH_CLOSE: f64 = 0.01;
const MAX_ROUGH: usize = 8;
/// Samples a rough model sees.
const ROUGH_SAMPLES: usize = 500;
/// Sparsity per unit of log strength, within which a slope is believed.
const SLOPES: std::ops::RangeInclusive<f64> = 0.02..=1.0;

/// What has been found out about strength and sparsity, which grows with it, nearly always.
#[derive(Debug, Clone, Default)]
pub struct Found {
    /// (log strength, sparsity) in the order found.
    points: Vec<(f64, f64)>,
    /// Sparsity per unit of log strength, where it is known beforehand.
    slope: Option<f64>,
}

impl Found {
    /// One more. False if that strength was known: there is nothing left to learn by asking again.
    pub fn add(&mut self, strength: f64, sparsity: f64) -> bool {
        let point = strength.ln();
        let known = self.points.iter().any(|(s, _)| *s == point);
        self.points.push((point, sparsity));
        !known
    }

    /// (strength, sparsity) of the point nearest to a target.
    pub fn nearest(&self, target: f64) -> Option<(f64, f64)> {
        let distance = |point: &&(f64, f64)| (point.1 - target).abs();
        let nearest = self.points.iter().min_by(|a, b| distance(a).total_cmp(&distance(b)))?;
        Some((nearest.0.exp(), nearest.1))
    }

    /// The strength to try next for a target; `None` before anything is known.
    pub fn next(&self, target: f64) -> Option<f64> {
        let below = self.points.iter().filter(|p| p.1 < target);
        let above = self.points.iter().filter(|p| p.1 >= target);
        // The tightest bracket: the strongest below, the weakest above.
        let low = below.max_by(|a, b| a.0.total_cmp(&b.0)).copied();
        let high = above.min_by(|a, b| a.0.total_cmp(&b.0)).copied();
        let step = |from: f64| self.slope.map_or(STRIDE.ln(), |s| ((target - from).abs() / s).min(STRIDE.ln()));
        let log = match (low, high) {
            (Some(l), Some(h)) if h.1 > l.1 && h.0 > l.0 => {
                // Between the secant and the middle, so that neither end can stay for ever.
                let share = ((target - l.1) / (h.1 - l.1)).clamp(0.02, 0.98);
                l.0 + (0.8 * share + 0.1) * (h.0 - l.0)
            }
            (Some(l), Some(h)) => f64::midpoint(l.0, h.0),
            (Some(l), None) => l.0 + step(l.1),
            (None, Some(h)) => h.0 - step(h.1),
            (None, None) => return None,
        };
        Some(log.exp())
    }

    /// (strength, sparsity) in the order found.
    pub fn in_order(&self) -> Vec<(f64, f64)> {
        self.points.iter().map(|(log, sparsity)| (log.exp(), *sparsity)).collect()
    }
}

/// Fits at the given strength, or searches for the target; again where weights are priced by the model before.
pub(super) fn search(input: &TrainInput, settings: &TrainSettings, run: &mut Run) -> Result<Trained> {
    let mut workshop = Workshop::new(input, settings)?;
    let mut start = Start { strength: settings.strength, slope: None };
    if let Some(target) = settings.target_sparsity.filter(|_| workshop.has_taps() && settings.cascade) {
        start = rough(input, settings, target, run)?;
    }
    let mut trained = search_once(&mut workshop, input, settings, start, run)?;
    for _ in 0..settings.robust_rounds {
        workshop.emphasis.renew(&trained.model, &input.preprocessing)?;
        let path = trained.report.path;
        let start = Start { strength: trained.report.strength, ..start };
        trained = search_once(&mut workshop, input, settings, start, run)?;
        trained.report.path.splice(0..0, path);
    }
    Ok(trained)
}

fn search_once(
    workshop: &mut Workshop,
    input: &TrainInput,
    settings: &TrainSettings,
    start: Start,
    run: &mut Run,
) -> Result<Trained> {
    let Some(target) = settings.target_sparsity else {
        let strength = start.strength;
        let fitted = fit::fit(workshop, input, settings, strength, true, run)?;
        let path = vec![(strength, told(&fitted, strength, run))];
        return Ok(finish(fitted, strength, path));
    };
    let mut best: Option<(f64, f64, Fitted)> = None;
    let path = seek(target, start, CLOSE, MAX_MODELS, |strength| {
        let fitted = fit::fit(workshop, input, settings, strength, false, run)?;
        let sparsity = told(&fitted, strength, run);
        let distance = (sparsity - target).abs();
        if best.as_ref().is_none_or(|(so_far, _, _)| distance < *so_far) {
            best = Some((distance, strength, fitted));
        }
        Ok(sparsity)
    })?;
    match best {
        Some((_, strength, fitted)) => {
            let fitted = fit::certified(workshop, input, settings, strength, fitted, run)?;
            Ok(finish(fitted, strength, path))
        }
        // At least one model was fitted.
        None => Err(crate::Error::Cancelled),
    }
}

fn told(fitted: &Fitted, strength: f64, run: &mut Run) -> f64 {
    let sparsity = fitted.model.sparsity().sparsity;
    (run.progress)(Progress::Model { strength, sparsity });
    sparsity
}

fn finish(fitted: Fitted, strength: f64, path: Vec<(f64, f64)>) -> Trained {
    let Fitted { model, rows, training_error, .. } = fitted;
    Trained { model, report: TrainReport { rows, strength, training_error, path, agreement: None } }
}

/// Where a search begins, and how fast sparsity grows with log strength if that is known.
#[derive(Debug, Clone, Copy)]
struct Start {
    strength: f64,
    slope: Option<f64>,
}

/// Models at changing strengths until one is close to the target: all of them as (strength, sparsity).
fn seek(
    target: f64,
    start: Start,
    close: f64,
    most: usize,
    mut sparsity_at: impl FnMut(f64) -> Result<f64>,
) -> Result<Vec<(f64, f64)>> {
    let mut found = Found { slope: start.slope, ..Found::default() };
    for _ in 0..most {
        let strength = found.next(target).unwrap_or(start.strength);
        let sparsity = sparsity_at(strength)?;
        if !found.add(strength, sparsity) || (sparsity - target).abs() <= close {
            break;
        }
    }
    Ok(found.in_order())
}

/// The start of a search whose models are expensive: the same search over rough models, which are fitted to the
/// baseline's states of some samples, gathered once.
fn rough(input: &TrainInput, settings: &TrainSettings, target: f64, run: &mut Run) -> Result<Start> {
    let samples = input.source.samples().min(ROUGH_SAMPLES);
    let few = StateSlice::new(input.source, 0..samples)?;
    let input = TrainInput { source: &few, preprocessing: input.preprocessing.clone(), ..*input };
    let settings = TrainSettings {
        cascade: false,
        cardinality: CardinalitySettings { steps: 90, growth: 1.057, ..settings.cardinality.clone() },
        ..settings.clone()
    };
    let mut workshop = Workshop::new(&input, &settings)?;
    let mut run = Run { threads: run.threads, cancel: run.cancel, keep: &Forget, progress: run.progress };
    let start = Start { strength: settings.strength, slope: None };
    let mut path = seek(target, start, ROUGH_CLOSE, MAX_ROUGH, |strength| {
        Ok(fit::fit(&mut workshop, &input, &settings, strength, false, &mut run)?.model.sparsity().sparsity)
    })?;
    path.sort_by(|a, b| (a.1 - target).abs().total_cmp(&(b.1 - target).abs()));
    let slope = match path[..] {
        [a, b, ..] if a.0 != b.0 => Some((a.1 - b.1) / (a.0.ln() - b.0.ln())).filter(|s| SLOPES.contains(s)),
        _ => None,
    };
    Ok(match path.first() {
        // The little that is left to the target goes by the slope too.
        Some(&(strength, sparsity)) => {
            let step = slope.map_or(0.0, |s| (target - sparsity) / s);
            Start { strength: strength * step.exp(), slope }
        }
        None => start,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bracket_closes_on_any_growing_curve() {
        let curves: [fn(f64) -> f64; 3] =
            [|s| s / (1.0 + s), |s| (1.0 + s).ln() / 20.0, |s| if s < 0.03 { 0.1 } else { 0.1 + s / (1.0 + s) * 0.9 }];
        for (k, curve) in curves.into_iter().enumerate() {
            let mut found = Found::default();
            assert_eq!(found.next(0.5), None);
            for target in [0.2, 0.5, 0.45] {
                let mut strength = found.next(target).unwrap_or(1e-3);
                for _ in 0..40 {
                    found.add(strength, curve(strength));
                    if (found.nearest(target).unwrap().1 - target).abs() <= CLOSE {
                        break;
                    }
                    strength = found.next(target).unwrap();
                }
                let (strength, sparsity) = found.nearest(target).unwrap();
                assert!((sparsity - target).abs() <= CLOSE, "curve {k}, target {target}: {sparsity} at {strength}");
            }
        }
        let mut found = Found::default();
        assert!(found.add(2.0, 0.1) && !found.add(2.0, 0.1));
    }
}
