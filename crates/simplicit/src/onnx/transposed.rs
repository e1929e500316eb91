//! Transposed convolutions, as ordinary ones. Of the results along an axis with stride s, those at places of the same
//! remainder r by s read the same weights: tap k reaches remainder dilation·k mod s. So a convolution with s channels
//! for every channel, one for each remainder, computes all of them without a stride, and its channels are then
//! rearranged to the places.

use super::constant::Tensor;
use super::import::{Importer, Value};
use super::nodes::Inputs;
use super::proto::NodeProto;
use crate::linalg::Matrix;
use crate::network::Window;
use crate::{Error, Result};

/// The largest stride, kernel and padding.
const MAX_EXTENT: i64 = 1 << 12;

/// One axis of a transposed convolution.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Axis {
    stride: usize,
    dilation: usize,
    /// Number of taps of the ordinary convolution.
    taps: usize,
    /// Number of zeros after the values; before them there is one less than the number of taps.
    after: usize,
    /// Number of places that are cut off before and after.
    cut: [usize; 2],
}

/// The ordinary convolution that replaces a transposed one; for 1-D ones the first axis has size one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Phases {
    axes: [Axis; 2],
}

impl Axis {
    const ONE: Self = Self { stride: 1, dilation: 1, taps: 1, after: 0, cut: [0, 0] };

    /// `extra` places are added at the end; if `pads` is `None`, it is chosen so that the result has stride times as
    /// many places.
    fn new(
        kernel: usize,
        stride: usize,
        dilation: usize,
        extra: usize,
        pads: Result<[usize; 2], bool>,
    ) -> Option<Self> {
        let extent = dilation * kernel.checked_sub(1)? + 1;
        let [before, behind] = match pads {
            Ok(pads) => pads,
            Err(upper) => {
                let total = (extent + extra).checked_sub(stride)?;
                let (small, large) = (total / 2, total - total / 2);
                if upper { [small, large] } else { [large, small] }
            }
        };
        // Places beyond the last one that a tap reaches have the bias alone.
        let rounds = (extent + extra.saturating_sub(behind)).div_ceil(stride);
        let cut = (stride * rounds + behind).checked_sub(extent + extra)?;
        Some(Self { stride, dilation, taps: (extent - 1) / stride + 1, after: rounds - 1, cut: [before, cut] })
    }
}

impl Phases {
    /// For a node with weights of these dimensions: inputs × outputs × kernel.
    pub(super) fn of(node: &NodeProto, weights: &[usize]) -> Result<Self> {
        let kernel = weights.get(2..).unwrap_or_default();
        let count = kernel.len();
        if !(1..=2).contains(&count) {
            return Err(Error::unsupported(
                format!("a transposed convolution with weights {weights:?}"),
                "transposed convolutions are 1-D or 2-D; replace 3-D ones",
            ));
        }
        if node.ints("output_shape").is_some_and(|shape| !shape.is_empty()) {
            return Err(Error::unsupported("output_shape of a transposed convolution", "export it with pads instead"));
        }
        let numbers = |name: &str, length: usize, default: usize, least: i64| match node.ints(name) {
            None | Some([]) => Ok(vec![default; length]),
            Some(v) if v.len() == length && v.iter().all(|v| (least..=MAX_EXTENT).contains(v)) => {
                Ok(v.iter().map(|&v| v as usize).collect())
            }
            Some(v) => Err(Error::shape(name, format!("{length} numbers from {least} on"), format!("{v:?}"))),
        };
        let (strides, dilations) = (numbers("strides", count, 1, 1)?, numbers("dilations", count, 1, 1)?);
        let (extra, pads) = (numbers("output_padding", count, 0, 0)?, numbers("pads", 2 * count, 0, 0)?);
        let mut axes = [Axis::ONE; 2];
        for k in 0..count {
            let pads = match node.text("auto_pad", "NOTSET") {
                "NOTSET" => Ok([pads[k], pads[count + k]]),
                "VALID" => Ok([0, 0]),
                "SAME_UPPER" => Err(true),
                "SAME_LOWER" => Err(false),
                other => return Err(Error::shape("auto_pad", "NOTSET, VALID, SAME_UPPER or SAME_LOWER", other)),
            };
            let axis = Axis::new(kernel[k].min(MAX_EXTENT as usize), strides[k], dilations[k], extra[k], pads);
            let axis =
                axis.ok_or_else(|| Error::shape("pads", "fewer than the kernel's places", format!("{pads:?}")))?;
            axes[2 - count + k] = axis;
        }
        Ok(Self { axes })
    }

    pub(super) fn window(&self) -> Window {
        let [y, x] = self.axes;
        Window {
            kernel: [y.taps, x.taps],
            stride: [1, 1],
            padding: [y.taps - 1, x.taps - 1, y.after, x.after],
            dilation: [1, 1],
        }
    }

