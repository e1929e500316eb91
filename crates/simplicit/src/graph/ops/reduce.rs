//! Sums, means, maxima and minima over axes. Sums are taken in double precision.

use super::loops::{AXES, Loops};
use super::{Reduction, Value};
use crate::graph::Dims;
use crate::{Error, Result};

/// Results side by side where the last axis stays.
const LANES: usize = 16;

pub(super) fn dims(axes: &[usize], keep: bool, x: Dims) -> Result<Dims> {
    let ascending = axes.windows(2).all(|pair| pair[0] < pair[1]);
    if !ascending || axes.last().is_some_and(|&last| last >= x.rank()) {
        let expected = format!("ascending numbers below {}, the axes of {x:?}", x.rank());
        return Err(Error::shape("axes of a reduction", expected, format!("{axes:?}")));
    }
    let size = |(axis, &size): (usize, &usize)| match (axes.contains(&axis), keep) {
        (false, _) => Some(size),
        (true, true) => Some(1),
        (true, false) => None,
    };
    Dims::new(&x.sizes().iter().enumerate().filter_map(size).collect::<Vec<_>>())
}

/// The loops over the axes that stay, the loops over those that are reduced, and the number of values of one result.
fn plan(axes: &[usize], x: Dims) -> (Loops<1>, Loops<1>, usize) {
    let mut sizes = [[1; AXES]; 2];
    for (axis, &size) in x.sizes().iter().enumerate() {
        sizes[usize::from(axes.contains(&axis))][axis] = size;
    }
    let loops = |sizes: &[usize; AXES]| Loops::new(&sizes[..x.rank()], [x.strides()]);
    (loops(&sizes[0]), loops(&sizes[1]), sizes[1].iter().product())
}

pub(super) fn forward(reduction: Reduction, axes: &[usize], x: Value<'_>, out: &mut [f32]) {
    let (kept, reduced, count) = plan(axes, x.dims);
    let scale = if reduction == Reduction::Mean { 1.0 / count as f64 } else { 1.0 };
    match reduction {
        Reduction::Sum | Reduction::Mean => {
            fold(&kept, &reduced, x.data, out, 0.0, |sum: f64, x| sum + f64::from(x), |sum| (sum * scale) as f32);
        }
        Reduction::Maximum => fold(&kept, &reduced, x.data, out, f32::NEG_INFINITY, larger, |x| x),
        Reduction::Minimum => fold(&kept, &reduced, x.data, out, f32::INFINITY, smaller, |x| x),
    }
}

/// A NaN is returned if there is one, as in ONNX.
#[inline]
fn larger(best: f32, x: f32) -> f32 {
    if x > best || x.is_nan() { x } else { best }
}

#[inline]
fn smaller(best: f32, x: f32) -> f32 {
    if x < best || x.is_nan() { x } else { best }
}

/// Every result from its values, in their order; neighbouring results together where they are neighbours in x.
fn fold<T: Copy>(
    kept: &Loops<1>,
    reduced: &Loops<1>,
    x: &[f32],
    out: &mut [f32],
    start: T,
    add: impl Fn(T, f32) -> T,
    end: impl Fn(T) -> f32,
) {
    let (n, [step]) = kept.inner();
    let mut done = 0;
    if step == 1 && n > 1 {
        kept.outer().each(|[at]| {
            for first in (0..n).step_by(LANES) {
                let count = LANES.min(n - first);
                let mut lanes = [start; LANES];
                reduced.each(|[along]| {
                    let from = at + along + first;
                    lanes.iter_mut().zip(&x[from..from + count]).for_each(|(lane, &x)| *lane = add(*lane, x));
                });
                out[done..done + count].iter_mut().zip(lanes).for_each(|(o, lane)| *o = end(lane));
                done += count;
            }
        });
        return;
    }
    let (length, [stride]) = reduced.inner();
    let inner = reduced.outer();
    kept.each(|[at]| {
        let mut total = start;
        inner.each(|[along]| (0..length).for_each(|k| total = add(total, x[at + along + k * stride])));
        out[done] = end(total);
        done += 1;
    });
}

/// Sums and means pass their cotangent to all values, a maximum or minimum to the first value that equals it.
pub(super) fn adjoint(reduction: Reduction, axes: &[usize], x: Value<'_>, out: &[f32], dout: &[f32], dx: &mut [f32]) {
    let (kept, reduced, count) = plan(axes, x.dims);
    let mut done = 0;
    match reduction {
        Reduction::Sum | Reduction::Mean => {
            let scale = if reduction == Reduction::Mean { 1.0 / count as f32 } else { 1.0 };
            let (n, [step]) = kept.inner();
            kept.outer().each(|[at]| {
                reduced.each(|[along]| (0..n).for_each(|k| dx[at + along + k * step] += dout[done + k] * scale));
                done += n;
            });
        }
        Reduction::Maximum | Reduction::Minimum => kept.each(|[at]| {
            let mut first = None;
            reduced.each(|[along]| {
                let x = x.data[at + along];
                if first.is_none() && (x == out[done] || x.is_nan()) {
                    first = Some(at + along);
                }
            });
            if let Some(first) = first {
                dx[first] += dout[done];
            }
            done += 1;
        }),
    }
}
