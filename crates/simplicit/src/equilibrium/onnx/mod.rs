//! Export to ONNX: acyclic stages as a straight line of Gemm and activation, cycles as a Loop, tap blocks as convolutions.
//!
//! Initialisers are dense f32, which every runtime reads and which takes 4 bytes per entry of every block between two
//! stages, zero or not: the model file is the small one. The graph takes inputs that are already preprocessed.

mod layers;
mod like;

pub use like::export_onnx_like;

use std::path::Path;

use prost::Message;

use super::Schedule;
use crate::files::write_bytes_atomically;
use crate::layout::{Activation, MapShape};
use crate::linalg::Csr;
use crate::model::{ImplicitModel, component_contraction};
use crate::onnx::proto::{
    AttributeProto, DimensionProto, DimensionValue, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorProto,
    TensorShapeProto, TensorTypeProto, TypeProto, ValueInfoProto, attribute_type, data_type,
};
use crate::{Error, Result};

/// Opset 17 and IR 8: read by every runtime since 2022.
const OPSET: i64 = 17;
const IR_VERSION: i64 = 8;

/// When the Loop of a cycle stops.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OnnxSettings {
    /// Certified distance of the states from the equilibrium, absolute.
    pub tolerance: f64,
    /// Most steps; an ONNX graph cannot say that it ran into this limit.
    pub max_iterations: usize,
}

impl Default for OnnxSettings {
    fn default() -> Self {
        Self { tolerance: 1e-7, max_iterations: 10_000 }
    }
}

/// Writes [`to_onnx`], whole or not at all.
pub fn export_onnx(model: &ImplicitModel, path: impl AsRef<Path>, settings: OnnxSettings) -> Result<()> {
    write_bytes_atomically(path, &to_onnx(model, settings)?)
}

/// The bytes of an ONNX file with input `u` (batch × p, preprocessed; batch × channels × height × width where a
/// convolution reads it so) and output `y` (batch × q).
///
/// Cycles run in double precision by plain Picard steps, all samples together, until the slowest is within the
/// tolerance; a cycle whose contraction cannot be shown is refused.
pub fn to_onnx(model: &ImplicitModel, settings: OnnxSettings) -> Result<Vec<u8>> {
    let shape = model.shape();
    if shape.inputs == 0 || shape.outputs == 0 {
        return Err(Error::unsupported(
            format!("export of a model with {} inputs and {} outputs", shape.inputs, shape.outputs),
            "an ONNX graph needs at least one of each",
        ));
    }
    model.require_no_operators("ONNX export")?;
    let mut graph = if !model.taps().is_empty() && model.layers_are_acyclic() {
        layers::graph(model)?
    } else {
        // Residual sums of a model with cycles are entries of A like any other.
        let plain = model.without_taps().ok_or_else(|| {
            Error::unsupported("export of a cycle through tap blocks", "such a model cannot be run either")
        })?;
        stages(&plain, settings)?
    };
    // Outputs in the baseline's units, as everywhere.
    let factor = model.metadata().scaling.as_ref().map_or(1.0, |s| s.outputs) as f32;
    if factor != 1.0
        && let Some(last) = graph.node.last_mut()
    {
        last.op_type = "Mul".into();
        last.input.push("output_factor".into());
        graph.initializer.push(TensorProto {
            name: "output_factor".into(),
            dims: vec![1],
            data_type: Some(data_type::FLOAT),
            raw_data: Some(factor.to_le_bytes().to_vec()),
            ..Default::default()
        });
    }
    Ok(ModelProto {
        ir_version: Some(IR_VERSION),
        producer_name: "simplicit".into(),
        producer_version: env!("CARGO_PKG_VERSION").into(),
        opset_import: vec![OperatorSetIdProto { domain: String::new(), version: Some(OPSET) }],
        graph: Some(graph),
        ..Default::default()
    }
    .encode_to_vec())
}

