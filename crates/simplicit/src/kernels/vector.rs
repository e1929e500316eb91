//! Vectors of numbers: one trait, one implementation per set of instructions.

/// A few numbers in a register.
///
/// # Safety
/// The functions need the instructions of the implementing type, and pointers that are valid for `LEN` numbers (or for
/// `count`). They are only called from functions that enable those instructions.
pub(super) trait Vector: Copy {
    const LEN: usize;
    /// Number of running sums that fit into registers together with operands.
    const SUMS: usize;

    unsafe fn splat(value: f32) -> Self;
    unsafe fn load(from: *const f32) -> Self;
    unsafe fn store(self, to: *mut f32);
    /// The first `count` numbers, followed by zeros; no other numbers are read.
    unsafe fn load_some(from: *const f32, count: usize) -> Self;
    unsafe fn store_some(self, to: *mut f32, count: usize);
    /// `a · b + self`.
    unsafe fn multiply_add(self, a: Self, b: Self) -> Self;
    unsafe fn add(self, other: Self) -> Self;
    /// x where x > 0, else 0; a NaN gives 0.
    unsafe fn relu(self) -> Self;
}

/// The portable vector: eight numbers that the compiler may keep in narrower registers.
#[derive(Clone, Copy)]
pub(super) struct Portable([f32; 8]);

