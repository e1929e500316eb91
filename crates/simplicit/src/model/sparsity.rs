//! The counts of non-zeros, multiply-adds and bytes; nothing else in the project counts them.

use serde::Serialize;

use super::{ImplicitModel, Letter, OUTPUT, TapBlock, TapWeights, Target};
use crate::linalg::Csr;
use crate::network::Source;

/// Non-zeros of every part of a model; each tap weight is counted once.
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

/// Non-zeros of one layer: in its rows of A and B, and in b.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LayerCount {
    /// The layer's name.
    pub name: String,
    /// Number of its units.
    pub units: usize,
    /// Number of its rows: channels of a map, units of a dense layer.
    pub rows: usize,
    /// Non-zeros of its rows; each tap weight is counted once.
    pub nonzeros: usize,
    /// Rows (channels or units) that neither an output nor another state reads, because their columns of A and C have
    /// no non-zero.
    pub unread: usize,
    /// Whether training left the layer out, so that its weights are the baseline's.
    pub kept: bool,
}

/// The size of a model, compared with its baseline.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Sparsity {
    /// Non-zeros of the stored A, B, C, D, b, d, and of the parameters that stay.
    pub nonzeros: u64,
    /// Non-zero parameters of the baseline; (n+q)(n+p) where the baseline is not known.
    pub baseline_nonzeros: u64,
    /// 1 − nonzeros / baseline_nonzeros.
    pub sparsity: f64,
    /// Multiply-adds of one evaluation of the formula on one sample.
    pub multiply_adds: u64,
    /// The same for the baseline, where it is known.
    pub baseline_multiply_adds: Option<u64>,
    /// Bytes of the model file.
    pub bytes: u64,
    /// Bits for the indices of A, B, C, D by the formula in the paper's appendix.
    pub paper_index_bits: u64,
    /// The non-zeros that stay as they are: scales and shifts of norms, embeddings, slopes, and the weights of layers
    /// that training left out.
    pub fixed: u64,
    /// 1 − nonzeros / baseline_nonzeros, both counted without the parameters that stay.
    pub trainable_sparsity: f64,
    /// Non-zeros by part.
    pub letters: LetterCounts,
    /// Counts by layer, last layer first.
    pub layers: Vec<LayerCount>,
}

