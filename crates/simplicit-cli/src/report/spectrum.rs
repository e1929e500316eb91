//! Singular values of A and its numerical rank.

use simplicit::evaluate::{Rank, rank};
use simplicit::model::{ImplicitModel, TapWeights, Target};

use super::svg::{Axis, Plot, Point};
use super::text::{count, escape, plain, scientific};
use super::{Input, figure as framed};

/// Values that are smaller than the tolerance times this factor are rounding errors; they would only stretch the
/// axis.
const DEPTH: f64 = 1e-3;

pub(super) fn figure(input: &Input) -> String {
    const TITLE: &str = "Singular values of A";
    if input.model.taps().iter().any(|b| matches!(b.weights, TapWeights::Taps(_))) {
        return taps(input.model);
    }
    let Ok(after) = rank(input.model.a()) else { return String::new() };
    let n = after.singular_values.len();
    if after.rank == 0 {
        return String::new();
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

/// For shared weights the unrolled A is too large to decompose; shown is the rank of every block of taps as a matrix,
/// channels × taps.
fn taps(model: &ImplicitModel) -> String {
    const TITLE: &str = "Rank of the taps";
    let mut table = String::from(
        "<div class=\"scroll\"><table><thead><tr><th scope=\"col\">layer</th><th scope=\"col\" class=\"num\">channels × taps</th>\
         <th scope=\"col\" class=\"num\">rank</th><th scope=\"col\" class=\"num\">σ₁</th></tr></thead><tbody>",
    );
    let layers = model.layout().layers();
    let targets = (0..layers.len()).rev().map(Target::Layer).chain([Target::Output]);
    for block in targets.flat_map(|target| model.summands(target)) {
        let TapWeights::Taps(weights) = &block.weights else { continue };
        let name = match block.target {
            Target::Layer(k) => escape(&layers[k].name),
            Target::Output => "outputs".into(),
        };
        let (found, largest) = match rank(weights) {
            Ok(r) => (count(r.rank as u64), r.singular_values.first().map_or("–".into(), |v| scientific(*v))),
            Err(_) => ("–".into(), "–".into()),
        };
        table += &format!(
            "<tr><th scope=\"row\">{name}</th><td class=\"num\">{} × {}</td><td class=\"num\">{found}</td><td class=\"num\">{largest}</td></tr>",
            count(weights.rows() as u64),
            count(weights.cols() as u64),
        );
    }
    table += "</tbody></table></div>";
    framed(
        TITLE,
        &table,
        "Numerical rank of every block as a matrix of output channels × taps, and its largest singular value. The unrolled A \
         repeats these weights at every position and is not decomposed.",
    )
}
