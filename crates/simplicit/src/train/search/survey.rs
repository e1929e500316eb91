//! Estimates how many non-zeros every group keeps at which price, from a few rows of each: this gives the price for a
//! target without fitting a model.
//!
//! The rows of different groups are linked only by the states that they read. So on the baseline's states the curve
//! of every group can be computed at once: some rows, each at all prices, side by side with one ladder of inverses. A
//! factor on the row weights of a layer shifts its curve along the prices and changes nothing else.

use crate::problem::RowProblem;
use crate::random::Random;
use crate::solver::Design;
use crate::train::key::Pricing;

/// Expected non-zeros of every group.
#[derive(Debug, Clone)]
pub(in crate::train) struct Survey {
    /// Logarithms of the prices, ascending.
    prices: Vec<f64>,
    /// Expected non-zeros at every price, by group in the order of the plan.
    counts: Vec<Vec<f64>>,
}

impl Survey {
    /// A survey without groups, at these prices in ascending order.
    pub(in crate::train) fn new(prices: &[f64]) -> Self {
        Self { prices: prices.iter().map(|p| p.ln()).collect(), counts: Vec::new() }
    }

    /// Adds a group, with its counts at every price.
    pub(in crate::train) fn push(&mut self, counts: Vec<f64>) {
        self.counts.push(counts);
    }

    /// Between two prices the count is linear in the logarithm; beyond the ends it is that of the end.
    fn count(&self, group: usize, log_price: f64) -> f64 {
        let (prices, counts) = (&self.prices, &self.counts[group]);
        let right = prices.partition_point(|p| *p < log_price);
        if right == 0 || right == prices.len() {
            return counts[right.min(prices.len() - 1)];
        }
        let share = (log_price - prices[right - 1]) / (prices[right] - prices[right - 1]);
        counts[right - 1] + share * (counts[right] - counts[right - 1])
    }

    /// Non-zeros of all groups from `first` on at a price, if the row weights of group g have grown by the factor
    /// e^shift(g).
    fn total(&self, first: usize, log_price: f64, shifts: &[f64]) -> f64 {
        (first..self.counts.len()).map(|g| self.count(g, log_price - shifts[g])).sum()
    }

    /// The middle one of the prices.
    pub(in crate::train) fn middle(&self) -> f64 {
        self.prices[self.prices.len() / 2].exp()
    }

    /// Whether the surveyed prices leave more than `wanted` non-zeros at one end and less at the other.
    pub(in crate::train) fn brackets(&self, wanted: f64) -> std::cmp::Ordering {
        let none = vec![0.0; self.counts.len()];
        let (first, last) = (self.prices[0], self.prices[self.prices.len() - 1]);
        if self.total(0, first, &none) <= wanted {
            std::cmp::Ordering::Less
        } else if self.total(0, last, &none) >= wanted {
            std::cmp::Ordering::Greater
        } else {
            std::cmp::Ordering::Equal
        }
    }

    /// The price that leaves about `wanted` non-zeros, and how many fewer are left there per unit of its logarithm.
    pub(in crate::train) fn price(&self, wanted: f64, shifts: &[f64]) -> (f64, f64) {
        self.price_from(0, wanted, shifts)
    }

    /// The same for the groups from `first` on.
    fn price_from(&self, first: usize, wanted: f64, shifts: &[f64]) -> (f64, f64) {
        let reach = shifts.iter().fold((0.0f64, 0.0f64), |(low, high), s| (low.min(*s), high.max(*s)));
        let (mut low, mut high) = (self.prices[0] + reach.0, self.prices[self.prices.len() - 1] + reach.1);
        for _ in 0..60 {
            let middle = f64::midpoint(low, high);
            if self.total(first, middle, shifts) > wanted {
                low = middle;
            } else {
                high = middle;
            }
        }
        let at = f64::midpoint(low, high);
        const STEP: f64 = 0.25;
        let fall = self.total(first, at - STEP, shifts) - self.total(first, at + STEP, shifts);
        (at.exp(), fall / (2.0 * STEP))
    }

