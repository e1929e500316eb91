//! Where everything lies: maps with their padding, and every block as offsets into them.

use crate::kernels::{Cost, Grid, GridWeights, Instructions};
use crate::layout::MapShape;
use crate::linalg::Csr;
use crate::linalg::lanes::{from_lanes, to_lanes};
use crate::model::TapBlock;
use crate::network::{Phases, Window};

/// A map inside a workspace, in positions: `margin` rows and columns of zeros around it that nobody writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct View {
    pub(super) map: MapShape,
    /// The first value of the first channel.
    pub(super) origin: usize,
    pub(super) row: usize,
    pub(super) channel: usize,
}

impl View {
    /// A map with this margin (top, left, bottom, right) that starts at `start`.
    pub(super) fn new(map: MapShape, margin: [usize; 4], start: usize, lanes: usize) -> Self {
        let row = map.width + margin[1] + margin[3];
        let mut channel = row * (map.height + margin[0] + margin[2]);
        // Channels whose distance is a multiple of a kilobyte fight for the same places of the first-level cache.
        if map.channels > 4 && (channel * lanes * 4).is_multiple_of(1024) && channel > 1 {
            channel += 1 + 15 / lanes;
        }
        Self { map, origin: start + margin[0] * row + margin[1], row, channel }
    }

    /// Without margin or gaps.
    pub(super) fn compact(map: MapShape) -> Self {
        Self { map, origin: 0, row: map.width, channel: map.positions() }
    }

    pub(super) fn is_compact(&self) -> bool {
        self.row == self.map.width && (self.channel == self.map.positions() || self.map.channels == 1)
    }

    /// The place of a value.
    pub(super) fn at(&self, channel: usize, y: usize) -> usize {
        self.origin + channel * self.channel + y * self.row
    }

    /// The place of a unit; runs of a row of the map stay together.
    pub(super) fn unit(&self, unit: usize) -> usize {
        let (width, positions) = (self.map.width.max(1), self.map.positions().max(1));
        self.at(unit / positions, unit % positions / width) + unit % width
    }

    /// Runs of units that lie side by side: (first unit, its place, how many).
    fn runs(&self) -> impl Iterator<Item = (usize, usize, usize)> {
        let view = *self;
        let MapShape { channels, height, width } = self.map;
        let (count, run) = if self.is_compact() { (1, self.map.size()) } else { (channels * height, width) };
        (0..count).map(move |k| (k * run, view.at(k / height.max(1), k % height.max(1)), run))
    }

    /// Calls `visit` with the place and the length of every run of units that lie side by side.
    pub(super) fn for_rows(&self, mut visit: impl FnMut(usize, usize)) {
        self.runs().for_each(|(_, place, run)| visit(place, run));
    }

    /// Writes the units of `count` samples (one a row, rows `stride` apart) into the map.
    pub(super) fn read_rows(&self, values: &mut [f32], rows: &[f32], stride: usize, (lanes, count): (usize, usize)) {
        for (unit, place, run) in self.runs() {
            let into = &mut values[place * lanes..(place + run) * lanes];
            match lanes {
                1 => into.copy_from_slice(&rows[unit..unit + run]),
                _ => to_lanes(into, &rows[unit.min(rows.len())..], stride, count, run, lanes),
            }
        }
    }

    /// Writes the map of `count` samples out, one a row, rows `stride` apart.
    pub(super) fn write_rows(&self, values: &[f32], rows: &mut [f32], stride: usize, (lanes, count): (usize, usize)) {
        for (unit, place, run) in self.runs() {
            let from = &values[place * lanes..(place + run) * lanes];
            match lanes {
                1 => rows[unit..unit + run].copy_from_slice(from),
                _ if count > 0 => from_lanes(&mut rows[unit..], stride, from, count, run, lanes),
                _ => {}
            }
        }
    }

    /// Positions from the origin to the last value.
    pub(super) fn extent(&self) -> usize {
        match self.map.size() {
            0 => 0,
            _ => self.at(self.map.channels - 1, self.map.height - 1) + self.map.width - self.origin,
        }
    }
}

/// The rows and columns of zeros a window needs around its operand.
pub(super) fn margin(window: Window, input: MapShape, output: MapShape) -> [usize; 4] {
    // Checked when the block was made.
    let extent = window.extent().unwrap_or(window.kernel);
    let after = |axis: usize, input: usize, output: usize| {
        let read = (output.max(1) - 1) * window.stride[axis] + extent[axis];
        read.saturating_sub(window.padding[axis] + input)
    };
    let [top, left, ..] = window.padding;
    [top, left, after(0, input.height, output.height), after(1, input.width, output.width)]
}

/// The taps of a block over an operand that lies as `view` says (or split into `phases`): weights, the shape of the call
/// and where in the source it starts, in positions.
pub(super) fn lay_out(
    block: &TapBlock,
    taps: &Csr<f32>,
    view: &View,
    phases: Option<&Phases>,
    out: &View,
    lanes: usize,
    instructions: Instructions,
) -> (GridWeights, Grid, usize) {
    let window = block.window;
    let [kh, kw] = window.kernel;
    let offsets: Vec<usize> = match phases {
        Some(p) => p.offsets(),
        None => {
            let columns = (0..taps.cols()).map(|j| window.tap(j));
            columns.map(|(c, [dy, dx])| c * view.channel + dy * view.row + dx).collect()
        }
    };
    let (source_row, source_step, start) = match phases {
        Some(p) => (p.row(), 1, 0),
        None => {
            let start = view.origin - window.padding[0] * view.row - window.padding[1];
            // A single column has no neighbours.
            let step = if block.output.width > 1 { window.stride[1] } else { 1 };
            (window.stride[0] * view.row, step, start)
        }
    };
    // Two rows × four vectors of results read so many rows and columns.
    let per_position = 16usize.div_ceil(lanes);
    let wide = 4 * per_position;
    let footprint = if block.output.positions() == 1 {
        lanes * 4
    } else {
        (kh + window.stride[0]) * (wide * window.stride[1] + kw) * lanes * 4
    };
    let rows: Vec<Vec<(usize, f32)>> = (0..taps.rows()).map(|o| taps.row(o).collect()).collect();
    let cost = Cost::of_grid(instructions, lanes, block.output.positions());
    let weights = GridWeights::new(&rows, &offsets, kh * kw, footprint, cost);
    let grid = Grid {
        height: block.output.height,
        width: block.output.width,
        lanes,
        source_row,
        source_step,
        out_row: out.row,
        out_channel: out.channel,
    };
    (weights, grid, start)
}
