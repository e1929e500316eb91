//! Conjugate gradients over all non-zeros, preconditioned row by row with the row problems' own normal matrices.

use std::ops::Range;

use crate::Result;
use crate::linalg::{Cholesky, axpy, dot};
use crate::problem::penalty::soft;
use crate::train::refit::linearised::Linearised;

/// Conjugate gradients end at this residual, relative to the right-hand side.
const RESIDUAL: f64 = 0.03;

/// The normal matrices of rows, each on the row's support.
pub(in crate::train) struct Preconditioner {
    /// The first entry and the factor of every chunk.
    pub(in crate::train) chunks: Vec<(usize, Cholesky)>,
    pub(in crate::train) held: Vec<HeldRow>,
}

/// A row that the ball holds: its entries, the signs σ of its A part, P·σ and σᵀPσ.
pub(in crate::train) struct HeldRow {
    span: Range<usize>,
    signs: Vec<f64>,
    solved: Vec<f64>,
    scale: f64,
}

impl Preconditioner {
    fn apply_chunks(&self, r: &[f64]) -> Vec<f64> {
        let mut out = r.to_vec();
        for (first, factor) in &self.chunks {
            factor.solve(&mut out[*first..first + factor.size()], 1);
        }
        out
    }

    /// P·r, without the part that would push a held row out of its ball.
    pub(in crate::train) fn apply(&self, r: &[f64]) -> Vec<f64> {
        let mut out = self.apply_chunks(r);
        for HeldRow { span, signs, solved, scale } in &self.held {
            let out = &mut out[span.clone()];
            let push = dot(signs, out) / scale;
            out.iter_mut().zip(solved).for_each(|(o, s)| *o -= push * s);
        }
        out
    }

    /// Finds the rows on the boundary of the ball whose step would leave it; they move along the boundary.
    pub(in crate::train) fn hold(&mut self, support: &Linearised, w: &[f64], kappa: f64, descent: &[f64]) {
        let step = self.apply_chunks(descent);
        for span in rows_of(support) {
            let signs: Vec<f64> = span
                .clone()
                .map(|k| if support.entries()[k].in_a && w[k] != 0.0 { w[k].signum() } else { 0.0 })
                .collect();
            let norm: f64 = dot(&signs, &w[span.clone()]);
            if norm < (1.0 - 1e-4) * kappa || dot(&signs, &step[span.clone()]) <= 0.0 {
                continue;
            }
            let mut whole = vec![0.0; w.len()];
            whole[span.clone()].copy_from_slice(&signs);
            let solved = self.apply_chunks(&whole)[span.clone()].to_vec();
            let scale = dot(&signs, &solved);
            if scale > 0.0 {
                self.held.push(HeldRow { span, signs, solved, scale });
            }
        }
    }
}

/// The entries of every row between states of the model.
fn rows_of(support: &Linearised) -> Vec<Range<usize>> {
    let rows = support.entries().chunk_by(|a, b| a.row == b.row);
    let mut first = 0;
    let spans = rows.map(|row| {
        first += row.len();
        (first - row.len()..first, row.iter().any(|entry| entry.in_a))
    });
    spans.filter(|(_, reads)| *reads).map(|(span, _)| span).collect()
}

/// Projects the A part of every state row onto Σ|a_j| ≤ κ.
pub(in crate::train) fn into_ball(w: &mut [f64], support: &Linearised, kappa: f64) {
    for span in rows_of(support) {
        let inside: Vec<usize> = span.filter(|&k| support.entries()[k].in_a).collect();
        let mut sizes: Vec<f64> = inside.iter().map(|&k| w[k].abs()).collect();
        let norm: f64 = sizes.iter().sum();
        if norm <= kappa {
            continue;
        }
        sizes.sort_by(|a, b| b.total_cmp(a));
        // A little inside the ball, so that the stored weights satisfy the bound too.
        let radius = kappa * (1.0 - 1e-12);
        let (mut sum, mut threshold) = (0.0, 0.0);
        for (k, size) in sizes.iter().enumerate() {
            sum += size;
            let candidate = (sum - radius) / (k + 1) as f64;
            if *size > candidate {
                threshold = candidate;
            }
        }
        for k in inside {
            w[k] = soft(w[k], threshold);
        }
    }
}

/// Moves `x` towards H⁻¹b for the product v ↦ Hv, where `r` is the residual b − Hx, before and after.
pub(in crate::train) fn conjugate_gradients(
    x: &mut [f64],
    r: &mut [f64],
    b: &[f64],
    steps: usize,
    preconditioner: &Preconditioner,
    product: impl Fn(&[f64]) -> Result<Vec<f64>>,
) -> Result<()> {
    let mut z = preconditioner.apply(r);
    let mut direction = z.clone();
    let mut rz = dot(r, &z);
    let enough = RESIDUAL * RESIDUAL * dot(b, &preconditioner.apply(b));
    for _ in 0..steps {
        if rz.is_nan() || rz <= enough {
            break;
        }
        let image = product(&direction)?;
        let curvature = dot(&direction, &image);
        if curvature.is_nan() || curvature <= 0.0 {
            break;
        }
        let length = rz / curvature;
        axpy(x, length, &direction);
        axpy(r, -length, &image);
        z = preconditioner.apply(r);
        let next = dot(r, &z);
        let beta = next / rz;
        direction.iter_mut().zip(&z).for_each(|(d, z)| *d = z + beta * *d);
        rz = next;
    }
    Ok(())
}
