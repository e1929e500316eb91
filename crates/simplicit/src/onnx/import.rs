//! Reads a network from an ONNX file, node by node.
//!
//! The graph is walked with a batch of one sample. What depends on constants and shapes alone is computed at once,
//! whatever the operators; the rest becomes nodes of a network. A node that cannot be read is noted, nodes that
//! depend on it are skipped, and the error at the end names all nodes that were noted.

use std::collections::{HashMap, HashSet};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use prost::Message;

use super::constant::{Constant, Tensor};
use super::external;
use super::origin::{Origin, repeated_weights};
use super::proto::{AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto};
use super::recognise::Profiles;
use super::signature::{choose, filled_inputs, input_dims, is_float};
use super::tensor;
use crate::graph::Dims;
use crate::network::{Network, NetworkBuilder, NodeId, Shape};
use crate::{Error, Result};

/// The largest file that is read: the most that a protocol buffer can hold.
const MAX_BYTES: u64 = 1 << 31;

/// The deepest nesting of branches.
const MAX_DEPTH: usize = 8;

/// The oldest operator set with today's rules of broadcasting.
const MIN_OPSET: i64 = 7;

/// Choices that a file leaves open: several inputs or outputs, axes without a size.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct OnnxSelection {
    /// The name of the input that is the sample.
    pub input: Option<String>,
    /// The name of the output.
    pub output: Option<String>,
    /// The sizes of one sample, where the file leaves axes open; a leading 1 for the batch is allowed.
    pub input_shape: Option<Vec<usize>>,
    /// Other inputs by name, each with the number that fills it.
    pub fill: Vec<(String, f32)>,
}

impl OnnxSelection {
    /// The sizes in a text such as `3x48x192`.
    pub fn parse_shape(text: &str) -> Result<Vec<usize>> {
        let sizes = text.split(['x', '×']).map(|size| size.trim().parse::<usize>().ok().filter(|&size| size > 0));
        sizes
            .collect::<Option<Vec<_>>>()
            .ok_or_else(|| Error::setting("--input-shape", "sizes such as 3x224x224", format!("{text:?}")))
    }

    /// The names and numbers in a text such as `mask=1,kinds=0`.
    pub fn parse_fill(text: &str) -> Result<Vec<(String, f32)>> {
        let pair = |part: &str| {
            let (name, value) = part.rsplit_once('=')?;
            let value = value.trim().parse::<f32>().ok().filter(|value| value.is_finite())?;
            Some((name.trim().to_string(), value)).filter(|(name, _)| !name.is_empty())
        };
        text.split(',')
            .map(pair)
            .collect::<Option<Vec<_>>>()
            .ok_or_else(|| Error::setting("--fill", "NAME=NUMBER, several with commas", format!("{text:?}")))
    }
}

/// A node of an ONNX file that cannot be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnsupportedNode {
    /// Its name or, if it has none, that of the value it computes.
    pub name: String,
    /// Its operator.
    pub operator: String,
    /// Why, and what to do.
    pub why: String,
}

/// The content of an ONNX file, also if not all of it can be read.
#[derive(Debug)]
pub struct OnnxFile {
    /// The version of ONNX's operators.
    pub opset: i64,
    /// The network, if all of it can be read.
    pub network: Option<Network>,
    /// All nodes that cannot be read and that the output depends on.
    pub unsupported: Vec<UnsupportedNode>,
}

impl Network {
    /// Reads an ONNX file (opset 7 or later).
    ///
    /// The first axis of the input is the batch, whatever its stored size; all others must be fixed, by the file or
    /// by [`OnnxSelection::input_shape`]. Batch norm is folded if a linear map or convolution is next to it. If nodes
    /// cannot be represented, the error names each of them, its operator and an alternative.
    pub fn from_onnx(path: impl AsRef<Path>) -> Result<Self> {
        Self::from_onnx_selected(path, &OnnxSelection::default())
    }

    /// As [`Network::from_onnx`], with a selection for what the file leaves open.
    pub fn from_onnx_selected(path: impl AsRef<Path>, selection: &OnnxSelection) -> Result<Self> {
        let path = path.as_ref();
        let bytes = read_file(path)?;
        let (_, network, refused) = import(&bytes, path, path.parent(), selection)?;
        network.ok_or_else(|| all_at_once(path, refused))
    }

