//! Operators on constants and shapes, which are computed when a file is read.

use super::constant::{Constant, Tensor, broadcast, place, places, size};
use super::import::{Importer, Value};
use super::nodes::Inputs;
use super::proto::NodeProto;
use super::tensor;
use crate::graph::Binary;
use crate::{Error, Result};

impl Importer<'_> {
    pub(super) fn evaluate(&mut self, node: &NodeProto, inputs: &Inputs<'_>) -> Result<Value> {
        match node.op_type.as_str() {
            "Shape" => {
                let dims: Vec<i64> = self.dims(inputs.value(0)?).iter().map(|&d| d as i64).collect();
                let length = dims.len() as i64;
                let clamp = |v: i64| (if v < 0 { v.saturating_add(length) } else { v }).clamp(0, length) as usize;
                let (start, end) = (clamp(node.int("start", 0)), clamp(node.int("end", length)));
                return self.constant(Constant::ints(dims.get(start..end).unwrap_or_default().to_vec()), false);
            }
            "Size" => {
                let size = self.dims(inputs.value(0)?).iter().product::<usize>();
                return self.constant(Constant::Ints(Tensor::scalar(size as i64)), false);
            }
            // All values are finite: a softmax of finite numbers is never NaN.
            "IsNaN" => {
                let dims = self.dims(inputs.value(0)?);
                let values = vec![0; size(&dims)?];
                return self.constant(Constant::Ints(Tensor { dims, values }), false);
            }
            "Where" => return self.choice(inputs),
            _ => {}
        }
        let constants = (0..inputs.0.len()).map(|k| match inputs.get(k) {
            Some(Value::Constant(constant, _)) => Ok(&**constant),
            Some(_) => Err(Self::only_constants(&node.op_type)),
            None => Err(Error::shape(format!("input {k}"), "a constant", "nothing")),
        });
        let constants = constants.collect::<Result<Vec<_>>>()?;
        let first = *constants.first().ok_or_else(|| Error::shape("input 0", "a constant", "nothing"))?;
        let out = match (node.op_type.as_str(), &constants[..]) {
            ("ConstantOfShape", [Constant::Ints(dims)]) => constant_of_shape(node, &dims.values)?,
            ("Range", [start, limit, delta]) => range(start, limit, delta)?,
            ("Equal" | "Less" | "Greater" | "LessOrEqual" | "GreaterOrEqual", [a, b]) => compare(&node.op_type, a, b)?,
            ("Not", [Constant::Ints(a)]) => Constant::Ints(a.map(|v| i64::from(v == 0))),
            ("And" | "Or" | "Xor", [Constant::Ints(a), Constant::Ints(b)]) => {
                let truth = |a: i64, b: i64| match node.op_type.as_str() {
                    "And" => a != 0 && b != 0,
                    "Or" => a != 0 || b != 0,
                    _ => (a != 0) != (b != 0),
                };
                Constant::Ints(a.zip(b, |a, b| Some(i64::from(truth(a, b))))?)
            }
            ("Mod", [Constant::Ints(a), Constant::Ints(b)]) => {
                let c = node.int("fmod", 0) != 0;
                let rest = |a: i64, b: i64| {
                    let r = a.checked_rem(b)?;
                    Some(if !c && r != 0 && (r < 0) != (b < 0) { r + b } else { r })
                };
                Constant::Ints(a.zip(b, rest)?)
            }
            ("Mod", [a, b]) => {
                // The remainder has the sign of the divisor or, as in C, that of the dividend.
                let c = node.int("fmod", 0) != 0;
                let rest = |a: f32, b: f32| {
                    let r = a % b;
                    Some(if !c && r != 0.0 && (r < 0.0) != (b < 0.0) { r + b } else { r })
                };
                Constant::Floats(a.to_floats().zip(&b.to_floats(), rest)?)
            }
            ("Ceil" | "Floor" | "Round" | "Sign", [Constant::Floats(a)]) => {
                Constant::Floats(a.map(|v| match node.op_type.as_str() {
                    "Ceil" => v.ceil(),
                    "Floor" => v.floor(),
                    "Round" => v.round_ties_even(),
                    _ if v == 0.0 => 0.0,
                    _ => v.signum(),
                }))
            }
            ("Sign", [Constant::Ints(a)]) => Constant::Ints(a.map(i64::signum)),
            ("ScatterND", [data, Constant::Ints(indices), updates]) => scatter(node, data, indices, updates)?,
            ("GatherND", [data, Constant::Ints(indices)]) => gather_nd(node, data, indices)?,
            ("GatherElements", [data, Constant::Ints(indices)]) => gather_elements(node, data, indices)?,
            ("Trilu", _) => triangle(node, first, inputs)?,
            ("CumSum", [x, axis]) => cumulative(node, x, axis)?,
            ("NonZero", [x]) => nonzero(x)?,
            ("OneHot", [Constant::Ints(at), depth, values]) => one_hot(node, at, depth, values)?,
            ("OneHot", [Constant::Floats(at), depth, values]) => one_hot(node, &at.map(|v| v as i64), depth, values)?,
            (operator, _) if operator.starts_with("Reduce") => reduce(node, inputs, first)?,
            _ => return Err(Error::shape(&node.op_type, "constants of fitting types", "others")),
        };
        self.constant(out, false)
    }

    /// A choice between two values by a constant condition.
    fn choice(&mut self, inputs: &Inputs<'_>) -> Result<Value> {
        let condition = match inputs.constant(0)? {
            Some(Constant::Ints(tensor)) => tensor.map(|v| i64::from(v != 0)),
            _ => return Err(Error::shape("condition", "truth values", "others")),
        };
        let (a, b) = (inputs.value(1)?, inputs.value(2)?);
        let dims = broadcast(&broadcast(&condition.dims, &self.dims(a))?, &self.dims(b))?;
        let at_most_one = |wanted: i64| condition.values.iter().all(|&v| v == wanted);
        if at_most_one(1) {
            return self.expand(a, &dims);
        }
        if at_most_one(0) {
            return self.expand(b, &dims);
        }
        if let (Value::Constant(a, x), Value::Constant(b, y)) = (a, b) {
            let condition = condition.expanded(&dims)?;
            let out = if let (Constant::Ints(a), Constant::Ints(b)) = (&**a, &**b) {
                Constant::Ints(select(&condition, &a.expanded(&dims)?, &b.expanded(&dims)?))
            } else {
                Constant::Floats(select(&condition, &a.to_floats().expanded(&dims)?, &b.to_floats().expanded(&dims)?))
            };
            return self.constant(out, *x || *y);
        }
        // mask·a + (1 − mask)·b.
        let mut parts = Vec::new();
        for (value, mask) in [(a, condition.map(|v| v as f32)), (b, condition.map(|v| 1.0 - v as f32))] {
            let part = match value {
                Value::Constant(constant, _) => {
                    let values =
                        constant.to_floats().zip(&mask, |v, m| Some(if m == 0.0 { 0.0 } else { v.max(-1e30) }))?;
                    self.constant(Constant::Floats(values), false)?
                }
                value => {
                    let mask = self.constant(Constant::Floats(mask), false)?;
                    self.binary(Binary::Multiply, value, &mask)?
                }
            };
            parts.push(part);
        }
        let sum = self.binary(Binary::Add, &parts[0], &parts[1])?;
        self.expand(&sum, &dims)
    }
}

