//! The set of points that a perturbed sample may have, and the smallest value of a linear function over it.

use super::substitution::{LANES, Lane};
use crate::arrays::PerFeature;
use crate::attack::{Norm, limits};
use crate::linalg::vectorised;

/// A box, possibly intersected with a ball around the sample.
pub(super) struct InputSet {
    pub(super) low: Vec<f64>,
    pub(super) high: Vec<f64>,
    ball: Option<Ball>,
}

struct Ball {
    centre: Vec<f64>,
    /// 1/std of every input, because the ball is one in raw·scale units.
    inverse: Vec<f64>,
    radius: f64,
}

impl InputSet {
    /// The set for a preprocessed sample; ε is in raw·scale units.
    pub(super) fn new(u: &[f32], per_feature: &PerFeature, epsilon: f64, norm: Norm) -> Self {
        // Inputs are float32, so ε is taken a little larger.
        let epsilon = epsilon + f64::from(f32::EPSILON);
        let (mut low, mut high) = (Vec::with_capacity(u.len()), Vec::with_capacity(u.len()));
        for (k, &v) in u.iter().enumerate() {
            let (from, to) = limits(v, per_feature.mean[k], per_feature.std[k], epsilon);
            let allowance = 4.0 * f64::EPSILON * (from.abs() + to.abs());
            low.push(from - allowance);
            high.push(to + allowance);
        }
        let ball = (norm == Norm::L2).then(|| Ball {
            centre: u.iter().map(|v| f64::from(*v)).collect(),
            inverse: per_feature.std.iter().map(|s| 1.0 / s).collect(),
            // Rounding each of p values by 2⁻²⁴ of at most a few units moves the point by √p times that.
            radius: epsilon + f64::from(f32::EPSILON) * (u.len() as f64).sqrt(),
        });
        Self { low, high, ball }
    }

    /// Whether the set is the box alone; plain intervals of the first layer are then as narrow as possible.
    pub(super) fn is_box(&self) -> bool {
        self.ball.is_none()
    }

    /// Adds the smallest value of every function; coefficients are units × lanes.
    pub(super) fn close(&self, constant: &mut Lane, own: &[f32]) {
        let (mut boxed, mut centred, mut squares) = ([0.0; LANES], [0.0; LANES], [0.0; LANES]);
        vectorised(
            #[inline(always)]
            || {
                for (k, row) in own.as_chunks::<LANES>().0.iter().enumerate() {
                    let (low, high) = (self.low[k], self.high[k]);
                    for l in 0..LANES {
                        let v = f64::from(row[l]);
                        boxed[l] += if v >= 0.0 { v * low } else { v * high };
                    }
                    if let Some(ball) = &self.ball {
                        let (at, inverse) = (ball.centre[k], ball.inverse[k]);
                        for l in 0..LANES {
                            let v = f64::from(row[l]);
                            centred[l] += v * at;
                            squares[l] += (v * inverse) * (v * inverse);
                        }
                    }
                }
            },
        );
        for l in 0..LANES {
            let mut least = boxed[l];
            if let Some(ball) = &self.ball {
                least = least.max(centred[l] - ball.radius * squares[l].sqrt() * (1.0 + 1e-12));
            }
            constant[l] += least;
        }
    }

    /// A point where the function of lane l is (nearly) smallest; for gradients only.
    pub(super) fn smallest_at(&self, own: &[f32], lane: usize, out: &mut [f32]) {
        let scale = self.ball.as_ref().map(|ball| {
            let squares: f64 =
                own.iter().skip(lane).step_by(LANES).zip(&ball.inverse).map(|(v, i)| (f64::from(*v) * i).powi(2)).sum();
            ball.radius / squares.sqrt().max(1e-300)
        });
        for k in 0..self.low.len() {
            let v = f64::from(own[k * LANES + lane]);
            let at = match (&self.ball, scale) {
                (Some(ball), Some(scale)) => ball.centre[k] - scale * v * ball.inverse[k] * ball.inverse[k],
                _ if v >= 0.0 => self.low[k],
                _ => self.high[k],
            };
            out[k * LANES + lane] = at as f32;
        }
    }
}
