//! The optimum on a support, and corrections of the support: if the signs are nearly right, a few linear systems lead
//! to the solution.
//!
//! On the active entries J with signs σ the optimum solves Ĝw + f̂′(w) + θcσ = ĥ (θ with the ball's face as one more
//! equation). Entries whose sign comes out wrong leave J, entries whose gradient exceeds their kink enter it, and the
//! system is solved again, as long as the corrections become fewer quickly. Every solution is certified.

use super::SolverSettings;
use super::batch::{Best, Workspace, multiply};
use super::canonical::Row;
use super::design::Coordinates;
use super::newton_system::{INACTIVE, Method};
use crate::linalg::{axpy, dot};
use crate::problem::Penalty;

/// The level whose ε the systems have: so small that it does not matter, but safe where the active columns are
/// dependent.
const LEVEL: usize = 11;
/// The most systems that are solved in one call.
const MAX_STEPS: usize = 6;
/// Corrections after the first system, as a share of the features; after each further system at most half as many. A
/// support that is nearly right needs fewer, and one that needs more is left to further splitting.
const FIRST_CORRECTIONS: f64 = 0.1;
/// The most systems without a correction, which only improve the last digits.
const MAX_REFINEMENTS: usize = 2;

/// The state of one row.
pub(super) struct ActiveSet<'a> {
    row: &'a Row<'a>,
    w: Vec<f64>,
    gw: Vec<f64>,
    /// σ of active entries, 0 elsewhere.
    signs: Vec<f64>,
    diagonal: Vec<f64>,
    step: Vec<f64>,
    correction: Vec<f64>,
    /// cσ on J while the ball is tight.
    border: Vec<f64>,
    border_step: Vec<f64>,
    theta: f64,
    is_tight: bool,
    method: Method,
    /// The most corrections after the next system; before the first system none are made.
    corrections: usize,
    refinements: usize,
    pub(super) steps: usize,
    pub(super) best: Best,
    open: bool,
}

impl<'a> ActiveSet<'a> {
    /// Starts from a feasible w and the ball's multiplier there.
    pub(super) fn new(row: &'a Row<'a>, penalty: &dyn Penalty, w: &[f64], theta: f64, best: Best) -> Self {
        let d = w.len();
        let mut out = Self {
            row,
            w: w.to_vec(),
            gw: vec![0.0; d],
            signs: vec![0.0; d],
            diagonal: vec![INACTIVE; d],
            step: vec![0.0; d],
            correction: vec![0.0; d],
            border: Vec::new(),
            border_step: Vec::new(),
            theta,
            is_tight: theta > 0.0,
            method: Method::Direct,
            corrections: usize::MAX,
            refinements: 0,
            steps: 0,
            best,
            open: true,
        };
        for j in 0..d {
            if !row.is_clipped(j, w[j]) && (w[j] != 0.0 || !out.has_corner(penalty, j)) {
                out.signs[j] = 1f64.copysign(w[j]);
            }
        }
        out
    }

    fn ball_weight(&self, j: usize) -> f64 {
        self.row.ball.as_ref().map_or(0.0, |(c, _)| c[j])
    }

    /// Whether zero is a point where the row's cost is not smooth in entry j.
    fn has_corner(&self, penalty: &dyn Penalty, j: usize) -> bool {
        self.row.kink(penalty, j) > 0.0 || (self.is_tight && self.ball_weight(j) > 0.0)
    }

    /// f̂′ + θcσ at an entry of sign `sign`.
    fn pull(&self, penalty: &dyn Penalty, j: usize, sign: f64) -> f64 {
        sign * (self.row.slope(penalty, j, self.w[j].abs()) + self.theta * self.ball_weight(j))
    }

