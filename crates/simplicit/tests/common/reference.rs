//! The conic reference: the same row problem handed to an unrelated method (Clarabel's interior point), from the
//! statistics or the samples alone. It is slow and trusted; tests and benchmarks compare with it.
//!
//! In unit-RMS coordinates x_j = w_j·c_j/t the cones are told
//!
//! * |x_j| ≤ u_j for every entry that pays ℓ1 or lies in the ball, Σ ĉ_j u_j ≤ κ for the ball itself;
//! * the perspective, min over t ∈ \[0, 1\] of αx²/t + μt, as 2√(αμ)·u_j + αv_j² with v_j ≥ u_j − √(μ/α), v_j ≥ 0: the
//!   same number by linear constraints, without rotated cones s_j·t_j ≥ x_j²;
//! * the fit as ½xᵀĜx − ĥᵀx + ½ (Gram) or as ½‖r‖² with r + F̂x = ẑ (residual); exact matching as equations.

use std::time::Instant;

use clarabel::algebra::CscMatrix;
use clarabel::solver::{DefaultSettings, DefaultSolver, IPSolver, SolverStatus, SupportedConeT};

use simplicit::linalg::{Matrix, symmetric_eigen};
use simplicit::problem::penalty::{ElasticNet, L1, Penalty, Perspective, Ridge};
use simplicit::problem::{RowProblem, Units};
use simplicit::statistics::Statistics;
use simplicit::{Error, Result};

/// Features whose RMS is not above this are always zero.
const DEAD: f64 = 1e-140;
/// Eigenvalues of Ĝ below this carry no equation of exact matching.
const RANK: f64 = 1e-13;
/// Share of a target's energy that its features may leave unexplained and still match exactly.
const UNEXPLAINED: f64 = 1e-9;

/// A penalty, described by its structure: cones cannot call a function.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ConicPenalty {
    /// β|x|.
    L1 {
        /// β.
        beta: f64,
    },
    /// min over t in [0, 1] of αx²/t + μt.
    Perspective {
        /// α.
        alpha: f64,
        /// μ.
        mu: f64,
    },
    /// β|x| + αx².
    ElasticNet {
        /// β.
        beta: f64,
        /// α.
        alpha: f64,
    },
    /// αx².
    Ridge {
        /// α.
        alpha: f64,
    },
}

impl ConicPenalty {
    /// The same penalty as the row solver takes it.
    pub fn penalty(&self) -> Result<Box<dyn Penalty>> {
        Ok(match *self {
            ConicPenalty::L1 { beta } => Box::new(L1::new(beta)?),
            ConicPenalty::Perspective { alpha, mu } => Box::new(Perspective::new(alpha, mu)?),
            ConicPenalty::ElasticNet { beta, alpha } => Box::new(ElasticNet::new(beta, alpha)?),
            ConicPenalty::Ridge { alpha } => Box::new(Ridge::new(alpha)?),
        })
    }

    /// (β, α, μ) of β|x| + αx² or, with μ > 0, of the perspective.
    fn coefficients(&self) -> (f64, f64, f64) {
        match *self {
            ConicPenalty::L1 { beta } => (beta, 0.0, 0.0),
            ConicPenalty::Perspective { alpha, mu } => (0.0, alpha, mu),
            ConicPenalty::ElasticNet { beta, alpha } => (beta, alpha, 0.0),
            ConicPenalty::Ridge { alpha } => (0.0, alpha, 0.0),
        }
    }
}

/// How the fit is written down.
#[derive(Debug, Clone, Copy)]
pub enum ReferenceForm<'a> {
    /// From the statistics: a dense d × d quadratic.
    Gram,
    /// From the samples, one variable and one equation each.
    Residual {
        /// The features of the statistics, one sample a row.
        features: &'a Matrix,
        /// The row's target, one value a sample.
        target: &'a [f64],
    },
}

