//! Which layer the error at the output comes from.

use super::accuracy::Mismatch;
use crate::equilibrium::{Equilibrium, EquilibriumSettings, LayerSum};
use crate::layout::Layout;
use crate::linalg::Matrix;
use crate::model::{ImplicitModel, Target};
use crate::network::Source;
use crate::parallel::{self, Cancel, Threads};
use crate::states::InputSource;
use crate::{Error, Result};

/// Samples in a block, and states in a block: convolutional networks have fewer samples in it, so that a block takes
/// only a few megabytes.
const BLOCK: usize = 256;
const BLOCK_STATES: usize = 1 << 22;

/// The error at the output if the model computes everything up to and including one layer, and the baseline the rest.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerError {
    /// The layer's name, `outputs` for C, D and d.
    pub name: String,
    /// RMS of (model's − baseline's states of this layer) / RMS of the baseline's; `None` for the outputs.
    pub state_error: Option<f64>,
    /// RMS of (ŷ − y) / RMS of y, where ŷ takes the states of this and all earlier layers from the model's equilibrium
    /// and computes the rest with the baseline's equations. In the last entry everything is the model's own: the
    /// `equilibrium_error`.
    pub output_error: f64,
    /// `output_error` minus that of the layer before: what this layer adds; negative if it reduces the error.
    pub added: f64,
}

/// One entry per layer from the first to the last, then one for the outputs. Both models read the same inputs and have
/// the same layers; states and outputs are compared in the coordinates of the baseline's network (see
/// [`crate::model::Scaling`]). A sample that does not converge counts with the states it reached.
pub fn layer_errors(
    model: &ImplicitModel,
    baseline: &ImplicitModel,
    inputs: &dyn InputSource,
    threads: Threads,
    cancel: &Cancel,
) -> Result<Vec<LayerError>> {
    check(model, baseline, inputs)?;
    let settings = EquilibriumSettings { threads: Threads::one(), ..Default::default() };
    let (own, theirs) = (Equilibrium::new(model, settings)?, Equilibrium::new(baseline, settings)?);
    let layers = baseline.layout().layers();
    // From the first layer, which is the last in the layout, to the last.
    let order: Vec<usize> = (0..layers.len()).rev().filter(|&k| layers[k].operator.is_none()).collect();
    let sums = Layers::new(baseline);
    let factors = factors(model, baseline);
    let samples = inputs.samples();
    let block_size = (BLOCK_STATES / baseline.shape().states.max(1)).clamp(16, BLOCK);
    let mut states = vec![Mismatch::default(); order.len()];
    let mut outputs = vec![Mismatch::default(); order.len() + 1];
    parallel::fold(
        threads,
        samples.div_ceil(block_size),
        |block| {
            cancel.check()?;
            let u = inputs.rows(block * block_size..((block + 1) * block_size).min(samples))?;
            let (mut mine, reference) = (own.run(&u)?, theirs.run(&u)?);
            for i in 0..u.rows() {
                for (x, factor) in mine.x.row_mut(i).iter_mut().zip(&factors.states) {
                    *x = (f64::from(*x) * factor) as f32;
                }
            }
            let mut states = vec![Mismatch::default(); order.len()];
            let mut outputs = vec![Mismatch::default(); order.len() + 1];
            for (step, &k) in order.iter().enumerate() {
                let range = baseline.layout().range(k);
                for i in 0..u.rows() {
                    states[step].add(&mine.x.row(i)[range.clone()], &reference.x.row(i)[range.clone()], 1.0);
                }
                let y = sums.outputs(k, &mine.x, &u)?;
                outputs[step].add(y.as_slice(), reference.y.as_slice(), 1.0);
            }
            outputs[order.len()].add(mine.y.as_slice(), reference.y.as_slice(), factors.outputs);
            Ok((states, outputs))
        },
        |_, (more_states, more_outputs)| {
            states.iter_mut().zip(more_states).for_each(|(sum, more)| sum.merge(more));
            outputs.iter_mut().zip(more_outputs).for_each(|(sum, more)| sum.merge(more));
            Ok(())
        },
    )?;
    let names = order.iter().map(|&k| layers[k].name.clone()).chain(["outputs".to_string()]);
    let mut before = 0.0;
    Ok(names
        .enumerate()
        .map(|(step, name)| {
            let output_error = outputs[step].relative();
            let added = output_error - before;
            before = output_error;
            LayerError { name, state_error: states.get(step).map(|s| s.relative()), output_error, added }
        })
        .collect())
}

