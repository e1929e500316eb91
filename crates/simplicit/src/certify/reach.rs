//! How far the states of a model of plain entries can move: |A| summed over all paths, rounded outwards. The boxes of
//! cycles are computed from this.

use crate::equilibrium::{EquilibriumSettings, Schedule};
use crate::layout::Activation;
use crate::linalg::Csr;
use crate::model::{Contraction, ImplicitModel, component_contraction};
use crate::{Error, Result};

use super::boxes::gamma;

/// Steps of x ← |A|x + w in a cycle before the rest is bounded by the contraction: for slacks, and for quantities
/// that are computed once per model.
pub(super) const FEW: usize = 40;
const MANY: usize = 5000;
/// The steps end when none of them raises a sum by more than this share.
const SETTLED: f64 = 1e-9;
/// The share by which a guess of a cycle's magnitudes is enlarged, for what is not yet known.
const ROOM: f64 = 1.0 / 16.0;

/// States that are computed together, and the contraction of a cycle among them.
pub(super) struct Stage {
    pub(super) units: Vec<usize>,
    pub(super) cycle: Option<Contraction>,
}

/// A model, with its states in the order in which they are computed.
pub(super) struct Stages<'a> {
    model: &'a ImplicitModel,
    pub(super) stages: Vec<Stage>,
    /// The stage of every state.
    stage_of: Vec<usize>,
}

impl<'a> Stages<'a> {
    pub(super) fn new(model: &'a ImplicitModel) -> Result<Self> {
        let fits = |a: Activation| a.is_non_decreasing() && a.is_non_expansive();
        if let Some(layer) = model.layout().layers().iter().find(|l| !fits(l.activation)) {
            return Err(Error::unsupported(
                format!("a certificate through layer {:?} with activation {}", layer.name, layer.activation),
                "its bounds need activations that are non-decreasing and non-expansive, such as relu, clip or tanh",
            ));
        }
        let stages = order(model.a())?;
        let mut stage_of = vec![0; model.shape().states];
        stages.iter().enumerate().for_each(|(k, stage)| stage.units.iter().for_each(|&i| stage_of[i] = k));
        Ok(Self { model, stages, stage_of })
    }

    /// A factor slightly above one: the excess is more than any sum here can lose to rounding.
    fn outwards(&self) -> f64 {
        outwards(self.model.shape().states + self.model.shape().inputs)
    }

    /// x_i += Σ_j |A_ij| x_j for the units of a stage, from its own states or from the others.
    fn add_from_states(&self, stage: usize, own: bool, x: &[f64], out: &mut [f64]) {
        add_magnitudes(self.model.a(), &self.stages[stage].units, |j| (self.stage_of[j] == stage) == own, x, out);
    }

    /// x ≥ |A|x + w, where `x` holds w of this stage on entry, with the contributions of earlier stages added. More
    /// steps give a smaller x.
    fn close(&self, stage: usize, x: &mut [f64], steps: usize) {
        let Stage { units, cycle } = &self.stages[stage];
        let up = self.outwards();
        let Some(cycle) = cycle else {
            units.iter().for_each(|&i| x[i] *= up);
            return;
        };
        let w: Vec<f64> = units.iter().map(|&i| x[i]).collect();
        let mut image = x.to_vec();
        let mut step = |x: &[f64]| -> Vec<f64> {
            units.iter().zip(&w).for_each(|(&i, w)| image[i] = *w);
            self.add_from_states(stage, true, x, &mut image);
            units.iter().for_each(|&i| image[i] *= up);
            units.iter().map(|&i| image[i]).collect()
        };
        for _ in 0..steps {
            let next = step(x);
            let mut settled = true;
            for (&i, next) in units.iter().zip(next) {
                settled &= next <= x[i] * (1.0 + SETTLED);
                x[i] = next;
            }
            if settled {
                break;
            }
        }
        // |A|s ≤ ρs: adding s·max((Tx − x)/((1−ρ)s)) makes x a point that T does not raise.
        let next = step(x);
        let mut lift = 0.0f64;
        for ((&i, next), s) in units.iter().zip(&next).zip(&cycle.scaling) {
            lift = lift.max((next - x[i]) / ((1.0 - cycle.rho) * s));
        }
        for (&i, s) in units.iter().zip(&cycle.scaling) {
            x[i] = (x[i] + lift * s * up) * up;
        }
    }
}

