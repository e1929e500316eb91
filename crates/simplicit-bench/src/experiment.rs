//! The protocol: samples by seed, everything chosen on held-out training inputs, the test set read once per reported row.

use std::sync::Arc;
use std::time::Instant;

use anyhow::bail;
use serde::{Deserialize, Serialize};
use simplicit::arrays::{Array, Inputs, Labels, Preprocessing, Selection};
use simplicit::backend::Device;
use simplicit::equilibrium::{Equilibrium, EquilibriumSettings};
use simplicit::evaluate::{accuracy, agreement};
use simplicit::linalg::Matrix;
use simplicit::model::ImplicitModel;
use simplicit::network::Network;
use simplicit::parallel::{self, Cancel, Threads};
use simplicit::problem::Connectivity;
use simplicit::problem::penalty::L1;
use simplicit::states::{Collected, InputSource, StateSlice};
use simplicit::train::{
    AllowedWeights, Forget, Objective, Run, TrainInput, TrainSettings, Trained, WorkSettings, importance, path, train,
};

use crate::rivals::{self, Rival};
use crate::walk::{Allocation, Made, Shared, Walk};

/// Draws per sample of the output-aware weights; the command line uses the same number.
const DRAWS: usize = 4;
/// Samples for the output-aware weights of a network with feature maps; the command line uses the same number.
const WEIGHED: usize = 1000;
/// Samples a thread takes at a time.
const BLOCK: usize = 256;
/// κ of the coordinates that cyclic models are trained in: the baseline satisfies it, and a smaller κ forbids the
/// baseline itself, so that a model has to find another way.
const COORDINATES: f64 = 0.99;
/// Largest level that cyclic connectivities are trained to.
pub(crate) const CYCLIC_UP_TO: f64 = 0.5;
/// β where a search for the level begins; the command line uses the same value.
const BETA: f64 = 3e-4;
/// Our name in the table and on the command line.
pub const OURS: &str = "simplicit";

/// The settings of an experiment: which methods run, at which levels, on how many samples.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Plan {
    /// Training samples per seed.
    pub samples: usize,
    /// The methods to compare, by their names on the command line: our own and the rivals'.
    pub methods: Vec<String>,
    /// Held-out training samples per seed, disjoint from the `samples`.
    pub held_out: usize,
    /// The seeds; each makes one choice of samples.
    pub seeds: Vec<u64>,
    /// Sparsities of the main table.
    pub levels: Vec<f64>,
    /// Sparsities of the comparison of connectivities; an empty list leaves the comparison out.
    pub connectivity_levels: Vec<f64>,
    /// Seeds of that comparison.
    pub connectivity_seeds: usize,
    /// Training samples of that comparison up to the largest level of cyclic models, which cost more.
    pub connectivity_samples: usize,
    /// κ of the cyclic connectivities; each value has a row of its own.
    pub kappas: Vec<f64>,
}

/// One reported row: one model, one look at the test set.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Row {
    /// The method that made the model, by its name in the table.
    pub method: String,
    /// What was chosen on the held-out samples.
    pub choice: String,
    /// The seed that chose the samples.
    pub seed: u64,
    /// The sparsity asked for.
    pub level: f64,
    /// The sparsity of the stored model.
    pub sparsity: f64,
    /// Share of held-out samples for which the model predicts the same class as the baseline.
    pub agreement: f64,
    /// Accuracy on the test set, with labels.
    pub accuracy: f64,
    /// Certified upper bound on λ_pf(|A|).
    pub lambda_pf_upper: f64,
    /// Largest (value − bound)/value of a row, ours only.
    pub max_bound_distance: Option<f64>,
    /// Largest relative gap of a row's last convex solve, ours only.
    pub max_relative_gap: Option<f64>,
    /// Wall-clock time in seconds, with the time to choose included. Models from one path share its time equally.
    pub seconds: f64,
}

/// Everything the page needs.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Outcome {
    /// The settings of the experiment.
    pub plan: Plan,
    /// Accuracy of the baseline on the test set.
    pub baseline_accuracy: f64,
    /// Non-zero parameters of the baseline.
    pub baseline_nonzeros: u64,
    /// One row for each method, ours and the rivals', at every level and seed.
    pub rows: Vec<Row>,
    /// Rows of the comparison of connectivities, at equal numbers of non-zeros.
    pub connectivity: Vec<Row>,
}

