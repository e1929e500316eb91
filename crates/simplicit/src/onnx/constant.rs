//! Constant tensors and the operations that move their values: those that a file stores, and those that follow from
//! them and from shapes alone.

use crate::{Error, Result};

/// The most values that a computed constant may have, unless its operands have as many.
const MAX_VALUES: usize = 1 << 24;

/// The most axes of a constant.
const MAX_RANK: usize = 16;

/// Values in row-major order under their dimensions.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Tensor<T> {
    pub(crate) dims: Vec<usize>,
    pub(crate) values: Vec<T>,
}

/// Weights, or integers: shapes, indices and truth values (0 and 1).
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Constant {
    Floats(Tensor<f32>),
    Ints(Tensor<i64>),
}

impl Constant {
    pub(crate) fn dims(&self) -> &[usize] {
        match self {
            Constant::Floats(tensor) => &tensor.dims,
            Constant::Ints(tensor) => &tensor.dims,
        }
    }

    /// Number of values.
    pub(crate) fn len(&self) -> usize {
        match self {
            Constant::Floats(tensor) => tensor.values.len(),
            Constant::Ints(tensor) => tensor.values.len(),
        }
    }

    pub(crate) fn ints(values: Vec<i64>) -> Self {
        Constant::Ints(Tensor { dims: vec![values.len()], values })
    }

    /// The values as floats; integers are rounded to the nearest.
    pub(crate) fn to_floats(&self) -> Tensor<f32> {
        match self {
            Constant::Floats(tensor) => tensor.clone(),
            Constant::Ints(tensor) => tensor.map(|v| v as f32),
        }
    }
}

/// Defines an operation that moves values for either type of constant.
macro_rules! moved {
    ($constant:expr, $tensor:ident => $moved:expr) => {
        match $constant {
            $crate::onnx::constant::Constant::Floats($tensor) => $crate::onnx::constant::Constant::Floats($moved),
            $crate::onnx::constant::Constant::Ints($tensor) => $crate::onnx::constant::Constant::Ints($moved),
        }
    };
}
pub(crate) use moved;

/// The number of values under these dimensions; an error if they are too many to be computed.
pub(crate) fn size(dims: &[usize]) -> Result<usize> {
    size_from(dims, 0)
}

/// The same where `stored` values exist already.
fn size_from(dims: &[usize], stored: usize) -> Result<usize> {
    let size = dims.iter().try_fold(1usize, |p, &d| p.checked_mul(d));
    match size.filter(|&s| s <= stored.max(MAX_VALUES) && dims.len() <= MAX_RANK) {
        Some(size) => Ok(size),
        None => Err(Error::shape("constant", "at most 2^24 values and 16 axes", format!("{dims:?}"))),
    }
}

/// The index as a place from the front; a negative index counts from the back.
pub(crate) fn place(index: i64, length: usize) -> Result<usize> {
    let from_front = if index < 0 { index.saturating_add(length as i64) } else { index };
    match usize::try_from(from_front) {
        Ok(k) if k < length => Ok(k),
        _ => Err(Error::shape("axis or index", format!("−{length} to {}", length as i64 - 1), index)),
    }
}

/// Several axes, ascending and each listed once.
pub(crate) fn places(axes: &[i64], rank: usize) -> Result<Vec<usize>> {
    let mut out = axes.iter().map(|&axis| place(axis, rank)).collect::<Result<Vec<_>>>()?;
    out.sort_unstable();
    out.dedup();
    Ok(out)
}

/// The dimensions of a function of two values, with ONNX's broadcasting.
pub(crate) fn broadcast(a: &[usize], b: &[usize]) -> Result<Vec<usize>> {
    let rank = a.len().max(b.len());
    let at = |dims: &[usize], axis: usize| (axis + dims.len()).checked_sub(rank).map_or(1, |k| dims[k]);
    (0..rank)
        .map(|axis| match (at(a, axis), at(b, axis)) {
            (x, y) if x == y || y == 1 => Ok(x),
            (1, y) => Ok(y),
            _ => Err(Error::shape("two values", format!("dimensions that fit {a:?}"), format!("{b:?}"))),
        })
        .collect()
}

