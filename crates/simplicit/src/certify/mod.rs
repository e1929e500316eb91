//! Certificates: inputs whose class no perturbation of size ε can change, proved.
//!
//! A perturbation moves every value of an input by at most ε in raw·scale units (before mean and std), or all values
//! together by at most ε in the Euclidean norm, and leaves them in [0, 1]. There are four bounds. Each is tried where
//! the one before it does not suffice, so that a later one never certifies less:
//!
//! - **global**: every value of the model within its clean value ± the largest change that |weights| allow for the
//!   change of the input; the same as ŷ_i − ŷ_j > ε(|C_i − C_j|(I−|A|)⁻¹|B| + |D_i − D_j|)|1/std| for all j, up to
//!   rounding.
//! - **interval**: every value in the image of the intervals before it.
//! - **linear**: each φ between two lines over its interval, each maximum between two of its values, and the difference
//!   of two outputs substituted back through them to the inputs. The intervals of unstable units, and of what a maximum
//!   reads, are narrowed the same way first.
//! - **slopes**: as linear, with the slopes of the lower lines improved by gradient steps, separately for every
//!   difference.
//!
//! One mechanism serves dense layers, convolutions, sums, poolings and operators that move values. The states of a
//! cycle are substituted into themselves twelve times; the remaining coefficients of states are bounded by the box x*
//! ± ε(I−|A|)⁻¹|B||1/std|, narrowed by interval iteration.
//!
//! # Rounding
//!
//! A certificate holds for the model in exact arithmetic and for its single-precision run by [`Equilibrium`] on a
//! processor. A run computes z = Wx + b + δ. It computes every sum of a layer as one chain, whatever the kernel, the
//! batch and the number of threads ([`crate::kernels`]): it starts with the bias and adds products one by one, block
//! after block, each block in ascending order of its columns. The k-th addition is off by at most u = 2⁻²⁴ of the partial
//! sum s_k, and without fused multiply-adds each product is off by u of itself: so |δ| ≤ u·Σ|s_k| + u·Σ|w_j·x_j|, up to
//! terms of order u², which are added. Each |s_k| is taken at its largest over the boxes of x.
//!
//! Of poolings, of other operators and of the outputs of a cycle no order is assumed, and [`Arithmetic::AnyOrder`]
//! assumes none of any sum. A partial sum then lies between the sum P of the positive products and that of the negative
//! ones, −N, so that |δ| ≤ u·n·max(P, N) + u(P + N) for n products that are not zero.
//!
//! All boxes contain the values of z for every such δ, and so exact ones. A substitution that has coefficient μ at z
//! takes |μ| times that bound of |δ| from its constant. Its own coefficients are single precision too: where
//! λ = Wᵀμ is rounded, the function is off by at most γ_n|W|ᵀ|μ||x|, γ_n = n·u/(1 − n·u), which summed over the units is
//! |μ|·γ_n|W||x| with the n of the transpose. [`Arithmetic::Exact`] leaves out the roundings of the run, but not those
//! of the certifier. So rounding costs a multiple of the magnitudes that one layer sums, added over layers; nothing is
//! multiplied along paths. Constants are double precision; their roundings are below one more u. Inputs are float32, so
//! ε is taken 2⁻²³ larger than asked for.

mod backwards;
mod block;
mod boxes;
mod graph;
mod lowest;
mod price;
mod reach;
mod region;
mod relaxation;
mod sample;
mod slopes;
mod substitution;
mod sums;

pub(crate) use lowest::Spread;
pub use price::{Sensitivity, sensitivity};

use std::borrow::Cow;

use crate::arrays::PerFeature;
use crate::attack::{Norm, check_epsilon};
use crate::equilibrium::{Equilibrium, EquilibriumSettings};
use crate::evaluate::predictions;
use crate::layout::Layout;
use crate::linalg::Matrix;
use crate::model::ImplicitModel;
use crate::parallel::{self, Cancel, Threads};
use crate::states::InputSource;
use crate::{Error, Result};
use graph::Graph;
use reach::{Stages, reach};
use sample::Sample;
use substitution::Substitution;

/// The most samples that are certified together; the number has no influence on the result.
const BLOCK: usize = 8;

/// The bounds, each of which includes those before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Bound {
    /// The Lipschitz constant of every pair of classes.
    Global,
    /// In addition, interval iteration per input.
    Interval,
    /// In addition, linear relaxation per input.
    Linear,
    /// In addition, slopes of the lower lines improved by gradient steps.
    Slopes,
}

