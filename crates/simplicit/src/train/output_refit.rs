//! Refit of all non-zeros together, in the metric of the output.
//!
//! The row problems see an error in a pre-activation by its average weight; what the output makes of all errors together
//! they do not see. On the support they chose, this solves a short sequence of convex least-squares problems: the model
//! is linearised in its weights ([`super::linearised`]) and
//!
//! E KL(baseline ‖ model) + η/2·Σ λ_i·E(x_i − x̄_i)²
//!
//! is replaced by its Gauss–Newton quadratic, minimised by conjugate gradients. The second term is the row problems' own
//! (at the model's states, and blind to what the activation hides); it keeps states near the baseline's where the
//! output says nothing. The block-diagonal of the quadratic is the row problems' λ_i·G on each row's support, which is
//! the preconditioner. No labels, no step sizes: a step is halved until the true objective falls, or is not taken.

use super::fit::Fitted;
use super::keep;
use super::linearised::{Samples, Support, gates};
use super::output_metric::Metric;
use super::row_blocks::{Preconditioner, conjugate_gradients, into_ball};
use super::{Progress, Run, TrainInput, TrainSettings};
use crate::equilibrium::{Equilibrium, EquilibriumSettings};
use crate::linalg::{Cholesky, Csr, Matrix, toward_zero};
use crate::model::ImplicitModel;
use crate::parallel::{self, Cancel, Threads};
use crate::statistics::{BLOCK, Statistics};
use crate::{Error, Result};

/// η: weight of the states beside the output.
const STATES: f64 = 0.1;
/// Damping of a step, relative to the row problems' diagonal.
const DAMPING: f64 = 1e-3;
/// Step halvings before a round counts as fruitless.
const HALVINGS: usize = 5;
/// A round that lowers the objective by less than this share is the last.
const WORTH: f64 = 0.005;
/// Samples the preconditioner is made from: it shapes the way, not the answer.
const SKETCH: usize = 8 * BLOCK;
/// Largest block of the preconditioner.
const CHUNK: usize = 256;
/// Row weights below this share of their mean count as this share in the preconditioner.
const LEAST: f64 = 1e-4;
/// Samples are held in memory up to this many bytes; of more, the first are used.
const HELD: usize = 1 << 30;

/// What the refit in the output metric did.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OutputRefit {
    /// Objective of the row problems' answer.
    pub before: f64,
    /// Objective of the model returned.
    pub after: f64,
    /// Rounds that lowered it.
    pub rounds: usize,
}

/// One block of samples with what the baseline makes of them.
struct Held {
    u: Matrix<f32>,
    x: Matrix<f32>,
    y: Matrix<f32>,
}

/// Where the model is on one block.
struct Point {
    x: Matrix<f32>,
    gates: Matrix<f32>,
    /// Probabilities, or nothing for squares.
    p: Matrix<f32>,
    /// Gradient of the objective in outputs and pre-activations.
    v: Matrix<f32>,
    c: Matrix<f32>,
}

/// The objective on the samples held.
struct Problem<'a> {
    held: Vec<Held>,
    samples: f64,
    metric: Metric,
    /// η·λ_i of every state.
    states: Vec<f32>,
    threads: Threads,
    cancel: &'a Cancel,
}

