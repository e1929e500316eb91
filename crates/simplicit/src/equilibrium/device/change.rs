//! A layer linearised on a GPU: the effect of a small change of its weights and of what it reads, and the derivative by
//! its weights.

use super::layer::{DeviceLayer, Weights, geometry, operand, pooling, read_as, row};
use crate::Result;
use crate::backend::cuda::{Buffer, Operand, Session, Values};
use crate::layout::Operator;
use crate::model::{TapBlock, TapWeights};
use crate::network::Source;
use crate::parallel;

/// Numbers in the places of a layer's weights and constants: a change of them, or the derivative by them.
pub(crate) struct DeviceChange {
    /// By block; without numbers for residual sums, which do not change.
    blocks: Vec<Weights>,
    constants: Buffer<f32>,
}

impl DeviceLayer {
    /// Puts a change on the device: for every block one row a channel out, over the taps of its own group of channels, and
    /// one constant a row.
    pub(crate) fn change(&self, session: &Session, blocks: &[&[f32]], constants: &[f32]) -> Result<DeviceChange> {
        let on_device = |(block, numbers): (&TapBlock, &&[f32])| match &block.weights {
            TapWeights::Taps(_) => session.hold(numbers).map(|there| Weights::Taps(Some(there))),
            TapWeights::Identity | TapWeights::Diagonal(_) => Ok(Weights::Taps(None)),
        };
        let blocks = self.sum.blocks.iter().zip(blocks).map(on_device).collect::<Result<_>>()?;
        Ok(DeviceChange { blocks, constants: session.hold(constants)? })
    }

    /// The numbers of a change: those of its blocks, then the constants.
    pub(crate) fn numbers_of(&self, session: &Session, change: &DeviceChange) -> Result<(Vec<Vec<f32>>, Vec<f32>)> {
        let numbers = |weights: &Weights| match weights {
            Weights::Taps(Some(weights)) => session.numbers(weights),
            _ => Ok(Vec::new()),
        };
        Ok((change.blocks.iter().map(numbers).collect::<Result<_>>()?, session.numbers(&change.constants)?))
    }

    /// The change of z for a change of the weights and of some sources; `None` if neither changes z. `z` is the value of the
    /// layer.
    pub(super) fn tangent<'a>(
        &self,
        session: &Session,
        z: &Values,
        change: Option<&DeviceChange>,
        source: impl Fn(Source) -> Result<&'a Values>,
        changed: impl Fn(Source) -> Option<&'a Values>,
    ) -> Result<Option<Values>> {
        if let Some(operator) = &self.sum.operator {
            return self.operator_tangent(session, operator, z, source, changed);
        }
        let map = self.sum.map();
        if change.is_none() && self.sum.sources().all(|s| changed(s).is_none()) {
            return Ok(None);
        }
        let dz = match change {
            Some(change) => session.biased(&change.constants, map.channels, z.count, map.positions())?,
            None => session.no_values(map.channels, z.count, map.positions())?,
        };
        for (at, (block, weights)) in self.sum.blocks.iter().zip(&self.blocks).enumerate() {
            let x = source(block.source)?;
            if let Some(own @ Weights::Taps(Some(_))) = change.map(|c| &c.blocks[at]) {
                self.add(session, &dz, block, own, &*operand(session, block, x)?)?;
            }
            if let Some(d) = changed(block.source).filter(|_| !matches!(weights, Weights::Taps(None))) {
                self.add(session, &dz, block, weights, &*operand_change(session, block, x, d)?)?;
            }
        }
        Ok(Some(dz))
    }

    /// The same for an operator. If the device has no kernel for its tangent, it is computed on the CPU.
    fn operator_tangent<'a>(
        &self,
        session: &Session,
        operator: &Operator,
        z: &Values,
        source: impl Fn(Source) -> Result<&'a Values>,
        changed: impl Fn(Source) -> Option<&'a Values>,
    ) -> Result<Option<Values>> {
        let operands = operator.operands();
        if operands.iter().all(|o| changed(o.source).is_none()) {
            return Ok(None);
        }
        let (map, count) = (self.sum.map(), z.count);
        let change_of = |from: Source| match changed(from) {
            Some(d) => session.under(d, 1),
            None => session.no_values(source(from)?.units(), count, 1).map(Operand::Made),
        };
        let changes = operands.iter().map(|o| change_of(o.source)).collect::<Result<Vec<_>>>()?;
        if let Some(kernel) = self.operator.as_ref().filter(|kernel| kernel.is_linear()) {
            let dz = kernel.forward(session, &changes.iter().map(|d| &**d).collect::<Vec<_>>(), map.size())?;
            return session.relayout(&dz, map.positions()).map(Some);
        }
        let values = operands.iter().map(|o| session.to_rows(source(o.source)?)).collect::<Result<Vec<_>>>()?;
        let changes = changes.iter().map(|d| session.to_rows(d)).collect::<Result<Vec<_>>>()?;
        let value = session.to_rows(z)?;
        let rows = parallel::map(self.threads, count, |s| {
            let x: Vec<&[f32]> = values.iter().map(|v| row(v, s, count)).collect();
            let d: Vec<&[f32]> = changes.iter().map(|v| row(v, s, count)).collect();
            let mut out = vec![0.0; map.size()];
            operator.tangent(&x, row(&value, s, count), &d, &mut out);
            Ok(out)
        })?;
        session.values_of_rows(&rows.concat(), count, map.positions()).map(Some)
    }

    /// Adds the derivative by the weights and constants, from the cotangent of z.
    pub(super) fn add_outer<'a>(
        &self,
        session: &Session,
        dz: &Values,
        source: impl Fn(Source) -> Result<&'a Values>,
        into: &DeviceChange,
    ) -> Result<()> {
        for (block, into) in self.sum.blocks.iter().zip(&into.blocks) {
            let Weights::Taps(Some(into)) = into else { continue };
            let x = operand(session, block, source(block.source)?)?;
            let dout = session.under(dz, block.output.positions())?;
            let window = geometry(block.input, block.output, block.window);
            session.add_taps_outer(into, &x, &dout, window, block.groups)?;
        }
        if self.sum.bias.is_empty() {
            return Ok(());
        }
        session.add_channel_sums(&into.constants, dz)
    }
}

/// The change of the operand of a block's weights, for a change `d` of its source `x`.
fn operand_change<'a>(session: &Session, block: &TapBlock, x: &'a Values, d: &'a Values) -> Result<Operand<'a>> {
    let positions = read_as(block).positions();
    let (mut x, mut d) = (session.under(x, positions)?, session.under(d, positions)?);
    for map in &block.maps {
        let (geometry, kind) = pooling(*map)?;
        d = Operand::Made(session.pooled_change(&x, &d, geometry, kind)?);
        x = Operand::Made(session.pooled(&x, geometry, kind)?);
    }
    Ok(d)
}
