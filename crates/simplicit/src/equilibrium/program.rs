//! A model prepared for running: states in schedule order, matrices in tiles, and the norms that certify the result.
//!
//! The equation x = φ(Ax + Bu + b), y = Cx + Du + d and its adjoint w = Φ(Aᵀw + Cᵀv), g = Bᵀw + Dᵀv have the same form;
//! both are programs. They differ in what φ is and in the norm in which the cycle contracts.

use std::ops::Range;

use super::schedule::Schedule;
use crate::layout::Activation;
use crate::linalg::Csr;
use crate::linalg::tiles::{TILE, Tiles};
use crate::model::component_contraction;

/// The norm in which errors are measured over the states of a stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Norm {
    /// max |x_i|, for the states.
    Max,
    /// Σ |w_i|, for the adjoint.
    Sum,
}

impl Norm {
    pub(super) fn add(self, total: f64, value: f64) -> f64 {
        match self {
            // Not f64::max, which would lose a NaN.
            Norm::Max if value <= total || total.is_nan() => total,
            Norm::Max => value,
            Norm::Sum => total + value,
        }
    }
}

/// The equation that is laid out.
pub(super) struct Equation<'a> {
    pub(super) a: &'a Csr<f32>,
    pub(super) b: &'a Csr<f32>,
    pub(super) c: &'a Csr<f32>,
    pub(super) d: &'a Csr<f32>,
    pub(super) state_bias: &'a [f32],
    pub(super) output_bias: &'a [f32],
    /// φ of every state; with `None`, states are multiplied by gates that are given at run time.
    pub(super) activations: Option<&'a [Activation]>,
    pub(super) norm: Norm,
    /// The matrix whose |A|s ≤ ρs certifies: `a` itself, or for the adjoint the matrix it is the transpose of.
    pub(super) contracting: &'a Csr<f32>,
}

/// Norms of everything a stage reads: the error bound of its states is a weighted sum of its sources' bounds.
pub(super) struct Reads {
    /// Largest number of terms in a row.
    pub(super) terms: usize,
    pub(super) bias: f64,
    pub(super) inputs: f64,
    /// Pairs of a stage and the norm of the block that reads it.
    pub(super) stages: Vec<(usize, f64)>,
}

/// A stage whose states read each other: computed in double precision until the certificate is good enough.
pub(super) struct Cycle {
    /// Its first row in the array of cyclic pre-activations.
    pub(super) first: usize,
    pub(super) from_stages: Tiles<f64>,
    pub(super) inside: Tiles<f64>,
    pub(super) inside_nonzeros: usize,
    pub(super) inside_norm: f64,
    pub(super) bias: Vec<f64>,
    /// The weight of every state in the norm in which the cycle contracts.
    pub(super) weights: Vec<f64>,
    pub(super) norm: Norm,
    /// The contraction factor in that norm; at 1 or more nothing can be certified.
    pub(super) rho: f64,
}

pub(super) struct StageCode {
    /// Places of its states in schedule order.
    pub(super) range: Range<usize>,
    /// Ranges of places with one activation, counted from the start of the stage.
    pub(super) segments: Vec<(Range<usize>, Activation)>,
    pub(super) reads: Reads,
    /// What an acyclic stage reads from other stages.
    pub(super) from_stages: Tiles<f32>,
    pub(super) cycle: Option<Cycle>,
}

pub(super) struct Program {
    pub(super) inputs: usize,
    pub(super) outputs: usize,
    pub(super) norm: Norm,
    /// The state at every place of the schedule order.
    pub(super) order: Vec<usize>,
    pub(super) gated: bool,
    /// Rows: all places, then the outputs. Rows of cyclic states are empty.
    pub(super) from_inputs: Tiles<f32>,
    /// Rows: the cyclic states of all stages, in order.
    pub(super) cycles_from_inputs: Tiles<f64>,
    /// Tiles of inputs that a state or an output reads, with their places in the two matrices above.
    pub(super) input_tiles: Vec<InputTile>,
    pub(super) bias: Vec<f32>,
    pub(super) stages: Vec<StageCode>,
    pub(super) outputs_from_stages: Tiles<f32>,
    pub(super) output_reads: Reads,
    pub(super) cyclic_units: usize,
    /// Multiply-adds per sample outside of cycles.
    pub(super) multiply_adds: u64,
}

