//! What each supported operator adds to the network.

use super::axes::{flatten, squeeze};
use super::dimensions::{Dimension, Dimensions, place};
use super::import::{Importer, Value, product};
use super::proto::NodeProto;
use super::tensor::Tensor;
use super::weights::{matrix, per_channel, real_bias, reshape_weights};
use crate::layout::{Activation, MapShape};
use crate::linalg::Matrix;
use crate::network::{BatchNorm, FixedMap, Shape, Window};
use crate::{Error, Result};

pub(super) const SUPPORTED: &str = "supported are Gemm, MatMul, Conv, BatchNormalization, Relu, LeakyRelu, Tanh, Sigmoid, Add (and Sub, \
                         Mul, Div by constants), AveragePool, MaxPool, GlobalAveragePool, GlobalMaxPool, ReduceMean over \
                         positions, Flatten, Reshape, Squeeze, Unsqueeze, Transpose of weights, Identity, Cast, Dropout";

/// A batch of values: the node that computes it, and its dimensions without the batch.
struct Batch<'v> {
    node: usize,
    dims: &'v [usize],
}

/// The inputs of one node.
pub(super) struct Inputs<'v>(&'v [Option<Value>]);

impl<'v> Inputs<'v> {
    fn batch(&self, k: usize) -> Result<Batch<'v>> {
        match self.0.get(k) {
            Some(Some(Value::Batch { node, dims })) => Ok(Batch { node: *node, dims }),
            other => Err(Error::shape(format!("input {k}"), "a value that depends on the sample", describe(other))),
        }
    }

    fn floats(&self, k: usize) -> Result<&'v Tensor<f32>> {
        match self.0.get(k) {
            Some(Some(Value::Floats(tensor))) => Ok(tensor),
            other => Err(Error::shape(format!("input {k}"), "constant weights", describe(other))),
        }
    }

    fn optional_floats(&self, k: usize) -> Result<Option<&'v Tensor<f32>>> {
        match self.0.get(k) {
            None | Some(None) => Ok(None),
            _ => self.floats(k).map(Some),
        }
    }

    pub(super) fn dimensions(&self, k: usize) -> Result<&'v Dimensions> {
        match self.0.get(k) {
            Some(Some(Value::Dimensions(dimensions))) => Ok(dimensions),
            other => Err(Error::shape(format!("input {k}"), "a constant list of integers", describe(other))),
        }
    }

    /// Axes from input `k` or, before opset 13 or 18, from the attribute.
    pub(super) fn axes(&self, node: &NodeProto, k: usize) -> Result<Option<Vec<i64>>> {
        match self.0.get(k) {
            None | Some(None) => Ok(node.ints("axes").map(<[i64]>::to_vec)),
            _ => self.dimensions(k)?.known().map(Some),
        }
    }
}

fn describe(value: Option<&Option<Value>>) -> &'static str {
    match value {
        None | Some(None) => "nothing",
        Some(Some(Value::Batch { .. })) => "a value that depends on the sample",
        Some(Some(Value::Floats(_))) => "constant numbers",
        Some(Some(Value::Dimensions(_))) => "integers",
    }
}

