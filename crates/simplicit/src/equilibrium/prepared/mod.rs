//! A model packed once for a batch size and run many times: outputs alone, every block by the kernel that suits it.
//!
//! Maps lie in a workspace with their padding around them, so a convolution reads its operand where the layer before
//! wrote it; bias, residual sum and ReLU are part of the last block of a layer. A sample's outputs are those of
//! [`Equilibrium::run`](super::Equilibrium::run), bit by bit, whatever the batch.

mod execute;
mod operand;
mod places;
mod plan;

use std::sync::Mutex;

use super::run::SampleDiagnostics;
use crate::kernels::{Grid, GridWeights, Instructions, RowWeights};
use crate::layout::{Activation, MapShape};
use crate::linalg::lanes::{Aligned, MAX_LANES};
use crate::linalg::{Csr, Matrix};
use crate::model::{ImplicitModel, TapBlock, TapWeights, Target};
use crate::network::Source;
use crate::parallel::{self, Threads};
use crate::{Error, Result};
use operand::Operand;
use places::Places;
use plan::{View, lay_out, margin};

/// Which kernel a block of a prepared model got, and why.
#[derive(Debug, Clone, PartialEq)]
pub struct BlockKernel {
    /// The layer it is added to, or `output`.
    pub layer: String,
    /// Rows of weights × taps of each.
    pub shape: [usize; 2],
    /// Share of the weights that is not zero.
    pub density: f64,
    /// Positions of the result.
    pub positions: usize,
    /// `dense`, `sparse`, or how many rows are which.
    pub kernel: String,
    /// Multiply-adds per sample, without zeros.
    pub multiply_adds: u64,
}

/// A model ready to run on batches of about one size; shared between threads.
pub struct Prepared {
    inputs: usize,
    outputs: usize,
    lanes: usize,
    instructions: Instructions,
    input: View,
    output: View,
    steps: Vec<Step>,
    /// Positions of the workspace, and of its scratch.
    positions: usize,
    scratch: [usize; 3],
    layers: usize,
    /// Inputs that are read, where they are a vector; all of a map's.
    read: Option<Vec<bool>>,
    multiply_adds: u64,
    kernels: Vec<BlockKernel>,
    rooms: Mutex<Vec<Workspace>>,
}

impl std::fmt::Debug for Prepared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Prepared").field("lanes", &self.lanes).field("kernels", &self.kernels).finish_non_exhaustive()
    }
}

/// Room for one block of samples; whoever runs a model from several threads keeps one each.
#[derive(Debug)]
pub struct Workspace {
    values: Aligned<f32>,
    scratch: [Aligned<f32>; 3],
    input_sizes: Vec<f64>,
    sizes: Vec<f64>,
    errors: Vec<f64>,
    samples: Vec<SampleDiagnostics>,
}

/// A layer, or the output.
struct Step {
    target: Target,
    view: View,
    bias: Vec<f32>,
    parts: Vec<Part>,
    bound: Bound,
}

/// What the error of a layer is bounded by.
struct Bound {
    reads: Vec<(Source, f64)>,
    terms: usize,
    largest_bias: f64,
}

/// A layer has a handful of these: their size does not matter.
#[allow(clippy::large_enum_variant)]
enum Part {
    /// Starts the sums.
    Bias,
    /// Weights; the first starts the sums itself, the last finishes them.
    Taps {
        operand: Operand,
        weights: Weights,
        /// Whether the result has the layer's own shape, so that bias and residual sums can be part of it.
        same: bool,
        bias: bool,
        before: Option<View>,
        after: Option<View>,
        relu: bool,
    },
    /// A residual sum on its own, with a factor per channel of so many positions.
    Residual { operand: Operand, factors: Option<(Vec<f32>, usize)> },
    /// φ where it is not ReLU, or nothing else finishes the layer.
    Activation(Activation),
}

enum Weights {
    Grid(GridWeights, Grid, usize),
    /// One sample, one position.
    Rows(RowWeights),
}

/// Samples side by side for a batch.
fn lanes_for(batch: usize, maps: bool) -> usize {
    match batch {
        0..8 => batch.max(1),
        8 => 8,
        9..=16 => 16,
        _ if maps => 16,
        17..=32 => 32,
        _ => MAX_LANES,
    }
}

impl Prepared {
    /// Packs a model for batches of `batch` samples (others run too). Models with cycles are refused:
    /// [`Equilibrium`](super::Equilibrium) iterates those.
    pub fn new(model: &ImplicitModel, batch: usize) -> Result<Self> {
        Self::with_instructions(model, batch, Instructions::detect())
    }

