//! What a pass over all groups costs, in multiply-adds of single precision: for an estimate of what is left.

use crate::statistics::{WIDE, are_few};
use crate::train::evidence::positions::samples_of;
use crate::train::plan::{Group, Plan};
use crate::train::rows::group::SURVEY_STRATA;
use crate::train::{Progress, Run, TrainInput, TrainSettings};

/// What a pass does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::train) enum Kind {
    /// Some rows of every group at so many prices.
    Survey(usize),
    /// A model on statistics that are there.
    Solve,
    /// A model with its walk over all samples.
    Whole,
}

/// Every group's work, in order.
pub(in crate::train) fn of_groups(plan: &Plan, input: &TrainInput, settings: &TrainSettings, kind: Kind) -> Vec<f64> {
    plan.groups().map(|group| of_group(group, input.source.samples(), settings, kind)).collect()
}

fn of_group(group: &Group, images: usize, settings: &TrainSettings, kind: Kind) -> f64 {
    let (d, r) = (group.features() as f64, group.rows.len() as f64);
    let samples = samples_of(group, settings, images);
    let m = samples as f64;
    let few = are_few(samples, group.features());
    // Baseline and model run through the layer; the model's weights are fewer.
    let walk = 1.5 * images as f64 * group.positions as f64 * r * d;
    // Double precision counts twice.
    let sums = if few { 0.0 } else { m * d * (d / 2.0 + r) * if group.features() >= WIDE { 1.0 } else { 2.0 } };
    let how = &settings.cardinality;
    let ladder = how.rungs as f64 * if few { 2.0 * (m * m * m / 6.0 + 2.0 * m * m * d) } else { d * d * d };
    let step = if few { 2.0 * m * d } else { d * d };
    // Supports are about a quarter of the features.
    let support = d / 4.0;
    let moves = 2.0 * r * support * support * (support / 6.0 + 320.0_f64.min(support));
    let splitting = |rows: f64| ladder + how.steps as f64 * rows * step;
    match kind {
        _ if group.kept => walk,
        Kind::Survey(prices) => walk + sums + splitting((prices * SURVEY_STRATA.min(group.rows.len())) as f64),
        Kind::Solve => splitting(r) + moves,
        Kind::Whole => walk + sums + splitting(r) + moves,
    }
}

/// Tells how far a pass is.
pub(in crate::train) struct Meter {
    groups: std::vec::IntoIter<f64>,
    done: f64,
    all: f64,
}

impl Meter {
    /// A pass begins; `left` is the work expected after it.
    pub(in crate::train) fn start(groups: Vec<f64>, left: f64, run: &mut Run) -> Self {
        let all = groups.iter().sum::<f64>().max(1.0);
        (run.progress)(Progress::Pass { work: all, left });
        Self { groups: groups.into_iter(), done: 0.0, all }
    }

    /// The next group is done.
    pub(in crate::train) fn step(&mut self, run: &mut Run) {
        self.done += self.groups.next().unwrap_or(0.0);
        (run.progress)(Progress::Group { share: (self.done / self.all).min(1.0) });
    }
}
