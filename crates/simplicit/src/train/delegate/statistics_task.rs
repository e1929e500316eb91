//! Statistics of rows of single units, as a function of some samples and a few bytes.

use crate::equilibrium::{Equilibrium, EquilibriumSettings};
use crate::linalg::Matrix;
use crate::model::ImplicitModel;
use crate::parallel::{Cancel, Threads};
use crate::states::{StateMap, StateSource};
use crate::statistics::Statistics;
use crate::train::TrainInput;
use crate::train::search::stages::OwnStates;
use crate::{Error, Result};

/// The statistics to compute: some columns of [X; U; 1] against other columns and then some rows of [Z; Y], at the
/// baseline's states or at a model's own.
#[derive(Debug, Clone, PartialEq)]
pub struct StatisticsTask {
    pub(in crate::train) rows: Vec<usize>,
    pub(in crate::train) columns: Vec<usize>,
    /// Columns that come before the rows among the targets.
    pub(in crate::train) beside: Vec<usize>,
    /// The model of the stage before, whose states replace the samples' own.
    pub(in crate::train) stage: Option<ImplicitModel>,
    /// The model whose states are the features.
    pub(in crate::train) model: Option<ImplicitModel>,
    pub(in crate::train) samples: usize,
}

impl StatisticsTask {
    pub(in crate::train) fn new(
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

    /// How many of the run's first samples the statistics are over; the others are held out.
    pub fn samples(&self) -> usize {
        self.samples
    }

    /// Number of features d and of targets r of the result.
    pub fn shape(&self) -> (usize, usize) {
        (self.columns.len(), self.beside.len() + self.rows.len())
    }

    /// Computes the statistics over all samples of `source`, which may be a shard of
    /// [`BLOCK`](crate::statistics::BLOCK)·2ᵏ samples: shards are summed by [`Tree`](crate::statistics::Tree).
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
        // Tasks also come from other processes, so nothing in them is trusted.
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
