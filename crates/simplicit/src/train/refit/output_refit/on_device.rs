//! The objective on a GPU: the same passes as on the CPU, for chunks of samples whose values are there.

use std::ops::Range;

use super::problem::Problem;
use crate::Result;
use crate::backend::cuda::{Buffer, Operand, Session, Values};
use crate::equilibrium::{DeviceChange, DeviceGiven, DeviceLayer, DeviceModel, DevicePass, Sum};
use crate::linalg::Matrix;
use crate::model::{ImplicitModel, Target};
use crate::network::Source;
use crate::parallel::{Cancel, Threads};
use crate::train::evidence::device_walk::{Chunks, chunk_of, forward};
use crate::train::evidence::walk::Walk;
use crate::train::refit::linearised::{Linearised, Scope, Weights};
use crate::train::refit::output_metric::Metric;

/// The values on a GPU that an objective reads.
#[derive(Clone)]
pub(in crate::train) struct There<'a> {
    /// The walks of the baseline and of the model.
    pub(in crate::train) theirs: &'a Walk<'a>,
    pub(in crate::train) ours: &'a Walk<'a>,
    /// Number of samples, from the first one on.
    pub(in crate::train) samples: usize,
    /// The baseline, if its output is compared.
    pub(in crate::train) outputs: Option<&'a ImplicitModel>,
    /// What is run.
    pub(in crate::train) scope: Scope,
}

/// The objective over samples on a GPU.
pub(super) struct OnDevice<'a> {
    there: There<'a>,
    metric: Option<Metric>,
    /// The layers that are compared, each with the weights of its units.
    compared: Vec<(usize, Buffer<f32>)>,
    chunks: Vec<Chunk>,
    threads: Threads,
    cancel: &'a Cancel,
}

/// Some samples.
struct Chunk {
    number: usize,
    samples: Range<usize>,
    /// One for samples that are fitted, zero for the others.
    fitted: Buffer<f32>,
    /// The baseline's outputs.
    y: Matrix<f32>,
}

/// The model's values on all samples.
pub(super) struct DeviceAt<'a> {
    model: DeviceModel,
    /// The values on every chunk, as many as memory allows.
    passes: Vec<Option<DevicePass<'a>>>,
    /// Outputs and class probabilities of every chunk.
    y: Vec<Matrix<f32>>,
    p: Vec<Matrix<f32>>,
}

impl<'a> There<'a> {
    /// Whether a sample is fitted. Samples after the last one are run with the others of their chunk, and have no part in
    /// anything.
    fn fits(&self, sample: usize) -> bool {
        sample < self.samples && !Problem::holds_out(sample)
    }

    /// A chunk of a source in one of the walks.
    fn get(
        &self,
        session: &Session,
        walk: &'a Walk<'a>,
        source: Source,
        (number, samples): (usize, Range<usize>),
    ) -> Result<Operand<'a>> {
        let none: &[Option<Chunks>] = &[];
        let layers = walk.on_gpu().map_or(none, |(_, layers)| layers);
        chunk_of(session, walk.source(), layers, source, (number, samples))
    }
}

