//! The report of training about its model.

use crate::train::{Allocation, BoundRefit, OutputRefit, Reconstruction, RowReport};

/// One of the models that a search fitted.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TriedModel {
    /// The strength: a factor on the penalty, or the price of a non-zero.
    pub strength: f64,
    /// Share of the baseline's non-zeros that it removed.
    pub sparsity: f64,
    /// Error of its outputs on the training samples, relative to the baseline's, before any refit in the output metric.
    pub output_error: f64,
}

/// The report of training about its model.
#[derive(Debug, Clone)]
pub struct TrainReport {
    /// A report for every row: states, then outputs.
    pub rows: Vec<RowReport>,
    /// The strength that was used: a factor on the penalty, or the price of a non-zero.
    pub strength: f64,
    /// RMS of the mismatch of the outputs divided by the RMS of the outputs, on the training samples at the model's
    /// own states.
    pub training_error: f64,
    /// The models of the search, in the order in which they were fitted.
    pub path: Vec<TriedModel>,
    /// The results of the reconstruction over the next operations, if it was asked for.
    pub reconstruction: Option<Reconstruction>,
    /// The results of the refit in the output metric, if there was one.
    pub output_refit: Option<OutputRefit>,
    /// The results of the refit by linear bounds, if it was asked for.
    pub bound_refit: Option<BoundRefit>,
    /// The results of the allocation over layers, if it was asked for.
    pub allocation: Option<Allocation>,
    /// Share of held-out samples for which the model predicts the baseline's class, if
    /// [`train_to_max_drop`](crate::train::train_to_max_drop) or [`path`](crate::train::path()) measured it.
    pub agreement: Option<f64>,
}

impl TrainReport {
    /// Number of rows whose last convex solve ended at a limit.
    pub fn rows_at_limit(&self) -> usize {
        self.rows.iter().filter(|r| r.at_limit).count()
    }

    /// The largest relative gap of the last convex solve of every row; `None` without a convex solve.
    pub fn max_relative_gap(&self) -> Option<f64> {
        self.rows.iter().filter_map(|r| r.relative_gap).reduce(f64::max)
    }

    /// Number of cardinality rows that have a lower bound; `None` if none has.
    pub fn rows_bounded(&self) -> Option<usize> {
        self.distances().map(|d| d.len())
    }

    /// Number of cardinality rows whose answers are proven optimal; `None` if no row has a bound.
    pub fn rows_proven(&self) -> Option<usize> {
        self.distances().map(|_| self.rows.iter().filter(|r| r.proven).count())
    }

    /// The median of the distances of rows to their lower bounds (the larger of the two middle ones); `None` if no
    /// row has a bound.
    pub fn median_bound_distance(&self) -> Option<f64> {
        self.distances().map(|d| d[d.len() / 2])
    }

    /// The largest distance of a row to its lower bound; `None` if no row has a bound.
    pub fn max_bound_distance(&self) -> Option<f64> {
        self.distances().and_then(|d| d.last().copied())
    }

    /// All distances, smallest first.
    fn distances(&self) -> Option<Vec<f64>> {
        let mut distances: Vec<f64> = self.rows.iter().filter_map(|r| r.bound_distance).collect();
        distances.sort_unstable_by(f64::total_cmp);
        (!distances.is_empty()).then_some(distances)
    }

    /// RMS of the mismatch of all rows divided by the RMS of their targets: a unit that hardly fires hardly counts.
    pub fn refit_residual(&self) -> f64 {
        let residual: f64 = self.rows.iter().map(|r| (r.relative_residual * r.target_rms).powi(2)).sum();
        let energy: f64 = self.rows.iter().map(|r| r.target_rms.powi(2)).sum();
        if energy > 0.0 { (residual / energy).sqrt() } else { 0.0 }
    }
}
