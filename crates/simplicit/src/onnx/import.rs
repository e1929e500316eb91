//! Reading a network from an ONNX file, node by node.

use std::collections::HashMap;
use std::io::Read;
use std::path::Path;

use prost::Message;

use super::dimensions::Dimensions;
use super::proto::{DimensionValue, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto};
use super::tensor::{self, Constant, Tensor};
use crate::network::{Network, NetworkBuilder, Shape};
use crate::{Error, Result};

/// Largest file that is read: half of what a protocol buffer can hold.
const MAX_BYTES: u64 = 1 << 30;

impl Network {
    /// Reads an ONNX file (opset 13 or later) as PyTorch's exporters write it.
    ///
    /// The first axis of the input is the batch, whatever its stored size; all others must be fixed. Batch norm is
    /// folded. What cannot be represented is an error that names the node, its operator and a way out.
    pub fn from_onnx(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let file = std::fs::File::open(path).map_err(|e| Error::io(path, e))?;
        let mut bytes = Vec::new();
        file.take(MAX_BYTES + 1).read_to_end(&mut bytes).map_err(|e| Error::io(path, e))?;
        if bytes.len() as u64 > MAX_BYTES {
            return Err(Error::file(
                path,
                format!("larger than {MAX_BYTES} bytes; no network this library can run is"),
            ));
        }
        import(&bytes, path)
    }

    /// As [`Network::from_onnx`], from the bytes of a file.
    pub fn from_onnx_bytes(bytes: &[u8]) -> Result<Self> {
        import(bytes, Path::new("ONNX bytes"))
    }
}

fn import(bytes: &[u8], path: &Path) -> Result<Network> {
    let model = ModelProto::decode(bytes).map_err(|e| Error::file(path, format!("not an ONNX file: {e}")))?;
    let place = path.display().to_string();
    let opset = model.opset_import.iter().find(|o| matches!(o.domain.as_str(), "" | "ai.onnx"));
    let version = opset.and_then(|o| o.version).unwrap_or(0);
    let Some(graph) = &model.graph else {
        return Err(Error::file(path, "not an ONNX file: no graph in it"));
    };
    if version < 13 {
        return Err(Error::unsupported(format!("{place}: opset {version}"), "export again with opset 13 or later"));
    }
    // A few bytes must not become gigabytes by being used again and again.
    let budget = bytes.len().saturating_mul(4).max(1 << 24);
    Importer::new(graph, budget).and_then(|importer| importer.run(graph)).map_err(|e| e.within(&place))
}

/// What a name in the file stands for.
#[derive(Debug, Clone)]
pub(super) enum Value {
    /// A batch of values: the node that computes it, and its dimensions without the batch.
    Batch { node: usize, dims: Vec<usize> },
    /// Weights.
    Floats(Tensor<f32>),
    /// A shape.
    Dimensions(Dimensions),
}

/// The network under construction and what the names mean.
pub(super) struct Importer<'a> {
    pub(super) builder: NetworkBuilder,
    /// The size of the first axis of the input, where the file fixes it.
    pub(super) fixed_batch: Option<i64>,
    initializers: HashMap<&'a str, &'a TensorProto>,
    values: HashMap<&'a str, Value>,
    /// How many more numbers may be copied out of the file.
    budget: usize,
}

impl<'a> Importer<'a> {
    fn new(graph: &'a GraphProto, budget: usize) -> Result<Self> {
        let initializers: HashMap<_, _> = graph.initializer.iter().map(|t| (t.name.as_str(), t)).collect();
        // Before IR version 4 initialisers are listed as inputs, too.
        let mut inputs = graph.input.iter().filter(|i| !initializers.contains_key(i.name.as_str()));
        let (Some(input), None) = (inputs.next(), inputs.next()) else {
            let names: Vec<&str> = graph.input.iter().map(|i| i.name.as_str()).collect();
            return Err(Error::unsupported(
                format!("a network with the inputs {names:?}"),
                "it must have exactly one input that is not a constant",
            ));
        };
        let (fixed_batch, dims) = input_dims(input)?;
        let shape = match dims[..] {
            [channels, height, width] => Shape::map(channels, height, width),
            _ => Shape::Vector(product(&dims).unwrap_or(0)),
        };
        let builder = Network::builder(shape).map_err(|e| e.within(&format!("input {:?}", input.name)))?;
        let values = HashMap::from([(input.name.as_str(), Value::Batch { node: builder.here().0, dims })]);
        Ok(Self { builder, fixed_batch, initializers, values, budget })
    }

    fn run(mut self, graph: &'a GraphProto) -> Result<Network> {
        for node in &graph.node {
            let value = self.node(node).map_err(|e| e.within(&node.label()))?;
            let Some(name) = node.output.first().filter(|name| !name.is_empty()) else { continue };
            if self.values.insert(name, value).is_some() || self.initializers.contains_key(name.as_str()) {
                return Err(Error::shape(node.label(), "a new value", format!("{name:?}, which exists already")));
            }
        }
        let [output] = &graph.output[..] else {
            let names: Vec<&str> = graph.output.iter().map(|o| o.name.as_str()).collect();
            return Err(Error::unsupported(
                format!("a network with the outputs {names:?}"),
                "it must have exactly one",
            ));
        };
        match self.values.get(output.name.as_str()) {
            Some(Value::Batch { node, dims }) => {
                let node = match dims[..] {
                    [size] => self.builder.push_reshape(*node, Shape::Vector(size))?,
                    _ => *node,
                };
                self.builder.at(crate::network::NodeId(node))?.build()
            }
            _ => Err(Error::shape(format!("output {:?}", output.name), "a value computed from the input", "none")),
        }
    }