pub(super) struct InputTile {
    pub(super) tile: usize,
    pub(super) features: usize,
    pub(super) single: Option<usize>,
    pub(super) double: Option<usize>,
}

impl Program {
    /// Lays the equation out for the states that are `wanted`.
    pub(super) fn new(equation: &Equation<'_>, wanted: impl Fn(usize) -> bool) -> Self {
        let e = equation;
        let schedule = Schedule::new(e.a, wanted);
        let mut order = Vec::new();
        let mut ranges = Vec::new();
        let mut segment_lists = Vec::new();
        for stage in &schedule.stages {
            let mut units = stage.units.clone();
            let mut segments: Vec<(Range<usize>, Activation)> = Vec::new();
            if let Some(activations) = e.activations {
                // One range per activation; the sort is stable, so states keep their order within a range.
                let mut kinds: Vec<Activation> = Vec::new();
                for &i in &units {
                    if !kinds.contains(&activations[i]) {
                        kinds.push(activations[i]);
                    }
                }
                units.sort_by_key(|&i| kinds.iter().position(|k| *k == activations[i]));
                for (k, &i) in units.iter().enumerate() {
                    match segments.last_mut() {
                        Some((range, kind)) if *kind == activations[i] => range.end = k + 1,
                        _ => segments.push((k..k + 1, activations[i])),
                    }
                }
            }
            ranges.push(order.len()..order.len() + units.len());
            segment_lists.push(segments);
            order.extend(units);
        }
        let count = order.len();
        let mut place = vec![usize::MAX; e.a.rows()];
        let mut stage_of = vec![usize::MAX; e.a.rows()];
        for (s, range) in ranges.iter().enumerate() {
            for k in range.clone() {
                place[order[k]] = k;
                stage_of[order[k]] = s;
            }
        }
        let nothing = Vec::new;
        let in_order = |m: &Csr<f32>, i: usize, keep: &dyn Fn(usize) -> bool| -> Vec<(usize, f32)> {
            let mut row: Vec<_> = m.row(i).filter(|&(j, _)| keep(j)).map(|(j, v)| (place[j], v)).collect();
            row.sort_unstable_by_key(|(j, _)| *j);
            row
        };
        let mut stages = Vec::new();
        let mut cyclic_units = 0;
        let mut multiply_adds = e.d.nonzeros();
        let mut blocks = BlockNorms::new(e, &stage_of, schedule.stages.len());
        let mut local = vec![usize::MAX; e.a.rows()];
        for (s, (stage, range)) in schedule.stages.iter().zip(&ranges).enumerate() {
            let units = &order[range.clone()];
            let outside = |j: usize| stage_of[j] != s;
            let from = Csr::from_rows(count, units.iter().map(|&i| in_order(e.a, i, &outside)));
            multiply_adds += from.nonzeros() + units.iter().map(|&i| e.b.row(i).count()).sum::<usize>();
            let mut weights = vec![1.0; units.len()];
            let mut cycle = None;
            if stage.cyclic {
                units.iter().enumerate().for_each(|(k, &i)| local[i] = k);
                let contraction = component_contraction(e.contracting, units, &local);
                units.iter().for_each(|&i| local[i] = usize::MAX);
                weights = contraction
                    .scaling
                    .iter()
                    .map(|s| match e.norm {
                        Norm::Max => 1.0 / s,
                        Norm::Sum => *s,
                    })
                    .collect();
                let inside = Csr::from_rows(
                    units.len(),
                    units.iter().map(|&i| {
                        let row = in_order(e.a, i, &|j| stage_of[j] == s);
                        row.into_iter().map(|(j, v)| (j - range.start, v)).collect::<Vec<_>>()
                    }),
                );
                cycle = Some(Cycle {
                    first: cyclic_units,
                    from_stages: Tiles::new(&from),
                    inside: Tiles::new(&inside),
                    inside_nonzeros: inside.nonzeros(),
                    inside_norm: blocks.inside(units, &weights, s),
                    bias: units.iter().map(|&i| f64::from(e.state_bias[i])).collect(),
                    weights: weights.clone(),
                    norm: e.norm,
                    rho: contraction.rho,
                });
                cyclic_units += units.len();
            }
            let empty = Csr::empty(units.len(), count);
            stages.push(StageCode {
                range: range.clone(),
                segments: std::mem::take(&mut segment_lists[s]),
                reads: blocks.reads(units, e.a, e.b, e.state_bias, &weights, Some(s)),
                from_stages: Tiles::new(if stage.cyclic { &empty } else { &from }),
                cycle,
            });
        }
        let cyclic = |k: usize| schedule.stages[stage_of[order[k]]].cyclic;
        let rows = (0..count).map(|k| if cyclic(k) { nothing() } else { e.b.row(order[k]).collect() });
        let from_inputs = Tiles::new(&Csr::from_rows(
            e.b.cols(),
            rows.chain((0..e.d.rows()).map(|i| e.d.row(i).collect::<Vec<_>>())),
        ));
        let rows = (0..count).filter(|&k| cyclic(k)).map(|k| e.b.row(order[k]).collect::<Vec<_>>());
        let cycles_from_inputs = Tiles::new(&Csr::from_rows(e.b.cols(), rows));
        let outputs: Vec<usize> = (0..e.c.rows()).collect();
        let from = Csr::from_rows(count, outputs.iter().map(|&i| in_order(e.c, i, &|_| true)));
        multiply_adds += from.nonzeros();
        let ones = vec![1.0; outputs.len()];
        Self {
            inputs: e.b.cols(),
            outputs: e.c.rows(),
            norm: e.norm,
            gated: e.activations.is_none(),
            input_tiles: input_tiles(&from_inputs, &cycles_from_inputs, e.b.cols()),
            from_inputs,
            cycles_from_inputs,
            bias: order.iter().map(|&i| e.state_bias[i]).chain(e.output_bias.iter().copied()).collect(),
            stages,
            outputs_from_stages: Tiles::new(&from),
            output_reads: blocks.reads(&outputs, e.c, e.d, e.output_bias, &ones, None),
            order,
            cyclic_units,
            multiply_adds: multiply_adds as u64,
        }
    }

