//! The connections that the settings allow, and the plan that follows from them.

use super::{Plan, choice};
use crate::layout::Layout;
use crate::linalg::Matrix;
use crate::model::{ImplicitModel, TapBlock, TapWeights, Target};
use crate::network::Source;
use crate::problem::{Connectivity, Mask};
use crate::states::StateShape;
use crate::train::{TrainInput, TrainSettings, layout};
use crate::{Error, Result};

/// The connections that the settings allow between single units.
pub(in crate::train) fn mask(input: &TrainInput, settings: &TrainSettings) -> Result<Mask> {
    let shape = input.source.shape();
    let layout = layout(input);
    let known = input.source.layers_are_known();
    if layout.rows() != layout.size() {
        return Err(Error::unsupported(
            "training from stored states of feature maps",
            "give the network and its inputs, so that weights can be shared over positions",
        ));
    }
    let pattern = match input.baseline {
        Some(baseline) => baseline.without_taps().map(|b| pattern(&b)),
        None => known.then(|| layered(layout, shape)),
    };
    if matches!(settings.allowed.connectivity, Connectivity::Feedforward) && !known {
        return Err(Error::setting(
            "connectivity",
            "full, no-self-loop or mask for states whose layers are not known",
            "feedforward",
        ));
    }
    settings.allowed.connectivity.mask(layout, shape.inputs, shape.outputs, pattern.as_ref())
}

/// The baseline, if it is walked through layer by layer.
pub(in crate::train) fn walked<'a>(input: &TrainInput<'a>, settings: &TrainSettings) -> Option<&'a ImplicitModel> {
    let acyclic = matches!(settings.allowed.connectivity, Connectivity::Baseline | Connectivity::Feedforward);
    // Residual sums alone do not prevent cycles.
    let shared = |b: &&ImplicitModel| {
        b.layout().has_operators() || !b.taps().is_empty() && (acyclic || b.without_taps().is_none())
    };
    input.baseline.filter(shared)
}

/// The rows to solve, and their order.
pub(in crate::train) fn plan(input: &TrainInput, settings: &TrainSettings) -> Result<Plan> {
    let constant = constants(input, settings);
    let mut plan = match walked(input, settings) {
        Some(baseline) => {
            require_no_residual_ball(baseline, settings)?;
            Plan::taps(baseline, &settings.allowed.connectivity, settings.allowed.reach, &constant)?
        }
        None => Plan::dense(layout(input), input.source.shape(), &mask(input, settings)?, &constant),
    };
    plan.keep(choice::kept(input, settings)?);
    Ok(plan)
}

/// Refuses a bound on ‖A‖∞ below 1 if a residual sum of states alone makes ‖A‖∞ ≥ 1.
fn require_no_residual_ball(baseline: &ImplicitModel, settings: &TrainSettings) -> Result<()> {
    let residual = |b: &&TapBlock| {
        !matches!(b.weights, TapWeights::Taps(_))
            && matches!((b.target, b.source), (Target::Layer(_), Source::Layer(_)))
    };
    match (settings.allowed.kappa, baseline.taps().iter().find(residual)) {
        (Some(kappa), Some(block)) => {
            let name = match block.target {
                Target::Layer(k) => baseline.layout().layers()[k].name.clone(),
                Target::Output => "outputs".to_string(),
            };
            Err(Error::setting(
                "kappa",
                format!("none for a network with residual sums (layer {name:?}), which make ‖A‖∞ at least 1"),
                kappa,
            ))
        }
        _ => Ok(()),
    }
}

/// The baseline's connections, (n + q) × (n + p).
fn pattern(baseline: &ImplicitModel) -> Mask {
    let StateShape { inputs, states, outputs } = baseline.shape();
    let mut pattern = Matrix::zeros(states + outputs, states + inputs);
    for (matrix, row, col) in
        [(baseline.a(), 0, 0), (baseline.b(), 0, states), (baseline.c(), states, 0), (baseline.d(), states, states)]
    {
        for i in 0..matrix.rows() {
            for (j, _) in matrix.row(i) {
                pattern[(row + i, col + j)] = 1.0;
            }
        }
    }
    Mask::from_pattern(&pattern)
}

/// The connections of a layered network with these layers: every layer reads the one before it, the first the inputs,
/// the outputs the last.
fn layered(layout: &Layout, shape: StateShape) -> Mask {
    let n = shape.states;
    let reads = |layer: usize| if layer < layout.layers().len() { layout.range(layer) } else { n..n + shape.inputs };
    let before: Vec<std::ops::Range<usize>> = (0..n).map(|i| reads(layout.layer_of(i).map_or(0, |k| k + 1))).collect();
    Mask::from_fn(n + shape.outputs, n + shape.inputs, |i, j| before.get(i).unwrap_or(&reads(0)).contains(&j))
}

/// The rows that have a constant: those of baseline layers with a bias, or all if the settings ask for it.
fn constants(input: &TrainInput, settings: &TrainSettings) -> Vec<bool> {
    let layout = layout(input);
    let states = layout.rows();
    let mut constant = vec![settings.allowed.bias; states + input.source.shape().outputs];
    if let Some(baseline) = input.baseline {
        for k in 0..layout.layers().len() {
            let rows = layout.row_range(k);
            if baseline.state_bias()[rows.clone()].iter().any(|b| *b != 0.0) {
                constant[rows].fill(true);
            }
        }
        if baseline.output_bias().iter().any(|b| *b != 0.0) {
            constant[states..].fill(true);
        }
    }
    constant
}
