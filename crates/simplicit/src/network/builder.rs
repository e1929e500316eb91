//! Builds a network in Rust, node by node.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use super::fixed::FixedMap;
use super::fold::{self, BatchNorm};
use super::graph::{Node, Op};
use super::shape::{Shape, Window};
use super::{Network, normalise};
use crate::graph::{Binary, Dims, Structure};
use crate::layout::{Activation, MapShape};
use crate::linalg::Matrix;
use crate::{Error, Result};

/// The most parameters that a batch norm may have when they are repeated for every position.
const MAX_NORMS: usize = 1 << 22;

/// A value of a network under construction, to which one can return: see [`NetworkBuilder::here`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NodeId(pub(crate) usize);

/// Builds a [`Network`]: every method appends a node after the current one and makes it the current one.
///
/// A residual block keeps the place it comes back to:
/// ```
/// use simplicit::layout::Activation::Relu;
/// use simplicit::linalg::Matrix;
/// use simplicit::network::{Network, Shape, Window};
///
/// # fn main() -> simplicit::Result<()> {
/// let taps = Matrix::from_fn(2, 2 * 9, |i, j| ((i + j) % 3) as f32 - 1.0);
/// let start = Network::builder(Shape::map(2, 5, 5))?.activation(Relu)?;
/// let skip = start.here();
/// let network =
///     start.convolution(taps, Window::square(3, 1, 1), None)?.plus(skip)?.activation(Relu)?.global_average()?.build()?;
/// assert_eq!(network.output_shape(), Shape::Vector(2));
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct NetworkBuilder {
    nodes: Vec<Node>,
    here: usize,
    layers: usize,
    parameters: usize,
    /// Batch norms that could not be folded, each with the node that computes it.
    settled: Vec<(usize, usize)>,
    /// Linear maps and convolutions into which a scale and shift were folded.
    scaled: HashMap<usize, Scaled>,
}

/// What a linear map or convolution with a scale and shift was before.
#[derive(Debug, Clone)]
struct Scaled {
    /// The node without this scale and shift.
    of: usize,
    /// The first node of the row, without any.
    root: usize,
    scale: Vec<f64>,
    shift: Vec<f64>,
}

impl NetworkBuilder {
    pub(crate) fn new(input: Shape) -> Result<Self> {
        let shape = input.require_sane("input")?;
        Ok(Self {
            nodes: vec![Node { name: "input".into(), op: Op::Input, inputs: vec![], shape }],
            here: 0,
            layers: 0,
            parameters: 0,
            settled: Vec::new(),
            scaled: HashMap::new(),
        })
    }

    /// The current value.
    pub fn here(&self) -> NodeId {
        NodeId(self.here)
    }

    /// Makes an earlier value the current one.
    pub fn at(mut self, node: NodeId) -> Result<Self> {
        self.here = self.known(node)?;
        Ok(self)
    }

    /// The shape of the current value.
    pub fn shape(&self) -> Shape {
        self.nodes[self.here].shape
    }

    /// Names the current node; activations pass their name on to their layer.
    pub fn named(mut self, name: impl Into<String>) -> Self {
        self.nodes[self.here].name = name.into();
        self
    }

    /// W x + bias, W being out × in.
    pub fn linear(mut self, weights: Matrix<f32>, bias: Option<Vec<f32>>) -> Result<Self> {
        self.here = self.push_linear(self.here, weights, bias)?;
        Ok(self)
    }

    /// A convolution: weights are out × (in·kh·kw), column (c·kh + dy)·kw + dx, one bias per output channel.
    pub fn convolution(mut self, weights: Matrix<f32>, window: Window, bias: Option<Vec<f32>>) -> Result<Self> {
        self.here = self.push_convolution(self.here, weights, window, 1, bias)?;
        Ok(self)
    }

    /// A convolution in groups: the output channels fall into `groups` equal parts, each of which reads its own part of
    /// the input channels; weights are out × (in/groups·kh·kw).
    pub fn grouped_convolution(
        mut self,
        weights: Matrix<f32>,
        window: Window,
        groups: usize,
        bias: Option<Vec<f32>>,
    ) -> Result<Self> {
        self.here = self.push_convolution(self.here, weights, window, groups, bias)?;
        Ok(self)
    }

    /// Applies an operator without weights to the current value and, after it, to the others.
    pub fn structure(mut self, structure: Structure, others: &[NodeId]) -> Result<Self> {
        let mut inputs = vec![self.here];
        for &other in others {
            inputs.push(self.known(other)?);
        }
        self.here = self.push_structure(structure, inputs)?;
        Ok(self)
    }

