//! One pass over the samples, three statistics, and the samples are never needed again.
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

use crate::backend::cuda::Cuda;
use crate::linalg::{Matrix, gemm, gram_lower};
use crate::parallel::{self, Cancel, Threads};
use crate::states::{StateBlock, StateSource};
use crate::{Error, Result};

/// Samples in a leaf of the summation tree.
pub const BLOCK: usize = 1024;

/// G, H, e and the number of samples m, accumulated in f64 (exact for products of f32).
#[derive(Debug, Clone, PartialEq)]
pub struct Statistics {
    samples: usize,
    /// Full symmetric, d × d.
    gram: Matrix,
    /// One target a row, r × d.
    cross: Matrix,
    energy: Vec<f64>,
}

impl Statistics {
    /// Of no samples.
    pub fn empty(features: usize, targets: usize) -> Self {
        Self {
            samples: 0,
            gram: Matrix::zeros(features, features),
            cross: Matrix::zeros(targets, features),
            energy: vec![0.0; targets],
        }
    }

    /// Of a few samples: features and targets with one sample a row.
    pub fn of(features: &Matrix, targets: &Matrix) -> Result<Self> {
        if features.rows() != targets.rows() {
            return Err(Error::shape(
                "targets",
                format!("{} samples", features.rows()),
                format!("{} samples", targets.rows()),
            ));
        }
        features.require_finite("features", 0)?;
        targets.require_finite("targets", 0)?;
        let mut out = Self::empty(features.cols(), targets.cols());
        out.samples = features.rows();
        gram_lower(&mut out.gram, features);
        let d = features.cols();
        for i in 0..d {
            for j in 0..i {
                out.gram[(j, i)] = out.gram[(i, j)];
            }
        }
        gemm(out.cross.as_mut_slice(), d, false, 1.0, targets.view().t(), features.view());
        for row in 0..targets.rows() {
            for (e, t) in out.energy.iter_mut().zip(targets.row(row)) {
                *e += t * t;
            }
        }
        Ok(out)
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
        for (a, b) in [
            (self.gram.as_mut_slice(), other.gram.as_slice()),
            (self.cross.as_mut_slice(), other.cross.as_slice()),
            (&mut self.energy, &other.energy),
        ] {
            for (a, b) in a.iter_mut().zip(b) {
                *a += b;
            }
        }
        Ok(self)
    }

    /// Of some of the features and some of the targets, in the order given.
    pub fn part(&self, features: &[usize], targets: &[usize]) -> Self {
        Self {
            samples: self.samples,
            gram: Matrix::from_fn(features.len(), features.len(), |i, j| self.gram[(features[i], features[j])]),
            cross: Matrix::from_fn(targets.len(), features.len(), |k, j| self.cross[(targets[k], features[j])]),
            energy: targets.iter().map(|&k| self.energy[k]).collect(),
        }
    }

    /// Of the features of `self` followed by those of `fixed`, with the targets of `fixed`: the targets of `self` are
    /// the features and then the targets of `fixed`, on the same samples. What two designs share is computed once.
    pub fn followed_by(&self, fixed: &Self) -> Result<Self> {
        let (first, second, targets) = (self.features(), fixed.features(), fixed.targets());
        if self.targets() != second + targets || self.samples != fixed.samples {
            return Err(Error::shape(
                "statistics to join",
                format!("{} targets of {} samples", second + targets, fixed.samples),
                format!("{} targets of {} samples", self.targets(), self.samples),
            ));
        }
        let gram = Matrix::from_fn(first + second, first + second, |i, j| match (i < first, j < first) {
            (true, true) => self.gram[(i, j)],
            (true, false) => self.cross[(j - first, i)],
            (false, true) => self.cross[(i - first, j)],
            (false, false) => fixed.gram[(i - first, j - first)],
        });
        let cross = Matrix::from_fn(targets, first + second, |k, j| {
            if j < first { self.cross[(second + k, j)] } else { fixed.cross[(k, j - first)] }
        });
        Ok(Self { samples: self.samples, gram, cross, energy: fixed.energy.clone() })
    }

    /// Streams `samples` samples in blocks. `read` returns features and targets of a range of samples; it is called
    /// from several threads.
    pub fn stream(
        samples: usize,
        threads: Threads,
        cancel: &Cancel,
        read: impl Fn(std::ops::Range<usize>) -> Result<(Matrix, Matrix)> + Sync,
        mut progress: impl FnMut(usize),
    ) -> Result<Self> {
        if samples == 0 {
            return Err(Error::shape("samples", "at least one", 0));
        }
        let mut tree = Tree::default();
        parallel::fold(
            threads,
            samples.div_ceil(BLOCK),
            |block| {
                cancel.check()?;
                let range = block * BLOCK..((block + 1) * BLOCK).min(samples);
                let (features, targets) = read(range)?;
                Self::of(&features, &targets)
            },
            |block, leaf| {
                progress(((block + 1) * BLOCK).min(samples));
                tree.push(leaf)
            },
        )?;
        tree.finish()
    }

