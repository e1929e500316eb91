//! The objective of the refit on samples in chunks: its value, its gradient, and products with its curvature.

use std::borrow::Cow;
use std::ops::Range;

use super::on_device::{DeviceAt, OnDevice, There};
use super::rows_of_units;
use super::runner::{Ran, Runner};
use crate::Result;
use crate::layout::Layout;
use crate::linalg::Matrix;
use crate::model::ImplicitModel;
use crate::parallel::{self, Cancel, Threads};
use crate::states::{StateShape, StateSource};
use crate::statistics::BLOCK;
use crate::train::refit::linearised::{Linearised, Samples, Scope, Weights, gates, gates_at};
use crate::train::refit::output_metric::Metric;
use crate::train::{TrainInput, TrainSettings};

/// η: the weight of the states relative to the output.
pub(super) const STATES: f64 = 0.1;
/// Row weights below this share of their mean count as this share in the preconditioner.
const LEAST: f64 = 1e-4;
/// Without row weights a state counts relative to its own mean square, but to no less than this share of its layer's
/// mean.
const RARE: f64 = 0.01;
/// Samples with their states are kept in memory up to this many bytes; the states of the others are computed again
/// when needed.
const HELD: u64 = 1 << 30;
/// Number of states in a chunk of samples.
const CHUNK_STATES: usize = 1 << 21;
/// One sample in this many is not fitted.
const HELD_OUT: usize = 10;

/// Number of samples in a chunk; fixed, so that sums depend neither on threads nor on memory.
pub(in crate::train) fn chunk_of(shape: StateShape) -> usize {
    (CHUNK_STATES / shape.states.max(1)).clamp(1, BLOCK)
}

/// The values of the objective for a model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(in crate::train) struct Value {
    /// Over all samples.
    pub(in crate::train) all: f64,
    /// Over the fitted samples.
    pub(in crate::train) fitted: f64,
    /// Divergence of the outputs alone, over the held-out samples (over the fitted ones if none are held out).
    pub(in crate::train) held_out: f64,
}

/// A source of samples with the baseline's values for them, from which an objective reads.
pub(in crate::train) trait Chunks<'a>: Sync {
    /// Number of samples.
    fn samples(&self) -> usize;
    /// A chunk of consecutive samples.
    fn chunk(&self, samples: Range<usize>) -> Result<Chunk>;
    /// The inputs of consecutive samples and the values given to the layers that are run.
    fn given(&self, samples: Range<usize>) -> Result<Given>;
    /// The same values on a GPU, if they are there.
    fn there(&self) -> Option<There<'a>> {
        None
    }
}

/// The values that a run of some layers starts from.
#[derive(Clone)]
pub(in crate::train) struct Given {
    pub(in crate::train) u: Matrix<f32>,
    /// Values of the layers that are read and not run, in the order of the scope; empty if all layers are run.
    pub(in crate::train) layers: Vec<Matrix<f32>>,
}

/// A chunk of samples with the baseline's values for them.
#[derive(Clone)]
pub(in crate::train) struct Chunk {
    pub(in crate::train) given: Given,
    /// The baseline's states of the layers that are compared, one after the other.
    pub(in crate::train) x: Matrix<f32>,
    /// The baseline's outputs, if they are compared.
    pub(in crate::train) y: Matrix<f32>,
}

/// All layers of a model, on the samples of a source, whose values may be on a GPU as well.
struct AllLayers<'a>(&'a dyn StateSource, Option<There<'a>>);

impl<'a> Chunks<'a> for AllLayers<'a> {
    fn samples(&self) -> usize {
        self.0.samples()
    }

    fn chunk(&self, samples: Range<usize>) -> Result<Chunk> {
        let states = self.0.block(samples)?;
        let given = Given { u: states.u.cast(), layers: Vec::new() };
        Ok(Chunk { given, x: states.x.cast(), y: states.y.cast() })
    }

    fn given(&self, samples: Range<usize>) -> Result<Given> {
        Ok(Given { u: self.0.inputs(samples)?, layers: Vec::new() })
    }

    fn there(&self) -> Option<There<'a>> {
        self.1.clone()
    }
}

