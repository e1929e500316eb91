//! Prices of weights: how much each weight adds to the global certificate.

use super::reach::{FEW, Stages, reach};
use crate::layout::Source;
use crate::linalg::Matrix;
use crate::model::{ImplicitModel, TapBlock, TapWeights, Target};
use crate::{Error, Result};

/// What one unit of |weight| adds to the global certificate's constant, averaged over pairs of classes: the derivative of
/// |C_i − C_j|(I−|A|)⁻¹|B| + |D_i − D_j| is rows ⊗ columns.
#[derive(Debug, Clone, PartialEq)]
pub struct Sensitivity {
    /// How strongly the differences of outputs depend on each pre-activation or output: n states, then q outputs.
    pub rows: Vec<f64>,
    /// How far each state or input moves: n states, then p inputs.
    pub columns: Vec<f64>,
    /// For every tap block the derivative by each of its weights, summed over the positions that use it: output
    /// channels × columns; empty for a residual sum.
    pub taps: Vec<Matrix>,
}

/// The prices of a model whose inputs in raw·scale units are divided by `std`; an error where a cycle is not shown to
/// contract.
///
/// With shared weights |C_i − C_j| is bounded by |C_i| + |C_j|, and a maximum is taken to move as much as the input
/// that moves most.
pub fn sensitivity(model: &ImplicitModel, std: &[f64]) -> Result<Sensitivity> {
    model.require_no_operators("prices by the certificate")?;
    let shape = model.shape();
    if std.len() != shape.inputs {
        return Err(Error::shape("std", format!("{} values", shape.inputs), std.len()));
    }
    if !model.taps().is_empty() {
        return layered(model, std);
    }
    let stages = Stages::new(model)?;
    let inverse: Vec<f64> = std.iter().map(|s| 1.0 / s).collect();
    let reach = reach(&stages, &inverse);
    let q = shape.outputs;
    // Mean of |C_i − C_j| over pairs, then back along every path: the same sums on the transposed model.
    let c = model.c().to_dense();
    let pairs = (q * q.saturating_sub(1) / 2).max(1) as f64;
    let mut rows = vec![0.0; shape.states];
    for i in 0..q {
        for j in 0..i {
            rows.iter_mut().enumerate().for_each(|(k, r)| *r += f64::from((c[(i, k)] - c[(j, k)]).abs()) / pairs);
        }
    }
    for stage in stages.stages.iter().rev() {
        // In a cycle a few dozen steps are accurate enough for a price.
        let turns = if stage.cycle.is_some() { FEW } else { 1 };
        let mut fresh: Vec<f64> = stage.units.iter().map(|&i| rows[i]).collect();
        for _ in 0..turns {
            let mut next = vec![0.0; fresh.len()];
            for (&i, r) in stage.units.iter().zip(&fresh) {
                for (j, w) in model.a().row(i) {
                    let more = f64::from(w.abs()) * r;
                    rows[j] += more;
                    if let Ok(k) = stage.units.binary_search(&j) {
                        next[k] += more;
                    }
                }
            }
            fresh = next;
        }
    }
    rows.extend(std::iter::repeat_n(2.0 / q.max(1) as f64, q));
    let columns = reach.into_iter().chain(inverse).collect();
    Ok(Sensitivity { rows, columns, taps: Vec::new() })
}