    /// The same with given instructions, which must be [available](Instructions::available): to compare, and to test.
    pub fn with_instructions(model: &ImplicitModel, batch: usize, instructions: Instructions) -> Result<Self> {
        if !model.layers_are_acyclic() {
            return Err(Error::unsupported(
                "a prepared model with layers that read each other",
                "cycles iterate; run it through Equilibrium",
            ));
        }
        model.require_no_operators("preparing")?;
        if model.taps().iter().any(|b| b.window.dilation != [1, 1]) {
            return Err(Error::unsupported("a prepared model with dilated windows", "run it through Equilibrium"));
        }
        if let Some(layer) = model.layout().layers().iter().find(|l| !l.activation.is_non_expansive()) {
            return Err(Error::unsupported(
                format!(
                    "a prepared model with layer {:?}, whose activation {} is expansive",
                    layer.name, layer.activation
                ),
                "run it through Equilibrium",
            ));
        }
        let layout = model.layout();
        let vector = |channels: usize| MapShape { channels, height: 1, width: 1 };
        // The layers the outputs depend on, in an order in which they can be computed.
        let mut targets: Vec<Target> = model.layer_order().into_iter().map(Target::Layer).collect();
        targets.push(Target::Output);
        let mut summands: Vec<(Target, Vec<TapBlock>)> =
            targets.into_iter().map(|target| (target, model.summands(target))).collect();
        let mut live = vec![false; layout.layers().len()];
        for (target, blocks) in summands.iter().rev() {
            if matches!(target, Target::Layer(k) if !live[*k]) {
                continue;
            }
            for block in blocks {
                if let Source::Layer(k) = block.source {
                    live[k] = true;
                }
            }
        }
        summands.retain(|(target, _)| !matches!(target, Target::Layer(k) if !live[*k]));
        let blocks = || summands.iter().flat_map(|(_, blocks)| blocks);
        let lanes = lanes_for(batch, blocks().any(|b| b.output.positions() > 1));
        // How a value lies is decided by its readers: margins as wide as the widest window.
        let own_map = |source: Source| match source {
            Source::Layer(k) => layout.layers()[k].map.unwrap_or(vector(layout.layers()[k].size)),
            Source::Input => blocks()
                .find(|b| b.source == Source::Input)
                .map_or(vector(model.shape().inputs), |b| b.maps.first().map_or(b.input, |m| m.input())),
        };
        let direct = |b: &TapBlock| b.maps.is_empty() && b.input == own_map(b.source);
        let margin_of = |source: Source| {
            blocks().filter(|b| b.source == source && direct(b)).fold([0; 4], |m: [usize; 4], b| {
                let own = margin(b.window, b.input, b.output);
                [0, 1, 2, 3].map(|k| m[k].max(own[k]))
            })
        };
        // Values that nobody reads any more give their place to one of the same shape; margins then stay zero.
        let mut places = Places::new(lanes);
        let input = places.take(own_map(Source::Input), margin_of(Source::Input));
        let mut views: Vec<Option<View>> = vec![None; layout.layers().len()];
        let mut steps: Vec<Step> = Vec::new();
        let mut kernels = Vec::new();
        let mut scratch = [0usize; 3];
        for (at, (target, blocks)) in summands.iter().enumerate() {
            let (view, bias, activation, name) = match *target {
                Target::Layer(k) => {
                    let source = Source::Layer(k);
                    let view = places.take(own_map(source), margin_of(source));
                    views[k] = Some(view);
                    let layer = &layout.layers()[k];
                    (view, model.state_bias()[layout.row_range(k)].to_vec(), layer.activation, layer.name.clone())
                }
                Target::Output => {
                    let view = places.take(vector(model.shape().outputs), [0; 4]);
                    (view, model.output_bias().to_vec(), Activation::Identity, "output".to_string())
                }
            };
            let view_of = |source: Source| match source {
                Source::Input => Some(input),
                Source::Layer(k) => views[k],
            };
            let mut parts: Vec<Part> = Vec::new();
            let mut bound = Bound {
                reads: Vec::new(),
                terms: 1,
                largest_bias: bias.iter().map(|b| f64::from(b.abs())).fold(0.0, f64::max),
            };
            for block in blocks {
                let Some(source) = view_of(block.source) else {
                    return Err(Error::unsupported("a layer that is read before it is computed", "this is a defect"));
                };
                let longest = match &block.weights {
                    TapWeights::Taps(taps) => taps.indptr().windows(2).map(|w| w[1] - w[0]).max().unwrap_or(0),
                    _ => 1,
                };
                bound.reads.push((block.source, block.norm_inf() * (1.0 + 1e-9)));
                bound.terms += longest + block.maps.iter().map(|m| m.terms()).sum::<usize>();
                // A layer whose blocks have another shape than its own (a vector read as a map) is as good: compact.
                let out = View { map: block.output, ..view };
                let out = if block.output == view.map {
                    out
                } else {
                    View { row: block.output.width, channel: block.output.positions(), ..out }
                };
                let operand = Operand::new(block, source, lanes);
                let room = operand.room();
                scratch = [0, 1, 2].map(|k| scratch[k].max(room[k]));
                match &block.weights {
                    TapWeights::Taps(taps) => {
                        let read = operand.padded.as_ref().unwrap_or(&operand.view);
                        let single = lanes == 1 && block.output.positions() == 1 && block.window.area() == 1;
                        let weights = if single {
                            let rows: Vec<Vec<_>> = (0..taps.rows()).map(|o| taps.row(o).collect()).collect();
                            Weights::Rows(RowWeights::new(&rows, taps.cols(), instructions))
                        } else {
                            let phases = operand.phases.as_ref();
                            let (weights, grid, start) = lay_out(block, taps, read, phases, &out, lanes, instructions);
                            Weights::Grid(weights, grid, start)
                        };
                        kernels.push(describe(&name, block, taps, &weights));
                        let same = block.output == view.map;
                        if parts.is_empty() && !same {
                            parts.push(Part::Bias);
                        }
                        let bias = parts.is_empty();
                        parts.push(Part::Taps { operand, weights, same, bias, before: None, after: None, relu: false });
                    }
                    other => {
                        let factors = match other {
                            TapWeights::Diagonal(factors) => Some((factors.clone(), block.output.positions())),
                            _ => None,
                        };
                        let plain = factors.is_none() && direct(block) && block.output == view.map;
                        match parts.last_mut() {
                            Some(Part::Taps {
                                after: after @ None, weights: Weights::Grid(..), same: true, ..
                            }) if plain => {
                                *after = Some(operand.view);
                            }
                            _ => {
                                if parts.is_empty() {
                                    parts.push(Part::Bias);
                                }
                                parts.push(Part::Residual { operand, factors });
                            }
                        }
                    }
                }
            }
            fuse_leading_residual(&mut parts);
            match (parts.last_mut(), activation) {
                (_, Activation::Identity) => {}
                (Some(Part::Taps { relu, .. }), Activation::Relu) => *relu = true,
                _ => parts.push(Part::Activation(activation)),
            }
            if blocks.is_empty() {
                parts.insert(0, Part::Bias);
            }
            steps.push(Step { target: *target, view, bias, parts, bound });
            // Free what no later step reads.
            let read_later =
                |source: Source| summands[at + 1..].iter().flat_map(|(_, b)| b).any(|b| b.source == source);
            for (k, view) in views.iter().enumerate() {
                if let Some(view) = view.filter(|_| !read_later(Source::Layer(k))) {
                    places.give_back(Source::Layer(k), view);
                }
            }
        }
        let read = (input.map.positions() == 1).then(|| {
            let mut read = vec![false; model.shape().inputs];
            for block in blocks().filter(|b| b.source == Source::Input) {
                match &block.weights {
                    TapWeights::Taps(taps) if direct(block) => {
                        taps.indices().iter().for_each(|j| read[*j as usize] = true);
                    }
                    _ => read.fill(true),
                }
            }
            read
        });
        let output = steps.last().map_or(View::compact(vector(0)), |s| s.view);
        Ok(Self {
            inputs: model.shape().inputs,
            outputs: model.shape().outputs,
            lanes,
            instructions,
            input,
            output,
            steps,
            positions: places.end,
            scratch,
            layers: layout.layers().len(),
            read,
            multiply_adds: kernels.iter().map(|k: &BlockKernel| k.multiply_adds).sum(),
            kernels,
            rooms: Mutex::new(Vec::new()),
        })
    }

