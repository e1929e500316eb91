//! The activations: component-wise, non-decreasing and non-expansive, |φ(u) − φ(v)| ≤ |u − v|.

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// φ of one layer.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum Activation {
    /// max(z, 0).
    #[default]
    Relu,
    /// z for z ≥ 0, slope·z below, with slope in [0, 1].
    LeakyRelu {
        /// Slope for negative z.
        slope: f32,
    },
    /// tanh z.
    Tanh,
    /// 1 / (1 + e⁻ᶻ).
    Sigmoid,
    /// z.
    Identity,
}

impl Activation {
    /// A leaky ReLU; slopes outside [0, 1] are not non-expansive and non-decreasing.
    pub fn leaky_relu(slope: f32) -> Result<Self> {
        if (0.0..=1.0).contains(&slope) {
            Ok(Activation::LeakyRelu { slope })
        } else {
            Err(Error::setting("leaky ReLU slope", "a number in [0, 1]", slope))
        }
    }

    /// φ(z).
    #[inline]
    pub fn apply(self, z: f32) -> f32 {
        match self {
            Activation::Relu => z.max(0.0),
            Activation::LeakyRelu { slope } => z.max(0.0) + slope * z.min(0.0),
            Activation::Tanh => z.tanh(),
            Activation::Sigmoid => 1.0 / (1.0 + (-z).exp()),
            Activation::Identity => z,
        }
    }

    /// φ(z) in double precision.
    #[inline]
    pub fn apply_f64(self, z: f64) -> f64 {
        match self {
            Activation::Relu => z.max(0.0),
            Activation::LeakyRelu { slope } => z.max(0.0) + f64::from(slope) * z.min(0.0),
            Activation::Tanh => z.tanh(),
            Activation::Sigmoid => 1.0 / (1.0 + (-z).exp()),
            Activation::Identity => z,
        }
    }

    /// φ′(z); at a kink the derivative from the left (0 for ReLU at 0).
    #[inline]
    pub fn derivative(self, z: f32) -> f32 {
        match self {
            Activation::Relu => f32::from(z > 0.0),
            Activation::LeakyRelu { slope } => {
                if z > 0.0 {
                    1.0
                } else {
                    slope
                }
            }
            Activation::Tanh => 1.0 - z.tanh() * z.tanh(),
            Activation::Sigmoid => {
                let s = 1.0 / (1.0 + (-z).exp());
                s * (1.0 - s)
            }
            Activation::Identity => 1.0,
        }
    }

    /// φ over a slice, in place.
    pub fn apply_slice(self, values: &mut [f32]) {
        for v in values {
            *v = self.apply(*v);
        }
    }

    /// |φ(u) − φ(v)| ≤ |u − v|.
    pub fn is_non_expansive(self) -> bool {
        true
    }

    /// φ(αz) = αφ(z) for every α ≥ 0.
    pub fn is_positively_homogeneous(self) -> bool {
        matches!(self, Activation::Relu | Activation::LeakyRelu { .. } | Activation::Identity)
    }
}

impl std::fmt::Display for Activation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Activation::Relu => f.write_str("relu"),
            Activation::LeakyRelu { slope } => write!(f, "leaky-relu:{slope}"),
            Activation::Tanh => f.write_str("tanh"),
            Activation::Sigmoid => f.write_str("sigmoid"),
            Activation::Identity => f.write_str("identity"),
        }
    }
}

impl std::str::FromStr for Activation {
    type Err = Error;
    fn from_str(name: &str) -> Result<Self> {
        match name {
            "relu" => Ok(Activation::Relu),
            "tanh" => Ok(Activation::Tanh),
            "sigmoid" => Ok(Activation::Sigmoid),
            "identity" => Ok(Activation::Identity),
            "leaky-relu" => Self::leaky_relu(0.01),
            other => match other.strip_prefix("leaky-relu:").and_then(|s| s.parse().ok()) {
                Some(slope) => Self::leaky_relu(slope),
                None => Err(Error::setting(
                    "activation",
                    "relu, leaky-relu[:slope], tanh, sigmoid or identity",
                    format!("{other:?}"),
                )),
            },
        }
    }
}

impl From<Activation> for String {
    fn from(a: Activation) -> Self {
        a.to_string()
    }
}

impl TryFrom<String> for Activation {
    type Error = Error;
    fn try_from(name: String) -> Result<Self> {
        name.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Activation; 6] = [
        Activation::Relu,
        Activation::LeakyRelu { slope: 0.01 },
        Activation::LeakyRelu { slope: 1.0 },
        Activation::Tanh,
        Activation::Sigmoid,
        Activation::Identity,
    ];

    #[test]
    fn non_expansive_and_non_decreasing_with_the_right_derivative() {
        for a in ALL {
            for i in -60..60 {
                let (u, v) = (i as f32 * 0.1 + 0.05, i as f32 * 0.1 + 0.15);
                let rise = a.apply(v) - a.apply(u);
                assert!((0.0..=(v - u) * (1.0 + 1e-5)).contains(&rise), "{a} {u} {rise}");
                let h = 1e-3;
                let numeric = (a.apply_f64(f64::from(u) + h) - a.apply_f64(f64::from(u) - h)) / (2.0 * h);
                assert!((numeric - f64::from(a.derivative(u))).abs() < 1e-5, "{a} at {u}");
            }
        }
    }

    #[test]
    fn names_round_trip() {
        for a in ALL {
            assert_eq!(a.to_string().parse::<Activation>().unwrap(), a);
        }
        assert!("gelu".parse::<Activation>().is_err());
        assert!("leaky-relu:1.5".parse::<Activation>().is_err());
    }
}
