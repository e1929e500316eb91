//! Refits the blocks between two joints of a model, so that values some joints ahead match the baseline's.
//!
//! A row problem matches its own pre-activation. It does not account for the effect of its error on the next
//! operations, and another layer cannot correct the error that remains. Here the blocks of one *segment* change
//! together. A **joint** is a layer that everything computed later goes through: in a residual network every residual
//! sum, in a chain every layer; the outputs are the last. A segment consists of the blocks between two joints. With
//! the support fixed, the weights of a segment minimise
//!
//! Σ_i λ_i/2·E(x_i − x̄_i)² + ρ/2·Σ d_k·(w_k − w⁰_k)²
//!
//! over the states x of the joint K segments ahead, at the states of the model so far, where x̄ are the baseline's
//! states and λ the row weights. If the outputs are not further ahead than that, their divergence replaces this sum.
//! Every sample and position is an equation, so there are many more of them than weights. The objective, its
//! conjugate gradients, ridge and held-out samples are those of the refit in the output metric
//! ([`super::output_refit`]), which is the case of one segment that is the whole model.

use std::ops::Range;
use std::sync::Arc;

use crate::Result;
use crate::backend::cuda::Cuda;
use crate::backend::{self, Device};
use crate::equilibrium::{DeviceModel, LayerSum, Sum};
use crate::linalg::Matrix;
use crate::memory::MemoryBudget;
use crate::model::{ImplicitModel, TapBlock, Target};
use crate::network::Source;
use crate::parallel;
use crate::states::StateSlice;
use crate::train::evidence::device_walk::Gpu;
use crate::train::evidence::walk::{self, Walk};
use crate::train::refit::linearised::{Linearised, Scope};
use crate::train::refit::output_metric::Metric;
use crate::train::refit::output_refit::{Chunk, Chunks, Given, Problem, Refit, There, equilibrium};
use crate::train::{Key, Progress, Run, TrainInput, TrainSettings};

#[cfg(test)]
mod tests;

/// Samples of a segment: one for this many weights, but not fewer than the second number and not more than the third.
/// Every tenth is not fitted.
const WEIGHTS_PER_SAMPLE: usize = 5;
const LEAST: usize = 500;
const MOST: usize = 5000;
/// One round, because a second one over-fitted (ResNet-20 at 70 %, two joints ahead).
const EFFORT: Effort = Effort { rounds: 1, steps: 8 };
/// The most samples whose outputs judge every segment.
const JUDGED: usize = 500;
/// How often the change of a segment is halved before it is rejected.
const HALVINGS: usize = 2;

/// The most rounds of a segment, and the steps of conjugate gradients in each.
#[derive(Debug, Clone, Copy)]
struct Effort {
    rounds: usize,
    steps: usize,
}

/// The results of the reconstruction.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Reconstruction {
    /// Number of segments that have weights to refit.
    pub segments: usize,
    /// Number of segments whose weights changed.
    pub changed: usize,
    /// Divergence of the outputs of held-out samples, before the reconstruction.
    pub held_out_before: f64,
    /// The same divergence for the returned model; never larger.
    pub held_out_after: f64,
}

/// Layers between two joints, in an order in which they can be computed; the last one is the joint.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Segment {
    layers: Vec<usize>,
    /// Whether the outputs are the joint.
    outputs: bool,
}

/// The segments of a model without cycles, from the order of its layers and, for every sum, the layers that it reads.
fn segments(order: &[usize], reads: &[Vec<usize>]) -> Vec<Segment> {
    let mut place = vec![0; order.len()];
    order.iter().enumerate().for_each(|(at, &k)| place[k] = at);
    // The place of the last reader of every layer, by the layer's place; the outputs come after all layers.
    let mut last_reader: Vec<usize> = (0..order.len()).collect();
    for (sum, layers) in reads.iter().enumerate() {
        let reader = place.get(sum).copied().unwrap_or(order.len());
        layers.iter().for_each(|&k| last_reader[place[k]] = last_reader[place[k]].max(reader));
    }
    let (mut out, mut layers, mut furthest) = (Vec::new(), Vec::new(), 0);
    for (at, &k) in order.iter().enumerate() {
        layers.push(k);
        // No layer before this one is read after it.
        if furthest <= at {
            out.push(Segment { layers: std::mem::take(&mut layers), outputs: false });
        }
        furthest = furthest.max(last_reader[at]);
    }
    out.push(Segment { layers, outputs: true });
    out
}

