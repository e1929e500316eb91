//! A delegate for tests, in this process.

use std::sync::Mutex;

use crate::Result;
use crate::network::Network;
use crate::parallel::{Cancel, Threads};
use crate::solver::Design;
use crate::states::{StateSlice, StateSource};
use crate::statistics::{BLOCK, Statistics, Tree};
use crate::train::{Delegate, Keep, Key, RowsTask, Shard, StatisticsTask, Step, SumsTask, TrainSettings, WalkTask};

/// A delegate that works as another machine would: shards of two blocks, tasks sent as bytes, rows in reverse order.
pub(super) struct Elsewhere<'a> {
    source: &'a dyn StateSource,
    pub(super) network: Option<Network>,
    settings: TrainSettings,
    pub(super) walks: Mutex<Vec<(WalkTask, Vec<Step>)>>,
    pub(super) shards: Mutex<Vec<Shard>>,
    /// The kinds of sums that it was asked for.
    pub(super) asked: Mutex<Vec<&'static str>>,
}

impl<'a> Elsewhere<'a> {
    pub(super) fn new(source: &'a dyn StateSource, settings: &TrainSettings) -> Self {
        let settings = settings.clone();
        Self {
            source,
            network: None,
            settings,
            walks: Mutex::default(),
            shards: Mutex::default(),
            asked: Mutex::default(),
        }
    }
}

impl Keep for Elsewhere<'_> {
    fn get(&self, _: &Key) -> Result<Option<Vec<u8>>> {
        Ok(None)
    }

    fn put(&self, _: &Key, _: &[u8]) -> Result<()> {
        Ok(())
    }

    fn delegate(&self) -> Option<&dyn Delegate> {
        Some(self)
    }
}

impl Delegate for Elsewhere<'_> {
    fn statistics(&self, task: &StatisticsTask) -> Result<Statistics> {
        let task = StatisticsTask::from_bytes(&task.to_bytes())?;
        let (total, mut tree) = (task.samples(), Tree::default());
        for first in (0..total).step_by(2 * BLOCK) {
            let shard = StateSlice::new(self.source, first..(first + 2 * BLOCK).min(total))?;
            tree.push(task.run(&shard, Threads::one(), &Cancel::new(), |_| {})?)?;
        }
        tree.finish()
    }

    fn rows(
        &self,
        statistics: &Statistics,
        tasks: &[RowsTask],
        take: &mut dyn FnMut(usize, Vec<f64>) -> Result<()>,
    ) -> Result<()> {
        let mut results = Vec::new();
        for tasks in tasks.rchunks(2) {
            let design = Design::new(statistics)?;
            let tasks: Vec<_> = tasks.iter().map(|t| RowsTask::from_bytes(&t.to_bytes()).unwrap()).collect();
            let (threads, cancel) = (Threads::new(2), Cancel::new());
            results.push(RowsTask::run_all(&tasks, &design, &self.settings, threads, &cancel)?);
        }
        results.into_iter().rev().flatten().enumerate().try_for_each(|(k, rows)| take(k, rows))
    }

    fn begin_walk(&self, task: &WalkTask) -> Result<usize> {
        let mut walks = self.walks.lock().unwrap();
        walks.push((WalkTask::from_bytes(&task.to_bytes())?, Vec::new()));
        Ok(walks.len() - 1)
    }

    /// Uses two shards; every other time they are lost and made again from all steps so far.
    fn walk(&self, walk: usize, steps: &[Step], group: usize, shape: (usize, usize)) -> Result<Statistics> {
        let (task, log) = &mut self.walks.lock().unwrap()[walk];
        log.extend(steps.iter().cloned());
        let mut held = self.shards.lock().unwrap();
        if group.is_multiple_of(2) {
            held.clear();
        }
        let (size, mut tree) = (2 * WalkTask::PIECE, Tree::default());
        for (k, first) in (0..task.samples()).step_by(size).enumerate() {
            let mut news = steps;
            if held.len() == k {
                let u = self.source.inputs(first..(first + size).min(task.samples()))?;
                held.push(Shard::new(task.clone(), &self.settings, u, first, 1e-7)?);
                news = log;
            }
            for step in news {
                held[k].step(Step::from_bytes(&step.to_bytes())?, Threads::new(2), &Cancel::new())?;
            }
            let bytes = held[k].statistics(group, Threads::new(2), &Cancel::new())?.to_bytes();
            tree.push(Statistics::from_bytes(&bytes, shape.0, shape.1).unwrap())?;
        }
        tree.finish()
    }

    fn end_walk(&self, _: usize) {
        self.shards.lock().unwrap().clear();
    }

    /// Two pieces per shard; the last shard comes first.
    fn sums(&self, task: &SumsTask, take: &mut dyn FnMut(usize, Vec<f64>) -> Result<()>) -> Result<()> {
        let task = SumsTask::from_bytes(&task.to_bytes())?;
        self.asked.lock().unwrap().push(task.kind());
        let (size, mut results) = (2 * WalkTask::PIECE, Vec::new());
        let firsts: Vec<usize> = (0..task.samples()).step_by(size).collect();
        for &first in firsts.iter().rev() {
            let u = self.source.inputs(first..(first + size).min(task.samples()))?;
            results.push(task.run(self.network.as_ref(), &u, first, Threads::new(2), &Cancel::new())?);
        }
        results.into_iter().rev().flatten().enumerate().try_for_each(|(k, sums)| take(k, sums))
    }
}
