//! Writes a trained model into the file that its network came from: the same graph, with new weights.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use prost::Message;

use crate::equilibrium::{Equilibrium, EquilibriumSettings};
use crate::files::write_bytes_atomically;
use crate::linalg::Matrix;
use crate::model::{ImplicitModel, TapBlock, TapWeights, Target};
use crate::network::{Network, Term, Weights};
use crate::onnx::constant::{Constant, Tensor};
use crate::onnx::export::writer::{self, integer, integers};
use crate::onnx::origin::{Origin, Traced};
use crate::onnx::proto::{GraphProto, NodeProto, TensorProto, data_type};
use crate::onnx::transposed::Phases;
use crate::onnx::{OnnxSelection, external, tensor};
use crate::random::Random;
use crate::states::StateMap;
use crate::{Error, Result};

/// Suffix of the names of new weights while the old ones are still there.
const SUFFIX: &str = "_sparse";

/// Largest difference of the written file's outputs from the model's, over the largest output: in single precision,
/// where rounding gives some 10⁻⁶, and with weights of half precision.
const NEAR: [f32; 2] = [1e-3, 2e-2];

/// Seed of the samples on which they are compared.
const SEED: u64 = 0x11ce;

/// New weights of one linear map or convolution, out × in as the network has them, and its bias.
struct Renewed {
    weights: Matrix<f32>,
    bias: Option<Vec<f32>>,
}

/// Writes `original` again with the weights of a model that was trained from it: its operators, names, operator set
/// and free batch stay, and its initialisers contain the zeros. A batch norm, scale or bias that was folded is
/// removed, and its effect is in the weights. Where the file has several inputs or outputs, the selection must be
/// that of the training; other outputs stay in the graph.
///
/// Before anything is written, the new file is read again and compared with the model on two random samples. A file
/// that computes something else is an error.
pub fn export_onnx_like(
    model: &ImplicitModel,
    original: impl AsRef<Path>,
    selection: &OnnxSelection,
    path: impl AsRef<Path>,
) -> Result<()> {
    let original = original.as_ref();
    let Traced { model: mut file, network, origins } = Traced::read(original, selection)?;
    let refuse = |what: &str| {
        Error::unsupported(
            format!("{} in the form of {}", what, original.display()),
            "export without --like, which writes any model",
        )
    };
    let units = |layout: &crate::layout::Layout| layout.layers().iter().map(|l| l.size).collect::<Vec<_>>();
    if units(model.layout()) != units(network.layout()) {
        return Err(refuse("a model with other layers than the network's"));
    }
    if model.metadata().scaling.is_some() {
        return Err(refuse("a model in rescaled coordinates"));
    }
    let places = network.weighted_terms();
    if places.len() != origins.len() {
        return Err(refuse("weights that the network reads in several places"));
    }
    let renewed =
        renewed(model, &network).ok_or_else(|| refuse("a model with connections that the network does not have"))?;
    let opset = file.opset_import.iter().find(|o| matches!(o.domain.as_str(), "" | "ai.onnx")).and_then(|o| o.version);
    let opset = opset.unwrap_or(0);
    let graph = file.graph.as_mut().ok_or_else(|| refuse("nothing"))?;
    inline_external(graph, original.parent())?;
    let mut computed = HashSet::new();
    let mut near = NEAR[0];
    for (place, origin) in places.iter().zip(&origins) {
        let origin = origin.as_ref().map_err(|name| {
            refuse(&format!("weights in a branch (If) or in a node that computes more than their product ({name:?})"))
        })?;
        let Some(weights) = renewed.get(place).filter(|_| computed.insert(&origin.output)) else {
            return Err(refuse(&format!("weights that the network reads in several places ({:?})", origin.output)));
        };
        let phases = phases(graph, origin)?;
        let groups = graph.node.get(origin.node).map_or(1, |node| node.int("group", 1));
        if phases.as_ref().is_some_and(|phases| groups != 1 || !has_form(phases, opset)) {
            return Err(refuse(
                "a transposed convolution of one axis, with groups or two strides, or cut in an operator set before 10",
            ));
        }
        let kind = write(graph, origin, weights, phases.as_ref());
        let kind = kind.ok_or_else(|| refuse(&format!("weights in another type than float ({:?})", origin.output)))?;
        if matches!(kind, data_type::FLOAT16 | data_type::BFLOAT16) {
            near = NEAR[1];
        }
    }
    tidy(graph);
    own_names(graph);
    distinct_names(graph);
    let bytes = file.encode_to_vec();
    drop((file, network, renewed));
    if let Some(why) = difference(model, &bytes, selection, near) {
        return Err(refuse(&format!("a file that computes something else than the model ({why})")));
    }
    write_bytes_atomically(path.as_ref(), &bytes)
}