/// The samples of some segments: the model's own values that the segments start from, and the baseline's values.
struct Window<'a> {
    theirs: &'a Walk<'a>,
    ours: &'a Walk<'a>,
    samples: usize,
    given: Vec<usize>,
    compared: Vec<usize>,
    outputs: Option<LayerSum>,
    /// The baseline, if its output is compared.
    baseline: Option<&'a ImplicitModel>,
    scope: Scope,
}

impl Window<'_> {
    /// The values of some samples of one block.
    fn values(walk: &Walk, source: Source, samples: &Range<usize>) -> Result<Matrix<f32>> {
        let block = samples.start / walk::SAMPLES;
        let values = walk.block(source, block)?;
        let width = values.as_slice().len() / walk::SAMPLES.min(walk.samples() - block * walk::SAMPLES);
        Matrix::from_vec(samples.len(), width, values.as_slice()[..samples.len() * width].to_vec())
    }
}

impl<'a> Chunks<'a> for Window<'a> {
    fn samples(&self) -> usize {
        self.samples
    }

    fn there(&self) -> Option<There<'a>> {
        let (theirs, ours) = (self.theirs, self.ours);
        let scope = || self.scope.clone();
        theirs.on_gpu().map(|_| There { theirs, ours, samples: self.samples, outputs: self.baseline, scope: scope() })
    }

    fn chunk(&self, samples: Range<usize>) -> Result<Chunk> {
        let given = self.given(samples.clone())?;
        let compared = self.compared.iter().map(|&k| Self::values(self.theirs, Source::Layer(k), &samples));
        let compared = compared.collect::<Result<Vec<_>>>()?;
        let (rows, width) = (given.u.rows(), compared.iter().map(Matrix::cols).sum());
        let mut x = Matrix::zeros(rows, width);
        for s in 0..rows {
            let mut first = 0;
            for layer in &compared {
                x.row_mut(s)[first..first + layer.cols()].copy_from_slice(layer.row(s));
                first += layer.cols();
            }
        }
        let y = match &self.outputs {
            None => Matrix::zeros(rows, 0),
            Some(sum) => {
                let sources = sum.sources();
                let values = sources.iter().map(|&s| Self::values(self.theirs, s, &samples));
                let values = values.collect::<Result<Vec<_>>>()?;
                let of = |source: Source| sources.iter().position(|s| *s == source).map(|at| values[at].as_slice());
                sum.pre_activations(rows, |source| of(source).unwrap_or_default())?
            }
        };
        Ok(Chunk { given, x, y })
    }

    fn given(&self, samples: Range<usize>) -> Result<Given> {
        let layers = self.given.iter().map(|&k| Self::values(self.ours, Source::Layer(k), &samples));
        Ok(Given { u: Self::values(self.ours, Source::Input, &samples)?, layers: layers.collect::<Result<_>>()? })
    }
}

/// Refits the non-zeros of `model` segment by segment, from the first to the last.
pub(in crate::train) fn reconstruct(
    model: ImplicitModel,
    input: &TrainInput,
    settings: &TrainSettings,
    strength: f64,
    run: &mut Run,
) -> Result<(ImplicitModel, Option<Reconstruction>)> {
    reconstruct_with(EFFORT, model, input, settings, strength, run)
}

fn reconstruct_with(
    effort: Effort,
    model: ImplicitModel,
    input: &TrainInput,
    settings: &TrainSettings,
    strength: f64,
    run: &mut Run,
) -> Result<(ImplicitModel, Option<Reconstruction>)> {
    let ahead = settings.model.reconstruct;
    let Some(baseline) = input.baseline.filter(|_| ahead > 0) else { return Ok((model, None)) };
    let device = settings.work.device;
    if let Some(cuda) = backend::gpu(device, largest_work(&model))? {
        let found = swept(effort, model.clone(), (input, baseline), settings, strength, Some(cuda), run);
        if let Some(found) = backend::or_cpu(device, found)? {
            return Ok(found);
        }
    }
    swept(effort, model, (input, baseline), settings, strength, None, run)
}