/// The model's values on the fitted samples of one chunk.
#[derive(Clone)]
pub(super) struct Point {
    pub(super) u: Matrix<f32>,
    /// States, in the columns of the scope.
    pub(super) x: Matrix<f32>,
    gates: Matrix<f32>,
    y: Matrix<f32>,
    /// Class probabilities; empty if outputs are compared by squares.
    p: Matrix<f32>,
}

impl Point {
    fn samples(&self) -> Samples<'_> {
        Samples { u: &self.u, x: &self.x, gates: &self.gates }
    }
}

/// The model's values on all samples.
pub(super) struct At<'a> {
    runner: Runner,
    layout: Layout,
    /// The values on the first chunks, as many as memory allows.
    points: Vec<Point>,
    /// The values on a GPU, if the samples are there.
    on_device: Option<DeviceAt<'a>>,
}

/// The objective on the samples: a divergence of outputs, if these are computed, and weighted squares of states.
pub(in crate::train) struct Problem<'a> {
    chunks: Box<dyn Chunks<'a> + 'a>,
    /// The same on a GPU, if the samples are there.
    on_device: Option<OnDevice<'a>>,
    pub(super) size: usize,
    /// The first chunks, as many as memory allows.
    held: Vec<Chunk>,
    /// The metric of the outputs; `None` if outputs are not computed.
    metric: Option<Metric>,
    /// The part of the model that is run; `None` for all layers, through cycles if there are any.
    part: Option<Scope>,
    /// For the states that are compared, their columns in a batch and in a chunk, and the weight of each column of
    /// the chunk.
    compared: Vec<(Range<usize>, Range<usize>)>,
    states: Vec<f32>,
    /// λ_i of every row in the units of the objective; none is too small to divide by.
    pub(super) row_weights: Vec<f64>,
    pub(super) threads: Threads,
    pub(super) cancel: &'a Cancel,
}

impl<'a> Problem<'a> {
    /// The objective for all states and outputs of a model.
    pub(super) fn new(
        model: &ImplicitModel,
        input: &TrainInput<'a>,
        there: Option<There<'a>>,
        settings: &TrainSettings,
        threads: Threads,
        cancel: &'a Cancel,
    ) -> Result<Self> {
        let shape = input.source.shape();
        let all: Vec<usize> = (0..model.layout().layers().len()).collect();
        let bytes = 4 * (2 * shape.inputs + 3 * shape.states + 3 * shape.outputs);
        let chunks = Box::new(AllLayers(input.source, there));
        Self::of(model, input, chunks, None, &all, (chunk_of(shape), bytes), settings, threads, cancel)
    }

    /// The objective that compares the states of `layers` and, if `part` has them, the outputs. Chunks have `size`
    /// samples of `bytes` bytes each.
    #[allow(clippy::too_many_arguments)]
    pub(in crate::train) fn of(
        model: &ImplicitModel,
        input: &TrainInput<'a>,
        chunks: Box<dyn Chunks<'a> + 'a>,
        part: Option<Scope>,
        layers: &[usize],
        (size, bytes): (usize, usize),
        settings: &TrainSettings,
        threads: Threads,
        cancel: &'a Cancel,
    ) -> Result<Self> {
        let samples = chunks.samples();
        let held_bytes = settings.work.memory.map_or(HELD, |budget| HELD.min(budget / 2));
        let there = chunks.there();
        let count = match &there {
            Some(_) => 0,
            None => (held_bytes / ((bytes * size) as u64).max(1)).min(samples.div_ceil(size) as u64) as usize,
        };
        let mut compared = Vec::with_capacity(layers.len());
        let mut width = 0;
        for &k in layers {
            let range = model.layout().range(k);
            let columns = part.as_ref().map_or(range.clone(), |part| part.columns[k].clone());
            compared.push((columns, width..width + range.len()));
            width += range.len();
        }
        let mut problem = Self {
            chunks,
            on_device: None,
            size,
            held: Vec::new(),
            metric: None,
            part,
            compared,
            states: Vec::new(),
            row_weights: Vec::new(),
            threads,
            cancel,
        };
        problem.held = parallel::map(threads, count, |k| {
            cancel.check()?;
            problem.chunks.chunk(problem.range(k))
        })?;
        problem.weigh(model, input, layers)?;
        if let Some(there) = there {
            let of_units = problem.compared.iter().map(|(_, columns)| problem.states[columns.clone()].to_vec());
            let compared = layers.iter().copied().zip(of_units);
            problem.on_device = OnDevice::new(there, problem.metric, compared, (threads, cancel))?;
        }
        Ok(problem)
    }

