//! A model linearised in its weights: the effect of a small change of the non-zeros on every state and output, and
//! the transpose of that map.
//!
//! With z = Ax + Bu + b and Φ = diag φ′(z),
//!
//! δz = (I − AΦ)⁻¹(δA·x + δB·u + δb),  δy = CΦδz + δC·x + δD·u + δd
//!
//! and for cotangents v of y and c of z, r = c + Φ(Cᵀv + Aᵀr), the gradient being r·(x, u, 1)ᵀ and v·(x, u, 1)ᵀ. A
//! tap block is a part of A, B, C or D whose weights are shared: its product and its outer product sum over
//! positions. A layer that an operator computes has the operator's derivative in the place of its row of A. Layers
//! are computed in order. Without cycles one such sweep is exact; with cycles the sweep is repeated until the changes
//! are small.

mod block;
mod scope;
mod with_weights;

use std::ops::Range;

use block::{Block, Columns};
pub(in crate::train) use scope::Scope;

use crate::layout::{Layout, Operator};
use crate::linalg::Matrix;
use crate::model::{ImplicitModel, TapBlock, TapWeights, Target};
use crate::network::Source;
use crate::states::StateShape;

/// The most sweeps of a cyclic model; contraction usually ends them much earlier.
const MAX_SWEEPS: usize = 500;
/// A sweep that changes less than this share of the largest value is the last, because float32 resolves no less.
const SETTLED: f32 = 1e-6;

/// One non-zero of a model.
#[derive(Debug, Clone, Copy)]
pub(in crate::train) struct Entry {
    /// The number of its row: those of the layout come first, then the outputs.
    pub(in crate::train) row: usize,
    /// The number of its feature among those of its target: columns of the blocks one after the other, then the
    /// constant.
    pub(in crate::train) feature: usize,
    /// Whether it is a weight from a state to a state, which the ball limits.
    pub(in crate::train) in_a: bool,
    /// The number of its matrix in a list of weights, and the place in it.
    matrix: usize,
    at: usize,
}

/// The weights of all blocks, then the constants of all targets, as dense matrices.
pub(in crate::train) type Weights = Vec<Matrix<f32>>;

/// The terms that are added up to the pre-activations of a layer, or to the outputs.
struct Sum {
    target: Target,
    /// Its units: states of a layer, or outputs.
    units: Range<usize>,
    /// Its rows, with one constant each, and the number of units that share a row.
    rows: Range<usize>,
    positions: usize,
    /// Its blocks, each with the number of its weights.
    blocks: Vec<(usize, Block)>,
    /// The number of its constants in the list of weights.
    constants: usize,
    /// Whether any of its constants is not zero.
    has_constants: bool,
    operator: Option<Operator>,
}

/// The places of a model's non-zeros, and the order in which its layers are swept.
pub(in crate::train) struct Linearised {
    shape: StateShape,
    ranges: Vec<Range<usize>>,
    /// Target by target as in the layout (outputs last), row by row.
    entries: Vec<Entry>,
    /// Layers as in the layout, then the outputs.
    sums: Vec<Sum>,
    /// Which layers are swept, and which weights change.
    scope: Scope,
    /// The readers of every layer: the sum, and the number of the block there; an operator is one reader.
    readers: Vec<Vec<(usize, usize)>>,
    /// Shapes of the matrices of weights.
    shapes: Vec<(usize, usize)>,
    acyclic: bool,
}

/// Samples with their states at the model.
pub(in crate::train) struct Samples<'a> {
    pub(in crate::train) u: &'a Matrix<f32>,
    pub(in crate::train) x: &'a Matrix<f32>,
    /// φ′(z).
    pub(in crate::train) gates: &'a Matrix<f32>,
}

/// φ′ at every pre-activation.
pub(in crate::train) fn gates(layout: &Layout, z: &Matrix<f32>) -> Matrix<f32> {
    let columns: Vec<Range<usize>> = (0..layout.layers().len()).map(|k| layout.range(k)).collect();
    gates_at(layout, &columns, z.clone())
}

/// φ′ at the pre-activations of layers in these columns; the values are replaced.
pub(in crate::train) fn gates_at(layout: &Layout, columns: &[Range<usize>], z: Matrix<f32>) -> Matrix<f32> {
    let mut gates = z;
    for (layer, range) in layout.layers().iter().zip(columns) {
        for sample in 0..gates.rows() {
            gates.row_mut(sample)[range.clone()].iter_mut().for_each(|z| *z = layer.activation.derivative(*z));
        }
    }
    gates
}

