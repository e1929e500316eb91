//! Files that we write appear whole or not at all; files that we read are not trusted until they are checked.

mod output;
pub mod tensors;

pub use output::OutputFile;

use std::fs::File;
use std::io::Read;
use std::path::Path;

use crate::{Error, Result};

/// Writes bytes from memory to a file, whole or not at all.
pub fn write_bytes_atomically(path: impl AsRef<Path>, bytes: &[u8]) -> Result<()> {
    let mut file = OutputFile::create(path)?;
    file.write(bytes)?;
    file.finish()
}

/// The bytes of a regular file of at most `limit` bytes.
pub fn read_capped(path: impl AsRef<Path>, limit: u64) -> Result<Vec<u8>> {
    let path = path.as_ref();
    let file = File::open(path).map_err(|e| Error::io(path, e))?;
    let about = file.metadata().map_err(|e| Error::io(path, e))?;
    if !about.is_file() {
        return Err(Error::file(path, "not a regular file; give the path of a file"));
    }
    if about.len() > limit {
        return Err(Error::file(path, format!("{} bytes, more than the {limit} this reader accepts", about.len())));
    }
    let mut bytes = Vec::with_capacity(usize::try_from(about.len()).unwrap_or(0));
    // The file may grow while it is read, so the limit is checked again.
    file.take(limit + 1).read_to_end(&mut bytes).map_err(|e| Error::io(path, e))?;
    if bytes.len() as u64 > limit {
        return Err(Error::file(path, format!("grew past the {limit} bytes this reader accepts while it was read")));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_and_missing_parents_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        assert!(write_bytes_atomically(directory.path().join("no/such/place"), b"x").is_err());
        assert!(write_bytes_atomically("/", b"x").is_err());
        assert!(read_capped(directory.path(), 10).is_err());
        let path = directory.path().join("m");
        write_bytes_atomically(&path, b"0123456789a").unwrap();
        assert!(read_capped(&path, 10).is_err());
        assert_eq!(read_capped(&path, 11).unwrap().len(), 11);
    }
}
