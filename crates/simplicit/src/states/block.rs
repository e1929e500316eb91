//! A few samples with all their states.

use crate::Result;
use crate::linalg::Matrix;

/// U, Z, X, Y of consecutive samples, one sample a row.
#[derive(Debug, Clone, PartialEq)]
pub struct StateBlock {
    /// Inputs, m × p.
    pub u: Matrix,
    /// Pre-activations, m × n, last layer first.
    pub z: Matrix,
    /// Post-activations X = φ(Z), m × n, last layer first.
    pub x: Matrix,
    /// Outputs, m × q.
    pub y: Matrix,
}

impl StateBlock {
    /// Number of samples.
    pub fn samples(&self) -> usize {
        self.u.rows()
    }

    /// An error naming array, row and column of the first NaN or infinity; rows are counted from `first_row`.
    pub fn require_finite(&self, first_row: usize) -> Result<()> {
        self.u.require_finite("U", first_row)?;
        self.z.require_finite("Z", first_row)?;
        self.x.require_finite("X", first_row)?;
        self.y.require_finite("Y", first_row)
    }
}
