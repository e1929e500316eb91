//! The networks that are refused, and whether the message names the node, its operator and an alternative.

use std::collections::HashSet;

use prost::Message;

use super::proto::*;
use super::{OnnxSelection, export_onnx_like};
use crate::equilibrium::{Equilibrium, EquilibriumSettings};
use crate::layout::Activation;
use crate::linalg::{Csr, Matrix};
use crate::model::{ImplicitModel, TapWeights};
use crate::network::{Network, Shape, Weights};
use crate::random::Random;
use crate::states::StateMap;
use crate::{Error, Result};

fn value(name: &str, dims: &[i64]) -> ValueInfoProto {
    let dim = |&d: &i64| DimensionProto { value: (d > 0).then_some(DimensionValue::Value(d)) };
    let shape = Some(TensorShapeProto { dim: dims.iter().map(dim).collect() });
    let tensor_type = Some(TensorTypeProto { elem_type: Some(data_type::FLOAT), shape });
    ValueInfoProto { name: name.into(), kind: Some(TypeProto { tensor_type }), ..Default::default() }
}

fn floats(name: &str, dims: &[i64]) -> TensorProto {
    let count = dims.iter().product::<i64>() as usize;
    let float_data = (0..count).map(|k| (k % 7) as f32 - 3.0).collect();
    TensorProto { name: name.into(), dims: dims.to_vec(), data_type: Some(1), float_data, ..Default::default() }
}

fn shape(name: &str, dims: &[i64]) -> TensorProto {
    let int64_data = dims.to_vec();
    TensorProto {
        name: name.into(),
        dims: vec![dims.len() as i64],
        data_type: Some(data_type::INT64),
        int64_data,
        ..Default::default()
    }
}

fn ints(name: &str, ints: &[i64]) -> AttributeProto {
    AttributeProto { name: name.into(), ints: ints.to_vec(), ..Default::default() }
}

fn int(name: &str, i: i64) -> AttributeProto {
    AttributeProto { name: name.into(), i: Some(i), ..Default::default() }
}

fn node(op: &str, inputs: &str, output: &str, attribute: Vec<AttributeProto>) -> NodeProto {
    NodeProto {
        input: inputs.split(' ').map(String::from).collect(),
        output: vec![output.into()],
        name: format!("the_{output}"),
        op_type: op.into(),
        attribute,
        ..Default::default()
    }
}

fn model(input: &[i64], nodes: Vec<NodeProto>, initializer: Vec<TensorProto>) -> ModelProto {
    ModelProto {
        ir_version: Some(8),
        opset_import: vec![OperatorSetIdProto { domain: String::new(), version: Some(17) }],
        graph: Some(GraphProto {
            node: nodes,
            initializer,
            input: vec![value("x", input)],
            output: vec![value("y", &[])],
            ..Default::default()
        }),
        ..Default::default()
    }
}

fn read(model: &ModelProto) -> Result<Network> {
    Network::from_onnx_bytes(&model.encode_to_vec())
}

#[track_caller]
fn refused(model: ModelProto, words: &[&str]) {
    let message = read(&model).expect_err("this should be refused").to_string();
    for word in words {
        assert!(message.contains(word), "{message:?} does not say {word:?}");
    }
    assert!(!message.contains('\n'));
}