    /// Numbers that do not depend on the sample, as the current value.
    pub fn constant(mut self, dims: Dims, values: Vec<f32>, parameter: bool) -> Result<Self> {
        self.here = self.push_constant(dims, values, parameter)?;
        Ok(self)
    }

    /// An inference batch norm, folded into the linear map or convolution before it, otherwise into the one after it.
    /// A batch norm that cannot be folded (because another node reads the map without it, for example) becomes a
    /// product and a sum with constants.
    pub fn batch_norm(mut self, norm: &BatchNorm) -> Result<Self> {
        let (scale, shift) = norm.scale_shift(self.shape().channels())?;
        self.here = self.push_scale_shift(self.here, scale, shift)?;
        Ok(self)
    }

    /// φ of every unit: a layer of states.
    pub fn activation(mut self, activation: Activation) -> Result<Self> {
        self.here = self.push_activation(self.here, activation)?;
        Ok(self)
    }

    /// The current value plus another of the same shape.
    pub fn plus(mut self, other: NodeId) -> Result<Self> {
        let other = self.known(other)?;
        self.here = self.push_add(self.here, other)?;
        Ok(self)
    }

    /// The mean over a sliding window; `count_padding` says whether zeros of the padding count as values.
    pub fn average_pool(mut self, window: Window, count_padding: bool) -> Result<Self> {
        let input = self.require_map(self.here, "average pooling")?;
        self.here = self.push_fixed(self.here, FixedMap::AveragePool { input, window, count_padding })?;
        Ok(self)
    }

    /// The maximum over a sliding window.
    pub fn max_pool(mut self, window: Window) -> Result<Self> {
        let input = self.require_map(self.here, "max pooling")?;
        self.here = self.push_fixed(self.here, FixedMap::MaxPool { input, window })?;
        Ok(self)
    }

    /// The mean over all positions, a vector with one number per channel.
    pub fn global_average(mut self) -> Result<Self> {
        let input = self.require_map(self.here, "a global average")?;
        self.here = self.push_fixed(self.here, FixedMap::GlobalAverage { input })?;
        Ok(self)
    }

    /// The map as a vector.
    pub fn flatten(self) -> Result<Self> {
        let size = self.shape().size();
        self.reshape(Shape::Vector(size))
    }

    /// The same numbers under another shape.
    pub fn reshape(mut self, shape: Shape) -> Result<Self> {
        self.here = self.push_reshape(self.here, shape)?;
        Ok(self)
    }

    /// The network whose output is the current value.
    pub fn build(mut self) -> Result<Network> {
        let output = self.settled(self.here)?;
        let output = self.share(&[output])?[output];
        Network::new(normalise::normalise(self.nodes, output))
    }

    fn known(&self, node: NodeId) -> Result<usize> {
        if node.0 < self.nodes.len() {
            Ok(node.0)
        } else {
            Err(Error::shape("node", format!("one of the {} of this network", self.nodes.len()), node.0))
        }
    }

    /// Number of weights added so far, dropped copies included; an importer limits it.
    pub(crate) fn parameters(&self) -> usize {
        self.parameters
    }

    /// The linear maps and convolutions that a network with this output keeps, in order.
    pub(crate) fn weighted(&self, output: usize) -> Vec<usize> {
        let used = self.reachable(&[output]);
        let is_weighted = |id: &usize| matches!(self.nodes[*id].op, Op::Linear { .. } | Op::Convolution { .. });
        (0..self.nodes.len()).filter(|&id| used[id]).filter(is_weighted).collect()
    }

    /// For every node, whether it is one of these values or one of them is computed from it.
    fn reachable(&self, values: &[usize]) -> Vec<bool> {
        let mut used = vec![false; self.nodes.len()];
        values.iter().for_each(|&value| used[value] = true);
        for id in (0..self.nodes.len()).rev() {
            if used[id] {
                self.nodes[id].inputs.iter().for_each(|&input| used[input] = true);
            }
        }
        used
    }

