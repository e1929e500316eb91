//! The strength that hits a target sparsity, by whole models: allocation over layers is the method's own.

use super::fit::{self, Fitted, Workshop};
use super::{Progress, Run, TrainInput, TrainReport, TrainSettings, Trained};
use crate::Result;

/// Accepted distance from the target, half of the 0.2 points promised.
pub(super) const CLOSE: f64 = 0.001;
/// Whole models fitted at most for one target.
pub(super) const MAX_MODELS: usize = 24;
/// First factor between two strengths while the target is not yet between two models.
const STRIDE: f64 = 4.0;

/// What has been found out about strength and sparsity, which grows with it, nearly always.
#[derive(Debug, Clone, Default)]
pub struct Found {
    /// (log strength, sparsity) in the order found.
    points: Vec<(f64, f64)>,
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
        let log = match (low, high) {
            (Some(l), Some(h)) if h.1 > l.1 && h.0 > l.0 => {
                // Between the secant and the middle, so that neither end can stay for ever.
                let share = ((target - l.1) / (h.1 - l.1)).clamp(0.02, 0.98);
                l.0 + (0.8 * share + 0.1) * (h.0 - l.0)
            }
            (Some(l), Some(h)) => f64::midpoint(l.0, h.0),
            (Some(l), None) => l.0 + STRIDE.ln(),
            (None, Some(h)) => h.0 - STRIDE.ln(),
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
    let mut trained = search_once(&mut workshop, input, settings, settings.strength, run)?;
    for _ in 0..settings.robust_rounds {
        workshop.emphasis.renew(&trained.model, &input.preprocessing)?;
        let path = trained.report.path;
        trained = search_once(&mut workshop, input, settings, trained.report.strength, run)?;
        trained.report.path.splice(0..0, path);
    }
    Ok(trained)
}

fn search_once(
    workshop: &mut Workshop,
    input: &TrainInput,
    settings: &TrainSettings,
    mut strength: f64,
    run: &mut Run,
) -> Result<Trained> {
    let searching = settings.target_sparsity;
    let mut found = Found::default();
    let mut path = Vec::new();
    let mut fit_at = |strength: f64, run: &mut Run, path: &mut Vec<(f64, f64)>| -> Result<(f64, Fitted)> {
        let fitted = fit::fit(workshop, input, settings, strength, searching.is_none(), run)?;
        let sparsity = fitted.model.sparsity().sparsity;
        path.push((strength, sparsity));
        (run.progress)(Progress::Model { strength, sparsity });
        Ok((sparsity, fitted))
    };
    let (mut sparsity, mut best) = fit_at(strength, run, &mut path)?;
    if let Some(target) = searching {
        let mut best_distance = (sparsity - target).abs();
        let mut best_strength = strength;
        while best_distance > CLOSE && path.len() < MAX_MODELS {
            found.add(strength, sparsity);
            strength = found.next(target).unwrap_or(strength);
            let fitted;
            (sparsity, fitted) = fit_at(strength, run, &mut path)?;
            let distance = (sparsity - target).abs();
            if distance < best_distance {
                (best_distance, best_strength, best) = (distance, strength, fitted);
            }
        }
        strength = best_strength;
        best = fit::certified(workshop, input, settings, strength, best, run)?;
    }
    let Fitted { model, rows, training_error } = best;
    Ok(Trained { model, report: TrainReport { rows, strength, training_error, path, agreement: None } })
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
