//! The matrices that the splitting multiplies with: regularised inverses of Ĝ, made for one group of rows or kept for
//! several.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::Quadratic;
use crate::linalg::{Cholesky, Matrix, View, gemm, shifted_inverse};
use crate::parallel::{self, Threads};
use crate::{Error, Result};

/// From this many features on, products are cut into this many panels of columns, so that threads without a block of
/// rows can help with another thread's block. Neither depends on the number of threads, because the last bits of a
/// product may depend on its width.
const WIDE: usize = 1024;
const PANELS: usize = 4;

/// Rows times a projection.
#[derive(Debug)]
pub(super) struct Product {
    rows: usize,
    panels: Vec<Mutex<Panel>>,
    /// The rows times F̂ᵀ.
    between: Vec<f32>,
}

/// Some neighbouring columns of a product, row by row.
#[derive(Debug)]
pub(super) struct Panel {
    pub(super) first: usize,
    pub(super) width: usize,
    pub(super) values: Vec<f32>,
}

impl Product {
    pub(super) fn panels(&mut self) -> impl Iterator<Item = &Panel> {
        self.panels.iter_mut().map(|panel| &*panel.get_mut().unwrap_or_else(PoisonError::into_inner))
    }
}

/// What a step multiplies with: ρ(Ĝ + ρI)⁻¹.
#[derive(Debug)]
pub(super) enum Projection {
    /// The matrix itself, d × d.
    Whole(Matrix<f32>),
    /// I − F̂ᵀB with B = (F̂F̂ᵀ + ρI)⁻¹F̂, both m × d.
    Factors(Matrix<f32>, Matrix<f32>),
}

impl Projection {
    pub(super) fn new(quadratic: Quadratic, rho: f64, threads: Threads) -> Result<Self> {
        match quadratic {
            Quadratic::Gram(gram) => Ok(Self::Whole(shifted_inverse(gram, rho, rho, threads)?)),
            Quadratic::Samples(f) => {
                let m = f.rows();
                let mut kernel = Matrix::zeros(m, m);
                gemm(kernel.as_mut_slice(), m, false, 1.0, f.view(), f.view().t());
                let mut factor = Cholesky::with_capacity(m);
                let filled = factor.factor(m, |a| {
                    a.copy_from_slice(kernel.as_slice());
                    (0..m).for_each(|i| a[i * m + i] += rho);
                });
                if !filled {
                    return Err(Error::shape("samples", "finite features", "a NaN"));
                }
                let mut solved = f.clone();
                factor.solve(solved.as_mut_slice(), f.cols());
                Ok(Self::Factors(f.cast(), solved.cast()))
            }
        }
    }

    /// Room for products of `rows` rows with it.
    pub(super) fn product(&self, rows: usize) -> Product {
        let (d, between) = match self {
            Self::Whole(p) => (p.cols(), 0),
            Self::Factors(f, _) => (f.cols(), rows * f.rows()),
        };
        // The width is a multiple of 16, the widest vector, so that only the last panel has a remainder.
        let width = if d < WIDE { d } else { d.div_ceil(PANELS).next_multiple_of(16) };
        let panels = (0..d).step_by(width.max(1)).map(|first| {
            let width = width.min(d - first);
            Mutex::new(Panel { first, width, values: vec![0.0; rows * width] })
        });
        Product { rows, panels: panels.collect(), between: vec![0.0; between] }
    }

    /// `out` = rows of `x` times the projection, on up to `threads` threads.
    pub(super) fn apply(&self, x: &[f32], out: &mut Product, threads: Threads) -> Result<()> {
        let Product { rows, panels, between } = out;
        let x_view = |d| View::new(x, *rows, d, d);
        if let Self::Factors(f, _) = self {
            gemm(between, f.rows(), false, 1.0, x_view(f.cols()), f.view().t());
        }
        parallel::fold(
            threads,
            panels.len(),
            |k| {
                let mut panel = panels[k].lock().unwrap_or_else(PoisonError::into_inner);
                let Panel { first, width, values } = &mut *panel;
                match self {
                    Self::Whole(p) => {
                        let d = p.cols();
                        gemm(values, *width, false, 1.0, x_view(d), View::new(&p.as_slice()[*first..], d, *width, d));
                    }
                    Self::Factors(_, b) => {
                        let (m, d) = (b.rows(), b.cols());
                        for (values, x) in values.chunks_exact_mut(*width).zip(x.chunks_exact(d)) {
                            values.copy_from_slice(&x[*first..*first + *width]);
                        }
                        let b = View::new(&b.as_slice()[*first..], m, *width, d);
                        gemm(values, *width, true, -1.0, View::new(between, *rows, m, m), b);
                    }
                }
                Ok(())
            },
            |_, ()| Ok(()),
        )
    }

    /// The diagonal of (Ĝ + ρI)⁻¹.
    pub(super) fn inverse_diagonal(&self, rho: f64) -> Vec<f64> {
        match self {
            Self::Whole(p) => (0..p.rows()).map(|j| f64::from(p[(j, j)]) / rho).collect(),
            Self::Factors(f, b) => {
                let mut out = vec![1.0f64; f.cols()];
                for s in 0..f.rows() {
                    for ((out, f), b) in out.iter_mut().zip(f.row(s)).zip(b.row(s)) {
                        *out -= f64::from(f * b);
                    }
                }
                // Rounding may make the difference zero or negative.
                out.iter().map(|v| v.max(1e-6) / rho).collect()
            }
        }
    }
}

