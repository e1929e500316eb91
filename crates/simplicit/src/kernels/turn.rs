//! Transposes samples to lanes in squares of 16 × 16, if there is AVX-512.

/// `out[j·lanes + s] = samples[s·stride + j]` for `squares`·16 samples and `across`·16 features; returns whether they
/// are all finite. Without AVX-512 it returns `None` and writes nothing.
///
/// # Panics
/// If a slice is too short; sizes come from the caller's own arithmetic, never from data.
pub fn turn_squares(
    out: &mut [f32],
    lanes: usize,
    samples: &[f32],
    stride: usize,
    [squares, across]: [usize; 2],
) -> Option<bool> {
    if squares == 0 || across == 0 || !super::Instructions::available().contains(&super::Instructions::Avx512) {
        return None;
    }
    assert!(16 * squares <= lanes && 16 * across * lanes <= out.len());
    assert!((16 * squares - 1) * stride + 16 * across <= samples.len());
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the instructions were found, and the assertions bound every address.
    unsafe {
        Some(x86::squares(out.as_mut_ptr(), lanes, samples.as_ptr(), stride, [squares, across]))
    }
    #[cfg(not(target_arch = "x86_64"))]
    None
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    /// # Safety
    /// Pointers are valid for all squares, as [`super::turn_squares`] checks.
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn squares(
        out: *mut f32,
        lanes: usize,
        samples: *const f32,
        stride: usize,
        [squares, across]: [usize; 2],
    ) -> bool {
        // Sums of zero times every number: NaN if some number is not finite.
        let zero = _mm512_setzero_ps();
        let mut seen = [zero; 4];
        // All samples of sixteen features come before the next sixteen, so that writes are contiguous.
        for j in 0..across {
            for i in 0..squares {
                for side in 0..4 {
                    // SAFETY: the caller's pointers.
                    unsafe {
                        let from = samples.add(16 * i * stride + 16 * j + 4 * side);
                        // Samples k, k+4, k+8 and k+12 side by side, four features each: these loads replace
                        // shuffles.
                        let four = |k: usize| {
                            let at = |s: usize| _mm_loadu_ps(from.add(s * stride));
                            let four = _mm512_castps128_ps512(at(k));
                            let four = _mm512_insertf32x4::<1>(four, at(k + 4));
                            let four = _mm512_insertf32x4::<2>(four, at(k + 8));
                            _mm512_insertf32x4::<3>(four, at(k + 12))
                        };
                        let (r0, r1, r2, r3) = (four(0), four(1), four(2), four(3));
                        for (seen, r) in seen.iter_mut().zip([r0, r1, r2, r3]) {
                            *seen = _mm512_fmadd_ps(r, zero, *seen);
                        }
                        let (t0, t1) = (_mm512_unpacklo_ps(r0, r1), _mm512_unpackhi_ps(r0, r1));
                        let (t2, t3) = (_mm512_unpacklo_ps(r2, r3), _mm512_unpackhi_ps(r2, r3));
                        let turned = [
                            _mm512_shuffle_ps::<0x44>(t0, t2),
                            _mm512_shuffle_ps::<0xee>(t0, t2),
                            _mm512_shuffle_ps::<0x44>(t1, t3),
                            _mm512_shuffle_ps::<0xee>(t1, t3),
                        ];
                        let to = out.add((16 * j + 4 * side) * lanes + 16 * i);
                        for (k, v) in turned.into_iter().enumerate() {
                            _mm512_storeu_ps(to.add(k * lanes), v);
                        }
                    }
                }
            }
        }
        let mut numbers = [[0.0f32; 16]; 4];
        for (numbers, seen) in numbers.iter_mut().zip(seen) {
            // SAFETY: sixteen numbers are a vector.
            unsafe { _mm512_storeu_ps(numbers.as_mut_ptr(), seen) };
        }
        numbers.iter().flatten().all(|v| *v == 0.0)
    }
}
