//! Operators with a kernel of their own on a GPU; the others run on the CPU.

use crate::Result;
use crate::backend::cuda::{Pairwise, Products, Session, UnitMap, Values};
use crate::graph::{Binary, Dims, Reduction, Structure, Value};
use crate::layout::Operator;

/// Numbers of units up to here are exact in single precision.
const NAMED: usize = 1 << 24;

/// The ways in which an operator runs on the device.
pub(super) enum DeviceOperator {
    /// Every unit of the result is a unit of an operand, or zero.
    Pick(Vec<UnitMap>),
    Pairwise(Pairwise, [UnitMap; 2]),
    Products(Products),
    /// Units of the axis, and the distance from one to the next.
    Softmax(usize, usize),
    /// Number of units of the mean, and ε.
    Normalise(usize, f32),
    /// Sums of units of the operand, times a factor; the map is that of the transpose.
    Sum(UnitMap, f32),
}

/// Where an operator that only moves units takes each of them from: for every unit of the result, 1 + the number of
/// its unit, counted through all operands; 0 where it has none.
fn moved(structure: &Structure, dims: &[Dims]) -> Option<Vec<i32>> {
    let result = structure.dims(dims).ok()?;
    if dims.iter().map(|d| d.size()).sum::<usize>() >= NAMED {
        return None;
    }
    let mut next = 0;
    let numbered: Vec<Vec<f32>> = dims
        .iter()
        .map(|d| {
            let first = next;
            next += d.size();
            (first..next).map(|unit| (unit + 1) as f32).collect()
        })
        .collect();
    let values: Vec<Value> = dims.iter().zip(&numbered).map(|(dims, data)| Value { dims: *dims, data }).collect();
    let mut out = vec![0.0; result.size()];
    structure.forward(&values, &mut out);
    Some(out.into_iter().map(|unit| unit as i32).collect())
}

impl DeviceOperator {
    /// The operator with its maps on the device; `None` if it has no kernel.
    pub(super) fn new(session: &Session, operator: &Operator) -> Result<Option<Self>> {
        let Operator::Structure { structure, operands } = operator else { return Ok(None) };
        let dims: Vec<Dims> = operands.iter().map(|o| o.dims).collect();
        let sizes = |axes: &[usize]| axes.iter().product::<usize>();
        Ok(match (structure, &dims[..]) {
            (Structure::Pad { value, .. }, _) if *value != 0.0 => None,
            (
                Structure::Transpose { .. }
                | Structure::Reshape { .. }
                | Structure::Slice { .. }
                | Structure::Gather { .. }
                | Structure::Expand { .. }
                | Structure::Concat { .. }
                | Structure::Pad { .. },
                _,
            ) => {
                let Some(units) = moved(structure, &dims) else { return Ok(None) };
                let mut first = 0;
                let mut maps = Vec::with_capacity(dims.len());
                for d in &dims {
                    let own = |unit: &i32| {
                        let unit = *unit - 1 - first;
                        if (0..d.size() as i32).contains(&unit) { unit } else { -1 }
                    };
                    maps.push(session.unit_map(&units.iter().map(own).collect::<Vec<_>>(), d.size())?);
                    first += d.size() as i32;
                }
                Some(Self::Pick(maps))
            }
            (Structure::Binary(binary), &[a, b]) => {
                let kind = match binary {
                    Binary::Add => Pairwise::Add,
                    Binary::Subtract => Pairwise::Subtract,
                    Binary::Multiply => Pairwise::Multiply,
                    Binary::Divide => Pairwise::Divide,
                    Binary::Power | Binary::Maximum | Binary::Minimum | Binary::Greater => return Ok(None),
                };
                let result = structure.dims(&dims)?;
                let repeated = |x: Dims| {
                    let units = moved(&Structure::Expand { dims: result }, &[x]).filter(|u| u.len() == result.size());
                    units.map(|u| session.unit_map(&u.iter().map(|unit| unit - 1).collect::<Vec<_>>(), x.size()))
                };
                match (repeated(a), repeated(b)) {
                    (Some(a), Some(b)) => Some(Self::Pairwise(kind, [a?, b?])),
                    _ => None,
                }
            }
            (Structure::MatMul, &[a, b]) => match (a.sizes(), b.sizes()) {
                ([x @ .., rows, depth], [y @ .., _, cols]) if x == y => {
                    Some(Self::Products(Products { rows: *rows, depth: *depth, cols: *cols }))
                }
                _ => None,
            },
            (Structure::Softmax { axis }, &[x]) => Some(Self::Softmax(x.sizes()[*axis], sizes(&x.sizes()[axis + 1..]))),
            (Structure::Normalise { axis, epsilon }, &[x]) => {
                Some(Self::Normalise(sizes(&x.sizes()[*axis..]), *epsilon))
            }
            (Structure::Reduce { reduction, axes, keep }, &[x]) => {
                if !matches!(reduction, Reduction::Sum | Reduction::Mean) || x.size() >= NAMED {
                    return Ok(None);
                }
                // The transpose of a sum gives every unit of the operand the number of the result that it belongs to.
                let result = structure.dims(&dims)?;
                let sum = Structure::Reduce { reduction: Reduction::Sum, axes: axes.clone(), keep: *keep };
                let (data, out) = (vec![0.0; x.size()], vec![0.0; result.size()]);
                let numbers: Vec<f32> = (0..result.size()).map(|unit| unit as f32).collect();
                let mut units = vec![0.0; x.size()];
                sum.adjoint(
                    &[Value { dims: x, data: &data }],
                    Value { dims: result, data: &out },
                    &numbers,
                    &mut [Some(&mut units)],
                );
                let each = x.size() / result.size().max(1);
                let factor = if *reduction == Reduction::Mean { 1.0 / each.max(1) as f32 } else { 1.0 };
                let units: Vec<i32> = units.into_iter().map(|unit| unit as i32).collect();
                Some(Self::Sum(session.unit_map(&units, result.size())?, factor))
            }
            _ => None,
        })
    }

