//! The convex relaxation of a priced row, for one diagonal δ with G − diag(δ) ⪰ 0.
//!
//! The part ½δ_j·x² of the quadratic is combined with the price: the convex envelope of ½δx² + p·[x ≠ 0] is φ(x) =
//! √(2δp)·|x| up to the break √(2p/δ) and ½δx² + p beyond it. With Q = G − diag(δ),
//!
//! min ½xᵀQx − hᵀx + c + Σφ_j(x_j)  ≥  c − ½yᵀQy − Σφ_j*(h_j − (Qy)_j)  for every y,  φ*(g) = max(0, g²/2δ − p).
//!
//! Coordinate descent finds the pieces; Newton's method on these pieces finds the remaining digits.

use crate::linalg::{Cholesky, Matrix, axpy, dot};

/// Sweeps over the non-zero entries after every sweep over all entries.
const ACTIVE_SWEEPS: usize = 2;
/// The most rounds of sweeps with a Newton step.
const MAX_ROUNDS: usize = 120;
/// Keeps the Newton system definite where Q is singular, relative to the diagonal.
const LEVEL: f64 = 1e-10;

/// One relaxation; every slice has an entry per row of `gram`.
pub(super) struct Relaxation<'a> {
    pub(super) gram: &'a Matrix,
    pub(super) cross: &'a [f64],
    pub(super) constant: f64,
    pub(super) delta: &'a [f64],
    pub(super) prices: &'a [f64],
}

/// When a relaxation has been solved well enough.
#[derive(Clone, Copy)]
pub(super) struct Stop {
    /// Gap relative to the value.
    pub(super) tolerance: f64,
    /// The search for a bound ends when it reaches this number.
    pub(super) enough: f64,
}

/// The results of the solve.
#[derive(Clone, Copy)]
pub(super) struct Solved {
    /// A lower bound, up to rounding; `x` is the point y that gives it.
    pub(super) dual: f64,
}

/// Memory that solves of different sizes use one after the other.
pub(super) struct Workspace {
    factor: Cholesky,
    gx: Vec<f64>,
    active: Vec<usize>,
    step: Vec<f64>,
    trial: Vec<f64>,
    trial_gx: Vec<f64>,
    best: Vec<f64>,
}

impl Workspace {
    pub(super) fn new(size: usize) -> Self {
        let zeros = || vec![0.0; size];
        Self {
            factor: Cholesky::with_capacity(size),
            gx: zeros(),
            active: Vec::with_capacity(size),
            step: zeros(),
            trial: zeros(),
            trial_gx: zeros(),
            best: zeros(),
        }
    }
}

