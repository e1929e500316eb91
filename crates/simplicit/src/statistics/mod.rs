//! Three statistics from one pass over the samples, after which the samples are not needed again.
//!
//! For features F (one sample a row, the last feature optionally the constant 1) and targets T,
//!
//! <div><math display="block">
//! <mrow><mi>G</mi><mo>=</mo><msup><mi>F</mi><mo>⊤</mo></msup><mi>F</mi><mo>,</mo><mspace width="1em"/></mrow>
//! <mrow><mi>H</mi><mo>=</mo><msup><mi>F</mi><mo>⊤</mo></msup><mi>T</mi><mo>,</mo><mspace width="1em"/></mrow>
//! <mrow><msub><mi>e</mi><mi>i</mi></msub><mo>=</mo><msup><mrow><mo>‖</mo><msub><mi>t</mi><mi>i</mi></msub><mo>‖</mo></mrow><mn>2</mn></msup></mrow>
//! </math></div>
//!
//! are all that a relaxed row problem needs. They add up over samples, so they can be streamed, split over threads or
//! machines, and merged. Samples are cut into fixed blocks of [`BLOCK`] whose statistics are summed in a fixed binary
//! tree: the result is bit-identical for any number of threads or shards cut at multiples of the block.
//!
//! Peak memory, whatever the number of samples: with d features and r targets one accumulator takes
//! 8·(d² + dr + r) bytes, and at most ⌈log₂(blocks)⌉ + 3·threads of them live at once, plus one block of samples
//! (8·`BLOCK`·(2d + r) bytes) per thread.
//!
//! With fewer samples than features (m < 0.41·d) the samples themselves are kept instead of G: an m × d matrix is
//! smaller, and solving with it costs less than with a d × d one. G is then computed when it is first asked for.

mod bytes;
mod single;
mod stream;
#[cfg(test)]
mod tests;
mod wide;

use std::sync::OnceLock;

use crate::backend::cuda::Sums;
use crate::linalg::{Matrix, gemm, gram_lower};
use crate::{Error, Result};

pub(crate) use single::are_single;
pub use stream::Tree;
pub(crate) use stream::features_and_targets;
pub(crate) use wide::{WIDE, bytes as wide_bytes};

/// Samples in a leaf of the summation tree.
pub const BLOCK: usize = 1024;

/// The ratio of samples to features below which products with F, forwards and back, cost less than one with G: a step
/// in m dimensions costs 2md + m² multiplications, one in d dimensions d².
const FEW: f64 = 0.41;

/// Number of rows and columns of a tile.
const TILE: usize = 64;
/// Whether there are so few samples that they are kept as they are.
pub(crate) fn are_few(samples: usize, features: usize) -> bool {
    (samples as f64) < FEW * features as f64
}

/// G, H, e and the number of samples m, accumulated in f64 (exact for products of f32).
#[derive(Debug, Clone, PartialEq)]
pub struct Statistics {
    samples: usize,
    form: Form,
    /// H, one target per row, r × d.
    cross: Matrix,
    energy: Vec<f64>,
}

/// The two forms in which products of features are stored.
#[derive(Debug, Clone)]
enum Form {
    /// G, full symmetric, d × d.
    Gram(Matrix),
    /// F, one sample per row, the diagonal of G, and G when it has been asked for.
    Samples { features: Matrix, squares: Vec<f64>, gram: OnceLock<Matrix> },
}

impl PartialEq for Form {
    /// Whether G has been asked for makes no difference to equality.
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Gram(a), Self::Gram(b)) => a == b,
            (Self::Samples { features: a, .. }, Self::Samples { features: b, .. }) => a == b,
            _ => false,
        }
    }
}

impl Form {
    fn of_samples(features: Matrix) -> Self {
        let mut squares = vec![0.0; features.cols()];
        for i in 0..features.rows() {
            squares.iter_mut().zip(features.row(i)).for_each(|(s, v)| *s += v * v);
        }
        Self::Samples { features, squares, gram: OnceLock::new() }
    }

    fn gram(&self) -> &Matrix {
        match self {
            Self::Gram(gram) => gram,
            Self::Samples { features, gram, .. } => gram.get_or_init(|| gram_of(features)),
        }
    }
}

/// Cuts `count` things into pieces of a size; the last piece may be smaller.
fn cuts(count: usize, size: usize) -> impl Iterator<Item = std::ops::Range<usize>> {
    (0..count.div_ceil(size)).map(move |k| k * size..(k * size).saturating_add(size).min(count))
}

fn shifted(range: std::ops::Range<usize>, by: usize) -> std::ops::Range<usize> {
    range.start + by..range.end + by
}

/// FᵀF, full symmetric.
fn gram_of(features: &Matrix) -> Matrix {
    let d = features.cols();
    let mut gram = Matrix::zeros(d, d);
    gram_lower(&mut gram, features.view());
    mirror(&mut gram);
    gram
}

/// Tiles of a square matrix on and below the diagonal, as ranges of rows and columns.
fn lower_tiles(d: usize) -> impl Iterator<Item = [std::ops::Range<usize>; 2]> {
    cuts(d, TILE).flat_map(move |rows| cuts(rows.end, TILE).map(move |columns| [rows.clone(), columns]))
}

