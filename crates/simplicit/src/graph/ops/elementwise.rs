//! Functions of one number and of two.

use super::loops::{Loops, broadcast, repeated};
use super::{Binary, Unary, Value};
use crate::Result;
use crate::graph::Dims;
use crate::graph::error_function::erf_slice;
use crate::kernels::elementary::exp_slice;

impl Unary {
    pub(super) fn forward(self, x: &[f32], out: &mut [f32]) {
        fn each(x: &[f32], out: &mut [f32], f: impl Fn(f32) -> f32) {
            out.iter_mut().zip(x).for_each(|(o, &x)| *o = f(x));
        }
        match self {
            Unary::Sqrt => each(x, out, f32::sqrt),
            Unary::Exp => {
                out.copy_from_slice(x);
                exp_slice(out);
            }
            Unary::Log => each(x, out, f32::ln),
            Unary::Erf => erf_slice(x, out),
            Unary::Negative => each(x, out, |x| -x),
            Unary::Absolute => each(x, out, f32::abs),
            Unary::Reciprocal => each(x, out, |x| 1.0 / x),
            Unary::Sine => each(x, out, f32::sin),
            Unary::Cosine => each(x, out, f32::cos),
        }
    }

    /// At the kink of |x| the derivative is the one from the left, as everywhere in this library.
    pub(super) fn adjoint(self, x: &[f32], out: &[f32], dout: &[f32], dx: &mut [f32]) {
        fn each(x: &[f32], out: &[f32], dout: &[f32], dx: &mut [f32], slope: impl Fn(f32, f32) -> f32) {
            let values = x.iter().zip(out).zip(dout);
            dx.iter_mut().zip(values).for_each(|(dx, ((&x, &y), &d))| *dx += d * slope(x, y));
        }
        match self {
            Unary::Sqrt => each(x, out, dout, dx, |_, y| 0.5 / y),
            Unary::Exp => each(x, out, dout, dx, |_, y| y),
            Unary::Log => each(x, out, dout, dx, |x, _| 1.0 / x),
            Unary::Erf => each(x, out, dout, dx, |x, _| std::f32::consts::FRAC_2_SQRT_PI * (-x * x).exp()),
            Unary::Negative => each(x, out, dout, dx, |_, _| -1.0),
            Unary::Absolute => each(x, out, dout, dx, |x, _| if x > 0.0 { 1.0 } else { -1.0 }),
            Unary::Reciprocal => each(x, out, dout, dx, |_, y| -y * y),
            Unary::Sine => each(x, out, dout, dx, |x, _| x.cos()),
            Unary::Cosine => each(x, out, dout, dx, |x, _| -x.sin()),
        }
    }
}

#[inline]
fn power(x: f32, y: f32) -> f32 {
    if y == 2.0 { x * x } else { x.powf(y) }
}

/// A NaN is returned if there is one, as in ONNX; of two equal numbers the first.
#[inline]
fn larger(x: f32, y: f32) -> f32 {
    if y > x || y.is_nan() { y } else { x }
}

#[inline]
fn smaller(x: f32, y: f32) -> f32 {
    if y < x || y.is_nan() { y } else { x }
}

impl Binary {
    pub(super) fn dims(a: Dims, b: Dims) -> Result<Dims> {
        broadcast("a function of two values", a.sizes(), b.sizes())
    }

    pub(super) fn forward(self, a: Value<'_>, b: Value<'_>, out_dims: Dims, out: &mut [f32]) {
        match self {
            Binary::Add => apply(a, b, out_dims, out, |x, y| x + y),
            Binary::Subtract => apply(a, b, out_dims, out, |x, y| x - y),
            Binary::Multiply => apply(a, b, out_dims, out, |x, y| x * y),
            Binary::Divide => apply(a, b, out_dims, out, |x, y| x / y),
            Binary::Power => apply(a, b, out_dims, out, power),
            Binary::Maximum => apply(a, b, out_dims, out, larger),
            Binary::Minimum => apply(a, b, out_dims, out, smaller),
            Binary::Greater => apply(a, b, out_dims, out, |x, y| f32::from(x > y)),
        }
    }

