//! Intermediate results that outlive the process: statistics and rows are kept as soon as they are computed.
//!
//! Training is deterministic, so a run that is started again takes the same decisions and finds what it computed before
//! under the same keys.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use crate::Result;
use crate::train::{Delegate, Key};

/// A place for named results. A value is complete or does not exist.
pub trait Keep: Sync {
    /// The value of an earlier [`Keep::put`].
    fn get(&self, key: &Key) -> Result<Option<Vec<u8>>>;
    /// Keeps a value.
    fn put(&self, key: &Key, value: &[u8]) -> Result<()>;
    /// Whether [`Keep::put`] stores its value; if not, callers need not serialise one.
    fn keeps(&self) -> bool {
        true
    }
    /// A folder for data that are too large for memory; by default that of the system's temporary files.
    fn folder(&self) -> Option<&std::path::Path> {
        None
    }
    /// The other processes that do the heavy steps; by default there are none.
    fn delegate(&self) -> Option<&dyn Delegate> {
        None
    }
}

/// Keeps nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct Forget;

impl Keep for Forget {
    fn get(&self, _: &Key) -> Result<Option<Vec<u8>>> {
        Ok(None)
    }

    fn put(&self, _: &Key, _: &[u8]) -> Result<()> {
        Ok(())
    }

    fn keeps(&self) -> bool {
        false
    }
}

/// Keeps nothing, and uses the delegate of another.
pub(super) struct Fleeting<'a>(pub(super) &'a dyn Keep);

impl Keep for Fleeting<'_> {
    fn get(&self, _: &Key) -> Result<Option<Vec<u8>>> {
        Ok(None)
    }

    fn put(&self, _: &Key, _: &[u8]) -> Result<()> {
        Ok(())
    }

    fn keeps(&self) -> bool {
        false
    }

    fn folder(&self) -> Option<&std::path::Path> {
        self.0.folder()
    }

    fn delegate(&self) -> Option<&dyn Delegate> {
        self.0.delegate()
    }
}

/// Keeps one set of rows in memory, and uses the delegate of another.
pub(super) struct Remembered<'a> {
    pub(super) keep: &'a dyn Keep,
    /// Whether values are remembered at present.
    pub(super) open: bool,
    values: Mutex<BTreeMap<String, Vec<u8>>>,
}

impl<'a> Remembered<'a> {
    pub(super) fn new(keep: &'a dyn Keep) -> Self {
        Self { keep, open: false, values: Mutex::new(BTreeMap::new()) }
    }

    /// Forgets all values.
    pub(super) fn forget(&mut self) {
        self.values = Mutex::new(BTreeMap::new());
    }
}

impl Keep for Remembered<'_> {
    fn get(&self, key: &Key) -> Result<Option<Vec<u8>>> {
        // A thread that panicked while it held the lock left the map in a consistent state.
        Ok(self.values.lock().unwrap_or_else(PoisonError::into_inner).get(&key.to_string()).cloned())
    }

    fn put(&self, key: &Key, value: &[u8]) -> Result<()> {
        // Statistics are kept elsewhere, as far as memory allows.
        if key.is_statistics() {
            return Ok(());
        }
        self.values.lock().unwrap_or_else(PoisonError::into_inner).insert(key.to_string(), value.to_vec());
        Ok(())
    }

    fn keeps(&self) -> bool {
        self.open
    }

    fn folder(&self) -> Option<&std::path::Path> {
        self.keep.folder()
    }

    fn delegate(&self) -> Option<&dyn Delegate> {
        self.keep.delegate()
    }
}

/// The numbers kept under `key`; `None` if there are none, or not this many.
pub(crate) fn find(keep: &dyn Keep, key: &Key, length: usize) -> Result<Option<Vec<f64>>> {
    let bytes = keep.get(key)?.filter(|bytes| bytes.len() == 8 * length);
    Ok(bytes.map(|bytes| bytes.as_chunks::<8>().0.iter().map(|c| f64::from_le_bytes(*c)).collect()))
}

/// Keeps numbers.
pub(crate) fn put(keep: &dyn Keep, key: &Key, values: &[f64]) -> Result<()> {
    if !keep.keeps() {
        return Ok(());
    }
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    keep.put(key, &bytes)
}

/// The numbers kept under `key`, or computed and kept now. A kept value of the wrong length is computed again.
pub(crate) fn numbers(
    keep: &dyn Keep,
    key: &Key,
    length: usize,
    compute: impl FnOnce() -> Result<Vec<f64>>,
) -> Result<Vec<f64>> {
    if let Some(values) = find(keep, key, length)? {
        return Ok(values);
    }
    let values = compute()?;
    put(keep, key, &values)?;
    Ok(values)
}
