//! Refits all non-zeros together, in the metric of the output.
//!
//! The row problems weigh an error in a pre-activation by its average effect; they do not account for the joint
//! effect of all errors on the output. On the support that they chose, this refit solves a short sequence of convex
//! least-squares problems: the model is linearised in its weights ([`crate::train::refit::linearised`]) and
//!
//! E KL(baseline ‖ model) + η/2·Σ λ_i·E(x_i − x̄_i)² + ρ/2·Σ d_k·(w_k − w⁰_k)²
//!
//! is replaced by its Gauss–Newton quadratic, minimised by conjugate gradients. The second term is that of the row
//! problems (at the model's states, without differences that the activation hides); it keeps states near the
//! baseline's where the output does not depend on them. The third pulls towards the weights that the refit started
//! from, in the units of the row problems' diagonal d, because late layers have more weights than samples can
//! determine. Every tenth sample is not fitted: ρ is chosen so that the divergence of these samples is smallest, and
//! no step is taken that raises it. The block-diagonal of the quadratic is the row problems' λ_i·G on each row's
//! support, which is the preconditioner. Neither labels nor step sizes are needed: a step is halved until the true
//! objective falls, or is not taken.

mod on_device;
mod problem;
mod runner;
mod sketch;
#[cfg(test)]
mod tests;
mod whole;

pub(in crate::train) use on_device::There;
use problem::At;
pub(in crate::train) use problem::{Chunk, Chunks, Given, Problem, Value, chunk_of};
use sketch::Sketch;
#[cfg(test)]
use whole::output_refit;
pub(in crate::train) use whole::refitted;

use crate::Result;
use crate::equilibrium::{Equilibrium, EquilibriumSettings};
use crate::model::ImplicitModel;
use crate::parallel::Threads;
use crate::problem::Matching;
use crate::train::keep;
use crate::train::refit::linearised::Linearised;
use crate::train::refit::row_blocks::{conjugate_gradients, into_ball};
use crate::train::{Key, Run, TrainSettings, shares_weights};

/// Rounds for models without shared weights or operators, if the settings give no number.
const ROUNDS: usize = 4;
/// The most halvings of a step; if none of them helps, the round has failed.
const HALVINGS: usize = 5;
/// A round that lowers the divergence of held-out samples by less than this share is the last.
const WORTH: f64 = 0.01;
/// Conjugate gradient steps in a round, and for each further ρ, which starts from the step of the one before.
const STEPS: usize = 20;
const STEPS_AGAIN: usize = 6;
/// The values of ρ, tried from the smallest until one lowers the divergence of held-out samples less than the one
/// before.
const RIDGES: [f64; 4] = [0.0, 0.01, 0.1, 1.0];
/// If held-out samples gain this share of the gain of fitted ones, there is no over-fitting, and larger ρ are not
/// tried.
const ENOUGH: f64 = 0.8;

/// The results of the refit in the output metric.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OutputRefit {
    /// Objective before the refit, of the row problems' answer.
    pub before: f64,
    /// Objective of the returned model.
    pub after: f64,
    /// Divergence of the outputs of held-out samples, before the refit.
    pub held_out_before: f64,
    /// The same divergence for the returned model; never larger.
    pub held_out_after: f64,
    /// ρ: how strongly weights were pulled to their starting values, relative to the row problems' own curvature.
    pub ridge: f64,
    /// Number of rounds that lowered the objective.
    pub rounds: usize,
}

/// Number of rounds of the refit that the settings ask for; if they give none, the number that is worthwhile for
/// models of this kind.
pub(in crate::train) fn rounds(model: Option<&ImplicitModel>, settings: &TrainSettings) -> usize {
    let shares = model.is_some_and(shares_weights);
    let exact = settings.rows.matching == Matching::Exact;
    settings.model.output_refit.unwrap_or(if shares || exact { 0 } else { ROUNDS })
}