fn select<T: Copy>(condition: &Tensor<i64>, a: &Tensor<T>, b: &Tensor<T>) -> Tensor<T> {
    let values = condition.values.iter().zip(a.values.iter().zip(&b.values));
    Tensor { dims: condition.dims.clone(), values: values.map(|(&c, (&a, &b))| if c != 0 { a } else { b }).collect() }
}

fn natural(values: &[i64]) -> Result<Vec<usize>> {
    let all: Option<Vec<usize>> = values.iter().map(|&v| usize::try_from(v).ok()).collect();
    all.ok_or_else(|| Error::shape("dimensions", "numbers ≥ 0", format!("{values:?}")))
}

fn constant_of_shape(node: &NodeProto, dims: &[i64]) -> Result<Constant> {
    let dims = natural(dims)?;
    let count = size(&dims)?;
    let value = match node.attribute("value").and_then(|a| a.t.as_ref()) {
        Some(stored) => tensor::read(stored)?,
        None => Constant::Floats(Tensor::scalar(0.0)),
    };
    let one = || Error::shape("value", "one number", "none");
    Ok(match value {
        Constant::Floats(t) => {
            Constant::Floats(Tensor { dims, values: vec![*t.values.first().ok_or_else(one)?; count] })
        }
        Constant::Ints(t) => Constant::Ints(Tensor { dims, values: vec![*t.values.first().ok_or_else(one)?; count] }),
    })
}

