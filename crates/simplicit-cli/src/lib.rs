//! What the binary `simplicit` is made of, for it and for other front ends.

mod args;
mod baseline;
mod commands;
mod embedded;
mod exit;
pub mod front;
mod interrupt;
mod measure;
mod program;
mod progress;
mod recipe;
pub mod report;
mod reproduce;
mod results;
mod robustness;
mod settings;
mod summary;
mod table;
mod training;

pub use program::main;

use program::Cli;
#[cfg(test)]
use program::Command;
