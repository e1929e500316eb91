//! The rows of a group: their problems and prices, their solutions, and the model that is built of them.

pub(super) mod build;
pub(super) mod group;
pub(super) mod method;
pub(super) mod prices;
pub(super) mod problems;
pub(super) mod solve;
