//! Inverses of large symmetric matrices in tiles, on several threads.
//!
//! Tiles have a fixed size and every tile is the sum of its products in a fixed order, so the bits do not depend on the
//! number of threads. The work is n³/3 for each of the factor, its inverse and their product, all of it in [`gemm`].

use super::{Cholesky, Matrix, View, gemm};
use crate::parallel::{self, Threads};
use crate::{Error, Result};

/// Rows and columns of a tile.
const TILE: usize = 192;

/// The lower triangle of a symmetric or triangular matrix, tile by tile; tile (i, j) is row-major.
struct Tiles {
    size: usize,
    tiles: Vec<Vec<f64>>,
}

impl Tiles {
    fn count(size: usize) -> usize {
        size.div_ceil(TILE)
    }

    fn extent(size: usize, i: usize) -> usize {
        TILE.min(size - i * TILE)
    }

    fn view(&self, i: usize, j: usize) -> View<'_, f64> {
        let (rows, cols) = (Self::extent(self.size, i), Self::extent(self.size, j));
        View::new(&self.tiles[at(i, j)], rows, cols, cols)
    }
}

fn at(i: usize, j: usize) -> usize {
    i * (i + 1) / 2 + j
}

/// scale·(A + shift·I)⁻¹ of a symmetric matrix in single precision, computed in double precision. An error if the matrix
/// is not numerically positive definite after the shift.
pub(crate) fn shifted_inverse(a: &Matrix, shift: f64, scale: f64, threads: Threads) -> Result<Matrix<f32>> {
    let n = a.rows();
    let count = Tiles::count(n);
    // A few tiles are done before another thread would have started.
    let threads = if count > 2 { threads } else { Threads::one() };
    let (factor, diagonal) = factored(a, shift, threads)?;
    let inverse = lower_inverse(&factor, &diagonal, threads)?;
    drop(factor);
    let mut out = Matrix::<f32>::zeros(n, n);
    let pairs: Vec<(usize, usize)> = (0..count).flat_map(|i| (0..=i).map(move |j| (i, j))).collect();
    parallel::fold(
        threads,
        pairs.len(),
        |pair| {
            let (i, j) = pairs[pair];
            let cols = Tiles::extent(n, j);
            let mut tile = vec![0.0; Tiles::extent(n, i) * cols];
            for k in i..count {
                gemm(&mut tile, cols, true, scale, inverse.view(k, i).t(), inverse.view(k, j));
            }
            Ok(tile)
        },
        |pair, tile| {
            let (i, j) = pairs[pair];
            let cols = Tiles::extent(n, j);
            for (r, line) in tile.chunks_exact(cols).enumerate() {
                for (c, v) in line.iter().enumerate() {
                    let (row, col) = (i * TILE + r, j * TILE + c);
                    out[(row, col)] = *v as f32;
                    out[(col, row)] = *v as f32;
                }
            }
            Ok(())
        },
    )?;
    Ok(out)
}

