//! The innermost loops over a grid: a few rows × vectors of results at a time, for all rows of weights.

use super::grid::{Item, Kind, ROWS_PER_BUNDLE, Round, Tap, WEIGHTS_PER_PANEL};
use super::vector::Vector;

/// The addresses that a call reads and writes, as pointers whose extents [`super::grid::GridWeights::run`] has
/// checked.
#[derive(Clone, Copy)]
pub(super) struct Task<'a> {
    pub(super) chunks: &'a [std::ops::Range<usize>],
    pub(super) items: &'a [Item],
    pub(super) taps: &'a [Tap],
    pub(super) rounds: &'a [Round],
    /// How many numbers a step of the rounds' offsets stands for.
    pub(super) step_of_rounds: usize,
    pub(super) bundled: &'a [u32],
    pub(super) offsets: &'a [u32],
    /// For every offset of a panel the borders at which it reads padding; see [`edge`].
    pub(super) edges: &'a [u8],
    pub(super) panels: &'a [f32],
    pub(super) bias: Option<&'a [f32]>,
    pub(super) relu: bool,
    pub(super) source: *const f32,
    pub(super) out: *mut f32,
    pub(super) before: Option<Extra>,
    pub(super) after: Option<Extra>,
    /// Numbers per position, by which an offset is multiplied.
    pub(super) lanes: usize,
    /// Distance in numbers between neighbouring positions of the source, where positions are whole vectors.
    pub(super) step: usize,
    pub(super) source_row: usize,
    pub(super) out_row: usize,
    pub(super) out_channel: usize,
    pub(super) height: usize,
    /// Number of numbers in a row of the result.
    pub(super) run: usize,
    /// Whether rows are those of the map, so that the first and the last of them lie at its borders.
    pub(super) bordered: bool,
    /// Whether sparse rows have enough taps for sixteen sums.
    pub(super) long: bool,
}

// SAFETY: threads share a task to compute parts of it that do not overlap, see `Part`.
unsafe impl Sync for Task<'_> {}

/// A part of the results: rows of weights (as the items of a chunk), rows of the grid, and numbers of a row.
#[derive(Clone)]
pub(super) struct Part {
    pub(super) items: std::ops::Range<usize>,
    pub(super) rows: std::ops::Range<usize>,
    pub(super) numbers: std::ops::Range<usize>,
}

/// Flags for where a tap reads only padding: for the first or last row of results, for the first or last column.
pub(super) mod edge {
    pub(in super::super) const TOP: u8 = 1;
    pub(in super::super) const BOTTOM: u8 = 2;
    pub(in super::super) const LEFT: u8 = 4;
    pub(in super::super) const RIGHT: u8 = 8;
}

/// A residual sum, which adds another map of the result's shape.
#[derive(Clone, Copy)]
pub(super) struct Extra {
    pub(super) from: *const f32,
    pub(super) row: usize,
    pub(super) channel: usize,
}

impl Extra {
    /// Adds its numbers to the sums of a place.
    #[inline(always)]
    unsafe fn add_to<T: Vector, const R: usize, const N: usize, const PART: bool>(
        &self,
        sums: &mut [[T; N]; R],
        row: usize,
        Place { y, at, count }: Place,
    ) {
        // SAFETY: the place lies inside the extents of the task.
        unsafe {
            let from = self.from.add(row * self.channel + y * self.row + at);
            for r in 0..R {
                for v in 0..N {
                    let x = load::<T, PART>(from.add(r * self.row + v * T::LEN), count);
                    sums[r][v] = sums[r][v].add(x);
                }
            }
        }
    }
}

/// A place of the result and the number of values there: the last vector may be incomplete.
#[derive(Clone, Copy)]
struct Place {
    y: usize,
    at: usize,
    count: usize,
}

#[inline(always)]
unsafe fn load<T: Vector, const PART: bool>(from: *const f32, count: usize) -> T {
    // SAFETY: the caller's pointer is valid for a vector, or for `count` numbers where it is a part.
    unsafe { if PART { T::load_some(from, count) } else { T::load(from) } }
}

