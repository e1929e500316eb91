//! Rough models: where a search over expensive ones begins, and the row weights that their errors ask for.

use std::cmp::Ordering;

use super::fit::{self, Workshop};
use super::joint_importance::joint_importance;
use super::search::{Start, seek};
use super::survey::Steering;
use super::{Forget, Objective, Run, TrainInput, TrainSettings, layout, metadata};
use crate::Result;
use crate::model::ImplicitModel;
use crate::solver::CardinalitySettings;
use crate::states::StateSlice;

/// Accepted distance from the target.
const CLOSE: f64 = 0.01;
/// Models of one search at most.
const MAX_MODELS: usize = 8;
/// Splitting steps of a rough model, and the inverses they share.
const STEPS: usize = 90;
const RUNGS: usize = 3;
/// Samples a rough model sees.
const SAMPLES: usize = 500;
/// Factor between two prices of a survey, and how many there are on each side of the middle.
const SPACING: f64 = 3.0;
const EACH_WAY: i32 = 3;
/// Further surveys where the first has not got the target between its prices.
const MAX_SURVEYS: usize = 4;
/// Rough models after a survey at most, and the distance from the target at which the first will do.
const MAX_ROUGH: usize = 2;
const NEAR: f64 = 0.03;
/// Sparsity per unit of log strength, within which a slope is believed.
const SLOPES: std::ops::RangeInclusive<f64> = 0.02..=1.0;

/// What rough models say before the first whole one.
pub(super) struct Rough {
    pub(super) start: Start,
    /// Row weights that count what errors do together.
    pub(super) joint: Option<Vec<f64>>,
    /// Prices group by group, where there was a survey.
    pub(super) steering: Option<Steering>,
}

/// The start of a search whose models are expensive, from rough models, which are fitted to the baseline's states of some
/// samples, gathered once: by a survey for cardinality, by the same search otherwise. Where rows are weighted, rough
/// errors are what the weights of all that follows are made from. `after` is the work that comes after.
pub(super) fn rough(
    input: &TrainInput,
    settings: &TrainSettings,
    target: f64,
    after: f64,
    run: &mut Run,
) -> Result<Rough> {
    let samples = input.source.samples().min(SAMPLES);
    let few = StateSlice::new(input.source, 0..samples)?;
    let input = TrainInput { source: &few, preprocessing: input.preprocessing.clone(), ..*input };
    let settings = TrainSettings {
        cascade: false,
        cardinality: CardinalitySettings { steps: STEPS, rungs: RUNGS, ..settings.cardinality.clone() },
        ..settings.clone()
    };
    let silent = &mut |_| {};
    let told = &mut Run { threads: run.threads, cancel: run.cancel, keep: &Forget, progress: silent };
    let mut workshop = Workshop::new(&input, &settings, told)?;
    workshop.left = after;
    let mut run = Run { threads: run.threads, cancel: run.cancel, keep: &Forget, progress: run.progress };
    if matches!(settings.objective, Objective::Cardinality) {
        return surveyed(&mut workshop, &input, &settings, target, &mut run);
    }
    let start = Start { strength: settings.strength, slope: None };
    let (start, model) = rough_search(&mut workshop, &input, &settings, start, target, &mut run)?;
    let (Some(baseline), Some(weights)) = (input.baseline, input.importance) else {
        return Ok(Rough { start, joint: None, steering: None });
    };
    let joint = joint_importance(&input, baseline, &model, weights, &run)?;
    let input = TrainInput { importance: Some(&joint), preprocessing: input.preprocessing.clone(), ..input };
    let (start, _) = rough_search(&mut workshop, &input, &settings, start, target, &mut run)?;
    Ok(Rough { start, joint: Some(joint), steering: None })
}

/// The same for cardinality, where the price of a non-zero needs no search: a survey of some rows gives the curves of all
/// groups, a rough model at the price they suggest gives their height and the row weights, and the curves moved by
/// those weights give the price.
fn surveyed(
    workshop: &mut Workshop,
    input: &TrainInput,
    settings: &TrainSettings,
    target: f64,
    run: &mut Run,
) -> Result<Rough> {
    let all = metadata(input, settings).baseline_nonzeros.unwrap_or(0) as f64;
    // Parameters that stay are non-zeros that no price removes.
    let fixed: usize = layout(input).layers().iter().map(|l| l.parameters()).sum();
    let wanted = ((1.0 - target) * all - fixed as f64).max(1.0);
    let mut survey = fit::survey(workshop, input, settings, wanted, prices, run)?;
    for _ in 0..MAX_SURVEYS {
        let step = match survey.brackets(wanted) {
            Ordering::Equal => break,
            Ordering::Less => SPACING.powi(-2 * EACH_WAY),
            Ordering::Greater => SPACING.powi(2 * EACH_WAY),
        };
        let middle = step * survey.middle();
        survey = fit::survey(workshop, input, settings, wanted, |_| prices(middle), run)?;
    }
    let mut shifts = vec![0.0; workshop.groups().count()];
    let mut fitted;
    let mut models = 0;
    loop {
        let (strength, _) = survey.price(wanted, &shifts);
        fitted = fit::fit(workshop, input, settings, strength, false, run)?;
        let counted: Vec<usize> =
            workshop.groups().map(|rows| fitted.rows[rows].iter().map(|row| row.nonzeros).sum()).collect();
        survey.calibrate(strength, &counted);
        models += 1;
        // The survey counts before single moves; its height may be off, and errors are wanted near the target.
        if models == MAX_ROUGH || (fitted.model.sparsity().sparsity - target).abs() <= NEAR {
            break;
        }
    }
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
    let steering = Some(Steering::new(survey, shifts, wanted));
    Ok(Rough { start: Start { strength, slope }, joint, steering })
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
