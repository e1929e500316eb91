//! Bounds for activations and maxima: φ between two lines over an interval, a maximum between two of its values.

use crate::layout::Activation;

/// lower·z + below ≤ φ(z) ≤ upper·z + above for every z of the interval; slopes are not negative.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Lines {
    pub(super) lower: f32,
    pub(super) upper: f32,
    pub(super) below: f64,
    pub(super) above: f64,
}

impl Lines {
    /// The lines over [low, high]; exact where φ is linear there.
    pub(super) fn over(activation: Activation, low: f64, high: f64) -> Self {
        let slope = match activation {
            Activation::Identity => return Self::straight(1.0),
            Activation::Relu => 0.0,
            Activation::LeakyRelu { slope } if (0.0..=1.0).contains(&slope) => slope,
            Activation::Tanh | Activation::Sigmoid => return Self::parallel(activation, low, high),
            // Any other non-decreasing activation: its values at the two ends.
            _ => {
                let (from, to) = image(activation, low, high);
                return Self { lower: 0.0, below: from, upper: 0.0, above: to };
            }
        };
        if low >= 0.0 {
            return Self::straight(1.0);
        }
        if high <= 0.0 {
            return Self::straight(slope);
        }
        // Above, the chord; below, the branch that leaves the smaller triangle. The offset belongs to the rounded
        // slope.
        let bent = f64::from(slope);
        let upper = (((high - bent * low) / (high - low)) as f32).clamp(slope, 1.0);
        let above = (bent * low - f64::from(upper) * low).max(high - f64::from(upper) * high);
        let lower = if high > -low { 1.0 } else { slope };
        Self { lower, below: 0.0, upper, above: above + 8.0 * f64::EPSILON * (high - low) }
    }

    fn straight(slope: f32) -> Self {
        Self { lower: slope, below: 0.0, upper: slope, above: 0.0 }
    }

    /// φ′ falls with |z|, so it is smallest at an end; a line of that slope through either end stays on one side.
    fn parallel(activation: Activation, low: f64, high: f64) -> Self {
        let derivative = |z: f64| match activation {
            Activation::Tanh => 1.0 - z.tanh() * z.tanh(),
            _ => {
                let s = 1.0 / (1.0 + (-z).exp());
                s * (1.0 - s)
            }
        };
        // The slope is a little less than the derivative, so that rounding does not make the lines cross φ.
        let slope = ((derivative(low).min(derivative(high)) - 1e-14).max(0.0) * (1.0 - 1e-7)) as f32;
        let steep = f64::from(slope);
        let (from, to) = image(activation, low, high);
        let allowance = 4.0 * f64::EPSILON * (1.0 + low.abs() + high.abs());
        Self { lower: slope, below: from - steep * low - allowance, upper: slope, above: to - steep * high + allowance }
    }

    /// Whether φ is one line over the interval.
    pub(super) fn exact(&self) -> bool {
        self.lower == self.upper && self.below == self.above
    }

    /// The slopes that the line below an unstable unit may have, where they are free.
    pub(super) fn free_slopes(activation: Activation, low: f64, high: f64) -> Option<(f32, f32)> {
        let smallest = match activation {
            Activation::Relu => 0.0,
            Activation::LeakyRelu { slope } if (0.0..=1.0).contains(&slope) => slope,
            _ => return None,
        };
        (low < 0.0 && high > 0.0).then_some((smallest, 1.0))
    }
}

/// Bounds of a maximum of values with known intervals: from below by one of the values, from above by a line of
/// another.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Largest {
    /// The value with the largest lower end.
    pub(super) below: u32,
    /// The value with the largest upper end.
    pub(super) above: u32,
    /// max ≤ slope·value + offset.
    pub(super) slope: f32,
    pub(super) offset: f64,
}

