//! A block of rows solved side by side, so that every product with Ĝ or an inverse is a matrix–matrix product.
//!
//! 1. **Operator splitting** (ADMM): y = (Ĝ + ρI)⁻¹(ĥ + ρ(v − s)), v = prox(y + s), s += y − v. A few dozen steps of one
//!    product each find most of the support.
//! 2. **Proximal point with semismooth Newton**: around an anchor a, the dual of min P(w) + ε/2·‖w − a‖² is smooth in y;
//!    w(y) = prox_{1/ε}(a + (ĥ − Ĝy)/ε), its gradient is Ĝ(y − w(y)), and a Newton step is a linear system on the active
//!    entries. When the inner problem is solved well enough the anchor moves and ε falls. The predicted w (the Newton
//!    point itself) is what is certified: on the right support it is the exact solution.
//!
//! Every row depends on its own data alone, but sits in a block of fixed size: the result does not depend on threads.

use super::canonical::{Gap, Row};
use super::design::{Design, LEVELS, epsilon};
use super::newton_system::{INACTIVE, Method, NewtonSystem};
use super::{RowOutcome, SolverSettings, Status};
use crate::linalg::{Matrix, View, dot, gemm};
use crate::parallel::Cancel;
use crate::problem::Penalty;

/// Over-relaxation of the splitting.
const RELAXATION: f64 = 1.6;
/// Splitting steps between two looks at the step size.
const ADAPT_EVERY: usize = 10;
/// The inner problem is solved when ‖w − y‖_G is below this share of ‖w − anchor‖_G.
const INNER: f64 = 0.1;

/// One row's state. Vectors have one entry per live feature.
struct State<'a> {
    row: &'a Row,
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
    newton_steps: usize,
    splitting_steps: usize,
    best: Option<(Gap, Vec<f64>)>,
    stalled: usize,
    /// The anchor moved and w was taken anew: Ĝw is stale.
    moved: bool,
    /// Newton steps since the anchor moved.
    inner_steps: usize,
    done: Option<Status>,
}

/// Scratch shared by the rows of a block.
struct Room {
    v: Vec<f64>,
    shifted: Vec<f64>,
    trial: Vec<f64>,
    left: Vec<f64>,
    right: Vec<f64>,
}

/// Solves a block of rows; rows that are `None` (zero targets) are skipped.
pub(crate) fn solve(
    design: &Design,
    penalty: &dyn Penalty,
    settings: &SolverSettings,
    rows: &[(&Row, Option<Vec<f64>>)],
    cancel: &Cancel,
) -> crate::Result<Vec<RowOutcome>> {
    let d = design.live().len();
    let mut room = Room {
        v: vec![0.0; d],
        shifted: vec![0.0; d],
        trial: vec![0.0; d],
        left: Vec::new(),
        right: Vec::new(),
    };
    let mut states: Vec<State> = rows
        .iter()
        .map(|(row, start)| State {
            row,
            level: 0,
            anchor: start.clone().unwrap_or_else(|| vec![0.0; d]),
            g_anchor: vec![0.0; d],
            y: vec![0.0; d],
            gy: vec![0.0; d],
            w: vec![0.0; d],
            gw: vec![0.0; d],
            step: vec![0.0; d],
            g_step: vec![0.0; d],
            border: Vec::new(),
            diagonal: vec![0.0; d],
            theta: 0.0,
            system: NewtonSystem::new(),
            newton_steps: 0,
            splitting_steps: 0,
            best: None,
            stalled: 0,
            moved: false,
            inner_steps: 0,
            done: None,
        })
        .collect();
    let t0 = std::time::Instant::now();
    choose_levels(design, penalty, &mut states, &mut room);
    let warm = rows.iter().all(|(_, start)| start.is_some());
    split(design, penalty, if warm { settings.warm_splitting_steps } else { settings.splitting_steps }, &mut states, &mut room, cancel)?;
    eprintln!("split {:?}", t0.elapsed());
    newton(design, penalty, settings, &mut states, &mut room, cancel)?;
    eprintln!("newton {:?}", t0.elapsed());
    Ok(states
        .into_iter()
        .map(|s| {
            let status = s.done.unwrap_or(Status::Limit);
            let (gap, weights) = s.best.unwrap_or((Gap { primal: 0.5, gap: 0.5 }, vec![0.0; d]));
            RowOutcome { weights, gap, status, splitting_steps: s.splitting_steps, newton_steps: s.newton_steps }
        })
        .collect())
}

