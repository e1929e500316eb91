//! Where accuracy was lost: the error that each layer adds at the output, and the change per class.

use super::text::{UNKNOWN, count, escape, fixed, known, percent, signed, width};
use super::{Input, figure};

pub(super) fn layers(input: &Input) -> String {
    const TITLE: &str = "Error that each layer adds at the output";
    let errors = input.layer_errors;
    if errors.is_empty() {
        return String::new();
    }
    let most = errors.iter().map(|e| e.output_error).filter(|e| e.is_finite()).fold(f64::MIN_POSITIVE, f64::max);
    let mut table = String::from(
        "<div class=\"scroll\"><table class=\"bars\"><thead><tr><th scope=\"col\">up to layer</th><th></th>\
         <th scope=\"col\" class=\"num\">error</th><th scope=\"col\" class=\"num\">added</th>\
         <th scope=\"col\" class=\"num\">states</th></tr></thead><tbody>",
    );
    let mut before = 0.0;
    for e in errors {
        // The error from the layers before is pale, what this layer adds is strong.
        let (kept, added) = (e.output_error.min(before) / most, (e.output_error - before).max(0.0) / most);
        table += &format!(
            "<tr><th scope=\"row\">{}</th><td class=\"track\"><span class=\"bar pale\" style=\"width:{}\"></span>\
             <span class=\"bar loss\" style=\"width:{}\"></span></td><td class=\"num\">{}</td>\
             <td class=\"num\">{}</td><td class=\"num\">{}</td></tr>",
            escape(&e.name),
            width(kept),
            width(added),
            percent(e.output_error, 2),
            signed(100.0 * e.added, 2),
            known(e.state_error, |s| percent(s, 1)),
        );
        before = e.output_error;
    }
    table += "</tbody></table></div>";
    let caption = "The model's own states up to this layer, the baseline's equations behind it: RMS of the outputs' \
         mismatch over the RMS of the baseline's outputs. The strong part of a bar is what the layer adds (in points); a \
         later layer may repair. “States” is the layer's own mismatch, relative to its states.";
    figure(TITLE, &table, caption)
}

pub(super) fn classes(input: &Input) -> String {
    const TITLE: &str = "Change per class";
    if input.classes.is_empty() {
        return String::new();
    }
    let name = |class: u32| match input.class_names.get(class as usize) {
        Some(name) => escape(name),
        None => class.to_string(),
    };
    let change = |c: &simplicit::evaluate::ClassChange| Some(100.0 * (c.accuracy()? - c.baseline_accuracy()?));
    let most = input.classes.iter().filter_map(change).map(f64::abs).fold(1.0, f64::max);
    let mut table = String::from(
        "<div class=\"scroll\"><table class=\"bars\"><thead><tr><th scope=\"col\">class</th><th scope=\"col\" class=\"num\">before</th>\
         <th scope=\"col\" class=\"num\">after</th><th></th><th scope=\"col\" class=\"num\">points</th>\
         <th scope=\"col\">lost most to</th></tr></thead><tbody>",
    );
    for c in input.classes {
        let points = change(c);
        let share = points.unwrap_or(0.0) / most;
        let (left, right) = ((-share).max(0.0), share.max(0.0));
        let lost_to = match c.lost_to {
            Some((class, samples)) => {
                format!("{} <span class=\"muted\">{}/{}</span>", name(class), samples, c.lost)
            }
            None => UNKNOWN.into(),
        };
        table += &format!(
            "<tr><th scope=\"row\">{}</th><td class=\"num\">{}</td><td class=\"num\">{}</td>\
             <td class=\"track balance\"><span><span class=\"bar loss\" style=\"width:{}\"></span></span>\
             <span><span class=\"bar gain\" style=\"width:{}\"></span></span></td>\
             <td class=\"num\">{}</td><td>{lost_to}</td></tr>",
            name(c.class),
            known(c.baseline_accuracy(), |a| fixed(100.0 * a, 1)),
            known(c.accuracy(), |a| fixed(100.0 * a, 1)),
            width(left),
            width(right),
            known(points, |p| signed(p, 1)),
        );
    }
    table += "</tbody></table></div>";
    let (lost, gained) = input.classes.iter().fold((0, 0), |(l, g), c| (l + c.lost, g + c.gained));
    let caption = format!(
        "Accuracy in per cent before and after; a bar to the left is a loss, to the right a gain. {} samples that the \
         baseline gets right are lost, {} that it gets wrong are gained. The last column says what most of a class's \
         lost samples are taken for now, and how many of them.",
        count(lost as u64),
        count(gained as u64)
    );
    figure(TITLE, &table, &caption)
}
