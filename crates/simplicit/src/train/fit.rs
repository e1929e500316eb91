//! One model at one strength: every group's statistics, problems, solutions, and the f32 rows that are stored.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use crate::memory::MemoryBudget;
use crate::model::{ImplicitModel, TapBlock, Target};
use crate::network::Source;
use crate::problem::RowProblem;
use crate::solver::Design;
use crate::statistics::Statistics;
use crate::train::evidence::gather;
use crate::train::evidence::shard::Walkers;
use crate::train::key::{GroupKey, ModelKey, Pricing, RowsKey, States};
use crate::train::plan::budget;
use crate::train::plan::work::{self, Kind, Meter};
use crate::train::plan::{self, Group, GroupId, Plan};
use crate::train::rows::build::{Build, Evidence, Row, RowReport, row_name};
use crate::train::rows::group::{
    Allowance, Rows, SURVEY_STRATA, for_taps, has_bounds, parts, shared_inverses, surveyed,
};
use crate::train::rows::prices::CertificatePrices;
use crate::train::rows::problems::{GroupProblems, kept_rows, reads_states};
use crate::train::search::survey::{Steering, Survey, Worth};
use crate::train::{
    Allocation, Objective, OutputRefit, Reconstruction, Run, TrainInput, TrainReport, TrainSettings, Trained,
    TriedModel,
};
use crate::{Error, Result};

/// The most alternations of a cyclic model with its own equilibrium states.
const MAX_ALTERNATIONS: usize = 4;
/// The most times that a group is solved again because the later groups cannot make up for the non-zeros that it
/// kept.
const CORRECTIONS: usize = 2;

/// A fitted model.
pub(super) struct Fitted {
    pub(super) model: ImplicitModel,
    pub(super) rows: Vec<RowReport>,
    pub(super) training_error: f64,
    pub(super) reconstruction: Option<Reconstruction>,
    pub(super) output_refit: Option<OutputRefit>,
    pub(super) allocation: Option<Allocation>,
    pub(super) evidence: BTreeMap<GroupId, Evidence>,
    /// The strength of every group.
    pub(super) strengths: Vec<f64>,
    /// The row weights that it was fitted with, if rough models changed them.
    pub(super) importance: Option<Vec<f64>>,
}

impl Fitted {
    /// Its entry in the list of the models of a search.
    pub(super) fn tried(&self, strength: f64) -> TriedModel {
        TriedModel { strength, sparsity: self.model.sparsity().sparsity, output_error: self.training_error }
    }

    /// The result of training with this model.
    pub(super) fn trained(self, strength: f64, path: Vec<TriedModel>, agreement: Option<f64>) -> Trained {
        let Self { model, rows, training_error, reconstruction, output_refit, allocation, .. } = self;
        let bound_refit = None;
        let report = TrainReport {
            rows,
            strength,
            training_error,
            path,
            reconstruction,
            output_refit,
            bound_refit,
            allocation,
            agreement,
        };
        Trained { model, report }
    }
}

/// The data that stay the same from strength to strength.
pub(super) struct Fitter {
    plan: Plan,
    /// Statistics of groups at the baseline's states.
    kept: BTreeMap<GroupId, Arc<Statistics>>,
    /// Statistics of the inputs and the constant against all rows, which all groups and models share.
    inputs: Option<Arc<Statistics>>,
    /// Prices of weights in addition to the penalty.
    pub(super) prices: CertificatePrices,
    /// The memory budget of everything that is kept.
    memory_budget: Arc<MemoryBudget>,
    /// The prices of the next model's groups, if these are not all equal.
    pub(super) steering: Option<Steering>,
    /// The work expected after the next pass.
    pub(super) left: f64,
}

impl Fitter {
    pub(super) fn new(input: &TrainInput, settings: &TrainSettings, run: &mut Run) -> Result<Self> {
        let plan = plan::connections::plan(input, settings)?;
        let memory_budget = budget::memory(&plan, input, settings, run);
        Ok(Self {
            plan,
            kept: BTreeMap::new(),
            inputs: None,
            prices: CertificatePrices::default(),
            memory_budget,
            steering: None,
            left: 0.0,
        })
    }

    /// Whether samples are positions, so that a whole model costs a walk over all of them.
    pub(super) fn has_taps(&self) -> bool {
        self.plan.has_taps()
    }

    /// The work of a whole model.
    pub(super) fn work(&self, input: &TrainInput, settings: &TrainSettings) -> f64 {
        work::of_groups(&self.plan, input, settings, Kind::Whole).iter().sum()
    }