impl Outcome {
    /// Joins two runs on the same samples of the same network: rows of this run replace the same rows of the earlier
    /// one.
    pub fn over(self, earlier: Self) -> anyhow::Result<Self> {
        let samples = |o: &Self| (o.plan.samples, o.plan.held_out, o.baseline_nonzeros);
        if samples(&self) != samples(&earlier) {
            bail!(
                "--merge: expected rows of {:?} samples, held-out samples and parameters, got {:?}",
                samples(&self),
                samples(&earlier)
            );
        }
        let mut plan = earlier.plan;
        plan.seeds.extend(&self.plan.seeds);
        plan.seeds.sort_unstable();
        plan.seeds.dedup();
        for (all, own) in
            [(&mut plan.levels, &self.plan.levels), (&mut plan.connectivity_levels, &self.plan.connectivity_levels)]
        {
            all.extend(own);
            all.sort_by(f64::total_cmp);
            all.dedup();
        }
        plan.connectivity_seeds = plan.connectivity_seeds.max(self.plan.connectivity_seeds);
        let of = rivals::all();
        let names: Vec<&str> = std::iter::once(OURS).chain(of.iter().map(|r| r.name())).collect();
        let order = |row: &Row| names.iter().position(|name| *name == row.method).unwrap_or(names.len());
        let same = |a: &Row, b: &Row| a.method == b.method && a.level == b.level && a.seed == b.seed;
        let merge = |old: Vec<Row>, new: Vec<Row>| {
            let mut rows: Vec<Row> = old.into_iter().filter(|a| !new.iter().any(|b| same(a, b))).collect();
            rows.extend(new);
            rows
        };
        let mut rows = merge(earlier.rows, self.rows);
        rows.sort_by(|a, b| order(a).cmp(&order(b)).then(a.seed.cmp(&b.seed)).then(a.level.total_cmp(&b.level)));
        let connectivity = merge(earlier.connectivity, self.connectivity);
        plan.methods.extend(self.plan.methods);
        plan.methods.sort();
        plan.methods.dedup();
        Ok(Self { plan, rows, connectivity, ..self })
    }
}

/// The network, inputs and labels of an experiment.
pub struct Data {
    /// The baseline.
    pub network: Network,
    /// How raw numbers become the network's inputs; by default as the format of the files has it.
    pub preprocessing: Option<Preprocessing>,
    /// Training inputs.
    pub train: Array,
    /// Test inputs.
    pub test: Array,
    /// Labels of the test inputs.
    pub labels: Labels,
}

/// The threads and the device that do the work.
#[derive(Debug, Clone, Copy)]
pub struct Workers {
    /// Threads of this machine.
    pub threads: Threads,
    /// The device that runs layers and gathers statistics, and that solves the rows of our method.
    pub device: Device,
}

/// The samples of one seed.
struct Seed {
    seed: u64,
    /// Training inputs, then held-out ones.
    all: Matrix<f32>,
    held_out: Matrix<f32>,
    held_out_baseline: Matrix<f32>,
}

/// A model that may become a row of the table.
struct Candidate {
    model: ImplicitModel,
    choice: String,
    agreement: f64,
    bound: Option<f64>,
    gap: Option<f64>,
    seconds: f64,
}

/// A rival's model and its rank among those at its level.
struct Tried {
    made: Made,
    allocation: Allocation,
    cascade: bool,
    agreement: f64,
}

struct Lab<'a> {
    data: &'a Data,
    baseline: ImplicitModel,
    preprocessing: Preprocessing,
    test: Matrix<f32>,
    threads: Threads,
    device: Device,
    cancel: &'a Cancel,
}

/// A callback that receives every row when it is done, together with all rows so far.
pub type Tell<'a> = dyn FnMut(&Outcome, &Row) -> anyhow::Result<()> + 'a;

