//! The cardinality problem itself: min Λ/m·‖z − Ũᵀw‖² + μ·(number of non-zeros), non-convex, by operator splitting with
//! a hard threshold and a slowly growing ρ, then single moves ([`super::single_moves`]) and least squares on the support.
//!
//! The answer is a good local optimum, not a certified global one; [`cardinality_bound`] gives each row's distance
//! from the perspective relaxation, a certified lower bound.

use super::canonical::Row;
use super::design::{Design, Scaling};
use super::single_moves::settle;
use super::{ROW_BLOCK, Refit, SolverSettings};
use crate::linalg::{Matrix, View, gemm};
use crate::parallel::{self, Cancel, Threads};
use crate::problem::penalty::{Perspective, Ridge};
use crate::problem::{RowProblem, Units};
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
    check(design, problems, level)?;
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

/// Refuses what this method cannot do.
pub(super) fn check(design: &Design, problems: &[RowProblem], level: f64) -> Result<()> {
    if !(level >= 0.0 && level.is_finite()) {
        return Err(Error::setting("price of a non-zero", "zero or a positive number", level));
    }
    for problem in problems {
        problem.check(design.features(), design.targets())?;
        if problem.bounds.is_some() {
            return Err(Error::unsupported("cardinality with bounds", "use l1 or perspective for rows with bounds"));
        }
    }
    Ok(())
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
        .map(|p| Row::new(design, Scaling::Rms, p, &ridge, &design.cross(p.target), design.energy(p.target)))
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
            let forbidden = |j: usize| row.bounds.as_ref().is_some_and(|b| b[j] == (0.0, 0.0));
            let price = |j: usize| if forbidden(j) { f64::INFINITY } else { level * row.scale.weights[j] };
            let prices: Vec<f64> = (0..d).map(price).collect();
            let support = settle(design, row, &support, &prices, settings.ridge);
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

/// How far a cardinality answer can be from the best one.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CardinalityBound {
    /// Λ/m·‖z − Ũᵀw‖² + μ·(non-zeros) + the refit's ridge, at the answer.
    pub value: f64,
    /// No weights do better than this: the dual value of the perspective relaxation.
    pub bound: f64,
    /// Relative gap of that relaxation's solve.
    pub relative_gap: f64,
    /// Whether that solve ended at its limit; the bound holds all the same.
    pub at_limit: bool,
}

impl CardinalityBound {
    /// (value − bound) / value, 0 for a row that costs nothing.
    pub fn distance(&self) -> f64 {
        if self.value > 0.0 { (self.value - self.bound).max(0.0) / self.value } else { 0.0 }
    }
}

