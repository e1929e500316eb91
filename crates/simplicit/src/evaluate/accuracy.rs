//! Accuracy against labels, agreement and output error against the baseline.

use crate::linalg::Matrix;
use crate::{Error, Result};

/// What [`predictions`] says of a sample with a NaN among its outputs: no label is this number.
pub const NO_CLASS: u32 = u32::MAX;

/// For every sample the class with the largest output, the first of equal ones; a NaN is never the largest.
pub fn predictions(outputs: &Matrix<f32>) -> Vec<u32> {
    let largest = |row: &[f32]| {
        if row.iter().any(|v| v.is_nan()) {
            return NO_CLASS;
        }
        let mut best = (0, f32::NEG_INFINITY);
        for (k, &v) in row.iter().enumerate() {
            if v > best.1 {
                best = (k as u32, v);
            }
        }
        best.0
    };
    (0..outputs.rows()).map(|i| largest(outputs.row(i))).collect()
}

/// The share of samples whose largest output is their label's.
pub fn accuracy(outputs: &Matrix<f32>, labels: &[u32]) -> Result<f64> {
    require_labels(outputs, labels)?;
    Ok(share(predictions(outputs).iter().zip(labels).filter(|(p, l)| p == l).count(), labels.len()))
}

/// The share of samples whose label is among their `k` largest outputs; of equal outputs the first ones count. `None`
/// where there are not more than `k` outputs, because every sample would be right. A sample with a NaN is wrong.
pub fn top_accuracy(outputs: &Matrix<f32>, labels: &[u32], k: usize) -> Result<Option<f64>> {
    require_labels(outputs, labels)?;
    if outputs.cols() <= k {
        return Ok(None);
    }
    let right = |sample: usize, label: usize| {
        let row = outputs.row(sample);
        let own = row[label];
        let before = row.iter().enumerate().filter(|(j, v)| **v > own || (**v == own && *j < label));
        before.count() < k && !row.iter().any(|v| v.is_nan())
    };
    let count = labels.iter().enumerate().filter(|(i, l)| right(*i, **l as usize)).count();
    Ok(Some(share(count, labels.len())))
}

/// The mean of (output − target)² over all outputs of all samples.
pub fn mean_squared_error(outputs: &Matrix<f32>, targets: &Matrix<f32>) -> Result<f64> {
    require_same_shape(outputs, targets)?;
    let square = |(a, b): (&f32, &f32)| (f64::from(*a) - f64::from(*b)).powi(2);
    let sum: f64 = outputs.as_slice().iter().zip(targets.as_slice()).map(square).sum();
    Ok(sum / outputs.as_slice().len().max(1) as f64)
}

/// The share of samples that both predict alike; one without a class agrees with nothing.
pub fn agreement(outputs: &Matrix<f32>, baseline: &Matrix<f32>) -> Result<f64> {
    require_same_shape(outputs, baseline)?;
    let alike = predictions(outputs).into_iter().zip(predictions(baseline)).filter(|(a, b)| a == b && *a != NO_CLASS);
    Ok(share(alike.count(), outputs.rows()))
}

/// RMS of (outputs − baseline's) over the RMS of the baseline's; infinite where the baseline is all zero and the outputs
/// are not.
pub fn equilibrium_error(outputs: &Matrix<f32>, baseline: &Matrix<f32>) -> Result<f64> {
    require_same_shape(outputs, baseline)?;
    let mut sums = Mismatch::default();
    sums.add(outputs.as_slice(), baseline.as_slice(), 1.0);
    Ok(sums.relative())
}

/// How the predictions for the samples of one class changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClassChange {
    /// The class.
    pub class: u32,
    /// Samples with this label.
    pub samples: usize,
    /// Number of these that the baseline classifies correctly.
    pub baseline_correct: usize,
    /// Number of these that the model classifies correctly.
    pub correct: usize,
    /// Number of samples that the baseline classifies correctly and the model does not.
    pub lost: usize,
    /// Number of samples that the model classifies correctly and the baseline does not.
    pub gained: usize,
    /// The class that most of the lost samples are now taken for, and how many of them are.
    pub lost_to: Option<(u32, usize)>,
}

impl ClassChange {
    /// Share of the class that the model classifies correctly; `None` without samples.
    pub fn accuracy(&self) -> Option<f64> {
        (self.samples > 0).then(|| share(self.correct, self.samples))
    }

