//! Accuracy against the size of the perturbation: attacked, and certified.

use simplicit::attack::Norm;

use super::svg::{Axis, Plot, Point};
use super::text::{escape, fixed, percent};
use super::{Input, figure as framed};

/// Accuracies over ε, from `attack --json` and `certify --json`. Each list has one value per ε, in the order of
/// `epsilon`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Robustness {
    /// Share of samples that are classified correctly without any change.
    pub clean: f64,
    /// The curves, in the order in which the page explains them.
    pub curves: Vec<RobustnessCurve>,
    /// How ε is measured.
    pub norm: Norm,
}

/// One curve: accuracies over ε.
#[derive(Debug, Clone, PartialEq)]
pub struct RobustnessCurve {
    /// What the curve shows.
    pub kind: RobustnessKind,
    /// Pairs of ε (in raw·scale units) and accuracy.
    pub points: Vec<(f64, f64)>,
}

/// The attack or bound that a curve belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RobustnessKind {
    /// Attacks along the baseline's gradient.
    Transfer,
    /// Attacks along the model's own gradient, and everything weaker.
    WhiteBox,
    /// Accuracy that is proved.
    Certified,
}

impl RobustnessKind {
    fn name(self) -> &'static str {
        match self {
            RobustnessKind::Transfer => "transferred attacks",
            RobustnessKind::WhiteBox => "white-box attacks",
            RobustnessKind::Certified => "certified",
        }
    }

    fn class(self) -> &'static str {
        match self {
            RobustnessKind::Transfer => "baseline",
            RobustnessKind::WhiteBox => "loss",
            RobustnessKind::Certified => "gain",
        }
    }
}

/// One figure for each norm.
pub(super) fn figures(input: &Input) -> Vec<String> {
    input.robustness.iter().map(figure).collect()
}

fn figure(robustness: &Robustness) -> String {
    const TITLE: &str = "Accuracy against the size of the change";
    let known = |(e, a): &(f64, f64)| e.is_finite() && a.is_finite();
    let points = robustness.curves.iter().flat_map(|c| &c.points).filter(|p| known(p));
    let widest = points.clone().map(|p| 255.0 * p.0).fold(0.0, f64::max);
    if points.count() == 0 || !robustness.clean.is_finite() {
        return String::new();
    }
    let (axis, change) = match robustness.norm {
        Norm::Linf => ("largest change ε, in 1/255", "every value may change by ε"),
        Norm::L2 => ("Euclidean length of the change ε, in 1/255", "the change may be ε long"),
    };
    let mut plot = Plot::new(Axis::linear(0.0, widest, axis), Axis::linear(0.0, 1.0, "accuracy"));
    plot.level(robustness.clean, "clean");
    let mut key = String::from("<ul class=\"key\">");
    let mut parts = Vec::new();
    for curve in &robustness.curves {
        let (name, class) = (curve.kind.name(), curve.kind.class());
        let mut at: Vec<(f64, f64)> = curve.points.iter().filter(|p| known(p)).map(|(e, a)| (255.0 * e, *a)).collect();
        at.sort_by(|a, b| a.0.total_cmp(&b.0));
        plot.line([(0.0, robustness.clean)].into_iter().chain(at.iter().copied()), class);
        let points: Vec<Point> = at
            .iter()
            .map(|&(e, a)| Point {
                x: e,
                y: a,
                name: format!("{name} at {}/255: {}", fixed(e, 2), percent(a, 2)),
                class,
            })
            .collect();
        plot.points(&points);
        key += &format!("<li><i class=\"stroke {class}\"></i>{}</li>", escape(name));
        if let Some(&(e, a)) = at.first() {
            parts.push(format!("{name} {} at {}/255", percent(a, 2), fixed(e, 2)));
        }
    }
    key += "</ul>";
    let caption = format!(
        "Share of the samples still right when {change} and values stay in [0, 1]. What attacks leave is an \
         upper bound on what is safe, what is certified a lower bound. Without a change {}; {}.",
        percent(robustness.clean, 2),
        parts.join(", ")
    );
    framed(TITLE, &(key + &plot.finish("Accuracy over the size of the perturbation, one line per kind.")), &caption)
}
