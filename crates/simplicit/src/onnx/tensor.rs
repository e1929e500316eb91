//! Constants of an ONNX file, checked and converted to the library's types.

use super::constant::{Constant, Tensor};
use super::proto::{TensorProto, data_type};
use crate::{Error, Result};

/// Whether the values are in another file.
pub(crate) fn is_external(tensor: &TensorProto) -> bool {
    tensor.data_location.unwrap_or(0) != 0 || !tensor.external_data.is_empty()
}

/// Reads a tensor whose values are in the file itself; no more is allocated than the file holds.
pub(crate) fn read(tensor: &TensorProto) -> Result<Constant> {
    let what = || format!("tensor {:?}", tensor.name);
    if is_external(tensor) {
        return Err(Error::unsupported(
            format!("{} with its data in another file", what()),
            "open the model from its folder, or save it in one file, e.g. torch.onnx.export(..., external_data=False)",
        ));
    }
    read_from(tensor, tensor.raw_data.as_deref())
}

/// Reads a tensor from these bytes or, where there are none, from the field of its type.
pub(crate) fn read_from(tensor: &TensorProto, raw: Option<&[u8]>) -> Result<Constant> {
    let what = || format!("tensor {:?}", tensor.name);
    let mut dims = Vec::with_capacity(tensor.dims.len());
    let mut count = Some(1usize);
    for &dim in &tensor.dims {
        let dim = usize::try_from(dim).map_err(|_| Error::shape(what(), "dimensions ≥ 0", dim))?;
        count = count.and_then(|c| c.checked_mul(dim));
        dims.push(dim);
    }
    let count = count.ok_or_else(|| Error::shape(what(), "fewer values", format!("{:?}", tensor.dims)))?;
    let kind = tensor.data_type.unwrap_or(0);
    let source = Data { tensor, raw, count };
    let floats = |values| Ok(Constant::Floats(Tensor { dims: dims.clone(), values }));
    let ints = |values| Ok(Constant::Ints(Tensor { dims: dims.clone(), values }));
    match kind {
        data_type::FLOAT => floats(source.read(&tensor.float_data, f32::from_le_bytes, |&v| v)?),
        data_type::DOUBLE => {
            floats(source.read(&tensor.double_data, |b| f64::from_le_bytes(b) as f32, |&v| v as f32)?)
        }
        data_type::FLOAT16 => {
            floats(source.read(&tensor.int32_data, |b| half(u16::from_le_bytes(b)), |&v| half(v as u16))?)
        }
        data_type::BFLOAT16 => {
            floats(source.read(&tensor.int32_data, |b| brain(u16::from_le_bytes(b)), |&v| brain(v as u16))?)
        }
        data_type::INT64 => ints(source.read(&tensor.int64_data, i64::from_le_bytes, |&v| v)?),
        data_type::INT32 => {
            ints(source.read(&tensor.int32_data, |b| i64::from(i32::from_le_bytes(b)), |&v| i64::from(v))?)
        }
        data_type::INT16 => {
            ints(source.read(&tensor.int32_data, |b| i64::from(i16::from_le_bytes(b)), |&v| i64::from(v))?)
        }
        data_type::INT8 => {
            ints(source.read(&tensor.int32_data, |b: [u8; 1]| i64::from(b[0] as i8), |&v| i64::from(v))?)
        }
        data_type::UINT8 => ints(source.read(&tensor.int32_data, |b: [u8; 1]| i64::from(b[0]), |&v| i64::from(v))?),
        data_type::BOOL => ints(source.read(&tensor.int32_data, |b: [u8; 1]| i64::from(b[0]), |&v| i64::from(v))?),
        other => Err(Error::unsupported(
            format!("{} of ONNX type {other}", what()),
            "weights may be float, double, float16 or bfloat16 and shapes or indices signed integers; convert a quantised model back",
        )),
    }
}

