//! Operator splitting (ADMM) for the rows of a block, accelerated.
//!
//! y = (Ĝ + ρI)⁻¹(ĥ + ρ(v − s)), v = prox(y + s), s += y − v, written as a fixed-point iteration in u = v + s so that
//! [`Anderson`] can work on it: v = prox(u), y = (Ĝ + ρI)⁻¹ĥ + ρ(Ĝ + ρI)⁻¹(2v − u), F(u) − u = γ(y − v).

use super::anderson::Anderson;
use super::batch::{Best, Workspace, combine, multiply};
use super::canonical::Row;
use super::design::{Coordinates, DECADES, LEVELS, epsilon};
use crate::linalg::{axpy, dot};
use crate::problem::Penalty;

/// The largest level: single precision is not accurate enough for a smaller ρ.
const MAX_LEVEL: usize = 7;
/// Over-relaxation γ.
const RELAXATION: f64 = 1.6;
/// ρ is this share of (typical kink) / (typical ridge weight).
const FIRST_STEP: f64 = 0.6;
/// The level of the ridge solution from which the size of the weights is estimated.
const RIDGE_LEVEL: usize = 3;
/// Plain steps before the acceleration.
const PLAIN_STEPS: usize = 8;
/// ρ is checked again after these numbers of steps, and changed if it is wrong by two levels or more. The ρ at which
/// the two residuals balance is too small for finding supports, by this factor.
const ADAPT_AT: [usize; 3] = [15, 40, 100];
const BALANCE: f64 = 3.0;

/// One row's iterates.
pub(super) struct Splitting<'a> {
    pub(super) row: &'a Row<'a>,
    pub(super) level: usize,
    u: Vec<f64>,
    /// The sparse iterate, which is feasible, and the ball's multiplier there.
    pub(super) v: Vec<f64>,
    pub(super) theta: f64,
    /// The dense iterate.
    pub(super) y: Vec<f64>,
    /// (Ĝ + ρI)⁻¹ĥ.
    ridge: Vec<f64>,
    /// 2v − u.
    reflected: Vec<f64>,
    memory: Anderson,
    previous: Vec<f64>,
    signs: Vec<i8>,
    /// Number of signs of v that have changed since the last check.
    pub(super) changed_signs: usize,
    pub(super) steps: usize,
    pub(super) best: Best,
    pub(super) active_set_steps: usize,
    pub(super) solved: bool,
}

impl<'a> Splitting<'a> {
    pub(super) fn new(row: &'a Row<'a>, start: Option<&[f64]>, d: usize) -> Self {
        Self {
            row,
            level: RIDGE_LEVEL,
            u: start.map_or_else(|| vec![0.0; d], <[f64]>::to_vec),
            v: vec![0.0; d],
            theta: 0.0,
            y: vec![0.0; d],
            ridge: vec![0.0; d],
            reflected: vec![0.0; d],
            memory: Anderson::new(d),
            previous: vec![0.0; d],
            signs: vec![0; d],
            changed_signs: d,
            steps: 0,
            best: Best::default(),
            active_set_steps: 0,
            solved: false,
        }
    }

    fn rho(&self) -> f64 {
        epsilon(self.level)
    }

    /// Counts the signs that have changed since the last check.
    pub(super) fn look(&mut self) {
        self.changed_signs = 0;
        for (sign, v) in self.signs.iter_mut().zip(&self.v) {
            let now = i8::from(*v > 0.0) - i8::from(*v < 0.0);
            self.changed_signs += usize::from(now != *sign);
            *sign = now;
        }
    }

    /// Computes v = prox(u), and the operand of the product.
    fn reflect(&mut self, penalty: &dyn Penalty, workspace: &mut Workspace) {
        std::mem::swap(&mut self.v, &mut self.previous);
        let tau = 1.0 / self.rho();
        self.theta = self.row.prox(penalty, &self.u, tau, &mut self.v, &mut workspace.shifted);
        combine(&mut self.reflected, &[(2.0, &self.v), (-1.0, &self.u)]);
    }

    /// Computes the next u from y.
    fn relax(&mut self, workspace: &mut Workspace) {
        combine(&mut workspace.v, &[(RELAXATION, &self.y), (-RELAXATION, &self.v)]);
        self.steps += 1;
        if self.steps > PLAIN_STEPS {
            self.memory.step(&mut self.u, &workspace.v);
        } else {
            axpy(&mut self.u, 1.0, &workspace.v);
        }
    }