    /// What a name stands for; constants are copied out of the file.
    fn value(&mut self, name: &str) -> Result<Value> {
        let value = match (self.values.get(name), self.initializers.get(name)) {
            (Some(value), _) => value.clone(),
            (None, Some(tensor)) => constant(tensor)?,
            (None, None) => {
                return Err(Error::shape("input", "a value computed before this node", format!("{name:?}")));
            }
        };
        if let Value::Floats(tensor) = &value {
            self.spend(tensor.values.len())?;
        }
        Ok(value)
    }

    fn spend(&mut self, numbers: usize) -> Result<()> {
        self.budget = self.budget.checked_sub(numbers).ok_or_else(|| {
            Error::shape("constants", "weights in proportion to the file", "many more by using the same ones again")
        })?;
        Ok(())
    }

    fn node(&mut self, node: &NodeProto) -> Result<Value> {
        if !matches!(node.domain.as_str(), "" | "ai.onnx") {
            return Err(Error::unsupported(
                format!("operator set {:?}", node.domain),
                "only ONNX's own operators are read; export without custom operators",
            ));
        }
        let mut inputs = Vec::with_capacity(node.input.len());
        for name in &node.input {
            inputs.push(if name.is_empty() { None } else { Some(self.value(name)?) });
        }
        if node.op_type == "Constant" {
            return constant_node(node);
        }
        let before = self.builder.parameters();
        let value = self.apply(node, &inputs)?;
        // Folding a batch norm copies weights as well.
        self.spend(self.builder.parameters() - before)?;
        Ok(value)
    }
}

pub(super) fn product(dims: &[usize]) -> Option<usize> {
    dims.iter().try_fold(1usize, |p, &d| p.checked_mul(d))
}

/// The stored batch size, if any, and the dimensions of one sample.
fn input_dims(input: &ValueInfoProto) -> Result<(Option<i64>, Vec<usize>)> {
    let what = || format!("input {:?}", input.name);
    let shape = input.kind.as_ref().and_then(|t| t.tensor_type.as_ref()).and_then(|t| t.shape.as_ref());
    let Some([batch, rest @ ..]) = shape.map(|s| &s.dim[..]) else {
        return Err(Error::shape(what(), "a tensor with its shape, batch first", "none"));
    };
    if rest.is_empty() {
        return Err(Error::shape(what(), "batch × features or batch × channels × height × width", "one axis"));
    }
    let mut dims = Vec::with_capacity(rest.len());
    for (axis, dim) in rest.iter().enumerate() {
        match dim.value {
            Some(DimensionValue::Value(v)) if v > 0 => dims.push(v as usize),
            _ => {
                return Err(Error::shape(
                    format!("{}, axis {}", what(), axis + 1),
                    "a fixed size (only the batch may be dynamic)",
                    format!("{:?}", dim.value),
                ));
            }
        }
    }
    let batch = match batch.value {
        Some(DimensionValue::Value(v)) => Some(v),
        _ => None,
    };
    Ok((batch, dims))
}

fn constant(tensor: &TensorProto) -> Result<Value> {
    Ok(match tensor::read(tensor)? {
        Constant::Floats(tensor) => Value::Floats(tensor),
        Constant::Ints(tensor) => Value::Dimensions(Dimensions::from_constant(&tensor)?),
    })
}

fn constant_node(node: &NodeProto) -> Result<Value> {
    let [attribute] = &node.attribute[..] else {
        return Err(Error::shape("constant", "one attribute", node.attribute.len()));
    };
    let scalar = |is_scalar, length| if is_scalar { vec![] } else { vec![length] };
    let ints = |values: Vec<i64>, is_scalar| {
        let tensor = Tensor { dims: scalar(is_scalar, values.len()), values };
        Dimensions::from_constant(&tensor).map(Value::Dimensions)
    };
    let floats =
        |values: Vec<f32>, is_scalar| Ok(Value::Floats(Tensor { dims: scalar(is_scalar, values.len()), values }));
    match attribute.name.as_str() {
        "value" => match &attribute.t {
            Some(tensor) => constant(tensor),
            None => Err(Error::shape("constant", "a tensor", "none")),
        },
        "value_float" => floats(vec![attribute.f.unwrap_or(0.0)], true),
        "value_floats" => floats(attribute.floats.clone(), false),
        "value_int" => ints(vec![attribute.i.unwrap_or(0)], true),
        "value_ints" => ints(attribute.ints.clone(), false),
        other => Err(Error::unsupported(format!("a constant of kind {other}"), "constants must be numbers")),
    }
}
