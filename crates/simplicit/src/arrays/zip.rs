//! The part of zip that `.npz` uses: members stored or deflated, sizes of 64 bits.

use super::bytes::{Bytes, UNPACKED_LIMIT};
use crate::{Error, Result};

/// Limits for the directory of an archive; NumPy writes one short entry per array.
const DIRECTORY_LIMIT: u64 = 1 << 24;
const END_LEN: u64 = 22;
const COMMENT_LIMIT: u64 = 65535;

/// One file of the archive.
#[derive(Debug)]
pub(super) struct Member {
    pub(super) name: String,
    method: u16,
    crc: u32,
    packed: u64,
    unpacked: u64,
    header_at: u64,
}

/// The archive's directory.
pub(super) fn members(bytes: &Bytes) -> Result<Vec<Member>> {
    let bad = |problem: &str| Error::file(bytes.path(), format!("{problem}; the archive is damaged or cut short"));
    let tail_len = bytes.len().min(END_LEN + COMMENT_LIMIT);
    let tail_at = bytes.len() - tail_len;
    let tail = bytes.read_vec(tail_at, tail_len)?;
    let end = tail.windows(4).rposition(|w| w == b"PK\x05\x06").filter(|at| at + END_LEN as usize <= tail.len());
    let end = end.ok_or_else(|| bad("no zip directory at the end"))?;
    let mut field = Fields(&tail[end + 10..]);
    let mut count = u64::from(field.u16().unwrap_or(0));
    let mut len = u64::from(field.u32().unwrap_or(0));
    let mut at = u64::from(field.u32().unwrap_or(0));
    if count == 0xffff || len == 0xffff_ffff || at == 0xffff_ffff {
        // Zip64: a locator of 20 bytes before the end record points to the wide one.
        let locator_at = (tail_at + end as u64).checked_sub(20).ok_or_else(|| bad("no zip64 locator"))?;
        let locator = bytes.read_vec(locator_at, 20)?;
        let wide_at = Fields(&locator[8..]).u64().unwrap_or(0);
        let wide = bytes.read_vec(wide_at, 56)?;
        if !locator.starts_with(b"PK\x06\x07") || !wide.starts_with(b"PK\x06\x06") {
            return Err(bad("no zip64 directory"));
        }
        let mut field = Fields(&wide[32..]);
        (count, len, at) = (field.u64().unwrap_or(0), field.u64().unwrap_or(0), field.u64().unwrap_or(0));
    }
    if len > DIRECTORY_LIMIT {
        return Err(bad(&format!("a zip directory of {len} bytes, expected at most {DIRECTORY_LIMIT}")));
    }
    let directory = bytes.read_vec(at, len)?;
    let mut rest = Fields(&directory);
    let mut members = Vec::new();
    while members.len() as u64 != count {
        members.push(entry(&mut rest).ok_or_else(|| bad("a zip directory with a broken entry"))?);
    }
    Ok(members)
}

/// One entry of the central directory.
fn entry(rest: &mut Fields<'_>) -> Option<Member> {
    if rest.take(4)? != b"PK\x01\x02" {
        return None;
    }
    rest.take(4)?;
    let encrypted = rest.u16()? & 1 == 1;
    // An encrypted member is given a method number that no reader supports, so that opening it fails.
    let method = rest.u16().map(|m| if encrypted { u16::MAX } else { m })?;
    rest.take(4)?;
    let crc = rest.u32()?;
    let (packed, unpacked) = (rest.u32()?, rest.u32()?);
    let (name, extra, comment) = (rest.u16()?, rest.u16()?, rest.u16()?);
    rest.take(8)?;
    let header_at = rest.u32()?;
    let name = String::from_utf8_lossy(rest.take(usize::from(name))?).into_owned();
    let mut extra = Fields(rest.take(usize::from(extra))?);
    rest.take(usize::from(comment))?;
    let mut wide = Fields(&[]);
    while let (Some(id), Some(len)) = (extra.u16(), extra.u16()) {
        let field = extra.take(usize::from(len))?;
        if id == 1 {
            wide = Fields(field);
        }
    }
    // The zip64 field holds, in this order, only those values that do not fit.
    let mut widen = |value: u32| if value == u32::MAX { wide.u64() } else { Some(u64::from(value)) };
    let (unpacked, packed, header_at) = (widen(unpacked)?, widen(packed)?, widen(header_at)?);
    Some(Member { name, method, crc, packed, unpacked, header_at })
}

impl Member {
    /// The member's content: a view of the archive if it is stored, unpacked into memory if it is deflated.
    pub(super) fn open(&self, archive: &Bytes) -> Result<Bytes> {
        let header = archive.read_vec(self.header_at, 30)?;
        if !header.starts_with(b"PK\x03\x04") {
            return Err(Error::file(archive.path(), format!("no zip entry where {:?} should be", self.name)));
        }
        let mut field = Fields(&header[26..]);
        let skip = u64::from(field.u16().unwrap_or(0)) + u64::from(field.u16().unwrap_or(0));
        let packed = archive.slice(self.header_at.saturating_add(30 + skip), self.packed)?;
        match self.method {
            // The checksum of a stored member is not verified: the member is read in pieces, and perhaps never whole.
            0 if self.packed == self.unpacked => Ok(packed),
            8 => packed.inflate(self.unpacked, self.crc, UNPACKED_LIMIT),
            _ => Err(Error::unsupported(
                format!("{}, member {:?}: its zip compression", archive.path().display(), self.name),
                "write it with numpy.savez or numpy.savez_compressed",
            )),
        }
    }
}

/// Little-endian fields from the front of a buffer; `None` past its end.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (head, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(head)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.take(N)?.try_into().ok()
    }

    fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }
}