struct Data<'a> {
    tensor: &'a TensorProto,
    raw: Option<&'a [u8]>,
    count: usize,
}

impl Data<'_> {
    /// From `raw_data`, `N` bytes a value, or else from the field of the type.
    fn read<const N: usize, S, T>(
        &self,
        field: &[S],
        from_bytes: impl Fn([u8; N]) -> T,
        from_field: impl Fn(&S) -> T,
    ) -> Result<Vec<T>> {
        let what = || format!("tensor {:?} of dimensions {:?}", self.tensor.name, self.tensor.dims);
        match self.raw {
            Some(raw) => {
                let (values, rest) = raw.as_chunks::<N>();
                if values.len() != self.count || !rest.is_empty() {
                    let expected = format!("{} values of {N} byte(s)", self.count);
                    return Err(Error::shape(what(), expected, format!("{} bytes", raw.len())));
                }
                Ok(values.iter().map(|&v| from_bytes(v)).collect())
            }
            None if field.len() == self.count => Ok(field.iter().map(from_field).collect()),
            None => Err(Error::shape(what(), format!("{} values", self.count), format!("{} values", field.len()))),
        }
    }
}

/// A tensor in one of the types that are read as floats, each value rounded to the nearest; `None` for other types.
pub(crate) fn write(kind: i32, name: &str, dims: &[i64], values: &[f32]) -> Option<TensorProto> {
    let raw_data = match kind {
        data_type::FLOAT => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        data_type::DOUBLE => values.iter().flat_map(|v| f64::from(*v).to_le_bytes()).collect(),
        data_type::FLOAT16 => values.iter().flat_map(|v| to_half(*v).to_le_bytes()).collect(),
        data_type::BFLOAT16 => values.iter().flat_map(|v| to_brain(*v).to_le_bytes()).collect(),
        _ => return None,
    };
    let (name, dims) = (name.to_string(), dims.to_vec());
    Some(TensorProto { name, dims, data_type: Some(kind), raw_data: Some(raw_data), ..Default::default() })
}

/// The nearest number in half precision, the even one of two equally near; infinite beyond the largest.
fn to_half(value: f32) -> u16 {
    let sign = ((value.to_bits() >> 16) & 0x8000) as u16;
    let size = value.abs();
    if size.is_nan() {
        return sign | 0x7e00;
    }
    // In units of the last place; below the smallest normal number the unit stays the same.
    let exponent = (((size.to_bits() >> 23) as i32) - 127).max(-14);
    if exponent > 15 {
        return sign | 0x7c00;
    }
    let units = (f64::from(size) * 2f64.powi(10 - exponent)).round_ties_even() as u32;
    // 1,024 units or more are a normal number, and 2,048 the first of the next exponent.
    sign | (((exponent + 14) as u32 * 1024 + units).min(0x7c00)) as u16
}

/// The upper half of an f32, rounded to the nearest, to the even one of two equally near.
fn to_brain(value: f32) -> u16 {
    let bits = value.to_bits();
    if value.is_nan() {
        return (bits >> 16) as u16 | 0x40;
    }
    ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) as u16
}

/// IEEE half precision: exact in f32.
fn half(bits: u16) -> f32 {
    let sign = if bits & 0x8000 == 0 { 1.0 } else { -1.0 };
    let exponent = i32::from(bits >> 10 & 0x1f);
    let fraction = f32::from(bits & 0x3ff);
    sign * match exponent {
        0 => fraction * 2f32.powi(-24),
        31 if fraction == 0.0 => f32::INFINITY,
        31 => f32::NAN,
        _ => (1.0 + fraction / 1024.0) * 2f32.powi(exponent - 15),
    }
}

