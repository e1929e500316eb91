//! The model file: every model survives, nothing damaged gets in.

#![allow(clippy::unwrap_used)] // helpers of tests, outside #[test] functions

use std::collections::BTreeMap;

use proptest::prelude::*;
use simplicit::arrays::Preprocessing;
use simplicit::files::tensors::{Dtype, Tensor, Tensors, encode};
use simplicit::layout::{Activation, Layer, Layout};
use simplicit::linalg::Csr;
use simplicit::model::{ImplicitModel, ModelMetadata, ModelParts, Scaling};
use simplicit::random::Random;

fn sparse(rows: usize, cols: usize, density: f64, r: &mut Random) -> Csr<f32> {
    let rows: Vec<Vec<_>> = (0..rows)
        .map(|_| (0..cols).map(|j| (j, if r.uniform() < density { value(r) } else { 0.0 })).collect())
        .collect();
    Csr::from_rows(cols, rows)
}

/// Any finite f32 at all, the odd ones included.
fn value(r: &mut Random) -> f32 {
    let v = f32::from_bits(r.bits() as u32);
    if v.is_finite() { v } else { 1.0 }
}

fn model(n: usize, p: usize, q: usize, density: f64, seed: u64) -> ImplicitModel {
    let r = &mut Random::new(seed);
    let activations = [
        Activation::Relu,
        Activation::LeakyRelu { slope: 0.1 },
        Activation::Tanh,
        Activation::Sigmoid,
        Activation::Identity,
    ];
    let cut = r.below(n + 1);
    let names = ["", "last \"quoted\" \\ é\n", "first"];
    let layers =
        [0, cut, n - cut].into_iter().zip(names).map(|(s, name)| Layer::dense(name, s, activations[r.below(5)]));
    let layout = Layout::new(layers.collect());
    ImplicitModel::new(ModelParts {
        a: sparse(n, n, density, r),
        b: sparse(n, p, density, r),
        c: sparse(q, n, density, r),
        d: sparse(q, p, density, r),
        state_bias: (0..n).map(|_| value(r)).collect(),
        output_bias: (0..q).map(|_| value(r)).collect(),
        taps: Vec::new(),
        layout,
        preprocessing: Preprocessing { scale: 1.0 / 255.0, mean: vec![r.normal()], std: vec![r.uniform() + 0.1] },
        metadata: ModelMetadata {
            kappa: (r.below(2) == 0).then(|| r.uniform() + 1e-9),
            scaling: (r.below(2) == 0)
                .then(|| Scaling { states: (0..n).map(|_| r.normal().exp()).collect(), outputs: r.normal().exp() }),
            provenance: (0..r.below(4)).map(|k| (format!("key {k}"), format!("{}", r.normal()))).collect(),
            baseline_nonzeros: (r.below(2) == 0).then(|| r.bits()),
            baseline_multiply_adds: None,
            kept: Vec::new(),
        },
    })
    .unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..Default::default() })]

    #[test]
    fn models_survive_bit_by_bit(n in 0usize..20, p in 0usize..30, q in 0usize..6, density in 0.0..1.0, seed: u64) {
        let model = model(n, p, q, density, seed);
        let bytes = model.to_bytes();
        let read = ImplicitModel::from_bytes(&bytes, "m").unwrap();
        prop_assert!(read == model);
        prop_assert!(read.to_bytes() == bytes, "the same model, the same bytes");
        prop_assert_eq!(model.sparsity().bytes, bytes.len() as u64);
        // The safetensors crate agrees on what is in it.
        let theirs = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        prop_assert_eq!(theirs.len(), 14);
    }

    #[test]
    fn a_flipped_bit_never_panics(seed: u64, at: prop::sample::Index, bit in 0u8..8) {
        let mut bytes = model(6, 5, 2, 0.5, seed).to_bytes();
        let at = at.index(bytes.len());
        bytes[at] ^= 1 << bit;
        let _ = ImplicitModel::from_bytes(&bytes, "m");
    }
}