    /// Whether the change of its value is its value for the change of its operands.
    pub(super) fn is_linear(&self) -> bool {
        match self {
            Self::Pick(_) | Self::Sum(..) | Self::Pairwise(Pairwise::Add | Pairwise::Subtract, _) => true,
            Self::Pairwise(..) | Self::Products(_) | Self::Softmax(..) | Self::Normalise(..) => false,
        }
    }

    /// The value, from operands with a channel per unit; it has `units` units.
    pub(super) fn forward(&self, session: &Session, x: &[&Values], units: usize) -> Result<Values> {
        match (self, x) {
            (Self::Pick(maps), _) => {
                let out = session.no_values(units, x.first().map_or(0, |x| x.count), 1)?;
                for (x, map) in x.iter().zip(maps) {
                    session.pick(&out, x, map, 1.0)?;
                }
                Ok(out)
            }
            (Self::Pairwise(kind, maps), &[a, b]) => session.pairwise(*kind, [a, b], maps),
            (Self::Products(sizes), &[a, b]) => session.products_of(a, b, *sizes),
            (Self::Softmax(size, inner), &[x]) => session.softmax(x, *size, *inner),
            (Self::Normalise(size, epsilon), &[x]) => session.normalised(x, *size, *epsilon),
            (Self::Sum(map, factor), &[x]) => {
                let out = session.no_values(units, x.count, 1)?;
                session.pick_back(&out, x, map, *factor)?;
                Ok(out)
            }
            _ => Err(crate::Error::shape("operands", "those of the operator", x.len())),
        }
    }

    /// Adds the contributions of the value's cotangent to the cotangents of those operands for which they are asked.
    pub(super) fn pull_back(
        &self,
        session: &Session,
        x: &[&Values],
        (y, dy): (&Values, &Values),
        into: &[Option<&Values>],
    ) -> Result<()> {
        match (self, x, into) {
            (Self::Pick(maps), _, _) => {
                for (dx, map) in into.iter().zip(maps) {
                    if let Some(dx) = dx {
                        session.pick_back(dx, dy, map, 1.0)?;
                    }
                }
                Ok(())
            }
            (Self::Pairwise(kind, maps), &[a, b], _) => {
                for (side, dx) in into.iter().enumerate() {
                    if let Some(dx) = dx {
                        session.pairwise_back(*kind, side, dx, dy, [a, b], maps)?;
                    }
                }
                Ok(())
            }
            (Self::Products(sizes), &[a, b], &[da, db]) => session.products_back([da, db], dy, [a, b], *sizes),
            (Self::Softmax(size, inner), _, &[Some(dx)]) => session.softmax_back(dx, y, dy, *size, *inner),
            (Self::Normalise(size, epsilon), &[x], &[Some(dx)]) => {
                session.normalised_back(dx, [x, y], dy, *size, *epsilon)
            }
            (Self::Sum(map, factor), _, &[Some(dx)]) => session.pick(dx, dy, map, *factor),
            _ => Ok(()),
        }
    }
}
