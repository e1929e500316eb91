//! The strength that hits a target sparsity, by whole models: allocation over layers is the method's own.

use super::fit::{self, Fitted, Workshop};
use super::output_refit::refitted;
use super::stages;
use super::{Progress, Run, TrainInput, TrainReport, TrainSettings, Trained};
use crate::Result;

/// Accepted distance from the target, half of the 0.2 points promised.
const CLOSE: f64 = 0.001;
/// Accepted distance of a stage that is not the last.
const NEAR: f64 = 0.02;
/// Whole models fitted at most.
const MAX_MODELS: usize = 24;
/// First factor between two strengths while the target is not yet between two models.
const STRIDE: f64 = 4.0;

/// Fits at the given strength, or searches for the target: in stages where that pays, each starting from the states of
/// the model before it, refitted in the output metric.
pub(super) fn search(input: &TrainInput, settings: &TrainSettings, run: &mut Run) -> Result<Trained> {
    let mut path = Vec::new();
    let mut strength = settings.strength;
    let rungs = stages::rungs(settings);
    let mut before: Option<stages::Stage> = None;
    for (k, rung) in rungs.iter().enumerate() {
        let keep = stages::Named { keep: run.keep, name: format!("stage {k} ") };
        let mut run = Run { threads: run.threads, cancel: run.cancel, keep: &keep, progress: &mut *run.progress };
        let last = k + 1 == rungs.len();
        let fitted = match &before {
            None => to_target(input, settings, &mut strength, *rung, last, &mut run, &mut path)?,
            Some(stage) => {
                let settings = TrainSettings { connectivity: stage.connectivity.clone(), ..settings.clone() };
                let states = stage.states(input.source);
                to_target(&stage.input(&states, input), &settings, &mut strength, *rung, last, &mut run, &mut path)?
            }
        };
        let Fitted { model, rows, training_error, output_refit } =
            refitted(fitted, input, settings, strength, &mut run)?;
        if last {
            let report = TrainReport { rows, strength, training_error, path, output_refit, agreement: None };
            return Ok(Trained { model, report });
        }
        before = Some(stages::Stage::new(model, input, settings, &run)?);
    }
    Err(crate::Error::Cancelled)
}

/// The model whose sparsity is the target's (or the one at `strength` without a target), before any refit in the output
/// metric; `strength` becomes what it took.
fn to_target(
    input: &TrainInput,
    settings: &TrainSettings,
    strength: &mut f64,
    target: Option<f64>,
    last: bool,
    run: &mut Run,
    path: &mut Vec<(f64, f64)>,
) -> Result<Fitted> {
    let mut workshop = Workshop::new(input, settings)?;
    let fit_at =
        |workshop: &mut Workshop, strength: f64, run: &mut Run, path: &mut Vec<(f64, f64)>| -> Result<(f64, Fitted)> {
            let fitted = fit::fit(workshop, input, settings, strength, target.is_none(), run)?;
            let sparsity = fitted.model.sparsity().sparsity;
            path.push((strength, sparsity));
            (run.progress)(Progress::Model { strength, sparsity });
            Ok((sparsity, fitted))
        };
    let tried = path.len();
    let (mut sparsity, mut best) = fit_at(&mut workshop, *strength, run, path)?;
    let Some(target) = target else { return Ok(best) };
    let close = if last { CLOSE } else { NEAR };
    // Brackets in log strength; sparsity grows with it, nearly always.
    let mut low: Option<(f64, f64)> = None;
    let mut high: Option<(f64, f64)> = None;
    let mut best_distance = (sparsity - target).abs();
    let mut best_strength = *strength;
    while best_distance > close && path.len() - tried < MAX_MODELS {
        let point = (strength.ln(), sparsity);
        if sparsity < target {
            low = Some(point);
        } else {
            high = Some(point);
        }
        *strength = match (low, high) {
            (Some(l), Some(h)) if h.1 > l.1 => {
                // Between the secant and the middle, so that neither end can stay for ever.
                let share = ((target - l.1) / (h.1 - l.1)).clamp(0.02, 0.98);
                (l.0 + (0.8 * share + 0.1) * (h.0 - l.0)).exp()
            }
            (Some(l), Some(h)) => (0.5 * (l.0 + h.0)).exp(),
            (Some(_), None) => *strength * STRIDE,
            (None, _) => *strength / STRIDE,
        };
        let fitted;
        (sparsity, fitted) = fit_at(&mut workshop, *strength, run, path)?;
        let distance = (sparsity - target).abs();
        if distance < best_distance {
            (best_distance, best_strength, best) = (distance, *strength, fitted);
        }
    }
    *strength = best_strength;
    if last { fit::certified(&mut workshop, input, settings, *strength, best, run) } else { Ok(best) }
}