/// The name of the layer that a unit belongs to, for messages.
fn layer_name(model: &ImplicitModel, unit: usize) -> &str {
    model.layout().layer_of(unit).map_or("", |k| model.layout().layers()[k].name.as_str())
}

/// A model without tap blocks, stage by stage.
fn stages(model: &ImplicitModel, settings: OnnxSettings) -> Result<GraphProto> {
    let shape = model.shape();
    let mut graph = Graph::new(model);
    let live = Schedule::read_by_outputs(model.a(), model.c());
    let activations = super::activations(model.layout());
    for (s, stage) in Schedule::new(model.a(), |i| live[i]).stages.into_iter().enumerate() {
        if stage.cyclic {
            graph.cycle(s, stage.units, &activations, settings)?;
        } else {
            let mut rest = stage.units;
            let mut part = 0;
            while let Some(&first) = rest.first() {
                // One group per activation.
                let (same, other) = rest.iter().partition(|&&i| activations[i] == activations[first]);
                rest = other;
                graph.group(&format!("s{s}_{part}"), same, activations[first])?;
                part += 1;
            }
        }
    }
    let rows: Vec<usize> = (0..shape.outputs).collect();
    let last = graph.pre_activation("out", &rows, model.c(), model.d(), model.output_bias());
    graph.node("Identity", &[&last], "y", vec![]);
    Ok(GraphProto {
        name: "implicit_model".into(),
        doc_string: "x = φ(Ax + Bu + b), y = Cx + Du + d; u is the input after preprocessing".into(),
        node: graph.nodes,
        initializer: graph.initialisers,
        input: vec![value("u", data_type::FLOAT, shape.inputs)],
        output: vec![value("y", data_type::FLOAT, shape.outputs)],
        ..Default::default()
    })
}

/// States that are one tensor of the graph.
struct Group {
    tensor: String,
    units: Vec<usize>,
}

struct Graph<'a> {
    model: &'a ImplicitModel,
    groups: Vec<Group>,
    nodes: Vec<NodeProto>,
    initialisers: Vec<TensorProto>,
}

impl<'a> Graph<'a> {
    fn new(model: &'a ImplicitModel) -> Self {
        Self { model, groups: Vec::new(), nodes: Vec::new(), initialisers: Vec::new() }
    }

    fn node(&mut self, operator: &str, inputs: &[&str], output: &str, attribute: Vec<AttributeProto>) {
        self.nodes.push(node(operator, inputs, output, attribute));
    }

    /// The part of `m` with these rows and columns as an initialiser, or `None` if it is zero.
    fn block(&mut self, name: &str, m: &Csr<f32>, rows: &[usize], columns: &[usize]) -> Option<String> {
        let mut place = vec![usize::MAX; m.cols()];
        columns.iter().enumerate().for_each(|(k, &j)| place[j] = k);
        let mut values = vec![0.0f32; rows.len() * columns.len()];
        let mut any = false;
        for (row, &i) in rows.iter().enumerate() {
            for (j, v) in m.row(i).filter(|(j, _)| place[*j] != usize::MAX) {
                values[row * columns.len() + place[j]] = v;
                any = true;
            }
        }
        any.then(|| {
            self.initialisers.push(floats(name, &[rows.len(), columns.len()], &values));
            name.to_string()
        })
    }

