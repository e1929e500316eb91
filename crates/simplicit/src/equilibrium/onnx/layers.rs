//! Models with tap blocks as ONNX: Conv, pooling, Add and Gemm, layer by layer, so that reading the file back gives the
//! same layers.

use std::collections::BTreeSet;

use super::{constant_ints, flat_value, floats, integer, integers, map_value, node};
use crate::layout::{Activation, MapShape};
use crate::model::{ImplicitModel, TapBlock, TapWeights, Target};
use crate::network::{FixedMap, Source};
use crate::onnx::proto::{GraphProto, NodeProto, TensorProto};
use crate::{Error, Result};

/// A tensor of the graph and what one sample of it looks like; `None` is a vector.
#[derive(Clone)]
struct Value {
    tensor: String,
    map: Option<MapShape>,
}

struct Graph<'a> {
    model: &'a ImplicitModel,
    input: Value,
    layers: Vec<Option<Value>>,
    /// Tensors that exist.
    made: BTreeSet<String>,
    nodes: Vec<NodeProto>,
    initialisers: Vec<TensorProto>,
}

/// Input `u` (batch × p, or batch × channels × height × width where the first convolution reads it so), output `y`.
pub(super) fn graph(model: &ImplicitModel) -> Result<GraphProto> {
    let order = model.layer_order();
    let blocks: Vec<Vec<TapBlock>> = order.iter().map(|&k| model.summands(Target::Layer(k))).collect();
    let last = model.summands(Target::Output);
    let shapes = blocks.iter().flatten().chain(&last).filter(|b| b.source == Source::Input);
    let seen = shapes.map(|b| b.maps.first().map_or(b.input, |m| m.input())).find(|m| m.positions() > 1);
    let mut graph = Graph {
        model,
        input: Value { tensor: "u".into(), map: seen },
        layers: vec![None; order.len()],
        made: BTreeSet::new(),
        nodes: Vec::new(),
        initialisers: Vec::new(),
    };
    let live = live_layers(&order, &blocks, &last);
    for (&k, blocks) in order.iter().zip(&blocks).filter(|(k, _)| live[**k]) {
        let layer = &model.layout().layers()[k];
        let name = format!("l{k}");
        let bias = &model.state_bias()[model.layout().row_range(k)];
        let z = graph.sum(&name, blocks, bias, layer.map, layer.size)?;
        let x = format!("{name}_x");
        let mut phi = match layer.activation {
            Activation::Relu => node("Relu", &[&z.tensor], &x, vec![]),
            Activation::LeakyRelu { slope } => node("LeakyRelu", &[&z.tensor], &x, vec![super::float("alpha", slope)]),
            Activation::Tanh => node("Tanh", &[&z.tensor], &x, vec![]),
            Activation::Sigmoid => node("Sigmoid", &[&z.tensor], &x, vec![]),
            Activation::Identity => node("Identity", &[&z.tensor], &x, vec![]),
            other => {
                return Err(Error::unsupported(
                    format!("export of layer {:?} with activation {other}", layer.name),
                    "this form of export has relu, leaky-relu, tanh, sigmoid and identity",
                ));
            }
        };
        // Readers, ours among them, name the layer after this node, or after the sum where there is no activation.
        if layer.activation == Activation::Identity
            && let Some(sum) = graph.nodes.last_mut()
        {
            sum.name.clone_from(&layer.name);
            phi.name = format!("{name}_identity");
        } else {
            phi.name.clone_from(&layer.name);
        }
        graph.nodes.push(phi);
        graph.layers[k] = Some(Value { tensor: x, map: z.map });
    }
    let y = graph.sum("out", &last, model.output_bias(), None, model.shape().outputs)?;
    graph.nodes.push(node("Identity", &[&y.tensor], "y", vec![]));
    let input = match seen {
        Some(map) => map_value("u", map),
        None => flat_value("u", model.shape().inputs),
    };
    Ok(GraphProto {
        name: "implicit_model".into(),
        doc_string: "x = φ(Ax + Bu + b), y = Cx + Du + d; u is the input after preprocessing".into(),
        node: graph.nodes,
        initializer: graph.initialisers,
        input: vec![input],
        output: vec![flat_value("y", model.shape().outputs)],
        ..Default::default()
    })
}