/// Multiply-adds of the largest layer for a block of samples.
pub(in crate::train) fn largest_work(model: &ImplicitModel) -> f64 {
    let targets = (0..model.layout().layers().len()).map(Target::Layer).chain([Target::Output]);
    let blocks = targets.flat_map(|target| model.summands(target));
    let of = |block: &TapBlock| (block.output.size() * block.columns() / block.groups.max(1)) as f64;
    walk::SAMPLES as f64 * blocks.map(|block| of(&block)).fold(0.0, f64::max)
}

/// The reconstruction of all segments, on a GPU or on the CPU.
fn swept(
    effort: Effort,
    model: ImplicitModel,
    (input, baseline): (&TrainInput, &ImplicitModel),
    settings: &TrainSettings,
    strength: f64,
    cuda: Option<&'static Cuda>,
    run: &mut Run,
) -> Result<(ImplicitModel, Option<Reconstruction>)> {
    let ahead = settings.model.reconstruct;
    let (support, start) = Linearised::of(&model);
    if start.is_empty() {
        return Ok((model, None));
    }
    let segments = segments(&support.scope().order, &support.reads());
    let counts = samples_of(&segments, &support, &model, input.source.samples());
    let most = counts.iter().flatten().copied().max().unwrap_or(LEAST).min(input.source.samples());
    let few = StateSlice::new(input.source, 0..most)?;
    let folder = run.keep.folder().map_or_else(std::env::temp_dir, std::path::Path::to_path_buf);
    let layers = model.layout().layers().len();
    let memory_budget = MemoryBudget::new(settings.work.memory.map_or(u64::MAX, |budget| budget / 4), &folder);
    let widest = model.layout().layers().iter().map(|layer| layer.size).max().unwrap_or(0);
    let gpu = cuda.map(|cuda| Gpu::new(cuda, widest, walk::SAMPLES, &memory_budget)).transpose()?;
    let judge = Judge::new(input, most, settings, run)?;
    let divergence = judge.divergence(&model, run)?;
    let mut sweep = Sweep {
        baseline,
        input,
        settings,
        effort,
        ahead,
        reads: support.reads(),
        support,
        segments,
        start: &start,
        w: start.clone(),
        model,
        theirs: Walk::new(&few, layers, gpu.as_ref()),
        ours: Walk::new(&few, layers, gpu.as_ref()),
        entered: 0,
        memory_budget,
        judge,
        divergence,
    };
    let mut report =
        Reconstruction { segments: 0, changed: 0, held_out_before: divergence, held_out_after: divergence };
    for (number, count) in counts.into_iter().enumerate() {
        run.cancel.check()?;
        sweep.enter(number, run)?;
        if let Some(samples) = count {
            report.segments += 1;
            report.changed += usize::from(sweep.refit(number, samples, strength, run)?);
        }
        sweep.leave(number, run)?;
        (run.progress)(Progress::Reconstruct { segment: number + 1, segments: sweep.segments.len() });
    }
    report.held_out_after = sweep.divergence;
    Ok((sweep.model, Some(report)))
}

/// Number of samples that every segment is refitted on; `None` for a segment without weights to refit.
fn samples_of(segments: &[Segment], support: &Linearised, model: &ImplicitModel, all: usize) -> Vec<Option<usize>> {
    let (layout, kept) = (model.layout(), model.kept_rows());
    let mut of_rows = vec![0usize; kept.len()];
    support.entries().iter().filter(|entry| !kept[entry.row]).for_each(|entry| of_rows[entry.row] += 1);
    let of = |segment: &Segment| {
        let layers = segment.layers.iter().flat_map(|&k| layout.row_range(k));
        let outputs = if segment.outputs { layout.rows()..kept.len() } else { 0..0 };
        let weights: usize = layers.chain(outputs).map(|row| of_rows[row]).sum();
        (weights > 0).then(|| (weights / WEIGHTS_PER_SAMPLE).clamp(LEAST, MOST).min(all))
    };
    segments.iter().map(of).collect()
}

