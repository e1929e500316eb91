//! Layers that are no sums: operators between values, and constants.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::graph::{Dims, Structure};

/// Where a summand or an operand starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// The sample, u.
    Input,
    /// The states x of a layer, by its number in the layout (last layer first).
    Layer(usize),
}

/// One operand of an operator: a layer or the input, under the dimensions in which the operator reads it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Operand {
    /// Where its numbers are.
    pub source: Source,
    /// For a batch of one sample.
    pub dims: Dims,
}

/// What computes a layer without weights.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Operator {
    /// An operator of other layers.
    Structure {
        /// Which.
        structure: Structure,
        /// What it reads.
        operands: Vec<Operand>,
    },
    /// Numbers that do not depend on the sample.
    Constant {
        /// The numbers; a file keeps them beside the layout.
        #[serde(skip)]
        values: Arc<Vec<f32>>,
        /// Whether they count as parameters of the network.
        parameter: bool,
    },
}
