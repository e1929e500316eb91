//! The safetensors container: the same tensors always give the same bytes, and nothing in a file that is read is
//! trusted.
//!
//! This is our own code and not the crate's, because the crate's metadata is a hash map, which is written in random
//! order, and its length check adds sizes from the header without checking for overflow.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// A header longer than this is refused (the format itself allows 100 MB; ours take a few kilobytes).
const MAX_HEADER: usize = 16 << 20;
const LENGTH_BYTES: usize = 8;

/// The element types we read and write, all little-endian.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Dtype {
    // Widest first: tensors are laid out in this order, so that every one is aligned.
    /// Double precision.
    F64,
    /// Signed, 8 bytes.
    I64,
    /// Single precision.
    F32,
    /// Signed, 4 bytes.
    I32,
    /// Unsigned, 4 bytes.
    U32,
    /// Signed, 2 bytes.
    I16,
    /// Unsigned, 2 bytes.
    U16,
    /// Unsigned, 1 byte.
    U8,
}

impl Dtype {
    /// Bytes per element.
    pub fn size(self) -> usize {
        match self {
            Dtype::F64 | Dtype::I64 => 8,
            Dtype::F32 | Dtype::I32 | Dtype::U32 => 4,
            Dtype::I16 | Dtype::U16 => 2,
            Dtype::U8 => 1,
        }
    }
}

/// One tensor: element type, shape, little-endian bytes in C order.
#[derive(Debug, Clone, PartialEq)]
pub struct Tensor<'a> {
    /// Element type.
    pub dtype: Dtype,
    /// Lengths of the axes.
    pub shape: Vec<usize>,
    /// The bytes: product of the shape × size of an element.
    pub bytes: std::borrow::Cow<'a, [u8]>,
}

impl Tensor<'static> {
    /// A vector of f32.
    pub fn f32(values: &[f32]) -> Self {
        Self::vector(Dtype::F32, values.len(), values.iter().flat_map(|v| v.to_le_bytes()).collect())
    }

    /// A vector of whole numbers in the narrowest of u16, i32, i64 that holds `largest`; SciPy and NumPy read all three.
    pub fn indices(values: impl ExactSizeIterator<Item = usize>, largest: usize) -> Self {
        let count = values.len();
        if largest <= usize::from(u16::MAX) {
            Self::vector(Dtype::U16, count, values.flat_map(|v| (v as u16).to_le_bytes()).collect())
        } else if largest <= i32::MAX as usize {
            Self::vector(Dtype::I32, count, values.flat_map(|v| (v as i32).to_le_bytes()).collect())
        } else {
            Self::vector(Dtype::I64, count, values.flat_map(|v| (v as i64).to_le_bytes()).collect())
        }
    }

    fn vector(dtype: Dtype, count: usize, bytes: Vec<u8>) -> Self {
        Self { dtype, shape: vec![count], bytes: bytes.into() }
    }
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    dtype: Dtype,
    shape: Vec<usize>,
    data_offsets: (usize, usize),
}

/// The bytes of a file with these tensors and this metadata: tensors widest type first, then by name; keys sorted.
pub fn encode(metadata: &BTreeMap<String, String>, tensors: &BTreeMap<String, Tensor<'_>>) -> Vec<u8> {
    let mut order: Vec<_> = tensors.iter().collect();
    order.sort_by(|(a, x), (b, y)| x.dtype.cmp(&y.dtype).then(a.cmp(b)));
    let quoted = |text: &str| serde_json::Value::from(text).to_string();
    let pairs: Vec<String> = metadata.iter().map(|(k, v)| format!("{}:{}", quoted(k), quoted(v))).collect();
    let mut header = format!("{{\"__metadata__\":{{{}}}", pairs.join(","));
    let mut offset = 0;
    for (name, tensor) in &order {
        let shape: Vec<String> = tensor.shape.iter().map(usize::to_string).collect();
        let end = offset + tensor.bytes.len();
        header.push_str(&format!(
            ",{}:{{\"dtype\":\"{:?}\",\"shape\":[{}],\"data_offsets\":[{offset},{end}]}}",
            quoted(name),
            tensor.dtype,
            shape.join(",")
        ));
        offset = end;
    }
    header.push('}');
    while !header.len().is_multiple_of(LENGTH_BYTES) {
        header.push(' ');
    }
    let mut out = Vec::with_capacity(LENGTH_BYTES + header.len() + offset);
    out.extend_from_slice(&(header.len() as u64).to_le_bytes());
    out.extend_from_slice(header.as_bytes());
    for (_, tensor) in order {
        out.extend_from_slice(&tensor.bytes);
    }
    out
}

