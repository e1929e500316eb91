//! ‖A‖∞ and a certified upper bound on the Perron–Frobenius eigenvalue of |A|.

use super::groups::Groups;
use super::{Components, ImplicitModel, components};
use crate::linalg::Csr;
use crate::{Error, Result};

const MAX_ITERATIONS: usize = 2000;
/// Stop once the upper and the lower Collatz–Wielandt bound are this close.
const CLOSE: f64 = 1e-6;

/// |A|s ≤ ρs, rounded outwards: with ρ < 1, x ↦ φ(Ax + c) contracts by ρ in max |x_i|/s_i for every non-expansive φ.
#[derive(Debug, Clone, PartialEq)]
pub struct Contraction {
    /// The factor ρ.
    pub rho: f64,
    /// The weights s > 0, largest 1 for a component.
    pub scaling: Vec<f64>,
}

/// What can be proved about whether x = φ(Ax + c) has exactly one solution.
#[derive(Debug, Clone, PartialEq)]
pub struct WellPosedness {
    /// The largest row sum of |A|. With tap blocks it is an upper bound: the ℓ1 norms of a channel's taps.
    pub norm_a_inf: f64,
    /// A certified upper bound on λ_pf(|A|). At 1 or more nothing is proved.
    pub lambda_pf_upper: f64,
    /// Whether no state depends on itself, even through others: λ_pf is then exactly 0.
    pub acyclic: bool,
    /// A contraction of all of A, if the bound is below 1 and s fits into f64.
    pub contraction: Option<Contraction>,
}

impl WellPosedness {
    /// Whether λ_pf(|A|) < 1 is proved. False means that it cannot be shown, not that the model is ill-posed.
    pub fn is_shown(&self) -> bool {
        self.lambda_pf_upper < 1.0
    }
}

impl ImplicitModel {
    /// ‖A‖∞ and a certified upper bound on λ_pf(|A|). With shared weights it is the bound for the norms between
    /// channels, which is at least as large.
    pub fn well_posedness(&self) -> WellPosedness {
        if self.layout().has_operators() {
            // A model with operators has no cycles; the effect of operators on a change of the states has no norm
            // here.
            let norm_a_inf = self.norm_a_inf();
            return WellPosedness { norm_a_inf, lambda_pf_upper: 0.0, acyclic: true, contraction: None };
        }
        let groups = Groups::new(self);
        let norms = &groups.norms;
        let parts = components(norms);
        let local = local_contractions(norms, &parts);
        let lambda_pf_upper = local.iter().flatten().map(|c| c.rho).fold(0.0, f64::max);
        let contraction = if lambda_pf_upper < 1.0 {
            // Half-way to 1: a smaller ρ would ask for larger s.
            let found = weigh(norms, &parts, &local, f64::midpoint(lambda_pf_upper, 1.0)).ok();
            found.map(|c| Contraction { scaling: groups.spread(&c.scaling), ..c })
        } else {
            None
        };
        WellPosedness {
            norm_a_inf: self.norm_a_inf(),
            lambda_pf_upper,
            acyclic: !parts.cyclic.contains(&true),
            contraction,
        }
    }
}

/// One contraction per component, none where the component is a single state that does not read itself.
pub(super) fn local_contractions(a: &Csr<f32>, parts: &Components) -> Vec<Option<Contraction>> {
    let mut place = vec![usize::MAX; a.rows()];
    parts
        .members
        .iter()
        .zip(&parts.cyclic)
        .map(|(members, &cyclic)| {
            for (k, &i) in members.iter().enumerate() {
                place[i] = k;
            }
            let found = cyclic.then(|| component_contraction(a, members, &place));
            for &i in members {
                place[i] = usize::MAX;
            }
            found
        })
        .collect()
}

