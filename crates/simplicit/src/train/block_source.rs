//! A network that runs elsewhere, seen as linear blocks: the trait of such a source, and the checks of its settings and blocks.

use std::sync::Arc;

use crate::linalg::Matrix;
use crate::problem::{Connectivity, Matching};
use crate::statistics::Statistics;
use crate::train::{Run, TrainSettings, check};
use crate::{Error, Result};

/// A linear map of the network.
#[derive(Debug, Clone)]
pub struct LinearBlock {
    /// Its name in reports.
    pub name: String,
    /// Number of groups of rows that read different features, as in a grouped convolution; each group has the same
    /// number of rows.
    pub groups: usize,
    /// The original weights, rows × features of a group. A zero means that there is no connection.
    pub weights: Matrix<f32>,
    /// The original constants, one per row; `None` if the block has no constants.
    pub constant: Option<Vec<f32>>,
    /// Whether its constants are counted. If blocks are added up, their constants are one number per row, which is
    /// counted once.
    pub counts_constant: bool,
    /// Whether a sample gives several positions, as a convolution's does.
    pub shared: bool,
    /// The stage; consecutive blocks of one stage are gathered together, before any of them is replaced.
    pub stage: usize,
}

impl LinearBlock {
    /// Number of features of a row; the constant is included and comes last.
    pub fn features(&self) -> usize {
        self.weights.cols() + usize::from(self.constant.is_some())
    }

    /// Number of rows of a group.
    pub(crate) fn group_rows(&self) -> usize {
        self.weights.rows() / self.groups
    }

    /// Non-zero weights and constants of the original.
    pub fn nonzeros(&self) -> usize {
        self.count(&self.weights, self.constant.as_deref())
    }

    /// Non-zeros of new weights, counted in the same way.
    pub(super) fn count(&self, weights: &Matrix<f32>, constant: Option<&[f32]>) -> usize {
        nonzeros(weights.as_slice()) + constant.filter(|_| self.counts_constant).map_or(0, nonzeros)
    }

    pub(super) fn bytes(&self) -> usize {
        8 * self.groups * self.features() * (self.features() + self.group_rows())
    }
}

fn nonzeros(values: &[f32]) -> usize {
    values.iter().filter(|v| **v != 0.0).count()
}

/// New weights of a block.
#[derive(Debug, Clone)]
pub struct BlockRows {
    /// Rows × features of a group.
    pub weights: Matrix<f32>,
    /// One constant per row, if the block has constants.
    pub constant: Option<Vec<f32>>,
}

/// A network that runs elsewhere, seen as its linear blocks in the order they run.
pub trait BlockSource {
    /// The blocks to train.
    fn blocks(&self) -> Arc<[LinearBlock]>;
    /// Non-zero parameters outside the blocks, which stay as they are.
    fn fixed_nonzeros(&self) -> u64;
    /// Number of samples.
    fn samples(&self) -> usize;
    /// Statistics of some blocks over the first `samples` samples, one per group: targets from the original network,
    /// features from the network with the weights installed (`own`) or from the original one.
    fn statistics(
        &mut self,
        blocks: &[usize],
        samples: usize,
        own: bool,
        run: &mut Run,
    ) -> Result<Vec<Vec<Statistics>>>;
    /// Replaces the weights of a block.
    fn install(&mut self, block: usize, rows: &BlockRows) -> Result<()>;
    /// Puts the original weights back into all blocks.
    fn reset(&mut self) -> Result<()>;
    /// How strongly an error of every row of every block changes the output, as
    /// [`importance`](crate::train::importance()) defines it; `None` if the source has no gradients.
    fn row_weights(&mut self, run: &mut Run) -> Result<Option<Vec<Vec<f64>>>>;
    /// For every block E(Σ g·e)² and, by row, the mean square of e: where g is the gradient of the output and e the
    /// errors of these weights on the original features; the sum runs over a sample's rows and positions.
    fn joint_errors(&mut self, rows: &[BlockRows], run: &Run) -> Result<Vec<(f64, Vec<f64>)>>;
}