    /// Scales every group's curve so that it agrees with the counts at a price.
    pub(in crate::train) fn calibrate(&mut self, price: f64, counted: &[usize]) {
        counted.iter().enumerate().for_each(|(group, &counted)| self.scale(group, price.ln(), counted));
    }

    /// Scales one group's curve.
    fn scale(&mut self, group: usize, log_price: f64, counted: usize) {
        let expected = self.count(group, log_price);
        if expected > 0.0 && counted > 0 {
            self.counts[group].iter_mut().for_each(|c| *c *= counted as f64 / expected);
        }
    }
}

/// Prices of the groups of one model while it is being solved, group after group. Where the groups solved so far kept
/// more non-zeros than expected, the groups still to come get a higher price, otherwise a lower one. The model then
/// reaches its target, where one price for all would need another model as a correction. Prices stay close to the
/// common one, where the best allocation over layers changes little.
#[derive(Debug, Clone)]
pub(in crate::train) struct Steering {
    survey: Survey,
    shifts: Vec<f64>,
    /// Logarithm of every group's price divided by the common one.
    factors: Vec<f64>,
    /// The largest factor by which prices may differ from those if all groups were as expected.
    reach: f64,
    /// Wanted non-zeros of all groups, and by how many a model may miss that number.
    wanted: f64,
    slack: f64,
    /// The price of all groups, before their factors, if all groups were as expected.
    common: f64,
    /// Price and non-zeros of the groups that are already solved.
    behind: Vec<(f64, usize)>,
    /// Expected non-zeros of the groups that are already solved, at their prices.
    expected: f64,
}

/// The largest factor between a group's price and the common one.
const STEERED: f64 = 1.5;
/// The same factor for a group that is solved again because the groups still to come cannot make up for the non-zeros
/// that it kept.
const CORRECTED: f64 = 2.25;
/// Non-zeros, as a share of all, that are taken to be as expected before the first group is solved: the larger the share, the
/// less the first groups move the prices of the others.
const CONFIDENCE: f64 = 0.25;

impl Steering {
    /// For `wanted` non-zeros of all groups, within `slack`, if the row weights of group g have grown by the factor
    /// e^shift(g).
    pub(in crate::train) fn new(survey: Survey, shifts: Vec<f64>, wanted: f64, slack: f64) -> Self {
        let (common, _) = survey.price(wanted, &shifts);
        let factors = vec![0.0; shifts.len()];
        Self { survey, shifts, factors, reach: STEERED, wanted, slack, common, behind: Vec::new(), expected: 0.0 }
    }

    /// The same non-zeros with other factors on the prices, given as logarithms.
    pub(in crate::train) fn allotted(&self, factors: Vec<f64>) -> Self {
        let mut out = Self { factors, behind: Vec::new(), expected: 0.0, ..self.clone() };
        out.common = out.survey.price(out.wanted, &out.moved()).0;
        out
    }

    /// Prices that do not follow what groups keep: the given common price times every group's factor.
    pub(in crate::train) fn held(&self, common: f64) -> Self {
        Self { reach: 1.0, common, behind: Vec::new(), expected: 0.0, ..self.clone() }
    }

    /// Other prices for some groups; those of all others stay as they are.
    pub(in crate::train) fn with(&self, groups: &[usize], log_factor: f64) -> Self {
        let mut out = self.clone();
        groups.iter().for_each(|&g| out.factors[g] += log_factor);
        out
    }

    /// Logarithm of every group's price divided by the common one.
    pub(in crate::train) fn factors(&self) -> &[f64] {
        &self.factors
    }

    /// Whether groups have prices of their own.
    pub(in crate::train) fn is_allotted(&self) -> bool {
        self.factors.iter().any(|f| *f != 0.0)
    }

    /// How these prices are determined.
    pub(in crate::train) fn kind(&self) -> Pricing {
        if self.reach > 1.0 { Pricing::Steered } else { Pricing::Held }
    }

