//! What several test files share.

#![allow(dead_code, missing_docs, unreachable_pub, clippy::unwrap_used)] // Each test file uses its own part.

pub mod adjoint;
pub mod paper;
pub mod reference;
pub mod rows;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Mutex;

use simplicit::train::{Keep, Key};

/// A [`Keep`] in memory, to look at what training computed on the way.
#[derive(Default)]
pub struct Notes(pub Mutex<BTreeMap<String, Vec<u8>>>);

impl Keep for Notes {
    fn get(&self, key: &Key) -> simplicit::Result<Option<Vec<u8>>> {
        Ok(self.0.lock().unwrap().get(&key.to_string()).cloned())
    }

    fn put(&self, key: &Key, value: &[u8]) -> simplicit::Result<()> {
        self.0.lock().unwrap().insert(key.to_string(), value.to_vec());
        Ok(())
    }
}

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
