//! The JSON and the lines of `attack` and `certify`.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use simplicit::attack::Norm;

use crate::args::JsonArgs;
use crate::results::{Results, deliver};
use crate::table::percent;

/// The keys of every command, then those about ε; every list is in the order of the ε asked for.
#[derive(Debug, Serialize)]
pub(crate) struct RobustnessResults {
    #[serde(flatten)]
    pub(crate) results: Results,
    pub(crate) epsilon: Vec<f64>,
    pub(crate) clean_accuracy: f64,
    /// Accuracy when the worst attack is counted for every sample.
    pub(crate) attacked_accuracy: Option<Vec<f64>>,
    pub(crate) certified_accuracy: Option<Vec<f64>>,
    /// The accuracy under each attack alone.
    pub(crate) attacks: Vec<AttackCurve>,
    /// The accuracy that each bound certifies together with the bounds before it.
    pub(crate) bounds: Vec<BoundCurve>,
    /// Share of the values that were attacked.
    pub(crate) pixels: Option<f64>,
    /// linf or l2.
    pub(crate) norm: String,
    /// For a certificate, the arithmetic of the outputs that it is about: single (exact outputs and those of this
    /// program's run on a processor), any-order (those of every run in single precision too) or exact.
    pub(crate) arithmetic: Option<String>,
    /// Number of samples that were given up because their intervals would have cost more than allowed.
    pub(crate) given_up: Option<usize>,
}

/// How a change is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum NormKind {
    /// Every value by at most epsilon
    Linf,
    /// The Euclidean length of the change
    L2,
}

impl NormKind {
    pub(crate) fn norm(self) -> Norm {
        match self {
            NormKind::Linf => Norm::Linf,
            NormKind::L2 => Norm::L2,
        }
    }
}

/// The accuracy under one attack over ε.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct AttackCurve {
    pub(crate) method: String,
    /// Whose gradient it follows: model, baseline, or null for the square search.
    pub(crate) gradient: Option<String>,
    pub(crate) accuracy: Vec<f64>,
}

/// The accuracy that one bound certifies over ε.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct BoundCurve {
    pub(crate) bound: String,
    pub(crate) accuracy: Vec<f64>,
}

impl RobustnessResults {
    /// Writes the JSON file, then prints the table or the JSON on stdout.
    pub(crate) fn deliver(&self, json: &JsonArgs, table: &str) -> anyhow::Result<()> {
        deliver(self, json, table)
    }
}

/// ε as 1/255, 0.5/255, or 0.1 where it is no short multiple of a grey level.
pub(crate) fn epsilon_text(epsilon: f64) -> String {
    let levels = 255.0 * epsilon;
    let rounded = (100.0 * levels).round() / 100.0;
    if (levels - rounded).abs() < 1e-9 && levels < 100.0 { format!("{rounded}/255") } else { format!("{epsilon}") }
}

/// A cell of a table over ε.
pub(crate) fn cell(accuracy: &[f64], k: usize) -> String {
    accuracy.get(k).map_or("–".to_string(), |a| percent(*a))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grey_levels_read_as_such() {
        let texts = [1.0 / 255.0, 0.5 / 255.0, 8.0 / 255.0, 0.1, 1.0].map(epsilon_text);
        assert_eq!(texts, ["1/255", "0.5/255", "8/255", "25.5/255", "1"]);
        assert_eq!(epsilon_text(0.001), "0.001");
    }
}
