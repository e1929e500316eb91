//! A file with one array or several.

use std::borrow::Cow;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

use safetensors::tensor::Metadata;

use super::array::Array;
use super::bytes::{Bytes, UNPACKED_LIMIT};
use super::{image, npy, safetensors as header, zip};
use crate::{Error, Result};

/// An opened file: its arrays by key (`.npz`, `.safetensors`) or its only one.
#[derive(Debug)]
pub struct ArrayFile {
    bytes: Bytes,
    content: Content,
}

#[derive(Debug)]
enum Content {
    One(Array),
    Npz(Vec<zip::Member>),
    Safetensors(Metadata, Bytes),
}

impl ArrayFile {
    /// Reads headers only, unless the file is gzipped.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        Self::parse(Bytes::open(path.as_ref())?)
    }

    /// A file already in memory, such as one embedded in a program; the format follows from its name, as from a path.
    pub fn from_bytes(name: &str, bytes: impl Into<Cow<'static, [u8]>>) -> Result<Self> {
        Self::parse(Bytes::memory(Path::new(name), bytes))
    }

    /// The format follows from the first bytes of the file if they are characteristic, otherwise from its name.
    fn parse(mut bytes: Bytes) -> Result<Self> {
        let mut name = bytes.path().to_path_buf();
        if bytes.head(2)? == [0x1f, 0x8b] {
            bytes = bytes.gunzip(UNPACKED_LIMIT)?;
            if has_extension(&name, "gz") {
                name = name.with_extension("");
            }
        }
        let head = bytes.head(6)?;
        let content = if head == npy::MAGIC {
            Content::One(Array::from_npy(&bytes)?)
        } else if head.starts_with(b"PK\x03\x04") || head.starts_with(b"PK\x05\x06") {
            let members = zip::members(&bytes)?;
            Content::Npz(members.into_iter().filter(|m| m.name.ends_with(".npy")).collect())
        } else if has_extension(&name, "safetensors") {
            let (metadata, data) = header::parse(&bytes)?;
            Content::Safetensors(metadata, data)
        } else {
            Content::One(Self::image(&bytes, &name)?)
        };
        Ok(Self { bytes, content })
    }

    /// IDX and CIFAR files do not begin with a characteristic number.
    fn image(bytes: &Bytes, name: &Path) -> Result<Array> {
        let text = name.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
        let cifar = text.ends_with(".bin");
        if let Some((element, shape, header)) = image::parse_idx(bytes)? {
            let array = Array::from_idx(bytes, element, shape, header);
            // A CIFAR file may begin like an IDX file, but it hardly has the size that its first bytes would then
            // announce.
            if array.is_ok() || !cifar {
                return array;
            }
        }
        if cifar {
            return Array::from_cifar(bytes);
        }
        Err(Error::file(
            bytes.path(),
            "expected .npy, .npz, .safetensors, IDX or CIFAR .bin (each also .gz), got something else by its first bytes and name",
        ))
    }

    /// The keys in the order of the file; none if it is a file of one array.
    pub fn keys(&self) -> Vec<String> {
        match &self.content {
            Content::One(_) => Vec::new(),
            Content::Npz(members) => members.iter().map(|m| key_of(m).to_string()).collect(),
            Content::Safetensors(metadata, _) => metadata.offset_keys(),
        }
    }

    /// A text of a safetensors file's metadata.
    pub fn metadata(&self, key: &str) -> Option<&str> {
        let Content::Safetensors(metadata, _) = &self.content else { return None };
        metadata.metadata().as_ref().and_then(|m: &HashMap<String, String>| m.get(key)).map(String::as_str)
    }

    /// The array of that name.
    pub fn array(&self, key: &str) -> Result<Array> {
        let name = PathBuf::from(format!("{}:{key}", self.bytes.path().display()));
        match &self.content {
            Content::One(_) => Err(Error::file(
                self.bytes.path(),
                format!("holds one array without a name; leave out the key {key:?}"),
            )),
            Content::Npz(members) => {
                let member = members.iter().find(|m| key_of(m) == key).ok_or_else(|| self.no_such_key(key))?;
                Array::from_npy(&member.open(&self.bytes)?.named(name))
            }
            Content::Safetensors(metadata, data) => {
                let info = metadata.info(key).ok_or_else(|| self.no_such_key(key))?;
                let element = header::element(info.dtype).ok_or_else(|| {
                    Error::unsupported(
                        format!("{}: number type {:?}", name.display(), info.dtype),
                        "expected real floating-point or integer numbers; convert the array",
                    )
                })?;
                let (start, end) = info.data_offsets;
                let data = data.slice(start as u64, (end - start) as u64)?.named(name);
                Array::plain(data, element, info.shape.clone())
            }
        }
    }

    /// The array, if there is exactly one.
    pub fn only_array(&self) -> Result<Array> {
        if let Content::One(array) = &self.content {
            return Ok(array.clone());
        }
        let keys = self.keys();
        match keys.as_slice() {
            [key] => self.array(key),
            _ => {
                let example = keys.first().map_or("KEY", String::as_str);
                let path = self.bytes.path();
                let problem = format!(
                    "expected exactly one array, got {}; name one, as in {}:{example}",
                    listed(&keys),
                    path.display()
                );
                Err(Error::file(path, problem))
            }
        }
    }

    /// Whether the format of a path can have keys, so that `path:key` makes sense.
    pub(super) fn name_may_have_keys(path: &Path) -> bool {
        let plain = path.with_extension("");
        let path = if has_extension(path, "gz") { &plain } else { path };
        has_extension(path, "npz") || has_extension(path, "safetensors")
    }

    fn no_such_key(&self, key: &str) -> Error {
        Error::file(self.bytes.path(), format!("expected an array {key:?}, got {}", listed(&self.keys())))
    }
}

fn key_of(member: &zip::Member) -> &str {
    member.name.strip_suffix(".npy").unwrap_or(&member.name)
}

fn has_extension(path: &Path, extension: &str) -> bool {
    path.extension().is_some_and(|e| e.eq_ignore_ascii_case(extension))
}

/// The keys as text, such as `none` or `2: U, V`; shortened, because a hostile file may have very many.
fn listed(keys: &[String]) -> String {
    const SHOWN: usize = 8;
    if keys.is_empty() {
        return "none".into();
    }
    let more = if keys.len() > SHOWN { ", …" } else { "" };
    format!("{}: {}{more}", keys.len(), keys[..keys.len().min(SHOWN)].join(", "))
}
