//! Networks as people have them (old operator sets, weights in odd places and types, tokens, maps as outputs): read as
//! ONNX Runtime computes them, trained, and written again in their own form, which ONNX Runtime runs.
//!
//! Needs `SIMPLICIT_PYTHON` (default `python3`) with onnx and onnxruntime; without them the test is skipped with a
//! message, and fails where CI=true.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr)] // helpers of tests are tests

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use simplicit::arrays::{Array, write_npy};
use simplicit::equilibrium::{Equilibrium, EquilibriumSettings};
use simplicit::linalg::Matrix;
use simplicit::model::ImplicitModel;
use simplicit::network::Network;
use simplicit::onnx::{OnnxSelection, export_onnx_like};
use simplicit::parallel::{Cancel, Threads};
use simplicit::states::Collected;
use simplicit::train::{Forget, Run, TrainInput, TrainSettings, importance, train};

fn python(arguments: &[&Path]) -> std::io::Result<Output> {
    let python = std::env::var("SIMPLICIT_PYTHON").unwrap_or_else(|_| "python3".into());
    Command::new(python).args(arguments).output()
}

fn require(done: &Output) {
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
}

fn rows(path: &Path) -> Matrix<f32> {
    let array = Array::open(path).unwrap();
    array.rows(0..array.samples()).unwrap()
}

fn largest(values: &[f32]) -> f32 {
    values.iter().fold(1e-3, |m, v| m.max(v.abs()))
}

fn require_close(name: &str, got: &Matrix<f32>, wanted: &Matrix<f32>, near: f32) {
    assert_eq!(got.as_slice().len(), wanted.as_slice().len(), "{name}");
    let size = largest(wanted.as_slice());
    for (a, b) in got.as_slice().iter().zip(wanted.as_slice()) {
        assert!((a - b).abs() <= near * size, "{name}: {a} is not {b}");
    }
}

#[test]
fn read_trained_and_written_again() {
    let found = python(&[Path::new("-c"), Path::new("import onnx, onnxruntime")]);
    if !found.is_ok_and(|o| o.status.success()) {
        assert!(std::env::var("CI").as_deref() != Ok("true"), "Python lacks onnx or onnxruntime, and CI must not skip");
        eprintln!("skipped: Python cannot import onnx and onnxruntime; set SIMPLICIT_PYTHON");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/onnx_unusual.py");
    require(&python(&[&script, folder.path()]).unwrap());
    let mut files: Vec<PathBuf> = std::fs::read_dir(folder.path()).unwrap().map(|f| f.unwrap().path()).collect();
    files.retain(|path| path.extension() == Some("onnx".as_ref()));
    files.sort();
    assert!(files.len() > 20, "{} files", files.len());
    for path in &files {
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        let several = name.starts_with("several_outputs");
        let mut selection = OnnxSelection { output: several.then(|| "y".to_string()), ..Default::default() };
        if name == "open_sizes" {
            let refused = Network::from_onnx(path).unwrap_err().to_string();
            assert!(refused.contains("--input NAME") && refused.contains("--fill"), "{refused}");
            selection.input = Some("x".to_string());
            let refused = Network::from_onnx_selected(path, &selection).unwrap_err().to_string();
            assert!(refused.contains("--input-shape 3xNxN"), "{refused}");
            selection.input_shape = Some(vec![1, 3, 7, 7]);
            let refused = Network::from_onnx_selected(path, &selection).unwrap_err().to_string();
            assert!(refused.contains("--fill"), "{refused}");
            selection.fill = vec![("mask".to_string(), 0.5)];
        }
        let network = Network::from_onnx_selected(path, &selection).unwrap_or_else(|e| panic!("{e}"));
        let u = rows(&path.with_extension("input.npy"));
        let expected = rows(&path.with_extension("output.npy"));
        // ONNX Runtime computes with half precision where the file says so.
        require_close(&name, &network.forward(&u).unwrap(), &expected, if name == "half" { 1e-2 } else { 2e-5 });
        if several {
            let refused = Network::from_onnx(path).unwrap_err().to_string();
            assert!(refused.contains("--output NAME"), "{refused}");
        }

        let baseline = ImplicitModel::from_network(&network).unwrap();
        let (cancel, threads) = (Cancel::new(), Threads::new(2));
        let weights = importance(&network, &u, 2, 0, threads, &cancel).unwrap();
        let source = Collected::new(&network, &u).unwrap();
        let (baseline, importance) = (Some(&baseline), Some(&weights[..]));
        let input = TrainInput { source: &source, baseline, importance, preprocessing: Default::default() };
        let settings = TrainSettings { target_sparsity: Some(0.4), ..Default::default() };
        let mut run = Run { threads, cancel: &cancel, keep: &Forget, progress: &mut |_| {} };
        let model = train(&input, &settings, &mut run).unwrap_or_else(|e| panic!("{name}: {e}")).model;
        let sparsity = model.sparsity().sparsity;
        assert!((sparsity - 0.4).abs() < 0.03, "{name}: {sparsity}");
        let y = Equilibrium::new(&model, EquilibriumSettings::default()).unwrap().outputs(&u).unwrap().y;
        // Closer than the nearest constant would be, by far.
        let error: f32 = y.as_slice().iter().zip(expected.as_slice()).map(|(a, b)| (a - b).powi(2)).sum();
        let energy: f32 = expected.as_slice().iter().map(|b| b.powi(2)).sum();
        assert!(error < 0.3 * energy, "{name}: {error} of {energy}");

        let out = path.with_extension("sparse.onnx");
        export_onnx_like(&model, path, &selection, &out).unwrap_or_else(|e| panic!("{name}: {e}"));
        write_npy(path.with_extension("sparse.npy"), &y).unwrap();
        let again = Network::from_onnx_selected(&out, &selection).unwrap();
        // Weights of half precision are rounded when they are written.
        require_close(&name, &again.forward(&u).unwrap(), &y, if name == "half" { 1e-2 } else { 2e-5 });
        assert!(again.nonzeros() <= model.sparsity().nonzeros as usize, "{name}");
    }
    require(&python(&[&script, folder.path(), Path::new("again")]).unwrap());
}
