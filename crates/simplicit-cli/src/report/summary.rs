//! The head of the page, its table, and the provenance of the model.

use super::Input;
use super::text::{bytes, count, counted, escape, fixed, known, percent, scientific, seconds, signed, three_digits};

/// Title, one sentence, what was gained and lost in large figures, and the table.
pub(super) fn section(input: &Input) -> String {
    let sparsity = input.model.sparsity();
    let shape = input.model.shape();
    let posed = input.model.well_posedness();
    let change = input.accuracy.zip(input.baseline_accuracy).map(|(now, before)| 100.0 * (now - before));
    let lead = format!(
        "An implicit model x = φ(Ax + Bu + b), ŷ = Cx + Du + d with {}, {} in {} and {}.",
        counted(shape.inputs, "input"),
        counted(shape.states, "state"),
        counted(input.model.layout().layers().len(), "layer"),
        counted(shape.outputs, "output")
    );
    let removed_of = match input.model.metadata().baseline_nonzeros {
        Some(_) => "share of the baseline's parameters removed",
        None => "share of all entries of M; the baseline is not known",
    };
    let mut tiles = vec![(percent(sparsity.sparsity, 1), "sparsity", removed_of.to_string())];
    if let (Some(change), Some(before), Some(now)) = (change, input.baseline_accuracy, input.accuracy) {
        let value = format!("{} points", signed(change, 2));
        tiles.push((value, "accuracy", format!("{} → {}", percent(before, 2), percent(now, 2))));
    }
    if let (Some(now), Some(before)) = (input.milliseconds, input.baseline_milliseconds)
        && now > 0.0
    {
        let on = input.threads.map_or(String::new(), |t| format!(", {}", counted(t, "thread")));
        tiles.push((format!("{} ×", fixed(before / now, 1)), "speed", format!("over the dense network here{on}")));
    }
    if let Some(before) = input.baseline_bytes.filter(|_| sparsity.bytes > 0) {
        let times = fixed(before as f64 / sparsity.bytes as f64, 1);
        let sizes = format!("{} → {}", bytes(before), bytes(sparsity.bytes));
        tiles.push((format!("{times} ×"), "smaller file", sizes));
    }
    if let Some((median, worst)) = distances(input) {
        tiles.push((
            proven(input),
            "rows proven optimal",
            format!("distance to the bound: median {}, worst {}", percent(median, 1), percent(worst, 1)),
        ));
    } else if let Some(gap) = worst_gap(input) {
        tiles.push((scientific(gap), "worst gap", "certified, relative, of all rows' convex solves".into()));
    }
    // A model without cycles has no bound to show here.
    if !posed.acyclic {
        let word = if posed.is_shown() { "shown" } else { "not shown" };
        tiles.push((word.into(), "well-posedness", posedness(&posed)));
    }
    let tiles: String = tiles
        .iter()
        .map(|(value, name, note)| {
            format!("<div class=\"tile\"><dt>{name}</dt><dd>{value}<small>{note}</small></dd></div>\n")
        })
        .collect();
    format!(
        "<header>\n<h1>{}</h1>\n<p class=\"lead\">{lead}</p>\n</header>\n<section aria-label=\"Summary\">\n\
         <dl class=\"tiles\">\n{tiles}</dl>\n{}</section>\n",
        escape(input.title),
        table(input)
    )
}

fn worst_gap(input: &Input) -> Option<f64> {
    input.rows.iter().filter_map(|r| r.relative_gap).reduce(f64::max)
}

/// The number of rows proven optimal, of those that have a bound.
fn proven(input: &Input) -> String {
    let bounded = input.rows.iter().filter(|r| r.bound_distance.is_some()).count();
    let proven = input.rows.iter().filter(|r| r.proven).count();
    format!("{} of {}", count(proven as u64), count(bounded as u64))
}

/// Median and largest distance of a cardinality row to its lower bound.
fn distances(input: &Input) -> Option<(f64, f64)> {
    let mut all: Vec<f64> = input.rows.iter().filter_map(|r| r.bound_distance).collect();
    all.sort_unstable_by(f64::total_cmp);
    Some((*all.get(all.len() / 2)?, *all.last()?))
}

fn posedness(posed: &simplicit::model::WellPosedness) -> String {
    if posed.acyclic {
        "acyclic, so λ<sub>pf</sub>(|A|) = 0".into()
    } else {
        format!("λ<sub>pf</sub>(|A|) ≤ {}", three_digits(posed.lambda_pf_upper))
    }
}

/// One row of the table: name, before, after, change.
struct Row(String, String, String, String);