/// The inverses of one Ĝ, kept for later groups of rows, in this process or in others.
#[derive(Debug, Default)]
pub struct Inverses {
    kept: Mutex<Kept>,
}

#[derive(Debug, Default)]
struct Kept {
    /// The inverses, by the bits of ρ.
    by_rho: BTreeMap<u64, Arc<Projection>>,
    made: usize,
}

impl Inverses {
    fn kept(&self) -> MutexGuard<'_, Kept> {
        // A thread that panicked left the map in a consistent state.
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The inverse for ρ, made now if it is not known.
    pub(super) fn at(&self, quadratic: Quadratic, rho: f64, threads: Threads) -> Result<Arc<Projection>> {
        let mut kept = self.kept();
        if let Some(known) = kept.by_rho.get(&rho.to_bits()) {
            return Ok(known.clone());
        }
        let projection = Arc::new(Projection::new(quadratic, rho, threads)?);
        kept.made += 1;
        kept.by_rho.insert(rho.to_bits(), projection.clone());
        Ok(projection)
    }

    /// Number of inverses that were made in this process.
    pub fn made(&self) -> usize {
        self.kept().made
    }

    /// Bytes that they take.
    pub(crate) fn bytes(&self) -> u64 {
        let numbers = |p: &Arc<Projection>| match p.as_ref() {
            Projection::Whole(p) => p.as_slice().len(),
            Projection::Factors(f, b) => f.as_slice().len() + b.as_slice().len(),
        };
        4 * self.kept().by_rho.values().map(numbers).sum::<usize>() as u64
    }

    /// The inverse for ρ, for another process: the lower triangle, row by row. An error if there are few samples,
    /// because every process then makes its own.
    pub(crate) fn to_bytes(&self, quadratic: Quadratic, rho: f64, threads: Threads) -> Result<Vec<u8>> {
        match self.at(quadratic, rho, threads)?.as_ref() {
            Projection::Whole(p) => {
                Ok((0..p.rows()).flat_map(|i| &p.row(i)[..=i]).flat_map(|v| v.to_le_bytes()).collect())
            }
            Projection::Factors(..) => {
                Err(Error::unsupported("inverses of few samples, sent", "every process makes its own"))
            }
        }
    }

    /// Takes over an inverse for ρ from [`Inverses::to_bytes`] of another process, for d features.
    pub(crate) fn know(&self, rho: f64, d: usize, bytes: &[u8]) -> Result<()> {
        let (numbers, rest) = bytes.as_chunks::<4>();
        if numbers.len() != d * (d + 1) / 2 || !rest.is_empty() {
            let expected = format!("{} bytes for {d} features", 2 * d * (d + 1));
            return Err(Error::shape("an inverse", expected, bytes.len()));
        }
        let mut kept = self.kept();
        if kept.by_rho.contains_key(&rho.to_bits()) {
            return Ok(());
        }
        let (mut out, mut left) = (Matrix::zeros(d, d), numbers);
        for i in 0..d {
            let (line, after) = left.split_at(i + 1);
            left = after;
            out.row_mut(i)[..=i].iter_mut().zip(line).for_each(|(o, v)| *o = f32::from_le_bytes(*v));
        }
        for i in 0..d {
            for j in i + 1..d {
                out[(i, j)] = out[(j, i)];
            }
        }
        kept.by_rho.insert(rho.to_bits(), Arc::new(Projection::Whole(out)));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    /// Projections of both kinds that are wide enough for several panels, the last of which is narrower. They are
    /// compared with sums in double precision, and bit by bit between numbers of threads.
    #[test]
    fn products_in_panels_are_products_for_any_number_of_threads() {
        let (rows, d, m) = (5, WIDE + 24, 3);
        let mut random = Random::new(4);
        let mut matrix = |rows, cols| Matrix::from_fn(rows, cols, |_, _| random.normal() as f32);
        let (x, whole, f, b) = (matrix(rows, d), matrix(d, d), matrix(m, d), matrix(m, d));
        let exact = |a: &Matrix<f32>, i: usize, b: &Matrix<f32>, j: usize| {
            (0..a.cols()).map(|k| f64::from(a[(i, k)]) * f64::from(b[(k, j)])).sum::<f64>()
        };
        let fx = Matrix::from_fn(rows, m, |i, s| (0..d).map(|k| x[(i, k)] * f[(s, k)]).sum::<f32>());
        let through_samples = Matrix::from_fn(rows, d, |i, j| f64::from(x[(i, j)]) - exact(&fx, i, &b, j));
        let direct = Matrix::from_fn(rows, d, |i, j| exact(&x, i, &whole, j));
        for (projection, expected, size) in
            [(Projection::Whole(whole), direct, 32.0), (Projection::Factors(f, b), through_samples, 60.0)]
        {
            let mut product = projection.product(rows);
            let mut seen: Option<Vec<f32>> = None;
            for threads in [1, 2, 7] {
                projection.apply(x.as_slice(), &mut product, Threads::new(threads)).unwrap();
                let mut all = Vec::new();
                for panel in product.panels() {
                    for (i, line) in panel.values.chunks_exact(panel.width).enumerate() {
                        for (k, value) in line.iter().enumerate() {
                            let error = (f64::from(*value) - expected[(i, panel.first + k)]).abs();
                            assert!(error < 1e-4 * size, "{i} {}: off by {error}", panel.first + k);
                        }
                    }
                    all.extend_from_slice(&panel.values);
                }
                assert_eq!(all.len(), rows * d);
                assert_eq!(product.panels().count(), PANELS);
                assert!(seen.replace(all.clone()).is_none_or(|before| before == all));
            }
        }
    }
}
