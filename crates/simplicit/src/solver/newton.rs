//! Proximal point with semismooth Newton: the method for rows that splitting and the active set leave unsolved.
//!
//! Around an anchor a, the dual of min P(w) + ε/2·‖w − a‖² is smooth in y; w(y) = prox_{1/ε}(a + (ĥ − Ĝy)/ε), its
//! gradient is Ĝ(y − w(y)), and a Newton step is a linear system on the active entries. When the inner problem is
//! solved accurately enough, the anchor moves and ε falls. The certificate is computed for the predicted w (the
//! Newton point itself), because on the right support it is the exact solution.

use super::batch::{Best, Workspace, combine, multiply};
use super::canonical::Row;
use super::design::{Coordinates, LEVELS, epsilon};
use super::newton_system::{INACTIVE, Method, NewtonSystem};
use super::{SolverSettings, Status};
use crate::linalg::dot;
use crate::parallel::Cancel;
use crate::problem::Penalty;

/// The inner problem counts as solved if ‖w − y‖_G is below this share of ‖w − anchor‖ in the metric Ĝ + εI.
const INNER: f64 = 0.3;
/// The search along a Newton step accepts a point whose derivative is at most this share of the first one.
const SEARCH: f64 = 0.5;
/// The most trials of that search.
const MAX_TRIALS: usize = 20;
/// After this many inner Newton steps, ε was too small for this anchor and grows again.
const MAX_INNER_STEPS: usize = 12;

/// One row's state. Vectors have one entry per live feature.
pub(super) struct Newton<'a> {
    row: &'a Row<'a>,
    level: usize,
    anchor: Vec<f64>,
    g_anchor: Vec<f64>,
    y: Vec<f64>,
    gy: Vec<f64>,
    w: Vec<f64>,
    gw: Vec<f64>,
    step: Vec<f64>,
    g_step: Vec<f64>,
    border: Vec<f64>,
    diagonal: Vec<f64>,
    theta: f64,
    system: NewtonSystem,
    pub(super) steps: usize,
    pub(super) best: Best,
    stalled: usize,
    /// Whether the anchor has just moved to w: the next step is then the prediction from there.
    moved: bool,
    /// Newton steps since the anchor moved.
    inner_steps: usize,
    pub(super) done: Option<Status>,
}

impl<'a> Newton<'a> {
    /// Starts from the sparse and the dense iterate of the splitting, and the best certified point so far.
    pub(super) fn new(row: &'a Row<'a>, level: usize, anchor: Vec<f64>, y: Vec<f64>, best: Best, systems: f64) -> Self {
        let d = anchor.len();
        Self {
            row,
            level,
            anchor,
            g_anchor: vec![0.0; d],
            y,
            gy: vec![0.0; d],
            w: vec![0.0; d],
            gw: vec![0.0; d],
            step: vec![0.0; d],
            g_step: vec![0.0; d],
            border: Vec::new(),
            diagonal: vec![0.0; d],
            theta: 0.0,
            system: NewtonSystem::new(systems),
            steps: 0,
            best,
            stalled: 0,
            moved: false,
            inner_steps: 0,
            done: None,
        }
    }
}