/// The perspective relaxation of each row's cardinality problem: μ·[x ≠ 0] + αx² has the convex envelope that
/// [`Perspective`] is, so its dual value bounds the non-convex problem from below. α is the refit's ridge.
#[allow(clippy::too_many_arguments)]
pub fn cardinality_bound(
    design: &Design,
    problems: &[RowProblem],
    answers: &[Vec<f64>],
    level: f64,
    settings: &CardinalitySettings,
    solver: &SolverSettings,
    threads: Threads,
    cancel: &Cancel,
) -> Result<Vec<CardinalityBound>> {
    let penalty = Perspective::new(1.0, 1.0)?;
    let relaxed: Vec<RowProblem> = problems
        .iter()
        .map(|problem| {
            let rms = design.target_rms(problem.target).max(f64::MIN_POSITIVE);
            let alpha = problem.fit * rms * rms * settings.ridge;
            let omega = |j: usize| level * problem.weights.as_ref().map_or(1.0, |w| w[j]);
            RowProblem {
                // A target that is always zero has the zero row, in any units.
                units: Units::Rms { factor: ((alpha / level).sqrt() / rms).max(f64::MIN_POSITIVE) },
                weights: Some((0..design.features()).map(omega).collect()),
                start: None,
                ..problem.clone()
            }
        })
        .collect();
    let solved = super::solve_rows(design, &penalty, &relaxed, solver, threads, cancel, |_| {})?;
    let bound = |((problem, answer), row): ((&RowProblem, &Vec<f64>), super::RowSolution)| {
        let rms = design.target_rms(problem.target);
        let mut value = problem.fit * design.mean_square_mismatch(problem.target, answer);
        for (j, w) in answer.iter().enumerate().filter(|(_, w)| **w != 0.0) {
            let omega = problem.weights.as_ref().map_or(1.0, |w| w[j]);
            if omega > 0.0 {
                let normalised = w * design.rms(j) / rms;
                value += level * omega + problem.fit * rms * rms * settings.ridge * omega * normalised * normalised;
            }
        }
        CardinalityBound {
            value,
            bound: row.primal - row.gap,
            relative_gap: row.relative_gap,
            at_limit: row.status == super::Status::Limit,
        }
    };
    Ok(problems.iter().zip(answers).zip(solved).map(bound).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;
    use crate::statistics::Statistics;

    /// All 2^d supports, each with its best weights.
    fn brute_force(statistics: &Statistics, price: f64, ridge: f64) -> f64 {
        let d = statistics.features();
        let design = Design::new(statistics).unwrap();
        let problem = RowProblem::new(0, 1.0);
        let penalty = Ridge::new(1.0).unwrap();
        let row = Row::new(&design, Scaling::Rms, &problem, &penalty, &design.cross(0), design.energy(0)).unwrap();
        let rms = design.target_rms(0);
        (0..1usize << d)
            .map(|set| {
                let support: Vec<usize> = (0..d).filter(|j| set >> j & 1 == 1).collect();
                let w = Refit { ridge }.on_support(&design, &row, &support);
                let stored = row.stored(&design, &w);
                let squares: f64 = w.iter().map(|w| w * w).sum();
                design.mean_square_mismatch(0, &stored) + price * support.len() as f64 + rms * rms * ridge * squares
            })
            .fold(f64::INFINITY, f64::min)
    }

    #[test]
    fn the_answer_is_near_the_best_of_all_supports_and_the_bound_below_it() {
        for seed in 0..20 {
            let mut random = Random::new(seed);
            let (m, d) = (60, 9);
            let mixing = Matrix::from_fn(d, d, |i, j| if i == j { 1.0 } else { 0.3 * random.normal() });
            let raw = Matrix::from_fn(m, d, |_, _| random.normal());
            let mut features = Matrix::zeros(m, d);
            gemm(features.as_mut_slice(), d, false, 1.0, raw.view(), mixing.view());
            let truth: Vec<f64> = (0..d).map(|j| if j % 3 == 0 { 1.0 + random.uniform() } else { 0.0 }).collect();
            let target = Matrix::from_fn(m, 1, |i, _| {
                (0..d).map(|j| features[(i, j)] * truth[j]).sum::<f64>() + 0.3 * random.normal()
            });
            let statistics = Statistics::of(&features, &target).unwrap();
            let design = Design::new(&statistics).unwrap();
            let problems = [RowProblem::new(0, 1.0)];
            // A ridge that matters, so that the relaxation has something to hold on to.
            let settings = CardinalitySettings { ridge: 0.05, ..Default::default() };
            let (one, cancel, price) = (Threads::one(), Cancel::new(), 0.05);
            let answers = solve_cardinality(&design, &problems, price, &settings, one, &cancel, |_| {}).unwrap();
            let solver = SolverSettings::default();
            let bound =
                cardinality_bound(&design, &problems, &answers, price, &settings, &solver, one, &cancel).unwrap()[0];
            let best = brute_force(&statistics, price, settings.ridge);
            assert!(bound.value >= best - 1e-9 && bound.value <= 1.1 * best, "seed {seed}: {bound:?} best {best}");
            assert!(bound.bound <= best + 1e-9, "seed {seed}: bound {} above the optimum {best}", bound.bound);
            assert!(bound.bound >= 0.5 * best, "seed {seed}: bound {} of {best} says nothing", bound.bound);
        }
    }
}
