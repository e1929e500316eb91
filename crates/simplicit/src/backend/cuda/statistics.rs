//! G and H of a group, accumulated on the device in f64, a block of samples at a time.

use super::dense::{Panel, Sizes};
use super::memory::Buffer;
use super::{Cuda, Session, arguments};
use crate::linalg::Matrix;
use crate::{Error, Result};

/// Sums on the device while blocks come in.
pub(crate) struct Accumulator<'s> {
    session: &'s Session<'s>,
    d: usize,
    r: usize,
    gram: Buffer<'s, f64>,
    cross: Buffer<'s, f64>,
    /// Room for a block, kept from one to the next.
    features: Option<Buffer<'s, f64>>,
    targets: Option<Buffer<'s, f64>>,
    room: usize,
}

impl Cuda {
    /// Runs `feed` with an accumulator of d features and r targets; G (full, d × d) and H (one target a row) at the end.
    pub(crate) fn accumulate(
        &self,
        d: usize,
        r: usize,
        feed: impl FnOnce(&mut Accumulator) -> Result<()>,
    ) -> Result<(Matrix, Matrix)> {
        let session = self.session()?;
        let (gram, cross) = (session.zeros(d * d)?, session.zeros(d * r)?);
        let mut sums = Accumulator { session: &session, d, r, gram, cross, features: None, targets: None, room: 0 };
        feed(&mut sums)?;
        sums.finish()
    }
}

impl Accumulator<'_> {
    /// Adds a block: features and targets with one sample a row.
    pub(crate) fn add(&mut self, features: &Matrix, targets: &Matrix) -> Result<()> {
        let (samples, d, r) = (features.rows(), self.d, self.r);
        if features.cols() != d || targets.cols() != r || targets.rows() != samples {
            return Err(Error::shape(
                "a block of samples",
                format!("{samples} × {d} features and {samples} × {r} targets"),
                format!("{:?} and {:?}", (samples, features.cols()), (targets.rows(), targets.cols())),
            ));
        }
        if samples > self.room {
            self.features = None;
            self.targets = None;
            self.features = Some(self.session.allocate(samples * d)?);
            self.targets = Some(self.session.allocate(samples * r)?);
            self.room = samples;
        }
        let (Some(f), Some(t)) = (&self.features, &self.targets) else { return Ok(()) };
        self.session.upload(features.as_slice(), f)?;
        self.session.upload(targets.as_slice(), t)?;
        // A sample a row is, by columns, a sample a column.
        let (f, t) = (Panel::new(f.address(), d), Panel::new(t.address(), r.max(1)));
        self.session.add_square(Panel::new(self.gram.address(), d), f, d, samples)?;
        if r > 0 {
            let cross = Panel::new(self.cross.address(), d);
            self.session.product(cross, 1.0, 1.0, f, t.t(), Sizes(d, r, samples))?;
        }
        Ok(())
    }

    fn finish(self) -> Result<(Matrix, Matrix)> {
        let (d, r) = (self.d, self.r);
        self.session.each(self.session.cuda.kernels.mirror, d * d, 1, arguments!(&self.gram, d))?;
        let (gram, cross) = (self.session.to_host(&self.gram)?, self.session.to_host(&self.cross)?);
        Ok((Matrix::from_vec(d, d, gram)?, Matrix::from_vec(r, d, cross)?))
    }
}
