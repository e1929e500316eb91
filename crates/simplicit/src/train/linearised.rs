//! The model linearised in its weights: what a small change of the non-zeros does to every state and output, and the
//! transpose of that map.
//!
//! With z = Ax + Bu + b and Φ = diag φ′(z),
//!
//! δz = (I − AΦ)⁻¹(δA·x + δB·u + δb),  δy = CΦδz + δC·x + δD·u + δd
//!
//! and for cotangents v of y and c of z, r = c + Φ(Cᵀv + Aᵀr), the gradient being r·(x, u, 1)ᵀ and v·(x, u, 1)ᵀ. Layers
//! are swept in order, which is exact in one sweep for layered models; cycles repeat the sweep until it settles.

use std::ops::Range;

use crate::equilibrium::EquilibriumSolution;
use crate::layout::Layout;
use crate::linalg::{Matrix, View, gemm};
use crate::model::ImplicitModel;
use crate::states::StateShape;

/// Sweeps of a cyclic model at most; contraction ends them long before.
const MAX_SWEEPS: usize = 500;
/// A sweep that changes less than this share of the largest value is the last: what float32 resolves.
const SETTLED: f32 = 1e-6;

/// Rows of M = (A B b; C D d) that are computed together, with the columns their non-zeros lie between.
#[derive(Debug, Clone)]
struct Band {
    rows: Range<usize>,
    states: Range<usize>,
    inputs: Range<usize>,
}

/// Where a model has non-zeros, and the order to sweep its layers in.
#[derive(Debug, Clone)]
pub(super) struct Support {
    shape: StateShape,
    /// Row by row, columns ascending: states 0..n, inputs n..n+p, the constant n+p.
    entries: Vec<(usize, usize)>,
    /// Layers, last first, then the outputs.
    bands: Vec<Band>,
    /// No layer reads itself or a later one.
    layered: bool,
}

/// Samples with the states they have at the model.
pub(super) struct Samples<'a> {
    pub(super) u: &'a Matrix<f32>,
    pub(super) x: &'a Matrix<f32>,
    /// φ′(z).
    pub(super) gates: &'a Matrix<f32>,
}

/// φ′ at every pre-activation.
pub(super) fn gates(layout: &Layout, solution: &EquilibriumSolution) -> Matrix<f32> {
    let activations = layout.activations();
    Matrix::from_fn(solution.z.rows(), solution.z.cols(), |s, i| activations[i].derivative(solution.z[(s, i)]))
}

impl Support {
    /// The non-zeros of a model and their values.
    pub(super) fn of(model: &ImplicitModel) -> (Self, Vec<f64>) {
        let shape = model.shape();
        let (n, p) = (shape.states, shape.inputs);
        let (mut entries, mut values) = (Vec::new(), Vec::new());
        let halves = [(0, model.a(), model.b(), model.state_bias()), (n, model.c(), model.d(), model.output_bias())];
        for (first, from_states, from_inputs, bias) in halves {
            for i in 0..bias.len() {
                let mut push = |j: usize, v: f32| {
                    if v != 0.0 {
                        entries.push((first + i, j));
                        values.push(f64::from(v));
                    }
                };
                from_states.row(i).for_each(|(j, v)| push(j, v));
                from_inputs.row(i).for_each(|(j, v)| push(n + j, v));
                push(n + p, bias[i]);
            }
        }
        let layout = model.layout();
        let mut ranges: Vec<Range<usize>> = (0..layout.layers().len()).map(|k| layout.range(k)).collect();
        ranges.push(n..n + shape.outputs);
        let bands: Vec<Band> = ranges.into_iter().map(|rows| band(&entries, rows, shape)).collect();
        let layered = bands.iter().all(|b| b.rows.start >= n || b.states.is_empty() || b.states.start >= b.rows.end);
        (Self { shape, entries, bands, layered }, values)
    }

    /// (row, column) of every non-zero.
    pub(super) fn entries(&self) -> &[(usize, usize)] {
        &self.entries
    }

    /// Values of the non-zeros as a dense M in single precision.
    pub(super) fn dense(&self, values: &[f64]) -> Matrix<f32> {
        let StateShape { inputs, states, outputs } = self.shape;
        let mut out = Matrix::zeros(states + outputs, states + inputs + 1);
        for (&at, &v) in self.entries.iter().zip(values) {
            out[at] = v as f32;
        }
        out
    }

