//! The distance of a model's outputs from the baseline's: value, gradient and curvature in the outputs.

use crate::evaluate::{log_sum_exp, row_divergence};
use crate::linalg::Matrix;

/// The ways to compare outputs.
#[derive(Clone, Copy)]
pub(in crate::train) enum Metric {
    /// KL divergence of softmax distributions of `scale` × outputs.
    Softmax { scale: f64 },
    /// Half the squared difference times `weight`.
    Squares { weight: f64 },
}

impl Metric {
    pub(in crate::train) fn value(self, y: &[f32], baseline: &[f32]) -> f64 {
        match self {
            Metric::Squares { weight } => {
                0.5 * weight * y.iter().zip(baseline).map(|(y, b)| f64::from(y - b).powi(2)).sum::<f64>()
            }
            Metric::Softmax { scale } => row_divergence(y, baseline, scale),
        }
    }

    /// Probabilities and the gradient in the outputs.
    pub(in crate::train) fn gradient(self, y: &Matrix<f32>, baseline: &Matrix<f32>) -> (Matrix<f32>, Matrix<f32>) {
        let (rows, cols) = (y.rows(), y.cols());
        match self {
            Metric::Squares { weight } => {
                let v = Matrix::from_fn(rows, cols, |s, k| weight as f32 * (y[(s, k)] - baseline[(s, k)]));
                (Matrix::zeros(0, cols), v)
            }
            Metric::Softmax { scale } => {
                let mut p = Matrix::zeros(rows, cols);
                let mut v = Matrix::zeros(rows, cols);
                for s in 0..rows {
                    let (ours, theirs) = (log_sum_exp(y.row(s), scale), log_sum_exp(baseline.row(s), scale));
                    for k in 0..cols {
                        let a = (scale * f64::from(y[(s, k)]) - ours).exp();
                        let b = (scale * f64::from(baseline[(s, k)]) - theirs).exp();
                        p[(s, k)] = a as f32;
                        v[(s, k)] = (scale * (a - b)) as f32;
                    }
                }
                (p, v)
            }
        }
    }

    /// The curvature of the metric, applied to a change of the outputs in place.
    pub(in crate::train) fn curve(self, p: &Matrix<f32>, dy: &mut Matrix<f32>) {
        match self {
            Metric::Squares { weight } => dy.as_mut_slice().iter_mut().for_each(|d| *d *= weight as f32),
            Metric::Softmax { scale } => {
                let square = (scale * scale) as f32;
                for s in 0..dy.rows() {
                    let p = p.row(s);
                    let row = dy.row_mut(s);
                    let mean: f32 = p.iter().zip(row.iter()).map(|(p, d)| p * d).sum();
                    row.iter_mut().zip(p).for_each(|(d, p)| *d = square * p * (*d - mean));
                }
            }
        }
    }
}
