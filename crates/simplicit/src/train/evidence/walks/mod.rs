//! A walk of the baseline and of the model that is built from it, layer by layer, and the statistics of every group on
//! its way. A sample is an image or, for a feature map, a position in an image.

mod device;

use std::ops::Range;
use std::sync::Arc;

use crate::Result;
use crate::backend;
use crate::equilibrium::{LayerSum, Sum};
use crate::layout::{Layout, MapShape};
use crate::linalg::{Matrix, Scalar};
use crate::memory::{Block, MemoryBudget, Pile};
use crate::model::{TapBlock, TapWeights, Target};
use crate::network::{Convolution, Source};
use crate::parallel;
use crate::states::StateSource;
use crate::statistics::{BLOCK, Statistics, WIDE, are_few, are_single};
use crate::train::evidence::device_walk::{Chunks, Gpu};
use crate::train::evidence::positions::{Chosen, per_sample};
use crate::train::evidence::walk::{Layers, Reader, SAMPLES, Walk, activated, operand};
use crate::train::plan::{Group, Plan, Segment};
use crate::train::rows::build::Build;
use crate::train::{Progress, Run, TrainInput, TrainSettings, layout};

/// Images whose statistics are summed on their own before those of other images are added: 2ᵏ such pieces are a
/// branch of one tree of sums, and other processes may compute them, however many positions an image gives.
pub(in crate::train) const PIECE: usize = 256;

/// The baseline and the model that is built from it, walking side by side through the layers of some samples: all of them,
/// or the share of one process.
pub(in crate::train) struct Walks<'a> {
    input: &'a TrainInput<'a>,
    blocks: &'a [TapBlock],
    seed: u64,
    memory_budget: Arc<MemoryBudget>,
    /// The number of the first sample, and the number of all samples including those of other processes.
    first: usize,
    all: usize,
    baseline: Walk<'a>,
    /// `None` without a cascade: the baseline's states are the features.
    own: Option<Walk<'a>>,
    /// For every layer the group after which it is no longer read.
    last_reader: Vec<usize>,
    /// Number of groups that are done.
    done: usize,
    /// Number of layers that are done.
    layers_done: usize,
    /// The layer entered last, while groups of it are left.
    entered: Option<Target>,
    /// The baseline's pre-activations of the present layer at the chosen positions.
    targets: Targets,
}

/// Rows of a layer at chosen positions.
enum Targets {
    /// On the host: a block of rows for each block of samples.
    Host(Pile),
    /// On the device: a chunk for each chunk of samples, with a channel per row.
    Device(Chunks),
}

/// Walks between two calls, without the data that they borrow.
pub(in crate::train) struct Paused {
    baseline: Layers,
    own: Option<Layers>,
    done: usize,
    layers_done: usize,
    entered: Option<Target>,
    targets: Targets,
}

/// For every layer the group after which it is no longer read.
pub(in crate::train) fn last_readers(plan: &Plan, input: &TrainInput) -> Vec<usize> {
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

/// Columns of [X; U] in ascending order, as the units of one source after another.
fn by_source<'c>(
    layout: &'c Layout,
    columns: &'c [usize],
) -> impl Iterator<Item = (Source, impl Iterator<Item = usize> + 'c)> {
    let of = |j: usize| match layout.layer_of(j) {
        Some(k) => (Source::Layer(k), layout.range(k).start),
        None => (Source::Input, layout.size()),
    };
    let runs = columns.chunk_by(move |&a, &b| of(a) == of(b));
    runs.map(move |run| {
        let (source, first) = of(run[0]);
        (source, run.iter().map(move |j| j - first))
    })
}

/// Passes on the outputs that the samples came with, a block of [`SAMPLES`] at a time and in order.
pub(in crate::train) fn given_outputs(
    source: &dyn StateSource,
    run: &Run,
    mut take: impl FnMut(Matrix<f32>) -> Result<()>,
) -> Result<()> {
    let samples = source.samples();
    parallel::fold(
        run.threads,
        samples.div_ceil(SAMPLES),
        |block| {
            run.cancel.check()?;
            Ok(source.ends(block * SAMPLES..((block + 1) * SAMPLES).min(samples))?.1.cast())
        },
        |_, y| take(y),
    )
}

