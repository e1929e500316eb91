//! Kernels for a few samples: rows of weights lie side by side in lanes, so that no sum crosses a register.
//!
//! Dense panels hold 64 rows (the last one 16, 32 or 48) column by column; every column is multiplied by the
//! broadcast input of every sample, so that weights are read once for all of them. Sparse slices hold 32 rows: in
//! every step a window of inputs lies in registers, every row takes its next weight if it lies in the window, and a
//! permutation of registers picks each row's input, for one sample after the other. The window starts where the row
//! that is furthest behind reads next; rows that are too far ahead take a zero. Every step is the same, so the
//! processor has no branches to predict. Two slices take their steps together, so that neither waits for its own
//! sums.

use super::cost;
use super::pool::Crew;
use super::{Aligned, Instructions};

/// Number of rows of a slice.
const ROWS: usize = 32;
/// Number of inputs in the widest window: two registers.
const WINDOW: usize = 32;
/// The most samples whose sums stay in registers together with weights.
pub const FEW: usize = 8;

/// The weights of a layer for at most [`FEW`] samples side by side.
#[derive(Debug, Clone)]
pub struct RowWeights {
    rows: usize,
    columns: usize,
    samples: Samples,
    instructions: Instructions,
    layout: Layout,
    /// Time of the dense layout divided by that of the sparse one, by the costs.
    dense_over_sparse: f64,
}

/// The number of samples and the layout of their values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Samples {
    /// Every value of all samples side by side; the number of samples.
    Beside(usize),
    /// All values of a sample, then those of the next one; the number of samples.
    Apart(usize),
}

impl Samples {
    /// The number of samples.
    pub fn count(self) -> usize {
        let (Samples::Beside(count) | Samples::Apart(count)) = self;
        count
    }

    /// Whether all values of a sample lie side by side; those of a single sample always do.
    fn are_apart(self) -> bool {
        matches!(self, Samples::Apart(_) | Samples::Beside(1))
    }

    /// Distances from a sample's value to that of the next sample, and to its own next value; a sample has `values`
    /// values.
    fn strides(self, values: usize) -> [usize; 2] {
        if self.are_apart() { [values, 1] } else { [1, self.count()] }
    }
}

#[derive(Debug, Clone)]
enum Layout {
    /// Panels of 64 rows, column by column; the last one has as many vectors of 16 as it needs.
    Dense(Aligned<f32>),
    Sparse(Slices),
}

/// Sparse rows in slices of 32; the two slices of a panel of 64 rows lie side by side.
#[derive(Debug, Clone)]
struct Slices {
    /// Number of inputs in a window: 16 or [`WINDOW`].
    window: usize,
    /// For every panel the number of the step after its last one.
    ends: Vec<u32>,
    /// For every step the places where its windows start, one for each slice.
    windows: Vec<[u32; 2]>,
    /// Weights, 64 per step; 32 in a last panel of one slice.
    values: Aligned<f32>,
    /// Sixteen words per step: word l has the places of rows l, 16 + l, 32 + l and 48 + l in their windows, [`BITS`] each.
    places: Aligned<u32>,
}

/// Number of bits of a place in a window; a permutation reads no others.
const BITS: usize = WINDOW.ilog2() as usize;

/// The weights of one slice in the order of its steps.
#[derive(Default)]
struct Order {
    windows: Vec<u32>,
    /// 32 weights per step, each with its place in the window.
    entries: Vec<(f32, u32)>,
}

impl Order {
    fn new(rows: &[Vec<(usize, f32)>], columns: usize, window: usize) -> Self {
        let mut out = Self::default();
        let mut next = [0usize; ROWS];
        let of = |lane: usize, next: &[usize; ROWS]| rows.get(lane).and_then(|row| row.get(next[lane])).copied();
        while let Some(behind) = (0..ROWS).filter_map(|lane| of(lane, &next)).map(|(j, _)| j).min() {
            // A wide window starts at a whole vector, unless the inputs end before it does.
            let start = if window == WINDOW { behind / 16 * 16 } else { behind };
            let start = start.min(columns.saturating_sub(window));
            out.windows.push(start as u32);
            for lane in 0..ROWS {
                let entry = of(lane, &next).filter(|(j, _)| *j < start + window);
                out.entries.push(entry.map_or((0.0, 0), |(j, v)| (v, (j - start) as u32)));
                next[lane] += usize::from(entry.is_some());
            }
        }
        out
    }
}

