//! The cardinality rows of one group, from its statistics to weights, without leaving the device in between: a ladder of
//! inverses, splitting with a hard threshold, single moves and least squares on the supports.

use std::time::Instant;

use super::dense::{Panel, Sizes};
use super::inverse::padded;
use super::memory::Buffer;
use super::{Argument, Cuda, Session, arguments};
use crate::Result;
use crate::parallel::Cancel;

/// Rows over one design in canonical coordinates: ½wᵀĜw − ĥᵀw + ½·ridge·‖w‖² + Σ price_j·[w_j ≠ 0] each.
pub(crate) struct Group<'a> {
    /// Number of features d.
    pub(crate) features: usize,
    /// Ĝ, d × d.
    pub(crate) gram: &'a [f64],
    /// ĥ, one row after the other.
    pub(crate) h: &'a [f64],
    /// What a non-zero costs, laid out like `h`; infinite: never.
    pub(crate) prices: &'a [f64],
    /// Where splitting starts, laid out like `h`.
    pub(crate) start: &'a [f32],
    /// ρ of each rung, and splitting steps on it.
    pub(crate) ladder: &'a [(f64, usize)],
    /// Ridge of the refit.
    pub(crate) ridge: f64,
}

/// What comes back.
pub(crate) struct Answer {
    /// Laid out like `h`; zeros are exact.
    pub(crate) weights: Vec<f64>,
    /// The largest residual |ĥ − (Ĝ + ridge)w| on each row's support, in f64: what least squares leaves at zero.
    pub(crate) residuals: Vec<f64>,
    /// Seconds of each part.
    pub(crate) phases: Vec<(&'static str, f64)>,
}

/// What stays on the device from the first phase to the last.
pub(super) struct OnDevice<'s> {
    pub(super) d: usize,
    pub(super) rows: usize,
    pub(super) ridge: f64,
    pub(super) gram: Buffer<'s, f64>,
    pub(super) h: Buffer<'s, f64>,
    pub(super) prices: Buffer<'s, f64>,
}

/// ρ(Ĝ + ρ)⁻¹ in single precision, and (Ĝ + ρ)⁻¹ĥ of every row.
struct Rung<'s> {
    rho: f64,
    steps: usize,
    projection: Buffer<'s, f32>,
    ridge_solutions: Buffer<'s, f64>,
}

impl Cuda {
    /// Solves a group.
    pub(crate) fn solve(&self, group: &Group, cancel: &Cancel) -> Result<Answer> {
        let d = group.features;
        let rows = group.h.len().checked_div(d).unwrap_or(0);
        let mut phases = Vec::new();
        if rows == 0 {
            return Ok(Answer { weights: Vec::new(), residuals: Vec::new(), phases });
        }
        let session = self.session()?;
        let mut clock = Instant::now();
        let mut done = |session: &Session, name: &'static str| -> Result<()> {
            session.wait(name)?;
            phases.push((name, clock.elapsed().as_secs_f64()));
            clock = Instant::now();
            cancel.check()
        };
        let problem = OnDevice {
            d,
            rows,
            ridge: group.ridge,
            gram: session.from_host(group.gram)?,
            h: session.from_host(group.h)?,
            prices: session.from_host(group.prices)?,
        };
        let start = session.from_host(group.start)?;
        done(&session, "copy to the device")?;
        let rungs = session.ladder(&problem, group.ladder)?;
        done(&session, "inverses")?;
        let sets = session.split(&problem, &start, &rungs, cancel)?;
        drop((rungs, start));
        done(&session, "splitting")?;
        let (weights, residuals) = session.settle(&problem, sets, cancel)?;
        done(&session, "single moves and refit")?;
        let weights = session.to_host(&weights)?;
        done(&session, "copy from the device")?;
        Ok(Answer { weights, residuals, phases })
    }
}

impl Session<'_> {
    fn ladder(&self, problem: &OnDevice, ladder: &[(f64, usize)]) -> Result<Vec<Rung<'_>>> {
        let (d, rows, kernels) = (problem.d, problem.rows, &self.cuda.kernels);
        let n = padded(d);
        let mut out = Vec::with_capacity(ladder.len());
        for &(rho, steps) in ladder {
            let (projection, ridge_solutions) = (self.allocate(d * d)?, self.allocate(rows * d)?);
            out.push(Rung { rho, steps, projection, ridge_solutions });
        }
        // As many rungs side by side as half of what is left can hold.
        let (free, _) = self.memory()?;
        let batch = (free / 2 / (8 * n * n).max(1)).clamp(1, ladder.len().max(1));
        let inverses = self.allocate::<f64>(batch * n * n)?;
        for part in out.chunks(batch) {
            let rho: Vec<f64> = part.iter().map(|rung| rung.rho).collect();
            let rho = self.from_host(&rho)?;
            self.each(kernels.fill_ladder, n * n, part.len(), arguments!(&inverses, &problem.gram, &rho, d, n))?;
            self.invert(&inverses, n, part.len())?;
            for (k, rung) in part.iter().enumerate() {
                let inverse = Panel::new(inverses.at(k * n * n), n);
                let (h, ridge) = (Panel::new(problem.h.address(), d), Panel::new(rung.ridge_solutions.address(), d));
                self.product(ridge, 0.0, 1.0, inverse, h, Sizes(d, rows, d))?;
                let at = Argument::Address(inverse.at);
                self.each(
                    kernels.to_single,
                    d * d,
                    1,
                    &mut [at, (&rung.projection).into(), rung.rho.into(), d.into(), n.into()],
                )?;
            }
        }
        Ok(out)
    }

    /// All steps of all rows; the supports at the end.
    fn split(
        &self,
        problem: &OnDevice,
        start: &Buffer<'_, f32>,
        rungs: &[Rung],
        cancel: &Cancel,
    ) -> Result<Vec<Vec<i32>>> {
        let (d, rows, kernels) = (problem.d, problem.rows, &self.cuda.kernels);
        let count = rows * d;
        let size = || Argument::Size(count as u64);
        let (x, s, y) = (self.allocate::<f32>(count)?, self.allocate::<f32>(count)?, self.allocate::<f32>(count)?);
        self.each(kernels.start_splitting, count, 1, arguments!(start, &x, &s, size()))?;
        let mut previous: Option<f64> = None;
        for rung in rungs {
            cancel.check()?;
            if let Some(before) = previous {
                let factor = (before / rung.rho) as f32;
                self.each(kernels.rescale_dual, count, 1, arguments!(&x, &s, factor, size()))?;
            }
            previous = Some(rung.rho);
            for _ in 0..rung.steps {
                let projection = Panel::new(rung.projection.address(), d);
                let (x_all, y_all) = (Panel::new(x.address(), d), Panel::new(y.address(), d));
                self.product_single(y_all, projection, x_all, Sizes(d, rows, d))?;
                let arguments = arguments!(&y, &rung.ridge_solutions, &problem.prices, &x, &s, 0.5 * rung.rho, size());
                self.each(kernels.threshold, count, 1, arguments)?;
            }
        }
        let (set, sizes) = (self.zeros::<i32>(count)?, self.zeros::<i32>(rows)?);
        self.launch(kernels.supports, (rows, 1), 32, arguments!(&x, &s, &set, &sizes, d))?;
        let (set, sizes) = (self.to_host(&set)?, self.to_host(&sizes)?);
        Ok(set.chunks(d).zip(sizes).map(|(row, size)| row[..size as usize].to_vec()).collect())
    }
}
