//! Training a network that runs elsewhere: a source of linear blocks gives statistics under its present weights and
//! receives the weights that follow from them. Rows, prices, search, bounds and checkpoints are those of
//! [`train`](crate::train::train()).
//!
//! The source runs the network, with everything between the blocks; training sees only the blocks. A PyTorch module
//! is such a source. The features of a block are the values that it reads in the network with the weights installed
//! so far; its targets are the values that it computed in the original network.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use crate::linalg::Matrix;
use crate::problem::{Matching, RowProblem};
use crate::solver::Design;
use crate::statistics::Statistics;
use crate::train::block_source::{BlockRows, BlockSource, LinearBlock, check, check_weights};
use crate::train::key::{GroupKey, ModelKey, Pricing, RowsKey, States};
use crate::train::rows::group::{
    Allowance, Rows, SURVEY_STRATA, Stored, entry_price, for_taps, has_bounds, parts, shared_inverses, surveyed,
    weighed,
};
use crate::train::search::rough::{self, RoughModels};
use crate::train::search::survey::{Survey, Worth};
use crate::train::search::{CLOSE, Found, PROMISED, Start, seek};
use crate::train::{Progress, RowReport, Run, TrainReport, TrainSettings, TriedModel};
use crate::{Error, Result};

/// The most statistics that are gathered in one pass, in bytes, unless a single block needs more.
const AT_ONCE: usize = 1 << 30;
/// The most statistics under the original weights that are kept from model to model, in bytes.
const KEPT: usize = 4 << 30;
/// The factor by which the row weights of a block are multiplied or divided at most, to account for errors that add
/// up.
const TRUSTED: f64 = 64.0;

/// The result of training a source, whose blocks now have these weights.
#[derive(Debug, Clone)]
pub struct TrainedBlocks {
    /// The new rows, one entry per block.
    pub blocks: Vec<BlockRows>,
    /// Rows in the order of the blocks; the training error is that of the last block.
    pub report: TrainReport,
    /// Non-zeros after training; parameters that stay are included.
    pub nonzeros: u64,
    /// Non-zeros of the original network; parameters that stay are included.
    pub baseline_nonzeros: u64,
}

impl TrainedBlocks {
    /// 1 − nonzeros / baseline_nonzeros.
    pub fn sparsity(&self) -> f64 {
        1.0 - self.nonzeros as f64 / self.baseline_nonzeros.max(1) as f64
    }
}

/// Trains the blocks of a source at the strength of the settings or to their target, with rows weighted by the effect
/// of their errors on the output (`weighted`) or all equally.
pub fn train_blocks(
    source: &mut dyn BlockSource,
    settings: &TrainSettings,
    weighted: bool,
    run: &mut Run,
) -> Result<TrainedBlocks> {
    check(source, settings)?;
    let importance = if weighted { source.row_weights(run)? } else { None };
    let blocks = source.blocks();
    if let Some(weights) = &importance {
        check_weights(&blocks, weights)?;
    }
    let samples = source.samples();
    let mut fits = Fits::new(source, settings.clone(), importance, samples)?;
    let start = Start { strength: settings.strength, slope: None };
    let mut path = Vec::new();
    let (strength, mut found) = match settings.target_sparsity {
        None => {
            let found = fits.fit(start.strength, run)?;
            path.push(fits.tried(start.strength, &found));
            (start.strength, found)
        }
        Some(target) => {
            let start = fits.rough_start(target, run)?;
            let mut best: Option<(f64, f64, Fit)> = None;
            let enough = |models: usize| if models >= 2 { PROMISED } else { CLOSE };
            let mut tried = Found::with_slope(start.slope);
            seek(
                &mut tried,
                target,
                start.strength,
                |tried| tried.is_close(target, enough),
                |strength| {
                    let found = fits.fit(strength, run)?;
                    path.push(fits.tried(strength, &found));
                    let sparsity = fits.sparsity(&found);
                    (run.progress)(Progress::Model { strength, sparsity });
                    let distance = (sparsity - target).abs();
                    if best.as_ref().is_none_or(|(so_far, _, _)| distance < *so_far) {
                        best = Some((distance, strength, found));
                    }
                    Ok(sparsity)
                },
            )?;
            // At least one model was fitted.
            let Some((_, strength, found)) = best else {
                return Err(Error::shape("models of a search", "at least one", 0));
            };
            (strength, found)
        }
    };
    fits.certify(strength, &mut found, run)?;
    let (nonzeros, baseline_nonzeros) = (fits.nonzeros(&found), fits.baseline_nonzeros);
    for (block, rows) in found.blocks.iter().enumerate() {
        fits.source.install(block, rows)?;
    }
    let training_error = fits.output_error(&found);
    let report = TrainReport {
        rows: found.rows,
        strength,
        training_error,
        path,
        reconstruction: None,
        output_refit: None,
        bound_refit: None,
        allocation: None,
        agreement: None,
    };
    Ok(TrainedBlocks { blocks: found.blocks, report, nonzeros, baseline_nonzeros })
}

