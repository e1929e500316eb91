//! One layer as the parts that compute it: what it sums (or its operator), laid out over a workspace.

use std::ops::Range;

use super::operand::Operand;
use super::plan::{Laid, View, Way, lay_out, margin};
use crate::kernels::{Choice, FEW, RowWeights, Samples};
use crate::layout::{Activation, Layout, MapShape, Operator};
use crate::linalg::Csr;
use crate::model::{ImplicitModel, TapBlock, TapWeights, Target};
use crate::network::Source;

/// The terms that compute a layer, or the output.
pub(crate) struct Sum {
    pub(crate) target: Target,
    pub(crate) blocks: Vec<TapBlock>,
    /// One bias per row of weights.
    pub(crate) bias: Vec<f32>,
    pub(crate) activation: Activation,
    /// The operator, if one computes the layer instead of the blocks.
    pub(crate) operator: Option<Operator>,
    name: String,
    /// The layer's units in the layout.
    range: Range<usize>,
    map: MapShape,
}

impl Sum {
    pub(crate) fn new(model: &ImplicitModel, target: Target) -> Self {
        let bias = match target {
            Target::Layer(k) => &model.state_bias()[model.layout().row_range(k)],
            Target::Output => model.output_bias(),
        };
        Self::of_blocks(model.layout(), model.shape().outputs, target, model.summands(target), bias.to_vec())
    }

    pub(crate) fn of_blocks(
        layout: &Layout,
        outputs: usize,
        target: Target,
        blocks: Vec<TapBlock>,
        bias: Vec<f32>,
    ) -> Self {
        match target {
            Target::Layer(k) => {
                let layer = &layout.layers()[k];
                Self {
                    target,
                    blocks,
                    bias,
                    activation: layer.activation,
                    operator: layer.operator.clone(),
                    name: layer.name.clone(),
                    range: layout.range(k),
                    map: layer.map.unwrap_or(vector(layer.size)),
                }
            }
            Target::Output => Self {
                target,
                blocks,
                bias,
                activation: Activation::Identity,
                operator: None,
                name: "output".to_string(),
                range: 0..outputs,
                map: vector(outputs),
            },
        }
    }

    /// The sources that it reads; a source that it reads twice is listed twice.
    pub(crate) fn sources(&self) -> impl Iterator<Item = Source> {
        let operands = self.operator.iter().flat_map(|o| o.operands());
        self.blocks.iter().map(|b| b.source).chain(operands.map(|o| o.source))
    }

    /// Whether it only consists of sums over vectors.
    pub(super) fn is_plain(&self) -> bool {
        let plain = |b: &TapBlock| {
            matches!(b.weights, TapWeights::Taps(_))
                && b.maps.is_empty()
                && b.window.area() == 1
                && b.groups == 1
                && b.input.positions() == 1
                && b.output == self.map
        };
        self.operator.is_none() && !self.blocks.is_empty() && self.blocks.iter().all(plain)
    }

    /// The shape of its value.
    pub(crate) fn map(&self) -> MapShape {
        self.map
    }

    /// Sets another shape with as many units.
    pub(super) fn set_map(&mut self, map: MapShape) {
        self.map = map;
    }
}

/// A vector as a map: a channel per unit.
pub(super) fn vector(channels: usize) -> MapShape {
    MapShape { channels, height: 1, width: 1 }
}

/// The shape in which a source is kept for its readers: a layer's own, or that in which the inputs are first read.
pub(super) fn own_map<'a>(
    layout: &Layout,
    inputs: usize,
    source: Source,
    mut sums: impl Iterator<Item = &'a Sum>,
) -> MapShape {
    match source {
        Source::Layer(k) => layout.layers()[k].map.unwrap_or(vector(layout.layers()[k].size)),
        Source::Input => sums
            .find_map(|s| s.blocks.iter().find(|b| b.source == Source::Input))
            .map_or(vector(inputs), |b| b.maps.first().map_or(b.input, |m| m.input())),
    }
}

/// Margins as wide as the widest window that reads the source in place.
pub(super) fn own_margin<'a>(source: Source, map: MapShape, sums: impl Iterator<Item = &'a Sum>) -> [usize; 4] {
    let blocks = sums.flat_map(|s| &s.blocks).filter(|b| b.source == source && is_direct(b, map));
    blocks.fold([0; 4], |m: [usize; 4], b| {
        let own = margin(b.window, b.input, b.output);
        [0, 1, 2, 3].map(|k| m[k].max(own[k]))
    })
}

