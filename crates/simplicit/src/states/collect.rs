//! Runs a network or an implicit model over inputs, a block at a time.

use super::kept::Kept;
use super::{StateBlock, StateMap, StateShape, StateSource};
use crate::arrays::{DeviceInputs, InputSource};
use crate::layout::Layout;
use crate::linalg::Matrix;
use crate::{Error, Result};

/// The states of `map` on `inputs`, computed block by block; kept only if asked for.
pub struct Collected<'a> {
    map: &'a dyn StateMap,
    inputs: &'a dyn InputSource,
    kept: Kept,
}

impl<'a> Collected<'a> {
    /// Checks that the map accepts the inputs.
    pub fn new(map: &'a dyn StateMap, inputs: &'a dyn InputSource) -> Result<Self> {
        if map.shape().inputs != inputs.features() {
            return Err(Error::shape(
                "inputs",
                format!("{} values per sample", map.shape().inputs),
                format!("{} values per sample", inputs.features()),
            ));
        }
        Ok(Self { map, inputs, kept: Kept::default() })
    }

    /// Keeps the states of blocks that have been read, up to this many bytes: for callers that read all samples
    /// several times.
    #[must_use]
    pub(crate) fn keeping(self, bytes: u64) -> Self {
        Self { kept: Kept::new(bytes), ..self }
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
        self.map.layout().require_rows_of_tables(&u, first)?;
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
        let u = self.inputs(samples.clone())?;
        let [z, x, y] = self.kept.get_or(&samples, || {
            let block = self.map.states(&u)?;
            block.require_finite(samples.start)?;
            Ok([block.z, block.x, block.y])
        })?;
        Ok(StateBlock { u: u.cast(), z, x, y })
    }
}
