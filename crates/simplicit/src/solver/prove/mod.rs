//! Proofs about one row with a price on every non-zero:
//!
//! <div><math display="block"><mrow>
//! <munder><mo>min</mo><mi>w</mi></munder><mspace width="1em"/><mfrac><mn>1</mn><mn>2</mn></mfrac>
//! <msup><mi>w</mi><mo>⊤</mo></msup><mi>G</mi><mi>w</mi><mo>−</mo><msup><mi>h</mi><mo>⊤</mo></msup><mi>w</mi>
//! <mo>+</mo><mfrac><mn>1</mn><mn>2</mn></mfrac><mi>e</mi><mo>+</mo>
//! <munder><mo>∑</mo><mrow><mi>j</mi><mo>:</mo><msub><mi>w</mi><mi>j</mi></msub><mo>≠</mo><mn>0</mn></mrow></munder>
//! <msub><mi>p</mi><mi>j</mi></msub>
//! </mrow></math></div>
//!
//! with G (d × d, positive definite), h and p of d entries. [`PricedRow::bound`] is the value of a convex relaxation;
//! [`PricedRow::prove`] splits the problem into cases, entries held in or out, until no case can be better than the
//! answer or the time is over. Its result is verified by [`Certificate::check`], which shares no code with the
//! search.

mod certificate;
mod diagonal;
mod incumbent;
mod interval;
mod reduced;
mod relaxation;
mod search;
#[cfg(test)]
mod tests;

use std::sync::Arc;

pub use certificate::{Case, Certificate, Evidence, Then};
pub use search::Shared;

use crate::linalg::Matrix;
use crate::parallel::Cancel;
use crate::{Error, Result};
use interval::Interval;

/// One row's problem: G, h, e and the price of every entry (0: none, ∞: the entry is forbidden).
#[derive(Debug, Clone)]
pub struct PricedRow {
    /// The matrix G, exactly symmetric.
    gram: Arc<Matrix>,
    cross: Vec<f64>,
    energy: f64,
    prices: Vec<f64>,
}

/// How long the search may take, and when an answer counts as proven.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ProveSettings {
    /// Seconds for the row, on one thread.
    pub seconds: f64,
    /// An answer counts as proven optimal if no weights cost less than (1 − this number) times its cost. Default
    /// 1e-6.
    pub tolerance: f64,
    /// Rows with more open entries than this get only an improved bound of the whole problem, without cases. Default
    /// 256.
    pub largest: usize,
    /// The most cases, to limit memory. Default 100,000.
    pub cases: usize,
}

impl Default for ProveSettings {
    fn default() -> Self {
        Self { seconds: 60.0, tolerance: 1e-6, largest: 256, cases: 100_000 }
    }
}

/// The result of the search for one answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// No weights cost less than the answer, up to the tolerance.
    Optimal,
    /// The search knows weights that cost less than the answer.
    Beaten,
    /// Neither was shown before the time was over: the optimum lies between bound and value.
    Open,
}

/// The outcome of a search.
#[derive(Debug, Clone)]
pub struct Proof {
    /// The cost of the answer that was given.
    pub value: f64,
    /// The lower bound that the certificate proves: no weights cost less than this.
    pub bound: f64,
    /// The cost of the best weights that the search has found.
    pub best: f64,
    /// The best weights that the search has found.
    pub weights: Vec<f64>,
    /// Whether the answer is optimal.
    pub verdict: Verdict,
    /// The evidence, which has been checked.
    pub certificate: Certificate,
}

impl Proof {
    /// (value − bound) / value, 0 for a row that costs nothing.
    pub fn distance(&self) -> f64 {
        distance(self.value, self.bound)
    }
}

/// (value − bound) / value, 0 for a row that costs nothing.
pub(in crate::solver) fn distance(value: f64, bound: f64) -> f64 {
    if value > 0.0 { ((value - bound) / value).clamp(0.0, 1.0) } else { 0.0 }
}