/// Copies the part below the diagonal to the part above, a tile at a time, so that the lines of a tile stay in the
/// cache.
fn mirror(gram: &mut Matrix) {
    for [rows, columns] in lower_tiles(gram.cols()) {
        for i in rows {
            for j in columns.start..columns.end.min(i) {
                gram[(j, i)] = gram[(i, j)];
            }
        }
    }
}

impl Statistics {
    /// The statistics of no samples.
    pub fn empty(features: usize, targets: usize) -> Self {
        Self {
            samples: 0,
            form: Form::Gram(Matrix::zeros(features, features)),
            cross: Matrix::zeros(targets, features),
            energy: vec![0.0; targets],
        }
    }

    /// The statistics of a few samples: features and targets with one sample per row.
    pub fn of(features: &Matrix, targets: &Matrix) -> Result<Self> {
        Self::check(features, targets)?;
        Ok(Self::in_form(Form::Gram(gram_of(features)), features, targets))
    }

    /// The same, with the samples kept instead of their products.
    pub fn of_few(features: Matrix, targets: &Matrix) -> Result<Self> {
        Self::check(&features, targets)?;
        let mut out = Self::in_form(Form::Gram(Matrix::default()), &features, targets);
        out.form = Form::of_samples(features);
        Ok(out)
    }

    /// The statistics from sums that were computed elsewhere: G (d × d), H (one target per row, r × d) and e of
    /// `samples` samples.
    pub fn from_sums(samples: usize, gram: Matrix, cross: Matrix, energy: Vec<f64>) -> Result<Self> {
        let (d, r) = (gram.cols(), energy.len());
        if gram.rows() != d || cross.rows() != r || cross.cols() != d {
            let got = format!("{} × {d}, {} × {}, {r}", gram.rows(), cross.rows(), cross.cols());
            return Err(Error::shape("sums", "G d × d, H r × d and e of r", got));
        }
        gram.require_finite("G", 0)?;
        cross.require_finite("H", 0)?;
        if let Some(bad) = energy.iter().find(|e| !e.is_finite()) {
            return Err(Error::setting("e", "finite sums of squares", bad));
        }
        Ok(Self { samples, form: Form::Gram(gram), cross, energy })
    }

    fn check(features: &Matrix, targets: &Matrix) -> Result<()> {
        if features.rows() != targets.rows() {
            return Err(Error::shape(
                "targets",
                format!("{} samples", features.rows()),
                format!("{} samples", targets.rows()),
            ));
        }
        features.require_finite("features", 0)?;
        targets.require_finite("targets", 0)
    }

    fn in_form(form: Form, features: &Matrix, targets: &Matrix) -> Self {
        let d = features.cols();
        let mut cross = Matrix::zeros(targets.cols(), d);
        gemm(cross.as_mut_slice(), d, false, 1.0, targets.view().t(), features.view());
        let mut energy = vec![0.0; targets.cols()];
        for row in 0..targets.rows() {
            for (e, t) in energy.iter_mut().zip(targets.row(row)) {
                *e += t * t;
            }
        }
        Self { samples: features.rows(), form, cross, energy }
    }

    /// F, one sample per row, if there are fewer samples than features.
    pub(crate) fn few_samples(&self) -> Option<&Matrix> {
        match &self.form {
            Form::Samples { features, .. } => Some(features),
            Form::Gram(_) => None,
        }
    }

    /// Sums statistics of disjoint samples.
    pub fn merge(mut self, other: &Self) -> Result<Self> {
        if self.features() != other.features() || self.targets() != other.targets() {
            return Err(Error::shape(
                "statistics to merge",
                format!("{} features, {} targets", self.features(), self.targets()),
                format!("{} features, {} targets", other.features(), other.targets()),
            ));
        }
        self.samples += other.samples;
        let plus = |a: &mut [f64], b: &[f64]| a.iter_mut().zip(b).for_each(|(a, b)| *a += b);
        self.form = match (self.form, &other.form) {
            (Form::Samples { features, .. }, Form::Samples { features: more, .. }) => {
                let (rows, cols) = (features.rows() + more.rows(), features.cols());
                let mut data = features.into_vec();
                data.extend_from_slice(more.as_slice());
                Form::of_samples(Matrix::from_vec(rows, cols, data)?)
            }
            (Form::Gram(mut gram), more) => {
                plus(gram.as_mut_slice(), more.gram().as_slice());
                Form::Gram(gram)
            }
            (few, Form::Gram(more)) => {
                let mut gram = few.gram().clone();
                plus(gram.as_mut_slice(), more.as_slice());
                Form::Gram(gram)
            }
        };
        for (a, b) in [(self.cross.as_mut_slice(), other.cross.as_slice()), (&mut self.energy, &other.energy)] {
            plus(a, b);
        }
        Ok(self)
    }

