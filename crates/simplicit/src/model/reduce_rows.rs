//! [`ImplicitModel::reduce`] for models with shared weights, poolings, residual sums and operators.
//!
//! Here a row of the layout is removed as a whole: a unit of a dense layer, or a channel of a map at all its
//! positions. It is removed if no output depends on it, or if it has the same value for every input and every reader
//! can take that value into its bias. A window that reads padding sees zeros there and the value elsewhere, so
//! through padding only the value zero can be taken. A residual sum ties a row to the row that it is added to, and so
//! does a depthwise convolution: tied rows are removed together or stay. Rows that an operator, or a convolution in
//! larger groups, reads or computes stay. States are not folded into their readers: two convolutions joined to one
//! have more taps than both together.

use std::ops::Range;

use super::bounds::{Interval, IntervalSum, image, require_ranges};
use super::reduce::{Ranges, Reduced, one_value};
use super::{ImplicitModel, Scaling, TapBlock, TapWeights, Target};
use crate::layout::{Layer, Layout, MapShape};
use crate::linalg::Csr;
use crate::network::{FixedMap, Source};
use crate::{Error, Result};

const UNKNOWN: Interval = (f64::NEG_INFINITY, f64::INFINITY);

/// Removes rows until none is left that could go.
pub(super) fn reduce(model: &ImplicitModel, ranges: &Ranges) -> Result<Reduced> {
    let shape = model.shape();
    let inputs = match ranges {
        Ranges::Inputs(inputs) => {
            require_ranges(inputs, shape.inputs)?;
            inputs.clone()
        }
        Ranges::Unknown | Ranges::Observed(_) => vec![UNKNOWN; shape.inputs],
    };
    let mut observed = match ranges {
        Ranges::Observed(z) if z.len() != shape.states => {
            return Err(Error::shape("observed ranges", shape.states, z.len()));
        }
        Ranges::Observed(z) => Some(z.clone()),
        Ranges::Unknown | Ranges::Inputs(_) => None,
    };
    let mut out =
        Reduced { model: model.clone(), unread: vec![], constant: vec![], linear: vec![], unread_inputs: vec![] };
    // The original number of every state that is left.
    let mut states: Vec<usize> = (0..shape.states).collect();
    loop {
        let rows = Rows::of(&out.model);
        let z = match &observed {
            Some(z) => rows.widest(z),
            None => rows.intervals(&inputs),
        };
        let fates = rows.fates(&z);
        if fates.iter().all(|fate| *fate == Fate::Stays) {
            break;
        }
        let mut left = vec![true; states.len()];
        for (fate, units) in fates.iter().zip(&rows.units) {
            let list = match fate {
                Fate::Stays => continue,
                Fate::Unread => &mut out.unread,
                Fate::Constant(_) => &mut out.constant,
            };
            list.extend(units.clone().map(|i| states[i]));
            left[units.clone()].fill(false);
        }
        out.model = rows.without(&fates, &left)?;
        let mut keep = left.iter();
        states.retain(|_| keep.next() == Some(&true));
        if let Some(z) = &mut observed {
            let mut keep = left.iter();
            z.retain(|_| keep.next() == Some(&true));
        }
    }
    out.unread.sort_unstable();
    out.constant.sort_unstable();
    out.unread_inputs = unread_inputs(&out.model);
    Ok(out)
}

/// What happens to a row.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Fate {
    Stays,
    /// No output depends on it.
    Unread,
    /// It has this value, which is added to the biases of its readers.
    Constant(f64),
}

/// A model, seen as rows.
struct Rows<'a> {
    model: &'a ImplicitModel,
    /// The units of every row.
    units: Vec<Range<usize>>,
    /// The layer of every row.
    layers: Vec<usize>,
    /// Everything that is added to a layer or the output; entries of A, B, C and D are included as taps.
    blocks: Vec<TapBlock>,
}