    /// Raises the mean squares of states that are hardly ever active to a share of their layer's mean. Relative to its
    /// own size, an error of a state that is always zero would count more than everything else together.
    fn lift_rare_states(&self, squares: &mut [f64]) {
        for (_, columns) in &self.compared {
            let layer = &mut squares[columns.clone()];
            let least = RARE * layer.iter().sum::<f64>() / layer.len().max(1) as f64;
            layer.iter_mut().for_each(|square| *square = square.max(least));
        }
    }

    /// Chooses the metric and the weights of states and rows.
    fn weigh(&mut self, model: &ImplicitModel, input: &TrainInput, layers: &[usize]) -> Result<()> {
        let (shape, layout) = (input.source.shape(), model.layout());
        let rows = layout.rows();
        let row_of = rows_of_units(model);
        let mut units = vec![0usize; rows + shape.outputs];
        row_of.iter().flatten().for_each(|row| units[*row] += 1);
        let of_states: Vec<Option<usize>> =
            layers.iter().flat_map(|&k| row_of[layout.range(k)].iter().copied()).collect();
        let outputs = self.part.as_ref().is_none_or(|part| part.outputs);
        // If outputs are compared, states only steady what the outputs do not depend on.
        let eta = if outputs { STATES } else { 1.0 };
        let mut row_weights;
        match input.importance.filter(|_| shape.outputs > 1) {
            Some(weights) => {
                let scale = input.baseline.and_then(|b| b.metadata().scaling.as_ref()).map_or(1.0, |s| s.outputs);
                self.metric = outputs.then_some(Metric::Softmax { scale });
                // The weight of a channel is the sum over its positions.
                let share = |row: &Option<usize>| row.map_or(0.0, |i| eta * weights[i] / units[i] as f64);
                self.states = of_states.iter().map(|row| share(row) as f32).collect();
                row_weights = weights.to_vec();
            }
            None => {
                let width = of_states.len();
                let of_outputs = if outputs { shape.outputs } else { 0 };
                let mut squares = vec![0.0; width + of_outputs];
                let work = |k: usize| {
                    let chunk = self.chunk(k)?;
                    let mut sum = vec![0.0; width + of_outputs];
                    for s in 0..chunk.x.rows() {
                        let row = chunk.x.row(s).iter().chain(chunk.y.row(s));
                        sum.iter_mut().zip(row).for_each(|(sum, v)| *sum += f64::from(*v).powi(2));
                    }
                    Ok(sum)
                };
                self.sum(work, |sum| squares.iter_mut().zip(sum).for_each(|(t, s)| *t += s))?;
                squares.iter_mut().for_each(|s| *s /= self.chunks.samples() as f64);
                let energy: f64 = squares[width..].iter().sum();
                let weight = 1.0 / energy.max(f64::MIN_POSITIVE);
                self.metric = outputs.then_some(Metric::Squares { weight });
                self.lift_rare_states(&mut squares);
                // Every state counts as its share of all states, relative to its own size.
                let share = |i: usize| (1.0 / (squares[i].max(f64::MIN_POSITIVE) * width as f64)).min(1e12);
                row_weights = vec![weight; rows + shape.outputs];
                row_weights[..rows].fill(0.0);
                self.states = vec![0.0; width];
                for (i, row) in of_states.iter().enumerate() {
                    if let Some(row) = row {
                        row_weights[*row] += share(i);
                        self.states[i] = (eta * share(i)) as f32;
                    }
                }
                // Rows of states that are not compared get the average weight of the others.
                let known = row_weights[..rows].iter().filter(|w| **w > 0.0).count();
                let mean = row_weights[..rows].iter().sum::<f64>() / known.max(1) as f64;
                if self.part.is_some() {
                    row_weights[..rows].iter_mut().filter(|w| **w == 0.0).for_each(|w| *w = mean);
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
        chunk * self.size..((chunk + 1) * self.size).min(self.chunks.samples())
    }

    /// Number of fitted samples, and of the others.
    fn counts(&self) -> (usize, usize) {
        let samples = self.chunks.samples();
        let held_out = samples / HELD_OUT;
        (samples - held_out, held_out)
    }

    fn is_held_out(&self, chunk: usize, row: usize) -> bool {
        Self::holds_out(chunk * self.size + row)
    }

    /// Whether a sample is not fitted.
    pub(in crate::train) fn holds_out(sample: usize) -> bool {
        sample % HELD_OUT == HELD_OUT - 1
    }

    /// Number of samples that are fitted.
    pub(super) fn fitted(&self) -> usize {
        self.counts().0
    }

    /// The chunk of a fitted sample, counted among the fitted ones, and its row there.
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
        Ok(Cow::Owned(self.chunks.chunk(self.range(k))?))
    }

    fn given(&self, k: usize) -> Result<Cow<'_, Given>> {
        match self.held.get(k) {
            Some(chunk) => Ok(Cow::Borrowed(&chunk.given)),
            None => Ok(Cow::Owned(self.chunks.given(self.range(k))?)),
        }
    }

    /// The weighted squares of one sample's states; `x` is in the columns of a batch, `theirs` in those of a chunk.
    fn squares(&self, x: &[f32], theirs: &[f32]) -> f64 {
        let mut sum = 0.0;
        for (batch, chunk) in &self.compared {
            let states = x[batch.clone()].iter().zip(&theirs[chunk.clone()]).zip(&self.states[chunk.clone()]);
            states.for_each(|((x, b), l)| sum += 0.5 * f64::from(*l) * f64::from(x - b).powi(2));
        }
        sum
    }

    /// Runs `work` on every chunk and passes the results to `take`, in order.
    fn sum<T: Send>(&self, work: impl Fn(usize) -> Result<T> + Sync, mut take: impl FnMut(T)) -> Result<()> {
        parallel::fold(
            self.threads,
            self.chunks.samples().div_ceil(self.size),
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
    pub(in crate::train) fn value(&self, model: &ImplicitModel) -> Result<Value> {
        // Objective and divergence, of the fitted samples and then of the held-out ones.
        let mut total = [[0.0; 2]; 2];
        if let Some(on_device) = &self.on_device {
            return Ok(self.mean(on_device.value(model)?));
        }
        let runner = Runner::new(model, self.part.as_ref())?;
        let work = |k: usize| {
            let chunk = self.chunk(k)?;
            let Some(ran) = runner.run(&chunk.given)? else { return Ok([[f64::INFINITY; 2]; 2]) };
            let mut sums = [[0.0; 2]; 2];
            for s in 0..chunk.x.rows() {
                let sum = &mut sums[usize::from(self.is_held_out(k, s))];
                let divergence = self.metric.map_or(0.0, |metric| metric.value(ran.y.row(s), chunk.y.row(s)));
                let objective = divergence + self.squares(ran.x.row(s), chunk.x.row(s));
                sum[0] += objective;
                sum[1] += if self.metric.is_some() { divergence } else { objective };
            }
            Ok(sums)
        };
        self.sum(work, |sums| {
            total.iter_mut().flatten().zip(sums.iter().flatten()).for_each(|(t, s)| *t += s);
        })?;
        Ok(self.mean(total))
    }

    /// The values of the objective from sums of objective and divergence over fitted and held-out samples.
    fn mean(&self, total: [[f64; 2]; 2]) -> Value {
        let (fitted, held_out) = self.counts();
        let part = |sum: f64, count: usize| sum / count.max(1) as f64;
        Value {
            all: part(total[0][0] + total[1][0], fitted + held_out),
            fitted: part(total[0][0], fitted),
            held_out: if held_out > 0 { part(total[1][1], held_out) } else { part(total[0][1], fitted) },
        }
    }

    /// The model's values on the samples.
    pub(super) fn at(&self, model: &ImplicitModel) -> Result<At<'a>> {
        let runner = Runner::new(model, self.part.as_ref())?;
        let on_device = self.on_device.as_ref().map(|on_device| on_device.at(model)).transpose()?;
        let mut at = At { runner, layout: model.layout().clone(), points: Vec::new(), on_device };
        let points = parallel::map(self.threads, self.held.len(), |k| {
            self.cancel.check()?;
            self.solved(&at, k)
        })?;
        at.points = points;
        Ok(at)
    }

    /// The model's values on the fitted samples of a chunk.
    fn solved(&self, at: &At, k: usize) -> Result<Point> {
        let all = self.given(k)?;
        let layers = all.layers.iter().map(|layer| self.fitted_rows(k, layer)).collect();
        let given = Given { u: self.fitted_rows(k, &all.u), layers };
        let Ran { z, x, y } = at.runner.states(&given)?;
        let gates = match &self.part {
            None => gates(&at.layout, &z),
            Some(part) => gates_at(&at.layout, &part.columns, z),
        };
        let p = self.metric.map_or_else(Matrix::default, |metric| metric.gradient(&y, &y).0);
        Ok(Point { u: given.u, x, gates, y, p })
    }

    /// The inputs and states of the fitted samples of a chunk, with whatever else is known of them.
    pub(super) fn point<'p>(&self, at: &'p At, k: usize) -> Result<Cow<'p, Point>> {
        if let (Some(on_device), Some(there)) = (&self.on_device, &at.on_device) {
            let (u, x) = on_device.values(there, self.range(k))?;
            let (u, x, none) = (self.fitted_rows(k, &u), self.fitted_rows(k, &x), Matrix::default);
            return Ok(Cow::Owned(Point { u, x, gates: none(), y: none(), p: none() }));
        }
        match at.points.get(k) {
            Some(point) => Ok(Cow::Borrowed(point)),
            None => Ok(Cow::Owned(self.solved(at, k)?)),
        }
    }

