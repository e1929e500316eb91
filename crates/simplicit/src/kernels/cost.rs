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
}

impl Cost {
    /// Dense panels only, or sparse rows only: to measure, and to test.
    pub fn only(choice: Choice) -> Self {
        let ratio = match choice {
            Choice::Dense => f64::INFINITY,
            Choice::Sparse => 0.0,
        };
        Self { ratio, ..Self::default() }
    }

    /// The faster for `rows` rows that read `union` taps between them, `nonzeros` weights in all.
    pub fn choose(&self, rows: usize, union: usize, nonzeros: usize) -> Choice {
        if self.ratio * nonzeros as f64 > (rows * union) as f64 { Choice::Dense } else { Choice::Sparse }
    }
}

impl Default for Cost {
    fn default() -> Self {
        Self { ratio: 1.2, cache: 24 << 10, taps_per_chunk: 8.0 }
    }
}

/// Relative time of one sample through a dense panel of so many weights, zeros included.
pub(super) fn single_dense(_instructions: super::Instructions, weights: usize) -> f64 {
    weights as f64
}

/// The same through sparse slices of so many weights, filling included.
pub(super) fn single_sparse(instructions: super::Instructions, weights: usize) -> f64 {
    let each = match instructions {
        super::Instructions::Avx512 => 1.5,
        super::Instructions::Avx2 => 7.0,
        super::Instructions::Portable => 7.0,
    };
    each * weights as f64
}

impl Cost {
    /// For a grid of `positions` results with so many samples side by side.
    pub fn of_grid(instructions: super::Instructions, lanes: usize, positions: usize) -> Self {
        let _ = instructions;
        // `cargo bench -p simplicit --bench inference -- calibrate`. A row of few vectors waits for its own sums, which a
        // panel of eight rows does not; beside one another, sparse rows load an operand for every multiply-add.
        let ratio = match (positions, lanes) {
            (1, 0..=16) => 4.5,
            (1, 17..=32) => 2.4,
            (_, _) if lanes.is_multiple_of(16) => 1.3,
            _ => 1.8,
        };
        Self { ratio, ..Self::default() }
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
