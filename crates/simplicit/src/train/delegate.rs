//! Work done elsewhere, in other processes or on other machines, with the bits it would have had here.
//!
//! Training has three heavy steps: row weights ([`WeightsTask`](crate::train::WeightsTask)), statistics of a group over some samples, and the rows
//! over those statistics.
//! Statistics of rows of single units are a pure function of a few bytes ([`StatisticsTask`]), and so is a block of rows to
//! solve or to bound ([`RowsTask`]). Networks with feature maps are walked through by [`Shard`](crate::train::Shard)s of the samples,
//! whose state follows from the steps they were told. A [`Delegate`] runs all of these wherever it likes, as often as it
//! likes: a lost result is computed again and is the same.

use crate::equilibrium::{Equilibrium, EquilibriumSettings};
use crate::linalg::Matrix;
use crate::model::ImplicitModel;
use crate::parallel::{Cancel, Threads};
use crate::problem::{Ball, RowProblem, Units};
use crate::solver::{CardinalitySettings, Design};
use crate::states::{StateMap, StateSource};
use crate::statistics::Statistics;
use crate::train::evidence::shard::{Step, WalkTask};
use crate::train::evidence::weights_task::WeightsTask;
use crate::train::rows::solve::{self, BOUND_NUMBERS, ROW_EXTRAS};
use crate::train::search::stages::OwnStates;
use crate::train::{TrainInput, TrainSettings};
use crate::{Error, Result};

/// Whoever does the heavy steps in place of this process's threads.
pub trait Delegate: Sync {
    /// The task's statistics over its samples.
    fn statistics(&self, task: &StatisticsTask) -> Result<Statistics>;
    /// The rows of every task over one design, handed to `take` in order as they come.
    fn rows(
        &self,
        statistics: &Statistics,
        tasks: &[RowsTask],
        take: &mut dyn FnMut(usize, Vec<f64>) -> Result<()>,
    ) -> Result<()>;
    /// Begins a walk of all samples through the layers of a network with feature maps; returns its number.
    fn begin_walk(&self, task: &WalkTask) -> Result<usize>;
    /// Statistics of a group, with so many features and targets, over all samples after these further steps.
    fn walk(&self, walk: usize, steps: &[Step], group: usize, shape: (usize, usize)) -> Result<Statistics>;
    /// Nobody will ask about that walk again.
    fn end_walk(&self, walk: usize);
    /// The sums of every block of samples, handed to `take` in order as they come.
    fn weights(&self, task: &WeightsTask, take: &mut dyn FnMut(usize, Vec<f64>) -> Result<()>) -> Result<()>;
}

/// Which statistics: some columns of [X; U; 1] against others and then some rows of [Z; Y], at the baseline's states or
/// at a model's own.
#[derive(Debug, Clone, PartialEq)]
pub struct StatisticsTask {
    pub(super) rows: Vec<usize>,
    pub(super) columns: Vec<usize>,
    /// Columns that stand before the rows among the targets.
    pub(super) beside: Vec<usize>,
    /// The model of the stage before, whose states stand in the place of the samples' own.
    pub(super) stage: Option<ImplicitModel>,
    /// The model whose states are the features.
    pub(super) model: Option<ImplicitModel>,
    pub(super) samples: usize,
}

impl StatisticsTask {
    pub(super) fn new(
        input: &TrainInput,
        rows: Vec<usize>,
        columns: Vec<usize>,
        beside: Vec<usize>,
        model: Option<ImplicitModel>,
    ) -> Self {
        // In stages the baseline is the model of the stage before, and the samples have its states.
        let stage = input.source.origin().and(input.baseline).cloned();
        Self { rows, columns, beside, stage, model, samples: input.source.samples() }
    }

    /// Over the first so many samples of the run; others are held out.
    pub fn samples(&self) -> usize {
        self.samples
    }

    /// Features d and targets r of the result.
    pub fn shape(&self) -> (usize, usize) {
        (self.columns.len(), self.beside.len() + self.rows.len())
    }

