//! What other programs make of our files: the reader in docs/format.md, and ONNX Runtime on what we export.
//!
//! Needs `SIMPLICIT_PYTHON` (default `python3`) with the modules named below; without them a test is skipped with a
//! message, and fails where CI=true.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr)] // helpers of tests, outside #[test] functions

use std::path::Path;
use std::process::Command;

use simplicit::equilibrium::{Equilibrium, EquilibriumSettings};
use simplicit::layout::{Activation, Layer, Layout};
use simplicit::linalg::{Csr, Matrix};
use simplicit::model::{DenseLayer, ImplicitModel, ModelParts, TapWeights};
use simplicit::network::Network;
use simplicit::onnx::{OnnxSettings, export_onnx, to_onnx};
use simplicit::random::Random;

fn python(modules: &str) -> Option<String> {
    let python = std::env::var("SIMPLICIT_PYTHON").unwrap_or_else(|_| "python3".into());
    let found = Command::new(&python).args(["-c", &format!("import {modules}")]).output();
    if found.is_ok_and(|o| o.status.success()) {
        return Some(python);
    }
    assert!(std::env::var("CI").as_deref() != Ok("true"), "{python} cannot import {modules}, and CI must not skip");
    eprintln!("skipped: {python} cannot import {modules}; set SIMPLICIT_PYTHON");
    None
}

