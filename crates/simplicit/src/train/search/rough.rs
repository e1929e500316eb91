//! Rough models: they find where a search over expensive models begins, and the row weights that follow from their
//! errors.

use std::cmp::Ordering;

use crate::Result;
use crate::model::ImplicitModel;
use crate::solver::CardinalitySettings;
use crate::states::StateSlice;
use crate::train::evidence::joint_importance::joint_importance;
use crate::train::fit::{self, Fitter};
use crate::train::keep::{self, Fleeting, Remembered};
use crate::train::search::allocate::{self, Allocation, Exchanged, Judge, Tried};
use crate::train::search::survey::{Steering, Survey};
use crate::train::search::{self, Found, SLOPES, Start, seek};
use crate::train::{
    Forget, Key, ModelSettings, Objective, Progress, RowSettings, Run, TrainInput, TrainSettings, layout, metadata,
};

/// Accepted distance of a rough model from the target.
const CLOSE: f64 = 0.01;
/// The most models of one search.
const MAX_MODELS: usize = 8;
/// Number of splitting steps of a rough model, and of the inverses that they share.
const STEPS: usize = 90;
const RUNGS: usize = 3;
/// Number of samples that a rough model is fitted to.
pub(in crate::train) const SAMPLES: usize = 500;
/// Factor between two prices of a survey, and number of prices on each side of the middle.
const SPACING: f64 = 3.0;
const EACH_WAY: i32 = 3;
/// The most further surveys, if the target does not lie between the prices of the first one.
const MAX_SURVEYS: usize = 4;
/// The most rough models after a survey, and the distance from the target at which the first one is good enough.
const MAX_ROUGH: usize = 2;
const NEAR: f64 = 0.03;
/// Fits rough models to the baseline's states of some samples, which are gathered only once.
pub(in crate::train) trait RoughModels {
    /// Number of non-zeros of the baseline, and of those that no price removes.
    fn sizes(&self) -> (f64, f64);
    /// Number of groups.
    fn groups(&self) -> usize;
    /// Expected non-zeros of every group at prices around the one that leaves about `wanted` of them; `spread`
    /// returns ascending prices around a middle one.
    fn survey(&mut self, wanted: f64, spread: &dyn Fn(f64) -> Vec<f64>, run: &mut Run) -> Result<Survey>;
    /// Fits a model at a strength; returns the non-zeros of every group, and its sparsity.
    fn fit(&mut self, strength: f64, run: &mut Run) -> Result<(Vec<usize>, f64)>;
    /// Keeps the model fitted last, from whose errors row weights will be computed.
    fn keep(&mut self);
    /// Computes the row weights of all later models from the errors of the kept model. Returns the logarithm of the
    /// factor by which the weights of each group grew. `None` where rows are not weighted.
    fn reweigh(&mut self, run: &Run) -> Result<Option<Vec<f64>>>;
}

/// The settings of rough models.
pub(in crate::train) fn settings_of(settings: &TrainSettings) -> TrainSettings {
    TrainSettings {
        rows: RowSettings {
            cardinality: CardinalitySettings { steps: STEPS, rungs: RUNGS, ..settings.rows.cardinality.clone() },
            ..settings.rows.clone()
        },
        model: ModelSettings { cascade: false, ..settings.model.clone() },
        ..settings.clone()
    }
}

/// The results of rough models, before the first whole model.
pub(in crate::train) struct Rough {
    pub(in crate::train) start: Start,
    /// Row weights that take into account how errors add up.
    pub(in crate::train) joint: Option<Vec<f64>>,
    /// Prices group by group, if there was a survey.
    pub(in crate::train) steering: Option<Steering>,
    /// The report about the prices of layers, if they were asked for.
    pub(in crate::train) allocation: Option<Allocation>,
}