/// Rows that share a design.
#[derive(Debug, Clone)]
struct Group {
    name: String,
    block: usize,
    /// Its rows within the block.
    rows: Range<usize>,
    /// The number of its first row among all rows.
    first_row: usize,
}

/// A model: new weights of all blocks.
struct Fit {
    blocks: Vec<BlockRows>,
    rows: Vec<RowReport>,
    /// Squared mismatch and energy of the target for every row.
    energies: Vec<(f64, f64)>,
    /// Non-zeros of every group, in order.
    groups: Vec<usize>,
    /// The statistics and weights that the bounds need, by group.
    evidence: BTreeMap<usize, (Arc<Statistics>, Vec<Vec<f64>>)>,
}

/// Fits models of one source, with the data that stay the same between them.
struct Fits<'a> {
    source: &'a mut dyn BlockSource,
    blocks: Arc<[LinearBlock]>,
    groups: Vec<Group>,
    settings: TrainSettings,
    /// The weight of every row, by block.
    importance: Option<Vec<Vec<f64>>>,
    samples: usize,
    fixed: u64,
    baseline_nonzeros: u64,
    /// Statistics under the original weights, by group.
    kept: BTreeMap<usize, Arc<Statistics>>,
    kept_bytes: usize,
    /// Rough models: the last one, and the one whose errors determine row weights.
    last: Option<Vec<BlockRows>>,
    chosen: Option<Vec<BlockRows>>,
}

impl<'a> Fits<'a> {
    fn new(
        source: &'a mut dyn BlockSource,
        settings: TrainSettings,
        importance: Option<Vec<Vec<f64>>>,
        samples: usize,
    ) -> Result<Self> {
        let blocks = source.blocks();
        let mut groups = Vec::new();
        let mut first_row = 0;
        for (number, block) in blocks.iter().enumerate() {
            let each = block.group_rows();
            for g in 0..block.groups {
                let name = if block.groups == 1 { block.name.clone() } else { format!("{} [{g}]", block.name) };
                groups.push(Group { name, block: number, rows: g * each..(g + 1) * each, first_row });
                first_row += each;
            }
        }
        let settings = if blocks.iter().any(|b| b.shared) { for_taps(&settings) } else { settings };
        let fixed = source.fixed_nonzeros();
        let baseline_nonzeros = fixed + blocks.iter().map(|b| b.nonzeros() as u64).sum::<u64>();
        Ok(Self {
            source,
            blocks,
            groups,
            settings,
            importance,
            samples,
            fixed,
            baseline_nonzeros,
            kept: BTreeMap::new(),
            kept_bytes: 0,
            last: None,
            chosen: None,
        })
    }

    fn nonzeros(&self, fit: &Fit) -> u64 {
        let count = |(b, rows): (&LinearBlock, &BlockRows)| b.count(&rows.weights, rows.constant.as_deref()) as u64;
        self.fixed + self.blocks.iter().zip(&fit.blocks).map(count).sum::<u64>()
    }

    /// Error of the last block's outputs, relative to the outputs.
    fn output_error(&self, fit: &Fit) -> f64 {
        let last = self.groups.last().map_or(0, |group| group.first_row)..fit.rows.len();
        let (residual, energy) = last.fold((0.0, 0.0), |(r, e), i| (r + fit.energies[i].0, e + fit.energies[i].1));
        if energy > 0.0 { (residual / energy).sqrt() } else { 0.0 }
    }

    fn tried(&self, strength: f64, fit: &Fit) -> TriedModel {
        TriedModel { strength, sparsity: self.sparsity(fit), output_error: self.output_error(fit) }
    }

    fn sparsity(&self, fit: &Fit) -> f64 {
        1.0 - self.nonzeros(fit) as f64 / self.baseline_nonzeros.max(1) as f64
    }