impl Slices {
    fn new(rows: &[Vec<(usize, f32)>], columns: usize, window: usize) -> Self {
        let (mut ends, mut windows, mut values, mut places) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for panel in rows.chunks(2 * ROWS) {
            let slices: Vec<Order> = panel.chunks(ROWS).map(|slice| Order::new(slice, columns, window)).collect();
            for step in 0..slices.iter().map(|s| s.windows.len()).max().unwrap_or(0) {
                let mut words = [0u32; 16];
                let mut starts = [0u32; 2];
                for (k, slice) in slices.iter().enumerate() {
                    // A slice that has ended adds zero times the first inputs.
                    starts[k] = slice.windows.get(step).copied().unwrap_or(0);
                    for lane in 0..ROWS {
                        let (value, place) = slice.entries.get(step * ROWS + lane).copied().unwrap_or_default();
                        values.push(value);
                        words[lane % 16] |= place << (BITS * (2 * k + lane / 16));
                    }
                }
                windows.push(starts);
                places.extend(words);
            }
            ends.push(windows.len() as u32);
        }
        Self { window, ends, windows, values: Aligned::from(&values[..]), places: Aligned::from(&places[..]) }
    }

    /// The steps of a panel of `rows` rows.
    fn steps(&self, panel: usize, rows: usize) -> Steps<'_> {
        let range = if panel == 0 { 0 } else { self.ends[panel - 1] as usize }..self.ends[panel] as usize;
        let slices = rows.div_ceil(ROWS);
        Steps {
            slices,
            windows: &self.windows[range.clone()],
            // All earlier panels have two slices.
            values: &self.values[2 * ROWS * range.start..][..slices * ROWS * range.len()],
            places: &self.places[16 * range.start..16 * range.end],
        }
    }
}

/// The steps of one panel: a window and 32 values for every slice, and sixteen words of places.
#[derive(Clone, Copy)]
struct Steps<'a> {
    slices: usize,
    windows: &'a [[u32; 2]],
    values: &'a [f32],
    places: &'a [u32],
}

impl RowWeights {
    /// Lays out rows of (column, weight), columns ascending, for at most [`FEW`] samples: in the faster of both
    /// layouts if all values of a sample lie side by side, otherwise as dense panels. `None` for more samples, and
    /// where [`super::GridWeights`] is faster, which leaves out zeros if samples lie side by side.
    pub fn new(
        rows: &[Vec<(usize, f32)>],
        columns: usize,
        samples: Samples,
        instructions: Instructions,
    ) -> Option<Self> {
        let count = samples.count();
        if !(1..=FEW).contains(&count) {
            return None;
        }
        if samples.are_apart() {
            let slices = Slices::new(rows, columns, cost::window(instructions, count));
            let over = cost::dense_over_slices(instructions, count, rows.len(), columns, slices.values.len());
            return Some(Self::with(rows, columns, samples, instructions, (over > 1.0).then_some(slices), over));
        }
        let nonzeros = rows.iter().map(Vec::len).sum();
        let over = cost::dense_over_bundles(instructions, count, rows.len(), columns, nonzeros);
        (over <= 1.0).then(|| Self::with(rows, columns, samples, instructions, None, over))
    }

    /// Dense panels, or sparse slices where all values of a sample lie side by side: to measure, and to test.
    ///
    /// # Panics
    /// If there is no sample, if there are more than [`FEW`], and for slices if samples lie side by side.
    pub fn only(
        rows: &[Vec<(usize, f32)>],
        columns: usize,
        samples: Samples,
        instructions: Instructions,
        dense: bool,
    ) -> Self {
        assert!((1..=FEW).contains(&samples.count()) && (dense || samples.are_apart()));
        let slices = (!dense).then(|| Slices::new(rows, columns, cost::window(instructions, samples.count())));
        Self::with(rows, columns, samples, instructions, slices, 1.0)
    }