/// The stages of A; an error where a cycle is not shown to contract.
fn order(a: &Csr<f32>) -> Result<Vec<Stage>> {
    let mut place = vec![usize::MAX; a.rows()];
    let mut stages = Vec::new();
    for stage in Schedule::new(a, |_| true).stages {
        let mut cycle = None;
        if stage.cyclic {
            stage.units.iter().enumerate().for_each(|(k, &i)| place[i] = k);
            let contraction = component_contraction(a, &stage.units, &place);
            stage.units.iter().for_each(|&i| place[i] = usize::MAX);
            if contraction.rho >= 1.0 {
                return Err(Error::unsupported(
                    format!("a certificate for a model with λ_pf(|A|) only shown to be at most {:.3}", contraction.rho),
                    "it takes a bound below 1; train with --kappa",
                ));
            }
            cycle = Some(contraction);
        }
        stages.push(Stage { units: stage.units, cycle });
    }
    Ok(stages)
}

fn outwards(terms: usize) -> f64 {
    1.0 + (terms as f64 + 16.0) * f64::EPSILON
}

/// out_i += Σ_j |m_ij| x_j for some rows, over the columns for which `keep` is true.
fn add_magnitudes(m: &Csr<f32>, rows: &[usize], keep: impl Fn(usize) -> bool, x: &[f64], out: &mut [f64]) {
    for &i in rows {
        out[i] += m.row(i).filter(|(j, _)| keep(*j)).map(|(j, w)| f64::from(w.abs()) * x[j]).sum::<f64>();
    }
}

/// How far every state moves at most when inputs move by one unit in raw·scale units; `inverse` is 1/std of every input.
pub(super) fn reach(stages: &Stages, inverse: &[f64]) -> Vec<f64> {
    let model = stages.model;
    let mut reach = vec![0.0; model.shape().states];
    for (k, stage) in stages.stages.iter().enumerate() {
        let mut sums = reach.clone();
        add_magnitudes(model.b(), &stage.units, |_| true, inverse, &mut sums);
        stages.add_from_states(k, false, &reach, &mut sums);
        stages.close(k, &mut sums, MANY);
        stage.units.iter().for_each(|&i| reach[i] = sums[i]);
    }
    reach
}

/// Boxes that contain the equilibria of all inputs within reach of a sample.
pub(super) struct CycleBox {
    pub(super) low: Vec<f64>,
    pub(super) high: Vec<f64>,
    /// For every state a bound on the distance between its computed and its exact value.
    pub(super) error: Vec<f64>,
}

impl CycleBox {
    /// `x` are the computed states, `moved` how far the exact ones may move, `inputs` bounds of |u|. Errors are infinite
    /// where they cannot be bounded.
    pub(super) fn new(stages: &Stages, x: &[f32], moved: &[f64], inputs: &[f64]) -> Self {
        let model = stages.model;
        let n = x.len();
        let all: Vec<usize> = (0..n).collect();
        let sizes: Vec<f64> = x.iter().zip(moved).map(|(x, m)| f64::from(x.abs()) + m).collect();
        let guess: Vec<f64> = sizes.iter().map(|v| v + ROOM * (1.0 + v)).collect();
        let mut magnitude: Vec<f64> = model.state_bias().iter().map(|b| f64::from(b.abs())).collect();
        add_magnitudes(model.b(), &all, |_| true, inputs, &mut magnitude);
        add_magnitudes(model.a(), &all, |_| true, &guess, &mut magnitude);
        let entries = |i: usize| {
            let length = |m: &Csr<f32>| m.indptr()[i + 1] - m.indptr()[i];
            (length(model.a()) + length(model.b()) + 3) as f64
        };
        // Cycles are iterated in double precision to a tolerance; the states are returned in single precision, and
        // states outside cycles are summed in it.
        let largest = guess.iter().copied().fold(1.0, f64::max);
        let tolerance = EquilibriumSettings::default().tolerance * largest;
        let mut error = vec![0.0; n];
        for (k, stage) in stages.stages.iter().enumerate() {
            for &i in &stage.units {
                let single = if stage.cycle.is_some() { 2.0 * entries(i) * f64::EPSILON } else { gamma(entries(i)) };
                error[i] = single * magnitude[i] + entries(i) * f64::from(f32::MIN_POSITIVE);
            }
            let known = error.clone();
            stages.add_from_states(k, false, &known, &mut error);
            stages.close(k, &mut error, FEW);
            for &i in &stage.units {
                error[i] += tolerance + gamma(8.0) * (1.0 + magnitude[i]);
            }
        }
        for i in 0..n {
            // The guess must have been large enough for the magnitudes that were found.
            if 2.0 * error[i] > 0.999 * (guess[i] - sizes[i]) {
                error[i] = f64::INFINITY;
            }
        }
        let side = |sign: f64| (0..n).map(|i| f64::from(x[i]) + sign * (moved[i] + error[i])).collect();
        Self { low: side(-1.0), high: side(1.0), error }
    }
}
