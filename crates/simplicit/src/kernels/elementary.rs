//! Softmax, layer norm and the functions that they need, for several numbers at a time.
//!
//! Loops of plain arithmetic without branches, compiled once per set of instructions: no multiply-add is fused and sums have
//! sixteen running parts, so a number gets the same bits one by one, in a slice, and on every machine.

/// Number of running parts of a sum.
const PARTS: usize = 16;

/// Runs `work` compiled for the widest instructions of this machine.
#[inline(always)]
fn vectorised<R>(work: impl FnOnce() -> R) -> R {
    pulp::Arch::new().dispatch(work)
}

/// eˣ within two units of the last place, subnormal results included; NaN stays NaN.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    // Beyond these limits the result is 0 or infinity; within them the powers of two below are representable.
    let x = if x > 89.0 { 89.0 } else { x };
    let x = if x < -104.0 { -104.0 } else { x };
    // x = n·ln 2 + r: adding 1.5·2²³ rounds to the nearest whole number.
    const MAGIC: f32 = 12_582_912.0;
    let shifted = x * std::f32::consts::LOG2_E + MAGIC;
    let n = shifted - MAGIC;
    // ln 2 in two parts; n times the first is exact.
    let r = (x - n * 0.693_359_4) - n * -2.121_944_4e-4;
    // eʳ = 1 + r + r²·q(r) for |r| ≤ ln 2 / 2, q by Taylor's series: the next term is below 2⁻²⁷.
    let q = 1.0 / 5040.0;
    let q = q * r + 1.0 / 720.0;
    let q = q * r + 1.0 / 120.0;
    let q = q * r + 1.0 / 24.0;
    let q = q * r + 1.0 / 6.0;
    let q = q * r + 0.5;
    let value = 1.0 + (r + r * r * q);
    // 2ⁿ as a product of two powers, so that neither leaves the range of f32 if the result does not.
    let n = shifted.to_bits().wrapping_sub(MAGIC.to_bits()) as i32;
    let half = n >> 1;
    let power = |n: i32| f32::from_bits(((n + 127) as u32) << 23);
    value * power(half) * power(n - half)
}

/// eˣ of every number, in place.
pub fn exp_slice(values: &mut [f32]) {
    vectorised(
        #[inline(always)]
        || values.iter_mut().for_each(|v| *v = exp(*v)),
    );
}

/// Σ f(x) in double precision over sixteen running parts.
#[inline(always)]
fn sum(x: &[f32], f: impl Fn(f64) -> f64) -> f64 {
    let mut parts = [0.0f64; PARTS];
    let (whole, rest) = x.as_chunks::<PARTS>();
    for chunk in whole {
        for k in 0..PARTS {
            parts[k] += f(f64::from(chunk[k]));
        }
    }
    for (part, x) in parts.iter_mut().zip(rest) {
        *part += f(f64::from(*x));
    }
    // Added in pairs: the same tree whatever the instructions.
    for width in [8, 4, 2, 1] {
        for k in 0..width {
            parts[k] += parts[k + width];
        }
    }
    parts[0]
}

/// eˣ/Σeˣ of one row, the largest subtracted first.
pub fn softmax(x: &[f32], out: &mut [f32]) {
    vectorised(
        #[inline(always)]
        || {
            let mut largest = [f32::NEG_INFINITY; PARTS];
            let (whole, rest) = x.as_chunks::<PARTS>();
            for chunk in whole {
                for k in 0..PARTS {
                    largest[k] = if chunk[k] > largest[k] { chunk[k] } else { largest[k] };
                }
            }
            let largest = rest.iter().chain(&largest).copied().fold(f32::NEG_INFINITY, f32::max);
            out.iter_mut().zip(x).for_each(|(o, &x)| *o = exp(x - largest));
            let scale = 1.0 / sum(out, |e| e);
            out.iter_mut().for_each(|o| *o = (f64::from(*o) * scale) as f32);
        },
    );
}

/// As [`softmax`], along the first axis of rows × `columns`, for all columns at once.
pub fn softmax_columns(x: &[f32], columns: usize, out: &mut [f32]) {
    vectorised(
        #[inline(always)]
        || {
            for first in (0..columns).step_by(PARTS) {
                let own = first..(first + PARTS).min(columns);
                let mut largest = [f32::NEG_INFINITY; PARTS];
                for row in x.chunks_exact(columns) {
                    for (l, &x) in largest.iter_mut().zip(&row[own.clone()]) {
                        *l = if x > *l { x } else { *l };
                    }
                }
                let mut sums = [0.0f64; PARTS];
                for (row, out) in x.chunks_exact(columns).zip(out.chunks_exact_mut(columns)) {
                    let parts = sums.iter_mut().zip(&largest);
                    for ((o, &x), (sum, &l)) in out[own.clone()].iter_mut().zip(&row[own.clone()]).zip(parts) {
                        *o = exp(x - l);
                        *sum += f64::from(*o);
                    }
                }
                for out in out.chunks_exact_mut(columns) {
                    out[own.clone()].iter_mut().zip(&sums).for_each(|(o, s)| *o = (f64::from(*o) / s) as f32);
                }
            }
        },
    );
}

