//! States of a layered model with feature maps, for all samples at once and one layer at a time.
//!
//! A cascade that ran every sample through the whole model for every layer would cost the square of the depth. Here each
//! layer is computed once from the layers it reads, which stay in memory (f32, in blocks of samples) until their last
//! reader is done.

use crate::Result;
use crate::equilibrium::LayerSum;
use crate::layout::Activation;
use crate::linalg::Matrix;
use crate::network::{FixedMap, Source};
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
        sum: &LayerSum,
        threads: Threads,
        cancel: &Cancel,
        use_block: impl Fn(usize, Matrix<f32>) -> T + Sync,
    ) -> Result<Vec<T>> {
        parallel::map(threads, self.samples.div_ceil(SAMPLES), |block| {
            cancel.check()?;
            let count = SAMPLES.min(self.samples - block * SAMPLES);
            let z = sum.pre_activations(count, |source| &self.values[self.index(source)][block])?;
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
