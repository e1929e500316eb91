//! Solves a cardinality group as a whole: from rows that share a quadratic, each with its own linear term and prices,
//! to weights with few non-zeros. This is the expensive part of training. It is behind one trait, so that other
//! hardware can do it.
//!
//! Everything is in the solver's own coordinates: unit-RMS features, unit-RMS targets. Nothing here is certified;
//! bounds and gaps are computed outside, in f64, from the weights that are returned.

mod cpu;
pub mod cuda;
mod device;
mod moves;
mod projection;
mod reduced;

use std::fmt::Debug;
use std::sync::OnceLock;

pub use cpu::Cpu;
pub use device::Device;
pub(crate) use moves::fit;
pub use projection::Inverses;

use cuda::Cuda;

use crate::linalg::Matrix;
use crate::parallel::{Cancel, Threads};
use crate::{Error, Result};

/// Ĝ, symmetric with a unit diagonal, d × d, in the form that is cheaper to compute with.
#[derive(Debug, Clone, Copy)]
pub enum Quadratic<'a> {
    /// Ĝ itself.
    Gram(&'a Matrix),
    /// F̂, m × d with Ĝ = F̂ᵀF̂: for fewer samples than features.
    Samples(&'a Matrix),
}

impl Quadratic<'_> {
    /// Number of features d.
    pub fn features(&self) -> usize {
        match self {
            Self::Gram(gram) => gram.cols(),
            Self::Samples(features) => features.cols(),
        }
    }

    /// The entries of Ĝ in some rows and columns.
    pub(crate) fn part(&self, rows: &[usize], cols: &[usize]) -> Matrix {
        match self {
            Self::Gram(gram) => {
                let mut data = Vec::with_capacity(rows.len() * cols.len());
                for &i in rows {
                    let line = gram.row(i);
                    data.extend(cols.iter().map(|&j| line[j]));
                }
                Matrix::from_vec(rows.len(), cols.len(), data).unwrap_or_default()
            }
            Self::Samples(f) => {
                let mut out = Matrix::zeros(rows.len(), cols.len());
                let (left, right) = (columns(f, rows), columns(f, cols));
                crate::linalg::gemm(out.as_mut_slice(), cols.len(), false, 1.0, left.view().t(), right.view());
                out
            }
        }
    }
}

/// Some columns of a matrix.
fn columns(f: &Matrix, set: &[usize]) -> Matrix {
    let mut data = Vec::with_capacity(f.rows() * set.len());
    for s in 0..f.rows() {
        let line = f.row(s);
        data.extend(set.iter().map(|&j| line[j]));
    }
    Matrix::from_vec(f.rows(), set.len(), data).unwrap_or_default()
}

/// The schedule of the splitting: `steps` steps in all, the same number at each of `rungs` values of ρ, from
/// `first_rho` to `span` times that, equally spaced in their logarithm.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Ladder {
    /// Splitting steps in all.
    pub steps: usize,
    /// Number of values of ρ, each of which costs an inverse.
    pub rungs: usize,
    /// The first ρ; the mean eigenvalue of Ĝ is 1.
    pub first_rho: f64,
    /// The last ρ over the first.
    pub span: f64,
}

impl Ladder {
    /// ρ and the number of steps of every rung.
    pub fn schedule(&self) -> Vec<(f64, usize)> {
        let rungs = self.rungs.clamp(1, self.steps.max(1));
        let rho = |k: usize| self.first_rho * self.span.powf(k as f64 / (rungs - 1).max(1) as f64);
        (0..rungs).map(|k| (rho(k), (k + 1) * self.steps / rungs - k * self.steps / rungs)).collect()
    }
}

/// Rows that each minimise ½wᵀĜw − hᵀw + Σ_j price_j·[w_j ≠ 0]; every row has a line in `linear`, `prices` and
/// `start`.
#[derive(Debug, Clone, Copy)]
pub struct CardinalityGroup<'a> {
    /// The quadratic that all rows share.
    pub quadratic: Quadratic<'a>,
    /// h, rows × d.
    pub linear: &'a Matrix,
    /// The price of a non-zero, rows × d: zero means free, infinity means forbidden.
    pub prices: &'a Matrix,
    /// Where the splitting starts, rows × d.
    pub start: &'a Matrix,
    /// The schedule of the splitting.
    pub ladder: Ladder,
    /// Where the inverses are kept for other groups over the same quadratic; `None` drops each after its steps. A
    /// backend may ignore this.
    pub inverses: Option<&'a Inverses>,
    /// Added to the diagonal when weights are fitted to their support.
    pub ridge: f64,
    /// Whether single moves and a last fit follow; without them the splitting's own weights are the answer.
    pub moves: bool,
    /// Number of rows that may be treated together. Answers may depend on which rows share a block, so a group may be
    /// cut into pieces only at multiples of this number.
    pub block: usize,
}

impl CardinalityGroup<'_> {
    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.linear.rows()
    }
}

/// A solver of whole groups. The same group must give the same weights, for any number of threads.
pub trait GroupBackend: Debug + Send + Sync {
    /// One line of d weights per row; zeros are exact, forbidden entries are zero, and with `moves` weights are the
    /// least-squares optimum (with the ridge) on their support. `progress` is called with the number of rows that are
    /// (nearly) done.
    fn solve(
        &self,
        group: &CardinalityGroup,
        threads: Threads,
        cancel: &Cancel,
        progress: &mut dyn FnMut(usize),
    ) -> Result<Matrix>;
}

/// Rows of a group that are treated together: wide products for groups of many rows, enough blocks for all threads in
/// groups of few.
pub fn block_rows(rows: usize) -> usize {
    match rows {
        0..=128 => 32,
        129..=256 => 64,
        _ => 128,
    }
}

/// Multiply-adds of one step below which `auto` stays on the CPU: starting kernels would take longer than the work.
const WORTH_A_GPU: f64 = 1e6;
/// The same where a GPU was asked for: the rows of one channel of a depthwise convolution, of which a network has
/// thousands, take microseconds per step on the CPU, but several kernel launches per step on a GPU.
const TOO_SMALL: f64 = 1e4;

/// The GPU that a device names, for work of `work` multiply-adds per step; `None` means the CPU.
pub(crate) fn gpu(device: Device, work: f64) -> Result<Option<&'static Cuda>> {
    static FOUND: OnceLock<Option<&'static Cuda>> = OnceLock::new();
    match device {
        Device::Cpu => Ok(None),
        Device::Cuda(number) => Ok(Some(Cuda::open(number)?).filter(|_| work >= TOO_SMALL)),
        Device::Auto if work < WORTH_A_GPU => Ok(None),
        Device::Auto => Ok(*FOUND.get_or_init(|| Cuda::open(0).ok())),
    }
}

/// The device that is used on this machine, such as `cpu` or `cuda:0 (NVIDIA H200)`.
pub fn name(device: Device) -> String {
    match gpu(device, f64::INFINITY) {
        Ok(Some(cuda)) => cuda.describe(),
        _ => Device::Cpu.to_string(),
    }
}

/// The answer of a GPU; `None` if it failed under `auto`, so that the CPU has to do the work.
pub(crate) fn or_cpu<T>(device: Device, answer: Result<T>) -> Result<Option<T>> {
    match answer {
        Err(Error::Device { .. }) if device == Device::Auto => Ok(None),
        answer => answer.map(Some),
    }
}