    fn with(
        rows: &[Vec<(usize, f32)>],
        columns: usize,
        samples: Samples,
        instructions: Instructions,
        slices: Option<Slices>,
        over: f64,
    ) -> Self {
        let instructions =
            if Instructions::available().contains(&instructions) { instructions } else { Instructions::detect() };
        let layout = match slices {
            Some(slices) => Layout::Sparse(slices),
            None => {
                let mut values = Aligned::zeros(rows.len().next_multiple_of(16) * columns);
                for (first, panel) in rows.chunks(64).enumerate() {
                    let (base, width) = (first * 64 * columns, panel.len().next_multiple_of(16));
                    for (lane, row) in panel.iter().enumerate() {
                        for (j, v) in row {
                            values[base + j * width + lane] = *v;
                        }
                    }
                }
                Layout::Dense(values)
            }
        };
        Self { rows: rows.len(), columns, samples, instructions, layout, dense_over_sparse: over }
    }

    /// Number of weights that are multiplied, zeros included.
    pub fn weights(&self) -> usize {
        match &self.layout {
            Layout::Dense(values) => values.len(),
            Layout::Sparse(slices) => slices.values.len(),
        }
    }

    /// Time of the dense layout divided by that of the sparse one, by the measured costs.
    pub fn dense_over_sparse(&self) -> f64 {
        self.dense_over_sparse
    }

    /// The name of the layout: `dense` or `sparse`.
    pub fn name(&self) -> &'static str {
        match self.layout {
            Layout::Dense(_) => "dense",
            Layout::Sparse(_) => "sparse",
        }
    }

    /// `out = bias + W x` (or `out += W x`), negative results 0 with `relu`, for all samples, which lie in `x` and
    /// `out` in the layout given to [`RowWeights::new`].
    ///
    /// # Panics
    /// If a slice is too short; sizes come from the caller's own arithmetic, never from data.
    pub fn run(&self, x: &[f32], out: &mut [f32], bias: Option<&[f32]>, relu: bool) {
        self.run_on(&Crew::alone(), x, out, bias, relu);
    }

    /// As [`RowWeights::run`], on the threads of a crew if there is enough to do; the bits are the same.
    ///
    /// # Panics
    /// If a slice is too short; sizes come from the caller's own arithmetic, never from data.
    pub fn run_on(&self, crew: &Crew<'_>, x: &[f32], out: &mut [f32], bias: Option<&[f32]>, relu: bool) {
        let samples = self.samples.count();
        assert!(x.len() >= self.columns * samples && out.len() >= self.rows * samples);
        assert!(bias.is_none_or(|b| b.len() >= self.rows));
        let mut inputs = Inputs { x: &x[..self.columns * samples], strides: self.samples.strides(self.columns) };
        // A window must not reach beyond the inputs, so short inputs are padded.
        let mut few = [0.0f32; WINDOW * FEW];
        if self.columns < WINDOW && matches!(self.layout, Layout::Sparse(_)) {
            for (few, x) in few.chunks_exact_mut(WINDOW).zip(inputs.x.chunks_exact(self.columns.max(1))) {
                few[..x.len()].copy_from_slice(x);
            }
            inputs = Inputs { x: &few, strides: [WINDOW, 1] };
        }
        let panels = self.rows.div_ceil(64);
        let parts = (self.weights() / WORTH_A_PART).min(crew.threads()).min(panels).max(1);
        let to = Results(out.as_mut_ptr());
        crew.split(parts, &|k| {
            let mut sums = [0.0f32; 64 * FEW];
            for panel in panels * k / parts..panels * (k + 1) / parts {
                let rows = panel * 64..(panel * 64 + 64).min(self.rows);
                // The sums of one sample come after those of another, 64 rows each.
                match bias {
                    Some(bias) => {
                        for sums in sums.chunks_exact_mut(64).take(samples) {
                            sums[..rows.len()].copy_from_slice(&bias[rows.clone()]);
                        }
                    }
                    // SAFETY: panels have no row in common and all rows of all samples lie in `out`.
                    None => unsafe { self.each(&to, &rows, &mut sums, |sum, out| *sum = *out) },
                }
                match &self.layout {
                    Layout::Dense(values) => self.dense(values, &rows, inputs, &mut sums),
                    Layout::Sparse(slices) => {
                        self.sparse(slices.window, slices.steps(panel, rows.len()), inputs, &mut sums);
                    }
                }
                let finish = |sum: &mut f32, out: &mut f32| *out = if !relu || *sum > 0.0 { *sum } else { 0.0 };
                // SAFETY: as above.
                unsafe { self.each(&to, &rows, &mut sums, finish) };
            }
        });
    }

    /// Calls `visit` with the sums of some rows and the places of their results.
    ///
    /// # Safety
    /// All rows of all samples lie behind `to`, and nobody else reads or writes these.
    #[inline(always)]
    unsafe fn each(
        &self,
        to: &Results,
        rows: &std::ops::Range<usize>,
        sums: &mut [f32; 64 * FEW],
        visit: impl Fn(&mut f32, &mut f32),
    ) {
        let samples = self.samples.count();
        if self.samples.are_apart() {
            for (s, sums) in sums.chunks_exact_mut(64).take(samples).enumerate() {
                // SAFETY: the caller's rows.
                let own = unsafe { std::slice::from_raw_parts_mut(to.at(s * self.rows + rows.start), rows.len()) };
                // The places are in order, so several are written at a time.
                sums.iter_mut().zip(own).for_each(|(sum, out)| visit(sum, out));
            }
            return;
        }
        // SAFETY: the caller's rows.
        let own = unsafe { std::slice::from_raw_parts_mut(to.at(rows.start * samples), rows.len() * samples) };
        for (row, out) in own.chunks_exact_mut(samples).enumerate() {
            for (sample, out) in out.iter_mut().enumerate() {
                visit(&mut sums[sample * 64 + row], out);
            }
        }
    }

    fn dense(&self, values: &[f32], rows: &std::ops::Range<usize>, x: Inputs<'_>, sums: &mut [f32; 64 * FEW]) {
        let width = rows.len().next_multiple_of(16);
        let panel = &values[rows.start * self.columns..][..width * self.columns];
        let samples = self.samples.count();
        // SAFETY: the panel has `width` weights per column, `x` the samples of every column, and the instructions were found.
        unsafe {
            match self.instructions {
                #[cfg(target_arch = "x86_64")]
                Instructions::Avx512 => x86::panel_avx512(panel, width, x, samples, sums),
                #[cfg(target_arch = "x86_64")]
                Instructions::Avx2 => x86::panel_avx2(panel, width, x, samples, sums),
                _ => self::panel::<super::vector::Portable>(panel, width, x, samples, sums),
            }
        }
    }

    fn sparse(&self, window: usize, steps: Steps<'_>, x: Inputs<'_>, sums: &mut [f32; 64 * FEW]) {
        let samples = self.samples.count();
        // SAFETY: there are 32 values per slice and sixteen words of places for every step, places lie inside the window and
        // windows inside the inputs by construction (`x` has the columns they were made for), and the instructions were found.
        unsafe {
            match self.instructions {
                #[cfg(target_arch = "x86_64")]
                Instructions::Avx512 => x86::slices_avx512(window, steps, x, samples, sums),
                #[cfg(target_arch = "x86_64")]
                Instructions::Avx2 => x86::slices_avx2(steps, x, samples, sums),
                _ => plain_slices(steps, x, samples, sums),
            }
        }
    }
}

