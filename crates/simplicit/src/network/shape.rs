//! Shapes of values and the geometry of sliding windows.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::layout::MapShape;
use crate::{Error, Result};

/// Most units a single value of a single sample may have: files from outside must not ask for more.
const MAX_UNITS: usize = 1 << 26;

/// The shape of one sample's value. Maps are stored channel by channel, row by row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Shape {
    /// So many numbers.
    Vector(usize),
    /// A feature map.
    Map(MapShape),
}

impl Shape {
    /// Channels × height × width.
    pub fn map(channels: usize, height: usize, width: usize) -> Self {
        Shape::Map(MapShape { channels, height, width })
    }

    /// Number of units.
    pub fn size(self) -> usize {
        match self {
            Shape::Vector(size) => size,
            Shape::Map(map) => map.size(),
        }
    }

    /// Channels of a map, units of a vector: what a batch norm has its parameters for.
    pub fn channels(self) -> usize {
        match self {
            Shape::Vector(size) => size,
            Shape::Map(map) => map.channels,
        }
    }

    /// An error unless the size is positive and below 2^26.
    pub(crate) fn require_sane(self, what: &str) -> Result<Self> {
        let size = match self {
            Shape::Vector(size) => Some(size),
            Shape::Map(m) => m.channels.checked_mul(m.height).and_then(|v| v.checked_mul(m.width)),
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
}

impl Window {
    /// A square window, the same step and padding in all directions.
    pub fn square(kernel: usize, stride: usize, padding: usize) -> Self {
        Self { kernel: [kernel; 2], stride: [stride; 2], padding: [padding; 4] }
    }

    /// Number of places in the window.
    pub fn area(self) -> usize {
        self.kernel[0] * self.kernel[1]
    }

    /// Height and width of what comes out of a map.
    pub fn output(self, input: MapShape) -> Result<[usize; 2]> {
        let mut out = [0; 2];
        for (axis, size) in [input.height, input.width].into_iter().enumerate() {
            let (kernel, stride) = (self.kernel[axis], self.stride[axis]);
            let padded = size.checked_add(self.padding[axis]).and_then(|v| v.checked_add(self.padding[axis + 2]));
            out[axis] = match padded {
                Some(padded) if kernel > 0 && stride > 0 && padded >= kernel => (padded - kernel) / stride + 1,
                _ => {
                    return Err(Error::shape(
                        "window",
                        format!("positive kernel and stride that fit a {} × {} map", input.height, input.width),
                        format!("{self:?}"),
                    ));
                }
            };
        }
        Ok(out)
    }

    /// The output rows (axis 0) or columns (axis 1) at which the tap `offset` of the window lies inside the map, and
    /// not on its padding.
    pub fn inside(self, axis: usize, offset: usize, input: usize, output: usize) -> Range<usize> {
        let (stride, before) = (self.stride[axis], self.padding[axis]);
        let first = before.saturating_sub(offset).div_ceil(stride).min(output);
        let end = if input + before > offset { (input + before - offset - 1) / stride + 1 } else { 0 };
        first..end.clamp(first, output)
    }

    /// How many output positions use each place of the kernel, row by row; those on padding do not.
    pub fn uses(self, input: MapShape, output: MapShape) -> Vec<u64> {
        let mut uses = Vec::with_capacity(self.area());
        for dy in 0..self.kernel[0] {
            let rows = self.inside(0, dy, input.height, output.height).len() as u64;
            for dx in 0..self.kernel[1] {
                uses.push(rows * self.inside(1, dx, input.width, output.width).len() as u64);
            }
        }
        uses
    }

    /// An error if some window could lie on padding alone, where a maximum or an average has no value.
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
                    let window = Window { kernel: [kernel; 2], stride: [stride; 2], padding };
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
