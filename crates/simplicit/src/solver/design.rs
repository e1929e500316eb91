//! The data that all rows share: the normalised Gram matrix and its regularised inverses, which are made only once.

use std::ops::Deref;
use std::sync::{Arc, OnceLock};

use crate::backend::{Inverses, Quadratic};
use crate::linalg::{Cholesky, Matrix};
use crate::problem::Units;
use crate::statistics::Statistics;
use crate::{Error, Result};

/// Number of ε of the regularised inverses (Ĝ + εI)⁻¹, from 1 downwards. One ladder serves both phases of the solver,
/// so that rows share the inverses.
pub(crate) const LEVELS: usize = 13;

/// Decades between two ε.
pub(crate) const DECADES: f64 = 0.75;
/// The ε of a level.
pub(crate) fn epsilon(level: usize) -> f64 {
    10f64.powf(-DECADES * level as f64)
}

/// A feature or target whose RMS is no more than this cannot be normalised, because its square underflows: it is
/// treated as always zero.
pub(crate) const TINY: f64 = 1e-140;

/// The coordinates in which rows over one design are solved: ŵ_j = w_j·s_j/t with a scale s_j per feature.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scaling {
    /// s = rms: Ĝ has a unit diagonal. For penalties on normalised weights.
    Rms,
    /// s = √(rms·mean rms): for penalties on stored weights. Half-way between stored and normalised weights, all
    /// thresholds of the splitting are similar, so it finds supports in far fewer steps (`docs/solver.md`).
    Between,
}

impl Scaling {
    /// The coordinates that suit a row's units.
    pub(crate) fn of(units: Units) -> Self {
        match units {
            Units::Stored => Self::Between,
            Units::Rms { .. } => Self::Rms,
        }
    }
}

/// Statistics that are borrowed, or that the design keeps alive.
#[derive(Debug, Clone)]
enum Held<'a> {
    Lent(&'a Statistics),
    Shared(Arc<Statistics>),
}

impl Deref for Held<'_> {
    type Target = Statistics;

    fn deref(&self) -> &Statistics {
        match self {
            Self::Lent(statistics) => statistics,
            Self::Shared(statistics) => statistics,
        }
    }
}

/// Ĝ in one scaling, and its regularised inverses.
#[derive(Debug)]
pub(crate) struct Coordinates<'a> {
    statistics: Held<'a>,
    columns: Vec<usize>,
    scales: Vec<f64>,
    diagonal: Vec<f64>,
    /// Made when it is first needed: cardinality over few samples never needs it.
    gram: OnceLock<Matrix>,
    inverses: [OnceLock<Option<Matrix>>; LEVELS],
    projections: [OnceLock<Option<Matrix<f32>>>; LEVELS],
}

impl<'a> Coordinates<'a> {
    fn new(statistics: Held<'a>, columns: Vec<usize>, scaling: Scaling) -> Self {
        let rms: Vec<f64> = columns.iter().map(|&j| statistics.rms(j)).collect();
        let mean = rms.iter().sum::<f64>() / rms.len().max(1) as f64;
        // The diagonal of Ĝ, limited to three decades so that ε does not hide any feature.
        let diagonal = |rms: f64| match scaling {
            Scaling::Rms => 1.0,
            Scaling::Between => (rms / mean).clamp(1e-3, 1e3),
        };
        let diagonal: Vec<f64> = rms.iter().map(|&rms| diagonal(rms)).collect();
        let scales = rms.iter().zip(&diagonal).map(|(rms, d)| rms / d.sqrt()).collect();
        Self {
            statistics,
            columns,
            scales,
            diagonal,
            gram: OnceLock::new(),
            inverses: std::array::from_fn(|_| OnceLock::new()),
            projections: std::array::from_fn(|_| OnceLock::new()),
        }
    }

