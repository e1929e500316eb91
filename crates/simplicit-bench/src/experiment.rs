//! The protocol: samples by seed, everything chosen on held-out training inputs, the test set read once per reported row.

use anyhow::bail;
use serde::{Deserialize, Serialize};
use simplicit::arrays::{Array, Inputs, Labels, Preprocessing, Selection};
use simplicit::evaluate::{accuracy, agreement};
use simplicit::linalg::Matrix;
use simplicit::model::ImplicitModel;
use simplicit::network::Network;
use simplicit::parallel::{Cancel, Threads};
use simplicit::problem::Connectivity;
use simplicit::states::{Collected, InputSource, StateSlice};
use simplicit::statistics::Statistics;
use simplicit::train::{Forget, Found, Run, TrainInput, TrainSettings, importance, path};

use crate::groups::{Group, Samples, assemble, groups, outputs};
use crate::rivals::{self, Budget, Layer, Prepared, Rival};

/// Draws per sample of the output-aware weights, as the command line's.
const DRAWS: usize = 4;
/// Accepted distance from a level.
const CLOSE: f64 = 0.001;
/// Models of a search for one level.
const TRIES: usize = 16;
/// κ of the coordinates that cyclic models are trained in: the baseline satisfies it, and a smaller κ forbids the
/// baseline itself, so that a model has to find another way.
const COORDINATES: f64 = 0.99;
/// Largest level that cyclic connectivities are trained to.
pub(crate) const CYCLIC_UP_TO: f64 = 0.5;
const NAME_OF_OURS: &str = "simplicit";

/// What is run.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Plan {
    /// Training samples per seed.
    pub samples: usize,
    /// Held-out training samples per seed, disjoint from those.
    pub held_out: usize,
    /// One choice of samples each.
    pub seeds: Vec<u64>,
    /// Sparsities of the main table.
    pub levels: Vec<f64>,
    /// Sparsities of the comparison of connectivities; empty leaves it out.
    pub connectivity_levels: Vec<f64>,
    /// Seeds of that comparison.
    pub connectivity_seeds: usize,
    /// Training samples of that comparison up to the largest level of cyclic models, which cost more.
    pub connectivity_samples: usize,
    /// κ of the cyclic ones, a row each.
    pub kappas: Vec<f64>,
}

/// One reported row: one model, one look at the test set.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Row {
    /// Who made it.
    pub method: String,
    /// What was chosen on the held-out samples.
    pub choice: String,
    /// Choice of samples.
    pub seed: u64,
    /// The sparsity asked for.
    pub level: f64,
    /// The sparsity of the stored model.
    pub sparsity: f64,
    /// Share of held-out samples predicted as by the baseline.
    pub agreement: f64,
    /// On the test set, with labels.
    pub accuracy: f64,
    /// Certified upper bound on λ_pf(|A|).
    pub lambda_pf_upper: f64,
    /// Largest (value − bound)/value of a row, ours only.
    pub max_bound_distance: Option<f64>,
    /// Largest relative gap of a row's last convex solve, ours only.
    pub max_relative_gap: Option<f64>,
}

/// Everything the page needs.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Outcome {
    /// What was asked.
    pub plan: Plan,
    /// The baseline on the test set.
    pub baseline_accuracy: f64,
    /// The baseline's count.
    pub baseline_nonzeros: u64,
    /// Ours and the rivals, at every level and seed.
    pub rows: Vec<Row>,
    /// The connectivities at equal count.
    pub connectivity: Vec<Row>,
    /// Wall-clock time of every method, all seeds and levels, choosing included.
    pub seconds: Vec<(String, f64)>,
}

/// Data of an experiment.
pub struct Data {
    /// The baseline.
    pub network: Network,
    /// Training inputs.
    pub train: Array,
    /// Test inputs.
    pub test: Array,
    /// Their labels.
    pub labels: Labels,
}

/// One seed's samples.
struct Seed {
    seed: u64,
    /// Training inputs, then held-out ones.
    all: Matrix<f32>,
    held_out: Matrix<f32>,
    held_out_baseline: Matrix<f32>,
}

/// A candidate for a row.
struct Candidate {
    model: ImplicitModel,
    choice: String,
    agreement: f64,
    bound: Option<f64>,
    gap: Option<f64>,
}