#[test]
fn unsupported_nodes_are_named_with_a_way_out() {
    let image = [0, 2, 6, 6];
    let kernel = || vec![floats("w", &[4, 2, 3, 3]), floats("g", &[4, 1, 3, 3]), floats("c", &[4, 2, 1, 1, 1])];
    let conv = |weights: &str, attribute| model(&image, vec![node("Conv", weights, "y", attribute)], kernel());
    read(&conv("x w", vec![])).unwrap();
    read(&conv("x g", vec![int("group", 2)])).unwrap();
    read(&conv("x w", vec![ints("dilations", &[2, 2])])).unwrap();
    refused(conv("x w", vec![ints("pads", &[1, 1])]), &["\"the_y\" (Conv)", "pads", "4 numbers"]);
    refused(conv("x w", vec![ints("strides", &[0, 1])]), &["strides"]);
    refused(conv("x g", vec![]), &["weights of a convolution", "2 · 3 · 3"]);
    refused(conv("x g", vec![int("group", 3)]), &["groups", "divisor"]);
    refused(conv("x c", vec![]), &["three axes", "[1, 2, 6, 6]"]);
    let volume = |sizes: &[i64]| {
        model(&[0, 2, 4, 6, 6], vec![node("Conv", "x w", "y", vec![])], vec![floats("w", &[&[4, 2], sizes].concat())])
    };
    read(&volume(&[1, 3, 3])).unwrap();
    read(&volume(&[2, 1, 1])).unwrap();
    refused(volume(&[2, 3, 3]), &["a convolution with weights", "over three"]);

    let pool = |op: &str, attribute| model(&image, vec![node(op, "x", "y", attribute)], vec![]);
    refused(pool("MaxPool", vec![]), &["kernel_shape"]);
    let ragged = vec![ints("kernel_shape", &[3, 3]), ints("strides", &[2, 2]), int("ceil_mode", 1)];
    assert_eq!(read(&pool("MaxPool", ragged)).unwrap().output_shape(), Shape::map(2, 3, 3));
    read(&pool("ReduceMean", vec![ints("axes", &[1])])).unwrap();
    read(&pool("Softmax", vec![])).unwrap();
    refused(pool("TopK", vec![]), &["(TopK)", "counterpart", "--output"]);

    let dense = |nodes| model(&[0, 3], nodes, vec![floats("w", &[3, 3]), floats("v", &[3])]);
    read(&dense(vec![node("MatMul", "x v", "y", vec![])])).unwrap();
    refused(dense(vec![node("Gemm", "x z", "y", vec![])]), &["\"z\"", "before this node"]);
    refused(dense(vec![node("Relu", "w", "y", vec![])]), &["computed from the input"]);
    refused(dense(vec![node("Relu", "x", "w", vec![]), node("Relu", "w", "y", vec![])]), &["\"w\"", "exists already"]);
    refused(dense(vec![node("Relu", "x", "z", vec![])]), &["output \"y\""]);
    let foreign = NodeProto { domain: "com.microsoft".into(), ..node("Relu", "x", "y", vec![]) };
    refused(dense(vec![foreign]), &["com.microsoft", "custom"]);
    // Tokens: every token has the same linear map.
    read(&model(&[0, 4, 3], vec![node("MatMul", "x w", "y", vec![])], vec![floats("w", &[3, 3])])).unwrap();
}

#[test]
fn all_nodes_that_cannot_be_read_are_named_at_once() {
    let nodes = vec![
        node("Relu", "x", "a", vec![]),
        node("TopK", "a", "b", vec![]),
        node("Relu", "b", "c", vec![]),
        node("LSTM", "a", "d", vec![]),
        node("Add", "c d", "y", vec![]),
        node("NonMaxSuppression", "a", "unused", vec![]),
    ];
    let file = model(&[0, 3], nodes, vec![]);
    refused(file.clone(), &["2 nodes", "\"the_b\" (TopK)", "\"the_d\" (LSTM)"]);
    let message = read(&file).unwrap_err().to_string();
    assert!(!message.contains("the_c") && !message.contains("unused"), "{message}");
}

#[test]
fn a_reshape_keeps_the_batch_where_the_output_needs_it() {
    let reshape = |input: &[i64], target: &[i64]| {
        read(&model(input, vec![node("Reshape", "x t", "y", vec![])], vec![shape("t", target)]))
    };
    for target in [&[0, -1][..], &[-1, 12], &[0, 3, 4], &[-1, 3, 2, 2], &[0, 0, 4], &[1, 12]] {
        assert!(reshape(&[0, 3, 4], target).is_ok(), "{target:?}");
    }
    for target in [&[-1][..], &[12], &[-1, 6], &[6, -1], &[2, 12], &[-1, -1], &[0, 5, -1], &[0, 12, 0], &[]] {
        let message = reshape(&[0, 3, 4], target).expect_err("mixes samples").to_string();
        assert!(message.contains("batch"), "{message}");
    }
    assert!(reshape(&[2, 3, 4], &[2, 12]).is_ok(), "a fixed batch may be named");
    assert!(reshape(&[2, 3, 4], &[3, 8]).is_err());
}