fn check(model: &ImplicitModel, baseline: &ImplicitModel, inputs: &dyn InputSource) -> Result<()> {
    let sizes = |m: &ImplicitModel| m.layout().layers().iter().map(|l| l.size).collect::<Vec<_>>();
    if model.shape() != baseline.shape() || sizes(model) != sizes(baseline) {
        return Err(Error::shape(
            "model",
            format!("the baseline's shape {:?} and layers {:?}", baseline.shape(), sizes(baseline)),
            format!("{:?} and {:?}", model.shape(), sizes(model)),
        ));
    }
    if inputs.features() != baseline.shape().inputs || inputs.samples() == 0 {
        return Err(Error::shape(
            "inputs",
            format!("at least one sample of {} values", baseline.shape().inputs),
            format!("{} of {}", inputs.samples(), inputs.features()),
        ));
    }
    Ok(())
}

/// The factors that bring the model's states and outputs into the baseline's coordinates.
struct Factors {
    states: Vec<f64>,
    outputs: f64,
}

fn factors(model: &ImplicitModel, baseline: &ImplicitModel) -> Factors {
    let of = |m: &ImplicitModel| match &m.metadata().scaling {
        Some(scaling) => (scaling.states.clone(), scaling.outputs),
        None => (vec![1.0; m.shape().states], 1.0),
    };
    let ((mine, my_outputs), (theirs, their_outputs)) = (of(model), of(baseline));
    Factors { states: mine.iter().zip(&theirs).map(|(m, t)| m / t).collect(), outputs: my_outputs / their_outputs }
}

/// The most sweeps over layers that read each other; contraction usually ends them much earlier.
const MAX_SWEEPS: usize = 2000;
/// A sweep that changes less than this share of the largest value is the last, because float32 resolves no less.
const SETTLED: f32 = 1e-6;

/// The equations of a model, layer by layer.
struct Layers<'a> {
    layout: &'a Layout,
    /// Layers in an order in which they can be computed; layers that read each other are next to each other.
    order: Vec<usize>,
    /// Whether one sweep is enough.
    acyclic: bool,
    sums: Vec<LayerSum>,
    output: LayerSum,
}

impl<'a> Layers<'a> {
    fn new(baseline: &'a ImplicitModel) -> Self {
        let layout = baseline.layout();
        Self {
            layout,
            order: baseline.layer_order(),
            acyclic: baseline.layers_are_acyclic(),
            sums: (0..layout.layers().len()).map(|k| LayerSum::new(baseline, Target::Layer(k))).collect(),
            output: LayerSum::new(baseline, Target::Output),
        }
    }

    /// The outputs with the states of layer `k` and those before it given.
    fn outputs(&self, k: usize, x: &Matrix<f32>, u: &Matrix<f32>) -> Result<Matrix<f32>> {
        let part = |layer: usize| {
            let range = self.layout.range(layer);
            let values = (0..x.rows()).flat_map(|i| x.row(i)[range.clone()].iter().copied()).collect();
            Matrix::from_vec(x.rows(), range.len(), values)
        };
        let mut layers = (0..self.sums.len()).map(part).collect::<Result<Vec<_>>>()?;
        for _ in 0..MAX_SWEEPS {
            let (mut moved, mut size) = (0.0f32, 0.0f32);
            for &layer in self.order.iter().filter(|&&layer| layer < k) {
                let mut x = self.sums[layer].pre_activations(u.rows(), |source| place(source, &layers, u))?;
                self.layout.layers()[layer].activation.apply_slice(x.as_mut_slice());
                for (new, old) in x.as_slice().iter().zip(layers[layer].as_slice()) {
                    moved = moved.max((new - old).abs());
                    size = size.max(new.abs());
                }
                layers[layer] = x;
            }
            if self.acyclic || moved <= SETTLED * size {
                break;
            }
        }
        self.output.pre_activations(u.rows(), |source| place(source, &layers, u))
    }
}

