//! Small plots as inline SVG: two axes, points, lines and bars. Colours are classes of the page's style sheet.

use std::fmt::Write;

use super::text::{count, escape, fixed};

/// Width of a plot in pixels: about what a phone shows, so that the text stays readable there.
const WIDTH: f64 = 420.0;
const HEIGHT: f64 = 250.0;
const LEFT: f64 = 60.0;
const RIGHT: f64 = 10.0;
const TOP: f64 = 10.0;
const BOTTOM: f64 = 40.0;
/// With up to this many points each shows its name under the pointer; more points are drawn as one path.
const NAMED: usize = 600;

/// One axis of a plot.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Axis {
    low: f64,
    high: f64,
    log: bool,
    label: String,
}

impl Axis {
    /// An axis from `low` to `high`, which are widened if they are equal.
    pub(super) fn linear(low: f64, high: f64, label: &str) -> Self {
        let high = if high > low { high } else { low + 1.0 };
        Self { low, high, log: false, label: label.into() }
    }

    /// A logarithmic axis of whole decades around the positive values. Zeros are drawn at the lower edge, a decade
    /// below the rest.
    pub(super) fn log(values: impl Iterator<Item = f64> + Clone, label: &str) -> Self {
        let positive = values.clone().filter(|v| *v > 0.0 && v.is_finite());
        let low = positive.clone().fold(f64::INFINITY, f64::min);
        let high = positive.fold(0.0, f64::max);
        let (mut low, mut high) = if high > 0.0 { (low.log10().floor(), high.log10().ceil()) } else { (-1.0, 0.0) };
        if values.into_iter().any(|v| v <= 0.0) {
            low -= 1.0;
        }
        // Without this, a subnormal value would give 10^-324, which is 0.
        low = low.max(-300.0);
        if high <= low {
            high = low + 1.0;
        }
        Self { low, high, log: true, label: label.into() }
    }

    /// The place of a value on the axis: 0 at the lower end, 1 at the upper.
    fn share(&self, value: f64) -> f64 {
        let value = match (self.log, value > 0.0) {
            (true, true) => value.log10(),
            (true, false) => self.low,
            (false, _) => value,
        };
        ((value - self.low) / (self.high - self.low)).clamp(0.0, 1.0)
    }

    /// Values and labels of the ticks, at most seven.
    fn ticks(&self) -> Vec<(f64, String)> {
        let span = self.high - self.low;
        if self.log {
            let step = (span / 6.0).ceil().max(1.0);
            let mut ticks = Vec::new();
            let mut decade = self.high;
            while decade >= self.low - 1e-9 {
                let label = match decade as i32 {
                    0 => "1".into(),
                    1 => "10".into(),
                    power => format!("10<tspan dy=\"-4\" class=\"power\">{}</tspan>", fixed(f64::from(power), 0)),
                };
                ticks.push((10f64.powf(decade), label));
                decade -= step;
            }
            return ticks;
        }
        let magnitude = 10f64.powf((span / 5.0).log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0].map(|k| k * magnitude).into_iter().find(|s| span / s <= 6.0).unwrap_or(span);
        let decimals = (-step.log10().floor()).max(0.0) as usize;
        let first = (self.low / step).ceil();
        (0..8)
            .map(|k| (first + f64::from(k)) * step)
            .filter(|v| *v <= self.high + 1e-9 * span)
            .map(|v| {
                let whole = decimals == 0 && v >= 0.0;
                (v, if whole { count(v.round() as u64) } else { fixed(v, decimals) })
            })
            .collect()
    }
}

/// A plot that is being drawn.
#[derive(Debug, Clone)]
pub(super) struct Plot {
    x: Axis,
    y: Axis,
    body: String,
}

/// A point, its name, and its CSS class.
pub(super) struct Point<'a> {
    pub(super) x: f64,
    pub(super) y: f64,
    pub(super) name: String,
    pub(super) class: &'a str,
}

impl Plot {
    pub(super) fn new(x: Axis, y: Axis) -> Self {
        Self { x, y, body: String::new() }
    }

    fn at_x(&self, x: f64) -> f64 {
        LEFT + self.x.share(x) * (WIDTH - LEFT - RIGHT)
    }

    fn at_y(&self, y: f64) -> f64 {
        HEIGHT - BOTTOM - self.y.share(y) * (HEIGHT - TOP - BOTTOM)
    }

    pub(super) fn points(&mut self, points: &[Point]) {
        if points.len() <= NAMED {
            for p in points {
                let (x, y) = (self.at_x(p.x), self.at_y(p.y));
                let (class, name) = (p.class, escape(&p.name));
                let _ = write!(
                    self.body,
                    "<circle class=\"{class}\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"2.6\"><title>{name}</title></circle>"
                );
            }
            return;
        }
        let mut classes: Vec<&str> = points.iter().map(|p| p.class).collect();
        classes.sort_unstable();
        classes.dedup();
        for class in classes {
            let _ = write!(self.body, "<path class=\"dots {class}\" d=\"");
            for p in points.iter().filter(|p| p.class == class) {
                let _ = write!(self.body, "M{:.1} {:.1}h0", self.at_x(p.x), self.at_y(p.y));
            }
            self.body.push_str("\"/>");
        }
    }

