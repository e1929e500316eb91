//! Transposed maps for coefficients most of which are zero.
//!
//! A unit is read by few results, one that is zero over its whole interval passes nothing on, and nothing needs the
//! coefficient of a unit that is always zero. So a map multiplies only the rows that exist with the columns that are
//! needed: a small part of all products.

use super::substitution::LANES;
use crate::kernels::{Instructions, Pair, Products, ROW, Run, TILE};
use crate::linalg::{Csr, vectorised};
use crate::model::TapBlock;

const _: () = assert!(LANES == ROW);

/// Rows of coefficients, one per unit; most are zero and do not exist. Those of all channels of one position lie side
/// by side.
#[derive(Default)]
pub(super) struct Rows {
    values: Vec<f32>,
    /// One where a row exists, else zero; the content of `values` in any other row has no meaning.
    live: Vec<u8>,
    /// The most rows that may exist, per position.
    counts: Vec<u32>,
    channels: usize,
}

impl Rows {
    /// Makes room for `size` rows, all zero.
    pub(super) fn clear(&mut self, size: usize, positions: usize) {
        self.channels = size / positions;
        self.values.resize(size * LANES, 0.0);
        self.live.clear();
        self.live.resize(size, 0);
        self.counts.clear();
        self.counts.resize(positions, 0);
    }

    fn positions(&self) -> usize {
        self.counts.len()
    }

    /// Position and channel of a unit.
    #[inline(always)]
    fn place(&self, unit: usize) -> [usize; 2] {
        if self.positions() == 1 { [0, unit] } else { [unit % self.positions(), unit / self.positions()] }
    }

    /// A row, and whether it existed before.
    #[inline(always)]
    fn claim(&mut self, [position, channel]: [usize; 2]) -> (&mut [f32; LANES], bool) {
        let at = position * self.channels + channel;
        let was = std::mem::replace(&mut self.live[at], 1) != 0;
        self.counts[position] += u32::from(!was);
        (&mut self.values.as_chunks_mut::<LANES>().0[at], was)
    }

    /// A row to add to, which exists from now on.
    #[inline(always)]
    pub(super) fn row(&mut self, unit: usize) -> &mut [f32; LANES] {
        let (row, was) = self.claim(self.place(unit));
        if !was {
            row.fill(0.0);
        }
        row
    }

    /// Adds to a row.
    #[inline(always)]
    fn add(&mut self, place: [usize; 2], sums: &[f32; LANES]) {
        let (row, was) = self.claim(place);
        if was {
            row.iter_mut().zip(sums).for_each(|(r, s)| *r += s);
        } else {
            *row = *sums;
        }
    }

    /// Calls `visit` with position, channel and number of every row that exists.
    #[inline(always)]
    fn places(&self, mut visit: impl FnMut([usize; 2], usize)) {
        for (p, live) in self.live.chunks_exact(self.channels.max(1)).enumerate() {
            if self.counts[p] > 0 {
                for (c, live) in live.iter().enumerate() {
                    if *live != 0 {
                        visit([p, c], p * self.channels + c);
                    }
                }
            }
        }
    }

    /// Calls `visit` with every row that exists; a row for which it returns false is zero from then on.
    #[inline(always)]
    pub(super) fn retain(&mut self, mut visit: impl FnMut(usize, &mut [f32; LANES]) -> bool) {
        let (channels, positions) = (self.channels, self.positions());
        let rows = self.values.as_chunks_mut::<LANES>().0;
        for (p, live) in self.live.chunks_exact_mut(channels.max(1)).enumerate() {
            if self.counts[p] > 0 {
                for (c, live) in live.iter_mut().enumerate() {
                    if *live != 0 {
                        *live = u8::from(visit(c * positions + p, &mut rows[p * channels + c]));
                        self.counts[p] -= u32::from(*live == 0);
                    }
                }
            }
        }
    }

    /// Calls `visit` with every row that exists.
    #[inline(always)]
    pub(super) fn each(&self, mut visit: impl FnMut(usize, &[f32; LANES])) {
        let (rows, positions) = (self.values.as_chunks::<LANES>().0, self.positions());
        self.places(
            #[inline(always)]
            |[p, c], at| visit(c * positions + p, &rows[at]),
        );
    }

