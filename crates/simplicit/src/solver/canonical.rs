//! A row problem in the solver's own coordinates, and its certificate.
//!
//! With feature scales c_j = rms_j, the target's scale t = rms(z) and S = 2Λt², the unknown is ŵ_j = w_j·c_j/t and the
//! row becomes ½ŵᵀĜŵ − ĥᵀŵ + ½ + Σ f̂_j(ŵ_j), f̂_j(x) = (ω_j/S)·f(u_j x), with diag Ĝ = 1. Its value times S is the
//! user's objective, so a gap relative to the objective is the same number in both.

use super::Design;
use crate::linalg::{Cholesky, axpy, dot};
use crate::problem::penalty::{EntryScale, Penalty};
use crate::problem::{RowProblem, Units};

/// The projection aims this much inside the ball, so that no later rounding (undoing the scales, summing in another
/// order) can leave it. The certificate is taken against the true radius and pays for it.
const BALL_MARGIN: f64 = 1e-12;

/// One row, over the design's live features.
#[derive(Debug)]
pub(crate) struct Row {
    pub(crate) h: Vec<f64>,
    pub(crate) scale: EntryScale,
    /// Ball weights in these coordinates and the radius.
    pub(crate) ball: Option<(Vec<f64>, f64)>,
    pub(crate) bounds: Option<Vec<(f64, f64)>>,
    /// Entries without penalty, ball or bounds: the fit's gradient must vanish there.
    free: Vec<usize>,
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

impl Row {
    /// `None` for a target that is always zero: its row is the zero row.
    pub(crate) fn new(
        design: &Design,
        problem: &RowProblem,
        penalty: &dyn Penalty,
        h: &[f64],
        energy: f64,
    ) -> Option<Self> {
        let mean_square = energy / design.samples() as f64;
        let t = mean_square.sqrt();
        if !(t > 0.0) {
            return None;
        }
        let value_scale = 2.0 * problem.fit * mean_square;
        let live = design.live();
        let c = design.scales();
        let m = design.samples() as f64;
        let canonical_h = live.iter().zip(c).map(|(&j, &c)| h[j] / (m * c * t)).collect();
        let omega = |j: usize| problem.weights.as_ref().map_or(1.0, |w| w[j]);
        let weights = live.iter().map(|&j| if omega(j).is_finite() { omega(j) / value_scale } else { 0.0 }).collect();
        let units = match problem.units {
            Units::Stored => Some(c.iter().map(|c| t / c).collect()),
            Units::Rms { factor } => {
                let unit = t * factor;
                (unit != 1.0).then(|| vec![unit; live.len()])
            }
        };
        let scale = EntryScale { weights, units };
        let ball = problem.ball.as_ref().and_then(|ball| {
            let weights: Vec<f64> = live.iter().zip(c).map(|(&j, &c)| ball.weights[j] * t / c).collect();
            weights.iter().any(|c| *c > 0.0).then_some((weights, ball.radius))
        });
        let forbidden = live.iter().any(|&j| omega(j).is_infinite());
        let bounds = (problem.bounds.is_some() || forbidden).then(|| {
            live.iter()
                .zip(c)
                .map(|(&j, &c)| {
                    if omega(j).is_infinite() {
                        return (0.0, 0.0);
                    }
                    let (l, u) = problem.bounds.as_ref().map_or((f64::NEG_INFINITY, f64::INFINITY), |b| b[j]);
                    (l * c / t, u * c / t)
                })
                .collect::<Vec<_>>()
        });
        let flat = penalty.slope(f64::INFINITY) == 0.0;
        let free = (0..live.len())
            .filter(|&j| {
                (scale.weights[j] == 0.0 || flat)
                    && ball.as_ref().is_none_or(|(c, _)| c[j] == 0.0)
                    && bounds.as_ref().is_none_or(|b| b[j].0 == f64::NEG_INFINITY && b[j].1 == f64::INFINITY)
            })
            .collect();
        Some(Self { h: canonical_h, scale, ball, bounds, free, target_scale: t, value_scale })
    }

    /// Weights in stored coordinates over all features of the design.
    pub(crate) fn stored(&self, design: &Design, w: &[f64]) -> Vec<f64> {
        let mut out = vec![0.0; design.features()];
        for ((&j, &c), &w) in design.live().iter().zip(design.scales()).zip(w) {
            out[j] = w * self.target_scale / c;
        }
        out
    }

    /// The inverse of [`Row::stored`].
    pub(crate) fn canonical(&self, design: &Design, stored: &[f64]) -> Vec<f64> {
        design.live().iter().zip(design.scales()).map(|(&j, &c)| stored[j] * c / self.target_scale).collect()
    }

