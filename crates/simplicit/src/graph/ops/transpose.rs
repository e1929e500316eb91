//! Axes in another order.

use super::loops::{AXES, Loops};
use crate::graph::Dims;
use crate::{Error, Result};

/// The side of squares that stay in the first-level cache, in whichever direction they are walked.
const SQUARE: usize = 16;

pub(super) fn dims(order: &[usize], x: Dims) -> Result<Dims> {
    let mut seen = [false; AXES];
    let all = order.len() == x.rank()
        && order.iter().all(|&axis| axis < x.rank() && !std::mem::replace(&mut seen[axis], true));
    if !all {
        return Err(Error::shape(
            "order of a transposition",
            format!("every axis of {x:?} once"),
            format!("{order:?}"),
        ));
    }
    Dims::new(&order.iter().map(|&axis| x.sizes()[axis]).collect::<Vec<_>>())
}

/// Loops in the order of the result over places of x and of the result.
fn loops(order: &[usize], x: Dims) -> Loops<2> {
    let (mut sizes, mut from, mut to) = ([1; AXES], [1; AXES], [1; AXES]);
    let own = x.strides();
    for (k, &axis) in order.iter().enumerate() {
        (sizes[k], from[k]) = (x.sizes()[axis], own[axis]);
    }
    for k in (0..order.len().saturating_sub(1)).rev() {
        to[k] = to[k + 1] * sizes[k + 1];
    }
    Loops::new(&sizes[..order.len()], [from, to])
}

/// Calls `run` with places of x and of the result at which equal runs of values start. If the last axis moved, calls
/// `one` with every pair of places instead, square by square.
#[inline(always)]
fn each(order: &[usize], x: Dims, mut run: impl FnMut(usize, usize, usize), mut one: impl FnMut(usize, usize)) {
    let loops = loops(order, x);
    let (n, [from, _]) = loops.inner();
    let neighbours = (0..loops.rank()).find(|&axis| loops.axis(axis).1[0] == 1);
    let Some(across) = neighbours.filter(|_| from != 1) else {
        return loops.outer().each(|[i, o]| run(i, o, n));
    };
    let (m, [_, to]) = loops.axis(across);
    loops.outer().without(across).each(|[i, o]| {
        for top in (0..m).step_by(SQUARE) {
            for left in (0..n).step_by(SQUARE) {
                for r in top..(top + SQUARE).min(m) {
                    for c in left..(left + SQUARE).min(n) {
                        one(i + r + c * from, o + r * to + c);
                    }
                }
            }
        }
    });
}

pub(super) fn forward(order: &[usize], x: Dims, data: &[f32], out: &mut [f32]) {
    // Both calls write; a cell lets them share the result.
    let out = std::cell::Cell::from_mut(out).as_slice_of_cells();
    each(
        order,
        x,
        |i, o, n| out[o..o + n].iter().zip(&data[i..i + n]).for_each(|(o, &x)| o.set(x)),
        |i, o| out[o].set(data[i]),
    );
}

pub(super) fn adjoint(order: &[usize], x: Dims, dout: &[f32], dx: &mut [f32]) {
    let dx = std::cell::Cell::from_mut(dx).as_slice_of_cells();
    each(
        order,
        x,
        |i, o, n| dx[i..i + n].iter().zip(&dout[o..o + n]).for_each(|(a, &d)| a.set(a.get() + d)),
        |i, o| dx[i].set(dx[i].get() + dout[o]),
    );
}
