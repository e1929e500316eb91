//! Weights that are shared over a grid: convolutions of any window, stride and dilation, and products, as offsets
//! into a padded map.
//!
//! A result is a grid of positions; weight k of a row reads the source `offset` positions further on than the result. Maps
//! are positions × lanes (samples side by side), each with its own distance between rows, so that padding is part of the
//! map and no border needs a branch. A few rows × vectors of results stay in registers over the taps of a row of weights,
//! and taps are cut into chunks whose piece of the source stays in the first-level cache over all rows.

use std::borrow::Cow;

use super::Instructions;
use super::block::{Extra, Part, Task, edge};
use super::cost::{Choice, Cost};
use super::pool::Crew;
use super::vector::Portable;
#[cfg(target_arch = "x86_64")]
use super::vector::{Avx2, Avx512, Half};

/// Number of rows of weights in a dense panel.
pub(super) const WEIGHTS_PER_PANEL: usize = 8;

/// A weight that is not zero.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tap {
    pub(super) offset: u32,
    pub(super) value: f32,
}

/// Number of sparse rows that a bundle multiplies in turn, so that none waits for its own sum.
pub(super) const ROWS_PER_BUNDLE: usize = 4;

/// A weight of every row of a bundle. Their four offsets lie in one word: sparse rows wait for loads, and this is one
/// load instead of four.
#[derive(Debug, Clone, Copy)]
pub(super) struct Round {
    /// Four offsets of sixteen bits, counted from the offset at which the bundle starts, in steps of the power of two
    /// that divides all offsets.
    offsets: u64,
    pub(super) values: [f32; ROWS_PER_BUNDLE],
}

impl Round {
    /// The offset that the weight of a row reads, in steps from the start of the bundle.
    #[inline(always)]
    pub(super) fn offset(&self, row: usize) -> usize {
        (self.offsets >> (16 * row)) as u16 as usize
    }
}

/// Within blocks of this many, sparse rows are sorted by their number of taps, in every chunk anew: the processor
/// then guesses where a row ends, and rows of a bundle are about as long. Threads share whole blocks of them, so that
/// a row is computed by the same thread in all chunks.
const ROWS_IN_ORDER: usize = 64;

/// From this many taps per sparse row and chunk on, a block has sixteen sums. The results of a shorter row are done
/// sooner, and twice as many of them at a time would leave less of the operand in the first-level cache.
const TAPS_OF_A_LONG_ROW: usize = 16;

/// The kinds of items.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// A sparse row.
    Row,
    /// Sparse rows side by side, multiplied in turn with one tap of each.
    Bundle,
    /// Dense rows side by side.
    Panel,
}

/// One row of weights, or several of them, in one chunk.
#[derive(Debug, Clone, Copy)]
pub(super) struct Item {
    pub(super) kind: Kind,
    /// The first row; for a bundle, the place of its rows in the list of bundled rows.
    pub(super) row: u32,
    pub(super) rows: u32,
    /// The place of its first tap, round of a bundle, or offset of a panel.
    pub(super) start: u32,
    pub(super) end: u32,
    /// The place of a panel's first weight; for a bundle, the offset that its rows count from.
    pub(super) values: usize,
}

/// Rows of weights laid out in the order of use.
#[derive(Debug, Clone)]
pub struct GridWeights {
    rows: usize,
    /// The items of every chunk; each chunk has all rows.
    chunks: Vec<std::ops::Range<usize>>,
    items: Vec<Item>,
    taps: Vec<Tap>,
    rounds: Vec<Round>,
    /// The rows in bundles, in the order of the bundles.
    bundled: Vec<u32>,
    /// Number of items of sparse rows, which are the last ones of every chunk, and number of those that are not
    /// divided among threads.
    sparse_items: usize,
    items_in_order: usize,
    /// Whether sparse rows have enough taps in a chunk to make sixteen sums worthwhile.
    long: bool,
    offsets: Vec<u32>,
    /// The edge flags of every offset.
    edges: Vec<u8>,
    /// Whether any offset reads padding; to find one would take as long as a small layer.
    bordered: bool,
    panels: Vec<f32>,
    /// The largest offset.
    reach: usize,
    /// A power of two that divides all offsets.
    even: usize,
    dense_rows: usize,
    /// Time of dense panels divided by that of sparse rows, by the costs.
    dense_over_sparse: f64,
    /// Time of the chosen layout, in multiply-adds of dense panels.
    time: f64,
}

