//! Sparse, well-posed implicit models from trained networks, by convex optimisation.

pub mod arrays;
pub mod equilibrium;
mod error;
pub mod evaluate;
pub mod files;
pub mod layout;
pub mod linalg;
pub mod model;
pub mod network;
mod onnx;
pub mod parallel;
pub mod problem;
pub mod random;
pub mod solver;
pub mod states;
pub mod statistics;
pub mod train;

pub use error::{Error, InfeasibleRow, Result};