    /// The statistics of some of the features and some of the targets, in the order given.
    pub fn part(&self, features: &[usize], targets: &[usize]) -> Self {
        let form = match &self.form {
            Form::Samples { features: all, .. } => {
                Form::of_samples(Matrix::from_fn(all.rows(), features.len(), |i, j| all[(i, features[j])]))
            }
            Form::Gram(gram) => {
                Form::Gram(Matrix::from_fn(features.len(), features.len(), |i, j| gram[(features[i], features[j])]))
            }
        };
        Self {
            samples: self.samples,
            form,
            cross: Matrix::from_fn(targets.len(), features.len(), |k, j| self.cross[(targets[k], features[j])]),
            energy: targets.iter().map(|&k| self.energy[k]).collect(),
        }
    }

    /// Of the features of `self` followed by those of `fixed`, with the targets of `fixed`: the targets of `self` are
    /// the features and then the targets of `fixed`, on the same samples. So the part that two designs share is
    /// computed only once.
    pub(crate) fn followed_by(&self, fixed: &Self) -> Result<Self> {
        let (first, second, targets) = (self.features(), fixed.features(), fixed.targets());
        if self.targets() != second + targets || self.samples != fixed.samples {
            return Err(Error::shape(
                "statistics to join",
                format!("{} targets of {} samples", second + targets, fixed.samples),
                format!("{} targets of {} samples", self.targets(), self.samples),
            ));
        }
        let form = match (&self.form, &fixed.form) {
            (Form::Samples { features: a, .. }, Form::Samples { features: b, .. }) => Form::of_samples(beside(&[a, b])),
            (own, others) => {
                let (own, others) = (own.gram(), others.gram());
                let entry = |i: usize, j: usize| match (i < first, j < first) {
                    (true, true) => own[(i, j)],
                    (true, false) => self.cross[(j - first, i)],
                    (false, true) => self.cross[(i - first, j)],
                    (false, false) => others[(i - first, j - first)],
                };
                Form::Gram(Matrix::from_fn(first + second, first + second, entry))
            }
        };
        let cross = Matrix::from_fn(targets, first + second, |k, j| {
            if j < first { self.cross[(second + k, j)] } else { fixed.cross[(k, j - first)] }
        });
        Ok(Self { samples: self.samples, form, cross, energy: fixed.energy.clone() })
    }

    /// Statistics from the sums of a GPU.
    pub(crate) fn of_sums(sums: Sums) -> Self {
        let Sums { samples, gram, cross, energy } = sums;
        Self { samples, form: Form::Gram(gram), cross, energy }
    }

    /// Bytes of memory that they take.
    pub(crate) fn bytes(&self) -> u64 {
        let form = match &self.form {
            Form::Gram(form) | Form::Samples { features: form, .. } => form.as_slice().len(),
        };
        8 * (form + self.cross.as_slice().len()) as u64
    }

    /// Number of samples m.
    pub fn samples(&self) -> usize {
        self.samples
    }

    /// Number of features d.
    pub fn features(&self) -> usize {
        match &self.form {
            Form::Gram(gram) => gram.cols(),
            Form::Samples { features, .. } => features.cols(),
        }
    }

    /// Number of targets r.
    pub fn targets(&self) -> usize {
        self.cross.rows()
    }

    /// G, d × d; computed now if the samples were kept instead.
    pub fn gram(&self) -> &Matrix {
        self.form.gram()
    }

    /// h of one target, d values.
    pub fn cross(&self, target: usize) -> &[f64] {
        self.cross.row(target)
    }

    /// e = ‖t‖² of one target.
    pub fn energy(&self, target: usize) -> f64 {
        self.energy[target]
    }

    /// ‖t − Fw‖² of a target at some (feature, weight) pairs.
    pub fn mismatch(&self, target: usize, weights: &[(usize, f64)]) -> f64 {
        let h = self.cross(target);
        let mut sum = self.energy(target);
        match &self.form {
            Form::Gram(gram) => {
                for &(j, w) in weights {
                    let line = gram.row(j);
                    let g: f64 = weights.iter().map(|&(k, v)| line[k] * v).sum();
                    sum += w * (g - 2.0 * h[j]);
                }
            }
            Form::Samples { features, .. } => {
                sum -= 2.0 * weights.iter().map(|&(j, w)| w * h[j]).sum::<f64>();
                for i in 0..features.rows() {
                    let line = features.row(i);
                    sum += weights.iter().map(|&(j, w)| w * line[j]).sum::<f64>().powi(2);
                }
            }
        }
        sum.max(0.0)
    }

    /// Root mean square of feature j; zero for a feature that is always zero.
    pub fn rms(&self, j: usize) -> f64 {
        let square = match &self.form {
            Form::Gram(gram) => gram[(j, j)],
            Form::Samples { squares, .. } => squares[j],
        };
        (square / self.samples as f64).sqrt()
    }
}

/// Matrices with the same number of rows, side by side.
pub(crate) fn beside(parts: &[&Matrix]) -> Matrix {
    let rows = parts.first().map_or(0, |m| m.rows());
    let cols = parts.iter().map(|m| m.cols()).sum();
    let mut data = Vec::with_capacity(rows * cols);
    for i in 0..rows {
        for part in parts {
            data.extend_from_slice(part.row(i));
        }
    }
    Matrix::from_vec(rows, cols, data).unwrap_or_default()
}
