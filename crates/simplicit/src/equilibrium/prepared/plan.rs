//! Where everything lies: maps with their padding, and every block as offsets into them.

use crate::kernels::{Borders, Cost, Crew, Finish, Grid, GridWeights, Instructions, Residual};
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

    /// Writes the units of `count` samples (one a row, rows `stride` apart) into the map; whether they are all finite.
    pub(super) fn read_rows(
        &self,
        values: &mut [f32],
        rows: &[f32],
        stride: usize,
        (lanes, count): (usize, usize),
    ) -> bool {
        let mut finite = true;
        for (unit, place, run) in self.runs() {
            let into = &mut values[place * lanes..(place + run) * lanes];
            finite &= match lanes {
                1 => {
                    into.copy_from_slice(&rows[unit..unit + run]);
                    all_finite(into)
                }
                _ => to_lanes(into, &rows[unit.min(rows.len())..], stride, count, run, lanes),
            };
        }
        finite
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

pub(super) fn all_finite(values: &[f32]) -> bool {
    crate::linalg::vectorised(
        #[inline(always)]
        || values.iter().fold(0u32, |worst, v| worst.max(v.to_bits() & 0x7fff_ffff)) < 0x7f80_0000,
    )
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

/// A block's weights over its operand.
pub(super) struct Laid {
    pub(super) weights: GridWeights,
    pub(super) grid: Grid,
    /// Where in the source it starts, in positions.
    pub(super) start: usize,
    /// The operand is brought into this shape first.
    pub(super) unfold: Option<Unfold>,
}

/// Every column of a window as a row of positions without gaps: maps that are narrower than a vector fill it so.
pub(super) struct Unfold {
    /// Of the columns that are read.
    offsets: Vec<usize>,
    /// Positions of a column, rounded up.
    stride: usize,
    /// Of weights.
    rows: usize,
    /// The shape of the call without copies.
    grid: Grid,
}

impl Unfold {
    /// Positions of scratch: the columns, the results and two residual sums.
    pub(super) fn room(&self) -> usize {
        self.offsets.len() * self.stride + 3 * self.results()
    }

    fn results(&self) -> usize {
        self.rows * self.grid.height * self.grid.width
    }

    /// Copies the columns, runs the weights on them, and puts the results where they belong.
    pub(super) fn run(
        &self,
        laid: &Laid,
        (crew, instructions): (&Crew<'_>, Instructions),
        source: &[f32],
        out: &mut [f32],
        finish: &Finish<'_>,
        scratch: &mut [f32],
    ) {
        let Grid { lanes, out_row, out_channel, .. } = self.grid;
        let (columns, rest) = scratch.split_at_mut(self.offsets.len() * self.stride * lanes);
        let (results, rest) = rest.split_at_mut(self.results() * lanes);
        let (before, after) = rest.split_at_mut(self.results() * lanes);
        let after = &mut after[..self.results() * lanes];
        let positions = self.grid.height * self.grid.width;
        let every = self.offsets.iter().map(|offset| offset * lanes);
        self.copy(columns, self.stride, (source, self.grid.source_row), every);
        let from_map = |into: &mut [f32], map: &[f32], row: usize, channel: usize| {
            self.copy(into, positions, (map, row), (0..self.rows).map(|c| c * channel * lanes));
        };
        let compact = |residual: Option<Residual<'_>>, into: &'_ mut [f32]| {
            residual.map(|r| from_map(into, r.from, r.row, r.channel)).is_some()
        };
        let (has_before, has_after) = (compact(finish.before, before), compact(finish.after, after));
        if finish.bias.is_none() {
            from_map(results, out, out_row, out_channel);
        }
        let residual = |from| Residual { from, row: positions, channel: positions };
        let finish = Finish {
            before: has_before.then_some(residual(&*before)),
            after: has_after.then_some(residual(&*after)),
            ..*finish
        };
        laid.weights.run_on(crew, instructions, &laid.grid, columns, results, &finish);
        let run = self.grid.width * lanes;
        for (c, map) in results.chunks_exact(positions * lanes).enumerate() {
            for (y, row) in map.chunks_exact(run).enumerate() {
                let to = (c * out_channel + y * out_row) * lanes;
                copy_row(&mut out[to..to + run], row);
            }
        }
    }

    /// Rows of maps that start at `places` of `source`, side by side; maps are `stride` positions apart.
    fn copy(
        &self,
        into: &mut [f32],
        stride: usize,
        (source, row): (&[f32], usize),
        places: impl Iterator<Item = usize>,
    ) {
        let Grid { height, width, lanes, .. } = self.grid;
        let run = width * lanes;
        for (map, place) in into.chunks_exact_mut(stride * lanes).zip(places) {
            for (y, own) in map[..run * height].chunks_exact_mut(run).enumerate() {
                let from = place + y * row * lanes;
                copy_row(own, &source[from..from + run]);
            }
        }
    }
}

/// A few numbers: most rows have 4 or 8, and are copied without a call.
#[inline(always)]
fn copy_row(into: &mut [f32], from: &[f32]) {
    if let (Ok(into), Ok(from)) = (<&mut [f32; 8]>::try_from(&mut *into), <&[f32; 8]>::try_from(from)) {
        *into = *from;
    } else if let (Ok(into), Ok(from)) = (<&mut [f32; 4]>::try_from(&mut *into), <&[f32; 4]>::try_from(from)) {
        *into = *from;
    } else {
        into.copy_from_slice(from);
    }
}

/// Whether copying windows pays: rows narrower than half a vector, and enough rows of weights that read them.
fn unfolds(grid: &Grid, rows: usize) -> bool {
    let run = grid.width * grid.lanes;
    grid.height > 1 && run < 8 && run * grid.height <= 64 && rows >= 32
}

/// The taps of a block over an operand that lies as `view` says (or split into `phases`).
pub(super) fn lay_out(
    block: &TapBlock,
    taps: &Csr<f32>,
    view: &View,
    phases: Option<&Phases>,
    out: &View,
    lanes: usize,
    instructions: Instructions,
) -> Laid {
    let window = block.window;
    let [kh, kw] = window.kernel;
    let mut offsets: Vec<usize> = match phases {
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
    let mut footprint = if block.output.positions() == 1 {
        lanes * 4
    } else {
        (kh + window.stride[0]) * (wide * window.stride[1] + kw) * lanes * 4
    };
    let rows: Vec<Vec<(usize, f32)>> = (0..taps.rows()).map(|o| taps.row(o).collect()).collect();
    let cost = Cost::of_grid(instructions, lanes, block.output.positions());
    let mut grid = Grid {
        height: block.output.height,
        width: block.output.width,
        lanes,
        source_row,
        source_step,
        out_row: out.row,
        out_channel: out.channel,
    };
    let mut borders = Some(borders(block));
    let mut unfold = None;
    if unfolds(&grid, taps.rows()) && source_step == 1 {
        let mut read = vec![false; offsets.len()];
        rows.iter().flatten().for_each(|(column, _)| read[*column] = true);
        let stride = block.output.positions().next_multiple_of(16);
        let mut own = Vec::new();
        for (offset, _) in offsets.iter_mut().zip(&read).filter(|(_, read)| **read) {
            own.push(*offset);
            *offset = (own.len() - 1) * stride;
        }
        let folded = grid;
        let positions = block.output.positions();
        grid = Grid { height: 1, width: positions, source_row: 0, out_row: positions, out_channel: positions, ..grid };
        footprint = kh * kw * grid.width.min(wide) * lanes * 4;
        (unfold, borders) = (Some(Unfold { offsets: own, stride, rows: taps.rows(), grid: folded }), None);
    }
    let weights = GridWeights::new(&rows, &offsets, kh * kw, footprint, borders, cost);
    Laid { weights, grid, start, unfold }
}

/// Rows and columns of the window that lie in the padding for the first and last results.
fn borders(block: &TapBlock) -> Borders {
    let window = block.window;
    let (input, output) = ([block.input.height, block.input.width], [block.output.height, block.output.width]);
    let outside = |axis: usize| {
        let (kernel, dilation, padding) = (window.kernel[axis], window.dilation[axis].max(1), window.padding[axis]);
        let before = padding.div_ceil(dilation).min(kernel);
        let last = (output[axis].max(1) - 1) * window.stride[axis];
        let inside = (input[axis] + padding).saturating_sub(last).div_ceil(dilation);
        [before, kernel.saturating_sub(inside)]
    };
    Borders { kernel: window.kernel, rows: outside(0), columns: outside(1) }
}
