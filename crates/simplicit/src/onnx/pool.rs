//! Poolings: plain ones of feature maps, and a general form for all others.

use super::attributes::Windows;
use super::constant::{Constant, Tensor};
use super::import::{Importer, Value};
use super::nodes::Inputs;
use super::proto::{AttributeProto, NodeProto};
use crate::graph::{Binary, Pooling, Structure};
use crate::layout::MapShape;
use crate::network::FixedMap;
use crate::{Error, Result};

impl Importer<'_> {
    /// x / (bias + alpha·mean of x² over the channels around it)^beta, where missing channels count as zeros.
    pub(super) fn local_response(&mut self, node: &NodeProto, inputs: &Inputs<'_>) -> Result<Value> {
        let value = inputs.value(0)?;
        let dims = self.dims(value);
        let [batch, channels, rest @ ..] = &dims[..] else {
            return Err(Error::shape("LRN", "batch × channels × positions", format!("{dims:?}")));
        };
        let size = node.int("size", 0);
        if !(1..=1 << 12).contains(&size) {
            return Err(Error::shape("size of an LRN", "a positive number of channels", size));
        }
        let squares = self.binary(Binary::Multiply, value, value)?;
        let columns = self.reshape(&squares, &[*batch, 1, *channels, rest.iter().product()])?;
        let ints =
            |name: &str, ints: &[i64]| AttributeProto { name: name.into(), ints: ints.to_vec(), ..Default::default() };
        let before = (size - 1) / 2;
        let pooling = NodeProto {
            op_type: "AveragePool".into(),
            attribute: vec![
                ints("kernel_shape", &[size, 1]),
                ints("pads", &[before, 0, size - 1 - before, 0]),
                AttributeProto { name: "count_include_pad".into(), i: Some(1), ..Default::default() },
            ],
            ..Default::default()
        };
        let means = self.pool(&pooling, &Inputs(&[Some(columns)]))?;
        let mut sum = self.reshape(&means, &dims)?;
        let numbers = [
            (Binary::Multiply, node.float("alpha", 1e-4)),
            (Binary::Add, node.float("bias", 1.0)),
            (Binary::Power, node.float("beta", 0.75)),
        ];
        for (binary, number) in numbers {
            let number = self.constant(Constant::Floats(Tensor::scalar(number)), false)?;
            sum = self.binary(binary, &sum, &number)?;
        }
        self.binary(Binary::Divide, value, &sum)
    }

    pub(super) fn pool(&mut self, node: &NodeProto, inputs: &Inputs<'_>) -> Result<Value> {
        let value = inputs.value(0)?;
        let dims = self.dims(value);
        let spatial = dims.len().saturating_sub(2);
        if spatial > 2
            && let Some(result) = self.merged_pool(node, value, &dims)?
        {
            return Ok(result);
        }
        if !(1..=2).contains(&spatial) {
            return Err(Error::unsupported(
                format!("a pooling of {dims:?}"),
                "poolings are over one or two axes of batch × channels × positions",
            ));
        }
        let sizes = &dims[2..];
        let global = node.op_type.starts_with("Global");
        let windows = if global { node.whole(sizes) } else { node.windows(&node.kernel(spatial)?, sizes)? };
        self.pool_windows(node, value, windows, true)
    }

    /// A pooling over more than two axes; axes over which it does not slide are merged with their neighbours. `None`
    /// if more than two are left.
    fn merged_pool(&mut self, node: &NodeProto, value: &Value, dims: &[usize]) -> Result<Option<Value>> {
        let [samples, channels, ref sizes @ ..] = *dims else { return Ok(None) };
        if node.op_type.starts_with("Global") {
            let line = [sizes.iter().product()];
            let flat = self.reshape(value, &[samples, channels, line[0]])?;
            let result = self.pool_windows(node, &flat, node.whole(&line), false)?;
            let ones = vec![1; sizes.len()];
            return self.reshape(&result, &[&[samples, channels], &ones[..]].concat()).map(Some);
        }
        let windows = node.windows(&node.kernel(sizes.len())?, sizes)?;
        let moves = |k: usize| {
            (windows.kernel[k], windows.stride[k], windows.padding[k], windows.beyond[k]) != (1, 1, [0, 0], 0)
        };
        let mut merged = node.whole(&[]);
        let mut shape = vec![samples, channels];
        for k in 0..sizes.len() {
            if !moves(k) && (k == 0 || !moves(k - 1)) {
                // Merged with the channels, or with the axis before it.
                *shape.last_mut().unwrap_or(&mut 1) *= sizes[k];
                continue;
            }
            shape.push(sizes[k]);
            merged.kernel.push(windows.kernel[k]);
            merged.stride.push(windows.stride[k]);
            merged.dilation.push(windows.dilation[k]);
            merged.padding.push(windows.padding[k]);
            merged.beyond.push(windows.beyond[k]);
        }
        if !(3..=4).contains(&shape.len()) {
            return Ok(None);
        }
        let flat = self.reshape(value, &shape)?;
        let result = self.pool_windows(node, &flat, merged, false)?;
        let mut out = dims.to_vec();
        for (k, size) in out[2..].iter_mut().enumerate().filter(|(k, _)| moves(*k)) {
            let padded = *size + windows.padding[k][0] + windows.padding[k][1] + windows.beyond[k];
            let extent = windows.dilation[k] * (windows.kernel[k] - 1) + 1;
            *size = padded.saturating_sub(extent) / windows.stride[k] + 1;
        }
        self.reshape(&result, &out).map(Some)
    }

    /// `of_map` says that the axes are those of a feature map; merged axes are not, and a pooling of feature maps
    /// would mistake them for such.
    fn pool_windows(&mut self, node: &NodeProto, value: &Value, windows: Windows, of_map: bool) -> Result<Value> {
        let dims = self.dims(value);
        let (sizes, spatial) = (&dims[2..], windows.kernel.len());
        let global = node.op_type.starts_with("Global");
        let maximum = node.op_type.ends_with("MaxPool");
        let count_padding = node.int("count_include_pad", 0) != 0;
        let plain = of_map
            && dims[0] == 1
            && matches!(value, Value::Node(_))
            && windows.dilation.iter().all(|&d| d == 1)
            && windows.beyond.iter().all(|&b| b == 0)
            && windows.padding.iter().zip(&windows.kernel).all(|(p, &k)| p[0].max(p[1]) < k);
        if !plain {
            let pooling = Pooling {
                maximum,
                padding: windows.padding.iter().zip(&windows.beyond).map(|(p, b)| [p[0], p[1] + b]).collect(),
                kernel: windows.kernel,
                stride: windows.stride,
                dilation: windows.dilation,
                count_padding,
                beyond: windows.beyond,
            };
            return self.structure(Structure::Pool(pooling), std::slice::from_ref(value));
        }
        let (height, width) = if spatial == 1 { (1, sizes[0]) } else { (sizes[0], sizes[1]) };
        let input = MapShape { channels: dims[1], height, width };
        let map = match (global, maximum) {
            (true, false) => FixedMap::GlobalAverage { input },
            (_, true) => FixedMap::MaxPool { input, window: windows.plane() },
            _ => FixedMap::AveragePool { input, window: windows.plane(), count_padding },
        };
        let out = map.output()?;
        let source = self.reshape(value, &[1, input.channels, height, width])?;
        let source = self.node_of(&source)?;
        let id = self.builder.push_fixed(source, map)?;
        let dims =
            if spatial == 1 { vec![1, out.channels, out.width] } else { vec![1, out.channels, out.height, out.width] };
        self.reshape(&Value::Node(id), &dims)
    }
}
