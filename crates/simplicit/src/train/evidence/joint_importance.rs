//! Row weights that account for errors that add up.
//!
//! The Fisher diagonal counts the error at every position of every channel as if it were alone. Errors of pruned taps
//! are not independent: they keep their sign over an image, and an average over a map adds them up. On ResNet-20 the
//! diagonal accounts for a fifth of the effect of the errors before the global average, and a search that relies on
//! it prunes too much there.
//!
//! A rough model has errors of the right kind. For every layer, R = E(Σ g·e)² / Σ_i λ_i·E(e_i²), with g = ∂ log
//! p(y|u)/∂z at the baseline and e the layer's errors on the baseline's states, is the factor that the diagonal
//! misses; the layer's weights are multiplied by it.

use std::ops::Range;

use crate::Result;
use crate::backend::cuda::{Cuda, Values};
use crate::backend::{self, Device};
use crate::equilibrium::{DeviceModel, EquilibriumSettings, InputGradient, LayerSum};
use crate::linalg::Matrix;
use crate::model::{ImplicitModel, Target};
use crate::network::Source;
use crate::parallel::{self, Threads};
use crate::random::Random;
use crate::train::evidence::device_walk::inputs_of;
use crate::train::evidence::importance::{add_block, add_squares, drawn, drawn_in_blocks, softmax, words_of};
use crate::train::evidence::sums_task::SumsTask;
use crate::train::evidence::walk::SAMPLES;
use crate::train::{Run, TrainInput};

/// Draws from the baseline's softmax per sample.
const DRAWS: usize = 2;
/// Bytes for every state of a sample in work: values before and after activations, those of every layer on its own,
/// errors and cotangents.
pub(in crate::train) const BYTES_PER_STATE: usize = 20;
/// The most states of the samples that a thread works on together, because a block of 32 images may have hundreds of
/// millions.
const TOGETHER: usize = 1 << 24;
/// A larger ratio, or a smaller one than its inverse, depends more on the samples than on the layer.
const TRUSTED: f64 = 64.0;

/// Number of samples that a thread works on together, if each has `states` states.
pub(in crate::train) fn samples_together(states: usize) -> usize {
    (TOGETHER / states.max(1)).clamp(1, SAMPLES)
}

/// `weights` (per row of the layout, then per output) with every layer multiplied by the ratio that errors like those
/// of `rough` give.
pub(in crate::train) fn joint_importance(
    input: &TrainInput,
    baseline: &ImplicitModel,
    rough: &ImplicitModel,
    weights: &[f64],
    device: Device,
    run: &Run,
) -> Result<Vec<f64>> {
    let (targets, rows) = targets_and_rows(baseline);
    let samples = input.source.samples();
    let mut sums = vec![0.0; targets.len() + weights.len()];
    let mut add = |block: &[f64]| add_block(&mut sums, block, "joint row weights of a block");
    let work = SAMPLES as f64 * baseline.layout().size() as f64;
    let acyclic = baseline.layers_are_acyclic() && rough.layers_are_acyclic();
    if let Some(delegate) = run.keep.delegate() {
        let task = SumsTask::Joint { samples, baseline: Box::new(baseline.clone()), rough: Box::new(rough.clone()) };
        delegate.sums(&task, &mut |_, sum| add(&sum))?;
    } else if let Some(cuda) = backend::gpu(device, work)?.filter(|_| acyclic)
        && let Some((of_layers, of_rows)) =
            backend::or_cpu(device, on_gpu(cuda, input, (baseline, rough), &targets, &rows, run))?
    {
        return Ok(multiplied(weights, &rows, &of_layers, &of_rows));
    } else {
        let together = Together::new(baseline, rough)?;
        parallel::fold(
            run.threads,
            samples.div_ceil(SAMPLES),
            |block| {
                run.cancel.check()?;
                let u = input.source.inputs(block * SAMPLES..((block + 1) * SAMPLES).min(samples))?;
                together.block(&u, block)
            },
            |_, sum| add(&sum),
        )?;
    }
    let (of_layers, of_rows) = sums.split_at(targets.len());
    Ok(multiplied(weights, &rows, of_layers, of_rows))
}

/// All layers and the output, and the row weights of each.
fn targets_and_rows(baseline: &ImplicitModel) -> (Vec<Target>, Vec<Range<usize>>) {
    let layout = baseline.layout();
    let layers = layout.layers().len();
    let outputs = layout.rows()..layout.rows() + baseline.shape().outputs;
    let targets = (0..layers).map(Target::Layer).chain([Target::Output]).collect();
    (targets, (0..layers).map(|k| layout.row_range(k)).chain([outputs]).collect())
}

