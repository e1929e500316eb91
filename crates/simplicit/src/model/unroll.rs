//! Shared weights as plain entries of A, B, C and D, one for every position that uses them.

use std::borrow::Cow;

use super::{ImplicitModel, TapBlock, TapWeights, Target};
use crate::layout::{Layer, Layout};
use crate::linalg::{Csr, add_up};
use crate::network::{FixedMap, Source};
use crate::{Error, Result};

/// Most entries of an unrolled model: some hundred megabytes while it is made.
const MOST: u64 = 1 << 24;

impl TapBlock {
    /// Every entry of the block as a matrix: unit of the result, unit of the source, value. An entry may come in parts,
    /// which add up. Of linear poolings only.
    fn for_entries(&self, mut visit: impl FnMut(usize, usize, f64)) {
        // What a position of the operand takes from positions of the source, channel by channel the same.
        let first = self.maps.first().map_or(self.input, |m| m.input()).positions();
        let mut taken: Vec<Vec<(usize, f64)>> = (0..first).map(|k| vec![(k, 1.0)]).collect();
        for map in &self.maps {
            let means = map.means();
            let through = |mean: &Vec<(usize, f64)>| {
                mean.iter().flat_map(|(k, w)| taken[*k].iter().map(move |(from, v)| (*from, v * w))).collect()
            };
            taken = means.iter().map(through).collect();
        }
        let positions = self.input.positions();
        let mut add = |row: usize, unit: usize, value: f64| {
            let base = unit / positions * first;
            taken[unit % positions].iter().for_each(|(from, w)| visit(row, base + from, value * w));
        };
        let TapWeights::Taps(taps) = &self.weights else {
            (0..self.output.size()).for_each(|unit| add(unit, unit, f64::from(self.unit_factor(unit))));
            return;
        };
        let ([sy, sx], [top, left, ..]) = (self.window.stride, self.window.padding);
        for o in 0..taps.rows() {
            for (j, w) in taps.row(o) {
                let (c, [dy, dx]) = self.window.tap(j);
                for oy in self.window.inside(0, dy, self.input.height, self.output.height) {
                    for ox in self.window.inside(1, dx, self.input.width, self.output.width) {
                        let place = (oy * sy + dy - top) * self.input.width + ox * sx + dx - left;
                        let row = (o * self.output.height + oy) * self.output.width + ox;
                        add(row, c * positions + place, f64::from(w));
                    }
                }
            }
        }
    }

    /// At least as many as its entries.
    fn entries_at_most(&self) -> u64 {
        let own = if self.is_residual() { self.output.size() as u64 } else { self.multiply_adds() };
        let window = |map: &FixedMap| map.window_size().max(1) as u64;
        self.maps.iter().map(window).fold(own, u64::saturating_mul)
    }

    fn is_residual(&self) -> bool {
        !matches!(self.weights, TapWeights::Taps(_))
    }
}

