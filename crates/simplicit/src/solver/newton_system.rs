//! The linear system of one Newton step: (Ĝ + εI + Δ) on the active entries J, zero elsewhere, Δ = f̂″ ≥ 0.
//!
//! Either the |J| × |J| matrix is factored, or the shared inverse of Ĝ + εI is corrected (Woodbury) on the entries E
//! that differ from it: those outside J (Δ = ∞) and those with Δ > 0. The smaller form is used. Most rows of a design
//! with enough samples use either nearly all features or few of them, so the factor is usually small. It is kept
//! while J, Δ and ε do not change.

use super::design::{Coordinates, epsilon};
use crate::linalg::Cholesky;

/// The two ways to solve the system; the choice depends on sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Method {
    /// Factor on the active entries.
    Direct,
    /// Correct the shared inverse on the exceptional entries.
    Corrected,
}

impl Method {
    /// The cheaper way, if the inverse exists. The cost of making the inverse is divided among `systems` systems.
    pub(crate) fn of(coordinates: &Coordinates, level: usize, diagonal: &[f64], systems: f64) -> Self {
        let active = diagonal.iter().filter(|v| **v >= 0.0).count();
        let exceptional = diagonal.iter().filter(|v| **v != 0.0).count();
        let d = diagonal.len();
        let cube = |k: usize| (k as f64).powi(3) / 3.0;
        let making = 3.0 * cube(d) / systems;
        let corrected_is_cheaper = cube(exceptional) + 6.0 * (d * d) as f64 + 1e5 + making < cube(active);
        if corrected_is_cheaper && coordinates.inverse(level).is_some() { Self::Corrected } else { Self::Direct }
    }
}

/// A factored system and what it was factored for.
#[derive(Debug)]
pub(crate) struct NewtonSystem {
    level: usize,
    /// Δ on active entries, never NaN; a negative number marks an inactive entry.
    diagonal: Vec<f64>,
    valid: bool,
    method: Method,
    /// J or E, ascending.
    entries: Vec<usize>,
    factor: Cholesky,
    small: Vec<f64>,
    /// How many systems share an inverse.
    systems: f64,
}

/// Marks an entry outside J.
pub(crate) const INACTIVE: f64 = -1.0;

impl NewtonSystem {
    /// For one of `systems` systems that share an inverse.
    pub(crate) fn new(systems: f64) -> Self {
        Self {
            systems,
            level: 0,
            diagonal: Vec::new(),
            valid: false,
            method: Method::Direct,
            entries: Vec::new(),
            factor: Cholesky::with_capacity(0),
            small: Vec::new(),
        }
    }

    pub(crate) fn method(&self) -> Method {
        self.method
    }

    /// Whether the last preparation was for exactly this system.
    pub(crate) fn is_same(&self, level: usize, diagonal: &[f64]) -> bool {
        self.valid && self.level == level && self.diagonal == diagonal
    }

    /// Factors for `diagonal` (Δ_j, or [`INACTIVE`]). False if it is numerically singular.
    pub(crate) fn prepare(&mut self, coordinates: &Coordinates, level: usize, diagonal: &[f64]) -> bool {
        if self.is_same(level, diagonal) {
            return true;
        }
        self.level = level;
        self.diagonal.clear();
        self.diagonal.extend_from_slice(diagonal);
        self.method = Method::of(coordinates, level, diagonal, self.systems);
        let inverse = if self.method == Method::Corrected { coordinates.inverse(level) } else { None };
        let d = diagonal.len();
        let direct = self.method == Method::Direct;
        self.entries.clear();
        self.entries.extend((0..d).filter(|&j| if direct { diagonal[j] >= 0.0 } else { diagonal[j] != 0.0 }));
        let (k, entries) = (self.entries.len(), &self.entries);
        let matrix = inverse.unwrap_or(coordinates.gram());
        self.valid = self.factor.factor(k, |a| {
            for (r, &i) in entries.iter().enumerate() {
                let row = matrix.row(i);
                let line = &mut a[r * k + r..(r + 1) * k];
                for (value, &j) in line.iter_mut().zip(&entries[r..]) {
                    *value = row[j];
                }
                line[0] += if direct {
                    epsilon(level) + diagonal[i]
                } else if diagonal[i] > 0.0 {
                    1.0 / diagonal[i]
                } else {
                    0.0
                };
            }
        });
        self.valid
    }

    /// Direct: x_J = (…)⁻¹ b_J, zero elsewhere, in place.
    pub(crate) fn solve_direct(&mut self, b: &mut [f64]) {
        self.small.clear();
        self.small.extend(self.entries.iter().map(|&j| b[j]));
        self.factor.solve(&mut self.small, 1);
        b.fill(0.0);
        for (&j, &x) in self.entries.iter().zip(&self.small) {
            b[j] = x;
        }
    }

    /// Corrected, first half: from t = (Ĝ+εI)⁻¹b the vector q (on E, zero elsewhere) with x = t − (Ĝ+εI)⁻¹q.
    pub(crate) fn correction(&mut self, t: &[f64], q: &mut [f64]) {
        self.small.clear();
        self.small.extend(self.entries.iter().map(|&j| t[j]));
        self.factor.solve(&mut self.small, 1);
        q.fill(0.0);
        for (&j, &x) in self.entries.iter().zip(&self.small) {
            q[j] = x;
        }
    }
}