    /// If these values need a linear map both with and without a scale and shift, or with several of them, the map keeps
    /// its weights once, and every scaled copy becomes a product and a sum behind the map, so that no weight is counted
    /// twice. Returns the new place of every node.
    pub(crate) fn share(&mut self, values: &[usize]) -> Result<Vec<usize>> {
        let mut used = self.reachable(values);
        let mut copies: Vec<(usize, &Scaled)> = self.scaled.iter().map(|(id, copy)| (*id, copy)).collect();
        copies.sort_unstable_by_key(|(id, _)| *id);
        // How many of a map and its copies are needed.
        let mut needed: HashMap<usize, usize> = HashMap::new();
        for (_, copy) in copies.iter().filter(|(id, _)| used[*id]) {
            *needed.entry(copy.root).or_insert(usize::from(used[copy.root])) += 1;
        }
        // The last copy comes first, so that a scale that all of them share stays folded.
        let mut apart = HashSet::new();
        for &(id, copy) in copies.iter().rev() {
            let Some(count) = needed.get_mut(&copy.root).filter(|count| used[id] && **count > 1) else { continue };
            apart.insert(id);
            if std::mem::replace(&mut used[copy.of], true) {
                *count -= 1;
            }
        }
        if apart.is_empty() {
            return Ok((0..self.nodes.len()).collect());
        }
        let mut place = Vec::with_capacity(self.nodes.len());
        for (id, mut node) in std::mem::take(&mut self.nodes).into_iter().enumerate() {
            let copy = if apart.contains(&id) { self.scaled.remove(&id) } else { None };
            place.push(match copy {
                Some(copy) => self.product_and_sum(place[copy.of], &node.name, &copy.scale, &copy.shift)?,
                None => {
                    node.inputs.iter_mut().for_each(|input| *input = place[*input]);
                    self.nodes.push(node);
                    self.nodes.len() - 1
                }
            });
        }
        self.here = place[self.here];
        self.settled.iter_mut().for_each(|pair| *pair = (place[pair.0], place[pair.1]));
        let moved =
            |(id, copy): (usize, Scaled)| (place[id], Scaled { of: place[copy.of], root: place[copy.root], ..copy });
        self.scaled = std::mem::take(&mut self.scaled).into_iter().map(moved).collect();
        Ok(place)
    }

    /// Number of nodes so far.
    pub(crate) fn count(&self) -> usize {
        self.nodes.len()
    }

    pub(crate) fn op(&self, node: usize) -> &Op {
        &self.nodes[node].op
    }

    pub(crate) fn inputs(&self, node: usize) -> &[usize] {
        &self.nodes[node].inputs
    }

    pub(crate) fn shape_of(&self, node: usize) -> Shape {
        self.nodes[node].shape
    }

    pub(crate) fn name(&self, node: usize) -> &str {
        &self.nodes[node].name
    }

    pub(crate) fn rename(&mut self, node: usize, name: &str) {
        self.nodes[node].name = name.to_string();
    }

    pub(crate) fn require_map(&self, node: usize, what: &str) -> Result<MapShape> {
        match self.nodes[node].shape {
            Shape::Map(map) => Ok(map),
            other => Err(Error::shape(what, "a map (channels × height × width)", other)),
        }
    }

    /// The batch norm that waits at a node to be folded, and the node that it reads.
    fn waiting(&self, node: usize) -> Option<(usize, Vec<f64>, Vec<f64>)> {
        match &self.nodes[node].op {
            Op::ScaleShift { scale, shift } => Some((self.nodes[node].inputs[0], scale.clone(), shift.clone())),
            _ => None,
        }
    }

    fn push(&mut self, op: Op, inputs: Vec<usize>, shape: Shape) -> Result<usize> {
        let shape = shape.require_sane(op.name())?;
        let mut inputs = inputs;
        for input in &mut inputs {
            *input = self.settled(*input)?;
        }
        let id = self.nodes.len();
        let name = match &op {
            Op::Activation(_) => {
                self.layers += 1;
                format!("layer_{}", self.layers)
            }
            other => format!("{} ({id})", other.name()),
        };
        if let Op::Linear { weights, .. } | Op::Convolution { weights, .. } = &op {
            self.parameters = self.parameters.saturating_add(weights.as_slice().len());
        }
        self.nodes.push(Node { name, op, inputs, shape });
        Ok(id)
    }

    /// The value of a node; if a batch norm waits there and no linear map follows, it becomes a product and a sum
    /// with constants.
    fn settled(&mut self, node: usize) -> Result<usize> {
        let Some((of, scale, shift)) = self.waiting(node) else { return Ok(node) };
        if let Some((_, settled)) = self.settled.iter().find(|(waiting, _)| *waiting == node) {
            return Ok(*settled);
        }
        let name = self.nodes[node].name.clone();
        let out = self.product_and_sum(of, &name, &scale, &shift)?;
        self.settled.push((node, out));
        Ok(out)
    }

