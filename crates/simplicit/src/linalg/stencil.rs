//! Weights that are shared over a grid, for batches: every weight multiplies neighbouring positions of many samples.
//!
//! Values are positions × lanes, a grid row contiguous. Every value is summed in the same order whatever the number of
//! lanes, so a sample's result does not depend on the batch it is in. Zeros are multiplied only where that is faster.

use crate::kernels::{Cost, Finish, Grid, GridWeights, Instructions};

/// The usual number of samples side by side, for which weights are laid out; any other number can be run too.
const LANES: usize = 16;
/// Bytes of the source that a block of results reads per channel of a 3 × 3 window, or per weight on its own.
const FOOTPRINT: usize = 1536;
/// Most columns that are gathered before repetitions are removed.
const REPEATED: usize = 1 << 16;

/// One row of weights per result map; weight k of a row reads the source `offset[k]` positions further on than the result.
#[derive(Debug, Clone)]
pub(crate) struct Stencil {
    height: usize,
    width: usize,
    /// Positions between the starts of two rows of the source.
    stride: usize,
    weights: GridWeights,
    instructions: Instructions,
}

impl Stencil {
    /// `rows` are (offset, weight) lists, summed by ascending offset; results are `height` × `width` grids, source rows
    /// `stride` positions apart.
    pub(crate) fn new<R: IntoIterator<Item = (usize, f32)>>(
        [height, width]: [usize; 2],
        stride: usize,
        rows: impl IntoIterator<Item = R>,
    ) -> Self {
        // If a row has an offset twice, each gets a column of its own.
        let mut keyed: Vec<Vec<((u32, u32), f32)>> = Vec::new();
        for row in rows {
            let mut row: Vec<((u32, u32), f32)> = row.into_iter().map(|(offset, v)| ((offset as u32, 0), v)).collect();
            row.sort_by_key(|((offset, _), _)| *offset);
            for k in 1..row.len() {
                if row[k].0.0 == row[k - 1].0.0 {
                    row[k].0.1 = row[k - 1].0.1 + 1;
                }
            }
            keyed.push(row);
        }
        // The different columns of all rows; repetitions are removed each time before the list becomes twice as long.
        let mut columns: Vec<(u32, u32)> = Vec::new();
        let mut different = 0;
        for row in &keyed {
            columns.extend(row.iter().map(|(key, _)| *key));
            if columns.len() > 2 * different + REPEATED {
                columns.sort_unstable();
                columns.dedup();
                different = columns.len();
            }
        }
        columns.sort_unstable();
        columns.dedup();
        let offsets: Vec<usize> = columns.iter().map(|(offset, _)| *offset as usize).collect();
        let place = |key: &(u32, u32)| columns.binary_search(key).unwrap_or(0);
        let rows: Vec<Vec<(usize, f32)>> =
            keyed.into_iter().map(|row| row.iter().map(|(key, v)| (place(key), *v)).collect()).collect();
        Self::with_offsets([height, width], stride, &offsets, 9, &rows)
    }

    /// `rows` are (column, weight) lists, columns ascending; column j reads `offsets[j]` positions further on, and
    /// `group` columns read one channel.
    pub(crate) fn with_offsets(
        [height, width]: [usize; 2],
        stride: usize,
        offsets: &[usize],
        group: usize,
        rows: &[Vec<(usize, f32)>],
    ) -> Self {
        let instructions = Instructions::detect();
        let cost = Cost::of_grid(instructions, LANES, height * width);
        let footprint = if height * width == 1 { 4 * LANES } else { FOOTPRINT };
        let weights = GridWeights::new(rows, offsets, group, footprint, None, cost);
        Self { height, width, stride, weights, instructions }
    }

    /// `sums += weights × source`; `sums` is rows × positions × lanes, `source` positions × lanes.
    ///
    /// # Panics
    /// If a slice is too short; sizes come from the caller's own arithmetic, never from data.
    pub(crate) fn accumulate(&self, sums: &mut [f32], source: &[f32], lanes: usize) {
        if self.weights.is_empty() {
            return;
        }
        let grid = Grid {
            height: self.height,
            width: self.width,
            lanes,
            source_row: self.stride,
            source_step: 1,
            out_row: self.width,
            out_channel: self.height * self.width,
        };
        self.weights.run(self.instructions, &grid, source, sums, &Finish::default());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    #[test]
    fn sums_match_the_definition_and_a_lane_does_not_feel_its_neighbours() {
        let mut r = Random::new(8);
        for (height, width, stride) in [(1, 1, 1), (3, 5, 7), (4, 8, 10), (2, 33, 35), (3, 6, 6)] {
            let rows: Vec<Vec<(usize, f32)>> =
                (0..5).map(|i| (0..3 * i).map(|_| (r.below(2 * stride + 3), r.normal() as f32)).collect()).collect();
            let stencil = Stencil::new([height, width], stride, rows.clone());
            let positions = height * stride + 2 * stride + 3;
            let mut alone: Option<Vec<f32>> = None;
            for lanes in [1, 3, 8, 16, 32] {
                let mut values = Random::new(2);
                let first: Vec<f32> = (0..positions).map(|_| values.normal() as f32).collect();
                let source: Vec<f32> = first.iter().flat_map(|v| (0..lanes).map(move |s| v * (s + 1) as f32)).collect();
                let mut sums = vec![0.25f32; 5 * height * width * lanes];
                stencil.accumulate(&mut sums, &source, lanes);
                for (i, row) in rows.iter().enumerate() {
                    for y in 0..height {
                        for x in 0..width {
                            for s in 0..lanes {
                                let terms: Vec<f64> = row
                                    .iter()
                                    .map(|&(o, w)| f64::from(w) * f64::from(source[(y * stride + x + o) * lanes + s]))
                                    .collect();
                                let size: f64 = terms.iter().map(|t| t.abs()).sum();
                                let got = sums[((i * height + y) * width + x) * lanes + s];
                                let error = (f64::from(got) - 0.25 - terms.iter().sum::<f64>()).abs();
                                assert!(error <= 1e-5 * (1.0 + size), "{error}");
                            }
                        }
                    }
                }
                let lane: Vec<f32> = sums.iter().step_by(lanes).copied().collect();
                assert_eq!(alone.get_or_insert_with(|| lane.clone()), &lane);
            }
        }
    }
}
