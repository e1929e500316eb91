//! Work done elsewhere, in other processes or on other machines, with the bits it would have had here.
//!
//! Training has two heavy steps, and both are pure functions of a few bytes: statistics of a group over some samples
//! ([`StatisticsTask`]), and a block of rows over those statistics ([`RowsTask`]). A [`Delegate`] runs them wherever it
//! likes, as often as it likes: a lost result is computed again and is the same.

use super::solve::{ROW_EXTRAS, solve_block};
use super::stages::OwnStates;
use super::{TrainInput, TrainSettings};
use crate::equilibrium::{Equilibrium, EquilibriumSettings};
use crate::linalg::Matrix;
use crate::model::ImplicitModel;
use crate::parallel::{Cancel, Threads};
use crate::problem::{Ball, RowProblem, Units};
use crate::solver::Design;
use crate::states::{StateMap, StateSource};
use crate::statistics::Statistics;
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
        let stage = input.source.stage().map(|(_, model)| model.clone());
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
        let staged = stage.as_ref().zip(self.stage.as_ref()).map(|(e, model)| OwnStates::new(source, model, e));
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

    /// For the journey.
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

/// A block of row problems over one design.
#[derive(Debug, Clone)]
pub struct RowsTask {
    pub(super) strength: f64,
    /// Where cardinality starts; it depends on what the features are.
    pub(super) first_rho: f64,
    pub(super) problems: Vec<RowProblem>,
}

impl RowsTask {
    /// Every row as its d weights, its gap (NaN: none) and whether it ended at a limit (0 or 1).
    pub fn run(&self, design: &Design, settings: &TrainSettings, cancel: &Cancel) -> Result<Vec<f64>> {
        for problem in &self.problems {
            problem.check(design.features(), design.targets())?;
        }
        let mut settings = settings.clone();
        settings.cardinality.first_rho = self.first_rho;
        Ok(solve_block(design, &settings, self.strength, &self.problems, cancel)?.into_iter().flatten().collect())
    }

    /// Numbers in the result, for d features.
    pub fn length(&self, features: usize) -> usize {
        self.problems.len() * (features + ROW_EXTRAS)
    }

    /// For the journey.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = vec![self.strength, self.first_rho, self.problems.len() as f64];
        let list = |values: Option<Vec<f64>>, out: &mut Vec<f64>| match values {
            Some(values) => {
                out.push(values.len() as f64);
                out.extend(values);
            }
            None => out.push(-1.0),
        };
        for problem in &self.problems {
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
        let (strength, first_rho, count) = (left.next()?, left.next()?, left.count()?);
        let mut problems = Vec::new();
        for _ in 0..count {
            let (target, fit, factor, radius) = (left.count()?, left.next()?, left.next()?, left.next()?);
            let units = if factor == 0.0 { Units::Stored } else { Units::Rms { factor } };
            let weights = left.list()?;
            let ball = left.list()?.map(|weights| Ball { radius, weights });
            let bounds = left.list()?.map(|v| v.as_chunks::<2>().0.iter().map(|[l, u]| (*l, *u)).collect());
            problems.push(RowProblem { target, fit, units, weights, ball, bounds, start: left.list()? });
        }
        Some(Self { strength, first_rho, problems })
    }
}

/// What is left to read.
struct Numbers<'a>(&'a [[u8; 8]]);

impl Numbers<'_> {
    fn next(&mut self) -> Option<f64> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(f64::from_le_bytes(*first))
    }

    /// A number of things; there cannot be more of them than numbers.
    fn count(&mut self) -> Option<usize> {
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
    use super::*;
    use crate::arrays::Array;
    use crate::layout::{Activation, Layer, Layout};
    use crate::model::DenseLayer;
    use crate::problem::{Connectivity, penalty::L1};
    use crate::random::Random;
    use crate::states::{ArrayStates, StateSlice};
    use crate::statistics::{BLOCK, Tree};
    use crate::train::{Forget, Keep, Objective, Run, TrainInput, train};

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
        settings: TrainSettings,
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
            for task in tasks.iter().rev() {
                let design = Design::new(statistics)?;
                let task = RowsTask::from_bytes(&task.to_bytes())?;
                results.push(task.run(&design, &self.settings, &Cancel::new())?);
            }
            results.into_iter().rev().enumerate().try_for_each(|(k, rows)| take(k, rows))
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
            let (here, there) = (with(&Forget), with(&Elsewhere { source: &source, settings: settings.clone() }));
            assert_eq!(here.model.to_bytes(), there.model.to_bytes());
            assert_eq!(here.report.rows, there.report.rows);
            assert!(here.model.sparsity().nonzeros > 10);
        }
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
        let rows = RowsTask { strength: 1.0, first_rho: 0.05, problems: vec![RowProblem::new(0, 1.0)] };
        let bytes = rows.to_bytes();
        assert!(RowsTask::from_bytes(&bytes).is_ok());
        assert!(RowsTask::from_bytes(&bytes[8..]).is_err());
        assert!(RowsTask::from_bytes(&[&bytes[..], &[0; 8]].concat()).is_err());
    }
}
