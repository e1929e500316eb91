//! The smallest model whose predictions agree with the baseline's: bisection on the strength, judged on held-out samples.
//!
//! Strength rather than target sparsity: every model tried is then one fit, and the sparsity that comes with it is what
//! is made as large as possible.

use crate::equilibrium::{Equilibrium, EquilibriumSettings};
use crate::evaluate::predictions;
use crate::model::ImplicitModel;
use crate::parallel::{self, Threads};
use crate::states::StateSource;
use crate::train::fit::{self, Fitted, Fitter};
use crate::train::refit::output_refit::refitted;
use crate::train::{Progress, Run, TrainInput, TrainSettings, Trained, check, check_untargeted};
use crate::{Error, Result};

/// Whole models fitted at most.
const MAX_MODELS: usize = 24;
/// First factor between two strengths while the limit is not yet between two models.
const STRIDE: f64 = 4.0;
/// Accepted distance in sparsity between the model returned and one that drops too much.
const CLOSE: f64 = 0.0025;
/// Held-out samples judged together.
const BLOCK: usize = 256;

/// Trains on `input` the sparsest model found whose largest output is the baseline's on all but `max_drop` points
/// (hundredths) of the held-out samples. If none is found, the model that agrees most; `report.agreement` says how much.
pub fn train_to_max_drop(
    input: &TrainInput,
    held_out: &dyn StateSource,
    max_drop: f64,
    settings: &TrainSettings,
    run: &mut Run,
) -> Result<Trained> {
    check(input, settings, run.threads)?;
    check_untargeted("a model whose drop decides how sparse it is", settings)?;
    if settings.allocate > 0 {
        let expected = "0 where a drop decides how sparse the model is";
        return Err(Error::setting("allocate", expected, settings.allocate));
    }
    if !(0.0..=100.0).contains(&max_drop) {
        return Err(Error::setting("max-drop", "points between 0 and 100, such as 0.5", max_drop));
    }
    require_judge(input, held_out)?;
    let least = 1.0 - max_drop / 100.0;
    let mut fitter = Fitter::new(input, settings, run)?;
    let mut path = Vec::new();
    let mut strength = settings.strength;
    // In log strength: the last that agrees and the first that does not.
    let mut good: Option<(f64, f64)> = None;
    let mut bad: Option<(f64, f64)> = None;
    let mut best: Option<(f64, f64, f64, Fitted)> = None;
    while path.len() < MAX_MODELS {
        let fitted = fit::fit(&mut fitter, input, settings, strength, false, run)?;
        let fitted = refitted(fitted, input, settings, strength, run)?;
        let sparsity = fitted.model.sparsity().sparsity;
        path.push(fitted.tried(strength));
        (run.progress)(Progress::Model { strength, sparsity });
        let agreement = agreement(&fitted.model, held_out, run)?;
        let agrees = agreement >= least;
        let better = best.as_ref().is_none_or(|(_, so_far, sparsest, _)| {
            if *so_far >= least { agrees && sparsity > *sparsest } else { agreement > *so_far }
        });
        if better {
            best = Some((strength, agreement, sparsity, fitted));
        }
        let here = Some((strength.ln(), sparsity));
        if agrees {
            good = here;
        } else {
            bad = here;
        }
        strength = match (good, bad) {
            (Some(g), Some(b)) if b.1 - g.1 <= CLOSE => break,
            (Some(g), Some(b)) => f64::midpoint(g.0, b.0).exp(),
            // Nothing is left to remove, or nothing more can be given back.
            (Some(g), None) if g.1 >= 1.0 => break,
            (Some(_), None) => strength * STRIDE,
            (None, _) => strength / STRIDE,
        };
    }
    match best {
        Some((strength, agreement, _, fitted)) => {
            let fitted = fit::certified(&mut fitter, input, settings, strength, fitted, run)?;
            Ok(fitted.trained(strength, path, Some(agreement)))
        }
        // The loop runs at least once.
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
