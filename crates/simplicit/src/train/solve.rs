//! The rows of a group, solved in blocks: cardinality, or convex rounds with reweighting and a refit.

use super::delegate::RowsTask;
use super::keep::{self, Keep};
use super::{Objective, Progress, Run, TrainSettings};
use crate::backend::{self, Device, GroupBackend, block_rows};
use crate::parallel::{self, Cancel, Threads};
use crate::problem::{Matching, RowProblem, Units};
use crate::solver::prove::ProveSettings;
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

/// The lower bound of every cardinality row, or a proof where the settings ask for one.
pub(super) fn bound(
    design: &Design,
    settings: &TrainSettings,
    strength: f64,
    problems: &[RowProblem],
    answers: &[Vec<f64>],
    name: &str,
    run: &mut Run,
) -> Result<Vec<CardinalityBound>> {
    let prove = settings.prove.map(|seconds| ProveSettings { seconds, ..ProveSettings::default() });
    let how = &settings.cardinality;
    let (threads, cancel, total) = (run.threads, run.cancel, problems.len());
    let told = |done: usize| (run.progress)(Progress::Rows { group: format!("bounds of {name}"), done, total });
    solver::cardinality_bound(design, problems, answers, strength, how, prove.as_ref(), threads, cancel, told)
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
    let (keep, cancel, threads): (&dyn Keep, _, _) = (run.keep, run.cancel, run.threads);
    if matches!(settings.device, Device::Cuda(_)) && keep.delegate().is_some() {
        return Err(Error::setting("device", "cpu or auto where other processes solve the rows", settings.device));
    }
    let mut out = Vec::with_capacity(total);
    let first_rho = settings.cardinality.first_rho;
    let whole = matches!(settings.objective, Objective::Cardinality);
    let size = if whole { block_rows(total) } else { ROW_BLOCK };
    let tasks: Vec<RowsTask> =
        problems.chunks(size).map(|block| RowsTask { strength, first_rho, problems: block.to_vec() }).collect();
    let key = |block: usize| format!("{key} rows {block}");
    // Rows of cardinality share more than a block: all of them together, unless an earlier run kept them.
    let mut together = None;
    let mut on_gpu = false;
    if whole && keep.delegate().is_none() {
        let kept =
            (0..tasks.len()).map(|b| keep::find(keep, &key(b), tasks[b].length(d))).collect::<Result<Vec<_>>>()?;
        let kept: Option<Vec<Vec<f64>>> = kept.into_iter().collect();
        together = Some(match kept {
            Some(blocks) => {
                on_gpu = backend::gpu(settings.device, work(problems, d))?.is_some();
                blocks
            }
            None => {
                let told = &mut |done: usize| {
                    (run.progress)(Progress::Rows {
                        group: name.to_string(),
                        done: done.min(total.saturating_sub(1)),
                        total,
                    });
                };
                let rows;
                (rows, on_gpu) = cardinality_rows(design, settings, strength, problems, size, threads, cancel, told)?;
                let blocks: Vec<Vec<f64>> = rows.chunks(size).map(<[Vec<f64>]>::concat).collect();
                for (block, rows) in blocks.iter().enumerate() {
                    keep::put(keep, &key(block), rows)?;
                }
                blocks
            }
        });
    }
    let mut take = |_: usize, rows: Vec<f64>| {
        for row in rows.chunks_exact(d + ROW_EXTRAS) {
            let gap = row[d];
            out.push(Solved {
                weights: row[..d].to_vec(),
                relative_gap: (!gap.is_nan()).then_some(gap),
                at_limit: row[d + 1] != 0.0,
                on_gpu,
            });
        }
        (run.progress)(Progress::Rows { group: name.to_string(), done: out.len(), total });
        Ok(())
    };
    match (keep.delegate(), together) {
        (_, Some(blocks)) => blocks.into_iter().enumerate().try_for_each(|(block, rows)| take(block, rows))?,
        (Some(elsewhere), None) => elsewhere.rows(statistics, &tasks, &mut take)?,
        (None, None) => parallel::fold(
            threads,
            tasks.len(),
            |block| {
                cancel.check()?;
                keep::numbers(keep, &key(block), tasks[block].length(d), || tasks[block].run(design, settings, cancel))
            },
            take,
        )?,
    }
    if out.len() != total {
        return Err(Error::shape(format!("rows of {name}"), total, out.len()));
    }
    Ok(out)
}

/// Multiply-adds of a step of the splitting.
fn work(problems: &[RowProblem], features: usize) -> f64 {
    problems.len() as f64 * (features * features) as f64
}

/// Rows of the cardinality problem with what stands behind their weights: no gap, no limit. And whether a GPU solved them.
#[allow(clippy::too_many_arguments)]
fn cardinality_rows(
    design: &Design,
    settings: &TrainSettings,
    strength: f64,
    problems: &[RowProblem],
    block: usize,
    threads: Threads,
    cancel: &Cancel,
    progress: &mut dyn FnMut(usize),
) -> Result<(Vec<Vec<f64>>, bool)> {
    let how = &settings.cardinality;
    let mut solve = |backend: &dyn GroupBackend| {
        solver::solve_in_blocks(design, problems, strength, how, backend, block, threads, cancel, progress)
    };
    let (rows, on_gpu) = on_device(settings, work(problems, design.features()), &mut solve)?;
    Ok((rows.into_iter().map(|row| [row, vec![f64::NAN, 0.0]].concat()).collect(), on_gpu))
}

/// Work for the GPU of the settings, if it is worth it, or else for their backend; and whether the GPU did it.
pub(super) fn on_device<T>(
    settings: &TrainSettings,
    work: f64,
    solve: &mut dyn FnMut(&dyn GroupBackend) -> Result<T>,
) -> Result<(T, bool)> {
    if let Some(cuda) = backend::gpu(settings.device, work)?
        && let Some(answer) = backend::or_cpu(settings.device, solve(&cuda))?
    {
        return Ok((answer, true));
    }
    Ok((solve(settings.backend.as_ref())?, false))
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
            let block = problems.len();
            // Blocks are solved elsewhere, with the bits they would have here: never by a GPU that happens to be there.
            let settings = TrainSettings { device: Device::Cpu, ..settings.clone() };
            let (rows, _) = cardinality_rows(design, &settings, strength, problems, block, one, cancel, &mut |_| {})?;
            return Ok(rows);
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
