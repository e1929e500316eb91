//! The choice of the device that does the arithmetic.

use std::fmt;
use std::str::FromStr;

use crate::{Error, Result};

/// The device: `auto`, `cpu`, `cuda` or `cuda:N`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Device {
    /// A GPU if there is one and the work is large enough for it; the CPU otherwise, without a message.
    #[default]
    Auto,
    /// The CPU alone: results are bit-identical, whatever hardware the machine has.
    Cpu,
    /// The GPU of this number, for everything that it has kernels for; an error if it cannot be used.
    Cuda(usize),
}

impl FromStr for Device {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "auto" => return Ok(Device::Auto),
            "cpu" => return Ok(Device::Cpu),
            "cuda" => return Ok(Device::Cuda(0)),
            _ => {}
        }
        text.strip_prefix("cuda:")
            .filter(|number| number.bytes().all(|b| b.is_ascii_digit()))
            .and_then(|number| number.parse().ok())
            .map(Device::Cuda)
            .ok_or_else(|| Error::setting("device", "auto, cpu, cuda or cuda:N", text))
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Auto => f.write_str("auto"),
            Device::Cpu => f.write_str("cpu"),
            Device::Cuda(number) => write!(f, "cuda:{number}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_read_as_they_are_written_and_anything_else_is_refused() {
        for device in [Device::Auto, Device::Cpu, Device::Cuda(0), Device::Cuda(7)] {
            assert_eq!(device.to_string().parse::<Device>().unwrap(), device);
        }
        assert_eq!("cuda".parse::<Device>().unwrap(), Device::Cuda(0));
        for wrong in ["", "gpu", "cuda:", "cuda:-1", "cuda:+1", "cuda:1x", "CPU", "cuda:99999999999999999999999"] {
            let message = wrong.parse::<Device>().unwrap_err().to_string();
            assert!(message.contains("auto, cpu, cuda or cuda:N"), "{message}");
        }
    }
}
