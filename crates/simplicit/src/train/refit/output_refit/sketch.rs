//! The row problems' normal matrices from some samples: their diagonal is the unit of the ridge, their blocks are the
//! preconditioner.

use std::borrow::Cow;
use std::ops::Range;

use super::problem::{At, Point, Problem};
use crate::linalg::{Cholesky, Matrix};
use crate::statistics::{BLOCK, Statistics};
use crate::train::refit::linearised::{Features, Linearised};
use crate::train::refit::row_blocks::Preconditioner;
use crate::{Error, Result};

/// Damping of a step, relative to the diagonal.
const DAMPING: f64 = 1e-3;
/// Number of rows of features that are gathered for a target, and number of samples that they come from if each gives
/// many. They only determine the preconditioner, which changes how fast a step converges but not its limit.
const ROWS: usize = 8 * BLOCK;
const SAMPLES: usize = 128;
/// The largest block of the preconditioner, and the most features of a target for which there are blocks.
const CHUNK: usize = 256;
const MOST_FEATURES: usize = 2048;

/// The normal matrices at a model.
pub(super) struct Sketch<'a> {
    support: &'a Linearised,
    row_weights: &'a [f64],
    /// λ_i·E f_j² of every entry.
    pub(super) diagonal: Vec<f64>,
    /// For every target its entries, and E ffᵀ unless that is too large.
    grams: Vec<(Range<usize>, Option<Matrix>)>,
}

impl<'a> Sketch<'a> {
    pub(super) fn new(problem: &'a Problem<'_>, at: &At, support: &'a Linearised) -> Result<Self> {
        let (entries, row_weights) = (support.entries(), &problem.row_weights[..]);
        // Weights that do not change have no curvature.
        let mut diagonal = vec![0.0; entries.len()];
        let mut grams = Vec::new();
        for target in support.targets() {
            let (squares, gram) = moments(problem, at, &target)?;
            // A column that hardly ever fires must not become a direction without curvature.
            let typical = squares[..target.width - 1].iter().sum::<f64>() / (target.width - 1).max(1) as f64;
            for (d, entry) in diagonal[target.entries.clone()].iter_mut().zip(&entries[target.entries.clone()]) {
                *d = row_weights[entry.row] * squares[entry.feature].max(1e-4 * typical).max(f64::MIN_POSITIVE);
            }
            grams.push((target.entries.clone(), gram));
        }
        Ok(Self { support, row_weights, diagonal, grams })
    }

    /// The factor on the diagonal that is added to the curvature of a step.
    pub(super) fn damping(ridge: f64) -> f64 {
        DAMPING + ridge
    }

    /// The factors of all blocks under a ridge.
    pub(super) fn preconditioner(&self, ridge: f64) -> Result<Preconditioner> {
        let entries = self.support.entries();
        let mut chunks = Vec::new();
        for (range, gram) in &self.grams {
            let most = if gram.is_some() { CHUNK } else { 1 };
            let mut first = range.start;
            while first < range.end {
                let row = entries[first].row;
                let length = entries[first..range.end].iter().take(most).take_while(|e| e.row == row).count();
                chunks.push((first, self.factor(first..first + length, gram.as_ref(), Self::damping(ridge))?));
                first += length;
            }
        }
        Ok(Preconditioner { chunks, held: Vec::new() })
    }

    fn factor(&self, span: Range<usize>, gram: Option<&Matrix>, mut damping: f64) -> Result<Cholesky> {
        let (entries, length) = (&self.support.entries()[span.clone()], span.len());
        let weight = self.row_weights[entries[0].row];
        let mut factor = Cholesky::with_capacity(length);
        while !factor.factor(length, |a| {
            for (r, one) in entries.iter().enumerate() {
                let diagonal = self.diagonal[span.start + r];
                match gram {
                    Some(gram) => {
                        for (s, other) in entries.iter().enumerate().skip(r) {
                            a[r * length + s] = weight * gram[(one.feature, other.feature)];
                        }
                    }
                    None => a[r * length + r] = diagonal,
                }
                a[r * length + r] += damping * diagonal;
            }
        }) {
            damping *= 10.0;
            if damping > 1e6 {
                return Err(Error::shape("states of the model", "finite numbers", "a NaN"));
            }
        }
        Ok(factor)
    }
}

/// E f_j² of a target's features and, unless they are too many, E ffᵀ.
fn moments(problem: &Problem, at: &At, target: &Features) -> Result<(Vec<f64>, Option<Matrix>)> {
    let (positions, width) = (target.positions(), target.width);
    let samples = problem.fitted().min(if positions == 1 { ROWS } else { SAMPLES });
    let each = (ROWS / samples.max(1)).clamp(1, positions);
    let count = samples * each;
    let features = |range: Range<usize>| -> Result<Matrix> {
        let mut out = Matrix::zeros(range.len(), width);
        let mut found: Option<(usize, Cow<'_, Point>)> = None;
        for (k, number) in range.enumerate() {
            let (sample, turn) = (number / each, number % each);
            let (chunk, row) = problem.place(sample);
            let point = match found.take() {
                Some((of, point)) if of == chunk => point,
                _ => problem.point(at, chunk)?,
            };
            // The positions of a sample are evenly spaced, and start at another place in the next sample.
            let position = (turn * positions / each + sample) % positions;
            target.at(&point.u, &point.x, row, position, out.row_mut(k));
            found = Some((chunk, point));
        }
        Ok(out)
    };
    if width <= MOST_FEATURES {
        let read = |range: Range<usize>| {
            let none = Matrix::zeros(range.len(), 0);
            Ok((features(range)?, none))
        };
        let mut gram = Statistics::stream(count, problem.threads, problem.cancel, read, |_| {})?.gram().clone();
        gram.as_mut_slice().iter_mut().for_each(|v| *v /= count as f64);
        return Ok(((0..width).map(|j| gram[(j, j)]).collect(), Some(gram)));
    }
    let mut squares = vec![0.0; width];
    for first in (0..count).step_by(BLOCK) {
        let features = features(first..(first + BLOCK).min(count))?;
        for row in 0..features.rows() {
            squares.iter_mut().zip(features.row(row)).for_each(|(q, f)| *q += f * f / count as f64);
        }
    }
    Ok((squares, None))
}