impl<'a> Rows<'a> {
    fn of(model: &'a ImplicitModel) -> Self {
        let layout = model.layout();
        let (mut units, mut layers) = (Vec::new(), Vec::new());
        for (k, layer) in layout.layers().iter().enumerate() {
            let (first, each) = (layout.range(k).start, layer.size / layer.rows().max(1));
            units.extend((0..layer.rows()).map(|i| first + i * each..first + (i + 1) * each));
            layers.extend(std::iter::repeat_n(k, layer.rows()));
        }
        let targets = (0..layout.layers().len()).map(Target::Layer).chain([Target::Output]);
        let blocks = targets.flat_map(|target| model.summands(target)).collect();
        Self { model, units, layers, blocks }
    }

    /// The rows of a layer that one channel of a map over the whole layer covers; none if an operator computes the
    /// layer.
    fn covered(&self, layer: usize, map: MapShape, channel: usize) -> Range<usize> {
        let (rows, size) = (self.model.layout().row_range(layer), self.model.layout().layers()[layer].size);
        if rows.is_empty() {
            return rows;
        }
        let (each, positions) = (size / rows.len(), map.positions());
        let last = ((channel + 1) * positions).div_ceil(each);
        rows.start + channel * positions / each..rows.start + last
    }

    /// The rows that channel c of the operand of a block comes from; none of the inputs.
    fn read(&self, block: &TapBlock, c: usize) -> Range<usize> {
        match block.source {
            Source::Input => 0..0,
            Source::Layer(k) => self.covered(k, block.maps.first().map_or(block.input, |m| m.input()), c),
        }
    }

    /// The rows that channel o of the result of a block is added to; none of the output.
    fn written(&self, block: &TapBlock, o: usize) -> Range<usize> {
        match block.target {
            Target::Output => 0..0,
            Target::Layer(k) => self.covered(k, block.output, o),
        }
    }

    /// Whether what a block adds to a row is the same for all of the row's units; not so for entries that lead to units of a map.
    fn whole(&self, block: &TapBlock) -> bool {
        match block.target {
            Target::Output => true,
            Target::Layer(k) => {
                let layer = &self.model.layout().layers()[k];
                layer.size <= layer.rows() * block.output.positions()
            }
        }
    }

    /// What channel o of a block reads: channels of its operand with their weights.
    fn terms(block: &TapBlock, o: usize) -> Vec<(usize, f64)> {
        match &block.weights {
            TapWeights::Taps(taps) => taps.row(o).map(|(j, v)| (j / block.window.area(), f64::from(v))).collect(),
            TapWeights::Identity => vec![(o, 1.0)],
            TapWeights::Diagonal(factors) => vec![(o, f64::from(factors[o]))],
        }
    }

