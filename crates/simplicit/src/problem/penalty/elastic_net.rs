use super::Penalty;
use super::l1::soft;
use crate::{Error, Result};

/// β|x| + αx².
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ElasticNet {
    beta: f64,
    alpha: f64,
}

impl ElasticNet {
    /// β > 0, α ≥ 0.
    pub fn new(beta: f64, alpha: f64) -> Result<Self> {
        if !(beta > 0.0 && beta.is_finite()) {
            return Err(Error::setting("beta", "a positive number", beta));
        }
        if !(alpha >= 0.0 && alpha.is_finite()) {
            return Err(Error::setting("alpha", "zero or a positive number", alpha));
        }
        Ok(Self { beta, alpha })
    }
}

impl Penalty for ElasticNet {
    #[inline]
    fn value(&self, x: f64) -> f64 {
        self.beta * x.abs() + self.alpha * x * x
    }

    #[inline]
    fn prox(&self, v: f64, tau: f64) -> f64 {
        soft(v, self.beta * tau) / (1.0 + 2.0 * self.alpha * tau)
    }

    fn conjugate(&self, g: f64) -> f64 {
        let excess = (g.abs() - self.beta).max(0.0);
        if excess == 0.0 { 0.0 } else { excess * excess / (4.0 * self.alpha) }
    }

    fn slope(&self, x: f64) -> f64 {
        if self.alpha == 0.0 { self.beta } else { self.beta + 2.0 * self.alpha * x }
    }

    fn curvature(&self, _: f64) -> f64 {
        2.0 * self.alpha
    }

    fn maximiser(&self, g: f64) -> f64 {
        if g <= self.beta { 0.0 } else { (g - self.beta) / (2.0 * self.alpha) }
    }
}
