//! The cardinality rows of one group, from its statistics to weights, without leaving the device in between: a ladder of
//! inverses, splitting with a hard threshold, single moves and least squares on the supports.

use std::sync::PoisonError;
use std::time::Instant;

use super::dense::{Panel, Sizes};
use super::inverse::padded;
use super::memory::Buffer;
use super::{Argument, Cuda, Phase, Session, Work, arguments};
use crate::backend::{CardinalityGroup, GroupBackend, Quadratic, fit};
use crate::linalg::Matrix;
use crate::parallel::{self, Cancel, Threads};
use crate::{Error, Result};

/// The largest |h − (Ĝ + ridge)w| on a support that counts as a least-squares solution; h is at most 1.
const SETTLED: f64 = 1e-7;

/// The solution of a group.
pub(crate) struct Answer {
    /// One row of weights per row of the group; zeros are exact.
    weights: Vec<f64>,
    /// The largest residual |h − (Ĝ + ridge)w| on each row's support, in f64, which least squares makes zero.
    residuals: Vec<f64>,
}

/// The data that stay on the device from the first phase to the last.
pub(super) struct OnDevice {
    pub(super) d: usize,
    pub(super) rows: usize,
    pub(super) ridge: f64,
    pub(super) gram: Buffer<f64>,
    pub(super) h: Buffer<f64>,
    pub(super) prices: Buffer<f64>,
}

/// ρ(Ĝ + ρ)⁻¹ in single precision, and (Ĝ + ρ)⁻¹ĥ of every row.
struct Rung {
    rho: f64,
    steps: usize,
    projection: Buffer<f32>,
    ridge_solutions: Buffer<f64>,
}

impl GroupBackend for &'static Cuda {
    fn solve(
        &self,
        group: &CardinalityGroup,
        threads: Threads,
        cancel: &Cancel,
        progress: &mut dyn FnMut(usize),
    ) -> Result<Matrix> {
        let (rows, d) = (group.rows(), group.quadratic.features());
        let answer = self.solve_group(group, cancel)?;
        progress(rows);
        let mut out = Matrix::from_vec(rows, d, answer.weights)?;
        // A NaN does not count as settled either.
        let again: Vec<usize> = (0..answer.residuals.len())
            .filter(|&k| answer.residuals[k].is_nan() || answer.residuals[k] > SETTLED)
            .collect();
        let fitted = parallel::map(threads, again.len(), |at| {
            cancel.check()?;
            let row = again[at];
            let support: Vec<usize> = (0..d).filter(|&j| out[(row, j)] != 0.0).collect();
            Ok(fit(&group.quadratic, group.linear.row(row), &support, group.ridge))
        })?;
        for (row, weights) in again.into_iter().zip(fitted) {
            out.row_mut(row).copy_from_slice(&weights);
        }
        if let Some(row) = (0..rows).find(|&k| out.row(k).iter().any(|w| !w.is_finite())) {
            return Err(self.error(format!("row {row} of a group of {rows} is not finite; use the device cpu")));
        }
        Ok(out)
    }
}

impl Cuda {
    fn solve_group(&'static self, group: &CardinalityGroup, cancel: &Cancel) -> Result<Answer> {
        let (rows, d) = (group.rows(), group.quadratic.features());
        let mut phases = Vec::new();
        if rows == 0 || d == 0 {
            return Ok(Answer { weights: Vec::new(), residuals: Vec::new() });
        }
        for (what, given) in [("prices", group.prices), ("start", group.start)] {
            if (given.rows(), given.cols()) != (rows, d) {
                let got = format!("{} × {}", given.rows(), given.cols());
                return Err(Error::shape(what, format!("{rows} × {d}"), got));
            }
        }
        let session = self.session()?;
        let (mut clock, mut before) = (Instant::now(), self.work());
        let mut done = |session: &Session, name: &'static str| -> Result<()> {
            session.wait(name)?;
            let (seconds, work) = (clock.elapsed().as_secs_f64(), self.work());
            phases.push(Phase { name, seconds, work: work - before });
            (clock, before) = (Instant::now(), work);
            cancel.check()
        };
        let problem = OnDevice {
            d,
            rows,
            ridge: group.ridge,
            gram: session.gram(group.quadratic)?,
            h: session.uploaded(group.linear.as_slice())?,
            prices: session.uploaded(group.prices.as_slice())?,
        };
        let start: Vec<f32> = group.start.as_slice().iter().map(|v| *v as f32).collect();
        let start = session.uploaded(&start)?;
        done(&session, "copy to the device")?;
        let rungs = session.ladder(&problem, &group.ladder.schedule())?;
        done(&session, "inverses")?;
        let split = session.split(&problem, &start, &rungs, cancel)?;
        drop((rungs, start));
        done(&session, "splitting")?;
        if !group.moves {
            let (x, s) = (session.to_host(&split.x)?, session.to_host(&split.s)?);
            let weights = x.iter().zip(&s).map(|(x, s)| f64::from(x + s)).collect();
            return Ok(Answer { weights, residuals: Vec::new() });
        }
        let sets = session.sets(&problem, &split)?;
        drop(split);
        let (weights, residuals) = session.settle(&problem, sets, cancel)?;
        done(&session, "single moves and refit")?;
        let weights = session.to_host(&weights)?;
        done(&session, "copy from the device")?;
        *self.phases.lock().unwrap_or_else(PoisonError::into_inner) = phases;
        Ok(Answer { weights, residuals })
    }
}

