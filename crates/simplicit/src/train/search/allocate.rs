//! Chooses prices of layers by how much their non-zeros are worth to the outputs.
//!
//! One price for all rows is the best allocation if the errors of layers add up, each with the weight that its rows
//! have. They do not add up. Here the worth is measured on rough models: the price of one layer at a time is doubled
//! and halved. The change of the divergence of the outputs on held-out samples, divided by the number of non-zeros
//! that are removed, is the worth of a non-zero of that layer. A layer whose non-zeros are worth more than the
//! average gets a lower price by that ratio, the others a higher one, and the common price keeps the number of
//! non-zeros. If worth is proportional to price this makes all worths equal, which is the optimum. The new prices are
//! kept if the divergence of a rough model with them is smaller.

use crate::equilibrium::{Equilibrium, EquilibriumSettings};
use crate::linalg::Matrix;
use crate::model::ImplicitModel;
use crate::parallel::{self, Threads};
use crate::states::{StateSlice, StateSource};
use crate::train::refit::output_metric::Metric;
use crate::train::search::survey::Steering;
use crate::train::{Run, TrainInput};
use crate::{Error, Result};

/// Logarithm of the factor by which a layer's price is raised and lowered to measure the worth of its non-zeros.
const STEP: f64 = std::f64::consts::LN_2;
/// The largest logarithm of a factor by which one round changes a price.
const LARGEST: f64 = 1.0;
/// The worths of layers differ by about this much in their logarithm; a measurement with more noise than that counts
/// little.
const SPREAD: f64 = 0.5;
/// Shares of the step that are tried.
const SHARES: [f64; 3] = [1.0, 0.5, 0.25];
/// The most samples that judge, and how many of them are run together.
const JUDGED: usize = 500;
const BLOCK: usize = 50;
/// With fewer samples than this, none can be held out.
pub(in crate::train) const LEAST_SAMPLES: usize = 100;

/// The results of the allocation over layers, measured on rough models.
#[derive(Debug, Clone, PartialEq)]
pub struct Allocation {
    /// Divergence of the outputs of held-out samples, with one price for all layers.
    pub before: f64,
    /// The same divergence with the prices found, at the same number of non-zeros; never larger.
    pub after: f64,
    /// The factor on the price of every layer, by name, in the order of the network.
    pub factors: Vec<(String, f64)>,
}

/// The samples that rough models fit, at most `most` of all, and the samples that judge them.
pub(in crate::train) fn parts(samples: usize, most: usize) -> (usize, std::ops::Range<usize>) {
    let fitted = most.min(samples * 2 / 3);
    (fitted, fitted..samples.min(fitted + JUDGED))
}

/// Number of rough models in a round over this many layers.
pub(in crate::train) fn models_of_a_round(layers: usize) -> usize {
    2 * layers + SHARES.len()
}

/// A rough model at given prices.
pub(in crate::train) struct Tried {
    /// Non-zeros of every group.
    pub(in crate::train) counts: Vec<usize>,
    /// The divergence of every sample that judges.
    pub(in crate::train) divergences: Vec<f64>,
}

impl Tried {
    fn total(&self) -> f64 {
        self.counts.iter().sum::<usize>() as f64
    }

    fn divergence(&self) -> f64 {
        self.divergences.iter().sum::<f64>() / self.divergences.len().max(1) as f64
    }
}

/// The results, as numbers that can be kept.
pub(in crate::train) struct Exchanged {
    /// Logarithm of the factor of every group.
    factors: Vec<f64>,
    /// The non-zeros that groups kept with these factors, at this common price.
    counts: Vec<usize>,
    common: f64,
    before: f64,
    after: f64,
}

impl Exchanged {
    /// How many numbers the results are for this many groups.
    pub(in crate::train) fn length(groups: usize) -> usize {
        2 * groups + 3
    }

