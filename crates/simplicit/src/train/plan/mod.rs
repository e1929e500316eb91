//! The order in which rows are solved, and their features.

pub(super) mod budget;
pub(super) mod choice;
pub(super) mod connections;
pub(super) mod estimate;
pub(super) mod work;

use std::ops::Range;

use crate::layout::{Layout, MapShape};
use crate::linalg::Csr;
use crate::model::{ImplicitModel, TapBlock, TapWeights, Target};
use crate::network::{Source, Window};
use crate::problem::{Connectivity, Mask};
use crate::states::StateShape;
use crate::{Error, Result};

/// Consecutive features of a group.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Segment {
    /// Single units: columns 0..n are states, n..n+p inputs; ascending.
    Columns(Vec<usize>),
    /// Taps of block number `block`: `columns` of them from column `first` on, those of one group of input channels.
    Taps { block: usize, first: usize, columns: usize },
    /// The constant 1.
    Constant,
}

/// The place where a weight of the model is stored. It takes 32 bits, as the model's own columns do, because during
/// training there is one for every stored weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Place {
    /// A column of (A B) or (C D).
    Column(u32),
    /// A column of a tap block.
    Tap { block: u32, column: u32 },
    /// The vector b or d.
    Constant,
}

/// Rows of the model that share a design. Rows 0..R are the layout's (channels of maps, units of dense layers), R..R+q
/// the outputs. A layer has one group, or one for every group of channels of its convolution; a layer that an operator
/// computes has a group without rows.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Group {
    pub(crate) name: String,
    /// The layer or output that the rows belong to; `None` for all states at once.
    pub(crate) target: Option<Target>,
    pub(crate) rows: Range<usize>,
    /// Number of the first row within its layer.
    pub(crate) first_row: usize,
    /// Whether this is the last group of its layer.
    pub(crate) completes_layer: bool,
    /// The row of (A B) or (C D) that its first row is; rows of maps have none.
    pub(crate) first_unit: usize,
    /// Every feature that some row of the group may use.
    pub(crate) segments: Vec<Segment>,
    /// Which row may use which feature, the constant included.
    pub(crate) allowed: Mask,
    /// Number of samples that one image gives: the positions of a map.
    pub(crate) positions: usize,
    /// Whether the rows keep the baseline's weights, so that nothing is solved.
    pub(crate) kept: bool,
}

/// A group of a plan, by its first row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct GroupId(usize);

impl Group {
    /// The identity of a group that has rows.
    pub(crate) fn id(&self) -> GroupId {
        GroupId(self.rows.start)
    }

    /// The place of every feature's weight, in order.
    pub(crate) fn places(&self) -> Vec<Place> {
        let mut places = Vec::with_capacity(self.allowed.shape().1);
        for segment in &self.segments {
            match segment {
                Segment::Columns(columns) => places.extend(columns.iter().map(|&j| Place::Column(j as u32))),
                Segment::Taps { block, first, columns } => {
                    let tap = |j: usize| Place::Tap { block: *block as u32, column: (first + j) as u32 };
                    places.extend((0..*columns).map(tap));
                }
                Segment::Constant => places.push(Place::Constant),
            }
        }
        places
    }

    /// Number of features.
    pub(crate) fn features(&self) -> usize {
        self.allowed.shape().1
    }

    /// Whether there are rows to solve; not so for an operator, a sum of other layers, and layers that keep their
    /// weights.
    pub(crate) fn is_solved(&self) -> bool {
        self.features() > 0 && !self.kept
    }

    /// Whether statistics are gathered: for rows to solve, and always for the outputs, whose error is measured.
    pub(crate) fn is_measured(&self) -> bool {
        self.is_solved() || self.features() > 0 && self.target == Some(Target::Output)
    }
}

/// The groups of state rows in the order they are solved, whether they form cycles, and the output rows, which come last.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Plan {
    /// Shared weights (without values yet), poolings and residual sums.
    pub(crate) blocks: Vec<TapBlock>,
    pub(crate) states: Vec<Group>,
    pub(crate) outputs: Group,
    pub(crate) cyclic: bool,
    /// Layers, or the outputs, whose groups keep the baseline's weights.
    pub(crate) kept: Vec<Target>,
}

