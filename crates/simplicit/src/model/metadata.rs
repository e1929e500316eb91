//! What travels with a model besides its numbers.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::linalg::Matrix;
use crate::{Error, Result};

/// u = (raw·scale − mean) / std, mean and std one number or one per channel (channels are consecutive blocks of u).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Preprocessing {
    /// Factor on the raw values, such as 1/255.
    pub scale: f64,
    /// Subtracted after scaling.
    pub mean: Vec<f64>,
    /// Divided by after subtracting.
    pub std: Vec<f64>,
}

impl Default for Preprocessing {
    fn default() -> Self {
        Self { scale: 1.0, mean: vec![0.0], std: vec![1.0] }
    }
}

impl Preprocessing {
    /// Whether it can be applied to `inputs` values per sample.
    pub fn check(&self, inputs: usize) -> Result<()> {
        if !self.scale.is_finite() || self.scale <= 0.0 {
            return Err(Error::setting("preprocessing scale", "a positive number", self.scale));
        }
        for (name, values) in [("preprocessing mean", &self.mean), ("preprocessing std", &self.std)] {
            if values.is_empty() || !inputs.is_multiple_of(values.len()) {
                return Err(Error::setting(
                    name,
                    format!("one number, or one per channel of {inputs} inputs"),
                    format!("{} numbers", values.len()),
                ));
            }
        }
        if let Some(bad) = self.mean.iter().find(|v| !v.is_finite()) {
            return Err(Error::setting("preprocessing mean", "finite numbers", bad));
        }
        if let Some(bad) = self.std.iter().find(|v| !v.is_finite() || **v <= 0.0) {
            return Err(Error::setting("preprocessing std", "positive numbers", bad));
        }
        Ok(())
    }

    /// Whether u is the raw input itself.
    pub fn is_identity(&self) -> bool {
        self.scale == 1.0 && self.mean.iter().all(|&m| m == 0.0) && self.std.iter().all(|&s| s == 1.0)
    }

    /// u from raw values, one sample a row.
    pub fn apply(&self, raw: &mut Matrix<f32>) -> Result<()> {
        self.check(raw.cols())?;
        if self.is_identity() {
            return Ok(());
        }
        let (cols, means, stds) = (raw.cols(), self.mean.len(), self.std.len());
        for i in 0..raw.rows() {
            for (j, v) in raw.row_mut(i).iter_mut().enumerate() {
                let (mean, std) = (self.mean[j / (cols / means)], self.std[j / (cols / stds)]);
                *v = ((f64::from(*v) * self.scale - mean) / std) as f32;
            }
        }
        Ok(())
    }
}

/// How the stored states and outputs relate to the baseline's: baseline = factor × stored.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scaling {
    /// One factor per state.
    pub states: Vec<f64>,
    /// The factor of every output.
    pub outputs: f64,
}

/// Where a model comes from and what it is compared with. No time, path or thread count: the same run gives the same
/// bytes.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct ModelMetadata {
    /// The bound that ‖A‖∞ was held to.
    pub kappa: Option<f64>,
    /// Present when the states are not in the baseline's coordinates.
    pub scaling: Option<Scaling>,
    /// Settings, seed, input hashes, crate version.
    pub provenance: BTreeMap<String, String>,
    /// Non-zero parameters of the baseline, batch norm folded, biases included.
    pub baseline_nonzeros: Option<u64>,
    /// Multiply-adds of the baseline on one sample.
    pub baseline_multiply_adds: Option<u64>,
}

impl ModelMetadata {
    pub(super) fn check(&self, states: usize) -> Result<()> {
        if let Some(kappa) = self.kappa
            && !(kappa.is_finite() && kappa > 0.0)
        {
            return Err(Error::setting("kappa", "a positive number", kappa));
        }
        if let Some(scaling) = &self.scaling {
            if scaling.states.len() != states {
                return Err(Error::shape("scaling", format!("{states} state factors"), scaling.states.len()));
            }
            let factors = scaling.states.iter().chain([&scaling.outputs]);
            if let Some(bad) = factors.into_iter().find(|v| !v.is_finite() || **v <= 0.0) {
                return Err(Error::setting("scaling", "positive factors", bad));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn channels_are_consecutive_blocks() {
        let p = Preprocessing { scale: 0.5, mean: vec![1.0, 2.0], std: vec![2.0] };
        let mut raw = Matrix::from_vec(1, 4, vec![2.0, 4.0, 6.0, 8.0]).unwrap();
        p.apply(&mut raw).unwrap();
        assert_eq!(raw.as_slice(), [0.0, 0.5, 0.5, 1.0]);
        assert!(p.check(3).is_err());
        assert!(Preprocessing { std: vec![0.0], ..Default::default() }.check(3).is_err());
        assert!(Preprocessing { mean: vec![], ..Default::default() }.check(3).is_err());
    }
}
