//! Shared weights over a grid: convolutions of any window, stride and dilation, and products, as offsets into a padded map.
//!
//! A result is a grid of positions; weight k of a row reads the source `offset` positions further on than the result. Maps
//! are positions × lanes (samples side by side), each with its own distance between rows, so that padding is part of the
//! map and no border needs a branch. A few rows × vectors of results stay in registers over the taps of a row of weights,
//! and taps are cut into chunks whose piece of the source stays in the first-level cache over all rows.

use super::Instructions;
use super::block::{Extra, Task};
use super::cost::{Choice, Cost};
use super::vector::Portable;
#[cfg(target_arch = "x86_64")]
use super::vector::{Avx2, Avx512, Half};

/// Rows of weights in a dense panel.
pub(super) const WEIGHTS_PER_PANEL: usize = 8;

/// A weight that is not zero.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tap {
    pub(super) offset: u32,
    pub(super) value: f32,
}

/// One row of weights in one chunk, or a dense panel of `rows` rows.
#[derive(Debug, Clone, Copy)]
pub(super) struct Item {
    pub(super) row: u32,
    /// 0 for a sparse row.
    pub(super) rows: u32,
    /// Taps, or offsets of a panel.
    pub(super) start: u32,
    pub(super) end: u32,
    /// First weight of a panel.
    pub(super) values: usize,
}

/// Rows of weights laid out in the order of use.
#[derive(Debug, Clone)]
pub struct GridWeights {
    rows: usize,
    /// Items of every chunk: all rows in each.
    chunks: Vec<std::ops::Range<usize>>,
    items: Vec<Item>,
    taps: Vec<Tap>,
    offsets: Vec<u32>,
    panels: Vec<f32>,
    /// The largest offset.
    reach: usize,
    dense_rows: usize,
}

/// The entries of a row whose columns lie within a range.
fn part<'a>(row: &'a [(usize, f32)], within: &std::ops::Range<usize>) -> &'a [(usize, f32)] {
    let at = |column: usize| row.partition_point(|(own, _)| *own < column);
    &row[at(within.start)..at(within.end)]
}

/// The shape of a call, in positions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grid {
    /// Rows of the result.
    pub height: usize,
    /// Columns of the result.
    pub width: usize,
    /// Samples side by side.
    pub lanes: usize,
    /// From the source position of a result to that of the result below it.
    pub source_row: usize,
    /// The same to the right; other than 1 needs a multiple of 16 lanes.
    pub source_step: usize,
    /// From a result to the one below it.
    pub out_row: usize,
    /// From a result of one row of weights to that of the next.
    pub out_channel: usize,
}

/// A map of the result's shape that is added to it.
#[derive(Debug, Clone, Copy)]
pub struct Residual<'a> {
    /// From its first value on.
    pub from: &'a [f32],
    /// Positions between its rows.
    pub row: usize,
    /// Positions between its channels.
    pub channel: usize,
}

/// What happens to a result besides its weights.
#[derive(Debug, Clone, Copy, Default)]
pub struct Finish<'a> {
    /// Where sums start, one number per row; without it they are added to what is there.
    pub bias: Option<&'a [f32]>,
    /// Added to the bias; only with a bias.
    pub before: Option<Residual<'a>>,
    /// Added to the sum.
    pub after: Option<Residual<'a>>,
    /// Negative results become 0.
    pub relu: bool,
}