/// Power iteration on |A| + σI over one component; max_i (|A|v)_i/v_i for any v > 0 is an upper bound, so the best v
/// found is a certificate, however many steps were made. `place[i]` is the position of state i in the component.
pub(crate) fn component_contraction(a: &Csr<f32>, members: &[usize], place: &[usize]) -> Contraction {
    let inside: Vec<Vec<(usize, f64)>> = members
        .iter()
        .map(|&i| {
            a.row(i).filter(|&(j, _)| place[j] != usize::MAX).map(|(j, v)| (place[j], f64::from(v).abs())).collect()
        })
        .collect();
    let mut v = vec![1.0; members.len()];
    let mut image = vec![0.0; members.len()];
    let mut best = Contraction { rho: f64::INFINITY, scaling: v.clone() };
    let mut shift = None;
    for _ in 0..MAX_ITERATIONS {
        let (mut upper, mut lower) = (0.0f64, f64::INFINITY);
        for (i, row) in inside.iter().enumerate() {
            image[i] = row.iter().map(|&(j, w)| w * v[j]).sum();
            upper = upper.max(outwards(image[i] / v[i], row.len()));
            lower = lower.min(image[i] / v[i]);
        }
        if upper < best.rho {
            best.rho = upper;
            best.scaling.copy_from_slice(&v);
        }
        if !upper.is_finite() || upper - lower <= CLOSE * upper {
            break;
        }
        // Without a shift the iteration never settles on a periodic component.
        let sigma = *shift.get_or_insert(0.5 * upper);
        for (v, image) in v.iter_mut().zip(&image) {
            *v = *image + sigma * *v;
        }
        let largest = v.iter().copied().fold(0.0, f64::max);
        for v in &mut v {
            *v = (*v / largest).max(1e-200);
        }
    }
    best
}

/// The value, enlarged so that it exceeds the exact one for any rounding of a sum of `terms` products and a division.
fn outwards(value: f64, terms: usize) -> f64 {
    value * (1.0 + (terms as f64 + 4.0) * f64::EPSILON)
}

