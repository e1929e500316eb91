//! The activations: functions of one number. Algorithms test their properties, never their names.

use serde::{Deserialize, Serialize};

use crate::graph::error_function::{normal_cdf, normal_cdf_anywhere, normal_cdf_near, normal_density};
use crate::linalg::vectorised;
use crate::{Error, Result};

/// The constants of [`Activation::Selu`], as in ONNX.
const SELU_ALPHA: f64 = 1.673_263_2;
const SELU_GAMMA: f64 = 1.050_701;
/// The constants of [`Activation::GeluTanh`]: √(2/π) and the factor of the cubic term.
const GELU_SCALE: f64 = 0.797_884_560_802_865_4;
const GELU_CUBIC: f64 = 0.044_715;

/// The activation φ of one layer.
///
/// Not every activation is non-decreasing and non-expansive, |φ(u) − φ(v)| ≤ |u − v|: cycles and κ need the second
/// property, certificates need both.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum Activation {
    /// max(z, 0).
    #[default]
    Relu,
    /// z for z ≥ 0, slope·z below.
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
    /// min(max(z, low), high); ReLU6 is `clip:0:6`. Either end may be infinite.
    Clip {
        /// The smallest value.
        low: f32,
        /// The largest value.
        high: f32,
    },
    /// ln(1 + eᶻ).
    Softplus,
    /// z / (1 + |z|).
    Softsign,
    /// z for z ≥ 0, α(eᶻ − 1) below.
    Elu {
        /// α.
        alpha: f32,
    },
    /// max(0, z) + min(0, α(e^(z/α) − 1)).
    Celu {
        /// α, not 0.
        alpha: f32,
    },
    /// γz for z ≥ 0, γα(eᶻ − 1) below, with ONNX's α and γ.
    Selu,
    /// min(max(αz + β, 0), 1).
    HardSigmoid {
        /// α.
        alpha: f32,
        /// β.
        beta: f32,
    },
    /// z·min(max(z/6 + 1/2, 0), 1).
    HardSwish,
    /// z·Φ(z), Φ being the normal distribution function.
    Gelu,
    /// z/2·(1 + tanh(√(2/π)(z + 0.044715z³))).
    GeluTanh,
    /// z / (1 + e⁻ᶻ).
    Silu,
    /// z·tanh(ln(1 + eᶻ)).
    Mish,
}

fn sigmoid(z: f64) -> f64 {
    1.0 / (1.0 + (-z).exp())
}

fn softplus(z: f64) -> f64 {
    z.max(0.0) + (-z.abs()).exp().ln_1p()
}

/// z·weight, or 0 where the weight has become 0, because the weight falls faster than z grows.
#[inline(always)]
fn gated(z: f64, weight: f64) -> f64 {
    if weight == 0.0 { 0.0 } else { z * weight }
}

/// GELU for several numbers at a time; the tails are computed only if one of them is far from zero.
fn gelu_slice(values: &mut [f32]) {
    const WIDTH: usize = 16;
    let (chunks, rest) = values.as_chunks_mut::<WIDTH>();
    vectorised(
        #[inline(always)]
        || {
            for chunk in chunks {
                let (mut out, mut near) = ([0.0f32; WIDTH], true);
                for (out, &z) in out.iter_mut().zip(chunk.iter()) {
                    let (share, is_near) = normal_cdf_near(f64::from(z));
                    *out = (f64::from(z) * share) as f32;
                    near &= is_near;
                }
                if !near {
                    for (out, &z) in out.iter_mut().zip(chunk.iter()) {
                        *out = gated(f64::from(z), normal_cdf_anywhere(f64::from(z))) as f32;
                    }
                }
                *chunk = out;
            }
        },
    );
    rest.iter_mut().for_each(|v| *v = Activation::Gelu.apply(*v));
}

