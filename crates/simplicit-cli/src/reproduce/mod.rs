//! The paper's experiments from files to tables and pictures: a list of this program's own commands, what they gave,
//! and what the paper says beside it.

mod cifar;
mod fashion;
mod laboratory;
mod page;

pub(crate) use cifar::Cifar;
pub(crate) use fashion::Fashion;
pub(crate) use laboratory::{Laboratory, Step};
pub(crate) use page::{Item, Page, Picture};

use std::collections::BTreeMap;

use serde_json::Value;

/// What every step gave, by name.
pub(crate) type Found = BTreeMap<String, Value>;

/// An experiment: which commands, and how their results are shown.
pub(crate) trait Experiment {
    /// Title of the page.
    fn title(&self) -> &'static str;
    /// The commands, in order; later ones may read models of earlier ones.
    fn steps(&self) -> Vec<Step>;
    /// One item per figure or table of the paper.
    fn items(&self, found: &Found) -> anyhow::Result<Vec<Item>>;
}

/// A number of a step's results.
fn number(found: &Found, step: &str, key: &str) -> Option<f64> {
    found.get(step)?.get(key)?.as_f64()
}

/// Element k of a list of a step's results.
fn element(found: &Found, step: &str, key: &str, k: usize) -> Option<f64> {
    found.get(step)?.get(key)?.get(k)?.as_f64()
}

/// A fraction in per cent, or a dash.
fn percent(value: Option<f64>) -> String {
    value.map_or("–".into(), |v| format!("{:.1}", 100.0 * v))
}

/// Accuracy minus the baseline's in points.
fn drop(found: &Found, step: &str) -> Option<f64> {
    Some(100.0 * (number(found, step, "accuracy")? - number(found, step, "baseline_accuracy")?))
}

/// A difference in points with its sign.
fn points(value: Option<f64>) -> String {
    value.map_or("–".into(), |v| format!("{v:+.2}").replace('-', "−"))
}
