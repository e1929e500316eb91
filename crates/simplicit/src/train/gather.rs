//! One pass over the samples for a group: its features against its targets, where a sample is an image or, for a
//! feature map, a position in an image.

use std::borrow::Cow;
use std::sync::Arc;

use super::build::Build;
use super::delegate::StatisticsTask;
use super::plan::{Group, Place, Plan, Segment};
use super::walk::{Reader, SAMPLES, Walk, activated, operand};
use super::{Progress, Run, TrainInput, TrainSettings, layout};
use crate::Result;
use crate::backend;
use crate::equilibrium::LayerSum;
use crate::layout::MapShape;
use crate::linalg::Matrix;
use crate::memory::{Pile, Room};
use crate::model::{TapBlock, TapWeights, Target};
use crate::network::{Convolution, Source};
use crate::random::Random;
use crate::statistics::{BLOCK, Statistics, WIDE, are_few};

/// Samples per feature that positions are added for where a few per image would not give as many.
const SAMPLES_PER_FEATURE: usize = 20;

/// Statistics of a group whose rows have no shared weights, from the source's own states or those of the model built so
/// far. One pass for the states alone: inputs, constant and targets are the same for every model and gathered once.
pub(super) fn gather(
    input: &TrainInput,
    settings: &TrainSettings,
    group: &Group,
    own: Option<&Build>,
    inputs: &mut Option<Arc<Statistics>>,
    run: &mut Run,
) -> Result<Statistics> {
    let shape = input.source.shape();
    let (n, all) = (shape.states, shape.states + shape.outputs);
    let shared = match inputs {
        Some(shared) => shared.clone(),
        None => {
            let columns = (n..=n + shape.inputs).collect();
            let task = StatisticsTask::new(input, (0..all).collect(), columns, Vec::new(), None);
            let shared = Arc::new(pass(&task, input, "inputs", Some("inputs statistics"), run)?);
            inputs.insert(shared).clone()
        }
    };
    let first = group.first_unit + if group.target == Some(Target::Output) { n } else { 0 };
    let rows: Vec<usize> = (first..first + group.rows.len()).collect();
    let column = |place: Place| match place {
        Place::Column(j) => Some(j),
        Place::Constant => Some(n + shape.inputs),
        Place::Tap { .. } => None,
    };
    let columns: Vec<usize> = group.places().into_iter().filter_map(column).collect();
    let (states, rest) = columns.split_at(columns.partition_point(|&j| j < n));
    let fixed = shared.part(&rest.iter().map(|j| j - n).collect::<Vec<_>>(), &rows);
    if states.is_empty() {
        return Ok(fixed);
    }
    let model = own.map(|built| built.model(input, settings)).transpose()?;
    let task = StatisticsTask::new(input, rows, states.to_vec(), rest.to_vec(), model);
    pass(&task, input, &group.name, None, run)?.followed_by(&fixed)
}

/// One pass over the samples, here or elsewhere; kept under `key` where there is one.
fn pass(task: &StatisticsTask, input: &TrainInput, name: &str, key: Option<&str>, run: &mut Run) -> Result<Statistics> {
    let (d, r) = task.shape();
    if let Some(key) = key
        && let Some(bytes) = run.keep.get(key)?
        && let Some(statistics) = Statistics::from_bytes(&bytes, d, r)
    {
        return Ok(statistics);
    }
    let total = task.samples();
    let statistics = match run.keep.delegate() {
        Some(elsewhere) => elsewhere.statistics(task)?,
        None => task.run(input.source.origin().unwrap_or(input.source), run.threads, run.cancel, |done| {
            (run.progress)(Progress::Samples { group: name.to_string(), done, total });
        })?,
    };
    if let Some(key) = key {
        run.keep.put(key, &statistics.to_bytes())?;
    }
    Ok(statistics)
}