#[test]
fn a_batch_norm_that_cannot_be_folded_is_a_product_and_a_sum() {
    let norm = || ["s", "b", "m"].map(|name| floats(name, &[2]));
    let variance = TensorProto { float_data: vec![1.0, 2.0], ..floats("v", &[2]) };
    let network = |pads: &[i64]| {
        let nodes = vec![
            node("BatchNormalization", "x s b m v", "n", vec![]),
            node("Conv", "n w", "y", vec![ints("pads", pads)]),
        ];
        let constants = norm().into_iter().chain([variance.clone(), floats("w", &[3, 2, 3, 3])]).collect();
        read(&model(&[0, 2, 6, 6], nodes, constants)).unwrap()
    };
    // Zeros of the padding are not shifted, so only the inner positions are the same.
    let (folded, padded) = (network(&[0; 4]), network(&[1; 4]));
    let u = crate::linalg::Matrix::from_fn(2, 72, |i, j| ((i * 31 + j * 7) % 13) as f32 / 5.0 - 1.0);
    let (a, b) = (folded.forward(&u).unwrap(), padded.forward(&u).unwrap());
    for sample in 0..2 {
        for (k, &v) in a.row(sample).iter().enumerate() {
            let (c, y, x) = (k / 16, k / 4 % 4, k % 4);
            let other = b.row(sample)[(c * 6 + y + 1) * 6 + x + 1];
            assert!((v - other).abs() <= 1e-4 * (1.0 + v.abs()), "{v} is not {other}");
        }
    }
}

#[test]
fn the_file_as_a_whole_is_checked() {
    let plain = || model(&[0, 3], vec![node("Relu", "x", "y", vec![])], vec![]);
    read(&plain()).unwrap();
    let mut old = plain();
    old.opset_import[0].version = Some(6);
    refused(old, &["opset 6", "7"]);
    let mut two = plain();
    two.graph.as_mut().unwrap().input.push(value("z", &[0, 3]));
    refused(two, &["\"x\", \"z\"", "--input"]);
    let mut two = plain();
    two.graph.as_mut().unwrap().output.push(value("x", &[0, 3]));
    refused(two, &["outputs", "--output"]);
    refused(model(&[0, 3, 0, 8], vec![node("Relu", "x", "y", vec![])], vec![]), &["fixed size", "--input-shape 3xNx8"]);
    refused(model(&[0], vec![node("Relu", "x", "y", vec![])], vec![]), &["one axis"]);
    refused(model(&[0, 1 << 40, 1 << 40, 1 << 40], vec![node("Relu", "x", "y", vec![])], vec![]), &["memory"]);
    refused(model(&[0, 1 << 40, 1], vec![node("Relu", "x", "y", vec![])], vec![]), &["units"]);
    let external = TensorProto { data_location: Some(1), ..floats("w", &[3, 3]) };
    refused(model(&[0, 3], vec![node("Gemm", "x w", "y", vec![])], vec![external]), &["(Gemm)", "one file"]);
    let error = read(&model(&[0, 3], vec![node("Gemm", "x w", "y", vec![])], vec![floats("w", &[2, 2])])).unwrap_err();
    assert!(matches!(error, Error::Shape { .. }), "{error}");
}

