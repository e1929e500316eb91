//! Models without cycles as ONNX: Gemm, Conv, pooling, Add, activations and operators, layer by layer, so that the
//! file, read again, has the same layers.

use super::activation::Precision;
use super::writer::{Writer, constant_ints, floats, integer, integers, value};
use crate::layout::{Activation, Layer, MapShape, Operator};
use crate::model::{ImplicitModel, TapBlock, TapWeights, Target};
use crate::network::{FixedMap, Source, Window};
use crate::onnx::proto::{AttributeProto, ValueInfoProto};
use crate::{Error, Result};

/// A tensor of the graph.
#[derive(Debug, Clone)]
pub(super) struct Value {
    pub(super) tensor: String,
    /// Its dimensions for a batch of one.
    pub(super) dims: Vec<usize>,
    /// The number of the batch axis; a constant has none.
    pub(super) batch: Option<usize>,
}

struct Graph<'a> {
    model: &'a ImplicitModel,
    input: Value,
    layers: Vec<Option<Value>>,
    writer: &'a mut Writer,
}

fn dims_of(map: MapShape) -> Vec<usize> {
    vec![1, map.channels, map.height, map.width]
}

/// Writes the model; returns the graph's input: `u` (batch × p, or batch × the dimensions in which the first
/// convolution or operator reads it).
pub(super) fn write(model: &ImplicitModel, writer: &mut Writer) -> Result<ValueInfoProto> {
    let order = model.layer_order();
    let layers = model.layout().layers();
    let blocks: Vec<Vec<TapBlock>> = order.iter().map(|&k| model.summands(Target::Layer(k))).collect();
    let last = model.summands(Target::Output);
    let read = blocks.iter().flatten().chain(&last).filter(|b| b.source == Source::Input);
    let by_blocks =
        read.map(|b| b.maps.first().map_or(b.input, |m| m.input())).find(|m| m.positions() > 1).map(dims_of);
    let operands = || layers.iter().flat_map(Layer::operands).filter(|o| o.source == Source::Input);
    let by_operators = || operands().map(|o| o.dims.sizes().to_vec()).find(|d| d.first() == Some(&1));
    let dims = by_blocks.or_else(by_operators).unwrap_or(vec![1, model.shape().inputs]);
    let mut graph = Graph {
        model,
        input: Value { tensor: "u".into(), dims: dims.clone(), batch: Some(0) },
        layers: vec![None; order.len()],
        writer,
    };
    let live = live_layers(layers, &order, &blocks, &last);
    for (&k, blocks) in order.iter().zip(&blocks).filter(|(k, _)| live[**k]) {
        let (layer, name) = (&layers[k], format!("l{k}"));
        let z = match &layer.operator {
            None => {
                let bias = &model.state_bias()[model.layout().row_range(k)];
                graph.sum(&name, blocks, bias, layer.map, layer.size)?
            }
            Some(operator) => graph.operator(operator, layer, &name)?,
        };
        let x = format!("{name}_x");
        let mut phi = graph.writer.activation(layer.activation, Precision::Single, &z.tensor, &x);
        // Readers, our own included, name the layer after this node, or after the sum if there is no activation.
        let named =
            if layer.activation == Activation::Identity { graph.writer.nodes.last_mut() } else { phi.last_mut() };
        if let Some(named) = named {
            named.name.clone_from(&layer.name);
        }
        if let (Activation::Identity, Some(phi)) = (layer.activation, phi.last_mut()) {
            phi.name = format!("{name}_identity");
        }
        graph.writer.nodes.extend(phi);
        graph.layers[k] = Some(Value { tensor: x, ..z });
    }
    let y = graph.sum("out", &last, model.output_bias(), None, model.shape().outputs)?;
    graph.writer.make("Identity", &[&y.tensor], "y", vec![]);
    Ok(value("u", &dims[1..]))
}

