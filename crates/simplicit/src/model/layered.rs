//! Layered networks as implicit models: every layer's states stacked, last layer on top.

use super::{ImplicitModel, ModelMetadata, ModelParts, Scaling, TapBlock, TapWeights};
use crate::layout::{Activation, Layer, Layout, MapShape};
use crate::linalg::{Csr, Matrix, add_up};
use crate::network::{Network, Shape, Source, Term, Weights, Window};
use crate::states::StateMap;
use crate::{Error, Result};

/// A fully connected layer x ↦ φ(Wx + b).
#[derive(Debug, Clone, PartialEq)]
pub struct DenseLayer {
    /// Its name in the baseline.
    pub name: String,
    /// W, outputs × inputs.
    pub weights: Matrix<f32>,
    /// b, if the layer has one.
    pub bias: Option<Vec<f32>>,
    /// φ.
    pub activation: Activation,
}

impl DenseLayer {
    /// Without a bias.
    pub fn new(name: impl Into<String>, weights: Matrix<f32>, activation: Activation) -> Self {
        Self { name: name.into(), weights, bias: None, activation }
    }

    /// With a bias.
    #[must_use]
    pub fn with_bias(self, bias: Vec<f32>) -> Self {
        Self { bias: Some(bias), ..self }
    }

    fn nonzeros(&self) -> u64 {
        let values = self.weights.as_slice().iter().chain(self.bias.iter().flatten());
        values.filter(|v| **v != 0.0).count() as u64
    }
}

/// The value that a block is added to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// The output ŷ.
    Output,
    /// The pre-activations of this layer of the layout (last layer first).
    Layer(usize),
}

/// A dense piece of (A B; C D); pieces at the same place are added up.
#[derive(Debug, Clone, PartialEq)]
pub struct Block {
    /// Its rows.
    pub target: Target,
    /// Its columns.
    pub source: Source,
    /// The weights, target units × source units.
    pub weights: Matrix<f32>,
}

impl ImplicitModel {
    /// A model from dense blocks between layers, the input and the output, in any order.
    pub(crate) fn from_blocks(
        layout: Layout,
        inputs: usize,
        outputs: usize,
        blocks: &[Block],
        state_bias: Vec<f32>,
        output_bias: Vec<f32>,
    ) -> Result<Self> {
        let n = layout.size();
        let place = |kind: &str, layer: usize| {
            if layer < layout.layers().len() {
                Ok(layout.range(layer))
            } else {
                Err(Error::shape(kind, format!("a layer below {}", layout.layers().len()), layer))
            }
        };
        // Rows of [A B] then [C D]; columns: states, then inputs.
        let mut rows: Vec<Vec<(usize, f32)>> = vec![Vec::new(); n + outputs];
        for (k, block) in blocks.iter().enumerate() {
            let into = match block.target {
                Target::Layer(layer) => place("block target", layer)?,
                Target::Output => n..n + outputs,
            };
            let from = match block.source {
                Source::Layer(layer) => place("block source", layer)?,
                Source::Input => n..n + inputs,
            };
            if (block.weights.rows(), block.weights.cols()) != (into.len(), from.len()) {
                return Err(Error::shape(
                    format!("block {k}, from {:?} to {:?}", block.source, block.target),
                    format!("{} × {}", into.len(), from.len()),
                    format!("{} × {}", block.weights.rows(), block.weights.cols()),
                ));
            }
            block.weights.require_finite(&format!("block {k}"), 0)?;
            for (i, row) in into.enumerate() {
                let values = block.weights.row(i).iter();
                rows[row].extend(from.clone().zip(values).filter(|(_, v)| **v != 0.0).map(|(j, v)| (j, *v)));
            }
        }
        rows.iter_mut().for_each(add_up);
        let part = |rows: &[Vec<(usize, f32)>], from: usize, cols: usize| {
            Csr::from_rows(
                cols,
                rows.iter().map(|row| {
                    row.iter().filter(|(j, _)| (from..from + cols).contains(j)).map(|(j, v)| (j - from, *v))
                }),
            )
        };
        let (top, bottom) = rows.split_at(n);
        Self::new(ModelParts {
            a: part(top, 0, n),
            b: part(top, n, inputs),
            c: part(bottom, 0, n),
            d: part(bottom, n, inputs),
            state_bias,
            output_bias,
            layout,
            ..Default::default()
        })
    }

