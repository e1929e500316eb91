//! Where a perturbed input may lie: a box around every sample, and with the Euclidean norm a ball that cuts it.

use super::Norm;
use crate::arrays::PerFeature;
use crate::linalg::Matrix;
use crate::random::Random;

/// The smallest and largest value that the attacker may give to one value u, in u's own units: at most ε away in
/// raw·scale units and inside [0, 1]. A value that is outside already may stay, and move towards it.
pub(crate) fn limits(u: f32, mean: f64, std: f64, epsilon: f64) -> (f64, f64) {
    let u = f64::from(u);
    let raw = u * std + mean;
    let (low, high) = ((raw - epsilon).max(0.0).min(raw), (raw + epsilon).min(1.0).max(raw));
    (((low - mean) / std).min(u), ((high - mean) / std).max(u))
}

/// A random stream of its own for every seed, sample and purpose.
pub(super) fn stream(seed: u64, sample: usize, purpose: u64) -> Random {
    let mut random = Random::new(seed ^ (sample as u64).wrapping_mul(0x2545_f491_4f6c_dd1d));
    Random::new(random.bits() ^ purpose.wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

const MASK: u64 = 1;

/// The boxes of a block of samples, in single precision and never outside the exact ones.
pub(super) struct Region {
    low: Matrix<f32>,
    high: Matrix<f32>,
    ball: Option<Ball>,
}

/// Some samples of a block with their boxes.
pub(super) struct Part {
    /// Positions of the samples within the block.
    pub(super) samples: Vec<usize>,
    pub(super) u: Matrix<f32>,
    pub(super) low: Matrix<f32>,
    pub(super) high: Matrix<f32>,
    pub(super) labels: Vec<u32>,
    pub(super) ball: Option<Ball>,
}

/// A ball in raw·scale units.
#[derive(Clone)]
pub(super) struct Ball {
    pub(super) radius: f64,
    /// For every value, the factor from its own units to raw·scale units.
    pub(super) std: Vec<f64>,
}

impl Part {
    /// Draws a point of the box of sample s into the ball around it. The box contains the sample, so a point that
    /// moves towards it stays inside the box.
    pub(super) fn draw_into_ball(&self, s: usize, x: &mut [f32]) {
        let Some(ball) = &self.ball else { return };
        let u = self.u.row(s);
        let length = |x: &[f32]| {
            let squares =
                x.iter().zip(u).zip(&ball.std).map(|((x, u), std)| ((f64::from(*x) - f64::from(*u)) * std).powi(2));
            squares.sum::<f64>().sqrt()
        };
        let long = length(x);
        if long <= ball.radius {
            return;
        }
        // A little less than the radius, so that rounding to single precision does not lead out of the ball again.
        let share = ball.radius / long * (1.0 - 1e-6);
        for (x, u) in x.iter_mut().zip(u) {
            *x = (f64::from(*u) + share * (f64::from(*x) - f64::from(*u))) as f32;
        }
        if length(x) > ball.radius {
            x.copy_from_slice(u);
        }
    }

    /// Moves a point of sample s by `size` (raw·scale units) along the gradient, all values together.
    pub(super) fn along(&self, s: usize, gradient: &[f32], size: f64, x: &mut [f32]) {
        let Some(ball) = &self.ball else { return };
        // By raw·scale values the gradient is that by the values over std; values that may not move are left out.
        let free = |k: usize| self.low[(s, k)] < self.high[(s, k)];
        let raw = |k: usize| if free(k) { f64::from(gradient[k]) / ball.std[k] } else { 0.0 };
        let length = (0..x.len()).map(|k| raw(k) * raw(k)).sum::<f64>().sqrt();
        if !(length > 0.0 && length.is_finite()) {
            return;
        }
        for (k, x) in x.iter_mut().enumerate() {
            let moved = f64::from(*x) + size * raw(k) / (length * ball.std[k]);
            *x = (moved as f32).clamp(self.low[(s, k)], self.high[(s, k)]);
        }
        self.draw_into_ball(s, x);
    }
}

impl Region {
    /// Boxes of size `epsilon` around the rows of `u`; only a random share `pixels` of the values of a sample may
    /// change.
    pub(super) fn of_block(
        u: &Matrix<f32>,
        per_feature: &PerFeature,
        (epsilon, norm): (f64, Norm),
        pixels: f64,
        seed: u64,
        first: usize,
    ) -> Self {
        let p = u.cols();
        let ball = (norm == Norm::L2).then(|| Ball { radius: epsilon, std: per_feature.std.clone() });
        let mut region = Self { low: u.clone(), high: u.clone(), ball };
        let count = ((pixels * p as f64).round() as usize).clamp(1, p.max(1));
        let all: Vec<usize> = (0..p).collect();
        for s in 0..u.rows() {
            let chosen = if count < p { stream(seed, first + s, MASK).choose(p, count) } else { all.clone() };
            let (low, high) = (region.low.row_mut(s), region.high.row_mut(s));
            for k in chosen {
                let (from, to) = limits(u[(s, k)], per_feature.mean[k], per_feature.std[k], epsilon);
                low[k] = at_least(from).min(u[(s, k)]);
                high[k] = at_most(to).max(u[(s, k)]);
            }
        }
        region
    }

    pub(super) fn part(&self, u: &Matrix<f32>, labels: &[u32], samples: &[usize]) -> Part {
        Part {
            u: pick(u, samples),
            low: pick(&self.low, samples),
            high: pick(&self.high, samples),
            labels: samples.iter().map(|&s| labels[s]).collect(),
            samples: samples.to_vec(),
            ball: self.ball.clone(),
        }
    }
}

/// A copy of some rows.
pub(super) fn pick(m: &Matrix<f32>, rows: &[usize]) -> Matrix<f32> {
    Matrix::from_fn(rows.len(), m.cols(), |i, j| m[(rows[i], j)])
}

/// The smallest float32 that is not below the value.
fn at_least(value: f64) -> f32 {
    let nearest = value as f32;
    if f64::from(nearest) < value { nearest.next_up() } else { nearest }
}

/// The largest float32 that is not above the value.
fn at_most(value: f64) -> f32 {
    let nearest = value as f32;
    if f64::from(nearest) > value { nearest.next_down() } else { nearest }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn boxes_stay_within_epsilon_and_the_range() {
        let per_feature = PerFeature { scale: 1.0, mean: vec![0.3; 200], std: vec![0.7; 200] };
        let mut random = Random::new(3);
        let raw: Vec<f64> =
            (0..200).map(|k| if k % 9 == 0 { -0.2 + random.uniform() * 1.5 } else { random.uniform() }).collect();
        let u = Matrix::from_fn(1, 200, |_, k| ((raw[k] - 0.3) / 0.7) as f32);
        let region = Region::of_block(&u, &per_feature, (0.1, Norm::Linf), 1.0, 0, 0);
        for k in 0..200 {
            let back = |v: f32| f64::from(v) * 0.7 + 0.3;
            let (at, low, high) = (back(u[(0, k)]), back(region.low[(0, k)]), back(region.high[(0, k)]));
            assert!(low <= at && at <= high && low >= at - 0.1 - 1e-12 && high <= at + 0.1 + 1e-12);
            assert!(low >= at.min(-1e-12) && high <= at.max(1.0 + 1e-12), "{low} {at} {high}");
            // The limits are no wider than necessary.
            assert!(low <= (at - 0.1).max(0.0) + 1e-6 && high >= (at + 0.1).min(1.0) - 1e-6);
        }
    }

    #[test]
    fn a_share_of_the_pixels_is_seeded_and_of_the_right_size() {
        let per_feature = PerFeature { scale: 1.0, mean: vec![0.0; 100], std: vec![1.0; 100] };
        let u = Matrix::from_fn(3, 100, |_, _| 0.5f32);
        let changed = |seed, first| -> Vec<Vec<usize>> {
            let region = Region::of_block(&u, &per_feature, (0.1, Norm::Linf), 0.25, seed, first);
            (0..3).map(|s| (0..100).filter(|&k| region.high[(s, k)] > 0.5).collect()).collect()
        };
        let masks = changed(1, 7);
        assert!(masks.iter().all(|m| m.len() == 25) && masks[0] != masks[1]);
        assert_eq!(masks, changed(1, 7));
        assert_ne!(masks, changed(2, 7));
        // The mask of a sample does not depend on where its block begins.
        assert_eq!(masks[1], changed(1, 8)[0]);
    }
}
