//! The refit of a whole model, and what its rows and outputs then miss.

use super::{OutputRefit, Problem, Refit, STEPS, There, chunk_of, equilibrium, rounds, rows_of_units};
use crate::Result;
use crate::backend::cuda::Cuda;
use crate::backend::{self, Device};
use crate::equilibrium::{DeviceModel, Sum};
use crate::memory::MemoryBudget;
use crate::model::{ImplicitModel, Target};
use crate::parallel;
use crate::train::evidence::device_walk::{Gpu, inputs_of};
use crate::train::evidence::importance::add_squares;
use crate::train::evidence::walk::Walk;
use crate::train::fit::Fitted;
use crate::train::refit::linearised::Linearised;
use crate::train::refit::reconstruct::{largest_work, reconstruct};
use crate::train::{Key, Progress, Run, TrainInput, TrainSettings};

/// A fitted model with refitted non-zeros, and with its rows and its error reported as they are after the refit.
pub(in crate::train) fn refitted(
    fitted: Fitted,
    input: &TrainInput,
    settings: &TrainSettings,
    strength: f64,
    run: &mut Run,
) -> Result<Fitted> {
    let weighed = input.weighed(fitted.importance.as_deref());
    let (model, reconstruction) = reconstruct(fitted.model, &weighed, settings, strength, run)?;
    let (model, output_refit) = output_refit(model, input, settings, strength, run)?;
    let changed = output_refit.is_some_and(|r| r.rounds > 0) || reconstruction.as_ref().is_some_and(|r| r.changed > 0);
    let mut fitted = Fitted { model, reconstruction, output_refit, ..fitted };
    if changed {
        report_errors(&mut fitted, input, settings.work.device, run)?;
    }
    Ok(fitted)
}

/// Writes the present non-zeros and errors of the rows, and the error of the outputs, into the report.
fn report_errors(fitted: &mut Fitted, input: &TrainInput, device: Device, run: &Run) -> Result<()> {
    let model = &fitted.model;
    let mismatch = mismatch(model, input, device, run)?;
    let mut nonzeros = vec![0; fitted.rows.len()];
    Linearised::of(model).0.entries().iter().for_each(|entry| nonzeros[entry.row] += 1);
    let relative = |(residual, energy): (f64, f64)| if energy > 0.0 { (residual / energy).sqrt() } else { 0.0 };
    for (i, row) in fitted.rows.iter_mut().enumerate() {
        row.nonzeros = nonzeros[i];
        row.relative_residual = relative(mismatch[i]);
    }
    let of_outputs = &mismatch[model.layout().rows()..];
    fitted.training_error = relative(of_outputs.iter().fold((0.0, 0.0), |(r, e), m| (r + m.0, e + m.1)));
    Ok(())
}

/// The GPU for a model and its baseline, if there is one that is worthwhile and neither of them has cycles.
fn gpu<'a>(
    model: &ImplicitModel,
    input: &TrainInput<'a>,
    device: Device,
) -> Result<Option<(&'static Cuda, &'a ImplicitModel)>> {
    let acyclic = |model: &&ImplicitModel| model.layers_are_acyclic();
    match input.baseline.filter(acyclic).filter(|_| acyclic(&model)) {
        Some(baseline) => Ok(backend::gpu(device, largest_work(model))?.map(|cuda| (cuda, baseline))),
        None => Ok(None),
    }
}

/// Squared mismatch and energy of every row's target, at the model's own states.
fn mismatch(model: &ImplicitModel, input: &TrainInput, device: Device, run: &Run) -> Result<Vec<(f64, f64)>> {
    if let Some((cuda, baseline)) = gpu(model, input, device)? {
        let found = mismatch_on_gpu(cuda, baseline, model, input, run);
        if let Some(found) = backend::or_cpu(device, found)? {
            return Ok(found);
        }
    }
    let equilibrium = equilibrium(model)?;
    let (samples, shape) = (input.source.samples(), model.shape());
    let size = chunk_of(shape);
    let row_of = rows_of_units(model);
    let rows = model.layout().rows() + shape.outputs;
    let mut total = vec![(0.0, 0.0); rows];
    parallel::fold(
        run.threads,
        samples.div_ceil(size),
        |block| {
            run.cancel.check()?;
            let theirs = input.source.block(block * size..((block + 1) * size).min(samples))?;
            let ours = equilibrium.run(&theirs.u.cast())?;
            let mut sums = vec![(0.0, 0.0); rows];
            for s in 0..theirs.samples() {
                let targets = theirs.z.row(s).iter().chain(theirs.y.row(s));
                let reached = ours.z.row(s).iter().chain(ours.y.row(s));
                for ((row, t), r) in row_of.iter().zip(targets).zip(reached) {
                    let Some(row) = row else { continue };
                    sums[*row].0 += (t - f64::from(*r)).powi(2);
                    sums[*row].1 += t * t;
                }
            }
            Ok(sums)
        },
        |_, sums| {
            total.iter_mut().zip(sums).for_each(|(t, s)| *t = (t.0 + s.0, t.1 + s.1));
            Ok(())
        },
    )?;
    Ok(total)
}

