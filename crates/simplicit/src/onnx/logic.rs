//! Comparisons, truth values and choices that depend on the sample. A truth value is the number 1 or 0.

use super::constant::{Constant, Tensor, place};
use super::import::{Importer, Value};
use super::nodes::Inputs;
use super::proto::NodeProto;
use crate::graph::{Binary, Structure};
use crate::{Error, Result};

impl Importer<'_> {
    /// Comparisons and logic on values of the sample; `None` for other operators.
    pub(super) fn logic(&mut self, node: &NodeProto, inputs: &Inputs<'_>) -> Result<Option<Value>> {
        if !inputs.0.iter().flatten().any(|v| matches!(v, Value::Node(_))) {
            return Ok(None);
        }
        let operator = node.op_type.as_str();
        let out = match operator {
            "Not" => self.not(inputs.value(0)?)?,
            "Sign" => {
                let zero = self.number(0.0)?;
                let (above, below) = (self.above(inputs.value(0)?, &zero)?, self.above(&zero, inputs.value(0)?)?);
                self.binary(Binary::Subtract, &above, &below)?
            }
            "Greater" | "Less" | "GreaterOrEqual" | "LessOrEqual" | "Equal" | "And" | "Or" | "Xor" => {
                let (a, b) = (inputs.value(0)?, inputs.value(1)?);
                match operator {
                    "Greater" => self.above(a, b)?,
                    "Less" => self.above(b, a)?,
                    "GreaterOrEqual" => {
                        let below = self.above(b, a)?;
                        self.not(&below)?
                    }
                    "LessOrEqual" => {
                        let above = self.above(a, b)?;
                        self.not(&above)?
                    }
                    "And" => self.binary(Binary::Multiply, a, b)?,
                    "Or" => self.binary(Binary::Maximum, a, b)?,
                    operator => {
                        let differs = self.differs(a, b)?;
                        if operator == "Equal" { self.not(&differs)? } else { differs }
                    }
                }
            }
            "Where" if matches!(inputs.value(0)?, Value::Node(_)) => {
                return self.structure(Structure::Select, &inputs.all()?).map(Some);
            }
            "CumSum" => return self.running_sum(node, inputs).map(Some),
            _ => return Ok(None),
        };
        if let Value::Node(id) = out {
            self.whole.insert(id);
        }
        Ok(Some(out))
    }

    fn above(&mut self, a: &Value, b: &Value) -> Result<Value> {
        self.structure(Structure::Binary(Binary::Greater), &[a.clone(), b.clone()])
    }

    /// 1 where two values are not the same.
    pub(super) fn differs(&mut self, a: &Value, b: &Value) -> Result<Value> {
        let (above, below) = (self.above(a, b)?, self.above(b, a)?);
        self.binary(Binary::Add, &above, &below)
    }

    fn not(&mut self, value: &Value) -> Result<Value> {
        let one = self.number(1.0)?;
        self.binary(Binary::Subtract, &one, value)
    }

    /// The sums of a value up to every place of an axis, as its product with a triangle of ones.
    fn running_sum(&mut self, node: &NodeProto, inputs: &Inputs<'_>) -> Result<Value> {
        let value = inputs.value(0)?;
        let axis = inputs.ints(1)?.and_then(|axis| axis.first().copied()).unwrap_or(0);
        let dims = self.dims(value);
        let axis = place(axis, dims.len())?;
        let (exclusive, reverse) = (node.int("exclusive", 0) != 0, node.int("reverse", 0) != 0);
        let n = dims[axis];
        super::constant::size(&[n, n])?;
        let counted = |to: usize, from: usize| {
            let (to, from) = if reverse { (from, to) } else { (to, from) };
            f32::from(from < to || (from == to && !exclusive))
        };
        let weights = (0..n * n).map(|k| counted(k / n, k % n)).collect();
        self.along(value, axis, Tensor { dims: vec![n, n], values: weights })
    }

    /// The product of a constant, to × from, with a value whose axis has `from` places.
    pub(super) fn along(&mut self, value: &Value, axis: usize, weights: Tensor<f32>) -> Result<Value> {
        let &[to, from] = &weights.dims[..] else {
            return Err(Error::shape("weights along an axis", "two axes", format!("{:?}", weights.dims)));
        };
        let weights = self.constant(Constant::Floats(weights), false)?;
        let mut dims = self.dims(value);
        let outer: usize = dims[..axis].iter().product();
        let inner: usize = dims[axis + 1..].iter().product();
        // The first axis may be the batch, so it is kept apart.
        let first = if axis > 0 { dims[0] } else { 1 };
        let flat = self.reshape(value, &[first, outer / first.max(1), from, inner])?;
        let product = self.structure(Structure::MatMul, &[weights, flat])?;
        dims[axis] = to;
        self.reshape(&product, &dims)
    }
}