    /// Minus the gradient of the objective over fitted samples.
    pub(super) fn descent(&self, at: &At, support: &Linearised, weights: &Weights) -> Result<Vec<f64>> {
        let (fitted, _) = self.counts();
        if let (Some(on_device), Some(at)) = (&self.on_device, &at.on_device) {
            let gradient = on_device.gradient(at, support)?;
            return Ok(support.spread(&gradient.iter().map(|g| -g / fitted as f64).collect::<Vec<_>>()));
        }
        let mut out = vec![0.0; support.changing()];
        let work = |k: usize| {
            let (point, chunk) = (self.point(at, k)?, self.chunk(k)?);
            let (x, y) = (self.fitted_rows(k, &chunk.x), self.fitted_rows(k, &chunk.y));
            let v = match self.metric {
                Some(metric) => metric.gradient(&point.y, &y).1,
                None => Matrix::zeros(x.rows(), 0),
            };
            let mut c = Matrix::zeros(x.rows(), point.x.cols());
            for s in 0..x.rows() {
                for (batch, chunk) in &self.compared {
                    let theirs = x.row(s)[chunk.clone()].iter().zip(&self.states[chunk.clone()]);
                    let ours = point.x.row(s)[batch.clone()].iter().zip(&point.gates.row(s)[batch.clone()]);
                    let c = c.row_mut(s)[batch.clone()].iter_mut();
                    c.zip(theirs.zip(ours)).for_each(|(c, ((b, l), (x, g)))| *c = l * g * (x - b));
                }
            }
            Ok(support.backward(weights, &v, &c, &point.samples()))
        };
        self.sum(work, |part| out.iter_mut().zip(part).for_each(|(o, g)| *o -= g / fitted as f64))?;
        Ok(support.spread(&out))
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
        let change = support.change(direction);
        if let (Some(on_device), Some(at)) = (&self.on_device, &at.on_device) {
            let product = on_device.curvature(at, support, &change)?;
            return Ok(support.spread(&product.iter().map(|p| p / fitted as f64).collect::<Vec<_>>()));
        }
        let mut out = vec![0.0; support.changing()];
        let work = |k: usize| {
            let point = self.point(at, k)?;
            let (dz, mut dy) = support.forward(weights, &change, &point.samples());
            if let Some(metric) = self.metric {
                metric.curve(&point.p, &mut dy);
            }
            let mut c = Matrix::zeros(dz.rows(), dz.cols());
            for s in 0..dz.rows() {
                for (batch, chunk) in &self.compared {
                    let gates = point.gates.row(s)[batch.clone()].iter().zip(&self.states[chunk.clone()]);
                    let c = c.row_mut(s)[batch.clone()].iter_mut();
                    c.zip(&dz.row(s)[batch.clone()]).zip(gates).for_each(|((c, d), (g, l))| *c = d * g * g * l);
                }
            }
            Ok(support.backward(weights, &dy, &c, &point.samples()))
        };
        self.sum(work, |part| out.iter_mut().zip(part).for_each(|(o, p)| *o += p / fitted as f64))?;
        Ok(support.spread(&out))
    }
}