fn range(start: &Constant, limit: &Constant, delta: &Constant) -> Result<Constant> {
    let refuse = || Error::shape("range", "a finite number of values", "more");
    if let (Constant::Ints(a), Constant::Ints(b), Constant::Ints(d)) = (start, limit, delta) {
        let (&[a], &[b], &[d]) = (&a.values[..], &b.values[..], &d.values[..]) else { return Err(refuse()) };
        let (span, step) = (i128::from(b) - i128::from(a), i128::from(d));
        if step == 0 {
            return Err(refuse());
        }
        // The quotient, rounded up.
        let count = (span * step.signum() + step.abs() - 1).div_euclid(step.abs()).max(0);
        let count = size(&[usize::try_from(count).map_err(|_| refuse())?])?;
        let values = (0..count as i64).map(|k| a.wrapping_add(k.wrapping_mul(d))).collect();
        return Ok(Constant::ints(values));
    }
    let number = |c: &Constant| c.to_floats().values.first().copied().ok_or_else(refuse);
    let (a, b, d) = (f64::from(number(start)?), f64::from(number(limit)?), f64::from(number(delta)?));
    let count = ((b - a) / d).ceil().max(0.0);
    if !count.is_finite() || count > 1e9 {
        return Err(refuse());
    }
    let count = size(&[count as usize])?;
    Ok(Constant::Floats(Tensor { dims: vec![count], values: (0..count).map(|k| (a + k as f64 * d) as f32).collect() }))
}

fn compare(operator: &str, a: &Constant, b: &Constant) -> Result<Constant> {
    fn holds<T: PartialOrd>(operator: &str, a: T, b: T) -> Option<i64> {
        Some(i64::from(match operator {
            "Equal" => a == b,
            "Less" => a < b,
            "Greater" => a > b,
            "LessOrEqual" => a <= b,
            _ => a >= b,
        }))
    }
    Ok(Constant::Ints(match (a, b) {
        (Constant::Ints(a), Constant::Ints(b)) => a.zip(b, |a, b| holds(operator, a, b))?,
        _ => a.to_floats().zip(&b.to_floats(), |a, b| holds(operator, a, b))?,
    }))
}

/// The places in the data that the rows of indices name, and the number of values at each of them.
fn offsets(data: &[usize], indices: &Tensor<i64>) -> Result<(Vec<usize>, usize)> {
    let depth = indices.dims.last().copied().unwrap_or(0);
    if depth == 0 || depth > data.len() {
        return Err(Error::shape("indices", format!("1 to {} numbers each", data.len()), depth));
    }
    let inner: usize = data[depth..].iter().product();
    let mut out = Vec::with_capacity(indices.values.len() / depth);
    for row in indices.values.chunks_exact(depth) {
        let mut at = 0;
        for (&index, &size) in row.iter().zip(data) {
            at = at * size + place(index, size)?;
        }
        out.push(at * inner);
    }
    Ok((out, inner))
}

fn scatter(node: &NodeProto, data: &Constant, indices: &Tensor<i64>, updates: &Constant) -> Result<Constant> {
    fn write<T: Copy>(
        data: &Tensor<T>,
        indices: &Tensor<i64>,
        updates: &Tensor<T>,
        f: impl Fn(T, T) -> T,
    ) -> Result<Tensor<T>> {
        let (places, inner) = offsets(&data.dims, indices)?;
        if updates.values.len() != places.len() * inner {
            return Err(Error::shape("updates", places.len() * inner, updates.values.len()));
        }
        let mut out = data.clone();
        for (k, &at) in places.iter().enumerate() {
            let new = &updates.values[k * inner..(k + 1) * inner];
            out.values[at..at + inner].iter_mut().zip(new).for_each(|(old, &new)| *old = f(*old, new));
        }
        Ok(out)
    }
    let how = node.text("reduction", "none");
    if !matches!(how, "none" | "add" | "mul" | "max" | "min") {
        return Err(Error::shape("reduction", "none, add, mul, max or min", how));
    }
    Ok(match (data, updates) {
        (Constant::Ints(data), Constant::Ints(updates)) => {
            let f = |old: i64, new: i64| match how {
                "add" => old.wrapping_add(new),
                "mul" => old.wrapping_mul(new),
                "max" => old.max(new),
                "min" => old.min(new),
                _ => new,
            };
            Constant::Ints(write(data, indices, updates, f)?)
        }
        _ => {
            let f = |old: f32, new: f32| match how {
                "add" => old + new,
                "mul" => old * new,
                "max" => old.max(new),
                "min" => old.min(new),
                _ => new,
            };
            Constant::Floats(write(&data.to_floats(), indices, &updates.to_floats(), f)?)
        }
    })
}