    /// All rows in the order of the units; rows that do not exist are zeros.
    pub(super) fn in_order(&self, out: &mut Vec<f32>) {
        out.clear();
        out.resize(self.values.len(), 0.0);
        let out = out.as_chunks_mut::<LANES>().0;
        self.each(|unit, row| out[unit] = *row);
    }
}

/// The transpose of a map with weights.
pub(super) struct Backwards {
    /// Channels of the source and of the result.
    channels: [usize; 2],
    /// Positions of the source and of the result.
    positions: [usize; 2],
    /// Columns of the source's map and of the result's.
    columns: [usize; 2],
    /// For every row, and for every column, of the source's map: rows (columns) of the result that read it, each with
    /// the place of its window that reads it.
    readers: [Vec<Vec<(usize, usize)>>; 2],
    /// Columns of the window.
    across: usize,
    weights: Weights,
    /// The most products that are summed in single precision.
    group: usize,
    instructions: Instructions,
}

/// One row for every place of the window and channel of the result, and one column for every channel of the source.
enum Weights {
    Dense(Vec<f32>),
    Sparse(Csr<f32>),
}

/// If fewer than one weight in this many is not zero, each is looked up by itself.
const DENSE: usize = 5;

impl Backwards {
    /// The transpose of a block with taps; sums of more than `group` products continue in double precision.
    pub(super) fn of_block(block: &TapBlock, taps: &Csr<f32>, group: usize) -> Self {
        let (window, area) = (block.window, block.window.area());
        let maps = [block.input, block.output];
        let channels = maps.map(|m| m.channels);
        let sides = maps.map(|m| [m.height, m.width]);
        let readers = [0, 1].map(|axis| {
            let mut of = vec![Vec::new(); sides[0][axis]];
            for place in 0..window.kernel[axis] {
                let offset = place * window.dilation[axis];
                for q in window.inside(axis, offset, sides[0][axis], sides[1][axis]) {
                    of[q * window.stride[axis] + offset - window.padding[axis]].push((q, place));
                }
            }
            of
        });
        let mut rows = vec![Vec::new(); area * channels[1]];
        for c in 0..channels[1] {
            taps.row(c).for_each(|(j, w)| rows[j % area * channels[1] + c].push((j / area, w)));
        }
        Self {
            channels,
            positions: maps.map(|m| m.positions()),
            columns: sides.map(|s| s[1]),
            readers,
            across: window.kernel[1],
            weights: Weights::of(rows, channels[0]),
            group,
            instructions: Instructions::detect(),
        }
    }

    /// The transpose of a matrix, results × units of the source.
    pub(super) fn of_entries(entries: &Csr<f32>, group: usize) -> Self {
        let rows = (0..entries.rows()).map(|i| entries.row(i).collect()).collect();
        Self {
            channels: [entries.cols(), entries.rows()],
            positions: [1, 1],
            columns: [1, 1],
            readers: [vec![vec![(0, 0)]], vec![vec![(0, 0)]]],
            across: 1,
            weights: Weights::of(rows, entries.cols()),
            group,
            instructions: Instructions::detect(),
        }
    }

