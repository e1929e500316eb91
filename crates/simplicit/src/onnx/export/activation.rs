//! Writes activations as nodes: a single one if opset 17 has the activation in single precision, otherwise several. A
//! cycle runs in double precision, for which runtimes implement few activations, so there most are written as several
//! nodes.

use super::writer::{Writer, float, floats, node, scalar};
use crate::layout::Activation;
use crate::onnx::proto::{AttributeProto, NodeProto, data_type};

/// The precision of the values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Precision {
    Single,
    Double,
}

/// An activation that is written as several nodes.
struct Steps<'a> {
    writer: &'a mut Writer,
    precision: Precision,
    /// The prefix of the names of intermediate values.
    name: &'a str,
    nodes: Vec<NodeProto>,
}

impl Steps<'_> {
    fn number(&mut self, v: f64) -> String {
        let name = format!("{}_c{v:e}", self.name);
        self.writer.store(match self.precision {
            Precision::Single => floats(&name, &[], &[v as f32]),
            Precision::Double => scalar(&name, data_type::DOUBLE, &v.to_le_bytes()),
        })
    }

    fn of(&mut self, operator: &str, inputs: &[&str]) -> String {
        let out = format!("{}_p{}", self.name, self.nodes.len());
        self.nodes.push(node(operator, inputs, &out, vec![]));
        out
    }

    fn with(&mut self, operator: &str, x: &str, number: f64) -> String {
        let number = self.number(number);
        self.of(operator, &[x, &number])
    }

    /// max(x, low), then min(x, high), where they are finite.
    fn clipped(&mut self, x: &str, low: f64, high: f64) -> String {
        let above = if low.is_finite() { self.with("Max", x, low) } else { x.to_string() };
        if high.is_finite() { self.with("Min", &above, high) } else { above }
    }
}

impl Writer {
    /// The nodes that compute φ(z) as `x`; numbers they need become initialisers.
    pub(super) fn activation(
        &mut self,
        activation: Activation,
        precision: Precision,
        z: &str,
        x: &str,
    ) -> Vec<NodeProto> {
        if let Some((operator, attributes)) = by_name(activation, precision) {
            return vec![node(operator, &[z], x, attributes)];
        }
        let mut s = Steps { writer: self, precision, name: x, nodes: Vec::new() };
        if let (Activation::Clip { low, high }, Precision::Single) = (activation, precision) {
            // A missing end has an empty name.
            let ends = [low, high].map(|v| if v.is_finite() { s.number(f64::from(v)) } else { String::new() });
            return vec![node("Clip", &[z, &ends[0], &ends[1]], x, vec![])];
        }
        written_out(activation, z, &mut s);
        let mut nodes = s.nodes;
        match nodes.last_mut() {
            Some(last) => last.output = vec![x.to_string()],
            None => nodes.push(node("Identity", &[z], x, vec![])),
        }
        nodes
    }
}

/// The operator that is the activation, where there is one for this precision.
fn by_name(activation: Activation, precision: Precision) -> Option<(&'static str, Vec<AttributeProto>)> {
    let single = precision == Precision::Single;
    Some(match activation {
        Activation::Relu => ("Relu", vec![]),
        Activation::Tanh => ("Tanh", vec![]),
        Activation::Sigmoid => ("Sigmoid", vec![]),
        Activation::Identity => ("Identity", vec![]),
        Activation::LeakyRelu { slope } if single => ("LeakyRelu", vec![float("alpha", slope)]),
        Activation::Softplus if single => ("Softplus", vec![]),
        Activation::Softsign if single => ("Softsign", vec![]),
        Activation::Elu { alpha } if single => ("Elu", vec![float("alpha", alpha)]),
        Activation::Celu { alpha } if single => ("Celu", vec![float("alpha", alpha)]),
        Activation::Selu if single => ("Selu", vec![]),
        Activation::HardSigmoid { alpha, beta } if single => {
            ("HardSigmoid", vec![float("alpha", alpha), float("beta", beta)])
        }
        Activation::HardSwish if single => ("HardSwish", vec![]),
        _ => return None,
    })
}