    /// The implicit model that computes what a network computes, weight for weight: linear maps as entries of A, B, C and
    /// D, convolutions and whatever reads a pooling as [tap blocks](TapBlock), residual sums as structure.
    pub fn from_network(network: &Network) -> Result<Self> {
        let mut layers = network.layout().layers().to_vec();
        let mut blocks = Vec::new();
        let mut taps = Vec::new();
        let mut state_bias = Vec::new();
        let mut output_bias = Vec::new();
        let rows = network.pre_activations().iter().enumerate().map(|(k, z)| (Target::Layer(k), z));
        for (target, sum) in rows.chain([(Target::Output, network.output())]) {
            for term in &sum.terms {
                match &term.weights {
                    Weights::Dense(weights) if term.maps.is_empty() => {
                        blocks.push(Block { target, source: term.source, weights: weights.as_ref().clone() });
                    }
                    _ => taps.push(tap_block(target, sum.shape, term)?),
                }
            }
            match target {
                Target::Layer(k) => {
                    let rows = layers[k].rows();
                    if sum.operator.is_some() {
                        continue;
                    }
                    let unshared = |t: &Term| matches!(t.weights, Weights::Dense(_)) && !t.maps.is_empty();
                    let shared = sum.bias.as_ref().is_none_or(|b| b.len() == rows);
                    if !shared || sum.terms.iter().any(unshared) {
                        // A sum of which only a part is a map has one row per unit.
                        layers[k].map = None;
                        state_bias.extend(sum.unit_bias().unwrap_or_else(|| vec![0.0; sum.shape.size()]));
                    } else {
                        state_bias.extend(sum.bias.clone().unwrap_or_else(|| vec![0.0; rows]));
                    }
                }
                Target::Output => output_bias = sum.unit_bias().unwrap_or_else(|| vec![0.0; sum.shape.size()]),
            }
        }
        let (shape, layout) = (network.shape(), Layout::new(layers));
        let model = Self::from_blocks(layout, shape.inputs, shape.outputs, &blocks, state_bias, output_bias)?;
        let mut parts = model.into_parts();
        parts.taps = taps;
        parts.metadata.baseline_nonzeros = Some(network.nonzeros() as u64);
        parts.metadata.baseline_multiply_adds = Some(network.multiply_adds());
        Self::new(parts)
    }

    /// The implicit model that computes what the layered network computes, entry for entry: `hidden` from the first
    /// layer to the last, then an `output` layer without activation.
    pub fn from_layers(hidden: &[DenseLayer], output: &DenseLayer) -> Result<Self> {
        let inputs = hidden.first().unwrap_or(output).weights.cols();
        let count = hidden.len();
        // Layer k of the network is layer count−1−k of the layout.
        let layers = hidden.iter().rev().map(|l| Layer::dense(&l.name, l.weights.rows(), l.activation)).collect();
        let mut blocks = Vec::with_capacity(count + 1);
        let mut state_bias = Vec::new();
        for (k, layer) in hidden.iter().enumerate().rev() {
            let source = if k == 0 { Source::Input } else { Source::Layer(count - k) };
            blocks.push(Block { target: Target::Layer(count - 1 - k), source, weights: layer.weights.clone() });
            state_bias.extend(bias_of(layer)?);
        }
        if output.activation != Activation::Identity {
            return Err(Error::unsupported(
                format!("activation {} on the output layer {:?}", output.activation, output.name),
                "outputs are linear in the states; pass it as the last hidden layer, with the identity after it",
            ));
        }
        let source = if count == 0 { Source::Input } else { Source::Layer(0) };
        blocks.push(Block { target: Target::Output, source, weights: output.weights.clone() });
        let outputs = output.weights.rows();
        let model = Self::from_blocks(Layout::new(layers), inputs, outputs, &blocks, state_bias, bias_of(output)?)?;
        let all = || hidden.iter().chain([output]);
        let mut parts = model.into_parts();
        parts.metadata = ModelMetadata {
            baseline_nonzeros: Some(all().map(DenseLayer::nonzeros).sum()),
            baseline_multiply_adds: Some(all().map(|l| l.weights.as_slice().len() as u64).sum()),
            ..Default::default()
        };
        Self::new(parts)
    }

