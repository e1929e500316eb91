//! Plain matrices, sparse rows, and the only access to the dense kernels.
//!
//! No other module names the matrix crate: products, factorisations and eigenvalues are computed here on a single
//! thread, because parallelism belongs to [`crate::parallel`] and threads must not start further threads. The one
//! exception is the inverse of a large symmetric matrix, which takes a number of threads.

mod csr;
mod dense;
mod inverse;
pub(crate) mod lanes;
mod matrix;
mod rounding;
mod stencil;
pub(crate) mod tiles;

pub use csr::Csr;
pub(crate) use csr::add_up;
pub use dense::{Cholesky, View, axpy, dot, gemm, singular_values, symmetric_eigen};
pub(crate) use dense::{gram_lower, vectorised};
pub(crate) use inverse::shifted_inverse;
pub use matrix::{Matrix, Scalar};
pub use rounding::toward_zero;
pub(crate) use stencil::Stencil;
