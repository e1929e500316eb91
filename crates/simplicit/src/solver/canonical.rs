//! A row problem in the solver's own coordinates, and its certificate.
//!
//! With feature scales c_j ([`Scaling`]), the target's scale t = rms(z) and S = 2Λt², the unknown is ŵ_j = w_j·c_j/t and
//! the row becomes ½ŵᵀĜŵ − ĥᵀŵ + ½ + Σ f̂_j(ŵ_j), f̂_j(x) = (ω_j/S)·f(u_j x). Its value times S is the user's objective,
//! so a gap relative to the objective is the same number in both.

use super::Design;
use super::design::{Coordinates, Scaling, TINY};
use crate::linalg::{Cholesky, axpy, dot};
use crate::problem::penalty::{EntryScale, Penalty};
use crate::problem::{RowProblem, Units};

/// The projection aims this much inside the ball, so that no later rounding (undoing the scales, summing in another
/// order) can leave it. The certificate is computed for the true radius, so it includes the cost of this margin.
const BALL_MARGIN: f64 = 1e-12;
/// The ball counts as slack, with multiplier zero, if at least this share of its radius is left.
const SLACK: f64 = 1e-9;
/// The gradient of an unpenalised entry counts as zero up to here (for diag Ĝ = 1, ‖ẑ‖ = 1), and the entry is taken to
/// lie within `REACH` times the gradient of its optimum.
const SETTLED: f64 = 1e-9;
const REACH: f64 = 1e6;

/// The radius that the projection uses for a ball of this radius.
pub(crate) fn inner_radius(radius: f64) -> f64 {
    radius * (1.0 - BALL_MARGIN)
}

/// One row, over the design's live features.
#[derive(Debug)]
pub(crate) struct Row<'a> {
    pub(crate) coordinates: &'a Coordinates<'a>,
    pub(crate) h: Vec<f64>,
    pub(crate) scale: EntryScale,
    /// The ball's weights in these coordinates, and its radius.
    pub(crate) ball: Option<(Vec<f64>, f64)>,
    pub(crate) bounds: Option<Vec<(f64, f64)>>,
    /// The bounds as the user gave them, so that undoing the scales cannot round beyond them.
    stored_bounds: Option<Vec<(f64, f64)>>,
    /// Entries without penalty. Where ball and bounds are slack too, the gradient of the fit must vanish there.
    unpenalised: Vec<usize>,
    /// t, the target's scale: w_j = ŵ_j·t/c_j.
    target_scale: f64,
    /// S = 2Λt²: objective = S × canonical value.
    pub(crate) value_scale: f64,
}

/// P(w), the duality gap and their ratio, in canonical units.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Gap {
    pub(crate) primal: f64,
    pub(crate) gap: f64,
}

impl Gap {
    /// gap / max(|P(w)|, 1e-10·P(0)); P(0) = ½ here.
    pub(crate) fn relative(&self) -> f64 {
        self.gap / self.primal.abs().max(0.5e-10)
    }
}