    /// Scales every group's curve so that it agrees with the counts at this common price.
    pub(in crate::train) fn calibrate(&mut self, common: f64, counted: &[usize]) {
        for (group, &counted) in counted.iter().enumerate() {
            self.survey.scale(group, common.ln() + self.factors[group] - self.shifts[group], counted);
        }
    }

    /// The distance of the common price from each group's own on its curve.
    fn moved(&self) -> Vec<f64> {
        self.shifts.iter().zip(&self.factors).map(|(shift, factor)| shift - factor).collect()
    }

    /// The price of all groups, before their factors, if all groups were as expected.
    pub(in crate::train) fn common(&self) -> f64 {
        self.common
    }

    /// The price of the next group.
    pub(in crate::train) fn price(&self) -> f64 {
        let left = ((self.wanted - self.counted()) / self.ratio()).max(1.0);
        let group = self.behind.len();
        let (price, _) = self.survey.price_from(group, left, &self.moved());
        price.clamp(self.common / self.reach, self.common * self.reach) * self.factors[group].exp()
    }

    /// The price at which to solve the next group again, after `tried` (price and non-zeros of every attempt, the
    /// last one being what it has now); `None` if the groups still to come can make up for the non-zeros that it kept
    /// within their range of prices. For a model's last large group they usually cannot, and without a correction the
    /// whole model would have to be fitted again.
    pub(in crate::train) fn corrected(&self, tried: &[(f64, usize)]) -> Option<f64> {
        let group = self.behind.len();
        let &(price, nonzeros) = tried.last().filter(|_| self.reach > 1.0)?;
        let mut with = self.clone();
        with.passed(price, nonzeros);
        let left = with.wanted - with.counted();
        let ahead = |common: f64| with.ratio() * with.survey.total(group + 1, common.ln(), &with.moved());
        let possible = left.clamp(ahead(self.common * self.reach), ahead(self.common / self.reach));
        let missing = left - possible;
        if missing.abs() <= self.slack || nonzeros == 0 {
            return None;
        }
        // The group's curve, scaled so that it agrees with the last attempt.
        with.survey.scale(group, price.ln() - self.shifts[group], nonzeros);
        let wanted = nonzeros as f64 + missing;
        let own = self.factors[group].exp();
        let (mut low, mut high) = (own * self.common / CORRECTED, own * self.common * CORRECTED);
        for _ in 0..60 {
            let middle = (low * high).sqrt();
            let kept = with.survey.count(group, middle.ln() - self.shifts[group]);
            if kept > wanted {
                low = middle;
            } else {
                high = middle;
            }
        }
        // A price next to one that was tried already would give nearly the same rows.
        let price = (low * high).sqrt();
        tried.iter().all(|(known, _)| (price / known).ln().abs() > 1e-3).then_some(price)
    }

    /// Number of non-zeros of the groups that are already solved.
    fn counted(&self) -> f64 {
        self.behind.iter().map(|b| b.1 as f64).sum()
    }

    /// Non-zeros kept divided by non-zeros expected, for the groups that are already solved.
    fn ratio(&self) -> f64 {
        let before = CONFIDENCE * self.wanted;
        (self.counted() + before) / (self.expected + before)
    }

    /// Records how many non-zeros the next group kept at a price.
    pub(in crate::train) fn passed(&mut self, price: f64, nonzeros: usize) {
        let group = self.behind.len();
        self.expected += self.survey.count(group, price.ln() - self.shifts[group]);
        self.behind.push((price, nonzeros));
    }

    /// Starts at the first group again; every group's curve is scaled so that it agrees with what the group kept.
    pub(in crate::train) fn again(&mut self) {
        for (group, (price, counted)) in std::mem::take(&mut self.behind).into_iter().enumerate() {
            self.survey.scale(group, price.ln() - self.shifts[group], counted);
        }
        self.expected = 0.0;
        self.common = self.survey.price(self.wanted, &self.moved()).0;
    }
}