/// The largest change from one sweep to the next, and the largest value, with those of the rows before.
fn change_of(new: &[f32], old: &[f32], (moved, size): (f32, f32)) -> (f32, f32) {
    let moved = new.iter().zip(old).fold(moved, |moved, (new, old)| moved.max((new - old).abs()));
    (moved, new.iter().fold(size, |size, new| size.max(new.abs())))
}

impl Linearised {
    /// The non-zeros of a model and their values.
    pub(in crate::train) fn of(model: &ImplicitModel) -> (Self, Vec<f64>) {
        let (shape, layout) = (model.shape(), model.layout());
        let layers = layout.layers();
        let (mut entries, mut values, mut shapes) = (Vec::new(), Vec::new(), Vec::new());
        let mut sums = Vec::with_capacity(layers.len() + 1);
        for target in (0..layers.len()).map(Target::Layer).chain([Target::Output]) {
            let (units, rows, operator, biases) = match target {
                Target::Layer(k) => {
                    let rows = layout.row_range(k);
                    (layout.range(k), rows.clone(), layers[k].operator.clone(), &model.state_bias()[rows])
                }
                Target::Output => {
                    let rows = layout.rows()..layout.rows() + shape.outputs;
                    (0..shape.outputs, rows, None, model.output_bias())
                }
            };
            let summands = model.summands(target);
            // Entries of A, B, C and D come first, then the model's own blocks in order.
            let own: Vec<usize> = (0..model.taps().len()).filter(|&k| model.taps()[k].target == target).collect();
            let plain = summands.len() - own.len();
            let block =
                |(k, b): (usize, &TapBlock)| (shapes.len() + k, Block::new(b, k.checked_sub(plain).map(|k| own[k])));
            let blocks: Vec<(usize, Block)> = summands.iter().enumerate().map(block).collect();
            for ((_, block), summand) in blocks.iter().zip(&summands) {
                let is_taps = matches!(summand.weights, TapWeights::Taps(_));
                shapes.push((if is_taps { summand.output.channels } else { 0 }, block.columns()));
            }
            // A block over a map whose layer has a row per unit: each channel is at its first unit.
            for row in 0..rows.len() {
                let mut first = 0;
                for ((number, block), summand) in blocks.iter().zip(&summands) {
                    let TapWeights::Taps(taps) = &summand.weights else { continue };
                    let each = rows.len() / taps.rows().max(1);
                    if each > 0 && row % each == 0 && row / each < taps.rows() {
                        let (o, columns) = (row / each, block.columns());
                        for (j, v) in taps.row(o).filter(|(_, v)| *v != 0.0) {
                            let in_a = matches!((target, summand.source), (Target::Layer(_), Source::Layer(_)));
                            let at = o * columns + j - block.first_column(o);
                            let feature = first + j;
                            entries.push(Entry { row: rows.start + row, feature, in_a, matrix: *number, at });
                            values.push(f64::from(v));
                        }
                    }
                    first += block.all_columns();
                }
                if biases[row] != 0.0 {
                    let (row, at, matrix) = (rows.start + row, row, shapes.len());
                    entries.push(Entry { row, feature: first, in_a: false, matrix, at });
                    values.push(f64::from(biases[at]));
                }
            }
            let (positions, constants) = (units.len() / rows.len().max(1), shapes.len());
            shapes.push((rows.len(), 1));
            let has_constants = biases.iter().any(|b| *b != 0.0);
            sums.push(Sum { target, units, rows, positions, blocks, constants, has_constants, operator });
        }
        let mut readers = vec![Vec::new(); layers.len()];
        for (s, sum) in sums.iter().enumerate() {
            for (b, (_, block)) in sum.blocks.iter().enumerate() {
                if let Source::Layer(j) = block.source {
                    readers[j].push((s, b));
                }
            }
            let mut operands: Vec<usize> = sum.operands().filter_map(layer).collect();
            operands.sort_unstable();
            operands.dedup();
            operands.into_iter().for_each(|j| readers[j].push((s, usize::MAX)));
        }
        let acyclic = model.layers_are_acyclic();
        let order = if acyclic { model.layer_order() } else { (0..layers.len()).rev().collect() };
        let ranges = (0..layers.len()).map(|k| layout.range(k)).collect();
        let scope = Scope::whole(layout, order);
        (Self { shape, ranges, entries, sums, scope, readers, shapes, acyclic }, values)
    }