/// The baseline and the model that is built from it, walking side by side through the layers of all samples.
pub(super) struct Walks<'a> {
    input: &'a TrainInput<'a>,
    blocks: &'a [TapBlock],
    seed: u64,
    room: Arc<Room>,
    baseline: Walk<'a>,
    /// `None` without a cascade: the baseline's states are the features.
    own: Option<Walk<'a>>,
    /// The group after which each layer is no longer read.
    last_reader: Vec<usize>,
    /// How many groups are done.
    done: usize,
    /// How many layers are done.
    layers_done: usize,
    /// The layer entered last, while it has groups left.
    entered: Option<Target>,
    /// The baseline's pre-activations of the present layer at the chosen positions, a block of samples each.
    targets: Pile,
}

/// The group after which each layer is no longer read.
pub(super) fn last_readers(plan: &Plan, input: &TrainInput) -> Vec<usize> {
    let layout = layout(input);
    let n = layout.size();
    let mut last_reader = vec![0; layout.layers().len()];
    for (at, group) in plan.groups().enumerate() {
        let blocks = plan.blocks.iter().filter(|b| Some(b.target) == group.target);
        let layers = blocks.filter_map(|b| match b.source {
            Source::Layer(k) => Some(k),
            Source::Input => None,
        });
        layers.for_each(|k| last_reader[k] = at);
        if let Some(Target::Layer(own)) = group.target {
            for operand in layout.layers()[own].operands() {
                if let Source::Layer(k) = operand.source {
                    last_reader[k] = at;
                }
            }
        }
        for segment in &group.segments {
            if let Segment::Columns(columns) = segment {
                let layers = columns.iter().filter(|&&j| j < n).filter_map(|&j| layout.layer_of(j));
                layers.for_each(|k| last_reader[k] = at);
            }
        }
    }
    last_reader
}

impl<'a> Walks<'a> {
    /// At the first layer.
    pub(super) fn new(input: &'a TrainInput<'a>, settings: &TrainSettings, plan: &'a Plan, room: &Arc<Room>) -> Self {
        let walk = || Walk::new(input.source, layout(input).layers().len());
        Self {
            input,
            blocks: &plan.blocks,
            seed: settings.seed,
            room: room.clone(),
            baseline: walk(),
            own: settings.cascade.then(walk),
            last_reader: last_readers(plan, input),
            done: 0,
            layers_done: 0,
            entered: None,
            targets: Pile::new(room),
        }
    }

    /// Runs the baseline through the layer of the next group, unless a group before it did, and notes its targets.
    pub(super) fn enter(&mut self, settings: &TrainSettings, group: &Group, run: &Run) -> Result<()> {
        let (Some(target), Some(model)) = (group.target, self.input.baseline) else { return Ok(()) };
        if self.entered == Some(target) {
            return Ok(());
        }
        self.entered = Some(target);
        let chosen = Chosen::new(settings, group, self.baseline.samples(), self.seed, self.layers_done);
        let layer = match target {
            Target::Layer(k) => Some((k, layout(self.input).layers()[k].activation)),
            Target::Output => None,
        };
        // Rows of the whole layer; none where nothing is solved.
        let rows = match target {
            _ if !group.is_measured() => 0,
            Target::Layer(k) => layout(self.input).layers()[k].rows(),
            Target::Output => group.rows.len(),
        };
        let positions = group.positions;
        let sum = LayerSum::new(model, target);
        let (mut targets, mut states) = (Pile::new(&self.room), Pile::new(&self.room));
        self.baseline.sums(
            &sum,
            run.threads,
            run.cancel,
            |block, z| {
                let mut targets = Vec::with_capacity(z.rows() * chosen.per_sample * rows);
                for i in 0..z.rows() {
                    let z = z.row(i);
                    for at in chosen.of(block * SAMPLES + i) {
                        targets.extend((0..rows).map(|k| z[k * positions + at]));
                    }
                }
                (targets, layer.map(|(_, activation)| activated(z, activation)))
            },
            |(t, x)| {
                targets.push(Matrix::from_vec(t.len() / rows.max(1), rows, t)?)?;
                x.map_or(Ok(()), |x| states.push(x))
            },
        )?;
        self.targets = targets;
        if let Some((k, _)) = layer {
            self.baseline.put(k, states);
        }
        Ok(())
    }

