//! The table of operators: what each adds to the network.

use super::constant::{Constant, Tensor, places};
use super::import::{Importer, Value};
use super::proto::NodeProto;
use crate::graph::{Binary, Reduction, Structure, Unary};
use crate::{Error, Result};

/// The inputs of one node; an input that was left out is `None`.
pub(super) struct Inputs<'v>(pub(super) &'v [Option<Value>]);

impl<'v> Inputs<'v> {
    pub(super) fn get(&self, k: usize) -> Option<&'v Value> {
        self.0.get(k).and_then(Option::as_ref)
    }

    pub(super) fn value(&self, k: usize) -> Result<&'v Value> {
        self.get(k).ok_or_else(|| Error::shape(format!("input {k}"), "a value", "nothing"))
    }

    /// A constant, if the input is there.
    pub(super) fn constant(&self, k: usize) -> Result<Option<&'v Constant>> {
        match self.get(k) {
            None => Ok(None),
            Some(Value::Constant(constant, _)) => Ok(Some(constant)),
            Some(_) => Err(Error::unsupported(
                format!("input {k} that depends on the sample"),
                "it must follow from constants and shapes alone; export with fixed weights and sizes",
            )),
        }
    }

    pub(super) fn floats(&self, k: usize) -> Result<Option<Tensor<f32>>> {
        Ok(self.constant(k)?.map(Constant::to_floats))
    }

    pub(super) fn weights(&self, k: usize) -> Result<Tensor<f32>> {
        self.floats(k)?.ok_or_else(|| Error::shape(format!("input {k}"), "constant weights", "nothing"))
    }

    /// A list of integers, if the input is there.
    pub(super) fn ints(&self, k: usize) -> Result<Option<Vec<i64>>> {
        match self.constant(k)? {
            None => Ok(None),
            Some(Constant::Ints(tensor)) => Ok(Some(tensor.values.clone())),
            Some(Constant::Floats(_)) => Err(Error::shape(format!("input {k}"), "integers", "floats")),
        }
    }

    /// A single number, if the input is there.
    pub(super) fn number(&self, k: usize) -> Result<Option<f32>> {
        match self.floats(k)? {
            None => Ok(None),
            Some(Tensor { values, .. }) => match values[..] {
                [value] => Ok(Some(value)),
                _ => Err(Error::shape(format!("input {k}"), "one number", values.len())),
            },
        }
    }

    /// Integers from input `k` or, in older files, from an attribute.
    pub(super) fn ints_or(&self, k: usize, node: &NodeProto, attribute: &str) -> Result<Option<Vec<i64>>> {
        Ok(self.ints(k)?.or_else(|| node.ints(attribute).map(<[i64]>::to_vec)))
    }

    pub(super) fn all(&self) -> Result<Vec<Value>> {
        (0..self.0.len()).map(|k| self.value(k).cloned()).collect()
    }
}

