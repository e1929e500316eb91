//! The cardinality problem itself: min Λ/m·‖z − Ũᵀw‖² + μ·(number of non-zeros), non-convex, by operator splitting with
//! a hard threshold and a slowly growing ρ, then exchanges of single entries.
//!
//! The answer is a good local optimum, not a certified global one; [`super::cardinality_bound`] gives each row's distance
//! from the perspective relaxation, a certified lower bound.

use super::canonical::Row;
use super::design::Design;
use super::{ROW_BLOCK, Refit};
use crate::linalg::{Matrix, View, gemm};
use crate::parallel::{self, Cancel, Threads};
use crate::problem::RowProblem;
use crate::problem::penalty::Ridge;
use crate::{Error, Result};

/// How hard to try.
#[derive(Debug, Clone, PartialEq)]
pub struct CardinalitySettings {
    /// Splitting steps. Default 250.
    pub steps: usize,
    /// First ρ as a share of the mean eigenvalue of the normalised Gram matrix (which is 1). Default 0.05.
    pub first_rho: f64,
    /// Factor on ρ every third step. Default 1.02.
    pub growth: f64,
    /// Ridge of the refit, relative to unit-RMS features. Default 1e-5.
    pub ridge: f64,
}

impl Default for CardinalitySettings {
    fn default() -> Self {
        Self { steps: 250, first_rho: 0.05, growth: 1.02, ridge: 1e-5 }
    }
}

/// Weights of every row with few non-zeros: `level` is the price μ of one, in the units of the row's objective.
/// Entry weights scale the price (0: free, ∞: forbidden); bounds are not supported.
#[allow(clippy::too_many_arguments)]
pub fn solve_cardinality(
    design: &Design,
    problems: &[RowProblem],
    level: f64,
    settings: &CardinalitySettings,
    threads: Threads,
    cancel: &Cancel,
    mut progress: impl FnMut(usize),
) -> Result<Vec<Vec<f64>>> {
    if !(level >= 0.0 && level.is_finite()) {
        return Err(Error::setting("price of a non-zero", "zero or a positive number", level));
    }
    for problem in problems {
        problem.check(design.features(), design.targets())?;
        if problem.bounds.is_some() {
            return Err(Error::unsupported("cardinality with bounds", "use l1 or perspective for rows with bounds"));
        }
    }
    let Some((values, vectors)) = design.eigen() else {
        return Err(Error::shape("Gram matrix", "finite entries", "a NaN"));
    };
    let mut out = Vec::with_capacity(problems.len());
    parallel::fold(
        threads,
        problems.len().div_ceil(ROW_BLOCK),
        |block| {
            let problems = &problems[block * ROW_BLOCK..((block + 1) * ROW_BLOCK).min(problems.len())];
            solve_block(design, values, vectors, problems, level, settings, cancel)
        },
        |_, block| {
            out.extend(block);
            progress(out.len());
            Ok(())
        },
    )?;
    Ok(out)
}

fn solve_block(
    design: &Design,
    values: &[f64],
    vectors: &Matrix,
    problems: &[RowProblem],
    level: f64,
    settings: &CardinalitySettings,
    cancel: &Cancel,
) -> Result<Vec<Vec<f64>>> {
    let d = design.live().len();
    // The penalty plays no part here; ridge has no kink and keeps every unpenalised entry ordinary.
    let ridge = Ridge::new(1.0)?;
    let rows: Vec<Option<Row>> = problems
        .iter()
        .map(|p| Row::new(design, p, &ridge, &design.cross(p.target), design.energy(p.target)))
        .collect();
    let count = rows.len();
    let mut v = vec![0.0; count * d];
    let mut dual = vec![0.0; count * d];
    let mut h = vec![0.0; count * d];
    for (k, (row, problem)) in rows.iter().zip(problems).enumerate() {
        let Some(row) = row else { continue };
        h[k * d..(k + 1) * d].copy_from_slice(&row.h);
        if let Some(start) = &problem.start {
            v[k * d..(k + 1) * d].copy_from_slice(&row.canonical(design, start));
        }
    }
    let mut rotated = vec![0.0; count * d];
    let mut m = vec![0.0; count * d];
    let mut rho = settings.first_rho;
    for step in 0..settings.steps {
        cancel.check()?;
        // m = (Ĝ + ρI)⁻¹(ĥ + ρ(v − s)) through the eigenvectors: ρ changes too often for a factor.
        for ((m, (v, s)), h) in m.iter_mut().zip(v.iter().zip(&dual)).zip(&h) {
            *m = h + rho * (v - s);
        }
        gemm(&mut rotated, d, false, 1.0, View::new(&m, count, d, d), vectors.view());
        for row in rotated.chunks_exact_mut(d.max(1)) {
            for (r, value) in row.iter_mut().zip(values) {
                *r /= value.max(0.0) + rho;
            }
        }
        gemm(&mut m, d, false, 1.0, View::new(&rotated, count, d, d), vectors.view().t());
        for (k, row) in rows.iter().enumerate() {
            let Some(row) = row else { continue };
            let span = k * d..(k + 1) * d;
            hard_threshold(row, level, rho, &m[span.clone()], &mut v[span.clone()], &mut dual[span]);
        }
        if step % 3 == 2 {
            rho *= settings.growth;
            for s in &mut dual {
                *s /= settings.growth;
            }
        }
    }
    let refit = Refit { ridge: settings.ridge };
    rows.iter()
        .zip(problems)
        .enumerate()
        .map(|(k, (row, problem))| {
            let Some(row) = row else { return Ok(vec![0.0; design.features()]) };
            let support: Vec<usize> = (0..d).filter(|&j| v[k * d + j] != 0.0).collect();
            let w = refit.on_support(design, row, &support);
            let stored = row.stored(design, &w);
            if row.is_feasible(&w) { Ok(stored) } else { refit.inside_ball(design, problem, &stored, cancel) }
        })
        .collect()
}

/// v ← entries of m + s worth their price, s += m − v. In canonical units the price is μω/S and an entry t is worth ρt²/2.
fn hard_threshold(row: &Row, level: f64, rho: f64, m: &[f64], v: &mut [f64], dual: &mut [f64]) {
    for j in 0..v.len() {
        let t = m[j] + dual[j];
        let forbidden = row.bounds.as_ref().is_some_and(|b| b[j] == (0.0, 0.0));
        let keep = !forbidden && 0.5 * rho * t * t > level * row.scale.weights[j];
        v[j] = if keep { t } else { 0.0 };
        dual[j] = t - v[j];
    }
}