    /// Which layers are swept.
    pub(in crate::train) fn scope(&self) -> &Scope {
        &self.scope
    }

    /// From now on sweeps compute these layers, in this order, and the outputs if asked for; the weights of sums that
    /// are `moved` (layers as in the layout, then the outputs) change. Only for models without cycles.
    pub(in crate::train) fn narrow(&mut self, layout: &Layout, order: Vec<usize>, outputs: bool, moved: Vec<bool>) {
        let own = order.iter().copied().chain(outputs.then_some(self.sums.len() - 1));
        let mut given: Vec<usize> = own.flat_map(|s| self.sums[s].layers_read()).collect();
        given.sort_unstable();
        given.dedup();
        given.retain(|k| !order.contains(k));
        self.scope = Scope::part(layout, order, outputs, given, moved);
    }

    /// For every sum, layers as in the layout and then the outputs, the layers that it reads.
    pub(in crate::train) fn reads(&self) -> Vec<Vec<usize>> {
        self.sums.iter().map(Sum::layers_read).collect()
    }

    /// All non-zeros.
    pub(in crate::train) fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Numbers at the non-zeros as dense matrices in single precision.
    pub(in crate::train) fn dense(&self, values: &[f64]) -> Weights {
        let mut out: Weights = self.shapes.iter().map(|&(rows, cols)| Matrix::zeros(rows, cols)).collect();
        for (entry, &v) in self.entries.iter().zip(values) {
            out[entry.matrix].as_mut_slice()[entry.at] = v as f32;
        }
        out
    }

    /// Numbers at the non-zeros as dense matrices in single precision, those of the sums whose weights change; the others
    /// are empty. Missing numbers are zero.
    pub(in crate::train) fn change(&self, values: &[f64]) -> Weights {
        let mut out: Weights = vec![Matrix::default(); self.shapes.len()];
        for sum in self.moved_sums() {
            for number in sum.matrices() {
                let (rows, cols) = self.shapes[number];
                out[number] = Matrix::zeros(rows, cols);
            }
        }
        for target in self.targets() {
            let numbers = values.get(target.entries.clone()).unwrap_or_default();
            for (entry, &v) in self.entries[target.entries].iter().zip(numbers) {
                out[entry.matrix].as_mut_slice()[entry.at] = v as f32;
            }
        }
        out
    }

    /// The numbers of a target's matrices in a list of weights: those of its blocks, and that of its constants; `None` if
    /// its weights do not change.
    pub(in crate::train) fn places(&self, target: Target) -> Option<(Vec<usize>, usize)> {
        let sum = self.moved_sums().find(|sum| sum.target == target)?;
        Some((sum.blocks.iter().map(|(number, _)| *number).collect(), sum.constants))
    }

    /// The numbers at the non-zeros whose weights change, one after the other.
    pub(in crate::train) fn at_entries(&self, dense: &Weights) -> Vec<f64> {
        let entries = self.targets().into_iter().flat_map(|target| &self.entries[target.entries]);
        entries.map(|entry| f64::from(dense[entry.matrix].as_slice()[entry.at])).collect()
    }

    fn source<'a>(&self, source: Source, states: &'a Matrix<f32>, inputs: &'a Matrix<f32>) -> Columns<'a> {
        match source {
            Source::Input => Columns::new(inputs, 0..self.shape.inputs),
            Source::Layer(j) => Columns::new(states, self.scope.columns[j].clone()),
        }
    }

