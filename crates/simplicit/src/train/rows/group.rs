//! The rows of one group, from statistics to stored weights: the same steps whoever gathered the statistics.

use crate::Result;
use crate::linalg::toward_zero;
use crate::parallel::{self, Threads};
use crate::problem::{RowProblem, Units};
use crate::solver::{CardinalityBound, CardinalitySettings, Design};
use crate::statistics::{Statistics, are_few};
use crate::train::plan::work;
use crate::train::rows::build::RowReport;
use crate::train::rows::method::{self, RowGroup};
use crate::train::rows::solve::{Solved, bound, cardinality, solve};
use crate::train::search::survey;
use crate::train::{Bounds, Objective, Run, TrainSettings};

/// Features up to which rows are bounded.
const SAMPLED_BOUNDS: usize = 2048;
/// A search solves the rows of a group at least so often: at a few prices, for a rough model, and for the model.
const SOLVES: f64 = 3.0;
/// How much faster a GPU solves rows than the CPU bounds them, about: where it did, so many fewer are bounded.
const GPU_SPEED: f64 = 128.0;
/// Multiply-adds that bounds of a group may take in any case where the CPU solved it: a fraction of a second.
const CHEAP: f64 = 1e9;
/// Rows of a group that are bounded where a sample is asked for.
const BOUND_STRATA: usize = 8;
/// Rows of a group that a survey looks at.
pub(in crate::train) const SURVEY_STRATA: usize = 32;
/// Factor on the first ρ of cardinality over taps. Neighbouring taps are much alike, and a small ρ wanders off among
/// them: on ResNet-20 at half of its weights, ρ = 0.05 left twice the divergence that larger ones do.
const TAP_RHO: f64 = 3.0;
/// Row weights below this share of the largest count as this share: such a unit hardly matters, but must stay solvable.
const LEAST_IMPORTANCE: f64 = 1e-10;

/// Rows that share their statistics.
#[derive(Clone, Copy)]
pub(in crate::train) struct Rows<'a> {
    pub(in crate::train) name: &'a str,
    pub(in crate::train) statistics: &'a Statistics,
    pub(in crate::train) design: &'a Design<'a>,
    /// One per row, or of some rows.
    pub(in crate::train) problems: &'a [RowProblem],
}

/// A row as it is stored.
pub(in crate::train) struct Stored {
    /// (feature, weight), zeros left out.
    pub(in crate::train) entries: Vec<(usize, f32)>,
    /// Before rounding, over all features.
    pub(in crate::train) weights: Vec<f64>,
    pub(in crate::train) report: RowReport,
    /// Energy of the mismatch with the stored weights, and of the target.
    pub(in crate::train) residual: f64,
    pub(in crate::train) energy: f64,
}

