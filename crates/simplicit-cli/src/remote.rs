//! Training's heavy steps as calls of an engine that Python runs (`simplicit.engine.Engine`); a [`Courier`] carries them there.

use std::sync::atomic::{AtomicUsize, Ordering};

use simplicit::parallel::Cancel;
use simplicit::statistics::Statistics;
use simplicit::train::{Delegate, Keep, Key, RowsTask, StatisticsTask, Step, SumsTask, WalkTask, numbers_from_bytes};
use simplicit::{Error, Result};

/// Something that carries calls to the engine and its results back.
pub trait Courier: Sync {
    /// Begins a call by name; returns the number its results are asked for by.
    fn start(&self, method: &str, numbers: &[usize], parts: &[Vec<u8>]) -> Result<u64>;
    /// Hands the next result of a call in order to `take`; `false` after a moment in which none came.
    fn next(&self, call: u64, take: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<bool>;
}

/// An engine behind a courier, as training sees it.
pub struct Remote<'a, C> {
    courier: C,
    cancel: &'a Cancel,
    /// Where the driver keeps statistics and rows that the engine returned.
    store: &'a dyn Keep,
    walks: AtomicUsize,
}

impl<'a, C: Courier> Remote<'a, C> {
    /// A new engine without calls.
    pub fn new(courier: C, cancel: &'a Cancel, store: &'a dyn Keep) -> Self {
        Self { courier, cancel, store, walks: AtomicUsize::new(0) }
    }

    /// Whoever carries the calls.
    pub fn courier(&self) -> &C {
        &self.courier
    }

    /// Passes the next `count` results of a call to `take`, in order.
    fn results(&self, call: u64, count: usize, mut take: impl FnMut(usize, &[u8]) -> Result<()>) -> Result<()> {
        for k in 0..count {
            loop {
                self.cancel.check()?;
                if self.courier.next(call, &mut |bytes| take(k, bytes))? {
                    break;
                }
            }
        }
        Ok(())
    }

    fn total(&self, call: u64, (d, r): (usize, usize)) -> Result<Statistics> {
        let mut sums = None;
        self.results(call, 1, |_, bytes| {
            sums = Some(read_statistics(bytes, d, r)?);
            Ok(())
        })?;
        sums.ok_or(Error::Cancelled)
    }
}

/// The inverse of [`Statistics::to_bytes`], or an error that says what was expected.
pub fn read_statistics(bytes: &[u8], features: usize, targets: usize) -> Result<Statistics> {
    let other = || Error::shape("statistics", format!("{features} features, {targets} targets"), "other bytes");
    Statistics::from_bytes(bytes, features, targets).ok_or_else(other)
}

impl<C: Courier> Keep for Remote<'_, C> {
    fn get(&self, key: &Key) -> Result<Option<Vec<u8>>> {
        self.store.get(key)
    }

    fn put(&self, key: &Key, value: &[u8]) -> Result<()> {
        self.store.put(key, value)
    }

    fn keeps(&self) -> bool {
        self.store.keeps()
    }

    fn folder(&self) -> Option<&std::path::Path> {
        self.store.folder()
    }

    fn delegate(&self) -> Option<&dyn Delegate> {
        Some(self)
    }
}

impl<C: Courier> Delegate for Remote<'_, C> {
    fn statistics(&self, task: &StatisticsTask) -> Result<Statistics> {
        let (d, r) = task.shape();
        let call = self.courier.start("statistics", &[task.samples(), d, r], &[task.to_bytes()])?;
        self.total(call, (d, r))
    }

    fn begin_walk(&self, task: &WalkTask) -> Result<usize> {
        let walk = self.walks.fetch_add(1, Ordering::Relaxed);
        self.courier.start("begin_walk", &[walk, task.samples()], &task.parts())?;
        Ok(walk)
    }

    fn walk(&self, walk: usize, steps: &[Step], group: usize, shape: (usize, usize)) -> Result<Statistics> {
        let steps: Vec<Vec<u8>> = steps.iter().map(Step::to_bytes).collect();
        let call = self.courier.start("walk", &[walk, group, shape.0, shape.1], &steps)?;
        self.total(call, shape)
    }

    fn end_walk(&self, walk: usize) {
        // The call has no result to wait for; a courier that failed has already reported it.
        let _ = self.courier.start("end_walk", &[walk], &[]);
    }

    fn rows(
        &self,
        statistics: &Statistics,
        tasks: &[RowsTask],
        take: &mut dyn FnMut(usize, Vec<f64>) -> Result<()>,
    ) -> Result<()> {
        let (d, r) = (statistics.features(), statistics.targets());
        let name = statistics.fingerprint().to_vec();
        let parts: Vec<Vec<u8>> = [name.clone()].into_iter().chain(tasks.iter().map(RowsTask::to_bytes)).collect();
        let inverses = tasks.first().map_or(0, RowsTask::inverses);
        let call = self.courier.start("rows", &[d, r, inverses], &parts)?;
        let mut done = 0;
        while done < tasks.len() {
            // No worker has the statistics, or the one that had them has dropped them.
            let mut missing = false;
            self.results(call, 1, |_, bytes| {
                missing = bytes.is_empty();
                if missing {
                    return Ok(());
                }
                let (rows, expected) = (numbers_from_bytes(bytes)?, tasks[done].length(d));
                if rows.len() != expected {
                    return Err(Error::shape("a block of rows", format!("{expected} numbers"), rows.len()));
                }
                take(done, rows)
            })?;
            if missing {
                self.courier.start("lend", &[], &[name.clone(), statistics.to_bytes()])?;
            } else {
                done += 1;
            }
        }
        Ok(())
    }

    fn sums(&self, task: &SumsTask, take: &mut dyn FnMut(usize, Vec<f64>) -> Result<()>) -> Result<()> {
        let call = self.courier.start(task.kind(), &[task.samples(), task.unit()], &task.parts())?;
        self.results(call, task.samples().div_ceil(task.size()), |k, bytes| take(k, numbers_from_bytes(bytes)?))
    }
}