/// s with |A|s ≤ ρs over all of A: components in topological order, each scaled up until it dominates what it reads.
pub(super) fn weigh(a: &Csr<f32>, parts: &Components, local: &[Option<Contraction>], rho: f64) -> Result<Contraction> {
    let mut s = vec![0.0f64; a.rows()];
    for (members, contraction) in parts.members.iter().zip(local) {
        let mut factor = 1.0f64;
        for (k, &i) in members.iter().enumerate() {
            let (own, weight) = contraction.as_ref().map_or((0.0, 1.0), |c| (c.rho, c.scaling[k]));
            if own >= rho {
                return Err(Error::setting("kappa", format!("more than λ_pf(|A|), at most {own:.6}"), rho));
            }
            // States of the component itself still have s = 0 and are covered by its own contraction.
            let read: f64 = a.row(i).map(|(j, v)| f64::from(v).abs() * s[j]).sum();
            factor = factor.max(read / ((rho - own) * weight));
        }
        for (k, &i) in members.iter().enumerate() {
            s[i] = factor * contraction.as_ref().map_or(1.0, |c| c.scaling[k]);
        }
    }
    let reached = (0..a.rows())
        .map(|i| {
            let read: f64 = a.row(i).map(|(j, v)| f64::from(v).abs() * s[j]).sum();
            outwards(read / s[i], a.indptr()[i + 1] - a.indptr()[i])
        })
        .fold(0.0, f64::max);
    let largest = s.iter().copied().fold(0.0, f64::max);
    if !largest.is_finite() || !reached.is_finite() || reached >= 1.0 && rho < 1.0 {
        return Err(Error::unsupported(
            "a diagonal scaling of this A",
            format!("its factors reach {largest:.1e}; keep the model in its own coordinates"),
        ));
    }
    Ok(Contraction { rho: reached, scaling: s })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::{Activation, Layer, Layout};
    use crate::model::ModelParts;
    use crate::random::Random;

    fn model(n: usize, rows: Vec<Vec<(usize, f32)>>) -> ImplicitModel {
        ImplicitModel::new(ModelParts {
            a: Csr::from_rows(n, rows),
            b: Csr::empty(n, 1),
            c: Csr::empty(1, n),
            d: Csr::empty(1, 1),
            state_bias: vec![0.0; n],
            output_bias: vec![0.0],
            layout: Layout::new(vec![Layer::dense("x", n, Activation::Relu)]),
            ..Default::default()
        })
        .unwrap()
    }

    /// λ_pf from the growth of |A|^(2^k): an independent way to compute the same number (Gelfand's formula).
    fn gelfand(a: &Csr<f32>) -> f64 {
        let n = a.rows();
        let mut m: Vec<Vec<f64>> = vec![vec![0.0; n]; n];
        for (i, row) in m.iter_mut().enumerate() {
            for (j, v) in a.row(i) {
                row[j] = f64::from(v).abs();
            }
        }
        let (mut log, mut power) = (0.0f64, 1.0f64);
        for _ in 0..40 {
            let norm = m.iter().map(|r| r.iter().sum::<f64>()).fold(0.0, f64::max);
            if norm == 0.0 {
                return 0.0;
            }
            log += norm.ln() / power;
            let scaled: Vec<Vec<f64>> = m.iter().map(|r| r.iter().map(|v| v / norm).collect()).collect();
            for i in 0..n {
                for j in 0..n {
                    m[i][j] = (0..n).map(|k| scaled[i][k] * scaled[k][j]).sum();
                }
            }
            power *= 2.0;
        }
        log.exp()
    }

    #[test]
    fn the_bound_is_above_and_close_on_random_matrices() {
        let mut r = Random::new(7);
        for _ in 0..60 {
            let n = 1 + r.below(20);
            let density = 0.05 + 0.6 * r.uniform();
            let rows = (0..n)
                .map(|_| {
                    (0..n).map(|j| (j, if r.uniform() < density { r.normal() as f32 * 0.3 } else { 0.0 })).collect()
                })
                .collect();
            let model = model(n, rows);
            let found = model.well_posedness();
            let exact = gelfand(model.a());
            assert!(found.lambda_pf_upper >= exact * (1.0 - 1e-9), "{} {exact}", found.lambda_pf_upper);
            assert!(found.lambda_pf_upper <= exact * (1.0 + 1e-3) + 1e-12, "{} {exact}", found.lambda_pf_upper);
            assert_eq!(found.acyclic, exact == 0.0);
            if let Some(c) = &found.contraction {
                assert!(c.rho < 1.0);
                for i in 0..n {
                    let read: f64 = model.a().row(i).map(|(j, v)| f64::from(v).abs() * c.scaling[j]).sum();
                    assert!(read <= c.rho * c.scaling[i] && c.scaling[i] > 0.0);
                }
            } else {
                assert!(found.lambda_pf_upper >= 1.0);
            }
        }
    }

    #[test]
    fn periodic_reducible_acyclic_and_empty() {
        // A two-cycle with geometric mean √(4·0.04) = 0.4 feeds a loop of 0.9; ‖A‖∞ is 104.
        let w = model(3, vec![vec![(1, -4.0)], vec![(0, 0.04)], vec![(0, 100.0), (1, 3.1), (2, 0.9)]]).well_posedness();
        assert!((w.lambda_pf_upper - 0.9).abs() < 1e-6 && w.lambda_pf_upper >= 0.9f32.into(), "{w:?}");
        assert!((w.norm_a_inf - 104.0).abs() < 1e-5 && w.is_shown() && !w.acyclic);
        let chain = model(3, vec![vec![(1, 50.0)], vec![(2, 70.0)], vec![]]).well_posedness();
        assert_eq!((chain.lambda_pf_upper, chain.acyclic, chain.norm_a_inf), (0.0, true, 70.0));
        assert!(chain.contraction.is_some());
        let nothing = model(0, vec![]).well_posedness();
        assert_eq!((nothing.lambda_pf_upper, nothing.norm_a_inf, nothing.acyclic), (0.0, 0.0, true));
        let wild = model(2, vec![vec![(1, 2.0)], vec![(0, 2.0)]]).well_posedness();
        assert!(!wild.is_shown() && wild.contraction.is_none() && wild.lambda_pf_upper >= 2.0);
    }
}