impl<'a> Walks<'a> {
    /// Walks that start at the first layer.
    pub(in crate::train) fn new(
        input: &'a TrainInput<'a>,
        settings: &TrainSettings,
        plan: &'a Plan,
        memory_budget: &Arc<MemoryBudget>,
    ) -> Result<Self> {
        let gpu = Self::gpu(input, settings, plan, memory_budget)?;
        let walk = || Walk::new(input.source, layout(input).layers().len(), gpu.as_ref());
        Ok(Self {
            input,
            blocks: &plan.blocks,
            seed: settings.work.seed,
            memory_budget: memory_budget.clone(),
            first: 0,
            all: input.source.samples(),
            baseline: walk(),
            own: settings.model.cascade.then(walk),
            last_reader: last_readers(plan, input),
            done: 0,
            layers_done: 0,
            entered: None,
            targets: Targets::Host(Pile::new(memory_budget)),
        })
    }

    /// The GPU for a walk, if there is one and the layers are large enough for it.
    fn gpu(
        input: &TrainInput,
        settings: &TrainSettings,
        plan: &Plan,
        memory_budget: &Arc<MemoryBudget>,
    ) -> Result<Option<Gpu>> {
        let work = |g: &Group| (g.positions * g.rows.len()) as f64 * g.features() as f64;
        let largest = plan.groups().map(work).fold(0.0, f64::max) * SAMPLES as f64;
        let Some(cuda) = backend::gpu(settings.work.device, largest)? else { return Ok(None) };
        let widest = layout(input).layers().iter().map(|l| l.size).max().unwrap_or(0);
        backend::or_cpu(settings.work.device, Gpu::new(cuda, widest, SAMPLES, memory_budget))
    }

    /// Continues on the CPU with the values that the GPU has computed.
    fn continue_on_host(&mut self, per_sample: usize) -> Result<()> {
        self.baseline.continue_on_host(&self.memory_budget)?;
        if let Some(own) = &mut self.own {
            own.continue_on_host(&self.memory_budget)?;
        }
        if let Targets::Device(targets) = &self.targets {
            self.targets = Targets::Host(targets.to_pile(SAMPLES * per_sample, &self.memory_budget)?);
        }
        Ok(())
    }

    /// The samples from number `first` on, out of `all`.
    pub(in crate::train) fn among(self, first: usize, all: usize) -> Self {
        Self { first, all, ..self }
    }

    /// Samples by their numbers among all.
    fn numbered(&self, samples: std::ops::Range<usize>) -> std::ops::Range<usize> {
        self.first + samples.start..self.first + samples.end
    }

    /// Continues where other walks over the same samples stopped.
    pub(in crate::train) fn resume(self, at: Paused) -> Self {
        let Paused { baseline, own, done, layers_done, entered, targets } = at;
        let source = self.input.source;
        let own = own.map(|values| Walk::at(source, values));
        Self { baseline: Walk::at(source, baseline), own, done, layers_done, entered, targets, ..self }
    }

    /// Stops between two calls.
    pub(in crate::train) fn pause(self) -> Paused {
        let Self { baseline, own, done, layers_done, entered, targets, .. } = self;
        let own = own.map(Walk::into_values);
        Paused { baseline: baseline.into_values(), own, done, layers_done, entered, targets }
    }