fn table(input: &Input) -> String {
    let sparsity = input.model.sparsity();
    let posed = input.model.well_posedness();
    let samples = known(input.test_samples, |n| format!("{} test samples", count(n as u64)));
    let measured = if input.test_samples.is_some() { format!(" <small>{samples}</small>") } else { String::new() };
    let removed = |before: Option<u64>, after: u64| {
        known(before.filter(|b| *b > 0), |b| format!("{} %", signed(100.0 * (after as f64 / b as f64 - 1.0), 1)))
    };
    let rows_at_limit = input.rows.iter().filter(|r| r.at_limit).count();
    let threads = known(input.threads, |t| format!(", {}", counted(t, "thread")));
    let threads = if input.threads.is_some() { threads } else { String::new() };
    let stuck = input.diagnostics.iter().filter(|d| !d.converged).count();
    let mut rows = vec![
        Row(
            match input.model.metadata().baseline_nonzeros {
                Some(_) => "Parameters <small>non-zero</small>".into(),
                None => "Parameters <small>non-zero, against every entry of M</small>".into(),
            },
            count(sparsity.baseline_nonzeros),
            count(sparsity.nonzeros),
            removed(Some(sparsity.baseline_nonzeros), sparsity.nonzeros),
        ),
        Row(
            "Multiply-adds <small>per sample</small>".into(),
            known(sparsity.baseline_multiply_adds, count),
            count(sparsity.multiply_adds),
            removed(sparsity.baseline_multiply_adds, sparsity.multiply_adds),
        ),
        Row(
            "File size".into(),
            known(input.baseline_bytes, bytes),
            bytes(sparsity.bytes),
            removed(input.baseline_bytes, sparsity.bytes),
        ),
        Row(
            format!("Accuracy{measured}"),
            known(input.baseline_accuracy, |a| percent(a, 2)),
            known(input.accuracy, |a| percent(a, 2)),
            known(input.accuracy.zip(input.baseline_accuracy), |(a, b)| {
                format!("{} points", signed(100.0 * (a - b), 2))
            }),
        ),
        Row(
            "Same prediction as the baseline".into(),
            String::new(),
            known(input.agreement, |a| percent(a, 2)),
            String::new(),
        ),
        Row(
            "Output error <small>RMS, relative to the baseline's outputs</small>".into(),
            String::new(),
            known(input.equilibrium_error, |e| percent(e, 2)),
            String::new(),
        ),
        Row(
            format!("Time for 1,000 samples <small>ms{threads}</small>"),
            known(input.baseline_milliseconds, three_digits),
            known(input.milliseconds, three_digits),
            known(input.milliseconds.zip(input.baseline_milliseconds), |(now, before)| {
                if now <= before {
                    format!("{} × faster", fixed(before / now, 1))
                } else {
                    format!("{} × slower", fixed(now / before, 1))
                }
            }),
        ),
        Row(
            "Well-posedness".into(),
            String::new(),
            if posed.is_shown() { "shown".into() } else { "not shown".into() },
            format!("{}, ‖A‖<sub>∞</sub> = {}", posedness(&posed), three_digits(posed.norm_a_inf)),
        ),
    ];
    if let Some((median, worst)) = distances(input) {
        let what = "Rows proven optimal <small>each as the problem that training solved for it, in its statistics, before \
                    rounding and output refit</small>";
        let far = format!("distance to the lower bound: median {}, worst {}", percent(median, 1), percent(worst, 1));
        rows.push(Row(what.into(), String::new(), proven(input), far));
    }
    if let Some(gap) = worst_gap(input) {
        let limits = format!("{} at a limit", counted(rows_at_limit, "row"));
        rows.push(Row("Worst gap <small>relative, convex rows</small>".into(), String::new(), scientific(gap), limits));
    }
    if !input.diagnostics.is_empty() && !posed.acyclic {
        rows.push(Row("Samples not converged".into(), String::new(), count(stuck as u64), String::new()));
    }
    rows.push(Row("Time of the run".into(), String::new(), known(input.seconds, seconds), String::new()));
    let mut table = String::from(
        "<div class=\"wide\"><table class=\"summary\"><thead><tr><th></th><th scope=\"col\" class=\"num\">baseline</th>\
         <th scope=\"col\" class=\"num\">model</th><th scope=\"col\">change</th></tr></thead><tbody>\n",
    );
    for Row(what, before, after, change) in rows {
        table += &format!(
            "<tr><th scope=\"row\">{what}</th><td class=\"num\">{before}</td><td class=\"num\">{after}</td><td>{change}</td></tr>\n"
        );
    }
    table + "</tbody></table></div>\n"
}

/// Phases, settings and the model's own provenance.
pub(super) fn provenance(input: &Input) -> String {
    let metadata = input.model.metadata();
    let mut facts: Vec<(String, String)> =
        input.settings.iter().map(|(key, value)| (escape(key), escape(value))).collect();
    let shown: Vec<&str> = input.settings.iter().map(|(key, _)| key.as_str()).collect();
    if let Some(kappa) = metadata.kappa.filter(|_| !shown.contains(&"kappa")) {
        facts.push(("kappa".into(), kappa.to_string()));
    }
    for (key, value) in metadata.provenance.iter().filter(|(key, _)| !shown.contains(&key.as_str())) {
        facts.push((escape(key), escape(value)));
    }
    let mut out = String::from("<div class=\"grid small\">\n");
    out += &listing("Settings and provenance", &facts, "Nothing is recorded in this model.");
    let mut times: Vec<(String, String)> = input.phases.iter().map(|(name, s)| (escape(name), seconds(*s))).collect();
    if let Some(total) = input.seconds {
        times.push(("total".into(), seconds(total)));
    }
    out += &listing("Time per phase", &times, "Not known.");
    let layers: Vec<(String, String)> = input
        .model
        .layout()
        .layers()
        .iter()
        .rev()
        .map(|l| (escape(&l.name), format!("{} × {}", count(l.size as u64), escape(&l.activation.to_string()))))
        .collect();
    out += &listing("Layers, first to last", &layers, "No layer.");
    out + "</div>\n"
}

fn listing(title: &str, facts: &[(String, String)], otherwise: &str) -> String {
    if facts.is_empty() {
        return format!("<div class=\"card\"><h3>{title}</h3><p class=\"muted\">{otherwise}</p></div>\n");
    }
    let rows: String =
        facts.iter().map(|(key, value)| format!("<tr><th scope=\"row\">{key}</th><td>{value}</td></tr>")).collect();
    format!("<div class=\"card\"><h3>{title}</h3><table class=\"facts\"><tbody>{rows}</tbody></table></div>\n")
}