impl<'a> Row<'a> {
    /// `None` for a target that is always zero, or so small that its square underflows: its row is the zero row.
    pub(crate) fn new(
        design: &'a Design,
        scaling: Scaling,
        problem: &RowProblem,
        penalty: &dyn Penalty,
        h: &[f64],
        energy: f64,
    ) -> Option<Self> {
        let mean_square = energy / design.samples() as f64;
        let t = mean_square.sqrt();
        if t.is_nan() || t <= TINY {
            return None;
        }
        let value_scale = 2.0 * problem.fit * mean_square;
        let live = design.live();
        let coordinates = design.coordinates(scaling);
        let c = coordinates.scales();
        let m = design.samples() as f64;
        let canonical_h = live.iter().zip(c).map(|(&j, &c)| h[j] / (m * c * t)).collect();
        let omega = |j: usize| problem.weights.as_ref().map_or(1.0, |w| w[j]);
        let weights = live.iter().map(|&j| if omega(j).is_finite() { omega(j) / value_scale } else { 0.0 }).collect();
        let units = match problem.units {
            Units::Stored => Some(c.iter().map(|c| t / c).collect()),
            Units::Rms { factor } => {
                let units: Vec<f64> = live.iter().zip(c).map(|(&j, c)| t * factor * (design.rms(j) / c)).collect();
                units.iter().any(|unit| *unit != 1.0).then_some(units)
            }
        };
        let scale = EntryScale { weights, units };
        // A ball of radius zero forbids its entries; no ball remains.
        let closed = |j: usize| problem.ball.as_ref().is_some_and(|b| b.radius == 0.0 && b.weights[j] > 0.0);
        let ball = problem.ball.as_ref().filter(|ball| ball.radius > 0.0).and_then(|ball| {
            let weights: Vec<f64> = live.iter().zip(c).map(|(&j, &c)| ball.weights[j] * t / c).collect();
            weights.iter().any(|c| *c > 0.0).then_some((weights, ball.radius))
        });
        let forbidden = |j: usize| omega(j).is_infinite() || closed(j);
        let bounds = (problem.bounds.is_some() || live.iter().any(|&j| forbidden(j))).then(|| {
            live.iter()
                .zip(c)
                .map(|(&j, &c)| {
                    if forbidden(j) {
                        return (0.0, 0.0);
                    }
                    let (l, u) = problem.bounds.as_ref().map_or((f64::NEG_INFINITY, f64::INFINITY), |b| b[j]);
                    (l * c / t, u * c / t)
                })
                .collect::<Vec<_>>()
        });
        let flat = penalty.slope(f64::INFINITY) == 0.0;
        let unpenalised = (0..live.len())
            .filter(|&j| scale.weights[j] == 0.0 || flat)
            .filter(|&j| bounds.as_ref().is_none_or(|b| b[j] != (0.0, 0.0)))
            .collect();
        let stored_bounds = problem.bounds.as_ref().map(|b| live.iter().map(|&j| b[j]).collect());
        Some(Self {
            coordinates,
            h: canonical_h,
            scale,
            ball,
            bounds,
            stored_bounds,
            unpenalised,
            target_scale: t,
            value_scale,
        })
    }

    /// Weights in stored coordinates over all features of the design.
    pub(crate) fn stored(&self, design: &Design, w: &[f64]) -> Vec<f64> {
        let mut out = vec![0.0; design.features()];
        for (k, ((&j, &c), &w)) in design.live().iter().zip(self.coordinates.scales()).zip(w).enumerate() {
            out[j] = w * self.target_scale / c;
            if let (Some(bounds), Some(stored)) = (&self.bounds, &self.stored_bounds) {
                // An entry on a bound is stored as exactly that bound.
                let ((low, high), (l, u)) = (bounds[k], stored[k]);
                out[j] = if w == 0.0 || low == high {
                    0.0
                } else if w == low {
                    l
                } else if w == high {
                    u
                } else {
                    out[j].clamp(l, u)
                };
            }
        }
        out
    }

    /// The inverse of [`Row::stored`].
    pub(crate) fn canonical(&self, design: &Design, stored: &[f64]) -> Vec<f64> {
        design.live().iter().zip(self.coordinates.scales()).map(|(&j, &c)| stored[j] * c / self.target_scale).collect()
    }

    /// prox of τ·(Σf̂ + ball + bounds) at v; returns the ball's multiplier θ (0 while the ball is slack).
    pub(crate) fn prox(&self, penalty: &dyn Penalty, v: &[f64], tau: f64, out: &mut [f64], shifted: &mut [f64]) -> f64 {
        penalty.prox_slice(v, tau, &self.scale, out);
        self.clip(out);
        let Some((c, radius)) = &self.ball else { return 0.0 };
        let radius = inner_radius(*radius);
        let size = |x: &[f64]| c.iter().zip(x).map(|(c, x)| c * x.abs()).sum::<f64>();
        let mut excess = size(out) - radius;
        if excess <= 0.0 {
            return 0.0;
        }
        // x(θ) = prox(soft(v, τθc)) shrinks as θ grows: Newton from the left on Σc|x(θ)| = κ, kept inside a bracket.
        let (mut low, mut high) = (0.0, f64::INFINITY);
        let mut theta = 0.0;
        for _ in 0..200 {
            let mut fall = 0.0;
            for j in 0..c.len() {
                if c[j] > 0.0 && out[j] != 0.0 && !self.is_clipped(j, out[j]) {
                    fall += c[j] * c[j] * tau / (1.0 + tau * self.curvature(penalty, j, out[j]));
                }
            }
            let step = if fall > 0.0 { excess / fall } else { 0.0 };
            let mut next = theta + step;
            if step == 0.0 || !(next > low && next < high) {
                next = if high.is_finite() { 0.5 * (low + high) } else { 2.0 * low + 1.0 / tau };
            }
            if next == theta {
                break;
            }
            theta = next;
            for j in 0..c.len() {
                shifted[j] = if c[j] > 0.0 { soft(v[j], tau * theta * c[j]) } else { v[j] };
            }
            penalty.prox_slice(shifted, tau, &self.scale, out);
            self.clip(out);
            excess = size(out) - radius;
            if excess > 0.0 {
                low = theta;
            } else {
                high = theta;
            }
            if excess.abs() <= 0.25 * BALL_MARGIN * radius || (radius == 0.0 && excess <= 0.0) {
                break;
            }
        }
        theta
    }