    /// `into += mapᵀ(from)`, without the rows that are `dead`, about which nothing needs to be known.
    pub(super) fn add(&self, from: &Rows, into: &mut Rows, dead: &[bool], workspace: &mut Workspace) {
        let width = if matches!(self.weights, Weights::Dense(_)) { self.channels[0] } else { 1 };
        workspace.list(from, self.positions[1], width);
        let mut pairs = std::mem::take(&mut workspace.pairs);
        let products = match &self.weights {
            Weights::Dense(weights) => {
                Some(Products::new(self.instructions, &pairs, &from.values, (weights, self.channels[0])))
            }
            Weights::Sparse(_) => None,
        };
        for p in 0..self.positions[0] {
            let (y, x) = (p / self.columns[0], p % self.columns[0]);
            workspace.begin();
            for &(row, down) in &self.readers[0][y] {
                for &(column, right) in &self.readers[1][x] {
                    let (q, place) = (row * self.columns[1] + column, down * self.across + right);
                    workspace.push(q, (place * self.channels[1] * width) as u32, self.group as u32);
                }
            }
            if workspace.runs.is_empty() {
                continue;
            }
            workspace.wanted.clear();
            let is_wanted = |c: &u32| dead.get(*c as usize * self.positions[0] + p) != Some(&true);
            workspace.wanted.extend((0..self.channels[0] as u32).filter(is_wanted));
            match (&self.weights, &products) {
                (Weights::Sparse(weights), _) => self.sparse((weights, &pairs, &from.values), into, p, workspace),
                (_, Some(products)) => self.dense(products, into, p, workspace),
                _ => {}
            }
        }
        pairs.clear();
        workspace.pairs = pairs;
    }

    fn dense(&self, products: &Products, into: &mut Rows, p: usize, workspace: &Workspace) {
        for part in workspace.wanted.chunks(TILE) {
            // The last tile repeats a column to be full.
            let columns: [u32; TILE] = std::array::from_fn(|i| part[i.min(part.len() - 1)]);
            let mut sums = [[0.0f32; ROW]; TILE];
            if let [_] = workspace.groups[..] {
                products.sum(&workspace.runs, &columns, &mut sums);
            } else {
                let mut wide = [[0.0f64; ROW]; TILE];
                for group in workspace.groups() {
                    products.sum(group, &columns, &mut sums);
                    join(&mut wide, &sums);
                }
                narrow(&mut sums, &wide);
            }
            self.hand_on(part, |i, _| &sums[i], into, p);
        }
    }

    fn sparse(
        &self,
        (weights, pairs, operand): (&Csr<f32>, &[Pair], &[f32]),
        into: &mut Rows,
        p: usize,
        workspace: &mut Workspace,
    ) {
        let size = self.channels[0];
        let (mut sums, mut wide) = (std::mem::take(&mut workspace.sums), std::mem::take(&mut workspace.wide));
        wide.clear();
        for group in workspace.groups() {
            sums.clear();
            sums.resize(size, [0.0; ROW]);
            vectorised(
                #[inline(always)]
                || {
                    for run in group {
                        for pair in &pairs[run.first as usize..run.end as usize] {
                            let row = &operand.as_chunks::<LANES>().0[pair.row as usize];
                            for (c, w) in weights.row((run.further + pair.weights) as usize) {
                                sums[c].iter_mut().zip(row).for_each(|(s, v)| *s += w * v);
                            }
                        }
                    }
                },
            );
            if workspace.groups.len() > 1 {
                wide.resize(size, [0.0; ROW]);
                join(&mut wide, &sums);
            }
        }
        if !wide.is_empty() {
            narrow(&mut sums, &wide);
        }
        self.hand_on(&workspace.wanted, |_, c| &sums[c], into, p);
        (workspace.sums, workspace.wide) = (sums, wide);
    }

    /// Adds the sums of some channels at a position of the source.
    fn hand_on<'s>(&self, channels: &[u32], sums: impl Fn(usize, usize) -> &'s [f32; ROW], into: &mut Rows, p: usize) {
        vectorised(
            #[inline(always)]
            || {
                for (i, &c) in channels.iter().enumerate() {
                    let c = c as usize;
                    // Where a matrix reads a map, the source may count its positions in another way.
                    let same = into.positions() == self.positions[0];
                    let place = if same { [p, c] } else { into.place(c * self.positions[0] + p) };
                    into.add(place, sums(i, c));
                }
            },
        );
    }

    /// The most roundings of a product inside the sum of its group.
    pub(super) fn group_terms(&self) -> usize {
        let mut of_channel = vec![0; self.channels[0]];
        match &self.weights {
            Weights::Dense(weights) => weights
                .chunks_exact(self.channels[0].max(1))
                .for_each(|row| row.iter().zip(&mut of_channel).for_each(|(w, n)| *n += usize::from(*w != 0.0))),
            Weights::Sparse(weights) => weights.indices().iter().for_each(|&c| of_channel[c as usize] += 1),
        }
        of_channel.into_iter().max().unwrap_or(0).min(self.group)
    }
}

