//! What a caller gives to long work (threads, a way to stop, a place for results) and the progress that the work reports.

use crate::parallel::{Cancel, Threads};
use crate::train::{Forget, Keep};

/// How long work runs: on which threads, how it is stopped, where it keeps results, and to whom it reports.
pub struct Run<'a> {
    /// Threads to use.
    pub threads: Threads,
    /// A request to stop.
    pub cancel: &'a Cancel,
    /// Where intermediate results are kept, and which other process does the heavy steps.
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
    /// Rows are weighed by what their errors do to the outputs.
    RowWeights,
    /// Models are fitted.
    Training {
        /// Groups of rows in each of them.
        groups: usize,
    },
    /// The model found is run on the samples.
    Measuring,
}

/// What training is doing.
#[derive(Debug, Clone, PartialEq)]
pub enum Progress {
    /// A large step begins.
    Phase(Phase),
    /// Samples of a group have been gathered.
    Samples {
        /// The group.
        group: String,
        /// Samples so far.
        done: usize,
        /// Samples in all.
        total: usize,
    },
    /// Rows of a group have been solved.
    Rows {
        /// The group.
        group: String,
        /// Rows so far.
        done: usize,
        /// Rows in all.
        total: usize,
    },
    /// A whole model was fitted on the way to a target.
    Model {
        /// Factor on the penalty.
        strength: f64,
        /// The sparsity it gave.
        sparsity: f64,
    },
    /// A pass over all groups begins, where each of them is expensive. Work is counted in one unit over a whole training.
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
    /// What the training to come holds in memory, in bytes, before it begins.
    Memory {
        /// With all layers of all samples in memory.
        needed: u64,
        /// With all of them in a file.
        least: u64,
        /// What is allowed; `None` where no budget is set and the free memory is not known.
        budget: Option<u64>,
    },
    /// A segment of the reconstruction over the next operations is done.
    Reconstruct {
        /// Segments so far.
        segment: usize,
        /// Segments in all.
        segments: usize,
    },
    /// A round of the refit in the output metric is done.
    OutputRefit {
        /// Rounds so far.
        round: usize,
        /// Rounds at most.
        rounds: usize,
        /// What it minimises, now.
        objective: f64,
    },
    /// The refit by linear bounds begins.
    BoundRefitBegins {
        /// Samples that it takes.
        samples: usize,
        /// Samples that there are.
        of: usize,
        /// What their intervals cost in all rounds, by the first samples.
        multiply_adds: u64,
    },
    /// A round of the refit by linear bounds is done.
    BoundRefit {
        /// Rounds so far.
        round: usize,
        /// Rounds in all.
        rounds: usize,
        /// Share of held-out samples that are certified now.
        certified: f64,
    },
}