    /// Σ over everything that is read, plus the bias: the name of a batch × rows tensor.
    fn pre_activation(
        &mut self,
        name: &str,
        rows: &[usize],
        states: &Csr<f32>,
        inputs: &Csr<f32>,
        bias: &[f32],
    ) -> String {
        let bias: Vec<f32> = rows.iter().map(|&i| bias[i]).collect();
        let all: Vec<usize> = (0..inputs.cols()).collect();
        let mut sources = Vec::new();
        if let Some(w) = self.block(&format!("{name}_u"), inputs, rows, &all) {
            sources.push(("u".to_string(), w));
        }
        for k in 0..self.groups.len() {
            let units = self.groups[k].units.clone();
            if let Some(w) = self.block(&format!("{name}_{}", self.groups[k].tensor), states, rows, &units) {
                sources.push((self.groups[k].tensor.clone(), w));
            }
        }
        if sources.is_empty() {
            // Only the bias: the batch still has to come from somewhere.
            let zero = format!("{name}_u");
            self.initialisers.push(floats(&zero, &[rows.len(), inputs.cols()], &vec![0.0; rows.len() * inputs.cols()]));
            sources.push(("u".to_string(), zero));
        }
        let mut sum = String::new();
        for (k, (tensor, weights)) in sources.into_iter().enumerate() {
            let term = format!("{name}_t{k}");
            let transposed = vec![integer("transB", 1)];
            if k == 0 {
                let b = format!("{name}_b");
                self.initialisers.push(floats(&b, &[rows.len()], &bias));
                self.node("Gemm", &[&tensor, &weights, &b], &term, transposed);
                sum = term;
            } else {
                self.node("Gemm", &[&tensor, &weights], &term, transposed);
                let next = format!("{name}_s{k}");
                self.node("Add", &[&sum, &term], &next, vec![]);
                sum = next;
            }
        }
        sum
    }

    fn group(&mut self, name: &str, units: Vec<usize>, activation: Activation) -> Result<()> {
        let model = self.model;
        let z = self.pre_activation(name, &units, model.a(), model.b(), model.state_bias());
        let x = format!("{name}_x");
        match activation {
            Activation::Relu => self.node("Relu", &[&z], &x, vec![]),
            Activation::LeakyRelu { slope } => self.node("LeakyRelu", &[&z], &x, vec![float("alpha", slope)]),
            Activation::Tanh => self.node("Tanh", &[&z], &x, vec![]),
            Activation::Sigmoid => self.node("Sigmoid", &[&z], &x, vec![]),
            Activation::Identity => self.node("Identity", &[&z], &x, vec![]),
            other => {
                return Err(Error::unsupported(
                    format!("export of layer {:?} with activation {other}", layer_name(model, units[0])),
                    "this form of export has relu, leaky-relu, tanh, sigmoid and identity",
                ));
            }
        }
        self.groups.push(Group { tensor: x, units });
        Ok(())
    }