/// out_i = matrix · in_i for the rows picked by `input`, all at once.
fn multiply<'s>(
    matrix: &Matrix,
    states: &mut [State<'s>],
    room: &mut Room,
    mut pick: impl FnMut(&State<'s>) -> bool,
    input: impl for<'r> Fn(&'r State<'s>) -> &'r [f64],
    mut output: impl FnMut(&mut State<'s>, &[f64]),
) {
    let d = matrix.rows();
    room.left.clear();
    let mut picked = Vec::with_capacity(states.len());
    for (k, s) in states.iter().enumerate() {
        if pick(s) {
            picked.push(k);
            room.left.extend_from_slice(input(s));
        }
    }
    room.right.resize(picked.len() * d, 0.0);
    gemm(&mut room.right, d, false, 1.0, View::new(&room.left, picked.len(), d, d), matrix.view());
    for (k, out) in picked.into_iter().zip(room.right.chunks_exact(d.max(1))) {
        output(&mut states[k], out);
    }
}

/// ρ such that the threshold moves a typical weight by about half of it, from a ridge solution.
fn choose_levels(design: &Design, penalty: &dyn Penalty, states: &mut [State], room: &mut Room) {
    const FIRST: usize = 4;
    let Some(inverse) = design.inverse(FIRST) else { return };
    multiply(inverse, states, room, |_| true, |s| &s.row.h, |s, out| {
        let kinks: f64 = (0..out.len()).map(|j| s.row.kink(penalty, j).powi(2)).sum();
        let size = dot(out, out);
        let rho = if size > 0.0 && kinks > 0.0 { 2.0 * (kinks / size).sqrt() } else { 1e-2 };
        s.level = nearest_level(rho);
        s.y.copy_from_slice(out);
    });
}

fn nearest_level(rho: f64) -> usize {
    (-2.0 * rho.log10()).round().clamp(0.0, (LEVELS - 1) as f64) as usize
}

/// Phase 1. `anchor` is v, `g_anchor` the scaled dual s, `y` the dense iterate.
fn split(
    design: &Design,
    penalty: &dyn Penalty,
    steps: usize,
    states: &mut [State],
    room: &mut Room,
    cancel: &Cancel,
) -> crate::Result<()> {
    for step in 0..steps {
        cancel.check()?;
        let adapt = step % ADAPT_EVERY == ADAPT_EVERY - 1 && step + ADAPT_EVERY / 2 < steps;
        for s in states.iter_mut() {
            let rho = epsilon(s.level);
            for j in 0..s.w.len() {
                s.step[j] = s.row.h[j] + rho * (s.anchor[j] - s.g_anchor[j]);
            }
        }
        for level in 0..LEVELS {
            if !states.iter().any(|s| s.level == level) {
                continue;
            }
            let Some(inverse) = design.inverse(level) else {
                for s in states.iter_mut().filter(|s| s.level == level) {
                    s.level = 8;
                }
                continue;
            };
            multiply(inverse, states, room, |s| s.level == level, |s| &s.step, |s, out| s.y.copy_from_slice(out));
        }
        for s in states.iter_mut() {
            let rho = epsilon(s.level);
            for j in 0..s.w.len() {
                s.gw[j] = RELAXATION * s.y[j] + (1.0 - RELAXATION) * s.anchor[j];
                room.v[j] = s.gw[j] + s.g_anchor[j];
            }
            s.row.prox(penalty, &room.v, 1.0 / rho, &mut s.w, &mut room.shifted);
            let (mut primal, mut dual, mut size, mut dual_size) = (0.0, 0.0, 0.0, 0.0);
            for j in 0..s.w.len() {
                s.g_anchor[j] += s.gw[j] - s.w[j];
                if adapt {
                    primal += (s.y[j] - s.w[j]).powi(2);
                    dual += (s.w[j] - s.anchor[j]).powi(2);
                    size += s.w[j].powi(2);
                    dual_size += s.g_anchor[j].powi(2);
                }
            }
            std::mem::swap(&mut s.anchor, &mut s.w);
            s.splitting_steps += 1;
            if adapt {
                let ratio = (primal / size.max(1e-300)).sqrt() / (dual / dual_size.max(1e-300)).sqrt().max(1e-300);
                let wanted = nearest_level(rho * ratio.clamp(1e-2, 1e2).sqrt());
                if wanted != s.level {
                    let factor = rho / epsilon(wanted);
                    for v in &mut s.g_anchor {
                        *v *= factor;
                    }
                    s.level = wanted;
                }
            }
        }
    }
    Ok(())
}

/// Phase 2.
fn newton(
    design: &Design,
    penalty: &dyn Penalty,
    settings: &SolverSettings,
    states: &mut [State],
    room: &mut Room,
    cancel: &Cancel,
) -> crate::Result<()> {
    let gram = design.gram();
    multiply(gram, states, room, |_| true, |s| &s.anchor, |s, out| s.g_anchor.copy_from_slice(out));
    multiply(gram, states, room, |_| true, |s| &s.y, |s, out| s.gy.copy_from_slice(out));
    for _ in 0..settings.max_newton_steps {
        if states.iter().all(|s| s.done.is_some()) {
            break;
        }
        cancel.check()?;
        for s in states.iter_mut().filter(|s| s.done.is_none()) {
            s.evaluate(penalty, room);
        }
        multiply(gram, states, room, |s| s.done.is_none(), |s| &s.w, |s, out| s.gw.copy_from_slice(out));
        for s in states.iter_mut().filter(|s| s.done.is_none()) {
            s.move_anchor_if_solved(penalty, room);
        }
        multiply(gram, states, room, |s| s.done.is_none() && s.moved, |s| &s.w, |s, out| s.gw.copy_from_slice(out));
        for s in states.iter_mut().filter(|s| s.done.is_none()) {
            s.prepare(design, penalty);
        }
        directions(design, states, room);
        multiply(gram, states, room, |s| s.done.is_none(), |s| &s.step, |s, out| s.g_step.copy_from_slice(out));
        for s in states.iter_mut().filter(|s| s.done.is_none()) {
            s.newton_steps += 1;
            s.inner_steps += 1;
            s.certify(design, penalty, settings, room);
            if s.done.is_none() {
                s.search(penalty, room);
            }
        }
    }
    Ok(())
}

/// `step` ← the Newton change of w on J for every open row, through whichever form its system has.
fn directions(design: &Design, states: &mut [State], room: &mut Room) {
    for s in states.iter_mut().filter(|s| s.done.is_none() && s.system.method() == Method::Direct) {
        s.system.solve_direct(&mut s.step);
        if !s.border.is_empty() {
            let mut solved = s.border.clone();
            s.system.solve_direct(&mut solved);
            s.eliminate_border(&solved);
        }
    }
    for level in 0..LEVELS {
        let corrected = |s: &State| s.done.is_none() && s.level == level && s.system.method() == Method::Corrected;
        if !states.iter().any(&corrected) {
            continue;
        }
        let Some(inverse) = design.inverse(level) else { continue };
        // t = (Ĝ+εI)⁻¹b, then x = t − (Ĝ+εI)⁻¹q; `g_step` carries q.
        multiply(inverse, states, room, corrected, |s| &s.step, |s, out| {
            s.step.copy_from_slice(out);
            s.system.correction(out, &mut s.g_step);
        });
        multiply(inverse, states, room, corrected, |s| &s.g_step, |s, out| s.subtract_and_mask(out));
        let bordered = |s: &State| corrected(s) && !s.border.is_empty();
        if states.iter().any(bordered) {
            let mut solved: Vec<Vec<f64>> = Vec::new();
            multiply(inverse, states, room, bordered, |s| &s.border, |s, out| {
                s.system.correction(out, &mut s.g_step);
                solved.push(out.to_vec());
            });
            let mut k = 0;
            multiply(inverse, states, room, bordered, |s| &s.g_step, |s, out| {
                let x = &mut solved[k];
                for j in 0..x.len() {
                    x[j] = if s.diagonal[j] >= 0.0 { x[j] - out[j] } else { 0.0 };
                }
                let x = std::mem::take(x);
                s.eliminate_border(&x);
                k += 1;
            });
        }
    }
}

impl State<'_> {
    fn sigma(&self) -> f64 {
        1.0 / epsilon(self.level)
    }

    /// w(y) = prox at the anchor.
    fn evaluate(&mut self, penalty: &dyn Penalty, room: &mut Room) {
        let sigma = self.sigma();
        for j in 0..self.w.len() {
            room.v[j] = self.anchor[j] + sigma * (self.row.h[j] - self.gy[j]);
        }
        self.theta = self.row.prox(penalty, &room.v, sigma, &mut self.w, &mut room.shifted);
    }

    /// Inner problem solved: the anchor moves to w and ε falls by a level. With J kept, the new inner solution differs
    /// from w by (Ĝ+Δ+ε')⁻¹·ε(w − a) on J; that predicts the next y, where taking w(y) anew at the old y would blow the
    /// inner error up by ε/ε'.
    fn move_anchor_if_solved(&mut self, penalty: &dyn Penalty, room: &mut Room) {
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
            let jump = if self.inner_steps <= 1 { 2 } else { 1 };
            self.level = (self.level + jump).min(LEVELS - 1);
            self.inner_steps = 0;
            self.evaluate(penalty, room);
        }
    }

    /// The active entries and curvatures at w, the right-hand side −Ĝ(w − y) in `step`, the ball's border if it is tight.
    fn prepare(&mut self, design: &Design, penalty: &dyn Penalty) {
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
        while !self.system.prepare(design, self.level, &self.diagonal) && self.level > 0 {
            self.level -= 1;
        }
        for j in 0..self.w.len() {
            self.step[j] = if self.diagonal[j] >= 0.0 { self.gy[j] - self.gw[j] } else { 0.0 };
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
    fn certify(&mut self, design: &Design, penalty: &dyn Penalty, settings: &SolverSettings, room: &mut Room) {
        let d = self.w.len();
        let mut g_trial = vec![0.0; d];
        for newton_point in [true, false] {
            for j in 0..d {
                let flips = newton_point && self.w[j] != 0.0 && self.w[j] * (self.w[j] + self.step[j]) < 0.0;
                let moved = newton_point && !flips;
                room.trial[j] = if moved { self.w[j] + self.step[j] } else { self.w[j] };
                g_trial[j] = self.gw[j] + if newton_point { self.g_step[j] } else { 0.0 };
                if flips {
                    // Not a point we have Ĝ for.
                    room.trial[0] = f64::NAN;
                    break;
                }
            }
            if room.trial[0].is_nan() || !self.row.is_feasible(&room.trial) {
                continue;
            }
            self.row.settle_free(design, &mut room.trial, &mut g_trial);
            let gap = self.row.certify(penalty, &room.trial, &g_trial, self.theta);
            if self.best.as_ref().is_none_or(|(best, _)| gap.gap < best.gap) {
                self.best = Some((gap, room.trial.clone()));
                self.stalled = 0;
            }
        }
        self.stalled += 1;
        if self.best.as_ref().is_some_and(|(best, _)| best.relative() <= settings.tolerance) {
            self.done = Some(Status::Solved);
        } else if self.stalled > settings.max_stalled_steps {
            self.done = Some(Status::Limit);
        }
    }

    /// y += t·(w − y + x) with t from a backtracking search on the inner dual, which costs one prox a trial.
    fn search(&mut self, penalty: &dyn Penalty, room: &mut Room) {
        let sigma = self.sigma();
        let d = self.w.len();
        let mut slope = 0.0;
        for j in 0..d {
            let r = self.w[j] - self.y[j];
            let gr = self.gw[j] - self.gy[j];
            self.step[j] += r;
            self.g_step[j] += gr;
            slope -= r * self.g_step[j];
        }
        let yy = 0.5 * dot(&self.y, &self.gy);
        let ys = dot(&self.y, &self.g_step);
        let ss = 0.5 * dot(&self.step, &self.g_step);
        let mut dual = |t: f64, room: &mut Room| {
            for j in 0..d {
                room.v[j] = self.anchor[j] + sigma * (self.row.h[j] - self.gy[j] - t * self.g_step[j]);
            }
            self.row.prox(penalty, &room.v, sigma, &mut room.trial, &mut room.shifted);
            // gᵀx − f(x) − ‖x−a‖²/2σ with g = (v − a)/σ, written as (‖v−a‖² − ‖v−x‖²)/2σ − f(x).
            let mut envelope = 0.0;
            for j in 0..d {
                let (v, x, a) = (room.v[j], room.trial[j], self.anchor[j]);
                envelope += (x - a) * (2.0 * v - a - x);
            }
            let fit = yy + t * ys + t * t * ss;
            fit + envelope / (2.0 * sigma) + self.linear_at_anchor(t) - penalty.value_slice(&room.trial, &self.row.scale)
        };
        let start = dual(0.0, room);
        let mut t = 1.0;
        let mut value = dual(t, room);
        let noise = 1e-14 * (start.abs() + yy.abs());
        while value > start + 1e-4 * t * slope + noise && t > 1e-3 {
            t *= 0.5;
            value = dual(t, room);
        }
        if std::env::var("TRACE").is_ok() { eprintln!("newton {} level {} nnz {} theta {:.1e} t {t} slope {slope:.2e} start {start:.12e} val-start {:.2e} method {:?} best {:?}", self.newton_steps, self.level, self.w.iter().filter(|v| **v != 0.0).count(), self.theta, value-start, self.system.method(), self.best.as_ref().map(|b| b.0.relative())); }
        for j in 0..d {
            self.y[j] += t * self.step[j];
            self.gy[j] += t * self.g_step[j];
        }
    }

    /// gᵀa with g = ĥ − Ĝ(y + t·step): the part of the inner dual that is linear in the anchor.
    fn linear_at_anchor(&self, t: f64) -> f64 {
        let mut sum = 0.0;
        for j in 0..self.anchor.len() {
            sum += self.anchor[j] * (self.row.h[j] - self.gy[j] - t * self.g_step[j]);
        }
        sum
    }
}
