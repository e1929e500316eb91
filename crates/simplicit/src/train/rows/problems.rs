//! The rows of a group, as problems over its design.

use std::ops::Range;

use crate::Result;
use crate::model::{TapWeights, Target};
use crate::network::Source;
use crate::parallel::{self, Threads};
use crate::problem::{Ball, Matching, RowProblem};
use crate::solver::Design;
use crate::train::plan::{Group, Place, Plan};
use crate::train::rows::group::{entry_price, weighed};
use crate::train::rows::prices::{self, CertificatePrices};
use crate::train::{TrainInput, TrainSettings};

/// The rows of a group. Each is made when it is needed, because a group may have hundreds of millions of weights.
pub(in crate::train) struct GroupProblems<'a, 'd> {
    plan: &'a Plan,
    input: &'a TrainInput<'a>,
    settings: &'a TrainSettings,
    group: &'a Group,
    design: &'a Design<'d>,
    prices: &'a CertificatePrices,
    places: Vec<Place>,
    /// λ of the group's rows.
    lambda: f64,
    /// The largest row weight of the model.
    largest: Option<f64>,
    /// The factor from the settings on every entry's penalty.
    factor: f64,
}

impl<'a, 'd> GroupProblems<'a, 'd> {
    pub(in crate::train) fn new(
        plan: &'a Plan,
        input: &'a TrainInput<'a>,
        settings: &'a TrainSettings,
        strength: f64,
        group: &'a Group,
        design: &'a Design<'d>,
        prices: &'a CertificatePrices,
    ) -> Self {
        let lambda = match settings.rows.matching {
            Matching::Exact => 1.0,
            Matching::Relaxed { outputs, .. } if group.target == Some(Target::Output) => outputs,
            Matching::Relaxed { states, .. } => states,
        };
        let largest = input.importance.map(|w| w.iter().copied().fold(0.0, f64::max));
        let (places, factor) = (group.places(), entry_price(settings, strength));
        Self { plan, input, settings, group, design, prices, places, lambda, largest, factor }
    }

    /// Row k without entry weights, ball and start: only target, weight and units.
    pub(in crate::train) fn bare(&self, k: usize) -> RowProblem {
        let weights = self.input.importance.zip(self.largest);
        let importance = weights.map(|(weights, largest)| (weights[self.group.rows.start + k], largest));
        weighed(k, self.lambda, importance, self.settings, self.design)
    }

    /// Row k.
    pub(in crate::train) fn row(&self, k: usize) -> RowProblem {
        let Self { plan, input, settings, group, design, prices, places, factor, .. } = self;
        let mut problem = self.bare(k);
        let outputs = group.target == Some(Target::Output);
        let unit = if outputs { input.source.shape().states + k } else { group.first_unit + k };
        let weight = |(c, place): (usize, &Place)| match *place {
            _ if !group.allowed.allows(k, c) => f64::INFINITY,
            Place::Constant => 0.0,
            Place::Column(j) => factor * prices.factor(unit, j as usize, prices::unit(design, &problem, c)),
            Place::Tap { block, column } => {
                let per_weight = prices::unit(design, &problem, c);
                factor * prices.tap_factor(block as usize, group.first_row + k, column as usize, per_weight)
            }
        };
        let weights = places.iter().enumerate().map(weight).collect();
        problem.weights = Some(weights);
        if let Some(kappa) = settings.allowed.kappa.filter(|_| !outputs) {
            let weights = places.iter().map(|&place| f64::from(u8::from(reads_states(plan, input, place)))).collect();
            problem.ball = Some(Ball { radius: kappa, weights });
        }
        problem.start = start(input, group, places, k);
        problem
    }

    /// Some rows, made on all threads.
    pub(in crate::train) fn rows(&self, rows: Range<usize>, threads: Threads) -> Result<Vec<RowProblem>> {
        parallel::map(threads, rows.len(), |k| Ok(self.row(rows.start + k)))
    }
}

