//! Finds the strength that gives a target sparsity, by fitting whole models; one price for all rows divides the
//! non-zeros among the layers.

pub(super) mod allocate;
pub(super) mod max_drop;
pub(super) mod path;
pub(super) mod rough;
pub(super) mod stages;
pub(super) mod survey;

use crate::Result;
use crate::model::ImplicitModel;
use crate::train::fit::{self, Fitted, Fitter};
use crate::train::key::Search;
use crate::train::refit::output_refit::refitted;
use crate::train::search::rough::rough;
use crate::train::search::survey::Steering;
use crate::train::{AllowedWeights, Progress, Run, TrainInput, TrainSettings, Trained, TriedModel};

/// Accepted distance from the target: half of the 0.2 percentage points that are promised.
pub(in crate::train) const CLOSE: f64 = 0.001;
/// The distance from the target that is promised.
pub(in crate::train) const PROMISED: f64 = 0.002;
/// Accepted distance from the target for a model whose prices are steered; it is below what is promised.
const STEERED_CLOSE: f64 = 0.0015;
/// The most steered models.
const MAX_STEERED: usize = 4;
/// Probability of another whole model after a steered one, for the estimate of the remaining work.
const AGAIN: f64 = 0.25;
/// Accepted distance for a stage that is not the last.
const NEAR: f64 = 0.02;
/// The most whole models in one search.
const MAX_MODELS: usize = 24;
/// First factor between two strengths, as long as the target does not lie between two models.
const STRIDE: f64 = 4.0;

/// Slopes (sparsity per unit of log strength) outside this range are not used.
pub(in crate::train) const SLOPES: std::ops::RangeInclusive<f64> = 0.02..=1.0;

/// Known points of strength and sparsity, or of another quantity that nearly always grows with the strength.
#[derive(Debug, Clone, Default)]
pub struct Found {
    /// Pairs (log strength, sparsity) in the order in which they were found.
    points: Vec<(f64, f64)>,
    /// Sparsity per unit of log strength, if it is known beforehand.
    slope: Option<f64>,
}

impl Found {
    /// No points yet, but possibly a known slope.
    pub(in crate::train) fn with_slope(slope: Option<f64>) -> Self {
        Self { slope, ..Self::default() }
    }

    /// Number of points.
    pub(in crate::train) fn count(&self) -> usize {
        self.points.len()
    }

    /// Whether a point is close enough to a target; how close may depend on the number of points.
    pub(in crate::train) fn is_close(&self, target: f64, close: impl Fn(usize) -> f64) -> bool {
        self.nearest(target).is_some_and(|(_, sparsity)| (sparsity - target).abs() <= close(self.points.len()))
    }

