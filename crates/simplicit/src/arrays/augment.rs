//! Samples with changed copies of each: mirrored and moved by some pixels, or mixed with another sample, as a seed decides.
//! Copies are made when they are read.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::{InputSource, PerFeature};
use crate::linalg::Matrix;
use crate::random::Random;
use crate::{Error, Result};

/// Samples of a group, whose copies follow it. The number of a sample and those of its copies then have the same last
/// digit, which decides who is held out. So a sample and its copies are always on the same side.
const GROUP: usize = 10;
/// The most mixed copies of a sample.
const MOST_MIXED: usize = 1000;

/// How copies differ from their originals.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Augment {
    /// Whether copies are mirrored left to right: all of them, or half of them if they are moved as well.
    pub flip: bool,
    /// The most pixels that a copy is moved by along each axis; the pixels that this uncovers are raw zeros.
    pub shift: usize,
    /// Number of further copies, each mixed with another sample in random shares. Only `mix` works for samples that are no
    /// images.
    pub mix: usize,
}

impl Augment {
    /// Number of copies of every sample.
    fn copies(self) -> usize {
        usize::from(self.changes()) + self.mix
    }

    /// Whether one copy is mirrored or moved.
    fn changes(self) -> bool {
        self.flip || self.shift > 0
    }
}

impl std::str::FromStr for Augment {
    type Err = Error;

    /// `flip`, `shift:N`, `mix:N` or several of them, separated by commas.
    fn from_str(text: &str) -> Result<Self> {
        let expected =
            "flip, shift:N (pixels, at least 1), mix:N (1 to 1000 copies) or several of them as in flip,shift:2,mix:3";
        let wrong = || Error::setting("augment", expected, text);
        let mut out = Self { flip: false, shift: 0, mix: 0 };
        for part in text.split(',') {
            let number = |text: &str| text.parse().ok().filter(|n| *n > 0).ok_or_else(wrong);
            match part.trim().split_once(':') {
                None if part.trim() == "flip" && !out.flip => out.flip = true,
                Some(("shift", pixels)) if out.shift == 0 => out.shift = number(pixels)?,
                Some(("mix", copies)) if out.mix == 0 => {
                    out.mix = number(copies).ok().filter(|n| *n <= MOST_MIXED).ok_or_else(wrong)?;
                }
                _ => return Err(wrong()),
            }
        }
        Ok(out)
    }
}

impl TryFrom<String> for Augment {
    type Error = Error;

    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

impl From<Augment> for String {
    fn from(augment: Augment) -> Self {
        augment.to_string()
    }
}

impl std::fmt::Display for Augment {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let flip = self.flip.then(|| "flip".to_string());
        let shift = (self.shift > 0).then(|| format!("shift:{}", self.shift));
        let mix = (self.mix > 0).then(|| format!("mix:{}", self.mix));
        f.write_str(&[flip, shift, mix].into_iter().flatten().collect::<Vec<_>>().join(","))
    }
}

/// Every sample of a source and changed copies of it: more samples, without more memory.
#[derive(Debug, Clone)]
pub struct Augmented<S> {
    source: S,
    /// Channels, height and width of an image.
    map: [usize; 3],
    /// The network's input for a raw zero, one number per value of a sample.
    fill: Vec<f32>,
    augment: Augment,
    seed: u64,
}