    /// The interval of z for every row, from those of its units.
    fn widest(&self, z: &[Interval]) -> Vec<Interval> {
        let of = |units: &Range<usize>| {
            let z = &z[units.clone()];
            z.iter().fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), (l, h)| (low.min(*l), high.max(*h)))
        };
        self.units.iter().map(of).collect()
    }

    /// The interval of z for every row, for inputs in their ranges; all numbers where layers read each other.
    fn intervals(&self, inputs: &[Interval]) -> Vec<Interval> {
        let mut z = vec![UNKNOWN; self.units.len()];
        if !self.model.layers_are_acyclic() {
            return z;
        }
        let activations: Vec<_> = self.model.layout().layers().iter().map(|l| l.activation).collect();
        let mut x = z.clone();
        for k in self.model.layer_order() {
            let rows = self.model.layout().row_range(k);
            let mut sums: Vec<IntervalSum> =
                rows.clone().map(|r| IntervalSum::of(self.model.state_bias()[r])).collect();
            for block in self.blocks.iter().filter(|b| b.target == Target::Layer(k)) {
                let read: Vec<Interval> =
                    (0..block.input.channels).map(|c| self.operand(block, c, &x, inputs)).collect();
                for o in 0..block.output.channels {
                    let terms = Self::terms(block, o);
                    for r in self.written(block, o) {
                        terms.iter().for_each(|(c, w)| sums[r - rows.start].add(*w, read[*c]));
                    }
                }
            }
            let in_parts = self.blocks.iter().any(|b| b.target == Target::Layer(k) && !self.whole(b));
            for (r, sum) in rows.zip(sums) {
                z[r] = if in_parts { UNKNOWN } else { sum.interval() };
                x[r] = image(activations[k], z[r]);
            }
        }
        z
    }

    /// The interval of channel c of a block's operand over all positions, padding included.
    fn operand(&self, block: &TapBlock, c: usize, x: &[Interval], inputs: &[Interval]) -> Interval {
        let first = block.maps.first().map_or(block.input, |m| m.input());
        let wide = |all: &[Interval]| {
            all.iter().fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), (l, h)| (low.min(*l), high.max(*h)))
        };
        let (low, high) = match block.source {
            Source::Input => wide(&inputs[c * first.positions()..(c + 1) * first.positions()]),
            Source::Layer(_) => match self.read(block, c) {
                rows if rows.is_empty() => UNKNOWN,
                rows => wide(&x[rows]),
            },
        };
        if keeps_constants(block) { (low, high) } else { (low.min(0.0), high.max(0.0)) }
    }

    /// What happens to every row; at least one row of every layer stays.
    fn fates(&self, z: &[Interval]) -> Vec<Fate> {
        let (fixed, tied) = self.fixed_and_tied();
        let read = self.reaches_outputs(&fixed);
        let mut empty = vec![true; self.units.len()];
        // For every row, whether a reader would see something else than the row's value at some position.
        let mut padded = vec![false; self.units.len()];
        for block in &self.blocks {
            let keeps = keeps_constants(block) && self.whole(block) && matches!(block.weights, TapWeights::Taps(_));
            for o in 0..block.output.channels {
                for (c, _) in Self::terms(block, o) {
                    self.written(block, o).for_each(|r| empty[r] = false);
                    self.read(block, c).for_each(|r| padded[r] |= !keeps);
                }
            }
        }
        let layers = self.model.layout().layers();
        let mut fates: Vec<Fate> = (0..self.units.len())
            .map(|r| {
                let activation = layers[self.layers[r]].activation;
                let own = f64::from(self.model.state_bias()[r]);
                let value = if empty[r] { Some(activation.apply_f64(own)) } else { one_value(activation, z[r]) };
                match value {
                    _ if fixed[r] => Fate::Stays,
                    _ if !read[r] => Fate::Unread,
                    Some(v) if v == 0.0 || !padded[r] => Fate::Constant(v),
                    _ => Fate::Stays,
                }
            })
            .collect();
        // Tied rows are removed together, and a layer keeps at least one row; each of these rules may keep further
        // rows.
        loop {
            let mut staying = vec![false; self.units.len()];
            tied.iter().zip(&fates).filter(|(_, f)| **f == Fate::Stays).for_each(|(tie, _)| staying[*tie] = true);
            for k in 0..layers.len() {
                let rows = self.model.layout().row_range(k);
                if !rows.is_empty() && rows.clone().all(|r| fates[r] != Fate::Stays && !staying[tied[r]]) {
                    staying[tied[rows.start]] = true;
                }
            }
            let mut changed = false;
            for (r, fate) in fates.iter_mut().enumerate() {
                if *fate != Fate::Stays && staying[tied[r]] {
                    *fate = Fate::Stays;
                    changed = true;
                }
            }
            if !changed {
                return fates;
            }
        }
    }

    /// The rows that must stay, and for every row the first row that it is tied to.
    fn fixed_and_tied(&self) -> (Vec<bool>, Vec<usize>) {
        let mut fixed = vec![false; self.units.len()];
        let mut tied: Vec<usize> = (0..self.units.len()).collect();
        for layer in self.model.layout().layers() {
            for operand in layer.operands() {
                if let Source::Layer(k) = operand.source {
                    fixed[self.model.layout().row_range(k)].fill(true);
                }
            }
        }
        for block in &self.blocks {
            let channels = block.input.channels;
            let ties = !matches!(block.weights, TapWeights::Taps(_)) || (block.groups > 1 && block.groups == channels);
            let ties = ties && channels == block.output.channels;
            for c in 0..channels {
                let rows = self.read(block, c);
                // If a channel covers several rows, it would lose only a part.
                if rows.len() > 1 || (block.groups > 1 && !ties) {
                    fixed[rows].fill(true);
                }
            }
            for o in 0..block.output.channels {
                let (into, from) = (self.written(block, o), if ties { self.read(block, o) } else { 0..0 });
                if into.len() > 1 || !self.whole(block) || (block.groups > 1 && !ties) {
                    fixed[into.clone()].fill(true);
                }
                match (ties, from.len(), into.len()) {
                    (false, ..) => {}
                    (true, 1, 1) => {
                        let (a, b) = (tied[from.start], tied[into.start]);
                        tied.iter_mut().filter(|t| **t == a).for_each(|t| *t = b);
                    }
                    // Tied to the inputs, the output or an operator.
                    (true, ..) => from.chain(into).for_each(|r| fixed[r] = true),
                }
            }
            // The block reads the same units in another shape, so that channels do not correspond to rows.
            if !matches!(block.weights, TapWeights::Taps(_)) && channels != block.output.channels {
                (0..channels).for_each(|c| fixed[self.read(block, c)].fill(true));
                (0..block.output.channels).for_each(|o| fixed[self.written(block, o)].fill(true));
            }
        }
        (fixed, tied)
    }

    /// The rows that an output, or a row that must stay, depends on.
    fn reaches_outputs(&self, fixed: &[bool]) -> Vec<bool> {
        let mut readers: Vec<Vec<usize>> = vec![Vec::new(); self.units.len()];
        let mut read = fixed.to_vec();
        for block in &self.blocks {
            for o in 0..block.output.channels {
                let into = self.written(block, o);
                for (c, _) in Self::terms(block, o) {
                    let from = self.read(block, c);
                    match block.target {
                        Target::Output => read[from].fill(true),
                        Target::Layer(_) => into.clone().for_each(|r| readers[r].extend(from.clone())),
                    }
                }
            }
        }
        let mut todo: Vec<usize> = (0..read.len()).filter(|&r| read[r]).collect();
        while let Some(r) = todo.pop() {
            for from in std::mem::take(&mut readers[r]) {
                if !std::mem::replace(&mut read[from], true) {
                    todo.push(from);
                }
            }
        }
        read
    }

    /// The model without the rows that are removed; `left` are the units that stay.
    fn without(&self, fates: &[Fate], left: &[bool]) -> Result<ImplicitModel> {
        let (model, layout) = (self.model, self.model.layout());
        let stays = |r: usize| fates[r] == Fate::Stays;
        let value = |r: usize| if let Fate::Constant(v) = fates[r] { v } else { 0.0 };
        // The biases of rows and of outputs, with the constants added.
        let mut bias: Vec<f64> = model.state_bias().iter().map(|b| f64::from(*b)).collect();
        let mut output_bias: Vec<f64> = model.output_bias().iter().map(|b| f64::from(*b)).collect();
        for block in &self.blocks {
            for o in 0..block.output.channels {
                for (c, w) in Self::terms(block, o) {
                    let more = w * self.read(block, c).next().map_or(0.0, value);
                    if more != 0.0 {
                        self.written(block, o).for_each(|r| bias[r] += more);
                        if block.target == Target::Output {
                            let positions = block.output.positions();
                            output_bias[o * positions..(o + 1) * positions].iter_mut().for_each(|b| *b += more);
                        }
                    }
                }
            }
        }
        let kept: Vec<usize> = (0..left.len()).filter(|&i| left[i]).collect();
        let mut place = vec![0; left.len()];
        kept.iter().enumerate().for_each(|(k, &i)| place[i] = k);
        let outputs: Vec<usize> = (0..model.shape().outputs).collect();
        let from_states = |m: &Csr<f32>, rows: &[usize]| {
            let entries = |i: usize| m.row(i).filter(|(j, _)| left[*j]).map(|(j, v)| (place[j], v)).collect::<Vec<_>>();
            Csr::from_rows(kept.len(), rows.iter().map(|&i| entries(i)))
        };
        let mut parts = model.clone().into_parts();
        (parts.a, parts.c) = (from_states(model.a(), &kept), from_states(model.c(), &outputs));
        parts.b = Csr::from_rows(model.b().cols(), kept.iter().map(|&i| model.b().row(i).collect::<Vec<_>>()));
        parts.taps = model.taps().iter().map(|block| self.narrower(block, &stays)).collect();
        parts.state_bias = (0..fates.len()).filter(|&r| stays(r)).map(|r| bias[r] as f32).collect();
        parts.output_bias = output_bias.into_iter().map(|b| b as f32).collect();
        let layers = layout.layers().iter().enumerate().map(|(k, layer)| {
            let rows = layout.row_range(k).filter(|&r| stays(r)).count();
            match layer.map {
                _ if layer.operator.is_some() => layer.clone(),
                Some(map) => Layer {
                    size: rows * map.positions(),
                    map: Some(MapShape { channels: rows, ..map }),
                    ..layer.clone()
                },
                None => Layer { size: rows, ..layer.clone() },
            }
        });
        parts.layout = Layout::new(layers.collect());
        if let Some(scaling) = parts.metadata.scaling.take() {
            let states = kept.iter().map(|&i| scaling.states[i]).collect();
            parts.metadata.scaling = Some(Scaling { states, ..scaling });
        }
        ImplicitModel::new(parts)
    }

    /// A block without the channels that are removed.
    fn narrower(&self, block: &TapBlock, stays: &impl Fn(usize) -> bool) -> TapBlock {
        let read: Vec<usize> = (0..block.input.channels).filter(|&c| self.read(block, c).all(stays)).collect();
        let written: Vec<usize> = (0..block.output.channels).filter(|&o| self.written(block, o).all(stays)).collect();
        let mut place = vec![None; block.input.channels];
        read.iter().enumerate().for_each(|(k, &c)| place[c] = Some(k));
        let area = block.window.area();
        let weights = match &block.weights {
            TapWeights::Taps(taps) => {
                let entry = |(j, v): (usize, f32)| place[j / area].map(|c: usize| (c * area + j % area, v));
                let rows = written.iter().map(|&o| taps.row(o).filter_map(entry).collect::<Vec<_>>());
                TapWeights::Taps(Csr::from_rows(read.len() * area, rows))
            }
            TapWeights::Identity => TapWeights::Identity,
            TapWeights::Diagonal(factors) => TapWeights::Diagonal(written.iter().map(|&o| factors[o]).collect()),
        };
        let all = read.len() == block.input.channels;
        TapBlock {
            maps: block.maps.iter().map(|map| map.with_channels(read.len())).collect(),
            input: MapShape { channels: read.len(), ..block.input },
            output: MapShape { channels: written.len(), ..block.output },
            // Only in depthwise convolutions may groups lose channels.
            groups: if block.groups > 1 && !all { read.len() } else { block.groups },
            weights,
            ..block.clone()
        }
    }
}

