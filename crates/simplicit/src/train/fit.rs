//! One model at one strength: every group's statistics, problems, solutions, and the f32 rows that are stored.

use std::collections::BTreeMap;

use super::keep::{self, Keep};
use super::plan::{Group, Plan};
use super::{Objective, Progress, Run, TrainInput, TrainSettings, metadata};
use crate::equilibrium::{Equilibrium, EquilibriumSettings};
use crate::layout::Layout;
use crate::linalg::{Csr, Matrix, toward_zero};
use crate::model::{ImplicitModel, ModelParts};
use crate::parallel::{self, Threads};
use crate::problem::{Ball, Connectivity, Mask, Matching, RowProblem, Units};
use crate::solver::{self, Design, ROW_BLOCK, Refit, Status};
use crate::states::{StateMap, StateShape};
use crate::statistics::Statistics;
use crate::{Error, Result};

/// ε of the reweighting ω = 2ε/(|w̃| + ε), in unit-RMS coordinates.
const REWEIGHT: f64 = 0.02;
/// Alternations of a cyclic model with its own equilibrium states.
const MAX_ALTERNATIONS: usize = 4;
/// Row weights below this share of the largest count as this share: such a unit hardly matters, but must stay solvable.
const LEAST_IMPORTANCE: f64 = 1e-10;

/// What is known about one row of the model.
#[derive(Debug, Clone, PartialEq)]
pub struct RowReport {
    /// `z[i]` or `y[i]`.
    pub name: String,
    /// Stored non-zeros, the bias included.
    pub nonzeros: usize,
    /// Certified gap of the row's last convex solve, relative to its objective.
    pub relative_gap: Option<f64>,
    /// That solve ended at a limit.
    pub at_limit: bool,
    /// ‖z − Ũᵀw‖ / ‖z‖ with the stored weights, on the features they were fitted to.
    pub relative_residual: f64,
    /// (value − bound)/value of a cardinality row against its perspective lower bound.
    pub bound_distance: Option<f64>,
}

/// A fitted model.
pub(super) struct Fitted {
    pub(super) model: ImplicitModel,
    pub(super) rows: Vec<RowReport>,
    pub(super) training_error: f64,
}

/// What stays the same from strength to strength.
pub(super) struct Workshop {
    shape: StateShape,
    mask: Mask,
    constant: Vec<bool>,
    plan: Plan,
    /// Statistics of groups that read no state of the model, by key.
    kept: BTreeMap<String, Statistics>,
}

/// One stored row: columns of M (the constant last) with their values.
#[derive(Debug, Clone, Default)]
struct Row {
    entries: Vec<(usize, f32)>,
}

impl Workshop {
    pub(super) fn new(input: &TrainInput, settings: &TrainSettings) -> Result<Self> {
        let shape = input.source.shape();
        let layout = input.source.layout();
        let known = input.source.layers_are_known();
        let pattern = match input.baseline {
            Some(baseline) => Some(pattern(baseline)),
            None => known.then(|| layered(layout, shape)),
        };
        if matches!(settings.connectivity, Connectivity::Feedforward) && !known {
            return Err(Error::setting(
                "connectivity",
                "full, no-self-loop or mask for states whose layers are not known",
                "feedforward",
            ));
        }
        let mask = settings.connectivity.mask(layout, shape.inputs, shape.outputs, pattern.as_ref())?;
        let constant = constants(input, settings);
        let plan = Plan::new(layout, shape, &mask, &constant);
        Ok(Self { shape, mask, constant, plan, kept: BTreeMap::new() })
    }
}

/// The baseline's connections, (n + q) × (n + p).
fn pattern(baseline: &ImplicitModel) -> Mask {
    let StateShape { inputs, states, outputs } = baseline.shape();
    let mut pattern = Matrix::zeros(states + outputs, states + inputs);
    for (matrix, row, col) in
        [(baseline.a(), 0, 0), (baseline.b(), 0, states), (baseline.c(), states, 0), (baseline.d(), states, states)]
    {
        for i in 0..matrix.rows() {
            for (j, _) in matrix.row(i) {
                pattern[(row + i, col + j)] = 1.0;
            }
        }
    }
    Mask::from_pattern(&pattern)
}

