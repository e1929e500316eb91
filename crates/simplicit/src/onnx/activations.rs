//! Activations by their ONNX names; those that the library does not have are composed of others.

use super::constant::{Constant, Tensor};
use super::import::{Importer, Value};
use super::nodes::Inputs;
use super::proto::NodeProto;
use crate::graph::Binary;
use crate::layout::Activation;
use crate::{Error, Result};

/// Activations that exporters write as several nodes.
pub(super) const WRITTEN_OUT: [Activation; 9] = [
    Activation::Gelu,
    Activation::GeluTanh,
    Activation::Silu,
    Activation::HardSwish,
    Activation::Mish,
    Activation::Softplus,
    Activation::Softsign,
    Activation::Clip { low: 0.0, high: 6.0 },
    Activation::HardSigmoid { alpha: 1.0 / 6.0, beta: 0.5 },
];

impl Importer<'_> {
    /// The activation that a node computes; `None` if it is not one.
    pub(super) fn activation(&mut self, node: &NodeProto, inputs: &Inputs<'_>) -> Result<Option<Value>> {
        let alpha = |default| node.float("alpha", default);
        let activation = match node.op_type.as_str() {
            "Relu" => Activation::Relu,
            "Tanh" => Activation::Tanh,
            "Sigmoid" => Activation::Sigmoid,
            "Softplus" => Activation::Softplus,
            "Softsign" => Activation::Softsign,
            "HardSwish" => Activation::HardSwish,
            "Mish" => Activation::Mish,
            "LeakyRelu" => Activation::LeakyRelu { slope: alpha(0.01) },
            "Elu" => Activation::Elu { alpha: alpha(1.0) },
            "Celu" => Activation::Celu { alpha: alpha(1.0) },
            "Selu" if node.attribute.is_empty() => Activation::Selu,
            "HardSigmoid" => Activation::HardSigmoid { alpha: alpha(0.2), beta: node.float("beta", 0.5) },
            "Gelu" if node.text("approximate", "none") == "tanh" => Activation::GeluTanh,
            "Gelu" => Activation::Gelu,
            "Swish" if alpha(1.0) == 1.0 => Activation::Silu,
            "Clip" => {
                let attribute = |name: &str| node.attribute(name).and_then(|a| a.f);
                let low = inputs.number(1)?.or_else(|| attribute("min")).unwrap_or(f32::NEG_INFINITY);
                let high = inputs.number(2)?.or_else(|| attribute("max")).unwrap_or(f32::INFINITY);
                if low.is_nan() || high.is_nan() {
                    return Err(Error::shape("ends of Clip", "numbers", "NaN"));
                }
                if let Value::Constant(constant, _) = inputs.value(0)?
                    && let Constant::Ints(tensor) = &**constant
                {
                    // A clip of integers, such as those of a shape: floats hold them exactly.
                    let clipped = tensor.map(|v| (v as f32).clamp(low, high.max(low)) as i64);
                    return self.constant(Constant::Ints(clipped), false).map(Some);
                }
                match (low, high) {
                    // In files of older versions these ends mean that there is none.
                    (l, h) if l <= f32::MIN && h >= f32::MAX => return inputs.value(0).cloned().map(Some),
                    (0.0, h) if h >= f32::MAX => Activation::Relu,
                    // The result is ONNX's also where the ends cross.
                    (low, high) => Activation::Clip { low: low.min(high), high },
                }
            }
            _ => return self.composed(node, inputs),
        };
        self.activated(inputs.value(0)?, activation.checked()?).map(Some)
    }

    fn activated(&mut self, value: &Value, activation: Activation) -> Result<Value> {
        let out = self.activate(value, activation)?;
        self.remember(value, activation, &out);
        Ok(out)
    }

    pub(super) fn number(&mut self, value: f32) -> Result<Value> {
        self.constant(Constant::Floats(Tensor::scalar(value)), false)
    }

    pub(super) fn with(&mut self, binary: Binary, value: &Value, number: f32) -> Result<Value> {
        let number = self.number(number)?;
        self.binary(binary, value, &number)
    }

    /// Activations that are composed of others.
    fn composed(&mut self, node: &NodeProto, inputs: &Inputs<'_>) -> Result<Option<Value>> {
        Ok(Some(match node.op_type.as_str() {
            "Selu" => {
                let elu = Activation::Elu { alpha: node.float("alpha", 1.673_263_2) }.checked()?;
                let unit = self.activated(inputs.value(0)?, elu)?;
                self.with(Binary::Multiply, &unit, node.float("gamma", 1.050_701))?
            }
            "Swish" => {
                let x = inputs.value(0)?;
                let scaled = self.with(Binary::Multiply, x, node.float("alpha", 1.0))?;
                let gate = self.activated(&scaled, Activation::Sigmoid)?;
                self.binary(Binary::Multiply, x, &gate)?
            }
            "PRelu" => self.sloped(inputs.value(0)?, inputs.weights(1)?)?,
            _ => return Ok(None),
        }))
    }

    /// max(x, 0) + slope·min(x, 0).
    fn sloped(&mut self, x: &Value, slope: Tensor<f32>) -> Result<Value> {
        if let [one] = slope.values[..]
            && let Ok(activation) = Activation::leaky_relu(one)
        {
            return self.activated(x, activation);
        }
        let above = self.activated(x, Activation::Relu)?;
        let below = self.with(Binary::Minimum, x, 0.0)?;
        // Slopes count as parameters, whatever their number.
        let slope = self.constant(Constant::Floats(slope), true)?;
        let below = self.binary(Binary::Multiply, &below, &slope)?;
        self.binary(Binary::Add, &above, &below)
    }
}
