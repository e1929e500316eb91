//! States of a layered model with feature maps, for all samples at once and one layer at a time.
//!
//! A cascade that ran every sample through the whole model for every layer would cost the square of the depth. Here each
//! layer is computed once from the layers it reads, which stay in memory (f32, in blocks of samples) until their last
//! reader is done.

use crate::Result;
use crate::layout::Activation;
use crate::linalg::Matrix;
use crate::model::{ImplicitModel, TapWeights, Target};
use crate::network::{Convolution, FixedMap, Source};
use crate::parallel::{self, Cancel, Threads};
use crate::states::StateSource;

/// Samples in a block; fixed, so that sums do not depend on threads.
pub(super) const SAMPLES: usize = 32;

/// Values of the input and of some layers for all samples.
pub(super) struct Walk {
    /// By layer (last first), then the input: a matrix per block, one sample a row. Empty: not there yet, or no more.
    values: Vec<Vec<Matrix<f32>>>,
    samples: usize,
}

impl Walk {
    /// The inputs of all samples.
    pub(super) fn new(source: &dyn StateSource, layers: usize, threads: Threads, cancel: &Cancel) -> Result<Self> {
        let samples = source.samples();
        let inputs = parallel::map(threads, samples.div_ceil(SAMPLES), |block| {
            cancel.check()?;
            source.inputs(block * SAMPLES..((block + 1) * SAMPLES).min(samples))
        })?;
        let mut values = vec![Vec::new(); layers];
        values.push(inputs);
        Ok(Self { values, samples })
    }

    fn index(&self, source: Source) -> usize {
        match source {
            Source::Layer(k) => k,
            Source::Input => self.values.len() - 1,
        }
    }

    /// Number of samples.
    pub(super) fn samples(&self) -> usize {
        self.samples
    }

    /// The values of one sample.
    pub(super) fn sample(&self, source: Source, sample: usize) -> &[f32] {
        self.values[self.index(source)][sample / SAMPLES].row(sample % SAMPLES)
    }

    /// Pre-activations of all samples, a block at a time; `use_block` gets them with the number of the block.
    pub(super) fn sums<T: Send>(
        &self,
        sum: &Sum,
        threads: Threads,
        cancel: &Cancel,
        use_block: impl Fn(usize, Matrix<f32>) -> T + Sync,
    ) -> Result<Vec<T>> {
        parallel::map(threads, self.samples.div_ceil(SAMPLES), |block| {
            cancel.check()?;
            let count = SAMPLES.min(self.samples - block * SAMPLES);
            let z = sum.run(count, |source| &self.values[self.index(source)][block]);
            Ok(use_block(block, z))
        })
    }

    /// Adds a layer.
    pub(super) fn put(&mut self, layer: usize, blocks: Vec<Matrix<f32>>) {
        self.values[layer] = blocks;
    }

    /// Forgets a layer that nobody reads any more.
    pub(super) fn forget(&mut self, layer: usize) {
        self.values[layer] = Vec::new();
    }
}

/// φ on a block.
pub(super) fn activated(mut z: Matrix<f32>, activation: Activation) -> Matrix<f32> {
    activation.apply_slice(z.as_mut_slice());
    z
}

/// The operand of a term: the source's values of one sample behind its poolings. `room` is used where there are any.
pub(super) fn operand<'a>(x: &'a [f32], maps: &[FixedMap], room: &'a mut Vec<f32>) -> &'a [f32] {
    if maps.is_empty() {
        return x;
    }
    *room = x.to_vec();
    for map in maps {
        // Shapes were checked with the model.
        let mut out = vec![0.0; map.output().map_or(0, |shape| shape.size())];
        map.apply(room, &mut out);
        *room = out;
    }
    room
}

/// One target's pre-activation, ready to run: the terms of a model's rows with dense weights. At the sparsities that
/// keep accuracy a dense product of small matrices is as fast as a sparse one.
pub(super) struct Sum {
    units: usize,
    positions: usize,
    /// One per row.
    bias: Vec<f32>,
    terms: Vec<Term>,
}