    /// scale·x + shift with constants. Numbers that are the same for all channels are one, which is no parameter.
    fn product_and_sum(&mut self, of: usize, name: &str, scale: &[f64], shift: &[f64]) -> Result<usize> {
        let mut out = of;
        for (binary, values, neutral) in [(Binary::Multiply, scale, 1.0), (Binary::Add, shift, 0.0)] {
            if values.iter().all(|&v| v == neutral) {
                continue;
            }
            let is_single = values.iter().all(|v| *v == values[0]);
            let values: Vec<f32> =
                values.iter().map(|&v| v as f32).take(if is_single { 1 } else { usize::MAX }).collect();
            let dims = match self.nodes[of].shape {
                Shape::Map(_) => Dims::map(values.len(), 1, 1),
                _ => Dims::vector(values.len()),
            };
            let constant = self.push_constant(dims, values, !is_single)?;
            out = self.push_structure(Structure::Binary(binary), vec![out, constant])?;
            self.rename(constant, &format!("{name}:{}", if binary == Binary::Add { "shift" } else { "scale" }));
            self.rename(out, name);
        }
        Ok(out)
    }

    pub(crate) fn push_linear(&mut self, input: usize, weights: Matrix<f32>, bias: Option<Vec<f32>>) -> Result<usize> {
        let Shape::Vector(size) = self.nodes[input].shape else {
            return Err(Error::shape("linear map", "a vector (flatten the map first)", self.nodes[input].shape));
        };
        if weights.cols() != size {
            return Err(Error::shape("weights of a linear map", format!("out × {size}"), dims(&weights)));
        }
        require_parameters("linear map", &weights, bias.as_deref())?;
        let (input, weights, bias) = match self.waiting(input) {
            Some((source, scale, shift)) => {
                let (weights, bias) = fold::before(&weights, bias.as_deref(), 1, &scale, &shift);
                (source, weights, Some(bias))
            }
            None => (input, weights, bias),
        };
        let shape = Shape::Vector(weights.rows());
        self.push(Op::Linear { weights: Arc::new(weights), bias }, vec![input], shape)
    }

    pub(crate) fn push_convolution(
        &mut self,
        input: usize,
        weights: Matrix<f32>,
        window: Window,
        groups: usize,
        bias: Option<Vec<f32>>,
    ) -> Result<usize> {
        let map = self.require_map(input, "convolution")?;
        let [height, width] = window.output(map)?;
        if groups == 0 || !map.channels.is_multiple_of(groups) || !weights.rows().is_multiple_of(groups) {
            let expected = format!("a divisor of {} and {} channels", map.channels, weights.rows());
            return Err(Error::shape("groups of a convolution", expected, groups));
        }
        let channels = map.channels / groups;
        if window.area().checked_mul(channels) != Some(weights.cols()) {
            let expected = format!("out × ({channels} · {} · {})", window.kernel[0], window.kernel[1]);
            return Err(Error::shape("weights of a convolution", expected, dims(&weights)));
        }
        require_parameters("convolution", &weights, bias.as_deref())?;
        let (input, weights, bias) = match self.waiting(input) {
            Some((source, scale, shift)) if groups == 1 && fold::survives_padding(window, &shift) => {
                let (weights, bias) = fold::before(&weights, bias.as_deref(), window.area(), &scale, &shift);
                (source, weights, Some(bias))
            }
            _ => (input, weights, bias),
        };
        let shape = Shape::map(weights.rows(), height, width);
        self.push(Op::Convolution { weights: Arc::new(weights), window, groups, bias }, vec![input], shape)
    }

    /// An operator without weights; its shape rule is checked here.
    pub(crate) fn push_structure(&mut self, structure: Structure, inputs: Vec<usize>) -> Result<usize> {
        let dims: Vec<Dims> = inputs.iter().map(|&input| self.nodes[input].shape.dims()).collect();
        let shape = Shape::from_dims(structure.dims(&dims)?);
        self.push(Op::Structure(structure), inputs, shape)
    }

    /// Numbers that do not depend on the sample.
    pub(crate) fn push_constant(&mut self, dims: Dims, values: Vec<f32>, parameter: bool) -> Result<usize> {
        if values.len() != dims.size() {
            return Err(Error::shape("constant", format!("{} values", dims.size()), values.len()));
        }
        if let Some(k) = values.iter().position(|v| !v.is_finite()) {
            return Err(Error::shape("constant", "finite numbers", format!("{} at {k}", values[k])));
        }
        self.parameters = self.parameters.saturating_add(values.len());
        self.push(Op::Constant { values: Arc::new(values), parameter }, vec![], Shape::from_dims(dims))
    }

