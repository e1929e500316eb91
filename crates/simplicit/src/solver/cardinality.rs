//! The cardinality problem itself: min Λ/m·‖z − Ũᵀw‖² + μ·(number of non-zeros), non-convex. Rows are put into the
//! solver's own coordinates here, a [`GroupBackend`] solves them by operator splitting with a hard threshold, single
//! moves and least squares on the support, and the result is projected onto its ball.
//!
//! The answer is a good local optimum; [`cardinality_bound`](super::cardinality_bound) gives each row's distance from
//! a certified lower bound, and proves optimality where it can.

use super::Refit;
use super::canonical::Row;
use super::design::{Design, Scaling};
use crate::backend::{CardinalityGroup, GroupBackend, Ladder, block_rows};
use crate::linalg::Matrix;
use crate::parallel::{self, Cancel, Threads};
use crate::problem::RowProblem;
use crate::problem::penalty::Ridge;
use crate::{Error, Result};

/// The effort that the solver makes.
#[derive(Debug, Clone, PartialEq)]
pub struct CardinalitySettings {
    /// Splitting steps. Default 250.
    pub steps: usize,
    /// Number of values of ρ, each of which costs an inverse. Default 6.
    pub rungs: usize,
    /// First ρ as a share of the mean eigenvalue of the normalised Gram matrix (which is 1). Default 0.05.
    pub first_rho: f64,
    /// The last ρ over the first. Default 5.2.
    pub span: f64,
    /// Ridge of the refit, relative to unit-RMS features. Default 1e-5.
    pub ridge: f64,
    /// Single moves and least squares on the support after the splitting. Default on; without them the weights are the
    /// splitting's own, which is enough to count them.
    pub moves: bool,
}

impl Default for CardinalitySettings {
    fn default() -> Self {
        Self { steps: 250, rungs: 6, first_rho: 0.05, span: 5.2, ridge: 1e-5, moves: true }
    }
}

impl CardinalitySettings {
    /// The schedule of the splitting.
    pub(crate) fn ladder(&self) -> Ladder {
        Ladder { steps: self.steps, rungs: self.rungs, first_rho: self.first_rho, span: self.span }
    }
}

/// Weights of every row with few non-zeros: `level` is the price μ of one, in the units of the row's objective.
/// Entry weights scale the price (0: free, ∞: forbidden); bounds are not supported. Rows are treated together in blocks
/// of [`block_rows`]; a piece of a larger group gives the same bits if it is one of the group's blocks.
#[allow(clippy::too_many_arguments)]
pub fn solve_cardinality(
    design: &Design,
    problems: &[RowProblem],
    level: f64,
    settings: &CardinalitySettings,
    backend: &dyn GroupBackend,
    threads: Threads,
    cancel: &Cancel,
    mut progress: impl FnMut(usize),
) -> Result<Vec<Vec<f64>>> {
    let block = block_rows(problems.len());
    solve_in_blocks(design, problems, level, settings, backend, block, threads, cancel, &mut progress)
}

