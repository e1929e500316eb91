//! A rival in the place of the library's row solver, and the search for the price at which its models reach a level.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::bail;
use simplicit::backend::Device;
use simplicit::model::ImplicitModel;
use simplicit::parallel::{Cancel, Threads};
use simplicit::statistics::Statistics;
use simplicit::train::{
    Found, Keep, Key, ModelSettings, Objective, Reconstruction, RowGroup, RowMethod, Run, TrainInput, TrainSettings,
    Trained, WorkSettings, train,
};

use crate::rivals::{Budget, Layer, Prepared, Rival};

/// Accepted distance from a level.
const CLOSE: f64 = 0.001;
/// Most models in a search for one level.
const TRIES: usize = 16;
/// In a cascade, this many of the models are placed by the curve of the models on the baseline's states, which runs
/// nearly parallel to that of the cascade.
const PARALLEL: usize = 4;

/// How the weights that stay are shared among the groups.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Allocation {
    /// Every group loses the same share of its weights.
    Uniform,
    /// One price for all groups.
    Global,
    /// The counts whose model diverges least from the network, by an evolutionary search.
    Evolved,
}

/// What one model of a rival is to satisfy.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Ask {
    /// This share of the weights of every group is removed.
    Share(f64),
    /// All groups have this price.
    Price(f64),
    /// These groups keep the given numbers of weights, and the others stay as they are.
    Counts(Arc<BTreeMap<String, usize>>),
}

/// A group's statistics, and what a rival made of them.
type Seen = (Statistics, Arc<dyn Prepared>);

/// Groups that a rival has seen, by name: on the baseline's states they are the same for every budget.
#[derive(Default)]
struct Memory(Mutex<BTreeMap<String, Seen>>);

/// A rival as the library's walk sees it.
struct Method {
    rival: Arc<dyn Rival>,
    ask: Ask,
    memory: Option<Arc<Memory>>,
}

impl fmt::Debug for Method {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.debug_struct("Method").field("rival", &self.rival).field("ask", &self.ask).finish_non_exhaustive()
    }
}

impl Method {
    fn prepared(&self, name: &str, layer: &Layer) -> simplicit::Result<Arc<dyn Prepared>> {
        let Some(memory) = &self.memory else { return Ok(self.rival.prepare(layer)?.into()) };
        let mut seen = memory.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, prepared)) = seen.get(name).filter(|(statistics, _)| statistics == layer.statistics) {
            return Ok(prepared.clone());
        }
        let prepared: Arc<dyn Prepared> = self.rival.prepare(layer)?.into();
        seen.insert(name.into(), (layer.statistics.clone(), prepared.clone()));
        Ok(prepared)
    }
}

impl RowMethod for Method {
    fn rows(&self, group: &RowGroup) -> simplicit::Result<Vec<Vec<f64>>> {
        let layer = Layer::new(group)?;
        let budget = match &self.ask {
            Ask::Share(share) => Budget::Count(((1.0 - share) * layer.removable() as f64).round() as usize),
            Ask::Price(price) => Budget::Price(*price),
            Ask::Counts(counts) => match counts.get(group.name) {
                Some(count) => Budget::Count(*count),
                None => return Ok((0..layer.weights.rows()).map(|k| layer.weights.row(k).to_vec()).collect()),
            },
        };
        self.prepared(group.name, &layer)?.rows(&layer, budget)
    }
}

/// The statistics on the baseline's states, which all rivals and levels share.
#[derive(Default)]
pub struct Shared(Mutex<BTreeMap<String, Vec<u8>>>);

impl Keep for Shared {
    fn get(&self, key: &Key) -> simplicit::Result<Option<Vec<u8>>> {
        Ok(self.0.lock().unwrap_or_else(PoisonError::into_inner).get(&key.to_string()).cloned())
    }

    fn put(&self, key: &Key, value: &[u8]) -> simplicit::Result<()> {
        // Statistics on a model's own states differ from rival to rival.
        if !key.depends_on_a_model() {
            self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(key.to_string(), value.to_vec());
        }
        Ok(())
    }
}

/// A rival's model, and the request that it answers.
pub struct Made {
    /// The model.
    pub model: ImplicitModel,
    ask: Ask,
    cascade: bool,
}

/// One rival's models on one choice of samples.
pub struct Walk<'a> {
    pub(crate) input: &'a TrainInput<'a>,
    pub(crate) baseline: &'a ImplicitModel,
    rival: Arc<dyn Rival>,
    shared: &'a Shared,
    memory: Arc<Memory>,
    device: Device,
    pub(crate) threads: Threads,
    pub(crate) cancel: &'a Cancel,
    /// Price and sparsity of the models found so far, on the baseline's states and in the cascade.
    flat: Found,
    cascaded: Found,
    /// Levels with the counts that a search found for them.
    evolved: Vec<(f64, Arc<BTreeMap<String, usize>>)>,
}

impl<'a> Walk<'a> {
    /// A walk in which nothing is computed yet. The input must have its baseline.
    pub fn new(
        input: &'a TrainInput<'a>,
        baseline: &'a ImplicitModel,
        rival: Arc<dyn Rival>,
        shared: &'a Shared,
        threads: Threads,
        cancel: &'a Cancel,
    ) -> Self {
        Self {
            input,
            baseline,
            rival,
            shared,
            memory: Arc::default(),
            device: Device::Cpu,
            threads,
            cancel,
            flat: Found::default(),
            cascaded: Found::default(),
            evolved: Vec::new(),
        }
    }

    /// The same walk, with layers run and statistics gathered on a device; the processor solves the rows.
    pub fn on(self, device: Device) -> Self {
        // `cuda:N` would demand that the GPU solves cardinality rows, but a rival's rows are solved on the processor.
        let device = if let Device::Cuda(_) = device { Device::Auto } else { device };
        Self { device, ..self }
    }

