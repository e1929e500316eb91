//! Networks read from ONNX files compute what ONNX Runtime computes; files that cannot be read say why.
#![allow(clippy::unwrap_used, clippy::panic)] // helpers of tests are tests

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use safetensors::SafeTensors;
use simplicit::Error;
use simplicit::equilibrium::{Equilibrium, EquilibriumSettings};
use simplicit::layout::Activation;
use simplicit::linalg::{Csr, Matrix};
use simplicit::model::{ImplicitModel, TapWeights};
use simplicit::network::{Network, Shape};
use simplicit::onnx::{OnnxSelection, export_onnx_like};
use simplicit::states::StateMap;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data")
}

fn shipped(name: &str) -> Network {
    Network::from_onnx(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data").join(name)).unwrap()
}

/// Arrays of references.safetensors, one sample a row.
fn references() -> BTreeMap<String, Matrix<f32>> {
    let bytes = std::fs::read(folder().join("references.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let read = |view: safetensors::tensor::TensorView<'_>| {
        let values: Vec<f32> = view.data().as_chunks::<4>().0.iter().map(|&b| f32::from_le_bytes(b)).collect();
        let rows = view.shape()[0];
        Matrix::from_vec(rows, values.len() / rows, values).unwrap()
    };
    file.tensors().into_iter().map(|(name, view)| (name, read(view))).collect()
}

fn assert_close(what: &str, ours: &[f32], theirs: &[f32]) {
    assert_eq!(ours.len(), theirs.len(), "{what}");
    let scale = theirs.iter().fold(0.0f32, |m, v| m.max(v.abs()));
    for (k, (a, b)) in ours.iter().zip(theirs).enumerate() {
        assert!((a - b).abs() <= 1e-5 * scale, "{what}[{k}]: {a} is not {b}");
    }
}

#[test]
fn every_file_computes_what_onnx_runtime_computes() {
    let references = references();
    let mut files = 0;
    for (name, u) in references.iter().filter_map(|(key, u)| Some((key.strip_suffix(".input")?, u))) {
        if !name.starts_with("hand_") && !name.starts_with("torch_") {
            continue;
        }
        let network =
            Network::from_onnx(folder().join(format!("{name}.onnx"))).unwrap_or_else(|e| panic!("{name}: {e}"));
        let y = network.forward(u).unwrap();
        assert_close(name, y.as_slice(), references[&format!("{name}.output")].as_slice());
        assert_eq!(network.states(u).unwrap().y, y.cast(), "{name}");
        files += 1;
    }
    let stored = std::fs::read_dir(folder())
        .unwrap()
        .filter(|f| f.as_ref().unwrap().path().extension() == Some("onnx".as_ref()));
    assert_eq!(files, stored.count(), "a file without a reference");
}

#[test]
fn both_exporters_give_the_same_layers() {
    for name in ["mlp", "mlp_norm", "conv", "residual", "views", "average"] {
        let layers = |variant: &str| {
            let network = Network::from_onnx(folder().join(format!("torch_{name}_{variant}.onnx"))).unwrap();
            let layers = network.layout().layers().iter().map(|l| (l.size, l.map, l.activation)).collect::<Vec<_>>();
            (layers, network.nonzeros(), network.multiply_adds())
        };
        for variant in ["new_fixed", "old", "old_fixed"] {
            assert_eq!(layers("new"), layers(variant), "{name} {variant}");
        }
    }
}

fn check_shipped(name: &str, states: &[&str]) -> Network {
    let references = references();
    let network = shipped(&format!("{name}.onnx"));
    let u = &references[&format!("{name}.input")];
    let block = network.states(u).unwrap();
    let y = network.forward(u).unwrap();
    assert_close(name, y.as_slice(), references[&format!("{name}.output")].as_slice());
    for value in states {
        let layer = network.layout().layers().iter().position(|l| l.name == format!("node_{value}")).unwrap();
        let theirs = &references[&format!("{name}.x.{value}")];
        for sample in 0..u.rows() {
            let ours: Vec<f32> = block.x.row(sample)[network.layout().range(layer)].iter().map(|&v| v as f32).collect();
            assert_close(value, &ours, theirs.row(sample));
        }
    }
    network
}

#[test]
fn the_shipped_dense_network() {
    let network = check_shipped("fashion_fc", &["relu", "relu_1", "relu_2"]);
    assert_eq!((network.nonzeros(), network.multiply_adds()), (52_896, 52_896));
    let sizes: Vec<usize> = network.layout().layers().iter().map(|l| l.size).collect();
    assert_eq!(sizes, [16, 32, 64]);
    assert!(network.pre_activations().iter().all(|rows| rows.bias.is_none()));
}

#[test]
fn the_shipped_residual_network() {
    let network = check_shipped("resnet20_cifar100", &["relu_13", "relu_18"]);
    assert_eq!(network.nonzeros(), 277_444);
    let biases: usize =
        network.pre_activations().iter().chain([network.output()]).map(|r| r.bias.as_ref().unwrap().len()).sum();
    assert_eq!(biases, 788);
    assert_eq!(network.layout().size(), 188_416);
    assert_eq!(network.layout().layers().len(), 19);
    assert!(network.layout().layers().iter().all(|l| l.activation == Activation::Relu && l.map.is_some()));
    assert_eq!((network.input_shape(), network.output_shape()), (Shape::map(3, 32, 32), Shape::Vector(100)));
}

#[test]
fn every_file_is_written_again_with_other_weights() {
    let references = references();
    let folder_out = tempfile::tempdir().unwrap();
    let mut written = 0;
    for (name, u) in references.iter().filter_map(|(key, u)| Some((key.strip_suffix(".input")?, u))) {
        let path = folder().join(format!("{name}.onnx"));
        if !path.exists() {
            continue;
        }
        // Half of the weights become zero: the file must compute what the model computes.
        let model = ImplicitModel::from_network(&Network::from_onnx(&path).unwrap()).unwrap();
        let mut parts = model.into_parts();
        let thin = |m: &Csr<f32>| {
            let rows = (0..m.rows()).map(|i| m.row(i).filter(|(j, _)| (i + j) % 2 == 0).collect::<Vec<_>>());
            Csr::from_rows(m.cols(), rows)
        };
        (parts.a, parts.b, parts.c, parts.d) = (thin(&parts.a), thin(&parts.b), thin(&parts.c), thin(&parts.d));
        for block in &mut parts.taps {
            if let TapWeights::Taps(taps) = &mut block.weights {
                *taps = thin(taps);
            }
        }
        let model = ImplicitModel::new(parts).unwrap();
        let out = folder_out.path().join(format!("{name}.onnx"));
        export_onnx_like(&model, &path, &OnnxSelection::default(), &out).unwrap_or_else(|e| panic!("{name}: {e}"));
        let again = Network::from_onnx(&out).unwrap_or_else(|e| panic!("{name}: {e}"));
        let equilibrium = Equilibrium::new(&model, EquilibriumSettings::default()).unwrap();
        let y = again.forward(u).unwrap();
        assert_close(name, y.as_slice(), equilibrium.outputs(u).unwrap().y.as_slice());
        assert!(again.nonzeros() <= model.sparsity().nonzeros as usize, "{name}");
        written += 1;
    }
    assert!(written > 40, "{written} files");
}

#[test]
fn damaged_files_are_errors_and_never_panics() {
    let names =
        ["torch_residual_old_unfolded", "torch_views_old", "hand_asymmetric", "hand_flatten_gather", "hand_norms"];
    let mut random = simplicit::random::Random::new(1);
    for name in names {
        let bytes = std::fs::read(folder().join(format!("{name}.onnx"))).unwrap();
        let input = Network::from_onnx_bytes(&bytes).unwrap().input_shape().size();
        for length in (0..bytes.len()).step_by(7) {
            drop(Network::from_onnx_bytes(&bytes[..length]));
        }
        for _ in 0..3000 {
            let mut damaged = bytes.clone();
            for _ in 0..1 + random.below(4) {
                let place = random.below(damaged.len());
                damaged[place] = random.bits() as u8;
            }
            // Whatever is still a small network must also run.
            if let Ok(network) = Network::from_onnx_bytes(&damaged)
                && network.input_shape().size() == input
            {
                network.forward(&Matrix::zeros(1, input)).unwrap();
            }
        }
    }
    assert!(matches!(Network::from_onnx_bytes(b"not a network"), Err(Error::File { .. })));
    assert!(matches!(Network::from_onnx_bytes(b""), Err(Error::File { .. })));
    assert!(matches!(Network::from_onnx(folder().join("missing.onnx")), Err(Error::Io { .. })));
}
