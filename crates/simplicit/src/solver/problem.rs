//! Rows for a user's own arrays: features, targets and the cost of a weight; solved, bounded, proven.

use std::sync::Arc;

use super::bound::PricedRows;
use super::prove::{self, ProveSettings, Verdict};
use super::{
    CardinalitySettings, Design, RowSolution, SolverSettings, Status, cardinality_bound, solve_cardinality, solve_rows,
};
use crate::backend::Cpu;
use crate::linalg::Matrix;
use crate::parallel::{Cancel, Threads};
use crate::problem::{Ball, Penalty, RowProblem, Units};
use crate::statistics::Statistics;
use crate::{Error, Result};

/// Targets that are to be sums of few features: for every target z the weights w that minimise
/// ‖z − Fw‖² / ‖z‖² + Σ cost(w_j · rms_j / rms(z)), features and targets having unit RMS, so that one cost serves all rows.
#[derive(Debug, Clone)]
pub struct Problem {
    statistics: Statistics,
    cost: Cost,
    ridge: f64,
    entry_weights: Option<Vec<f64>>,
    ball: Option<Ball>,
}

/// The cost of a weight.
#[derive(Debug, Clone)]
enum Cost {
    /// A price for every weight that is not zero.
    Price(f64),
    Penalty(Arc<dyn Penalty>),
}

impl Problem {
    /// Features (samples × d) and targets (samples × rows). A non-zero costs a thousandth of the target's energy
    /// unless [`price`](Self::price) or [`penalty`](Self::penalty) sets another cost.
    pub fn new(features: &Matrix, targets: &Matrix) -> Result<Self> {
        Ok(Self::of(Statistics::of(features, targets)?))
    }

    /// The problem from statistics, which replace the samples.
    pub fn of(statistics: Statistics) -> Self {
        let ridge = CardinalitySettings::default().ridge;
        Self { statistics, cost: Cost::Price(1e-3), ridge, entry_weights: None, ball: None }
    }

    /// Every non-zero costs this share of its target's energy: the rows have few weights, but the problem is not
    /// convex.
    pub fn price(self, price: f64) -> Self {
        Self { cost: Cost::Price(price), ..self }
    }

    /// A convex penalty instead of a price.
    pub fn penalty(self, penalty: impl Penalty + 'static) -> Self {
        Self { cost: Cost::Penalty(Arc::new(penalty)), ..self }
    }

    /// With a price, a small multiple of the square of every weight, relative to unit-RMS features, is added to the
    /// problem. Default 1e-5.
    pub fn ridge(self, ridge: f64) -> Self {
        Self { ridge, ..self }
    }

    /// Factors on the cost, one per feature: 0 makes a feature free, infinity forbids it.
    pub fn entry_weights(self, weights: Vec<f64>) -> Self {
        Self { entry_weights: Some(weights), ..self }
    }

    /// Adds the constraint Σ c_j|w_j| ≤ radius to every row.
    pub fn ball(self, ball: Ball) -> Self {
        Self { ball: Some(ball), ..self }
    }

    /// Solves all rows. A convex row is solved to its tolerance. A priced row is a good local optimum with its
    /// distance from a lower bound; its status is [`Status::Solved`] where the two agree. The bits are the same for
    /// any number of threads.
    pub fn solve(&self, threads: Threads, cancel: &Cancel) -> Result<Vec<RowSolution>> {
        let design = Design::new(&self.statistics)?;
        let rows: Vec<RowProblem> = (0..self.statistics.targets()).map(|target| self.row(&design, target)).collect();
        let price = match &self.cost {
            Cost::Penalty(penalty) => {
                let settings = SolverSettings::default();
                return solve_rows(&design, penalty.as_ref(), &rows, &settings, threads, cancel, |_| {});
            }
            Cost::Price(price) => *price,
        };
        let how = CardinalitySettings { ridge: self.ridge, ..CardinalitySettings::default() };
        let answers = solve_cardinality(&design, &rows, price, &how, &Cpu, threads, cancel, |_| {})?;
        let bounds = cardinality_bound(&design, &rows, &answers, price, &how, None, threads, cancel, |_| {})?;
        let solution = |(weights, b): (Vec<f64>, super::CardinalityBound)| priced(weights, b.value, b.bound, b.proven);
        Ok(answers.into_iter().zip(bounds).map(solution).collect())
    }

    /// Searches for at most `seconds` seconds, on one thread, for a proof that `answer` is the best row of its
    /// target, or for a better row. Returns the best known row; its status is [`Status::Solved`] if it is proven
    /// optimal. Only for priced rows.
    pub fn prove(&self, target: usize, answer: &RowSolution, seconds: f64, cancel: &Cancel) -> Result<RowSolution> {
        let Cost::Price(price) = self.cost else {
            return Err(Error::unsupported("a proof of a convex row", "its gap is one: see RowSolution::gap"));
        };
        if self.ball.is_some() {
            return Err(Error::unsupported("a proof of a row in a ball", "leave the ball out"));
        }
        let design = Design::new(&self.statistics)?;
        let rows = PricedRows::new(&design, price, self.ridge)?;
        let problem = self.row(&design, target);
        let Some((row, start)) = rows.row(&problem, &answer.weights)? else {
            return Ok(priced(answer.weights.clone(), 0.0, 0.0, true));
        };
        let settings = ProveSettings { seconds, ..ProveSettings::default() };
        let proof = row.prove(&start, &settings, cancel)?;
        let (weights, value) = match proof.verdict {
            Verdict::Beaten => (rows.stored(&problem, &proof.weights)?, proof.best),
            Verdict::Optimal | Verdict::Open => (answer.weights.clone(), proof.value),
        };
        let scale = rows.value_scale(&problem)?;
        let proven = proof.bound >= value - settings.tolerance * value;
        Ok(priced(weights, value * scale, proof.bound.max(0.0) * scale, proven))
    }