    /// Bytes of everything that has been made so far.
    fn bytes(&self) -> u64 {
        let whole = self.gram.get().into_iter().chain(self.inverses.iter().filter_map(|i| i.get()?.as_ref()));
        let single = self.projections.iter().filter_map(|p| p.get()?.as_ref());
        let numbers = 2 * whole.map(|m| m.as_slice().len()).sum::<usize>();
        4 * (numbers + single.map(|m| m.as_slice().len()).sum::<usize>()) as u64
    }

    /// s of every live feature.
    pub(crate) fn scales(&self) -> &[f64] {
        &self.scales
    }

    /// Ĝ.
    pub(crate) fn gram(&self) -> &Matrix {
        self.gram.get_or_init(|| {
            let (columns, scales) = (&self.columns, &self.scales);
            let (m, gram) = (self.statistics.samples() as f64, self.statistics.gram());
            let mut out = Matrix::zeros(columns.len(), columns.len());
            for (i, &column) in columns.iter().enumerate() {
                let (line, own) = (gram.row(column), m * scales[i]);
                let values = columns.iter().zip(scales);
                if columns.len() == line.len() {
                    // If all features are live there is nothing to select, and the loop runs over several numbers at
                    // a time.
                    out.row_mut(i).iter_mut().zip(line).zip(scales).for_each(|((out, g), s)| *out = g / (own * s));
                } else {
                    out.row_mut(i).iter_mut().zip(values).for_each(|(out, (&j, s))| *out = line[j] / (own * s));
                }
                out[(i, i)] = self.diagonal[i];
            }
            out
        })
    }

    /// F̂ with Ĝ = F̂ᵀF̂, one sample per row, if there are fewer samples than features.
    fn few_samples(&self) -> Option<Matrix> {
        let features = self.statistics.few_samples()?;
        let root = (self.statistics.samples() as f64).sqrt();
        let columns = &self.columns;
        Some(Matrix::from_fn(features.rows(), columns.len(), |i, j| {
            features[(i, columns[j])] / (root * self.scales[j])
        }))
    }

    /// (Ĝ + εI)⁻¹ of a level; `None` if ε is lost in rounding; a smaller level must then be used.
    pub(crate) fn inverse(&self, level: usize) -> Option<&Matrix> {
        self.inverses[level]
            .get_or_init(|| {
                let d = self.scales.len();
                let mut factor = Cholesky::with_capacity(d);
                let filled = factor.factor(d, |a| {
                    a.copy_from_slice(self.gram().as_slice());
                    for i in 0..d {
                        a[i * d + i] += epsilon(level);
                    }
                });
                filled.then(|| factor.inverse())
            })
            .as_ref()
    }

    /// ε(Ĝ + εI)⁻¹ in single precision: its norm is at most one, so its products lose no digits that matter.
    pub(crate) fn projection(&self, level: usize) -> Option<&Matrix<f32>> {
        self.projections[level]
            .get_or_init(|| {
                let inverse = self.inverse(level)?;
                let mut out = inverse.cast::<f32>();
                let epsilon = epsilon(level) as f32;
                out.as_mut_slice().iter_mut().for_each(|v| *v *= epsilon);
                Some(out)
            })
            .as_ref()
    }
}

/// The design of some rows: statistics restricted to the features those rows may use.
#[derive(Debug)]
pub struct Design<'a> {
    statistics: Held<'a>,
    /// Column of the statistics for every feature.
    features: Vec<usize>,
    /// Features that are not always zero (indices into `features`).
    live: Vec<usize>,
    coordinates: [OnceLock<Coordinates<'a>>; 2],
    few_samples: OnceLock<Option<Matrix>>,
    /// The inverses of the splitting of cardinality rows, if they are kept.
    inverses: Option<Arc<Inverses>>,
}

impl<'a> Design<'a> {
    /// The design over all features of the statistics.
    pub fn new(statistics: &'a Statistics) -> Result<Self> {
        Self::with_features(statistics, (0..statistics.features()).collect())
    }