    /// Share of the class that the baseline classifies correctly; `None` without samples.
    pub fn baseline_accuracy(&self) -> Option<f64> {
        (self.samples > 0).then(|| share(self.baseline_correct, self.samples))
    }
}

/// Changes for every class (every output), in order.
pub fn class_changes(outputs: &Matrix<f32>, baseline: &Matrix<f32>, labels: &[u32]) -> Result<Vec<ClassChange>> {
    require_same_shape(outputs, baseline)?;
    require_labels(outputs, labels)?;
    let classes = outputs.cols();
    let mut taken_for = vec![0usize; classes * classes];
    let mut changes: Vec<ClassChange> = (0..classes as u32)
        .map(|class| ClassChange {
            class,
            samples: 0,
            baseline_correct: 0,
            correct: 0,
            lost: 0,
            gained: 0,
            lost_to: None,
        })
        .collect();
    for ((now, before), &label) in predictions(outputs).into_iter().zip(predictions(baseline)).zip(labels) {
        let change = &mut changes[label as usize];
        let (right, was_right) = (now == label, before == label);
        change.samples += 1;
        change.correct += usize::from(right);
        change.baseline_correct += usize::from(was_right);
        change.gained += usize::from(right && !was_right);
        if was_right && !right {
            change.lost += 1;
            if now != NO_CLASS {
                taken_for[label as usize * classes + now as usize] += 1;
            }
        }
    }
    for (change, row) in changes.iter_mut().zip(taken_for.chunks(classes.max(1))) {
        let most = row.iter().copied().max().unwrap_or(0);
        if most > 0 {
            change.lost_to = row.iter().position(|c| *c == most).map(|class| (class as u32, most));
        }
    }
    Ok(changes)
}

/// Σ(v − w)² and Σw², summed over any number of blocks.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Mismatch {
    difference: f64,
    energy: f64,
}

impl Mismatch {
    /// Adds values (times `factor`) against the baseline's.
    pub(super) fn add(&mut self, values: &[f32], baseline: &[f32], factor: f64) {
        for (v, w) in values.iter().zip(baseline) {
            let w = f64::from(*w);
            self.difference += (f64::from(*v) * factor - w).powi(2);
            self.energy += w * w;
        }
    }

    pub(super) fn merge(&mut self, other: Self) {
        self.difference += other.difference;
        self.energy += other.energy;
    }

    pub(super) fn relative(self) -> f64 {
        if self.difference == 0.0 { 0.0 } else { (self.difference / self.energy).sqrt() }
    }
}

fn share(part: usize, whole: usize) -> f64 {
    part as f64 / whole.max(1) as f64
}

pub(super) fn require_same_shape(outputs: &Matrix<f32>, baseline: &Matrix<f32>) -> Result<()> {
    if (outputs.rows(), outputs.cols()) == (baseline.rows(), baseline.cols()) && outputs.rows() > 0 {
        return Ok(());
    }
    Err(Error::shape(
        "outputs",
        format!("{} × {}, as the baseline's, of at least one sample", baseline.rows(), baseline.cols()),
        format!("{} × {}", outputs.rows(), outputs.cols()),
    ))
}

