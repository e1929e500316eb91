//! The rows of a group, solved in blocks: cardinality, or convex rounds with reweighting and a refit.

use crate::backend::{self, Device, GroupBackend, block_rows};
use crate::parallel::{self, Cancel, Threads};
use crate::problem::{Matching, RowProblem, Units};
use crate::solver::prove::ProveSettings;
use crate::solver::{self, CardinalityBound, Design, ROW_BLOCK, Refit, Status};
use crate::statistics::Statistics;
use crate::train::delegate::RowsTask;
use crate::train::keep::{self, Keep};
use crate::train::key::RowsKey;
use crate::train::rows::group::Rows;
use crate::train::{Objective, Progress, Run, TrainSettings};
use crate::{Error, Result};

/// ε of the reweighting ω = 2ε/(|w̃| + ε), in unit-RMS coordinates.
const REWEIGHT: f64 = 0.02;
/// Numbers of a solved row besides its weights: its gap (zero for cardinality, whose rows have none) and 1 if it
/// ended at a limit.
pub(in crate::train) const ROW_EXTRAS: usize = 2;
/// Numbers of a row's bound: its value, the bound, and whether it is proven.
pub(in crate::train) const BOUND_NUMBERS: usize = 3;

/// A solved row in stored coordinates over the group's features.
pub(in crate::train) struct Solved {
    pub(in crate::train) weights: Vec<f64>,
    pub(in crate::train) relative_gap: Option<f64>,
    pub(in crate::train) at_limit: bool,
    pub(in crate::train) on_gpu: bool,
}

/// The lower bounds of some cardinality rows of a group, or proofs if the settings ask for them.
pub(in crate::train) fn bound(
    rows: &Rows,
    settings: &TrainSettings,
    strength: f64,
    problems: &[RowProblem],
    answers: &[Vec<f64>],
    run: &mut Run,
) -> Result<Vec<CardinalityBound>> {
    let Rows { name, statistics, design, .. } = *rows;
    let (threads, cancel, keep, total) = (run.threads, run.cancel, run.keep, problems.len());
    let mut report = |done: usize| (run.progress)(Progress::Rows { group: format!("bounds of {name}"), done, total });
    let Some(elsewhere) = keep.delegate() else {
        return bound_here(design, settings, strength, problems, answers, threads, cancel, &mut report);
    };
    let task = |(problem, answer): (&RowProblem, &Vec<f64>)| RowsTask {
        strength,
        cardinality: settings.rows.cardinality.clone(),
        problems: vec![problem.clone()],
        answers: Some(vec![answer.clone()]),
        inverses: 0,
    };
    let tasks: Vec<RowsTask> = problems.iter().zip(answers).map(task).collect();
    let mut out = Vec::with_capacity(total);
    elsewhere.rows(statistics, &tasks, &mut |_, numbers| {
        let [value, bound, proven] = numbers[..] else {
            return Err(Error::shape("bound of a row", BOUND_NUMBERS, numbers.len()));
        };
        out.push(CardinalityBound { value, bound, proven: proven != 0.0 });
        report(out.len());
        Ok(())
    })?;
    Ok(out)
}

#[allow(clippy::too_many_arguments)]
pub(in crate::train) fn bound_here(
    design: &Design,
    settings: &TrainSettings,
    strength: f64,
    problems: &[RowProblem],
    answers: &[Vec<f64>],
    threads: Threads,
    cancel: &Cancel,
    report: &mut dyn FnMut(usize),
) -> Result<Vec<CardinalityBound>> {
    let prove = settings.rows.prove.map(|seconds| ProveSettings { seconds, ..ProveSettings::default() });
    let how = &settings.rows.cardinality;
    solver::cardinality_bound(design, problems, answers, strength, how, prove.as_ref(), threads, cancel, report)
}

/// Weights of cardinality rows over a group's statistics, in blocks of `block` rows; they are neither kept nor
/// certified.
pub(in crate::train) fn cardinality(
    rows: &Rows,
    settings: &TrainSettings,
    strength: f64,
    problems: &[RowProblem],
    block: usize,
    run: &mut Run,
) -> Result<Vec<Vec<f64>>> {
    let Rows { name, statistics, design, .. } = *rows;
    let (threads, cancel, keep, total) = (run.threads, run.cancel, run.keep, problems.len());
    let mut report = |done| (run.progress)(Progress::Rows { group: name.to_string(), done, total });
    let mut solved = match keep.delegate() {
        None => cardinality_rows(design, settings, strength, problems, block, threads, cancel, &mut report)?.0,
        Some(elsewhere) => {
            let mut out = Vec::with_capacity(total);
            let tasks = row_tasks(statistics, settings, strength, problems.chunks(block));
            elsewhere.rows(statistics, &tasks, &mut |_, rows| {
                out.extend(rows.chunks_exact(design.features() + ROW_EXTRAS).map(<[f64]>::to_vec));
                report(out.len());
                Ok(())
            })?;
            out
        }
    };
    solved.iter_mut().for_each(|row| row.truncate(design.features()));
    Ok(solved)
}

