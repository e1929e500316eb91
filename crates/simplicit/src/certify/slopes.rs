//! Lower lines with slopes of their own for every function and unstable unit, improved by gradient steps on the bound.
//!
//! Any slope between those of the two branches is sound, so every step gives a bound; the best is kept. The bound is
//! the value of a network of the chosen lines at the point of the input set where it is smallest, so its derivative by a
//! slope is the coefficient of the unit's value (where that is not negative) times the unit's pre-activation there.

use super::backwards::Rows;
use super::block::Packed;
use super::boxes::Bounds;
use super::graph::{Graph, Kind};
use super::region::InputSet;
use super::relaxation::Lines;
use super::substitution::LANES;

/// Size of the first step, and the factor from each step to the next.
const STEP: f32 = 0.4;
const DECAY: f32 = 0.9;
/// Factors of the running means of the gradient and of its square.
const MEANS: (f32, f32) = (0.9, 0.99);

/// Stands for no row.
const NONE: u32 = u32::MAX;

/// The slopes for `LANES` functions.
pub(super) struct Slopes {
    of: Vec<Option<NodeSlopes>>,
    /// Coefficients of the values of the nodes that the last substitution passed.
    kept: Vec<Vec<f32>>,
    steps: i32,
}

struct NodeSlopes {
    /// The row of every unit.
    row: Vec<u32>,
    units: Vec<usize>,
    smallest: Vec<f32>,
    slope: Vec<[f32; LANES]>,
    mean: Vec<[f32; LANES]>,
    square: Vec<[f32; LANES]>,
}

impl Slopes {
    /// The slopes of the lines, for every unit before node `top` whose slope is free.
    pub(super) fn new(graph: &Graph, all: &[Bounds], top: usize) -> Self {
        let mut of = Vec::with_capacity(graph.nodes.len());
        for (node, bounds) in graph.nodes.iter().zip(all).take(top) {
            let mut own = NodeSlopes {
                row: vec![NONE; node.size],
                units: Vec::new(),
                smallest: Vec::new(),
                slope: Vec::new(),
                mean: Vec::new(),
                square: Vec::new(),
            };
            for (range, activation) in &node.activations {
                for i in range.clone() {
                    if let Some((smallest, _)) = Lines::free_slopes(*activation, bounds.low[i], bounds.high[i]) {
                        own.row[i] = own.units.len() as u32;
                        own.units.push(i);
                        own.smallest.push(smallest);
                        own.slope.push([bounds.lines[i].lower; LANES]);
                    }
                }
            }
            own.mean = vec![[0.0; LANES]; own.units.len()];
            own.square = own.mean.clone();
            of.push((!own.units.is_empty()).then_some(own));
        }
        Self { of, kept: vec![Vec::new(); graph.nodes.len()], steps: 0 }
    }

    /// The lower slopes of a unit, one per function; `None` where they are not free.
    pub(super) fn of_unit(&self, k: usize, i: usize) -> Option<&[f32; LANES]> {
        let own = self.of.get(k)?.as_ref()?;
        own.slope.get(own.row[i] as usize)
    }

    pub(super) fn keep(&mut self, k: usize, own: &Rows) {
        own.in_order(&mut self.kept[k]);
    }

