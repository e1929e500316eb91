//! Inner loops in the machine's own instructions, which are chosen at run time: sparse and dense sums over grids and
//! rows.
//!
//! Every value is one chain of multiply-adds in ascending order of the operand, whatever the kernel, the number of lanes
//! and the width of a vector. A kernel that multiplies zeros adds them exactly, so dense and sparse kernels give the same
//! bits and the choice between them is one of speed alone. Without a fused multiply-add (the fallback on old x86) the
//! bits differ from other machines, but not between kernels.
//!
//! This module may use `unsafe`. Its public functions are safe: they check every length once per call, before any
//! pointer is made.

#![allow(unsafe_code)]

mod aligned;
mod block;
mod clock;
mod core;
mod cost;
pub mod elementary;
mod grid;
mod pool;
mod products;
mod slices;
mod turn;
mod vector;

pub use aligned::Aligned;
pub use clock::thread_seconds;
pub use cost::{Choice, Cost, register_peak};
pub use grid::{Borders, Finish, Grid, GridWeights, Residual};
pub use pool::{Crew, together, with_crew};
pub use products::{Pair, Products, ROW, Run, TILE};
pub use slices::{FEW, RowWeights, Samples};
pub use turn::turn_squares;

/// A set of vector instructions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Instructions {
    /// Instructions that every machine has.
    Portable,
    /// AVX2 and FMA: vectors of 8.
    Avx2,
    /// AVX-512 F and VL: vectors of 16.
    Avx512,
}

impl Instructions {
    /// The widest instructions that this machine has.
    pub fn detect() -> Self {
        *Self::available().last().unwrap_or(&Instructions::Portable)
    }

    /// All instructions that this machine has, narrowest first.
    pub fn available() -> &'static [Self] {
        const ALL: [Instructions; 3] = [Instructions::Portable, Instructions::Avx2, Instructions::Avx512];
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma");
            let avx512 =
                std::arch::is_x86_feature_detected!("avx512f") && std::arch::is_x86_feature_detected!("avx512vl");
            if avx2 && avx512 {
                return &ALL;
            }
            if avx2 {
                return &ALL[..2];
            }
        }
        &ALL[..1]
    }

    /// The name for tables.
    pub fn name(self) -> &'static str {
        match self {
            Instructions::Portable => "portable",
            Instructions::Avx2 => "AVX2",
            Instructions::Avx512 => "AVX-512",
        }
    }
}

#[cfg(test)]
mod tests;
