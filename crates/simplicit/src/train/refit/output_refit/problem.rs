//! The objective of the refit on samples in chunks: its value, its gradient, and products with its curvature.

use std::borrow::Cow;
use std::ops::Range;

use super::{equilibrium, rows_of_units};
use crate::Result;
use crate::equilibrium::Equilibrium;
use crate::layout::Layout;
use crate::linalg::Matrix;
use crate::model::ImplicitModel;
use crate::parallel::{self, Cancel, Threads};
use crate::states::{StateShape, StateSource};
use crate::statistics::BLOCK;
use crate::train::refit::linearised::{Linearised, Samples, Weights, gates};
use crate::train::refit::output_metric::Metric;
use crate::train::{TrainInput, TrainSettings};

/// η: weight of the states beside the output.
pub(super) const STATES: f64 = 0.1;
/// Row weights below this share of their mean count as this share in the preconditioner.
const LEAST: f64 = 1e-4;
/// Samples with their states are held in memory up to this many bytes; those of others are computed again when needed.
const HELD: u64 = 1 << 30;
/// States in a chunk of samples.
const CHUNK_STATES: usize = 1 << 21;
/// One sample of so many is not fitted.
const HELD_OUT: usize = 10;

/// Samples in a chunk; fixed, so that sums depend neither on threads nor on memory.
pub(in crate::train) fn chunk_of(shape: StateShape) -> usize {
    (CHUNK_STATES / shape.states.max(1)).clamp(1, BLOCK)
}

/// The objective of a model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Value {
    /// Over all samples.
    pub(super) all: f64,
    /// Over those that are fitted.
    pub(super) fitted: f64,
    /// Divergence of the outputs alone, over the others (over the fitted ones where there are no others).
    pub(super) held_out: f64,
}

/// A chunk of samples with what the baseline makes of them.
#[derive(Clone)]
struct Chunk {
    u: Matrix<f32>,
    x: Matrix<f32>,
    y: Matrix<f32>,
}

/// Where the model is on the fitted samples of one chunk.
#[derive(Clone)]
pub(super) struct Point {
    pub(super) u: Matrix<f32>,
    pub(super) x: Matrix<f32>,
    gates: Matrix<f32>,
    y: Matrix<f32>,
    /// Probabilities, or nothing for squares.
    p: Matrix<f32>,
}

impl Point {
    fn samples(&self) -> Samples<'_> {
        Samples { u: &self.u, x: &self.x, gates: &self.gates }
    }
}

/// A model on all samples.
pub(super) struct At {
    equilibrium: Equilibrium,
    layout: Layout,
    /// Of the first chunks.
    points: Vec<Point>,
}

/// The objective on the samples.
pub(super) struct Problem<'a> {
    pub(super) source: &'a dyn StateSource,
    pub(super) size: usize,
    /// The first chunks.
    held: Vec<Chunk>,
    metric: Metric,
    /// η·λ of every state.
    states: Vec<f32>,
    /// λ_i of every row in the units of the objective, none too small to divide by.
    pub(super) row_weights: Vec<f64>,
    pub(super) threads: Threads,
    pub(super) cancel: &'a Cancel,
}

impl<'a> Problem<'a> {
    pub(super) fn new(
        model: &ImplicitModel,
        input: &TrainInput<'a>,
        settings: &TrainSettings,
        threads: Threads,
        cancel: &'a Cancel,
    ) -> Result<Self> {
        let (shape, samples) = (input.source.shape(), input.source.samples());
        let size = chunk_of(shape);
        let each = 4 * (2 * shape.inputs + 3 * shape.states + 3 * shape.outputs) as u64;
        let room = settings.work.memory.map_or(HELD, |budget| HELD.min(budget / 2));
        let chunks = (room / (each * size as u64).max(1)).min(samples.div_ceil(size) as u64) as usize;
        let mut problem = Self {
            source: input.source,
            size,
            held: Vec::new(),
            metric: Metric::Squares { weight: 1.0 },
            states: Vec::new(),
            row_weights: Vec::new(),
            threads,
            cancel,
        };
        let range = |k: usize| problem.range(k);
        problem.held = parallel::map(threads, chunks, |k| {
            cancel.check()?;
            let states = input.source.block(range(k))?;
            Ok(Chunk { u: states.u.cast(), x: states.x.cast(), y: states.y.cast() })
        })?;
        problem.weigh(model, input)?;
        Ok(problem)
    }