struct Lab<'a> {
    data: &'a Data,
    baseline: ImplicitModel,
    preprocessing: Preprocessing,
    test: Matrix<f32>,
    threads: Threads,
    cancel: &'a Cancel,
}

/// Runs everything; `tell` hears of every finished piece.
pub fn run(
    data: &Data,
    plan: &Plan,
    threads: Threads,
    cancel: &Cancel,
    mut tell: impl FnMut(&str),
) -> anyhow::Result<Outcome> {
    let test = Inputs::new(data.test.clone(), None, &Selection::all())?;
    let lab = Lab {
        data,
        baseline: ImplicitModel::from_network(&data.network)?,
        preprocessing: test.preprocessing().clone(),
        test: test.rows(0..test.samples())?,
        threads,
        cancel,
    };
    let mut out = Outcome {
        plan: plan.clone(),
        baseline_accuracy: accuracy(&data.network.forward(&lab.test)?, data.labels.as_slice())?,
        baseline_nonzeros: lab.baseline.sparsity().baseline_nonzeros,
        rows: Vec::new(),
        connectivity: Vec::new(),
        seconds: Vec::new(),
    };
    for (k, &number) in plan.seeds.iter().enumerate() {
        let seed = lab.seed(number, plan)?;
        let begin = std::time::Instant::now();
        let ours = lab.ours(&seed, plan.samples, &plan.levels, &TrainSettings::default())?;
        for (level, candidate) in plan.levels.iter().zip(ours) {
            out.rows.push(lab.report(NAME_OF_OURS, number, *level, candidate)?);
        }
        spend(&mut out.seconds, NAME_OF_OURS, begin, number, &mut tell);
        lab.rivals(&seed, plan, &mut out, &mut tell)?;
        if k < plan.connectivity_seeds {
            lab.connectivities(&seed, plan, &mut out, &mut tell)?;
        }
    }
    Ok(out)
}

/// Adds the time since `begin` to a method's.
fn spend(
    seconds: &mut Vec<(String, f64)>,
    name: &str,
    begin: std::time::Instant,
    seed: u64,
    tell: &mut impl FnMut(&str),
) {
    let spent = begin.elapsed().as_secs_f64();
    tell(&format!("seed {seed}: {name}, {spent:.0} s"));
    match seconds.iter_mut().find(|(n, _)| n == name) {
        Some((_, total)) => *total += spent,
        None => seconds.push((name.into(), spent)),
    }
}

