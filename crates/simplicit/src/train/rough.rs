//! Rough models: where a search over expensive ones begins, and the row weights that their errors ask for.

use super::fit::{self, Workshop};
use super::joint_importance::joint_importance;
use super::search::{Start, seek};
use super::{Forget, Run, TrainInput, TrainSettings};
use crate::Result;
use crate::model::ImplicitModel;
use crate::solver::CardinalitySettings;
use crate::states::StateSlice;

/// Accepted distance from the target.
const CLOSE: f64 = 0.01;
/// Models of one search at most.
const MAX_MODELS: usize = 8;
/// Samples a rough model sees.
const SAMPLES: usize = 500;
/// Sparsity per unit of log strength, within which a slope is believed.
const SLOPES: std::ops::RangeInclusive<f64> = 0.02..=1.0;

/// The start of a search whose models are expensive: the same search over rough models, which are fitted to the
/// baseline's states of some samples, gathered once. Where rows are weighted, the first of two such searches gives the
/// errors from which the weights of the second, and of all that follows, are made.
pub(super) fn rough(
    input: &TrainInput,
    settings: &TrainSettings,
    target: f64,
    run: &mut Run,
) -> Result<(Start, Option<Vec<f64>>)> {
    let samples = input.source.samples().min(SAMPLES);
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
    let (start, model) = rough_search(&mut workshop, &input, &settings, start, target, &mut run)?;
    let (Some(baseline), Some(weights)) = (input.baseline, input.importance) else { return Ok((start, None)) };
    let joint = joint_importance(&input, baseline, &model, weights, &run)?;
    let input = TrainInput { importance: Some(&joint), preprocessing: input.preprocessing.clone(), ..input };
    let (start, _) = rough_search(&mut workshop, &input, &settings, start, target, &mut run)?;
    Ok((start, Some(joint)))
}

fn rough_search(
    workshop: &mut Workshop,
    input: &TrainInput,
    settings: &TrainSettings,
    start: Start,
    target: f64,
    run: &mut Run,
) -> Result<(Start, ImplicitModel)> {
    let mut nearest: Option<(f64, ImplicitModel)> = None;
    let mut path = seek(target, start, CLOSE, MAX_MODELS, |strength| {
        let model = fit::fit(workshop, input, settings, strength, false, run)?.model;
        let sparsity = model.sparsity().sparsity;
        let distance = (sparsity - target).abs();
        if nearest.as_ref().is_none_or(|(so_far, _)| distance < *so_far) {
            nearest = Some((distance, model));
        }
        Ok(sparsity)
    })?;
    // At least one model was fitted.
    let Some((_, model)) = nearest else { return Err(crate::Error::Cancelled) };
    path.sort_by(|a, b| (a.1 - target).abs().total_cmp(&(b.1 - target).abs()));
    let slope = match path[..] {
        [a, b, ..] if a.0 != b.0 => Some((a.1 - b.1) / (a.0.ln() - b.0.ln())).filter(|s| SLOPES.contains(s)),
        _ => start.slope,
    };
    let start = match path.first() {
        // The little that is left to the target goes by the slope too.
        Some(&(strength, sparsity)) => {
            let step = slope.map_or(0.0, |s| (target - sparsity) / s);
            Start { strength: strength * step.exp(), slope }
        }
        None => start,
    };
    Ok((start, model))
}