impl Importer<'_> {
    /// Appends what the node computes and says what its first output stands for.
    pub(super) fn apply(&mut self, node: &NodeProto, values: &[Option<Value>]) -> Result<Value> {
        let inputs = Inputs(values);
        let dimensions: Option<Vec<&Dimensions>> =
            values.iter().flatten().map(|v| if let Value::Dimensions(d) = v { Some(d) } else { None }).collect();
        if let Some(dimensions) = dimensions.filter(|d| !d.is_empty()) {
            return Dimensions::compute(node, &dimensions).map(Value::Dimensions);
        }
        if let Some(Some(Value::Floats(tensor))) = values.first()
            && (node.op_type == "CastLike" || !values.iter().flatten().any(|v| matches!(v, Value::Batch { .. })))
        {
            return reshape_weights(node, &inputs, tensor);
        }
        match node.op_type.as_str() {
            "Identity" | "Dropout" | "Cast" | "CastLike" => self.pass_through(node, &inputs),
            "Gemm" => self.gemm(node, &inputs),
            "MatMul" => self.matmul(&inputs),
            "Conv" => self.convolution(node, &inputs),
            "BatchNormalization" => self.batch_norm(node, &inputs),
            "Relu" => self.activation(node, &inputs, Activation::Relu),
            "LeakyRelu" => {
                let activation = Activation::leaky_relu(node.float("alpha", 0.01))?;
                self.activation(node, &inputs, activation)
            }
            "Tanh" => self.activation(node, &inputs, Activation::Tanh),
            "Sigmoid" => self.activation(node, &inputs, Activation::Sigmoid),
            "Add" if values.iter().flatten().all(|v| matches!(v, Value::Batch { .. })) => self.add(&inputs),
            "Add" | "Sub" | "Mul" | "Div" => self.scale_or_shift(node, &inputs),
            "AveragePool" | "MaxPool" | "GlobalAveragePool" | "GlobalMaxPool" => self.pool(node, &inputs),
            "ReduceMean" => self.mean(node, &inputs),
            "Flatten" | "Reshape" | "Squeeze" | "Unsqueeze" => {
                let batch = inputs.batch(0)?;
                let dims = match node.op_type.as_str() {
                    "Flatten" => flatten(node, batch.dims)?,
                    "Reshape" => self.reshape(node, inputs.dimensions(1)?, batch.dims)?,
                    _ => squeeze(node, inputs.axes(node, 1)?, batch.dims)?,
                };
                Ok(Value::Batch { node: batch.node, dims })
            }
            "Shape" => {
                let dims = Dimensions::of_batch(inputs.batch(0)?.dims);
                Ok(Value::Dimensions(shape_range(node, dims.values)))
            }
            "Softmax" | "LogSoftmax" => Err(Error::unsupported(
                "a softmax",
                "the network must end at its logits; export it without the softmax",
            )),
            "Gelu" | "Erf" | "Elu" | "Selu" | "Celu" | "Softplus" | "HardSwish" | "Mish" | "Swish" | "Clip"
            | "PRelu" | "HardSigmoid" | "Softsign" | "ThresholdedRelu" => Err(Error::unsupported(
                "this activation",
                "activations must be non-decreasing and non-expansive: relu, leaky relu with slope in [0, 1], tanh, \
                 sigmoid and identity are read",
            )),
            _ => Err(Error::unsupported("this operator", SUPPORTED)),
        }
    }

    fn pass_through(&mut self, node: &NodeProto, inputs: &Inputs<'_>) -> Result<Value> {
        let Batch { node: id, dims } = inputs.batch(0)?;
        if node.op_type == "Cast" && node.int("to", 1) != 1 {
            return Err(Error::unsupported(
                "a cast of values",
                "values stay 32-bit floats; export in single precision",
            ));
        }
        if let Some(Some(Value::Dimensions(training))) = inputs.0.get(2)
            && training.known()? != [0]
        {
            return Err(Error::unsupported("dropout in training mode", "export the network in eval mode"));
        }
        Ok(Value::Batch { node: id, dims: dims.to_vec() })
    }

    /// The operand of a dense layer, as a vector.
    fn vector(&mut self, batch: &Batch<'_>) -> Result<usize> {
        match batch.dims {
            &[size] => self.builder.push_reshape(batch.node, Shape::Vector(size)),
            dims => Err(Error::unsupported(
                format!("a dense layer on batch × {dims:?}"),
                "it would act on the last axis only; flatten the values to batch × features first",
            )),
        }
    }

    /// The operand of a convolution or pooling, as a map.
    fn map(&mut self, batch: &Batch<'_>) -> Result<(usize, MapShape)> {
        match batch.dims {
            &[channels, height, width] => {
                let node = self.builder.push_reshape(batch.node, Shape::map(channels, height, width))?;
                Ok((node, MapShape { channels, height, width }))
            }
            dims => Err(Error::unsupported(
                format!("an operand of batch × {dims:?}"),
                "convolutions and poolings are 2-D: batch × channels × height × width",
            )),
        }
    }

    fn gemm(&mut self, node: &NodeProto, inputs: &Inputs<'_>) -> Result<Value> {
        node.require_int("transA", 0, "samples are rows; export without transA")?;
        let batch = inputs.batch(0)?;
        let input = self.vector(&batch)?;
        let mut weights = matrix(inputs.floats(1)?)?;
        if node.int("transB", 0) == 0 {
            weights = weights.transposed();
        }
        let (alpha, beta) = (node.float("alpha", 1.0), node.float("beta", 1.0));
        weights.as_mut_slice().iter_mut().for_each(|w| *w *= alpha);
        let bias = match inputs.optional_floats(2)? {
            Some(bias) => per_channel(bias, &[weights.rows()])?.iter().map(|&b| b as f32 * beta).collect(),
            None => vec![],
        };
        let bias = real_bias(bias);
        let dims = vec![weights.rows()];
        Ok(Value::Batch { node: self.builder.push_linear(input, weights, bias)?, dims })
    }

    fn matmul(&mut self, inputs: &Inputs<'_>) -> Result<Value> {
        let batch = inputs.batch(0).map_err(|_| {
            Error::unsupported("weights on the left", "samples are rows: values × weights, as nn.Linear is exported")
        })?;
        let weights = matrix(inputs.floats(1)?)?.transposed();
        let input = self.vector(&batch)?;
        let dims = vec![weights.rows()];
        Ok(Value::Batch { node: self.builder.push_linear(input, weights, None)?, dims })
    }

    fn convolution(&mut self, node: &NodeProto, inputs: &Inputs<'_>) -> Result<Value> {
        node.require_int("group", 1, "every output channel must see all input channels; use groups=1")?;
        let (input, map) = self.map(&inputs.batch(0)?)?;
        let weights = inputs.floats(1)?;
        let &[out, channels, height, width] = &weights.dims[..] else {
            return Err(Error::shape("weights", "out × in × height × width", format!("{:?}", weights.dims)));
        };
        let kernel = [height, width];
        if node.attribute("kernel_shape").is_some() && node.kernel()? != kernel {
            return Err(Error::shape("kernel_shape", format!("{kernel:?}"), format!("{:?}", node.kernel()?)));
        }
        let window = node.window(kernel, map)?;
        let columns = product(&[channels, height, width]).unwrap_or(0);
        let taps = Matrix::from_vec(out, columns, weights.values.clone())?;
        let bias = inputs.optional_floats(2)?.and_then(|bias| real_bias(bias.values.clone()));
        let id = self.builder.push_convolution(input, taps, window, 1, bias)?;
        Ok(self.batch_of(id))
    }

    fn batch_norm(&mut self, node: &NodeProto, inputs: &Inputs<'_>) -> Result<Value> {
        node.require_int("training_mode", 0, "export the network in eval mode")?;
        let batch = inputs.batch(0)?;
        let id = if batch.dims.len() == 1 { self.vector(&batch)? } else { self.map(&batch)?.0 };
        let values = |k| inputs.floats(k).map(|t| t.values.clone());
        let (scale, shift, mean, variance) = (values(1)?, values(2)?, values(3)?, values(4)?);
        let norm = BatchNorm { scale, shift, mean, variance, epsilon: node.float("epsilon", 1e-5) };
        let (scale, shift) = norm.scale_shift(self.builder.shape_of(id).channels())?;
        self.scaled(node, id, batch.dims, scale, shift)
    }

    fn scaled(
        &mut self,
        node: &NodeProto,
        id: usize,
        dims: &[usize],
        scale: Vec<f64>,
        shift: Vec<f64>,
    ) -> Result<Value> {
        let id = self.builder.push_scale_shift(id, scale, shift)?;
        self.builder.rename(id, name(node));
        Ok(Value::Batch { node: id, dims: dims.to_vec() })
    }

    fn activation(&mut self, node: &NodeProto, inputs: &Inputs<'_>, activation: Activation) -> Result<Value> {
        let batch = inputs.batch(0)?;
        let id = self.builder.push_activation(batch.node, activation)?;
        self.builder.rename(id, name(node));
        Ok(Value::Batch { node: id, dims: batch.dims.to_vec() })
    }

    fn add(&mut self, inputs: &Inputs<'_>) -> Result<Value> {
        let (a, b) = (inputs.batch(0)?, inputs.batch(1)?);
        if a.dims != b.dims {
            return Err(Error::shape("sum", format!("batch × {:?} twice", a.dims), format!("batch × {:?}", b.dims)));
        }
        let other = self.builder.push_reshape(b.node, self.builder.shape_of(a.node))?;
        Ok(Value::Batch { node: self.builder.push_add(a.node, other)?, dims: a.dims.to_vec() })
    }

    /// A value plus, minus, times or over one constant per channel.
    fn scale_or_shift(&mut self, node: &NodeProto, inputs: &Inputs<'_>) -> Result<Value> {
        let swapped = inputs.batch(0).is_err() && matches!(node.op_type.as_str(), "Add" | "Mul");
        let (batch, constant) = if swapped { (1, 0) } else { (0, 1) };
        let (batch, constant) = (inputs.batch(batch)?, inputs.floats(constant)?);
        let id = if batch.dims.len() == 1 { self.vector(&batch)? } else { self.map(&batch)?.0 };
        let values = per_channel(constant, batch.dims)?;
        let (ones, zeros) = (vec![1.0; values.len()], vec![0.0; values.len()]);
        let (scale, shift) = match node.op_type.as_str() {
            "Add" => (ones, values),
            "Sub" => (ones, values.iter().map(|v| -v).collect()),
            "Mul" => (values, zeros),
            _ => (values.iter().map(|v| 1.0 / v).collect(), zeros),
        };
        if let Some(v) = scale.iter().chain(&shift).find(|v| !v.is_finite()) {
            return Err(Error::shape("constant", "finite numbers", v));
        }
        self.scaled(node, id, batch.dims, scale, shift)
    }

    fn pool(&mut self, node: &NodeProto, inputs: &Inputs<'_>) -> Result<Value> {
        let (id, input) = self.map(&inputs.batch(0)?)?;
        let whole = Window { kernel: [input.height, input.width], stride: [1, 1], padding: [0; 4], dilation: [1; 2] };
        let map = match node.op_type.as_str() {
            "GlobalAveragePool" => FixedMap::GlobalAverage { input },
            "GlobalMaxPool" => FixedMap::MaxPool { input, window: whole },
            "MaxPool" => FixedMap::MaxPool { input, window: node.window(node.kernel()?, input)? },
            _ => FixedMap::AveragePool {
                input,
                window: node.window(node.kernel()?, input)?,
                count_padding: node.int("count_include_pad", 0) != 0,
            },
        };
        let out = map.output()?;
        let dims = vec![out.channels, out.height, out.width];
        Ok(Value::Batch { node: self.builder.push_fixed(id, map)?, dims })
    }

    fn mean(&mut self, node: &NodeProto, inputs: &Inputs<'_>) -> Result<Value> {
        let (id, input) = self.map(&inputs.batch(0)?)?;
        let mut axes = Vec::new();
        for axis in inputs.axes(node, 1)?.unwrap_or_default() {
            axes.push(place(axis, 4)?);
        }
        axes.sort_unstable();
        if axes != [2, 3] {
            return Err(Error::unsupported(
                format!("a mean over the axes {axes:?}"),
                "only the mean over height and width (axes 2 and 3) is read",
            ));
        }
        let id = self.builder.push_fixed(id, FixedMap::GlobalAverage { input })?;
        let dims = if node.int("keepdims", 1) != 0 { vec![input.channels, 1, 1] } else { vec![input.channels] };
        Ok(Value::Batch { node: id, dims })
    }

    fn reshape(&self, node: &NodeProto, target: &Dimensions, dims: &[usize]) -> Result<Vec<usize>> {
        let refuse = || {
            Error::unsupported(
                format!("a reshape of batch × {dims:?} to {:?}", target.values),
                "the batch must stay the first axis and samples must not mix; use Flatten or reshape(x.shape[0], ...)",
            )
        };
        let copy_zeros = node.int("allowzero", 0) == 0;
        let size = product(dims).ok_or_else(refuse)?;
        let [batch, rest @ ..] = &target.values[..] else { return Err(refuse()) };
        let batch_is_inferred = *batch == Dimension::Known(-1);
        let batch_stays = match *batch {
            Dimension::Batch | Dimension::Known(-1) => true,
            Dimension::Known(0) => copy_zeros,
            Dimension::Known(v) => self.fixed_batch == Some(v),
        };
        let mut out = Vec::with_capacity(rest.len());
        let mut inferred = None;
        for (axis, dim) in rest.iter().enumerate() {
            out.push(match *dim {
                Dimension::Known(-1) if inferred.is_none() && !batch_is_inferred => {
                    inferred = Some(axis);
                    1
                }
                Dimension::Known(0) if copy_zeros => *dims.get(axis).ok_or_else(refuse)?,
                Dimension::Known(v) if v > 0 => v as usize,
                _ => return Err(refuse()),
            });
        }
        let known = product(&out).filter(|&p| p > 0).ok_or_else(refuse)?;
        if let Some(axis) = inferred {
            out[axis] = size / known;
        }
        if !batch_stays || product(&out) != Some(size) { Err(refuse()) } else { Ok(out) }
    }

    fn batch_of(&self, node: usize) -> Value {
        let dims = match self.builder.shape_of(node) {
            Shape::Vector(size) => vec![size],
            Shape::Map(map) => vec![map.channels, map.height, map.width],
            Shape::Tensor(dims) => dims.sizes().get(1..).unwrap_or_default().to_vec(),
        };
        Value::Batch { node, dims }
    }
}

/// The part of a shape that a Shape node asks for.
pub(super) fn shape_range(node: &NodeProto, all: Vec<Dimension>) -> Dimensions {
    let length = all.len() as i64;
    let clamp = |v: i64| (if v < 0 { v.saturating_add(length) } else { v }).clamp(0, length) as usize;
    let (start, end) = (clamp(node.int("start", 0)), clamp(node.int("end", length)));
    Dimensions { values: all.get(start..end).unwrap_or_default().to_vec(), is_scalar: false }
}

/// The name of a layer: that of its node or, where there is none, of its value.
fn name(node: &NodeProto) -> &str {
    if node.name.is_empty() { node.output.first().map_or("", String::as_str) } else { &node.name }
}
