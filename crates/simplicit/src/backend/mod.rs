//! Where arithmetic happens: the CPU, or one GPU.

pub mod cuda;
mod device;

pub use device::Device;

use std::sync::{Arc, OnceLock};

use crate::{Error, Result};
use cuda::Cuda;

/// Multiply-adds of one step below which `auto` stays on the CPU: starting kernels would take longer than the work.
const WORTH_A_GPU: f64 = 1e6;

/// The GPU that a device stands for, for work of so many multiply-adds a step; `None`: the CPU.
pub(crate) fn gpu(device: Device, work: f64) -> Result<Option<Arc<Cuda>>> {
    static FOUND: OnceLock<Option<Arc<Cuda>>> = OnceLock::new();
    match device {
        Device::Cpu => Ok(None),
        Device::Cuda(number) => Cuda::open(number).map(Some),
        Device::Auto if work < WORTH_A_GPU => Ok(None),
        Device::Auto => Ok(FOUND.get_or_init(|| Cuda::open(0).ok()).clone()),
    }
}

/// What a device stands for on this machine, such as `cpu` or `cuda:0 (NVIDIA H200)`.
pub fn name(device: Device) -> String {
    match gpu(device, f64::INFINITY) {
        Ok(Some(cuda)) => cuda.describe(),
        _ => Device::Cpu.to_string(),
    }
}

/// What a GPU answered; `None` where it failed under `auto`, and the CPU has to do it.
pub(crate) fn or_cpu<T>(device: Device, answer: Result<T>) -> Result<Option<T>> {
    match answer {
        Err(Error::Device { .. }) if device == Device::Auto => Ok(None),
        answer => answer.map(Some),
    }
}
