//! Layers that are not sums: operators between values, and constants.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::graph::{Dims, Structure, Value};
use crate::{Error, Result};

/// The value that a summand or an operand starts from.
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
    /// The value that it reads.
    pub source: Source,
    /// The dimensions, for a batch of one sample.
    pub dims: Dims,
}

/// The ways to compute a layer without weights.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Operator {
    /// An operator of other layers.
    Structure {
        /// The operator.
        structure: Structure,
        /// The values that it reads.
        operands: Vec<Operand>,
    },
    /// Numbers that do not depend on the sample.
    Constant {
        /// The numbers; a file stores them apart from the layout.
        #[serde(skip)]
        values: Arc<Vec<f32>>,
        /// Whether they count as parameters of the network.
        parameter: bool,
    },
}

impl Operator {
    /// The name for messages.
    pub fn name(&self) -> &'static str {
        match self {
            Operator::Structure { structure, .. } => structure.name(),
            Operator::Constant { .. } => "a constant",
        }
    }

    /// The values that it reads; none for a constant.
    pub fn operands(&self) -> &[Operand] {
        match self {
            Operator::Structure { operands, .. } => operands,
            Operator::Constant { .. } => &[],
        }
    }

    /// The rows of a table that the numbers of a sample choose from, if it is one.
    pub(super) fn rows_for_inputs(&self) -> Option<usize> {
        match self {
            Operator::Structure { structure: Structure::Lookup, operands } => match operands.as_slice() {
                [table, Operand { source: Source::Input, .. }] => table.dims.sizes().first().copied(),
                _ => None,
            },
            _ => None,
        }
    }

    /// Computes one sample of the layer from the numbers of its operands, in their order.
    pub(crate) fn forward(&self, operands: &[&[f32]], out: &mut [f32]) {
        match self {
            Operator::Constant { values, .. } => out.copy_from_slice(values),
            Operator::Structure { structure, operands: about } => {
                structure.forward(&with_dims(about, operands), out);
            }
        }
    }

    /// The effect of changes `d` of the operands on the layer's value `out`, for one sample; a constant does not
    /// change.
    pub(crate) fn tangent(&self, operands: &[&[f32]], out: &[f32], d: &[&[f32]], into: &mut [f32]) {
        into.fill(0.0);
        if let Operator::Structure { structure, operands: about } = self {
            let dims = about.iter().map(|o| o.dims).collect::<Vec<_>>();
            // The dimensions were checked when the model was made.
            if let Ok(dims) = structure.dims(&dims) {
                structure.tangent(&with_dims(about, operands), Value { dims, data: out }, d, into);
            }
        }
    }

    /// Adds the contribution of the layer's cotangent `dout` to the cotangents of the operands, for one sample.
    pub(crate) fn adjoint(&self, operands: &[&[f32]], out: &[f32], dout: &[f32], into: &mut [Option<&mut [f32]>]) {
        if let Operator::Structure { structure, operands: about } = self {
            let dims = about.iter().map(|o| o.dims).collect::<Vec<_>>();
            // The dimensions were checked when the model was made.
            if let Ok(dims) = structure.dims(&dims) {
                structure.adjoint(&with_dims(about, operands), Value { dims, data: out }, dout, into);
            }
        }
    }

    /// Checks the operands against the sizes of what they read, and the result against the layer's size.
    pub(crate) fn check(&self, size: usize, source_size: impl Fn(Source) -> Option<usize>) -> Result<()> {
        let got = match self {
            Operator::Constant { values, .. } => {
                if let Some(v) = values.iter().find(|v| !v.is_finite()) {
                    return Err(Error::shape("constant", "finite numbers", v));
                }
                values.len()
            }
            Operator::Structure { structure, operands } => {
                for operand in operands {
                    match source_size(operand.source) {
                        Some(units) if units == operand.dims.size() => {}
                        Some(units) => {
                            return Err(Error::shape(
                                format!("operand {:?} of {}", operand.source, structure.name()),
                                format!("{units} units"),
                                operand.dims,
                            ));
                        }
                        None => return Err(Error::shape("operand", "a layer of the layout", format!("{operand:?}"))),
                    }
                }
                let dims: Vec<Dims> = operands.iter().map(|o| o.dims).collect();
                structure.dims(&dims)?.size()
            }
        };
        if got == size { Ok(()) } else { Err(Error::shape(self.name(), format!("{size} units"), got)) }
    }
}

fn with_dims<'a>(about: &[Operand], operands: &[&'a [f32]]) -> Vec<Value<'a>> {
    about.iter().zip(operands).map(|(about, &data)| Value { dims: about.dims, data }).collect()
}