    /// Over all samples of `source`, which may be a shard of [`BLOCK`](crate::statistics::BLOCK)·2ᵏ samples: shards are
    /// summed by [`Tree`](crate::statistics::Tree).
    pub fn run(
        &self,
        source: &dyn StateSource,
        threads: Threads,
        cancel: &Cancel,
        progress: impl FnMut(usize),
    ) -> Result<Statistics> {
        let stage = self.stage.as_ref().map(equilibrium).transpose()?;
        let staged = stage.as_ref().zip(self.stage.as_ref()).map(|(e, _)| OwnStates::new(source, e));
        let source = staged.as_ref().map_or(source, |s| s as &dyn StateSource);
        let shape = source.shape();
        let (n, constant) = (shape.states, shape.states + shape.inputs);
        let features_of = self.model.as_ref().map(equilibrium).transpose()?;
        // Tasks come from other processes too: nothing in them is trusted.
        if self.rows.iter().any(|&i| i >= n + shape.outputs)
            || self.columns.iter().chain(&self.beside).any(|&j| j > constant)
        {
            return Err(Error::shape("statistics task", format!("rows and columns of {shape:?}"), "others"));
        }
        let (d, r) = self.shape();
        Statistics::stream_shard(
            source.samples(),
            self.samples,
            threads,
            cancel,
            |range| {
                let block = source.block(range)?;
                let own = features_of.as_ref().map(|e| e.states(&block.u.cast())).transpose()?;
                let x = own.as_ref().map_or(&block.x, |own| &own.x);
                let pick = |i: usize, j: usize| match j {
                    j if j < n => x[(i, j)],
                    j if j < constant => block.u[(i, j - n)],
                    _ => 1.0,
                };
                let features = Matrix::from_fn(block.samples(), d, |i, c| pick(i, self.columns[c]));
                let targets = Matrix::from_fn(block.samples(), r, |i, k| match k.checked_sub(self.beside.len()) {
                    None => pick(i, self.beside[k]),
                    Some(k) if self.rows[k] < n => block.z[(i, self.rows[k])],
                    Some(k) => block.y[(i, self.rows[k] - n)],
                });
                Ok((features, targets))
            },
            progress,
        )
    }

    /// Serialises the task for another process.
    pub fn to_bytes(&self) -> Vec<u8> {
        let models = [&self.stage, &self.model].map(|m| m.as_ref().map_or(Vec::new(), ImplicitModel::to_bytes));
        let lengths = [self.samples, self.rows.len(), self.columns.len(), self.beside.len(), models[0].len()];
        let numbers = lengths.iter().chain(&self.rows).chain(&self.columns).chain(&self.beside);
        let mut out: Vec<u8> = numbers.flat_map(|v| (*v as u64).to_le_bytes()).collect();
        out.extend(models.concat());
        out
    }

    /// The inverse of [`StatisticsTask::to_bytes`].
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let bad = || Error::shape("statistics task", "what to_bytes wrote", format!("{} other bytes", bytes.len()));
        let (numbers, _) = bytes.as_chunks::<8>();
        let mut read = numbers.iter();
        let mut number = || read.next().and_then(|c| usize::try_from(u64::from_le_bytes(*c)).ok()).ok_or_else(bad);
        let [samples, rows, columns, beside, stage] = [number()?, number()?, number()?, number()?, number()?];
        let mut list = |length: usize| -> Result<Vec<usize>> {
            if length > numbers.len() { Err(bad()) } else { (0..length).map(|_| number()).collect() }
        };
        let (rows, columns, beside) = (list(rows)?, list(columns)?, list(beside)?);
        let rest = &bytes[8 * (5 + rows.len() + columns.len() + beside.len())..];
        let (stage, model) = rest.split_at_checked(stage).ok_or_else(bad)?;
        let read = |bytes: &[u8]| match bytes {
            [] => Ok(None),
            bytes => ImplicitModel::from_bytes(bytes, "statistics task").map(Some),
        };
        Ok(Self { rows, columns, beside, stage: read(stage)?, model: read(model)?, samples })
    }
}

