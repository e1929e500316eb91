//! φ between two lines over an interval.

use super::interval::image;
use crate::layout::Activation;

/// lower·z + below ≤ φ(z) ≤ upper·z + above for every z of the interval; slopes are in [0, 1].
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Lines {
    pub(super) lower: f64,
    pub(super) below: f64,
    pub(super) upper: f64,
    pub(super) above: f64,
}

impl Lines {
    /// Over [low, high]; exact where φ is linear there.
    pub(super) fn over(activation: Activation, low: f64, high: f64) -> Self {
        let bent = match activation {
            Activation::Identity => None,
            Activation::Relu => Some(0.0),
            Activation::LeakyRelu { slope } => Some(f64::from(slope)),
            Activation::Tanh | Activation::Sigmoid => return Self::parallel(activation, low, high),
            // Any other that does not decrease: its values at the two ends.
            _ => {
                let (from, to) = image(activation, low, high);
                return Self { lower: 0.0, below: from, upper: 0.0, above: to };
            }
        };
        let straight = |slope: f64| Self { lower: slope, below: 0.0, upper: slope, above: 0.0 };
        let Some(slope) = bent else { return straight(1.0) };
        if low >= 0.0 {
            return straight(1.0);
        }
        if high <= 0.0 {
            return straight(slope);
        }
        // The chord above; below the branch that leaves the smaller triangle.
        let upper = (high - slope * low) / (high - low);
        let above = (slope - upper) * low + 8.0 * f64::EPSILON * (high - low);
        let lower = if high > -low { 1.0 } else { slope };
        Self { lower, below: 0.0, upper: upper.min(1.0), above: above + (upper - 1.0).max(0.0) * high }
    }

    /// φ′ falls with |z|, so it is smallest at an end; a line of that slope through either end stays on one side.
    fn parallel(activation: Activation, low: f64, high: f64) -> Self {
        let slope = |z: f64| match activation {
            Activation::Tanh => 1.0 - z.tanh() * z.tanh(),
            _ => {
                let s = 1.0 / (1.0 + (-z).exp());
                s * (1.0 - s)
            }
        };
        // A little less than the derivative: its own rounding must not make the lines cross φ.
        let slope = (slope(low).min(slope(high)) - 1e-14).max(0.0);
        let (from, to) = image(activation, low, high);
        let room = 4.0 * f64::EPSILON * (1.0 + low.abs() + high.abs());
        Self { lower: slope, below: from - slope * low - room, upper: slope, above: to - slope * high + room }
    }

    /// Whether φ is one line over the interval.
    pub(super) fn exact(&self) -> bool {
        self.lower == self.upper && self.below == self.above
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
            bent += usize::from(!lines.exact());
            for k in 0..=64 {
                let z = low + (high - low) * f64::from(k) / 64.0;
                let x = activation.apply_f64(z);
                let tiny = 1e-15 * (1.0 + z.abs());
                assert!(lines.lower * z + lines.below <= x + tiny, "{activation:?} {low} {high} {z}");
                assert!(lines.upper * z + lines.above >= x - tiny, "{activation:?} {low} {high} {z}");
            }
        }
        assert!(bent > 1000);
    }
}