    /// The groups of every layer that has rows to solve, with the layer's name: a grouped convolution has several.
    pub(super) fn layers(&self) -> Vec<(String, Vec<usize>)> {
        let mut out: Vec<(String, Vec<usize>)> = Vec::new();
        let mut last = None;
        for (number, group) in self.plan.groups().enumerate().filter(|(_, group)| group.is_solved()) {
            match out.last_mut().filter(|_| group.target.is_some() && group.target == last) {
                Some((_, groups)) => groups.push(number),
                None => out.push((group.name.clone(), vec![number])),
            }
            last = group.target;
        }
        out
    }

    /// The rows of every group, in order.
    pub(super) fn groups(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        self.plan.groups().map(|group| group.rows.clone())
    }
}

/// Fits every group in order; cyclic states alternate with their own equilibrium. With `certify`, cardinality rows
/// get their bounds or proofs.
pub(super) fn fit(
    fitter: &mut Fitter,
    input: &TrainInput,
    settings: &TrainSettings,
    strength: f64,
    certify: bool,
    run: &mut Run,
) -> Result<Fitted> {
    let Fitter { plan, kept, inputs, prices, memory_budget, steering, left } = fitter;
    prices.begin();
    let pricing = steering.as_ref().map_or(Pricing::Common, Steering::kind);
    let key = ModelKey { pricing, strength, robust_round: prices.round(), turn: 0 };
    let mut pass = Pass { plan, kept, inputs, prices, memory_budget, input, settings, strength, walks: None };
    let mut built = Build::new(plan);
    let cyclic = plan.cyclic;
    // If no group needs statistics, no walk is needed.
    let mut meter = None;
    if plan.has_taps() {
        let known = pass.needs_no_walk(run)?;
        if !known {
            pass.walks = Some(Walkers::new(input, settings, plan, memory_budget, run.keep, run)?);
        }
        let kind = if known { Kind::Solve } else { Kind::Whole };
        meter = Some(Meter::start(work::of_groups(plan, input, settings, kind), *left, run));
    }
    let mut prices = Vec::new();
    let mut new_layer = true;
    for group in plan.groups() {
        // All groups of one layer have the same price: a depthwise convolution has as many groups as channels.
        if let Some(steering) = steering.as_ref().filter(|_| new_layer) {
            pass.strength = steering.price();
        }
        // A group that is alone in its layer may be solved again at another price.
        let alone = std::mem::replace(&mut new_layer, group.completes_layer) && group.completes_layer;
        let outputs = group.target == Some(Target::Output);
        let corrections = steering.as_ref().filter(|_| alone);
        pass.group(group, &mut built, key, settings.model.cascade && (outputs || !cyclic), corrections, run)?;
        if let Some(steering) = steering.as_mut() {
            steering.passed(pass.strength, built.nonzeros(group));
        }
        prices.push(pass.strength);
        if let Some(meter) = &mut meter {
            meter.step(run);
        }
    }
    // Cyclic states were fitted to the baseline's states; now they are fitted to their own equilibrium, while that
    // helps.
    for turn in 1..MAX_ALTERNATIONS {
        if !(cyclic && settings.model.cascade) {
            break;
        }
        let mut next = built.clone();
        let key = ModelKey { turn, ..key };
        for layer in &plan.states {
            pass.group(layer, &mut next, key, true, None, run)?;
        }
        pass.group(&plan.outputs, &mut next, key, true, None, run)?;
        if next.output_error() > 0.999 * built.output_error() {
            break;
        }
        built = next;
    }
    drop(pass);
    let model = built.model(input, settings)?;
    let training_error = built.output_error();
    let rows = built.reports.into_iter().flatten().map(|(report, _)| report).collect();
    let evidence = built.evidence;
    let fitted = Fitted {
        model,
        rows,
        training_error,
        reconstruction: None,
        output_refit: None,
        allocation: None,
        evidence,
        strengths: prices,
        importance: None,
    };
    if certify { certified(fitter, input, settings, strength, fitted, run) } else { Ok(fitted) }
}

