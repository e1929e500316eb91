//! A model as nodes that bounds are carried through: sums with an activation, maxima, the input.
//!
//! Poolings between layers are nodes of their own; operators that only move, add or scale values are sums. The states
//! of a cycle have no order: they are one node for every turn of the iteration, and the first turn reads a box that
//! is known to contain the equilibrium.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use super::Arithmetic;
use super::block::{Linear, Select};
use crate::graph::{BoundShape, Dims};
use crate::layout::{Activation, Operator, Source};
use crate::linalg::Csr;
use crate::model::{ImplicitModel, TapBlock, Target};
use crate::network::FixedMap;
use crate::{Error, Result};

/// How many turns of a cycle are substituted; the turn before them is bounded by a box.
pub(super) const TURNS: usize = 12;

/// Products that a substitution sums in single precision. Its roundings matter little where the roundings of a run
/// count, or where coefficients multiply distances from anchors; elsewhere short sums are worth their extra time.
const COARSE: usize = 72;
const FINE: usize = 9;

/// One summand of a node.
pub(super) struct Term {
    /// The node it reads.
    pub(super) source: usize,
    pub(super) map: Arc<Linear>,
}

pub(super) enum Kind {
    /// The sample.
    Input,
    /// The states of a cycle before its first turn: only their box is known.
    Free,
    /// φ(Σ terms + bias).
    Sum,
    /// The maximum over windows of the one source.
    Maximum { source: usize, windows: Vec<Vec<u32>> },
}

pub(super) struct Node {
    pub(super) kind: Kind,
    pub(super) size: usize,
    /// Positions of its map; one if it is no map.
    pub(super) positions: usize,
    pub(super) terms: Vec<Term>,
    /// The bias of every unit, if the node is a sum.
    pub(super) bias: Vec<f32>,
    /// The ranges of units, with the activation of each.
    pub(super) activations: Vec<(Range<usize>, Activation)>,
    /// Whether a run rounds its sums to single precision.
    pub(super) rounds: bool,
    /// Whether the order in which a run adds is not known.
    pub(super) any_order: bool,
    /// Whether a run rounds its activations.
    pub(super) activation_rounds: bool,
    /// The roundings that a substitution makes on the way to one coefficient of what the node reads.
    pub(super) substitution_terms: f64,
    /// Whether it reads only the input itself.
    pub(super) first: bool,
    /// Whether a maximum reads this node.
    pub(super) before_maximum: bool,
    /// Multiply-adds per lane of a substitution from here to the input.
    pub(super) work: u64,
}

/// The nodes in an order in which each reads only earlier ones; the last one is the output.
pub(super) struct Graph {
    pub(super) nodes: Vec<Node>,
    /// The turns of a cycle; node `start − 1` is its box.
    pub(super) turns: Option<Range<usize>>,
    /// The node of every layer of the model; empty for models with cycles.
    pub(super) layers: Vec<usize>,
    pub(super) outputs: usize,
    /// Whether every activation is non-expansive.
    pub(super) non_expansive: bool,
    /// Whether a substitution multiplies its coefficients by distances of values from anchors, which are the centres of
    /// their intervals, and not by the values themselves. A rounded coefficient then costs a share of an interval's
    /// width. The states of a cycle have no anchors: their intervals change after sums have been computed.
    pub(super) anchored: bool,
    /// What the roundings of the constants of a substitution add up to at most, as a share of the magnitudes that a node
    /// sums.
    pub(super) share_of_doubles: f64,
    /// About how many products one group of a transpose sums.
    group: usize,
}

const INPUT: usize = 0;

impl Graph {
    pub(super) fn new(model: &ImplicitModel, arithmetic: Arithmetic) -> Result<Self> {
        let layers = model.layout().layers();
        for layer in layers.iter().filter(|l| l.operator.is_none()) {
            if !layer.activation.is_non_decreasing() {
                return Err(Error::unsupported(
                    format!("a certificate through layer {:?} with activation {}", layer.name, layer.activation),
                    "its bounds need activations that are non-decreasing, such as relu, clip or tanh",
                ));
            }
        }
        let anchored = model.layers_are_acyclic();
        let mut graph = Self {
            nodes: vec![Node::new(Kind::Input, model.shape().inputs)],
            turns: None,
            layers: Vec::new(),
            outputs: model.shape().outputs,
            non_expansive: layers.iter().all(|l| l.activation.is_non_expansive()),
            anchored,
            share_of_doubles: 0.0,
            group: if anchored || arithmetic != Arithmetic::Exact { COARSE } else { FINE },
        };
        if anchored {
            graph.add_layers(model)?;
        } else {
            graph.add_cycle(model)?;
        }
        graph.count_roundings();
        // Every unit adds at most six numbers to a constant, each at most a few times the magnitudes that one of the
        // nodes sums.
        let units: usize = graph.nodes.iter().map(|n| n.size).sum();
        graph.share_of_doubles = 16.0 * f64::EPSILON * (units + 64) as f64;
        match arithmetic {
            Arithmetic::Single => {}
            Arithmetic::AnyOrder => graph.nodes.iter_mut().for_each(|n| n.any_order = true),
            Arithmetic::Exact => {
                graph.nodes.iter_mut().for_each(|n| (n.rounds, n.activation_rounds) = (false, false));
            }
        }
        Ok(graph)
    }

