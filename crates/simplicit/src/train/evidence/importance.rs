//! Output-aware weights: how strongly an error in each pre-activation changes the output.

use std::ops::Range;

use crate::backend::cuda::{Session, Values};
use crate::backend::{self, Device};
use crate::equilibrium::{DeviceModel, EquilibriumSettings, InputGradient};
use crate::linalg::Matrix;
use crate::model::ImplicitModel;
use crate::network::Network;
use crate::parallel::{self, Cancel, Threads};
use crate::random::Random;
use crate::states::InputSource;
use crate::train::evidence::sums_task::SumsTask;
use crate::train::{Forget, Run};
use crate::{Error, Result};

/// The most samples in a block of the expectation, and the most states in one: gradients of feature maps are large.
const BLOCK: usize = 256;
const BLOCK_STATES: usize = 1 << 22;

/// λ_i = E[(∂ log p(y|u)/∂z_i)²] over the inputs and over y from the network's own softmax, estimated with `draws`
/// random mixtures of the classes per sample: the Fisher diagonal, which needs no labels. One number per row of [the
/// network's model](ImplicitModel::from_network) (last layer first; summed over the positions of a channel), then one
/// per output, where the expectation over y is p(1 − p).
pub fn importance(
    network: &Network,
    inputs: &dyn InputSource,
    draws: usize,
    seed: u64,
    threads: Threads,
    cancel: &Cancel,
) -> Result<Vec<f64>> {
    let run = Run { threads, cancel, keep: &Forget, progress: &mut |_| {} };
    importance_on(Device::Cpu, network, inputs, draws, seed, &run)
}

/// [`importance`] on a device, or by a run's delegate. The draws are the same, and on a GPU the numbers agree within
/// the rounding of single precision. The inputs are the first ones of the run.
pub fn importance_on(
    device: Device,
    network: &Network,
    inputs: &dyn InputSource,
    draws: usize,
    seed: u64,
    run: &Run,
) -> Result<Vec<f64>> {
    network.require_inputs(inputs.features())?;
    let samples = inputs.samples();
    let model = ImplicitModel::from_network(network)?;
    let size = block_size(&model);
    let mut total = vec![0.0; model.layout().rows() + model.shape().outputs];
    let add = |total: &mut [f64], sum: &[f64]| add_block(total, sum, "row weights of a block");
    if let Some(delegate) = run.keep.delegate() {
        let maps = model.layout().layers().iter().any(|layer| layer.map.is_some());
        let task = SumsTask::Own { samples, size, draws, seed, maps };
        delegate.sums(&task, &mut |_, sum| add(&mut total, &sum))?;
    } else {
        let work = BLOCK as f64 * model.layout().size() as f64;
        if let Some(cuda) = backend::gpu(device, work)? {
            let sums = DeviceModel::new(cuda, &model, run.threads)
                .and_then(|on_gpu| sums_on_gpu(&on_gpu, &model, inputs, (draws, seed), size, run.cancel));
            if let Some(sums) = backend::or_cpu(device, sums)? {
                return Ok(averaged(sums, samples * draws));
            }
        }
        let own = OwnWeights::new(&model, draws, seed)?;
        parallel::fold(
            run.threads,
            samples.div_ceil(size),
            |block| {
                run.cancel.check()?;
                own.block(&inputs.rows(block * size..((block + 1) * size).min(samples))?, block)
            },
            |_, sum| add(&mut total, &sum),
        )?;
    }
    Ok(averaged(total, samples * draws))
}

fn averaged(mut sums: Vec<f64>, count: usize) -> Vec<f64> {
    sums.iter_mut().for_each(|sum| *sum /= count as f64);
    sums
}

/// Adds the sums of a block, which may come from another process, to the total; these must be valid.
pub(super) fn add_block(total: &mut [f64], sum: &[f64], what: &str) -> Result<()> {
    if total.len() != sum.len() {
        return Err(Error::shape(what, total.len(), sum.len()));
    }
    total.iter_mut().zip(sum).for_each(|(total, sum)| *total += sum);
    Ok(())
}

/// Number of samples in a block, a power of two: a shard of another process is a whole number of blocks.
pub(super) fn block_size(model: &ImplicitModel) -> usize {
    block_samples(model.shape().states)
}