/// The tiles of L below its diagonal tiles, and the inverses of those.
fn factored(a: &Matrix, shift: f64, threads: Threads) -> Result<(Tiles, Vec<Vec<f64>>)> {
    let n = a.rows();
    let count = Tiles::count(n);
    let mut factor = Tiles { size: n, tiles: vec![Vec::new(); count * (count + 1) / 2] };
    let mut diagonal = Vec::with_capacity(count);
    let mut cholesky = Cholesky::with_capacity(TILE.min(n));
    for j in 0..count {
        let cols = Tiles::extent(n, j);
        // The remainder of the column of tiles after the columns before it have been eliminated.
        let left = parallel::map(threads, count - j, |b| {
            let i = j + b;
            let rows = Tiles::extent(n, i);
            let mut tile = Vec::with_capacity(rows * cols);
            for r in 0..rows {
                tile.extend_from_slice(&a.row(i * TILE + r)[j * TILE..j * TILE + cols]);
                if i == j {
                    tile[r * cols + r] += shift;
                }
            }
            for k in 0..j {
                gemm(&mut tile, cols, true, -1.0, factor.view(i, k), factor.view(j, k).t());
            }
            Ok(tile)
        })?;
        let mut left = left.into_iter();
        let corner = left.next().unwrap_or_default();
        // It is symmetric up to rounding, so its upper half can be used as well as its lower one.
        if !cholesky.factor(cols, |upper| upper.copy_from_slice(&corner)) {
            return Err(Error::shape("Gram matrix", "finite and positive semidefinite", "a matrix that is neither"));
        }
        let mut inverse = vec![0.0; cols * cols];
        (0..cols).for_each(|r| inverse[r * cols + r] = 1.0);
        cholesky.solve_lower(&mut inverse, cols);
        let rest: Vec<Vec<f64>> = left.collect();
        let below = parallel::map(threads, rest.len(), |b| {
            let rows = Tiles::extent(n, j + 1 + b);
            let mut tile = vec![0.0; rows * cols];
            let inverse = View::new(&inverse, cols, cols, cols);
            gemm(&mut tile, cols, false, 1.0, View::new(&rest[b], rows, cols, cols), inverse.t());
            Ok(tile)
        })?;
        for (b, tile) in below.into_iter().enumerate() {
            factor.tiles[at(j + 1 + b, j)] = tile;
        }
        diagonal.push(inverse);
    }
    Ok((factor, diagonal))
}

/// L⁻¹, a column of tiles at a time.
fn lower_inverse(factor: &Tiles, diagonal: &[Vec<f64>], threads: Threads) -> Result<Tiles> {
    let n = factor.size;
    let count = Tiles::count(n);
    let columns = parallel::map(threads, count, |j| {
        let cols = Tiles::extent(n, j);
        let mut column: Vec<Vec<f64>> = vec![diagonal[j].clone()];
        for i in j + 1..count {
            let rows = Tiles::extent(n, i);
            let mut sum = vec![0.0; rows * cols];
            for (k, above) in column.iter().enumerate() {
                let above = View::new(above, Tiles::extent(n, j + k), cols, cols);
                gemm(&mut sum, cols, true, -1.0, factor.view(i, j + k), above);
            }
            let mut tile = vec![0.0; rows * cols];
            let own = View::new(&diagonal[i], rows, rows, rows);
            gemm(&mut tile, cols, false, 1.0, own, View::new(&sum, rows, cols, cols));
            column.push(tile);
        }
        Ok(column)
    })?;
    let mut out = Tiles { size: n, tiles: vec![Vec::new(); count * (count + 1) / 2] };
    for (j, column) in columns.into_iter().enumerate() {
        for (b, tile) in column.into_iter().enumerate() {
            out.tiles[at(j + b, j)] = tile;
        }
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    #[test]
    fn the_product_with_the_matrix_is_the_identity_for_any_size_and_threads() {
        for n in [1, 5, TILE, TILE + 1, 3 * TILE + 17] {
            let mut random = Random::new(n as u64);
            let f = Matrix::from_fn(n + 20, n, |_, _| random.normal());
            let mut a = Matrix::zeros(n, n);
            gemm(a.as_mut_slice(), n, false, 1.0 / n as f64, f.view().t(), f.view());
            let inverse = |threads| shifted_inverse(&a, 0.1, 0.1, Threads::new(threads)).unwrap();
            let got = inverse(1);
            assert_eq!(got, inverse(3));
            (0..n).for_each(|i| a[(i, i)] += 0.1);
            let wide: Matrix = got.cast();
            let mut product = vec![0.0; n * n];
            gemm(&mut product, n, false, 10.0, a.view(), wide.view());
            for (k, v) in product.iter().enumerate() {
                let expected = f64::from(u8::from(k / n == k % n));
                assert!((v - expected).abs() < 1e-4, "{n}: {v} at {k}");
            }
        }
        assert!(shifted_inverse(&Matrix::from_fn(2, 2, |_, _| -1.0), 0.1, 1.0, Threads::one()).is_err());
        assert!(shifted_inverse(&Matrix::from_fn(2, 2, |_, _| f64::NAN), 0.1, 1.0, Threads::one()).is_err());
    }
}