/// A model that is being refitted segment by segment.
struct Sweep<'a> {
    baseline: &'a ImplicitModel,
    input: &'a TrainInput<'a>,
    settings: &'a TrainSettings,
    effort: Effort,
    ahead: usize,
    /// For every sum, the layers that it reads.
    reads: Vec<Vec<usize>>,
    support: Linearised,
    segments: Vec<Segment>,
    /// The weights before the reconstruction, which the ridge pulls towards, and the present ones.
    start: &'a [f64],
    w: Vec<f64>,
    model: ImplicitModel,
    /// The walk of the baseline, some segments ahead, and that of the model.
    theirs: Walk<'a>,
    ours: Walk<'a>,
    /// Number of segments that the baseline has gone through.
    entered: usize,
    memory_budget: Arc<MemoryBudget>,
    judge: Judge,
    /// The present divergence of the outputs of held-out samples.
    divergence: f64,
}

impl Sweep<'_> {
    /// Runs the baseline as far as the refit of a segment compares values.
    fn enter(&mut self, number: usize, run: &Run) -> Result<()> {
        let last = self.segments.len().min(number + self.ahead);
        for &k in self.segments[self.entered..last].iter().flat_map(|s| &s.layers) {
            let sum = Sum::new(self.baseline, Target::Layer(k));
            self.theirs.enter(self.model.layout(), k, sum, &self.memory_budget, run.threads, run.cancel)?;
        }
        self.entered = last;
        Ok(())
    }

    /// Refits a segment on some samples; returns whether its weights changed.
    fn refit(&mut self, number: usize, samples: usize, strength: f64, run: &mut Run) -> Result<bool> {
        let (layout, shape) = (self.model.layout().clone(), self.model.shape());
        let last = self.segments.len().min(number + self.ahead);
        let window = &self.segments[number..last];
        let outputs = window.iter().any(|s| s.outputs);
        let mut moved = vec![false; layout.layers().len() + 1];
        window[0].layers.iter().for_each(|&k| moved[k] = true);
        moved[layout.layers().len()] = window[0].outputs;
        let order = window.iter().flat_map(|s| s.layers.clone()).collect();
        let joints: Vec<usize> =
            window.iter().filter(|s| !s.outputs).filter_map(|s| s.layers.last().copied()).collect();
        // Only the joint ahead is compared, because all values before it pass through it. If outputs are compared,
        // all joints are too: they steady what the outputs do not depend on.
        let compared = if outputs { joints } else { joints[joints.len().saturating_sub(1)..].to_vec() };
        self.support.narrow(&layout, order, outputs, moved);
        let scope = self.support.scope().clone();
        let widths = |layers: &[usize]| layers.iter().map(|&k| layout.range(k).len()).sum::<usize>();
        let values = 2 * (shape.inputs + widths(&scope.given) + scope.width) + widths(&compared);
        let bytes = 4 * (values + if outputs { 3 * shape.outputs } else { 0 });
        let chunks = Window {
            theirs: &self.theirs,
            ours: &self.ours,
            samples,
            given: scope.given.clone(),
            compared: compared.clone(),
            outputs: outputs.then(|| LayerSum::new(self.baseline, Target::Output)),
            baseline: outputs.then_some(self.baseline),
            scope: scope.clone(),
        };
        let problem = Problem::of(
            &self.model,
            self.input,
            Box::new(chunks),
            Some(scope),
            &compared,
            (walk::SAMPLES, bytes),
            self.settings,
            run.threads,
            run.cancel,
        )?;
        let how = Refit {
            problem: &problem,
            support: &self.support,
            start: self.start,
            settings: self.settings,
            rounds: self.effort.rounds,
            steps: self.effort.steps,
        };
        let key = |round| Key::reconstruct(strength, number, round);
        let (mut found, did, mut w) = how.refit(self.model.clone(), self.w.clone(), key, |_, _, _| (), run)?;
        drop(problem);
        if did.rounds == 0 {
            return Ok(false);
        }
        // The change is judged by the outputs, with the weights rounded as they will be stored.
        let ball = self.settings.allowed.kappa.is_some();
        for _ in 0..=HALVINGS {
            let divergence = self.judge.divergence(&found, run)?;
            if divergence <= self.divergence {
                (self.model, self.w, self.divergence) = (found, w, divergence);
                return Ok(true);
            }
            w.iter_mut().zip(&self.w).for_each(|(w, before)| *w = f64::midpoint(*w, *before));
            found = self.support.with_weights(&found, &w, ball)?;
        }
        Ok(false)
    }

    /// Runs the model through a segment, and drops layers that are not read any more.
    fn leave(&mut self, number: usize, run: &Run) -> Result<()> {
        let layout = self.model.layout();
        for &k in &self.segments[number].layers {
            let sum = Sum::new(&self.model, Target::Layer(k));
            self.ours.enter(layout, k, sum, &self.memory_budget, run.threads, run.cancel)?;
        }
        // Later segments read only joints, and compare the baseline's values only after this segment.
        let output = layout.layers().len();
        let later = self.segments[number + 1..].iter();
        let readers: Vec<usize> =
            later.flat_map(|s| s.layers.iter().copied().chain(s.outputs.then_some(output))).collect();
        for &k in self.segments[..=number].iter().flat_map(|s| &s.layers) {
            if readers.iter().all(|&reader| !self.reads[reader].contains(&k)) {
                self.theirs.forget(k);
                self.ours.forget(k);
            }
        }
        Ok(())
    }
}