    /// δz (m × n) and δy (m × q) for a change of the weights `m`; both matrices dense as from [`Support::dense`].
    pub(super) fn forward(&self, m: &Matrix<f32>, change: &Matrix<f32>, at: &Samples) -> (Matrix<f32>, Matrix<f32>) {
        let (n, samples) = (self.shape.states, at.u.rows());
        let (mut dz, mut dx) = (Matrix::<f32>::zeros(samples, n), Matrix::<f32>::zeros(samples, n));
        let mut direct: Vec<Vec<f32>> = self.bands.iter().map(|band| self.direct(change, at, band)).collect();
        let dy = direct.pop().unwrap_or_default();
        for _ in 0..MAX_SWEEPS {
            let (mut moved, mut size) = (0.0f32, 0.0f32);
            for (band, direct) in self.bands.iter().zip(&direct).rev() {
                let width = band.rows.len();
                let mut t = direct.clone();
                product(&mut t, width, columns(&dx, &band.states), part(m, &band.rows, &band.states).t());
                for (s, t) in t.chunks_exact(width.max(1)).enumerate() {
                    let gates = &at.gates.row(s)[band.rows.clone()];
                    let dz = &mut dz.row_mut(s)[band.rows.clone()];
                    let dx = &mut dx.row_mut(s)[band.rows.clone()];
                    for k in 0..t.len() {
                        moved = moved.max((t[k] - dz[k]).abs());
                        size = size.max(t[k].abs());
                        dz[k] = t[k];
                        dx[k] = gates[k] * t[k];
                    }
                }
            }
            if self.layered || moved <= SETTLED * size {
                break;
            }
        }
        let mut dy = Matrix::from_vec(samples, self.shape.outputs, dy).unwrap_or_default();
        if let Some(band) = self.bands.last() {
            let stride = self.shape.outputs;
            product(dy.as_mut_slice(), stride, columns(&dx, &band.states), part(m, &band.rows, &band.states).t());
        }
        (dz, dy)
    }

    /// The change times (x, u, 1) for the rows of a band, m × rows.
    fn direct(&self, change: &Matrix<f32>, at: &Samples, band: &Band) -> Vec<f32> {
        let (n, width) = (self.shape.states, band.rows.len());
        let constant = n + self.shape.inputs;
        let bias: Vec<f32> = band.rows.clone().map(|i| change[(i, constant)]).collect();
        let mut out = bias.repeat(at.u.rows());
        product(&mut out, width, columns(at.x, &band.states), part(change, &band.rows, &band.states).t());
        let inputs = n + band.inputs.start..n + band.inputs.end;
        product(&mut out, width, columns(at.u, &band.inputs), part(change, &band.rows, &inputs).t());
        out
    }

    /// The gradient of Σ v·y + c·z over the samples, one number per non-zero.
    pub(super) fn backward(&self, m: &Matrix<f32>, v: &Matrix<f32>, c: &Matrix<f32>, at: &Samples) -> Vec<f64> {
        self.outer(&self.adjoint(m, v, c, at), v, at)
    }

    /// The derivative of Σ v·y + c·z by every pre-activation, all that depends on it included.
    pub(super) fn adjoint(&self, m: &Matrix<f32>, v: &Matrix<f32>, c: &Matrix<f32>, at: &Samples) -> Matrix<f32> {
        let (n, samples) = (self.shape.states, at.u.rows());
        let mut base = Matrix::<f32>::zeros(samples, n);
        if let Some(band) = self.bands.last() {
            let out = &mut base.as_mut_slice()[band.states.start..];
            product(out, n, v.view(), part(m, &band.rows, &band.states));
        }
        let mut r = Matrix::<f32>::zeros(samples, n);
        for _ in 0..MAX_SWEEPS {
            let (mut moved, mut size) = (0.0f32, 0.0f32);
            for band in &self.bands[..self.bands.len() - 1] {
                let width = band.rows.len();
                let mut t = Vec::with_capacity(samples * width);
                (0..samples).for_each(|s| t.extend_from_slice(&base.row(s)[band.rows.clone()]));
                let readers = 0..if self.layered { band.rows.start } else { n };
                product(&mut t, width, columns(&r, &readers), part(m, &readers, &band.rows));
                for (s, t) in t.chunks_exact(width.max(1)).enumerate() {
                    let (gates, c) = (&at.gates.row(s)[band.rows.clone()], &c.row(s)[band.rows.clone()]);
                    let r = &mut r.row_mut(s)[band.rows.clone()];
                    for k in 0..t.len() {
                        let new = c[k] + gates[k] * t[k];
                        moved = moved.max((new - r[k]).abs());
                        size = size.max(new.abs());
                        r[k] = new;
                    }
                }
            }
            if self.layered || moved <= SETTLED * size {
                break;
            }
        }
        r
    }