/// A fitted model with its non-zeros refitted, its rows and its error reported as they are now.
pub(super) fn refitted(
    fitted: Fitted,
    input: &TrainInput,
    settings: &TrainSettings,
    strength: f64,
    run: &mut Run,
) -> Result<Fitted> {
    // Shared weights have no such products yet.
    if !fitted.model.taps().is_empty() || fitted.model.layout().has_operators() {
        return Ok(fitted);
    }
    let Fitted { model, mut rows, training_error, evidence, strengths, .. } = fitted;
    let (model, output_refit) = output_refit(model, input, settings, &format!("strength {strength:e}"), run)?;
    if output_refit.is_none_or(|r| r.rounds == 0) {
        return Ok(Fitted { model, rows, training_error, output_refit, evidence, strengths });
    }
    let n = model.shape().states;
    let mismatch = mismatch(&model, input, run)?;
    let mut nonzeros = vec![0; rows.len()];
    Support::of(&model).0.entries().iter().for_each(|(i, _)| nonzeros[*i] += 1);
    for (i, row) in rows.iter_mut().enumerate() {
        let (residual, energy) = mismatch[i];
        row.nonzeros = nonzeros[i];
        row.relative_residual = if energy > 0.0 { (residual / energy).sqrt() } else { 0.0 };
    }
    let (residual, energy) = mismatch[n..].iter().fold((0.0, 0.0), |(r, e), m| (r + m.0, e + m.1));
    let training_error = if energy > 0.0 { (residual / energy).sqrt() } else { 0.0 };
    Ok(Fitted { model, rows, training_error, output_refit, evidence, strengths })
}

/// Squared mismatch and energy of every row's target, at the model's own states.
fn mismatch(model: &ImplicitModel, input: &TrainInput, run: &Run) -> Result<Vec<(f64, f64)>> {
    let equilibrium = Equilibrium::new(model, EquilibriumSettings { threads: Threads::one(), ..Default::default() })?;
    let samples = input.source.samples();
    let shape = model.shape();
    let mut total = vec![(0.0, 0.0); shape.states + shape.outputs];
    parallel::fold(
        run.threads,
        samples.div_ceil(BLOCK),
        |block| {
            run.cancel.check()?;
            let theirs = input.source.block(block * BLOCK..((block + 1) * BLOCK).min(samples))?;
            let ours = equilibrium.run(&theirs.u.cast())?;
            let mut sums = vec![(0.0, 0.0); shape.states + shape.outputs];
            for s in 0..theirs.samples() {
                let targets = theirs.z.row(s).iter().chain(theirs.y.row(s));
                let reached = ours.z.row(s).iter().chain(ours.y.row(s));
                for ((sum, t), r) in sums.iter_mut().zip(targets).zip(reached) {
                    sum.0 += (t - f64::from(*r)).powi(2);
                    sum.1 += t * t;
                }
            }
            Ok(sums)
        },
        |_, sums| {
            total.iter_mut().zip(sums).for_each(|(t, s)| *t = (t.0 + s.0, t.1 + s.1));
            Ok(())
        },
    )?;
    Ok(total)
}

/// Refits the non-zeros of `model`; at most `settings.output_refit` rounds.
fn output_refit(
    model: ImplicitModel,
    input: &TrainInput,
    settings: &TrainSettings,
    key: &str,
    run: &mut Run,
) -> Result<(ImplicitModel, Option<OutputRefit>)> {
    let (support, mut w) = Support::of(&model);
    if settings.output_refit == 0 || w.is_empty() {
        return Ok((model, None));
    }
    let problem = Problem::new(input, run)?;
    let mut model = model;
    let before = problem.value(&model)?;
    let mut report = OutputRefit { before, after: before, rounds: 0 };
    for round in 0..settings.output_refit {
        run.cancel.check()?;
        // Kept: the weights, and the objective there.
        let mut kept = keep::numbers(run.keep, &format!("{key} output refit {round}"), w.len() + 1, || {
            let (mut w, after) = problem.round(&model, &support, &w, report.after, input, settings)?;
            w.push(after);
            Ok(w)
        })?;
        let after = kept.pop().unwrap_or(report.after);
        (run.progress)(Progress::OutputRefit { round: round + 1, rounds: settings.output_refit, objective: after });
        if after >= report.after {
            break;
        }
        let fruitful = after < (1.0 - WORTH) * report.after;
        report = OutputRefit { after, rounds: round + 1, ..report };
        w = kept;
        model = with_weights(&model, &support, &w, settings)?;
        if !fruitful {
            break;
        }
    }
    Ok((model, Some(report)))
}