    /// Adds a point. Returns false if that strength was known already, because to try it again gives nothing new.
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
        let slope = self.slope_near(target);
        let step = |from: f64| slope.map_or(STRIDE.ln(), |s| ((target - from).abs() / s).min(STRIDE.ln()));
        let log = match (low, high) {
            (Some(l), Some(h)) if h.1 > l.1 && h.0 > l.0 => {
                // A point between the secant's and the middle, so that both ends of the bracket move.
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

    /// Sparsity per unit of log strength: that of the two points nearest to a target, or the one known beforehand.
    pub(in crate::train) fn slope_near(&self, target: f64) -> Option<f64> {
        let mut points = self.points.clone();
        points.sort_by(|a, b| (a.1 - target).abs().total_cmp(&(b.1 - target).abs()));
        let slope = match points[..] {
            [a, b, ..] => Some((b.1 - a.1) / (b.0 - a.0)),
            _ => None,
        };
        slope.filter(|s| SLOPES.contains(s)).or(self.slope)
    }
}

/// Fits at the given strength, or searches for the target, in stages where that is worthwhile.
pub(in crate::train) fn search(input: &TrainInput, settings: &TrainSettings, run: &mut Run) -> Result<Trained> {
    let mut search = StagedSearch::new(settings);
    let staged = settings.target_sparsity.filter(|_| stages::are_taken(input, settings));
    let rungs = staged.map_or_else(Vec::new, |target| stages::rungs(None, target));
    for rung in rungs.iter().take(rungs.len().saturating_sub(1)) {
        let fitted = search.step(input, settings, Some(*rung), false, run)?;
        search.start_next_stage_from(fitted.model, input, settings, run)?;
    }
    let fitted = search.step(input, settings, settings.target_sparsity, true, run)?;
    Ok(search.finish(fitted))
}

/// A search in stages, each starting from the states of the model before it, refitted in the output metric.
pub(in crate::train) struct StagedSearch {
    before: Option<stages::Stage>,
    taken: usize,
    start: Start,
    /// Sparsity of the last model.
    reached: Option<f64>,
    path: Vec<TriedModel>,
}

impl StagedSearch {
    pub(in crate::train) fn new(settings: &TrainSettings) -> Self {
        let start = Start { strength: settings.strength, slope: None };
        Self { before: None, taken: 0, start, reached: None, path: Vec::new() }
    }

    /// The model at a target (or at the strength of the settings), refitted; certified and close to the target if it
    /// is one to keep.
    pub(in crate::train) fn step(
        &mut self,
        input: &TrainInput,
        settings: &TrainSettings,
        target: Option<f64>,
        to_keep: bool,
        run: &mut Run,
    ) -> Result<Fitted> {
        let keep = stages::Within { keep: run.keep, search: Search::Stage(self.taken) };
        let mut run = Run { threads: run.threads, cancel: run.cancel, keep: &keep, progress: &mut *run.progress };
        // The next stage begins at a strength that follows from the curve of the last one.
        if let (Some(target), Some(reached), Some(slope)) = (target, self.reached, self.start.slope) {
            self.start.strength *= ((target - reached) / slope).clamp(-STRIDE.ln(), STRIDE.ln()).exp();
        }
        let (start, path) = (&mut self.start, &mut self.path);
        let fitted = match &self.before {
            None => to_target(input, settings, start, target, to_keep, &mut run, path)?,
            Some(stage) => {
                let settings = TrainSettings {
                    allowed: AllowedWeights { connectivity: stage.connectivity.clone(), ..settings.allowed.clone() },
                    ..settings.clone()
                };
                let states = stage.states(input.source);
                to_target(&stage.input(&states, input), &settings, start, target, to_keep, &mut run, path)?
            }
        };
        self.taken += 1;
        self.reached = Some(fitted.model.sparsity().sparsity);
        refitted(fitted, input, settings, self.start.strength, &mut run)
    }

    /// The next stage starts from this model.
    pub(in crate::train) fn start_next_stage_from(
        &mut self,
        model: ImplicitModel,
        input: &TrainInput,
        settings: &TrainSettings,
        run: &Run,
    ) -> Result<()> {
        self.before = Some(stages::Stage::new(model, input, settings, run)?);
        Ok(())
    }

    /// A step's model with everything tried so far.
    pub(in crate::train) fn finish(&self, fitted: Fitted) -> Trained {
        fitted.trained(self.start.strength, self.path.clone(), None)
    }
}

/// The model whose sparsity is the target's (or the one at the start without a target), before any refit in the output
/// metric, and again where weights are priced by the model before. `start` is set to the strength and slope found.
fn to_target(
    input: &TrainInput,
    settings: &TrainSettings,
    start: &mut Start,
    target: Option<f64>,
    last: bool,
    run: &mut Run,
    path: &mut Vec<TriedModel>,
) -> Result<Fitted> {
    let mut fitter = Fitter::new(input, settings, run)?;
    let (mut joint, mut allocation) = (None, None);
    // Without feature maps whole models cost little more than rough ones, so the search itself can begin, unless
    // layers are to have prices of their own.
    let begins_rough = settings.model.cascade && (fitter.has_taps() || settings.model.allocate > 0);
    if let Some(target) = target.filter(|_| begins_rough) {
        let whole = fitter.work(input, settings);
        let found = rough(input, settings, target, whole, run)?;
        fitter.left = AGAIN * whole;
        (*start, joint, fitter.steering) = (found.start, found.joint, found.steering);
        allocation = found.allocation;
    }
    let input = &input.weighed(joint.as_deref());
    let mut trials = Trials { fitter: &mut fitter, input, settings, path, best: None };
    let mut fitted = trials.search(start, target, last, run)?;
    for _ in 0..settings.model.robust_rounds {
        trials.fitter.prices.renew(&fitted.model, &input.preprocessing)?;
        fitted = trials.search(start, target, last, run)?;
    }
    Ok(Fitted { allocation, importance: joint, ..fitted })
}

/// Models of one stage at changing prices; all of them are recorded.
struct Trials<'a, 'b> {
    fitter: &'a mut Fitter,
    input: &'a TrainInput<'b>,
    settings: &'a TrainSettings,
    path: &'a mut Vec<TriedModel>,
    /// The model nearest to the target so far, its distance from it, and its common price.
    best: Option<(f64, f64, Fitted)>,
}

impl Trials<'_, '_> {
    /// The model at the target, or at the start without one. `start` is set to the strength and slope found.
    fn search(&mut self, start: &mut Start, target: Option<f64>, last: bool, run: &mut Run) -> Result<Fitted> {
        let Some(target) = target else {
            let fitted = fit::fit(self.fitter, self.input, self.settings, start.strength, true, run)?;
            reported(&fitted, start.strength, run, self.path);
            return Ok(fitted);
        };
        let close = if last { CLOSE } else { NEAR };
        // If a model costs a walk over all positions, the second one is accepted as soon as it is within the promised
        // distance.
        let dear = self.fitter.has_taps() && last;
        let enough = |models: usize| if dear && models >= 2 { PROMISED } else { close };
        let steering = self.fitter.steering.take();
        let allotted = steering.clone().filter(Steering::is_allotted);
        if let Some(steering) = steering {
            self.steer(target, steering, run)?;
        }
        // Few groups, or a target beyond the surveyed prices, may be beyond what steering can reach. Then one price
        // for all is searched for, times the factors of the layers.
        if self.best.as_ref().is_none_or(|(distance, _, _)| *distance > PROMISED) {
            let first = self.best.as_ref().map_or(start.strength, |(_, strength, _)| *strength);
            let mut found = Found::with_slope(start.slope);
            seek(
                &mut found,
                target,
                first,
                |found| found.is_close(target, enough),
                |strength| {
                    self.fitter.steering = allotted.as_ref().map(|prices| prices.held(strength));
                    self.fit(strength, target, run)
                },
            )?;
            self.fitter.steering = None;
            start.slope = found.slope_near(target);
        }
        // Cannot happen, because at least one model was fitted.
        let Some((_, strength, fitted)) = self.best.take() else {
            return Err(crate::Error::shape("models of a search", "at least one", 0));
        };
        start.strength = strength;
        if last { fit::certified(self.fitter, self.input, self.settings, strength, fitted, run) } else { Ok(fitted) }
    }

    /// Models whose prices are steered from group to group; usually the first one is close enough.
    fn steer(&mut self, target: f64, mut steering: Steering, run: &mut Run) -> Result<()> {
        for _ in 0..MAX_STEERED {
            let strength = steering.common();
            self.fitter.steering = Some(steering);
            let distance = (self.fit(strength, target, run)? - target).abs();
            let Some(passed) = self.fitter.steering.take().filter(|_| distance > STEERED_CLOSE) else { break };
            steering = passed;
            steering.again();
        }
        Ok(())
    }

    /// The sparsity of the model at a price; the model is kept if it is the nearest to the target so far.
    fn fit(&mut self, strength: f64, target: f64, run: &mut Run) -> Result<f64> {
        let fitted = fit::fit(self.fitter, self.input, self.settings, strength, false, run)?;
        let sparsity = reported(&fitted, strength, run, self.path);
        let distance = (sparsity - target).abs();
        if self.best.as_ref().is_none_or(|(so_far, _, _)| distance < *so_far) {
            self.best = Some((distance, strength, fitted));
        }
        Ok(sparsity)
    }
}

/// Adds a fitted model to the path, reports it as progress, and returns its sparsity.
fn reported(fitted: &Fitted, strength: f64, run: &mut Run, path: &mut Vec<TriedModel>) -> f64 {
    let tried = fitted.tried(strength);
    (run.progress)(Progress::Model { strength, sparsity: tried.sparsity });
    path.push(tried);
    tried.sparsity
}

/// The strength at which a search begins, and the slope of sparsity over log strength if it is known.
#[derive(Debug, Clone, Copy)]
pub(in crate::train) struct Start {
    pub(in crate::train) strength: f64,
    pub(in crate::train) slope: Option<f64>,
}

/// Fits models at changing strengths, starting at `first` if nothing is known, until `enough` holds for a target or a
/// strength is repeated. Targets, paths and largest drops all use this search.
pub(in crate::train) fn seek(
    found: &mut Found,
    target: f64,
    first: f64,
    enough: impl Fn(&Found) -> bool,
    mut measure: impl FnMut(f64) -> Result<f64>,
) -> Result<()> {
    for _ in 0..MAX_MODELS {
        if enough(found) {
            break;
        }
        let strength = found.next(target).unwrap_or(first);
        let measured = measure(strength)?;
        if !found.add(strength, measured) {
            break;
        }
    }
    Ok(())
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
        // Two points of a straight line determine it, also outside of their range.
        let line = |strength: f64| 0.5 + 0.08 * strength.ln();
        let mut found = Found::default();
        [1.0, 4.0].into_iter().for_each(|strength| assert!(found.add(strength, line(strength))));
        assert!((line(found.next(0.7).unwrap()) - 0.7).abs() < 1e-12);
        assert!((line(found.next(0.4).unwrap()) - 0.4).abs() < 1e-12);
    }
}