/// In which way a file does not compute what the model computes, if so.
fn difference(model: &ImplicitModel, bytes: &[u8], selection: &OnnxSelection, near: f32) -> Option<String> {
    let network = match Network::from_onnx_bytes_selected(bytes, selection) {
        Ok(network) => network,
        Err(error) => return Some(error.to_string()),
    };
    let Ok(equilibrium) = Equilibrium::new(model, EquilibriumSettings::default()) else { return None };
    let inputs = network.input_shape().size();
    let mut random = Random::new(SEED);
    // Fractions, and the zeros and ones that are also tokens, masks and what a logarithm can take.
    for whole in [false, true] {
        let mut value = || if whole { random.below(2) as f32 } else { random.normal() as f32 };
        let u = Matrix::from_fn(1, inputs, |_, _| value());
        // Where the model itself has no numbers, as for fractions in the place of tokens, there is nothing to compare.
        let computed = |u: &Matrix<f32>| {
            let y = equilibrium.outputs(u).ok().map(|solution| solution.y);
            y.filter(|y| y.as_slice().iter().all(|v| v.is_finite()))
        };
        let Some(wanted) = computed(&u) else { continue };
        let got = match network.forward(&u) {
            Ok(got) => got,
            Err(error) => return Some(error.to_string()),
        };
        let largest = wanted.as_slice().iter().fold(0.0f32, |m, v| m.max(v.abs()));
        let off = distance(&got, &wanted);
        if off <= near * largest {
            continue;
        }
        // Some networks magnify rounding errors. The file may differ as much as the model's own outputs do after a
        // change of the input in the seventh digit.
        let mut moved = u;
        moved.as_mut_slice().iter_mut().for_each(|v| *v *= 1.0 + 1e-6);
        if computed(&moved).is_none_or(|moved| off > 10.0 * distance(&moved, &wanted)) {
            return Some(format!("outputs of a random sample are off by {:.1e} of the largest", off / largest));
        }
    }
    None
}

/// The largest difference of two arrays; infinite where they cannot be compared.
fn distance(a: &Matrix<f32>, b: &Matrix<f32>) -> f32 {
    let (a, b) = (a.as_slice(), b.as_slice());
    let differences = a.iter().zip(b).map(|(a, b)| (a - b).abs());
    let largest = differences.fold(0.0f32, |m, d| if d.is_finite() { m.max(d) } else { f32::INFINITY });
    if a.len() == b.len() { largest } else { f32::INFINITY }
}

/// The model's weights of every term of the network; `None` where the model has others.
fn renewed(
    model: &ImplicitModel,
    network: &crate::network::Network,
) -> Option<HashMap<(Option<usize>, usize), Renewed>> {
    let mut out = HashMap::new();
    let sums = network.pre_activations().iter().enumerate().map(|(k, z)| (Some(k), z));
    for (layer, sum) in sums.chain([(None, network.output())]) {
        let target = layer.map_or(Target::Output, Target::Layer);
        let mut blocks: Vec<TapBlock> = model.summands(target);
        blocks.retain(|block| matches!(block.weights, TapWeights::Taps(_)));
        let mut bias = match layer {
            Some(k) => model.state_bias()[model.layout().row_range(k)].to_vec(),
            None => model.output_bias().to_vec(),
        };
        for (k, term) in sum.terms.iter().enumerate() {
            let (Weights::Dense(old) | Weights::Taps { weights: old, .. }) = &term.weights else { continue };
            let mut weights = Matrix::zeros(old.rows(), old.cols());
            if let Some(found) = blocks.iter().position(|block| is_of(block, term, old)) {
                let block = blocks.remove(found);
                let TapWeights::Taps(taps) = &block.weights else { return None };
                for o in 0..old.rows() {
                    let first = block.group_columns(o).start;
                    for (j, v) in taps.row(o) {
                        weights[(o, j.checked_sub(first).filter(|&j| j < old.cols())?)] = v;
                    }
                }
            }
            // The first linear map of a sum gets the bias of all of them.
            let own = std::mem::take(&mut bias);
            let own = shared(own, old.rows())?;
            out.insert((layer, k), Renewed { weights, bias: own.filter(|b| b.iter().any(|&v| v != 0.0)) });
        }
        if blocks.iter().any(|block| block.nonzeros() > 0) || bias.iter().any(|&b| b != 0.0) {
            return None;
        }
    }
    Some(out)
}

