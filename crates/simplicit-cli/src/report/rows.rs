//! Residual and gap of every row of M.

use super::svg::{Axis, Plot, Point};
use super::text::{count, counted, plain, scientific};
use super::{Input, figure};

const X_LABEL: &str = "row of M (last layer first, outputs at the end)";

/// A plot over the rows, with a thin line between layers.
fn over_rows(input: &Input, y: Axis) -> Plot {
    let mut plot = Plot::new(Axis::linear(0.0, input.rows.len() as f64, X_LABEL), y);
    let layout = input.model.layout();
    for k in 0..layout.layers().len() {
        plot.divider(layout.range(k).end as f64);
    }
    plot
}

pub(super) fn residuals(input: &Input) -> String {
    const TITLE: &str = "Row residuals";
    if input.rows.is_empty() {
        return String::new();
    }
    let values = input.rows.iter().map(|r| r.relative_residual);
    let mut plot = over_rows(input, Axis::log(values, "relative residual"));
    let points: Vec<Point> = input
        .rows
        .iter()
        .enumerate()
        .map(|(k, row)| Point {
            x: k as f64 + 0.5,
            y: row.relative_residual,
            name: format!("{}: {}, {}", row.name, plain(row.relative_residual), counted(row.nonzeros, "non-zero")),
            class: "model",
        })
        .collect();
    plot.points(&points);
    let filled = input.rows.iter().filter(|r| r.nonzeros > 0);
    let empty = input.rows.len() - filled.clone().count();
    let worst = filled.map(|r| r.relative_residual).fold(0.0, f64::max);
    let caption = format!(
        "‖z − Ũᵀw‖ / ‖z‖ of every stored row on the training samples, at the features it was fitted to. The largest of \
         a row with a non-zero is {}; {} rows are empty (their residual is 1, or 0 if there was nothing to fit). Dotted \
         lines separate the layers.",
        scientific(worst),
        count(empty as u64)
    );
    figure(TITLE, &plot.finish("Relative residual of every row of M on a logarithmic axis."), &caption)
}

pub(super) fn gaps(input: &Input) -> String {
    const TITLE: &str = "Distance from the optimum";
    let gaps: Vec<f64> = input.rows.iter().filter_map(|r| r.relative_gap).collect();
    let bounds: Vec<f64> = input.rows.iter().filter_map(|r| r.bound_distance).collect();
    if input.rows.is_empty() {
        return String::new();
    }
    if gaps.is_empty() && bounds.is_empty() {
        return String::new();
    }
    let mut plot = over_rows(input, Axis::log(gaps.iter().chain(&bounds).copied(), "relative distance"));
    let point = |k: usize, y: f64, what: &str, class: &'static str| Point {
        x: k as f64 + 0.5,
        y,
        name: format!("{}: {what} {}", input.rows[k].name, plain(y)),
        class,
    };
    let mut points = Vec::with_capacity(gaps.len() + bounds.len());
    for (k, row) in input.rows.iter().enumerate() {
        if let Some(bound) = row.bound_distance {
            points.push(point(k, bound, "distance to the lower bound", "hollow"));
        }
        if let Some(gap) = row.relative_gap {
            points.push(point(k, gap, "gap", if row.at_limit { "loss" } else { "model" }));
        }
    }
    plot.points(&points);
    let mut caption = String::new();
    if let Some(worst) = gaps.iter().copied().reduce(f64::max) {
        let limited = input.rows.iter().filter(|r| r.at_limit).count();
        caption += &format!(
            "Filled: certified relative gap of a row's last convex solve; the worst is {}. {} stopped at a limit{}. ",
            scientific(worst),
            counted(limited, "row"),
            if limited > 0 { " (red)" } else { "" }
        );
    }
    if let Some(worst) = bounds.iter().copied().reduce(f64::max) {
        caption += &format!(
            "Hollow: distance of a row from the certified lower bound of its problem, (value − bound) / value, in the statistics \
             that it was solved from, before rounding and output refit; the worst is {}. ",
            scientific(worst)
        );
    }
    let zeros = gaps.iter().chain(&bounds).filter(|v| **v <= 0.0).count();
    if zeros > 0 {
        caption += &format!("{} are exactly zero and stand on the lower edge.", count(zeros as u64));
    }
    figure(
        TITLE,
        &plot.finish("Relative distance of every row of M from its optimum on a logarithmic axis."),
        caption.trim_end(),
    )
}
