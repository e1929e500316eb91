//! The short table that a person reads: baseline and model side by side.

use crate::results::Results;
use crate::table::{Table, bytes, count, or_dash, percent};

/// The line that `--certified` adds.
pub(crate) fn certified(error: Option<f64>) -> String {
    match error {
        Some(error) => format!("outputs within {error:.1e} of exact arithmetic"),
        None => {
            "no bound on the outputs' error: a layer that an operator computes, an expansive activation or a cycle \
                 without contraction"
                .to_string()
        }
    }
}

/// A table of the known results; unknown cells are dashes, and rows without any known cell are left out.
pub(crate) fn summary(results: &Results, baseline_bytes: Option<u64>) -> String {
    let r = results;
    let mut table = Table::with_head(&["", "baseline", "model", ""]);
    let change = |before: Option<u64>, after: Option<u64>| match (before, after) {
        (Some(before), Some(after)) if before > 0 => {
            let share = 1.0 - after as f64 / before as f64;
            format!("{:.1} % {}", 100.0 * share.abs(), if share >= 0.0 { "fewer" } else { "more" })
        }
        _ => String::new(),
    };
    let mut pair = |name: &str, before: String, after: String, remark: String| {
        if before != "–" || after != "–" {
            table.row(&[name, &before, &after, &remark]);
        }
    };
    pair(
        "parameters",
        or_dash(r.baseline_nonzeros, count),
        or_dash(r.nonzeros, count),
        change(r.baseline_nonzeros, r.nonzeros),
    );
    if let (Some(kept), Some(sparsity)) = (r.kept_nonzeros.filter(|n| *n > 0), r.trainable_sparsity) {
        let what = match r.kept_layers.as_ref().map_or(0, Vec::len) {
            0 => String::new(),
            layers => format!(" (with {layers} layer{} left out)", if layers == 1 { "" } else { "s" }),
        };
        pair("that stay", count(kept), count(kept), format!("{} fewer of the others{what}", percent(sparsity)));
    }
    pair("multiply-adds", or_dash(r.baseline_multiply_adds, count), or_dash(r.multiply_adds, count), String::new());
    let points = match (r.baseline_accuracy, r.accuracy) {
        (Some(before), Some(after)) => format!("{:+.2} points", 100.0 * (after - before)),
        _ => String::new(),
    };
    pair("accuracy", or_dash(r.baseline_accuracy, percent), or_dash(r.accuracy, percent), points);
    pair(
        "top-5 accuracy",
        or_dash(r.baseline_top5_accuracy, percent),
        or_dash(r.top5_accuracy, percent),
        String::new(),
    );
    let square = |v: f64| format!("{v:.4e}");
    let squares = [r.baseline_mean_squared_error, r.mean_squared_error].map(|v| or_dash(v, square));
    let [before, after] = squares;
    pair("mean squared error", before, after, String::new());
    pair("file size", or_dash(baseline_bytes, bytes), or_dash(r.model_bytes, bytes), String::new());
    let speed = match (r.baseline_milliseconds, r.milliseconds) {
        (Some(before), Some(after)) if after > 0.0 => {
            let threads = r.threads.map_or(String::new(), |n| format!(", {n} thread{}", if n == 1 { "" } else { "s" }));
            format!("{:.1} × as fast{threads}", before / after)
        }
        _ => String::new(),
    };
    let milliseconds = |v: f64| format!("{v:.2} ms");
    pair("1,000 samples", or_dash(r.baseline_milliseconds, milliseconds), or_dash(r.milliseconds, milliseconds), speed);
    let mut single = |name: &str, value: String| {
        table.row(&[name, &value]);
    };
    if let Some(agreement) = r.agreement {
        single("agreement", format!("{} of the samples are predicted as by the baseline", percent(agreement)));
    }
    if let Some(error) = r.equilibrium_error {
        let on = if r.on_training_inputs { ", on the training inputs" } else { "" };
        single("output error", format!("{} of the baseline's outputs (RMS){on}", percent(error)));
    }
    if let (Some(rows), Some(proven), Some(median), Some(worst)) =
        (r.rows_bounded, r.rows_proven, r.median_bound_distance, r.max_bound_distance)
    {
        let of = match r.rows.filter(|all| *all > rows) {
            Some(all) => format!("{rows} rows that were bounded ({all} in all)"),
            None => format!("{rows} rows"),
        };
        single("proven optimal", format!("{proven} of {of}, each as the problem that training solved for it"));
        single(
            "from the bound",
            format!(
                "{:.1} % of its cost for the median row, {:.1} % for the worst: no weights cost less than the bound",
                100.0 * median,
                100.0 * worst
            ),
        );
    }
    if let Some(gap) = r.max_relative_gap {
        single("worst gap", format!("{gap:.1e} of the objective, certified"));
    }
    if let (Some(norm), Some(bound)) = (r.norm_a_inf, r.lambda_pf_upper) {
        let verdict = if bound < 1.0 { "well-posed" } else { "not shown to be well-posed" };
        single("well-posedness", format!("{verdict}: λ_pf ≤ {bound:.3}, ‖A‖∞ = {norm:.3}"));
    }
    if let (Some(device), Some(rows), Some(total)) = (&r.device, r.rows_on_gpu.filter(|n| *n > 0), r.rows) {
        let rest = r.operators_on_cpu.as_ref().filter(|names| !names.is_empty());
        let rest = rest.map_or_else(String::new, |names| format!("; on the CPU: {}", names.join(", ")));
        single("device", format!("{device} solved {rows} of {total} rows{rest}"));
    }
    if let Some(total) = r.seconds.get("total") {
        single("time", format!("{total:.1} s"));
    }
    table.show()
}
