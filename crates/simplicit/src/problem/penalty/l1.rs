use super::Penalty;
use crate::{Error, Result};

/// β|x|.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct L1 {
    beta: f64,
}

impl L1 {
    /// β > 0.
    pub fn new(beta: f64) -> Result<Self> {
        if beta > 0.0 && beta.is_finite() {
            Ok(Self { beta })
        } else {
            Err(Error::setting("beta", "a positive number", beta))
        }
    }
}

impl Penalty for L1 {
    #[inline]
    fn value(&self, x: f64) -> f64 {
        self.beta * x.abs()
    }

    #[inline]
    fn prox(&self, v: f64, tau: f64) -> f64 {
        soft(v, self.beta * tau)
    }

    fn conjugate(&self, g: f64) -> f64 {
        if g.abs() <= self.beta { 0.0 } else { f64::INFINITY }
    }

    fn slope(&self, _: f64) -> f64 {
        self.beta
    }

    fn curvature(&self, _: f64) -> f64 {
        0.0
    }

    fn maximiser(&self, g: f64) -> f64 {
        if g <= self.beta { 0.0 } else { f64::INFINITY }
    }
}

/// v moved towards zero by `threshold`, stopping there.
#[inline]
pub(crate) fn soft(v: f64, threshold: f64) -> f64 {
    (v.abs() - threshold).max(0.0).copysign(v) + 0.0
}