    /// Finds where the search for a target begins. From here on, rows are weighted by the errors of a rough model.
    fn rough_start(&mut self, target: f64, run: &mut Run) -> Result<Start> {
        let settings = rough::settings_of(&self.settings);
        let samples = self.samples.min(rough::SAMPLES);
        // The settings for taps, if there are any, are already included.
        let mut models = Fits {
            source: &mut *self.source,
            blocks: self.blocks.clone(),
            groups: self.groups.clone(),
            settings: settings.clone(),
            importance: self.importance.clone(),
            samples,
            fixed: self.fixed,
            baseline_nonzeros: self.baseline_nonzeros,
            kept: BTreeMap::new(),
            kept_bytes: 0,
            last: None,
            chosen: None,
        };
        let (start, _) = rough::start(&mut models, &settings, target, run)?;
        let Fits { importance, kept, kept_bytes, .. } = models;
        self.importance = importance;
        if samples == self.samples {
            (self.kept, self.kept_bytes) = (kept, kept_bytes);
        }
        Ok(start)
    }

    /// Ranges of blocks that are gathered together: a stage of the cascade, or everything without one.
    fn stages(&self) -> Vec<Range<usize>> {
        let mut stages: Vec<Range<usize>> = Vec::new();
        for (number, block) in self.blocks.iter().enumerate() {
            match stages.last_mut() {
                Some(stage) if !self.settings.model.cascade || self.blocks[stage.start].stage == block.stage => {
                    stage.end = number + 1;
                }
                _ => stages.push(number..number + 1),
            }
        }
        stages
    }

    /// Parts of a range whose statistics fit into memory together.
    fn parts(&self, stage: Range<usize>) -> Vec<Range<usize>> {
        let mut parts: Vec<Range<usize>> = Vec::new();
        let mut bytes = 0;
        for number in stage {
            bytes += self.blocks[number].bytes();
            match parts.last_mut() {
                Some(part) if bytes <= AT_ONCE => part.end = number + 1,
                _ => {
                    bytes = self.blocks[number].bytes();
                    parts.push(number..number + 1);
                }
            }
        }
        parts
    }

    /// Fits every stage in order.
    fn fit(&mut self, strength: f64, run: &mut Run) -> Result<Fit> {
        let rows: usize = self.blocks.iter().map(|b| b.weights.rows()).sum();
        let empty = |b: &LinearBlock| BlockRows {
            weights: Matrix::zeros(b.weights.rows(), b.weights.cols()),
            constant: b.constant.as_ref().map(|c| vec![0.0; c.len()]),
        };
        let mut fit = Fit {
            blocks: self.blocks.iter().map(empty).collect(),
            rows: Vec::with_capacity(rows),
            energies: Vec::with_capacity(rows),
            groups: vec![0; self.groups.len()],
            evidence: BTreeMap::new(),
        };
        if self.settings.model.cascade {
            self.source.reset()?;
        }
        for stage in self.stages() {
            // The inputs of the first stage are the same for every model.
            let own = self.settings.model.cascade && stage.start > 0;
            for part in self.parts(stage.clone()) {
                for (number, statistics) in self.gather(part, own, strength, run)? {
                    self.group(number, statistics, own, strength, &mut fit, run)?;
                }
            }
            if self.settings.model.cascade {
                for block in stage {
                    self.source.install(block, &fit.blocks[block])?;
                }
            }
        }
        Ok(fit)
    }

    fn key(&self, group: &Group, own: bool, strength: f64) -> GroupKey {
        let model = ModelKey { pricing: Pricing::Common, strength, robust_round: 0, turn: 0 };
        let states = if own { States::Own(model) } else { States::Original { samples: self.samples } };
        GroupKey { states, block: Some(group.block), name: group.name.clone() }
    }

    /// The problems of a group's rows.
    fn problems(&self, group: &Group, strength: f64, design: &Design) -> Vec<RowProblem> {
        let block = &self.blocks[group.block];
        let price = entry_price(&self.settings, strength);
        let lambda = match self.settings.rows.matching {
            Matching::Relaxed { states, .. } => states,
            Matching::Exact => 1.0,
        };
        let largest =
            self.importance.as_ref().map(|w| w.iter().flatten().copied().fold(0.0, f64::max)).filter(|w| *w > 0.0);
        let problem = |k: usize| {
            let row = group.rows.start + k;
            let importance = self.importance.as_ref().zip(largest).map(|(w, largest)| (w[group.block][row], largest));
            let mut problem = weighed(k, lambda, importance, &self.settings, design);
            let known = block.weights.row(row);
            let entry = |w: &f32| if *w == 0.0 { f64::INFINITY } else { price };
            let mut weights: Vec<f64> = known.iter().map(entry).collect();
            let mut start: Vec<f64> = known.iter().map(|w| f64::from(*w)).collect();
            if let Some(constant) = &block.constant {
                weights.push(0.0);
                start.push(f64::from(constant[row]));
            }
            problem.weights = Some(weights);
            problem.start = Some(start);
            problem
        };
        (0..group.rows.len()).map(problem).collect()
    }