    fn clip(&self, x: &mut [f64]) {
        if let Some(bounds) = &self.bounds {
            for (x, (l, u)) in x.iter_mut().zip(bounds) {
                *x = x.clamp(*l, *u);
            }
        }
    }

    #[inline]
    pub(crate) fn is_clipped(&self, j: usize, x: f64) -> bool {
        self.bounds.as_ref().is_some_and(|b| x <= b[j].0 || x >= b[j].1)
    }

    /// f̂″ at a non-zero entry.
    #[inline]
    pub(crate) fn curvature(&self, penalty: &dyn Penalty, j: usize, x: f64) -> f64 {
        let (weight, unit) = (self.scale.weights[j], self.scale.unit(j));
        if weight == 0.0 { 0.0 } else { weight * unit * unit * penalty.curvature(unit * x.abs()) }
    }

    /// f̂′ at a non-zero entry, with its sign.
    #[inline]
    pub(crate) fn slope(&self, penalty: &dyn Penalty, j: usize, x: f64) -> f64 {
        let (weight, unit) = (self.scale.weights[j], self.scale.unit(j));
        if weight == 0.0 { 0.0 } else { (weight * unit * penalty.slope(unit * x.abs())).copysign(x) }
    }

    /// f̂′(0⁺): the kink at zero.
    #[inline]
    pub(crate) fn kink(&self, penalty: &dyn Penalty, j: usize) -> f64 {
        self.scale.weights[j] * self.scale.unit(j) * penalty.slope(0.0)
    }

    /// Whether the ball is slack at w; true without a ball.
    fn ball_is_slack(&self, w: &[f64]) -> bool {
        self.ball
            .as_ref()
            .is_none_or(|(c, radius)| c.iter().zip(w).map(|(c, w)| c * w.abs()).sum::<f64>() < radius * (1.0 - SLACK))
    }

    /// Whether entry j of `unpenalised` meets no constraint at w: the conjugate is finite only where the fit's gradient
    /// vanishes there.
    fn is_free(&self, j: usize, w: &[f64], ball_is_slack: bool) -> bool {
        !self.is_clipped(j, w[j]) && self.is_outside_ball(j, ball_is_slack)
    }

    /// Whether the gradient at entry j of `unpenalised` is only rounding, and neither ball nor bound holds the entry.
    fn is_settled(&self, j: usize, gw: &[f64], ball_is_slack: bool) -> bool {
        let g = self.h[j] - gw[j];
        g.abs() <= SETTLED * self.coordinates.gram()[(j, j)].sqrt()
            && self.is_unbounded(j, g)
            && self.is_outside_ball(j, ball_is_slack)
    }

    fn is_outside_ball(&self, j: usize, ball_is_slack: bool) -> bool {
        ball_is_slack || self.ball.as_ref().is_none_or(|(c, _)| c[j] == 0.0)
    }

    /// Moves the free entries to their optimum given the others, keeping `gw` = Ĝw. Nothing is changed if that would
    /// violate a constraint.
    pub(crate) fn settle_free(&self, w: &mut [f64], gw: &mut [f64]) {
        let gram = self.coordinates.gram();
        let slack = self.ball_is_slack(w);
        let free: Vec<usize> = self.unpenalised.iter().copied().filter(|&j| self.is_free(j, w, slack)).collect();
        let k = free.len();
        let mut step: Vec<f64> = free.iter().map(|&j| self.h[j] - gw[j]).collect();
        match free.as_slice() {
            [] => return,
            &[j] => step[0] /= gram[(j, j)],
            free => {
                let mut factor = Cholesky::with_capacity(k);
                // Duplicate features do no harm: the error that the ridge causes is as small as the ridge.
                let filled = factor.factor(k, |a| {
                    for (r, &i) in free.iter().enumerate() {
                        for (s, &j) in free.iter().enumerate().skip(r) {
                            a[r * k + s] = gram[(i, j)] * if i == j { 1.0 + 1e-12 } else { 1.0 };
                        }
                    }
                });
                if !filled {
                    return;
                }
                factor.solve(&mut step, 1);
            }
        }
        for (&j, &s) in free.iter().zip(&step) {
            w[j] += s;
        }
        if !self.is_feasible(w) {
            for (&j, &s) in free.iter().zip(&step) {
                w[j] -= s;
            }
            return;
        }
        for (&j, &s) in free.iter().zip(&step) {
            axpy(gw, s, gram.row(j));
        }
    }