/// One number per row, from one number per row or per unit; `None` where units of a row differ.
fn shared(bias: Vec<f32>, rows: usize) -> Option<Option<Vec<f32>>> {
    if bias.is_empty() || rows == 0 {
        return Some(None);
    }
    let each = bias.len() / rows;
    let same = each > 0 && bias.len() == each * rows && bias.chunks_exact(each).all(|c| c.iter().all(|v| *v == c[0]));
    same.then(|| Some(bias.chunks_exact(each).map(|c| c[0]).collect()))
}

/// Whether a block of the model has the weights of this term.
fn is_of(block: &TapBlock, term: &Term, old: &Matrix<f32>) -> bool {
    let same = block.source == term.source && block.maps == term.maps && block.output.channels == old.rows();
    same && match &term.weights {
        Weights::Taps { window, groups, .. } => {
            block.window == *window && block.groups == *groups && block.columns() == groups * old.cols()
        }
        _ => block.columns() == old.cols(),
    }
}

/// The ordinary convolution that replaces a transposed one, if the node is a transposed convolution.
fn phases(graph: &GraphProto, origin: &Origin) -> Result<Option<Phases>> {
    match graph.node.get(origin.node).filter(|node| node.op_type == "ConvTranspose") {
        Some(node) => Phases::of(node, &origin.weights).map(Some),
        None => Ok(None),
    }
}

/// Whether it can be written: as a 2-D convolution whose channels are rearranged into blocks, with a cut at the
/// borders.
fn has_form(phases: &Phases, opset: i64) -> bool {
    phases.blocks().is_some() && (phases.cuts() == [[0, 0]; 2] || opset >= 10)
}

