//! Tap blocks of a model for Python: shapes as they are, numbers lent.

use numpy::PyArray1;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use simplicit::layout::MapShape;
use simplicit::model::{TapBlock, TapWeights, Target};
use simplicit::network::Source;

use crate::errors::of_any;
use crate::model::{Model, lend};

/// indptr, indices and data.
type Taps<'py> = (Bound<'py, PyArray1<usize>>, Bound<'py, PyArray1<u32>>, Bound<'py, PyArray1<f32>>);

/// The blocks of a model, in its order.
pub(crate) fn blocks<'py>(owner: &Bound<'py, Model>) -> PyResult<Vec<Bound<'py, PyDict>>> {
    owner.get().model.taps().iter().map(|block| entry(owner, block)).collect()
}

fn entry<'py>(owner: &Bound<'py, Model>, block: &TapBlock) -> PyResult<Bound<'py, PyDict>> {
    let size = |s: MapShape| (s.channels, s.height, s.width);
    let out = PyDict::new(owner.py());
    out.set_item("letter", format!("{:?}", block.letter()))?;
    let target = if let Target::Layer(k) = block.target { Some(k) } else { None };
    out.set_item("target", target)?;
    let source = if let Source::Layer(k) = block.source { Some(k) } else { None };
    out.set_item("source", source)?;
    out.set_item("maps", serde_json::to_string(&block.maps).map_err(|e| of_any(&e.into()))?)?;
    out.set_item("kernel", <(usize, usize)>::from(block.window.kernel))?;
    out.set_item("stride", <(usize, usize)>::from(block.window.stride))?;
    out.set_item("padding", <(usize, usize, usize, usize)>::from(block.window.padding))?;
    out.set_item("input", size(block.input))?;
    out.set_item("output", size(block.output))?;
    let taps: Option<Taps<'py>> = match &block.weights {
        TapWeights::Taps(taps) => {
            Some((lend(owner, taps.indptr())?, lend(owner, taps.indices())?, lend(owner, taps.data())?))
        }
        TapWeights::Identity | TapWeights::Diagonal(_) => None,
    };
    out.set_item("taps", taps)?;
    let factors = match &block.weights {
        TapWeights::Diagonal(factors) => Some(lend(owner, factors)?),
        TapWeights::Taps(_) | TapWeights::Identity => None,
    };
    out.set_item("factors", factors)?;
    Ok(out)
}
