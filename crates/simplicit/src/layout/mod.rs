//! Which rows of Z and X belong to which layer, and the activation of each layer.

mod activation;
mod operator;

pub use activation::Activation;
pub use operator::{Operand, Operator, Source};

use serde::{Deserialize, Serialize};

use crate::graph::chooses_a_row;
use crate::linalg::Matrix;
use crate::{Error, Result};

/// Channels × height × width of a feature map.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct MapShape {
    /// Channels.
    pub channels: usize,
    /// Rows of pixels.
    pub height: usize,
    /// Columns of pixels.
    pub width: usize,
}

impl MapShape {
    /// Number of units.
    pub fn size(self) -> usize {
        self.channels * self.height * self.width
    }

    /// Number of positions, height × width.
    pub fn positions(self) -> usize {
        self.height * self.width
    }
}

impl std::fmt::Display for MapShape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} × {} × {}", self.channels, self.height, self.width)
    }
}

/// One layer of states: consecutive rows of Z and X with one activation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Layer {
    /// The layer's name in the baseline, such as the ONNX name of its activation.
    pub name: String,
    /// Number of units.
    pub size: usize,
    /// φ on these units.
    pub activation: Activation,
    /// The feature map these units form, for convolutions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub map: Option<MapShape>,
    /// The operator that computes the layer if it is not a sum with an activation; it then has neither rows nor a
    /// bias.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub operator: Option<Operator>,
}

impl Layer {
    /// A dense layer.
    pub fn dense(name: impl Into<String>, size: usize, activation: Activation) -> Self {
        Self { name: name.into(), size, activation, map: None, operator: None }
    }

    /// Number of rows of the model for this layer, with one bias each: channels of a map, units of a dense layer;
    /// none for an operator.
    pub fn rows(&self) -> usize {
        if self.operator.is_some() { 0 } else { self.map.map_or(self.size, |m| m.channels) }
    }

    /// A layer that an operator computes.
    pub fn operator(name: impl Into<String>, size: usize, operator: Operator) -> Self {
        Self { operator: Some(operator), ..Self::dense(name, size, Activation::Identity) }
    }

    /// Non-zero parameters of the network that the layer keeps as they are: those of a constant that counts as a
    /// parameter.
    pub fn parameters(&self) -> usize {
        match &self.operator {
            Some(Operator::Constant { values, parameter: true }) => values.iter().filter(|v| **v != 0.0).count(),
            _ => 0,
        }
    }

    /// The operands of its operator; none for a sum or a constant.
    pub fn operands(&self) -> impl Iterator<Item = &Operand> {
        self.operator.iter().flat_map(|o| o.operands())
    }

    /// A feature map.
    pub fn map(name: impl Into<String>, shape: MapShape, activation: Activation) -> Self {
        Self { name: name.into(), size: shape.size(), activation, map: Some(shape), operator: None }
    }
}

/// The layers of a state vector, **last layer first** as in the paper: row 0 is the first unit of the last hidden layer.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Layout {
    layers: Vec<Layer>,
}

impl Layout {
    /// Layers from the last to the first.
    pub fn new(layers: Vec<Layer>) -> Self {
        Self { layers }
    }

    /// From the JSON of a states or model file, with sizes checked.
    pub fn from_json(text: &str) -> Result<Self> {
        let layout: Self = serde_json::from_str(text).map_err(|e| {
            Error::shape("layout", "a JSON list of {name, size, activation}, last layer first", e.to_string())
        })?;
        let mut total = 0usize;
        for layer in &layout.layers {
            let map = layer
                .map
                .map(|m| m.channels.checked_mul(m.height).and_then(|v| v.checked_mul(m.width)).unwrap_or(usize::MAX));
            if map.is_some_and(|size| size != layer.size) {
                return Err(Error::shape(
                    format!("layout, layer {}", layer.name),
                    format!("{} units", layer.size),
                    "a map of another size",
                ));
            }
            total = total.saturating_add(layer.size);
        }
        if total > u32::MAX as usize {
            return Err(Error::shape("layout", "at most 2^32 − 1 units", total));
        }
        Ok(layout)
    }

