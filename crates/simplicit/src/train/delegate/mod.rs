//! Work done elsewhere, in other processes or on other machines, with the bits it would have had here.
//!
//! Training has three heavy steps: sums over blocks of samples for row weights and the error of the outputs
//! ([`SumsTask`](crate::train::SumsTask)), statistics of a group over some samples, and the rows over those statistics.
//! Statistics of rows of single units are a pure function of a few bytes ([`StatisticsTask`]), and so is a block of rows to
//! solve or to bound ([`RowsTask`]). Networks with feature maps are walked through by [`Shard`](crate::train::Shard)s of the samples,
//! whose state follows from the steps they were told. A [`Delegate`] runs all of these wherever it likes, as often as it
//! likes: a lost result is computed again and is the same.

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

/// Whoever does the heavy steps in place of this process's threads.
pub trait Delegate: Sync {
    /// The task's statistics over its samples.
    fn statistics(&self, task: &StatisticsTask) -> Result<Statistics>;
    /// The rows of every task over one design, handed to `take` in order as they come.
    fn rows(
        &self,
        statistics: &Statistics,
        tasks: &[RowsTask],
        take: &mut dyn FnMut(usize, Vec<f64>) -> Result<()>,
    ) -> Result<()>;
    /// Begins a walk of all samples through the layers of a network with feature maps; returns its number.
    fn begin_walk(&self, task: &WalkTask) -> Result<usize>;
    /// Statistics of a group, with so many features and targets, over all samples after these further steps.
    fn walk(&self, walk: usize, steps: &[Step], group: usize, shape: (usize, usize)) -> Result<Statistics>;
    /// Nobody will ask about that walk again.
    fn end_walk(&self, walk: usize);
    /// The sums of every block of samples, handed to `take` in order as they come.
    fn sums(&self, task: &SumsTask, take: &mut dyn FnMut(usize, Vec<f64>) -> Result<()>) -> Result<()>;
}