/// Where a layered network of these layers has connections: every layer reads the one before it, the first the inputs,
/// the outputs the last.
fn layered(layout: &Layout, shape: StateShape) -> Mask {
    let n = shape.states;
    let reads = |layer: usize| if layer < layout.layers().len() { layout.range(layer) } else { n..n + shape.inputs };
    let before: Vec<std::ops::Range<usize>> = (0..n).map(|i| reads(layout.layer_of(i).map_or(0, |k| k + 1))).collect();
    Mask::from_fn(n + shape.outputs, n + shape.inputs, |i, j| before.get(i).unwrap_or(&reads(0)).contains(&j))
}

/// Rows with a constant: those of baseline layers with a bias, or all if asked.
fn constants(input: &TrainInput, settings: &TrainSettings) -> Vec<bool> {
    let shape = input.source.shape();
    let mut constant = vec![settings.bias; shape.states + shape.outputs];
    if let Some(baseline) = input.baseline {
        let layout = input.source.layout();
        for k in 0..layout.layers().len() {
            let rows = layout.range(k);
            if baseline.state_bias()[rows.clone()].iter().any(|b| *b != 0.0) {
                constant[rows].fill(true);
            }
        }
        if baseline.output_bias().iter().any(|b| *b != 0.0) {
            constant[shape.states..].fill(true);
        }
    }
    constant
}

/// Every group in order; cyclic states alternate with their own equilibrium. With `certify`, cardinality rows get their
/// bounds, which cost a convex solve each.
pub(super) fn fit(
    workshop: &mut Workshop,
    input: &TrainInput,
    settings: &TrainSettings,
    strength: f64,
    certify: bool,
    run: &mut Run,
) -> Result<Fitted> {
    let shape = workshop.shape;
    let total = shape.states + shape.outputs;
    let mut built = Build { rows: vec![Row::default(); total], reports: vec![None; total] };
    let key = format!("strength {strength:e}");
    let Plan { states, outputs, cyclic } = workshop.plan.clone();
    let mut group = |built: &mut Build, group: &Group, key: &str, cascade: bool, run: &mut Run| {
        fit_group(workshop, input, settings, strength, group, built, key, cascade, certify, run)
    };
    for layer in &states {
        group(&mut built, layer, &key, settings.cascade && !cyclic, run)?;
    }
    group(&mut built, &outputs, &key, settings.cascade, run)?;
    // Cyclic states were fitted to the baseline's; now to their own equilibrium, while that helps.
    for turn in 1..MAX_ALTERNATIONS {
        if !(cyclic && settings.cascade) {
            break;
        }
        let mut next = built.clone();
        let key = format!("{key} turn {turn}");
        for layer in &states {
            group(&mut next, layer, &key, true, run)?;
        }
        group(&mut next, &outputs, &key, true, run)?;
        if next.output_error(shape) > 0.999 * built.output_error(shape) {
            break;
        }
        built = next;
    }
    let model = built.model(shape, input, settings)?;
    let training_error = built.output_error(shape);
    let rows = built.reports.into_iter().flatten().map(|(report, _)| report).collect();
    Ok(Fitted { model, rows, training_error })
}

/// The model a search settled on, with the bounds of its cardinality rows.
pub(super) fn certified(
    workshop: &mut Workshop,
    input: &TrainInput,
    settings: &TrainSettings,
    strength: f64,
    found: Fitted,
    run: &mut Run,
) -> Result<Fitted> {
    match settings.objective {
        Objective::Cardinality => fit(workshop, input, settings, strength, true, run),
        Objective::Convex(_) => Ok(found),
    }
}

/// Rows stored so far; every report with the row's (residual energy, energy).
#[derive(Clone)]
struct Build {
    rows: Vec<Row>,
    reports: Vec<Option<(RowReport, (f64, f64))>>,
}