    /// The JSON that states and model files carry.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }

    /// The layers, last first.
    pub fn layers(&self) -> &[Layer] {
        &self.layers
    }

    /// φ of every unit.
    pub fn activations(&self) -> Vec<Activation> {
        self.layers.iter().flat_map(|l| std::iter::repeat_n(l.activation, l.size)).collect()
    }

    /// Number of units n.
    pub fn size(&self) -> usize {
        self.layers.iter().map(|l| l.size).sum()
    }

    /// Rows of layer k (in this order, last layer first).
    pub fn range(&self, k: usize) -> std::ops::Range<usize> {
        let start = self.layers[..k].iter().map(|l| l.size).sum();
        start..start + self.layers[k].size
    }

    /// Number of rows of all layers: the rows that are solved, and the length of the vector b. Equal to
    /// [`Layout::size`] where no layer is a map.
    pub fn rows(&self) -> usize {
        self.layers.iter().map(Layer::rows).sum()
    }

    /// Row numbers of layer k (in this order, last layer first).
    pub fn row_range(&self, k: usize) -> std::ops::Range<usize> {
        let start = self.layers[..k].iter().map(Layer::rows).sum();
        start..start + self.layers[k].rows()
    }

    /// The layer a unit belongs to.
    pub fn layer_of(&self, unit: usize) -> Option<usize> {
        let mut end = 0;
        self.layers.iter().position(|l| {
            end += l.size;
            unit < end
        })
    }

    /// An error where a sample has a number that chooses no row of a table that the network looks it up in, such as that
    /// of embeddings. `first` is the number of the first sample of `u`.
    pub fn require_rows_of_tables(&self, u: &Matrix<f32>, first: usize) -> Result<()> {
        for layer in &self.layers {
            let Some(rows) = layer.operator.as_ref().and_then(Operator::rows_for_inputs) else { continue };
            for sample in 0..u.rows() {
                let chosen = u.row(sample);
                if let Some(column) = chosen.iter().position(|v| !chooses_a_row(*v, rows)) {
                    return Err(Error::shape(
                        format!("inputs, sample {}, value {column}", first + sample),
                        format!("a whole number below {rows}, the rows of the table {:?}", layer.name),
                        chosen[column],
                    ));
                }
            }
        }
        Ok(())
    }

    /// Whether an operator computes some layer.
    pub fn has_operators(&self) -> bool {
        self.layers.iter().any(|l| l.operator.is_some())
    }

    /// Puts the numbers of every constant in place; `values` is called with the number of the layer and the number of
    /// values.
    pub(crate) fn fill_constants<E>(
        &mut self,
        values: impl Fn(usize, usize) -> std::result::Result<Vec<f32>, E>,
    ) -> std::result::Result<(), E> {
        for (k, layer) in self.layers.iter_mut().enumerate() {
            if let Some(Operator::Constant { values: own, .. }) = &mut layer.operator {
                *own = std::sync::Arc::new(values(k, layer.size)?);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::{Dims, Structure};

    #[test]
    fn numbers_that_choose_no_row_of_a_table_are_named() {
        let operand = |source, sizes: &[usize]| Operand { source, dims: Dims::new(sizes).unwrap() };
        let operands = vec![operand(Source::Layer(1), &[5, 2]), operand(Source::Input, &[1, 3])];
        let looked_up = Operator::Structure { structure: Structure::Lookup, operands };
        let table = Operator::Constant { values: std::sync::Arc::new(vec![0.0; 10]), parameter: true };
        let layout = Layout::new(vec![Layer::operator("words", 6, looked_up), Layer::operator("table", 10, table)]);
        let u = |last: f32| Matrix::from_vec(2, 3, vec![0.0, 4.0, -5.0, 1.0, 2.0, last]).unwrap();
        layout.require_rows_of_tables(&u(3.0), 0).unwrap();
        for wrong in [5.0, -6.0, 0.5, f32::NAN] {
            let said = layout.require_rows_of_tables(&u(wrong), 7).unwrap_err().to_string();
            assert!(
                said.contains("sample 8, value 2") && said.contains("below 5") && said.contains("\"words\""),
                "{said}"
            );
        }
    }
}
