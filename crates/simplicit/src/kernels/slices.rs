//! A few samples: rows of weights side by side in lanes, so that no sum crosses a register.
//!
//! Dense panels hold 64 rows (the last one 16, 32 or 48) column by column; every column is multiplied by the broadcast input of every sample, so
//! that weights are read once for all of them. Sparse slices are for one sample and hold
//! 32 rows: in every step a window of 32 inputs lies in registers, every row takes its next weight if it lies in the
//! window, and a permutation of registers picks each row's input. The window starts where the row that is furthest behind
//! reads next; rows that are too far ahead take a zero. Every step is the same, so nothing is left to guess for the
//! processor. Two slices take their steps together, so that neither waits for its own sums.

use super::cost;
use super::pool::Crew;
use super::{Aligned, Instructions};

/// Rows of a slice.
const ROWS: usize = 32;
/// Inputs of a window.
const WINDOW: usize = 32;
/// Most samples whose sums stay in registers beside weights.
pub const FEW: usize = 8;

/// The weights of a layer for at most [`FEW`] samples side by side.
#[derive(Debug, Clone)]
pub struct RowWeights {
    rows: usize,
    columns: usize,
    samples: usize,
    instructions: Instructions,
    layout: Layout,
    /// Time of the dense layout over that of the sparse one, as the costs say.
    dense_over_sparse: f64,
}

#[derive(Debug, Clone)]
enum Layout {
    /// Panels of 64 rows, the last one of as many vectors of 16 as it needs; column by column.
    Dense(Aligned<f32>),
    Sparse(Slices),
}

/// Sparse rows, 32 at a time, the slices of a panel of 64 rows side by side.
#[derive(Debug, Clone)]
struct Slices {
    /// Where the steps of every panel end.
    ends: Vec<u32>,
    /// Where the windows of a step start, one for each slice.
    windows: Vec<[u32; 2]>,
    /// 64 per step; 32 in a last panel of one slice.
    values: Aligned<f32>,
    /// Sixteen words per step: word l has the places of rows l, 16 + l, 32 + l and 48 + l in their windows, [`BITS`] each.
    places: Aligned<u32>,
}

/// Bits of a place in a window; a permutation reads no others.
const BITS: usize = WINDOW.ilog2() as usize;

/// Weights of one slice in the order of its steps.
#[derive(Default)]
struct Order {
    windows: Vec<u32>,
    /// 32 per step: weight and place.
    entries: Vec<(f32, u32)>,
}

impl Order {
    fn new(rows: &[Vec<(usize, f32)>], columns: usize) -> Self {
        let mut out = Self::default();
        let mut next = [0usize; ROWS];
        let of = |lane: usize, next: &[usize; ROWS]| rows.get(lane).and_then(|row| row.get(next[lane])).copied();
        while let Some(behind) = (0..ROWS).filter_map(|lane| of(lane, &next)).map(|(j, _)| j).min() {
            // From a whole vector on, unless the inputs end before the window does.
            let start = (behind / 16 * 16).min(columns.saturating_sub(WINDOW));
            out.windows.push(start as u32);
            for lane in 0..ROWS {
                let entry = of(lane, &next).filter(|(j, _)| *j < start + WINDOW);
                out.entries.push(entry.map_or((0.0, 0), |(j, v)| (v, (j - start) as u32)));
                next[lane] += usize::from(entry.is_some());
            }
        }
        out
    }
}