/// A weight is removed at about this share of what it would be worth alone, because its neighbours make up for the
/// rest. This is a guess; the prices of a survey lie on both sides of it.
const OWN: f64 = 0.1;

/// The worth of single weights of all groups, each as if it were alone: only the largest, as many as are needed to
/// find a price.
pub(in crate::train) struct Worth {
    /// Number of weights that should be left.
    wanted: usize,
    /// At least the `wanted + 1` largest worths, with memory for as many more.
    largest: Vec<f64>,
    count: usize,
}

impl Worth {
    /// To find a price that leaves about `wanted` weights.
    pub(in crate::train) fn new(wanted: f64) -> Self {
        let wanted = wanted.max(0.0) as usize;
        Self { wanted, largest: Vec::with_capacity(wanted.saturating_add(1).saturating_mul(2)), count: 0 }
    }

    /// For every weight that rows start from, what removing it would add to the row's mismatch if its feature were correlated
    /// with no other. Rows without a start have none. The problems are those at strength 1.
    pub(in crate::train) fn add(&mut self, design: &Design, problems: &[RowProblem]) {
        for problem in problems {
            let (Some(start), Some(weights)) = (&problem.start, &problem.weights) else { continue };
            let priced = start.iter().zip(weights).enumerate().filter(|(_, (_, w))| **w > 0.0 && w.is_finite());
            self.push(priced.map(|(j, (v, w))| problem.fit * (v * design.rms(j)).powi(2) / w));
        }
    }

    fn push(&mut self, worth: impl Iterator<Item = f64>) {
        for value in worth {
            if self.largest.len() == self.largest.capacity() {
                self.largest.select_nth_unstable_by(self.wanted, |a, b| b.total_cmp(a));
                self.largest.truncate(self.wanted + 1);
            }
            self.largest.push(value);
            self.count += 1;
        }
    }

    /// The price that leaves about as many weights as wanted; `None` without weights.
    pub(in crate::train) fn middle(mut self) -> Option<f64> {
        let kept = self.wanted.min(self.count.checked_sub(1)?);
        let (_, at, _) = self.largest.select_nth_unstable_by(kept, |a, b| b.total_cmp(a));
        Some(OWN * *at).filter(|price| *price > 0.0 && price.is_finite())
    }
}

