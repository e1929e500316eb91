//! Operators without weights of their own. They belong to the structure of a network: they are run, but neither
//! solved nor counted.
//!
//! Every operator has its shape rule, its forward pass and its adjoint in one file of this folder. All attributes are
//! resolved when a network is read (axes are non-negative, paddings explicit), so no decisions are left for running.

pub(crate) mod bounds;
mod elementwise;
mod loops;
mod normalise;
mod pool;
mod product;
mod reduce;
mod select;
mod shape;
mod transpose;

use serde::{Deserialize, Serialize};

use self::loops::require_axis;
use self::shape::{concat, expand, gather, lookup, pad, slice};
use super::Dims;
use crate::{Error, Result};

/// Whether a number chooses one of so many rows of a table.
pub(crate) fn chooses_a_row(number: f32, rows: usize) -> bool {
    lookup::row(number, rows).is_some()
}

/// One sample's value: dimensions and numbers.
#[derive(Debug, Clone, Copy)]
pub struct Value<'a> {
    /// Dimensions as in ONNX, for a batch of one sample.
    pub dims: Dims,
    /// The numbers, row by row, the last axis fastest.
    pub data: &'a [f32],
}

/// A function of one number, applied to every value.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Unary {
    /// √x.
    Sqrt,
    /// eˣ.
    Exp,
    /// ln x.
    Log,
    /// The error function.
    Erf,
    /// −x.
    Negative,
    /// |x|.
    Absolute,
    /// 1/x.
    Reciprocal,
    /// sin x.
    Sine,
    /// cos x.
    Cosine,
}

/// A function of two values, with ONNX's broadcasting.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Binary {
    /// a + b.
    Add,
    /// a − b.
    Subtract,
    /// a·b.
    Multiply,
    /// a/b.
    Divide,
    /// aᵇ.
    Power,
    /// The larger one.
    Maximum,
    /// The smaller one.
    Minimum,
    /// 1 where a > b, 0 elsewhere; its derivative is taken as 0.
    Greater,
}

/// How an axis is reduced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reduction {
    /// The sum.
    Sum,
    /// The mean.
    Mean,
    /// The maximum; the first value that is the maximum receives the gradient.
    Maximum,
    /// The minimum; the first value that is the minimum receives the gradient.
    Minimum,
}

/// A pooling over one or two trailing axes with features that the plain poolings of feature maps do not have:
/// dilation, windows that reach beyond the padding (ceil_mode), one axis.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Pooling {
    /// Maximum or mean.
    pub maximum: bool,
    /// Sizes of the window, one per pooled axis; the pooled axes are the last ones.
    pub kernel: Vec<usize>,
    /// Strides, one per pooled axis.
    pub stride: Vec<usize>,
    /// Distance between neighbours of the window.
    pub dilation: Vec<usize>,
    /// Padding in front, then behind, of every axis; behind includes what ceil_mode adds.
    pub padding: Vec<[usize; 2]>,
    /// Whether the padding that the file gives (without what ceil_mode adds) counts as values of a mean.
    pub count_padding: bool,
    /// What ceil_mode added behind every axis; never counted in a mean.
    pub beyond: Vec<usize>,
}

