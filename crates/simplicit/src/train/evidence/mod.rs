//! Data about a group that are needed before its rows are solved: walks over the samples, statistics, weights of
//! rows.

pub(super) mod device_walk;
pub(super) mod gather;
pub(super) mod importance;
pub(super) mod joint_importance;
pub(super) mod positions;
pub(super) mod shard;
pub(super) mod sums_task;
pub(super) mod walk;
pub(super) mod walks;
