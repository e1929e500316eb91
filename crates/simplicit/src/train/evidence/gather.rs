//! Statistics of rows without shared weights, in one pass over the samples: states of the source or of the model built so far.

use std::sync::Arc;

use crate::Result;
use crate::model::Target;
use crate::statistics::Statistics;
use crate::train::delegate::StatisticsTask;
use crate::train::plan::{Group, Place};
use crate::train::rows::build::Build;
use crate::train::{Key, Progress, Run, TrainInput, TrainSettings};

/// Statistics of a group whose rows have no shared weights, from the source's own states or those of the model built
/// so far. A model's own pass is only for its states: inputs, constant and targets are the same for every model and
/// are gathered once.
pub(in crate::train) fn gather(
    input: &TrainInput,
    settings: &TrainSettings,
    group: &Group,
    own: Option<&Build>,
    inputs: &mut Option<Arc<Statistics>>,
    run: &mut Run,
) -> Result<Statistics> {
    let shape = input.source.shape();
    let (n, all) = (shape.states, shape.states + shape.outputs);
    let shared = match inputs {
        Some(shared) => shared.clone(),
        None => {
            let columns = (n..=n + shape.inputs).collect();
            let task = StatisticsTask::new(input, (0..all).collect(), columns, Vec::new(), None);
            let shared = Arc::new(pass(&task, input, "inputs", Some(&Key::input_statistics()), run)?);
            inputs.insert(shared).clone()
        }
    };
    let first = group.first_unit + if group.target == Some(Target::Output) { n } else { 0 };
    let rows: Vec<usize> = (first..first + group.rows.len()).collect();
    let column = |place: Place| match place {
        Place::Column(j) => Some(j as usize),
        Place::Constant => Some(n + shape.inputs),
        Place::Tap { .. } => None,
    };
    let columns: Vec<usize> = group.places().into_iter().filter_map(column).collect();
    let (states, rest) = columns.split_at(columns.partition_point(|&j| j < n));
    let fixed = shared.part(&rest.iter().map(|j| j - n).collect::<Vec<_>>(), &rows);
    if states.is_empty() {
        return Ok(fixed);
    }
    let model = own.map(|built| built.model(input, settings)).transpose()?;
    let task = StatisticsTask::new(input, rows, states.to_vec(), rest.to_vec(), model);
    pass(&task, input, &group.name, None, run)?.followed_by(&fixed)
}

/// One pass over the samples, in this process or elsewhere; the result is kept under `key` if one is given.
fn pass(task: &StatisticsTask, input: &TrainInput, name: &str, key: Option<&Key>, run: &mut Run) -> Result<Statistics> {
    let (d, r) = task.shape();
    if let Some(key) = key
        && let Some(bytes) = run.keep.get(key)?
        && let Some(statistics) = Statistics::from_bytes(&bytes, d, r)
    {
        return Ok(statistics);
    }
    let total = task.samples();
    let statistics = match run.keep.delegate() {
        Some(elsewhere) => elsewhere.statistics(task)?,
        None => {
            // The source already has the states of the stage before, and keeps them.
            let here = StatisticsTask { stage: None, ..task.clone() };
            here.run(input.source, run.threads, run.cancel, |done| {
                (run.progress)(Progress::Samples { group: name.to_string(), done, total });
            })?
        }
    };
    if let Some(key) = key {
        run.keep.put(key, &statistics.to_bytes())?;
    }
    Ok(statistics)
}
