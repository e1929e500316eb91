//! Convolution as a product: windows are copied into the columns of a small matrix, a bounded block at a time.

use super::shape::Window;
use crate::layout::MapShape;
use crate::linalg::{View, gemm};

/// Values in a block of columns: small enough for the second-level cache.
const BLOCK: usize = 1 << 16;

/// The geometry of one convolution.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Convolution {
    pub(crate) input: MapShape,
    pub(crate) output: MapShape,
    pub(crate) window: Window,
}

impl Convolution {
    /// Taps per output channel; column (c·kh + dy)·kw + dx of the weights.
    fn taps(self) -> usize {
        self.input.channels * self.window.area()
    }

    /// Output positions handled at once.
    fn block(self) -> usize {
        (BLOCK / self.taps()).clamp(8, self.output.positions().max(8))
    }

    /// Room for one block of columns.
    pub(crate) fn scratch(self) -> Vec<f32> {
        vec![0.0; if self.is_plain() { 0 } else { self.taps() * self.block() }]
    }

    /// A 1 × 1 window at every position: the input already is the matrix of columns.
    fn is_plain(self) -> bool {
        self.window == Window::square(1, 1, 0)
    }

    /// out += W · columns(x), out already holding the bias.
    pub(crate) fn add(self, weights: View<'_, f32>, x: &[f32], scratch: &mut [f32], out: &mut [f32]) {
        let (positions, taps) = (self.output.positions(), self.taps());
        if self.is_plain() {
            return gemm(out, positions, true, 1.0, weights, View::new(x, taps, positions, positions));
        }
        for start in (0..positions).step_by(self.block()) {
            let count = self.block().min(positions - start);
            let columns = &mut scratch[..taps * count];
            columns.fill(0.0);
            self.for_runs(start, count, |at, from, run| {
                let stride = self.window.stride[1];
                if stride == 1 {
                    columns[at..at + run].copy_from_slice(&x[from..from + run]);
                } else {
                    for i in 0..run {
                        columns[at + i] = x[from + i * stride];
                    }
                }
            });
            let columns = View::new(columns, taps, count, count);
            gemm(&mut out[start..], positions, true, 1.0, weights, columns);
        }
    }

    /// The column of one output position: every tap's value, zero on the padding.
    pub(crate) fn window_at(self, x: &[f32], position: usize, out: &mut [f64]) {
        let Self { input, output, window } = self;
        let [kernel_height, kernel_width] = window.kernel;
        let top = position / output.width * window.stride[0];
        let left = position % output.width * window.stride[1];
        let [down, right] = window.dilation;
        // Places of the window that lie inside the map, along each axis.
        let inside = |start: usize, before: usize, size: usize, kernel: usize, step: usize| {
            before.saturating_sub(start).div_ceil(step).min(kernel)
                ..(size + before).saturating_sub(start).div_ceil(step).min(kernel)
        };
        let rows = inside(top, window.padding[0], input.height, kernel_height, down);
        let columns = inside(left, window.padding[1], input.width, kernel_width, right);
        if rows.len() < kernel_height || columns.len() < kernel_width {
            out.fill(0.0);
        }
        if rows.is_empty() || columns.is_empty() {
            return;
        }
        let ix = left + columns.start * right - window.padding[1];
        for c in 0..input.channels {
            for dy in rows.clone() {
                let iy = top + dy * down - window.padding[0];
                let from = (c * input.height + iy) * input.width + ix;
                let to = (c * kernel_height + dy) * kernel_width + columns.start;
                for (out, x) in out[to..to + columns.len()].iter_mut().zip(x[from..].iter().step_by(right)) {
                    *out = f64::from(*x);
                }
            }
        }
    }

    /// dx += columnsᵀ(Wᵀ · dout): the transpose of [`Convolution::add`].
    pub(crate) fn pull_back(self, weights: View<'_, f32>, dout: &[f32], scratch: &mut [f32], dx: &mut [f32]) {
        let (positions, taps) = (self.output.positions(), self.taps());
        let channels = self.output.channels;
        if self.is_plain() {
            let dout = View::new(dout, channels, positions, positions);
            return gemm(dx, positions, true, 1.0, weights.t(), dout);
        }
        for start in (0..positions).step_by(self.block()) {
            let count = self.block().min(positions - start);
            let columns = &mut scratch[..taps * count];
            let part = View::new(&dout[start..], channels, count, positions);
            gemm(columns, count, false, 1.0, weights.t(), part);
            self.for_runs(start, count, |at, from, run| {
                let stride = self.window.stride[1];
                for i in 0..run {
                    dx[from + i * stride] += columns[at + i];
                }
            });
        }
    }

    /// Runs of the columns of `count` positions from `start` that lie inside the map: (place in the columns, place in
    /// the input, length); consecutive places in the input are one stride apart.
    fn for_runs(self, start: usize, count: usize, mut visit: impl FnMut(usize, usize, usize)) {
        let Self { input, output, window } = self;
        let end = start + count;
        let (first_row, last_row) = (start / output.width, (end - 1) / output.width);
        for c in 0..input.channels {
            for dy in 0..window.kernel[0] {
                let down = dy * window.dilation[0];
                let rows = window.inside(0, down, input.height, output.height);
                for dx in 0..window.kernel[1] {
                    let tap = (c * window.kernel[0] + dy) * window.kernel[1] + dx;
                    let right = dx * window.dilation[1];
                    let columns = window.inside(1, right, input.width, output.width);
                    for oy in first_row.max(rows.start)..(last_row + 1).min(rows.end) {
                        let row = oy * output.width;
                        let from = (row + columns.start).max(start);
                        let to = (row + columns.end).min(end);
                        if from < to {
                            let iy = oy * window.stride[0] + down - window.padding[0];
                            let ix = (from - row) * window.stride[1] + right - window.padding[1];
                            let place = (c * input.height + iy) * input.width + ix;
                            visit(tap * count + from - start, place, to - from);
                        }
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::linalg::Matrix;

    #[test]
    fn the_window_at_a_position_is_a_column_of_the_product() {
        // out = W · columns with W picking one tap after the other: the column itself.
        let input = MapShape { channels: 2, height: 5, width: 4 };
        let x: Vec<f32> = (0..input.size()).map(|k| (k * k % 17) as f32 - 3.0).collect();
        for window in [
            ([3, 3], [1, 1], [1; 4]),
            ([3, 2], [2, 1], [0, 1, 1, 2]),
            ([1, 1], [2, 2], [0; 4]),
            ([5, 4], [1, 1], [0; 4]),
            ([2, 2], [1, 2], [2, 1, 3, 1]),
        ]
        .into_iter()
        .flat_map(|(kernel, stride, padding)| {
            [[1, 1], [2, 3]].map(|dilation| Window { kernel, stride, padding, dilation })
        })
        .filter(|window| window.output(input).is_ok())
        {
            let [height, width] = window.output(input).unwrap();
            let taps = 2 * window.area();
            let output = MapShape { channels: taps, height, width };
            let convolution = Convolution { input, output, window };
            let mut all = vec![0.0; output.size()];
            let identity = Matrix::from_fn(taps, taps, |i, j| f32::from(u8::from(i == j)));
            convolution.add(identity.view(), &x, &mut convolution.scratch(), &mut all);
            let mut column = vec![9.0; taps];
            for position in 0..output.positions() {
                convolution.window_at(&x, position, &mut column);
                for tap in 0..taps {
                    assert_eq!(column[tap], f64::from(all[tap * output.positions() + position]));
                }
            }
        }
    }
}