/// Layers that the output depends on.
fn live_layers(order: &[usize], blocks: &[Vec<TapBlock>], last: &[TapBlock]) -> Vec<bool> {
    let mut live = vec![false; order.len()];
    let mark = |live: &mut Vec<bool>, blocks: &[TapBlock]| {
        for block in blocks {
            if let Source::Layer(k) = block.source {
                live[k] = true;
            }
        }
    };
    mark(&mut live, last);
    for (&k, blocks) in order.iter().zip(blocks).rev() {
        if live[k] {
            mark(&mut live, blocks);
        }
    }
    live
}

impl Graph<'_> {
    fn make(&mut self, operator: &str, inputs: &[&str], output: &str, attributes: Vec<super::AttributeProto>) {
        if self.made.insert(output.to_string()) {
            self.nodes.push(node(operator, inputs, output, attributes));
        }
    }

    /// The same numbers as a map of this shape, or as a vector.
    fn shaped(&mut self, value: &Value, map: Option<MapShape>) -> Value {
        if value.map == map {
            return value.clone();
        }
        let Some(to) = map else {
            let tensor = format!("{}_flat", value.tensor);
            self.make("Flatten", &[&value.tensor], &tensor, vec![]);
            return Value { tensor, map };
        };
        let tensor = format!("{}_{}x{}x{}", value.tensor, to.channels, to.height, to.width);
        let shape = format!("{tensor}_shape");
        if !self.made.contains(&tensor) {
            let dims = [-1, to.channels as i64, to.height as i64, to.width as i64];
            self.initialisers.push(constant_ints(&shape, &dims));
        }
        self.make("Reshape", &[&value.tensor, &shape], &tensor, vec![]);
        Value { tensor, map }
    }

    /// The source of a block behind its poolings.
    fn operand(&mut self, block: &TapBlock) -> Result<Value> {
        let missing = || Error::unsupported("export of this model", "a layer reads one that is computed later");
        let mut value = match block.source {
            Source::Input => self.input.clone(),
            Source::Layer(k) => self.layers[k].clone().ok_or_else(missing)?,
        };
        for map in &block.maps {
            value = self.shaped(&value, Some(map.input()));
            let (operator, window, counted) = match map {
                FixedMap::AveragePool { window, count_padding, .. } => ("AveragePool", Some(window), *count_padding),
                FixedMap::MaxPool { window, .. } => ("MaxPool", Some(window), false),
                FixedMap::GlobalAverage { .. } => ("GlobalAveragePool", None, false),
            };
            let mut tensor = format!("{}_{}", value.tensor, operator);
            let mut attributes = Vec::new();
            if let Some(w) = window {
                let [t, l, b, r] = w.padding;
                tensor.push_str(&format!("_{:?}_{:?}_{t}_{l}_{b}_{r}_{counted}", w.kernel, w.stride));
                attributes = vec![
                    integers("kernel_shape", &w.kernel),
                    integers("strides", &w.stride),
                    integers("pads", &w.padding),
                ];
                if counted {
                    attributes.push(integer("count_include_pad", 1));
                }
            }
            self.make(operator, &[&value.tensor], &tensor, attributes);
            value = Value { tensor, map: Some(map.output()?) };
        }
        Ok(value)
    }

    /// Σ over the blocks, plus the bias: a tensor of this shape.
    fn sum(
        &mut self,
        name: &str,
        blocks: &[TapBlock],
        bias: &[f32],
        map: Option<MapShape>,
        units: usize,
    ) -> Result<Value> {
        let mut bias = Some(bias).filter(|b| b.iter().any(|v| *v != 0.0));
        let mut sum: Option<Value> = None;
        for (k, block) in blocks.iter().enumerate() {
            let operand = self.operand(block)?;
            let term = format!("{name}_t{k}");
            let value = match &block.weights {
                TapWeights::Taps(taps) => {
                    let weights = format!("{term}_w");
                    let dense = taps.to_dense();
                    // A product with a vector, unless the result is a map.
                    let as_vector = block.output.positions() == 1 && map.is_none();
                    let plain = block.output.size() == units && taps.cols() == block.input.size();
                    let channels = [block.output.channels, block.input.channels];
                    let operand = self.shaped(&operand, (!(as_vector && plain)).then_some(block.input));
                    let mut inputs = vec![operand.tensor.clone(), weights.clone()];
                    // One bias per row of the block, or it is added below.
                    if let Some(b) = bias.filter(|b| b.len() == block.output.channels) {
                        self.initialisers.push(floats(&format!("{term}_b"), &[b.len()], b));
                        inputs.push(format!("{term}_b"));
                        bias = None;
                    }
                    let inputs: Vec<&str> = inputs.iter().map(String::as_str).collect();
                    if as_vector && plain {
                        self.initialisers.push(floats(&weights, &[dense.rows(), dense.cols()], dense.as_slice()));
                        self.make("Gemm", &inputs, &term, vec![integer("transB", 1)]);
                        Value { tensor: term.clone(), map: None }
                    } else {
                        let w = block.window;
                        let dims = [channels[0], channels[1], w.kernel[0], w.kernel[1]];
                        self.initialisers.push(floats(&weights, &dims, dense.as_slice()));
                        let attributes = vec![
                            integers("kernel_shape", &w.kernel),
                            integers("strides", &w.stride),
                            integers("pads", &w.padding),
                        ];
                        self.make("Conv", &inputs, &term, attributes);
                        Value { tensor: term.clone(), map: Some(block.output) }
                    }
                }
                TapWeights::Identity => operand,
                TapWeights::Diagonal(factors) => {
                    let value = self.shaped(&operand, Some(block.output));
                    let weights = format!("{term}_w");
                    self.initialisers.push(floats(&weights, &[factors.len(), 1, 1], factors));
                    self.make("Mul", &[&value.tensor, &weights], &term, vec![]);
                    Value { tensor: term.clone(), map: Some(block.output) }
                }
            };
            let value = self.shaped(&value, map);
            sum = Some(match sum {
                None => value,
                Some(before) => {
                    let next = format!("{name}_s{k}");
                    self.make("Add", &[&before.tensor, &value.tensor], &next, vec![]);
                    Value { tensor: next, map }
                }
            });
        }
        let rest = bias.map(|b| (b, if b.len() == units && map.is_none() { vec![units] } else { vec![b.len(), 1, 1] }));
        match (sum, rest) {
            (Some(sum), None) => Ok(sum),
            (Some(sum), Some((bias, dims))) => {
                let (b, z) = (format!("{name}_b"), format!("{name}_z"));
                self.initialisers.push(floats(&b, &dims, bias));
                self.make("Add", &[&sum.tensor, &b], &z, vec![]);
                Ok(Value { tensor: z, map })
            }
            // Only the bias: the batch still has to come from somewhere.
            (None, rest) => {
                let p = self.model.shape().inputs;
                let u = self.shaped(&self.input.clone(), None);
                let (w, b, z) = (format!("{name}_u"), format!("{name}_b"), format!("{name}_z"));
                self.initialisers.push(floats(&w, &[units, p], &vec![0.0; units * p]));
                let each = |b: &[f32]| b.iter().flat_map(|v| std::iter::repeat_n(*v, units / b.len())).collect();
                let bias: Vec<f32> = rest.map_or(vec![0.0; units], |(b, _)| each(b));
                self.initialisers.push(floats(&b, &[units], &bias));
                self.make("Gemm", &[&u.tensor, &w, &b], &z, vec![integer("transB", 1)]);
                Ok(self.shaped(&Value { tensor: z, map: None }, map))
            }
        }
    }
}
