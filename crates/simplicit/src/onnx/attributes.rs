//! Attributes of a node, read with their defaults.

use super::proto::{AttributeProto, NodeProto};
use crate::layout::MapShape;
use crate::network::Window;
use crate::{Error, Result};

/// Largest kernel, stride or padding that is believed.
const MAX_EXTENT: i64 = 1 << 24;

impl NodeProto {
    /// The node in messages: its name (or the value it computes) and operator.
    pub(crate) fn label(&self) -> String {
        let output = self.output.first().map_or("", String::as_str);
        format!("node {:?} ({})", if self.name.is_empty() { output } else { &self.name }, self.op_type)
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

    /// An error unless the attribute has its harmless value.
    pub(crate) fn require_int(&self, name: &str, value: i64, why: &str) -> Result<()> {
        match self.int(name, value) {
            v if v == value => Ok(()),
            v => Err(Error::unsupported(format!("{name} = {v}"), why)),
        }
    }

    fn pair(&self, name: &str, default: usize) -> Result<[usize; 2]> {
        match self.ints(name) {
            None | Some([]) => Ok([default; 2]),
            Some(&[a, b]) if (1..=MAX_EXTENT).contains(&a) && (1..=MAX_EXTENT).contains(&b) => {
                Ok([a as usize, b as usize])
            }
            Some(other) => Err(Error::shape(name, "two positive numbers (2-D maps only)", format!("{other:?}"))),
        }
    }

    /// `kernel_shape` of a pooling.
    pub(crate) fn kernel(&self) -> Result<[usize; 2]> {
        if self.attribute("kernel_shape").is_none() {
            return Err(Error::shape("kernel_shape", "two positive numbers", "none"));
        }
        self.pair("kernel_shape", 1)
    }

    /// Stride, padding and `auto_pad` around a kernel; dilation only where it changes nothing.
    pub(crate) fn window(&self, kernel: [usize; 2], input: MapShape) -> Result<Window> {
        let dilation = self.pair("dilations", 1)?;
        if (0..2).any(|axis| dilation[axis] != 1 && kernel[axis] != 1) {
            return Err(Error::unsupported(
                format!("dilations = {dilation:?}"),
                "windows must be dense; use dilation 1 (a larger kernel with zeros computes the same)",
            ));
        }
        let stride = self.pair("strides", 1)?;
        let mut padding = [0; 4];
        match self.ints("pads") {
            None | Some([]) => {}
            Some(pads) if pads.len() == 4 && pads.iter().all(|p| (0..=MAX_EXTENT).contains(p)) => {
                padding.iter_mut().zip(pads).for_each(|(a, &b)| *a = b as usize);
            }
            Some(pads) => return Err(Error::shape("pads", "four numbers ≥ 0 (2-D maps only)", format!("{pads:?}"))),
        }
        let auto_pad = self.attribute("auto_pad").and_then(|a| a.s.as_deref()).unwrap_or(b"NOTSET");
        match auto_pad {
            b"" | b"NOTSET" => {}
            b"VALID" => padding = [0; 4],
            b"SAME_UPPER" | b"SAME_LOWER" => {
                for (axis, size) in [input.height, input.width].into_iter().enumerate() {
                    let reach = (size.div_ceil(stride[axis]) - 1) * stride[axis] + kernel[axis];
                    let total = reach.saturating_sub(size);
                    let (small, large) = (total / 2, total - total / 2);
                    (padding[axis], padding[axis + 2]) =
                        if auto_pad == b"SAME_UPPER" { (small, large) } else { (large, small) };
                }
            }
            other => {
                let got = String::from_utf8_lossy(other).into_owned();
                return Err(Error::shape("auto_pad", "NOTSET, VALID, SAME_UPPER or SAME_LOWER", got));
            }
        }
        let window = Window { kernel, stride, padding, dilation: [1; 2] };
        if self.int("ceil_mode", 0) != 0 {
            // Harmless where the windows end exactly at the border.
            let exact = (0..2).all(|axis| {
                let padded = [input.height, input.width][axis] + padding[axis] + padding[axis + 2];
                padded >= kernel[axis] && (padded - kernel[axis]).is_multiple_of(stride[axis])
            });
            if !exact {
                return Err(Error::unsupported(
                    "ceil_mode = 1",
                    "windows must lie inside the map; use ceil_mode=False",
                ));
            }
        }
        Ok(window)
    }
}
