//! Operators that move values: joining, cutting, padding, choosing, repeating, and reading under other dimensions.

use super::Value;
use super::loops::{Loops, around, repeated, require_axis};
use crate::graph::Dims;
use crate::{Error, Result};

/// The same dimensions with another size of one axis.
fn resized(dims: Dims, axis: usize, size: usize) -> Result<Dims> {
    let mut sizes = dims.sizes().to_vec();
    sizes[axis] = size;
    Dims::new(&sizes)
}

fn add(into: &mut [f32], from: &[f32]) {
    into.iter_mut().zip(from).for_each(|(a, b)| *a += b);
}

pub(super) mod concat {
    use super::*;

    pub(in super::super) fn dims(axis: usize, inputs: &[Dims]) -> Result<Dims> {
        let Some(&first) = inputs.first() else {
            return Err(Error::shape("a concatenation", "at least one value", "none"));
        };
        require_axis("a concatenation", axis, first)?;
        let mut total = 0usize;
        for &dims in inputs {
            let alike = dims.rank() == first.rank()
                && (0..first.rank()).all(|k| k == axis || dims.sizes()[k] == first.sizes()[k]);
            if !alike {
                let expected = format!("{first:?} but for axis {axis}");
                return Err(Error::shape("a value of a concatenation", expected, format!("{dims:?}")));
            }
            total = total.saturating_add(dims.sizes()[axis]);
        }
        resized(first, axis, total)
    }

