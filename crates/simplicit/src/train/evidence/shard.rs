//! The walk of a network with feature maps over samples that several processes share: each holds some of them, with
//! the states of the layers that will still be read.
//!
//! The driver sends every shard the same steps: enter the layer of a group, and leave it with the rows that were
//! solved. Statistics are computed between the two and change nothing. A shard's state follows from its inputs and the steps
//! so far, so a shard that is lost is made again from the same steps and has the same bits.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::layout::Layout;
use crate::linalg::Matrix;
use crate::memory::{self, MemoryBudget};
use crate::model::ImplicitModel;
use crate::parallel::{Cancel, Threads};
use crate::states::{StateBlock, StateShape, StateSource};
use crate::statistics::Statistics;
use crate::train::delegate::Delegate;
use crate::train::delegate::numbers::{self, Numbers};
use crate::train::evidence::walks::{PIECE, Paused, Walks, given_outputs};
use crate::train::keep::{Forget, Keep};
use crate::train::plan::connections;
use crate::train::plan::{Group, Plan};
use crate::train::rows::build::{Build, Row};
use crate::train::{ModelSettings, Run, TrainInput, TrainSettings};
use crate::{Error, Result};

/// The data that a shard starts from, besides its inputs and the settings.
#[derive(Debug, Clone)]
pub struct WalkTask {
    pub(in crate::train) model: ImplicitModel,
    pub(in crate::train) samples: usize,
    pub(in crate::train) cascade: bool,
    /// The outputs to match, one sample per row, if they differ from the model's own: in a search in stages they are
    /// the network's outputs, and the model is that of the stage before.
    pub(in crate::train) outputs: Option<Matrix<f32>>,
}

impl WalkTask {
    /// Number of images in a piece: a shard has 2ᵏ pieces, and the last shard has the rest.
    pub const PIECE: usize = PIECE;

    /// How many of the run's first samples the walk is over; the others are held out.
    pub fn samples(&self) -> usize {
        self.samples
    }

    /// Serialises the task for another process.
    pub fn to_bytes(&self) -> Vec<u8> {
        self.parts().concat()
    }

    /// [`WalkTask::to_bytes`] in two parts. The second, the model and the outputs to match, is large, and the same for all
    /// walks over the same samples.
    pub fn parts(&self) -> [Vec<u8>; 2] {
        let outputs = self.outputs.as_ref().map_or(&[][..], |y| y.as_slice());
        let numbers = [self.samples as u64, u64::from(self.cascade), outputs.len() as u64];
        let mut large: Vec<u8> = outputs.iter().flat_map(|y| y.to_le_bytes()).collect();
        large.extend(self.model.to_bytes());
        [numbers.map(u64::to_le_bytes).concat(), large]
    }

    /// The inverse of [`WalkTask::to_bytes`].
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let bad = || Error::shape("walk", "what to_bytes wrote", format!("{} other bytes", bytes.len()));
        let (numbers, large) = bytes.split_at_checked(24).ok_or_else(bad)?;
        let number = |at: usize| numbers.as_chunks::<8>().0.get(at).map(|b| u64::from_le_bytes(*b));
        let count = |at: usize| number(at).and_then(|n| usize::try_from(n).ok()).ok_or_else(bad);
        let (samples, cascade, values) = (count(0)?, count(1)? != 0, count(2)?);
        let of_outputs = values.checked_mul(4).and_then(|length| large.split_at_checked(length));
        let (outputs, model) = of_outputs.ok_or_else(bad)?;
        let model = ImplicitModel::from_bytes(model, "walk")?;
        let outputs = match values {
            0 => None,
            _ => {
                let values = outputs.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
                Some(Matrix::from_vec(samples, model.shape().outputs, values)?)
            }
        };
        Ok(Self { model, samples, cascade, outputs })
    }
}