/// Whether a map with the same value at all positions has that value wherever a block reads it.
fn keeps_constants(block: &TapBlock) -> bool {
    let inside = |map: &FixedMap| match map {
        FixedMap::AveragePool { window, count_padding, .. } => !count_padding || window.padding == [0; 4],
        FixedMap::MaxPool { .. } | FixedMap::GlobalAverage { .. } => true,
    };
    block.window.padding == [0; 4] && block.maps.iter().all(inside)
}

/// The inputs that nothing reads; for maps, whole channels of them.
fn unread_inputs(model: &ImplicitModel) -> Vec<usize> {
    let mut read = vec![
        model.layout().layers().iter().flat_map(Layer::operands).any(|o| o.source == Source::Input);
        model.shape().inputs
    ];
    for m in [model.b(), model.d()] {
        m.indices().iter().for_each(|&j| read[j as usize] = true);
    }
    for block in model.taps().iter().filter(|b| b.source == Source::Input) {
        let positions = block.maps.first().map_or(block.input, |m| m.input()).positions();
        for (c, _) in (0..block.output.channels).flat_map(|o| Rows::terms(block, o)) {
            read[c * positions..(c + 1) * positions].fill(true);
        }
    }
    (0..read.len()).filter(|&j| !read[j]).collect()
}