/// The same for models with this many states.
pub(in crate::train) fn block_samples(states: usize) -> usize {
    1 << (BLOCK_STATES / states.max(1)).clamp(1, BLOCK).ilog2()
}

/// The random stream of a block depends on its number alone, not on the process that computes it.
fn stream(seed: u64, block: usize) -> Random {
    Random::new(seed ^ (block as u64).wrapping_mul(0x2545_f491_4f6c_dd1d))
}

/// Computes the contribution of a block of samples to the row weights of a network's model.
pub(super) struct OwnWeights {
    gradient: InputGradient,
    /// The units of every row: a channel has its positions, a dense row its unit; an operator's layer has no rows.
    units: Vec<Range<usize>>,
    draws: usize,
    seed: u64,
}

impl OwnWeights {
    pub(super) fn new(model: &ImplicitModel, draws: usize, seed: u64) -> Result<Self> {
        let layout = model.layout();
        let mut units = Vec::with_capacity(layout.rows());
        for (k, layer) in layout.layers().iter().enumerate() {
            let (first, each) = (layout.range(k).start, layer.size / layer.rows().max(1));
            units.extend((0..layer.rows()).map(|i| first + i * each..first + (i + 1) * each));
        }
        // The errors of the gradients are not used, so they are not bounded.
        let settings = EquilibriumSettings { threads: Threads::one(), certified: false, ..Default::default() };
        Ok(Self { gradient: InputGradient::new(model, settings)?, units, draws, seed })
    }

    /// The sums over block number `block`.
    pub(super) fn block(&self, u: &Matrix<f32>, block: usize) -> Result<Vec<f64>> {
        let solution = self.gradient.equilibrium().run(u)?;
        let mut random = stream(self.seed, block);
        let probabilities = softmax(&solution.y);
        let mut sum = vec![0.0; self.units.len() + solution.y.cols()];
        let (of_states, of_outputs) = sum.split_at_mut(self.units.len());
        add_outputs(of_outputs, &probabilities, self.draws);
        for _ in 0..self.draws {
            let v = drawn(&probabilities, 1.0, &mut random);
            let gradient = self.gradient.pre_activations(&solution.z, u, &v)?;
            for i in 0..u.rows() {
                let gradient = gradient.row(i);
                for (sum, units) in of_states.iter_mut().zip(&self.units) {
                    *sum += gradient[units.clone()].iter().map(|&g| f64::from(g) * f64::from(g)).sum::<f64>();
                }
            }
        }
        Ok(sum)
    }
}

/// Adds p(1 − p) of every output and sample, once per draw. A single output is not a distribution over classes but a
/// number, whose error has weight one.
fn add_outputs(sums: &mut [f64], probabilities: &Matrix<f32>, draws: usize) {
    if probabilities.cols() == 1 {
        sums.iter_mut().for_each(|sum| *sum += (draws * probabilities.rows()) as f64);
        return;
    }
    for i in 0..probabilities.rows() {
        for (sum, &p) in sums.iter_mut().zip(probabilities.row(i)) {
            *sum += draws as f64 * f64::from(p) * (1.0 - f64::from(p));
        }
    }
}

/// The sums over all blocks on a GPU, several blocks of `size` samples at a time.
fn sums_on_gpu(
    on_gpu: &DeviceModel,
    model: &ImplicitModel,
    inputs: &dyn InputSource,
    (draws, seed): (usize, u64),
    size: usize,
    cancel: &Cancel,
) -> Result<Vec<f64>> {
    let (layout, samples, outputs) = (model.layout(), inputs.samples(), model.shape().outputs);
    let mut total = vec![0.0; layout.rows() + outputs];
    let blocks = (on_gpu.at_once(4)? / size).max(1);
    for first in (0..samples.div_ceil(size)).step_by(blocks) {
        cancel.check()?;
        let range = first * size..((first + blocks) * size).min(samples);
        let session = on_gpu.cuda().session()?;
        let there = inputs.on_device().and_then(|inputs| inputs.on(&session, range.clone()));
        let u = there.unwrap_or_else(|| {
            let u = inputs.rows(range.clone())?;
            session.values_of_rows(u.as_slice(), u.rows(), u.cols())
        })?;
        let count = u.count;
        let pass = on_gpu.pass(&session, u, true)?;
        let probabilities = softmax(&Matrix::from_vec(count, outputs, session.to_rows(&pass.y)?)?);
        add_outputs(&mut total[layout.rows()..], &probabilities, draws);
        let mut streams: Vec<Random> = (first..range.end.div_ceil(size)).map(|block| stream(seed, block)).collect();
        for _ in 0..draws {
            let v = drawn_in_blocks(&probabilities, 1.0, &mut streams, size);
            for (k, cotangent) in on_gpu.pull_back(&session, &pass, v.as_slice())?.iter().enumerate() {
                add_squares(&mut total[layout.row_range(k)], &session, cotangent, 1.0)?;
            }
        }
    }
    Ok(total)
}

