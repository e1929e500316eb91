//! The memory that training needs, and how much of a budget is left for the layers of all samples.

use std::sync::Arc;

use crate::memory::{self, MemoryBudget};
use crate::model::Target;
use crate::parallel::Threads;
use crate::statistics::{BLOCK, WIDE, are_few, wide_bytes};
use crate::train::evidence::importance;
use crate::train::evidence::joint_importance::{self, BYTES_PER_STATE};
use crate::train::evidence::positions::samples_of;
use crate::train::evidence::walk;
use crate::train::evidence::walks::{PIECE, last_readers};
use crate::train::plan::estimate::PRICES;
use crate::train::plan::{Group, Plan, connections};
use crate::train::rows::group::{ROW_BYTES, SURVEY_STRATA, has_bounds, inverse_bytes, part_rows};
use crate::train::{Progress, Run, TrainInput, TrainSettings, layout};
use crate::{Error, Result};

/// Blocks of a layer that a thread has in work: its input, its output, and those that wait to be stored.
const WALKING: usize = 6;
/// Samples that a thread measures at once, and values that it holds of each: input and output.
const MEASURED: usize = 256;
const MEASURED_VALUES: usize = 3;
/// Bytes of a non-zero in a row that is being solved, and in a model.
const ROW_ENTRY: u64 = 16;
const MODEL_ENTRY: u64 = 12;

/// Bytes of every weight of models that are ready to run, forwards and back: the blocks and their kernels, of the
/// baseline and of a rough model that runs with it; and of every weight of the largest layer while it is laid out.
const PREPARED: u64 = 32;
const PREPARING: u64 = 40;
/// Bytes of a state while row weights are computed: its values before and after the activation, its cotangent and a
/// copy.
const WEIGHED_STATE: u64 = 16;

/// What a process holds before it starts differs by about a megabyte from run to run. A refusal asks for this much more, so
/// that the next run is not refused.
const MARGIN: u64 = 4 << 20;

/// The memory that a plan needs, in bytes, in addition to what the process holds already.
#[derive(Debug, Clone, Copy)]
pub(in crate::train) struct Needs {
    /// Bytes of the largest group: its statistics, inverses and rows. These must be in memory.
    pub(in crate::train) group: u64,
    /// Bytes of the layers of all samples at the widest place of the walk. These may be in a file.
    pub(in crate::train) layers: u64,
}

/// An error if the budget of the settings is too small even for the largest group.
pub(in crate::train) fn check(input: &TrainInput, settings: &TrainSettings, threads: Threads) -> Result<()> {
    let Some(budget) = settings.work.memory else { return Ok(()) };
    let plan = connections::plan(input, settings)?;
    // Memory that was freed after row weights were computed stays with the process, and the groups use it again. So what the
    // process holds counts before row weights, when this is first asked, and not after them.
    let held = if input.importance.is_some() { 0 } else { memory::used().unwrap_or(0) };
    let least = held + needs(&plan, input, settings, threads).group;
    if budget >= least {
        return Ok(());
    }
    let for_what = "for what is in memory and the largest group of rows";
    let expected = format!("at least {} {for_what}", memory::words_up(least + MARGIN));
    Err(Error::setting("memory", expected, memory::words(budget)))
}

/// The memory for everything that may be kept or given up: the budget minus what the process holds and what the
/// largest group needs.
pub(in crate::train) fn memory(
    plan: &Plan,
    input: &TrainInput,
    settings: &TrainSettings,
    run: &mut Run,
) -> Arc<MemoryBudget> {
    let needs = needs(plan, input, settings, run.threads);
    let used = memory::used().unwrap_or(0);
    let least = used + needs.group;
    let budget = settings.work.memory.or_else(|| memory::free().map(|free| used + free / 2));
    (run.progress)(Progress::Memory { needed: least + needs.layers, least, budget });
    let folder = run.keep.folder().map_or_else(std::env::temp_dir, std::path::Path::to_path_buf);
    MemoryBudget::new(budget.map_or(u64::MAX, |budget| budget.saturating_sub(least)), &folder)
}