/// Fits the model that a search settled on, with the bounds of its cardinality rows.
pub(super) fn certified(
    fitter: &mut Fitter,
    input: &TrainInput,
    settings: &TrainSettings,
    strength: f64,
    mut found: Fitted,
    run: &mut Run,
) -> Result<Fitted> {
    if !matches!(settings.objective, Objective::Cardinality) {
        return Ok(found);
    }
    let mut allowance = Allowance::new(settings);
    for (number, group) in fitter.plan.groups().enumerate() {
        let Some(Evidence { statistics, weights }) = found.evidence.get(&group.id()) else { continue };
        let strength = found.strengths.get(number).copied().unwrap_or(strength);
        let design = Design::new(statistics)?;
        let (plan, prices) = (&fitter.plan, &fitter.prices);
        let problems = GroupProblems::new(plan, input, settings, strength, group, &design, prices)
            .rows(0..group.rows.len(), run.threads)?;
        let rows = Rows { name: &group.name, statistics, design: &design, problems: &problems };
        let on_gpu = found.rows[group.rows.clone()].iter().any(|row| row.on_gpu);
        let count = allowance.rows(&rows, weights, on_gpu);
        for (k, bound) in rows.bounds(settings, strength, weights, number, count, run)? {
            let row = &mut found.rows[group.rows.start + k];
            row.bound_distance = Some(bound.distance());
            row.proven = bound.proven;
        }
    }
    Ok(found)
}

/// Expected non-zeros of every group at prices around the one that leaves about `wanted` of them, from rows drawn by
/// the seed at the baseline's states, by the splitting alone. `spread` returns ascending prices around a middle one.
pub(super) fn survey(
    fitter: &mut Fitter,
    input: &TrainInput,
    settings: &TrainSettings,
    wanted: f64,
    spread: impl Fn(f64) -> Vec<f64>,
    run: &mut Run,
) -> Result<Survey> {
    let Fitter { plan, kept, inputs, prices, memory_budget, left, .. } = fitter;
    let mut pass = Pass { plan, kept, inputs, prices, memory_budget, input, settings, strength: 1.0, walks: None };
    let built = Build::new(plan);
    // Without feature maps the work of a survey is not counted.
    let kind = Kind::Survey(spread(1.0).len());
    let mut meter = plan.has_taps().then(|| Meter::start(work::of_groups(plan, input, settings, kind), *left, run));
    // The value of single weights follows from the sizes of the features alone; the middle price follows from all of
    // them.
    let kept: usize =
        plan.groups().filter(|g| g.kept).map(|g| kept_rows(input, g).iter().map(Vec::len).sum::<usize>()).sum();
    let mut worth = Worth::new(wanted - kept as f64);
    if plan.has_taps() && !pass.needs_no_walk(run)? {
        pass.walks = Some(Walkers::new(input, settings, plan, memory_budget, run.keep, run)?);
    }
    for group in plan.groups() {
        pass.on_group(group, &built, run, |pass, statistics, run| {
            let design = Design::new(statistics)?;
            let all = pass.unpriced(group, &design);
            for part in parts(settings, statistics, group.rows.len(), run) {
                worth.add(&design, &all.rows(part, run.threads)?);
            }
            Ok(())
        })?;
    }
    let prices = spread(worth.middle().unwrap_or(settings.strength));
    // Statistics for which there was no memory are gathered again.
    pass.walks = None;
    if plan.has_taps() && !pass.needs_no_walk(run)? {
        pass.walks = Some(Walkers::new(input, settings, plan, memory_budget, run.keep, run)?);
    }
    let mut survey = Survey::new(&prices);
    for (number, group) in plan.groups().enumerate() {
        let kept: usize = if group.kept { kept_rows(input, group).iter().map(Vec::len).sum() } else { 0 };
        let mut counts = vec![kept as f64; prices.len()];
        pass.on_group(group, &built, run, |pass, statistics, run| {
            counts = pass.survey(group, number, statistics, &prices, run)?;
            Ok(())
        })?;
        survey.push(counts);
        if let Some(meter) = &mut meter {
            meter.step(run);
        }
    }
    Ok(survey)
}

/// The data that every group of one fit needs.
struct Pass<'a> {
    plan: &'a Plan,
    kept: &'a mut BTreeMap<GroupId, Arc<Statistics>>,
    inputs: &'a mut Option<Arc<Statistics>>,
    prices: &'a mut CertificatePrices,
    memory_budget: &'a Arc<MemoryBudget>,
    input: &'a TrainInput<'a>,
    settings: &'a TrainSettings,
    strength: f64,
    walks: Option<Walkers<'a>>,
}