fn require_labels(outputs: &Matrix<f32>, labels: &[u32]) -> Result<()> {
    if labels.len() != outputs.rows() || labels.is_empty() {
        return Err(Error::shape(
            "labels",
            format!("{}, one for each of at least one sample", outputs.rows()),
            labels.len(),
        ));
    }
    match labels.iter().position(|l| *l as usize >= outputs.cols()) {
        None => Ok(()),
        Some(i) => Err(Error::shape(
            format!("label of sample {i}"),
            format!("a class below {}, the number of outputs", outputs.cols()),
            labels[i],
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn top_accuracy_and_squared_error_by_hand() {
        let outputs = Matrix::from_vec(2, 3, vec![0.1, 0.5, 0.4, 2.0, 2.0, 2.0]).unwrap();
        assert_eq!(top_accuracy(&outputs, &[2, 2], 1).unwrap(), Some(0.0));
        assert_eq!(top_accuracy(&outputs, &[2, 1], 2).unwrap(), Some(1.0));
        assert_eq!(top_accuracy(&outputs, &[0, 2], 2).unwrap(), Some(0.0));
        assert_eq!(top_accuracy(&outputs, &[0, 0], 3).unwrap(), None);
        let targets = Matrix::from_vec(2, 3, vec![0.1, 0.5, 1.4, 0.0, 2.0, 2.0]).unwrap();
        assert!((mean_squared_error(&outputs, &targets).unwrap() - 5.0 / 6.0).abs() < 1e-6);
    }

    fn outputs(classes: &[usize]) -> Matrix<f32> {
        Matrix::from_fn(classes.len(), 3, |i, j| if j == classes[i] { 2.0 } else { -1.0 })
    }

    #[test]
    fn predictions_take_the_first_of_equals_and_no_nan() {
        let nan = f32::NAN;
        let y = Matrix::from_vec(4, 3, vec![1.0, 1.0, 0.0, nan, -5.0, nan, nan, nan, nan, -3.0, -1.0, -2.0]).unwrap();
        assert_eq!(predictions(&y), [0, NO_CLASS, NO_CLASS, 1]);
    }

    #[test]
    fn a_nan_neither_agrees_nor_is_right() {
        let nan = f32::NAN;
        let y = Matrix::from_vec(3, 3, vec![nan, nan, nan, 5.0, nan, 0.0, 0.0, 0.0, 1.0]).unwrap();
        let labels = [0, 0, 2];
        assert_eq!(agreement(&y, &y).unwrap(), 1.0 / 3.0);
        assert_eq!(accuracy(&y, &labels).unwrap(), 1.0 / 3.0);
        assert_eq!(top_accuracy(&y, &labels, 2).unwrap(), Some(1.0 / 3.0));
        let found = class_changes(&y, &outputs(&[0, 0, 2]), &labels).unwrap();
        assert_eq!((found[0].correct, found[0].lost, found[0].lost_to), (0, 2, None));
    }

    #[test]
    fn every_class_is_accounted_for() {
        let labels = [0, 0, 0, 0, 0, 2, 2];
        let (now, before) = (outputs(&[0, 1, 2, 2, 0, 2, 1]), outputs(&[0, 0, 0, 0, 1, 0, 2]));
        let found = class_changes(&now, &before, &labels).unwrap();
        let expected = |class, samples, baseline_correct, correct, lost, gained, lost_to| ClassChange {
            class,
            samples,
            baseline_correct,
            correct,
            lost,
            gained,
            lost_to,
        };
        assert_eq!(found[0], expected(0, 5, 4, 2, 3, 1, Some((2, 2))));
        assert_eq!(found[1], expected(1, 0, 0, 0, 0, 0, None));
        assert_eq!(found[2], expected(2, 2, 1, 1, 1, 1, Some((1, 1))));
        assert_eq!((found[1].accuracy(), found[0].baseline_accuracy()), (None, Some(0.8)));
        assert_eq!(accuracy(&now, &labels).unwrap(), 3.0 / 7.0);
        assert_eq!(accuracy(&before, &labels).unwrap(), 5.0 / 7.0);
        assert_eq!(agreement(&now, &before).unwrap(), 1.0 / 7.0);
    }

    #[test]
    fn the_output_error_is_relative_to_the_baseline() {
        let y = Matrix::from_vec(2, 2, vec![3.0f32, 0.0, 0.0, 4.0]).unwrap();
        let off = Matrix::from_vec(2, 2, vec![3.0f32, 1.0, 0.0, 4.0]).unwrap();
        assert_eq!(equilibrium_error(&off, &y).unwrap(), 0.2);
        assert_eq!(equilibrium_error(&y, &y).unwrap(), 0.0);
        let zero = Matrix::zeros(2, 2);
        assert_eq!(equilibrium_error(&zero, &zero).unwrap(), 0.0);
        assert_eq!(equilibrium_error(&y, &zero).unwrap(), f64::INFINITY);
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let y = outputs(&[0, 1]);
        assert!(accuracy(&y, &[0]).unwrap_err().to_string().contains("expected 2"));
        assert!(accuracy(&y, &[0, 3]).unwrap_err().to_string().contains("label of sample 1"));
        assert!(accuracy(&Matrix::zeros(0, 3), &[]).is_err());
        assert!(agreement(&y, &outputs(&[0])).is_err());
        assert!(class_changes(&y, &y, &[7, 0]).is_err());
    }
}
