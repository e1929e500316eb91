//! Rows as they are stored, and the model they make.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::plan::{Place, Plan};
use super::{TrainInput, TrainSettings, layout, metadata};
use crate::Result;
use crate::linalg::Csr;
use crate::model::{ImplicitModel, ModelParts, TapBlock, TapWeights};
use crate::statistics::Statistics;

/// What is known about one row of the model.
#[derive(Debug, Clone, PartialEq)]
pub struct RowReport {
    /// `z[i]` or `y[i]`; a row of states is a unit or, in a feature map, a channel.
    pub name: String,
    /// Stored non-zeros, the bias included.
    pub nonzeros: usize,
    /// Certified gap of the row's last convex solve, relative to its objective.
    pub relative_gap: Option<f64>,
    /// That solve ended at a limit.
    pub at_limit: bool,
    /// ‖z − Ũᵀw‖ / ‖z‖ with the stored weights: on the features they were fitted to, or after a refit in the output
    /// metric at the model's own states.
    pub relative_residual: f64,
    /// Root mean square of the target z.
    pub target_rms: f64,
    /// (value − bound)/value of a cardinality row against its perspective lower bound.
    pub bound_distance: Option<f64>,
    /// A GPU solved it.
    pub on_gpu: bool,
}

/// One stored row.
#[derive(Debug, Clone, Default)]
pub(super) struct Row {
    pub(super) entries: Vec<(Place, f32)>,
}

/// What a group was solved from and to, for those who look at it again: bounds, refits.
#[derive(Debug, Clone)]
pub(super) struct Evidence {
    pub(super) statistics: Arc<Statistics>,
    /// Per row, over the group's features.
    pub(super) weights: Vec<Vec<f64>>,
}

/// Rows stored so far; every report with the row's (residual energy, energy).
#[derive(Clone)]
pub(super) struct Build<'a> {
    plan: &'a Plan,
    pub(super) rows: Vec<Row>,
    pub(super) reports: Vec<Option<(RowReport, (f64, f64))>>,
    /// By the name of the group.
    pub(super) evidence: BTreeMap<String, Evidence>,
}

impl<'a> Build<'a> {
    /// Nothing yet.
    pub(super) fn new(plan: &'a Plan) -> Self {
        let rows = plan.outputs.rows.end;
        Self { plan, rows: vec![Row::default(); rows], reports: vec![None; rows], evidence: BTreeMap::new() }
    }

    /// The model of the rows so far; those still missing are zero.
    pub(super) fn model(&self, input: &TrainInput, settings: &TrainSettings) -> Result<ImplicitModel> {
        let shape = input.source.shape();
        let layout = layout(input);
        let (n, p) = (shape.states, shape.inputs);
        let (top, bottom) = self.rows.split_at(layout.rows());
        // A and B have a row per unit; rows of maps have no columns there.
        let none = Row::default();
        let units: Vec<&Row> = (0..layout.layers().len())
            .flat_map(|k| {
                let (layer, rows) = (&layout.layers()[k], &top[layout.row_range(k)]);
                (0..layer.size).map(|i| if layer.map.is_some() { &none } else { &rows[i] }).collect::<Vec<_>>()
            })
            .collect();
        let columns = |rows: &[&Row], from: usize, cols: usize| {
            let inside = |&(place, v): &(Place, f32)| match place {
                Place::Column(j) if (from..from + cols).contains(&j) => Some((j - from, v)),
                _ => None,
            };
            Csr::from_rows(cols, rows.iter().map(|row| row.entries.iter().filter_map(inside).collect::<Vec<_>>()))
        };
        let bias = |row: &Row| row.entries.iter().find(|(place, _)| *place == Place::Constant).map_or(0.0, |e| e.1);
        let outputs: Vec<&Row> = bottom.iter().collect();
        ImplicitModel::new(ModelParts {
            a: columns(&units, 0, n),
            b: columns(&units, n, p),
            c: columns(&outputs, 0, n),
            d: columns(&outputs, n, p),
            state_bias: top.iter().map(bias).collect(),
            output_bias: bottom.iter().map(bias).collect(),
            taps: self.tap_blocks(input),
            layout: layout.clone(),
            preprocessing: input.preprocessing.clone(),
            metadata: metadata(input, settings),
        })
    }

    /// The plan's blocks with their weights; skips that nothing uses are left out.
    fn tap_blocks(&self, input: &TrainInput) -> Vec<TapBlock> {
        let known = input.baseline.map_or(0, |b| b.taps().len());
        let weighted = |(number, block): (usize, &TapBlock)| {
            let TapWeights::Taps(empty) = &block.weights else { return Some(block.clone()) };
            let group = self.plan.groups().find(|g| g.target == Some(block.target))?;
            let tap = |&(place, v): &(Place, f32)| match place {
                Place::Tap { block, column } if block == number => Some((column, v)),
                _ => None,
            };
            let rows = &self.rows[group.rows.clone()];
            let rows = rows.iter().map(|row| row.entries.iter().filter_map(tap).collect::<Vec<_>>());
            let taps = Csr::from_rows(empty.cols(), rows);
            (number < known || taps.nonzeros() > 0)
                .then(|| TapBlock { weights: TapWeights::Taps(taps), ..block.clone() })
        };
        self.plan.blocks.iter().enumerate().filter_map(weighted).collect()
    }

    /// RMS of the outputs' mismatch over their RMS.
    pub(super) fn output_error(&self) -> f64 {
        let (mut residual, mut energy) = (0.0, 0.0);
        for (_, (r, e)) in self.reports[self.plan.outputs.rows.clone()].iter().flatten() {
            residual += r;
            energy += e;
        }
        if energy > 0.0 { (residual / energy).sqrt() } else { 0.0 }
    }
}
