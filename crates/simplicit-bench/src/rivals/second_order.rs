//! Greedy second-order pruning in the manner of OBC: in every row the weight with the smallest w²/[H⁻¹]_jj is
//! removed, the others are updated to make up for it, and this repeats until none is left. One trace per row serves
//! every budget.

use simplicit::linalg::{Cholesky, axpy};
use simplicit::parallel;
use simplicit::{Error, Result};

use super::{Budget, Layer, Normalised, Prepared, Rival};

/// Added to the unit diagonal of H, so that hundreds of downdates of its inverse stay accurate.
const DAMPING: f64 = 1e-4;
/// The working matrix is packed when this share of its rows has been removed.
const PACK: f64 = 0.2;

/// The price is the loss of a removal relative to the energy of the group.
#[derive(Debug)]
pub struct SecondOrder;

struct Seen {
    energy: f64,
    /// For every row its features in the order of their removal, each with the rise of the mean squared mismatch.
    traces: Vec<Vec<(usize, f64)>>,
}

impl Rival for SecondOrder {
    fn name(&self) -> &'static str {
        "greedy second-order (OBC)"
    }

    fn id(&self) -> &'static str {
        "second-order"
    }

    fn first_price(&self) -> f64 {
        1e-6
    }

    fn fits(&self) -> bool {
        true
    }

    fn prepare(&self, layer: &Layer) -> Result<Box<dyn Prepared>> {
        let normalised = Normalised::new(layer.statistics);
        let d = normalised.live.len();
        let mut factor = Cholesky::with_capacity(d);
        let done = factor.factor(d, |a| {
            a.copy_from_slice(normalised.gram.as_slice());
            for i in 0..d {
                a[i * d + i] += DAMPING;
            }
        });
        if !done {
            return Err(Error::shape("Gram matrix", "positive definite with damping", "one that is not"));
        }
        let inverse = factor.inverse();
        let traces = parallel::map(layer.threads, layer.weights.rows(), |k| {
            layer.cancel.check()?;
            // The removals start from the best dense row, which on the baseline's own states is the baseline's.
            let mut w = normalised.cross.row(k).to_vec();
            factor.solve(&mut w, 1);
            Ok(trace(inverse.as_slice().to_vec(), w, &normalised.live, layer.constant))
        })?;
        Ok(Box::new(Seen { energy: layer.energy().max(f64::MIN_POSITIVE), traces }))
    }
}

/// Removal order of one row; `inverse` is H⁻¹ and w = H⁻¹h, both over the features in `live`.
fn trace(mut inverse: Vec<f64>, mut w: Vec<f64>, live: &[usize], constant: Option<usize>) -> Vec<(usize, f64)> {
    let mut names: Vec<usize> = live.to_vec();
    let mut gone = vec![false; w.len()];
    let mut size = w.len();
    let mut left = size;
    let mut out = Vec::with_capacity(size);
    let mut pivot_row = vec![0.0; size];
    loop {
        let loss = |j: usize| w[j] * w[j] / inverse[j * size + j];
        let candidates = (0..size).filter(|&j| !gone[j] && Some(names[j]) != constant);
        let Some(p) = candidates.min_by(|&a, &b| loss(a).total_cmp(&loss(b))) else { return out };
        out.push((names[p], loss(p)));
        pivot_row[..size].copy_from_slice(&inverse[p * size..(p + 1) * size]);
        let pivot = pivot_row[p];
        let step = w[p] / pivot;
        axpy(&mut w, -step, &pivot_row[..size]);
        for i in (0..size).filter(|&i| !gone[i]) {
            let factor = pivot_row[i] / pivot;
            axpy(&mut inverse[i * size..(i + 1) * size], -factor, &pivot_row[..size]);
        }
        gone[p] = true;
        w[p] = 0.0;
        left -= 1;
        if (left as f64) < (1.0 - PACK) * size as f64 {
            let stay: Vec<usize> = (0..size).filter(|&j| !gone[j]).collect();
            for (a, &i) in stay.iter().enumerate() {
                for (b, &j) in stay.iter().enumerate() {
                    inverse[a * left + b] = inverse[i * size + j];
                }
            }
            inverse.truncate(left * left);
            w = stay.iter().map(|&j| w[j]).collect();
            names = stay.iter().map(|&j| names[j]).collect();
            gone = vec![false; left];
            size = left;
        }
    }
}

impl Seen {
    /// How many weights are removed from every row so that `count` stay in the group: the cheapest removal comes
    /// next, in the order that each row has fixed.
    fn removals(&self, count: usize) -> Vec<usize> {
        let mut heap: std::collections::BinaryHeap<Next> = std::collections::BinaryHeap::new();
        let mut left: usize = self.traces.iter().map(Vec::len).sum();
        let mut taken = vec![0; self.traces.len()];
        heap.extend(self.traces.iter().enumerate().filter_map(|(k, t)| Some(Next(t.first()?.1, k))));
        while left > count {
            let Some(Next(_, k)) = heap.pop() else { break };
            taken[k] += 1;
            left -= 1;
            if let Some((_, loss)) = self.traces[k].get(taken[k]) {
                heap.push(Next(*loss, k));
            }
        }
        taken
    }
}