    /// Certifies w and corrects the active set; `open` falls when the row is solved or there is no progress.
    fn revise(&mut self, penalty: &dyn Penalty, settings: &SolverSettings, workspace: &mut Workspace) {
        let d = self.w.len();
        let first = self.corrections == usize::MAX;
        let leaves = |s: &Self, j: usize| {
            s.signs[j] != 0.0
                && ((s.has_corner(penalty, j) && s.signs[j] * s.w[j] < 0.0) || s.row.is_clipped(j, s.w[j]))
        };
        let mut corrections = (0..d).filter(|&j| leaves(self, j)).count();
        let tight = self.row.ball.as_ref().is_some_and(|(c, radius)| {
            let size = c.iter().zip(&self.w).map(|(c, w)| c * w.abs()).sum::<f64>();
            if self.is_tight { self.theta > 0.0 } else { size > *radius }
        });
        corrections += usize::from(tight != self.is_tight);
        if corrections == 0 && self.row.is_feasible(&self.w) {
            workspace.trial.copy_from_slice(&self.w);
            workspace.v.copy_from_slice(&self.gw);
            self.row.settle_free(&mut workspace.trial, &mut workspace.v);
            let gap = self.row.certify(penalty, &workspace.trial, &workspace.v, self.theta);
            self.best.take(gap, &workspace.trial);
            if self.best.is_within(settings.tolerance) {
                self.open = false;
                return;
            }
        }
        let mut enters = vec![0.0; if first { 0 } else { d }];
        for (j, enters) in enters.iter_mut().enumerate().filter(|(j, _)| self.signs[*j] == 0.0) {
            let g = self.row.h[j] - self.gw[j];
            let sign = 1f64.copysign(g);
            let bound = self.row.bounds.as_ref().map_or(f64::INFINITY, |b| if g > 0.0 { b[j].1 } else { -b[j].0 });
            let inward = if self.w[j] == 0.0 {
                g.abs() - self.pull(penalty, j, 1.0) > 1e-12 * g.abs() && bound > 0.0
            } else {
                // The entry is held at a bound: it leaves the bound if the cost falls towards zero.
                let side = 1f64.copysign(self.w[j]);
                side * (g - self.pull(penalty, j, side)) < 0.0
            };
            if inward {
                *enters = if self.w[j] == 0.0 { sign } else { 1f64.copysign(self.w[j]) };
                corrections += 1;
            }
        }
        if !first {
            self.refinements += usize::from(corrections == 0);
            if corrections > self.corrections || self.refinements > MAX_REFINEMENTS {
                self.open = false;
                return;
            }
            self.corrections = (corrections / 2).max(2);
        } else {
            self.corrections = ((FIRST_CORRECTIONS * d as f64) as usize).max(8);
        }
        for j in 0..d {
            if leaves(self, j) {
                let (low, high) = self.row.bounds.as_ref().map_or((0.0, 0.0), |b| b[j]);
                let wrong_sign = self.has_corner(penalty, j) && self.signs[j] * self.w[j] < 0.0;
                let held = if wrong_sign { 0.0 } else { self.w[j].clamp(low, high) };
                axpy(&mut self.gw, held - self.w[j], self.row.coordinates.gram().row(j));
                self.w[j] = held;
                self.signs[j] = 0.0;
            } else if enters.get(j).is_some_and(|sign| *sign != 0.0) {
                self.signs[j] = enters[j];
            }
        }
        if !tight {
            self.theta = 0.0;
        }
        self.is_tight = tight;
        self.fill(penalty);
    }

    /// Computes diagonal, right-hand side and border of the next system.
    fn fill(&mut self, penalty: &dyn Penalty) {
        for j in 0..self.w.len() {
            let corner = self.has_corner(penalty, j);
            if self.signs[j] != 0.0 && !corner {
                self.signs[j] = 1f64.copysign(self.w[j]);
            }
            let active = self.signs[j] != 0.0;
            self.diagonal[j] = if active { self.row.curvature(penalty, j, self.w[j].abs()) } else { INACTIVE };
            self.step[j] = if active { self.row.h[j] - self.gw[j] - self.pull(penalty, j, self.signs[j]) } else { 0.0 };
        }
        self.border.clear();
        if self.is_tight
            && let Some((c, _)) = &self.row.ball
        {
            self.border.extend(c.iter().zip(&self.signs).map(|(c, sign)| c * sign));
        }
        self.method = Method::of(self.row.coordinates, LEVEL, &self.diagonal, f64::INFINITY);
    }

