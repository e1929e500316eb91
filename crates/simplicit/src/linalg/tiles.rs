//! Sparse × dense for batches: every non-zero multiplies one feature of many samples at once.
//!
//! Dense operands are *lanes*: feature-major, `lanes` samples side by side, so that a feature is a few vector registers.
//! A sparse matrix is cut into tiles of [`TILE`] columns: the lanes of one tile fit into the first-level cache and serve
//! all rows, and a column inside a tile is a byte. Every lane is summed in the same order whatever the number of lanes,
//! so a sample's result does not depend on the batch it is in.

use super::{Csr, Scalar};

/// Columns per tile.
pub const TILE: usize = 128;

/// The numbers of samples that run side by side; a power of two from 8 to 64.
pub const MAX_LANES: usize = 64;

/// A buffer that starts on a cache line, so that no vector straddles two.
#[derive(Debug)]
pub struct Aligned<T> {
    data: Vec<T>,
    start: usize,
}

impl<T: Scalar> Aligned<T> {
    /// All zeros.
    pub fn zeros(length: usize) -> Self {
        const LINE: usize = 64;
        let data = vec![T::default(); length + LINE / size_of::<T>()];
        let start = data.as_ptr().align_offset(LINE).min(LINE / size_of::<T>());
        Self { data, start }
    }

    fn range(&self) -> std::ops::Range<usize> {
        self.start..self.start + self.data.len() - 64 / size_of::<T>()
    }
}

impl<T: Scalar> std::ops::Deref for Aligned<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        &self.data[self.range()]
    }
}

impl<T: Scalar> std::ops::DerefMut for Aligned<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        let range = self.range();
        &mut self.data[range]
    }
}

/// A sparse matrix cut into tiles of columns.
#[derive(Debug, Clone)]
pub struct Tiles<T> {
    rows: usize,
    /// The tiles that have entries, and where their spans start.
    tiles: Vec<(usize, usize)>,
    spans: Vec<Span>,
    /// Column inside the tile.
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
    /// Cuts a matrix; values may change their precision.
    pub fn new(matrix: &Csr<f32>) -> Self {
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
        out
    }

    /// The tiles that have entries, ascending.
    pub fn occupied(&self) -> impl Iterator<Item = usize> + '_ {
        self.tiles.iter().map(|&(tile, _)| tile)
    }

    /// The spans of the k-th occupied tile.
    fn spans(&self, k: usize) -> &[Span] {
        let end = self.tiles.get(k + 1).map_or(self.spans.len(), |&(_, start)| start);
        &self.spans[self.tiles[k].1..end]
    }
}

/// The two precisions of [`accumulate`].
pub trait Lane: Scalar {
    /// `sums += tile × source` for the k-th occupied tile, `source` being the features of that tile alone.
    fn accumulate_tile(tiles: &Tiles<Self>, k: usize, sums: &mut [Self], source: &[Self], lanes: usize);
}

/// `sums += M × source`: `sums` is rows × lanes, `source` the features of all tiles, padded to a multiple of
/// [`TILE`] features.
///
/// # Panics
/// If a slice is too short; sizes are the caller's own arithmetic, never data.
pub fn accumulate<T: Lane>(tiles: &Tiles<T>, sums: &mut [T], source: &[T], lanes: usize) {
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
                        // The mask tells the compiler what construction guarantees: no bounds check.
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

/// Raises `largest` (one number per lane) to the largest magnitude of `rows`, features × lanes. A NaN counts as larger
/// than infinity and stays.
pub fn largest_magnitudes(largest: &mut [f32], rows: &[f32]) {
    assert!(largest.len().is_power_of_two() && (8..=MAX_LANES).contains(&largest.len()));
    pulp::Arch::new().dispatch(Largest { largest, rows });
}

struct Largest<'a> {
    largest: &'a mut [f32],
    rows: &'a [f32],
}

