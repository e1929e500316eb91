//! The rows of one group, from statistics to stored weights: the steps are the same wherever the statistics were
//! gathered.

use std::ops::Range;
use std::sync::Arc;

use crate::Result;
use crate::backend::{self, Inverses, block_rows};
use crate::linalg::{Matrix, toward_zero};
use crate::parallel::{self, Threads};
use crate::problem::{RowProblem, Units};
use crate::solver::{CardinalityBound, CardinalitySettings, Design};
use crate::statistics::{Statistics, are_few};
use crate::train::key::RowsKey;
use crate::train::plan::work;
use crate::train::rows::build::RowReport;
use crate::train::rows::method::{self, RowGroup};
use crate::train::rows::solve::{Solved, bound, cardinality, solve};
use crate::train::search::survey;
use crate::train::{Bounds, Objective, RowSettings, Run, TrainSettings};

/// The most features with which rows are bounded by default.
const SAMPLED_BOUNDS: usize = 2048;
/// The most work on a group's bounds by default, as a multiple of the multiply-adds of solving its rows once.
/// Training solves rows about three times, and a multiply-add of a bound takes several times as long, because it is
/// in double precision and one row at a time.
const SOLVES: f64 = 0.5;
/// Multiply-adds that all bounds of a network may take in addition: a few seconds.
const ADDITIONAL: f64 = 4e10;
/// About how many times faster a GPU solves rows than the CPU bounds them: if a GPU solved the group, bounds may take
/// only this fraction of the work.
const GPU_SPEED: f64 = 128.0;
/// Number of rows of a group that are bounded if a sample is asked for.
const BOUND_STRATA: usize = 8;
/// Number of rows of a group that a survey solves.
pub(in crate::train) const SURVEY_STRATA: usize = 32;
/// Factor on the first ρ of cardinality over taps. Neighbouring taps are very similar, and with a small ρ the
/// splitting drifts among them: on ResNet-20 at half of its weights, ρ = 0.05 left twice the divergence of larger
/// values.
const TAP_RHO: f64 = 3.0;
/// A row weight below this share of the largest counts as this share: such a unit hardly matters, but its row must
/// stay solvable.
const LEAST_IMPORTANCE: f64 = 1e-10;

/// Rows that share their statistics.
#[derive(Clone, Copy)]
pub(in crate::train) struct Rows<'a> {
    pub(in crate::train) name: &'a str,
    pub(in crate::train) statistics: &'a Statistics,
    pub(in crate::train) design: &'a Design<'a>,
    /// The problems of all rows, or of some rows.
    pub(in crate::train) problems: &'a [RowProblem],
}

/// A row in the form in which it is stored.
pub(in crate::train) struct Stored {
    /// Pairs (feature, weight) without zeros.
    pub(in crate::train) entries: Vec<(usize, f32)>,
    /// Its weights before rounding, over all features.
    pub(in crate::train) weights: Vec<f64>,
    pub(in crate::train) report: RowReport,
    /// Energy of the mismatch with the stored weights, and energy of the target.
    pub(in crate::train) residual: f64,
    pub(in crate::train) energy: f64,
}

impl<'a> Rows<'a> {
    /// Solves all rows, keeps them under `key`, and rounds them to f32; `name_of` names row k in its report.
    pub(in crate::train) fn solve<'r: 'a>(
        &self,
        settings: &TrainSettings,
        strength: f64,
        key: &RowsKey,
        name_of: impl Fn(usize) -> String,
        run: &mut Run<'r>,
    ) -> Result<Vec<Stored>> {
        let Rows { name, statistics, design, problems } = *self;
        let solved = match &settings.objective {
            Objective::Method(method) => {
                let (threads, cancel) = (run.threads, run.cancel);
                let group = RowGroup { name, statistics, design, problems, strength, threads, cancel };
                method::rows(method.as_ref(), &group, run)?
            }
            _ => solve(design, statistics, settings, strength, problems, name, key, run)?,
        };
        self.stored(solved, name_of, run.threads)
    }

