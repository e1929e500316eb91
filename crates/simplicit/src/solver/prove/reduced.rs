//! A case in its open entries alone: it is minimised over the entries that are in, and those that are out are left
//! out.

use super::PricedRow;
use super::certificate::Place;
use crate::linalg::{Cholesky, Matrix, View, dot, gemm};

/// ½xᵀGx − hᵀx + constant + prices over the open entries.
pub(super) struct Reduced {
    pub(super) open: Vec<usize>,
    pub(super) inside: Vec<usize>,
    pub(super) gram: Matrix,
    pub(super) cross: Vec<f64>,
    pub(super) constant: f64,
    pub(super) prices: Vec<f64>,
    factor: Cholesky,
}

impl Reduced {
    /// `None` if the entries that are in have no numerically definite Gram matrix.
    pub(super) fn new(row: &PricedRow, places: &[Place]) -> Option<Self> {
        let at = |place: Place| (0..places.len()).filter(|&j| places[j] == place).collect::<Vec<usize>>();
        let (open, inside) = (at(Place::Open), at(Place::In));
        let (r, k) = (open.len(), inside.len());
        let mut gram = Matrix::from_fn(r, r, |i, j| row.gram[(open[i], open[j])]);
        let mut cross: Vec<f64> = open.iter().map(|&j| row.cross[j]).collect();
        let mut constant = 0.5 * row.energy + inside.iter().map(|&j| row.prices[j]).sum::<f64>();
        let mut factor = Cholesky::with_capacity(k);
        let filled = factor.factor(k, |a| {
            for (s, &i) in inside.iter().enumerate() {
                for (t, &j) in inside.iter().enumerate().skip(s) {
                    a[s * k + t] = row.gram[(i, j)];
                }
            }
        });
        if !filled {
            return None;
        }
        if k > 0 {
            // L⁻¹(G_IR | h_I): the Schur complement is the product of its transpose with itself.
            let mut beside = Matrix::from_fn(k, r, |i, j| row.gram[(inside[i], open[j])]);
            factor.solve_lower(beside.as_mut_slice(), r);
            let mut target: Vec<f64> = inside.iter().map(|&j| row.cross[j]).collect();
            factor.solve_lower(&mut target, 1);
            constant -= 0.5 * dot(&target, &target);
            if r > 0 {
                gemm(gram.as_mut_slice(), r, true, -1.0, beside.view().t(), beside.view());
                gemm(&mut cross, 1, true, -1.0, beside.view().t(), View::new(&target, k, 1, 1));
            }
        }
        let prices = open.iter().map(|&j| row.prices[j]).collect();
        Some(Self { open, inside, gram, cross, constant, prices, factor })
    }

    /// The point over all entries with x on the open ones, and the minimiser on those that are in.
    pub(super) fn lift(&self, row: &PricedRow, x: &[f64]) -> Vec<f64> {
        let mut out = vec![0.0; row.features()];
        let mut rest: Vec<f64> = self.inside.iter().map(|&i| row.cross[i]).collect();
        for (&j, &x) in self.open.iter().zip(x).filter(|(_, x)| **x != 0.0) {
            out[j] = x;
            let line = row.gram.row(j);
            rest.iter_mut().zip(&self.inside).for_each(|(rest, &i)| *rest -= line[i] * x);
        }
        self.factor.solve(&mut rest, 1);
        self.inside.iter().zip(rest).for_each(|(&i, y)| out[i] = y);
        out
    }
}
