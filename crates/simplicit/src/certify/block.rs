//! Linear maps between values, many values side by side: forwards, with magnitudes of the weights, and transposed.

use crate::equilibrium::Packing;
use crate::linalg::{Csr, Stencil, vectorised};
use crate::model::{TapBlock, TapWeights};

/// A linear map from the values of one node to those of another. Values are units × lanes.
pub(super) enum Linear {
    /// Weights, shared over positions or not.
    Weights(Box<Weights>),
    /// Every result is one value times a factor, or nothing.
    Select(Select),
}

pub(super) struct Weights {
    /// Where the operand is padded or strided.
    packing: Option<Packing>,
    /// Values of the source.
    input: usize,
    packed: usize,
    packed_cotangent: usize,
    forward: Stencil,
    magnitudes: Stencil,
    /// The weights that are there, each one.
    pattern: Stencil,
    /// By groups of results, whose sums are added up in double precision: a sum of few products rounds little.
    transposed: Vec<Stencil>,
    row_terms: usize,
    column_terms: usize,
}

/// Roundings of a product behind its group's sum: to single precision, and when it joins the coefficient.
const AFTER_GROUP: usize = 3;

pub(super) struct Select {
    /// Per result: unit of the source, or `NONE`.
    pub(super) from: Vec<u32>,
    /// Per result.
    pub(super) factor: Vec<f32>,
    /// Most results that read one unit.
    column_terms: usize,
}

/// No unit.
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
    /// The weights of a block, without its poolings; a group of the transpose sums about `group` products.
    pub(super) fn of_block(block: &TapBlock, group: usize) -> Self {
        let TapWeights::Taps(taps) = &block.weights else {
            let size = block.output.size();
            let factor = (0..size).map(|unit| block.unit_factor(unit)).collect();
            return Linear::Select(Select::new((0..size as u32).collect(), factor, size));
        };
        let packing = Packing::new(block.input, block.window, block.output);
        let area = block.window.area();
        let groups = groups(taps, (group / area).max(1));
        let terms = |part: &Csr<f32>| {
            let mut per_channel = vec![0usize; block.input.channels];
            part.indices().iter().for_each(|&j| per_channel[j as usize / area] += 1);
            per_channel.into_iter().max().unwrap_or(0)
        };
        let plain = packing.is_plain() && block.window.area() == 1;
        Linear::Weights(Box::new(Weights {
            input: block.input.size(),
            packed: packing.size(),
            packed_cotangent: packing.cotangent_size(block.output.channels),
            forward: packing.stencil(taps),
            magnitudes: packing.stencil(&with(taps, f32::abs)),
            pattern: packing.stencil(&with(taps, |_| 1.0)),
            column_terms: groups.iter().map(terms).max().unwrap_or(0) + AFTER_GROUP,
            transposed: groups.iter().map(|part| packing.transposed(part)).collect(),
            packing: (!plain).then_some(packing),
            row_terms: longest(taps),
        }))
    }

    /// A matrix, results × units of the source; groups as of a block.
    pub(super) fn of_entries(entries: &Csr<f32>, group: usize) -> Self {
        let stencil = |m: &Csr<f32>| Stencil::new([1, 1], 1, (0..m.rows()).map(|i| m.row(i).collect::<Vec<_>>()));
        let groups: Vec<Csr<f32>> = groups(entries, group).iter().map(Csr::transposed).collect();
        Linear::Weights(Box::new(Weights {
            packing: None,
            input: entries.cols(),
            packed: 0,
            packed_cotangent: 0,
            forward: stencil(entries),
            magnitudes: stencil(&with(entries, f32::abs)),
            pattern: stencil(&with(entries, |_| 1.0)),
            column_terms: groups.iter().map(longest).max().unwrap_or(0) + AFTER_GROUP,
            transposed: groups.iter().map(stencil).collect(),
            row_terms: longest(entries),
        }))
    }

    /// Most products that one result sums.
    pub(super) fn row_terms(&self) -> usize {
        match self {
            Linear::Weights(w) => w.row_terms,
            Linear::Select(_) => 1,
        }
    }

    /// Most roundings of a product on its way into the transpose's sum for one unit of the source.
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
    pub(super) fn forward(&self, x: &[f32], out: &mut [f32], lanes: usize, room: &mut Packed) {
        match self {
            Linear::Weights(w) => w.apply(&w.forward, x, out, lanes, room),
            Linear::Select(s) => s.forward(x, out, lanes, |f| f),
        }
    }

    /// `out += |map|(x)`, with the magnitudes of the weights.
    pub(super) fn magnitudes(&self, x: &[f32], out: &mut [f32], lanes: usize, room: &mut Packed) {
        match self {
            Linear::Weights(w) => w.apply(&w.magnitudes, x, out, lanes, room),
            Linear::Select(s) => s.forward(x, out, lanes, f32::abs),
        }
    }

    /// `out += ` the number of products that are not known to be zero, `live` being one where a value is not.
    pub(super) fn count(&self, live: &[f32], out: &mut [f32], room: &mut Packed) {
        match self {
            Linear::Weights(w) => w.apply(&w.pattern, live, out, 1, room),
            Linear::Select(s) => s.forward(live, out, 1, |_| 1.0),
        }
    }

    /// `dx += mapᵀ(dout)`.
    pub(super) fn transposed(&self, dout: &[f32], dx: &mut [f32], lanes: usize, room: &mut Packed) {
        match self {
            Linear::Weights(w) => match &w.packing {
                None => w.add_groups(dx, dout, lanes, &mut room.partial, &mut room.sums),
                Some(packing) => {
                    let above = sized(&mut room.above, w.packed_cotangent * lanes);
                    packing.pack_cotangent(dout, above, lanes);
                    let below = sized(&mut room.below, w.packed * lanes);
                    below.fill(0.0);
                    w.add_groups(below, above, lanes, &mut room.partial, &mut room.sums);
                    packing.unpack_add(below, dx, lanes);
                }
            },
            Linear::Select(s) => {
                for ((&from, &factor), dout) in s.from.iter().zip(&s.factor).zip(dout.chunks_exact(lanes)) {
                    if from != NONE {
                        let dx = &mut dx[from as usize * lanes..][..lanes];
                        dx.iter_mut().zip(dout).for_each(|(dx, d)| *dx += factor * d);
                    }
                }
            }
        }
    }
}

