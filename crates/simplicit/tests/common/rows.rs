//! Row problems with their samples, and everything about them recomputed from the samples: nothing here uses the
//! statistics, the solver's coordinates or the penalties' own code.

use simplicit::linalg::Matrix;
use simplicit::problem::{Ball, RowProblem, Units};
use simplicit::random::Random;

use super::reference::ConicPenalty;

/// A row problem and the samples it is about.
#[derive(Debug, Clone)]
pub struct Case {
    pub name: String,
    /// One sample a row.
    pub features: Matrix,
    pub target: Vec<f64>,
    pub penalty: ConicPenalty,
    pub problem: RowProblem,
}

impl Case {
    pub fn samples(&self) -> usize {
        self.target.len()
    }

    fn d(&self) -> usize {
        self.features.cols()
    }

    /// λ, the weight of the sum of squares.
    fn lambda(&self) -> f64 {
        self.problem.fit / self.samples() as f64
    }

    fn omega(&self, j: usize) -> f64 {
        self.problem.weights.as_ref().map_or(1.0, |w| w[j])
    }

    fn unit(&self, j: usize) -> f64 {
        match self.problem.units {
            Units::Stored => 1.0,
            Units::Rms { factor } => {
                let squares: f64 = (0..self.samples()).map(|i| self.features[(i, j)].powi(2)).sum();
                factor * (squares / self.samples() as f64).sqrt()
            }
        }
    }

    fn ball_weight(&self, j: usize) -> f64 {
        self.problem.ball.as_ref().map_or(0.0, |b| b.weights[j])
    }

    /// [l, u], {0} for a forbidden entry.
    fn interval(&self, j: usize) -> (f64, f64) {
        if self.omega(j).is_infinite() {
            return (0.0, 0.0);
        }
        self.problem.bounds.as_ref().map_or((f64::NEG_INFINITY, f64::INFINITY), |b| b[j])
    }

    /// z − Ũᵀw.
    pub fn residual(&self, w: &[f64]) -> Vec<f64> {
        (0..self.samples())
            .map(|i| self.target[i] - self.features.row(i).iter().zip(w).map(|(f, w)| f * w).sum::<f64>())
            .collect()
    }

    /// Σ ω f(s w).
    pub fn cost(&self, w: &[f64]) -> f64 {
        let entries = (0..self.d()).filter(|&j| w[j] != 0.0 && self.omega(j) > 0.0 && self.omega(j).is_finite());
        entries.map(|j| self.omega(j) * f(self.penalty, self.unit(j) * w[j])).sum()
    }

    /// The objective of relaxed matching.
    pub fn objective(&self, w: &[f64]) -> f64 {
        self.lambda() * square(&self.residual(w)) + self.cost(w)
    }

    /// The objective at zero.
    pub fn objective_at_zero(&self) -> f64 {
        self.lambda() * square(&self.target)
    }

    /// What a difference of objectives is compared with.
    pub fn scale(&self, objective: f64) -> f64 {
        objective.abs().max(1e-10 * self.objective_at_zero())
    }

    /// Whether every constraint holds, to the last bit.
    pub fn is_feasible(&self, w: &[f64]) -> bool {
        let inside = (0..self.d()).all(|j| self.interval(j).0 <= w[j] && w[j] <= self.interval(j).1);
        inside && self.problem.ball.as_ref().is_none_or(|b| self.size(w) <= b.radius)
    }

    /// Σ c|w|.
    pub fn size(&self, w: &[f64]) -> f64 {
        (0..self.d()).map(|j| self.ball_weight(j) * w[j].abs()).sum()
    }

    /// The nearest thing to `w` that satisfies the constraints; for points of an interior method.
    pub fn made_feasible(&self, w: &[f64]) -> Vec<f64> {
        let mut w: Vec<f64> = (0..self.d()).map(|j| w[j].clamp(self.interval(j).0, self.interval(j).1)).collect();
        if let Some(ball) = &self.problem.ball {
            let size = self.size(&w);
            if size > ball.radius {
                for (j, w) in w.iter_mut().enumerate().filter(|(j, _)| self.ball_weight(*j) > 0.0) {
                    *w *= if self.ball_weight(j) > 0.0 { ball.radius / size } else { 1.0 };
                }
            }
        }
        w
    }