/// The last of the steps gives φ(z).
fn written_out(activation: Activation, z: &str, s: &mut Steps<'_>) {
    match activation {
        Activation::Clip { low, high } => {
            s.clipped(z, f64::from(low), f64::from(high));
        }
        Activation::LeakyRelu { slope } => {
            let (above, below) = (s.with("Max", z, 0.0), s.with("Min", z, 0.0));
            let scaled = s.with("Mul", &below, f64::from(slope));
            s.of("Add", &[&above, &scaled]);
        }
        Activation::Softplus => {
            softplus(z, s);
        }
        Activation::Softsign => {
            let size = s.of("Abs", &[z]);
            let sum = s.with("Add", &size, 1.0);
            s.of("Div", &[z, &sum]);
        }
        Activation::Elu { alpha } => {
            exponential(z, f64::from(alpha), 1.0, s);
        }
        Activation::Celu { alpha } => {
            exponential(z, f64::from(alpha), f64::from(alpha), s);
        }
        Activation::Selu => {
            let unit = exponential(z, 1.673_263_2, 1.0, s);
            s.with("Mul", &unit, 1.050_701);
        }
        Activation::HardSigmoid { alpha, beta } => {
            let scaled = s.with("Mul", z, f64::from(alpha));
            let moved = s.with("Add", &scaled, f64::from(beta));
            s.clipped(&moved, 0.0, 1.0);
        }
        Activation::HardSwish => {
            let moved = s.with("Add", z, 3.0);
            let gate = s.clipped(&moved, 0.0, 6.0);
            let product = s.of("Mul", &[z, &gate]);
            s.with("Div", &product, 6.0);
        }
        Activation::Gelu => {
            let scaled = s.with("Mul", z, std::f64::consts::FRAC_1_SQRT_2);
            let erf = s.of("Erf", &[&scaled]);
            half_of_product(z, &erf, s);
        }
        Activation::GeluTanh => {
            let square = s.of("Mul", &[z, z]);
            let share = s.with("Mul", &square, 0.044_715);
            let sum = s.with("Add", &share, 1.0);
            let inner = s.of("Mul", &[z, &sum]);
            let scaled = s.with("Mul", &inner, (2.0 / std::f64::consts::PI).sqrt());
            let tanh = s.of("Tanh", &[&scaled]);
            half_of_product(z, &tanh, s);
        }
        Activation::Silu => {
            let gate = s.of("Sigmoid", &[z]);
            s.of("Mul", &[z, &gate]);
        }
        Activation::Mish => {
            let softplus = match s.precision {
                Precision::Single => s.of("Softplus", &[z]),
                Precision::Double => softplus(z, s),
            };
            let tanh = s.of("Tanh", &[&softplus]);
            s.of("Mul", &[z, &tanh]);
        }
        // These exist as operators in both precisions.
        Activation::Relu | Activation::Tanh | Activation::Sigmoid | Activation::Identity => {}
    }
}

/// max(z, 0) + alpha·(e^(min(z, 0)/width) − 1).
fn exponential(z: &str, alpha: f64, width: f64, s: &mut Steps<'_>) -> String {
    let (above, below) = (s.with("Max", z, 0.0), s.with("Min", z, 0.0));
    let scaled = s.with("Div", &below, width);
    let power = s.of("Exp", &[&scaled]);
    let less = s.with("Sub", &power, 1.0);
    let share = s.with("Mul", &less, alpha);
    s.of("Add", &[&above, &share])
}

/// max(z, 0) + ln(1 + e^−|z|), in which no power overflows.
fn softplus(z: &str, s: &mut Steps<'_>) -> String {
    let above = s.with("Max", z, 0.0);
    let size = s.of("Abs", &[z]);
    let away = s.of("Neg", &[&size]);
    let power = s.of("Exp", &[&away]);
    let sum = s.with("Add", &power, 1.0);
    let log = s.of("Log", &[&sum]);
    s.of("Add", &[&above, &log])
}

/// z·(1 + f)/2.
fn half_of_product(z: &str, f: &str, s: &mut Steps<'_>) {
    let sum = s.with("Add", f, 1.0);
    let product = s.of("Mul", &[z, &sum]);
    s.with("Mul", &product, 0.5);
}