/// The row of every unit, then of every output; none for what an operator computes.
pub(in crate::train) fn rows_of_units(model: &ImplicitModel) -> Vec<Option<usize>> {
    let layout = model.layout();
    let mut out = Vec::with_capacity(layout.size() + model.shape().outputs);
    for (k, layer) in layout.layers().iter().enumerate() {
        let (first, rows) = (layout.row_range(k).start, layer.rows());
        let each = layer.size / rows.max(1);
        out.extend((0..layer.size).map(|i| (rows > 0).then(|| first + i / each)));
    }
    out.extend((layout.rows()..layout.rows() + model.shape().outputs).map(Some));
    out
}

pub(in crate::train) fn equilibrium(model: &ImplicitModel) -> Result<Equilibrium> {
    // Only whether a sample has an equilibrium is needed, so its error is not bounded.
    Equilibrium::new(model, EquilibriumSettings { threads: Threads::one(), certified: false, ..Default::default() })
}

/// Rounds that minimise one objective, over the weights that the scope of a linearised model lets change.
pub(in crate::train) struct Refit<'r, 'p> {
    pub(in crate::train) problem: &'r Problem<'p>,
    pub(in crate::train) support: &'r Linearised,
    /// The weights that the ridge pulls towards.
    pub(in crate::train) start: &'r [f64],
    pub(in crate::train) settings: &'r TrainSettings,
    pub(in crate::train) rounds: usize,
    /// Steps of conjugate gradients in a round.
    pub(in crate::train) steps: usize,
}

impl Refit<'_, '_> {
    /// The refitted model that starts from weights `w`, the values reached, and its weights. Every round is kept
    /// under its key.
    pub(in crate::train) fn refit(
        &self,
        model: ImplicitModel,
        w: Vec<f64>,
        key: impl Fn(usize) -> Key,
        after_round: impl Fn(usize, Value, &mut Run),
        run: &mut Run,
    ) -> Result<(ImplicitModel, OutputRefit, Vec<f64>)> {
        let Self { problem, support, settings, .. } = self;
        // The row problems' curvature is taken at the starting model, for all rounds.
        let (before, mut sketch) = (model.clone(), None);
        let mut model = model;
        let mut now = State { w, value: problem.value(&model)?, ridge: None };
        let first = now.value;
        let mut report = OutputRefit {
            before: first.all,
            after: first.all,
            held_out_before: first.held_out,
            held_out_after: first.held_out,
            ridge: 0.0,
            rounds: 0,
        };
        for round in 0..self.rounds {
            run.cancel.check()?;
            let kept = keep::numbers(run.keep, &key(round), now.w.len() + 4, || {
                let at = problem.at(&model)?;
                let sketch = match &sketch {
                    Some(sketch) => sketch,
                    None if round == 0 => sketch.insert(Sketch::new(problem, &at, support)?),
                    None => sketch.insert(Sketch::new(problem, &problem.at(&before)?, support)?),
                };
                Ok(self.step(&model, &now, &at, sketch)?.to_numbers())
            })?;
            let next = State::from_numbers(kept);
            after_round(round + 1, next.value, run);
            if next.value.fitted >= now.value.fitted {
                break;
            }
            let fruitful = next.value.held_out < (1.0 - WORTH) * now.value.held_out;
            now = next;
            model = support.with_weights(&model, &now.w, settings.allowed.kappa.is_some())?;
            report = OutputRefit {
                after: now.value.all,
                held_out_after: now.value.held_out,
                ridge: now.ridge.unwrap_or(0.0),
                rounds: round + 1,
                ..report
            };
            if !fruitful {
                break;
            }
        }
        Ok((model, report, now.w))
    }
}

/// The state of the refit.
struct State {
    w: Vec<f64>,
    value: Value,
    /// ρ, when it has been chosen.
    ridge: Option<f64>,
}

impl State {
    fn to_numbers(&self) -> Vec<f64> {
        let Value { all, fitted, held_out } = self.value;
        self.w.iter().copied().chain([all, fitted, held_out, self.ridge.unwrap_or(0.0)]).collect()
    }

    fn from_numbers(mut numbers: Vec<f64>) -> Self {
        let ridge = numbers.pop();
        let mut next = || numbers.pop().unwrap_or(f64::INFINITY);
        let (held_out, fitted, all) = (next(), next(), next());
        Self { w: numbers, value: Value { all, fitted, held_out }, ridge }
    }
}

