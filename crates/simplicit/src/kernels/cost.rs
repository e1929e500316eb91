//! The cost of a multiply-add in each kernel, from which the kernel of a block is chosen.
//!
//! Measured by `cargo bench -p simplicit --bench inference -- calibrate` on three machines with AVX-512: cores with
//! one multiply-add of 16 numbers in a cycle (AMD EPYC, family 25) and with two (Intel Xeon, model 207; AMD EPYC,
//! family 26). Sparse rows load an operand for every multiply-add, so two multiply-adds per cycle, which make dense
//! panels twice as fast, help them less.

use super::Instructions;
use super::core::Core;

/// The kernel of a panel of rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Choice {
    /// Multiplies every tap of the panel, zeros included.
    Dense,
    /// Row by row, leaving out zeros.
    Sparse,
}

/// Relative costs, measured.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Cost {
    /// Time of a multiply-add of a sparse row divided by that of a dense panel.
    pub ratio: f64,
    /// Bytes of the source that a chunk may read.
    pub cache: usize,
    /// The fewest taps of a row in a chunk.
    pub taps_per_chunk: f64,
    /// Whether sparse rows run in bundles, which helps if a result has so few vectors that a row would wait for its
    /// own sum.
    pub bundles: bool,
    /// Number of rows of weights that a dense panel multiplies at a time; fewer rows take as long.
    pub rows_at_a_time: usize,
    /// The kernel that every panel gets, even where the other is faster.
    pub only: Option<Choice>,
}

impl Cost {
    /// Chooses dense panels only, or sparse rows only: to measure, and to test.
    pub fn only(self, choice: Choice) -> Self {
        Self { only: Some(choice), ..self }
    }

    /// The faster kernel for `rows` rows that together read `union` different taps and have `nonzeros` weights.
    pub fn choose(&self, rows: usize, union: usize, nonzeros: usize) -> Choice {
        let dense = self.ratio * nonzeros as f64 > self.multiplied(rows, union);
        self.only.unwrap_or(if dense { Choice::Dense } else { Choice::Sparse })
    }

    /// Number of weights that a dense panel of this many rows and taps multiplies.
    pub(super) fn multiplied(&self, rows: usize, union: usize) -> f64 {
        (rows.next_multiple_of(self.rows_at_a_time) * union) as f64
    }
}

impl Default for Cost {
    fn default() -> Self {
        // Three quarters of the first-level cache: taps and results pass through it too.
        let cache = Core::own().cache / 4 * 3;
        Self { ratio: 1.2, cache, taps_per_chunk: 8.0, bundles: false, rows_at_a_time: 4, only: None }
    }
}

/// Time of dense panels of 64 rows (the last one of 16, 32 or 48): `each` for a vector of 16 weights, and at least `wait`
/// for a column, because the next one waits for its sums.
fn panels(rows: usize, columns: usize, each: f64, wait: f64) -> f64 {
    let panel =
        |rows: usize| columns as f64 * (rows.div_ceil(16) as f64 * each).max(if rows == 0 { 0.0 } else { wait });
    (rows / 64) as f64 * panel(64) + panel(rows % 64)
}

/// Whether this core has two wide multiply-adds in a cycle, and uses them.
fn two_wide(instructions: Instructions) -> bool {
    instructions == Instructions::Avx512 && Core::own().two_wide
}

/// Number of inputs in a window of slices: one register if a permutation of one takes half as long as that of two.
pub(super) fn window(instructions: Instructions, samples: usize) -> usize {
    if Core::own().quick_permutation && instructions == Instructions::Avx512 && samples > 1 { 16 } else { 32 }
}

/// Time of `samples` samples that lie apart through dense panels, divided by that through slices of `sparse` weights
/// (the zeros that fill them up included).
pub(super) fn dense_over_slices(
    instructions: Instructions,
    samples: usize,
    rows: usize,
    columns: usize,
    sparse: usize,
) -> f64 {
    if samples > 1 {
        return few_dense_over_slices(instructions, samples.min(8), rows, columns, sparse);
    }
    // In units of a vector of 16 dense weights from the second-level cache.
    let cached = rows.next_multiple_of(16) * columns * size_of::<f32>() <= 24 << 10;
    let (each, start, wait) = match instructions {
        Instructions::Avx512 if two_wide(instructions) => (1.6, 35.0, 2.7),
        Instructions::Avx512 => (1.43, 35.0, 2.1),
        // A gather loads its numbers one by one.
        Instructions::Avx2 | Instructions::Portable => (8.6, 0.0, 2.1),
    };
    let dense = panels(rows, columns, if cached { 0.8 } else { 1.0 }, wait);
    dense / (each * sparse as f64 / 16.0 + start * rows.div_ceil(64) as f64).max(1e-9)
}

/// The same of two to eight samples.
fn few_dense_over_slices(
    instructions: Instructions,
    samples: usize,
    rows: usize,
    columns: usize,
    sparse: usize,
) -> f64 {
    // Nanoseconds per vector of 16 weights, for all samples, from the first- or second-level cache.
    let dense = [0.32, 0.32, 0.325, 0.354, 0.466, 0.62, 0.7, 0.81, 0.93][samples];
    let slices = match instructions {
        Instructions::Avx512 if Core::own().quick_permutation => {
            [0.47, 0.47, 0.571, 0.664, 0.766, 1.016, 1.078, 1.198, 1.372][samples]
        }
        // Counted, not measured: one permutation of two registers per cycle, compared with two dense multiply-adds.
        Instructions::Avx512 if two_wide(instructions) => 2.2 * dense,
        // Compared with one, it is counted for two and three samples and measured from four samples on.
        Instructions::Avx512 => dense * if samples < 4 { 1.8 } else { 2.1 },
        // A gather loads its numbers one by one.
        Instructions::Avx2 | Instructions::Portable => 8.6 * dense,
    };
    // Weights that do not stay in the second-level cache have to be waited for; the wait matters less the more work
    // there is for each.
    let far = |weights: usize| match samples {
        _ if weights * size_of::<f32>() <= 1 << 20 => 0.0,
        ..=2 => 0.18,
        3 => 0.12,
        _ => 0.09,
    };
    let wide = rows.next_multiple_of(16) * columns;
    let all = panels(rows, columns, dense + far(wide), 0.7);
    let left = (slices + far(sparse)) * sparse as f64 / 16.0 + (20 * samples * rows.div_ceil(64)) as f64;
    all / left.max(1e-9)
}

