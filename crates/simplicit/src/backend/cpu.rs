//! The group solver on the processor: a ladder of inverses in f64, splitting in f32 for a block of rows at a time, single
//! moves and the last fit in f64.

use std::sync::{Arc, Mutex, PoisonError};

use super::moves::{fit, settle};
use super::projection::Projection;
use super::reduced::{Hints, settle_reduced};
use super::{CardinalityGroup, GroupBackend, Quadratic};
use crate::Result;
use crate::linalg::Matrix;
use crate::parallel::{self, Cancel, Threads};

/// Supports up to this size are settled entry by entry over all features; of larger ones only the likeliest moves are
/// tried.
const SMALL: usize = 320;

/// The backend that runs on this machine's processor.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Cpu;

/// The rows of a block while they go through the ladder, in single precision.
struct Block {
    rows: usize,
    linear: Vec<f32>,
    prices: Vec<f32>,
    v: Vec<f32>,
    dual: Vec<f32>,
}

impl Block {
    fn new(group: &CardinalityGroup, rows: std::ops::Range<usize>) -> Self {
        let d = group.quadratic.features();
        let part =
            |m: &Matrix| m.as_slice()[rows.start * d..rows.end * d].iter().map(|v| *v as f32).collect::<Vec<_>>();
        let (linear, prices, v) = (part(group.linear), part(group.prices), part(group.start));
        let dual = vec![0.0; v.len()];
        Self { rows: rows.len(), linear, prices, v, dual }
    }

    /// `steps` of w = (Ĝ + ρI)⁻¹(h + ρ(v − s)), v = the entries of w + s that are worth their price, s += w − v.
    fn split(
        &mut self,
        projection: &Projection,
        rho: f64,
        steps: usize,
        threads: Threads,
        cancel: &Cancel,
    ) -> Result<()> {
        let rho = rho as f32;
        let d = self.v.len() / self.rows.max(1);
        let mut right = vec![0.0f32; self.v.len()];
        let mut product = projection.product(self.rows);
        for _ in 0..steps {
            cancel.check()?;
            for (((r, h), v), s) in right.iter_mut().zip(&self.linear).zip(&self.v).zip(&self.dual) {
                *r = h / rho + (v - s);
            }
            projection.apply(&right, &mut product, threads)?;
            for panel in product.panels() {
                for (row, w) in panel.values.chunks_exact(panel.width).enumerate() {
                    let at = row * d + panel.first;
                    let span = at..at + panel.width;
                    let entries = w.iter().zip(&self.prices[span.clone()]);
                    for ((w, price), (v, s)) in
                        entries.zip(self.v[span.clone()].iter_mut().zip(&mut self.dual[span.clone()]))
                    {
                        let t = w + *s;
                        // Keeping an entry t lowers the cost by ρt²/2.
                        *v = if 0.5 * rho * t * t > *price { t } else { 0.0 };
                        *s = t - *v;
                    }
                }
            }
        }
        Ok(())
    }
}

impl GroupBackend for Cpu {
    fn solve(
        &self,
        group: &CardinalityGroup,
        threads: Threads,
        cancel: &Cancel,
        progress: &mut dyn FnMut(usize),
    ) -> Result<Matrix> {
        let (rows, d) = (group.rows(), group.quadratic.features());
        if rows == 0 || d == 0 {
            return Ok(Matrix::zeros(rows, d));
        }
        let size = group.block.max(1);
        let span = |block: usize| block * size..((block + 1) * size).min(rows);
        let blocks: Vec<Mutex<Block>> =
            (0..rows.div_ceil(size)).map(|b| Mutex::new(Block::new(group, span(b)))).collect();
        let each = Threads::new(threads.get().div_ceil(blocks.len()));
        let schedule = group.ladder.schedule();
        let mut diagonal = Vec::new();
        let mut before = None;
        for (rung, &(rho, steps)) in schedule.iter().enumerate() {
            cancel.check()?;
            let projection = match group.inverses {
                Some(kept) => kept.at(group.quadratic, rho, threads)?,
                None => Arc::new(Projection::new(group.quadratic, rho, threads)?),
            };
            if rung == 0 {
                diagonal = projection.inverse_diagonal(rho);
            }
            let shrink = before.map_or(1.0, |before: f64| before / rho) as f32;
            parallel::map(threads, blocks.len(), |b| {
                let mut block = blocks[b].lock().unwrap_or_else(PoisonError::into_inner);
                block.dual.iter_mut().for_each(|s| *s *= shrink);
                block.split(&projection, rho, steps, each, cancel)
            })?;
            before = Some(rho);
            progress(rows * (rung + 1) / (schedule.len() + 1));
        }
        let blocks: Vec<Block> =
            blocks.into_iter().map(|b| b.into_inner().unwrap_or_else(PoisonError::into_inner)).collect();
        let (first_rho, last_rho) = (schedule[0].0, before.unwrap_or(1.0));
        let mut out = Vec::with_capacity(rows * d);
        parallel::fold(
            threads,
            rows,
            |k| {
                cancel.check()?;
                let (block, at) = (&blocks[k / size], k % size);
                let (v, dual) = (&block.v[at * d..(at + 1) * d], &block.dual[at * d..(at + 1) * d]);
                let hints = Hints { v, dual, rho: last_rho, diagonal: &diagonal, diagonal_rho: first_rho };
                Ok(finish(group, k, &hints))
            },
            |k, row| {
                out.extend(row);
                if k + 1 == rows {
                    progress(rows);
                }
                Ok(())
            },
        )?;
        Matrix::from_vec(rows, d, out)
    }
}

/// Single moves from the support that the splitting ended with, and the best weights on what they leave.
fn finish(group: &CardinalityGroup, k: usize, hints: &Hints) -> Vec<f64> {
    let (h, prices) = (group.linear.row(k), group.prices.row(k));
    if !group.moves {
        let own = |(v, price): (&f32, &f64)| if *price < f64::INFINITY { f64::from(*v) } else { 0.0 };
        return hints.v.iter().zip(prices).map(own).collect();
    }
    let support: Vec<usize> = (0..h.len()).filter(|&j| hints.v[j] != 0.0 && prices[j] < f64::INFINITY).collect();
    match group.quadratic {
        Quadratic::Gram(gram) if support.len() <= SMALL => {
            let settled = settle(gram, h, &support, prices, group.ridge);
            fit(&group.quadratic, h, &settled, group.ridge)
        }
        _ => settle_reduced(&group.quadratic, h, &support, prices, group.ridge, hints),
    }
}
