//! The pattern of M = (A B; C D), before and after, as in the paper's last figure.

use std::fmt::Write;

use simplicit::linalg::Csr;
use simplicit::model::{ImplicitModel, TapWeights, Target};

use super::png::Image;
use super::text::{count, escape, percent};
use super::{Input, figure as framed};

/// Larger patterns are shown in square blocks of entries, one pixel each.
const LARGEST: usize = 2048;
/// Small patterns are enlarged by a whole factor, up to this width in pixels.
const COMFORTABLE: usize = 1000;
/// Palette: 0 means no non-zero, the entries up to this one are the darkness of a block, and the colours of the lines
/// follow.
const BLACK: u8 = 200;
const RED: u8 = BLACK + 1;
const DIAGONAL: u8 = BLACK + 2;
const SELF_LOOP: u8 = BLACK + 3;
const NOTHING: u8 = BLACK + 4;

pub(super) fn figure(input: &Input) -> String {
    let shared = has_shared(input.model);
    let mut views = String::new();
    if let Some(baseline) = input.baseline {
        views += &view(baseline, "Before (baseline)", "Pattern of the baseline's M");
    }
    views += &view(
        input.model,
        if input.baseline.is_some() { "After (model)" } else { "Model" },
        "Pattern of the model's M",
    );
    let controls = "<div class=\"controls\" hidden><button type=\"button\" data-step=\"-1\" aria-label=\"Zoom out\">−</button>\
        <output aria-live=\"polite\">fit</output>\
        <button type=\"button\" data-step=\"1\" aria-label=\"Zoom in\">+</button>\
        <button type=\"button\" data-step=\"0\">Fit</button></div>";
    let key = "<ul class=\"key\"><li><i class=\"nonzero\"></i>non-zero</li>\
        <li><i class=\"separator\"></i>between A, B, C and D</li>\
        <li><i class=\"diagonal\"></i>diagonal of A</li>\
        <li><i class=\"self-loop\"></i>self-loop (non-zero on it)</li></ul>";
    if shared {
        let key = "<ul class=\"key\"><li><i class=\"nonzero\"></i>non-zero</li>\
            <li><i class=\"separator\"></i>between blocks</li></ul>";
        let caption = "One block of taps below the other, from the first layer to the outputs. A row is an output channel (or \
             unit), a column a tap: channel by channel of what is read, row by row of the kernel. Every weight is shown \
             once, however many positions use it; grey is past a block's last tap. Poolings and residual sums have no weights. Zoom with the buttons or the keys \
             + − 0; before and after move together.";
        let content = format!("<div class=\"toolbar\">{key}{controls}</div>{views}");
        return framed("Non-zeros of the taps", &content, caption);
    }
    let scale = scale(input.model);
    let blocks = if scale > 1 {
        format!(" One pixel is a block of {scale} × {scale} entries, darker where more of them are non-zero.")
    } else {
        String::new()
    };
    let caption = format!(
        "M = (A B; C D): A top left (states from states), B top right (states from inputs), C bottom left and D bottom \
         right (outputs). States run from the last layer to the first. Above the diagonal of A is feed-forward, below it \
         feedback.{blocks} Zoom with the buttons or the keys + − 0; before and after move together."
    );
    framed("Non-zeros of M", &format!("<div class=\"toolbar\">{key}{controls}</div>{views}"), &caption)
}

/// The patterns of some models one below the other, as an SVG of its own.
pub fn patterns(models: &[(String, ImplicitModel)], alt: &str) -> String {
    const TITLE: usize = 24;
    let (mut body, mut top, mut width) = (String::new(), 0, 0);
    for (title, model) in models {
        let image = if has_shared(model) { taps_image(&tap_blocks(model)) } else { image(model) };
        let _ = write!(
            body,
            "<text x=\"2\" y=\"{}\">{}</text><image x=\"0\" y=\"{}\" width=\"{}\" height=\"{}\" href=\"{}\"/>",
            top + TITLE - 8,
            escape(title),
            top + TITLE,
            image.width,
            image.height,
            image.data_address()
        );
        top += TITLE + image.height;
        width = width.max(image.width);
    }
    let alt = escape(alt);
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {top}\" width=\"{width}\" role=\"img\" \
         aria-label=\"{alt}\"><style>svg{{font-family:system-ui,sans-serif;background:#fff}}\
         text{{fill:#5c6877;font-size:14px}}image{{image-rendering:pixelated}}</style>{body}</svg>\n"
    )
}

/// Whether M is made of tap blocks. Written out as a matrix, they would have millions of equal entries.
fn has_shared(model: &ImplicitModel) -> bool {
    model.taps().iter().any(|b| matches!(b.weights, TapWeights::Taps(_)))
}

