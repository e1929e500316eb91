//! The error function, accurate to the rounding of double precision.
//!
//! Two rational functions, interpolated at Chebyshev nodes with 60 digits: erf(x)/x in x² for |x| ≤ 2 (relative error
//! 5·10⁻¹⁸ before rounding), and x·e^(x²)·erfc(x) in 1/x² beyond (2·10⁻¹⁷ up to x = 6.1, where erf is 1 to double
//! precision). All coefficients are positive, so that no sum cancels.

const NEAR_ABOVE: [f64; 8] = [
    std::f64::consts::FRAC_2_SQRT_PI,
    0.17683205341510852,
    0.05429603535083517,
    0.0038549212119496435,
    0.0004358056531523704,
    1.4590351976536654e-05,
    6.332848039177744e-07,
    2.4381842338773487e-09,
];
const NEAR_BELOW: [f64; 8] = [
    1.0,
    0.4900466603529034,
    0.11146749525753495,
    0.01537702450035901,
    0.0014032960092594559,
    8.58224512632846e-05,
    3.315390693111841e-06,
    6.410212217353076e-08,
];
const FAR_ABOVE: [f64; 8] = [
    0.5641895835471948,
    14.60173171710501,
    135.0820238381015,
    559.6013990391788,
    1064.6960071288222,
    852.8320970497871,
    223.06243495672834,
    8.133343072323694,
];
const FAR_BELOW: [f64; 8] = [
    1.0,
    26.380895611652615,
    251.86710116820478,
    1099.8905321469495,
    2291.071221634036,
    2160.878471498286,
    783.621062738064,
    70.70357900760523,
];

#[inline(always)]
fn polynomial(coefficients: &[f64; 8], at: f64) -> f64 {
    coefficients.iter().rev().fold(0.0, |sum, c| sum * at + c)
}

/// erfc(x) for x > 2.
#[inline(always)]
fn far(x: f64) -> f64 {
    let u = 1.0 / (x * x);
    exp_negative(-x * x) / x * (polynomial(&FAR_ABOVE, u) / polynomial(&FAR_BELOW, u))
}

/// 0!, …, 13!.
const FACTORIALS: [f64; 14] = {
    let mut all = [1.0; 14];
    let mut k = 1;
    while k < all.len() {
        all[k] = all[k - 1] * k as f64;
        k += 1;
    }
    all
};

/// eˣ for x ≤ 0 within a few units of the last place, without a branch: a loop over it runs several numbers at a time.
#[inline(always)]
fn exp_negative(x: f64) -> f64 {
    // Below this the result is 0; down to here the powers of two below are representable.
    let x = if x < -746.0 { -746.0 } else { x };
    // x = n·ln 2 + r: adding 1.5·2⁵² rounds to the nearest whole number; ln 2 in two parts, n times the first is exact.
    const MAGIC: f64 = 6_755_399_441_055_744.0;
    let shifted = x * std::f64::consts::LOG2_E + MAGIC;
    let n = shifted - MAGIC;
    let r = (x - n * 6.931_471_803_691_238e-1) - n * 1.908_214_929_270_587_7e-10;
    // Taylor's series for |r| ≤ ln 2 / 2: the next term is below 2⁻⁵⁷.
    let sum = FACTORIALS.iter().rev().fold(0.0, |sum, factorial| sum * r + 1.0 / factorial);
    let n = shifted.to_bits().wrapping_sub(MAGIC.to_bits()) as i64;
    let half = n >> 1;
    let power = |n: i64| f64::from_bits(((n + 1023) as u64) << 52);
    sum * power(half) * power(n - half)
}

/// erf x.
#[inline]
pub(crate) fn erf(x: f64) -> f64 {
    if x.abs() <= 2.0 {
        let s = x * x;
        x * (polynomial(&NEAR_ABOVE, s) / polynomial(&NEAR_BELOW, s))
    } else if x.is_nan() {
        x
    } else {
        (1.0 - far(x.abs())).copysign(x)
    }
}

/// erf of every number, several at a time; one by one only if one of them is far from zero. Both give the same bits.
pub(crate) fn erf_slice(x: &[f32], out: &mut [f32]) {
    const WIDTH: usize = 16;
    let (chunks, rest) = x.as_chunks::<WIDTH>();
    let (results, last) = out.as_chunks_mut::<WIDTH>();
    crate::linalg::vectorised(
        #[inline(always)]
        || {
            for (chunk, result) in chunks.iter().zip(results) {
                let mut near = true;
                for (out, &x) in result.iter_mut().zip(chunk) {
                    let x = f64::from(x);
                    let s = x * x;
                    *out = (x * (polynomial(&NEAR_ABOVE, s) / polynomial(&NEAR_BELOW, s))) as f32;
                    near &= x.abs() <= 2.0;
                }
                if !near {
                    *result = chunk.map(|x| erf(f64::from(x)) as f32);
                }
            }
        },
    );
    last.iter_mut().zip(rest).for_each(|(out, &x)| *out = erf(f64::from(x)) as f32);
}

/// Φ(x), the standard normal distribution function, with a small relative error on its left tail too.
#[inline]
pub(crate) fn normal_cdf(x: f64) -> f64 {
    let t = x * std::f64::consts::FRAC_1_SQRT_2;
    if t < -2.0 { 0.5 * far(-t) } else { 0.5 + 0.5 * erf(t) }
}