/// What to solve and how well.
#[derive(Debug, Clone, Copy)]
pub struct ReferenceSettings<'a> {
    /// How the fit is written down.
    pub form: ReferenceForm<'a>,
    /// Match exactly instead of penalising the mismatch.
    pub exact: bool,
    /// Gap, relative to `size`, and feasibility asked of the conic solver.
    pub tolerance: f64,
    /// About the optimal value. The conic solver's own tolerances are relative to one, so it is given values divided by
    /// this. Default: the objective at zero, or the largest coefficient of the penalty in exact matching.
    pub size: Option<f64>,
}

impl Default for ReferenceSettings<'_> {
    fn default() -> Self {
        Self { form: ReferenceForm::Gram, exact: false, tolerance: 1e-9, size: None }
    }
}

/// How the conic solver ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReferenceStatus {
    /// At the tolerance.
    Solved,
    /// A point of reduced accuracy.
    Inaccurate,
    /// No weights satisfy the constraints.
    Infeasible,
    /// A limit or a numerical failure; the weights mean nothing.
    Failed,
}

/// What the conic solver returned.
#[derive(Debug, Clone, PartialEq)]
pub struct ReferenceSolution {
    /// One weight per feature, in stored coordinates. Feasible to the tolerance, nowhere exactly zero.
    pub weights: Vec<f64>,
    /// The conic solver's own primal value, in the units of the row problem.
    pub objective: f64,
    /// How it ended; look at it before the weights.
    pub status: ReferenceStatus,
    /// Interior-point iterations.
    pub iterations: usize,
    /// Wall-clock seconds inside the conic solver, its set-up included and the writing of its matrices not.
    pub seconds: f64,
}

/// Solves one row problem by cones.
pub fn solve_by_cones(
    statistics: &Statistics,
    penalty: ConicPenalty,
    problem: &RowProblem,
    settings: &ReferenceSettings,
) -> Result<ReferenceSolution> {
    problem.check(statistics.features(), statistics.targets())?;
    penalty.penalty()?;
    if let ReferenceForm::Residual { features, target } = settings.form
        && (features.rows(), features.cols(), target.len())
            != (statistics.samples(), statistics.features(), statistics.samples())
    {
        return Err(Error::shape(
            "samples of the reference",
            format!("{0} × {1} and {0} values", statistics.samples(), statistics.features()),
            format!("{} × {} and {} values", features.rows(), features.cols(), target.len()),
        ));
    }
    let target_scale = (statistics.energy(problem.target) / statistics.samples() as f64).sqrt();
    let nothing = |status| ReferenceSolution {
        weights: vec![0.0; statistics.features()],
        objective: 0.0,
        status,
        iterations: 0,
        seconds: 0.0,
    };
    if target_scale == 0.0 {
        return Ok(nothing(ReferenceStatus::Solved));
    }
    if let Some(size) = settings.size.filter(|size| !(*size > 0.0 && size.is_finite())) {
        return Err(Error::setting("size", "a positive number", size));
    }
    let scaled = Scaled::new(statistics, penalty, problem, target_scale, settings);
    let mut program = Program::default();
    let x = scaled.penalties(&mut program);
    match settings.form {
        ReferenceForm::Gram if settings.exact => {
            if !scaled.match_gram(statistics, &x, &mut program)? {
                return Ok(nothing(ReferenceStatus::Infeasible));
            }
        }
        ReferenceForm::Gram => scaled.fit_gram(statistics, &x, &mut program),
        ReferenceForm::Residual { features, target } => {
            scaled.fit_samples(statistics, features, target, settings.exact, &x, &mut program);
        }
    }
    let (solution, seconds) = program.solve(settings.tolerance)?;
    let mut weights = vec![0.0; statistics.features()];
    for (x, entry) in x.iter().zip(&scaled.entries) {
        weights[entry.feature] = solution.x[*x] * target_scale / entry.rms;
    }
    let constant = match settings.form {
        ReferenceForm::Gram if !settings.exact => 0.5 * scaled.fit,
        _ => 0.0,
    };
    Ok(ReferenceSolution {
        weights,
        objective: (solution.obj_val + constant) * scaled.value_scale,
        status: match solution.status {
            SolverStatus::Solved => ReferenceStatus::Solved,
            SolverStatus::AlmostSolved => ReferenceStatus::Inaccurate,
            SolverStatus::PrimalInfeasible | SolverStatus::AlmostPrimalInfeasible => ReferenceStatus::Infeasible,
            _ => ReferenceStatus::Failed,
        },
        iterations: solution.iterations as usize,
        seconds,
    })
}

