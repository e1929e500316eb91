//! Layers and whole models on a GPU: the same blocks as [`LayerSum`](super::LayerSum) runs on the CPU, forwards and
//! backwards, for samples that stay on the device. Sums are in single precision, as on the CPU, but in another order.

mod change;
mod layer;
mod operator;

use std::collections::BTreeSet;

pub(crate) use change::DeviceChange;
pub(crate) use layer::{DeviceLayer, geometry, operand};
use layer::{phi, read_as};

use super::prepared::Sum;
use crate::backend::cuda::{Cuda, Operand, Session, Values};
use crate::backend::{self, Device};
use crate::layout::{Activation, Operator};
use crate::linalg::Matrix;
use crate::model::{ImplicitModel, Target};
use crate::network::Source;
use crate::parallel::{Cancel, Threads};
use crate::{Error, Result};

/// The most samples that are on the device at once.
const SAMPLES: usize = 512;

/// A model without cycles, or some of its layers, on a GPU.
pub struct DeviceModel {
    cuda: &'static Cuda,
    inputs: usize,
    outputs: usize,
    /// Number of values of a sample, all layers together.
    units: usize,
    /// The layers in an order in which they can be computed, the output last.
    layers: Vec<DeviceLayer>,
    states: usize,
}

impl std::fmt::Debug for DeviceModel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DeviceModel").field("cuda", &self.cuda).field("layers", &self.layers.len()).finish()
    }
}

/// The values that a run starts from: inputs, and layers that are read and not run.
pub(crate) struct DeviceGiven<'g> {
    count: usize,
    u: Option<Operand<'g>>,
    /// By layer, last first.
    layers: Vec<Option<Operand<'g>>>,
}

impl<'g> DeviceGiven<'g> {
    /// `count` samples of a model with `layers` layers, without values.
    pub(crate) fn new(count: usize, layers: usize) -> Self {
        Self { count, u: None, layers: (0..layers).map(|_| None).collect() }
    }

    /// Adds the values of a layer or of the inputs.
    pub(crate) fn put(&mut self, source: Source, values: Operand<'g>) {
        match source {
            Source::Input => self.u = Some(values),
            Source::Layer(k) => self.layers[k] = Some(values),
        }
    }
}

/// Values of some samples in the layers that were run: pre-activations, and states where those differ from them.
pub(crate) struct DevicePass<'g> {
    given: DeviceGiven<'g>,
    /// Pre-activations by layer, last first.
    z: Vec<Option<Values>>,
    x: Vec<Option<Values>>,
    /// The output; empty if it was not run.
    pub(crate) y: Values,
}

impl DevicePass<'_> {
    /// Number of samples.
    pub(crate) fn count(&self) -> usize {
        self.given.count
    }

    /// The values of a layer or of the inputs.
    pub(crate) fn of(&self, source: Source) -> Result<&Values> {
        match source {
            Source::Input => self.given.u.as_deref().ok_or_else(|| not_there("the inputs")),
            Source::Layer(k) => {
                let own = self.x[k].as_ref().or(self.z[k].as_ref());
                own.or(self.given.layers[k].as_deref()).ok_or_else(|| not_there(format!("layer {k}")))
            }
        }
    }

    /// Pre-activations of a layer, or the output.
    pub(crate) fn z(&self, target: Target) -> Result<&Values> {
        match target {
            Target::Layer(k) => self.z[k].as_ref().ok_or_else(|| not_there(format!("layer {k}"))),
            Target::Output => Ok(&self.y),
        }
    }

    /// Bytes of memory that the values of the layers that were run take.
    pub(crate) fn bytes(&self) -> u64 {
        self.z.iter().chain(&self.x).flatten().map(Values::bytes).sum::<u64>() + self.y.bytes()
    }
}

fn not_there(what: impl std::fmt::Display) -> Error {
    Error::shape("states of a layer", "those of a layer before", what)
}

impl DeviceModel {
    /// Puts the weights on the device. Models with cycles are refused: [`Equilibrium`](super::Equilibrium) iterates those.
    pub fn new(cuda: &'static Cuda, model: &ImplicitModel, threads: Threads) -> Result<Self> {
        if !model.layers_are_acyclic() {
            return Err(Error::unsupported("a model with cycles on a GPU", "run it through Equilibrium"));
        }
        let targets = model.layer_order().into_iter().map(Target::Layer).chain([Target::Output]);
        Self::part(cuda, model, targets, threads)
    }

    /// Puts the weights of some layers on the device; the targets are in an order in which they can be computed.
    pub(crate) fn part(
        cuda: &'static Cuda,
        model: &ImplicitModel,
        targets: impl Iterator<Item = Target>,
        threads: Threads,
    ) -> Result<Self> {
        let session = cuda.session()?;
        let layers = targets.map(|target| DeviceLayer::new(&session, Sum::new(model, target), threads));
        let layers = layers.collect::<Result<Vec<_>>>()?;
        Ok(Self {
            cuda,
            inputs: model.shape().inputs,
            outputs: model.shape().outputs,
            units: model.shape().inputs + layers.iter().map(|l| l.sum.map().size()).sum::<usize>(),
            layers,
            states: model.layout().layers().len(),
        })
    }