impl Plan {
    /// For rows without shared weights: layer by layer from the first if no layer reads itself or a later one; otherwise
    /// all states at once. Outputs last. The mask has a row per row and a column per state and input.
    pub(crate) fn dense(layout: &Layout, shape: StateShape, mask: &Mask, constant: &[bool]) -> Self {
        let n = shape.states;
        let group = |name: &str, target: Option<Target>, rows: Range<usize>, first_unit: usize| {
            let columns: Vec<usize> =
                (0..n + shape.inputs).filter(|&j| rows.clone().any(|i| mask.allows(i, j))).collect();
            let allowed = |k: usize, c: usize| match columns.get(c) {
                Some(&j) => mask.allows(rows.start + k, j),
                None => constant[rows.start + k],
            };
            let with_constant = rows.clone().any(|i| constant[i]);
            let allowed = Mask::from_fn(rows.len(), columns.len() + usize::from(with_constant), allowed);
            let mut segments = vec![Segment::Columns(columns)];
            segments.extend(with_constant.then_some(Segment::Constant));
            Group {
                name: name.to_string(),
                target,
                rows,
                first_row: 0,
                completes_layer: true,
                first_unit,
                segments,
                allowed,
                positions: 1,
                kept: false,
            }
        };
        let layers = layout.layers();
        let cyclic = (0..layers.len()).any(|k| {
            // Layers up to k come later in the network, because the last layer comes first.
            let later = 0..layout.range(k).end;
            layout.range(k).any(|i| later.clone().any(|j| mask.allows(i, j)))
        });
        let states = if cyclic {
            vec![group("states", None, 0..n, 0)]
        } else {
            let layer =
                |k: usize| group(&layers[k].name, Some(Target::Layer(k)), layout.range(k), layout.range(k).start);
            (0..layers.len()).rev().map(layer).collect()
        };
        let outputs = group("outputs", Some(Target::Output), n..n + shape.outputs, 0);
        Self { blocks: Vec::new(), states, outputs, cyclic, kept: Vec::new() }
    }

    /// For a baseline with shared weights: layer by layer over its own connections and, with `feedforward`, also over
    /// the taps of the `reach` maps before each map.
    pub(crate) fn taps(
        baseline: &ImplicitModel,
        connectivity: &Connectivity,
        reach: usize,
        constant: &[bool],
    ) -> Result<Self> {
        let feedforward = match connectivity {
            Connectivity::Baseline => false,
            Connectivity::Feedforward => true,
            Connectivity::Full | Connectivity::NoSelfLoop | Connectivity::Mask(_) => {
                return Err(Error::setting(
                    "connectivity",
                    "baseline or feedforward for a network with convolutions, whose states are too many for more",
                    match connectivity {
                        Connectivity::Full => "full",
                        Connectivity::NoSelfLoop => "no-self-loop",
                        _ => "mask",
                    },
                ));
            }
        };
        let layout = baseline.layout();
        let mut blocks: Vec<TapBlock> = baseline.taps().iter().map(without_weights).collect();
        if feedforward {
            let more = (0..layout.layers().len()).flat_map(|k| skips(baseline, k, reach)).collect::<Vec<_>>();
            blocks.extend(more);
        }
        let mut states = Vec::new();
        for k in (0..layout.layers().len()).rev() {
            states.extend(tap_groups(baseline, &blocks, Target::Layer(k), feedforward, constant)?);
        }
        let mut outputs = tap_groups(baseline, &blocks, Target::Output, feedforward, constant)?;
        match (outputs.pop(), outputs.is_empty()) {
            (Some(outputs), true) => Ok(Self { blocks, states, outputs, cyclic: false, kept: Vec::new() }),
            _ => Err(Error::unsupported(
                "outputs that are a grouped convolution",
                "let a sum, a pooling or a linear map follow it",
            )),
        }
    }

    /// Groups of these layers, or of the outputs, keep the baseline's weights.
    pub(crate) fn keep(&mut self, kept: Vec<Target>) {
        for group in self.states.iter_mut().chain([&mut self.outputs]) {
            group.kept = group.target.is_some_and(|target| kept.contains(&target));
        }
        self.kept = kept;
    }

    /// All groups, in the order they are solved.
    pub(crate) fn groups(&self) -> impl Iterator<Item = &Group> {
        self.states.iter().chain([&self.outputs])
    }

    /// Whether layers are walked through one by one: because weights are shared, or because operators are in between.
    pub(crate) fn has_taps(&self) -> bool {
        !self.blocks.is_empty() || self.states.iter().any(|g| g.rows.is_empty())
    }
}

fn without_weights(block: &TapBlock) -> TapBlock {
    let weights = match &block.weights {
        TapWeights::Taps(taps) => TapWeights::Taps(Csr::empty(taps.rows(), taps.cols())),
        residual @ (TapWeights::Identity | TapWeights::Diagonal(_)) => residual.clone(),
    };
    TapBlock { weights, ..block.clone() }
}