/// The same model with other values at its non-zeros, rounded as stored.
fn with_weights(
    model: &ImplicitModel,
    support: &Support,
    w: &[f64],
    settings: &TrainSettings,
) -> Result<ImplicitModel> {
    let shape = model.shape();
    let (n, p) = (shape.states, shape.inputs);
    let mut rows: Vec<Vec<(usize, f32)>> = vec![Vec::new(); n + shape.outputs];
    for (&(i, j), &v) in support.entries().iter().zip(w) {
        let in_ball = settings.kappa.is_some() && i < n && j < n;
        rows[i].push((j, if in_ball { toward_zero(v) } else { v as f32 }));
    }
    let matrix = |rows: &[Vec<(usize, f32)>], from: usize, cols: usize| {
        let inside = move |(j, v): &(usize, f32)| (from..from + cols).contains(j).then(|| (j - from, *v));
        Csr::from_rows(cols, rows.iter().map(|r| r.iter().filter_map(inside).filter(|(_, v)| *v != 0.0)))
    };
    let bias = |rows: &[Vec<(usize, f32)>]| -> Vec<f32> {
        rows.iter().map(|r| r.last().filter(|(j, _)| *j == n + p).map_or(0.0, |(_, v)| *v)).collect()
    };
    let (top, bottom) = rows.split_at(n);
    let mut parts = model.clone().into_parts();
    (parts.a, parts.b, parts.state_bias) = (matrix(top, 0, n), matrix(top, n, p), bias(top));
    (parts.c, parts.d, parts.output_bias) = (matrix(bottom, 0, n), matrix(bottom, n, p), bias(bottom));
    ImplicitModel::new(parts)
}

impl<'a> Problem<'a> {
    fn new(input: &TrainInput, run: &Run<'a>) -> Result<Self> {
        let shape = input.source.shape();
        let each = 4 * (shape.inputs + 4 * shape.states + 3 * shape.outputs);
        let samples = input.source.samples().min((HELD / each.max(1)).max(BLOCK));
        let held = parallel::map(run.threads, samples.div_ceil(BLOCK), |block| {
            run.cancel.check()?;
            let states = input.source.block(block * BLOCK..((block + 1) * BLOCK).min(samples))?;
            Ok(Held { u: states.u.cast(), x: states.x.cast(), y: states.y.cast() })
        })?;
        let mean_square = |pick: &dyn Fn(&Held) -> &Matrix<f32>, j: usize| -> f64 {
            let sum: f64 =
                held.iter().map(|h| (0..pick(h).rows()).map(|s| f64::from(pick(h)[(s, j)]).powi(2)).sum::<f64>()).sum();
            sum / samples as f64
        };
        let (metric, states) = match input.importance.filter(|_| shape.outputs > 1) {
            Some(weights) => {
                let scale = input.baseline.and_then(|b| b.metadata().scaling.as_ref()).map_or(1.0, |s| s.outputs);
                (Metric::Softmax { scale }, weights[..shape.states].to_vec())
            }
            None => {
                let energy: f64 = (0..shape.outputs).map(|j| mean_square(&|h| &h.y, j)).sum();
                let weight = 1.0 / energy.max(f64::MIN_POSITIVE);
                // Every state counts as its share of all states, relative to its own size.
                let share = |i: usize| 1.0 / (mean_square(&|h| &h.x, i).max(f64::MIN_POSITIVE) * shape.states as f64);
                (Metric::Squares { weight }, (0..shape.states).map(share).map(|v| v.min(1e12)).collect())
            }
        };
        let states = states.iter().map(|l| (STATES * l) as f32).collect();
        Ok(Self { held, samples: samples as f64, metric, states, threads: run.threads, cancel: run.cancel })
    }

