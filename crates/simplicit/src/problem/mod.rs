//! The problem that is solved: one convex problem per row of M = (A B; C D).
//!
//! With features Ũ (d × m) and the row's target z,
//!
//! <div><math display="block">
//! <mrow><munder><mo>min</mo><mi>w</mi></munder><mspace width="1em"/><mfrac><mi>Λ</mi><mi>m</mi></mfrac><msup><mrow><mo>‖</mo><mi>z</mi><mo>−</mo><msup><mi>Ũ</mi><mo>⊤</mo></msup><mi>w</mi><mo>‖</mo></mrow><mn>2</mn></msup><mo>+</mo></mrow>
//! <mrow><munder><mo>∑</mo><mi>j</mi></munder><msub><mi>ω</mi><mi>j</mi></msub><mi>f</mi><mo>(</mo><msub><mi>s</mi><mi>j</mi></msub><msub><mi>w</mi><mi>j</mi></msub><mo>)</mo></mrow>
//! <mrow><mspace width="1em"/><mtext>s.t.</mtext><mspace width="1em"/><munder><mo>∑</mo><mrow><mi>j</mi><mo>∈</mo><mi>A</mi></mrow></munder><msub><mi>c</mi><mi>j</mi></msub><mo>|</mo><msub><mi>w</mi><mi>j</mi></msub><mo>|</mo><mo>≤</mo><mi>κ</mi><mo>,</mo><mspace width="1em"/></mrow>
//! <mrow><msub><mi>l</mi><mi>j</mi></msub><mo>≤</mo><msub><mi>w</mi><mi>j</mi></msub><mo>≤</mo><msub><mi>u</mi><mi>j</mi></msub></mrow>
//! </math></div>

mod connectivity;
pub mod penalty;

pub use connectivity::{Connectivity, Mask};
pub use penalty::Penalty;

use crate::{Error, Result};

/// How states and outputs are matched.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Matching {
    /// Z = AX + BU and Y = CX + DU hold exactly; where that is impossible, an error names the rows.
    Exact,
    /// The squared mismatch is penalised.
    Relaxed {
        /// λ₁, on state rows.
        states: f64,
        /// λ₂, on output rows.
        outputs: f64,
    },
}

impl Default for Matching {
    fn default() -> Self {
        Matching::Relaxed { states: 1.0, outputs: 1.0 }
    }
}

/// The coordinates in which the penalty f is applied to a weight.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Units {
    /// As stored: f(w_j).
    Stored,
    /// f(w_j · rms_j · factor) with rms_j the feature's root mean square, so that rescaling an input changes nothing.
    /// `factor` = 1/rms(z) gives the normalised problem; √λ_i, where λ_i is an output-aware weight, gives all rows
    /// the same unit.
    Rms {
        /// The factor of the row.
        factor: f64,
    },
}

/// The constraint Σ c_j|w_j| ≤ radius, over the entries with c_j > 0.
#[derive(Debug, Clone, PartialEq)]
pub struct Ball {
    /// κ.
    pub radius: f64,
    /// c_j per feature; zero for entries outside the ball.
    pub weights: Vec<f64>,
}

impl Ball {
    /// ‖a‖₁ ≤ κ on the first `states` of `features` features.
    pub fn on_states(radius: f64, states: usize, features: usize) -> Self {
        Self { radius, weights: (0..features).map(|j| f64::from(u8::from(j < states))).collect() }
    }
}

/// One row's problem over the features of a [`Design`](crate::solver::Design).
#[derive(Debug, Clone)]
pub struct RowProblem {
    /// The number of the target in the statistics.
    pub target: usize,
    /// Λ, the weight of the mean squared mismatch (the paper's λ times m); ignored in exact matching.
    pub fit: f64,
    /// Coordinates in which the penalty is applied.
    pub units: Units,
    /// ω_j per feature; absent means all ones. Infinity forbids the entry, zero leaves it unpenalised.
    pub weights: Option<Vec<f64>>,
    /// The ball that keeps the model well-posed.
    pub ball: Option<Ball>,
    /// [l_j, u_j] per feature, in stored coordinates; each interval must contain 0.
    pub bounds: Option<Vec<(f64, f64)>>,
    /// Weights to start from.
    pub start: Option<Vec<f64>>,
}

impl RowProblem {
    /// The relaxed problem of one target with weight Λ on the mean squared mismatch, without weights, ball or bounds.
    pub fn new(target: usize, fit: f64) -> Self {
        Self { target, fit, units: Units::Stored, weights: None, ball: None, bounds: None, start: None }
    }

    /// Checks everything that a solver relies on; `features` and `targets` are the numbers of the design.
    pub fn check(&self, features: usize, targets: usize) -> Result<()> {
        let name = |what: &str| format!("{what} of row {}", self.target);
        if self.target >= targets {
            return Err(Error::shape("target", format!("below {targets}"), self.target));
        }
        if !(self.fit > 0.0 && self.fit.is_finite()) {
            return Err(Error::setting(name("lambda"), "a positive number", self.fit));
        }
        if let Units::Rms { factor } = self.units
            && !(factor > 0.0 && factor.is_finite())
        {
            return Err(Error::setting(name("unit factor"), "a positive number", factor));
        }
        for (what, length) in [
            ("entry weights", self.weights.as_ref().map(Vec::len)),
            ("ball weights", self.ball.as_ref().map(|b| b.weights.len())),
            ("bounds", self.bounds.as_ref().map(Vec::len)),
            ("start", self.start.as_ref().map(Vec::len)),
        ] {
            if let Some(length) = length
                && length != features
            {
                return Err(Error::shape(name(what), features, length));
            }
        }
        if let Some(w) = self.weights.iter().flatten().find(|w| w.is_nan() || **w < 0.0) {
            return Err(Error::setting(name("entry weight"), "zero or more", w));
        }
        if let Some(ball) = &self.ball {
            if !(ball.radius >= 0.0 && ball.radius.is_finite()) {
                return Err(Error::setting("kappa", "zero or a positive number", ball.radius));
            }
            if let Some(c) = ball.weights.iter().find(|c| !(**c >= 0.0 && c.is_finite())) {
                return Err(Error::setting(name("ball weight"), "zero or a positive number", c));
            }
        }
        if let Some((l, u)) = self.bounds.iter().flatten().find(|(l, u)| !(*l <= 0.0 && *u >= 0.0)) {
            return Err(Error::setting(name("bounds"), "intervals that contain 0", format!("[{l}, {u}]")));
        }
        if let Some(w) = self.start.iter().flatten().find(|w| !w.is_finite()) {
            return Err(Error::setting(name("start"), "finite weights", w));
        }
        Ok(())
    }
}
