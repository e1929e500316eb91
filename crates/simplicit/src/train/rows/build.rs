//! Rows in the form in which they are stored, and the model that they form.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::Result;
use crate::equilibrium::Sum;
use crate::layout::{MapShape, Source};
use crate::linalg::Csr;
use crate::model::{ImplicitModel, ModelMetadata, ModelParts, TapBlock, TapWeights, Target};
use crate::network::Window;
use crate::statistics::Statistics;
use crate::train::plan::choice;
use crate::train::plan::{Group, GroupId, Place, Plan};
use crate::train::{TrainInput, TrainSettings, layout, metadata};

/// Report about one row of the model.
#[derive(Debug, Clone, PartialEq)]
pub struct RowReport {
    /// The row's name, `z[i]` or `y[i]`; a row of states is a unit or, in a feature map, a channel.
    pub name: String,
    /// Number of stored non-zeros, the bias included.
    pub nonzeros: usize,
    /// Certified gap of the row's last convex solve, relative to its objective; `None` for cardinality.
    pub relative_gap: Option<f64>,
    /// Whether that solve ended at a limit.
    pub at_limit: bool,
    /// ‖z − Ũᵀw‖ / ‖z‖ with the stored weights: on the features that they were fitted to or, after a refit in the
    /// output metric, at the model's own states. In layers that were left out it is 0, and so is the size of the
    /// target.
    pub relative_residual: f64,
    /// Root mean square of the target z.
    pub target_rms: f64,
    /// (value − bound)/value of a cardinality row: it compares its weights, before rounding and before a refit in the
    /// output metric, with a certified lower bound of the problem that they solve.
    pub bound_distance: Option<f64>,
    /// Whether those weights are proven optimal: no others cost less, up to a millionth.
    pub proven: bool,
    /// Whether a GPU solved it.
    pub on_gpu: bool,
}

/// One stored row.
#[derive(Debug, Clone, Default)]
pub(in crate::train) struct Row {
    pub(in crate::train) entries: Vec<(Place, f32)>,
}

/// The statistics that a group was solved from and the weights that were found, for bounds of its rows.
#[derive(Debug, Clone)]
pub(in crate::train) struct Evidence {
    pub(in crate::train) statistics: Arc<Statistics>,
    /// For every row its weights over the group's features.
    pub(in crate::train) weights: Vec<Vec<f64>>,
}

/// The rows stored so far; each report comes with the row's residual energy and energy.
#[derive(Clone)]
pub(in crate::train) struct Build<'a> {
    plan: &'a Plan,
    pub(in crate::train) rows: Vec<Row>,
    pub(in crate::train) reports: Vec<Option<(RowReport, (f64, f64))>>,
    pub(in crate::train) evidence: BTreeMap<GroupId, Evidence>,
}

impl<'a> Build<'a> {
    /// A build without rows.
    pub(in crate::train) fn new(plan: &'a Plan) -> Self {
        let rows = plan.outputs.rows.end;
        Self { plan, rows: vec![Row::default(); rows], reports: vec![None; rows], evidence: BTreeMap::new() }
    }

    /// The model of the rows so far; rows that are still missing are zero.
    pub(in crate::train) fn model(&self, input: &TrainInput, settings: &TrainSettings) -> Result<ImplicitModel> {
        let shape = input.source.shape();
        let layout = layout(input);
        let (n, p) = (shape.states, shape.inputs);
        let (top, bottom) = self.rows.split_at(layout.rows());
        // A and B have a row per unit; rows of maps have no entries there.
        let none = Row::default();
        let units: Vec<&Row> = (0..layout.layers().len())
            .flat_map(|k| {
                let (layer, rows) = (&layout.layers()[k], &top[layout.row_range(k)]);
                let shared = layer.map.is_some() || layer.operator.is_some();
                (0..layer.size).map(|i| if shared { &none } else { &rows[i] }).collect::<Vec<_>>()
            })
            .collect();
        let columns = |rows: &[&Row], from: usize, cols: usize| {
            let inside = |&(place, v): &(Place, f32)| match place {
                Place::Column(j) if (from..from + cols).contains(&(j as usize)) => Some((j as usize - from, v)),
                _ => None,
            };
            Csr::from_rows(cols, rows.iter().map(|row| row.entries.iter().filter_map(inside).collect::<Vec<_>>()))
        };
        let outputs: Vec<&Row> = bottom.iter().collect();
        ImplicitModel::new(ModelParts {
            a: columns(&units, 0, n),
            b: columns(&units, n, p),
            c: columns(&outputs, 0, n),
            d: columns(&outputs, n, p),
            state_bias: top.iter().map(bias_of).collect(),
            output_bias: bottom.iter().map(bias_of).collect(),
            taps: self.tap_blocks(input, |_| true),
            layout: layout.clone(),
            preprocessing: input.preprocessing.clone(),
            metadata: ModelMetadata {
                kept: input.baseline.map_or_else(Vec::new, |b| choice::names(b, &self.plan.kept)),
                ..metadata(input, settings)
            },
        })
    }