/// Solves the rows, or stops at their limits.
pub(super) fn newton(
    coordinates: &Coordinates,
    penalty: &dyn Penalty,
    settings: &SolverSettings,
    states: &mut [Newton],
    workspace: &mut Workspace,
    cancel: &Cancel,
) -> crate::Result<()> {
    let gram = coordinates.gram();
    multiply(gram, states, &mut workspace.double, |_| true, |s| &s.anchor, |s, out| s.g_anchor.copy_from_slice(out));
    multiply(gram, states, &mut workspace.double, |_| true, |s| &s.y, |s, out| s.gy.copy_from_slice(out));
    for _ in 0..settings.max_newton_steps {
        if states.iter().all(|s| s.done.is_some()) {
            break;
        }
        cancel.check()?;
        for s in states.iter_mut().filter(|s| s.done.is_none()) {
            s.evaluate(penalty, workspace);
        }
        multiply(
            gram,
            states,
            &mut workspace.double,
            |s| s.done.is_none(),
            |s| &s.w,
            |s, out| s.gw.copy_from_slice(out),
        );
        for s in states.iter_mut().filter(|s| s.done.is_none()) {
            s.move_anchor_if_solved();
        }
        for s in states.iter_mut().filter(|s| s.done.is_none()) {
            s.prepare(coordinates, penalty);
        }
        directions(coordinates, states, workspace);
        multiply(
            gram,
            states,
            &mut workspace.double,
            |s| s.done.is_none(),
            |s| &s.step,
            |s, out| s.g_step.copy_from_slice(out),
        );
        for s in states.iter_mut().filter(|s| s.done.is_none()) {
            s.steps += 1;
            s.inner_steps += 1;
            s.certify(penalty, settings, workspace);
            if s.done.is_none() {
                s.search(penalty, workspace);
            }
        }
    }
    Ok(())
}

/// `step` ← the Newton change of w on J for every open row, through whichever form its system has.
fn directions(coordinates: &Coordinates, states: &mut [Newton], workspace: &mut Workspace) {
    for s in states.iter_mut().filter(|s| s.done.is_none() && s.system.method() == Method::Direct) {
        s.system.solve_direct(&mut s.step);
        if !s.border.is_empty() {
            let mut solved = s.border.clone();
            s.system.solve_direct(&mut solved);
            s.eliminate_border(&solved);
        }
    }
    for level in 0..LEVELS {
        let corrected = |s: &Newton| s.done.is_none() && s.level == level && s.system.method() == Method::Corrected;
        if !states.iter().any(&corrected) {
            continue;
        }
        let Some(inverse) = coordinates.inverse(level) else { continue };
        // t = (Ĝ+εI)⁻¹b, then x = t − (Ĝ+εI)⁻¹q; `g_step` holds q.
        multiply(
            inverse,
            states,
            &mut workspace.double,
            corrected,
            |s| &s.step,
            |s, out| {
                s.step.copy_from_slice(out);
                s.system.correction(out, &mut s.g_step);
            },
        );
        multiply(inverse, states, &mut workspace.double, corrected, |s| &s.g_step, |s, out| s.subtract_and_mask(out));
        let bordered = |s: &Newton| corrected(s) && !s.border.is_empty();
        if states.iter().any(bordered) {
            let mut solved: Vec<Vec<f64>> = Vec::new();
            multiply(
                inverse,
                states,
                &mut workspace.double,
                bordered,
                |s| &s.border,
                |s, out| {
                    s.system.correction(out, &mut s.g_step);
                    solved.push(out.to_vec());
                },
            );
            let mut k = 0;
            multiply(
                inverse,
                states,
                &mut workspace.double,
                bordered,
                |s| &s.g_step,
                |s, out| {
                    let x = &mut solved[k];
                    for j in 0..x.len() {
                        x[j] = if s.diagonal[j] >= 0.0 { x[j] - out[j] } else { 0.0 };
                    }
                    let x = std::mem::take(x);
                    s.eliminate_border(&x);
                    k += 1;
                },
            );
        }
    }
}

