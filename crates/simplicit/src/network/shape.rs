//! Shapes of values and the geometry of sliding windows.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::graph::Dims;
use crate::layout::MapShape;
use crate::{Error, Result};

/// The most units of one value of a single sample, so that a file cannot ask for more memory.
const MAX_UNITS: usize = 1 << 26;

/// The shape of one sample's value. Maps are stored channel by channel, row by row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Shape {
    /// A vector of this many numbers.
    Vector(usize),
    /// A feature map.
    Map(MapShape),
    /// Any other value, such as tokens × channels: its dimensions for a batch of one sample.
    Tensor(Dims),
}

impl Shape {
    /// Channels × height × width.
    pub fn map(channels: usize, height: usize, width: usize) -> Self {
        Shape::Map(MapShape { channels, height, width })
    }

    /// The shape of a value with these dimensions for a batch of one: 1 × n is a vector, 1 × c × h × w a map.
    pub(crate) fn from_dims(dims: Dims) -> Self {
        match *dims.sizes() {
            [1, size] => Shape::Vector(size),
            [1, channels, height, width] => Shape::map(channels, height, width),
            _ => Shape::Tensor(dims),
        }
    }

    /// The dimensions for a batch of one.
    pub fn dims(self) -> Dims {
        match self {
            Shape::Vector(size) => Dims::vector(size),
            Shape::Map(map) => Dims::map(map.channels, map.height, map.width),
            Shape::Tensor(dims) => dims,
        }
    }

    /// Number of units.
    pub fn size(self) -> usize {
        match self {
            Shape::Vector(size) => size,
            Shape::Map(map) => map.size(),
            Shape::Tensor(dims) => dims.size(),
        }
    }

    /// Number of channels of a map or units of a vector, for which a batch norm has parameters; of other values, the
    /// size of the second axis.
    pub fn channels(self) -> usize {
        match self {
            Shape::Vector(size) => size,
            Shape::Map(map) => map.channels,
            Shape::Tensor(dims) => dims.sizes().get(1).copied().unwrap_or(1),
        }
    }

    /// An error unless the size is positive and below 2^26.
    pub(crate) fn require_sane(self, what: &str) -> Result<Self> {
        let size = match self {
            Shape::Vector(size) => Some(size),
            Shape::Map(m) => m.channels.checked_mul(m.height).and_then(|v| v.checked_mul(m.width)),
            Shape::Tensor(dims) => Some(dims.size()),
        };
        match size {
            Some(1..=MAX_UNITS) => Ok(self),
            _ => Err(Error::shape(what, "between 1 and 2^26 units per sample", self)),
        }
    }
}

impl std::fmt::Display for Shape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Shape::Vector(size) => write!(f, "a vector of {size}"),
            Shape::Map(map) => write!(f, "a {map} map"),
            Shape::Tensor(dims) => write!(f, "a value of {dims}"),
        }
    }
}

/// The window of a convolution or a pooling; heights first, widths second.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Window {
    /// Height and width of the window.
    pub kernel: [usize; 2],
    /// Steps down and to the right.
    pub stride: [usize; 2],
    /// Rows and columns of padding: top, left, bottom, right.
    pub padding: [usize; 4],
    /// Distance between neighbouring places of the window, down and to the right.
    #[serde(default = "one_by_one", skip_serializing_if = "is_one_by_one")]
    pub dilation: [usize; 2],
}

fn one_by_one() -> [usize; 2] {
    [1; 2]
}

fn is_one_by_one(dilation: &[usize; 2]) -> bool {
    *dilation == [1; 2]
}

impl Window {
    /// A square window, the same step and padding in all directions.
    pub fn square(kernel: usize, stride: usize, padding: usize) -> Self {
        Self { kernel: [kernel; 2], stride: [stride; 2], padding: [padding; 4], dilation: [1; 2] }
    }

    /// Number of places in the window.
    pub fn area(self) -> usize {
        self.kernel[0] * self.kernel[1]
    }

    /// Height and width that the window covers, the places between dilated ones included; `None` where that
    /// overflows.
    pub(crate) fn extent(self) -> Option<[usize; 2]> {
        let along = |axis: usize| {
            self.kernel[axis]
                .checked_sub(1)
                .and_then(|k| k.checked_mul(self.dilation[axis]))
                .and_then(|k| k.checked_add(1))
        };
        Some([along(0)?, along(1)?])
    }

