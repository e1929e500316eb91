//! Arrays, inputs and labels from files written by NumPy and safetensors, and from hostile ones.

#![allow(clippy::unwrap_used)] // Helpers of tests are tests.

use std::io::Write;
use std::path::{Path, PathBuf};

use crate::common::{data, fixture, integer, number};
use simplicit::arrays::{Array, ArrayFile, Element, Inputs, Labels, Preprocessing, Selection, content_hash, write_npy};
use simplicit::linalg::Matrix;
use simplicit::states::InputSource;

fn keyed(name: &str, key: &str) -> PathBuf {
    PathBuf::from(format!("{}:{key}", fixture(name).display()))
}

fn all(array: &Array) -> Matrix {
    array.rows(0..array.samples()).unwrap()
}

fn error(file: impl AsRef<Path>) -> String {
    Array::open(file).unwrap_err().to_string()
}

/// Writes a file into a temporary folder.
fn temporary(name: &str, bytes: &[u8]) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    std::fs::write(&path, bytes).unwrap();
    (folder, path)
}

fn gzipped(bytes: &[u8]) -> Vec<u8> {
    let mut gz = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gz.write_all(bytes).unwrap();
    gz.finish().unwrap()
}

#[test]
fn every_number_type_and_order() {
    let f32s = Element::F32;
    for (path, element) in [
        (fixture("little_f2.npy"), Element::F16),
        (fixture("little_f4.npy"), f32s),
        (fixture("little_f8.npy"), Element::F64),
        (fixture("big_f4.npy"), f32s),
        (fixture("big_f8.npy"), Element::F64),
        (fixture("version2.npy"), Element::F64),
        (keyed("two.npz", "first"), f32s),
        (keyed("two.safetensors", "one"), Element::F64),
        (fixture("bf16.safetensors"), Element::Bf16),
    ] {
        let array = Array::open(&path).unwrap();
        assert_eq!((array.shape(), array.element()), ([5, 3].as_slice(), element), "{path:?}");
        assert_eq!((array.samples(), array.features()), (5, 3));
        assert!(!array.is_image_file());
        assert_eq!(all(&array), Matrix::from_fn(5, 3, |i, j| number(3 * i + j)), "{path:?}");
        let part: Matrix<f32> = array.rows(2..4).unwrap();
        assert_eq!(part, Matrix::from_fn(2, 3, |i, j| number(3 * (i + 2) + j) as f32), "{path:?}");
        assert_eq!(array.rows::<f64>(3..3).unwrap().rows(), 0);
        assert!(array.rows::<f64>(3..6).unwrap_err().to_string().contains("0..5"));
    }
}

#[test]
fn fortran_order_is_read_in_row_major_order() {
    let array = Array::open(fixture("fortran.npy")).unwrap();
    assert_eq!((array.shape(), array.features()), ([5, 2, 3, 4].as_slice(), 24));
    let part: Matrix = array.rows(1..4).unwrap();
    assert_eq!(part, Matrix::from_fn(3, 24, |i, j| number(24 * (i + 1) + j)));
    // What numpy.save(U.T) gives to somebody who keeps samples in columns.
    let array = Array::open(fixture("transposed.npy")).unwrap();
    assert_eq!(all(&array), Matrix::from_fn(5, 3, |i, j| number(5 * j + i)));
}

#[test]
fn keys_choose_among_several_arrays() {
    let packed = Array::open(fixture("packed.npz")).unwrap();
    assert_eq!(packed.shape(), [40, 3]);
    assert_eq!(packed.rows::<f64>(39..40).unwrap().row(0), [117, 118, 119].map(number));
    assert_eq!(Array::open(keyed("packed.npz", "only")).unwrap().shape(), [40, 3]);
    for (name, keys) in [("two.npz", "2: first, second"), ("two.safetensors", "2: ")] {
        let message = error(fixture(name));
        assert!(message.contains("expected exactly one array, got 2") && message.contains(keys), "{message}");
        assert!(error(keyed(name, "third")).contains("expected an array \"third\", got 2"));
    }
    assert_eq!(ArrayFile::open(fixture("two.npz")).unwrap().keys(), ["first", "second"]);
    assert!(matches!(Array::open(keyed("little_f4.npy", "first")), Err(simplicit::Error::Io { .. })));
    assert!(ArrayFile::open(fixture("little_f4.npy")).unwrap().array("x").unwrap_err().to_string().contains("key"));
    // A colon in a file's own name is no key.
    let (_folder, path) = temporary("odd.npz:first", &std::fs::read(fixture("packed.npz")).unwrap());
    assert_eq!(Array::open(path).unwrap().shape(), [40, 3]);
}

