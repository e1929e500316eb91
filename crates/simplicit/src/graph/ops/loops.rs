//! Walks values of different strides together; axes that can be walked as one are merged.

use crate::graph::Dims;
use crate::{Error, Result};

/// The most axes of a value.
pub(super) const AXES: usize = 8;

/// Nested loops over N values; the caller runs the innermost one.
#[derive(Debug, Clone, Copy)]
pub(super) struct Loops<const N: usize> {
    sizes: [usize; AXES],
    strides: [[usize; AXES]; N],
    rank: usize,
    /// Whether some axis has no places, possibly one that has been left out since.
    empty: bool,
}

impl<const N: usize> Loops<N> {
    /// Axes of size 1 are dropped; neighbouring axes that every value walks at one distance become one.
    pub(super) fn new(sizes: &[usize], strides: [[usize; AXES]; N]) -> Self {
        let mut loops = Self { sizes: [1; AXES], strides: [[0; AXES]; N], rank: 0, empty: sizes.contains(&0) };
        for (axis, &size) in sizes.iter().enumerate().filter(|(_, size)| **size != 1) {
            let last = loops.rank.wrapping_sub(1);
            let merges =
                loops.rank > 0 && (0..N).all(|v| loops.strides[v][last] == strides[v][axis].wrapping_mul(size));
            let at = if merges { last } else { loops.rank };
            loops.sizes[at] *= size;
            (0..N).for_each(|v| loops.strides[v][at] = strides[v][axis]);
            loops.rank = at + 1;
        }
        loops
    }

    /// Number of loops.
    pub(super) fn rank(&self) -> usize {
        self.rank
    }

    /// Size of a loop and the values' strides in it.
    pub(super) fn axis(&self, axis: usize) -> (usize, [usize; N]) {
        (self.sizes[axis], std::array::from_fn(|v| self.strides[v][axis]))
    }

    /// Size of the last loop and the values' strides in it.
    pub(super) fn inner(&self) -> (usize, [usize; N]) {
        if self.rank == 0 { (1, [1; N]) } else { self.axis(self.rank - 1) }
    }

    /// All loops but some.
    pub(super) fn without(mut self, axis: usize) -> Self {
        for k in axis..self.rank.saturating_sub(1) {
            self.sizes[k] = self.sizes[k + 1];
            (0..N).for_each(|v| self.strides[v][k] = self.strides[v][k + 1]);
        }
        self.rank = self.rank.saturating_sub(usize::from(axis < self.rank));
        self
    }

    /// All loops but the last.
    pub(super) fn outer(self) -> Self {
        self.without(self.rank.saturating_sub(1))
    }

    /// Calls `visit` with the places of all values, in order, over all loops.
    #[inline(always)]
    pub(super) fn each(&self, mut visit: impl FnMut([usize; N])) {
        if self.empty {
            return;
        }
        let mut at = [0; AXES];
        let mut places = [0; N];
        loop {
            visit(places);
            let mut axis = self.rank;
            loop {
                if axis == 0 {
                    return;
                }
                axis -= 1;
                at[axis] += 1;
                (0..N).for_each(|v| places[v] += self.strides[v][axis]);
                if at[axis] < self.sizes[axis] {
                    break;
                }
                (0..N).for_each(|v| places[v] -= self.strides[v][axis] * self.sizes[axis]);
                at[axis] = 0;
            }
        }
    }
}

/// The strides at which a value is read where it is repeated to fill `out`: axes of size 1 have stride 0.
pub(super) fn repeated(dims: Dims, out: Dims) -> [usize; AXES] {
    let mut strides = [0; AXES];
    let own = dims.strides();
    let before = out.rank() - dims.rank();
    for (axis, &size) in dims.sizes().iter().enumerate() {
        strides[before + axis] = if size == 1 { 0 } else { own[axis] };
    }
    strides
}

/// ONNX's broadcasting: axes are matched from the last, and a size of 1 fits every other.
pub(super) fn broadcast(what: &str, a: &[usize], b: &[usize]) -> Result<Dims> {
    let rank = a.len().max(b.len());
    let size = |of: &[usize], axis: usize| (axis + of.len()).checked_sub(rank).map_or(1, |k| of[k]);
    let mut sizes = Vec::with_capacity(rank);
    for axis in 0..rank {
        sizes.push(match (size(a, axis), size(b, axis)) {
            (x, y) if x == y => x,
            (1, y) => y,
            (x, 1) => x,
            _ => {
                let expected = format!("{a:?}, or sizes of 1 where they differ");
                return Err(Error::shape(format!("second value of {what}"), expected, format!("{b:?}")));
            }
        });
    }
    Dims::new(&sizes)
}

/// (product of the sizes before, the axis, product of those after).
pub(super) fn around(dims: Dims, axis: usize) -> (usize, usize, usize) {
    let sizes = dims.sizes();
    (sizes[..axis].iter().product(), sizes[axis], sizes[axis + 1..].iter().product())
}

/// An error unless the value has this axis.
pub(super) fn require_axis(what: &str, axis: usize, dims: Dims) -> Result<()> {
    if axis < dims.rank() {
        return Ok(());
    }
    Err(Error::shape(format!("axis of {what}"), format!("below {}, the axes of {dims:?}", dims.rank()), axis))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_walked_at_one_distance_become_one() {
        let (a, b) = (Dims::new(&[2, 3, 1, 5]).unwrap(), Dims::new(&[3, 1, 1]).unwrap());
        let loops = Loops::new(a.sizes(), [repeated(a, a), repeated(b, a)]);
        assert_eq!((loops.rank(), loops.inner()), (3, (5, [1, 0])));
        assert_eq!(Loops::new(a.sizes(), [repeated(a, a), a.strides()]).rank(), 1);
        let mut seen = Vec::new();
        loops.outer().each(|at| seen.push(at));
        assert_eq!(seen, [[0, 0], [5, 1], [10, 2], [15, 0], [20, 1], [25, 2]]);
        let mut count = 0;
        Loops::new(&[1, 1], [[7; AXES]]).each(|_| count += 1);
        Loops::new(&[3, 0], [[7; AXES]]).each(|_| count += 10);
        assert_eq!(count, 1);
    }
}