    /// Samples that run side by side.
    pub fn lanes(&self) -> usize {
        self.lanes
    }

    /// The kernel of every block with weights, in the order in which they run.
    pub fn kernels(&self) -> &[BlockKernel] {
        &self.kernels
    }

    /// Room to run in.
    pub fn workspace(&self) -> Workspace {
        Workspace {
            values: Aligned::zeros(self.positions * self.lanes),
            scratch: self.scratch.map(|positions| Aligned::zeros(positions * self.lanes)),
            input_sizes: vec![0.0; self.lanes],
            sizes: vec![0.0; self.layers * self.lanes],
            errors: vec![0.0; self.layers * self.lanes],
            samples: Vec::with_capacity(self.lanes),
        }
    }

    /// The outputs of a batch, one sample a row. Nothing is allocated besides them once as many threads have run before.
    pub fn outputs(&self, u: &Matrix<f32>, threads: Threads) -> Result<Matrix<f32>> {
        let mut y = Matrix::zeros(u.rows(), self.outputs);
        self.batch(u, threads, false, |first, part, _| {
            y.as_mut_slice()[first * self.outputs..][..part.len()].copy_from_slice(part);
        })?;
        Ok(y)
    }

    /// The outputs of a batch (`u` and `y` row-major, whole rows) on the calling thread, in the caller's own workspace:
    /// allocates nothing.
    pub fn run_in(&self, u: &[f32], y: &mut [f32], room: &mut Workspace) -> Result<()> {
        let (p, q) = (self.inputs, self.outputs);
        let samples = u.len().checked_div(p).unwrap_or(y.len() / q.max(1));
        if u.len() != samples * p || y.len() != samples * q {
            let expected = format!("{samples} × {p} inputs and {samples} × {q} outputs");
            return Err(Error::shape("batch", expected, format!("{} inputs and {} outputs", u.len(), y.len())));
        }
        if room.values.len() != self.positions * self.lanes {
            return Err(Error::setting("workspace", "one of this prepared model", "another's"));
        }
        for first in (0..samples).step_by(self.lanes) {
            let end = (first + self.lanes).min(samples);
            self.run(&u[first * p..end * p], &mut y[first * q..end * q], room, false).map_err(|sample| {
                let row = first + sample;
                let column = u[row * p..(row + 1) * p].iter().position(|v| !v.is_finite()).unwrap_or(0);
                Error::NotFinite { array: "U".into(), row, column, value: f64::from(u[row * p + column]) }
            })?;
        }
        Ok(())
    }