impl Activation {
    /// A leaky ReLU; only slopes in [0, 1] make it non-decreasing and non-expansive.
    pub fn leaky_relu(slope: f32) -> Result<Self> {
        Activation::LeakyRelu { slope }.checked()
    }

    /// The same activation, or an error that names a parameter that is not a number or out of range.
    pub fn checked(self) -> Result<Self> {
        let finite = |what: &str, value: f32| match value.is_finite() {
            true => Ok(()),
            false => Err(Error::setting(what, "a finite number", value)),
        };
        match self {
            Activation::LeakyRelu { slope } => finite("leaky ReLU slope", slope)?,
            Activation::Elu { alpha } => finite("alpha of elu", alpha)?,
            Activation::Celu { alpha } => {
                finite("alpha of celu", alpha)?;
                if alpha == 0.0 {
                    return Err(Error::setting("alpha of celu", "a number other than 0", alpha));
                }
            }
            Activation::HardSigmoid { alpha, beta } => {
                finite("alpha of hard-sigmoid", alpha)?;
                finite("beta of hard-sigmoid", beta)?;
            }
            // The interval must contain a number: no NaN, the ends in order, and no end at the wrong infinity.
            Activation::Clip { low, high } if !(low <= high && low < f32::INFINITY && high > f32::NEG_INFINITY) => {
                return Err(Error::setting("ends of clip", "low ≤ high", format!("{low} and {high}")));
            }
            _ => {}
        }
        Ok(self)
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
            Activation::Clip { low, high } => z.max(low).min(high),
            _ => self.apply_f64(f64::from(z)) as f32,
        }
    }

    /// φ(z) in double precision. Always inlined, so that a loop over one activation that is known has no call.
    #[inline(always)]
    pub fn apply_f64(self, z: f64) -> f64 {
        match self {
            Activation::Relu => z.max(0.0),
            Activation::LeakyRelu { slope } => z.max(0.0) + f64::from(slope) * z.min(0.0),
            Activation::Identity => z,
            Activation::Clip { low, high } => z.max(f64::from(low)).min(f64::from(high)),
            _ => self.apply_curved(z),
        }
    }

    /// φ(z) of activations that are not made of straight lines.
    fn apply_curved(self, z: f64) -> f64 {
        match self {
            // Never asked for: `apply_f64` computes these itself.
            Activation::Relu | Activation::LeakyRelu { .. } | Activation::Identity | Activation::Clip { .. } => {
                self.apply_f64(z)
            }
            Activation::Tanh => z.tanh(),
            Activation::Sigmoid => sigmoid(z),
            Activation::Softplus => softplus(z),
            Activation::Softsign if z.is_infinite() => 1f64.copysign(z),
            Activation::Softsign => z / (1.0 + z.abs()),
            Activation::Elu { alpha } => below_zero(z, 1.0, |z| f64::from(alpha) * z.exp_m1()),
            Activation::Celu { alpha } => below_zero(z, 1.0, |z| f64::from(alpha) * (z / f64::from(alpha)).exp_m1()),
            Activation::Selu => below_zero(z, SELU_GAMMA, |z| SELU_GAMMA * SELU_ALPHA * z.exp_m1()),
            Activation::HardSigmoid { alpha, beta } => ramp(z, f64::from(alpha), f64::from(beta)),
            Activation::HardSwish => gated(z, ramp(z, 1.0 / 6.0, 0.5)),
            Activation::Gelu => gated(z, normal_cdf(z)),
            Activation::GeluTanh => gated(z, 0.5 + 0.5 * (GELU_SCALE * (z + GELU_CUBIC * z * z * z)).tanh()),
            Activation::Silu => gated(z, sigmoid(z)),
            Activation::Mish => gated(z, softplus(z).tanh()),
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
            Activation::Clip { low, high } => f32::from(z > low && z <= high),
            _ => self.smooth_derivative(f64::from(z)) as f32,
        }
    }

    /// φ′ of the other activations, in double precision.
    fn smooth_derivative(self, z: f64) -> f64 {
        match self {
            Activation::Softplus => sigmoid(z),
            Activation::Softsign => (1.0 + z.abs()).powi(-2),
            Activation::Elu { alpha } => above_zero(z, 1.0, |z| f64::from(alpha) * z.exp()),
            Activation::Celu { alpha } => above_zero(z, 1.0, |z| (z / f64::from(alpha)).exp()),
            Activation::Selu => above_zero(z, SELU_GAMMA, |z| SELU_GAMMA * SELU_ALPHA * z.exp()),
            Activation::HardSigmoid { alpha, beta } => {
                let t = f64::from(alpha) * z + f64::from(beta);
                let inside = if alpha > 0.0 { t > 0.0 && t <= 1.0 } else { (0.0..1.0).contains(&t) };
                if inside { f64::from(alpha) } else { 0.0 }
            }
            Activation::HardSwish => match z {
                z if z <= -3.0 => 0.0,
                z if z <= 3.0 => z / 3.0 + 0.5,
                _ => 1.0,
            },
            Activation::Gelu => normal_cdf(z) + gated(z, normal_density(z)),
            Activation::GeluTanh => {
                let t = (GELU_SCALE * (z + GELU_CUBIC * z * z * z)).tanh();
                let inner = GELU_SCALE * (1.0 + 3.0 * GELU_CUBIC * z * z);
                0.5 + 0.5 * t + gated(0.5 * z * inner, 1.0 - t * t)
            }
            Activation::Silu => {
                let s = sigmoid(z);
                s + gated(z, s * (1.0 - s))
            }
            Activation::Mish => {
                let t = softplus(z).tanh();
                t + gated(z, sigmoid(z) * (1.0 - t * t))
            }
            other => f64::from(other.derivative(z as f32)),
        }
    }

    /// φ over a slice, in place: the same bits as one by one.
    pub(crate) fn apply_slice(self, values: &mut [f32]) {
        match self {
            Activation::Identity => {}
            Activation::Relu => vectorised(
                #[inline(always)]
                || values.iter_mut().for_each(|v| *v = if *v > 0.0 { *v } else { 0.0 }),
            ),
            Activation::Gelu => gelu_slice(values),
            other => values.iter_mut().for_each(|v| *v = other.apply(*v)),
        }
    }

    /// φ(u) ≤ φ(v) for every u ≤ v.
    pub(crate) fn is_non_decreasing(self) -> bool {
        match self {
            Activation::LeakyRelu { slope } => slope >= 0.0,
            Activation::Elu { alpha } | Activation::HardSigmoid { alpha, .. } => alpha >= 0.0,
            Activation::Relu
            | Activation::Tanh
            | Activation::Sigmoid
            | Activation::Identity
            | Activation::Clip { .. }
            | Activation::Softplus
            | Activation::Softsign
            | Activation::Celu { .. }
            | Activation::Selu => true,
            Activation::HardSwish | Activation::Gelu | Activation::GeluTanh | Activation::Silu | Activation::Mish => {
                false
            }
        }
    }

    /// |φ(u) − φ(v)| ≤ |u − v| for all u and v.
    pub(crate) fn is_non_expansive(self) -> bool {
        match self {
            Activation::LeakyRelu { slope } => slope.abs() <= 1.0,
            Activation::Elu { alpha } | Activation::HardSigmoid { alpha, .. } => alpha.abs() <= 1.0,
            // The slope below 0 is e^(z/α).
            Activation::Celu { alpha } => alpha > 0.0,
            Activation::Relu
            | Activation::Tanh
            | Activation::Sigmoid
            | Activation::Identity
            | Activation::Clip { .. }
            | Activation::Softplus
            | Activation::Softsign => true,
            Activation::Selu
            | Activation::HardSwish
            | Activation::Gelu
            | Activation::GeluTanh
            | Activation::Silu
            | Activation::Mish => false,
        }
    }

    /// φ(αz) = αφ(z) for every α ≥ 0.
    pub(crate) fn is_positively_homogeneous(self) -> bool {
        match self {
            Activation::Relu | Activation::LeakyRelu { .. } | Activation::Identity => true,
            Activation::Clip { low, high } => {
                (low == 0.0 || low == f32::NEG_INFINITY) && (high == 0.0 || high == f32::INFINITY)
            }
            Activation::Elu { alpha } => alpha == 0.0,
            _ => false,
        }
    }
}