pub(super) fn check(source: &dyn BlockSource, settings: &TrainSettings) -> Result<()> {
    check::settings_alone(settings)?;
    let elsewhere = "train the network itself for another";
    if !matches!(settings.allowed.connectivity, Connectivity::Baseline) {
        return Err(Error::setting("connectivity", format!("baseline for linear blocks; {elsewhere}"), "another"));
    }
    if let Some(kappa) = settings.allowed.kappa {
        return Err(Error::setting("kappa", "none for linear blocks, which form no implicit model", kappa));
    }
    match settings.rows.matching {
        Matching::Exact => return Err(Error::setting("matching", "relaxed for linear blocks", "exact")),
        Matching::Relaxed { states, outputs } if states != outputs => {
            let expected = format!("{states} as lambda1: a block does not know whether its rows are outputs");
            return Err(Error::setting("lambda2", expected, outputs));
        }
        Matching::Relaxed { .. } => {}
    }
    let output_refit = settings.model.output_refit.unwrap_or(0);
    let network_only = [
        ("reconstruct", settings.model.reconstruct),
        ("output-refit", output_refit),
        ("robust", settings.model.robust_rounds),
        ("allocate", settings.model.allocate),
    ];
    for (setting, got) in network_only {
        if got > 0 {
            return Err(Error::setting(setting, format!("0 for linear blocks; {elsewhere}"), got));
        }
    }
    if settings.model.stages == Some(true) {
        return Err(Error::setting("stages", format!("off for linear blocks; {elsewhere}"), "on"));
    }
    if let Some(epsilon) = settings.model.robust_refit {
        return Err(Error::setting("robust-refit", format!("none for linear blocks; {elsewhere}"), epsilon));
    }
    if let Some(pattern) = settings.allowed.include.iter().chain(&settings.allowed.exclude).next() {
        let expected = "none for linear blocks; leave out of the source what is not to be trained";
        return Err(Error::setting("include, exclude", expected, pattern));
    }
    if let Some(bytes) = settings.work.memory {
        return Err(Error::setting("memory", "none for linear blocks, whose source holds the samples", bytes));
    }
    if settings.allowed.bias {
        return Err(Error::setting("bias", "off for linear blocks: a constant needs a place in the network", "on"));
    }
    let blocks = source.blocks();
    if blocks.is_empty() {
        return Err(Error::shape("blocks", "at least one linear block to train", "none"));
    }
    if source.samples() == 0 {
        return Err(Error::shape("samples", "at least one", 0));
    }
    for block in blocks.iter() {
        let (rows, cols) = (block.weights.rows(), block.weights.cols());
        if block.groups == 0 || rows == 0 || cols == 0 || rows % block.groups != 0 {
            let expected = "rows and features, the rows divided evenly among the groups";
            let got = format!("{rows} rows, {cols} features, {} groups", block.groups);
            return Err(Error::shape(format!("block {:?}", block.name), expected, got));
        }
        if let Some(constant) = block.constant.as_ref().filter(|c| c.len() != rows) {
            return Err(Error::shape(format!("constants of block {:?}", block.name), rows, constant.len()));
        }
        block.weights.require_finite(&format!("weights of {}", block.name), 0)?;
    }
    Ok(())
}

pub(super) fn check_weights(blocks: &[LinearBlock], weights: &[Vec<f64>]) -> Result<()> {
    if weights.len() != blocks.len() {
        return Err(Error::shape("row weights", format!("those of {} blocks", blocks.len()), weights.len()));
    }
    for (block, weights) in blocks.iter().zip(weights) {
        if weights.len() != block.weights.rows() {
            let what = format!("row weights of {}", block.name);
            return Err(Error::shape(what, block.weights.rows(), weights.len()));
        }
        if let Some(bad) = weights.iter().find(|w| !(w.is_finite() && **w >= 0.0)) {
            return Err(Error::setting(format!("row weight of {}", block.name), "zero or a positive number", bad));
        }
    }
    Ok(())
}