    /// For a column of taps, its channel and how far below and to the right of the window's start it reads.
    pub fn tap(self, column: usize) -> (usize, [usize; 2]) {
        let [height, width] = self.kernel;
        let (c, dy, dx) = (column / (height * width), column / width % height, column % width);
        (c, [dy * self.dilation[0], dx * self.dilation[1]])
    }

    /// Height and width of the result for a map of this shape.
    pub fn output(self, input: MapShape) -> Result<[usize; 2]> {
        let mut out = [0; 2];
        for (axis, size) in [input.height, input.width].into_iter().enumerate() {
            let (extent, stride) = (self.extent().map_or(0, |e| e[axis]), self.stride[axis]);
            let padded = size.checked_add(self.padding[axis]).and_then(|v| v.checked_add(self.padding[axis + 2]));
            out[axis] = match padded {
                Some(padded) if extent > 0 && stride > 0 && padded >= extent => (padded - extent) / stride + 1,
                _ => {
                    return Err(Error::shape(
                        "window",
                        format!(
                            "positive kernel, stride and dilation that fit a {} × {} map",
                            input.height, input.width
                        ),
                        format!("{self:?}"),
                    ));
                }
            };
        }
        Ok(out)
    }

    /// The output rows (axis 0) or columns (axis 1) at which the place `offset` rows or columns behind the window's start
    /// lies inside the map, and not on its padding. A tap's place is its number times the dilation.
    pub fn inside(self, axis: usize, offset: usize, input: usize, output: usize) -> Range<usize> {
        let (stride, before) = (self.stride[axis], self.padding[axis]);
        let first = before.saturating_sub(offset).div_ceil(stride).min(output);
        let end = if input + before > offset { (input + before - offset - 1) / stride + 1 } else { 0 };
        first..end.clamp(first, output)
    }

    /// How many output positions use each place of the kernel, row by row; uses on padding do not count.
    pub fn uses(self, input: MapShape, output: MapShape) -> Vec<u64> {
        let mut uses = Vec::with_capacity(self.area());
        for dy in 0..self.kernel[0] {
            let rows = self.inside(0, dy * self.dilation[0], input.height, output.height).len() as u64;
            for dx in 0..self.kernel[1] {
                uses.push(rows * self.inside(1, dx * self.dilation[1], input.width, output.width).len() as u64);
            }
        }
        uses
    }

    /// An error if some window could lie on padding alone, where a maximum or an average would have no value.
    pub(crate) fn require_overlap(self) -> Result<()> {
        let [top, left, bottom, right] = self.padding;
        if top.max(bottom) < self.kernel[0] && left.max(right) < self.kernel[1] {
            Ok(())
        } else {
            Err(Error::shape("pooling window", "padding smaller than the kernel", format!("{self:?}")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inside_is_what_counting_says() {
        for kernel in 1..4 {
            for stride in 1..4 {
                for padding in [[0, 0, 0, 0], [1, 2, 0, 1], [2, 0, 3, 1]] {
                    let window = Window { kernel: [kernel; 2], stride: [stride; 2], padding, dilation: [1; 2] };
                    let map = MapShape { channels: 1, height: 5, width: 4 };
                    let [height, _] = window.output(map).unwrap();
                    assert_eq!(height, (5 + padding[0] + padding[2] - kernel) / stride + 1);
                    for offset in 0..kernel {
                        let counted: Vec<usize> = (0..height)
                            .filter(|o| (padding[0]..padding[0] + 5).contains(&(o * stride + offset)))
                            .collect();
                        assert_eq!(window.inside(0, offset, 5, height).collect::<Vec<_>>(), counted);
                    }
                }
            }
        }
    }

    #[test]
    fn windows_that_do_not_fit_are_refused() {
        let map = MapShape { channels: 1, height: 4, width: 4 };
        assert!(Window::square(5, 1, 0).output(map).is_err());
        assert!(Window::square(2, 0, 0).output(map).is_err());
        assert!(Window::square(2, 1, usize::MAX).output(map).is_err());
        assert!(Window::square(2, 1, 2).require_overlap().is_err());
        assert!(Shape::map(1 << 20, 1 << 20, 1 << 30).require_sane("x").is_err());
    }
}
