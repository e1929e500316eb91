//! Evolutionary allocation over layers in the manner of EvoPress: layers pruned by the second-order method at many levels,
//! and a search for the levels whose model diverges least from the network ([`crate::evolve`]).

use simplicit::Result;

use super::{Layer, Prepared, Rival, SecondOrder};
use crate::walk::Allocation;

/// Its price is never asked for, because no single threshold applies to all layers.
#[derive(Debug)]
pub struct Evopress;

impl Rival for Evopress {
    fn name(&self) -> &'static str {
        "evolved allocation of OBC (EvoPress)"
    }

    fn id(&self) -> &'static str {
        "evopress"
    }

    fn first_price(&self) -> f64 {
        SecondOrder.first_price()
    }

    fn fits(&self) -> bool {
        SecondOrder.fits()
    }

    fn prepare(&self, layer: &Layer) -> Result<Box<dyn Prepared>> {
        SecondOrder.prepare(layer)
    }

    fn allocations(&self) -> &'static [Allocation] {
        &[Allocation::Evolved]
    }
}