    /// Takes the step, along the ball's face if there is one.
    fn take(&mut self) {
        self.steps += 1;
        if let (true, Some((_, radius))) = (self.is_tight, &self.row.ball) {
            let workspace = super::canonical::inner_radius(*radius) - dot(&self.border, &self.w);
            let below = dot(&self.border, &self.border_step);
            if below > 0.0 {
                let factor = (dot(&self.border, &self.step) - workspace) / below;
                self.theta += factor;
                axpy(&mut self.step, -factor, &self.border_step);
            }
        }
        for j in 0..self.w.len() {
            if self.signs[j] != 0.0 {
                self.w[j] += self.step[j];
            }
        }
        self.open = self.w.iter().all(|w| w.is_finite());
    }
}

/// Solves the rows on their supports and corrects the supports, until each row is solved or makes no more progress.
pub(super) fn correct(
    coordinates: &Coordinates,
    penalty: &dyn Penalty,
    settings: &SolverSettings,
    rows: &mut [ActiveSet],
    workspace: &mut Workspace,
) {
    for step in 0..=MAX_STEPS {
        let open = |s: &ActiveSet| s.open;
        if !rows.iter().any(open) {
            return;
        }
        multiply(coordinates.gram(), rows, &mut workspace.double, open, |s| &s.w, |s, out| s.gw.copy_from_slice(out));
        for s in rows.iter_mut().filter(|s| s.open) {
            s.revise(penalty, settings, workspace);
        }
        if step == MAX_STEPS {
            return;
        }
        solve(coordinates, rows, workspace);
        for s in rows.iter_mut().filter(|s| s.open) {
            s.take();
        }
    }
}

/// `step` ← the solution for the right-hand side in `step`, and `border_step` that for the border.
fn solve(coordinates: &Coordinates, rows: &mut [ActiveSet], workspace: &mut Workspace) {
    let corrected = |s: &ActiveSet| s.open && s.method == Method::Corrected;
    let bordered = |s: &ActiveSet| corrected(s) && s.is_tight;
    let inverse = if rows.iter().any(corrected) { coordinates.inverse(LEVEL) } else { None };
    if let Some(inverse) = inverse {
        multiply(inverse, rows, &mut workspace.double, corrected, |s| &s.step, |s, out| s.step.copy_from_slice(out));
        multiply(
            inverse,
            rows,
            &mut workspace.double,
            bordered,
            |s| &s.border,
            |s, out| {
                s.border_step.clear();
                s.border_step.extend_from_slice(out);
            },
        );
    }
    let system = &mut workspace.system;
    let mut border_corrections: Vec<Vec<f64>> = Vec::new();
    for s in rows.iter_mut().filter(|s| s.open) {
        if !system.prepare(coordinates, LEVEL, &s.diagonal) {
            s.open = false;
            continue;
        }
        if s.method == Method::Corrected {
            system.correction(&s.step, &mut s.correction);
            if s.is_tight {
                let mut q = vec![0.0; s.w.len()];
                system.correction(&s.border_step, &mut q);
                border_corrections.push(q);
            }
        } else {
            system.solve_direct(&mut s.step);
            if s.is_tight {
                s.border_step.clone_from(&s.border);
                system.solve_direct(&mut s.border_step);
            }
        }
    }
    let Some(inverse) = inverse else { return };
    let subtract = |x: &mut [f64], out: &[f64], diagonal: &[f64]| {
        for ((x, out), diagonal) in x.iter_mut().zip(out).zip(diagonal) {
            *x = if *diagonal >= 0.0 { *x - out } else { 0.0 };
        }
    };
    multiply(
        inverse,
        rows,
        &mut workspace.double,
        corrected,
        |s| &s.correction,
        |s, out| {
            subtract(&mut s.step, out, &s.diagonal);
        },
    );
    let mut k = border_corrections.into_iter();
    for s in rows.iter_mut().filter(|s| bordered(s)) {
        if let Some(q) = k.next() {
            s.correction = q;
        }
    }
    multiply(
        inverse,
        rows,
        &mut workspace.double,
        bordered,
        |s| &s.correction,
        |s, out| {
            subtract(&mut s.border_step, out, &s.diagonal);
        },
    );
}