pub(in crate::train) fn needs(plan: &Plan, input: &TrainInput, settings: &TrainSettings, threads: Threads) -> Needs {
    let threads = threads.get() as u64;
    // The best model so far and the one that is being built.
    let models = if settings.target_sparsity.is_some() { 2 } else { 1 };
    let (mut largest, mut evidence, mut weights, mut widest_layer) = (0, 0, 0, 0);
    for group in plan.groups().filter(|group| group.is_measured()) {
        largest = largest.max(group_bytes(group, input.source.samples(), plan.has_taps(), settings, threads));
        let own = (group.features() * group.rows.len()) as u64;
        weights += own;
        widest_layer = widest_layer.max(own);
        if has_bounds(settings, group.features()) {
            evidence += models * 8 * (group.features() * (group.features() + 2 * group.rows.len())) as u64;
        }
    }
    let left = settings.target_sparsity.map_or(1.0, |target| (1.0 - target).clamp(0.0, 1.0));
    let stored = (weights as f64 * left) as u64 * (ROW_ENTRY + models * MODEL_ENTRY);
    // Row weights, and the models that are run to compute them.
    let laying = PREPARING * widest_layer;
    let prepared = PREPARED * weights + laying;
    let states = layout(input).size();
    let weighed = input.source.samples().min(importance::block_samples(states)) * states;
    let weighing = prepared + threads * WEIGHED_STATE * weighed as u64;
    if !plan.has_taps() {
        return Needs { group: (largest + evidence + stored).max(weighing), layers: 0 };
    }
    // Blocks of samples that pass through a layer; those that pass through the whole model, to measure it; and those
    // whose errors are examined together.
    let widest = layout(input).layers().iter().map(|l| l.size).max().unwrap_or(0);
    let samples = input.source.samples();
    // Number of samples in work at the same time, if each thread has a block of at most this many.
    let at_once = |block: usize| threads.min(samples.div_ceil(block) as u64) * block.min(samples) as u64;
    let walking = 4 * at_once(walk::SAMPLES) * (WALKING * widest) as u64;
    let measuring = 4 * at_once(MEASURED) * (MEASURED_VALUES * widest) as u64;
    let together = joint_importance::samples_together(states) as u64;
    let looking = threads * together * (BYTES_PER_STATE * states) as u64;
    let running = prepared + measuring.max(looking);
    let group = ((largest.max(laying) + walking).max(running) + evidence + stored).max(weighing);
    Needs { group, layers: layer_bytes(plan, input, settings) }
}

/// Bytes to gather, solve and bound one group, whichever step needs most.
fn group_bytes(group: &Group, images: usize, taps: bool, settings: &TrainSettings, threads: u64) -> u64 {
    let samples = samples_of(group, settings, images);
    let (d, r, m) = (group.features() as u64, group.rows.len() as u64, samples as u64);
    let few = are_few(samples, group.features());
    let part = |rows: usize| part_rows(settings, few, group.features(), rows, false) as u64;
    let looks = PRICES * SURVEY_STRATA.min(group.rows.len());
    let together = part(group.rows.len()).max(if taps { part(looks) } else { 0 });
    let cut = together < r;
    // Rows in work, and h of all of them; twice that where features of states and of inputs are joined.
    let rows = ROW_BYTES * together * d + if taps { 8 } else { 16 } * r * d;
    if few {
        let kept = if cut { 8 * settings.rows.cardinality.rungs as u64 } else { 0 };
        return rows + (40 + kept) * m * d;
    }
    let gather = if taps && group.features() >= WIDE {
        wide_bytes(group.features(), group.rows.len(), images.div_ceil(PIECE))
    } else {
        let blocks = samples.div_ceil(BLOCK).max(1);
        let sums = u64::from(blocks.ilog2() + 1) + (3 * threads).min(blocks as u64);
        sums * 8 * (d * d + d * r) + threads * 8 * BLOCK as u64 * (2 * d + r)
    };
    // G, its normalised copy, and an inverse that is being made; then a factor for every thread that moves entries.
    let kept = if cut { inverse_bytes(settings, group.features()) } else { 0 };
    let solve = (24 * d * d).max(16 * d * d + 4 * threads * d * d) + kept;
    let bound = if has_bounds(settings, group.features()) { 172 * d * d } else { 0 };
    rows + gather.max(solve).max(bound)
}

/// The most bytes that the layers of baseline and model take together during the walk.
fn layer_bytes(plan: &Plan, input: &TrainInput, settings: &TrainSettings) -> u64 {
    let layers = layout(input).layers();
    let last = last_readers(plan, input);
    let samples = input.source.samples() as u64;
    let walks = if settings.model.cascade { 2 } else { 1 };
    let (mut now, mut most) = (0u64, 0);
    for (at, group) in plan.groups().enumerate() {
        if let Some(Target::Layer(k)) = group.target.filter(|_| group.completes_layer) {
            now += walks * 4 * samples * layers[k].size as u64;
            let targets = samples_of(group, settings, input.source.samples()) * layers[k].rows();
            most = most.max(now + 4 * targets as u64);
        }
        for (k, _) in last.iter().enumerate().filter(|(_, last)| **last == at) {
            now = now.saturating_sub(walks * 4 * samples * layers[k].size as u64);
        }
    }
    most
}
