//! Least squares on a chosen support, which undoes the shrinkage of the penalty.

use super::canonical::Row;
use super::design::{Design, Scaling};
use super::{SolverSettings, solve_rows};
use crate::Result;
use crate::backend::fit;
use crate::parallel::{Cancel, Threads};
use crate::problem::penalty::Ridge;
use crate::problem::{RowProblem, Units};

/// Least squares plus a small ridge in unit-RMS coordinates, inside the row's ball.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Refit {
    /// Ridge on unit-RMS features, relative to the unit diagonal of their Gram matrix.
    pub ridge: f64,
}

impl Default for Refit {
    fn default() -> Self {
        Self { ridge: 1e-5 }
    }
}

impl Refit {
    /// Weights (stored coordinates) of every row, refitted on the non-zeros of `supports`.
    pub fn rows(
        &self,
        design: &Design,
        problems: &[RowProblem],
        supports: &[Vec<f64>],
        threads: Threads,
        cancel: &Cancel,
    ) -> Result<Vec<Vec<f64>>> {
        let penalty = Ridge::new(1.0)?;
        crate::parallel::map(threads, problems.len(), |k| {
            cancel.check()?;
            let (problem, weights) = (&problems[k], &supports[k]);
            let target = problem.target;
            let Some(row) =
                Row::new(design, Scaling::Rms, problem, &penalty, &design.cross(target), design.energy(target))
            else {
                return Ok(vec![0.0; design.features()]);
            };
            let live = design.live();
            let support: Vec<usize> = (0..live.len()).filter(|&j| weights[live[j]] != 0.0).collect();
            let w = self.on_support(design, &row, &support);
            let stored = row.stored(design, &w);
            if row.is_feasible(&w) { Ok(stored) } else { self.inside_ball(design, problem, &stored, cancel) }
        })
    }

    /// Canonical weights; ball and bounds are ignored.
    pub(crate) fn on_support(&self, design: &Design, row: &Row, support: &[usize]) -> Vec<f64> {
        fit(&design.quadratic(), &row.h, support, self.ridge)
    }

    /// The same as a row problem, for the solver that respects ball and bounds, where one of these is active.
    pub(crate) fn inside_ball(
        &self,
        design: &Design,
        problem: &RowProblem,
        support: &[f64],
        cancel: &Cancel,
    ) -> Result<Vec<f64>> {
        let rms = design.target_rms(problem.target);
        let restricted = RowProblem {
            fit: 1.0 / (rms * rms),
            units: Units::Rms { factor: 1.0 / rms },
            weights: Some(support.iter().map(|w| if *w == 0.0 { f64::INFINITY } else { 1.0 }).collect()),
            start: None,
            ..problem.clone()
        };
        let penalty = Ridge::new(self.ridge.max(1e-12))?;
        let settings = SolverSettings { tolerance: 1e-5, ..SolverSettings::default() };
        let mut solved = solve_rows(design, &penalty, &[restricted], &settings, Threads::one(), cancel, |_| {})?;
        Ok(solved.pop().map(|s| s.weights).unwrap_or_default())
    }
}
