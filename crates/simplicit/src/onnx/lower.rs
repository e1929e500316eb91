//! Operators that move values, whether these are constants or depend on the sample.
//!
//! Transposes that cancel and reshapes of reshapes are removed here, as soon as they are added, and activations move
//! in front of transposes. A dense layer over tokens is a 1 × 1 convolution between two transposes, so one such layer
//! then follows another without a transpose in between.

use super::constant::{Constant, Tensor, broadcast, moved};
use super::import::{Importer, Value};
use crate::graph::{Dims, Structure, Value as Operand};
use crate::layout::Activation;
use crate::network::{Op, Shape};
use crate::{Error, Result};

impl Importer<'_> {
    /// The dimensions of a value for a batch of one.
    pub(super) fn dims(&self, value: &Value) -> Vec<usize> {
        match value {
            Value::Node(node) => self.builder.shape_of(*node).dims().sizes().to_vec(),
            Value::Constant(constant, _) => constant.dims().to_vec(),
            Value::Unknown => vec![],
        }
    }

    /// An operator without weights on floats; if all inputs are constants, the result is computed at once.
    pub(super) fn structure(&mut self, structure: Structure, inputs: &[Value]) -> Result<Value> {
        let is_weight = inputs.iter().any(|v| matches!(v, Value::Constant(_, true)));
        if inputs.iter().all(|v| matches!(v, Value::Constant(..))) {
            let floats: Vec<Tensor<f32>> = inputs.iter().map(|v| self.floats_of(v)).collect::<Result<_>>()?;
            let mut operands = Vec::with_capacity(floats.len());
            for tensor in &floats {
                if tensor.values.is_empty() {
                    return Err(Error::shape("constant", "at least one value", "none"));
                }
                operands.push(Operand { dims: Dims::new(&tensor.dims)?, data: &tensor.values });
            }
            let dims = structure.dims(&operands.iter().map(|o| o.dims).collect::<Vec<_>>())?;
            super::constant::size(dims.sizes())?;
            self.spend(dims.size())?;
            let mut values = vec![0.0; dims.size()];
            structure.forward(&operands, &mut values);
            return self.constant(Constant::Floats(Tensor { dims: dims.sizes().to_vec(), values }), is_weight);
        }
        let inputs = inputs.iter().map(|v| self.node_of(v)).collect::<Result<Vec<_>>>()?;
        self.builder.push_structure(structure, inputs).map(Value::Node)
    }

    /// The floats of a constant.
    pub(super) fn floats_of(&self, value: &Value) -> Result<Tensor<f32>> {
        match value {
            Value::Constant(constant, _) => Ok(constant.to_floats()),
            _ => Err(Error::shape("input", "constant weights", "a value that depends on the sample")),
        }
    }

    pub(super) fn reshape(&mut self, value: &Value, dims: &[usize]) -> Result<Value> {
        match value {
            Value::Constant(constant, w) => {
                let out = moved!(&**constant, t => t.reshaped(dims.to_vec())?);
                self.constant(out, *w)
            }
            other => {
                let node = self.node_of(other)?;
                let shape = Shape::from_dims(Dims::new(dims)?);
                self.builder.push_reshape(node, shape).map(Value::Node)
            }
        }
    }

    pub(super) fn transpose(&mut self, value: &Value, order: &[usize]) -> Result<Value> {
        if let Value::Constant(constant, w) = value {
            let out = moved!(&**constant, t => t.transposed(order)?);
            return self.constant(out, *w);
        }
        let dims = self.dims(value);
        let out: Vec<usize> = order.iter().map(|&k| dims[k]).collect();
        let long: Vec<usize> = order.iter().copied().filter(|&k| dims[k] != 1).collect();
        if long.is_sorted() {
            // Only axes of size one move, so the numbers stay in their order.
            return self.reshape(value, &out);
        }
        let node = self.node_of(value)?;
        let mut source = node;
        while let (Op::Reshape, [input]) = (self.builder.op(source), self.builder.inputs(source)) {
            source = *input;
        }
        if let (Op::Structure(Structure::Transpose { order: first }), [input]) =
            (self.builder.op(source), self.builder.inputs(source))
        {
            // If the reshape in between only adds or removes axes of size one, both transposes are one transpose of
            // the longer axes.
            let (input, first) = (*input, first.clone());
            let before = self.builder.shape_of(source).dims().sizes().to_vec();
            let kept = |dims: &[usize]| dims.iter().copied().filter(|&d| d != 1).collect::<Vec<_>>();
            if kept(&before) == kept(&dims) {
                let original = self.builder.shape_of(input).dims().sizes().to_vec();
                let axes: Vec<usize> = (0..dims.len()).filter(|&k| dims[k] != 1).collect();
                let old: Vec<usize> = first.iter().copied().filter(|&k| original[k] != 1).collect();
                let through: Vec<usize> =
                    long.iter().filter_map(|k| axes.iter().position(|a| a == k)).map(|p| old[p]).collect();
                if through.is_sorted() {
                    return self.reshape(&Value::Node(input), &out);
                }
                if first.len() == dims.len() && before == dims {
                    let order: Vec<usize> = order.iter().map(|&k| first[k]).collect();
                    return self.structure(Structure::Transpose { order }, &[Value::Node(input)]);
                }
            }
        }
        self.structure(Structure::Transpose { order: order.to_vec() }, &[Value::Node(node)])
    }

    /// φ, placed in front of a transpose if there is one: both commute, and φ is then next to its linear map.
    pub(super) fn activate(&mut self, value: &Value, activation: Activation) -> Result<Value> {
        if let Value::Constant(constant, w) = value {
            let out = constant.to_floats().map(|v| activation.apply(v));
            return self.constant(Constant::Floats(out), *w);
        }
        let node = self.node_of(value)?;
        let mut source = node;
        let mut above = Vec::new();
        let mut transposed = false;
        while let (op @ (Op::Reshape | Op::Structure(Structure::Transpose { .. })), [input]) =
            (self.builder.op(source), self.builder.inputs(source))
        {
            transposed |= matches!(op, Op::Structure(_));
            above.push(source);
            source = *input;
        }
        if !transposed || !self.builder.op(source).is_affine() {
            return self.builder.push_activation(node, activation).map(Value::Node);
        }
        let mut out = self.builder.push_activation(source, activation)?;
        for step in above.into_iter().rev() {
            out = match self.builder.op(step).clone() {
                Op::Structure(structure) => self.builder.push_structure(structure, vec![out])?,
                _ => self.builder.push_reshape(out, self.builder.shape_of(step))?,
            };
        }
        Ok(Value::Node(out))
    }

    pub(super) fn slice(&mut self, value: &Value, axis: usize, start: usize, step: i64, count: usize) -> Result<Value> {
        if (start, step, count) == (0, 1, self.dims(value)[axis]) {
            return Ok(value.clone());
        }
        match value {
            Value::Constant(constant, w) => {
                let out = moved!(&**constant, t => t.slice(axis, start, step, count)?);
                self.constant(out, *w)
            }
            _ if count == 0 => Err(Error::unsupported("a slice without values", "every value must have some numbers")),
            other => self.structure(Structure::Slice { axis, start, step, count }, std::slice::from_ref(other)),
        }
    }

    /// The slices at constant places along an axis.
    pub(super) fn gather(&mut self, value: &Value, axis: usize, places: &[usize], of: &[usize]) -> Result<Value> {
        match value {
            Value::Constant(constant, w) => {
                let out = moved!(&**constant, t => t.gathered(axis, places, of)?);
                self.constant(out, *w)
            }
            other => {
                self.spend(places.len())?;
                if let [start] = places {
                    // For a single place this is a slice, and its axis is removed.
                    let part = self.slice(other, axis, *start, 1, 1)?;
                    let mut dims = self.dims(other);
                    dims.splice(axis..=axis, of.iter().copied());
                    return self.reshape(&part, &dims);
                }
                let structure = Structure::Gather { axis, indices: places.to_vec(), dims: Dims::new(of)? };
                self.structure(structure, std::slice::from_ref(other))
            }
        }
    }

    pub(super) fn concat(&mut self, values: &[Value], axis: usize) -> Result<Value> {
        if let [only] = values {
            return Ok(only.clone());
        }
        let constants: Option<Vec<&Constant>> =
            values.iter().map(|v| if let Value::Constant(c, _) = v { Some(&**c) } else { None }).collect();
        let Some(constants) = constants else {
            // Empty parts come from an empty cache and are left out.
            let parts: Vec<Value> = values.iter().filter(|v| !self.dims(v).contains(&0)).cloned().collect();
            return self.structure(Structure::Concat { axis }, &parts);
        };
        let is_weight = values.iter().any(|v| matches!(v, Value::Constant(_, true)));
        let ints: Option<Vec<&Tensor<i64>>> =
            constants.iter().map(|c| if let Constant::Ints(t) = c { Some(t) } else { None }).collect();
        let out = match ints {
            Some(ints) => Constant::Ints(Tensor::concatenated(&ints, axis)?),
            None => {
                let floats: Vec<Tensor<f32>> = constants.iter().map(|c| c.to_floats()).collect();
                Constant::Floats(Tensor::concatenated(&floats.iter().collect::<Vec<_>>(), axis)?)
            }
        };
        self.constant(out, is_weight)
    }

    /// Broadcasts a value to dimensions that may themselves be broadcast.
    pub(super) fn expand(&mut self, value: &Value, target: &[usize]) -> Result<Value> {
        let own = self.dims(value);
        let dims = broadcast(&own, target)?;
        if dims == own {
            return Ok(value.clone());
        }
        match value {
            Value::Constant(constant, w) => {
                let out = moved!(&**constant, t => t.expanded(&dims)?);
                self.constant(out, *w)
            }
            other => {
                let structure = Structure::Expand { dims: Dims::new(&dims)? };
                self.structure(structure, std::slice::from_ref(other))
            }
        }
    }

    /// A constant around a value; negative paddings cut.
    pub(super) fn pad(&mut self, value: &Value, pads: &[[i64; 2]], fill: f32) -> Result<Value> {
        let mut out = value.clone();
        for (axis, &[before, after]) in pads.iter().enumerate() {
            let size = self.dims(&out)[axis] as i64;
            let (cut, end) = ((-before).max(0), (-after).max(0));
            let left = size - cut - end;
            if left <= 0 {
                return Err(Error::shape("pads", format!("fewer than {size} values cut"), format!("{pads:?}")));
            }
            out = self.slice(&out, axis, cut as usize, 1, left as usize)?;
        }
        let padding: Vec<[usize; 2]> = pads.iter().map(|p| p.map(|v| v.max(0) as usize)).collect();
        if padding.iter().all(|p| *p == [0, 0]) {
            return Ok(out);
        }
        if padding.iter().flatten().any(|&p| p > 1 << 24) {
            return Err(Error::shape("pads", "at most 2^24", format!("{pads:?}")));
        }
        if let Value::Constant(constant, w) = &out {
            let constant = constant.clone();
            let w = *w;
            let dims: Vec<usize> =
                constant.dims().iter().zip(&padding).map(|(&d, p)| d.saturating_add(p[0] + p[1])).collect();
            self.spend(super::constant::size(&dims)?)?;
            let padded = match &*constant {
                Constant::Ints(t) => Constant::Ints(padded(t, &padding, fill as i64)?),
                Constant::Floats(t) => Constant::Floats(padded(t, &padding, fill)?),
            };
            return self.constant(padded, w);
        }
        self.structure(Structure::Pad { padding, value: fill }, &[out])
    }
}

fn padded<T: Copy + Default>(tensor: &Tensor<T>, padding: &[[usize; 2]], fill: T) -> Result<Tensor<T>> {
    let mut out = tensor.clone();
    for (axis, [before, after]) in padding.iter().enumerate() {
        let around = |count: usize| {
            let mut dims = out.dims.clone();
            dims[axis] = count;
            super::constant::size(&dims).map(|size| Tensor { values: vec![fill; size], dims })
        };
        let (front, back) = (around(*before)?, around(*after)?);
        out = Tensor::concatenated(&[&front, &out, &back], axis)?;
    }
    Ok(out)
}
