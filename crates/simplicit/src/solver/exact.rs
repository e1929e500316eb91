//! Exact matching, min f(w) subject to Ũᵀw = z and the row's constraints, by the method of multipliers on the same
//! row solver.
//!
//! A round solves the relaxed row for the shifted target z + ν/(2λ), then ν ← ν + 2λ(z − Ũᵀw). Of ν only Ũν, νᵀz and
//! ‖ν‖² are needed, and all three follow from the statistics. If the support does not change, the next round matches
//! exactly.
//!
//! The certificate: the relaxed round proves f(w) − pᵀw + f*(p) ≤ gap for p = Ũν. That is w's gap for the target Ũᵀw,
//! which it matches by definition; for z itself f(w) − D(ν) is larger by −νᵀr, r = z − Ũᵀw. Rounds continue until
//! |νᵀr| is within the tolerance too, but their number is limited: states are float32, and with more samples than
//! features every rounding error adds an equation, so ν grows without bound over mismatches of 1e-8. Then only the
//! first statement holds.

use super::design::Scaling;
use super::{Design, RowSolution, SolverSettings, Status, Target, solve_targets};
use crate::linalg::{Matrix, axpy, dot, gemm};
use crate::parallel::{self, Cancel, Threads};
use crate::problem::{Penalty, RowProblem, Units};
use crate::states::StateSource;
use crate::statistics::{BLOCK, features_and_targets};
use crate::{Error, InfeasibleRow, Result};

/// A row matches when ‖z − Ũᵀw‖² is at most this share of ‖z‖²: a smaller mismatch cannot be distinguished from
/// rounding.
const MATCHED: f64 = 1e-12;
/// λ‖z‖² of the first round, relative to the penalty of a rough fit, and the largest λ‖z‖².
const FIRST_WEIGHT: f64 = 1e2;
const LAST_WEIGHT: f64 = 1e9;
/// λ grows by this factor when a round reduces ‖r‖² by less than it, and falls by it when a row matches but the round's
/// own gap is too large: with ν nearly right a small λ matches as well and is easier to solve.
const GROWTH: f64 = 4.0;
/// The share of the tolerance that a relaxed round may use; the rest is for the remaining mismatch.
const ROUND_SHARE: f64 = 0.6;
/// How many further rounds a matching row gets until its certificate holds for z itself.
const EXTRA_ROUNDS: usize = 8;
/// After this many rounds, the rows that do not match are checked for whether they can match.
const PATIENCE: usize = 6;
/// Rounds before a row is returned at its limit.
const MAX_ROUNDS: usize = 40;

/// Solves row problems with exact matching ([`Matching::Exact`](crate::problem::Matching::Exact)); their `fit` is
/// ignored. Rows that no weights can match are [`Error::Infeasible`], by name and with the smallest residual their
/// constraints allow. Solutions come in the order of `problems`, bit-identical for any number of threads; `primal` is
/// f(w), and `gap` the certified distance to the dual value. `progress` is called with the number of finished rows.
///
/// A solution matches as closely as the statistics can resolve, ‖z − Ũᵀw‖ ≤ 1e-6·‖z‖; [`largest_mismatch`] measures
/// it on the samples. The gap is that of the target Ũᵀw, and of z itself unless rounding in the states keeps the
/// multipliers from settling.
pub fn solve_rows_exactly(
    design: &Design,
    penalty: &dyn Penalty,
    problems: &[RowProblem],
    settings: &SolverSettings,
    threads: Threads,
    cancel: &Cancel,
    mut progress: impl FnMut(usize),
) -> Result<Vec<RowSolution>> {
    let mut rows = Vec::with_capacity(problems.len());
    for problem in problems {
        let any_fit = RowProblem { fit: 1.0, ..problem.clone() };
        any_fit.check(design.features(), design.targets())?;
        rows.push(Multipliers::new(design, penalty, any_fit));
    }
    let round_settings = SolverSettings { tolerance: ROUND_SHARE * settings.tolerance, ..settings.clone() };
    for round in 0..MAX_ROUNDS {
        let open: Vec<usize> = (0..rows.len()).filter(|&k| !rows[k].finished).collect();
        progress(rows.len() - open.len());
        if open.is_empty() {
            break;
        }
        if round == PATIENCE {
            require_feasible(design, penalty, &rows, settings, threads, cancel)?;
        }
        let targets: Vec<Target> = open.iter().map(|&k| rows[k].target()).collect();
        let mut solutions = Vec::with_capacity(open.len());
        solve_targets(design, penalty, &targets, &round_settings, threads, cancel, &mut |_, solution| {
            solutions.push(solution);
            Ok(())
        })?;
        for (k, solution) in open.into_iter().zip(solutions) {
            rows[k].take(design, penalty, settings, solution);
        }
    }
    require_feasible(design, penalty, &rows, settings, threads, cancel)?;
    progress(rows.len());
    Ok(rows.into_iter().map(|row| row.best).collect())
}

