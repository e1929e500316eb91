//! A by its shared weights: rows that share one weight, one bias and, when the model is rescaled, one factor.

use std::borrow::Cow;

use super::{ImplicitModel, TapBlock, TapWeights, Target};
use crate::linalg::Csr;
use crate::network::Source;

/// States in groups of neighbours (a channel of a map, a unit of a dense layer), and the norms of A between groups.
pub(super) struct Groups<'a> {
    /// K̄: entry (g, h) is at least the sum of magnitudes with which any state of g reads the states of h. A itself where
    /// every state is a group of its own.
    pub(super) norms: Cow<'a, Csr<f32>>,
    /// The group of every state.
    pub(super) of_state: Vec<usize>,
}

impl<'a> Groups<'a> {
    pub(super) fn new(model: &'a ImplicitModel) -> Self {
        let n = model.shape().states;
        if let Some(plain) = model.without_taps().filter(|_| model.layout().layers().iter().all(|l| l.map.is_none())) {
            let norms = match plain {
                Cow::Borrowed(plain) => Cow::Borrowed(plain.a()),
                Cow::Owned(plain) => Cow::Owned(plain.into_parts().a),
            };
            return Self { norms, of_state: (0..n).collect() };
        }
        let layout = model.layout();
        let each = states_per_group(model);
        let mut of_state = Vec::with_capacity(n);
        let mut count = 0;
        for (layer, each) in layout.layers().iter().zip(&each) {
            of_state.extend((0..layer.size).map(|k| count + k / each));
            count += layer.size / each;
        }
        let mut sums = vec![std::collections::BTreeMap::<usize, f64>::new(); count];
        let mut row = std::collections::BTreeMap::<usize, f64>::new();
        // Summands are added up; within one, the row of a group with the largest sum counts.
        let mut largest = vec![std::collections::BTreeMap::<usize, f64>::new(); count];
        let mut close = |largest: &mut Vec<std::collections::BTreeMap<usize, f64>>| {
            for (into, from) in sums.iter_mut().zip(largest) {
                std::mem::take(from).into_iter().for_each(|(h, v)| *into.entry(h).or_default() += v);
            }
        };
        let raise = |into: &mut std::collections::BTreeMap<usize, f64>,
                     row: &mut std::collections::BTreeMap<usize, f64>| {
            for (h, v) in std::mem::take(row) {
                let entry = into.entry(h).or_default();
                *entry = entry.max(v);
            }
        };
        for i in 0..n {
            for (j, v) in model.a().row(i) {
                *row.entry(of_state[j]).or_default() += f64::from(v).abs();
            }
            raise(&mut largest[of_state[i]], &mut row);
        }
        close(&mut largest);
        for block in model.taps() {
            let (Target::Layer(target), Source::Layer(source)) = (block.target, block.source) else { continue };
            let (into, from) = (layout.range(target).start, layout.range(source).start);
            for o in 0..block.output.channels {
                let group = of_state[into + o * block.output.positions()];
                for_channels(block, o, layout.layers()[source].size, |first, size| {
                    *row.entry(of_state[from + first]).or_default() += size;
                });
                raise(&mut largest[group], &mut row);
            }
            close(&mut largest);
        }
        let norms = sums.into_iter().map(|row| row.into_iter().map(|(h, v)| (h, upwards(v))));
        Self { norms: Cow::Owned(Csr::from_rows(count, norms)), of_state }
    }

    /// One number per state, from one number per group.
    pub(super) fn spread(&self, values: &[f64]) -> Vec<f64> {
        self.of_state.iter().map(|&g| values[g]).collect()
    }
}

/// The nearest f32 that is not below the value.
fn upwards(value: f64) -> f32 {
    let near = value as f32;
    if f64::from(near) < value { near.next_up() } else { near }
}

/// For row o of a block: the first state (within its source) of every channel it reads, and the sum of magnitudes.
fn for_channels(block: &TapBlock, o: usize, source_size: usize, mut visit: impl FnMut(usize, f64)) {
    let each = source_size / block.input.channels.max(1);
    match &block.weights {
        TapWeights::Taps(taps) => {
            taps.row(o).for_each(|(j, v)| visit(j / block.window.area() * each, f64::from(v).abs()));
        }
        // A residual between maps of different shapes reads unit by unit; the group of its first unit is that of all.
        TapWeights::Identity => visit(o * source_size / block.output.channels, 1.0),
        TapWeights::Diagonal(factors) => {
            visit(o * source_size / block.output.channels, f64::from(factors[o]).abs());
        }
    }
}

/// How many neighbouring states of every layer form a group: a channel, or the whole layer if a block reads it with
/// channels other than its own.
fn states_per_group(model: &ImplicitModel) -> Vec<usize> {
    let layers = model.layout().layers();
    let mut each: Vec<usize> = layers.iter().map(|l| (l.size / l.rows().max(1)).max(1)).collect();
    loop {
        let mut changed = false;
        let mut merge = |each: &mut Vec<usize>, layer: usize| {
            let whole = layers[layer].size.max(1);
            changed |= each[layer] != whole;
            each[layer] = whole;
        };
        for block in model.taps() {
            let target = match block.target {
                Target::Layer(k) => Some(k),
                Target::Output => None,
            };
            let source = match block.source {
                Source::Layer(k) => Some(k),
                Source::Input => None,
            };
            let residual = !matches!(block.weights, TapWeights::Taps(_));
            // Number of states of one channel as this block reads them; a residual reads both sides in the same way.
            let below = if residual { block.output.channels } else { block.input.channels };
            if let Some(k) = source.filter(|&k| !each[k].is_multiple_of((layers[k].size / below.max(1)).max(1))) {
                merge(&mut each, k);
            }
            if let Some(k) = target.filter(|&k| !each[k].is_multiple_of(block.output.positions().max(1))) {
                merge(&mut each, k);
            }
            if let (true, Some(s), Some(t)) = (residual, source, target)
                && block.maps.is_empty()
                && each[s] != each[t]
            {
                merge(&mut each, s);
                merge(&mut each, t);
            }
        }
        if !changed {
            return each;
        }
    }
}