impl Vector for Portable {
    const LEN: usize = 8;
    const SUMS: usize = 8;

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        Self([value; 8])
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller's pointer is valid for LEN numbers.
        Self(unsafe { from.cast::<[f32; 8]>().read_unaligned() })
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the caller's pointer is valid for LEN numbers.
        unsafe { to.cast::<[f32; 8]>().write_unaligned(self.0) }
    }
    #[inline(always)]
    unsafe fn load_some(from: *const f32, count: usize) -> Self {
        let mut out = [0.0; 8];
        for (k, out) in out.iter_mut().enumerate().take(count) {
            // SAFETY: the caller's pointer is valid for `count` numbers.
            *out = unsafe { *from.add(k) };
        }
        Self(out)
    }
    #[inline(always)]
    unsafe fn store_some(self, to: *mut f32, count: usize) {
        for (k, v) in self.0.iter().enumerate().take(count) {
            // SAFETY: the caller's pointer is valid for `count` numbers.
            unsafe { *to.add(k) = *v }
        }
    }
    #[inline(always)]
    unsafe fn multiply_add(self, a: Self, b: Self) -> Self {
        let mut out = self.0;
        for k in 0..8 {
            // Old x86 has no fused instruction, and a function call per number would be far slower.
            out[k] = if cfg!(any(target_feature = "fma", target_arch = "aarch64")) {
                a.0[k].mul_add(b.0[k], out[k])
            } else {
                a.0[k] * b.0[k] + out[k]
            };
        }
        Self(out)
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        let mut out = self.0;
        for k in 0..8 {
            out[k] += other.0[k];
        }
        Self(out)
    }
    #[inline(always)]
    unsafe fn relu(self) -> Self {
        Self(self.0.map(|v| if v > 0.0 { v } else { 0.0 }))
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::Vector;
    use std::arch::x86_64::*;

    /// Ones followed by zeros: a mask is eight consecutive numbers of it.
    const MASK: [i32; 16] = [-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0];

    // SAFETY, for every block in this module: callers enable the instructions and give valid pointers, see `Vector`.

    /// A vector of one register type; its masks are those that the instructions for incomplete vectors take.
    macro_rules! vector {
        (
            $(#[$doc:meta])* $name:ident($register:ty), $length:literal numbers, $sums:literal sums,
            $set:ident $load:ident $store:ident $multiply_add:ident $add:ident $max:ident $zero:ident,
            |$from:ident, $into:ident, $value:ident, $mask:ident| $mask_of:expr, $load_some:expr, $store_some:expr
        ) => {
            $(#[$doc])*
            #[derive(Clone, Copy)]
            pub(in super::super) struct $name(pub(in super::super) $register);

            impl Vector for $name {
                const LEN: usize = $length;
                const SUMS: usize = $sums;

                #[inline(always)]
                unsafe fn splat(value: f32) -> Self {
                    // SAFETY: see the module.
                    Self(unsafe { $set(value) })
                }
                #[inline(always)]
                unsafe fn load(from: *const f32) -> Self {
                    // SAFETY: see the module.
                    Self(unsafe { $load(from) })
                }
                #[inline(always)]
                unsafe fn store(self, to: *mut f32) {
                    // SAFETY: see the module.
                    unsafe { $store(to, self.0) }
                }
                #[inline(always)]
                unsafe fn load_some($from: *const f32, count: usize) -> Self {
                    let count = count.min($length);
                    // SAFETY: see the module; the mask covers `count` numbers.
                    unsafe {
                        let $mask = ($mask_of)(count);
                        Self($load_some)
                    }
                }
                #[inline(always)]
                unsafe fn store_some(self, $into: *mut f32, count: usize) {
                    let ($value, count) = (self.0, count.min($length));
                    // SAFETY: see the module; the mask covers `count` numbers.
                    unsafe {
                        let $mask = ($mask_of)(count);
                        $store_some;
                    }
                }
                #[inline(always)]
                unsafe fn multiply_add(self, a: Self, b: Self) -> Self {
                    // SAFETY: see the module.
                    Self(unsafe { $multiply_add(a.0, b.0, self.0) })
                }
                #[inline(always)]
                unsafe fn add(self, other: Self) -> Self {
                    // SAFETY: see the module.
                    Self(unsafe { $add(self.0, other.0) })
                }
                #[inline(always)]
                unsafe fn relu(self) -> Self {
                    // If one operand is a NaN, the result is the second operand. SAFETY: see the module.
                    Self(unsafe { $max(self.0, $zero()) })
                }
            }
        };
    }

    /// The mask of AVX2, which is a whole register.
    #[inline(always)]
    unsafe fn wide_mask(count: usize) -> __m256i {
        // SAFETY: `count` is at most 8, so the mask lies inside its table.
        unsafe { _mm256_loadu_si256(MASK.as_ptr().add(8 - count.min(8)).cast()) }
    }

    vector! {
        /// AVX2: 16 registers of 8.
        Avx2(__m256), 8 numbers, 8 sums,
        _mm256_set1_ps _mm256_loadu_ps _mm256_storeu_ps _mm256_fmadd_ps _mm256_add_ps _mm256_max_ps _mm256_setzero_ps,
        |from, to, value, mask| wide_mask,
        _mm256_maskload_ps(from, mask),
        _mm256_maskstore_ps(to, mask, value)
    }

    vector! {
        /// AVX-512: 32 registers of 16.
        Avx512(__m512), 16 numbers, 16 sums,
        _mm512_set1_ps _mm512_loadu_ps _mm512_storeu_ps _mm512_fmadd_ps _mm512_add_ps _mm512_max_ps _mm512_setzero_ps,
        |from, to, value, mask| |count: usize| ((1u32 << count) - 1) as u16,
        _mm512_maskz_loadu_ps(mask, from),
        _mm512_mask_storeu_ps(to, mask, value)
    }

    vector! {
        /// Vectors of 8 with AVX-512's 32 registers, for operands that lie across cache lines: two loads of 32 bytes
        /// straddle a line once, two of 64 bytes nearly always twice.
        Half(__m256), 8 numbers, 16 sums,
        _mm256_set1_ps _mm256_loadu_ps _mm256_storeu_ps _mm256_fmadd_ps _mm256_add_ps _mm256_max_ps _mm256_setzero_ps,
        |from, to, value, mask| |count: usize| ((1u32 << count) - 1) as u8,
        _mm256_maskz_loadu_ps(mask, from),
        _mm256_mask_storeu_ps(to, mask, value)
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) use x86::{Avx2, Avx512, Half};
