//! Exact input gradients through the equilibrium.
//!
//! dy/du = C(I − ΦA)⁻¹ΦB + D with Φ = diag φ′(z). For a cotangent v of the outputs, w = Φ(Aᵀw + Cᵀv) and the gradient is
//! Bᵀw + Dᵀv: an equation of the same form as the model's, run by the same code on transposed matrices with gates Φ in
//! the place of φ. It contracts where the model does, in the weighted ℓ1 norm.

use super::adjoint::{AdjointProgram, AdjointWorkspace, LANES};
use super::prepared::Part;
use super::program::{Equation, Norm, Program};
use super::{
    Equilibrium, EquilibriumSettings, EquilibriumSolution, Runner, SampleDiagnostics, Workspaces, forward, not_finite,
    scheduled,
};
use crate::layout::Activation;
use crate::linalg::Matrix;
use crate::linalg::lanes::from_lanes;
use crate::model::ImplicitModel;
use crate::parallel::Threads;
use crate::{Error, Result};

/// A model prepared for gradients.
#[derive(Debug)]
pub struct InputGradient {
    equilibrium: Equilibrium,
    adjoint: Adjoint,
}

/// The adjoint equation, run in the same way as the model.
enum Adjoint {
    Scheduled { activations: Vec<Activation>, runner: Box<Runner> },
    Layered { program: AdjointProgram, workspaces: Workspaces<AdjointWorkspace> },
}

impl std::fmt::Debug for Adjoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Adjoint")
    }
}

/// Vector–Jacobian products of a batch, one sample a row.
#[derive(Debug, Clone, PartialEq)]
pub struct GradientSolution {
    /// vᵀ dy/du, m × p.
    pub gradient: Matrix<f32>,
    /// Diagnostics of the adjoint equation, in the ℓ1 norm, given the gates φ′(z) of the equilibrium.
    pub diagnostics: Vec<SampleDiagnostics>,
}

impl InputGradient {
    /// Schedules the model and its adjoint.
    pub fn new(model: &ImplicitModel, settings: EquilibriumSettings) -> Result<Self> {
        let equilibrium = Equilibrium::new(model, settings)?;
        if model.layers_are_acyclic() {
            let adjoint = Adjoint::Layered { program: AdjointProgram::new(model), workspaces: Workspaces::new() };
            return Ok(Self { equilibrium, adjoint });
        }
        let model = scheduled(model)?;
        let activations = model.layout().activations();
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
                contracting: forward(&model, &activations).a,
            },
            |_| true,
        );
        let adjoint = Adjoint::Scheduled { activations, runner: Box::new(Runner::new(adjoint, "cotangents")) };
        Ok(Self { equilibrium, adjoint })
    }

    /// The model's own equilibrium, for the states that [`InputGradient::at`] needs.
    pub fn equilibrium(&self) -> &Equilibrium {
        &self.equilibrium
    }

    /// Runs the batch `u` and pulls the cotangents `v` (m × q) of its outputs back to the inputs.
    pub fn run(&self, u: &Matrix<f32>, v: &Matrix<f32>) -> Result<(EquilibriumSolution, GradientSolution)> {
        let solution = self.equilibrium.run(u)?;
        let gradient = self.pull(&solution.z, Some(u), v)?;
        Ok((solution, gradient))
    }

    /// Pulls the cotangents `v` (m × q) back to the inputs, at pre-activations `z` (m × n) already computed. Where a maximum
    /// of the inputs themselves is taken, `z` does not say which of them it was: see [`InputGradient::at_inputs`].
    pub fn at(&self, z: &Matrix<f32>, v: &Matrix<f32>) -> Result<GradientSolution> {
        self.pull(z, None, v)
    }

    /// As [`InputGradient::at`], also where a maximum or another operator reads the inputs `u` themselves.
    pub fn at_inputs(&self, u: &Matrix<f32>, z: &Matrix<f32>, v: &Matrix<f32>) -> Result<GradientSolution> {
        self.pull(z, Some(u), v)
    }

    /// The derivative of Σ v·y by every pre-activation, m × n, at pre-activations `z` of the inputs `u`; for any
    /// model.
    pub(crate) fn pre_activations(&self, z: &Matrix<f32>, u: &Matrix<f32>, v: &Matrix<f32>) -> Result<Matrix<f32>> {
        let (n, threads) = (self.equilibrium.shape.states, self.equilibrium.threads);
        let mut out = Matrix::zeros(v.rows(), n);
        match &self.adjoint {
            Adjoint::Layered { program, workspaces } => {
                layered(program, workspaces, (z, Some(u)), v, threads, true, |first, part| {
                    out.as_mut_slice()[first * n..][..part.x.len()].copy_from_slice(&part.x);
                })?;
            }
            Adjoint::Scheduled { activations, runner } => {
                let order = &runner.program.order;
                let gates = gates(z, activations, order);
                runner.batch(v, Some(&gates), true, self.equilibrium.limits, threads, |first, part| {
                    for (k, from) in part.x.chunks_exact(n.max(1)).enumerate() {
                        order.iter().zip(from).for_each(|(&i, w)| out[(first + k, i)] = *w);
                    }
                })?;
            }
        }
        Ok(out)
    }

    fn pull(&self, z: &Matrix<f32>, u: Option<&Matrix<f32>>, v: &Matrix<f32>) -> Result<GradientSolution> {
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
        let p = shape.inputs;
        let mut solution =
            GradientSolution { gradient: Matrix::zeros(v.rows(), p), diagnostics: Vec::with_capacity(v.rows()) };
        let (limits, threads) = (self.equilibrium.limits, self.equilibrium.threads);
        let take = |first: usize, part: Part| {
            solution.gradient.as_mut_slice()[first * p..][..part.y.len()].copy_from_slice(&part.y);
            solution.diagnostics.extend_from_slice(&part.diagnostics);
        };
        match &self.adjoint {
            Adjoint::Scheduled { activations, runner } => {
                let gates = gates(z, activations, &runner.program.order);
                runner.batch(v, Some(&gates), false, limits, threads, take)?;
            }
            Adjoint::Layered { program, workspaces } => layered(program, workspaces, (z, u), v, threads, false, take)?,
        }
        Ok(solution)
    }
}