    pub(super) fn output(&self) -> usize {
        self.nodes.len() - 1
    }

    fn push(&mut self, node: Node) -> usize {
        self.nodes.push(node);
        self.nodes.len() - 1
    }

    fn add_layers(&mut self, model: &ImplicitModel) -> Result<()> {
        let layout = model.layout();
        let mut places = Places { of_layer: vec![usize::MAX; layout.layers().len()], pooled: HashMap::new() };
        for k in model.layer_order() {
            let layer = &layout.layers()[k];
            let node = match &layer.operator {
                None => {
                    let each = layer.map.map_or(1, |m| m.positions());
                    let bias = &model.state_bias()[layout.row_range(k)];
                    let mut node = self.sum(&mut places, &model.summands(Target::Layer(k)), layer.size)?;
                    node.bias = bias.iter().flat_map(|b| std::iter::repeat_n(*b, each)).collect();
                    node.activations = vec![(0..layer.size, layer.activation)];
                    node.positions = each;
                    node
                }
                Some(operator) => self.operator(&places, operator, layer.size, &layer.name)?,
            };
            places.of_layer[k] = self.push(node);
        }
        let mut output = self.sum(&mut places, &model.summands(Target::Output), self.outputs)?;
        output.bias = model.output_bias().to_vec();
        self.push(output);
        self.layers = places.of_layer;
        Ok(())
    }

    /// A sum of blocks; the poolings in front of them become nodes of their own.
    fn sum(&mut self, places: &mut Places, blocks: &[TapBlock], size: usize) -> Result<Node> {
        let mut node = Node::new(Kind::Sum, size);
        for block in blocks {
            let mut source = places.of(block.source);
            for (k, map) in block.maps.iter().enumerate() {
                let key = (block.source, block.maps[..=k].to_vec());
                source = match places.pooled.get(&key) {
                    Some(known) => *known,
                    None => {
                        let pooled = self.push(pooling(*map, source, self.group)?);
                        places.pooled.insert(key, pooled);
                        pooled
                    }
                };
            }
            node.terms.push(Term { source, map: Arc::new(Linear::of_block(block, self.group)) });
        }
        node.any_order = false;
        Ok(node)
    }

    fn operator(&self, places: &Places, operator: &Operator, size: usize, name: &str) -> Result<Node> {
        let mut node = Node::new(Kind::Sum, size);
        let (structure, operands) = match operator {
            Operator::Constant { values, .. } => {
                node.bias = values.to_vec();
                return Ok(node);
            }
            Operator::Structure { structure, operands } => (structure, operands),
        };
        let refused = || {
            Error::unsupported(
                format!("a certificate through layer {name:?}, {}", structure.name()),
                "bounds are known for sums, convolutions, poolings, and operators that move, add or scale values",
            )
        };
        let sources: Vec<usize> = operands.iter().map(|o| places.of(o.source)).collect();
        let dims: Vec<Dims> = operands.iter().map(|o| o.dims).collect();
        // A node without terms is a constant.
        let constant = |&s: &usize| {
            let node = &self.nodes[s];
            (matches!(node.kind, Kind::Sum) && node.terms.is_empty()).then_some(&node.bias[..])
        };
        let known: Vec<Option<&[f32]>> = sources.iter().map(constant).collect();
        match structure.shape_for_bounds(&dims, &known).ok_or_else(refused)? {
            BoundShape::Affine { parts, constant } => {
                node.bias = constant;
                for (operand, from, factor) in parts {
                    let source = sources[operand];
                    let map = Linear::Select(Select::new(from, factor, self.nodes[source].size));
                    node.terms.push(Term { source, map: Arc::new(map) });
                }
            }
            BoundShape::Sum(windows) => {
                let source = *sources.first().ok_or_else(refused)?;
                let rows = windows.into_iter().map(|(window, factor)| {
                    let mut row: Vec<(usize, f32)> = window.into_iter().map(|j| (j as usize, factor as f32)).collect();
                    row.sort_unstable_by_key(|(j, _)| *j);
                    row
                });
                let entries = Csr::from_rows(self.nodes[source].size, rows);
                node.terms.push(Term { source, map: Arc::new(Linear::of_entries(&entries, self.group)) });
            }
            BoundShape::Maximum(windows) => {
                let source = *sources.first().ok_or_else(refused)?;
                node.kind = Kind::Maximum { source, windows };
            }
        }
        Ok(node)
    }

