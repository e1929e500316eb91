//! The report: one self-contained HTML page about a model. A placeholder until the real page is merged.

use simplicit::equilibrium::SampleDiagnostics;
use simplicit::evaluate::{ClassChange, LayerError};
use simplicit::model::ImplicitModel;
use simplicit::train::RowReport;

/// Everything the page may show. Start from [`Input::new`] and fill in what is known.
#[derive(Debug, Clone, Copy)]
pub struct Input<'a> {
    /// The page's title, such as the name of the model file.
    pub title: &'a str,
    /// The model. Its sizes, pattern, singular values and well-posedness are computed from it.
    pub model: &'a ImplicitModel,
    /// The baseline as an implicit model, for everything "before".
    pub baseline: Option<&'a ImplicitModel>,
    /// Bytes of the baseline's file.
    pub baseline_bytes: Option<u64>,
    /// Test samples that the accuracies, the agreement and the equilibrium error are measured on.
    pub test_samples: Option<usize>,
    /// The model's accuracy on them, a fraction.
    pub accuracy: Option<f64>,
    /// The baseline's.
    pub baseline_accuracy: Option<f64>,
    /// Share of them that model and baseline predict alike.
    pub agreement: Option<f64>,
    /// RMS of (model − baseline outputs) / RMS of baseline outputs.
    pub equilibrium_error: Option<f64>,
    /// Milliseconds per 1,000 samples of the model.
    pub milliseconds: Option<f64>,
    /// The baseline's, on the same threads.
    pub baseline_milliseconds: Option<f64>,
    /// Threads that both were timed on.
    pub threads: Option<usize>,
    /// Per row of M, states then outputs, from training. Empty: not known.
    pub rows: &'a [RowReport],
    /// Per class, from [`simplicit::evaluate::class_changes`]. Empty: not known.
    pub classes: &'a [ClassChange],
    /// Names of the classes; numbers where there is none.
    pub class_names: &'a [String],
    /// From [`simplicit::evaluate::layer_errors`]. Empty: not known.
    pub layer_errors: &'a [LayerError],
    /// One per test sample. Empty: not known.
    pub diagnostics: &'a [SampleDiagnostics],
    /// Seconds from start to end.
    pub seconds: Option<f64>,
    /// Name and seconds of every phase.
    pub phases: &'a [(String, f64)],
    /// Settings of the run, in the order to be shown. The model's own provenance is shown as well.
    pub settings: &'a [(String, String)],
}

impl<'a> Input<'a> {
    /// The model alone; nothing else is known.
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
            classes: &[],
            class_names: &[],
            layer_errors: &[],
            diagnostics: &[],
            seconds: None,
            phases: &[],
            settings: &[],
        }
    }
}

/// The page.
pub fn render(input: &Input) -> String {
    let sparsity = input.model.sparsity();
    format!(
        "<!doctype html>\n<html lang=\"en-GB\">\n<meta charset=\"utf-8\">\n<title>simplicit</title>\n\
         <p>{} of {} parameters</p>\n</html>\n",
        sparsity.nonzeros, sparsity.baseline_nonzeros
    )
}