/// Φ(x) where |x| ≤ 2√2, the same bits as [`normal_cdf`] without a branch: a loop over it runs several numbers at a time.
/// The second value says whether x lies there.
#[inline(always)]
pub(crate) fn normal_cdf_near(x: f64) -> (f64, bool) {
    let t = x * std::f64::consts::FRAC_1_SQRT_2;
    let s = t * t;
    (0.5 + 0.5 * (t * (polynomial(&NEAR_ABOVE, s) / polynomial(&NEAR_BELOW, s))), t.abs() <= 2.0)
}

/// Φ(x) for any x, the same bits as [`normal_cdf`] without a branch.
#[inline(always)]
pub(crate) fn normal_cdf_anywhere(x: f64) -> f64 {
    let (near, is_near) = normal_cdf_near(x);
    let t = x * std::f64::consts::FRAC_1_SQRT_2;
    let tail = far(t.abs());
    let beyond = if t < 0.0 { 0.5 * tail } else { 0.5 + 0.5 * (1.0 - tail) };
    if is_near { near } else { beyond }
}

/// The density of the standard normal distribution.
#[inline]
pub(crate) fn normal_density(x: f64) -> f64 {
    (-0.5 * x * x).exp() * (0.5 * std::f64::consts::FRAC_2_SQRT_PI * std::f64::consts::FRAC_1_SQRT_2)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 2/√π·e^(−x²)·Σ 2ⁿx^(2n+1)/(2n+1)!!: no term is negative, so nothing cancels.
    fn series(x: f64) -> f64 {
        let (mut term, mut sum, mut n) = (x, 0.0, 0.0);
        while sum + term != sum {
            sum += term;
            n += 1.0;
            term *= 2.0 * x * x / (2.0 * n + 1.0);
        }
        std::f64::consts::FRAC_2_SQRT_PI * (-x * x).exp() * sum
    }

    #[test]
    fn agrees_with_the_series_on_a_table() {
        for k in 0..=6500 {
            let x = f64::from(k) * 1e-3;
            let expected = series(x).min(1.0);
            // e^(−x²) has an error of x² roundings, the sum of a few.
            let tolerance = (8.0 + 2.0 * x * x) * f64::EPSILON;
            assert!((erf(x) - expected).abs() <= tolerance * expected, "erf {x}: {} and {expected}", erf(x));
            assert_eq!(erf(-x), -erf(x));
            // So it rounds to the nearest f32, or to its neighbour where the two lie on either side of a tie.
            let (single, nearest) = (erf(x) as f32, expected as f32);
            assert!(single == nearest || single == nearest.next_up() || single == nearest.next_down());
        }
        assert_eq!((erf(40.0), erf(f64::NEG_INFINITY)), (1.0, -1.0));
        assert!(erf(f64::NAN).is_nan());
        let x: Vec<f32> =
            (0..500).map(|k| if k < 300 { k as f32 * 1e-2 - 1.5 } else { k as f32 * 0.03 - 12.0 }).collect();
        let mut out = vec![0.0; x.len()];
        erf_slice(&x, &mut out);
        assert!(x.iter().zip(&out).all(|(&x, &got)| got.to_bits() == (erf(f64::from(x)) as f32).to_bits()));
    }

    #[test]
    fn negative_exponentials_are_exact_to_a_few_units() {
        for k in 0..76_000 {
            let x = f64::from(k) * -0.01 - 1e-9;
            let (got, wanted) = (exp_negative(x), x.exp());
            assert!((got - wanted).abs() <= 4.0 * f64::EPSILON * wanted + f64::from_bits(1), "{x}: {got} {wanted}");
        }
        assert_eq!((exp_negative(0.0), exp_negative(f64::NEG_INFINITY)), (1.0, 0.0));
        assert!(exp_negative(f64::NAN).is_nan());
    }

    #[test]
    fn without_branches_the_distribution_function_has_the_same_bits() {
        for k in -9000..9000 {
            let x = f64::from(k) * 0.0047;
            assert_eq!(normal_cdf(x).to_bits(), normal_cdf_anywhere(x).to_bits(), "{x}");
        }
        for x in [f64::INFINITY, f64::NEG_INFINITY, 1e300, -1e300] {
            assert_eq!(normal_cdf(x), normal_cdf_anywhere(x), "{x}");
        }
        assert!(normal_cdf_anywhere(f64::NAN).is_nan());
    }

    /// Known values of the tail, and rises that are the area under the density by Simpson's rule.
    #[test]
    fn the_distribution_function_keeps_its_left_tail() {
        // From tables with more digits than are needed here.
        for (x, expected) in
            [(-3.0, 1.3498980316300945e-3), (-5.0, 2.866515718791939e-7), (-8.0, 6.220960574271785e-16)]
        {
            assert!((normal_cdf(x) / expected - 1.0).abs() < 1e-13, "{x}: {}", normal_cdf(x));
        }
        for k in -80..80 {
            let (x, h) = (f64::from(k) * 0.1, 0.05);
            let area = h / 3.0 * (normal_density(x) + 4.0 * normal_density(x + h) + normal_density(x + 2.0 * h));
            let rise = normal_cdf(x + 2.0 * h) - normal_cdf(x);
            // Simpson's rule is off by h⁵/90·φ⁗, and φ⁗ ≤ (x⁴ + 6x² + 3)φ with φ at most e^(0.1|x| + 0.005) times larger in between.
            let most = (0.1 * x.abs() + 0.1).exp() * normal_density(x);
            let tolerance = h.powi(5) / 90.0 * ((x.abs() + 0.1).powi(4) + 6.0 * (x.abs() + 0.1).powi(2) + 3.0) * most;
            assert!((rise - area).abs() <= tolerance + 4.0 * f64::EPSILON, "{x}: {rise} and {area}");
        }
        assert_eq!((normal_cdf(40.0), normal_cdf(-40.0)), (1.0, 0.0));
    }
}
