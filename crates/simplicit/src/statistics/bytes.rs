//! Statistics as bytes, for files and other processes, and short names for them.

use super::{Form, Statistics, lower_tiles, mirror};
use crate::linalg::Matrix;

/// This bit is set in the written number of samples if G is written without the part above its diagonal.
const LOWER: u64 = 1 << 63;

impl Statistics {
    /// The first word and the rows of numbers after it, as they are written; of G only the part up to the diagonal.
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
        // Samples are kept only if they are fewer than the features, so the form follows from the length.
        let few = !lower && samples != features && form == samples.checked_mul(features)?;
        if !tail.is_empty() || !(few || form == expected) {
            return None;
        }
        // Zero times a number is zero unless the number is infinite or NaN: one sum over all of them, without a
        // branch.
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

    /// The [`Statistics::fingerprint`] of bytes that [`Statistics::to_bytes`] wrote.
    pub fn fingerprint_of(bytes: &[u8]) -> [u8; 16] {
        let mut print = Fingerprint::default();
        print.add(bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)));
        print.finish()
    }

    /// Sixteen bytes that identify these statistics.
    pub fn fingerprint(&self) -> [u8; 16] {
        let (first, rows) = self.words();
        let mut print = Fingerprint::default();
        print.add([first].into_iter());
        rows.into_iter().for_each(|row| print.add(row.iter().map(|v| v.to_bits())));
        print.finish()
    }
}

/// Whether both halves have the same bits, which sums that were computed elsewhere may not have.
fn is_symmetric(gram: &Matrix) -> bool {
    lower_tiles(gram.cols()).all(|[rows, columns]| {
        rows.into_iter().all(|i| columns.clone().all(|j| gram[(i, j)].to_bits() == gram[(j, i)].to_bits()))
    })
}

/// A short name for many numbers, made at the speed of memory. Eight lanes are used in turn; every step is
/// one-to-one, so that a single different number always gives a different name.
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