    /// Runs a batch in blocks of `lanes`, handing outputs and (where `certified`) what is known about them to `take`.
    pub(super) fn batch(
        &self,
        u: &Matrix<f32>,
        threads: Threads,
        certified: bool,
        mut take: impl FnMut(usize, &[f32], &[SampleDiagnostics]),
    ) -> Result<()> {
        if u.cols() != self.inputs {
            let expected = format!("{} values per sample", self.inputs);
            return Err(Error::shape("inputs", expected, format!("{} values per sample", u.cols())));
        }
        let lock = || self.rooms.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let block = |k: usize, room: &mut Workspace, y: &mut [f32]| {
            let samples = k * self.lanes..((k + 1) * self.lanes).min(u.rows());
            let part = &u.as_slice()[samples.start * self.inputs..samples.end * self.inputs];
            self.run(part, y, room, certified).map_err(|sample| super::not_finite("U", u, samples.start + sample))
        };
        let blocks = u.rows().div_ceil(self.lanes);
        if threads.get().min(blocks) <= 1 {
            let mut room = lock().pop().unwrap_or_else(|| self.workspace());
            let mut y = vec![0.0; self.lanes * self.outputs];
            for k in 0..blocks {
                let count = (u.rows() - k * self.lanes).min(self.lanes);
                block(k, &mut room, &mut y[..count * self.outputs])?;
                take(k * self.lanes, &y[..count * self.outputs], &room.samples);
            }
            lock().push(room);
            return Ok(());
        }
        parallel::fold(
            threads,
            blocks,
            |k| {
                let free = lock().pop();
                let mut room = free.unwrap_or_else(|| self.workspace());
                let count = (u.rows() - k * self.lanes).min(self.lanes);
                let mut y = vec![0.0; count * self.outputs];
                let result = block(k, &mut room, &mut y).map(|()| (y, room.samples.clone()));
                lock().push(room);
                result
            },
            |k, (y, samples)| {
                take(k * self.lanes, &y, &samples);
                Ok(())
            },
        )
    }
}

/// `bias, residual, taps …` becomes one part.
fn fuse_leading_residual(parts: &mut Vec<Part>) {
    let [
        Part::Bias,
        Part::Residual { operand, factors: None },
        Part::Taps { weights: Weights::Grid(..), same: true, .. },
        ..,
    ] = &parts[..]
    else {
        return;
    };
    if operand.moved {
        return;
    }
    let view = operand.view;
    if let Part::Taps { bias, before, .. } = &mut parts[2] {
        (*bias, *before) = (true, Some(view));
        parts.drain(..2);
    }
}

fn describe(layer: &str, block: &TapBlock, taps: &Csr<f32>, weights: &Weights) -> BlockKernel {
    let kernel = match weights {
        Weights::Grid(weights, ..) => match weights.dense_share() {
            1.0 => "dense".to_string(),
            0.0 => "sparse".to_string(),
            share => format!("{:.0} % of rows dense", 100.0 * share),
        },
        Weights::Rows(weights) => weights.name().to_string(),
    };
    BlockKernel {
        layer: layer.to_string(),
        shape: [taps.rows(), taps.cols()],
        density: taps.nonzeros() as f64 / (taps.rows() * taps.cols()).max(1) as f64,
        positions: block.output.positions(),
        kernel,
        multiply_adds: block.multiply_adds(),
    }
}