/// The result of the splitting: v = x + s, and the dual s.
struct Split {
    x: Buffer<f32>,
    s: Buffer<f32>,
}

impl Session {
    /// Ĝ on the device, from either form of the quadratic.
    fn gram(&self, quadratic: Quadratic) -> Result<Buffer<f64>> {
        match quadratic {
            Quadratic::Gram(gram) => self.uploaded(gram.as_slice()),
            Quadratic::Samples(samples) => {
                let (m, d) = (samples.rows(), samples.cols());
                let (out, f) = (self.zeros::<f64>(d * d)?, self.uploaded(samples.as_slice())?);
                self.add_square(Panel::new(out.address(), d), Panel::new(f.address(), d), d, m)?;
                self.each(self.cuda.kernels.mirror, d * d, 1, arguments!(&out, d))?;
                Ok(out)
            }
        }
    }

    fn ladder(&self, problem: &OnDevice, ladder: &[(f64, usize)]) -> Result<Vec<Rung>> {
        let (d, rows, kernels) = (problem.d, problem.rows, &self.cuda.kernels);
        let n = padded(d);
        let mut out = Vec::with_capacity(ladder.len());
        for &(rho, steps) in ladder {
            let (projection, ridge_solutions) = (self.allocate(d * d)?, self.allocate(rows * d)?);
            out.push(Rung { rho, steps, projection, ridge_solutions });
        }
        // As many rungs are run together as half of the remaining memory can hold.
        let (free, _) = self.memory()?;
        let batch = (free / 2 / (8 * n * n).max(1)).clamp(1, ladder.len().max(1));
        let inverses = self.allocate::<f64>(batch * n * n)?;
        for part in out.chunks(batch) {
            let rho: Vec<f64> = part.iter().map(|rung| rung.rho).collect();
            let rho = self.uploaded(&rho)?;
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

    /// All splitting steps of all rows.
    fn split(&self, problem: &OnDevice, start: &Buffer<f32>, rungs: &[Rung], cancel: &Cancel) -> Result<Split> {
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
                self.product_single(y_all, 0.0, projection, x_all, Sizes(d, rows, d))?;
                let arguments = arguments!(&y, &rung.ridge_solutions, &problem.prices, &x, &s, 0.5 * rung.rho, size());
                self.each(kernels.threshold, count, 1, arguments)?;
                // Bytes per number: y, s, x and s again in single precision, ridge solutions and prices in double.
                self.count(Work { bytes: 32.0 * count as f64, ..Default::default() });
            }
        }
        Ok(Split { x, s })
    }

    /// The support of every row, in order.
    fn sets(&self, problem: &OnDevice, split: &Split) -> Result<Vec<Vec<i32>>> {
        let (d, rows) = (problem.d, problem.rows);
        let (set, sizes) = (self.zeros::<i32>(rows * d)?, self.zeros::<i32>(rows)?);
        self.launch(self.cuda.kernels.supports, (rows, 1), 32, arguments!(&split.x, &split.s, &set, &sizes, d))?;
        let (set, sizes) = (self.to_host(&set)?, self.to_host(&sizes)?);
        Ok(set.chunks(d).zip(sizes).map(|(row, size)| row[..size as usize].to_vec()).collect())
    }
}