impl Slices {
    fn new(rows: &[Vec<(usize, f32)>], columns: usize) -> Self {
        let (mut ends, mut windows, mut values, mut places) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for panel in rows.chunks(2 * ROWS) {
            let slices: Vec<Order> = panel.chunks(ROWS).map(|slice| Order::new(slice, columns)).collect();
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
        Self { ends, windows, values: Aligned::from(&values[..]), places: Aligned::from(&places[..]) }
    }

    /// The steps of a panel of so many rows.
    fn steps(&self, panel: usize, rows: usize) -> Steps<'_> {
        let range = if panel == 0 { 0 } else { self.ends[panel - 1] as usize }..self.ends[panel] as usize;
        let slices = rows.div_ceil(ROWS);
        Steps {
            slices,
            windows: &self.windows[range.clone()],
            // All panels before have two slices.
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
    /// Lays out rows of (column, weight), columns ascending, for so many samples side by side: in the faster of both ways for
    /// one sample, as dense panels for more. None where [`super::GridWeights`] is faster, which leaves zeros out, and with
    /// more than [`FEW`] samples.
    pub fn new(rows: &[Vec<(usize, f32)>], columns: usize, samples: usize, instructions: Instructions) -> Option<Self> {
        if samples == 1 {
            let slices = Slices::new(rows, columns);
            let over = cost::dense_over_slices(instructions, rows.len(), columns, slices.values.len());
            return Some(Self::with(rows, columns, 1, instructions, (over > 1.0).then_some(slices), over));
        }
        let nonzeros = rows.iter().map(Vec::len).sum();
        let over = cost::dense_over_bundles(instructions, samples, rows.len(), columns, nonzeros);
        ((2..=FEW).contains(&samples) && over <= 1.0)
            .then(|| Self::with(rows, columns, samples, instructions, None, over))
    }

    /// Dense panels, or sparse slices for one sample: to measure, and to test.
    ///
    /// # Panics
    /// With no sample, with more than [`FEW`], and with more than one for slices.
    pub fn only(
        rows: &[Vec<(usize, f32)>],
        columns: usize,
        samples: usize,
        instructions: Instructions,
        dense: bool,
    ) -> Self {
        assert!((1..=if dense { FEW } else { 1 }).contains(&samples));
        let slices = (!dense).then(|| Slices::new(rows, columns));
        Self::with(rows, columns, samples, instructions, slices, 1.0)
    }

    fn with(
        rows: &[Vec<(usize, f32)>],
        columns: usize,
        samples: usize,
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

    /// Weights that are multiplied, zeros included.
    pub fn weights(&self) -> usize {
        match &self.layout {
            Layout::Dense(values) => values.len(),
            Layout::Sparse(slices) => slices.values.len(),
        }
    }

    /// Time of the dense layout over that of the sparse one, by the measured costs.
    pub fn dense_over_sparse(&self) -> f64 {
        self.dense_over_sparse
    }

    /// `dense` or `sparse`.
    pub fn name(&self) -> &'static str {
        match self.layout {
            Layout::Dense(_) => "dense",
            Layout::Sparse(_) => "sparse",
        }
    }

    /// `out = bias + W x` (or `out += W x`), negative results 0 with `relu`; samples lie side by side in `x` and `out`.
    ///
    /// # Panics
    /// If a slice is too short; sizes are the caller's own arithmetic, never data.
    pub fn run(&self, x: &[f32], out: &mut [f32], bias: Option<&[f32]>, relu: bool) {
        self.run_on(&Crew::alone(), x, out, bias, relu);
    }

    /// The same on the threads of a crew, where there is enough to do: the same bits.
    ///
    /// # Panics
    /// If a slice is too short; sizes are the caller's own arithmetic, never data.
    pub fn run_on(&self, crew: &Crew<'_>, x: &[f32], out: &mut [f32], bias: Option<&[f32]>, relu: bool) {
        let samples = self.samples;
        assert!(x.len() >= self.columns * samples && out.len() >= self.rows * samples);
        assert!(bias.is_none_or(|b| b.len() >= self.rows));
        let (x, out) = (&x[..self.columns * samples], &mut out[..self.rows * samples]);
        // A window never ends behind the inputs.
        let mut few = [0.0f32; WINDOW];
        let x = if x.len() < WINDOW && matches!(self.layout, Layout::Sparse(_)) {
            few[..x.len()].copy_from_slice(x);
            &few[..]
        } else {
            x
        };
        let panels = self.rows.div_ceil(64);
        let parts = (self.weights() / WORTH_A_PART).min(crew.threads()).min(panels).max(1);
        let to = Results(out.as_mut_ptr());
        crew.split(parts, &|k| {
            let mut sums = [0.0f32; 64 * FEW];
            for panel in panels * k / parts..panels * (k + 1) / parts {
                let rows = panel * 64..(panel * 64 + 64).min(self.rows);
                // SAFETY: panels have no row in common and all rows lie in `out`.
                let own = unsafe { std::slice::from_raw_parts_mut(to.at(rows.start * samples), rows.len() * samples) };
                // Sums are a sample after the other, 64 rows each.
                match bias {
                    Some(bias) => {
                        for sums in sums.chunks_exact_mut(64).take(samples) {
                            sums[..rows.len()].copy_from_slice(&bias[rows.clone()]);
                        }
                    }
                    None => turned(own, samples, |k, out| sums[k] = *out),
                }
                match &self.layout {
                    Layout::Dense(values) => self.dense(values, &rows, x, &mut sums),
                    Layout::Sparse(slices) => self.sparse(slices.steps(panel, rows.len()), x, &mut sums),
                }
                turned(own, samples, |k, out| *out = if !relu || sums[k] > 0.0 { sums[k] } else { 0.0 });
            }
        });
    }

    fn dense(&self, values: &[f32], rows: &std::ops::Range<usize>, x: &[f32], sums: &mut [f32; 64 * FEW]) {
        let width = rows.len().next_multiple_of(16);
        let panel = &values[rows.start * self.columns..][..width * self.columns];
        // SAFETY: the panel has `width` weights per column, `x` the samples of every column, and the instructions were found.
        unsafe {
            match self.instructions {
                #[cfg(target_arch = "x86_64")]
                Instructions::Avx512 => x86::panel_avx512(panel, width, x, self.samples, sums),
                #[cfg(target_arch = "x86_64")]
                Instructions::Avx2 => x86::panel_avx2(panel, width, x, self.samples, sums),
                _ => self::panel::<super::vector::Portable>(panel, width, x, self.samples, sums),
            }
        }
    }

    fn sparse(&self, steps: Steps<'_>, x: &[f32], sums: &mut [f32; 64 * FEW]) {
        // SAFETY: there are 32 values per slice and sixteen words of places for every step, places lie inside the window and
        // windows inside the inputs by construction (`x` has the columns they were made for), and the instructions were found.
        unsafe {
            match (self.instructions, steps.slices) {
                #[cfg(target_arch = "x86_64")]
                (Instructions::Avx512, 1) => x86::slices_avx512::<1>(steps, x, sums),
                #[cfg(target_arch = "x86_64")]
                (Instructions::Avx512, _) => x86::slices_avx512::<2>(steps, x, sums),
                #[cfg(target_arch = "x86_64")]
                (Instructions::Avx2, 1) => x86::slices_avx2::<1>(steps, x, sums),
                #[cfg(target_arch = "x86_64")]
                (Instructions::Avx2, _) => x86::slices_avx2::<2>(steps, x, sums),
                _ => plain_slices(steps, x, sums),
            }
        }
    }
}

/// Weights that are worth a part of their own.
const WORTH_A_PART: usize = 50_000;

/// Where results go, from several threads to different places.
struct Results(*mut f32);

// SAFETY: see where it is used: no place is written by two threads.
unsafe impl Sync for Results {}

impl Results {
    fn at(&self, row: usize) -> *mut f32 {
        self.0.wrapping_add(row)
    }
}

/// Visits results, samples side by side, with their place among the sums, a sample after the other.
#[inline(always)]
fn turned(out: &mut [f32], samples: usize, mut visit: impl FnMut(usize, &mut f32)) {
    if samples == 1 {
        // Places in order: several at a time.
        return out.iter_mut().take(64).enumerate().for_each(|(row, out)| visit(row, out));
    }
    for (row, out) in out.chunks_exact_mut(samples).enumerate() {
        for (sample, out) in out.iter_mut().enumerate() {
            visit(sample * 64 + row, out);
        }
    }
}

/// All rows of a panel for some samples.
///
/// # Safety
/// `weights` has `width` (16, 32, 48 or 64) per input, `x` that many samples of each, and the instructions of `T` are there.
#[inline(always)]
unsafe fn panel<T: super::vector::Vector>(
    weights: &[f32],
    width: usize,
    x: &[f32],
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

/// The same for `S` samples: as many vectors of rows at a time as leave room for weights, so that no sum waits for itself.
///
/// # Safety
/// As [`panel`].
#[inline(always)]
unsafe fn strips<T: super::vector::Vector, const S: usize>(
    weights: &[f32],
    width: usize,
    x: &[f32],
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
    x: &[f32],
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
            for x in x.as_chunks::<S>().0 {
                let mut column = [T::splat(0.0); N];
                for v in 0..N {
                    column[v] = T::load(weights.add(v * T::LEN));
                }
                for s in 0..S {
                    let x = T::splat(x[s]);
                    for v in 0..N {
                        sum[s][v] = sum[s][v].multiply_add(column[v], x);
                    }
                }
                // Past the end of the panel after the last column, where nothing is read any more.
                weights = weights.wrapping_add(width);
            }
            for s in 0..S {
                for v in 0..N {
                    sum[s][v].store(sums.as_mut_ptr().add(64 * s + first + v * T::LEN));
                }
            }
        }
    }
}

fn plain_slices(steps: Steps<'_>, x: &[f32], sums: &mut [f32; 64 * FEW]) {
    let width = steps.slices * ROWS;
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

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::super::vector::{Avx2, Avx512};
    use super::{BITS, FEW, ROWS, Steps, WINDOW, panel};
    use std::arch::x86_64::*;

    /// # Safety
    /// As [`panel`].
    #[target_feature(enable = "avx512f,avx512vl,avx2,fma")]
    pub(super) unsafe fn panel_avx512(
        weights: &[f32],
        width: usize,
        x: &[f32],
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
        x: &[f32],
        samples: usize,
        sums: &mut [f32; 64 * FEW],
    ) {
        // SAFETY: the caller's sizes; this function has the instructions.
        unsafe { panel::<Avx2>(weights, width, x, samples, sums) }
    }

    /// All steps of `S` slices.
    ///
    /// # Safety
    /// There are S·32 values and sixteen words of places for every step; windows lie inside `x`, places inside the window.
    #[target_feature(enable = "avx512f,avx512vl,avx2,fma")]
    pub(super) unsafe fn slices_avx512<const S: usize>(steps: Steps<'_>, x: &[f32], sums: &mut [f32; 64 * FEW]) {
        // SAFETY: the caller's sizes.
        unsafe {
            let mut sum = [[_mm512_setzero_ps(); 2]; S];
            for k in 0..S {
                for v in 0..2 {
                    sum[k][v] = _mm512_loadu_ps(sums.as_ptr().add(ROWS * k + 16 * v));
                }
            }
            let (mut values, mut places) = (steps.values.as_ptr(), steps.places.as_ptr());
            for windows in steps.windows {
                let words = _mm512_loadu_si512(places.cast());
                for k in 0..S {
                    let from = x.as_ptr().add(windows[k] as usize);
                    let (first, second) = (_mm512_loadu_ps(from), _mm512_loadu_ps(from.add(16)));
                    for v in 0..2 {
                        // A permutation takes the lowest bits of a word.
                        let at = _mm512_srlv_epi32(words, _mm512_set1_epi32((BITS * (2 * k + v)) as i32));
                        let value = _mm512_loadu_ps(values.add(ROWS * k + 16 * v));
                        sum[k][v] = _mm512_fmadd_ps(value, _mm512_permutex2var_ps(first, at, second), sum[k][v]);
                    }
                }
                (values, places) = (values.add(ROWS * S), places.add(16));
            }
            for k in 0..S {
                for v in 0..2 {
                    _mm512_storeu_ps(sums.as_mut_ptr().add(ROWS * k + 16 * v), sum[k][v]);
                }
            }
        }
    }

    /// The same with gathers: AVX2 has no permutation of two registers.
    ///
    /// # Safety
    /// As [`slices_avx512`].
    #[target_feature(enable = "avx2,fma")]
    pub(super) unsafe fn slices_avx2<const S: usize>(steps: Steps<'_>, x: &[f32], sums: &mut [f32; 64 * FEW]) {
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