/// A step that all shards do between two groups.
#[derive(Debug, Clone, PartialEq)]
pub enum Step {
    /// Run the baseline through the layer of the group with this number, and keep its targets.
    Enter(usize),
    /// The group is solved; these are its rows as lists of (feature, weight). Empty without a cascade, which does not
    /// need them.
    Leave(usize, Vec<Vec<(usize, f32)>>),
}

impl Step {
    /// Serialises the step for another process.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = Vec::new();
        match self {
            Self::Enter(group) => out.push(*group as f64),
            Self::Leave(group, rows) => {
                out.extend([*group as f64, rows.len() as f64]);
                for row in rows {
                    out.push(row.len() as f64);
                    out.extend(row.iter().flat_map(|&(j, w)| [j as f64, f64::from(w)]));
                }
            }
        }
        numbers::to_bytes(&out)
    }

    /// The inverse of [`Step::to_bytes`].
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let (numbers, tail) = bytes.as_chunks::<8>();
        let mut left = Numbers(numbers);
        let step = Self::read(&mut left).filter(|_| left.0.is_empty() && tail.is_empty());
        step.ok_or_else(|| {
            Error::shape("step of a walk", "what to_bytes wrote", format!("{} other bytes", bytes.len()))
        })
    }

    fn read(left: &mut Numbers) -> Option<Self> {
        let group = left.count()?;
        if left.0.is_empty() {
            return Some(Self::Enter(group));
        }
        let mut rows = Vec::new();
        for _ in 0..left.count()? {
            let length = left.count()?;
            rows.push((0..length).map(|_| Some((left.count()?, left.next()? as f32))).collect::<Option<_>>()?);
        }
        Some(Self::Leave(group, rows))
    }
}

/// Some of the samples, and the layers that the walk over them has reached.
pub struct Shard {
    task: WalkTask,
    settings: TrainSettings,
    plan: Plan,
    inputs: Matrix<f32>,
    first: usize,
    memory_budget: Arc<MemoryBudget>,
    rows: Vec<Row>,
    /// The state of the walk; `None` only during a call.
    at: Option<Paused>,
}

impl Shard {
    /// The inputs are the samples from number `first` on, which is a multiple of [`WalkTask::PIECE`]. Their layers
    /// may take `share` of half of the memory that is free now; the rest is kept in a file.
    pub fn new(
        task: WalkTask,
        settings: &TrainSettings,
        inputs: Matrix<f32>,
        first: usize,
        share: f64,
    ) -> Result<Self> {
        let (expected, got) = (task.model.shape().inputs, inputs.cols());
        if expected != got || inputs.rows() == 0 {
            let got = format!("{} samples of {got}", inputs.rows());
            return Err(Error::shape("inputs of a shard", format!("samples of {expected} values"), got));
        }
        if !first.is_multiple_of(PIECE) || first + inputs.rows() > task.samples {
            let expected = format!("a multiple of {PIECE} within {} samples", task.samples);
            return Err(Error::shape("first sample of a shard", expected, first));
        }
        let settings = TrainSettings {
            model: ModelSettings { cascade: task.cascade, ..settings.model.clone() },
            ..settings.clone()
        };
        let memory = memory::free().map_or(u64::MAX, |free| (0.5 * share * free as f64) as u64);
        let memory_budget = MemoryBudget::new(memory, &std::env::temp_dir());
        let source = Samples { task: &task, inputs: &inputs, first };
        let input = input(&source);
        let plan = connections::plan(&input, &settings)?;
        let at = Walks::new(&input, &settings, &plan, &memory_budget)?.pause();
        let rows = vec![Row::default(); plan.outputs.rows.end];
        Ok(Self { task, settings, plan, inputs, first, memory_budget, rows, at: Some(at) })
    }

