//! Single moves on a large support. To make the whole inverse costs k³ operations and every move k², but most entries
//! of a large support are certain to stay. The doubtful entries U are those that may leave and those that may come
//! in; the other entries R of the support stay, are eliminated once (a Cholesky factor of Ĝ_RR), and single moves go
//! on in the Schur complement M = Ĝ_UU − Ĝ_UR·Ĝ_RR⁻¹·Ĝ_RU, where each costs |U|² at most and is exact.

use super::moves::{fit, settle};
use super::{Quadratic, columns};
use crate::linalg::{Cholesky, Matrix, View, dot, gemm};

/// The most entries of the support that may leave, and the most entries outside that may come in.
const LEAVING: usize = 256;
const COMING: usize = 64;

/// The results of the splitting for a row, and for all rows.
pub(super) struct Hints<'a> {
    /// The row's weights.
    pub(super) v: &'a [f32],
    /// ρ times this is the gradient of the fit outside the support, if the splitting has converged.
    pub(super) dual: &'a [f32],
    pub(super) rho: f64,
    /// The diagonal of (Ĝ + ρ'I)⁻¹. Its inverse is about the part of an entry that its neighbours cannot replace.
    pub(super) diagonal: &'a [f64],
    pub(super) diagonal_rho: f64,
}

impl Hints<'_> {
    /// About the part of Ĝ_jj that no other feature explains.
    fn own_part(&self, j: usize) -> f64 {
        (1.0 / self.diagonal[j] - self.diagonal_rho).clamp(1e-3, 1.0)
    }
}

/// The best weights (all features) on a support from which no single removal and no addition among the doubtful entries
/// lowers the row's cost. A set that cannot be factored is fitted as it is.
pub(super) fn settle_reduced(
    quadratic: &Quadratic,
    h: &[f64],
    support: &[usize],
    prices: &[f64],
    ridge: f64,
    hints: &Hints,
) -> Vec<f64> {
    let d = h.len();
    let inside = {
        let mut inside = vec![false; d];
        support.iter().for_each(|&j| inside[j] = true);
        inside
    };
    // An estimate of what leaving costs divided by what it saves, and of what coming in gains divided by what it
    // costs.
    let leaving = {
        let worth = |j: usize| f64::from(hints.v[j]).powi(2) * hints.own_part(j) / prices[j];
        let priced: Vec<usize> = support.iter().copied().filter(|&j| prices[j] > 0.0).collect();
        smallest(priced, LEAVING, worth)
    };
    let coming = {
        let gain = |j: usize| (hints.rho * f64::from(hints.dual[j])).powi(2) / (hints.own_part(j) * prices[j]);
        let outside = (0..d).filter(|&j| !inside[j] && prices[j] < f64::INFINITY).collect();
        smallest(outside, COMING, |j| -gain(j))
    };
    let mut doubtful = vec![false; d];
    leaving.iter().for_each(|&j| doubtful[j] = true);
    let rest: Vec<usize> = support.iter().copied().filter(|&j| !doubtful[j]).collect();
    let among: Vec<usize> = leaving.iter().chain(&coming).copied().collect();
    let Some(Eliminated { complement, linear, rest: eliminated }) = eliminate(quadratic, h, &rest, &among, ridge)
    else {
        return fit(quadratic, h, support, ridge);
    };
    let small_prices: Vec<f64> = among.iter().map(|&j| prices[j]).collect();
    let first: Vec<usize> = (0..leaving.len()).collect();
    let settled = settle(&complement, &linear, &first, &small_prices, ridge);
    let chosen = fit(&Quadratic::Gram(&complement), &linear, &settled, ridge);
    let mut out = vec![0.0; d];
    rest.iter().zip(eliminated.weights(&chosen, ridge)).for_each(|(&j, w)| out[j] = w);
    among.iter().zip(chosen).for_each(|(&j, w)| out[j] = w);
    out
}

/// The problem in the entries U that remains when R takes its best weights.
struct Eliminated {
    complement: Matrix,
    linear: Vec<f64>,
    rest: Rest,
}

/// The data from which the weights of R follow when those of U are known.
enum Rest {
    /// L of Ĝ_RR + ridge, Y = L⁻¹Ĝ_RU and y = L⁻¹h_R.
    Gram { factor: Cholesky, cross: Matrix, linear: Vec<f64> },
    /// The factor of K = F_R·F_Rᵀ + ridge, with the columns of R and of U and h_R. Used if there are more entries
    /// than samples.
    Samples { factor: Cholesky, own: Matrix, others: Matrix, linear: Vec<f64> },
}