#[test]
fn a_small_file_cannot_ask_for_gigabytes() {
    // One large constant used a thousand times over.
    let layers = (0..1000).map(|k| {
        let (from, to) = if k == 0 { ("x".into(), "h0".into()) } else { (format!("h{}", k - 1), format!("h{k}")) };
        node("Gemm", &format!("{from} w"), &to, vec![])
    });
    let mut nodes: Vec<NodeProto> = layers.collect();
    nodes.push(node("Identity", "h999", "y", vec![]));
    let mut bomb = model(&[0, 1000], nodes, vec![floats("w", &[1000, 1000])]);
    refused(bomb.clone(), &["(Gemm)", "proportion"]);
    // Constants computed from a few bytes.
    let mut nodes = vec![node("ConstantOfShape", "big", "c0", vec![])];
    nodes.extend((0..40).map(|k| node("Exp", &format!("c{k}"), &format!("c{}", k + 1), vec![])));
    nodes.push(node("Add", "x c40", "y", vec![]));
    let computed = |dims: &[i64]| model(&[0, 4], nodes.clone(), vec![shape("big", dims)]);
    refused(computed(&[1 << 12, 1 << 12]), &["(Exp)", "proportion"]);
    refused(computed(&[1 << 40, 1 << 40]), &["2^24"]);
    // Deep sums must not recurse.
    let sums = (0..50_000).map(|k| {
        let from = if k == 0 { "x".to_string() } else { format!("h{}", k - 1) };
        node("Add", &format!("{from} x"), &format!("h{k}"), vec![])
    });
    let graph = bomb.graph.as_mut().unwrap();
    graph.node = sums.chain([node("Identity", "h49999", "y", vec![])]).collect();
    graph.input = vec![value("x", &[0, 2])];
    assert_eq!(read(&bomb).unwrap().output().terms.len(), 50_001);
}

#[test]
fn what_a_file_leaves_open_is_said_or_asked_for() {
    let file = |selection: &OnnxSelection| {
        let mut file =
            model(&[0, 3, 0, 8], vec![node("Relu", "x", "h", vec![]), node("Add", "h z", "y", vec![])], vec![]);
        file.graph.as_mut().unwrap().input.push(value("z", &[0, 3, 1, 1]));
        Network::from_onnx_bytes_selected(&file.encode_to_vec(), selection)
    };
    let given = |input_shape: &[usize], fill: &[(&str, f32)]| OnnxSelection {
        input: Some("x".into()),
        output: None,
        input_shape: Some(input_shape.to_vec()),
        fill: fill.iter().map(|(name, value)| ((*name).to_string(), *value)).collect(),
    };
    for sizes in [&[3, 5, 8][..], &[1, 3, 5, 8]] {
        let network = file(&given(sizes, &[("z", 2.0)])).unwrap();
        assert_eq!(network.input_shape(), Shape::map(3, 5, 8));
        let y = network.forward(&crate::linalg::Matrix::from_fn(1, 120, |_, j| j as f32 - 60.0)).unwrap();
        assert_eq!((y[(0, 0)], y[(0, 119)]), (2.0, 61.0));
    }
    for (sizes, fill, words) in [
        (&[3, 5, 7][..], &[("z", 2.0)][..], ["--input-shape", "3x5x7"]),
        (&[3, 5], &[("z", 2.0)], ["--input-shape", "3x5"]),
        (&[2, 3, 5, 8], &[("z", 2.0)], ["--input-shape", "2x3x5x8"]),
        (&[3, 5, 8], &[], ["--fill", "several of the inputs"]),
        (&[3, 5, 8], &[("x", 2.0)], ["--fill", "\"z\""]),
        (&[3, 5, 8], &[("w", 2.0)], ["--fill", "\"w\""]),
    ] {
        let message = file(&given(sizes, fill)).unwrap_err().to_string();
        assert!(words.iter().all(|word| message.contains(word)), "{message}");
    }
    assert_eq!(OnnxSelection::parse_shape("3x48×192").unwrap(), [3, 48, 192]);
    assert_eq!(OnnxSelection::parse_fill("a=1, b=x=0.5").unwrap(), [("a".into(), 1.0), ("b=x".into(), 0.5)]);
    for wrong in ["", "3x", "0x2", "3,4", "-1x2"] {
        assert!(OnnxSelection::parse_shape(wrong).is_err(), "{wrong}");
    }
    for wrong in ["", "a", "a=", "=1", "a=1,", "a=nan"] {
        assert!(OnnxSelection::parse_fill(wrong).is_err(), "{wrong}");
    }
}

