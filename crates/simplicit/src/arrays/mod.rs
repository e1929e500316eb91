//! Arrays from files: where the walk starts.

mod preprocessing;

pub use preprocessing::{PerFeature, Preprocessing};
