//! Images with a changed copy of each: mirrored and moved by some pixels, as a seed decides. Copies are made when
//! they are read.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::{InputSource, PerFeature};
use crate::linalg::Matrix;
use crate::random::Random;
use crate::{Error, Result};

/// Images of a group, whose copies follow it. The number of a sample and that of its copy then have the same last
/// digit, which decides who is held out. So an image and its copy are always on the same side.
const GROUP: usize = 10;

/// How copies differ from their originals.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Augment {
    /// Whether copies are mirrored left to right: all of them, or half of them if they are moved as well.
    pub flip: bool,
    /// The most pixels that a copy is moved by along each axis; the pixels that this uncovers are raw zeros.
    pub shift: usize,
}

impl std::str::FromStr for Augment {
    type Err = Error;

    /// `flip`, `shift:N` or both, separated by a comma.
    fn from_str(text: &str) -> Result<Self> {
        let wrong = || Error::setting("augment", "flip, shift:N (pixels, at least 1) or flip,shift:N", text);
        let mut out = Self { flip: false, shift: 0 };
        for part in text.split(',') {
            match part.trim().split_once(':') {
                None if part.trim() == "flip" && !out.flip => out.flip = true,
                Some(("shift", pixels)) if out.shift == 0 => {
                    out.shift = pixels.parse().ok().filter(|n| *n > 0).ok_or_else(wrong)?;
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
        match (self.flip, self.shift) {
            (true, 0) => write!(f, "flip"),
            (true, shift) => write!(f, "flip,shift:{shift}"),
            (false, shift) => write!(f, "shift:{shift}"),
        }
    }
}

/// Every image of a source and a changed copy of it: twice as many samples, without more memory.
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
        let map = match *sample_shape {
            [channels, height, width] => [channels, height, width],
            [height, width] => [1, height, width],
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

    /// The image of a sample, and whether it is the copy.
    fn image(&self, sample: usize) -> (usize, bool) {
        let whole = self.source.samples() / GROUP * GROUP;
        let (first, size) = if sample < 2 * whole {
            (sample / (2 * GROUP) * GROUP, GROUP)
        } else {
            (whole, self.source.samples() - whole)
        };
        let within = sample - 2 * first;
        (first + within % size.max(1), within >= size)
    }

    fn copy(&self, number: usize, image: &[f32], out: &mut [f32]) {
        // The random stream of an image depends on its number alone.
        let mut random = Random::new(self.seed ^ (number as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let Augment { flip, shift } = self.augment;
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
        2 * self.source.samples()
    }

    fn features(&self) -> usize {
        self.source.features()
    }

    fn rows(&self, samples: Range<usize>) -> Result<Matrix<f32>> {
        if samples.start > samples.end || samples.end > self.samples() {
            let expected = format!("a range within 0..{}", self.samples());
            return Err(Error::shape("rows of the inputs", expected, format!("{samples:?}")));
        }
        let images: Vec<(usize, bool)> = samples.map(|sample| self.image(sample)).collect();
        let first = images.iter().map(|i| i.0).min().unwrap_or(0);
        let end = images.iter().map(|i| i.0 + 1).max().unwrap_or(0);
        let source = self.source.rows(first..end)?;
        let mut out = Matrix::zeros(images.len(), self.features());
        for (row, &(number, is_copy)) in images.iter().enumerate() {
            let image = source.row(number - first);
            if is_copy {
                self.copy(number, image, out.row_mut(row));
            } else {
                out.row_mut(row).copy_from_slice(image);
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
            let (number, is_copy) = all.image(s);
            seen[number][usize::from(is_copy)] += 1;
            if !is_copy {
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
    fn what_is_no_augmentation_is_said_in_one_line() {
        for text in ["", "flop", "shift", "shift:0", "shift:-1", "flip,flip", "shift:1,shift:2", "flip:1"] {
            let message = text.parse::<Augment>().unwrap_err().to_string();
            assert!(message.starts_with("augment: expected flip, shift:N"), "{message}");
        }
        for text in ["flip", "shift:3", "flip,shift:4"] {
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
