//! Samples side by side: feature-major blocks in which one feature of `lanes` samples fills a few vector registers.

pub(crate) use crate::kernels::Aligned;
use crate::kernels::turn_squares;

/// The most samples that run side by side; the number is a power of two from 8 to 64.
pub(crate) const MAX_LANES: usize = 64;

/// Raises `largest` (one number per lane) to the largest magnitude of `rows`, features × lanes. A NaN counts as larger
/// than infinity and stays.
pub(crate) fn largest_magnitudes(largest: &mut [f32], rows: &[f32]) {
    if largest.len().is_power_of_two() && (8..=MAX_LANES).contains(&largest.len()) {
        return pulp::Arch::new().dispatch(Largest { largest, rows });
    }
    for row in rows.chunks_exact(largest.len().max(1)) {
        for (largest, v) in largest.iter_mut().zip(row) {
            if v.abs().to_bits() > largest.to_bits() {
                *largest = v.abs();
            }
        }
    }
}

struct Largest<'a> {
    largest: &'a mut [f32],
    rows: &'a [f32],
}

impl Largest<'_> {
    #[inline(always)]
    fn run<S: pulp::Simd, const V: usize>(self, simd: S) {
        // Without their sign, floats have the order of their bits, with infinity and NaN at the top.
        let unsigned = simd.splat_u32s(0x7fff_ffff);
        let mut found = [simd.splat_u32s(0); V];
        for row in S::as_simd_f32s(self.rows).0.as_chunks::<V>().0 {
            for v in 0..V {
                found[v] = simd.max_u32s(found[v], simd.and_u32s(pulp::cast(row[v]), unsigned));
            }
        }
        for (largest, found) in S::as_mut_simd_f32s(self.largest).0.iter_mut().zip(found) {
            *largest = pulp::cast(simd.max_u32s(found, simd.and_u32s(pulp::cast(*largest), unsigned)));
        }
    }
}

impl pulp::WithSimd for Largest<'_> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: pulp::Simd>(self, simd: S) {
        match self.largest.len() / S::F32_LANES {
            1 => self.run::<S, 1>(simd),
            2 => self.run::<S, 2>(simd),
            4 => self.run::<S, 4>(simd),
            8 => self.run::<S, 8>(simd),
            16 => self.run::<S, 16>(simd),
            32 => self.run::<S, 32>(simd),
            _ => self.run::<S, 64>(simd),
        }
    }
}

/// Samples to lanes: `out[j·lanes + s] = samples[s·stride + j]` for `count` samples and `features` features. Lanes
/// past `count` are left alone. Returns whether all of these are finite, because reading them again would take half
/// as long as moving them.
pub(crate) fn to_lanes(
    out: &mut [f32],
    samples: &[f32],
    stride: usize,
    count: usize,
    features: usize,
    lanes: usize,
) -> bool {
    assert!(count <= lanes && out.len() >= features * lanes);
    if count == 0 || features == 0 {
        return true;
    }
    // Whole squares of 16 × 16 or 8 × 8 are moved in registers, the rest entry by entry.
    let wide = count.is_multiple_of(16).then_some([count / 16, features / 16]);
    let wide = wide.and_then(|squares| turn_squares(out, lanes, samples, stride, squares));
    let (squares, across) = (count / 8, features / 8);
    let (mut finite, rows, columns) = match (wide, lanes) {
        (Some(finite), _) => (finite, count, features / 16 * 16),
        (_, 8) => (whole_squares::<8>(out, samples, stride, squares, across), 8 * squares, 8 * across),
        (_, 16) => (whole_squares::<16>(out, samples, stride, squares, across), 8 * squares, 8 * across),
        (_, 32) => (whole_squares::<32>(out, samples, stride, squares, across), 8 * squares, 8 * across),
        _ => (whole_squares::<MAX_LANES>(out, samples, stride, squares, across), 8 * squares, 8 * across),
    };
    for s in 0..count {
        for j in (if s < rows { columns } else { 0 })..features {
            let value = samples[s * stride + j];
            finite &= value.is_finite();
            out[j * lanes + s] = value;
        }
    }
    finite
}

