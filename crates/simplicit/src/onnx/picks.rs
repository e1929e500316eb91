//! Values at constant places, chosen or overwritten. The numbers of the places are moved in the same way as the
//! values, which shows where every number of the result comes from.

use super::constant::{Constant, Tensor, size};
use super::import::{Importer, Value};
use super::nodes::Inputs;
use super::proto::NodeProto;
use crate::graph::Structure;
use crate::{Error, Result};

impl Importer<'_> {
    /// The sample chooses numbers from a line of constants, which is a table with rows of width one.
    fn looked_up(&mut self, node: &NodeProto, line: &Value, indices: &Value) -> Result<Value> {
        let dims = self.dims(line);
        let axis = super::constant::place(node.int("axis", 0), dims.len())?;
        if dims.iter().product::<usize>() != dims[axis] {
            return Err(Error::unsupported(
                "a choice that depends on the sample",
                "only numbers of a constant line, or rows of a constant table (an embedding), may be chosen by the sample",
            ));
        }
        let table = self.reshape(line, &[dims[axis], 1])?;
        let chosen = self.structure(Structure::Lookup, &[table, indices.clone()])?;
        let of = self.dims(indices);
        self.reshape(&chosen, &of)
    }

    /// GatherND, GatherElements and ScatterND on values of the sample; `None` if all are constants.
    pub(super) fn picked(&mut self, node: &NodeProto, inputs: &Inputs<'_>) -> Result<Option<Value>> {
        let (data, updates) = (inputs.value(0)?, inputs.get(2));
        if let (Value::Constant(..), indices @ Value::Node(_), "GatherElements") =
            (data, inputs.value(1)?, node.op_type.as_str())
        {
            return self.looked_up(node, data, indices).map(Some);
        }
        if ![Some(data), updates].into_iter().flatten().any(|v| matches!(v, Value::Node(_))) {
            return Ok(None);
        }
        if node.op_type == "ScatterND" && node.text("reduction", "none") != "none" {
            return Err(Error::unsupported(
                format!(
                    "ScatterND with reduction {:?} of values that depend on the sample",
                    node.text("reduction", "none")
                ),
                "only values that replace others are read",
            ));
        }
        let mut first = 0i64;
        let mut places = |dims: Vec<usize>| -> Result<Value> {
            let next = first + size(&dims)? as i64;
            let values = (first..next).collect();
            first = next;
            Ok(Value::Constant(Constant::Ints(Tensor { dims, values }).into(), false))
        };
        let mut moved = inputs.0.to_vec();
        let mut flat = Vec::new();
        for (k, value) in [(0, Some(data)), (2, updates)] {
            let Some(value) = value else { continue };
            let dims = self.dims(value);
            flat.push(self.reshape(value, &[1, dims.iter().product()])?);
            moved[k] = Some(places(dims)?);
        }
        let from = self.evaluate(node, &Inputs(&moved))?;
        let Value::Constant(from, _) = &from else { return Ok(None) };
        let Constant::Ints(Tensor { dims, values }) = &**from else { return Ok(None) };
        let values: Vec<usize> = values.iter().map(|&v| v as usize).collect();
        let all = self.concat(&flat, 1)?;
        let chosen = self.gather(&all, 1, &values, &[values.len()])?;
        self.reshape(&chosen, dims).map(Some)
    }
}
