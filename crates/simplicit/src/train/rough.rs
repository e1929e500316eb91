//! Rough models: where a search over expensive ones begins, and the row weights that their errors ask for.

use std::cmp::Ordering;

use super::fit::{self, Workshop};
use super::joint_importance::joint_importance;
use super::search::{Start, seek};
use super::{Forget, Objective, Run, TrainInput, TrainSettings, metadata};
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
/// Factor between two prices of a survey, and how many there are on each side of the middle.
const SPACING: f64 = 3.0;
const EACH_WAY: i32 = 4;
/// Further surveys where the first has not got the target between its prices.
const MAX_SURVEYS: usize = 4;
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
        cardinality: CardinalitySettings { steps: 90, ..settings.cardinality.clone() },
        ..settings.clone()
    };
    let mut workshop = Workshop::new(&input, &settings)?;
    let mut run = Run { threads: run.threads, cancel: run.cancel, keep: &Forget, progress: run.progress };
    if matches!(settings.objective, Objective::Cardinality) {
        return surveyed(&mut workshop, &input, &settings, target, &mut run);
    }
    let start = Start { strength: settings.strength, slope: None };
    let (start, model) = rough_search(&mut workshop, &input, &settings, start, target, &mut run)?;
    let (Some(baseline), Some(weights)) = (input.baseline, input.importance) else { return Ok((start, None)) };
    let joint = joint_importance(&input, baseline, &model, weights, &run)?;
    let input = TrainInput { importance: Some(&joint), preprocessing: input.preprocessing.clone(), ..input };
    let (start, _) = rough_search(&mut workshop, &input, &settings, start, target, &mut run)?;
    Ok((start, Some(joint)))
}

/// The same for cardinality, where the price of a non-zero needs no search: a survey of some rows gives the curves of all
/// groups, one rough model at the price they suggest gives their height and the row weights, and the curves moved by
/// those weights give the price.
fn surveyed(
    workshop: &mut Workshop,
    input: &TrainInput,
    settings: &TrainSettings,
    target: f64,
    run: &mut Run,
) -> Result<(Start, Option<Vec<f64>>)> {
    let all = metadata(input, settings).baseline_nonzeros.unwrap_or(0) as f64;
    let wanted = (1.0 - target) * all;
    let mut middle = settings.strength;
    let mut survey = fit::survey(workshop, input, settings, &prices(middle), run)?;
    for _ in 0..MAX_SURVEYS {
        middle *= match survey.brackets(wanted) {
            Ordering::Equal => break,
            Ordering::Less => SPACING.powi(-2 * EACH_WAY),
            Ordering::Greater => SPACING.powi(2 * EACH_WAY),
        };
        survey = fit::survey(workshop, input, settings, &prices(middle), run)?;
    }
    let mut shifts = vec![0.0; workshop.groups().count()];
    let (strength, _) = survey.price(wanted, &shifts);
    let fitted = fit::fit(workshop, input, settings, strength, false, run)?;
    let counted: Vec<usize> =
        workshop.groups().map(|rows| fitted.rows[rows].iter().map(|row| row.nonzeros).sum()).collect();
    survey.calibrate(strength, &counted);
    let mut joint = None;
    if let (Some(baseline), Some(weights)) = (input.baseline, input.importance) {
        let together = joint_importance(input, baseline, &fitted.model, weights, run)?;
        // A layer's row weights grew by one factor.
        for (shift, rows) in shifts.iter_mut().zip(workshop.groups()) {
            let grown = rows.filter(|&i| weights[i] > 0.0).map(|i| (together[i] / weights[i]).ln());
            *shift = grown.reduce(f64::max).unwrap_or(0.0);
        }
        joint = Some(together);
    }
    let (strength, fall) = survey.price(wanted, &shifts);
    let slope = Some(fall / all.max(1.0)).filter(|s| SLOPES.contains(s));
    Ok((Start { strength, slope }, joint))
}

/// Prices of a survey.
fn prices(middle: f64) -> Vec<f64> {
    (-EACH_WAY..=EACH_WAY).map(|k| middle * SPACING.powi(k)).collect()
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
    let mut path = seek(
        target,
        start,
        |_| CLOSE,
        MAX_MODELS,
        |strength| {
            let model = fit::fit(workshop, input, settings, strength, false, run)?.model;
            let sparsity = model.sparsity().sparsity;
            let distance = (sparsity - target).abs();
            if nearest.as_ref().is_none_or(|(so_far, _)| distance < *so_far) {
                nearest = Some((distance, model));
            }
            Ok(sparsity)
        },
    )?;
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
