//! States of a layered model with feature maps, for all samples at once and one layer at a time.
//!
//! A cascade that ran every sample through the whole model for every layer would cost the square of the depth. Here
//! each layer is computed only once, from the layers that it reads. These are kept (in f32, in blocks of samples, in
//! memory or in a file) until their last reader is done.

use std::ops::Range;
use std::sync::Arc;

use crate::Result;
use crate::equilibrium::{DeviceLayer, LayerSum, Sum};
use crate::layout::Activation;
use crate::layout::Layout;
use crate::linalg::Matrix;
use crate::memory::{Block, MemoryBudget, Pile};
use crate::network::{FixedMap, Source};
use crate::parallel::{self, Cancel, Threads};
use crate::states::StateSource;
use crate::train::evidence::device_walk::{self, Chunks, Gpu};

/// Samples in a block; fixed, so that sums do not depend on threads.
pub(in crate::train) const SAMPLES: usize = 32;

/// The values of some layers for all samples; inputs are read from their source.
pub(in crate::train) struct Walk<'a> {
    source: &'a dyn StateSource,
    values: Layers,
}

/// Values by layer, last first; `None` before a layer is computed and after its last reader.
pub(in crate::train) enum Layers {
    Host(Vec<Option<Pile>>),
    Device(Gpu, Vec<Option<Chunks>>),
}

impl<'a> Walk<'a> {
    /// A walk at the inputs, without values.
    pub(in crate::train) fn new(source: &'a dyn StateSource, layers: usize, gpu: Option<&Gpu>) -> Self {
        let values = match gpu {
            None => Layers::Host((0..layers).map(|_| None).collect()),
            Some(gpu) => Layers::Device(gpu.clone(), (0..layers).map(|_| None).collect()),
        };
        Self { source, values }
    }

    /// A walk that continues with these values.
    pub(in crate::train) fn at(source: &'a dyn StateSource, values: Layers) -> Self {
        Self { source, values }
    }

    /// The values of all layers that are kept, without the samples.
    pub(in crate::train) fn into_values(self) -> Layers {
        self.values
    }

