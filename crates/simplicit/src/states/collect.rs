//! Running a network or an implicit model over inputs, a block at a time.

use super::{StateBlock, StateMap, StateShape, StateSource};
use crate::arrays::{DeviceInputs, InputSource};
use crate::layout::Layout;
use crate::linalg::Matrix;
use crate::{Error, Result};

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

    fn device_inputs(&self) -> Option<(&DeviceInputs, usize)> {
        self.inputs.on_device().map(|inputs| (inputs, 0))
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
