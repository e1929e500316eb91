//! A summary of a network, layer by layer.

use super::terms::{PreActivation, Weights};
use super::{Network, Shape};
use crate::layout::{Activation, Layer, Operator};
use crate::states::StateMap;

/// One layer of a network, or its output.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerSummary {
    /// Its name.
    pub name: String,
    /// What computes it, such as "convolution, relu", "a softmax" or "constants".
    pub kind: String,
    /// Its shape for one sample.
    pub shape: Shape,
    /// Number of weights and biases, zeros included; scales, shifts and embeddings that stay are counted.
    pub parameters: usize,
    /// Multiply-adds of its weights per sample.
    pub multiply_adds: u64,
    /// Whether it has rows that training solves for.
    pub trainable: bool,
}

impl Network {
    /// All layers from the first to the last, and the output.
    pub fn summary(&self) -> Vec<LayerSummary> {
        let layers = self.layout().layers().iter().zip(self.pre_activations());
        let mut out: Vec<LayerSummary> =
            layers.map(|(layer, about)| describe(&layer.name, Some(layer), about)).collect();
        out.reverse();
        out.push(describe("output", None, self.output()));
        out
    }

    /// Weights and biases, zeros included, batch norm folded.
    pub fn parameters(&self) -> usize {
        self.summary().iter().map(|layer| layer.parameters).sum()
    }
}

fn describe(name: &str, layer: Option<&Layer>, about: &PreActivation) -> LayerSummary {
    let mut parts: Vec<String> = Vec::new();
    let mut parameters = about.bias.as_ref().map_or(0, Vec::len);
    let mut trainable = false;
    for term in &about.terms {
        let (part, count) = match &term.weights {
            Weights::Dense(weights) => ("dense", weights.as_slice().len()),
            Weights::Taps { weights, groups: 1, .. } => ("convolution", weights.as_slice().len()),
            Weights::Taps { weights, .. } => ("grouped convolution", weights.as_slice().len()),
            Weights::Identity => ("sum", 0),
        };
        parameters += count;
        trainable |= count > 0;
        if !parts.iter().any(|p| p == part) {
            parts.push(part.to_string());
        }
    }
    match &about.operator {
        Some(Operator::Structure { structure, .. }) => parts.push(structure.name().to_string()),
        Some(Operator::Constant { values, parameter }) => {
            parts.push("constants".to_string());
            parameters += if *parameter { values.len() } else { 0 };
        }
        None => {}
    }
    if let Some(layer) = layer.filter(|layer| layer.activation != Activation::Identity) {
        parts.push(layer.activation.to_string());
    }
    LayerSummary {
        name: name.to_string(),
        kind: parts.join(", "),
        shape: about.shape,
        parameters,
        multiply_adds: about.terms.iter().map(|term| term.weights.multiply_adds()).sum(),
        trainable,
    }
}