/// Random constants, one tensor a word such as `w:4x3x3x3`; those whose names begin with v are positive.
fn constants(text: &str) -> Vec<TensorProto> {
    let mut random = Random::new(text.len() as u64);
    let one = |word: &str| {
        let (name, sizes) = word.split_once(':').unwrap();
        let dims: Vec<i64> = sizes.split('x').map(|d| d.parse().unwrap()).collect();
        let mut value = || random.normal() as f32 * 0.4;
        let float_data = (0..dims.iter().product::<i64>()).map(|_| value());
        let float_data = float_data.map(|v| if name.starts_with('v') { 0.4 + v.abs() } else { v }).collect();
        TensorProto { name: name.into(), dims, data_type: Some(1), float_data, ..Default::default() }
    };
    text.split(' ').map(one).collect()
}

fn number(name: &str, value: f32) -> TensorProto {
    TensorProto { name: name.into(), data_type: Some(1), float_data: vec![value], ..Default::default() }
}

/// One node a line, as `y = Conv x w`; padded where it says so.
fn nodes(text: &str) -> Vec<NodeProto> {
    let one = |line: &str| {
        let (output, rest) = line.split_once(" = ").unwrap();
        let (op, rest) = rest.split_once(' ').unwrap();
        let (inputs, about) = rest.split_once(" | ").unwrap_or((rest, ""));
        let attribute = |word: &str| match word {
            "padded" => ints("pads", &[1, 1, 1, 1]),
            "strided" => ints("strides", &[2, 2]),
            "grouped" => int("group", 4),
            "flat" => int("keepdims", 0),
            "over_maps" => ints("axes", &[2, 3]),
            "channels_first" => ints("perm", &[0, 3, 1, 2]),
            "second" => int("axis", 1),
            other => panic!("{other:?}"),
        };
        node(op, inputs, output, about.split_whitespace().map(attribute).collect())
    };
    text.lines().map(str::trim).filter(|line| !line.is_empty()).map(one).collect()
}

/// How often weights stand in a network.
fn maps(network: &Network) -> usize {
    let rows = network.pre_activations().iter().chain([network.output()]);
    rows.flat_map(|rows| &rows.terms).filter(|term| term.weights != Weights::Identity).count()
}

/// The model of a network with a third of its weights gone.
fn thinned(network: &Network) -> ImplicitModel {
    let mut parts = ImplicitModel::from_network(network).unwrap().into_parts();
    let thin = |m: &Csr<f32>| {
        let rows = (0..m.rows()).map(|i| m.row(i).filter(|(j, _)| (i + j) % 3 != 0).collect::<Vec<_>>());
        Csr::from_rows(m.cols(), rows)
    };
    (parts.a, parts.b, parts.c, parts.d) = (thin(&parts.a), thin(&parts.b), thin(&parts.c), thin(&parts.d));
    for block in &mut parts.taps {
        if let TapWeights::Taps(taps) = &mut block.weights {
            *taps = thin(taps);
        }
    }
    ImplicitModel::new(parts).unwrap()
}

