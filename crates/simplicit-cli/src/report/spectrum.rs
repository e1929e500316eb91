//! Singular values of A and its numerical rank.

use simplicit::evaluate::{Rank, rank};

use super::svg::{Axis, Plot, Point};
use super::text::{count, escape, plain, scientific};
use super::{Input, absent, figure as framed};

/// Values further below the tolerance than this factor are rounding of no interest and would only stretch the axis.
const DEPTH: f64 = 1e-3;

pub(super) fn figure(input: &Input) -> String {
    const TITLE: &str = "Singular values of A";
    let after = match rank(input.model.a()) {
        Ok(after) => after,
        Err(e) => return absent(TITLE, &escape(&e.to_string())),
    };
    let n = after.singular_values.len();
    if after.rank == 0 {
        return absent(TITLE, "A has no non-zero: every state depends on the inputs alone.");
    }
    let before = input.baseline.and_then(|b| rank(b.a()).ok());
    let shown = |r: &Rank| -> Vec<f64> {
        r.singular_values.iter().copied().filter(|v| *v > DEPTH * r.tolerance && *v > 0.0).collect()
    };
    let (now, then) = (shown(&after), before.as_ref().map(shown).unwrap_or_default());
    let values = now.iter().chain(&then).copied().chain([after.tolerance]);
    let mut plot = Plot::new(
        Axis::linear(0.0, now.len().max(then.len()) as f64 + 1.0, "index"),
        Axis::log(values.collect::<Vec<_>>().into_iter(), "singular value"),
    );
    plot.line(then.iter().enumerate().map(|(k, v)| (k as f64 + 1.0, *v)), "baseline");
    let points: Vec<Point> = now
        .iter()
        .enumerate()
        .map(|(k, v)| Point { x: k as f64 + 1.0, y: *v, name: format!("σ{} = {}", k + 1, plain(*v)), class: "model" })
        .collect();
    plot.points(&points);
    plot.level(after.tolerance, "tolerance");
    let key = match &before {
        Some(_) => {
            "<ul class=\"key\"><li><i class=\"dot\"></i>model</li><li><i class=\"stroke\"></i>baseline</li></ul>"
        }
        None => "",
    };
    let beside = before.map(|b| format!(" (baseline: {})", count(b.rank as u64))).unwrap_or_default();
    let left_out = n - now.len();
    let rest = match left_out {
        0 => String::new(),
        _ => format!(" {} values at or near zero are not drawn.", count(left_out as u64)),
    };
    let caption = format!(
        "Numerical rank {} of {}{beside}: singular values above n·ε·σ₁ = {}, ε that of float32. Largest: {}.{rest}",
        count(after.rank as u64),
        count(n as u64),
        scientific(after.tolerance),
        scientific(after.singular_values[0]),
    );
    let alt = format!("Singular values of A in falling order on a logarithmic axis; numerical rank {}.", after.rank);
    framed(TITLE, &format!("{key}{}", plot.finish(&alt)), &caption)
}
