//! The one place that counts.

use serde::Serialize;

use super::ImplicitModel;
use crate::linalg::Csr;

/// Non-zeros of every part of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct LetterCounts {
    /// A.
    pub a: usize,
    /// B.
    pub b: usize,
    /// C.
    pub c: usize,
    /// D.
    pub d: usize,
    /// The vector b.
    pub state_bias: usize,
    /// The vector d.
    pub output_bias: usize,
}

/// Non-zeros of the rows of one layer: of A, B and b.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LayerCount {
    /// The layer's name.
    pub name: String,
    /// Its units.
    pub units: usize,
    /// Non-zeros of its rows.
    pub nonzeros: usize,
    /// Units that neither an output nor another state reads: no non-zero in their column of A or C.
    pub unread: usize,
}

/// How large a model is, beside its baseline.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Sparsity {
    /// Non-zeros of the stored A, B, C, D, b, d.
    pub nonzeros: u64,
    /// Non-zero parameters of the baseline; (n+q)(n+p) where the baseline is not known.
    pub baseline_nonzeros: u64,
    /// 1 − nonzeros / baseline_nonzeros.
    pub sparsity: f64,
    /// Multiply-adds of one evaluation of the formula on one sample.
    pub multiply_adds: u64,
    /// The baseline's, where known.
    pub baseline_multiply_adds: Option<u64>,
    /// Bytes of the model file.
    pub bytes: u64,
    /// Bits for the indices of A, B, C, D by the formula in the paper's appendix.
    pub paper_index_bits: u64,
    /// By part.
    pub letters: LetterCounts,
    /// By layer, last first.
    pub layers: Vec<LayerCount>,
}

impl Sparsity {
    /// Counts the stored model.
    pub fn of(model: &ImplicitModel) -> Self {
        let nonzero = |v: &[f32]| v.iter().filter(|v| **v != 0.0).count();
        let (a, b, c, d) = (model.a(), model.b(), model.c(), model.d());
        let letters = LetterCounts {
            a: a.nonzeros(),
            b: b.nonzeros(),
            c: c.nonzeros(),
            d: d.nonzeros(),
            state_bias: nonzero(model.state_bias()),
            output_bias: nonzero(model.output_bias()),
        };
        let multiply_adds = (letters.a + letters.b + letters.c + letters.d) as u64;
        let nonzeros = multiply_adds + (letters.state_bias + letters.output_bias) as u64;
        let shape = model.shape();
        let full = (shape.states + shape.outputs) as u64 * (shape.states + shape.inputs) as u64;
        let baseline_nonzeros = model.metadata().baseline_nonzeros.unwrap_or(full);
        let mut read = vec![false; shape.states];
        for i in 0..shape.states {
            a.row(i).filter(|&(j, _)| j != i).for_each(|(j, _)| read[j] = true);
        }
        c.indices().iter().for_each(|&j| read[j as usize] = true);
        let layers = model
            .layout()
            .layers()
            .iter()
            .enumerate()
            .map(|(k, layer)| {
                let rows = model.layout().range(k);
                let count = |m: &Csr<f32>| m.indptr()[rows.end] - m.indptr()[rows.start];
                LayerCount {
                    name: layer.name.clone(),
                    units: layer.size,
                    nonzeros: count(a) + count(b) + nonzero(&model.state_bias()[rows.clone()]),
                    unread: read[rows].iter().filter(|r| !**r).count(),
                }
            })
            .collect();
        Self {
            nonzeros,
            baseline_nonzeros,
            sparsity: if baseline_nonzeros == 0 { 0.0 } else { 1.0 - nonzeros as f64 / baseline_nonzeros as f64 },
            multiply_adds,
            baseline_multiply_adds: model.metadata().baseline_multiply_adds,
            bytes: model.to_bytes().len() as u64,
            paper_index_bits: [a, b, c, d].map(paper_index_bits).iter().sum(),
            letters,
            layers,
        }
    }
}

/// n_r·⌈log₂ nnz⌉ + nnz·⌈log₂ n_c⌉ bits (the paper's appendix on storage).
fn paper_index_bits(m: &Csr<f32>) -> u64 {
    let bits = |count: usize| count.next_power_of_two().trailing_zeros() as u64;
    m.rows() as u64 * bits(m.nonzeros()) + m.nonzeros() as u64 * bits(m.cols())
}
