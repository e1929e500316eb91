//! Statistics of many samples: blocks read by several threads, added up in a tree of a fixed shape.

use std::ops::Range;

use super::{BLOCK, Statistics, are_few, beside, cuts, shifted};
use crate::backend::cuda::Cuda;
use crate::linalg::Matrix;
use crate::parallel::{self, Cancel, Threads};
use crate::states::{StateBlock, StateSource};
use crate::{Error, Result};

impl Statistics {
    /// Streams `samples` samples in blocks. `read` returns features and targets of a range of samples; it is called
    /// from several threads.
    pub fn stream(
        samples: usize,
        threads: Threads,
        cancel: &Cancel,
        read: impl Fn(Range<usize>) -> Result<(Matrix, Matrix)> + Sync,
        progress: impl FnMut(usize),
    ) -> Result<Self> {
        Self::stream_shard(samples, samples, threads, cancel, read, progress)
    }

    /// [`Statistics::stream`] over a shard of `all` samples; their number decides whether samples or products are
    /// kept.
    pub(crate) fn stream_shard(
        samples: usize,
        all: usize,
        threads: Threads,
        cancel: &Cancel,
        read: impl Fn(Range<usize>) -> Result<(Matrix, Matrix)> + Sync,
        progress: impl FnMut(usize),
    ) -> Result<Self> {
        Self::stream_pieces(samples, usize::MAX, all, threads, cancel, read, progress)
    }

    /// [`Statistics::stream_shard`] in pieces of `piece` samples, each summed on its own before the pieces are added:
    /// a shard of 2ᵏ pieces is then a whole branch of the tree, whatever the size of a piece.
    pub(crate) fn stream_pieces(
        samples: usize,
        piece: usize,
        all: usize,
        threads: Threads,
        cancel: &Cancel,
        read: impl Fn(Range<usize>) -> Result<(Matrix, Matrix)> + Sync,
        progress: impl FnMut(usize),
    ) -> Result<Self> {
        let leaf = |range| {
            let (features, targets) = read(range)?;
            if are_few(all, features.cols()) { Self::of_few(features, &targets) } else { Self::of(&features, &targets) }
        };
        Self::stream_leaves(samples, piece, threads, cancel, leaf, progress)
    }

    /// The same, from the statistics of every block of samples.
    pub(crate) fn stream_leaves(
        samples: usize,
        piece: usize,
        threads: Threads,
        cancel: &Cancel,
        leaf: impl Fn(Range<usize>) -> Result<Self> + Sync,
        mut progress: impl FnMut(usize),
    ) -> Result<Self> {
        let leaves: Vec<Vec<Range<usize>>> = cuts(samples, piece)
            .map(|piece| cuts(piece.len(), BLOCK).map(|r| shifted(r, piece.start)).collect())
            .collect();
        let ends: Vec<usize> = leaves.iter().filter_map(|piece| piece.last()).map(|leaf| leaf.end).collect();
        let leaves = leaves.concat();
        let (mut whole, mut part) = (Tree::default(), Tree::default());
        parallel::fold(
            threads,
            leaves.len(),
            |k| {
                cancel.check()?;
                leaf(leaves[k].clone())
            },
            |k, leaf| {
                let end = leaves[k].end;
                progress(end);
                part.push(leaf)?;
                if ends.binary_search(&end).is_ok() { whole.push(std::mem::take(&mut part).finish()?) } else { Ok(()) }
            },
        )?;
        whole.finish()
    }

    /// [`Statistics::stream`] with the sums on a GPU: the result is the same within the rounding of f64.
    pub fn stream_on(
        cuda: &'static Cuda,
        samples: usize,
        threads: Threads,
        cancel: &Cancel,
        read: impl Fn(Range<usize>) -> Result<(Matrix, Matrix)> + Sync,
        mut progress: impl FnMut(usize),
    ) -> Result<Self> {
        if samples == 0 {
            return Err(Error::shape("samples", "at least one", 0));
        }
        let (f, t) = read(0..1)?;
        // Few samples are kept as they are, so there is nothing to add up.
        if are_few(samples, f.cols()) {
            return Self::stream(samples, threads, cancel, read, progress);
        }
        let sums = cuda.accumulate(f.cols(), t.cols(), |sums| {
            parallel::fold(
                threads,
                samples.div_ceil(BLOCK),
                |block| {
                    cancel.check()?;
                    read(block * BLOCK..((block + 1) * BLOCK).min(samples))
                },
                |block, (features, targets)| {
                    sums.add(&features, &targets)?;
                    progress(((block + 1) * BLOCK).min(samples));
                    Ok(())
                },
            )
        })?;
        Ok(Self::of_sums(sums))
    }

    /// The statistics of the paper's problem: features Ũ = [X; U] (and the constant, last, if `constant`), targets Ỹ
    /// = [Z; Y].
    pub fn of_states(
        source: &dyn StateSource,
        constant: bool,
        threads: Threads,
        cancel: &Cancel,
        progress: impl FnMut(usize),
    ) -> Result<Self> {
        Self::stream(
            source.samples(),
            threads,
            cancel,
            |range| Ok(features_and_targets(&source.block(range)?, constant)),
            progress,
        )
    }
}

/// Ũ = [X; U] (and the constant, last) and Ỹ = [Z; Y] of a few samples, one sample a row.
pub(crate) fn features_and_targets(block: &StateBlock, constant: bool) -> (Matrix, Matrix) {
    let one = constant.then(|| Matrix::from_fn(block.samples(), 1, |_, _| 1.0));
    let mut features = vec![&block.x, &block.u];
    features.extend(&one);
    (beside(&features), beside(&[&block.z, &block.y]))
}

/// Binary-counter summation: leaf b joins trees of equal size, so the shape depends on the number of leaves alone. Leaves
/// are blocks of [`BLOCK`] samples, or shards of `BLOCK`·2ᵏ samples of one k: either way the same bits come out.
#[derive(Debug, Default)]
pub struct Tree {
    /// Pairs of a number of leaves and their sum; the numbers are strictly decreasing.
    parts: Vec<(usize, Statistics)>,
}

impl Tree {
    /// Adds the next leaf, in the order of the samples.
    pub fn push(&mut self, leaf: Statistics) -> Result<()> {
        self.push_branch(1, leaf)
    }

    /// Adds the sum of the next 2ᵏ leaves, which must start at a multiple of 2ᵏ leaves; only the last sum may have
    /// fewer leaves.
    pub fn push_branch(&mut self, leaves: usize, sum: Statistics) -> Result<()> {
        let before: usize = self.parts.iter().map(|(leaves, _)| leaves).sum();
        let whole = self.parts.last().is_none_or(|(leaves, _)| leaves.is_power_of_two());
        if leaves == 0 || !whole || !before.is_multiple_of(leaves.next_power_of_two()) {
            let expected = format!("a branch of the tree after {before} leaves");
            return Err(Error::shape("leaves of a branch", expected, leaves));
        }
        let mut carry = (leaves, sum);
        while let Some((leaves, sum)) = self.parts.pop_if(|(leaves, _)| *leaves == carry.0) {
            carry = (2 * leaves, sum.merge(&carry.1)?);
        }
        self.parts.push(carry);
        Ok(())
    }

    /// The sum of all leaves.
    pub fn finish(mut self) -> Result<Statistics> {
        let Some((_, mut total)) = self.parts.pop() else {
            return Err(Error::shape("samples", "at least one", 0));
        };
        while let Some((_, sum)) = self.parts.pop() {
            total = sum.merge(&total)?;
        }
        Ok(total)
    }
}
