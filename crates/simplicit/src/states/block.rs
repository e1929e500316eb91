//! A few samples with all their states.

use super::StateShape;
use crate::linalg::Matrix;
use crate::{Error, Result};

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

    /// An error that names the array and both shapes, unless all four agree with `shape` and with each other.
    pub fn require_shape(&self, shape: StateShape) -> Result<()> {
        let samples = self.u.rows();
        for (name, array, columns) in [
            ("U", &self.u, shape.inputs),
            ("Z", &self.z, shape.states),
            ("X", &self.x, shape.states),
            ("Y", &self.y, shape.outputs),
        ] {
            if (array.rows(), array.cols()) != (samples, columns) {
                return Err(Error::shape(
                    name,
                    format!("{samples} × {columns}"),
                    format!("{} × {}", array.rows(), array.cols()),
                ));
            }
        }
        Ok(())
    }

    /// An error naming array, row and column of the first NaN or infinity; rows are counted from `first_row`.
    pub fn require_finite(&self, first_row: usize) -> Result<()> {
        self.u.require_finite("U", first_row)?;
        self.z.require_finite("Z", first_row)?;
        self.x.require_finite("X", first_row)?;
        self.y.require_finite("Y", first_row)
    }
}