    fn row(&self, design: &Design, target: usize) -> RowProblem {
        let rms = if target < design.targets() { design.target_rms(target) } else { 0.0 };
        let mut row = RowProblem::new(target, 1.0);
        if rms > 0.0 {
            row.fit = 1.0 / (rms * rms);
            row.units = Units::Rms { factor: 1.0 / rms };
        }
        row.weights = self.entry_weights.clone();
        row.ball = self.ball.clone();
        row
    }
}

/// A priced row and its lower bound as a solution: the gap is the largest possible distance from the optimum.
fn priced(weights: Vec<f64>, value: f64, bound: f64, proven: bool) -> RowSolution {
    RowSolution {
        weights,
        primal: value,
        gap: (value - bound).max(0.0),
        relative_gap: prove::distance(value, bound),
        splitting_steps: 0,
        newton_steps: 0,
        status: if proven { Status::Solved } else { Status::Limit },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::problem::penalty::L1;
    use crate::random::Random;

    /// Six similar features, and one target that is a sum of two of them and noise.
    fn arrays() -> (Matrix, Matrix) {
        let mut random = Random::new(3);
        let common: Vec<f64> = (0..200).map(|_| random.normal()).collect();
        let features = Matrix::from_fn(200, 6, |s, j| (random.normal() + 0.8 * common[s]) * (1.0 + j as f64));
        let target = Matrix::from_fn(200, 1, |s, _| features[(s, 1)] - 0.5 * features[(s, 4)] + 0.3 * random.normal());
        (features, target)
    }

    /// ‖z − Fw‖²/‖z‖² + price·non-zeros + ridge·Σ(w·rms)²/rms(z)², from the samples.
    fn cost(features: &Matrix, target: &Matrix, w: &[f64], price: f64, ridge: f64) -> f64 {
        let (m, d) = (features.rows(), features.cols());
        let (mut off, mut energy) = (0.0, 0.0);
        for s in 0..m {
            let sum: f64 = (0..d).map(|j| features[(s, j)] * w[j]).sum();
            off += (target[(s, 0)] - sum).powi(2);
            energy += target[(s, 0)].powi(2);
        }
        let squares: f64 = (0..d).map(|j| w[j] * w[j] * (0..m).map(|s| features[(s, j)].powi(2)).sum::<f64>()).sum();
        (off + ridge * squares) / energy + price * w.iter().filter(|w| **w != 0.0).count() as f64
    }

    #[test]
    fn priced_rows_cost_what_they_say_and_are_proven() {
        let (features, target) = arrays();
        let (price, ridge, cancel) = (2e-3, 1e-3, Cancel::new());
        let problem = Problem::new(&features, &target).unwrap().price(price).ridge(ridge);
        let solved = problem.solve(Threads::one(), &cancel).unwrap();
        let again = cost(&features, &target, &solved[0].weights, price, ridge);
        assert!((solved[0].primal / again - 1.0).abs() < 1e-9, "{} {again}", solved[0].primal);
        let proven = problem.prove(0, &solved[0], 5.0, &cancel).unwrap();
        assert_eq!(proven.status, Status::Solved);
        assert!(proven.relative_gap <= 1e-6 && proven.primal <= solved[0].primal * (1.0 + 1e-12));
        // A better row is found than a wrong answer, and it is the same optimum in the coordinates of the arrays.
        let wrong = RowSolution { weights: vec![0.0; 6], ..solved[0].clone() };
        let better = problem.prove(0, &wrong, 5.0, &cancel).unwrap();
        let again = cost(&features, &target, &better.weights, price, ridge);
        assert!((better.primal / again - 1.0).abs() < 1e-9);
        assert!((better.primal / proven.primal - 1.0).abs() < 1e-5, "{} {}", better.primal, proven.primal);
    }

    #[test]
    fn convex_rows_are_solved_and_features_can_be_forbidden() {
        let (features, target) = arrays();
        let cancel = Cancel::new();
        let forbidden = vec![1.0, f64::INFINITY, 1.0, 1.0, 1.0, 1.0];
        let problem = Problem::new(&features, &target).unwrap().penalty(L1::new(0.01).unwrap());
        let free = problem.solve(Threads::one(), &cancel).unwrap();
        let held = problem.clone().entry_weights(forbidden).solve(Threads::one(), &cancel).unwrap();
        assert!(free[0].status == Status::Solved && free[0].relative_gap <= 1e-6);
        assert!(free[0].weights[1] != 0.0 && held[0].weights[1] == 0.0 && held[0].primal > free[0].primal);
        let refused = problem.prove(0, &free[0], 1.0, &cancel).unwrap_err().to_string();
        assert!(refused.contains("convex"), "{refused}");
    }

    #[test]
    fn wrong_arrays_are_errors() {
        let (features, target) = arrays();
        assert!(Problem::new(&features, &Matrix::zeros(7, 1)).is_err());
        let problem = Problem::new(&features, &target).unwrap().price(f64::NAN);
        assert!(problem.solve(Threads::one(), &Cancel::new()).is_err());
        let problem = Problem::new(&features, &target).unwrap().entry_weights(vec![1.0]);
        assert!(problem.solve(Threads::one(), &Cancel::new()).is_err());
    }
}