/// Inputs of all samples, with the distances from a sample's input to that of the next sample and to its own next
/// one.
#[derive(Clone, Copy)]
struct Inputs<'a> {
    x: &'a [f32],
    strides: [usize; 2],
}

/// A part of its own needs at least this many weights.
const WORTH_A_PART: usize = 50_000;

/// Pointer to the results, to which several threads write at different places.
struct Results(*mut f32);

// SAFETY: see where it is used: no place is written by two threads.
unsafe impl Sync for Results {}

impl Results {
    fn at(&self, row: usize) -> *mut f32 {
        self.0.wrapping_add(row)
    }
}

/// Computes all rows of a panel for some samples.
///
/// # Safety
/// `weights` has `width` (16, 32, 48 or 64) per input, `x` has the samples of each input, and the instructions of `T`
/// are there.
#[inline(always)]
unsafe fn panel<T: super::vector::Vector>(
    weights: &[f32],
    width: usize,
    x: Inputs<'_>,
    samples: usize,
    sums: &mut [f32; 64 * FEW],
) {
    // SAFETY: the caller's sizes.
    unsafe {
        match samples {
            1 => strips::<T, 1>(weights, width, x, sums),
            2 => strips::<T, 2>(weights, width, x, sums),
            3 => strips::<T, 3>(weights, width, x, sums),
            4 => strips::<T, 4>(weights, width, x, sums),
            5 => strips::<T, 5>(weights, width, x, sums),
            6 => strips::<T, 6>(weights, width, x, sums),
            7 => strips::<T, 7>(weights, width, x, sums),
            _ => strips::<T, 8>(weights, width, x, sums),
        }
    }
}

