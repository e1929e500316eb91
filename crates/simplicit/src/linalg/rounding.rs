//! Rounding that keeps bounds valid.

/// The float32 nearest to `value` among those that are no larger in magnitude, so that a bound on a sum of magnitudes
/// still holds afterwards. NaN stays NaN.
pub fn toward_zero(value: f64) -> f32 {
    let nearest = value as f32;
    if f64::from(nearest).abs() > value.abs() {
        // One unit in the last place down; from infinity to the largest finite number.
        f32::from_bits(nearest.to_bits() - 1)
    } else {
        nearest
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    #[test]
    fn never_larger_and_never_further_than_one_step() {
        let mut r = Random::new(4);
        let mut cut = 0;
        for k in 0..20_000 {
            let value = r.normal() * 10f64.powi(k % 60 - 45);
            let rounded = toward_zero(value);
            assert!(f64::from(rounded).abs() <= value.abs(), "{value}");
            assert!(rounded == 0.0 || rounded.is_sign_negative() == value.is_sign_negative());
            let next = f32::from_bits(rounded.to_bits() + 1);
            assert!(f64::from(next).abs() > value.abs(), "{value}: {next} is nearer");
            cut += usize::from(rounded != value as f32);
        }
        // Rounding to nearest goes up half of the time.
        assert!((8_000..12_000).contains(&cut), "{cut}");
    }

    #[test]
    fn ends_of_the_range() {
        assert_eq!(toward_zero(0.0).to_bits(), 0);
        assert_eq!(toward_zero(-0.0).to_bits(), (-0.0f32).to_bits());
        assert_eq!(toward_zero(1e300), f32::MAX);
        assert_eq!(toward_zero(-1e300), -f32::MAX);
        assert_eq!(toward_zero(1e-300), 0.0);
        assert_eq!(toward_zero(0.5), 0.5);
        assert!(toward_zero(f64::NAN).is_nan());
    }
}