impl Largest<'_> {
    #[inline(always)]
    fn run<S: pulp::Simd, const V: usize>(self, simd: S) {
        // Without their sign, numbers are ordered like their bits, infinity and NaN on top.
        let unsigned = simd.splat_u32s(0x7fff_ffff);
        let mut found = [simd.splat_u32s(0); V];
        for row in S::as_simd_f32s(self.rows).0.as_chunks::<V>().0 {
            for v in 0..V {
                found[v] = simd.max_u32s(found[v], simd.and_u32s(pulp::cast(row[v]), unsigned));
            }
        }
        for (largest, found) in S::as_mut_simd_f32s(self.largest).0.iter_mut().zip(found) {
            *largest = pulp::cast(simd.max_u32s(found, simd.and_u32s(pulp::cast(*largest), unsigned)));
        }
    }
}

impl pulp::WithSimd for Largest<'_> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: pulp::Simd>(self, simd: S) {
        match self.largest.len() / S::F32_LANES {
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

/// Samples to lanes: `out[j·lanes + s] = samples[s·stride + j]` for `count` samples and `features` features. Lanes
/// past `count` are left alone.
pub fn to_lanes(out: &mut [f32], samples: &[f32], stride: usize, count: usize, features: usize, lanes: usize) {
    assert!(count <= lanes && out.len() >= features * lanes);
    transpose(out, lanes, samples, stride, count, features);
}

/// Lanes to samples: `out[s·stride + j] = source[j·lanes + s]` for `count` samples and `features` features.
pub fn from_lanes(out: &mut [f32], stride: usize, source: &[f32], count: usize, features: usize, lanes: usize) {
    assert!(count <= lanes && source.len() >= features * lanes);
    transpose(out, stride, source, lanes, features, count);
}

/// `out[j·out_stride + i] = source[i·stride + j]` for i below `rows`, j below `cols`.
fn transpose(out: &mut [f32], out_stride: usize, source: &[f32], stride: usize, rows: usize, cols: usize) {
    if rows == 0 || cols == 0 {
        return;
    }
    // Whole squares of 8 × 8 in registers, the rest entry by entry.
    let (whole_rows, whole_cols) = (rows / 8 * 8, cols / 8 * 8);
    squares(out, out_stride, source, stride, whole_rows, whole_cols);
    for i in 0..rows {
        for j in (if i < whole_rows { whole_cols } else { 0 })..cols {
            out[j * out_stride + i] = source[i * stride + j];
        }
    }
}

#[cfg(target_arch = "x86_64")]
fn squares(out: &mut [f32], out_stride: usize, source: &[f32], stride: usize, rows: usize, cols: usize) {
    use pulp::x86::V3;
    use std::arch::x86_64::__m256;
    let Some(simd) = V3::try_new() else { return squares_plain(out, out_stride, source, stride, rows, cols) };
    simd.vectorize(
        #[inline(always)]
        || {
            let avx = simd.avx;
            let across = cols / 8;
            for i in (0..rows).step_by(8) {
                // Eight rows cut to the same number of squares: the index below needs no check.
                let row = |r: usize| &source[(i + r) * stride..].as_chunks::<8>().0[..across];
                let source = [row(0), row(1), row(2), row(3), row(4), row(5), row(6), row(7)];
                for (j, columns) in out.chunks_mut(8 * out_stride).take(across).enumerate() {
                    let r: [__m256; 8] = source.map(
                        #[inline(always)]
                        |row| pulp::cast(row[j]),
                    );
                    let lo = |k: usize| avx._mm256_unpacklo_ps(r[k], r[k + 1]);
                    let hi = |k: usize| avx._mm256_unpackhi_ps(r[k], r[k + 1]);
                    let (t0, t1, t2, t3) = (lo(0), hi(0), lo(2), hi(2));
                    let (t4, t5, t6, t7) = (lo(4), hi(4), lo(6), hi(6));
                    let front = |a: __m256, b: __m256| avx._mm256_shuffle_ps::<0x44>(a, b);
                    let back = |a: __m256, b: __m256| avx._mm256_shuffle_ps::<0xee>(a, b);
                    let (s0, s1, s2, s3) = (front(t0, t2), back(t0, t2), front(t1, t3), back(t1, t3));
                    let (s4, s5, s6, s7) = (front(t4, t6), back(t4, t6), front(t5, t7), back(t5, t7));
                    let low = |a: __m256, b: __m256| avx._mm256_permute2f128_ps::<0x20>(a, b);
                    let high = |a: __m256, b: __m256| avx._mm256_permute2f128_ps::<0x31>(a, b);
                    let mut rest = &mut columns[i..];
                    let mut put = |v: __m256| {
                        if let Some(place) = rest.first_chunk_mut::<8>() {
                            *place = pulp::cast(v);
                        }
                        let taken = std::mem::take(&mut rest);
                        rest = taken.get_mut(out_stride..).unwrap_or_default();
                    };
                    put(low(s0, s4));
                    put(low(s1, s5));
                    put(low(s2, s6));
                    put(low(s3, s7));
                    put(high(s0, s4));
                    put(high(s1, s5));
                    put(high(s2, s6));
                    put(high(s3, s7));
                }
            }
        },
    );
}

#[cfg(not(target_arch = "x86_64"))]
fn squares(out: &mut [f32], out_stride: usize, source: &[f32], stride: usize, rows: usize, cols: usize) {
    squares_plain(out, out_stride, source, stride, rows, cols);
}

fn squares_plain(out: &mut [f32], out_stride: usize, source: &[f32], stride: usize, rows: usize, cols: usize) {
    for i in (0..rows).step_by(8) {
        for j in 0..cols {
            for r in i..i + 8 {
                out[j * out_stride + r] = source[r * stride + j];
            }
        }
    }
}

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

    #[test]
    fn magnitudes_keep_what_is_not_finite() {
        let mut r = Random::new(6);
        for lanes in [8, 16, 32, 64] {
            let mut rows: Vec<f32> = (0..9 * lanes).map(|_| r.normal() as f32).collect();
            (rows[lanes + 3], rows[2 * lanes + 5]) = (f32::NAN, f32::NEG_INFINITY);
            let mut largest = vec![0.5; lanes];
            largest_magnitudes(&mut largest, &rows);
            for (s, found) in largest.iter().enumerate() {
                match s {
                    3 => assert!(found.is_nan()),
                    5 => assert_eq!(*found, f32::INFINITY),
                    _ => assert_eq!(*found, (0..9).map(|j| rows[j * lanes + s].abs()).fold(0.5, f32::max)),
                }
            }
        }
        let mut buffer = Aligned::<f64>::zeros(100);
        buffer[99] = 1.0;
        assert_eq!((buffer.len(), buffer.as_ptr().align_offset(64)), (100, 0));
    }

    #[test]
    fn transposes_move_every_entry_and_touch_no_other() {
        let mut r = Random::new(5);
        for (count, features, lanes) in [(1, 1, 8), (8, 8, 8), (13, 29, 16), (32, 128, 32), (5, 17, 64), (0, 4, 8)] {
            let stride = features + 3;
            let samples: Vec<f32> = (0..count * stride).map(|_| r.normal() as f32).collect();
            let mut out = vec![-1.0; features * lanes];
            to_lanes(&mut out, &samples, stride, count, features, lanes);
            for j in 0..features {
                for s in 0..lanes {
                    let expected = if s < count { samples[s * stride + j] } else { -1.0 };
                    assert_eq!(out[j * lanes + s], expected);
                }
            }
            let mut back = vec![-2.0; count * stride];
            from_lanes(&mut back, stride, &out, count, features, lanes);
            for s in 0..count {
                assert_eq!(back[s * stride..s * stride + features], samples[s * stride..s * stride + features]);
                assert!(back[s * stride + features..(s + 1) * stride].iter().all(|v| *v == -2.0));
            }
        }
    }
}