fn strides(dims: &[usize]) -> Vec<i64> {
    let mut strides = vec![1i64; dims.len()];
    for axis in (0..dims.len().saturating_sub(1)).rev() {
        strides[axis] = strides[axis + 1] * dims[axis + 1] as i64;
    }
    strides
}

impl<T: Copy + Default> Tensor<T> {
    pub(crate) fn scalar(value: T) -> Self {
        Self { dims: vec![], values: vec![value] }
    }

    pub(crate) fn map<S>(&self, f: impl Fn(T) -> S) -> Tensor<S> {
        Tensor { dims: self.dims.clone(), values: self.values.iter().map(|&v| f(v)).collect() }
    }

    /// The values at `start` + Σ index·step; every such place must exist.
    fn walk(&self, dims: Vec<usize>, start: i64, steps: &[i64]) -> Result<Self> {
        let count = size_from(&dims, self.values.len())?;
        let mut values = Vec::with_capacity(count);
        let mut index = vec![0usize; dims.len()];
        let mut at = start;
        for _ in 0..count {
            let value = usize::try_from(at).ok().and_then(|at| self.values.get(at));
            values.push(*value.ok_or_else(|| Error::shape("constant", "values inside it", at))?);
            for axis in (0..dims.len()).rev() {
                index[axis] += 1;
                at += steps[axis];
                if index[axis] < dims[axis] {
                    break;
                }
                at -= steps[axis] * dims[axis] as i64;
                index[axis] = 0;
            }
        }
        Ok(Self { dims, values })
    }

    /// Axis k of the result is axis `order[k]`.
    pub(crate) fn transposed(&self, order: &[usize]) -> Result<Self> {
        let own = strides(&self.dims);
        let steps: Vec<i64> = order.iter().map(|&k| own[k]).collect();
        self.walk(order.iter().map(|&k| self.dims[k]).collect(), 0, &steps)
    }

    /// `count` values along an axis, from `start` on, every `step`-th.
    pub(crate) fn slice(&self, axis: usize, start: usize, step: i64, count: usize) -> Result<Self> {
        let mut steps = strides(&self.dims);
        let mut dims = self.dims.clone();
        dims[axis] = count;
        let first = steps[axis] * start as i64;
        steps[axis] = steps[axis].saturating_mul(step);
        self.walk(dims, first, &steps)
    }

    /// Repeated to these dimensions, which it must broadcast to.
    pub(crate) fn expanded(&self, dims: &[usize]) -> Result<Self> {
        let own = strides(&self.dims);
        let lead = dims.len() - self.dims.len().min(dims.len());
        let step = |k: usize| match k.checked_sub(lead) {
            Some(axis) if self.dims[axis] != 1 => own[axis],
            _ => 0,
        };
        let steps: Vec<i64> = (0..dims.len()).map(step).collect();
        self.walk(dims.to_vec(), 0, &steps)
    }

    pub(crate) fn reshaped(&self, dims: Vec<usize>) -> Result<Self> {
        if size_from(&dims, self.values.len())? != self.values.len() {
            return Err(Error::shape("reshape", format!("{} values", self.values.len()), format!("{dims:?}")));
        }
        Ok(Self { dims, values: self.values.clone() })
    }

