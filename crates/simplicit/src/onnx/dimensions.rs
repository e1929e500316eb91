//! Integers that describe shapes, the batch size among them unknown: what exporters compute to flatten a map.

use super::proto::NodeProto;
use super::tensor::Tensor;
use crate::{Error, Result};

/// Most numbers a computed shape may have.
const MAX_RANK: usize = 64;

/// A number, or the number of samples in a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Dimension {
    Known(i64),
    Batch,
}

/// A list of dimensions, or a single one (rank 0).
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Dimensions {
    pub(crate) values: Vec<Dimension>,
    pub(crate) is_scalar: bool,
}

impl Dimensions {
    pub(crate) fn from_constant(tensor: &Tensor<i64>) -> Result<Self> {
        if tensor.dims.len() > 1 || tensor.values.len() > MAX_RANK {
            return Err(Error::shape("integer constant", "a short list of dimensions", format!("{:?}", tensor.dims)));
        }
        let values = tensor.values.iter().map(|&v| Dimension::Known(v)).collect();
        Ok(Self { values, is_scalar: tensor.dims.is_empty() })
    }

    /// The shape of a batch of values.
    pub(crate) fn of_batch(dims: &[usize]) -> Self {
        let known = dims.iter().map(|&d| Dimension::Known(d as i64));
        Self { values: std::iter::once(Dimension::Batch).chain(known).collect(), is_scalar: false }
    }

    /// All numbers, none of them the batch size.
    pub(crate) fn known(&self) -> Result<Vec<i64>> {
        let known = |d: &Dimension| match d {
            Dimension::Known(v) => Ok(*v),
            Dimension::Batch => Err(Error::shape("integers", "fixed numbers", "the batch size")),
        };
        self.values.iter().map(known).collect()
    }

    /// Shape, Gather, Slice, Concat and friends on lists of dimensions.
    pub(crate) fn compute(node: &NodeProto, inputs: &[&Self]) -> Result<Self> {
        let first = inputs.first().ok_or_else(|| Error::shape("inputs", "at least one", "none"))?;
        let list = |values: Vec<Dimension>| Self { values, is_scalar: false };
        match node.op_type.as_str() {
            "Identity" | "Cast" => Ok((*first).clone()),
            "Unsqueeze" => Ok(list(first.values.clone())),
            "Squeeze" if first.values.len() == 1 => Ok(Self { is_scalar: true, ..(*first).clone() }),
            // A list from a single dimension, or the same list again.
            "Reshape" if inputs.len() == 2 && inputs[1].known()? == [-1] => Ok(list(first.values.clone())),
            "Expand" if inputs.len() == 2 && inputs[1].known()? == [1] => Ok(list(first.values.clone())),
            "Concat" => {
                let values: Vec<Dimension> = inputs.iter().flat_map(|d| d.values.iter().copied()).collect();
                if values.len() > MAX_RANK {
                    return Err(Error::shape("list of dimensions", format!("at most {MAX_RANK}"), values.len()));
                }
                Ok(list(values))
            }
            "Gather" if inputs.len() == 2 => {
                let mut values = Vec::with_capacity(inputs[1].values.len());
                for index in inputs[1].known()? {
                    values.push(first.values[place(index, first.values.len())?]);
                }
                Ok(Self { values, is_scalar: inputs[1].is_scalar })
            }
            "Slice" if inputs.len() >= 3 => {
                let bounds: Vec<Vec<i64>> = inputs[1..].iter().map(|d| d.known()).collect::<Result<_>>()?;
                let plain = bounds.iter().all(|b| b.len() == 1)
                    && bounds.get(2).is_none_or(|axes| axes[0] == 0 || axes[0] == -1)
                    && bounds.get(3).is_none_or(|steps| steps[0] == 1);
                if !plain {
                    return Err(Error::unsupported("a slice along several axes or with steps", "use Flatten instead"));
                }
                let length = first.values.len() as i64;
                let clamp = |v: i64| (if v < 0 { v.saturating_add(length) } else { v }).clamp(0, length) as usize;
                let (start, end) = (clamp(bounds[0][0]), clamp(bounds[1][0]));
                Ok(list(first.values.get(start..end).unwrap_or_default().to_vec()))
            }
            _ => Err(Error::unsupported(
                "arithmetic with shapes",
                "only what flattening needs is read (Shape, Gather, Slice, Concat, Squeeze, Unsqueeze, Cast); use Flatten",
            )),
        }
    }
}

/// An index counted from the front, or from the back if negative.
pub(crate) fn place(index: i64, length: usize) -> Result<usize> {
    let from_front = if index < 0 { index.saturating_add(length as i64) } else { index };
    match usize::try_from(from_front) {
        Ok(k) if k < length => Ok(k),
        _ => Err(Error::shape("axis or index", format!("−{length} to {}", length as i64 - 1), index)),
    }
}
