//! One layer on a GPU: its sum, forwards and backwards.

use std::ffi::c_int;

use super::operator::DeviceOperator;
use crate::Result;
use crate::backend::cuda::{Buffer, Geometry, Operand, Phi, PoolKind, Session, Values};
use crate::equilibrium::prepared::Sum;
use crate::layout::{Activation, MapShape, Operator};
use crate::model::{TapBlock, TapWeights, Target};
use crate::network::{FixedMap, Source, Window};
use crate::parallel::{self, Threads};

/// A layer, or the output, with its weights on the device.
pub(crate) struct DeviceLayer {
    pub(super) sum: Sum,
    pub(super) blocks: Vec<Weights>,
    bias: Buffer<f32>,
    /// The operator, if it has a kernel on the device.
    pub(super) operator: Option<DeviceOperator>,
    pub(super) threads: Threads,
}

/// The weights of a block.
pub(super) enum Weights {
    /// One row a channel out, over the taps of its own group of channels; `None` where all of them are zero.
    Taps(Option<Buffer<f32>>),
    /// A residual sum, with one factor per channel, or without.
    Residual(Option<Buffer<f32>>),
}

/// The window of a block over its operand.
pub(crate) fn geometry(input: MapShape, output: MapShape, window: Window) -> Geometry {
    let int = |v: usize| v as c_int;
    Geometry {
        channels: int(input.channels),
        height: int(input.height),
        width: int(input.width),
        out_height: int(output.height),
        out_width: int(output.width),
        kernel: window.kernel.map(int),
        stride: window.stride.map(int),
        padding: [int(window.padding[0]), int(window.padding[1])],
        dilation: window.dilation.map(int),
    }
}

pub(super) fn pooling(map: FixedMap) -> Result<(Geometry, PoolKind)> {
    let (input, output) = (map.input(), map.output()?);
    Ok(match map {
        FixedMap::AveragePool { window, count_padding, .. } => {
            let kind = if count_padding { PoolKind::MeanWithPadding } else { PoolKind::Mean };
            (geometry(input, output, window), kind)
        }
        FixedMap::MaxPool { window, .. } => (geometry(input, output, window), PoolKind::Maximum),
        FixedMap::GlobalAverage { .. } => {
            let kernel = [input.height, input.width];
            let window = Window { kernel, stride: [1, 1], padding: [0; 4], dilation: [1; 2] };
            (geometry(input, output, window), PoolKind::Mean)
        }
    })
}

/// φ by its number among the kernels.
pub(super) fn phi(activation: Activation) -> Phi {
    let (kind, a, b) = match activation {
        Activation::Relu => (0, 0.0, 0.0),
        Activation::LeakyRelu { slope } => (1, slope, 0.0),
        Activation::Tanh => (2, 0.0, 0.0),
        Activation::Sigmoid => (3, 0.0, 0.0),
        Activation::Identity => (4, 0.0, 0.0),
        Activation::Clip { low, high } => (5, low, high),
        Activation::Softplus => (6, 0.0, 0.0),
        Activation::Softsign => (7, 0.0, 0.0),
        Activation::Elu { alpha } => (8, alpha, 0.0),
        Activation::Celu { alpha } => (9, alpha, 0.0),
        Activation::Selu => (10, 0.0, 0.0),
        Activation::HardSigmoid { alpha, beta } => (11, alpha, beta),
        Activation::HardSwish => (12, 0.0, 0.0),
        Activation::Gelu => (13, 0.0, 0.0),
        Activation::GeluTanh => (14, 0.0, 0.0),
        Activation::Silu => (15, 0.0, 0.0),
        Activation::Mish => (16, 0.0, 0.0),
    };
    Phi { kind, a, b }
}

/// The shape in which a block reads its source.
pub(super) fn read_as(block: &TapBlock) -> MapShape {
    block.maps.first().map_or(block.input, |m| m.input())
}

/// The operand of a block's weights: its source after its poolings.
pub(crate) fn operand<'a>(session: &Session, block: &TapBlock, source: &'a Values) -> Result<Operand<'a>> {
    let mut x = session.under(source, read_as(block).positions())?;
    for map in &block.maps {
        let (geometry, kind) = pooling(*map)?;
        x = Operand::Made(session.pooled(&x, geometry, kind)?);
    }
    Ok(x)
}