/// Computes the contribution of a block of samples to E(Σ g·e)² of every target and to Σ e² of every row.
pub(super) struct Together<'a> {
    baseline: &'a ImplicitModel,
    gradient: InputGradient,
    targets: Vec<Target>,
    rows: Vec<Range<usize>>,
    /// The rough model's layers.
    sums: Vec<LayerSum>,
}

impl<'a> Together<'a> {
    pub(super) fn new(baseline: &'a ImplicitModel, rough: &ImplicitModel) -> Result<Self> {
        let (targets, rows) = targets_and_rows(baseline);
        let sums = targets.iter().map(|&target| LayerSum::new(rough, target)).collect();
        let settings = EquilibriumSettings { threads: Threads::one(), ..Default::default() };
        Ok(Self { baseline, gradient: InputGradient::new(baseline, settings)?, targets, rows, sums })
    }

    /// The sums over block number `block`: of the targets, then of the rows. The block is processed in parts that
    /// memory has room for; draws and the order of sums are those of the whole block.
    pub(super) fn block(&self, u: &Matrix<f32>, block: usize) -> Result<Vec<f64>> {
        self.block_in_parts(u, block, samples_together(self.baseline.layout().size()))
    }

    fn block_in_parts(&self, u: &Matrix<f32>, block: usize, size: usize) -> Result<Vec<f64>> {
        let Self { baseline, targets, rows, .. } = self;
        let mut out = vec![0.0; targets.len() + rows.last().map_or(0, |r| r.end)];
        let (together, squares) = out.split_at_mut(targets.len());
        // A random stream for every draw, placed at its first sample.
        let mut random = Random::new(block as u64);
        let each = u.rows() * words_of(baseline.shape().outputs);
        let mut streams: Vec<Random> = (0..DRAWS)
            .map(|_| {
                let stream = random.clone();
                for _ in 0..each {
                    random.bits();
                }
                stream
            })
            .collect();
        let mut worth = vec![Vec::new(); DRAWS];
        for first in (0..u.rows()).step_by(size) {
            let count = size.min(u.rows() - first);
            let part =
                Matrix::from_vec(count, u.cols(), u.as_slice()[first * u.cols()..][..count * u.cols()].to_vec())?;
            self.part(&part, &mut streams, squares, &mut worth)?;
        }
        for worth in worth.iter().flat_map(|of_draw| of_draw.chunks(targets.len().max(1))) {
            together.iter_mut().zip(worth).for_each(|(together, sum)| *together += sum * sum / DRAWS as f64);
        }
        Ok(out)
    }

    /// Adds Σ e² of every row, and for every draw appends Σ g·e of every target, sample after sample.
    fn part(&self, u: &Matrix<f32>, streams: &mut [Random], squares: &mut [f64], worth: &mut [Vec<f64>]) -> Result<()> {
        let Self { baseline, gradient, targets, rows, sums } = self;
        let layout = baseline.layout();
        let scale = baseline.metadata().scaling.as_ref().map_or(1.0, |s| s.outputs) as f32;
        let solution = gradient.equilibrium().run(u)?;
        let of_layer = |m: &Matrix<f32>, k: usize| {
            let range = layout.range(k);
            Matrix::from_fn(m.rows(), range.len(), |s, i| m[(s, range.start + i)])
        };
        let states: Vec<Matrix<f32>> = (0..layout.layers().len()).map(|k| of_layer(&solution.x, k)).collect();
        let mut errors = Vec::with_capacity(targets.len());
        for (sum, &target) in sums.iter().zip(targets) {
            let mut z = sum.pre_activations(u.rows(), |source| match source {
                Source::Input => u.as_slice(),
                Source::Layer(k) => states[k].as_slice(),
            })?;
            let (exact, first) = match target {
                Target::Layer(k) => (&solution.z, layout.range(k).start),
                Target::Output => (&solution.y, 0),
            };
            for s in 0..z.rows() {
                let exact = &exact.row(s)[first..];
                z.row_mut(s).iter_mut().zip(exact).for_each(|(z, e)| *z -= e);
            }
            errors.push(z);
        }
        for (errors, rows) in errors.iter().zip(rows) {
            let positions = errors.cols() / rows.len().max(1);
            for s in 0..errors.rows() {
                for (square, e) in squares[rows.clone()].iter_mut().zip(errors.row(s).chunks(positions.max(1))) {
                    *square += e.iter().map(|e| f64::from(*e).powi(2)).sum::<f64>() / positions as f64;
                }
            }
        }
        let probabilities = softmax(&Matrix::from_fn(u.rows(), solution.y.cols(), |s, k| scale * solution.y[(s, k)]));
        for (random, worth) in streams.iter_mut().zip(worth) {
            let v = drawn(&probabilities, scale, random);
            let cotangents = gradient.pre_activations(&solution.z, u, &v)?;
            for s in 0..u.rows() {
                for (errors, &target) in errors.iter().zip(targets) {
                    let g = match target {
                        Target::Layer(k) => &cotangents.row(s)[layout.range(k)],
                        Target::Output => v.row(s),
                    };
                    worth.push(errors.row(s).iter().zip(g).map(|(e, g)| f64::from(e * g)).sum());
                }
            }
        }
        Ok(())
    }
}

