//! Matrix products over the last two axes.

use super::Value;
use super::loops::{AXES, Loops, broadcast, repeated};
use crate::graph::Dims;
use crate::linalg::{View, gemm};
use crate::{Error, Result};

/// The sizes of one product, and the places of all products.
struct Plan {
    rows: usize,
    depth: usize,
    cols: usize,
    /// The matrices of a and b that are multiplied with each other, in the order of the results.
    batches: Loops<2>,
}

/// A vector on the left is a row, one on the right a column; that axis is dropped again.
pub(super) fn dims(a: Dims, b: Dims) -> Result<Dims> {
    let what = "a product of two values";
    let (x, y) = (a.sizes(), b.sizes());
    let (Some((&depth, left)), Some(_)) = (x.split_last(), y.split_last()) else {
        return Err(Error::shape(what, "values with an axis", format!("{a:?} and {b:?}")));
    };
    let (inner, right) = match *y {
        [.., depth, cols] => (depth, Some(cols)),
        _ => (y[0], None),
    };
    if depth != inner {
        let expected = format!("{depth} rows, as the first one has columns ({a:?})");
        return Err(Error::shape(format!("second value of {what}"), expected, format!("{b:?}")));
    }
    let batches = broadcast(what, &x[..x.len().saturating_sub(2)], &y[..y.len().saturating_sub(2)])?;
    let mut sizes = batches.sizes().to_vec();
    sizes.extend(left.last());
    sizes.extend(right);
    Dims::new(&sizes)
}

fn plan(a: Dims, b: Dims) -> Result<Plan> {
    let (x, y) = (a.sizes(), b.sizes());
    let (left, depth) = x.split_at(x.len().saturating_sub(1));
    let cols = if y.len() > 1 { y[y.len() - 1] } else { 1 };
    let (x, y) = (&x[..x.len().saturating_sub(2)], &y[..y.len().saturating_sub(2)]);
    let (rows, depth) = (left.last().copied().unwrap_or(1), depth.first().copied().unwrap_or(1));
    // If b is one matrix for all of a's, their rows are treated as one long matrix.
    if y.iter().product::<usize>() == 1 {
        let rows = x.iter().product::<usize>() * rows;
        return Ok(Plan { rows, depth, cols, batches: Loops::new(&[], [[0; AXES]; 2]) });
    }
    let (x, y) = (Dims::new(x)?, Dims::new(y)?);
    let out = broadcast("a product of two values", x.sizes(), y.sizes())?;
    Ok(Plan { rows, depth, cols, batches: Loops::new(out.sizes(), [repeated(x, out), repeated(y, out)]) })
}

impl Plan {
    /// Calls `visit` with a's matrix, b's matrix and the number of the result.
    fn each(&self, mut visit: impl FnMut(usize, usize, usize)) {
        let mut done = 0;
        self.batches.each(|[i, j]| {
            visit(i * self.rows * self.depth, j * self.depth * self.cols, done * self.rows * self.cols);
            done += 1;
        });
    }

    fn a<'a>(&self, data: &'a [f32], at: usize) -> View<'a, f32> {
        View::new(&data[at..at + self.rows * self.depth], self.rows, self.depth, self.depth)
    }

    fn b<'a>(&self, data: &'a [f32], at: usize) -> View<'a, f32> {
        View::new(&data[at..at + self.depth * self.cols], self.depth, self.cols, self.cols)
    }

    fn out<'a>(&self, data: &'a [f32], at: usize) -> View<'a, f32> {
        View::new(&data[at..at + self.rows * self.cols], self.rows, self.cols, self.cols)
    }

    fn is_empty(&self) -> bool {
        self.rows == 0 || self.depth == 0 || self.cols == 0
    }
}

pub(super) fn forward(a: Value<'_>, b: Value<'_>, out: &mut [f32]) {
    let Ok(plan) = plan(a.dims, b.dims) else { return };
    if plan.is_empty() {
        return out.fill(0.0);
    }
    plan.each(|i, j, k| {
        let out = &mut out[k..k + plan.rows * plan.cols];
        gemm(out, plan.cols, false, 1.0, plan.a(a.data, i), plan.b(b.data, j));
    });
}

/// da += dout·bᵀ, db += aᵀ·dout.
pub(super) fn adjoint([a, b]: [Value<'_>; 2], dout: &[f32], mut da: Option<&mut [f32]>, mut db: Option<&mut [f32]>) {
    let Ok(plan) = plan(a.dims, b.dims) else { return };
    if plan.is_empty() {
        return;
    }
    plan.each(|i, j, k| {
        let dout = plan.out(dout, k);
        if let Some(da) = &mut da {
            let da = &mut da[i..i + plan.rows * plan.depth];
            gemm(da, plan.depth, true, 1.0, dout, plan.b(b.data, j).t());
        }
        if let Some(db) = &mut db {
            let db = &mut db[j..j + plan.depth * plan.cols];
            gemm(db, plan.cols, true, 1.0, plan.a(a.data, i).t(), dout);
        }
    });
}
