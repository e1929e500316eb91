//! How far states can move: |A| summed over all paths, rounded outwards.

use super::interval::{LANES, Lane};
use crate::equilibrium::Schedule;
use crate::layout::Activation;
use crate::linalg::{Csr, vectorised};
use crate::model::{Contraction, ImplicitModel, component_contraction};
use crate::{Error, Result};

/// Steps of x ← |A|x + w in a cycle before the rest is bounded by the contraction: for slacks, and for what is computed
/// once for a model.
pub(super) const FEW: usize = 40;
const MANY: usize = 5000;
/// Steps that raise no sum by more than this share are enough.
const SETTLED: f64 = 1e-9;

/// States computed together, and how a cycle contracts.
pub(super) struct Stage {
    pub(super) units: Vec<usize>,
    pub(super) cycle: Option<Contraction>,
}

/// A model in the order its states are computed.
pub(super) struct Stages<'a> {
    pub(super) model: &'a ImplicitModel,
    pub(super) stages: Vec<Stage>,
    pub(super) activations: Vec<Activation>,
    /// Stage of every state.
    pub(super) stage_of: Vec<usize>,
    /// Weights that a substitution from a stage passes.
    pub(super) weights_passed: Vec<usize>,
    /// What a run's rows round by, where that is more than the model's own magnitudes.
    pub(super) magnitudes: Option<ImplicitModel>,
    /// Roundings of a run's row beside those of its terms: where weights are shared and means are taken.
    pub(super) more_roundings: f64,
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
        let layers = model.layout().layers();
        let activations = layers.iter().flat_map(|l| std::iter::repeat_n(l.activation, l.size)).collect();
        let length = |m: &Csr<f32>, i: usize| m.indptr()[i + 1] - m.indptr()[i];
        let mut entries = 0;
        let weights_passed = stages
            .iter()
            .map(|stage: &Stage| {
                let own: usize = stage.units.iter().map(|&i| length(model.a(), i) + length(model.b(), i)).sum();
                let before = entries;
                entries += own;
                // A cycle is substituted into itself.
                before + if stage.cycle.is_some() { super::linear::TURNS * own } else { 0 }
            })
            .collect();
        Ok(Self { model, stages, activations, stage_of, weights_passed, magnitudes: None, more_roundings: 0.0 })
    }

    /// Terms of state i's row.
    pub(super) fn terms(&self, i: usize) -> f64 {
        self.roundings(self.model.a(), self.model.b(), i)
    }

    /// Terms of output i's row.
    pub(super) fn output_terms(&self, i: usize) -> f64 {
        self.roundings(self.model.c(), self.model.d(), i)
    }

    fn roundings(&self, states: &Csr<f32>, inputs: &Csr<f32>, i: usize) -> f64 {
        let length = |m: &Csr<f32>| m.indptr()[i + 1] - m.indptr()[i];
        (length(states) + length(inputs) + 1) as f64 + self.more_roundings
    }

    /// Larger than one by more than any sum here can lose to rounding.
    fn outwards(&self) -> f64 {
        outwards(self.model.shape().states + self.model.shape().inputs)
    }

    /// x_i += Σ_j |A_ij| x_j for the units of a stage, from its own states or from the others.
    pub(super) fn add_from_states(&self, stage: usize, own: bool, x: &[Lane], out: &mut [Lane]) {
        add_magnitudes(self.model.a(), &self.stages[stage].units, |j| (self.stage_of[j] == stage) == own, x, out);
    }

    /// x ≥ |A|x + w, where `x` holds w of this stage on entry and what earlier stages give is already in it. More steps
    /// give a smaller x.
    pub(super) fn close(&self, stage: usize, x: &mut [Lane], steps: usize) {
        let Stage { units, cycle } = &self.stages[stage];
        let up = self.outwards();
        let scale = |x: &mut Lane| x.iter_mut().for_each(|v| *v *= up);
        let Some(cycle) = cycle else {
            units.iter().for_each(|&i| scale(&mut x[i]));
            return;
        };
        let w: Vec<Lane> = units.iter().map(|&i| x[i]).collect();
        let mut image = x.to_vec();
        let mut step = |x: &[Lane]| -> Vec<Lane> {
            units.iter().zip(&w).for_each(|(&i, w)| image[i] = *w);
            self.add_from_states(stage, true, x, &mut image);
            units.iter().for_each(|&i| scale(&mut image[i]));
            units.iter().map(|&i| image[i]).collect()
        };
        for _ in 0..steps {
            let next = step(x);
            let mut settled = true;
            for (&i, next) in units.iter().zip(next) {
                settled &= next.iter().zip(&x[i]).all(|(next, x)| *next <= x * (1.0 + SETTLED));
                x[i] = next;
            }
            if settled {
                break;
            }
        }
        // |A|s ≤ ρs: adding s·max((Tx − x)/((1−ρ)s)) makes x a point that T does not raise.
        let next = step(x);
        let mut lift: Lane = [0.0; LANES];
        for ((&i, next), s) in units.iter().zip(&next).zip(&cycle.scaling) {
            for l in 0..LANES {
                lift[l] = lift[l].max((next[l] - x[i][l]) / ((1.0 - cycle.rho) * s));
            }
        }
        for (&i, s) in units.iter().zip(&cycle.scaling) {
            (0..LANES).for_each(|l| x[i][l] += lift[l] * s * up);
            scale(&mut x[i]);
        }
    }
}

/// The stages of A, an error where a cycle is not shown to contract.
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

