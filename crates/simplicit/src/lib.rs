//! Sparse, well-posed implicit models from trained networks, by convex optimisation.

pub mod equilibrium;
mod error;
pub mod files;
pub mod layout;
pub mod linalg;
pub mod model;
mod onnx;
pub mod parallel;
pub mod random;
pub mod states;

pub use error::{Error, InfeasibleRow, Result};
