//! Files we write appear whole or not at all; files we read are hostile until checked.

pub mod tensors;

use std::fs::{self, File, OpenOptions};
use std::io::{BufWriter, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::{Error, Result};

/// Writes `path` through `write` into a temporary file of the same directory, flushes it to the disc and renames it, so
/// that a reader sees the old file or the whole new one. On any failure the temporary file is removed and `path` is as
/// it was.
pub fn write_atomically(path: impl AsRef<Path>, write: impl FnOnce(&mut BufWriter<File>) -> Result<()>) -> Result<()> {
    let path = path.as_ref();
    let (temporary, file) = create_beside(path)?;
    let guard = RemoveOnDrop(Some(&temporary));
    let mut buffered = BufWriter::new(file);
    write(&mut buffered)?;
    let file = buffered.into_inner().map_err(|e| Error::io(path, e.into_error()))?;
    file.sync_all().map_err(|e| Error::io(path, e))?;
    drop(file);
    fs::rename(&temporary, path).map_err(|e| Error::io(path, e))?;
    guard.keep();
    // The rename itself lasts only once the directory is on the disc; not every file system can do this.
    if let Ok(directory) = File::open(directory_of(path)) {
        let _ = directory.sync_all();
    }
    Ok(())
}

/// [`write_atomically`] for bytes that are already there.
pub fn write_bytes_atomically(path: impl AsRef<Path>, bytes: &[u8]) -> Result<()> {
    let path = path.as_ref();
    write_atomically(path, |file| file.write_all(bytes).map_err(|e| Error::io(path, e)))
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
    // The file may grow while it is read.
    file.take(limit + 1).read_to_end(&mut bytes).map_err(|e| Error::io(path, e))?;
    if bytes.len() as u64 > limit {
        return Err(Error::file(path, format!("grew past the {limit} bytes this reader accepts while it was read")));
    }
    Ok(bytes)
}

fn directory_of(path: &Path) -> &Path {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn create_beside(path: &Path) -> Result<(PathBuf, File)> {
    static SERIAL: AtomicU64 = AtomicU64::new(0);
    let Some(name) = path.file_name() else {
        return Err(Error::file(path, "is not the name of a file; give a path that ends in a file name"));
    };
    for _ in 0..100 {
        let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
        let mut hidden = std::ffi::OsString::from(".");
        hidden.push(name);
        hidden.push(format!(".{}-{serial}.tmp", std::process::id()));
        let temporary = directory_of(path).join(hidden);
        match OpenOptions::new().write(true).create_new(true).open(&temporary) {
            Ok(file) => return Ok((temporary, file)),
            Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => {}
            Err(e) => return Err(Error::io(path, e)),
        }
    }
    Err(Error::file(path, "too many abandoned temporary files beside it; remove them"))
}

struct RemoveOnDrop<'a>(Option<&'a Path>);

impl RemoveOnDrop<'_> {
    fn keep(mut self) {
        self.0 = None;
    }
}

impl Drop for RemoveOnDrop<'_> {
    fn drop(&mut self) {
        if let Some(path) = self.0 {
            let _ = fs::remove_file(path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(directory: &Path) -> Vec<String> {
        let mut names: Vec<_> =
            fs::read_dir(directory).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_failed_write_leaves_the_old_file_and_nothing_else() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("m");
        write_bytes_atomically(&path, b"old").unwrap();
        let failed = write_atomically(&path, |f| {
            f.write_all(b"half of the new").map_err(|e| Error::io("m", e))?;
            Err(Error::Cancelled)
        });
        assert!(matches!(failed, Err(Error::Cancelled)));
        assert_eq!(fs::read(&path).unwrap(), b"old");
        assert_eq!(names(directory.path()), ["m"]);
        let panicked = std::panic::catch_unwind(|| write_atomically(&path, |_| panic!("in the writer")));
        assert!(panicked.is_err());
        assert_eq!(names(directory.path()), ["m"]);
        write_bytes_atomically(&path, b"new").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
    }

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
