//! Sparse × dense for batches: every non-zero multiplies one feature of many samples at once.
//!
//! Dense operands are [lanes](super::lanes). A sparse matrix is cut into tiles of [`TILE`] columns: the lanes of one tile
//! fit into the first-level cache and serve all rows, and a column inside a tile is a byte. Every lane is summed in the
//! same order whatever the number of lanes, so a sample's result does not depend on the batch it is in.

use super::lanes::MAX_LANES;
use super::{Csr, Scalar};

/// Columns per tile.
pub(crate) const TILE: usize = 128;

/// A sparse matrix cut into tiles of columns.
#[derive(Debug, Clone)]
pub(crate) struct Tiles<T> {
    rows: usize,
    /// The tiles that have entries, each with the place where its spans start.
    tiles: Vec<(usize, usize)>,
    spans: Vec<Span>,
    /// For every entry its column inside the tile.
    columns: Vec<u8>,
    values: Vec<T>,
}

/// The entries of one row in one tile.
#[derive(Debug, Clone, Copy)]
struct Span {
    row: u32,
    start: usize,
    end: usize,
}

impl<T: Scalar> Tiles<T> {
    /// Cuts a matrix into tiles; the precision of the values may change.
    pub(crate) fn new(matrix: &Csr<f32>) -> Self {
        let mut entries: Vec<(u32, u32, usize)> = Vec::with_capacity(matrix.nonzeros());
        for row in 0..matrix.rows() {
            for k in matrix.indptr()[row]..matrix.indptr()[row + 1] {
                entries.push((matrix.indices()[k] / TILE as u32, row as u32, k));
            }
        }
        entries.sort_unstable();
        let mut out = Self {
            rows: matrix.rows(),
            tiles: Vec::new(),
            spans: Vec::new(),
            columns: Vec::with_capacity(entries.len()),
            values: Vec::with_capacity(entries.len()),
        };
        let mut previous = None;
        for (tile, row, k) in entries {
            let place = out.columns.len();
            if previous.map(|(tile, _)| tile) != Some(tile) {
                out.tiles.push((tile as usize, out.spans.len()));
            }
            if previous != Some((tile, row)) {
                out.spans.push(Span { row, start: place, end: place });
            }
            out.columns.push((matrix.indices()[k] % TILE as u32) as u8);
            out.values.push(T::from_f64(matrix.data()[k].to_f64()));
            if let Some(span) = out.spans.last_mut() {
                span.end = place + 1;
            }
            previous = Some((tile, row));
        }
        // Rows of equal length are put next to each other, so that the processor predicts where each loop ends. The
        // order of rows within a tile does not influence any sum.
        for k in 0..out.tiles.len() {
            let end = out.tiles.get(k + 1).map_or(out.spans.len(), |&(_, start)| start);
            out.spans[out.tiles[k].1..end].sort_by_key(|span| span.end - span.start);
        }
        out
    }

    /// The tiles that have entries, ascending.
    pub(crate) fn occupied(&self) -> impl Iterator<Item = usize> + '_ {
        self.tiles.iter().map(|&(tile, _)| tile)
    }

    /// The spans of the k-th occupied tile.
    fn spans(&self, k: usize) -> &[Span] {
        let end = self.tiles.get(k + 1).map_or(self.spans.len(), |&(_, start)| start);
        &self.spans[self.tiles[k].1..end]
    }
}

/// The two precisions that [`accumulate`] works in.
pub(crate) trait Lane: Scalar {
    /// `sums += tile × source` for the k-th occupied tile, `source` being the features of that tile alone.
    fn accumulate_tile(tiles: &Tiles<Self>, k: usize, sums: &mut [Self], source: &[Self], lanes: usize);
}

/// `sums += M × source`: `sums` is rows × lanes, `source` the features of all tiles, padded to a multiple of
/// [`TILE`] features.
///
/// # Panics
/// If a slice is too short; sizes come from the caller's own arithmetic, never from data.
pub(crate) fn accumulate<T: Lane>(tiles: &Tiles<T>, sums: &mut [T], source: &[T], lanes: usize) {
    for (k, tile) in tiles.occupied().enumerate() {
        T::accumulate_tile(tiles, k, sums, &source[tile * TILE * lanes..], lanes);
    }
}