impl std::fmt::Display for Bound {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Bound::Global => "global",
            Bound::Interval => "interval",
            Bound::Linear => "linear",
            Bound::Slopes => "slopes",
        })
    }
}

/// The outputs that a certificate is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Arithmetic {
    /// Both the outputs in exact arithmetic and those of a single-precision run by this program on a processor.
    #[default]
    Single,
    /// The same, and the outputs of every other run that multiplies and adds in single precision, in whatever order: this
    /// program on a GPU, or another program. Runs in fewer bits (TF32, half precision) and convolutions that transform
    /// their maps first (Winograd) are not among them.
    AnyOrder,
    /// The outputs in exact arithmetic alone. The certifier's own rounding is still accounted for.
    Exact,
}

impl std::fmt::Display for Arithmetic {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Arithmetic::Single => "single",
            Arithmetic::AnyOrder => "any-order",
            Arithmetic::Exact => "exact",
        })
    }
}

/// What is certified, and with how much effort.
#[derive(Debug, Clone, PartialEq)]
pub struct CertifySettings {
    /// Largest changes, in raw·scale units.
    pub epsilon: Vec<f64>,
    /// The tightest bound to try; [`Bound::Slopes`] takes `slopes` steps. Default: linear.
    pub bound: Bound,
    /// Gradient steps on the slopes of lower lines, with [`Bound::Slopes`] alone. Default 0.
    pub slopes: usize,
    /// The norm in which a perturbation is at most ε. Default: every value on its own.
    pub norm: Norm,
    /// The outputs that must keep their class. Default: exact outputs and those of this program's run on a processor.
    pub arithmetic: Arithmetic,
    /// Multiply-adds that narrowing the intervals of one sample at one ε may cost, for linear bounds, counted over
    /// whole maps with all their zeros. A sample that needs more is given up at that ε. Default 2⁴¹, which takes
    /// about half a minute.
    pub work: u64,
}

impl Default for CertifySettings {
    fn default() -> Self {
        Self {
            epsilon: vec![1.0 / 255.0, 2.0 / 255.0],
            bound: Bound::Linear,
            slopes: 0,
            norm: Norm::Linf,
            arithmetic: Arithmetic::Single,
            work: 1 << 41,
        }
    }
}

/// The results of certification.
#[derive(Debug, Clone, PartialEq)]
pub struct CertifyReport {
    /// ε in the order asked for.
    pub epsilon: Vec<f64>,
    /// Number of samples that were examined.
    pub samples: usize,
    /// Share of samples that are classified correctly.
    pub clean_accuracy: f64,
    /// Share of samples that are classified correctly and proved to stay so; one for each ε.
    pub certified_accuracy: Vec<f64>,
    /// The same shares, with bounds up to each one only.
    pub by_bound: Vec<(Bound, Vec<f64>)>,
    /// For every sample and ε, whether it is classified correctly and proved to stay so.
    pub certified: Vec<Vec<bool>>,
    /// Number of samples without equilibrium; none of them is certified.
    pub not_converged: usize,
    /// Number of samples that were given up at some ε because their intervals would have cost more than the settings
    /// allow.
    pub given_up: usize,
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
    if (settings.bound == Bound::Slopes) != (settings.slopes > 0) {
        return Err(Error::setting(
            "slopes",
            "steps with the bound slopes, and none with another",
            format!("{} with the bound {}", settings.slopes, settings.bound),
        ));
    }
    let certifier = Certifier::new(model, per_feature, settings)?;
    // Smallest first: a sample that is not certified there is certified at no larger ε.
    let mut order: Vec<usize> = (0..settings.epsilon.len()).collect();
    order.sort_by(|&a, &b| settings.epsilon[a].total_cmp(&settings.epsilon[b]));
    let ascending: Vec<f64> = order.iter().map(|&k| settings.epsilon[k]).collect();
    let bounds: Vec<Bound> = [Bound::Global, Bound::Interval, Bound::Linear, Bound::Slopes]
        .into_iter()
        .filter(|b| *b <= settings.bound)
        .collect();
    let mut counts = vec![vec![0usize; ascending.len()]; bounds.len()];
    let (mut right, mut not_converged, mut given_up) = (0, 0, 0);
    let mut certified = Vec::with_capacity(samples);
    // With few samples every block is small, so that all threads have work.
    let size = (samples / (4 * threads.get())).clamp(1, BLOCK);
    parallel::fold(
        threads,
        samples.div_ceil(size),
        |block| {
            let range = block * size..((block + 1) * size).min(samples);
            let u = inputs.rows(range.clone())?;
            u.require_finite("inputs", range.start)?;
            certifier.block(&u, &labels[range], &ascending, cancel)
        },
        |_, verdicts: Vec<Verdict>| {
            for verdict in verdicts {
                right += usize::from(verdict.right);
                not_converged += usize::from(!verdict.converged);
                given_up += usize::from(verdict.given_up);
                for (count, reached) in counts.iter_mut().zip(&verdict.reached) {
                    count[..*reached].iter_mut().for_each(|c| *c += 1);
                }
                let mut row = vec![false; ascending.len()];
                let most = verdict.reached.last().copied().unwrap_or(0);
                order[..most].iter().for_each(|&k| row[k] = true);
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
        given_up,
    })
}

/// The results for one sample.
#[derive(Debug, Clone)]
struct Verdict {
    right: bool,
    converged: bool,
    given_up: bool,
    /// For every bound, the number of ε, in ascending order, up to which it or an earlier one certifies the sample.
    reached: Vec<usize>,
}

/// A model with the range of its data, prepared for certification.
pub(crate) struct Certifier<'a> {
    layout: &'a Layout,
    per_feature: &'a PerFeature,
    settings: &'a CertifySettings,
    equilibrium: Equilibrium,
    graph: Graph,
    cycle: Option<Cycle<'a>>,
}

