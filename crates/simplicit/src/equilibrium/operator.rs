//! Runs operators of layers on a few samples, one per row, in memory for operands, result and cotangents.

use crate::layout::Operator;

/// Memory for the samples of an operator's operands and result; it grows to the needs of the largest operator.
#[derive(Debug, Default)]
pub(super) struct OperatorWorkspace {
    operands: Vec<Vec<f32>>,
    cotangents: Vec<Vec<f32>>,
    result: Vec<f32>,
    dout: Vec<f32>,
}

impl OperatorWorkspace {
    /// The place for operand k, `size` numbers in all.
    pub(super) fn operand(&mut self, k: usize, size: usize) -> &mut [f32] {
        if self.operands.len() <= k {
            self.operands.resize_with(k + 1, Vec::new);
        }
        self.operands[k].resize(size, 0.0);
        &mut self.operands[k]
    }

    /// The places for the value of the layer and for its cotangent, which an adjoint reads.
    pub(super) fn result(&mut self, size: usize) -> [&mut [f32]; 2] {
        self.result.resize(size, 0.0);
        self.dout.resize(size, 0.0);
        [&mut self.result, &mut self.dout]
    }

    /// The layer's `width` values of `count` samples from its operands, all one sample a row.
    pub(super) fn forward(&mut self, operator: &Operator, width: usize, count: usize) -> &[f32] {
        let number = operator.operands().len();
        self.result.resize(width * count, 0.0);
        for (sample, out) in self.result.chunks_exact_mut(width.max(1)).enumerate() {
            let of_sample: Vec<&[f32]> = self.operands[..number].iter().map(|o| row(o, sample, count)).collect();
            operator.forward(&of_sample, out);
        }
        &self.result
    }

    /// The cotangents of all operands from that of the layer, one sample a row.
    pub(super) fn adjoint(&mut self, operator: &Operator, count: usize) -> &[Vec<f32>] {
        let number = operator.operands().len();
        let width = self.result.len() / count.max(1);
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
        &self.cotangents[..number]
    }
}

fn row(values: &[f32], sample: usize, count: usize) -> &[f32] {
    let width = values.len() / count.max(1);
    &values[sample * width..(sample + 1) * width]
}
