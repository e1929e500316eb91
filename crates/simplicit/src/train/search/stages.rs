//! A target in stages: every stage makes the refitted model of the one before sparser, instead of starting again from
//! the baseline.
//!
//! The states of the model so far replace the baseline's. They are the result of its refit in the output metric; the
//! row problems start there with a residual of zero, and row weights come from its own outputs. The outputs to match
//! stay the baseline's. Any connection that was allowed at first may return; if weights are shared, only the taps of
//! the model before can be chosen (with `feedforward`, all taps of the maps in reach).

use crate::Result;
use crate::arrays::DeviceInputs;
use crate::equilibrium::{Equilibrium, EquilibriumSettings};
use crate::layout::Layout;
use crate::linalg::Matrix;
use crate::model::ImplicitModel;
use crate::parallel::{self, Threads};
use crate::problem::Connectivity;
use crate::random::Random;
use crate::states::{Kept, StateBlock, StateMap, StateShape, StateSource};
use crate::train::evidence::importance::{drawn, softmax};
use crate::train::key::Search;
use crate::train::plan::connections;
use crate::train::refit::linearised::{Linearised, Samples, gates};
use crate::train::refit::output_refit;
use crate::train::{Delegate, Keep, Key, Objective, Run, TrainInput, TrainSettings, shares_weights};

/// Share of the baseline's non-zeros that the first stage leaves.
const FIRST: f64 = 0.35;
/// A stage leaves at least this share of the non-zeros of the stage before it.
const RATIO: f64 = 0.6;
/// The most bytes of a stage's states that are kept.
const KEPT: u64 = 256 << 20;
/// Draws from the model's softmax per sample.
const DRAWS: usize = 2;

/// Whether targets are approached in stages: if the settings ask for it, or by default if it is worthwhile for models
/// of this kind.
pub(in crate::train) fn are_taken(input: &TrainInput, settings: &TrainSettings) -> bool {
    let pays = || {
        output_refit::rounds(input.baseline, settings) > 0
            && settings.model.robust_rounds == 0
            && matches!(settings.objective, Objective::Cardinality)
            && !input.baseline.is_some_and(shares_weights)
    };
    settings.model.stages.unwrap_or_else(pays)
}

/// The targets of all stages up to and including `target`, after a model that left the share `left` of the non-zeros
/// (or after none).
pub(in crate::train) fn rungs(left: Option<f64>, target: f64) -> Vec<f64> {
    let goal = 1.0 - target;
    let mut out = Vec::new();
    let first = left.map_or(FIRST, |l| RATIO * l);
    if goal < first {
        let count = ((goal / first).ln() / RATIO.ln()).ceil().max(1.0);
        let step = (goal / first).powf(1.0 / count);
        out.extend((0..count as i32).map(|k| 1.0 - first * step.powi(k)));
    }
    out.push(target);
    out
}

/// A model of a stage, with the data that the next stage starts from.
pub(in crate::train) struct Stage {
    model: ImplicitModel,
    equilibrium: Equilibrium,
    kept: Kept,
    importance: Option<Vec<f64>>,
    /// The connections that the settings allow: as a mask or, if weights are shared, by their name in the settings.
    pub(in crate::train) connectivity: Connectivity,
}

impl Stage {
    pub(in crate::train) fn new(
        model: ImplicitModel,
        input: &TrainInput,
        settings: &TrainSettings,
        run: &Run,
    ) -> Result<Self> {
        let equilibrium = Equilibrium::new(
            &model,
            EquilibriumSettings { threads: Threads::one(), certified: false, ..Default::default() },
        )?;
        let importance = match input.importance {
            Some(_) => Some(own_importance(&model, &equilibrium, input, run)?),
            None => None,
        };
        let connectivity = match connections::walked(input, settings) {
            Some(_) => settings.allowed.connectivity.clone(),
            None => Connectivity::Mask(connections::mask(input, settings)?),
        };
        let kept = Kept::new(settings.work.memory.map_or(KEPT, |budget| KEPT.min(budget / 8)));
        Ok(Self { model, equilibrium, kept, importance, connectivity })
    }

    /// The samples with this model's states in place of the baseline's; outputs stay the baseline's.
    pub(in crate::train) fn states<'a>(&'a self, source: &'a dyn StateSource) -> OwnStates<'a> {
        OwnStates { source, equilibrium: &self.equilibrium, kept: Some(&self.kept) }
    }

    /// The training problem over those samples.
    pub(in crate::train) fn input<'a>(&'a self, states: &'a OwnStates<'a>, input: &TrainInput) -> TrainInput<'a> {
        TrainInput {
            source: states,
            baseline: Some(&self.model),
            importance: self.importance.as_deref(),
            preprocessing: input.preprocessing.clone(),
        }
    }
}