/// The start of a search whose models are expensive, and the row weights of all later steps. `after` is the work that
/// comes after them.
pub(in crate::train) fn rough(
    input: &TrainInput,
    settings: &TrainSettings,
    target: f64,
    after: f64,
    run: &mut Run,
) -> Result<Rough> {
    let all = input.source.samples();
    let rounds = settings.model.allocate;
    let (samples, others) = if rounds > 0 { allocate::parts(all, SAMPLES) } else { (all.min(SAMPLES), 0..0) };
    let few = StateSlice::new(input.source, 0..samples)?;
    let judge = if rounds > 0 { Some(Judge::new(input, others, run)?) } else { None };
    let input = TrainInput { source: &few, preprocessing: input.preprocessing.clone(), ..*input };
    let settings = settings_of(settings);
    // The memory of the whole run has been reported, and rough models need less.
    let silent = &mut |_| {};
    let mut fitter = Fitter::new(
        &input,
        &settings,
        &mut Run { threads: run.threads, cancel: run.cancel, keep: &Forget, progress: silent },
    )?;
    fitter.left = after;
    let mut models = OfNetwork { fitter, input, settings: &settings, last: None, kept: None, joint: None };
    let (mut start, mut steering) = start(&mut models, &settings, target, run)?;
    let mut allocation = None;
    if let (Some(common), Some(judge)) = (&steering, &judge) {
        let (found, report) = models.allocated(common, judge, rounds, run)?;
        start.strength = found.common();
        (steering, allocation) = (Some(found), Some(report));
    }
    Ok(Rough { start, joint: models.joint, steering, allocation })
}

/// Where the search for a target begins, from rough models: by a survey for cardinality, whose curves can steer the
/// prices of whole models, otherwise by the same search as for whole models. If rows are weighted, the weights of all
/// later steps are computed from the errors of rough models.
pub(in crate::train) fn start(
    models: &mut dyn RoughModels,
    settings: &TrainSettings,
    target: f64,
    run: &mut Run,
) -> Result<(Start, Option<Steering>)> {
    let keep = Fleeting(run.keep);
    let mut run = Run { threads: run.threads, cancel: run.cancel, keep: &keep, progress: run.progress };
    if matches!(settings.objective, Objective::Cardinality) {
        let (start, steering) = surveyed(models, target, &mut run)?;
        return Ok((start, Some(steering)));
    }
    let start = Start { strength: settings.strength, slope: None };
    let start = rough_search(models, start, target, &mut run)?;
    match models.reweigh(&run)? {
        Some(_) => Ok((rough_search(models, start, target, &mut run)?, None)),
        None => Ok((start, None)),
    }
}

/// Rough models of a network or an implicit model.
struct OfNetwork<'a> {
    fitter: Fitter,
    input: TrainInput<'a>,
    settings: &'a TrainSettings,
    last: Option<ImplicitModel>,
    kept: Option<ImplicitModel>,
    joint: Option<Vec<f64>>,
}

impl OfNetwork<'_> {
    /// Chooses prices of layers by their effect on the outputs of held-out samples.
    fn allocated(
        &mut self,
        steering: &Steering,
        judge: &Judge,
        rounds: usize,
        run: &mut Run,
    ) -> Result<(Steering, Allocation)> {
        let layers = self.fitter.layers();
        let total = 1 + rounds * allocate::models_of_a_round(layers.len());
        let mut done = 0;
        let fleeting = Fleeting(run.keep);
        let mut memory = Remembered::new(&fleeting);
        let (progress, threads, cancel) = (&mut *run.progress, run.threads, run.cancel);
        let numbers = keep::numbers(run.keep, &Key::allocation(), Exchanged::length(self.groups()), || {
            let found = allocate::exchange(steering, &layers, rounds, |prices, begins| {
                memory.open = begins;
                if begins {
                    memory.forget();
                }
                let mut run = Run { threads, cancel, keep: &memory, progress: &mut |_| {} };
                self.fitter.steering = Some(prices.clone());
                let fitted = self.fit(prices.common(), &mut run);
                self.fitter.steering = None;
                let (counts, _) = fitted?;
                let divergences = match &self.last {
                    Some(model) => judge.divergences(model, &run)?,
                    None => Vec::new(),
                };
                done += 1;
                (progress)(Progress::Rows { group: "allocation over layers".to_string(), done, total });
                Ok(Tried { counts, divergences })
            })?;
            Ok(found.to_numbers())
        })?;
        Ok(Exchanged::from_numbers(&numbers)?.applied(steering, layers))
    }
}