#[test]
fn truncated_files_are_refused_at_every_length() {
    let bytes = model(5, 4, 2, 0.5, 1).to_bytes();
    for length in 0..bytes.len() {
        assert!(ImplicitModel::from_bytes(&bytes[..length], "m").is_err(), "{length} of {}", bytes.len());
    }
}

#[test]
fn indices_are_as_narrow_as_fits() {
    let wide = model(3, 70_000, 1, 0.01, 2);
    let bytes = wide.to_bytes();
    let tensors = Tensors::decode(&bytes).unwrap();
    let dtype = |name: &str| tensors.get(name).unwrap().dtype;
    assert_eq!((dtype("A.indices"), dtype("B.indices"), dtype("B.indptr")), (Dtype::U16, Dtype::I32, Dtype::U16));
}

#[test]
fn written_whole_and_read_back() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("m.safetensors");
    let first = model(4, 3, 2, 0.5, 3);
    first.save(&path).unwrap();
    assert_eq!(ImplicitModel::load(&path).unwrap(), first);
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1, "no temporary file is left");
    assert!(ImplicitModel::load(directory.path()).is_err());
    assert!(ImplicitModel::load(directory.path().join("none")).is_err());
}

/// Takes a valid file apart, lets `change` at it and puts it together again.
fn tampered(change: impl Fn(&mut BTreeMap<String, String>, &mut BTreeMap<String, Tensor<'static>>)) -> String {
    let bytes = model(4, 3, 2, 0.9, 4).to_bytes();
    let read = Tensors::decode(&bytes).unwrap();
    let mut metadata = read.metadata().clone();
    let mut tensors: BTreeMap<String, Tensor<'static>> = read
        .names()
        .map(|name| {
            let t = read.get(name).unwrap();
            (name.to_string(), Tensor { dtype: t.dtype, shape: t.shape.clone(), bytes: t.bytes.to_vec().into() })
        })
        .collect();
    change(&mut metadata, &mut tensors);
    match ImplicitModel::from_bytes(&encode(&metadata, &tensors), "m.safetensors") {
        Ok(_) => "accepted".into(),
        Err(e) => e.to_string(),
    }
}

fn put(metadata: &mut BTreeMap<String, String>, key: &str, value: &str) {
    metadata.insert(key.into(), value.into());
}

#[test]
fn hostile_contents_are_named() {
    type Metadata = BTreeMap<String, String>;
    type TensorMap = BTreeMap<String, Tensor<'static>>;
    assert_eq!(tampered(|_, _| {}), "accepted");
    let indices = |v: &[usize]| Tensor::indices(v.iter().copied(), 70_000);
    type Change = Box<dyn Fn(&mut Metadata, &mut TensorMap)>;
    let cases: Vec<(&str, Change)> = vec![
        ("format", Box::new(|m, _| put(m, "format", "other"))),
        ("update it", Box::new(|m, _| put(m, "version", "4"))),
        ("\"shape\" is missing", Box::new(|m, _| drop(m.remove("shape")))),
        ("metadata \"shape\"", Box::new(|m, _| put(m, "shape", "{\"inputs\":-3,\"states\":4,\"outputs\":2}"))),
        ("at most 2^31", Box::new(|m, _| put(m, "shape", "{\"inputs\":99999999999,\"states\":4,\"outputs\":2}"))),
        ("layout of 4 units", Box::new(|m, _| put(m, "shape", "{\"inputs\":3,\"states\":5,\"outputs\":2}"))),
        ("B.indices", Box::new(|m, _| put(m, "shape", "{\"inputs\":2,\"states\":4,\"outputs\":2}"))),
        ("layout", Box::new(|m, _| put(m, "layout", "[{\"name\":\"x\",\"size\":4,\"activation\":\"swoosh\"}]"))),
        (
            "layout",
            Box::new(|m, _| {
                put(m, "layout", "[{\"name\":\"x\",\"size\":99999999999999999999,\"activation\":\"relu\"}]")
            }),
        ),
        ("leaky", Box::new(|m, _| put(m, "layout", "[{\"name\":\"x\",\"size\":4,\"activation\":\"leaky-relu:NaN\"}]"))),
        (
            "map of another size",
            Box::new(|m, _| {
                let map = "{\"channels\":4294967296,\"height\":4294967296,\"width\":1}";
                put(m, "layout", &format!("[{{\"name\":\"x\",\"size\":4,\"activation\":\"relu\",\"map\":{map}}}]"))
            }),
        ),
        ("std", Box::new(|m, _| put(m, "preprocessing", "{\"scale\":1.0,\"mean\":[0.0],\"std\":[0.0]}"))),
        ("mean", Box::new(|m, _| put(m, "preprocessing", "{\"scale\":1.0,\"mean\":[0.0,1.0],\"std\":[1.0]}"))),
        ("kappa", Box::new(|m, _| put(m, "kappa", "-1"))),
        ("kappa", Box::new(|m, _| put(m, "kappa", "\"x\""))),
        ("scaling", Box::new(|m, _| put(m, "scaling", "{\"states\":[1.0],\"outputs\":1.0}"))),
        ("baseline", Box::new(|m, _| put(m, "baseline", "{\"nonzeros\":-1,\"multiply_adds\":null}"))),
        ("unknown tensor \"taps.0.data\"", Box::new(|_, t| drop(t.insert("taps.0.data".into(), Tensor::f32(&[1.0]))))),
        ("\"A.data\" is missing", Box::new(|_, t| drop(t.remove("A.data")))),
        ("\"b\": expected shape [4]", Box::new(|_, t| drop(t.insert("b".into(), Tensor::f32(&[1.0]))))),
        ("b: NaN at row 1", Box::new(|_, t| drop(t.insert("b".into(), Tensor::f32(&[1.0, f32::NAN, 1.0, 1.0]))))),
        ("d: inf at row 0", Box::new(|_, t| drop(t.insert("d".into(), Tensor::f32(&[f32::INFINITY, 1.0]))))),
        ("expected F32", Box::new(move |_, t| drop(t.insert("d".into(), indices(&[1, 2]))))),
        (
            "A: NaN at row",
            Box::new(|_, t| {
                let count = t["A.data"].shape[0];
                t.insert("A.data".into(), Tensor::f32(&vec![f32::NAN; count]));
            }),
        ),
        (
            "stored zero",
            Box::new(|_, t| {
                let count = t["A.data"].shape[0];
                t.insert("A.data".into(), Tensor::f32(&vec![0.0; count]));
            }),
        ),
        (
            "ascending columns",
            Box::new(move |_, t| {
                let count = t["A.data"].shape[0];
                t.insert("A.indices".into(), indices(&vec![0; count]));
            }),
        ),
        (
            "expected 0 to 3",
            Box::new(move |_, t| {
                let count = t["A.data"].shape[0];
                t.insert("A.indices".into(), indices(&vec![4; count]));
            }),
        ),
        ("A.indptr", Box::new(move |_, t| drop(t.insert("A.indptr".into(), indices(&[0, 3, 2, 3, 4]))))),
        (
            "A.indptr",
            Box::new(move |_, t| drop(t.insert("A.indptr".into(), indices(&[0, 60_000, 60_000, 60_000, 60_000])))),
        ),
        ("A.indptr", Box::new(move |_, t| drop(t.insert("A.indptr".into(), indices(&[0, 0]))))),
        (
            "expected a vector",
            Box::new(|_, t| {
                let data = t.get_mut("A.data").unwrap();
                data.shape = vec![1, data.shape[0]];
            }),
        ),
    ];
    for (expected, change) in cases {
        let message = tampered(change);
        assert!(message.starts_with("m.safetensors: ") && message.contains(expected), "{expected:?}: {message}");
        assert!(!message.contains('\n'));
    }
}
