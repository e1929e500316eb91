//! Sums of products of some rows of an operand with some weights each: both lists are chosen at run time, so that
//! zeros on either side cost nothing.

use super::Instructions;
#[cfg(target_arch = "x86_64")]
use super::vector::{Avx2, Avx512};
use super::vector::{Portable, Vector};

/// Number of numbers in a row of the operand.
pub const ROW: usize = 32;
/// Number of sums that are computed together.
pub const TILE: usize = 8;

/// A row of the operand, and the place of the row of weights that it is multiplied by.
#[derive(Debug, Clone, Copy)]
pub struct Pair {
    /// Number of the row of the operand.
    pub row: u32,
    /// Place of the first of its weights.
    pub weights: u32,
}

/// Consecutive pairs whose weights are all shifted by the same distance.
#[derive(Debug, Clone, Copy)]
pub struct Run {
    /// The first pair.
    pub first: u32,
    /// The number after the last pair.
    pub end: u32,
    /// The distance that is added to the places of their weights.
    pub further: u32,
}

/// Pairs of rows, whose places are checked once.
#[derive(Clone, Copy)]
pub struct Products<'a> {
    instructions: Instructions,
    pairs: &'a [Pair],
    operand: &'a [f32],
    weights: &'a [f32],
    width: usize,
    /// The largest distance that a run may have.
    furthest: usize,
}

impl<'a> Products<'a> {
    /// Every row of weights has `width` of them.
    ///
    /// # Panics
    /// If a slice is too short; sizes come from the caller's own arithmetic, never from data.
    pub fn new(
        instructions: Instructions,
        pairs: &'a [Pair],
        operand: &'a [f32],
        (weights, width): (&'a [f32], usize),
    ) -> Self {
        let last = pairs.iter().fold((0, 0), |last, p| (p.row.max(last.0), p.weights.max(last.1)));
        assert!(pairs.is_empty() || (last.0 as usize + 1) * ROW <= operand.len());
        assert!(last.1 as usize + width <= weights.len());
        assert!(Instructions::available().contains(&instructions));
        let furthest = weights.len() - width - last.1 as usize;
        Self { instructions, pairs, operand, weights, width, furthest }
    }

    /// `out[i] = Σ weight[columns[i]] · row` over the pairs of some runs, in their order.
    ///
    /// # Panics
    /// If a column is not below the width, or a run goes beyond the pairs or the weights.
    pub fn sum(&self, runs: &[Run], columns: &[u32; TILE], out: &mut [[f32; ROW]; TILE]) {
        assert!(columns.iter().all(|c| (*c as usize) < self.width));
        let fits =
            |r: &Run| r.first <= r.end && r.end as usize <= self.pairs.len() && r.further as usize <= self.furthest;
        assert!(runs.iter().all(fits));
        // SAFETY: columns, runs and pairs are inside their slices, and the instructions were found.
        unsafe {
            match self.instructions {
                #[cfg(target_arch = "x86_64")]
                Instructions::Avx512 => avx512(self, runs, columns, out),
                #[cfg(target_arch = "x86_64")]
                Instructions::Avx2 => avx2(self, runs, columns, out),
                _ => tiles::<Portable, 2, 4>(self, runs, columns, out),
            }
        }
    }
}

/// Computes `M` sums and `N` vectors at a time.
#[inline(always)]
unsafe fn tiles<T: Vector, const N: usize, const M: usize>(
    products: &Products,
    runs: &[Run],
    columns: &[u32; TILE],
    out: &mut [[f32; ROW]; TILE],
) {
    for at in (0..ROW).step_by(N * T::LEN) {
        for (columns, out) in columns.as_chunks::<M>().0.iter().zip(out.as_chunks_mut::<M>().0) {
            // SAFETY: N · LEN divides ROW, and `Products` has checked the rest.
            unsafe {
                let mut sums = [[T::splat(0.0); N]; M];
                for run in runs {
                    let further = products.weights.as_ptr().add(run.further as usize);
                    for pair in products.pairs.get_unchecked(run.first as usize..run.end as usize) {
                        let row = products.operand.as_ptr().add(pair.row as usize * ROW + at);
                        let weights = further.add(pair.weights as usize);
                        let mut operand = [T::splat(0.0); N];
                        for v in 0..N {
                            operand[v] = T::load(row.add(v * T::LEN));
                        }
                        for i in 0..M {
                            let weight = T::splat(*weights.add(columns[i] as usize));
                            for v in 0..N {
                                sums[i][v] = sums[i][v].multiply_add(weight, operand[v]);
                            }
                        }
                    }
                }
                for (sums, out) in sums.iter().zip(out) {
                    for (v, sum) in sums.iter().enumerate() {
                        sum.store(out.as_mut_ptr().add(at + v * T::LEN));
                    }
                }
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vl,avx2,fma")]
unsafe fn avx512(products: &Products, runs: &[Run], columns: &[u32; TILE], out: &mut [[f32; ROW]; TILE]) {
    // SAFETY: this function has the instructions.
    unsafe { tiles::<Avx512, 2, 8>(products, runs, columns, out) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn avx2(products: &Products, runs: &[Run], columns: &[u32; TILE], out: &mut [[f32; ROW]; TILE]) {
    // SAFETY: this function has the instructions.
    unsafe { tiles::<Avx2, 2, 4>(products, runs, columns, out) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    #[test]
    fn sums_are_those_of_the_chosen_rows_and_weights() {
        let mut r = Random::new(11);
        let (rows, width, lists) = (23, 13, 9);
        let further = 2 * width;
        let mut numbers = |count: usize| -> Vec<f32> { (0..count).map(|_| r.normal() as f32).collect() };
        let (operand, weights) = (numbers(rows * ROW), numbers(lists * width));
        for count in [0, 1, 2, 7, 40] {
            let pairs: Vec<Pair> = (0..count)
                .map(|_| Pair { row: r.below(rows) as u32, weights: (r.below(lists - 2) * width) as u32 })
                .collect();
            let columns: [u32; TILE] = std::array::from_fn(|_| r.below(width) as u32);
            for &instructions in Instructions::available() {
                let mut out = [[f32::NAN; ROW]; TILE];
                let products = Products::new(instructions, &pairs, &operand, (&weights, width));
                let ends = [0, count / 3, count];
                let runs = ends.windows(2).enumerate().map(|(k, ends)| Run {
                    first: ends[0] as u32,
                    end: ends[1] as u32,
                    further: (k * further) as u32,
                });
                products.sum(&runs.collect::<Vec<_>>(), &columns, &mut out);
                for (column, out) in columns.iter().zip(&out) {
                    for (l, out) in out.iter().enumerate() {
                        let terms = pairs.iter().enumerate().map(|(k, p)| {
                            let further = if k < count / 3 { 0 } else { further };
                            let weight = f64::from(weights[(p.weights + column) as usize + further]);
                            weight * f64::from(operand[p.row as usize * ROW + l])
                        });
                        let (sum, size) = terms.fold((0.0, 0.0), |(s, a), t: f64| (s + t, a + t.abs()));
                        assert!((f64::from(*out) - sum).abs() <= 1e-6 * (1.0 + size), "{out} {sum}");
                    }
                }
            }
        }
    }
}