    pub(in crate::train) fn to_numbers(&self) -> Vec<f64> {
        let counts = self.counts.iter().map(|c| *c as f64);
        self.factors.iter().copied().chain(counts).chain([self.common, self.before, self.after]).collect()
    }

    pub(in crate::train) fn from_numbers(numbers: &[f64]) -> Result<Self> {
        let &[ref of_groups @ .., common, before, after] = numbers else {
            return Err(Error::shape("kept prices of layers", "at least 3 numbers", numbers.len()));
        };
        let (factors, counts) = of_groups.split_at(of_groups.len() / 2);
        let counts = counts.iter().map(|c| *c as usize).collect();
        Ok(Self { factors: factors.to_vec(), counts, common, before, after })
    }

    /// Prices that start from these results, and the report.
    pub(in crate::train) fn applied(
        self,
        steering: &Steering,
        layers: Vec<(String, Vec<usize>)>,
    ) -> (Steering, Allocation) {
        let mut found = steering.allotted(self.factors.clone());
        found.calibrate(self.common, &self.counts);
        let factor = |groups: &[usize]| groups.first().map_or(1.0, |&g| self.factors[g].exp());
        let factors = layers.into_iter().map(|(name, groups)| (name, factor(&groups))).collect();
        (found.allotted(self.factors), Allocation { before: self.before, after: self.after, factors })
    }
}

/// Rounds of exchanges between layers, each given by its groups. `tried` fits a rough model at held prices; its
/// second argument says that the next models differ from it only in one layer.
pub(in crate::train) fn exchange(
    start: &Steering,
    layers: &[(String, Vec<usize>)],
    rounds: usize,
    mut tried: impl FnMut(&Steering, bool) -> Result<Tried>,
) -> Result<Exchanged> {
    let mut steering = start.clone();
    let mut at = steering.held(steering.common());
    let mut now = tried(&at, true)?;
    let before = now.divergence();
    let mut after = before;
    for _ in 0..rounds {
        steering.calibrate(at.common(), &now.counts);
        let mut worths = Vec::with_capacity(layers.len());
        for (_, groups) in layers {
            let dearer = tried(&at.with(groups, STEP), false)?;
            let cheaper = tried(&at.with(groups, -STEP), false)?;
            worths.push(Worth::of(&dearer, &cheaper));
        }
        let (gone, lost) = worths.iter().fold((0.0, 0.0), |(g, l), w| (g + w.gone, l + w.lost));
        let average = lost / gone;
        if !(average > 0.0 && average.is_finite()) {
            break;
        }
        let mut best: Option<(f64, Steering, Tried)> = None;
        for share in SHARES {
            let mut factors = at.factors().to_vec();
            for ((_, groups), worth) in layers.iter().zip(&worths) {
                let step = share * worth.log_ratio(average);
                groups.iter().for_each(|&g| factors[g] -= step);
            }
            let next = steering.allotted(factors);
            let next = next.held(next.common());
            let model = tried(&next, true)?;
            // The divergence, corrected to the same number of non-zeros.
            let divergence = model.divergence() + average * (model.total() - now.total());
            if best.as_ref().is_none_or(|(so_far, _, _)| divergence < *so_far) {
                best = Some((divergence, next, model));
            }
        }
        let Some((divergence, next, model)) = best.filter(|(divergence, _, _)| *divergence < now.divergence()) else {
            break;
        };
        after -= now.divergence() - divergence;
        (at, now) = (next, model);
        steering = steering.allotted(at.factors().to_vec());
    }
    Ok(Exchanged { factors: at.factors().to_vec(), common: at.common(), counts: now.counts, before, after })
}

/// How much the non-zeros of a layer are worth.
struct Worth {
    /// Number of non-zeros that a higher price removes.
    gone: f64,
    /// How much that adds to the divergence, and the standard error of this number.
    lost: f64,
    error: f64,
}