/// Files of which scales and shifts cannot be folded everywhere, and how many maps with weights they have.
fn scaled_files() -> Vec<(&'static str, usize, ModelProto)> {
    let image = [0, 3, 6, 6];
    let head = "p = GlobalAveragePool c\nf = Flatten p\ny = Gemm f o ob";
    let case = |name, count, input: &[i64], text: &str, stored: &str| {
        let stored =
            [constants(stored), vec![number("half", 0.5), number("tenth", 0.1), number("beta", 1.702)]].concat();
        (name, count, model(input, nodes(text), stored))
    };
    let norm = "s:4 t:4 m:4 v:4 s2:4 t2:4 m2:4 v2:4";
    let with_norm = |rest: &str| format!("{norm} {rest}");
    let with_head = |rest: &str| format!("{norm} o:4x5 ob:5 {rest}");
    vec![
        case(
            "normalised image, padded",
            2,
            &image,
            &format!("a = Sub x mean\nb = Div a vstd\nc = Conv b w | padded\n{head}"),
            &with_head("mean:3x1x1 vstd:3x1x1 w:4x3x3x3"),
        ),
        case(
            "norm, padded",
            2,
            &[0, 4, 6, 6],
            &format!("a = BatchNormalization x s t m v\nc = Conv a w b | padded\n{head}"),
            &with_head("w:4x4x3x3 b:4"),
        ),
        case(
            "convolution, activation, norm, padded",
            3,
            &image,
            &format!(
                "a = Conv x w0 | padded\nr = Relu a\nn = BatchNormalization r s t m v\nc = Conv n w | padded\n{head}"
            ),
            &with_head("w0:4x3x3x3 w:4x4x3x3"),
        ),
        case(
            "norm, grouped",
            3,
            &image,
            &format!("a = Conv x w0\nr = Relu a\nn = BatchNormalization r s t m v\nc = Conv n w | grouped\n{head}"),
            &with_head("w0:4x3x1x1 w:4x1x3x3"),
        ),
        case(
            "norm, transposed",
            2,
            &image,
            "a = Conv x w0\nr = Relu a\nn = BatchNormalization r s t m v\ny = ConvTranspose n w | strided padded",
            &with_norm("w0:4x3x1x1 w:4x3x4x4"),
        ),
        case(
            "channels last, norm, padded",
            2,
            &[0, 6, 6, 4],
            &format!(
                "h = Transpose x | channels_first\na = BatchNormalization h s t m v\nc = Conv a w | padded\n{head}"
            ),
            &with_head("w:4x4x3x3"),
        ),
        case(
            "norm read by a padded convolution and another",
            4,
            &image,
            &format!(
                "a = Conv x w0\nr = Relu a\nn = BatchNormalization r s t m v\nd = Conv n w | padded\ne = Conv n w1\n\
                 c = Add d e\n{head}"
            ),
            &with_head("w0:4x3x1x1 w:4x4x3x3 w1:4x4x1x1"),
        ),
        case(
            "quick GELU",
            2,
            &[0, 6],
            "h = Gemm x w b\na = Mul h beta\ng = Sigmoid a\nq = Mul h g\ny = Gemm q o",
            "w:6x8 b:8 o:8x5",
        ),
        case(
            "quick GELU of tokens",
            2,
            &[0, 5, 6],
            "h = MatMul x w\ni = Add h b\na = Mul i beta\ng = Sigmoid a\nq = Mul i g\ny = MatMul q o",
            "w:6x8 b:8 o:8x5",
        ),
        case(
            "leak by hand",
            2,
            &image,
            &format!("h = Conv x w | padded\nr = Relu h\na = Mul h tenth\nc = Add r a\n{head}"),
            &with_head("w:4x3x3x3"),
        ),
        case(
            "two norms of one convolution",
            2,
            &image,
            &format!(
                "h = Conv x w | padded\na = BatchNormalization h s t m v\nb = BatchNormalization h s2 t2 m2 v2\n\
                 r = Relu a\ng = Sigmoid b\nc = Mul r g\n{head}"
            ),
            &with_head("w:4x3x3x3"),
        ),
        case(
            "norm of a convolution that another output is",
            2,
            &image,
            &format!("h = Conv x w | padded\na = BatchNormalization h s t m v\nc = Relu a\n{head}\nz = Sigmoid h"),
            &with_head("w:4x3x3x3"),
        ),
        case(
            "layer norm of a vector",
            2,
            &[0, 6],
            "h = Gemm x w b\nn = LayerNormalization h s t\ny = Gemm n o",
            "w:6x8 b:8 s:8 t:8 o:8x5",
        ),
        case(
            "instance norm and a convolution",
            3,
            &image,
            &format!("h = Conv x w0\nn = InstanceNormalization h s t\nc = Conv n w\n{head}"),
            &with_head("w0:4x3x1x1 w:4x4x1x1"),
        ),
        case(
            "instance norm and a mean",
            2,
            &image,
            "h = Conv x w0\nr = Relu h\nn = InstanceNormalization r s t\nk = Mul n k1\nf = ReduceMean k | over_maps flat\n\
             y = Gemm f o ob",
            &with_head("w0:4x3x3x3 k1:4x1x1"),
        ),
        case(
            "convolution, activation, norm, flatten",
            2,
            &image,
            "a = Conv x w\nr = Relu a\nn = BatchNormalization r s t m v\nf = Flatten n\ny = Gemm f o ob",
            &with_norm("w:4x3x3x3 o:64x5 ob:5"),
        ),
        case(
            "average, norm, flatten",
            2,
            &image,
            "a = Conv x w\nr = Relu a\np = GlobalAveragePool r\nn = BatchNormalization p s t m v\nf = Flatten n\n\
             g = BatchNormalization f s2 t2 m2 v2\ny = Gemm g o ob",
            &with_head("w:4x3x3x3"),
        ),
        case(
            "parts, norm, mean",
            3,
            &image,
            "a = Conv x w\nb = Conv x w1\nc = Concat a b | second\nn = BatchNormalization c s t m v\n\
             f = ReduceMean n | over_maps flat\ny = Gemm f o ob",
            &with_head("w:2x3x3x3 w1:2x3x3x3"),
        ),
        case(
            "norm read behind a flatten and by others",
            4,
            &image,
            "a = Conv x w\nr = Relu a\nn = BatchNormalization r s t m v\nf = Flatten n\nb = Gemm f o ob\n\
             d = Conv n w1 | padded\ne = Flatten d\nk = Gemm e o2\ny = Add b k",
            &with_norm("w:4x3x3x3 o:64x5 ob:5 w1:4x4x3x3 o2:64x5"),
        ),
    ]
}

