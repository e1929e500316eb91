//! The tests of the command line in one program: they link once and share the cores.

#![allow(dead_code, missing_docs, unreachable_pub, clippy::unwrap_used, clippy::panic)]

#[path = "../fashion/mod.rs"]
mod fashion;
#[path = "../program/mod.rs"]
mod program;

mod contract;
mod guides;
mod memory;
mod mistakes;
mod prove;
mod quickstart;
mod report_browser;
mod reproduce;
mod robustness;
mod safety;
mod spellings;
