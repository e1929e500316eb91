//! Nodes and initialisers of a graph that is being written.

use std::collections::BTreeSet;

use crate::onnx::proto::{
    AttributeProto, DimensionProto, DimensionValue, NodeProto, TensorProto, TensorShapeProto, TensorTypeProto,
    TypeProto, ValueInfoProto, attribute_type, data_type,
};

/// What has been written so far.
#[derive(Default)]
pub(super) struct Writer {
    pub(super) nodes: Vec<NodeProto>,
    pub(super) initialisers: Vec<TensorProto>,
    /// Names of the values that have been written.
    made: BTreeSet<String>,
}

impl Writer {
    /// Appends a node, unless its value exists already.
    pub(super) fn make(&mut self, operator: &str, inputs: &[&str], output: &str, attributes: Vec<AttributeProto>) {
        if self.made.insert(output.to_string()) {
            self.nodes.push(node(operator, inputs, output, attributes));
        }
    }

    /// Adds an initialiser, unless there is one with its name.
    pub(super) fn store(&mut self, tensor: TensorProto) -> String {
        let name = tensor.name.clone();
        if self.made.insert(name.clone()) {
            self.initialisers.push(tensor);
        }
        name
    }
}

pub(super) fn node(operator: &str, inputs: &[&str], output: &str, attribute: Vec<AttributeProto>) -> NodeProto {
    NodeProto {
        op_type: operator.into(),
        name: format!("{output}_{operator}"),
        input: inputs.iter().map(|s| s.to_string()).collect(),
        output: vec![output.into()],
        attribute,
        ..Default::default()
    }
}

pub(super) fn integer(name: &str, i: i64) -> AttributeProto {
    AttributeProto { name: name.into(), i: Some(i), kind: Some(attribute_type::INT), ..Default::default() }
}

pub(super) fn integers(name: &str, values: &[usize]) -> AttributeProto {
    let ints = values.iter().map(|&v| v as i64).collect();
    AttributeProto { name: name.into(), ints, kind: Some(attribute_type::INTS), ..Default::default() }
}

pub(super) fn constant_ints(name: &str, values: &[i64]) -> TensorProto {
    TensorProto {
        name: name.into(),
        dims: vec![values.len() as i64],
        data_type: Some(data_type::INT64),
        raw_data: Some(values.iter().flat_map(|v| v.to_le_bytes()).collect()),
        ..Default::default()
    }
}

pub(super) fn float(name: &str, f: f32) -> AttributeProto {
    AttributeProto { name: name.into(), f: Some(f), kind: Some(attribute_type::FLOAT), ..Default::default() }
}

pub(super) fn floats(name: &str, dims: &[usize], values: &[f32]) -> TensorProto {
    TensorProto {
        name: name.into(),
        dims: dims.iter().map(|&d| d as i64).collect(),
        data_type: Some(data_type::FLOAT),
        raw_data: Some(values.iter().flat_map(|v| v.to_le_bytes()).collect()),
        ..Default::default()
    }
}

pub(super) fn scalar(name: &str, kind: i32, bytes: &[u8]) -> TensorProto {
    TensorProto { name: name.into(), data_type: Some(kind), raw_data: Some(bytes.to_vec()), ..Default::default() }
}

pub(super) fn tensor_type(kind: i32, dim: Vec<DimensionProto>) -> Option<TypeProto> {
    Some(TypeProto {
        tensor_type: Some(TensorTypeProto { elem_type: Some(kind), shape: Some(TensorShapeProto { dim }) }),
    })
}

/// The declaration of a value of floats: a batch of samples of this shape.
pub(super) fn value(name: &str, sample: &[usize]) -> ValueInfoProto {
    batch_of(name, data_type::FLOAT, sample)
}

pub(super) fn batch_of(name: &str, kind: i32, sample: &[usize]) -> ValueInfoProto {
    let batch = DimensionProto { value: Some(DimensionValue::Param("batch".into())) };
    let rest = sample.iter().map(|&d| DimensionProto { value: Some(DimensionValue::Value(d as i64)) });
    let dims = std::iter::once(batch).chain(rest).collect();
    ValueInfoProto { name: name.into(), kind: tensor_type(kind, dims), ..Default::default() }
}

pub(super) fn scalar_value(name: &str, kind: i32) -> ValueInfoProto {
    ValueInfoProto { name: name.into(), kind: tensor_type(kind, vec![]), ..Default::default() }
}