    pub(in super::super) fn forward(axis: usize, inputs: &[Value<'_>], out: &mut [f32]) {
        let whole: usize = inputs.iter().map(|x| run(axis, x.dims)).sum();
        let mut before = 0;
        for x in inputs {
            let run = run(axis, x.dims);
            if run > 0 {
                let rows = out.chunks_exact_mut(whole).zip(x.data.chunks_exact(run));
                rows.for_each(|(out, x)| out[before..before + run].copy_from_slice(x));
            }
            before += run;
        }
    }

    pub(in super::super) fn adjoint(axis: usize, inputs: &[Value<'_>], dout: &[f32], into: &mut [Option<&mut [f32]>]) {
        let whole: usize = inputs.iter().map(|x| run(axis, x.dims)).sum();
        let mut before = 0;
        for (x, dx) in inputs.iter().zip(into) {
            let run = run(axis, x.dims);
            if let (Some(dx), true) = (dx, run > 0) {
                let rows = dout.chunks_exact(whole).zip(dx.chunks_exact_mut(run));
                rows.for_each(|(d, dx)| add(dx, &d[before..before + run]));
            }
            before += run;
        }
    }

    /// Number of values of one input that lie side by side in the result.
    fn run(axis: usize, dims: Dims) -> usize {
        dims.sizes()[axis..].iter().product()
    }
}

pub(super) mod slice {
    use super::*;

    pub(in super::super) fn dims(axis: usize, start: usize, step: i64, count: usize, x: Dims) -> Result<Dims> {
        require_axis("a slice", axis, x)?;
        let size = x.sizes()[axis];
        let last = i128::from(step) * (count as i128 - 1) + start as i128;
        let inside = |place: i128| (0..size as i128).contains(&place);
        if step == 0 || count > 0 && !(inside(start as i128) && inside(last)) {
            let expected = format!("places of axis {axis}, which has {size}");
            return Err(Error::shape("a slice", expected, format!("{count} from {start} on in steps of {step}")));
        }
        resized(x, axis, count)
    }

    /// Calls `visit` with places of x and of the result where runs of `inner` values correspond.
    fn each(axis: usize, start: usize, step: i64, count: usize, x: Dims, mut visit: impl FnMut(usize, usize, usize)) {
        let (outer, size, inner) = around(x, axis);
        for o in 0..outer {
            let mut place = start as i64;
            for k in 0..count {
                visit((o * size + place as usize) * inner, (o * count + k) * inner, inner);
                place = place.wrapping_add(step);
            }
        }
    }

    pub(in super::super) fn forward(
        (axis, start, step, count): (usize, usize, i64, usize),
        x: Value<'_>,
        out: &mut [f32],
    ) {
        each(axis, start, step, count, x.dims, |i, o, n| out[o..o + n].copy_from_slice(&x.data[i..i + n]));
    }

    pub(in super::super) fn adjoint(
        (axis, start, step, count): (usize, usize, i64, usize),
        x: Dims,
        dout: &[f32],
        dx: &mut [f32],
    ) {
        each(axis, start, step, count, x, |i, o, n| add(&mut dx[i..i + n], &dout[o..o + n]));
    }
}

pub(super) mod pad {
    use super::*;

    pub(in super::super) fn dims(padding: &[[usize; 2]], value: f32, x: Dims) -> Result<Dims> {
        if padding.len() != x.rank() {
            let expected = format!("{}, one for every axis of {x:?}", x.rank());
            return Err(Error::shape("pairs of a padding", expected, padding.len()));
        }
        if !value.is_finite() {
            return Err(Error::setting("value of a padding", "a finite number", value));
        }
        let size = |(&size, p): (&usize, &[usize; 2])| size.saturating_add(p[0]).saturating_add(p[1]);
        Dims::new(&x.sizes().iter().zip(padding).map(size).collect::<Vec<_>>())
    }

    /// Calls `visit` with places of x and of the result where runs of values correspond.
    fn each(padding: &[[usize; 2]], x: Dims, out: Dims, mut visit: impl FnMut(usize, usize, usize)) {
        let steps = out.strides();
        let first: usize = padding.iter().zip(steps).map(|(p, step)| p[0] * step).sum();
        let loops = Loops::new(x.sizes(), [x.strides(), steps]);
        // If the last axis has size 1 and is padded, there are no runs.
        match loops.inner() {
            (n, [1, 1]) => loops.outer().each(|[i, o]| visit(i, first + o, n)),
            _ => loops.each(|[i, o]| visit(i, first + o, 1)),
        }
    }

    pub(in super::super) fn forward(padding: &[[usize; 2]], value: f32, x: Value<'_>, out: &mut [f32]) {
        out.fill(value);
        let Ok(dims) = dims(padding, value, x.dims) else { return };
        each(padding, x.dims, dims, |i, o, n| out[o..o + n].copy_from_slice(&x.data[i..i + n]));
    }

    pub(in super::super) fn adjoint(padding: &[[usize; 2]], x: Dims, out: Dims, dout: &[f32], dx: &mut [f32]) {
        each(padding, x, out, |i, o, n| add(&mut dx[i..i + n], &dout[o..o + n]));
    }
}

pub(super) mod gather {
    use super::*;

    pub(in super::super) fn dims(axis: usize, indices: &[usize], of: Dims, x: Dims) -> Result<Dims> {
        require_axis("a choice of values", axis, x)?;
        if indices.len() != of.size() {
            return Err(Error::shape("indices of a choice of values", format!("{of:?}"), indices.len()));
        }
        let size = x.sizes()[axis];
        if let Some(bad) = indices.iter().find(|k| **k >= size) {
            return Err(Error::shape("index of a choice of values", format!("below {size}, axis {axis}"), bad));
        }
        let sizes = [&x.sizes()[..axis], of.sizes(), &x.sizes()[axis + 1..]].concat();
        Dims::new(&sizes)
    }

    fn each(axis: usize, indices: &[usize], x: Dims, mut visit: impl FnMut(usize, usize, usize)) {
        let (outer, size, inner) = around(x, axis);
        for o in 0..outer {
            for (k, &index) in indices.iter().enumerate() {
                visit((o * size + index) * inner, (o * indices.len() + k) * inner, inner);
            }
        }
    }

    pub(in super::super) fn forward(axis: usize, indices: &[usize], x: Value<'_>, out: &mut [f32]) {
        each(axis, indices, x.dims, |i, o, n| out[o..o + n].copy_from_slice(&x.data[i..i + n]));
    }

    pub(in super::super) fn adjoint(axis: usize, indices: &[usize], x: Dims, dout: &[f32], dx: &mut [f32]) {
        each(axis, indices, x, |i, o, n| add(&mut dx[i..i + n], &dout[o..o + n]));
    }
}

pub(super) mod lookup {
    use super::*;

    pub(in super::super) fn dims(table: Dims, chosen: Dims) -> Result<Dims> {
        let &[_, width] = table.sizes() else {
            return Err(Error::shape("a table", "rows × width", format!("{table:?}")));
        };
        Dims::new(&[chosen.sizes(), &[width]].concat())
    }

    /// The row that a number chooses; negative numbers count from the end.
    pub(in super::super) fn row(number: f32, rows: usize) -> Option<usize> {
        let number = f64::from(number);
        let row = if number < 0.0 { number + rows as f64 } else { number };
        (row >= 0.0 && row < rows as f64 && row.fract() == 0.0).then_some(row as usize)
    }

    /// A number that chooses no row gives NaN: a table cannot refuse one sample, and its outputs must not look right.
    pub(in super::super) fn forward(table: Value<'_>, chosen: &[f32], out: &mut [f32]) {
        let &[rows, width] = table.dims.sizes() else { return };
        if width == 0 {
            return;
        }
        for (&number, out) in chosen.iter().zip(out.chunks_exact_mut(width)) {
            match row(number, rows) {
                Some(k) => out.copy_from_slice(&table.data[k * width..(k + 1) * width]),
                None => out.fill(f32::NAN),
            }
        }
    }

    /// The table's rows receive the cotangent; the numbers that choose them have none.
    pub(in super::super) fn adjoint(table: Dims, chosen: &[f32], dout: &[f32], dtable: &mut [f32]) {
        let &[rows, width] = table.sizes() else { return };
        if width == 0 {
            return;
        }
        for (&number, d) in chosen.iter().zip(dout.chunks_exact(width)) {
            if let Some(k) = row(number, rows) {
                add(&mut dtable[k * width..(k + 1) * width], d);
            }
        }
    }
}

pub(super) mod expand {
    use super::*;

    pub(in super::super) fn dims(to: Dims, x: Dims) -> Result<Dims> {
        let before = to.rank().checked_sub(x.rank());
        let fits = before.is_some_and(|before| {
            x.sizes().iter().zip(&to.sizes()[before..]).all(|(&size, &to)| size == 1 || size == to)
        });
        if fits {
            Ok(to)
        } else {
            Err(Error::shape("a repetition", format!("sizes of 1 or of {to:?}"), format!("{x:?}")))
        }
    }

    pub(in super::super) fn forward(to: Dims, x: Value<'_>, out: &mut [f32]) {
        let loops = Loops::new(to.sizes(), [repeated(x.dims, to)]);
        let (n, [step]) = loops.inner();
        let mut done = 0;
        loops.outer().each(|[i]| {
            let out = &mut out[done..done + n];
            if step == 0 {
                out.fill(x.data[i])
            } else {
                out.copy_from_slice(&x.data[i..i + n])
            }
            done += n;
        });
    }

    pub(in super::super) fn adjoint(to: Dims, x: Dims, dout: &[f32], dx: &mut [f32]) {
        let loops = Loops::new(to.sizes(), [repeated(x, to)]);
        let (n, [step]) = loops.inner();
        let mut done = 0;
        loops.outer().each(|[i]| {
            let d = &dout[done..done + n];
            if step == 0 {
                dx[i] += d.iter().map(|&d| f64::from(d)).sum::<f64>() as f32;
            } else {
                add(&mut dx[i..i + n], d);
            }
            done += n;
        });
    }
}
