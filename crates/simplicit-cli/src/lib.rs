//! The library behind the binary `simplicit`, also used by other front ends.

mod args;
mod baseline;
mod cluster;
mod commands;
mod embedded;
mod exit;
pub mod front;
mod help;
mod interrupt;
mod measure;
mod operands;
mod overall;
mod paths;
mod program;
mod progress;
mod recipe;
mod remote;
pub mod report;
mod reproduce;
mod results;
mod robustness;
mod settings;
mod summary;
mod table;
mod training;

pub use program::main;

#[cfg(test)]
use program::{Cli, Command};
