use super::Penalty;
use super::l1::soft;
use crate::{Error, Result};

/// The perspective relaxation of μ·[x ≠ 0] + αx²: min over t in [0, 1] of αx²/t + μt, the reverse Huber function
///
/// f(x) = 2√(αμ)·|x| up to the break point √(μ/α), αx² + μ beyond.
///
/// Below the break it is ℓ1 with weight 2√(αμ); to differ from ℓ1 the break must lie inside the range of the weights.
/// With μ = α (the reading of the paper's settings) the break is at 1, and as |A_ij| ≤ κ < 1 it is ℓ1 on all of A.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Perspective {
    alpha: f64,
    mu: f64,
}

impl Perspective {
    /// α > 0 and μ ≥ 0; μ = 0 is ridge.
    pub fn new(alpha: f64, mu: f64) -> Result<Self> {
        if !(alpha > 0.0 && alpha.is_finite()) {
            return Err(Error::setting("alpha", "a positive number", alpha));
        }
        if !(mu >= 0.0 && mu.is_finite()) {
            return Err(Error::setting("mu", "zero or a positive number", mu));
        }
        Ok(Self { alpha, mu })
    }

    /// The paper's form: one α, with μ = α (the paper's text omits the term Σt, without which the optimum would be
    /// plain ridge).
    pub fn paper(alpha: f64) -> Result<Self> {
        Self::new(alpha, alpha)
    }

    /// √(μ/α).
    pub fn break_point(&self) -> f64 {
        (self.mu / self.alpha).sqrt()
    }

    fn kink(&self) -> f64 {
        2.0 * (self.alpha * self.mu).sqrt()
    }
}

impl Penalty for Perspective {
    #[inline]
    fn value(&self, x: f64) -> f64 {
        let x = x.abs();
        if x <= self.break_point() { self.kink() * x } else { self.alpha * x * x + self.mu }
    }

    #[inline]
    fn prox(&self, v: f64, tau: f64) -> f64 {
        let growth = 1.0 + 2.0 * tau * self.alpha;
        if v.abs() <= self.break_point() * growth { soft(v, tau * self.kink()) } else { v / growth }
    }

    fn conjugate(&self, g: f64) -> f64 {
        (g * g / (4.0 * self.alpha) - self.mu).max(0.0)
    }

    fn slope(&self, x: f64) -> f64 {
        if x <= self.break_point() { self.kink() } else { 2.0 * self.alpha * x }
    }

    fn curvature(&self, x: f64) -> f64 {
        if x <= self.break_point() { 0.0 } else { 2.0 * self.alpha }
    }

    fn maximiser(&self, g: f64) -> f64 {
        if g <= self.kink() { 0.0 } else { g / (2.0 * self.alpha) }
    }
}
