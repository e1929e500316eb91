//! The report: one self-contained HTML page about a model.
//!
//! The page needs nothing from elsewhere: figures are inline SVG, images are embedded PNG, and the only script zooms
//! the pattern. Values that are not known are `None` (or empty) in [`Input`]; the page leaves them out or shows "–"
//! in the table.

mod advice;
mod chart;
mod curve;
mod density;
mod iterations;
mod loss;
mod pattern;
mod png;
mod robustness;
mod rows;
mod spectrum;
mod summary;
mod svg;
mod text;

pub use chart::{Chart, Series};
pub use pattern::patterns;

use simplicit::equilibrium::SampleDiagnostics;
use simplicit::evaluate::{ClassChange, LayerError};
use simplicit::model::ImplicitModel;
use simplicit::train::{RowReport, TriedModel};

pub use robustness::{Robustness, RobustnessCurve, RobustnessKind};
use text::escape;

/// Everything the page may show. Start from [`Input::new`] and fill in what is known.
#[derive(Debug, Clone, Copy)]
pub struct Input<'a> {
    /// The page's title, such as the name of the model file.
    pub title: &'a str,
    /// The model. Its sizes, pattern, singular values and well-posedness are computed from it.
    pub model: &'a ImplicitModel,
    /// The baseline as an implicit model, for everything that the page shows as "before".
    pub baseline: Option<&'a ImplicitModel>,
    /// Bytes of the baseline's file.
    pub baseline_bytes: Option<u64>,
    /// Test samples that the accuracies, the agreement and the equilibrium error are measured on.
    pub test_samples: Option<usize>,
    /// The model's accuracy on the test samples, a fraction.
    pub accuracy: Option<f64>,
    /// The baseline's accuracy on the test samples, a fraction.
    pub baseline_accuracy: Option<f64>,
    /// Share of the test samples for which model and baseline predict the same class.
    pub agreement: Option<f64>,
    /// RMS of (model − baseline outputs) / RMS of baseline outputs.
    pub equilibrium_error: Option<f64>,
    /// Milliseconds per 1,000 samples of the model.
    pub milliseconds: Option<f64>,
    /// The baseline's milliseconds per 1,000 samples, on the same threads.
    pub baseline_milliseconds: Option<f64>,
    /// Threads that both were timed on.
    pub threads: Option<usize>,
    /// Per row of M, states then outputs, from training. Empty if not known.
    pub rows: &'a [RowReport],
    /// The models of the search for a target. Empty if not known.
    pub tried: &'a [TriedModel],
    /// Changes per class, from [`simplicit::evaluate::class_changes`]. Empty if not known.
    pub classes: &'a [ClassChange],
    /// Names of the classes; a class without a name is shown by its number.
    pub class_names: &'a [String],
    /// Errors per layer, from [`simplicit::evaluate::layer_errors`]. Empty if not known.
    pub layer_errors: &'a [LayerError],
    /// Diagnostics of every test sample. Empty if not known.
    pub diagnostics: &'a [SampleDiagnostics],
    /// Results from `attack --json` and `certify --json`.
    pub robustness: &'a [Robustness],
    /// Seconds that the training took in all.
    pub seconds: Option<f64>,
    /// Name and seconds of every phase.
    pub phases: &'a [(String, f64)],
    /// Settings of the run, in the order in which they are shown. The model's own provenance is shown as well.
    pub settings: &'a [(String, String)],
}

impl<'a> Input<'a> {
    /// An input that has only the model; everything else is unknown.
    pub fn new(title: &'a str, model: &'a ImplicitModel) -> Self {
        Self {
            title,
            model,
            baseline: None,
            baseline_bytes: None,
            test_samples: None,
            accuracy: None,
            baseline_accuracy: None,
            agreement: None,
            equilibrium_error: None,
            milliseconds: None,
            baseline_milliseconds: None,
            threads: None,
            rows: &[],
            tried: &[],
            classes: &[],
            class_names: &[],
            layer_errors: &[],
            diagnostics: &[],
            robustness: &[],
            seconds: None,
            phases: &[],
            settings: &[],
        }
    }
}

/// The page as HTML.
pub fn render(input: &Input) -> String {
    let mut body = summary::section(input);
    body += &section("search", "Where this model lies", &grid(&[curve::figure(input)]));
    body += &section("next", "What to do next", &advice::list(input));
    body += &section("loss", "What was lost where", &grid(&[loss::layers(input), loss::classes(input)]));
    body += &section("nonzeros", "Where the non-zeros are", &grid(&[density::layers(input), density::inputs(input)]));
    body += &section("rows", "How well the rows were solved", &grid(&[rows::residuals(input), rows::gaps(input)]));
    body += &section("robustness", "Attacked and certified", &grid(&robustness::figures(input)));
    body += &section("pattern", "The pattern of M", &pattern::figure(input));
    body +=
        &section("equilibrium", "Rank and equilibrium", &grid(&[spectrum::figure(input), iterations::figure(input)]));
    body += &section("provenance", "Where it comes from", &summary::provenance(input));
    format!(
        "<!doctype html>\n<html lang=\"en-GB\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n<link rel=\"icon\" href=\"data:,\">\n\
         <title>{title}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n{body}</main>\n\
         <script>\n{script}</script>\n</body>\n</html>\n",
        title = escape(input.title),
        style = include_str!("style.css"),
        script = include_str!("zoom.js"),
    )
}

/// A section, or nothing if it has no content.
fn section(id: &str, title: &str, content: &str) -> String {
    if content.is_empty() {
        return String::new();
    }
    format!(
        "<section id=\"{id}\" aria-labelledby=\"{id}-title\">\n<h2 id=\"{id}-title\">{title}</h2>\n{content}</section>\n"
    )
}

fn grid(figures: &[String]) -> String {
    if figures.iter().all(String::is_empty) {
        return String::new();
    }
    format!("<div class=\"grid\">\n{}</div>\n", figures.concat())
}

/// A figure with a heading and a caption (HTML) that explains it.
fn figure(title: &str, content: &str, caption: &str) -> String {
    format!("<figure>\n<h3>{title}</h3>\n{content}\n<figcaption>{caption}</figcaption>\n</figure>\n")
}

#[cfg(test)]
mod tests;
