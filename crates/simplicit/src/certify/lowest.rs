//! The linear bounds of one sample as functions of the model's weights.
//!
//! With all lines held, what is proved of a difference of outputs is the value of a linear network at the point of
//! the input set where it is smallest. Its derivative by a weight is the coefficient of the pre-activation that the
//! weight adds to, times the value that it multiplies there. Weights also move the intervals, and with them the upper
//! lines of unstable units. How narrowed intervals move is estimated from plain ones: the distance of an end from the
//! clean value is taken as a fixed share of the half-width that follows from the intervals of what the unit reads
//! ([`Spread`]).

use super::boxes::{self, Bounds, Rule};
use super::graph::Kind;
use super::region::InputSet;
use super::relaxation::Lines;
use super::sample::{Narrow, Sample, differences};
use super::slopes::Slopes;
use super::substitution::{LANES, Substitution, Until};
use super::{Bound, Certifier};
use crate::linalg::Matrix;
use crate::parallel::Cancel;
use crate::{Error, Result};

/// How far the pre-activations of one sample go below and above their clean values, as shares of what the intervals of the node
/// before allow: one number per state.
pub(crate) struct Spread {
    pub(crate) below: Vec<f32>,
    pub(crate) above: Vec<f32>,
    /// Multiply-adds that computing it took.
    pub(crate) work: u64,
}

/// The points where the differences between the output of a sample's label and those of the other classes are
/// smallest: one row for every other class.
pub(crate) struct Lowest {
    /// The proved lower bound of each difference, if the intervals are right; rounding is not counted.
    pub(crate) margins: Vec<f64>,
    /// The inputs at these points.
    pub(crate) u: Matrix<f32>,
    /// The states at these points, by the chosen lines.
    pub(crate) x: Matrix<f32>,
    /// Coefficients of the states' pre-activations.
    pub(crate) r: Matrix<f32>,
    /// Coefficients of the outputs.
    pub(crate) v: Matrix<f32>,
    /// Derivatives by the ends of the states' intervals, which move the lines.
    pub(crate) by_low: Matrix<f32>,
    pub(crate) by_high: Matrix<f32>,
    /// The intervals of the states' pre-activations.
    pub(crate) ends: Vec<(f32, f32)>,
    /// Half of the width of every interval of an input and of a state, one row each.
    pub(crate) half: (Matrix<f32>, Matrix<f32>),
    /// Pre-activations and states of the sample without any change, one row each.
    pub(crate) clean: (Matrix<f32>, Matrix<f32>),
    /// The outputs of the sample without any change, one row.
    pub(crate) outputs: Matrix<f32>,
}

