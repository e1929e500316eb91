//! A block of rows to solve or to bound, as a function of its design and a few bytes.

use crate::parallel::{Cancel, Threads};
use crate::problem::{Ball, RowProblem, Units};
use crate::solver::{CardinalitySettings, Design};
use crate::train::delegate::numbers::{self, Numbers};
use crate::train::rows::solve::{self, BOUND_NUMBERS, ROW_EXTRAS};
use crate::train::{RowSettings, TrainSettings};
use crate::{Error, Result};

/// A block of row problems over one design, to be solved or, with answers, to be bounded.
#[derive(Debug, Clone)]
pub struct RowsTask {
    pub(in crate::train) strength: f64,
    /// The effort for cardinality rows; it depends on what the features are and on what the rows are used for.
    pub(in crate::train) cardinality: CardinalitySettings,
    pub(in crate::train) problems: Vec<RowProblem>,
    /// A row of weights per problem, if their distances from a lower bound are asked for.
    pub(in crate::train) answers: Option<Vec<Vec<f64>>>,
    /// Number of inverses that the blocks of its group share and that can be sent to a worker; 0 in a task that was read from bytes.
    pub(in crate::train) inverses: usize,
}

impl RowsTask {
    /// Runs consecutive blocks of one group; the results are in the order of the blocks. A solved row is its d
    /// weights, its gap (NaN: none) and whether it ended at a limit (0 or 1); a bounded row its value, its bound and
    /// whether it is proven.
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
        let settings = TrainSettings {
            rows: RowSettings { cardinality: first.cardinality.clone(), ..settings.rows.clone() },
            ..settings.clone()
        };
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
        let silent = &mut |_| {};
        let bounds =
            solve::bound_here(design, &settings, first.strength, &problems, &answers, threads, cancel, silent)?;
        let mut bounds = bounds.into_iter();
        let numbers = |count: usize| {
            let rows = bounds.by_ref().take(count);
            rows.flat_map(|b| [b.value, b.bound, f64::from(u8::from(b.proven))]).collect()
        };
        Ok(blocks.iter().map(|block| block.len()).map(numbers).collect())
    }

    /// Number of inverses that all blocks of its group need and that one process can make for others.
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

    /// Gives a design the result of [`RowsTask::inverse`] in another process.
    pub fn know(&self, design: &Design, number: usize, inverse: &[u8]) -> Result<()> {
        let kept = design.inverses().ok_or_else(|| Error::shape("design", "one that keeps its inverses", "another"))?;
        kept.know(self.rho(number)?, design.quadratic().features(), inverse)
    }

    /// Number of numbers in the result, for d features.
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
        numbers::to_bytes(&out)
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