/// φ′(z), with the states in schedule order.
fn gates(z: &Matrix<f32>, activations: &[Activation], order: &[usize]) -> Matrix<f32> {
    Matrix::from_fn(z.rows(), order.len(), |s, k| activations[order[k]].derivative(z[(s, order[k])]))
}

/// Number of lanes for this many samples: whole vectors if there are many, no more than needed if there are few.
fn lanes_for(count: usize) -> usize {
    match count {
        0..=8 => count,
        _ => LANES,
    }
}

fn layered(
    program: &AdjointProgram,
    workspaces: &Workspaces<AdjointWorkspace>,
    (z, u): (&Matrix<f32>, Option<&Matrix<f32>>),
    v: &Matrix<f32>,
    threads: Threads,
    states: bool,
    take: impl FnMut(usize, Part),
) -> Result<()> {
    if u.is_none() && program.needs_inputs() {
        return Err(Error::unsupported(
            "a gradient at pre-activations through a max pooling of the inputs",
            "which input is the largest cannot be seen there; use InputGradient::run",
        ));
    }
    let (n, q, p) = (program.states, program.outputs, program.inputs);
    workspaces.batch(
        (v.rows(), LANES),
        threads,
        || AdjointWorkspace::new(program),
        |workspace, samples| {
            let count = samples.len();
            let lanes = lanes_for(count);
            let of = |width: usize| samples.start * width..samples.end * width;
            let at = (&z.as_slice()[of(n)], u.map(|u| &u.as_slice()[of(p)]));
            workspace
                .run(program, at, &v.as_slice()[of(q)], (lanes, count))
                .map_err(|sample| not_finite("cotangents", v, samples.start + sample))?;
            let mut part =
                Part { z: vec![], x: vec![], y: vec![0.0; count * p], diagnostics: workspace.samples.clone() };
            from_lanes(&mut part.y, p, &workspace.du, count, p, lanes);
            if states {
                part.x.resize(count * n, 0.0);
                from_lanes(&mut part.x, n, &workspace.w, count, n, lanes);
            }
            Ok(part)
        },
        take,
    )
}
