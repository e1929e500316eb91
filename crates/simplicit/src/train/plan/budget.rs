//! What training holds in memory, and how much a budget leaves to the layers of all samples.

use std::sync::Arc;

use crate::memory::{self, Room};
use crate::model::Target;
use crate::parallel::Threads;
use crate::statistics::{BLOCK, WIDE, are_few, wide_bytes};
use crate::train::evidence::positions::samples_of;
use crate::train::evidence::walks::{PIECE, last_readers};
use crate::train::plan::{Group, Plan};
use crate::train::rows::group::{has_bounds, part_rows};
use crate::train::{Progress, Run, TrainInput, TrainSettings, layout};
use crate::{Error, Result};

/// Samples of a layer that a thread has in work: blocks of 256 with what comes in and what goes out.
const IN_WORK: usize = 3 * 256;

/// What a plan takes, in bytes, on top of what the process holds already.
#[derive(Debug, Clone, Copy)]
pub(in crate::train) struct Needs {
    /// The largest group: its statistics, inverses and rows. There is no doing without.
    pub(in crate::train) group: u64,
    /// Layers of all samples at the widest place of the walk. They may lie in a file.
    pub(in crate::train) layers: u64,
}

/// The account for everything that may be kept or given up: what the budget leaves beside what the process holds
/// and what the largest group takes. An error where an explicit budget does not even leave that.
pub(in crate::train) fn room(
    plan: &Plan,
    input: &TrainInput,
    settings: &TrainSettings,
    run: &mut Run,
) -> Result<Arc<Room>> {
    let needs = needs(plan, input, settings, run.threads);
    let used = memory::used().unwrap_or(0);
    let least = used + needs.group;
    if let Some(budget) = settings.memory.filter(|budget| *budget < least) {
        let expected = format!("at least {} for what is in memory and the largest group of rows", memory::words(least));
        return Err(Error::setting("memory", expected, memory::words(budget)));
    }
    let budget = settings.memory.or_else(|| memory::free().map(|free| used + free / 2));
    (run.progress)(Progress::Memory { needed: least + needs.layers, least, budget });
    let folder = run.keep.folder().map_or_else(std::env::temp_dir, std::path::Path::to_path_buf);
    Ok(Room::new(budget.map_or(u64::MAX, |budget| budget.saturating_sub(least)), &folder))
}

pub(in crate::train) fn needs(plan: &Plan, input: &TrainInput, settings: &TrainSettings, threads: Threads) -> Needs {
    let threads = threads.get() as u64;
    let mut largest = 0;
    let mut evidence = 0;
    for group in plan.groups().filter(|group| group.is_measured()) {
        largest = largest.max(group_bytes(group, input.source.samples(), plan.has_taps(), settings, threads));
        if has_bounds(settings, group.features()) {
            evidence += 8 * (group.features() * (group.features() + 2 * group.rows.len())) as u64;
        }
    }
    let (mut layers, mut blocks) = (0, 0);
    if plan.has_taps() {
        layers = layer_bytes(plan, input, settings);
        // Blocks of samples on their way through a layer, and then through the whole model, to measure it.
        let widest = layout(input).layers().iter().map(|l| l.size).max().unwrap_or(0);
        blocks = threads * 4 * (IN_WORK * widest) as u64;
    }
    Needs { group: largest.max(blocks) + evidence, layers }
}

/// Gathering, solving and bounding one group, whichever takes most.
fn group_bytes(group: &Group, images: usize, taps: bool, settings: &TrainSettings, threads: u64) -> u64 {
    let samples = samples_of(group, settings, images);
    let (d, r, m) = (group.features() as u64, group.rows.len() as u64, samples as u64);
    let few = are_few(samples, group.features());
    let together = part_rows(settings, few, group.features(), group.rows.len()) as u64;
    // Problems, their copies for the solver in both precisions, and the answers; of rows that wait, what is stored.
    let rows = 100 * together * d + 40 * (r - together) * d;
    if few {
        return rows + 40 * m * d;
    }
    let gather = if taps && group.features() >= WIDE {
        wide_bytes(group.features(), group.rows.len(), images.div_ceil(PIECE))
    } else {
        let blocks = samples.div_ceil(BLOCK).max(1);
        let sums = u64::from(blocks.ilog2() + 1) + (3 * threads).min(blocks as u64);
        sums * 8 * (d * d + d * r) + threads * 8 * BLOCK as u64 * (2 * d + r)
    };
    // G, its normalised copy, an inverse in the making; then a factor for every thread that moves entries.
    let solve = (24 * d * d).max(16 * d * d + 4 * threads * d * d);
    let bound = if has_bounds(settings, group.features()) { 172 * d * d } else { 0 };
    rows + gather.max(solve).max(bound)
}

/// The most that the layers of baseline and model take together on the way.
fn layer_bytes(plan: &Plan, input: &TrainInput, settings: &TrainSettings) -> u64 {
    let layers = layout(input).layers();
    let last = last_readers(plan, input);
    let samples = input.source.samples() as u64;
    let walks = if settings.cascade { 2 } else { 1 };
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
