//! Seeded random numbers whose stream is part of the file formats: the same seed gives the same run in every version.

/// SplitMix64: 64 bits of state, full period, good enough for sampling and tests.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// The stream of a seed; different seeds have different streams.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Uniform over all 64-bit numbers.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in [0, 1).
    pub fn uniform(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Uniform in 0..bound; `bound` must be positive.
    pub fn below(&mut self, bound: usize) -> usize {
        ((u128::from(self.bits()) * bound as u128) >> 64) as usize
    }

    /// Standard normal (Box–Muller, one of the pair).
    pub fn normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.uniform()).ln()).sqrt();
        radius * (std::f64::consts::TAU * self.uniform()).cos()
    }

    /// `count` different numbers of 0..total in random order (the head of a Fisher–Yates shuffle).
    pub fn choose(&mut self, total: usize, count: usize) -> Vec<usize> {
        let mut all: Vec<usize> = (0..total).collect();
        let count = count.min(total);
        for i in 0..count {
            let j = i + self.below(total - i);
            all.swap(i, j);
        }
        all.truncate(count);
        all
    }
}