/// out_i += Σ_j |m_ij| x_j over columns to `keep`, for some rows.
pub(super) fn add_magnitudes(m: &Csr<f32>, rows: &[usize], keep: impl Fn(usize) -> bool, x: &[Lane], out: &mut [Lane]) {
    vectorised(
        #[inline(always)]
        || {
            for &i in rows {
                let mut sum = out[i];
                for (j, w) in m.row(i) {
                    if keep(j) {
                        let (w, x) = (f64::from(w.abs()), &x[j]);
                        for l in 0..LANES {
                            sum[l] += w * x[l];
                        }
                    }
                }
                out[i] = sum;
            }
        },
    );
}

/// What inputs that move by one unit in raw·scale units can do.
pub(super) struct Reach {
    /// No pre-activation (and no state) moves further.
    pub(super) states: Vec<f64>,
    pairs: Vec<f64>,
    classes: usize,
}

impl Reach {
    /// `inverse` is 1/std of every input.
    pub(super) fn new(stages: &Stages, inverse: &[f64]) -> Self {
        let model = stages.model;
        let shape = model.shape();
        let inputs: Vec<Lane> = inverse.iter().map(|v| [*v; LANES]).collect();
        let mut reach: Vec<Lane> = vec![[0.0; LANES]; shape.states];
        for (k, stage) in stages.stages.iter().enumerate() {
            let mut sums = reach.clone();
            add_magnitudes(model.b(), &stage.units, |_| true, &inputs, &mut sums);
            stages.add_from_states(k, false, &reach, &mut sums);
            stages.close(k, &mut sums, MANY);
            stage.units.iter().for_each(|&i| reach[i] = sums[i]);
        }
        let states: Vec<f64> = reach.iter().map(|r| r[0]).collect();
        let q = shape.outputs;
        let up = stages.outwards();
        let mut pairs = vec![0.0; q * q];
        for i in 0..q {
            for j in 0..i {
                let total = difference(model.c(), i, j, &states) + difference(model.d(), i, j, inverse);
                pairs[i * q + j] = total * up;
                pairs[j * q + i] = total * up;
            }
        }
        Self { states, pairs, classes: q }
    }

    /// ŷ_i − ŷ_j changes by at most this.
    pub(super) fn of_pair(&self, i: usize, j: usize) -> f64 {
        self.pairs[i * self.classes + j]
    }
}

/// Σ_k |m_ik − m_jk| x_k.
fn difference(m: &Csr<f32>, i: usize, j: usize, x: &[f64]) -> f64 {
    let (mut a, mut b) = (m.row(i).peekable(), m.row(j).peekable());
    let mut total = 0.0;
    loop {
        let (k, w) = match (a.peek().copied(), b.peek().copied()) {
            (None, None) => return total,
            (Some((k, v)), other) if other.is_none_or(|(l, _)| k < l) => {
                a.next();
                (k, f64::from(v))
            }
            (Some((k, v)), Some((l, w))) if k == l => {
                a.next();
                b.next();
                (k, f64::from(v) - f64::from(w))
            }
            (_, Some((l, w))) => {
                b.next();
                (l, f64::from(w))
            }
            (Some(_), None) => return total,
        };
        total += w.abs() * x[k];
    }
}

/// What one unit of |weight| adds to the global certificate's constant, averaged over pairs of classes: the derivative of
/// |C_i − C_j|(I−|A|)⁻¹|B| + |D_i − D_j| is rows ⊗ columns.
#[derive(Debug, Clone, PartialEq)]
pub struct Sensitivity {
    /// How much the outputs' differences mind a change of a pre-activation or output: n states, q outputs.
    pub rows: Vec<f64>,
    /// How far a state or an input moves: n states, p inputs.
    pub columns: Vec<f64>,
}

/// Of a model at inputs whose raw·scale units are divided by `std`; an error where a cycle is not shown to contract.
pub fn sensitivity(model: &ImplicitModel, std: &[f64]) -> Result<Sensitivity> {
    model.require_no_taps("a certificate")?;
    let shape = model.shape();
    if std.len() != shape.inputs {
        return Err(Error::shape("std", format!("{} values", shape.inputs), std.len()));
    }
    let stages = Stages::new(model)?;
    let inverse: Vec<f64> = std.iter().map(|s| 1.0 / s).collect();
    let reach = Reach::new(&stages, &inverse);
    let q = shape.outputs;
    // Mean of |C_i − C_j| over pairs, then back along every path: the same sums on the transposed model.
    let c = model.c().to_dense();
    let pairs = (q * q.saturating_sub(1) / 2).max(1) as f64;
    let mut rows = vec![0.0; shape.states];
    for i in 0..q {
        for j in 0..i {
            rows.iter_mut().enumerate().for_each(|(k, r)| *r += f64::from((c[(i, k)] - c[(j, k)]).abs()) / pairs);
        }
    }
    for stage in stages.stages.iter().rev() {
        // In a cycle a few dozen steps are enough for a price.
        let turns = if stage.cycle.is_some() { FEW } else { 1 };
        let mut fresh: Vec<f64> = stage.units.iter().map(|&i| rows[i]).collect();
        for _ in 0..turns {
            let mut next = vec![0.0; fresh.len()];
            for (&i, r) in stage.units.iter().zip(&fresh) {
                for (j, w) in model.a().row(i) {
                    let more = f64::from(w.abs()) * r;
                    rows[j] += more;
                    if let Ok(k) = stage.units.binary_search(&j) {
                        next[k] += more;
                    }
                }
            }
            fresh = next;
        }
    }
    rows.extend(std::iter::repeat_n(2.0 / q.max(1) as f64, q));
    let columns = reach.states.iter().copied().chain(inverse).collect();
    Ok(Sensitivity { rows, columns })
}
