//! Hashes of file contents, for manifests and checkpoints.

use std::io::Read;
use std::path::Path;

use sha2::{Digest, Sha256};

use super::array::split_key;
use super::bytes::Bytes;
use super::pictures::picture_files;
use crate::{Error, Result};

/// SHA-256 of some bytes, one part after the other, as 64 hexadecimal digits.
pub(crate) fn digest(parts: &[&[u8]]) -> String {
    let mut hash = Sha256::new();
    parts.iter().for_each(|part| hash.update(part));
    hexadecimal(hash)
}

fn hexadecimal(hash: Sha256) -> String {
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// SHA-256 of a file's bytes as 64 hexadecimal digits, the same that `sha256sum` prints. Reads the file once; a key
/// after the name (`file.npz:key`) makes no difference. For a folder of pictures it is the hash of the hashes of its
/// files.
pub fn content_hash(path: impl AsRef<Path>) -> Result<String> {
    if path.as_ref().is_dir() {
        let mut hash = Sha256::new();
        for file in picture_files(path)? {
            hash.update(content_hash(file)?.as_bytes());
        }
        return Ok(hexadecimal(hash));
    }
    let (path, _) = split_key(path.as_ref());
    let path = path.as_path();
    let bytes = Bytes::open(path)?;
    let mut reader = bytes.reader();
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 16];
    loop {
        let count = reader.read(&mut buffer).map_err(|e| Error::io(path, e))?;
        if count == 0 {
            break;
        }
        hash.update(&buffer[..count]);
    }
    Ok(hexadecimal(hash))
}