/// Time of two to eight samples through dense panels, divided by that of sparse bundles.
pub(super) fn dense_over_bundles(
    instructions: Instructions,
    samples: usize,
    rows: usize,
    columns: usize,
    nonzeros: usize,
) -> f64 {
    // In units of a tap of a bundle, which takes as long for one sample as for eight.
    let each = match instructions {
        Instructions::Avx512 if two_wide(instructions) => {
            [0.05, 0.05, 0.072, 0.09, 0.115, 0.145, 0.17, 0.195, 0.215][samples.min(8)]
        }
        // Two samples use each weight so little that its place in the caches matters.
        Instructions::Avx512 if samples == 2 => {
            if rows * columns <= 100_000 {
                0.098
            } else {
                0.112
            }
        }
        Instructions::Avx512 => [0.06, 0.06, 0.1, 0.131, 0.185, 0.218, 0.26, 0.3, 0.362][samples.min(8)],
        // Eight samples are a whole vector, for which the panels of a grid are faster.
        _ if samples >= 8 => f64::INFINITY,
        _ => [0.08, 0.08, 0.09, 0.135, 0.179, 0.22, 0.27, 0.317][samples],
    };
    // The results of dense panels are transposed; every sparse row has a start and an end, and bundles are filled up
    // with rows of zeros.
    let dense = panels(rows, columns, 16.0 * each, 2.8) + 1.4 * (rows * samples) as f64;
    let filled = rows.next_multiple_of(super::grid::ROWS_PER_BUNDLE) as f64 / rows.max(1) as f64;
    // Inputs that fill half of the first-level cache leave too little room for taps.
    let tap = if columns * samples * size_of::<f32>() >= 16 << 10 { 1.08 } else { 1.0 };
    dense / (filled * tap * nonzeros as f64 + 5.0 * rows as f64).max(1e-9)
}

impl Cost {
    /// Number of multiply-adds of dense panels per cycle, in vectors of 16.
    pub fn vectors_in_a_cycle(instructions: Instructions) -> f64 {
        match instructions {
            Instructions::Avx512 if two_wide(instructions) => 2.0,
            _ => 1.0,
        }
    }

    /// The costs for a grid of `positions` results with `lanes` samples side by side.
    pub fn of_grid(instructions: Instructions, lanes: usize, positions: usize) -> Self {
        // The numbers of `block::Task::block`: eight rows if a result has so few vectors that fewer rows would wait
        // for their sums.
        let rows_at_a_time = match (instructions, positions, lanes) {
            (Instructions::Avx512, 1, ..=63) => 8,
            (Instructions::Avx512, ..) => 4,
            (_, 1, ..=15) => 8,
            (_, 1, ..=31) => 4,
            _ => 2,
        };
        // Sparse rows load an operand for every multiply-add, and along a row of the map operands straddle cache
        // lines.
        let (two_wide, quick) = (two_wide(instructions), Core::own().quick_permutation);
        let pick = |one: f64, two: f64| if two_wide { two } else { one };
        let ratio = match (instructions, positions, lanes) {
            (Instructions::Avx512, 1, ..=16) if quick => 1.95,
            (Instructions::Avx512, 1, ..=16) => pick(2.15, 2.25),
            (Instructions::Avx512, 1, ..=32) => pick(1.54, 1.88),
            (Instructions::Avx512, 1, ..=64) => pick(1.42, 1.6),
            (Instructions::Avx512, 1, _) => pick(1.42, 1.5),
            (_, 1, ..=8) => 2.3,
            (_, 1, ..=16) => 1.75,
            (_, 1, ..=32) => 1.5,
            (_, 1, _) => 1.3,
            (_, _, 8) => pick(1.38, 2.45),
            // The terms that dense panels leave out at borders are not counted here, see `Borders::inside`.
            (_, _, lanes) if lanes.is_multiple_of(16) => pick(1.27, 1.3),
            (_, _, 4) => pick(1.53, 2.55),
            (_, _, 2 | 6) => pick(1.75, 3.1),
            _ => pick(1.8, 3.2),
        };
        // Rows of more vectors have enough sums of their own.
        let bundles = positions == 1 && lanes <= if instructions == Instructions::Avx512 { 64 } else { 32 };
        Self { ratio, bundles, rows_at_a_time, ..Self::default() }
    }
}

/// Seconds and multiply-adds of a loop that uses registers alone: the most that this core can do.
pub fn register_peak(instructions: Instructions) -> (f64, u64) {
    let mut best = (f64::INFINITY, 0);
    for _ in 0..200 {
        let start = super::thread_seconds();
        let count = super::block::registers(instructions, 20_000);
        let seconds = super::thread_seconds() - start;
        if seconds < best.0 {
            best = (seconds, count);
        }
    }
    best
}