/// `M` weights times some vectors of every row of the operand.
#[inline(always)]
unsafe fn add<T: Vector, const M: usize, const Q: usize, const N: usize>(
    sums: &mut [[[T; N]; Q]; M],
    weights: *const f32,
    operand: &[[T; N]; Q],
    vectors: std::ops::Range<usize>,
) {
    // SAFETY: the caller has `M` weights and the instructions of `T`.
    unsafe {
        for i in 0..M {
            let weight = T::splat(*weights.add(i));
            for r in 0..Q {
                for v in vectors.clone() {
                    sums[i][r][v] = sums[i][r][v].multiply_add(weight, operand[r][v]);
                }
            }
        }
    }
}

/// Numbers of a position whose neighbours are apart in the source; results lie side by side.
const POSITION: usize = 16;

/// The index in the source at which vector `v` starts.
#[inline(always)]
fn place_of<T: Vector, const APART: bool>(v: usize, step: usize) -> usize {
    if APART { v * T::LEN / POSITION * step + v * T::LEN % POSITION } else { v * T::LEN }
}

impl Task<'_> {
    /// All results of a part. `APART`: neighbouring positions of the source are `step` numbers apart, a position being 16 lanes.
    ///
    /// # Safety
    /// The pointers are valid for the extents of the task, and the instructions of `T` are there.
    #[inline(always)]
    pub(super) unsafe fn all<T: Vector, const APART: bool>(&self, part: &Part) {
        let (mut at, end, items) = (part.numbers.start, part.numbers.end, &part.items);
        // There are enough registers for sixteen sums of a sparse row.
        let wide = T::SUMS == 16 && self.long;
        while at < end {
            let vectors = (end - at) / T::LEN;
            // A single row takes twice as many vectors, so that a sparse row does not wait for its own sums.
            if part.rows.len() == 1 && vectors >= 8 {
                // SAFETY: the block lies inside height × run.
                unsafe { self.block::<T, 1, 8, APART, false>(Place { y: part.rows.start, at, count: T::LEN }, items) };
                at += 8 * T::LEN;
                continue;
            }
            let mut y = part.rows.start;
            while y < part.rows.end {
                let rows = part.rows.end - y;
                let mut place = Place { y, at, count: T::LEN };
                // SAFETY: every block lies inside height × run; parts read and write only what is left of a row.
                unsafe {
                    y += match vectors {
                        0 => {
                            place.count = end - at;
                            match rows {
                                0..4 => self.block::<T, 1, 1, APART, true>(place, items),
                                4..8 => self.block::<T, 4, 1, APART, true>(place, items),
                                _ => self.block::<T, 8, 1, APART, true>(place, items),
                            }
                        }
                        1 if rows >= 16 && wide => self.block::<T, 16, 1, APART, false>(place, items),
                        1 if rows >= 8 => self.block::<T, 8, 1, APART, false>(place, items),
                        1 if rows >= 4 => self.block::<T, 4, 1, APART, false>(place, items),
                        1 => self.block::<T, 1, 1, APART, false>(place, items),
                        2 | 3 if rows >= 8 && wide => self.block::<T, 8, 2, APART, false>(place, items),
                        2 | 3 if rows >= 4 => self.block::<T, 4, 2, APART, false>(place, items),
                        2 | 3 => self.block::<T, 1, 2, APART, false>(place, items),
                        _ if rows >= 4 && wide => self.block::<T, 4, 4, APART, false>(place, items),
                        _ if rows >= 2 => self.block::<T, 2, 4, APART, false>(place, items),
                        _ => self.block::<T, 1, 4, APART, false>(place, items),
                    };
                }
            }
            at += match vectors {
                0 => end - at,
                1 => T::LEN,
                2 | 3 => 2 * T::LEN,
                _ => 4 * T::LEN,
            };
        }
    }

    /// Computes `R` rows × `N` vectors; returns R.
    #[inline(always)]
    unsafe fn block<T: Vector, const R: usize, const N: usize, const APART: bool, const PART: bool>(
        &self,
        place: Place,
        items: &std::ops::Range<usize>,
    ) -> usize {
        let last = self.chunks.len() - 1;
        for (k, chunk) in self.chunks.iter().enumerate() {
            let (first, last) = (k == 0, k == last);
            for item in &self.items[chunk.start + items.start..chunk.start + items.end] {
                // SAFETY: the block lies inside the extents of the task.
                unsafe {
                    if item.kind == Kind::Row {
                        self.sparse::<T, R, N, APART, PART>(item, place, first, last);
                    } else if item.kind == Kind::Bundle {
                        for r in 0..R {
                            let place = Place { y: place.y + r, ..place };
                            // As many sums at a time as stay in registers.
                            if N == 8 {
                                for at in [place.at, place.at + 4 * T::LEN] {
                                    let half = Place { at, ..place };
                                    if T::SUMS == 16 {
                                        self.bundle::<T, ROWS_PER_BUNDLE, 4, APART, PART>(item, half, first, last);
                                    } else {
                                        self.bundle::<T, 2, 4, APART, PART>(item, half, first, last);
                                    }
                                }
                            } else if N * ROWS_PER_BUNDLE <= T::SUMS {
                                self.bundle::<T, ROWS_PER_BUNDLE, N, APART, PART>(item, place, first, last);
                            } else {
                                self.bundle::<T, 2, N, APART, PART>(item, place, first, last);
                            }
                        }
                    } else if N == 8 {
                        for at in [place.at, place.at + 4 * T::LEN] {
                            let half = Place { at, ..place };
                            if T::SUMS == 16 {
                                self.dense::<T, 4, 1, 4, APART, PART>(item, half, R, first, last);
                            } else {
                                self.dense::<T, 2, 1, 4, APART, PART>(item, half, R, first, last);
                            }
                        }
                    } else if T::SUMS == 16 {
                        match (R, N) {
                            (_, 4) => self.dense::<T, 4, 1, 4, APART, PART>(item, place, R, first, last),
                            (1, 2) => self.dense::<T, 8, 1, 2, APART, PART>(item, place, R, first, last),
                            (_, 2) => self.dense::<T, 4, 2, 2, APART, PART>(item, place, R, first, last),
                            (1, _) => self.dense::<T, 8, 1, 1, APART, PART>(item, place, R, first, last),
                            _ => self.dense::<T, 4, 4, 1, APART, PART>(item, place, R, first, last),
                        }
                    } else {
                        match (R, N) {
                            (_, 4) => self.dense::<T, 2, 1, 4, APART, PART>(item, place, R, first, last),
                            (1, 2) => self.dense::<T, 4, 1, 2, APART, PART>(item, place, R, first, last),
                            (_, 2) => self.dense::<T, 2, 2, 2, APART, PART>(item, place, R, first, last),
                            (1, _) => self.dense::<T, 8, 1, 1, APART, PART>(item, place, R, first, last),
                            _ => self.dense::<T, 2, 4, 1, APART, PART>(item, place, R, first, last),
                        }
                    }
                }
            }
        }
        R
    }

    /// The borders of the map at which a row of `N` vectors lies; left and right only if a vector is a position.
    #[inline(always)]
    fn borders<T: Vector, const N: usize>(&self, y: usize, at: usize) -> u8 {
        if !self.bordered {
            return 0;
        }
        let mut here = if y == 0 { edge::TOP } else { 0 };
        if y + 1 == self.height {
            here |= edge::BOTTOM;
        }
        if self.lanes == T::LEN && N > 1 {
            here |= if at == 0 { edge::LEFT } else { 0 };
            here |= if at + N * T::LEN == self.run { edge::RIGHT } else { 0 };
        }
        here
    }

    /// Results of row `row` of weights before anything is added in this chunk: `R` rows of the grid from `y` on, `N`
    /// vectors each. All conditions are checked once for all of them, so that the loops are short and sums stay in
    /// registers.
    #[inline(always)]
    unsafe fn start<T: Vector, const R: usize, const N: usize, const PART: bool>(
        &self,
        sums: &mut [[T; N]; R],
        row: usize,
        Place { y, at, count }: Place,
        first: bool,
    ) {
        // SAFETY: the place lies inside the extents of the task.
        unsafe {
            match self.bias {
                Some(bias) if first => {
                    *sums = [[T::splat(*bias.get_unchecked(row)); N]; R];
                    if let Some(x) = self.before {
                        x.add_to::<T, R, N, PART>(sums, row, Place { y, at, count });
                    }
                }
                _ => {
                    let from = self.out.add(row * self.out_channel + y * self.out_row + at);
                    for r in 0..R {
                        for v in 0..N {
                            sums[r][v] = load::<T, PART>(from.add(r * self.out_row + v * T::LEN), count);
                        }
                    }
                }
            }
        }
    }

    /// Writes the results; in the last chunk everything that follows the sum is applied first.
    #[inline(always)]
    unsafe fn finish<T: Vector, const R: usize, const N: usize, const PART: bool>(
        &self,
        sums: &mut [[T; N]; R],
        row: usize,
        Place { y, at, count }: Place,
        last: bool,
    ) {
        // SAFETY: the place lies inside the extents of the task.
        unsafe {
            if last {
                if let Some(x) = self.after {
                    x.add_to::<T, R, N, PART>(sums, row, Place { y, at, count });
                }
                if self.relu {
                    for r in 0..R {
                        for v in 0..N {
                            sums[r][v] = sums[r][v].relu();
                        }
                    }
                }
            }
            let to = self.out.add(row * self.out_channel + y * self.out_row + at);
            for r in 0..R {
                for v in 0..N {
                    let to = to.add(r * self.out_row + v * T::LEN);
                    if PART { sums[r][v].store_some(to, count) } else { sums[r][v].store(to) }
                }
            }
        }
    }

    /// Computes one row of weights, leaving out its zeros.
    #[inline(always)]
    unsafe fn sparse<T: Vector, const R: usize, const N: usize, const APART: bool, const PART: bool>(
        &self,
        item: &Item,
        Place { y, at, count }: Place,
        first: bool,
        last: bool,
    ) {
        let row = item.row as usize;
        // SAFETY: the block lies inside the extents of the task; items lie inside the taps by construction.
        unsafe {
            let mut sums = [[T::splat(0.0); N]; R];
            self.start::<T, R, N, PART>(&mut sums, row, Place { y, at, count }, first);
            let column = if APART { at / POSITION * self.step } else { at };
            let source = self.source.add(y * self.source_row + column);
            for tap in self.taps.get_unchecked(item.start as usize..item.end as usize) {
                let value = T::splat(tap.value);
                let x = source.add(tap.offset as usize * self.lanes);
                for r in 0..R {
                    let x = x.add(r * self.source_row);
                    for v in 0..N {
                        let x = load::<T, PART>(x.add(place_of::<T, APART>(v, self.step)), count);
                        sums[r][v] = sums[r][v].multiply_add(value, x);
                    }
                }
            }
            self.finish::<T, R, N, PART>(&mut sums, row, Place { y, at, count }, last);
        }
    }

    /// Computes sparse rows in turn, one tap of each at a time: `B` of the bundle's rows together.
    #[inline(always)]
    unsafe fn bundle<T: Vector, const B: usize, const N: usize, const APART: bool, const PART: bool>(
        &self,
        item: &Item,
        Place { y, at, count }: Place,
        first: bool,
        last: bool,
    ) {
        let rows = &self.bundled[item.row as usize..(item.row + item.rows) as usize];
        for (begin, rows) in (0..ROWS_PER_BUNDLE).step_by(B).zip(rows.chunks(B)) {
            // SAFETY: the block lies inside the extents of the task; items lie inside the taps by construction, and bundled
            // rows are rows of weights.
            unsafe {
                let mut sums = [[T::splat(0.0); N]; B];
                // Rows past the last of a short bundle repeat it and are not written.
                for i in 0..B {
                    let row = rows[i.min(rows.len() - 1)] as usize;
                    let own = std::array::from_mut(&mut sums[i]);
                    self.start::<T, 1, N, PART>(own, row, Place { y, at, count }, first);
                }
                let column = if APART { at / POSITION * self.step } else { at };
                let source = self.source.add(y * self.source_row + column + item.values * self.lanes);
                for round in self.rounds.get_unchecked(item.start as usize..item.end as usize) {
                    for i in 0..B {
                        let x = source.add(round.offset(begin + i) * self.step_of_rounds);
                        let value = T::splat(round.values[begin + i]);
                        for v in 0..N {
                            let x = load::<T, PART>(x.add(place_of::<T, APART>(v, self.step)), count);
                            sums[i][v] = sums[i][v].multiply_add(value, x);
                        }
                    }
                }
                for i in 0..B {
                    if let Some(&row) = rows.get(i) {
                        let own = std::array::from_mut(&mut sums[i]);
                        self.finish::<T, 1, N, PART>(own, row as usize, Place { y, at, count }, last);
                    }
                }
            }
        }
    }

    /// Computes a panel of rows of weights with every tap of the panel: `M` of them at a time over `Q` rows × `N`
    /// vectors.
    #[inline(always)]
    unsafe fn dense<T: Vector, const M: usize, const Q: usize, const N: usize, const APART: bool, const PART: bool>(
        &self,
        item: &Item,
        Place { y, at, count }: Place,
        rows: usize,
        first: bool,
        last: bool,
    ) {
        let valid = item.rows as usize;
        let column = if APART { at / POSITION * self.step } else { at };
        for q in (0..rows).step_by(Q) {
            for m in (0..valid).step_by(M) {
                // SAFETY: the block lies inside the extents of the task; the panel has WEIGHTS_PER_PANEL weights per tap.
                unsafe {
                    let mut sums = [[[T::splat(0.0); N]; Q]; M];
                    for i in 0..M {
                        // Rows past the last of a short panel repeat it and are not written.
                        let row = item.row as usize + (m + i).min(valid - 1);
                        self.start::<T, Q, N, PART>(&mut sums[i], row, Place { y: y + q, at, count }, first);
                    }
                    let source = self.source.add((y + q) * self.source_row + column);
                    let mut weights = self.panels.as_ptr().add(item.values + m);
                    let taps = item.start as usize..item.end as usize;
                    // Other shapes multiply the zeros at borders: to test for them would cost more than it saves.
                    let here = if Q == 1 && N == 4 { self.borders::<T, N>(y + q, at) } else { 0 };
                    for (&offset, edges) in self.offsets.get_unchecked(taps.clone()).iter().zip(&self.edges[taps]) {
                        let beyond = edges & here;
                        if beyond & (edge::TOP | edge::BOTTOM) == 0 {
                            let x = source.add(offset as usize * self.lanes);
                            let mut operand = [[T::splat(0.0); N]; Q];
                            for r in 0..Q {
                                for v in 0..N {
                                    let from = x.add(r * self.source_row + place_of::<T, APART>(v, self.step));
                                    operand[r][v] = load::<T, PART>(from, count);
                                }
                            }
                            if beyond == 0 {
                                add::<T, M, Q, N>(&mut sums, weights, &operand, 0..N);
                            } else if beyond & edge::LEFT != 0 {
                                add::<T, M, Q, N>(&mut sums, weights, &operand, 1..N);
                            } else {
                                add::<T, M, Q, N>(&mut sums, weights, &operand, 0..N - 1);
                            }
                        }
                        weights = weights.add(WEIGHTS_PER_PANEL);
                    }
                    for i in 0..M {
                        if m + i < valid {
                            let row = item.row as usize + m + i;
                            self.finish::<T, Q, N, PART>(&mut sums[i], row, Place { y: y + q, at, count }, last);
                        }
                    }
                }
            }
        }
    }
}