/// A checked view of a file's bytes: every tensor lies inside the file, none overlap, no byte is left over.
#[derive(Debug)]
pub struct Tensors<'a> {
    metadata: BTreeMap<String, String>,
    tensors: BTreeMap<String, Tensor<'a>>,
}

impl<'a> Tensors<'a> {
    /// Checks the header against the bytes; the reason in one line if they disagree. Allocates in proportion to the
    /// header, never to what the header claims.
    pub fn decode(bytes: &'a [u8]) -> Result<Self, String> {
        let (length, rest) = bytes
            .split_first_chunk::<LENGTH_BYTES>()
            .ok_or_else(|| format!("{} bytes, too short for the 8-byte header length of safetensors", bytes.len()))?;
        let length = usize::try_from(u64::from_le_bytes(*length)).unwrap_or(usize::MAX);
        if length > MAX_HEADER {
            return Err(format!("a header of {length} bytes, more than the {MAX_HEADER} accepted"));
        }
        let (header, data) = rest
            .split_at_checked(length)
            .ok_or_else(|| format!("the header should take {length} bytes and {} are there; truncated", rest.len()))?;
        let header: Header = serde_json::from_slice(header).map_err(|e| format!("unreadable header: {e}"))?;
        let mut spans = Vec::with_capacity(header.entries.len());
        let mut tensors = BTreeMap::new();
        for (name, entry) in header.entries {
            let (start, end) = entry.data_offsets;
            let claimed = entry.shape.iter().try_fold(entry.dtype.size(), |product, &n| product.checked_mul(n));
            if claimed.is_none() || claimed != end.checked_sub(start) {
                return Err(format!("tensor {name:?}: shape {:?} does not take bytes {start}..{end}", entry.shape));
            }
            let span = data.get(start..end).ok_or_else(|| {
                format!("tensor {name:?}: bytes {start}..{end} of {} bytes of data; truncated or damaged", data.len())
            })?;
            spans.push((start, end));
            tensors.insert(name, Tensor { dtype: entry.dtype, shape: entry.shape, bytes: span.into() });
        }
        spans.sort_unstable();
        let mut covered = 0;
        for (start, end) in spans {
            if start != covered {
                return Err(format!("tensors overlap or leave a hole at byte {covered} of the data"));
            }
            covered = end;
        }
        if covered != data.len() {
            return Err(format!("{} bytes of data belong to no tensor", data.len() - covered));
        }
        Ok(Self { metadata: header.metadata, tensors })
    }