/// z·slope for z ≥ 0, f below.
#[inline]
fn below_zero(z: f64, slope: f64, f: impl Fn(f64) -> f64) -> f64 {
    if z < 0.0 { f(z) } else { slope * z }
}

/// The slope for z > 0, f at 0 and below.
#[inline]
fn above_zero(z: f64, slope: f64, f: impl Fn(f64) -> f64) -> f64 {
    if z <= 0.0 { f(z) } else { slope }
}

#[inline]
fn ramp(z: f64, slope: f64, offset: f64) -> f64 {
    (slope * z + offset).clamp(0.0, 1.0)
}

impl std::fmt::Display for Activation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Activation::Relu => f.write_str("relu"),
            Activation::LeakyRelu { slope } => write!(f, "leaky-relu:{slope}"),
            Activation::Tanh => f.write_str("tanh"),
            Activation::Sigmoid => f.write_str("sigmoid"),
            Activation::Identity => f.write_str("identity"),
            Activation::Clip { low, high } => write!(f, "clip:{low}:{high}"),
            Activation::Softplus => f.write_str("softplus"),
            Activation::Softsign => f.write_str("softsign"),
            Activation::Elu { alpha } => write!(f, "elu:{alpha}"),
            Activation::Celu { alpha } => write!(f, "celu:{alpha}"),
            Activation::Selu => f.write_str("selu"),
            Activation::HardSigmoid { alpha, beta } => write!(f, "hard-sigmoid:{alpha}:{beta}"),
            Activation::HardSwish => f.write_str("hard-swish"),
            Activation::Gelu => f.write_str("gelu"),
            Activation::GeluTanh => f.write_str("gelu-tanh"),
            Activation::Silu => f.write_str("silu"),
            Activation::Mish => f.write_str("mish"),
        }
    }
}