    /// Number of states in this program.
    pub(super) fn units(&self) -> usize {
        self.order.len()
    }

    /// Number of states, padded to whole tiles.
    pub(super) fn padded_units(&self) -> usize {
        self.order.len().next_multiple_of(TILE)
    }

    /// Number of states of the largest cycle.
    pub(super) fn largest_cycle(&self) -> usize {
        self.stages.iter().filter(|s| s.cycle.is_some()).map(|s| s.range.len()).max().unwrap_or(0)
    }
}

fn input_tiles(single: &Tiles<f32>, double: &Tiles<f64>, inputs: usize) -> Vec<InputTile> {
    let mut found = std::collections::BTreeMap::<usize, (Option<usize>, Option<usize>)>::new();
    single.occupied().enumerate().for_each(|(k, tile)| found.entry(tile).or_default().0 = Some(k));
    double.occupied().enumerate().for_each(|(k, tile)| found.entry(tile).or_default().1 = Some(k));
    found
        .into_iter()
        .map(|(tile, (single, double))| InputTile { tile, features: (inputs - tile * TILE).min(TILE), single, double })
        .collect()
}

/// Norms of blocks between stages: largest weighted row sum (max norm) or column sum (sum norm) of magnitudes.
struct BlockNorms<'a> {
    norm: Norm,
    a: &'a Csr<f32>,
    stage_of: &'a [usize],
    per_stage: Vec<f64>,
    per_column: Vec<f64>,
}

