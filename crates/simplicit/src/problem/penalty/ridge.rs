use super::Penalty;
use crate::{Error, Result};

/// αx².
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Ridge {
    alpha: f64,
}

impl Ridge {
    /// α > 0.
    pub fn new(alpha: f64) -> Result<Self> {
        if alpha > 0.0 && alpha.is_finite() {
            Ok(Self { alpha })
        } else {
            Err(Error::setting("alpha", "a positive number", alpha))
        }
    }
}

impl Penalty for Ridge {
    #[inline]
    fn value(&self, x: f64) -> f64 {
        self.alpha * x * x
    }

    #[inline]
    fn prox(&self, v: f64, tau: f64) -> f64 {
        v / (1.0 + 2.0 * self.alpha * tau)
    }

    fn conjugate(&self, g: f64) -> f64 {
        g * g / (4.0 * self.alpha)
    }

    fn slope(&self, x: f64) -> f64 {
        2.0 * self.alpha * x
    }

    fn curvature(&self, _: f64) -> f64 {
        2.0 * self.alpha
    }

    fn maximiser(&self, g: f64) -> f64 {
        g / (2.0 * self.alpha)
    }
}