    /// P(w) minus the best dual value along the residual: a bound on the suboptimality of w, from the samples alone.
    pub fn gap(&self, w: &[f64]) -> f64 {
        let r = self.residual(w);
        let free: Vec<bool> = (0..self.d()).map(|j| self.is_free(j, w, &r)).collect();
        let r = self.orthogonal_to(&free, r);
        let lambda = self.lambda();
        let (rz, rr) = (r.iter().zip(&self.target).map(|(r, z)| r * z).sum::<f64>(), square(&r));
        let g: Vec<f64> = (0..self.d())
            .map(|j| 2.0 * lambda * (0..self.samples()).map(|i| self.features[(i, j)] * r[i]).sum::<f64>())
            .collect();
        let dual = |tau: f64| 2.0 * lambda * tau * rz - lambda * tau * tau * rr - self.conjugate(&g, tau, &free);
        self.objective(w) - maximum(0.0, 1.0, dual)
    }

    /// The residual made orthogonal to the features that cost nothing: any other has dual value −∞.
    fn orthogonal_to(&self, free: &[bool], mut r: Vec<f64>) -> Vec<f64> {
        let mut basis: Vec<Vec<f64>> = Vec::new();
        for j in (0..self.d()).filter(|&j| free[j]) {
            let mut column: Vec<f64> = (0..self.samples()).map(|i| self.features[(i, j)]).collect();
            let before = square(&column);
            // Twice is enough.
            for _ in 0..2 {
                basis.iter().for_each(|b| remove(&mut column, b));
            }
            let size = square(&column);
            if size > 1e-24 * before && size > 0.0 {
                column.iter_mut().for_each(|c| *c /= size.sqrt());
                basis.push(column);
            }
        }
        for _ in 0..2 {
            basis.iter().for_each(|b| remove(&mut r, b));
        }
        r
    }

    /// Costs nothing and meets no constraint at w, or has no gradient left but rounding.
    fn is_free(&self, j: usize, w: &[f64], r: &[f64]) -> bool {
        let (l, u) = self.interval(j);
        let slack = self.problem.ball.as_ref().is_none_or(|b| self.size(w) < 0.999_999_99 * b.radius);
        let column: Vec<f64> = (0..self.samples()).map(|i| self.features[(i, j)]).collect();
        let along: f64 = column.iter().zip(r).map(|(f, r)| f * r).sum();
        let held = if along > 0.0 { u < f64::INFINITY } else { l > f64::NEG_INFINITY };
        let settled = !held && along.abs() <= 1e-9 * (square(&column) * square(&self.target)).sqrt();
        self.omega(j) == 0.0 && (l < w[j] && w[j] < u || settled) && (slack || self.ball_weight(j) == 0.0)
    }

    /// sup of τgᵀw − cost(w) over the feasible w, by a search over the ball's multiplier.
    fn conjugate(&self, g: &[f64], tau: f64, free: &[bool]) -> f64 {
        let at = |theta: f64| {
            let entries = (0..self.d()).filter(|&j| !free[j]);
            entries.map(|j| self.conjugate_entry(j, tau * g[j], theta)).sum::<f64>()
        };
        let Some(ball) = &self.problem.ball else { return at(0.0) };
        let mut high = 0.0f64;
        for j in (0..self.d()).filter(|&j| self.ball_weight(j) > 0.0 && !free[j]) {
            high = high.max(tau * g[j].abs() / self.ball_weight(j));
        }
        // Past rounding: where θc reaches |g| nothing pulls any more.
        let high = high * (1.0 + 1e-12);
        -maximum(0.0, high, |theta| -(at(theta) + ball.radius * theta))
    }