    /// Takes all rows with the weights that they start from.
    pub(in crate::train) fn as_they_are(
        &self,
        name_of: impl Fn(usize) -> String,
        threads: Threads,
    ) -> Result<Vec<Stored>> {
        let start = |problem: &RowProblem| problem.start.clone().unwrap_or_else(|| vec![0.0; self.design.features()]);
        let row = |weights: Vec<f64>| Solved { weights, relative_gap: None, at_limit: false, on_gpu: false };
        self.stored(self.problems.iter().map(start).map(row).collect(), name_of, threads)
    }

    fn stored(&self, solved: Vec<Solved>, name_of: impl Fn(usize) -> String, threads: Threads) -> Result<Vec<Stored>> {
        let Rows { statistics, design, problems, .. } = *self;
        // With many features, the residuals take a matrix each, so all threads are used.
        let rounded = parallel::map(threads, solved.len(), |k| {
            let problem = &problems[k];
            // Weights that a ball limits are rounded toward zero, so that the stored row satisfies the limit.
            let bounded = |j: usize| problem.ball.as_ref().is_some_and(|ball| ball.weights[j] != 0.0);
            let round = |(j, w): (usize, &f64)| (j, if bounded(j) { toward_zero(*w) } else { *w as f32 });
            let rounded = || solved[k].weights.iter().enumerate().map(round).filter(|(_, w)| *w != 0.0);
            // The entries are kept until the model is finished, so they take no more memory than they need.
            let mut entries: Vec<(usize, f32)> = Vec::with_capacity(rounded().count());
            entries.extend(rounded());
            let exact: Vec<(usize, f64)> = entries.iter().map(|&(j, w)| (j, f64::from(w))).collect();
            Ok((statistics.mismatch(problem.target, &exact), entries))
        })?;
        type Rounded = (f64, Vec<(usize, f32)>);
        let stored = |((row, problem), (residual, entries)): ((Solved, &RowProblem), Rounded)| {
            let k = problem.target;
            let energy = statistics.energy(k);
            let report = RowReport {
                name: name_of(k),
                nonzeros: entries.len(),
                relative_gap: row.relative_gap,
                at_limit: row.at_limit,
                relative_residual: if energy > 0.0 { (residual / energy).sqrt() } else { 0.0 },
                target_rms: design.target_rms(k),
                bound_distance: None,
                proven: false,
                on_gpu: row.on_gpu,
            };
            Stored { entries, weights: row.weights, report, residual, energy }
        };
        Ok(solved.into_iter().zip(problems).zip(rounded).map(stored).collect())
    }

    /// Lower bounds (or proofs) of `count` rows, by row; `answers` has one row of weights per problem, and `number`
    /// is the group's place in the plan.
    pub(in crate::train) fn bounds(
        &self,
        settings: &TrainSettings,
        strength: f64,
        answers: &[Vec<f64>],
        number: usize,
        count: usize,
        run: &mut Run,
    ) -> Result<Vec<(usize, CardinalityBound)>> {
        if count == 0 {
            return Ok(Vec::new());
        }
        let drawn = survey::drawn(self.design, self.problems, count, drawing(settings, number));
        let rows: Vec<usize> = drawn.into_iter().map(|r| r.0).collect();
        let problems: Vec<RowProblem> = rows.iter().map(|&k| self.problems[k].clone()).collect();
        let weights: Vec<Vec<f64>> = rows.iter().map(|&k| answers[k].clone()).collect();
        let bounds = bound(self, settings, strength, &problems, &weights, run)?;
        Ok(rows.into_iter().zip(bounds).collect())
    }