/// Samples with a model's states and the baseline's outputs.
pub(in crate::train) struct OwnStates<'a> {
    source: &'a dyn StateSource,
    equilibrium: &'a Equilibrium,
    kept: Option<&'a Kept>,
}

impl<'a> OwnStates<'a> {
    pub(in crate::train) fn new(source: &'a dyn StateSource, equilibrium: &'a Equilibrium) -> Self {
        Self { source, equilibrium, kept: None }
    }
}

impl StateSource for OwnStates<'_> {
    fn layout(&self) -> &Layout {
        self.source.layout()
    }

    fn shape(&self) -> StateShape {
        self.source.shape()
    }

    fn samples(&self) -> usize {
        self.source.samples()
    }

    fn block(&self, samples: std::ops::Range<usize>) -> Result<StateBlock> {
        let theirs = self.source.block(samples.clone())?;
        let own = || {
            let own = self.equilibrium.states(&theirs.u.cast())?;
            Ok([own.z, own.x, Matrix::default()])
        };
        let [z, x, _] = match self.kept {
            Some(kept) => kept.get_or(&samples, own)?,
            None => own()?,
        };
        Ok(StateBlock { u: theirs.u, z, x, y: theirs.y })
    }

    fn inputs(&self, samples: std::ops::Range<usize>) -> Result<Matrix<f32>> {
        self.source.inputs(samples)
    }

    fn ends(&self, samples: std::ops::Range<usize>) -> Result<(Matrix<f32>, Matrix)> {
        self.source.ends(samples)
    }

    fn outputs_follow_from_states(&self) -> bool {
        false
    }

    fn device_inputs(&self) -> Option<(&DeviceInputs, usize)> {
        self.source.device_inputs()
    }

    fn layers_are_known(&self) -> bool {
        self.source.layers_are_known()
    }

    fn baseline_nonzeros(&self) -> Option<u64> {
        self.source.baseline_nonzeros()
    }

    fn origin(&self) -> Option<&dyn StateSource> {
        Some(self.source)
    }
}

/// E[(∂ log p(y|u)/∂z_i)²] with y drawn from the model's own softmax, summed over the units of a row, as
/// [`crate::train::evidence::importance`] computes it for a network.
fn own_importance(model: &ImplicitModel, equilibrium: &Equilibrium, input: &TrainInput, run: &Run) -> Result<Vec<f64>> {
    let shape = model.shape();
    let scale = model.metadata().scaling.as_ref().map_or(1.0, |s| s.outputs) as f32;
    let (support, w) = Linearised::of(model);
    let m = support.dense(&w);
    let (samples, size) = (input.source.samples(), output_refit::chunk_of(shape));
    let row_of = output_refit::rows_of_units(model);
    let rows = model.layout().rows() + shape.outputs;
    let mut total = vec![0.0; rows];
    parallel::fold(
        run.threads,
        samples.div_ceil(size),
        |block| {
            run.cancel.check()?;
            let u = input.source.inputs(block * size..((block + 1) * size).min(samples))?;
            let solution = equilibrium.run(&u)?;
            let gates = gates(model.layout(), &solution.z);
            let at = Samples { u: &u, x: &solution.x, gates: &gates };
            let logits = Matrix::from_fn(u.rows(), shape.outputs, |s, k| scale * solution.y[(s, k)]);
            let probabilities = softmax(&logits);
            let none = Matrix::zeros(u.rows(), shape.states);
            let mut random = Random::new(block as u64);
            let mut sum = vec![0.0; rows];
            for _ in 0..DRAWS {
                let v = drawn(&probabilities, scale, &mut random);
                let r = support.adjoint(&m, &v, &none, &at);
                for s in 0..v.rows() {
                    let units = row_of.iter().zip(r.row(s).iter().chain(v.row(s)));
                    units.for_each(|(row, g)| row.iter().for_each(|&i| sum[i] += f64::from(*g).powi(2)));
                }
            }
            Ok(sum)
        },
        |_, sum| {
            total.iter_mut().zip(sum).for_each(|(t, s)| *t += s);
            Ok(())
        },
    )?;
    total.iter_mut().for_each(|t| *t /= (samples * DRAWS) as f64);
    Ok(total)
}

/// Keeps results under keys that belong to a search.
pub(in crate::train) struct Within<'a> {
    pub(in crate::train) keep: &'a dyn Keep,
    pub(in crate::train) search: Search,
}

impl Keep for Within<'_> {
    fn get(&self, key: &Key) -> Result<Option<Vec<u8>>> {
        self.keep.get(&key.within(self.search))
    }

    fn put(&self, key: &Key, value: &[u8]) -> Result<()> {
        self.keep.put(&key.within(self.search), value)
    }

    fn keeps(&self) -> bool {
        self.keep.keeps()
    }

    fn folder(&self) -> Option<&std::path::Path> {
        self.keep.folder()
    }

    fn delegate(&self) -> Option<&dyn Delegate> {
        self.keep.delegate()
    }
}