/// Runs `rounds` multiply-adds of twelve vectors that never leave registers; returns how many numbers that was.
pub(super) fn registers(instructions: super::Instructions, rounds: u64) -> u64 {
    // SAFETY: the instructions are asked for.
    unsafe {
        match instructions {
            #[cfg(target_arch = "x86_64")]
            super::Instructions::Avx512 if super::Instructions::available().contains(&instructions) => {
                spin_avx512(rounds)
            }
            #[cfg(target_arch = "x86_64")]
            super::Instructions::Avx2 if super::Instructions::available().contains(&instructions) => spin_avx2(rounds),
            _ => spin::<super::vector::Portable>(rounds),
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vl,avx2,fma")]
unsafe fn spin_avx512(rounds: u64) -> u64 {
    // SAFETY: this function has the instructions.
    unsafe { spin::<super::vector::Avx512>(rounds) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn spin_avx2(rounds: u64) -> u64 {
    // SAFETY: this function has the instructions.
    unsafe { spin::<super::vector::Avx2>(rounds) }
}

#[inline(always)]
unsafe fn spin<T: Vector>(rounds: u64) -> u64 {
    // SAFETY: the caller has the instructions of `T`; the buffer holds a vector.
    unsafe {
        let (a, b) = (T::splat(std::hint::black_box(0.999)), T::splat(std::hint::black_box(1e-3)));
        let mut sums = [b; 12];
        for _ in 0..rounds {
            for sum in &mut sums {
                *sum = b.multiply_add(*sum, a);
            }
        }
        let mut out = [0.0f32; 16];
        for sum in sums {
            sum.add(T::load(out.as_ptr())).store(out.as_mut_ptr());
        }
        std::hint::black_box(out);
        rounds * 12 * T::LEN as u64
    }
}
