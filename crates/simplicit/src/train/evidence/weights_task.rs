//! Row weights as work for another process: sums over blocks of samples, added up in order by whoever asks.

use super::importance::OwnWeights;
use super::joint_importance::Together;
use crate::linalg::Matrix;
use crate::model::ImplicitModel;
use crate::network::Network;
use crate::parallel::{self, Cancel, Threads};
use crate::statistics::BLOCK;
use crate::train::evidence::walk::SAMPLES;
use crate::train::evidence::walks::PIECE;
use crate::{Error, Result};

/// Which sums.
#[derive(Debug, Clone)]
pub enum WeightsTask {
    /// Of [`importance`](crate::train::importance()), which needs the network.
    Own {
        /// Over the first so many samples of the run.
        samples: usize,
        /// Samples in a block, a power of two.
        size: usize,
        /// From the softmax, per sample.
        draws: usize,
        /// Of the draws.
        seed: u64,
        /// Whether the network has feature maps, whose samples are cut into pieces.
        maps: bool,
    },
    /// Of what the errors of a rough model do together.
    Joint {
        /// Over the first so many samples of the run.
        samples: usize,
        /// Whose outputs are to stay.
        baseline: Box<ImplicitModel>,
        /// Whose errors are looked at.
        rough: Box<ImplicitModel>,
    },
}

impl WeightsTask {
    /// Over the first so many samples of the run.
    pub fn samples(&self) -> usize {
        match self {
            Self::Own { samples, .. } | Self::Joint { samples, .. } => *samples,
        }
    }

    /// Samples in a block. A shard is a whole number of blocks, the last one what is left.
    pub fn size(&self) -> usize {
        match self {
            Self::Own { size, .. } => *size,
            Self::Joint { .. } => SAMPLES,
        }
    }

    /// Samples that shards of the same training are made of: those of a walk, or blocks of statistics.
    pub fn unit(&self) -> usize {
        let maps = match self {
            Self::Own { maps, .. } => *maps,
            Self::Joint { .. } => true,
        };
        if maps { PIECE } else { BLOCK }
    }

    /// The sums of every block of some inputs, the samples from number `first` on.
    pub fn run(
        &self,
        network: Option<&Network>,
        inputs: &Matrix<f32>,
        first: usize,
        threads: Threads,
        cancel: &Cancel,
    ) -> Result<Vec<Vec<f64>>> {
        let (size, samples) = (self.size(), inputs.rows());
        // Tasks come from other processes: nothing in them is trusted.
        if size == 0 || !PIECE.is_multiple_of(size) || !first.is_multiple_of(size) {
            return Err(Error::shape("row weights task", format!("blocks that divide {PIECE} samples"), size));
        }
        match (self, network) {
            (Self::Own { draws, seed, .. }, Some(network)) => {
                let own = OwnWeights::new(network, *draws, *seed);
                if own.size() != size {
                    return Err(Error::shape("blocks of row weights", own.size(), size));
                }
                blocks(size, samples, threads, cancel, |k, range| own.block(&part(inputs, range)?, first / size + k))
            }
            (Self::Own { .. }, None) => Err(Error::shape("row weights task", "a network", "none")),
            (Self::Joint { baseline, rough, .. }, _) => {
                if baseline.shape() != rough.shape() || inputs.cols() != baseline.shape().inputs {
                    return Err(Error::shape("models of row weights", format!("{:?}", baseline.shape()), "others"));
                }
                let joint = Together::new(baseline, rough)?;
                blocks(size, samples, threads, cancel, |k, range| joint.block(&part(inputs, range)?, first / size + k))
            }
        }
    }

    /// Serialises the task for another process.
    pub fn to_bytes(&self) -> Vec<u8> {
        let (numbers, models) = match self {
            Self::Own { samples, size, draws, seed, maps } => {
                ([*samples as u64, *size as u64, *draws as u64, *seed, u64::from(*maps)], Vec::new())
            }
            Self::Joint { samples, baseline, rough } => {
                let first = baseline.to_bytes();
                ([*samples as u64, 0, first.len() as u64, 0, 1], [first, rough.to_bytes()].concat())
            }
        };
        [numbers.map(u64::to_le_bytes).concat(), models].concat()
    }

    /// The inverse of [`WeightsTask::to_bytes`].
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let bad = || Error::shape("row weights task", "what to_bytes wrote", format!("{} other bytes", bytes.len()));
        let (head, models) = bytes.split_first_chunk::<40>().ok_or_else(bad)?;
        let number = |k: usize| head.as_chunks::<8>().0.get(k).map_or(0, |c| u64::from_le_bytes(*c));
        let count = |k: usize| usize::try_from(number(k)).map_err(|_| bad());
        let samples = count(0)?;
        if count(1)? > 0 {
            return Ok(Self::Own { samples, size: count(1)?, draws: count(2)?, seed: number(3), maps: number(4) != 0 });
        }
        let (baseline, rough) = models.split_at_checked(count(2)?).ok_or_else(bad)?;
        let read = |bytes: &[u8]| ImplicitModel::from_bytes(bytes, "row weights task").map(Box::new);
        Ok(Self::Joint { samples, baseline: read(baseline)?, rough: read(rough)? })
    }
}

fn part(inputs: &Matrix<f32>, samples: std::ops::Range<usize>) -> Result<Matrix<f32>> {
    let width = inputs.cols();
    Matrix::from_vec(samples.len(), width, inputs.as_slice()[samples.start * width..samples.end * width].to_vec())
}

fn blocks(
    size: usize,
    samples: usize,
    threads: Threads,
    cancel: &Cancel,
    of: impl Fn(usize, std::ops::Range<usize>) -> Result<Vec<f64>> + Sync,
) -> Result<Vec<Vec<f64>>> {
    let mut out = Vec::new();
    parallel::fold(
        threads,
        samples.div_ceil(size),
        |k| {
            cancel.check()?;
            of(k, k * size..((k + 1) * size).min(samples))
        },
        |_, sums| {
            out.push(sums);
            Ok(())
        },
    )?;
    Ok(out)
}
