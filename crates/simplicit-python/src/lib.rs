//! `simplicit._core`: the library for Python. It is a thin layer: it converts arrays and errors, and every call into
//! native work goes through one function.

mod arrays;
mod blocks;
mod delegate;
mod dlpack;
mod door;
mod errors;
mod model;
mod network;
mod prove;
mod robustness;
mod statistics;
mod taps;
mod train;

use pyo3::prelude::*;

#[pymodule]
mod _core {
    #[pymodule_export]
    use super::blocks::train_blocks;
    #[pymodule_export]
    use super::delegate::{Branch, Design, Shard, fingerprint, free_memory, run_statistics, run_sums};
    #[pymodule_export]
    use super::dlpack::read_tensor;
    #[pymodule_export]
    use super::model::Model;
    #[pymodule_export]
    use super::network::{Builder, Network};
    #[pymodule_export]
    use super::prove::prove_row;
    #[pymodule_export]
    use super::robustness::{attack_model, certify_model};
    #[pymodule_export]
    use super::statistics::{Statistics, connections};
    #[pymodule_export]
    use super::train::{page, train};
    use pyo3::prelude::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