    /// The metadata, all strings.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// Names in order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// A tensor by name.
    pub fn get(&self, name: &str) -> Option<&Tensor<'a>> {
        self.tensors.get(name)
    }

    /// A vector of f32 values, of exactly this length if one is given.
    pub(crate) fn f32_vector(&self, name: &str, length: Option<usize>) -> Result<Vec<f32>, String> {
        let tensor = self.vector(name, length)?;
        match tensor.dtype {
            Dtype::F32 => Ok(tensor.bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()),
            other => Err(format!("tensor {name:?}: expected F32, got {other:?}")),
        }
    }

    /// A vector of non-negative whole numbers, each at most `largest`.
    pub(crate) fn index_vector(&self, name: &str, length: Option<usize>, largest: usize) -> Result<Vec<usize>, String> {
        let tensor = self.vector(name, length)?;
        let bytes = &tensor.bytes;
        // A negative number becomes a very large one, which is above `largest` and refused.
        let values: Vec<u64> = match tensor.dtype {
            Dtype::U8 => bytes.iter().map(|&b| b.into()).collect(),
            Dtype::U16 => bytes.as_chunks().0.iter().map(|b| u16::from_le_bytes(*b).into()).collect(),
            Dtype::U32 => bytes.as_chunks().0.iter().map(|b| u32::from_le_bytes(*b).into()).collect(),
            Dtype::I32 => bytes.as_chunks().0.iter().map(|b| i64::from(i32::from_le_bytes(*b)) as u64).collect(),
            Dtype::I64 => bytes.as_chunks().0.iter().map(|b| u64::from_le_bytes(*b)).collect(),
            other => return Err(format!("tensor {name:?}: expected U8, U16, U32, I32 or I64, got {other:?}")),
        };
        match values.iter().position(|&v| v > largest as u64) {
            Some(k) => Err(format!("tensor {name:?}: {} at position {k}, expected 0 to {largest}", values[k] as i64)),
            None => Ok(values.into_iter().map(|v| v as usize).collect()),
        }
    }

    fn vector(&self, name: &str, length: Option<usize>) -> Result<&Tensor<'a>, String> {
        let tensor = self.tensors.get(name).ok_or_else(|| format!("tensor {name:?} is missing"))?;
        match (&tensor.shape[..], length) {
            ([_], None) => Ok(tensor),
            ([got], Some(expected)) if *got == expected => Ok(tensor),
            (shape, Some(expected)) => Err(format!("tensor {name:?}: expected shape [{expected}], got {shape:?}")),
            (shape, None) => Err(format!("tensor {name:?}: expected a vector, got shape {shape:?}")),
        }
    }
}

/// The header; a name given twice, which a hash map would silently merge, is refused.
struct Header {
    metadata: BTreeMap<String, String>,
    entries: BTreeMap<String, Entry>,
}

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl<'de> serde::de::Visitor<'de> for Visitor {
            type Value = Header;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a safetensors header")
            }
            fn visit_map<M: serde::de::MapAccess<'de>>(self, mut map: M) -> Result<Header, M::Error> {
                let twice = |name: &str| serde::de::Error::custom(format!("{name:?} is given twice"));
                let (mut metadata, mut entries) = (None, BTreeMap::new());
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        let Unique(pairs) = map.next_value()?;
                        if metadata.replace(pairs).is_some() {
                            return Err(twice(&name));
                        }
                    } else if entries.insert(name.clone(), map.next_value::<Entry>()?).is_some() {
                        return Err(twice(&name));
                    }
                }
                Ok(Header { metadata: metadata.unwrap_or_default(), entries })
            }
        }
        deserializer.deserialize_map(Visitor)
    }
}

/// String pairs with no key given twice.
struct Unique(BTreeMap<String, String>);

