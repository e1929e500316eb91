//! The walk's values on a GPU: layers of all samples in chunks, computed and gathered there. Layers for which the
//! device has no room are kept in the host's memory, and beyond that in a file.

use std::ops::Range;
use std::sync::Arc;

use crate::Result;
use crate::backend::cuda::{Cuda, Operand, Session, Values};
use crate::equilibrium::DeviceLayer;
use crate::linalg::Matrix;
use crate::memory::{MemoryBudget, Pile};
use crate::network::Source;
use crate::states::StateSource;

/// About how many floats the largest layer of a chunk has, and the most samples of a chunk.
const CHUNK_FLOATS: usize = 1 << 26;
const CHUNK_SAMPLES: usize = 512;

/// The GPU that a walk runs on, and the size of its chunks.
#[derive(Clone)]
pub(in crate::train) struct Gpu {
    pub(in crate::train) cuda: &'static Cuda,
    /// Number of samples of a chunk: whole blocks of the host's.
    chunk: usize,
    /// Memory of the device that layers may take.
    device: Arc<MemoryBudget>,
    /// Memory of the host that layers may take beyond it.
    host: Arc<MemoryBudget>,
}

impl Gpu {
    /// For layers of up to `widest` values per sample; the host works in blocks of `block` samples. Half of the
    /// device's memory is for layers, the rest for the work on them.
    pub(in crate::train) fn new(
        cuda: &'static Cuda,
        widest: usize,
        block: usize,
        host: &Arc<MemoryBudget>,
    ) -> Result<Self> {
        let (free, _) = cuda.memory()?;
        let chunk = (CHUNK_FLOATS / widest.max(1)).clamp(1, CHUNK_SAMPLES).next_multiple_of(block);
        Ok(Self { cuda, chunk, device: MemoryBudget::new(free as u64 / 2, &std::env::temp_dir()), host: host.clone() })
    }

    /// The samples of every chunk.
    pub(in crate::train) fn chunks(&self, samples: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let chunk = self.chunk;
        (0..samples.div_ceil(chunk)).map(move |k| k * chunk..((k + 1) * chunk).min(samples))
    }
}

/// The values of a layer for all samples, chunk by chunk.
pub(in crate::train) struct Chunks {
    gpu: Gpu,
    parts: Vec<Part>,
    spilled: Pile,
    booked: u64,
}

enum Part {
    Here(Values),
    /// Samples in rows: their number in the pile, and positions per channel.
    Spilled(usize, usize),
}

impl Chunks {
    pub(in crate::train) fn new(gpu: &Gpu) -> Self {
        Self { gpu: gpu.clone(), parts: Vec::new(), spilled: Pile::new(&gpu.host), booked: 0 }
    }

    /// Adds the next chunk.
    pub(in crate::train) fn push(&mut self, session: &Session, values: Values) -> Result<()> {
        if self.gpu.device.take(values.bytes()) {
            self.booked += values.bytes();
            self.parts.push(Part::Here(values));
            return Ok(());
        }
        let spilled = self.parts.iter().filter(|p| matches!(p, Part::Spilled(..))).count();
        self.spilled.push(Matrix::from_vec(values.count, values.units(), session.to_rows(&values)?)?)?;
        self.parts.push(Part::Spilled(spilled, values.positions));
        Ok(())
    }

    /// A chunk, by its number.
    pub(in crate::train) fn get(&self, session: &Session, number: usize) -> Result<Operand<'_>> {
        match self.parts.get(number) {
            Some(Part::Here(values)) => Ok(Operand::There(values)),
            Some(Part::Spilled(at, positions)) => {
                let rows = self.spilled.get(*at)?;
                session.values_of_rows(rows.as_slice(), rows.rows(), *positions).map(Operand::Made)
            }
            None => Err(crate::Error::shape("chunk of a layer", format!("one of {}", self.parts.len()), number)),
        }
    }

    /// The same values as blocks of the host's, with this many rows each.
    pub(in crate::train) fn to_pile(&self, rows: usize, memory_budget: &Arc<MemoryBudget>) -> Result<Pile> {
        let mut pile = Pile::new(memory_budget);
        let session = self.gpu.cuda.session()?;
        for number in 0..self.parts.len() {
            let values = self.get(&session, number)?;
            let width = values.units();
            for block in session.to_rows(&values)?.chunks(rows.max(1) * width.max(1)) {
                pile.push(Matrix::from_vec(block.len() / width.max(1), width, block.to_vec())?)?;
            }
        }
        Ok(pile)
    }
}

impl Drop for Chunks {
    fn drop(&mut self) {
        self.gpu.device.give(self.booked);
    }
}

/// Inputs of some samples, one per row: read on this GPU if they are there, otherwise from the host.
pub(in crate::train) fn inputs_of(session: &Session, samples: &dyn StateSource, range: Range<usize>) -> Result<Values> {
    if let Some((there, first)) = samples.device_inputs()
        && let Some(values) = there.on(session, first + range.start..first + range.end)
    {
        return values;
    }
    let u = samples.inputs(range)?;
    session.values_of_rows(u.as_slice(), u.rows(), u.cols())
}

/// A chunk of a source of a layer.
pub(in crate::train) fn chunk_of<'a>(
    session: &Session,
    samples: &dyn StateSource,
    layers: &'a [Option<Chunks>],
    source: Source,
    (number, range): (usize, Range<usize>),
) -> Result<Operand<'a>> {
    match source {
        Source::Input => inputs_of(session, samples, range).map(Operand::Made),
        Source::Layer(k) => match &layers[k] {
            Some(chunks) => chunks.get(session, number),
            None => Err(not_there(k)),
        },
    }
}

/// The values of a layer for some samples of one chunk, one per row.
pub(in crate::train) fn to_host(
    gpu: &Gpu,
    layers: &[Option<Chunks>],
    layer: usize,
    samples: Range<usize>,
) -> Result<Matrix<f32>> {
    let (number, session) = (samples.start / gpu.chunk, gpu.cuda.session()?);
    let Some(chunks) = &layers[layer] else { return Err(not_there(layer)) };
    let values = chunks.get(&session, number)?;
    let first = number * gpu.chunk;
    let rows = session.some_rows(&values, samples.start - first..samples.end - first)?;
    Matrix::from_vec(samples.len(), values.units(), rows)
}

fn not_there(layer: usize) -> crate::Error {
    crate::Error::shape("states of a layer", "those of a layer before", format!("layer {layer}"))
}

/// Pre-activations of a chunk.
pub(in crate::train) fn forward(
    session: &Session,
    layer: &DeviceLayer,
    samples: &dyn StateSource,
    layers: &[Option<Chunks>],
    chunk: (usize, Range<usize>),
) -> Result<Values> {
    let count = chunk.1.len();
    let mut found = Vec::new();
    for source in layer.sources() {
        found.push((source, chunk_of(session, samples, layers, source, chunk.clone())?));
    }
    layer.forward(session, count, |source| match found.iter().find(|(known, _)| *known == source) {
        Some((_, values)) => Ok(&**values),
        None => Err(crate::Error::shape("source of a layer", "one that it reads", format!("{source:?}"))),
    })
}
