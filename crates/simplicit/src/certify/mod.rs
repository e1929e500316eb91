//! Certificates: inputs whose class no perturbation of size ε can change, proved.
//!
//! A perturbation moves every value of an input by at most ε in raw·scale units (before mean and std) and leaves it in
//! [0, 1]. Three bounds, each tried where the one before it does not suffice, so that a later one never certifies less:
//!
//! - **global**: ŷ_i − ŷ_j > ε(|C_i − C_j|(I−|A|)⁻¹|B| + |D_i − D_j|)|1/std| for all j. One number per pair of classes,
//!   whatever the input.
//! - **interval**: the states' box x* ± ε(I−|A|)⁻¹|B||1/std|, cut with its image under x ↦ φ(Ax + Bu + b) over the box
//!   of inputs, again and again in a cycle. φ does not decrease, so every iterate contains the equilibria.
//! - **linear**: each φ between two lines over its interval, and the difference of two outputs substituted back through
//!   them to the inputs; in a cycle a few times, what is left then bounded by the box. The intervals of later layers
//!   are narrowed the same way first.
//!
//! # Rounding
//!
//! A certificate holds for the model in exact arithmetic and for its single-precision run by
//! [`Equilibrium`]. Both are covered by slacks that only make it harder to certify:
//!
//! - A row of t terms, summed in single precision in any order, is off by at most γ_t·(|A||x| + |B||u| + |b|),
//!   γ_t = t·2⁻²⁴/(1 − t·2⁻²⁴), plus |A| times the errors of the states it reads; a ReLU that stays off has none. This
//!   recursion, with |x| and |u| bounded over the box, bounds the run's error e of every output. An
//!   exact difference above e_i + e_j over the box cannot be reversed by a run at any of its points.
//! - The bounds themselves are computed in double precision. Every product in a back-substitution is one term of
//!   (I−|A|)⁻¹(|A||x| + |B||u| + |b|), because slopes are at most 1; of N roundings on its way none is larger than 2⁻⁵³
//!   of it, so N·2⁻⁵² times that sum covers them all.
//! - Inputs are float32: ε is taken 2⁻²³ larger than asked.
//! - Shared weights are entries here, one for each position that uses them; those behind a mean are rounded once more. A
//!   run takes means first and sums block by block: both only add to t. Parts of an entry that cancel are rounded all
//!   the same, so |A| and |B| are there the sums of their magnitudes.

mod interval;
mod linear;
mod reach;
mod relaxation;

pub use reach::{Sensitivity, sensitivity};

use crate::arrays::PerFeature;
use crate::attack::check_epsilon;
use crate::equilibrium::{Equilibrium, EquilibriumSettings};
use crate::evaluate::predictions;
use crate::linalg::Matrix;
use crate::model::{ImplicitModel, TapBlock};
use crate::parallel::{self, Cancel, Threads};
use crate::states::InputSource;
use crate::{Error, Result};
use interval::{Boxes, Group, LANES};
use linear::Substitution;
use reach::{Reach, Stages};

/// Samples certified together; part of no result.
const BLOCK: usize = 64;

/// How hard to try.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Bound {
    /// The Lipschitz constant of every pair of classes.
    Global,
    /// And interval iteration per input.
    Interval,
    /// And linear relaxation per input.
    Linear,
}

impl std::fmt::Display for Bound {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Bound::Global => "global",
            Bound::Interval => "interval",
            Bound::Linear => "linear",
        })
    }
}

/// What is to be certified.
#[derive(Debug, Clone, PartialEq)]
pub struct CertifySettings {
    /// Largest changes, in raw·scale units.
    pub epsilon: Vec<f64>,
    /// The tightest bound to try. Default: linear.
    pub bound: Bound,
}

impl Default for CertifySettings {
    fn default() -> Self {
        Self { epsilon: vec![1.0 / 255.0, 2.0 / 255.0], bound: Bound::Linear }
    }
}

/// What was certified.
#[derive(Debug, Clone, PartialEq)]
pub struct CertifyReport {
    /// ε in the order asked.
    pub epsilon: Vec<f64>,
    /// Samples looked at.
    pub samples: usize,
    /// Share of samples that are right.
    pub clean_accuracy: f64,
    /// Share of samples that are right and stay so, proved; one for each ε.
    pub certified_accuracy: Vec<f64>,
    /// The same with bounds up to this one only.
    pub by_bound: Vec<(Bound, Vec<f64>)>,
    /// One per sample and ε: right, and proved to stay so.
    pub certified: Vec<Vec<bool>>,
    /// Samples without equilibrium, of which none is certified.
    pub not_converged: usize,
}

