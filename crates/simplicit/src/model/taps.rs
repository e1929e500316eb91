//! Blocks of A, B, C, D with shared weights: convolutions, poolings and residual sums, which are never unrolled.

use serde::{Deserialize, Serialize};

use super::layered::Target;
use crate::layout::{Layout, MapShape};
use crate::linalg::Csr;
use crate::network::{FixedMap, Source, Window};
use crate::{Error, Result};

/// The weights that multiply the operand of a [`TapBlock`].
#[derive(Debug, Clone, PartialEq)]
pub enum TapWeights {
    /// One row per output channel, column (c·kh + dy)·kw + dx; each weight is stored and counted once.
    Taps(Csr<f32>),
    /// The operand itself: a residual sum. It is structure, which is run but neither solved nor counted.
    Identity,
    /// The operand times one factor per channel: a residual sum in the coordinates of a rescaled model. Structure too.
    Diagonal(Vec<f32>),
}

/// One shared-weight summand of a layer's pre-activation, or of the output.
///
/// The source goes through its fixed `maps` (pooling; mostly none), which gives an operand of shape `input`; the window
/// slides over it with zero padding and gives `output`. Vectors are maps of height and width 1, so a classifier behind a
/// global average is a 1 × 1 kernel, and a linear layer behind a pooling a kernel as large as its map.
#[derive(Debug, Clone, PartialEq)]
pub struct TapBlock {
    /// The value that it is added to.
    pub target: Target,
    /// The value that it starts from.
    pub source: Source,
    /// Pooling between the source and the weights, in order.
    pub maps: Vec<FixedMap>,
    /// Kernel, stride and padding; a 1 × 1 window for [`TapWeights::Identity`].
    pub window: Window,
    /// Shape of the operand.
    pub input: MapShape,
    /// Shape of the result: the target's map, or its units × 1 × 1.
    pub output: MapShape,
    /// Equal parts of the output channels, each of which reads only its own part of the operand's channels.
    pub groups: usize,
    /// The weights that multiply the operand.
    pub weights: TapWeights,
}

/// Which of the four matrices a block belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Letter {
    /// States from states.
    A,
    /// States from inputs.
    B,
    /// Outputs from states.
    C,
    /// Outputs from inputs.
    D,
}

impl TapBlock {
    /// A, B, C or D.
    pub fn letter(&self) -> Letter {
        match (self.target, self.source) {
            (Target::Layer(_), Source::Layer(_)) => Letter::A,
            (Target::Layer(_), Source::Input) => Letter::B,
            (Target::Output, Source::Layer(_)) => Letter::C,
            (Target::Output, Source::Input) => Letter::D,
        }
    }

    /// Columns of the taps: channels of the operand × kernel.
    pub fn columns(&self) -> usize {
        self.input.channels * self.window.area()
    }

    /// The columns that row o may use: those of its group of input channels.
    pub(crate) fn group_columns(&self, o: usize) -> std::ops::Range<usize> {
        let each = self.columns() / self.groups.max(1);
        let group = o / (self.output.channels / self.groups.max(1)).max(1);
        group * each..(group + 1) * each
    }

    /// Number of stored non-zeros, each tap counted once; none for structure.
    pub fn nonzeros(&self) -> usize {
        match &self.weights {
            TapWeights::Taps(taps) => taps.nonzeros(),
            TapWeights::Identity | TapWeights::Diagonal(_) => 0,
        }
    }

    /// Non-zeros of the unrolled matrix; taps that fall on padding are not counted.
    pub fn multiply_adds(&self) -> u64 {
        let TapWeights::Taps(taps) = &self.weights else { return 0 };
        let uses = self.window.uses(self.input, self.output);
        taps.indices().iter().map(|&j| uses[j as usize % uses.len()]).sum()
    }

    /// How often every unit of the operand is read: non-zeros of the columns of the unrolled block.
    pub fn reads(&self) -> Vec<u64> {
        let mut reads = vec![0; self.input.size()];
        let TapWeights::Taps(taps) = &self.weights else {
            reads.fill(1);
            return reads;
        };
        let ([sy, sx], [top, left, ..]) = (self.window.stride, self.window.padding);
        for &j in taps.indices() {
            let (c, [dy, dx]) = self.window.tap(j as usize);
            for oy in self.window.inside(0, dy, self.input.height, self.output.height) {
                for ox in self.window.inside(1, dx, self.input.width, self.output.width) {
                    let (iy, ix) = (oy * sy + dy - top, ox * sx + dx - left);
                    reads[(c * self.input.height + iy) * self.input.width + ix] += 1;
                }
            }
        }
        reads
    }

    /// Sum of magnitudes of row o: at least that of any unrolled row of the channel, poolings being averages or maxima.
    pub(crate) fn row_norm(&self, o: usize) -> f64 {
        match &self.weights {
            TapWeights::Taps(taps) => taps.row(o).map(|(_, v)| f64::from(v).abs()).sum(),
            TapWeights::Identity => 1.0,
            TapWeights::Diagonal(factors) => f64::from(factors[o]).abs(),
        }
    }

    /// The largest row norm.
    pub fn norm_inf(&self) -> f64 {
        (0..self.output.channels).map(|o| self.row_norm(o)).fold(0.0, f64::max)
    }

    /// Whether this is a residual sum without pooling, which as a matrix has one entry per unit.
    pub(crate) fn is_plain_residual(&self) -> bool {
        self.maps.is_empty() && !matches!(self.weights, TapWeights::Taps(_))
    }