/// Data that a model with cycles needs in addition to its graph.
struct Cycle<'a> {
    model: Cow<'a, ImplicitModel>,
    /// How far each of its states moves at most when inputs move by one unit.
    reach: Vec<f64>,
}

impl<'a> Certifier<'a> {
    pub(crate) fn new(
        model: &'a ImplicitModel,
        per_feature: &'a PerFeature,
        settings: &'a CertifySettings,
    ) -> Result<Self> {
        let graph = Graph::new(model, settings.arithmetic)?;
        let mut cycle = None;
        if let (Some(_), Some(plain)) = (&graph.turns, model.without_taps()) {
            let inverse: Vec<f64> = per_feature.std.iter().map(|s| 1.0 / s).collect();
            let reach = reach(&Stages::new(&plain)?, &inverse);
            cycle = Some(Cycle { model: plain, reach });
        }
        let equilibrium = Equilibrium::new(model, one_thread())?;
        Ok(Self { layout: model.layout(), per_feature, settings, equilibrium, graph, cycle })
    }

    /// The layers of the model.
    pub(crate) fn layout(&self) -> &Layout {
        self.layout
    }

    fn block(&self, u: &Matrix<f32>, labels: &[u32], ascending: &[f64], cancel: &Cancel) -> Result<Vec<Verdict>> {
        // Only models with cycles need their states.
        let (y, x, diagnostics) = if self.cycle.is_some() {
            let solution = self.equilibrium.run(u)?;
            (solution.y, Some(solution.x), solution.diagnostics)
        } else {
            let solution = self.equilibrium.outputs(u)?;
            (solution.y, None, solution.diagnostics)
        };
        let predicted = predictions(&y);
        let stages = self.cycle.as_ref().map(|c| Stages::new(&c.model)).transpose()?;
        let mut substitution = Substitution::new(&self.graph);
        let mut verdicts = Vec::with_capacity(u.rows());
        for s in 0..u.rows() {
            let mut verdict = Verdict {
                right: predicted[s] == labels[s],
                converged: diagnostics[s].converged,
                given_up: false,
                reached: vec![0; self.settings.bound as usize + 1],
            };
            if verdict.right && verdict.converged {
                let states = x.as_ref().map(|x| x.row(s)).zip(stages.as_ref());
                let mut sample = Sample {
                    certifier: self,
                    substitution: &mut substitution,
                    u: u.row(s),
                    label: labels[s] as usize,
                    states,
                    cancel,
                    given_up: false,
                    spent: 0,
                };
                verdict.reached = sample.reached(ascending)?;
                verdict.given_up = sample.given_up;
            }
            verdicts.push(verdict);
        }
        Ok(verdicts)
    }
}

fn one_thread() -> EquilibriumSettings {
    EquilibriumSettings { threads: Threads::one(), ..EquilibriumSettings::default() }
}

#[cfg(test)]
pub(crate) mod tests;