/// Puts new weights into the node that they come from; it now computes the value after everything that was folded
/// into it. Returns the type in which the weights are stored.
fn write(graph: &mut GraphProto, origin: &Origin, new: &Renewed, phases: Option<&Phases>) -> Option<i32> {
    let mut node = graph.node.get(origin.node)?.clone();
    let (rows, cols) = (new.weights.rows(), new.weights.cols());
    let name = node.input.get(1).cloned()?;
    let kind = stored_type(graph, &name).unwrap_or(data_type::FLOAT);
    let weights = match node.op_type.as_str() {
        "ConvTranspose" => {
            let [height, width] = phases?.window().kernel;
            let inputs = cols.checked_div(height * width)?;
            let dims = [rows, inputs, height, width].map(|d| d as i64);
            tensor::write(kind, &fresh(graph, &name), &dims, new.weights.as_slice())?
        }
        "Conv" => {
            let dims: Vec<i64> = origin.weights.iter().map(|&d| d as i64).collect();
            tensor::write(kind, &fresh(graph, &name), &dims, new.weights.as_slice())?
        }
        "Einsum" => {
            let order = origin.turned.as_ref()?;
            let dims = order.iter().map(|&axis| origin.weights.get(axis).copied()).collect::<Option<Vec<_>>>()?;
            let back: Vec<usize> = (0..order.len()).filter_map(|axis| order.iter().position(|o| *o == axis)).collect();
            let units_first = Tensor { dims, values: new.weights.as_slice().to_vec() };
            let own = units_first.transposed(&back).ok()?;
            let dims: Vec<i64> = own.dims.iter().map(|&d| d as i64).collect();
            tensor::write(kind, &fresh(graph, &name), &dims, &own.values)?
        }
        "Gemm" if node.int("transB", 0) != 0 => {
            tensor::write(kind, &fresh(graph, &name), &[rows as i64, cols as i64], new.weights.as_slice())?
        }
        _ => {
            let turned = new.weights.transposed();
            tensor::write(kind, &fresh(graph, &name), &[cols as i64, rows as i64], turned.as_slice())?
        }
    };
    node.input[0] = unscaled(graph, origin)?;
    node.input[1].clone_from(&weights.name);
    node.input.truncate(2);
    graph.initializer.push(weights);
    // The effect of alpha and beta is in the weights.
    node.attribute.retain(|a| !(node.op_type == "Gemm" && matches!(a.name.as_str(), "alpha" | "beta")));
    let place = graph.node.iter().position(|n| n.output.contains(&origin.output))?;
    let mut added = Vec::new();
    let bias = match &new.bias {
        Some(bias) => Some(tensor::write(kind, &fresh(graph, &format!("{name}_bias")), &[rows as i64], bias)?),
        None => None,
    };
    node.output = vec![origin.output.clone()];
    match (bias, node.op_type.as_str()) {
        (bias, "ConvTranspose") => {
            node.input.extend(bias.iter().map(|b| b.name.clone()));
            graph.initializer.extend(bias);
            added.extend(dealt_out(graph, node, phases?, &name));
        }
        (None, _) => added.push(node),
        (Some(bias), "MatMul" | "Einsum") => {
            let product = format!("{}_product", bias.name);
            node.output = vec![product.clone()];
            let sum = NodeProto {
                input: vec![product, bias.name.clone()],
                output: vec![origin.output.clone()],
                name: format!("{}_bias", node.name),
                op_type: "Add".into(),
                ..Default::default()
            };
            added.extend([node, sum]);
            graph.initializer.push(bias);
        }
        (Some(bias), _) => {
            node.input.push(bias.name.clone());
            graph.initializer.push(bias);
            added.push(node);
        }
    }
    // The node takes the place of the one that computed the value so far, because everything that it reads comes
    // before that. The places of other origins must not change, so new nodes are collected in a list of their own
    // until the graph is tidied.
    let old = &mut graph.node[place];
    old.output.iter_mut().filter(|o| **o == origin.output).for_each(|o| *o = String::new());
    graph.node.extend(added);
    for (computed, read) in &origin.passed {
        let place = graph.node.iter().position(|n| n.output.first().is_some_and(|o| o == computed))?;
        let name = graph.node[place].name.clone();
        let (input, output, op_type) = (vec![read.clone()], vec![computed.clone()], "Identity".to_string());
        graph.node[place] = NodeProto { name, input, output, op_type, ..Default::default() };
    }
    Some(kind)
}

/// The value that a node with new weights reads. If a batch norm in front of a reshape or average was folded into the
/// node, the reshape or average is added once more, reading the value before the norm, because others may read the
/// norm.
fn unscaled(graph: &mut GraphProto, origin: &Origin) -> Option<String> {
    let mut value = origin.input.clone();
    for &place in &origin.through {
        let mut node = graph.node.get(place)?.clone();
        *node.input.first_mut()? = value;
        value = fresh(graph, &format!("{}_unscaled", node.output.first()?));
        node.output = vec![value.clone()];
        graph.node.push(node);
    }
    Some(value)
}