    /// δz (m × n) and δy (m × q) for a change of the weights; layers that are not swept do not change.
    pub(in crate::train) fn forward(
        &self,
        weights: &Weights,
        change: &Weights,
        at: &Samples,
    ) -> (Matrix<f32>, Matrix<f32>) {
        let (n, samples) = (self.scope.width, at.u.rows());
        let (mut dz, mut dx) = (Matrix::<f32>::zeros(samples, n), Matrix::<f32>::zeros(samples, n));
        // The direct contribution of the change is the same in every sweep.
        let direct = |k: usize| self.direct(k, change, at);
        let kept: Vec<Matrix<f32>> = if self.acyclic { Vec::new() } else { (0..self.sums.len()).map(direct).collect() };
        let begin = |k: usize| kept.get(k).cloned().unwrap_or_else(|| direct(k));
        for _ in 0..MAX_SWEEPS {
            let (mut moved, mut size) = (0.0f32, 0.0f32);
            for &k in &self.scope.order {
                let mut t = begin(k);
                self.carry(&self.sums[k], weights, at, &dx, &mut t);
                let units = self.scope.columns[k].clone();
                for s in 0..samples {
                    let gates = &at.gates.row(s)[units.clone()];
                    let dz = &mut dz.row_mut(s)[units.clone()];
                    let dx = &mut dx.row_mut(s)[units.clone()];
                    if !self.acyclic {
                        (moved, size) = change_of(t.row(s), dz, (moved, size));
                    }
                    dz.copy_from_slice(t.row(s));
                    dx.iter_mut().zip(gates).zip(t.row(s)).for_each(|((dx, g), t)| *dx = g * t);
                }
            }
            if self.acyclic || moved <= SETTLED * size {
                break;
            }
        }
        if !self.scope.outputs {
            return (dz, Matrix::zeros(samples, 0));
        }
        let outputs = self.sums.len() - 1;
        let mut dy = begin(outputs);
        self.carry(&self.sums[outputs], weights, at, &dx, &mut dy);
        (dz, dy)
    }

    /// The change times (x, u, 1) for one sum.
    fn direct(&self, k: usize, change: &Weights, at: &Samples) -> Matrix<f32> {
        let sum = &self.sums[k];
        let mut out = Matrix::zeros(at.u.rows(), sum.units.len());
        if !self.scope.moved[k] {
            return out;
        }
        let constants = change[sum.constants].as_slice();
        if constants.iter().any(|c| *c != 0.0) {
            for s in 0..out.rows() {
                let channels = out.row_mut(s).chunks_exact_mut(sum.positions.max(1)).zip(constants);
                channels.for_each(|(units, c)| units.fill(*c));
            }
        }
        for (number, block) in &sum.blocks {
            if !change[*number].as_slice().is_empty() {
                block.add(&change[*number], self.source(block.source, at.x, at.u), &mut out);
            }
        }
        out
    }

    /// Adds the effect of changes of earlier states to one sum.
    fn carry(&self, sum: &Sum, weights: &Weights, at: &Samples, dx: &Matrix<f32>, out: &mut Matrix<f32>) {
        for (number, block) in &sum.blocks {
            if layer(block.source).is_some_and(|j| self.scope.sweeps(j)) {
                let (x, d) = (self.source(block.source, at.x, at.u), self.source(block.source, dx, at.u));
                block.add_tangent(&weights[*number], x, d, out);
            }
        }
        let Some(operator) = &sum.operator else { return };
        let sources: Vec<Source> = sum.operands().collect();
        let none = Matrix::zeros(1, self.shape.inputs);
        for s in 0..out.rows() {
            let values: Vec<&[f32]> = sources.iter().map(|&f| self.source(f, at.x, at.u).row(s)).collect();
            let changes: Vec<&[f32]> = sources
                .iter()
                .map(|&f| match f {
                    Source::Input => none.row(0),
                    Source::Layer(_) => self.source(f, dx, at.u).row(s),
                })
                .collect();
            operator.tangent(&values, self.own(sum, at.x).row(s), &changes, out.row_mut(s));
        }
    }

    /// The gradient of Σ v·y + c·z over the samples, one number per non-zero whose weight changes.
    pub(in crate::train) fn backward(
        &self,
        weights: &Weights,
        v: &Matrix<f32>,
        c: &Matrix<f32>,
        at: &Samples,
    ) -> Vec<f64> {
        self.outer(&self.adjoint(weights, v, c, at), v, at)
    }