/// One entry that may be non-zero, in unit-RMS coordinates.
struct Entry {
    feature: usize,
    rms: f64,
    l1: f64,
    quadratic: f64,
    /// μ of the perspective, and the break point; zero without.
    mu: f64,
    break_point: f64,
    ball: f64,
    bounds: (f64, f64),
}

/// The Gram matrix of unit-RMS features.
fn unit_gram(statistics: &Statistics, a: &Entry, b: &Entry) -> f64 {
    statistics.gram()[(a.feature, b.feature)] / (statistics.samples() as f64 * a.rms * b.rms)
}

struct Scaled {
    entries: Vec<Entry>,
    radius: Option<f64>,
    h: Vec<f64>,
    target_scale: f64,
    /// What values are divided by.
    value_scale: f64,
    /// Factor on ½xᵀĜx − ĥᵀx + ½.
    fit: f64,
}

impl Scaled {
    fn new(
        statistics: &Statistics,
        penalty: ConicPenalty,
        problem: &RowProblem,
        t: f64,
        settings: &ReferenceSettings,
    ) -> Self {
        let (beta, alpha, mu) = penalty.coefficients();
        let mut entries = Vec::new();
        let live = (0..statistics.features()).map(|j| (j, statistics.rms(j))).filter(|(_, c)| *c > DEAD);
        for (j, c) in live {
            let omega = problem.weights.as_ref().map_or(1.0, |w| w[j]);
            let (l, u) = problem.bounds.as_ref().map_or((f64::NEG_INFINITY, f64::INFINITY), |b| b[j]);
            let ball = problem.ball.as_ref().map_or(0.0, |b| b.weights[j]);
            let closed = ball > 0.0 && problem.ball.as_ref().is_some_and(|b| b.radius == 0.0);
            // An interior point needs an interior: entries that can only be zero are left out.
            if omega.is_infinite() || l == u || closed {
                continue;
            }
            let unit = match problem.units {
                Units::Stored => t / c,
                Units::Rms { factor } => t * factor,
            };
            entries.push(Entry {
                feature: j,
                rms: c,
                l1: omega * beta * unit,
                quadratic: omega * alpha * unit * unit,
                mu: omega * mu,
                break_point: (mu / alpha).sqrt() / unit,
                ball: ball * t / c,
                bounds: (l * c / t, u * c / t),
            });
        }
        let largest = entries.iter().flat_map(|e| [e.l1, e.quadratic, e.mu]).fold(0.0, f64::max);
        let at_zero = problem.fit * t * t;
        let value_scale = match settings.size {
            Some(size) => size,
            None if !settings.exact => at_zero,
            None if largest > 0.0 => largest,
            None => 1.0,
        };
        for e in &mut entries {
            e.l1 /= value_scale;
            e.quadratic /= value_scale;
            e.mu /= value_scale;
        }
        let cross = statistics.cross(problem.target);
        let m = statistics.samples() as f64;
        let h = entries.iter().map(|e| cross[e.feature] / (m * e.rms * t)).collect();
        Self {
            entries,
            radius: problem.ball.as_ref().map(|b| b.radius),
            h,
            target_scale: t,
            value_scale,
            fit: 2.0 * at_zero / value_scale,
        }
    }

