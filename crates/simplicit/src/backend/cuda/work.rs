//! The work that the device did and its speed: operations and bytes of the parts of a group, and peak rates measured
//! with the same library calls.

use std::ops::Sub;
use std::sync::PoisonError;
use std::time::Instant;

use super::dense::{Panel, Sizes};
use super::{Argument, Cuda, Session, arguments};
use crate::Result;

/// Sizes of the products and of the copy that measure the peak rates, and how often each is run.
const PRODUCT: usize = 8192;
const COPIED: usize = 1 << 26;
const RUNS: usize = 5;

/// Operations of matrix products (a multiplication and an addition are two), and the fewest bytes that products and
/// thresholds must read and write.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Work {
    /// Operations in single precision.
    pub single: f64,
    /// Operations in double precision.
    pub double: f64,
    /// Bytes read from and written to the device's memory.
    pub bytes: f64,
}

impl Sub for Work {
    type Output = Self;

    fn sub(self, before: Self) -> Self {
        Self {
            single: self.single - before.single,
            double: self.double - before.double,
            bytes: self.bytes - before.bytes,
        }
    }
}

/// A part of the work on the group that was solved last.
#[derive(Debug, Clone)]
pub struct Phase {
    /// The name of the part, such as `splitting`.
    pub name: &'static str,
    /// Wall-clock seconds until the device's work was done.
    pub seconds: f64,
    /// The operations and bytes that were counted.
    pub work: Work,
}

/// The rates that the device reaches when it does nothing else, per second.
#[derive(Debug, Clone, Copy)]
pub struct Peaks {
    /// Operations of a product in single precision, TF32 off.
    pub single: f64,
    /// Operations of a product in double precision.
    pub double: f64,
    /// Operations of the call that adds up Gram matrices, one half counted.
    pub gram: f64,
    /// Bytes read and written by w += v.
    pub bytes: f64,
}

impl Phase {
    /// The share of the limiting peak rate that was reached: the seconds that the counted work takes at that rate,
    /// divided by the seconds that it took. Operations and transfers overlap, so the longer of the two is the limit.
    pub fn share(&self, peaks: &Peaks) -> f64 {
        let arithmetic = self.work.single / peaks.single + self.work.double / peaks.double;
        arithmetic.max(self.work.bytes / peaks.bytes) / self.seconds
    }
}

impl Cuda {
    /// The parts of the work on the group that was solved last.
    pub fn last_phases(&self) -> Vec<Phase> {
        self.phases.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The work counted since the GPU was opened.
    pub(super) fn work(&self) -> Work {
        *self.work.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Measures the peak rates: the best of several runs for each.
    pub fn peaks(&'static self) -> Result<Peaks> {
        let session = self.session()?;
        let n = PRODUCT;
        let cubed = 2.0 * (n as f64).powi(3);
        let sizes = Sizes(n, n, n);
        let single = {
            let [a, b, c] = [session.zeros::<f32>(n * n)?, session.zeros(n * n)?, session.zeros(n * n)?];
            let [a, b, c] = [&a, &b, &c].map(|m| Panel::new(m.address(), n));
            cubed / session.fastest(|| session.product_single(c, 0.0, a, b, sizes))?
        };
        let (a, b, c) = (session.zeros::<f64>(n * n)?, session.zeros::<f64>(n * n)?, session.zeros::<f64>(n * n)?);
        let [pa, pb, pc] = [&a, &b, &c].map(|m| Panel::new(m.address(), n));
        let double = cubed / session.fastest(|| session.product(pc, 0.0, 1.0, pa, pb, sizes))?;
        let gram = cubed / 2.0 / session.fastest(|| session.add_square(pc, pa, n, n))?;
        let count = COPIED.min(n * n);
        let add = || {
            let length = Argument::Size(count as u64);
            session.each(self.kernels.add_to, count, 1, arguments!(&c, &a, length))
        };
        let bytes = 24.0 * count as f64 / session.fastest(add)?;
        Ok(Peaks { single, double, gram, bytes })
    }
}

impl Session {
    fn fastest(&self, run: impl Fn() -> Result<()>) -> Result<f64> {
        let mut best = f64::INFINITY;
        for _ in 0..RUNS {
            self.wait("a measurement")?;
            let clock = Instant::now();
            run()?;
            self.wait("a measurement")?;
            best = best.min(clock.elapsed().as_secs_f64());
        }
        Ok(best)
    }

    pub(super) fn count(&self, work: Work) {
        let mut sum = self.cuda.work.lock().unwrap_or_else(PoisonError::into_inner);
        sum.single += work.single;
        sum.double += work.double;
        sum.bytes += work.bytes;
    }
}
