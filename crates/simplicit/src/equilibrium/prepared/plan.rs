//! The layout of everything: maps with their padding, and every block as offsets into them.

use crate::kernels::{Borders, Choice, Cost, Crew, Finish, Grid, GridWeights, Instructions, Residual};
use crate::layout::MapShape;
use crate::linalg::Csr;
use crate::linalg::lanes::{from_lanes, to_lanes};
use crate::model::TapBlock;
use crate::network::{Phases, Window};

/// A map inside a workspace, in positions: with `margin` rows and columns of zeros around it that are never written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct View {
    pub(super) map: MapShape,
    /// The position of the first value of the first channel.
    pub(super) origin: usize,
    pub(super) row: usize,
    pub(super) channel: usize,
    /// If true, all values of a sample lie side by side, one sample after the other; otherwise those of a position
    /// for all samples.
    pub(super) apart: bool,
}

impl View {
    /// A map with this margin (top, left, bottom, right) that starts at `start`.
    pub(super) fn new(map: MapShape, margin: [usize; 4], start: usize, lanes: usize) -> Self {
        let row = map.width + margin[1] + margin[3];
        let mut channel = row * (map.height + margin[0] + margin[2]);
        // Channels whose distance is a multiple of a kilobyte compete for the same places of the first-level cache.
        if map.channels > 4 && (channel * lanes * 4).is_multiple_of(1024) && channel > 1 {
            channel += 1 + 15 / lanes;
        }
        Self { map, origin: start + margin[0] * row + margin[1], row, channel, apart: false }
    }

    /// A map without margin or gaps.
    pub(super) fn compact(map: MapShape) -> Self {
        Self { map, origin: 0, row: map.width, channel: map.positions(), apart: false }
    }

    pub(super) fn is_compact(&self) -> bool {
        self.row == self.map.width && (self.channel == self.map.positions() || self.map.channels == 1)
    }

    /// The place of a value.
    pub(super) fn at(&self, channel: usize, y: usize) -> usize {
        self.origin + channel * self.channel + y * self.row
    }

    /// The place of a unit; the units of a row of the map stay side by side.
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