fn equilibrium(model: &ImplicitModel) -> Result<Equilibrium> {
    Equilibrium::new(model, EquilibriumSettings { threads: Threads::one(), ..Default::default() })
}

/// A block of row problems over one design, to be solved or, with answers, to be bounded.
#[derive(Debug, Clone)]
pub struct RowsTask {
    pub(super) strength: f64,
    /// How hard cardinality tries; it depends on what the features are and on what the rows are for.
    pub(super) cardinality: CardinalitySettings,
    pub(super) problems: Vec<RowProblem>,
    /// A row of weights per problem, whose distance from a lower bound is asked for.
    pub(super) answers: Option<Vec<Vec<f64>>>,
    /// Inverses that the blocks of its group share and that can travel; none is known after a journey.
    pub(super) inverses: usize,
}

impl RowsTask {
    /// Consecutive blocks of one group, by block. A solved row is its d weights, its gap (NaN: none) and whether it ended at
    /// a limit (0 or 1); a bounded row its value, its bound and whether it is proven.
    pub fn run_all(
        tasks: &[Self],
        design: &Design,
        settings: &TrainSettings,
        threads: Threads,
        cancel: &Cancel,
    ) -> Result<Vec<Vec<f64>>> {
        let Some(first) = tasks.first() else { return Ok(Vec::new()) };
        for task in tasks {
            for problem in &task.problems {
                problem.check(design.features(), design.targets())?;
            }
            let kind = |t: &Self| (t.strength, t.cardinality.clone(), t.answers.is_some());
            if kind(task) != kind(first) {
                return Err(Error::shape("rows of one call", "blocks of one group", "others"));
            }
        }
        let settings = TrainSettings { cardinality: first.cardinality.clone(), ..settings.clone() };
        let blocks: Vec<&[RowProblem]> = tasks.iter().map(|task| &task.problems[..]).collect();
        if first.answers.is_none() {
            return solve::solve_blocks(design, &settings, first.strength, &blocks, threads, cancel);
        }
        let answers: Vec<Vec<f64>> = tasks.iter().filter_map(|task| task.answers.clone()).flatten().collect();
        let problems = blocks.concat();
        if answers.len() != problems.len() || answers.iter().any(|a| a.len() != design.features()) {
            let expected = format!("{} rows of {} weights", problems.len(), design.features());
            return Err(Error::shape("answers to bound", expected, "others"));
        }
        let told = &mut |_| {};
        let bounds = solve::bound_here(design, &settings, first.strength, &problems, &answers, threads, cancel, told)?;
        let mut bounds = bounds.into_iter();
        let numbers = |count: usize| {
            let rows = bounds.by_ref().take(count);
            rows.flat_map(|b| [b.value, b.bound, f64::from(u8::from(b.proven))]).collect()
        };
        Ok(blocks.iter().map(|block| block.len()).map(numbers).collect())
    }

    /// Inverses that all blocks of its group need, and that one process can make for others.
    pub fn inverses(&self) -> usize {
        self.inverses
    }

    fn rho(&self, number: usize) -> Result<f64> {
        let schedule = self.cardinality.ladder().schedule();
        let missing = || Error::shape("number of an inverse", format!("below {}", schedule.len()), number);
        schedule.get(number).map(|rung| rung.0).ok_or_else(missing)
    }

    /// One of the inverses that its group shares, for other processes. The design must be one that keeps them.
    pub fn inverse(&self, design: &Design, number: usize, threads: Threads) -> Result<Vec<u8>> {
        let kept = design.inverses().ok_or_else(|| Error::shape("design", "one that keeps its inverses", "another"))?;
        kept.to_bytes(design.quadratic(), self.rho(number)?, threads)
    }

    /// Hands a design what [`RowsTask::inverse`] said in another process.
    pub fn know(&self, design: &Design, number: usize, inverse: &[u8]) -> Result<()> {
        let kept = design.inverses().ok_or_else(|| Error::shape("design", "one that keeps its inverses", "another"))?;
        kept.know(self.rho(number)?, design.quadratic().features(), inverse)
    }

