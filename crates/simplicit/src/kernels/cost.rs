//! What a multiply-add costs in each kernel, and so which kernel a block gets.

/// What a panel of rows gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Choice {
    /// Every tap of the panel, zeros included.
    Dense,
    /// Row by row, zeros left out.
    Sparse,
}

/// Relative costs, measured.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Cost {
    /// Time of a multiply-add of a sparse row over one of a dense panel.
    pub ratio: f64,
    /// Bytes of the source that a chunk may read.
    pub cache: usize,
    /// Fewest taps of a row in a chunk.
    pub taps_per_chunk: f64,
    /// Sparse rows run in bundles: where a result is so few vectors that a row would wait for its own sum.
    pub bundles: bool,
}

impl Cost {
    /// Dense panels only, or sparse rows only: to measure, and to test.
    pub fn only(self, choice: Choice) -> Self {
        let ratio = match choice {
            Choice::Dense => f64::INFINITY,
            Choice::Sparse => 0.0,
        };
        Self { ratio, ..self }
    }

    /// The faster for `rows` rows that read `union` taps between them, `nonzeros` weights in all.
    pub fn choose(&self, rows: usize, union: usize, nonzeros: usize) -> Choice {
        if self.ratio * nonzeros as f64 > (rows * union) as f64 { Choice::Dense } else { Choice::Sparse }
    }
}

impl Default for Cost {
    fn default() -> Self {
        Self { ratio: 1.2, cache: 24 << 10, taps_per_chunk: 8.0, bundles: false }
    }
}

/// Time of one sample through dense panels over that through sparse slices, of so many weights, zeros and filling included.
pub(super) fn dense_over_slices(instructions: super::Instructions, dense: usize, sparse: usize) -> f64 {
    let each = match instructions {
        super::Instructions::Avx512 => 1.5,
        super::Instructions::Avx2 | super::Instructions::Portable => 7.0,
    };
    dense as f64 / (each * sparse as f64).max(1e-9)
}

/// Time of a few samples through dense panels of so many weights over that of sparse bundles, at most 8.
pub(super) fn dense_over_bundles(
    instructions: super::Instructions,
    samples: usize,
    dense: usize,
    nonzeros: usize,
) -> f64 {
    // A bundle takes as long for one sample as for eight.
    let each = match instructions {
        super::Instructions::Avx512 => [17.0, 17.0, 13.0, 7.3, 5.4, 4.7, 4.0, 3.4, 2.8][samples.min(8)],
        // Eight samples are a whole vector: the panels of a grid are faster.
        _ => [12.0, 12.0, 6.9, 4.7, 4.6, 3.9, 3.5, 3.0, 0.0][samples.min(8)],
    };
    dense as f64 / (each * nonzeros as f64).max(1e-9)
}

impl Cost {
    /// For a grid of `positions` results with so many samples side by side.
    pub fn of_grid(instructions: super::Instructions, lanes: usize, positions: usize) -> Self {
        let _ = instructions;
        // `cargo bench -p simplicit --bench inference -- calibrate`. A row of few vectors waits for its own sums, which a
        // panel of eight rows does not; beside one another, sparse rows load an operand for every multiply-add.
        let ratio = match (positions, lanes) {
            (1, 0..=16) => 2.4,
            (1, 17..=32) => 1.85,
            (1, _) => 1.6,
            (_, 8) => 1.35,
            _ if lanes.is_multiple_of(16) => 1.3,
            _ => 1.8,
        };
        Self { ratio, bundles: positions == 1 && lanes <= 16, ..Self::default() }
    }
}

/// Seconds and multiply-adds of a loop that touches registers alone: what this core can do at most.
pub fn register_peak(instructions: super::Instructions) -> (f64, u64) {
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
