//! A rival in the place of the library's row solver, and the price at which its models have a level.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::bail;
use simplicit::model::ImplicitModel;
use simplicit::parallel::{Cancel, Threads};
use simplicit::statistics::Statistics;
use simplicit::train::{
    Found, Keep, Key, ModelSettings, Objective, RowGroup, RowMethod, Run, TrainInput, TrainSettings, train,
};

use crate::rivals::{Budget, Layer, Prepared, Rival};

/// Accepted distance from a level.
const CLOSE: f64 = 0.001;
/// Models of a search for one level.
const TRIES: usize = 16;
/// Of these in a cascade, so many by the curve of the models on the baseline's states, which runs nearly parallel.
const PARALLEL: usize = 4;

/// How the groups share what may stay.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Allocation {
    /// Every group loses the same share of its weights.
    Uniform,
    /// One price for all groups.
    Global,
}

/// What one model is asked for.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Ask {
    /// This share of every group goes.
    Share(f64),
    /// This price.
    Price(f64),
}

/// A group's statistics, and what a rival made of them.
type Seen = (Statistics, Arc<dyn Prepared>);

/// Groups that a rival has seen, by name: on the baseline's states they are the same for every budget.
#[derive(Default)]
struct Memory(Mutex<BTreeMap<String, Seen>>);

/// A rival as the library's walk sees it.
struct Method {
    rival: Arc<dyn Rival>,
    share: Option<f64>,
    memory: Option<Arc<Memory>>,
}

impl fmt::Debug for Method {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.debug_struct("Method").field("rival", &self.rival).field("share", &self.share).finish_non_exhaustive()
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
        let budget = match self.share {
            Some(share) => Budget::Count(((1.0 - share) * layer.removable() as f64).round() as usize),
            None => Budget::Price(group.strength),
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
        // Another rival's models have other states.
        if !key.depends_on_a_model() {
            self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(key.to_string(), value.to_vec());
        }
        Ok(())
    }
}

/// One rival's models on one choice of samples.
pub struct Walk<'a> {
    input: &'a TrainInput<'a>,
    baseline: &'a ImplicitModel,
    rival: Arc<dyn Rival>,
    shared: &'a Shared,
    memory: Arc<Memory>,
    threads: Threads,
    cancel: &'a Cancel,
    /// Price and sparsity on the baseline's states, and in the cascade.
    flat: Found,
    cascaded: Found,
}

impl<'a> Walk<'a> {
    /// Nothing is computed yet. The input's baseline must be there.
    pub fn new(
        input: &'a TrainInput<'a>,
        baseline: &'a ImplicitModel,
        rival: Arc<dyn Rival>,
        shared: &'a Shared,
        threads: Threads,
        cancel: &'a Cancel,
    ) -> Self {
        let memory = Arc::new(Memory::default());
        let (flat, cascaded) = (Found::default(), Found::default());
        Self { input, baseline, rival, shared, memory, threads, cancel, flat, cascaded }
    }

    /// The model at a level. In a cascade the global price is sought from the one on the baseline's states.
    pub fn model(&mut self, level: f64, allocation: Allocation, cascade: bool) -> anyhow::Result<ImplicitModel> {
        match (allocation, cascade) {
            (Allocation::Uniform, _) => {
                // The constants stay, so the weights must give what they do not.
                let all = self.baseline.sparsity().nonzeros as f64;
                let bias = self.baseline.state_bias().iter().chain(self.baseline.output_bias());
                let constants = bias.filter(|b| **b != 0.0).count() as f64;
                self.fit(Ask::Share((level * all / (all - constants)).min(1.0)), cascade)
            }
            (Allocation::Global, false) => self.on_the_baselines_states(level),
            (Allocation::Global, true) => self.in_the_cascade(level),
        }
    }

    fn on_the_baselines_states(&mut self, level: f64) -> anyhow::Result<ImplicitModel> {
        let mut best = Best::new(level);
        for k in 0..TRIES {
            let known = self.flat.nearest(level).filter(|(_, s)| k == 0 && (s - level).abs() <= CLOSE);
            let price = known.map(|(p, _)| p).or(self.flat.next(level)).unwrap_or(self.rival.first_price());
            let model = self.fit(Ask::Price(price), false)?;
            let fresh = self.flat.add(price, model.sparsity().sparsity);
            if best.take(model) || !fresh {
                break;
            }
        }
        best.model()
    }

    fn in_the_cascade(&mut self, level: f64) -> anyhow::Result<ImplicitModel> {
        if self.flat.nearest(level).is_none_or(|(_, s)| (s - level).abs() > CLOSE) {
            self.on_the_baselines_states(level)?;
        }
        let mut best = Best::new(level);
        let (mut aim, mut last, mut parallel) = (level, f64::INFINITY, true);
        for k in 0..TRIES {
            let known = self.flat.nearest(level).filter(|_| k == 0).map(|(p, _)| p);
            let next = || if parallel { self.flat.next(aim) } else { self.cascaded.next(level) };
            let Some(price) = known.or_else(next) else { break };
            let model = self.fit(Ask::Price(price), true)?;
            let sparsity = model.sparsity().sparsity;
            let fresh = self.cascaded.add(price, sparsity);
            if best.take(model) || !(fresh || parallel) {
                break;
            }
            // That curve knows the way only where it has points.
            let distance = (sparsity - level).abs();
            parallel = parallel && k + 1 < PARALLEL && distance < last;
            (aim, last) = (aim + level - sparsity, distance);
        }
        best.model()
    }

    fn fit(&self, ask: Ask, cascade: bool) -> anyhow::Result<ImplicitModel> {
        let (share, strength) = match ask {
            Ask::Share(share) => (Some(share), 1.0),
            Ask::Price(price) => (None, price),
        };
        // In a cascade every budget has states of its own.
        let memory = (!cascade).then(|| self.memory.clone());
        let method = Method { rival: self.rival.clone(), share, memory };
        let settings = TrainSettings {
            objective: Objective::Method(Arc::new(method)),
            strength,
            model: ModelSettings { cascade, output_refit: Some(0), ..Default::default() },
            ..TrainSettings::default()
        };
        let mut run = Run { threads: self.threads, cancel: self.cancel, keep: self.shared, progress: &mut |_| {} };
        Ok(train(self.input, &settings, &mut run)?.model)
    }
}

/// The model nearest to a level so far.
struct Best {
    level: f64,
    model: Option<(f64, ImplicitModel)>,
}

impl Best {
    fn new(level: f64) -> Self {
        Self { level, model: None }
    }

    /// Whether this one is close enough.
    fn take(&mut self, model: ImplicitModel) -> bool {
        let distance = (model.sparsity().sparsity - self.level).abs();
        if self.model.as_ref().is_none_or(|(so_far, _)| distance < *so_far) {
            self.model = Some((distance, model));
        }
        distance <= CLOSE
    }

    fn model(self) -> anyhow::Result<ImplicitModel> {
        match self.model {
            Some((_, model)) => Ok(model),
            None => bail!("a search without a model"),
        }
    }
}