    /// sup over the interval of g·x − ω f(s x) − θc|x|.
    fn conjugate_entry(&self, j: usize, g: f64, theta: f64) -> f64 {
        let (l, u) = self.interval(j);
        let bound = if g > 0.0 { u } else { -l };
        let pull = g.abs() - theta * self.ball_weight(j);
        if pull <= 0.0 || bound == 0.0 {
            return 0.0;
        }
        let (omega, unit) = (self.omega(j), self.unit(j));
        if omega == 0.0 || unit == 0.0 {
            return pull * bound;
        }
        // In y = s·x: pull·y/s − ω f(y).
        let slope = pull / (omega * unit);
        let y = match self.penalty {
            ConicPenalty::L1 { beta } if slope <= beta => 0.0,
            ConicPenalty::L1 { .. } => f64::INFINITY,
            ConicPenalty::ElasticNet { beta, alpha } => (slope - beta).max(0.0) / (2.0 * alpha),
            ConicPenalty::Ridge { alpha } => slope / (2.0 * alpha),
            ConicPenalty::Perspective { alpha, mu } if slope <= 2.0 * (alpha * mu).sqrt() => 0.0,
            ConicPenalty::Perspective { alpha, .. } => slope / (2.0 * alpha),
        };
        let x = (y / unit).min(bound);
        if x.is_infinite() { f64::INFINITY } else { pull * x - omega * f(self.penalty, unit * x) }
    }
}

fn f(penalty: ConicPenalty, x: f64) -> f64 {
    match penalty {
        ConicPenalty::L1 { beta } => beta * x.abs(),
        ConicPenalty::ElasticNet { beta, alpha } => beta * x.abs() + alpha * x * x,
        ConicPenalty::Ridge { alpha } => alpha * x * x,
        ConicPenalty::Perspective { alpha, mu } => {
            // min over t in [0, 1] of αx²/t + μt, at the stationary t or at 1.
            let t = if mu == 0.0 { 1.0 } else { ((alpha / mu).sqrt() * x.abs()).min(1.0) };
            if t == 0.0 { 0.0 } else { alpha * x * x / t + mu * t }
        }
    }
}

pub fn square(v: &[f64]) -> f64 {
    v.iter().map(|v| v * v).sum()
}

fn remove(v: &mut [f64], unit: &[f64]) {
    let along: f64 = v.iter().zip(unit).map(|(v, u)| v * u).sum();
    v.iter_mut().zip(unit).for_each(|(v, u)| *v -= along * u);
}

/// Largest value of a concave function on [low, high], which may be −∞ on one side; ends included.
fn maximum(mut low: f64, mut high: f64, value: impl Fn(f64) -> f64) -> f64 {
    let mut best = value(low).max(value(high));
    const GOLDEN: f64 = 0.618_033_988_749_894_9;
    let (mut a, mut b) = (high - GOLDEN * (high - low), low + GOLDEN * (high - low));
    let (mut at_a, mut at_b) = (value(a), value(b));
    for _ in 0..90 {
        best = best.max(at_a).max(at_b);
        // −∞ on both sides of the search: dual infeasible towards the larger argument for τ, the smaller for θ.
        if at_a == f64::NEG_INFINITY && at_b == f64::NEG_INFINITY {
            if value(high) > f64::NEG_INFINITY {
                low = b;
            } else {
                high = a;
            }
            (a, b) = (high - GOLDEN * (high - low), low + GOLDEN * (high - low));
            (at_a, at_b) = (value(a), value(b));
        } else if at_a >= at_b {
            high = b;
            (b, at_b) = (a, at_a);
            a = high - GOLDEN * (high - low);
            at_a = value(a);
        } else {
            low = a;
            (a, at_a) = (b, at_b);
            b = low + GOLDEN * (high - low);
            at_b = value(b);
        }
    }
    best.max(at_a).max(at_b)
}

/// How the ball enters a random case.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum BallKind {
    None,
    Tight,
    Slack,
    Zero,
}

/// How bounds enter a random case.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum BoundKind {
    None,
    Sign,
    Box,
}