    /// The coefficients of the pre-activations of node k in the last substitution; `None` where it did not pass
    /// there.
    pub(super) fn of_sums(&self, k: usize, bounds: &Bounds) -> Option<Vec<f32>> {
        let mut own = self.kept.get(k).filter(|kept| !kept.is_empty())?.clone();
        for (i, row) in own.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
            let lines = bounds.lines.get(i)?;
            let lower = self.of_unit(k, i).copied().unwrap_or([lines.lower; LANES]);
            row.iter_mut().zip(lower).for_each(|(v, lower)| *v *= if *v >= 0.0 { lower } else { lines.upper });
        }
        Some(own)
    }

    /// One step that raises the bounds; `at_input` are the coefficients of the input, and `lanes` functions are in
    /// use.
    pub(super) fn step(
        &mut self,
        graph: &Graph,
        all: &[Bounds],
        at_input: (&InputSet, &[f32]),
        lanes: usize,
        workspace: &mut Packed,
    ) {
        self.steps += 1;
        self.sweep(graph, all, at_input, lanes, workspace, STEP * DECAY.powi(self.steps - 1));
    }

    /// Computes the values of all nodes by the chosen lines at the point where the bounds are smallest; free slopes
    /// take a step of some size.
    pub(super) fn sweep(
        &mut self,
        graph: &Graph,
        all: &[Bounds],
        (input, at_input): (&InputSet, &[f32]),
        lanes: usize,
        workspace: &mut Packed,
        size: f32,
    ) -> Vec<Vec<f32>> {
        let (first, second) = MEANS;
        let correct = (1.0 - first.powi(self.steps), 1.0 - second.powi(self.steps));
        let mut values: Vec<Vec<f32>> = vec![Vec::new(); self.of.len()];
        for (k, node) in graph.nodes.iter().enumerate().take(self.of.len()) {
            let mut x = vec![0.0f32; node.size * LANES];
            match &node.kind {
                Kind::Input if at_input.is_empty() => {}
                Kind::Input => (0..lanes).for_each(|l| input.smallest_at(at_input, l, &mut x)),
                Kind::Free => {
                    for (i, x) in x.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
                        x.fill(f64::midpoint(all[k].x_low[i], all[k].x_high[i]) as f32);
                    }
                }
                Kind::Maximum { source, .. } => {
                    if !self.kept[k].is_empty() {
                        let from = &values[*source];
                        for (i, x) in x.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
                            let largest = &all[k].largest[i];
                            for (l, x) in x.iter_mut().enumerate() {
                                *x = if self.kept[k][i * LANES + l] >= 0.0 {
                                    from[largest.below as usize * LANES + l]
                                } else {
                                    largest.slope * from[largest.above as usize * LANES + l] + largest.offset as f32
                                };
                            }
                        }
                    }
                }
                Kind::Sum => {
                    for term in &node.terms {
                        term.map.forward(&values[term.source], &mut x, LANES, workspace);
                    }
                    if !self.kept[k].is_empty() {
                        self.unit_steps(k, &mut x, &node.bias, &all[k], size, correct);
                    }
                }
            }
            values[k] = x;
        }
        values
    }

    /// Pre-activations `x` become values of the chosen lines; free slopes take their step.
    fn unit_steps(&mut self, k: usize, x: &mut [f32], bias: &[f32], bounds: &Bounds, size: f32, correct: (f32, f32)) {
        let (first, second) = MEANS;
        let kept = &self.kept[k];
        let mut own = self.of[k].as_mut();
        for (i, x) in x.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
            let lines = &bounds.lines[i];
            let bias = bias.get(i).copied().unwrap_or(0.0);
            let row = own.as_ref().map_or(NONE, |own| own.row[i]) as usize;
            for l in 0..LANES {
                let z = x[l] + bias;
                let coefficient = kept[i * LANES + l];
                if coefficient < 0.0 {
                    x[l] = lines.upper * z + lines.above as f32;
                    continue;
                }
                let Some(own) = own.as_mut().filter(|own| row < own.units.len()) else {
                    x[l] = lines.lower * z + lines.below as f32;
                    continue;
                };
                x[l] = own.slope[row][l] * z;
                let gradient = coefficient * z;
                let (mean, square) = (&mut own.mean[row][l], &mut own.square[row][l]);
                *mean = first * *mean + (1.0 - first) * gradient;
                *square = second * *square + (1.0 - second) * gradient * gradient;
                let step = size * (*mean / correct.0) / ((*square / correct.1).sqrt() + 1e-12);
                if step.is_finite() {
                    own.slope[row][l] = (own.slope[row][l] + step).clamp(own.smallest[row], 1.0);
                }
            }
        }
    }
}