    /// A Loop that carries x: z = A x + w, x′ = φ(z), until max |x′ − x| is small enough.
    fn cycle(
        &mut self,
        s: usize,
        mut units: Vec<usize>,
        activations: &[Activation],
        settings: OnnxSettings,
    ) -> Result<()> {
        let model = self.model;
        let name = format!("s{s}");
        let mut kinds: Vec<Activation> = Vec::new();
        for &i in &units {
            if !kinds.contains(&activations[i]) {
                kinds.push(activations[i]);
            }
        }
        units.sort_by_key(|&i| kinds.iter().position(|k| *k == activations[i]));
        let mut place = vec![usize::MAX; model.shape().states];
        units.iter().enumerate().for_each(|(k, &i)| place[i] = k);
        let contraction = component_contraction(model.a(), &units, &place);
        if contraction.rho >= 1.0 {
            return Err(Error::unsupported(
                format!("export of a cycle of {} states", units.len()),
                format!("its contraction cannot be shown (λ_pf ≤ {:.4}); rescale or train with kappa", contraction.rho),
            ));
        }
        // The step at which the certificate reaches the tolerance, see the Picard bound.
        let (small, large) =
            contraction.scaling.iter().fold((f64::INFINITY, 0.0f64), |(a, b), s| (a.min(*s), b.max(*s)));
        let step = settings.tolerance * (1.0 - contraction.rho) / contraction.rho.max(1e-3) * small / large;
        let w = self.pre_activation(&name, &units, model.a(), model.b(), model.state_bias());
        let n = |part: &str| format!("{name}_{part}");
        self.block(&n("a"), model.a(), &units, &units);
        let to = |kind: i32| vec![integer("to", i64::from(kind))];
        self.node("Cast", &[&w], &n("w64"), to(data_type::DOUBLE));
        self.node("Cast", &[&n("a")], &n("a64"), to(data_type::DOUBLE));
        self.node("Sub", &[&n("w64"), &n("w64")], &n("start"), vec![]);
        self.initialisers.push(scalar(&n("limit"), data_type::INT64, &(settings.max_iterations as i64).to_le_bytes()));
        self.initialisers.push(scalar(&n("go"), data_type::BOOL, &[1]));
        self.initialisers.push(scalar(&n("step"), data_type::DOUBLE, &step.to_le_bytes()));
        let mut body = vec![node("Gemm", &[&n("in"), &n("a64"), &n("w64")], &n("z"), vec![integer("transB", 1)])];
        let mut pieces = Vec::new();
        let mut sizes: Vec<i64> = Vec::new();
        for kind in &kinds {
            sizes.push(units.iter().filter(|&&i| activations[i] == *kind).count() as i64);
        }
        self.initialisers.push(constant_ints(&n("sizes"), &sizes));
        let parts: Vec<String> = (0..kinds.len()).map(|k| n(&format!("z{k}"))).collect();
        let mut split = node("Split", &[&n("z"), &n("sizes")], "", vec![integer("axis", 1)]);
        split.output = parts.clone();
        body.push(split);
        for (k, kind) in kinds.iter().enumerate() {
            let x = n(&format!("x{k}"));
            match kind {
                Activation::Relu => body.push(node("Relu", &[&parts[k]], &x, vec![])),
                Activation::Tanh => body.push(node("Tanh", &[&parts[k]], &x, vec![])),
                Activation::Sigmoid => body.push(node("Sigmoid", &[&parts[k]], &x, vec![])),
                Activation::Identity => body.push(node("Identity", &[&parts[k]], &x, vec![])),
                other @ (Activation::Clip { .. }
                | Activation::Softplus
                | Activation::Softsign
                | Activation::Elu { .. }
                | Activation::Celu { .. }
                | Activation::Selu
                | Activation::HardSigmoid { .. }
                | Activation::HardSwish
                | Activation::Gelu
                | Activation::GeluTanh
                | Activation::Silu
                | Activation::Mish) => {
                    return Err(Error::unsupported(
                        format!("export of a cycle with activation {other}"),
                        "this form of export has relu, leaky-relu, tanh, sigmoid and identity",
                    ));
                }
                Activation::LeakyRelu { slope } => {
                    // Slopes of a cycle are at most 1, so this is the larger of z and slope·z; LeakyRelu itself is float only.
                    let (factor, scaled) = (n(&format!("slope{k}")), n(&format!("scaled{k}")));
                    self.initialisers.push(scalar(&factor, data_type::DOUBLE, &f64::from(*slope).to_le_bytes()));
                    body.push(node("Mul", &[&parts[k], &factor], &scaled, vec![]));
                    body.push(node("Max", &[&parts[k], &scaled], &x, vec![]));
                }
            }
            pieces.push(x);
        }
        let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
        body.push(node("Concat", &pieces, &n("next"), vec![integer("axis", 1)]));
        body.push(node("Sub", &[&n("next"), &n("in")], &n("moved"), vec![]));
        body.push(node("Abs", &[&n("moved")], &n("size"), vec![]));
        body.push(node("ReduceMax", &[&n("size")], &n("largest"), vec![integer("keepdims", 0)]));
        body.push(node("Greater", &[&n("largest"), &n("step")], &n("again"), vec![]));
        let body = GraphProto {
            name: n("body"),
            node: body,
            input: vec![
                scalar_value(&n("count"), data_type::INT64),
                scalar_value(&n("running"), data_type::BOOL),
                value(&n("in"), data_type::DOUBLE, units.len()),
            ],
            output: vec![scalar_value(&n("again"), data_type::BOOL), value(&n("next"), data_type::DOUBLE, units.len())],
            ..Default::default()
        };
        let body = AttributeProto {
            name: "body".into(),
            g: Some(body),
            kind: Some(attribute_type::GRAPH),
            ..Default::default()
        };
        self.node("Loop", &[&n("limit"), &n("go"), &n("start")], &n("x64"), vec![body]);
        self.node("Cast", &[&n("x64")], &n("x"), to(data_type::FLOAT));
        self.groups.push(Group { tensor: n("x"), units });
        Ok(())
    }
}