/// Runs the whole experiment. Every row goes to `tell` when it is done, so a long experiment that is stopped loses no
/// finished row.
pub fn run(data: &Data, plan: &Plan, workers: Workers, cancel: &Cancel, tell: &mut Tell) -> anyhow::Result<Outcome> {
    let known: Vec<&str> = std::iter::once(OURS).chain(rivals::all().iter().map(|r| r.id())).collect();
    if let Some(unknown) = plan.methods.iter().find(|m| !known.contains(&m.as_str())) {
        bail!("--methods: expected some of {}, got {unknown}", known.join(", "));
    }
    let test = Inputs::new(data.test.clone(), data.preprocessing.clone(), &Selection::all())?;
    let lab = Lab {
        data,
        baseline: ImplicitModel::from_network(&data.network)?,
        preprocessing: test.preprocessing().clone(),
        test: test.rows(0..test.samples())?,
        threads: workers.threads,
        device: workers.device,
        cancel,
    };
    let mut out = Outcome {
        plan: plan.clone(),
        baseline_accuracy: accuracy(&lab.of_network(&lab.test)?, data.labels.as_slice())?,
        baseline_nonzeros: lab.baseline.sparsity().baseline_nonzeros,
        rows: Vec::new(),
        connectivity: Vec::new(),
    };
    for (k, &number) in plan.seeds.iter().enumerate() {
        let seed = lab.seed(number, plan)?;
        if plan.methods.iter().any(|m| m == OURS) {
            let work = WorkSettings { device: workers.device, ..Default::default() };
            let settings = TrainSettings { work, ..TrainSettings::default() };
            let ours = lab.ours(&seed, plan.samples, &plan.levels, &settings)?;
            for (level, candidate) in plan.levels.iter().zip(ours) {
                let row = lab.report(OURS, number, *level, candidate)?;
                out.rows.push(row.clone());
                tell(&out, &row)?;
            }
        }
        lab.rivals(&seed, plan, &mut out, tell)?;
        if k < plan.connectivity_seeds {
            lab.connectivities(&seed, plan, &mut out, tell)?;
        }
    }
    Ok(out)
}

