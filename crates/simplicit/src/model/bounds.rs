//! Between which numbers every pre-activation stays, by interval arithmetic over a range of inputs.

use super::well_posedness::local_contractions;
use super::{ImplicitModel, components};
use crate::layout::Activation;
use crate::{Error, Result};

/// Sweeps over a cycle: each is sound, more are tighter.
const SWEEPS: usize = 100;

/// [low, high].
pub(super) type Interval = (f64, f64);

impl ImplicitModel {
    /// z_i ∈ [low_i, high_i] at the equilibrium of every input with u_j in `inputs[j]` (which may be infinite), one per
    /// state. Cycles start from what their contraction proves, or from everything where it proves nothing.
    pub fn state_bounds(&self, inputs: &[(f64, f64)]) -> Result<Vec<(f64, f64)>> {
        self.require_no_taps("bounds of the states")?;
        let shape = self.shape();
        if inputs.len() != shape.inputs {
            return Err(Error::shape("input ranges", shape.inputs, inputs.len()));
        }
        if let Some((low, high)) = inputs.iter().find(|(low, high)| low.is_nan() || high.is_nan() || low > high) {
            return Err(Error::setting("input range", "low ≤ high", format!("[{low}, {high}]")));
        }
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
                    // Less than this is not worth a sweep.
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

    /// Interval of a row over what it reads of the states that are `wanted`, the inputs and the bias.
    fn pre_activation(
        &self,
        i: usize,
        x: &[Interval],
        inputs: &[Interval],
        wanted: impl Fn(usize) -> bool,
    ) -> Interval {
        let bias = f64::from(self.state_bias()[i]);
        let (mut low, mut high) = (bias, bias);
        // Sums of magnitudes, for the rounding of the two sums.
        let (mut below, mut above, mut terms) = (bias.abs(), bias.abs(), 2.0);
        let states = self.a().row(i).filter(|(j, _)| wanted(*j)).map(|(j, w)| (w, x[j]));
        for (w, (l, h)) in states.chain(self.b().row(i).map(|(j, w)| (w, inputs[j]))) {
            let w = f64::from(w);
            let (l, h) = if w > 0.0 { (w * l, w * h) } else { (w * h, w * l) };
            low += l;
            high += h;
            below += l.abs();
            above += h.abs();
            terms += 1.0;
        }
        let outwards = |sum: f64| if sum.is_finite() && terms > 2.0 { f64::EPSILON * terms * sum } else { 0.0 };
        (low - outwards(below), high + outwards(above))
    }
}

/// φ of an interval where φ does not decrease; everything otherwise.
fn image(activation: Activation, (low, high): Interval) -> Interval {
    if !activation.is_non_decreasing() {
        return (f64::NEG_INFINITY, f64::INFINITY);
    }
    let at = |z: f64, unknown: f64| match activation {
        // 0 · ∞ of a slope of zero.
        Activation::LeakyRelu { slope: 0.0 } => z.max(0.0),
        _ => Some(activation.apply_f64(z)).filter(|x| !x.is_nan()).unwrap_or(unknown),
    };
    (at(low, f64::NEG_INFINITY), at(high, f64::INFINITY))
}
