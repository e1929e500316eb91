//! Which layers read which.

use super::{Components, ImplicitModel, ModelParts, TapBlock, TapWeights, Target, components};
use crate::layout::{Layer, Layout, MapShape};
use crate::linalg::Csr;
use crate::network::{Source, Window};
use crate::{Error, Result};

/// The layers as a graph: components of layers in an order in which they can be computed.
pub(super) fn layer_components(layout: &Layout, a: &Csr<f32>, taps: &[TapBlock]) -> Components {
    let count = layout.layers().len();
    let mut reads = vec![std::collections::BTreeSet::new(); count];
    for (layer, reads) in layout.layers().iter().zip(&mut reads) {
        reads.extend(layer.operands().filter_map(|operand| match operand.source {
            Source::Layer(k) => Some(k),
            Source::Input => None,
        }));
    }
    for block in taps {
        if let (Target::Layer(target), Source::Layer(source)) = (block.target, block.source) {
            reads[target].insert(source);
        }
    }
    let ends: Vec<usize> = (0..count).map(|k| layout.range(k).end).collect();
    for (k, reads) in reads.iter_mut().enumerate() {
        let rows = layout.range(k);
        for &j in &a.indices()[a.indptr()[rows.start]..a.indptr()[rows.end]] {
            reads.insert(ends.partition_point(|end| *end <= j as usize));
        }
    }
    components(&Csr::from_rows(count, reads.into_iter().map(|r| r.into_iter().map(|k| (k, 1.0f32)))))
}

/// An error if layers of a model with shared weights or operators read each other: those run layer by layer, once.
pub(super) fn require_acyclic_taps(parts: &ModelParts) -> Result<()> {
    if parts.taps.iter().all(TapBlock::is_plain_residual) && !parts.layout.has_operators() {
        return Ok(());
    }
    let found = layer_components(&parts.layout, &parts.a, &parts.taps);
    match found.cyclic.iter().position(|c| *c) {
        None => Ok(()),
        Some(k) => {
            let names: Vec<&str> =
                found.members[k].iter().take(4).map(|&l| parts.layout.layers()[l].name.as_str()).collect();
            Err(Error::unsupported(
                format!("a cycle through layer(s) {names:?} of a model with tap blocks"),
                "convolutions and poolings run once, layer by layer; only models without them may have cycles",
            ))
        }
    }
}

impl ImplicitModel {
    /// The axes of a sample, such as 3 × 32 × 32, where the layers that read it say so and agree.
    pub fn input_axes(&self) -> Option<Vec<usize>> {
        let blocks = self.taps().iter().filter(|block| block.source == Source::Input).map(|block| {
            let MapShape { channels, height, width } = block.maps.first().map_or(block.input, |map| map.input());
            vec![channels, height, width]
        });
        let operands = self.layout().layers().iter().flat_map(Layer::operands);
        let operands = operands.filter(|operand| operand.source == Source::Input);
        // The first axis of an operand is that of the batch.
        let mut all = blocks.chain(operands.map(|operand| operand.dims.sizes().iter().skip(1).copied().collect()));
        let first: Vec<usize> = all.next()?;
        let long = |axes: &[usize]| axes.iter().copied().filter(|size| *size != 1).collect::<Vec<_>>();
        all.all(|axes| long(&axes) == long(&first)).then_some(first)
    }

    /// The layers in an order in which each reads only earlier ones; for models whose layers form no cycle.
    pub(crate) fn layer_order(&self) -> Vec<usize> {
        let found = layer_components(self.layout(), self.a(), self.taps()).members.concat();
        // The network's own order if it is possible: from the last place of the layout to the first.
        let reads_later = |target: usize, source: usize| source <= target;
        let taps = self.taps().iter().any(|b| match (b.target, b.source) {
            (Target::Layer(t), Source::Layer(s)) => reads_later(t, s),
            _ => false,
        });
        let operators = self.layout().layers().iter().enumerate().any(|(t, layer)| {
            layer.operands().any(|operand| matches!(operand.source, Source::Layer(s) if reads_later(t, s)))
        });
        let a = self.a();
        let entries = (0..found.len()).any(|k| {
            let rows = self.layout().range(k);
            a.indices()[a.indptr()[rows.start]..a.indptr()[rows.end]].iter().any(|&j| (j as usize) < rows.end)
        });
        if taps || operators || entries { found } else { (0..found.len()).rev().collect() }
    }

