//! The linear bounds of one sample as functions of the model's weights.
//!
//! With all lines held, what is proved of a difference of outputs is the value of a linear network at the point of the
//! input set where it is smallest. Its derivative by a weight is the coefficient of the pre-activation that the weight adds to,
//! times the value that it multiplies there. (How the weights move the intervals, and with them the lines, is left out.)

use super::boxes::Rule;
use super::sample::{Narrow, Sample, differences};
use super::slopes::Slopes;
use super::substitution::{LANES, Substitution, Until};
use super::{Bound, Certifier};
use crate::linalg::Matrix;
use crate::parallel::Cancel;
use crate::{Error, Result};

/// Where the differences of one sample's label and the other classes are smallest: one row for every other class.
pub(crate) struct Lowest {
    /// What is proved of each.
    pub(crate) margins: Vec<f64>,
    /// Inputs.
    pub(crate) u: Matrix<f32>,
    /// States by the chosen lines.
    pub(crate) x: Matrix<f32>,
    /// Coefficients of the states' pre-activations.
    pub(crate) r: Matrix<f32>,
    /// Coefficients of the outputs.
    pub(crate) v: Matrix<f32>,
}

impl Certifier<'_> {
    /// Of a sample at the largest ε of the settings; nothing where its intervals would cost too much. The model must not have cycles.
    pub(crate) fn lowest(&self, u: &[f32], label: usize, cancel: &Cancel) -> Result<Option<Lowest>> {
        let graph = &self.graph;
        if graph.turns.is_some() {
            return Err(Error::unsupported(
                "derivatives of bounds through a cycle",
                "they need a model without cycles",
            ));
        }
        debug_assert!(self.settings.bound >= Bound::Linear);
        let mut substitution = Substitution::new(graph);
        let mut sample = Sample {
            certifier: self,
            substitution: &mut substitution,
            u,
            label,
            states: None,
            cancel,
            given_up: false,
        };
        let epsilon = self.settings.epsilon.iter().copied().fold(0.0, f64::max);
        let input = sample.input(epsilon);
        let Some(all) = sample.boxes(&input, epsilon, Rule::Interval, Narrow::Unstable)? else { return Ok(None) };
        let others: Vec<usize> = (0..graph.outputs).filter(|j| *j != label).collect();
        let rows = |width| Matrix::<f32>::zeros(others.len(), width);
        let states = self.layout.size();
        let mut out =
            Lowest { margins: Vec::new(), u: rows(u.len()), x: rows(states), r: rows(states), v: rows(graph.outputs) };
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
                if let Some(own) = slopes.of_sums(node, &all[node]) {
                    copy(&own, &mut out.r, start);
                }
            }
            for (l, function) in functions.iter().enumerate() {
                function.iter().for_each(|&(unit, w)| out.v[(first + l, unit)] = w);
            }
        }
        Ok(Some(out))
    }
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

    /// With changes so small that every activation is a line, derivatives of what is proved are those that differences show.
    #[test]
    fn derivatives_are_those_of_the_bound() {
        let (mut r, mut seen) = (Random::new(41), 0);
        for _ in 0..12 {
            let model = random_model(&mut r, false, 0.8);
            let u: Vec<f32> = (0..SMALL).map(|_| r.uniform() as f32).collect();
            let features = PerFeature { scale: 1.0, mean: vec![0.0; SMALL], std: vec![0.5; SMALL] };
            let settings = CertifySettings { epsilon: vec![1e-4], ..CertifySettings::default() };
            let at = |model: &ImplicitModel| {
                Certifier::new(model, &features, &settings).unwrap().lowest(&u, 0, &Cancel::new()).unwrap().unwrap()
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