fn join(wide: &mut [[f64; ROW]], sums: &[[f32; ROW]]) {
    vectorised(
        #[inline(always)]
        || {
            for (wide, sums) in wide.iter_mut().zip(sums) {
                wide.iter_mut().zip(sums).for_each(|(w, s)| *w += f64::from(*s));
            }
        },
    );
}

fn narrow(sums: &mut [[f32; ROW]], wide: &[[f64; ROW]]) {
    vectorised(
        #[inline(always)]
        || {
            for (sums, wide) in sums.iter_mut().zip(wide) {
                sums.iter_mut().zip(wide).for_each(|(s, w)| *s = *w as f32);
            }
        },
    );
}

impl Weights {
    fn of(rows: Vec<Vec<(usize, f32)>>, columns: usize) -> Self {
        let count: usize = rows.iter().map(Vec::len).sum();
        let mut sparse = rows;
        sparse.iter_mut().for_each(|row| row.sort_by_key(|(c, _)| *c));
        let sparse = Csr::from_rows(columns, sparse);
        if DENSE * count < sparse.rows() * columns {
            return Weights::Sparse(sparse);
        }
        Weights::Dense(sparse.to_dense().into_vec())
    }
}

/// Memory that a call works in.
#[derive(Default)]
pub(super) struct Workspace {
    /// The rows that exist, by position of the result, with the places of their weights.
    pairs: Vec<Pair>,
    /// The first pair of every position.
    starts: Vec<u32>,
    next: Vec<u32>,
    /// The products of one position of the source: runs of pairs, and the number of the first run of every group.
    runs: Vec<Run>,
    groups: Vec<usize>,
    /// Number of pairs in the last group.
    filled: u32,
    wanted: Vec<u32>,
    sums: Vec<[f32; ROW]>,
    wide: Vec<[f64; ROW]>,
}

impl Workspace {
    /// Lists the rows that exist.
    fn list(&mut self, from: &Rows, positions: usize, width: usize) {
        let Self { pairs, starts, next, .. } = self;
        starts.clear();
        starts.resize(positions + 1, 0);
        // The result's map may be read as a matrix.
        let (same, own) = (from.positions() == positions, from.positions());
        let place = |[p, c]: [usize; 2]| {
            let unit = c * own + p;
            if same { [p, c] } else { [unit % positions, unit / positions] }
        };
        from.places(|at, _| starts[place(at)[0] + 1] += 1);
        (0..positions).for_each(|q| starts[q + 1] += starts[q]);
        next.clear();
        next.extend_from_slice(&starts[..positions]);
        pairs.clear();
        pairs.resize(starts[positions] as usize, Pair { row: 0, weights: 0 });
        from.places(|at, row| {
            let [q, c] = place(at);
            pairs[next[q] as usize] = Pair { row: row as u32, weights: (c * width) as u32 };
            next[q] += 1;
        });
    }

    fn begin(&mut self) {
        self.runs.clear();
        self.groups.clear();
    }

    /// Adds the pairs of a position of the result; a group has at most `group` pairs.
    fn push(&mut self, q: usize, further: u32, group: u32) {
        let (mut first, end) = (self.starts[q], self.starts[q + 1]);
        while first < end {
            if self.groups.is_empty() || self.filled == group {
                self.groups.push(self.runs.len());
                self.filled = 0;
            }
            let until = end.min(first + group - self.filled);
            self.runs.push(Run { first, end: until, further });
            self.filled += until - first;
            first = until;
        }
    }

