//! The diagonal rescaling of Theorem 2, in its corrected form: A′ = S⁻¹AS, B′ = S⁻¹B, b′ = S⁻¹b, C′ = CS, D′ = D.

use super::groups::Groups;
use super::well_posedness::{local_contractions, weigh};
use super::{ImplicitModel, Scaling, TapBlock, TapWeights, Target, components};
use crate::linalg::Csr;
use crate::network::Source;
use crate::{Error, Result};

/// Larger factors would leave too little of f32's range for the states.
const MAX_EXPONENT: i32 = 64;

/// A rescaled model.
#[derive(Debug, Clone, PartialEq)]
pub struct Rescaled {
    /// A model that computes the same function of u, with ‖A‖∞ ≤ κ.
    pub model: ImplicitModel,
    /// Whether every factor is a power of two, so that outputs keep every bit. Otherwise they agree up to rounding.
    pub exact: bool,
    /// The largest factor.
    pub largest_factor: f64,
}

impl ImplicitModel {
    /// The same model in coordinates where ‖A‖∞ ≤ κ: possible for λ_pf(|A|) < κ and positively homogeneous activations.
    ///
    /// Factors are powers of two wherever such factors exist (always for an acyclic model): outputs then keep every bit.
    pub fn rescale(&self, kappa: f64) -> Result<Rescaled> {
        if !(kappa > 0.0 && kappa < 1.0) {
            return Err(Error::setting("kappa", "a number between 0 and 1, both excluded", kappa));
        }
        self.require_no_operators("rescaling")?;
        if let Some(layer) = self.layout().layers().iter().find(|l| !l.activation.is_positively_homogeneous()) {
            return Err(Error::unsupported(
                format!("rescaling layer {:?} with activation {}", layer.name, layer.activation),
                "the diagonal rescaling needs positively homogeneous activations (relu, leaky-relu, identity); \
                 train with kappa instead",
            ));
        }
        // Shared weights stay shared: one factor per channel.
        let groups = Groups::new(self);
        let norms = &groups.norms;
        let parts = components(norms);
        let local = local_contractions(norms, &parts);
        // An error here means that λ_pf is not shown to be below κ; the margin absorbs the rounding of s.
        let general = weigh(norms, &parts, &local, kappa * (1.0 - 1e-6));
        let (s, exact) = match powers_of_two(norms, kappa) {
            Some(s) => (s, true),
            None => (general?.scaling, false),
        };
        let s = groups.spread(&s);
        let largest_factor = s.iter().copied().fold(1.0, f64::max);
        if largest_factor > 2f64.powi(MAX_EXPONENT) {
            return Err(Error::unsupported(
                format!("rescaling to kappa {kappa}"),
                format!("factors reach {largest_factor:.1e} and f32 states would lose their range; leave it as it is"),
            ));
        }
        let mut out = self.clone().into_parts();
        // Magnitudes are rounded toward zero; rounding to nearest would violate the bound on the row sums of A.
        out.a = scaled("A", self.a(), exact, |i, j| s[j] / s[i])?;
        out.b = scaled("B", self.b(), exact, |i, _| 1.0 / s[i])?;
        out.c = scaled("C", self.c(), exact, |_, j| s[j])?;
        for (k, layer) in self.layout().layers().iter().enumerate() {
            let each = layer.size / layer.rows().max(1);
            let units = s[self.layout().range(k)].iter().step_by(each.max(1));
            for (b, s) in out.state_bias[self.layout().row_range(k)].iter_mut().zip(units) {
                *b = scaled_value("b", *b, 1.0 / s, exact)?;
            }
        }
        for (k, block) in out.taps.iter_mut().enumerate() {
            block.weights = self.scaled_taps(k, &self.taps()[k], &s, exact)?;
        }
        let before = out.metadata.scaling.take();
        let outputs = before.as_ref().map_or(1.0, |b| b.outputs);
        let states = match before {
            Some(before) => before.states.iter().zip(&s).map(|(a, b)| a * b).collect(),
            None => s,
        };
        out.metadata.scaling = Some(Scaling { states, outputs });
        out.metadata.kappa = Some(kappa);
        let model = ImplicitModel::new(out)?;
        if model.norm_a_inf() > kappa {
            return Err(Error::unsupported(
                format!("rescaling to kappa {kappa}"),
                format!("‖A‖∞ is still {} after rounding; ask for a slightly larger kappa", model.norm_a_inf()),
            ));
        }
        Ok(Rescaled { model, exact, largest_factor })
    }