/// The same on a GPU.
fn mismatch_on_gpu(
    cuda: &'static Cuda,
    baseline: &ImplicitModel,
    model: &ImplicitModel,
    input: &TrainInput,
    run: &Run,
) -> Result<Vec<(f64, f64)>> {
    let (theirs_on, ours_on) =
        (DeviceModel::new(cuda, baseline, run.threads)?, DeviceModel::new(cuda, model, run.threads)?);
    let (layout, samples) = (model.layout(), input.source.samples());
    let all = layout.rows() + model.shape().outputs;
    let (mut missed, mut energy) = (vec![0.0; all], vec![0.0; all]);
    // Both models keep pre-activations and values of all layers.
    let size = theirs_on.at_once(4)?;
    for first in (0..samples).step_by(size) {
        run.cancel.check()?;
        let session = cuda.session()?;
        let u = inputs_of(&session, input.source, first..(first + size).min(samples))?;
        let ours = ours_on.pass(&session, session.copy(&u)?, true)?;
        let theirs = theirs_on.pass(&session, u, true)?;
        for target in (0..layout.layers().len()).map(Target::Layer).chain([Target::Output]) {
            let rows = match target {
                Target::Layer(k) => layout.row_range(k),
                Target::Output => layout.rows()..all,
            };
            let (t, r) = (theirs.z(target)?, ours.z(target)?);
            let e = session.copy(t)?;
            session.add_scaled(&e, &*session.under(r, e.positions)?, None, -1.0)?;
            add_squares(&mut missed[rows.clone()], &session, &e, 1.0)?;
            add_squares(&mut energy[rows], &session, t, 1.0)?;
        }
    }
    Ok(missed.into_iter().zip(energy).collect())
}

/// Refits the non-zeros of `model`, which was found at a strength.
pub(super) fn output_refit(
    model: ImplicitModel,
    input: &TrainInput,
    settings: &TrainSettings,
    strength: f64,
    run: &mut Run,
) -> Result<(ImplicitModel, Option<OutputRefit>)> {
    let most = rounds(Some(&model), settings);
    if most == 0 {
        return Ok((model, None));
    }
    let device = settings.work.device;
    if let Some((cuda, baseline)) = gpu(&model, input, device)? {
        let found = walked(cuda, baseline, input, settings, run)
            .and_then(|walk| refit_on(Some((&walk, baseline)), model.clone(), most, input, settings, strength, run));
        if let Some(found) = backend::or_cpu(device, found)? {
            return Ok(found);
        }
    }
    refit_on(None, model, most, input, settings, strength, run)
}

/// The baseline's values of all layers on a GPU.
fn walked<'a>(
    cuda: &'static Cuda,
    baseline: &ImplicitModel,
    input: &TrainInput<'a>,
    settings: &TrainSettings,
    run: &Run,
) -> Result<Walk<'a>> {
    let folder = run.keep.folder().map_or_else(std::env::temp_dir, std::path::Path::to_path_buf);
    let memory_budget = MemoryBudget::new(settings.work.memory.map_or(u64::MAX, |budget| budget / 4), &folder);
    let (layout, shape) = (baseline.layout(), input.source.shape());
    let widest = layout.layers().iter().map(|layer| layer.size).max().unwrap_or(0);
    let gpu = Gpu::new(cuda, widest, chunk_of(shape), &memory_budget)?;
    let mut walk = Walk::new(input.source, layout.layers().len(), Some(&gpu));
    for k in baseline.layer_order() {
        walk.enter(layout, k, Sum::new(baseline, Target::Layer(k)), &memory_budget, run.threads, run.cancel)?;
    }
    Ok(walk)
}

/// The refit of all rounds, on the GPU of a walk or on the CPU.
fn refit_on(
    there: Option<(&Walk, &ImplicitModel)>,
    model: ImplicitModel,
    most: usize,
    input: &TrainInput,
    settings: &TrainSettings,
    strength: f64,
    run: &mut Run,
) -> Result<(ImplicitModel, Option<OutputRefit>)> {
    let (support, start) = Linearised::of(&model);
    if start.is_empty() {
        return Ok((model, None));
    }
    let there = there.map(|(walk, baseline)| There {
        theirs: walk,
        ours: walk,
        samples: input.source.samples(),
        outputs: Some(baseline),
        scope: support.scope().clone(),
    });
    let problem = Problem::new(&model, input, there, settings, run.threads, run.cancel)?;
    let how = Refit { problem: &problem, support: &support, start: &start, settings, rounds: most, steps: STEPS };
    let (model, report, _) = how.refit(
        model,
        start.clone(),
        |round| Key::output_refit(strength, round),
        |round, value, run| {
            (run.progress)(Progress::OutputRefit { round, rounds: most, objective: value.all });
        },
        run,
    )?;
    Ok((model, Some(report)))
}