fn view(model: &ImplicitModel, title: &str, alt: &str) -> String {
    let letters = model.sparsity().letters;
    let [a, b, c, d] = [letters.a, letters.b, letters.c, letters.d];
    let nonzeros = a + b + c + d;
    let title = format!("{title}: {} non-zeros", count(nonzeros as u64));
    let (image, described) = if has_shared(model) {
        let blocks = tap_blocks(model);
        let all: usize = blocks.iter().map(|b| b.rows() * b.cols()).sum();
        let share = nonzeros as f64 / all.max(1) as f64;
        (taps_image(&blocks), format!("{} blocks of taps, {} filled", blocks.len(), percent(share, 1)))
    } else {
        let shape = model.shape();
        let (rows, cols) = (shape.states + shape.outputs, shape.states + shape.inputs);
        let share = nonzeros as f64 / (rows * cols).max(1) as f64;
        (image(model), format!("{rows} rows by {cols} columns, {} filled", percent(share, 1)))
    };
    let alt = format!("{alt}, {described}: A has {a} non-zeros, B {b}, C {c} and D {d}.");
    if image.width == 0 || image.height == 0 {
        return format!("<p class=\"view-title\">{title}</p>\n");
    }
    let factor = (COMFORTABLE / image.width).clamp(1, 12);
    format!(
        "<p class=\"view-title\">{title} <span>A {} · B {} · C {} · D {}</span></p>\n\
         <div class=\"view{}\" tabindex=\"0\" role=\"region\" aria-label=\"{alt}\">\
         <img src=\"{}\" width=\"{}\" height=\"{}\" alt=\"{alt}\"></div>\n",
        count(a as u64),
        count(b as u64),
        count(c as u64),
        count(d as u64),
        if image.width > COMFORTABLE { " large" } else { "" },
        image.data_address(),
        image.width * factor,
        image.height * factor,
    )
}

/// Entries along the side of the block that one pixel shows.
fn scale(model: &ImplicitModel) -> usize {
    let shape = model.shape();
    (shape.states + shape.inputs.max(shape.outputs)).div_ceil(LARGEST).max(1)
}

fn image(model: &ImplicitModel) -> Image {
    let scale = scale(model);
    let shape = model.shape();
    let [n, p, q] = [shape.states, shape.inputs, shape.outputs].map(|size| size.div_ceil(scale));
    // Lines are thick enough to be seen when a phone shrinks the image, and absent where there is nothing to
    // separate.
    let line = ((n + p) / 300).max(1);
    let (across, down) = (if n > 0 && p > 0 { line } else { 0 }, if n > 0 && q > 0 { line } else { 0 });
    let (width, height) = (n + across + p, n + down + q);
    let mut counts = vec![0u32; width * height];
    for (matrix, top, left) in
        [(model.a(), 0, 0), (model.b(), 0, n + across), (model.c(), n + down, 0), (model.d(), n + down, n + across)]
    {
        for i in 0..matrix.rows() {
            for (j, _) in matrix.row(i) {
                counts[(top + i / scale) * width + left + j / scale] += 1;
            }
        }
    }
    let cells = (scale * scale) as f64;
    // The square root keeps blocks with few non-zeros visible.
    let shade = |count: u32| {
        if count == 0 { 0.0 } else { (f64::from(count) / cells).min(1.0).sqrt().max(0.15) * f64::from(BLACK) }
    };
    let mut pixels: Vec<u8> = counts.iter().map(|c| shade(*c) as u8).collect();
    for k in 0..n {
        let at = k * width + k;
        let looped = (k * scale..((k + 1) * scale).min(shape.states)).any(|i| model.a().row(i).any(|(j, _)| j == i));
        pixels[at] = if looped { SELF_LOOP } else { DIAGONAL };
    }
    for row in 0..height {
        for column in 0..width {
            if (n..n + across).contains(&column) || (n..n + down).contains(&row) {
                pixels[row * width + column] = RED;
            }
        }
    }
    Image { width, height, pixels, palette: palette() }
}

fn palette() -> Vec<[u8; 3]> {
    let mut palette: Vec<[u8; 3]> =
        (0..=BLACK).map(|k| [(255.0 * (1.0 - f64::from(k) / f64::from(BLACK))) as u8; 3]).collect();
    palette.extend([[214, 40, 40], [122, 167, 255], [11, 59, 208]]);
    palette
}

/// Every block with weights, from the first layer to the outputs.
fn tap_blocks(model: &ImplicitModel) -> Vec<Csr<f32>> {
    let targets = (0..model.layout().layers().len()).rev().map(Target::Layer).chain([Target::Output]);
    let blocks = targets.flat_map(|target| model.summands(target));
    blocks
        .filter_map(|b| match b.weights {
            TapWeights::Taps(taps) => Some(taps),
            _ => None,
        })
        .collect()
}

