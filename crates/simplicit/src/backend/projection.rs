//! What the splitting multiplies with: regularised inverses of Ĝ, made for one group of rows or kept for several.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::Quadratic;
use crate::linalg::{Cholesky, Matrix, View, gemm, shifted_inverse};
use crate::parallel::Threads;
use crate::{Error, Result};

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

    /// out = rows of `x` times the projection; `room` is for what lies between.
    pub(super) fn apply(&self, x: &[f32], rows: usize, out: &mut [f32], room: &mut Vec<f32>) {
        match self {
            Self::Whole(p) => {
                let d = p.cols();
                gemm(out, d, false, 1.0, View::new(x, rows, d, d), p.view());
            }
            Self::Factors(f, b) => {
                let (m, d) = (f.rows(), f.cols());
                room.resize(rows * m, 0.0);
                gemm(room, m, false, 1.0, View::new(x, rows, d, d), f.view().t());
                out.copy_from_slice(x);
                gemm(out, d, true, -1.0, View::new(room, rows, m, m), b.view());
            }
        }
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
                // The difference may round to nothing, or below.
                out.iter().map(|v| v.max(1e-6) / rho).collect()
            }
        }
    }
}

/// The inverses of one Ĝ, kept for the groups of rows that come after, here or in other processes.
#[derive(Debug, Default)]
pub struct Inverses {
    kept: Mutex<Kept>,
}

#[derive(Debug, Default)]
struct Kept {
    /// By the bits of ρ.
    by_rho: BTreeMap<u64, Arc<Projection>>,
    made: usize,
}

impl Inverses {
    fn kept(&self) -> MutexGuard<'_, Kept> {
        // Whoever stopped in the middle left the map whole.
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// That of ρ, made now if it is not known.
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

    /// How many were made here.
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

    /// That of ρ for another process: the lower triangle, row by row. Of few samples there is none to send.
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

    /// What [`Inverses::to_bytes`] of another process said about ρ, for d features.
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