/// [`solve_cardinality`] with a given number of rows per block.
#[allow(clippy::too_many_arguments)]
pub(crate) fn solve_in_blocks(
    design: &Design,
    problems: &[RowProblem],
    level: f64,
    settings: &CardinalitySettings,
    backend: &dyn GroupBackend,
    block: usize,
    threads: Threads,
    cancel: &Cancel,
    progress: &mut dyn FnMut(usize),
) -> Result<Vec<Vec<f64>>> {
    if !(level >= 0.0 && level.is_finite()) {
        return Err(Error::setting("price of a non-zero", "zero or a positive number", level));
    }
    for problem in problems {
        problem.check(design.features(), design.targets())?;
        if problem.bounds.is_some() {
            return Err(Error::unsupported("cardinality with bounds", "use l1 or perspective for rows with bounds"));
        }
    }
    let (count, d) = (problems.len(), design.live().len());
    // The penalty is not used here; ridge has no kink, so every unpenalised entry is treated as usual.
    let ridge = Ridge::new(1.0)?;
    let canonical =
        |p: &RowProblem| Row::new(design, Scaling::Rms, p, &ridge, &design.cross(p.target), design.energy(p.target));
    let mut linear = Matrix::zeros(count, d);
    let mut prices = Matrix::zeros(count, d);
    let mut start = Matrix::zeros(count, d);
    parallel::fold(
        threads,
        count,
        |k| {
            let Some(row) = canonical(&problems[k]) else { return Ok(None) };
            // In canonical units the price is μω/S.
            let forbidden = |j: usize| row.bounds.as_ref().is_some_and(|b| b[j] == (0.0, 0.0));
            // A price of zero stays free, even for a weight so large that their product would not be a number.
            let free = |j: usize| level == 0.0 || row.scale.weights[j] == 0.0;
            let price = |j: usize| match (forbidden(j), free(j)) {
                (true, _) => f64::INFINITY,
                (_, true) => 0.0,
                _ => level * row.scale.weights[j],
            };
            let own_prices: Vec<f64> = (0..d).map(price).collect();
            // The splitting squares in single precision, so it cannot start from weights whose squares overflow
            // (those of features that cancel to a target of almost nothing).
            let fits = |values: &Vec<f64>| values.iter().all(|v| v.abs() < f64::from(f32::MAX).sqrt());
            let values = problems[k].start.as_ref().map(|values| row.canonical(design, values)).filter(fits);
            Ok(Some((row.h, own_prices, values)))
        },
        |k, row| {
            match row {
                // A target that is always zero has the zero row: nothing pulls weights away from zero, and every
                // entry is forbidden.
                None => prices.row_mut(k).fill(f64::INFINITY),
                Some((h, own_prices, values)) => {
                    linear.row_mut(k).copy_from_slice(&h);
                    prices.row_mut(k).copy_from_slice(&own_prices);
                    if let Some(values) = values {
                        start.row_mut(k).copy_from_slice(&values);
                    }
                }
            }
            Ok(())
        },
    )?;
    let group = CardinalityGroup {
        quadratic: design.quadratic(),
        linear: &linear,
        prices: &prices,
        start: &start,
        ladder: settings.ladder(),
        inverses: design.inverses(),
        ridge: settings.ridge,
        moves: settings.moves,
        block,
    };
    let weights = backend.solve(&group, threads, cancel, progress)?;
    if (weights.rows(), weights.cols()) != (count, d) {
        let got = format!("{} × {}", weights.rows(), weights.cols());
        return Err(Error::shape("weights of a group", format!("{count} × {d}"), got));
    }
    if let Some(bad) = weights.as_slice().iter().find(|w| !w.is_finite()) {
        return Err(Error::shape("weights of a group", "finite numbers", bad));
    }
    let refit = Refit { ridge: settings.ridge };
    parallel::map(threads, count, |k| {
        let problem = &problems[k];
        let Some(row) = canonical(problem) else { return Ok(vec![0.0; design.features()]) };
        let w = weights.row(k);
        let stored = row.stored(design, w);
        if row.is_feasible(w) { Ok(stored) } else { refit.inside_ball(design, problem, &stored, cancel) }
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::backend::{Cpu, Inverses};
    use crate::linalg::gemm;
    use crate::random::Random;
    use crate::solver::{PricedRows, cardinality_bound};
    use crate::statistics::Statistics;

    /// All 2^d supports, each with its best weights.
    fn brute_force(statistics: &Statistics, price: f64, ridge: f64) -> f64 {
        let d = statistics.features();
        let design = Design::new(statistics).unwrap();
        let problem = RowProblem::new(0, 1.0);
        let penalty = Ridge::new(1.0).unwrap();
        let row = Row::new(&design, Scaling::Rms, &problem, &penalty, &design.cross(0), design.energy(0)).unwrap();
        let rms = design.target_rms(0);
        (0..1usize << d)
            .map(|set| {
                let support: Vec<usize> = (0..d).filter(|j| set >> j & 1 == 1).collect();
                let w = Refit { ridge }.on_support(&design, &row, &support);
                let stored = row.stored(&design, &w);
                let squares: f64 = w.iter().map(|w| w * w).sum();
                design.mean_square_mismatch(0, &stored) + price * support.len() as f64 + rms * rms * ridge * squares
            })
            .fold(f64::INFINITY, f64::min)
    }

    #[test]
    fn the_answer_is_near_the_best_of_all_supports_and_the_bound_below_it() {
        for seed in 0..20 {
            let mut random = Random::new(seed);
            let (m, d) = (60, 9);
            let mixing = Matrix::from_fn(d, d, |i, j| if i == j { 1.0 } else { 0.3 * random.normal() });
            let raw = Matrix::from_fn(m, d, |_, _| random.normal());
            let mut features = Matrix::zeros(m, d);
            gemm(features.as_mut_slice(), d, false, 1.0, raw.view(), mixing.view());
            let truth: Vec<f64> = (0..d).map(|j| if j % 3 == 0 { 1.0 + random.uniform() } else { 0.0 }).collect();
            let target = Matrix::from_fn(m, 1, |i, _| {
                (0..d).map(|j| features[(i, j)] * truth[j]).sum::<f64>() + 0.3 * random.normal()
            });
            let statistics = Statistics::of(&features, &target).unwrap();
            let design = Design::new(&statistics).unwrap();
            let problems = [RowProblem::new(0, 1.0)];
            // The default ridge, and one that makes the relaxation tighter.
            for ridge in [CardinalitySettings::default().ridge, 0.05] {
                let settings = CardinalitySettings { ridge, ..Default::default() };
                let (one, cancel, price) = (Threads::one(), Cancel::new(), 0.05);
                let answers =
                    solve_cardinality(&design, &problems, price, &settings, &Cpu, one, &cancel, |_| {}).unwrap();
                let bound =
                    cardinality_bound(&design, &problems, &answers, price, &settings, None, one, &cancel, |_| {})
                        .unwrap();
                let bound = bound[0];
                let best = brute_force(&statistics, price, settings.ridge);
                assert!(
                    bound.value >= best - 1e-9 && bound.value <= 1.1 * best,
                    "seed {seed}, ridge {ridge}: {bound:?}, best {best}"
                );
                assert!(
                    bound.bound <= best + 1e-9,
                    "seed {seed}, ridge {ridge}: bound {} above the optimum {best}",
                    bound.bound
                );
                assert!(
                    bound.bound >= 0.5 * best,
                    "seed {seed}, ridge {ridge}: bound {} of {best} says nothing",
                    bound.bound
                );
            }
        }
    }

    #[test]
    fn parts_of_whole_blocks_give_the_bits_of_all_rows_and_share_their_inverses() {
        let mut random = Random::new(12);
        let (m, d, rows, block) = (60, 180, 70, 32);
        let features = Matrix::from_fn(m, d, |_, _| random.normal());
        let targets = Matrix::from_fn(m, rows, |s, k| features[(s, k)] + 0.5 * random.normal());
        let problems: Vec<RowProblem> = (0..rows).map(|k| RowProblem::new(k, 1.0)).collect();
        let (settings, cancel) = (CardinalitySettings::default(), Cancel::new());
        let solve = |design: &Design, part: &[RowProblem], threads: usize| {
            let threads = Threads::new(threads);
            solve_in_blocks(design, part, 0.01, &settings, &Cpu, block, threads, &cancel, &mut |_| {}).unwrap()
        };
        let whole = Statistics::of(&features, &targets).unwrap();
        for statistics in [whole, Statistics::of_few(features, &targets).unwrap()] {
            let all = solve(&Design::new(&statistics).unwrap(), &problems, 2);
            assert!(all.iter().flatten().any(|w| *w != 0.0) && all.iter().flatten().any(|w| *w == 0.0));
            let inverses: Arc<Inverses> = Arc::default();
            let parts = problems.chunks(block).flat_map(|part| {
                let design = Design::sharing(&statistics, Some(inverses.clone())).unwrap();
                solve(&design, part, 3)
            });
            assert_eq!(parts.collect::<Vec<_>>(), all);
            assert_eq!(inverses.made(), settings.rungs, "every part has made its own");
        }
    }

    #[test]
    fn few_samples_give_what_their_gram_matrix_gives() {
        let mut random = Random::new(11);
        let (m, d, rows) = (60, 180, 5);
        let common: Vec<f64> = (0..m).map(|_| random.normal()).collect();
        let features = Matrix::from_fn(m, d, |s, j| (random.normal() + 0.7 * common[s]) * (1.0 + (j % 5) as f64));
        let targets = Matrix::from_fn(m, rows, |s, k| {
            (0..d).filter(|j| j % 11 == k).map(|j| features[(s, j)]).sum::<f64>() + 0.2 * random.normal()
        });
        let problems: Vec<RowProblem> = (0..rows).map(|k| RowProblem::new(k, 1.0)).collect();
        let settings = CardinalitySettings { ridge: 0.02, ..Default::default() };
        let (two, cancel, price) = (Threads::new(2), Cancel::new(), 2.0);
        let answers = |statistics: &Statistics| {
            let design = Design::new(statistics).unwrap();
            let w = solve_cardinality(&design, &problems, price, &settings, &Cpu, two, &cancel, |_| {}).unwrap();
            let rows = PricedRows::new(&design, price, settings.ridge).unwrap();
            let costs = |(problem, w): (&RowProblem, &Vec<f64>)| {
                let (row, answer) = rows.row(problem, w).unwrap().unwrap();
                (row.value(&answer), row.bound().unwrap().0)
            };
            problems.iter().zip(&w).map(costs).collect::<Vec<_>>()
        };
        let whole = answers(&Statistics::of(&features, &targets).unwrap());
        let few = answers(&Statistics::of_few(features, &targets).unwrap());
        for ((value, bound), (few_value, few_bound)) in whole.into_iter().zip(few) {
            // The relaxation is convex, so both solve it alike; the answers are local optima and may differ a little.
            assert!((bound - few_bound).abs() <= 3e-6 * value, "{bound} {few_bound} of {value}");
            assert!((value - few_value).abs() <= 0.05 * value, "{value} {few_value}");
            assert!(value >= few_bound && few_value >= bound);
        }
    }
}
