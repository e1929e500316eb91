//! The inputs and outputs that a file declares: the input for the sample, the sizes of one sample, and numbers for
//! the other inputs.

use super::constant::{Constant, Tensor};
use super::proto::{DimensionProto, DimensionValue, ValueInfoProto, data_type};
use crate::graph::Dims;
use crate::{Error, Result};

/// The only input or output, or the one that was asked for.
pub(super) fn choose<'v>(all: &[&'v ValueInfoProto], name: Option<&str>, what: &str) -> Result<&'v ValueInfoProto> {
    let names: Vec<&str> = all.iter().map(|i| i.name.as_str()).collect();
    match (name, all) {
        (Some(name), _) => all.iter().find(|i| i.name == name).copied().ok_or_else(|| {
            Error::setting(format!("--{what}"), format!("one of the {what}s {names:?}"), format!("{name:?}"))
        }),
        (None, [only]) => Ok(only),
        (None, _) => Err(Error::unsupported(
            format!("a network with the {what}s {names:?}"),
            match what {
                "input" => "choose one by its name (--input NAME), and fill the others (--fill NAME=NUMBER,…)".into(),
                _ => format!("choose one by its name (--{what} NAME)"),
            },
        )),
    }
}

/// The axes that a file declares for an input, if it does.
fn declared(input: &ValueInfoProto) -> Option<&[DimensionProto]> {
    let tensor = input.kind.as_ref()?.tensor_type.as_ref()?;
    Some(&tensor.shape.as_ref()?.dim)
}

/// Whether an input has fractional numbers; assumed where the file does not say.
pub(super) fn is_float(input: &ValueInfoProto) -> bool {
    let kind = input.kind.as_ref().and_then(|k| k.tensor_type.as_ref()).and_then(|t| t.elem_type);
    let floats = [data_type::FLOAT, data_type::FLOAT16, data_type::DOUBLE, data_type::BFLOAT16];
    kind.is_none_or(|kind| floats.contains(&kind))
}

/// The size of an axis, where the file fixes it.
fn fixed(dim: &DimensionProto) -> Option<usize> {
    match dim.value {
        Some(DimensionValue::Value(v)) => usize::try_from(v).ok().filter(|&v| v > 0),
        _ => None,
    }
}

/// The axes as the file declares them: sizes, or names in their place.
fn described(dims: &[DimensionProto]) -> String {
    let name = |dim: &DimensionProto| match &dim.value {
        Some(DimensionValue::Param(name)) if !name.is_empty() => name.clone(),
        Some(DimensionValue::Value(v)) => v.to_string(),
        _ => "?".to_string(),
    };
    dims.iter().map(name).collect::<Vec<_>>().join(" × ")
}

/// The stored batch size, if any, and the dimensions of a batch of one sample.
pub(super) fn input_dims(input: &ValueInfoProto, given: Option<&[usize]>) -> Result<(Option<usize>, Vec<usize>)> {
    let what = || format!("input {:?}", input.name);
    let Some(dims) = declared(input) else {
        let sizes = given.ok_or_else(|| {
            Error::shape(what(), "sizes of its axes; say those of one sample (--input-shape 3x224x224)", "none")
        })?;
        return Ok((None, [&[1], sizes].concat()));
    };
    let [batch, rest @ ..] = dims else {
        return Err(Error::shape(what(), "a tensor with its shape, batch first", "a single number"));
    };
    if rest.is_empty() {
        return Err(Error::shape(what(), "batch × features or batch × channels × height × width", "one axis"));
    }
    let got = || described(dims);
    let sizes = match given {
        // A leading 1 for the batch is allowed.
        Some([1, sizes @ ..]) if sizes.len() == rest.len() => Some(sizes),
        given => given,
    };
    let Some(sizes) = sizes else {
        let sizes: Option<Vec<usize>> = rest.iter().map(fixed).collect();
        let open = || {
            let example: Vec<String> = rest.iter().map(|d| fixed(d).map_or("N".into(), |v| v.to_string())).collect();
            let expected = format!(
                "a fixed size of every axis but the batch; say the sizes of one sample (--input-shape {} with numbers for N)",
                example.join("x")
            );
            Error::shape(what(), expected, got())
        };
        return Ok((fixed(batch), [vec![1], sizes.ok_or_else(open)?].concat()));
    };
    let fits =
        sizes.len() == rest.len() && rest.iter().zip(sizes).all(|(dim, &size)| fixed(dim).is_none_or(|v| v == size));
    if !fits {
        let shown: Vec<String> = sizes.iter().map(ToString::to_string).collect();
        let expected = format!("the sizes of one sample of the {} of {}, the batch left out", got(), what());
        return Err(Error::setting("--input-shape", expected, shown.join("x")));
    }
    Ok((fixed(batch), [&[1], sizes].concat()))
}

/// The other inputs, which are filled with one number each. An axis with the same name as one of the sample's has the
/// same size.
pub(super) fn filled_inputs<'a>(
    inputs: &[&'a ValueInfoProto],
    sample: &ValueInfoProto,
    dims: &[usize],
    fill: &[(String, f32)],
) -> Result<Vec<(&'a str, Constant)>> {
    let own: Vec<(&str, usize)> = declared(sample)
        .unwrap_or_default()
        .iter()
        .zip(dims)
        .filter_map(|(dim, &size)| match &dim.value {
            Some(DimensionValue::Param(name)) => Some((name.as_str(), size)),
            _ => None,
        })
        .collect();
    // A name with different sizes, such as "?", gives no size.
    let of_name = |name: &str| {
        let (_, size) = own.iter().find(|(own, _)| *own == name)?;
        own.iter().all(|(own, other)| *own != name || other == size).then_some(*size)
    };
    let mut out = Vec::new();
    for (name, value) in fill {
        let Some(input) = inputs.iter().find(|i| i.name == *name && i.name != sample.name) else {
            let others: Vec<&str> = inputs.iter().map(|i| i.name.as_str()).filter(|n| *n != sample.name).collect();
            let expected = format!("one of the inputs beside {:?}, which are {others:?}", sample.name);
            return Err(Error::setting("--fill", expected, format!("{name:?}")));
        };
        let axes = declared(input).unwrap_or_default();
        let size = |(axis, dim): (usize, &DimensionProto)| {
            let named = match &dim.value {
                Some(DimensionValue::Param(name)) => of_name(name),
                _ => fixed(dim),
            };
            // The batch comes first, and is one sample.
            named.or((axis == 0).then_some(1)).ok_or_else(|| {
                let expected = "axes with fixed sizes, or with names that the sample's axes have";
                Error::shape(format!("--fill: input {name:?}, axis {axis}"), expected, described(axes))
            })
        };
        let dims = axes.iter().enumerate().map(size).collect::<Result<Vec<_>>>()?;
        let count = Dims::new(&dims).map_err(|e| e.within(&format!("input {name:?}")))?.size();
        let constant = if is_float(input) {
            Constant::Floats(Tensor { dims, values: vec![*value; count] })
        } else if value.fract() == 0.0 {
            Constant::Ints(Tensor { dims, values: vec![*value as i64; count] })
        } else {
            return Err(Error::setting("--fill", format!("a whole number for input {name:?}"), value));
        };
        out.push((input.name.as_str(), constant));
    }
    Ok(out)
}
