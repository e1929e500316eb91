//! Finds the smallest model whose predictions agree with the baseline's, judged on held-out samples.
//!
//! The search varies the strength and not a target sparsity, so that every model tried is a single fit; its sparsity
//! is to be as large as possible. The share of samples that disagree nearly always grows with the strength, and the
//! search for it is that for a target sparsity.

use std::cell::Cell;

use crate::equilibrium::{Equilibrium, EquilibriumSettings};
use crate::evaluate::predictions;
use crate::model::ImplicitModel;
use crate::parallel::{self, Threads};
use crate::states::StateSource;
use crate::train::fit::{self, Fitted, Fitter};
use crate::train::refit::output_refit::refitted;
use crate::train::search::{Found, reported, seek};
use crate::train::{Run, TrainInput, TrainSettings, Trained, check};
use crate::{Error, Result};

/// The search ends when the sparsities of the model returned and of one that drops too much are this close.
const CLOSE: f64 = 0.0025;
/// Held-out samples that are judged together.
const BLOCK: usize = 256;

/// Trains on `input` the sparsest model found whose largest output is the baseline's on all but `max_drop` points
/// (hundredths) of the held-out samples. If there is none, it returns the model that agrees most; `report.agreement`
/// is the share that agrees.
pub fn train_to_max_drop(
    input: &TrainInput,
    held_out: &dyn StateSource,
    max_drop: f64,
    settings: &TrainSettings,
    run: &mut Run,
) -> Result<Trained> {
    check::training(input, settings, run.threads)?;
    check::untargeted("a model whose drop decides how sparse it is", settings)?;
    if settings.model.allocate > 0 {
        let expected = "0 where a drop decides how sparse the model is";
        return Err(Error::setting("allocate", expected, settings.model.allocate));
    }
    if settings.model.stages == Some(true) {
        return Err(Error::setting("stages", "off where a drop decides how sparse the model is", "on"));
    }
    if !(0.0..=100.0).contains(&max_drop) {
        return Err(Error::setting("max-drop", "points between 0 and 100, such as 0.5", max_drop));
    }
    require_judge(input, held_out)?;
    let least = 1.0 - max_drop / 100.0;
    let mut fitter = Fitter::new(input, settings, run)?;
    let mut path = Vec::new();
    // The sparsest model that agrees, and the model with the most weights that does not.
    let (good, bad) = (Cell::new(None::<f64>), Cell::new(None::<f64>));
    // The search ends when the two are close to each other, or when a model without any weights agrees.
    let enough = |_: &Found| match (good.get(), bad.get()) {
        (Some(good), Some(bad)) => bad - good <= CLOSE,
        (Some(good), None) => good >= 1.0,
        _ => false,
    };
    let mut best: Option<(f64, f64, f64, Fitted)> = None;
    // Half a sample is added, so that a model counts as good if it disagrees on exactly as many samples as allowed.
    let limit = 1.0 - least + 0.5 / held_out.samples().max(1) as f64;
    seek(&mut Found::default(), limit, settings.strength, enough, |strength| {
        let fitted = fit::fit(&mut fitter, input, settings, strength, false, run)?;
        let fitted = refitted(fitted, input, settings, strength, run)?;
        let sparsity = reported(&fitted, strength, run, &mut path);
        let agreement = agreement(&fitted.model, held_out, run)?;
        let agrees = agreement >= least;
        let better = best.as_ref().is_none_or(|(_, so_far, sparsest, _)| {
            if *so_far >= least { agrees && sparsity > *sparsest } else { agreement > *so_far }
        });
        if better {
            best = Some((strength, agreement, sparsity, fitted));
        }
        if agrees {
            good.set(Some(good.get().map_or(sparsity, |so_far| so_far.max(sparsity))));
        } else {
            bad.set(Some(bad.get().map_or(sparsity, |so_far| so_far.min(sparsity))));
        }
        Ok(1.0 - agreement)
    })?;
    match best {
        Some((strength, agreement, _, fitted)) => {
            let fitted = fit::certified(&mut fitter, input, settings, strength, fitted, run)?;
            Ok(fitted.trained(strength, path, Some(agreement)))
        }
        // Cannot happen, because at least one model was fitted.
        None => Err(Error::shape("models of a search", "at least one", 0)),
    }
}

/// Held-out samples must be of the same baseline, and its outputs must be classes.
pub(in crate::train) fn require_judge(input: &TrainInput, held_out: &dyn StateSource) -> Result<()> {
    let shape = input.source.shape();
    if held_out.shape() != shape {
        return Err(Error::shape("held-out samples", format!("{shape:?}"), format!("{:?}", held_out.shape())));
    }
    if shape.outputs < 2 {
        return Err(Error::setting(
            "agreement on held-out samples",
            "a baseline with at least two outputs, of which the largest is the prediction",
            format!("{} output", shape.outputs),
        ));
    }
    Ok(())
}

/// Share of the samples on which the model's largest output is the baseline's; a sample without equilibrium disagrees.
pub(in crate::train) fn agreement(model: &ImplicitModel, held_out: &dyn StateSource, run: &Run) -> Result<f64> {
    let equilibrium = Equilibrium::new(model, EquilibriumSettings { threads: Threads::one(), ..Default::default() })?;
    let samples = held_out.samples();
    let mut agreed = 0;
    parallel::fold(
        run.threads,
        samples.div_ceil(BLOCK),
        |block| {
            run.cancel.check()?;
            let (u, y) = held_out.ends(block * BLOCK..((block + 1) * BLOCK).min(samples))?;
            let solution = equilibrium.outputs(&u)?;
            let pairs = predictions(&solution.y).into_iter().zip(predictions(&y.cast()));
            Ok(pairs.zip(&solution.diagnostics).filter(|((a, b), d)| a == b && d.converged).count())
        },
        |_, count| {
            agreed += count;
            Ok(())
        },
    )?;
    Ok(agreed as f64 / samples as f64)
}