fn gather_nd(node: &NodeProto, data: &Constant, indices: &Tensor<i64>) -> Result<Constant> {
    node.require_int("batch_dims", 0, "only GatherND without batch_dims is computed")?;
    fn read<T: Copy>(data: &Tensor<T>, indices: &Tensor<i64>) -> Result<Tensor<T>> {
        let (places, inner) = offsets(&data.dims, indices)?;
        let depth = indices.dims.last().copied().unwrap_or(0);
        let mut dims = indices.dims[..indices.dims.len() - 1].to_vec();
        dims.extend(&data.dims[depth..]);
        size(&dims)?;
        Ok(Tensor { dims, values: places.iter().flat_map(|&at| data.values[at..at + inner].iter().copied()).collect() })
    }
    Ok(super::constant::moved!(data, t => read(t, indices)?))
}

fn gather_elements(node: &NodeProto, data: &Constant, indices: &Tensor<i64>) -> Result<Constant> {
    fn read<T: Copy>(data: &Tensor<T>, indices: &Tensor<i64>, axis: usize) -> Result<Tensor<T>> {
        let mut values = Vec::with_capacity(indices.values.len());
        let mut at = vec![0usize; data.dims.len()];
        for &index in &indices.values {
            let mut offset = 0;
            for k in 0..at.len() {
                offset = offset * data.dims[k] + if k == axis { place(index, data.dims[k])? } else { at[k] };
            }
            values.push(data.values[offset]);
            for k in (0..at.len()).rev() {
                at[k] += 1;
                if at[k] < indices.dims[k] {
                    break;
                }
                at[k] = 0;
            }
        }
        Ok(Tensor { dims: indices.dims.clone(), values })
    }
    let dims = data.dims();
    let axis = place(node.int("axis", 0), dims.len())?;
    let fits = indices.dims.len() == dims.len() && (0..dims.len()).all(|k| k == axis || indices.dims[k] <= dims[k]);
    if !fits {
        return Err(Error::shape("indices", format!("the axes of {dims:?}"), format!("{:?}", indices.dims)));
    }
    Ok(super::constant::moved!(data, t => read(t, indices, axis)?))
}

fn triangle(node: &NodeProto, x: &Constant, inputs: &Inputs<'_>) -> Result<Constant> {
    let diagonal = inputs.ints(1)?.and_then(|k| k.first().copied()).unwrap_or(0);
    let upper = node.int("upper", 1) != 0;
    let &[.., rows, columns] = x.dims() else {
        return Err(Error::shape("Trilu", "two axes or more", format!("{:?}", x.dims())));
    };
    fn keep<T: Copy + Default>(t: &Tensor<T>, kept: impl Fn(usize) -> bool) -> Tensor<T> {
        let values = t.values.iter().enumerate().map(|(k, &v)| if kept(k) { v } else { T::default() });
        Tensor { dims: t.dims.clone(), values: values.collect() }
    }
    let kept = |k: usize| {
        let (row, column) = ((k / columns % rows) as i64, (k % columns) as i64);
        if upper { column - row >= diagonal } else { column - row <= diagonal }
    };
    Ok(super::constant::moved!(x, t => keep(t, kept)))
}

fn cumulative(node: &NodeProto, x: &Constant, axis: &Constant) -> Result<Constant> {
    let axis = match axis {
        Constant::Ints(axis) => axis.values.first().copied().unwrap_or(0),
        Constant::Floats(_) => return Err(Error::shape("axis", "an integer", "a float")),
    };
    let dims = x.dims();
    let axis = place(axis, dims.len())?;
    let (exclusive, reverse) = (node.int("exclusive", 0) != 0, node.int("reverse", 0) != 0);
    fn sum<T: Copy + Default>(
        t: &Tensor<T>,
        axis: usize,
        exclusive: bool,
        reverse: bool,
        f: impl Fn(T, T) -> T,
    ) -> Tensor<T> {
        let inner: usize = t.dims[axis + 1..].iter().product();
        let length = t.dims[axis];
        let mut out = t.clone();
        for lane in 0..t.values.len() / length.max(1) {
            let first = lane / inner.max(1) * inner * length + lane % inner.max(1);
            let mut total = T::default();
            for k in 0..length {
                let at = first + inner * if reverse { length - 1 - k } else { k };
                let next = f(total, t.values[at]);
                out.values[at] = if exclusive { total } else { next };
                total = next;
            }
        }
        out
    }
    Ok(match x {
        Constant::Ints(t) => Constant::Ints(sum(t, axis, exclusive, reverse, i64::wrapping_add)),
        Constant::Floats(t) => Constant::Floats(sum(t, axis, exclusive, reverse, |a, b| a + b)),
    })
}