impl<'a> OnDevice<'a> {
    /// The objective that compares `layers`, whose units have these weights one after the other; `None` if the walks are
    /// not on a GPU.
    pub(super) fn new(
        there: There<'a>,
        metric: Option<Metric>,
        layers: impl Iterator<Item = (usize, Vec<f32>)>,
        (threads, cancel): (Threads, &'a Cancel),
    ) -> Result<Option<Self>> {
        let Some((gpu, their_layers)) = there.theirs.on_gpu() else { return Ok(None) };
        let session = gpu.cuda.session()?;
        // Layers without weights have no part in the objective.
        let layers = layers.filter(|(_, weights)| weights.iter().any(|w| *w != 0.0));
        let compared = layers.map(|(k, weights)| Ok((k, session.hold(&weights)?))).collect::<Result<_>>()?;
        let mut chunks = Vec::new();
        let output = there.outputs.map(|baseline| Sum::new(baseline, Target::Output));
        let output = output.map(|sum| DeviceLayer::new(&session, sum, threads)).transpose()?;
        for (number, samples) in gpu.chunks(there.theirs.samples()).enumerate() {
            cancel.check()?;
            if samples.start >= there.samples {
                break;
            }
            let y = match &output {
                None => Matrix::zeros(samples.len(), 0),
                Some(output) => {
                    let chunk = (number, samples.clone());
                    let y = forward(&session, output, there.theirs.source(), their_layers, chunk)?;
                    Matrix::from_vec(samples.len(), y.units(), session.to_rows(&y)?)?
                }
            };
            let fitted: Vec<f32> = samples.clone().map(|s| f32::from(u8::from(there.fits(s)))).collect();
            chunks.push(Chunk { number, samples, fitted: session.hold(&fitted)?, y });
        }
        drop(session);
        Ok(Some(Self { there, metric, compared, chunks, threads, cancel }))
    }

    fn session(&self) -> Result<Session> {
        match self.there.theirs.on_gpu() {
            Some((gpu, _)) => gpu.cuda.session(),
            None => Err(missing(Source::Input)),
        }
    }

    fn part(&self, model: &ImplicitModel) -> Result<DeviceModel> {
        let Some((gpu, _)) = self.there.theirs.on_gpu() else { return Err(missing(Source::Input)) };
        DeviceModel::part(gpu.cuda, model, self.targets().into_iter(), self.threads)
    }

    /// What is computed, in order.
    fn targets(&self) -> Vec<Target> {
        let layers = self.there.scope.order.iter().map(|&k| Target::Layer(k));
        layers.chain(self.there.scope.outputs.then_some(Target::Output)).collect()
    }

    /// Runs a chunk.
    fn pass(&self, session: &Session, model: &DeviceModel, chunk: &Chunk) -> Result<DevicePass<'a>> {
        let there = &self.there;
        let at = (chunk.number, chunk.samples.clone());
        let mut given = DeviceGiven::new(chunk.samples.len(), self.there.scope.columns.len());
        if model.layers().iter().any(|layer| layer.sources().contains(&Source::Input)) {
            given.put(Source::Input, there.get(session, there.theirs, Source::Input, at.clone())?);
        }
        for source in self.there.scope.given.iter().map(|&k| Source::Layer(k)) {
            given.put(source, there.get(session, there.ours, source, at.clone())?);
        }
        model.run(session, given, true)
    }

    /// The difference from the baseline's states, of a layer that is compared.
    fn difference(&self, session: &Session, pass: &DevicePass, chunk: &Chunk, k: usize) -> Result<Values> {
        let source = Source::Layer(k);
        let e = session.copy(pass.of(source)?)?;
        let theirs = self.there.get(session, self.there.theirs, source, (chunk.number, chunk.samples.clone()))?;
        session.add_scaled(&e, &*session.under(&theirs, e.positions)?, None, -1.0)?;
        Ok(e)
    }

    /// Objective and divergence, of the fitted samples and then of the held-out ones.
    pub(super) fn value(&self, model: &ImplicitModel) -> Result<[[f64; 2]; 2]> {
        let (model, session) = (self.part(model)?, self.session()?);
        let mut total = [[0.0; 2]; 2];
        for chunk in &self.chunks {
            self.cancel.check()?;
            let pass = self.pass(&session, &model, chunk)?;
            let mut squares = vec![0.0; chunk.samples.len()];
            for (k, weights) in &self.compared {
                let e = self.difference(&session, &pass, chunk, *k)?;
                let weighted = session.copy(&e)?;
                session.weigh(&weighted, weights, None)?;
                let of_samples = session.sample_products(&weighted, &e)?;
                squares.iter_mut().zip(of_samples).for_each(|(sum, s)| *sum += 0.5 * s);
            }
            let y = outputs(&session, &pass)?;
            for (s, squares) in chunk.samples.clone().zip(squares).take_while(|(s, _)| *s < self.there.samples) {
                let row = s - chunk.samples.start;
                let divergence = self.metric.map_or(0.0, |metric| metric.value(y.row(row), chunk.y.row(row)));
                let sum = &mut total[usize::from(Problem::holds_out(s))];
                sum[0] += divergence + squares;
                sum[1] += if self.metric.is_some() { divergence } else { squares };
            }
        }
        Ok(total)
    }

