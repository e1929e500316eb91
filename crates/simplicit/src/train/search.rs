//! The strength that hits a target sparsity, by whole models: allocation over layers is the method's own.

use super::fit::{self, Fitted, Workshop};
use super::{Progress, Run, TrainInput, TrainReport, TrainSettings, Trained};
use crate::Result;

/// Accepted distance from the target, half of the 0.2 points promised.
const CLOSE: f64 = 0.001;
/// Whole models fitted at most.
const MAX_MODELS: usize = 24;
/// First factor between two strengths while the target is not yet between two models.
const STRIDE: f64 = 4.0;

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
        // Brackets in log strength; sparsity grows with it, nearly always.
        let mut low: Option<(f64, f64)> = None;
        let mut high: Option<(f64, f64)> = None;
        let mut best_distance = (sparsity - target).abs();
        let mut best_strength = strength;
        while best_distance > CLOSE && path.len() < MAX_MODELS {
            let point = (strength.ln(), sparsity);
            if sparsity < target {
                low = Some(point);
            } else {
                high = Some(point);
            }
            strength = match (low, high) {
                (Some(l), Some(h)) if h.1 > l.1 => {
                    // Between the secant and the middle, so that neither end can stay for ever.
                    let share = ((target - l.1) / (h.1 - l.1)).clamp(0.02, 0.98);
                    (l.0 + (0.8 * share + 0.1) * (h.0 - l.0)).exp()
                }
                (Some(l), Some(h)) => (0.5 * (l.0 + h.0)).exp(),
                (Some(_), None) => strength * STRIDE,
                (None, _) => strength / STRIDE,
            };
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
