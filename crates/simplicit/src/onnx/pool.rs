//! Poolings: plain ones of feature maps, and the general form for the others.

use super::import::{Importer, Value};
use super::nodes::Inputs;
use super::proto::NodeProto;
use crate::graph::{Pooling, Structure};
use crate::layout::MapShape;
use crate::network::FixedMap;
use crate::{Error, Result};

impl Importer<'_> {
    pub(super) fn pool(&mut self, node: &NodeProto, inputs: &Inputs<'_>) -> Result<Value> {
        let value = inputs.value(0)?;
        let dims = self.dims(value);
        let spatial = dims.len().saturating_sub(2);
        if !(1..=2).contains(&spatial) {
            return Err(Error::unsupported(
                format!("a pooling of {dims:?}"),
                "poolings are over one or two axes of batch × channels × positions",
            ));
        }
        let sizes = &dims[2..];
        let global = node.op_type.starts_with("Global");
        let maximum = node.op_type.ends_with("MaxPool");
        let windows = if global { node.whole(sizes) } else { node.windows(&node.kernel(spatial)?, sizes)? };
        let count_padding = node.int("count_include_pad", 0) != 0;
        let plain = dims[0] == 1
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