impl Newton<'_> {
    fn sigma(&self) -> f64 {
        1.0 / epsilon(self.level)
    }

    /// w(y) = prox at the anchor.
    fn evaluate(&mut self, penalty: &dyn Penalty, workspace: &mut Workspace) {
        if self.inner_steps > MAX_INNER_STEPS {
            self.level = self.level.saturating_sub(1);
            self.inner_steps = 0;
        }
        let sigma = self.sigma();
        combine(&mut workspace.v, &[(1.0, &self.anchor), (sigma, &self.row.h), (-sigma, &self.gy)]);
        self.theta = self.row.prox(penalty, &workspace.v, sigma, &mut self.w, &mut workspace.shifted);
    }

    /// Inner problem solved: the anchor moves to w and ε falls by a level. With J kept, the new inner solution is w +
    /// (Ĝ+Δ+ε)⁻¹(ĥ − Ĝw − f̂′(w)) on J, which predicts the next y; to compute w(y) at the old y instead would move
    /// every entry by the last move times the ratio of the two ε.
    fn move_anchor_if_solved(&mut self) {
        let eps = epsilon(self.level);
        let (mut inner, mut moved) = (0.0, 0.0);
        for j in 0..self.w.len() {
            inner += (self.w[j] - self.y[j]) * (self.gw[j] - self.gy[j]);
            let step = self.w[j] - self.anchor[j];
            moved += step * (self.gw[j] - self.g_anchor[j] + eps * step);
        }
        self.moved = inner <= INNER * INNER * moved + 1e-30;
        if self.moved {
            self.anchor.copy_from_slice(&self.w);
            self.g_anchor.copy_from_slice(&self.gw);
            self.level = (self.level + 1).min(LEVELS - 1);
            self.inner_steps = 0;
        }
    }

    /// The active entries and curvatures at w, the right-hand side −Ĝ(w − y) in `step`, the ball's border if it is tight.
    fn prepare(&mut self, coordinates: &Coordinates, penalty: &dyn Penalty) {
        for j in 0..self.w.len() {
            let w = self.w[j];
            let active = !self.row.is_clipped(j, w) && (w != 0.0 || self.row.kink(penalty, j) == 0.0);
            self.diagonal[j] = if active { self.row.curvature(penalty, j, w) } else { INACTIVE };
        }
        if self.theta > 0.0
            && let Some((c, _)) = &self.row.ball
        {
            // An entry held at zero by the ball alone is not active either.
            for j in 0..self.w.len() {
                if c[j] > 0.0 && self.w[j] == 0.0 {
                    self.diagonal[j] = INACTIVE;
                }
            }
        }
        while !self.system.prepare(coordinates, self.level, &self.diagonal) && self.level > 0 {
            self.level -= 1;
        }
        for j in 0..self.w.len() {
            self.step[j] = if self.diagonal[j] < 0.0 {
                0.0
            } else if self.moved {
                let pull = self.theta * self.row.ball.as_ref().map_or(0.0, |(c, _)| c[j]);
                let slope = self.row.slope(penalty, j, self.w[j]) + pull.copysign(self.w[j]);
                self.row.h[j] - self.gw[j] - if self.w[j] == 0.0 { 0.0 } else { slope }
            } else {
                self.gy[j] - self.gw[j]
            };
        }
        self.border.clear();
        if self.theta > 0.0
            && let Some((c, _)) = &self.row.ball
        {
            let active = self.w.iter().zip(c).zip(&self.diagonal);
            self.border.extend(active.map(|((w, c), d)| if *d >= 0.0 && *w != 0.0 { c.copysign(*w) } else { 0.0 }));
        }
    }

    /// `step` holds t = (Ĝ+εI)⁻¹b; the answer is t − `out` on J.
    fn subtract_and_mask(&mut self, out: &[f64]) {
        for j in 0..out.len() {
            self.step[j] = if self.diagonal[j] >= 0.0 { self.step[j] - out[j] } else { 0.0 };
        }
    }

    /// Keeps Σ c_j sign(w_j) x_j = 0, the ball's face.
    fn eliminate_border(&mut self, solved: &[f64]) {
        let below = dot(&self.border, solved);
        if below > 0.0 {
            let factor = dot(&self.border, &self.step) / below;
            for (x, s) in self.step.iter_mut().zip(solved) {
                *x -= factor * s;
            }
        }
    }

    /// Certifies the Newton point w + x (if it keeps signs and constraints) or else w itself, and keeps the better.
    fn certify(&mut self, penalty: &dyn Penalty, settings: &SolverSettings, workspace: &mut Workspace) {
        let d = self.w.len();
        let mut g_trial = vec![0.0; d];
        for newton_point in [true, false] {
            for j in 0..d {
                let flips = newton_point && self.w[j] != 0.0 && self.w[j] * (self.w[j] + self.step[j]) < 0.0;
                let moved = newton_point && !flips;
                workspace.trial[j] = if moved { self.w[j] + self.step[j] } else { self.w[j] };
                g_trial[j] = self.gw[j] + if newton_point { self.g_step[j] } else { 0.0 };
                if flips {
                    // Ĝ times this point is not known.
                    workspace.trial[0] = f64::NAN;
                    break;
                }
            }
            if workspace.trial[0].is_nan() || !self.row.is_feasible(&workspace.trial) {
                continue;
            }
            self.row.settle_free(&mut workspace.trial, &mut g_trial);
            let gap = self.row.certify(penalty, &workspace.trial, &g_trial, self.theta);
            if self.best.take(gap, &workspace.trial) {
                self.stalled = 0;
            }
        }
        self.stalled += 1;
        if self.best.is_within(settings.tolerance) {
            self.done = Some(Status::Solved);
        } else if self.stalled > settings.max_stalled_steps {
            self.done = Some(Status::Limit);
        }
    }

    /// y += t·(w − y + x), t from a search on the derivative of the inner dual, (y − w(y))ᵀĜ·step: it is monotone in
    /// t, does not suffer from cancellation as the values do, and costs one prox per trial.
    fn search(&mut self, penalty: &dyn Penalty, workspace: &mut Workspace) {
        let sigma = self.sigma();
        let d = self.w.len();
        if self.moved {
            for j in 0..d {
                self.y[j] = self.w[j] + self.step[j];
                self.gy[j] = self.gw[j] + self.g_step[j];
            }
            return;
        }
        for j in 0..d {
            self.step[j] += self.w[j] - self.y[j];
            self.g_step[j] += self.gw[j] - self.gy[j];
        }
        let y_part = dot(&self.y, &self.g_step);
        let step_part = dot(&self.step, &self.g_step);
        let slope = y_part - dot(&self.w, &self.g_step);
        if slope >= 0.0 || slope.is_nan() {
            // Rounding has destroyed the direction: ε is too small here.
            self.inner_steps = MAX_INNER_STEPS + 1;
            return;
        }
        let derivative = |t: f64, workspace: &mut Workspace| {
            let slope = -sigma * t;
            combine(
                &mut workspace.v,
                &[(1.0, &self.anchor), (sigma, &self.row.h), (-sigma, &self.gy), (slope, &self.g_step)],
            );
            self.row.prox(penalty, &workspace.v, sigma, &mut workspace.trial, &mut workspace.shifted);
            y_part + t * step_part - dot(&workspace.trial, &self.g_step)
        };
        let mut t = 1.0;
        let mut end = derivative(t, workspace);
        let (mut low, mut low_value, mut high, mut high_value) = (0.0, slope, 1.0, end);
        for _ in 0..MAX_TRIALS {
            if end.abs() <= SEARCH * slope.abs() || (t == 1.0 && end < 0.0) {
                break;
            }
            // A point between the secant's root and the middle, because the derivative is monotone but far from
            // linear.
            let root = low + (high - low) * low_value / (low_value - high_value);
            t = 0.5 * (root + 0.5 * (low + high));
            if !(t > low && t < high) {
                t = 0.5 * (low + high);
            }
            end = derivative(t, workspace);
            if end < 0.0 {
                (low, low_value) = (t, end);
            } else {
                (high, high_value) = (t, end);
            }
        }
        for j in 0..d {
            self.y[j] += t * self.step[j];
            self.gy[j] += t * self.g_step[j];
        }
    }
}