/// Layer by layer: reach forwards, its transpose backwards, and their products summed over positions.
fn layered(model: &ImplicitModel, std: &[f64]) -> Result<Sensitivity> {
    let layout = model.layout();
    if let Some(layer) = layout.layers().iter().find(|l| !l.activation.is_non_expansive()) {
        return Err(Error::unsupported(
            format!("prices by the certificate through layer {:?} with activation {}", layer.name, layer.activation),
            "they need non-expansive activations, such as relu, clip or tanh",
        ));
    }
    let shape = model.shape();
    let (n, q) = (shape.states, shape.outputs);
    let from = |source: Source| match source {
        Source::Layer(k) => layout.range(k),
        Source::Input => n..n + shape.inputs,
    };
    let mut columns: Vec<f32> = vec![0.0; n];
    columns.extend(std.iter().map(|s| (1.0 / s) as f32));
    let order = model.layer_order();
    for &k in &order {
        let mut sums = vec![0.0f32; layout.layers()[k].size];
        for block in model.summands(Target::Layer(k)) {
            let values = operands(&block, &columns[from(block.source)]);
            for_uses(&block, |o, _, w, to, at| sums[unit(&block, o, to)] += w.abs() * values[values.len() - 1][at]);
        }
        columns[layout.range(k)].copy_from_slice(&sums);
    }
    let mut rows = vec![0.0f32; n];
    rows.extend(std::iter::repeat_n(2.0 / q.max(1) as f32, q));
    let targets = std::iter::once(Target::Output).chain(order.iter().rev().map(|&k| Target::Layer(k)));
    for target in targets {
        let own = match target {
            Target::Layer(k) => layout.range(k),
            Target::Output => n..n + q,
        };
        let own = rows[own].to_vec();
        for block in model.summands(target) {
            let Source::Layer(source) = block.source else { continue };
            let values = operands(&block, &columns[from(block.source)]);
            let mut cotangent = vec![0.0f32; block.input.size()];
            for_uses(&block, |o, _, w, to, at| cotangent[at] += w.abs() * own[unit(&block, o, to)]);
            for (map, x) in block.maps.iter().zip(&values).rev() {
                let mut below = vec![0.0f32; x.len()];
                map.pull_back(x, &cotangent, &mut below);
                cotangent = below;
            }
            rows[layout.range(source)].iter_mut().zip(&cotangent).for_each(|(r, c)| *r += c);
        }
    }
    let price = |block: &TapBlock| {
        let TapWeights::Taps(_) = &block.weights else { return Matrix::zeros(0, 0) };
        let values = operands(block, &columns[from(block.source)]);
        let operand = &values[values.len() - 1];
        let first = match block.target {
            Target::Layer(k) => layout.range(k).start,
            Target::Output => n,
        };
        let mut price = Matrix::zeros(block.output.channels, block.columns());
        let mut add = |o: usize, j: usize, to: usize, at: usize| {
            price[(o, j)] += f64::from(rows[first + unit(block, o, to)]) * f64::from(operand[at]);
        };
        for o in 0..block.output.channels {
            block.group_columns(o).for_each(|j| for_positions(block, j, |to, at| add(o, j, to, at)));
        }
        price
    };
    let taps = model.taps().iter().map(price).collect();
    let wide = |values: Vec<f32>| values.into_iter().map(f64::from).collect();
    Ok(Sensitivity { rows: wide(rows), columns: wide(columns), taps })
}

/// The source's values, and the result of each of the block's poolings.
fn operands(block: &TapBlock, source: &[f32]) -> Vec<Vec<f32>> {
    let mut values = vec![source.to_vec()];
    for map in &block.maps {
        let size = map.output().map_or(0, |m| m.size());
        let mut out = vec![0.0; size];
        map.apply(&values[values.len() - 1], &mut out);
        values.push(out);
    }
    values
}

/// The unit of output channel o at a position.
fn unit(block: &TapBlock, o: usize, position: usize) -> usize {
    o * block.output.positions() + position
}

/// Calls `visit` for every use of every weight, with output channel, column, weight, output position and unit of the
/// operand.
fn for_uses(block: &TapBlock, mut visit: impl FnMut(usize, usize, f32, usize, usize)) {
    let positions = block.output.positions().max(1);
    match &block.weights {
        TapWeights::Taps(taps) => {
            for o in 0..taps.rows() {
                taps.row(o).for_each(|(j, w)| for_positions(block, j, |to, at| visit(o, j, w, to, at)));
            }
        }
        _ => (0..block.output.size()).for_each(|u| visit(u / positions, 0, block.unit_factor(u), u % positions, u)),
    }
}

/// Calls `visit` for every use of a column of taps, with output position and unit of the operand.
fn for_positions(block: &TapBlock, column: usize, mut visit: impl FnMut(usize, usize)) {
    let ([sy, sx], [top, left, ..]) = (block.window.stride, block.window.padding);
    let (c, [dy, dx]) = block.window.tap(column);
    for oy in block.window.inside(0, dy, block.input.height, block.output.height) {
        for ox in block.window.inside(1, dx, block.input.width, block.output.width) {
            let at = (oy * sy + dy - top) * block.input.width + ox * sx + dx - left;
            visit(oy * block.output.width + ox, c * block.input.positions() + at);
        }
    }
}