    /// Solves a group and stores its rows.
    fn group(
        &mut self,
        number: usize,
        statistics: Arc<Statistics>,
        own: bool,
        strength: f64,
        fit: &mut Fit,
        run: &mut Run,
    ) -> Result<()> {
        let group = &self.groups[number];
        let block = &self.blocks[group.block];
        let design = Design::new(&statistics)?;
        let problems = self.problems(group, strength, &design);
        let key = RowsKey { group: self.key(group, own, strength), price: strength, robust_round: 0, first: 0 };
        let name_of = |k: usize| format!("{}[{}]", block.name, group.rows.start + k);
        let rows = Rows { name: &group.name, statistics: &statistics, design: &design, problems: &problems };
        let solved = rows.solve(&self.settings, strength, &key, name_of, run)?;
        let features = block.weights.cols();
        let out = &mut fit.blocks[group.block];
        let mut weights = Vec::with_capacity(solved.len());
        for (k, row) in solved.into_iter().enumerate() {
            let Stored { entries, weights: exact, mut report, residual, energy } = row;
            let i = group.rows.start + k;
            for (j, w) in entries {
                match &mut out.constant {
                    Some(constant) if j == features => {
                        constant[i] = w;
                        report.nonzeros -= usize::from(!block.counts_constant);
                    }
                    _ => out.weights[(i, j)] = w,
                }
            }
            fit.groups[number] += report.nonzeros;
            fit.rows.push(report);
            fit.energies.push((residual, energy));
            weights.push(exact);
        }
        if has_bounds(&self.settings, statistics.features()) {
            fit.evidence.insert(number, (statistics, weights));
        }
        Ok(())
    }

    /// Statistics of all groups of some blocks, by the number of the group: kept, found again, or gathered now.
    fn gather(
        &mut self,
        part: Range<usize>,
        own: bool,
        strength: f64,
        run: &mut Run,
    ) -> Result<Vec<(usize, Arc<Statistics>)>> {
        let wanted: Vec<usize> = (0..self.groups.len()).filter(|&g| part.contains(&self.groups[g].block)).collect();
        let shape = |g: usize| (self.blocks[self.groups[g].block].features(), self.groups[g].rows.len());
        let key = |fits: &Self, g: usize| fits.key(&fits.groups[g], own, strength).statistics();
        let mut found: BTreeMap<usize, Arc<Statistics>> = BTreeMap::new();
        for &g in &wanted {
            if let Some(statistics) = self.kept.get(&g).filter(|_| !own) {
                found.insert(g, statistics.clone());
            } else if let Some(bytes) = run.keep.get(&key(self, g))? {
                let (features, rows) = shape(g);
                if let Some(statistics) = Statistics::from_bytes(&bytes, features, rows) {
                    found.insert(g, Arc::new(statistics));
                }
            }
        }
        let missing: Vec<usize> =
            part.filter(|b| wanted.iter().any(|g| self.groups[*g].block == *b && !found.contains_key(g))).collect();
        if !missing.is_empty() {
            let gathered = self.source.statistics(&missing, self.samples, own, run)?;
            if gathered.len() != missing.len() {
                return Err(Error::shape("statistics of blocks", missing.len(), gathered.len()));
            }
            for (block, statistics) in missing.into_iter().zip(gathered) {
                let groups: Vec<usize> = wanted.iter().copied().filter(|&g| self.groups[g].block == block).collect();
                if groups.len() != statistics.len() {
                    let what = format!("statistics of {}", self.blocks[block].name);
                    return Err(Error::shape(what, format!("{} groups", groups.len()), statistics.len()));
                }
                for (g, statistics) in groups.into_iter().zip(statistics) {
                    let (expected, got) = (shape(g), (statistics.features(), statistics.targets()));
                    if expected != got {
                        let name = format!("features and rows of {}", self.groups[g].name);
                        return Err(Error::shape(name, format!("{expected:?}"), format!("{got:?}")));
                    }
                    run.keep.put(&key(self, g), &statistics.to_bytes())?;
                    found.insert(g, Arc::new(statistics));
                }
            }
        }
        if !own {
            for (&g, statistics) in &found {
                let bytes = 8 * statistics.features() * (statistics.features() + statistics.targets());
                if !self.kept.contains_key(&g) && self.kept_bytes + bytes <= KEPT {
                    self.kept_bytes += bytes;
                    self.kept.insert(g, statistics.clone());
                }
            }
        }
        Ok(found.into_iter().collect())
    }