impl std::str::FromStr for Activation {
    type Err = Error;
    fn from_str(name: &str) -> Result<Self> {
        let unknown = || {
            Error::setting(
                "activation",
                "relu, leaky-relu[:slope], tanh, sigmoid, identity, clip:low:high, relu6, softplus, softsign, \
                 elu[:alpha], celu[:alpha], selu, hard-sigmoid[:alpha:beta], hard-swish, gelu, gelu-tanh, silu or mish",
                format!("{name:?}"),
            )
        };
        let mut words = name.split(':');
        let kind = words.next().unwrap_or_default();
        let parameters: Vec<f32> = words.map(str::parse).collect::<Result<_, _>>().map_err(|_| unknown())?;
        let activation = match (kind, &parameters[..]) {
            ("relu", []) => Activation::Relu,
            ("tanh", []) => Activation::Tanh,
            ("sigmoid", []) => Activation::Sigmoid,
            ("identity", []) => Activation::Identity,
            ("leaky-relu", []) => Activation::LeakyRelu { slope: 0.01 },
            ("leaky-relu", &[slope]) => Activation::LeakyRelu { slope },
            ("relu6", []) => Activation::Clip { low: 0.0, high: 6.0 },
            ("clip", &[low, high]) => Activation::Clip { low, high },
            ("softplus", []) => Activation::Softplus,
            ("softsign", []) => Activation::Softsign,
            ("elu", []) => Activation::Elu { alpha: 1.0 },
            ("elu", &[alpha]) => Activation::Elu { alpha },
            ("celu", []) => Activation::Celu { alpha: 1.0 },
            ("celu", &[alpha]) => Activation::Celu { alpha },
            ("selu", []) => Activation::Selu,
            ("hard-sigmoid", []) => Activation::HardSigmoid { alpha: 0.2, beta: 0.5 },
            ("hard-sigmoid", &[alpha, beta]) => Activation::HardSigmoid { alpha, beta },
            ("hard-swish", []) => Activation::HardSwish,
            ("gelu", []) => Activation::Gelu,
            ("gelu-tanh", []) => Activation::GeluTanh,
            ("silu", []) => Activation::Silu,
            ("mish", []) => Activation::Mish,
            _ => return Err(unknown()),
        };
        activation.checked()
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

    const ALL: [&str; 34] = [
        "relu",
        "leaky-relu:0.01",
        "leaky-relu:0",
        "leaky-relu:1",
        "leaky-relu:1.5",
        "leaky-relu:-0.5",
        "leaky-relu:-1.5",
        "tanh",
        "sigmoid",
        "identity",
        "clip:0:6",
        "clip:-1:1.5",
        "clip:0:inf",
        "clip:-inf:2",
        "clip:-inf:0",
        "clip:-inf:inf",
        "softplus",
        "softsign",
        "elu:1",
        "elu:0",
        "elu:0.5",
        "elu:1.5",
        "elu:-0.5",
        "celu:1",
        "celu:0.3",
        "celu:-2",
        "selu",
        "hard-sigmoid:0.2:0.5",
        "hard-sigmoid:-0.7:0.25",
        "hard-sigmoid:1.5:0",
        "hard-swish",
        "gelu",
        "gelu-tanh",
        "silu",
    ];

    fn all() -> impl Iterator<Item = Activation> {
        ALL.iter().chain(&["mish"]).map(|name| name.parse().unwrap())
    }

    /// The properties agree with a fine grid: none claims more, and none of these claims less.
    #[test]
    fn a_slice_has_the_same_bits_as_its_numbers() {
        // Chunks of numbers near zero, far from it, and on both sides of the limit; and a remainder.
        let mut values: Vec<f32> = (0..1003).map(|k| (k as f32 - 500.0) * 0.011).collect();
        values.extend([f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -40.0, 1e-30, -0.0, 2.83, -2.83]);
        for name in ALL {
            let activation: Activation = name.parse().unwrap();
            let mut got = values.clone();
            activation.apply_slice(&mut got);
            for (z, got) in values.iter().zip(&got) {
                let wanted = activation.apply(*z);
                assert!(*got == wanted || got.is_nan() && wanted.is_nan(), "{name}: {got} against {wanted} at {z}");
            }
        }
    }

    #[test]
    fn properties_are_what_the_numbers_say() {
        for a in all() {
            let (mut falls, mut steepest, mut uneven) = (false, 0.0f64, false);
            for i in -4000..4000 {
                let (u, v) = (f64::from(i) * 2.5e-3, f64::from(i + 1) * 2.5e-3);
                let rise = a.apply_f64(v) - a.apply_f64(u);
                falls |= rise < -1e-14;
                steepest = steepest.max(rise.abs() / (v - u));
                uneven |= (a.apply_f64(2.0 * u) - 2.0 * a.apply_f64(u)).abs() > 1e-12 * (1.0 + u.abs());
            }
            assert_eq!(a.is_non_decreasing(), !falls, "{a}");
            assert_eq!(a.is_non_expansive(), steepest <= 1.0 + 1e-12, "{a}: {steepest}");
            assert_eq!(a.is_positively_homogeneous(), !uneven, "{a}");
        }
    }

    #[test]
    fn derivatives_are_what_differences_say_and_both_precisions_agree() {
        for a in all() {
            for i in -60..60 {
                let u = i as f32 * 0.1 + 0.037;
                let (z, h) = (f64::from(u), 1e-5);
                let numeric = (a.apply_f64(z + h) - a.apply_f64(z - h)) / (2.0 * h);
                // Allows for h² times a third derivative of at most 200, rounding divided by h, and the rounding of
                // the result to f32.
                let tolerance = 2e-8 + 2e-11 * numeric.abs() + 4.0 * f64::from(f32::EPSILON) * (1.0 + numeric.abs());
                assert!((numeric - f64::from(a.derivative(u))).abs() < tolerance, "{a} at {u}: {numeric}");
                let (single, double) = (f64::from(a.apply(u)), a.apply_f64(z));
                assert!((single - double).abs() <= 2.0 * f64::from(f32::EPSILON) * (1e-3 + double.abs()), "{a} at {u}");
            }
        }
    }

    #[test]
    fn at_a_kink_the_derivative_is_from_the_left() {
        let at = |name: &str, z: f32| name.parse::<Activation>().unwrap().derivative(z);
        assert_eq!((at("clip:0:6", 0.0), at("clip:0:6", 6.0), at("clip:0:6", 6.5)), (0.0, 1.0, 0.0));
        assert_eq!((at("elu:0.5", 0.0), at("hard-swish", -3.0), at("hard-swish", 3.0)), (0.5, 0.0, 1.5));
        assert_eq!((at("hard-sigmoid:1:0", 0.0), at("hard-sigmoid:1:0", 1.0)), (0.0, 1.0));
        assert_eq!((at("hard-sigmoid:-1:1", 0.0), at("hard-sigmoid:-1:1", 1.0)), (0.0, -1.0));
    }

    #[test]
    fn far_out_nothing_is_lost() {
        for a in all().filter(|a| *a != Activation::LeakyRelu { slope: 0.0 }) {
            for z in [f64::NEG_INFINITY, -1e300, -1e30, -200.0, 200.0, 1e30, 1e300, f64::INFINITY] {
                assert!(!a.apply_f64(z).is_nan(), "{a} at {z}");
                assert!(z.is_infinite() || !a.derivative(z as f32).is_nan(), "{a} at {z}");
            }
        }
        // Reference values were computed with more digits, also for the tail, where 1 + erf would have lost all of
        // them.
        let value = |name: &str, z: f64| name.parse::<Activation>().unwrap().apply_f64(z);
        for (name, z, expected) in [
            ("gelu", 1.0, 0.8413447460685429),
            ("gelu", -10.0, -7.61985302416e-23),
            ("gelu-tanh", 1.0, 0.8411919906082768),
            ("silu", 1.0, 0.7310585786300049),
            ("mish", 1.0, 0.8650983882673103),
            ("selu", -1.0, -1.1113307378125628),
            ("softplus", 1.0, 1.3132616875182228),
            ("hard-swish", 1.0, 2.0 / 3.0),
            ("celu:2", -1.0, -0.7869386805747332),
        ] {
            assert!((value(name, z) / expected - 1.0).abs() < 1e-7, "{name}: {}", value(name, z));
        }
    }

    #[test]
    fn names_round_trip() {
        for a in all() {
            assert_eq!(a.to_string().parse::<Activation>().unwrap(), a);
            let json = serde_json::to_string(&a).unwrap();
            assert_eq!(serde_json::from_str::<Activation>(&json).unwrap(), a);
        }
        let parsed = |name: &str| name.parse::<Activation>();
        assert_eq!(parsed("relu6").unwrap(), Activation::Clip { low: 0.0, high: 6.0 });
        for bad in ["prelu", "relu:1", "leaky-relu:nan", "leaky-relu:inf", "clip:2:1", "clip:0", "clip:nan:1", "celu:0"]
        {
            assert!(parsed(bad).is_err(), "{bad}");
        }
        for bad in ["clip:inf:inf", "elu:inf", "hard-sigmoid:1", "gelu:", ""] {
            assert!(parsed(bad).is_err(), "{bad}");
        }
    }
}