    /// The derivative of Σ v·y + c·z by every pre-activation, including the effect on everything that depends on it.
    pub(in crate::train) fn adjoint(
        &self,
        weights: &Weights,
        v: &Matrix<f32>,
        c: &Matrix<f32>,
        at: &Samples,
    ) -> Matrix<f32> {
        let (n, samples) = (self.scope.width, at.u.rows());
        let mut r = Matrix::<f32>::zeros(samples, n);
        for _ in 0..MAX_SWEEPS {
            let (mut moved, mut size) = (0.0f32, 0.0f32);
            for &k in self.scope.order.iter().rev() {
                let units = self.scope.columns[k].clone();
                let mut t = Matrix::zeros(samples, units.len());
                for &(reader, block) in self.readers[k].iter().filter(|(reader, _)| self.scope.sweeps(*reader)) {
                    self.pull(&self.sums[reader], block, k, weights, (v, &r), at, &mut t);
                }
                for s in 0..samples {
                    let (gates, c) = (&at.gates.row(s)[units.clone()], &c.row(s)[units.clone()]);
                    let (t, r) = (t.row_mut(s), &mut r.row_mut(s)[units.clone()]);
                    t.iter_mut().zip(gates).zip(c).for_each(|((t, g), c)| *t = c + g * *t);
                    if !self.acyclic {
                        (moved, size) = change_of(t, r, (moved, size));
                    }
                    r.copy_from_slice(t);
                }
            }
            if self.acyclic || moved <= SETTLED * size {
                break;
            }
        }
        r
    }

    /// Adds the cotangent that layer `k` receives from one of its readers.
    #[allow(clippy::too_many_arguments)]
    fn pull(
        &self,
        sum: &Sum,
        block: usize,
        k: usize,
        weights: &Weights,
        (v, r): (&Matrix<f32>, &Matrix<f32>),
        at: &Samples,
        out: &mut Matrix<f32>,
    ) {
        let cotangent = self.cotangent(sum, v, r);
        if let Some((number, block)) = sum.blocks.get(block) {
            let x = self.source(block.source, at.x, at.u);
            return block.add_transposed(&weights[*number], x, cotangent, out);
        }
        let Some(operator) = &sum.operator else { return };
        let sources: Vec<Source> = sum.operands().collect();
        for s in 0..out.rows() {
            let values: Vec<&[f32]> = sources.iter().map(|&f| self.source(f, at.x, at.u).row(s)).collect();
            // An operator may read the layer twice; each operand has a buffer of its own.
            let mut buffers: Vec<Option<Vec<f32>>> =
                sources.iter().map(|f| (layer(*f) == Some(k)).then(|| vec![0.0; out.cols()])).collect();
            let mut into: Vec<Option<&mut [f32]>> = buffers.iter_mut().map(|b| b.as_deref_mut()).collect();
            operator.adjoint(&values, self.own(sum, at.x).row(s), cotangent.row(s), &mut into);
            for buffer in buffers.into_iter().flatten() {
                out.row_mut(s).iter_mut().zip(buffer).for_each(|(o, b)| *o += b);
            }
        }
    }

    /// r·(x, u, 1)ᵀ and v·(x, u, 1)ᵀ at the non-zeros whose weights change, one after the other.
    pub(in crate::train) fn outer(&self, r: &Matrix<f32>, v: &Matrix<f32>, at: &Samples) -> Vec<f64> {
        // A segment is a small part of a large model, so matrices of other layers are neither made nor read.
        let mut dense = self.change(&[]);
        for sum in self.moved_sums() {
            let cotangent = self.cotangent(sum, v, r);
            for (number, block) in &sum.blocks {
                if !dense[*number].as_slice().is_empty() {
                    block.add_outer(cotangent, self.source(block.source, at.x, at.u), &mut dense[*number]);
                }
            }
            for s in (0..at.u.rows()).filter(|_| sum.has_constants) {
                let channels = cotangent.row(s).chunks_exact(sum.positions.max(1));
                let constants = dense[sum.constants].as_mut_slice().iter_mut();
                constants.zip(channels).for_each(|(total, units)| *total += units.iter().sum::<f32>());
            }
        }
        self.at_entries(&dense)
    }

    /// Puts numbers for the non-zeros whose weights change at their places among all non-zeros; the others are zero.
    pub(in crate::train) fn spread(&self, changing: &[f64]) -> Vec<f64> {
        let mut out = vec![0.0; self.entries.len()];
        let places = self.targets().into_iter().flat_map(|target| target.entries);
        places.zip(changing).for_each(|(place, v)| out[place] = *v);
        out
    }

    /// Number of non-zeros whose weights change.
    pub(in crate::train) fn changing(&self) -> usize {
        self.targets().iter().map(|target| target.entries.len()).sum()
    }

