//! Sums of products over many features, in one d × d matrix whatever the number of samples, on all threads at once.
//!
//! The matrix is cut into tiles, and every tile adds its blocks of samples in order: the bits do not depend on the number
//! of threads. Products are summed in single precision over [`CHUNK`] samples and in double precision from there on
//! ([`super::single`]).

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use super::single::{CHUNK, squares};
use super::{Form, Statistics, Tree, shifted};
use crate::linalg::{Matrix, View, gemm};
use crate::parallel::{self, Cancel, Threads};
use crate::{Error, Result};

/// Number of rows and columns of a tile.
const TILE: usize = 384;
/// Chunks that are read before their products are added: enough for every thread of most machines.
const CHUNKS: usize = 8;

/// From this many features on, sums are computed in this way.
pub(crate) const WIDE: usize = 1024;

/// Bytes of memory for a pass over this many features and targets, in this many pieces.
pub(crate) fn bytes(features: usize, targets: usize, pieces: usize) -> u64 {
    let (d, r) = (features as u64, targets as u64);
    // Tiles, the whole matrix at the end, sums of pieces that wait for others, and the samples of a step in both
    // precisions.
    let waiting = u64::from(pieces.max(1).ilog2());
    12 * d * d + 16 * r * d + waiting * 8 * d * (d + r) + 12 * (CHUNK * CHUNKS) as u64 * (d + r)
}

/// A part of G (`targets` is false) or of H: rows are features or targets, columns features.
struct Tile {
    targets: bool,
    rows: Range<usize>,
    columns: Range<usize>,
    sums: Mutex<Vec<f64>>,
}

fn cuts(count: usize) -> impl Iterator<Item = Range<usize>> {
    super::cuts(count, TILE)
}

fn tiles(features: usize, targets: usize) -> Vec<Tile> {
    let tile = |targets: bool, rows: &Range<usize>, columns: Range<usize>| {
        let sums = Mutex::new(vec![0.0; rows.len() * columns.len()]);
        Tile { targets, rows: rows.clone(), columns, sums }
    };
    let of_gram = cuts(features)
        .flat_map(|rows| cuts(features).take_while(move |c| c.start <= rows.start).map(move |c| (rows.clone(), c)));
    let of_cross = cuts(targets).flat_map(|rows| cuts(features).map(move |c| (rows.clone(), c)));
    of_gram.map(|(r, c)| tile(false, &r, c)).chain(of_cross.map(|(r, c)| tile(true, &r, c))).collect()
}

/// Some columns of a matrix.
fn columns(m: &Matrix<f32>, range: &Range<usize>) -> Matrix<f32> {
    let mut data = Vec::with_capacity(m.rows() * range.len());
    (0..m.rows()).for_each(|i| data.extend_from_slice(&m.row(i)[range.clone()]));
    Matrix::from_vec(m.rows(), range.len(), data).unwrap_or_default()
}

impl Tile {
    fn add(&self, chunks: &[(Matrix<f32>, Matrix<f32>)]) {
        let mut sums = self.sums.lock().unwrap_or_else(PoisonError::into_inner);
        let (rows, cols) = (self.rows.len(), self.columns.len());
        let mut product = vec![0.0f32; rows * cols];
        for (features, targets) in chunks {
            let left = columns(if self.targets { targets } else { features }, &self.rows);
            let (samples, d) = (features.rows(), features.cols());
            let right = View::new(&features.as_slice()[self.columns.start..], samples, cols, d);
            gemm(&mut product, cols, false, 1.0, left.view().t(), right);
            sums.iter_mut().zip(&product).for_each(|(s, p)| *s += f64::from(*p));
        }
    }
}

impl Statistics {
    /// [`Statistics::stream_pieces`] for many features whose values are of single precision.
    pub(crate) fn stream_wide(
        samples: usize,
        piece: usize,
        shape: [usize; 2],
        threads: Threads,
        cancel: &Cancel,
        read: impl Fn(Range<usize>) -> Result<(Matrix<f32>, Matrix)> + Sync,
        mut progress: impl FnMut(usize),
    ) -> Result<Self> {
        let mut tree = Tree::default();
        for piece in super::cuts(samples, piece) {
            let read = |range| read(shifted(range, piece.start));
            let report = |done| progress(piece.start + done);
            tree.push(Self::wide_piece(piece.len(), shape, threads, cancel, read, report)?)?;
        }
        tree.finish()
    }

