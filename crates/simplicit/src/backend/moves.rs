//! Improves a support by single moves: entries that are not worth their price leave and entries that are worth it
//! come in, one at a time, until no single move helps.
//!
//! Splitting keeps an entry by its size, but what it costs to be without one depends on its neighbours: with
//! P = (Ĝ_SS + ridge)⁻¹ and the best weights w on S, leaving j out costs ½w_j²/P_jj, and bringing j in gains
//! ½r_j²/(Ĝ_jj − Ĝ_jS·P·Ĝ_Sj). P follows every move by a rank-one update.

use super::Quadratic;
use crate::linalg::{Cholesky, Matrix, axpy, dot};

/// Number of entries outside the support, those with the largest residuals, that are examined more closely.
const CANDIDATES: usize = 8;
/// A move must gain at least this share of a price.
const WORTH: f64 = 1e-6;
/// Every update of P adds rounding errors. Where a support has more entries than samples, P is of the size of 1 /
/// ridge, and when the surplus has left, P is a small difference of such large numbers. On the support h − (Ĝ +
/// ridge)w is zero; once it is more than this share of the largest entry of h, P is made anew.
pub(super) const DRIFT: f64 = 1e-7;
/// P is checked after at most this many removals.
const UNCHECKED: usize = 32;
/// P is made anew at most this often; a row that needs more keeps the support that it has then.
pub(super) const RENEWALS: usize = 32;

/// The upper half of Ĝ + ridge on a set of features.
pub(crate) fn fill(gram: &Matrix, set: &[usize], ridge: f64, a: &mut [f64]) {
    let k = set.len();
    for (r, &i) in set.iter().enumerate() {
        let line = gram.row(i);
        for (s, &j) in set.iter().enumerate().skip(r) {
            a[r * k + s] = line[j];
        }
        a[r * k + r] += ridge;
    }
}

/// The best weights on a support, over all features. A set that cannot be factored gets a larger ridge.
pub(crate) fn fit(quadratic: &Quadratic, h: &[f64], support: &[usize], ridge: f64) -> Vec<f64> {
    let k = support.len();
    let mut factor = Cholesky::with_capacity(k);
    let mut ridge = ridge;
    let part = match quadratic {
        Quadratic::Gram(_) => Matrix::default(),
        Quadratic::Samples(_) => quadratic.part(support, support),
    };
    let all: Vec<usize> = (0..part.rows()).collect();
    loop {
        let done = factor.factor(k, |a| match quadratic {
            Quadratic::Gram(gram) => fill(gram, support, ridge, a),
            Quadratic::Samples(_) => fill(&part, &all, ridge, a),
        });
        if done || ridge > 1.0 {
            break;
        }
        ridge = (10.0 * ridge).max(1e-12);
    }
    let mut x: Vec<f64> = support.iter().map(|&j| h[j]).collect();
    factor.solve(&mut x, 1);
    let mut out = vec![0.0; h.len()];
    support.iter().zip(x).for_each(|(&j, x)| out[j] = x);
    out
}

/// The inverse over a set that grows and shrinks.
struct Inverse {
    set: Vec<usize>,
    /// Rows of the inverse, in the order of the set.
    rows: Vec<Vec<f64>>,
    weights: Vec<f64>,
}

impl Inverse {
    fn new(gram: &Matrix, h: &[f64], set: Vec<usize>, ridge: f64) -> Option<Self> {
        let k = set.len();
        let mut factor = Cholesky::with_capacity(k);
        if !factor.factor(k, |a| fill(gram, &set, ridge, a)) {
            return None;
        }
        let inverse = factor.inverse();
        let rows: Vec<Vec<f64>> = (0..k).map(|r| inverse.row(r).to_vec()).collect();
        let h: Vec<f64> = set.iter().map(|&j| h[j]).collect();
        let weights = rows.iter().map(|r| dot(r, &h)).collect();
        Some(Self { set, rows, weights })
    }

    /// How much the cost rises if the entry at a place of the set leaves.
    fn cost(&self, at: usize) -> f64 {
        0.5 * self.weights[at] * self.weights[at] / self.rows[at][at]
    }

    fn remove(&mut self, at: usize) {
        let column = std::mem::take(&mut self.rows[at]);
        let pivot = column[at];
        let weight = self.weights[at];
        for (r, row) in self.rows.iter_mut().enumerate().filter(|(r, _)| *r != at) {
            axpy(row, -column[r] / pivot, &column);
            row.swap_remove(at);
            self.weights[r] -= weight * column[r] / pivot;
        }
        self.rows.swap_remove(at);
        self.set.swap_remove(at);
        self.weights.swap_remove(at);
    }

    /// P·g and g_j − gᵀPg for an entry j outside the set.
    fn schur(&self, gram: &Matrix, j: usize, ridge: f64) -> (Vec<f64>, f64) {
        let line = gram.row(j);
        let g: Vec<f64> = self.set.iter().map(|&i| line[i]).collect();
        let solved: Vec<f64> = self.rows.iter().map(|r| dot(r, &g)).collect();
        let schur = line[j] + ridge - dot(&solved, &g);
        (solved, schur)
    }

