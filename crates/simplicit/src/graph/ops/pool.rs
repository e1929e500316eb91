//! Poolings with dilation, windows beyond the padding, or one axis.

use super::{Pooling, Value};
use crate::graph::Dims;
use crate::{Error, Result};

/// The largest size along an axis of a window, its padding or its steps.
const MOST: usize = 1 << 26;

/// One pooled axis.
#[derive(Clone, Copy)]
struct Axis {
    size: usize,
    out: usize,
    kernel: usize,
    stride: usize,
    dilation: usize,
    before: usize,
    /// The padding that the file gives behind the values, without what ceil_mode added.
    behind: usize,
}

impl Axis {
    const ONE: Self = Self { size: 1, out: 1, kernel: 1, stride: 1, dilation: 1, before: 0, behind: 0 };

    /// The places of window `o` between `low` and `high`, both counted from the start of the padding, as places of the
    /// window.
    fn places(self, o: usize, low: usize, high: usize) -> std::ops::Range<usize> {
        let start = o * self.stride;
        let first = low.saturating_sub(start).div_ceil(self.dilation).min(self.kernel);
        let end = high.saturating_sub(start).div_ceil(self.dilation).min(self.kernel);
        first..end.max(first)
    }

    /// The places of window `o` that lie on values.
    fn inside(self, o: usize) -> std::ops::Range<usize> {
        self.places(o, self.before, self.before + self.size)
    }

    /// The number of places of window `o` that a mean counts.
    fn counted(self, o: usize, padding: bool) -> usize {
        if padding { self.places(o, 0, self.before + self.size + self.behind).len() } else { self.inside(o).len() }
    }

    /// The index that place `k` of window `o` reads; it must be inside.
    fn at(self, o: usize, k: usize) -> usize {
        o * self.stride + k * self.dilation - self.before
    }
}

impl Pooling {
    fn axis(&self, k: usize, size: usize) -> Option<Axis> {
        let (kernel, stride, dilation) = (self.kernel[k], self.stride[k], self.dilation[k]);
        let ([before, after], beyond) = (self.padding[k], self.beyond[k]);
        let positive = [kernel, stride, dilation].iter().all(|n| *n > 0);
        if !positive || [kernel, stride, dilation, size, before, after].iter().any(|n| *n > MOST) {
            return None;
        }
        let extent = (kernel - 1).checked_mul(dilation)?.checked_add(1)?;
        let out = (size + before + after).checked_sub(extent)? / stride + 1;
        let axis = Axis { size, out, kernel, stride, dilation, before, behind: after.checked_sub(beyond)? };
        // A window on padding alone has neither a maximum nor a mean. A window between two that meet values can miss
        // all of them only where its places are further apart than there are values.
        let meets = |o: usize| !axis.inside(o).is_empty();
        let all = meets(0) && meets(out - 1) && (dilation <= size || (0..out).all(meets));
        all.then_some(axis)
    }

    pub(super) fn dims(&self, x: Dims) -> Result<Dims> {
        let pooled = self.kernel.len();
        let lengths = [self.stride.len(), self.dilation.len(), self.padding.len(), self.beyond.len()];
        if !(1..=2).contains(&pooled) || lengths != [pooled; 4] || x.rank() < pooled {
            let expected = "kernel, stride, dilation and padding of one or two last axes";
            return Err(Error::shape("pooling", expected, format!("{self:?} of {x:?}")));
        }
        let mut sizes = x.sizes().to_vec();
        let first = sizes.len() - pooled;
        for k in 0..pooled {
            let Some(axis) = self.axis(k, sizes[first + k]) else {
                let expected = format!(
                    "sizes from 1 to 2^26 whose every window reads some of the {} values of axis {}",
                    sizes[first + k],
                    first + k
                );
                return Err(Error::shape("pooling window", expected, format!("{self:?}")));
            };
            sizes[first + k] = axis.out;
        }
        Dims::new(&sizes)
    }

    /// Height and width; a single axis counts as a width.
    fn plane(&self, x: Dims) -> Option<[Axis; 2]> {
        let mut axes = [Axis::ONE; 2];
        let pooled = self.kernel.len();
        for k in 0..pooled {
            axes[2 - pooled + k] = self.axis(k, x.sizes()[x.rank() - pooled + k])?;
        }
        Some(axes)
    }