    /// r·(x, u, 1)ᵀ and v·(x, u, 1)ᵀ at the non-zeros.
    fn outer(&self, r: &Matrix<f32>, v: &Matrix<f32>, at: &Samples) -> Vec<f64> {
        let (n, p) = (self.shape.states, self.shape.inputs);
        let stride = n + p + 1;
        let mut dense = Matrix::<f32>::zeros(n + self.shape.outputs, stride);
        for band in &self.bands {
            let left = if band.rows.start < n { columns(r, &band.rows) } else { v.view() };
            let out = &mut dense.as_mut_slice()[band.rows.start * stride..];
            product(&mut out[band.states.start..], stride, left.t(), columns(at.x, &band.states));
            product(&mut out[n + band.inputs.start..], stride, left.t(), columns(at.u, &band.inputs));
        }
        for s in 0..r.rows() {
            for (i, value) in r.row(s).iter().chain(v.row(s)).enumerate() {
                dense[(i, n + p)] += value;
            }
        }
        self.entries.iter().map(|&at| f64::from(dense[at])).collect()
    }
}

fn band(entries: &[(usize, usize)], rows: Range<usize>, shape: StateShape) -> Band {
    let (n, p) = (shape.states, shape.inputs);
    let span = |from: usize, to: usize| {
        let inside = entries.iter().filter(|(i, j)| rows.contains(i) && (from..to).contains(j)).map(|(_, j)| j - from);
        let (low, high) = inside.fold((usize::MAX, 0), |(low, high), j| (low.min(j), high.max(j + 1)));
        if high == 0 { 0..0 } else { low..high }
    };
    Band { states: span(0, n), inputs: span(n, n + p), rows }
}

fn columns<'a>(m: &'a Matrix<f32>, range: &Range<usize>) -> View<'a, f32> {
    View::new(m.as_slice().get(range.start..).unwrap_or_default(), m.rows(), range.len(), m.cols())
}

fn part<'a>(m: &'a Matrix<f32>, rows: &Range<usize>, range: &Range<usize>) -> View<'a, f32> {
    let start = rows.start * m.cols() + range.start;
    View::new(m.as_slice().get(start..).unwrap_or_default(), rows.len(), range.len(), m.cols())
}