    /// At a tie of a maximum or minimum the first value receives all of the cotangent. The derivative of 0ᵇ by b is
    /// taken as 0.
    pub(super) fn adjoint(
        self,
        [a, b]: [Value<'_>; 2],
        out_dims: Dims,
        dout: &[f32],
        da: Option<&mut [f32]>,
        db: Option<&mut [f32]>,
    ) {
        let of = Pull { a, b, out_dims, dout };
        match self {
            Binary::Add => of.both(da, |_, _| 1.0, db, |_, _| 1.0),
            Binary::Subtract => of.both(da, |_, _| 1.0, db, |_, _| -1.0),
            Binary::Multiply => of.both(da, |_, y| y, db, |x, _| x),
            Binary::Divide => of.both(da, |_, y| 1.0 / y, db, |x, y| -x / y / y),
            Binary::Power => of.both(
                da,
                |x, y| if y == 0.0 { 0.0 } else { y * power(x, y - 1.0) },
                db,
                |x, y| if x == 0.0 { 0.0 } else { power(x, y) * x.ln() },
            ),
            Binary::Maximum => {
                of.both(da, |x, y| f32::from(!(y > x || y.is_nan())), db, |x, y| f32::from(y > x || y.is_nan()))
            }
            Binary::Minimum => {
                of.both(da, |x, y| f32::from(!(y < x || y.is_nan())), db, |x, y| f32::from(y < x || y.is_nan()))
            }
            Binary::Greater => {}
        }
    }
}

impl Binary {
    /// The effect of changes of both values on the result: slopes at every place, each value repeated as the result
    /// needs it.
    pub(super) fn tangent(self, [a, b]: [Value<'_>; 2], [da, db]: [&[f32]; 2], dims: Dims, out: &mut [f32]) {
        let whole = |value: Value<'_>| {
            let mut whole = vec![0.0; out.len()];
            apply(value, value, dims, &mut whole, |x, _| x);
            whole
        };
        let (x, y) = (whole(a), whole(b));
        let (dx, dy) = (whole(Value { data: da, ..a }), whole(Value { data: db, ..b }));
        let at = [Value { dims, data: &x }, Value { dims, data: &y }];
        out.fill(0.0);
        self.adjoint(at, dims, &dx, Some(&mut *out), None);
        self.adjoint(at, dims, &dy, None, Some(out));
    }
}

/// Applies f to both values, walked together; each of the four kinds of inner loops works on plain slices.
fn apply(a: Value<'_>, b: Value<'_>, out_dims: Dims, out: &mut [f32], f: impl Fn(f32, f32) -> f32) {
    let loops = Loops::new(out_dims.sizes(), [repeated(a.dims, out_dims), repeated(b.dims, out_dims)]);
    let (n, steps) = loops.inner();
    let (a, b) = (a.data, b.data);
    let mut done = 0;
    loops.outer().each(|[i, j]| {
        let row = &mut out[done..done + n];
        match steps {
            [0, 0] => row.fill(f(a[i], b[j])),
            [_, 0] => row.iter_mut().zip(&a[i..i + n]).for_each(|(o, &x)| *o = f(x, b[j])),
            [0, _] => row.iter_mut().zip(&b[j..j + n]).for_each(|(o, &y)| *o = f(a[i], y)),
            _ => row.iter_mut().zip(&a[i..i + n]).zip(&b[j..j + n]).for_each(|((o, &x), &y)| *o = f(x, y)),
        }
        done += n;
    });
}

/// The data that both adjoints read.
struct Pull<'a> {
    a: Value<'a>,
    b: Value<'a>,
    out_dims: Dims,
    dout: &'a [f32],
}

impl Pull<'_> {
    fn both(
        &self,
        da: Option<&mut [f32]>,
        by_a: impl Fn(f32, f32) -> f32,
        db: Option<&mut [f32]>,
        by_b: impl Fn(f32, f32) -> f32,
    ) {
        if let Some(da) = da {
            self.one(0, da, by_a);
        }
        if let Some(db) = db {
            self.one(1, db, by_b);
        }
    }

    /// Adds slope(x, y)·d to a cotangent; a value that was repeated receives the sum.
    fn one(&self, side: usize, into: &mut [f32], slope: impl Fn(f32, f32) -> f32) {
        let strides = [repeated(self.a.dims, self.out_dims), repeated(self.b.dims, self.out_dims)];
        let loops = Loops::new(self.out_dims.sizes(), strides);
        let (n, steps) = loops.inner();
        let (a, b) = (self.a.data, self.b.data);
        let mut done = 0;
        loops.outer().each(|at| {
            let [i, j] = at;
            let dout = &self.dout[done..done + n];
            let term = |k: usize| dout[k] * slope(a[i + k * steps[0]], b[j + k * steps[1]]);
            if steps[side] == 0 {
                into[at[side]] += (0..n).map(|k| f64::from(term(k))).sum::<f64>() as f32;
            } else {
                let into = &mut into[at[side]..at[side] + n];
                (0..n).for_each(|k| into[k] += term(k));
            }
            done += n;
        });
    }
}
