//! The networks that are refused, and whether the message names the node, its operator and an alternative.

use prost::Message;

use super::proto::*;
use crate::network::{Network, Shape};
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
    use super::OnnxSelection;
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