fn run(python: &str, script: &str, arguments: &[&Path]) -> Vec<u8> {
    let out = Command::new(python).args(["-c", script]).args(arguments).output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    out.stdout
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

fn sparse(rows: usize, cols: usize, density: f64, r: &mut Random) -> Csr<f32> {
    let rows: Vec<Vec<_>> = (0..rows)
        .map(|_| (0..cols).map(|j| (j, if r.uniform() < density { r.normal() as f32 } else { 0.0 })).collect())
        .collect();
    Csr::from_rows(cols, rows)
}

fn model(a: Csr<f32>, p: usize, q: usize, layers: Vec<Layer>, r: &mut Random) -> ImplicitModel {
    let n = a.rows();
    ImplicitModel::new(ModelParts {
        a,
        b: sparse(n, p, 0.3, r),
        c: sparse(q, n, 0.5, r),
        d: sparse(q, p, 0.2, r),
        state_bias: (0..n).map(|_| r.normal() as f32).collect(),
        output_bias: (0..q).map(|_| r.normal() as f32).collect(),
        layout: Layout::new(layers),
        ..Default::default()
    })
    .unwrap()
}

/// Row sums of magnitudes a little below `sum`.
fn with_row_sums(a: &Csr<f32>, sum: f32) -> Csr<f32> {
    let rows = (0..a.rows()).map(|i| {
        let total: f32 = a.row(i).map(|(_, v)| v.abs()).sum();
        a.row(i).map(move |(j, v)| (j, 0.9999 * v * sum / total)).collect::<Vec<_>>()
    });
    Csr::from_rows(a.cols(), rows.collect::<Vec<_>>())
}

fn upper(a: &Csr<f32>) -> Csr<f32> {
    Csr::from_rows(a.cols(), (0..a.rows()).map(|i| a.row(i).filter(move |(j, _)| *j > i).collect::<Vec<_>>()))
}

#[test]
fn the_reader_in_the_format_page_reads_our_files() {
    let Some(python) = python("numpy") else { return };
    let page = include_str!("../../../../docs/format.md");
    let reader = page.split("```python\n").nth(1).unwrap().split("```").next().unwrap();
    let script = format!(
        "{reader}\nimport sys\nm = read_model(sys.argv[1])\n\
         assert [l['size'] for l in m['layout']] == [2, 20]\n\
         for k in 'ABCDbd': sys.stdout.buffer.write(m[k].astype('<f4').tobytes())\n"
    );
    let mut r = Random::new(1);
    let layers = vec![Layer::dense("two", 2, Activation::Tanh), Layer::dense("one", 20, Activation::Relu)];
    // Columns past 65,535 make B's and D's indices wider than the others'.
    let wide = model(sparse(22, 22, 0.2, &mut r), 70_000, 3, layers, &mut r);
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("m.safetensors");
    wide.save(&path).unwrap();
    let got = floats(&run(&python, &script, &[&path]));
    let mut wanted = Vec::new();
    for m in [wide.a(), wide.b(), wide.c(), wide.d()] {
        wanted.extend(m.to_dense().into_vec());
    }
    wanted.extend(wide.state_bias());
    wanted.extend(wide.output_bias());
    assert!(got == wanted, "the same matrices, entry by entry");
    assert!(ImplicitModel::load(&path).unwrap() == wide);
}

const RUN_ONNX: &str = "
import sys, numpy, onnx, onnxruntime
onnx.checker.check_model(onnx.load(sys.argv[1]), full_check=True)
session = onnxruntime.InferenceSession(sys.argv[1], providers=['CPUExecutionProvider'])
features = session.get_inputs()[0].shape[1:]
u = numpy.fromfile(sys.argv[2], '<f4').reshape(-1, *features)
sys.stdout.buffer.write(session.run(None, {'u': u})[0].astype('<f4').tobytes())
";

fn same_in_onnx_runtime(python: &str, model: &ImplicitModel, samples: usize, r: &mut Random) {
    let directory = tempfile::tempdir().unwrap();
    let (onnx, inputs) = (directory.path().join("m.onnx"), directory.path().join("u"));
    export_onnx(model, &onnx, OnnxSettings::default()).unwrap();
    let u = Matrix::from_fn(samples, model.shape().inputs, |_, _| r.normal() as f32);
    std::fs::write(&inputs, u.as_slice().iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>()).unwrap();
    let theirs = floats(&run(python, RUN_ONNX, &[&onnx, &inputs]));
    let ours = Equilibrium::new(model, EquilibriumSettings::default()).unwrap().outputs(&u).unwrap().y;
    assert_eq!(theirs.len(), ours.as_slice().len());
    let size = ours.as_slice().iter().fold(1.0f32, |a, b| a.max(b.abs()));
    for (a, b) in theirs.iter().zip(ours.as_slice()) {
        assert!((a - b).abs() <= 1e-5 * size, "{a} {b} of {size}");
    }
}

#[test]
fn onnx_runtime_agrees_with_us() {
    let Some(python) = python("numpy, onnx, onnxruntime") else { return };
    let mut r = Random::new(2);
    let leaky = Activation::LeakyRelu { slope: 0.1 };
    let kinds = [Activation::Relu, leaky, Activation::Tanh, Activation::Sigmoid, Activation::Identity];
    let mixed = || kinds.iter().enumerate().map(|(k, a)| Layer::dense(format!("l{k}"), 6, *a)).collect::<Vec<_>>();
    let full = sparse(30, 30, 0.3, &mut r);
    let acyclic = model(upper(&full), 11, 4, mixed(), &mut r);
    same_in_onnx_runtime(&python, &acyclic, 17, &mut r);
    let cyclic = model(with_row_sums(&full, 0.95), 11, 4, mixed(), &mut r);
    same_in_onnx_runtime(&python, &cyclic, 17, &mut r);
    // Two cycles, one feeding the other through acyclic states; norm above one.
    let rows = vec![
        vec![(0, 0.5f32), (2, 4.0)],
        vec![(0, 1.0), (3, 1.0)],
        vec![(3, 2.0)],
        vec![(4, 3.0)],
        vec![(3, -0.2)],
        vec![],
    ];
    let layers = vec![Layer::dense("x", 6, Activation::Tanh)];
    same_in_onnx_runtime(&python, &model(Csr::from_rows(6, rows), 5, 3, layers, &mut r), 9, &mut r);
    // No state at all, and states with nothing but a bias.
    same_in_onnx_runtime(&python, &model(Csr::empty(0, 0), 3, 2, vec![], &mut r), 5, &mut r);
    let mut parts = model(Csr::empty(4, 4), 3, 2, vec![Layer::dense("x", 4, leaky)], &mut r).into_parts();
    parts.b = Csr::empty(4, 3);
    parts.d = Csr::empty(2, 3);
    same_in_onnx_runtime(&python, &ImplicitModel::new(parts).unwrap(), 5, &mut r);
}

/// Every activation there is; those behind the first eleven may not lie on a cycle.
const ACTIVATIONS: [Activation; 17] = [
    Activation::Relu,
    Activation::LeakyRelu { slope: 0.1 },
    Activation::Tanh,
    Activation::Sigmoid,
    Activation::Identity,
    Activation::Clip { low: -0.3, high: 0.7 },
    Activation::Softplus,
    Activation::Softsign,
    Activation::Elu { alpha: 0.7 },
    Activation::Celu { alpha: 0.6 },
    Activation::HardSigmoid { alpha: 0.2, beta: 0.5 },
    Activation::Selu,
    Activation::HardSwish,
    Activation::Gelu,
    Activation::GeluTanh,
    Activation::Silu,
    Activation::Mish,
];

#[test]
fn every_activation_is_the_same_in_onnx_runtime() {
    let Some(python) = python("numpy, onnx, onnxruntime") else { return };
    let mut r = Random::new(21);
    for (place, activation) in ACTIVATIONS.into_iter().enumerate() {
        let layers = vec![Layer::dense("second", 4, activation), Layer::dense("first", 5, activation)];
        let full = sparse(9, 9, 0.6, &mut r);
        let between =
            Csr::from_rows(9, (0..9).map(|i| full.row(i).filter(|(j, _)| i < 4 && *j >= 4).collect::<Vec<_>>()));
        let acyclic = model(between, 6, 3, layers.clone(), &mut r);
        same_in_onnx_runtime(&python, &acyclic, 7, &mut r);
        let again = Network::from_onnx_bytes(&to_onnx(&acyclic, OnnxSettings::default()).unwrap()).unwrap();
        let read = ImplicitModel::from_network(&again).unwrap();
        assert!(read.layout().layers().iter().all(|l| l.activation == activation), "{:?}", read.layout());
        if place < 11 {
            let cyclic = model(with_row_sums(&full, 0.8), 6, 3, layers, &mut r);
            same_in_onnx_runtime(&python, &cyclic, 7, &mut r);
        }
    }
}

#[test]
fn networks_with_operators_give_the_same_in_onnx_runtime() {
    let Some(python) = python("numpy, onnx, onnxruntime") else { return };
    let mut r = Random::new(22);
    for (name, network) in crate::networks::networks() {
        let model = ImplicitModel::from_network(&network).unwrap();
        assert!(model.layout().has_operators(), "{name}");
        // A batch of several samples: no operator mixes them.
        same_in_onnx_runtime(&python, &model, 5, &mut r);
    }
}

#[test]
fn a_layered_network_is_exported_as_one() {
    let mut r = Random::new(3);
    let mut layer = |i: usize, o: usize, activation| {
        DenseLayer::new("l", Matrix::from_fn(o, i, |_, _| r.normal() as f32), activation).with_bias(vec![0.5; o])
    };
    let hidden = [layer(7, 5, Activation::Relu), layer(5, 4, Activation::Relu)];
    let output = layer(4, 2, Activation::Identity);
    let network = ImplicitModel::from_layers(&hidden, &output).unwrap();
    let bytes = to_onnx(&network, OnnxSettings::default()).unwrap();
    let count = |operator: &[u8]| bytes.windows(operator.len()).filter(|w| *w == operator).count();
    // Once as the operator and, for a product, once in the node's name; activations are named after their layers.
    assert_eq!((count(b"Gemm"), count(b"Relu"), count(b"Add"), count(b"Loop")), (6, 2, 0, 0));
    // The dense initialisers are the file: 4 bytes a weight.
    let weights = 4 * (35 + 20 + 8 + 5 + 4 + 2);
    assert!(bytes.len() > weights && bytes.len() < weights + 1200, "{}", bytes.len());
}

#[test]
fn what_cannot_be_exported_is_refused() {
    let mut r = Random::new(4);
    let layers = || vec![Layer::dense("x", 2, Activation::Relu)];
    let wild = Csr::from_rows(2, [vec![(1, 2.0f32)], vec![(0, 2.0)]]);
    let mut parts = model(wild, 3, 2, layers(), &mut r).into_parts();
    parts.c = Csr::from_rows(2, [vec![(0, 1.0f32)], vec![]]);
    let message = to_onnx(&ImplicitModel::new(parts).unwrap(), OnnxSettings::default()).unwrap_err().to_string();
    assert!(message.contains("cannot be shown"), "{message}");
    assert!(to_onnx(&model(Csr::empty(2, 2), 0, 2, layers(), &mut r), OnnxSettings::default()).is_err());
}

#[test]
fn convolutional_models_give_the_same_in_onnx_runtime() {
    let Some(python) = python("numpy, onnx, onnxruntime") else { return };
    let mut r = Random::new(12);
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data");
    for name in ["conv_new", "residual_new", "average_head_old", "average_new", "views_old"] {
        let network = Network::from_onnx(folder.join(format!("torch_{name}.onnx"))).unwrap();
        let model = ImplicitModel::from_network(&network).unwrap();
        same_in_onnx_runtime(&python, &model, 5, &mut r);
        // In other coordinates residual sums have factors.
        if let Ok(rescaled) = model.rescale(0.9) {
            same_in_onnx_runtime(&python, &rescaled.model, 5, &mut r);
        }
    }
    let resnet = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/resnet20_cifar100.onnx");
    let model = ImplicitModel::from_network(&Network::from_onnx(resnet).unwrap()).unwrap();
    same_in_onnx_runtime(&python, &model, 3, &mut r);
}

#[test]
fn the_reader_in_the_format_page_reads_taps() {
    let Some(python) = python("numpy") else { return };
    let page = include_str!("../../../../docs/format.md");
    let reader = page.split("```python\n").nth(1).unwrap().split("```").next().unwrap();
    let script = format!(
        "{reader}\nimport sys\nm = read_model(sys.argv[1])\n\
         for t in m['taps']:\n    if 'values' in t: sys.stdout.buffer.write(t['values'].astype('<f4').tobytes())\n"
    );
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/torch_residual_new.onnx");
    let model = ImplicitModel::from_network(&Network::from_onnx(path).unwrap()).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("m.safetensors");
    model.save(&file).unwrap();
    let got = floats(&run(&python, &script, &[&file]));
    let mut wanted = Vec::new();
    for block in model.taps() {
        if let TapWeights::Taps(taps) = &block.weights {
            wanted.extend(taps.to_dense().into_vec());
        }
    }
    assert!(!wanted.is_empty() && got == wanted, "the same taps, entry by entry");
}