impl<'a> BlockNorms<'a> {
    fn new(e: &Equation<'a>, stage_of: &'a [usize], stages: usize) -> Self {
        let columns = match e.norm {
            Norm::Max => 0,
            Norm::Sum => e.a.rows().max(e.b.cols()),
        };
        Self { norm: e.norm, a: e.a, stage_of, per_stage: vec![0.0; stages], per_column: vec![0.0; columns] }
    }

    fn inside(&mut self, units: &[usize], weights: &[f64], stage: usize) -> f64 {
        let rows = units.iter().map(|&i| self.a.row(i));
        let stage_of = self.stage_of;
        let keep = move |j: usize| (stage_of[j] == stage).then_some(stage);
        blocks(self.norm, &mut self.per_stage, &mut self.per_column, rows, weights, keep)
            .first()
            .map_or(0.0, |(_, norm)| *norm)
    }

    fn reads(
        &mut self,
        rows: &[usize],
        states: &Csr<f32>,
        inputs: &Csr<f32>,
        bias: &[f32],
        weights: &[f64],
        own: Option<usize>,
    ) -> Reads {
        let stage_of = self.stage_of;
        let keep = move |j: usize| Some(stage_of[j]).filter(|s| Some(*s) != own && *s != usize::MAX);
        let iter = rows.iter().map(|&i| states.row(i));
        let stages = blocks(self.norm, &mut self.per_stage, &mut self.per_column, iter, weights, keep);
        let iter = rows.iter().map(|&i| inputs.row(i));
        // The inputs are one block, so any stage number can be used.
        let mut one = [0.0];
        let found = blocks(self.norm, &mut one, &mut self.per_column, iter, weights, |_| Some(0));
        let length = |m: &Csr<f32>, i: usize| m.indptr()[i + 1] - m.indptr()[i];
        Reads {
            terms: rows.iter().map(|&i| length(states, i) + length(inputs, i) + 1).max().unwrap_or(0),
            bias: rows
                .iter()
                .zip(weights)
                .fold(0.0, |total, (&i, w)| self.norm.add(total, w * f64::from(bias[i]).abs())),
            inputs: found.first().map_or(0.0, |(_, norm)| *norm),
            stages,
        }
    }
}

fn blocks<R: Iterator<Item = (usize, f32)>>(
    norm: Norm,
    per_stage: &mut [f64],
    per_column: &mut [f64],
    rows: impl Iterator<Item = R>,
    weights: &[f64],
    stage: impl Fn(usize) -> Option<usize>,
) -> Vec<(usize, f64)> {
    let mut found = std::collections::BTreeMap::<usize, f64>::new();
    let mut touched = Vec::new();
    for (row, weight) in rows.zip(weights) {
        for (j, value) in row {
            let Some(s) = stage(j) else { continue };
            let size = weight * f64::from(value).abs();
            let (sums, at) = match norm {
                Norm::Max => (&mut *per_stage, s),
                Norm::Sum => (&mut *per_column, j),
            };
            if sums[at] == 0.0 {
                touched.push((s, at));
            }
            sums[at] += size;
        }
        if norm == Norm::Max {
            for (s, at) in touched.drain(..) {
                let largest = found.entry(s).or_insert(0.0);
                *largest = largest.max(std::mem::take(&mut per_stage[at]));
            }
        }
    }
    for (s, at) in touched {
        let largest = found.entry(s).or_insert(0.0);
        *largest = largest.max(std::mem::take(&mut per_column[at]));
    }
    // Sums of a few thousand terms in double precision: this margin covers their rounding.
    found.into_iter().map(|(s, norm)| (s, norm * (1.0 + 1e-9))).collect()
}
