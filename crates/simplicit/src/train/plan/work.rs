//! The cost of a pass over all groups, in multiply-adds of single precision, from which the remaining time is
//! estimated.

use crate::solver::CardinalitySettings;
use crate::statistics::{WIDE, are_few, are_single};
use crate::train::evidence::positions::samples_of;
use crate::train::plan::{Group, Plan, Segment};
use crate::train::rows::group::SURVEY_STRATA;
use crate::train::{Progress, Run, TrainInput, TrainSettings};

/// The work that the bounds of a group share, in cubes of its number of features: an inverse, and factorisations in
/// double precision, which count twice.
const SHARED_BOUND: f64 = 8.0;
/// Rounds of sweeps and a factorisation over its non-zeros that the bound of a row takes, in double precision, for
/// two diagonals: measured on rows of 193 and of 785 features.
const BOUND_ROUNDS: f64 = 240.0;

/// The kinds of passes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::train) enum Kind {
    /// Solves some rows of every group at this many prices.
    Survey(usize),
    /// Fits a model on statistics that are known.
    Solve,
    /// Fits a model with a walk over all samples.
    Whole,
}

/// The work of every group, in order.
pub(in crate::train) fn of_groups(plan: &Plan, input: &TrainInput, settings: &TrainSettings, kind: Kind) -> Vec<f64> {
    plan.groups().map(|group| of_group(group, input.source.samples(), settings, kind)).collect()
}

fn of_group(group: &Group, images: usize, settings: &TrainSettings, kind: Kind) -> f64 {
    let (d, r) = (group.features() as f64, group.rows.len() as f64);
    let samples = samples_of(group, settings, images);
    let m = samples as f64;
    let few = are_few(samples, group.features());
    // Baseline and model are both run through the layer; the model has fewer weights.
    let walk = 1.5 * images as f64 * group.positions as f64 * r * d;
    // Double precision counts twice.
    let taps = group.segments.iter().any(|s| matches!(s, Segment::Taps { .. }));
    let single = group.features() >= WIDE || taps && are_single(samples, group.features());
    let sums = if few { 0.0 } else { m * d * (d / 2.0 + r) * if single { 1.0 } else { 2.0 } };
    let kept = few.then_some(m);
    let splitting = |rows: f64| splitting(d, rows, kept, &settings.rows.cardinality);
    let moves = moves(d, r, kept);
    match kind {
        _ if group.kept => walk,
        Kind::Survey(prices) => walk + sums + splitting((prices * SURVEY_STRATA.min(group.rows.len())) as f64),
        Kind::Solve => splitting(r) + moves,
        Kind::Whole => walk + sums + splitting(r) + moves,
    }
}

/// Splitting of some rows with d features; if there are few samples, these are kept.
fn splitting(d: f64, rows: f64, kept: Option<f64>, how: &CardinalitySettings) -> f64 {
    let (rung, step) = match kept {
        Some(m) => (2.0 * (m * m * m / 6.0 + 2.0 * m * m * d), 2.0 * m * d),
        None => (d * d * d, d * d),
    };
    how.rungs as f64 * rung + how.steps as f64 * rows * step
}

/// Single moves of some rows. A support has about a quarter of the features; one with more entries than samples is
/// settled on the samples.
fn moves(d: f64, rows: f64, kept: Option<f64>) -> f64 {
    let support = d / 4.0;
    let by_support = support * support * (support / 6.0 + 320.0_f64.min(support));
    let by_samples = kept.map_or(f64::INFINITY, |m| m * m * support + m * m * m / 6.0);
    2.0 * rows * by_support.min(by_samples)
}

/// Solves all rows of a group once, on its statistics; if there are few samples, these are kept.
pub(in crate::train) fn of_solving(
    features: usize,
    rows: usize,
    kept: Option<usize>,
    how: &CardinalitySettings,
) -> f64 {
    let (d, r, kept) = (features as f64, rows as f64, kept.map(|m| m as f64));
    splitting(d, r, kept, how) + moves(d, r, kept)
}

/// Work for the bounds of one group: the part that its rows share, and the part of each row with this many non-zeros.
pub(in crate::train) fn of_bounds(features: usize, nonzeros: f64) -> (f64, f64) {
    let d = features as f64;
    (SHARED_BOUND * d.powi(3), BOUND_ROUNDS * (nonzeros.powi(3) / 3.0 + 4.0 * d * nonzeros))
}

/// Reports how much of a pass is done.
pub(in crate::train) struct Meter {
    groups: std::vec::IntoIter<f64>,
    done: f64,
    all: f64,
}

impl Meter {
    /// Begins a pass; `left` is the work expected after it.
    pub(in crate::train) fn start(groups: Vec<f64>, left: f64, run: &mut Run) -> Self {
        let all = groups.iter().sum::<f64>().max(1.0);
        (run.progress)(Progress::Pass { work: all, left });
        Self { groups: groups.into_iter(), done: 0.0, all }
    }

    /// Reports that the next group is done.
    pub(in crate::train) fn step(&mut self, run: &mut Run) {
        self.done += self.groups.next().unwrap_or(0.0);
        (run.progress)(Progress::Group { share: (self.done / self.all).min(1.0) });
    }
}
