//! One summand of a layer's pre-activation, linear in its operand and in its weights: both products and both transposes,
//! on a batch of samples, one a row.

use std::ops::Range;

use crate::layout::MapShape;
use crate::linalg::{Matrix, View, gemm};
use crate::model::{TapBlock, TapWeights};
use crate::network::{Convolution, FixedMap, Source};

/// Some columns of a batch.
#[derive(Clone, Copy)]
pub(super) struct Columns<'a> {
    of: &'a Matrix<f32>,
    first: usize,
    width: usize,
}

impl<'a> Columns<'a> {
    pub(super) fn new(of: &'a Matrix<f32>, range: Range<usize>) -> Self {
        Self { of, first: range.start, width: range.len() }
    }

    pub(super) fn row(&self, sample: usize) -> &'a [f32] {
        &self.of.row(sample)[self.first..self.first + self.width]
    }

    fn view(&self) -> View<'a, f32> {
        View::new(self.of.as_slice().get(self.first..).unwrap_or_default(), self.of.rows(), self.width, self.of.cols())
    }
}

/// A block of weights between a source and a target, or a residual sum.
pub(super) struct Block {
    pub(super) source: Source,
    /// Its number among the model's tap blocks; none where its weights are entries of A, B, C or D.
    pub(super) tap: Option<usize>,
    maps: Vec<FixedMap>,
    kind: Kind,
}

enum Kind {
    /// Every row reads all units of the operand.
    Dense { columns: usize },
    /// Windows over a map; the geometry of one group of channels.
    Windows { convolution: Convolution, groups: usize },
    /// The operand itself, optionally times one factor per channel; the number says how many positions a channel has.
    Residual(Option<(Vec<f32>, usize)>),
}

impl Block {
    pub(super) fn new(block: &TapBlock, tap: Option<usize>) -> Self {
        let TapBlock { input, output, window, groups, .. } = *block;
        let whole = window.kernel == [input.height, input.width] && window.padding == [0; 4];
        let kind = match &block.weights {
            TapWeights::Identity => Kind::Residual(None),
            TapWeights::Diagonal(factors) => Kind::Residual(Some((factors.clone(), output.positions()))),
            // A window as large as its map: the columns are the map's units in order.
            TapWeights::Taps(_) if whole && output.positions() == 1 && groups == 1 => {
                Kind::Dense { columns: input.size() }
            }
            TapWeights::Taps(_) => {
                let part = |map: MapShape| MapShape { channels: map.channels / groups, ..map };
                let convolution = Convolution { input: part(input), output: part(output), window };
                Kind::Windows { convolution, groups }
            }
        };
        Self { source: block.source, tap, maps: block.maps.clone(), kind }
    }

    /// The first column of the block that a row may use.
    pub(super) fn first_column(&self, row: usize) -> usize {
        match &self.kind {
            Kind::Windows { convolution, .. } => row / convolution.output.channels.max(1) * self.columns(),
            _ => 0,
        }
    }

    /// Number of weights that one row may use: those of its group of channels.
    pub(super) fn columns(&self) -> usize {
        match &self.kind {
            Kind::Dense { columns } => *columns,
            Kind::Windows { convolution, .. } => convolution.input.channels * convolution.window.area(),
            Kind::Residual(_) => 0,
        }
    }

    /// Number of positions of the result that share a row.
    pub(super) fn positions(&self) -> usize {
        match &self.kind {
            Kind::Windows { convolution, .. } => convolution.output.positions(),
            Kind::Dense { .. } | Kind::Residual(_) => 1,
        }
    }

    /// The features of one sample at a position, group after group of channels, from the source's values.
    pub(super) fn features(&self, x: &[f32], position: usize, out: &mut [f64]) {
        let pooled = self.maps.iter().fold(None, |x0: Option<Vec<f32>>, map| {
            let mut out = vec![0.0; size(map)];
            map.apply(x0.as_deref().unwrap_or(x), &mut out);
            Some(out)
        });
        let operand = pooled.as_deref().unwrap_or(x);
        if let Kind::Windows { convolution, .. } = &self.kind {
            let parts = operand.chunks_exact(convolution.input.size()).zip(out.chunks_exact_mut(self.columns().max(1)));
            parts.for_each(|(x, out)| convolution.window_at(x, position, out));
        } else {
            out.iter_mut().zip(operand).for_each(|(o, x)| *o = f64::from(*x));
        }
    }