fn place<'m>(source: Source, layers: &'m [Matrix<f32>], u: &'m Matrix<f32>) -> &'m [f32] {
    match source {
        Source::Input => u.as_slice(),
        Source::Layer(k) => layers[k].as_slice(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Activation;
    use crate::linalg::Csr;
    use crate::model::{DenseLayer, ModelParts};
    use crate::random::Random;

    fn layers(seed: u64) -> Vec<DenseLayer> {
        let mut r = Random::new(seed);
        let mut layer = |name: &str, inputs: usize, units: usize, activation| {
            let w = Matrix::from_fn(units, inputs, |_, _| (r.normal() / (inputs as f64).sqrt()) as f32);
            DenseLayer::new(name, w, activation).with_bias((0..units).map(|_| 0.1 * r.normal() as f32).collect())
        };
        vec![
            layer("first", 6, 8, Activation::Relu),
            layer("second", 8, 5, Activation::Tanh),
            layer("third", 5, 4, Activation::Relu),
            layer("outputs", 4, 3, Activation::Identity),
        ]
    }

    /// The same layers with a little noise on the weights.
    fn noisy(layers: &[DenseLayer], seed: u64) -> Vec<DenseLayer> {
        let mut r = Random::new(seed);
        let mut layers = layers.to_vec();
        for layer in &mut layers {
            layer.weights.as_mut_slice().iter_mut().for_each(|w| *w += 0.05 * r.normal() as f32);
        }
        layers
    }

    fn model(layers: &[DenseLayer]) -> ImplicitModel {
        ImplicitModel::from_layers(&layers[..3], &layers[3]).unwrap()
    }

    fn inputs(samples: usize) -> Matrix<f32> {
        let mut r = Random::new(9);
        Matrix::from_fn(samples, 6, |_, _| r.normal() as f32)
    }

    /// Activations after every layer, in double precision.
    fn walk(layers: &[DenseLayer], u: &[f32]) -> Vec<Vec<f64>> {
        let mut x: Vec<f64> = u.iter().map(|v| f64::from(*v)).collect();
        layers
            .iter()
            .map(|layer| {
                let bias = layer.bias.as_ref().unwrap();
                x = (0..layer.weights.rows())
                    .map(|i| {
                        let z: f64 = layer.weights.row(i).iter().zip(&x).map(|(w, x)| f64::from(*w) * x).sum();
                        layer.activation.apply_f64(z + f64::from(bias[i]))
                    })
                    .collect();
                x.clone()
            })
            .collect()
    }

    #[test]
    fn mixed_networks_give_the_same_errors() {
        let before = layers(1);
        let after = noisy(&before, 2);
        let u = inputs(300);
        let run =
            |threads| layer_errors(&model(&after), &model(&before), &u, Threads::new(threads), &Cancel::new()).unwrap();
        let found = run(1);
        assert_eq!(found, run(3));
        let names: Vec<&str> = found.iter().map(|e| e.name.as_str()).collect();
        assert_eq!(names, ["first", "second", "third", "outputs"]);
        let mut previous = 0.0;
        for step in 0..4 {
            // The first layers come from the model, the last ones from the baseline.
            let mixed: Vec<DenseLayer> = after[..=step].iter().chain(&before[step + 1..]).cloned().collect();
            let (mut at_output, mut at_layer) = ((0.0, 0.0), (0.0, 0.0));
            for i in 0..u.rows() {
                let (got, wanted) = (walk(&mixed, u.row(i)), walk(&before, u.row(i)));
                for (sums, k) in [(&mut at_output, 3), (&mut at_layer, step)] {
                    sums.0 += got[k].iter().zip(&wanted[k]).map(|(g, w)| (g - w).powi(2)).sum::<f64>();
                    sums.1 += wanted[k].iter().map(|w| w * w).sum::<f64>();
                }
            }
            let relative = |s: (f64, f64)| (s.0 / s.1).sqrt();
            let error = &found[step];
            assert!((error.output_error - relative(at_output)).abs() < 1e-5, "{error:?} {}", relative(at_output));
            assert!((error.added - (error.output_error - previous)).abs() < 1e-15);
            previous = error.output_error;
            match error.state_error {
                Some(e) => assert!((e - relative(at_layer)).abs() < 1e-5, "{e} {}", relative(at_layer)),
                None => assert_eq!(step, 3),
            }
        }
        assert!(found[0].output_error > 0.01, "the noise is seen");
    }

    #[test]
    fn a_baseline_with_cycles_settles_behind_the_layers_that_are_given() {
        // One layer that reads itself behind one that does not; the model differs in the first alone, so all of its error is
        // there when the baseline's second layer has settled on the model's first.
        let cyclic = |scale: f32| {
            let mut r = Random::new(4);
            let mut sparse = |rows: usize, cols: usize, size: f64| {
                Csr::from_dense(&Matrix::from_fn(rows, cols, |_, _| (size * r.normal()) as f32))
            };
            let (own, across) = (sparse(3, 3, 0.15), sparse(3, 4, 0.5));
            let a = Csr::from_rows(
                7,
                (0..7).map(|i| {
                    let reads = |m: &Csr<f32>, by: usize| m.row(i).map(|(j, v)| (j + by, v)).collect::<Vec<_>>();
                    if i < 3 { [reads(&own, 0), reads(&across, 3)].concat() } else { Vec::new() }
                }),
            );
            let b = sparse(7, 6, 0.5);
            let b =
                Csr::from_rows(6, (0..7).map(|i| b.row(i).map(move |(j, v)| (j, if i < 3 { 0.0 } else { scale * v }))));
            ImplicitModel::new(ModelParts {
                a,
                b,
                c: sparse(2, 7, 0.7),
                d: Csr::empty(2, 6),
                state_bias: vec![0.1; 7],
                output_bias: vec![0.0; 2],
                layout: Layout::new(vec![
                    crate::layout::Layer::dense("second", 3, Activation::Tanh),
                    crate::layout::Layer::dense("first", 4, Activation::Relu),
                ]),
                ..ModelParts::default()
            })
            .unwrap()
        };
        let found = layer_errors(&cyclic(1.1), &cyclic(1.0), &inputs(40), Threads::one(), &Cancel::new()).unwrap();
        assert!(found[0].output_error > 0.01, "{found:?}");
        for later in &found[1..] {
            assert!((later.output_error - found[0].output_error).abs() < 1e-5 * found[0].output_error, "{found:?}");
        }
    }

    #[test]
    fn the_same_model_adds_nothing_and_rescaling_does_not_count() {
        let mut layers = layers(5);
        layers[1].activation = Activation::Relu;
        let baseline = model(&layers);
        let rescaled = baseline.rescale(0.99).unwrap().model;
        for other in [baseline.clone(), rescaled] {
            let found = layer_errors(&other, &baseline, &inputs(40), Threads::one(), &Cancel::new()).unwrap();
            assert!(found.iter().all(|e| e.output_error == 0.0 && e.state_error.unwrap_or(0.0) == 0.0), "{found:?}");
        }
    }

    #[test]
    fn other_layers_or_inputs_are_refused() {
        let baseline = model(&layers(1));
        let run = |model: &ImplicitModel, u: &Matrix<f32>| {
            layer_errors(model, &baseline, u, Threads::one(), &Cancel::new()).map(|_| ())
        };
        assert!(run(&baseline, &Matrix::zeros(3, 7)).is_err());
        assert!(run(&baseline, &Matrix::zeros(0, 6)).is_err());
        let mut parts = baseline.clone().into_parts();
        parts.layout = Layout::new(vec![crate::layout::Layer::dense("all", 17, Activation::Relu)]);
        assert!(run(&ImplicitModel::new(parts).unwrap(), &inputs(3)).is_err());
    }
}
