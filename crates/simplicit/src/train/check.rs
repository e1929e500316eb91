//! Settings that have no meaning, alone or for the given input, are errors before any work begins.

use crate::backend::Device;
use crate::backend::cuda::Cuda;
use crate::parallel::Threads;
use crate::problem::{Connectivity, Matching};
use crate::train::plan::{budget, choice, connections};
use crate::train::refit::{bound_refit, output_refit};
use crate::train::search::allocate;
use crate::train::{AllowedWeights, Bounds, Objective, RowSettings, TrainInput, TrainSettings, layout};
use crate::{Error, Result};

/// Checks the settings for the given input.
pub(super) fn training(input: &TrainInput, settings: &TrainSettings, threads: Threads) -> Result<()> {
    settings_alone(settings)?;
    let shape = input.source.shape();
    if let Some(baseline) = input.baseline
        && baseline.shape() != shape
    {
        return Err(Error::shape(
            "baseline",
            format!("{} inputs, {} states, {} outputs", shape.inputs, shape.states, shape.outputs),
            format!("{:?}", baseline.shape()),
        ));
    }
    if let Some(weights) = input.importance {
        let rows = layout(input).rows() + shape.outputs;
        if weights.len() != rows {
            return Err(Error::shape("row weights", rows, weights.len()));
        }
        if let Some(bad) = weights.iter().find(|w| !(w.is_finite() && **w >= 0.0)) {
            return Err(Error::setting("row weight", "zero or a positive number", bad));
        }
        if !settings.rows.normalise {
            return Err(Error::setting("normalise", "on with row weights, which set the units of every row", "off"));
        }
    }
    of_feature_maps(input, settings)?;
    allocation(input, settings)?;
    stages(input, settings)?;
    reconstruction(input, settings)?;
    choice::check(input, settings)?;
    if let Some(epsilon) = settings.model.robust_refit {
        let Some(baseline) = input.baseline else {
            return Err(Error::setting("robust-refit", "a network, whose classes it keeps", "states alone"));
        };
        if !matches!(settings.allowed.connectivity, Connectivity::Baseline | Connectivity::Feedforward) {
            let expected = "connectivity baseline or feedforward: it needs a model without cycles";
            return Err(Error::setting("robust-refit", expected, epsilon));
        }
        bound_refit::check(baseline, input, epsilon)?;
    }
    if let Some(layer) = layout(input).layers().iter().find(|l| !l.activation.is_non_expansive()) {
        let about = format!("layer {:?}, whose activation {} is expansive", layer.name, layer.activation);
        if let Some(kappa) = settings.allowed.kappa {
            return Err(Error::setting("kappa", format!("none with {about}: it would prove nothing"), kappa));
        }
        if let Connectivity::Full | Connectivity::NoSelfLoop = settings.allowed.connectivity {
            let expected = format!("feedforward or baseline with {about}, which no cycle may go through");
            return Err(Error::setting("connectivity", expected, "one with cycles"));
        }
    }
    budget::check(input, settings, threads)
}

/// Only feature maps have positions to choose from, and earlier maps to reach.
fn of_feature_maps(input: &TrainInput, settings: &TrainSettings) -> Result<()> {
    if connections::walked(input, settings).is_some() {
        return Ok(());
    }
    let usual = TrainSettings::default();
    let both = [
        ("positions", settings.work.positions, usual.work.positions),
        ("reach", settings.allowed.reach, usual.allowed.reach),
    ];
    match both.into_iter().find(|(_, got, usual)| got != usual) {
        Some((setting, got, usual)) => {
            let expected = format!("{usual}, the default, for a network without convolutions or operators");
            Err(Error::setting(setting, expected, got))
        }
        None => Ok(()),
    }
}

