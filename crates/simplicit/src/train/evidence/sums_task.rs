//! Row weights and the error of the outputs as work for another process: sums over blocks of samples, which the
//! caller adds up in order.

use super::importance::{OwnWeights, block_size};
use super::joint_importance::Together;
use crate::evaluate::OutputErrors;
use crate::linalg::Matrix;
use crate::model::ImplicitModel;
use crate::network::Network;
use crate::parallel::{self, Cancel, Threads};
use crate::statistics::BLOCK;
use crate::train::evidence::walk::SAMPLES;
use crate::train::evidence::walks::PIECE;
use crate::{Error, Result};

/// The sums to compute.
#[derive(Debug, Clone)]
pub enum SumsTask {
    /// The sums of [`importance`](crate::train::importance()), which needs the network.
    Own {
        /// How many of the run's first samples to use.
        samples: usize,
        /// Samples in a block, a power of two.
        size: usize,
        /// Number of draws from the softmax, per sample.
        draws: usize,
        /// Seed of the draws.
        seed: u64,
        /// Whether the network has feature maps, whose samples are cut into pieces.
        maps: bool,
    },
    /// The sums of the joint effect of the errors of a rough model.
    Joint {
        /// How many of the run's first samples to use.
        samples: usize,
        /// The model whose outputs should stay.
        baseline: Box<ImplicitModel>,
        /// The model whose errors are examined.
        rough: Box<ImplicitModel>,
    },
    /// The sums of the error of the outputs on the samples, for a baseline with feature maps.
    Errors {
        /// How many of the run's first samples to use.
        samples: usize,
        /// The model with the correct outputs.
        baseline: Box<ImplicitModel>,
        /// The model whose outputs are compared with them.
        model: Box<ImplicitModel>,
    },
}

impl SumsTask {
    /// How many of the run's first samples the sums are over.
    pub fn samples(&self) -> usize {
        match self {
            Self::Own { samples, .. } | Self::Joint { samples, .. } | Self::Errors { samples, .. } => *samples,
        }
    }

    /// The kind of sums, as a word.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Own { .. } | Self::Joint { .. } => "weights",
            Self::Errors { .. } => "errors",
        }
    }

    /// Number of samples in a block. A shard is a whole number of blocks, except that the last one has the rest.
    pub fn size(&self) -> usize {
        match self {
            Self::Own { size, .. } => *size,
            Self::Joint { .. } => SAMPLES,
            Self::Errors { .. } => OutputErrors::BLOCK,
        }
    }

    /// Number of samples of which shards of the same training are multiples: that of a walk, or of blocks of
    /// statistics.
    pub fn unit(&self) -> usize {
        let maps = match self {
            Self::Own { maps, .. } => *maps,
            Self::Joint { .. } | Self::Errors { .. } => true,
        };
        if maps { PIECE } else { BLOCK }
    }

    /// The sums of every block of some inputs; `first` is the number of the first sample.
    pub fn run(
        &self,
        network: Option<&Network>,
        inputs: &Matrix<f32>,
        first: usize,
        threads: Threads,
        cancel: &Cancel,
    ) -> Result<Vec<Vec<f64>>> {
        let (size, samples) = (self.size(), inputs.rows());
        // Tasks come from other processes, so nothing in them is trusted.
        if size == 0 || !PIECE.is_multiple_of(size) || !first.is_multiple_of(size) {
            return Err(Error::shape("sums task", format!("blocks that divide {PIECE} samples"), size));
        }
        match (self, network) {
            (Self::Own { draws, seed, .. }, Some(network)) => {
                let model = ImplicitModel::from_network(network)?;
                if block_size(&model) != size {
                    return Err(Error::shape("blocks of row weights", block_size(&model), size));
                }
                let own = OwnWeights::new(&model, *draws, *seed)?;
                blocks(size, samples, threads, cancel, |k, range| own.block(&part(inputs, range)?, first / size + k))
            }
            (Self::Own { .. }, None) => Err(Error::shape("sums task", "a network", "none")),
            (Self::Joint { baseline, rough: other, .. } | Self::Errors { baseline, model: other, .. }, _)
                if baseline.shape() != other.shape() || inputs.cols() != baseline.shape().inputs =>
            {
                Err(Error::shape("models of a sums task", format!("{:?}", baseline.shape()), "others"))
            }
            (Self::Joint { baseline, rough, .. }, _) => {
                let joint = Together::new(baseline, rough)?;
                blocks(size, samples, threads, cancel, |k, range| joint.block(&part(inputs, range)?, first / size + k))
            }
            (Self::Errors { baseline, model, .. }, _) => {
                let errors = OutputErrors::new(model, Some(baseline))?;
                let maps = || Error::shape("baseline of a sums task", "one with feature maps", "another");
                blocks(size, samples, threads, cancel, |_, range| {
                    let at = first + range.start;
                    Ok(errors.of_inputs(&part(inputs, range)?, at)?.ok_or_else(maps)?.to_vec())
                })
            }
        }
    }

    /// Serialises the task for another process.
    pub fn to_bytes(&self) -> Vec<u8> {
        self.parts().concat()
    }

    /// [`SumsTask::to_bytes`] in two parts, of which the second, the baseline, is that of the walks of the training, or empty.
    pub fn parts(&self) -> [Vec<u8>; 2] {
        let of_models = |samples: usize, kind: u64, other: &ImplicitModel, baseline: &ImplicitModel| {
            let other = other.to_bytes();
            ([samples as u64, 0, other.len() as u64, kind, 1], other, baseline.to_bytes())
        };
        let (numbers, other, baseline) = match self {
            Self::Own { samples, size, draws, seed, maps } => {
                let numbers = [*samples as u64, *size as u64, *draws as u64, *seed, u64::from(*maps)];
                (numbers, Vec::new(), Vec::new())
            }
            Self::Joint { samples, baseline, rough } => of_models(*samples, 0, rough, baseline),
            Self::Errors { samples, baseline, model } => of_models(*samples, 1, model, baseline),
        };
        [[numbers.map(u64::to_le_bytes).concat(), other].concat(), baseline]
    }

    /// The inverse of [`SumsTask::to_bytes`].
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let bad = || Error::shape("sums task", "what to_bytes wrote", format!("{} other bytes", bytes.len()));
        let (head, models) = bytes.split_first_chunk::<40>().ok_or_else(bad)?;
        let number = |k: usize| head.as_chunks::<8>().0.get(k).map_or(0, |c| u64::from_le_bytes(*c));
        let count = |k: usize| usize::try_from(number(k)).map_err(|_| bad());
        let samples = count(0)?;
        if count(1)? > 0 {
            return Ok(Self::Own { samples, size: count(1)?, draws: count(2)?, seed: number(3), maps: number(4) != 0 });
        }
        let (other, baseline) = models.split_at_checked(count(2)?).ok_or_else(bad)?;
        let read = |bytes: &[u8]| ImplicitModel::from_bytes(bytes, "sums task").map(Box::new);
        let (other, baseline) = (read(other)?, read(baseline)?);
        match number(3) {
            0 => Ok(Self::Joint { samples, baseline, rough: other }),
            1 => Ok(Self::Errors { samples, baseline, model: other }),
            _ => Err(bad()),
        }
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