impl DeviceLayer {
    /// Puts the weights of a layer on the device.
    pub(crate) fn new(session: &Session, sum: Sum, threads: Threads) -> Result<Self> {
        let blocks = sum.blocks.iter().map(|block| match &block.weights {
            TapWeights::Taps(taps) if taps.nonzeros() == 0 => Ok(Weights::Taps(None)),
            TapWeights::Taps(taps) => {
                let own = block.columns() / block.groups.max(1);
                let mut dense = vec![0.0; taps.rows() * own];
                for o in 0..taps.rows() {
                    let first = block.group_columns(o).start;
                    taps.row(o).for_each(|(j, v)| dense[o * own + j - first] = v);
                }
                session.hold(&dense).map(|dense| Weights::Taps(Some(dense)))
            }
            TapWeights::Identity => Ok(Weights::Residual(None)),
            TapWeights::Diagonal(factors) => session.hold(factors).map(|f| Weights::Residual(Some(f))),
        });
        let blocks = blocks.collect::<Result<Vec<_>>>()?;
        let bias = match &sum.operator {
            // The numbers of a constant take the place of a bias per unit.
            Some(Operator::Constant { values, .. }) => session.hold(values)?,
            _ => session.hold(&sum.bias)?,
        };
        let operator = sum.operator.as_ref().map_or(Ok(None), |o| DeviceOperator::new(session, o))?;
        Ok(Self { sum, blocks, bias, operator, threads })
    }

    /// The sources that it reads, each listed once.
    pub(crate) fn sources(&self) -> Vec<Source> {
        let mut out: Vec<Source> = Vec::new();
        self.sum.sources().for_each(|source| {
            if !out.contains(&source) {
                out.push(source);
            }
        });
        out
    }

    /// What it computes: a layer or the output.
    pub(crate) fn target(&self) -> Target {
        self.sum.target
    }