/// Whether a block reads its source, of shape `map`, in place.
pub(super) fn is_direct(block: &TapBlock, map: MapShape) -> bool {
    block.maps.is_empty() && block.input == map
}

/// A layer, or the output, prepared to run.
pub(super) struct Step {
    pub(super) name: String,
    pub(super) target: Target,
    /// The layer's units in the layout.
    pub(super) range: Range<usize>,
    pub(super) view: View,
    pub(super) bias: Vec<f32>,
    pub(super) parts: Vec<Part>,
    /// The activation that is left to do after the parts; the identity if they apply it themselves.
    pub(super) activation: Activation,
    pub(super) bound: Bound,
}

/// The quantities that bound the error of a layer.
pub(super) struct Bound {
    pub(super) reads: Vec<(Source, f64)>,
    pub(super) terms: usize,
    pub(super) largest_bias: f64,
    /// False for an operator or an expansive activation: no bound on how these pass errors on is known.
    pub(super) known: bool,
}

/// A layer has only a few of these, so their size does not matter.
#[allow(clippy::large_enum_variant)]
pub(super) enum Part {
    /// Starts the sums with the bias.
    Bias,
    /// Weights; the first of them starts the sums, the last finishes them.
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
    /// A residual sum on its own, optionally with a factor per channel; the number says how many positions a channel
    /// has.
    Residual { operand: Operand, factors: Option<(Vec<f32>, usize)> },
    /// An operator on values at these places.
    Operator { operator: Operator, operands: Vec<View> },
}

/// A layer has only a few of these, so their size does not matter.
#[allow(clippy::large_enum_variant)]
pub(super) enum Weights {
    Grid(Laid),
    /// The layout for a few samples and one position.
    Rows(RowWeights),
}

/// The kernel that was chosen for a block of a prepared model, and why.
#[derive(Debug, Clone, PartialEq)]
pub struct BlockKernel {
    /// The layer it is added to, or `output`.
    pub layer: String,
    /// Number of rows of weights × number of taps of each.
    pub shape: [usize; 2],
    /// Share of the weights that is not zero.
    pub density: f64,
    /// Positions of the result.
    pub positions: usize,
    /// `dense`, `sparse`, or how many rows are of each kind.
    pub kernel: String,
    /// The density below which leaving zeros out is faster, by the measured costs: why the kernel is what it is.
    pub break_even: f64,
    /// Multiply-adds per sample, without zeros.
    pub multiply_adds: u64,
}