/// Adds Σ v² of every row, times a factor. A row has one channel or several.
pub(in crate::train) fn add_squares(rows: &mut [f64], session: &Session, values: &Values, factor: f64) -> Result<()> {
    if rows.is_empty() {
        return Ok(());
    }
    let of_channels = session.channel_squares(values)?;
    let each = (of_channels.len() / rows.len()).max(1);
    let sums = of_channels.chunks(each).map(|s| s.iter().sum::<f64>() * factor);
    rows.iter_mut().zip(sums).for_each(|(total, sum)| *total += sum);
    Ok(())
}

/// [`drawn`] for blocks of `size` rows, each from its own stream.
pub(in crate::train) fn drawn_in_blocks(
    probabilities: &Matrix<f32>,
    scale: f32,
    streams: &mut [Random],
    size: usize,
) -> Matrix<f32> {
    let mut out = probabilities.clone();
    for i in 0..out.rows() {
        mix_classes(out.row_mut(i), scale, &mut streams[i / size]);
    }
    out
}

pub(in crate::train) fn softmax(logits: &Matrix<f32>) -> Matrix<f32> {
    let mut out = logits.clone();
    for i in 0..out.rows() {
        let row = out.row_mut(i);
        let top = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let mut sum = 0.0;
        for v in row.iter_mut() {
            *v = (*v - top).exp();
            sum += *v;
        }
        for v in row.iter_mut() {
            *v /= sum;
        }
    }
    out
}

/// One random vector per row whose covariance is the Fisher information of the outputs, where the logits are `scale` times
/// the outputs.
pub(in crate::train) fn drawn(probabilities: &Matrix<f32>, scale: f32, random: &mut Random) -> Matrix<f32> {
    let mut out = probabilities.clone();
    (0..out.rows()).for_each(|i| mix_classes(out.row_mut(i), scale, random));
    out
}

/// Number of random words that the draw for one sample takes.
pub(in crate::train) fn words_of(outputs: usize) -> usize {
    outputs.div_ceil(64)
}

