//! Nodes with weights: dense layers over the last axis, convolutions, norms.

use super::constant::{Constant, Tensor, place};
use super::import::{Importer, Value};
use super::nodes::Inputs;
use super::proto::NodeProto;
use crate::graph::{Binary, Dims, Structure, Unary};
use crate::linalg::Matrix;
use crate::network::{BatchNorm, Network, NodeId, Shape, Window};
use crate::{Error, Result};

/// Exporters write zeros if a layer has no bias, so a bias of zeros counts as none.
fn real_bias(bias: Vec<f32>) -> Option<Vec<f32>> {
    bias.iter().any(|&b| b != 0.0).then_some(bias)
}

impl Importer<'_> {
    pub(super) fn gemm(&mut self, node: &NodeProto, inputs: &Inputs<'_>) -> Result<Value> {
        let (mut a, mut b) = (inputs.value(0)?.clone(), inputs.value(1)?.clone());
        if self.dims(&a).len() != 2 || self.dims(&b).len() != 2 {
            return Err(Error::shape("Gemm", "two operands of two axes", format!("{:?}", self.dims(&a))));
        }
        if node.int("transA", 0) != 0 {
            a = self.transpose(&a, &[1, 0])?;
        }
        let is_turned = node.int("transB", 0) != 0;
        let (alpha, beta) = (node.float("alpha", 1.0), node.float("beta", 1.0));
        let mut out = if let (Value::Node(_), Value::Constant(weights, _)) = (&a, &b) {
            let weights = matrix(weights.to_floats())?;
            let mut weights = if is_turned { weights } else { weights.transposed() };
            if alpha != 1.0 {
                weights.as_mut_slice().iter_mut().for_each(|w| *w *= alpha);
            }
            let bias = match inputs.get(2) {
                Some(Value::Constant(bias, _)) if bias.len() == weights.rows() => {
                    real_bias(bias.to_floats().values.iter().map(|b| b * beta).collect())
                }
                _ => None,
            };
            let done = bias.is_some() || inputs.get(2).is_none();
            let out = self.dense(&a, weights, bias)?;
            if done {
                return Ok(out);
            }
            out
        } else {
            if is_turned {
                b = self.transpose(&b, &[1, 0])?;
            }
            let product = self.product(&a, &b)?;
            self.times(&product, alpha)?
        };
        if let Some(c) = inputs.get(2) {
            let c = self.times(c, beta)?;
            out = self.binary(Binary::Add, &out, &c)?;
        }
        Ok(out)
    }

    fn times(&mut self, value: &Value, factor: f32) -> Result<Value> {
        if factor == 1.0 {
            return Ok(value.clone());
        }
        let factor = self.constant(Constant::Floats(Tensor::scalar(factor)), false)?;
        self.binary(Binary::Multiply, value, &factor)
    }

    pub(super) fn matmul(&mut self, inputs: &Inputs<'_>) -> Result<Value> {
        self.product(inputs.value(0)?, inputs.value(1)?)
    }

    pub(super) fn product(&mut self, a: &Value, b: &Value) -> Result<Value> {
        let (left, right) = (self.dims(a), self.dims(b));
        if left.is_empty() || right.is_empty() {
            return Err(Error::shape("MatMul", "operands with axes", "a single number"));
        }
        // A vector is a matrix with one row or column; that axis is removed again.
        if left.len() == 1 || right.len() == 1 {
            let a = if left.len() == 1 { self.reshape(a, &[1, left[0]])? } else { a.clone() };
            let b = if right.len() == 1 { self.reshape(b, &[right[0], 1])? } else { b.clone() };
            let out = self.product(&a, &b)?;
            let mut dims = self.dims(&out);
            if right.len() == 1 {
                dims.pop();
            }
            if left.len() == 1 {
                dims.remove(dims.len() - 1 - usize::from(right.len() != 1));
            }
            return self.reshape(&out, &dims);
        }
        match (a, b) {
            (Value::Node(_), Value::Constant(weights, _)) if right.len() == 2 => {
                let weights = matrix(weights.to_floats())?.transposed();
                self.dense(a, weights, None)
            }
            _ => self.structure(Structure::MatMul, &[a.clone(), b.clone()]),
        }
    }

    /// W x + bias for every vector along the last axis. With several positions it is a 1 × 1 convolution, for which
    /// the channels are moved to the front.
    fn dense(&mut self, value: &Value, weights: Matrix<f32>, bias: Option<Vec<f32>>) -> Result<Value> {
        let mut dims = self.dims(value);
        let (inputs, outputs) = (weights.cols(), weights.rows());
        if dims.last() != Some(&inputs) {
            return Err(Error::shape("weights of a dense layer", format!("{inputs} values"), format!("{dims:?}")));
        }
        let positions = dims.iter().product::<usize>() / inputs.max(1);
        let rank = dims.len();
        *dims.last_mut().unwrap_or(&mut 0) = outputs;
        let out = dims;
        if positions == 1 {
            let flat = self.reshape(value, &[1, inputs])?;
            let flat = self.node_of(&flat)?;
            let id = self.builder.push_linear(flat, weights, bias)?;
            return self.reshape(&Value::Node(id), &out);
        }
        let map = if rank == 4 && out[0] == 1 {
            self.transpose(value, &[0, 3, 1, 2])?
        } else {
            let rows = self.reshape(value, &[1, positions, inputs])?;
            let first = self.transpose(&rows, &[0, 2, 1])?;
            self.reshape(&first, &[1, inputs, positions, 1])?
        };
        let map = self.node_of(&map)?;
        let id = self.builder.push_convolution(map, weights, Window::square(1, 1, 0), 1, bias)?;
        self.channels_last(id, &out)
    }

    /// The result of the 1 × 1 convolution that replaces a dense layer, with the channels moved back to the end.
    fn channels_last(&mut self, map: usize, out: &[usize]) -> Result<Value> {
        let outputs = out.last().copied().unwrap_or(1);
        let positions = out.iter().product::<usize>() / outputs.max(1);
        let result = if out.len() == 4 && out[0] == 1 {
            self.transpose(&Value::Node(map), &[0, 2, 3, 1])?
        } else {
            let columns = self.reshape(&Value::Node(map), &[1, outputs, positions])?;
            let rows = self.transpose(&columns, &[0, 2, 1])?;
            self.reshape(&rows, out)?
        };
        if let Value::Node(id) = result {
            self.dense.insert(id, map);
        }
        Ok(result)
    }

    /// A dense layer followed by scale·y + shift is another dense layer; scale and shift have one number per unit.
    pub(super) fn scaled_dense(&mut self, node: usize, scale: Vec<f64>, shift: Vec<f64>) -> Result<Option<Value>> {
        let Some(&map) = self.dense.get(&node) else { return Ok(None) };
        let out = self.dims(&Value::Node(node));
        let scaled = self.builder.push_scale_shift(map, scale, shift)?;
        self.channels_last(scaled, &out).map(Some)
    }

    pub(super) fn convolution(&mut self, node: &NodeProto, inputs: &Inputs<'_>) -> Result<Value> {
        let weights = inputs.weights(1)?;
        let value = inputs.value(0)?;
        if let Value::Constant(..) = value {
            return self.computed(value, |importer, value| {
                importer.convolution(node, &Inputs(&[&[Some(value)], &inputs.0[1..]].concat()))
            });
        }
        let spatial = weights.dims.len().saturating_sub(2);
        if spatial == 3 {
            return self.plane_by_plane(node, inputs, weights);
        }
        if !(1..=2).contains(&spatial) {
            return Err(Error::unsupported(
                format!("a convolution with weights {:?}", weights.dims),
                "convolutions are over one or two axes",
            ));
        }
        // A convolution can add zeros around its map itself, which costs nothing.
        let (value, zeros) = self.without_zero_padding(value, spatial);
        let dims = self.dims(&value);
        if dims.len() != spatial + 2 {
            return Err(Error::shape(
                "a convolution",
                format!("batch × channels × {spatial} axes"),
                format!("{dims:?}"),
            ));
        }
        let kernel = &weights.dims[2..];
        if node.ints("kernel_shape").is_some_and(|shape| shape.iter().map(|&k| k as usize).ne(kernel.iter().copied())) {
            let got = format!("{:?}", node.ints("kernel_shape"));
            return Err(Error::shape("kernel_shape", format!("{kernel:?}"), got));
        }
        let mut padded = dims[2..].to_vec();
        padded.iter_mut().zip(&zeros).for_each(|(d, p)| *d += p[0] + p[1]);
        let mut windows = node.windows(kernel, &padded)?;
        windows.padding.iter_mut().zip(&zeros).for_each(|(a, b)| *a = [a[0] + b[0], a[1] + b[1]]);
        let groups = usize::try_from(node.int("group", 1)).unwrap_or(0);
        let bias = inputs.floats(2)?.and_then(|bias| real_bias(bias.values));
        let (out, columns) = (weights.dims[0], weights.dims[1..].iter().product());
        let taps = Matrix::from_vec(out, columns, weights.values)?;
        let [channels, height, width] = match dims[1..] {
            [channels, width] => [channels, 1, width],
            _ => [dims[1], dims[2], dims[3]],
        };
        let maps = self.reshape(&value, &[dims[0], channels, height, width])?;
        let result = self.convolved(&maps, taps, windows.plane(), groups, bias)?;
        if spatial == 2 {
            return Ok(result);
        }
        let &[samples, .., size] = &self.dims(&result)[..] else { return Ok(result) };
        self.reshape(&result, &[samples, out, size])
    }

    /// A convolution over three axes whose kernel has size one along one of them is the same convolution of every
    /// plane.
    fn plane_by_plane(&mut self, node: &NodeProto, inputs: &Inputs<'_>, weights: Tensor<f32>) -> Result<Value> {
        let value = inputs.value(0)?;
        let (dims, kernel) = (self.dims(value), &weights.dims[2..]);
        let &[samples, channels, ref sizes @ ..] = &dims[..] else {
            return Err(Error::shape("a convolution", "batch × channels × three axes", format!("{dims:?}")));
        };
        if sizes.len() != 3 {
            return Err(Error::shape("a convolution", "batch × channels × three axes", format!("{dims:?}")));
        }
        let mut windows = node.windows(kernel, sizes)?;
        let Some(axis) = (0..3).find(|&k| kernel[k] == 1 && windows.padding[k] == [0, 0]) else {
            return Err(Error::unsupported(
                format!("a convolution with weights {:?}", weights.dims),
                "convolutions reach over one or two axes; replace those over three",
            ));
        };
        let (count, stride) = (sizes[axis].div_ceil(windows.stride[axis]), windows.stride[axis]);
        let chosen = self.slice(value, 2 + axis, 0, stride as i64, count)?;
        let order: Vec<usize> = [0, 2 + axis, 1].into_iter().chain((2..5).filter(|&k| k != 2 + axis)).collect();
        let planes = self.transpose(&chosen, &order)?;
        let rest: Vec<usize> = (0..3).filter(|&k| k != axis).map(|k| sizes[k]).collect();
        let planes = self.reshape(&planes, &[&[samples * count, channels], &rest[..]].concat())?;
        for list in [&mut windows.kernel, &mut windows.stride, &mut windows.dilation, &mut windows.beyond] {
            list.remove(axis);
        }
        windows.padding.remove(axis);
        let (out, columns) = (weights.dims[0], weights.dims[1..].iter().product());
        let taps = Matrix::from_vec(out, columns, weights.values)?;
        let groups = usize::try_from(node.int("group", 1)).unwrap_or(0);
        let bias = inputs.floats(2)?.and_then(|bias| real_bias(bias.values));
        let result = self.convolved(&planes, taps, windows.plane(), groups, bias)?;
        let size = self.dims(&result)[2..].to_vec();
        let apart = self.reshape(&result, &[&[samples, count, out], &size[..]].concat())?;
        // Batch, channels, and the planes in their order.
        let mut order = vec![0, 2, 3, 4];
        order.insert(2 + axis, 1);
        self.transpose(&apart, &order)
    }

    /// A convolution of one map or, if a sample has several (frames, or windows), of all of them: they are stacked to
    /// one map, separated by the zeros that each has around it. Rows of the result that reach over two maps are cut
    /// out again, but training sees them.
    fn convolved(
        &mut self,
        maps: &Value,
        taps: Matrix<f32>,
        mut window: Window,
        groups: usize,
        bias: Option<Vec<f32>>,
    ) -> Result<Value> {
        let &[count, channels, height, width] = &self.dims(maps)[..] else {
            return Err(Error::shape("a convolution", "four axes", format!("{:?}", self.dims(maps))));
        };
        if count == 1 {
            let map = self.node_of(maps)?;
            return self.builder.push_convolution(map, taps, window, groups, bias).map(Value::Node);
        }
        let out = taps.rows();
        let [top, left, bottom, right] = window.padding;
        let (stride, reach) = (window.stride[0], window.dilation[0] * (window.kernel[0] - 1) + 1);
        let padded = height + top + bottom;
        let kept = padded.checked_sub(reach).map(|rows| rows / stride + 1);
        let kept = kept.ok_or_else(|| Error::shape("kernel", format!("at most {padded} rows"), reach))?;
        let rows = padded.next_multiple_of(stride);
        let around = [[0, 0], [0, 0], [top as i64, (rows - height - top) as i64], [0, 0]];
        let apart = self.pad(maps, &around, 0.0)?;
        let turned = self.transpose(&apart, &[1, 0, 2, 3])?;
        let stacked = self.reshape(&turned, &[1, channels, count * rows, width])?;
        let stacked = self.node_of(&stacked)?;
        window.padding = [0, left, reach.saturating_sub(stride), right];
        let id = self.builder.push_convolution(stacked, taps, window, groups, bias)?;
        let each = rows / stride;
        let columns = self.builder.shape_of(id).size() / (out * count * each).max(1);
        let separate = self.reshape(&Value::Node(id), &[out, count, each, columns])?;
        let cut = self.slice(&separate, 2, 0, 1, kept)?;
        self.transpose(&cut, &[1, 0, 2, 3])
    }

    /// The result of a convolution of a constant, computed by running it as a network of its own. Samples are along
    /// the first axis.
    pub(super) fn computed(
        &mut self,
        value: &Value,
        apply: impl FnOnce(&mut Self, Value) -> Result<Value>,
    ) -> Result<Value> {
        let tensor = self.floats_of(value)?;
        let [samples, ref sizes @ ..] = tensor.dims[..] else {
            return Err(Error::shape("a convolution of a constant", "batch × channels × positions", "a single number"));
        };
        let builder = Network::builder(Shape::from_dims(Dims::new(&[&[1], sizes].concat())?))?;
        let u = Matrix::from_vec(samples, sizes.iter().product(), tensor.values)?;
        let input = builder.here().0;
        let outer = std::mem::replace(&mut self.builder, builder);
        let out = apply(self, Value::Node(input)).and_then(|out| self.node_of(&out));
        let own = std::mem::replace(&mut self.builder, outer);
        let out = out?;
        let mut dims = own.shape_of(out).dims().sizes().to_vec();
        super::constant::size(&[samples, dims.iter().product()])?;
        dims[0] = samples;
        let values = own.at(NodeId(out))?.build()?.forward(&u)?.as_slice().to_vec();
        self.constant(Constant::Floats(Tensor { dims, values }), matches!(value, Value::Constant(_, true)))
    }

    /// A norm by the mean and variance of a constant itself; standardised weights are written in this way.
    fn own_norm(&mut self, node: &NodeProto, inputs: &Inputs<'_>) -> Result<Value> {
        let value = inputs.value(0)?;
        let dims = self.dims(value);
        let axes: Vec<usize> = (0..dims.len()).filter(|&axis| axis != 1).collect();
        let mean = |importer: &mut Self, value: Value| {
            let reduction = crate::graph::Reduction::Mean;
            importer.structure(Structure::Reduce { reduction, axes: axes.clone(), keep: true }, &[value])
        };
        let average = mean(self, value.clone())?;
        let centred = self.binary(Binary::Subtract, value, &average)?;
        let squares = self.binary(Binary::Multiply, &centred, &centred)?;
        let variance = mean(self, squares)?;
        let epsilon = self.number(node.float("epsilon", 1e-5))?;
        let moved = self.binary(Binary::Add, &variance, &epsilon)?;
        let root = self.unary(Unary::Sqrt, &moved)?;
        let mut out = self.binary(Binary::Divide, &centred, &root)?;
        let per_channel: Vec<usize> = (0..dims.len()).map(|axis| if axis == 1 { dims[1] } else { 1 }).collect();
        for (k, binary) in [(1, Binary::Multiply), (2, Binary::Add)] {
            let each = self.reshape(inputs.value(k)?, &per_channel)?;
            out = self.binary(binary, &out, &each)?;
        }
        Ok(out)
    }

    pub(super) fn batch_norm(&mut self, node: &NodeProto, inputs: &Inputs<'_>) -> Result<Value> {
        if node.int("training_mode", 0) != 0
            && inputs.0.iter().flatten().all(|v| matches!(v, Value::Constant(..)))
            && self.dims(inputs.value(0)?).len() >= 2
        {
            return self.own_norm(node, inputs);
        }
        node.require_int("training_mode", 0, "export the network in eval mode")?;
        node.require_int("spatial", 1, "one mean per channel is read; export again with a newer opset")?;
        let value = inputs.value(0)?;
        let dims = self.dims(value);
        let &[samples, channels, ..] = &dims[..] else {
            return Err(Error::shape("batch norm", "batch × channels × positions", format!("{dims:?}")));
        };
        let values = |k| inputs.weights(k).map(|t| t.values);
        let (scale, shift, mean, variance) = (values(1)?, values(2)?, values(3)?, values(4)?);
        let norm = BatchNorm { scale, shift, mean, variance, epsilon: node.float("epsilon", 1e-5) };
        let (scale, shift) = norm.scale_shift(channels)?;
        if let Value::Node(_) = value
            && samples == 1
        {
            return self.scale_channels(value, scale, shift);
        }
        let mut out = value.clone();
        for (binary, values) in [(Binary::Multiply, scale), (Binary::Add, shift)] {
            let values = Tensor { dims: vec![channels], values: values.iter().map(|&v| v as f32).collect() };
            let dims: Vec<usize> = std::iter::once(channels).chain(vec![1; dims.len().saturating_sub(2)]).collect();
            let constant = self.constant(Constant::Floats(values.reshaped(dims)?), true)?;
            out = self.structure(Structure::Binary(binary), &[out, constant])?;
        }
        Ok(out)
    }

    /// (x − offset)·scale, with one number for all values or one for each place of the last axis.
    pub(super) fn scaler(&mut self, node: &NodeProto, inputs: &Inputs<'_>) -> Result<Value> {
        let mut out = inputs.value(0)?.clone();
        for (name, binary, default) in [("offset", Binary::Subtract, 0.0), ("scale", Binary::Multiply, 1.0)] {
            let values = node.floats(name).filter(|v| !v.is_empty()).unwrap_or(&[default]).to_vec();
            let constant = self.constant(Constant::Floats(Tensor { dims: vec![values.len()], values }), true)?;
            out = self.binary(binary, &out, &constant)?;
        }
        Ok(out)
    }

    /// scale·x + shift per channel (the second axis): folded into the convolution before or after it if there is one.
    pub(super) fn scale_channels(&mut self, value: &Value, scale: Vec<f64>, shift: Vec<f64>) -> Result<Value> {
        let dims = self.dims(value);
        let channels = dims[1];
        let node = self.node_of(value)?;
        let flat = match self.builder.shape_of(node) {
            Shape::Vector(_) | Shape::Map(_) => value.clone(),
            Shape::Tensor(_) => {
                let positions = dims[2..].iter().product::<usize>();
                self.reshape(value, &[1, channels, 1, positions])?
            }
        };
        let node = self.node_of(&flat)?;
        let out = self.builder.push_scale_shift(node, scale, shift)?;
        self.reshape(&Value::Node(out), &dims)
    }

    /// Norms whose mean depends on the sample: they normalise, scale and shift.
    pub(super) fn norm(&mut self, node: &NodeProto, inputs: &Inputs<'_>) -> Result<Value> {
        let value = inputs.value(0)?;
        let dims = self.dims(value);
        let epsilon = node.float("epsilon", 1e-5);
        let own = std::slice::from_ref(value);
        let (mut out, per_channel) = match node.op_type.as_str() {
            "LayerNormalization" => {
                let axis = place(node.int("axis", -1), dims.len())?;
                (self.structure(Structure::Normalise { axis, epsilon }, own)?, None)
            }
            "RMSNormalization" => {
                let axis = place(node.int("axis", -1), dims.len())?;
                let squares = self.structure(Structure::Binary(Binary::Multiply), &[value.clone(), value.clone()])?;
                let axes = (axis..dims.len()).collect();
                let reduce = Structure::Reduce { reduction: crate::graph::Reduction::Mean, axes, keep: true };
                let mean = self.structure(reduce, &[squares])?;
                let epsilon = self.constant(Constant::Floats(Tensor::scalar(epsilon)), false)?;
                let moved = self.binary(Binary::Add, &mean, &epsilon)?;
                let root = self.unary(Unary::Sqrt, &moved)?;
                (self.structure(Structure::Binary(Binary::Divide), &[value.clone(), root])?, None)
            }
            _ => {
                let [samples, channels, ..] = dims[..] else {
                    return Err(Error::shape(&node.op_type, "batch × channels × positions", format!("{dims:?}")));
                };
                let instance = node.op_type == "InstanceNormalization";
                let groups = if instance { channels as i64 } else { node.int("num_groups", 0) };
                let groups = usize::try_from(groups).ok().filter(|&g| g > 0 && channels.is_multiple_of(g));
                let groups =
                    groups.ok_or_else(|| Error::shape("num_groups", format!("a divisor of {channels}"), "not"))?;
                let size = dims.iter().product::<usize>() / (samples * groups).max(1);
                let parts = self.reshape(value, &[samples, groups, size])?;
                let flat = self.structure(Structure::Normalise { axis: 2, epsilon }, &[parts])?;
                (self.reshape(&flat, &dims)?, Some((channels, groups)))
            }
        };
        for (k, binary, neutral) in [(1, Binary::Multiply, 1.0), (2, Binary::Add, 0.0)] {
            let Some(weights) = inputs.floats(k)? else { continue };
            if weights.values.iter().all(|&v| v == neutral) {
                continue;
            }
            let weights = match per_channel {
                None => weights,
                Some((channels, groups)) => {
                    // Before opset 21 a group norm has one number per group.
                    let each = if weights.values.len() == groups { channels / groups } else { 1 };
                    let values: Vec<f32> = weights.values.iter().flat_map(|&v| std::iter::repeat_n(v, each)).collect();
                    let tail = vec![1; dims.len() - 2];
                    Tensor { dims: vec![channels], values: values.clone() }
                        .reshaped(std::iter::once(values.len()).chain(tail).collect())?
                }
            };
            // Scale and shift stay next to the norm, even in front of a linear map: the norm and they are one node of
            // the file, so folding them would need another norm there.
            let constant = self.constant(Constant::Floats(weights), true)?;
            out = self.structure(Structure::Binary(binary), &[out, constant])?;
        }
        Ok(out)
    }
}

fn matrix(tensor: Tensor<f32>) -> Result<Matrix<f32>> {
    match tensor.dims[..] {
        [rows, cols] => Matrix::from_vec(rows, cols, tensor.values),
        _ => Err(Error::shape("weights", "two axes", format!("{:?}", tensor.dims))),
    }
}
