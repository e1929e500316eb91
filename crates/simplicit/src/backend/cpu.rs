//! The group solver on the processor: a ladder of inverses in f64, splitting in f32 for a block of rows at a time, single
//! moves and the last fit in f64.

use std::sync::{Mutex, PoisonError};

use super::moves::{fit, settle};
use super::reduced::{Hints, settle_reduced};
use super::{CardinalityGroup, GroupBackend, Quadratic};
use crate::linalg::{Cholesky, Matrix, View, gemm, shifted_inverse};
use crate::parallel::{self, Cancel, Threads};
use crate::{Error, Result};

/// Supports up to this size are settled entry by entry over all features; larger ones among their likeliest moves.
const SMALL: usize = 320;

/// This machine's processor.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Cpu;

/// What a step multiplies with: ρ(Ĝ + ρI)⁻¹.
enum Projection {
    /// The matrix itself, d × d.
    Whole(Matrix<f32>),
    /// I − F̂ᵀB with B = (F̂F̂ᵀ + ρI)⁻¹F̂, both m × d.
    Factors(Matrix<f32>, Matrix<f32>),
}

impl Projection {
    fn new(quadratic: Quadratic, rho: f64, threads: Threads) -> Result<Self> {
        match quadratic {
            Quadratic::Gram(gram) => Ok(Self::Whole(shifted_inverse(gram, rho, rho, threads)?)),
            Quadratic::Samples(f) => {
                let m = f.rows();
                let mut kernel = Matrix::zeros(m, m);
                gemm(kernel.as_mut_slice(), m, false, 1.0, f.view(), f.view().t());
                let mut factor = Cholesky::with_capacity(m);
                let filled = factor.factor(m, |a| {
                    a.copy_from_slice(kernel.as_slice());
                    (0..m).for_each(|i| a[i * m + i] += rho);
                });
                if !filled {
                    return Err(Error::shape("samples", "finite features", "a NaN"));
                }
                let mut solved = f.clone();
                factor.solve(solved.as_mut_slice(), f.cols());
                Ok(Self::Factors(f.cast(), solved.cast()))
            }
        }
    }

    /// out = rows of `x` times the projection; `room` is for what lies between.
    fn apply(&self, x: &[f32], rows: usize, out: &mut [f32], room: &mut Vec<f32>) {
        match self {
            Self::Whole(p) => {
                let d = p.cols();
                gemm(out, d, false, 1.0, View::new(x, rows, d, d), p.view());
            }
            Self::Factors(f, b) => {
                let (m, d) = (f.rows(), f.cols());
                room.resize(rows * m, 0.0);
                gemm(room, m, false, 1.0, View::new(x, rows, d, d), f.view().t());
                out.copy_from_slice(x);
                gemm(out, d, true, -1.0, View::new(room, rows, m, m), b.view());
            }
        }
    }

    /// The diagonal of (Ĝ + ρI)⁻¹.
    fn inverse_diagonal(&self, rho: f64) -> Vec<f64> {
        match self {
            Self::Whole(p) => (0..p.rows()).map(|j| f64::from(p[(j, j)]) / rho).collect(),
            Self::Factors(f, b) => {
                let mut out = vec![1.0f64; f.cols()];
                for s in 0..f.rows() {
                    for ((out, f), b) in out.iter_mut().zip(f.row(s)).zip(b.row(s)) {
                        *out -= f64::from(f * b);
                    }
                }
                // The difference may round to nothing, or below.
                out.iter().map(|v| v.max(1e-6) / rho).collect()
            }
        }
    }
}

/// A block of rows on its way through the ladder, in single precision.
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

    /// `steps` of w = (Ĝ + ρI)⁻¹(h + ρ(v − s)), v = the entries of w + s worth their price, s += w − v.
    fn split(&mut self, projection: &Projection, rho: f64, steps: usize, cancel: &Cancel) -> Result<()> {
        let rho = rho as f32;
        let mut right = vec![0.0f32; self.v.len()];
        let mut w = vec![0.0f32; self.v.len()];
        let mut room = Vec::new();
        for _ in 0..steps {
            cancel.check()?;
            for (((r, h), v), s) in right.iter_mut().zip(&self.linear).zip(&self.v).zip(&self.dual) {
                *r = h / rho + (v - s);
            }
            projection.apply(&right, self.rows, &mut w, &mut room);
            let entries = w.iter().zip(&self.prices).zip(self.v.iter_mut().zip(&mut self.dual));
            for ((w, price), (v, s)) in entries {
                let t = w + *s;
                // An entry t is worth ρt²/2.
                *v = if 0.5 * rho * t * t > *price { t } else { 0.0 };
                *s = t - *v;
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
        let schedule = group.ladder.schedule();
        let mut diagonal = Vec::new();
        let mut before = None;
        for (rung, &(rho, steps)) in schedule.iter().enumerate() {
            cancel.check()?;
            let projection = Projection::new(group.quadratic, rho, threads)?;
            if rung == 0 {
                diagonal = projection.inverse_diagonal(rho);
            }
            let shrink = before.map_or(1.0, |before: f64| before / rho) as f32;
            parallel::map(threads, blocks.len(), |b| {
                let mut block = blocks[b].lock().unwrap_or_else(PoisonError::into_inner);
                block.dual.iter_mut().for_each(|s| *s *= shrink);
                block.split(&projection, rho, steps, cancel)
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
