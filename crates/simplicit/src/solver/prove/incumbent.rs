//! Finds good answers that the search must improve on: single entries leave and enter a support while that lowers the
//! cost.

use super::PricedRow;
use crate::linalg::{Cholesky, Matrix, dot};

/// Number of entries outside the support, those with the largest residuals, that are examined more closely.
const CANDIDATES: usize = 8;
/// A move must gain at least this share of the cost.
const WORTH: f64 = 1e-9;

/// The best weights on a set and their cost; `None` where the set's Gram matrix cannot be factored.
pub(super) fn on_support(row: &PricedRow, set: &[usize]) -> Option<(f64, Vec<f64>)> {
    let (_, x) = inverse(row, set)?;
    let cross: Vec<f64> = set.iter().map(|&j| row.cross[j]).collect();
    let cost = 0.5 * row.energy - 0.5 * dot(&cross, &x) + set.iter().map(|&j| row.prices[j]).sum::<f64>();
    let mut weights = vec![0.0; row.features()];
    set.iter().zip(x).for_each(|(&j, x)| weights[j] = x);
    Some((cost, weights))
}

fn inverse(row: &PricedRow, set: &[usize]) -> Option<(Matrix, Vec<f64>)> {
    let k = set.len();
    let mut factor = Cholesky::with_capacity(k);
    let filled = factor.factor(k, |a| {
        for (r, &i) in set.iter().enumerate() {
            for (s, &j) in set.iter().enumerate().skip(r) {
                a[r * k + s] = row.gram[(i, j)];
            }
        }
    });
    if !filled {
        return None;
    }
    let mut x: Vec<f64> = set.iter().map(|&j| row.cross[j]).collect();
    factor.solve(&mut x, 1);
    Some((factor.inverse(), x))
}

/// Improves a set until no single move among the likeliest helps.
pub(super) fn settle(row: &PricedRow, mut set: Vec<usize>) -> Option<(f64, Vec<f64>)> {
    let d = row.features();
    for _ in 0..2 * d {
        let (inverse, x) = inverse(row, &set)?;
        let worth = WORTH * row.energy;
        // Leaving entry `at` out costs ½x²/P_jj.
        let out = (0..set.len())
            .map(|at| (row.prices[set[at]] - 0.5 * x[at] * x[at] / inverse[(at, at)], at))
            .max_by(|a, b| a.0.total_cmp(&b.0));
        if let Some((gain, at)) = out
            && gain > worth
        {
            set.swap_remove(at);
            continue;
        }
        let mut residual = row.cross.clone();
        for (&j, x) in set.iter().zip(&x) {
            crate::linalg::axpy(&mut residual, -x, row.gram.row(j));
        }
        let mut likely: Vec<usize> = (0..d).filter(|j| row.prices[*j].is_finite() && !set.contains(j)).collect();
        let size = |j: usize| residual[j] * residual[j] / row.gram[(j, j)] - 2.0 * row.prices[j];
        likely.sort_unstable_by(|a, b| size(*b).total_cmp(&size(*a)));
        likely.truncate(CANDIDATES);
        let best = likely
            .into_iter()
            .map(|j| {
                let g: Vec<f64> = set.iter().map(|&i| row.gram[(i, j)]).collect();
                let through: f64 = (0..set.len()).map(|s| g[s] * dot(inverse.row(s), &g)).sum();
                let schur = (row.gram[(j, j)] - through).max(f64::MIN_POSITIVE);
                (0.5 * residual[j] * residual[j] / schur - row.prices[j], j)
            })
            .max_by(|a, b| a.0.total_cmp(&b.0));
        match best {
            Some((gain, j)) if gain > worth => set.push(j),
            _ => break,
        }
    }
    on_support(row, &set)
}