    /// Adds derivatives by the magnitudes of weights to those by the weights; constants have no magnitude here.
    pub(in crate::train) fn add_signed(&self, weights: &Weights, by_magnitude: &[f64], total: &mut [f64]) {
        let is_constant: Vec<bool> =
            (0..self.shapes.len()).map(|m| self.sums.iter().any(|sum| sum.constants == m)).collect();
        for ((entry, d), t) in self.entries.iter().zip(by_magnitude).zip(total) {
            if !is_constant[entry.matrix] {
                *t += d * f64::from(weights[entry.matrix].as_slice()[entry.at].signum());
            }
        }
    }

    /// The sums whose weights change.
    fn moved_sums(&self) -> impl Iterator<Item = &Sum> {
        self.sums.iter().zip(&self.scope.moved).filter(|(_, moved)| **moved).map(|(sum, _)| sum)
    }

    /// The values of a layer in a batch; the outputs have none.
    fn own<'a>(&self, sum: &Sum, states: &'a Matrix<f32>) -> Columns<'a> {
        match sum.target {
            Target::Layer(k) => Columns::new(states, self.scope.columns[k].clone()),
            Target::Output => Columns::new(states, 0..0),
        }
    }

    /// The part of the cotangents that belongs to a sum.
    fn cotangent<'a>(&self, sum: &Sum, v: &'a Matrix<f32>, r: &'a Matrix<f32>) -> Columns<'a> {
        match sum.target {
            Target::Layer(_) => self.own(sum, r),
            Target::Output => Columns::new(v, sum.units.clone()),
        }
    }

    /// Whether the weight of every entry changes.
    pub(in crate::train) fn moved(&self) -> Vec<bool> {
        let mut moved = Vec::with_capacity(self.entries.len());
        for (sum, changes) in self.sums.iter().zip(&self.scope.moved) {
            let count = self.entries[moved.len()..].iter().take_while(|e| sum.rows.contains(&e.row)).count();
            moved.resize(moved.len() + count, *changes);
        }
        moved
    }

    /// The targets whose weights change and that have entries: for each its entries, number of features, and
    /// positions of a sample.
    pub(in crate::train) fn targets(&self) -> Vec<Features<'_>> {
        let mut first = 0;
        let mut out = Vec::new();
        for (sum, moved) in self.sums.iter().zip(&self.scope.moved) {
            let count = self.entries[first..].iter().take_while(|e| sum.rows.contains(&e.row)).count();
            let width = sum.blocks.iter().map(|(_, b)| b.all_columns()).sum::<usize>() + 1;
            if count > 0 && *moved {
                out.push(Features { of: self, sum, entries: first..first + count, width });
            }
            first += count;
        }
        out
    }
}

/// The features of one target.
pub(in crate::train) struct Features<'a> {
    of: &'a Linearised,
    sum: &'a Sum,
    pub(in crate::train) entries: Range<usize>,
    /// Number of features, the constant included.
    pub(in crate::train) width: usize,
}

impl Features<'_> {
    /// Positions of one sample at which its rows read features.
    pub(in crate::train) fn positions(&self) -> usize {
        self.sum.blocks.iter().map(|(_, b)| b.positions()).max().unwrap_or(1).max(1)
    }

    /// The features of a sample at a position.
    pub(in crate::train) fn at(
        &self,
        u: &Matrix<f32>,
        x: &Matrix<f32>,
        sample: usize,
        position: usize,
        out: &mut [f64],
    ) {
        let mut first = 0;
        for (_, block) in &self.sum.blocks {
            let width = block.all_columns();
            let values = self.of.source(block.source, x, u).row(sample);
            block.features(values, position, &mut out[first..first + width]);
            first += width;
        }
        out[first] = 1.0;
    }
}

impl Sum {
    /// The numbers of its matrices in a list of weights.
    fn matrices(&self) -> impl Iterator<Item = usize> + '_ {
        self.blocks.iter().map(|(number, _)| *number).chain([self.constants])
    }

    fn operands(&self) -> impl Iterator<Item = Source> + '_ {
        self.operator.iter().flat_map(|o| o.operands()).map(|o| o.source)
    }

    /// The layers that it reads; a layer that it reads twice is listed twice.
    fn layers_read(&self) -> Vec<usize> {
        self.blocks.iter().map(|(_, b)| b.source).chain(self.operands()).filter_map(layer).collect()
    }
}

fn layer(source: Source) -> Option<usize> {
    match source {
        Source::Input => None,
        Source::Layer(j) => Some(j),
    }
}

#[cfg(test)]
mod tests;
