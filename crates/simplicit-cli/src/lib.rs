//! What the binary `simplicit` is made of.

pub mod report;