/// Mean and 1/√(variance + ε) of a row.
pub fn moments(x: &[f32], epsilon: f32) -> (f64, f64) {
    vectorised(
        #[inline(always)]
        || {
            let n = x.len() as f64;
            let mean = sum(x, |x| x) / n;
            (mean, 1.0 / (sum(x, |x| (x - mean) * (x - mean)) / n + f64::from(epsilon)).sqrt())
        },
    )
}

/// (x − mean)/√(variance + ε) of one row.
pub fn normalise(x: &[f32], epsilon: f32, out: &mut [f32]) {
    let (mean, scale) = moments(x, epsilon);
    vectorised(
        #[inline(always)]
        || out.iter_mut().zip(x).for_each(|(o, &x)| *o = ((f64::from(x) - mean) * scale) as f32),
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    #[test]
    fn exponentials_are_two_units_off_at_most_and_the_same_in_slices() {
        let mut values: Vec<f32> = (-110_000..95_000).map(|k| k as f32 * 1.017e-3).collect();
        values.extend([0.0, -0.0, 1e-30, -1e-30, f32::INFINITY, f32::NEG_INFINITY, 1e30, -1e30, 88.72283, -103.97]);
        let mut slice = values.clone();
        exp_slice(&mut slice);
        for (&x, &got) in values.iter().zip(&slice) {
            assert_eq!(got.to_bits(), exp(x).to_bits(), "{x}");
            let wanted = f64::from(x).exp();
            // A unit of the last place of the result, at least that of subnormal numbers.
            let unit = (wanted * f64::from(f32::EPSILON)).max(f64::from(f32::from_bits(1)));
            let too_large = wanted > f64::from(f32::MAX);
            assert!(
                if too_large { got >= f32::MAX } else { (f64::from(got) - wanted).abs() <= 2.0 * unit },
                "{x}: {got}"
            );
        }
        assert!(exp(f32::NAN).is_nan());
        assert_eq!((exp(0.0), exp(f32::NEG_INFINITY), exp(f32::INFINITY)), (1.0, 0.0, f32::INFINITY));
    }

    #[test]
    fn rows_are_what_plain_loops_in_double_precision_give() {
        let mut r = Random::new(3);
        for n in [1, 2, 15, 16, 17, 65, 200] {
            let x: Vec<f32> = (0..n).map(|_| 3.0 * r.normal() as f32).collect();
            let mut out = vec![0.0; n];
            softmax(&x, &mut out);
            let total: f64 = x.iter().map(|&x| f64::from(x).exp()).sum();
            for (&x, &got) in x.iter().zip(&out) {
                let wanted = f64::from(x).exp() / total;
                // x − largest is rounded once, which eˣ magnifies by |x − largest| < 24; the rest is three units.
                assert!((f64::from(got) - wanted).abs() <= 28.0 * f64::from(f32::EPSILON) * wanted, "{got} {wanted}");
            }
            // The same row again, as a column among others.
            let columns = 19;
            let map: Vec<f32> = (0..n * columns).map(|k| x[k / columns] + 0.01 * (k % columns) as f32).collect();
            let mut beside = vec![0.0; map.len()];
            softmax_columns(&map, columns, &mut beside);
            for (k, &got) in beside.iter().enumerate() {
                let wanted = f64::from(out[k / columns]);
                assert!((f64::from(got) - wanted).abs() <= 60.0 * f64::from(f32::EPSILON) * wanted);
            }
            normalise(&x, 1e-5, &mut out);
            let mean = x.iter().map(|&x| f64::from(x)).sum::<f64>() / n as f64;
            let variance = x.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>() / n as f64;
            for (&x, &got) in x.iter().zip(&out) {
                let wanted = (f64::from(x) - mean) / (variance + f64::from(1e-5f32)).sqrt();
                assert!((f64::from(got) - wanted).abs() <= 1e-7 * (1.0 + wanted.abs()), "{got} {wanted}");
            }
        }
    }
}
