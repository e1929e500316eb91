//! A range of bytes in a file or in memory that several threads may read at once.

use std::borrow::Cow;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::{Error, Result};

/// The most bytes that a compressed file may unpack to, because such files are held in memory whole.
pub(super) const UNPACKED_LIMIT: u64 = 1 << 30;

/// Part of a file (never loaded) or of a buffer.
#[derive(Debug, Clone)]
pub(super) struct Bytes {
    /// The name in errors.
    path: PathBuf,
    source: Source,
    start: u64,
    len: u64,
}

#[derive(Debug, Clone)]
enum Source {
    File(Arc<SharedFile>),
    Memory(Arc<Cow<'static, [u8]>>),
}

impl Bytes {
    /// A whole file.
    pub(super) fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(|e| Error::io(path, e))?;
        let metadata = file.metadata().map_err(|e| Error::io(path, e))?;
        if !metadata.is_file() {
            return Err(Error::file(path, "expected a file, got a directory or a device; give the file itself"));
        }
        let source = Source::File(Arc::new(SharedFile::new(file)));
        Ok(Self { path: path.to_path_buf(), source, start: 0, len: metadata.len() })
    }

    /// A whole buffer; errors refer to it as `path`.
    pub(super) fn memory(path: &Path, bytes: impl Into<Cow<'static, [u8]>>) -> Self {
        let bytes = bytes.into();
        let len = bytes.len() as u64;
        Self { path: path.to_path_buf(), source: Source::Memory(Arc::new(bytes)), start: 0, len }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn len(&self) -> u64 {
        self.len
    }

    /// Another name for errors, such as `file.npz:key`.
    pub(super) fn named(mut self, path: PathBuf) -> Self {
        self.path = path;
        self
    }

    /// `len` bytes from `start` on, or an error that names both sizes.
    pub(super) fn slice(&self, start: u64, len: u64) -> Result<Self> {
        match start.checked_add(len) {
            Some(end) if end <= self.len => Ok(Self { start: self.start + start, len, ..self.clone() }),
            end => Err(self.truncated(end.unwrap_or(u64::MAX))),
        }
    }

    /// The error of a file shorter than its header says.
    pub(super) fn truncated(&self, expected: u64) -> Error {
        let got = self.len;
        Error::file(
            &self.path,
            format!("expected at least {expected} bytes, got {got}; the file is cut short or its header is wrong"),
        )
    }

    /// An error unless there are exactly this many bytes.
    pub(super) fn require_len(&self, expected: u64) -> Result<()> {
        if self.len < expected {
            Err(self.truncated(expected))
        } else if self.len > expected {
            let got = self.len;
            let problem = format!("expected {expected} bytes, got {got}; something follows the array");
            Err(Error::file(&self.path, problem))
        } else {
            Ok(())
        }
    }

    /// Fills `out` with the bytes from `offset` on.
    pub(super) fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        let end = offset.checked_add(out.len() as u64).filter(|end| *end <= self.len);
        if end.is_none() {
            return Err(self.truncated(offset.saturating_add(out.len() as u64)));
        }
        let at = self.start + offset;
        match &self.source {
            Source::File(file) => file.read_exact_at(out, at).map_err(|e| Error::io(&self.path, e)),
            Source::Memory(bytes) => {
                out.copy_from_slice(&bytes[at as usize..at as usize + out.len()]);
                Ok(())
            }
        }
    }

    /// `len` bytes from `offset` on; an error before any allocation if there are fewer.
    pub(super) fn read_vec(&self, offset: u64, len: u64) -> Result<Vec<u8>> {
        let mut out = Vec::new();
        self.read_into(offset, len, &mut out)?;
        Ok(out)
    }

    /// The same into a buffer that can be used again.
    pub(super) fn read_into(&self, offset: u64, len: u64, out: &mut Vec<u8>) -> Result<()> {
        let part = self.slice(offset, len)?;
        let len = usize::try_from(len).map_err(|_| self.truncated(u64::MAX))?;
        out.clear();
        out.try_reserve_exact(len).map_err(|_| {
            Error::file(&self.path, format!("{len} bytes do not fit into memory; read fewer samples at a time"))
        })?;
        out.resize(len, 0);
        part.read_at(0, out)
    }

    /// The first `len` bytes, or all if there are fewer.
    pub(super) fn head(&self, len: u64) -> Result<Vec<u8>> {
        self.read_vec(0, len.min(self.len))
    }

    /// Unpacks a gzip file into memory.
    pub(super) fn gunzip(&self, limit: u64) -> Result<Self> {
        let unpacked = self.unpack(flate2::bufread::MultiGzDecoder::new(self.reader()), limit)?;
        Ok(Self::memory(&self.path, unpacked))
    }

    /// Unpacks a deflated zip member of a known size and checksum into memory.
    pub(super) fn inflate(&self, len: u64, crc: u32, limit: u64) -> Result<Self> {
        if len > limit {
            return Err(self.too_large(limit));
        }
        let unpacked = self.unpack(flate2::bufread::DeflateDecoder::new(self.reader()), len)?;
        if unpacked.len() as u64 != len {
            let got = unpacked.len();
            return Err(Error::file(
                &self.path,
                format!("expected {len} unpacked bytes, got {got}; the file is damaged"),
            ));
        }
        let mut check = flate2::Crc::new();
        check.update(&unpacked);
        if check.sum() != crc {
            return Err(Error::file(&self.path, "checksum mismatch; the file is damaged, copy or download it again"));
        }
        Ok(Self::memory(&self.path, unpacked))
    }

