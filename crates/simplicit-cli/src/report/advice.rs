//! Which layers lost most accuracy, and what the user can do about it.

use super::Input;
use super::text::{escape, percent, signed};

/// The most layers that are named.
const NAMED: usize = 3;
/// A layer that adds less than this share of the whole output error is not worth naming.
const WORTH: f64 = 0.05;
/// A drop in accuracy up to this many points is within what a test set of a few thousand samples resolves.
const RESOLVED: f64 = 0.15;

/// A list of sentences; empty where nothing was measured.
pub(super) fn list(input: &Input) -> String {
    let drop = input.accuracy.zip(input.baseline_accuracy).map(|(now, before)| 100.0 * (now - before));
    if drop.is_none() && input.layer_errors.is_empty() {
        return String::new();
    }
    let mut items = Vec::new();
    match drop {
        Some(drop) if drop >= -RESOLVED => {
            items.push(format!("Accuracy changed by {} points: there is room for a higher target.", signed(drop, 2)));
        }
        Some(drop) => {
            items.push(format!(
                "Accuracy changed by {} points. If that is too much: more inputs, a lower target, or fine-tuning of what is \
                 left without labels (<code>simplicit.torch.polish</code>), in this order.",
                signed(drop, 2)
            ));
        }
        None => {}
    }
    let worst = worst_layers(input);
    if !worst.is_empty() {
        let named: Vec<String> = worst
            .iter()
            .map(|(name, added)| format!("<b>{}</b> ({} of the outputs' size)", escape(name), percent(*added, 2)))
            .collect();
        let which = if named.len() == 1 { "The layer that lost most" } else { "The layers that lost most" };
        items.push(format!("{which}: {}.", named.join(", ")));
    }
    if let (Some(now), Some(before)) = (input.milliseconds, input.baseline_milliseconds)
        && now > before
    {
        items.push(
            "The model is not faster than the dense network yet. Zeros pay from about half of the weights on; \
             <code>simplicit bench inference</code> says where, layer by layer."
                .into(),
        );
    }
    let items: String = items.iter().map(|item| format!("<li>{item}</li>\n")).collect();
    format!("<ul class=\"card advice\">\n{items}</ul>\n")
}

/// The layers that add most to the output error, largest first.
fn worst_layers<'a>(input: &Input<'a>) -> Vec<(&'a str, f64)> {
    let total = input.layer_errors.last().map_or(0.0, |e| e.output_error);
    let mut layers: Vec<(&str, f64)> = input
        .layer_errors
        .iter()
        .filter(|e| e.added.is_finite() && e.added > WORTH * total)
        .map(|e| (e.name.as_str(), e.added))
        .collect();
    layers.sort_by(|a, b| b.1.total_cmp(&a.1));
    layers.truncate(NAMED);
    layers
}