#[test]
fn a_gzipped_file_is_the_same_array() {
    let (_folder, path) = temporary("x.npy.gz", &gzipped(&std::fs::read(fixture("big_f4.npy")).unwrap()));
    assert_eq!(all(&Array::open(path).unwrap()), all(&Array::open(fixture("big_f4.npy")).unwrap()));
    let (_folder, path) = temporary("x.safetensors.gz", &gzipped(&std::fs::read(fixture("two.safetensors")).unwrap()));
    let array = Array::open(format!("{}:one", path.display())).unwrap();
    assert_eq!(all(&array), Matrix::from_fn(5, 3, |i, j| number(3 * i + j)));
}

#[test]
fn a_written_npy_has_numpys_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("y.npy");
    write_npy(&path, &Matrix::from_fn(5, 3, |i, j| number(3 * i + j) as f32)).unwrap();
    assert_eq!(std::fs::read(path).unwrap(), std::fs::read(fixture("little_f4.npy")).unwrap());
}

#[test]
fn several_threads_read_one_file() {
    let array = Array::open(data("paper_states.npz:B")).unwrap();
    let stored = Array::open(keyed("two.npz", "first")).unwrap();
    let whole = all(&array);
    std::thread::scope(|scope| {
        for t in 0..4 {
            let (array, stored, whole) = (&array, &stored, &whole);
            scope.spawn(move || {
                for i in (t..112).step_by(4) {
                    assert_eq!(array.rows::<f64>(i..i + 1).unwrap().row(0), whole.row(i));
                    let row: Matrix = stored.rows(i % 5..i % 5 + 1).unwrap();
                    assert_eq!(row.row(0)[2], number(3 * (i % 5) + 2));
                }
            });
        }
    });
}

#[test]
fn images_of_idx_files_are_scaled() {
    for name in ["images.idx", "images.idx.gz"] {
        let array = Array::open(fixture(name)).unwrap();
        assert_eq!(array.shape(), [4, 2, 3]);
        assert!(array.is_image_file());
        let inputs = Inputs::new(array.clone(), None, &Selection::all()).unwrap();
        assert_eq!((inputs.samples(), inputs.features()), (4, 6));
        let expected = Matrix::from_fn(2, 6, |i, j| integer(6 * (i + 1) + j) as f32 / 255.0);
        assert_eq!(inputs.rows(1..3).unwrap(), expected);
        let raw = Inputs::new(array, Some(Preprocessing::identity()), &Selection::all()).unwrap();
        assert_eq!(raw.rows(0..1).unwrap().row(0)[1], 7.0);
    }
    let labels = Labels::read(fixture("shorts.idx"), &Selection::all()).unwrap();
    assert_eq!(labels.as_slice(), (0..6).map(integer).collect::<Vec<_>>());
}