impl Lab<'_> {
    fn seed(&self, seed: u64, plan: &Plan) -> anyhow::Result<Seed> {
        let total = plan.samples + plan.held_out;
        if total > self.data.train.samples() {
            bail!("samples: expected at most {} with {} held out", self.data.train.samples(), plan.held_out);
        }
        let selection = Selection::random(total, seed);
        let inputs = Inputs::new(self.data.train.clone(), self.data.preprocessing.clone(), &selection)?;
        let all = inputs.rows(0..total)?;
        let held_out = InputSource::rows(&all, plan.samples..total)?;
        let held_out_baseline = self.of_network(&held_out)?;
        Ok(Seed { seed, all, held_out, held_out_baseline })
    }

    /// The baseline's outputs, a block of samples at a time.
    fn of_network(&self, u: &Matrix<f32>) -> anyhow::Result<Matrix<f32>> {
        let blocks = parallel::map(self.threads, u.rows().div_ceil(BLOCK), |block| {
            let rows = block * BLOCK..((block + 1) * BLOCK).min(u.rows());
            self.data.network.forward(&InputSource::rows(u, rows)?)
        })?;
        let values = blocks.into_iter().flat_map(Matrix::into_vec).collect();
        Ok(Matrix::from_vec(u.rows(), self.baseline.shape().outputs, values)?)
    }

    /// A model's outputs; samples without equilibrium count with the outputs that their last step gave.
    fn of_model(&self, model: &ImplicitModel, u: &Matrix<f32>) -> anyhow::Result<Matrix<f32>> {
        let settings = EquilibriumSettings { threads: self.threads, ..Default::default() };
        Ok(Equilibrium::new(model, settings)?.outputs(u)?.y)
    }

    fn agreement(&self, seed: &Seed, model: &ImplicitModel) -> anyhow::Result<f64> {
        Ok(agreement(&self.of_model(model, &seed.held_out)?, &seed.held_out_baseline)?)
    }

    /// Measures a candidate on the test set, which is read only here.
    fn report(&self, method: &str, seed: u64, level: f64, candidate: Candidate) -> anyhow::Result<Row> {
        let Candidate { model, choice, agreement, bound, gap, seconds } = candidate;
        Ok(Row {
            method: method.into(),
            choice,
            seed,
            level,
            sparsity: model.sparsity().sparsity,
            agreement,
            accuracy: accuracy(&self.of_model(&model, &self.test)?, self.data.labels.as_slice())?,
            lambda_pf_upper: model.well_posedness().lambda_pf_upper,
            max_bound_distance: bound,
            max_relative_gap: gap,
            seconds,
        })
    }

    /// Our models: one per level, ascending.
    fn ours(
        &self,
        seed: &Seed,
        samples: usize,
        levels: &[f64],
        settings: &TrainSettings,
    ) -> anyhow::Result<Vec<Candidate>> {
        let network = &self.data.network;
        let training = InputSource::rows(&seed.all, 0..samples)?;
        let begin = Instant::now();
        let weighed = InputSource::rows(&training, 0..if self.has_maps() { samples.min(WEIGHED) } else { samples })?;
        let mut weights = importance(network, &weighed, DRAWS, seed.seed, self.threads, self.cancel)?;
        let moved = settings.allowed.kappa.map(|_| self.baseline.rescale(COORDINATES)).transpose()?.map(|r| r.model);
        let baseline = moved.as_ref().unwrap_or(&self.baseline);
        if let Some(scaling) = &baseline.metadata().scaling {
            let factors = scaling.states.iter().copied().chain(std::iter::repeat(scaling.outputs));
            weights.iter_mut().zip(factors).for_each(|(w, f)| *w *= f * f);
        }
        let equilibrium =
            Equilibrium::new(baseline, EquilibriumSettings { threads: Threads::one(), ..Default::default() })?;
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
        // Over feature maps every fit of a path is a walk over all positions; a search for one target reaches it in
        // about two fits.
        let trained = if self.has_maps() {
            let to = |level: &f64| TrainSettings { target_sparsity: Some(*level), ..settings.clone() };
            levels
                .iter()
                .map(|level| train(&input, &to(level), &mut run))
                .collect::<simplicit::Result<Vec<Trained>>>()?
        } else {
            path(&input, Some(&judge), levels, settings, &mut run)?
        };
        let seconds = begin.elapsed().as_secs_f64() / levels.len().max(1) as f64;
        trained
            .into_iter()
            .map(|t| {
                Ok(Candidate {
                    choice: String::new(),
                    agreement: t.report.agreement.map_or_else(|| self.agreement(seed, &t.model), Ok)?,
                    bound: t.report.rows.iter().filter_map(|r| r.bound_distance).reduce(f64::max),
                    gap: t.report.max_relative_gap(),
                    model: t.model,
                    seconds,
                })
            })
            .collect()
    }

    fn rivals(&self, seed: &Seed, plan: &Plan, out: &mut Outcome, tell: &mut Tell) -> anyhow::Result<()> {
        let training = InputSource::rows(&seed.all, 0..plan.samples)?;
        let source = Collected::new(&self.data.network, &training)?;
        let input = TrainInput {
            source: &source,
            baseline: Some(&self.baseline),
            importance: None,
            preprocessing: self.preprocessing.clone(),
        };
        let shared = Shared::default();
        for rival in rivals::all().into_iter().filter(|r| plan.methods.iter().any(|m| m == r.id())) {
            let walk = Walk::new(&input, &self.baseline, rival.clone(), &shared, self.threads, self.cancel);
            let mut walk = walk.on(self.device);
            for &level in &plan.levels {
                let best = self.best(seed, rival.as_ref(), &mut walk, level)?;
                let row = self.report(rival.name(), seed.seed, level, best)?;
                out.rows.push(row.clone());
                tell(out, &row)?;
            }
        }
        Ok(())
    }

    /// Tries a rival's allocations, with and without a cascade, and returns the model that is best on the held-out
    /// samples; reconstructed where reconstruction is part of the rival's method.
    fn best(&self, seed: &Seed, rival: &dyn Rival, walk: &mut Walk, level: f64) -> anyhow::Result<Candidate> {
        let begin = Instant::now();
        let mut tried = |allocation: Allocation, cascade: bool| -> anyhow::Result<Tried> {
            let made = walk.model(level, allocation, cascade)?;
            let agreement = self.agreement(seed, &made.model)?;
            Ok(Tried { made, allocation, cascade, agreement })
        };
        let better = |a: Tried, b: Tried| if b.agreement > a.agreement { b } else { a };
        let flat: Vec<Tried> =
            rival.allocations().iter().map(|&a| tried(a, false)).collect::<anyhow::Result<Vec<_>>>()?;
        let all: Vec<Allocation> = flat.iter().map(|t| t.allocation).collect();
        let Some(mut best) = flat.into_iter().reduce(better) else { bail!("a rival without an allocation") };
        if rival.fits() {
            // A cascade over feature maps costs a walk over all positions, so it is run for the better allocation
            // alone.
            let again = if self.has_maps() { vec![best.allocation] } else { all };
            for allocation in again {
                best = better(best, tried(allocation, true)?);
            }
        }
        let Tried { made, allocation, cascade, agreement } = best;
        let name = match allocation {
            Allocation::Uniform => "uniform",
            Allocation::Global => "global",
            Allocation::Evolved => "evolved",
        };
        let choice = format!("{name}{}", if cascade { ", cascade" } else { "" });
        let (model, agreement) = match walk.reconstructed(&made)? {
            Some((model, _)) => {
                let agreement = self.agreement(seed, &model)?;
                (model, agreement)
            }
            None => (made.model, agreement),
        };
        let seconds = begin.elapsed().as_secs_f64();
        Ok(Candidate { model, choice, agreement, bound: None, gap: None, seconds })
    }

    fn has_maps(&self) -> bool {
        !self.baseline.taps().is_empty()
    }

    /// The four connectivities at equal count, the cyclic ones with every κ. Up to the largest level of the cyclic
    /// ones they are trained with ℓ1 as well, which does not begin at the baseline's weights.
    fn connectivities(&self, seed: &Seed, plan: &Plan, out: &mut Outcome, tell: &mut Tell) -> anyhow::Result<()> {
        let (low, high): (Vec<f64>, Vec<f64>) =
            plan.connectivity_levels.iter().partition(|level| **level <= CYCLIC_UP_TO);
        let l1 = TrainSettings {
            objective: Objective::Convex(Arc::new(L1::new(BETA)?)),
            strength: 1.0,
            ..TrainSettings::default()
        };
        for (name, connectivity, cyclic) in [
            ("baseline", Connectivity::Baseline, false),
            ("feedforward", Connectivity::Feedforward, false),
            ("no-self-loop", Connectivity::NoSelfLoop, true),
            ("full", Connectivity::Full, true),
        ] {
            let kappas: Vec<Option<f64>> =
                if cyclic { plan.kappas.iter().map(|k| Some(*k)).collect() } else { vec![None] };
            // All states of a cyclic model are one group, which is fitted several times: these are by far the most
            // expensive models.
            let high = if cyclic { &[][..] } else { &high };
            for (penalty, settings, levels, samples) in [
                ("", TrainSettings::default(), &low[..], plan.connectivity_samples),
                ("", TrainSettings::default(), high, plan.samples),
                (", ℓ1", l1.clone(), &low, plan.connectivity_samples),
            ] {
                for &kappa in kappas.iter().filter(|_| !levels.is_empty()) {
                    let settings = TrainSettings {
                        allowed: AllowedWeights {
                            connectivity: connectivity.clone(),
                            kappa,
                            ..settings.allowed.clone()
                        },
                        ..settings.clone()
                    };
                    let bound = kappa.map_or_else(String::new, |k| format!(", κ = {k}"));
                    let name = format!("{name}{bound}{penalty}");
                    for (level, candidate) in levels.iter().zip(self.ours(seed, samples, levels, &settings)?) {
                        let row = self.report(&name, seed.seed, *level, candidate)?;
                        out.connectivity.push(row.clone());
                        tell(out, &row)?;
                    }
                }
            }
        }
        Ok(())
    }
}