    fn unpack(&self, decoder: impl Read, limit: u64) -> Result<Vec<u8>> {
        let mut out = Vec::new();
        // The buffer grows with the bytes that are really unpacked, never to a size that a header claims.
        decoder.take(limit + 1).read_to_end(&mut out).map_err(|e| {
            Error::file(&self.path, format!("cannot be unpacked ({e}); the file is damaged or cut short"))
        })?;
        if out.len() as u64 > limit {
            return Err(self.too_large(limit));
        }
        Ok(out)
    }

    fn too_large(&self, limit: u64) -> Error {
        Error::file(
            &self.path,
            format!("unpacks to more than {limit} bytes; compressed files are held in memory, so unpack it first"),
        )
    }

    /// A buffered reader from the first byte to the last.
    pub(super) fn reader(&self) -> std::io::BufReader<Sequential<'_>> {
        std::io::BufReader::with_capacity(1 << 16, Sequential { bytes: self, position: 0 })
    }
}

/// Reads [`Bytes`] from start to end.
pub(super) struct Sequential<'a> {
    bytes: &'a Bytes,
    position: u64,
}

impl Read for Sequential<'_> {
    fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
        let count = (self.bytes.len - self.position).min(out.len() as u64) as usize;
        self.bytes.read_at(self.position, &mut out[..count]).map_err(|e| match e {
            Error::Io { source, .. } => source,
            other => std::io::Error::other(other),
        })?;
        self.position += count as u64;
        Ok(count)
    }
}

/// A file that is read at positions, without a shared cursor.
#[derive(Debug)]
struct SharedFile {
    #[cfg(unix)]
    file: File,
    #[cfg(not(unix))]
    file: std::sync::Mutex<File>,
}

#[cfg(unix)]
impl SharedFile {
    fn new(file: File) -> Self {
        Self { file }
    }

    fn read_exact_at(&self, out: &mut [u8], at: u64) -> std::io::Result<()> {
        std::os::unix::fs::FileExt::read_exact_at(&self.file, out, at)
    }
}

#[cfg(not(unix))]
impl SharedFile {
    fn new(file: File) -> Self {
        Self { file: std::sync::Mutex::new(file) }
    }

    fn read_exact_at(&self, out: &mut [u8], at: u64) -> std::io::Result<()> {
        use std::io::{Seek, SeekFrom};
        let mut file = self.file.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        file.seek(SeekFrom::Start(at))?;
        file.read_exact(out)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn a_bomb_stops_at_the_limit() {
        let mut gz = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
        gz.write_all(&vec![0; 1 << 20]).unwrap();
        let gz = gz.finish().unwrap();
        assert!(gz.len() < 2000);
        let bomb = Bytes::memory(Path::new("bomb.gz"), gz);
        let message = bomb.gunzip(1000).unwrap_err().to_string();
        assert!(message.contains("unpacks to more than 1000 bytes"), "{message}");
        assert_eq!(bomb.gunzip(1 << 20).unwrap().len(), 1 << 20);
    }

    #[test]
    fn a_member_must_have_its_declared_size_and_checksum() {
        let content = vec![7u8; 5000];
        let mut deflate = flate2::write::DeflateEncoder::new(Vec::new(), flate2::Compression::best());
        deflate.write_all(&content).unwrap();
        let member = Bytes::memory(Path::new("a.npz:U"), deflate.finish().unwrap());
        let mut crc = flate2::Crc::new();
        crc.update(&content);
        assert_eq!(member.inflate(5000, crc.sum(), 1 << 20).unwrap().len(), 5000);
        // The header declares fewer bytes than there are: unpacking stops at the declared size.
        assert!(member.inflate(10, crc.sum(), 1 << 20).is_err());
        assert!(member.inflate(6000, crc.sum(), 1 << 20).unwrap_err().to_string().contains("expected 6000"));
        assert!(member.inflate(5000, crc.sum() ^ 1, 1 << 20).unwrap_err().to_string().contains("checksum"));
        assert!(member.inflate(5000, crc.sum(), 4999).unwrap_err().to_string().contains("unpacks to more than 4999"));
    }

    #[test]
    fn nothing_outside_the_range_is_read() {
        let bytes = Bytes::memory(Path::new("x"), vec![0, 1, 2, 3, 4, 5]);
        let part = bytes.slice(2, 3).unwrap();
        assert_eq!(part.read_vec(1, 2).unwrap(), [3, 4]);
        assert!(part.read_vec(1, 3).is_err());
        assert!(part.read_vec(u64::MAX, 3).is_err());
        assert!(bytes.slice(u64::MAX, 1).is_err());
        assert!(bytes.slice(0, 7).unwrap_err().to_string().contains("expected at least 7 bytes, got 6"));
    }
}