#[test]
fn cifar_files_are_images_and_their_own_labels() {
    for labels in [1usize, 2] {
        let record = |i: usize| {
            let mut bytes = vec![40 + i as u8; labels - 1];
            bytes.push(7 * i as u8);
            bytes.extend((0..3072).map(|k| ((k * 13 + i * 101) % 251) as u8));
            bytes
        };
        let content: Vec<u8> = (0..5).flat_map(record).collect();
        for (name, bytes) in [("train.bin", content.clone()), ("train.bin.gz", gzipped(&content))] {
            let (_folder, path) = temporary(name, &bytes);
            let array = Array::open(&path).unwrap();
            assert_eq!((array.shape(), array.element()), ([5, 3, 32, 32].as_slice(), Element::U8));
            let part: Matrix = array.rows(1..4).unwrap();
            assert_eq!(part, Matrix::from_fn(3, 3072, |i, k| ((k * 13 + (i + 1) * 101) % 251) as f64));
            let read = Labels::read(&path, &Selection::all()).unwrap();
            assert_eq!(read.as_slice(), [0, 7, 14, 21, 28]);
            let per_channel = Preprocessing::new(1.0 / 255.0, vec![0.5, 0.4, 0.3], vec![0.2, 0.25, 0.5]).unwrap();
            let inputs = Inputs::new(array, Some(per_channel), &Selection::all()).unwrap();
            let u = inputs.rows(4..5).unwrap();
            for k in 0..3072 {
                let raw = ((k * 13 + 4 * 101) % 251) as f64 / 255.0;
                let expected = (raw - [0.5, 0.4, 0.3][k / 1024]) / [0.2, 0.25, 0.5][k / 1024];
                assert!((f64::from(u[(0, k)]) - expected).abs() < 1e-6, "{k}");
            }
        }
        let (_folder, path) = temporary("train.bin", &content[1..]);
        let message = error(path);
        assert!(message.contains("3073 (CIFAR-10) or 3074 bytes (CIFAR-100)"), "{message}");
    }
    // 3073 records of 3074 bytes are also 3074 records of 3073.
    let (_folder, path) = temporary("train.bin", &vec![1; 3073 * 3074]);
    assert!(error(path).contains("CIFAR-10 and of CIFAR-100"));
    let (_folder, path) = temporary("cifar100.bin", &vec![1; 3073 * 3074]);
    assert_eq!(Array::open(path).unwrap().samples(), 3073);
}

#[test]
fn channels_are_the_second_axis_of_four() {
    let array = |shape: &[usize]| {
        let size = shape.iter().product();
        Array::from_le_bytes("images", Element::U8, shape, (0..size).map(|k| k as u8).collect()).unwrap()
    };
    let two = Preprocessing::new(2.0, vec![1.0, 3.0], vec![0.5]).unwrap();
    let inputs = Inputs::new(array(&[2, 2, 1, 2]), Some(two.clone()), &Selection::all()).unwrap();
    let expected = [-2.0, 2.0, 2.0, 6.0, 14.0, 18.0, 18.0, 22.0];
    assert_eq!(inputs.rows(0..2).unwrap().as_slice(), expected);
    for shape in [[2, 4, 1, 1].as_slice(), &[2, 2, 2], &[4, 2], &[8]] {
        let message = Inputs::new(array(shape), Some(two.clone()), &Selection::all()).unwrap_err().to_string();
        assert!(message.starts_with("mean: expected 1 value"), "{shape:?}: {message}");
    }
}

#[test]
fn a_selection_is_the_same_for_inputs_and_labels() {
    let selection = Selection::random(500, 9);
    let read = |selection: &Selection| {
        let images = Array::open(data("fashion_train_images.idx.gz")).unwrap();
        let inputs = Inputs::new(images, None, selection).unwrap();
        let labels = Labels::read(data("fashion_train_labels.idx.gz"), selection).unwrap();
        (inputs, labels)
    };
    let (every, every_label) = read(&Selection::all());
    let (some, some_labels) = read(&selection);
    let indices = selection.indices(2000).unwrap().unwrap();
    let mut distinct = indices.clone();
    distinct.sort_unstable();
    distinct.dedup();
    assert_eq!((some.samples(), distinct.len()), (500, 500));
    let (every, some) = (every.rows(0..2000).unwrap(), some.rows(0..500).unwrap());
    for (i, &k) in indices.iter().enumerate() {
        assert_eq!(some.row(i), every.row(k));
        assert_eq!(some_labels.as_slice()[i], every_label.as_slice()[k]);
    }
    assert_eq!(read(&selection).1, some_labels);
    assert_ne!(read(&Selection::random(500, 10)).1.as_slice(), some_labels.as_slice());
    let message = Labels::read(data("fashion_train_labels.idx.gz"), &Selection::random(2001, 0)).unwrap_err();
    assert_eq!(message.to_string(), "samples: expected at most 2000, all there are, got 2001");
    assert!(Selection::random(0, 0).indices(10).is_err());
}