impl Largest {
    /// The bounds for the values of a window.
    pub(super) fn of(window: &[u32], low: &[f64], high: &[f64]) -> Self {
        let best = |ends: &[f64]| {
            window.iter().copied().fold(None, |best: Option<u32>, k| match best {
                Some(b) if ends[b as usize] >= ends[k as usize] => Some(b),
                _ => Some(k),
            })
        };
        let (Some(below), Some(above)) = (best(low), best(high)) else { return Self::default() };
        let others =
            window.iter().filter(|k| **k != above).map(|k| high[*k as usize]).fold(f64::NEG_INFINITY, f64::max);
        let (l, u) = (low[above as usize], high[above as usize]);
        if l >= others {
            return Self { below, above, slope: 1.0, offset: 0.0 };
        }
        // The chord of max(value, others).
        let slope = (((u - others) / (u - l)) as f32).clamp(0.0, 1.0);
        let steep = f64::from(slope);
        let offset = (others - steep * l).max(u - steep * u);
        Self { below, above, slope, offset: offset + 8.0 * f64::EPSILON * (u.abs() + l.abs()) }
    }
}

/// The image of an interval under φ, rounded outwards.
pub(super) fn image(activation: Activation, low: f64, high: f64) -> (f64, f64) {
    let (a, b) = (activation.apply_f64(low), activation.apply_f64(high));
    match activation {
        Activation::Relu | Activation::Identity => (a, b),
        _ => (a - 8.0 * f64::EPSILON * (1.0 + a.abs()), b + 8.0 * f64::EPSILON * (1.0 + b.abs())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    #[test]
    fn every_activation_lies_between_its_lines() {
        let mut random = Random::new(5);
        let kinds = [
            Activation::Relu,
            Activation::Identity,
            Activation::leaky_relu(0.1).unwrap(),
            Activation::Tanh,
            Activation::Sigmoid,
            Activation::Softplus,
            Activation::Clip { low: 0.0, high: 6.0 },
            Activation::Elu { alpha: 0.5 },
        ];
        let mut bent = 0;
        for round in 0..4000 {
            let activation = kinds[round % kinds.len()];
            let size = 10f64.powf(3.0 * random.uniform() - 2.0);
            let (a, b) = (size * random.normal(), size * random.normal());
            let (low, high) = (a.min(b), a.max(b));
            let lines = Lines::over(activation, low, high);
            assert!((0.0..=1.0).contains(&lines.lower) && (0.0..=1.0).contains(&lines.upper), "{lines:?}");
            let (lower, upper) = (f64::from(lines.lower), f64::from(lines.upper));
            bent += usize::from(!lines.exact());
            for k in 0..=64 {
                let z = low + (high - low) * f64::from(k) / 64.0;
                let x = activation.apply_f64(z);
                let tiny = 1e-15 * (1.0 + z.abs());
                assert!(lower * z + lines.below <= x + tiny, "{activation:?} {low} {high} {z}");
                assert!(upper * z + lines.above >= x - tiny, "{activation:?} {low} {high} {z}");
            }
        }
        assert!(bent > 1000);
    }

    #[test]
    fn a_maximum_lies_between_its_value_and_its_line() {
        let mut random = Random::new(6);
        for _ in 0..500 {
            let count = 2 + random.below(5);
            let ends: Vec<(f64, f64)> = (0..count)
                .map(|_| {
                    let (a, b) = (random.normal(), random.normal());
                    (a.min(b), a.max(b))
                })
                .collect();
            let (low, high): (Vec<f64>, Vec<f64>) = ends.iter().copied().unzip();
            let window: Vec<u32> = (0..count as u32).collect();
            let found = Largest::of(&window, &low, &high);
            for _ in 0..50 {
                let x: Vec<f64> = ends.iter().map(|(l, h)| l + (h - l) * random.uniform()).collect();
                let largest = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                assert!(x[found.below as usize] <= largest);
                assert!(f64::from(found.slope) * x[found.above as usize] + found.offset >= largest - 1e-12);
            }
        }
    }
}