impl Lab<'_> {
    fn seed(&self, seed: u64, plan: &Plan) -> anyhow::Result<Seed> {
        let total = plan.samples + plan.held_out;
        if total > self.data.train.samples() {
            bail!("samples: expected at most {} with {} held out", self.data.train.samples(), plan.held_out);
        }
        let inputs = Inputs::new(self.data.train.clone(), None, &Selection::random(total, seed))?;
        let all = inputs.rows(0..total)?;
        let held_out = InputSource::rows(&all, plan.samples..total)?;
        let held_out_baseline = self.data.network.forward(&held_out)?;
        Ok(Seed { seed, all, held_out, held_out_baseline })
    }

    fn agreement(&self, seed: &Seed, model: &ImplicitModel) -> anyhow::Result<f64> {
        Ok(agreement(&outputs(model, &seed.held_out, self.threads)?, &seed.held_out_baseline)?)
    }

    /// The one look at the test set.
    fn report(&self, method: &str, seed: u64, level: f64, candidate: Candidate) -> anyhow::Result<Row> {
        let Candidate { model, choice, agreement, bound, gap } = candidate;
        Ok(Row {
            method: method.into(),
            choice,
            seed,
            level,
            sparsity: model.sparsity().sparsity,
            agreement,
            accuracy: accuracy(&outputs(&model, &self.test, self.threads)?, self.data.labels.as_slice())?,
            lambda_pf_upper: model.well_posedness().lambda_pf_upper,
            max_bound_distance: bound,
            max_relative_gap: gap,
        })
    }

    /// Our path: one model per level, ascending.
    fn ours(
        &self,
        seed: &Seed,
        samples: usize,
        levels: &[f64],
        settings: &TrainSettings,
    ) -> anyhow::Result<Vec<Candidate>> {
        let network = &self.data.network;
        let training = InputSource::rows(&seed.all, 0..samples)?;
        let mut weights = importance(network, &training, DRAWS, seed.seed, self.threads, self.cancel)?;
        let moved = settings.kappa.map(|_| self.baseline.rescale(COORDINATES)).transpose()?.map(|r| r.model);
        let baseline = moved.as_ref().unwrap_or(&self.baseline);
        if let Some(scaling) = &baseline.metadata().scaling {
            let factors = scaling.states.iter().copied().chain(std::iter::repeat(scaling.outputs));
            weights.iter_mut().zip(factors).for_each(|(w, f)| *w *= f * f);
        }
        let equilibrium = simplicit::equilibrium::Equilibrium::new(
            baseline,
            simplicit::equilibrium::EquilibriumSettings { threads: Threads::one(), ..Default::default() },
        )?;
        let all = match &moved {
            Some(_) => Collected::new(&equilibrium, &seed.all)?,
            None => Collected::new(network, &seed.all)?,
        };
        let source = StateSlice::new(&all, 0..samples)?;
        let judge = StateSlice::new(&all, seed.all.rows() - seed.held_out.rows()..seed.all.rows())?;
        let input = TrainInput {
            source: &source,
            baseline: Some(baseline),
            importance: Some(&weights),
            preprocessing: self.preprocessing.clone(),
        };
        let mut run = Run { threads: self.threads, cancel: self.cancel, keep: &Forget, progress: &mut |_| {} };
        let trained = path(&input, Some(&judge), levels, settings, &mut run)?;
        Ok(trained
            .into_iter()
            .map(|t| Candidate {
                choice: String::new(),
                agreement: t.report.agreement.unwrap_or(0.0),
                bound: t.report.rows.iter().filter_map(|r| r.bound_distance).reduce(f64::max),
                gap: t.report.max_relative_gap(),
                model: t.model,
            })
            .collect())
    }

    fn rivals(&self, seed: &Seed, plan: &Plan, out: &mut Outcome, tell: &mut impl FnMut(&str)) -> anyhow::Result<()> {
        let groups = groups(&self.baseline)?;
        let u = InputSource::rows(&seed.all, 0..plan.samples)?;
        let samples = Samples::new(&self.data.network, u, self.threads)?;
        let of_baseline = groups
            .iter()
            .map(|g| samples.statistics(g, samples.states(), self.threads, self.cancel))
            .collect::<simplicit::Result<Vec<Statistics>>>()?;
        for rival in rivals::all() {
            let begin = std::time::Instant::now();
            let prepared = groups
                .iter()
                .zip(&of_baseline)
                .map(|(g, s)| rival.prepare(self.layer(g, s)))
                .collect::<simplicit::Result<Vec<_>>>()?;
            let bench =
                Bench { lab: self, rival: rival.as_ref(), groups: &groups, samples: &samples, prepared: &prepared };
            let cascades: &[bool] = if rival.fits() { &[false, true] } else { &[false] };
            let mut found = vec![Found::default(); cascades.len()];
            for &level in &plan.levels {
                let mut best: Option<Candidate> = None;
                for (&cascade, found) in cascades.iter().zip(&mut found) {
                    for global in [false, true] {
                        let model = if global {
                            bench.global(level, cascade, found)?
                        } else {
                            bench.uniform(level, cascade)?
                        };
                        let agreement = self.agreement(seed, &model)?;
                        if best.as_ref().is_none_or(|b| agreement > b.agreement) {
                            let choice = format!(
                                "{}{}",
                                if global { "global" } else { "uniform" },
                                if cascade { ", cascade" } else { "" }
                            );
                            best = Some(Candidate { model, choice, agreement, bound: None, gap: None });
                        }
                    }
                }
                if let Some(best) = best {
                    out.rows.push(self.report(rival.name(), seed.seed, level, best)?);
                }
            }
            spend(&mut out.seconds, rival.name(), begin, seed.seed, tell);
        }
        Ok(())
    }

    fn layer<'b>(&'b self, group: &'b Group, statistics: &'b Statistics) -> Layer<'b> {
        let (threads, cancel) = (self.threads, self.cancel);
        Layer { statistics, weights: &group.weights, constant: group.constant, threads, cancel }
    }

    /// The four connectivities at equal count, the cyclic ones with every κ.
    fn connectivities(
        &self,
        seed: &Seed,
        plan: &Plan,
        out: &mut Outcome,
        tell: &mut impl FnMut(&str),
    ) -> anyhow::Result<()> {
        for (name, connectivity, cyclic) in [
            ("baseline", Connectivity::Baseline, false),
            ("feedforward", Connectivity::Feedforward, false),
            ("no-self-loop", Connectivity::NoSelfLoop, true),
            ("full", Connectivity::Full, true),
        ] {
            let begin = std::time::Instant::now();
            let kappas: Vec<Option<f64>> =
                if cyclic { plan.kappas.iter().map(|k| Some(*k)).collect() } else { vec![None] };
            // All states of a cyclic model are one group, fitted several times over: by far the dearest models.
            let (low, high): (Vec<f64>, Vec<f64>) =
                plan.connectivity_levels.iter().partition(|level| **level <= CYCLIC_UP_TO);
            let high = if cyclic { Vec::new() } else { high };
            let parts = [(low, plan.connectivity_samples), (high, plan.samples)];
            for (levels, samples) in parts.iter().filter(|(levels, _)| !levels.is_empty()) {
                for &kappa in &kappas {
                    let settings =
                        TrainSettings { connectivity: connectivity.clone(), kappa, ..TrainSettings::default() };
                    let name = kappa.map_or_else(|| name.to_string(), |k| format!("{name}, κ = {k}"));
                    let candidates = self.ours(seed, *samples, levels, &settings)?;
                    for (level, candidate) in levels.iter().zip(candidates) {
                        out.connectivity.push(self.report(&name, seed.seed, *level, candidate)?);
                    }
                }
            }
            spend(&mut out.seconds, &format!("connectivity {name}"), begin, seed.seed, tell);
        }
        Ok(())
    }
}