impl Sparsity {
    /// Counts the stored model.
    pub fn of(model: &ImplicitModel) -> Self {
        let nonzero = |v: &[f32]| v.iter().filter(|v| **v != 0.0).count();
        let (a, b, c, d) = (model.a(), model.b(), model.c(), model.d());
        let shared = |letter: Letter| -> usize {
            model.taps().iter().filter(|b| b.letter() == letter).map(TapBlock::nonzeros).sum()
        };
        let letters = LetterCounts {
            a: a.nonzeros() + shared(Letter::A),
            b: b.nonzeros() + shared(Letter::B),
            c: c.nonzeros() + shared(Letter::C),
            d: d.nonzeros() + shared(Letter::D),
            state_bias: nonzero(model.state_bias()),
            output_bias: nonzero(model.output_bias()),
        };
        let plain: usize = [a, b, c, d].iter().map(|m| m.nonzeros()).sum();
        let multiply_adds = plain as u64 + model.taps().iter().map(TapBlock::multiply_adds).sum::<u64>();
        let weights = letters.a + letters.b + letters.c + letters.d;
        let constants: u64 = model.layout().layers().iter().map(|l| l.parameters() as u64).sum();
        let nonzeros = (weights + letters.state_bias + letters.output_bias) as u64 + constants;
        let kept = |name: &str| model.metadata().kept.iter().any(|k| k == name);
        let shape = model.shape();
        let full = (shape.states + shape.outputs) as u64 * (shape.states + shape.inputs) as u64;
        let baseline_nonzeros = model.metadata().baseline_nonzeros.unwrap_or(full);
        let share = |left: u64, of: u64| if of == 0 { 0.0 } else { 1.0 - left as f64 / of as f64 };
        let read = rows_read(model);
        let layers: Vec<LayerCount> = model
            .layout()
            .layers()
            .iter()
            .enumerate()
            .map(|(k, layer)| {
                let (units, rows) = (model.layout().range(k), model.layout().row_range(k));
                let count = |m: &Csr<f32>| m.indptr()[units.end] - m.indptr()[units.start];
                let own = |b: &&TapBlock| b.target == Target::Layer(k);
                let taps: usize = model.taps().iter().filter(own).map(TapBlock::nonzeros).sum();
                LayerCount {
                    name: layer.name.clone(),
                    units: layer.size,
                    rows: rows.len(),
                    nonzeros: count(a) + count(b) + taps + nonzero(&model.state_bias()[rows.clone()]),
                    unread: read[rows].iter().filter(|r| !**r).count(),
                    kept: kept(&layer.name),
                }
            })
            .collect();
        let of_layers: usize = layers.iter().filter(|l| l.kept).map(|l| l.nonzeros).sum();
        let of_outputs = if kept(OUTPUT) { letters.c + letters.d + letters.output_bias } else { 0 };
        let fixed = constants + (of_layers + of_outputs) as u64;
        let shared_bits: u64 = model
            .taps()
            .iter()
            .map(|b| match &b.weights {
                TapWeights::Taps(taps) => paper_index_bits(taps),
                _ => 0,
            })
            .sum();
        Self {
            nonzeros,
            baseline_nonzeros,
            sparsity: share(nonzeros, baseline_nonzeros),
            fixed,
            trainable_sparsity: share(nonzeros - fixed, baseline_nonzeros.saturating_sub(fixed)),
            multiply_adds,
            baseline_multiply_adds: model.metadata().baseline_multiply_adds,
            bytes: model.to_bytes().len() as u64,
            paper_index_bits: [a, b, c, d].map(paper_index_bits).iter().sum::<u64>() + shared_bits,
            letters,
            layers,
        }
    }
}

/// For every row of the layout, whether an output or another state reads it.
fn rows_read(model: &ImplicitModel) -> Vec<bool> {
    let layout = model.layout();
    let mut units = vec![false; model.shape().states];
    let a = model.a();
    for i in 0..a.rows() {
        a.row(i).filter(|&(j, _)| j != i).for_each(|(j, _)| units[j] = true);
    }
    model.c().indices().iter().for_each(|&j| units[j as usize] = true);
    for block in model.taps() {
        let Source::Layer(k) = block.source else { continue };
        let own = &mut units[layout.range(k)];
        match &block.weights {
            TapWeights::Taps(taps) => {
                // A channel of the operand is the same share of the source, pooled or not.
                let each = own.len() / block.input.channels.max(1);
                for &j in taps.indices() {
                    own[j as usize / block.window.area() * each] = true;
                }
                for channel in own.chunks_exact_mut(each.max(1)) {
                    let any = channel.contains(&true);
                    channel.fill(any);
                }
            }
            TapWeights::Identity | TapWeights::Diagonal(_) => own.fill(true),
        }
    }
    for operand in layout.layers().iter().flat_map(|l| l.operands()) {
        if let Source::Layer(k) = operand.source {
            units[layout.range(k)].fill(true);
        }
    }
    let layers = layout.layers().iter().enumerate().filter(|(_, layer)| layer.operator.is_none());
    layers
        .flat_map(|(k, layer)| {
            let each = layer.size / layer.rows().max(1);
            units[layout.range(k)].chunks_exact(each.max(1)).map(|row| row.contains(&true)).collect::<Vec<_>>()
        })
        .collect()
}

/// n_r·⌈log₂ nnz⌉ + nnz·⌈log₂ n_c⌉ bits (the paper's appendix on storage).
fn paper_index_bits(m: &Csr<f32>) -> u64 {
    let bits = |count: usize| count.next_power_of_two().trailing_zeros() as u64;
    m.rows() as u64 * bits(m.nonzeros()) + m.nonzeros() as u64 * bits(m.cols())
}
