//! The sums of a node over the boxes of what it reads, in double precision: intervals, magnitudes, and how far the
//! rounding of a run may move them.
//!
//! The program computes every value as one chain of multiply-adds: it starts with the bias and adds block after block,
//! each in the ascending order of its columns, whatever the kernel and the batch ([`crate::kernels`]). The k-th addition
//! is off by at most one unit of the partial sum s_k. A partial sum is at most |its centre| + its radius, and both grow
//! term by term with the sum itself. Their total is much less than n times the largest partial sum that any order could
//! have, because terms of both signs cancel along the way.

use super::boxes::Bounds;
use crate::layout::MapShape;
use crate::linalg::{Csr, vectorised};
use crate::model::TapBlock;
use crate::network::Window;

/// Sums of one node, one number per unit.
pub(super) struct Sums {
    /// Centre and radius of the interval of the sum, bias included; the radius is rounded as a sum of doubles is.
    pub(super) centre: Vec<f64>,
    pub(super) radius: Vec<f64>,
    /// The largest magnitudes of all products and of the bias, added up.
    pub(super) magnitude: Vec<f64>,
    /// Number of products that are not known to be zero.
    pub(super) terms: Vec<f64>,
    pub(super) partial: Partial,
}

/// What bounds the partial sums of a run.
pub(super) enum Partial {
    /// The run adds in the order of the program. The largest magnitudes of all partial sums, added up.
    Chain(Vec<f64>),
    /// The run adds in any order: the largest sums of the positive products, and of the negative ones.
    AnyOrder(Vec<f64>, Vec<f64>),
}

impl Sums {
    /// The sums before the first product.
    pub(super) fn new(size: usize, bias: impl Fn(usize) -> f64, any_order: bool) -> Self {
        let centre: Vec<f64> = (0..size).map(bias).collect();
        let zeros = || vec![0.0; size];
        Self {
            magnitude: centre.iter().map(|b| b.abs()).collect(),
            centre,
            radius: zeros(),
            terms: zeros(),
            partial: if any_order { Partial::AnyOrder(zeros(), zeros()) } else { Partial::Chain(zeros()) },
        }
    }

    /// Adds one product to the sum of a unit.
    pub(super) fn add(&mut self, unit: usize, weight: f32, from: &Bounds, source: usize) {
        self.add_run(unit, weight, from, (source, 1), 1);
    }

    /// Adds one product to `count` sums that lie side by side; their factors start at a unit of the source and are
    /// `step` units apart.
    #[inline(always)]
    fn add_run(&mut self, unit: usize, weight: f32, from: &Bounds, (source, step): (usize, usize), count: usize) {
        let (w, size) = (f64::from(weight), f64::from(weight.abs()));
        let to = unit..unit + count;
        let (centre, radius) = (&mut self.centre[to.clone()], &mut self.radius[to.clone()]);
        let (magnitude, terms) = (&mut self.magnitude[to.clone()], &mut self.terms[to.clone()]);
        let (middle, reach, live) = (&from.middle[source..], &from.reach[source..], &from.live[source..]);
        match &mut self.partial {
            Partial::Chain(path) => {
                let path = &mut path[to];
                let mut one = |k: usize, at: usize| {
                    let (x, r) = (middle[at], reach[at]);
                    let (c, d) = (centre[k] + w * x, radius[k] + size * r);
                    (centre[k], radius[k]) = (c, d);
                    magnitude[k] += size * (x.abs() + r);
                    terms[k] += live[at];
                    path[k] += live[at] * (c.abs() + d);
                };
                // Two loops, so that the first one has vectors.
                if step == 1 { (0..count).for_each(|k| one(k, k)) } else { (0..count).for_each(|k| one(k, k * step)) }
            }
            Partial::AnyOrder(positive, negative) => {
                let (positive, negative) = (&mut positive[to.clone()], &mut negative[to]);
                for k in 0..count {
                    let (x, r) = (middle[k * step], reach[k * step]);
                    let (c, d) = (w * x, size * r);
                    centre[k] += c;
                    radius[k] += d;
                    magnitude[k] += size * (x.abs() + r);
                    terms[k] += live[k * step];
                    positive[k] += (c + d).max(0.0);
                    negative[k] += (d - c).max(0.0);
                }
            }
        }
    }
}