/// Rows that represent a group, and how many rows each represents: one from each of some strata of the row weight,
/// drawn by the seed.
pub(in crate::train) fn drawn(design: &Design, problems: &[RowProblem], strata: usize, seed: u64) -> Vec<(usize, f64)> {
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
        // Four times the row weight needs four times the price.
        let shift = 4f64.ln();
        let (price, _) = survey.price(600.0, &[shift, 0.0]);
        assert!((line(1000.0, price / 4.0) + line(300.0, price) - 600.0).abs() < 1e-6, "{price}");
        survey.calibrate(1e-6, &[400, 150]);
        let (price, _) = survey.price(450.0, &[0.0, 0.0]);
        assert!((line(800.0, price) + line(300.0, price) - 450.0).abs() < 1e-6, "{price}");
    }

    #[test]
    fn groups_ahead_make_up_for_those_behind_and_a_second_pass_knows_their_curves() {
        let prices: Vec<f64> = (-4..=4).map(|k| 1e-6 * 3f64.powi(k)).collect();
        let line = |top: f64, price: f64| top * (0.5 - 0.1 * (price / 1e-6).ln());
        let (tops, factors) = ([100.0, 300.0, 1000.0, 800.0], [1.2, 1.1, 1.08, 1.1]);
        let mut survey = Survey::new(&prices);
        tops.iter().for_each(|top| survey.push(prices.iter().map(|p| line(*top, *p)).collect()));
        let shifts = [0.1, 0.0, 0.3, 0.0];
        let mut steering = Steering::new(survey, shifts.to_vec(), 900.0, 1.0);
        // Groups really keep more than the survey estimated.
        let truth = |g: usize, price: f64| factors[g] * line(tops[g], price * (-shifts[g]).exp());
        let walk = |steering: &mut Steering| {
            let mut sum = 0.0;
            for g in 0..4 {
                let price = steering.price();
                assert!((price / steering.common()).ln().abs() <= STEERED.ln() + 1e-12);
                steering.passed(price, truth(g, price) as usize);
                sum += truth(g, price);
            }
            sum
        };
        let unsteered: f64 = (0..4).map(|g| truth(g, steering.common())).sum();
        let first = walk(&mut steering);
        assert!((unsteered - 900.0).abs() > 60.0, "{unsteered}");
        assert!((first - 900.0).abs() < 0.35 * (unsteered - 900.0).abs(), "{first} beside {unsteered}");
        steering.again();
        let second = walk(&mut steering);
        assert!((second - 900.0).abs() < 5.0, "{second}");
    }

    #[test]
    fn a_group_that_those_ahead_cannot_make_up_for_is_solved_again() {
        let prices: Vec<f64> = (-4..=4).map(|k| 1e-6 * 3f64.powi(k)).collect();
        let line = |top: f64, price: f64| top * (0.5 - 0.1 * (price / 1e-6).ln());
        // The last large group keeps 15 % less than the survey estimated, and only a small one comes after it.
        let (tops, factors) = ([300.0, 1000.0, 40.0], [1.0, 0.85, 1.0]);
        let mut survey = Survey::new(&prices);
        tops.iter().for_each(|top| survey.push(prices.iter().map(|p| line(*top, *p)).collect()));
        let truth = |g: usize, price: f64| (factors[g] * line(tops[g], price)).round() as usize;
        let (wanted, slack) = (600.0, 4.0);
        let walk = |corrects: bool| {
            let mut steering = Steering::new(survey.clone(), vec![0.0; 3], wanted, slack);
            let mut again = [0; 3];
            for g in 0..3 {
                let mut price = steering.price();
                let mut tried = vec![(price, truth(g, price))];
                while let Some(other) = steering.corrected(&tried).filter(|_| corrects && again[g] < 2) {
                    (price, again[g]) = (other, again[g] + 1);
                    tried.push((price, truth(g, price)));
                }
                steering.passed(price, truth(g, price));
            }
            (steering.counted(), again)
        };
        let (plain, _) = walk(false);
        assert!((plain - wanted).abs() > 5.0 * slack, "{plain}");
        let (corrected, again) = walk(true);
        assert!((corrected - wanted).abs() <= 2.0 * slack, "{corrected}");
        assert_eq!((again[0], again[2]), (0, 0), "the small ones are left alone");
        assert!((1..=2).contains(&again[1]));
        // Prices that are held are not corrected.
        let held = Steering::new(survey.clone(), vec![0.0; 3], wanted, slack).held(1e-6);
        assert_eq!(held.corrected(&[(1e-6, 1)]), None);
    }

    #[test]
    fn the_middle_price_leaves_the_weights_that_are_worth_more() {
        let worth: Vec<f64> = (0..1000).map(|k| f64::from((k * 37) % 1000) * 1e-9).collect();
        let middle = |worth: &[f64], wanted: f64| {
            let mut largest = Worth::new(wanted);
            // Added in pieces, as groups arrive; the memory does not grow with them.
            worth.chunks(70).for_each(|part| largest.push(part.iter().copied()));
            assert!(largest.largest.capacity() <= 2 * (wanted as usize + 1));
            largest.middle()
        };
        for wanted in [0, 1, 200, 499, 998] {
            let price = middle(&worth, f64::from(wanted)).unwrap();
            assert_eq!(worth.iter().filter(|w| OWN * **w > price).count(), wanted as usize);
        }
        assert!(middle(&worth, 5000.0).is_none(), "the smallest is worth nothing");
        assert!(middle(&[], 1.0).is_none() && middle(&[2.0], 1.0) == Some(2.0 * OWN));
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