impl Build {
    fn model(&self, shape: StateShape, input: &TrainInput, settings: &TrainSettings) -> Result<ImplicitModel> {
        let n = shape.states;
        let part = |rows: &[Row], from: usize, cols: usize| {
            Csr::from_rows(
                cols,
                rows.iter().map(|row| {
                    row.entries.iter().filter(|(j, _)| (from..from + cols).contains(j)).map(|(j, v)| (j - from, *v))
                }),
            )
        };
        let bias = |rows: &[Row]| -> Vec<f32> {
            let constant = n + shape.inputs;
            rows.iter().map(|r| r.entries.iter().find(|(j, _)| *j == constant).map_or(0.0, |(_, v)| *v)).collect()
        };
        let (top, bottom) = self.rows.split_at(n);
        ImplicitModel::new(ModelParts {
            a: part(top, 0, n),
            b: part(top, n, shape.inputs),
            c: part(bottom, 0, n),
            d: part(bottom, n, shape.inputs),
            state_bias: bias(top),
            output_bias: bias(bottom),
            layout: input.source.layout().clone(),
            preprocessing: input.preprocessing.clone(),
            metadata: metadata(input, settings),
        })
    }

    /// RMS of the outputs' mismatch over their RMS.
    fn output_error(&self, shape: StateShape) -> f64 {
        let (mut residual, mut energy) = (0.0, 0.0);
        for (_, (r, e)) in self.reports[shape.states..].iter().flatten() {
            residual += r;
            energy += e;
        }
        if energy > 0.0 { (residual / energy).sqrt() } else { 0.0 }
    }
}

/// Statistics, problems, solutions and stored rows of one group.
#[allow(clippy::too_many_arguments)]
fn fit_group(
    workshop: &mut Workshop,
    input: &TrainInput,
    settings: &TrainSettings,
    strength: f64,
    group: &Group,
    built: &mut Build,
    key: &str,
    cascade: bool,
    certify: bool,
    run: &mut Run,
) -> Result<()> {
    let n = workshop.shape.states;
    let reads_states = group.columns.first().is_some_and(|&j| j < n);
    let own_states = cascade && reads_states;
    let key = format!("{} {}", if own_states { key } else { "baseline" }, group.name);
    let statistics = match workshop.kept.remove(&key) {
        Some(statistics) => statistics,
        None => gather(input, settings, workshop.shape, group, built, own_states, &key, run)?,
    };
    let design = Design::new(&statistics)?;
    let problems = problems(workshop, input, settings, strength, group, &design)?;
    let mut solved = solve(&design, settings, strength, &problems, &group.name, &format!("{key} at {strength:e}"), run)
        .map_err(|e| named(e, group, n))?;
    if certify && matches!(settings.objective, Objective::Cardinality) {
        bound(&design, settings, strength, &problems, &mut solved, run)?;
    }
    for (k, (&i, row)) in group.rows.iter().zip(solved).enumerate() {
        let inside_ball = problems[k].ball.is_some();
        let entries: Vec<(usize, f32)> = group
            .columns
            .iter()
            .zip(&row.weights)
            .map(|(&j, &w)| (j, if inside_ball && j < n { toward_zero(w) } else { w as f32 }))
            .filter(|(_, w)| *w != 0.0)
            .collect();
        let at = entries.iter().filter_map(|&(j, w)| group.columns.binary_search(&j).ok().map(|c| (c, f64::from(w))));
        let (residual, energy) = (statistics.mismatch(k, &at.collect::<Vec<_>>()), statistics.energy(k));
        let report = RowReport {
            name: row_name(i, n),
            nonzeros: entries.len(),
            relative_gap: row.relative_gap,
            at_limit: row.at_limit,
            relative_residual: if energy > 0.0 { (residual / energy).sqrt() } else { 0.0 },
            bound_distance: row.bound_distance,
        };
        built.reports[i] = Some((report, (residual, energy)));
        built.rows[i] = Row { entries };
    }
    if !own_states {
        workshop.kept.insert(key, statistics);
    }
    Ok(())
}

fn row_name(i: usize, n: usize) -> String {
    if i < n { format!("z[{i}]") } else { format!("y[{}]", i - n) }
}

/// Rows that cannot match, by the model's names.
fn named(error: Error, group: &Group, n: usize) -> Error {
    match error {
        Error::Infeasible { rows } => {
            let rename = |row: crate::InfeasibleRow| crate::InfeasibleRow {
                name: group.rows.get(row.target).map_or(row.name, |&i| row_name(i, n)),
                ..row
            };
            Error::Infeasible { rows: rows.into_iter().map(rename).collect() }
        }
        other => other,
    }
}