impl Step {
    /// Lays out a layer whose value goes to `view`; `source` returns the place of each source. With `fuse` a ReLU
    /// becomes part of the last block, and pre-activations are not available.
    pub(super) fn new(
        sum: &Sum,
        view: View,
        source: impl Fn(Source) -> View,
        fuse: bool,
        way: Way,
        kernels: &mut Vec<BlockKernel>,
    ) -> Self {
        let lanes = way.lanes;
        let mut parts: Vec<Part> = Vec::new();
        let mut bound = Bound {
            reads: Vec::new(),
            terms: 1,
            largest_bias: sum.bias.iter().map(|b| f64::from(b.abs())).fold(0.0, f64::max),
            known: sum.activation.is_non_expansive(),
        };
        for block in &sum.blocks {
            let source = source(block.source);
            let longest = match &block.weights {
                TapWeights::Taps(taps) => taps.indptr().windows(2).map(|w| w[1] - w[0]).max().unwrap_or(0),
                _ => 1,
            };
            // It was summed in double precision: this margin covers the rounding.
            bound.reads.push((block.source, block.norm_inf() * (1.0 + 1e-9)));
            bound.terms += longest + block.maps.iter().map(|m| m.terms()).sum::<usize>();
            // A layer whose blocks have another shape than its own (a vector read as a map) can be treated the same
            // way, because it is compact.
            let same = block.output == view.map;
            let out = if same {
                view
            } else {
                View { map: block.output, row: block.output.width, channel: block.output.positions(), ..view }
            };
            let operand = Operand::new(block, source, lanes);
            match &block.weights {
                TapWeights::Taps(taps) => {
                    let read = operand.padded.as_ref().unwrap_or(&operand.view);
                    let flat = |view: &View| view.map.positions() == 1 && view.is_compact();
                    let few = lanes <= FEW && block.window.area() == 1 && flat(read) && flat(&out);
                    let rows = || (0..taps.rows()).map(|o| taps.row(o).collect()).collect::<Vec<Vec<_>>>();
                    let few = few.then(|| few_samples(&rows(), taps.cols(), way)).flatten();
                    let weights = match few {
                        Some(weights) => Weights::Rows(weights),
                        None => {
                            let phases = operand.phases.as_ref();
                            Weights::Grid(lay_out(block, taps, read, phases, &out, way))
                        }
                    };
                    kernels.push(describe(&sum.name, block, taps, &weights));
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
                    let plain = factors.is_none() && is_direct(block, source.map) && source.map == view.map && same;
                    match parts.last_mut() {
                        Some(Part::Taps { after: after @ None, weights: Weights::Grid(..), same: true, .. })
                            if plain =>
                        {
                            *after = Some(operand.view)
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
        fuse_leading_residual(&mut parts, view.map);
        let mut activation = sum.activation;
        match (parts.last_mut(), activation) {
            (Some(Part::Taps { relu, .. }), Activation::Relu) if fuse => {
                *relu = true;
                activation = Activation::Identity;
            }
            (Some(_), _) => {}
            (None, _) => match &sum.operator {
                None => parts.push(Part::Bias),
                Some(operator) => {
                    bound.known &= operator.operands().is_empty();
                    bound.largest_bias = 0.0;
                    let operands = operator.operands().iter().map(|o| source(o.source)).collect();
                    parts.push(Part::Operator { operator: operator.clone(), operands });
                }
            },
        }
        let (target, range) = (sum.target, sum.range.clone());
        Self { name: sum.name.clone(), target, range, view, bias: sum.bias.clone(), parts, activation, bound }
    }

    /// Positions of scratch that it needs: operands, the inputs of their maps, padded operands, unfolded ones.
    pub(super) fn scratch(&self) -> [usize; 4] {
        self.parts.iter().fold([0; 4], |most, part| {
            let ([moved, maps, padded], unfolded) = match part {
                Part::Taps { operand, weights: Weights::Grid(Laid { unfold: Some(unfold), .. }), .. } => {
                    (operand.scratch_sizes(), unfold.scratch_sizes())
                }
                Part::Taps { operand, .. } | Part::Residual { operand, .. } => (operand.scratch_sizes(), 0),
                _ => return most,
            };
            let buffers = [moved, maps, padded, unfolded];
            [0, 1, 2, 3].map(|k| most[k].max(buffers[k]))
        })
    }
}

/// The kernels for a few samples, if they are faster here.
fn few_samples(rows: &[Vec<(usize, f32)>], columns: usize, way: Way) -> Option<RowWeights> {
    let Way { lanes, apart, instructions, only } = way;
    let samples = if apart { Samples::Apart(lanes) } else { Samples::Beside(lanes) };
    match only {
        None => RowWeights::new(rows, columns, samples, instructions),
        Some(Choice::Sparse) if lanes > 1 && !apart => None,
        Some(choice) => Some(RowWeights::only(rows, columns, samples, instructions, choice == Choice::Dense)),
    }
}

/// Joins `bias, residual, taps …` to one part.
fn fuse_leading_residual(parts: &mut Vec<Part>, map: MapShape) {
    let [
        Part::Bias,
        Part::Residual { operand, factors: None },
        Part::Taps { weights: Weights::Grid(..), same: true, .. },
        ..,
    ] = &parts[..]
    else {
        return;
    };
    if operand.moved || operand.view.map != map {
        return;
    }
    let view = operand.view;
    if let Part::Taps { bias, before, .. } = &mut parts[2] {
        (*bias, *before) = (true, Some(view));
        parts.drain(..2);
    }
}

fn describe(layer: &str, block: &TapBlock, taps: &Csr<f32>, weights: &Weights) -> BlockKernel {
    let (kernel, over) = match weights {
        Weights::Grid(laid) => {
            let kernel = match laid.weights.dense_share() {
                1.0 => "dense".to_string(),
                0.0 => "sparse".to_string(),
                share => format!("{:.0} % of rows dense", 100.0 * share),
            };
            (kernel, laid.weights.dense_over_sparse())
        }
        Weights::Rows(weights) => (weights.name().to_string(), weights.dense_over_sparse()),
    };
    let density = taps.nonzeros() as f64 / (taps.rows() * taps.cols()).max(1) as f64;
    BlockKernel {
        layer: layer.to_string(),
        shape: [taps.rows(), taps.cols()],
        density,
        positions: block.output.positions(),
        kernel,
        break_even: (density * over).min(1.0),
        multiply_adds: block.multiply_adds(),
    }
}
