//! Turns windows with a stride into windows without: rows and columns that are a stride apart become neighbours,
//! padding included.

use super::shape::Window;
use crate::layout::MapShape;

/// Grids of the rows and columns that are whole strides apart: in each grid these are neighbours.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Phases {
    window: Window,
    phases: [usize; 2],
    grid: [usize; 2],
    channels: usize,
    input: MapShape,
}

impl Phases {
    pub(crate) fn new(window: Window, input: MapShape, output: MapShape) -> Self {
        let out = [output.height, output.width];
        // The window was checked when it was made.
        let extent = window.extent().unwrap_or(window.kernel);
        Self {
            window,
            phases: [0, 1].map(|a| window.stride[a].min(extent[a])),
            grid: [0, 1].map(|a| out[a] + (extent[a] - 1) / window.stride[a]),
            channels: input.channels,
            input,
        }
    }

    /// Number of positions of all grids of all channels.
    pub(crate) fn size(&self) -> usize {
        self.grids() * self.grid[0] * self.grid[1]
    }

    /// Number of grids: one for every phase of every channel.
    pub(crate) fn grids(&self) -> usize {
        self.channels * self.phases[0] * self.phases[1]
    }

    /// Number of rows and columns of a grid.
    pub(crate) fn grid(&self) -> [usize; 2] {
        self.grid
    }

    /// Whether the taps can read the operand as it is.
    pub(crate) fn is_plain(&self) -> bool {
        let Self { window, input, grid, .. } = self;
        window.stride == [1, 1] && window.padding == [0; 4] && *grid == [input.height, input.width]
    }

    /// The grid that a tap's column reads, and the row and column at which it starts.
    pub(crate) fn place(&self, column: usize) -> (usize, [usize; 2]) {
        let [sy, sx] = self.window.stride;
        let (c, [dy, dx]) = self.window.tap(column);
        ((c * self.phases[0] + dy % sy) * self.phases[1] + dx % sx, [dy / sy, dx / sx])
    }

    /// Positions between rows of a phase.
    pub(crate) fn row(&self) -> usize {
        self.grid[1]
    }

    /// The place of every column of the taps, (c·kh + dy)·kw + dx.
    pub(crate) fn offsets(&self) -> Vec<usize> {
        let offset = |column: usize| {
            let (grid, [down, right]) = self.place(column);
            (grid * self.grid[0] + down) * self.grid[1] + right
        };
        (0..self.channels * self.window.area()).map(offset).collect()
    }

    /// Calls `visit` for every run of neighbours that lies inside the map: its place in the grids; its channel, row
    /// and first column in the map; its length. In the map its columns are one stride apart.
    #[inline(always)]
    pub(crate) fn for_runs(&self, mut visit: impl FnMut(usize, [usize; 3], usize)) {
        let Self { window, phases, grid, channels, input } = *self;
        for c in 0..channels {
            for py in 0..phases[0] {
                let rows = window.inside(0, py, input.height, grid[0]);
                for px in 0..phases[1] {
                    let columns = window.inside(1, px, input.width, grid[1]);
                    if columns.is_empty() {
                        continue;
                    }
                    let phase = (c * phases[0] + py) * phases[1] + px;
                    let x = columns.start * window.stride[1] + px - window.padding[1];
                    for row in rows.clone() {
                        let y = row * window.stride[0] + py - window.padding[0];
                        visit((phase * grid[0] + row) * grid[1] + columns.start, [c, y, x], columns.len());
                    }
                }
            }
        }
    }

    /// Lays an operand out: `source` is positions × lanes from the first value of the map on, its rows and channels `row`
    /// and `channel` positions apart.
    pub(crate) fn split(&self, source: &[f32], [row, channel]: [usize; 2], into: &mut [f32], lanes: usize) {
        into[..self.size() * lanes].fill(0.0);
        let step = self.window.stride[1] * lanes;
        self.for_runs(|to, [c, y, x], run| {
            let source = &source[(c * channel + y * row + x) * lanes..];
            let into = &mut into[to * lanes..(to + run) * lanes];
            match lanes {
                _ if step == lanes => into.copy_from_slice(&source[..into.len()]),
                1 => into.iter_mut().zip(source.iter().step_by(step)).for_each(|(a, b)| *a = *b),
                2 => every::<2>(source, step, into),
                4 => every::<4>(source, step, into),
                8 => every::<8>(source, step, into),
                16 => every::<16>(source, step, into),
                _ => {
                    for (a, b) in into.chunks_exact_mut(lanes).zip(source.chunks(step)) {
                        a.copy_from_slice(&b[..lanes]);
                    }
                }
            }
        });
    }

    /// The transpose of [`Phases::split`] for a map without gaps: adds the cotangent of the grids to the map's.
    pub(crate) fn add_back(&self, grids: &[f32], dx: &mut [f32], lanes: usize) {
        let MapShape { height, width, .. } = self.input;
        let step = self.window.stride[1] * lanes;
        self.for_runs(|at, [c, y, x], run| {
            let dx = &mut dx[((c * height + y) * width + x) * lanes..];
            for (dx, d) in dx.chunks_mut(step).zip(grids[at * lanes..(at + run) * lanes].chunks_exact(lanes)) {
                dx.iter_mut().zip(d).for_each(|(a, b)| *a += b);
            }
        });
    }
}

/// Whole positions of `LANES` numbers, `step` numbers apart: a copy of known length is a few moves, not a call.
fn every<const LANES: usize>(source: &[f32], step: usize, into: &mut [f32]) {
    for (a, b) in into.as_chunks_mut::<LANES>().0.iter_mut().zip(source.chunks(step)) {
        if let Some(b) = b.first_chunk::<LANES>() {
            *a = *b;
        }
    }
}