    /// The factor of every unit of a residual sum.
    pub(crate) fn unit_factor(&self, unit: usize) -> f32 {
        match &self.weights {
            TapWeights::Diagonal(factors) => factors[unit / self.output.positions()],
            _ => 1.0,
        }
    }

    /// Checks source, target, maps, window and weights against each other and the layout.
    pub(super) fn check(&self, place: usize, layout: &Layout, inputs: usize, outputs: usize) -> Result<()> {
        let what = || format!("tap block {place}, from {:?} to {:?}", self.source, self.target);
        let fail = |expected: String, got: String| Err(Error::shape(what(), expected, got));
        let layer = |k: usize| layout.layers().get(k);
        let source_size = match self.source {
            Source::Input => Some(inputs),
            Source::Layer(k) => layer(k).map(|l| l.size),
        };
        let target_size = match self.target {
            Target::Output => Some(outputs),
            Target::Layer(k) => layer(k).map(|l| l.size),
        };
        let (Some(source_size), Some(target_size)) = (source_size, target_size) else {
            return fail(format!("layers below {}", layout.layers().len()), "one that does not exist".into());
        };
        // The sizes in a file that is not trusted may overflow.
        let size = |m: MapShape| m.channels.checked_mul(m.height).and_then(|v| v.checked_mul(m.width));
        let first = self.maps.first().map_or(self.input, |m| m.input());
        if size(first) != Some(source_size) {
            return fail(format!("an operand of {source_size} units"), first.to_string());
        }
        let mut shape = first;
        for map in &self.maps {
            if map.input() != shape {
                return fail(format!("a pooling of {shape}"), map.input().to_string());
            }
            if let FixedMap::AveragePool { window, .. } | FixedMap::MaxPool { window, .. } = map {
                require_bounded(*window, shape).map_err(|e| e.within(&what()))?;
            }
            shape = map.output()?;
        }
        require_bounded(self.window, self.input).map_err(|e| e.within(&what()))?;
        if self.groups == 0
            || !self.input.channels.is_multiple_of(self.groups)
            || !self.output.channels.is_multiple_of(self.groups)
        {
            let expected = format!("groups that divide {} and {} channels", self.input.channels, self.output.channels);
            return fail(expected, self.groups.to_string());
        }
        if shape != self.input {
            return fail(format!("an operand of {shape}"), self.input.to_string());
        }
        let target_map = match self.target {
            Target::Layer(k) => layer(k).and_then(|l| l.map),
            Target::Output => None,
        };
        if size(self.output) != Some(target_size) || target_map.is_some_and(|map| map != self.output) {
            let expected =
                target_map.map_or(format!("a result of {target_size} units"), |m| format!("a result of {m}"));
            return fail(expected, self.output.to_string());
        }
        match &self.weights {
            TapWeights::Identity | TapWeights::Diagonal(_) => {
                if size(self.input) != size(self.output) || self.window != Window::square(1, 1, 0) {
                    return fail(
                        format!("a residual of {} and a 1 × 1 window", self.output),
                        format!("{} and {:?}", self.input, self.window),
                    );
                }
                if let TapWeights::Diagonal(factors) = &self.weights {
                    if factors.len() != self.output.channels {
                        return fail(format!("{} factors", self.output.channels), factors.len().to_string());
                    }
                    if let Some(k) = factors.iter().position(|v| !v.is_finite() || *v == 0.0) {
                        return fail("finite factors other than zero".into(), format!("{} at {k}", factors[k]));
                    }
                }
            }
            TapWeights::Taps(taps) => {
                let [height, width] = self.window.output(self.input)?;
                if (height, width) != (self.output.height, self.output.width) {
                    return fail(format!("{} from the window", self.output), format!("{height} × {width} positions"));
                }
                let columns = size(MapShape {
                    channels: self.input.channels,
                    height: self.window.kernel[0],
                    width: self.window.kernel[1],
                });
                if (Some(taps.cols()), taps.rows()) != (columns, self.output.channels) {
                    return fail(
                        format!("taps {} × {}", self.output.channels, columns.unwrap_or(usize::MAX)),
                        format!("{} × {}", taps.rows(), taps.cols()),
                    );
                }
                if let Some(o) =
                    (0..taps.rows()).find(|&o| taps.row(o).any(|(j, _)| !self.group_columns(o).contains(&j)))
                {
                    return fail(format!("taps of row {o} within its group"), "one of another group".into());
                }
                super::require_finite_csr(&what(), taps)?;
            }
        }
        Ok(())
    }
}

/// The most units of a padded operand, so that a file cannot ask for more memory.
const MAX_UNITS: usize = 1 << 26;

/// An error if a window needs more room than any sensible network's: padding as wide as the kernel, or a huge padded
/// map.
fn require_bounded(window: Window, map: MapShape) -> Result<()> {
    let [top, left, bottom, right] = window.padding;
    let padded = |size: usize, before: usize, after: usize| size.checked_add(before).and_then(|v| v.checked_add(after));
    let units = padded(map.height, top, bottom)
        .zip(padded(map.width, left, right))
        .and_then(|(height, width)| height.checked_mul(width))
        .and_then(|positions| positions.checked_mul(map.channels));
    let steps = window.stride.iter().chain(&window.dilation);
    if units.is_some_and(|units| units <= MAX_UNITS) && steps.clone().all(|s| (1..=MAX_UNITS).contains(s)) {
        return Ok(());
    }
    Err(Error::shape("window", "at most 2^26 units of its padded map", format!("{window:?} on {map}")))
}