impl Writer {
    /// The same numbers under other dimensions. The batch becomes an axis of size one in front of which there are as
    /// many numbers as before; an error if there is no such axis.
    pub(super) fn shaped(&mut self, value: &Value, dims: &[usize]) -> Result<Value> {
        if value.dims == dims {
            return Ok(value.clone());
        }
        let batch = match value.batch {
            None => None,
            Some(axis) => {
                let before = |dims: &[usize], axis: usize| dims[..axis].iter().product::<usize>();
                let fits = |&new: &usize| dims.get(new) == Some(&1) && before(dims, new) == before(&value.dims, axis);
                let found = [axis].into_iter().chain(0..dims.len()).find(fits);
                Some(found.ok_or_else(|| {
                    Error::unsupported(
                        format!(
                            "export of a reshape of {:?} to {dims:?}, which mixes the samples of a batch",
                            value.dims
                        ),
                        "write it in the form of its network (export --like)",
                    )
                })?)
            }
        };
        let out = |tensor: &str| Value { tensor: tensor.to_string(), dims: dims.to_vec(), batch };
        if value.batch == Some(0) && batch == Some(0) && dims.len() == 2 {
            let tensor = format!("{}_flat", value.tensor);
            self.make("Flatten", &[&value.tensor], &tensor, vec![]);
            return Ok(out(&tensor));
        }
        let sizes: Vec<String> = dims.iter().map(usize::to_string).collect();
        let tensor = format!("{}_{}", value.tensor, sizes.join("x"));
        let mut shape: Vec<i64> = dims.iter().map(|&d| d as i64).collect();
        if let Some(axis) = batch {
            shape[axis] = -1;
        }
        let shape = self.store(constant_ints(&format!("{tensor}_shape"), &shape));
        self.make("Reshape", &[&value.tensor, &shape], &tensor, vec![]);
        Ok(out(&tensor))
    }
}

/// For every layer, whether the output depends on it.
fn live_layers(layers: &[Layer], order: &[usize], blocks: &[Vec<TapBlock>], last: &[TapBlock]) -> Vec<bool> {
    let mut live = vec![false; order.len()];
    let mark = |live: &mut Vec<bool>, source: Source| {
        if let Source::Layer(k) = source {
            live[k] = true;
        }
    };
    last.iter().for_each(|b| mark(&mut live, b.source));
    for (&k, blocks) in order.iter().zip(blocks).rev() {
        if live[k] {
            blocks.iter().for_each(|b| mark(&mut live, b.source));
            layers[k].operands().for_each(|o| mark(&mut live, o.source));
        }
    }
    live
}

fn window_attributes(window: Window) -> Vec<AttributeProto> {
    let mut attributes = vec![
        integers("kernel_shape", &window.kernel),
        integers("strides", &window.stride),
        integers("pads", &window.padding),
    ];
    if window.dilation != [1, 1] {
        attributes.push(integers("dilations", &window.dilation));
    }
    attributes
}