/// The upper half of an f32.
fn brain(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(kind: i32, dims: &[i64]) -> TensorProto {
        TensorProto { dims: dims.to_vec(), data_type: Some(kind), name: "w".into(), ..Default::default() }
    }

    fn floats(tensor: &TensorProto) -> Vec<f32> {
        match read(tensor).unwrap() {
            Constant::Floats(t) => t.values,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn what_is_written_is_read_again_and_rounded_to_the_nearest() {
        for bits in 0..=u16::MAX {
            for (value, back) in [(half(bits), to_half(half(bits))), (brain(bits), to_brain(brain(bits)))] {
                assert!(value.is_nan() || back == bits, "{bits:x}: {value} became {back:x}");
            }
        }
        // A number halfway between two neighbours gives the even one, a slightly larger one the upper one; also near
        // the ends of the range.
        for bits in (0..0x7bffu16).chain(0x8000..0xfbff) {
            let middle = f32::midpoint(half(bits), half(bits + 1));
            assert_eq!(to_half(middle), bits + (bits & 1), "{bits:x}");
            assert_eq!(to_half(middle.next_up()), if bits < 0x8000 { bits + 1 } else { bits }, "{bits:x}");
        }
        assert_eq!((to_half(65519.9), to_half(65520.0), to_half(-1e9)), (0x7bff, 0x7c00, 0xfc00));
        assert_eq!((to_brain(1.0 + 1.0 / 256.0), to_brain(1.0 + 3.0 / 256.0)), (0x3f80, 0x3f82));
    }

    #[test]
    fn every_type_in_both_places() {
        let expected = [1.5f32, -0.25];
        let raw = |bytes: Vec<u8>, kind| floats(&TensorProto { raw_data: Some(bytes), ..tensor(kind, &[2]) });
        assert_eq!(raw(expected.iter().flat_map(|v| v.to_le_bytes()).collect(), data_type::FLOAT), expected);
        let doubles = expected.iter().flat_map(|&v| f64::from(v).to_le_bytes()).collect();
        assert_eq!(raw(doubles, data_type::DOUBLE), expected);
        assert_eq!(raw(vec![0x00, 0x3e, 0x00, 0xb4], data_type::FLOAT16), expected);
        assert_eq!(raw(vec![0xc0, 0x3f, 0x80, 0xbe], data_type::BFLOAT16), expected);
        let field = TensorProto { float_data: expected.to_vec(), ..tensor(data_type::FLOAT, &[2]) };
        assert_eq!(floats(&field), expected);
        let field = TensorProto { int32_data: vec![0x3e00, 0xb400], ..tensor(data_type::FLOAT16, &[2]) };
        assert_eq!(floats(&field), expected);
        let ints = TensorProto { int64_data: vec![-1, 400], ..tensor(data_type::INT64, &[2]) };
        assert_eq!(read(&ints).unwrap(), Constant::Ints(Tensor { dims: vec![2], values: vec![-1, 400] }));
    }

    #[test]
    fn half_precision_at_its_edges() {
        assert_eq!(half(0x0001), 2f32.powi(-24));
        assert_eq!(half(0x7bff), 65504.0);
        assert_eq!(half(0x0400), 2f32.powi(-14));
        assert_eq!(half(0xfc00), f32::NEG_INFINITY);
        assert!(half(0x7e00).is_nan());
    }

    #[test]
    fn tensors_that_lie_about_their_size_are_errors() {
        let short = TensorProto { raw_data: Some(vec![0; 7]), ..tensor(data_type::FLOAT, &[2]) };
        assert!(read(&short).is_err());
        assert!(read(&tensor(data_type::FLOAT, &[1 << 40, 1 << 40])).is_err());
        assert!(read(&tensor(data_type::FLOAT, &[-1])).is_err());
        assert!(read(&tensor(data_type::FLOAT, &[101])).is_err());
        assert!(read(&tensor(8, &[1])).is_err());
        let external = TensorProto { data_location: Some(1), ..tensor(data_type::FLOAT, &[1]) };
        assert!(read(&external).unwrap_err().to_string().contains("one file"));
    }
}
