//! The one place where threads start: an ordered map over blocks with an explicit number of threads.
//!
//! Blocks have fixed sizes chosen by the caller and results come back in block order, so what is computed from them is
//! bit-identical for any number of threads.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::{Error, Result};

/// How many threads a piece of work may use; at least one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Threads(std::num::NonZeroUsize);

impl Threads {
    /// Exactly this many; zero becomes one.
    pub fn new(count: usize) -> Self {
        Self(std::num::NonZeroUsize::new(count).unwrap_or(std::num::NonZeroUsize::MIN))
    }

    /// One thread.
    pub fn one() -> Self {
        Self::new(1)
    }

    /// As many as the machine offers this process.
    pub fn available() -> Self {
        Self(std::thread::available_parallelism().unwrap_or(std::num::NonZeroUsize::MIN))
    }

    /// The number.
    pub fn get(self) -> usize {
        self.0.get()
    }
}

/// A request to stop, shared between whoever asks and whoever works.
#[derive(Debug, Default, Clone)]
pub struct Cancel(std::sync::Arc<AtomicBool>);

impl Cancel {
    /// Nobody has asked yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Ask; work in flight stops at its next block or row.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Whether anybody asked.
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// [`Error::Cancelled`] once somebody asked.
    pub fn check(&self) -> Result<()> {
        if self.is_cancelled() { Err(Error::Cancelled) } else { Ok(()) }
    }
}

/// `work(0), …, work(blocks − 1)` in order; the first error (lowest block among those run) wins and stops the rest.
pub fn map<T: Send>(threads: Threads, blocks: usize, work: impl Fn(usize) -> Result<T> + Sync) -> Result<Vec<T>> {
    let mut out = Vec::with_capacity(blocks);
    fold(threads, blocks, work, |_, value| {
        out.push(value);
        Ok(())
    })?;
    Ok(out)
}

/// Runs `work` on every block on `threads` threads and hands the results to `take` on the calling thread in block
/// order. At most `2 × threads` results wait at any time, so memory does not grow with the number of blocks.
pub fn fold<T: Send>(
    threads: Threads,
    blocks: usize,
    work: impl Fn(usize) -> Result<T> + Sync,
    mut take: impl FnMut(usize, T) -> Result<()>,
) -> Result<()> {
    let threads = threads.get().min(blocks);
    if threads <= 1 {
        for block in 0..blocks {
            take(block, work(block)?)?;
        }
        return Ok(());
    }
    let window = 2 * threads;
    let next = AtomicUsize::new(0);
    let stop = AtomicBool::new(false);
    // Slot `block % window`; `taken` blocks have been handed over, so block b may start once b < taken + window.
    let board = Mutex::new(Board { slots: (0..window).map(|_| None).collect(), taken: 0 });
    let changed = std::sync::Condvar::new();
    let lock = || board.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                // A panic in `work` must not leave the taker waiting.
                let _wake = OnDrop(|| {
                    if std::thread::panicking() {
                        stop.store(true, Ordering::Relaxed);
                        changed.notify_all();
                    }
                });
                loop {
                    let block = next.fetch_add(1, Ordering::Relaxed);
                    if block >= blocks {
                        return;
                    }
                    let mut guard = lock();
                    while block >= guard.taken + window && !stop.load(Ordering::Relaxed) {
                        guard = changed.wait(guard).unwrap_or_else(std::sync::PoisonError::into_inner);
                    }
                    drop(guard);
                    if stop.load(Ordering::Relaxed) {
                        return;
                    }
                    let value = work(block);
                    lock().slots[block % window] = Some(value);
                    changed.notify_all();
                }
            });
        }
        let result = (|| {
            for block in 0..blocks {
                let mut guard = lock();
                let value = loop {
                    match guard.slots[block % window].take() {
                        Some(value) => break value,
                        None if stop.load(Ordering::Relaxed) => return Err(Error::Cancelled),
                        None => guard = changed.wait(guard).unwrap_or_else(std::sync::PoisonError::into_inner),
                    }
                };
                guard.taken = block + 1;
                drop(guard);
                changed.notify_all();
                take(block, value?)?;
            }
            Ok(())
        })();
        stop.store(true, Ordering::Relaxed);
        drop(lock());
        changed.notify_all();
        result
    })
}

struct Board<T> {
    slots: Vec<Option<Result<T>>>,
    taken: usize,
}

struct OnDrop<F: FnMut()>(F);

impl<F: FnMut()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_is_kept_for_any_number_of_threads() {
        for threads in [1, 2, 3, 8] {
            let out = map(Threads::new(threads), 100, |b| {
                if b % 7 == 0 {
                    std::thread::sleep(std::time::Duration::from_micros(300));
                }
                Ok(b * b)
            });
            assert_eq!(out.unwrap(), (0..100).map(|b| b * b).collect::<Vec<_>>());
        }
    }

    #[test]
    fn an_error_stops_the_work() {
        let ran = AtomicUsize::new(0);
        let out = map(Threads::new(3), 10_000, |b| {
            ran.fetch_add(1, Ordering::Relaxed);
            if b == 5 { Err(Error::Cancelled) } else { Ok(b) }
        });
        assert!(matches!(out, Err(Error::Cancelled)));
        assert!(ran.load(Ordering::Relaxed) < 100);
    }

    #[test]
    fn the_taker_may_stop_too() {
        let out = fold(Threads::new(2), 1000, Ok, |b, _| if b == 3 { Err(Error::Cancelled) } else { Ok(()) });
        assert!(matches!(out, Err(Error::Cancelled)));
    }
}