    fn equilibrium(&self, model: &ImplicitModel) -> Result<Equilibrium> {
        Equilibrium::new(model, EquilibriumSettings { threads: Threads::one(), ..Default::default() })
    }

    /// Σ over blocks, in order.
    fn sum<T: Send>(&self, work: impl Fn(usize) -> Result<T> + Sync, mut take: impl FnMut(T)) -> Result<()> {
        parallel::fold(
            self.threads,
            self.held.len(),
            |block| {
                self.cancel.check()?;
                work(block)
            },
            |_, value| {
                take(value);
                Ok(())
            },
        )
    }

    /// The objective; infinite if a sample has no equilibrium.
    fn value(&self, model: &ImplicitModel) -> Result<f64> {
        let equilibrium = self.equilibrium(model)?;
        let mut total = 0.0;
        let work = |block: usize| {
            let held = &self.held[block];
            let solution = equilibrium.run(&held.u)?;
            if solution.diagnostics.iter().any(|d| !d.converged) {
                return Ok(f64::INFINITY);
            }
            let mut sum = 0.0;
            for s in 0..held.u.rows() {
                sum += self.metric.value(solution.y.row(s), held.y.row(s));
                let states = solution.x.row(s).iter().zip(held.x.row(s)).zip(&self.states);
                sum += states.map(|((x, b), l)| 0.5 * f64::from(*l) * f64::from(x - b).powi(2)).sum::<f64>();
            }
            Ok(sum)
        };
        self.sum(work, |sum| total += sum)?;
        Ok(total / self.samples)
    }

    /// States, gates and gradients of every block.
    fn points(&self, model: &ImplicitModel) -> Result<Vec<Point>> {
        let equilibrium = self.equilibrium(model)?;
        let mut points = Vec::with_capacity(self.held.len());
        let work = |block: usize| {
            let held = &self.held[block];
            let solution = equilibrium.run(&held.u)?;
            let gates = gates(model.layout(), &solution);
            let (p, v) = self.metric.gradient(&solution.y, &held.y);
            let c = Matrix::from_fn(gates.rows(), gates.cols(), |s, i| {
                self.states[i] * gates[(s, i)] * (solution.x[(s, i)] - held.x[(s, i)])
            });
            Ok(Point { x: solution.x, gates, p, v, c })
        };
        self.sum(work, |point| points.push(point))?;
        Ok(points)
    }

    /// One Gauss–Newton step from `w`, and the objective where it ends; `w` and `value` themselves if none helps.
    fn round(
        &self,
        model: &ImplicitModel,
        support: &Support,
        w: &[f64],
        value: f64,
        input: &TrainInput,
        settings: &TrainSettings,
    ) -> Result<(Vec<f64>, f64)> {
        let points = self.points(model)?;
        let m = support.dense(w);
        let at = |block: usize| {
            let point = &points[block];
            Samples { u: &self.held[block].u, x: &point.x, gates: &point.gates }
        };
        let mut residual = vec![0.0; w.len()];
        self.sum(
            |block| Ok(support.backward(&m, &points[block].v, &points[block].c, &at(block))),
            |gradient| residual.iter_mut().zip(gradient).for_each(|(r, g)| *r -= g / self.samples),
        )?;
        // Layers that were left out stay: neither a step nor what it is made from touches their entries.
        let kept = model.kept_rows();
        let hold = |values: &mut [f64]| {
            values.iter_mut().zip(support.entries()).filter(|(_, (i, _))| kept[*i]).for_each(|(v, _)| *v = 0.0);
        };
        hold(&mut residual);
        let (mut preconditioner, damping) = self.preconditioner(&points, support, input)?;
        if let Some(kappa) = settings.kappa {
            preconditioner.hold(support, w, kappa, &residual, model.shape().states);
        }
        let product = |direction: &[f64]| -> Result<Vec<f64>> {
            let change = support.dense(direction);
            let mut out: Vec<f64> = direction.iter().zip(&damping).map(|(d, damping)| d * damping).collect();
            let work = |block: usize| {
                let (point, at) = (&points[block], at(block));
                let (mut dz, mut dy) = support.forward(&m, &change, &at);
                self.metric.curve(&point.p, &mut dy);
                for s in 0..dz.rows() {
                    let gates = point.gates.row(s).iter().zip(&self.states);
                    dz.row_mut(s).iter_mut().zip(gates).for_each(|(d, (g, l))| *d *= g * g * l);
                }
                Ok(support.backward(&m, &dy, &dz, &at))
            };
            self.sum(work, |part| out.iter_mut().zip(part).for_each(|(o, p)| *o += p / self.samples))?;
            hold(&mut out);
            Ok(out)
        };
        let step = conjugate_gradients(&mut residual, &preconditioner, product)?;
        for halving in 0..=HALVINGS {
            let share = 0.5f64.powi(halving as i32);
            let mut next: Vec<f64> = w.iter().zip(&step).map(|(w, d)| w + share * d).collect();
            if let Some(kappa) = settings.kappa {
                into_ball(&mut next, support, kappa, model.shape().states);
            }
            // Judged as it will be stored.
            let stored = with_weights(model, support, &next, settings)?;
            let reached = self.value(&stored)?;
            if reached < value {
                return Ok((next, reached));
            }
        }
        Ok((w.to_vec(), value))
    }

