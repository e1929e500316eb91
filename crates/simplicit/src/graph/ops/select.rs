//! Chooses between two values, number by number, by a third one.

use super::Value;
use super::loops::{Loops, broadcast, repeated};
use crate::Result;
use crate::graph::Dims;

pub(super) fn dims(condition: Dims, a: Dims, b: Dims) -> Result<Dims> {
    let values = broadcast("a selection", a.sizes(), b.sizes())?;
    broadcast("a selection", condition.sizes(), values.sizes())
}

/// The places of all three for every number of the result.
fn walk([condition, a, b]: [Dims; 3], visit: impl FnMut([usize; 3])) {
    if let Ok(out) = dims(condition, a, b) {
        Loops::new(out.sizes(), [condition, a, b].map(|dims| repeated(dims, out))).each(visit);
    }
}

/// Anything but zero chooses the first value. The other one is not read, so it may be infinite.
pub(super) fn forward([condition, a, b]: [Value<'_>; 3], out: &mut [f32]) {
    let mut out = out.iter_mut();
    walk([condition.dims, a.dims, b.dims], |[c, i, j]| {
        if let Some(out) = out.next() {
            *out = if condition.data[c] != 0.0 { a.data[i] } else { b.data[j] };
        }
    });
}

/// The chosen number receives the gradient; the condition has none.
pub(super) fn adjoint(
    [condition, a, b]: [Value<'_>; 3],
    dout: &[f32],
    mut da: Option<&mut [f32]>,
    mut db: Option<&mut [f32]>,
) {
    let mut dout = dout.iter();
    walk([condition.dims, a.dims, b.dims], |[c, i, j]| {
        let Some(d) = dout.next() else { return };
        if condition.data[c] != 0.0 {
            da.iter_mut().for_each(|da| da[i] += d);
        } else {
            db.iter_mut().for_each(|db| db[j] += d);
        }
    });
}