    /// [`Statistics::stream`] with the sums on a GPU: the same within the rounding of f64.
    pub fn stream_on(
        cuda: &Cuda,
        samples: usize,
        threads: Threads,
        cancel: &Cancel,
        read: impl Fn(std::ops::Range<usize>) -> Result<(Matrix, Matrix)> + Sync,
        mut progress: impl FnMut(usize),
    ) -> Result<Self> {
        if samples == 0 {
            return Err(Error::shape("samples", "at least one", 0));
        }
        let (f, t) = read(0..1)?;
        let mut energy = vec![0.0; t.cols()];
        let mut total = 0;
        let (gram, cross) = cuda.accumulate(f.cols(), t.cols(), |sums| {
            parallel::fold(
                threads,
                samples.div_ceil(BLOCK),
                |block| {
                    cancel.check()?;
                    let (features, targets) = read(block * BLOCK..((block + 1) * BLOCK).min(samples))?;
                    features.require_finite("features", 0)?;
                    targets.require_finite("targets", 0)?;
                    Ok((features, targets))
                },
                |block, (features, targets)| {
                    sums.add(&features, &targets)?;
                    total += features.rows();
                    for row in 0..targets.rows() {
                        for (e, t) in energy.iter_mut().zip(targets.row(row)) {
                            *e += t * t;
                        }
                    }
                    progress(((block + 1) * BLOCK).min(samples));
                    Ok(())
                },
            )
        })?;
        Ok(Self { samples: total, gram, cross, energy })
    }

    /// Of the paper's problem: features Ũ = [X; U] (and the constant, last, if `constant`), targets Ỹ = [Z; Y].
    pub fn of_states(
        source: &dyn StateSource,
        constant: bool,
        threads: Threads,
        cancel: &Cancel,
        progress: impl FnMut(usize),
    ) -> Result<Self> {
        Self::stream(
            source.samples(),
            threads,
            cancel,
            |range| Ok(features_and_targets(&source.block(range)?, constant)),
            progress,
        )
    }

    /// All numbers, little-endian, samples first.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = (self.samples as u64).to_le_bytes().to_vec();
        for part in [self.gram.as_slice(), self.cross.as_slice(), &self.energy] {
            out.extend(part.iter().flat_map(|v| v.to_le_bytes()));
        }
        out
    }

    /// The inverse of [`Statistics::to_bytes`]; `None` if the length does not fit or a number is not finite.
    pub fn from_bytes(bytes: &[u8], features: usize, targets: usize) -> Option<Self> {
        let count =
            features.checked_mul(features)?.checked_add(features.checked_mul(targets)?)?.checked_add(targets)?;
        let (samples, rest) = bytes.split_first_chunk::<8>()?;
        let (numbers, tail) = rest.as_chunks::<8>();
        if numbers.len() != count || !tail.is_empty() {
            return None;
        }
        let mut values = numbers.iter().map(|c| f64::from_le_bytes(*c));
        let mut out = Self::empty(features, targets);
        out.samples = usize::try_from(u64::from_le_bytes(*samples)).ok()?;
        for part in [out.gram.as_mut_slice(), out.cross.as_mut_slice(), &mut out.energy] {
            for (slot, value) in part.iter_mut().zip(&mut values) {
                *slot = value.is_finite().then_some(value)?;
            }
        }
        Some(out)
    }

    /// Number of samples m.
    pub fn samples(&self) -> usize {
        self.samples
    }

    /// Number of features d.
    pub fn features(&self) -> usize {
        self.gram.rows()
    }

    /// Number of targets r.
    pub fn targets(&self) -> usize {
        self.cross.rows()
    }

    /// G, d × d.
    pub fn gram(&self) -> &Matrix {
        &self.gram
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
        for &(j, w) in weights {
            let g: f64 = weights.iter().map(|&(k, v)| self.gram[(j, k)] * v).sum();
            sum += w * (g - 2.0 * h[j]);
        }
        sum.max(0.0)
    }

    /// Root mean square of feature j; zero for a feature that is always zero.
    pub fn rms(&self, j: usize) -> f64 {
        (self.gram[(j, j)] / self.samples as f64).sqrt()
    }
}

