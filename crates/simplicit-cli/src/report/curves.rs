//! Curves in a plot of their own: an SVG file that needs no page around it.

use std::fmt::Write;

use super::svg::{Axis, Plot, Point};
use super::text::escape;

/// Distinct in hue and in lightness; the first is ours.
const COLOURS: [&str; 8] = ["#1668b8", "#8a94a3", "#5c6877", "#2b7f50", "#c4432c", "#b8860b", "#7b4fa3", "#12151a"];
const STYLE: &str = "svg{background:#fff;font:11px system-ui,sans-serif}text{fill:#5c6877}.end{text-anchor:end}\
     .middle{text-anchor:middle}.rule{stroke:#e2e6ec}.axis{stroke:#9aa5b3}.level{stroke:#9aa5b3;stroke-dasharray:4 3}\
     .line{fill:none;stroke-width:1.6}";
/// Room for a line of the key.
const KEY: f64 = 15.0;

/// A named curve.
#[derive(Debug, Clone, PartialEq)]
pub struct Curve {
    /// Its name in the key.
    pub name: String,
    /// (x, y), x ascending.
    pub points: Vec<(f64, f64)>,
}

/// An SVG file with all curves, the y axis cut to `range`; `labels` name the axes and `alt` says in words what it shows.
pub fn curves(curves: &[Curve], labels: (&str, &str), range: (f64, f64), alt: &str) -> String {
    let all = || curves.iter().flat_map(|c| &c.points);
    let low = all().map(|p| p.1).fold(f64::INFINITY, f64::min).max(range.0);
    let high = all().map(|p| p.1).fold(f64::NEG_INFINITY, f64::max).clamp(0.0, range.1);
    let (left, right) = all().fold((f64::INFINITY, f64::NEG_INFINITY), |(l, r), p| (l.min(p.0), r.max(p.0)));
    let (low, left) = (if low.is_finite() { low.min(0.0) } else { -1.0 }, if left.is_finite() { left } else { 0.0 });
    let mut plot =
        Plot::new(Axis::linear(left, right, labels.0), Axis::linear(low - 0.05 * (high - low), high, labels.1));
    plot.level(0.0, "baseline");
    for (k, curve) in curves.iter().enumerate() {
        let class = format!("c{}", k % COLOURS.len());
        // What lies below the plot is not drawn along its edge.
        let inside = || curve.points.iter().filter(|p| p.1 >= low);
        plot.line(inside().copied(), &class);
        let dots: Vec<Point> = inside()
            .map(|&(x, y)| Point { x, y, name: format!("{}: {x}, {y:.2}", curve.name), class: &class })
            .collect();
        plot.points(&dots);
    }
    let body = plot.finish(alt);
    let mut style = STYLE.to_string();
    let mut key = String::new();
    for (k, curve) in curves.iter().enumerate() {
        let colour = COLOURS[k % COLOURS.len()];
        let _ = write!(style, ".line.c{k}{{stroke:{colour}}}circle.c{k}{{fill:{colour}}}");
        let (x, y) = (20.0 + 205.0 * (k % 2) as f64, 262.0 + KEY * (k / 2) as f64);
        let _ = write!(
            key,
            "<line class=\"line c{k}\" x1=\"{x}\" x2=\"{}\" y1=\"{y}\" y2=\"{y}\"/><text x=\"{}\" y=\"{}\">{}</text>",
            x + 18.0,
            x + 23.0,
            y + 4.0,
            escape(&curve.name)
        );
    }
    let height = 262.0 + KEY * curves.len().div_ceil(2) as f64;
    let inner = body.split_once('>').map_or("", |(_, rest)| rest);
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 420 {height}\" width=\"840\" role=\"img\" \
         aria-label=\"{}\"><style>{style}</style>{key}{inner}\n",
        escape(alt)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_curve_is_named_and_nothing_is_drawn_below_the_cut() {
        let two = [
            Curve { name: "ours".into(), points: vec![(50.0, 0.1), (90.0, -1.0)] },
            Curve { name: "a < b".into(), points: vec![(50.0, -0.5), (90.0, -40.0)] },
        ];
        let svg = curves(&two, ("x", "y"), (-10.0, 1.0), "two");
        assert!(svg.starts_with("<svg xmlns=") && svg.trim_end().ends_with("</svg>"));
        assert_eq!(svg.matches("<circle").count(), 3);
        assert!(svg.contains(">ours</text>") && svg.contains(">a &lt; b</text>"));
        assert!(curves(&[], ("x", "y"), (-10.0, 1.0), "none").contains("</svg>"));
    }
}