    /// Everything but the fit; returns the column of every entry's x.
    fn penalties(&self, program: &mut Program) -> Vec<usize> {
        let x: Vec<usize> = self.entries.iter().map(|_| program.variable(0.0)).collect();
        let mut ball = Vec::new();
        for (&x, e) in x.iter().zip(&self.entries) {
            if e.l1 > 0.0 || e.ball > 0.0 || e.mu > 0.0 {
                let u = program.variable(e.l1 + 2.0 * (e.quadratic * e.mu).sqrt());
                program.at_most(vec![(x, 1.0), (u, -1.0)], 0.0);
                program.at_most(vec![(x, -1.0), (u, -1.0)], 0.0);
                if e.ball > 0.0 {
                    ball.push((u, e.ball));
                }
                if e.mu > 0.0 {
                    let v = program.variable(0.0);
                    program.at_most(vec![(u, 1.0), (v, -1.0)], e.break_point);
                    program.at_most(vec![(v, -1.0)], 0.0);
                    program.quadratic(v, v, 2.0 * e.quadratic);
                }
            }
            if e.mu == 0.0 && e.quadratic > 0.0 {
                program.quadratic(x, x, 2.0 * e.quadratic);
            }
            if e.bounds.0.is_finite() {
                program.at_most(vec![(x, -1.0)], -e.bounds.0);
            }
            if e.bounds.1.is_finite() {
                program.at_most(vec![(x, 1.0)], e.bounds.1);
            }
        }
        if let Some(radius) = self.radius
            && !ball.is_empty()
        {
            program.at_most(ball, radius);
        }
        x
    }

    fn fit_gram(&self, statistics: &Statistics, x: &[usize], program: &mut Program) {
        for (k, e) in self.entries.iter().enumerate() {
            program.cost[x[k]] = -self.fit * self.h[k];
            for (i, other) in self.entries[..=k].iter().enumerate() {
                program.quadratic(x[i], x[k], self.fit * unit_gram(statistics, other, e));
            }
        }
    }

    /// Λ^½Vᵀx = Λ^−½Vᵀĥ over the eigenvalues that count; false if the features cannot explain the target.
    fn match_gram(&self, statistics: &Statistics, x: &[usize], program: &mut Program) -> Result<bool> {
        let d = self.entries.len();
        let gram = Matrix::from_fn(d, d, |i, j| unit_gram(statistics, &self.entries[i], &self.entries[j]));
        let (values, vectors) =
            symmetric_eigen(&gram).ok_or_else(|| Error::unsupported("this Gram matrix", "it has no eigenvalues"))?;
        let largest = values.last().copied().unwrap_or(0.0);
        let mut unexplained = 1.0;
        for (k, &value) in values.iter().enumerate().filter(|(_, v)| **v > RANK * largest) {
            let root = value.sqrt();
            let right = (0..d).map(|j| vectors[(j, k)] * self.h[j]).sum::<f64>() / root;
            unexplained -= right * right;
            program.equal((0..d).map(|j| (x[j], root * vectors[(j, k)])).collect(), right);
        }
        Ok(unexplained <= UNEXPLAINED)
    }

    fn fit_samples(
        &self,
        statistics: &Statistics,
        features: &Matrix,
        target: &[f64],
        exact: bool,
        x: &[usize],
        program: &mut Program,
    ) {
        let root = (statistics.samples() as f64).sqrt();
        for (i, z) in target.iter().enumerate() {
            let row = features.row(i);
            let mut equation: Vec<(usize, f64)> =
                x.iter().zip(&self.entries).map(|(x, e)| (*x, row[e.feature] / (e.rms * root))).collect();
            if !exact {
                let r = program.variable(0.0);
                program.quadratic(r, r, self.fit);
                equation.push((r, 1.0));
            }
            program.equal(equation, z / (self.target_scale * root));
        }
    }
}

