//! Nodes that only move values: reshapes, transposes, slices, paddings and operators composed of these.

use super::constant::{Constant, Tensor, place, places};
use super::import::{Importer, Value, finite};
use super::nodes::Inputs;
use super::proto::NodeProto;
use crate::graph::Structure;
use crate::network::Op;
use crate::{Error, Result};

impl Importer<'_> {
    pub(super) fn reshape_node(&mut self, node: &NodeProto, inputs: &Inputs<'_>) -> Result<Value> {
        let value = inputs.value(0)?;
        let dims = self.dims(value);
        let out = match node.op_type.as_str() {
            "Flatten" => {
                let axis = node.int("axis", 1);
                let axis = if axis == dims.len() as i64 { dims.len() } else { place(axis, dims.len())? };
                vec![dims[..axis].iter().product(), dims[axis..].iter().product()]
            }
            "Reshape" => {
                let target = inputs.ints_or(1, node, "shape")?;
                let target = target.ok_or_else(|| Error::shape("reshape", "its target", "none"))?;
                self.target(&target, &dims, node.int("allowzero", 0) == 0, matches!(value, Value::Node(_)))?
            }
            "Squeeze" => match inputs.ints_or(1, node, "axes")? {
                None => dims.iter().copied().filter(|&d| d != 1).collect(),
                Some(axes) => {
                    let mut out = dims.clone();
                    for k in places(&axes, dims.len())?.into_iter().rev() {
                        if out.remove(k) != 1 {
                            return Err(Error::shape(format!("axis {k}"), "size 1", dims[k]));
                        }
                    }
                    out
                }
            },
            _ => {
                let axes = inputs.ints_or(1, node, "axes")?;
                let axes = axes.ok_or_else(|| Error::shape("axes", "at least one", "none"))?;
                let rank = dims.len().saturating_add(axes.len());
                if rank > 16 {
                    return Err(Error::shape("unsqueeze", "at most 16 axes", rank));
                }
                let mut out = dims.clone();
                for k in places(&axes, rank)? {
                    out.insert(k.min(out.len()), 1);
                }
                out
            }
        };
        self.reshape(value, &out)
    }

    /// The dimensions that a reshape asks for: 0 copies a size, −1 takes what is left.
    fn target(&self, target: &[i64], dims: &[usize], copy_zeros: bool, of_sample: bool) -> Result<Vec<usize>> {
        let size: usize = dims.iter().product();
        let resolve = |target: &[i64]| {
            let mut out = Vec::with_capacity(target.len());
            let mut inferred = None;
            for (axis, &dim) in target.iter().enumerate() {
                out.push(match dim {
                    -1 if inferred.is_none() => {
                        inferred = Some(axis);
                        1
                    }
                    0 if copy_zeros => *dims.get(axis)?,
                    dim => usize::try_from(dim).ok()?,
                });
            }
            let known = out.iter().try_fold(1usize, |p, &d| p.checked_mul(d))?;
            if let Some(axis) = inferred {
                out[axis] = size.checked_div(known)?;
            }
            (out.iter().try_fold(1usize, |p, &d| p.checked_mul(d)) == Some(size)).then_some(out)
        };
        // A batch size that the file fixes, alone or folded into the first axis, becomes a batch of one here.
        let batch = self.fixed_batch.filter(|_| of_sample).map(|b| b as i64);
        let of_one = match (batch, target) {
            (Some(batch), [first, rest @ ..]) if *first > 0 && first % batch == 0 => {
                resolve(&[&[first / batch], rest].concat())
            }
            _ => None,
        };
        of_one.or_else(|| resolve(target)).ok_or_else(|| {
            Error::shape(
                "reshape",
                format!("dimensions of {size} values, as {dims:?} has for a batch of one"),
                format!("{target:?}; the batch must stay free"),
            )
        })
    }

    pub(super) fn transpose_node(&mut self, node: &NodeProto, inputs: &Inputs<'_>) -> Result<Value> {
        let value = inputs.value(0)?;
        let rank = self.dims(value).len();
        let order = match node.ints("perm") {
            None | Some([]) => (0..rank).rev().collect(),
            Some(order) => order.iter().map(|&k| place(k, rank)).collect::<Result<Vec<_>>>()?,
        };
        let mut all = order.clone();
        all.sort_unstable();
        if all != (0..rank).collect::<Vec<_>>() {
            return Err(Error::shape("perm", format!("an order of {rank} axes"), format!("{order:?}")));
        }
        self.transpose(value, &order)
    }

    pub(super) fn slice_node(&mut self, node: &NodeProto, inputs: &Inputs<'_>) -> Result<Value> {
        let missing = || Error::shape("slice", "starts and ends", "none");
        let starts = inputs.ints_or(1, node, "starts")?.ok_or_else(missing)?;
        let ends = inputs.ints_or(2, node, "ends")?.ok_or_else(missing)?;
        let axes = inputs.ints_or(3, node, "axes")?.unwrap_or_else(|| (0..starts.len() as i64).collect());
        let steps = inputs.ints(4)?.unwrap_or_else(|| vec![1; starts.len()]);
        if [ends.len(), axes.len(), steps.len()] != [starts.len(); 3] {
            return Err(Error::shape("slice", format!("{} ends, axes and steps", starts.len()), "others"));
        }
        let mut out = inputs.value(0)?.clone();
        for k in 0..starts.len() {
            let dims = self.dims(&out);
            let axis = place(axes[k], dims.len())?;
            let (start, step, count) = range(starts[k], ends[k], steps[k], dims[axis])?;
            out = self.slice(&out, axis, start, step, count)?;
        }
        Ok(out)
    }

    pub(super) fn split(&mut self, node: &NodeProto, inputs: &Inputs<'_>) -> Result<Vec<Value>> {
        let value = inputs.value(0)?;
        let dims = self.dims(value);
        let axis = place(node.int("axis", 0), dims.len())?;
        let parts = node.output.len().max(1);
        let sizes = match inputs.ints_or(1, node, "split")?.filter(|s| !s.is_empty()) {
            Some(sizes) => sizes.iter().map(|&s| usize::try_from(s).unwrap_or(usize::MAX)).collect::<Vec<_>>(),
            None => {
                let each = dims[axis].div_ceil(parts);
                (0..parts).map(|k| each.min(dims[axis].saturating_sub(k * each))).collect()
            }
        };
        if sizes.iter().try_fold(0usize, |a, &b| a.checked_add(b)) != Some(dims[axis]) || sizes.len() < parts {
            return Err(Error::shape("split", format!("{parts} parts of {}", dims[axis]), format!("{sizes:?}")));
        }
        let mut start = 0;
        let mut out = Vec::with_capacity(sizes.len());
        for size in sizes.into_iter().take(parts) {
            out.push(self.slice(value, axis, start, 1, size)?);
            start += size;
        }
        Ok(out)
    }

    pub(super) fn gather_node(&mut self, node: &NodeProto, inputs: &Inputs<'_>) -> Result<Value> {
        let (value, indices) = (inputs.value(0)?, inputs.value(1)?);
        let dims = self.dims(value);
        let axis = place(node.int("axis", 0), dims.len())?;
        match indices {
            Value::Constant(constant, _) => {
                let Constant::Ints(Tensor { dims: of, values }) = &**constant else {
                    return Err(Error::shape("indices", "integers", "floats"));
                };
                let places = values.iter().map(|&v| place(v, dims[axis])).collect::<Result<Vec<_>>>()?;
                self.gather(value, axis, &places, of)
            }
            // Tokens choose rows of a table.
            _ if axis == 0 && dims.len() == 2 && matches!(value, Value::Constant(..)) => {
                self.structure(Structure::Lookup, &[value.clone(), indices.clone()])
            }
            _ => Err(Error::unsupported(
                "a choice that depends on the sample",
                "only rows of a constant table (an embedding) may be chosen by the sample",
            )),
        }
    }

    pub(super) fn expand_node(&mut self, inputs: &Inputs<'_>) -> Result<Value> {
        let target = inputs.ints(1)?.ok_or_else(|| Error::shape("expand", "its dimensions", "none"))?;
        let mut target = target.iter().map(|&d| usize::try_from(d).unwrap_or(usize::MAX)).collect::<Vec<_>>();
        let value = inputs.value(0)?;
        // A class token is repeated for every sample of the batch size that the file fixes.
        let own = self.dims(value);
        if let (Some(batch), [first, ..]) = (self.fixed_batch, &mut target[..])
            && *first == batch
            && (own.len() < target.len() || own[0] == 1)
        {
            target[0] = 1;
        }
        self.expand(value, &target)
    }

    pub(super) fn tile(&mut self, inputs: &Inputs<'_>) -> Result<Value> {
        let repeats = inputs.ints(1)?.ok_or_else(|| Error::shape("tile", "its repeats", "none"))?;
        let mut out = inputs.value(0)?.clone();
        if repeats.len() != self.dims(&out).len() || repeats.iter().any(|r| !(1..=1 << 16).contains(r)) {
            return Err(Error::shape("repeats", "one positive number per axis", format!("{repeats:?}")));
        }
        for (axis, &repeats) in repeats.iter().enumerate().filter(|(_, r)| **r > 1) {
            let parts = vec![out.clone(); repeats as usize];
            out = self.concat(&parts, axis)?;
        }
        Ok(out)
    }

    pub(super) fn pad_node(&mut self, node: &NodeProto, inputs: &Inputs<'_>) -> Result<Value> {
        let value = inputs.value(0)?;
        let rank = self.dims(value).len();
        let pads = inputs.ints_or(1, node, "pads")?.ok_or_else(|| Error::shape("pads", "some", "none"))?;
        let axes = match inputs.ints(3)? {
            Some(axes) => axes.iter().map(|&a| place(a, rank)).collect::<Result<Vec<_>>>()?,
            None => (0..rank).collect(),
        };
        if pads.len() != 2 * axes.len() || pads.iter().any(|p| p.abs() > 1 << 24) {
            return Err(Error::shape("pads", format!("{} numbers below 2^24", 2 * axes.len()), format!("{pads:?}")));
        }
        let mut each = vec![[0i64; 2]; rank];
        for (k, &axis) in axes.iter().enumerate() {
            each[axis] = [pads[k], pads[axes.len() + k]];
        }
        match node.text("mode", "constant") {
            "constant" => {
                let fill = inputs.number(2)?.unwrap_or_else(|| node.float("value", 0.0));
                self.pad(value, &each, finite(fill))
            }
            mode @ ("edge" | "reflect" | "wrap") => {
                let mut out = value.clone();
                for (axis, &[before, after]) in each.iter().enumerate().filter(|(_, p)| **p != [0, 0]) {
                    let size = self.dims(&out)[axis] as i64;
                    let source = |k: i64| match mode {
                        "edge" => k.clamp(0, size - 1),
                        "wrap" => k.rem_euclid(size),
                        _ if size == 1 => 0,
                        _ => {
                            let period = 2 * (size - 1);
                            let k = k.rem_euclid(period);
                            k.min(period - k)
                        }
                    };
                    let places: Vec<usize> = (-before..size + after).map(|k| source(k) as usize).collect();
                    out = self.gather(&out, axis, &places, &[places.len()])?;
                }
                Ok(out)
            }
            other => Err(Error::unsupported(format!("padding of mode {other:?}"), "use constant, edge or reflect")),
        }
    }

    /// Zeros around the last axes that a convolution can also add itself: the value without them, and their numbers.
    pub(super) fn without_zero_padding(&self, value: &Value, spatial: usize) -> (Value, Vec<[usize; 2]>) {
        if let Value::Node(id) = value
            && let (Op::Structure(Structure::Pad { padding, value: fill }), [input]) =
                (self.builder.op(*id), self.builder.inputs(*id))
            && *fill == 0.0
            && padding.len() == spatial + 2
            && padding[..2] == [[0, 0], [0, 0]]
        {
            return (Value::Node(*input), padding[2..].to_vec());
        }
        (value.clone(), vec![[0, 0]; spatial])
    }

    pub(super) fn depth_and_space(&mut self, node: &NodeProto, inputs: &Inputs<'_>) -> Result<Value> {
        let value = inputs.value(0)?;
        let block = usize::try_from(node.int("blocksize", 0)).ok().filter(|b| (1..1 << 12).contains(b));
        let (Some(b), &[n, c, h, w]) = (block, &self.dims(value)[..]) else {
            return Err(Error::shape(&node.op_type, "a blocksize and four axes", "others"));
        };
        let (middle, order, out): (Vec<usize>, [usize; 6], Vec<usize>) = if node.op_type == "SpaceToDepth" {
            if !h.is_multiple_of(b) || !w.is_multiple_of(b) {
                return Err(Error::shape("blocksize", format!("a divisor of {h} and {w}"), b));
            }
            let order = if node.text("mode", "DCR") == "CRD" { [0, 1, 3, 5, 2, 4] } else { [0, 3, 5, 1, 2, 4] };
            (vec![n, c, h / b, b, w / b, b], order, vec![n, c * b * b, h / b, w / b])
        } else {
            if !c.is_multiple_of(b * b) {
                return Err(Error::shape("blocksize", format!("whose square divides {c}"), b));
            }
            let out = vec![n, c / (b * b), h * b, w * b];
            match node.text("mode", "DCR") {
                "CRD" => (vec![n, c / (b * b), b, b, h, w], [0, 1, 4, 2, 5, 3], out),
                _ => (vec![n, b, b, c / (b * b), h, w], [0, 3, 4, 1, 5, 2], out),
            }
        };
        let apart = self.reshape(value, &middle)?;
        let turned = self.transpose(&apart, &order)?;
        self.reshape(&turned, &out)
    }
}

/// The first place, the step and the number of places of a slice; bounds out of range are moved to the ends.
fn range(start: i64, end: i64, step: i64, size: usize) -> Result<(usize, i64, usize)> {
    let size = size as i64;
    let from_front = |v: i64| if v < 0 { v.saturating_add(size) } else { v };
    let (start, end) = (from_front(start), from_front(end));
    if step > 0 {
        let (start, end) = (start.clamp(0, size), end.clamp(0, size));
        let count = (end - start).max(0) as u64;
        Ok((start as usize, step, count.div_ceil(step as u64) as usize))
    } else if step < 0 {
        let (start, end) = (start.clamp(-1, size - 1), end.clamp(-1, size - 1));
        let count = (start - end).max(0) as u64;
        Ok((start.max(0) as usize, step, count.div_ceil(step.unsigned_abs()) as usize))
    } else {
        Err(Error::shape("slice", "steps other than 0", step))
    }
}