/// Taps from the `reach` maps before the map of layer k, in addition to those that it reads already. These maps have
/// the same resolution, or one that is finer by a stride that the network uses.
fn skips(baseline: &ImplicitModel, k: usize, reach: usize) -> Vec<TapBlock> {
    let layers = baseline.layout().layers();
    let own: Vec<&TapBlock> = baseline.taps().iter().filter(|b| b.target == Target::Layer(k)).collect();
    let with_taps = own.iter().filter(|b| matches!(b.weights, TapWeights::Taps(_)));
    let (Some(output), Some(main)) = (layers[k].map, with_taps.max_by_key(|b| b.window.area())) else {
        return Vec::new();
    };
    let input = baseline.taps().iter().find(|b| b.source == Source::Input && b.maps.is_empty()).map(|b| b.input);
    // Layers after k in the layout come before it in the network; the input comes before them all.
    let before = (k + 1..layers.len()).map(|j| (Source::Layer(j), layers[j].map)).chain([(Source::Input, input)]);
    let skip = |(source, map): (Source, Option<MapShape>)| {
        let map = map.filter(|m| m.height % output.height == 0 && m.width % output.width == 0)?;
        let reads = own.iter().any(|b| b.source == source && matches!(b.weights, TapWeights::Taps(_)));
        let stride = [map.height / output.height, map.width / output.width];
        let used = stride == [1, 1] || baseline.taps().iter().any(|b| b.window.stride == stride);
        let window = Window { stride, ..main.window };
        let fits = window.output(map).is_ok_and(|size| size == [output.height, output.width]);
        (!reads && used && fits).then(|| TapBlock {
            target: Target::Layer(k),
            source,
            maps: Vec::new(),
            window,
            input: map,
            output,
            groups: 1,
            weights: TapWeights::Taps(Csr::empty(output.channels, map.channels * window.area())),
        })
    };
    before.take(reach).filter_map(skip).collect()
}

/// The groups of one layer, or of the outputs.
fn tap_groups(
    baseline: &ImplicitModel,
    blocks: &[TapBlock],
    target: Target,
    feedforward: bool,
    constant: &[bool],
) -> Result<Vec<Group>> {
    let whole = tap_group(baseline, blocks, target, feedforward, constant)?;
    let mut taps = whole.segments.iter().filter_map(|segment| match segment {
        Segment::Taps { block, .. } => Some(*block),
        _ => None,
    });
    let first = taps.next();
    let several = taps.next().is_some();
    let columns = whole.segments.iter().any(|segment| matches!(segment, Segment::Columns(_)));
    match first.map(|block| &blocks[block]) {
        // Channels share features only with those of their own group. A sum of several blocks is one group: rows that
        // may not use a feature have a mask that forbids it.
        Some(block) if block.groups > 1 && !several && !columns => Ok(split(&whole, block)),
        _ => Ok(vec![whole]),
    }
}

/// One group of rows for every group of channels of a convolution.
fn split(whole: &Group, block: &TapBlock) -> Vec<Group> {
    let each = whole.rows.len() / block.groups;
    (0..block.groups)
        .map(|g| {
            let first_row = g * each;
            let taps = block.group_columns(first_row);
            // The constant, if there is one, comes after the taps.
            let columns: Vec<usize> = taps.clone().chain(block.columns()..whole.features()).collect();
            let mut segments = whole.segments.clone();
            if let Some(Segment::Taps { first, columns, .. }) = segments.first_mut() {
                (*first, *columns) = (taps.start, taps.len());
            }
            Group {
                name: format!("{} [{g}]", whole.name),
                rows: whole.rows.start + first_row..whole.rows.start + first_row + each,
                first_row,
                completes_layer: g + 1 == block.groups,
                first_unit: whole.first_unit + first_row * whole.positions,
                segments,
                allowed: Mask::from_fn(each, columns.len(), |i, j| whole.allowed.allows(first_row + i, columns[j])),
                target: whole.target,
                positions: whole.positions,
                kept: whole.kept,
            }
        })
        .collect()
}

