//! The methods that ours is compared with. Each is a function from a group's statistics, the baseline's weights and a
//! budget to rows of weights; everything else (groups, cascade, statistics, refit, counting) is the library's own
//! walk.

mod admm;
mod evopress;
mod l1;
mod magnitude;
mod second_order;
mod snows;

pub use admm::Admm;
pub use evopress::Evopress;
pub use l1::LayerwiseL1;
pub use magnitude::Magnitude;
pub use second_order::SecondOrder;
pub use snows::Snows;

use std::sync::Arc;

use simplicit::linalg::Matrix;
use simplicit::parallel::{Cancel, Threads};
use simplicit::problem::{RowProblem, Units};
use simplicit::solver::{Design, Refit};
use simplicit::statistics::Statistics;
use simplicit::train::RowGroup;
use simplicit::{Error, Result};

use crate::walk::Allocation;

/// One group of rows, as a rival sees it.
pub struct Layer<'a> {
    /// Statistics of the group's features and targets.
    pub statistics: &'a Statistics,
    /// The same statistics, in the form that the solver and the refit take.
    pub design: &'a Design<'a>,
    /// The baseline's weights, rows × features.
    pub weights: Matrix,
    /// The feature that is the constant, if there is one: it is never removed and never counted in a budget.
    pub constant: Option<usize>,
    /// Threads to use.
    pub threads: Threads,
    /// A request to stop the work.
    pub cancel: &'a Cancel,
}

/// How much of a group may stay.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Budget {
    /// This many weights in the group.
    Count(usize),
    /// As many weights as the method's own criterion keeps at this price. One price for all groups is the method's
    /// global allocation.
    Price(f64),
}

/// A pruning method that ours is compared with.
pub trait Rival: std::fmt::Debug + Send + Sync {
    /// Its name in the table.
    fn name(&self) -> &'static str;
    /// Its name on the command line.
    fn id(&self) -> &'static str;
    /// A price at which a search may start.
    fn first_price(&self) -> f64;
    /// Whether weights are fitted to the features, so that running group by group on the model's own states (the
    /// cascade) makes a difference.
    fn fits(&self) -> bool;
    /// Computes everything about a group that does not depend on the budget.
    fn prepare(&self, layer: &Layer) -> Result<Box<dyn Prepared>>;
    /// The ways to share the weights that stay among the layers; all of them are tried.
    fn allocations(&self) -> &'static [Allocation] {
        &[Allocation::Uniform, Allocation::Global]
    }
    /// How many joints ahead values are matched when the kept weights of the chosen model are reconstructed; 0 means
    /// no reconstruction.
    fn ahead(&self) -> usize {
        0
    }
}

/// A rival's work on one group that serves every budget.
pub trait Prepared: Send + Sync {
    /// One weight per feature for every row of the same group; zeros are exact.
    fn rows(&self, layer: &Layer, budget: Budget) -> Result<Vec<Vec<f64>>>;
}

/// All rivals, in the order of the table.
pub fn all() -> Vec<Arc<dyn Rival>> {
    vec![
        Arc::new(Magnitude { refit: false }),
        Arc::new(Magnitude { refit: true }),
        Arc::new(LayerwiseL1),
        Arc::new(SecondOrder),
        Arc::new(Admm),
        Arc::new(Snows),
        Arc::new(Evopress),
    ]
}

impl<'a> Layer<'a> {
    /// From a group in the library's walk. A layer in which the baseline has zeros is refused: rivals prune existing
    /// weights, and such a zero would count as one that they pruned.
    pub fn new(group: &RowGroup<'a>) -> Result<Self> {
        let RowGroup { statistics, design, threads, cancel, .. } = *group;
        let entry = |k: usize, j: usize| group.problems[k].weights.as_ref().map_or(1.0, |w| w[j]);
        let (rows, d) = (group.problems.len(), design.features());
        if (0..rows).any(|k| (0..d).any(|j| entry(k, j).is_infinite())) {
            return Err(Error::unsupported(
                format!("a rival on layer {:?}, in which the baseline has zeros,", group.name),
                "give a network without zeros",
            ));
        }
        let weights = Matrix::from_fn(rows, d, |k, j| group.problems[k].start.as_ref().map_or(0.0, |start| start[j]));
        let constant = (0..d).find(|&j| rows > 0 && entry(0, j) == 0.0);
        Ok(Self { statistics, design, weights, constant, threads, cancel })
    }

    /// Number of weights that may be removed.
    pub fn removable(&self) -> usize {
        self.weights.rows() * (self.weights.cols() - usize::from(self.constant.is_some()))
    }

    /// Mean square of all targets together: the unit in which groups of different size are compared.
    fn energy(&self) -> f64 {
        let s = self.statistics;
        (0..s.targets()).map(|k| s.energy(k)).sum::<f64>() / s.samples() as f64
    }

    /// Least squares on the non-zeros of every row.
    fn refit(&self, supports: &[Vec<f64>]) -> Result<Vec<Vec<f64>>> {
        Refit::default().rows(self.design, &normalised(self.design), supports, self.threads, self.cancel)
    }

    /// Keeps the `count` weights with the largest score; equal scores are kept in the order of the features. The
    /// constant always stays.
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

    /// Number of weights that stay, the constant not counted.
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
    /// H, with a row per target and a column per live feature.
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
