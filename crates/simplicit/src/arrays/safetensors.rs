//! The header of a safetensors file; its tensors stay where they are.

use safetensors::tensor::{Dtype, Metadata};

use super::bytes::Bytes;
use super::element::Element;
use crate::{Error, Result};

/// A header holds names, shapes and our metadata; the layout of a thousand layers takes about 100 kB.
const HEADER_LIMIT: u64 = 1 << 24;

/// The header (whose offsets the crate has checked against shapes and each other) and the bytes after it.
pub(super) fn parse(bytes: &Bytes) -> Result<(Metadata, Bytes)> {
    let mut len = [0; 8];
    bytes.read_at(0, &mut len)?;
    let len = u64::from_le_bytes(len);
    if len > HEADER_LIMIT {
        return Err(Error::file(
            bytes.path(),
            format!("a safetensors header of {len} bytes, expected at most {HEADER_LIMIT}; is it a safetensors file?"),
        ));
    }
    let header = bytes.read_vec(8, len)?;
    let metadata: Metadata = serde_json::from_slice(&header)
        .map_err(|e| Error::file(bytes.path(), format!("its safetensors header is not valid ({e})")))?;
    let expected = (metadata.data_len() as u64).checked_add(8 + len);
    bytes.require_len(expected.unwrap_or(u64::MAX))?;
    let data = bytes.slice(8 + len, bytes.len() - 8 - len)?;
    Ok((metadata, data))
}

/// Our name for the type, if it is a type that we read.
pub(super) fn element(dtype: Dtype) -> Option<Element> {
    Some(match dtype {
        Dtype::U8 => Element::U8,
        Dtype::I8 => Element::I8,
        Dtype::U16 => Element::U16,
        Dtype::I16 => Element::I16,
        Dtype::U32 => Element::U32,
        Dtype::I32 => Element::I32,
        Dtype::U64 => Element::U64,
        Dtype::I64 => Element::I64,
        Dtype::F16 => Element::F16,
        Dtype::BF16 => Element::Bf16,
        Dtype::F32 => Element::F32,
        Dtype::F64 => Element::F64,
        _ => return None,
    })
}