fn eliminate(quadratic: &Quadratic, h: &[f64], rest: &[usize], among: &[usize], ridge: f64) -> Option<Eliminated> {
    let pick = |set: &[usize]| set.iter().map(|&j| h[j]).collect::<Vec<f64>>();
    let (r, u) = (rest.len(), among.len());
    let mut linear = pick(among);
    if let Quadratic::Samples(f) = quadratic
        && r > f.rows()
        && ridge > 0.0
    {
        // I − F_R(Ĝ_RR + ridge)⁻¹F_Rᵀ = ridge·K⁻¹.
        let m = f.rows();
        let (own, others) = (columns(f, rest), columns(f, among));
        let mut kernel = Matrix::zeros(m, m);
        gemm(kernel.as_mut_slice(), m, false, 1.0, own.view(), own.view().t());
        let factor = factored(&kernel, ridge)?;
        let own_linear = pick(rest);
        let mut image = vec![0.0; m];
        gemm(&mut image, 1, false, 1.0, own.view(), View::new(&own_linear, r, 1, 1));
        factor.solve(&mut image, 1);
        gemm(&mut linear, 1, true, -1.0, others.view().t(), View::new(&image, m, 1, 1));
        let mut solved = others.clone();
        factor.solve_lower(solved.as_mut_slice(), u);
        let mut complement = Matrix::zeros(u, u);
        gemm(complement.as_mut_slice(), u, false, ridge, solved.view().t(), solved.view());
        return Some(Eliminated {
            complement,
            linear,
            rest: Rest::Samples { factor, own, others, linear: own_linear },
        });
    }
    let factor = factored(&quadratic.part(rest, rest), ridge)?;
    let mut cross = quadratic.part(rest, among);
    factor.solve_lower(cross.as_mut_slice(), u);
    let mut own_linear = pick(rest);
    factor.solve_lower(&mut own_linear, 1);
    let mut complement = quadratic.part(among, among);
    gemm(complement.as_mut_slice(), u, true, -1.0, cross.view().t(), cross.view());
    gemm(&mut linear, 1, true, -1.0, cross.view().t(), View::new(&own_linear, r, 1, 1));
    Some(Eliminated { complement, linear, rest: Rest::Gram { factor, cross, linear: own_linear } })
}

fn factored(block: &Matrix, ridge: f64) -> Option<Cholesky> {
    let n = block.rows();
    let mut factor = Cholesky::with_capacity(n);
    let done = factor.factor(n, |a| {
        a.copy_from_slice(block.as_slice());
        (0..n).for_each(|i| a[i * n + i] += ridge);
    });
    done.then_some(factor)
}

impl Rest {
    /// (Ĝ_RR + ridge)⁻¹(h_R − Ĝ_RU·w_U).
    fn weights(self, chosen: &[f64], ridge: f64) -> Vec<f64> {
        match self {
            Self::Gram { factor, cross, mut linear } => {
                for (i, y) in linear.iter_mut().enumerate() {
                    *y -= dot(cross.row(i), chosen);
                }
                factor.solve_upper(&mut linear, 1);
                linear
            }
            Self::Samples { factor, own, others, mut linear } => {
                let (m, r) = (own.rows(), own.cols());
                let mut image: Vec<f64> = (0..m).map(|s| dot(others.row(s), chosen)).collect();
                gemm(&mut linear, 1, true, -1.0, own.view().t(), View::new(&image, m, 1, 1));
                gemm(&mut image, 1, false, 1.0, own.view(), View::new(&linear, r, 1, 1));
                factor.solve(&mut image, 1);
                gemm(&mut linear, 1, true, -1.0, own.view().t(), View::new(&image, m, 1, 1));
                linear.iter_mut().for_each(|w| *w /= ridge);
                linear
            }
        }
    }
}

