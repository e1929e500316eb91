//! The solvers: set up once per design, solve every row, certify every answer.

mod active_set;
mod anderson;
mod batch;
mod bound;
mod canonical;
mod cardinality;
mod design;
mod exact;
mod newton;
mod newton_system;
mod problem;
pub mod prove;
mod refit;
mod splitting;

pub(crate) use bound::cardinality_bound;
pub use bound::{CardinalityBound, PricedRows};
pub(crate) use cardinality::solve_in_blocks;
pub use cardinality::{CardinalitySettings, solve_cardinality};
pub use design::Design;
pub use exact::{largest_mismatch, solve_rows_exactly};
pub use problem::Problem;
pub use refit::Refit;

use canonical::{Gap, Row};
use design::Scaling;

use crate::Result;
use crate::parallel::{self, Cancel, Threads};
use crate::problem::{Penalty, RowProblem};

/// Rows solved side by side in one matrix product.
pub(crate) const ROW_BLOCK: usize = 32;

/// When the solver stops.
#[derive(Debug, Clone, PartialEq)]
pub struct SolverSettings {
    /// Largest accepted gap / max(|P(w)|, 1e-10·P(0)). Default 1e-6.
    pub tolerance: f64,
    /// Operator-splitting steps before the remaining rows are left to Newton's method. Default 160.
    pub splitting_steps: usize,
    /// Newton steps before a row is returned at its limit. Default 300.
    pub max_newton_steps: usize,
    /// Newton steps without a better certificate before a row is returned at its limit. Default 200.
    pub max_stalled_steps: usize,
}

impl Default for SolverSettings {
    fn default() -> Self {
        Self { tolerance: 1e-6, splitting_steps: 160, max_newton_steps: 300, max_stalled_steps: 200 }
    }
}

/// How the solution of a row ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// The certificate is within the tolerance: the row is optimal.
    Solved,
    /// A limit was reached first; the gap bounds how far the answer is from optimal.
    Limit,
}

/// A row's weights and the certificate for them, for convex costs as well as for a price of non-zeros.
#[derive(Debug, Clone, PartialEq)]
pub struct RowSolution {
    /// One weight per feature of the design, in stored coordinates; zeros are exact.
    pub weights: Vec<f64>,
    /// The objective at these weights.
    pub primal: f64,
    /// A proven bound on the distance of the objective from its optimum.
    pub gap: f64,
    /// gap / max(|primal|, 1e-10·objective at zero).
    pub relative_gap: f64,
    /// Operator-splitting steps taken.
    pub splitting_steps: usize,
    /// Newton steps taken.
    pub newton_steps: usize,
    /// How the solution ended.
    pub status: Status,
}

/// The results of a block, in canonical coordinates.
pub(crate) struct RowOutcome {
    weights: Vec<f64>,
    gap: Gap,
    status: Status,
    splitting_steps: usize,
    newton_steps: usize,
}

/// Solves relaxed row problems over one design on `threads` threads. Solutions come in the order of `problems` and are
/// bit-identical for any number of threads; `progress` is called with the number of finished rows.
pub fn solve_rows(
    design: &Design,
    penalty: &dyn Penalty,
    problems: &[RowProblem],
    settings: &SolverSettings,
    threads: Threads,
    cancel: &Cancel,
    mut progress: impl FnMut(usize),
) -> Result<Vec<RowSolution>> {
    let mut out = Vec::with_capacity(problems.len());
    solve_rows_into(design, penalty, problems, settings, threads, cancel, |row, solution| {
        out.push(solution);
        if (row + 1) % ROW_BLOCK == 0 || row + 1 == problems.len() {
            progress(row + 1);
        }
        Ok(())
    })?;
    Ok(out)
}

/// [`solve_rows`] for callers that keep what is finished when the run is cancelled: every solution goes to `take` with
/// its index, in order, as soon as its block is done. After a cancellation the finished rows have been taken and the
/// result is [`Error::Cancelled`](crate::Error::Cancelled).
pub fn solve_rows_into(
    design: &Design,
    penalty: &dyn Penalty,
    problems: &[RowProblem],
    settings: &SolverSettings,
    threads: Threads,
    cancel: &Cancel,
    mut take: impl FnMut(usize, RowSolution) -> Result<()>,
) -> Result<()> {
    for problem in problems {
        problem.check(design.features(), design.targets())?;
    }
    let rows: Vec<Target> = problems.iter().map(|problem| Target { problem, shifted: None }).collect();
    solve_targets(design, penalty, &rows, settings, threads, cancel, &mut |k, solution| {
        let solution = match solution.status {
            Status::Limit => along_the_fit(design, penalty, &problems[k], settings, cancel, solution)?,
            Status::Solved => solution,
        };
        take(k, solution)
    })
}