    /// z (or the value of an operator) of `count` samples.
    pub(crate) fn forward<'a>(
        &self,
        session: &Session,
        count: usize,
        source: impl Fn(Source) -> Result<&'a Values>,
    ) -> Result<Values> {
        let map = self.sum.map();
        match &self.sum.operator {
            Some(Operator::Constant { values, .. }) => {
                let all = session.biased(&self.bias, values.len(), count, 1)?;
                return session.relayout(&all, map.positions());
            }
            Some(operator) => return self.operator(session, operator, count, source),
            None => {}
        }
        let z = session.biased(&self.bias, map.channels, count, map.positions())?;
        for (block, weights) in self.sum.blocks.iter().zip(&self.blocks) {
            if !matches!(weights, Weights::Taps(None)) {
                let x = operand(session, block, source(block.source)?)?;
                self.add(session, &z, block, weights, &x)?;
            }
        }
        Ok(z)
    }

    /// z += weights · x for one block, where x is the operand of its weights.
    pub(super) fn add(
        &self,
        session: &Session,
        z: &Values,
        block: &TapBlock,
        weights: &Weights,
        x: &Values,
    ) -> Result<()> {
        let (same, count) = (block.output.positions() == z.positions, z.count);
        let own = if same {
            None
        } else {
            Some(session.no_values(block.output.channels, count, block.output.positions())?)
        };
        let out = own.as_ref().unwrap_or(z);
        match weights {
            Weights::Taps(Some(weights)) => {
                let window = geometry(block.input, block.output, block.window);
                session.add_taps(out, x, weights, window, block.groups)?;
            }
            Weights::Residual(factors) => session.add_scaled(out, x, factors.as_ref(), 1.0)?,
            Weights::Taps(None) => {}
        }
        match &own {
            Some(own) => session.add_scaled(z, &session.relayout(own, z.positions)?, None, 1.0),
            None => Ok(()),
        }
    }

    /// φ(z), in place.
    pub(crate) fn activate(&self, session: &Session, z: &Values) -> Result<()> {
        match self.sum.activation {
            Activation::Identity => Ok(()),
            activation => session.activate(z, phi(activation)),
        }
    }

    /// The value of an operator. If it has no kernel, its operands go to the CPU and the value comes back.
    fn operator<'a>(
        &self,
        session: &Session,
        operator: &Operator,
        count: usize,
        source: impl Fn(Source) -> Result<&'a Values>,
    ) -> Result<Values> {
        let (map, size) = (self.sum.map(), self.sum.map().size());
        if let Some(kernel) = &self.operator {
            let operands = operator.operands().iter().map(|o| session.under(source(o.source)?, 1));
            let operands = operands.collect::<Result<Vec<_>>>()?;
            let value = kernel.forward(session, &operands.iter().map(|o| &**o).collect::<Vec<_>>(), size)?;
            return if map.positions() == 1 { Ok(value) } else { session.relayout(&value, map.positions()) };
        }
        let operands = operator.operands().iter().map(|o| session.to_rows(source(o.source)?));
        let operands = operands.collect::<Result<Vec<_>>>()?;
        let rows = parallel::map(self.threads, count, |s| {
            let of_sample: Vec<&[f32]> = operands.iter().map(|o| row(o, s, count)).collect();
            let mut out = vec![0.0; size];
            operator.forward(&of_sample, &mut out);
            Ok(out)
        })?;
        session.values_of_rows(&rows.concat(), count, map.positions())
    }

    /// Sends the cotangent of z back to everything the layer reads: `cotangent` gives the values that it is added to, and
    /// `source` the layer's operands.
    pub(crate) fn pull_back<'a>(
        &self,
        session: &Session,
        z: &Values,
        dz: &Values,
        source: impl Fn(Source) -> Result<&'a Values>,
        cotangent: impl Fn(Source) -> Option<&'a Values>,
    ) -> Result<()> {
        if let Some(operator) = &self.sum.operator {
            return self.operator_back(session, operator, z, dz, source, cotangent);
        }
        for (block, weights) in self.sum.blocks.iter().zip(&self.blocks) {
            let Some(into) = cotangent(block.source) else { continue };
            if matches!(weights, Weights::Taps(None)) {
                continue;
            }
            let dout = session.under(dz, block.output.positions())?;
            let add = |dx: &Values| match weights {
                Weights::Taps(Some(weights)) => {
                    let window = geometry(block.input, block.output, block.window);
                    session.add_taps_back(dx, &dout, weights, window, block.groups)
                }
                Weights::Residual(factors) => session.add_scaled(dx, &dout, factors.as_ref(), 1.0),
                Weights::Taps(None) => Ok(()),
            };
            if block.maps.is_empty() && into.positions == block.input.positions() {
                add(into)?;
                continue;
            }
            let mut dx = session.no_values(block.input.channels, dz.count, block.input.positions())?;
            add(&dx)?;
            if !block.maps.is_empty() {
                // The input of every pooling, first to last.
                let mut read = vec![session.under(source(block.source)?, read_as(block).positions())?];
                for map in &block.maps[..block.maps.len() - 1] {
                    let (geometry, kind) = pooling(*map)?;
                    let next = read.last().map(|x| session.pooled(x, geometry, kind)).transpose()?;
                    read.extend(next.map(Operand::Made));
                }
                for (map, x) in block.maps.iter().zip(&read).rev() {
                    let (geometry, kind) = pooling(*map)?;
                    let before = session.no_values(x.channels, x.count, x.positions)?;
                    session.pooled_back(&before, x, &dx, geometry, kind)?;
                    dx = before;
                }
            }
            session.add_scaled(into, &*session.under(&dx, into.positions)?, None, 1.0)?;
        }
        Ok(())
    }

    fn operator_back<'a>(
        &self,
        session: &Session,
        operator: &Operator,
        z: &Values,
        dz: &Values,
        source: impl Fn(Source) -> Result<&'a Values>,
        cotangent: impl Fn(Source) -> Option<&'a Values>,
    ) -> Result<()> {
        if let Some(kernel) = &self.operator {
            let operands = operator.operands().iter().map(|o| session.under(source(o.source)?, 1));
            let operands = operands.collect::<Result<Vec<_>>>()?;
            let operands: Vec<&Values> = operands.iter().map(|o| &**o).collect();
            let (y, dy) = (session.under(z, 1)?, session.under(dz, 1)?);
            // Cotangents with a channel per unit; they are added to those of maps afterwards.
            let places: Vec<Option<&Values>> = operator.operands().iter().map(|o| cotangent(o.source)).collect();
            let mut made = Vec::with_capacity(places.len());
            for (place, x) in places.iter().zip(&operands) {
                let apart = place.is_some_and(|into| into.positions != 1);
                made.push(if apart { Some(session.no_values(x.channels, x.count, 1)?) } else { None });
            }
            let into: Vec<Option<&Values>> =
                places.iter().zip(&made).map(|(place, made)| made.as_ref().or(*place)).collect();
            kernel.pull_back(session, &operands, (&y, &dy), &into)?;
            for (place, made) in places.iter().zip(&made) {
                if let (Some(into), Some(dx)) = (place, made) {
                    session.add_scaled(into, &*session.under(dx, into.positions)?, None, 1.0)?;
                }
            }
            return Ok(());
        }
        let operands = operator.operands().iter().map(|o| session.to_rows(source(o.source)?));
        let operands = operands.collect::<Result<Vec<_>>>()?;
        let (value, dout, count) = (session.to_rows(z)?, session.to_rows(dz)?, z.count);
        let rows = parallel::map(self.threads, count, |s| {
            let of_sample: Vec<&[f32]> = operands.iter().map(|o| row(o, s, count)).collect();
            let mut cotangents: Vec<Vec<f32>> = of_sample.iter().map(|o| vec![0.0; o.len()]).collect();
            let mut into: Vec<Option<&mut [f32]>> = cotangents.iter_mut().map(|c| Some(&mut c[..])).collect();
            operator.adjoint(&of_sample, row(&value, s, count), row(&dout, s, count), &mut into);
            Ok(cotangents)
        })?;
        for (k, operand) in operator.operands().iter().enumerate() {
            let Some(into) = cotangent(operand.source) else { continue };
            let all: Vec<f32> = rows.iter().flat_map(|of_sample| of_sample[k].iter().copied()).collect();
            session.add_scaled(into, &session.values_of_rows(&all, count, into.positions)?, None, 1.0)?;
        }
        Ok(())
    }
}

pub(super) fn row(values: &[f32], sample: usize, count: usize) -> &[f32] {
    let width = values.len() / count.max(1);
    &values[sample * width..(sample + 1) * width]
}
