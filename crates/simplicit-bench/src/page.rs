//! The tables, the plot and what can be said about them: the part of the experiment's page that the command writes.

use std::fmt::Write;

use simplicit_cli::report::{Chart, Series};

use crate::experiment::{CYCLIC_UP_TO, OURS, Outcome, Row};

/// Where the generated part begins and ends in a page.
const BEGIN: &str = "<!-- written by the command: begin -->";
const END: &str = "<!-- written by the command: end -->";
/// A model this close to its level counts as at its level: the difference is not mentioned.
const MET: f64 = 0.002;

/// The page with its generated part replaced; `None` if the two marks are not there.
pub fn fill(page: &str, generated: &str) -> Option<String> {
    let (before, rest) = page.split_once(BEGIN)?;
    let (_, after) = rest.split_once(END)?;
    Some(format!("{before}{BEGIN}\n\n{generated}\n{END}{after}"))
}

/// Mean and, with more than one seed, half of the range of a method's accuracy change, in points.
fn change<'a>(rows: impl Iterator<Item = &'a Row>, baseline: f64) -> Option<(f64, Option<f64>)> {
    let values: Vec<f64> = rows.map(|r| 100.0 * (r.accuracy - baseline)).collect();
    let mean = values.iter().sum::<f64>() / values.len() as f64;
    let low = values.iter().copied().fold(f64::INFINITY, f64::min);
    let high = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    (!values.is_empty()).then(|| (mean, (values.len() > 1).then_some(0.5 * (high - low))))
}

fn methods(rows: &[Row]) -> Vec<&str> {
    let mut out: Vec<&str> = Vec::new();
    for row in rows {
        if !out.contains(&row.method.as_str()) {
            out.push(&row.method);
        }
    }
    out
}

fn at<'a>(rows: &'a [Row], method: &'a str, level: f64) -> impl Iterator<Item = &'a Row> {
    rows.iter().filter(move |r| r.method == method && r.level == level)
}

fn points((mean, spread): (f64, Option<f64>)) -> String {
    let spread = spread.map_or_else(String::new, |s| format!(" ± {s:.2}"));
    format!("{mean:+.2}{spread}").replace('-', "−")
}

/// Says where a model's sparsity differs from its level.
fn missed<'a>(rows: impl Iterator<Item = &'a Row>, level: f64) -> String {
    let furthest = rows.map(|r| r.sparsity).max_by(|a, b| (a - level).abs().total_cmp(&(b - level).abs()));
    furthest.filter(|s| (s - level).abs() > MET).map_or_else(String::new, |s| format!(" (at {:.1} %)", 100.0 * s))
}

/// One row as a line of text, for the progress of the command.
pub fn line(row: &Row) -> String {
    let Row { method, choice, seed, level, sparsity, accuracy, agreement, seconds, .. } = row;
    let [level, sparsity, accuracy, agreement] = [level, sparsity, accuracy, agreement].map(|v| 100.0 * v);
    let choice = if choice.is_empty() { String::new() } else { format!(" ({choice})") };
    format!(
        "seed {seed}, {level:.0} %: {method}{choice} has {accuracy:.2} % at {sparsity:.2} %, agrees on {agreement:.2} %, \
         took {seconds:.0} s"
    )
}

/// The tables and sentences of the page, in Markdown.
pub fn markdown(outcome: &Outcome) -> String {
    let Outcome { plan, rows, baseline_accuracy, .. } = outcome;
    let mut out = String::new();
    let _ = writeln!(
        out,
        "Baseline {:.2} %, {} parameters; {} training images and {} held out per seed, {} seed(s). Change of test \
         accuracy in points, mean ± half of the range over seeds:\n",
        100.0 * baseline_accuracy,
        outcome.baseline_nonzeros,
        plan.samples,
        plan.held_out,
        plan.seeds.len()
    );
    let names = methods(rows);
    let _ = writeln!(out, "| sparsity | {} |", names.join(" | "));
    let _ = writeln!(out, "|---|{}", "---|".repeat(names.len()));
    for &level in &plan.levels {
        let best = names.iter().filter_map(|m| change(at(rows, m, level), *baseline_accuracy)).map(|c| c.0);
        let best = best.fold(f64::NEG_INFINITY, f64::max);
        let cells: Vec<String> = names
            .iter()
            .map(|m| match change(at(rows, m, level), *baseline_accuracy) {
                Some(c) if c.0 == best => format!("**{}**{}", points(c), missed(at(rows, m, level), level)),
                Some(c) => format!("{}{}", points(c), missed(at(rows, m, level), level)),
                None => "–".into(),
            })
            .collect();
        let _ = writeln!(out, "| {:.0} % | {} |", 100.0 * level, cells.join(" | "));
    }
    let _ = writeln!(out, "\n{}", verdict(outcome));
    choices(outcome, &mut out);
    certificates(outcome, &mut out);
    connectivity(outcome, &mut out);
    let time = |rows: &[Row], name: &str| rows.iter().filter(|r| r.method == name).map(|r| r.seconds).sum::<f64>();
    let spent = names.iter().map(|m| format!("{m} {:.0} s", time(rows, m)));
    let of_connectivity = &outcome.connectivity;
    let connected = methods(of_connectivity);
    let spent = spent.chain(connected.iter().map(|m| format!("connectivity {m} {:.0} s", time(of_connectivity, m))));
    let _ = writeln!(
        out,
        "Wall-clock time for all seeds and levels, choosing included: {}.",
        spent.collect::<Vec<_>>().join(", ")
    );
    out
}

