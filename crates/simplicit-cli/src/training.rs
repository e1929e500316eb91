//! Training as the commands run it: from decided settings to the model with its provenance.

use std::collections::BTreeMap;

use simplicit::arrays::Preprocessing;
use simplicit::compress::{self, Compressed, compress, compress_states};
use simplicit::model::ImplicitModel;
use simplicit::parallel::{Cancel, Threads};
use simplicit::problem::Mask;
use simplicit::states::{InputSource, StateSource};
use simplicit::train::{Keep, Phase, Progress, Run};

use crate::args::Switch;
use crate::baseline::{Baseline, Kind};
use crate::overall::Plan;
use crate::progress::{Watcher, phase_words};
use crate::results::Stopwatch;
use crate::settings::{Effective, KAPPA};

/// Where the states to train on come from.
pub enum Samples<'a> {
    /// A baseline and the inputs that it runs on.
    Inputs(&'a Baseline, &'a dyn InputSource),
    /// States that were computed elsewhere.
    States(&'a dyn StateSource),
}

/// Everything training needs besides its samples.
pub(crate) struct Job<'a> {
    pub(crate) effective: &'a Effective,
    pub(crate) mask: Option<Mask>,
    pub(crate) preprocessing: Preprocessing,
    /// The provenance stored in the model; the strength found is added to it.
    pub(crate) provenance: BTreeMap<String, String>,
    pub(crate) keep: &'a dyn Keep,
    pub(crate) threads: Threads,
    pub(crate) cancel: &'a Cancel,
    pub(crate) watcher: &'a Watcher<'a>,
}

impl Job<'_> {
    /// Trains and measures, and stores the provenance in the model.
    pub(crate) fn run(self, samples: &Samples, stopwatch: &mut Stopwatch) -> anyhow::Result<Compressed> {
        let settings = asked(self.effective, self.mask.clone(), &self.preprocessing)?;
        let mut progress = |p| match p {
            Progress::Phase(Phase::Training { groups }) => {
                stopwatch.lap("prepare");
                self.watcher.plan(self.plan(groups));
            }
            Progress::Phase(phase) => {
                if phase == Phase::Measuring {
                    stopwatch.lap("train");
                }
                self.watcher.phase(phase_words(phase));
            }
            p => self.watcher.training(&p),
        };
        let mut run = Run { threads: self.threads, cancel: self.cancel, keep: self.keep, progress: &mut progress };
        let mut done = match samples {
            Samples::States(states) => compress_states(*states, &settings, &mut run)?,
            Samples::Inputs(baseline, inputs) => match &baseline.kind {
                Kind::Network(network) => compress(network.as_ref(), *inputs, &settings, &mut run)?,
                Kind::Model(model, _) => compress(model.as_ref(), *inputs, &settings, &mut run)?,
            },
        };
        let mut parts = done.model.into_parts();
        parts.metadata.provenance = self.provenance;
        parts.metadata.provenance.insert("strength".into(), format!("{:e}", done.report.strength));
        done.model = ImplicitModel::new(parts)?;
        stopwatch.lap("measure");
        Ok(done)
    }

    /// The properties of the training that its length depends on.
    fn plan(&self, groups: usize) -> Plan {
        let effective = self.effective;
        // Networks with feature maps, which have positions, go to their target in one step unless stages are asked
        // for.
        let pays = effective.output_refit > 0 && effective.positions.is_none();
        let staged = effective.stages.map_or(pays, Switch::is_on);
        Plan {
            groups,
            staged_target: effective.target_sparsity.filter(|_| staged && effective.robust.is_none()),
            searched: effective.target_sparsity.is_some(),
            max_drop: effective.max_drop.is_some(),
            again: effective.robust.unwrap_or(0),
        }
    }
}

/// The library's settings.
fn asked(
    effective: &Effective,
    mask: Option<Mask>,
    preprocessing: &Preprocessing,
) -> anyhow::Result<compress::Settings> {
    Ok(compress::Settings {
        train: effective.settings(mask)?,
        max_drop: effective.max_drop,
        row_weights: effective.output_aware.is_on(),
        rescale: effective.rescale.then_some(effective.kappa.unwrap_or(KAPPA)),
        gamma: effective.gamma,
        preprocessing: preprocessing.clone(),
    })
}

/// The baseline in the coordinates of the training, where these differ from its own; for workers, which compute its
/// states.
pub(crate) fn moved(baseline: &Baseline, effective: &Effective) -> anyhow::Result<Option<ImplicitModel>> {
    let settings = asked(effective, None, &Preprocessing::identity())?;
    Ok(match &baseline.kind {
        Kind::Network(network) => compress::moved(network.as_ref(), &settings)?,
        Kind::Model(model, _) => compress::moved(model.as_ref(), &settings)?,
    })
}
