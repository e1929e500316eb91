//! The rows of a group, solved in blocks: cardinality, or convex rounds with reweighting and a refit.

use super::delegate::RowsTask;
use super::keep::{self, Keep};
use super::{Objective, Progress, Run, TrainSettings};
use crate::backend;
use crate::parallel::{self, Cancel, Threads};
use crate::problem::{Matching, RowProblem, Units};
use crate::solver::{self, CardinalityBound, Design, ROW_BLOCK, Refit, Status};
use crate::statistics::Statistics;
use crate::{Error, Result};

/// ε of the reweighting ω = 2ε/(|w̃| + ε), in unit-RMS coordinates.
const REWEIGHT: f64 = 0.02;
/// Numbers of a solved row besides its weights: its gap (NaN: none) and whether it ended at a limit.
pub(super) const ROW_EXTRAS: usize = 2;

/// A solved row in stored coordinates over the group's features.
pub(super) struct Solved {
    pub(super) weights: Vec<f64>,
    pub(super) relative_gap: Option<f64>,
    pub(super) at_limit: bool,
    pub(super) on_gpu: bool,
}

/// The perspective bound of every cardinality row, a convex solve each.
pub(super) fn bound(
    design: &Design,
    settings: &TrainSettings,
    strength: f64,
    problems: &[RowProblem],
    answers: &[Vec<f64>],
    run: &mut Run,
) -> Result<Vec<CardinalityBound>> {
    let (cardinality, solver) = (&settings.cardinality, &settings.solver);
    solver::cardinality_bound(design, problems, answers, strength, cardinality, solver, run.threads, run.cancel)
}

/// All rows of a group in blocks, each block kept as it comes.
#[allow(clippy::too_many_arguments)]
pub(super) fn solve(
    design: &Design,
    statistics: &Statistics,
    settings: &TrainSettings,
    strength: f64,
    problems: &[RowProblem],
    name: &str,
    key: &str,
    run: &mut Run,
) -> Result<Vec<Solved>> {
    let d = design.features();
    let total = problems.len();
    let mut out = Vec::with_capacity(total);
    let first_rho = settings.cardinality.first_rho;
    if let Some(solved) = on_gpu(design, settings, strength, problems, name, key, run)? {
        return Ok(solved);
    }
    let (keep, cancel): (&dyn Keep, _) = (run.keep, run.cancel);
    let tasks: Vec<RowsTask> =
        problems.chunks(ROW_BLOCK).map(|block| RowsTask { strength, first_rho, problems: block.to_vec() }).collect();
    let mut take = |_: usize, rows: Vec<f64>| {
        for row in rows.chunks_exact(d + ROW_EXTRAS) {
            let gap = row[d];
            out.push(Solved {
                weights: row[..d].to_vec(),
                relative_gap: (!gap.is_nan()).then_some(gap),
                at_limit: row[d + 1] != 0.0,
                on_gpu: false,
            });
        }
        (run.progress)(Progress::Rows { group: name.to_string(), done: out.len(), total });
        Ok(())
    };
    match keep.delegate() {
        Some(elsewhere) => elsewhere.rows(statistics, &tasks, &mut take)?,
        None => parallel::fold(
            run.threads,
            tasks.len(),
            |block| {
                cancel.check()?;
                keep::numbers(keep, &format!("{key} rows {block}"), tasks[block].length(d), || {
                    tasks[block].run(design, settings, cancel)
                })
            },
            take,
        )?,
    }
    if out.len() != total {
        return Err(Error::shape(format!("rows of {name}"), total, out.len()));
    }
    Ok(out)
}