    /// As [`Network::from_onnx`], from the bytes of a file.
    pub fn from_onnx_bytes(bytes: &[u8]) -> Result<Self> {
        Self::from_onnx_bytes_selected(bytes, &OnnxSelection::default())
    }

    /// As [`Network::from_onnx_bytes`], with a selection for what the file leaves open.
    pub fn from_onnx_bytes_selected(bytes: &[u8], selection: &OnnxSelection) -> Result<Self> {
        let path = Path::new("ONNX bytes");
        let (_, network, refused) = import(bytes, path, None, selection)?;
        network.ok_or_else(|| all_at_once(path, refused))
    }
}

impl OnnxFile {
    /// Reads as much as possible; an error only if the file as a whole is not an ONNX file.
    pub fn read(path: impl AsRef<Path>, selection: &OnnxSelection) -> Result<Self> {
        let path = path.as_ref();
        let bytes = read_file(path)?;
        let (opset, network, refused) = import(&bytes, path, path.parent(), selection)?;
        Ok(Self { opset, network, unsupported: refused.into_iter().map(|r| r.about).collect() })
    }

    /// The other files that hold weights of an ONNX file, all of them in its folder; none if it is not an ONNX file.
    pub fn weight_files(path: impl AsRef<Path>) -> Vec<PathBuf> {
        let path = path.as_ref();
        let graph = read_file(path).ok().and_then(|bytes| ModelProto::decode(&bytes[..]).ok()).and_then(|m| m.graph);
        graph.map_or_else(Vec::new, |graph| external::files(&graph, path.parent().unwrap_or(Path::new(""))))
    }
}

pub(super) fn read_file(path: &Path) -> Result<Vec<u8>> {
    let file = std::fs::File::open(path).map_err(|e| Error::io(path, e))?;
    let mut bytes = Vec::new();
    file.take(MAX_BYTES + 1).read_to_end(&mut bytes).map_err(|e| Error::io(path, e))?;
    if bytes.len() as u64 > MAX_BYTES {
        return Err(Error::file(
            path,
            format!("larger than {MAX_BYTES} bytes; keep the weights in another file of its folder"),
        ));
    }
    Ok(bytes)
}

/// A node that was refused, with the error it gave.
struct Refused {
    about: UnsupportedNode,
    error: Error,
}

/// One error for all refused nodes: the error itself if there is only one.
fn all_at_once(path: &Path, mut refused: Vec<Refused>) -> Error {
    const SHOWN: usize = 20;
    let place = path.display().to_string();
    if refused.len() == 1 {
        return refused.remove(0).error.within(&place);
    }
    let shown: Vec<String> = refused.iter().take(SHOWN).map(|r| r.error.to_string()).collect();
    let more = if refused.len() > SHOWN { format!("; and {} more", refused.len() - SHOWN) } else { String::new() };
    Error::file(path, format!("{} nodes cannot be read: {}{more}", refused.len(), shown.join("; ")))
}

/// The network of a file and the origins of its linear maps and convolutions, in the order of its nodes. A map that no
/// node of the file can take back has its name instead.
pub(super) fn import_graph(
    bytes: &[u8],
    path: &Path,
    selection: &OnnxSelection,
) -> Result<(Network, Vec<Result<Origin, String>>)> {
    let (_, network, refused, origins) = import_traced(bytes, path, path.parent(), selection)?;
    Ok((network.ok_or_else(|| all_at_once(path, refused))?, origins))
}

fn import(
    bytes: &[u8],
    path: &Path,
    folder: Option<&Path>,
    selection: &OnnxSelection,
) -> Result<(i64, Option<Network>, Vec<Refused>)> {
    let (opset, network, refused, _) = import_traced(bytes, path, folder, selection)?;
    Ok((opset, network, refused))
}

/// The operator set, the network if all of it can be read, what was refused, and where weights come from.
type Imported = (i64, Option<Network>, Vec<Refused>, Vec<Result<Origin, String>>);