    /// The slices at `indices` along an axis; the dimensions of the indices replace the axis.
    pub(crate) fn gathered(&self, axis: usize, indices: &[usize], of: &[usize]) -> Result<Self> {
        let mut dims = self.dims[..axis].to_vec();
        dims.extend(of);
        dims.extend(&self.dims[axis + 1..]);
        let count = size_from(&dims, self.values.len())?;
        let inner: usize = self.dims[axis + 1..].iter().product();
        let outer: usize = self.dims[..axis].iter().product();
        let mut values = Vec::with_capacity(count);
        for o in 0..outer {
            for &index in indices {
                let from = (o * self.dims[axis] + index) * inner;
                let part = self.values.get(from..from + inner);
                values.extend(part.ok_or_else(|| Error::shape("index", self.dims[axis], index))?);
            }
        }
        Ok(Self { dims, values })
    }

    /// The parts, one after the other along an axis.
    pub(crate) fn concatenated(parts: &[&Self], axis: usize) -> Result<Self> {
        let first = parts.first().ok_or_else(|| Error::shape("concatenation", "at least one value", "none"))?;
        let mut dims = first.dims.clone();
        dims[axis] = 0;
        for part in parts {
            let fits = part.dims.len() == dims.len() && (0..dims.len()).all(|k| k == axis || part.dims[k] == dims[k]);
            if !fits {
                return Err(Error::shape("concatenation", format!("{:?}", first.dims), format!("{:?}", part.dims)));
            }
            dims[axis] = dims[axis].saturating_add(part.dims[axis]);
        }
        let stored = parts.iter().map(|part| part.values.len()).sum();
        let mut values = Vec::with_capacity(size_from(&dims, stored)?);
        let outer: usize = dims[..axis].iter().product();
        for o in 0..outer {
            for part in parts {
                let inner: usize = part.dims[axis..].iter().product();
                values.extend(&part.values[o * inner..(o + 1) * inner]);
            }
        }
        Ok(Self { dims, values })
    }

    /// A function of two constants, with ONNX's broadcasting.
    pub(crate) fn zip<U: Copy + Default, V>(
        &self,
        other: &Tensor<U>,
        f: impl Fn(T, U) -> Option<V>,
    ) -> Result<Tensor<V>> {
        let dims = broadcast(&self.dims, &other.dims)?;
        let (a, b) = (self.expanded(&dims)?, other.expanded(&dims)?);
        let values: Option<Vec<V>> = a.values.iter().zip(&b.values).map(|(&a, &b)| f(a, b)).collect();
        let values =
            values.ok_or_else(|| Error::shape("integers", "numbers below 2^63, no division by 0", "others"))?;
        Ok(Tensor { dims, values })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counting(dims: &[usize]) -> Tensor<i64> {
        Tensor { dims: dims.to_vec(), values: (0..dims.iter().product::<usize>() as i64).collect() }
    }

    #[test]
    fn movements_by_hand() {
        let t = counting(&[2, 3]);
        assert_eq!(t.transposed(&[1, 0]).unwrap().values, [0, 3, 1, 4, 2, 5]);
        assert_eq!(t.slice(1, 2, -2, 2).unwrap().values, [2, 0, 5, 3]);
        assert_eq!(t.gathered(1, &[2, 0], &[2]).unwrap().values, [2, 0, 5, 3]);
        assert_eq!(t.gathered(0, &[1], &[]).unwrap(), Tensor { dims: vec![3], values: vec![3, 4, 5] });
        let row = Tensor { dims: vec![1, 3], values: vec![7, 8, 9] };
        assert_eq!(row.expanded(&[2, 3]).unwrap().values, [7, 8, 9, 7, 8, 9]);
        assert_eq!(Tensor::concatenated(&[&t, &row], 0).unwrap().dims, [3, 3]);
        assert!(Tensor::concatenated(&[&t, &row], 1).is_err());
        let sum = t.zip(&Tensor { dims: vec![2, 1], values: vec![10, 20] }, |a, b| a.checked_add(b)).unwrap();
        assert_eq!(sum.values, [10, 11, 12, 23, 24, 25]);
        assert!(t.slice(0, 1, 1, 2).is_err());
        assert!(row.expanded(&[1 << 30, 3]).is_err());
    }
}