/// A rival on one seed's samples.
struct Bench<'a> {
    lab: &'a Lab<'a>,
    rival: &'a dyn Rival,
    groups: &'a [Group],
    samples: &'a Samples,
    prepared: &'a [Box<dyn Prepared + 'a>],
}

impl Bench<'_> {
    /// Every group loses the same share.
    fn uniform(&self, level: f64, cascade: bool) -> anyhow::Result<ImplicitModel> {
        let budgets: Vec<Budget> = self
            .groups
            .iter()
            .map(|g| Budget::Count(((1.0 - level) * g.removable() as f64).round() as usize))
            .collect();
        self.model(&budgets, cascade)
    }

    /// One price for all groups, found so that the model has the level.
    fn global(&self, level: f64, cascade: bool, found: &mut Found) -> anyhow::Result<ImplicitModel> {
        let mut best: Option<(f64, ImplicitModel)> = None;
        for k in 0..TRIES {
            let known = found.nearest(level).filter(|(_, s)| k == 0 && (s - level).abs() <= CLOSE);
            let price = known.map(|(p, _)| p).or(found.next(level)).unwrap_or(self.rival.first_price());
            let model = self.model(&vec![Budget::Price(price); self.groups.len()], cascade)?;
            let sparsity = model.sparsity().sparsity;
            let distance = (sparsity - level).abs();
            if best.as_ref().is_none_or(|(d, _)| distance < *d) {
                best = Some((distance, model));
            }
            if !found.add(price, sparsity) || distance <= CLOSE {
                break;
            }
        }
        match best {
            Some((_, model)) => Ok(model),
            None => bail!("a search without a model"),
        }
    }

    fn model(&self, budgets: &[Budget], cascade: bool) -> anyhow::Result<ImplicitModel> {
        let mut weights = Vec::with_capacity(self.groups.len());
        let mut x = if cascade { self.samples.states().clone() } else { Matrix::zeros(0, 0) };
        for (k, (group, budget)) in self.groups.iter().zip(budgets).enumerate() {
            // The first group reads inputs alone: on its own states or the baseline's, it sees the same.
            let rows = if cascade && k > 0 {
                let statistics = self.samples.statistics(group, &x, self.lab.threads, self.lab.cancel)?;
                self.rival.prepare(self.lab.layer(group, &statistics))?.rows(*budget)?
            } else {
                self.prepared[k].rows(*budget)?
            };
            if cascade {
                self.samples.advance(group, &rows, &self.lab.baseline, &mut x, self.lab.threads)?;
            }
            weights.push(rows);
        }
        Ok(assemble(&self.lab.baseline, self.groups, &weights)?)
    }
}