    /// Adds all states of a cycle as one node for every turn.
    fn add_cycle(&mut self, model: &ImplicitModel) -> Result<()> {
        // Models with shared weights have no cycles.
        let plain = model.without_taps().ok_or_else(|| {
            Error::unsupported(
                "a certificate of a cycle through tap blocks",
                "only models without them may have cycles",
            )
        })?;
        let n = plain.shape().states;
        let group = self.group;
        let map = |m: &Csr<f32>| Arc::new(Linear::of_entries(m, group));
        let (a, b, c, d) = (map(plain.a()), map(plain.b()), map(plain.c()), map(plain.d()));
        let layout = plain.layout();
        let mut previous = self.push(Node::new(Kind::Free, n));
        let first = previous + 1;
        for _ in 0..TURNS {
            let mut node = Node::new(Kind::Sum, n);
            node.terms.push(Term { source: previous, map: Arc::clone(&a) });
            node.terms.push(Term { source: INPUT, map: Arc::clone(&b) });
            node.bias = plain.state_bias().to_vec();
            node.activations =
                layout.layers().iter().enumerate().map(|(k, l)| (layout.range(k), l.activation)).collect();
            previous = self.push(node);
        }
        self.turns = Some(first..previous + 1);
        let mut output = Node::new(Kind::Sum, self.outputs);
        output.terms.push(Term { source: previous, map: c });
        output.terms.push(Term { source: INPUT, map: d });
        output.bias = plain.output_bias().to_vec();
        self.push(output);
        Ok(())
    }

    fn count_roundings(&mut self) {
        let mut received = vec![0usize; self.nodes.len()];
        for node in &self.nodes {
            node.terms.iter().for_each(|t| received[t.source] += t.map.column_terms());
            if let Kind::Maximum { source, windows } = &node.kind {
                let mut reads = vec![0usize; self.nodes[*source].size];
                windows.iter().flatten().for_each(|&j| reads[j as usize] += 1);
                received[*source] += reads.into_iter().max().unwrap_or(0);
            }
        }
        for k in 0..self.nodes.len() {
            let node = &self.nodes[k];
            let sources = node.terms.iter().map(|t| t.source);
            let maximum = match node.kind {
                Kind::Maximum { source, .. } => Some(source),
                _ => None,
            };
            let most = sources.chain(maximum).map(|s| received[s]).max().unwrap_or(0);
            let first = node.terms.iter().all(|t| t.source == INPUT) && maximum.is_none_or(|s| s == INPUT);
            let node = &mut self.nodes[k];
            // In addition to the sum: bias, slope, the factor of a mean, and the share of double precision.
            node.substitution_terms = (most + 6) as f64;
            node.rounds = !node.terms.is_empty();
            node.first = first;
            if let Some(source) = maximum {
                self.nodes[source].before_maximum = true;
            }
        }
        let mut work = 0;
        for node in &mut self.nodes {
            work += node.terms.iter().map(|t| t.map.multiply_adds(node.size)).sum::<u64>() + node.size as u64;
            node.work = work;
        }
        // A cycle is iterated in double precision; the rounding of the states that it returns is counted separately.
        for k in self.turns.clone().into_iter().flatten() {
            self.nodes[k].rounds = false;
        }
    }
}

/// The node and the place in it of every value of the model.
struct Places {
    of_layer: Vec<usize>,
    pooled: HashMap<(Source, Vec<FixedMap>), usize>,
}

impl Places {
    fn of(&self, source: Source) -> usize {
        match source {
            Source::Input => INPUT,
            Source::Layer(k) => self.of_layer[k],
        }
    }
}

fn pooling(map: FixedMap, source: usize, group: usize) -> Result<Node> {
    let (input, output) = (map.input(), map.output()?);
    if !map.is_linear() {
        let windows = map.windows();
        let windows = (0..input.channels)
            .flat_map(|c| windows.iter().map(move |w| w.iter().map(|k| (c * input.positions() + k) as u32).collect()))
            .collect();
        return Ok(Node::new(Kind::Maximum { source, windows }, output.size()));
    }
    let means = map.means();
    let rows = (0..input.channels).flat_map(|c| {
        let first = c * input.positions();
        means.iter().map(move |mean| {
            let mut row: Vec<(usize, f32)> = mean.iter().map(|(k, w)| (first + k, *w as f32)).collect();
            row.sort_unstable_by_key(|(j, _)| *j);
            row
        })
    });
    let entries = Csr::from_rows(input.size(), rows);
    let mut node = Node::new(Kind::Sum, output.size());
    node.terms.push(Term { source, map: Arc::new(Linear::of_entries(&entries, group)) });
    Ok(node)
}

impl Node {
    fn new(kind: Kind, size: usize) -> Self {
        Self {
            kind,
            size,
            positions: 1,
            terms: Vec::new(),
            bias: Vec::new(),
            activations: Vec::new(),
            rounds: false,
            any_order: true,
            activation_rounds: true,
            substitution_terms: 0.0,
            first: false,
            before_maximum: false,
            work: 0,
        }
    }

    /// The bias of a unit.
    pub(super) fn bias_of(&self, i: usize) -> f64 {
        self.bias.get(i).map_or(0.0, |b| f64::from(*b))
    }
}
