//! States: the values that a baseline computes on some inputs, block by block.
//!
//! A [`StateMap`] is a function (a network, an implicit model) from inputs to states; a [`StateSource`] is a finite
//! number of samples with their states, from any origin. All later steps read sources in fixed blocks of samples, so
//! that nothing has to hold all samples.

mod arrays;
mod block;
mod collect;
mod file;
mod kept;
mod slice;

pub use arrays::{ArrayStates, require_activation};
pub use block::StateBlock;
pub use collect::Collected;
pub use file::{StatesMetadata, write_states};
pub(crate) use kept::Kept;
pub use slice::StateSlice;

pub use crate::arrays::InputSource;

use crate::Result;
use crate::arrays::DeviceInputs;
use crate::layout::Layout;
use crate::linalg::Matrix;

/// Sizes of a state space: p inputs, n states, q outputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StateShape {
    /// p, inputs per sample.
    pub inputs: usize,
    /// n, states per sample.
    pub states: usize,
    /// q, outputs per sample.
    pub outputs: usize,
}

/// A function from inputs to pre-activations, states and outputs: a trained network or an implicit model.
pub trait StateMap: Sync {
    /// Which states belong to which layer, last layer first.
    fn layout(&self) -> &Layout;
    /// The sizes p, n and q.
    fn shape(&self) -> StateShape;
    /// Runs a batch (one sample a row) on the calling thread.
    fn states(&self, u: &Matrix<f32>) -> Result<StateBlock>;
    /// Only the outputs of a batch, where no states are needed.
    fn outputs_of(&self, u: &Matrix<f32>) -> Result<Matrix<f32>> {
        Ok(self.states(u)?.y.cast())
    }
}

/// Samples with their states, readable in any order and from several threads at once.
pub trait StateSource: Sync {
    /// Which states belong to which layer, last layer first.
    fn layout(&self) -> &Layout;
    /// The sizes p, n and q.
    fn shape(&self) -> StateShape;
    /// Number of samples m.
    fn samples(&self) -> usize;
    /// States of some consecutive samples; every value is finite.
    fn block(&self, samples: std::ops::Range<usize>) -> Result<StateBlock>;
    /// Inputs of some consecutive samples, without their states: those of feature maps are many times as large.
    fn inputs(&self, samples: std::ops::Range<usize>) -> Result<Matrix<f32>> {
        Ok(self.block(samples)?.u.cast())
    }
    /// The same inputs on a GPU, if they are there, and the number of the first sample among them.
    fn device_inputs(&self) -> Option<(&DeviceInputs, usize)> {
        None
    }
    /// Inputs and outputs of some consecutive samples, without the states in between.
    fn ends(&self, samples: std::ops::Range<usize>) -> Result<(Matrix<f32>, Matrix)> {
        let block = self.block(samples)?;
        Ok((block.u.cast(), block.y))
    }
    /// Whether the layout is the baseline's; without it, `feedforward` and `baseline` connectivity have no meaning.
    fn layers_are_known(&self) -> bool {
        true
    }
    /// The samples with their own states, if this source replaces these by the states of a model.
    fn origin(&self) -> Option<&dyn StateSource> {
        None
    }
    /// Whether the outputs are those that the baseline computes from these states. They are not if a model's states
    /// replace the samples' own.
    fn outputs_follow_from_states(&self) -> bool {
        true
    }
    /// Non-zero parameters of the baseline, if the source knows them.
    fn baseline_nonzeros(&self) -> Option<u64> {
        None
    }
}