/// A table of what was chosen for the rivals.
fn choices(outcome: &Outcome, out: &mut String) {
    let rivals: Vec<&str> = methods(&outcome.rows).into_iter().filter(|m| *m != OURS).collect();
    if rivals.is_empty() {
        return;
    }
    let _ = writeln!(
        out,
        "What the rivals' held-out images chose (the most frequent choice of allocation per level):\n\n| sparsity | {} |",
        rivals.join(" | ")
    );
    let _ = writeln!(out, "|---|{}", "---|".repeat(rivals.len()));
    for &level in &outcome.plan.levels {
        let cells: Vec<String> = rivals.iter().map(|m| most_frequent(at(&outcome.rows, m, level))).collect();
        let _ = writeln!(out, "| {:.0} % | {} |", 100.0 * level, cells.join(" | "));
    }
    out.push('\n');
}

fn most_frequent<'a>(rows: impl Iterator<Item = &'a Row>) -> String {
    let choices: Vec<&str> = rows.map(|r| r.choice.as_str()).collect();
    let count = |c: &str| choices.iter().filter(|d| **d == c).count();
    choices.iter().copied().max_by_key(|c| count(c)).unwrap_or("–").to_string()
}

/// Sentences that say which method is ahead at which level.
fn verdict(outcome: &Outcome) -> String {
    let Outcome { plan, rows, baseline_accuracy, .. } = outcome;
    let names = methods(rows);
    let Some((ours, rivals)) = names.split_first().filter(|(first, rest)| **first == OURS && !rest.is_empty()) else {
        return String::new();
    };
    let measured = |level: &f64| names.iter().all(|m| at(rows, m, *level).next().is_some());
    let scope =
        if plan.levels.iter().all(measured) { "every level" } else { "every level at which both were measured" };
    let mut behind = Vec::new();
    for &level in &plan.levels {
        let Some((own, _)) = change(at(rows, ours, level), *baseline_accuracy) else { continue };
        for rival in rivals {
            if let Some((other, _)) = change(at(rows, rival, level), *baseline_accuracy)
                && other > own
            {
                behind.push(format!("{:.0} % ({rival} by {:.2})", 100.0 * level, other - own));
            }
        }
    }
    if behind.is_empty() {
        format!("{ours} is ahead of every rival at {scope}.\n")
    } else {
        format!("{ours} is ahead of every rival at {scope} but: {}.\n", behind.join(", "))
    }
}

fn certificates(outcome: &Outcome, out: &mut String) {
    let Some(distance) = outcome.rows.iter().filter_map(|r| r.max_bound_distance).reduce(f64::max) else { return };
    let _ = writeln!(
        out,
        "Certificates of ours: no row is further above the certified lower bound of its problem than {:.0} % of its cost.\n",
        100.0 * distance
    );
}

fn connectivity(outcome: &Outcome, out: &mut String) {
    let Outcome { plan, connectivity: rows, baseline_accuracy, .. } = outcome;
    if rows.is_empty() {
        return;
    }
    let _ = writeln!(
        out,
        "Connectivities at equal count ({} training images up to {:.0} %, {} beyond, {} seed(s); the cyclic ones in \
         coordinates in which the baseline needs κ = 0.99): change of test accuracy in points, in brackets the share of \
         held-out images predicted as by the baseline and, where there are cycles, the certified upper bounds on λ_pf.\n",
        plan.connectivity_samples,
        100.0 * CYCLIC_UP_TO,
        plan.samples,
        plan.connectivity_seeds
    );
    let head: Vec<String> = plan.connectivity_levels.iter().map(|level| format!("{:.0} %", 100.0 * level)).collect();
    let _ = writeln!(out, "| connectivity | {} |", head.join(" | "));
    let _ = writeln!(out, "|---|{}", "---|".repeat(head.len()));
    for name in methods(rows) {
        let cell = |&level: &f64| {
            let of = || at(rows, name, level);
            let Some(c) = change(of(), *baseline_accuracy) else { return "–".to_string() };
            let agreement = of().map(|r| r.agreement).sum::<f64>() / of().count() as f64;
            let (low, high) =
                of().map(|r| r.lambda_pf_upper).fold((f64::INFINITY, 0.0), |(a, b), l| (l.min(a), l.max(b)));
            let lambda = match (high == 0.0, format!("{low:.2}"), format!("{high:.2}")) {
                (true, ..) => String::new(),
                (_, low, high) if low == high => format!(", λ_pf ≤ {low}"),
                (_, low, high) => format!(", λ_pf ≤ {low} to {high}"),
            };
            format!("{} ({:.2} %{lambda}){}", points(c), 100.0 * agreement, missed(of(), level))
        };
        let cells: Vec<String> = plan.connectivity_levels.iter().map(cell).collect();
        let _ = writeln!(out, "| {name} | {} |", cells.join(" | "));
    }
    out.push('\n');
}

