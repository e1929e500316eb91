//! Functions of every number and of two values, folded into the linear map before them where that is possible.

use super::constant::{Constant, Tensor, broadcast};
use super::import::{Importer, Value};
use crate::graph::{Binary, Structure, Unary};
use crate::network::Op;
use crate::{Error, Result};

impl Importer<'_> {
    pub(super) fn unary(&mut self, unary: Unary, value: &Value) -> Result<Value> {
        if let (Value::Constant(constant, _), Unary::Negative | Unary::Absolute) = (value, unary)
            && let Constant::Ints(tensor) = &**constant
        {
            let f = if unary == Unary::Negative { i64::wrapping_neg } else { i64::wrapping_abs };
            return self.constant(Constant::Ints(tensor.map(f)), false);
        }
        let structure = Structure::Unary(unary);
        let out = self.structure(structure.clone(), std::slice::from_ref(value))?;
        self.recognised(&structure, std::slice::from_ref(value), out)
    }

    pub(super) fn binary(&mut self, binary: Binary, a: &Value, b: &Value) -> Result<Value> {
        if let (Value::Constant(x, _), Value::Constant(y, _)) = (a, b)
            && let (Constant::Ints(x), Constant::Ints(y)) = (&**x, &**y)
        {
            let out = x.zip(y, |a, b| integers(binary, a, b))?;
            return self.constant(Constant::Ints(out), false);
        }
        let structure = Structure::Binary(binary);
        let out = match (a, b) {
            (Value::Node(x), Value::Constant(c, _)) => self.with_constant(binary, *x, c, false)?,
            (Value::Constant(c, _), Value::Node(x)) => self.with_constant(binary, *x, c, true)?,
            (Value::Node(x), Value::Node(y)) if binary == Binary::Add && self.dims(a) == self.dims(b) => {
                Some(Value::Node(self.builder.push_add(*x, *y)?))
            }
            (Value::Node(x), Value::Node(y)) if binary == Binary::Divide => self.layer_norm(*x, *y)?,
            _ => None,
        };
        let out = match out {
            Some(out) => out,
            None => self.structure(structure.clone(), &[a.clone(), b.clone()])?,
        };
        self.recognised(&structure, &[a.clone(), b.clone()], out)
    }

    /// A function of a value and a constant where it is simpler than a function of two values; `first` says whether
    /// the constant comes first.
    fn with_constant(
        &mut self,
        binary: Binary,
        node: usize,
        constant: &Constant,
        first: bool,
    ) -> Result<Option<Value>> {
        let value = Value::Node(node);
        let dims = self.dims(&value);
        let tensor = constant.to_floats();
        if tensor.values.is_empty() || broadcast(&dims, &tensor.dims)? != dims {
            return Ok(None);
        }
        let all = |number: f32| tensor.values.iter().all(|&v| v == number);
        match binary {
            Binary::Add if all(0.0) => return Ok(Some(value)),
            Binary::Subtract if !first && all(0.0) => return Ok(Some(value)),
            Binary::Multiply if all(1.0) => return Ok(Some(value)),
            Binary::Divide | Binary::Power if !first && all(1.0) => return Ok(Some(value)),
            Binary::Power if !first && all(2.0) => {
                return self.binary(Binary::Multiply, &value, &value).map(Some);
            }
            Binary::Power if !first && all(0.5) => return self.unary(Unary::Sqrt, &value).map(Some),
            Binary::Power | Binary::Maximum | Binary::Minimum => return Ok(None),
            Binary::Divide if first => return Ok(None),
            _ => {}
        }
        let scale_shift = |v: f64| match (binary, first) {
            (Binary::Add, _) => (1.0, v),
            (Binary::Subtract, false) => (1.0, -v),
            (Binary::Subtract, true) => (-1.0, v),
            (Binary::Multiply, _) => (v, 0.0),
            _ => (1.0 / v, 0.0),
        };
        let over = |axis: usize| along(&tensor, &dims, axis).map(|v| v.into_iter().map(scale_shift).unzip());
        let finite = |pair: &(Vec<f64>, Vec<f64>)| pair.0.iter().chain(&pair.1).all(|v| (*v as f32).is_finite());
        if self.dense.contains_key(&node)
            && let Some((scale, shift)) = over(dims.len() - 1).filter(finite)
        {
            return self.scaled_dense(node, scale, shift);
        }
        let is_channel_wise = dims.len() >= 2 && dims[0] == 1;
        if !is_channel_wise {
            return Ok(None);
        }
        let mut source = node;
        while let (Op::Reshape, [input]) = (self.builder.op(source), self.builder.inputs(source)) {
            source = *input;
        }
        let folds = match self.builder.op(source) {
            Op::Linear { .. } | Op::Convolution { .. } => self.builder.shape_of(source).channels() == dims[1],
            // The normalisation of the samples, or anything else that is written as a batch norm.
            Op::Input | Op::ScaleShift { .. } => matches!(dims.len(), 2 | 4),
            _ => tensor.values.len() > 1 && matches!(dims.len(), 2 | 4),
        };
        match over(1).filter(|pair| folds && finite(pair)) {
            Some((scale, shift)) => self.scale_channels(&value, scale, shift).map(Some),
            None => Ok(None),
        }
    }
}

