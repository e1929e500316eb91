//! What all rows share: the normalised Gram matrix and its regularised inverses, made once.

use std::sync::OnceLock;

use crate::linalg::{Cholesky, Matrix, symmetric_eigen};
use crate::statistics::Statistics;
use crate::{Error, Result};

/// Number of ε of the regularised inverses (Ĝ + εI)⁻¹, from 1 downwards. One ladder serves both phases of the solver,
/// so that rows share the inverses.
pub(crate) const LEVELS: usize = 13;

/// Decades between two ε.
pub(crate) const DECADES: f64 = 0.75;
/// ε of a level.
pub(crate) fn epsilon(level: usize) -> f64 {
    10f64.powf(-DECADES * level as f64)
}

/// The design of some rows: statistics restricted to the features those rows may use, normalised to unit RMS.
#[derive(Debug)]
pub struct Design<'a> {
    statistics: &'a Statistics,
    /// Column of the statistics for every feature.
    features: Vec<usize>,
    /// Features that are not always zero (indices into `features`), and their RMS.
    live: Vec<usize>,
    scales: Vec<f64>,
    /// Ĝ over the live features, unit diagonal.
    gram: Matrix,
    inverses: [OnceLock<Option<Matrix>>; LEVELS],
    /// The same in single precision, for the phase that needs no more.
    single_inverses: [OnceLock<Option<Matrix<f32>>>; LEVELS],
    eigen: OnceLock<Option<(Vec<f64>, Matrix)>>,
}

impl<'a> Design<'a> {
    /// Over all features of the statistics.
    pub fn new(statistics: &'a Statistics) -> Result<Self> {
        Self::with_features(statistics, (0..statistics.features()).collect())
    }

    /// Over some features, in the order given.
    pub fn with_features(statistics: &'a Statistics, features: Vec<usize>) -> Result<Self> {
        if statistics.samples() == 0 {
            return Err(Error::shape("samples", "at least one", 0));
        }
        if let Some(&j) = features.iter().find(|&&j| j >= statistics.features()) {
            return Err(Error::shape("feature", format!("below {}", statistics.features()), j));
        }
        // A feature whose square underflows cannot be normalised; it is as good as always zero.
        let live: Vec<usize> = (0..features.len()).filter(|&k| statistics.rms(features[k]) > 1e-140).collect();
        let scales: Vec<f64> = live.iter().map(|&k| statistics.rms(features[k])).collect();
        let m = statistics.samples() as f64;
        let gram = Matrix::from_fn(live.len(), live.len(), |i, j| {
            if i == j {
                1.0
            } else {
                statistics.gram()[(features[live[i]], features[live[j]])] / (m * scales[i] * scales[j])
            }
        });
        Ok(Self {
            statistics,
            features,
            live,
            scales,
            gram,
            inverses: std::array::from_fn(|_| OnceLock::new()),
            single_inverses: std::array::from_fn(|_| OnceLock::new()),
            eigen: OnceLock::new(),
        })
    }

    /// Number of features, dead ones included.
    pub fn features(&self) -> usize {
        self.features.len()
    }

    /// Number of targets of the statistics.
    pub fn targets(&self) -> usize {
        self.statistics.targets()
    }

    /// Number of samples.
    pub fn samples(&self) -> usize {
        self.statistics.samples()
    }

    /// RMS of a feature, zero if it is always zero.
    pub fn rms(&self, feature: usize) -> f64 {
        self.statistics.rms(self.features[feature])
    }

    /// RMS of a target.
    pub fn target_rms(&self, target: usize) -> f64 {
        (self.statistics.energy(target) / self.samples() as f64).sqrt()
    }

    /// ‖z − Ũᵀw‖²/m of a target at weights over this design's features.
    pub fn mean_square_mismatch(&self, target: usize, weights: &[f64]) -> f64 {
        let used: Vec<(usize, f64)> =
            self.features.iter().zip(weights).map(|(&j, &w)| (j, w)).filter(|(_, w)| *w != 0.0).collect();
        self.statistics.mismatch(target, &used) / self.samples() as f64
    }

    pub(crate) fn live(&self) -> &[usize] {
        &self.live
    }

    pub(crate) fn scales(&self) -> &[f64] {
        &self.scales
    }

    pub(crate) fn gram(&self) -> &Matrix {
        &self.gram
    }

    pub(crate) fn energy(&self, target: usize) -> f64 {
        self.statistics.energy(target)
    }

    /// h over this design's features.
    pub(crate) fn cross(&self, target: usize) -> Vec<f64> {
        let row = self.statistics.cross(target);
        self.features.iter().map(|&j| row[j]).collect()
    }

    /// (Ĝ + εI)⁻¹ of a level; `None` if ε is lost in rounding, when a smaller level must do.
    pub(crate) fn inverse(&self, level: usize) -> Option<&Matrix> {
        self.inverses[level]
            .get_or_init(|| {
                let d = self.gram.rows();
                let mut factor = Cholesky::with_capacity(d);
                let filled = factor.factor(d, |a| {
                    a.copy_from_slice(self.gram.as_slice());
                    for i in 0..d {
                        a[i * d + i] += epsilon(level);
                    }
                });
                filled.then(|| factor.inverse())
            })
            .as_ref()
    }

    /// [`Design::inverse`] rounded to single precision.
    pub(crate) fn single_inverse(&self, level: usize) -> Option<&Matrix<f32>> {
        self.single_inverses[level].get_or_init(|| self.inverse(level).map(Matrix::cast)).as_ref()
    }

    /// Eigenvalues and eigenvectors (columns) of Ĝ.
    pub(crate) fn eigen(&self) -> Option<(&[f64], &Matrix)> {
        self.eigen
            .get_or_init(|| symmetric_eigen(&self.gram))
            .as_ref()
            .map(|(values, vectors)| (values.as_slice(), vectors))
    }
}