#[test]
fn labels_are_small_integers() {
    let expected: Vec<u32> = (0..6).map(integer).collect();
    for kind in ["u1", "i1", "u2", "i2", "i4", "i8", "u8", "column"] {
        let labels = Labels::read(fixture(&format!("labels_{kind}.npy")), &Selection::all()).unwrap();
        assert_eq!(labels.as_slice(), expected, "{kind}");
    }
    let labels = Labels::read(keyed("two.npz", "second"), &Selection::all()).unwrap();
    assert_eq!(labels.as_slice(), expected);
    labels.require(6, 22).unwrap();
    assert!(labels.require(7, 22).unwrap_err().to_string().contains("expected 7"));
    let message = labels.require(6, 21).unwrap_err().to_string();
    assert!(message.contains("sample 3: expected a class below 21") && message.ends_with("got 21"), "{message}");
    let message = Labels::read(fixture("little_f4.npy"), &Selection::all()).unwrap_err().to_string();
    assert!(message.contains("one integer a sample, got 5 × 3"), "{message}");
    for (values, bad) in [([1.0, 0.5], "0.5"), ([2.0, -1.0], "-1"), ([0.0, f32::NAN], "NaN")] {
        let array = Array::from_matrix("labels", &Matrix::from_vec(2, 1, values.to_vec()).unwrap());
        let message = Labels::from_array(&array, &Selection::all()).unwrap_err().to_string();
        assert!(message.contains(&format!("got {bad} at row 1")), "{message}");
    }
}

#[test]
fn a_bad_value_is_named_by_its_place_in_the_file() {
    let mut values = Matrix::<f64>::zeros(10, 3);
    values[(7, 2)] = f64::NAN;
    let message = |values: &Matrix, selection| {
        let inputs = Inputs::new(Array::from_matrix("mine", values), None, &selection).unwrap();
        inputs.rows(0..10).unwrap_err().to_string()
    };
    assert!(message(&values, Selection::all()).contains("mine: NaN at row 7, column 2"));
    assert!(message(&values, Selection::random(10, 3)).contains("NaN at row 7, column 2"));
    values[(7, 2)] = 1e300;
    assert!(message(&values, Selection::all()).contains("inf at row 7, column 2"));
    let empty = Array::from_matrix("mine", &Matrix::<f32>::zeros(0, 3));
    assert!(Inputs::new(empty, None, &Selection::all()).unwrap_err().to_string().contains("got 0 × 3"));
}

#[test]
fn the_hash_is_sha256() {
    let (_folder, path) = temporary("x", b"abc");
    let expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
    assert_eq!(content_hash(path).unwrap(), expected);
    // A file longer than the buffer; the digest is sha256sum's.
    let expected = "75ae614afbd27fa4c21a3f41beb7dfcc32cb5bcfab480e163f3ece230eedc296";
    assert_eq!(content_hash(data("fashion_fc.onnx")).unwrap(), expected);
    assert!(content_hash("no such file").is_err());
}

#[test]
fn the_bundle_is_what_its_readme_says() {
    let images = Array::open(data("fashion_train_images.idx.gz")).unwrap();
    assert_eq!(images.shape(), [2000, 28, 28]);
    let test = Array::open(data("fashion_test_images.idx.gz")).unwrap();
    assert_eq!(test.shape(), [10000, 28, 28]);
    let labels = Labels::read(data("fashion_test_labels.idx.gz"), &Selection::all()).unwrap();
    labels.require(10000, 10).unwrap();
    for class in 0..10 {
        assert_eq!(labels.as_slice().iter().filter(|l| **l == class).count(), 1000);
    }
    Labels::read(data("fashion_train_labels.idx.gz"), &Selection::all()).unwrap().require(2000, 10).unwrap();
    // Embedded in a program: the same.
    let bytes = std::fs::read(data("fashion_train_images.idx.gz")).unwrap();
    let embedded = ArrayFile::from_bytes("fashion_train_images.idx.gz", bytes).unwrap().only_array().unwrap();
    assert_eq!(all(&embedded), all(&images));
    // The paper's states use the first thousand.
    assert_eq!(crate::common::paper::stored("U8"), images.rows(0..1000).unwrap());
}

