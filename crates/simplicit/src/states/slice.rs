//! Some consecutive samples of a source: to train on one part and judge on another.

use std::ops::Range;

use super::{StateBlock, StateShape, StateSource};
use crate::arrays::DeviceInputs;
use crate::layout::Layout;
use crate::linalg::Matrix;
use crate::{Error, Result};

/// Samples `range` of a source, counted from 0 again.
pub struct StateSlice<'a> {
    source: &'a dyn StateSource,
    range: Range<usize>,
}

impl<'a> StateSlice<'a> {
    /// An error unless the range lies within the source and is not empty.
    pub fn new(source: &'a dyn StateSource, range: Range<usize>) -> Result<Self> {
        if range.is_empty() || range.end > source.samples() {
            return Err(Error::shape(
                "part of the samples",
                format!("a non-empty range within 0..{}", source.samples()),
                format!("{range:?}"),
            ));
        }
        Ok(Self { source, range })
    }
}

impl StateSource for StateSlice<'_> {
    fn layout(&self) -> &Layout {
        self.source.layout()
    }

    fn shape(&self) -> StateShape {
        self.source.shape()
    }

    fn samples(&self) -> usize {
        self.range.len()
    }

    fn block(&self, samples: Range<usize>) -> Result<StateBlock> {
        self.source.block(self.range.start + samples.start..self.range.start + samples.end)
    }

    fn inputs(&self, samples: Range<usize>) -> Result<Matrix<f32>> {
        self.source.inputs(self.range.start + samples.start..self.range.start + samples.end)
    }

    fn device_inputs(&self) -> Option<(&DeviceInputs, usize)> {
        self.source.device_inputs().map(|(inputs, first)| (inputs, first + self.range.start))
    }

    fn ends(&self, samples: Range<usize>) -> Result<(Matrix<f32>, Matrix)> {
        self.source.ends(self.range.start + samples.start..self.range.start + samples.end)
    }

    fn layers_are_known(&self) -> bool {
        self.source.layers_are_known()
    }

    fn outputs_follow_from_states(&self) -> bool {
        self.source.outputs_follow_from_states()
    }

    fn baseline_nonzeros(&self) -> Option<u64> {
        self.source.baseline_nonzeros()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arrays::Array;
    use crate::layout::Activation;
    use crate::states::ArrayStates;

    #[test]
    fn a_slice_counts_from_zero() {
        let matrix = |cols: usize| Matrix::from_fn(5, cols, |i, j| (10 * i + j) as f64);
        let array = |name, cols| Array::from_matrix(name, &matrix(cols));
        let all =
            ArrayStates::without_layout(array("U", 2), array("Z", 3), array("X", 3), array("Y", 1), Activation::Relu)
                .unwrap();
        let tail = StateSlice::new(&all, 3..5).unwrap();
        assert_eq!(tail.samples(), 2);
        assert!(!tail.layers_are_known());
        assert_eq!(tail.block(1..2).unwrap().u.as_slice(), [40.0, 41.0]);
        assert!(StateSlice::new(&all, 4..6).is_err());
        assert!(StateSlice::new(&all, 2..2).is_err());
    }
}
