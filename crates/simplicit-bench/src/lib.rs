//! Rivals of the library's training on the same states, the same counter and the same held-out inputs.
//!
//! A rival sees one group of rows at a time: its statistics, the baseline's weights and a budget in, rows of weights
//! out. What a row and a feature are is the statistics' business, so a group may as well be the taps of a convolution.

pub mod experiment;
pub mod groups;
pub mod page;
pub mod rivals;
