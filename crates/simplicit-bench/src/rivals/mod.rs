//! The methods we are compared with. Each is a function from a group's statistics, the baseline's weights and a budget to
//! rows of weights; everything else (statistics, refit, counting, allocation over groups) is shared.

mod admm;
mod l1;
mod magnitude;
mod second_order;

pub use admm::Admm;
pub use l1::LayerwiseL1;
pub use magnitude::Magnitude;
pub use second_order::SecondOrder;

use simplicit::Result;
use simplicit::linalg::Matrix;
use simplicit::parallel::{Cancel, Threads};
use simplicit::problem::{RowProblem, Units};
use simplicit::solver::{Design, Refit};
use simplicit::statistics::Statistics;

/// What a rival sees of one group.
#[derive(Clone, Copy)]
pub struct Layer<'a> {
    /// Of the group's features and targets.
    pub statistics: &'a Statistics,
    /// The baseline's weights, rows × features.
    pub weights: &'a Matrix,
    /// The feature that is the constant: never removed, never counted in a budget.
    pub constant: Option<usize>,
    /// Who works.
    pub threads: Threads,
    /// Who may stop it.
    pub cancel: &'a Cancel,
}

/// How much of a group may stay.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Budget {
    /// This many weights in the group.
    Count(usize),
    /// As many as the method's own criterion lets stay at this price; one price for all groups is its global allocation.
    Price(f64),
}

/// A method.
pub trait Rival {
    /// Its name in the table.
    fn name(&self) -> &'static str;
    /// A price at which a search may start.
    fn first_price(&self) -> f64;
    /// Whether weights are fitted to the features, so that running group by group on the model's own states (the
    /// cascade) makes a difference.
    fn fits(&self) -> bool;
    /// Everything about a group that does not depend on the budget.
    fn prepare<'a>(&self, layer: Layer<'a>) -> Result<Box<dyn Prepared + 'a>>;
}

/// A method that has seen a group.
pub trait Prepared {
    /// One weight per feature for every row; zeros are exact.
    fn rows(&self, budget: Budget) -> Result<Vec<Vec<f64>>>;
}

/// All of them, in the order of the table.
pub fn all() -> Vec<Box<dyn Rival>> {
    vec![
        Box::new(Magnitude { refit: false }),
        Box::new(Magnitude { refit: true }),
        Box::new(LayerwiseL1),
        Box::new(SecondOrder),
        Box::new(Admm),
    ]
}

impl Layer<'_> {
    /// Mean square of all targets together: the unit in which groups of different size are compared.
    fn energy(&self) -> f64 {
        let s = self.statistics;
        (0..s.targets()).map(|k| s.energy(k)).sum::<f64>() / s.samples() as f64
    }

    /// Least squares on the non-zeros of every row.
    fn refit(&self, supports: &[Vec<f64>]) -> Result<Vec<Vec<f64>>> {
        let design = Design::new(self.statistics)?;
        Refit::default().rows(&design, &normalised(&design), supports, self.threads, self.cancel)
    }

    /// Keeps the `count` weights with the largest score, ties in order; the constant stays.
    fn largest(&self, rows: &[Vec<f64>], count: usize, score: impl Fn(usize, usize) -> f64) -> Vec<Vec<f64>> {
        let mut entries: Vec<(f64, usize, usize)> = Vec::new();
        for (k, row) in rows.iter().enumerate() {
            let live = (0..row.len()).filter(|&j| row[j] != 0.0 && Some(j) != self.constant);
            entries.extend(live.map(|j| (score(k, j), k, j)));
        }
        entries.sort_by(|a, b| b.0.total_cmp(&a.0));
        let mut out: Vec<Vec<f64>> = rows.iter().map(|row| vec![0.0; row.len()]).collect();
        for (k, row) in rows.iter().enumerate() {
            if let Some(j) = self.constant {
                out[k][j] = row[j];
            }
        }
        for &(_, k, j) in entries.iter().take(count) {
            out[k][j] = rows[k][j];
        }
        out
    }

    /// Weights that stay without the constant.
    fn count(&self, rows: &[Vec<f64>]) -> usize {
        let of = |row: &Vec<f64>| (0..row.len()).filter(|&j| row[j] != 0.0 && Some(j) != self.constant).count();
        rows.iter().map(of).sum()
    }
}

/// The rows of a design in normalised units: mismatch and weights relative to the target.
fn normalised(design: &Design) -> Vec<RowProblem> {
    let problem = |k: usize| {
        let rms = design.target_rms(k);
        let factor = if rms > 0.0 { 1.0 / rms } else { 1.0 };
        RowProblem { units: Units::Rms { factor }, ..RowProblem::new(k, factor * factor) }
    };
    (0..design.targets()).map(problem).collect()
}

/// G and H in unit-RMS coordinates over the features that are not always zero.
struct Normalised {
    live: Vec<usize>,
    rms: Vec<f64>,
    gram: Matrix,
    /// rows × live.
    cross: Matrix,
}

impl Normalised {
    fn new(statistics: &Statistics) -> Self {
        let live: Vec<usize> = (0..statistics.features()).filter(|&j| statistics.rms(j) > 1e-12).collect();
        let rms: Vec<f64> = live.iter().map(|&j| statistics.rms(j)).collect();
        let m = statistics.samples() as f64;
        let gram = Matrix::from_fn(live.len(), live.len(), |i, j| {
            statistics.gram()[(live[i], live[j])] / (m * rms[i] * rms[j])
        });
        let cross =
            Matrix::from_fn(statistics.targets(), live.len(), |k, j| statistics.cross(k)[live[j]] / (m * rms[j]));
        Self { live, rms, gram, cross }
    }
}
