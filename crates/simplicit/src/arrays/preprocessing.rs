//! From raw numbers to what the network expects: u = (raw·scale − mean) / std.

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// u = (raw·scale − mean) / std, with one mean and std for all values or one per channel. Stored in the model file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Unchecked")]
pub struct Preprocessing {
    /// The factor on the raw numbers; finite, not zero.
    pub scale: f64,
    /// Subtracted after scaling; one finite number, or one per channel.
    pub mean: Vec<f64>,
    /// The divisor at the end; one positive number, or one per channel.
    pub std: Vec<f64>,
}

/// The content of a file before it is checked.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Unchecked {
    scale: f64,
    mean: Vec<f64>,
    std: Vec<f64>,
}

impl TryFrom<Unchecked> for Preprocessing {
    type Error = Error;
    fn try_from(raw: Unchecked) -> Result<Self> {
        Self::new(raw.scale, raw.mean, raw.std)
    }
}

impl Default for Preprocessing {
    fn default() -> Self {
        Self::identity()
    }
}

impl Preprocessing {
    /// Checks the three parts.
    pub fn new(scale: f64, mean: Vec<f64>, std: Vec<f64>) -> Result<Self> {
        let preprocessing = Self { scale, mean, std };
        preprocessing.check()?;
        Ok(preprocessing)
    }

    fn check(&self) -> Result<()> {
        if !self.scale.is_finite() || self.scale == 0.0 {
            return Err(Error::setting("scale", "a finite number other than 0", self.scale));
        }
        if self.mean.is_empty() || self.mean.iter().any(|v| !v.is_finite()) {
            return Err(Error::setting("mean", "one finite number, or one per channel", format!("{:?}", self.mean)));
        }
        if self.std.is_empty() || self.std.iter().any(|v| !v.is_finite() || *v <= 0.0) {
            return Err(Error::setting("std", "one positive number, or one per channel", format!("{:?}", self.std)));
        }
        Ok(())
    }

    /// Checks that it can be applied to samples of `inputs` values, whatever their axes: it needs one number, or a
    /// number per channel where channels have equal sizes.
    pub(crate) fn check_inputs(&self, inputs: usize) -> Result<()> {
        self.check()?;
        for (name, values) in [("mean", &self.mean), ("std", &self.std)] {
            if !inputs.is_multiple_of(values.len()) {
                return Err(Error::setting(
                    name,
                    format!("one number, or one per channel of {inputs} inputs"),
                    format!("{} numbers", values.len()),
                ));
            }
        }
        Ok(())
    }

    /// u = raw, the default for arrays.
    pub fn identity() -> Self {
        Self { scale: 1.0, mean: vec![0.0], std: vec![1.0] }
    }

    /// u = raw / 255, the default for image files of bytes (IDX, CIFAR).
    pub fn bytes() -> Self {
        Self { scale: 1.0 / 255.0, ..Self::identity() }
    }

    /// Mean and std of every value of a sample of this shape. Channels are the first axis of C × H × W; a sample of
    /// any other shape has one channel.
    pub fn per_feature(&self, sample_shape: &[usize]) -> Result<PerFeature> {
        self.check()?;
        let (channels, positions) = match sample_shape {
            [channels, height, width] => (*channels, height.saturating_mul(*width)),
            other => (1, other.iter().fold(1usize, |size, axis| size.saturating_mul(*axis))),
        };
        let spread = |name: &str, values: &[f64]| -> Result<Vec<f64>> {
            if values.len() != 1 && values.len() != channels {
                let expected = if channels == 1 {
                    "1 value, as these inputs have one channel".to_string()
                } else {
                    format!("1 value or {channels}, one per channel")
                };
                return Err(Error::setting(name, expected, format!("{} values", values.len())));
            }
            let by_channel = (0..channels).map(|c| values[c.min(values.len() - 1)]);
            Ok(by_channel.flat_map(|v| std::iter::repeat_n(v, positions)).collect())
        };
        Ok(PerFeature { scale: self.scale, mean: spread("mean", &self.mean)?, std: spread("std", &self.std)? })
    }
}