/// Which columns of a window read only zeros of the padding, for the first and last row and column of results.
#[derive(Debug, Clone, Copy)]
pub struct Borders {
    /// Rows and columns of the window.
    pub kernel: [usize; 2],
    /// Rows of the window above the map for the first row of results, and below it for the last.
    pub rows: [usize; 2],
    /// The same for columns, left and right.
    pub columns: [usize; 2],
}

impl Borders {
    /// The share of the taps of a dense panel that read the map and not its padding, which panels leave out of blocks of four positions
    /// of 16 samples.
    pub fn inside(&self, instructions: Instructions, grid: &Grid) -> f64 {
        if instructions != Instructions::Avx512 || grid.lanes != 16 || grid.width < 4 {
            return 1.0;
        }
        let share = |results: usize, kernel: usize, [before, after]: [usize; 2]| {
            1.0 - (before + after).min(kernel) as f64 / (results * kernel).max(1) as f64
        };
        share(grid.height, self.kernel[0], self.rows) * share(grid.width, self.kernel[1], self.columns)
    }

    fn of(&self, column: usize) -> u8 {
        let [kh, kw] = self.kernel;
        let (dy, dx) = (column / kw % kh, column % kw);
        let mark = |is: bool, border: u8| if is { border } else { 0 };
        mark(dy < self.rows[0], edge::TOP)
            | mark(dy + self.rows[1] >= kh, edge::BOTTOM)
            | mark(dx < self.columns[0], edge::LEFT)
            | mark(dx + self.columns[1] >= kw, edge::RIGHT)
    }
}

/// The entries of a row whose columns lie within a range.
fn part<'a>(row: &'a [(usize, f32)], within: &std::ops::Range<usize>) -> &'a [(usize, f32)] {
    let at = |column: usize| row.partition_point(|(own, _)| *own < column);
    &row[at(within.start)..at(within.end)]
}

/// The largest power of two that divides all of these; if all are zero, that of a cache line.
fn evenness(offsets: impl Iterator<Item = usize>) -> usize {
    1 << offsets.fold(16, |all, offset| all | offset).trailing_zeros()
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
    /// Distance from the source position of a result to that of the result below it.
    pub source_row: usize,
    /// Distance to the source position of the result to the right; other than 1 needs a multiple of 16 lanes.
    pub source_step: usize,
    /// Distance from a result to the one below it.
    pub out_row: usize,
    /// Distance from a result of one row of weights to that of the next.
    pub out_channel: usize,
}

/// A map of the result's shape that is added to it.
#[derive(Debug, Clone, Copy)]
pub struct Residual<'a> {
    /// The values, from the first one of the map on.
    pub from: &'a [f32],
    /// Positions between its rows.
    pub row: usize,
    /// Positions between its channels.
    pub channel: usize,
}

/// What is applied to a result in addition to its weights.
#[derive(Debug, Clone, Copy, Default)]
pub struct Finish<'a> {
    /// The values at which sums start, one per row of weights; without it, sums are added to the values that are
    /// there.
    pub bias: Option<&'a [f32]>,
    /// A map that is added to the bias; only with a bias.
    pub before: Option<Residual<'a>>,
    /// A map that is added to the sum.
    pub after: Option<Residual<'a>>,
    /// Whether negative results become 0.
    pub relu: bool,
}

