//! Sparse, well-posed implicit models from trained networks, by convex optimisation.

pub mod arrays;
mod error;
pub mod layout;
pub mod linalg;
pub mod output;
pub mod parallel;
pub mod random;
pub mod states;

pub use error::{Error, InfeasibleRow, Result};
