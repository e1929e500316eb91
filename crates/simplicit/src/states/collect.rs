//! Running a network or an implicit model over inputs, a block at a time.

use super::{StateBlock, StateMap, StateShape, StateSource};
use crate::layout::Layout;
use crate::linalg::Matrix;
use crate::{Error, Result};

/// Inputs that can be read in blocks from several threads at once: an array in memory or a file.
pub trait InputSource: Sync {
    /// Number of samples.
    fn samples(&self) -> usize;
    /// Values per sample.
    fn features(&self) -> usize;
    /// Some consecutive samples, one a row, preprocessed as the network expects them.
    fn rows(&self, samples: std::ops::Range<usize>) -> Result<Matrix<f32>>;
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

/// The states of `map` on `inputs`, computed block by block and never kept.
pub struct Collected<'a> {
    map: &'a dyn StateMap,
    inputs: &'a dyn InputSource,
}

impl<'a> Collected<'a> {
    /// Checks that the map takes what the inputs are.
    pub fn new(map: &'a dyn StateMap, inputs: &'a dyn InputSource) -> Result<Self> {
        if map.shape().inputs != inputs.features() {
            return Err(Error::shape(
                "inputs",
                format!("{} values per sample", map.shape().inputs),
                format!("{} values per sample", inputs.features()),
            ));
        }
        Ok(Self { map, inputs })
    }
}

impl StateSource for Collected<'_> {
    fn layout(&self) -> &Layout {
        self.map.layout()
    }

    fn shape(&self) -> StateShape {
        self.map.shape()
    }

    fn samples(&self) -> usize {
        self.inputs.samples()
    }

    fn inputs(&self, samples: std::ops::Range<usize>) -> Result<Matrix<f32>> {
        let first = samples.start;
        let u = self.inputs.rows(samples)?;
        u.require_finite("U", first)?;
        Ok(u)
    }

    fn ends(&self, samples: std::ops::Range<usize>) -> Result<(Matrix<f32>, Matrix)> {
        let first = samples.start;
        let u = self.inputs(samples)?;
        let y = self.map.outputs_of(&u)?.cast();
        y.require_finite("Y", first)?;
        Ok((u, y))
    }

    fn block(&self, samples: std::ops::Range<usize>) -> Result<StateBlock> {
        let first = samples.start;
        let u = self.inputs(samples)?;
        let block = self.map.states(&u)?;
        block.require_finite(first)?;
        Ok(block)
    }
}