    /// Statistics of the group entered last, at the seeded choice of positions.
    pub(super) fn statistics(&self, settings: &TrainSettings, group: &Group, run: &mut Run) -> Result<Statistics> {
        let walk = self.own.as_ref().unwrap_or(&self.baseline);
        let (d, rows) = (group.features(), group.rows.len());
        let chosen = Chosen::new(settings, group, walk.samples(), self.seed, self.layers_done);
        let total = walk.samples() * chosen.per_sample;
        let residuals: Vec<&TapBlock> = self
            .blocks
            .iter()
            .filter(|b| Some(b.target) == group.target && !matches!(b.weights, TapWeights::Taps(_)))
            .collect();
        let read = |range: std::ops::Range<usize>| {
            let mut features = Matrix::zeros(range.len(), d);
            let mut targets = Matrix::zeros(range.len(), rows);
            let mut room = Vec::new();
            let mut values = walk.reader();
            let mut known: Option<(usize, Cow<Matrix<f32>>)> = None;
            for image in range.start / chosen.per_sample..range.end.div_ceil(chosen.per_sample) {
                let first = image * chosen.per_sample;
                let positions = chosen.of(image);
                let span = range.start.max(first)..range.end.min(first + chosen.per_sample);
                let here = &positions[span.start - first..span.end - first];
                let at = span.start - range.start;
                self.fill_features(&mut values, group, image, here, at, &mut features, &mut room)?;
                let block = image / SAMPLES;
                let known = match &mut known {
                    Some((number, found)) if *number == block => found,
                    other => &mut other.insert((block, self.targets.get(block)?)).1,
                };
                let start = (image % SAMPLES) * chosen.per_sample + span.start - first;
                for k in 0..here.len() {
                    let row = targets.row_mut(at + k).iter_mut();
                    row.zip(&known.row(start + k)[group.first_row..]).for_each(|(t, z)| *t = f64::from(*z));
                }
                for block in &residuals {
                    let x = operand(values.sample(block.source, image)?, &block.maps, &mut room);
                    for (k, position) in here.iter().enumerate() {
                        let row = targets.row_mut(at + k).iter_mut().enumerate();
                        row.for_each(|(c, t)| {
                            let unit = (group.first_row + c) * group.positions + position;
                            *t -= f64::from(block.unit_factor(unit) * x[unit]);
                        });
                    }
                }
            }
            Ok((features, targets))
        };
        let (threads, cancel) = (run.threads, run.cancel);
        let mut progress = |done| (run.progress)(Progress::Samples { group: group.name.clone(), done, total });
        if let Some(cuda) = backend::gpu(settings.device, BLOCK as f64 * (d * d) as f64)? {
            let sums = Statistics::stream_on(&cuda, total, threads, cancel, read, &mut progress);
            if let Some(statistics) = backend::or_cpu(settings.device, sums)? {
                return Ok(statistics);
            }
        }
        if d >= WIDE && !are_few(total, d) {
            return Statistics::stream_wide(total, [d, rows], threads, cancel, read, progress);
        }
        Statistics::stream(total, threads, cancel, read, progress)
    }