fn import_traced(bytes: &[u8], path: &Path, folder: Option<&Path>, selection: &OnnxSelection) -> Result<Imported> {
    let model = ModelProto::decode(bytes).map_err(|e| Error::file(path, format!("not an ONNX file: {e}")))?;
    let place = path.display().to_string();
    let opset = model.opset_import.iter().find(|o| matches!(o.domain.as_str(), "" | "ai.onnx"));
    let opset = opset.and_then(|o| o.version).unwrap_or(0);
    let Some(graph) = &model.graph else {
        return Err(Error::file(path, "not an ONNX file: no graph in it"));
    };
    if opset < MIN_OPSET {
        return Err(Error::unsupported(
            format!("{place}: opset {opset}"),
            format!("export again with opset {MIN_OPSET} or later"),
        ));
    }
    // A few bytes must not become gigabytes because they are used again and again. Fused forms need a few copies.
    let budget = bytes.len().saturating_mul(8).max(1 << 24);
    let run = || {
        let mut importer = Importer::new(graph, opset, budget, folder, selection)?;
        let network = importer.run(graph, selection)?;
        Ok((network, importer.refused, importer.kept_origins))
    };
    let (network, refused, origins) = run().map_err(|e: Error| e.within(&place))?;
    Ok((opset, network, refused, origins))
}

/// The value that a name in the file stands for.
#[derive(Debug, Clone)]
pub(super) enum Value {
    /// A value of the sample: the node that computes it.
    Node(usize),
    /// Numbers that do not depend on the sample, and whether they come from stored weights.
    Constant(Arc<Constant>, bool),
    /// A value that depends on a node that was refused.
    Unknown,
}

/// The network under construction, and the values of the names.
pub(super) struct Importer<'a> {
    pub(super) builder: NetworkBuilder,
    pub(super) opset: i64,
    /// The size of the first axis of the input, where the file fixes it to more than one sample.
    pub(super) fixed_batch: Option<usize>,
    /// Dense layers over the last axis, by the node of their result, each with the 1 × 1 convolution that replaces it.
    /// A constant after the layer is folded into that convolution.
    pub(super) dense: HashMap<usize, usize>,
    pub(super) profiles: Profiles,
    /// Nodes whose values are whole numbers: tokens, and values that result from moving them.
    pub(super) whole: HashSet<usize>,
    /// The order of the axes of the weights of an Einsum that was read as a dense layer, units first.
    pub(super) turned: Option<Vec<usize>>,
    /// Constants that already have a node, by the address of the shared tensor.
    constants: HashMap<usize, (Arc<Constant>, usize)>,
    initializers: HashMap<&'a str, &'a TensorProto>,
    values: HashMap<&'a str, Value>,
    folder: Option<&'a Path>,
    /// How many more numbers may be computed or copied out of the file.
    budget: usize,
    refused: Vec<Refused>,
    /// The origins of linear maps and convolutions, by node; in the end, of those that the network keeps, in order.
    pub(super) origins: HashMap<usize, Origin>,
    kept_origins: Vec<Result<Origin, String>>,
}

impl<'a> Importer<'a> {
    fn new(
        graph: &'a GraphProto,
        opset: i64,
        budget: usize,
        folder: Option<&'a Path>,
        selection: &OnnxSelection,
    ) -> Result<Self> {
        let initializers: HashMap<_, _> = graph.initializer.iter().map(|t| (t.name.as_str(), t)).collect();
        // Before IR version 4, initialisers are also listed as inputs.
        let inputs: Vec<_> = graph.input.iter().filter(|i| !initializers.contains_key(i.name.as_str())).collect();
        let input = choose(&inputs, selection.input.as_deref(), "input")?;
        let (fixed_batch, dims) = input_dims(input, selection.input_shape.as_deref())?;
        let filled = filled_inputs(&inputs, input, &dims, &selection.fill)?;
        let builder = Dims::new(&dims).and_then(|dims| Network::builder(Shape::from_dims(dims)));
        let builder = builder.map_err(|e| e.within(&format!("input {:?}", input.name)))?;
        let whole = if is_float(input) { HashSet::new() } else { HashSet::from([builder.here().0]) };
        let mut values = HashMap::from([(input.name.as_str(), Value::Node(builder.here().0))]);
        values.extend(inputs.iter().filter(|i| i.name != input.name).map(|i| (i.name.as_str(), Value::Unknown)));
        values.extend(filled.into_iter().map(|(name, value)| (name, Value::Constant(Arc::new(value), false))));
        Ok(Self {
            builder,
            opset,
            fixed_batch: fixed_batch.filter(|&b| b > 1),
            dense: HashMap::new(),
            profiles: Profiles::default(),
            whole,
            turned: None,
            constants: HashMap::new(),
            initializers,
            values,
            folder,
            budget,
            refused: Vec::new(),
            origins: HashMap::new(),
            kept_origins: Vec::new(),
        })
    }

