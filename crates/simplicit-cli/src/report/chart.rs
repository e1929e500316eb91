//! A chart as an SVG file: several series over two axes, for pages other than the report.

use super::svg::{Axis, Plot, Point};
use super::text::escape;

/// Colours of the series in order; the first is ours.
const COLOURS: [&str; 8] = ["#1668b8", "#c4432c", "#2b7f50", "#8a5fb5", "#b8860b", "#0b8a8f", "#5c6877", "#c2417c"];

/// One line of a chart.
#[derive(Debug, Clone, PartialEq)]
pub struct Series {
    /// Its name in the key.
    pub name: String,
    /// The points, in the order in which they are joined.
    pub points: Vec<(f64, f64)>,
    /// Whether the points are joined.
    pub joined: bool,
}

impl Series {
    /// Points joined by a line.
    pub fn line(name: impl Into<String>, points: Vec<(f64, f64)>) -> Self {
        Self { name: name.into(), points, joined: true }
    }

    /// Points alone.
    pub fn points(name: impl Into<String>, points: Vec<(f64, f64)>) -> Self {
        Self { name: name.into(), points, joined: false }
    }
}

/// Series over two axes.
#[derive(Debug, Clone, PartialEq)]
pub struct Chart {
    /// The label below the x axis.
    pub x: String,
    /// The label at the y axis.
    pub y: String,
    /// The lines, at most seven in different colours.
    pub series: Vec<Series>,
    /// A dashed line across the chart, with its name.
    pub level: Option<(f64, String)>,
    /// Whether x is logarithmic.
    pub log_x: bool,
    /// Values below this are not drawn, so that one bad curve does not flatten the others.
    pub least_y: Option<f64>,
}

impl Chart {
    /// An SVG document; `alt` describes the chart in words. Values that are not finite are left out.
    pub fn svg(&self, alt: &str) -> String {
        let least = self.least_y.unwrap_or(f64::MIN);
        let drawn = |p: &(f64, f64)| p.0.is_finite() && p.1.is_finite() && p.1 >= least;
        let shown: Vec<Vec<(f64, f64)>> =
            self.series.iter().map(|s| s.points.iter().copied().filter(drawn).collect()).collect();
        let xs = || shown.iter().flatten().map(|p| p.0);
        let ys = || shown.iter().flatten().map(|p| p.1).chain(self.level.iter().map(|l| l.0));
        let x = if self.log_x {
            Axis::log(xs().collect::<Vec<_>>().into_iter(), &self.x)
        } else {
            let (low, high) = padded(xs());
            Axis::linear(low, high, &self.x)
        };
        let (low, high) = padded(ys());
        let mut plot = Plot::new(x, Axis::linear(low, high, &self.y));
        if let Some((value, name)) = &self.level {
            plot.level(*value, name);
        }
        for (k, (series, points)) in self.series.iter().zip(&shown).enumerate() {
            let class = format!("s{}", k % COLOURS.len());
            if series.joined {
                plot.line(points.iter().copied(), &class);
            }
            let dots: Vec<Point> = points
                .iter()
                .map(|&(x, y)| Point { x, y, name: format!("{}: {x:.4}, {y:.4}", series.name), class: &class })
                .collect();
            plot.points(&dots);
        }
        framed(&plot.finish(alt), &self.series)
    }
}

/// The range of the values, extended by a twentieth on both sides.
fn padded(values: impl Iterator<Item = f64>) -> (f64, f64) {
    let (low, high) = values.fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), v| (l.min(v), h.max(v)));
    if low > high {
        return (0.0, 1.0);
    }
    let room = ((high - low) / 20.0).max(1e-9 * high.abs()).max(1e-12);
    (low - room, high + room)
}

/// The plot with a key above it, its own colours and a plain background.
fn framed(plot: &str, series: &[Series]) -> String {
    const ROW: usize = 18;
    let key_height = 8 + ROW * series.len();
    let mut style = String::from(
        "svg{font-family:system-ui,sans-serif;background:#fff}text{fill:#5c6877;font-size:12px}\
         .power{font-size:8px}.end{text-anchor:end}.middle{text-anchor:middle}.rule{stroke:#e2e6ec}\
         .axis{stroke:#9aa5b3}.level{stroke:#c4432c;stroke-dasharray:5 4}.line{fill:none;stroke-width:1.8}",
    );
    for (k, colour) in COLOURS.iter().enumerate() {
        style += &format!("path.s{k}{{stroke:{colour}}}circle.s{k}{{fill:{colour}}}");
    }
    let mut key = String::new();
    for (k, series) in series.iter().enumerate() {
        let y = 14 + ROW * k;
        key += &format!(
            "<circle class=\"s{}\" cx=\"66\" cy=\"{}\" r=\"4\"/><text x=\"76\" y=\"{y}\">{}</text>",
            k % COLOURS.len(),
            y - 4,
            escape(&series.name)
        );
    }
    let height = 250 + key_height;
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 420 {height}\" width=\"630\">\
         <style>{style}</style>{key}<g transform=\"translate(0 {key_height})\">{}</g></svg>\n",
        plot.replacen("<svg ", "<svg width=\"420\" height=\"250\" ", 1)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_finite_point_is_drawn_and_names_are_escaped() {
        let chart = Chart {
            x: "x".into(),
            y: "y".into(),
            series: vec![
                Series::line("a < b", vec![(0.0, 1.0), (1.0, f64::NAN), (2.0, 3.0)]),
                Series::points("c", vec![(1.0, 2.0)]),
            ],
            level: Some((0.5, "floor".into())),
            log_x: false,
            least_y: None,
        };
        let svg = chart.svg("a chart");
        // Three points and two marks of the key.
        assert_eq!(svg.matches("<circle").count(), 5);
        assert!(svg.contains("a &lt; b") && !svg.contains("a < b") && svg.contains("floor"));
        let cut = Chart { least_y: Some(1.5), ..chart.clone() };
        assert_eq!(cut.svg("cut").matches("<circle").count(), 4);
        let empty = Chart { series: Vec::new(), level: None, ..chart };
        assert!(empty.svg("nothing").contains("</svg>"));
    }
}