impl ImplicitModel {
    /// The same model with its residual sums as entries of A, B, C and D; `None` if weights are shared or pooled, whose
    /// entries would be too many.
    pub(crate) fn without_taps(&self) -> Option<Cow<'_, Self>> {
        if self.layout().has_operators() {
            return None;
        }
        if self.taps().is_empty() {
            return Some(Cow::Borrowed(self));
        }
        self.taps().iter().all(TapBlock::is_plain_residual).then(|| Cow::Owned(self.with_entries(|v| v)))
    }

    /// The same model with every shared weight an entry for each position that uses it, rounded to single precision
    /// where a mean divides it. An error with a maximum, which has no entries, and where they would be too many.
    pub(crate) fn unrolled(&self, what: &str) -> Result<Cow<'_, Self>> {
        self.require_no_operators(what)?;
        if self.taps().is_empty() {
            return Ok(Cow::Borrowed(self));
        }
        if self.taps().iter().any(|b| b.maps.iter().any(|m| !m.is_linear())) {
            return Err(Error::unsupported(
                format!("{what} of a model with maximum pooling"),
                "it needs a model that is linear between its activations; average pooling and strides are",
            ));
        }
        let entries = self.taps().iter().map(TapBlock::entries_at_most).fold(0, u64::saturating_add);
        if entries > MOST {
            return Err(Error::unsupported(
                format!("{what} of a model with {entries} weights, shared ones counted at every position"),
                format!("at most {MOST}; take a smaller or sparser model"),
            ));
        }
        Ok(Cow::Owned(self.with_entries(|v| v)))
    }

    /// The unrolled model with the magnitudes of all parts of an entry added up: what a run rounds by. Parts of an entry
    /// may cancel, as a residual sum and a tap of the same source do; their roundings do not.
    pub(crate) fn unrolled_magnitudes(&self) -> Self {
        self.with_entries(f64::abs)
    }

    fn with_entries(&self, part: impl Fn(f64) -> f64) -> Self {
        let n = self.shape().states;
        let layout = self.layout();
        // Rows of (A B) then (C D): the entries to add, by column.
        let mut more: Vec<Vec<(usize, f64)>> = vec![Vec::new(); n + self.shape().outputs];
        for block in self.taps() {
            let first = match block.target {
                Target::Layer(k) => layout.range(k).start,
                Target::Output => n,
            };
            let from = match block.source {
                Source::Layer(k) => layout.range(k).start,
                Source::Input => n,
            };
            block.for_entries(|row, unit, value| more[first + row].push((from + unit, part(value))));
        }
        let sum = |m: &Csr<f32>, first: usize, offset: usize| {
            Csr::from_rows(
                m.cols(),
                (0..m.rows()).map(|i| {
                    let columns = offset..offset + m.cols();
                    let extra = more[first + i].iter().filter(|(j, _)| columns.contains(j));
                    let own = m.row(i).map(|(j, v)| (j, part(f64::from(v))));
                    let mut row: Vec<(usize, f64)> = own.chain(extra.map(|(j, v)| (j - offset, *v))).collect();
                    add_up(&mut row);
                    row.into_iter().map(|(j, v)| (j, v as f32)).collect::<Vec<_>>()
                }),
            )
        };
        let mut parts = self.parts.clone();
        (parts.a, parts.b) = (sum(self.a(), 0, 0), sum(self.b(), 0, n));
        (parts.c, parts.d) = (sum(self.c(), n, 0), sum(self.d(), n, n));
        parts.taps.clear();
        // One bias per unit.
        parts.state_bias = self.unit_bias();
        let dense = layout.layers().iter().map(|l| Layer { map: None, ..l.clone() });
        parts.layout = Layout::new(dense.collect());
        Self { shape: self.shape, parts }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub(crate) mod tests {
    use super::*;
    use crate::equilibrium::{Equilibrium, EquilibriumSettings};
    use crate::layout::Activation;
    use crate::linalg::Matrix;
    use crate::network::{Network, Shape, Window};
    use crate::random::Random;

    /// Strides, uneven padding, two means on the way, a residual sum and one with a mean in it: 2 × 7 × 6 to 3 classes.
    pub(crate) fn convolutional(seed: u64, gain: f64) -> Network {
        let mut r = Random::new(seed);
        let mut weights = |rows: usize, cols: usize| {
            let size = gain / (cols as f64).sqrt();
            Matrix::from_fn(rows, cols, |_, _| if r.uniform() < 0.3 { 0.0 } else { (size * r.normal()) as f32 })
        };
        let odd = Window { kernel: [3, 2], stride: [1, 2], padding: [1, 0, 1, 0], dilation: [1; 2] };
        let overlapping = Window { kernel: [3, 2], stride: [2, 1], padding: [1, 0, 0, 1], dilation: [1; 2] };
        let bias = |rows: usize| Some((0..rows).map(|k| 0.1 * k as f32 - 0.1).collect::<Vec<_>>());
        let start = Network::builder(Shape::map(2, 7, 6))
            .unwrap()
            .convolution(weights(3, 12), odd, bias(3))
            .unwrap()
            .activation(Activation::Relu)
            .unwrap()
            .average_pool(overlapping, seed.is_multiple_of(2))
            .unwrap();
        let pooled = start.here();
        start
            .convolution(weights(3, 27), Window::square(3, 1, 1), bias(3))
            .unwrap()
            .plus(pooled)
            .unwrap()
            .activation(Activation::LeakyRelu { slope: 0.1 })
            .unwrap()
            .global_average()
            .unwrap()
            .linear(weights(3, 3), bias(3))
            .unwrap()
            .build()
            .unwrap()
    }

    #[test]
    fn an_unrolled_model_computes_the_same() {
        for seed in 0..6 {
            let model = ImplicitModel::from_network(&convolutional(seed, 2.0)).unwrap();
            let plain = model.unrolled("a test").unwrap();
            assert!(plain.taps().is_empty() && !model.taps().is_empty());
            let mut r = Random::new(100 + seed);
            let u = Matrix::from_fn(20, model.shape().inputs, |_, _| r.normal() as f32);
            let run = |m: &ImplicitModel| Equilibrium::new(m, EquilibriumSettings::default()).unwrap().run(&u).unwrap();
            let (shared, entries) = (run(&model), run(&plain));
            for (a, b) in [(&shared.z, &entries.z), (&shared.y, &entries.y)] {
                let off = a.as_slice().iter().zip(b.as_slice()).map(|(a, b)| (a - b).abs() / (1.0 + a.abs()));
                assert!(off.fold(0.0, f32::max) < 2e-6, "seed {seed}");
            }
            // The first convolution has no mean before it: an entry for every use of a tap.
            let first = model.taps().iter().find(|b| b.source == Source::Input).unwrap();
            assert_eq!(plain.b().nonzeros() as u64, first.multiply_adds());
        }
    }

    #[test]
    fn parts_that_cancel_keep_their_magnitudes() {
        let start = Network::builder(Shape::map(1, 2, 2)).unwrap();
        let input = start.here();
        let network = start
            .convolution(Matrix::from_fn(1, 1, |_, _| -0.75), Window::square(1, 1, 0), None)
            .unwrap()
            .plus(input)
            .unwrap()
            .activation(Activation::Relu)
            .unwrap()
            .flatten()
            .unwrap()
            .linear(Matrix::from_fn(2, 4, |_, _| 1.0), None)
            .unwrap()
            .build()
            .unwrap();
        let model = ImplicitModel::from_network(&network).unwrap();
        let entries = |m: &ImplicitModel| m.b().row(0).collect::<Vec<_>>();
        assert_eq!(entries(&model.unrolled("a test").unwrap()), [(0, 0.25)]);
        assert_eq!(entries(&model.unrolled_magnitudes()), [(0, 1.75)]);
    }

    #[test]
    fn what_cannot_be_unrolled_is_refused() {
        let pooled = Network::builder(Shape::map(1, 4, 4))
            .unwrap()
            .max_pool(Window::square(2, 2, 0))
            .unwrap()
            .convolution(Matrix::from_fn(1, 1, |_, _| 1.0), Window::square(1, 1, 0), None)
            .unwrap()
            .build()
            .unwrap();
        let model = ImplicitModel::from_network(&pooled).unwrap();
        assert!(model.unrolled("a test").unwrap_err().to_string().contains("maximum pooling"));
        let large = Network::builder(Shape::map(16, 256, 256))
            .unwrap()
            .convolution(Matrix::from_fn(16, 144, |_, _| 1.0), Window::square(3, 1, 1), None)
            .unwrap()
            .build()
            .unwrap();
        let model = ImplicitModel::from_network(&large).unwrap();
        assert!(model.unrolled("a test").unwrap_err().to_string().contains("at most 16777216"));
    }
}
