//! Intervals of every value of one sample, forwards, with the slacks for rounding.

use super::block::Packed;
use super::graph::{Graph, Kind, Node};
use super::relaxation::{Largest, Lines, image};
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
    /// How far rounding may move a value after its activation; empty if not at all.
    pub(super) moved: Vec<f64>,
    /// Units whose value is always zero, so that their coefficients are not needed; empty if there are none.
    pub(super) dead: Vec<bool>,
    /// Two numbers per unit side by side: the centre of its interval; how far the interval reaches above zero minus
    /// how far below.
    centres: Vec<f32>,
    /// Three numbers per unit side by side, rounded outwards: radius; largest magnitude; how far the interval reaches
    /// above zero plus how far below.
    spans: Vec<f32>,
    /// One where a value may differ from zero, and zero elsewhere.
    live: Vec<f32>,
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
        bounds.round_outwards();
        bounds
    }

    fn round_outwards(&mut self) {
        self.centres.clear();
        self.spans.clear();
        self.live.clear();
        for (&low, &high) in self.x_low.iter().zip(&self.x_high) {
            let centre = f64::midpoint(low, high) as f32;
            let radius = (high - f64::from(centre)).max(f64::from(centre) - low).max(0.0);
            let (above, below) = (high.max(0.0), (-low).max(0.0));
            self.centres.extend([centre, (above - below) as f32]);
            self.live.push(f32::from(u8::from(low != 0.0 || high != 0.0)));
            self.spans.extend([upwards(radius), upwards(low.abs().max(high.abs())), upwards(above + below)]);
        }
    }

    /// Intervals of the pre-activations of node k from those of what it reads, and its slacks.
    pub(super) fn sum(graph: &Graph, k: usize, all: &[Bounds], room: &mut Packed) -> Self {
        let node = &graph.nodes[k];
        let size = node.size;
        let (mut centres, mut spans, mut counts) = (vec![0.0f32; 2 * size], vec![0.0f32; 3 * size], vec![0.0f32; size]);
        for term in &node.terms {
            let source = &all[term.source];
            term.map.forward(&source.centres, &mut centres, 2, room);
            term.map.magnitudes(&source.spans, &mut spans, 3, room);
            term.map.count(&source.live, &mut counts, room);
        }
        let (one, substitution) = (gamma(1.0), gamma(node.substitution_terms));
        let mut bounds = Self::default();
        for i in 0..size {
            // Terms of the sum: the products that are not zero, the bias, the factor of a mean, and one for every
            // block.
            let terms = f64::from(counts[i]) + (node.terms.len() + 3) as f64;
            let own = gamma(terms);
            let bias = node.bias_of(i);
            let wide = |value: f32| f64::from(value) * (1.0 + own);
            let (radius, magnitude) = (wide(spans[3 * i]), wide(spans[3 * i + 1]) + bias.abs());
            // Positive products add up to at most ½(Σ|w|(above + below) + Σw(above − below)), negative ones to the difference.
            let together = wide(spans[3 * i + 2]);
            let partial = 0.5 * (together + f64::from(centres[2 * i + 1]).abs()) + (own + one) * together + bias.abs();
            let together = together + bias.abs();
            // In whatever order, the error of every addition is at most one unit of a partial sum, and a partial sum
            // lies between those two sums, up to the errors of earlier additions; each product rounds once.
            let rounding = one * (terms * (partial + own * together) + together);
            let run = if node.rounds { rounding } else { 0.0 };
            // Underflow of products.
            let tiny = terms * f64::from(f32::MIN_POSITIVE);
            let far = radius + rounding + run + tiny;
            let centre = f64::from(centres[2 * i]) + bias;
            bounds.low.push(centre - far);
            bounds.high.push(centre + far);
            bounds.slack.push(run + substitution * magnitude + tiny);
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
                        let room = 8.0 * f64::EPSILON * (1.0 + at.abs() + radius);
                        (at - radius - room, at + radius + room)
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
        self.round_outwards();
    }

    /// A maximum over windows.
    pub(super) fn maximum(node: &Node, windows: &[Vec<u32>], source: &Bounds) -> Self {
        let (low, high) = (&source.x_low, &source.x_high);
        let mut bounds = Self::default();
        for window in windows {
            let largest = Largest::of(window, low, high);
            let at = |k: u32, ends: &[f64]| ends.get(k as usize).copied().unwrap_or(0.0);
            let (least, low, high) = (at(largest.above, low), at(largest.below, low), at(largest.above, high));
            let most = least.abs().max(low.abs()).max(high.abs());
            bounds.slack.push(gamma(node.substitution_terms) * most);
            bounds.x_low.push(low);
            bounds.x_high.push(high);
            bounds.largest.push(largest);
        }
        bounds.round_outwards();
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
        self.round_outwards();
    }

    /// Intersects the values with other intervals that are known to contain them.
    pub(super) fn cut(&mut self, low: &[f64], high: &[f64]) {
        self.x_low.iter_mut().zip(low).for_each(|(a, b)| *a = a.max(*b));
        self.x_high.iter_mut().zip(high).for_each(|(a, b)| *a = a.min(*b));
        self.round_outwards();
    }
}

/// The next float32 above the value.
fn upwards(value: f64) -> f32 {
    (value as f32).next_up()
}

/// Bounds of node k without substitution, from those of the nodes before it.
pub(super) fn of_node(graph: &Graph, k: usize, all: &[Bounds], rule: Rule, room: &mut Packed) -> Bounds {
    let node = &graph.nodes[k];
    match &node.kind {
        Kind::Maximum { source, windows } => Bounds::maximum(node, windows, &all[*source]),
        Kind::Input | Kind::Free | Kind::Sum => {
            let mut bounds = Bounds::sum(graph, k, all, room);
            bounds.activate(node, rule);
            bounds
        }
    }
}