/// Settings of an objective that is not used must have their defaults.
fn of_other_objectives(settings: &TrainSettings) -> Result<()> {
    let (rows, usual) = (&settings.rows, RowSettings::default());
    let convex = matches!(settings.objective, Objective::Convex(_));
    if !convex && rows.rounds > 1 && rows.rounds != usual.rounds {
        return Err(Error::setting("rounds", "1 without a convex penalty: no other rows are reweighted", rows.rounds));
    }
    if !convex && rows.solver != usual.solver {
        let expected = "the default without a convex penalty: no other rows have a gap to stop at";
        return Err(Error::setting("solver", expected, format!("{:?}", rows.solver)));
    }
    if !matches!(settings.objective, Objective::Cardinality) && rows.cardinality != usual.cardinality {
        let expected = "the default without the penalty cardinality";
        return Err(Error::setting("cardinality", expected, format!("{:?}", rows.cardinality)));
    }
    if matches!(settings.objective, Objective::Method(_)) && !rows.refit {
        return Err(Error::setting("refit", "on with a row method, whose weights are stored as they are", "off"));
    }
    if settings.allowed.reach != AllowedWeights::default().reach
        && !matches!(settings.allowed.connectivity, Connectivity::Feedforward)
    {
        return Err(Error::setting(
            "reach",
            "2, the default, without connectivity feedforward",
            settings.allowed.reach,
        ));
    }
    Ok(())
}

/// An allocation over layers changes the prices of a survey, and holds samples out.
fn allocation(input: &TrainInput, settings: &TrainSettings) -> Result<()> {
    let no_cycles = "0 with connectivity full, no-self-loop or a mask: prices move between layers";
    let expected = match settings.model.allocate {
        0 => return Ok(()),
        _ if input.baseline.is_some_and(|b| !b.layers_are_acyclic()) => "0 for a network with cycles",
        _ if !matches!(settings.allowed.connectivity, Connectivity::Baseline | Connectivity::Feedforward) => no_cycles,
        _ if !matches!(settings.objective, Objective::Cardinality) => "0 without the penalty cardinality",
        _ if !settings.model.cascade => "0 without a cascade",
        _ if settings.model.robust_rounds > 0 => "0 with robust rounds, which price every weight",
        _ if input.source.samples() < allocate::LEAST_SAMPLES => {
            let expected = format!("0 with fewer than {} samples", allocate::LEAST_SAMPLES);
            return Err(Error::setting("allocate", expected, settings.model.allocate));
        }
        _ => return Ok(()),
    };
    Err(Error::setting("allocate", expected, settings.model.allocate))
}

/// A reconstruction runs the network layer by layer, from the first to the last.
fn reconstruction(input: &TrainInput, settings: &TrainSettings) -> Result<()> {
    let no_cycles = "0 with connectivity full, no-self-loop or a mask: it goes through layers one after the other";
    let expected = match (settings.model.reconstruct, input.baseline) {
        (0, _) => return Ok(()),
        (_, None) => "0 for states alone: it runs the network's layers",
        (_, Some(baseline)) if !baseline.layers_are_acyclic() => "0 for a network with cycles",
        _ if !matches!(settings.allowed.connectivity, Connectivity::Baseline | Connectivity::Feedforward) => no_cycles,
        _ => return Ok(()),
    };
    Err(Error::setting("reconstruct", expected, settings.model.reconstruct))
}

/// Stages put a price on non-zeros, and each of them starts from a refitted model.
fn stages(input: &TrainInput, settings: &TrainSettings) -> Result<()> {
    let expected = match settings.model.stages {
        None | Some(false) => return Ok(()),
        _ if !matches!(settings.objective, Objective::Cardinality) => "off without the penalty cardinality",
        _ if output_refit::rounds(input.baseline, settings) == 0 => {
            "off without a refit in the output metric (output-refit)"
        }
        _ if settings.model.robust_rounds > 0 => "off with robust rounds, which train the whole model again",
        _ => return Ok(()),
    };
    Err(Error::setting("stages", expected, "on"))
}

/// Settings that need a target sparsity.
pub(super) fn for_a_target(settings: &TrainSettings) -> Result<()> {
    if settings.model.allocate > 0 && settings.target_sparsity.is_none() {
        return Err(Error::setting("allocate", "0 without a target sparsity", settings.model.allocate));
    }
    if settings.model.stages == Some(true) && settings.target_sparsity.is_none() {
        return Err(Error::setting("stages", "off without a target sparsity", "on"));
    }
    Ok(())
}

