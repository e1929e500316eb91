//! The parts of a proof, and the checker that verifies it from the row's statistics alone.
//!
//! The checker shares no arithmetic with the search: sums are intervals whose ends are rounded outwards after every
//! operation, and G − diag(δ) ⪰ 0 is shown by a plain Cholesky factorisation with its rounding bounded.

use std::sync::Arc;

use super::PricedRow;
use super::interval::Interval;
use crate::{Error, Result};

/// A tree of cases that together cover every choice of non-zeros, each with the evidence for its lower bound.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Certificate {
    /// Diagonals δ, an entry per feature: positive on a set of features on which G − diag(δ) ⪰ 0, zero elsewhere.
    pub diagonals: Vec<Arc<Vec<f64>>>,
    /// The cases; the first is the whole problem.
    pub cases: Vec<Case>,
}

/// One case, in which the cases above it have fixed some entries as in or out.
#[derive(Debug, Clone, PartialEq)]
pub struct Case {
    /// The evidence; a case without evidence has the bound of the case above it.
    pub evidence: Option<Evidence>,
    /// How the case continues.
    pub then: Then,
}

/// The data from which the bound of a case follows.
#[derive(Debug, Clone, PartialEq)]
pub struct Evidence {
    /// The number of the diagonal in the certificate.
    pub diagonal: usize,
    /// The point y of the dual bound, an entry per feature.
    pub point: Vec<f64>,
    /// Entries that are fixed as in (true) or out from here on: the same evidence shows that with the opposite choice
    /// nothing is better than the bound of the whole proof.
    pub fixed: Vec<(usize, bool)>,
}

/// How a case continues.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Then {
    /// It ends here; its bound is that of its evidence.
    Ends,
    /// Two cases together cover it.
    Splits {
        /// The entry that one case holds out and the other holds in.
        entry: usize,
        /// The case without it.
        without: usize,
        /// The case with it.
        with: usize,
    },
}

/// The state of an entry in a case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// May be zero or not.
    Open,
    /// Pays its price and may have any weight.
    In,
    /// Is zero.
    Out,
}

impl PricedRow {
    /// The states of all entries before any choice: those without a price are in, forbidden ones are out.
    pub(super) fn places(&self) -> Vec<Place> {
        let place = |p: &f64| match *p {
            0.0 => Place::In,
            p if p.is_infinite() => Place::Out,
            _ => Place::Open,
        };
        self.prices.iter().map(place).collect()
    }
}

impl Certificate {
    /// The lower bound that this certificate proves for the row, in the row's units. An error says where the proof is
    /// wrong.
    pub fn check(&self, row: &PricedRow) -> Result<f64> {
        let bad = |what: &str, got: String| Error::shape(format!("certificate: {what}"), "a proof", got);
        let mut domains = Vec::with_capacity(self.diagonals.len());
        for (k, delta) in self.diagonals.iter().enumerate() {
            if delta.len() != row.features() {
                return Err(bad("diagonal", format!("{} entries in diagonal {k}", delta.len())));
            }
            let domain: Vec<usize> = (0..delta.len()).filter(|&j| delta[j] > 0.0).collect();
            if delta.iter().any(|d| !(*d >= 0.0 && d.is_finite())) || !is_below(row, &domain, delta) {
                return Err(bad("diagonal", format!("G − diag(δ) not shown to be semidefinite for diagonal {k}")));
            }
            domains.push(domain);
        }
        let mut lowest = f64::INFINITY;
        let mut seen = vec![false; self.cases.len()];
        let mut open = vec![(0, row.places(), f64::NEG_INFINITY)];
        while let Some((at, mut places, above)) = open.pop() {
            let Some(case) = self.cases.get(at) else { return Err(bad("case", format!("no case {at}"))) };
            if std::mem::replace(&mut seen[at], true) {
                return Err(bad("case", format!("case {at} in two places")));
            }
            let mut bound = above;
            if let Some(evidence) = &case.evidence {
                let Some(delta) = self.diagonals.get(evidence.diagonal) else {
                    return Err(bad("case", format!("no diagonal {} in case {at}", evidence.diagonal)));
                };
                if evidence.point.len() != row.features() || evidence.point.iter().any(|y| !y.is_finite()) {
                    return Err(bad("case", format!("point of case {at}")));
                }
                if let Some(j) = (0..places.len()).find(|&j| places[j] != Place::Out && delta[j] <= 0.0) {
                    return Err(bad("case", format!("entry {j} of case {at} outside of its diagonal")));
                }
                let terms = Terms::of(row, &places, delta, &evidence.point);
                bound = bound.max(terms.bound());
                for &(j, inside) in &evidence.fixed {
                    if places.get(j) != Some(&Place::Open) {
                        return Err(bad("case", format!("entry {j} fixed in case {at} is not open")));
                    }
                    lowest = lowest.min(terms.bound_without(j, inside).max(above));
                }
                for &(j, inside) in &evidence.fixed {
                    places[j] = if inside { Place::In } else { Place::Out };
                }
            }
            match case.then {
                Then::Ends => lowest = lowest.min(bound),
                Then::Splits { entry, without, with } => {
                    if places.get(entry) != Some(&Place::Open) {
                        return Err(bad("case", format!("entry {entry} of case {at} is not open")));
                    }
                    let mut other = places.clone();
                    places[entry] = Place::Out;
                    other[entry] = Place::In;
                    open.push((without, places, bound));
                    open.push((with, other, bound));
                }
            }
        }
        Ok(lowest)
    }
}