    /// Does one step.
    pub fn step(&mut self, step: Step, threads: Threads, cancel: &Cancel) -> Result<()> {
        let (Step::Enter(number) | Step::Leave(number, _)) = step;
        if let Step::Leave(_, rows) = step {
            let group = group(&self.plan, number)?;
            let (places, first) = (group.places(), group.rows.start);
            if rows.len() > group.rows.len() || rows.iter().flatten().any(|(j, _)| *j >= places.len()) {
                let expected = format!("{} rows over {} features", group.rows.len(), places.len());
                return Err(Error::shape("rows of a step", expected, "others"));
            }
            for (k, row) in rows.into_iter().enumerate() {
                self.rows[first + k] = Row { entries: row.into_iter().map(|(j, w)| (places[j], w)).collect() };
            }
            return self.walk(number, threads, cancel, |walks, group, built, settings, run| {
                walks.leave(settings, group, built, run)
            });
        }
        self.walk(number, threads, cancel, |walks, group, _, settings, run| walks.enter(settings, group, run))
    }

    /// Statistics of the group that was entered last, over these samples.
    pub fn statistics(&mut self, group: usize, threads: Threads, cancel: &Cancel) -> Result<Statistics> {
        self.walk(group, threads, cancel, |walks, group, _, settings, run| walks.statistics(settings, group, run))
    }

    fn walk<T>(
        &mut self,
        number: usize,
        threads: Threads,
        cancel: &Cancel,
        work: impl FnOnce(&mut Walks, &Group, &Build, &TrainSettings, &mut Run) -> Result<T>,
    ) -> Result<T> {
        let group = group(&self.plan, number)?;
        let source = Samples { task: &self.task, inputs: &self.inputs, first: self.first };
        let input = input(&source);
        let walks = Walks::new(&input, &self.settings, &self.plan, &self.memory_budget)?;
        // A call that panicked has taken the state and never put it back.
        let lost = || Error::unsupported("a walk that broke off in the middle of a step", "begin it again");
        let mut walks = walks.among(self.first, self.task.samples).resume(self.at.take().ok_or_else(lost)?);
        let mut built = Build::new(&self.plan);
        built.rows = std::mem::take(&mut self.rows);
        let mut run = Run { threads, cancel, keep: &Forget, progress: &mut |_| {} };
        let result = work(&mut walks, group, &built, &self.settings, &mut run);
        self.at = Some(walks.pause());
        self.rows = built.rows;
        result
    }
}

fn group(plan: &Plan, number: usize) -> Result<&Group> {
    let missing = || Error::shape("group of a walk", format!("below {}", plan.groups().count()), number);
    plan.groups().nth(number).ok_or_else(missing)
}

fn input<'a>(source: &'a Samples) -> TrainInput<'a> {
    TrainInput { source, baseline: Some(&source.task.model), importance: None, preprocessing: Default::default() }
}

/// The inputs of a shard, from sample number `first` on, and the outputs that its task came with: the walk makes the states.
struct Samples<'a> {
    task: &'a WalkTask,
    inputs: &'a Matrix<f32>,
    first: usize,
}

impl StateSource for Samples<'_> {
    fn layout(&self) -> &Layout {
        self.task.model.layout()
    }

    fn shape(&self) -> StateShape {
        self.task.model.shape()
    }

    fn samples(&self) -> usize {
        self.inputs.rows()
    }

    fn inputs(&self, samples: std::ops::Range<usize>) -> Result<Matrix<f32>> {
        rows(self.inputs, samples)
    }

    fn ends(&self, samples: std::ops::Range<usize>) -> Result<(Matrix<f32>, Matrix)> {
        let none = || Error::unsupported("outputs of a shard at once", "it computes them at the end of its walk");
        let outputs = self.task.outputs.as_ref().ok_or_else(none)?;
        let numbered = self.first + samples.start..self.first + samples.end;
        Ok((self.inputs(samples)?, rows(outputs, numbered)?.cast()))
    }

    fn outputs_follow_from_states(&self) -> bool {
        self.task.outputs.is_none()
    }

    fn block(&self, _: std::ops::Range<usize>) -> Result<StateBlock> {
        Err(Error::unsupported("states of a shard at once", "it walks through them a layer at a time"))
    }
}