/// The multipliers ν of one row, and the results so far.
struct Multipliers {
    /// The row problem, with `fit` = λm of the next round and the latest weights to start from.
    problem: RowProblem,
    samples: f64,
    h: Vec<f64>,
    energy: f64,
    /// Ũν, νᵀz, ‖ν‖².
    cross: Vec<f64>,
    nu_z: f64,
    nu_nu: f64,
    /// The largest value of `fit`.
    last_fit: f64,
    /// The value that a gap is compared with if f(w) is nearly zero.
    value_floor: f64,
    /// Rounds since the row matched for the first time.
    extra_rounds: usize,
    /// ‖z − Ũᵀw‖² of the latest round and of the best one.
    mismatch: f64,
    best_mismatch: f64,
    best: RowSolution,
    finished: bool,
}

impl Multipliers {
    fn new(design: &Design, penalty: &dyn Penalty, mut problem: RowProblem) -> Self {
        let h = design.cross(problem.target);
        let energy = design.energy(problem.target);
        let rough = rough_value(design, penalty, &problem, &h);
        let unit = if rough > 0.0 { rough / design.target_rms(problem.target).powi(2) } else { 1.0 };
        problem.fit = FIRST_WEIGHT * unit;
        let finished = energy == 0.0;
        Self {
            samples: design.samples() as f64,
            cross: vec![0.0; h.len()],
            nu_z: 0.0,
            nu_nu: 0.0,
            last_fit: LAST_WEIGHT * unit,
            value_floor: 1e-10 * if rough > 0.0 { rough } else { energy / design.samples() as f64 },
            extra_rounds: 0,
            mismatch: energy,
            best_mismatch: energy,
            best: RowSolution {
                weights: vec![0.0; h.len()],
                primal: 0.0,
                gap: 0.0,
                relative_gap: 0.0,
                splitting_steps: 0,
                newton_steps: 0,
                status: if finished { Status::Solved } else { Status::Limit },
            },
            finished,
            h,
            energy,
            problem,
        }
    }

    fn matches(&self, mismatch: f64) -> bool {
        mismatch <= MATCHED * self.energy
    }

