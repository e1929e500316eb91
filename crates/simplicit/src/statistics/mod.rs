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
//!
//! With fewer samples than features (m < 0.41·d) the samples themselves are kept instead of G: an m × d matrix is
//! smaller, and solving with it costs less than with a d × d one. G is then made when somebody asks for it.

mod wide;

use std::sync::OnceLock;

use crate::backend::cuda::{Cuda, Sums};
use crate::linalg::{Matrix, gemm, gram_lower};
use crate::parallel::{self, Cancel, Threads};
use crate::states::{StateBlock, StateSource};
use crate::{Error, Result};

pub(crate) use wide::{WIDE, bytes as wide_bytes};

/// Samples in a leaf of the summation tree.
pub const BLOCK: usize = 1024;

/// Samples over features below which products with F, forwards and back, cost less than one with G: a step in m
/// dimensions costs 2md + m² multiplications, one in d dimensions d².
const FEW: f64 = 0.41;

/// Rows and columns of a tile.
const TILE: usize = 64;
/// Set in the number of samples, as it is written, where G is written without what is above its diagonal.
const LOWER: u64 = 1 << 63;

/// Whether so many samples are better kept as they are.
pub(crate) fn are_few(samples: usize, features: usize) -> bool {
    (samples as f64) < FEW * features as f64
}

/// G, H, e and the number of samples m, accumulated in f64 (exact for products of f32).
#[derive(Debug, Clone, PartialEq)]
pub struct Statistics {
    samples: usize,
    form: Form,
    /// One target a row, r × d.
    cross: Matrix,
    energy: Vec<f64>,
}

/// What is known about the features.
#[derive(Debug, Clone)]
enum Form {
    /// G, full symmetric, d × d.
    Gram(Matrix),
    /// F, one sample a row, the diagonal of G, and G once somebody has asked.
    Samples { features: Matrix, squares: Vec<f64>, gram: OnceLock<Matrix> },
}

impl PartialEq for Form {
    /// Whether G has been asked for makes no difference.
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

/// `count` things in pieces of a size, the last one smaller.
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
    gram_lower(&mut gram, features);
    mirror(&mut gram);
    gram
}

/// Tiles of a square matrix on and below the diagonal, as ranges of rows and columns.
fn lower_tiles(d: usize) -> impl Iterator<Item = [std::ops::Range<usize>; 2]> {
    cuts(d, TILE).flat_map(move |rows| cuts(rows.end, TILE).map(move |columns| [rows.clone(), columns]))
}

/// Copies what is below the diagonal above it, a tile at a time: lines of one tile stay in the cache.
fn mirror(gram: &mut Matrix) {
    for [rows, columns] in lower_tiles(gram.cols()) {
        for i in rows {
            for j in columns.start..columns.end.min(i) {
                gram[(j, i)] = gram[(i, j)];
            }
        }
    }
}

/// Whether both halves have the same bits; sums that somebody else added up may not.
fn is_symmetric(gram: &Matrix) -> bool {
    lower_tiles(gram.cols()).all(|[rows, columns]| {
        rows.into_iter().all(|i| columns.clone().all(|j| gram[(i, j)].to_bits() == gram[(j, i)].to_bits()))
    })
}

impl Statistics {
    /// Of no samples.
    pub fn empty(features: usize, targets: usize) -> Self {
        Self {
            samples: 0,
            form: Form::Gram(Matrix::zeros(features, features)),
            cross: Matrix::zeros(targets, features),
            energy: vec![0.0; targets],
        }
    }

    /// Of a few samples: features and targets with one sample a row.
    pub fn of(features: &Matrix, targets: &Matrix) -> Result<Self> {
        Self::check(features, targets)?;
        Ok(Self::in_form(Form::Gram(gram_of(features)), features, targets))
    }

    /// The same with the samples kept in the place of their products.
    pub fn of_few(features: Matrix, targets: &Matrix) -> Result<Self> {
        Self::check(&features, targets)?;
        let mut out = Self::in_form(Form::Gram(Matrix::default()), &features, targets);
        out.form = Form::of_samples(features);
        Ok(out)
    }