    /// The model on the GPU that a device names; `None` where the CPU is used: without a GPU, with cycles, or with
    /// too little work.
    pub fn on(device: Device, model: &ImplicitModel, threads: Threads) -> Result<Option<Self>> {
        let work = SAMPLES as f64 * model.shape().states as f64;
        match backend::gpu(device, work)?.filter(|_| model.layers_are_acyclic()) {
            Some(cuda) => backend::or_cpu(device, Self::new(cuda, model, threads)),
            None => Ok(None),
        }
    }

    /// Operators that run on the CPU because they have no kernel, each listed once.
    pub fn on_cpu(&self) -> Vec<&'static str> {
        let on_cpu = self.layers.iter().filter(|l| l.operator.is_none()).filter_map(|l| l.sum.operator.as_ref());
        let on_cpu = on_cpu.filter(|o| !matches!(o, Operator::Constant { .. }));
        let names: BTreeSet<&'static str> = on_cpu.map(Operator::name).collect();
        names.into_iter().collect()
    }

    /// Number of samples that can run at once if the values of all layers are kept.
    pub(crate) fn at_once(&self, copies: usize) -> Result<usize> {
        let (free, _) = self.cuda.memory()?;
        Ok((free / 2 / (4 * copies * self.units).max(1)).clamp(1, SAMPLES))
    }

    /// The GPU that holds the weights.
    pub(crate) fn cuda(&self) -> &'static Cuda {
        self.cuda
    }

    /// All layers, with the output last.
    pub(crate) fn layers(&self) -> &[DeviceLayer] {
        &self.layers
    }

    /// The outputs of a batch, one sample a row.
    pub fn outputs(&self, u: &Matrix<f32>, cancel: &Cancel) -> Result<Matrix<f32>> {
        if u.cols() != self.inputs {
            let expected = format!("{} values per sample", self.inputs);
            return Err(Error::shape("inputs", expected, format!("{} values per sample", u.cols())));
        }
        u.require_finite("U", 0)?;
        let mut y = Vec::with_capacity(u.rows() * self.outputs);
        let size = self.at_once(1)?;
        for first in (0..u.rows()).step_by(size) {
            cancel.check()?;
            let count = size.min(u.rows() - first);
            let session = self.cuda.session()?;
            let rows = &u.as_slice()[first * self.inputs..(first + count) * self.inputs];
            let rows = session.values_of_rows(rows, count, self.inputs)?;
            y.extend(session.to_rows(&self.pass(&session, rows, false)?.y)?);
        }
        Matrix::from_vec(u.rows(), self.outputs, y)
    }

    /// Runs samples (one per row) through all layers. With `keep` the values of every layer are kept, otherwise only
    /// until they have been read.
    pub(crate) fn pass(&self, session: &Session, u: Values, keep: bool) -> Result<DevicePass<'static>> {
        let positions = self.input_positions();
        let mut given = DeviceGiven::new(u.count, self.states);
        let u = if positions == u.positions { u } else { session.relayout(&u, positions)? };
        given.put(Source::Input, Operand::Made(u));
        self.run(session, given, keep)
    }

    /// Runs samples through the layers, from values that are given.
    pub(crate) fn run<'g>(&self, session: &Session, given: DeviceGiven<'g>, keep: bool) -> Result<DevicePass<'g>> {
        let count = given.count;
        let mut pass = DevicePass {
            given,
            z: (0..self.states).map(|_| None).collect(),
            x: (0..self.states).map(|_| None).collect(),
            y: session.no_values(0, 0, 0)?,
        };
        for (at, layer) in self.layers.iter().enumerate() {
            let z = layer.forward(session, count, |source| pass.of(source))?;
            match layer.target() {
                Target::Output => pass.y = z,
                Target::Layer(k) => {
                    if keep && layer.sum.activation != Activation::Identity {
                        let x = session.copy(&z)?;
                        layer.activate(session, &x)?;
                        pass.x[k] = Some(x);
                    } else {
                        layer.activate(session, &z)?;
                    }
                    pass.z[k] = Some(z);
                }
            }
            if !keep {
                for k in 0..self.states {
                    let read = |l: &DeviceLayer| l.sum.sources().any(|s| s == Source::Layer(k));
                    if !self.layers[at + 1..].iter().any(read) {
                        pass.z[k] = None;
                    }
                }
            }
        }
        Ok(pass)
    }

    /// Positions per channel of the inputs, as their first reader takes them.
    fn input_positions(&self) -> usize {
        let blocks = self.layers.iter().flat_map(|l| &l.sum.blocks);
        blocks.filter(|b| b.source == Source::Input).map(|b| read_as(b).positions()).next().unwrap_or(1)
    }

    /// The derivative of Σ v·y by the pre-activations of every layer (last first), at a pass that kept its layers.
    pub(crate) fn pull_back(&self, session: &Session, pass: &DevicePass, v: &[f32]) -> Result<Vec<Values>> {
        let cotangents = self.adjoint(session, pass, Some(v), Vec::new())?;
        cotangents.into_iter().enumerate().map(|(k, c)| c.ok_or_else(|| not_there(format!("layer {k}")))).collect()
    }

    /// The derivative of Σ v·y + Σ c·z by the pre-activations of every layer that was run, at a pass that kept its layers;
    /// `c` is by layer, and missing where it is zero. Without `v` the output has no part in it.
    pub(crate) fn adjoint(
        &self,
        session: &Session,
        pass: &DevicePass,
        v: Option<&[f32]>,
        mut c: Vec<Option<Values>>,
    ) -> Result<Vec<Option<Values>>> {
        let count = pass.count();
        let mut cotangents: Vec<Option<Values>> = (0..self.states).map(|_| None).collect();
        for layer in &self.layers {
            if let Target::Layer(k) = layer.target() {
                let z = pass.z(Target::Layer(k))?;
                cotangents[k] = Some(session.no_values(z.channels, count, z.positions)?);
            }
        }
        for layer in self.layers.iter().rev() {
            let of_output;
            let (z, dz) = match layer.target() {
                Target::Output => {
                    let Some(v) = v else { continue };
                    of_output = session.values_of_rows(v, count, 1)?;
                    (&pass.y, &of_output)
                }
                Target::Layer(k) => {
                    let (z, Some(own)) = (pass.z(Target::Layer(k))?, &cotangents[k]) else { continue };
                    self.gate(session, pass, layer, own)?;
                    if let Some(c) = c.get_mut(k).and_then(Option::take) {
                        session.add_scaled(own, &c, None, 1.0)?;
                    }
                    (z, own)
                }
            };
            let into = |source: Source| match source {
                Source::Input => None,
                Source::Layer(k) => cotangents[k].as_ref(),
            };
            layer.pull_back(session, z, dz, |source| pass.of(source), into)?;
        }
        Ok(cotangents)
    }

    /// The change of every state that was run, and of the output, for changes of the weights of some layers (in the order of
    /// the layers), at a pass that kept its layers. What does not change is missing.
    pub(crate) fn tangent(
        &self,
        session: &Session,
        pass: &DevicePass,
        changes: &[Option<DeviceChange>],
    ) -> Result<(Vec<Option<Values>>, Option<Values>)> {
        let mut dx: Vec<Option<Values>> = (0..self.states).map(|_| None).collect();
        let mut dy = None;
        for (layer, change) in self.layers.iter().zip(changes) {
            let z = pass.z(layer.target())?;
            let changed = |source: Source| match source {
                Source::Input => None,
                Source::Layer(k) => dx[k].as_ref(),
            };
            let dz = layer.tangent(session, z, change.as_ref(), |source| pass.of(source), changed)?;
            match layer.target() {
                Target::Output => dy = dz,
                Target::Layer(k) => {
                    if let Some(dz) = &dz {
                        self.gate(session, pass, layer, dz)?;
                    }
                    dx[k] = dz;
                }
            }
        }
        Ok((dx, dy))
    }

    /// w ← φ′(z)·w for a layer, at a pass.
    fn gate(&self, session: &Session, pass: &DevicePass, layer: &DeviceLayer, w: &Values) -> Result<()> {
        match layer.sum.activation {
            Activation::Identity => Ok(()),
            activation => session.gate(w, pass.z(layer.target())?, phi(activation)),
        }
    }

    /// w ← φ′(z)·w for a layer by its number, at a pass.
    pub(crate) fn gate_layer(&self, session: &Session, pass: &DevicePass, k: usize, w: &Values) -> Result<()> {
        match self.layers.iter().find(|layer| layer.target() == Target::Layer(k)) {
            Some(layer) => self.gate(session, pass, layer, w),
            None => Err(not_there(format!("layer {k}"))),
        }
    }

    /// Adds the derivatives by the weights of some layers, from cotangents of pre-activations and of the output.
    pub(crate) fn add_outer(
        &self,
        session: &Session,
        pass: &DevicePass,
        cotangents: &[Option<Values>],
        v: Option<&[f32]>,
        into: &[Option<DeviceChange>],
    ) -> Result<()> {
        for (layer, into) in self.layers.iter().zip(into) {
            let Some(into) = into else { continue };
            match layer.target() {
                Target::Output => {
                    let Some(v) = v else { continue };
                    let dy = session.values_of_rows(v, pass.count(), 1)?;
                    layer.add_outer(session, &dy, |source| pass.of(source), into)?;
                }
                Target::Layer(k) => {
                    let dz = cotangents[k].as_ref().ok_or_else(|| not_there(format!("layer {k}")))?;
                    layer.add_outer(session, dz, |source| pass.of(source), into)?;
                }
            }
        }
        Ok(())
    }
}
