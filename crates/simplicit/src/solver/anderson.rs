//! Anderson acceleration of a fixed-point iteration u ← F(u): the next u is the combination of the last images whose
//! residuals cancel best.

use crate::linalg::{axpy, dot};

/// Number of differences that are remembered.
const MEMORY: usize = 5;
/// Added to the diagonal of the small system: relative to its trace, and to the residual. The second bounds the
/// factors: an iterate that drifts at a constant speed has residuals without differences, so nothing else would limit
/// the step.
const REGULAR: f64 = 1e-10;
const DRIFT: f64 = 1e-4;
/// Residuals below this share of u are rounding (products are in single precision), so their differences carry no
/// information.
const NOISE: f64 = 1e-6;
/// A residual that grows by more than this factor shows that the remembered differences mislead; they are dropped.
const GROWTH: f64 = 2.0;

/// The remembered differences.
#[derive(Debug)]
pub(super) struct Anderson {
    d_images: Vec<f64>,
    d_residuals: Vec<f64>,
    /// Inner products of the `d_residuals`.
    gram: [[f64; MEMORY]; MEMORY],
    image: Vec<f64>,
    residual: Vec<f64>,
    size: f64,
    used: usize,
    slot: usize,
    is_empty: bool,
}

impl Anderson {
    pub(super) fn new(d: usize) -> Self {
        Self {
            d_images: vec![0.0; MEMORY * d],
            d_residuals: vec![0.0; MEMORY * d],
            gram: [[0.0; MEMORY]; MEMORY],
            image: vec![0.0; d],
            residual: vec![0.0; d],
            size: f64::INFINITY,
            used: 0,
            slot: 0,
            is_empty: true,
        }
    }

    pub(super) fn clear(&mut self) {
        (self.used, self.slot, self.is_empty, self.size) = (0, 0, true, f64::INFINITY);
    }

    /// `u` ← the next iterate, from u and the residual F(u) − u.
    pub(super) fn step(&mut self, u: &mut [f64], residual: &[f64]) {
        let d = u.len();
        let size = dot(residual, residual);
        if size > GROWTH * GROWTH * self.size {
            self.clear();
        }
        let is_noise = size <= NOISE * NOISE * dot(u, u);
        axpy(u, 1.0, residual);
        if is_noise {
            self.clear();
            return;
        }
        self.size = size;
        if !self.is_empty {
            let at = self.slot * d..(self.slot + 1) * d;
            let (d_image, d_residual) = (&mut self.d_images[at.clone()], &mut self.d_residuals[at]);
            for j in 0..d {
                d_image[j] = u[j] - self.image[j];
                d_residual[j] = residual[j] - self.residual[j];
            }
            self.used = (self.used + 1).min(MEMORY);
            for k in 0..self.used {
                let at = |k: usize| &self.d_residuals[k * d..(k + 1) * d];
                let product = dot(at(self.slot), at(k));
                (self.gram[self.slot][k], self.gram[k][self.slot]) = (product, product);
            }
            self.slot = (self.slot + 1) % MEMORY;
        }
        self.is_empty = false;
        self.image.copy_from_slice(u);
        self.residual.copy_from_slice(residual);
        let used = self.used;
        if used == 0 {
            return;
        }
        let mut factors = [0.0; MEMORY];
        for (k, factor) in factors[..used].iter_mut().enumerate() {
            *factor = dot(&self.d_residuals[k * d..(k + 1) * d], residual);
        }
        if !solve_small(&self.gram, DRIFT * size, &mut factors[..used]) {
            self.clear();
            return;
        }
        for (k, factor) in factors[..used].iter().enumerate() {
            axpy(u, -factor, &self.d_images[k * d..(k + 1) * d]);
        }
    }
}

/// (A + (shift + δ)I)x = b in place for the leading part of a positive semidefinite A. False if it is not finite.
fn solve_small(a: &[[f64; MEMORY]; MEMORY], shift: f64, b: &mut [f64]) -> bool {
    let n = b.len();
    let mut l = *a;
    let shift = shift + REGULAR * (0..n).map(|i| a[i][i]).sum::<f64>();
    for i in 0..n {
        l[i][i] += shift;
        for j in 0..=i {
            let sum = l[i][j] - (0..j).map(|k| l[i][k] * l[j][k]).sum::<f64>();
            l[i][j] = if i == j { sum.max(0.0).sqrt() } else { sum / l[j][j] };
        }
    }
    for i in 0..n {
        b[i] = (b[i] - (0..i).map(|k| l[i][k] * b[k]).sum::<f64>()) / l[i][i];
    }
    for i in (0..n).rev() {
        b[i] = (b[i] - (i + 1..n).map(|k| l[k][i] * b[k]).sum::<f64>()) / l[i][i];
    }
    b.iter().all(|b| b.is_finite())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    #[test]
    fn a_linear_map_of_low_rank_is_solved_in_as_many_steps() {
        let mut r = Random::new(4);
        let d = 30;
        let (eigenvalues, goal) = ([0.99, -0.9, 0.7, 0.95], (0..d).map(|_| r.normal()).collect::<Vec<f64>>());
        // F(u) − goal = diag(…)(u − goal) with four different factors, so five remembered steps find the goal
        // exactly.
        let mut u = vec![0.0; d];
        let mut memory = Anderson::new(d);
        for _ in 0..8 {
            let residual: Vec<f64> = (0..d).map(|j| (eigenvalues[j % 4] - 1.0) * (u[j] - goal[j])).collect();
            memory.step(&mut u, &residual);
        }
        let error = u.iter().zip(&goal).map(|(u, g)| (u - g).abs()).fold(0.0, f64::max);
        assert!(error < 1e-3, "{error}");
        // The plain iteration is still far from the goal after as many steps.
        assert!(0.99f64.powi(8) > 0.9);
    }
}
