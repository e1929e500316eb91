//! How files are written: to a temporary file in the same directory, which is renamed at the end.

use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::{Error, Result};

/// A file that is being written. If it is dropped before [`OutputFile::finish`], nothing is left behind.
#[derive(Debug)]
pub struct OutputFile {
    file: File,
    temporary: PathBuf,
    target: PathBuf,
    finished: bool,
}

impl OutputFile {
    /// Starts a file that will appear at `target`, replacing what is there.
    pub fn create(target: impl AsRef<Path>) -> Result<Self> {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let target = target.as_ref();
        let ordinary = std::fs::metadata(target).map_or(true, |m| m.is_file());
        let name = target
            .file_name()
            .filter(|_| ordinary)
            .ok_or_else(|| Error::file(target, "expected the name of a file to write, got a directory or a device"))?;
        loop {
            // Process number and count make the name unique among simultaneous writers and among files that a killed
            // process left.
            let count = COUNT.fetch_add(1, Ordering::Relaxed);
            let temporary = format!(".{}.{}.{count}.part", name.to_string_lossy(), std::process::id());
            let temporary = target.with_file_name(temporary);
            match OpenOptions::new().write(true).create_new(true).open(&temporary) {
                Ok(file) => return Ok(Self { file, temporary, target: target.to_path_buf(), finished: false }),
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
                Err(e) => return Err(Error::io(target, named(e, target))),
            }
        }
    }

    /// Writes bytes after those of the last write.
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.write_all(bytes).map_err(|e| Error::io(&self.target, e))
    }

    /// Writes at a position.
    pub(crate) fn write_at(&mut self, offset: u64, bytes: &[u8]) -> Result<()> {
        self.file.seek(SeekFrom::Start(offset)).map_err(|e| Error::io(&self.target, e))?;
        self.write(bytes)
    }

    /// Puts the file on the disk and renames it to its final name.
    pub fn finish(mut self) -> Result<()> {
        self.file.sync_all().map_err(|e| Error::io(&self.target, e))?;
        std::fs::rename(&self.temporary, &self.target).map_err(|e| Error::io(&self.target, e))?;
        self.finished = true;
        // The rename itself is only durable when the directory is on the disk; not every file system can do this.
        let directory = self.target.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        if let Ok(directory) = File::open(directory) {
            let _ = directory.sync_all();
        }
        Ok(())
    }
}

/// The system says the same of a missing file and of a missing folder; a file to write is never the former.
fn named(error: io::Error, target: &Path) -> io::Error {
    match target.parent() {
        Some(folder) if error.kind() == io::ErrorKind::NotFound && !folder.exists() => {
            io::Error::new(error.kind(), format!("the folder {} does not exist; make it first", folder.display()))
        }
        _ => error,
    }
}

impl Drop for OutputFile {
    fn drop(&mut self) {
        if !self.finished {
            // If this fails too, nothing more can be done.
            let _ = std::fs::remove_file(&self.temporary);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_or_not_at_all() {
        let directory = tempfile::tempdir().unwrap();
        let target = directory.path().join("out.bin");
        let mut abandoned = OutputFile::create(&target).unwrap();
        abandoned.write(b"half").unwrap();
        drop(abandoned);
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);

        std::fs::write(&target, b"old").unwrap();
        let mut output = OutputFile::create(&target).unwrap();
        output.write(b"....").unwrap();
        output.write_at(1, b"ab").unwrap();
        assert_eq!(std::fs::read(&target).unwrap(), b"old");
        output.finish().unwrap();
        assert_eq!(std::fs::read(&target).unwrap(), b".ab.");
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);

        let panicked = std::panic::catch_unwind(|| {
            let mut output = OutputFile::create(&target).unwrap();
            output.write(b"half of the new").unwrap();
            panic!("in the writer")
        });
        assert!(panicked.is_err());
        assert_eq!(std::fs::read(&target).unwrap(), b".ab.");
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_place_that_cannot_be_written_is_an_error() {
        let directory = tempfile::tempdir().unwrap();
        assert!(matches!(OutputFile::create(directory.path()), Err(Error::File { .. })));
        let nowhere = directory.path().join("no/such/place");
        let said = OutputFile::create(&nowhere).unwrap_err().to_string();
        assert!(said.contains("no/such/place") && said.contains("no/such does not exist"), "{said}");
    }
}
