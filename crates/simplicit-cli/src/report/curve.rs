//! The models of the search for a target: what sparsity costs on this network.

use simplicit::train::TriedModel;

use super::svg::{Axis, Plot, Point};
use super::text::percent;
use super::{Input, figure as framed};

/// The fewest models at different sparsities that make a curve.
const LEAST: usize = 3;

pub(super) fn figure(input: &Input) -> String {
    const TITLE: &str = "Error of the outputs against sparsity";
    let finite = |m: &&TriedModel| m.sparsity.is_finite() && m.output_error.is_finite();
    let mut models: Vec<&TriedModel> = input.tried.iter().filter(finite).collect();
    models.sort_by(|a, b| a.sparsity.total_cmp(&b.sparsity));
    models.dedup_by(|a, b| a.sparsity == b.sparsity);
    let (Some(first), Some(last)) = (models.first(), models.last()) else { return String::new() };
    if models.len() < LEAST {
        return String::new();
    }
    let highest = models.iter().map(|m| m.output_error).fold(0.0, f64::max);
    let x = Axis::linear(100.0 * first.sparsity, 100.0 * last.sparsity, "sparsity, %");
    let mut plot = Plot::new(x, Axis::linear(0.0, 105.0 * highest, "error of the outputs, %"));
    let own = input.model.sparsity().sparsity;
    let nearest = models.iter().map(|m| (m.sparsity - own).abs()).fold(f64::INFINITY, f64::min);
    let points: Vec<Point> = models
        .iter()
        .map(|m| Point {
            x: 100.0 * m.sparsity,
            y: 100.0 * m.output_error,
            name: format!("{} sparse: {}", percent(m.sparsity, 1), percent(m.output_error, 2)),
            class: if (m.sparsity - own).abs() == nearest { "model" } else { "hollow" },
        })
        .collect();
    plot.points(&points);
    let caption = format!(
        "Every point is a model that the search fitted on the way, before the refit in the output metric; this model is the filled \
         one, at {}. The error is the RMS of the outputs' mismatch on the training samples over the RMS of the network's outputs. It \
         is no accuracy: that needs labels.",
        percent(own, 1)
    );
    framed(TITLE, &plot.finish("Error of the outputs over sparsity, one point a model."), &caption)
}
