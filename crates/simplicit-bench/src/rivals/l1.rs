//! Layer-wise ℓ1 in the manner of Net-Trim: one convex problem per row on the group's own features, then a refit.
//!
//! Net-Trim bounds the mismatch and minimises ‖w‖₁; here the mismatch is penalised, which traces the same curve.

use std::sync::{Mutex, PoisonError};

use simplicit::Result;
use simplicit::problem::RowProblem;
use simplicit::problem::penalty::L1;
use simplicit::solver::{SolverSettings, solve_rows};
use simplicit::train::Found;

use super::{Budget, Layer, Prepared, Rival, normalised};

/// Most solves in the search for a count.
const TRIES: usize = 8;
/// Accepted surplus over a count, as a share of it; the surplus is trimmed.
const SURPLUS: f64 = 0.02;

/// ℓ1 in normalised units. The price is β.
#[derive(Debug)]
pub struct LayerwiseL1;

/// A β with the rows that it gives.
type Solved = (f64, Vec<Vec<f64>>);

struct Seen {
    problems: Vec<RowProblem>,
    /// Solutions by β. The same price may be asked for again, and the search for a count begins between known
    /// solutions.
    solved: Mutex<Vec<Solved>>,
}

impl Rival for LayerwiseL1 {
    fn name(&self) -> &'static str {
        "layer-wise ℓ1 (Net-Trim)"
    }

    fn id(&self) -> &'static str {
        "l1"
    }

    fn first_price(&self) -> f64 {
        1e-3
    }

    fn fits(&self) -> bool {
        true
    }

    fn prepare(&self, layer: &Layer) -> Result<Box<dyn Prepared>> {
        let weights = |j: usize| if Some(j) == layer.constant { 0.0 } else { 1.0 };
        let problems = normalised(layer.design)
            .into_iter()
            .map(|p| RowProblem { weights: Some((0..layer.design.features()).map(weights).collect()), ..p })
            .collect();
        Ok(Box::new(Seen { problems, solved: Mutex::new(Vec::new()) }))
    }
}

impl Seen {
    fn solved(&self) -> std::sync::MutexGuard<'_, Vec<Solved>> {
        self.solved.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn at(&self, layer: &Layer, beta: f64) -> Result<Vec<Vec<f64>>> {
        if let Some((_, rows)) = self.solved().iter().find(|(b, _)| *b == beta) {
            return Ok(rows.clone());
        }
        // Only the supports are used here, and a tighter gap does not change them.
        let settings = SolverSettings { tolerance: 1e-4, ..Default::default() };
        let (threads, cancel) = (layer.threads, layer.cancel);
        let rows = solve_rows(layer.design, &L1::new(beta)?, &self.problems, &settings, threads, cancel, |_| {})?;
        let rows: Vec<Vec<f64>> = rows.into_iter().map(|r| r.weights).collect();
        self.solved().push((beta, rows.clone()));
        Ok(rows)
    }

    /// The sparsest solution known with at least `count` weights.
    fn with_at_least(&self, layer: &Layer, count: usize) -> Result<Vec<Vec<f64>>> {
        let total = (layer.weights.rows() * layer.weights.cols()).max(1) as f64;
        let wanted = 1.0 - (count as f64 * (1.0 + 0.5 * SURPLUS)).min(total) / total;
        let mut found = Found::default();
        for (beta, rows) in self.solved().iter() {
            found.add(*beta, 1.0 - layer.count(rows) as f64 / total);
        }
        for _ in 0..TRIES {
            let beta = found.next(wanted).unwrap_or(1e-3);
            let kept = layer.count(&self.at(layer, beta)?);
            if !found.add(beta, 1.0 - kept as f64 / total)
                || (count..=count + (SURPLUS * count as f64) as usize + 1).contains(&kept)
            {
                break;
            }
        }
        let solved = self.solved();
        let enough = solved.iter().map(|(_, rows)| rows).filter(|rows| layer.count(rows) >= count);
        let densest = solved.iter().map(|(_, rows)| rows).max_by_key(|rows| layer.count(rows));
        Ok(enough.min_by_key(|rows| layer.count(rows)).or(densest).cloned().unwrap_or_default())
    }
}

impl Prepared for Seen {
    fn rows(&self, layer: &Layer, budget: Budget) -> Result<Vec<Vec<f64>>> {
        let rows = match budget {
            Budget::Price(beta) => self.at(layer, beta)?,
            Budget::Count(count) => {
                let rows = self.with_at_least(layer, count)?;
                let design = layer.design;
                let score =
                    |k: usize, j: usize| rows[k][j].abs() * design.rms(j) / design.target_rms(k).max(f64::MIN_POSITIVE);
                layer.largest(&rows, count, score)
            }
        };
        layer.refit(&rows)
    }
}