    /// Writes the units of `count` samples (one per row, rows `stride` apart) into the map; returns whether they are
    /// all finite.
    pub(super) fn read_rows(
        &self,
        values: &mut [f32],
        rows: &[f32],
        stride: usize,
        (lanes, count): (usize, usize),
    ) -> bool {
        let mut finite = true;
        if self.apart {
            for (s, into) in
                values[self.origin * lanes..].chunks_exact_mut(self.map.size().max(1)).take(count).enumerate()
            {
                into.copy_from_slice(&rows[s * stride..][..self.map.size()]);
                finite &= all_finite(into);
            }
            return finite;
        }
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

    /// Writes the map of `count` samples out, one per row, rows `stride` apart.
    pub(super) fn write_rows(&self, values: &[f32], rows: &mut [f32], stride: usize, (lanes, count): (usize, usize)) {
        if self.apart {
            for (s, from) in values[self.origin * lanes..].chunks_exact(self.map.size().max(1)).take(count).enumerate()
            {
                rows[s * stride..][..self.map.size()].copy_from_slice(from);
            }
            return;
        }
        for (unit, place, run) in self.runs() {
            let from = &values[place * lanes..(place + run) * lanes];
            match lanes {
                1 => rows[unit..unit + run].copy_from_slice(from),
                _ if count > 0 => from_lanes(&mut rows[unit..], stride, from, count, run, lanes),
                _ => {}
            }
        }
    }

    /// Number of positions from the origin to the last value.
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

/// The rows and columns of zeros that a window needs around its operand.
pub(super) fn margin(window: Window, input: MapShape, output: MapShape) -> [usize; 4] {
    // The window was checked when the block was made.
    let extent = window.extent().unwrap_or(window.kernel);
    let after = |axis: usize, input: usize, output: usize| {
        let read = (output.max(1) - 1) * window.stride[axis] + extent[axis];
        read.saturating_sub(window.padding[axis] + input)
    };
    let [top, left, ..] = window.padding;
    [top, left, after(0, input.height, output.height), after(1, input.width, output.width)]
}

/// The conditions that a layer is laid out for.
#[derive(Debug, Clone, Copy)]
pub(super) struct Way {
    /// Number of samples side by side.
    pub(super) lanes: usize,
    /// Whether all values of a sample lie side by side: see [`View::apart`].
    pub(super) apart: bool,
    pub(super) instructions: Instructions,
    /// The kernel that every row gets, even where another is faster.
    pub(super) only: Option<Choice>,
}

/// A block's weights with offsets over its operand.
pub(super) struct Laid {
    pub(super) weights: GridWeights,
    pub(super) grid: Grid,
    /// The position in the source at which it starts.
    pub(super) start: usize,
    /// The copies into which the operand is brought first, if it is.
    pub(super) unfold: Option<Unfold>,
}

/// Columns of windows copied side by side, a few rows of the map at a time, so that vectors are full and start on
/// cache lines. That helps for maps narrower than a vector, and for sparse rows, which load an operand for every
/// multiply-add.
pub(super) struct Unfold {
    /// The positions of the source at which the copies start; only columns that are read are copied.
    copies: Vec<usize>,
    /// Rows of a copy in addition to those of its results: taps of one column of the window share a copy.
    more: usize,
    /// Number of positions of a copy, rounded up.
    stride: usize,
    /// Number of rows of weights.
    rows: usize,
    /// Number of rows of the map at a time.
    tile: usize,
    /// The shape of the call without copies.
    grid: Grid,
}

impl Unfold {
    /// Copies for the columns that `read` lists, and the place of each column in them.
    fn new(
        grid: Grid,
        tile: usize,
        rows: usize,
        offsets: &[usize],
        read: &[bool],
        down: impl Fn(usize) -> usize,
    ) -> (Self, Vec<usize>) {
        let more = (0..offsets.len()).filter(|j| read[*j]).map(&down).max().unwrap_or(0);
        let stride = ((tile + more) * grid.width).next_multiple_of(16);
        let mut own = std::collections::BTreeMap::new();
        let mut copies = Vec::new();
        let place = |j: usize| {
            if !read[j] {
                return 0;
            }
            let start = offsets[j] - down(j) * grid.source_row;
            let copy = *own.entry(start).or_insert_with(|| {
                copies.push(start);
                copies.len() - 1
            });
            copy * stride + down(j) * grid.width
        };
        let places = (0..offsets.len()).map(place).collect();
        (Self { copies, more, stride, rows, tile, grid }, places)
    }

    /// Positions of scratch for the copies, the results and two residual sums.
    pub(super) fn scratch_sizes(&self) -> usize {
        self.copies.len() * self.stride + 3 * self.results()
    }

    /// Time of the copies for every vector of results, in multiply-adds of dense panels: a row takes about three
    /// cycles, and one more for every eight numbers. After the first 64 numbers it is two more for every eight,
    /// because maps then no longer stay in the first-level cache.
    fn time(&self, instructions: Instructions) -> f64 {
        let run = (self.grid.width * self.grid.lanes) as f64;
        let rows = (self.copies.len() * (self.tile + self.more) + self.rows * self.tile) as f64;
        let cycles = 3.0 + run / 8.0 + (run - 64.0).max(0.0) / 8.0;
        Cost::vectors_in_a_cycle(instructions) * rows * cycles / (self.tile as f64 * run / 16.0)
    }

    fn results(&self) -> usize {
        self.rows * self.tile * self.grid.width
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
        let Grid { height, width, lanes, source_row, out_row, out_channel, .. } = self.grid;
        let (columns, rest) = scratch.split_at_mut(self.copies.len() * self.stride * lanes);
        let (results, rest) = rest.split_at_mut(self.results() * lanes);
        let (before, after) = rest.split_at_mut(self.results() * lanes);
        for top in (0..height).step_by(self.tile) {
            let count = self.tile.min(height - top);
            let positions = count * width;
            let size = self.rows * positions * lanes;
            let every = self.copies.iter().map(|start| (start + top * source_row) * lanes);
            crate::linalg::vectorised(
                #[inline(always)]
                || self.copy(columns, (self.stride, count + self.more), (source, source_row), every),
            );
            let from_map = |into: &mut [f32], map: &[f32], row: usize, channel: usize| {
                let every = (0..self.rows).map(|c| (c * channel + top * row) * lanes);
                self.copy(&mut into[..size], (positions, count), (map, row), every);
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
                before: has_before.then_some(residual(&before[..size])),
                after: has_after.then_some(residual(&after[..size])),
                ..*finish
            };
            let grid = Grid { width: positions, out_row: positions, out_channel: positions, ..laid.grid };
            laid.weights.run_on(crew, instructions, &grid, columns, &mut results[..size], &finish);
            let run = width * lanes;
            for (c, map) in results[..size].chunks_exact(positions * lanes).enumerate() {
                let to = (c * out_channel + top * out_row) * lanes;
                let end = to + (count - 1) * out_row * lanes + run;
                copy_rows((&mut out[to..end], out_row * lanes), (map, run), run);
            }
        }
    }

    /// Copies rows of maps that start at `places` of `source`, side by side; maps are `stride` positions apart.
    #[inline(always)]
    fn copy(
        &self,
        into: &mut [f32],
        (stride, rows): (usize, usize),
        (source, row): (&[f32], usize),
        places: impl Iterator<Item = usize>,
    ) {
        let Grid { width, lanes, .. } = self.grid;
        let (run, stride, row) = (width * lanes, stride * lanes, row * lanes);
        for (map, place) in into.chunks_exact_mut(stride).zip(places) {
            let source = &source[place..place + (rows - 1) * row + run];
            copy_rows((&mut map[..rows * run], run), (source, row), run);
        }
    }
}

/// Rows of `run` numbers from one map into another, each with its own distance between rows.
#[inline(always)]
fn copy_rows((into, to_row): (&mut [f32], usize), (from, from_row): (&[f32], usize), run: usize) {
    // Rows whose length is a constant are copied without a function call.
    #[inline(always)]
    fn known<const RUN: usize>((into, to_row): (&mut [f32], usize), (from, from_row): (&[f32], usize)) {
        for (into, from) in into.chunks_mut(to_row).zip(from.chunks(from_row)) {
            if let (Some(into), Some(from)) = (into.first_chunk_mut::<RUN>(), from.first_chunk::<RUN>()) {
                *into = *from;
            }
        }
    }
    match run {
        4 => known::<4>((into, to_row), (from, from_row)),
        8 => known::<8>((into, to_row), (from, from_row)),
        16 => known::<16>((into, to_row), (from, from_row)),
        32 => known::<32>((into, to_row), (from, from_row)),
        _ => {
            for (into, from) in into.chunks_mut(to_row).zip(from.chunks(from_row)) {
                into[..run].copy_from_slice(&from[..run]);
            }
        }
    }
}

/// The most numbers of results for which windows are copied at a time, and the most that stay in registers.
const TILE: usize = 256;
const BLOCK: usize = 128;

/// For how many rows of the map at a time windows are copied; `None` where copying cannot pay. It can where results
/// are no whole vectors of samples and enough rows of weights read a copy. Whole maps are copied where a row is at
/// most half a vector.
fn tile(grid: &Grid, rows: usize, area: usize) -> Option<usize> {
    let run = grid.width * grid.lanes;
    if grid.height == 1 || grid.lanes.is_multiple_of(16) || grid.source_step != 1 || rows < 16 {
        return None;
    }
    match run {
        0..=8 => (run * grid.height <= 64 && rows >= 32).then_some(grid.height),
        _ => (area > 1).then(|| (TILE / run).clamp(1, grid.height)),
    }
}

/// The taps of a block over an operand that lies as `view` says (or split into `phases`).
pub(super) fn lay_out(
    block: &TapBlock,
    taps: &Csr<f32>,
    view: &View,
    phases: Option<&Phases>,
    out: &View,
    Way { lanes, instructions, only, .. }: Way,
) -> Laid {
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
    // Two rows × four vectors of results read this many rows and columns.
    let per_position = 16usize.div_ceil(lanes);
    let wide = 4 * per_position;
    let footprint = if block.output.positions() == 1 {
        lanes * 4
    } else {
        (kh + window.stride[0]) * (wide * window.stride[1] + kw) * lanes * 4
    };
    let rows: Vec<Vec<(usize, f32)>> = (0..taps.rows()).map(|o| taps.row(o).collect()).collect();
    // A map without gaps is treated as one row of whole vectors.
    let flat = phases.is_none()
        && window.area() == 1
        && source_step == 1
        && [source_row, out.row] == [block.output.width; 2]
        && block.output.positions() > 1
        && (view.channel * lanes).is_multiple_of(16);
    let cost = |lanes: usize, positions: usize| {
        let cost = Cost::of_grid(instructions, lanes, positions);
        only.map_or(cost, |choice| cost.only(choice))
    };
    let grid = Grid {
        height: block.output.height,
        width: block.output.width,
        lanes,
        source_row,
        source_step,
        out_row: out.row,
        out_channel: out.channel,
    };
    // A vector of 8 numbers, which a narrow row does not fill, takes as long as one of 16 on cores that multiply two
    // of the latter in a cycle.
    let run = grid.width * lanes;
    let filled = (run as f64 / 8.0).min(1.0);
    let wasted = if run <= 8 { Cost::vectors_in_a_cycle(instructions) / filled } else { 1.0 };
    let direct = || {
        let mut cost = cost(if flat { 16 * lanes } else { lanes }, block.output.positions());
        let borders = borders(block);
        cost.ratio /= filled * wasted * borders.inside(instructions, &grid);
        GridWeights::new(&rows, &offsets, kh * kw, footprint, Some(borders), cost)
    };
    let Some(tile) = tile(&grid, taps.rows(), kh * kw) else {
        return Laid { weights: direct(), grid, start, unfold: None };
    };
    let mut read = vec![false; offsets.len()];
    rows.iter().flatten().for_each(|(column, _)| read[*column] = true);
    // Rows of whole vectors: the taps of a column of the window read the same copy, starting at different rows.
    let shared = phases.is_none() && window.stride[0] == 1 && (grid.width * lanes).is_multiple_of(16);
    let down = |j: usize| if shared { window.tap(j).1[0] } else { 0 };
    let (unfold, places) = Unfold::new(grid, tile, taps.rows(), &offsets, &read, down);
    let positions = tile * grid.width;
    // Bytes of the copies that a block of results reads; they stay in the first-level cache.
    let piece = unfold.stride.min(BLOCK.div_ceil(lanes) + unfold.more * grid.width) * lanes * 4;
    let piece = unfold.copies.len().div_ceil(block.input.channels.max(1)) * piece;
    let weights = GridWeights::new(&rows, &places, kh * kw, piece, None, cost(positions * lanes, 1));
    let direct = direct();
    if wasted * direct.time() <= weights.time() + unfold.time(instructions) {
        return Laid { weights: direct, grid, start, unfold: None };
    }
    let grid = Grid { height: 1, width: positions, source_row: 0, out_row: positions, out_channel: positions, ..grid };
    Laid { weights, grid, start, unfold: Some(unfold) }
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