impl<'a> Rows<'a> {
    /// Solves all rows, keeps them under `key`, and rounds them to f32; `name_of` names row k in its report.
    pub(in crate::train) fn solve<'r: 'a>(
        &self,
        settings: &TrainSettings,
        strength: f64,
        key: &str,
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

    /// All rows with the weights that they start from.
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
        // Residuals over many features are a matrix each: on all threads.
        let rounded = parallel::map(threads, solved.len(), |k| {
            let problem = &problems[k];
            // What a ball bounds is rounded toward zero, so that the stored row keeps it.
            let bounded = |j: usize| problem.ball.as_ref().is_some_and(|ball| ball.weights[j] != 0.0);
            let round = |(j, w): (usize, &f64)| (j, if bounded(j) { toward_zero(*w) } else { *w as f32 });
            let entries: Vec<(usize, f32)> =
                solved[k].weights.iter().enumerate().map(round).filter(|(_, w)| *w != 0.0).collect();
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

    /// Lower bounds (or proofs) of the rows that the settings choose, by row; `answers` has one row of weights per
    /// problem, `number` is the group's place in the plan, `on_gpu` says whether a GPU solved it.
    pub(in crate::train) fn bounds(
        &self,
        settings: &TrainSettings,
        strength: f64,
        answers: &[Vec<f64>],
        number: usize,
        on_gpu: bool,
        run: &mut Run,
    ) -> Result<Vec<(usize, CardinalityBound)>> {
        let (features, rows) = (self.statistics.features(), self.problems.len());
        let strata = match settings.bounds {
            _ if !has_bounds(settings, features) => return Ok(Vec::new()),
            Some(Bounds::All) => rows,
            Some(_) => BOUND_STRATA,
            None => affordable(settings, features, answers, on_gpu),
        };
        let drawn = survey::drawn(self.design, self.problems, strata, drawing(settings, number));
        let rows: Vec<usize> = drawn.into_iter().map(|r| r.0).collect();
        let problems: Vec<RowProblem> = rows.iter().map(|&k| self.problems[k].clone()).collect();
        let weights: Vec<Vec<f64>> = rows.iter().map(|&k| answers[k].clone()).collect();
        let bounds = bound(self, settings, strength, &problems, &weights, run)?;
        Ok(rows.into_iter().zip(bounds).collect())
    }

    /// About what every weight of the baseline is worth, were it alone: where a row has no weights yet, nothing. The problems
    /// are those at strength 1.
    pub(in crate::train) fn worth(&self) -> Vec<f64> {
        let mut out = Vec::new();
        for problem in self.problems {
            let (Some(start), Some(weights)) = (&problem.start, &problem.weights) else { continue };
            let priced = start.iter().zip(weights).enumerate().filter(|(_, (_, w))| **w > 0.0 && w.is_finite());
            out.extend(priced.map(|(j, (v, w))| problem.fit * (v * self.design.rms(j)).powi(2) / w));
        }
        out
    }

    /// Expected non-zeros of the group at every price, from rows drawn by the seed and by the splitting alone; the
    /// problems are those at strength 1.
    pub(in crate::train) fn survey(
        &self,
        settings: &TrainSettings,
        number: usize,
        prices: &[f64],
        run: &mut Run,
    ) -> Result<Vec<f64>> {
        let (design, problems) = (self.design, self.problems);
        let rows = survey::drawn(design, problems, SURVEY_STRATA, drawing(settings, number));
        let at = |price: f64, row: usize| {
            let problem = &problems[row];
            let weights = problem.weights.as_ref().map(|w| w.iter().map(|w| w * price).collect());
            RowProblem { weights, ball: None, ..problem.clone() }
        };
        let priced: Vec<RowProblem> = prices
            .iter()
            .flat_map(|&price| rows.iter().map(move |&(row, _)| (price, row)))
            .map(|(p, r)| at(p, r))
            .collect();
        let how = CardinalitySettings { moves: false, ..settings.cardinality.clone() };
        let settings = TrainSettings { cardinality: how, ..settings.clone() };
        let solved = cardinality(self, &settings, 1.0, &priced, run)?;
        let nonzeros = |w: &Vec<f64>| w.iter().filter(|w| **w != 0.0).count() as f64;
        let counts = solved
            .chunks(rows.len().max(1))
            .map(|at_price| at_price.iter().zip(&rows).map(|(w, (_, stands_for))| stands_for * nonzeros(w)).sum());
        Ok(counts.collect())
    }
}

/// Weights of the rows that are solved together where samples are few: what rows share costs little then and is made again.
const TOGETHER: usize = 1 << 24;

/// A group's rows in the parts that are solved one after the other. It depends on sizes alone.
pub(in crate::train) fn parts(
    settings: &TrainSettings,
    statistics: &Statistics,
    rows: usize,
) -> Vec<std::ops::Range<usize>> {
    let few = are_few(statistics.samples(), statistics.features());
    let each = part_rows(settings, few, statistics.features(), rows);
    (0..rows).step_by(each).map(|first| first..rows.min(first + each)).collect()
}

/// Rows of a part.
pub(in crate::train) fn part_rows(settings: &TrainSettings, few: bool, features: usize, rows: usize) -> usize {
    let whole = !few || !matches!(settings.objective, Objective::Cardinality);
    if whole { rows.max(1) } else { (TOGETHER / features.max(1)).clamp(1, rows.max(1)) }
}

/// Whether rows of so many features get bounds, some or all of them.
pub(in crate::train) fn has_bounds(settings: &TrainSettings, features: usize) -> bool {
    matches!(settings.objective, Objective::Cardinality)
        && match settings.bounds {
            Some(Bounds::Off) => false,
            Some(Bounds::All) => true,
            Some(Bounds::Sampled) | None => features <= SAMPLED_BOUNDS,
        }
}

/// How many rows of a group get a bound where nothing is said: what costs no more than solving all of them a few times, as
/// training does, and one at least. Operations are counted and time is not measured, so the choice is the same on every machine.
fn affordable(settings: &TrainSettings, features: usize, answers: &[Vec<f64>], on_gpu: bool) -> usize {
    let rows = answers.len().max(1);
    let nonzeros = answers.iter().flatten().filter(|w| **w != 0.0).count() as f64 / rows as f64;
    let (shared, each) = work::of_bounds(features, nonzeros);
    let solving = SOLVES * work::of_solving(features, rows, &settings.cardinality);
    let allowed = solving.max(CHEAP) / if on_gpu { GPU_SPEED } else { 1.0 };
    (((allowed - shared) / each.max(1.0)) as usize).clamp(1, rows)
}

/// The seed of what is drawn from a group.
fn drawing(settings: &TrainSettings, group: usize) -> u64 {
    settings.seed ^ (group as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// The settings of rows over taps, in the solver's own units.
pub(in crate::train) fn for_taps(settings: &TrainSettings) -> TrainSettings {
    let mut tuned = settings.clone();
    tuned.cardinality.first_rho *= TAP_RHO;
    tuned
}

/// A row's problem with its mismatch weighed by λ and the row's own weight out of all (or, without weights, by the size of
/// its target), in the units that go with it.
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
    } else if settings.normalise {
        if rms > 0.0 {
            problem.fit = lambda / (rms * rms);
            problem.units = Units::Rms { factor: 1.0 / rms };
        }
    } else {
        problem.fit = lambda * design.samples() as f64;
    }
    problem
}

/// What the settings multiply every entry's penalty with: cardinality has its price beside the problem.
pub(in crate::train) fn entry_price(settings: &TrainSettings, strength: f64) -> f64 {
    match settings.objective {
        Objective::Convex(_) => strength,
        Objective::Cardinality | Objective::Method(_) => 1.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A bound takes no longer than training unless asked: multiply-adds of bounds and of three solves, counted here again.
    #[test]
    fn bounds_cost_no_more_than_solving_three_times() {
        let settings = TrainSettings::default();
        let (rungs, steps) = (settings.cardinality.rungs as f64, settings.cardinality.steps as f64);
        let (mut all, mut some, mut one) = (0, 0, 0);
        for features in [16usize, 64, 144, 577, 1153, 2048] {
            for rows in [1usize, 10, 64, 512] {
                for share in [0.02, 0.2, 0.6] {
                    let nonzeros = ((share * features as f64) as usize).max(1);
                    let answer: Vec<f64> = (0..features).map(|j| f64::from(u8::from(j < nonzeros))).collect();
                    let answers = vec![answer; rows];
                    let chosen = affordable(&settings, features, &answers, false);
                    let beside_gpu = affordable(&settings, features, &answers, true);
                    let (d, r, k, s) = (features as f64, rows as f64, nonzeros as f64, features as f64 / 4.0);
                    let splitting = rungs * d * d * d + steps * r * d * d;
                    let moves = 2.0 * r * s * s * (s / 6.0 + s.min(320.0));
                    let allowed = (3.0 * (splitting + moves)).max(1e9);
                    let allowed_beside_gpu = allowed / 128.0;
                    let bounds = |n: usize| 8.0 * d * d * d + n as f64 * 240.0 * (k * k * k / 3.0 + 4.0 * d * k);
                    assert!((1..=rows).contains(&chosen), "{features} {rows} {nonzeros}: {chosen}");
                    assert!(beside_gpu <= chosen && (beside_gpu == 1 || bounds(beside_gpu) <= allowed_beside_gpu));
                    assert!(chosen == 1 || bounds(chosen) <= allowed, "{features} {rows} {nonzeros}: {chosen}");
                    // As many as are allowed: one more would be too much, or there is none.
                    assert!(chosen == rows || bounds(chosen + 1) > allowed, "{features} {rows} {nonzeros}: {chosen}");
                    all += usize::from(chosen == rows && rows > 1);
                    some += usize::from(chosen > 1 && chosen < rows);
                    one += usize::from(chosen == 1 && rows > 1);
                }
            }
        }
        assert!(all > 0 && some > 0 && one > 0, "{all} {some} {one}");
        let asked =
            |bounds: Option<Bounds>, features| has_bounds(&TrainSettings { bounds, ..settings.clone() }, features);
        assert!(asked(None, 2048) && !asked(None, 2049), "the default");
        assert!(asked(Some(Bounds::All), 2049) && !asked(Some(Bounds::Off), 16), "what was asked");
    }
}