impl<'de> Deserialize<'de> for Unique {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl<'de> serde::de::Visitor<'de> for Visitor {
            type Value = Unique;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object of strings")
            }
            fn visit_map<M: serde::de::MapAccess<'de>>(self, mut map: M) -> Result<Unique, M::Error> {
                let mut pairs = BTreeMap::new();
                while let Some((key, value)) = map.next_entry::<String, String>()? {
                    if pairs.contains_key(&key) {
                        return Err(serde::de::Error::custom(format!("metadata {key:?} is given twice")));
                    }
                    pairs.insert(key, value);
                }
                Ok(Unique(pairs))
            }
        }
        deserializer.deserialize_map(Visitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(header: &str, data: &[u8]) -> Vec<u8> {
        let mut out = (header.len() as u64).to_le_bytes().to_vec();
        out.extend_from_slice(header.as_bytes());
        out.extend_from_slice(data);
        out
    }

    fn example() -> Vec<u8> {
        let metadata = [("b", "2 \"quoted\"\n"), ("a", "1")].map(|(k, v)| (k.to_string(), v.to_string())).into();
        let tensors = [
            ("small".to_string(), Tensor::indices([1usize, 2, 65535].into_iter(), 65535)),
            ("values".to_string(), Tensor::f32(&[1.5, -2.0])),
            ("wide".to_string(), Tensor::indices([1usize << 40].into_iter(), 1 << 40)),
        ]
        .into();
        encode(&metadata, &tensors)
    }

    #[test]
    fn the_safetensors_crate_reads_what_we_write() {
        let bytes = example();
        let theirs = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(theirs.tensor("values").unwrap().data(), [1.5f32.to_le_bytes(), (-2f32).to_le_bytes()].concat());
        assert_eq!(theirs.tensor("wide").unwrap().dtype(), safetensors::Dtype::I64);
        let (_, header) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
        assert_eq!(header.metadata().as_ref().unwrap()["b"], "2 \"quoted\"\n");
        let ours = Tensors::decode(&bytes).unwrap();
        assert_eq!(ours.index_vector("small", Some(3), 65535).unwrap(), [1, 2, 65535]);
        assert_eq!(ours.index_vector("wide", Some(1), usize::MAX).unwrap(), [1 << 40]);
        assert_eq!(ours.f32_vector("values", None).unwrap(), [1.5, -2.0]);
        assert_eq!(example(), bytes);
    }

    #[test]
    fn damage_is_named() {
        let good = example();
        for length in 0..good.len() {
            assert!(Tensors::decode(&good[..length]).is_err(), "{length} bytes");
        }
        let tensor = |shape: &str, from: u64, to: u64| {
            format!("{{\"t\":{{\"dtype\":\"F32\",\"shape\":{shape},\"data_offsets\":[{from},{to}]}}}}")
        };
        let cases = [
            (tensor("[2]", 0, 8), 7, "truncated"),
            (tensor("[2]", 0, 8), 9, "belong to no tensor"),
            (tensor("[3]", 0, 8), 8, "does not take bytes"),
            (tensor("[2]", 8, 0), 8, "does not take bytes"),
            (tensor("[4611686018427387904, 4]", 0, 0), 0, "does not take bytes"),
            (tensor("[4611686018427387903]", 4, u64::MAX - 3 - 4), 8, "does not take bytes"),
            (tensor("[-1]", 0, 8), 8, "unreadable header"),
            ("{\"a\":1}".into(), 0, "unreadable header"),
            ("{\"__metadata__\":{\"k\":\"1\",\"k\":\"2\"}}".into(), 0, "twice"),
            ("{\"__metadata__\":{},\"__metadata__\":{}}".into(), 0, "twice"),
            ("[".repeat(100_000), 0, "unreadable header"),
        ];
        for (header, data, expected) in cases {
            let problem = Tensors::decode(&file(&header, &vec![0; data])).unwrap_err();
            assert!(problem.contains(expected), "{problem} for {}", &header[..header.len().min(80)]);
        }
        let twice = "{\"t\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]},\
                      \"s\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}";
        assert!(Tensors::decode(&file(twice, &[0; 4])).unwrap_err().contains("overlap"));
        assert!(Tensors::decode(&u64::MAX.to_le_bytes()).unwrap_err().contains("more than"));
    }

    #[test]
    fn indices_are_checked_whatever_their_type() {
        for (dtype, minus_one) in [("I32", vec![255u8; 4]), ("I64", vec![255; 8])] {
            let n = minus_one.len();
            let header = format!("{{\"t\":{{\"dtype\":\"{dtype}\",\"shape\":[1],\"data_offsets\":[0,{n}]}}}}");
            let bytes = file(&header, &minus_one);
            let problem = Tensors::decode(&bytes).unwrap().index_vector("t", Some(1), 5).unwrap_err();
            assert!(problem.contains("-1 at position 0"), "{problem}");
        }
    }
}