/// out += a·b.
fn product(out: &mut [f32], stride: usize, a: View<'_, f32>, b: View<'_, f32>) {
    if !a.is_empty() && !b.is_empty() {
        gemm(out, stride, true, 1.0, a, b);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::equilibrium::{Equilibrium, EquilibriumSettings};
    use crate::layout::{Activation, Layer};
    use crate::linalg::Csr;
    use crate::model::ModelParts;
    use crate::random::Random;

    const SAMPLES: usize = 5;

    /// tanh, so that differences see the derivative; `density` may be zero where a layer reads itself or a later one.
    fn model(cyclic: bool, random: &mut Random) -> ImplicitModel {
        let layout =
            Layout::new(vec![Layer::dense("second", 3, Activation::Tanh), Layer::dense("first", 4, Activation::Tanh)]);
        let mut sparse = |rows: usize, cols: usize, size: f64, allowed: &dyn Fn(usize, usize) -> bool| {
            Csr::from_dense(&Matrix::from_fn(rows, cols, |i, j| {
                if allowed(i, j) && random.uniform() < 0.6 { (size * random.normal()) as f32 } else { 0.0 }
            }))
        };
        ImplicitModel::new(ModelParts {
            a: sparse(7, 7, 0.15, &|i, j| cyclic || (i < 3 && j >= 3)),
            b: sparse(7, 6, 0.7, &|_, _| true),
            c: sparse(2, 7, 0.7, &|_, _| true),
            d: sparse(2, 6, 0.7, &|_, _| true),
            state_bias: vec![0.1, 0.0, -0.2, 0.3, 0.0, 0.2, 0.1],
            output_bias: vec![0.4, 0.0],
            layout,
            ..Default::default()
        })
        .unwrap()
    }

    /// z and y in double precision, from the formula: plain iteration until nothing moves.
    fn reference(support: &Support, w: &[f64], u: &[f64]) -> (Vec<f64>, Vec<f64>) {
        let (n, p) = (7, 6);
        let row = |x: &[f64], i: usize| -> f64 {
            let feature = |j: usize| {
                if j < n {
                    x[j]
                } else if j < n + p {
                    u[j - n]
                } else {
                    1.0
                }
            };
            support.entries().iter().zip(w).filter(|((r, _), _)| *r == i).map(|((_, j), w)| w * feature(*j)).sum()
        };
        let mut z = vec![0.0; n];
        for _ in 0..500 {
            let x: Vec<f64> = z.iter().map(|z: &f64| z.tanh()).collect();
            z = (0..n).map(|i| row(&x, i)).collect();
        }
        let x: Vec<f64> = z.iter().map(|z: &f64| z.tanh()).collect();
        (z, (n..n + 2).map(|i| row(&x, i)).collect())
    }

    #[test]
    fn products_match_differences_and_each_other_with_and_without_cycles() {
        for cyclic in [false, true] {
            let mut random = Random::new(11);
            let model = model(cyclic, &mut random);
            let (support, w) = Support::of(&model);
            assert_eq!(support.layered, !cyclic);
            assert_eq!(w.len() as u64, model.sparsity().nonzeros);
            let u = Matrix::from_fn(SAMPLES, 6, |_, _| random.normal() as f32);
            let solution = Equilibrium::new(&model, EquilibriumSettings::default()).unwrap().run(&u).unwrap();
            let gates = gates(model.layout(), &solution);
            let at = Samples { u: &u, x: &solution.x, gates: &gates };
            let change: Vec<f64> = w.iter().map(|_| random.normal()).collect();
            let m = support.dense(&w);
            let (dz, dy) = support.forward(&m, &support.dense(&change), &at);
            let h = 1e-5;
            for s in 0..SAMPLES {
                let input: Vec<f64> = u.row(s).iter().map(|v| f64::from(*v)).collect();
                let moved = |sign: f64| {
                    let w: Vec<f64> = w.iter().zip(&change).map(|(w, c)| w + sign * h * c).collect();
                    reference(&support, &w, &input)
                };
                let (up, down) = (moved(1.0), moved(-1.0));
                for (k, got) in dz.row(s).iter().enumerate() {
                    let expected = (up.0[k] - down.0[k]) / (2.0 * h);
                    assert!((f64::from(*got) - expected).abs() < 1e-4 * expected.abs().max(1.0), "{got} {expected}");
                }
                for (k, got) in dy.row(s).iter().enumerate() {
                    let expected = (up.1[k] - down.1[k]) / (2.0 * h);
                    assert!((f64::from(*got) - expected).abs() < 1e-4 * expected.abs().max(1.0), "{got} {expected}");
                }
            }
            // ⟨v, δy⟩ + ⟨c, δz⟩ is the gradient times the change.
            let v = Matrix::from_fn(SAMPLES, 2, |_, _| random.normal() as f32);
            let c = Matrix::from_fn(SAMPLES, 7, |_, _| random.normal() as f32);
            let gradient = support.backward(&m, &v, &c, &at);
            let pairs = v.as_slice().iter().zip(dy.as_slice()).chain(c.as_slice().iter().zip(dz.as_slice()));
            let expected: f64 = pairs.map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
            let got: f64 = gradient.iter().zip(&change).map(|(g, c)| g * c).sum();
            assert!((got - expected).abs() < 1e-4 * expected.abs().max(1.0), "{got} against {expected}");
        }
    }
}
