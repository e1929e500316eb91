//! Operators without weights as nodes. Their dimensions are those of a batch of one; the graph has a batch of any
//! size. So the batch axis of every value is tracked, and an operator that sums over it cannot be written.

use super::layers::Value;
use super::writer::{Writer, constant_ints, float, floats, integer, integers};
use crate::graph::{Binary, Pooling, Reduction, Structure};
use crate::onnx::nodes::{binary_name, reduction_name, unary_name};
use crate::onnx::proto::data_type;
use crate::{Error, Result};

/// The axis of the result that is the batch, `Some(None)` where no operand depends on the sample; `None` where the
/// operator would mix samples.
fn batch_axis(structure: &Structure, operands: &[Value], dims: &[usize]) -> Option<Option<usize>> {
    let mut sampled = operands.iter().filter_map(|o| o.batch.map(|axis| (axis, o.dims.len())));
    let Some((axis, rank)) = sampled.next() else { return Some(None) };
    // Several operands are aligned by their last axes.
    let from_the_right = rank - axis;
    let aligned = || {
        let same = operands.iter().all(|o| o.batch.is_none_or(|axis| o.dims.len() - axis == from_the_right));
        same.then(|| dims.len().checked_sub(from_the_right)).flatten()
    };
    let kept = |apart: bool| apart.then_some(axis);
    let found = match structure {
        Structure::Unary(_) => Some(axis),
        Structure::Binary(_) | Structure::Select | Structure::Expand { .. } => aligned(),
        // The rows of the first operand may be samples; the axis that is summed over may not.
        Structure::MatMul => {
            let rows = from_the_right == 2 && operands[1].batch.is_none();
            aligned().filter(|_| from_the_right > 2 || rows)
        }
        Structure::Softmax { axis: along } => kept(axis != *along),
        Structure::Concat { axis: along } => aligned().filter(|found| found != along),
        Structure::Normalise { axis: along, .. } => kept(axis < *along),
        Structure::Slice { axis: along, .. } => kept(axis != *along),
        Structure::Gather { axis: along, dims, .. } => {
            kept(axis != *along).map(|axis| if axis < *along { axis } else { axis + dims.rank() - 1 })
        }
        Structure::Reduce { axes, keep, .. } => {
            let before = axes.iter().filter(|a| **a < axis).count();
            kept(!axes.contains(&axis)).map(|axis| if *keep { axis } else { axis - before })
        }
        Structure::Pool(pooling) => kept(axis == 0 && rank == pooling.kernel.len() + 2),
        Structure::Pad { padding, .. } => kept(padding.get(axis) == Some(&[0, 0])),
        Structure::Lookup => kept(operands[0].batch.is_none()),
        Structure::Transpose { order } => order.iter().position(|old| *old == axis),
        // The reshape itself finds the axis.
        Structure::Reshape { .. } => Some(axis),
    };
    found.map(Some)
}