/// The row weights, multiplied by the ratio of their layer.
fn multiplied(weights: &[f64], rows: &[Range<usize>], together: &[f64], squares: &[f64]) -> Vec<f64> {
    let mut out = weights.to_vec();
    for (&together, rows) in together.iter().zip(rows) {
        let alone: f64 = rows.clone().map(|i| weights[i] * squares[i]).sum();
        let ratio = if alone > 0.0 && together > 0.0 { together / alone } else { 1.0 };
        out[rows.clone()].iter_mut().for_each(|w| *w *= ratio.clamp(1.0 / TRUSTED, TRUSTED));
    }
    out
}

/// E(Σ g·e)² of every target and Σ e² of every row on a GPU, with the draws of the CPU.
fn on_gpu(
    cuda: &'static Cuda,
    input: &TrainInput,
    (baseline, rough): (&ImplicitModel, &ImplicitModel),
    targets: &[Target],
    rows: &[Range<usize>],
    run: &Run,
) -> Result<(Vec<f64>, Vec<f64>)> {
    let baseline_on = DeviceModel::new(cuda, baseline, run.threads)?;
    let rough_on = DeviceModel::new(cuda, rough, run.threads)?;
    let scale = baseline.metadata().scaling.as_ref().map_or(1.0, |s| s.outputs) as f32;
    let samples = input.source.samples();
    let mut together = vec![0.0; targets.len()];
    let mut squares = vec![0.0; rows.last().map_or(0, |r| r.end)];
    // Pre-activations, values, errors and cotangents of all layers are kept.
    let size = (baseline_on.at_once(6)? / SAMPLES).max(1) * SAMPLES;
    for first in (0..samples).step_by(size) {
        run.cancel.check()?;
        let session = cuda.session()?;
        let u = inputs_of(&session, input.source, first..(first + size).min(samples))?;
        let count = u.count;
        let pass = baseline_on.pass(&session, u, true)?;
        let mut errors: Vec<Option<Values>> = targets.iter().map(|_| None).collect();
        for layer in rough_on.layers() {
            let e = layer.forward(&session, count, |source| pass.of(source))?;
            session.add_scaled(&e, pass.z(layer.target())?, None, -1.0)?;
            let Some(at) = targets.iter().position(|t| *t == layer.target()) else { continue };
            let own = &mut squares[rows[at].clone()];
            let positions = e.units() / own.len().max(1);
            add_squares(own, &session, &e, 1.0 / positions as f64)?;
            errors[at] = Some(e);
        }
        let outputs = Matrix::from_vec(count, pass.y.units(), session.to_rows(&pass.y)?)?;
        let probabilities = softmax(&Matrix::from_fn(count, outputs.cols(), |s, k| scale * outputs[(s, k)]));
        let blocks = first / SAMPLES..(first + count).div_ceil(SAMPLES);
        let mut streams: Vec<Random> = blocks.map(|block| Random::new(block as u64)).collect();
        for _ in 0..DRAWS {
            let v = drawn_in_blocks(&probabilities, scale, &mut streams, SAMPLES);
            let cotangents = baseline_on.pull_back(&session, &pass, v.as_slice())?;
            let of_outputs = session.values_of_rows(v.as_slice(), count, 1)?;
            for ((sum, e), target) in together.iter_mut().zip(&errors).zip(targets) {
                let Some(e) = e else { continue };
                let g = match target {
                    Target::Layer(k) => &cotangents[*k],
                    Target::Output => &of_outputs,
                };
                *sum += session.sample_products(e, g)?.iter().map(|p| p * p / DRAWS as f64).sum::<f64>();
            }
        }
    }
    Ok((together, squares))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Activation;
    use crate::network::{Network, Shape, Weights, Window};
    use crate::parallel::Cancel;
    use crate::states::{Collected, StateMap};
    use crate::train::{Forget, importance};

    fn network() -> Network {
        let mut random = Random::new(5);
        let mut weights = |rows, cols| Matrix::from_fn(rows, cols, |_, _| 0.4 * random.normal() as f32);
        Network::builder(Shape::map(2, 6, 6))
            .and_then(|b| b.convolution(weights(4, 18), Window::square(3, 1, 1), Some(vec![0.1; 4])))
            .and_then(|b| b.activation(Activation::Relu))
            .and_then(|b| b.max_pool(Window::square(2, 2, 0)))
            .and_then(|b| b.convolution(weights(5, 36), Window::square(3, 1, 1), Some(vec![0.2; 5])))
            .and_then(|b| b.activation(Activation::Relu))
            .and_then(|b| b.global_average())
            .and_then(|b| b.linear(weights(3, 5), None))
            .and_then(|b| b.build())
            .unwrap()
    }

    #[test]
    fn a_layer_counts_by_what_its_errors_do_together() {
        let (network, cancel) = (network(), Cancel::new());
        let mut random = Random::new(6);
        let u = Matrix::from_fn(70, 72, |_, _| random.normal() as f32);
        let weights = importance(&network, &u, 4, 1, Threads::one(), &cancel).unwrap();
        let baseline = ImplicitModel::from_network(&network).unwrap();
        // Errors that are known: a constant in every channel of the layer before the average, nothing elsewhere.
        let shift = [0.3f32, -0.1, 0.2, 0.05, -0.4];
        let mut parts = baseline.clone().into_parts();
        parts.state_bias[..5].iter_mut().zip(shift).for_each(|(b, d)| *b += d);
        let rough = ImplicitModel::new(parts).unwrap();
        let source = Collected::new(&network, &u).unwrap();
        let input = TrainInput {
            source: &source,
            baseline: Some(&baseline),
            importance: Some(&weights),
            preprocessing: Default::default(),
        };
        let joint = |threads: usize| {
            let run = Run { threads: Threads::new(threads), cancel: &cancel, keep: &Forget, progress: &mut |_| {} };
            joint_importance(&input, &baseline, &rough, &weights, Device::Cpu, &run).unwrap()
        };
        let got = joint(1);
        assert_eq!(got, joint(2));
        // The sums do not depend on how many samples are processed together.
        let sums = Together::new(&baseline, &rough).unwrap();
        let whole = sums.block(&Matrix::from_fn(SAMPLES, 72, |s, j| u[(s, j)]), 1).unwrap();
        for size in [1, 5, 16] {
            let parts = sums.block_in_parts(&Matrix::from_fn(SAMPLES, 72, |s, j| u[(s, j)]), 1, size).unwrap();
            assert_eq!(parts, whole, "{size}");
        }
        // The same by hand: y is linear in the average of relu(z) over the nine positions of each of the five channels.
        let last = &network.output().terms[0].weights;
        let Weights::Dense(last) = last else { panic!("{last:?}") };
        let mut together = 0.0;
        for block in 0..u.rows().div_ceil(SAMPLES) {
            let rows = block * SAMPLES..((block + 1) * SAMPLES).min(u.rows());
            let part = Matrix::from_fn(rows.len(), 72, |s, j| u[(rows.start + s, j)]);
            let states = network.states(&part).unwrap();
            let probabilities = softmax(&states.y.cast());
            let mut random = Random::new(block as u64);
            for _ in 0..DRAWS {
                let v = drawn(&probabilities, 1.0, &mut random);
                for s in 0..v.rows() {
                    let slope = |c: usize| (0..3).map(|k| f64::from(v[(s, k)] * last[(k, c)])).sum::<f64>() / 9.0;
                    let active = |c: usize| (0..9).filter(|p| states.z[(s, 9 * c + p)] > 0.0).count() as f64;
                    let sum: f64 = (0..5).map(|c| slope(c) * active(c) * f64::from(shift[c])).sum();
                    together += sum * sum / DRAWS as f64;
                }
            }
        }
        let alone: f64 = (0..5).map(|i| weights[i] * f64::from(shift[i]).powi(2)).sum::<f64>() * u.rows() as f64;
        let ratio = together / alone;
        // Errors of one sign at nine positions: the diagonal accounts for much less.
        assert!(ratio > 2.0, "{ratio}");
        for i in 0..5 {
            assert!((got[i] / weights[i] / ratio - 1.0).abs() < 1e-3, "{} {ratio}", got[i] / weights[i]);
        }
        assert_eq!(got[5..], weights[5..], "layers without errors keep their weights");
    }
}