    fn run(&mut self, graph: &'a GraphProto, selection: &OnnxSelection) -> Result<Option<Network>> {
        let outputs: Vec<_> = graph.output.iter().collect();
        // Any value of the graph may be chosen as the output.
        let inner = selection.output.as_ref().filter(|name| graph.node.iter().any(|node| node.output.contains(name)));
        let output = match inner {
            Some(name) => name,
            None => &choose(&outputs, selection.output.as_deref(), "output")?.name,
        };
        self.walk(graph, std::slice::from_ref(output), 0)?;
        let what = || format!("output {output:?}");
        match self.values.get(output.as_str()) {
            Some(Value::Unknown) if self.refused.is_empty() => {
                let names: Vec<&str> = graph.input.iter().map(|i| i.name.as_str()).collect();
                Err(Error::unsupported(
                    format!("{}, which depends on several of the inputs {names:?}", what()),
                    "fill all but one of them with numbers (--fill NAME=NUMBER,…), or choose an output that depends on one \
                     input (--output NAME)",
                ))
            }
            Some(Value::Unknown) => Ok(None),
            Some(&Value::Node(node)) => {
                let dims = self.builder.shape_of(node).dims();
                if dims.sizes().first().is_some_and(|&d| d != 1) {
                    return Err(Error::shape(
                        what(),
                        "the batch as its first axis",
                        format!("{dims} for a batch of one sample; samples must not mix"),
                    ));
                }
                let place = self.builder.share(&[vec![node], self.read_elsewhere(graph)].concat())?;
                let node = place[node];
                let mut origins: HashMap<usize, Origin> = HashMap::new();
                for (id, now) in place.iter().enumerate() {
                    if let Some(origin) = self.origins.remove(&id) {
                        // A map stands before its copies.
                        origins.entry(*now).or_insert(origin);
                    }
                }
                let name = |id| self.builder.name(id).to_string();
                let kept = self.builder.weighted(node).into_iter();
                self.kept_origins = kept.map(|id| origins.remove(&id).ok_or_else(|| name(id))).collect();
                let mut network = self.builder.clone().at(NodeId(node))?.build()?;
                network.set_repeated_weights(repeated_weights(graph, &self.kept_origins));
                Ok(Some(network))
            }
            _ => Err(Error::shape(what(), "a value computed from the input", "none")),
        }
    }

    /// The values that outputs beside the chosen one are, or are computed from.
    fn read_elsewhere(&self, graph: &'a GraphProto) -> Vec<usize> {
        let mut wanted: HashSet<&str> = graph.output.iter().map(|o| o.name.as_str()).collect();
        for node in graph.node.iter().rev() {
            let is_wanted = |name: &String| wanted.contains(name.as_str()) && !self.values.contains_key(name.as_str());
            if node.output.iter().any(is_wanted) {
                wanted.extend(node.input.iter().map(String::as_str));
                node.attribute.iter().for_each(|a| names_read(a, 0, &mut wanted));
            }
        }
        let node = |name| if let Some(&Value::Node(id)) = self.values.get(name) { Some(id) } else { None };
        wanted.into_iter().filter_map(node).collect()
    }

    /// Computes the nodes that the wanted values depend on, in the order of the file.
    fn walk(&mut self, graph: &'a GraphProto, wanted: &[String], depth: usize) -> Result<()> {
        let mut needed: HashSet<&str> = wanted.iter().map(String::as_str).collect();
        let mut runs = vec![false; graph.node.len()];
        for (k, node) in graph.node.iter().enumerate().rev() {
            runs[k] = node.output.iter().any(|name| needed.contains(name.as_str()));
            if runs[k] {
                needed.extend(node.input.iter().map(String::as_str));
                node.attribute.iter().for_each(|a| names_read(a, depth, &mut needed));
            }
        }
        for node in graph.node.iter().zip(runs).filter_map(|(node, runs)| runs.then_some(node)) {
            let values = match self.node(graph, node, depth) {
                Ok(values) => values,
                Err(error) => {
                    let about = UnsupportedNode {
                        name: node.title().to_string(),
                        operator: node.op_type.clone(),
                        why: error.to_string(),
                    };
                    self.refused.push(Refused { about, error: error.within(&node.label()) });
                    vec![Value::Unknown; node.output.len()]
                }
            };
            for (name, value) in node.output.iter().zip(values).filter(|(name, _)| !name.is_empty()) {
                if self.values.insert(name, value).is_some() || self.initializers.contains_key(name.as_str()) {
                    return Err(Error::shape(node.label(), "a new value", format!("{name:?}, which exists already")));
                }
            }
        }
        Ok(())
    }

