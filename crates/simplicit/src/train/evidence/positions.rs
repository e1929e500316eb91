//! Which positions of a feature map give samples to the statistics.

use crate::random::Random;
use crate::train::TrainSettings;
use crate::train::plan::Group;

/// Positions are added until there are this many samples per feature, if a few positions per image would give fewer.
const SAMPLES_PER_FEATURE: usize = 20;

/// The chosen positions of a map: the same number for every sample, drawn without replacement, independent of the
/// number of threads.
pub(super) struct Chosen {
    pub(super) positions: usize,
    pub(super) per_sample: usize,
    seed: u64,
}

/// Number of positions of all samples together from which a group's statistics are made.
pub(in crate::train) fn samples_of(group: &Group, settings: &TrainSettings, samples: usize) -> usize {
    samples * per_sample(group, settings, samples)
}

pub(super) fn per_sample(group: &Group, settings: &TrainSettings, samples: usize) -> usize {
    let wanted = (SAMPLES_PER_FEATURE * group.features()).div_ceil(samples.max(1));
    settings.work.positions.max(wanted).min(group.positions)
}

impl Chosen {
    pub(super) fn new(settings: &TrainSettings, group: &Group, samples: usize, seed: u64, layer: usize) -> Self {
        let mut stream = Random::new(seed ^ (layer as u64).wrapping_mul(0x9e6c_63d0_876a_9a7b));
        Self { positions: group.positions, per_sample: per_sample(group, settings, samples), seed: stream.bits() }
    }

    /// The chosen positions of consecutive samples, as places in a chunk of these: sample · positions + position.
    pub(super) fn places(&self, samples: std::ops::Range<usize>) -> Vec<i32> {
        let of =
            |(k, sample): (usize, usize)| self.of(sample).into_iter().map(move |at| (k * self.positions + at) as i32);
        samples.enumerate().flat_map(of).collect()
    }

    pub(super) fn of(&self, sample: usize) -> Vec<usize> {
        if self.per_sample == self.positions {
            return (0..self.positions).collect();
        }
        Random::new(self.seed ^ (sample as u64).wrapping_mul(0x2545_f491_4f6c_dd1d))
            .choose(self.positions, self.per_sample)
    }
}
