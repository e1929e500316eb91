//! Training as the commands do it: coordinates, row weights, held-out samples, the model with its provenance.

use std::collections::BTreeMap;
use std::ops::Range;

use anyhow::bail;
use simplicit::arrays::Preprocessing;
use simplicit::linalg::Matrix;
use simplicit::model::ImplicitModel;
use simplicit::parallel::{Cancel, Threads};
use simplicit::problem::Mask;
use simplicit::states::{Collected, InputSource, StateMap, StateSlice, StateSource};
use simplicit::train::{Keep, Run, TrainInput, Trained, importance, train, train_to_max_drop};

use crate::baseline::{Baseline, Kind};
use crate::measure::error_on_states;
use crate::overall::Plan;
use crate::progress::Watcher;
use crate::results::Stopwatch;
use crate::settings::{Effective, KAPPA};

/// Draws from the baseline's softmax per sample: the row weights' own noise is then far below their spread.
pub(crate) const DRAWS: usize = 4;
/// Samples for the row weights of a network with feature maps, and draws for each: every one of them is an average over
/// many positions.
pub(crate) const WEIGHED: usize = 1000;
const MAP_DRAWS: usize = 2;
/// Share of the samples that `--max-drop` judges on, and how many at least.
pub(crate) const HELD_OUT_SHARE: usize = 10;
pub(crate) const HELD_OUT_LEAST: usize = 100;

/// Where states come from.
pub enum Samples<'a> {
    /// A baseline and what it is run on.
    Inputs(&'a Baseline, &'a dyn InputSource),
    /// States that somebody else computed.
    States(&'a dyn StateSource),
}

/// Everything training needs besides its samples.
pub(crate) struct Job<'a> {
    pub(crate) effective: &'a Effective,
    pub(crate) mask: Option<Mask>,
    pub(crate) preprocessing: Preprocessing,
    /// Stored in the model, the strength found added.
    pub(crate) provenance: BTreeMap<String, String>,
    pub(crate) keep: &'a dyn Keep,
    pub(crate) threads: Threads,
    pub(crate) cancel: &'a Cancel,
    pub(crate) watcher: &'a Watcher<'a>,
}

/// A trained model and its error on the training samples.
pub(crate) struct Finished {
    pub(crate) trained: Trained,
    pub(crate) equilibrium_error: f64,
    pub(crate) not_converged: u64,
}

