//! A random search over squares of extreme values, after the Square attack: it uses outputs only, no gradient.

use super::AttackSettings;
use super::classifier::{Classifier, fooled};
use super::region::{Part, pick, stream};
use crate::Result;
use crate::linalg::Matrix;
use crate::random::Random;

const SQUARES: u64 = 3;
/// Share of the image that the first squares cover; the side shrinks as the search goes on.
const FIRST_SHARE: f64 = 0.3;

/// For every sample, whether some proposal fooled the target.
pub(super) fn search(
    target: &Classifier,
    part: &Part,
    sample_shape: &[usize],
    settings: &AttackSettings,
    first: usize,
) -> Result<Vec<bool>> {
    let canvas = Canvas::new(sample_shape, part.u.cols());
    let mut found = vec![false; part.samples.len()];
    let mut open: Vec<usize> = (0..found.len()).collect();
    let mut streams: Vec<Random> = part.samples.iter().map(|&s| stream(settings.seed, first + s, SQUARES)).collect();
    let mut best = part.u.clone();
    let mut margins = vec![f64::INFINITY; open.len()];
    for query in 0..settings.queries {
        let mut x = pick(&best, &open);
        for (row, &s) in open.iter().enumerate() {
            let (low, high) = (part.low.row(s), part.high.row(s));
            if query == 0 {
                canvas.stripes(&mut streams[s], low, high, x.row_mut(row));
            } else {
                let left = 1.0 - query as f64 / settings.queries as f64;
                canvas.square(FIRST_SHARE * left * left, &mut streams[s], low, high, x.row_mut(row));
            }
            part.draw_into_ball(s, x.row_mut(row));
        }
        let labels: Vec<u32> = open.iter().map(|&s| part.labels[s]).collect();
        let logits = target.logits(&x)?;
        let hit = fooled(&logits, &labels);
        for (row, &s) in open.iter().enumerate() {
            let margin = margin(&logits, row, labels[row]);
            if margin < margins[s] {
                margins[s] = margin;
                best.row_mut(s).copy_from_slice(x.row(row));
            }
            found[s] = hit[row];
        }
        open.retain(|&s| !found[s]);
        if open.is_empty() {
            break;
        }
    }
    Ok(found)
}

/// The label's output minus the largest other.
fn margin(logits: &Matrix<f32>, row: usize, label: u32) -> f64 {
    let values = logits.row(row);
    let others = values.iter().enumerate().filter(|(j, _)| *j != label as usize);
    f64::from(values[label as usize]) - others.map(|(_, v)| f64::from(*v)).fold(f64::NEG_INFINITY, f64::max)
}

/// A sample seen as an image.
struct Canvas {
    channels: usize,
    height: usize,
    width: usize,
}

impl Canvas {
    fn new(sample_shape: &[usize], features: usize) -> Self {
        let (channels, height, width) = match sample_shape {
            [channels, height, width] => (*channels, *height, *width),
            [height, width] => (1, *height, *width),
            _ => (1, 1, features),
        };
        if channels.saturating_mul(height).saturating_mul(width) == features {
            Self { channels, height, width }
        } else {
            Self { channels: 1, height: 1, width: features }
        }
    }

    fn at(&self, channel: usize, y: usize, x: usize) -> usize {
        (channel * self.height + y) * self.width + x
    }

    /// A first proposal: every column of every channel is set to one end of its box.
    fn stripes(&self, random: &mut Random, low: &[f32], high: &[f32], out: &mut [f32]) {
        for channel in 0..self.channels {
            for x in 0..self.width {
                let ends = if random.bits() & 1 == 0 { low } else { high };
                for k in (0..self.height).map(|y| self.at(channel, y, x)) {
                    out[k] = ends[k];
                }
            }
        }
    }

    /// One square whose channels are each set to one end of their box; in a line of values, a run of them.
    fn square(&self, share: f64, random: &mut Random, low: &[f32], high: &[f32], out: &mut [f32]) {
        let area = share * (self.height * self.width) as f64;
        let side = if self.height == 1 { area } else { area.sqrt() };
        let side = (side.round() as usize).max(1);
        let (tall, wide) = (side.min(self.height), side.min(self.width));
        let (top, left) = (random.below(self.height - tall + 1), random.below(self.width - wide + 1));
        for channel in 0..self.channels {
            let ends = if random.bits() & 1 == 0 { low } else { high };
            for y in top..top + tall {
                let (from, to) = (self.at(channel, y, left), self.at(channel, y, left + wide));
                out[from..to].copy_from_slice(&ends[from..to]);
            }
        }
    }
}