impl Weights {
    /// Adds every group's sums, and then the sum of these.
    fn add_groups(&self, into: &mut [f32], source: &[f32], lanes: usize, partial: &mut Vec<f32>, sums: &mut Vec<f64>) {
        let partial = sized(partial, into.len());
        sums.clear();
        sums.resize(into.len(), 0.0);
        for group in &self.transposed {
            partial.fill(0.0);
            group.accumulate(partial, source, lanes);
            vectorised(
                #[inline(always)]
                || sums.iter_mut().zip(partial.iter()).for_each(|(s, p)| *s += f64::from(*p)),
            );
        }
        into.iter_mut().zip(sums.iter()).for_each(|(i, s)| *i += *s as f32);
    }

    fn apply(&self, stencil: &Stencil, x: &[f32], out: &mut [f32], lanes: usize, room: &mut Packed) {
        match &self.packing {
            None => stencil.accumulate(out, &x[..self.input * lanes], lanes),
            Some(packing) => {
                let below = sized(&mut room.below, self.packed * lanes);
                packing.pack(x, below, lanes);
                stencil.accumulate(out, below, lanes);
            }
        }
    }
}

impl Select {
    fn forward(&self, x: &[f32], out: &mut [f32], lanes: usize, part: impl Fn(f32) -> f32) {
        for ((&from, &factor), out) in self.from.iter().zip(&self.factor).zip(out.chunks_exact_mut(lanes)) {
            if from != NONE {
                let (factor, x) = (part(factor), &x[from as usize * lanes..][..lanes]);
                out.iter_mut().zip(x).for_each(|(out, x)| *out += factor * x);
            }
        }
    }
}

/// Room for padded operands.
#[derive(Default)]
pub(super) struct Packed {
    above: Vec<f32>,
    below: Vec<f32>,
    partial: Vec<f32>,
    sums: Vec<f64>,
}

fn sized(room: &mut Vec<f32>, size: usize) -> &mut [f32] {
    if room.len() < size {
        room.resize(size, 0.0);
    }
    &mut room[..size]
}

fn with(m: &Csr<f32>, part: impl Fn(f32) -> f32) -> Csr<f32> {
    Csr::from_rows(m.cols(), (0..m.rows()).map(|i| m.row(i).map(|(j, w)| (j, part(w))).collect::<Vec<_>>()))
}

/// So many rows each, the others empty.
fn groups(m: &Csr<f32>, rows: usize) -> Vec<Csr<f32>> {
    let part = |first: usize| {
        let own = |i: usize| if (first..first + rows).contains(&i) { m.row(i).collect() } else { Vec::new() };
        Csr::from_rows(m.cols(), (0..m.rows()).map(own))
    };
    (0..m.rows()).step_by(rows).map(part).collect()
}

fn longest(m: &Csr<f32>) -> usize {
    m.indptr().windows(2).map(|p| p[1] - p[0]).max().unwrap_or(0)
}
