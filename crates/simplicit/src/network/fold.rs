//! Folding inference batch norm, y = scale·x + shift per channel, into the linear map or convolution before or after it.

use std::sync::Arc;

use super::shape::{Shape, Window};
use crate::linalg::Matrix;
use crate::{Error, Result};

/// The parameters of a batch norm at inference; each has one number per channel (or unit).
#[derive(Debug, Clone, PartialEq)]
pub struct BatchNorm {
    /// γ, the learned scale.
    pub scale: Vec<f32>,
    /// β, the learned shift.
    pub shift: Vec<f32>,
    /// The running mean.
    pub mean: Vec<f32>,
    /// The running variance.
    pub variance: Vec<f32>,
    /// The number added to the variance.
    pub epsilon: f32,
}

impl BatchNorm {
    /// γ/√(σ² + ε) and β − μγ/√(σ² + ε).
    pub(crate) fn scale_shift(&self, channels: usize) -> Result<(Vec<f64>, Vec<f64>)> {
        for (name, values) in
            [("scale", &self.scale), ("shift", &self.shift), ("mean", &self.mean), ("variance", &self.variance)]
        {
            if values.len() != channels {
                return Err(Error::shape(format!("batch norm {name}"), channels, values.len()));
            }
        }
        let mut scale = Vec::with_capacity(channels);
        let mut shift = Vec::with_capacity(channels);
        for c in 0..channels {
            let variance = f64::from(self.variance[c]) + f64::from(self.epsilon);
            let s = f64::from(self.scale[c]) / variance.sqrt();
            let t = f64::from(self.shift[c]) - f64::from(self.mean[c]) * s;
            if !(variance > 0.0 && s.is_finite() && t.is_finite()) {
                return Err(Error::shape(
                    format!("batch norm, channel {c}"),
                    "finite parameters and variance + epsilon > 0",
                    format!("variance + epsilon = {variance}, scale = {s}, shift = {t}"),
                ));
            }
            scale.push(s);
            shift.push(t);
        }
        Ok((scale, shift))
    }
}

/// scale·(W x + bias) + shift as another W and bias; a map without a bias that is only scaled has none.
pub(crate) fn after(
    weights: &Arc<Matrix<f32>>,
    bias: Option<&[f32]>,
    scale: &[f64],
    shift: &[f64],
) -> (Arc<Matrix<f32>>, Option<Vec<f32>>) {
    let scaled = |o: usize, k: usize| (f64::from(weights[(o, k)]) * scale[o]) as f32;
    let is_scaled = scale.iter().any(|&s| s != 1.0);
    let folded =
        if is_scaled { Arc::new(Matrix::from_fn(weights.rows(), weights.cols(), scaled)) } else { weights.clone() };
    if bias.is_none() && shift.iter().all(|&t| t == 0.0) {
        return (folded, None);
    }
    let bias = (0..weights.rows()).map(|o| (bias.map_or(0.0, |b| f64::from(b[o])) * scale[o] + shift[o]) as f32);
    (folded, Some(bias.collect()))
}

/// W(scale·x + shift) + bias as another W and bias; `area` columns of W share a channel of x.
pub(crate) fn before(
    weights: &Matrix<f32>,
    bias: Option<&[f32]>,
    area: usize,
    scale: &[f64],
    shift: &[f64],
) -> (Matrix<f32>, Vec<f32>) {
    let folded =
        Matrix::from_fn(weights.rows(), weights.cols(), |o, k| (f64::from(weights[(o, k)]) * scale[k / area]) as f32);
    let bias = (0..weights.rows())
        .map(|o| {
            let moved: f64 = weights.row(o).iter().enumerate().map(|(k, &w)| f64::from(w) * shift[k / area]).sum();
            (bias.map_or(0.0, |b| f64::from(b[o])) + moved) as f32
        })
        .collect();
    (folded, bias)
}

/// Whether a shift can be folded although a convolution pads with zeros, which are not shifted.
pub(crate) fn survives_padding(window: Window, shift: &[f64]) -> bool {
    window.padding == [0; 4] || shift.iter().all(|&t| t == 0.0)
}

/// Per-channel parameters repeated for every unit.
pub(crate) fn per_unit(values: &[f64], shape: Shape) -> Vec<f64> {
    let positions = shape.size() / shape.channels();
    values.iter().flat_map(|&v| std::iter::repeat_n(v, positions)).collect()
}
