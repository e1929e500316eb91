//! Maps without parameters between layers: pooling. They are structure, neither solved nor counted.

use super::shape::Window;
use crate::Result;
use crate::layout::MapShape;

/// A pooling, with the shape it is applied to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FixedMap {
    /// The mean over a sliding window.
    AveragePool {
        /// What comes in.
        input: MapShape,
        /// Where it is averaged.
        window: Window,
        /// Whether zeros of the padding count as values.
        count_padding: bool,
    },
    /// The maximum over a sliding window; padding never wins.
    MaxPool {
        /// What comes in.
        input: MapShape,
        /// Where the maximum is taken.
        window: Window,
    },
    /// The mean over all positions of a channel.
    GlobalAverage {
        /// What comes in.
        input: MapShape,
    },
}

impl FixedMap {
    /// What comes in.
    pub fn input(self) -> MapShape {
        match self {
            FixedMap::AveragePool { input, .. }
            | FixedMap::MaxPool { input, .. }
            | FixedMap::GlobalAverage { input } => input,
        }
    }

    /// What comes out; a global average is a 1 × 1 map.
    pub fn output(self) -> Result<MapShape> {
        let [height, width] = match self {
            FixedMap::AveragePool { input, window, .. } | FixedMap::MaxPool { input, window } => {
                window.require_overlap()?;
                window.output(input)?
            }
            FixedMap::GlobalAverage { .. } => [1, 1],
        };
        Ok(MapShape { channels: self.input().channels, height, width })
    }

    /// Whether the map is linear, so that it could be written as a matrix.
    pub fn is_linear(self) -> bool {
        !matches!(self, FixedMap::MaxPool { .. })
    }

    /// One sample through the map.
    ///
    /// # Panics
    /// If the slices do not have the sizes of [`FixedMap::input`] and [`FixedMap::output`].
    pub fn apply(self, x: &[f32], out: &mut [f32]) {
        let (positions, channels) = (self.input().positions(), self.input().channels);
        let places = out.len() / channels;
        for (x, out) in x.chunks_exact(positions).zip(out.chunks_exact_mut(places)) {
            match self {
                FixedMap::GlobalAverage { .. } => {
                    // f64: a mean of many values of one sign loses digits in a running f32 sum.
                    out[0] = (x.iter().map(|&v| f64::from(v)).sum::<f64>() / positions as f64) as f32;
                }
                FixedMap::MaxPool { .. } => {
                    out.fill(f32::NEG_INFINITY);
                    self.for_taps(|from, to| {
                        if x[from] > out[to] || x[from].is_nan() {
                            out[to] = x[from];
                        }
                    });
                }
                FixedMap::AveragePool { .. } => {
                    out.fill(0.0);
                    self.for_taps(|from, to| out[to] += x[from]);
                    self.for_divisors(|to, divisor| out[to] /= divisor);
                }
            }
        }
    }

    /// Adds the cotangent of the input: `dx += Jᵀ dout` for one sample. The first maximum of a window takes it all.
    pub(crate) fn pull_back(self, x: &[f32], dout: &[f32], dx: &mut [f32]) {
        let (positions, channels) = (self.input().positions(), self.input().channels);
        let places = dout.len() / channels;
        let mut scratch = vec![0.0f32; places];
        let mut winner = vec![0usize; places];
        for (c, dout) in dout.chunks_exact(places).enumerate() {
            let x = &x[c * positions..(c + 1) * positions];
            let dx = &mut dx[c * positions..(c + 1) * positions];
            match self {
                FixedMap::GlobalAverage { .. } => {
                    let share = dout[0] / positions as f32;
                    dx.iter_mut().for_each(|v| *v += share);
                }
                FixedMap::MaxPool { .. } => {
                    scratch.fill(f32::NEG_INFINITY);
                    self.for_taps(|from, to| {
                        if x[from] > scratch[to] {
                            scratch[to] = x[from];
                            winner[to] = from;
                        }
                    });
                    for (&from, &d) in winner.iter().zip(dout) {
                        dx[from] += d;
                    }
                }
                FixedMap::AveragePool { .. } => {
                    scratch.copy_from_slice(dout);
                    self.for_divisors(|to, divisor| scratch[to] /= divisor);
                    self.for_taps(|from, to| dx[from] += scratch[to]);
                }
            }
        }
    }

    fn geometry(self) -> (MapShape, Window, usize, usize) {
        let (input, window) = match self {
            FixedMap::AveragePool { input, window, .. } | FixedMap::MaxPool { input, window } => (input, window),
            FixedMap::GlobalAverage { input } => {
                (input, Window { kernel: [input.height, input.width], stride: [1, 1], padding: [0; 4] })
            }
        };
        // Checked when the map was made.
        let [height, width] = window.output(input).unwrap_or([0, 0]);
        (input, window, height, width)
    }

    /// Every pair (position in, position out) that the windows of one channel connect, tap by tap.
    fn for_taps(self, mut visit: impl FnMut(usize, usize)) {
        let (input, window, height, width) = self.geometry();
        for dy in 0..window.kernel[0] {
            for dx in 0..window.kernel[1] {
                let columns = window.inside(1, dx, input.width, width);
                for oy in window.inside(0, dy, input.height, height) {
                    let iy = oy * window.stride[0] + dy - window.padding[0];
                    for ox in columns.clone() {
                        let ix = ox * window.stride[1] + dx - window.padding[1];
                        visit(iy * input.width + ix, oy * width + ox);
                    }
                }
            }
        }
    }

    /// What the sum at every position out is divided by.
    fn for_divisors(self, mut visit: impl FnMut(usize, f32)) {
        let (input, window, height, width) = self.geometry();
        let count_padding = matches!(self, FixedMap::AveragePool { count_padding: true, .. });
        let inside = |axis: usize, o: usize, size: usize| {
            let start = o * window.stride[axis];
            let (low, high) = (window.padding[axis], window.padding[axis] + size);
            (start + window.kernel[axis]).min(high).saturating_sub(start.max(low))
        };
        for oy in 0..height {
            for ox in 0..width {
                let count = if count_padding {
                    window.area()
                } else {
                    inside(0, oy, input.height) * inside(1, ox, input.width)
                };
                visit(oy * width + ox, count as f32);
            }
        }
    }
}
