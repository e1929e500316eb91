//! Threads that live as long as the process, and a crew of them that shares the parts of one layer after the other.
//!
//! A call borrows idle threads and gives them back; it never waits for one. So the caller must be able to do all of
//! the work alone, and nested calls cannot block each other.

use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// The most threads of one call, the caller included.
const MOST: usize = 256;

/// Work that borrows from the caller; the pointer does not carry that lifetime.
#[derive(Clone, Copy)]
struct Job(*const (dyn Fn() + Sync));

// SAFETY: what it points to is `Sync`, and alive until the caller has seen the job end or taken it back.
unsafe impl Send for Job {}

enum Assignment {
    None,
    Asked(Job),
    Busy,
    Ended(Option<Box<dyn Any + Send>>),
}

struct Worker {
    assignment: Mutex<Assignment>,
    changed: Condvar,
}

struct Pool {
    /// The process that the threads belong to: a forked process has none of them.
    process: u32,
    /// Cores in addition to the caller's. The number is kept, because asking the system takes files and memory.
    cores: usize,
    idle: Vec<&'static Worker>,
    threads: usize,
}

static POOL: Mutex<Pool> = Mutex::new(Pool { process: 0, cores: 0, idle: Vec::new(), threads: 0 });

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn wait<'a, T>(changed: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    changed.wait(guard).unwrap_or_else(PoisonError::into_inner)
}

impl Worker {
    fn serve(&self) {
        let mut assignment = lock(&self.assignment);
        loop {
            let Assignment::Asked(Job(work)) = *assignment else {
                assignment = wait(&self.changed, assignment);
                continue;
            };
            *assignment = Assignment::Busy;
            drop(assignment);
            // SAFETY: the caller waits for `Ended` before the work goes out of scope.
            let result = catch_unwind(AssertUnwindSafe(|| unsafe { (*work)() }));
            assignment = lock(&self.assignment);
            *assignment = Assignment::Ended(result.err());
            self.changed.notify_all();
        }
    }

    fn ask(&self, job: Job) {
        *lock(&self.assignment) = Assignment::Asked(job);
        self.changed.notify_all();
    }

    /// Waits for the job to end, or takes it back if it has not begun.
    fn release(&self) -> Option<Box<dyn Any + Send>> {
        let mut assignment = lock(&self.assignment);
        while matches!(*assignment, Assignment::Busy) {
            assignment = wait(&self.changed, assignment);
        }
        match std::mem::replace(&mut *assignment, Assignment::None) {
            Assignment::Ended(panic) => panic,
            _ => None,
        }
    }
}

/// Borrows idle threads, at most `helpers`; new ones start while the process has fewer than this call or the machine
/// asks for.
fn borrow(helpers: usize, into: &mut [Option<&'static Worker>; MOST]) -> usize {
    let mut pool = lock(&POOL);
    let process = std::process::id();
    if pool.process != process {
        let cores = std::thread::available_parallelism().map_or(0, |n| n.get() - 1);
        *pool = Pool { process, cores, idle: Vec::new(), threads: 0 };
    }
    let most = pool.cores.max(helpers);
    let mut count = 0;
    while count < helpers {
        let worker = match pool.idle.pop() {
            Some(worker) => worker,
            None if pool.threads < most => {
                let worker: &'static Worker =
                    Box::leak(Box::new(Worker { assignment: Mutex::new(Assignment::None), changed: Condvar::new() }));
                let name = format!("simplicit {}", pool.threads);
                // Without another thread the caller works alone.
                let Ok(_) = std::thread::Builder::new().name(name).spawn(|| worker.serve()) else { break };
                pool.threads += 1;
                let all = pool.threads;
                pool.idle.reserve(all);
                worker
            }
            None => break,
        };
        into[count] = Some(worker);
        count += 1;
    }
    count
}

/// Runs `own` on the calling thread and `helper` on up to `threads − 1` others, each at most once. Fewer threads help
/// if others are busy, and a helper that has not begun when `own` ends does not run. A panic in any of them reaches
/// the caller after all have ended.
pub fn together<R>(threads: usize, helper: &(dyn Fn() + Sync), own: impl FnOnce() -> R) -> R {
    let helpers = threads.clamp(1, MOST) - 1;
    if helpers == 0 {
        return own();
    }
    let mut workers = [None; MOST];
    let count = borrow(helpers, &mut workers);
    // SAFETY: only the lifetime changes; every worker is released below, before this function returns or unwinds.
    let job = Job(unsafe {
        std::mem::transmute::<*const (dyn Fn() + Sync + '_), *const (dyn Fn() + Sync + 'static)>(helper)
    });
    workers[..count].iter().flatten().for_each(|w| w.ask(job));
    let result = catch_unwind(AssertUnwindSafe(own));
    let mut panic = None;
    for worker in workers[..count].iter().flatten() {
        panic = worker.release().or(panic);
    }
    let mut pool = lock(&POOL);
    if pool.process == std::process::id() {
        pool.idle.extend(workers[..count].iter().flatten());
    }
    drop(pool);
    match (result, panic) {
        (Err(own), _) => resume_unwind(own),
        (_, Some(other)) => resume_unwind(other),
        (Ok(value), None) => value,
    }
}

/// Threads that stay awake for one piece of work after the other, such as the layers of a single sample.
pub struct Crew<'a> {
    shared: Option<&'a Shared>,
    threads: usize,
    /// Number of rounds in which work was shared; the cell also keeps a crew on the thread that owns it.
    round: Cell<u32>,
}

impl std::fmt::Debug for Crew<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Crew").field("threads", &self.threads).finish_non_exhaustive()
    }
}

