//! Sparse, well-posed implicit models from trained networks, by convex optimisation.

pub mod arrays;
mod error;
pub mod layout;
pub mod linalg;
pub mod network;
mod onnx;
pub mod output;
pub mod parallel;
pub mod problem;
pub mod random;
pub mod solver;
pub mod states;
pub mod statistics;

pub use error::{Error, InfeasibleRow, Result};