impl Importer<'_> {
    /// Appends the nodes that an ONNX node stands for, and returns the values of its outputs.
    pub(super) fn apply(&mut self, node: &NodeProto, values: &[Option<Value>]) -> Result<Vec<Value>> {
        let inputs = Inputs(values);
        if node.op_type == "Split" {
            return self.split(node, &inputs);
        }
        self.single(node, &inputs).map(|value| vec![value])
    }

    fn single(&mut self, node: &NodeProto, inputs: &Inputs<'_>) -> Result<Value> {
        if let Some(binary) = by_name(&BINARY, &node.op_type) {
            return self.several(binary, inputs);
        }
        if let Some(unary) = by_name(&UNARY, &node.op_type) {
            return self.unary(unary, inputs.value(0)?);
        }
        if let Some(value) = self.activation(node, inputs)? {
            return Ok(value);
        }
        if let Some(value) = self.logic(node, inputs)? {
            return Ok(value);
        }
        match node.op_type.as_str() {
            "Identity" | "Dropout" | "Cast" | "CastLike" => self.pass_through(node, inputs),
            "Shape" | "Size" | "ConstantOfShape" | "Range" | "Where" | "Equal" | "Less" | "Greater" | "LessOrEqual"
            | "GreaterOrEqual" | "Not" | "And" | "Or" | "Xor" | "Mod" | "Trilu" | "CumSum" | "NonZero" | "OneHot"
            | "IsNaN" | "Ceil" | "Floor" | "Round" | "Sign" | "ReduceProd" => self.evaluate(node, inputs),
            "Gemm" => self.gemm(node, inputs),
            "MatMul" => self.matmul(inputs),
            "GatherND" | "GatherElements" | "ScatterND" => match self.picked(node, inputs)? {
                Some(value) => Ok(value),
                None => self.evaluate(node, inputs),
            },
            "Scaler" => self.scaler(node, inputs),
            "Einsum" => self.einsum(node, inputs),
            "Attention" => self.attention(node, inputs),
            "Conv" => self.convolution(node, inputs),
            "ConvTranspose" => self.transposed_convolution(node, inputs),
            "BatchNormalization" => self.batch_norm(node, inputs),
            "LayerNormalization" | "InstanceNormalization" | "GroupNormalization" | "RMSNormalization" => {
                self.norm(node, inputs)
            }
            "MaxPool" | "AveragePool" | "GlobalAveragePool" | "GlobalMaxPool" => self.pool(node, inputs),
            "ReduceMean" | "ReduceSum" | "ReduceMax" | "ReduceMin" | "ReduceL2" | "ReduceSumSquare" | "ReduceL1"
            | "ReduceLogSum" | "ReduceLogSumExp" => self.reduce(node, inputs),
            "Softmax" | "LogSoftmax" => self.softmax(node, inputs),
            "Flatten" | "Reshape" | "Squeeze" | "Unsqueeze" => self.reshape_node(node, inputs),
            "Transpose" => self.transpose_node(node, inputs),
            "Slice" => self.slice_node(node, inputs),
            "Gather" => self.gather_node(node, inputs),
            "Concat" => {
                let values = inputs.all()?;
                let rank = values.first().map_or(0, |v| self.dims(v).len());
                let axis = super::constant::place(node.int("axis", 0), rank)?;
                self.concat(&values, axis)
            }
            "Expand" => self.expand_node(inputs),
            "Tile" => self.tile(inputs),
            "Pad" => self.pad_node(node, inputs),
            "DepthToSpace" | "SpaceToDepth" => self.depth_and_space(node, inputs),
            "Resize" | "Upsample" => self.resize(node, inputs),
            "LRN" => self.local_response(node, inputs),
            _ => Err(Error::unsupported("this operator", way_out(node))),
        }
    }

    fn pass_through(&mut self, node: &NodeProto, inputs: &Inputs<'_>) -> Result<Value> {
        if node.op_type == "Dropout" && inputs.ints(2)?.is_some_and(|training| training != [0]) {
            return Err(Error::unsupported("dropout in training mode", "export the network in eval mode"));
        }
        let to = match node.op_type.as_str() {
            "Cast" => node.int("to", 1),
            "CastLike" => match inputs.value(1)? {
                Value::Constant(constant, _) if matches!(**constant, Constant::Ints(_)) => 7,
                _ => 1,
            },
            _ => return inputs.value(0).cloned(),
        };
        match (inputs.value(0)?, to) {
            (Value::Constant(constant, w), 1 | 10 | 11 | 16) => {
                self.constant(Constant::Floats(constant.to_floats()), *w)
            }
            (Value::Constant(constant, _), 9) => {
                let truth = match &**constant {
                    Constant::Floats(tensor) => tensor.map(|v| i64::from(v != 0.0)),
                    Constant::Ints(tensor) => tensor.map(|v| i64::from(v != 0)),
                };
                self.constant(Constant::Ints(truth), false)
            }
            (Value::Constant(constant, w), 2..=7 | 12 | 13) => match &**constant {
                // Rounded towards zero, as in C; a number that is out of range becomes the nearest integer in it.
                Constant::Floats(tensor) => self.constant(Constant::Ints(tensor.map(|v| v as i64)), false),
                Constant::Ints(_) => Ok(Value::Constant(constant.clone(), *w)),
            },
            (value @ Value::Node(_), 1 | 10 | 11 | 16) => Ok(value.clone()),
            (value @ Value::Node(_), 9) => {
                let zero = self.number(0.0)?;
                let truth = self.differs(value, &zero)?;
                if let Value::Node(id) = truth {
                    self.whole.insert(id);
                }
                Ok(truth)
            }
            (value @ Value::Node(id), 2..=7 | 12 | 13) if self.whole.contains(id) => Ok(value.clone()),
            (_, to) => Err(Error::unsupported(
                format!("a cast of values to ONNX type {to}"),
                "values that depend on the sample stay floats; export in single precision",
            )),
        }
    }

    /// A function of two values, or of several from left to right.
    fn several(&mut self, binary: Binary, inputs: &Inputs<'_>) -> Result<Value> {
        let mut out = inputs.value(0)?.clone();
        for k in 1..inputs.0.len() {
            out = self.binary(binary, &out, inputs.value(k)?)?;
        }
        Ok(out)
    }

    fn reduce(&mut self, node: &NodeProto, inputs: &Inputs<'_>) -> Result<Value> {
        let mut value = inputs.value(0)?.clone();
        let dims = self.dims(&value);
        let axes = match inputs.ints_or(1, node, "axes")?.filter(|axes| !axes.is_empty()) {
            Some(axes) => places(&axes, dims.len())?,
            None if node.int("noop_with_empty_axes", 0) != 0 => return Ok(value),
            None => (0..dims.len()).collect(),
        };
        let keep = node.int("keepdims", 1) != 0;
        // Norms and logarithms are composed of sums.
        let reduction = by_name(&REDUCTIONS, &node.op_type).unwrap_or(Reduction::Sum);
        if let Value::Constant(constant, _) = &value
            && let Constant::Ints(_) = **constant
        {
            return self.evaluate(node, inputs);
        }
        let mut largest = None;
        match node.op_type.as_str() {
            "ReduceL2" | "ReduceSumSquare" => value = self.binary(Binary::Multiply, &value, &value)?,
            "ReduceL1" => value = self.unary(Unary::Absolute, &value)?,
            "ReduceLogSumExp" => {
                // max + ln Σ e^(x − max), which does not overflow.
                let over = |keep| Structure::Reduce { reduction: Reduction::Maximum, axes: axes.clone(), keep };
                let each = self.structure(over(true), std::slice::from_ref(&value))?;
                largest = Some(self.structure(over(keep), std::slice::from_ref(&value))?);
                let moved = self.structure(Structure::Binary(Binary::Subtract), &[value, each])?;
                value = self.unary(Unary::Exp, &moved)?;
            }
            _ => {}
        }
        if let (Value::Node(id), Reduction::Mean, [2, 3], [1, channels, height, width]) =
            (&value, reduction, &axes[..], &dims[..])
        {
            let input = crate::layout::MapShape { channels: *channels, height: *height, width: *width };
            let mean = self.builder.push_fixed(*id, crate::network::FixedMap::GlobalAverage { input })?;
            let dims = if keep { vec![1, *channels, 1, 1] } else { vec![1, *channels] };
            return self.reshape(&Value::Node(mean), &dims);
        }
        let out = self.structure(Structure::Reduce { reduction, axes, keep }, &[value])?;
        match (node.op_type.as_str(), largest) {
            ("ReduceL2", _) => self.unary(Unary::Sqrt, &out),
            ("ReduceLogSum", _) => self.unary(Unary::Log, &out),
            (_, Some(largest)) => {
                let rest = self.unary(Unary::Log, &out)?;
                self.binary(Binary::Add, &largest, &rest)
            }
            _ => Ok(out),
        }
    }

    fn softmax(&mut self, node: &NodeProto, inputs: &Inputs<'_>) -> Result<Value> {
        let value = inputs.value(0)?;
        let dims = self.dims(value);
        let default = if self.opset < 13 { 1 } else { -1 };
        let axis = super::constant::place(node.int("axis", default), dims.len())?;
        if self.opset < 13 && axis + 1 != dims.len() {
            // Over all axes from this one on, treated as one axis.
            let (rows, columns) = (dims[..axis].iter().product(), dims[axis..].iter().product());
            let flat = self.reshape(value, &[rows, columns])?;
            let out = self.softmax_over(node, &flat, 1)?;
            return self.reshape(&out, &dims);
        }
        self.softmax_over(node, value, axis)
    }

    fn softmax_over(&mut self, node: &NodeProto, value: &Value, axis: usize) -> Result<Value> {
        if node.op_type == "Softmax" {
            return self.structure(Structure::Softmax { axis }, std::slice::from_ref(value));
        }
        // x − max − ln Σ e^(x − max): the logarithm of a softmax could be that of zero.
        let over = |reduction| Structure::Reduce { reduction, axes: vec![axis], keep: true };
        let largest = self.structure(over(Reduction::Maximum), std::slice::from_ref(value))?;
        let moved = self.structure(Structure::Binary(Binary::Subtract), &[value.clone(), largest])?;
        let powers = self.structure(Structure::Unary(Unary::Exp), std::slice::from_ref(&moved))?;
        let total = self.structure(over(Reduction::Sum), &[powers])?;
        let logarithm = self.structure(Structure::Unary(Unary::Log), &[total])?;
        self.structure(Structure::Binary(Binary::Subtract), &[moved, logarithm])
    }
}