    fn wide_piece(
        samples: usize,
        [features, targets]: [usize; 2],
        threads: Threads,
        cancel: &Cancel,
        read: impl Fn(Range<usize>) -> Result<(Matrix<f32>, Matrix)> + Sync,
        mut progress: impl FnMut(usize),
    ) -> Result<Self> {
        let tiles = tiles(features, targets);
        let mut energy = vec![0.0; targets];
        for first in (0..samples).step_by(CHUNK * CHUNKS) {
            let end = (first + CHUNK * CHUNKS).min(samples);
            let chunks = parallel::map(threads, (end - first).div_ceil(CHUNK), |k| {
                cancel.check()?;
                let (f, t) = read(first + k * CHUNK..(first + (k + 1) * CHUNK).min(end))?;
                if (f.cols(), t.cols()) != (features, targets) {
                    let got = format!("{}, {}", f.cols(), t.cols());
                    return Err(Error::shape("features, targets", format!("{features}, {targets}"), got));
                }
                f.require_finite("features", 0)?;
                t.require_finite("targets", 0)?;
                let squares = squares(&t);
                Ok((f, t.cast::<f32>(), squares))
            })?;
            let mut pairs = Vec::with_capacity(chunks.len());
            for (f, t, squares) in chunks {
                energy.iter_mut().zip(squares).for_each(|(e, s)| *e += s);
                pairs.push((f, t));
            }
            parallel::map(threads, tiles.len(), |k| {
                cancel.check()?;
                tiles[k].add(&pairs);
                Ok(())
            })?;
            progress(end);
        }
        let mut gram = Matrix::zeros(features, features);
        let mut cross = Matrix::zeros(targets, features);
        for tile in tiles {
            let sums = tile.sums.into_inner().unwrap_or_else(PoisonError::into_inner);
            for (i, line) in tile.rows.clone().zip(sums.chunks_exact(tile.columns.len().max(1))) {
                if tile.targets {
                    cross.row_mut(i)[tile.columns.clone()].copy_from_slice(line);
                    continue;
                }
                for (j, v) in tile.columns.clone().zip(line).filter(|(j, _)| *j <= i) {
                    gram[(i, j)] = *v;
                    gram[(j, i)] = *v;
                }
            }
        }
        Ok(Self { samples, form: Form::Gram(gram), cross, energy })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    #[test]
    fn wide_sums_are_the_exact_ones_within_single_precision_for_any_number_of_threads() {
        let (m, d, r) = (2 * CHUNK * CHUNKS + 77, 2 * TILE + 5, 3);
        let mut random = Random::new(4);
        // Features whose mean is not zero, as after a ReLU.
        let f = Matrix::from_fn(m, d, |_, _| f64::from(random.normal().max(0.0) as f32));
        let t = Matrix::from_fn(m, r, |i, k| f[(i, 7 * k)] - 0.3 * f[(i, k + TILE)] + 0.1 * random.normal());
        let rows =
            |m: &Matrix, range: Range<usize>| Matrix::from_fn(range.len(), m.cols(), |i, j| m[(range.start + i, j)]);
        let wide = |threads, piece| {
            let read = |range: Range<usize>| Ok((rows(&f, range.clone()).cast(), rows(&t, range)));
            let cancel = Cancel::new();
            Statistics::stream_wide(m, piece, [d, r], Threads::new(threads), &cancel, read, |_| {}).unwrap()
        };
        let got = wide(1, 1000);
        assert_eq!(got, wide(3, 1000));
        // Pieces that are summed on their own, in pairs, as on a worker.
        let mut tree = Tree::default();
        for first in (0..m).step_by(2000) {
            let read = |range: Range<usize>| {
                Ok((rows(&f, shifted(range.clone(), first)).cast(), rows(&t, shifted(range, first))))
            };
            let (count, cancel) = (2000.min(m - first), Cancel::new());
            tree.push(Statistics::stream_wide(count, 1000, [d, r], Threads::one(), &cancel, read, |_| {}).unwrap())
                .unwrap();
        }
        assert_eq!(got, tree.finish().unwrap());
        super::super::single::tests::assert_close(&got, &Statistics::of(&f, &t).unwrap(), 2e-7);
        let wrong = |_: Range<usize>| Ok((Matrix::zeros(1, 2), Matrix::zeros(1, 1)));
        assert!(Statistics::stream_wide(1, 1, [3, 1], Threads::one(), &Cancel::new(), wrong, |_| {}).is_err());
    }
}