/// The cardinality rows of a whole group on the GPU of the settings; `None` where the CPU has to solve them.
fn on_gpu(
    design: &Design,
    settings: &TrainSettings,
    strength: f64,
    problems: &[RowProblem],
    name: &str,
    key: &str,
    run: &mut Run,
) -> Result<Option<Vec<Solved>>> {
    let d = design.features();
    if !matches!(settings.objective, Objective::Cardinality) || run.keep.delegate().is_some() {
        return Ok(None);
    }
    let Some(cuda) = backend::gpu(settings.device, (problems.len() * d) as f64 * d as f64)? else { return Ok(None) };
    let rows = keep::numbers(run.keep, &format!("{key} rows on a GPU"), problems.len() * d, || {
        let cardinality = &settings.cardinality;
        let (threads, cancel) = (run.threads, run.cancel);
        let solved = solver::solve_cardinality_on(&cuda, design, problems, strength, cardinality, threads, cancel)?;
        Ok(solved.rows.concat())
    });
    let Some(rows) = backend::or_cpu(settings.device, rows)? else { return Ok(None) };
    let total = problems.len();
    (run.progress)(Progress::Rows { group: name.to_string(), done: total, total });
    let solved = |row: &[f64]| Solved { weights: row.to_vec(), relative_gap: None, at_limit: false, on_gpu: true };
    Ok(Some(rows.chunks_exact(d.max(1)).map(solved).collect()))
}

pub(super) fn solve_block(
    design: &Design,
    settings: &TrainSettings,
    strength: f64,
    problems: &[RowProblem],
    cancel: &Cancel,
) -> Result<Vec<Vec<f64>>> {
    let one = Threads::one();
    let penalty = match &settings.objective {
        Objective::Cardinality => {
            let rows =
                solver::solve_cardinality(design, problems, strength, &settings.cardinality, one, cancel, |_| {})?;
            return Ok(rows.into_iter().map(|row| [row, vec![f64::NAN, 0.0]].concat()).collect());
        }
        Objective::Convex(penalty) => penalty.as_ref(),
        Objective::Method(_) => {
            return Err(Error::unsupported(
                "a block of rows of a row method",
                "it solves whole groups, where it was given",
            ));
        }
    };
    if settings.matching == Matching::Exact {
        let rows = solver::solve_rows_exactly(design, penalty, problems, &settings.solver, one, cancel, |_| {})?;
        let state = |s: &solver::RowSolution| [s.relative_gap, f64::from(u8::from(s.status == Status::Limit))];
        return Ok(rows.into_iter().map(|s| [&s.weights[..], &state(&s)].concat()).collect());
    }
    // A convex solve does not depend on where it starts, and the splitting phase is no slower from zero.
    let mut round: Vec<RowProblem> = problems.iter().map(|p| RowProblem { start: None, ..p.clone() }).collect();
    let mut solutions = solver::solve_rows(design, penalty, &round, &settings.solver, one, cancel, |_| {})?;
    for _ in 1..settings.rounds {
        for ((problem, original), solution) in round.iter_mut().zip(problems).zip(&solutions) {
            problem.weights = reweighted(design, original, &solution.weights);
            problem.start = Some(solution.weights.clone());
        }
        solutions = solver::solve_rows(design, penalty, &round, &settings.solver, one, cancel, |_| {})?;
    }
    let weights: Vec<Vec<f64>> = solutions.iter().map(|s| s.weights.clone()).collect();
    let weights =
        if settings.refit { Refit::default().rows(design, problems, &weights, one, cancel)? } else { weights };
    Ok(weights
        .into_iter()
        .zip(&solutions)
        .map(|(w, s)| [w, vec![s.relative_gap, f64::from(u8::from(s.status == Status::Limit))]].concat())
        .collect())
}

/// ω_j·2ε/(|w̃_j| + ε): entries that are small cost more in the next round.
fn reweighted(design: &Design, problem: &RowProblem, weights: &[f64]) -> Option<Vec<f64>> {
    let factor = match problem.units {
        Units::Rms { factor } => factor,
        Units::Stored => 1.0 / design.target_rms(problem.target).max(f64::MIN_POSITIVE),
    };
    let omega = problem.weights.as_ref()?.iter().zip(weights).enumerate();
    Some(
        omega.map(|(j, (omega, w))| omega * 2.0 * REWEIGHT / ((w * design.rms(j) * factor).abs() + REWEIGHT)).collect(),
    )
}