/// Solves a row that ended at a limit once more: from a weak fit, whose answer is near zero, to its own fit in a few
/// steps, each started from the one before. Rows with far fewer samples than features, which nearly interpolate, need
/// this.
fn along_the_fit(
    design: &Design,
    penalty: &dyn Penalty,
    problem: &RowProblem,
    settings: &SolverSettings,
    cancel: &Cancel,
    mut best: RowSolution,
) -> Result<RowSolution> {
    let mut start = None;
    for share in FIT_SHARES {
        let step = RowProblem { fit: share * problem.fit, start, ..problem.clone() };
        let target = Target { problem: &step, shifted: None };
        let Some(solution) = solve_block(design, penalty, &[target], settings, cancel)?.pop() else { break };
        start = Some(solution.weights.clone());
        if share == 1.0 {
            let steps = best.newton_steps + solution.newton_steps;
            if solution.gap < best.gap {
                best = solution;
            }
            best.newton_steps = steps;
            if best.status == Status::Solved {
                break;
            }
        }
    }
    Ok(best)
}

/// The shares of its own fit with which a difficult row is solved, one after the other.
const FIT_SHARES: [f64; 9] = [1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 1.0, 1.0];

/// A checked row problem, possibly with another h and e than the statistics have for its target.
struct Target<'a> {
    problem: &'a RowProblem,
    shifted: Option<(Vec<f64>, f64)>,
}

impl Target<'_> {
    fn row<'a>(&self, design: &'a Design, penalty: &dyn Penalty) -> Option<Row<'a>> {
        let target = self.problem.target;
        let scaling = Scaling::of(self.problem.units);
        match &self.shifted {
            Some((h, energy)) => Row::new(design, scaling, self.problem, penalty, h, *energy),
            None => Row::new(design, scaling, self.problem, penalty, &design.cross(target), design.energy(target)),
        }
    }
}

fn solve_targets(
    design: &Design,
    penalty: &dyn Penalty,
    rows: &[Target],
    settings: &SolverSettings,
    threads: Threads,
    cancel: &Cancel,
    take: &mut dyn FnMut(usize, RowSolution) -> Result<()>,
) -> Result<()> {
    parallel::fold(
        threads,
        rows.len().div_ceil(ROW_BLOCK),
        |block| {
            cancel.check()?;
            solve_block(
                design,
                penalty,
                &rows[block * ROW_BLOCK..((block + 1) * ROW_BLOCK).min(rows.len())],
                settings,
                cancel,
            )
        },
        |block, solutions| {
            solutions.into_iter().enumerate().try_for_each(|(k, solution)| take(block * ROW_BLOCK + k, solution))
        },
    )
}

fn solve_block(
    design: &Design,
    penalty: &dyn Penalty,
    targets: &[Target],
    settings: &SolverSettings,
    cancel: &Cancel,
) -> Result<Vec<RowSolution>> {
    let rows: Vec<Option<Row>> = targets.iter().map(|t| t.row(design, penalty)).collect();
    let mut outcomes: Vec<Option<RowOutcome>> = rows.iter().map(|_| None).collect();
    // Without a live feature, the zero row is the only solution.
    if !design.live().is_empty() {
        for scaling in [Scaling::Rms, Scaling::Between] {
            let here = |k: &usize| rows[*k].is_some() && Scaling::of(targets[*k].problem.units) == scaling;
            let indices: Vec<usize> = (0..rows.len()).filter(here).collect();
            let live: Vec<(&Row, Option<Vec<f64>>)> = indices
                .iter()
                .filter_map(|&k| {
                    let row = rows[k].as_ref()?;
                    Some((row, targets[k].problem.start.as_ref().map(|s| row.canonical(design, s))))
                })
                .collect();
            if !live.is_empty() {
                let solved = batch::solve(design.coordinates(scaling), penalty, settings, &live, cancel)?;
                indices.into_iter().zip(solved).for_each(|(k, outcome)| outcomes[k] = Some(outcome));
            }
        }
    }
    let solution = |(row, outcome): (&Option<Row>, Option<RowOutcome>)| match row.as_ref().zip(outcome) {
        Some((row, outcome)) => RowSolution {
            weights: row.stored(design, &outcome.weights),
            primal: outcome.gap.primal * row.value_scale,
            gap: outcome.gap.gap * row.value_scale,
            relative_gap: outcome.gap.relative(),
            splitting_steps: outcome.splitting_steps,
            newton_steps: outcome.newton_steps,
            status: outcome.status,
        },
        None => RowSolution {
            weights: vec![0.0; design.features()],
            primal: row.as_ref().map_or(0.0, |row| 0.5 * row.value_scale),
            gap: 0.0,
            relative_gap: 0.0,
            splitting_steps: 0,
            newton_steps: 0,
            status: Status::Solved,
        },
    };
    Ok(rows.iter().zip(outcomes).map(solution).collect())
}