impl PricedRow {
    /// A row from its statistics. Only the upper triangle of G is read; it must be finite, with a positive diagonal.
    pub fn new(gram: Matrix, cross: Vec<f64>, energy: f64, prices: Vec<f64>) -> Result<Self> {
        let d = cross.len();
        if (gram.rows(), gram.cols()) != (d, d) {
            return Err(Error::shape(
                "Gram matrix",
                format!("{d} × {d}"),
                format!("{} × {}", gram.rows(), gram.cols()),
            ));
        }
        if prices.len() != d {
            return Err(Error::shape("prices", d, prices.len()));
        }
        if let Some(p) = prices.iter().find(|p| p.is_nan() || **p < 0.0) {
            return Err(Error::setting("price of a non-zero", "zero or a positive number", p));
        }
        if !(energy >= 0.0 && energy.is_finite()) {
            return Err(Error::setting("energy", "zero or a positive number", energy));
        }
        if gram.as_slice().iter().chain(&cross).any(|v| !v.is_finite()) || (0..d).any(|j| gram[(j, j)] <= 0.0) {
            return Err(Error::shape("Gram matrix", "finite entries and a positive diagonal", "others"));
        }
        Ok(Self { gram: Arc::new(symmetric(gram)), cross, energy, prices })
    }

    /// The same with a matrix that many rows share; it must be exactly symmetric.
    pub(super) fn over(gram: Arc<Matrix>, cross: Vec<f64>, energy: f64, prices: Vec<f64>) -> Self {
        Self { gram, cross, energy, prices }
    }

    /// The number of entries d.
    pub fn features(&self) -> usize {
        self.cross.len()
    }

    /// G_ij, read from its upper triangle.
    fn entry(&self, i: usize, j: usize) -> f64 {
        self.gram[(i.min(j), i.max(j))]
    }

    /// The cost of some weights, rounded upwards; infinite where a forbidden entry is not zero.
    pub fn value(&self, weights: &[f64]) -> f64 {
        let used: Vec<usize> = (0..self.features()).filter(|&j| weights[j] != 0.0).collect();
        let mut sum = Interval::of(self.energy).half();
        for &j in &used {
            let mut gw = Interval::of(0.0);
            for &k in &used {
                gw = gw.plus(Interval::product(self.entry(j, k), weights[k]));
            }
            let slope = gw.half().minus(Interval::of(self.cross[j]));
            sum = sum.plus(slope.times(weights[j])).plus(Interval::of(self.prices[j]));
        }
        sum.high()
    }

    /// The best lower bound of one convex relaxation, and its evidence: a certificate of a single case.
    pub fn bound(&self) -> Result<(f64, Certificate)> {
        let certificate = search::root(self);
        Ok((certificate.check(self)?, certificate))
    }

    /// Searches for a proof that `answer` is optimal, or for something better, within the settings' time.
    pub fn prove(&self, answer: &[f64], settings: &ProveSettings, cancel: &Cancel) -> Result<Proof> {
        if answer.len() != self.features() {
            return Err(Error::shape("answer", self.features(), answer.len()));
        }
        if !(settings.seconds >= 0.0 && settings.seconds.is_finite()) {
            return Err(Error::setting("seconds", "zero or a positive number", settings.seconds));
        }
        let value = self.value(answer);
        let found = search::search(self, answer, value, settings, cancel)?;
        let bound = found.certificate.check(self)?;
        let search::Found { best, weights, certificate } = found;
        Ok(Proof { value, bound, best, weights, verdict: verdict(value, bound, best, settings.tolerance), certificate })
    }

    /// Searches for the best weights and for a proof that they are: as [`PricedRow::prove`] for the answer that the
    /// search itself finds, so the verdict is never [`Verdict::Beaten`].
    pub fn solve(&self, settings: &ProveSettings, cancel: &Cancel) -> Result<Proof> {
        let free: Vec<usize> = (0..self.features()).filter(|&j| self.prices[j] == 0.0).collect();
        let start = incumbent::settle(self, free).map_or_else(|| vec![0.0; self.features()], |(_, weights)| weights);
        let mut proof = self.prove(&start, settings, cancel)?;
        proof.value = proof.best;
        if proof.verdict == Verdict::Beaten {
            proof.verdict = verdict(proof.best, proof.bound, proof.best, settings.tolerance);
        }
        Ok(proof)
    }
}

fn verdict(value: f64, bound: f64, best: f64, tolerance: f64) -> Verdict {
    let less = value - tolerance * value.abs();
    if bound >= less {
        Verdict::Optimal
    } else if best < less {
        Verdict::Beaten
    } else {
        Verdict::Open
    }
}

/// Copies the upper triangle to the lower one.
pub(super) fn symmetric(mut gram: Matrix) -> Matrix {
    for i in 0..gram.rows() {
        for j in 0..i {
            gram[(i, j)] = gram[(j, i)];
        }
    }
    gram
}