impl Graph<'_> {
    fn source(&self, source: Source) -> Result<Value> {
        let missing = || Error::unsupported("export of this model", "a layer reads one that is computed later");
        match source {
            Source::Input => Ok(self.input.clone()),
            Source::Layer(k) => self.layers[k].clone().ok_or_else(missing),
        }
    }

    /// The value of a layer that an operator computes.
    fn operator(&mut self, operator: &Operator, layer: &Layer, name: &str) -> Result<Value> {
        match operator {
            Operator::Constant { values, .. } => {
                let tensor = format!("{name}_values");
                let dims = layer.map.map_or(vec![1, layer.size], dims_of);
                let tensor = self.writer.store(floats(&tensor, &dims, values));
                Ok(Value { tensor, dims, batch: None })
            }
            Operator::Structure { structure, operands } => {
                let mut values = Vec::with_capacity(operands.len());
                for operand in operands {
                    let value = self.source(operand.source)?;
                    values.push(self.writer.shaped(&value, operand.dims.sizes())?);
                }
                let dims = structure.dims(&operands.iter().map(|o| o.dims).collect::<Vec<_>>())?;
                self.writer
                    .structure(structure, &values, dims.sizes(), &format!("{name}_v"))
                    .map_err(|e| e.within(&format!("layer {:?}", layer.name)))
            }
        }
    }

    /// The source of a block after its poolings.
    fn operand(&mut self, block: &TapBlock) -> Result<Value> {
        let mut value = self.source(block.source)?;
        for map in &block.maps {
            value = self.writer.shaped(&value, &dims_of(map.input()))?;
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
                attributes = window_attributes(*w);
                if counted {
                    attributes.push(integer("count_include_pad", 1));
                }
            }
            self.writer.make(operator, &[&value.tensor], &tensor, attributes);
            value = Value { tensor, dims: dims_of(map.output()?), batch: value.batch };
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
        let dims = map.map_or(vec![1, units], dims_of);
        let mut sum: Option<Value> = None;
        for (k, block) in blocks.iter().enumerate() {
            let operand = self.operand(block)?;
            let term = format!("{name}_t{k}");
            let value = match &block.weights {
                TapWeights::Taps(_) => self.taps(block, operand, &term, &mut bias, map.is_none().then_some(units))?,
                TapWeights::Identity => operand,
                TapWeights::Diagonal(factors) => {
                    let value = self.writer.shaped(&operand, &dims_of(block.output))?;
                    let weights = self.writer.store(floats(&format!("{term}_w"), &[factors.len(), 1, 1], factors));
                    self.writer.make("Mul", &[&value.tensor, &weights], &term, vec![]);
                    Value { tensor: term.clone(), ..value }
                }
            };
            let value = self.writer.shaped(&value, &dims)?;
            sum = Some(match sum {
                None => value,
                Some(before) => {
                    let next = format!("{name}_s{k}");
                    self.writer.make("Add", &[&before.tensor, &value.tensor], &next, vec![]);
                    Value { tensor: next, dims: dims.clone(), batch: before.batch.or(value.batch) }
                }
            });
        }
        let rest = bias.map(|b| (b, if b.len() == units && map.is_none() { vec![units] } else { vec![b.len(), 1, 1] }));
        match (sum, rest) {
            (Some(sum), None) => Ok(sum),
            (Some(sum), Some((bias, shape))) => {
                let z = format!("{name}_z");
                let b = self.writer.store(floats(&format!("{name}_b"), &shape, bias));
                self.writer.make("Add", &[&sum.tensor, &b], &z, vec![]);
                Ok(Value { tensor: z, ..sum })
            }
            // There is only the bias, but the size of the batch still has to come from some value.
            (None, rest) => {
                let p = self.model.shape().inputs;
                let u = self.writer.shaped(&self.input, &[1, p])?;
                let z = format!("{name}_z");
                let w = self.writer.store(floats(&format!("{name}_u"), &[units, p], &vec![0.0; units * p]));
                let each = |b: &[f32]| b.iter().flat_map(|v| std::iter::repeat_n(*v, units / b.len())).collect();
                let bias: Vec<f32> = rest.map_or(vec![0.0; units], |(b, _)| each(b));
                let b = self.writer.store(floats(&format!("{name}_b"), &[units], &bias));
                self.writer.make("Gemm", &[&u.tensor, &w, &b], &z, vec![integer("transB", 1)]);
                self.writer.shaped(&Value { tensor: z, dims: vec![1, units], batch: Some(0) }, &dims)
            }
        }
    }

    /// A product or a convolution as `term`; `vector` is the number of units of a result that is not a map. A bias of
    /// one number per row of weights becomes part of it.
    fn taps(
        &mut self,
        block: &TapBlock,
        operand: Value,
        term: &str,
        bias: &mut Option<&[f32]>,
        vector: Option<usize>,
    ) -> Result<Value> {
        let TapWeights::Taps(taps) = &block.weights else { return Ok(operand) };
        let weights = format!("{term}_w");
        // A product with a vector, unless the result is a map.
        let plain = block.output.positions() == 1 && taps.cols() == block.input.size() && block.groups == 1;
        let plain = plain && vector == Some(block.output.size());
        let dims = if plain { vec![1, block.input.size()] } else { dims_of(block.input) };
        let operand = self.writer.shaped(&operand, &dims)?;
        let mut inputs = vec![operand.tensor.clone(), weights.clone()];
        // A bias with one number per row of the block; any other is added below.
        if let Some(b) = bias.filter(|b| b.len() == block.output.channels) {
            inputs.push(self.writer.store(floats(&format!("{term}_b"), &[b.len()], b)));
            *bias = None;
        }
        let inputs: Vec<&str> = inputs.iter().map(String::as_str).collect();
        let w = block.window;
        // Every row has the columns of its own group.
        let width = taps.cols() / block.groups.max(1);
        let mut values = vec![0.0f32; taps.rows() * width];
        for o in 0..taps.rows() {
            let first = block.group_columns(o).start;
            taps.row(o).for_each(|(j, v)| values[o * width + j - first] = v);
        }
        if plain {
            self.writer.store(floats(&weights, &[taps.rows(), width], &values));
            self.writer.make("Gemm", &inputs, term, vec![integer("transB", 1)]);
            return Ok(Value { tensor: term.to_string(), dims: vec![1, block.output.size()], batch: operand.batch });
        }
        let dims = [taps.rows(), block.input.channels / block.groups.max(1), w.kernel[0], w.kernel[1]];
        self.writer.store(floats(&weights, &dims, &values));
        let mut attributes = window_attributes(w);
        if block.groups != 1 {
            attributes.push(integer("group", block.groups as i64));
        }
        self.writer.make("Conv", &inputs, term, attributes);
        Ok(Value { tensor: term.to_string(), dims: dims_of(block.output), batch: operand.batch })
    }
}
