//! The operand of a tap block, padded and split by stride, so that every tap reads neighbouring positions.
//!
//! With stride s the tap at dy reads rows s·y + dy: those of phase dy mod s, dy div s further down. Phases are stored one
//! after the other, each a grid without gaps, and the block becomes a [`Stencil`]; its transpose is one too.

use crate::layout::MapShape;
use crate::linalg::{Csr, Stencil};
use crate::network::{Phases, Window};

/// How an operand is laid out for its taps.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Packing {
    input: MapShape,
    area: usize,
    phases: Phases,
    /// Rows and columns of the result.
    output: [usize; 2],
}

impl Packing {
    pub(crate) fn new(input: MapShape, window: Window, output: MapShape) -> Self {
        let phases = Phases::new(window, input, output);
        Self { input, area: window.area(), phases, output: [output.height, output.width] }
    }

    /// Whether the taps can read the operand as it is.
    pub(crate) fn is_plain(&self) -> bool {
        self.phases.is_plain()
    }

    /// Number of values of one sample.
    pub(crate) fn size(&self) -> usize {
        self.phases.size()
    }

    /// Lays the operand out; both units × lanes.
    pub(crate) fn pack(&self, x: &[f32], packed: &mut [f32], lanes: usize) {
        self.phases.split(x, [self.input.width, self.input.positions()], packed, lanes);
    }

    /// The transpose of [`Packing::pack`]: adds the packed cotangent to the operand's.
    pub(crate) fn unpack_add(&self, packed: &[f32], dx: &mut [f32], lanes: usize) {
        self.phases.add_back(packed, dx, lanes);
    }

    /// The taps over the packed operand.
    pub(crate) fn stencil(&self, taps: &Csr<f32>) -> Stencil {
        let rows: Vec<Vec<(usize, f32)>> = (0..taps.rows()).map(|o| taps.row(o).collect()).collect();
        Stencil::with_offsets(self.output, self.phases.row(), &self.phases.offsets(), self.area, &rows)
    }

    /// The shape in which [`Packing::transposed`] reads the cotangent of the result: the numbers of rows and columns
    /// of zeros above and to the left, and of all rows and columns.
    fn margins(&self) -> ([usize; 2], [usize; 2]) {
        let grid = self.phases.grid();
        let before = [0, 1].map(|axis| grid[axis] - self.output[axis]);
        (before, [0, 1].map(|axis| grid[axis] + before[axis]))
    }

    /// Number of values of one sample of the result's cotangent in that shape.
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
        let mut sizes = vec![0; self.phases.grids()];
        taps.indices().iter().for_each(|&column| sizes[self.phases.place(column as usize).0] += 1);
        let mut rows: Vec<Vec<(usize, f32)>> = sizes.into_iter().map(Vec::with_capacity).collect();
        for o in 0..taps.rows() {
            for (column, value) in taps.row(o) {
                let (grid, [down, right]) = self.phases.place(column);
                rows[grid].push(((o * height + above - down) * width + left - right, value));
            }
        }
        Stencil::new(self.phases.grid(), width, rows)
    }
}