impl Worth {
    fn of(dearer: &Tried, cheaper: &Tried) -> Self {
        let gone = (cheaper.total() - dearer.total()).max(0.0);
        let lost: Vec<f64> = dearer.divergences.iter().zip(&cheaper.divergences).map(|(d, c)| d - c).collect();
        let samples = lost.len().max(1) as f64;
        let mean = lost.iter().sum::<f64>() / samples;
        let variance = lost.iter().map(|l| (l - mean).powi(2)).sum::<f64>() / samples;
        Self { gone, lost: mean, error: (variance / samples).sqrt() }
    }

    /// Logarithm of a non-zero's worth over the average, drawn towards 0 by the noise of the measurement.
    fn log_ratio(&self, average: f64) -> f64 {
        let expected = average * self.gone;
        if expected <= 0.0 {
            return 0.0;
        }
        let ratio = (self.lost / expected).clamp((-LARGEST).exp(), LARGEST.exp());
        ratio.ln() / (1.0 + (self.error / expected / SPREAD).powi(2))
    }
}

/// Held-out samples of rough models, with the baseline's outputs.
pub(in crate::train) struct Judge<'a> {
    samples: StateSlice<'a>,
    /// The outputs, in blocks of samples.
    outputs: Vec<Matrix<f32>>,
    metric: Metric,
}

impl<'a> Judge<'a> {
    pub(in crate::train) fn new(input: &TrainInput<'a>, part: std::ops::Range<usize>, run: &Run) -> Result<Self> {
        let samples = StateSlice::new(input.source, part)?;
        let blocks = samples.samples().div_ceil(BLOCK);
        let outputs: Vec<Matrix<f32>> = parallel::map(run.threads, blocks, |block| {
            run.cancel.check()?;
            Ok(samples.ends(range(block, samples.samples()))?.1.cast())
        })?;
        let scale = input.baseline.and_then(|b| b.metadata().scaling.as_ref()).map_or(1.0, |s| s.outputs);
        let metric = match input.importance {
            Some(_) if input.source.shape().outputs > 1 => Metric::Softmax { scale },
            _ => {
                let squares = outputs.iter().flat_map(|y| y.as_slice()).map(|y| f64::from(*y).powi(2)).sum::<f64>();
                Metric::Squares { weight: samples.samples() as f64 / squares.max(f64::MIN_POSITIVE) }
            }
        };
        Ok(Self { samples, outputs, metric })
    }

    /// The divergence of every sample's outputs; infinite without an equilibrium.
    pub(in crate::train) fn divergences(&self, model: &ImplicitModel, run: &Run) -> Result<Vec<f64>> {
        let settings = EquilibriumSettings { threads: Threads::one(), certified: false, ..Default::default() };
        let equilibrium = Equilibrium::new(model, settings)?;
        let blocks = parallel::map(run.threads, self.outputs.len(), |block| {
            run.cancel.check()?;
            let u = self.samples.inputs(range(block, self.samples.samples()))?;
            let solution = equilibrium.outputs(&u)?;
            let divergence = |s: usize| match solution.diagnostics[s].converged {
                true => self.metric.value(solution.y.row(s), self.outputs[block].row(s)),
                false => f64::INFINITY,
            };
            Ok((0..u.rows()).map(divergence).collect::<Vec<f64>>())
        })?;
        Ok(blocks.concat())
    }
}