impl GridWeights {
    /// Lays out rows of (column, weight), columns ascending; column j reads `offsets[j]` positions further on. `group`
    /// columns belong to one channel of the operand and chunks are whole channels. `footprint` is how many bytes of the
    /// source a block of results reads per channel; `cost` says where zeros are left out.
    ///
    /// # Panics
    /// If a column has no offset, or columns do not ascend.
    pub fn new(rows: &[Vec<(usize, f32)>], offsets: &[usize], group: usize, footprint: usize, cost: Cost) -> Self {
        let sorted: Vec<Vec<(usize, f32)>> =
            rows.iter().map(|row| row.iter().copied().filter(|(_, v)| *v != 0.0).collect()).collect();
        assert!(sorted.iter().all(|row: &Vec<(usize, f32)>| row.windows(2).all(|w| w[0].0 < w[1].0)));
        let reach = sorted.iter().flatten().map(|(column, _)| offsets[*column]).max().unwrap_or(0);
        let group = group.max(1);
        let channels = offsets.len().div_ceil(group).max(1);
        let nonzeros: usize = sorted.iter().map(Vec::len).sum();
        let each = nonzeros as f64 / (sorted.len().max(1) * channels) as f64;
        // As many channels as fit the first-level cache, and enough taps to pay for loading the sums again.
        let fitting = (cost.cache / footprint.max(1)).max((cost.taps_per_chunk / each.max(1e-3)) as usize).max(1);
        let chunk_count = channels.div_ceil(fitting).max(1);
        let span = channels.div_ceil(chunk_count) * group;
        let mut out = Self {
            rows: rows.len(),
            chunks: Vec::new(),
            items: Vec::new(),
            taps: Vec::new(),
            offsets: Vec::new(),
            panels: Vec::new(),
            reach,
            dense_rows: 0,
        };
        let mut panels = Vec::new();
        for first in (0..rows.len()).step_by(WEIGHTS_PER_PANEL) {
            let panel = first..(first + WEIGHTS_PER_PANEL).min(rows.len());
            let mut union: Vec<usize> = sorted[panel.clone()].iter().flatten().map(|(column, _)| *column).collect();
            let nonzeros = union.len();
            union.sort_unstable();
            union.dedup();
            let dense = cost.choose(panel.len(), union.len(), nonzeros) == Choice::Dense;
            out.dense_rows += if dense { panel.len() } else { 0 };
            panels.push((panel, union, dense));
        }
        for k in 0..chunk_count {
            let begin = out.items.len();
            let within = k * span..(k + 1) * span;
            for (panel, union, dense) in &panels {
                if *dense {
                    let start = union.partition_point(|o| *o < within.start);
                    let end = union.partition_point(|o| *o < within.end);
                    let begin = out.offsets.len();
                    let values = out.panels.len();
                    out.offsets.extend(union[start..end].iter().map(|o| offsets[*o] as u32));
                    out.panels.resize(values + (end - start) * WEIGHTS_PER_PANEL, 0.0);
                    for (i, row) in panel.clone().enumerate() {
                        let mut at = start;
                        for &(column, value) in part(&sorted[row], &within) {
                            while union[at] < column {
                                at += 1;
                            }
                            out.panels[values + (at - start) * WEIGHTS_PER_PANEL + i] = value;
                        }
                    }
                    out.items.push(Item {
                        row: panel.start as u32,
                        rows: panel.len() as u32,
                        start: begin as u32,
                        end: out.offsets.len() as u32,
                        values,
                    });
                } else {
                    for row in panel.clone() {
                        let start = out.taps.len();
                        let taps = part(&sorted[row], &within);
                        out.taps.extend(taps.iter().map(|&(o, value)| Tap { offset: offsets[o] as u32, value }));
                        let end = out.taps.len();
                        out.items.push(Item {
                            row: row as u32,
                            rows: 0,
                            start: start as u32,
                            end: end as u32,
                            values: 0,
                        });
                    }
                }
            }
            out.chunks.push(begin..out.items.len());
        }
        out
    }

    /// Lays out a dense matrix, row by row, without looking for zeros.
    ///
    /// # Panics
    /// If the values are not rows × offsets.
    pub fn dense(values: &[f32], rows: usize, offsets: &[usize], cost: Cost) -> Self {
        let columns = offsets.len();
        assert_eq!(values.len(), rows * columns);
        // A chunk of offsets whose weights, eight rows of them, stay in the first-level cache with the source.
        let span = (cost.cache / 96).max(1);
        let mut out = Self {
            rows,
            chunks: Vec::new(),
            items: Vec::new(),
            taps: Vec::new(),
            offsets: offsets.iter().map(|o| *o as u32).collect(),
            panels: vec![0.0; rows.next_multiple_of(WEIGHTS_PER_PANEL) * columns],
            reach: offsets.iter().copied().max().unwrap_or(0),
            dense_rows: rows,
        };
        let mut at = 0;
        for start in (0..columns.max(1)).step_by(span) {
            let (begin, end) = (out.items.len(), (start + span).min(columns));
            for first in (0..rows).step_by(WEIGHTS_PER_PANEL) {
                let count = WEIGHTS_PER_PANEL.min(rows - first);
                let (start, end) = (start as u32, end as u32);
                out.items.push(Item { row: first as u32, rows: count as u32, start, end, values: at });
                for i in 0..count {
                    let row = &values[(first + i) * columns..(first + i + 1) * columns];
                    for (k, v) in row[start as usize..end as usize].iter().enumerate() {
                        out.panels[at + k * WEIGHTS_PER_PANEL + i] = *v;
                    }
                }
                at += (end - start) as usize * WEIGHTS_PER_PANEL;
            }
            out.chunks.push(begin..out.items.len());
        }
        out
    }

    /// Rows of weights.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Whether all weights are zero.
    pub fn is_empty(&self) -> bool {
        self.taps.is_empty() && self.offsets.is_empty()
    }

