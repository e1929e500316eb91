//! Turns the graph as written into one whose pre-activations are sums of terms over layers and the input.
//!
//! Outputs keep every bit: a non-decreasing activation moves in front of a max pooling (they commute),
//! and a sum that something other than one activation, one sum or the output reads becomes an identity layer.

use super::fixed::FixedMap;
use super::graph::{Node, Op, count_uses};
use super::shape::Shape;
use crate::layout::Activation;

/// Nodes in topological order; the input is the first, and `output` is the number of the output.
#[derive(Debug)]
pub(crate) struct Graph {
    pub(crate) nodes: Vec<Node>,
    pub(crate) output: usize,
}

pub(crate) fn normalise(nodes: Vec<Node>, output: usize) -> Graph {
    let mut graph = keep_reachable(nodes, output);
    activations_before_max_pools(&mut graph);
    identity_layers(graph)
}

fn keep_reachable(nodes: Vec<Node>, output: usize) -> Graph {
    let mut used = vec![false; nodes.len()];
    used[0] = true;
    used[output] = true;
    for id in (0..nodes.len()).rev() {
        if used[id] {
            nodes[id].inputs.iter().for_each(|&input| used[input] = true);
        }
    }
    let mut place = vec![0; nodes.len()];
    let mut kept = Vec::new();
    for (id, mut node) in nodes.into_iter().enumerate() {
        if used[id] {
            place[id] = kept.len();
            node.inputs.iter_mut().for_each(|input| *input = place[*input]);
            kept.push(node);
        }
    }
    Graph { nodes: kept, output: place[output] }
}

/// sum → pools → φ becomes sum → φ → pools if no other node reads the values in between.
fn activations_before_max_pools(graph: &mut Graph) {
    let uses = count_uses(&graph.nodes, graph.output);
    let nodes = &mut graph.nodes;
    for id in 0..nodes.len() {
        // An activation that decreases somewhere does not commute with a maximum: it stays, and the pooled value
        // becomes a layer.
        if !matches!(nodes[id].op, Op::Activation(activation) if activation.is_non_decreasing()) {
            continue;
        }
        let mut chain = vec![id];
        let mut source = nodes[id].inputs[0];
        while uses[source] == 1 && matches!(nodes[source].op, Op::Reshape | Op::Fixed(FixedMap::MaxPool { .. })) {
            chain.push(source);
            source = nodes[source].inputs[0];
        }
        let pools = chain.iter().any(|&k| matches!(nodes[k].op, Op::Fixed(_)));
        if !pools || !nodes[source].op.is_affine() || uses[source] != 1 {
            continue;
        }
        // The activation takes the first place of the chain, and everything else moves by one place.
        chain.reverse();
        for k in (1..chain.len()).rev() {
            let (left, right) = nodes.split_at_mut(chain[k]);
            let (earlier, later) = (&mut left[chain[k - 1]], &mut right[0]);
            std::mem::swap(&mut earlier.op, &mut later.op);
            std::mem::swap(&mut earlier.name, &mut later.name);
            std::mem::swap(&mut earlier.shape, &mut later.shape);
        }
        nodes[chain[0]].shape = nodes[source].shape;
    }
}

/// Puts an identity activation behind every sum that is read by anything but one activation, one sum or the output,
/// behind every pooling that an operator reads, and behind a feature map that is the output: its weights are shared over
/// positions, which those of outputs are not.
fn identity_layers(graph: Graph) -> Graph {
    let uses = count_uses(&graph.nodes, graph.output);
    let mut readers: Vec<Option<usize>> = vec![None; graph.nodes.len()];
    for (id, node) in graph.nodes.iter().enumerate() {
        node.inputs.iter().for_each(|&input| readers[input] = Some(id));
    }
    let is_shared = |node: &Node| {
        let grouped = matches!(node.op, Op::Convolution { groups, .. } if groups > 1);
        grouped || matches!(node.shape, Shape::Map(map) if map.positions() > 1)
    };
    let is_direct = |id: usize| {
        let mut at = id;
        while uses[at] == 1 {
            match readers[at] {
                None => return !is_shared(&graph.nodes[id]),
                Some(reader) => match graph.nodes[reader].op {
                    Op::Reshape => at = reader,
                    Op::Activation(_) | Op::Add => return true,
                    _ => return false,
                },
            }
        }
        false
    };
    // What an operator reads must be a layer: a pooling in front of one becomes a sum of its own.
    let mut for_operator = vec![false; graph.nodes.len()];
    for node in graph.nodes.iter().filter(|node| matches!(node.op, Op::Structure(_))) {
        for &input in &node.inputs {
            let mut at = input;
            while let Op::Reshape = graph.nodes[at].op {
                at = graph.nodes[at].inputs[0];
            }
            for_operator[at] = true;
        }
    }
    let needs_layer = |id: usize, node: &Node| match node.op {
        Op::Fixed(_) => for_operator[id],
        _ => node.op.is_affine() && (for_operator[id] || !is_direct(id)),
    };
    let wrapped: Vec<bool> = graph.nodes.iter().enumerate().map(|(id, node)| needs_layer(id, node)).collect();
    let mut place = vec![0; graph.nodes.len()];
    let mut nodes = Vec::with_capacity(graph.nodes.len());
    for (id, mut node) in graph.nodes.into_iter().enumerate() {
        node.inputs.iter_mut().for_each(|input| *input = place[*input]);
        let (name, shape) = (node.name.clone(), node.shape);
        nodes.push(node);
        if wrapped[id] {
            let inputs = vec![nodes.len() - 1];
            nodes.push(Node { name, op: Op::Activation(Activation::Identity), inputs, shape });
        }
        place[id] = nodes.len() - 1;
    }
    Graph { nodes, output: place[graph.output] }
}