#[test]
fn scales_that_are_folded_here_and_not_there_are_written_again() {
    let folder = tempfile::tempdir().unwrap();
    let (path, out) = (folder.path().join("network.onnx"), folder.path().join("sparse.onnx"));
    for (name, count, mut file) in scaled_files() {
        let mut selection = OnnxSelection::default();
        let graph = file.graph.as_mut().unwrap();
        if graph.node.iter().any(|node| node.output == ["z"]) {
            graph.output.push(value("z", &[]));
            selection.output = Some("y".into());
        }
        let is_weighted =
            |node: &&NodeProto| matches!(node.op_type.as_str(), "Conv" | "ConvTranspose" | "Gemm" | "MatMul");
        assert_eq!(graph.node.iter().filter(is_weighted).count(), count, "{name}");
        std::fs::write(&path, file.encode_to_vec()).unwrap();
        let network = Network::from_onnx_selected(&path, &selection).unwrap_or_else(|e| panic!("{name}: {e}"));
        // Every map stands once, so that its weights are counted once.
        assert_eq!(maps(&network), count, "{name}");
        let stored = |prefix: char| {
            let graph = file.graph.as_ref().unwrap();
            let own = graph.initializer.iter().filter(|t| t.name.starts_with(prefix) && t.dims.len() > 1);
            own.map(|t| t.float_data.len()).sum::<usize>()
        };
        let weights: usize = network
            .pre_activations()
            .iter()
            .chain([network.output()])
            .flat_map(|rows| &rows.terms)
            .map(|term| term.weights.nonzeros())
            .sum();
        // A transposed convolution has as many weights, with zeros where its phases have no taps.
        assert_eq!(weights, stored('w') + stored('o'), "{name}");

        let model = thinned(&network);
        export_onnx_like(&model, &path, &selection, &out).unwrap_or_else(|e| panic!("{name}: {e}"));
        let mut random = Random::new(5);
        let u = Matrix::from_fn(4, network.input_shape().size(), |_, _| random.normal() as f32);
        let wanted = Equilibrium::new(&model, EquilibriumSettings::default()).unwrap().outputs(&u).unwrap().y;
        let again = Network::from_onnx_selected(&out, &selection).unwrap_or_else(|e| panic!("{name}: {e}"));
        let got = again.forward(&u).unwrap();
        let largest = wanted.as_slice().iter().fold(0.0f32, |m, v| m.max(v.abs()));
        for (a, b) in got.as_slice().iter().zip(wanted.as_slice()) {
            assert!((a - b).abs() <= 1e-5 * largest, "{name}: {a} is not {b}");
        }
        assert_eq!(maps(&again), count, "{name}");
        let written = ModelProto::decode(std::fs::read(&out).unwrap().as_slice()).unwrap().graph.unwrap();
        assert_eq!(written.node.iter().filter(is_weighted).count(), count, "{name}");
        let mut names = HashSet::new();
        let named = written.node.iter().map(|node| &node.name).filter(|name| !name.is_empty());
        named.for_each(|own| assert!(names.insert(own), "{name}: two nodes are called {own:?}"));
    }
}

