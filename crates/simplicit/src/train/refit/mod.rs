//! Refits the weights on a known support: the model linearised in its weights, and the refits in the output metric
//! and by linear bounds.

pub(super) mod bound_refit;
pub(super) mod linearised;
pub(super) mod output_metric;
pub(super) mod output_refit;
pub(super) mod reconstruct;
pub(super) mod row_blocks;