/// A transposed convolution as an ordinary one, followed by nodes that rearrange its channels into blocks of places
/// and cut off the borders.
fn dealt_out(graph: &mut GraphProto, mut node: NodeProto, phases: &Phases, name: &str) -> Vec<NodeProto> {
    let (window, blocks, cuts) = (phases.window(), phases.blocks().unwrap_or(1), phases.cuts());
    let output = std::mem::take(&mut node.output);
    node.op_type = "Conv".into();
    node.attribute = vec![integers("kernel_shape", &window.kernel), integers("pads", &window.padding)];
    let mut value = format!("{name}{SUFFIX}_phases");
    node.output = vec![value.clone()];
    let mut out = vec![node];
    if blocks > 1 {
        let whole = format!("{name}{SUFFIX}_places");
        out.push(writer::node("DepthToSpace", &[&value], &whole, vec![integer("blocksize", blocks as i64)]));
        value = whole;
    }
    if cuts != [[0, 0]; 2] {
        let list = |what: &str, values: [i64; 2]| TensorProto {
            name: format!("{name}{SUFFIX}_{what}"),
            dims: vec![2],
            data_type: Some(data_type::INT64),
            raw_data: Some(values.iter().flat_map(|v| v.to_le_bytes()).collect()),
            ..Default::default()
        };
        let starts = list("starts", cuts.map(|[before, _]| before as i64));
        let ends = list("ends", cuts.map(|[_, behind]| if behind == 0 { i64::MAX } else { -(behind as i64) }));
        let axes = list("axes", [2, 3]);
        let read = [&value, &starts.name, &ends.name, &axes.name].map(String::as_str);
        let cut = format!("{name}{SUFFIX}_cut");
        out.push(writer::node("Slice", &read, &cut, vec![]));
        graph.initializer.extend([starts, ends, axes]);
    }
    if let Some(last) = out.last_mut() {
        last.output = output;
    }
    out
}

/// The type in which a node reads weights, from an initialiser or a constant node that they are computed from: operators on
/// weights keep the type of their first input.
fn stored_type(graph: &GraphProto, name: &str) -> Option<i32> {
    let mut name = name;
    for _ in 0..=graph.node.len() {
        if let Some(tensor) = graph.initializer.iter().find(|t| t.name == *name) {
            return tensor.data_type;
        }
        let producer = graph.node.iter().find(|n| n.output.first().is_some_and(|o| o == name))?;
        match producer.op_type.as_str() {
            "Constant" => return producer.attribute.iter().find_map(|a| a.t.as_ref())?.data_type,
            "Cast" => return i32::try_from(producer.int("to", 1)).ok(),
            _ => name = producer.input.first()?,
        }
    }
    None
}

/// A name that is not used yet.
fn fresh(graph: &GraphProto, name: &str) -> String {
    let initializers = graph.initializer.iter().map(|t| t.name.as_str());
    let computed = graph.node.iter().flat_map(|n| &n.output).map(String::as_str);
    let taken: HashSet<&str> =
        initializers.chain(computed).chain(graph.input.iter().map(|i| i.name.as_str())).collect();
    let mut new = format!("{name}{SUFFIX}");
    while taken.contains(new.as_str()) {
        new.insert(0, '_');
    }
    new
}

/// Removes everything that nothing reads any more, and puts every node after those that it reads.
fn tidy(graph: &mut GraphProto) {
    let mut producer: HashMap<&str, usize> = HashMap::new();
    for (k, node) in graph.node.iter().enumerate() {
        producer.extend(node.output.iter().filter(|o| !o.is_empty()).map(|o| (o.as_str(), k)));
    }
    let mut state = vec![0u8; graph.node.len()];
    let mut order = Vec::new();
    let mut todo: Vec<usize> =
        graph.output.iter().rev().filter_map(|o| producer.get(o.name.as_str()).copied()).collect();
    while let Some(&k) = todo.last() {
        match state[k] {
            0 => {
                state[k] = 1;
                todo.extend(
                    reads(&graph.node[k])
                        .rev()
                        .filter_map(|n| producer.get(n.as_str()).copied())
                        .filter(|&n| state[n] == 0),
                );
            }
            1 => {
                state[k] = 2;
                order.push(k);
                todo.pop();
            }
            _ => {
                todo.pop();
            }
        }
    }
    let kept: Vec<NodeProto> = order.into_iter().map(|k| graph.node[k].clone()).collect();
    let used: HashSet<String> = kept.iter().flat_map(|n| reads(n).cloned().collect::<Vec<_>>()).collect();
    graph.node = kept;
    graph.initializer.retain(|t| used.contains(&t.name));
    let initializers: HashSet<&str> = graph.initializer.iter().map(|t| t.name.as_str()).collect();
    // Older files list initialisers as inputs.
    graph.input.retain(|i| used.contains(&i.name) || initializers.contains(i.name.as_str()));
    graph.value_info.clear();
}