/// Advice for an operator that is not read.
fn way_out(node: &NodeProto) -> String {
    let why = match node.op_type.as_str() {
        "LSTM" | "GRU" | "RNN" | "Loop" | "Scan" => "recurrent layers are not read",
        "QuantizeLinear" | "DequantizeLinear" | "DynamicQuantizeLinear" | "ConvInteger" | "MatMulInteger" => {
            return "quantised networks are not read; give the network as it was before that".into();
        }
        operator if operator.starts_with("QLinear") => {
            return "quantised networks are not read; give the network as it was before that".into();
        }
        _ => "it has no counterpart here; replace the layer in the network",
    };
    let cut = node.input.iter().find(|name| !name.is_empty());
    let cut = cut.map_or_else(String::new, |name| format!(", or cut the network in front of it (--output {name:?})"));
    format!("{why}{cut}")
}

/// Operators of two values, with their names in files; if there are several names, the first one is written.
const BINARY: [(&str, Binary); 8] = [
    ("Add", Binary::Add),
    ("Sum", Binary::Add),
    ("Sub", Binary::Subtract),
    ("Mul", Binary::Multiply),
    ("Div", Binary::Divide),
    ("Pow", Binary::Power),
    ("Max", Binary::Maximum),
    ("Min", Binary::Minimum),
];

