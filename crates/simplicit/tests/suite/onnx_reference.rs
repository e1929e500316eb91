//! Networks read from ONNX against two references: ONNX's own node tests, each as a network of one node, and random graphs
//! against ONNX Runtime.
//!
//! Needs `SIMPLICIT_PYTHON` (default `python3`) with onnx and onnxruntime, which make the files; without them a test is
//! skipped with a message, and fails where CI=true.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr)] // helpers of tests, outside #[test] functions

use std::path::{Path, PathBuf};
use std::process::Command;

use simplicit::Error;
use simplicit::arrays::Array;
use simplicit::linalg::Matrix;
use simplicit::network::Network;
use simplicit::random::Random;

/// The files a script of this folder writes; none where Python lacks a module.
fn written(script: &str, arguments: &[&str]) -> Option<(tempfile::TempDir, Vec<PathBuf>)> {
    let python = std::env::var("SIMPLICIT_PYTHON").unwrap_or_else(|_| "python3".into());
    let found = Command::new(&python).args(["-c", "import onnx, onnxruntime"]).output();
    if !found.is_ok_and(|o| o.status.success()) {
        assert!(
            std::env::var("CI").as_deref() != Ok("true"),
            "{python} lacks onnx or onnxruntime, and CI must not skip"
        );
        eprintln!("skipped: {python} cannot import onnx and onnxruntime; set SIMPLICIT_PYTHON");
        return None;
    }
    let folder = tempfile::tempdir().unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(script);
    let done = Command::new(&python).arg(script).arg(folder.path()).args(arguments).output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let mut files: Vec<PathBuf> = std::fs::read_dir(folder.path()).unwrap().map(|f| f.unwrap().path()).collect();
    files.retain(|path| path.extension() == Some("onnx".as_ref()));
    files.sort();
    Some((folder, files))
}

fn rows(path: &Path) -> Matrix<f32> {
    let array = Array::open(path).unwrap();
    array.rows(0..array.samples()).unwrap()
}

/// What the network computes and what it should.
fn outputs(network: &Network, path: &Path) -> (Matrix<f32>, Matrix<f32>) {
    let u = rows(&path.with_extension("input.npy"));
    (network.forward(&u).unwrap(), rows(&path.with_extension("output.npy")))
}

#[test]
fn every_node_test_of_a_supported_operator_that_its_types_allow() {
    // ONNX's own tolerances for these cases.
    const RELATIVE: f32 = 1e-3;
    const ABSOLUTE: f32 = 1e-6;
    let Some((_folder, files)) = written("onnx_nodes.py", &[]) else { return };
    let (mut equal, mut wrong, mut refused) = (0, Vec::new(), Vec::new());
    for path in &files {
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        match Network::from_onnx(path) {
            Ok(network) => {
                let (y, expected) = outputs(&network, path);
                let near = |(a, b): (&f32, &f32)| (a - b).abs() <= ABSOLUTE + RELATIVE * b.abs();
                let same = y.as_slice().len() == expected.as_slice().len();
                if same && y.as_slice().iter().zip(expected.as_slice()).all(near) {
                    equal += 1;
                } else {
                    wrong.push(format!("{name}: {:?} is not {:?}", y.as_slice(), expected.as_slice()));
                }
            }
            // What is refused says that it is not supported; anything else is a mistake of ours.
            Err(Error::Unsupported { .. }) => refused.push(name),
            Err(error) => wrong.push(format!("{name}: {error}")),
        }
    }
    eprintln!("{equal} cases computed, {} refused: {refused:?}", refused.len());
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(equal > 8 * refused.len() && equal > 400, "{equal} computed, {} refused", refused.len());
}

#[test]
fn random_graphs_against_onnx_runtime() {
    let Some((_folder, files)) = written("onnx_random.py", &["150", "7"]) else { return };
    assert_eq!(files.len(), 150);
    let mut random = Random::new(3);
    for path in &files {
        let name = path.display();
        let network = Network::from_onnx(path).unwrap_or_else(|e| panic!("{e}"));
        let (y, expected) = outputs(&network, path);
        let scale = expected.as_slice().iter().fold(1e-3f32, |m, v| m.max(v.abs()));
        assert_eq!(y.as_slice().len(), expected.as_slice().len(), "{name}");
        for (a, b) in y.as_slice().iter().zip(expected.as_slice()) {
            assert!((a - b).abs() <= 2e-5 * scale, "{name}: {a} is not {b}");
        }
        // Damaged, a file is refused or read, and never more than that.
        let bytes = std::fs::read(path).unwrap();
        for _ in 0..60 {
            let mut damaged = bytes.clone();
            for _ in 0..1 + random.below(3) {
                let place = random.below(damaged.len());
                damaged[place] = random.bits() as u8;
            }
            if let Ok(damaged) = Network::from_onnx_bytes(&damaged)
                && damaged.input_shape().size() == network.input_shape().size()
                && damaged.multiply_adds() < 1 << 20
            {
                damaged.forward(&Matrix::zeros(1, network.input_shape().size())).unwrap();
            }
        }
    }
}