#[test]
fn what_is_not_supported_is_refused_by_name() {
    assert!(error(fixture("complex.npy")).contains("number type \"<c16\""));
    assert!(error(fixture("records.npy")).contains("structured"));
    assert!(error(fixture("scalar.npy")).contains("got a single number"));
    assert!(error("no/such/file.npy").contains("no/such/file.npy"));
    assert!(error(fixture("")).contains("expected a file, got a directory"));
    let (_folder, path) = temporary("picture.png", b"\x89PNG\r\n\x1a\n");
    assert!(error(path).contains("expected .npy, .npz, .safetensors, IDX or CIFAR"));
    for name in ["x.npy", "x.npz", "x.idx", "x.gz", "x.safetensors", "x.bin"] {
        let (_folder, path) = temporary(name, b"");
        assert!(Array::open(path).is_err(), "{name}");
    }
}

fn npy(dict: &str, data: usize) -> Vec<u8> {
    let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
    bytes.extend((dict.len() as u16).to_le_bytes());
    bytes.extend(dict.as_bytes());
    bytes.extend(vec![0; data]);
    bytes
}

fn safetensors(header: &str, data: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend(vec![0; data]);
    bytes
}

#[test]
fn lying_headers_are_errors_that_say_what_was_expected() {
    let shape = |shape: &str| format!("{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}}}");
    let tensor = |shape: &str, end: &str| {
        safetensors(&format!(r#"{{"U":{{"dtype":"F32","shape":{shape},"data_offsets":[0,{end}]}}}}"#), 8)
    };
    let idx = |axes: &[u32]| {
        let mut bytes = vec![0, 0, 8, axes.len() as u8];
        bytes.extend(axes.iter().flat_map(|a| a.to_be_bytes()));
        bytes.extend([0; 6]);
        bytes
    };
    for (name, bytes, part) in [
        ("a.npy", npy(&shape("(3,)"), 8), "expected at least 12 bytes, got 8"),
        ("a.npy", npy(&shape("(3,)"), 13), "expected 12 bytes, got 13"),
        ("a.npy", npy(&shape("(4000000000, 4000000000)"), 8), "too large"),
        ("a.npy", npy(&shape("(4611686018427387904, 1)"), 8), "too large"),
        ("a.npy", npy(&shape("(0, 18446744073709551615, 2)"), 0), "too large"),
        ("a.npy", npy(&shape("(1000000000000,)"), 8), "expected at least 4000000000000 bytes, got 8"),
        ("a.npy", b"\x93NUMPY\x02\x00\xff\xff\xff\xff".to_vec(), "a header of 4294967295 bytes"),
        ("a.npy", b"\x93NUMPY\x01\x00\xff\xff".to_vec(), "expected at least 65545 bytes, got 10"),
        ("a.npy", b"\x93NUMPY\x09\x00\x00\x00".to_vec(), "version 9"),
        ("a.safetensors", vec![0xff; 16], "a safetensors header of 18446744073709551615 bytes"),
        ("a.safetensors", tensor("[2]", "8")[..50].to_vec(), "expected at least"),
        ("a.safetensors", tensor("[3]", "12"), "bytes, got"),
        ("a.safetensors", tensor("[1]", "4"), "something follows"),
        ("a.safetensors", tensor("[3]", "8"), "header is not valid"),
        ("a.safetensors", tensor("[4000000000,4000000000,4]", "8"), "header is not valid"),
        ("a.safetensors", tensor("[4611686018427387904]", "18446744073709551615"), "header is not valid"),
        ("a.safetensors", safetensors(&"[".repeat(100_000), 0), "header is not valid"),
        ("a.idx", idx(&[7]), "expected at least 15 bytes, got 14"),
        ("a.idx", idx(&[5]), "expected 13 bytes, got 14"),
        ("a.idx", idx(&[u32::MAX; 8]), "expected at least 18446744073709551615 bytes"),
        ("a.idx.gz", gzipped(&idx(&[7])), "expected at least 15 bytes, got 14"),
        ("a.idx.gz", gzipped(&idx(&[6]))[..20].to_vec(), "cannot be unpacked"),
        ("a.npz", b"PK\x05\x06".to_vec(), "no zip directory"),
        ("a.npz", b"PK\x05\x06\0\0\0\0\x01\0\x01\0\xff\xff\xff\x7f\0\0\0\0\0\0".to_vec(), "a zip directory of"),
        ("a.npz", b"PK\x05\x06\0\0\0\0\xff\xff\xff\xff\0\0\0\0\0\0\0\0\0\0".to_vec(), "zip64"),
        ("a.npz", b"PK\x05\x06\0\0\0\0\x05\0\x05\0\0\0\0\0\0\0\0\0\0\0".to_vec(), "broken entry"),
    ] {
        let (_folder, path) = temporary(name, &bytes);
        let message = error(path);
        assert!(message.contains(part), "{part}: {message}");
    }
}

#[test]
fn a_zip_member_that_lies_about_its_size_is_an_error() {
    let good = std::fs::read(fixture("packed.npz")).unwrap();
    let entry = good.windows(4).position(|w| w == b"PK\x01\x02").unwrap();
    for (offset, size, part) in [
        (24, u32::MAX - 1, "unpacks to more than 1073741824 bytes"),
        (24, 100, "unpacks to more than 100 bytes"),
        (24, 5000, "expected 5000 unpacked bytes, got 1088"),
        (20, 1_000_000, "expected at least"),
        (42, 7, "no zip entry"),
        (42, 1_000_000, "expected at least"),
    ] {
        let mut bytes = good.clone();
        bytes[entry + offset..entry + offset + 4].copy_from_slice(&size.to_le_bytes());
        let (_folder, path) = temporary("a.npz", &bytes);
        let message = error(path);
        assert!(message.contains(part), "{part}: {message}");
    }
    let mut bytes = good.clone();
    bytes[entry + 10] = 12;
    let (_folder, path) = temporary("a.npz", &bytes);
    assert!(error(path).contains("zip compression"));
}

const FILES: [&str; 9] = [
    "little_f4.npy",
    "fortran.npy",
    "two.npz",
    "packed.npz",
    "two.safetensors",
    "images.idx",
    "images.idx.gz",
    "shorts.idx",
    "relu_states.npz",
];

/// Opens every array of a file in memory and reads it; errors are fine, anything else is not.
fn read_everything(name: &str, bytes: Vec<u8>) -> simplicit::Result<()> {
    let file = ArrayFile::from_bytes(name, bytes)?;
    let keys = file.keys();
    let arrays: Vec<_> =
        if keys.is_empty() { vec![file.only_array()] } else { keys.iter().map(|key| file.array(key)).collect() };
    for array in arrays {
        let array = array?;
        array.rows::<f32>(0..array.samples())?;
        let _ = Labels::from_array(&array, &Selection::all());
    }
    Ok(())
}

#[test]
fn every_cut_of_a_file_is_an_error() {
    for name in FILES {
        let bytes = std::fs::read(fixture(name)).unwrap();
        read_everything(name, bytes.clone()).unwrap();
        for len in 0..bytes.len() {
            assert!(read_everything(name, bytes[..len].to_vec()).is_err(), "{name} cut to {len} bytes");
        }
    }
}

#[test]
fn no_change_of_a_byte_does_more_than_an_error() {
    for name in FILES {
        let bytes = std::fs::read(fixture(name)).unwrap();
        for at in 0..bytes.len() {
            for value in [0, 1, 7, b'9', b'(', 0x7f, 0x80, 0xff, bytes[at] ^ 0x10, bytes[at].wrapping_add(1)] {
                let mut changed = bytes.clone();
                changed[at] = value;
                let _ = read_everything(name, changed);
            }
        }
    }
}