impl Job<'_> {
    /// Trains, measures, puts the provenance in.
    pub(crate) fn run(self, samples: &Samples, stopwatch: &mut Stopwatch) -> anyhow::Result<Finished> {
        let rescale_first = self.effective.rescale && self.effective.kappa.is_some();
        // The baseline in the coordinates that are trained in; `None` for the network's own.
        let moved = match samples {
            Samples::Inputs(baseline, _) => match (self.effective.gamma, baseline.network()) {
                (Some(gamma), Some(network)) => Some(ImplicitModel::from_network_scaled(network, gamma)?),
                _ if rescale_first => Some(baseline.implicit()?.rescale(self.effective.kappa.unwrap_or(KAPPA))?.model),
                _ => None,
            },
            Samples::States(_) => None,
        };
        match (samples, moved) {
            (Samples::States(states), _) => self.on_source(*states, None, None, stopwatch),
            (Samples::Inputs(baseline, inputs), None) => {
                let implicit = baseline.implicit()?;
                let source = Collected::new(baseline.map(), *inputs)?;
                let weights = self.row_weights(baseline, *inputs, None)?;
                self.on_source(&source, Some(&implicit), weights, stopwatch)
            }
            (Samples::Inputs(baseline, inputs), Some(moved)) => {
                let weights = self.row_weights(baseline, *inputs, Some(&moved))?;
                let kind = Kind::of_model(moved)?;
                let Kind::Model(implicit, equilibrium) = &kind else { bail!("a model that is none") };
                let source = Collected::new(equilibrium.as_ref(), *inputs)?;
                self.on_source(&source, Some(implicit), weights, stopwatch)
            }
        }
    }

    /// What the length of the training depends on.
    fn plan(&self, groups: usize) -> Plan {
        let (effective, staged) = (self.effective, self.effective.output_refit > 0);
        Plan {
            groups,
            staged_target: effective.target_sparsity.filter(|_| staged && effective.robust.is_none()),
            searched: effective.target_sparsity.is_some(),
            max_drop: effective.max_drop.is_some(),
            again: effective.robust.unwrap_or(0),
        }
    }

    /// Samples that are trained on.
    fn training_part(&self, total: usize) -> anyhow::Result<Range<usize>> {
        if self.effective.max_drop.is_none() {
            return Ok(0..total);
        }
        let held_out = (total / HELD_OUT_SHARE).max(HELD_OUT_LEAST);
        if total < 2 * held_out {
            bail!(
                "--max-drop: expected at least {} samples, of which the last are held out, got {total}",
                2 * HELD_OUT_LEAST
            );
        }
        Ok(0..total - held_out)
    }

    /// Output-aware weights in the coordinates of `moved`.
    fn row_weights(
        &self,
        baseline: &Baseline,
        inputs: &dyn InputSource,
        moved: Option<&ImplicitModel>,
    ) -> anyhow::Result<Option<Vec<f64>>> {
        let Some(network) = baseline.network().filter(|_| self.effective.output_aware.is_on()) else {
            return Ok(None);
        };
        self.watcher.phase("output-aware weights");
        let maps = network.layout().layers().iter().any(|l| l.map.is_some());
        let part = self.training_part(inputs.samples())?.end;
        let (part, draws) = if maps { (part.min(WEIGHED), MAP_DRAWS) } else { (part, DRAWS) };
        let mut weights =
            importance(network, &Head(inputs, part), draws, self.effective.seed, self.threads, self.cancel)?;
        if let Some((moved, scaling)) = moved.and_then(|m| Some((m, m.metadata().scaling.as_ref()?))) {
            // baseline = factor × stored, so a stored error counts factor² as much. A channel has one factor.
            let layers = moved.layout().layers().iter();
            let units = layers.flat_map(|l| std::iter::repeat_n(l.size / l.rows().max(1), l.rows()));
            let first = units.scan(0, |next, units| Some(std::mem::replace(next, *next + units)));
            let factors = first.map(|unit| scaling.states[unit]).chain(std::iter::repeat(scaling.outputs));
            weights.iter_mut().zip(factors).for_each(|(w, f)| *w *= f * f);
        }
        Ok(Some(weights))
    }

    fn on_source(
        self,
        source: &dyn StateSource,
        baseline: Option<&ImplicitModel>,
        weights: Option<Vec<f64>>,
        stopwatch: &mut Stopwatch,
    ) -> anyhow::Result<Finished> {
        stopwatch.lap("prepare");
        let settings = self.effective.settings(self.mask.clone())?;
        let total = source.samples();
        let part = self.training_part(total)?;
        let held_out = part.end..total;
        let training = StateSlice::new(source, part)?;
        let input = TrainInput {
            source: &training,
            baseline,
            importance: weights.as_deref(),
            preprocessing: self.preprocessing.clone(),
        };
        self.watcher.plan(self.plan(source.layout().layers().len() + 1));
        let mut progress = |p| self.watcher.training(&p);
        let mut run = Run { threads: self.threads, cancel: self.cancel, keep: self.keep, progress: &mut progress };
        let mut trained = match self.effective.max_drop {
            None => train(&input, &settings, &mut run)?,
            Some(drop) => train_to_max_drop(&input, &StateSlice::new(source, held_out)?, drop, &settings, &mut run)?,
        };
        stopwatch.lap("train");
        self.watcher.phase("equilibrium error");
        let (equilibrium_error, not_converged) = error_on_states(&trained.model, source, self.threads, self.cancel)?;
        let mut model = trained.model;
        if self.effective.rescale && (self.effective.kappa.is_none() || baseline.is_none()) {
            model = model.rescale(self.effective.kappa.unwrap_or(KAPPA))?.model;
        }
        let mut parts = model.into_parts();
        parts.metadata.provenance = self.provenance;
        parts.metadata.provenance.insert("strength".into(), format!("{:e}", trained.report.strength));
        trained.model = ImplicitModel::new(parts)?;
        stopwatch.lap("measure");
        Ok(Finished { trained, equilibrium_error, not_converged })
    }
}

/// The first samples of some inputs.
pub(crate) struct Head<'a>(pub(crate) &'a dyn InputSource, pub(crate) usize);

impl InputSource for Head<'_> {
    fn samples(&self) -> usize {
        self.1
    }

    fn features(&self) -> usize {
        self.0.features()
    }

    fn rows(&self, samples: Range<usize>) -> simplicit::Result<Matrix<f32>> {
        self.0.rows(samples)
    }
}
