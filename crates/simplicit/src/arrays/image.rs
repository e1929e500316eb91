//! Common image files: IDX (MNIST and similar) and the CIFAR binaries.

use std::path::Path;

use super::bytes::Bytes;
use super::element::Element;
use crate::{Error, Result};

const AXES_LIMIT: usize = 8;
/// One CIFAR image: three channels of 32 × 32 bytes.
const CIFAR_IMAGE: u64 = 3072;

/// Element type, shape and the bytes after the header of an IDX file; `None` if it does not begin like one.
pub(super) fn parse_idx(bytes: &Bytes) -> Result<Option<(Element, Vec<usize>, u64)>> {
    let head = bytes.head(4 + 4 * AXES_LIMIT as u64)?;
    let [0, 0, code, axes, rest @ ..] = head.as_slice() else { return Ok(None) };
    let element = match code {
        0x08 => Element::U8,
        0x09 => Element::I8,
        0x0b => Element::I16,
        0x0c => Element::I32,
        0x0d => Element::F32,
        0x0e => Element::F64,
        _ => return Ok(None),
    };
    let axes = usize::from(*axes);
    if axes == 0 || axes > AXES_LIMIT {
        return Ok(None);
    }
    if rest.len() < 4 * axes {
        return Err(bytes.truncated(4 + 4 * axes as u64));
    }
    let shape = rest[..4 * axes].as_chunks().0.iter().map(|b| u32::from_be_bytes(*b) as usize).collect();
    Ok(Some((element, shape, 4 + 4 * axes as u64)))
}

/// Label bytes before each image of a CIFAR binary: 1 in CIFAR-10 (record of 3073 bytes), 2 in CIFAR-100 (3074:
/// coarse, then fine).
pub(super) fn cifar_labels(path: &Path, len: u64) -> Result<u64> {
    let divides = |labels: u64| len > 0 && len.is_multiple_of(labels + CIFAR_IMAGE);
    match (divides(1), divides(2)) {
        (true, false) => Ok(1),
        (false, true) => Ok(2),
        (true, true) => cifar_by_name(path).ok_or_else(|| {
            Error::file(
                path,
                format!(
                    "{len} bytes are whole records of CIFAR-10 and of CIFAR-100; put cifar10 or cifar100 into the name"
                ),
            )
        }),
        (false, false) => Err(Error::file(
            path,
            format!("expected CIFAR records of 3073 (CIFAR-10) or 3074 bytes (CIFAR-100), got {len} bytes in all"),
        )),
    }
}

/// The number of label bytes by the name of the file or its folder, which are those that the two archives unpack to.
fn cifar_by_name(path: &Path) -> Option<u64> {
    path.iter().rev().take(2).find_map(|part| {
        let part = part.to_string_lossy().to_lowercase();
        if part.contains("cifar100") || part.contains("cifar-100") {
            Some(2)
        } else if part.contains("cifar10") || part.contains("cifar-10") || part.contains("_batch") {
            Some(1)
        } else {
            None
        }
    })
}

/// Bytes of a record with this many label bytes.
pub(super) fn cifar_record(labels: u64) -> u64 {
    labels + CIFAR_IMAGE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_two_cifars_are_told_apart() {
        let both = 3073 * 3074;
        let kind = |path: &str, len| cifar_labels(Path::new(path), len);
        assert_eq!(kind("x.bin", 3073 * 10).unwrap(), 1);
        assert_eq!(kind("x.bin", 3074 * 10).unwrap(), 2);
        assert!(kind("x.bin", both).unwrap_err().to_string().contains("CIFAR-10 and of CIFAR-100"));
        assert_eq!(kind("cifar-100-binary/train.bin", both).unwrap(), 2);
        assert_eq!(kind("cifar-10-batches-bin/data_batch_1.bin", both).unwrap(), 1);
        assert!(kind("cifar10.bin", 3072).unwrap_err().to_string().contains("got 3072 bytes"));
        assert!(kind("cifar10.bin", 0).is_err());
    }
}