    /// Chooses the metric and the weights of states and rows.
    fn weigh(&mut self, model: &ImplicitModel, input: &TrainInput) -> Result<()> {
        let shape = input.source.shape();
        let rows = model.layout().rows();
        let row_of = rows_of_units(model);
        let mut units = vec![0usize; rows + shape.outputs];
        row_of.iter().flatten().for_each(|row| units[*row] += 1);
        let of_states = &row_of[..shape.states];
        let mut row_weights;
        match input.importance.filter(|_| shape.outputs > 1) {
            Some(weights) => {
                let scale = input.baseline.and_then(|b| b.metadata().scaling.as_ref()).map_or(1.0, |s| s.outputs);
                self.metric = Metric::Softmax { scale };
                // A channel's weight is the sum over its positions.
                let share = |row: &Option<usize>| row.map_or(0.0, |i| STATES * weights[i] / units[i] as f64);
                self.states = of_states.iter().map(|row| share(row) as f32).collect();
                row_weights = weights.to_vec();
            }
            None => {
                let mut squares = vec![0.0; shape.states + shape.outputs];
                let work = |k: usize| {
                    let chunk = self.chunk(k)?;
                    let mut sum = vec![0.0; shape.states + shape.outputs];
                    for s in 0..chunk.u.rows() {
                        let row = chunk.x.row(s).iter().chain(chunk.y.row(s));
                        sum.iter_mut().zip(row).for_each(|(sum, v)| *sum += f64::from(*v).powi(2));
                    }
                    Ok(sum)
                };
                self.sum(work, |sum| squares.iter_mut().zip(sum).for_each(|(t, s)| *t += s))?;
                squares.iter_mut().for_each(|s| *s /= self.source.samples() as f64);
                let energy: f64 = squares[shape.states..].iter().sum();
                let weight = 1.0 / energy.max(f64::MIN_POSITIVE);
                self.metric = Metric::Squares { weight };
                // Every state counts as its share of all states, relative to its own size.
                let share = |i: usize| (1.0 / (squares[i].max(f64::MIN_POSITIVE) * shape.states as f64)).min(1e12);
                row_weights = vec![weight; rows + shape.outputs];
                row_weights[..rows].fill(0.0);
                self.states = vec![0.0; shape.states];
                for (i, row) in of_states.iter().enumerate() {
                    if let Some(row) = row {
                        row_weights[*row] += share(i);
                        self.states[i] = (STATES * share(i)) as f32;
                    }
                }
            }
        }
        let floor = |part: &[f64]| LEAST * part.iter().sum::<f64>() / part.len().max(1) as f64;
        let (states, outputs) = row_weights.split_at_mut(rows);
        for part in [states, outputs] {
            let least = floor(part).max(f64::MIN_POSITIVE);
            part.iter_mut().for_each(|l| *l = l.max(least));
        }
        self.row_weights = row_weights;
        Ok(())
    }

    fn range(&self, chunk: usize) -> Range<usize> {
        chunk * self.size..((chunk + 1) * self.size).min(self.source.samples())
    }

    /// Samples that are fitted, and others.
    fn counts(&self) -> (usize, usize) {
        let samples = self.source.samples();
        let held_out = samples / HELD_OUT;
        (samples - held_out, held_out)
    }

    fn is_held_out(&self, chunk: usize, row: usize) -> bool {
        (chunk * self.size + row) % HELD_OUT == HELD_OUT - 1
    }

    /// Number of samples that are fitted.
    pub(super) fn fitted(&self) -> usize {
        self.counts().0
    }

    /// Chunk of a sample that is fitted, counted among those, and its row there.
    pub(super) fn place(&self, fitted: usize) -> (usize, usize) {
        let chunk = (fitted + fitted / (HELD_OUT - 1)) / self.size;
        let before = chunk * self.size;
        (chunk, fitted - (before - before / HELD_OUT))
    }

    /// The rows of a chunk that are fitted.
    fn fitted_rows(&self, k: usize, m: &Matrix<f32>) -> Matrix<f32> {
        let rows: Vec<&[f32]> = (0..m.rows()).filter(|s| !self.is_held_out(k, *s)).map(|s| m.row(s)).collect();
        Matrix::from_vec(rows.len(), m.cols(), rows.concat()).unwrap_or_default()
    }