    fn node(&mut self, graph: &GraphProto, node: &'a NodeProto, depth: usize) -> Result<Vec<Value>> {
        // The preprocessing that scikit-learn's pipelines put in front of a network is read too.
        let is_scaler = node.domain == "ai.onnx.ml" && node.op_type == "Scaler";
        if !is_scaler && !matches!(node.domain.as_str(), "" | "ai.onnx") {
            return Err(Error::unsupported(
                format!("operator set {:?}", node.domain),
                "only ONNX's own operators are read; export without custom operators",
            ));
        }
        let mut inputs = Vec::with_capacity(node.input.len());
        for name in &node.input {
            inputs.push(if name.is_empty() { None } else { Some(self.value(name)?) });
        }
        if inputs.iter().flatten().any(|v| matches!(v, Value::Unknown)) {
            return Ok(vec![Value::Unknown; node.output.len()]);
        }
        match node.op_type.as_str() {
            "Constant" => return Ok(vec![Value::Constant(Arc::new(constant_node(node)?), false)]),
            "If" => return self.branch(node, &inputs, depth),
            _ => {}
        }
        let (nodes, parameters) = (self.builder.count(), self.builder.parameters());
        let values = self.apply(node, &inputs)?;
        self.spend(self.builder.parameters() - parameters)?;
        if depth == 0 {
            self.note_origins(graph, node, nodes, &inputs, values.first());
        }
        // Operators that move, add or multiply whole numbers give whole numbers.
        const WHOLE: [&str; 25] = [
            "Identity",
            "Cast",
            "Reshape",
            "Flatten",
            "Squeeze",
            "Unsqueeze",
            "Transpose",
            "Slice",
            "Concat",
            "Expand",
            "Tile",
            "Split",
            "Gather",
            "Where",
            "Add",
            "Sub",
            "Mul",
            "Neg",
            "Abs",
            "Max",
            "Min",
            "CumSum",
            "ReduceSum",
            "ReduceMax",
            "ReduceMin",
        ];
        let stays_whole = |value: &Option<Value>| match value {
            Some(Value::Node(id)) => self.whole.contains(id),
            Some(Value::Constant(constant, _)) => matches!(**constant, Constant::Ints(_)),
            _ => true,
        };
        if !self.whole.is_empty() && WHOLE.contains(&node.op_type.as_str()) && inputs.iter().all(stays_whole) {
            self.whole.extend(values.iter().filter_map(|v| if let Value::Node(id) = v { Some(*id) } else { None }));
        }
        let result = if let [Value::Node(id)] = values[..] { Some(id) } else { None };
        for id in nodes..self.builder.count() {
            let title = node.title();
            let title = if Some(id) == result { title.to_string() } else { format!("{title}:{}", id - nodes) };
            self.builder.rename(id, &title);
        }
        Ok(values)
    }

    /// The branch that a constant condition takes.
    fn branch(&mut self, node: &'a NodeProto, inputs: &[Option<Value>], depth: usize) -> Result<Vec<Value>> {
        let condition = match inputs.first() {
            Some(Some(Value::Constant(constant, _))) => match &**constant {
                Constant::Ints(tensor) => tensor.values.first().copied(),
                Constant::Floats(_) => None,
            },
            _ => None,
        };
        let Some(condition) = condition else {
            return Err(Error::unsupported(
                "a condition that depends on the sample",
                "the same nodes must run for every sample; export without data-dependent branches",
            ));
        };
        let name = if condition != 0 { "then_branch" } else { "else_branch" };
        let graph = node.attribute(name).and_then(|a| a.g.as_ref());
        let graph = graph.filter(|_| depth < MAX_DEPTH).ok_or_else(|| Error::shape(name, "a graph", "none"))?;
        self.initializers.extend(graph.initializer.iter().map(|t| (t.name.as_str(), t)));
        let wanted: Vec<String> = graph.output.iter().map(|o| o.name.clone()).collect();
        self.walk(graph, &wanted, depth + 1)?;
        wanted.iter().map(|name| self.value(name)).collect()
    }