    /// The features of some positions of an image into rows `at..` of the block.
    #[allow(clippy::too_many_arguments)]
    fn fill_features(
        &self,
        values: &mut Reader,
        group: &Group,
        image: usize,
        positions: &[usize],
        at: usize,
        features: &mut Matrix,
        room: &mut Vec<f32>,
    ) -> Result<()> {
        let layout = layout(self.input);
        let n = layout.size();
        let mut first = 0;
        for segment in &group.segments {
            match segment {
                Segment::Columns(columns) => {
                    // Only rows of single units have such columns, so there is one position.
                    let mut slots = features.row_mut(at)[first..].iter_mut();
                    let mut from = 0;
                    while let Some(&start) = columns.get(from) {
                        let (source, range) = match layout.layer_of(start) {
                            Some(k) => (Source::Layer(k), layout.range(k)),
                            None => (Source::Input, n..usize::MAX),
                        };
                        let x = values.sample(source, image)?;
                        let count = columns[from..].partition_point(|j| range.contains(j));
                        let own = &columns[from..from + count];
                        slots.by_ref().zip(own).for_each(|(slot, j)| *slot = f64::from(x[j - range.start]));
                        from += count;
                    }
                    first += columns.len();
                }
                Segment::Taps { block, first: first_tap, columns } => {
                    let block = &self.blocks[*block];
                    let (area, positions_in) = (block.window.area(), block.input.positions());
                    let input = MapShape { channels: columns / area, ..block.input };
                    let geometry = Convolution { input, output: block.output, window: block.window };
                    let x = operand(values.sample(block.source, image)?, &block.maps, room);
                    let x = &x[first_tap / area * positions_in..];
                    for (k, &position) in positions.iter().enumerate() {
                        geometry.window_at(x, position, &mut features.row_mut(at + k)[first..first + columns]);
                    }
                    first += columns;
                }
                Segment::Constant => {
                    (0..positions.len()).for_each(|k| features[(at + k, first)] = 1.0);
                    first += 1;
                }
            }
        }
        Ok(())
    }

    /// Runs the model built so far through the layer entered last, once all of its groups are done, and forgets what
    /// nobody reads any more.
    pub(super) fn leave(&mut self, group: &Group, built: &Build, run: &Run) -> Result<()> {
        if !group.completes_layer {
            self.done += 1;
            return Ok(());
        }
        if let (Some(own), Some(target @ Target::Layer(k))) = (&mut self.own, group.target) {
            let sum = built.layer_sum(self.input, target);
            let activation = layout(self.input).layers()[k].activation;
            own.enter(k, &sum, activation, &self.room, run.threads, run.cancel)?;
        }
        for (k, _) in self.last_reader.iter().enumerate().filter(|(_, last)| **last == self.done) {
            self.baseline.forget(k);
            if let Some(own) = &mut self.own {
                own.forget(k);
            }
        }
        self.targets = Pile::new(&self.room);
        self.done += 1;
        self.layers_done += 1;
        self.entered = None;
        Ok(())
    }
}

/// The positions that stand for all of a map: as many of every sample, drawn without replacement, the same for any
/// number of threads.
struct Chosen {
    positions: usize,
    per_sample: usize,
    seed: u64,
}

/// Positions of all samples together that a group's statistics are made from.
pub(super) fn samples_of(group: &Group, settings: &TrainSettings, samples: usize) -> usize {
    samples * per_sample(group, settings, samples)
}

fn per_sample(group: &Group, settings: &TrainSettings, samples: usize) -> usize {
    let wanted = (SAMPLES_PER_FEATURE * group.features()).div_ceil(samples.max(1));
    settings.positions.max(wanted).min(group.positions)
}

impl Chosen {
    fn new(settings: &TrainSettings, group: &Group, samples: usize, seed: u64, layer: usize) -> Self {
        let mut stream = Random::new(seed ^ (layer as u64).wrapping_mul(0x9e6c_63d0_876a_9a7b));
        Self { positions: group.positions, per_sample: per_sample(group, settings, samples), seed: stream.bits() }
    }

    fn of(&self, sample: usize) -> Vec<usize> {
        if self.per_sample == self.positions {
            return (0..self.positions).collect();
        }
        Random::new(self.seed ^ (sample as u64).wrapping_mul(0x2545_f491_4f6c_dd1d))
            .choose(self.positions, self.per_sample)
    }
}
