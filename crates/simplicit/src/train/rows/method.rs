//! Rows by a method of the user's own, within the library's training: plan, cascade, statistics, counting and the
//! search for a target stay the same. See `docs/add-a-row-method.md`.

use std::fmt::Debug;

use crate::parallel::{Cancel, Threads};
use crate::problem::RowProblem;
use crate::solver::Design;
use crate::statistics::Statistics;
use crate::train::rows::solve::Solved;
use crate::train::{Progress, Run};
use crate::{Error, Result};

/// A row may exceed its ball by this much, as rounding; it is rounded toward zero when it is stored.
const SLACK: f64 = 1e-9;

/// Rows that share their features: the units of a layer, the channels of a feature map, the outputs.
#[derive(Clone, Copy)]
pub struct RowGroup<'a> {
    /// The name of the layer, or `outputs`, or `states` for all states at once.
    pub name: &'a str,
    /// Statistics of the group's features and targets. Targets are residuals if the baseline has residual sums.
    pub statistics: &'a Statistics,
    /// The statistics in the form that the row solver and the refit take.
    pub design: &'a Design<'a>,
    /// The problem of every row, over the group's features. `start` is the baseline's row; an entry weight of
    /// infinity forbids the connection, one of zero marks the constant, which is not penalised; `fit` is the row's
    /// weight in the output.
    pub problems: &'a [RowProblem],
    /// What [`TrainSettings::strength`](crate::train::TrainSettings::strength) or the search for a target asks for; a
    /// larger strength should leave fewer weights.
    pub strength: f64,
    /// Threads to use.
    pub threads: Threads,
    /// A request to stop.
    pub cancel: &'a Cancel,
}

/// A function from a group to rows of weights. The same group must give the same rows.
pub trait RowMethod: Debug + Send + Sync {
    /// One row per problem, one weight per feature, in stored coordinates; zeros are exact.
    fn rows(&self, group: &RowGroup) -> Result<Vec<Vec<f64>>>;
}

/// A method's rows after a check, because a model must satisfy its constraints whatever method found its rows.
pub(in crate::train) fn rows(method: &dyn RowMethod, group: &RowGroup, run: &mut Run) -> Result<Vec<Solved>> {
    let (total, d) = (group.problems.len(), group.design.features());
    let rows = method.rows(group)?;
    if rows.len() != total {
        return Err(Error::shape(format!("rows of {}", group.name), total, rows.len()));
    }
    for (k, (row, problem)) in rows.iter().zip(group.problems).enumerate() {
        let what = |what: &str| format!("{what} of row {k} of {}", group.name);
        if row.len() != d {
            return Err(Error::shape(what("weights"), d, row.len()));
        }
        if let Some(w) = row.iter().find(|w| !w.is_finite()) {
            return Err(Error::setting(what("weight"), "a finite number", w));
        }
        let allowed = |j: usize| problem.weights.as_ref().is_none_or(|w| w[j].is_finite());
        if let Some(j) = (0..d).find(|&j| row[j] != 0.0 && !allowed(j)) {
            return Err(Error::setting(what("weight"), format!("zero for feature {j}, which it may not use"), row[j]));
        }
        if let Some(ball) = &problem.ball {
            let norm: f64 = row.iter().zip(&ball.weights).map(|(w, c)| c * w.abs()).sum();
            if norm > ball.radius * (1.0 + SLACK) {
                return Err(Error::setting(what("sum of |w|"), format!("at most {}", ball.radius), norm));
            }
        }
    }
    (run.progress)(Progress::Rows { group: group.name.to_string(), done: total, total });
    Ok(rows.into_iter().map(|weights| Solved { weights, relative_gap: None, at_limit: false, on_gpu: false }).collect())
}
