//! Runs one layer on its own: its pre-activations from the values of what it reads.

use super::execute::Buffers;
use super::layer::{Step, Sum, own_map, own_margin};
use super::places::Places;
use super::plan::{View, Way};
use crate::kernels::{Crew, Instructions};
use crate::layout::Layout;
use crate::linalg::Matrix;
use crate::model::{ImplicitModel, TapBlock, Target};
use crate::network::Source;
use crate::{Error, Result};

/// Samples that run side by side.
const LANES: usize = 16;

/// One layer's pre-activations (or the output) from the states of its sources, for a batch, as a cascade computes
/// them.
pub struct LayerSum {
    step: Step,
    /// The sources that it reads, each listed once, with the places of their values.
    sources: Vec<(Source, View)>,
    positions: usize,
    instructions: Instructions,
}

impl std::fmt::Debug for LayerSum {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LayerSum").field("target", &self.step.target).finish_non_exhaustive()
    }
}

impl LayerSum {
    /// For a layer of the model, or for its output.
    ///
    /// # Panics
    /// If there is no such layer.
    pub fn new(model: &ImplicitModel, target: Target) -> Self {
        Self::of(model.layout(), &Sum::new(model, target))
    }

    /// For the blocks of a layer; nothing more of the model needs to be known yet.
    pub(crate) fn of(layout: &Layout, sum: &Sum) -> Self {
        let only = || std::iter::once(sum);
        let instructions = Instructions::detect();
        let mut places = Places::new(LANES, false);
        let mut sources: Vec<(Source, View)> = Vec::new();
        let operands = || sum.operator.iter().flat_map(|o| o.operands());
        for source in sum.sources() {
            if sources.iter().all(|(known, _)| *known != source) {
                let inputs = operands().find(|o| o.source == Source::Input).map_or(0, |o| o.dims.size());
                let map = own_map(layout, inputs, source, only());
                sources.push((source, places.take(map, own_margin(source, map, only()))));
            }
        }
        let view = places.take(sum.map(), [0; 4]);
        // Every source of the sum has its own place.
        let of = |source: Source| sources.iter().find(|(known, _)| *known == source).map_or(view, |(_, view)| *view);
        let way = Way { lanes: LANES, apart: false, instructions, only: None };
        let step = Step::new(sum, view, of, false, way, &mut Vec::new());
        Self { step, sources, positions: places.end(), instructions }
    }

    /// The sources that it reads, each listed once.
    pub fn sources(&self) -> Vec<Source> {
        self.sources.iter().map(|(source, _)| *source).collect()
    }

    /// z (or the value of an operator), m × units, on the calling thread; `source` gives the inputs or a layer's states, one
    /// sample after the other.
    pub fn pre_activations<'a>(&self, samples: usize, source: impl Fn(Source) -> &'a [f32]) -> Result<Matrix<f32>> {
        for (place, view) in &self.sources {
            let (got, width) = (source(*place).len(), view.map.size());
            if got != samples * width {
                return Err(Error::shape(format!("states of {place:?}"), format!("{samples} × {width}"), got));
            }
        }
        let units = self.step.view.map.size();
        let mut z = Matrix::zeros(samples, units);
        let mut buffers = Buffers::new(self.positions, self.step.scratch(), LANES);
        for first in (0..samples).step_by(LANES) {
            let batch = (LANES, LANES.min(samples - first));
            for (place, view) in &self.sources {
                let width = view.map.size();
                view.read_rows(&mut buffers.values, &source(*place)[first * width..], width, batch);
            }
            self.step.sum(&mut buffers, batch, self.instructions, &Crew::alone());
            self.step.view.write_rows(&buffers.values, &mut z.as_mut_slice()[first * units..], units, batch);
        }
        Ok(z)
    }
}

impl TapBlock {
    /// The sum that the block adds to its target, for a batch: `source` has the inputs or the states of the source's
    /// layer, one sample per row.
    pub fn apply(&self, source: &Matrix<f32>) -> Result<Matrix<f32>> {
        // On its own, the block reads inputs and gives outputs.
        let alone = TapBlock { source: Source::Input, target: Target::Output, ..self.clone() };
        let (rows, layout) = (self.output.channels, Layout::new(Vec::new()));
        let mut sum = Sum::of_blocks(&layout, self.output.size(), Target::Output, vec![alone], vec![0.0; rows]);
        sum.set_map(self.output);
        LayerSum::of(&layout, &sum).pre_activations(source.rows(), |_| source.as_slice())
    }
}