/// The next removal of a row, ordered so that the cheapest is the greatest.
#[derive(PartialEq)]
struct Next(f64, usize);

impl Eq for Next {}

impl PartialOrd for Next {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Next {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        other.0.total_cmp(&self.0).then(other.1.cmp(&self.1))
    }
}

impl Prepared for Seen {
    fn rows(&self, layer: &Layer, budget: Budget) -> Result<Vec<Vec<f64>>> {
        let removed = match budget {
            Budget::Count(count) => self.removals(count),
            Budget::Price(most) => {
                let cheap =
                    |t: &Vec<(usize, f64)>| t.iter().take_while(|(_, loss)| *loss <= most * self.energy).count();
                self.traces.iter().map(cheap).collect()
            }
        };
        let supports: Vec<Vec<f64>> = self
            .traces
            .iter()
            .zip(removed)
            .map(|(trace, removed)| {
                let mut row = vec![0.0; layer.weights.cols()];
                trace[removed..].iter().for_each(|(j, _)| row[*j] = 1.0);
                if let Some(j) = layer.constant {
                    row[j] = 1.0;
                }
                row
            })
            .collect();
        // Each removal updates the least-squares solution, and rounding errors add up; a solve from the beginning has
        // none of them.
        layer.refit(&supports)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use simplicit::linalg::Matrix;
    use simplicit::parallel::{Cancel, Threads};
    use simplicit::random::Random;
    use simplicit::solver::Design;
    use simplicit::statistics::Statistics;

    use super::*;

    /// The loss of a support, computed from its definition: ‖z‖² − hᵀ_S H_S⁻¹ h_S.
    fn loss(n: &Normalised, k: usize, support: &[usize]) -> f64 {
        let s = support.len();
        let mut factor = Cholesky::with_capacity(s);
        assert!(factor.factor(s, |a| {
            for i in 0..s {
                for j in 0..s {
                    a[i * s + j] = n.gram[(support[i], support[j])] + if i == j { DAMPING } else { 0.0 };
                }
            }
        }));
        let mut x: Vec<f64> = support.iter().map(|&j| n.cross[(k, j)]).collect();
        let h = x.clone();
        factor.solve(&mut x, 1);
        -x.iter().zip(&h).map(|(a, b)| a * b).sum::<f64>()
    }

    #[test]
    fn every_removal_is_the_cheapest_of_all_and_costs_what_it_says() {
        let mut r = Random::new(2);
        let (m, d) = (200, 12);
        let base = Matrix::from_fn(m, d, |_, _| r.normal());
        let features = Matrix::from_fn(m, d, |i, j| base[(i, j)] + 0.6 * base[(i, (j + 1) % d)]);
        let weights = Matrix::from_fn(2, d, |_, _| r.normal());
        let targets = Matrix::from_fn(m, 2, |i, k| (0..d).map(|j| weights[(k, j)] * features[(i, j)]).sum());
        let statistics = Statistics::of(&features, &targets).unwrap();
        let n = Normalised::new(&statistics);
        let cancel = Cancel::new();
        let design = Design::new(&statistics).unwrap();
        let layer = Layer {
            statistics: &statistics,
            design: &design,
            weights,
            constant: Some(5),
            threads: Threads::one(),
            cancel: &cancel,
        };
        let mut factor = Cholesky::with_capacity(d);
        assert!(factor.factor(d, |a| {
            a.copy_from_slice(n.gram.as_slice());
            (0..d).for_each(|i| a[i * d + i] += DAMPING);
        }));
        for k in 0..2 {
            let mut w = n.cross.row(k).to_vec();
            factor.solve(&mut w, 1);
            let order = trace(factor.inverse().as_slice().to_vec(), w, &n.live, layer.constant);
            assert_eq!(order.len(), d - 1, "all but the constant");
            let mut support: Vec<usize> = (0..d).collect();
            let mut before = loss(&n, k, &support);
            for (removed, said) in order {
                let without = |j: usize| support.iter().copied().filter(|&i| i != j).collect::<Vec<_>>();
                let costs = support.iter().filter(|&&j| j != 5).map(|&j| loss(&n, k, &without(j)) - before);
                let cheapest = costs.fold(f64::INFINITY, f64::min);
                assert!((said - cheapest).abs() < 1e-7 * (1.0 + cheapest), "{said} against {cheapest}");
                support = without(removed);
                before = loss(&n, k, &support);
            }
        }
        // A count over both rows is met exactly; the constants are not part of it.
        let seen = SecondOrder.prepare(&layer).unwrap();
        for count in [0, 3, 9, 22] {
            assert_eq!(layer.count(&seen.rows(&layer, Budget::Count(count)).unwrap()), count);
        }
    }
}