impl Relaxation<'_> {
    fn kink(&self, j: usize) -> f64 {
        (2.0 * self.delta[j] * self.prices[j]).sqrt()
    }

    fn break_point(&self, j: usize) -> f64 {
        (2.0 * self.prices[j] / self.delta[j]).sqrt()
    }

    fn envelope(&self, j: usize, x: f64) -> f64 {
        if x.abs() <= self.break_point(j) {
            self.kink(j) * x.abs()
        } else {
            0.5 * self.delta[j] * x * x + self.prices[j]
        }
    }

    /// The share t_j of its price that entry j pays in the relaxation.
    pub(super) fn share(&self, j: usize, x: f64) -> f64 {
        let at = self.break_point(j);
        if at > 0.0 { (x.abs() / at).min(1.0) } else { 1.0 }
    }

    /// h − Qx of one entry.
    fn pull(&self, j: usize, x: &[f64], gx: &[f64]) -> f64 {
        self.cross[j] - gx[j] + self.delta[j] * x[j]
    }

    /// g_j²/2δ_j − p_j: how much the bound gains if j is fixed as out (if positive) or, with the opposite sign, as in
    /// (if negative).
    pub(super) fn excess(&self, j: usize, x: &[f64], gx: &[f64]) -> f64 {
        let g = self.pull(j, x, gx);
        0.5 * g * g / self.delta[j] - self.prices[j]
    }

    pub(super) fn multiply(&self, x: &[f64], out: &mut [f64]) {
        out.fill(0.0);
        for (j, x) in x.iter().enumerate().filter(|(_, x)| **x != 0.0) {
            axpy(out, *x, self.gram.row(j));
        }
    }

    fn quadratic(&self, x: &[f64], gx: &[f64]) -> f64 {
        0.5 * (dot(x, gx) - x.iter().zip(self.delta).map(|(x, d)| d * x * x).sum::<f64>())
    }

    fn primal(&self, x: &[f64], gx: &[f64]) -> f64 {
        let cost: f64 = x.iter().enumerate().map(|(j, x)| if *x == 0.0 { 0.0 } else { self.envelope(j, *x) }).sum();
        self.constant + self.quadratic(x, gx) - dot(self.cross, x) + cost
    }

    fn dual(&self, x: &[f64], gx: &[f64]) -> f64 {
        let conjugates: f64 = (0..x.len()).map(|j| self.excess(j, x, gx).max(0.0)).sum();
        self.constant - self.quadratic(x, gx) - conjugates
    }

    /// Minimises over entry j with the others fixed; returns whether it moved.
    fn visit(&self, j: usize, x: &mut [f64], gx: &mut [f64]) -> bool {
        let line = self.gram.row(j);
        let curvature = line[j] - self.delta[j];
        let pull = self.cross[j] - gx[j] + line[j] * x[j];
        let (size, kink) = (pull.abs(), self.kink(j));
        let next = if size <= kink {
            0.0
        } else if size - kink <= curvature * self.break_point(j) {
            ((size - kink) / curvature).copysign(pull)
        } else {
            pull / line[j]
        };
        if next == x[j] {
            return false;
        }
        axpy(gx, next - x[j], line);
        x[j] = next;
        true
    }

    /// Improves x until a stop; x is then the point with the best bound.
    pub(super) fn solve(&self, x: &mut [f64], stop: Stop, workspace: &mut Workspace) -> Solved {
        let d = x.len();
        let Workspace { factor, gx, active, step, trial, trial_gx, best } = workspace;
        let (gx, trial, trial_gx, best) = (&mut gx[..d], &mut trial[..d], &mut trial_gx[..d], &mut best[..d]);
        self.multiply(x, gx);
        let mut bound = self.dual(x, gx);
        best.copy_from_slice(x);
        for round in 0..MAX_ROUNDS {
            for j in 0..d {
                self.visit(j, x, gx);
            }
            for _ in 0..ACTIVE_SWEEPS {
                for j in 0..d {
                    if x[j] != 0.0 {
                        self.visit(j, x, gx);
                    }
                }
            }
            if round % 8 == 7 {
                self.multiply(x, gx);
            }
            self.newton(x, gx, factor, active, step, trial, trial_gx);
            let dual = self.dual(x, gx);
            if dual > bound {
                bound = dual;
                best.copy_from_slice(x);
            }
            let primal = self.primal(x, gx);
            if bound >= stop.enough || primal - bound <= stop.tolerance * primal.abs() {
                break;
            }
            // The optimum lies between bound and primal; if both are far below the bound that is needed, further
            // digits do not help.
            if stop.enough.is_finite() && primal < stop.enough && primal - bound <= 0.02 * (stop.enough - primal) {
                break;
            }
        }
        x.copy_from_slice(best);
        Solved { dual: bound }
    }

    /// Whether entry j is on the linear piece of its envelope.
    fn is_linear(&self, j: usize, x: f64) -> bool {
        x.abs() < self.break_point(j)
    }

    /// Factors the curvature over the non-zero entries on their present pieces.
    fn factor_pieces(&self, x: &[f64], active: &[usize], factor: &mut Cholesky) -> bool {
        let k = active.len();
        factor.factor(k, |a| {
            for (r, &i) in active.iter().enumerate() {
                let line = self.gram.row(i);
                for (s, &j) in active.iter().enumerate().skip(r) {
                    a[r * k + s] = line[j];
                }
                a[r * k + r] += LEVEL * line[i] - if self.is_linear(i, x[i]) { self.delta[i] } else { 0.0 };
            }
        })
    }

    /// The entry to split at: of those that pay a part of their price, the one whose two parts raise the bound most,
    /// by the product of what each gains. To second order, where the other entries follow on their pieces and s is
    /// the curvature that remains for x_j, fixing it as out gains ½s·x_j², and fixing it as in gains ½(k −
    /// δ|x_j|)²·s/(δ(s + δ)), where k is the kink.
    pub(super) fn split_at(
        &self,
        x: &[f64],
        allowed: impl Fn(usize) -> bool,
        workspace: &mut Workspace,
    ) -> Option<usize> {
        let Workspace { factor, active, .. } = workspace;
        active.clear();
        active.extend((0..x.len()).filter(|&j| x[j] != 0.0));
        if active.is_empty() || !self.factor_pieces(x, active, factor) {
            return None;
        }
        let inverse = factor.inverse();
        let score = |(r, &j): (usize, &usize)| {
            let (s, delta) = (1.0 / inverse[(r, r)], self.delta[j]);
            let left = self.kink(j) - delta * x[j].abs();
            (0.5 * s * x[j] * x[j] * (0.5 * left * left * s / (delta * (s + delta))), j)
        };
        let open = active.iter().enumerate().filter(|(_, j)| allowed(**j) && self.is_linear(**j, x[**j]));
        let best = open.map(score).filter(|(score, _)| *score > 0.0).max_by(|a, b| a.0.total_cmp(&b.0));
        best.map(|(_, j)| j)
    }

    /// A step to the minimum over the non-zero entries on their present pieces, as far as it lowers the cost.
    #[allow(clippy::too_many_arguments)]
    fn newton(
        &self,
        x: &mut [f64],
        gx: &mut [f64],
        factor: &mut Cholesky,
        active: &mut Vec<usize>,
        step: &mut Vec<f64>,
        trial: &mut [f64],
        trial_gx: &mut [f64],
    ) {
        active.clear();
        active.extend((0..x.len()).filter(|&j| x[j] != 0.0));
        let k = active.len();
        if k == 0 {
            return;
        }
        step.clear();
        let pull = |j: usize| if self.is_linear(j, x[j]) { self.kink(j).copysign(x[j]) } else { 0.0 };
        step.extend(active.iter().map(|&j| self.cross[j] - pull(j)));
        if !self.factor_pieces(x, active, factor) {
            return;
        }
        factor.solve(step, 1);
        trial.fill(0.0);
        for (&j, &w) in active.iter().zip(step.iter()) {
            trial[j] = if w * x[j] > 0.0 { w } else { 0.0 };
        }
        self.multiply(trial, trial_gx);
        let before = self.primal(x, gx);
        for share in [1.0, 0.5, 0.2, 0.05] {
            if share < 1.0 {
                // The last trial was further along the same line, so it is continued from there.
                continue_line(trial, x, share);
                continue_line(trial_gx, gx, share);
            }
            if self.primal(trial, trial_gx) < before {
                x.copy_from_slice(trial);
                gx.copy_from_slice(trial_gx);
                return;
            }
        }
    }
}

/// to ← from + share·(to − from).
fn continue_line(to: &mut [f64], from: &[f64], share: f64) {
    for (to, from) in to.iter_mut().zip(from) {
        *to = from + share * (*to - from);
    }
}