/// Tasks for other processes, one for each block of rows.
fn row_tasks<'a>(
    statistics: &Statistics,
    settings: &TrainSettings,
    strength: f64,
    blocks: impl Iterator<Item = &'a [RowProblem]>,
) -> Vec<RowsTask> {
    // With few samples, a worker computes the inverse in less time than it takes to send it.
    let shared = matches!(settings.objective, Objective::Cardinality) && statistics.few_samples().is_none();
    let inverses = if shared { settings.rows.cardinality.ladder().schedule().len() } else { 0 };
    let task = |block: &[RowProblem]| RowsTask {
        strength,
        cardinality: settings.rows.cardinality.clone(),
        problems: block.to_vec(),
        answers: None,
        inverses,
    };
    blocks.map(task).collect()
}

/// Solves rows of a group, all or whole blocks of them, in blocks; each block is kept as soon as it is solved.
#[allow(clippy::too_many_arguments)]
pub(in crate::train) fn solve(
    design: &Design,
    statistics: &Statistics,
    settings: &TrainSettings,
    strength: f64,
    problems: &[RowProblem],
    name: &str,
    key: &RowsKey,
    run: &mut Run,
) -> Result<Vec<Solved>> {
    let d = design.features();
    let total = problems.len();
    let (keep, cancel, threads): (&dyn Keep, _, _) = (run.keep, run.cancel, run.threads);
    if matches!(settings.work.device, Device::Cuda(_)) && keep.delegate().is_some() {
        return Err(Error::setting("device", "cpu or auto where other processes solve the rows", settings.work.device));
    }
    let mut out = Vec::with_capacity(total);
    let whole = matches!(settings.objective, Objective::Cardinality);
    let size = if whole { block_rows(statistics.targets()) } else { ROW_BLOCK };
    let blocks: Vec<&[RowProblem]> = problems.chunks(size).collect();
    let length = |block: usize| blocks[block].len() * (d + ROW_EXTRAS);
    let mut kept = Vec::new();
    if whole || keep.delegate().is_some() {
        kept = (0..blocks.len()).map(|b| keep::find(keep, &key.block(b), length(b))).collect::<Result<Vec<_>>>()?;
    }
    let event = |done: usize| Progress::Rows { group: name.to_string(), done, total };
    // Cardinality rows share more than a block, so all of them are solved together, unless an earlier run kept them.
    if whole && keep.delegate().is_none() && kept.iter().any(Option::is_none) {
        let not_yet = &mut |done: usize| (run.progress)(event(done.min(total.saturating_sub(1))));
        let (rows, on_gpu) = cardinality_rows(design, settings, strength, problems, size, threads, cancel, not_yet)?;
        if keep.keeps() {
            for (block, rows) in rows.chunks(size).enumerate() {
                keep::put(keep, &key.block(block), &in_one(rows))?;
            }
        }
        (run.progress)(event(total));
        let row = |weights| Solved { weights, relative_gap: None, at_limit: false, on_gpu };
        return Ok(rows.into_iter().map(row).collect());
    }
    let on_gpu =
        whole && keep.delegate().is_none() && backend::gpu(settings.work.device, work(design, problems))?.is_some();
    let mut take = |_: usize, rows: Vec<f64>| {
        for row in rows.chunks_exact(d + ROW_EXTRAS) {
            out.push(Solved {
                weights: row[..d].to_vec(),
                // Cardinality rows have no gap.
                relative_gap: (!whole).then_some(row[d]),
                at_limit: row[d + 1] != 0.0,
                on_gpu,
            });
        }
        (run.progress)(event(out.len()));
        Ok(())
    };
    if let Some(elsewhere) = keep.delegate() {
        let missing: Vec<usize> = (0..blocks.len()).filter(|&block| kept[block].is_none()).collect();
        if !missing.is_empty() {
            let asked = row_tasks(statistics, settings, strength, missing.iter().map(|&block| blocks[block]));
            elsewhere.rows(statistics, &asked, &mut |k, rows| {
                keep::put(keep, &key.block(missing[k]), &rows)?;
                kept[missing[k]] = Some(rows);
                Ok(())
            })?;
        }
    }
    if kept.is_empty() {
        let solve = |block: usize| {
            cancel.check()?;
            keep::numbers(keep, &key.block(block), length(block), || {
                Ok(solve_block(design, settings, blocks[block], cancel)?.concat())
            })
        };
        parallel::fold(threads, blocks.len(), solve, take)?;
    } else {
        kept.into_iter().flatten().enumerate().try_for_each(|(block, rows)| take(block, rows))?;
    }
    if out.len() != total {
        return Err(Error::shape(format!("rows of {name}"), total, out.len()));
    }
    Ok(out)
}

