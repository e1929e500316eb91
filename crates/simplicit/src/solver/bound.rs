//! Bounds on how far the cardinality answers of a design's rows can be from the optimum.
//!
//! The row's problem, which the splitting, the single moves and the refit all work on, is in unit-RMS coordinates
//! ½ŵᵀ(Ĝ + ridge)ŵ − ĥᵀŵ + ½ + Σ p_j·[ŵ_j ≠ 0]: a [`PricedRow`]. All rows share Ĝ, and with it the diagonals of the
//! bound; a ball is ignored, so with a ball the bound is valid but lower than necessary.

use std::sync::Arc;

use super::CardinalitySettings;
use super::canonical::Row;
use super::design::{Design, Scaling};
use super::prove::{self, PricedRow, ProveSettings, Shared, Verdict};
use crate::linalg::Matrix;
use crate::parallel::{self, Cancel, Threads};
use crate::problem::RowProblem;
use crate::problem::penalty::Ridge;
use crate::{Error, Result};

/// How far a cardinality answer can be from the optimum.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CardinalityBound {
    /// Λ/m·‖z − Ũᵀw‖² + μ·(non-zeros) + the refit's ridge term, at the answer.
    pub value: f64,
    /// A lower bound: no weights cost less.
    pub bound: f64,
    /// Whether the answer is proven optimal, by a certificate that was checked.
    pub proven: bool,
}

impl CardinalityBound {
    /// (value − bound) / value, 0 for a row that costs nothing.
    pub fn distance(&self) -> f64 {
        prove::distance(self.value, self.bound)
    }
}

/// The rows of a design as priced rows.
pub struct PricedRows<'a, 's> {
    design: &'a Design<'s>,
    /// Ĝ + ridge.
    gram: Arc<Matrix>,
    level: f64,
}

impl<'a, 's> PricedRows<'a, 's> {
    /// `level` is the price of a non-zero and `ridge` is relative to unit-RMS features, as in
    /// [`solve_cardinality`](super::solve_cardinality).
    pub fn new(design: &'a Design<'s>, level: f64, ridge: f64) -> Result<Self> {
        if !(level >= 0.0 && level.is_finite()) {
            return Err(Error::setting("price of a non-zero", "zero or a positive number", level));
        }
        if !(ridge >= 0.0 && ridge.is_finite()) {
            return Err(Error::setting("ridge", "zero or a positive number", ridge));
        }
        let mut gram = prove::symmetric(design.gram().clone());
        (0..gram.rows()).for_each(|j| gram[(j, j)] += ridge);
        Ok(Self { design, gram: Arc::new(gram), level })
    }

    /// One row and an answer's weights in its coordinates; `None` for a target that is always zero.
    pub fn row(&self, problem: &RowProblem, answer: &[f64]) -> Result<Option<(PricedRow, Vec<f64>)>> {
        if answer.len() != self.design.features() {
            return Err(Error::shape("answer", self.design.features(), answer.len()));
        }
        Ok(self.canonical(problem)?.map(|row| (self.priced(&row), row.canonical(self.design, answer))))
    }

    /// Weights in a row's coordinates as they are stored.
    pub(super) fn stored(&self, problem: &RowProblem, weights: &[f64]) -> Result<Vec<f64>> {
        let row = self.canonical(problem)?;
        Ok(row.map_or_else(|| vec![0.0; self.design.features()], |row| row.stored(self.design, weights)))
    }

    /// The factor from the value of the priced form to the row's objective.
    pub(super) fn value_scale(&self, problem: &RowProblem) -> Result<f64> {
        Ok(self.canonical(problem)?.map_or(1.0, |row| row.value_scale))
    }

    fn canonical(&self, problem: &RowProblem) -> Result<Option<Row<'a>>> {
        problem.check(self.design.features(), self.design.targets())?;
        let (penalty, target) = (Ridge::new(1.0)?, problem.target);
        let (cross, energy) = (self.design.cross(target), self.design.energy(target));
        Ok(Row::new(self.design, Scaling::Rms, problem, &penalty, &cross, energy))
    }

    fn priced(&self, row: &Row) -> PricedRow {
        let forbidden = |j: usize| row.bounds.as_ref().is_some_and(|b| b[j] == (0.0, 0.0));
        let price = |j: usize| if forbidden(j) { f64::INFINITY } else { self.level * row.scale.weights[j] };
        PricedRow::over(self.gram.clone(), row.h.clone(), 1.0, (0..row.h.len()).map(price).collect())
    }
}

/// Bounds for the answers of cardinality rows, or proofs where these are asked for.
#[allow(clippy::too_many_arguments)]
pub(crate) fn cardinality_bound(
    design: &Design,
    problems: &[RowProblem],
    answers: &[Vec<f64>],
    level: f64,
    settings: &CardinalitySettings,
    prove: Option<&ProveSettings>,
    threads: Threads,
    cancel: &Cancel,
    mut progress: impl FnMut(usize),
) -> Result<Vec<CardinalityBound>> {
    let rows = PricedRows::new(design, level, settings.ridge)?;
    let mut shared: Vec<Shared> = Vec::new();
    if prove.is_none() {
        for problem in problems {
            if let Some(row) = rows.canonical(problem)?.map(|row| rows.priced(&row))
                && !shared.iter().any(|s| s.serves(&row))
            {
                shared.push(Shared::new(&row));
            }
        }
    }
    let work = |k: usize| {
        cancel.check()?;
        let Some(row) = rows.canonical(&problems[k])? else {
            return Ok(CardinalityBound { value: 0.0, bound: 0.0, proven: true });
        };
        let (priced, scale) = (rows.priced(&row), row.value_scale);
        let answer = row.canonical(design, &answers[k]);
        let (value, bound, proven) = match prove {
            Some(settings) => {
                let proof = priced.prove(&answer, settings, cancel)?;
                (proof.value, proof.bound, proof.verdict == Verdict::Optimal)
            }
            None => {
                let value = priced.value(&answer);
                let bound = shared
                    .iter()
                    .find(|s| s.serves(&priced))
                    .map_or(f64::NEG_INFINITY, |s| s.bound(&priced, &answer, value));
                (value, bound, bound >= value - ProveSettings::default().tolerance * value)
            }
        };
        // No cost is negative, so the bound is not either.
        Ok(CardinalityBound { value: value * scale, bound: bound.max(0.0) * scale, proven })
    };
    let mut out = Vec::with_capacity(problems.len());
    parallel::fold(threads, problems.len(), work, |_, bound| {
        out.push(bound);
        progress(out.len());
        Ok(())
    })?;
    Ok(out)
}