fn range(block: usize, samples: usize) -> std::ops::Range<usize> {
    block * BLOCK..((block + 1) * BLOCK).min(samples)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::train::search::survey::Survey;

    /// Layers whose error grows as the square of the removed non-zeros, each with a weight that the common price does
    /// not take into account, and whose errors amplify each other. The best allocation is known from the weights.
    #[test]
    fn non_zeros_go_where_they_are_worth_most() {
        let prices: Vec<f64> = (-4..=4).map(|k| 1e-6 * 3f64.powi(k)).collect();
        let tops = [1000.0, 300.0, 800.0, 500.0];
        let kept = |g: usize, price: f64| tops[g] * (0.5 - 0.1 * (price / 1e-6).ln()).clamp(0.0, 1.0);
        let mut survey = Survey::new(&prices);
        (0..4).for_each(|g| survey.push(prices.iter().map(|p| kept(g, *p)).collect()));
        let start = Steering::new(survey, vec![0.0; 4], 1200.0, 1.0);
        // The true worth of a non-zero, divided by the worth that the common price assumes.
        let weights = [3.0, 1.0, 0.4, 1.0];
        let error = |g: usize, n: f64| {
            // Worth e^(10·(0.5 − n/top)) at every n: the integral of the price over what is kept.
            weights[g] * 1e-6 * tops[g] / 10.0 * (10.0 * (0.5 - n / tops[g])).exp()
        };
        let names: Vec<(String, Vec<usize>)> =
            vec![("a".into(), vec![0]), ("b".into(), vec![1]), ("c".into(), vec![2]), ("d".into(), vec![3])];
        let models = std::cell::Cell::new(0);
        let tried = |steering: &Steering, _: bool| {
            models.set(models.get() + 1);
            let mut walk = steering.clone();
            let mut counts = Vec::new();
            for g in 0..4 {
                let price = walk.price();
                counts.push(kept(g, price).round() as usize);
                walk.passed(price, counts[g]);
            }
            let sum: f64 = (0..4).map(|g| error(g, counts[g] as f64)).sum();
            // Samples differ, and the errors of layers amplify each other.
            let divergences = (0..40).map(|s| (0.5 + f64::from(s) / 40.0) * sum * (1.0 + 1e3 * sum)).collect();
            Ok(Tried { counts, divergences })
        };
        let found = exchange(&start, &names, 2, tried).unwrap();
        assert_eq!(models.get(), 1 + 2 * models_of_a_round(4));
        assert!(found.after < 0.9 * found.before, "{} from {}", found.after, found.before);
        let total: usize = found.counts.iter().sum();
        assert!((total as f64 - 1200.0).abs() < 12.0, "{total}");
        // The prices end near the point where all worths are equal: in the inverse ratio of the weights.
        let log = |g: usize| found.factors[g] - found.factors[1];
        for g in [0, 2, 3] {
            assert!((log(g) + weights[g].ln()).abs() < 0.35, "{g}: {}", log(g));
        }
        // The numbers that a checkpoint keeps give the same result.
        let again = Exchanged::from_numbers(&found.to_numbers()).unwrap();
        assert_eq!(found.to_numbers().len(), Exchanged::length(4));
        let (steering, report) = again.applied(&start, names.clone());
        let (same, _) = found.applied(&start, names);
        assert_eq!((steering.price(), steering.factors()), (same.price(), same.factors()));
        assert!(report.factors[0].1 < 1.0 && report.factors[2].1 > 1.0, "{:?}", report.factors);
    }

    #[test]
    fn noise_and_layers_that_keep_everything_move_nothing() {
        let model = |counts: Vec<usize>, divergences: Vec<f64>| Tried { counts, divergences };
        let same = Worth::of(&model(vec![5], vec![0.2, 0.3]), &model(vec![5], vec![0.1, 0.1]));
        assert_eq!(same.log_ratio(1.0), 0.0);
        // The same mean twice, once with little noise and once with much.
        let sure = Worth::of(&model(vec![5], vec![0.3; 4]), &model(vec![6], vec![0.1; 4]));
        let noisy = Worth::of(&model(vec![5], vec![4.3, -3.7, 4.3, -3.7]), &model(vec![6], vec![0.1; 4]));
        assert!((sure.log_ratio(0.1) - 2f64.ln()).abs() < 1e-12);
        assert!(noisy.log_ratio(0.1) > 0.0 && noisy.log_ratio(0.1) < 0.01, "{}", noisy.log_ratio(0.1));
        assert_eq!(parts(300, 500), (200, 200..300));
        assert_eq!(parts(5000, 500), (500, 500..1000));
    }
}