    /// prox of τ·(Σf̂ + ball + bounds) at v; returns the ball's multiplier θ (0 while the ball is slack).
    pub(crate) fn prox(&self, penalty: &dyn Penalty, v: &[f64], tau: f64, out: &mut [f64], shifted: &mut [f64]) -> f64 {
        penalty.prox_slice(v, tau, &self.scale, out);
        self.clip(out);
        let Some((c, radius)) = &self.ball else { return 0.0 };
        let radius = radius * (1.0 - BALL_MARGIN);
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

    /// Moves the free entries to their optimum given the others, keeping `gw` = Ĝw: the conjugate is finite only there.
    pub(crate) fn settle_free(&self, design: &Design, w: &mut [f64], gw: &mut [f64]) {
        match self.free.as_slice() {
            [] => {}
            &[j] => {
                let step = (self.h[j] - gw[j]) / design.gram()[(j, j)];
                w[j] += step;
                axpy(gw, step, design.gram().row(j));
            }
            free => {
                let k = free.len();
                let mut factor = Cholesky::with_capacity(k);
                let mut step: Vec<f64> = free.iter().map(|&j| self.h[j] - gw[j]).collect();
                let filled = factor.factor(k, |a| {
                    for (r, &i) in free.iter().enumerate() {
                        for (s, &j) in free.iter().enumerate().skip(r) {
                            a[r * k + s] = design.gram()[(i, j)] + if i == j { 1e-14 } else { 0.0 };
                        }
                    }
                });
                if filled {
                    factor.solve(&mut step, 1);
                    for (&j, &s) in free.iter().zip(&step) {
                        w[j] += s;
                        axpy(gw, s, design.gram().row(j));
                    }
                }
            }
        }
    }

    /// Whether w satisfies ball and bounds.
    pub(crate) fn is_feasible(&self, w: &[f64]) -> bool {
        self.ball.as_ref().is_none_or(|(c, radius)| {
            c.iter().zip(w).map(|(c, w)| c * w.abs()).sum::<f64>() <= radius * (1.0 - 0.25 * BALL_MARGIN)
        }) && self.bounds.as_ref().is_none_or(|b| b.iter().zip(w).all(|((l, u), w)| l <= w && w <= u))
    }

    /// Primal value and duality gap of a feasible w with `gw` = Ĝw, by the formula without cancellation: every term of
    ///
    /// gap = ½(1−τ)²‖r‖² + Σ_j [f̂(w_j) + θc_j|w_j| + f̂*(soft(τg_j, θc_j)) − τg_j w_j] + θ(κ − Σc_j|w_j|)
    ///
    /// is non-negative for any 0 ≤ τ ≤ 1 and θ ≥ 0. `theta` is used where the conjugate is finite everywhere.
    pub(crate) fn certify(&self, penalty: &dyn Penalty, w: &[f64], gw: &[f64], theta: f64) -> Gap {
        let steepest = penalty.slope(f64::INFINITY);
        let d = w.len();
        let residual = (1.0 - 2.0 * dot(&self.h, w) + dot(w, gw)).max(0.0);
        let ball_weight = |j: usize| self.ball.as_ref().map_or(0.0, |(c, _)| c[j]);
        let limit = |j: usize| match self.scale.weights[j] {
            0.0 => 0.0,
            weight => weight * self.scale.unit(j) * steepest,
        };
        let unbounded = |j: usize, g: f64| {
            self.bounds
                .as_ref()
                .is_none_or(|b| if g > 0.0 { b[j].1 == f64::INFINITY } else { b[j].0 == f64::NEG_INFINITY })
        };
        let mut tau = 1.0f64;
        let mut free = self.free.iter().copied().peekable();
        for j in 0..d {
            if free.next_if_eq(&j).is_some() {
                continue;
            }
            let g = self.h[j] - gw[j];
            let limit = limit(j);
            if g.abs() > limit && ball_weight(j) == 0.0 && unbounded(j, g) {
                tau = tau.min(limit / g.abs());
            }
        }
        let mut needed = 0.0f64;
        let mut conjugate_is_finite = true;
        if let Some((c, _)) = &self.ball {
            for j in 0..d {
                let g = tau * (self.h[j] - gw[j]);
                if c[j] > 0.0 && unbounded(j, g) && limit(j).is_finite() {
                    conjugate_is_finite = false;
                    needed = needed.max((g.abs() - limit(j)) / c[j]);
                }
            }
        }
        let theta = if conjugate_is_finite { theta } else { needed };
        let mut sum = 0.0;
        let mut cost = 0.0;
        let mut size = 0.0;
        let mut free = self.free.iter().copied().peekable();
        for j in 0..d {
            if free.next_if_eq(&j).is_some() {
                continue;
            }
            let (weight, unit) = (self.scale.weights[j], self.scale.unit(j));
            let g = tau * (self.h[j] - gw[j]);
            let pull = theta * ball_weight(j);
            let value = if w[j] == 0.0 || weight == 0.0 { 0.0 } else { weight * penalty.value(unit * w[j]) };
            cost += value;
            size += ball_weight(j) * w[j].abs();
            let inner = (g.abs() - pull).max(0.0).min(if unbounded(j, g) { limit(j) } else { f64::INFINITY });
            let conjugate = if self.bounds.is_none() {
                if weight > 0.0 { weight * penalty.conjugate((inner / (weight * unit)).min(steepest)) } else { 0.0 }
            } else {
                // sup over the interval of g·x − f̂(x) − θc|x|, attained at the clipped maximiser.
                let (l, u) = self.bounds.as_ref().map_or((f64::NEG_INFINITY, f64::INFINITY), |b| b[j]);
                let x = if inner == 0.0 {
                    0.0
                } else if weight == 0.0 {
                    f64::INFINITY
                } else {
                    let scaled = inner / (weight * unit);
                    if scaled >= steepest && unbounded(j, g) { 0.0 } else { penalty.maximiser(scaled) / unit }
                };
                let x = x.copysign(g).clamp(l, u);
                if x == 0.0 {
                    0.0
                } else {
                    g * x - pull * x.abs() - if weight > 0.0 { weight * penalty.value(unit * x) } else { 0.0 }
                }
            };
            sum += (value + pull * w[j].abs() + conjugate - g * w[j]).max(0.0);
        }
        let slack = self.ball.as_ref().map_or(0.0, |(_, radius)| theta * (radius - size).max(0.0));
        Gap { primal: 0.5 * residual + cost, gap: 0.5 * (1.0 - tau).powi(2) * residual + sum + slack }
    }
}

#[inline]
fn soft(v: f64, threshold: f64) -> f64 {
    crate::problem::penalty::soft(v, threshold)
}
