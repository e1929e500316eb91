//! Weights that an ONNX file keeps in other files of its folder.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Component, Path, PathBuf};

use super::constant::Constant;
use super::proto::{GraphProto, TensorProto};
use super::tensor;
use crate::{Error, Result};

/// The largest tensor that is read from another file, in bytes.
const MAX_BYTES: u64 = 1 << 33;

/// The bytes of one value in a file, by ONNX's number for the type.
fn width(kind: i32) -> u64 {
    match kind {
        2 | 3 | 9 => 1,
        4 | 5 | 10 | 16 => 2,
        7 | 11 | 13 => 8,
        _ => 4,
    }
}

/// Reads a tensor whose values are in another file of the model's folder.
pub(crate) fn read(tensor: &TensorProto, folder: &Path) -> Result<Constant> {
    let what = || format!("tensor {:?}", tensor.name);
    let entry = |key: &str| tensor.external_data.iter().find(|e| e.key == key).map(|e| e.value.as_str());
    let number = |key: &str| match entry(key) {
        None => Ok(None),
        Some(text) => {
            text.parse::<u64>().map(Some).map_err(|_| Error::shape(what(), format!("a number as {key}"), text))
        }
    };
    let location = entry("location").ok_or_else(|| Error::shape(what(), "the name of its data file", "none"))?;
    let path = inside(folder, location).map_err(|e| e.within(&what()))?;
    let mut file = File::open(&path).map_err(|e| Error::io(&path, e))?;
    let available = file.metadata().map_err(|e| Error::io(&path, e))?.len();
    let offset = number("offset")?.unwrap_or(0);
    let count = tensor.dims.iter().try_fold(1u64, |p, &d| u64::try_from(d).ok().and_then(|d| p.checked_mul(d)));
    let needed = count.and_then(|c| c.checked_mul(width(tensor.data_type.unwrap_or(0)))).filter(|&n| n <= MAX_BYTES);
    let Some(needed) = needed else {
        return Err(Error::shape(what(), format!("at most {MAX_BYTES} bytes"), format!("{:?}", tensor.dims)));
    };
    let length = number("length")?.unwrap_or(needed);
    if length != needed {
        return Err(Error::shape(what(), format!("{needed} bytes for {:?}", tensor.dims), format!("length {length}")));
    }
    if offset.checked_add(length).is_none_or(|end| end > available) {
        let got = format!("{available} bytes, of which {length} from {offset} on are asked for");
        return Err(Error::shape(format!("{}: {}", what(), path.display()), "a file that holds its values", got));
    }
    let mut bytes = vec![0; length as usize];
    file.seek(SeekFrom::Start(offset)).and_then(|_| file.read_exact(&mut bytes)).map_err(|e| Error::io(&path, e))?;
    tensor::read_from(tensor, Some(&bytes))
}

/// The files of a model's folder that hold its weights; those that cannot be read are left out.
pub(crate) fn files(graph: &GraphProto, folder: &Path) -> Vec<PathBuf> {
    let mut named = BTreeSet::new();
    add_locations(graph, &mut named);
    named.iter().filter_map(|name| inside(folder, name).ok()).collect()
}

/// The data files that a graph names: for its own weights, for constants of its nodes, and in graphs inside of it.
fn add_locations(graph: &GraphProto, named: &mut BTreeSet<String>) {
    let attributes = || graph.node.iter().flat_map(|node| &node.attribute);
    let location = |t: &TensorProto| t.external_data.iter().find(|e| e.key == "location").map(|e| e.value.clone());
    named.extend(graph.initializer.iter().chain(attributes().filter_map(|a| a.t.as_ref())).filter_map(location));
    attributes().filter_map(|a| a.g.as_ref()).for_each(|inner| add_locations(inner, named));
}

/// The path of a data file, which must lie in the model's folder after links are resolved.
fn inside(folder: &Path, location: &str) -> Result<PathBuf> {
    let refuse = || Error::shape("data file", "a file inside the model's folder", format!("{location:?}"));
    let relative = Path::new(location);
    if location.is_empty()
        || !relative.components().all(|part| matches!(part, Component::Normal(_) | Component::CurDir))
    {
        return Err(refuse());
    }
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    let root = folder.canonicalize().map_err(|e| Error::io(folder, e))?;
    let named = folder.join(relative);
    let path = named.canonicalize().map_err(|e| Error::io(&named, e))?;
    if path.starts_with(&root) { Ok(path) } else { Err(refuse()) }
}

#[cfg(test)]
mod tests {
    use super::super::proto::{AttributeProto, NodeProto, StringStringEntryProto};
    use super::*;

    fn stored(location: &str, more: &[(&str, &str)]) -> TensorProto {
        let entry = |(key, value): (&str, &str)| StringStringEntryProto { key: key.into(), value: value.into() };
        TensorProto {
            name: "w".into(),
            dims: vec![2],
            data_type: Some(1),
            data_location: Some(1),
            external_data: [("location", location)].into_iter().chain(more.iter().copied()).map(entry).collect(),
            ..Default::default()
        }
    }

    #[test]
    fn every_tensor_names_its_file() {
        let folder = tempfile::tempdir().unwrap();
        let names = ["a.bin", "b.bin", "c.bin"];
        names.iter().for_each(|name| std::fs::write(folder.path().join(name), [0; 8]).unwrap());
        let node = |attribute: AttributeProto| NodeProto { attribute: vec![attribute], ..Default::default() };
        let constant = node(AttributeProto { t: Some(stored("b.bin", &[])), ..Default::default() });
        let inner = GraphProto { initializer: vec![stored("c.bin", &[])], ..Default::default() };
        let branch = node(AttributeProto { g: Some(inner), ..Default::default() });
        let initializer = vec![stored("a.bin", &[]), stored("missing.bin", &[])];
        let graph = GraphProto { node: vec![constant, branch], initializer, ..Default::default() };
        let root = folder.path().canonicalize().unwrap();
        assert_eq!(files(&graph, folder.path()), names.map(|name| root.join(name)));
    }

    #[test]
    fn only_what_lies_in_the_folder_is_read() {
        let outer = tempfile::tempdir().unwrap();
        let folder = outer.path().join("model");
        std::fs::create_dir(&folder).unwrap();
        let bytes: Vec<u8> = [0.0f32, 1.5, -2.0].iter().flat_map(|v| v.to_le_bytes()).collect();
        for file in [folder.join("w.bin"), outer.path().join("secret.bin")] {
            std::fs::write(file, &bytes).unwrap();
        }
        let Constant::Floats(t) = read(&stored("w.bin", &[("offset", "4"), ("length", "8")]), &folder).unwrap() else {
            panic!("weights are floats")
        };
        assert_eq!(t.values, [1.5, -2.0]);
        let absolute = folder.join("w.bin").display().to_string();
        let refused = [
            stored("../secret.bin", &[]),
            stored(&absolute, &[]),
            stored("", &[]),
            stored("missing.bin", &[]),
            stored("w.bin", &[("offset", "8")]),
            stored("w.bin", &[("offset", "18446744073709551615")]),
            stored("w.bin", &[("length", "12")]),
            stored("w.bin", &[("offset", "-1")]),
            TensorProto { dims: vec![1 << 40, 1 << 40], ..stored("w.bin", &[]) },
        ];
        for tensor in refused {
            assert!(read(&tensor, &folder).is_err(), "{:?}", tensor.external_data);
        }
        #[cfg(unix)]
        {
            std::os::unix::fs::symlink(outer.path().join("secret.bin"), folder.join("link.bin")).unwrap();
            assert!(read(&stored("link.bin", &[]), &folder).is_err());
        }
    }
}