    /// Whether w satisfies ball and bounds.
    pub(crate) fn is_feasible(&self, w: &[f64]) -> bool {
        self.ball.as_ref().is_none_or(|(c, radius)| {
            c.iter().zip(w).map(|(c, w)| c * w.abs()).sum::<f64>() <= radius * (1.0 - 0.25 * BALL_MARGIN)
        }) && self.bounds.as_ref().is_none_or(|b| b.iter().zip(w).all(|((l, u), w)| l <= w && w <= u))
    }

    /// The largest slope of f̂: beyond it the conjugate is infinite unless a constraint bounds the entry.
    #[inline]
    fn steepest(&self, penalty: &dyn Penalty, j: usize) -> f64 {
        match self.scale.weights[j] {
            0.0 => 0.0,
            weight => weight * self.scale.unit(j) * penalty.slope(f64::INFINITY),
        }
    }

    /// Whether no bound stops entry j in the direction of g.
    #[inline]
    fn is_unbounded(&self, j: usize, g: f64) -> bool {
        self.bounds.as_ref().is_none_or(|b| if g > 0.0 { b[j].1 == f64::INFINITY } else { b[j].0 == f64::NEG_INFINITY })
    }

    /// |g| − θc and the bound in the direction of g.
    #[inline]
    fn pull(&self, j: usize, g: f64, theta: f64) -> (f64, f64) {
        let pull = g.abs() - self.ball.as_ref().map_or(0.0, |(c, _)| theta * c[j]);
        (pull, self.bounds.as_ref().map_or(f64::INFINITY, |b| if g > 0.0 { b[j].1 } else { -b[j].0 }))
    }

    /// |x| where g·x − f̂(x) − θc|x| is largest in the entry's interval; zero where nothing attains it.
    #[inline]
    fn maximiser(&self, penalty: &dyn Penalty, j: usize, g: f64, theta: f64) -> f64 {
        let (pull, bound) = self.pull(j, g, theta);
        if pull <= 0.0 {
            return 0.0;
        }
        let (weight, unit) = (self.scale.weights[j], self.scale.unit(j));
        let x = if weight > 0.0 { penalty.maximiser(pull / (weight * unit)) / unit } else { f64::INFINITY };
        let x = x.min(bound);
        if x.is_infinite() { 0.0 } else { x }
    }

    /// The largest value of g·x − f̂(x) − θc|x| in the entry's interval. Slopes beyond the steepest, by rounding after τ
    /// and θ were chosen, count as the steepest.
    #[inline]
    fn conjugate(&self, penalty: &dyn Penalty, j: usize, g: f64, theta: f64) -> f64 {
        let (pull, bound) = self.pull(j, g, theta);
        let (weight, unit) = (self.scale.weights[j], self.scale.unit(j));
        if pull <= 0.0 || bound == 0.0 {
            0.0
        } else if bound < f64::INFINITY {
            let x = self.maximiser(penalty, j, g, theta);
            pull * x - if weight > 0.0 { weight * penalty.value(unit * x) } else { 0.0 }
        } else if weight > 0.0 {
            weight * penalty.conjugate((pull / (weight * unit)).min(penalty.slope(f64::INFINITY)))
        } else {
            0.0
        }
    }

