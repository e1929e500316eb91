//! The cardinality rows of a whole group on a GPU: [`super::solve_cardinality`]'s problem in the same canonical
//! coordinates, with a ladder of a few ρ where the CPU has many.

use super::canonical::Row;
use super::cardinality::check;
use super::design::{Design, Scaling};
use super::single_moves::settle;
use super::{CardinalitySettings, Refit};
use crate::Result;
use crate::backend::cuda::{Cuda, Group};
use crate::parallel::{self, Cancel, Threads};
use crate::problem::RowProblem;
use crate::problem::penalty::Ridge;

/// Inverses that take the place of the slowly growing ρ.
const RUNGS: usize = 6;
/// The largest |ĥ − (Ĝ + ridge)w| on the support that passes for least squares; ĥ is at most 1.
const SETTLED: f64 = 1e-7;

/// Rows that a GPU solved.
#[derive(Debug, Clone, PartialEq)]
pub struct DeviceRows {
    /// Weights of every row in stored coordinates.
    pub rows: Vec<Vec<f64>>,
    /// Rows whose least squares was done again on the CPU, because the device's was not exact enough.
    pub again: usize,
    /// Seconds of each part on the device.
    pub phases: Vec<(&'static str, f64)>,
}

/// ρ and steps of each rung: the growth of the settings over all their steps, in [`RUNGS`] equal factors.
fn ladder(settings: &CardinalitySettings) -> Vec<(f64, usize)> {
    let rungs = RUNGS.min(settings.steps.max(1));
    let spread = settings.growth.powf(settings.steps as f64 / 3.0);
    let rung = |k: usize| {
        let share = if rungs > 1 { k as f64 / (rungs - 1) as f64 } else { 0.0 };
        let steps = (k + 1) * settings.steps / rungs - k * settings.steps / rungs;
        (settings.first_rho * spread.powf(share), steps)
    };
    (0..rungs).map(rung).collect()
}

/// [`super::solve_cardinality`] on a GPU, all rows at once. Supports may differ from the CPU's where single entries are
/// nearly worth their price; least squares on them is checked in f64.
#[allow(clippy::too_many_arguments)]
pub fn solve_cardinality_on(
    cuda: &Cuda,
    design: &Design,
    problems: &[RowProblem],
    level: f64,
    settings: &CardinalitySettings,
    threads: Threads,
    cancel: &Cancel,
) -> Result<DeviceRows> {
    check(design, problems, level)?;
    let d = design.live().len();
    let ridge = Ridge::new(1.0)?;
    let made = parallel::map(threads, problems.len(), |k| {
        let p = &problems[k];
        Ok(Row::new(design, Scaling::Rms, p, &ridge, &design.cross(p.target), design.energy(p.target)))
    })?;
    let rows: Vec<(usize, &Row)> =
        made.iter().enumerate().filter_map(|(k, row)| Some((k, row.as_ref()?))).filter(|_| d > 0).collect();
    let mut h = Vec::with_capacity(rows.len() * d);
    let mut prices = Vec::with_capacity(rows.len() * d);
    let mut start = vec![0f32; rows.len() * d];
    for (at, (k, row)) in rows.iter().enumerate() {
        h.extend_from_slice(&row.h);
        prices.extend((0..d).map(|j| price(row, j, level)));
        if let Some(given) = &problems[*k].start {
            for (slot, value) in start[at * d..].iter_mut().zip(row.canonical(design, given)) {
                *slot = value as f32;
            }
        }
    }
    let group = Group {
        features: d,
        gram: design.gram().as_slice(),
        h: &h,
        prices: &prices,
        start: &start,
        ladder: &ladder(settings),
        ridge: settings.ridge,
    };
    let answer = cuda.solve(&group, cancel)?;
    let refit = Refit { ridge: settings.ridge };
    let solved = parallel::map(threads, rows.len(), |at| {
        cancel.check()?;
        let (k, row) = rows[at];
        let span = at * d..(at + 1) * d;
        let mut w = answer.weights[span.clone()].to_vec();
        // A NaN is not settled either.
        let exact = answer.residuals[at] <= SETTLED;
        if !exact {
            let support: Vec<usize> = (0..d).filter(|&j| w[j] != 0.0).collect();
            let support = settle(design, row, &support, &prices[span], settings.ridge);
            w = refit.on_support(design, row, &support);
        }
        let stored = row.stored(design, &w);
        let stored =
            if row.is_feasible(&w) { stored } else { refit.inside_ball(design, &problems[k], &stored, cancel)? };
        Ok((k, stored, !exact))
    })?;
    let mut out = vec![vec![0.0; design.features()]; problems.len()];
    let mut again = 0;
    for (k, stored, repeated) in solved {
        out[k] = stored;
        again += usize::from(repeated);
    }
    Ok(DeviceRows { rows: out, again, phases: answer.phases })
}

/// What a non-zero costs in canonical units; infinite where there may be none.
fn price(row: &Row, j: usize, level: f64) -> f64 {
    let forbidden = row.bounds.as_ref().is_some_and(|b| b[j] == (0.0, 0.0));
    if forbidden { f64::INFINITY } else { level * row.scale.weights[j] }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ladder_spreads_the_growth_and_spends_all_steps() {
        for steps in [1, 5, 6, 7, 250] {
            let settings = CardinalitySettings { steps, ..Default::default() };
            let ladder = ladder(&settings);
            assert_eq!(ladder.iter().map(|(_, steps)| steps).sum::<usize>(), steps);
            assert!(ladder.windows(2).all(|pair| pair[0].0 < pair[1].0));
            assert_eq!(ladder[0].0, settings.first_rho);
        }
        let ladder = ladder(&CardinalitySettings::default());
        assert!((ladder[5].0 / ladder[0].0 / 1.02f64.powf(250.0 / 3.0) - 1.0).abs() < 1e-12);
    }
}