/// A random case: the kinds are chosen, the rest (shape and rank of the design, λ, parameters) is the seed's.
pub fn random_case(
    seed: u64,
    family: usize,
    ball: BallKind,
    bounds: BoundKind,
    weighted: bool,
    rms_units: bool,
) -> Case {
    let mut r = Random::new(seed);
    let d = 4 + r.below(30);
    let m = if seed.is_multiple_of(2) { d + 5 + r.below(80) } else { 2 + r.below(d) };
    let rank = if seed.is_multiple_of(3) { 1 + r.below(d) } else { d };
    let left = Matrix::from_fn(m, rank, |_, _| r.normal());
    let right = Matrix::from_fn(rank, d, |_, _| r.normal());
    let spread: Vec<f64> = (0..d).map(|_| 10f64.powf(2.0 * r.uniform() - 1.0)).collect();
    let mut features = Matrix::from_fn(m, d, |i, j| {
        let value: f64 = if rank == d {
            left[(i, j)]
        } else {
            (0..rank).map(|k| left[(i, k)] * right[(k, j)]).sum::<f64>() / (rank as f64).sqrt()
        };
        spread[j] * value
    });
    let dull = seed % 5;
    for i in 0..m {
        if dull == 0 {
            features[(i, 1)] = features[(i, 0)];
            features[(i, 2)] = -2.0 * features[(i, 0)];
        }
        if dull == 1 {
            features[(i, 3)] = 0.0;
        }
        if dull == 2 {
            features[(i, d - 1)] = 1.0;
        }
    }
    let truth: Vec<f64> = (0..d).map(|_| if r.uniform() < 0.4 { r.normal() } else { 0.0 }).collect();
    let noise = [0.0, 1e-3, 0.3][r.below(3)];
    let target: Vec<f64> = (0..m)
        .map(|i| features.row(i).iter().zip(&truth).map(|(f, w)| f * w).sum::<f64>() + noise * r.normal())
        .collect();
    let lambda = 10f64.powf(8.0 * r.uniform() - 4.0);
    let size = 10f64.powf(3.0 * r.uniform() - 2.5);
    let penalty = match family % 5 {
        0 => ConicPenalty::L1 { beta: size },
        1 => ConicPenalty::Perspective { alpha: size, mu: size * 10f64.powf(3.0 * r.uniform() - 2.0) },
        2 => ConicPenalty::ElasticNet { beta: size, alpha: size * r.uniform() },
        3 => ConicPenalty::Ridge { alpha: size },
        _ => ConicPenalty::Perspective { alpha: size, mu: 0.0 },
    };
    let mut problem = RowProblem::new(0, lambda * m as f64);
    let rms = (square(&target) / m as f64).sqrt();
    if rms_units {
        problem.units = Units::Rms { factor: if rms > 0.0 { 1.0 / rms } else { 1.0 } };
    }
    if weighted {
        let draw = |j: usize, r: &mut Random| match j % 7 {
            3 => f64::INFINITY,
            5 => 0.0,
            _ => 0.3 + 2.0 * r.uniform(),
        };
        problem.weights = Some((0..d).map(|j| draw(j, &mut r)).collect());
    }
    let inside = d / 2;
    let radius = match ball {
        BallKind::None => None,
        BallKind::Tight => Some(0.3 * truth[..inside].iter().map(|w| w.abs()).sum::<f64>() + 1e-3),
        BallKind::Slack => Some(1e4),
        BallKind::Zero => Some(0.0),
    };
    problem.ball = radius.map(|radius| {
        let mut ball = Ball::on_states(radius, inside, d);
        if seed.is_multiple_of(4) {
            ball.weights.iter_mut().filter(|c| **c > 0.0).for_each(|c| *c = 0.5 + r.uniform());
        }
        ball
    });
    problem.bounds = match bounds {
        BoundKind::None => None,
        BoundKind::Sign => Some(
            (0..d)
                .map(|j| match j % 3 {
                    0 => (0.0, f64::INFINITY),
                    1 => (f64::NEG_INFINITY, 0.0),
                    _ => (f64::NEG_INFINITY, f64::INFINITY),
                })
                .collect(),
        ),
        BoundKind::Box => Some((0..d).map(|_| (-0.7 * r.uniform(), 0.7 * r.uniform())).collect()),
    };
    let name = format!("seed {seed} {penalty:?} λ {lambda:.1e} m {m} d {d} {ball:?} {bounds:?} {weighted} {rms_units}");
    Case { name, features, target, penalty, problem }
}

