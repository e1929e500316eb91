//! How many non-zeros every group keeps at what price, from a few rows of each: the price of a target without a model.
//!
//! A group's rows depend on each other in nothing but the states they read, so on the baseline's states the curve of every
//! group can be had at once: some rows, each at all prices, side by side over one ladder of inverses. A factor on the
//! row weights of a layer moves its curve along the prices and leaves it otherwise as it is.

use crate::problem::RowProblem;
use crate::random::Random;
use crate::solver::Design;

/// Expected non-zeros of every group.
#[derive(Debug, Clone)]
pub(super) struct Survey {
    /// Logarithms of the prices, ascending.
    prices: Vec<f64>,
    /// By group, in the order of the plan, at every price.
    counts: Vec<Vec<f64>>,
}

impl Survey {
    /// Of no group yet, at these prices in ascending order.
    pub(super) fn new(prices: &[f64]) -> Self {
        Self { prices: prices.iter().map(|p| p.ln()).collect(), counts: Vec::new() }
    }

    /// One more group, with its counts at every price.
    pub(super) fn push(&mut self, counts: Vec<f64>) {
        self.counts.push(counts);
    }

    /// Between two prices by the straight line over the logarithm; beyond the ends what holds there.
    fn count(&self, group: usize, log_price: f64) -> f64 {
        let (prices, counts) = (&self.prices, &self.counts[group]);
        let right = prices.partition_point(|p| *p < log_price);
        if right == 0 || right == prices.len() {
            return counts[right.min(prices.len() - 1)];
        }
        let share = (log_price - prices[right - 1]) / (prices[right] - prices[right - 1]);
        counts[right - 1] + share * (counts[right] - counts[right - 1])
    }

    /// Non-zeros of all groups at a price, when the row weights of group g have grown by the factor e^shift(g).
    pub(super) fn total(&self, log_price: f64, shifts: &[f64]) -> f64 {
        (0..self.counts.len()).map(|g| self.count(g, log_price - shifts[g])).sum()
    }

    /// Whether the surveyed prices leave more than `wanted` non-zeros at one end and less at the other.
    pub(super) fn brackets(&self, wanted: f64) -> std::cmp::Ordering {
        let none = vec![0.0; self.counts.len()];
        let (first, last) = (self.prices[0], self.prices[self.prices.len() - 1]);
        if self.total(first, &none) <= wanted {
            std::cmp::Ordering::Less
        } else if self.total(last, &none) >= wanted {
            std::cmp::Ordering::Greater
        } else {
            std::cmp::Ordering::Equal
        }
    }

    /// The price that leaves about `wanted` non-zeros, and how many fewer a unit of its logarithm leaves there.
    pub(super) fn price(&self, wanted: f64, shifts: &[f64]) -> (f64, f64) {
        let reach = shifts.iter().fold((0.0f64, 0.0f64), |(low, high), s| (low.min(*s), high.max(*s)));
        let (mut low, mut high) = (self.prices[0] + reach.0, self.prices[self.prices.len() - 1] + reach.1);
        for _ in 0..60 {
            let middle = f64::midpoint(low, high);
            if self.total(middle, shifts) > wanted {
                low = middle;
            } else {
                high = middle;
            }
        }
        let at = f64::midpoint(low, high);
        const STEP: f64 = 0.25;
        let fall = self.total(at - STEP, shifts) - self.total(at + STEP, shifts);
        (at.exp(), fall / (2.0 * STEP))
    }

    /// Scales every group's curve so that it goes through what was counted at a price.
    pub(super) fn calibrate(&mut self, price: f64, counted: &[usize]) {
        for (group, &counted) in counted.iter().enumerate() {
            let expected = self.count(group, price.ln());
            if expected > 0.0 && counted > 0 {
                self.counts[group].iter_mut().for_each(|c| *c *= counted as f64 / expected);
            }
        }
    }
}

/// Rows that stand for all of a group, and how many each stands for: one of each of some strata of the row weight, drawn
/// by the seed.
pub(super) fn drawn(design: &Design, problems: &[RowProblem], strata: usize, seed: u64) -> Vec<(usize, f64)> {
    let rows = problems.len();
    let mut order: Vec<usize> = (0..rows).collect();
    let weight = |k: &usize| problems[*k].fit * design.target_rms(problems[*k].target).powi(2);
    order.sort_by(|a, b| weight(a).total_cmp(&weight(b)).then(a.cmp(b)));
    let strata = strata.min(rows);
    let mut random = Random::new(seed);
    (0..strata)
        .map(|s| {
            let (first, end) = (s * rows / strata, (s + 1) * rows / strata);
            (order[first + random.below(end - first)], (end - first) as f64)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prices_are_found_on_shifted_and_calibrated_curves() {
        let prices: Vec<f64> = (-4..=4).map(|k| 1e-6 * 3f64.powi(k)).collect();
        let mut survey = Survey::new(&prices);
        // Two groups whose true curves are straight lines in the logarithm.
        let line = |top: f64, price: f64| top * (0.5 - 0.1 * (price / 1e-6).ln());
        for top in [1000.0, 300.0] {
            survey.push(prices.iter().map(|p| line(top, *p)).collect());
        }
        assert_eq!(survey.brackets(600.0), std::cmp::Ordering::Equal);
        assert_eq!(survey.brackets(5.0), std::cmp::Ordering::Greater);
        assert_eq!(survey.brackets(5000.0), std::cmp::Ordering::Less);
        let (price, fall) = survey.price(600.0, &[0.0, 0.0]);
        assert!((line(1300.0, price) - 600.0).abs() < 1e-6 && (fall - 130.0).abs() < 1e-6, "{price} {fall}");
        // Four times the weight asks for four times the price.
        let shift = 4f64.ln();
        let (price, _) = survey.price(600.0, &[shift, 0.0]);
        assert!((line(1000.0, price / 4.0) + line(300.0, price) - 600.0).abs() < 1e-6, "{price}");
        survey.calibrate(1e-6, &[400, 150]);
        let (price, _) = survey.price(450.0, &[0.0, 0.0]);
        assert!((line(800.0, price) + line(300.0, price) - 450.0).abs() < 1e-6, "{price}");
    }

    #[test]
    fn every_stratum_has_a_row_and_all_rows_are_stood_for() {
        let features = crate::linalg::Matrix::from_fn(20, 3, |i, j| ((i * 7 + j * 5) % 13) as f64 - 6.0);
        let targets = crate::linalg::Matrix::from_fn(20, 100, |i, k| ((i * k) % 17) as f64);
        let statistics = crate::statistics::Statistics::of(&features, &targets).unwrap();
        let design = Design::new(&statistics).unwrap();
        let problems: Vec<RowProblem> = (0..100).map(|k| RowProblem::new(k, 1.0 + k as f64)).collect();
        let rows = drawn(&design, &problems, 32, 3);
        assert_eq!(rows, drawn(&design, &problems, 32, 3));
        assert_ne!(rows, drawn(&design, &problems, 32, 4));
        assert_eq!(rows.len(), 32);
        assert_eq!(rows.iter().map(|r| r.1).sum::<f64>(), 100.0);
        assert_eq!(drawn(&design, &problems[..7], 32, 0).len(), 7);
    }
}
