//! How far the distribution over classes moved: the Kullback–Leibler divergence of softmax outputs.

use super::accuracy::require_same_shape;
use crate::Result;
use crate::linalg::Matrix;

/// Mean over samples of KL(softmax of the baseline's outputs ‖ softmax of the outputs), in nats.
pub fn divergence(outputs: &Matrix<f32>, baseline: &Matrix<f32>) -> Result<f64> {
    require_same_shape(outputs, baseline)?;
    let of = |s: usize| row_divergence(outputs.row(s), baseline.row(s), 1.0);
    Ok((0..outputs.rows()).map(of).sum::<f64>() / outputs.rows().max(1) as f64)
}

/// The divergence of one sample, of distributions softmax(`scale` × outputs). A single output is not a distribution
/// over classes; it is taken as the mean of a normal distribution of variance one.
pub(crate) fn row_divergence(y: &[f32], baseline: &[f32], scale: f64) -> f64 {
    if let (&[y], &[baseline]) = (y, baseline) {
        return 0.5 * (scale * (f64::from(y) - f64::from(baseline))).powi(2);
    }
    let ours = log_sum_exp(y, scale);
    let theirs = log_sum_exp(baseline, scale);
    let term = |(y, b): (&f32, &f32)| {
        let log = scale * f64::from(*b) - theirs;
        log.exp() * (log - (scale * f64::from(*y) - ours))
    };
    y.iter().zip(baseline).map(term).sum()
}

/// log Σ exp(`scale` × y), without overflow.
pub(crate) fn log_sum_exp(y: &[f32], scale: f64) -> f64 {
    let top = y.iter().map(|y| scale * f64::from(*y)).fold(f64::NEG_INFINITY, f64::max);
    top + y.iter().map(|y| (scale * f64::from(*y) - top).exp()).sum::<f64>().ln()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_classes_by_hand() {
        // p = (3/4, 1/4) against q = (1/2, 1/2); a constant on all outputs of a sample changes nothing.
        let baseline = Matrix::from_vec(2, 2, vec![3f32.ln(), 0.0, 3f32.ln() + 100.0, 100.0]).unwrap();
        let outputs = Matrix::from_vec(2, 2, vec![7.0, 7.0, -300.0, -300.0]).unwrap();
        let by_hand = 0.75 * 1.5f64.ln() + 0.25 * 0.5f64.ln();
        assert!((divergence(&outputs, &baseline).unwrap() - by_hand).abs() < 1e-6);
        assert_eq!(divergence(&baseline, &baseline).unwrap(), 0.0);
        assert!(divergence(&outputs, &Matrix::zeros(2, 3)).is_err());
        // KL of two normal distributions of variance one whose means are 3 apart.
        let [one, other] = [[1.0], [4.0]].map(|y| Matrix::from_vec(1, 1, y.to_vec()).unwrap());
        assert_eq!(divergence(&one, &other).unwrap(), 4.5);
    }
}
