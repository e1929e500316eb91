//! Linear maps between values: of boxes, of many values side by side, and transposed.

use super::backwards::{Backwards, Rows, Workspace};
use super::boxes::Bounds;
use super::sums::{Products, Sums};
use crate::equilibrium::Packing;
use crate::linalg::{Csr, Stencil, vectorised};
use crate::model::{TapBlock, TapWeights};

/// A linear map from the values of one node to those of another. Values are units × lanes.
pub(super) enum Linear {
    /// Weights, shared over positions or not.
    Weights(Box<Weights>),
    /// Every result is one value times a factor, or zero.
    Select(Select),
}

pub(super) struct Weights {
    /// How the operand is laid out, if it is padded or strided.
    packing: Option<Packing>,
    /// Number of values of the source.
    input: usize,
    packed: usize,
    forward: Stencil,
    products: Products,
    backwards: Backwards,
    row_terms: usize,
    column_terms: usize,
}

/// Roundings of a product after the sum of its group: to single precision, and when it is added to the coefficient.
const AFTER_GROUP: usize = 3;

pub(super) struct Select {
    /// For every result the unit of the source that it reads, or `NONE`.
    pub(super) from: Vec<u32>,
    /// For every result its factor.
    pub(super) factor: Vec<f32>,
    /// The most results that read one unit.
    column_terms: usize,
}

/// Stands for no unit.
pub(super) const NONE: u32 = u32::MAX;

impl Select {
    pub(super) fn new(from: Vec<u32>, factor: Vec<f32>, source: usize) -> Self {
        let mut reads = vec![0usize; source];
        from.iter().filter(|&&j| j != NONE).for_each(|&j| reads[j as usize] += 1);
        let column_terms = reads.into_iter().max().unwrap_or(0);
        Self { from, factor, column_terms }
    }
}

impl Linear {
    /// The weights of a block, without its poolings; sums of more than `group` products of the transpose go on in double precision.
    pub(super) fn of_block(block: &TapBlock, group: usize) -> Self {
        let TapWeights::Taps(taps) = &block.weights else {
            let size = block.output.size();
            let factor = (0..size).map(|unit| block.unit_factor(unit)).collect();
            return Linear::Select(Select::new((0..size as u32).collect(), factor, size));
        };
        let packing = Packing::new(block.input, block.window, block.output);
        let backwards = Backwards::of_block(block, taps, group);
        let plain = packing.is_plain() && block.window.area() == 1;
        Linear::Weights(Box::new(Weights {
            input: block.input.size(),
            packed: packing.size(),
            forward: packing.stencil(taps),
            products: Products::of_block(block, taps),
            column_terms: backwards.group_terms() + AFTER_GROUP,
            backwards,
            packing: (!plain).then_some(packing),
            row_terms: longest(taps),
        }))
    }

    /// A matrix, results × units of the source; `group` as for a block.
    pub(super) fn of_entries(entries: &Csr<f32>, group: usize) -> Self {
        let stencil = |m: &Csr<f32>| Stencil::new([1, 1], 1, (0..m.rows()).map(|i| m.row(i).collect::<Vec<_>>()));
        let backwards = Backwards::of_entries(entries, group);
        Linear::Weights(Box::new(Weights {
            packing: None,
            input: entries.cols(),
            packed: 0,
            forward: stencil(entries),
            products: Products::Rows(entries.clone()),
            column_terms: backwards.group_terms() + AFTER_GROUP,
            backwards,
            row_terms: longest(entries),
        }))
    }

    /// The most products that one result sums.
    pub(super) fn row_terms(&self) -> usize {
        match self {
            Linear::Weights(w) => w.row_terms,
            Linear::Select(_) => 1,
        }
    }

    /// The most roundings of a product on its way into the transpose's sum for one unit of the source.
    pub(super) fn column_terms(&self) -> usize {
        match self {
            Linear::Weights(w) => w.column_terms,
            Linear::Select(s) => s.column_terms,
        }
    }

    /// Multiply-adds of one application, of `size` results.
    pub(super) fn multiply_adds(&self, size: usize) -> u64 {
        (size * self.row_terms()) as u64
    }

    /// `out += map(x)`.
    pub(super) fn forward(&self, x: &[f32], out: &mut [f32], lanes: usize, workspace: &mut Packed) {
        match self {
            Linear::Weights(w) => w.forward(x, out, lanes, workspace),
            Linear::Select(s) => s.forward(x, out, lanes),
        }
    }

    /// Adds the products of the map with values in boxes, in the order of a run.
    pub(super) fn add_to(&self, from: &Bounds, sums: &mut Sums) {
        match self {
            Linear::Weights(w) => w.products.add_to(from, sums),
            Linear::Select(s) => {
                for (unit, (&source, &factor)) in s.from.iter().zip(&s.factor).enumerate() {
                    if source != NONE {
                        sums.add(unit, factor, from, source as usize);
                    }
                }
            }
        }
    }

    /// `into += mapᵀ(from)`; units of the source that are `dead` are left out.
    pub(super) fn transposed(&self, from: &Rows, into: &mut Rows, dead: &[bool], workspace: &mut Packed) {
        match self {
            Linear::Weights(w) => w.backwards.add(from, into, dead, &mut workspace.rows),
            Linear::Select(s) => vectorised(
                #[inline(always)]
                || {
                    from.each(|i, row| {
                        if s.from[i] != NONE {
                            let into = into.row(s.from[i] as usize);
                            into.iter_mut().zip(row).for_each(|(into, v)| *into += s.factor[i] * v);
                        }
                    });
                },
            ),
        }
    }
}

impl Weights {
    fn forward(&self, x: &[f32], out: &mut [f32], lanes: usize, workspace: &mut Packed) {
        match &self.packing {
            None => self.forward.accumulate(out, &x[..self.input * lanes], lanes),
            Some(packing) => {
                let below = sized(&mut workspace.below, self.packed * lanes);
                packing.pack(x, below, lanes);
                self.forward.accumulate(out, below, lanes);
            }
        }
    }
}

impl Select {
    fn forward(&self, x: &[f32], out: &mut [f32], lanes: usize) {
        for ((&from, &factor), out) in self.from.iter().zip(&self.factor).zip(out.chunks_exact_mut(lanes)) {
            if from != NONE {
                let x = &x[from as usize * lanes..][..lanes];
                out.iter_mut().zip(x).for_each(|(out, x)| *out += factor * x);
            }
        }
    }
}

/// Memory for padded operands.
#[derive(Default)]
pub(super) struct Packed {
    below: Vec<f32>,
    rows: Workspace,
}

fn sized(workspace: &mut Vec<f32>, size: usize) -> &mut [f32] {
    if workspace.len() < size {
        workspace.resize(size, 0.0);
    }
    &mut workspace[..size]
}

fn longest(m: &Csr<f32>) -> usize {
    m.indptr().windows(2).map(|p| p[1] - p[0]).max().unwrap_or(0)
}
