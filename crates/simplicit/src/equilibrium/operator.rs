//! Operators of a layer on samples side by side: each sample's operands are taken out of the lanes, and the result is
//! put back.

use crate::layout::Operator;
use crate::linalg::lanes::{from_lanes, to_lanes};

/// Room for the samples of an operator's operands and result, one sample a row; it grows to what the largest one needs.
#[derive(Default)]
pub(super) struct OperatorRoom {
    operands: Vec<Vec<f32>>,
    cotangents: Vec<Vec<f32>>,
    result: Vec<f32>,
    dout: Vec<f32>,
}

fn take_out(into: &mut Vec<f32>, source: &[f32], (lanes, count): (usize, usize)) {
    let width = source.len() / lanes;
    into.resize(width * count, 0.0);
    from_lanes(into, width, source, count, width, lanes);
}

impl OperatorRoom {
    fn take_operands<'a>(&mut self, operands: impl Iterator<Item = &'a [f32]>, batch: (usize, usize)) -> usize {
        let mut number = 0;
        for source in operands {
            if self.operands.len() == number {
                self.operands.push(Vec::new());
            }
            take_out(&mut self.operands[number], source, batch);
            number += 1;
        }
        number
    }

    /// The layer's values from those of its operands, all units × lanes; lanes beyond the samples become zero.
    pub(super) fn forward<'a>(
        &mut self,
        operator: &Operator,
        operands: impl Iterator<Item = &'a [f32]>,
        out: &mut [f32],
        (lanes, count): (usize, usize),
    ) {
        if let Operator::Constant { values, .. } = operator {
            out.chunks_exact_mut(lanes).zip(values.iter()).for_each(|(unit, v)| unit.fill(*v));
            return;
        }
        let number = self.take_operands(operands, (lanes, count));
        let width = out.len() / lanes;
        self.result.resize(width * count, 0.0);
        for sample in 0..count {
            let of_sample: Vec<&[f32]> = self.operands[..number].iter().map(|o| row(o, sample, count)).collect();
            operator.forward(&of_sample, &mut self.result[sample * width..(sample + 1) * width]);
        }
        out.fill(0.0);
        to_lanes(out, &self.result, width, count, width, lanes);
    }

    /// The cotangents of all operands from that of the layer; [`OperatorRoom::add_cotangent`] adds them where they belong.
    pub(super) fn adjoint<'a>(
        &mut self,
        operator: &Operator,
        operands: impl Iterator<Item = &'a [f32]>,
        value: &[f32],
        dout: &[f32],
        (lanes, count): (usize, usize),
    ) {
        let number = self.take_operands(operands, (lanes, count));
        let width = dout.len() / lanes;
        take_out(&mut self.result, value, (lanes, count));
        take_out(&mut self.dout, dout, (lanes, count));
        self.cotangents.resize_with(number.max(self.cotangents.len()), Vec::new);
        for (cotangent, operand) in self.cotangents.iter_mut().zip(&self.operands[..number]) {
            cotangent.clear();
            cotangent.resize(operand.len(), 0.0);
        }
        for sample in 0..count {
            let own = sample * width..(sample + 1) * width;
            let of_sample: Vec<&[f32]> = self.operands[..number].iter().map(|o| row(o, sample, count)).collect();
            let mut into: Vec<Option<&mut [f32]>> = self.cotangents[..number]
                .iter_mut()
                .map(|c| {
                    let width = c.len() / count;
                    Some(&mut c[sample * width..(sample + 1) * width])
                })
                .collect();
            operator.adjoint(&of_sample, &self.result[own.clone()], &self.dout[own], &mut into);
        }
    }

    /// Adds the cotangent of operand k, found last, to `into` (units × lanes).
    pub(super) fn add_cotangent(&self, k: usize, into: &mut [f32], (lanes, count): (usize, usize)) {
        let cotangent = &self.cotangents[k];
        let width = into.len() / lanes;
        for (unit, into) in into.chunks_exact_mut(lanes).enumerate() {
            for (sample, into) in into[..count].iter_mut().enumerate() {
                *into += cotangent[sample * width + unit];
            }
        }
    }
}

fn row(values: &[f32], sample: usize, count: usize) -> &[f32] {
    let width = values.len() / count.max(1);
    &values[sample * width..(sample + 1) * width]
}