impl Certifier<'_> {
    fn largest_epsilon(&self) -> f64 {
        self.settings.epsilon.iter().copied().fold(0.0, f64::max)
    }

    /// The lower bounds that linear bounds prove for the differences between the output of a sample's label and those
    /// of the other classes, at the largest ε of the settings; `None` where the intervals would cost too much.
    pub(crate) fn proved(&self, u: &[f32], label: usize, cancel: &Cancel) -> Result<Option<Vec<f64>>> {
        let found = self.narrowed(u, label, cancel, |sample, all, input| {
            sample.margins(&all, input, Until::Input).into_iter().map(|(_, least)| least).collect()
        })?;
        Ok(found.map(|(margins, _)| margins))
    }

    /// The intervals of a sample at the largest ε of the settings; `None` where they would cost too much.
    pub(crate) fn spread(&self, u: &[f32], cancel: &Cancel) -> Result<Option<Spread>> {
        let z = self.equilibrium.run(&one_row(u)?)?.z;
        let found = self.narrowed(u, 0, cancel, |_, all, _| {
            let mut spread = Spread { below: vec![0.0; z.cols()], above: vec![0.0; z.cols()], work: 0 };
            for (k, &node) in self.graph.layers.iter().enumerate() {
                let plain = Bounds::sum(&self.graph, node, &all);
                for (at, i) in self.layout.range(k).enumerate() {
                    let (z, half) = (f64::from(z[(0, i)]), 0.5 * (plain.high[at] - plain.low[at]));
                    if half > 0.0 {
                        spread.below[i] = ((z - all[node].low[at]) / half) as f32;
                        spread.above[i] = ((all[node].high[at] - z) / half) as f32;
                    }
                }
            }
            spread
        })?;
        Ok(found.map(|(spread, work)| Spread { work, ..spread }))
    }

    /// Calls a function with a sample's narrowed intervals; also returns the multiply-adds that narrowing took.
    fn narrowed<T>(
        &self,
        u: &[f32],
        label: usize,
        cancel: &Cancel,
        ask: impl FnOnce(&mut Sample, Vec<Bounds>, &InputSet) -> T,
    ) -> Result<Option<(T, u64)>> {
        let graph = &self.graph;
        if graph.turns.is_some() {
            return Err(Error::unsupported(
                "derivatives of bounds through a cycle",
                "they need a model without cycles",
            ));
        }
        debug_assert!(self.settings.bound >= Bound::Linear);
        let mut substitution = Substitution::new(graph);
        let substitution = &mut substitution;
        let mut sample =
            Sample { certifier: self, substitution, u, label, states: None, cancel, given_up: false, spent: 0 };
        let epsilon = self.largest_epsilon();
        let input = sample.input(epsilon);
        let Some(all) = sample.boxes(&input, epsilon, Rule::Interval, Narrow::Unstable)? else { return Ok(None) };
        let found = ask(&mut sample, all, &input);
        Ok(Some((found, sample.spent)))
    }

    /// The bounds of all nodes with the intervals of a spread.
    fn around(&self, z: &[f32], spread: &Spread, input: &InputSet) -> Vec<Bounds> {
        let graph = &self.graph;
        let mut layer_of = vec![None; graph.nodes.len()];
        graph.layers.iter().enumerate().for_each(|(k, &node)| layer_of[node] = Some(k));
        let mut all: Vec<Bounds> = Vec::with_capacity(graph.nodes.len());
        for (k, node) in graph.nodes.iter().enumerate() {
            let bounds = match (&node.kind, layer_of[k]) {
                (Kind::Input, _) => Bounds::of_values(input.low.clone(), input.high.clone()),
                (Kind::Sum, Some(layer)) if !node.activations.is_empty() => {
                    let mut bounds = Bounds::sum(graph, k, &all);
                    for (at, i) in self.layout.range(layer).enumerate() {
                        let half = 0.5 * (bounds.high[at] - bounds.low[at]);
                        bounds.low[at] = f64::from(z[i]) - f64::from(spread.below[i]) * half;
                        bounds.high[at] = f64::from(z[i]) + f64::from(spread.above[i]) * half;
                    }
                    bounds.activate(node, Rule::Interval);
                    bounds
                }
                _ => boxes::of_node(graph, k, &all, Rule::Interval),
            };
            all.push(bounds);
        }
        all
    }

    /// The lowest points of a sample at the largest ε of the settings, with the intervals of a spread around its
    /// clean values. The model must not have cycles.
    pub(crate) fn lowest(&self, u: &[f32], spread: &Spread, label: usize) -> Result<Lowest> {
        let graph = &self.graph;
        let clean = self.equilibrium.run(&one_row(u)?)?;
        let input = InputSet::new(u, self.per_feature, self.largest_epsilon(), self.settings.norm);
        let mut substitution = Substitution::new(graph);
        let all = self.around(clean.z.row(0), spread, &input);
        let others: Vec<usize> = (0..graph.outputs).filter(|j| *j != label).collect();
        let rows = |width| Matrix::<f32>::zeros(others.len(), width);
        let states = self.layout.size();
        let mut out = Lowest {
            margins: Vec::new(),
            u: rows(u.len()),
            x: rows(states),
            r: rows(states),
            v: rows(graph.outputs),
            by_low: rows(states),
            by_high: rows(states),
            ends: vec![(0.0, 0.0); states],
            half: (Matrix::zeros(1, u.len()), Matrix::zeros(1, states)),
            outputs: clean.y,
            clean: (clean.z, clean.x),
        };
        let half = |low: f64, high: f64| (0.5 * (high - low)) as f32;
        for (to, (low, high)) in out.half.0.row_mut(0).iter_mut().zip(input.low.iter().zip(&input.high)) {
            *to = half(*low, *high);
        }
        for (k, &node) in graph.layers.iter().enumerate() {
            let bounds = &all[node];
            for (at, i) in self.layout.range(k).enumerate() {
                out.ends[i] = (bounds.low[at] as f32, bounds.high[at] as f32);
                out.half.1[(0, i)] = half(bounds.x_low[at], bounds.x_high[at]);
            }
        }
        for (part, classes) in others.chunks(LANES).enumerate() {
            let first = part * LANES;
            let functions = differences(label, classes);
            let mut slopes = Slopes::new(graph, &all, graph.output());
            let top = graph.output();
            let least = substitution.lower(top, &functions, &all, &input, Until::Input, Some(&mut slopes));
            out.margins.extend(&least[..classes.len()]);
            let values = substitution.lowest_at(&mut slopes, &all, &input, classes.len());
            let copy = |from: &[f32], to: &mut Matrix<f32>, start: usize| {
                for (i, row) in from.as_chunks::<LANES>().0.iter().enumerate() {
                    (0..classes.len()).for_each(|l| to[(first + l, start + i)] = row[l]);
                }
            };
            copy(&values[0], &mut out.u, 0);
            for (k, &node) in graph.layers.iter().enumerate() {
                let start = self.layout.range(k).start;
                copy(&values[node], &mut out.x, start);
                let Some(own) = slopes.of_sums(node, &all[node]) else { continue };
                copy(&own, &mut out.r, start);
                let (by_low, by_high) = by_ends(self, node, &all[node], &values[node], &own);
                copy(&by_low, &mut out.by_low, start);
                copy(&by_high, &mut out.by_high, start);
            }
            for (l, function) in functions.iter().enumerate() {
                function.iter().for_each(|&(unit, w)| out.v[(first + l, unit)] = w);
            }
        }
        Ok(out)
    }
}