struct Term {
    source: Source,
    maps: Vec<FixedMap>,
    weights: Weights,
}

enum Weights {
    Taps(Convolution, Matrix<f32>),
    /// (unit of the target, unit of the source, weight).
    Entries(Vec<(u32, u32, f32)>),
    /// A factor per channel, or none for 1.
    Residual(Vec<f32>),
}

impl Sum {
    /// The rows of a model that add up to `target`.
    pub(super) fn of(model: &ImplicitModel, target: Target) -> Self {
        let layout = model.layout();
        let (units, rows, bias, from_states, from_inputs) = match target {
            Target::Layer(k) => {
                let bias = &model.state_bias()[layout.row_range(k)];
                (layout.range(k), layout.layers()[k].rows(), bias, model.a(), model.b())
            }
            Target::Output => {
                let q = model.shape().outputs;
                (0..q, q, model.output_bias(), model.c(), model.d())
            }
        };
        let mut terms: Vec<Term> = model
            .taps()
            .iter()
            .filter(|block| block.target == target)
            .map(|block| {
                let geometry = Convolution { input: block.input, output: block.output, window: block.window };
                let weights = match &block.weights {
                    TapWeights::Taps(taps) => Weights::Taps(geometry, taps.to_dense()),
                    TapWeights::Identity => Weights::Residual(Vec::new()),
                    TapWeights::Diagonal(factors) => Weights::Residual(factors.clone()),
                };
                Term { source: block.source, maps: block.maps.clone(), weights }
            })
            .collect();
        let layers = layout.layers().len();
        let mut entries: Vec<Vec<(u32, u32, f32)>> = vec![Vec::new(); layers + 1];
        for (i, unit) in units.clone().enumerate() {
            for (j, w) in from_states.row(unit) {
                if let Some(layer) = layout.layer_of(j) {
                    entries[layer].push((i as u32, (j - layout.range(layer).start) as u32, w));
                }
            }
            entries[layers].extend(from_inputs.row(unit).map(|(j, w)| (i as u32, j as u32, w)));
        }
        for (k, entries) in entries.into_iter().enumerate().filter(|(_, e)| !e.is_empty()) {
            let source = if k < layers { Source::Layer(k) } else { Source::Input };
            terms.push(Term { source, maps: Vec::new(), weights: Weights::Entries(entries) });
        }
        Self { units: units.len(), positions: units.len() / rows.max(1), bias: bias.to_vec(), terms }
    }

    /// Pre-activations of `count` samples.
    fn run<'a>(&self, count: usize, values: impl Fn(Source) -> &'a Matrix<f32>) -> Matrix<f32> {
        let mut out = Matrix::zeros(count, self.units);
        for sample in 0..count {
            let row = out.row_mut(sample);
            row.chunks_exact_mut(self.positions.max(1)).zip(&self.bias).for_each(|(row, &b)| row.fill(b));
        }
        let mut room = Vec::new();
        for term in &self.terms {
            let x = values(term.source);
            let mut scratch = match &term.weights {
                Weights::Taps(convolution, _) => convolution.scratch(),
                _ => Vec::new(),
            };
            for sample in 0..count {
                let x = operand(x.row(sample), &term.maps, &mut room);
                let out = out.row_mut(sample);
                match &term.weights {
                    Weights::Taps(convolution, weights) => convolution.add(weights, x, &mut scratch, out),
                    Weights::Entries(entries) => {
                        for &(i, j, w) in entries {
                            out[i as usize] += w * x[j as usize];
                        }
                    }
                    Weights::Residual(factors) if factors.is_empty() => {
                        out.iter_mut().zip(x).for_each(|(out, x)| *out += x);
                    }
                    Weights::Residual(factors) => {
                        let channels = out.chunks_exact_mut(self.positions).zip(x.chunks_exact(self.positions));
                        for ((out, x), factor) in channels.zip(factors) {
                            out.iter_mut().zip(x).for_each(|(out, x)| *out += factor * x);
                        }
                    }
                }
            }
        }
        out
    }
}