    /// Expected non-zeros of the group at every price, by the splitting alone. The problems are those of the rows
    /// that [`surveyed`] draws, at strength 1; each stands for several rows.
    pub(in crate::train) fn survey(
        &self,
        settings: &TrainSettings,
        stands_for: &[f64],
        prices: &[f64],
        run: &mut Run,
    ) -> Result<Vec<f64>> {
        let rows = self.problems.len();
        let at = |number: usize| {
            let (price, problem) = (prices[number / rows], &self.problems[number % rows]);
            let weights = problem.weights.as_ref().map(|w| w.iter().map(|w| w * price).collect());
            RowProblem { weights, ball: None, ..problem.clone() }
        };
        let how = CardinalitySettings { moves: false, ..settings.rows.cardinality.clone() };
        let tuned =
            TrainSettings { rows: RowSettings { cardinality: how, ..settings.rows.clone() }, ..settings.clone() };
        let all = prices.len() * rows;
        let mut nonzeros = Vec::with_capacity(all);
        for part in parts(settings, self.statistics, all, run) {
            let priced: Vec<RowProblem> = part.map(at).collect();
            let solved = cardinality(self, &tuned, 1.0, &priced, block_rows(all), run)?;
            nonzeros.extend(solved.iter().map(|w| w.iter().filter(|w| **w != 0.0).count() as f64));
        }
        let at_price = |counts: &[f64]| counts.iter().zip(stands_for).map(|(count, rows)| rows * count).sum();
        Ok(nonzeros.chunks(rows.max(1)).map(at_price).collect())
    }
}

/// The rows that a survey of group `number` solves, and how many rows each of them stands for.
pub(in crate::train) fn surveyed(
    settings: &TrainSettings,
    number: usize,
    design: &Design,
    problems: &[RowProblem],
) -> Vec<(usize, f64)> {
    survey::drawn(design, problems, SURVEY_STRATA, drawing(settings, number))
}

/// The most weights of the rows that are solved together in this process, unless a single block has more.
const TOGETHER: usize = 1 << 22;
/// The same if other processes solve them, one block each at a time.
const TOGETHER_ELSEWHERE: usize = 1 << 24;
/// Bytes of every weight of rows that are being solved: problems, their copies for the solver in both precisions, answers.
pub(in crate::train) const ROW_BYTES: u64 = 100;

/// Ranges of a group's rows that are solved one after the other. Each is a number of whole blocks, so that the
/// division changes no bit.
pub(in crate::train) fn parts(
    settings: &TrainSettings,
    statistics: &Statistics,
    rows: usize,
    run: &Run,
) -> Vec<Range<usize>> {
    let few = are_few(statistics.samples(), statistics.features());
    let each = part_rows(settings, few, statistics.features(), rows, run.keep.delegate().is_some());
    (0..rows).step_by(each).map(|first| first..rows.min(first + each)).collect()
}

/// Where these parts keep the inverses that they share; `None` for a single part, which does not need it.
pub(in crate::train) fn shared_inverses(parts: &[Range<usize>]) -> Option<Arc<Inverses>> {
    (parts.len() > 1).then(Arc::default)
}

/// Rows of a part, a power of two of blocks; all rows if the inverses that the parts share take more memory than all
/// rows do, and if a GPU solves them, because it makes its inverses for every call. The number depends on sizes, on
/// the device and on whether other processes solve rows.
pub(in crate::train) fn part_rows(
    settings: &TrainSettings,
    few: bool,
    features: usize,
    rows: usize,
    elsewhere: bool,
) -> usize {
    let (d, block, all) = (features.max(1), block_rows(rows), rows.max(1));
    let together = if elsewhere { TOGETHER_ELSEWHERE } else { TOGETHER };
    if !matches!(settings.objective, Objective::Cardinality) || rows * d <= together {
        return all;
    }
    let part = (block << (together / (d * block)).max(1).ilog2()).min(all);
    let saved = ROW_BYTES * ((all - part) * d) as u64;
    let on_gpu = || backend::gpu(settings.work.device, rows as f64 * (d * d) as f64).is_ok_and(|gpu| gpu.is_some());
    if !few && (elsewhere || saved <= inverse_bytes(settings, d) || on_gpu()) { all } else { part }
}

/// Bytes of all inverses for d features.
pub(in crate::train) fn inverse_bytes(settings: &TrainSettings, features: usize) -> u64 {
    4 * (settings.rows.cardinality.ladder().schedule().len() * features * features) as u64
}

/// Whether rows with this many features get bounds, some or all of them.
pub(in crate::train) fn has_bounds(settings: &TrainSettings, features: usize) -> bool {
    matches!(settings.objective, Objective::Cardinality)
        && match settings.rows.bounds {
            Some(Bounds::Off) => false,
            Some(Bounds::All) => true,
            Some(Bounds::Sampled) | None => features <= SAMPLED_BOUNDS,
        }
}