    /// The level at which the primal and the dual residual balance.
    fn balanced_level(&self) -> usize {
        let (mut primal, mut dual, mut size, mut dual_size) = (0.0, 0.0, 0.0, 0.0);
        for j in 0..self.v.len() {
            primal += (self.y[j] - self.v[j]).powi(2);
            dual += (self.v[j] - self.previous[j]).powi(2);
            size += self.v[j].powi(2);
            dual_size += (self.v[j] - self.reflected[j]).powi(2);
        }
        if !(primal > 0.0 && dual > 0.0 && size > 0.0 && dual_size > 0.0) {
            return self.level;
        }
        let ratio = BALANCE * ((primal / size) / (dual / dual_size)).sqrt();
        nearest_level(self.rho() * ratio.clamp(1e-2, 1e2).sqrt())
    }

    /// Changes the level, keeping v and the unscaled dual ρs.
    fn change_level(&mut self, level: usize) {
        let factor = self.rho() / epsilon(level);
        for (u, v) in self.u.iter_mut().zip(&self.v) {
            *u = v + factor * (*u - v);
        }
        self.level = level;
        self.memory.clear();
    }
}

fn nearest_level(rho: f64) -> usize {
    (-rho.log10() / DECADES).round().clamp(0.0, MAX_LEVEL as f64) as usize
}

/// Chooses every row's ρ from its ridge solution, and the dual that matches a start.
pub(super) fn start(
    coordinates: &Coordinates,
    penalty: &dyn Penalty,
    states: &mut [Splitting],
    workspace: &mut Workspace,
) {
    let Some(inverse) = coordinates.inverse(RIDGE_LEVEL) else { return };
    let every = |_: &Splitting| true;
    multiply(
        inverse,
        states,
        &mut workspace.double,
        every,
        |s| &s.row.h,
        |s, out| {
            let kinks: f64 = (0..out.len()).map(|j| s.row.kink(penalty, j).powi(2)).sum();
            let size = dot(out, out);
            let rho = if size > 0.0 && kinks > 0.0 { FIRST_STEP * (kinks / size).sqrt() } else { 1e-2 };
            s.level = nearest_level(rho);
            s.ridge.copy_from_slice(out);
        },
    );
    for level in (0..LEVELS).filter(|&level| level != RIDGE_LEVEL) {
        ridge_solutions(coordinates, level, states, workspace, |s| s.level == level);
    }
    let warm = |s: &Splitting| s.u.iter().any(|u| *u != 0.0);
    multiply(
        coordinates.gram(),
        states,
        &mut workspace.double,
        warm,
        |s| &s.u,
        |s, out| {
            // A start that costs more than zero is not used; P(0) = ½ here.
            let fit = 0.5 * dot(&s.u, out) - dot(&s.u, &s.row.h);
            let value = fit + penalty.value_slice(&s.u, &s.row.scale);
            if value >= 0.0 || value.is_nan() {
                s.u.fill(0.0);
                return;
            }
            let rho = epsilon(s.level);
            for (j, g) in out.iter().enumerate() {
                let kink = s.row.kink(penalty, j);
                s.u[j] += (s.row.h[j] - g).clamp(-kink, kink) / rho;
            }
        },
    );
}

fn ridge_solutions(
    coordinates: &Coordinates,
    level: usize,
    states: &mut [Splitting],
    workspace: &mut Workspace,
    pick: impl Fn(&Splitting) -> bool,
) {
    if states.iter().any(&pick)
        && let Some(inverse) = coordinates.inverse(level)
    {
        multiply(inverse, states, &mut workspace.double, pick, |s| &s.row.h, |s, out| s.ridge.copy_from_slice(out));
    }
}

/// One step of the selected rows.
pub(super) fn advance(
    coordinates: &Coordinates,
    penalty: &dyn Penalty,
    states: &mut [Splitting],
    workspace: &mut Workspace,
    pick: impl Fn(&Splitting) -> bool,
) {
    for s in states.iter_mut().filter(|s| pick(s)) {
        s.reflect(penalty, workspace);
    }
    for level in 0..LEVELS {
        let here = |s: &Splitting| s.level == level && pick(s);
        if !states.iter().any(here) {
            continue;
        }
        let Some(projection) = coordinates.projection(level) else { continue };
        multiply(
            projection,
            states,
            &mut workspace.single,
            here,
            |s| &s.reflected,
            |s, out| {
                for ((y, ridge), out) in s.y.iter_mut().zip(&s.ridge).zip(out) {
                    *y = ridge + f64::from(*out);
                }
            },
        );
    }
    let mut moved = [false; LEVELS];
    for s in states.iter_mut().filter(|s| pick(s)) {
        let wanted = if ADAPT_AT.contains(&(s.steps + 1)) { s.balanced_level() } else { s.level };
        if wanted.abs_diff(s.level) >= 2 {
            s.change_level(wanted);
            s.steps += 1;
            moved[wanted] = true;
            s.ridge.fill(f64::NAN);
        } else {
            s.relax(workspace);
        }
    }
    for level in (0..LEVELS).filter(|&level| moved[level]) {
        ridge_solutions(coordinates, level, states, workspace, |s| s.level == level && s.ridge[0].is_nan());
    }
}
