//! The walk of a network with feature maps over samples that several processes share: each holds some of them, with the
//! states of the layers that are still to be read.
//!
//! The driver tells every shard the same steps: enter the layer of a group, and leave it with the rows that were
//! solved. Statistics are asked for in between and change nothing. A shard's state follows from its inputs and the steps
//! so far, so a shard that is lost is made again from the same steps and has the same bits.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::layout::Layout;
use crate::linalg::Matrix;
use crate::memory::{self, Room};
use crate::model::ImplicitModel;
use crate::parallel::{Cancel, Threads};
use crate::states::{StateBlock, StateShape, StateSource};
use crate::statistics::Statistics;
use crate::train::delegate::Delegate;
use crate::train::delegate::numbers::{self, Numbers};
use crate::train::evidence::walks::{PIECE, Paused, Walks};
use crate::train::keep::{Forget, Keep};
use crate::train::plan::connections;
use crate::train::plan::{Group, Plan};
use crate::train::rows::build::{Build, Row};
use crate::train::{ModelSettings, Run, TrainInput, TrainSettings};
use crate::{Error, Result};

/// What a shard starts from, besides its inputs and the settings.
#[derive(Debug, Clone)]
pub struct WalkTask {
    pub(in crate::train) model: ImplicitModel,
    pub(in crate::train) samples: usize,
    pub(in crate::train) cascade: bool,
}

impl WalkTask {
    /// Images in a piece: a shard has 2ᵏ pieces, the last one what is left.
    pub const PIECE: usize = PIECE;

    /// Over the first so many samples of the run; others are held out.
    pub fn samples(&self) -> usize {
        self.samples
    }

    /// Serialises the task for another process.
    pub fn to_bytes(&self) -> Vec<u8> {
        self.parts().concat()
    }

    /// [`WalkTask::to_bytes`] in two parts, of which the second, the model, is the same for all walks of a training.
    pub fn parts(&self) -> [Vec<u8>; 2] {
        let numbers = [self.samples as u64, u64::from(self.cascade)];
        [numbers.map(u64::to_le_bytes).concat(), self.model.to_bytes()]
    }

    /// The inverse of [`WalkTask::to_bytes`].
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let bad = || Error::shape("walk", "what to_bytes wrote", format!("{} other bytes", bytes.len()));
        let (samples, rest) = bytes.split_first_chunk::<8>().ok_or_else(bad)?;
        let (cascade, model) = rest.split_first_chunk::<8>().ok_or_else(bad)?;
        let samples = usize::try_from(u64::from_le_bytes(*samples)).map_err(|_| bad())?;
        let cascade = u64::from_le_bytes(*cascade) != 0;
        Ok(Self { model: ImplicitModel::from_bytes(model, "walk")?, samples, cascade })
    }
}

/// What all shards do between two groups.
#[derive(Debug, Clone, PartialEq)]
pub enum Step {
    /// Run the baseline through the layer of group number so and so, and note its targets.
    Enter(usize),
    /// The group is solved; these are its rows, (feature, weight) each. None without a cascade, which does not read them.
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

/// Some of the samples on their way through the layers.
pub struct Shard {
    task: WalkTask,
    settings: TrainSettings,
    plan: Plan,
    inputs: Matrix<f32>,
    first: usize,
    room: Arc<Room>,
    rows: Vec<Row>,
    /// `None` only while a call is at work.
    at: Option<Paused>,
}

impl Shard {
    /// The inputs are the samples from number `first` on, which is a multiple of [`WalkTask::PIECE`]. Their layers may take
    /// `share` of half of the memory that is free now, and lie in a file beyond.
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
        let room = Room::new(memory, &std::env::temp_dir());
        let source = Samples { model: &task.model, inputs: &inputs };
        let input = input(&task, &source);
        let plan = connections::plan(&input, &settings)?;
        let at = Walks::new(&input, &settings, &plan, &room)?.pause();
        let rows = vec![Row::default(); plan.outputs.rows.end];
        Ok(Self { task, settings, plan, inputs, first, room, rows, at: Some(at) })
    }

    /// Does a step.
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
        let source = Samples { model: &self.task.model, inputs: &self.inputs };
        let input = input(&self.task, &source);
        let walks = Walks::new(&input, &self.settings, &self.plan, &self.room)?;
        // Taken by a call that panicked and never put it back.
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

fn input<'a>(task: &'a WalkTask, source: &'a Samples) -> TrainInput<'a> {
    TrainInput { source, baseline: Some(&task.model), importance: None, preprocessing: Default::default() }
}

/// Inputs alone: the walk makes the states.
struct Samples<'a> {
    model: &'a ImplicitModel,
    inputs: &'a Matrix<f32>,
}

impl StateSource for Samples<'_> {
    fn layout(&self) -> &Layout {
        self.model.layout()
    }

    fn shape(&self) -> StateShape {
        self.model.shape()
    }

    fn samples(&self) -> usize {
        self.inputs.rows()
    }

    fn inputs(&self, samples: std::ops::Range<usize>) -> Result<Matrix<f32>> {
        let (p, values) = (self.inputs.cols(), self.inputs.as_slice());
        Matrix::from_vec(samples.len(), p, values[samples.start * p..samples.end * p].to_vec())
    }

    fn block(&self, _: std::ops::Range<usize>) -> Result<StateBlock> {
        Err(Error::unsupported("states of a shard at once", "it walks through them a layer at a time"))
    }
}

/// Who walks for a pass over all groups: this process, or others.
pub(in crate::train) enum Walkers<'a> {
    Here(Box<Walks<'a>>),
    Elsewhere(Elsewhere<'a>),
}

/// The driver's side of shards in other processes.
pub(in crate::train) struct Elsewhere<'a> {
    delegate: &'a dyn Delegate,
    walk: usize,
    /// The group at hand.
    group: usize,
    cascade: bool,
    /// Steps that the shards do not know yet.
    steps: Vec<Step>,
}

impl Drop for Elsewhere<'_> {
    fn drop(&mut self) {
        self.delegate.end_walk(self.walk);
    }
}

impl<'a> Walkers<'a> {
    /// At the first layer.
    pub(in crate::train) fn new(
        input: &'a TrainInput<'a>,
        settings: &TrainSettings,
        plan: &'a Plan,
        room: &Arc<Room>,
        keep: &'a dyn Keep,
    ) -> Result<Self> {
        let (Some(delegate), Some(model)) = (keep.delegate(), input.baseline) else {
            return Ok(Self::Here(Box::new(Walks::new(input, settings, plan, room)?)));
        };
        let task = WalkTask { model: model.clone(), samples: input.source.samples(), cascade: settings.model.cascade };
        let walk = delegate.begin_walk(&task)?;
        Ok(Self::Elsewhere(Elsewhere { delegate, walk, group: 0, cascade: task.cascade, steps: Vec::new() }))
    }

    /// See [`Walks::enter`].
    pub(in crate::train) fn enter(&mut self, settings: &TrainSettings, group: &Group, run: &Run) -> Result<()> {
        match self {
            Self::Here(walks) => walks.enter(settings, group, run),
            Self::Elsewhere(there) => {
                there.steps.push(Step::Enter(there.group));
                Ok(())
            }
        }
    }

    /// See [`Walks::statistics`].
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

    /// See [`Walks::leave`].
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