/// How many rows get a bound, group after group of a network. By default as many as cost less than training does.
/// Operations are counted instead of measuring time, so the choice is the same on every machine.
pub(in crate::train) struct Allowance<'a> {
    settings: &'a TrainSettings,
    additional: f64,
}

impl<'a> Allowance<'a> {
    pub(in crate::train) fn new(settings: &'a TrainSettings) -> Self {
        Self { settings, additional: ADDITIONAL }
    }

    /// Number of rows of this group that get a bound; `on_gpu` says whether a GPU solved it.
    pub(in crate::train) fn rows(&mut self, group: &Rows, answers: &[Vec<f64>], on_gpu: bool) -> usize {
        let features = group.statistics.features();
        match self.settings.rows.bounds {
            _ if !has_bounds(self.settings, features) => 0,
            Some(Bounds::All) => answers.len(),
            Some(_) => BOUND_STRATA,
            None => self.affordable(features, group.statistics.few_samples().map(Matrix::rows), answers, on_gpu),
        }
    }

    /// `kept` is the number of samples if there are so few that they are kept instead of their products.
    fn affordable(&mut self, features: usize, kept: Option<usize>, answers: &[Vec<f64>], on_gpu: bool) -> usize {
        let rows = answers.len();
        let nonzeros = answers.iter().flatten().filter(|w| **w != 0.0).count() as f64 / rows.max(1) as f64;
        let (shared, each) = work::of_bounds(features, nonzeros);
        let speed = if on_gpu { GPU_SPEED } else { 1.0 };
        let own = SOLVES * work::of_solving(features, rows, kept, &self.settings.rows.cardinality) / speed;
        let chosen = (((own + self.additional / speed - shared) / each.max(1.0)) as usize).min(rows);
        if chosen > 0 {
            self.additional -= speed * (shared + chosen as f64 * each - own).max(0.0);
        }
        chosen
    }
}