    /// The target of the relaxed row, z + ν/(2λ).
    fn target(&self) -> Target<'_> {
        let lambda = self.problem.fit / self.samples;
        let h = self.h.iter().zip(&self.cross).map(|(h, c)| h + c / (2.0 * lambda)).collect();
        let energy = self.energy + self.nu_z / lambda + self.nu_nu / (4.0 * lambda * lambda);
        Target { problem: &self.problem, shifted: Some((h, energy)) }
    }

    /// Takes the answer of a round and computes new multipliers, a certificate and the next λ.
    fn take(&mut self, design: &Design, penalty: &dyn Penalty, settings: &SolverSettings, round: RowSolution) {
        let lambda = self.problem.fit / self.samples;
        let w = round.weights;
        let mut left = times_gram(design, &w);
        for (left, h) in left.iter_mut().zip(&self.h) {
            *left = h - *left;
        }
        let unmatched = self.energy - dot(&self.h, &w);
        let mismatch = (unmatched - dot(&left, &w)).max(0.0);
        let nu_r = self.nu_z - dot(&self.cross, &w);
        self.nu_nu += 4.0 * lambda * (nu_r + lambda * mismatch);
        self.nu_z += 2.0 * lambda * unmatched;
        axpy(&mut self.cross, 2.0 * lambda, &left);

        let value = value(design, penalty, &self.problem, &w);
        let floor = value.max(self.value_floor);
        let for_z = round.gap + (nu_r + 2.0 * lambda * mismatch).abs();
        let proven_for_z = for_z <= settings.tolerance * floor;
        let gap = if proven_for_z { for_z } else { round.gap };
        let relative_gap = gap / floor;
        let matched = self.matches(mismatch);
        let solved = matched && relative_gap <= settings.tolerance;
        self.extra_rounds += usize::from(matched);
        self.finished = solved && (proven_for_z || self.extra_rounds > EXTRA_ROUNDS);
        let steps = (self.best.splitting_steps + round.splitting_steps, self.best.newton_steps + round.newton_steps);
        let better = if matched && self.matches(self.best_mismatch) {
            relative_gap < self.best.relative_gap
        } else {
            mismatch < self.best_mismatch
        };
        if better || self.finished {
            let status = if solved { Status::Solved } else { Status::Limit };
            self.best = RowSolution { weights: w.clone(), primal: value, gap, relative_gap, status, ..self.best };
            self.best_mismatch = mismatch;
        }
        (self.best.splitting_steps, self.best.newton_steps) = steps;
        if matched && !solved {
            self.problem.fit /= GROWTH;
        } else if mismatch > self.mismatch / GROWTH {
            self.problem.fit = (self.problem.fit * GROWTH).min(self.last_fit);
        }
        self.mismatch = mismatch;
        self.problem.start = Some(w);
    }
}

/// An error that names the rows that cannot match: those whose constrained least-squares residual is proven too large.
fn require_feasible(
    design: &Design,
    penalty: &dyn Penalty,
    rows: &[Multipliers],
    settings: &SolverSettings,
    threads: Threads,
    cancel: &Cancel,
) -> Result<()> {
    let doubtful: Vec<&Multipliers> = rows.iter().filter(|r| !r.finished && !r.matches(r.best_mismatch)).collect();
    let problems: Vec<RowProblem> = doubtful
        .iter()
        .map(|row| {
            let forbidden = |j: usize| row.problem.weights.as_ref().is_some_and(|w| w[j].is_infinite());
            let weights = (0..design.features()).map(|j| if forbidden(j) { f64::INFINITY } else { 0.0 }).collect();
            RowProblem { fit: 1.0, weights: Some(weights), ..row.problem.clone() }
        })
        .collect();
    let targets: Vec<Target> = problems.iter().map(|problem| Target { problem, shifted: None }).collect();
    let mut infeasible = Vec::new();
    solve_targets(design, penalty, &targets, settings, threads, cancel, &mut |k, least| {
        let row = doubtful[k];
        let share = |value: f64| value * row.samples / row.energy;
        if share(least.primal - least.gap) > MATCHED {
            infeasible.push(InfeasibleRow {
                name: format!("row {}", row.problem.target),
                target: row.problem.target,
                relative_residual: share(least.primal).max(0.0).sqrt(),
            });
        }
        Ok(())
    })?;
    if infeasible.is_empty() { Ok(()) } else { Err(Error::Infeasible { rows: infeasible }) }
}

