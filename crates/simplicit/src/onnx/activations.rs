//! Activations: by name where there is one, else written out in functions of one and two values.

use super::constant::{Constant, Tensor};
use super::import::{Importer, Value};
use super::nodes::Inputs;
use super::proto::NodeProto;
use crate::graph::{Binary, Unary};
use crate::layout::Activation;
use crate::{Error, Result};

/// Activations that exporters write as several nodes.
pub(super) fn written_out() -> Vec<Activation> {
    vec![Activation::Relu]
}

impl Importer<'_> {
    /// The activation a node is, or nothing if it is none.
    pub(super) fn activation(&mut self, node: &NodeProto, inputs: &Inputs<'_>) -> Result<Option<Value>> {
        let activation = match node.op_type.as_str() {
            "Relu" => Activation::Relu,
            "Tanh" => Activation::Tanh,
            "Sigmoid" => Activation::Sigmoid,
            "LeakyRelu" => {
                let slope = node.float("alpha", 0.01);
                match Activation::leaky_relu(slope) {
                    Ok(activation) => activation,
                    Err(_) => return self.sloped(inputs.value(0)?, Tensor::scalar(slope)).map(Some),
                }
            }
            _ => return self.composed(node, inputs),
        };
        self.activated(inputs.value(0)?, activation).map(Some)
    }

    fn activated(&mut self, value: &Value, activation: Activation) -> Result<Value> {
        let out = self.activate(value, activation)?;
        self.remember(value, activation, &out);
        Ok(out)
    }

    fn number(&mut self, value: f32) -> Result<Value> {
        self.constant(Constant::Floats(Tensor::scalar(value)), false)
    }

    fn with(&mut self, binary: Binary, value: &Value, number: f32) -> Result<Value> {
        let number = self.number(number)?;
        self.binary(binary, value, &number)
    }

    /// Activations that are made of others; what has a name here is recognised by its values.
    fn composed(&mut self, node: &NodeProto, inputs: &Inputs<'_>) -> Result<Option<Value>> {
        let x = match node.op_type.as_str() {
            "Clip" | "HardSwish" | "HardSigmoid" | "Gelu" | "Elu" | "Celu" | "Selu" | "Softplus" | "Softsign"
            | "Mish" | "Swish" | "PRelu" => inputs.value(0)?,
            _ => return Ok(None),
        };
        Ok(Some(match node.op_type.as_str() {
            "Clip" => {
                let attribute = |name: &str| node.attribute(name).and_then(|a| a.f);
                let low = inputs.number(1)?.or_else(|| attribute("min"));
                let high = inputs.number(2)?.or_else(|| attribute("max"));
                self.clip(x, low, high)?
            }
            "HardSigmoid" => self.hard_sigmoid(x, node.float("alpha", 0.2), node.float("beta", 0.5))?,
            "HardSwish" => {
                let gate = self.hard_sigmoid(x, 1.0 / 6.0, 0.5)?;
                self.binary(Binary::Multiply, x, &gate)?
            }
            "Gelu" => self.gelu(x, node.text("approximate", "none") == "tanh")?,
            "Elu" => self.elu(x, node.float("alpha", 1.0), 1.0)?,
            "Celu" => {
                let alpha = node.float("alpha", 1.0);
                self.elu(x, alpha, alpha)?
            }
            "Selu" => {
                let unit = self.elu(x, node.float("alpha", 1.673_263_2), 1.0)?;
                self.with(Binary::Multiply, &unit, node.float("gamma", 1.050_701))?
            }
            "Softplus" => self.softplus(x)?,
            "Softsign" => {
                let size = self.unary(Unary::Absolute, x)?;
                let below = self.with(Binary::Add, &size, 1.0)?;
                self.binary(Binary::Divide, x, &below)?
            }
            "Mish" => {
                let soft = self.softplus(x)?;
                let gate = self.activated(&soft, Activation::Tanh)?;
                self.binary(Binary::Multiply, x, &gate)?
            }
            "Swish" => {
                let scaled = self.with(Binary::Multiply, x, node.float("alpha", 1.0))?;
                let gate = self.activated(&scaled, Activation::Sigmoid)?;
                self.binary(Binary::Multiply, x, &gate)?
            }
            _ => self.sloped(x, inputs.weights(1)?)?,
        }))
    }

    fn clip(&mut self, x: &Value, low: Option<f32>, high: Option<f32>) -> Result<Value> {
        if low.is_some_and(f32::is_nan) || high.is_some_and(f32::is_nan) {
            return Err(Error::shape("Clip", "bounds that are numbers", "NaN"));
        }
        let mut out = match low {
            Some(low) if low > -1e30 => {
                if low == 0.0 {
                    self.activated(x, Activation::Relu)?
                } else {
                    self.with(Binary::Maximum, x, low)?
                }
            }
            _ => x.clone(),
        };
        if let Some(high) = high.filter(|&h| h < 1e30) {
            out = self.with(Binary::Minimum, &out, high)?;
        }
        Ok(out)
    }

    fn hard_sigmoid(&mut self, x: &Value, alpha: f32, beta: f32) -> Result<Value> {
        let scaled = self.with(Binary::Multiply, x, alpha)?;
        let moved = self.with(Binary::Add, &scaled, beta)?;
        self.clip(&moved, Some(0.0), Some(1.0))
    }

    fn gelu(&mut self, x: &Value, by_tanh: bool) -> Result<Value> {
        let inner = if by_tanh {
            let square = self.binary(Binary::Multiply, x, x)?;
            let cube = self.binary(Binary::Multiply, &square, x)?;
            let small = self.with(Binary::Multiply, &cube, 0.044_715)?;
            let sum = self.binary(Binary::Add, x, &small)?;
            let scaled = self.with(Binary::Multiply, &sum, (2.0 / std::f32::consts::PI).sqrt())?;
            self.activated(&scaled, Activation::Tanh)?
        } else {
            let scaled = self.with(Binary::Multiply, x, std::f32::consts::FRAC_1_SQRT_2)?;
            self.unary(Unary::Erf, &scaled)?
        };
        let gate = self.with(Binary::Add, &inner, 1.0)?;
        let product = self.binary(Binary::Multiply, x, &gate)?;
        self.with(Binary::Multiply, &product, 0.5)
    }

    /// max(x, 0) + α(e^(min(x, 0)/width) − 1).
    fn elu(&mut self, x: &Value, alpha: f32, width: f32) -> Result<Value> {
        let above = self.activated(x, Activation::Relu)?;
        let below = self.with(Binary::Minimum, x, 0.0)?;
        let below = self.with(Binary::Divide, &below, width)?;
        let power = self.unary(Unary::Exp, &below)?;
        let power = self.with(Binary::Subtract, &power, 1.0)?;
        let below = self.with(Binary::Multiply, &power, alpha)?;
        self.binary(Binary::Add, &above, &below)
    }

    /// max(x, 0) + ln(1 + e^−|x|).
    fn softplus(&mut self, x: &Value) -> Result<Value> {
        let above = self.activated(x, Activation::Relu)?;
        let size = self.unary(Unary::Absolute, x)?;
        let negative = self.unary(Unary::Negative, &size)?;
        let power = self.unary(Unary::Exp, &negative)?;
        let sum = self.with(Binary::Add, &power, 1.0)?;
        let logarithm = self.unary(Unary::Log, &sum)?;
        self.binary(Binary::Add, &above, &logarithm)
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
        // Slopes are parameters however many there are.
        let slope = self.constant(Constant::Floats(slope), true)?;
        let below = self.binary(Binary::Multiply, &below, &slope)?;
        self.binary(Binary::Add, &above, &below)
    }
}