/// Lanes to samples: `out[s·stride + j] = source[j·lanes + s]` for `count` samples and `features` features.
pub(crate) fn from_lanes(out: &mut [f32], stride: usize, source: &[f32], count: usize, features: usize, lanes: usize) {
    assert!(count <= lanes && source.len() >= features * lanes);
    // Eight features at a time, so that a sample's numbers are written side by side.
    let whole = features / 8 * 8;
    super::vectorised(
        #[inline(always)]
        || {
            for j in (0..whole).step_by(8) {
                let rows: [&[f32]; 8] = std::array::from_fn(|k| &source[(j + k) * lanes..][..count]);
                for s in 0..count {
                    out[s * stride + j..][..8].copy_from_slice(&rows.map(|row| row[s]));
                }
            }
        },
    );
    for j in whole..features {
        for (s, v) in source[j * lanes..j * lanes + count].iter().enumerate() {
            out[s * stride + j] = *v;
        }
    }
}

/// Moves `squares` × `across` squares of 8 samples × 8 features; returns whether they are finite.
#[cfg(target_arch = "x86_64")]
fn whole_squares<const L: usize>(
    out: &mut [f32],
    samples: &[f32],
    stride: usize,
    squares: usize,
    across: usize,
) -> bool {
    use pulp::x86::V3;
    use std::arch::x86_64::__m256;
    let Some(simd) = V3::try_new() else { return plain_squares::<L>(out, samples, stride, squares, across) };
    simd.vectorize(
        #[inline(always)]
        || {
            let avx = simd.avx;
            // Sums of zero times every number: NaN if some number is not finite.
            let zero = avx._mm256_setzero_ps();
            let mut seen = [zero; 4];
            let columns = out.as_chunks_mut::<L>().0.as_chunks_mut::<8>().0;
            let squares = squares.min(L / 8);
            // All samples are cut to the same number of squares.
            let rows: [&[[f32; 8]]; L] = std::array::from_fn(|s| match s < 8 * squares {
                true => &samples[s * stride..].as_chunks::<8>().0[..across],
                false => &[],
            });
            // All samples of eight features come before the next eight, so that writes are contiguous.
            for (j, columns) in columns.iter_mut().take(across).enumerate() {
                for (i, rows) in rows.as_chunks::<8>().0[..squares].iter().enumerate() {
                    // Samples k and k+4 side by side, four features at a time: these loads replace shuffles.
                    for side in 0..2 {
                        let half = |k: usize| -> __m256 {
                            let cut = |v: &[f32; 8]| [v[4 * side], v[4 * side + 1], v[4 * side + 2], v[4 * side + 3]];
                            let near = avx._mm256_castps128_ps256(pulp::cast(cut(&rows[k][j])));
                            avx._mm256_insertf128_ps::<1>(near, pulp::cast(cut(&rows[k + 4][j])))
                        };
                        let (r0, r1, r2, r3) = (half(0), half(1), half(2), half(3));
                        for (seen, r) in seen.iter_mut().zip([r0, r1, r2, r3]) {
                            *seen = simd.fma._mm256_fmadd_ps(r, zero, *seen);
                        }
                        let (t0, t1) = (avx._mm256_unpacklo_ps(r0, r1), avx._mm256_unpackhi_ps(r0, r1));
                        let (t2, t3) = (avx._mm256_unpacklo_ps(r2, r3), avx._mm256_unpackhi_ps(r2, r3));
                        let four = [
                            avx._mm256_shuffle_ps::<0x44>(t0, t2),
                            avx._mm256_shuffle_ps::<0xee>(t0, t2),
                            avx._mm256_shuffle_ps::<0x44>(t1, t3),
                            avx._mm256_shuffle_ps::<0xee>(t1, t3),
                        ];
                        for (k, v) in four.into_iter().enumerate() {
                            columns[4 * side + k].as_chunks_mut::<8>().0[i] = pulp::cast(v);
                        }
                    }
                }
            }
            seen.into_iter().all(|seen| pulp::cast::<_, [f32; 8]>(seen).iter().all(|v| *v == 0.0))
        },
    )
}