    /// Runs the baseline through the layer of the next group, unless a group before it did, and notes its targets.
    pub(in crate::train) fn enter(&mut self, settings: &TrainSettings, group: &Group, run: &Run) -> Result<()> {
        let (Some(target), Some(model)) = (group.target, self.input.baseline) else { return Ok(()) };
        if self.entered == Some(target) {
            return Ok(());
        }
        self.entered = Some(target);
        let chosen = Chosen::new(settings, group, self.all, self.seed, self.layers_done);
        let layer = match target {
            Target::Layer(k) => Some((k, layout(self.input).layers()[k].activation)),
            Target::Output => None,
        };
        // The number of rows of the whole layer; none if nothing is solved.
        let rows = match target {
            _ if !group.is_measured() => 0,
            Target::Layer(k) => layout(self.input).layers()[k].rows(),
            Target::Output => group.rows.len(),
        };
        let positions = group.positions;
        if target == Target::Output && !self.input.source.outputs_follow_from_states() {
            self.continue_on_host(chosen.per_sample)?;
            let mut outputs = Pile::new(&self.memory_budget);
            given_outputs(self.input.source, run, |y| outputs.push(y))?;
            self.targets = Targets::Host(outputs);
            return Ok(());
        }
        if self.baseline.on_gpu().is_some() {
            let entered = self.enter_on_gpu(Sum::new(model, target), &chosen, rows, run);
            if backend::or_cpu(settings.work.device, entered)?.is_some() {
                return Ok(());
            }
            self.continue_on_host(chosen.per_sample)?;
        }
        let sum = LayerSum::new(model, target);
        let (mut targets, mut states) = (Pile::new(&self.memory_budget), Pile::new(&self.memory_budget));
        self.baseline.sums(
            &sum,
            run.threads,
            run.cancel,
            |block, z| {
                let mut targets = Vec::with_capacity(z.rows() * chosen.per_sample * rows);
                for i in 0..z.rows() {
                    let z = z.row(i);
                    for at in chosen.of(self.first + block * SAMPLES + i) {
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
        self.targets = Targets::Host(targets);
        if let Some((k, _)) = layer {
            self.baseline.put(k, states);
        }
        Ok(())
    }

    /// Statistics of the group entered last, at the seeded choice of positions; if the GPU fails under `auto`, the
    /// walk continues on the CPU.
    pub(in crate::train) fn statistics(
        &mut self,
        settings: &TrainSettings,
        group: &Group,
        run: &mut Run,
    ) -> Result<Statistics> {
        if self.baseline.on_gpu().is_some() {
            let found = self.statistics_on_gpu(settings, group, run);
            if let Some(found) = backend::or_cpu(settings.work.device, found)? {
                return Ok(found);
            }
            self.continue_on_host(per_sample(group, settings, self.all))?;
        }
        self.statistics_on_cpu(settings, group, run)
    }

    /// The residual sums of a group's layer.
    fn residuals(&self, group: &Group) -> Vec<&'a TapBlock> {
        let own = |b: &&TapBlock| Some(b.target) == group.target && !matches!(b.weights, TapWeights::Taps(_));
        self.blocks.iter().filter(own).collect()
    }

    fn statistics_on_cpu(&self, settings: &TrainSettings, group: &Group, run: &mut Run) -> Result<Statistics> {
        let Targets::Host(known) = &self.targets else {
            return Err(crate::Error::shape("targets", "on the host", "on the device"));
        };
        let walk = self.own.as_ref().unwrap_or(&self.baseline);
        let chosen = Chosen::new(settings, group, self.all, self.seed, self.layers_done);
        let total = walk.samples() * chosen.per_sample;
        let (all, piece) = (self.all * chosen.per_sample, PIECE * chosen.per_sample);
        let (d, rows) = (group.features(), group.rows.len());
        let gather = Gather { walks: self, walk, group, chosen, known, residuals: self.residuals(group) };
        let (threads, cancel) = (run.threads, run.cancel);
        let mut progress = |done| (run.progress)(Progress::Samples { group: group.name.clone(), done, total });
        let few = are_few(all, d);
        if !few && let Some(cuda) = backend::gpu(settings.work.device, BLOCK as f64 * (d * d) as f64)? {
            let sums = Statistics::stream_on(cuda, total, threads, cancel, |range| gather.read(range), &mut progress);
            if let Some(statistics) = backend::or_cpu(settings.work.device, sums)? {
                return Ok(statistics);
            }
        }
        if d >= WIDE && !few {
            return Statistics::stream_wide(total, piece, [d, rows], threads, cancel, |r| gather.read(r), progress);
        }
        if !are_single(all, d) {
            return Statistics::stream_pieces(total, piece, all, threads, cancel, |range| gather.read(range), progress);
        }
        let leaf = |range| {
            let (features, targets) = gather.read(range)?;
            Statistics::of_single(&features, &targets)
        };
        Statistics::stream_leaves(total, piece, threads, cancel, leaf, progress)
    }

    /// Writes the features of some positions of an image into the rows `at..` of the block.
    #[allow(clippy::too_many_arguments)]
    fn fill_features<T: Scalar>(
        &self,
        values: &mut Reader,
        group: &Group,
        image: usize,
        positions: &[usize],
        at: usize,
        features: &mut Matrix<T>,
        scratch: &mut Vec<f32>,
    ) -> Result<()> {
        let layout = layout(self.input);
        let mut first = 0;
        for segment in &group.segments {
            match segment {
                Segment::Columns(columns) => {
                    // Only rows of single units have such columns, so there is one position.
                    let mut slots = features.row_mut(at)[first..].iter_mut();
                    for (source, units) in by_source(layout, columns) {
                        let x = values.sample(source, image)?;
                        slots.by_ref().zip(units).for_each(|(slot, unit)| *slot = T::from_f64(f64::from(x[unit])));
                    }
                    first += columns.len();
                }
                Segment::Taps { block, first: first_tap, columns } => {
                    let block = &self.blocks[*block];
                    let (area, positions_in) = (block.window.area(), block.input.positions());
                    let input = MapShape { channels: columns / area, ..block.input };
                    let geometry = Convolution { input, output: block.output, window: block.window };
                    let x = operand(values.sample(block.source, image)?, &block.maps, scratch);
                    let x = &x[first_tap / area * positions_in..];
                    for (k, &position) in positions.iter().enumerate() {
                        geometry.window_at(x, position, &mut features.row_mut(at + k)[first..first + columns]);
                    }
                    first += columns;
                }
                Segment::Constant => {
                    (0..positions.len()).for_each(|k| features[(at + k, first)] = T::from_f64(1.0));
                    first += 1;
                }
            }
        }
        Ok(())
    }

    /// Runs the model built so far through the layer entered last, when all of its groups are done, and drops layers
    /// after their last reader.
    pub(in crate::train) fn leave(
        &mut self,
        settings: &TrainSettings,
        group: &Group,
        built: &Build,
        run: &Run,
    ) -> Result<()> {
        if !group.completes_layer {
            self.done += 1;
            return Ok(());
        }
        if let (Some(own), Some(target @ Target::Layer(k))) = (&mut self.own, group.target) {
            let layout = layout(self.input);
            let entered =
                own.enter(layout, k, built.layer_sum(self.input, target), &self.memory_budget, run.threads, run.cancel);
            if backend::or_cpu(settings.work.device, entered)?.is_none() {
                let per_sample = per_sample(group, settings, self.baseline.samples());
                self.continue_on_host(per_sample)?;
                return self.leave(settings, group, built, run);
            }
        }
        for (k, _) in self.last_reader.iter().enumerate().filter(|(_, last)| **last == self.done) {
            self.baseline.forget(k);
            if let Some(own) = &mut self.own {
                own.forget(k);
            }
        }
        self.targets = Targets::Host(Pile::new(&self.memory_budget));
        self.done += 1;
        self.layers_done += 1;
        self.entered = None;
        Ok(())
    }
}

/// Features and targets of one group at the chosen positions.
struct Gather<'a, 'w> {
    walks: &'a Walks<'w>,
    walk: &'a Walk<'w>,
    group: &'a Group,
    chosen: Chosen,
    /// The baseline's pre-activations at the chosen positions.
    known: &'a Pile,
    /// The residual sums of the layer, which have no weights and are subtracted from the targets.
    residuals: Vec<&'w TapBlock>,
}

impl Gather<'_, '_> {
    /// Features and targets of some samples (positions of an image one after the other), one per row.
    fn read<T: Scalar>(&self, range: Range<usize>) -> Result<(Matrix<T>, Matrix)> {
        let Self { walks, walk, group, chosen, .. } = self;
        let mut features = Matrix::zeros(range.len(), group.features());
        let mut targets = Matrix::zeros(range.len(), group.rows.len());
        let mut scratch = Vec::new();
        let images = range.start / chosen.per_sample..range.end.div_ceil(chosen.per_sample);
        let mut values = walk.reader(images.clone());
        let mut known: Option<(usize, Block)> = None;
        for image in images {
            let first = image * chosen.per_sample;
            let positions = chosen.of(walks.first + image);
            let span = range.start.max(first)..range.end.min(first + chosen.per_sample);
            let here = &positions[span.start - first..span.end - first];
            let at = span.start - range.start;
            walks.fill_features(&mut values, group, image, here, at, &mut features, &mut scratch)?;
            let block = image / SAMPLES;
            let known = match &mut known {
                Some((number, found)) if *number == block => found,
                other => &mut other.insert((block, self.known.get(block)?)).1,
            };
            let start = (image % SAMPLES) * chosen.per_sample + span.start - first;
            for k in 0..here.len() {
                let row = targets.row_mut(at + k).iter_mut();
                row.zip(&known.row(start + k)[group.first_row..]).for_each(|(t, z)| *t = f64::from(*z));
            }
            for block in &self.residuals {
                let x = operand(values.sample(block.source, image)?, &block.maps, &mut scratch);
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
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Device;
    use crate::layout::Activation;
    use crate::model::ImplicitModel;
    use crate::network::{Network, Shape, Window};
    use crate::parallel::{Cancel, Threads};
    use crate::problem::Connectivity;
    use crate::random::Random;
    use crate::states::Collected;
    use crate::train::{Forget, ModelSettings, WorkSettings};

    fn network() -> Network {
        let mut random = Random::new(3);
        let mut weights = |rows, cols| Matrix::from_fn(rows, cols, |_, _| 0.4 * random.normal() as f32);
        let window = |kernel, stride, padding, dilation| Window { kernel, stride, padding, dilation };
        let first = Network::builder(Shape::map(2, 7, 6))
            .and_then(|b| b.convolution(weights(4, 18), window([3, 3], [1, 1], [1; 4], [1; 2]), Some(vec![0.1; 4])))
            .and_then(|b| b.activation(Activation::Relu))
            .unwrap();
        let here = first.here();
        first
            .grouped_convolution(weights(4, 18), window([3, 3], [1, 1], [2; 4], [2; 2]), 2, Some(vec![0.2; 4]))
            .and_then(|b| b.plus(here))
            .and_then(|b| b.activation(Activation::Relu))
            .and_then(|b| b.max_pool(window([2, 2], [2, 2], [0; 4], [1; 2])))
            .and_then(|b| b.convolution(weights(5, 16), window([2, 2], [2, 1], [1, 0, 0, 1], [1; 2]), None))
            .and_then(|b| b.activation(Activation::Tanh))
            .and_then(|b| b.global_average())
            .and_then(|b| b.linear(weights(3, 5), Some(vec![0.0, 1.0, -1.0])))
            .and_then(|b| b.build())
            .unwrap()
    }

    /// Statistics of every group, also if the walk moves to the CPU in the middle.
    fn walked(device: Device, images: usize, comes_back: bool) -> Vec<Statistics> {
        let network = network();
        let mut random = Random::new(4);
        let u = Matrix::from_fn(images, 84, |_, _| random.normal() as f32);
        let source = Collected::new(&network, &u).unwrap();
        let baseline = ImplicitModel::from_network(&network).unwrap();
        let input = TrainInput {
            source: &source,
            baseline: Some(&baseline),
            importance: None,
            preprocessing: Default::default(),
        };
        let settings = TrainSettings {
            model: ModelSettings { cascade: false, ..Default::default() },
            work: WorkSettings { device, positions: 5, ..Default::default() },
            ..Default::default()
        };
        let constant = vec![true; baseline.layout().rows() + 3];
        let plan = Plan::taps(&baseline, &Connectivity::Baseline, 2, &constant).unwrap();
        let (memory_budget, cancel) = (MemoryBudget::new(u64::MAX, &std::env::temp_dir()), Cancel::new());
        let mut run = Run { threads: Threads::one(), cancel: &cancel, keep: &Forget, progress: &mut |_| {} };
        let mut walks = Walks::new(&input, &settings, &plan, &memory_budget).unwrap();
        let built = Build::new(&plan);
        let mut out = Vec::new();
        for (k, group) in plan.groups().enumerate() {
            walks.enter(&settings, group, &run).unwrap();
            if comes_back && k == 2 {
                walks.continue_on_host(per_sample(group, &settings, images)).unwrap();
            }
            if group.features() > 0 {
                out.push(walks.statistics(&settings, group, &mut run).unwrap());
            }
            walks.leave(&settings, group, &built, &run).unwrap();
        }
        out
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn a_gpu_gathers_what_the_cpu_does() {
        // 70 images are not a whole number of blocks; 3 are fewer samples than features.
        for images in [70, 3] {
            let expected = walked(Device::Cpu, images, false);
            for comes_back in [false, true] {
                let got = walked(Device::Cuda(0), images, comes_back);
                assert_eq!(got.len(), expected.len());
                for (got, expected) in got.iter().zip(&expected) {
                    assert_eq!(got.samples(), expected.samples());
                    assert_eq!(got.few_samples().is_some(), expected.few_samples().is_some());
                    let (d, r) = (expected.features(), expected.targets());
                    assert_eq!((got.features(), got.targets()), (d, r));
                    let close = |a: f64, b: f64, size: f64| assert!((a - b).abs() <= 1e-5 * size, "{a} {b}");
                    for i in 0..d {
                        let of = |j: usize| expected.gram()[(j, j)].sqrt();
                        for j in 0..d {
                            close(got.gram()[(i, j)], expected.gram()[(i, j)], of(i) * of(j));
                        }
                        for k in 0..r {
                            let size = of(i) * expected.energy(k).sqrt();
                            close(got.cross(k)[i], expected.cross(k)[i], size);
                        }
                    }
                    (0..r).for_each(|k| close(got.energy(k), expected.energy(k), expected.energy(k)));
                }
            }
        }
    }
}
