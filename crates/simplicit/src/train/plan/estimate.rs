//! Estimates the memory and work of a training before it begins.

use crate::Result;
use crate::memory;
use crate::parallel::Threads;
use crate::states::StateSlice;
use crate::train::plan::budget;
use crate::train::plan::connections;
use crate::train::plan::work::{self, Kind};
use crate::train::search::rough::SAMPLES;
use crate::train::{TrainInput, TrainSettings, check};

/// Number of prices that a survey tries.
pub(in crate::train) const PRICES: usize = 7;
/// Average number of whole models on the way to a target after a survey: one, and sometimes a second one.
const AFTER_SURVEY: f64 = 1.25;
/// Whole models on the way to a target if each is cheap and there is no survey; refits in the output metric are
/// included, which every stage has.
const SEARCHED: f64 = 20.0;

/// Memory and work of a training.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Estimate {
    /// Bytes of memory if the layers of all samples are kept there; what the process holds already is included.
    pub bytes: u64,
    /// Bytes of memory if those layers are kept in a file.
    pub least_bytes: u64,
    /// Multiply-adds in single precision for one model at a given price.
    pub model: f64,
    /// The same for a model of a given sparsity, which needs surveys and further models.
    pub target: f64,
}

/// What training on these samples would take; an error if it would be refused. No sample is read.
pub fn estimate(input: &TrainInput, settings: &TrainSettings, threads: Threads) -> Result<Estimate> {
    check::training(input, settings, threads)?;
    let plan = connections::plan(input, settings)?;
    let needs = budget::needs(&plan, input, settings, threads);
    let used = memory::used().unwrap_or(0);
    let of = |input: &TrainInput, kind: Kind| work::of_groups(&plan, input, settings, kind).iter().sum::<f64>();
    let model = of(input, Kind::Whole);
    let target = if plan.has_taps() {
        let few = StateSlice::new(input.source, 0..input.source.samples().min(SAMPLES))?;
        let few = TrainInput { source: &few, preprocessing: input.preprocessing.clone(), ..*input };
        of(&few, Kind::Survey(PRICES)) + of(&few, Kind::Solve) + AFTER_SURVEY * model
    } else {
        SEARCHED * model
    };
    let least_bytes = used + needs.group;
    Ok(Estimate { bytes: least_bytes + needs.layers, least_bytes, model, target })
}
