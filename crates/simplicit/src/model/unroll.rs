//! Writes residual sums as plain entries of A, B, C and D.

use std::borrow::Cow;

use super::{ImplicitModel, TapBlock, Target};
use crate::layout::{Layer, Layout};
use crate::linalg::{Csr, add_up};
use crate::network::Source;

impl ImplicitModel {
    /// The same model with its residual sums as entries of A, B, C and D; `None` if weights are shared or pooled,
    /// because these would have too many entries.
    pub(crate) fn without_taps(&self) -> Option<Cow<'_, Self>> {
        if self.layout().has_operators() {
            return None;
        }
        if self.taps().is_empty() {
            return Some(Cow::Borrowed(self));
        }
        self.taps().iter().all(TapBlock::is_plain_residual).then(|| Cow::Owned(self.with_entries()))
    }

    fn with_entries(&self) -> Self {
        let n = self.shape().states;
        let layout = self.layout();
        // Entries to add to the rows of (A B), then of (C D), by column.
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
            for unit in 0..block.output.size() {
                more[first + unit].push((from + unit, f64::from(block.unit_factor(unit))));
            }
        }
        let sum = |m: &Csr<f32>, first: usize, offset: usize| {
            Csr::from_rows(
                m.cols(),
                (0..m.rows()).map(|i| {
                    let columns = offset..offset + m.cols();
                    let extra = more[first + i].iter().filter(|(j, _)| columns.contains(j));
                    let own = m.row(i).map(|(j, v)| (j, f64::from(v)));
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
