//! Which entries of M = (A B; C D) may be non-zero.

use crate::layout::Layout;
use crate::linalg::Matrix;
use crate::{Error, Result};

/// The connections a model may use. Rows are the n states (last layer first) and then the q outputs; columns are the n
/// states and then the p inputs.
#[derive(Debug, Clone, PartialEq, Default)]
pub enum Connectivity {
    /// All connections, as in the paper: feedback and self-loops too.
    #[default]
    Full,
    /// All connections except those from a state to itself.
    NoSelfLoop,
    /// Connections from states of earlier layers and from the inputs: learned skips, no cycles.
    Feedforward,
    /// Only the connections that the baseline has.
    Baseline,
    /// A mask of the user's own: (n + q) × (n + p), true where a weight may be.
    Mask(Mask),
}

/// A table of allowed entries.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mask {
    rows: usize,
    cols: usize,
    allowed: Vec<bool>,
}

impl Mask {
    /// Allows the entries at which `pattern` is non-zero.
    pub fn from_pattern(pattern: &Matrix) -> Self {
        Self {
            rows: pattern.rows(),
            cols: pattern.cols(),
            allowed: pattern.as_slice().iter().map(|v| *v != 0.0).collect(),
        }
    }

    /// Allows the entries for which a function is true.
    pub fn from_fn(rows: usize, cols: usize, mut allowed: impl FnMut(usize, usize) -> bool) -> Self {
        let allowed = (0..rows * cols).map(|k| allowed(k / cols, k % cols)).collect();
        Self { rows, cols, allowed }
    }

    /// Whether entry (i, j) may be non-zero.
    pub fn allows(&self, i: usize, j: usize) -> bool {
        self.allowed[i * self.cols + j]
    }

    /// Number of rows and columns.
    pub fn shape(&self) -> (usize, usize) {
        (self.rows, self.cols)
    }
}

impl Connectivity {
    /// The table for a state space of n = `layout.size()` states, `inputs` and `outputs`; `baseline` is the pattern of
    /// the baseline's own M, needed for [`Connectivity::Baseline`] alone.
    pub fn mask(&self, layout: &Layout, inputs: usize, outputs: usize, baseline: Option<&Mask>) -> Result<Mask> {
        let n = layout.size();
        let shape = (n + outputs, n + inputs);
        let check = |mask: &Mask, what: &str| {
            if mask.shape() == shape {
                Ok(mask.clone())
            } else {
                let (rows, cols) = mask.shape();
                Err(Error::shape(what, format!("{} × {}", shape.0, shape.1), format!("{rows} × {cols}")))
            }
        };
        match self {
            Connectivity::Full => Ok(Mask::from_fn(shape.0, shape.1, |_, _| true)),
            Connectivity::NoSelfLoop => Ok(Mask::from_fn(shape.0, shape.1, |i, j| i != j || i >= n)),
            Connectivity::Feedforward => {
                let layers: Vec<usize> = (0..n).filter_map(|i| layout.layer_of(i)).collect();
                // The last layer comes first, so an earlier layer has the larger index.
                Ok(Mask::from_fn(shape.0, shape.1, |i, j| i >= n || j >= n || layers[j] > layers[i]))
            }
            Connectivity::Baseline => match baseline {
                Some(mask) => check(mask, "baseline connections"),
                None => Err(Error::setting(
                    "connectivity",
                    "full, no-self-loop or mask for states without a baseline network",
                    "baseline",
                )),
            },
            Connectivity::Mask(mask) => check(mask, "connectivity mask"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::{Activation, Layer};

    #[test]
    fn masks_of_a_two_layer_network() {
        let relu = Activation::Relu;
        let layout = Layout::new(vec![Layer::dense("second", 2, relu), Layer::dense("first", 3, relu)]);
        let count = |c: &Connectivity| {
            let mask = c.mask(&layout, 4, 1, None).unwrap();
            (0..6).map(|i| (0..9).filter(|&j| mask.allows(i, j)).count()).collect::<Vec<_>>()
        };
        assert_eq!(count(&Connectivity::Full), [9; 6]);
        assert_eq!(count(&Connectivity::NoSelfLoop), [8, 8, 8, 8, 8, 9]);
        assert_eq!(count(&Connectivity::Feedforward), [7, 7, 4, 4, 4, 9]);
        assert!(Connectivity::Baseline.mask(&layout, 4, 1, None).is_err());
        let wrong = Connectivity::Mask(Mask::from_fn(6, 8, |_, _| true)).mask(&layout, 4, 1, None);
        assert_eq!(wrong.unwrap_err().to_string(), "connectivity mask: expected 6 × 9, got 6 × 8");
    }
}