/// Certifies every sample at every ε. The result depends on neither the number of threads nor the order of ε.
#[allow(clippy::too_many_arguments)]
pub fn certify(
    model: &ImplicitModel,
    inputs: &dyn InputSource,
    labels: &[u32],
    per_feature: &PerFeature,
    settings: &CertifySettings,
    threads: Threads,
    cancel: &Cancel,
    mut progress: impl FnMut(usize),
) -> Result<CertifyReport> {
    check_epsilon(&settings.epsilon)?;
    let shape = model.shape();
    let samples = inputs.samples();
    if labels.len() != samples {
        return Err(Error::shape("labels", format!("{samples}, one for each input"), labels.len()));
    }
    if let Some(bad) = labels.iter().find(|l| **l as usize >= shape.outputs) {
        return Err(Error::shape("labels", format!("classes below {}", shape.outputs), bad));
    }
    if inputs.features() != shape.inputs || per_feature.std.len() != shape.inputs {
        return Err(Error::shape(
            "inputs",
            format!("{} values per sample", shape.inputs),
            format!("{} values, preprocessing of {}", inputs.features(), per_feature.std.len()),
        ));
    }
    let plain = model.unrolled("a certificate")?;
    let mut certifier = Certifier::new(&plain, per_feature)?;
    if !model.taps().is_empty() {
        certifier.run_with(model)?;
    }
    // Largest first: what holds there holds at every smaller ε.
    let mut order: Vec<usize> = (0..settings.epsilon.len()).collect();
    order.sort_by(|&a, &b| settings.epsilon[b].total_cmp(&settings.epsilon[a]));
    let descending: Vec<f64> = order.iter().map(|&k| settings.epsilon[k]).collect();
    let bounds: Vec<Bound> =
        [Bound::Global, Bound::Interval, Bound::Linear].into_iter().filter(|b| *b <= settings.bound).collect();
    let mut counts = vec![vec![0usize; descending.len()]; bounds.len()];
    let (mut right, mut not_converged) = (0, 0);
    let mut certified = Vec::with_capacity(samples);
    parallel::fold(
        threads,
        samples.div_ceil(BLOCK),
        |block| {
            cancel.check()?;
            let range = block * BLOCK..((block + 1) * BLOCK).min(samples);
            let u = inputs.rows(range.clone())?;
            u.require_finite("inputs", range.start)?;
            certifier.block(&u, &labels[range], &descending, settings.bound)
        },
        |_, verdicts: Vec<Verdict>| {
            for verdict in verdicts {
                right += usize::from(verdict.right);
                not_converged += usize::from(!verdict.converged);
                for (count, bound) in counts.iter_mut().zip(&bounds) {
                    for (c, by) in count.iter_mut().zip(&verdict.by) {
                        *c += usize::from(by.is_some_and(|by| by <= *bound));
                    }
                }
                let mut row = vec![false; descending.len()];
                order.iter().zip(&verdict.by).for_each(|(&k, by)| row[k] = by.is_some());
                certified.push(row);
            }
            progress(certified.len());
            Ok(())
        },
    )?;
    let share = |count: usize| count as f64 / samples.max(1) as f64;
    let asked = |count: &Vec<usize>| {
        let mut out = vec![0.0; count.len()];
        order.iter().zip(count).for_each(|(&k, &c)| out[k] = share(c));
        out
    };
    let by_bound: Vec<(Bound, Vec<f64>)> = bounds.iter().copied().zip(counts.iter().map(asked)).collect();
    Ok(CertifyReport {
        epsilon: settings.epsilon.clone(),
        samples,
        clean_accuracy: share(right),
        certified_accuracy: by_bound.last().map(|(_, accuracy)| accuracy.clone()).unwrap_or_default(),
        by_bound,
        certified,
        not_converged,
    })
}

/// What is known about one sample.
#[derive(Debug, Clone)]
struct Verdict {
    right: bool,
    converged: bool,
    /// At every ε, descending: the first bound that certifies it.
    by: Vec<Option<Bound>>,
}

/// A model and the data's range, made ready.
struct Certifier<'a> {
    model: &'a ImplicitModel,
    per_feature: &'a PerFeature,
    equilibrium: Equilibrium,
    stages: Stages<'a>,
    reach: Reach,
    /// C and D, dense.
    c: Matrix,
    d: Matrix,
}

impl<'a> Certifier<'a> {
    fn new(model: &'a ImplicitModel, per_feature: &'a PerFeature) -> Result<Self> {
        let stages = Stages::new(model)?;
        let inverse: Vec<f64> = per_feature.std.iter().map(|s| 1.0 / s).collect();
        Ok(Self {
            model,
            per_feature,
            equilibrium: Equilibrium::new(model, one_thread())?,
            reach: Reach::new(&stages, &inverse),
            stages,
            c: model.c().to_dense().cast(),
            d: model.d().to_dense().cast(),
        })
    }

    /// What is run is the model before its shared weights became entries.
    fn run_with(&mut self, model: &ImplicitModel) -> Result<()> {
        self.equilibrium = Equilibrium::new(model, one_thread())?;
        // Entries of several blocks may have become one, and a mean rounds before its weight does: no product of a row is
        // rounded more often than in the longest block, its means, and once for every block.
        let own = |b: &TapBlock| b.columns() + b.maps.iter().map(|m| m.terms() + 2).sum::<usize>();
        let longest = model.taps().iter().map(own).max().unwrap_or(0);
        self.stages.magnitudes = Some(model.unrolled_magnitudes());
        self.stages.more_roundings = (longest + model.taps().len() + 4) as f64;
        Ok(())
    }