/// The comparison from which all others are composed.
const COMPARISON: (&str, Binary) = ("Greater", Binary::Greater);

/// Functions of every number.
const UNARY: [(&str, Unary); 9] = [
    ("Sqrt", Unary::Sqrt),
    ("Exp", Unary::Exp),
    ("Log", Unary::Log),
    ("Erf", Unary::Erf),
    ("Neg", Unary::Negative),
    ("Abs", Unary::Absolute),
    ("Reciprocal", Unary::Reciprocal),
    ("Sin", Unary::Sine),
    ("Cos", Unary::Cosine),
];

/// Sums and extremes over axes.
const REDUCTIONS: [(&str, Reduction); 4] = [
    ("ReduceMean", Reduction::Mean),
    ("ReduceMax", Reduction::Maximum),
    ("ReduceMin", Reduction::Minimum),
    ("ReduceSum", Reduction::Sum),
];

fn by_name<T: Copy>(table: &[(&'static str, T)], operator: &str) -> Option<T> {
    table.iter().find(|(name, _)| *name == operator).map(|(_, value)| *value)
}

fn name_of<T: PartialEq>(table: &[(&'static str, T)], value: &T) -> &'static str {
    // The tables contain every variant, which a test checks.
    table.iter().find(|(_, own)| own == value).map_or("", |(name, _)| name)
}

pub(super) fn binary_name(binary: Binary) -> &'static str {
    if binary == COMPARISON.1 { COMPARISON.0 } else { name_of(&BINARY, &binary) }
}

pub(super) fn unary_name(unary: Unary) -> &'static str {
    name_of(&UNARY, &unary)
}

pub(super) fn reduction_name(reduction: Reduction) -> &'static str {
    name_of(&REDUCTIONS, &reduction)
}
