//! Maps without parameters between layers: pooling. They are structure: neither solved nor counted.

use serde::{Deserialize, Serialize};

use super::shape::Window;
use crate::layout::MapShape;
use crate::{Error, Result};

/// A pooling, with the shape that it is applied to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum FixedMap {
    /// The mean over a sliding window.
    AveragePool {
        /// The shape of the operand.
        input: MapShape,
        /// The window of the mean.
        window: Window,
        /// Whether zeros of the padding count as values.
        count_padding: bool,
    },
    /// The maximum over a sliding window; padding never counts.
    MaxPool {
        /// The shape of the operand.
        input: MapShape,
        /// The window of the maximum.
        window: Window,
    },
    /// The mean over all positions of a channel.
    GlobalAverage {
        /// The shape of the operand.
        input: MapShape,
    },
}

impl FixedMap {
    /// The shape of the operand.
    pub fn input(self) -> MapShape {
        match self {
            FixedMap::AveragePool { input, .. }
            | FixedMap::MaxPool { input, .. }
            | FixedMap::GlobalAverage { input } => input,
        }
    }

    /// The same pooling for this many channels.
    pub(crate) fn with_channels(mut self, channels: usize) -> Self {
        match &mut self {
            FixedMap::AveragePool { input, .. }
            | FixedMap::MaxPool { input, .. }
            | FixedMap::GlobalAverage { input } => input.channels = channels,
        }
        self
    }

    /// The shape of the result; a global average gives a 1 × 1 map.
    pub fn output(self) -> Result<MapShape> {
        let [height, width] = match self {
            FixedMap::AveragePool { input, window, .. } | FixedMap::MaxPool { input, window } => {
                window.require_overlap()?;
                if window.dilation != [1, 1] {
                    return Err(Error::unsupported(
                        "a dilated pooling of a feature map",
                        "use the general pooling of graph::Structure",
                    ));
                }
                window.output(input)?
            }
            FixedMap::GlobalAverage { .. } => [1, 1],
        };
        Ok(MapShape { channels: self.input().channels, height, width })
    }

    /// Whether the map is linear, so that it could be written as a matrix.
    pub(crate) fn is_linear(self) -> bool {
        !matches!(self, FixedMap::MaxPool { .. })
    }

    /// One sample through the map.
    ///
    /// # Panics
    /// If the slices do not have the sizes of [`FixedMap::input`] and [`FixedMap::output`].
    pub fn apply(self, x: &[f32], out: &mut [f32]) {
        self.apply_lanes(x, out, 1);
    }

    /// Several samples side by side through the map: values are units × lanes.
    pub(crate) fn apply_lanes(self, x: &[f32], out: &mut [f32], lanes: usize) {
        let (positions, channels) = (self.input().positions(), self.input().channels);
        let places = out.len() / channels / lanes;
        for (x, out) in x.chunks_exact(positions * lanes).zip(out.chunks_exact_mut(places * lanes)) {
            let (x, out) = (|k: usize| &x[k * lanes..(k + 1) * lanes], out);
            match self {
                FixedMap::GlobalAverage { .. } => {
                    // In f64, because a mean of many values of one sign loses digits in a running f32 sum.
                    for (s, out) in out.iter_mut().enumerate() {
                        *out = ((0..positions).map(|k| f64::from(x(k)[s])).sum::<f64>() / positions as f64) as f32;
                    }
                }
                FixedMap::MaxPool { .. } => {
                    out.fill(f32::NEG_INFINITY);
                    self.for_taps(|from, to| {
                        for (out, &x) in out[to * lanes..(to + 1) * lanes].iter_mut().zip(x(from)) {
                            if x > *out || x.is_nan() {
                                *out = x;
                            }
                        }
                    });
                }
                FixedMap::AveragePool { .. } => {
                    out.fill(0.0);
                    self.for_taps(|from, to| {
                        out[to * lanes..(to + 1) * lanes].iter_mut().zip(x(from)).for_each(|(out, x)| *out += x);
                    });
                    self.for_divisors(|to, divisor| {
                        out[to * lanes..(to + 1) * lanes].iter_mut().for_each(|out| *out /= divisor);
                    });
                }
            }
        }
    }

    /// Adds the cotangent of the input: `dx += Jᵀ dout` for one sample. The first maximum of a window receives all of
    /// its cotangent.
    pub(crate) fn pull_back(self, x: &[f32], dout: &[f32], dx: &mut [f32]) {
        self.pull_back_lanes(x, dout, dx, 1);
    }

