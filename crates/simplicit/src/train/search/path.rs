//! The whole trade-off curve from one set-up: a model for every level of sparsity, judged on held-out samples.
//!
//! Levels are taken from small to large. If targets are approached in stages, every level is a stage and starts from
//! the model of the level before. If weights are shared, every level is the model of a separate training, with row
//! weights and prices from rough models near it. Otherwise one record of (strength, sparsity) serves all levels, so a
//! fit made for one level narrows the search for the next, and statistics that read no state of the model are
//! gathered once.

use crate::states::StateSource;
use crate::train::fit::{self, Fitter};
use crate::train::key::Search;
use crate::train::refit::output_refit::refitted;
use crate::train::search::max_drop::{agreement, require_judge};
use crate::train::search::stages;
use crate::train::search::{CLOSE, Found, StagedSearch, reported, seek};
use crate::train::{Run, TrainInput, TrainSettings, Trained, check, shares_weights};
use crate::{Error, Result};

/// One model per level (shares of the baseline's non-zeros to remove, in any order), in ascending order of the level,
/// each within 0.1 points of it where the objective allows, with its certificates. With held-out samples
/// `report.agreement` is the share of them with the baseline's prediction. A target sparsity or robust rounds are refused.
pub fn path(
    input: &TrainInput,
    held_out: Option<&dyn StateSource>,
    levels: &[f64],
    settings: &TrainSettings,
    run: &mut Run,
) -> Result<Vec<Trained>> {
    check::training(input, settings, run.threads)?;
    check::untargeted("a path, whose levels are its targets", settings)?;
    if let Some(held_out) = held_out {
        require_judge(input, held_out)?;
    }
    if let Some(bad) = levels.iter().find(|l| !(**l < 1.0 && l.is_finite())) {
        return Err(Error::setting("level of a path", "a number below 1, such as 0.8", bad));
    }
    let mut levels = levels.to_vec();
    levels.sort_by(f64::total_cmp);
    levels.dedup();
    let mut out = Vec::with_capacity(levels.len());
    if stages::are_taken(input, settings) {
        let mut search = StagedSearch::new(settings);
        let mut left = None;
        for level in levels {
            let rungs = stages::rungs(left, level);
            for rung in &rungs[..rungs.len() - 1] {
                let fitted = search.step(input, settings, Some(*rung), false, run)?;
                search.start_next_stage_from(fitted.model, input, settings, run)?;
            }
            let fitted = search.step(input, settings, Some(level), true, run)?;
            let mut trained = search.finish(fitted);
            trained.report.agreement = held_out.map(|samples| agreement(&trained.model, samples, run)).transpose()?;
            search.start_next_stage_from(trained.model.clone(), input, settings, run)?;
            left = Some(1.0 - level);
            out.push(trained);
        }
        return Ok(out);
    }
    if settings.model.cascade && input.baseline.is_some_and(shares_weights) {
        for level in levels {
            let keep = stages::Within { keep: run.keep, search: Search::Level(level) };
            let mut run = Run { threads: run.threads, cancel: run.cancel, keep: &keep, progress: &mut *run.progress };
            let mut search = StagedSearch::new(settings);
            let fitted = search.step(input, settings, Some(level), true, &mut run)?;
            let mut trained = search.finish(fitted);
            trained.report.agreement = held_out.map(|samples| agreement(&trained.model, samples, &run)).transpose()?;
            out.push(trained);
        }
        return Ok(out);
    }
    let mut fitter = Fitter::new(input, settings, run)?;
    let mut found = Found::default();
    let mut tried = Vec::new();
    for level in levels {
        seek(
            &mut found,
            level,
            settings.strength,
            |found| found.is_close(level, |_| CLOSE),
            |strength| {
                let fitted = fit::fit(&mut fitter, input, settings, strength, false, run)?;
                Ok(reported(&fitted, strength, run, &mut tried))
            },
        )?;
        let strength = found.nearest(level).map_or(settings.strength, |(strength, _)| strength);
        let fitted = fit::fit(&mut fitter, input, settings, strength, true, run)?;
        let fitted = refitted(fitted, input, settings, strength, run)?;
        let agreement = held_out.map(|samples| agreement(&fitted.model, samples, run)).transpose()?;
        out.push(fitted.trained(strength, tried.clone(), agreement));
    }
    Ok(out)
}