fn rows(of: &Matrix<f32>, range: std::ops::Range<usize>) -> Result<Matrix<f32>> {
    let (cols, values) = (of.cols(), of.as_slice());
    Matrix::from_vec(range.len(), cols, values[range.start * cols..range.end * cols].to_vec())
}

/// The walkers for a pass over all groups: this process, or other processes.
pub(in crate::train) enum Walkers<'a> {
    Here(Box<Walks<'a>>),
    Elsewhere(Elsewhere<'a>),
}

/// The driver's side of shards in other processes.
pub(in crate::train) struct Elsewhere<'a> {
    delegate: &'a dyn Delegate,
    walk: usize,
    /// The number of the present group.
    group: usize,
    cascade: bool,
    /// Steps that have not been sent to the shards yet.
    steps: Vec<Step>,
}

impl Drop for Elsewhere<'_> {
    fn drop(&mut self) {
        self.delegate.end_walk(self.walk);
    }
}

impl<'a> Walkers<'a> {
    /// A walk that starts at the first layer.
    pub(in crate::train) fn new(
        input: &'a TrainInput<'a>,
        settings: &TrainSettings,
        plan: &'a Plan,
        memory_budget: &Arc<MemoryBudget>,
        keep: &'a dyn Keep,
        run: &Run,
    ) -> Result<Self> {
        let (Some(delegate), Some(model)) = (keep.delegate(), input.baseline) else {
            return Ok(Self::Here(Box::new(Walks::new(input, settings, plan, memory_budget)?)));
        };
        let (source, mut outputs) = (input.source, None);
        if !source.outputs_follow_from_states() {
            let mut values = Vec::with_capacity(source.samples() * source.shape().outputs);
            given_outputs(source, run, |y| {
                values.extend_from_slice(y.as_slice());
                Ok(())
            })?;
            outputs = Some(Matrix::from_vec(source.samples(), source.shape().outputs, values)?);
        }
        let cascade = settings.model.cascade;
        let task = WalkTask { model: model.clone(), samples: source.samples(), cascade, outputs };
        let walk = delegate.begin_walk(&task)?;
        Ok(Self::Elsewhere(Elsewhere { delegate, walk, group: 0, cascade: task.cascade, steps: Vec::new() }))
    }

    /// Does the work of [`Walks::enter`].
    pub(in crate::train) fn enter(&mut self, settings: &TrainSettings, group: &Group, run: &Run) -> Result<()> {
        match self {
            Self::Here(walks) => walks.enter(settings, group, run),
            Self::Elsewhere(there) => {
                there.steps.push(Step::Enter(there.group));
                Ok(())
            }
        }
    }

    /// Does the work of [`Walks::statistics`].
    pub(in crate::train) fn statistics(
        &mut self,
        settings: &TrainSettings,
        group: &Group,
        run: &mut Run,
    ) -> Result<Statistics> {
        match self {
            Self::Here(walks) => walks.statistics(settings, group, run),
            Self::Elsewhere(there) => {
                let (shape, steps) = ((group.features(), group.rows.len()), std::mem::take(&mut there.steps));
                there.delegate.walk(there.walk, &steps, there.group, shape)
            }
        }
    }

    /// Does the work of [`Walks::leave`].
    pub(in crate::train) fn leave(
        &mut self,
        settings: &TrainSettings,
        group: &Group,
        built: &Build,
        run: &Run,
    ) -> Result<()> {
        match self {
            Self::Here(walks) => walks.leave(settings, group, built, run),
            Self::Elsewhere(there) => {
                let features: BTreeMap<_, _> = group.places().into_iter().enumerate().map(|(j, p)| (p, j)).collect();
                let rows = if there.cascade { &built.rows[group.rows.clone()] } else { &[] };
                let entries =
                    |row: &Row| row.entries.iter().filter_map(|(p, w)| Some((*features.get(p)?, *w))).collect();
                there.steps.push(Step::Leave(there.group, rows.iter().map(entries).collect()));
                there.group += 1;
                Ok(())
            }
        }
    }
}
