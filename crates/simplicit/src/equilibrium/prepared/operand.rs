//! Operands of blocks: read in place, or brought into scratch by poolings, padding and strides.

use super::plan::{View, margin};
use crate::linalg::lanes::Aligned;
use crate::model::{TapBlock, TapWeights};
use crate::network::{FixedMap, Phases};

/// The place that a block reads from.
pub(super) struct Operand {
    pub(super) source: View,
    /// Poolings, whose results go to compact scratch.
    pub(super) maps: Vec<FixedMap>,
    /// Whether the operand itself is first copied to compact scratch.
    pub(super) moved: bool,
    /// The values that are read: a view of the workspace or, if `moved`, of scratch.
    pub(super) view: View,
    /// The phases of a strided operand with its padding, in scratch of their own.
    pub(super) phases: Option<Phases>,
    /// The view of a padded copy in scratch.
    pub(super) padded: Option<View>,
}

impl Operand {
    pub(super) fn new(block: &TapBlock, source: View, lanes: usize) -> Self {
        let same = block.input == source.map;
        let taps = matches!(block.weights, TapWeights::Taps(_));
        // A residual sum of another shape has the same units in the same order; in compact layout they are at the
        // same places.
        let reshaped = !taps && block.input != block.output;
        let moved = !block.maps.is_empty() || !(same && !reshaped || source.is_compact());
        let view = if moved {
            View::compact(block.input)
        } else if same {
            source
        } else {
            View { origin: source.origin, ..View::compact(block.input) }
        };
        let phases = (taps && block.window.stride != [1, 1] && lanes != 16 && block.output.positions() > 1)
            .then(|| Phases::new(block.window, block.input, block.output));
        let needs = margin(block.window, block.input, block.output);
        let padded = (taps && phases.is_none() && (moved || !same) && needs != [0; 4])
            .then(|| View::new(block.input, needs, 0, lanes));
        Self { source, maps: block.maps.clone(), moved, view, phases, padded }
    }

    /// Positions of scratch for the operand, for the inputs of its maps, and for padding.
    pub(super) fn scratch_sizes(&self) -> [usize; 3] {
        let largest = self.maps.iter().map(|m| m.output().map_or(0, |o| o.size())).max().unwrap_or(0);
        let moved = if self.moved { largest.max(self.source.map.size()) } else { 0 };
        let padded = match (&self.phases, &self.padded) {
            (Some(p), _) => p.size(),
            (_, Some(v)) => v.origin + v.channel * v.map.channels,
            _ => 0,
        };
        [moved, if self.maps.is_empty() { 0 } else { moved }, padded]
    }

    /// Brings the operand to the place where the block reads it.
    pub(super) fn fetch(&self, values: &[f32], scratch: &mut [Aligned<f32>; 4], lanes: usize) {
        let [first, second, third, _] = scratch;
        if self.moved {
            let source = self.source;
            let compact = source.is_compact();
            if !compact || self.maps.is_empty() {
                for c in 0..source.map.channels {
                    for y in 0..source.map.height {
                        let from = source.at(c, y) * lanes;
                        let to = (c * source.map.height + y) * source.map.width * lanes;
                        let length = source.map.width * lanes;
                        first[to..to + length].copy_from_slice(&values[from..from + length]);
                    }
                }
            }
            for (k, map) in self.maps.iter().enumerate() {
                let (input, output) = (map.input().size() * lanes, map.output().map_or(0, |o| o.size()) * lanes);
                if k == 0 && compact {
                    let at = source.origin * lanes;
                    map.apply_lanes(&values[at..at + input], &mut first[..output], lanes);
                } else {
                    map.apply_lanes(&first[..input], &mut second[..output], lanes);
                    first[..output].copy_from_slice(&second[..output]);
                }
            }
        }
        let source: &[f32] = if self.moved { first } else { values };
        if let Some(phases) = &self.phases {
            let view = self.view;
            phases.split(&source[view.origin * lanes..], [view.row, view.channel], third, lanes);
        } else if let Some(padded) = &self.padded {
            third[..(padded.origin + padded.channel * padded.map.channels) * lanes].fill(0.0);
            for c in 0..padded.map.channels {
                for y in 0..padded.map.height {
                    let (from, to) = (self.view.at(c, y) * lanes, padded.at(c, y) * lanes);
                    let length = padded.map.width * lanes;
                    third[to..to + length].copy_from_slice(&source[from..from + length]);
                }
            }
        }
    }
}