    /// The same, with inverses for cardinality rows that several designs of the same statistics share, because their
    /// rows are solved in parts.
    pub(crate) fn sharing(statistics: &'a Statistics, inverses: Option<Arc<Inverses>>) -> Result<Self> {
        Self::over(Held::Lent(statistics), (0..statistics.features()).collect(), inverses)
    }

    /// The design over some features, in the order given.
    pub fn with_features(statistics: &'a Statistics, features: Vec<usize>) -> Result<Self> {
        Self::over(Held::Lent(statistics), features, None)
    }

    fn over(statistics: Held<'a>, features: Vec<usize>, inverses: Option<Arc<Inverses>>) -> Result<Self> {
        if statistics.samples() == 0 {
            return Err(Error::shape("samples", "at least one", 0));
        }
        if let Some(&j) = features.iter().find(|&&j| j >= statistics.features()) {
            return Err(Error::shape("feature", format!("below {}", statistics.features()), j));
        }
        let live: Vec<usize> = (0..features.len()).filter(|&k| statistics.rms(features[k]) > TINY).collect();
        Ok(Self {
            statistics,
            features,
            live,
            coordinates: std::array::from_fn(|_| OnceLock::new()),
            few_samples: OnceLock::new(),
            inverses,
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

    /// The live features in one scaling, made when first asked for.
    pub(crate) fn coordinates(&self, scaling: Scaling) -> &Coordinates<'a> {
        self.coordinates[scaling as usize].get_or_init(|| {
            let columns: Vec<usize> = self.live.iter().map(|&k| self.features[k]).collect();
            Coordinates::new(self.statistics.clone(), columns, scaling)
        })
    }

    /// The RMS of every live feature.
    pub(crate) fn scales(&self) -> &[f64] {
        self.coordinates(Scaling::Rms).scales()
    }

    /// The Gram matrix of unit-RMS features.
    pub(crate) fn gram(&self) -> &Matrix {
        self.coordinates(Scaling::Rms).gram()
    }

    pub(crate) fn energy(&self, target: usize) -> f64 {
        self.statistics.energy(target)
    }

    /// h over this design's features.
    pub(crate) fn cross(&self, target: usize) -> Vec<f64> {
        let row = self.statistics.cross(target);
        self.features.iter().map(|&j| row[j]).collect()
    }

    /// The inverses for cardinality rows, if they are kept.
    pub fn inverses(&self) -> Option<&Inverses> {
        self.inverses.as_deref()
    }

    /// Bytes held so far: statistics, Ĝ and inverses.
    pub fn bytes(&self) -> u64 {
        let coordinates = self.coordinates.iter().filter_map(OnceLock::get);
        let made = coordinates.map(Coordinates::bytes).sum::<u64>() + self.inverses().map_or(0, Inverses::bytes);
        let few = self.few_samples.get().and_then(Option::as_ref).map_or(0, |f| 8 * f.as_slice().len() as u64);
        self.statistics.bytes() + few + made
    }

    /// Whether there are so few samples that they are kept instead of their products.
    pub(crate) fn has_few_samples(&self) -> bool {
        self.statistics.few_samples().is_some()
    }

    /// Ĝ of unit-RMS features in the form that is cheaper to compute with.
    pub(crate) fn quadratic(&self) -> Quadratic<'_> {
        match self.few_samples.get_or_init(|| self.coordinates(Scaling::Rms).few_samples()) {
            Some(features) => Quadratic::Samples(features),
            None => Quadratic::Gram(self.gram()),
        }
    }
}

impl Design<'static> {
    /// The design over all features of statistics that it keeps alive, with all inverses that it makes: for rows that
    /// are solved in several calls.
    pub fn kept(statistics: Arc<Statistics>) -> Result<Self> {
        let features = (0..statistics.features()).collect();
        Self::over(Held::Shared(statistics), features, Some(Arc::default()))
    }
}