    /// The share of rows whose zeros are multiplied.
    pub fn dense_share(&self) -> f64 {
        self.dense_rows as f64 / self.rows.max(1) as f64
    }

    /// Results from `source` into `out`: see [`Grid`] and [`Finish`].
    ///
    /// # Panics
    /// If a slice is too short; sizes are the caller's own arithmetic, never data.
    pub fn run(&self, instructions: Instructions, grid: &Grid, source: &[f32], out: &mut [f32], finish: &Finish<'_>) {
        let mut g = *grid;
        if self.rows == 0 || g.height == 0 || g.width == 0 || g.lanes == 0 {
            return;
        }
        assert!(g.source_step == 1 || g.lanes.is_multiple_of(16), "neighbours that are apart are whole vectors");
        let residuals = [finish.before, finish.after];
        // Without gaps between rows the grid is one long row.
        if g.source_step == 1
            && g.source_row == g.width
            && g.out_row == g.width
            && residuals.iter().flatten().all(|r| r.row == g.width)
        {
            g = Grid { height: 1, width: g.height * g.width, ..g };
        }
        let last = |row: usize, step: usize| (g.height - 1) * row + (g.width - 1) * step;
        assert!((last(g.source_row, g.source_step) + self.reach + 1) * g.lanes <= source.len());
        assert!(((self.rows - 1) * g.out_channel + last(g.out_row, 1) + 1) * g.lanes <= out.len());
        assert!(g.out_row >= g.width || g.height == 1, "results do not overlap");
        assert!(finish.bias.is_none_or(|b| b.len() >= self.rows));
        assert!(finish.before.is_none() || finish.bias.is_some());
        for r in residuals.iter().flatten() {
            assert!(((self.rows - 1) * r.channel + last(r.row, 1) + 1) * g.lanes <= r.from.len());
        }
        let extra = |r: Option<Residual<'_>>| {
            r.map(|r| Extra { from: r.from.as_ptr(), row: r.row * g.lanes, channel: r.channel * g.lanes })
        };
        let apart = g.source_step != 1;
        // Groups of 16 lanes of a position that are apart are grids of their own: a position is then whole vectors.
        let task = Task {
            chunks: &self.chunks,
            items: &self.items,
            taps: &self.taps,
            offsets: &self.offsets,
            panels: &self.panels,
            bias: finish.bias,
            relu: finish.relu,
            source: source.as_ptr(),
            out: out.as_mut_ptr(),
            before: extra(finish.before),
            after: extra(finish.after),
            lanes: g.lanes,
            step: g.source_step * g.lanes,
            source_row: g.source_row * g.lanes,
            out_row: g.out_row * g.lanes,
            out_channel: g.out_channel * g.lanes,
            height: g.height,
            run: g.width * g.lanes,
        };
        assert!(!apart || g.lanes == 16, "neighbours that are apart are 16 lanes each");
        // Vectors of 8 where operands straddle cache lines, or where half of a vector of 16 would be thrown away.
        let run = g.width * g.lanes;
        let wasted = (1..=8).contains(&(run % 16)) && run < 48;
        let halves = !g.lanes.is_multiple_of(16) && (wasted || self.dense_rows * 2 < self.rows);
        // SAFETY: the assertions above bound every address of the task; `available` was asked for the instructions.
        unsafe {
            match instructions {
                #[cfg(target_arch = "x86_64")]
                Instructions::Avx512 if Instructions::available().contains(&Instructions::Avx512) => {
                    if apart {
                        avx512::<true>(&task);
                    } else if halves {
                        half(&task);
                    } else {
                        avx512::<false>(&task);
                    }
                }
                #[cfg(target_arch = "x86_64")]
                Instructions::Avx2 if Instructions::available().contains(&Instructions::Avx2) => {
                    if apart {
                        avx2::<true>(&task)
                    } else {
                        avx2::<false>(&task)
                    }
                }
                _ if apart => task.all::<Portable, true>(),
                _ => task.all::<Portable, false>(),
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vl,avx2,fma")]
unsafe fn avx512<const APART: bool>(task: &Task<'_>) {
    // SAFETY: the caller's task is sound, and this function has the instructions.
    unsafe { task.all::<Avx512, APART>() }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vl,avx2,fma")]
unsafe fn half(task: &Task<'_>) {
    // SAFETY: the caller's task is sound, and this function has the instructions.
    unsafe { task.all::<Half, false>() }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn avx2<const APART: bool>(task: &Task<'_>) {
    // SAFETY: the caller's task is sound, and this function has the instructions.
    unsafe { task.all::<Avx2, APART>() }
}