    pub(super) fn forward(&self, x: Value<'_>, out: &mut [f32]) {
        let Some([rows, columns]) = self.plane(x.dims) else { return };
        let planes = x.data.chunks_exact(rows.size * columns.size);
        for (x, out) in planes.zip(out.chunks_exact_mut(rows.out * columns.out)) {
            for (i, out) in out.chunks_exact_mut(columns.out).enumerate() {
                for (j, out) in out.iter_mut().enumerate() {
                    *out = if self.maximum {
                        x[largest([rows, columns], [i, j], x)]
                    } else {
                        let mut sum = 0.0;
                        for k in rows.inside(i) {
                            let row = &x[rows.at(i, k) * columns.size..];
                            columns.inside(j).for_each(|l| sum += f64::from(row[columns.at(j, l)]));
                        }
                        (sum / self.count([rows, columns], [i, j])) as f32
                    };
                }
            }
        }
    }

    /// The effect of a change `d` of the value on the result: the change of the first maximum, or the mean of the
    /// changes.
    pub(super) fn tangent(&self, x: Value<'_>, d: &[f32], out: &mut [f32]) {
        if !self.maximum {
            return self.forward(Value { data: d, ..x }, out);
        }
        let Some([rows, columns]) = self.plane(x.dims) else { return };
        let plane = rows.size * columns.size;
        let planes = x.data.chunks_exact(plane).zip(d.chunks_exact(plane));
        for ((x, d), out) in planes.zip(out.chunks_exact_mut(rows.out * columns.out)) {
            for (place, out) in out.iter_mut().enumerate() {
                *out = d[largest([rows, columns], [place / columns.out, place % columns.out], x)];
            }
        }
    }

    /// For every result the places that it reads, and the factor of a mean.
    pub(super) fn windows(&self, x: Dims) -> Option<Vec<(Vec<u32>, f64)>> {
        let [rows, columns] = self.plane(x)?;
        let plane = rows.size * columns.size;
        let mut windows = Vec::new();
        for first in (0..x.size()).step_by(plane.max(1)) {
            for i in 0..rows.out {
                for j in 0..columns.out {
                    let mut window = Vec::new();
                    for k in rows.inside(i) {
                        let row = first + rows.at(i, k) * columns.size;
                        window.extend(columns.inside(j).map(|l| (row + columns.at(j, l)) as u32));
                    }
                    windows.push((window, 1.0 / self.count([rows, columns], [i, j])));
                }
            }
        }
        Some(windows)
    }

    fn count(&self, [rows, columns]: [Axis; 2], [i, j]: [usize; 2]) -> f64 {
        (rows.counted(i, self.count_padding) * columns.counted(j, self.count_padding)) as f64
    }

    /// A mean distributes its cotangent; a maximum passes all of it to the first place that has the maximum.
    pub(super) fn adjoint(&self, x: Value<'_>, dout: &[f32], dx: &mut [f32]) {
        let Some([rows, columns]) = self.plane(x.dims) else { return };
        let plane = rows.size * columns.size;
        let planes = x.data.chunks_exact(plane).zip(dx.chunks_exact_mut(plane));
        for ((x, dx), dout) in planes.zip(dout.chunks_exact(rows.out * columns.out)) {
            for (place, &d) in dout.iter().enumerate() {
                let (i, j) = (place / columns.out, place % columns.out);
                if self.maximum {
                    dx[largest([rows, columns], [i, j], x)] += d;
                    continue;
                }
                let share = (f64::from(d) / self.count([rows, columns], [i, j])) as f32;
                for k in rows.inside(i) {
                    let row = &mut dx[rows.at(i, k) * columns.size..];
                    columns.inside(j).for_each(|l| row[columns.at(j, l)] += share);
                }
            }
        }
    }
}

/// Where the first maximum of a window is; NaN counts as the largest.
fn largest([rows, columns]: [Axis; 2], [i, j]: [usize; 2], x: &[f32]) -> usize {
    let mut best: Option<usize> = None;
    for k in rows.inside(i) {
        let row = rows.at(i, k) * columns.size;
        for l in columns.inside(j) {
            let at = row + columns.at(j, l);
            if best.is_none_or(|best| x[at] > x[best] || (x[at].is_nan() && !x[best].is_nan())) {
                best = Some(at);
            }
        }
    }
    best.unwrap_or(0)
}