/// Replaces probabilities p by Σ_y ±√p_y (e_y − p), a random sign for every class: its covariance is diag(p) − ppᵀ,
/// that of the gradient e_y − p for one y drawn from p. If y itself were drawn, the other classes would hardly ever
/// occur where one is nearly certain, as on images that a network was trained on, and the row weights would come from
/// a few samples.
fn mix_classes(row: &mut [f32], scale: f32, random: &mut Random) {
    if let [only] = row {
        // A single output has no classes: it is a number with variance one, as for the mean of a normal distribution.
        *only = if random.bits() & 1 == 0 { scale } else { -scale };
        return;
    }
    let mut sum = 0.0;
    let mut signs = 0;
    for (k, p) in row.iter_mut().enumerate() {
        if k % 64 == 0 {
            signs = random.bits();
        }
        let root = f64::from(*p).sqrt() * if signs >> (k % 64) & 1 == 0 { 1.0 } else { -1.0 };
        sum += root;
        *p = root as f32;
    }
    for v in row.iter_mut() {
        let root = f64::from(*v);
        *v = (f64::from(scale) * (root - root * root * sum)) as f32;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Activation;
    use crate::network::Shape;

    #[test]
    fn one_output_is_a_number_whose_error_counts() {
        // y = v·relu(u) of positive u: (∂y/∂z)² = v², and the error of y itself counts once.
        let v = [0.5f32, -2.0];
        let network = Network::builder(Shape::Vector(2))
            .and_then(|b| b.linear(Matrix::from_fn(2, 2, |i, j| f32::from(u8::from(i == j))), None))
            .and_then(|b| b.activation(Activation::Relu))
            .and_then(|b| b.linear(Matrix::from_fn(1, 2, |_, j| v[j]), None))
            .and_then(|b| b.build())
            .unwrap();
        let u = Matrix::from_fn(50, 2, |i, j| 0.5 + ((i * 7 + j * 3) % 11) as f32);
        let got = importance(&network, &u, 3, 7, Threads::new(1), &Cancel::new()).unwrap();
        for (got, exact) in got.iter().zip([0.25, 4.0, 1.0]) {
            assert!((got - exact).abs() < 1e-6, "{got} against {exact}");
        }
    }

    #[test]
    fn matches_the_definition_on_a_linear_softmax() {
        // One identity layer: ∂ log p(y)/∂z = Wᵀ(p − e_y), so E over y of its square is Σ_y p_y (Wᵀ(p − e_y))².
        let w = Matrix::from_fn(3, 2, |i, j| (i as f32 - 1.0) * 0.7 + j as f32 * 0.4);
        let network = Network::builder(Shape::Vector(2))
            .and_then(|b| b.linear(Matrix::from_fn(2, 2, |i, j| f32::from(u8::from(i == j))), None))
            .and_then(|b| b.activation(Activation::Tanh))
            .and_then(|b| b.linear(w.clone(), None))
            .and_then(|b| b.build())
            .unwrap();
        let u = Matrix::from_fn(600, 2, |i, j| ((i * 7 + j * 3) % 11) as f32 / 11.0 - 0.5);
        let run = |threads| importance(&network, &u, 400, 7, Threads::new(threads), &Cancel::new()).unwrap();
        let got = run(1);
        assert_eq!(got, run(3));
        let p = softmax(&network.forward(&u).unwrap());
        for c in 0..3 {
            let exact: f64 = (0..600).map(|i| f64::from(p[(i, c)]) * (1.0 - f64::from(p[(i, c)])) / 600.0).sum();
            assert!((got[2 + c] - exact).abs() < 1e-9, "{} against {exact}", got[2 + c]);
        }
        for k in 0..2 {
            let mut expected = 0.0;
            for i in 0..600 {
                let slope = 1.0 - f64::from(u[(i, k)]).tanh().powi(2);
                for y in 0..3 {
                    let g: f64 = (0..3)
                        .map(|c| f64::from(w[(c, k)]) * (f64::from(p[(i, c)]) - f64::from(u8::from(c == y))))
                        .sum();
                    expected += f64::from(p[(i, y)]) * (g * slope).powi(2) / 600.0;
                }
            }
            assert!((got[k] - expected).abs() < 0.02 * expected, "{} against {expected}", got[k]);
        }
    }
    #[test]
    fn nearly_certain_samples_count_as_much_as_they_say() {
        // Two draws per sample give Σ_y p_y (aᵀ(e_y − p))² within a tenth, though one class occurs only once in two
        // thousand samples.
        let p = [0.9995_f32, 0.0003, 0.0002];
        let a = [0.3, -1.0, 2.0];
        let dot = |v: &[f32]| v.iter().zip(a).map(|(v, a)| f64::from(*v) * a).sum::<f64>();
        let mean = dot(&p);
        let exact: f64 = p.iter().zip(a).map(|(&p, a)| f64::from(p) * (a - mean).powi(2)).sum();
        let probabilities = Matrix::from_fn(1000, 3, |_, c| p[c]);
        let mut random = Random::new(3);
        let mut got = 0.0;
        for _ in 0..2 {
            let v = drawn(&probabilities, 1.0, &mut random);
            got += (0..1000).map(|i| dot(v.row(i)).powi(2)).sum::<f64>() / 2000.0;
        }
        assert!((got - exact).abs() < 0.1 * exact, "{got} against {exact}");
    }
}
