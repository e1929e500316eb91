//! Attention as one node (opset 23): softmax of scaled products of queries and keys, times values.

use super::constant::{Constant, Tensor};
use super::import::{Importer, Value, finite};
use super::nodes::Inputs;
use super::proto::NodeProto;
use crate::graph::{Binary, Structure};
use crate::layout::Activation;
use crate::{Error, Result};

/// The keys that every query sees because of its place alone: those before it, or near it. `None` if it sees all.
fn window(node: &NodeProto, queries: usize, keys: usize) -> Result<Option<Tensor<i64>>> {
    let (left, mut right) = (node.int("left_window_size", -1), node.int("right_window_size", -1));
    if node.int("is_causal", 0) != 0 {
        right = 0;
    }
    if left < 0 && right < 0 {
        return Ok(None);
    }
    super::constant::size(&[queries, keys])?;
    let seen = |k: usize| {
        let ahead = (k % keys) as i64 - (k / keys) as i64;
        i64::from((right < 0 || ahead <= right) && (left < 0 || -ahead <= left))
    };
    Ok(Some(Tensor { dims: vec![queries, keys], values: (0..queries * keys).map(seen).collect() }))
}

impl Importer<'_> {
    pub(super) fn attention(&mut self, node: &NodeProto, inputs: &Inputs<'_>) -> Result<Value> {
        for (k, what) in [(4, "past keys"), (5, "past values"), (6, "a number of keys that counts")] {
            if inputs.get(k).is_some() {
                return Err(Error::unsupported(
                    format!("attention with {what}"),
                    "export the network without a cache and with all tokens at once",
                ));
            }
        }
        let rank = self.dims(inputs.value(0)?).len();
        let heads = |name: &str| usize::try_from(node.int(name, 0)).unwrap_or(0);
        let queries = self.heads(inputs.value(0)?, heads("q_num_heads"))?;
        let keys = self.heads(inputs.value(1)?, heads("kv_num_heads"))?;
        let values = self.heads(inputs.value(2)?, heads("kv_num_heads"))?;
        let &[_, count, length, width] = &self.dims(&queries)[..] else {
            return Err(Error::shape("queries", "batch × heads × tokens × width", format!("{rank} axes")));
        };
        let (keys, values) = (self.shared(&keys, count)?, self.shared(&values, count)?);
        let default = 1.0 / (width as f32).sqrt();
        let scale = node.attribute("scale").and_then(|a| a.f).filter(|&s| s != 0.0).unwrap_or(default);
        let turned = self.transpose(&keys, &[0, 1, 3, 2])?;
        let products = self.structure(Structure::MatMul, &[queries, turned])?;
        let mut scores = self.with(Binary::Multiply, &products, scale)?;
        let places = self.dims(&scores)[3];
        let cap = node.float("softcap", 0.0);
        if cap != 0.0 {
            let small = self.with(Binary::Divide, &scores, cap)?;
            let bent = self.activate(&small, Activation::Tanh)?;
            scores = self.with(Binary::Multiply, &bent, cap)?;
        }
        let mut seen = window(node, length, places)?;
        match inputs.get(3) {
            None => {}
            Some(Value::Constant(mask, _)) if matches!(**mask, Constant::Ints(_)) => {
                let Constant::Ints(mask) = &**mask else { return Ok(scores) };
                seen = Some(match seen {
                    Some(seen) => seen.zip(mask, |a, b| Some(i64::from(a != 0 && b != 0)))?,
                    None => mask.map(|v| i64::from(v != 0)),
                });
            }
            Some(mask) => scores = self.masked(&scores, mask)?,
        }
        let Some(seen) = seen else {
            let weights = self.structure(Structure::Softmax { axis: 3 }, &[scores])?;
            return self.mixed(weights, values, rank);
        };
        let hidden = seen.map(|v| if v != 0 { 0.0 } else { finite(f32::NEG_INFINITY) });
        let hidden = self.constant(Constant::Floats(hidden), false)?;
        scores = self.structure(Structure::Binary(Binary::Add), &[scores, hidden])?;
        let mut weights = self.structure(Structure::Softmax { axis: 3 }, &[scores])?;
        // A query that sees no key gives zeros.
        let keys = seen.dims.last().copied().unwrap_or(1).max(1);
        let sees: Vec<f32> = seen.values.chunks(keys).map(|row| f32::from(row.iter().any(|&v| v != 0))).collect();
        if sees.contains(&0.0) {
            let mut dims = seen.dims.clone();
            dims.pop();
            dims.push(1);
            let sees = self.constant(Constant::Floats(Tensor { dims, values: sees }), false)?;
            weights = self.structure(Structure::Binary(Binary::Multiply), &[weights, sees])?;
        }
        self.mixed(weights, values, rank)
    }

    /// The values, averaged with the weights of attention, in the form in which the queries were given.
    fn mixed(&mut self, weights: Value, values: Value, rank: usize) -> Result<Value> {
        let out = self.structure(Structure::MatMul, &[weights, values])?;
        if rank == 4 {
            return Ok(out);
        }
        let &[batch, count, length, each] = &self.dims(&out)[..] else { return Ok(out) };
        let together = self.transpose(&out, &[0, 2, 1, 3])?;
        self.reshape(&together, &[batch, length, count * each])
    }

    /// Tokens × (heads · width) as heads × tokens × width; a value that already has that form stays.
    fn heads(&mut self, value: &Value, heads: usize) -> Result<Value> {
        match self.dims(value)[..] {
            [_, _, _, _] => Ok(value.clone()),
            [batch, length, width] if heads > 0 && width.is_multiple_of(heads) => {
                let apart = self.reshape(value, &[batch, length, heads, width / heads])?;
                self.transpose(&apart, &[0, 2, 1, 3])
            }
            ref dims => Err(Error::shape("attention", "tokens of a width that the heads divide", format!("{dims:?}"))),
        }
    }

    /// Keys or values that several heads share, repeated for each of these heads.
    fn shared(&mut self, value: &Value, heads: usize) -> Result<Value> {
        let &[batch, own, length, width] = &self.dims(value)[..] else { return Ok(value.clone()) };
        if own == heads || own == 0 || !heads.is_multiple_of(own) {
            return Ok(value.clone());
        }
        let apart = self.reshape(value, &[batch, own, 1, length, width])?;
        let each = self.expand(&apart, &[batch, own, heads / own, length, width])?;
        self.reshape(&each, &[batch, heads, length, width])
    }

    /// Truth values say which keys count; other numbers are added to the scores.
    fn masked(&mut self, scores: &Value, mask: &Value) -> Result<Value> {
        let hidden = finite(f32::NEG_INFINITY);
        match mask {
            Value::Constant(constant, w) => {
                let added = self.constant(Constant::Floats(constant.to_floats().map(|v| v.max(hidden))), *w)?;
                self.structure(Structure::Binary(Binary::Add), &[scores.clone(), added])
            }
            Value::Node(id) if self.whole.contains(id) => {
                let hidden = self.number(hidden)?;
                self.structure(Structure::Select, &[mask.clone(), scores.clone(), hidden])
            }
            _ => self.binary(Binary::Add, scores, mask),
        }
    }
}