/// Whether a weight belongs to A (or C).
pub(in crate::train) fn reads_states(plan: &Plan, input: &TrainInput, place: Place) -> bool {
    match place {
        Place::Column(j) => (j as usize) < input.source.shape().states,
        Place::Tap { block, .. } => plan.blocks[block as usize].source != Source::Input,
        Place::Constant => false,
    }
}

/// The baseline's rows of a group, by where they are stored.
pub(in crate::train) fn kept_rows(input: &TrainInput, group: &Group) -> Vec<Vec<(Place, f32)>> {
    let places = group.places();
    let row = |k: usize| {
        let weights = start(input, group, &places, k).unwrap_or_default();
        let entries = places.iter().copied().zip(weights.into_iter().map(|w| w as f32));
        entries.filter(|(_, w)| *w != 0.0).collect()
    };
    (0..group.rows.len()).map(row).collect()
}

/// The baseline's weights of the group's row k over its features.
fn start(input: &TrainInput, group: &Group, places: &[Place], k: usize) -> Option<Vec<f64>> {
    let n = input.source.shape().states;
    let baseline = input.baseline?;
    let outputs = group.target == Some(Target::Output);
    let (from_states, from_inputs) = if outputs { (baseline.c(), baseline.d()) } else { (baseline.a(), baseline.b()) };
    // One row of each is looked up only once, because a group has far more features than a row has non-zeros.
    let columns = group.positions == 1;
    let mut known: Vec<(usize, f32)> = Vec::new();
    if columns {
        let unit = group.first_unit + k;
        known.extend(from_states.row(unit));
        known.extend(from_inputs.row(unit).map(|(j, v)| (n + j, v)));
    }
    let taps: Vec<Vec<(usize, f32)>> = baseline
        .taps()
        .iter()
        .map(|block| match &block.weights {
            TapWeights::Taps(taps) if Some(block.target) == group.target => taps.row(group.first_row + k).collect(),
            _ => Vec::new(),
        })
        .collect();
    // The places are nearly always in the order of the columns, so that the next entry is the wanted one or comes
    // after it.
    let (mut next_known, mut next_taps) = (0, vec![0; taps.len()]);
    let weight = |&place: &Place| match place {
        Place::Column(j) => find(&known, j as usize, &mut next_known),
        Place::Tap { block, column } => {
            let block = block as usize;
            taps.get(block).map_or(0.0, |row| find(row, column as usize, &mut next_taps[block]))
        }
        Place::Constant if outputs => f64::from(baseline.output_bias()[k]),
        Place::Constant => f64::from(baseline.state_bias()[group.rows.start + k]),
    };
    Some(places.iter().map(weight).collect())
}

/// The value of column j in a row with ascending columns; `next` is the entry after the one found last.
fn find(row: &[(usize, f32)], j: usize, next: &mut usize) -> f64 {
    let is_behind = |at: usize| at.checked_sub(1).is_none_or(|before| row[before].0 < j);
    let at = match row.get(*next) {
        Some(entry) if entry.0 == j => Ok(*next),
        Some(entry) if entry.0 > j && is_behind(*next) => Err(*next),
        None if is_behind(row.len()) => Err(row.len()),
        _ => row.binary_search_by_key(&j, |e| e.0),
    };
    *next = at.map_or_else(|missing| missing, |found| found + 1);
    at.map_or(0.0, |found| f64::from(row[found].1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_found_in_any_order_of_the_columns() {
        let row: Vec<(usize, f32)> = [(1, 1.0), (2, 2.0), (5, 5.0), (9, 9.0)].to_vec();
        let truth = |j: usize| row.iter().find(|e| e.0 == j).map_or(0.0, |e| f64::from(e.1));
        let ascending: Vec<usize> = (0..12).collect();
        let descending: Vec<usize> = (0..12).rev().collect();
        let mixed: Vec<usize> = (0..60).map(|k| (k * 7 + k / 5) % 12).collect();
        for order in [ascending, descending, mixed] {
            let mut next = 0;
            order.iter().for_each(|&j| assert_eq!(find(&row, j, &mut next), truth(j), "{j} of {order:?}"));
        }
        assert_eq!(find(&[], 3, &mut 0), 0.0);
    }
}