struct Shared {
    /// Number of the round, number of its parts and the next part, in 32, 16 and 16 bits.
    next: AtomicU64,
    done: AtomicUsize,
    closed: AtomicBool,
    work: UnsafeCell<Option<*const (dyn Fn(usize) + Sync)>>,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

// SAFETY: `work` is written by the crew's owner between rounds and read by who holds a part of the round.
unsafe impl Sync for Shared {}

/// How often a thread checks for work before it lets other threads run.
const LOOKS: u32 = 4000;

fn pause(looks: &mut u32) {
    *looks += 1;
    if *looks < LOOKS { std::hint::spin_loop() } else { std::thread::yield_now() }
}

impl Shared {
    /// Takes one part of the open round and does it.
    fn take(&self) -> bool {
        let seen = self.next.load(Ordering::Acquire);
        let (parts, part) = (seen >> 16 & 0xffff, seen & 0xffff);
        if part >= parts || self.next.compare_exchange(seen, seen + 1, Ordering::AcqRel, Ordering::Relaxed).is_err() {
            return part < parts;
        }
        // SAFETY: the round does not end, and its work does not change, before this part is counted as done.
        let result = catch_unwind(AssertUnwindSafe(|| unsafe {
            if let Some(work) = *self.work.get() {
                (*work)(part as usize);
            }
        }));
        if let Err(panic) = result {
            *lock(&self.panic) = Some(panic);
        }
        self.done.fetch_add(1, Ordering::Release);
        true
    }
}

impl Crew<'_> {
    /// A crew of the calling thread alone.
    pub fn alone() -> Self {
        Self { shared: None, threads: 1, round: Cell::new(0) }
    }

    /// The most threads that work together.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Runs `work(0), …, work(parts − 1)`, in any order and on several threads.
    pub fn split(&self, parts: usize, work: &(dyn Fn(usize) + Sync)) {
        let Some(shared) = self.shared.filter(|_| (2..0xffff).contains(&parts)) else {
            return (0..parts).for_each(work);
        };
        self.round.set(self.round.get().wrapping_add(1));
        // SAFETY: only the lifetime changes; no thread has a part of this round after this function ends, and the
        // last round has ended, so no thread reads `work` now.
        unsafe {
            *shared.work.get() = Some(std::mem::transmute::<
                *const (dyn Fn(usize) + Sync + '_),
                *const (dyn Fn(usize) + Sync + 'static),
            >(work));
        }
        shared.done.store(0, Ordering::Relaxed);
        shared.next.store(u64::from(self.round.get()) << 32 | (parts as u64) << 16, Ordering::Release);
        while shared.take() {}
        let mut looks = 0;
        while shared.done.load(Ordering::Acquire) < parts {
            pause(&mut looks);
        }
        let panic = lock(&shared.panic).take();
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }
}

/// Runs `own` with a crew of up to `threads` threads.
pub fn with_crew<R>(threads: usize, own: impl FnOnce(&Crew<'_>) -> R) -> R {
    if threads <= 1 {
        return own(&Crew::alone());
    }
    let shared = Shared {
        next: AtomicU64::new(0),
        done: AtomicUsize::new(0),
        closed: AtomicBool::new(false),
        work: UnsafeCell::new(None),
        panic: Mutex::new(None),
    };
    let helper = || {
        let mut looks = 0;
        while !shared.closed.load(Ordering::Acquire) {
            if shared.take() {
                looks = 0;
            } else {
                pause(&mut looks);
            }
        }
    };
    together(threads, &helper, || {
        // Ends the helpers when the work ends, also by a panic.
        struct Close<'a>(&'a AtomicBool);
        impl Drop for Close<'_> {
            fn drop(&mut self) {
                self.0.store(true, Ordering::Release);
            }
        }
        let _close = Close(&shared.closed);
        own(&Crew { shared: Some(&shared), threads, round: Cell::new(0) })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_is_done_once_in_every_round() {
        for threads in [1, 2, 5] {
            with_crew(threads, |crew| {
                for round in 0..300 {
                    let parts = 1 + round % 37;
                    let counts: Vec<AtomicUsize> = (0..parts).map(|_| AtomicUsize::new(0)).collect();
                    crew.split(parts, &|k| {
                        counts[k].fetch_add(1, Ordering::Relaxed);
                    });
                    assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1));
                }
            });
        }
    }

    #[test]
    fn threads_are_kept_and_calls_inside_calls_end() {
        let work = AtomicUsize::new(0);
        for _ in 0..50 {
            let inner = || {
                with_crew(3, |crew| {
                    crew.split(4, &|_| {
                        work.fetch_add(1, Ordering::Relaxed);
                    });
                });
            };
            together(4, &inner, inner);
        }
        assert!(work.load(Ordering::Relaxed) >= 200 && work.load(Ordering::Relaxed) <= 800);
        let most = std::thread::available_parallelism().map_or(1, |n| n.get() - 1);
        // Other tests may ask for more threads, but none for hundreds.
        assert!(lock(&POOL).threads <= most.max(64));
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_threads_live_on() {
        for _ in 0..3 {
            let caught = catch_unwind(|| with_crew(3, |crew| crew.split(8, &|k| assert!(k != 5))));
            assert!(caught.is_err());
            let begun = AtomicBool::new(false);
            let helper = || {
                begun.store(true, Ordering::Release);
                resume_unwind(Box::new("helper"));
            };
            let caught = catch_unwind(AssertUnwindSafe(|| {
                together(2, &helper, || {
                    let start = std::time::Instant::now();
                    while !begun.load(Ordering::Acquire) && start.elapsed().as_secs() < 5 {
                        std::thread::yield_now();
                    }
                });
            }));
            assert!(caught.is_err() || !begun.load(Ordering::Acquire));
        }
    }
}