    pub(super) fn line(&mut self, points: impl Iterator<Item = (f64, f64)>, class: &str) {
        let path: Vec<String> = points.map(|(x, y)| format!("{:.1} {:.1}", self.at_x(x), self.at_y(y))).collect();
        if !path.is_empty() {
            let _ = write!(self.body, "<path class=\"line {class}\" d=\"M{}\"/>", path.join("L"));
        }
    }

    /// A bar from `from` to `to` on the x axis, up to `height`.
    pub(super) fn bar(&mut self, from: f64, to: f64, height: f64, name: &str) {
        let (left, right, top) = (self.at_x(from), self.at_x(to), self.at_y(height));
        let gap = if right - left > 4.0 { 1.0 } else { 0.0 };
        let _ = write!(
            self.body,
            "<rect class=\"fill-model\" x=\"{:.1}\" y=\"{top:.1}\" width=\"{:.1}\" height=\"{:.1}\"><title>{}</title></rect>",
            left,
            (right - left - gap).max(0.5),
            HEIGHT - BOTTOM - top,
            escape(name)
        );
    }

    /// A thin vertical line across the plot.
    pub(super) fn divider(&mut self, x: f64) {
        let x = self.at_x(x);
        let _ = write!(
            self.body,
            "<line class=\"divider\" x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{TOP}\" y2=\"{}\"/>",
            HEIGHT - BOTTOM
        );
    }

    /// A dashed horizontal line with a word above its right end.
    pub(super) fn level(&mut self, y: f64, name: &str) {
        let y = self.at_y(y);
        let _ = write!(
            self.body,
            "<line class=\"level\" x1=\"{LEFT}\" x2=\"{0}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>\
             <text class=\"end\" x=\"{0}\" y=\"{1:.1}\">{2}</text>",
            WIDTH - RIGHT,
            y - 4.0,
            escape(name)
        );
    }

    /// The finished plot; `alt` describes it in words.
    pub(super) fn finish(self, alt: &str) -> String {
        let mut axes = String::new();
        let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
        for (value, label) in self.y.ticks() {
            let y = self.at_y(value);
            let _ = write!(
                axes,
                "<line class=\"rule\" x1=\"{LEFT}\" x2=\"{right}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>\
                 <text class=\"end\" x=\"{}\" y=\"{:.1}\">{label}</text>",
                LEFT - 6.0,
                y + 4.0
            );
        }
        for (value, label) in self.x.ticks() {
            let x = self.at_x(value);
            let _ = write!(axes, "<text class=\"middle\" x=\"{x:.1}\" y=\"{}\">{label}</text>", bottom + 16.0);
        }
        let _ = write!(
            axes,
            "<line class=\"axis\" x1=\"{LEFT}\" x2=\"{right}\" y1=\"{bottom}\" y2=\"{bottom}\"/>\
             <text class=\"middle label\" x=\"{}\" y=\"{}\">{}</text>\
             <text class=\"middle label\" transform=\"translate(12 {}) rotate(-90)\">{}</text>",
            f64::midpoint(LEFT, right),
            HEIGHT - 6.0,
            escape(&self.x.label),
            f64::midpoint(TOP, bottom),
            escape(&self.y.label)
        );
        format!(
            "<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{}\">{axes}{}</svg>",
            escape(alt),
            self.body
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_axes_cover_whole_decades() {
        let axis = Axis::log([3e-5, 0.2].into_iter(), "");
        assert_eq!((axis.low, axis.high), (-5.0, 0.0));
        assert!((axis.share(1e-5) - 0.0).abs() < 1e-12 && (axis.share(1.0) - 1.0).abs() < 1e-12);
        assert!((axis.share(1e-3) - 0.4).abs() < 1e-12);
        assert_eq!(axis.ticks().len(), 6);
        // Zeros are drawn below everything else; no values at all still give an axis.
        let axis = Axis::log([0.0, 0.2].into_iter(), "");
        assert_eq!((axis.low, axis.share(0.0)), (-2.0, 0.0));
        for values in [vec![], vec![0.0], vec![f64::INFINITY, f64::NAN], vec![5e-324]] {
            let axis = Axis::log(values.iter().copied(), "");
            assert!(axis.low < axis.high && !axis.ticks().is_empty() && axis.ticks().len() <= 8, "{values:?}");
        }
    }

    #[test]
    fn linear_ticks_are_round() {
        let labels =
            |low, high| -> Vec<String> { Axis::linear(low, high, "").ticks().into_iter().map(|t| t.1).collect() };
        assert_eq!(labels(0.0, 122.0), ["0", "50", "100"]);
        assert_eq!(labels(0.0, 0.3), ["0.00", "0.05", "0.10", "0.15", "0.20", "0.25", "0.30"]);
        assert_eq!(labels(0.0, 6000.0), ["0", "1,000", "2,000", "3,000", "4,000", "5,000", "6,000"]);
        assert!(labels(3.0, 3.0).len() >= 2);
    }
}
