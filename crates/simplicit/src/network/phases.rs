//! Windows with a stride as windows without: rows and columns a stride apart become neighbours, padding included.

use super::shape::Window;
use crate::layout::MapShape;

/// Rows or columns that differ by less than a stride, split into grids of their own: neighbours become neighbours.
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
        // Checked when the window was made.
        let extent = window.extent().unwrap_or(window.kernel);
        Self {
            window,
            phases: [0, 1].map(|a| window.stride[a].min(extent[a])),
            grid: [0, 1].map(|a| out[a] + (extent[a] - 1) / window.stride[a]),
            channels: input.channels,
            input,
        }
    }

    pub(crate) fn size(&self) -> usize {
        self.channels * self.phases[0] * self.phases[1] * self.grid[0] * self.grid[1]
    }

    fn offset(&self, c: usize, dy: usize, dx: usize) -> usize {
        let [sy, sx] = self.window.stride;
        let phase = (c * self.phases[0] + dy % sy) * self.phases[1] + dx % sx;
        (phase * self.grid[0] + dy / sy) * self.grid[1] + dx / sx
    }

    /// Positions between rows of a phase.
    pub(crate) fn row(&self) -> usize {
        self.grid[1]
    }

    /// The place of every column of the taps, (c·kh + dy)·kw + dx.
    pub(crate) fn offsets(&self) -> Vec<usize> {
        let place = |column: usize| {
            let (c, [dy, dx]) = self.window.tap(column);
            self.offset(c, dy, dx)
        };
        (0..self.channels * self.window.area()).map(place).collect()
    }

    /// Lays an operand out: `source` is positions × lanes from the first value of the map on, its rows and channels `row`
    /// and `channel` positions apart.
    pub(crate) fn split(&self, source: &[f32], [row, channel]: [usize; 2], into: &mut [f32], lanes: usize) {
        let Self { window, phases, grid, channels, input } = *self;
        into[..self.size() * lanes].fill(0.0);
        for c in 0..channels {
            for py in 0..phases[0] {
                let rows = window.inside(0, py, input.height, grid[0]);
                for px in 0..phases[1] {
                    let columns = window.inside(1, px, input.width, grid[1]);
                    if columns.is_empty() {
                        continue;
                    }
                    let phase = (c * phases[0] + py) * phases[1] + px;
                    for y in rows.clone() {
                        let from = c * channel + (y * window.stride[0] + py - window.padding[0]) * row;
                        let to = (phase * grid[0] + y) * grid[1];
                        if window.stride[1] == 1 {
                            let from = (from + columns.start + px - window.padding[1]) * lanes;
                            let (to, length) = ((to + columns.start) * lanes, columns.len() * lanes);
                            into[to..to + length].copy_from_slice(&source[from..from + length]);
                            continue;
                        }
                        for x in columns.clone() {
                            let from = (from + x * window.stride[1] + px - window.padding[1]) * lanes;
                            into[(to + x) * lanes..(to + x + 1) * lanes].copy_from_slice(&source[from..from + lanes]);
                        }
                    }
                }
            }
        }
    }
}