impl GridWeights {
    /// Lays out rows of (column, weight), columns ascending; column j reads `offsets[j]` positions further on.
    /// `group` columns belong to one channel of the operand and chunks are whole channels; `borders` says which of
    /// them read padding. `footprint` is the number of bytes of the source that a block of results reads per channel.
    /// `cost` decides where zeros are left out.
    ///
    /// # Panics
    /// If a column has no offset, or columns do not ascend.
    pub fn new(
        rows: &[Vec<(usize, f32)>],
        offsets: &[usize],
        group: usize,
        footprint: usize,
        borders: Option<Borders>,
        cost: Cost,
    ) -> Self {
        // Zeros are rare among the weights, and the rows of a large layer would be a copy of four times the size of
        // its weights.
        let is_zero = |(_, v): &(usize, f32)| *v == 0.0;
        let without_zeros = |row: &Vec<(usize, f32)>| row.iter().copied().filter(|e| !is_zero(e)).collect();
        let sorted: Cow<'_, [Vec<(usize, f32)>]> = match rows.iter().flatten().any(is_zero) {
            true => Cow::Owned(rows.iter().map(without_zeros).collect()),
            false => Cow::Borrowed(rows),
        };
        assert!(sorted.iter().all(|row: &Vec<(usize, f32)>| row.windows(2).all(|w| w[0].0 < w[1].0)));
        let read = || sorted.iter().flatten().map(|(column, _)| offsets[*column]);
        let (reach, even) = (read().max().unwrap_or(0), evenness(read()));
        let group = group.max(1);
        let channels = offsets.len().div_ceil(group).max(1);
        let nonzeros: usize = sorted.iter().map(Vec::len).sum();
        let each = nonzeros as f64 / (sorted.len().max(1) * channels) as f64;
        // As many channels as fit into the first-level cache, but enough taps to make up for loading the sums again.
        let fitting = (cost.cache / footprint.max(1)).max((cost.taps_per_chunk / each.max(1e-3)) as usize).max(1);
        let chunk_count = channels.div_ceil(fitting).max(1);
        let span = channels.div_ceil(chunk_count) * group;
        let mut out = Self {
            rows: rows.len(),
            chunks: Vec::new(),
            items: Vec::new(),
            taps: Vec::new(),
            rounds: Vec::new(),
            bundled: Vec::new(),
            sparse_items: 0,
            items_in_order: 1,
            long: false,
            offsets: Vec::new(),
            edges: Vec::new(),
            bordered: false,
            panels: Vec::new(),
            reach,
            even,
            dense_rows: 0,
            dense_over_sparse: 1.0,
            time: 0.0,
        };
        let mut multiplied = 0.0;
        let mut panels = Vec::new();
        for first in (0..rows.len()).step_by(WEIGHTS_PER_PANEL) {
            let panel = first..(first + WEIGHTS_PER_PANEL).min(rows.len());
            let mut union: Vec<usize> = sorted[panel.clone()].iter().flatten().map(|(column, _)| *column).collect();
            let nonzeros = union.len();
            union.sort_unstable();
            union.dedup();
            let dense = cost.choose(panel.len(), union.len(), nonzeros) == Choice::Dense;
            out.dense_rows += if dense { panel.len() } else { 0 };
            let all = cost.multiplied(panel.len(), union.len());
            multiplied += all;
            out.time += if dense { all } else { cost.ratio * nonzeros as f64 };
            panels.push((panel, union, dense));
        }
        out.dense_over_sparse = multiplied / (cost.ratio * nonzeros as f64).max(1e-9);
        let sparse = panels.iter().filter(|(_, _, dense)| !dense).flat_map(|(panel, _, _)| panel.clone());
        let sparse: Vec<usize> = sparse.collect();
        // The offsets of a bundle have sixteen bits, so they must not be further apart.
        let far = |k: usize| {
            let own = || sparse.iter().flat_map(|row| part(&sorted[*row], &(k * span..(k + 1) * span)));
            let read = || own().map(|(column, _)| offsets[*column]);
            (read().max().unwrap_or(0) - read().min().unwrap_or(0)) / even > usize::from(u16::MAX)
        };
        let bundles = cost.bundles && !(0..chunk_count).any(far);
        out.items_in_order = if bundles { ROWS_IN_ORDER / ROWS_PER_BUNDLE } else { ROWS_IN_ORDER };
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
                    out.edges.extend(union[start..end].iter().map(|o| borders.map_or(0, |b| b.of(*o))));
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
                        kind: Kind::Panel,
                        row: panel.start as u32,
                        rows: panel.len() as u32,
                        start: begin as u32,
                        end: out.offsets.len() as u32,
                        values,
                    });
                }
            }
            let first_sparse = out.items.len();
            for block in sparse.chunks(ROWS_IN_ORDER) {
                let mut parts: Vec<_> = block.iter().map(|row| (*row, part(&sorted[*row], &within))).collect();
                parts.sort_by_key(|(_, taps)| taps.len());
                for rows in parts.chunks(if bundles { ROWS_PER_BUNDLE } else { 1 }) {
                    let item = if bundles { out.bundle(rows, offsets) } else { out.row(rows[0], offsets) };
                    out.items.push(item);
                }
            }
            out.sparse_items = out.items.len() - first_sparse;
            out.chunks.push(begin..out.items.len());
        }
        out.bordered = out.edges.iter().any(|e| *e != 0);
        out.long = out.taps.len() >= TAPS_OF_A_LONG_ROW * sparse.len() * chunk_count;
        out
    }

    /// Stores the taps of a sparse row in one chunk.
    fn row(&mut self, (row, taps): (usize, &[(usize, f32)]), offsets: &[usize]) -> Item {
        let start = self.taps.len() as u32;
        self.taps.extend(taps.iter().map(|&(o, value)| Tap { offset: offsets[o] as u32, value }));
        Item { kind: Kind::Row, row: row as u32, rows: 1, start, end: self.taps.len() as u32, values: 0 }
    }

    /// Stores the taps of sparse rows in one chunk, one tap of each row in turn.
    fn bundle(&mut self, rows: &[(usize, &[(usize, f32)])], offsets: &[usize]) -> Item {
        let (row, start) = (self.bundled.len() as u32, self.rounds.len() as u32);
        self.bundled.extend(rows.iter().map(|(row, _)| *row as u32));
        let first = rows.iter().flat_map(|(_, taps)| *taps).map(|(column, _)| offsets[*column]).min().unwrap_or(0);
        for step in 0..rows.iter().map(|(_, taps)| taps.len()).max().unwrap_or(0) {
            let mut round = Round { offsets: 0, values: [0.0; ROWS_PER_BUNDLE] };
            for (i, (_, taps)) in rows.iter().enumerate() {
                // A row that has ended adds zero times the value that it read last; a row without taps adds zero
                // times the value at which the bundle starts.
                let at = taps.get(step).or(taps.last()).map_or(first, |(column, _)| offsets[*column]);
                round.offsets |= (((at - first) / self.even) as u64) << (16 * i);
                round.values[i] = taps.get(step).map_or(0.0, |(_, value)| *value);
            }
            self.rounds.push(round);
        }
        let end = self.rounds.len() as u32;
        Item { kind: Kind::Bundle, row, rows: rows.len() as u32, start, end, values: first }
    }

    /// Lays out a dense matrix, row by row, without looking for zeros.
    ///
    /// # Panics
    /// If the values are not rows × offsets.
    pub fn dense(values: &[f32], rows: usize, offsets: &[usize], cost: Cost) -> Self {
        let columns = offsets.len();
        assert_eq!(values.len(), rows * columns);
        // Offsets per chunk, so that the weights of eight rows stay in the first-level cache together with the
        // source.
        let span = (cost.cache / 96).max(1);
        let mut out = Self {
            rows,
            chunks: Vec::new(),
            items: Vec::new(),
            taps: Vec::new(),
            rounds: Vec::new(),
            bundled: Vec::new(),
            sparse_items: 0,
            items_in_order: 1,
            long: false,
            offsets: offsets.iter().map(|o| *o as u32).collect(),
            edges: vec![0; columns],
            bordered: false,
            panels: vec![0.0; rows.next_multiple_of(WEIGHTS_PER_PANEL) * columns],
            reach: offsets.iter().copied().max().unwrap_or(0),
            even: evenness(offsets.iter().copied()),
            dense_rows: rows,
            dense_over_sparse: 1.0,
            time: (rows * columns) as f64,
        };
        let mut at = 0;
        for start in (0..columns.max(1)).step_by(span) {
            let (begin, end) = (out.items.len(), (start + span).min(columns));
            for first in (0..rows).step_by(WEIGHTS_PER_PANEL) {
                let count = WEIGHTS_PER_PANEL.min(rows - first);
                let (start, end) = (start as u32, end as u32);
                out.items.push(Item {
                    kind: Kind::Panel,
                    row: first as u32,
                    rows: count as u32,
                    start,
                    end,
                    values: at,
                });
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
        self.taps.is_empty() && self.rounds.is_empty() && self.offsets.is_empty()
    }

    /// The share of rows whose zeros are multiplied.
    pub fn dense_share(&self) -> f64 {
        self.dense_rows as f64 / self.rows.max(1) as f64
    }

    /// Time for every vector of results by the costs it was laid out with, in multiply-adds of dense panels.
    pub fn time(&self) -> f64 {
        self.time
    }

    /// Time of dense panels over that of sparse rows, by the costs it was laid out with.
    pub fn dense_over_sparse(&self) -> f64 {
        self.dense_over_sparse
    }

    /// Results from `source` into `out`: see [`Grid`] and [`Finish`].
    ///
    /// # Panics
    /// If a slice is too short; sizes come from the caller's own arithmetic, never from data.
    pub fn run(&self, instructions: Instructions, grid: &Grid, source: &[f32], out: &mut [f32], finish: &Finish<'_>) {
        self.run_on(&Crew::alone(), instructions, grid, source, out, finish);
    }

    /// As [`GridWeights::run`], on the threads of a crew if there is enough to do; the bits are the same.
    ///
    /// # Panics
    /// If a slice is too short; sizes come from the caller's own arithmetic, never from data.
    pub fn run_on(
        &self,
        crew: &Crew<'_>,
        instructions: Instructions,
        grid: &Grid,
        source: &[f32],
        out: &mut [f32],
        finish: &Finish<'_>,
    ) {
        let mut g = *grid;
        if self.rows == 0 || g.height == 0 || g.width == 0 || g.lanes == 0 {
            return;
        }
        assert!(g.source_step == 1 || g.lanes.is_multiple_of(16), "neighbours that are apart are whole vectors");
        let residuals = [finish.before, finish.after];
        let mut bordered = self.bordered;
        // If there are no gaps between rows, the grid is one long row.
        if g.source_step == 1
            && g.source_row == g.width
            && g.out_row == g.width
            && residuals.iter().flatten().all(|r| r.row == g.width)
        {
            g = Grid { height: 1, width: g.height * g.width, ..g };
            bordered &= grid.height == 1;
        }
        let last = |row: usize, step: usize| (g.height - 1) * row + (g.width - 1) * step;
        assert!((last(g.source_row, g.source_step) + self.reach + 1) * g.lanes <= source.len());
        assert!(((self.rows - 1) * g.out_channel + last(g.out_row, 1) + 1) * g.lanes <= out.len());
        assert!(g.out_row >= g.width || g.height == 1, "results do not overlap");
        assert!(self.rows == 1 || g.out_channel >= (g.height - 1) * g.out_row + g.width, "results do not overlap");
        assert!(finish.bias.is_none_or(|b| b.len() >= self.rows));
        assert!(finish.before.is_none() || finish.bias.is_some());
        for r in residuals.iter().flatten() {
            assert!(((self.rows - 1) * r.channel + last(r.row, 1) + 1) * g.lanes <= r.from.len());
        }
        let extra = |r: Option<Residual<'_>>| {
            r.map(|r| Extra { from: r.from.as_ptr(), row: r.row * g.lanes, channel: r.channel * g.lanes })
        };
        let apart = g.source_step != 1;
        // Where positions are apart, each group of 16 lanes is a grid of its own, so that a position is a whole
        // vector.
        let task = Task {
            chunks: &self.chunks,
            items: &self.items,
            taps: &self.taps,
            rounds: &self.rounds,
            step_of_rounds: self.even * g.lanes,
            bundled: &self.bundled,
            offsets: &self.offsets,
            edges: &self.edges,
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
            bordered,
            long: self.long,
        };
        assert!(!apart || g.lanes == 16, "neighbours that are apart are 16 lanes each");
        // Vectors of 8 are used where operands straddle cache lines, or where half of a vector of 16 would be wasted.
        let run = g.width * g.lanes;
        let wasted = (1..=8).contains(&(run % 16)) && run < 48;
        let whole_lines =
            (self.even * g.lanes).is_multiple_of(16) && (g.height == 1 || (g.source_row * g.lanes).is_multiple_of(16));
        let halves = !g.lanes.is_multiple_of(16) && (wasted || !whole_lines && self.dense_rows * 2 < self.rows);
        let whole = Part { items: 0..self.items_per_chunk(), rows: 0..g.height, numbers: 0..run };
        let cut = self.cut(crew.threads(), &whole, g.lanes);
        crew.split(cut.iter().product(), &|k| {
            let part = Part {
                items: self.items_of(share(&(0..self.units()), k % cut[0], cut[0], 1)),
                rows: share(&whole.rows, k / cut[0] % cut[1], cut[1], 1),
                numbers: share(&whole.numbers, k / cut[0] / cut[1], cut[2], NUMBERS),
            };
            // SAFETY: the assertions above bound every address of the task and keep results of different places apart;
            // parts have no result in common; `available` was asked for the instructions.
            unsafe {
                match instructions {
                    #[cfg(target_arch = "x86_64")]
                    Instructions::Avx512 if Instructions::available().contains(&Instructions::Avx512) => {
                        if apart {
                            avx512::<true>(&task, &part);
                        } else if halves {
                            half(&task, &part);
                        } else {
                            avx512::<false>(&task, &part);
                        }
                    }
                    #[cfg(target_arch = "x86_64")]
                    Instructions::Avx2 if Instructions::available().contains(&Instructions::Avx2) => {
                        if apart {
                            avx2::<true>(&task, &part)
                        } else {
                            avx2::<false>(&task, &part)
                        }
                    }
                    _ if apart => task.all::<Portable, true>(&part),
                    _ => task.all::<Portable, false>(&part),
                }
            }
        });
    }

    /// Number of items of a chunk; every chunk has one for every dense panel and for every sparse row or bundle.
    fn items_per_chunk(&self) -> usize {
        self.chunks.first().map_or(0, |c| c.len())
    }

    /// Number of parts that the items of a chunk can be divided into: panels, and blocks of sparse rows.
    fn units(&self) -> usize {
        self.items_per_chunk() - self.sparse_items + self.sparse_items.div_ceil(self.items_in_order)
    }

    /// The items of some units.
    fn items_of(&self, units: std::ops::Range<usize>) -> std::ops::Range<usize> {
        let panels = self.items_per_chunk() - self.sparse_items;
        let at = |unit: usize| match unit.checked_sub(panels) {
            Some(blocks) => panels + (blocks * self.items_in_order).min(self.sparse_items),
            None => unit,
        };
        at(units.start)..at(units.end)
    }

    /// The number of parts of items, rows and numbers that a call is divided into.
    fn cut(&self, threads: usize, whole: &Part, lanes: usize) -> [usize; 3] {
        let results = whole.rows.len() * whole.numbers.len();
        let weights = self.taps.len() + ROWS_PER_BUNDLE * self.rounds.len() + self.panels.len();
        // Two parts per thread balance their different times.
        let wanted = (weights * results / WORTH_A_PART).min(2 * threads);
        if threads <= 1 || wanted <= 1 {
            return [1; 3];
        }
        let (rows, numbers) = (whole.rows.len().div_ceil(2), whole.numbers.len().div_ceil(NUMBERS));
        let positions = if rows > 1 { rows } else { numbers };
        // If there are more weights than values, every thread reads its own weights, otherwise its own piece of the
        // map.
        let values = results * self.rows + (self.reach + 1) * lanes;
        let items = if weights > values {
            wanted.min(self.units())
        } else {
            wanted.div_ceil(positions).min(self.units()).max(1)
        };
        let positions = wanted.div_ceil(items).min(positions);
        if rows > 1 { [items, positions, 1] } else { [items, 1, positions] }
    }
}

/// A part of its own needs at least this many multiply-adds.
const WORTH_A_PART: usize = 100_000;
/// Numbers of a row that are not divided: four vectors of 16.
const NUMBERS: usize = 64;

/// Part k of `parts` of a range, in whole units.
fn share(of: &std::ops::Range<usize>, k: usize, parts: usize, unit: usize) -> std::ops::Range<usize> {
    let units = of.len().div_ceil(unit);
    let at = |k: usize| (of.start + units * k / parts * unit).min(of.end);
    at(k)..at(k + 1)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vl,avx2,fma")]
unsafe fn avx512<const APART: bool>(task: &Task<'_>, part: &Part) {
    // SAFETY: the caller's task is sound, and this function has the instructions.
    unsafe { task.all::<Avx512, APART>(part) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vl,avx2,fma")]
unsafe fn half(task: &Task<'_>, part: &Part) {
    // SAFETY: the caller's task is sound, and this function has the instructions.
    unsafe { task.all::<Half, false>(part) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn avx2<const APART: bool>(task: &Task<'_>, part: &Part) {
    // SAFETY: the caller's task is sound, and this function has the instructions.
    unsafe { task.all::<Avx2, APART>(part) }
}