    /// The stride of both axes, if they have the same.
    pub(super) fn blocks(&self) -> Option<usize> {
        let [y, x] = self.axes;
        (y.stride == x.stride).then_some(y.stride)
    }

    /// Places to cut off before and after, on both axes.
    pub(super) fn cuts(&self) -> [[usize; 2]; 2] {
        self.axes.map(|axis| axis.cut)
    }

    /// The weights of the ordinary convolution: for every group a row for every remainder of both axes and, within them, every
    /// channel.
    fn rows(&self, weights: &Tensor<f32>, groups: usize) -> Result<Matrix<f32>> {
        let [y, x] = self.axes;
        let [inputs, outputs, ref kernel @ ..] = weights.dims[..] else {
            return Err(Error::shape("weights", "inputs × outputs × kernel", format!("{:?}", weights.dims)));
        };
        let [height, width] = if let [height, width] = *kernel { [height, width] } else { [1, kernel[0]] };
        if groups == 0 || !inputs.is_multiple_of(groups) {
            return Err(Error::shape("group", format!("a divisor of {inputs}"), groups));
        }
        let (each, phases) = (inputs / groups, y.stride * x.stride);
        let mut out = Matrix::zeros(groups * phases * outputs, each * y.taps * x.taps);
        let mut values = weights.values.iter();
        for input in 0..inputs {
            let (group, input) = (input / each, input % each);
            for output in 0..outputs {
                for (dy, dx) in (0..height).flat_map(|dy| (0..width).map(move |dx| (dy, dx))) {
                    let (dy, dx) = (y.dilation * dy, x.dilation * dx);
                    let phase = (dy % y.stride) * x.stride + dx % x.stride;
                    let tap = (y.taps - 1 - dy / y.stride) * x.taps + x.taps - 1 - dx / x.stride;
                    out[((group * phases + phase) * outputs + output, input * y.taps * x.taps + tap)] =
                        *values.next().unwrap_or(&0.0);
                }
            }
        }
        Ok(out)
    }
}

impl Importer<'_> {
    pub(super) fn transposed_convolution(&mut self, node: &NodeProto, inputs: &Inputs<'_>) -> Result<Value> {
        let (value, weights) = (inputs.value(0)?, inputs.weights(1)?);
        if let Value::Constant(..) = value {
            return self.computed(value, |importer, value| {
                importer.transposed_convolution(node, &Inputs(&[&[Some(value)], &inputs.0[1..]].concat()))
            });
        }
        let phases = Phases::of(node, &weights.dims)?;
        let dims = self.dims(value);
        let [channels, height, width] = match dims[..] {
            [1, channels, width] if weights.dims.len() == 3 => [channels, 1, width],
            [1, channels, height, width] if weights.dims.len() == 4 => [channels, height, width],
            _ => {
                return Err(Error::unsupported(
                    format!("a transposed convolution of {dims:?} (for a batch of one)"),
                    "it must read batch × channels × positions that depend on the sample, the batch not folded into them",
                ));
            }
        };
        if channels != weights.dims[0] {
            return Err(Error::shape("weights of a transposed convolution", channels, weights.dims[0]));
        }
        let groups = usize::try_from(node.int("group", 1)).unwrap_or(0);
        let rows = phases.rows(&weights, groups)?;
        let each = weights.dims[1];
        let outputs = groups * each;
        let [y, x] = phases.axes;
        let bias = inputs.floats(2)?.map(|bias| bias.values).filter(|bias| bias.iter().any(|&b| b != 0.0));
        let bias = bias.map(|bias| bias.chunks(each.max(1)).flat_map(|own| own.repeat(y.stride * x.stride)).collect());
        let map = self.reshape(value, &[1, channels, height, width])?;
        let map = self.node_of(&map)?;
        let id = self.builder.push_convolution(map, rows, phases.window(), groups, bias)?;
        let [rows, columns] = [height + y.after, width + x.after];
        let mut out = Value::Node(id);
        if y.stride * x.stride > 1 {
            let apart = self.reshape(&out, &[1, groups, y.stride, x.stride, each, rows, columns])?;
            let turned = self.transpose(&apart, &[0, 1, 4, 5, 2, 6, 3])?;
            out = self.reshape(&turned, &[1, outputs, y.stride * rows, x.stride * columns])?;
        }
        for (axis, [before, behind]) in [2, 3].into_iter().zip(phases.cuts()) {
            let size = self.dims(&out)[axis];
            let left = size.checked_sub(before + behind).filter(|&left| left > 0);
            let left =
                left.ok_or_else(|| Error::shape("pads", format!("fewer than {size} places"), before + behind))?;
            out = self.slice(&out, axis, before, 1, left)?;
        }
        if weights.dims.len() == 4 {
            return Ok(out);
        }
        let width = self.dims(&out)[3];
        self.reshape(&out, &[1, outputs, width])
    }
}
