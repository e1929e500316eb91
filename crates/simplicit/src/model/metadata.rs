//! The data that are stored with a model in addition to its numbers.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// How the stored states and outputs relate to the baseline's: baseline = factor × stored.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scaling {
    /// One factor per state.
    pub states: Vec<f64>,
    /// The factor of every output.
    pub outputs: f64,
}

/// Where a model comes from and what it is compared with. It contains no time, path or thread count, so that the same
/// run gives the same bytes.
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
    /// Layers whose weights are the baseline's because training left them out, by name; [`OUTPUT`] stands for the
    /// outputs.
    pub kept: Vec<String>,
}

/// The name that stands for the outputs among layers.
pub const OUTPUT: &str = "output";

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