    fn add(&mut self, j: usize, solved: &[f64], schur: f64, residual: f64) {
        let weight = residual / schur;
        axpy(&mut self.weights, -weight, solved);
        for (row, s) in self.rows.iter_mut().zip(solved) {
            axpy(row, s / schur, solved);
            row.push(-s / schur);
        }
        self.rows.push(solved.iter().map(|s| -s / schur).chain([1.0 / schur]).collect());
        self.weights.push(weight);
        self.set.push(j);
    }
}

/// A support from which no single removal and no addition among the likeliest lowers the row's cost at these prices
/// (canonical units; infinite: never). The ball plays no part. A set whose Gram matrix cannot be factored stays as it is.
pub(super) fn settle(gram: &Matrix, h: &[f64], support: &[usize], prices: &[f64], ridge: f64) -> Vec<usize> {
    let mut set = support.to_vec();
    for _ in 0..=RENEWALS {
        let Some(inverse) = Inverse::new(gram, h, set.clone(), ridge) else { break };
        let (moved, drifted) = follow(inverse, gram, h, prices, ridge);
        let same = moved == set;
        set = moved;
        if !drifted || same {
            break;
        }
    }
    set
}

/// Makes moves as long as one inverse is accurate; also returns whether it drifted before no move was left.
fn follow(mut inverse: Inverse, gram: &Matrix, h: &[f64], prices: &[f64], ridge: f64) -> (Vec<usize>, bool) {
    let d = h.len();
    let mut inside = vec![false; d];
    inverse.set.iter().for_each(|&j| inside[j] = true);
    let mut residuals = vec![0.0; d];
    let size = h.iter().fold(0.0f64, |m, h| m.max(h.abs()));
    let (mut drifted, mut unchecked) = (false, 0);
    // Every move lowers the cost, so none is ever undone; only rounding could make them go on for ever.
    for _ in 0..3 * d {
        let gain = |at: usize| prices[inverse.set[at]] - inverse.cost(at);
        let out = (0..inverse.set.len()).map(|at| (gain(at), at)).max_by(|a, b| a.0.total_cmp(&b.0));
        let leaves = out.filter(|(gain, at)| *gain > WORTH * prices[inverse.set[*at]]);
        if let Some((_, at)) = leaves
            && unchecked < UNCHECKED
        {
            inside[inverse.set[at]] = false;
            inverse.remove(at);
            unchecked += 1;
            continue;
        }
        residuals.copy_from_slice(h);
        for (&i, w) in inverse.set.iter().zip(&inverse.weights) {
            axpy(&mut residuals, -w, gram.row(i));
        }
        let off = |at: usize| (residuals[inverse.set[at]] - ridge * inverse.weights[at]).abs();
        // A NaN counts as drift too.
        drifted = !(0..inverse.set.len()).all(|at| off(at) <= DRIFT * size);
        if drifted {
            break;
        }
        unchecked = 0;
        if leaves.is_some() {
            continue;
        }
        let mut likely: Vec<usize> = (0..d).filter(|&j| !inside[j] && prices[j].is_finite()).collect();
        let size = |j: usize| residuals[j] * residuals[j] - 2.0 * prices[j];
        let by_size = |a: &usize, b: &usize| size(*b).total_cmp(&size(*a));
        if likely.len() > CANDIDATES {
            likely.select_nth_unstable_by(CANDIDATES - 1, by_size);
            likely.truncate(CANDIDATES);
        }
        let best = likely
            .into_iter()
            .map(|j| {
                let (solved, schur) = inverse.schur(gram, j, ridge);
                // The Schur complement is at least the ridge, unless P has lost its digits.
                drifted |= schur.is_nan() || schur < 0.5 * ridge;
                (0.5 * residuals[j] * residuals[j] / schur.max(ridge) - prices[j], j, solved, schur.max(ridge))
            })
            .max_by(|a, b| a.0.total_cmp(&b.0));
        match best {
            Some((gain, j, solved, schur)) if gain > WORTH * prices[j] && !drifted => {
                inside[j] = true;
                inverse.add(j, &solved, schur, residuals[j]);
            }
            _ => break,
        }
    }
    ((0..d).filter(|&j| inside[j]).collect(), drifted)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::linalg::gemm;
    use crate::random::Random;

    const RIDGE: f64 = 1e-5;

    #[test]
    fn no_single_removal_or_addition_is_left_that_pays() {
        let mut random = Random::new(17);
        let (m, d, rows) = (400, 24, 6);
        // Neighbouring features are similar, as taps are.
        let raw = Matrix::from_fn(m, d, |_, _| random.normal());
        let features = Matrix::from_fn(m, d, |s, j| raw[(s, j)] + 0.9 * raw[(s, j / 3 * 3)]);
        let norm = |j: usize| (0..m).map(|s| features[(s, j)].powi(2)).sum::<f64>().sqrt();
        let norms: Vec<f64> = (0..d).map(norm).collect();
        let features = Matrix::from_fn(m, d, |s, j| features[(s, j)] / norms[j]);
        let truth = Matrix::from_fn(rows, d, |_, _| random.normal() * random.uniform().powi(4));
        let mut targets = Matrix::zeros(rows, m);
        gemm(targets.as_mut_slice(), m, false, 1.0, truth.view(), features.view().t());
        targets.as_mut_slice().iter_mut().for_each(|t| *t += 2e-3 * random.normal());
        let mut gram = Matrix::zeros(d, d);
        gemm(gram.as_mut_slice(), d, false, 1.0, features.view().t(), features.view());
        let mut linear = Matrix::zeros(rows, d);
        gemm(linear.as_mut_slice(), d, false, 1.0, targets.view(), features.view());
        let mut moved = 0;
        for k in 0..rows {
            let h = linear.row(k);
            let mut prices = vec![2e-4 * crate::linalg::dot(targets.row(k), targets.row(k)); d];
            prices[3] = 0.0;
            prices[5] = f64::INFINITY;
            // The cost of a set, computed from its definition.
            let cost = |set: &[usize]| {
                let w = fit(&Quadratic::Gram(&gram), h, set, RIDGE);
                let fit: f64 = set.iter().map(|&j| -0.5 * w[j] * h[j]).sum();
                fit + set.iter().map(|&j| prices[j]).sum::<f64>()
            };
            let start: Vec<usize> = (0..d).filter(|j| *j != 5 && (j % 2 == 0 || *j == 3)).collect();
            let settled = settle(&gram, h, &start, &prices, RIDGE);
            let value = cost(&settled);
            assert!(value <= cost(&start), "{value}");
            moved += usize::from(settled != start);
            assert!(settled.contains(&3) && !settled.contains(&5));
            for j in (0..d).filter(|j| *j != 5) {
                let other: Vec<usize> = if settled.contains(&j) {
                    settled.iter().copied().filter(|i| *i != j).collect()
                } else {
                    settled.iter().copied().chain([j]).collect()
                };
                assert!(cost(&other) >= value - 1e-9, "row {k}: {j} should have moved, {} < {value}", cost(&other));
            }
        }
        assert!(moved > 0);
    }

    #[test]
    fn supports_of_more_entries_than_samples_come_down_to_where_no_move_pays() {
        // Features that hardly change from sample to sample, like those of a network that was never trained.
        let (m, d, rows) = (40, 160, 12);
        let mut random = Random::new(5);
        let mean: Vec<f64> = (0..d).map(|_| random.uniform()).collect();
        let mut features = Matrix::from_fn(m, d, |_, j| mean[j] + 0.1 * random.normal());
        for j in 0..d {
            let norm = (0..m).map(|s| features[(s, j)].powi(2)).sum::<f64>().sqrt();
            (0..m).for_each(|s| features[(s, j)] /= norm);
        }
        let mut gram = Matrix::zeros(d, d);
        gemm(gram.as_mut_slice(), d, false, 1.0, features.view().t(), features.view());
        let everything: Vec<usize> = (0..d).collect();
        for k in 0..rows {
            let truth: Vec<f64> = (0..d).map(|_| random.normal()).collect();
            let mut target: Vec<f64> = (0..m).map(|s| dot(features.row(s), &truth)).collect();
            let norm = dot(&target, &target).sqrt();
            target.iter_mut().for_each(|t| *t /= norm);
            let h: Vec<f64> = (0..d).map(|j| (0..m).map(|s| features[(s, j)] * target[s]).sum()).collect();
            for price in [1e-5, 1e-4] {
                let cost = |set: &[usize]| {
                    let w = fit(&Quadratic::Gram(&gram), &h, set, RIDGE);
                    set.iter().map(|&j| price - 0.5 * w[j] * h[j]).sum::<f64>()
                };
                let settled = settle(&gram, &h, &everything, &vec![price; d], RIDGE);
                let value = cost(&settled);
                assert!(settled.len() <= m && value < cost(&everything), "row {k}: {} entries", settled.len());
                let w = fit(&Quadratic::Gram(&gram), &h, &settled, RIDGE);
                let residual = |j: usize| (h[j] - dot(gram.row(j), &w)).abs();
                let mut outside: Vec<usize> = (0..d).filter(|j| !settled.contains(j)).collect();
                outside.sort_by(|a, b| residual(*b).total_cmp(&residual(*a)));
                for &j in settled.iter().chain(&outside[..CANDIDATES]) {
                    let mut other: Vec<usize> = settled.iter().copied().filter(|i| *i != j).collect();
                    if other.len() == settled.len() {
                        other.push(j);
                    }
                    assert!(cost(&other) >= value - 1e-3 * price, "row {k}: {j} should have moved at {price}");
                }
            }
        }
    }
}