/// Ũ = [X; U] (and the constant, last) and Ỹ = [Z; Y] of a few samples, one sample a row.
pub(crate) fn features_and_targets(block: &StateBlock, constant: bool) -> (Matrix, Matrix) {
    let one = constant.then(|| Matrix::from_fn(block.samples(), 1, |_, _| 1.0));
    let mut features = vec![&block.x, &block.u];
    features.extend(&one);
    (beside(&features), beside(&[&block.z, &block.y]))
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

/// Binary-counter summation: leaf b joins trees of equal size, so the shape depends on the number of leaves alone. Leaves
/// are blocks of [`BLOCK`] samples, or shards of `BLOCK`·2ᵏ samples of one k: either way the same bits come out.
#[derive(Debug, Default)]
pub struct Tree {
    /// (number of leaves, sum), sizes strictly falling.
    parts: Vec<(usize, Statistics)>,
}

impl Tree {
    /// Adds the next leaf, in the order of the samples.
    pub fn push(&mut self, leaf: Statistics) -> Result<()> {
        let mut carry = (1, leaf);
        while let Some((leaves, sum)) = self.parts.pop_if(|(leaves, _)| *leaves == carry.0) {
            carry = (2 * leaves, sum.merge(&carry.1)?);
        }
        self.parts.push(carry);
        Ok(())
    }

    /// The sum of all leaves.
    pub fn finish(mut self) -> Result<Statistics> {
        let Some((_, mut total)) = self.parts.pop() else {
            return Err(Error::shape("samples", "at least one", 0));
        };
        while let Some((_, sum)) = self.parts.pop() {
            total = sum.merge(&total)?;
        }
        Ok(total)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    fn data(samples: usize) -> (Matrix, Matrix) {
        let mut r = Random::new(5);
        (Matrix::from_fn(samples, 7, |_, _| r.normal()), Matrix::from_fn(samples, 3, |_, _| r.normal()))
    }

    fn rows(m: &Matrix, range: std::ops::Range<usize>) -> Matrix {
        Matrix::from_fn(range.len(), m.cols(), |i, j| m[(range.start + i, j)])
    }

    #[test]
    fn streamed_statistics_equal_the_definition_and_do_not_depend_on_threads() {
        let samples = 5 * BLOCK + 17;
        let (f, t) = data(samples);
        let stream = |threads| {
            let read = |range: std::ops::Range<usize>| Ok((rows(&f, range.clone()), rows(&t, range)));
            Statistics::stream(samples, Threads::new(threads), &Cancel::new(), read, |_| {}).unwrap()
        };
        let one = stream(1);
        assert_eq!(one, stream(2));
        assert_eq!(one, stream(5));
        for i in 0..7 {
            for j in 0..7 {
                let g: f64 = (0..samples).map(|k| f[(k, i)] * f[(k, j)]).sum();
                assert!((one.gram()[(i, j)] - g).abs() < 1e-9);
            }
            let h: f64 = (0..samples).map(|k| f[(k, i)] * t[(k, 2)]).sum();
            assert!((one.cross(2)[i] - h).abs() < 1e-9);
        }
        let e: f64 = (0..samples).map(|k| t[(k, 1)].powi(2)).sum();
        assert!((one.energy(1) - e).abs() < 1e-9);
        assert_eq!(one.samples(), samples);
    }

    #[test]
    fn shards_cut_at_tree_nodes_merge_to_the_same_bits() {
        let (f, t) = data(4 * BLOCK);
        let of = |range: std::ops::Range<usize>| {
            let start = range.start;
            let read = |r: std::ops::Range<usize>| {
                let r = start + r.start..start + r.end;
                Ok((rows(&f, r.clone()), rows(&t, r)))
            };
            Statistics::stream(range.len(), Threads::one(), &Cancel::new(), read, |_| {}).unwrap()
        };
        let whole = of(0..4 * BLOCK);
        let halves = of(0..2 * BLOCK).merge(&of(2 * BLOCK..4 * BLOCK)).unwrap();
        assert_eq!(whole, halves);
    }

    #[test]
    fn statistics_in_two_parts_are_those_of_the_whole() {
        let (f, t) = data(300);
        let columns = |m: &Matrix, range: std::ops::Range<usize>| {
            Matrix::from_fn(m.rows(), range.len(), |i, j| m[(i, range.start + j)])
        };
        let whole = Statistics::of(&f, &t).unwrap();
        let (head, tail) = (columns(&f, 0..2), columns(&f, 2..7));
        let fixed = Statistics::of(&tail, &t).unwrap();
        let joined = Statistics::of(&head, &beside(&[&tail, &t])).unwrap().followed_by(&fixed).unwrap();
        assert_eq!(joined.energy, whole.energy);
        let pairs = joined.gram.as_slice().iter().zip(whole.gram.as_slice());
        for (a, b) in pairs.chain(joined.cross.as_slice().iter().zip(whole.cross.as_slice())) {
            assert!((a - b).abs() < 1e-10);
        }
        let part = whole.part(&[6, 1], &[2]);
        assert_eq!((part.gram[(0, 1)], part.cross[(0, 1)]), (whole.gram[(6, 1)], whole.cross[(2, 1)]));
        assert!(fixed.followed_by(&whole).is_err());
    }

    #[test]
    fn no_samples_and_cancelled_runs_are_errors() {
        let read = |_: std::ops::Range<usize>| Ok((Matrix::zeros(1, 1), Matrix::zeros(1, 1)));
        assert!(Statistics::stream(0, Threads::one(), &Cancel::new(), read, |_| {}).is_err());
        let cancel = Cancel::new();
        cancel.cancel();
        let out = Statistics::stream(9, Threads::one(), &cancel, read, |_| {});
        assert!(matches!(out, Err(Error::Cancelled)));
    }
}
