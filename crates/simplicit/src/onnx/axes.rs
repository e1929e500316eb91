//! Axes that come and go while the batch stays the first: flatten, squeeze, unsqueeze.

use super::dimensions::place;
use super::import::product;
use super::proto::NodeProto;
use crate::{Error, Result};

pub(super) fn flatten(node: &NodeProto, dims: &[usize]) -> Result<Vec<usize>> {
    let axis = node.int("axis", 1);
    let rank = dims.len() as i64 + 1;
    if axis != 1 && axis.saturating_add(rank) != 1 {
        return Err(Error::unsupported(format!("axis = {axis}"), "the batch must stay the first axis; use axis 1"));
    }
    Ok(vec![product(dims).unwrap_or(0)])
}

/// Dimensions of one sample after axes of size one are removed or added; the batch stays.
pub(super) fn squeeze(node: &NodeProto, axes: Option<Vec<i64>>, dims: &[usize]) -> Result<Vec<usize>> {
    // The batch, whatever its size, must neither be removed nor get an axis in front of it.
    let full: Vec<usize> = std::iter::once(usize::MAX).chain(dims.iter().copied()).collect();
    let out = squeeze_axes(node, axes, &full)?;
    match out.split_first() {
        Some((&usize::MAX, rest)) => Ok(rest.to_vec()),
        _ => Err(Error::unsupported("an axis in front of the batch", "the batch must stay the first axis")),
    }
}

pub(super) fn squeeze_axes(node: &NodeProto, axes: Option<Vec<i64>>, dims: &[usize]) -> Result<Vec<usize>> {
    let axes = axes.filter(|axes| !axes.is_empty()).ok_or_else(|| Error::shape("axes", "at least one", "none"))?;
    let mut out = dims.to_vec();
    if node.op_type == "Squeeze" {
        let mut places = axes.iter().map(|&a| place(a, dims.len())).collect::<Result<Vec<_>>>()?;
        places.sort_unstable();
        places.dedup();
        for k in places.into_iter().rev() {
            if out[k] != 1 {
                return Err(Error::shape(format!("axis {k}"), "size 1", out[k]));
            }
            out.remove(k);
        }
    } else {
        let rank = dims.len().saturating_add(axes.len());
        if rank > 8 {
            return Err(Error::shape("unsqueeze", "at most 8 axes", rank));
        }
        let mut places = axes.iter().map(|&a| place(a, rank)).collect::<Result<Vec<_>>>()?;
        places.sort_unstable();
        for k in places {
            out.insert(k.min(out.len()), 1);
        }
    }
    Ok(out)
}
