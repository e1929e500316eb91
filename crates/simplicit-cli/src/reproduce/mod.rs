//! The paper's experiments from files to tables and pictures: a list of this program's own commands, their results,
//! and what the paper says about the same items.

pub(crate) mod cifar;
mod fashion;
mod files;
mod laboratory;
mod page;

pub(crate) use cifar::Cifar;
pub(crate) use fashion::Fashion;
pub(crate) use files::Files;
pub(crate) use laboratory::{Laboratory, Step};
pub(crate) use page::{Item, Page, Picture};

use std::collections::BTreeMap;

use serde_json::Value;

use crate::report::{Chart, Series};

/// The results of every step, by its name.
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

/// A number in the results of a step.
fn number(found: &Found, step: &str, key: &str) -> Option<f64> {
    found.get(step)?.get(key)?.as_f64()
}

/// Element k of a list in the results of a step.
fn element(found: &Found, step: &str, key: &str, k: usize) -> Option<f64> {
    found.get(step)?.get(key)?.get(k)?.as_f64()
}

/// Accuracy under the paper's attack at the k-th ε.
fn attacked_accuracy(found: &Found, step: &str, k: usize) -> Option<f64> {
    element(found, &files::attacked(step), "attacked_accuracy", k)
}

/// Pairs (sparsity in per cent, value) of some steps, in ascending order of sparsity.
fn curve(found: &Found, steps: impl Iterator<Item = String>, value: impl Fn(&str) -> Option<f64>) -> Vec<(f64, f64)> {
    let mut points: Vec<(f64, f64)> =
        steps.filter_map(|s| Some((100.0 * number(found, &s, "sparsity")?, value(&s)?))).collect();
    points.sort_by(|a, b| a.0.total_cmp(&b.0));
    points
}

/// Accuracy under the paper's attack of families of models, compared with the network's own.
fn under_attack(found: &Found, families: Vec<(String, Vec<String>)>, paper: String, finding: String) -> Item {
    let row = |name: &str, sparsity: Option<f64>, step: &str| {
        let clean = number(found, &files::attacked(step), "clean_accuracy");
        let attacked = [0, 1].map(|k| percent(attacked_accuracy(found, step, k)));
        [vec![name.to_string(), percent(sparsity), percent(clean)], attacked.to_vec()].concat()
    };
    let mut rows = vec![row("baseline", Some(0.0), "baseline")];
    let mut series = Vec::new();
    for (name, steps) in families {
        rows.extend(steps.iter().map(|step| row(&name, number(found, step, "sparsity"), step)));
        let points = curve(found, steps.into_iter(), |s| Some(100.0 * attacked_accuracy(found, s, 1)?));
        series.push(Series::line(name, points));
    }
    let chart = Chart {
        x: "sparsity, %".into(),
        y: "accuracy at ε = 2/255, %".into(),
        series,
        level: attacked_accuracy(found, "baseline", 1).map(|b| (100.0 * b, "baseline".into())),
        log_x: false,
        least_y: None,
    };
    Item {
        id: "figure-4",
        title: "Figure 4: attacked accuracy against sparsity",
        paper,
        finding,
        head: vec!["method", "sparsity %", "clean %", "ε = 1/255", "ε = 2/255"],
        rows,
        picture: Some(Picture::chart(&chart, "Accuracy under attack against sparsity, with the baseline's")),
    }
}

/// A fraction in per cent, or a dash.
fn percent(value: Option<f64>) -> String {
    value.map_or("–".into(), |v| format!("{:.1}", 100.0 * v))
}

/// Accuracy minus the baseline's, in percentage points.
fn drop(found: &Found, step: &str) -> Option<f64> {
    Some(100.0 * (number(found, step, "accuracy")? - number(found, step, "baseline_accuracy")?))
}

/// A difference in percentage points, with its sign.
fn points(value: Option<f64>) -> String {
    value.map_or("–".into(), |v| format!("{v:+.2}").replace('-', "−"))
}
