//! Bounds on every pre-activation, by interval arithmetic over a range of inputs.

use super::well_posedness::local_contractions;
use super::{ImplicitModel, components};
use crate::layout::Activation;
use crate::{Error, Result};

/// The most sweeps over a cycle: the result of each is valid, and further sweeps make it tighter.
const SWEEPS: usize = 100;

/// An interval [low, high].
pub(super) type Interval = (f64, f64);

impl ImplicitModel {
    /// z_i ∈ [low_i, high_i] at the equilibrium of every input with u_j in `inputs[j]` (which may be infinite), one
    /// per state. Cycles start from the interval that their contraction proves, or from all numbers where it proves
    /// none.
    pub fn state_bounds(&self, inputs: &[(f64, f64)]) -> Result<Vec<(f64, f64)>> {
        self.require_no_taps("bounds of the states")?;
        let shape = self.shape();
        require_ranges(inputs, shape.inputs)?;
        let parts = components(self.a());
        let local = local_contractions(self.a(), &parts);
        let activations = self.layout().activations();
        let mut x: Vec<Interval> = activations.iter().map(|a| image(*a, (f64::NEG_INFINITY, f64::INFINITY))).collect();
        let mut z = vec![(f64::NEG_INFINITY, f64::INFINITY); shape.states];
        for (k, members) in parts.members.iter().enumerate() {
            if let Some(contraction) = local[k].as_ref().filter(|c| c.rho < 1.0) {
                let outside = |i: usize| {
                    let read = self.pre_activation(i, &x, inputs, |j| members.binary_search(&j).is_err());
                    read.0.abs().max(read.1.abs()) + activations[i].apply_f64(0.0).abs()
                };
                let largest =
                    members.iter().zip(&contraction.scaling).map(|(&i, s)| outside(i) / s).fold(0.0, f64::max);
                let radius = largest / (1.0 - contraction.rho) * (1.0 + 1e-12);
                for (&i, s) in members.iter().zip(&contraction.scaling) {
                    x[i] = (x[i].0.max(-radius * s), x[i].1.min(radius * s));
                }
            }
            for _ in 0..if parts.cyclic[k] { SWEEPS } else { 1 } {
                let mut moved = false;
                for &i in members {
                    z[i] = self.pre_activation(i, &x, inputs, |_| true);
                    let (low, high) = image(activations[i], z[i]);
                    let tighter = (x[i].0.max(low), x[i].1.min(high));
                    // A smaller improvement is not worth another sweep.
                    moved |= (tighter.0 - x[i].0) + (x[i].1 - tighter.1) > 1e-9 * (1.0 + tighter.1.abs());
                    x[i] = tighter;
                }
                if !moved {
                    break;
                }
            }
        }
        Ok(z)
    }

    /// The interval of a row, from the states that are `wanted`, the inputs and the bias.
    fn pre_activation(
        &self,
        i: usize,
        x: &[Interval],
        inputs: &[Interval],
        wanted: impl Fn(usize) -> bool,
    ) -> Interval {
        let mut sum = IntervalSum::of(self.state_bias()[i]);
        let states = self.a().row(i).filter(|(j, _)| wanted(*j)).map(|(j, w)| (w, x[j]));
        for (w, of) in states.chain(self.b().row(i).map(|(j, w)| (w, inputs[j]))) {
            sum.add(f64::from(w), of);
        }
        sum.interval()
    }
}

/// The weighted sum of intervals and a bias, with the magnitudes that bound the rounding of both ends.
pub(super) struct IntervalSum {
    low: f64,
    high: f64,
    below: f64,
    above: f64,
    terms: f64,
}

impl IntervalSum {
    pub(super) fn of(bias: f32) -> Self {
        let bias = f64::from(bias);
        Self { low: bias, high: bias, below: bias.abs(), above: bias.abs(), terms: 2.0 }
    }

    pub(super) fn add(&mut self, w: f64, (low, high): Interval) {
        let (low, high) = if w > 0.0 { (w * low, w * high) } else { (w * high, w * low) };
        self.low += low;
        self.high += high;
        self.below += low.abs();
        self.above += high.abs();
        self.terms += 1.0;
    }

    pub(super) fn interval(&self) -> Interval {
        let outwards =
            |sum: f64| if sum.is_finite() && self.terms > 2.0 { f64::EPSILON * self.terms * sum } else { 0.0 };
        (self.low - outwards(self.below), self.high + outwards(self.above))
    }
}

/// An error unless there is one range per input, from a lower to a higher number.
pub(super) fn require_ranges(ranges: &[Interval], inputs: usize) -> Result<()> {
    if ranges.len() != inputs {
        return Err(Error::shape("input ranges", inputs, ranges.len()));
    }
    match ranges.iter().find(|(low, high)| low.is_nan() || high.is_nan() || low > high) {
        Some((low, high)) => Err(Error::setting("input range", "low ≤ high", format!("[{low}, {high}]"))),
        None => Ok(()),
    }
}

/// The image of an interval under φ if φ does not decrease; all numbers otherwise.
pub(super) fn image(activation: Activation, (low, high): Interval) -> Interval {
    if !activation.is_non_decreasing() {
        return (f64::NEG_INFINITY, f64::INFINITY);
    }
    let at = |z: f64, unknown: f64| match activation {
        // A slope of zero would give 0 · ∞.
        Activation::LeakyRelu { slope: 0.0 } => z.max(0.0),
        _ => Some(activation.apply_f64(z)).filter(|x| !x.is_nan()).unwrap_or(unknown),
    };
    (at(low, f64::NEG_INFINITY), at(high, f64::INFINITY))
}
