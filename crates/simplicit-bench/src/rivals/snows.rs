//! Reconstruction over the next operations in the manner of SNOWS: any mask (here by magnitude), then the kept
//! weights are fitted so that values some operations ahead match the network's. The mask and the rows are those of
//! magnitude + refit; the reconstruction is the library's own (`--reconstruct`), without output-aware weights.

use simplicit::Result;

use super::{Layer, Magnitude, Prepared, Rival};

const MASK: Magnitude = Magnitude { refit: true };
/// Joints ahead. A residual block has seven operations (convolutions, norms, activations, the sum), and the paper
/// matches values 20 to 30 operations ahead.
const AHEAD: usize = 4;

/// The price is that of magnitude pruning.
#[derive(Debug)]
pub struct Snows;

impl Rival for Snows {
    fn name(&self) -> &'static str {
        "magnitude + reconstruction ahead (SNOWS)"
    }

    fn id(&self) -> &'static str {
        "snows"
    }

    fn first_price(&self) -> f64 {
        MASK.first_price()
    }

    fn fits(&self) -> bool {
        MASK.fits()
    }

    fn prepare(&self, layer: &Layer) -> Result<Box<dyn Prepared>> {
        MASK.prepare(layer)
    }

    fn ahead(&self) -> usize {
        AHEAD
    }
}
