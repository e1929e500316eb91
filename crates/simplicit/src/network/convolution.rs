//! Convolutions of one sample: the operand is padded and split by stride, then summed in registers; no windows are copied.

use super::phases::Phases;
use super::shape::Window;
use crate::kernels::{Cost, Finish, Grid, GridWeights, Instructions};
use crate::layout::MapShape;
use crate::linalg::{Matrix, Scalar, View, gemm};

/// Number of values in a block of columns, for the operations that copy windows: small enough for the second-level
/// cache.
const BLOCK: usize = 1 << 16;

/// Weights packed for a batch, with memory for one sample.
#[derive(Debug)]
pub(crate) struct ConvolutionWorkspace {
    weights: Option<GridWeights>,
    padded: Vec<f32>,
}

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

    /// Whether this is a 1 × 1 window at every position, so that the input already is the matrix of columns.
    fn is_plain(self) -> bool {
        self.window == Window::square(1, 1, 0)
    }

    fn grid(map: MapShape, source_row: usize) -> Grid {
        Grid {
            height: map.height,
            width: map.width,
            lanes: 1,
            source_row,
            source_step: 1,
            out_row: map.width,
            out_channel: map.positions(),
        }
    }

    /// Packs the weights for [`Convolution::add`].
    pub(crate) fn workspace(self, weights: &Matrix<f32>) -> ConvolutionWorkspace {
        let phases = Phases::new(self.window, self.input, self.output);
        let offsets = phases.offsets();
        let weights = GridWeights::dense(weights.as_slice(), weights.rows(), &offsets, Cost::default());
        ConvolutionWorkspace {
            weights: Some(weights),
            padded: vec![0.0; if self.is_plain() { 0 } else { phases.size() }],
        }
    }

    /// out += W · windows(x), out already holding the bias.
    pub(crate) fn add(self, x: &[f32], workspace: &mut ConvolutionWorkspace, out: &mut [f32]) {
        let Some(weights) = &workspace.weights else { return };
        let phases = Phases::new(self.window, self.input, self.output);
        let source = if self.is_plain() {
            x
        } else {
            phases.split(x, [self.input.width, self.input.positions()], &mut workspace.padded, 1);
            &workspace.padded
        };
        let grid = Self::grid(self.output, phases.row());
        weights.run(Instructions::detect(), &grid, source, out, &Finish::default());
    }

    /// The column of one output position: every tap's value, zero on the padding.
    pub(crate) fn window_at<T: Scalar>(self, x: &[f32], position: usize, out: &mut [T]) {
        let Self { input, output, window } = self;
        let [kernel_height, kernel_width] = window.kernel;
        let top = position / output.width * window.stride[0];
        let left = position % output.width * window.stride[1];
        let [down, right] = window.dilation;
        // The places of the window that lie inside the map, along each axis.
        let inside = |start: usize, before: usize, size: usize, kernel: usize, step: usize| {
            before.saturating_sub(start).div_ceil(step).min(kernel)
                ..(size + before).saturating_sub(start).div_ceil(step).min(kernel)
        };
        let rows = inside(top, window.padding[0], input.height, kernel_height, down);
        let columns = inside(left, window.padding[1], input.width, kernel_width, right);
        if rows.len() < kernel_height || columns.len() < kernel_width {
            out.fill(T::default());
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
                    *out = T::from_f64(f64::from(*x));
                }
            }
        }
    }

    /// Whether there is no stride and less padding than the kernel, so that the transpose is a convolution of the
    /// cotangent.
    fn transposes(self) -> bool {
        let ([kh, kw], [top, left, bottom, right]) = (self.window.kernel, self.window.padding);
        (self.window.stride, self.window.dilation) == ([1, 1], [1, 1]) && top.max(bottom) < kh && left.max(right) < kw
    }

    /// The layout of the cotangent as a padded map: rows and columns of zeros above and to the left, and all rows and
    /// columns.
    fn cotangent(self) -> ([usize; 2], [usize; 2]) {
        let ([kh, kw], [top, left, bottom, right]) = (self.window.kernel, self.window.padding);
        let before = [kh - 1 - top, kw - 1 - left];
        let after = [kh - 1 - bottom, kw - 1 - right];
        (before, [self.output.height + before[0] + after[0], self.output.width + before[1] + after[1]])
    }

    /// Packs the weights for [`Convolution::pull_back`].
    pub(crate) fn back_room(self, weights: &Matrix<f32>) -> ConvolutionWorkspace {
        if !self.transposes() {
            return ConvolutionWorkspace { weights: None, padded: vec![0.0; self.taps() * self.block()] };
        }
        let ([kh, kw], channels) = (self.window.kernel, self.output.channels);
        let (_, [height, width]) = self.cotangent();
        let columns = channels * kh * kw;
        let mut transposed = vec![0.0; self.input.channels * columns];
        for o in 0..channels {
            for (j, v) in weights.row(o).iter().enumerate() {
                transposed[j / (kh * kw) * columns + o * kh * kw + j % (kh * kw)] = *v;
            }
        }
        let offset = |j: usize| {
            let (o, dy, dx) = (j / (kh * kw), j / kw % kh, j % kw);
            (o * height + kh - 1 - dy) * width + kw - 1 - dx
        };
        let offsets: Vec<usize> = (0..columns).map(offset).collect();
        let weights = GridWeights::dense(&transposed, self.input.channels, &offsets, Cost::default());
        ConvolutionWorkspace { weights: Some(weights), padded: vec![0.0; channels * height * width] }
    }

    /// dx += windowsᵀ(Wᵀ · dout): the transpose of [`Convolution::add`].
    pub(crate) fn pull_back(
        self,
        weights: &Matrix<f32>,
        dout: &[f32],
        workspace: &mut ConvolutionWorkspace,
        dx: &mut [f32],
    ) {
        if let Some(weights) = &workspace.weights {
            let ([above, left], [height, width]) = self.cotangent();
            for (k, row) in dout.chunks_exact(self.output.width).enumerate() {
                let (o, y) = (k / self.output.height, k % self.output.height);
                let at = (o * height + above + y) * width + left;
                workspace.padded[at..at + row.len()].copy_from_slice(row);
            }
            let grid = Self::grid(self.input, width);
            return weights.run(Instructions::detect(), &grid, &workspace.padded, dx, &Finish::default());
        }
        let scratch = &mut workspace.padded;
        let (positions, taps) = (self.output.positions(), self.taps());
        let channels = self.output.channels;
        for start in (0..positions).step_by(self.block()) {
            let count = self.block().min(positions - start);
            let columns = &mut scratch[..taps * count];
            let part = View::new(&dout[start..], channels, count, positions);
            gemm(columns, count, false, 1.0, weights.view().t(), part);
            self.for_runs(start, count, |at, from, run| {
                let stride = self.window.stride[1];
                for i in 0..run {
                    dx[from + i * stride] += columns[at + i];
                }
            });
        }
    }

    /// gradient += dout · windows(x)ᵀ, channels × taps: the transpose of [`Convolution::add`] in its weights.
    pub(crate) fn add_outer(self, x: &[f32], dout: &[f32], scratch: &mut Vec<f32>, gradient: &mut [f32]) {
        let (positions, taps) = (self.output.positions(), self.taps());
        let channels = self.output.channels;
        if self.is_plain() {
            let part = View::new(dout, channels, positions, positions);
            return gemm(gradient, taps, true, 1.0, part, View::new(x, taps, positions, positions).t());
        }
        scratch.resize(taps * self.block(), 0.0);
        let stride = self.window.stride[1];
        for start in (0..positions).step_by(self.block()) {
            let count = self.block().min(positions - start);
            let columns = &mut scratch[..taps * count];
            columns.fill(0.0);
            self.for_runs(start, count, |at, from, run| {
                let values = x[from..].iter().step_by(stride);
                columns[at..at + run].iter_mut().zip(values).for_each(|(c, x)| *c = *x);
            });
            let part = View::new(&dout[start..], channels, count, positions);
            gemm(gradient, taps, true, 1.0, part, View::new(columns, taps, count, count).t());
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

    #[test]
    fn the_window_at_a_position_is_a_column_of_the_product() {
        // If W picks one tap after the other, out = W · columns is the column itself.
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
            convolution.add(&x, &mut convolution.workspace(&identity), &mut all);
            let mut column = vec![9.0; taps];
            for position in 0..output.positions() {
                convolution.window_at(&x, position, &mut column);
                for tap in 0..taps {
                    assert_eq!(column[tap], f64::from(all[tap * output.positions() + position]));
                }
            }
        }
    }

    #[test]
    fn the_transpose_is_the_transpose() {
        // ⟨dout, W·windows(x)⟩ = ⟨windowsᵀ(Wᵀ·dout), x⟩ for strides, uneven padding and padding wider than the kernel.
        let mut r = crate::random::Random::new(5);
        let mut numbers = |n: usize| (0..n).map(|_| r.normal() as f32).collect::<Vec<_>>();
        let input = MapShape { channels: 3, height: 6, width: 5 };
        for window in [
            ([3, 3], [1, 1], [1; 4]),
            ([3, 2], [1, 1], [2, 0, 1, 1]),
            ([3, 3], [2, 2], [1; 4]),
            ([1, 1], [1, 1], [0; 4]),
            ([1, 1], [2, 1], [0; 4]),
            ([2, 2], [1, 1], [2, 2, 2, 3]),
        ]
        .into_iter()
        .flat_map(|case| [[1, 1], [2, 1]].map(|dilation| (case, dilation)))
        .map(|((kernel, stride, padding), dilation)| Window { kernel, stride, padding, dilation })
        {
            let [height, width] = window.output(input).unwrap();
            let output = MapShape { channels: 4, height, width };
            let convolution = Convolution { input, output, window };
            let weights = Matrix::from_vec(4, 3 * window.area(), numbers(12 * window.area())).unwrap();
            let (x, dout) = (numbers(input.size()), numbers(output.size()));
            let (mut out, mut dx) = (vec![0.0; output.size()], vec![0.0; input.size()]);
            convolution.add(&x, &mut convolution.workspace(&weights), &mut out);
            convolution.pull_back(&weights, &dout, &mut convolution.back_room(&weights), &mut dx);
            let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
            let mut gradient = vec![0.0; weights.as_slice().len()];
            convolution.add_outer(&x, &dout, &mut Vec::new(), &mut gradient);
            let (left, right) = (dot(&out, &dout), dot(&dx, &x));
            let size = dot(&out, &out).sqrt() * dot(&dout, &dout).sqrt();
            assert!((left - right).abs() <= 1e-5 * size, "{window:?}: {left} {right}");
            let by_weights = dot(&gradient, weights.as_slice());
            assert!((left - by_weights).abs() <= 1e-5 * size, "{window:?}: {left} {by_weights}");
        }
    }
}