    /// From sums that somebody else added up: G (d × d), H (one target a row, r × d) and e of `samples` samples.
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

    /// F, one sample a row, where the samples are fewer than the features.
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

    /// Of some of the features and some of the targets, in the order given.
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

    /// Streams `samples` samples in blocks. `read` returns features and targets of a range of samples; it is called
    /// from several threads.
    pub fn stream(
        samples: usize,
        threads: Threads,
        cancel: &Cancel,
        read: impl Fn(std::ops::Range<usize>) -> Result<(Matrix, Matrix)> + Sync,
        progress: impl FnMut(usize),
    ) -> Result<Self> {
        Self::stream_shard(samples, samples, threads, cancel, read, progress)
    }

    /// [`Statistics::stream`] over a shard of `all` samples, whose number decides what is kept.
    pub fn stream_shard(
        samples: usize,
        all: usize,
        threads: Threads,
        cancel: &Cancel,
        read: impl Fn(std::ops::Range<usize>) -> Result<(Matrix, Matrix)> + Sync,
        progress: impl FnMut(usize),
    ) -> Result<Self> {
        Self::stream_pieces(samples, usize::MAX, all, threads, cancel, read, progress)
    }

    /// [`Statistics::stream_shard`] in pieces of so many samples, each summed on its own before the pieces are: a shard of
    /// 2ᵏ pieces is then a whole branch of the tree, whatever the size of a piece.
    pub(crate) fn stream_pieces(
        samples: usize,
        piece: usize,
        all: usize,
        threads: Threads,
        cancel: &Cancel,
        read: impl Fn(std::ops::Range<usize>) -> Result<(Matrix, Matrix)> + Sync,
        mut progress: impl FnMut(usize),
    ) -> Result<Self> {
        let leaves: Vec<Vec<std::ops::Range<usize>>> = cuts(samples, piece)
            .map(|piece| cuts(piece.len(), BLOCK).map(|r| shifted(r, piece.start)).collect())
            .collect();
        let ends: Vec<usize> = leaves.iter().filter_map(|piece| piece.last()).map(|leaf| leaf.end).collect();
        let leaves = leaves.concat();
        let (mut whole, mut part) = (Tree::default(), Tree::default());
        parallel::fold(
            threads,
            leaves.len(),
            |k| {
                cancel.check()?;
                let (features, targets) = read(leaves[k].clone())?;
                if are_few(all, features.cols()) {
                    Self::of_few(features, &targets)
                } else {
                    Self::of(&features, &targets)
                }
            },
            |k, leaf| {
                let end = leaves[k].end;
                progress(end);
                part.push(leaf)?;
                if ends.binary_search(&end).is_ok() { whole.push(std::mem::take(&mut part).finish()?) } else { Ok(()) }
            },
        )?;
        whole.finish()
    }

    /// [`Statistics::stream`] with the sums on a GPU: the same within the rounding of f64.
    pub fn stream_on(
        cuda: &'static Cuda,
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
        // Few samples are kept as they are; there is nothing to add up.
        if are_few(samples, f.cols()) {
            return Self::stream(samples, threads, cancel, read, progress);
        }
        let sums = cuda.accumulate(f.cols(), t.cols(), |sums| {
            parallel::fold(
                threads,
                samples.div_ceil(BLOCK),
                |block| {
                    cancel.check()?;
                    read(block * BLOCK..((block + 1) * BLOCK).min(samples))
                },
                |block, (features, targets)| {
                    sums.add(&features, &targets)?;
                    progress(((block + 1) * BLOCK).min(samples));
                    Ok(())
                },
            )
        })?;
        Ok(Self::of_sums(sums))
    }