    /// The samples.
    pub(in crate::train) fn source(&self) -> &'a dyn StateSource {
        self.source
    }

    /// The GPU that it runs on, with the layers there.
    pub(in crate::train) fn on_gpu(&self) -> Option<(&Gpu, &[Option<Chunks>])> {
        match &self.values {
            Layers::Host(_) => None,
            Layers::Device(gpu, layers) => Some((gpu, layers)),
        }
    }

    /// Continues on the CPU.
    pub(in crate::train) fn continue_on_host(&mut self, memory_budget: &Arc<MemoryBudget>) -> Result<()> {
        if let Layers::Device(_, layers) = &self.values {
            let piles =
                layers.iter().map(|layer| layer.as_ref().map(|l| l.to_pile(SAMPLES, memory_budget)).transpose());
            self.values = Layers::Host(piles.collect::<Result<_>>()?);
        }
        Ok(())
    }

    /// Number of samples.
    pub(in crate::train) fn samples(&self) -> usize {
        self.source.samples()
    }

    /// Number of blocks.
    fn blocks(&self) -> usize {
        self.samples().div_ceil(SAMPLES)
    }

    /// The values of a block of samples, one a row.
    pub(in crate::train) fn block(&self, source: Source, block: usize) -> Result<Block<'_>> {
        self.part(source, block * SAMPLES..((block + 1) * SAMPLES).min(self.samples()))
    }

    /// The values of some samples of one block.
    fn part(&self, source: Source, samples: Range<usize>) -> Result<Block<'_>> {
        match source {
            Source::Input => Ok(self.source.inputs(samples)?.into()),
            Source::Layer(k) => {
                let pile = match &self.values {
                    Layers::Host(layers) => layers[k].as_ref(),
                    Layers::Device(gpu, layers) => {
                        return Ok(device_walk::to_host(gpu, layers, k, samples)?.into());
                    }
                };
                let missing =
                    || crate::Error::shape("states of a layer", "those of a layer before", format!("layer {k}"));
                let first = samples.start / SAMPLES * SAMPLES;
                pile.ok_or_else(missing)?.rows(first / SAMPLES, samples.start - first..samples.end - first)
            }
        }
    }

    /// A reader of these samples, one after the other.
    pub(in crate::train) fn reader(&self, samples: Range<usize>) -> Reader<'_> {
        Reader { walk: self, samples, found: Vec::new() }
    }

    /// Pre-activations of all samples, a block at a time: `work` receives them with the number of the block, on any
    /// thread; `take` receives its results in order.
    pub(in crate::train) fn sums<T: Send>(
        &self,
        sum: &LayerSum,
        threads: Threads,
        cancel: &Cancel,
        work: impl Fn(usize, Matrix<f32>) -> T + Sync,
        mut take: impl FnMut(T) -> Result<()>,
    ) -> Result<()> {
        let sources = sum.sources();
        parallel::fold(
            threads,
            self.blocks(),
            |block| {
                cancel.check()?;
                let count = SAMPLES.min(self.samples() - block * SAMPLES);
                let values = sources.iter().map(|&s| self.block(s, block)).collect::<Result<Vec<_>>>()?;
                let of = |source: Source| {
                    let at = sources.iter().position(|s| *s == source);
                    at.map_or(&[][..], |at| values[at].as_slice())
                };
                Ok(work(block, sum.pre_activations(count, of)?))
            },
            |_, value| take(value),
        )
    }

    /// Runs all samples through a layer.
    pub(in crate::train) fn enter(
        &mut self,
        layout: &Layout,
        layer: usize,
        sum: Sum,
        memory_budget: &Arc<MemoryBudget>,
        threads: Threads,
        cancel: &Cancel,
    ) -> Result<()> {
        let activation = sum.activation;
        match &self.values {
            Layers::Host(_) => {
                let mut pile = Pile::new(memory_budget);
                let sum = LayerSum::of(layout, &sum);
                self.sums(&sum, threads, cancel, |_, z| activated(z, activation), |x| pile.push(x))?;
                self.put(layer, pile);
            }
            Layers::Device(gpu, layers) => {
                let mut chunks = Chunks::new(gpu);
                let session = gpu.cuda.session()?;
                let step = DeviceLayer::new(&session, sum, threads)?;
                for chunk in gpu.chunks(self.samples()).enumerate() {
                    cancel.check()?;
                    let x = device_walk::forward(&session, &step, self.source, layers, chunk)?;
                    step.activate(&session, &x)?;
                    chunks.push(&session, x)?;
                }
                drop(session);
                self.put_chunks(layer, chunks);
            }
        }
        Ok(())
    }

    /// Adds a layer that is kept on the host.
    pub(in crate::train) fn put(&mut self, layer: usize, values: Pile) {
        if let Layers::Host(layers) = &mut self.values {
            layers[layer] = Some(values);
        }
    }

    /// Adds a layer that is kept on the device.
    pub(in crate::train) fn put_chunks(&mut self, layer: usize, values: Chunks) {
        if let Layers::Device(_, layers) = &mut self.values {
            layers[layer] = Some(values);
        }
    }

    /// Drops the values of a layer after its last reader.
    pub(in crate::train) fn forget(&mut self, layer: usize) {
        match &mut self.values {
            Layers::Host(layers) => layers[layer] = None,
            Layers::Device(_, layers) => layers[layer] = None,
        }
    }
}

/// Reads samples in order, a block at a time, and from a block only the samples that are asked for.
pub(in crate::train) struct Reader<'a> {
    walk: &'a Walk<'a>,
    samples: Range<usize>,
    /// The last read values of every source, with the number of their first sample.
    found: Vec<(Source, usize, Block<'a>)>,
}

impl Reader<'_> {
    /// The values of one sample.
    pub(in crate::train) fn sample(&mut self, source: Source, sample: usize) -> Result<&[f32]> {
        let block = sample / SAMPLES * SAMPLES;
        let part = block.max(self.samples.start)..(block + SAMPLES).min(self.samples.end);
        let at = match self.found.iter().position(|f| f.0 == source) {
            Some(at) if self.found[at].1 == part.start => at,
            Some(at) => {
                self.found[at] = (source, part.start, self.walk.part(source, part.clone())?);
                at
            }
            None => {
                self.found.push((source, part.start, self.walk.part(source, part.clone())?));
                self.found.len() - 1
            }
        };
        Ok(self.found[at].2.row(sample - part.start))
    }
}

/// Applies φ to a block.
pub(in crate::train) fn activated(mut z: Matrix<f32>, activation: Activation) -> Matrix<f32> {
    activation.apply_slice(z.as_mut_slice());
    z
}

/// The operand of a term: the source's values of one sample after its poolings. `scratch` is memory for these, if there
/// are any.
pub(in crate::train) fn operand<'a>(x: &'a [f32], maps: &[FixedMap], scratch: &'a mut Vec<f32>) -> &'a [f32] {
    if maps.is_empty() {
        return x;
    }
    *scratch = x.to_vec();
    for map in maps {
        // The shapes were checked with the model.
        let mut out = vec![0.0; map.output().map_or(0, |shape| shape.size())];
        map.apply(scratch, &mut out);
        *scratch = out;
    }
    scratch
}