/// Gw over all features of the design, in the statistics' own units.
fn times_gram(design: &Design, w: &[f64]) -> Vec<f64> {
    let mut canonical = vec![0.0; design.live().len()];
    for (k, (&j, &c)) in design.live().iter().zip(design.scales()).enumerate() {
        if w[j] != 0.0 {
            axpy(&mut canonical, w[j] * c, design.gram().row(k));
        }
    }
    let mut out = vec![0.0; w.len()];
    for ((&j, &c), &value) in design.live().iter().zip(design.scales()).zip(&canonical) {
        out[j] = value * c * design.samples() as f64;
    }
    out
}

/// Σ_j ω_j·f(s_j·w_j) over the entries that may be non-zero.
fn value(design: &Design, penalty: &dyn Penalty, problem: &RowProblem, w: &[f64]) -> f64 {
    let mut sum = 0.0;
    for (j, &w) in w.iter().enumerate() {
        let omega = problem.weights.as_ref().map_or(1.0, |o| o[j]);
        if w != 0.0 && omega > 0.0 && omega.is_finite() {
            let unit = match problem.units {
                Units::Stored => 1.0,
                Units::Rms { factor } => design.rms(j) * factor,
            };
            sum += omega * penalty.value(unit * w);
        }
    }
    sum
}

/// The penalty of a ridge fit: about the size of the penalty that a matching row will have.
fn rough_value(design: &Design, penalty: &dyn Penalty, problem: &RowProblem, h: &[f64]) -> f64 {
    const ROUGH: usize = 4;
    let Some(inverse) = design.coordinates(Scaling::Rms).inverse(ROUGH) else { return 0.0 };
    let m = design.samples() as f64;
    let canonical: Vec<f64> = design.live().iter().zip(design.scales()).map(|(&j, c)| h[j] / (m * c)).collect();
    let mut w = vec![0.0; h.len()];
    for (k, (&j, &c)) in design.live().iter().zip(design.scales()).enumerate() {
        w[j] = dot(inverse.row(k), &canonical) / c;
    }
    value(design, penalty, problem, &w)
}

/// max over the samples of |z − Ũᵀw| for every row, in a second pass: the confirmation of exact matching that the
/// statistics cannot give. A row is its target (Z first, then Y) and its weights over X, U and, if `constant`, the
/// constant.
pub fn largest_mismatch(
    source: &dyn StateSource,
    constant: bool,
    rows: &[(usize, &[f64])],
    threads: Threads,
    cancel: &Cancel,
) -> Result<Vec<f64>> {
    let shape = source.shape();
    let (features, targets) = (shape.states + shape.inputs + usize::from(constant), shape.states + shape.outputs);
    let mut weights = Vec::with_capacity(rows.len() * features);
    for &(target, w) in rows {
        if target >= targets {
            return Err(Error::shape("target", format!("below {targets}"), target));
        }
        if w.len() != features {
            return Err(Error::shape(format!("weights of row {target}"), features, w.len()));
        }
        weights.extend_from_slice(w);
    }
    let weights = Matrix::from_vec(rows.len(), features, weights)?;
    let samples = source.samples();
    let mut largest = vec![0.0f64; rows.len()];
    parallel::fold(
        threads,
        samples.div_ceil(BLOCK),
        |block| {
            cancel.check()?;
            let range = block * BLOCK..((block + 1) * BLOCK).min(samples);
            let (f, t) = features_and_targets(&source.block(range)?, constant);
            let mut fitted = Matrix::zeros(f.rows(), rows.len());
            gemm(fitted.as_mut_slice(), rows.len(), false, 1.0, f.view(), weights.view().t());
            let mut largest = vec![0.0f64; rows.len()];
            for i in 0..f.rows() {
                for ((largest, fitted), (target, _)) in largest.iter_mut().zip(fitted.row(i)).zip(rows) {
                    *largest = largest.max((t[(i, *target)] - fitted).abs());
                }
            }
            Ok(largest)
        },
        |_, part| {
            largest.iter_mut().zip(part).for_each(|(largest, part)| *largest = largest.max(part));
            Ok(())
        },
    )?;
    Ok(largest)
}