impl RoughModels for OfNetwork<'_> {
    fn sizes(&self) -> (f64, f64) {
        let all = metadata(&self.input, self.settings).baseline_nonzeros.unwrap_or(0) as f64;
        let fixed: usize = layout(&self.input).layers().iter().map(|l| l.parameters()).sum();
        (all, fixed as f64)
    }

    fn groups(&self) -> usize {
        self.fitter.groups().count()
    }

    fn survey(&mut self, wanted: f64, spread: &dyn Fn(f64) -> Vec<f64>, run: &mut Run) -> Result<Survey> {
        fit::survey(&mut self.fitter, &self.input, self.settings, wanted, spread, run)
    }

    fn fit(&mut self, strength: f64, run: &mut Run) -> Result<(Vec<usize>, f64)> {
        let input = self.input.weighed(self.joint.as_deref());
        let fitted = fit::fit(&mut self.fitter, &input, self.settings, strength, false, run)?;
        let counts = self.fitter.groups().map(|rows| fitted.rows[rows].iter().map(|row| row.nonzeros).sum());
        let found = (counts.collect(), fitted.model.sparsity().sparsity);
        self.last = Some(fitted.model);
        Ok(found)
    }

    fn keep(&mut self) {
        self.kept = self.last.take();
    }

    fn reweigh(&mut self, run: &Run) -> Result<Option<Vec<f64>>> {
        let (Some(baseline), Some(weights), Some(model)) = (self.input.baseline, self.input.importance, &self.kept)
        else {
            return Ok(None);
        };
        let joint = joint_importance(&self.input, baseline, model, weights, self.settings.work.device, run)?;
        // The row weights of a layer all grew by the same factor.
        let grown = |rows: std::ops::Range<usize>| {
            let grown = rows.filter(|&i| weights[i] > 0.0).map(|i| (joint[i] / weights[i]).ln());
            grown.reduce(f64::max).unwrap_or(0.0)
        };
        let shifts = self.fitter.groups().map(grown).collect();
        self.joint = Some(joint);
        Ok(Some(shifts))
    }
}

/// The start for cardinality, where the price of a non-zero needs no search: a survey of some rows gives the curves
/// of all groups. A rough model at the price that follows from these gives their height and the row weights. The
/// curves, shifted by those weights, give the final price.
fn surveyed(models: &mut dyn RoughModels, target: f64, run: &mut Run) -> Result<(Start, Steering)> {
    let (all, fixed) = models.sizes();
    // Parameters that always stay are non-zeros that no price removes.
    let wanted = ((1.0 - target) * all - fixed).max(1.0);
    let mut survey = models.survey(wanted, &prices, run)?;
    for _ in 0..MAX_SURVEYS {
        let step = match survey.brackets(wanted) {
            Ordering::Equal => break,
            Ordering::Less => SPACING.powi(-2 * EACH_WAY),
            Ordering::Greater => SPACING.powi(2 * EACH_WAY),
        };
        let middle = step * survey.middle();
        survey = models.survey(wanted, &|_| prices(middle), run)?;
    }
    let unmoved = vec![0.0; models.groups()];
    for _ in 0..MAX_ROUGH {
        let (strength, _) = survey.price(wanted, &unmoved);
        let (counted, sparsity) = models.fit(strength, run)?;
        models.keep();
        survey.calibrate(strength, &counted);
        // The survey counts non-zeros before single moves, so that its curves may be too high or too low; and the errors that
        // make the row weights should be those of a model near the target.
        if (sparsity - target).abs() <= NEAR {
            break;
        }
    }
    let shifts = models.reweigh(run)?.unwrap_or(unmoved);
    let (strength, fall) = survey.price(wanted, &shifts);
    let slope = Some(fall / all.max(1.0)).filter(|s| SLOPES.contains(s));
    Ok((Start { strength, slope }, Steering::new(survey, shifts, wanted, search::CLOSE * all)))
}

/// Prices of a survey.
fn prices(middle: f64) -> Vec<f64> {
    (-EACH_WAY..=EACH_WAY).map(|k| middle * SPACING.powi(k)).collect()
}

fn rough_search(models: &mut dyn RoughModels, start: Start, target: f64, run: &mut Run) -> Result<Start> {
    let mut nearest = f64::INFINITY;
    let mut found = Found::with_slope(start.slope);
    let enough = |found: &Found| found.count() >= MAX_MODELS || found.is_close(target, |_| CLOSE);
    seek(&mut found, target, start.strength, enough, |strength| {
        let (_, sparsity) = models.fit(strength, run)?;
        let distance = (sparsity - target).abs();
        if distance < nearest {
            nearest = distance;
            models.keep();
        }
        Ok(sparsity)
    })?;
    let slope = found.slope_near(target);
    Ok(match found.nearest(target) {
        // The slope leads from the nearest model to the target.
        Some((strength, sparsity)) => {
            let step = slope.map_or(0.0, |s| (target - sparsity) / s);
            Start { strength: strength * step.exp(), slope }
        }
        None => start,
    })
}
