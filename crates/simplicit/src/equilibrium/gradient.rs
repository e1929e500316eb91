//! Exact input gradients through the equilibrium.
//!
//! dy/du = C(I − ΦA)⁻¹ΦB + D with Φ = diag φ′(z). For a cotangent v of the outputs, w = Φ(Aᵀw + Cᵀv) and the gradient is
//! Bᵀw + Dᵀv: an equation of the same form as the model's, run by the same code on transposed matrices with gates Φ in
//! the place of φ. It contracts where the model does, in the weighted ℓ1 norm.

use super::program::{Equation, Norm, Program};
use super::{Equilibrium, EquilibriumSettings, EquilibriumSolution, Runner, SampleDiagnostics, activations, forward};
use crate::layout::Activation;
use crate::linalg::Matrix;
use crate::model::ImplicitModel;
use crate::{Error, Result};

/// A model made ready for gradients.
#[derive(Debug)]
pub struct InputGradient {
    equilibrium: Equilibrium,
    activations: Vec<Activation>,
    adjoint: Runner,
}

/// Vector–Jacobian products of a batch, one sample a row.
#[derive(Debug, Clone, PartialEq)]
pub struct GradientSolution {
    /// vᵀ dy/du, m × p.
    pub gradient: Matrix<f32>,
    /// Of the adjoint equation, in the ℓ1 norm, given the gates φ′(z) of the equilibrium it was asked at.
    pub diagnostics: Vec<SampleDiagnostics>,
}

impl std::fmt::Debug for Runner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Runner").field("units", &self.program.units()).finish_non_exhaustive()
    }
}

impl InputGradient {
    /// Schedules the model and its adjoint.
    pub fn new(model: &ImplicitModel, settings: EquilibriumSettings) -> Result<Self> {
        let activations = activations(model.layout());
        let (a, b, c, d) =
            (model.a().transposed(), model.b().transposed(), model.c().transposed(), model.d().transposed());
        let (state_bias, output_bias) = (vec![0.0; model.shape().states], vec![0.0; model.shape().inputs]);
        let adjoint = Program::new(
            &Equation {
                a: &a,
                b: &c,
                c: &b,
                d: &d,
                state_bias: &state_bias,
                output_bias: &output_bias,
                activations: None,
                norm: Norm::Sum,
                contracting: forward(model, &activations).a,
            },
            |_| true,
        );
        Ok(Self {
            equilibrium: Equilibrium::new(model, settings)?,
            activations,
            adjoint: Runner::new(adjoint, "cotangents"),
        })
    }

    /// The model's own run, for the states that [`InputGradient::at`] needs.
    pub fn equilibrium(&self) -> &Equilibrium {
        &self.equilibrium
    }

    /// Runs the batch `u` and pulls the cotangents `v` (m × q) of its outputs back to the inputs.
    pub fn run(&self, u: &Matrix<f32>, v: &Matrix<f32>) -> Result<(EquilibriumSolution, GradientSolution)> {
        let solution = self.equilibrium.run(u)?;
        let gradient = self.at(&solution.z, v)?;
        Ok((solution, gradient))
    }

    /// Pulls the cotangents `v` (m × q) back to the inputs, at pre-activations `z` (m × n) already computed.
    pub fn at(&self, z: &Matrix<f32>, v: &Matrix<f32>) -> Result<GradientSolution> {
        let shape = self.equilibrium.shape;
        for (name, matrix, columns) in [("Z", z, shape.states), ("cotangents", v, shape.outputs)] {
            if (matrix.rows(), matrix.cols()) != (v.rows(), columns) {
                return Err(Error::shape(
                    name,
                    format!("{} × {columns}", v.rows()),
                    format!("{} × {}", matrix.rows(), matrix.cols()),
                ));
            }
        }
        let order = &self.adjoint.program.order;
        let gates =
            Matrix::from_fn(z.rows(), order.len(), |s, k| self.activations[order[k]].derivative(z[(s, order[k])]));
        let p = shape.inputs;
        let mut solution =
            GradientSolution { gradient: Matrix::zeros(v.rows(), p), diagnostics: Vec::with_capacity(v.rows()) };
        let (limits, threads) = (self.equilibrium.limits, self.equilibrium.threads);
        self.adjoint.batch(v, Some(&gates), false, limits, threads, |first, part| {
            solution.gradient.as_mut_slice()[first * p..][..part.y.len()].copy_from_slice(&part.y);
            solution.diagnostics.extend_from_slice(&part.diagnostics);
        })?;
        Ok(solution)
    }
}
