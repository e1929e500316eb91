//! Constants on their way into the network: transposed, reshaped, repeated.

use super::axes::squeeze_axes;
use super::dimensions::Dimension;
use super::import::{Value, product};
use super::nodes::{Inputs, SUPPORTED, shape_range};
use super::proto::NodeProto;
use super::tensor::Tensor;
use crate::linalg::Matrix;
use crate::{Error, Result};

/// Most channels a single constant is repeated for.
const MAX_CHANNELS: usize = 1 << 22;

pub(super) fn matrix(tensor: &Tensor<f32>) -> Result<Matrix<f32>> {
    match tensor.dims[..] {
        [rows, cols] => Matrix::from_vec(rows, cols, tensor.values.clone()),
        _ => Err(Error::shape("weights", "two axes", format!("{:?}", tensor.dims))),
    }
}

/// Exporters write zeros where a layer has no bias.
pub(super) fn real_bias(bias: Vec<f32>) -> Option<Vec<f32>> {
    bias.iter().any(|&b| b != 0.0).then_some(bias)
}

/// A constant that is broadcast over the batch and over positions, as one number per channel.
pub(super) fn per_channel(tensor: &Tensor<f32>, dims: &[usize]) -> Result<Vec<f64>> {
    let channels = dims.first().copied().unwrap_or(0);
    let mut full = vec![1; (dims.len() + 1).saturating_sub(tensor.dims.len())];
    full.extend(&tensor.dims);
    // full: batch, channels, positions...
    let fits = channels <= MAX_CHANNELS
        && full.len() == dims.len() + 1
        && full[0] == 1
        && (full[1] == channels || full[1] == 1)
        && full[2..].iter().all(|&d| d == 1);
    if !fits {
        return Err(Error::shape(
            "constant",
            format!("one number per channel of batch × {dims:?}"),
            format!("{:?}", tensor.dims),
        ));
    }
    let values = tensor.values.iter().map(|&v| f64::from(v));
    Ok(if full[1] == channels { values.collect() } else { values.cycle().take(channels).collect() })
}

/// Operators on constant weights.
pub(super) fn reshape_weights(node: &NodeProto, inputs: &Inputs<'_>, tensor: &Tensor<f32>) -> Result<Value> {
    match node.op_type.as_str() {
        "Identity" | "Cast" | "CastLike" => Ok(Value::Floats(tensor.clone())),
        "Shape" => {
            let dims = tensor.dims.iter().map(|&d| Dimension::Known(d as i64)).collect();
            Ok(Value::Dimensions(shape_range(node, dims)))
        }
        "Expand" => match (&tensor.values[..], &inputs.dimensions(1)?.known()?[..]) {
            (&[value], &[size]) if (1..=MAX_CHANNELS as i64).contains(&size) => {
                Ok(Value::Floats(Tensor { dims: vec![size as usize], values: vec![value; size as usize] }))
            }
            (_, target) => Err(Error::unsupported(
                format!("an expansion of constant {:?} to {target:?}", tensor.dims),
                "only a single number may be repeated, into a vector",
            )),
        },
        "Transpose" => match (&tensor.dims[..], node.ints("perm")) {
            ([_] | [], _) | ([_, _], Some([0, 1])) => Ok(Value::Floats(tensor.clone())),
            ([rows, cols], None | Some([1, 0])) => {
                let values = matrix(tensor)?.transposed().into_vec();
                Ok(Value::Floats(Tensor { dims: vec![*cols, *rows], values }))
            }
            (dims, perm) => Err(Error::unsupported(
                format!("a transpose of constant {dims:?} by {perm:?}"),
                "only matrices of weights are transposed",
            )),
        },
        "Squeeze" | "Unsqueeze" | "Reshape" => {
            let target = match node.op_type.as_str() {
                "Reshape" => {
                    let target = inputs.dimensions(1)?.known()?;
                    target.iter().map(|&d| usize::try_from(d).ok()).collect::<Option<Vec<_>>>()
                }
                _ => squeeze_axes(node, inputs.axes(node, 1)?, &tensor.dims).ok(),
            };
            match target.filter(|dims| product(dims) == Some(tensor.values.len())) {
                Some(dims) => Ok(Value::Floats(Tensor { dims, values: tensor.values.clone() })),
                None => Err(Error::unsupported(
                    format!("{} of a constant {:?}", node.op_type, tensor.dims),
                    "constants may only be reshaped to fixed positive sizes",
                )),
            }
        }
        _ => Err(Error::unsupported("this operator on constants", SUPPORTED)),
    }
}