impl Pass<'_> {
    /// Whether a group's features are states of the model that is being built.
    fn on_own_states(&self, group: &Group, cascade: bool) -> bool {
        let of_group = |b: &TapBlock| Some(b.target) == group.target && b.source != Source::Input;
        cascade
            && (group.places().into_iter().any(|place| reads_states(self.plan, self.input, place))
                || self.plan.blocks.iter().any(of_group))
    }

    /// Statistics, problems, solutions and stored rows of one group; if `corrections` shows that the later groups
    /// cannot make up for the non-zeros that this one kept, its rows are solved again from the same statistics, at
    /// another price.
    fn group(
        &mut self,
        group: &Group,
        built: &mut Build,
        key: ModelKey,
        cascade: bool,
        corrections: Option<&Steering>,
        run: &mut Run,
    ) -> Result<()> {
        let (input, settings) = (self.input, self.settings);
        let tuned = self.plan.has_taps().then(|| for_taps(settings));
        let settings = tuned.as_ref().unwrap_or(settings);
        let own_states = self.on_own_states(group, cascade);
        let key = key_of(group, if own_states { States::Own(key) } else { States::Baseline });
        if let Some(walks) = &mut self.walks {
            walks.enter(settings, group, run)?;
        }
        if !group.is_measured() {
            // For an operator, a sum of other layers, or a layer that keeps its weights, nothing is solved.
            built.skip(group, if group.kept { kept_rows(input, group) } else { Vec::new() });
            if let Some(walks) = &mut self.walks {
                walks.leave(self.settings, group, built, run)?;
            }
            return Ok(());
        }
        let statistics = match self.kept.get(&group.id()).filter(|_| !own_states) {
            Some(statistics) => statistics.clone(),
            None => Arc::new(self.gather(group, built, own_states, &key, run)?),
        };
        let spent = self.prices.spent();
        self.rows(group, built, settings, &statistics, &key, run)?;
        if let Some(steering) = corrections.filter(|_| group.is_solved()) {
            let mut tried = Vec::new();
            while tried.len() < CORRECTIONS {
                tried.push((self.strength, built.nonzeros(group)));
                let Some(price) = steering.corrected(&tried) else { break };
                self.strength = price;
                self.prices.back_to(spent);
                self.rows(group, built, settings, &statistics, &key, run)?;
            }
        }
        if !own_states {
            self.keep(group, &statistics);
        }
        if let Some(walks) = &mut self.walks {
            walks.leave(self.settings, group, built, run)?;
        }
        Ok(())
    }

    /// A group's rows at the present price, in the form in which they are stored.
    fn rows(
        &mut self,
        group: &Group,
        built: &mut Build,
        settings: &TrainSettings,
        statistics: &Arc<Statistics>,
        key: &GroupKey,
        run: &mut Run,
    ) -> Result<()> {
        let (input, strength) = (self.input, self.strength);
        let first_output = self.plan.outputs.rows.start;
        let name_of = |k: usize| row_name(group.rows.start + k, first_output);
        let places = group.places();
        // Statistics, and weights before rounding, may be large; they are kept only if bounds will read them.
        let looked_at = !group.kept && has_bounds(settings, statistics.features());
        let mut weights = Vec::new();
        let parts = parts(settings, statistics, group.rows.len(), run);
        let inverses = shared_inverses(&parts);
        for part in parts {
            let design = Design::sharing(statistics, inverses.clone())?;
            let first = part.start;
            let key = RowsKey { group: key.clone(), price: strength, robust_round: self.prices.round(), first };
            let problems = GroupProblems::new(self.plan, input, settings, strength, group, &design, self.prices)
                .rows(part, run.threads)?;
            let rows = Rows { name: &group.name, statistics, design: &design, problems: &problems };
            let solved = match group.kept {
                true => rows.as_they_are(name_of, run.threads)?,
                false => {
                    rows.solve(settings, strength, &key, name_of, run).map_err(|e| named(e, group, first_output))?
                }
            };
            for (row, problem) in solved.into_iter().zip(&problems) {
                self.prices.note(&design, problem, &row.weights);
                let i = group.rows.start + problem.target;
                built.reports[i] = Some((row.report, (row.residual, row.energy)));
                built.rows[i] = Row { entries: row.entries.into_iter().map(|(j, w)| (places[j], w)).collect() };
                if looked_at {
                    weights.push(row.weights);
                }
            }
        }
        if looked_at {
            built.evidence.insert(group.id(), Evidence { statistics: statistics.clone(), weights });
        }
        Ok(())
    }

    /// Passes a group of a survey with its statistics at the baseline's states, unless it has no rows to solve.
    fn on_group(
        &mut self,
        group: &Group,
        built: &Build,
        run: &mut Run,
        work: impl FnOnce(&Self, &Statistics, &mut Run) -> Result<()>,
    ) -> Result<()> {
        let key = key_of(group, States::Baseline);
        if let Some(walks) = &mut self.walks {
            walks.enter(self.settings, group, run)?;
        }
        if group.is_solved() {
            let statistics = match self.kept.get(&group.id()) {
                Some(statistics) => statistics.clone(),
                None => Arc::new(self.gather(group, built, false, &key, run)?),
            };
            self.keep(group, &statistics);
            work(self, &statistics, run)?;
        }
        match &mut self.walks {
            Some(walks) => walks.leave(self.settings, group, built, run),
            None => Ok(()),
        }
    }

    /// The problems of a group with all prices equal to one.
    fn unpriced<'b, 'd>(&'b self, group: &'b Group, design: &'b Design<'d>) -> GroupProblems<'b, 'd> {
        GroupProblems::new(self.plan, self.input, self.settings, 1.0, group, design, self.prices)
    }

    /// Expected non-zeros of one group at every price.
    fn survey(
        &self,
        group: &Group,
        number: usize,
        statistics: &Statistics,
        prices: &[f64],
        run: &mut Run,
    ) -> Result<Vec<f64>> {
        let tuned = self.plan.has_taps().then(|| for_taps(self.settings));
        let settings = tuned.as_ref().unwrap_or(self.settings);
        let looks = prices.len() * SURVEY_STRATA.min(group.rows.len());
        let design = Design::sharing(statistics, shared_inverses(&parts(settings, statistics, looks, run)))?;
        let all = self.unpriced(group, &design);
        let bare: Vec<RowProblem> = (0..group.rows.len()).map(|k| all.bare(k)).collect();
        let drawn = surveyed(settings, number, &design, &bare);
        let problems: Vec<RowProblem> = drawn.iter().map(|row| all.row(row.0)).collect();
        let stands_for: Vec<f64> = drawn.iter().map(|row| row.1).collect();
        let rows = Rows { name: &group.name, statistics, design: &design, problems: &problems };
        rows.survey(settings, &stands_for, prices, run)
    }

    /// Keeps statistics for the next model, as long as there is memory for them.
    fn keep(&mut self, group: &Group, statistics: &Arc<Statistics>) {
        if !self.kept.contains_key(&group.id()) && self.memory_budget.take(statistics.bytes()) {
            self.kept.insert(group.id(), statistics.clone());
        }
    }

    /// Whether the statistics of all groups are those at the baseline's states and known, from an earlier strength or
    /// an earlier run.
    fn needs_no_walk(&mut self, run: &Run) -> Result<bool> {
        for group in self.plan.groups().filter(|group| group.is_measured()) {
            if self.on_own_states(group, self.settings.model.cascade) {
                return Ok(false);
            }
            if self.kept.contains_key(&group.id()) {
                continue;
            }
            let key = key_of(group, States::Baseline);
            let Some(statistics) = found_again(group, &key, run)? else { return Ok(false) };
            // If there is no memory for them, they are read again when it is the group's turn.
            self.keep(group, &Arc::new(statistics));
        }
        Ok(true)
    }

    /// The group's statistics, from an earlier run or from one pass over the samples.
    fn gather(
        &mut self,
        group: &Group,
        built: &Build,
        own_states: bool,
        key: &GroupKey,
        run: &mut Run,
    ) -> Result<Statistics> {
        if let Some(statistics) = found_again(group, key, run)? {
            return Ok(statistics);
        }
        let statistics = match &mut self.walks {
            Some(walks) => walks.statistics(self.settings, group, run)?,
            None => gather::gather(self.input, self.settings, group, own_states.then_some(built), self.inputs, run)?,
        };
        if run.keep.keeps() {
            run.keep.put(&key.statistics(), &statistics.to_bytes())?;
        }
        Ok(statistics)
    }
}

fn key_of(group: &Group, states: States) -> GroupKey {
    GroupKey { states, block: None, name: group.name.clone() }
}

/// A group's statistics as kept by an earlier run.
fn found_again(group: &Group, key: &GroupKey, run: &Run) -> Result<Option<Statistics>> {
    let bytes = run.keep.get(&key.statistics())?;
    Ok(bytes.and_then(|bytes| Statistics::from_bytes(&bytes, group.features(), group.rows.len())))
}

/// Gives rows that cannot match their names in the model.
fn named(error: Error, group: &Group, first_output: usize) -> Error {
    match error {
        Error::Infeasible { rows } => {
            let rename = |row: crate::InfeasibleRow| crate::InfeasibleRow {
                name: row_name(group.rows.start + row.target, first_output),
                ..row
            };
            Error::Infeasible { rows: rows.into_iter().map(rename).collect() }
        }
        other => other,
    }
}