fn tap_group(
    baseline: &ImplicitModel,
    blocks: &[TapBlock],
    target: Target,
    feedforward: bool,
    constant: &[bool],
) -> Result<Group> {
    let (layout, shape) = (baseline.layout(), baseline.shape());
    let n = shape.states;
    let (name, rows, units, map) = match target {
        Target::Layer(k) => {
            let layer = &layout.layers()[k];
            (layer.name.as_str(), layout.row_range(k), layout.range(k), layer.map)
        }
        Target::Output => ("outputs", layout.rows()..layout.rows() + shape.outputs, 0..shape.outputs, None),
    };
    let (from_states, from_inputs) = match target {
        Target::Layer(_) => (baseline.a(), baseline.b()),
        Target::Output => (baseline.c(), baseline.d()),
    };
    let row = |unit: usize| from_states.row(unit).map(|(j, _)| j).chain(from_inputs.row(unit).map(move |(j, _)| n + j));
    let mut is_read = vec![false; n + shape.inputs];
    units.clone().flat_map(row).for_each(|j| is_read[j] = true);
    let columns: Vec<usize> = (0..is_read.len()).filter(|&j| is_read[j]).collect();
    let mut of_maps = blocks.iter().filter(|b| b.target == target && b.output.positions() > 1);
    // The outputs may be a map that a layer computed, but then they have no weights of their own.
    let handed_on = target == Target::Output
        && columns.is_empty()
        && blocks.iter().all(|b| b.target != target || !matches!(b.weights, TapWeights::Taps(_)));
    if map.is_some() && !columns.is_empty() || map.is_none() && !handed_on && of_maps.next().is_some() {
        return Err(Error::unsupported(
            format!("layer {name:?}, a feature map with weights that are not shared over it,"),
            "put an activation between the linear layer and the map",
        ));
    }
    let later = |source: usize| matches!(target, Target::Layer(k) if source <= k);
    let own = |b: &&TapBlock| b.target == target;
    let reads_later = blocks.iter().filter(own).any(|b| matches!(b.source, Source::Layer(j) if later(j)))
        || columns.iter().any(|&j| j < n && layout.layer_of(j).is_some_and(later));
    if reads_later {
        return Err(Error::unsupported(
            format!("layer {name:?} of a baseline with convolutions and cycles"),
            "train from the network itself",
        ));
    }
    let mut allowed: Vec<Vec<bool>> = units
        .clone()
        .take(rows.len())
        .map(|unit| {
            // In ascending order, as the rows of A and then of B.
            let used: Vec<usize> = if map.is_some() { Vec::new() } else { row(unit).collect() };
            columns.iter().map(|j| feedforward || used.binary_search(j).is_ok()).collect()
        })
        .collect();
    let mut segments = Vec::new();
    if !columns.is_empty() {
        segments.push(Segment::Columns(columns));
    }
    for (block, template) in blocks.iter().enumerate().filter(|(_, b)| b.target == target) {
        if let TapWeights::Taps(_) = template.weights {
            segments.push(Segment::Taps { block, first: 0, columns: template.columns() });
            let known = baseline.taps().get(block).map(|b| &b.weights);
            for (channel, allowed) in allowed.iter_mut().enumerate() {
                let own = template.group_columns(channel);
                let mut taps: Vec<bool> = (0..template.columns()).map(|j| feedforward && own.contains(&j)).collect();
                if let Some(TapWeights::Taps(known)) = known {
                    known.row(channel).for_each(|(j, _)| taps[j] = true);
                }
                allowed.extend(taps);
            }
        }
    }
    if rows.clone().any(|i| constant[i]) {
        segments.push(Segment::Constant);
        allowed.iter_mut().zip(rows.clone()).for_each(|(allowed, i)| allowed.push(constant[i]));
    }
    let features = allowed.first().map_or(0, Vec::len);
    Ok(Group {
        name: name.to_string(),
        target: Some(target),
        allowed: Mask::from_fn(rows.len(), features, |i, j| allowed[i][j]),
        rows,
        first_row: 0,
        completes_layer: true,
        first_unit: units.start,
        segments,
        positions: map.map_or(1, MapShape::positions),
        kept: false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::{Activation, Layer};

    #[test]
    fn layers_in_order_when_acyclic_and_at_once_when_not() {
        let relu = Activation::Relu;
        let layout = Layout::new(vec![Layer::dense("second", 2, relu), Layer::dense("first", 3, relu)]);
        let shape = StateShape { inputs: 4, states: 5, outputs: 1 };
        let plan = |c: Connectivity| {
            let mask = c.mask(&layout, 4, 1, None).unwrap();
            Plan::dense(&layout, shape, &mask, &[false, false, true, true, true, false])
        };
        let columns = |group: &Group| match &group.segments[0] {
            Segment::Columns(columns) => columns.clone(),
            other => panic!("{other:?}"),
        };
        let feedforward = plan(Connectivity::Feedforward);
        assert!(!feedforward.cyclic);
        let names: Vec<&str> = feedforward.states.iter().map(|g| g.name.as_str()).collect();
        assert_eq!(names, ["first", "second"]);
        assert_eq!(columns(&feedforward.outputs), (0..9).collect::<Vec<_>>());
        assert_eq!(columns(&feedforward.states[0]), [5, 6, 7, 8]);
        assert_eq!(feedforward.states[0].places()[4], Place::Constant);
        assert_eq!(feedforward.states[0].features(), 5);
        assert_eq!(columns(&feedforward.states[1]), [2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(feedforward.states[1].segments.len(), 1);
        let full = plan(Connectivity::Full);
        assert!(full.cyclic);
        assert_eq!(full.states.len(), 1);
        assert_eq!(full.states[0].rows, 0..5);
    }
}