#[test]
fn a_node_that_adds_a_value_to_its_product_is_refused_by_its_name() {
    let folder = tempfile::tempdir().unwrap();
    let (path, out) = (folder.path().join("network.onnx"), folder.path().join("sparse.onnx"));
    let file = model(
        &[0, 6],
        nodes("h = Gemm x w\nr = Relu h\nn = LayerNormalization r s\ny = Gemm n o r"),
        constants("w:6x5 s:5 o:5x5"),
    );
    std::fs::write(&path, file.encode_to_vec()).unwrap();
    let network = Network::from_onnx(&path).unwrap();
    let refused = export_onnx_like(&thinned(&network), &path, &OnnxSelection::default(), &out).unwrap_err().to_string();
    assert!(refused.contains("more than their product") && refused.contains("the_y"), "{refused}");
    assert!(!out.exists());
}

#[test]
fn weights_that_a_file_uses_again_are_counted_and_said() {
    let file = |text: &str| read(&model(&[0, 6], nodes(text), constants("w:6x6 b:6 o:6x6"))).unwrap();
    let again = file("a = Gemm x w b\nr = Relu a\nc = Gemm r w b\nd = Relu c\nt = Transpose w\ny = MatMul d t");
    assert_eq!((again.repeated_weights(), maps(&again)), (72, 3));
    let once = file("a = Gemm x w b\nr = Relu a\ny = Gemm r o");
    assert_eq!((once.repeated_weights(), maps(&once)), (0, 2));
}

#[test]
fn gelu_with_constants_of_half_precision_is_gelu() {
    let exact = "h = Gemm x w\na = Div h root\ne = Erf a\nb = Add e one\nc = Mul h b\ng = Mul c half\ny = Gemm g o";
    let tanh = "h = Gemm x w\nq = Mul h h\nk = Mul q h\na = Mul k cube\nb = Add h a\nc = Mul b slope\nt = Tanh c\n\
                d = Add t one\ne = Mul h d\ng = Mul e half\ny = Gemm g o";
    let cast = |tensor: TensorProto| {
        let values: Vec<f32> = tensor.float_data.clone();
        super::tensor::write(data_type::FLOAT16, &tensor.name, &tensor.dims, &values).unwrap()
    };
    for (text, activation) in [(exact, Activation::Gelu), (tanh, Activation::GeluTanh)] {
        let numbers = [("root", 2f32.sqrt()), ("one", 1.0), ("half", 0.5), ("cube", 0.044_715)];
        let mut stored = constants("w:6x8 o:8x3");
        stored.extend(numbers.map(|(name, value)| number(name, value)));
        stored.push(number("slope", (2.0 / std::f32::consts::PI).sqrt()));
        let network = read(&model(&[0, 6], nodes(text), stored.into_iter().map(cast).collect())).unwrap();
        let layers: Vec<Activation> = network.layout().layers().iter().map(|layer| layer.activation).collect();
        assert_eq!(layers, [activation]);
    }
}
