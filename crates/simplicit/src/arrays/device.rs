//! Inputs that lie on a GPU already, such as a tensor of PyTorch's.

use std::ops::Range;

use super::{InputSource, PerFeature};
use crate::backend::cuda::{LentRows, Session, Values};
use crate::linalg::Matrix;
use crate::{Error, Result};

/// Samples that are checked together.
const CHECKED: usize = 512;

/// Samples on a GPU, preprocessed as they are read: directly for work on that GPU, through the host for everything
/// else.
#[derive(Debug)]
pub struct DeviceInputs {
    raw: LentRows,
    per_feature: PerFeature,
    /// The row of every sample, in the order used.
    chosen: Vec<i32>,
}

impl DeviceInputs {
    /// All rows, or some in the order given. Every value must be finite; the device checks that.
    pub fn new(raw: LentRows, per_feature: PerFeature, indices: Option<&[usize]>) -> Result<Self> {
        let number = |row: usize| i32::try_from(row).map_err(|_| Error::shape("samples on a GPU", "below 2^31", row));
        let chosen = match indices {
            Some(indices) => indices.iter().map(|&row| number(row)).collect::<Result<Vec<_>>>()?,
            None => (0..raw.rows()).map(number).collect::<Result<Vec<_>>>()?,
        };
        let all = Self { raw, per_feature, chosen };
        for first in (0..all.chosen.len()).step_by(CHECKED) {
            let range = first..(first + CHECKED).min(all.chosen.len());
            let squares = {
                let session = all.raw.cuda().session()?;
                session.channel_squares(&all.values(&session, range.clone())?)?
            };
            // A value that is not finite shows in the sums of squares; only then is its place searched for.
            if squares.iter().any(|s| !s.is_finite()) {
                all.rows(range.clone())?.require_finite("U", range.start)?;
            }
        }
        Ok(all)
    }

    /// Some consecutive samples for a session on the same GPU; `None` for one on another.
    pub(crate) fn on(&self, session: &Session, samples: Range<usize>) -> Option<Result<Values>> {
        session.has(&self.raw).then(|| self.values(session, samples))
    }

    fn values(&self, session: &Session, samples: Range<usize>) -> Result<Values> {
        let PerFeature { scale, mean, std } = &self.per_feature;
        session.taken(&self.raw, &self.chosen[samples], *scale, mean, std)
    }
}

impl InputSource for DeviceInputs {
    fn samples(&self) -> usize {
        self.chosen.len()
    }

    fn features(&self) -> usize {
        self.raw.cols()
    }

    fn rows(&self, samples: Range<usize>) -> Result<Matrix<f32>> {
        let session = self.raw.cuda().session()?;
        let count = samples.len();
        Matrix::from_vec(count, self.features(), session.to_rows(&self.values(&session, samples)?)?)
    }

    fn on_device(&self) -> Option<&DeviceInputs> {
        Some(self)
    }
}
