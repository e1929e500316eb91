//! Runs a model on a batch: all of it, through cycles if there are any, or some of its layers from values that are
//! given.

use super::equilibrium;
use super::problem::Given;
use crate::Result;
use crate::equilibrium::{Equilibrium, LayerSum};
use crate::linalg::Matrix;
use crate::model::{ImplicitModel, Target};
use crate::network::Source;
use crate::train::evidence::walk::activated;
use crate::train::refit::linearised::Scope;

/// The ways to run a batch.
pub(super) enum Runner {
    All(Box<Equilibrium>),
    Part(Box<Part>),
}

/// Layers in their order, and the outputs if they are needed.
pub(super) struct Part {
    scope: Scope,
    layers: Vec<LayerSum>,
    activations: Vec<crate::layout::Activation>,
    outputs: Option<LayerSum>,
}

/// The values of a batch, in the columns of the scope. The pre-activations of given layers are not known and set to
/// zero.
pub(super) struct Ran {
    pub(super) z: Matrix<f32>,
    pub(super) x: Matrix<f32>,
    pub(super) y: Matrix<f32>,
}

impl Runner {
    pub(super) fn new(model: &ImplicitModel, part: Option<&Scope>) -> Result<Self> {
        let Some(scope) = part else { return Ok(Self::All(Box::new(equilibrium(model)?))) };
        let layers = scope.order.iter().map(|&k| LayerSum::new(model, Target::Layer(k))).collect();
        let activations = scope.order.iter().map(|&k| model.layout().layers()[k].activation).collect();
        let outputs = scope.outputs.then(|| LayerSum::new(model, Target::Output));
        Ok(Self::Part(Box::new(Part { scope: scope.clone(), layers, activations, outputs })))
    }

    /// The values of a batch; `None` if a sample has no equilibrium.
    pub(super) fn run(&self, given: &Given) -> Result<Option<Ran>> {
        match self {
            Self::All(equilibrium) => {
                let solution = equilibrium.run(&given.u)?;
                let converged = solution.diagnostics.iter().all(|d| d.converged);
                Ok(converged.then_some(Ran { z: solution.z, x: solution.x, y: solution.y }))
            }
            Self::Part(part) => Ok(Some(part.run(given)?)),
        }
    }

    /// The values of a batch; for a sample without equilibrium, those of the last step.
    pub(super) fn states(&self, given: &Given) -> Result<Ran> {
        match self {
            Self::All(equilibrium) => {
                let solution = equilibrium.run(&given.u)?;
                Ok(Ran { z: solution.z, x: solution.x, y: solution.y })
            }
            Self::Part(part) => part.run(given),
        }
    }
}

impl Part {
    fn run(&self, given: &Given) -> Result<Ran> {
        let (scope, samples) = (&self.scope, given.u.rows());
        let mut z = Matrix::zeros(samples, scope.width);
        let mut x = Matrix::zeros(samples, scope.width);
        let copy = |from: &Matrix<f32>, k: usize, into: &mut Matrix<f32>| {
            (0..samples).for_each(|s| into.row_mut(s)[scope.columns[k].clone()].copy_from_slice(from.row(s)));
        };
        for (&k, values) in scope.given.iter().zip(&given.layers) {
            copy(values, k, &mut x);
        }
        let mut own: Vec<Matrix<f32>> = Vec::with_capacity(self.layers.len());
        let sum = |layer: &LayerSum, own: &[Matrix<f32>]| {
            layer.pre_activations(samples, |source| match source {
                Source::Input => given.u.as_slice(),
                Source::Layer(k) => {
                    let before = scope.given.iter().position(|j| *j == k).and_then(|at| given.layers.get(at));
                    let here = || scope.order.iter().position(|j| *j == k).and_then(|at| own.get(at));
                    before.or_else(here).map_or(&[][..], |m| m.as_slice())
                }
            })
        };
        for ((&k, layer), activation) in scope.order.iter().zip(&self.layers).zip(&self.activations) {
            let values = sum(layer, &own)?;
            copy(&values, k, &mut z);
            let values = activated(values, *activation);
            copy(&values, k, &mut x);
            own.push(values);
        }
        let y = match &self.outputs {
            Some(outputs) => sum(outputs, &own)?,
            None => Matrix::zeros(samples, 0),
        };
        Ok(Ran { z, x, y })
    }
}