/// One pass over the samples for a group: its columns of [X; U; 1] against its rows of [Z; Y].
#[allow(clippy::too_many_arguments)]
fn gather(
    input: &TrainInput,
    settings: &TrainSettings,
    shape: StateShape,
    group: &Group,
    built: &Build,
    own_states: bool,
    key: &str,
    run: &mut Run,
) -> Result<Statistics> {
    let (d, r) = (group.columns.len(), group.rows.len());
    let key = format!("{key} statistics");
    if let Some(bytes) = run.keep.get(&key)?
        && let Some(statistics) = Statistics::from_bytes(&bytes, d, r)
    {
        return Ok(statistics);
    }
    let equilibrium = if own_states {
        let model = built.model(shape, input, settings)?;
        Some(Equilibrium::new(&model, EquilibriumSettings { threads: Threads::one(), ..Default::default() })?)
    } else {
        None
    };
    let n = shape.states;
    let total = input.source.samples();
    let statistics = Statistics::stream(
        total,
        run.threads,
        run.cancel,
        |range| {
            let block = input.source.block(range)?;
            let own = equilibrium.as_ref().map(|e| e.states(&block.u.cast())).transpose()?;
            let x = own.as_ref().map_or(&block.x, |own| &own.x);
            let pick = |i: usize, j: usize| match j {
                j if j < n => x[(i, j)],
                j if j < n + shape.inputs => block.u[(i, j - n)],
                _ => 1.0,
            };
            let features = Matrix::from_fn(block.samples(), d, |i, c| pick(i, group.columns[c]));
            let targets = Matrix::from_fn(block.samples(), r, |i, k| match group.rows[k] {
                row if row < n => block.z[(i, row)],
                row => block.y[(i, row - n)],
            });
            Ok((features, targets))
        },
        |done| (run.progress)(Progress::Samples { group: group.name.clone(), done, total }),
    )?;
    run.keep.put(&key, &statistics.to_bytes())?;
    Ok(statistics)
}

/// The rows of a group as problems over its design.
fn problems(
    workshop: &Workshop,
    input: &TrainInput,
    settings: &TrainSettings,
    strength: f64,
    group: &Group,
    design: &Design,
) -> Result<Vec<RowProblem>> {
    let n = workshop.shape.states;
    let constant = n + workshop.shape.inputs;
    let largest = input.importance.map(|w| w.iter().copied().fold(0.0, f64::max));
    let factor = match settings.objective {
        Objective::Convex(_) => strength,
        Objective::Cardinality => 1.0,
    };
    let problem = |(k, &i): (usize, &usize)| {
        let lambda = match settings.matching {
            Matching::Exact => 1.0,
            Matching::Relaxed { states, outputs } => {
                if i < n {
                    states
                } else {
                    outputs
                }
            }
        };
        let rms = design.target_rms(k);
        let mut problem = RowProblem::new(k, lambda);
        if let (Some(weights), Some(largest)) = (input.importance, largest) {
            let weight = weights[i].max(LEAST_IMPORTANCE * largest).max(f64::MIN_POSITIVE);
            problem.fit = lambda * weight;
            problem.units = Units::Rms { factor: weight.sqrt() };
        } else if settings.normalise {
            if rms > 0.0 {
                problem.fit = lambda / (rms * rms);
                problem.units = Units::Rms { factor: 1.0 / rms };
            }
        } else {
            problem.fit = lambda * design.samples() as f64;
        }
        problem.weights = Some(
            group
                .columns
                .iter()
                .map(|&j| match j {
                    j if j == constant && workshop.constant[i] => 0.0,
                    j if j != constant && workshop.mask.allows(i, j) => factor,
                    _ => f64::INFINITY,
                })
                .collect(),
        );
        if let Some(kappa) = settings.kappa.filter(|_| i < n) {
            let weights = group.columns.iter().map(|&j| f64::from(u8::from(j < n))).collect();
            problem.ball = Some(Ball { radius: kappa, weights });
        }
        problem.start = start(workshop, input, group, i);
        problem
    };
    Ok(group.rows.iter().enumerate().map(problem).collect())
}