/// One Gauss–Newton step.
impl Refit<'_, '_> {
    /// The state after the step from `now`; `now` itself if no step helps both fitted and held-out samples.
    fn step(&self, model: &ImplicitModel, now: &State, at: &At, sketch: &Sketch) -> Result<State> {
        let weights = self.support.dense(&now.w);
        let mut descent = self.problem.descent(at, self.support, &weights)?;
        // Layers that were left out stay as they are, and so does everything outside of the scope: the step has no
        // part in their entries, and neither has anything that it is computed from.
        let kept = model.kept_rows();
        let moved = self.support.moved();
        let hold = |values: &mut [f64]| {
            let entries = values.iter_mut().zip(self.support.entries()).zip(&moved);
            let held = entries.filter(|((_, entry), moved)| kept[entry.row] || !**moved);
            held.for_each(|((v, _), _)| *v = 0.0);
        };
        hold(&mut descent);
        let diagonal = &sketch.diagonal;
        let mut best = State { w: now.w.clone(), value: now.value, ridge: now.ridge };
        let ridges = now.ridge.map_or(RIDGES.to_vec(), |ridge| vec![ridge]);
        // Every ridge starts from the step of the ridge before, if that was finite; its residual is computed from the
        // other's.
        let (mut step, mut residual, mut before) = (vec![0.0; descent.len()], descent.clone(), 0.0);
        let mut fresh = true;
        for ridge in ridges {
            let pull = |k: usize| diagonal[k] * (now.w[k] - self.start[k]);
            let right: Vec<f64> = descent.iter().enumerate().map(|(k, d)| d - ridge * pull(k)).collect();
            for (k, r) in residual.iter_mut().enumerate() {
                *r -= (ridge - before) * (pull(k) + diagonal[k] * step[k]);
            }
            before = ridge;
            let mut preconditioner = sketch.preconditioner(ridge)?;
            if let Some(kappa) = self.settings.allowed.kappa {
                preconditioner.hold(self.support, &now.w, kappa, &right);
            }
            let product = |direction: &[f64]| {
                let mut out = self.problem.curvature(at, self.support, &weights, direction)?;
                for (k, o) in out.iter_mut().enumerate() {
                    *o += Sketch::damping(ridge) * diagonal[k] * direction[k];
                }
                hold(&mut out);
                Ok(out)
            };
            let steps = if fresh { self.steps } else { self.steps.min(STEPS_AGAIN) };
            conjugate_gradients(&mut step, &mut residual, &right, steps, &preconditioner, product)?;
            let judged = self.judged(model, now, &step, ridge)?;
            fresh = judged.is_none();
            if fresh {
                step.fill(0.0);
                residual.copy_from_slice(&right);
            }
            let Some(next) = judged else { continue };
            let worse = next.value.held_out >= best.value.held_out;
            let gained = |before: f64, after: f64| (before - after) / before.max(f64::MIN_POSITIVE);
            let fitted = gained(now.value.fitted, next.value.fitted);
            let held_out = gained(now.value.held_out, next.value.held_out);
            if worse {
                break;
            }
            best = next;
            if held_out >= ENOUGH * fitted {
                break;
            }
        }
        Ok(best)
    }

    /// Takes the largest share of a step that lowers the objective and does not raise the divergence of held-out
    /// samples.
    fn judged(&self, model: &ImplicitModel, now: &State, step: &[f64], ridge: f64) -> Result<Option<State>> {
        for halving in 0..=HALVINGS {
            let share = 0.5f64.powi(halving as i32);
            let mut w: Vec<f64> = now.w.iter().zip(step).map(|(w, d)| w + share * d).collect();
            if let Some(kappa) = self.settings.allowed.kappa {
                into_ball(&mut w, self.support, kappa);
            }
            // The weights are judged after rounding, as they will be stored.
            let stored = self.support.with_weights(model, &w, self.settings.allowed.kappa.is_some())?;
            let value = self.problem.value(&stored)?;
            if value.fitted < now.value.fitted && value.held_out <= now.value.held_out {
                return Ok(Some(State { w, value, ridge: Some(ridge) }));
            }
        }
        Ok(None)
    }
}