    /// The model of a network that is a plain chain of linear layers and activations, after the paper's layered scaling: every W_ℓ is
    /// divided by g = γ·max_ℓ ‖W_ℓ‖∞ and the bias of layer k (from 1) by gᵏ.
    pub fn from_network_scaled(network: &Network, gamma: f64) -> Result<Self> {
        let count = network.pre_activations().len();
        let layer = |k: usize, sum: &crate::network::PreActivation, name: &str, activation| {
            let before = if k < count { Source::Layer(k) } else { Source::Input };
            match &sum.terms[..] {
                [Term { source, maps, weights: Weights::Dense(weights) }] if *source == before && maps.is_empty() => {
                    Ok(DenseLayer {
                        name: name.into(),
                        weights: (**weights).clone(),
                        bias: sum.unit_bias(),
                        activation,
                    })
                }
                _ => Err(Error::unsupported(
                    format!("layered scaling of {name:?}"),
                    "it needs a chain of linear layers and activations without skips or convolutions",
                )),
            }
        };
        // Layers of the layout are last first; layer k reads layer k + 1.
        let mut hidden = Vec::with_capacity(count);
        for (k, (sum, about)) in network.pre_activations().iter().zip(network.layout().layers()).enumerate().rev() {
            hidden.push(layer(k + 1, sum, &about.name, about.activation)?);
        }
        let output = layer(0, network.output(), "output", Activation::Identity)?;
        let mut parts = Self::from_layers_scaled(&hidden, &output, gamma)?.into_parts();
        parts.metadata.baseline_nonzeros = Some(network.nonzeros() as u64);
        parts.metadata.baseline_multiply_adds = Some(network.multiply_adds());
        Self::new(parts)
    }

    /// As [`ImplicitModel::from_layers`] after the paper's layered scaling: every W_ℓ divided by g = γ·max_ℓ ‖W_ℓ‖∞ and
    /// the bias of layer k (from 1) by gᵏ. Outputs are the network's times a constant, recorded in the metadata; deep
    /// states shrink geometrically. For positively homogeneous activations only.
    pub(crate) fn from_layers_scaled(hidden: &[DenseLayer], output: &DenseLayer, gamma: f64) -> Result<Self> {
        if !(gamma.is_finite() && gamma > 1.0) {
            return Err(Error::setting("gamma", "a number above 1", gamma));
        }
        if let Some(layer) = hidden.iter().find(|l| !l.activation.is_positively_homogeneous()) {
            return Err(Error::unsupported(
                format!("layered scaling of layer {:?} with activation {}", layer.name, layer.activation),
                "it needs positively homogeneous activations (relu, leaky-relu, identity)",
            ));
        }
        let row_sum = |row: &[f32]| row.iter().map(|v| f64::from(*v).abs()).sum::<f64>();
        let norm = |l: &DenseLayer| (0..l.weights.rows()).map(|i| row_sum(l.weights.row(i))).fold(0.0, f64::max);
        let largest = hidden.iter().chain([output]).map(norm).fold(0.0, f64::max);
        if largest == 0.0 || !largest.is_finite() {
            return Err(Error::setting("gamma", "a network with finite non-zero weights", largest));
        }
        let divisor = gamma * largest;
        let scaled = |k: usize, layer: &DenseLayer| {
            let power = divisor.powi(k as i32 + 1);
            DenseLayer {
                weights: Matrix::from_fn(layer.weights.rows(), layer.weights.cols(), |i, j| {
                    (f64::from(layer.weights[(i, j)]) / divisor) as f32
                }),
                bias: layer.bias.as_ref().map(|b| b.iter().map(|v| (f64::from(*v) / power) as f32).collect()),
                ..layer.clone()
            }
        };
        let layers: Vec<DenseLayer> = hidden.iter().enumerate().map(|(k, l)| scaled(k, l)).collect();
        let mut parts = Self::from_layers(&layers, &scaled(hidden.len(), output))?.into_parts();
        let states = hidden.iter().enumerate().rev();
        parts.metadata.scaling = Some(Scaling {
            states: states.flat_map(|(k, l)| vec![divisor.powi(k as i32 + 1); l.weights.rows()]).collect(),
            outputs: divisor.powi(hidden.len() as i32 + 1),
        });
        Self::new(parts)
    }
}

