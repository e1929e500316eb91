//! The part of a model that is swept: all of it, or some layers between values that are given.

use std::ops::Range;

use crate::layout::Layout;

/// The layers that a sweep goes through, the blocks whose weights change, and the columns of values in a batch of
/// samples.
#[derive(Debug, Clone)]
pub(in crate::train) struct Scope {
    /// Swept layers in an order in which they can be computed.
    pub(in crate::train) order: Vec<usize>,
    /// Whether the outputs are computed after them.
    pub(in crate::train) outputs: bool,
    /// The columns of every layer in a batch; none for layers that are neither swept nor read.
    pub(in crate::train) columns: Vec<Range<usize>>,
    /// Number of columns of a batch.
    pub(in crate::train) width: usize,
    /// Layers that are read and not swept: their values are given and do not change.
    pub(in crate::train) given: Vec<usize>,
    /// For every layer in the layout, then the outputs, whether its weights change.
    pub(in crate::train) moved: Vec<bool>,
    /// For every layer, whether it is swept.
    swept: Vec<bool>,
}

impl Scope {
    /// All layers in this order, and the outputs; every weight may change.
    pub(super) fn whole(layout: &Layout, order: Vec<usize>) -> Self {
        let layers = layout.layers().len();
        Self {
            order,
            outputs: true,
            columns: (0..layers).map(|k| layout.range(k)).collect(),
            width: layout.size(),
            given: Vec::new(),
            moved: vec![true; layers + 1],
            swept: vec![true; layers],
        }
    }

    /// The layers of `order`, and the outputs if asked for, which read the layers `given`.
    pub(super) fn part(layout: &Layout, order: Vec<usize>, outputs: bool, given: Vec<usize>, moved: Vec<bool>) -> Self {
        let mut columns = vec![0..0; layout.layers().len()];
        let mut width = 0;
        for &k in given.iter().chain(&order) {
            columns[k] = width..width + layout.range(k).len();
            width = columns[k].end;
        }
        let swept = (0..columns.len()).map(|k| order.contains(&k)).collect();
        Self { order, outputs, columns, width, given, moved, swept }
    }

    /// Whether a sweep computes sum number `s`: a layer, or the outputs after all layers.
    pub(super) fn sweeps(&self, s: usize) -> bool {
        self.swept.get(s).copied().unwrap_or(self.outputs)
    }
}