/// A map with weights, from the values of one node to those of another.
pub(super) enum Products {
    /// One row for every unit of the result: units of the source and weights, in the order of a run.
    Rows(Csr<f32>),
    /// One row for every channel of the result; its columns are windows over a map.
    Windows { taps: Csr<f32>, window: Window, input: MapShape, output: MapShape },
}

impl Products {
    /// The map of a block with taps.
    pub(super) fn of_block(block: &TapBlock, taps: &Csr<f32>) -> Self {
        let TapBlock { window, input, output, .. } = *block;
        if output.positions() > 1 {
            return Self::Windows { taps: taps.clone(), window, input, output };
        }
        // A single position has one unit of the source for every column, or padding.
        let unit = |column: usize| {
            let (c, [down, right]) = window.tap(column);
            let y = down.checked_sub(window.padding[0]).filter(|y| *y < input.height)?;
            let x = right.checked_sub(window.padding[1]).filter(|x| *x < input.width)?;
            Some((c * input.height + y) * input.width + x)
        };
        let row = |o: usize| taps.row(o).filter_map(|(j, w)| Some((unit(j)?, w))).collect::<Vec<_>>();
        Self::Rows(Csr::from_rows(input.size(), (0..taps.rows()).map(row)))
    }

    /// Adds all products, in the order of a run.
    pub(super) fn add_to(&self, from: &Bounds, sums: &mut Sums) {
        vectorised(
            #[inline(always)]
            || match self {
                Self::Rows(rows) => {
                    for unit in 0..rows.rows() {
                        rows.row(unit).for_each(|(source, w)| sums.add_run(unit, w, from, (source, 1), 1));
                    }
                }
                Self::Windows { taps, window, input, output } => {
                    let [down, right] = window.stride;
                    for channel in 0..taps.rows() {
                        for (column, w) in taps.row(channel) {
                            let (c, offset) = window.tap(column);
                            let rows = window.inside(0, offset[0], input.height, output.height);
                            let columns = window.inside(1, offset[1], input.width, output.width);
                            for y in rows.filter(|_| !columns.is_empty()) {
                                let row = c * input.height + y * down + offset[0] - window.padding[0];
                                let source = row * input.width + columns.start * right + offset[1] - window.padding[1];
                                let unit = (channel * output.height + y) * output.width + columns.start;
                                sums.add_run(unit, w, from, (source, right), columns.len());
                            }
                        }
                    }
                }
            },
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Result;
    use crate::certify::Arithmetic;
    use crate::certify::graph::Graph;
    use crate::equilibrium::Prepared;
    use crate::kernels::{Choice, Instructions};
    use crate::layout::{Activation, Layer, Layout, Source};
    use crate::linalg::Matrix;
    use crate::model::{ImplicitModel, ModelParts, TapWeights, Target};
    use crate::network::{Network, Shape};
    use crate::parallel::Threads;
    use crate::random::Random;

    /// Weights of which about this share is not zero.
    fn weights(r: &mut Random, rows: usize, cols: usize, share: f64) -> Matrix<f32> {
        Matrix::from_fn(rows, cols, |_, _| if r.uniform() < share { r.normal() as f32 } else { 0.0 })
    }

    /// Three dense layers that also read the layers before the last one, so that a sum has several blocks.
    fn dense(r: &mut Random, share: f64) -> ImplicitModel {
        let (inputs, sizes) = (300, [9, 70, 40]);
        let layer = |i: usize| usize::from(i >= 9) + usize::from(i >= 79);
        let states: usize = sizes.iter().sum();
        let mut rows = |cols: usize, keep: &dyn Fn(usize, usize) -> bool| {
            let all = weights(r, states, cols, share);
            let is_there = |i: usize, j: usize| keep(i, j) && all[(i, j)] != 0.0;
            let row = |i: usize| (0..cols).filter(|&j| is_there(i, j)).map(|j| (j, all[(i, j)])).collect::<Vec<_>>();
            Csr::from_rows(cols, (0..states).map(row))
        };
        let parts = ModelParts {
            a: rows(states, &|i, j| layer(j) > layer(i)),
            b: rows(inputs, &|_, _| true),
            layout: Layout::new(
                ["third", "second", "first"]
                    .iter()
                    .zip(sizes)
                    .map(|(name, size)| Layer::dense(*name, size, Activation::Relu))
                    .collect(),
            ),
            state_bias: (0..states).map(|_| r.normal() as f32).collect(),
            ..Default::default()
        };
        all_states(parts)
    }

    /// Strides, padding, groups and residual sums, one of them of another convolution.
    fn convolutional(r: &mut Random, share: f64) -> ImplicitModel {
        let bias = |rows: usize| Some((0..rows).map(|k| 0.3 * k as f32 - 1.0).collect::<Vec<_>>());
        let odd = Window { kernel: [3, 2], stride: [2, 1], padding: [1, 0, 1, 1], dilation: [1; 2] };
        let start = Network::builder(Shape::map(3, 9, 8))
            .and_then(|n| n.convolution(weights(r, 12, 27, share), Window::square(3, 1, 1), bias(12)))
            .and_then(|n| n.activation(Activation::Relu))
            .unwrap();
        let first = start.here();
        let short = start.convolution(weights(r, 20, 12, share), Window::square(1, 2, 0), bias(20)).unwrap();
        let joined = short.here();
        let network = short
            .at(first)
            .and_then(|n| n.convolution(weights(r, 20, 108, share), Window::square(3, 2, 1), bias(20)))
            .and_then(|n| n.plus(joined))
            .and_then(|n| n.activation(Activation::Relu))
            .unwrap();
        let second = network.here();
        let network = network
            .grouped_convolution(weights(r, 20, 90, share), Window::square(3, 1, 1), 2, bias(20))
            .and_then(|n| n.plus(second))
            .and_then(|n| n.activation(Activation::Relu))
            .and_then(|n| n.convolution(weights(r, 17, 120, share), odd, bias(17)))
            .and_then(|n| n.activation(Activation::Relu))
            .and_then(|n| n.flatten())
            .and_then(|n| n.linear(weights(r, 5, 17 * 3 * 4, share), bias(5)))
            .and_then(|n| n.activation(Activation::Relu))
            .and_then(|n| n.build())
            .unwrap();
        let mut parts = ImplicitModel::from_network(&network).unwrap().into_parts();
        parts.taps.retain(|b| b.target != Target::Output);
        all_states(parts)
    }

    /// A model whose outputs are all of its states.
    fn all_states(parts: ModelParts) -> ImplicitModel {
        let n = parts.layout.size();
        let c = Csr::from_rows(n, (0..n).map(|i| [(i, 1.0)]));
        let d = Csr::empty(n, parts.b.cols());
        ImplicitModel::new(ModelParts { c, d, output_bias: vec![0.0; n], ..parts }).unwrap()
    }

    /// The products of one unit's sum, in the order of a run: weight and value.
    fn products(
        model: &ImplicitModel,
        layer: usize,
        unit: usize,
        value: impl Fn(Source, usize) -> f32,
    ) -> Vec<[f32; 2]> {
        let mut out = Vec::new();
        for block in model.summands(Target::Layer(layer)) {
            let TapWeights::Taps(taps) = &block.weights else {
                out.push([block.unit_factor(unit), value(block.source, unit)]);
                continue;
            };
            let (o, q) = (unit / block.output.positions(), unit % block.output.positions());
            let at = [q / block.output.width, q % block.output.width];
            let [top, left, ..] = block.window.padding;
            for (column, w) in taps.row(o) {
                let (c, [down, right]) = block.window.tap(column);
                let y = (at[0] * block.window.stride[0] + down).checked_sub(top).filter(|y| *y < block.input.height);
                let x = (at[1] * block.window.stride[1] + right).checked_sub(left).filter(|x| *x < block.input.width);
                if let (Some(y), Some(x)) = (y, x) {
                    let from = (c * block.input.height + y) * block.input.width + x;
                    out.push([w, value(block.source, from)]);
                }
            }
        }
        out
    }

    /// The values of a run with every set of instructions, every batch and both kinds of kernels are chains in the declared
    /// order, bit by bit, and lie within the slack of a chain; and that slack is not much larger than it must be.
    #[test]
    fn a_run_is_one_chain_and_stays_within_its_slack() {
        let mut r = Random::new(91);
        let (mut values, mut beyond, mut largest) = (0usize, 0usize, 0.0f64);
        let (mut chain, mut any_order) = (0.0, 0.0);
        for round in 0..8 {
            let share = [1.0, 0.5, 0.15, 0.04][round / 2];
            let model = if round % 2 == 0 { dense(&mut r, share) } else { convolutional(&mut r, share) };
            let (layout, inputs) = (model.layout(), model.shape().inputs);
            let u = Matrix::from_fn(64, inputs, |_, _| r.normal() as f32);
            let graphs = [Arithmetic::Single, Arithmetic::AnyOrder, Arithmetic::Exact]
                .map(|arithmetic| Graph::new(&model, arithmetic).unwrap());
            for &instructions in Instructions::available() {
                let mut runs = Vec::new();
                for batch in [1, 8, 64] {
                    let part = Matrix::from_fn(batch, inputs, |s, j| u[(s, j)]);
                    let run = |model: Result<Prepared>| model.and_then(|m| m.outputs(&part, Threads::one())).unwrap();
                    runs.push(run(Prepared::with_instructions(&model, batch, instructions)));
                    if instructions == Instructions::detect() {
                        for choice in [Choice::Dense, Choice::Sparse] {
                            runs.push(run(Prepared::only(&model, batch, choice)));
                        }
                    }
                }
                let fused = instructions != Instructions::Portable
                    || cfg!(any(target_feature = "fma", target_arch = "aarch64"));
                let all = runs.iter().find(|run| run.rows() == 64).unwrap();
                for run in &runs {
                    assert!((0..run.rows()).all(|s| run.row(s) == all.row(s)), "{round} {instructions:?}");
                }
                for s in [0, 5, 63] {
                    let value = |source: Source, unit: usize| match source {
                        Source::Input => u[(s, unit)],
                        Source::Layer(k) => all[(s, layout.range(k).start + unit)],
                    };
                    let points = |width: f64| {
                        let around = |x: f32| (f64::from(x) - width, f64::from(x) + width);
                        let of = |values: &[f32]| {
                            let (low, high) = values.iter().map(|x| around(*x)).unzip();
                            Bounds::of_values(low, high)
                        };
                        let mut known = vec![Bounds::default(); graphs[0].nodes.len()];
                        known[0] = of(u.row(s));
                        for (k, &node) in graphs[0].layers.iter().enumerate() {
                            known[node] = of(&all.row(s)[layout.range(k)]);
                        }
                        known
                    };
                    let known = points(0.0);
                    let wide = points(0.1);
                    for (k, layer) in layout.layers().iter().enumerate() {
                        let node = graphs[0].layers[k];
                        let slack = |graph: usize| Bounds::sum(&graphs[graph], node, &known).slack;
                        let [single, any, exact] = [0, 1, 2].map(slack);
                        let over_boxes = Bounds::sum(&graphs[0], node, &wide).slack;
                        let biases = &model.state_bias()[layout.row_range(k)];
                        let each = layer.map.map_or(1, |m| m.positions());
                        for unit in 0..layer.size {
                            let (bias, found) = (biases[unit / each], value(Source::Layer(k), unit));
                            let all = products(&model, k, unit, value);
                            let step = |s: f32, [w, x]: &[f32; 2]| if fused { w.mul_add(*x, s) } else { w * x + s };
                            let ordered = all.iter().fold(bias, step);
                            assert_eq!(found, ordered.max(0.0), "{round} {instructions:?} {k} {unit}");
                            let right: f64 = all.iter().map(|[w, x]| f64::from(*w) * f64::from(*x)).sum();
                            let error = (f64::from(ordered) - (right + f64::from(bias))).abs();
                            let run = single[unit] - exact[unit];
                            assert!(error <= run, "{round} {instructions:?} {k} {unit}: {error} beyond {run}");
                            assert!(single[unit] <= any[unit] && single[unit] <= over_boxes[unit]);
                            if all.len() >= 20 {
                                (chain, any_order) = (chain + run, any_order + any[unit] - exact[unit]);
                                values += 1;
                                beyond += usize::from(error > run / 50.0);
                                largest = largest.max(error / run);
                            }
                        }
                    }
                }
            }
        }
        // A slack of a fiftieth would be wrong for many values, and the worst error is a sensible share of the slack.
        assert!(values > 5000 && 5 * beyond > values, "{beyond} of {values}");
        assert!(largest > 0.15, "{largest}");
        assert!(chain < 0.6 * any_order, "{chain} against {any_order}");
    }
}