/// The trade-off curves as an SVG of its own.
pub fn plot(outcome: &Outcome) -> String {
    let points = |method: &str| {
        let levels = outcome.plan.levels.iter();
        levels
            .filter_map(|&level| {
                let (mean, _) = change(at(&outcome.rows, method, level), outcome.baseline_accuracy)?;
                Some((100.0 * level, mean))
            })
            .collect()
    };
    let chart = Chart {
        x: "sparsity, %".into(),
        y: "change of test accuracy, points".into(),
        series: methods(&outcome.rows).into_iter().map(|m| Series::line(m, points(m))).collect(),
        level: Some((0.0, "baseline".into())),
        log_x: false,
        least_y: Some(-5.0),
    };
    chart.svg("Change of test accuracy against sparsity for simplicit and its rivals")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn only_the_marked_part_of_a_page_changes() {
        let page = format!("before\n{BEGIN}\nold\n{END}\nafter\n");
        let once = fill(&page, "new").unwrap();
        assert_eq!(once, format!("before\n{BEGIN}\n\nnew\n{END}\nafter\n"));
        assert_eq!(fill(&once, "new").unwrap(), once);
        assert_eq!(fill("no marks", "new"), None);
    }

    fn row(method: &str, seed: u64, level: f64, accuracy: f64) -> Row {
        Row {
            method: method.into(),
            choice: "κ = 0.5".into(),
            seed,
            level,
            sparsity: level,
            agreement: 0.9,
            accuracy,
            lambda_pf_upper: if method == "full" { 0.5 } else { 0.0 },
            max_bound_distance: None,
            max_relative_gap: None,
            seconds: 1.6,
        }
    }

    #[test]
    fn tables_and_verdict_say_who_is_ahead_where() {
        let plan = crate::experiment::Plan {
            samples: 10,
            methods: vec![OURS.into()],
            held_out: 5,
            seeds: vec![0, 1],
            levels: vec![0.5, 0.9],
            connectivity_levels: vec![0.36],
            connectivity_seeds: 1,
            connectivity_samples: 10,
            kappas: vec![0.5],
        };
        let outcome = Outcome {
            plan,
            baseline_accuracy: 0.88,
            baseline_nonzeros: 100,
            rows: vec![
                row("simplicit", 0, 0.5, 0.88),
                row("simplicit", 1, 0.5, 0.87),
                row("simplicit", 0, 0.9, 0.80),
                row("rival", 0, 0.5, 0.86),
                row("rival", 0, 0.9, 0.85),
            ],
            connectivity: vec![row("baseline", 0, 0.36, 0.88), row("full", 0, 0.36, 0.86)],
        };
        let text = markdown(&outcome);
        assert!(text.contains("| 50 % | **−0.50 ± 0.50** | −2.00 |"), "{text}");
        assert!(text.contains("at every level but: 90 % (rival by 5.00)."), "{text}");
        assert!(text.contains("| full | −2.00 (90.00 %, λ_pf ≤ 0.50) |"), "{text}");
        assert!(text.contains("choosing included: simplicit 5 s, rival 3 s, connectivity baseline 2 s,"), "{text}");
        assert!(plot(&outcome).contains("rival"));
        // A later run replaces some rows and adds a level; rows of other samples are refused.
        let mut later = outcome.clone();
        later.plan.levels = vec![0.5, 0.7];
        later.rows = vec![row("simplicit", 0, 0.5, 0.89), row("simplicit", 0, 0.7, 0.88)];
        later.connectivity.clear();
        let merged = later.clone().over(outcome.clone()).unwrap();
        assert_eq!(merged.plan.levels, [0.5, 0.7, 0.9]);
        assert_eq!((merged.rows.len(), merged.connectivity.len()), (6, 2));
        let text = markdown(&merged);
        assert!(text.contains("| 50 % | **+0.00 ± 1.00** | −2.00 |"), "{text}");
        assert!(text.contains("| 70 % | **+0.00** | – |"), "{text}");
        assert!(text.contains("at every level at which both were measured but: 90 %"), "{text}");
        later.plan.samples = 11;
        assert!(later.over(outcome).unwrap_err().to_string().contains("samples"));
    }
}
