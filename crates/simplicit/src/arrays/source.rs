//! The trait for inputs, in memory, in a file or on a GPU.

use super::DeviceInputs;
use crate::Result;
use crate::linalg::Matrix;

/// Inputs that can be read in blocks from several threads at once: an array in memory or a file.
pub trait InputSource: Sync {
    /// Number of samples.
    fn samples(&self) -> usize;
    /// Values per sample.
    fn features(&self) -> usize;
    /// Some consecutive samples, one per row, preprocessed as the network expects them.
    fn rows(&self, samples: std::ops::Range<usize>) -> Result<Matrix<f32>>;
    /// The same samples on a GPU, if they are there: work on that GPU then need not read them through the host.
    fn on_device(&self) -> Option<&DeviceInputs> {
        None
    }
}

impl InputSource for Matrix<f32> {
    fn samples(&self) -> usize {
        Matrix::rows(self)
    }

    fn features(&self) -> usize {
        self.cols()
    }

    fn rows(&self, samples: std::ops::Range<usize>) -> Result<Matrix<f32>> {
        let count = samples.len();
        Matrix::from_vec(
            count,
            self.cols(),
            self.as_slice()[samples.start * self.cols()..samples.end * self.cols()].to_vec(),
        )
    }
}