/// Gives new weights the names of those that they replace, if nothing else uses these names.
fn own_names(graph: &mut GraphProto) {
    let mut taken: HashSet<String> = graph.initializer.iter().map(|t| t.name.clone()).collect();
    taken.extend(graph.node.iter().flat_map(|n| n.output.iter().cloned()));
    let mut renamed = HashMap::new();
    for stored in &mut graph.initializer {
        if let Some(own) = stored.name.strip_suffix(SUFFIX).map(str::to_string)
            && taken.insert(own.clone())
        {
            renamed.insert(std::mem::replace(&mut stored.name, own.clone()), own);
        }
    }
    for name in graph.node.iter_mut().flat_map(|n| &mut n.input) {
        if let Some(own) = renamed.get(name) {
            name.clone_from(own);
        }
    }
}

/// Gives nodes that were written several times names of their own, which ONNX Runtime requires.
fn distinct_names(graph: &mut GraphProto) {
    let mut taken: HashSet<String> = graph.node.iter().map(|n| n.name.clone()).collect();
    let mut seen = HashSet::new();
    for node in graph.node.iter_mut().filter(|n| !n.name.is_empty()) {
        let mut name = node.name.clone();
        if !seen.insert(name.clone()) {
            let mut count = 1;
            while !taken.insert(name.clone()) {
                count += 1;
                name = format!("{}_{count}", node.name);
            }
            node.name = name;
        }
    }
}

/// All values a node reads, those of its branches included.
fn reads(node: &NodeProto) -> impl DoubleEndedIterator<Item = &String> {
    let inner = node.attribute.iter().filter_map(|a| a.g.as_ref()).flat_map(|g| &g.node).flat_map(|n| &n.input);
    node.input.iter().chain(inner)
}

/// Moves weights from files next to the original into the new file.
fn inline_external(graph: &mut GraphProto, folder: Option<&Path>) -> Result<()> {
    for stored in graph.initializer.iter_mut().filter(|t| tensor::is_external(t)) {
        match external::read(stored, folder.unwrap_or(Path::new("")))? {
            Constant::Floats(values) => {
                let kind = stored.data_type.unwrap_or(data_type::FLOAT);
                let whole = tensor::write(kind, &stored.name, &stored.dims, &values.values);
                *stored = whole
                    .ok_or_else(|| Error::unsupported(format!("tensor {:?}", stored.name), "store it as floats"))?;
            }
            Constant::Ints(values) => {
                stored.raw_data = Some(values.values.iter().flat_map(|v| v.to_le_bytes()).collect());
                stored.data_type = Some(data_type::INT64);
                (stored.data_location, stored.external_data) = (None, Vec::new());
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::network::Shape;

    #[test]
    fn a_file_that_computes_something_else_is_seen() {
        let network = |last: f32| {
            let weights = Matrix::from_fn(3, 4, |i, j| if (i, j) == (2, 3) { last } else { (i * 4 + j) as f32 / 7.0 });
            Network::builder(Shape::Vector(4)).unwrap().linear(weights, None).unwrap().build().unwrap()
        };
        let model = ImplicitModel::from_network(&network(1.0)).unwrap();
        let seen = |last: f32, near: f32| {
            let other = ImplicitModel::from_network(&network(last)).unwrap();
            let bytes = crate::onnx::to_onnx(&other, crate::onnx::OnnxSettings::default()).unwrap();
            difference(&model, &bytes, &OnnxSelection::default(), near)
        };
        assert_eq!(seen(1.0, NEAR[0]), None);
        assert_eq!(seen(1.01, NEAR[1]), None, "weights that were rounded");
        for last in [1.01, 2.0, 1e30] {
            assert!(seen(last, NEAR[0]).unwrap().contains("random sample"), "{last}");
        }
        assert!(difference(&model, b"nothing", &OnnxSelection::default(), NEAR[0]).is_some());
    }
}
