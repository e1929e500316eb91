//! Training's heavy steps as calls of an engine that Python runs (`simplicit.engine.Engine`), whoever carries them there.

use std::sync::atomic::{AtomicUsize, Ordering};

use simplicit::parallel::Cancel;
use simplicit::statistics::Statistics;
use simplicit::train::{Delegate, Keep, RowsTask, StatisticsTask, Step, WalkTask, WeightsTask};
use simplicit::{Error, Result};

/// Whoever carries calls to the engine and its results back.
pub trait Courier: Sync {
    /// Begins a call by name; returns the number its results are asked for by.
    fn start(&self, method: &str, numbers: &[usize], parts: &[Vec<u8>]) -> Result<u64>;
    /// The next result of a call in order, or `None` after a moment in which none came.
    fn next(&self, call: u64) -> Result<Option<Vec<u8>>>;
}

/// An engine behind a courier, as training sees it.
pub struct Remote<'a, C> {
    courier: C,
    cancel: &'a Cancel,
    /// Where the driver keeps statistics and rows that came back.
    store: &'a dyn Keep,
    walks: AtomicUsize,
}

impl<'a, C: Courier> Remote<'a, C> {
    /// Nothing has begun.
    pub fn new(courier: C, cancel: &'a Cancel, store: &'a dyn Keep) -> Self {
        Self { courier, cancel, store, walks: AtomicUsize::new(0) }
    }

    /// Whoever carries the calls.
    pub fn courier(&self) -> &C {
        &self.courier
    }

    /// So many results of a call, in order.
    fn results(&self, call: u64, count: usize, mut take: impl FnMut(usize, &[u8]) -> Result<()>) -> Result<()> {
        let mut done = 0;
        while done < count {
            self.cancel.check()?;
            if let Some(bytes) = self.courier.next(call)? {
                take(done, &bytes)?;
                done += 1;
            }
        }
        Ok(())
    }

    fn sums(&self, call: u64, (d, r): (usize, usize)) -> Result<Statistics> {
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

/// Numbers as a worker sends them.
fn numbers(bytes: &[u8]) -> Result<Vec<f64>> {
    match bytes.as_chunks::<8>() {
        (numbers, []) => Ok(numbers.iter().map(|c| f64::from_le_bytes(*c)).collect()),
        _ => Err(Error::shape("numbers of a worker", "8 bytes each", format!("{} bytes", bytes.len()))),
    }
}

impl<C: Courier> Keep for Remote<'_, C> {
    fn get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        self.store.get(key)
    }

    fn put(&self, key: &str, value: &[u8]) -> Result<()> {
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
        self.sums(call, (d, r))
    }

    fn begin_walk(&self, task: &WalkTask) -> Result<usize> {
        let walk = self.walks.fetch_add(1, Ordering::Relaxed);
        self.courier.start("begin_walk", &[walk, task.samples()], &task.parts())?;
        Ok(walk)
    }

    fn walk(&self, walk: usize, steps: &[Step], group: usize, shape: (usize, usize)) -> Result<Statistics> {
        let steps: Vec<Vec<u8>> = steps.iter().map(Step::to_bytes).collect();
        let call = self.courier.start("walk", &[walk, group, shape.0, shape.1], &steps)?;
        self.sums(call, shape)
    }

    fn end_walk(&self, walk: usize) {
        // Nobody waits for this; a courier that has failed said so before.
        let _ = self.courier.start("end_walk", &[walk], &[]);
    }

    fn rows(
        &self,
        statistics: &Statistics,
        tasks: &[RowsTask],
        take: &mut dyn FnMut(usize, Vec<f64>) -> Result<()>,
    ) -> Result<()> {
        let (d, r) = (statistics.features(), statistics.targets());
        let parts: Vec<Vec<u8>> =
            [statistics.to_bytes()].into_iter().chain(tasks.iter().map(RowsTask::to_bytes)).collect();
        let call = self.courier.start("rows", &[d, r, tasks.first().map_or(0, RowsTask::inverses)], &parts)?;
        self.results(call, tasks.len(), |k, bytes| {
            let rows = numbers(bytes)?;
            let expected = tasks[k].length(d);
            if rows.len() != expected {
                return Err(Error::shape("a block of rows", format!("{expected} numbers"), rows.len()));
            }
            take(k, rows)
        })
    }

    fn weights(&self, task: &WeightsTask, take: &mut dyn FnMut(usize, Vec<f64>) -> Result<()>) -> Result<()> {
        let call = self.courier.start("weights", &[task.samples(), task.unit()], &[task.to_bytes()])?;
        self.results(call, task.samples().div_ceil(task.size()), |k, bytes| take(k, numbers(bytes)?))
    }
}