    /// The row problems' normal matrices from the first samples, and the damping of every entry.
    fn preconditioner(
        &self,
        points: &[Point],
        support: &Support,
        input: &TrainInput,
    ) -> Result<(Preconditioner, Vec<f64>)> {
        let shape = input.source.shape();
        let (n, p) = (shape.states, shape.inputs);
        let count = (self.samples as usize).min(SKETCH);
        let read = |range: std::ops::Range<usize>| {
            let block = range.start / BLOCK;
            let (u, x) = (&self.held[block].u, &points[block].x);
            let feature = |s: usize, j: usize| match j {
                j if j < n => f64::from(x[(s, j)]),
                j if j < n + p => f64::from(u[(s, j - n)]),
                _ => 1.0,
            };
            Ok((Matrix::from_fn(range.len(), n + p + 1, feature), Matrix::zeros(range.len(), 0)))
        };
        let statistics = Statistics::stream(count, self.threads, self.cancel, read, |_| {})?;
        let gram = statistics.gram();
        let mean = |j: usize| gram[(j, j)] / count as f64;
        let typical = (0..n + p).map(mean).sum::<f64>() / (n + p).max(1) as f64;
        let lambda = self.row_weights(input);
        let entries = support.entries();
        // A column that hardly ever fires must not become a free direction.
        let diagonal: Vec<f64> =
            entries.iter().map(|&(i, j)| lambda[i] * mean(j).max(1e-4 * typical).max(f64::MIN_POSITIVE)).collect();
        let mut chunks = Vec::new();
        let mut first = 0;
        while first < entries.len() {
            let row = entries[first].0;
            let length = entries[first..].iter().take(CHUNK).take_while(|(i, _)| *i == row).count();
            let span = first..first + length;
            let mut factor = Cholesky::with_capacity(length);
            let mut ridge = DAMPING;
            while !factor.factor(length, |a| {
                for (r, &(i, j)) in entries[span.clone()].iter().enumerate() {
                    for (s, &(_, k)) in entries[span.clone()].iter().enumerate().skip(r) {
                        a[r * length + s] = lambda[i] * gram[(j, k)] / count as f64;
                    }
                    a[r * length + r] += ridge * diagonal[first + r];
                }
            }) {
                ridge *= 10.0;
                if ridge > 1e6 {
                    return Err(Error::shape("states of the model", "finite numbers", "a NaN"));
                }
            }
            chunks.push((first, factor));
            first += length;
        }
        let damping = diagonal.iter().map(|d| DAMPING * d).collect();
        Ok((Preconditioner { chunks, held: Vec::new() }, damping))
    }