/// The `count` entries with the smallest keys, in ascending order of the entry.
fn smallest(mut set: Vec<usize>, count: usize, key: impl Fn(usize) -> f64) -> Vec<usize> {
    if set.len() > count {
        let mut keys: Vec<(f64, usize)> = set.iter().map(|&j| (key(j), j)).collect();
        keys.select_nth_unstable_by(count, |a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        set = keys[..count].iter().map(|k| k.1).collect();
        set.sort_unstable();
    }
    set
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    #[test]
    fn no_doubtful_entry_is_left_whose_move_pays_and_the_weights_are_the_best() {
        const RIDGE: f64 = 1e-5;
        let (m, d) = (900, 420);
        let mut random = Random::new(5);
        let common: Vec<f64> = (0..m).map(|_| random.normal()).collect();
        let f = Matrix::from_fn(m, d, |s, _| (random.normal() + 0.5 * common[s]) / (1.25 * m as f64).sqrt());
        let mut gram = Matrix::zeros(d, d);
        gemm(gram.as_mut_slice(), d, false, 1.0, f.view().t(), f.view());
        let truth: Vec<f64> = (0..d).map(|j| if j % 4 == 3 { 0.0 } else { 0.2 + random.uniform() }).collect();
        let h: Vec<f64> = (0..d).map(|j| dot(gram.row(j), &truth)).collect();
        let mut prices = vec![0.05; d];
        prices[0] = 0.0;
        prices[3] = f64::INFINITY;
        let support: Vec<usize> = (0..d).filter(|j| j % 4 != 3 && j % 10 != 1).collect();
        let mut v = vec![0.0f32; d];
        support.iter().for_each(|&j| v[j] = truth[j] as f32);
        let residual: Vec<f64> = {
            let w: Vec<f64> = v.iter().map(|v| f64::from(*v)).collect();
            (0..d).map(|j| h[j] - dot(gram.row(j), &w)).collect()
        };
        let dual: Vec<f32> = residual.iter().map(|r| *r as f32).collect();
        let hints = Hints { v: &v, dual: &dual, rho: 1.0, diagonal: &vec![1.0; d], diagonal_rho: 0.05 };
        let cost = |w: &[f64]| {
            let set: Vec<usize> = (0..d).filter(|&j| w[j] != 0.0).collect();
            let fit: f64 = set.iter().map(|&j| -0.5 * w[j] * h[j]).sum();
            fit + set.iter().map(|&j| prices[j]).sum::<f64>()
        };
        let gram_side = Quadratic::Gram(&gram);
        let got = settle_reduced(&gram_side, &h, &support, &prices, RIDGE, &hints);
        let first = fit(&gram_side, &h, &support, RIDGE);
        assert!(cost(&got) < cost(&first) - 0.5, "{} {}", cost(&got), cost(&first));
        let set: Vec<usize> = (0..d).filter(|&j| got[j] != 0.0).collect();
        assert!(set.contains(&0) && !set.contains(&3));
        let again = fit(&gram_side, &h, &set, RIDGE);
        assert!(
            got.iter().zip(&again).all(|(a, b)| (a - b).abs() < 1e-8),
            "the weights are not the best of their support"
        );
        // A removal that pays would be among the doubtful entries of this problem.
        for &j in set.iter().filter(|j| **j != 0).step_by(7) {
            let without: Vec<usize> = set.iter().copied().filter(|i| *i != j).collect();
            assert!(cost(&fit(&gram_side, &h, &without, RIDGE)) >= cost(&got) - 1e-9, "{j}");
        }
        let other = settle_reduced(&Quadratic::Samples(&f), &h, &support, &prices, RIDGE, &hints);
        assert!(got.iter().zip(&other).all(|(a, b)| (a - b).abs() < 1e-8), "the two sides differ");
    }

    #[test]
    fn more_entries_than_samples_are_eliminated_in_the_samples() {
        let (m, d, ridge) = (40, 150, 1e-3);
        let mut random = Random::new(8);
        let f = Matrix::from_fn(m, d, |_, _| random.normal() / (m as f64).sqrt());
        let h: Vec<f64> = (0..d).map(|_| 0.1 * random.normal()).collect();
        let mut gram = Matrix::zeros(d, d);
        gemm(gram.as_mut_slice(), d, false, 1.0, f.view().t(), f.view());
        let rest: Vec<usize> = (0..d).filter(|j| j % 3 != 0).collect();
        let among: Vec<usize> = (0..d).filter(|j| j % 3 == 0).collect();
        let by = |quadratic: Quadratic| {
            let Eliminated { complement, linear, rest: left } =
                eliminate(&quadratic, &h, &rest, &among, ridge).unwrap();
            let chosen: Vec<f64> = (0..among.len()).map(|k| (k % 5) as f64 - 2.0).collect();
            let weights = left.weights(&chosen, ridge);
            [complement.into_vec(), linear, weights]
        };
        let parts = by(Quadratic::Gram(&gram)).into_iter().zip(by(Quadratic::Samples(&f)));
        for (k, (a, b)) in parts.enumerate() {
            let size = a.iter().fold(0.0f64, |m, v| m.max(v.abs()));
            assert!(a.iter().zip(&b).all(|(a, b)| (a - b).abs() < 1e-8 * size), "part {k}");
        }
    }
}