    /// The value that a name stands for, if it is known already.
    pub(super) fn known(&self, name: &str) -> Option<&Value> {
        self.values.get(name)
    }

    /// The value that a name stands for; constants are read only once.
    fn value(&mut self, name: &str) -> Result<Value> {
        if let Some(value) = self.values.get(name) {
            return Ok(value.clone());
        }
        let Some((&name, &stored)) = self.initializers.get_key_value(name) else {
            return Err(Error::shape("input", "a value computed before this node", format!("{name:?}")));
        };
        let constant = match self.folder {
            Some(folder) if tensor::is_external(stored) => {
                let constant = external::read(stored, folder)?;
                // Weights in other files count as part of the file.
                self.budget = self.budget.saturating_add(constant.len().saturating_mul(16));
                constant
            }
            _ => tensor::read(stored)?,
        };
        let is_weight = matches!(constant, Constant::Floats(_));
        let value = Value::Constant(Arc::new(constant), is_weight);
        self.values.insert(name, value.clone());
        Ok(value)
    }

    pub(super) fn spend(&mut self, numbers: usize) -> Result<()> {
        self.budget = self.budget.checked_sub(numbers).ok_or_else(|| {
            Error::shape(
                "constants",
                "weights in proportion to the file",
                "many more, because the same ones are used again",
            )
        })?;
        Ok(())
    }

    /// A computed constant.
    pub(super) fn constant(&mut self, constant: Constant, is_weight: bool) -> Result<Value> {
        self.spend(constant.len())?;
        Ok(Value::Constant(Arc::new(constant), is_weight))
    }

    /// The node of a constant that meets values of the sample; one for all its uses.
    pub(super) fn node_of(&mut self, value: &Value) -> Result<usize> {
        match value {
            Value::Node(node) => Ok(*node),
            Value::Constant(constant, is_weight) => {
                let key = Arc::as_ptr(constant) as usize;
                if let Some((_, node)) = self.constants.get(&key) {
                    return Ok(*node);
                }
                let Tensor { dims, values } = constant.to_floats();
                let values = values.into_iter().map(finite).collect::<Vec<_>>();
                let parameter = *is_weight && values.len() > 1;
                let node = self.builder.push_constant(Dims::new(&dims)?, values, parameter)?;
                self.constants.insert(key, (constant.clone(), node));
                Ok(node)
            }
            Value::Unknown => Err(Error::shape("input", "a value", "one that could not be read")),
        }
    }
}

/// A finite number in place of −∞, which masks an entry of a softmax or a maximum: any number far below the others
/// does the same.
pub(super) fn finite(value: f32) -> f32 {
    if value == f32::NEG_INFINITY { -1e30 } else { value }
}

/// All names that the branches of a node read.
fn names_read<'a>(attribute: &'a AttributeProto, depth: usize, into: &mut HashSet<&'a str>) {
    if let Some(graph) = attribute.g.as_ref().filter(|_| depth < MAX_DEPTH) {
        into.extend(graph.output.iter().map(|o| o.name.as_str()));
        for node in &graph.node {
            into.extend(node.input.iter().map(String::as_str));
            node.attribute.iter().for_each(|a| names_read(a, depth + 1, into));
        }
    }
}

fn constant_node(node: &NodeProto) -> Result<Constant> {
    let Some(attribute) = node.attribute.first() else {
        return Err(Error::shape("constant", "one attribute", "none"));
    };
    let list = |length| vec![length];
    Ok(match attribute.name.as_str() {
        "value" => match &attribute.t {
            Some(tensor) => return tensor::read(tensor),
            None => return Err(Error::shape("constant", "a tensor", "none")),
        },
        "value_float" => Constant::Floats(Tensor::scalar(attribute.f.unwrap_or(0.0))),
        "value_int" => Constant::Ints(Tensor::scalar(attribute.i.unwrap_or(0))),
        "value_floats" => {
            let values = attribute.floats.clone();
            Constant::Floats(Tensor { dims: list(values.len()), values })
        }
        "value_ints" => {
            let values = attribute.ints.clone();
            Constant::Ints(Tensor { dims: list(values.len()), values })
        }
        other => return Err(Error::unsupported(format!("a constant of kind {other}"), "constants must be numbers")),
    })
}
