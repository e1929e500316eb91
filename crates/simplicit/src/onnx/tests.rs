//! What is refused, and whether the message names the node, its operator and a way out.

use prost::Message;

use super::proto::*;
use crate::network::Network;
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
    let kernel = || vec![floats("w", &[4, 2, 3, 3]), floats("g", &[4, 1, 3, 3])];
    let conv = |weights: &str, attribute| model(&image, vec![node("Conv", weights, "y", attribute)], kernel());
    read(&conv("x w", vec![])).unwrap();
    refused(conv("x g", vec![int("group", 2)]), &["\"the_y\" (Conv)", "group = 2", "groups=1"]);
    refused(conv("x w", vec![ints("dilations", &[2, 2])]), &["the_y", "Conv", "dilation"]);
    refused(conv("x w", vec![ints("pads", &[1, 1])]), &["pads", "2-D"]);
    refused(conv("x w", vec![ints("strides", &[0, 1])]), &["strides"]);
    refused(conv("x g", vec![]), &["weights of a convolution", "2 · 3 · 3"]);

    let pool = |op: &str, attribute| model(&image, vec![node(op, "x", "y", attribute)], vec![]);
    refused(pool("MaxPool", vec![]), &["kernel_shape"]);
    let ragged = vec![ints("kernel_shape", &[3, 3]), ints("strides", &[2, 2]), int("ceil_mode", 1)];
    refused(pool("MaxPool", ragged), &["ceil_mode"]);
    refused(pool("ReduceMean", vec![ints("axes", &[1])]), &["axes [1]", "2 and 3"]);
    refused(pool("ReduceMean", vec![]), &["axes"]);
    refused(pool("Softmax", vec![]), &["Softmax", "logits"]);
    refused(pool("Gelu", vec![]), &["Gelu", "non-expansive"]);
    refused(pool("LayerNormalization", vec![]), &["LayerNormalization", "Gemm"]);
    let steep = AttributeProto { name: "alpha".into(), f: Some(f32::INFINITY), ..Default::default() };
    refused(pool("LeakyRelu", vec![steep]), &["LeakyRelu", "finite"]);

    let dense = |nodes| model(&[0, 3], nodes, vec![floats("w", &[3, 3]), floats("v", &[3])]);
    refused(dense(vec![node("Gemm", "x w", "y", vec![int("transA", 1)])]), &["transA"]);
    refused(dense(vec![node("MatMul", "w x", "y", vec![])]), &["left"]);
    refused(dense(vec![node("MatMul", "x v", "y", vec![])]), &["two axes"]);
    refused(dense(vec![node("Gemm", "x z", "y", vec![])]), &["\"z\"", "before this node"]);
    refused(dense(vec![node("Relu", "w", "y", vec![])]), &["constants"]);
    refused(dense(vec![node("Relu", "x", "w", vec![])]), &["\"w\"", "exists already"]);
    refused(dense(vec![node("Relu", "x", "z", vec![])]), &["output \"y\""]);
    let foreign = NodeProto { domain: "com.microsoft".into(), ..node("Relu", "x", "y", vec![]) };
    refused(dense(vec![foreign]), &["com.microsoft", "custom"]);
    refused(model(&[0, 4, 3], vec![node("MatMul", "x w", "y", vec![])], vec![floats("w", &[3, 3])]), &["flatten"]);
}

#[test]
fn a_reshape_must_not_mix_samples() {
    let reshape = |input: &[i64], target: &[i64]| {
        read(&model(input, vec![node("Reshape", "x t", "y", vec![])], vec![shape("t", target)]))
    };
    for target in [&[0, -1][..], &[-1, 12], &[0, 3, 4], &[-1, 3, 2, 2], &[0, 0, 4]] {
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
fn batch_norm_before_a_padded_convolution_is_refused() {
    let norm = || ["s", "b", "m"].map(|name| floats(name, &[2]));
    let variance = TensorProto { float_data: vec![1.0, 2.0], ..floats("v", &[2]) };
    let network = |pads: &[i64]| {
        let nodes = vec![
            node("BatchNormalization", "x s b m v", "n", vec![]),
            node("Conv", "n w", "y", vec![ints("pads", pads)]),
        ];
        let constants = norm().into_iter().chain([variance.clone(), floats("w", &[3, 2, 3, 3])]).collect();
        model(&[0, 2, 6, 6], nodes, constants)
    };
    read(&network(&[0, 0, 0, 0])).unwrap();
    refused(network(&[1, 1, 1, 1]), &["the_y", "batch norm the_n", "convolution"]);
}

#[test]
fn the_file_as_a_whole_is_checked() {
    let plain = || model(&[0, 3], vec![node("Relu", "x", "y", vec![])], vec![]);
    read(&plain()).unwrap();
    let mut old = plain();
    old.opset_import[0].version = Some(11);
    refused(old, &["opset 11", "13"]);
    let mut two = plain();
    two.graph.as_mut().unwrap().input.push(value("z", &[0, 3]));
    refused(two, &["\"x\", \"z\"", "one input"]);
    let mut two = plain();
    two.graph.as_mut().unwrap().output.push(value("x", &[0, 3]));
    refused(two, &["outputs", "one"]);
    refused(model(&[0, 3, 0, 8], vec![node("Relu", "x", "y", vec![])], vec![]), &["axis 2", "fixed"]);
    refused(model(&[0], vec![node("Relu", "x", "y", vec![])], vec![]), &["one axis"]);
    refused(model(&[0, 1 << 40, 1 << 40, 1 << 40], vec![node("Relu", "x", "y", vec![])], vec![]), &["units"]);
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