/// Settings that have no meaning without a single target sparsity: on a path, or if a drop decides.
pub(super) fn untargeted(what: &str, settings: &TrainSettings) -> Result<()> {
    if let Some(target) = settings.target_sparsity {
        return Err(Error::setting("target-sparsity", format!("none for {what}"), target));
    }
    if settings.model.robust_rounds > 0 {
        return Err(Error::setting("robust", format!("0 for {what}"), settings.model.robust_rounds));
    }
    if let Some(epsilon) = settings.model.robust_refit {
        return Err(Error::setting("robust-refit", format!("none for {what}"), epsilon));
    }
    Ok(())
}

/// Settings that have no meaning for any input.
pub(super) fn settings_alone(settings: &TrainSettings) -> Result<()> {
    if let Device::Cuda(number) = settings.work.device {
        if !matches!(settings.objective, Objective::Cardinality) {
            let expected = "cpu or auto with a convex penalty or a method of your own: a GPU solves cardinality rows";
            return Err(Error::setting("device", expected, settings.work.device));
        }
        Cuda::open(number)?;
    }
    if settings.rows.matching == Matching::Exact {
        // Exact matching consists of one convex solve: later steps would undo the match, and the strength changes
        // nothing.
        let wants = |what: &str, got: String| Err(Error::setting("exact matching", what, got));
        match &settings.objective {
            Objective::Cardinality => return wants("a convex penalty", "cardinality".into()),
            Objective::Method(_) => return wants("a convex penalty", "a row method".into()),
            _ if settings.rows.rounds != 1 => return wants("one round", format!("{} rounds", settings.rows.rounds)),
            _ if settings.rows.refit => return wants("no refit", "a refit".into()),
            _ if settings.model.cascade => return wants("no cascade", "a cascade".into()),
            _ if settings.model.output_refit.is_some_and(|rounds| rounds > 0) => {
                return wants("no refit in the output metric", "one".into());
            }
            _ if settings.model.reconstruct > 0 => {
                return wants("no reconstruction over the next operations", "one".into());
            }
            _ if settings.target_sparsity.is_some() => {
                return wants("no target sparsity", "a target; the match decides the sparsity".into());
            }
            Objective::Convex(_) => {}
        }
    }
    if !(settings.strength > 0.0 && settings.strength.is_finite()) {
        return Err(Error::setting("strength", "a positive number", settings.strength));
    }
    if let Some(target) = settings.target_sparsity
        && !(0.0..1.0).contains(&target)
    {
        return Err(Error::setting("target-sparsity", "a number below 1, such as 0.8, and none below 0", target));
    }
    if let Some(kappa) = settings.allowed.kappa
        && !(kappa > 0.0 && kappa < 1.0)
    {
        return Err(Error::setting("kappa", "a number between 0 and 1", kappa));
    }
    if let Matching::Relaxed { states, outputs } = settings.rows.matching
        && !(states > 0.0 && outputs > 0.0 && states.is_finite() && outputs.is_finite())
    {
        return Err(Error::setting("lambda1, lambda2", "positive numbers", format!("{states}, {outputs}")));
    }
    match (&settings.objective, settings.rows.bounds) {
        (Objective::Cardinality, _) if !settings.rows.refit => {
            return Err(Error::setting("refit", "on with cardinality, whose rows always end in a refit", "off"));
        }
        (Objective::Convex(_) | Objective::Method(_), Some(bounds @ (Bounds::Sampled | Bounds::All))) => {
            let expected = "none or off without cardinality, whose rows alone have such bounds";
            return Err(Error::setting("bounds", expected, format!("{bounds:?}").to_lowercase()));
        }
        _ => {}
    }
    if settings.rows.rounds == 0 {
        return Err(Error::setting("rounds", "at least 1", 0));
    }
    of_other_objectives(settings)?;
    if let Some(seconds) = settings.rows.prove {
        if !(seconds >= 0.0 && seconds.is_finite()) {
            return Err(Error::setting("prove", "seconds a row", seconds));
        }
        if settings.rows.bounds == Some(Bounds::Off) {
            return Err(Error::setting("prove", "bounds sampled or all: a proof begins with a bound", "off"));
        }
        if !matches!(settings.objective, Objective::Cardinality) {
            return Err(Error::unsupported(
                "a proof of rows that are not priced by their non-zeros",
                "use cardinality",
            ));
        }
    }
    if settings.work.positions == 0 {
        return Err(Error::setting("positions", "at least 1", 0));
    }
    Ok(())
}
