//! Writes states to a file, a block at a time.

use std::path::Path;

use serde_json::json;

use super::StateSource;
use crate::arrays::Preprocessing;
use crate::files::OutputFile;
use crate::linalg::Matrix;
use crate::parallel::{self, Cancel, Threads};
use crate::{Error, Result};

/// Samples that are computed and written together; memory holds a few such blocks, whatever the number of samples.
const BLOCK: usize = 256;

/// The content of a states file besides the arrays and the layout.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct StatesMetadata {
    /// Non-zero parameters of the baseline, with which sparsity is computed.
    pub baseline_nonzeros: Option<u64>,
    /// How U was made from raw inputs.
    pub preprocessing: Option<Preprocessing>,
}

/// Writes U, Z, X, Y as float32 to a safetensors file with the layout in its metadata. The file appears when it is
/// complete; its bytes do not depend on the number of threads.
pub fn write_states(
    path: impl AsRef<Path>,
    source: &dyn StateSource,
    metadata: &StatesMetadata,
    threads: Threads,
    cancel: &Cancel,
) -> Result<()> {
    let (samples, shape) = (source.samples(), source.shape());
    let arrays = [("U", shape.inputs), ("Z", shape.states), ("X", shape.states), ("Y", shape.outputs)];
    let (header, mut starts) = header(source, metadata, &arrays).ok_or_else(|| {
        Error::shape("states", "a size that fits into a file", format!("{samples} samples of {shape:?}"))
    })?;
    for start in &mut starts {
        *start += header.len() as u64;
    }
    let mut output = OutputFile::create(path)?;
    output.write(&header)?;
    let work = |block: usize| {
        cancel.check()?;
        let first = block * BLOCK;
        let block = source.block(first..(first + BLOCK).min(samples))?;
        Ok([to_bytes(&block.u), to_bytes(&block.z), to_bytes(&block.x), to_bytes(&block.y)])
    };
    parallel::fold(threads, samples.div_ceil(BLOCK), work, |block, parts: [Vec<u8>; 4]| {
        for ((part, start), (_, columns)) in parts.iter().zip(&starts).zip(&arrays) {
            output.write_at(start + (block * BLOCK * columns * 4) as u64, part)?;
        }
        Ok(())
    })?;
    output.finish()
}

/// The header with its length in front, and the place after it where each array starts; `None` if a size overflows.
fn header(
    source: &dyn StateSource,
    metadata: &StatesMetadata,
    arrays: &[(&str, usize); 4],
) -> Option<(Vec<u8>, [u64; 4])> {
    let samples = source.samples();
    let mut texts = serde_json::Map::new();
    texts.insert("layout".into(), source.layout().to_json().into());
    if let Some(count) = metadata.baseline_nonzeros {
        texts.insert("baseline_nonzeros".into(), count.to_string().into());
    }
    if let Some(preprocessing) = &metadata.preprocessing {
        texts.insert("preprocessing".into(), serde_json::to_string(preprocessing).ok()?.into());
    }
    let mut fields = serde_json::Map::new();
    fields.insert("__metadata__".into(), texts.into());
    let (mut at, mut starts) = (0u64, [0; 4]);
    for (start, (name, columns)) in starts.iter_mut().zip(arrays) {
        *start = at;
        let len = (samples as u64).checked_mul(*columns as u64)?.checked_mul(4)?;
        at = at.checked_add(len).filter(|end| *end < i64::MAX as u64)?;
        let field = json!({ "dtype": "F32", "shape": [samples, columns], "data_offsets": [*start, at] });
        fields.insert((*name).into(), field);
    }
    let mut text = serde_json::to_string(&fields).ok()?;
    // The header is padded with spaces, as the format allows, so that the numbers are aligned.
    text.extend(std::iter::repeat_n(' ', text.len().next_multiple_of(8) - text.len()));
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(text.as_bytes());
    Some((bytes, starts))
}

fn to_bytes(values: &Matrix) -> Vec<u8> {
    values.as_slice().iter().flat_map(|v| (*v as f32).to_le_bytes()).collect()
}