impl<S: InputSource> Augmented<S> {
    /// `sample_shape` is channels × height × width, or height × width; `per_feature` is how the source was preprocessed.
    pub fn new(
        source: S,
        sample_shape: &[usize],
        per_feature: &PerFeature,
        augment: Augment,
        seed: u64,
    ) -> Result<Self> {
        if augment.mix > 0 && source.samples() < 2 {
            return Err(Error::setting("augment", "at least two samples to mix", source.samples()));
        }
        let map = match *sample_shape {
            [channels, height, width] => [channels, height, width],
            [height, width] => [1, height, width],
            _ if !augment.changes() => [source.features(), 1, 1],
            _ => {
                let expected = "inputs that are images, channels × height × width or height × width";
                return Err(Error::setting("augment", expected, format!("{} axes", sample_shape.len())));
            }
        };
        let [channels, height, width] = map;
        let size = channels * height * width;
        if size != source.features() {
            let got = format!("{channels} × {height} × {width}");
            return Err(Error::shape("images to augment", format!("{} values", source.features()), got));
        }
        let least = height.min(width);
        if augment.shift >= least {
            let expected = format!("a shift below {least}, the smaller side of the images");
            return Err(Error::setting("augment", expected, augment.shift));
        }
        let mut fill = vec![0.0; size];
        per_feature.apply(&vec![0.0; size], &mut fill);
        Ok(Self { source, map, fill, augment, seed })
    }

    /// The original of a sample, and the number of the copy that it is; `None` for the original itself.
    fn image(&self, sample: usize) -> (usize, Option<usize>) {
        let (whole, versions) = (self.source.samples() / GROUP * GROUP, 1 + self.augment.copies());
        let (first, size) = if sample < versions * whole {
            (sample / (versions * GROUP) * GROUP, GROUP)
        } else {
            (whole, self.source.samples() - whole)
        };
        let within = sample - versions * first;
        (first + within % size.max(1), (within / size.max(1)).checked_sub(1))
    }

    /// The random stream of a copy depends on its own number and that of its original alone.
    fn stream(&self, number: usize, copy: usize) -> Random {
        let own = (number as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        Random::new(self.seed ^ own ^ (copy as u64).wrapping_mul(0x2545_f491_4f6c_dd1d))
    }

    /// The sample that a copy is mixed with, and its share. Its number has the same last digit, wherever there is such a
    /// sample, so that mixing does not carry samples over to those that are held out.
    fn partner(&self, number: usize, copy: usize) -> (usize, f32) {
        let mut random = self.stream(number, copy);
        let (samples, groups) = (self.source.samples(), self.source.samples() / GROUP);
        let partner = match groups {
            0 | 1 => (number + 1 + random.below(samples - 1)) % samples,
            _ if number >= groups * GROUP => number % GROUP + GROUP * random.below(groups),
            _ => (number + GROUP * (1 + random.below(groups - 1))) % (groups * GROUP),
        };
        (partner, random.uniform() as f32)
    }

    fn changed(&self, number: usize, image: &[f32], out: &mut [f32]) {
        let mut random = self.stream(number, 0);
        let Augment { flip, shift, .. } = self.augment;
        let mut step = || random.below(2 * shift + 1) as isize - shift as isize;
        let (down, right) = (step(), step());
        let mirrored = flip && (shift == 0 || random.below(2) == 1);
        let [_, height, width] = self.map;
        out.copy_from_slice(&self.fill);
        let planes = image.chunks_exact(height * width).zip(out.chunks_exact_mut(height * width));
        for (image, out) in planes {
            for y in 0..height {
                let Some(from_y) = y.checked_add_signed(-down).filter(|y| *y < height) else { continue };
                for x in 0..width {
                    let Some(from_x) = x.checked_add_signed(-right).filter(|x| *x < width) else { continue };
                    let from_x = if mirrored { width - 1 - from_x } else { from_x };
                    out[y * width + x] = image[from_y * width + from_x];
                }
            }
        }
    }
}

impl<S: InputSource> InputSource for Augmented<S> {
    fn samples(&self) -> usize {
        (1 + self.augment.copies()) * self.source.samples()
    }

    fn features(&self) -> usize {
        self.source.features()
    }