    /// As [`FixedMap::pull_back`] for several samples side by side; `x` is only read for a maximum.
    pub(crate) fn pull_back_lanes(self, x: &[f32], dout: &[f32], dx: &mut [f32], lanes: usize) {
        let (positions, channels) = (self.input().positions(), self.input().channels);
        let places = dout.len() / channels / lanes;
        let mut scratch = vec![0.0f32; places * lanes];
        let mut winner = vec![0usize; places * lanes];
        for (c, dout) in dout.chunks_exact(places * lanes).enumerate() {
            let own = c * positions * lanes..(c + 1) * positions * lanes;
            let dx = &mut dx[own.clone()];
            match self {
                FixedMap::GlobalAverage { .. } => {
                    for dx in dx.chunks_exact_mut(lanes) {
                        dx.iter_mut().zip(dout).for_each(|(v, d)| *v += d / positions as f32);
                    }
                }
                FixedMap::MaxPool { .. } => {
                    let x = &x[own];
                    scratch.fill(f32::NEG_INFINITY);
                    self.for_taps(|from, to| {
                        for s in 0..lanes {
                            let (from, to) = (from * lanes + s, to * lanes + s);
                            if x[from] > scratch[to] {
                                scratch[to] = x[from];
                                winner[to] = from;
                            }
                        }
                    });
                    for (&from, &d) in winner.iter().zip(dout) {
                        dx[from] += d;
                    }
                }
                FixedMap::AveragePool { .. } => {
                    scratch.copy_from_slice(dout);
                    self.for_divisors(|to, divisor| {
                        scratch[to * lanes..(to + 1) * lanes].iter_mut().for_each(|v| *v /= divisor);
                    });
                    self.for_taps(|from, to| {
                        let shares = &scratch[to * lanes..(to + 1) * lanes];
                        dx[from * lanes..(from + 1) * lanes].iter_mut().zip(shares).for_each(|(v, d)| *v += d);
                    });
                }
            }
        }
    }

    /// The effect of a change `d` of the input on one sample of the result; for a maximum, the change of the first
    /// value that has it.
    pub(crate) fn tangent(self, x: &[f32], d: &[f32], out: &mut [f32]) {
        if self.is_linear() {
            return self.apply(d, out);
        }
        let (positions, channels) = (self.input().positions(), self.input().channels);
        let places = out.len() / channels.max(1);
        let mut largest = vec![0.0f32; places];
        let planes = x.chunks_exact(positions).zip(d.chunks_exact(positions));
        for ((x, d), out) in planes.zip(out.chunks_exact_mut(places)) {
            largest.fill(f32::NEG_INFINITY);
            self.for_taps(|from, to| {
                if x[from] > largest[to] {
                    (largest[to], out[to]) = (x[from], d[from]);
                }
            });
        }
    }

    /// A mean as a matrix over the positions of a channel: for every position of the result, positions of the operand
    /// with their shares. Empty for a maximum, which is not a matrix.
    pub(crate) fn means(self) -> Vec<Vec<(usize, f64)>> {
        let (_, _, height, width) = self.geometry();
        let mut rows = vec![Vec::new(); height * width];
        if self.is_linear() {
            let mut shares = vec![0.0; rows.len()];
            self.for_divisors(|to, divisor| shares[to] = 1.0 / f64::from(divisor));
            self.for_taps(|from, to| rows[to].push((from, shares[to])));
        }
        rows
    }

    /// For every position of a channel of the result, the positions of the operand that it reads.
    pub(crate) fn windows(self) -> Vec<Vec<usize>> {
        let (_, _, height, width) = self.geometry();
        let mut windows = vec![Vec::new(); height * width];
        self.for_taps(|from, to| windows[to].push(from));
        windows
    }

    /// Values summed for one result.
    pub(crate) fn terms(self) -> usize {
        match self {
            FixedMap::AveragePool { window, .. } => window.area(),
            FixedMap::MaxPool { .. } => 0,
            FixedMap::GlobalAverage { .. } => 1,
        }
    }

    fn geometry(self) -> (MapShape, Window, usize, usize) {
        let (input, window) = match self {
            FixedMap::AveragePool { input, window, .. } | FixedMap::MaxPool { input, window } => (input, window),
            FixedMap::GlobalAverage { input } => (
                input,
                Window { kernel: [input.height, input.width], stride: [1, 1], padding: [0; 4], dilation: [1; 2] },
            ),
        };
        // The window was checked when the map was made.
        let [height, width] = window.output(input).unwrap_or([0, 0]);
        (input, window, height, width)
    }

    /// Calls `visit` for every pair (position of the operand, position of the result) that the windows of one channel
    /// connect, tap by tap.
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

    /// Calls `visit` with every position of the result and the number that its sum is divided by.
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