    /// Number of features of all groups of channels together.
    pub(super) fn all_columns(&self) -> usize {
        match &self.kind {
            Kind::Windows { groups, .. } => groups * self.columns(),
            _ => self.columns(),
        }
    }

    /// out += weights · operand, where the operand comes from the source's values `x`.
    pub(super) fn add(&self, weights: &Matrix<f32>, x: Columns<'_>, out: &mut Matrix<f32>) {
        let mut workspace = Matrix::default();
        self.product(weights, self.operand(x, None, &mut workspace), out);
    }

    /// out += weights · (the change of the operand for a change `d` of the source).
    pub(super) fn add_tangent(&self, weights: &Matrix<f32>, x: Columns<'_>, d: Columns<'_>, out: &mut Matrix<f32>) {
        let mut workspace = Matrix::default();
        self.product(weights, self.operand(x, Some(d), &mut workspace), out);
    }

    /// out += the cotangent of the source, from that of the result.
    pub(super) fn add_transposed(
        &self,
        weights: &Matrix<f32>,
        x: Columns<'_>,
        cotangent: Columns<'_>,
        out: &mut Matrix<f32>,
    ) {
        let Some(last) = self.maps.last() else { return self.transposed_product(weights, cotangent, out) };
        let samples = out.rows();
        let mut back = Matrix::zeros(samples, size(last));
        self.transposed_product(weights, cotangent, &mut back);
        for sample in 0..samples {
            // The inputs of every pooling, then backwards through the poolings.
            let mut values: Vec<Vec<f32>> = vec![x.row(sample).to_vec()];
            for map in &self.maps[..self.maps.len() - 1] {
                let mut next = vec![0.0; size(map)];
                values.last().into_iter().for_each(|x| map.apply(x, &mut next));
                values.push(next);
            }
            let mut d = back.row(sample).to_vec();
            for (map, x) in self.maps.iter().zip(&values).rev() {
                let mut before = vec![0.0; x.len()];
                map.pull_back(x, &d, &mut before);
                d = before;
            }
            out.row_mut(sample).iter_mut().zip(d).for_each(|(o, d)| *o += d);
        }
    }

    /// gradient += the derivative by the weights, from the cotangent of the result.
    pub(super) fn add_outer(&self, cotangent: Columns<'_>, x: Columns<'_>, gradient: &mut Matrix<f32>) {
        let mut workspace = Matrix::default();
        let operand = self.operand(x, None, &mut workspace);
        let stride = gradient.cols();
        match &self.kind {
            Kind::Dense { .. } => {
                if !gradient.as_slice().is_empty() && operand.of.rows() > 0 {
                    gemm(gradient.as_mut_slice(), stride, true, 1.0, cotangent.view().t(), operand.view());
                }
            }
            Kind::Windows { convolution, .. } => {
                let mut scratch = Vec::new();
                for sample in 0..operand.of.rows() {
                    let parts = gradient.as_mut_slice().chunks_exact_mut(convolution.output.channels * stride);
                    let x = operand.row(sample).chunks_exact(convolution.input.size());
                    let dout = cotangent.row(sample).chunks_exact(convolution.output.size());
                    for ((gradient, x), dout) in parts.zip(x).zip(dout) {
                        convolution.add_outer(x, dout, &mut scratch, gradient);
                    }
                }
            }
            Kind::Residual(_) => {}
        }
    }