    /// Numbers in the result, for d features.
    pub fn length(&self, features: usize) -> usize {
        self.problems.len() * if self.answers.is_some() { BOUND_NUMBERS } else { features + ROW_EXTRAS }
    }

    /// Serialises the task for another process.
    pub fn to_bytes(&self) -> Vec<u8> {
        let CardinalitySettings { steps, rungs, first_rho, span, ridge, moves } = self.cardinality;
        let moves = f64::from(u8::from(moves));
        let mut out = vec![self.strength, steps as f64, rungs as f64, first_rho, span, ridge, moves];
        out.extend([self.problems.len() as f64, f64::from(u8::from(self.answers.is_some()))]);
        let list = |values: Option<Vec<f64>>, out: &mut Vec<f64>| match values {
            Some(values) => {
                out.push(values.len() as f64);
                out.extend(values);
            }
            None => out.push(-1.0),
        };
        for (k, problem) in self.problems.iter().enumerate() {
            let factor = match problem.units {
                Units::Stored => 0.0,
                Units::Rms { factor } => factor,
            };
            let radius = problem.ball.as_ref().map_or(0.0, |ball| ball.radius);
            out.extend([problem.target as f64, problem.fit, factor, radius]);
            list(problem.weights.clone(), &mut out);
            list(problem.ball.as_ref().map(|ball| ball.weights.clone()), &mut out);
            list(problem.bounds.as_ref().map(|b| b.iter().flat_map(|(l, u)| [*l, *u]).collect()), &mut out);
            list(problem.start.clone(), &mut out);
            if let Some(answers) = &self.answers {
                list(Some(answers[k].clone()), &mut out);
            }
        }
        out.iter().flat_map(|v| v.to_le_bytes()).collect()
    }

    /// The inverse of [`RowsTask::to_bytes`].
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let (numbers, tail) = bytes.as_chunks::<8>();
        let mut left = Numbers(numbers);
        let bad = || Error::shape("rows task", "what to_bytes wrote", format!("{} other bytes", bytes.len()));
        let task = Self::read(&mut left).filter(|_| left.0.is_empty() && tail.is_empty());
        task.ok_or_else(bad)
    }

    fn read(left: &mut Numbers) -> Option<Self> {
        let strength = left.next()?;
        let (steps, rungs, first_rho, span) = (left.count()?, left.count()?, left.next()?, left.next()?);
        let (ridge, moves, count, answered) = (left.next()?, left.next()? != 0.0, left.count()?, left.next()? != 0.0);
        let (mut problems, mut answers) = (Vec::new(), Vec::new());
        for _ in 0..count {
            let (target, fit, factor, radius) = (left.count()?, left.next()?, left.next()?, left.next()?);
            let units = if factor == 0.0 { Units::Stored } else { Units::Rms { factor } };
            let weights = left.list()?;
            let ball = left.list()?.map(|weights| Ball { radius, weights });
            let bounds = left.list()?.map(|v| v.as_chunks::<2>().0.iter().map(|[l, u]| (*l, *u)).collect());
            problems.push(RowProblem { target, fit, units, weights, ball, bounds, start: left.list()? });
            if answered {
                answers.push(left.list()??);
            }
        }
        let cardinality = CardinalitySettings { steps, rungs, first_rho, span, ridge, moves };
        Some(Self { strength, cardinality, problems, answers: answered.then_some(answers), inverses: 0 })
    }
}

/// What is left to read.
pub(super) struct Numbers<'a>(pub(super) &'a [[u8; 8]]);