/// The blocks one below the other with lines between, in square blocks of entries where they are large.
fn taps_image(blocks: &[Csr<f32>]) -> Image {
    let widest = blocks.iter().map(Csr::cols).max().unwrap_or(0);
    let rows: usize = blocks.iter().map(Csr::rows).sum();
    let scale = widest.max(rows).div_ceil(LARGEST).max(1);
    let line = (widest / scale / 300).max(1);
    let width = widest.div_ceil(scale);
    let mut pixels: Vec<u8> = Vec::new();
    let shade = |count: u32| {
        let share = f64::from(count) / (scale * scale) as f64;
        if count == 0 { 0.0 } else { share.min(1.0).sqrt().max(0.15) * f64::from(BLACK) }
    };
    for (k, block) in blocks.iter().enumerate() {
        if k > 0 {
            pixels.extend(std::iter::repeat_n(RED, line * width));
        }
        let mut counts = vec![0u32; block.rows().div_ceil(scale) * width];
        for i in 0..block.rows() {
            block.row(i).for_each(|(j, _)| counts[i / scale * width + j / scale] += 1);
        }
        // A block has no entries beyond its last tap; that area is not drawn as zeros.
        let own = block.cols().div_ceil(scale);
        pixels
            .extend(counts.iter().enumerate().map(|(at, c)| if at % width < own { shade(*c) as u8 } else { NOTHING }));
    }
    let height = pixels.len() / width.max(1);
    let mut palette = palette();
    palette.push([225, 228, 234]);
    Image { width, height, pixels, palette }
}

#[cfg(test)]
mod tests {
    use super::*;
    use simplicit::layout::{Activation, Layer, Layout};
    use simplicit::model::ModelParts;

    fn model(n: usize, p: usize, q: usize, a: &[(usize, usize)]) -> ImplicitModel {
        let rows = (0..n).map(|i| a.iter().filter(move |e| e.0 == i).map(|e| (e.1, 0.25f32)).collect::<Vec<_>>());
        ImplicitModel::new(ModelParts {
            a: Csr::from_rows(n, rows),
            b: Csr::from_rows(p, (0..n).map(|i| vec![(i % p.max(1), 1.0f32)])),
            c: Csr::empty(q, n),
            d: Csr::from_rows(p, (0..q).map(|_| vec![(p - 1, 1.0f32)])),
            state_bias: vec![0.0; n],
            output_bias: vec![0.0; q],
            layout: Layout::new(vec![Layer::dense("l", n, Activation::Relu)]),
            ..Default::default()
        })
        .unwrap()
    }

    #[test]
    fn every_entry_has_its_pixel() {
        let found = image(&model(3, 2, 1, &[(0, 1), (1, 1), (2, 0)]));
        let (o, x, r, b, s) = (0, BLACK, RED, DIAGONAL, SELF_LOOP);
        #[rustfmt::skip]
        let expected = vec![
            b, x, o, r, x, o,
            o, s, o, r, o, x,
            x, o, b, r, x, o,
            r, r, r, r, r, r,
            o, o, o, r, o, x,
        ];
        assert_eq!((found.width, found.height), (6, 5));
        assert_eq!(found.pixels, expected);
        assert_eq!(found.palette.len(), usize::from(SELF_LOOP) + 1);
    }

    #[test]
    fn taps_are_stacked_with_lines_between() {
        let first = Csr::from_rows(3, [vec![(0, 1.0f32)], vec![(2, -1.0)]]);
        let second = Csr::from_rows(2, [vec![(1, 2.0f32)]]);
        let found = taps_image(&[first, second]);
        let (o, x, r, n) = (0, BLACK, RED, NOTHING);
        assert_eq!((found.width, found.height), (3, 4));
        assert_eq!(found.pixels, [x, o, o, o, o, x, r, r, r, o, x, n]);
        assert_eq!(found.palette.len(), usize::from(NOTHING) + 1);
    }

    #[test]
    fn large_patterns_are_shown_in_blocks() {
        let model = model(1500, 3000, 5, &[(0, 1400), (7, 7)]);
        assert_eq!(scale(&model), 3);
        let found = image(&model);
        assert!(found.width <= LARGEST + 10 && found.height <= LARGEST);
        assert_eq!(found.pixels[1400 / 3], (BLACK as f64 / 3.0) as u8, "one of nine entries");
        assert_eq!(found.pixels[(7 / 3) * found.width + 7 / 3], SELF_LOOP);
    }
}
