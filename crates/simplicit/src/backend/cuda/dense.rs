//! Matrix products with cuBLAS. Matrices are stored by columns; a matrix stored by rows is the transpose of one.

use std::ffi::c_int;

use super::library::Address;
use super::{Session, Work};
use crate::Result;

const PLAIN: c_int = 0;
const TRANSPOSED: c_int = 1;
const LOWER: c_int = 0;

/// A matrix on the device: its address, leading dimension, and distance from one matrix of a batch to the next, in
/// elements.
#[derive(Clone, Copy)]
pub(super) struct Panel {
    pub(super) at: Address,
    pub(super) leading: usize,
    pub(super) stride: usize,
    pub(super) transposed: bool,
}

impl Panel {
    pub(super) fn new(at: Address, leading: usize) -> Self {
        Self { at, leading, stride: 0, transposed: false }
    }

    pub(super) fn batch(at: Address, leading: usize, stride: usize) -> Self {
        Self { at, leading, stride, transposed: false }
    }

    pub(super) fn t(self) -> Self {
        Self { transposed: true, ..self }
    }

    fn operation(self) -> c_int {
        if self.transposed { TRANSPOSED } else { PLAIN }
    }
}

/// Rows and columns of a product, and the length of its sums.
#[derive(Clone, Copy)]
pub(super) struct Sizes(pub(super) usize, pub(super) usize, pub(super) usize);

impl Sizes {
    fn all(self) -> (c_int, c_int, c_int) {
        (self.0 as c_int, self.1 as c_int, self.2 as c_int)
    }

    fn operations(self) -> f64 {
        2.0 * self.0 as f64 * self.1 as f64 * self.2 as f64
    }

    /// The fewest numbers that a product must read and write; a product that adds to its result reads that as well.
    fn numbers(self, adds: bool) -> f64 {
        let (m, n, k) = (self.0 as f64, self.1 as f64, self.2 as f64);
        m * k + k * n + m * n * if adds { 2.0 } else { 1.0 }
    }
}

impl Session {
    /// out = keep·out + a·b in single precision.
    pub(super) fn product_single(&self, out: Panel, keep: f32, a: Panel, b: Panel, sizes: Sizes) -> Result<()> {
        let ((m, n, k), one) = (sizes.all(), 1f32);
        let (x, y, z) = (a.leading as c_int, b.leading as c_int, out.leading as c_int);
        // SAFETY: the callers' panels lie inside their buffers; scalars are live locals and read before the return.
        let status = unsafe {
            (self.cuda.blas.sgemm)(
                self.cuda.handle,
                a.operation(),
                b.operation(),
                m,
                n,
                k,
                &raw const one,
                a.at,
                x,
                b.at,
                y,
                &raw const keep,
                out.at,
                z,
            )
        };
        let bytes = 4.0 * sizes.numbers(keep != 0.0);
        self.count(Work { single: sizes.operations(), bytes, ..Default::default() });
        self.blas("a product", status)
    }

    /// out = keep·out + factor·a·b in double precision.
    pub(super) fn product(&self, out: Panel, keep: f64, factor: f64, a: Panel, b: Panel, sizes: Sizes) -> Result<()> {
        let (m, n, k) = sizes.all();
        let (x, y, z) = (a.leading as c_int, b.leading as c_int, out.leading as c_int);
        // SAFETY: as above.
        let status = unsafe {
            (self.cuda.blas.dgemm)(
                self.cuda.handle,
                a.operation(),
                b.operation(),
                m,
                n,
                k,
                &raw const factor,
                a.at,
                x,
                b.at,
                y,
                &raw const keep,
                out.at,
                z,
            )
        };
        let bytes = 8.0 * sizes.numbers(keep != 0.0);
        self.count(Work { double: sizes.operations(), bytes, ..Default::default() });
        self.blas("a product", status)
    }

    /// The same for every matrix of a batch.
    #[allow(clippy::too_many_arguments)]
    pub(super) fn products(
        &self,
        out: Panel,
        keep: f64,
        factor: f64,
        a: Panel,
        b: Panel,
        sizes: Sizes,
        batch: usize,
    ) -> Result<()> {
        let (m, n, k) = sizes.all();
        let (x, y, z) = (a.leading as c_int, b.leading as c_int, out.leading as c_int);
        // SAFETY: as above, for every matrix of the batch.
        let status = unsafe {
            (self.cuda.blas.dgemm_batched)(
                self.cuda.handle,
                a.operation(),
                b.operation(),
                m,
                n,
                k,
                &raw const factor,
                a.at,
                x,
                a.stride as i64,
                b.at,
                y,
                b.stride as i64,
                &raw const keep,
                out.at,
                z,
                out.stride as i64,
                batch as c_int,
            )
        };
        let (double, bytes) = (batch as f64 * sizes.operations(), 8.0 * batch as f64 * sizes.numbers(keep != 0.0));
        self.count(Work { double, bytes, ..Default::default() });
        self.blas("a batch of products", status)
    }

    /// The lower half of out += a·aᵀ, a with n rows and k columns.
    pub(super) fn add_square(&self, out: Panel, a: Panel, n: usize, k: usize) -> Result<()> {
        let one = 1f64;
        // SAFETY: as above.
        let status = unsafe {
            (self.cuda.blas.dsyrk)(
                self.cuda.handle,
                LOWER,
                a.operation(),
                n as c_int,
                k as c_int,
                &raw const one,
                a.at,
                a.leading as c_int,
                &raw const one,
                out.at,
                out.leading as c_int,
            )
        };
        let (n, k) = (n as f64, k as f64);
        self.count(Work { double: n * n * k, bytes: 8.0 * (n * n + n * k), ..Default::default() });
        self.blas("a Gram matrix", status)
    }
}
