//! What a caller passes to long work (threads, a way to stop, a place for results), and the progress that the work
//! reports.

use crate::parallel::{Cancel, Threads};
use crate::train::{Forget, Keep};

/// How long work is run: on which threads, how it is stopped, where it keeps results, and where it reports progress.
pub struct Run<'a> {
    /// Threads to use.
    pub threads: Threads,
    /// A request to stop.
    pub cancel: &'a Cancel,
    /// Where intermediate results are kept, and which other processes do the heavy steps.
    pub keep: &'a dyn Keep,
    /// Called with every [`Progress`].
    pub progress: &'a mut dyn FnMut(Progress),
}

/// All threads of the machine; keeps no results, reports no progress and cannot be stopped.
impl Default for Run<'_> {
    fn default() -> Self {
        static NEVER: std::sync::LazyLock<Cancel> = std::sync::LazyLock::new(Cancel::new);
        // A closure without captures takes no memory, so nothing leaks.
        let progress = Box::leak(Box::new(|_: Progress| {}));
        Self { threads: Threads::available(), cancel: &NEVER, keep: &Forget, progress }
    }
}

/// The large steps of a compression.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Row weights are computed from the effect of errors on the outputs.
    RowWeights,
    /// Models are fitted.
    Training {
        /// Number of groups of rows in each model.
        groups: usize,
    },
    /// The model that was found is run on the samples.
    Measuring,
}

/// Progress of training.
#[derive(Debug, Clone, PartialEq)]
pub enum Progress {
    /// A large step begins.
    Phase(Phase),
    /// Samples of a group have been gathered.
    Samples {
        /// The group.
        group: String,
        /// Number of samples so far.
        done: usize,
        /// Number of all samples.
        total: usize,
    },
    /// Rows of a group have been solved.
    Rows {
        /// The group.
        group: String,
        /// Number of rows so far.
        done: usize,
        /// Number of all rows.
        total: usize,
    },
    /// A whole model was fitted during a search.
    Model {
        /// Its strength: a factor on the penalty, or the price of a non-zero.
        strength: f64,
        /// Its sparsity.
        sparsity: f64,
    },
    /// A pass over all groups begins, in which each group is expensive. Work is counted in the same unit over a whole
    /// training.
    Pass {
        /// Work of this pass.
        work: f64,
        /// Work expected after it.
        left: f64,
    },
    /// A group of that pass is done.
    Group {
        /// The share of the pass that is done.
        share: f64,
    },
    /// The memory that the training will need, in bytes, before it begins.
    Memory {
        /// Bytes with all layers of all samples in memory.
        needed: u64,
        /// Bytes with all of those layers in a file.
        least: u64,
        /// Bytes that are allowed; `None` if no budget is set and the free memory is not known.
        budget: Option<u64>,
    },
    /// A segment of the reconstruction over the next operations is done.
    Reconstruct {
        /// Number of segments so far.
        segment: usize,
        /// Number of all segments.
        segments: usize,
    },
    /// A round of the refit in the output metric is done.
    OutputRefit {
        /// Number of rounds so far.
        round: usize,
        /// The most rounds.
        rounds: usize,
        /// The present value of its objective.
        objective: f64,
    },
    /// The refit by linear bounds begins.
    BoundRefitBegins {
        /// Number of samples that it uses.
        samples: usize,
        /// Number of samples that there are.
        of: usize,
        /// Multiply-adds of their intervals in all rounds, estimated from the first samples.
        multiply_adds: u64,
    },
    /// A round of the refit by linear bounds is done.
    BoundRefit {
        /// Number of rounds so far.
        round: usize,
        /// Number of all rounds.
        rounds: usize,
        /// Share of held-out samples that are certified now.
        certified: f64,
    },
}
