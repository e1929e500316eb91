//! Attributes of a node, read with their defaults.

use super::proto::{AttributeProto, NodeProto};
use crate::network::Window;
use crate::{Error, Result};

/// The largest kernel, stride or padding that is accepted.
const MAX_EXTENT: i64 = 1 << 24;

impl NodeProto {
    /// The node in messages: its name (or that of the value it computes) and its operator.
    pub(crate) fn label(&self) -> String {
        format!("node {:?} ({})", self.title(), self.op_type)
    }

    /// Its name or, where it has none, that of the value it computes.
    pub(crate) fn title(&self) -> &str {
        if self.name.is_empty() { self.output.first().map_or("", String::as_str) } else { &self.name }
    }

    pub(crate) fn attribute(&self, name: &str) -> Option<&AttributeProto> {
        self.attribute.iter().find(|a| a.name == name)
    }

    pub(crate) fn int(&self, name: &str, default: i64) -> i64 {
        self.attribute(name).and_then(|a| a.i).unwrap_or(default)
    }

    pub(crate) fn float(&self, name: &str, default: f32) -> f32 {
        self.attribute(name).and_then(|a| a.f).unwrap_or(default)
    }

    pub(crate) fn ints(&self, name: &str) -> Option<&[i64]> {
        self.attribute(name).map(|a| a.ints.as_slice())
    }

    /// An error unless the attribute has a value that changes nothing.
    pub(crate) fn require_int(&self, name: &str, value: i64, why: &str) -> Result<()> {
        match self.int(name, value) {
            v if v == value => Ok(()),
            v => Err(Error::unsupported(format!("{name} = {v}"), why)),
        }
    }

    pub(crate) fn floats(&self, name: &str) -> Option<&[f32]> {
        self.attribute(name).map(|a| a.floats.as_slice())
    }

    /// An attribute that is a text.
    pub(crate) fn text<'n>(&'n self, name: &str, default: &'n str) -> &'n str {
        let bytes = self.attribute(name).and_then(|a| a.s.as_deref());
        bytes.and_then(|s| std::str::from_utf8(s).ok()).filter(|s| !s.is_empty()).unwrap_or(default)
    }

    /// One positive number per axis.
    fn positive(&self, name: &str, axes: usize) -> Result<Vec<usize>> {
        match self.ints(name) {
            None | Some([]) => Ok(vec![1; axes]),
            Some(all) if all.len() == axes && all.iter().all(|v| (1..=MAX_EXTENT).contains(v)) => {
                Ok(all.iter().map(|&v| v as usize).collect())
            }
            Some(other) => Err(Error::shape(name, format!("{axes} positive number(s)"), format!("{other:?}"))),
        }
    }

    /// The `kernel_shape` of a pooling.
    pub(crate) fn kernel(&self, axes: usize) -> Result<Vec<usize>> {
        if self.attribute("kernel_shape").is_none() {
            return Err(Error::shape("kernel_shape", format!("{axes} positive number(s)"), "none"));
        }
        self.positive("kernel_shape", axes)
    }

    /// One window over all positions.
    pub(crate) fn whole(&self, sizes: &[usize]) -> Windows {
        let axes = sizes.len();
        Windows {
            kernel: sizes.to_vec(),
            stride: vec![1; axes],
            dilation: vec![1; axes],
            padding: vec![[0, 0]; axes],
            beyond: vec![0; axes],
        }
    }

    /// Stride, dilation and padding around a kernel over axes of these sizes, with `auto_pad` and `ceil_mode`
    /// resolved.
    pub(crate) fn windows(&self, kernel: &[usize], sizes: &[usize]) -> Result<Windows> {
        let axes = kernel.len();
        let (dilation, stride) = (self.positive("dilations", axes)?, self.positive("strides", axes)?);
        let mut padding = vec![[0usize; 2]; axes];
        match self.ints("pads") {
            None | Some([]) => {}
            Some(pads) if pads.len() == 2 * axes && pads.iter().all(|p| (0..=MAX_EXTENT).contains(p)) => {
                (0..axes).for_each(|k| padding[k] = [pads[k] as usize, pads[axes + k] as usize]);
            }
            Some(pads) => return Err(Error::shape("pads", format!("{} numbers ≥ 0", 2 * axes), format!("{pads:?}"))),
        }
        let auto_pad = self.text("auto_pad", "NOTSET");
        let mut beyond = vec![0; axes];
        for k in 0..axes {
            let extent = kernel[k].checked_sub(1).and_then(|v| v.checked_mul(dilation[k])).map(|v| v + 1);
            let Some(extent) = extent.filter(|&e| sizes[k] > 0 && e as i64 <= MAX_EXTENT) else {
                return Err(Error::shape("window", "a positive kernel and size", format!("{kernel:?} over {sizes:?}")));
            };
            match auto_pad {
                "NOTSET" => {}
                "VALID" => padding[k] = [0, 0],
                "SAME_UPPER" | "SAME_LOWER" => {
                    let reach = (sizes[k].div_ceil(stride[k]) - 1) * stride[k] + extent;
                    let total = reach.saturating_sub(sizes[k]);
                    let (small, large) = (total / 2, total - total / 2);
                    padding[k] = if auto_pad == "SAME_UPPER" { [small, large] } else { [large, small] };
                }
                other => {
                    return Err(Error::shape("auto_pad", "NOTSET, VALID, SAME_UPPER or SAME_LOWER", other));
                }
            }
            let padded = sizes[k] + padding[k][0] + padding[k][1];
            if self.int("ceil_mode", 0) != 0 && padded >= extent && !(padded - extent).is_multiple_of(stride[k]) {
                // One more window, unless it would start behind the values and their leading padding.
                let start = ((padded - extent) / stride[k] + 1) * stride[k];
                if start < sizes[k] + padding[k][0] {
                    beyond[k] = start + extent - padded;
                }
            }
        }
        Ok(Windows { kernel: kernel.to_vec(), stride, dilation, padding, beyond })
    }
}

/// A window per axis: heights and widths of a map, or positions of a sequence.
#[derive(Debug, Clone)]
pub(crate) struct Windows {
    pub(crate) kernel: Vec<usize>,
    pub(crate) stride: Vec<usize>,
    pub(crate) dilation: Vec<usize>,
    /// Padding before and after, for every axis.
    pub(crate) padding: Vec<[usize; 2]>,
    /// Places that ceil_mode adds after the padding.
    pub(crate) beyond: Vec<usize>,
}

impl Windows {
    /// As a window of a map; a sequence is a map of height one.
    pub(crate) fn plane(&self) -> Window {
        let pair =
            |values: &[usize]| if let &[a, b] = values { [a, b] } else { [1, values.first().copied().unwrap_or(1)] };
        let [rows, columns] = match self.padding[..] {
            [rows, columns] => [rows, columns],
            _ => [[0, 0], self.padding.first().copied().unwrap_or([0, 0])],
        };
        Window {
            kernel: pair(&self.kernel),
            stride: pair(&self.stride),
            padding: [rows[0], columns[0], rows[1], columns[1]],
            dilation: pair(&self.dilation),
        }
    }
}