    fn block(&self, u: &Matrix<f32>, labels: &[u32], descending: &[f64], bound: Bound) -> Result<Vec<Verdict>> {
        let solution = self.equilibrium.run(u)?;
        let right: Vec<bool> = predictions(&solution.y).iter().zip(labels).map(|(p, l)| p == l).collect();
        let mut verdicts: Vec<Verdict> = (0..u.rows())
            .map(|s| Verdict {
                right: right[s],
                converged: solution.diagnostics[s].converged,
                by: vec![None; descending.len()],
            })
            .collect();
        let mut substitution = None;
        for first in (0..u.rows()).step_by(LANES) {
            let lanes: Vec<usize> = (first..(first + LANES).min(u.rows())).collect();
            for (e, &epsilon) in descending.iter().enumerate() {
                let epsilon = widened(epsilon);
                for &s in &lanes {
                    // A sample certified at a larger ε is certified at this one.
                    verdicts[s].by[e] = e.checked_sub(1).and_then(|before| verdicts[s].by[before]);
                }
                let better =
                    |verdict: &Verdict| verdict.right && verdict.converged && verdict.by[e] != Some(Bound::Global);
                if !lanes.iter().any(|&s| better(&verdicts[s])) {
                    continue;
                }
                let group = Group::new(self, u, &solution, &lanes, epsilon);
                let mut open = Vec::new();
                for (lane, &s) in lanes.iter().enumerate() {
                    if !better(&verdicts[s]) {
                        continue;
                    }
                    let label = labels[s] as usize;
                    let y = solution.y.row(s);
                    if self.global(&group, lane, y, label, epsilon) {
                        verdicts[s].by[e] = Some(Bound::Global);
                    } else if verdicts[s].by[e] != Some(Bound::Interval) && !hopeless(&group, lane, y, label) {
                        open.push((lane, s, label));
                    }
                }
                if open.is_empty() || bound == Bound::Global {
                    continue;
                }
                let boxes = Boxes::new(self, &group, u, &lanes, epsilon);
                for (lane, s, label) in open {
                    if self.interval(&group, &boxes, lane, label) {
                        verdicts[s].by[e] = Some(Bound::Interval);
                    } else if bound == Bound::Linear && verdicts[s].by[e].is_none() {
                        let substitution = substitution.get_or_insert_with(|| Substitution::new(self));
                        if substitution.certifies(&group, &boxes, lane, label) {
                            verdicts[s].by[e] = Some(Bound::Linear);
                        }
                    }
                }
            }
        }
        Ok(verdicts)
    }

    /// The run's outputs are off by e at the clean input and by e at the perturbed one.
    fn global(&self, group: &Group, lane: usize, y: &[f32], label: usize, epsilon: f64) -> bool {
        (0..y.len()).filter(|&j| j != label).all(|j| {
            let slack = 2.0 * (group.output_error[label][lane] + group.output_error[j][lane]);
            f64::from(y[label]) - f64::from(y[j]) > epsilon * self.reach.of_pair(label, j) + slack
        })
    }

    /// The smallest difference of two outputs over the box of states and inputs.
    fn interval(&self, group: &Group, boxes: &Boxes, lane: usize, label: usize) -> bool {
        let bias = self.model.output_bias();
        (0..self.c.rows()).filter(|&j| j != label).all(|j| {
            let mut least = f64::from(bias[label]) - f64::from(bias[j]);
            for (rows, centre, radius) in [
                (&self.c, &boxes.state_centre, &boxes.state_radius),
                (&self.d, &boxes.input_centre, &boxes.input_radius),
            ] {
                for (k, (a, b)) in rows.row(label).iter().zip(rows.row(j)).enumerate() {
                    let w = a - b;
                    if w != 0.0 {
                        least += w * centre[k][lane] - w.abs() * radius[k][lane];
                    }
                }
            }
            least > group.needed(label, j, lane)
        })
    }
}

/// Whether even the clean input's outputs are closer to each other than the slacks: no bound over a box can do better than
/// at its centre. So it is in deep networks, whose slacks grow with every layer.
fn hopeless(group: &Group, lane: usize, y: &[f32], label: usize) -> bool {
    (0..y.len()).filter(|&j| j != label).any(|j| {
        let most =
            f64::from(y[label]) - f64::from(y[j]) + group.output_error[label][lane] + group.output_error[j][lane];
        most * (1.0 + 1e-9) <= group.needed(label, j, lane)
    })
}

fn one_thread() -> EquilibriumSettings {
    EquilibriumSettings { threads: Threads::one(), ..EquilibriumSettings::default() }
}

/// ε with the rounding of float32 inputs.
fn widened(epsilon: f64) -> f64 {
    epsilon + f64::from(f32::EPSILON)
}

#[cfg(test)]
mod tests;