fn nonzero(x: &Constant) -> Result<Constant> {
    let flags: Vec<bool> = match x {
        Constant::Ints(t) => t.values.iter().map(|&v| v != 0).collect(),
        Constant::Floats(t) => t.values.iter().map(|&v| v != 0.0).collect(),
    };
    let found: Vec<usize> = flags.iter().enumerate().filter_map(|(k, &set)| set.then_some(k)).collect();
    let dims = x.dims();
    let mut values = Vec::with_capacity(size(&[dims.len(), found.len()])?);
    for axis in 0..dims.len() {
        let inner: usize = dims[axis + 1..].iter().product();
        values.extend(found.iter().map(|k| (k / inner % dims[axis]) as i64));
    }
    Ok(Constant::Ints(Tensor { dims: vec![dims.len(), found.len()], values }))
}

fn one_hot(node: &NodeProto, at: &Tensor<i64>, depth: &Constant, values: &Constant) -> Result<Constant> {
    let depth = depth.to_floats().values.first().copied().unwrap_or(0.0) as usize;
    if values.len() != 2 {
        return Err(Error::shape("values", "two numbers", values.len()));
    }
    let mut dims = at.dims.clone();
    let axis = node.int("axis", -1);
    let axis = if axis == -1 || axis == dims.len() as i64 { dims.len() } else { place(axis, dims.len() + 1)? };
    dims.insert(axis, depth);
    let count = size(&dims)?;
    let inner: usize = dims[axis + 1..].iter().product();
    let hot = |k: usize| {
        let (outer, row, rest) = (k / (inner * depth), k / inner % depth, k % inner);
        at.values
            .get(outer * inner + rest)
            .is_some_and(|&v| (if v < 0 { v.saturating_add(depth as i64) } else { v }) == row as i64)
    };
    fn marked<T: Copy>(dims: &[usize], [off, on]: [T; 2], count: usize, hot: impl Fn(usize) -> bool) -> Tensor<T> {
        Tensor { dims: dims.to_vec(), values: (0..count).map(|k| if hot(k) { on } else { off }).collect() }
    }
    Ok(super::constant::moved!(values, t => marked(&dims, [t.values[0], t.values[1]], count, hot)))
}

/// A reduction of integers, or the product of floats.
fn reduce(node: &NodeProto, inputs: &Inputs<'_>, x: &Constant) -> Result<Constant> {
    let dims = x.dims().to_vec();
    let axes = match inputs.ints_or(1, node, "axes")?.filter(|axes| !axes.is_empty()) {
        Some(axes) => places(&axes, dims.len())?,
        None => (0..dims.len()).collect(),
    };
    let keep = node.int("keepdims", 1) != 0;
    let kept: Vec<usize> = dims.iter().enumerate().map(|(k, &d)| if axes.contains(&k) { 1 } else { d }).collect();
    let count = size(&kept)?;
    let place_of = |mut k: usize| {
        let (mut out, mut step) = (0, 1);
        for axis in (0..dims.len()).rev() {
            let index = k % dims[axis];
            k /= dims[axis];
            if !axes.contains(&axis) {
                out += index * step;
                step *= dims[axis];
            }
        }
        out
    };
    let out: Vec<usize> = kept.iter().enumerate().filter(|(k, _)| keep || !axes.contains(k)).map(|(_, &d)| d).collect();
    fn fold<T: Copy>(
        t: &Tensor<T>,
        count: usize,
        at: impl Fn(usize) -> usize,
        f: impl Fn(T, T) -> Option<T>,
    ) -> Option<Vec<T>> {
        let mut sums: Vec<Option<T>> = vec![None; count];
        for (k, &v) in t.values.iter().enumerate() {
            let place = at(k);
            sums[place] = Some(match sums[place] {
                None => v,
                Some(old) => f(old, v)?,
            });
        }
        sums.into_iter().collect()
    }
    let refuse = || Error::shape(&node.op_type, "integers below 2^63 that are not empty", "others");
    Ok(match x {
        Constant::Ints(t) => {
            let f = |a: i64, b: i64| match node.op_type.as_str() {
                "ReduceProd" => a.checked_mul(b),
                "ReduceMax" => Some(a.max(b)),
                "ReduceMin" => Some(a.min(b)),
                _ => a.checked_add(b),
            };
            if !matches!(node.op_type.as_str(), "ReduceProd" | "ReduceMax" | "ReduceMin" | "ReduceSum") {
                return Err(refuse());
            }
            Constant::Ints(Tensor { dims: out, values: fold(t, count, place_of, f).ok_or_else(refuse)? })
        }
        Constant::Floats(t) => {
            let values = fold(t, count, place_of, |a: f32, b: f32| Some(a * b)).ok_or_else(refuse)?;
            Constant::Floats(Tensor { dims: out, values })
        }
    })
}
