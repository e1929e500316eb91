//! Shared weights over a grid, for batches: every weight multiplies a run of neighbouring positions of many samples.
//!
//! Values are positions × lanes, a grid row contiguous. A result row is computed a few vectors at a time: they stay in
//! registers over all weights of the row, and the piece of the source they read stays in the first-level cache over all
//! rows. Every value is summed in the same order whatever the number of lanes, so a sample's result does not depend on
//! the batch it is in. Zeros are never multiplied.

/// Vectors of a row that are summed at a time.
const BLOCK: usize = 8;

/// One row of weights per result map; weight k of a row reads the source `offset[k]` positions further on than the result.
#[derive(Debug, Clone)]
pub struct Stencil {
    height: usize,
    width: usize,
    /// Positions between the starts of two rows of the source.
    stride: usize,
    indptr: Vec<usize>,
    offsets: Vec<u32>,
    values: Vec<f32>,
}

impl Stencil {
    /// `rows` are (offset, weight) lists; results are `height` × `width` grids, source rows `stride` positions apart.
    pub fn new<R: IntoIterator<Item = (usize, f32)>>(
        [height, width]: [usize; 2],
        stride: usize,
        rows: impl IntoIterator<Item = R>,
    ) -> Self {
        // Without a gap between rows the grid is one long row.
        let ([height, width], stride) =
            if stride == width { ([1, height * width], height * width) } else { ([height, width], stride) };
        let mut out = Self { height, width, stride, indptr: vec![0], offsets: Vec::new(), values: Vec::new() };
        for row in rows {
            for (offset, value) in row {
                out.offsets.push(offset as u32);
                out.values.push(value);
            }
            out.indptr.push(out.offsets.len());
        }
        out
    }

    /// Number of result maps.
    pub fn rows(&self) -> usize {
        self.indptr.len() - 1
    }

    /// `sums += weights × source`; `sums` is rows × positions × lanes, `source` positions × lanes.
    ///
    /// # Panics
    /// If a slice is too short; sizes are the caller's own arithmetic, never data.
    pub fn accumulate(&self, sums: &mut [f32], source: &[f32], lanes: usize) {
        if self.values.is_empty() {
            return;
        }
        pulp::Arch::new().dispatch(Kernel { stencil: self, sums, source, lanes });
    }
}

struct Kernel<'a> {
    stencil: &'a Stencil,
    sums: &'a mut [f32],
    source: &'a [f32],
    lanes: usize,
}

impl Kernel<'_> {
    /// The values from `start` of grid row `y`, N vectors, for all rows of weights.
    #[inline(always)]
    fn block<S: pulp::Simd, const N: usize>(&mut self, simd: S, y: usize, start: usize) {
        let Stencil { height, width, stride, indptr, offsets, values } = self.stencil;
        let (length, run) = (N * S::F32_LANES, width * self.lanes);
        let base = y * stride * self.lanes + start;
        for (row, span) in indptr.windows(2).enumerate() {
            let (offsets, values) = (&offsets[span[0]..span[1]], &values[span[0]..span[1]]);
            if values.is_empty() {
                continue;
            }
            let at = (row * height + y) * run + start;
            let Some(sums) = S::as_mut_simd_f32s(&mut self.sums[at..at + length]).0.first_chunk_mut::<N>() else {
                continue;
            };
            let mut sum = *sums;
            for (&offset, &value) in offsets.iter().zip(values) {
                let from = base + offset as usize * self.lanes;
                let Some(x) = S::as_simd_f32s(&self.source[from..from + length]).0.first_chunk::<N>() else {
                    continue;
                };
                let value = simd.splat_f32s(value);
                for v in 0..N {
                    sum[v] = simd.mul_add_e_f32s(value, x[v], sum[v]);
                }
            }
            *sums = sum;
        }
    }

    /// The last values of a grid row, fewer than a vector.
    #[inline(always)]
    fn rest<S: pulp::Simd>(&mut self, simd: S, y: usize, start: usize) {
        let Stencil { height, width, stride, indptr, offsets, values } = self.stencil;
        let run = width * self.lanes;
        let base = y * stride * self.lanes + start;
        for (row, span) in indptr.windows(2).enumerate() {
            let sums = &mut self.sums[(row * height + y) * run..][start..run];
            let mut sum = simd.partial_load_f32s(sums);
            for k in span[0]..span[1] {
                let from = base + offsets[k] as usize * self.lanes;
                let x = simd.partial_load_f32s(&self.source[from..from + run - start]);
                sum = simd.mul_add_e_f32s(simd.splat_f32s(values[k]), x, sum);
            }
            simd.partial_store_f32s(sums, sum);
        }
    }
}

impl pulp::WithSimd for Kernel<'_> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: pulp::Simd>(mut self, simd: S) {
        let run = self.stencil.width * self.lanes;
        for y in 0..self.stencil.height {
            let mut start = 0;
            while start < run {
                match (run - start) / S::F32_LANES {
                    0 => {
                        self.rest(simd, y, start);
                        start = run;
                    }
                    1 => {
                        self.block::<S, 1>(simd, y, start);
                        start += S::F32_LANES;
                    }
                    2..4 => {
                        self.block::<S, 2>(simd, y, start);
                        start += 2 * S::F32_LANES;
                    }
                    4..BLOCK => {
                        self.block::<S, 4>(simd, y, start);
                        start += 4 * S::F32_LANES;
                    }
                    _ => {
                        self.block::<S, BLOCK>(simd, y, start);
                        start += BLOCK * S::F32_LANES;
                    }
                }
            }
        }
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
            assert_eq!(stencil.rows(), 5);
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