/// Multiply-adds of a step of the splitting on a GPU; zero for few samples: a GPU cannot compute with the samples
/// themselves, and the whole matrix that it would invert instead costs far more than the samples do on the CPU.
fn work(design: &Design, problems: &[RowProblem]) -> f64 {
    let features = design.features();
    if design.has_few_samples() { 0.0 } else { problems.len() as f64 * (features * features) as f64 }
}

/// Rows of the cardinality problem in one list, each followed by its [`ROW_EXTRAS`]: no gap, no limit.
fn in_one(rows: &[Vec<f64>]) -> Vec<f64> {
    rows.iter().flat_map(|row| row.iter().copied().chain([0.0; ROW_EXTRAS])).collect()
}

/// Rows of the cardinality problem, and whether a GPU solved them.
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
    let how = &settings.rows.cardinality;
    let mut solve = |backend: &dyn GroupBackend| {
        solver::solve_in_blocks(design, problems, strength, how, backend, block, threads, cancel, progress)
    };
    on_device(settings, work(design, problems), &mut solve)
}

/// Runs work on the GPU of the settings if that is worthwhile, otherwise on their backend; also returns whether the
/// GPU did it.
pub(in crate::train) fn on_device<T>(
    settings: &TrainSettings,
    work: f64,
    solve: &mut dyn FnMut(&dyn GroupBackend) -> Result<T>,
) -> Result<(T, bool)> {
    if let Some(cuda) = backend::gpu(settings.work.device, work)?
        && let Some(answer) = backend::or_cpu(settings.work.device, solve(&cuda))?
    {
        return Ok((answer, true));
    }
    Ok((solve(settings.work.backend.as_ref())?, false))
}

/// Consecutive blocks of one group: the weights of their rows, each followed by its [`ROW_EXTRAS`].
pub(in crate::train) fn solve_blocks(
    design: &Design,
    settings: &TrainSettings,
    strength: f64,
    blocks: &[&[RowProblem]],
    threads: Threads,
    cancel: &Cancel,
) -> Result<Vec<Vec<f64>>> {
    if !matches!(settings.objective, Objective::Cardinality) {
        return parallel::map(threads, blocks.len(), |block| {
            cancel.check()?;
            Ok(solve_block(design, settings, blocks[block], cancel)?.concat())
        });
    }
    // All blocks except the last have the same size, and share a ladder of inverses.
    let size = blocks.first().map_or(1, |block| block.len()).max(1);
    let problems = blocks.concat();
    let ignored = &mut |_| {};
    let (rows, _) = cardinality_rows(design, settings, strength, &problems, size, threads, cancel, ignored)?;
    Ok(rows.chunks(size).map(in_one).collect())
}

/// A block of convex rows.
fn solve_block(
    design: &Design,
    settings: &TrainSettings,
    problems: &[RowProblem],
    cancel: &Cancel,
) -> Result<Vec<Vec<f64>>> {
    let one = Threads::one();
    let penalty = match &settings.objective {
        Objective::Convex(penalty) => penalty.as_ref(),
        Objective::Cardinality | Objective::Method(_) => {
            return Err(Error::unsupported(
                "a block of rows that are not convex, on its own",
                "they are solved in whole groups, where they were given",
            ));
        }
    };
    if settings.rows.matching == Matching::Exact {
        let rows = solver::solve_rows_exactly(design, penalty, problems, &settings.rows.solver, one, cancel, |_| {})?;
        let state = |s: &solver::RowSolution| [s.relative_gap, f64::from(u8::from(s.status == Status::Limit))];
        return Ok(rows.into_iter().map(|s| [&s.weights[..], &state(&s)].concat()).collect());
    }
    // The result of a convex solve does not depend on the starting point, and the splitting phase is no slower from
    // zero.
    let mut round: Vec<RowProblem> = problems.iter().map(|p| RowProblem { start: None, ..p.clone() }).collect();
    let mut solutions = solver::solve_rows(design, penalty, &round, &settings.rows.solver, one, cancel, |_| {})?;
    for _ in 1..settings.rows.rounds {
        for ((problem, original), solution) in round.iter_mut().zip(problems).zip(&solutions) {
            problem.weights = reweighted(design, original, &solution.weights);
            problem.start = Some(solution.weights.clone());
        }
        solutions = solver::solve_rows(design, penalty, &round, &settings.rows.solver, one, cancel, |_| {})?;
    }
    let weights: Vec<Vec<f64>> = solutions.iter().map(|s| s.weights.clone()).collect();
    let weights =
        if settings.rows.refit { Refit::default().rows(design, problems, &weights, one, cancel)? } else { weights };
    Ok(weights
        .into_iter()
        .zip(&solutions)
        .map(|(w, s)| [w, vec![s.relative_gap, f64::from(u8::from(s.status == Status::Limit))]].concat())
        .collect())
}

/// ω_j·2ε/(|w̃_j| + ε): small entries cost more in the next round.
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
