//! Penalties f: the cost of a weight.
//!
//! A penalty is a function of one weight, convex, even and smallest at f(0) = 0. A row pays Σ_j ω_j·f(x_j) with entry
//! weights ω_j ≥ 0, so the weights need no place in the trait: prox, conjugate and slopes of ω·f follow from those of f.
//! See `docs/add-a-penalty.md` for writing one.

mod elastic_net;
mod l1;
mod perspective;
mod ridge;

pub use elastic_net::ElasticNet;
pub use l1::L1;
pub(crate) use l1::soft;
pub use perspective::Perspective;
pub use ridge::Ridge;

use crate::linalg::vectorised;

/// A convex, even penalty of one weight with f(0) = 0, twice differentiable except at finitely many points.
pub trait Penalty: std::fmt::Debug + Send + Sync {
    /// f(x).
    fn value(&self, x: f64) -> f64;

    /// argmin over x of f(x) + (x − v)²/(2τ), τ > 0. A result of zero must be exactly 0.0.
    fn prox(&self, v: f64, tau: f64) -> f64;

    /// f*(g) = sup over x of g·x − f(x); may be `f64::INFINITY`.
    fn conjugate(&self, g: f64) -> f64;

    /// f′(x) for x > 0, and its limit from the right at x = 0; at a kink the smaller slope. `x` may be
    /// `f64::INFINITY`: the largest slope, beyond which the conjugate is infinite.
    fn slope(&self, x: f64) -> f64;

    /// f″(x) for x > 0; at a kink of f′ the value from either side.
    fn curvature(&self, x: f64) -> f64;

    /// An x ≥ 0 that attains the conjugate at g ≥ 0; infinite where the supremum is not attained. The default
    /// searches numerically; implement a formula where there is one.
    fn maximiser(&self, g: f64) -> f64 {
        if g <= self.slope(0.0) {
            return 0.0;
        }
        if g >= self.slope(f64::INFINITY) {
            return f64::INFINITY;
        }
        let (mut low, mut high) = (0.0, 1.0);
        while self.slope(high) < g {
            low = high;
            high *= 2.0;
        }
        for _ in 0..200 {
            let middle = 0.5 * (low + high);
            if middle <= low || middle >= high {
                break;
            }
            if self.slope(middle) < g {
                low = middle;
            } else {
                high = middle;
            }
        }
        high
    }

    /// Σ_j prox over a slice: `out_j` = argmin of `weight_j·f(unit_j·x) + (x − v_j)²/(2τ)`. One dynamic call per row.
    fn prox_slice(&self, v: &[f64], tau: f64, scale: &EntryScale, out: &mut [f64]) {
        vectorised(
            #[inline(always)]
            || {
                if let Some(units) = &scale.units {
                    for (((out, &v), &weight), &unit) in out.iter_mut().zip(v).zip(&scale.weights).zip(units) {
                        let step = tau * weight * unit * unit;
                        *out = if step > 0.0 { self.prox(unit * v, step) / unit } else { v };
                    }
                } else {
                    for ((out, &v), &weight) in out.iter_mut().zip(v).zip(&scale.weights) {
                        let step = tau * weight;
                        *out = if step > 0.0 { self.prox(v, step) } else { v };
                    }
                }
            },
        );
    }

    /// Σ_j `weight_j·f(unit_j·x_j)`.
    fn value_slice(&self, x: &[f64], scale: &EntryScale) -> f64 {
        let mut sum = 0.0;
        for (j, (&x, &weight)) in x.iter().zip(&scale.weights).enumerate() {
            if x != 0.0 && weight > 0.0 {
                sum += weight * self.value(scale.unit(j) * x);
            }
        }
        sum
    }
}

/// How f enters each entry of a row: `weight_j · f(unit_j · x_j)`.
#[derive(Debug, Clone)]
pub struct EntryScale {
    /// Factor on f.
    pub weights: Vec<f64>,
    /// Factor on the argument; all ones when absent.
    pub units: Option<Vec<f64>>,
}

impl EntryScale {
    /// The factor on the argument of entry j.
    #[inline]
    pub fn unit(&self, j: usize) -> f64 {
        self.units.as_ref().map_or(1.0, |u| u[j])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) fn all() -> Vec<Box<dyn Penalty>> {
        vec![
            Box::new(L1::new(0.7).unwrap()),
            Box::new(Perspective::new(0.5, 0.02).unwrap()),
            Box::new(Perspective::new(0.3, 1.2).unwrap()),
            Box::new(Perspective::paper(1e-3).unwrap()),
            Box::new(Perspective::new(0.4, 0.0).unwrap()),
            Box::new(ElasticNet::new(0.3, 0.8).unwrap()),
            Box::new(ElasticNet::new(0.3, 0.0).unwrap()),
            Box::new(Ridge::new(0.9).unwrap()),
        ]
    }