    /// What a GPU added up.
    pub(crate) fn of_sums(sums: Sums) -> Self {
        let Sums { samples, gram, cross, energy } = sums;
        Self { samples, form: Form::Gram(gram), cross, energy }
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

    /// The first word and the rows of numbers after it, as they are written: of G without what is above the diagonal.
    fn words(&self) -> (u64, Vec<&[f64]>) {
        let (mut first, mut rows) = (self.samples as u64, Vec::new());
        match &self.form {
            Form::Gram(gram) if is_symmetric(gram) => {
                first |= LOWER;
                rows.extend((0..gram.rows()).map(|i| &gram.row(i)[..=i]));
            }
            Form::Gram(form) | Form::Samples { features: form, .. } => rows.push(form.as_slice()),
        }
        rows.extend([self.cross.as_slice(), &self.energy]);
        (first, rows)
    }

    /// All numbers, little-endian, samples first.
    pub fn to_bytes(&self) -> Vec<u8> {
        let (first, rows) = self.words();
        let mut out = vec![0; 8 * (1 + rows.iter().map(|row| row.len()).sum::<usize>())];
        let mut words = out.as_chunks_mut::<8>().0.iter_mut();
        words.by_ref().take(1).for_each(|word| *word = first.to_le_bytes());
        for row in rows {
            row.iter().zip(words.by_ref()).for_each(|(v, word)| *word = v.to_le_bytes());
        }
        out
    }

    /// The inverse of [`Statistics::to_bytes`]; `None` if the length does not fit or a number is not finite.
    pub fn from_bytes(bytes: &[u8], features: usize, targets: usize) -> Option<Self> {
        let (first, rest) = bytes.split_first_chunk::<8>()?;
        let first = u64::from_le_bytes(*first);
        let (lower, samples) = (first & LOWER != 0, usize::try_from(first & !LOWER).ok()?);
        let (numbers, tail) = rest.as_chunks::<8>();
        let others = features.checked_mul(targets)?.checked_add(targets)?;
        let form = numbers.len().checked_sub(others)?;
        let square = features.checked_mul(features)?;
        let expected = if lower { (square + features) / 2 } else { square };
        // Samples are kept only where they are fewer than the features, so the length says which form it is.
        let few = !lower && samples != features && form == samples.checked_mul(features)?;
        if !tail.is_empty() || !(few || form == expected) {
            return None;
        }
        // Zero times a number is zero unless it is infinite or none: one sum over all of them, without a branch.
        let read = |words: &[[u8; 8]]| {
            let values: Vec<f64> = words.iter().map(|word| f64::from_le_bytes(*word)).collect();
            (values.iter().map(|v| v * 0.0).sum::<f64>() == 0.0).then_some(values)
        };
        let (form, numbers) = numbers.split_at(form);
        let (cross, energy) = numbers.split_at(targets * features);
        let form = if lower {
            let (mut gram, mut rest) = (Matrix::zeros(features, features), form);
            for i in 0..features {
                let (row, after) = rest.split_at(i + 1);
                gram.row_mut(i)[..=i].copy_from_slice(&read(row)?);
                rest = after;
            }
            mirror(&mut gram);
            Form::Gram(gram)
        } else if few {
            Form::of_samples(Matrix::from_vec(samples, features, read(form)?).ok()?)
        } else {
            Form::Gram(Matrix::from_vec(features, features, read(form)?).ok()?)
        };
        let cross = Matrix::from_vec(targets, features, read(cross)?).ok()?;
        Some(Self { samples, form, cross, energy: read(energy)? })
    }

    /// [`Statistics::fingerprint`] of what [`Statistics::to_bytes`] wrote.
    pub fn fingerprint_of(bytes: &[u8]) -> [u8; 16] {
        let mut print = Fingerprint::default();
        print.add(bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)));
        print.finish()
    }

    /// Sixteen bytes that say which statistics these are.
    pub fn fingerprint(&self) -> [u8; 16] {
        let (first, rows) = self.words();
        let mut print = Fingerprint::default();
        print.add([first].into_iter());
        rows.into_iter().for_each(|row| print.add(row.iter().map(|v| v.to_bits())));
        print.finish()
    }

    /// Bytes that it takes.
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

    /// G, d × d; made now where the samples were kept instead.
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

/// A short name for many numbers, made at the speed of memory. Eight lanes take turns; every step is one-to-one, so that a
/// single different number always gives another name.
#[derive(Debug, Default)]
struct Fingerprint {
    lanes: [u64; 8],
    at: usize,
}