/// The same for `S` samples: with as many vectors of rows at a time as leave registers for weights, so that no sum
/// waits for itself.
///
/// # Safety
/// As [`panel`].
#[inline(always)]
unsafe fn strips<T: super::vector::Vector, const S: usize>(
    weights: &[f32],
    width: usize,
    x: Inputs<'_>,
    sums: &mut [f32; 64 * FEW],
) {
    let most = match (T::SUMS, S) {
        (16, ..=4) => 4,
        (16, _) => 2,
        (_, 1) => 8,
        (_, 2) => 4,
        (_, ..=6) => 2,
        _ => 1,
    };
    let whole = |n: usize| n <= most && (width / T::LEN).is_multiple_of(n);
    // SAFETY: the caller's sizes; a panel is whole strips of every number that is taken.
    unsafe {
        match () {
            () if whole(8) => strip::<T, 8, S>(weights, width, x, sums),
            () if whole(6) => strip::<T, 6, S>(weights, width, x, sums),
            () if whole(4) => strip::<T, 4, S>(weights, width, x, sums),
            () if whole(3) => strip::<T, 3, S>(weights, width, x, sums),
            () if whole(2) => strip::<T, 2, S>(weights, width, x, sums),
            () => strip::<T, 1, S>(weights, width, x, sums),
        }
    }
}

/// `N` vectors of rows at a time for `S` samples.
///
/// # Safety
/// As [`panel`]; `width` is a multiple of N·LEN.
#[inline(always)]
unsafe fn strip<T: super::vector::Vector, const N: usize, const S: usize>(
    panel: &[f32],
    width: usize,
    x: Inputs<'_>,
    sums: &mut [f32; 64 * FEW],
) {
    for first in (0..width).step_by(N * T::LEN) {
        // SAFETY: the caller's sizes.
        unsafe {
            let mut sum = [[T::splat(0.0); N]; S];
            for s in 0..S {
                for v in 0..N {
                    sum[s][v] = T::load(sums.as_ptr().add(64 * s + first + v * T::LEN));
                }
            }
            let mut weights = panel.as_ptr().add(first);
            let (mut input, [sample, step]) = (x.x.as_ptr(), x.strides);
            for _ in 0..panel.len() / width {
                let mut column = [T::splat(0.0); N];
                for v in 0..N {
                    column[v] = T::load(weights.add(v * T::LEN));
                }
                for s in 0..S {
                    let x = T::splat(*input.add(s * sample));
                    for v in 0..N {
                        sum[s][v] = sum[s][v].multiply_add(column[v], x);
                    }
                }
                // After the last column this points past the end of the panel, where nothing is read any more.
                (weights, input) = (weights.wrapping_add(width), input.wrapping_add(step));
            }
            for s in 0..S {
                for v in 0..N {
                    sum[s][v].store(sums.as_mut_ptr().add(64 * s + first + v * T::LEN));
                }
            }
        }
    }
}

