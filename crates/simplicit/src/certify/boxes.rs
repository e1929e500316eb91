//! Intervals of every value of one sample, forwards, with the slacks for rounding.

use super::graph::{Graph, Kind, Node};
use super::relaxation::{Largest, Lines, image};
use super::sums::{Partial, Sums};
use crate::layout::Activation;

/// γ_n = n·u/(1 − n·u) of single precision: no sum of n rounded terms, in any order, has a larger error relative to
/// the sum of magnitudes.
pub(super) fn gamma(n: f64) -> f64 {
    let share = n / (1u64 << 24) as f64;
    if share < 0.5 { share / (1.0 - share) } else { f64::INFINITY }
}

/// The bounds of the values of one node.
#[derive(Default, Clone)]
pub(super) struct Bounds {
    /// Bounds of the pre-activations; of the values themselves where there is no activation.
    pub(super) low: Vec<f64>,
    pub(super) high: Vec<f64>,
    /// Bounds of the values.
    pub(super) x_low: Vec<f64>,
    pub(super) x_high: Vec<f64>,
    /// The lines around the activation, if the node is a sum.
    pub(super) lines: Vec<Lines>,
    /// The bounds of a maximum, if the node is one.
    pub(super) largest: Vec<Largest>,
    /// How far rounding may move a pre-activation, and a coefficient times what it reads, per unit of coefficient.
    pub(super) slack: Vec<f64>,
    /// Every pre-activation where all values that it reads are at their anchors ([`Graph::anchored`]), without rounding.
    pub(super) at_anchors: Vec<f64>,
    /// How far rounding may move a value after its activation; empty if not at all.
    pub(super) moved: Vec<f64>,
    /// Units whose value is always zero, so that their coefficients are not needed; empty if there are none.
    pub(super) dead: Vec<bool>,
    /// The centre of every value's interval, half of its width, and one where the value may differ from zero, zero
    /// elsewhere.
    pub(super) middle: Vec<f64>,
    pub(super) reach: Vec<f64>,
    pub(super) live: Vec<f64>,
}

/// How the interval of a value follows from that of its pre-activation.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Rule {
    /// The image of the interval under φ.
    Interval,
    /// φ of the centre with the same radius, because no activation expands it.
    Lipschitz,
}

impl Bounds {
    /// The bounds of values that lie in these intervals.
    pub(super) fn of_values(low: Vec<f64>, high: Vec<f64>) -> Self {
        let mut bounds = Self { x_low: low.clone(), x_high: high.clone(), low, high, ..Self::default() };
        bounds.measure();
        bounds
    }

    /// Computes centres and half widths from the intervals of the values.
    fn measure(&mut self) {
        self.middle.clear();
        self.reach.clear();
        self.live.clear();
        for (&low, &high) in self.x_low.iter().zip(&self.x_high) {
            let middle = f64::midpoint(low, high);
            self.middle.push(middle);
            self.reach.push((high - middle).max(middle - low).max(0.0));
            self.live.push(if low != 0.0 || high != 0.0 { 1.0 } else { 0.0 });
        }
    }

    /// Intervals of the pre-activations of node k from those of what it reads, and its slacks.
    pub(super) fn sum(graph: &Graph, k: usize, all: &[Bounds]) -> Self {
        let node = &graph.nodes[k];
        let mut sums = Sums::new(node.size, |i| node.bias_of(i), node.any_order);
        node.terms.iter().for_each(|term| term.map.add_to(&all[term.source], &mut sums));
        let (one, substitution) = (gamma(1.0), gamma(node.substitution_terms));
        let mut bounds = Self::default();
        if !graph.anchored {
            bounds.at_anchors = (0..node.size).map(|i| node.bias_of(i)).collect();
        }
        for i in 0..node.size {
            // Terms of the sum: the products that are not zero, the bias, the factor of a mean, and one for every
            // block.
            let terms = sums.terms[i] + (node.terms.len() + 3) as f64;
            let own = gamma(terms);
            let magnitude = sums.magnitude[i];
            // The error of every addition is at most one unit of a partial sum, up to the errors of earlier additions;
            // each product rounds once. In any order, a partial sum lies between the sums of the positive and of the
            // negative products.
            let partial = match &sums.partial {
                Partial::Chain(path) => path[i],
                Partial::AnyOrder(positive, negative) => terms * (positive[i].max(negative[i]) + node.bias_of(i).abs()),
            };
            let run = if node.rounds { one * (partial + terms * own * magnitude + magnitude) } else { 0.0 };
            // Underflow of products, and the roundings of these sums of doubles.
            let tiny = terms * (f64::from(f32::MIN_POSITIVE) + 4.0 * f64::EPSILON * magnitude);
            let far = sums.radius[i] + run + tiny;
            bounds.low.push(sums.centre[i] - far);
            bounds.high.push(sums.centre[i] + far);
            // The coefficients of a substitution are rounded, and they multiply distances from the anchors.
            let distance = if graph.anchored { sums.radius[i] } else { magnitude };
            bounds.slack.push(run + substitution * distance + graph.share_of_doubles * magnitude + tiny);
        }
        if graph.anchored {
            bounds.at_anchors = sums.centre;
        }
        bounds
    }