    /// Bounds or proofs of the rows that the settings choose.
    fn certify(&mut self, strength: f64, fit: &mut Fit, run: &mut Run) -> Result<()> {
        let mut allowance = Allowance::new(&self.settings);
        for (&number, (statistics, weights)) in &fit.evidence {
            let group = &self.groups[number];
            let design = Design::new(statistics)?;
            let problems = self.problems(group, strength, &design);
            let rows = Rows { name: &group.name, statistics, design: &design, problems: &problems };
            let on_gpu = fit.rows[group.first_row..group.first_row + group.rows.len()].iter().any(|row| row.on_gpu);
            let count = allowance.rows(&rows, weights, on_gpu);
            for (k, bound) in rows.bounds(&self.settings, strength, weights, number, count, run)? {
                let row = &mut fit.rows[group.first_row + k];
                row.bound_distance = Some(bound.distance());
                row.proven = bound.proven;
            }
        }
        Ok(())
    }
}

impl RoughModels for Fits<'_> {
    fn sizes(&self) -> (f64, f64) {
        (self.baseline_nonzeros as f64, self.fixed as f64)
    }

    fn groups(&self) -> usize {
        self.groups.len()
    }

    fn survey(&mut self, wanted: f64, spread: &dyn Fn(f64) -> Vec<f64>, run: &mut Run) -> Result<Survey> {
        let mut worth = Worth::new(wanted);
        for part in self.parts(0..self.blocks.len()) {
            for (number, statistics) in self.gather(part, false, 1.0, run)? {
                let group = &self.groups[number];
                let design = Design::new(&statistics)?;
                let problems = self.problems(group, 1.0, &design);
                worth.add(&design, &problems);
            }
        }
        let prices = spread(worth.middle().unwrap_or(self.settings.strength));
        let mut survey = Survey::new(&prices);
        for part in self.parts(0..self.blocks.len()) {
            for (number, statistics) in self.gather(part, false, 1.0, run)? {
                let group = &self.groups[number];
                let all = parts(&self.settings, &statistics, prices.len() * SURVEY_STRATA.min(group.rows.len()), run);
                let design = Design::sharing(&statistics, shared_inverses(&all))?;
                let all = self.problems(group, 1.0, &design);
                let drawn = surveyed(&self.settings, number, &design, &all);
                let problems: Vec<RowProblem> = drawn.iter().map(|row| all[row.0].clone()).collect();
                let stands_for: Vec<f64> = drawn.iter().map(|row| row.1).collect();
                let rows = Rows { name: &group.name, statistics: &statistics, design: &design, problems: &problems };
                survey.push(rows.survey(&self.settings, &stands_for, &prices, run)?);
            }
        }
        Ok(survey)
    }

    fn fit(&mut self, strength: f64, run: &mut Run) -> Result<(Vec<usize>, f64)> {
        let fit = Fits::fit(self, strength, run)?;
        let found = (fit.groups.clone(), self.sparsity(&fit));
        self.last = Some(fit.blocks);
        Ok(found)
    }

    fn keep(&mut self) {
        self.chosen = self.last.take();
    }

    fn reweigh(&mut self, run: &Run) -> Result<Option<Vec<f64>>> {
        let (Some(weights), Some(rows)) = (&mut self.importance, &self.chosen) else { return Ok(None) };
        let errors = self.source.joint_errors(rows, run)?;
        if errors.len() != weights.len() {
            return Err(Error::shape("errors of blocks", weights.len(), errors.len()));
        }
        let mut grown = Vec::with_capacity(errors.len());
        for (weights, (together, squares)) in weights.iter_mut().zip(errors) {
            let alone: f64 = weights.iter().zip(&squares).map(|(w, s)| w * s).sum();
            let ratio = if alone > 0.0 && together > 0.0 { together / alone } else { 1.0 };
            let ratio = ratio.clamp(1.0 / TRUSTED, TRUSTED);
            weights.iter_mut().for_each(|w| *w *= ratio);
            grown.push(ratio.ln());
        }
        Ok(Some(self.groups.iter().map(|g| grown[g.block]).collect()))
    }
}