/// A case built around its optimum, and the optimum: weights w* and a gradient g of the penalty there (with the ball's
/// multiplier and the bounds' signs) are chosen first, then a residual r with 2λŨr = g, then z = Ũᵀw* + r.
pub fn known_optimum(seed: u64) -> (Case, Vec<f64>) {
    let mut r = Random::new(1_000_003 * (seed + 1));
    let d = 5 + r.below(30);
    let m = d + r.below(60);
    let features = Matrix::from_fn(m, d, |_, _| r.normal());
    let lambda = 10f64.powf(4.0 * r.uniform() - 2.0);
    let size = 10f64.powf(2.0 * r.uniform() - 1.0);
    let penalty = match seed % 4 {
        0 => ConicPenalty::L1 { beta: size },
        1 => ConicPenalty::Perspective { alpha: size, mu: 0.2 * size },
        2 => ConicPenalty::ElasticNet { beta: size, alpha: 0.5 * size },
        _ => ConicPenalty::Ridge { alpha: size },
    };
    let inside = d / 2;
    let theta = if seed.is_multiple_of(3) { 0.7 * size } else { 0.0 };
    let bounded = seed.is_multiple_of(5);
    let weighted = seed % 7 < 3;
    let omega: Vec<f64> = (0..d)
        .map(|j| {
            if !weighted {
                1.0
            } else if j == d - 1 {
                0.0
            } else {
                0.5 + r.uniform()
            }
        })
        .collect();
    let (mut w, mut g, mut bounds) = (vec![0.0; d], vec![0.0; d], vec![(f64::NEG_INFINITY, f64::INFINITY); d]);
    for j in 0..d {
        let pull = if j < inside { theta } else { 0.0 };
        let kink = omega[j] * slope(penalty, 0.0) + pull;
        if r.uniform() < 0.4 || omega[j] == 0.0 {
            w[j] = r.normal();
            g[j] = (omega[j] * slope(penalty, w[j].abs()) + pull).copysign(w[j]);
            if bounded && omega[j] > 0.0 && j % 2 == 0 {
                // On its upper or lower bound, pushed against it.
                bounds[j] = if w[j] > 0.0 { (-1.0, w[j]) } else { (w[j], 1.0) };
                g[j] += size.copysign(w[j]);
            }
        } else {
            g[j] = kink * (1.8 * r.uniform() - 0.9);
        }
    }
    // r = F(FᵀF)⁻¹g/(2λ).
    let gram = Matrix::from_fn(d, d, |a, b| (0..m).map(|i| features[(i, a)] * features[(i, b)]).sum());
    let mut factor = simplicit::linalg::Cholesky::with_capacity(d);
    assert!(factor.factor(d, |a| a.copy_from_slice(gram.as_slice())));
    let mut y = g;
    factor.solve(&mut y, 1);
    let along = |i: usize, v: &[f64]| features.row(i).iter().zip(v).map(|(f, v)| f * v).sum::<f64>();
    let target = (0..m).map(|i| along(i, &w) + along(i, &y) / (2.0 * lambda)).collect();
    let mut problem = RowProblem::new(0, lambda * m as f64);
    if weighted {
        problem.weights = Some(omega);
    }
    if bounded {
        problem.bounds = Some(bounds);
    }
    if theta > 0.0 {
        let radius = w[..inside].iter().map(|w| w.abs()).sum::<f64>();
        problem.ball = Some(Ball::on_states(radius, inside, d));
    }
    let name = format!("known optimum {seed} {penalty:?} λ {lambda:.1e} m {m} d {d} θ {theta}");
    (Case { name, features, target, penalty, problem }, w)
}

/// f′(x) for x ≥ 0, from the right at zero.
fn slope(penalty: ConicPenalty, x: f64) -> f64 {
    match penalty {
        ConicPenalty::L1 { beta } => beta,
        ConicPenalty::ElasticNet { beta, alpha } => beta + 2.0 * alpha * x,
        ConicPenalty::Ridge { alpha } => 2.0 * alpha * x,
        ConicPenalty::Perspective { alpha, mu } => 2.0 * alpha * x.max((mu / alpha).sqrt()),
    }
}