fn one_row(u: &[f32]) -> Result<Matrix<f32>> {
    Matrix::from_vec(1, u.len(), u.to_vec())
}

/// Derivatives of the functions by the lower and upper ends of a node's intervals, units × lanes: `own` are the coefficients of its
/// pre-activations, `x` its values by the lines.
///
/// The chord above an unstable unit with slope b on the left is s·z + a with s = (h − b·l)/(h − l) and a = (b − s)·l.
fn by_ends(certifier: &Certifier, node: usize, bounds: &Bounds, x: &[f32], own: &[f32]) -> (Vec<f32>, Vec<f32>) {
    let (mut by_low, mut by_high) = (vec![0.0f32; own.len()], vec![0.0f32; own.len()]);
    for (range, activation) in &certifier.graph.nodes[node].activations {
        for i in range.clone() {
            let (low, high) = (bounds.low[i], bounds.high[i]);
            let Some((bend, _)) = Lines::free_slopes(*activation, low, high) else { continue };
            let (bend, slope) = (f64::from(bend), f64::from(bounds.lines[i].upper));
            let steeper = (1.0 - bend) / (high - low).powi(2);
            for l in i * LANES..(i + 1) * LANES {
                // A negative coefficient of a value takes the chord; lower lines do not depend on the ends.
                if own[l] < 0.0 && slope > 0.0 {
                    let z = (f64::from(x[l]) - bounds.lines[i].above) / slope;
                    let coefficient = f64::from(own[l]) / slope;
                    by_low[l] = (coefficient * ((z - low) * high * steeper + bend - slope)) as f32;
                    by_high[l] = (coefficient * (low - z) * low * steeper) as f32;
                }
            }
        }
    }
    (by_low, by_high)
}

#[cfg(test)]
mod tests {
    use super::super::tests::{SMALL, random_model};
    use super::*;
    use crate::arrays::PerFeature;
    use crate::certify::CertifySettings;
    use crate::linalg::Csr;
    use crate::model::ImplicitModel;
    use crate::random::Random;

    /// With changes so small that every activation is a line, the derivatives of the bound agree with differences.
    #[test]
    fn derivatives_are_those_of_the_bound() {
        let (mut r, mut seen) = (Random::new(41), 0);
        for _ in 0..12 {
            let model = random_model(&mut r, false, 0.8);
            let u: Vec<f32> = (0..SMALL).map(|_| r.uniform() as f32).collect();
            let features = PerFeature { scale: 1.0, mean: vec![0.0; SMALL], std: vec![0.5; SMALL] };
            let settings = CertifySettings { epsilon: vec![1e-4], ..CertifySettings::default() };
            let at = |model: &ImplicitModel| {
                let certifier = Certifier::new(model, &features, &settings).unwrap();
                let spread = certifier.spread(&u, &Cancel::new()).unwrap().unwrap();
                certifier.lowest(&u, &spread, 0).unwrap()
            };
            let found = at(&model);
            let moved = |by: f32, which: usize, i: usize, j: usize| {
                let mut parts = model.clone().into_parts();
                let m = [&mut parts.a, &mut parts.b, &mut parts.c, &mut parts.d].into_iter().nth(which).unwrap();
                let row = |k: usize| m.row(k).map(move |(c, w)| (c, if (k, c) == (i, j) { w + by } else { w }));
                let other = Csr::from_rows(m.cols(), (0..m.rows()).map(row));
                *m = other;
                at(&ImplicitModel::new(parts).unwrap()).margins
            };
            for (which, m) in [model.a(), model.b(), model.c(), model.d()].into_iter().enumerate() {
                for i in 0..m.rows() {
                    let Some((j, _)) = m.row(i).nth(r.below(3)) else { continue };
                    let (more, less) = (moved(1e-3, which, i, j), moved(-1e-3, which, i, j));
                    for k in 0..found.margins.len() {
                        let left = if which < 2 { found.r[(k, i)] } else { found.v[(k, i)] };
                        let right = if which % 2 == 0 { found.x[(k, j)] } else { found.u[(k, j)] };
                        let (slope, expected) = (f64::from(left * right), (more[k] - less[k]) / 2e-3);
                        assert!(
                            (slope - expected).abs() < 0.01 * (0.2 + expected.abs()),
                            "{which} {i} {j}: {slope} {expected}"
                        );
                        seen += usize::from(expected.abs() > 0.1);
                    }
                }
            }
        }
        assert!(seen > 200, "{seen}");
    }
}