    fn points() -> impl Iterator<Item = f64> {
        (-200..=200).map(|k| f64::from(k) * 0.0173)
    }

    #[test]
    fn prox_beats_a_brute_force_grid() {
        for f in all() {
            for tau in [0.01, 0.3, 1.0, 7.0] {
                for v in points().step_by(7) {
                    let objective = |x: f64| f.value(x) + (x - v).powi(2) / (2.0 * tau);
                    let x = f.prox(v, tau);
                    // The minimiser lies between 0 and v. A fine grid there must not be better, and the best point of
                    // the grid must be near the minimiser, so that a prox that is merely feasible fails too.
                    let best = (0..=4000).map(|k| objective(v * f64::from(k) / 4000.0)).fold(f64::INFINITY, f64::min);
                    assert!(objective(x) <= best + 1e-12, "{f:?} v {v} tau {tau}");
                    assert!(best - objective(x) <= 1e-6 * (1.0 + v * v / tau), "{f:?} v {v} tau {tau}");
                    assert_eq!(f.prox(-v, tau), -x);
                }
            }
        }
    }

    #[test]
    fn conjugate_is_the_supremum_and_is_attained() {
        for f in all() {
            for g in points().step_by(3) {
                let conjugate = f.conjugate(g);
                let sup = (-4000..=4000).map(|k| f64::from(k) * 0.01).map(|x| g * x - f.value(x)).fold(0.0, f64::max);
                assert!(sup <= conjugate + 1e-12, "{f:?} g {g}: grid {sup} above {conjugate}");
                let x = f.maximiser(g.abs());
                if conjugate.is_finite() {
                    assert!((g.abs() * x - f.value(x) - conjugate).abs() <= 1e-9 * (1.0 + conjugate), "{f:?} g {g}");
                    if x < 40.0 {
                        assert!(conjugate - sup <= 1e-2 * (1.0 + x), "{f:?} g {g}: {conjugate} against {sup}");
                    }
                } else {
                    assert!(g.abs() > f.slope(f64::INFINITY) && x.is_infinite(), "{f:?} g {g}");
                }
            }
        }
    }

    #[test]
    fn fenchel_young_holds_with_equality_at_the_slope() {
        for f in all() {
            for x in points() {
                for g in points().step_by(11) {
                    assert!(f.value(x) + f.conjugate(g) - g * x >= -1e-12, "{f:?} x {x} g {g}");
                }
                if x > 0.0 {
                    let g = f.slope(x);
                    assert!((f.value(x) + f.conjugate(g) - g * x).abs() < 1e-10, "{f:?} x {x}");
                }
            }
        }
    }

    #[test]
    fn slope_and_curvature_are_derivatives() {
        for f in all() {
            let mut smooth = 0;
            for k in 1..300 {
                let (x, h) = (f64::from(k) * 0.0211, 1e-5);
                let slope = (f.value(x + h) - f.value(x - h)) / (2.0 * h);
                assert!((slope - f.slope(x)).abs() < 1e-4, "{f:?} x {x}");
                let curvature = (f.slope(x + h) - f.slope(x - h)) / (2.0 * h);
                smooth += usize::from((curvature - f.curvature(x)).abs() < 1e-4);
            }
            assert!(smooth >= 297, "{f:?}: curvature wrong at {} points", 299 - smooth);
            assert_eq!(f.value(0.0), 0.0);
            assert!(f.slope(0.0) >= 0.0 && f.slope(f64::INFINITY) >= f.slope(1e3));
        }
    }

    #[test]
    fn scaled_slices_match_the_definition() {
        let scale = EntryScale { weights: vec![0.5, 2.0, 0.0, 1.0], units: Some(vec![1.0, 3.0, 2.0, 0.25]) };
        for f in all() {
            let (v, tau) = ([0.9, -1.7, 0.4, 3.0], 0.6);
            let mut out = [0.0; 4];
            f.prox_slice(&v, tau, &scale, &mut out);
            for j in 0..4 {
                let objective =
                    |x: f64| scale.weights[j] * f.value(scale.unit(j) * x) + (x - v[j]).powi(2) / (2.0 * tau);
                let best = (0..=9000).map(|k| objective(v[j] * f64::from(k) / 9000.0)).fold(f64::INFINITY, f64::min);
                assert!(objective(out[j]) <= best + 1e-12, "{f:?} entry {j}");
            }
            let value: f64 = (0..4).map(|j| scale.weights[j] * f.value(scale.unit(j) * out[j])).sum();
            assert!((f.value_slice(&out, &scale) - value).abs() < 1e-14);
        }
    }
}
