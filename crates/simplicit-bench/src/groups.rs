//! The baseline cut into groups of rows that share their features, and models put together from rows again.

use simplicit::equilibrium::{Equilibrium, EquilibriumSettings};
use simplicit::linalg::{Csr, Matrix, View, gemm};
use simplicit::model::ImplicitModel;
use simplicit::parallel::{self, Cancel, Threads};
use simplicit::states::{StateMap, StateShape};
use simplicit::statistics::Statistics;
use simplicit::{Error, Result};

/// Samples taken together.
const BLOCK: usize = 1024;

/// Rows of M = (A B; C D) with the columns that the baseline uses in them; column n + p is the constant.
#[derive(Debug, Clone)]
pub struct Group {
    /// Rows of M: states, then outputs.
    pub rows: Vec<usize>,
    /// Columns of M, ascending.
    pub columns: Vec<usize>,
    /// The baseline's weights, rows × columns.
    pub weights: Matrix,
    /// Position of the constant among the columns: kept by everybody, as the library keeps it.
    pub constant: Option<usize>,
}

impl Group {
    /// Weights that may be removed.
    pub fn removable(&self) -> usize {
        self.rows.len() * (self.columns.len() - usize::from(self.constant.is_some()))
    }
}

/// The groups of a layered baseline, first layer first, outputs last.
pub fn groups(baseline: &ImplicitModel) -> Result<Vec<Group>> {
    let StateShape { inputs, states: n, outputs } = baseline.shape();
    let layout = baseline.layout();
    if !baseline.well_posedness().acyclic {
        return Err(Error::unsupported("a baseline with cycles", "the rivals prune layer by layer; use a network"));
    }
    let ranges = (0..layout.layers().len()).rev().map(|k| layout.range(k)).chain(std::iter::once(n..n + outputs));
    let group = |rows: std::ops::Range<usize>| {
        let mut dense = Matrix::zeros(rows.len(), n + inputs + 1);
        for (k, i) in rows.clone().enumerate() {
            let (a, b, bias, i) = if i < n {
                (baseline.a(), baseline.b(), baseline.state_bias(), i)
            } else {
                (baseline.c(), baseline.d(), baseline.output_bias(), i - n)
            };
            a.row(i).for_each(|(j, v)| dense[(k, j)] = f64::from(v));
            b.row(i).for_each(|(j, v)| dense[(k, n + j)] = f64::from(v));
            dense[(k, n + inputs)] = f64::from(bias[i]);
        }
        let used = |j: &usize| (0..dense.rows()).any(|k| dense[(k, *j)] != 0.0);
        let columns: Vec<usize> = (0..dense.cols()).filter(used).collect();
        let weights = Matrix::from_fn(dense.rows(), columns.len(), |k, c| dense[(k, columns[c])]);
        let constant = columns.iter().position(|&j| j == n + inputs);
        Group { rows: rows.collect(), columns, weights, constant }
    };
    Ok(ranges.map(group).collect())
}

/// The baseline's inputs and states on the training samples, one sample a row.
pub struct Samples {
    shape: StateShape,
    /// Inputs.
    pub u: Matrix<f32>,
    z: Matrix<f32>,
    x: Matrix<f32>,
    y: Matrix<f32>,
}

impl Samples {
    /// Runs the baseline once.
    pub fn new(baseline: &dyn StateMap, u: Matrix<f32>, threads: Threads) -> Result<Self> {
        let shape = baseline.shape();
        let m = u.rows();
        let blocks = parallel::map(threads, m.div_ceil(BLOCK), |b| {
            let block = baseline.states(&rows_of(&u, b)?)?;
            Ok((block.z.cast::<f32>(), block.x.cast::<f32>(), block.y.cast::<f32>()))
        })?;
        let (mut z, mut x, mut y) = (Vec::new(), Vec::new(), Vec::new());
        for (a, b, c) in blocks {
            z.extend(a.into_vec());
            x.extend(b.into_vec());
            y.extend(c.into_vec());
        }
        Ok(Self {
            shape,
            u,
            z: Matrix::from_vec(m, shape.states, z)?,
            x: Matrix::from_vec(m, shape.states, x)?,
            y: Matrix::from_vec(m, shape.outputs, y)?,
        })
    }

    /// The baseline's states.
    pub fn states(&self) -> &Matrix<f32> {
        &self.x
    }

    fn features(&self, group: &Group, x: &Matrix<f32>, rows: std::ops::Range<usize>) -> Matrix {
        let StateShape { inputs, states: n, .. } = self.shape;
        Matrix::from_fn(rows.len(), group.columns.len(), |i, c| match group.columns[c] {
            j if j < n => f64::from(x[(rows.start + i, j)]),
            j if j < n + inputs => f64::from(self.u[(rows.start + i, j - n)]),
            _ => 1.0,
        })
    }