impl Fingerprint {
    fn add(&mut self, words: impl Iterator<Item = u64>) {
        for word in words {
            let lane = &mut self.lanes[self.at % 8];
            *lane = (*lane ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
            self.at += 1;
        }
    }

    fn finish(&self) -> [u8; 16] {
        let half = |seed: u64| {
            let mixed = self.lanes.iter().fold(seed ^ self.at as u64, |so_far, lane| {
                let next = (so_far ^ lane).wrapping_mul(0xd6e8_feb8_6659_fd93);
                next ^ (next >> 32)
            });
            u128::from(mixed)
        };
        (half(1) << 64 | half(2 << 40)).to_le_bytes()
    }
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
        self.push_branch(1, leaf)
    }

    /// Adds the sum of the next 2ᵏ leaves, where a multiple of 2ᵏ leaves is there, or of the last ones in such a place.
    pub fn push_branch(&mut self, leaves: usize, sum: Statistics) -> Result<()> {
        let before: usize = self.parts.iter().map(|(leaves, _)| leaves).sum();
        let whole = self.parts.last().is_none_or(|(leaves, _)| leaves.is_power_of_two());
        if leaves == 0 || !whole || !before.is_multiple_of(leaves.next_power_of_two()) {
            let expected = format!("a branch of the tree after {before} leaves");
            return Err(Error::shape("leaves of a branch", expected, leaves));
        }
        let mut carry = (leaves, sum);
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
    fn branches_of_any_size_merge_to_the_same_bits() {
        let (f, t) = data(7 * 16);
        let leaf = |k: usize| Statistics::of(&rows(&f, 16 * k..16 * (k + 1)), &rows(&t, 16 * k..16 * (k + 1))).unwrap();
        let of = |leaves: std::ops::Range<usize>| {
            let mut tree = Tree::default();
            leaves.for_each(|k| tree.push(leaf(k)).unwrap());
            tree.finish().unwrap()
        };
        let whole = of(0..7);
        for cuts in [vec![0, 4, 6, 7], vec![0, 2, 3, 4, 5, 6, 7], vec![0, 1, 2, 4, 6, 7], vec![0, 4, 7]] {
            let mut tree = Tree::default();
            cuts.windows(2).for_each(|c| tree.push_branch(c[1] - c[0], of(c[0]..c[1])).unwrap());
            assert_eq!(tree.finish().unwrap(), whole, "{cuts:?}");
        }
        // A branch must be in its place, and nothing comes after the last leaves.
        let mut tree = Tree::default();
        tree.push_branch(1, leaf(0)).unwrap();
        assert!(tree.push_branch(2, of(1..3)).is_err() && tree.push_branch(0, leaf(1)).is_err());
        let mut tree = Tree::default();
        tree.push_branch(3, of(0..3)).unwrap();
        assert!(tree.push_branch(1, leaf(3)).is_err());
    }

    #[test]
    fn bytes_and_fingerprints_say_which_statistics_they_are() {
        let (f, t) = data(40);
        let own = Statistics::of(&f, &t).unwrap();
        let bytes = own.to_bytes();
        // What is above the diagonal of G is not written.
        assert_eq!(bytes.len(), 8 * (1 + 7 * 8 / 2 + 3 * 7 + 3));
        assert_eq!(bytes[8..16], own.gram()[(0, 0)].to_le_bytes());
        assert_eq!(bytes[24..32], own.gram()[(1, 1)].to_le_bytes());
        assert_eq!(Statistics::from_bytes(&bytes, 7, 3).unwrap(), own);
        assert!(Statistics::from_bytes(&bytes, 3, 7).is_none() && Statistics::from_bytes(&bytes[8..], 7, 3).is_none());
        // Unless somebody else's sums have other bits there; several tiles.
        let wide = |twist: f64| {
            let gram = Matrix::from_fn(150, 150, |i, j| 1.0 + (i * j) as f64 + if i < j { twist } else { 0.0 });
            Statistics::from_sums(9, gram, Matrix::from_fn(1, 150, |_, j| j as f64), vec![2.0]).unwrap()
        };
        for (other, numbers) in [(wide(0.0), 150 * 151 / 2), (wide(0.5), 150 * 150)] {
            assert_eq!(other.to_bytes().len(), 8 * (1 + numbers + 150 + 1));
            assert_eq!(Statistics::from_bytes(&other.to_bytes(), 150, 1).unwrap(), other);
        }
        assert_eq!(own.fingerprint(), Statistics::fingerprint_of(&bytes));
        let mut names = std::collections::BTreeSet::from([own.fingerprint()]);
        for k in 0..bytes.len() / 8 {
            let mut other = bytes.clone();
            other[8 * k] ^= 1;
            assert!(names.insert(Statistics::fingerprint_of(&other)), "number {k}");
        }
        assert!(names.insert(Statistics::fingerprint_of(&bytes[8..])));
        for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            let mut other = bytes.clone();
            other[16..24].copy_from_slice(&bad.to_le_bytes());
            assert!(Statistics::from_bytes(&other, 7, 3).is_none());
        }
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
        let pairs = joined.gram().as_slice().iter().zip(whole.gram().as_slice());
        for (a, b) in pairs.chain(joined.cross.as_slice().iter().zip(whole.cross.as_slice())) {
            assert!((a - b).abs() < 1e-10);
        }
        let part = whole.part(&[6, 1], &[2]);
        assert_eq!((part.gram()[(0, 1)], part.cross[(0, 1)]), (whole.gram()[(6, 1)], whole.cross[(2, 1)]));
        assert!(fixed.followed_by(&whole).is_err());
    }