/// An operator between values. The first axis is that of the batch of one, wherever the network has not folded it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Structure {
    /// A function of one number, applied to every value.
    Unary(Unary),
    /// A function of two values.
    Binary(Binary),
    /// The second input where the first is not zero, the third elsewhere, with ONNX's broadcasting.
    Select,
    /// The product of two values over their last two axes, broadcast over the others.
    MatMul,
    /// eˣ/Σeˣ along an axis.
    Softmax {
        /// The axis.
        axis: usize,
    },
    /// (x − mean)/√(variance + ε) over the axes from `axis` on: layer norm without its scale and shift.
    Normalise {
        /// The first axis of the mean.
        axis: usize,
        /// ε.
        epsilon: f32,
    },
    /// Sum, mean or extreme over axes; `keep` says whether they stay with size 1.
    Reduce {
        /// The reduction.
        reduction: Reduction,
        /// The axes, in ascending order.
        axes: Vec<usize>,
        /// Whether the reduced axes stay with size 1; ONNX's keepdims.
        keep: bool,
    },
    /// A pooling that [`crate::network::FixedMap`] does not have.
    Pool(Pooling),
    /// Values one after the other along an axis.
    Concat {
        /// The axis.
        axis: usize,
    },
    /// Every `step`-th value from `start` on, `count` of them, along one axis; a negative step walks backwards.
    Slice {
        /// The axis.
        axis: usize,
        /// The first index.
        start: usize,
        /// The distance from one to the next.
        step: i64,
        /// Number of values.
        count: usize,
    },
    /// A constant around the value: (before, after) of every axis.
    Pad {
        /// Before and after, one pair per axis.
        padding: Vec<[usize; 2]>,
        /// The constant.
        value: f32,
    },
    /// Values at given places along an axis.
    Gather {
        /// The axis.
        axis: usize,
        /// The places.
        indices: Vec<usize>,
        /// Dimensions of the indices, which take the place of the axis.
        dims: Dims,
    },
    /// Rows of the first input (a table, rows × width) chosen by the second, whose values are whole numbers; negative ones
    /// count from the end, and what chooses no row gives NaN.
    Lookup,
    /// Axes in another order: axis k of the result is axis `order[k]` of the value.
    Transpose {
        /// The order.
        order: Vec<usize>,
    },
    /// The same numbers under other dimensions.
    Reshape {
        /// The new dimensions.
        dims: Dims,
    },
    /// Repeated along axes of size 1 until it has these dimensions.
    Expand {
        /// The new dimensions.
        dims: Dims,
    },
}

