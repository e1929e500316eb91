//! Work in other processes or on other machines, with the same bits as in this process.
//!
//! Training has three heavy steps: sums over blocks of samples for row weights and the error of the outputs
//! ([`SumsTask`](crate::train::SumsTask)), statistics of a group over some samples, and the rows over those
//! statistics. Statistics of rows of single units are a pure function of a few bytes ([`StatisticsTask`]), and so is
//! a block of rows to solve or to bound ([`RowsTask`]). Networks with feature maps are walked through by
//! [`Shard`](crate::train::Shard)s of the samples, whose state follows from the steps that they received. A
//! [`Delegate`] may run all of these anywhere and repeatedly: a lost result is computed again and is the same.

#[cfg(test)]
mod double;
pub(super) mod numbers;
mod rows_task;
mod statistics_task;
#[cfg(test)]
mod tests;

pub use numbers::{from_bytes as numbers_from_bytes, to_bytes as numbers_to_bytes};
pub use rows_task::RowsTask;
pub use statistics_task::StatisticsTask;

use crate::Result;
use crate::statistics::Statistics;
use crate::train::evidence::shard::{Step, WalkTask};
use crate::train::evidence::sums_task::SumsTask;

/// Runs the heavy steps in place of this process's threads.
pub trait Delegate: Sync {
    /// The task's statistics over its samples.
    fn statistics(&self, task: &StatisticsTask) -> Result<Statistics>;
    /// Solves the rows of every task over one design, and passes them to `take` in order as they arrive.
    fn rows(
        &self,
        statistics: &Statistics,
        tasks: &[RowsTask],
        take: &mut dyn FnMut(usize, Vec<f64>) -> Result<()>,
    ) -> Result<()>;
    /// Begins a walk of all samples through the layers of a network with feature maps; returns its number.
    fn begin_walk(&self, task: &WalkTask) -> Result<usize>;
    /// Statistics of a group over all samples after these further steps; `shape` has the numbers of features and
    /// targets.
    fn walk(&self, walk: usize, steps: &[Step], group: usize, shape: (usize, usize)) -> Result<Statistics>;
    /// Ends a walk, which is not used any more.
    fn end_walk(&self, walk: usize);
    /// The sums of every block of samples, passed to `take` in order as they arrive.
    fn sums(&self, task: &SumsTask, take: &mut dyn FnMut(usize, Vec<f64>) -> Result<()>) -> Result<()>;
}