/// One number per place along an axis, if the constant varies along no other one.
fn along(tensor: &Tensor<f32>, dims: &[usize], axis: usize) -> Option<Vec<f64>> {
    let lead = dims.len().checked_sub(tensor.dims.len())?;
    let varies = (0..dims.len()).any(|k| k != axis && k >= lead && tensor.dims[k - lead] != 1);
    if varies {
        return None;
    }
    let mut values = tensor.values.iter().map(|&v| f64::from(v));
    match tensor.values.len() {
        1 => values.next().map(|v| vec![v; dims[axis]]),
        n if n == dims[axis] => Some(values.collect()),
        _ => None,
    }
}

fn integers(binary: Binary, a: i64, b: i64) -> Option<i64> {
    match binary {
        Binary::Add => a.checked_add(b),
        Binary::Subtract => a.checked_sub(b),
        Binary::Multiply => a.checked_mul(b),
        Binary::Divide => a.checked_div(b),
        Binary::Power => u32::try_from(b).ok().and_then(|b| a.checked_pow(b)),
        Binary::Maximum => Some(a.max(b)),
        Binary::Minimum => Some(a.min(b)),
        Binary::Greater => Some(i64::from(a > b)),
    }
}

impl Importer<'_> {
    /// (x − mean)/√(mean of squares + ε), written as several nodes, is a layer norm.
    fn layer_norm(&mut self, centred: usize, root: usize) -> Result<Option<Value>> {
        let Some((x, axis, epsilon)) = self.written_out_norm(centred, root) else { return Ok(None) };
        self.structure(Structure::Normalise { axis, epsilon }, &[Value::Node(x)]).map(Some)
    }

    fn written_out_norm(&self, centred: usize, root: usize) -> Option<(usize, usize, f32)> {
        let builder = &self.builder;
        let binary = |node: usize, wanted: Binary| match (builder.op(node), builder.inputs(node)) {
            (Op::Structure(Structure::Binary(b)), &[x, y]) if *b == wanted => Some((x, y)),
            _ => None,
        };
        let mean = |node: usize| match (builder.op(node), builder.inputs(node)) {
            (Op::Structure(Structure::Reduce { reduction: crate::graph::Reduction::Mean, axes, keep: true }), &[x]) => {
                let rank = builder.shape_of(x).dims().rank();
                let first = *axes.first()?;
                (axes.len() == rank - first).then_some((x, first))
            }
            _ => None,
        };
        let (x, average) = binary(centred, Binary::Subtract)?;
        let (averaged, axis) = mean(average)?;
        let Op::Structure(Structure::Unary(Unary::Sqrt)) = builder.op(root) else { return None };
        let (variance, small) = binary(*builder.inputs(root).first()?, Binary::Add)?;
        let Op::Constant { values, .. } = builder.op(small) else { return None };
        let (squares, over) = mean(variance)?;
        let same = averaged == x && over == axis && binary(squares, Binary::Multiply)? == (centred, centred);
        match values[..] {
            [epsilon] if same && epsilon >= 0.0 => Some((x, axis, epsilon)),
            _ => None,
        }
    }

    /// An error that says that an operator only works on constants.
    pub(super) fn only_constants(what: &str) -> Error {
        Error::unsupported(
            format!("{what} of values that depend on the sample"),
            "it is computed for constants and shapes only",
        )
    }
}