fn node(operator: &str, inputs: &[&str], output: &str, attribute: Vec<AttributeProto>) -> NodeProto {
    NodeProto {
        op_type: operator.into(),
        name: format!("{output}_{operator}"),
        input: inputs.iter().map(|s| s.to_string()).collect(),
        output: vec![output.into()],
        attribute,
        ..Default::default()
    }
}

fn integer(name: &str, i: i64) -> AttributeProto {
    AttributeProto { name: name.into(), i: Some(i), kind: Some(attribute_type::INT), ..Default::default() }
}

fn integers(name: &str, values: &[usize]) -> AttributeProto {
    let ints = values.iter().map(|&v| v as i64).collect();
    AttributeProto { name: name.into(), ints, kind: Some(attribute_type::INTS), ..Default::default() }
}

fn constant_ints(name: &str, values: &[i64]) -> TensorProto {
    TensorProto {
        name: name.into(),
        dims: vec![values.len() as i64],
        data_type: Some(data_type::INT64),
        raw_data: Some(values.iter().flat_map(|v| v.to_le_bytes()).collect()),
        ..Default::default()
    }
}

fn float(name: &str, f: f32) -> AttributeProto {
    AttributeProto { name: name.into(), f: Some(f), kind: Some(attribute_type::FLOAT), ..Default::default() }
}

fn floats(name: &str, dims: &[usize], values: &[f32]) -> TensorProto {
    TensorProto {
        name: name.into(),
        dims: dims.iter().map(|&d| d as i64).collect(),
        data_type: Some(data_type::FLOAT),
        raw_data: Some(values.iter().flat_map(|v| v.to_le_bytes()).collect()),
        ..Default::default()
    }
}

fn scalar(name: &str, kind: i32, bytes: &[u8]) -> TensorProto {
    TensorProto { name: name.into(), data_type: Some(kind), raw_data: Some(bytes.to_vec()), ..Default::default() }
}

fn tensor_type(kind: i32, dim: Vec<DimensionProto>) -> Option<TypeProto> {
    Some(TypeProto {
        tensor_type: Some(TensorTypeProto { elem_type: Some(kind), shape: Some(TensorShapeProto { dim }) }),
    })
}

fn value(name: &str, kind: i32, width: usize) -> ValueInfoProto {
    batch_of(name, kind, &[width])
}

fn flat_value(name: &str, width: usize) -> ValueInfoProto {
    batch_of(name, data_type::FLOAT, &[width])
}

fn map_value(name: &str, map: MapShape) -> ValueInfoProto {
    batch_of(name, data_type::FLOAT, &[map.channels, map.height, map.width])
}

fn batch_of(name: &str, kind: i32, sample: &[usize]) -> ValueInfoProto {
    let batch = DimensionProto { value: Some(DimensionValue::Param("batch".into())) };
    let rest = sample.iter().map(|&d| DimensionProto { value: Some(DimensionValue::Value(d as i64)) });
    let dims = std::iter::once(batch).chain(rest).collect();
    ValueInfoProto { name: name.into(), kind: tensor_type(kind, dims), ..Default::default() }
}

fn scalar_value(name: &str, kind: i32) -> ValueInfoProto {
    ValueInfoProto { name: name.into(), kind: tensor_type(kind, vec![]), ..Default::default() }
}