    fn chunk(&self, k: usize) -> Result<Cow<'_, Chunk>> {
        if let Some(chunk) = self.held.get(k) {
            return Ok(Cow::Borrowed(chunk));
        }
        let states = self.source.block(self.range(k))?;
        Ok(Cow::Owned(Chunk { u: states.u.cast(), x: states.x.cast(), y: states.y.cast() }))
    }

    fn inputs(&self, k: usize) -> Result<Cow<'_, Matrix<f32>>> {
        match self.held.get(k) {
            Some(chunk) => Ok(Cow::Borrowed(&chunk.u)),
            None => Ok(Cow::Owned(self.source.inputs(self.range(k))?)),
        }
    }

    /// Σ over chunks, in order.
    fn sum<T: Send>(&self, work: impl Fn(usize) -> Result<T> + Sync, mut take: impl FnMut(T)) -> Result<()> {
        parallel::fold(
            self.threads,
            self.source.samples().div_ceil(self.size),
            |chunk| {
                self.cancel.check()?;
                work(chunk)
            },
            |_, value| {
                take(value);
                Ok(())
            },
        )
    }

    /// The objective; infinite if a sample has no equilibrium.
    pub(super) fn value(&self, model: &ImplicitModel) -> Result<Value> {
        let equilibrium = equilibrium(model)?;
        // Of fitted samples, then of held-out ones: objective, divergence.
        let mut total = [[0.0; 2]; 2];
        let work = |k: usize| {
            let chunk = self.chunk(k)?;
            let solution = equilibrium.run(&chunk.u)?;
            let mut sums = [[0.0; 2]; 2];
            if solution.diagnostics.iter().any(|d| !d.converged) {
                return Ok([[f64::INFINITY; 2]; 2]);
            }
            for s in 0..chunk.u.rows() {
                let sum = &mut sums[usize::from(self.is_held_out(k, s))];
                let divergence = self.metric.value(solution.y.row(s), chunk.y.row(s));
                let states = solution.x.row(s).iter().zip(chunk.x.row(s)).zip(&self.states);
                sum[0] +=
                    divergence + states.map(|((x, b), l)| 0.5 * f64::from(*l) * f64::from(x - b).powi(2)).sum::<f64>();
                sum[1] += divergence;
            }
            Ok(sums)
        };
        self.sum(work, |sums| {
            total.iter_mut().flatten().zip(sums.iter().flatten()).for_each(|(t, s)| *t += s);
        })?;
        let (fitted, held_out) = self.counts();
        let part = |sum: f64, count: usize| sum / count.max(1) as f64;
        Ok(Value {
            all: part(total[0][0] + total[1][0], fitted + held_out),
            fitted: part(total[0][0], fitted),
            held_out: if held_out > 0 { part(total[1][1], held_out) } else { part(total[0][1], fitted) },
        })
    }

    /// The model on the samples.
    pub(super) fn at(&self, model: &ImplicitModel) -> Result<At> {
        let mut at = At { equilibrium: equilibrium(model)?, layout: model.layout().clone(), points: Vec::new() };
        let points = parallel::map(self.threads, self.held.len(), |k| {
            self.cancel.check()?;
            self.solved(&at, k)
        })?;
        at.points = points;
        Ok(at)
    }

    /// The fitted samples of a chunk at the model.
    fn solved(&self, at: &At, k: usize) -> Result<Point> {
        let all = self.inputs(k)?;
        let u = self.fitted_rows(k, &all);
        let solution = at.equilibrium.run(&u)?;
        let gates = gates(&at.layout, &solution.z);
        let p = self.metric.gradient(&solution.y, &solution.y).0;
        Ok(Point { u, x: solution.x, gates, y: solution.y, p })
    }

    pub(super) fn point<'p>(&self, at: &'p At, k: usize) -> Result<Cow<'p, Point>> {
        match at.points.get(k) {
            Some(point) => Ok(Cow::Borrowed(point)),
            None => Ok(Cow::Owned(self.solved(at, k)?)),
        }
    }

    /// Minus the gradient of the objective of fitted samples.
    pub(super) fn descent(&self, at: &At, support: &Linearised, weights: &Weights) -> Result<Vec<f64>> {
        let (fitted, _) = self.counts();
        let mut out = vec![0.0; support.entries().len()];
        let work = |k: usize| {
            let (point, chunk) = (self.point(at, k)?, self.chunk(k)?);
            let (x, y) = (self.fitted_rows(k, &chunk.x), self.fitted_rows(k, &chunk.y));
            let v = self.metric.gradient(&point.y, &y).1;
            let c = Matrix::from_fn(x.rows(), x.cols(), |s, i| {
                self.states[i] * point.gates[(s, i)] * (point.x[(s, i)] - x[(s, i)])
            });
            Ok(support.backward(weights, &v, &c, &point.samples()))
        };
        self.sum(work, |part| out.iter_mut().zip(part).for_each(|(o, g)| *o -= g / fitted as f64))?;
        Ok(out)
    }

    /// The Gauss–Newton curvature of the objective of fitted samples times a direction.
    pub(super) fn curvature(
        &self,
        at: &At,
        support: &Linearised,
        weights: &Weights,
        direction: &[f64],
    ) -> Result<Vec<f64>> {
        let (fitted, _) = self.counts();
        let change = support.dense(direction);
        let mut out = vec![0.0; direction.len()];
        let work = |k: usize| {
            let point = self.point(at, k)?;
            let (mut dz, mut dy) = support.forward(weights, &change, &point.samples());
            self.metric.curve(&point.p, &mut dy);
            for s in 0..dz.rows() {
                let gates = point.gates.row(s).iter().zip(&self.states);
                dz.row_mut(s).iter_mut().zip(gates).for_each(|(d, (g, l))| *d *= g * g * l);
            }
            Ok(support.backward(weights, &dy, &dz, &point.samples()))
        };
        self.sum(work, |part| out.iter_mut().zip(part).for_each(|(o, p)| *o += p / fitted as f64))?;
        Ok(out)
    }
}
