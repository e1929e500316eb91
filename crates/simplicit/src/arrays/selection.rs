//! Which samples of a file are used.

use crate::random::Random;
use crate::{Error, Result};

/// All samples in order, or a seeded choice without replacement. The same selection picks the same samples from
/// inputs and labels.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Selection {
    choice: Option<(usize, u64)>,
}

impl Selection {
    /// All, in order.
    pub fn all() -> Self {
        Self::default()
    }

    /// `count` samples in random order, the same for the same seed.
    pub fn random(count: usize, seed: u64) -> Self {
        Self { choice: Some((count, seed)) }
    }

    /// Indices into a file of `total` samples; `None` means all in order.
    pub fn indices(&self, total: usize) -> Result<Option<Vec<usize>>> {
        match self.choice {
            None => Ok(None),
            Some((0, _)) => Err(Error::setting("samples", "at least 1", 0)),
            Some((count, _)) if count > total => {
                Err(Error::setting("samples", format!("at most {total}, all there are"), count))
            }
            Some((count, seed)) => Ok(Some(Random::new(seed).choose(total, count))),
        }
    }
}