    /// Adds scale·x + shift per channel: folded into a copy of the node before, or left waiting for the node after.
    pub(crate) fn push_scale_shift(&mut self, input: usize, scale: Vec<f64>, shift: Vec<f64>) -> Result<usize> {
        let shape = self.nodes[input].shape;
        for values in [&scale, &shift] {
            if values.len() != shape.channels() {
                return Err(Error::shape("scale or shift", shape.channels(), values.len()));
            }
        }
        let inputs = self.nodes[input].inputs.clone();
        // A copy, because others may use the unscaled value; what is not needed is dropped when the network is built.
        let op = match &self.nodes[input].op {
            Op::Linear { weights, bias } => {
                let (weights, bias) = fold::after(weights, bias.as_deref(), &scale, &shift);
                Some(Op::Linear { weights, bias })
            }
            Op::Convolution { weights, window, groups, bias } => {
                let (weights, bias) = fold::after(weights, bias.as_deref(), &scale, &shift);
                let (window, groups) = (*window, *groups);
                Some(Op::Convolution { weights, window, groups, bias })
            }
            Op::ScaleShift { scale: first, shift: moved } => {
                let shift = shift.iter().zip(&scale).zip(moved).map(|((t, s), m)| s * m + t).collect();
                Some(Op::ScaleShift { scale: scale.iter().zip(first).map(|(s, f)| s * f).collect(), shift })
            }
            _ => None,
        };
        match op {
            Some(op) => {
                let is_copy = match &op {
                    Op::Linear { weights, bias } | Op::Convolution { weights, bias, .. } => {
                        require_parameters("batch norm folded into its neighbour", weights, bias.as_deref())?;
                        true
                    }
                    _ => false,
                };
                let id = self.push(op, inputs, shape)?;
                if is_copy {
                    let root = self.scaled.get(&input).map_or(input, |copy| copy.root);
                    self.scaled.insert(id, Scaled { of: input, root, scale, shift });
                }
                Ok(id)
            }
            None => self.push(Op::ScaleShift { scale, shift }, vec![input], shape),
        }
    }

    pub(crate) fn push_activation(&mut self, input: usize, activation: Activation) -> Result<usize> {
        let activation = activation.checked()?;
        self.push(Op::Activation(activation), vec![input], self.nodes[input].shape)
    }

    pub(crate) fn push_add(&mut self, a: usize, b: usize) -> Result<usize> {
        let (left, right) = (self.nodes[a].shape, self.nodes[b].shape);
        if left != right {
            return Err(Error::shape("addition", left, right));
        }
        self.push(Op::Add, vec![a, b], left)
    }

    pub(crate) fn push_fixed(&mut self, input: usize, map: FixedMap) -> Result<usize> {
        let out = map.output()?;
        if let FixedMap::GlobalAverage { .. } = map {
            let shape = Shape::Vector(out.channels);
            // The mean of scaled values is the scaled mean, so the norm can wait after the average.
            return match self.waiting(input) {
                Some((source, scale, shift)) => {
                    let mean = self.push(Op::Fixed(map), vec![source], shape)?;
                    self.push(Op::ScaleShift { scale, shift }, vec![mean], shape)
                }
                None => self.push(Op::Fixed(map), vec![input], shape),
            };
        }
        self.push(Op::Fixed(map), vec![input], Shape::Map(out))
    }

    pub(crate) fn push_reshape(&mut self, input: usize, shape: Shape) -> Result<usize> {
        let mut input = input;
        while let Op::Reshape = self.nodes[input].op {
            input = self.nodes[input].inputs[0];
        }
        let old = self.nodes[input].shape;
        if old == shape {
            return Ok(input);
        }
        shape.require_sane("reshape")?;
        if old.size() != shape.size() {
            return Err(Error::shape("reshape", format!("{} units", old.size()), shape));
        }
        match (self.waiting(input), shape) {
            (Some((source, scale, shift)), Shape::Vector(size)) if size <= MAX_NORMS => {
                let (scale, shift) = (fold::per_unit(&scale, old), fold::per_unit(&shift, old));
                let flat = self.push(Op::Reshape, vec![source], shape)?;
                self.push(Op::ScaleShift { scale, shift }, vec![flat], shape)
            }
            _ => self.push(Op::Reshape, vec![input], shape),
        }
    }
}

fn dims(weights: &Matrix<f32>) -> String {
    format!("{} × {}", weights.rows(), weights.cols())
}

fn require_parameters(what: &str, weights: &Matrix<f32>, bias: Option<&[f32]>) -> Result<()> {
    weights.require_finite(&format!("weights of a {what}"), 0)?;
    if let Some(bias) = bias {
        if bias.len() != weights.rows() {
            return Err(Error::shape(format!("bias of a {what}"), weights.rows(), bias.len()));
        }
        Matrix::from_vec(1, bias.len(), bias.to_vec())?.require_finite(&format!("bias of a {what}"), 0)?;
    }
    Ok(())
}