    /// The operand after the poolings or, with `d`, its change.
    fn operand<'a>(&self, x: Columns<'a>, d: Option<Columns<'a>>, workspace: &'a mut Matrix<f32>) -> Columns<'a> {
        let Some(last) = self.maps.last() else { return d.unwrap_or(x) };
        *workspace = Matrix::zeros(x.of.rows(), size(last));
        for sample in 0..x.of.rows() {
            let (mut value, mut change) = (x.row(sample).to_vec(), d.map(|d| d.row(sample).to_vec()));
            for map in &self.maps {
                let mut next = vec![0.0; size(map)];
                if let Some(change) = &mut change {
                    let mut out = vec![0.0; size(map)];
                    map.tangent(&value, change, &mut out);
                    *change = out;
                }
                map.apply(&value, &mut next);
                value = next;
            }
            workspace.row_mut(sample).copy_from_slice(change.as_deref().unwrap_or(&value));
        }
        let width = workspace.cols();
        Columns::new(workspace, 0..width)
    }

    fn product(&self, weights: &Matrix<f32>, operand: Columns<'_>, out: &mut Matrix<f32>) {
        let samples = out.rows();
        match &self.kind {
            Kind::Dense { columns } => {
                let stride = out.cols();
                if samples * stride * columns > 0 {
                    gemm(out.as_mut_slice(), stride, true, 1.0, operand.view(), weights.view().t());
                }
            }
            Kind::Windows { convolution, groups } => {
                let mut workspaces: Vec<_> = parts(weights, *groups).map(|w| convolution.workspace(&w)).collect();
                for sample in 0..samples {
                    let x = operand.row(sample).chunks_exact(convolution.input.size());
                    let out = out.row_mut(sample).chunks_exact_mut(convolution.output.size());
                    for ((x, out), workspace) in x.zip(out).zip(&mut workspaces) {
                        convolution.add(x, workspace, out);
                    }
                }
            }
            Kind::Residual(factors) => {
                for sample in 0..samples {
                    add_residual(out.row_mut(sample), operand.row(sample), factors.as_ref());
                }
            }
        }
    }

    fn transposed_product(&self, weights: &Matrix<f32>, cotangent: Columns<'_>, out: &mut Matrix<f32>) {
        let samples = out.rows();
        match &self.kind {
            Kind::Dense { columns } => {
                let stride = out.cols();
                if samples * columns * weights.rows() > 0 {
                    gemm(out.as_mut_slice(), stride, true, 1.0, cotangent.view(), weights.view());
                }
            }
            Kind::Windows { convolution, groups } => {
                let mut workspaces: Vec<_> = parts(weights, *groups)
                    .map(|w| {
                        let workspace = convolution.back_room(&w);
                        (w, workspace)
                    })
                    .collect();
                for sample in 0..samples {
                    let dout = cotangent.row(sample).chunks_exact(convolution.output.size());
                    let dx = out.row_mut(sample).chunks_exact_mut(convolution.input.size());
                    for ((dout, dx), (weights, workspace)) in dout.zip(dx).zip(&mut workspaces) {
                        convolution.pull_back(weights, dout, workspace, dx);
                    }
                }
            }
            Kind::Residual(factors) => {
                for sample in 0..samples {
                    add_residual(out.row_mut(sample), cotangent.row(sample), factors.as_ref());
                }
            }
        }
    }
}

fn size(map: &FixedMap) -> usize {
    // The shapes were checked with the model.
    map.output().map_or(0, |o| o.size())
}

/// The weights of every group of channels.
fn parts(weights: &Matrix<f32>, groups: usize) -> impl Iterator<Item = Matrix<f32>> {
    let rows = weights.rows() / groups.max(1);
    (0..groups).map(move |g| Matrix::from_fn(rows, weights.cols(), |i, j| weights[(g * rows + i, j)]))
}

fn add_residual(out: &mut [f32], x: &[f32], factors: Option<&(Vec<f32>, usize)>) {
    match factors {
        None => out.iter_mut().zip(x).for_each(|(o, x)| *o += x),
        Some((factors, positions)) => {
            let channels = out.chunks_exact_mut(*positions).zip(x.chunks_exact(*positions)).zip(factors);
            for ((out, x), factor) in channels {
                out.iter_mut().zip(x).for_each(|(o, x)| *o += factor * x);
            }
        }
    }
}
