//! Bounds on the errors of a layer's values, from the errors of what it reads.

use super::execute::Buffers;
use super::layer::Step;
use super::plan::View;
use crate::equilibrium::program::Norm;
use crate::equilibrium::run::{SINGLE, SampleDiagnostics, or_infinite, sizes, underflow};
use crate::linalg::lanes::MAX_LANES;
use crate::model::Target;
use crate::network::Source;

/// Raises `found`, one number per lane, to the largest magnitude of a map.
fn largest(found: &mut [f64], buffers: &Buffers, view: View, lanes: usize) {
    let values = &buffers.values[view.origin * lanes..][..view.extent() * lanes];
    if view.apart {
        for (found, sample) in found.iter_mut().zip(values.chunks_exact(view.extent().max(1))) {
            sizes(std::slice::from_mut(found), Norm::Max, sample, 1);
        }
        return;
    }
    // Margins contain zeros, which do not change a maximum.
    sizes(found, Norm::Max, values, lanes);
}

/// The largest magnitudes and the errors of every layer, for each lane.
#[derive(Debug)]
pub(super) struct Bounds {
    inputs: Vec<f64>,
    sizes: Vec<f64>,
    errors: Vec<f64>,
}

impl Bounds {
    pub(super) fn new(layers: usize, lanes: usize) -> Self {
        Self { inputs: vec![0.0; lanes], sizes: vec![0.0; layers * lanes], errors: vec![0.0; layers * lanes] }
    }

    pub(super) fn begin(&mut self, buffers: &Buffers, input: View, lanes: usize) {
        self.inputs.fill(0.0);
        largest(&mut self.inputs, buffers, input, lanes);
    }

    /// Adds the bound for a layer whose values are in `buffers`.
    pub(super) fn add(&mut self, step: &Step, buffers: &Buffers, samples: &mut [SampleDiagnostics], lanes: usize) {
        let mut own = [0.0; MAX_LANES];
        largest(&mut own[..lanes], buffers, step.view, lanes);
        let bound = &step.bound;
        for (lane, sample) in samples.iter_mut().enumerate() {
            let (mut carried, mut size) = (0.0, bound.largest_bias);
            for (source, norm) in &bound.reads {
                match source {
                    Source::Input => size += norm * self.inputs[lane],
                    Source::Layer(j) => {
                        carried += norm * self.errors[j * lanes + lane];
                        size += norm * self.sizes[j * lanes + lane];
                    }
                }
            }
            let rounding = (bound.terms as f64 + 2.0) * SINGLE * size;
            sample.converged &= own[lane].is_finite();
            match step.target {
                Target::Layer(k) => {
                    // Four more roundings cover the activation.
                    let known = carried + rounding + 4.0 * SINGLE * own[lane] + underflow(bound.terms);
                    let error = if bound.known { known } else { f64::INFINITY };
                    self.sizes[k * lanes + lane] = own[lane];
                    self.errors[k * lanes + lane] = error;
                    sample.state_error = or_infinite(Norm::Max.add(sample.state_error, error));
                }
                Target::Output => sample.output_error = or_infinite(carried + rounding + underflow(bound.terms)),
            }
        }
    }
}
