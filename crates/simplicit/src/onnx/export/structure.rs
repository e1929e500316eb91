//! Operators without weights as nodes. Their dimensions are those of a batch of one; the graph has a batch of any size, so
//! an operator that moves or sums over the first axis of a value that depends on the sample cannot be written.

use super::layers::Value;
use super::writer::{Writer, constant_ints, float, floats, integer, integers};
use crate::graph::{Pooling, Reduction, Structure};
use crate::onnx::nodes::{binary_name, reduction_name, unary_name};
use crate::onnx::proto::data_type;
use crate::{Error, Result};

fn batch_axis(structure: &Structure) -> Error {
    Error::unsupported(
        format!("export of {} over the samples of a batch", structure.name()),
        "write it in the form of its network (export --like)",
    )
}

/// Whether the operator keeps samples apart: `depends` says of every operand whether it has the batch as its first axis.
fn keeps_samples_apart(structure: &Structure, operands: &[Value], dims: &[usize]) -> bool {
    let sampled = || operands.iter().filter(|o| o.batched);
    if sampled().next().is_none() {
        return true;
    }
    if dims.first() != Some(&1) || sampled().any(|o| o.dims.first() != Some(&1)) {
        return false;
    }
    // Operands are aligned by their last axes.
    let aligned = sampled().all(|o| o.dims.len() == dims.len());
    match structure {
        Structure::Unary(_) | Structure::Reshape { .. } => true,
        Structure::Binary(_) | Structure::Expand { .. } => aligned,
        Structure::MatMul => aligned && (dims.len() > 2 || !operands[1].batched),
        Structure::Softmax { axis } | Structure::Normalise { axis, .. } | Structure::Concat { axis } => *axis > 0,
        Structure::Slice { axis, .. } | Structure::Gather { axis, .. } => *axis > 0,
        Structure::Reduce { axes, .. } => !axes.contains(&0),
        Structure::Pool(pooling) => operands[0].dims.len() == pooling.kernel.len() + 2,
        Structure::Pad { padding, .. } => padding.first() == Some(&[0, 0]),
        Structure::Lookup => !operands[0].batched,
        Structure::Transpose { order } => order.first() == Some(&0),
    }
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
        if !keeps_samples_apart(structure, operands, dims) {
            return Err(batch_axis(structure));
        }
        let out = Value {
            tensor: name.to_string(),
            dims: dims.to_vec(),
            batched: operands.iter().any(|operand| operand.batched),
        };
        let axis = |axis: &usize| vec![integer("axis", *axis as i64)];
        let tensors: Vec<&str> = operands.iter().map(|o| o.tensor.as_str()).collect();
        let n = |part: &str| format!("{name}_{part}");
        match structure {
            Structure::Unary(unary) => self.make(unary_name(*unary), &tensors, name, vec![]),
            Structure::Binary(binary) => self.make(binary_name(*binary), &tensors, name, vec![]),
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
                    .map(|o| if out.batched && !o.batched { self.for_every_sample(o) } else { o.tensor.clone() })
                    .collect();
                let parts: Vec<&str> = parts.iter().map(String::as_str).collect();
                self.make("Concat", &parts, name, axis(a));
            }
            Structure::Slice { axis: a, start, step, count } => {
                // Behind the last one that is taken; in front of the first there is no number, but the smallest one.
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
            Structure::Reshape { .. } => return Ok(self.shaped(&operands[0], dims)),
            Structure::Expand { .. } => {
                let shape: Vec<i64> = dims.iter().map(|&d| d as i64).collect();
                let shape = self.store(constant_ints(&n("shape"), &shape));
                self.make("Expand", &[tensors[0], &shape], name, vec![]);
            }
        }
        Ok(out)
    }

    fn pool(&mut self, pooling: &Pooling, x: &str, name: &str) -> Result<()> {
        // What reaches beyond the padding comes from ceil_mode, which counts it in no mean.
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

    /// A value that is the same for all samples, once for every sample of the batch.
    fn for_every_sample(&mut self, value: &Value) -> String {
        let name = format!("{}_each", value.tensor);
        self.make("Shape", &["u"], "batch_shape", vec![integer("start", 0), integer("end", 1)]);
        let rest: Vec<i64> = value.dims.iter().skip(1).map(|&d| d as i64).collect();
        let rest = self.store(constant_ints(&format!("{name}_rest"), &rest));
        let shape = format!("{name}_shape");
        self.make("Concat", &["batch_shape", &rest], &shape, vec![integer("axis", 0)]);
        self.make("Expand", &[&value.tensor, &shape], &name, vec![]);
        name
    }
}