/// The held-out samples, with the baseline's outputs.
struct Judge {
    u: Matrix<f32>,
    y: Matrix<f32>,
    metric: Metric,
    device: Device,
}

impl Judge {
    /// Every tenth of the first `few` samples, and all samples after them.
    fn new(input: &TrainInput, few: usize, settings: &TrainSettings, run: &Run) -> Result<Self> {
        let held_out = (0..few).filter(|s| Problem::holds_out(*s));
        let chosen: Vec<usize> = held_out.chain(few..input.source.samples()).take(JUDGED).collect();
        let mut rows = (Vec::new(), Vec::new());
        for part in chosen.chunk_by(|a, b| a + 1 == *b) {
            for range in part.chunks(walk::SAMPLES).map(|p| p[0]..p[p.len() - 1] + 1) {
                run.cancel.check()?;
                let (u, y) = input.source.ends(range)?;
                rows.0.extend_from_slice(u.as_slice());
                rows.1.extend(y.as_slice().iter().map(|v| *v as f32));
            }
        }
        let shape = input.source.shape();
        let scale = input.baseline.and_then(|b| b.metadata().scaling.as_ref()).map_or(1.0, |s| s.outputs);
        let metric = match input.importance.filter(|_| shape.outputs > 1) {
            Some(_) => Metric::Softmax { scale },
            None => Metric::Squares { weight: 1.0 },
        };
        let u = Matrix::from_vec(chosen.len(), shape.inputs, rows.0)?;
        let y = Matrix::from_vec(chosen.len(), shape.outputs, rows.1)?;
        Ok(Self { u, y, metric, device: settings.work.device })
    }

    /// The mean divergence of a model's outputs.
    fn divergence(&self, model: &ImplicitModel, run: &Run) -> Result<f64> {
        let count = self.u.rows();
        if let Some(model) = DeviceModel::on(self.device, model, run.threads)?
            && let Some(y) = backend::or_cpu(self.device, model.outputs(&self.u, run.cancel))?
        {
            let divergences = (0..count).map(|s| self.metric.value(y.row(s), self.y.row(s)));
            return Ok(divergences.sum::<f64>() / count.max(1) as f64);
        }
        let (equilibrium, size) = (equilibrium(model)?, walk::SAMPLES);
        let mut sum = 0.0;
        parallel::fold(
            run.threads,
            count.div_ceil(size),
            |block| {
                run.cancel.check()?;
                let first = block * size;
                let u = Matrix::from_fn(size.min(count - first), self.u.cols(), |s, j| self.u[(first + s, j)]);
                let y = equilibrium.outputs(&u)?.y;
                Ok((0..y.rows()).map(|s| self.metric.value(y.row(s), self.y.row(first + s))).sum::<f64>())
            },
            |_, part| {
                sum += part;
                Ok(())
            },
        )?;
        Ok(sum / count.max(1) as f64)
    }
}