    /// Everything that is added to a layer or the output, as tap blocks: first plain entries by source, whose units
    /// count as channels with one position, then the model's own blocks.
    pub fn summands(&self, target: Target) -> Vec<TapBlock> {
        let layout = self.layout();
        let (range, states, inputs) = match target {
            Target::Layer(k) => (layout.range(k), self.a(), self.b()),
            Target::Output => (0..self.shape().outputs, self.c(), self.d()),
        };
        let map = |channels| MapShape { channels, height: 1, width: 1 };
        let mut blocks = Vec::new();
        let mut entries = |source: Source, m: &Csr<f32>, columns: std::ops::Range<usize>| {
            let rows = range.clone().map(|i| {
                m.row(i).filter(|(j, _)| columns.contains(j)).map(|(j, v)| (j - columns.start, v)).collect::<Vec<_>>()
            });
            let part = Csr::from_rows(columns.len(), rows);
            if part.nonzeros() > 0 {
                blocks.push(TapBlock {
                    target,
                    source,
                    maps: vec![],
                    window: Window::square(1, 1, 0),
                    input: map(part.cols()),
                    output: map(part.rows()),
                    groups: 1,
                    weights: TapWeights::Taps(part),
                });
            }
        };
        let used = |m: &Csr<f32>| m.indptr()[range.start] < m.indptr()[range.end];
        if used(inputs) {
            entries(Source::Input, inputs, 0..inputs.cols());
        }
        if used(states) {
            for k in 0..layout.layers().len() {
                entries(Source::Layer(k), states, layout.range(k));
            }
        }
        blocks.extend(self.taps().iter().filter(|b| b.target == target).cloned());
        blocks
    }

    /// Whether no layer reads itself, even through others.
    pub(crate) fn layers_are_acyclic(&self) -> bool {
        !layer_components(self.layout(), self.a(), self.taps()).cyclic.contains(&true)
    }

    /// An error that names the first layer that an operator computes, for operations that only work on sums of
    /// weighted states.
    pub(crate) fn require_no_operators(&self, what: &str) -> Result<()> {
        match self.layout().layers().iter().find_map(|l| l.operator.as_ref().map(|o| (l, o))) {
            None => Ok(()),
            Some((layer, operator)) => Err(Error::unsupported(
                format!("{what} of a model with layer {:?}, {}", layer.name, operator.name()),
                "it works for linear maps, convolutions, sums, poolings and activations",
            )),
        }
    }

    /// An error if an expansive activation lies on a cycle: nothing then proves that an equilibrium exists.
    pub(super) fn require_non_expansive_cycles(&self) -> Result<()> {
        let layers = self.layout().layers();
        if layers.iter().all(|l| l.activation.is_non_expansive()) || self.layers_are_acyclic() {
            return Ok(());
        }
        // A model with anything but residual sums in addition to A has no cycles.
        let Some(plain) = self.without_taps() else { return Ok(()) };
        let found = components(plain.a());
        let cyclic = found.members.iter().zip(&found.cyclic).filter(|(_, cyclic)| **cyclic);
        for layer in cyclic.flat_map(|(members, _)| members).filter_map(|&i| self.layout().layer_of(i)) {
            let layer = &layers[layer];
            if !layer.activation.is_non_expansive() {
                return Err(Error::unsupported(
                    format!("a cycle through layer {:?} with activation {}", layer.name, layer.activation),
                    "cycles need non-expansive activations, such as relu, clip or tanh; train with connectivity \
                     feedforward or baseline",
                ));
            }
        }
        Ok(())
    }

    /// An error for operations that only work on A, B, C and D themselves.
    pub(crate) fn require_no_taps(&self, what: &str) -> Result<()> {
        self.require_no_operators(what)?;
        if self.taps().is_empty() {
            return Ok(());
        }
        Err(Error::unsupported(
            format!("{what} of a model with shared weights, poolings or residual sums"),
            "not yet; it needs every weight as an entry of A, B, C or D",
        ))
    }

    /// ‖A‖∞, for tap blocks bounded by the ℓ1 norms of their rows; residual sums included.
    pub fn norm_a_inf(&self) -> f64 {
        if let Some(plain) = self.without_taps() {
            return plain.a().norm_inf();
        }
        let a = self.a();
        let mut sums: Vec<f64> = (0..a.rows()).map(|i| a.row(i).map(|(_, v)| f64::from(v).abs()).sum()).collect();
        for block in self.taps() {
            let (Target::Layer(k), Source::Layer(_)) = (block.target, block.source) else { continue };
            let rows = sums[self.layout().range(k)].chunks_exact_mut(block.output.positions().max(1));
            for (o, row) in rows.enumerate() {
                let more = block.row_norm(o);
                row.iter_mut().for_each(|v| *v += more);
            }
        }
        sums.into_iter().fold(0.0, f64::max)
    }

    /// The vector b with one number per unit: the bias that is added to z.
    pub fn unit_bias(&self) -> Vec<f32> {
        let layers = self.layout().layers().iter().enumerate();
        layers
            .flat_map(|(k, layer)| {
                let each = layer.map.map_or(1, |m| m.positions());
                self.state_bias()[self.layout().row_range(k)].iter().flat_map(move |v| std::iter::repeat_n(*v, each))
            })
            .collect()
    }
}