    /// Statistics of a group on the states `x`, the baseline's or a model's own; targets are the baseline's.
    pub fn statistics(&self, group: &Group, x: &Matrix<f32>, threads: Threads, cancel: &Cancel) -> Result<Statistics> {
        let n = self.shape.states;
        let read = |rows: std::ops::Range<usize>| {
            let targets = Matrix::from_fn(rows.len(), group.rows.len(), |i, k| {
                f64::from(match group.rows[k] {
                    row if row < n => self.z[(rows.start + i, row)],
                    row => self.y[(rows.start + i, row - n)],
                })
            });
            Ok((self.features(group, x, rows), targets))
        };
        Statistics::stream(self.u.rows(), threads, cancel, read, |_| {})
    }

    /// Computes the states of a group's rows into `x` from what the group reads there.
    pub fn advance(
        &self,
        group: &Group,
        weights: &[Vec<f64>],
        baseline: &ImplicitModel,
        x: &mut Matrix<f32>,
        threads: Threads,
    ) -> Result<()> {
        let Some(layer) = group.rows.first().and_then(|&i| baseline.layout().layer_of(i)) else { return Ok(()) };
        let activation = baseline.layout().layers()[layer].activation;
        let (m, d, r) = (self.u.rows(), group.columns.len(), group.rows.len());
        let w: Vec<f64> = weights.iter().flatten().copied().collect();
        let blocks = parallel::map(threads, m.div_ceil(BLOCK), |b| {
            let rows = b * BLOCK..((b + 1) * BLOCK).min(m);
            let features = self.features(group, x, rows.clone());
            let mut z = Matrix::zeros(rows.len(), r);
            gemm(z.as_mut_slice(), r, false, 1.0, features.view(), View::new(&w, r, d, d).t());
            Ok(z)
        })?;
        for (b, z) in blocks.iter().enumerate() {
            for i in 0..z.rows() {
                for (k, &row) in group.rows.iter().enumerate() {
                    x[(b * BLOCK + i, row)] = activation.apply(z[(i, k)] as f32);
                }
            }
        }
        Ok(())
    }
}

fn rows_of(u: &Matrix<f32>, block: usize) -> Result<Matrix<f32>> {
    let rows = block * BLOCK..((block + 1) * BLOCK).min(u.rows());
    Matrix::from_vec(rows.len(), u.cols(), u.as_slice()[rows.start * u.cols()..rows.end * u.cols()].to_vec())
}

/// The baseline with other weights: one list of rows per group.
pub fn assemble(baseline: &ImplicitModel, groups: &[Group], weights: &[Vec<Vec<f64>>]) -> Result<ImplicitModel> {
    let StateShape { inputs, states: n, outputs } = baseline.shape();
    let mut rows: Vec<Vec<(usize, f32)>> = vec![Vec::new(); n + outputs];
    for (group, weights) in groups.iter().zip(weights) {
        for (&i, row) in group.rows.iter().zip(weights) {
            let stored = group.columns.iter().zip(row).map(|(&j, &w)| (j, w as f32));
            rows[i] = stored.filter(|(_, w)| *w != 0.0).collect();
        }
    }
    let part = |rows: &[Vec<(usize, f32)>], from: usize, cols: usize| {
        let inside = move |row: &Vec<(usize, f32)>| -> Vec<(usize, f32)> {
            row.iter().filter(|(j, _)| (from..from + cols).contains(j)).map(|(j, v)| (j - from, *v)).collect()
        };
        Csr::from_rows(cols, rows.iter().map(inside))
    };
    let bias = |rows: &[Vec<(usize, f32)>]| -> Vec<f32> {
        rows.iter().map(|row| row.iter().find(|(j, _)| *j == n + inputs).map_or(0.0, |(_, v)| *v)).collect()
    };
    let (top, bottom) = rows.split_at(n);
    let mut parts = baseline.clone().into_parts();
    (parts.a, parts.b) = (part(top, 0, n), part(top, n, inputs));
    (parts.c, parts.d) = (part(bottom, 0, n), part(bottom, n, inputs));
    (parts.state_bias, parts.output_bias) = (bias(top), bias(bottom));
    ImplicitModel::new(parts)
}

/// A model's outputs, one sample a row; not-converged samples count as they come.
pub fn outputs(model: &ImplicitModel, u: &Matrix<f32>, threads: Threads) -> Result<Matrix<f32>> {
    let settings = EquilibriumSettings { threads, ..Default::default() };
    Ok(Equilibrium::new(model, settings)?.outputs(u)?.y)
}
