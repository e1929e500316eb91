//! Prices of weights: all equal, or by what each weight adds to the certificate of the last model.
//!
//! The global certificate |C_i − C_j|(I−|A|)⁻¹|B| + |D_i − D_j| grows by rows_i·columns_j for a unit of |w_ij|
//! ([`certify::sensitivity`]). With these numbers as entry weights the penalty of the next model is the certificate
//! itself, linearised at the last one; repeated rounds converge. The price of a tap is the sum over the positions
//! that use it.

use crate::Result;
use crate::arrays::Preprocessing;
use crate::certify::{self, Sensitivity};
use crate::linalg::Matrix;
use crate::model::{ImplicitModel, TapWeights};
use crate::problem::{RowProblem, Units};
use crate::solver::Design;

/// Entry weights that multiply the penalty's own units.
#[derive(Debug, Default)]
pub(in crate::train) struct CertificatePrices {
    round: usize,
    prices: Option<(Sensitivity, f64)>,
    /// Σ |w|·unit over the rows of the last model, added up while they are stored; new prices keep this sum.
    spent: f64,
}

impl CertificatePrices {
    /// Number of times that prices have been taken from a model.
    pub(in crate::train) fn round(&self) -> usize {
        self.round
    }

    /// The factor on the penalty of unit i (outputs behind the states), column j; `unit` is the factor by which the
    /// penalty multiplies the weight.
    pub(in crate::train) fn factor(&self, i: usize, j: usize, unit: f64) -> f64 {
        match &self.prices {
            Some((price, norm)) if unit > 0.0 => norm * price.rows[i] * price.columns[j] / unit,
            _ => 1.0,
        }
    }

    /// The same factor for a tap: row o of tap block k.
    pub(in crate::train) fn tap_factor(&self, k: usize, o: usize, column: usize, unit: f64) -> f64 {
        let Some((price, norm)) = self.prices.as_ref().filter(|_| unit > 0.0) else { return 1.0 };
        price.taps.get(k).filter(|p| o < p.rows()).map_or(1.0, |p| norm * p[(o, column)] / unit)
    }

    /// Begins the sum for a new model.
    pub(in crate::train) fn begin(&mut self) {
        self.spent = 0.0;
    }

    /// The sum over the rows stored so far.
    pub(in crate::train) fn spent(&self) -> f64 {
        self.spent
    }

    /// Sets the sum back to an earlier value, because the rows stored since then are solved again.
    pub(in crate::train) fn back_to(&mut self, spent: f64) {
        self.spent = spent;
    }

    /// Adds row `problem`, which was stored with these weights; the constant is free.
    pub(in crate::train) fn note(&mut self, design: &Design, problem: &RowProblem, weights: &[f64]) {
        let free = |c: usize| problem.weights.as_ref().is_some_and(|w| w[c] == 0.0);
        for (c, w) in weights.iter().enumerate().filter(|(c, _)| !free(*c)) {
            self.spent += w.abs() * unit(design, problem, c);
        }
    }

    /// Prices every weight by what it adds to the certificate of `model`. All prices are multiplied by one factor, chosen so
    /// that the total penalty of `model` at the new prices is what its rows paid at the old ones: a strength then keeps its
    /// meaning from round to round.
    pub(in crate::train) fn renew(&mut self, model: &ImplicitModel, preprocessing: &Preprocessing) -> Result<()> {
        let shape = model.shape();
        let channel = shape.inputs / preprocessing.std.len().max(1);
        let std: Vec<f64> = preprocessing.std.iter().flat_map(|s| std::iter::repeat_n(*s, channel)).collect();
        let mut price = certify::sensitivity(model, &std)?;
        let n = shape.states;
        let mut cost = 0.0;
        for (matrix, row, column) in [(model.a(), 0, 0), (model.b(), 0, n), (model.c(), n, 0), (model.d(), n, n)] {
            for i in 0..matrix.rows() {
                for (j, w) in matrix.row(i) {
                    cost += f64::from(w.abs()) * price.rows[row + i] * price.columns[column + j];
                }
            }
        }
        for (block, price) in model.taps().iter().zip(&price.taps) {
            if let TapWeights::Taps(taps) = &block.weights {
                for o in 0..taps.rows() {
                    cost += taps.row(o).map(|(j, w)| f64::from(w.abs()) * price[(o, j)]).sum::<f64>();
                }
            }
        }
        // A unit that nothing reads, or that reads nothing, must still have a positive price.
        let taps = price.taps.iter_mut().map(Matrix::as_mut_slice);
        for prices in [&mut price.rows[..], &mut price.columns[..]].into_iter().chain(taps) {
            let least = 1e-3 * prices.iter().sum::<f64>() / prices.len().max(1) as f64;
            prices.iter_mut().for_each(|p| *p = p.max(least));
        }
        self.round += 1;
        if cost > 0.0 && self.spent > 0.0 {
            self.prices = Some((price, self.spent / cost));
        }
        Ok(())
    }
}

/// The factor by which the penalty multiplies the weight of column c.
pub(in crate::train) fn unit(design: &Design, problem: &RowProblem, c: usize) -> f64 {
    match problem.units {
        Units::Rms { factor } => design.rms(c) * factor,
        Units::Stored => 1.0,
    }
}