    /// The runs of every group.
    fn groups(&self) -> impl Iterator<Item = &[Run]> {
        let ends = self.groups.iter().skip(1).copied().chain([self.runs.len()]);
        self.groups.iter().zip(ends).map(|(&first, end)| &self.runs[first..end])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::{MapShape, Source};
    use crate::model::{TapWeights, Target};
    use crate::network::Window;
    use crate::random::Random;

    /// Every coefficient that is needed is the sum over all results that read its unit, whatever the window, the
    /// share of weights, the rows that exist and the size of a group; no other row is created.
    #[test]
    fn coefficients_are_those_of_the_definition() {
        let mut r = Random::new(23);
        let (mut dense, mut sparse, mut grouped) = (0, 0, 0);
        for round in 0..90 {
            let side = 4 + r.below(4);
            let input = MapShape { channels: 1 + r.below(12), height: side, width: side + 1 };
            let window = Window {
                kernel: [1 + r.below(3), 1 + r.below(3)],
                stride: [1 + r.below(2), 1 + r.below(2)],
                padding: [r.below(2), r.below(2), r.below(2), r.below(2)],
                dilation: [1, 1 + r.below(2)],
            };
            let Ok([height, width]) = window.output(input) else { continue };
            let output = MapShape { channels: 1 + r.below(12), height, width };
            let share = [1.0, 0.5, 0.1][round % 3];
            let columns = input.channels * window.area();
            let taps = Csr::from_rows(
                columns,
                (0..output.channels).map(|_| {
                    let there: Vec<usize> = (0..columns).filter(|_| r.uniform() < share).collect();
                    there.into_iter().map(|j| (j, r.normal() as f32)).collect::<Vec<_>>()
                }),
            );
            let block = TapBlock {
                target: Target::Output,
                source: Source::Input,
                maps: Vec::new(),
                window,
                input,
                output,
                groups: 1,
                weights: TapWeights::Taps(taps.clone()),
            };
            let map = Backwards::of_block(&block, &taps, [72, 5][round % 2]);
            match map.weights {
                Weights::Dense(_) => dense += 1,
                Weights::Sparse(_) => sparse += 1,
            }
            let (mut from, mut into) = (Rows::default(), Rows::default());
            // A matrix may read a map, so the positions of either side may be counted as channels.
            let own = |map: MapShape, r: &mut Random| if r.below(3) == 0 { 1 } else { map.positions() };
            from.clear(output.size(), own(output, &mut r));
            into.clear(input.size(), own(input, &mut r));
            let mut expected = vec![[0.0f64; LANES]; input.size()];
            let mut sizes = vec![1.0f64; input.size()];
            for unit in (0..output.size()).filter(|_| r.uniform() < 0.4).collect::<Vec<_>>() {
                let row: [f32; LANES] = std::array::from_fn(|_| r.normal() as f32);
                *from.row(unit) = row;
                let (o, q) = (unit / output.positions(), unit % output.positions());
                for (column, w) in taps.row(o) {
                    let (c, [down, right]) = window.tap(column);
                    let y = (q / width * window.stride[0] + down).checked_sub(window.padding[0]);
                    let x = (q % width * window.stride[1] + right).checked_sub(window.padding[1]);
                    if let (Some(y), Some(x)) = (y.filter(|y| *y < input.height), x.filter(|x| *x < input.width)) {
                        let at = c * input.positions() + y * input.width + x;
                        for l in 0..LANES {
                            expected[at][l] += f64::from(w) * f64::from(row[l]);
                        }
                        sizes[at] += 4.0 * f64::from(w.abs());
                    }
                }
            }
            let dead: Vec<bool> = (0..input.size()).map(|_| r.below(3) == 0).collect();
            let mut workspace = Workspace::default();
            map.add(&from, &mut into, &dead, &mut workspace);
            map.add(&from, &mut into, &dead, &mut workspace);
            grouped += usize::from(workspace.groups.len() > 1);
            let mut all = Vec::new();
            into.in_order(&mut all);
            for (unit, row) in all.as_chunks::<LANES>().0.iter().enumerate() {
                for l in 0..LANES {
                    let expected = if dead[unit] { 0.0 } else { 2.0 * expected[unit][l] };
                    assert!((f64::from(row[l]) - expected).abs() < 1e-6 * sizes[unit], "{round} {unit}: {expected}");
                }
            }
        }
        assert!(dense > 10 && sparse > 5 && grouped > 5, "{dense} {sparse} {grouped}");
    }
}
