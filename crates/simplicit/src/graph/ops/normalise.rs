//! Softmax and the norm of a layer: numbers in proportion to the others along axes. Sums are taken in double precision.

use super::Value;
use super::loops::around;

/// Columns side by side where the axis is not the last one.
const LANES: usize = 16;

/// eˣ/Σeˣ, the largest subtracted first.
pub(super) fn softmax(axis: usize, x: Value<'_>, out: &mut [f32]) {
    let (_, n, inner) = around(x.dims, axis);
    if n == 0 || inner == 0 {
        return;
    }
    if inner == 1 {
        for (x, out) in x.data.chunks_exact(n).zip(out.chunks_exact_mut(n)) {
            let largest = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            out.iter_mut().zip(x).for_each(|(o, &x)| *o = (x - largest).exp());
            let scale = 1.0 / out.iter().map(|&e| f64::from(e)).sum::<f64>();
            out.iter_mut().for_each(|o| *o = (f64::from(*o) * scale) as f32);
        }
        return;
    }
    for (x, out) in x.data.chunks_exact(n * inner).zip(out.chunks_exact_mut(n * inner)) {
        for first in (0..inner).step_by(LANES) {
            let columns = first..(first + LANES).min(inner);
            let mut largest = [f32::NEG_INFINITY; LANES];
            for row in x.chunks_exact(inner) {
                largest.iter_mut().zip(&row[columns.clone()]).for_each(|(l, &x)| *l = l.max(x));
            }
            let mut sums = [0.0f64; LANES];
            for (row, out) in x.chunks_exact(inner).zip(out.chunks_exact_mut(inner)) {
                for (lane, k) in columns.clone().enumerate() {
                    out[k] = (row[k] - largest[lane]).exp();
                    sums[lane] += f64::from(out[k]);
                }
            }
            for out in out.chunks_exact_mut(inner) {
                out[columns.clone()].iter_mut().zip(&sums).for_each(|(o, s)| *o = (f64::from(*o) / s) as f32);
            }
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

/// Mean and 1/√(variance + ε).
fn moments(x: &[f32], epsilon: f32) -> (f64, f64) {
    let n = x.len() as f64;
    let mean = x.iter().map(|&x| f64::from(x)).sum::<f64>() / n;
    let square = |&x: &f32| (f64::from(x) - mean) * (f64::from(x) - mean);
    (mean, 1.0 / (x.iter().map(square).sum::<f64>() / n + f64::from(epsilon)).sqrt())
}

/// (x − mean)/√(variance + ε) over the axes from `axis` on.
pub(super) fn layer(axis: usize, epsilon: f32, x: Value<'_>, out: &mut [f32]) {
    let n: usize = x.dims.sizes()[axis..].iter().product();
    if n == 0 {
        return;
    }
    for (x, out) in x.data.chunks_exact(n).zip(out.chunks_exact_mut(n)) {
        let (mean, scale) = moments(x, epsilon);
        out.iter_mut().zip(x).for_each(|(o, &x)| *o = ((f64::from(x) - mean) * scale) as f32);
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
        let (_, scale) = moments(x, epsilon);
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