    fn rows(&self, samples: Range<usize>) -> Result<Matrix<f32>> {
        if samples.start > samples.end || samples.end > self.samples() {
            let expected = format!("a range within 0..{}", self.samples());
            return Err(Error::shape("rows of the inputs", expected, format!("{samples:?}")));
        }
        let images: Vec<(usize, Option<usize>)> = samples.map(|sample| self.image(sample)).collect();
        let first = images.iter().map(|i| i.0).min().unwrap_or(0);
        let end = images.iter().map(|i| i.0 + 1).max().unwrap_or(0);
        let source = self.source.rows(first..end)?;
        let mut out = Matrix::zeros(images.len(), self.features());
        for (row, &(number, copy)) in images.iter().enumerate() {
            let (image, out) = (source.row(number - first), out.row_mut(row));
            match copy {
                None => out.copy_from_slice(image),
                Some(0) if self.augment.changes() => self.changed(number, image, out),
                Some(copy) => {
                    let (partner, share) = self.partner(number, copy);
                    let other = self.source.rows(partner..partner + 1)?;
                    let values = image.iter().zip(other.row(0));
                    out.iter_mut().zip(values).for_each(|(out, (a, b))| *out = a + share * (b - a));
                }
            }
        }
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arrays::Preprocessing;

    fn source(samples: usize) -> Matrix<f32> {
        // Every pixel's value identifies its sample and its place.
        Matrix::from_fn(samples, 24, |s, j| (1000 * s + j) as f32)
    }

    fn augmented(samples: usize, augment: &str, seed: u64) -> Augmented<Matrix<f32>> {
        let per_feature =
            Preprocessing::new(1.0, vec![0.5, 2.0], vec![0.25, 4.0]).unwrap().per_feature(&[2, 3, 4]).unwrap();
        Augmented::new(source(samples), &[2, 3, 4], &per_feature, augment.parse().unwrap(), seed).unwrap()
    }

    #[test]
    fn copies_are_their_images_mirrored_and_moved_with_raw_zeros_around() {
        let all = augmented(23, "flip,shift:2", 7);
        assert_eq!((all.samples(), all.features()), (46, 24));
        let (rows, images) = (all.rows(0..46).unwrap(), source(23));
        let mut seen = [[0; 2]; 23];
        let mut moved = std::collections::BTreeSet::new();
        for s in 0..46 {
            let (number, copy) = all.image(s);
            seen[number][usize::from(copy.is_some())] += 1;
            if copy.is_none() {
                assert_eq!(rows.row(s), images.row(number));
                continue;
            }
            // Every pixel must be explained by one mirroring and one move of at most two pixels.
            let explains = |down: isize, right: isize, flip: bool| {
                (0..24).all(|j| {
                    let (c, y, x) = (j / 12, (j / 4 % 3) as isize - down, (j % 4) as isize - right);
                    let inside = (0..3).contains(&y) && (0..4).contains(&x);
                    let x = if flip { 3 - x } else { x };
                    let zero = if c == 0 { -2.0 } else { -0.5 };
                    let expected = if inside { images[(number, c * 12 + (y * 4 + x) as usize)] } else { zero };
                    rows[(s, j)] == expected
                })
            };
            let moves = (-2..=2).flat_map(|d| (-2..=2).flat_map(move |r| [(d, r, false), (d, r, true)]));
            let found = moves.into_iter().find(|&(d, r, f)| explains(d, r, f));
            moved.insert(found.unwrap_or_else(|| panic!("sample {s} is no copy of image {number}")));
        }
        assert!(seen.iter().all(|s| *s == [1, 1]), "every image once, and once as a copy");
        assert!(moved.len() > 10, "{moved:?}");
        // Every tenth of the samples holds images together with their copies, except for the remainder after the last
        // ten.
        assert!((0..40).all(|s| all.image(s).0 % 10 == s % 10));
        // The same numbers are read however the range is cut.
        for range in [0..7, 5..31, 38..46, 46..46] {
            let part = all.rows(range.clone()).unwrap();
            assert!(range.enumerate().all(|(k, s)| part.row(k) == rows.row(s)));
        }
        assert_ne!(augmented(23, "flip,shift:2", 8).rows(0..46).unwrap(), rows);
        let mirrored = augmented(1, "flip", 0).rows(1..2).unwrap();
        assert_eq!(&mirrored.row(0)[..4], [3.0, 2.0, 1.0, 0.0]);
    }

    #[test]
    fn mixtures_lie_between_two_samples_of_one_side() {
        for (samples, changed) in [(43, false), (43, true), (20, false), (7, false), (2, true)] {
            let all = augmented(samples, if changed { "flip,mix:3" } else { "mix:3" }, 5);
            let versions = if changed { 5 } else { 4 };
            assert_eq!(all.samples(), versions * samples);
            let (rows, images) = (all.rows(0..all.samples()).unwrap(), source(samples));
            let mut seen = vec![vec![0; versions]; samples];
            let (mut partners, mut shares) = (std::collections::BTreeSet::new(), Vec::new());
            for s in 0..all.samples() {
                let (number, copy) = all.image(s);
                seen[number][copy.map_or(0, |copy| 1 + copy)] += 1;
                if copy.is_none_or(|copy| changed && copy == 0) {
                    continue;
                }
                // A pixel says which sample is how much of it: values are 1000·sample + place.
                let at = |partner: usize| f64::from(images[(partner, 0)]) - f64::from(images[(number, 0)]);
                let moved = f64::from(rows[(s, 0)]) - f64::from(images[(number, 0)]);
                let found = (0..samples).filter(|&p| p != number).find(|&p| {
                    let share = moved / at(p);
                    (0.0..=1.0).contains(&share) && all.partner(number, copy.unwrap_or(0)).0 == p
                });
                let partner = found.unwrap_or_else(|| panic!("sample {s} is no mixture of {number}"));
                assert!(samples < 20 || partner % 10 == number % 10, "{number} with {partner}");
                let share = moved / at(partner);
                for j in 0..24 {
                    let (a, b) = (f64::from(images[(number, j)]), f64::from(images[(partner, j)]));
                    assert!((f64::from(rows[(s, j)]) - (a + share * (b - a))).abs() < 1e-2);
                }
                partners.insert((number, partner));
                shares.push(share);
            }
            assert!(seen.iter().flatten().all(|n| *n == 1), "every sample once, and every copy of it once");
            if samples == 43 {
                let mean = shares.iter().sum::<f64>() / shares.len() as f64;
                assert!(partners.len() > 80 && (0.4..0.6).contains(&mean), "{} {mean}", partners.len());
            }
        }
        // Samples that are no images can be mixed.
        let plain = Preprocessing::identity().per_feature(&[24]).unwrap();
        let mixed = Augmented::new(source(30), &[24], &plain, "mix:1".parse().unwrap(), 0).unwrap();
        assert_eq!(mixed.rows(55..60).unwrap().rows(), 5);
        let alone = Augmented::new(source(1), &[24], &plain, "mix:1".parse().unwrap(), 0).unwrap_err().to_string();
        assert!(alone.contains("at least two samples"), "{alone}");
    }

    #[test]
    fn what_is_no_augmentation_is_said_in_one_line() {
        for text in [
            "",
            "flop",
            "shift",
            "shift:0",
            "shift:-1",
            "flip,flip",
            "shift:1,shift:2",
            "flip:1",
            "mix",
            "mix:0",
            "mix:1001",
            "mix:1,mix:2",
        ] {
            let message = text.parse::<Augment>().unwrap_err().to_string();
            assert!(message.starts_with("augment: expected flip, shift:N"), "{message}");
        }
        for text in ["flip", "shift:3", "flip,shift:4", "mix:2", "flip,mix:1", "flip,shift:4,mix:10"] {
            assert_eq!(text.parse::<Augment>().unwrap().to_string(), text);
        }
        let plain = Preprocessing::identity();
        let refused = |shape: &[usize], augment: &str| {
            let per_feature = plain.per_feature(shape).unwrap();
            Augmented::new(source(2), shape, &per_feature, augment.parse().unwrap(), 0).unwrap_err().to_string()
        };
        assert!(refused(&[24], "flip").contains("images"));
        assert!(refused(&[2, 3, 4], "shift:3").contains("a shift below 3"));
    }
}
