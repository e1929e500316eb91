//! The operand of a tap block, padded and split by stride, so that every tap reads runs of neighbouring positions.
//!
//! With stride s the tap at dy reads rows s·y + dy: those of phase dy mod s, dy div s further down. Phases are stored one
//! after the other, each a grid without gaps, and the block becomes a [`Stencil`]; its transpose is one too.

use crate::layout::MapShape;
use crate::linalg::{Csr, Stencil};
use crate::network::Window;

/// How an operand is laid out for its taps.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Packing {
    input: MapShape,
    window: Window,
    /// Phases along each axis: rows or columns that differ by less than a stride.
    phases: [usize; 2],
    /// Rows and columns of the grid of one phase.
    grid: [usize; 2],
    /// Rows and columns of the result.
    output: [usize; 2],
}

impl Packing {
    pub(crate) fn new(input: MapShape, window: Window, output: MapShape) -> Self {
        let output = [output.height, output.width];
        // Checked when the block was made.
        let extent = window.extent().unwrap_or(window.kernel);
        let per_axis = |f: &dyn Fn(usize) -> usize| [f(0), f(1)];
        Self {
            input,
            window,
            phases: per_axis(&|axis| window.stride[axis].min(extent[axis])),
            grid: per_axis(&|axis| output[axis] + (extent[axis] - 1) / window.stride[axis]),
            output,
        }
    }

    /// Whether the operand as it is already is what the taps read.
    pub(crate) fn is_plain(&self) -> bool {
        self.window.stride == [1, 1]
            && self.window.padding == [0; 4]
            && self.grid == [self.input.height, self.input.width]
    }

    /// Values of one sample.
    pub(crate) fn size(&self) -> usize {
        self.input.channels * self.phases[0] * self.phases[1] * self.grid[0] * self.grid[1]
    }

    /// Every run of neighbouring values that lies inside the map: (place in the packed operand, place in the operand,
    /// length); places of the operand are one stride apart.
    fn for_runs(&self, mut visit: impl FnMut(usize, usize, usize)) {
        let Self { input, window, phases, grid, .. } = self;
        for c in 0..input.channels {
            for py in 0..phases[0] {
                let rows = window.inside(0, py, input.height, grid[0]);
                for px in 0..phases[1] {
                    let columns = window.inside(1, px, input.width, grid[1]);
                    if columns.is_empty() {
                        continue;
                    }
                    let phase = (c * phases[0] + py) * phases[1] + px;
                    let ix = columns.start * window.stride[1] + px - window.padding[1];
                    for y in rows.clone() {
                        let iy = y * window.stride[0] + py - window.padding[0];
                        visit(
                            (phase * grid[0] + y) * grid[1] + columns.start,
                            (c * input.height + iy) * input.width + ix,
                            columns.len(),
                        );
                    }
                }
            }
        }
    }

    /// Lays the operand out; both units × lanes.
    pub(crate) fn pack(&self, x: &[f32], packed: &mut [f32], lanes: usize) {
        packed.fill(0.0);
        let stride = self.window.stride[1];
        self.for_runs(|to, from, run| {
            if stride == 1 {
                packed[to * lanes..(to + run) * lanes].copy_from_slice(&x[from * lanes..(from + run) * lanes]);
            } else {
                for k in 0..run {
                    let from = (from + k * stride) * lanes;
                    packed[(to + k) * lanes..(to + k + 1) * lanes].copy_from_slice(&x[from..from + lanes]);
                }
            }
        });
    }

    /// The transpose of [`Packing::pack`]: adds the packed cotangent to the operand's.
    pub(crate) fn unpack_add(&self, packed: &[f32], dx: &mut [f32], lanes: usize) {
        let stride = self.window.stride[1];
        self.for_runs(|to, from, run| {
            for k in 0..run {
                let from = (from + k * stride) * lanes;
                let packed = &packed[(to + k) * lanes..(to + k + 1) * lanes];
                dx[from..from + lanes].iter_mut().zip(packed).for_each(|(a, b)| *a += b);
            }
        });
    }

    /// Channel and phase of a tap's column, and how far down and to the right its phase's grid is read.
    fn place(&self, column: usize) -> (usize, [usize; 2]) {
        let [sy, sx] = self.window.stride;
        let (c, [dy, dx]) = self.window.tap(column);
        ((c * self.phases[0] + dy % sy) * self.phases[1] + dx % sx, [dy / sy, dx / sx])
    }

    /// The taps over the packed operand.
    pub(crate) fn stencil(&self, taps: &Csr<f32>) -> Stencil {
        let [height, width] = self.grid;
        let offset = |column: usize| {
            let (phase, [down, right]) = self.place(column);
            (phase * height + down) * width + right
        };
        let offsets: Vec<usize> = (0..taps.cols()).map(offset).collect();
        let rows: Vec<Vec<(usize, f32)>> = (0..taps.rows()).map(|o| taps.row(o).collect()).collect();
        Stencil::with_offsets(self.output, width, &offsets, self.window.area(), &rows)
    }

    /// The shape in which [`Packing::transposed`] reads the cotangent of the result: so many rows and columns of zeros
    /// above and to the left, so many rows and columns in all.
    fn margins(&self) -> ([usize; 2], [usize; 2]) {
        let before = [0, 1].map(|axis| self.grid[axis] - self.output[axis]);
        (before, [0, 1].map(|axis| self.grid[axis] + before[axis]))
    }

    /// Values of one sample of the cotangent of the result in that shape.
    pub(crate) fn cotangent_size(&self, channels: usize) -> usize {
        let (_, [height, width]) = self.margins();
        channels * height * width
    }

    /// Lays the cotangent of the result out for the transpose.
    pub(crate) fn pack_cotangent(&self, dout: &[f32], packed: &mut [f32], lanes: usize) {
        let ([above, left], [height, width]) = self.margins();
        let [rows, columns] = self.output;
        packed.fill(0.0);
        for (k, row) in dout.chunks_exact(columns * lanes).enumerate() {
            let at = ((k / rows * height + above + k % rows) * width + left) * lanes;
            packed[at..at + row.len()].copy_from_slice(row);
        }
    }

    /// The transpose: one row per channel and phase of the packed operand, reading the packed cotangent.
    pub(crate) fn transposed(&self, taps: &Csr<f32>) -> Stencil {
        let ([above, left], [height, width]) = self.margins();
        let mut rows = vec![Vec::new(); self.input.channels * self.phases[0] * self.phases[1]];
        for o in 0..taps.rows() {
            for (column, value) in taps.row(o) {
                let (phase, [down, right]) = self.place(column);
                rows[phase].push(((o * height + above - down) * width + left - right, value));
            }
        }
        Stencil::new(self.grid, width, rows)
    }
}
