//! A model with other values at its non-zeros.

use super::{Linearised, layer};
use crate::Result;
use crate::linalg::{Csr, toward_zero};
use crate::model::{ImplicitModel, TapWeights, Target};

impl Linearised {
    /// The model that this was made of with other numbers at its non-zeros, rounded as stored: weights between states
    /// are rounded toward zero if a ball limits them.
    pub(in crate::train) fn with_weights(&self, model: &ImplicitModel, w: &[f64], ball: bool) -> Result<ImplicitModel> {
        let stored = |in_a: bool, v: f64| if ball && in_a { toward_zero(v) } else { v as f32 };
        // For every matrix its rows, as (column of one group of channels, value).
        let mut lists: Vec<Vec<Vec<(usize, f32)>>> =
            self.shapes.iter().map(|&(rows, _)| vec![Vec::new(); rows]).collect();
        for (entry, &v) in self.entries.iter().zip(w) {
            let (v, columns) = (stored(entry.in_a, v), self.shapes[entry.matrix].1);
            if v != 0.0 {
                lists[entry.matrix][entry.at / columns].push((entry.at % columns, v));
            }
        }
        let (n, p) = (model.shape().states, model.shape().inputs);
        let mut parts = model.clone().into_parts();
        // Rows of (A B), then of (C D); states first, then inputs.
        let mut plain: Vec<Vec<(usize, f32)>> = vec![Vec::new(); n + model.shape().outputs];
        for sum in &self.sums {
            let (first, biases) = match sum.target {
                Target::Layer(_) => (sum.units.start, &mut parts.state_bias[sum.rows.clone()]),
                Target::Output => (n, &mut parts.output_bias[..]),
            };
            let constants = lists[sum.constants].iter().map(|row| row.first().map_or(0.0, |(_, v)| *v));
            biases.iter_mut().zip(constants).for_each(|(b, v)| *b = v);
            for (number, block) in &sum.blocks {
                let rows = lists[*number].iter().enumerate();
                let rows = rows.map(|(o, row)| row.iter().map(move |(j, v)| (block.first_column(o) + j, *v)));
                let Some(tap) = block.tap else {
                    let column = layer(block.source).map_or(n, |j| self.ranges[j].start);
                    rows.enumerate().for_each(|(o, row)| plain[first + o].extend(row.map(|(j, v)| (column + j, v))));
                    continue;
                };
                if let TapWeights::Taps(taps) = &mut parts.taps[tap].weights {
                    *taps = Csr::from_rows(taps.cols(), rows);
                }
            }
        }
        plain.iter_mut().for_each(|row| row.sort_unstable_by_key(|(j, _)| *j));
        let matrix = |rows: &[Vec<(usize, f32)>], from: usize, cols: usize| {
            let inside = move |(j, v): &(usize, f32)| (from..from + cols).contains(j).then(|| (j - from, *v));
            Csr::from_rows(cols, rows.iter().map(|row| row.iter().filter_map(inside)))
        };
        let (top, bottom) = plain.split_at(n);
        (parts.a, parts.b) = (matrix(top, 0, n), matrix(top, n, p));
        (parts.c, parts.d) = (matrix(bottom, 0, n), matrix(bottom, n, p));
        ImplicitModel::new(parts)
    }
}