    /// Number of stored non-zeros of a group.
    pub(in crate::train) fn nonzeros(&self, group: &Group) -> usize {
        self.reports[group.rows.clone()].iter().flatten().map(|(report, _)| report.nonzeros).sum()
    }

    /// Notes that a group has nothing to solve; `kept` are the rows that it has nevertheless.
    pub(in crate::train) fn skip(&mut self, group: &Group, kept: Vec<Vec<(Place, f32)>>) {
        let kept = kept.into_iter().chain(std::iter::repeat(Vec::new()));
        for (i, entries) in group.rows.clone().zip(kept) {
            let report = RowReport {
                name: row_name(i, self.plan.outputs.rows.start),
                nonzeros: entries.len(),
                relative_gap: None,
                at_limit: false,
                relative_residual: 0.0,
                target_rms: 0.0,
                bound_distance: None,
                proven: false,
                on_gpu: false,
            };
            self.reports[i] = Some((report, (0.0, 0.0)));
            self.rows[i] = Row { entries };
        }
    }

    /// One layer of the rows so far, or the outputs.
    pub(in crate::train) fn layer_sum(&self, input: &TrainInput, target: Target) -> Sum {
        let (layout, shape) = (layout(input), input.source.shape());
        let rows = match target {
            Target::Layer(k) => &self.rows[layout.row_range(k)],
            Target::Output => &self.rows[layout.rows()..],
        };
        let plain = |source: Source, columns: std::ops::Range<usize>| {
            let inside = |&(place, v): &(Place, f32)| match place {
                Place::Column(j) if columns.contains(&(j as usize)) => Some((j as usize - columns.start, v)),
                _ => None,
            };
            let rows = rows.iter().map(|row| row.entries.iter().filter_map(inside).collect::<Vec<_>>());
            let taps = Csr::from_rows(columns.len(), rows);
            let map = |channels| MapShape { channels, height: 1, width: 1 };
            (taps.nonzeros() > 0).then(|| TapBlock {
                target,
                source,
                maps: Vec::new(),
                window: Window::square(1, 1, 0),
                input: map(columns.len()),
                output: map(taps.rows()),
                groups: 1,
                weights: TapWeights::Taps(taps),
            })
        };
        let n = shape.states;
        let has_columns = rows.iter().any(|r| r.entries.iter().any(|(place, _)| matches!(place, Place::Column(_))));
        let mut blocks = Vec::new();
        if has_columns {
            blocks.extend(plain(Source::Input, n..n + shape.inputs));
            blocks.extend((0..layout.layers().len()).filter_map(|k| plain(Source::Layer(k), layout.range(k))));
        }
        blocks.extend(self.tap_blocks(input, |b| b.target == target));
        Sum::of_blocks(layout, shape.outputs, target, blocks, rows.iter().map(bias_of).collect())
    }

    /// The plan's blocks with their weights; skips that nothing uses are left out.
    fn tap_blocks(&self, input: &TrainInput, wanted: impl Fn(&TapBlock) -> bool) -> Vec<TapBlock> {
        let known = input.baseline.map_or(0, |b| b.taps().len());
        let layout = layout(input);
        let weighted = |(number, block): (usize, &TapBlock)| {
            let TapWeights::Taps(empty) = &block.weights else { return Some(block.clone()) };
            let rows = match block.target {
                Target::Layer(k) => layout.row_range(k),
                Target::Output => self.plan.outputs.rows.clone(),
            };
            let tap = |&(place, v): &(Place, f32)| match place {
                Place::Tap { block, column } if block as usize == number => Some((column as usize, v)),
                _ => None,
            };
            let rows = self.rows[rows].iter().map(|row| row.entries.iter().filter_map(tap).collect::<Vec<_>>());
            let taps = Csr::from_rows(empty.cols(), rows);
            (number < known || taps.nonzeros() > 0)
                .then(|| TapBlock { weights: TapWeights::Taps(taps), ..block.clone() })
        };
        self.plan.blocks.iter().enumerate().filter(|(_, block)| wanted(block)).filter_map(weighted).collect()
    }

    /// RMS of the mismatch of the outputs divided by the RMS of the outputs.
    pub(in crate::train) fn output_error(&self) -> f64 {
        let (mut residual, mut energy) = (0.0, 0.0);
        for (_, (r, e)) in self.reports[self.plan.outputs.rows.clone()].iter().flatten() {
            residual += r;
            energy += e;
        }
        if energy > 0.0 { (residual / energy).sqrt() } else { 0.0 }
    }
}

/// A row's name in reports: of states, then of outputs.
pub(in crate::train) fn row_name(i: usize, first_output: usize) -> String {
    if i < first_output { format!("z[{i}]") } else { format!("y[{}]", i - first_output) }
}

/// The constant of a row.
fn bias_of(row: &Row) -> f32 {
    row.entries.iter().find(|(place, _)| *place == Place::Constant).map_or(0.0, |e| e.1)
}