/// The baseline's weights of row i over the group's columns.
fn start(workshop: &Workshop, input: &TrainInput, group: &Group, i: usize) -> Option<Vec<f64>> {
    let n = workshop.shape.states;
    let mut out = vec![0.0; group.columns.len()];
    let mut set = |j: usize, v: f32| {
        if let Ok(c) = group.columns.binary_search(&j) {
            out[c] = f64::from(v);
        }
    };
    let baseline = input.baseline?;
    let (from_states, from_inputs, bias, i) = if i < n {
        (baseline.a(), baseline.b(), baseline.state_bias(), i)
    } else {
        (baseline.c(), baseline.d(), baseline.output_bias(), i - n)
    };
    from_states.row(i).for_each(|(j, v)| set(j, v));
    from_inputs.row(i).for_each(|(j, v)| set(n + j, v));
    set(n + workshop.shape.inputs, bias[i]);
    Some(out)
}

/// A solved row in stored coordinates over the group's columns.
struct Solved {
    weights: Vec<f64>,
    relative_gap: Option<f64>,
    at_limit: bool,
    bound_distance: Option<f64>,
}

/// Every cardinality row's distance to its perspective bound, and the gap of that convex solve.
fn bound(
    design: &Design,
    settings: &TrainSettings,
    strength: f64,
    problems: &[RowProblem],
    solved: &mut [Solved],
    run: &mut Run,
) -> Result<()> {
    let answers: Vec<Vec<f64>> = solved.iter().map(|s| s.weights.clone()).collect();
    let (cardinality, solver) = (&settings.cardinality, &settings.solver);
    let bounds =
        solver::cardinality_bound(design, problems, &answers, strength, cardinality, solver, run.threads, run.cancel)?;
    for (row, bound) in solved.iter_mut().zip(bounds) {
        row.relative_gap = Some(bound.relative_gap);
        row.at_limit = bound.at_limit;
        row.bound_distance = Some(bound.distance());
    }
    Ok(())
}

/// All rows of a group in blocks, each block kept as it comes.
fn solve(
    design: &Design,
    settings: &TrainSettings,
    strength: f64,
    problems: &[RowProblem],
    name: &str,
    key: &str,
    run: &mut Run,
) -> Result<Vec<Solved>> {
    let d = design.features();
    let total = problems.len();
    let (keep, cancel): (&dyn Keep, _) = (run.keep, run.cancel);
    let mut out = Vec::with_capacity(total);
    parallel::fold(
        run.threads,
        total.div_ceil(ROW_BLOCK),
        |block| {
            cancel.check()?;
            let span = block * ROW_BLOCK..((block + 1) * ROW_BLOCK).min(total);
            let length = span.len() * (d + 2);
            // Each row as its weights, its gap (NaN: none) and whether it ended at a limit.
            keep::numbers(keep, &format!("{key} rows {block}"), length, || {
                let rows = solve_block(design, settings, strength, &problems[span], cancel)?;
                Ok(rows.into_iter().flatten().collect())
            })
        },
        |_, rows| {
            for row in rows.chunks_exact(d + 2) {
                let gap = row[d];
                out.push(Solved {
                    weights: row[..d].to_vec(),
                    relative_gap: (!gap.is_nan()).then_some(gap),
                    at_limit: row[d + 1] != 0.0,
                    bound_distance: None,
                });
            }
            (run.progress)(Progress::Rows { group: name.to_string(), done: out.len(), total });
            Ok(())
        },
    )?;
    Ok(out)
}

fn solve_block(
    design: &Design,
    settings: &TrainSettings,
    strength: f64,
    problems: &[RowProblem],
    cancel: &crate::parallel::Cancel,
) -> Result<Vec<Vec<f64>>> {
    let one = Threads::one();
    let penalty = match &settings.objective {
        Objective::Cardinality => {
            let rows =
                solver::solve_cardinality(design, problems, strength, &settings.cardinality, one, cancel, |_| {})?;
            return Ok(rows.into_iter().map(|row| [row, vec![f64::NAN, 0.0]].concat()).collect());
        }
        Objective::Convex(penalty) => penalty.as_ref(),
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