    /// λ_i of every row in the units of the objective, none too small to divide by.
    fn row_weights(&self, input: &TrainInput) -> Vec<f64> {
        let n = self.states.len();
        let raw: Vec<f64> = match (self.metric, input.importance) {
            (Metric::Softmax { .. }, Some(weights)) => weights.to_vec(),
            (Metric::Squares { weight }, _) | (Metric::Softmax { scale: weight }, None) => {
                let states = self.states.iter().map(|l| f64::from(*l) / STATES);
                states.chain(std::iter::repeat_n(weight, input.source.shape().outputs)).collect()
            }
        };
        let floor = |part: &[f64]| LEAST * part.iter().sum::<f64>() / part.len().max(1) as f64;
        let (states, outputs) = raw.split_at(n);
        let floors = (floor(states), floor(outputs));
        let floored = |(i, l): (usize, &f64)| l.max(if i < n { floors.0 } else { floors.1 }).max(f64::MIN_POSITIVE);
        raw.iter().enumerate().map(floored).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Activation;
    use crate::network::{Network, Shape};
    use crate::problem::Connectivity;
    use crate::random::Random;
    use crate::states::Collected;
    use crate::train::{Forget, Objective, Trained, importance, train};

    fn network() -> Network {
        let mut random = Random::new(3);
        let mut weights =
            |rows, cols| Matrix::from_fn(rows, cols, |_, _| (random.normal() * random.uniform().powi(3)) as f32);
        Network::builder(Shape::Vector(12))
            .and_then(|b| b.linear(weights(10, 12), Some(vec![0.1; 10])))
            .and_then(|b| b.activation(Activation::Relu))
            .and_then(|b| b.linear(weights(6, 10), None))
            .and_then(|b| b.activation(Activation::Relu))
            .and_then(|b| b.linear(weights(4, 6), None))
            .and_then(|b| b.build())
            .unwrap()
    }

    fn inputs() -> Matrix<f32> {
        let mut random = Random::new(4);
        Matrix::from_fn(1500, 12, |_, _| random.normal() as f32)
    }

    fn trained(settings: &TrainSettings, weights: Option<&[f64]>, threads: usize) -> Trained {
        let (network, u, cancel) = (network(), inputs(), Cancel::new());
        let baseline = ImplicitModel::from_network(&network).unwrap();
        let source = Collected::new(&network, &u).unwrap();
        let input = TrainInput {
            source: &source,
            baseline: Some(&baseline),
            importance: weights,
            preprocessing: Default::default(),
        };
        let mut run = Run { threads: Threads::new(threads), cancel: &cancel, keep: &Forget, progress: &mut |_| {} };
        train(&input, settings, &mut run).unwrap()
    }

    fn weights() -> Vec<f64> {
        importance(&network(), &inputs(), 2, 0, Threads::one(), &Cancel::new()).unwrap()
    }

    /// The objective from its definition, in double precision, sample by sample.
    fn objective(model: &ImplicitModel, weights: &[f64]) -> f64 {
        let (network, u) = (network(), inputs());
        let ours = Equilibrium::new(model, EquilibriumSettings::default()).unwrap().run(&u).unwrap();
        let theirs = crate::states::StateMap::states(&network, &u).unwrap();
        let log_probabilities = |y: Vec<f64>| -> Vec<f64> {
            let total = y.iter().map(|v| v.exp()).sum::<f64>().ln();
            y.iter().map(|v| v - total).collect()
        };
        let mut sum = 0.0;
        for s in 0..u.rows() {
            let p = log_probabilities(theirs.y.row(s).to_vec());
            let q = log_probabilities(ours.y.row(s).iter().map(|v| f64::from(*v)).collect());
            sum += p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q)).sum::<f64>();
            for (i, weight) in weights.iter().take(16).enumerate() {
                sum += 0.5 * STATES * weight * (f64::from(ours.x[(s, i)]) - theirs.x[(s, i)]).powi(2);
            }
        }
        sum / u.rows() as f64
    }

    #[test]
    fn the_objective_falls_zeros_stay_and_kappa_holds() {
        let weights = weights();
        for (connectivity, kappa) in
            [(Connectivity::Baseline, None), (Connectivity::Feedforward, None), (Connectivity::Full, Some(0.6))]
        {
            let cyclic = kappa.is_some();
            let without =
                TrainSettings { connectivity, kappa, strength: 2e-4, output_refit: 0, ..TrainSettings::default() };
            let with = TrainSettings { output_refit: 3, ..without.clone() };
            let (rows, refit) = (trained(&without, Some(&weights), 2), trained(&with, Some(&weights), 2));
            let report = refit.report.output_refit.unwrap();
            for (model, reported) in [(&rows.model, report.before), (&refit.model, report.after)] {
                let expected = objective(model, &weights);
                assert!((reported - expected).abs() <= 1e-4 * expected, "{reported}, from scratch {expected}");
            }
            assert!(report.rounds > 0 && report.after < 0.9 * report.before, "{report:?}");
            assert!(rows.report.output_refit.is_none());
            assert_eq!(refit.model.well_posedness().acyclic, !cyclic);
            for (before, after) in [
                (rows.model.a(), refit.model.a()),
                (rows.model.b(), refit.model.b()),
                (rows.model.c(), refit.model.c()),
                (rows.model.d(), refit.model.d()),
            ] {
                assert!(before.nonzeros() > 0 || after.nonzeros() == 0);
                for i in 0..before.rows() {
                    let columns: Vec<usize> = before.row(i).map(|(j, _)| j).collect();
                    assert!(after.row(i).all(|(j, _)| columns.contains(&j)), "row {i} gained a non-zero");
                    if let Some(kappa) = kappa.filter(|_| before.cols() == before.rows()) {
                        let sum: f64 = after.row(i).map(|(_, v)| f64::from(v).abs()).sum();
                        assert!(sum <= kappa, "row {i}: {sum}");
                    }
                }
            }
            assert_eq!(trained(&with, Some(&weights), 1).model.to_bytes(), refit.model.to_bytes());
            let stored: usize = refit.report.rows.iter().map(|r| r.nonzeros).sum();
            assert_eq!(stored as u64, refit.model.sparsity().nonzeros);
        }
    }

    #[test]
    fn without_row_weights_outputs_are_matched_in_squares() {
        let penalty = crate::problem::penalty::L1::new(3e-2).unwrap();
        let objective = Objective::Convex(std::sync::Arc::new(penalty));
        let settings = TrainSettings { objective, strength: 1.0, output_refit: 3, ..TrainSettings::default() };
        let refit = trained(&settings, None, 2);
        let rows = trained(&TrainSettings { output_refit: 0, ..settings }, None, 2);
        assert!(refit.report.training_error < rows.report.training_error);
    }

    #[test]
    fn stages_reach_the_target_and_do_no_worse_than_one() {
        let weights = weights();
        let settings = TrainSettings { target_sparsity: Some(0.8), output_refit: 3, ..TrainSettings::default() };
        assert!(super::super::stages::rungs(None, 0.8).len() > 1);
        let staged = trained(&settings, Some(&weights), 2);
        let count = staged.model.sparsity();
        assert!((count.sparsity - 0.8).abs() < 0.01, "{}", count.sparsity);
        assert_eq!(trained(&settings, Some(&weights), 1).model.to_bytes(), staged.model.to_bytes());
        let rows = trained(&TrainSettings { output_refit: 0, ..settings }, Some(&weights), 2);
        assert!(objective(&staged.model, &weights) < objective(&rows.model, &weights));
    }
}
