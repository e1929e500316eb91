//! Rivals of the library's training on the same states, with the same counter and the same held-out inputs.
//!
//! A rival sees one group of rows at a time: it receives the group's statistics, the baseline's weights and a budget,
//! and returns rows of weights. It is a [`RowMethod`](simplicit::train::RowMethod) in the library's own walk, so a
//! group may be the units of a layer or the channels of a convolution.

pub mod evolve;
mod evolved;
pub mod experiment;
pub mod page;
pub mod rivals;
pub mod stitch;
pub mod walk;
