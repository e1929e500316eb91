//! Non-zeros per layer and per input.

use simplicit::model::{ImplicitModel, Sparsity};
use simplicit::network::Source;

use super::png::Image;
use super::svg::{Axis, Plot};
use super::text::{count, escape, percent, width};
use super::{Input, figure};

/// Colours of the heat map from none to most (viridis), equally spaced.
const COLOURS: [[u8; 3]; 6] =
    [[68, 1, 84], [65, 68, 135], [42, 120, 142], [34, 168, 132], [122, 209, 81], [253, 231, 37]];

/// Name and non-zeros of every layer, first layer first, then of the outputs.
fn per_layer(sparsity: &Sparsity) -> Vec<(String, usize)> {
    let letters = sparsity.letters;
    let layers = sparsity.layers.iter().rev().map(|l| (l.name.clone(), l.nonzeros));
    layers.chain([("outputs".to_string(), letters.c + letters.d + letters.output_bias)]).collect()
}

pub(super) fn layers(input: &Input) -> String {
    let sparsity = input.model.sparsity();
    let after = per_layer(&sparsity);
    let before = input.baseline.map(|b| per_layer(&b.sparsity())).filter(|b| b.len() == after.len());
    let most = match &before {
        // A layer may have more than the baseline where other connections are allowed.
        Some(before) => after.iter().zip(before).map(|(a, b)| a.1 as f64 / b.1.max(1) as f64).fold(1.0, f64::max),
        None => after.iter().map(|a| a.1 as f64).fold(1.0, f64::max),
    };
    let mut table =
        String::from("<div class=\"scroll\"><table class=\"bars\"><thead><tr><th scope=\"col\">layer</th><th></th>");
    table += if before.is_some() {
        "<th scope=\"col\" class=\"num\">before</th><th scope=\"col\" class=\"num\">after</th><th scope=\"col\" class=\"num\">kept</th>"
    } else {
        "<th scope=\"col\" class=\"num\">non-zeros</th>"
    };
    table += "</tr></thead><tbody>";
    for (k, (name, now)) in after.iter().enumerate() {
        let then = before.as_ref().map(|b| b[k].1);
        let share = then.map_or(*now as f64, |then| *now as f64 / then.max(1) as f64);
        table += &format!(
            "<tr><th scope=\"row\">{}</th><td class=\"track\"><span class=\"bar\" style=\"width:{}\"></span></td>",
            escape(name),
            width(share / most)
        );
        if let Some(then) = then {
            table += &format!("<td class=\"num\">{}</td>", count(then as u64));
        }
        table += &format!("<td class=\"num\">{}</td>", count(*now as u64));
        if before.is_some() {
            table += &format!("<td class=\"num\">{}</td>", percent(share, 1));
        }
        table += "</tr>";
    }
    table += "</tbody></table></div>";
    let unread: usize = sparsity.layers.iter().map(|l| l.unread).sum();
    let rows: usize = sparsity.layers.iter().map(|l| l.rows).sum();
    // A model with shared weights computes unread channels too, so only unread states are said to cost nothing.
    let (kind, cost) = if rows == input.model.shape().states {
        ("states", " and cost nothing when only outputs are asked for")
    } else {
        ("channels and units", "")
    };
    let bar = if before.is_some() {
        "A bar is the share of a layer's baseline parameters that is left."
    } else {
        "A bar is a layer's share of the largest."
    };
    let caption = format!(
        "{bar} Each row counts A, B and b of its layer; “outputs” counts C, D and d. {} of {} {kind} are read by no state and no output{cost}.",
        count(unread as u64),
        count(rows as u64)
    );
    figure("Non-zeros per layer", &table, &caption)
}

