//! Work on several threads: an ordered map over blocks with an explicit number of threads; a process keeps its
//! threads.
//!
//! Blocks have fixed sizes chosen by the caller and results come back in block order, so what is computed from them is
//! bit-identical for any number of threads.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};

use crate::kernels::together;
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

    /// The number of threads.
    pub fn get(self) -> usize {
        self.0.get()
    }
}

/// A request to stop, shared by the thread that asks and the threads that work.
#[derive(Debug, Default, Clone)]
pub struct Cancel(std::sync::Arc<AtomicBool>);

impl Cancel {
    /// A request to stop that has not been made yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes the request; work stops at its next block or row.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Whether the request has been made.
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// [`Error::Cancelled`] if the request has been made.
    pub fn check(&self) -> Result<()> {
        if self.is_cancelled() { Err(Error::Cancelled) } else { Ok(()) }
    }
}

/// Runs `work(0), …, work(blocks − 1)` and returns the results in order; the first error (of the lowest block among
/// those that ran) is returned and stops the rest.
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
    // A result waits in slot `block % window`; a block begins only when it is less than `window` ahead of those that
    // were handed over.
    let board = Mutex::new(Board { slots: (0..window).map(|_| None).collect(), next: 0, taken: 0, stop: false });
    let changed = Condvar::new();
    let lock = || board.lock().unwrap_or_else(PoisonError::into_inner);
    let wait = |guard| changed.wait(guard).unwrap_or_else(PoisonError::into_inner);
    // Runs one block that this thread has claimed. A panic in `work` must not leave other threads waiting.
    let run = |block: usize| {
        let stop = OnDrop(|| {
            if std::thread::panicking() {
                lock().stop = true;
                changed.notify_all();
            }
        });
        let value = work(block);
        drop(stop);
        lock().slots[block % window] = Some(value);
        changed.notify_all();
    };
    let helper = || {
        loop {
            let mut guard = lock();
            let block = loop {
                if guard.stop || guard.next >= blocks {
                    return;
                }
                match guard.claim(window) {
                    Some(block) => break block,
                    None => guard = wait(guard),
                }
            };
            drop(guard);
            run(block);
        }
    };
    together(threads, &helper, || {
        let _stop = OnDrop(|| {
            lock().stop = true;
            changed.notify_all();
        });
        for block in 0..blocks {
            let mut guard = lock();
            let value = loop {
                if let Some(value) = guard.slots[block % window].take() {
                    break value;
                }
                if guard.stop {
                    return Err(Error::Cancelled);
                }
                // A thread that waits for a block works on the next one meanwhile.
                if guard.next < blocks
                    && let Some(other) = guard.claim(window)
                {
                    drop(guard);
                    run(other);
                    guard = lock();
                } else {
                    guard = wait(guard);
                }
            };
            guard.taken = block + 1;
            drop(guard);
            changed.notify_all();
            take(block, value?)?;
        }
        Ok(())
    })
}

/// Runs `work` on every block on up to `threads` threads, in any order and without results; an error stops the rest,
/// and that of the lowest block is returned.
pub fn each(threads: Threads, blocks: usize, work: impl Fn(usize) -> Result<()> + Sync) -> Result<()> {
    let next = AtomicUsize::new(0);
    let first: Mutex<Option<(usize, Error)>> = Mutex::new(None);
    let lock = || first.lock().unwrap_or_else(PoisonError::into_inner);
    let helper = || {
        loop {
            let block = next.fetch_add(1, Ordering::Relaxed);
            if block >= blocks {
                return;
            }
            if let Err(error) = work(block) {
                // All blocks below this one have begun, so the lowest error will be found.
                next.store(blocks, Ordering::Relaxed);
                let mut first = lock();
                if first.as_ref().is_none_or(|(known, _)| block < *known) {
                    *first = Some((block, error));
                }
            }
        }
    };
    together(threads.get().min(blocks), &helper, helper);
    lock().take().map_or(Ok(()), |(_, error)| Err(error))
}

struct Board<T> {
    slots: Vec<Option<Result<T>>>,
    next: usize,
    taken: usize,
    stop: bool,
}

impl<T> Board<T> {
    fn claim(&mut self, window: usize) -> Option<usize> {
        (self.next < self.taken + window).then(|| {
            self.next += 1;
            self.next - 1
        })
    }
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
    fn each_block_runs_once_and_the_lowest_error_wins() {
        for threads in [1, 2, 8] {
            let ran: Vec<AtomicUsize> = (0..50).map(|_| AtomicUsize::new(0)).collect();
            each(Threads::new(threads), 50, |b| {
                ran[b].fetch_add(1, Ordering::Relaxed);
                Ok(())
            })
            .unwrap();
            assert!(ran.iter().all(|r| r.load(Ordering::Relaxed) == 1));
            let out = each(Threads::new(threads), 50, |b| {
                if b % 2 == 0 { Ok(()) } else { Err(Error::setting("block", "even", b)) }
            });
            assert!(out.unwrap_err().to_string().contains("got 1"), "{threads}");
        }
    }

    #[test]
    #[should_panic(expected = "block 7")]
    fn a_panic_of_a_block_ends_the_fold() {
        let _ = map(Threads::new(3), 20, |b| if b == 7 { std::panic::panic_any(format!("block {b}")) } else { Ok(b) });
    }

    #[test]
    fn the_taker_may_stop_too() {
        let out = fold(Threads::new(2), 1000, Ok, |b, _| if b == 3 { Err(Error::Cancelled) } else { Ok(()) });
        assert!(matches!(out, Err(Error::Cancelled)));
    }
}