/// A term with shared weights, with a pooling, or without weights.
fn tap_block(target: Target, sum: Shape, term: &Term) -> Result<TapBlock> {
    let as_map = |shape: Shape| match shape {
        Shape::Map(map) => map,
        other => MapShape { channels: other.size(), height: 1, width: 1 },
    };
    let pooled = term.maps.last().map(|map| map.output()).transpose()?;
    let plain = Window::square(1, 1, 0);
    let (window, input, output, weights) = match &term.weights {
        Weights::Taps { weights, window, groups, input, output } => {
            // Columns count all input channels; those of other groups have no entries.
            let columns = weights.cols();
            let rows = (0..weights.rows()).map(|o| {
                let first = o / (weights.rows() / groups).max(1) * columns;
                weights.row(o).iter().enumerate().filter(|(_, v)| **v != 0.0).map(move |(j, v)| (first + j, *v))
            });
            (*window, *input, *output, TapWeights::Taps(Csr::from_rows(columns * groups, rows)))
        }
        Weights::Identity => (plain, pooled.unwrap_or(as_map(sum)), as_map(sum), TapWeights::Identity),
        // A dense layer after a map is a kernel as large as the map that it reads.
        Weights::Dense(weights) => {
            let input = pooled.unwrap_or(MapShape { channels: weights.cols(), height: 1, width: 1 });
            let window = Window { kernel: [input.height, input.width], ..plain };
            let output = MapShape { channels: weights.rows(), height: 1, width: 1 };
            (window, input, output, TapWeights::Taps(Csr::from_dense(weights)))
        }
    };
    let groups = if let Weights::Taps { groups, .. } = term.weights { groups } else { 1 };
    Ok(TapBlock { target, source: term.source, maps: term.maps.clone(), window, input, output, groups, weights })
}