macro_rules! lane {
    ($t:ty, $kernel:ident, $vector:ident, $per_vector:ident, $slices:ident, $slices_mut:ident, $splat:ident, $fma:ident) => {
        struct $kernel<'a> {
            tiles: &'a Tiles<$t>,
            k: usize,
            sums: &'a mut [$t],
            source: &'a [$t],
            lanes: usize,
        }

        impl $kernel<'_> {
            /// `V` vectors hold the lanes of a feature and stay in registers over all entries of a row.
            #[inline(always)]
            fn run<S: pulp::Simd, const V: usize>(self, simd: S) {
                let sums = S::$slices_mut(self.sums).0.as_chunks_mut::<V>().0;
                let Some(source) = S::$slices(self.source).0.as_chunks::<V>().0.first_chunk::<TILE>() else { return };
                for span in self.tiles.spans(self.k) {
                    let mut sum = sums[span.row as usize];
                    let columns = &self.tiles.columns[span.start..span.end];
                    let values = &self.tiles.values[span.start..span.end];
                    for (&column, &value) in columns.iter().zip(values) {
                        let value = simd.$splat(value);
                        // Construction guarantees that the index is in range; with the mask the compiler sees it and omits the bounds check.
                        let x = &source[column as usize % TILE];
                        for v in 0..V {
                            sum[v] = simd.$fma(value, x[v], sum[v]);
                        }
                    }
                    sums[span.row as usize] = sum;
                }
            }
        }

        impl pulp::WithSimd for $kernel<'_> {
            type Output = ();
            #[inline(always)]
            fn with_simd<S: pulp::Simd>(self, simd: S) {
                match self.lanes / S::$per_vector {
                    1 => self.run::<S, 1>(simd),
                    2 => self.run::<S, 2>(simd),
                    4 => self.run::<S, 4>(simd),
                    8 => self.run::<S, 8>(simd),
                    16 => self.run::<S, 16>(simd),
                    32 => self.run::<S, 32>(simd),
                    _ => self.run::<S, 64>(simd),
                }
            }
        }

        impl Lane for $t {
            fn accumulate_tile(tiles: &Tiles<$t>, k: usize, sums: &mut [$t], source: &[$t], lanes: usize) {
                assert!(lanes.is_power_of_two() && (8..=MAX_LANES).contains(&lanes));
                assert!(sums.len() >= tiles.rows * lanes && source.len() >= TILE * lanes);
                pulp::Arch::new().dispatch($kernel { tiles, k, sums, source, lanes });
            }
        }
    };
}

lane!(f32, KernelF32, f32s, F32_LANES, as_simd_f32s, as_mut_simd_f32s, splat_f32s, mul_add_e_f32s);
lane!(f64, KernelF64, f64s, F64_LANES, as_simd_f64s, as_mut_simd_f64s, splat_f64s, mul_add_e_f64s);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    fn sparse(rows: usize, cols: usize, density: f64, r: &mut Random) -> Csr<f32> {
        Csr::from_rows(
            cols,
            (0..rows).map(|_| {
                (0..cols).map(|j| (j, if r.uniform() < density { r.normal() as f32 } else { 0.0 })).collect::<Vec<_>>()
            }),
        )
    }

    #[test]
    fn products_match_the_definition_for_every_width() {
        let mut r = Random::new(3);
        for (rows, cols) in [(0, 5), (5, 0), (1, 1), (7, 127), (9, 128), (3, 129), (20, 400)] {
            let m = sparse(rows, cols, 0.2, &mut r);
            let mut narrow: Option<Vec<f32>> = None;
            for lanes in [8, 16, 32, 64] {
                let padded = cols.next_multiple_of(TILE) * lanes;
                let mut first = Random::new(4);
                let lane0: Vec<f32> = (0..cols).map(|_| first.normal() as f32).collect();
                let mut x = vec![0.0f32; padded];
                for j in 0..cols {
                    for s in 0..lanes {
                        x[j * lanes + s] = lane0[j] * (s + 1) as f32;
                    }
                }
                let mut sums = vec![0.5f32; rows * lanes];
                accumulate(&Tiles::new(&m), &mut sums, &x, lanes);
                let wide: Vec<f64> = x.iter().map(|v| f64::from(*v)).collect();
                let mut exact = vec![0.5f64; rows * lanes];
                accumulate(&Tiles::new(&m), &mut exact, &wide, lanes);
                for i in 0..rows {
                    for s in 0..lanes {
                        let terms: Vec<f64> =
                            m.row(i).map(|(j, v)| f64::from(v) * f64::from(x[j * lanes + s])).collect();
                        let (sum, size) = (terms.iter().sum::<f64>() + 0.5, terms.iter().map(|t| t.abs()).sum::<f64>());
                        assert!((exact[i * lanes + s] - sum).abs() <= 1e-14 * (1.0 + size));
                        assert!((f64::from(sums[i * lanes + s]) - sum).abs() <= 1e-5 * (1.0 + size));
                    }
                }
                let lane: Vec<f32> = (0..rows).map(|i| sums[i * lanes]).collect();
                assert_eq!(narrow.get_or_insert_with(|| lane.clone()), &lane, "a lane does not feel its neighbours");
            }
        }
    }
}