    /// The weights of block k in the new coordinates; a residual sum gets a factor per channel.
    fn scaled_taps(&self, k: usize, block: &TapBlock, s: &[f64], exact: bool) -> Result<TapWeights> {
        let name = format!("tap block {k}");
        let target = |o: usize| match block.target {
            Target::Layer(k) => s[self.layout().range(k).start + o * block.output.positions()],
            Target::Output => 1.0,
        };
        // A channel of the operand is a fixed share of its source, pooled or not.
        let source = |c: usize, channels: usize| match block.source {
            Source::Layer(k) => s[self.layout().range(k).start + c * (self.layout().layers()[k].size / channels)],
            Source::Input => 1.0,
        };
        match &block.weights {
            TapWeights::Taps(taps) => {
                let (area, channels) = (block.window.area(), block.input.channels);
                scaled(&name, taps, exact, |o, j| source(j / area, channels) / target(o)).map(TapWeights::Taps)
            }
            residual => {
                let channels = block.output.channels;
                let factors = (0..channels)
                    .map(|o| {
                        let before = match residual {
                            TapWeights::Diagonal(factors) => factors[o],
                            _ => 1.0,
                        };
                        scaled_value(&name, before, source(o, channels) / target(o), exact)
                    })
                    .collect::<Result<Vec<f32>>>()?;
                let unchanged = factors.iter().all(|f| *f == 1.0);
                Ok(if unchanged { TapWeights::Identity } else { TapWeights::Diagonal(factors) })
            }
        }
    }
}

/// The smallest powers of two s ≥ 1 with |A|s ≤ κs, by a monotone iteration that finds them whenever they exist.
fn powers_of_two(a: &Csr<f32>, kappa: f64) -> Option<Vec<f64>> {
    let mut exponents = vec![0i32; a.rows()];
    loop {
        let mut changed = false;
        // From the bottom up: one pass suffices for a layered model, whose A is upper triangular.
        for i in (0..a.rows()).rev() {
            let mut exponent = exponents[i];
            let read: f64 = a.row(i).map(|(j, v)| f64::from(v).abs() * 2f64.powi(exponents[j])).sum();
            if a.row(i).any(|(j, v)| j == i && f64::from(v).abs() >= kappa) {
                return None;
            }
            while read > kappa * 2f64.powi(exponent) {
                exponent += 1;
                if exponent > MAX_EXPONENT {
                    return None;
                }
            }
            if exponent != exponents[i] {
                exponents[i] = exponent;
                changed = true;
            }
        }
        if !changed {
            return Some(exponents.iter().map(|&e| 2f64.powi(e)).collect());
        }
    }
}

fn scaled(name: &str, m: &Csr<f32>, exact: bool, factor: impl Fn(usize, usize) -> f64) -> Result<Csr<f32>> {
    let mut data = Vec::with_capacity(m.nonzeros());
    for i in 0..m.rows() {
        for (j, v) in m.row(i) {
            data.push(scaled_value(name, v, factor(i, j), exact)?);
        }
    }
    Csr::new(name, m.rows(), m.cols(), m.indptr().to_vec(), m.indices().to_vec(), data)
}

fn scaled_value(name: &str, value: f32, factor: f64, exact: bool) -> Result<f32> {
    let wanted = f64::from(value) * factor;
    let mut stored = wanted as f32;
    if f64::from(stored).abs() > wanted.abs() {
        stored = if stored > 0.0 { stored.next_down() } else { stored.next_up() };
    }
    let lost = if exact { f64::from(stored) != wanted } else { stored == 0.0 && value != 0.0 };
    if lost || !stored.is_finite() {
        return Err(Error::unsupported(
            format!("rescaling {name}"),
            format!("{value:e} times {factor:e} does not fit into f32; leave the model in its own coordinates"),
        ));
    }
    Ok(stored)
}