fn bias_of(layer: &DenseLayer) -> Result<Vec<f32>> {
    let units = layer.weights.rows();
    match &layer.bias {
        None => Ok(vec![0.0; units]),
        Some(bias) if bias.len() == units => Ok(bias.clone()),
        Some(bias) => Err(Error::shape(
            format!("bias of layer {:?}", layer.name),
            format!("{units} values"),
            format!("{} values", bias.len()),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    fn random(rows: usize, cols: usize, seed: u64) -> Matrix<f32> {
        let mut r = Random::new(seed);
        Matrix::from_fn(rows, cols, |_, _| r.normal() as f32)
    }

    fn three_layers(bias: bool) -> (Vec<DenseLayer>, DenseLayer) {
        let with = |l: DenseLayer, seed| {
            let units = l.weights.rows();
            if bias { l.with_bias(random(1, units, seed).into_vec()) } else { l }
        };
        let w0 = with(DenseLayer::new("first", random(4, 3, 1), Activation::Relu), 10);
        let w1 = with(DenseLayer::new("second", random(2, 4, 2), Activation::LeakyRelu { slope: 0.1 }), 11);
        (vec![w0, w1], with(DenseLayer::new("out", random(5, 2, 3), Activation::Identity), 12))
    }

    /// The network's own forward pass in f64, by its definition.
    fn forward(hidden: &[DenseLayer], output: &DenseLayer, u: &[f64]) -> Vec<f64> {
        hidden.iter().chain([output]).fold(u.to_vec(), |x, l| {
            (0..l.weights.rows())
                .map(|i| {
                    let bias = l.bias.as_ref().map_or(0.0, |b| f64::from(b[i]));
                    let z = bias + l.weights.row(i).iter().zip(&x).map(|(w, x)| f64::from(*w) * x).sum::<f64>();
                    l.activation.apply_f64(z)
                })
                .collect()
        })
    }

    /// The model's outputs by as many Picard steps as there are layers.
    fn picard(model: &ImplicitModel, u: &[f64]) -> Vec<f64> {
        let times = |m: &Csr<f32>, x: &[f64]| -> Vec<f64> {
            (0..m.rows()).map(|i| m.row(i).map(|(j, v)| f64::from(v) * x[j]).sum()).collect()
        };
        let mut x = vec![0.0; model.shape().states];
        for _ in 0..=model.layout().layers().len() {
            let (ax, bu) = (times(model.a(), &x), times(model.b(), u));
            for i in 0..x.len() {
                let layer = model.layout().layer_of(i).unwrap();
                let z = ax[i] + bu[i] + f64::from(model.state_bias()[i]);
                x[i] = model.layout().layers()[layer].activation.apply_f64(z);
            }
        }
        let (cx, du) = (times(model.c(), &x), times(model.d(), u));
        (0..cx.len()).map(|i| cx[i] + du[i] + f64::from(model.output_bias()[i])).collect()
    }

    #[test]
    fn the_papers_three_layer_example_entry_by_entry() {
        let (hidden, output) = three_layers(false);
        let model = ImplicitModel::from_layers(&hidden, &output).unwrap();
        let (a, b, c) = (model.a().to_dense(), model.b().to_dense(), model.c().to_dense());
        let (w0, w1, w2) = (&hidden[0].weights, &hidden[1].weights, &output.weights);
        for i in 0..6 {
            for j in 0..6 {
                assert_eq!(a[(i, j)], if i < 2 && j >= 2 { w1[(i, j - 2)] } else { 0.0 });
            }
            for j in 0..3 {
                assert_eq!(b[(i, j)], if i >= 2 { w0[(i - 2, j)] } else { 0.0 });
            }
        }
        for i in 0..5 {
            for j in 0..6 {
                assert_eq!(c[(i, j)], if j < 2 { w2[(i, j)] } else { 0.0 });
            }
        }
        assert_eq!((model.d().rows(), model.d().cols(), model.d().nonzeros()), (5, 3, 0));
        assert_eq!(model.layout().layers()[0].name, "second");
        let s = model.sparsity();
        assert_eq!((s.nonzeros, s.baseline_nonzeros, s.sparsity), (30, 30, 0.0));
        assert_eq!((s.multiply_adds, s.baseline_multiply_adds), (30, Some(30)));
        assert_eq!((s.letters.a, s.letters.b, s.letters.c, s.letters.d), (8, 12, 10, 0));
        assert_eq!(s.layers.iter().map(|l| l.nonzeros).collect::<Vec<_>>(), [8, 12]);
        // By hand: A 6·3 + 8·3, B 6·4 + 12·2, C 5·4 + 10·3, D 5·0 + 0·2.
        assert_eq!(s.paper_index_bits, 42 + 48 + 50);
    }

    #[test]
    fn outputs_are_the_networks_and_scalings_keep_them() {
        let (hidden, output) = three_layers(true);
        let model = ImplicitModel::from_layers(&hidden, &output).unwrap();
        let paper = ImplicitModel::from_layers_scaled(&hidden, &output, 1.5).unwrap();
        let rescaled = model.rescale(0.9).unwrap();
        assert!(rescaled.exact && rescaled.model.a().norm_inf() <= 0.9 && model.a().norm_inf() > 0.9);
        assert!(paper.a().norm_inf() < 1.0);
        let constant = paper.metadata().scaling.as_ref().unwrap().outputs;
        let mut r = Random::new(5);
        for _ in 0..20 {
            let u: Vec<f64> = (0..3).map(|_| r.normal()).collect();
            let wanted = forward(&hidden, &output, &u);
            let same = |got: &[f64], tolerance: f64| {
                for (g, w) in got.iter().zip(&wanted) {
                    assert!((g - w).abs() <= tolerance * (1.0 + w.abs()), "{g} {w}");
                }
            };
            same(&picard(&model, &u), 1e-13);
            same(&picard(&rescaled.model, &u), 1e-13);
            let scaled: Vec<f64> = picard(&paper, &u).iter().map(|v| v * constant).collect();
            same(&scaled, 1e-5);
        }
    }

    #[test]
    fn rescaling_says_what_it_cannot_do() {
        let (mut hidden, output) = three_layers(true);
        hidden[0].activation = Activation::Tanh;
        let model = ImplicitModel::from_layers(&hidden, &output).unwrap();
        assert!(matches!(model.rescale(0.9), Err(Error::Unsupported { .. })));
        assert!(ImplicitModel::from_layers_scaled(&hidden, &output, 1.1).is_err());
        // λ_pf = √(0.8·0.8) = 0.8: refused at 0.7. At 0.85 powers of two exist (the scaling 1), at λ_pf = √(3·0.19) < 0.8
        // with row sums 3 and 0.19 a factor of 4 does it, and √(1.7·0.35) = 0.771 < 0.78 needs a factor off the grid.
        let cycle = |x: f32, y: f32| {
            ImplicitModel::new(ModelParts {
                a: Csr::from_rows(2, [vec![(1, x)], vec![(0, y)]]),
                b: Csr::from_rows(1, [vec![(0, 1.0)], vec![]]),
                c: Csr::from_rows(2, [vec![(0, 1.0)]]),
                d: Csr::empty(1, 1),
                state_bias: vec![0.0; 2],
                output_bias: vec![0.0],
                layout: Layout::new(vec![Layer::dense("x", 2, Activation::Relu)]),
                ..Default::default()
            })
            .unwrap()
        };
        assert!(matches!(cycle(0.8, 0.8).rescale(0.7), Err(Error::Setting { .. })));
        let exact = cycle(3.0, 0.19).rescale(0.8).unwrap();
        assert!(exact.exact && exact.model.a().norm_inf() <= 0.8);
        let rounded = cycle(1.7, 0.35).rescale(0.78).unwrap();
        assert!(!rounded.exact && rounded.model.a().norm_inf() <= 0.78);
        assert_eq!(rounded.model.metadata().kappa, Some(0.78));
    }

    #[test]
    fn no_hidden_layer_and_empty_layers() {
        let output = DenseLayer::new("out", random(2, 3, 1), Activation::Identity);
        let linear = ImplicitModel::from_layers(&[], &output).unwrap();
        assert_eq!((linear.shape().states, linear.d().nonzeros()), (0, 6));
        assert_eq!(linear.rescale(0.5).unwrap().model.d(), linear.d());
        let nothing = DenseLayer::new("none", Matrix::zeros(0, 3), Activation::Relu);
        let after = DenseLayer::new("out", Matrix::zeros(2, 0), Activation::Identity).with_bias(vec![1.0, 2.0]);
        let empty = ImplicitModel::from_layers(&[nothing], &after).unwrap();
        assert_eq!((empty.shape().states, empty.sparsity().nonzeros), (0, 2));
        let wrong = DenseLayer::new("out", random(2, 4, 1), Activation::Identity);
        let hidden = DenseLayer::new("h", random(3, 3, 1), Activation::Relu);
        let message = ImplicitModel::from_layers(&[hidden], &wrong).unwrap_err().to_string();
        assert!(message.contains("2 × 3") && message.contains("2 × 4"), "{message}");
    }
}