/// A [`Preprocessing`] spread over the values of a sample.
#[derive(Debug, Clone, PartialEq)]
pub struct PerFeature {
    /// The factor on the raw numbers.
    pub scale: f64,
    /// Mean of every value, in raw·scale units.
    pub mean: Vec<f64>,
    /// Std of every value, in raw·scale units.
    pub std: Vec<f64>,
}

impl PerFeature {
    /// The network's input for one raw sample: computed in f64, rounded once.
    pub fn apply(&self, raw: &[f64], out: &mut [f32]) {
        for (((u, raw), mean), std) in out.iter_mut().zip(raw).zip(&self.mean).zip(&self.std) {
            *u = ((raw * self.scale - mean) / std) as f32;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_value_or_one_per_channel() {
        let three = Preprocessing::new(1.0, vec![1.0, 2.0, 3.0], vec![1.0, 2.0, 4.0]).unwrap();
        let spread = three.per_feature(&[3, 1, 2]).unwrap();
        assert_eq!(spread.mean, [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]);
        let mut out = [0.0f32; 6];
        spread.apply(&[2.0, 3.0, 4.0, 6.0, 7.0, 11.0], &mut out);
        assert_eq!(out, [1.0, 2.0, 1.0, 2.0, 1.0, 2.0]);
        // One mean with three stds.
        let mixed = Preprocessing::new(1.0, vec![0.5], vec![1.0, 2.0, 4.0]).unwrap();
        assert_eq!(mixed.per_feature(&[3, 1, 1]).unwrap().mean, [0.5; 3]);
        for shape in [vec![6], vec![2, 3], vec![2, 1, 3], vec![3, 2, 1, 1]] {
            let message = three.per_feature(&shape).unwrap_err().to_string();
            assert!(message.starts_with("mean: expected 1 value") && message.ends_with("got 3 values"), "{message}");
        }
        let message = three.per_feature(&[4, 2, 2]).unwrap_err().to_string();
        assert_eq!(message, "mean: expected 1 value or 4, one per channel, got 3 values");
    }

    #[test]
    fn channels_must_divide_the_inputs() {
        let two = Preprocessing::new(1.0, vec![1.0, 2.0], vec![1.0]).unwrap();
        assert!(two.check_inputs(4).is_ok());
        let message = two.check_inputs(3).unwrap_err().to_string();
        assert_eq!(message, "mean: expected one number, or one per channel of 3 inputs, got 2 numbers");
    }

    #[test]
    fn bytes_over_255_are_the_nearest_f32() {
        let spread = Preprocessing::bytes().per_feature(&[256]).unwrap();
        let raw: Vec<f64> = (0..256).map(f64::from).collect();
        let mut out = vec![0.0; 256];
        spread.apply(&raw, &mut out);
        for (i, u) in out.iter().enumerate() {
            assert_eq!(*u, i as f32 / 255.0, "{i}");
        }
    }

    #[test]
    fn nonsense_is_refused_also_from_a_file() {
        assert!(Preprocessing::new(0.0, vec![0.0], vec![1.0]).is_err());
        assert!(Preprocessing::new(f64::NAN, vec![0.0], vec![1.0]).is_err());
        assert!(Preprocessing::new(1.0, vec![], vec![1.0]).is_err());
        assert!(Preprocessing::new(1.0, vec![f64::INFINITY], vec![1.0]).is_err());
        assert!(Preprocessing::new(1.0, vec![0.0], vec![0.0]).is_err());
        assert!(Preprocessing::new(1.0, vec![0.0], vec![1.0, -1.0]).is_err());
        let original = Preprocessing::new(1.0 / 255.0, vec![0.5, 0.25, 0.1], vec![0.3]).unwrap();
        let json = serde_json::to_string(&original).unwrap();
        assert_eq!(json, r#"{"scale":0.00392156862745098,"mean":[0.5,0.25,0.1],"std":[0.3]}"#);
        assert_eq!(serde_json::from_str::<Preprocessing>(&json).unwrap(), original);
        let hostile = r#"{"scale":1.0,"mean":[0.0],"std":[0.0]}"#;
        assert!(serde_json::from_str::<Preprocessing>(hostile).unwrap_err().to_string().contains("std"));
    }
}
