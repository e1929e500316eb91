//! Softmax and layer norm: numbers relative to the others along axes. Sums are taken in double precision.

use super::Value;
use super::loops::around;
use crate::kernels::elementary;

/// Columns side by side where the axis is not the last one.
const LANES: usize = 16;

/// eˣ/Σeˣ, the largest subtracted first.
pub(super) fn softmax(axis: usize, x: Value<'_>, out: &mut [f32]) {
    let (_, n, inner) = around(x.dims, axis);
    if n == 0 || inner == 0 {
        return;
    }
    for (x, out) in x.data.chunks_exact(n * inner).zip(out.chunks_exact_mut(n * inner)) {
        if inner == 1 {
            elementary::softmax(x, out);
        } else {
            elementary::softmax_columns(x, inner, out);
        }
    }
}

/// dx += y·(d − Σ d·y).
pub(super) fn softmax_adjoint(axis: usize, out: Value<'_>, dout: &[f32], dx: &mut [f32]) {
    let (_, n, inner) = around(out.dims, axis);
    if n == 0 || inner == 0 {
        return;
    }
    let block = n * inner;
    for ((y, d), dx) in out.data.chunks_exact(block).zip(dout.chunks_exact(block)).zip(dx.chunks_exact_mut(block)) {
        for first in (0..inner).step_by(LANES) {
            let columns = first..(first + LANES).min(inner);
            let mut sums = [0.0f64; LANES];
            for (y, d) in y.chunks_exact(inner).zip(d.chunks_exact(inner)) {
                for (lane, k) in columns.clone().enumerate() {
                    sums[lane] += f64::from(y[k]) * f64::from(d[k]);
                }
            }
            for ((y, d), dx) in y.chunks_exact(inner).zip(d.chunks_exact(inner)).zip(dx.chunks_exact_mut(inner)) {
                for (lane, k) in columns.clone().enumerate() {
                    dx[k] += (f64::from(y[k]) * (f64::from(d[k]) - sums[lane])) as f32;
                }
            }
        }
    }
}

/// (x − mean)/√(variance + ε) over the axes from `axis` on.
pub(super) fn layer(axis: usize, epsilon: f32, x: Value<'_>, out: &mut [f32]) {
    let n: usize = x.dims.sizes()[axis..].iter().product();
    if n == 0 {
        return;
    }
    for (x, out) in x.data.chunks_exact(n).zip(out.chunks_exact_mut(n)) {
        elementary::normalise(x, epsilon, out);
    }
}

/// dx += (d − mean d − y·mean(d·y))/√(variance + ε).
pub(super) fn layer_adjoint(axis: usize, epsilon: f32, x: Value<'_>, out: &[f32], dout: &[f32], dx: &mut [f32]) {
    let n: usize = x.dims.sizes()[axis..].iter().product();
    if n == 0 {
        return;
    }
    let rows = x.data.chunks_exact(n).zip(out.chunks_exact(n)).zip(dout.chunks_exact(n));
    for (((x, y), d), dx) in rows.zip(dx.chunks_exact_mut(n)) {
        let (_, scale) = elementary::moments(x, epsilon);
        let (mut sum, mut along) = (0.0f64, 0.0f64);
        for (&y, &d) in y.iter().zip(d) {
            sum += f64::from(d);
            along += f64::from(d) * f64::from(y);
        }
        let (sum, along) = (sum / n as f64, along / n as f64);
        for ((dx, &y), &d) in dx.iter_mut().zip(y).zip(d) {
            *dx += ((f64::from(d) - sum - f64::from(y) * along) * scale) as f32;
        }
    }
}