impl Numbers<'_> {
    pub(super) fn next(&mut self) -> Option<f64> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(f64::from_le_bytes(*first))
    }

    /// A number of things; there cannot be more of them than numbers.
    pub(super) fn count(&mut self) -> Option<usize> {
        self.next().filter(|v| *v >= 0.0 && v.fract() == 0.0 && *v < 9e15).map(|v| v as usize)
    }

    /// `Some(None)`: there is none.
    #[allow(clippy::option_option)]
    fn list(&mut self) -> Option<Option<Vec<f64>>> {
        let length = self.next()?;
        if length == -1.0 {
            return Some(None);
        }
        let length = Some(length).filter(|v| *v >= 0.0 && *v <= self.0.len() as f64)? as usize;
        let (values, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(Some(values.iter().map(|c| f64::from_le_bytes(*c)).collect()))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::arrays::Array;
    use crate::backend::Device;
    use crate::layout::{Activation, Layer, Layout};
    use crate::model::DenseLayer;
    use crate::network::{Network, Shape, Window};
    use crate::problem::{Connectivity, penalty::L1};
    use crate::random::Random;
    use crate::states::{ArrayStates, Collected, StateSlice};
    use crate::statistics::{BLOCK, Tree};
    use crate::train::{Forget, Keep, Objective, Run, Shard, TrainInput, importance_on, train};

    fn states(samples: usize) -> (ImplicitModel, ArrayStates) {
        let mut random = Random::new(3);
        let mut weights = |rows, cols| Matrix::from_fn(rows, cols, |_, _| (0.4 * random.normal()) as f32);
        let hidden = DenseLayer::new("first", weights(5, 6), Activation::Relu).with_bias(vec![0.1; 5]);
        let second = DenseLayer::new("second", weights(4, 5), Activation::Relu);
        let model =
            ImplicitModel::from_layers(&[hidden, second], &DenseLayer::new("y", weights(2, 4), Activation::Identity))
                .unwrap();
        let mut random = Random::new(4);
        let u = Matrix::from_fn(samples, 6, |_, _| random.normal() as f32);
        let run = Equilibrium::new(&model, EquilibriumSettings::default()).unwrap().run(&u).unwrap();
        let array = |name, m: &Matrix<f32>| Array::from_matrix(name, m);
        let relu = Activation::Relu;
        let layout = Layout::new(vec![Layer::dense("second", 4, relu), Layer::dense("first", 5, relu)]);
        let arrays =
            ArrayStates::new(array("U", &u), array("Z", &run.z), array("X", &run.x), array("Y", &run.y), layout);
        (model, arrays.unwrap())
    }

    /// Shards of two blocks, tasks through bytes, rows in reverse order: as another machine would.
    struct Elsewhere<'a> {
        source: &'a dyn StateSource,
        network: Option<Network>,
        settings: TrainSettings,
        walks: Mutex<Vec<(WalkTask, Vec<Step>)>>,
        shards: Mutex<Vec<Shard>>,
    }

    impl<'a> Elsewhere<'a> {
        fn new(source: &'a dyn StateSource, settings: &TrainSettings) -> Self {
            let settings = settings.clone();
            Self { source, network: None, settings, walks: Mutex::default(), shards: Mutex::default() }
        }
    }

    impl Keep for Elsewhere<'_> {
        fn get(&self, _: &str) -> Result<Option<Vec<u8>>> {
            Ok(None)
        }

        fn put(&self, _: &str, _: &[u8]) -> Result<()> {
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

        /// Two shards; every other time they are lost and made again from all steps so far.
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

        /// Two pieces to a shard, the last shard first.
        fn weights(&self, task: &WeightsTask, take: &mut dyn FnMut(usize, Vec<f64>) -> Result<()>) -> Result<()> {
            let task = WeightsTask::from_bytes(&task.to_bytes())?;
            let (size, mut results) = (2 * WalkTask::PIECE, Vec::new());
            let firsts: Vec<usize> = (0..task.samples()).step_by(size).collect();
            for &first in firsts.iter().rev() {
                let u = self.source.inputs(first..(first + size).min(task.samples()))?;
                results.push(task.run(self.network.as_ref(), &u, first, Threads::new(2), &Cancel::new())?);
            }
            results.into_iter().rev().flatten().enumerate().try_for_each(|(k, sums)| take(k, sums))
        }
    }

    #[test]
    fn work_done_elsewhere_has_the_same_bits() {
        let (baseline, source) = states(5 * BLOCK + 100);
        for (connectivity, kappa) in [(Connectivity::Baseline, None), (Connectivity::NoSelfLoop, Some(0.9))] {
            let settings = TrainSettings {
                objective: Objective::Convex(std::sync::Arc::new(L1::new(1e-3).unwrap())),
                strength: 1.0,
                connectivity,
                kappa,
                ..TrainSettings::default()
            };
            let input = TrainInput {
                source: &source,
                baseline: Some(&baseline),
                importance: None,
                preprocessing: Default::default(),
            };
            let with = |keep: &dyn Keep| {
                let (cancel, mut ignore) = (Cancel::new(), |_| {});
                let mut run = Run { threads: Threads::new(2), cancel: &cancel, keep, progress: &mut ignore };
                train(&input, &settings, &mut run).unwrap()
            };
            let (here, there) = (with(&Forget), with(&Elsewhere::new(&source, &settings)));
            assert_eq!(here.model.to_bytes(), there.model.to_bytes());
            assert_eq!(here.report.rows, there.report.rows);
            assert!(here.model.sparsity().nonzeros > 10);
        }
    }

    /// A convolution, a residual sum, a grouped convolution, an average and a classifier on small images.
    fn convolutional() -> Network {
        let mut random = Random::new(5);
        let mut weights = |rows, cols| Matrix::from_fn(rows, cols, |_, _| (0.4 * random.normal()) as f32);
        let start = Network::builder(Shape::map(2, 6, 6))
            .and_then(|b| b.convolution(weights(4, 18), Window::square(3, 1, 1), Some(vec![0.1; 4])))
            .and_then(|b| b.activation(Activation::Relu))
            .unwrap();
        let skip = start.here();
        start
            .convolution(weights(4, 36), Window::square(3, 1, 1), None)
            .and_then(|b| b.plus(skip))
            .and_then(|b| b.activation(Activation::Relu))
            .and_then(|b| b.grouped_convolution(weights(6, 18), Window::square(3, 2, 1), 2, None))
            .and_then(|b| b.activation(Activation::Relu))
            .and_then(|b| b.global_average())
            .and_then(|b| b.linear(weights(3, 6), Some(vec![0.2; 3])))
            .and_then(|b| b.build())
            .unwrap()
    }

    #[test]
    fn feature_maps_that_walk_elsewhere_have_the_same_bits() {
        let (network, mut random) = (convolutional(), Random::new(6));
        // Two whole shards and a part of one; positions that fill no block of samples.
        let u = Matrix::from_fn(4 * WalkTask::PIECE + 300, 72, |_, _| random.normal() as f32);
        let baseline = ImplicitModel::from_network(&network).unwrap();
        let source = Collected::new(&network, &u).unwrap();
        for (target_sparsity, objective) in [
            (Some(0.5), Objective::Cardinality),
            (None, Objective::Convex(std::sync::Arc::new(L1::new(1e-2).unwrap()))),
        ] {
            let positions = 5;
            let settings = TrainSettings { objective, target_sparsity, positions, ..TrainSettings::default() };
            let with = |keep: &dyn Keep| {
                let (cancel, mut ignore) = (Cancel::new(), |_| {});
                let mut run = Run { threads: Threads::new(2), cancel: &cancel, keep, progress: &mut ignore };
                let weights = importance_on(Device::Cpu, &network, &u, 2, 3, &run).unwrap();
                let input = TrainInput {
                    source: &source,
                    baseline: Some(&baseline),
                    importance: Some(&weights),
                    preprocessing: Default::default(),
                };
                train(&input, &settings, &mut run).unwrap()
            };
            let there = Elsewhere { network: Some(convolutional()), ..Elsewhere::new(&source, &settings) };
            let (here, there_trained) = (with(&Forget), with(&there));
            assert_eq!(here.model.to_bytes(), there_trained.model.to_bytes());
            assert_eq!(here.report.rows, there_trained.report.rows);
            assert_eq!(here.report.rows_bounded().is_some(), target_sparsity.is_some());
            assert!(!there.walks.lock().unwrap().is_empty() && there.shards.lock().unwrap().is_empty());
        }
    }

    #[test]
    fn a_shard_refuses_what_does_not_fit() {
        let (network, settings) = (convolutional(), TrainSettings::default());
        let model = ImplicitModel::from_network(&network).unwrap();
        let task = WalkTask { model, samples: 300, cascade: true };
        let bytes = task.to_bytes();
        assert!(WalkTask::from_bytes(&bytes[..12]).is_err() && WalkTask::from_bytes(&bytes[..40]).is_err());
        let shard = |rows, cols, first| Shard::new(task.clone(), &settings, Matrix::zeros(rows, cols), first, 1.0);
        assert!(shard(10, 71, 0).is_err() && shard(10, 72, 7).is_err() && shard(45, 72, 256).is_err());
        let mut shard = shard(44, 72, 256).unwrap();
        let mut step = |step| shard.step(step, Threads::one(), &Cancel::new());
        assert!(step(Step::Enter(99)).is_err() && step(Step::Leave(0, vec![vec![(1000, 1.0)]])).is_err());
        assert!(step(Step::Enter(0)).is_ok());
        let step = Step::Leave(3, vec![vec![(2, 0.5)], vec![]]);
        let bytes = step.to_bytes();
        assert_eq!(Step::from_bytes(&bytes).unwrap(), step);
        assert!(Step::from_bytes(&bytes[..bytes.len() - 8]).is_err() && Step::from_bytes(&bytes[1..]).is_err());
    }

    #[test]
    fn row_weights_refuse_what_does_not_fit() {
        let network = convolutional();
        let model = ImplicitModel::from_network(&network).unwrap();
        let task = WeightsTask::Joint { samples: 40, baseline: Box::new(model.clone()), rough: Box::new(model) };
        let bytes = task.to_bytes();
        assert_eq!(WeightsTask::from_bytes(&bytes).unwrap().to_bytes(), bytes);
        assert!(WeightsTask::from_bytes(&bytes[..20]).is_err() && WeightsTask::from_bytes(&bytes[..99]).is_err());
        let run = |task: &WeightsTask, network: Option<&Network>, cols, first| {
            task.run(network, &Matrix::zeros(40, cols), first, Threads::one(), &Cancel::new())
        };
        assert!(run(&task, None, 71, 0).is_err() && run(&task, None, 72, 3).is_err());
        assert_eq!(run(&task, None, 72, 0).unwrap().len(), 2);
        let own = |size| WeightsTask::Own { samples: 40, size, draws: 1, seed: 0, maps: true };
        assert!(run(&own(256), None, 72, 0).is_err() && run(&own(3), Some(&network), 72, 0).is_err());
        assert!(run(&own(128), Some(&network), 72, 0).is_err() && run(&own(256), Some(&network), 72, 0).is_ok());
    }

    #[test]
    fn damaged_tasks_are_refused() {
        let task = StatisticsTask {
            rows: vec![1, 2],
            columns: vec![0, 3],
            beside: vec![4],
            stage: Some(states(10).0),
            model: Some(states(10).0),
            samples: 9,
        };
        let bytes = task.to_bytes();
        assert_eq!(StatisticsTask::from_bytes(&bytes).unwrap(), task);
        assert!(StatisticsTask::from_bytes(&bytes[..bytes.len() - 1]).is_err());
        assert!(StatisticsTask::from_bytes(&[255; 40]).is_err());
        let cardinality = CardinalitySettings { moves: false, ..Default::default() };
        let (problems, answers) = (vec![RowProblem::new(0, 1.0)], Some(vec![vec![1.0, 2.0]]));
        let rows = RowsTask { strength: 1.0, cardinality: cardinality.clone(), problems, answers, inverses: 0 };
        let bytes = rows.to_bytes();
        let read = RowsTask::from_bytes(&bytes).unwrap();
        assert_eq!((read.cardinality, &read.answers), (cardinality, &rows.answers));
        assert!(RowsTask::from_bytes(&bytes[8..]).is_err());
        assert!(RowsTask::from_bytes(&[&bytes[..], &[0; 8]].concat()).is_err());
    }
}
