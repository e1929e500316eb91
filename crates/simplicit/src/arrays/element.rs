//! The number types a file may hold, and their bytes.

use crate::linalg::Scalar;

/// The type of an array's numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)] // The names say it all.
pub enum Element {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    U64,
    I64,
    F16,
    Bf16,
    F32,
    F64,
}

impl Element {
    /// Bytes of one number.
    pub fn size(self) -> usize {
        match self {
            Element::U8 | Element::I8 => 1,
            Element::U16 | Element::I16 | Element::F16 | Element::Bf16 => 2,
            Element::U32 | Element::I32 | Element::F32 => 4,
            Element::U64 | Element::I64 | Element::F64 => 8,
        }
    }

    /// Distance from 1 to the next number of this type; 0 for integers.
    pub fn epsilon(self) -> f64 {
        match self {
            Element::F16 => f64::powi(2.0, -10),
            Element::Bf16 => f64::powi(2.0, -7),
            Element::F32 => f64::from(f32::EPSILON),
            Element::F64 => f64::EPSILON,
            _ => 0.0,
        }
    }

    /// Converts big-endian numbers to little-endian ones, in place.
    pub(super) fn swap_bytes(self, bytes: &mut [u8]) {
        bytes.chunks_exact_mut(self.size()).for_each(<[u8]>::reverse);
    }

    /// Fills `out` from as many little-endian numbers in `bytes`.
    pub(super) fn decode<T: Scalar>(self, bytes: &[u8], out: &mut [T]) {
        match self {
            Element::U8 => fill(bytes, out, |[b]: [u8; 1]| f64::from(b)),
            Element::I8 => fill(bytes, out, |b| f64::from(i8::from_le_bytes(b))),
            Element::U16 => fill(bytes, out, |b| f64::from(u16::from_le_bytes(b))),
            Element::I16 => fill(bytes, out, |b| f64::from(i16::from_le_bytes(b))),
            Element::U32 => fill(bytes, out, |b| f64::from(u32::from_le_bytes(b))),
            Element::I32 => fill(bytes, out, |b| f64::from(i32::from_le_bytes(b))),
            Element::U64 => fill(bytes, out, |b| u64::from_le_bytes(b) as f64),
            Element::I64 => fill(bytes, out, |b| i64::from_le_bytes(b) as f64),
            Element::F16 => fill(bytes, out, |b| f64::from(half(u16::from_le_bytes(b)))),
            Element::Bf16 => fill(bytes, out, |b| f64::from(brain(u16::from_le_bytes(b)))),
            Element::F32 => fill(bytes, out, |b| f64::from(f32::from_le_bytes(b))),
            Element::F64 => fill(bytes, out, f64::from_le_bytes),
        }
    }

    /// Every little-endian number as an integer; `Err` with index and text of the first number that is not an integer
    /// in the range of u32.
    pub(super) fn decode_small_integers(self, bytes: &[u8]) -> Result<Vec<u32>, (usize, String)> {
        // Integers beyond 2⁵³ are rounded here, but they are far outside u32 all the same.
        let mut values = vec![0.0f64; bytes.len() / self.size()];
        self.decode(bytes, &mut values);
        let small = |v: f64| Some(v as u32).filter(|integer| f64::from(*integer) == v);
        values.iter().enumerate().map(|(i, &v)| small(v).ok_or_else(|| (i, v.to_string()))).collect()
    }
}

fn fill<const N: usize, T: Scalar>(bytes: &[u8], out: &mut [T], number: impl Fn([u8; N]) -> f64) {
    for (value, bytes) in out.iter_mut().zip(bytes.as_chunks().0) {
        *value = T::from_f64(number(*bytes));
    }
}

impl std::fmt::Display for Element {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Element::U8 => "uint8",
            Element::I8 => "int8",
            Element::U16 => "uint16",
            Element::I16 => "int16",
            Element::U32 => "uint32",
            Element::I32 => "int32",
            Element::U64 => "uint64",
            Element::I64 => "int64",
            Element::F16 => "float16",
            Element::Bf16 => "bfloat16",
            Element::F32 => "float32",
            Element::F64 => "float64",
        })
    }
}

/// IEEE half precision.
fn half(bits: u16) -> f32 {
    let sign = if bits >> 15 == 1 { -1.0 } else { 1.0 };
    let (exponent, fraction) = (i32::from(bits >> 10 & 31), f32::from(bits & 1023));
    match exponent {
        0 => sign * fraction * f32::powi(2.0, -24),
        31 if fraction == 0.0 => sign * f32::INFINITY,
        31 => f32::NAN,
        _ => sign * (1024.0 + fraction) * f32::powi(2.0, exponent - 25),
    }
}

/// bfloat16: the upper half of a float32.
fn brain(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_precision_by_hand() {
        for (bits, value) in [
            (0x3c00, 1.0),
            (0xc000, -2.0),
            (0x7bff, 65504.0),
            (0x0400, 6.103_515_6e-5),
            (0x0001, 5.960_464_5e-8),
            (0x3555, 0.333_251_95),
            (0x8000, 0.0),
        ] {
            assert_eq!(half(bits), value, "{bits:x}");
        }
        assert_eq!(half(0xfc00), f32::NEG_INFINITY);
        assert!(half(0x7e00).is_nan());
        assert_eq!(brain(0x3f80), 1.0);
        assert_eq!(brain(0xc040), -3.0);
    }

    #[test]
    fn integers_are_exact_or_refused() {
        let bytes: Vec<u8> = [3.0f64, 4e9].iter().flat_map(|v| v.to_le_bytes()).collect();
        assert_eq!(Element::F64.decode_small_integers(&bytes).unwrap(), [3, 4_000_000_000]);
        for bad in [0.5, -1.0, f64::NAN, f64::INFINITY, 1e30, 4_294_967_296.0] {
            let bytes: Vec<u8> = [1.0, bad].iter().flat_map(|v: &f64| v.to_le_bytes()).collect();
            assert_eq!(Element::F64.decode_small_integers(&bytes).unwrap_err().0, 1);
        }
        assert!(Element::U64.decode_small_integers(&u64::MAX.to_le_bytes()).is_err());
        assert!(Element::I64.decode_small_integers(&(-1i64).to_le_bytes()).is_err());
        let mut big = [0x01, 0x02, 0x00, 0xff];
        Element::U16.swap_bytes(&mut big);
        assert_eq!(Element::U16.decode_small_integers(&big).unwrap(), [0x0102, 0xff]);
    }
}