/// The dual bound of a case at one point: a sum, and what each open entry takes from it.
pub(super) struct Terms {
    /// The sum of everything except the open entries.
    base: Interval,
    /// g²/2δ − p of every open entry, `None` elsewhere.
    excess: Vec<Option<Interval>>,
}

impl Terms {
    /// ½e − ½yᵀQy + Σ_in (p − g²/2δ) and the excesses, with g = h − Qy over the entries that are not out.
    pub(super) fn of(row: &PricedRow, places: &[Place], delta: &[f64], point: &[f64]) -> Self {
        let set: Vec<usize> = (0..places.len()).filter(|&j| places[j] != Place::Out).collect();
        let mut base = Interval::of(row.energy).half();
        let mut excess = vec![None; places.len()];
        for &j in &set {
            // (Qy)_j; the upper triangle of G defines the problem.
            let mut qy = Interval::product(-delta[j], point[j]);
            for &k in &set {
                if point[k] != 0.0 {
                    qy = qy.plus(Interval::product(row.entry(j, k), point[k]));
                }
            }
            if point[j] != 0.0 {
                base = base.minus(qy.times(point[j]).half());
            }
            let g = Interval::of(row.cross[j]).minus(qy);
            let term = g.square().half().over(delta[j]).minus(Interval::of(row.prices[j]));
            match places[j] {
                Place::In => base = base.minus(term),
                _ => excess[j] = Some(term),
            }
        }
        Self { base, excess }
    }

    /// The lower bound of the case.
    pub(super) fn bound(&self) -> f64 {
        self.sum(None)
    }

    /// The lower bound of the case with open entry j in the opposite state: out if it is fixed as in, in if it is
    /// fixed as out.
    fn bound_without(&self, j: usize, fixed_in: bool) -> f64 {
        self.sum(Some((j, fixed_in)))
    }

    fn sum(&self, other: Option<(usize, bool)>) -> f64 {
        let mut sum = self.base;
        for (j, excess) in self.excess.iter().enumerate() {
            let Some(excess) = excess else { continue };
            sum = match other {
                // Out: the entry is zero and its excess is not subtracted. In: it pays its price, however strong its
                // pull.
                Some((k, true)) if k == j => sum,
                Some((k, false)) if k == j => sum.minus(*excess),
                _ => sum.minus(excess.at_least_zero()),
            };
        }
        sum.low()
    }
}

/// Whether G − diag(δ) ⪰ 0 on a set, by a plain Cholesky factorisation of it minus a shift that exceeds the rounding.
fn is_below(row: &PricedRow, set: &[usize], delta: &[f64]) -> bool {
    let n = set.len();
    let trace: f64 = set.iter().map(|&j| row.entry(j, j).abs()).sum();
    let shift = 3.0 * (n as f64 + 4.0) * f64::EPSILON * trace;
    let mut lower: Vec<Vec<f64>> = Vec::with_capacity(n);
    for (r, &i) in set.iter().enumerate() {
        let mut line = Vec::with_capacity(r + 1);
        for (s, &j) in set[..=r].iter().enumerate() {
            let mut sum = row.entry(i, j);
            if r == s {
                sum = sum - delta[i] - shift;
                for l in &line {
                    sum -= l * l;
                }
                if sum.is_nan() || sum <= 0.0 {
                    return false;
                }
                line.push(sum.sqrt());
            } else {
                let above: &Vec<f64> = &lower[s];
                for (a, b) in line.iter().zip(above) {
                    sum -= a * b;
                }
                line.push(sum / above[s]);
            }
        }
        lower.push(line);
    }
    true
}
