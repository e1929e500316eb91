//! Activations that exporters write as several nodes (GELU, SiLU, …), recognised by what they compute.
//!
//! For every value that is a function of one other value, number by number, the function's values at a few fixed
//! points are computed. If they agree with an activation, the value is that activation, however an exporter has
//! written it.

use std::collections::HashMap;

use super::import::{Importer, Value};
use crate::Result;
use crate::graph::{Dims, Structure, Value as Operand};
use crate::layout::Activation;

/// Number of fixed points.
const POINTS: usize = 32;

/// The most sources that a value is followed back to.
const MAX_SOURCES: usize = 12;

/// Relative and absolute distance within which two functions are the same. The two forms of GELU differ by 5e-4; constants
/// that were rounded to half precision move a GELU by up to 5e-5.
const TOLERANCE: f32 = 1e-4;

/// A value as a function of another one.
#[derive(Debug, Clone)]
struct Profile {
    source: usize,
    values: [f32; POINTS],
}

/// Functions of values that are known, by node.
#[derive(Debug, Default)]
pub(super) struct Profiles {
    known: HashMap<usize, Vec<Profile>>,
}

fn points() -> [f32; POINTS] {
    // Points at uneven distances, with a few values far from zero.
    let mut points = std::array::from_fn(|k| (k as f32 - 15.3) * 0.411);
    (points[0], points[1], points[POINTS - 1]) = (-21.5, -12.25, 19.75);
    points
}

impl Profiles {
    /// A value as a function of itself and of the values before it.
    fn of(&self, node: usize) -> Vec<Profile> {
        let own = Profile { source: node, values: points() };
        std::iter::once(own).chain(self.known.get(&node).into_iter().flatten().cloned()).collect()
    }
}

impl Importer<'_> {
    /// If `out` = `structure`(inputs) is an activation of some value, that activation; else `out` itself.
    pub(super) fn recognised(&mut self, structure: &Structure, inputs: &[Value], out: Value) -> Result<Value> {
        let Value::Node(node) = out else { return Ok(out) };
        if inputs.iter().any(|v| matches!(v, Value::Node(x) if *x == node)) {
            return Ok(out);
        }
        // A single number is the same at all points.
        let number = |value: &Value| match value {
            Value::Constant(constant, _) if constant.len() == 1 => constant.to_floats().values.first().copied(),
            _ => None,
        };
        let Ok(dims) = Dims::new(&[POINTS]) else { return Ok(out) };
        let run = |operands: &[&[f32]]| {
            let operands: Vec<Operand<'_>> = operands.iter().map(|data| Operand { dims, data }).collect();
            let mut values = [0.0; POINTS];
            structure.forward(&operands, &mut values);
            values
        };
        let mut profiles = Vec::new();
        match inputs {
            [Value::Node(x)] => {
                for p in self.profiles.of(*x) {
                    profiles.push(Profile { source: p.source, values: run(&[&p.values]) });
                }
            }
            [Value::Node(x), Value::Node(y)] => {
                let others = self.profiles.of(*y);
                for p in self.profiles.of(*x) {
                    if let Some(q) = others.iter().find(|q| q.source == p.source) {
                        profiles.push(Profile { source: p.source, values: run(&[&p.values, &q.values]) });
                    }
                }
            }
            [Value::Node(x), c] => {
                if let Some(c) = number(c) {
                    for p in self.profiles.of(*x) {
                        profiles.push(Profile { source: p.source, values: run(&[&p.values, &[c; POINTS]]) });
                    }
                }
            }
            [c, Value::Node(x)] => {
                if let Some(c) = number(c) {
                    for p in self.profiles.of(*x) {
                        profiles.push(Profile { source: p.source, values: run(&[&[c; POINTS], &p.values]) });
                    }
                }
            }
            _ => {}
        }
        profiles.truncate(MAX_SOURCES);
        let found = profiles.iter().find_map(|p| Some((p.source, activation_of(&p.values)?)));
        self.profiles.known.insert(node, profiles);
        match found {
            Some((source, activation)) if self.builder.shape_of(source) == self.builder.shape_of(node) => {
                self.activate(&Value::Node(source), activation)
            }
            _ => Ok(out),
        }
    }

    /// Remembers that `out` = φ(`value`).
    pub(super) fn remember(&mut self, value: &Value, activation: Activation, out: &Value) {
        if let (Value::Node(x), Value::Node(node)) = (value, out) {
            let mut profiles = self.profiles.of(*x);
            profiles.iter_mut().for_each(|p| activation.apply_slice(&mut p.values));
            profiles.truncate(MAX_SOURCES);
            self.profiles.known.insert(*node, profiles);
        }
    }
}

/// The activation with these values at the points.
fn activation_of(values: &[f32; POINTS]) -> Option<Activation> {
    super::activations::WRITTEN_OUT.into_iter().find(|activation| {
        points().iter().zip(values).all(|(&x, &v)| {
            let y = activation.apply(x);
            (v - y).abs() <= TOLERANCE * (1.0 + y.abs())
        })
    })
}
