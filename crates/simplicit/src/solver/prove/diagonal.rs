//! Diagonals δ > 0 with G − diag(δ) ⪰ 0: the larger, the better the bound.

use crate::linalg::{Cholesky, Matrix, dot};

/// Steps of the power iteration for the smallest eigenvalue.
const POWER_STEPS: usize = 60;
/// Shares of an estimated largest multiple that are tried, one after the other.
const SHARES: [f64; 7] = [0.999, 0.99, 0.97, 0.9, 0.75, 0.5, 0.1];

/// Whether G − diag(δ) is certainly positive semidefinite on `set`: a floating-point Cholesky factorisation of it,
/// minus a shift that exceeds all of its rounding, completes. (Rump: completed for A − cI with c ≥ γ/(1−γ)·tr A, γ =
/// (n+1)u/(1−(n+1)u), proves A ⪰ 0, whatever the order of the sums.)
pub(super) fn is_certain(gram: &Matrix, set: &[usize], delta: &[f64], factor: &mut Cholesky) -> bool {
    let n = set.len();
    let trace: f64 = set.iter().map(|&j| gram[(j, j)]).sum();
    // Four times the shift that the theorem requires, which also covers the subtraction on the diagonal.
    let shift = 4.0 * (n as f64 + 4.0) * f64::EPSILON * trace;
    factor.factor(n, |a| {
        for (r, &i) in set.iter().enumerate() {
            let line = gram.row(i);
            for (s, &j) in set.iter().enumerate().skip(r) {
                a[r * n + s] = line[j];
            }
            a[r * n + r] = line[i] - delta[i] - shift;
        }
    })
}

/// The largest multiples of 1/(G⁻¹)_jj and of G_jj that fit below G, each slightly smaller than the largest possible
/// one. Empty if G is not numerically positive definite.
pub(super) fn scaled(gram: &Matrix, factor: &mut Cholesky) -> Vec<Vec<f64>> {
    let n = gram.rows();
    let filled = factor.factor(n, |a| a.copy_from_slice(gram.as_slice()));
    if !filled || n == 0 {
        return Vec::new();
    }
    let inverse = factor.inverse();
    let all: Vec<usize> = (0..n).collect();
    let shapes: [Vec<f64>; 2] =
        [(0..n).map(|j| 1.0 / inverse[(j, j)]).collect(), (0..n).map(|j| gram[(j, j)]).collect()];
    let mut out = Vec::new();
    for shape in shapes {
        if !shape.iter().all(|s| *s > 0.0 && s.is_finite()) {
            continue;
        }
        // λ_min(S^-½GS^-½) = 1/λ_max(S^½G⁻¹S^½).
        let root: Vec<f64> = shape.iter().map(|s| s.sqrt()).collect();
        let mut v = vec![1.0 / (n as f64).sqrt(); n];
        let mut largest = 0.0;
        for _ in 0..POWER_STEPS {
            let scaled: Vec<f64> = v.iter().zip(&root).map(|(v, r)| v * r).collect();
            let next: Vec<f64> = (0..n).map(|j| root[j] * dot(inverse.row(j), &scaled)).collect();
            let norm = dot(&next, &next).sqrt();
            largest = f64::max(largest, dot(&v, &next));
            if !(norm > 0.0 && norm.is_finite()) {
                break;
            }
            v = next.into_iter().map(|x| x / norm).collect();
        }
        if !(largest > 0.0 && largest.is_finite()) {
            continue;
        }
        for share in SHARES {
            let delta: Vec<f64> = shape.iter().map(|s| share / largest * s).collect();
            if is_certain(gram, &all, &delta, factor) {
                out.push(delta);
                break;
            }
        }
    }
    out
}

/// Moves δ towards the maximum of Σ gain_j·δ_j below G: damped Newton steps on Σ gain_j·δ_j + τ·log det(G − diag δ) +
/// τ·Σ log δ_j, which stay inside the feasible set. False if rounding ended the steps.
pub(super) fn improve(
    gram: &Matrix,
    delta: &mut [f64],
    gain: &[f64],
    tau: f64,
    steps: usize,
    factor: &mut Cholesky,
) -> bool {
    let n = delta.len();
    for _ in 0..steps {
        let filled = factor.factor(n, |a| {
            a.copy_from_slice(gram.as_slice());
            delta.iter().enumerate().for_each(|(j, d)| a[j * n + j] -= d);
        });
        if !filled {
            return false;
        }
        let inverse = factor.inverse();
        let slope: Vec<f64> = (0..n).map(|j| gain[j] / tau - inverse[(j, j)] + 1.0 / delta[j]).collect();
        let filled = factor.factor(n, |a| {
            for (a, m) in a.iter_mut().zip(inverse.as_slice()) {
                *a = m * m;
            }
            delta.iter().enumerate().for_each(|(j, d)| a[j * n + j] += 1.0 / (d * d));
        });
        if !filled {
            return false;
        }
        let mut step = slope.clone();
        factor.solve(&mut step, 1);
        let decrement = dot(&slope, &step).max(0.0).sqrt();
        if !step.iter().all(|s| s.is_finite()) {
            return false;
        }
        let Some(length) = longest(gram, delta, &step, factor) else { return false };
        // On a step that reaches the boundary, the maximum of the barrier lies well inside.
        let length = if length < 1.0 { 0.5 * length } else { 1.0 };
        delta.iter_mut().zip(&step).for_each(|(d, s)| *d += length * s);
        if decrement < 1e-2 {
            break;
        }
    }
    true
}

/// The longest step, among some shares of it, that stays inside.
fn longest(gram: &Matrix, delta: &[f64], step: &[f64], factor: &mut Cholesky) -> Option<f64> {
    let n = delta.len();
    [1.0, 0.5, 0.25, 0.1, 0.03, 0.01].into_iter().find(|length| {
        delta.iter().zip(step).all(|(d, s)| d + length * s > 0.0)
            && factor.factor(n, |a| {
                a.copy_from_slice(gram.as_slice());
                (0..n).for_each(|j| a[j * n + j] -= delta[j] + length * step[j]);
            })
    })
}
