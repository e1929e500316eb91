//! Weights on a support that is found: the model linearised in its weights, and the refit in the output metric.

pub(super) mod linearised;
pub(super) mod output_metric;
pub(super) mod output_refit;
pub(super) mod row_blocks;