    /// Computes the lines and the values from the pre-activations.
    pub(super) fn activate(&mut self, node: &Node, rule: Rule) {
        let size = node.size;
        self.lines.clear();
        self.lines.resize(size, Lines::over(Activation::Identity, 0.0, 0.0));
        (self.x_low, self.x_high) = (self.low.clone(), self.high.clone());
        self.moved.clear();
        self.dead.clear();
        self.dead.resize(size, false);
        for (range, activation) in &node.activations {
            if *activation == Activation::Identity {
                continue;
            }
            let rounds = node.activation_rounds && !matches!(activation, Activation::Relu | Activation::Clip { .. });
            if rounds {
                self.moved.resize(size, 0.0);
            }
            for i in range.clone() {
                let (low, high) = (self.low[i], self.high[i]);
                self.lines[i] = Lines::over(*activation, low, high);
                let (mut x_low, mut x_high) = match rule {
                    Rule::Interval => image(*activation, low, high),
                    Rule::Lipschitz => {
                        let (at, radius) = (activation.apply_f64(f64::midpoint(low, high)), 0.5 * (high - low));
                        let allowance = 8.0 * f64::EPSILON * (1.0 + at.abs() + radius);
                        (at - radius - allowance, at + radius + allowance)
                    }
                };
                if rounds {
                    // The φ of a run has an error of a few units in the last place.
                    self.moved[i] = gamma(8.0) * (1.0 + x_low.abs().max(x_high.abs()));
                    x_low -= self.moved[i];
                    x_high += self.moved[i];
                }
                self.dead[i] = (x_low, x_high) == (0.0, 0.0);
                (self.x_low[i], self.x_high[i]) = (x_low, x_high);
            }
        }
        self.measure();
    }

    /// A maximum over windows.
    fn maximum(graph: &Graph, node: &Node, windows: &[Vec<u32>], source: &Bounds) -> Self {
        let (low, high) = (&source.x_low, &source.x_high);
        let mut bounds = Self::default();
        for window in windows {
            let largest = Largest::of(window, low, high);
            let at = |k: u32, ends: &[f64]| ends.get(k as usize).copied().unwrap_or(0.0);
            let (least, low, high) = (at(largest.above, low), at(largest.below, low), at(largest.above, high));
            let most = least.abs().max(low.abs()).max(high.abs());
            let reach = |k: u32| source.reach.get(k as usize).copied().unwrap_or(0.0);
            let distance = if graph.anchored { reach(largest.below).max(reach(largest.above)) } else { most };
            bounds.slack.push(gamma(node.substitution_terms) * distance + graph.share_of_doubles * most);
            bounds.x_low.push(low);
            bounds.x_high.push(high);
            bounds.largest.push(largest);
        }
        bounds.measure();
        bounds
    }

    /// Widens the values by errors that they have in addition.
    pub(super) fn move_by(&mut self, errors: &[f64]) {
        self.moved.resize(self.x_low.len(), 0.0);
        self.dead.clear();
        for (i, e) in errors.iter().enumerate() {
            self.moved[i] += e;
            self.x_low[i] -= e;
            self.x_high[i] += e;
        }
        self.measure();
    }

    /// Intersects the values with other intervals that are known to contain them.
    pub(super) fn cut(&mut self, low: &[f64], high: &[f64]) {
        self.x_low.iter_mut().zip(low).for_each(|(a, b)| *a = a.max(*b));
        self.x_high.iter_mut().zip(high).for_each(|(a, b)| *a = a.min(*b));
        self.measure();
    }
}

/// Bounds of node k without substitution, from those of the nodes before it.
pub(super) fn of_node(graph: &Graph, k: usize, all: &[Bounds], rule: Rule) -> Bounds {
    let node = &graph.nodes[k];
    match &node.kind {
        Kind::Maximum { source, windows } => Bounds::maximum(graph, node, windows, &all[*source]),
        Kind::Input | Kind::Free | Kind::Sum => {
            let mut bounds = Bounds::sum(graph, k, all);
            bounds.activate(node, rule);
            bounds
        }
    }
}