    #[test]
    fn few_samples_are_kept_and_say_the_same() {
        let mut r = Random::new(9);
        let (f, t) = (Matrix::from_fn(8, 30, |_, _| r.normal()), Matrix::from_fn(8, 2, |_, _| r.normal()));
        let (gram, few) = (Statistics::of(&f, &t).unwrap(), Statistics::of_few(f.clone(), &t).unwrap());
        assert!(few.few_samples().is_some() && gram.few_samples().is_none());
        let weights: Vec<(usize, f64)> = (0..30).step_by(4).map(|j| (j, r.normal())).collect();
        for k in 0..2 {
            let (a, b) = (gram.mismatch(k, &weights), few.mismatch(k, &weights));
            assert!((a - b).abs() < 1e-10 * a, "{a} {b}");
            assert_eq!(gram.cross(k), few.cross(k));
        }
        assert!((0..30).all(|j| (gram.rms(j) - few.rms(j)).abs() < 1e-12));
        assert_eq!(few.gram(), gram.gram());
        let read = |range: std::ops::Range<usize>| Ok((rows(&f, range.clone()), rows(&t, range)));
        let streamed = |all| Statistics::stream_shard(8, all, Threads::one(), &Cancel::new(), read, |_| {}).unwrap();
        assert_eq!(streamed(8), few);
        assert_eq!(streamed(1000), gram, "a shard of many samples adds up");
        for of in [&gram, &few] {
            assert_eq!(&Statistics::from_bytes(&of.to_bytes(), 30, 2).unwrap(), of);
        }
        assert!(Statistics::from_bytes(&few.to_bytes()[8..], 30, 2).is_none());
        let halves = Statistics::of_few(rows(&f, 0..3), &rows(&t, 0..3)).unwrap();
        let merged = halves.merge(&Statistics::of_few(rows(&f, 3..8), &rows(&t, 3..8)).unwrap()).unwrap();
        assert_eq!(merged.few_samples(), few.few_samples());
        let part = few.part(&[6, 1], &[1]);
        assert!((part.gram()[(0, 1)] - gram.gram()[(6, 1)]).abs() < 1e-12);
        let (head, tail) =
            (few.part(&(0..10).collect::<Vec<_>>(), &[]), few.part(&(10..30).collect::<Vec<_>>(), &[0, 1]));
        let tails = Matrix::from_fn(8, 20, |i, j| f[(i, 10 + j)]);
        let head = Statistics::of_few(head.few_samples().unwrap().clone(), &beside(&[&tails, &t])).unwrap();
        assert_eq!(head.followed_by(&tail).unwrap().few_samples(), few.few_samples());
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