/// The seed of the random choices for a group.
fn drawing(settings: &TrainSettings, group: usize) -> u64 {
    settings.work.seed ^ (group as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// The settings of rows over taps, in the solver's own units.
pub(in crate::train) fn for_taps(settings: &TrainSettings) -> TrainSettings {
    let mut tuned = settings.clone();
    tuned.rows.cardinality.first_rho *= TAP_RHO;
    tuned
}

/// A row's problem with its mismatch weighted by λ and the row's own weight relative to all (or, without weights, by
/// the size of its target), and with the matching units.
pub(in crate::train) fn weighed(
    row: usize,
    lambda: f64,
    importance: Option<(f64, f64)>,
    settings: &TrainSettings,
    design: &Design,
) -> RowProblem {
    let rms = design.target_rms(row);
    let mut problem = RowProblem::new(row, lambda);
    if let Some((weight, largest)) = importance {
        let weight = weight.max(LEAST_IMPORTANCE * largest).max(f64::MIN_POSITIVE);
        problem.fit = lambda * weight;
        problem.units = Units::Rms { factor: weight.sqrt() };
    } else if settings.rows.normalise {
        if rms > 0.0 {
            problem.fit = lambda / (rms * rms);
            problem.units = Units::Rms { factor: 1.0 / rms };
        }
    } else {
        problem.fit = lambda * design.samples() as f64;
    }
    problem
}

/// The factor on the penalty of every entry; cardinality has its price outside of the problem.
pub(in crate::train) fn entry_price(settings: &TrainSettings, strength: f64) -> f64 {
    match settings.objective {
        Objective::Convex(_) => strength,
        Objective::Cardinality | Objective::Method(_) => 1.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Device;
    use crate::train::WorkSettings;

    #[test]
    fn parts_are_whole_blocks_and_no_larger_than_they_may_be() {
        let settings = TrainSettings::default();
        let settings =
            TrainSettings { work: WorkSettings { device: Device::Cpu, ..settings.work.clone() }, ..settings };
        for rows in [1, 100, 200, 512, 4096, 100_000] {
            for features in [1, 785, 4609, 9217, 25_089, 200_000] {
                let block = block_rows(rows);
                for (elsewhere, most) in [(false, 1 << 22), (true, 1 << 24)] {
                    let part = part_rows(&settings, true, features, rows, elsewhere);
                    assert!(
                        part == rows || part.is_multiple_of(block) && (part / block).is_power_of_two(),
                        "{part} of {rows}"
                    );
                    assert!(part == rows || part == block || part * features <= most, "{part} of {rows} x {features}");
                    assert!(part == rows || 2 * part * features > most, "{part} of {rows} x {features} is too few");
                }
                // Six inverses in single precision are kept for several parts, which must be worth it.
                let part = part_rows(&settings, false, features, rows, false);
                let saved = 100 * (rows - part) * features;
                assert!(part == rows || saved > 24 * features * features, "{part} of {rows} x {features}");
            }
        }
        assert_eq!(part_rows(&settings, true, 25_089, 4096, false), 128);
        assert_eq!(part_rows(&settings, false, 4097, 4096, false), 512);
        assert_eq!(part_rows(&settings, false, 9217, 512, false), 512, "not enough rows for their inverses");
    }

    /// By default bounds take no longer than training; the multiply-adds of bounds and of solving are counted
    /// independently here.
    #[test]
    fn bounds_cost_half_of_solving_and_an_allowance_of_the_network() {
        let settings = TrainSettings::default();
        let (rungs, steps) = (settings.rows.cardinality.rungs as f64, settings.rows.cardinality.steps as f64);
        for speed in [1.0, 128.0] {
            let (mut allowance, mut spent, mut allowed) = (Allowance::new(&settings), 0.0, 4e10 / speed);
            let (mut all, mut some, mut none) = (0, 0, 0);
            let sizes = [16usize, 64, 144, 577, 1153, 2048];
            for (features, kept) in sizes.iter().flat_map(|&features| [None, Some(5)].map(|kept| (features, kept))) {
                for (rows, share) in [(1usize, 0.02), (10, 0.6), (64, 0.2), (512, 0.2), (512, 0.02), (64, 0.6)] {
                    let nonzeros = ((share * features as f64) as usize).max(1);
                    let answer: Vec<f64> = (0..features).map(|j| f64::from(u8::from(j < nonzeros))).collect();
                    let chosen = allowance.affordable(features, kept, &vec![answer; rows], speed > 1.0);
                    let (d, r, k, s) = (features as f64, rows as f64, nonzeros as f64, features as f64 / 4.0);
                    let moves = 2.0 * r * s * s * (s / 6.0 + s.min(320.0));
                    let solving = match kept {
                        None => rungs * d * d * d + steps * r * d * d + moves,
                        Some(_) => {
                            let splitting = rungs * 2.0 * (125.0 / 6.0 + 50.0 * d) + steps * r * 10.0 * d;
                            splitting + moves.min(2.0 * r * (25.0 * s + 125.0 / 6.0))
                        }
                    };
                    let bounds = |n: usize| 8.0 * d * d * d + n as f64 * 240.0 * (k * k * k / 3.0 + 4.0 * d * k);
                    let own = solving / 2.0 / speed;
                    let left = allowed - spent;
                    let of = format!("{features} {kept:?} {rows} {nonzeros}: {chosen}");
                    assert!(chosen == 0 || bounds(chosen) <= (own + left) * (1.0 + 1e-9), "{of}");
                    // The number is the largest that is allowed, or all rows.
                    assert!(chosen == rows || bounds(chosen + 1) >= (own + left) * (1.0 - 1e-9), "{of}");
                    if chosen > 0 {
                        spent += bounds(chosen);
                        allowed += own.min(bounds(chosen));
                    }
                    all += usize::from(chosen == rows);
                    some += usize::from(chosen > 0 && chosen < rows);
                    none += usize::from(chosen == 0);
                }
            }
            assert!(all > 0 && some > 0 && none > 0, "{all} {some} {none}");
        }
        let asked = |bounds: Option<Bounds>, features| {
            has_bounds(
                &TrainSettings { rows: RowSettings { bounds, ..settings.rows.clone() }, ..settings.clone() },
                features,
            )
        };
        assert!(asked(None, 2048) && !asked(None, 2049), "the default");
        assert!(asked(Some(Bounds::All), 2049) && !asked(Some(Bounds::Off), 16), "what was asked");
    }
}