/// Non-zeros in every column of B and D.
fn per_input(model: &ImplicitModel) -> Vec<usize> {
    let mut counts = vec![0; model.shape().inputs];
    for &j in model.b().indices().iter().chain(model.d().indices()) {
        counts[j as usize] += 1;
    }
    for block in model.taps().iter().filter(|b| b.source == Source::Input) {
        // Where the input is pooled first, the reads of a channel are spread evenly over all of its inputs.
        let reads = block.reads();
        for (j, count) in counts.iter_mut().enumerate() {
            *count += reads[if block.maps.is_empty() { j } else { j * reads.len() / model.shape().inputs }] as usize;
        }
    }
    counts
}

/// Channels and side of a square image with one or three channels.
fn square(inputs: usize) -> Option<(usize, usize)> {
    [1, 3].into_iter().find_map(|channels| {
        let side = (inputs / channels).isqrt();
        (side > 1 && channels * side * side == inputs).then_some((channels, side))
    })
}

pub(super) fn inputs(input: &Input) -> String {
    let counts = per_input(input.model);
    let unread = counts.iter().filter(|c| **c == 0).count();
    let unread = format!(
        "{} of {} inputs are read by no state and no output.",
        count(unread as u64),
        count(counts.len() as u64)
    );
    let Some((channels, side)) = square(counts.len()) else {
        let most = counts.iter().copied().max().unwrap_or(0) as f64;
        let mut plot =
            Plot::new(Axis::linear(0.0, counts.len() as f64, "input"), Axis::linear(0.0, most, "non-zeros of B and D"));
        plot.line(counts.iter().enumerate().map(|(j, c)| (j as f64 + 0.5, *c as f64)), "model");
        let caption = format!("How many states and outputs read each input. {unread}");
        return figure("Non-zeros per input", &plot.finish(&caption), &caption);
    };
    let pixels: Vec<usize> =
        (0..side * side).map(|k| (0..channels).map(|c| counts[c * side * side + k]).sum()).collect();
    let most = pixels.iter().copied().max().unwrap_or(0);
    let shown = Image {
        width: side,
        height: side,
        pixels: pixels.iter().map(|c| (c * 255 / most.max(1)) as u8).collect(),
        palette: (0..256).map(|k| colour(k as f64 / 255.0)).collect(),
    };
    let stops: Vec<String> = COLOURS.iter().map(|[r, g, b]| format!("rgb({r} {g} {b})")).collect();
    let size = side * (336 / side).max(1);
    let alt =
        format!("Heat map of {side} by {side} pixels: non-zeros of B and D per pixel, from 0 to {most}. {unread}");
    let content = format!(
        "<div class=\"heat\"><img src=\"{}\" width=\"{size}\" height=\"{size}\" alt=\"{alt}\">\
         <div class=\"scale\"><span class=\"num\">0</span>\
         <span class=\"ramp\" style=\"background:linear-gradient(to right,{})\"></span>\
         <span class=\"num\">{}</span></div></div>",
        shown.data_address(),
        stops.join(","),
        count(most as u64)
    );
    let sum = if channels > 1 { ", the channels added up" } else { "" };
    let caption = format!("How many states and outputs read each pixel of the input{sum}; bright is many. {unread}");
    figure("Non-zeros per input pixel", &content, &caption)
}

fn colour(share: f64) -> [u8; 3] {
    let at = share.clamp(0.0, 1.0) * (COLOURS.len() - 1) as f64;
    let k = (at as usize).min(COLOURS.len() - 2);
    let mix = |c: usize| {
        let (from, to) = (f64::from(COLOURS[k][c]), f64::from(COLOURS[k + 1][c]));
        (from + (at - k as f64) * (to - from)).round() as u8
    };
    [mix(0), mix(1), mix(2)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn squares_of_one_or_three_channels() {
        assert_eq!(square(784), Some((1, 28)));
        assert_eq!(square(3072), Some((3, 32)));
        assert_eq!([square(785), square(0), square(1), square(3)], [None; 4]);
    }

    #[test]
    fn the_colours_meet_their_stops() {
        assert_eq!(
            [colour(0.0), colour(0.4), colour(1.0), colour(9.0)],
            [COLOURS[0], COLOURS[2], COLOURS[5], COLOURS[5]]
        );
    }
}