#[cfg(not(target_arch = "x86_64"))]
fn whole_squares<const L: usize>(
    out: &mut [f32],
    samples: &[f32],
    stride: usize,
    squares: usize,
    across: usize,
) -> bool {
    plain_squares::<L>(out, samples, stride, squares, across)
}

fn plain_squares<const L: usize>(
    out: &mut [f32],
    samples: &[f32],
    stride: usize,
    squares: usize,
    across: usize,
) -> bool {
    let mut finite = true;
    for s in (0..8 * squares).step_by(8) {
        for (j, column) in out.as_chunks_mut::<L>().0.iter_mut().take(8 * across).enumerate() {
            for r in s..s + 8 {
                column[r] = samples[r * stride + j];
                finite &= column[r].is_finite();
            }
        }
    }
    finite
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    #[test]
    fn magnitudes_keep_what_is_not_finite() {
        let mut r = Random::new(6);
        for lanes in [6, 8, 16, 32, 64] {
            let mut rows: Vec<f32> = (0..9 * lanes).map(|_| r.normal() as f32).collect();
            (rows[lanes + 3], rows[2 * lanes + 5]) = (f32::NAN, f32::NEG_INFINITY);
            let mut largest = vec![0.5; lanes];
            largest_magnitudes(&mut largest, &rows);
            for (s, found) in largest.iter().enumerate() {
                match s {
                    3 => assert!(found.is_nan()),
                    5 => assert_eq!(*found, f32::INFINITY),
                    _ => assert_eq!(*found, (0..9).map(|j| rows[j * lanes + s].abs()).fold(0.5, f32::max)),
                }
            }
        }
        let mut buffer = Aligned::<f64>::zeros(100);
        buffer[99] = 1.0;
        assert_eq!((buffer.len(), buffer.as_ptr().align_offset(64)), (100, 0));
    }

    #[test]
    fn transposes_move_every_entry_and_touch_no_other() {
        let mut r = Random::new(5);
        for (count, features, lanes) in [
            (1, 1, 8),
            (8, 8, 8),
            (13, 29, 16),
            (16, 35, 16),
            (32, 128, 32),
            (5, 17, 64),
            (48, 21, 64),
            (64, 40, 64),
            (0, 4, 8),
        ] {
            let stride = features + 3;
            let samples: Vec<f32> = (0..count * stride).map(|_| r.normal() as f32).collect();
            let mut out = vec![-1.0; features * lanes];
            assert!(to_lanes(&mut out, &samples, stride, count, features, lanes));
            for _ in 0..if count == 0 { 0 } else { 20 } {
                let mut bad = samples.clone();
                bad[r.below(count) * stride + r.below(features)] =
                    [f32::NAN, f32::INFINITY, -f32::INFINITY][r.below(3)];
                assert!(!to_lanes(&mut vec![0.0; features * lanes], &bad, stride, count, features, lanes));
            }
            let mut plain = out.clone();
            let squares = |out: &mut [f32]| match lanes {
                8 => plain_squares::<8>(out, &samples, stride, count / 8, features / 8),
                16 => plain_squares::<16>(out, &samples, stride, count / 8, features / 8),
                32 => plain_squares::<32>(out, &samples, stride, count / 8, features / 8),
                _ => plain_squares::<64>(out, &samples, stride, count / 8, features / 8),
            };
            assert!(squares(&mut plain));
            assert_eq!(plain, out);
            for j in 0..features {
                for s in 0..lanes {
                    let expected = if s < count { samples[s * stride + j] } else { -1.0 };
                    assert_eq!(out[j * lanes + s], expected);
                }
            }
            let mut back = vec![-2.0; count * stride];
            from_lanes(&mut back, stride, &out, count, features, lanes);
            for s in 0..count {
                assert_eq!(back[s * stride..s * stride + features], samples[s * stride..s * stride + features]);
                assert!(back[s * stride + features..(s + 1) * stride].iter().all(|v| *v == -2.0));
            }
        }
    }
}
