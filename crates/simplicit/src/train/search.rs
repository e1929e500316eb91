//! The strength that hits a target sparsity, by whole models: allocation over layers is the method's own.

use super::fit::{self, Fitted, Workshop};
use super::{Forget, Progress, Run, TrainInput, TrainReport, TrainSettings, Trained};
use crate::Result;
use crate::solver::CardinalitySettings;
use crate::states::StateSlice;

/// Accepted distance from the target, half of the 0.2 points promised.
const CLOSE: f64 = 0.001;
/// Whole models fitted at most.
const MAX_MODELS: usize = 24;
/// First factor between two strengths while the target is not yet between two models.
const STRIDE: f64 = 4.0;
/// The same for rough models, their accepted distance, and how many of them.
const ROUGH_CLOSE: f64 = 0.01;
const MAX_ROUGH: usize = 8;
/// Samples a rough model sees.
const ROUGH_SAMPLES: usize = 500;
/// Sparsity per unit of log strength, within which a slope is believed.
const SLOPES: std::ops::RangeInclusive<f64> = 0.02..=1.0;

/// Fits at the given strength, or searches for the target.
pub(super) fn search(input: &TrainInput, settings: &TrainSettings, run: &mut Run) -> Result<Trained> {
    let mut workshop = Workshop::new(input, settings)?;
    let Some(target) = settings.target_sparsity else {
        let strength = settings.strength;
        let fitted = fit::fit(&mut workshop, input, settings, strength, true, run)?;
        let path = vec![(strength, told(&fitted, strength, run))];
        return Ok(finish(fitted, strength, path));
    };
    let mut start = Start { strength: settings.strength, slope: None };
    if workshop.has_taps() && settings.cascade {
        start = rough(input, settings, target, run)?;
    }
    let mut best: Option<(f64, f64, Fitted)> = None;
    let path = seek(target, start, CLOSE, MAX_MODELS, |strength| {
        let fitted = fit::fit(&mut workshop, input, settings, strength, false, run)?;
        let sparsity = told(&fitted, strength, run);
        let distance = (sparsity - target).abs();
        if best.as_ref().is_none_or(|(so_far, _, _)| distance < *so_far) {
            best = Some((distance, strength, fitted));
        }
        Ok(sparsity)
    })?;
    match best {
        Some((_, strength, fitted)) => {
            let fitted = fit::certified(&mut workshop, input, settings, strength, fitted, run)?;
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
    let mut path = Vec::new();
    let mut strength = start.strength;
    // Brackets in log strength; sparsity grows with it, nearly always.
    let mut low: Option<(f64, f64)> = None;
    let mut high: Option<(f64, f64)> = None;
    loop {
        let sparsity = sparsity_at(strength)?;
        path.push((strength, sparsity));
        if (sparsity - target).abs() <= close || path.len() >= most {
            return Ok(path);
        }
        let point = (strength.ln(), sparsity);
        if sparsity < target {
            low = Some(point);
        } else {
            high = Some(point);
        }
        strength = match (low, high, start.slope) {
            (Some(l), Some(h), _) if h.1 > l.1 => {
                // Between the secant and the middle, so that neither end can stay for ever.
                let share = ((target - l.1) / (h.1 - l.1)).clamp(0.02, 0.98);
                (l.0 + (0.8 * share + 0.1) * (h.0 - l.0)).exp()
            }
            (Some(l), Some(h), _) => (0.5 * (l.0 + h.0)).exp(),
            (_, _, Some(slope)) => strength * ((target - sparsity) / slope).clamp(-STRIDE.ln(), STRIDE.ln()).exp(),
            (Some(_), None, None) => strength * STRIDE,
            (None, _, None) => strength / STRIDE,
        };
    }
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
