//! What several test files share.

#![allow(dead_code, missing_docs, unreachable_pub, clippy::unwrap_used)] // Each test file uses its own part.

pub mod adjoint;
pub mod paper;
pub mod reference;
pub mod rows;

use std::path::PathBuf;

/// A file under tests/fixtures.
pub fn fixture(name: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures")).join(name)
}

/// A file under data/.
pub fn data(name: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../data")).join(name)
}

/// Value k of every fixture of floating-point numbers; see make_fixtures.py.
pub fn number(k: usize) -> f64 {
    (integer(k) as f64 - 11.0) / 4.0
}

/// Value k of every fixture of integers.
pub fn integer(k: usize) -> u32 {
    (k * 7 % 23) as u32
}