    /// The ball's multiplier θ that makes the dual value largest: Σ c|x(θ)| = κ with x the maximisers, or the
    /// smallest θ at which the conjugate is finite. Any θ from there on is valid, so the search may be short; it
    /// starts at `hint`.
    fn multiplier(&self, penalty: &dyn Penalty, gw: &[f64], tau: f64, slack: bool, hint: f64) -> f64 {
        let Some((c, radius)) = &self.ball else { return 0.0 };
        let (mut low, mut high) = (0.0f64, 0.0f64);
        let free = |j: usize| self.unpenalised.binary_search(&j).is_ok() && self.is_settled(j, gw, slack);
        for j in (0..c.len()).filter(|&j| c[j] > 0.0 && !free(j)) {
            let g = tau * (self.h[j] - gw[j]);
            let limit = self.steepest(penalty, j);
            if limit.is_finite() && self.is_unbounded(j, g) {
                low = low.max((g.abs() - limit) / c[j]);
            }
            high = high.max(g.abs() / c[j]);
        }
        let excess = |theta: f64| {
            let balled = (0..c.len()).filter(|&j| c[j] > 0.0 && !free(j));
            balled.map(|j| c[j] * self.maximiser(penalty, j, tau * (self.h[j] - gw[j]), theta)).sum::<f64>() - radius
        };
        let (mut at_low, mut at_high) = (excess(low), -radius);
        if at_low <= 0.0 {
            return low;
        }
        let mut theta = hint;
        for step in 0..60 {
            if !(theta > low && theta < high) {
                theta = 0.5 * (low + high);
            }
            let at = excess(theta);
            if at.abs() <= 1e-13 * radius || theta <= low || theta >= high {
                break;
            }
            if at > 0.0 {
                (low, at_low) = (theta, at);
            } else {
                (high, at_high) = (theta, at);
            }
            // Secant steps through the bracket, sometimes its middle, because the sum has jumps.
            theta = if step % 3 == 2 { 0.5 * (low + high) } else { low + (high - low) * at_low / (at_low - at_high) };
        }
        theta
    }

    /// Primal value and duality gap of a feasible w with `gw` = Ĝw, by the formula without cancellation: every term of
    ///
    /// gap = ½(1−τ)²‖r‖² + Σ_j [f̂(w_j) + θc_j|w_j| + f̂*(soft(τg_j, θc_j)) − τg_j w_j] + θ(κ − Σc_j|w_j|)
    ///
    /// is non-negative for any 0 ≤ τ ≤ 1 and θ ≥ 0. `theta` is used where the conjugate is finite everywhere. Where
    /// an unpenalised entry's gradient should vanish, rounding remains; |g| times the distance that the entry may
    /// move is added for it.
    pub(crate) fn certify(&self, penalty: &dyn Penalty, w: &[f64], gw: &[f64], theta: f64) -> Gap {
        let d = w.len();
        let residual = (1.0 - 2.0 * dot(&self.h, w) + dot(w, gw)).max(0.0);
        let ball_weight = |j: usize| self.ball.as_ref().map_or(0.0, |(c, _)| c[j]);
        let slack = self.ball_is_slack(w);
        let mut tau = 1.0f64;
        let mut unpenalised = self.unpenalised.iter().copied().peekable();
        for j in 0..d {
            if unpenalised.next_if_eq(&j).is_some() && self.is_settled(j, gw, slack) {
                continue;
            }
            let g = self.h[j] - gw[j];
            let limit = self.steepest(penalty, j);
            if g.abs() > limit && ball_weight(j) == 0.0 && self.is_unbounded(j, g) {
                tau = tau.min(limit / g.abs());
            }
        }
        let theta = self.multiplier(penalty, gw, tau, slack, theta);
        let mut sum = 0.0;
        let mut cost = 0.0;
        let mut size = 0.0;
        let mut unpenalised = self.unpenalised.iter().copied().peekable();
        for j in 0..d {
            if unpenalised.next_if_eq(&j).is_some() && self.is_settled(j, gw, slack) {
                size += ball_weight(j) * w[j].abs();
                let g = (self.h[j] - gw[j]).abs();
                sum += g * REACH * g / self.coordinates.gram()[(j, j)];
                continue;
            }
            let (weight, unit) = (self.scale.weights[j], self.scale.unit(j));
            let g = tau * (self.h[j] - gw[j]);
            let pull = theta * ball_weight(j);
            let value = if w[j] == 0.0 || weight == 0.0 { 0.0 } else { weight * penalty.value(unit * w[j]) };
            cost += value;
            size += ball_weight(j) * w[j].abs();
            let conjugate = self.conjugate(penalty, j, g, theta);
            sum += (value + pull * w[j].abs() + conjugate - g * w[j]).max(0.0);
        }
        let unused = self.ball.as_ref().map_or(0.0, |(_, radius)| theta * (radius - size).max(0.0));
        Gap { primal: 0.5 * residual + cost, gap: 0.5 * (1.0 - tau).powi(2) * residual + sum + unused }
    }
}

#[inline]
fn soft(v: f64, threshold: f64) -> f64 {
    crate::problem::penalty::soft(v, threshold)
}