impl Structure {
    /// The name for messages.
    pub fn name(&self) -> &'static str {
        match self {
            Structure::Unary(_) => "a function of every value",
            Structure::Binary(_) => "a function of two values",
            Structure::Select => "a selection",
            Structure::MatMul => "a product of two values",
            Structure::Softmax { .. } => "a softmax",
            Structure::Normalise { .. } => "a layer norm",
            Structure::Reduce { .. } => "a reduction",
            Structure::Pool(_) => "a pooling",
            Structure::Concat { .. } => "a concatenation",
            Structure::Slice { .. } => "a slice",
            Structure::Pad { .. } => "a padding",
            Structure::Gather { .. } => "a choice of values",
            Structure::Lookup => "a table",
            Structure::Transpose { .. } => "a transposition",
            Structure::Reshape { .. } => "a reshape",
            Structure::Expand { .. } => "a repetition",
        }
    }

    /// The dimensions of the result; an error names what does not fit. Attributes are checked here too: any operator
    /// that passes can be run.
    pub fn dims(&self, inputs: &[Dims]) -> Result<Dims> {
        let one = || match *inputs {
            [x] => Ok(x),
            _ => Err(Error::shape(format!("values of {}", self.name()), 1, inputs.len())),
        };
        let two = || match *inputs {
            [a, b] => Ok((a, b)),
            _ => Err(Error::shape(format!("values of {}", self.name()), 2, inputs.len())),
        };
        match self {
            Structure::Unary(_) => one(),
            Structure::Binary(_) => two().and_then(|(a, b)| Binary::dims(a, b)),
            Structure::Select => match *inputs {
                [condition, a, b] => select::dims(condition, a, b),
                _ => Err(Error::shape(format!("values of {}", self.name()), 3, inputs.len())),
            },
            Structure::MatMul => two().and_then(|(a, b)| product::dims(a, b)),
            Structure::Softmax { axis } => one().and_then(|x| require_axis(self.name(), *axis, x).map(|()| x)),
            Structure::Normalise { axis, epsilon } => {
                let x = one()?;
                if !(epsilon.is_finite() && *epsilon >= 0.0) {
                    return Err(Error::setting("epsilon of a layer norm", "a number of at least 0", epsilon));
                }
                require_axis(self.name(), *axis, x).map(|()| x)
            }
            Structure::Reduce { axes, keep, .. } => reduce::dims(axes, *keep, one()?),
            Structure::Pool(pooling) => pooling.dims(one()?),
            Structure::Concat { axis } => concat::dims(*axis, inputs),
            Structure::Slice { axis, start, step, count } => slice::dims(*axis, *start, *step, *count, one()?),
            Structure::Pad { padding, value } => pad::dims(padding, *value, one()?),
            Structure::Gather { axis, indices, dims } => gather::dims(*axis, indices, *dims, one()?),
            Structure::Lookup => two().and_then(|(table, chosen)| lookup::dims(table, chosen)),
            Structure::Transpose { order } => transpose::dims(order, one()?),
            Structure::Reshape { dims } => {
                let x = one()?;
                if x.size() == dims.size() {
                    Ok(*dims)
                } else {
                    Err(Error::shape("a reshape", format!("{} values", dims.size()), format!("{x:?}")))
                }
            }
            Structure::Expand { dims } => expand::dims(*dims, one()?),
        }
    }

    /// Runs one sample forwards; `out` has the size of [`Structure::dims`], which must have accepted the inputs, and
    /// is overwritten.
    pub fn forward(&self, inputs: &[Value<'_>], out: &mut [f32]) {
        let Some(&x) = inputs.first() else { return };
        if out.is_empty() {
            return;
        }
        match (self, inputs) {
            (Structure::Unary(unary), _) => unary.forward(x.data, out),
            (Structure::Binary(binary), &[a, b]) => {
                if let Ok(dims) = Binary::dims(a.dims, b.dims) {
                    binary.forward(a, b, dims, out);
                }
            }
            (Structure::Select, &[condition, a, b]) => select::forward([condition, a, b], out),
            (Structure::MatMul, &[a, b]) => product::forward(a, b, out),
            (Structure::Softmax { axis }, _) => normalise::softmax(*axis, x, out),
            (Structure::Normalise { axis, epsilon }, _) => normalise::layer(*axis, *epsilon, x, out),
            (Structure::Reduce { reduction, axes, .. }, _) => reduce::forward(*reduction, axes, x, out),
            (Structure::Pool(pooling), _) => pooling.forward(x, out),
            (Structure::Concat { axis }, _) => concat::forward(*axis, inputs, out),
            (Structure::Slice { axis, start, step, count }, _) => {
                slice::forward((*axis, *start, *step, *count), x, out);
            }
            (Structure::Pad { padding, value }, _) => pad::forward(padding, *value, x, out),
            (Structure::Gather { axis, indices, .. }, _) => gather::forward(*axis, indices, x, out),
            (Structure::Lookup, &[table, chosen]) => lookup::forward(table, chosen.data, out),
            (Structure::Transpose { order }, _) => transpose::forward(order, x.dims, x.data, out),
            (Structure::Reshape { .. }, _) => out.copy_from_slice(x.data),
            (Structure::Expand { dims }, _) => expand::forward(*dims, x, out),
            // `dims` refuses any other number of inputs.
            (Structure::Binary(_) | Structure::Select | Structure::MatMul | Structure::Lookup, _) => {}
        }
    }

    /// The derivative of one sample forwards: the effect of changes `d` of all inputs on the result `out`; `into` is
    /// overwritten.
    pub(crate) fn tangent(&self, inputs: &[Value<'_>], out: Value<'_>, d: &[&[f32]], into: &mut [f32]) {
        if into.is_empty() {
            return;
        }
        match (self, inputs, d) {
            // Their derivatives are diagonal or symmetric, so the adjoint is the tangent.
            (Structure::Unary(_) | Structure::Softmax { .. } | Structure::Normalise { .. }, &[x], &[d]) => {
                into.fill(0.0);
                self.adjoint_of_one(x, out, d, into);
            }
            (Structure::Binary(binary), &[a, b], &[da, db]) => binary.tangent([a, b], [da, db], out.dims, into),
            (Structure::MatMul, &[a, b], &[da, db]) => {
                let mut of_b = vec![0.0; into.len()];
                product::forward(Value { data: da, ..a }, b, into);
                product::forward(a, Value { data: db, ..b }, &mut of_b);
                into.iter_mut().zip(of_b).for_each(|(into, v)| *into += v);
            }
            (Structure::Select, &[condition, a, b], &[_, da, db]) => {
                select::forward([condition, Value { data: da, ..a }, Value { data: db, ..b }], into);
            }
            (Structure::Lookup, &[table, chosen], &[dtable, _]) => {
                lookup::forward(Value { data: dtable, ..table }, chosen.data, into);
            }
            (Structure::Reduce { reduction: Reduction::Maximum | Reduction::Minimum, axes, .. }, &[x], &[d]) => {
                // The adjoint of ones marks the value that each result takes.
                let (ones, mut marks) = (vec![1.0; into.len()], vec![0.0; d.len()]);
                self.adjoint_of_one(x, out, &ones, &mut marks);
                marks.iter_mut().zip(d).for_each(|(mark, d)| *mark *= d);
                reduce::forward(Reduction::Sum, axes, Value { data: &marks, ..x }, into);
            }
            (Structure::Pool(pooling), &[x], &[d]) => pooling.tangent(x, d, into),
            (Structure::Pad { padding, .. }, &[x], &[d]) => pad::forward(padding, 0.0, Value { data: d, ..x }, into),
            // All other operators are linear.
            _ => {
                let changes: Vec<Value<'_>> = inputs.iter().zip(d).map(|(x, d)| Value { data: d, ..*x }).collect();
                self.forward(&changes, into);
            }
        }
    }

    /// Runs one sample backwards: adds the contribution of the result's cotangent `dout` to the cotangent of every
    /// input for which it is asked (`Some`).
    pub fn adjoint(&self, inputs: &[Value<'_>], out: Value<'_>, dout: &[f32], into: &mut [Option<&mut [f32]>]) {
        if dout.is_empty() {
            return;
        }
        match (self, inputs, into) {
            (Structure::Concat { axis }, _, into) => concat::adjoint(*axis, inputs, dout, into),
            (Structure::Binary(binary), &[a, b], [da, db]) => {
                binary.adjoint([a, b], out.dims, dout, da.as_deref_mut(), db.as_deref_mut());
            }
            (Structure::MatMul, &[a, b], [da, db]) => {
                product::adjoint([a, b], dout, da.as_deref_mut(), db.as_deref_mut());
            }
            (Structure::Select, &[condition, a, b], [_, da, db]) => {
                select::adjoint([condition, a, b], dout, da.as_deref_mut(), db.as_deref_mut());
            }
            (Structure::Lookup, &[table, chosen], [Some(dtable), _]) => {
                lookup::adjoint(table.dims, chosen.data, dout, dtable);
            }
            (_, &[x], [Some(dx)]) => self.adjoint_of_one(x, out, dout, dx),
            // No cotangent is asked for.
            _ => {}
        }
    }

    fn adjoint_of_one(&self, x: Value<'_>, out: Value<'_>, dout: &[f32], dx: &mut [f32]) {
        match self {
            Structure::Unary(unary) => unary.adjoint(x.data, out.data, dout, dx),
            Structure::Softmax { axis } => normalise::softmax_adjoint(*axis, out, dout, dx),
            Structure::Normalise { axis, epsilon } => {
                normalise::layer_adjoint(*axis, *epsilon, x, out.data, dout, dx);
            }
            Structure::Reduce { reduction, axes, .. } => reduce::adjoint(*reduction, axes, x, out.data, dout, dx),
            Structure::Pool(pooling) => pooling.adjoint(x, dout, dx),
            Structure::Slice { axis, start, step, count } => {
                slice::adjoint((*axis, *start, *step, *count), x.dims, dout, dx);
            }
            Structure::Pad { padding, .. } => pad::adjoint(padding, x.dims, out.dims, dout, dx),
            Structure::Gather { axis, indices, .. } => gather::adjoint(*axis, indices, x.dims, dout, dx),
            Structure::Transpose { order } => transpose::adjoint(order, x.dims, dout, dx),
            Structure::Reshape { .. } => dx.iter_mut().zip(dout).for_each(|(dx, d)| *dx += d),
            Structure::Expand { dims } => expand::adjoint(*dims, x.dims, dout, dx),
            Structure::Binary(_)
            | Structure::Select
            | Structure::MatMul
            | Structure::Lookup
            | Structure::Concat { .. } => {}
        }
    }
}

#[cfg(test)]
mod tests;