/// Σ aᵢxᵢ over named columns.
type Terms = Vec<(usize, f64)>;

/// min ½xᵀPx + qᵀx subject to equations and inequalities.
#[derive(Default)]
struct Program {
    cost: Vec<f64>,
    /// (row, column, value) of the upper triangle of P.
    quadratic: Vec<(usize, usize, f64)>,
    equations: Vec<(Terms, f64)>,
    inequalities: Vec<(Terms, f64)>,
}

impl Program {
    fn variable(&mut self, cost: f64) -> usize {
        self.cost.push(cost);
        self.cost.len() - 1
    }

    fn quadratic(&mut self, i: usize, j: usize, value: f64) {
        self.quadratic.push((i.min(j), i.max(j), value));
    }

    fn equal(&mut self, terms: Terms, right: f64) {
        self.equations.push((terms, right));
    }

    fn at_most(&mut self, terms: Terms, right: f64) {
        self.inequalities.push((terms, right));
    }

    fn solve(self, tolerance: f64) -> Result<(clarabel::solver::DefaultSolution<f64>, f64)> {
        let n = self.cost.len();
        let p = compressed(n, n, self.quadratic.into_iter());
        let mut kinds = Vec::new();
        for (count, kind) in [
            (self.equations.len(), SupportedConeT::ZeroConeT(self.equations.len())),
            (self.inequalities.len(), SupportedConeT::NonnegativeConeT(self.inequalities.len())),
        ] {
            if count > 0 {
                kinds.push(kind);
            }
        }
        let rows: Vec<(Terms, f64)> = self.equations.into_iter().chain(self.inequalities).collect();
        let b: Vec<f64> = rows.iter().map(|(_, right)| *right).collect();
        let entries = rows.iter().enumerate().flat_map(|(i, (terms, _))| terms.iter().map(move |&(j, v)| (i, j, v)));
        let a = compressed(rows.len(), n, entries);
        let settings = DefaultSettings {
            verbose: false,
            max_threads: 1,
            // Optimal values are about one by our scaling, up to a constant that Clarabel does not see: only its
            // absolute gap means what we want.
            tol_gap_abs: tolerance,
            tol_gap_rel: f64::MIN_POSITIVE,
            tol_feas: tolerance,
            // What is merely inaccurate must still be of use.
            reduced_tol_gap_abs: (1e3 * tolerance).min(1e-4),
            reduced_tol_gap_rel: f64::MIN_POSITIVE,
            reduced_tol_feas: (1e3 * tolerance).min(1e-4),
            ..DefaultSettings::default()
        };
        let start = Instant::now();
        let mut solver = DefaultSolver::new(&p, &self.cost, &a, &b, &kinds, settings)
            .map_err(|e| Error::unsupported("this row problem", format!("the conic solver refused it: {e}")))?;
        solver.solve();
        Ok((solver.solution, start.elapsed().as_secs_f64()))
    }
}

/// Column-compressed from entries in any order; entries of one place are added.
fn compressed(rows: usize, columns: usize, entries: impl Iterator<Item = (usize, usize, f64)>) -> CscMatrix<f64> {
    let mut lists: Vec<Vec<(usize, f64)>> = vec![Vec::new(); columns];
    for (i, j, value) in entries {
        lists[j].push((i, value));
    }
    let (mut starts, mut indices, mut values) = (vec![0], Vec::new(), Vec::new());
    for list in &mut lists {
        list.sort_by_key(|(i, _)| *i);
        let first = indices.len();
        for &(i, value) in list.iter() {
            if indices.len() > first && indices.last() == Some(&i) {
                if let Some(last) = values.last_mut() {
                    *last += value;
                }
            } else {
                indices.push(i);
                values.push(value);
            }
        }
        starts.push(indices.len());
    }
    CscMatrix::new(rows, columns, starts, indices, values)
}