    /// The model at a level. In a cascade the search for the global price begins at the one found on the baseline's
    /// states.
    pub fn model(&mut self, level: f64, allocation: Allocation, cascade: bool) -> anyhow::Result<Made> {
        match (allocation, cascade) {
            (Allocation::Uniform, _) => self.fit(Ask::Share(self.share(level)), cascade),
            (Allocation::Global, false) => self.on_the_baselines_states(level),
            (Allocation::Global, true) => self.in_the_cascade(level),
            (Allocation::Evolved, _) => {
                let known = self.evolved.iter().find(|(l, _)| *l == level).map(|(_, counts)| counts.clone());
                let counts = match known {
                    Some(counts) => counts,
                    None => Arc::new(self.evolve(level)?),
                };
                self.evolved.push((level, counts.clone()));
                self.fit(Ask::Counts(counts), cascade)
            }
        }
    }

    /// The same model with its kept weights reconstructed as many joints ahead as the rival looks; `None` for rivals
    /// that do not reconstruct.
    pub fn reconstructed(&self, made: &Made) -> anyhow::Result<Option<(ImplicitModel, Reconstruction)>> {
        if self.rival.ahead() == 0 {
            return Ok(None);
        }
        let trained = self.train(&made.ask, made.cascade, self.rival.ahead())?;
        Ok(trained.report.reconstruction.map(|done| (trained.model, done)))
    }

    /// Parameters that no rival removes.
    pub(crate) fn constants(&self) -> usize {
        let bias = self.baseline.state_bias().iter().chain(self.baseline.output_bias());
        bias.filter(|b| **b != 0.0).count() + self.baseline.sparsity().fixed as usize
    }

    /// The share of all weights that has to be removed. The constants stay, so the weights must also make up for
    /// them.
    pub(crate) fn share(&self, level: f64) -> f64 {
        let all = self.baseline.sparsity().nonzeros as f64;
        (level * all / (all - self.constants() as f64)).min(1.0)
    }

    fn on_the_baselines_states(&mut self, level: f64) -> anyhow::Result<Made> {
        let mut best = Best::new(level);
        for k in 0..TRIES {
            let known = self.flat.nearest(level).filter(|(_, s)| k == 0 && (s - level).abs() <= CLOSE);
            let price = known.map(|(p, _)| p).or(self.flat.next(level)).unwrap_or(self.rival.first_price());
            let made = self.fit(Ask::Price(price), false)?;
            let fresh = self.flat.add(price, made.model.sparsity().sparsity);
            if best.take(made) || !fresh {
                break;
            }
        }
        best.made()
    }

    fn in_the_cascade(&mut self, level: f64) -> anyhow::Result<Made> {
        if self.flat.nearest(level).is_none_or(|(_, s)| (s - level).abs() > CLOSE) {
            self.on_the_baselines_states(level)?;
        }
        let mut best = Best::new(level);
        let (mut aim, mut last, mut parallel) = (level, f64::INFINITY, true);
        for k in 0..TRIES {
            let known = self.flat.nearest(level).filter(|_| k == 0).map(|(p, _)| p);
            let next = || if parallel { self.flat.next(aim) } else { self.cascaded.next(level) };
            let Some(price) = known.or_else(next) else { break };
            let made = self.fit(Ask::Price(price), true)?;
            let sparsity = made.model.sparsity().sparsity;
            let fresh = self.cascaded.add(price, sparsity);
            if best.take(made) || !(fresh || parallel) {
                break;
            }
            // The curve says where to look only near its own points.
            let distance = (sparsity - level).abs();
            parallel = parallel && k + 1 < PARALLEL && distance < last;
            (aim, last) = (aim + level - sparsity, distance);
        }
        best.made()
    }

    pub(crate) fn fit(&self, ask: Ask, cascade: bool) -> anyhow::Result<Made> {
        let model = self.train(&ask, cascade, 0)?.model;
        Ok(Made { model, ask, cascade })
    }

    fn train(&self, ask: &Ask, cascade: bool, reconstruct: usize) -> anyhow::Result<Trained> {
        // In a cascade every budget has states of its own, so nothing is remembered.
        let memory = (!cascade).then(|| self.memory.clone());
        let method = Method { rival: self.rival.clone(), ask: ask.clone(), memory };
        let settings = TrainSettings {
            objective: Objective::Method(Arc::new(method)),
            strength: if let Ask::Price(price) = ask { *price } else { 1.0 },
            model: ModelSettings { cascade, reconstruct, output_refit: Some(0), ..Default::default() },
            work: WorkSettings { device: self.device, ..Default::default() },
            ..TrainSettings::default()
        };
        let mut run = Run { threads: self.threads, cancel: self.cancel, keep: self.shared, progress: &mut |_| {} };
        Ok(train(self.input, &settings, &mut run)?)
    }
}

/// The model nearest to a level so far.
struct Best {
    level: f64,
    nearest: Option<(f64, Made)>,
}

impl Best {
    fn new(level: f64) -> Self {
        Self { level, nearest: None }
    }

    /// Keeps a model if it is nearer to the level; whether it is close enough.
    fn take(&mut self, made: Made) -> bool {
        let distance = (made.model.sparsity().sparsity - self.level).abs();
        if self.nearest.as_ref().is_none_or(|(so_far, _)| distance < *so_far) {
            self.nearest = Some((distance, made));
        }
        distance <= CLOSE
    }

    fn made(self) -> anyhow::Result<Made> {
        match self.nearest {
            Some((_, made)) => Ok(made),
            None => bail!("a search without a model"),
        }
    }
}