    /// The model's values on all samples.
    pub(super) fn at(&self, model: &ImplicitModel) -> Result<DeviceAt<'a>> {
        let model = self.part(model)?;
        let mut room = model.cuda().memory()?.0 as u64 / 2;
        let session = self.session()?;
        let mut at = DeviceAt { model, passes: Vec::new(), y: Vec::new(), p: Vec::new() };
        for chunk in &self.chunks {
            self.cancel.check()?;
            let pass = self.pass(&session, &at.model, chunk)?;
            let y = outputs(&session, &pass)?;
            at.p.push(self.metric.map_or_else(Matrix::default, |metric| metric.gradient(&y, &y).0));
            at.y.push(y);
            let left = room.checked_sub(pass.bytes());
            room = left.unwrap_or(room);
            at.passes.push(left.map(|_| pass));
        }
        Ok(at)
    }

    /// The inputs (without values if no layer reads them) and the states, in the columns of the scope, of some samples of
    /// one chunk.
    pub(super) fn values(&self, at: &DeviceAt, samples: Range<usize>) -> Result<(Matrix<f32>, Matrix<f32>)> {
        let session = self.session()?;
        let number = self.chunks.iter().position(|chunk| chunk.samples.contains(&samples.start));
        let number = number.ok_or_else(|| missing(Source::Input))?;
        let first = self.chunks[number].samples.start;
        let part = samples.start - first..samples.end - first;
        let mut x = Matrix::zeros(samples.len(), self.there.scope.width);
        let u = self.with_pass(&session, at, number, |pass| {
            for &k in self.there.scope.given.iter().chain(&self.there.scope.order) {
                let values = pass.of(Source::Layer(k))?;
                let rows = session.some_rows(values, part.clone())?;
                for (s, row) in rows.chunks_exact(values.units().max(1)).enumerate() {
                    x.row_mut(s)[self.there.scope.columns[k].clone()].copy_from_slice(row);
                }
            }
            match pass.of(Source::Input) {
                Ok(u) => Matrix::from_vec(samples.len(), u.units(), session.some_rows(u, part)?),
                Err(_) => Ok(Matrix::zeros(samples.len(), 0)),
            }
        })?;
        Ok((u, x))
    }

    /// Calls `work` with the values on a chunk, which are computed again if memory did not allow to keep them.
    fn with_pass<T>(
        &self,
        session: &Session,
        at: &DeviceAt,
        number: usize,
        work: impl FnOnce(&DevicePass) -> Result<T>,
    ) -> Result<T> {
        match &at.passes[number] {
            Some(pass) => work(pass),
            None => work(&self.pass(session, &at.model, &self.chunks[number])?),
        }
    }

    /// The gradient of the sum over fitted samples, one number per non-zero whose weight changes.
    pub(super) fn gradient(&self, at: &DeviceAt, support: &Linearised) -> Result<Vec<f64>> {
        self.outer(at, support, |session, number, pass| {
            let v = self.metric.map(|metric| metric.gradient(&at.y[number], &self.chunks[number].y).1);
            let mut c: Vec<Option<Values>> = (0..self.there.scope.columns.len()).map(|_| None).collect();
            for (k, _) in &self.compared {
                let e = self.difference(session, pass, &self.chunks[number], *k)?;
                at.model.gate_layer(session, pass, *k, &e)?;
                c[*k] = Some(e);
            }
            Ok((v, c))
        })
    }

    /// The Gauss–Newton curvature of the sum over fitted samples times a change of the weights.
    pub(super) fn curvature(&self, at: &DeviceAt, support: &Linearised, change: &Weights) -> Result<Vec<f64>> {
        let changes = self.on_device(at, support, change)?;
        self.outer(at, support, |session, number, pass| {
            let (mut c, dy) = at.model.tangent(session, pass, &changes)?;
            let v = match (self.metric, dy) {
                (Some(metric), Some(dy)) => {
                    let mut dy = Matrix::from_vec(pass.count(), dy.units(), session.to_rows(&dy)?)?;
                    metric.curve(&at.p[number], &mut dy);
                    Some(dy)
                }
                _ => None,
            };
            for (k, dx) in c.iter_mut().enumerate() {
                if !self.compared.iter().any(|(compared, _)| *compared == k) {
                    *dx = None;
                }
                if let Some(dx) = dx {
                    at.model.gate_layer(session, pass, k, dx)?;
                }
            }
            Ok((v, c))
        })
    }

    /// Numbers in the places of the weights that change, on the device, by layer of the model.
    fn on_device(&self, at: &DeviceAt, support: &Linearised, numbers: &Weights) -> Result<Vec<Option<DeviceChange>>> {
        let session = self.session()?;
        let of = |layer: &DeviceLayer| {
            let Some((blocks, constants)) = support.places(layer.target()) else { return Ok(None) };
            let blocks: Vec<&[f32]> = blocks.iter().map(|&m| numbers[m].as_slice()).collect();
            layer.change(&session, &blocks, numbers[constants].as_slice()).map(Some)
        };
        at.model.layers().iter().map(of).collect()
    }

    /// The derivative by the weights that change, added up over the fitted samples of all chunks, of Σ v·y + Σ c·z, where
    /// `seeds` gives v, and c without the weights of units, for a chunk.
    fn outer(
        &self,
        at: &DeviceAt,
        support: &Linearised,
        seeds: impl Fn(&Session, usize, &DevicePass) -> Result<(Option<Matrix<f32>>, Vec<Option<Values>>)>,
    ) -> Result<Vec<f64>> {
        let sums = self.on_device(at, support, &support.change(&[]))?;
        let session = self.session()?;
        for (number, chunk) in self.chunks.iter().enumerate() {
            self.cancel.check()?;
            self.with_pass(&session, at, number, |pass| {
                let (mut v, c) = seeds(&session, number, pass)?;
                for (k, weights) in &self.compared {
                    if let Some(c) = &c[*k] {
                        session.weigh(c, weights, Some(&chunk.fitted))?;
                    }
                }
                if let Some(v) = &mut v {
                    let others = chunk.samples.clone().filter(|s| !self.there.fits(*s));
                    others.for_each(|s| v.row_mut(s - chunk.samples.start).fill(0.0));
                }
                let v = v.as_ref().map(Matrix::as_slice);
                let cotangents = at.model.adjoint(&session, pass, v, c)?;
                at.model.add_outer(&session, pass, &cotangents, v, &sums)
            })?;
        }
        let mut dense = support.change(&[]);
        for (layer, sums) in at.model.layers().iter().zip(&sums) {
            let (Some(sums), Some((blocks, constants))) = (sums, support.places(layer.target())) else { continue };
            let (of_blocks, of_constants) = layer.numbers_of(&session, sums)?;
            for (m, numbers) in blocks.into_iter().zip(of_blocks).chain([(constants, of_constants)]) {
                if !numbers.is_empty() {
                    dense[m].as_mut_slice().copy_from_slice(&numbers);
                }
            }
        }
        Ok(support.at_entries(&dense))
    }
}

/// The outputs of a pass, one sample a row.
fn outputs(session: &Session, pass: &DevicePass) -> Result<Matrix<f32>> {
    let units = pass.y.units();
    if units == 0 {
        return Ok(Matrix::zeros(pass.count(), 0));
    }
    Matrix::from_vec(pass.count(), units, session.to_rows(&pass.y)?)
}

fn missing(source: Source) -> crate::Error {
    crate::Error::shape("values on the device", format!("{source:?}"), "none")
}