fn plain_slices(steps: Steps<'_>, x: Inputs<'_>, samples: usize, sums: &mut [f32; 64 * FEW]) {
    let width = steps.slices * ROWS;
    for (s, sums) in sums.chunks_exact_mut(64).take(samples).enumerate() {
        let x = &x.x[s * x.strides[0]..];
        let each = steps.values.chunks_exact(width).zip(steps.places.as_chunks::<16>().0);
        for (windows, (values, places)) in steps.windows.iter().zip(each) {
            for (lane, (sum, value)) in sums.iter_mut().zip(values).enumerate() {
                let place = places[lane % 16] >> (BITS * (lane / 16)) & (WINDOW as u32 - 1);
                let x = x[(windows[lane / ROWS] + place) as usize];
                *sum = if cfg!(any(target_feature = "fma", target_arch = "aarch64")) {
                    value.mul_add(x, *sum)
                } else {
                    value * x + *sum
                };
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::super::vector::{Avx2, Avx512};
    use super::{BITS, FEW, Inputs, ROWS, Steps, WINDOW, panel};
    use std::arch::x86_64::*;

    /// # Safety
    /// As [`panel`].
    #[target_feature(enable = "avx512f,avx512vl,avx2,fma")]
    pub(super) unsafe fn panel_avx512(
        weights: &[f32],
        width: usize,
        x: Inputs<'_>,
        samples: usize,
        sums: &mut [f32; 64 * FEW],
    ) {
        // SAFETY: the caller's sizes; this function has the instructions.
        unsafe { panel::<Avx512>(weights, width, x, samples, sums) }
    }

    /// # Safety
    /// As [`panel`].
    #[target_feature(enable = "avx2,fma")]
    pub(super) unsafe fn panel_avx2(
        weights: &[f32],
        width: usize,
        x: Inputs<'_>,
        samples: usize,
        sums: &mut [f32; 64 * FEW],
    ) {
        // SAFETY: the caller's sizes; this function has the instructions.
        unsafe { panel::<Avx2>(weights, width, x, samples, sums) }
    }

    /// Runs all steps of the slices of a panel.
    ///
    /// # Safety
    /// There are 32 values for every slice and sixteen words of places for every step; windows lie inside every sample of `x`, places
    /// inside the window.
    #[target_feature(enable = "avx512f,avx512vl,avx2,fma")]
    pub(super) unsafe fn slices_avx512(
        window: usize,
        steps: Steps<'_>,
        x: Inputs<'_>,
        samples: usize,
        sums: &mut [f32; 64 * FEW],
    ) {
        // SAFETY: the caller's sizes.
        unsafe {
            match (samples, window == WINDOW) {
                (1, true) => slices_of::<1, true>(steps, x, sums),
                (1, _) => slices_of::<1, false>(steps, x, sums),
                (2, true) => slices_of::<2, true>(steps, x, sums),
                (2, _) => slices_of::<2, false>(steps, x, sums),
                (3, true) => slices_of::<3, true>(steps, x, sums),
                (3, _) => slices_of::<3, false>(steps, x, sums),
                (4, true) => slices_of::<4, true>(steps, x, sums),
                (4, _) => slices_of::<4, false>(steps, x, sums),
                (5, true) => slices_of::<5, true>(steps, x, sums),
                (5, _) => slices_of::<5, false>(steps, x, sums),
                (6, true) => slices_of::<6, true>(steps, x, sums),
                (6, _) => slices_of::<6, false>(steps, x, sums),
                (7, true) => slices_of::<7, true>(steps, x, sums),
                (7, _) => slices_of::<7, false>(steps, x, sums),
                (_, true) => slices_of::<8, true>(steps, x, sums),
                _ => slices_of::<8, false>(steps, x, sums),
            }
        }
    }

    /// The same for `S` samples; if `WIDE`, a window is two registers. Takes as many slices at a time as have
    /// registers for their sums.
    #[target_feature(enable = "avx512f,avx512vl,avx2,fma")]
    unsafe fn slices_of<const S: usize, const WIDE: bool>(steps: Steps<'_>, x: Inputs<'_>, sums: &mut [f32; 64 * FEW]) {
        // SAFETY: the caller's sizes.
        unsafe {
            if steps.slices == 2 && S <= 4 {
                return some_slices::<S, 2, WIDE>(0, steps, x, sums);
            }
            for first in 0..steps.slices {
                some_slices::<S, 1, WIDE>(first, steps, x, sums);
            }
        }
    }

    /// `K` slices of a panel, from the `first` on.
    #[inline]
    #[target_feature(enable = "avx512f,avx512vl,avx2,fma")]
    unsafe fn some_slices<const S: usize, const K: usize, const WIDE: bool>(
        first: usize,
        steps: Steps<'_>,
        x: Inputs<'_>,
        sums: &mut [f32; 64 * FEW],
    ) {
        // SAFETY: the caller's sizes.
        unsafe {
            let mut sum = [[[_mm512_setzero_ps(); 2]; S]; K];
            for k in 0..K {
                for s in 0..S {
                    for v in 0..2 {
                        sum[k][s][v] = _mm512_loadu_ps(sums.as_ptr().add(64 * s + ROWS * (first + k) + 16 * v));
                    }
                }
            }
            let (mut values, mut places) = (steps.values.as_ptr().add(ROWS * first), steps.places.as_ptr());
            let shifts: [[__m512i; 2]; K] = std::array::from_fn(|k| {
                std::array::from_fn(|v| _mm512_set1_epi32((BITS * (2 * (first + k) + v)) as i32))
            });
            for windows in steps.windows {
                let words = _mm512_loadu_si512(places.cast());
                for k in 0..K {
                    // A permutation takes the lowest bits of a word.
                    let at: [__m512i; 2] = std::array::from_fn(|v| _mm512_srlv_epi32(words, shifts[k][v]));
                    let value: [__m512; 2] = std::array::from_fn(|v| _mm512_loadu_ps(values.add(ROWS * k + 16 * v)));
                    let from = x.x.as_ptr().add(windows[first + k] as usize);
                    for s in 0..S {
                        let from = from.add(s * x.strides[0]);
                        let low = _mm512_loadu_ps(from);
                        let high = if WIDE { _mm512_loadu_ps(from.add(16)) } else { low };
                        for v in 0..2 {
                            let picked = if WIDE {
                                _mm512_permutex2var_ps(low, at[v], high)
                            } else {
                                _mm512_permutexvar_ps(at[v], low)
                            };
                            sum[k][s][v] = _mm512_fmadd_ps(value[v], picked, sum[k][s][v]);
                        }
                    }
                }
                (values, places) = (values.add(ROWS * steps.slices), places.add(16));
            }
            for k in 0..K {
                for s in 0..S {
                    for v in 0..2 {
                        _mm512_storeu_ps(sums.as_mut_ptr().add(64 * s + ROWS * (first + k) + 16 * v), sum[k][s][v]);
                    }
                }
            }
        }
    }

    /// The same with gathers: AVX2 has no permutation of two registers.
    ///
    /// # Safety
    /// As [`slices_avx512`].
    #[target_feature(enable = "avx2,fma")]
    pub(super) unsafe fn slices_avx2(steps: Steps<'_>, x: Inputs<'_>, samples: usize, sums: &mut [f32; 64 * FEW]) {
        for (s, sums) in sums.chunks_exact_mut(64).take(samples).enumerate() {
            let x = &x.x[s * x.strides[0]..];
            // SAFETY: the caller's sizes.
            unsafe {
                match steps.slices {
                    1 => gathered::<1>(steps, x, sums),
                    _ => gathered::<2>(steps, x, sums),
                }
            }
        }
    }

    /// `S` slices for one sample.
    ///
    /// # Safety
    /// As [`slices_avx512`].
    #[target_feature(enable = "avx2,fma")]
    unsafe fn gathered<const S: usize>(steps: Steps<'_>, x: &[f32], sums: &mut [f32]) {
        // SAFETY: the caller's sizes; a gather reads inside the window.
        unsafe {
            let mut sum = [[_mm256_setzero_ps(); ROWS / 8]; S];
            for k in 0..S {
                for v in 0..ROWS / 8 {
                    sum[k][v] = _mm256_loadu_ps(sums.as_ptr().add(ROWS * k + 8 * v));
                }
            }
            let (mut values, mut places) = (steps.values.as_ptr(), steps.places.as_ptr());
            for windows in steps.windows {
                let words: [__m256i; 2] = [0, 8].map(|l| _mm256_loadu_si256(places.add(l).cast()));
                for k in 0..S {
                    let from = x.as_ptr().add(windows[k] as usize);
                    for v in 0..ROWS / 8 {
                        let by = _mm256_set1_epi32((BITS * (2 * k + v / 2)) as i32);
                        let at = _mm256_srlv_epi32(words[v % 2], by);
                        let at = _mm256_and_si256(at, _mm256_set1_epi32(WINDOW as i32 - 1));
                        let picked = _mm256_i32gather_ps::<4>(from, at);
                        sum[k][v] = _mm256_fmadd_ps(_mm256_loadu_ps(values.add(ROWS * k + 8 * v)), picked, sum[k][v]);
                    }
                }
                (values, places) = (values.add(ROWS * S), places.add(16));
            }
            for k in 0..S {
                for v in 0..ROWS / 8 {
                    _mm256_storeu_ps(sums.as_mut_ptr().add(ROWS * k + 8 * v), sum[k][v]);
                }
            }
        }
    }
}