impl Writer {
    /// The value of an operator as `name`.
    pub(super) fn structure(
        &mut self,
        structure: &Structure,
        operands: &[Value],
        dims: &[usize],
        name: &str,
    ) -> Result<Value> {
        let batch = batch_axis(structure, operands, dims).ok_or_else(|| {
            Error::unsupported(
                format!("export of {} over the samples of a batch", structure.name()),
                "write it in the form of its network (export --like)",
            )
        })?;
        let out = Value { tensor: name.to_string(), dims: dims.to_vec(), batch };
        let axis = |axis: &usize| vec![integer("axis", *axis as i64)];
        let tensors: Vec<&str> = operands.iter().map(|o| o.tensor.as_str()).collect();
        let n = |part: &str| format!("{name}_{part}");
        match structure {
            Structure::Unary(unary) => self.make(unary_name(*unary), &tensors, name, vec![]),
            Structure::Binary(Binary::Greater) => {
                let truth = n("truth");
                self.make(binary_name(Binary::Greater), &tensors, &truth, vec![]);
                self.make("Cast", &[&truth], name, vec![integer("to", i64::from(data_type::FLOAT))]);
            }
            Structure::Binary(binary) => self.make(binary_name(*binary), &tensors, name, vec![]),
            Structure::Select => {
                let truth = n("truth");
                self.make("Cast", &[tensors[0]], &truth, vec![integer("to", i64::from(data_type::BOOL))]);
                self.make("Where", &[&truth, tensors[1], tensors[2]], name, vec![]);
            }
            Structure::MatMul => self.make("MatMul", &tensors, name, vec![]),
            Structure::Softmax { axis: a } => self.make("Softmax", &tensors, name, axis(a)),
            Structure::Normalise { axis: a, epsilon } => {
                let over = &operands[0].dims[*a..];
                let ones = self.store(floats(&n("scale"), over, &vec![1.0; over.iter().product()]));
                let attributes = vec![integer("axis", *a as i64), float("epsilon", *epsilon)];
                self.make("LayerNormalization", &[tensors[0], &ones], name, attributes);
            }
            Structure::Reduce { reduction, axes, keep } => {
                let operator = reduction_name(*reduction);
                let keep = integer("keepdims", i64::from(*keep));
                if *reduction == Reduction::Sum {
                    let axes: Vec<i64> = axes.iter().map(|&a| a as i64).collect();
                    let axes = self.store(constant_ints(&n("axes"), &axes));
                    self.make(operator, &[tensors[0], &axes], name, vec![keep]);
                } else {
                    self.make(operator, &tensors, name, vec![integers("axes", axes), keep]);
                }
            }
            Structure::Pool(pooling) => self.pool(pooling, tensors[0], name)?,
            Structure::Concat { axis: a } => {
                let parts: Vec<String> = operands
                    .iter()
                    .map(|o| match (batch, o.batch) {
                        (Some(axis), None) => self.for_every_sample(o, axis),
                        _ => o.tensor.clone(),
                    })
                    .collect();
                let parts: Vec<&str> = parts.iter().map(String::as_str).collect();
                self.make("Concat", &parts, name, axis(a));
            }
            Structure::Slice { axis: a, start, step, count } => {
                // One after the last index that is taken. Before index 0 there is no such number, so the smallest one
                // is written.
                let end = *start as i64 + step * *count as i64;
                let end = if end < 0 { i64::MIN } else { end };
                let list = [("start", *start as i64), ("end", end), ("axis", *a as i64), ("step", *step)];
                let names = list.map(|(part, v)| self.store(constant_ints(&n(part), &[v])));
                let [start, end, a, step] = &names;
                self.make("Slice", &[tensors[0], start, end, a, step], name, vec![]);
            }
            Structure::Pad { padding, value } => {
                let [before, after] = [0, 1].map(|side| padding.iter().map(move |p| p[side] as i64));
                let pads = self.store(constant_ints(&n("pads"), &before.chain(after).collect::<Vec<_>>()));
                let value = self.store(floats(&n("value"), &[], &[*value]));
                self.make("Pad", &[tensors[0], &pads, &value], name, vec![]);
            }
            Structure::Gather { axis: a, indices, dims } => {
                let indices: Vec<i64> = indices.iter().map(|&i| i as i64).collect();
                let mut stored = constant_ints(&n("indices"), &indices);
                stored.dims = dims.sizes().iter().map(|&d| d as i64).collect();
                let indices = self.store(stored);
                self.make("Gather", &[tensors[0], &indices], name, axis(a));
            }
            Structure::Lookup => {
                let whole = n("whole");
                self.make("Cast", &[tensors[1]], &whole, vec![integer("to", i64::from(data_type::INT64))]);
                self.make("Gather", &[tensors[0], &whole], name, axis(&0));
            }
            Structure::Transpose { order } => self.make("Transpose", &tensors, name, vec![integers("perm", order)]),
            Structure::Reshape { .. } => return self.shaped(&operands[0], dims),
            Structure::Expand { .. } => {
                let shape: Vec<i64> = dims.iter().map(|&d| d as i64).collect();
                let shape = self.store(constant_ints(&n("shape"), &shape));
                self.make("Expand", &[tensors[0], &shape], name, vec![]);
            }
        }
        Ok(out)
    }

    fn pool(&mut self, pooling: &Pooling, x: &str, name: &str) -> Result<()> {
        // The places beyond the padding come from ceil_mode, which no mean counts.
        let beyond = pooling.beyond.iter().any(|b| *b > 0);
        let front = pooling.padding.iter().map(|p| p[0]);
        let behind = pooling.padding.iter().zip(&pooling.beyond).map(|(p, b)| p[1].saturating_sub(*b));
        let mut attributes = vec![
            integers("kernel_shape", &pooling.kernel),
            integers("strides", &pooling.stride),
            integers("pads", &front.chain(behind).collect::<Vec<_>>()),
        ];
        if beyond {
            attributes.push(integer("ceil_mode", 1));
        }
        let dilated = pooling.dilation.iter().any(|d| *d != 1);
        match (pooling.maximum, dilated) {
            (true, _) => attributes.push(integers("dilations", &pooling.dilation)),
            (false, false) => attributes.push(integer("count_include_pad", i64::from(pooling.count_padding))),
            (false, true) => {
                return Err(Error::unsupported(
                    "export of a dilated mean",
                    "opset 17 has none; write it in the form of its network (export --like)",
                ));
            }
        }
        self.make(if pooling.maximum { "MaxPool" } else { "AveragePool" }, &[x], name, attributes);
        Ok(())
    }

    /// A value that is the same for all samples, repeated along an axis for every sample of the batch.
    fn for_every_sample(&mut self, value: &Value, axis: usize) -> String {
        let name = format!("{}_each{axis}", value.tensor);
        self.make("Shape", &["u"], "batch_shape", vec![integer("start", 0), integer("end", 1)]);
        let mut parts = vec!["batch_shape".to_string()];
        let sides = [("front", 0, &value.dims[..axis]), ("rest", parts.len(), &value.dims[axis + 1..])];
        for (side, place, dims) in sides.into_iter().rev().filter(|(_, _, dims)| !dims.is_empty()) {
            let sizes: Vec<i64> = dims.iter().map(|&d| d as i64).collect();
            parts.insert(place, self.store(constant_ints(&format!("{name}_{side}"), &sizes)));
        }
        let shape = format!("{name}_shape");
        let parts: Vec<&str> = parts.iter().map(String::as_str).collect();
        self.make("Concat", &parts, &shape, vec![integer("axis", 0)]);
        self.make("Expand", &[&value.tensor, &shape], &name, vec![]);
        name
    }
}
