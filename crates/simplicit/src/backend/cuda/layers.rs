//! Values of layers on the device, and the operations between them: windows and products, poolings, activations,
//! sums, and their transposes.
//!
//! A value holds `count` samples; channel c of sample s at position p lies at (c·count + s)·positions + p. So a
//! matrix of weights times all samples is one product, whatever the positions, and a channel of all samples is one
//! run of memory. Samples in rows, as the host stores them, are one channel with a position per unit.

use std::ffi::c_int;
use std::ops::Range;

use super::dense::{Panel, Sizes};
use super::library::Address;
use super::memory::Buffer;
use super::{Argument, Session, THREADS, arguments};
use crate::{Error, Result};

/// The most floats of windows that are laid out at once.
const COLUMNS: usize = 1 << 27;
/// The most blocks of a grid along its second axis.
const MOST_BLOCKS: usize = 65_535;

/// The most weights of groups of channels whose derivatives are added up at once.
const SUMS: usize = 1 << 14;

/// Parts in which the channels of a sample are added up.
const PARTS: usize = 64;

/// A window over a map, in the layout that `layers.cu` expects.
#[derive(Debug, Clone, Copy, PartialEq)]
#[repr(C)]
pub(crate) struct Geometry {
    pub(crate) channels: c_int,
    pub(crate) height: c_int,
    pub(crate) width: c_int,
    pub(crate) out_height: c_int,
    pub(crate) out_width: c_int,
    pub(crate) kernel: [c_int; 2],
    pub(crate) stride: [c_int; 2],
    /// Padding: rows above and columns to the left.
    pub(crate) padding: [c_int; 2],
    pub(crate) dilation: [c_int; 2],
}

impl Geometry {
    pub(super) fn pixels(&self) -> usize {
        (self.height * self.width) as usize
    }

    pub(super) fn positions(&self) -> usize {
        (self.out_height * self.out_width) as usize
    }

    fn taps(&self) -> usize {
        (self.channels * self.kernel[0] * self.kernel[1]) as usize
    }

    /// Whether the windows are the values themselves.
    fn is_plain(&self) -> bool {
        self.kernel == [1, 1] && self.stride == [1, 1] && self.padding == [0, 0] && self.pixels() == self.positions()
    }
}

/// The kinds of pooling; the numbers are those of `layers.cu`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum PoolKind {
    Maximum = 0,
    Mean = 1,
    MeanWithPadding = 2,
}

/// An activation by its number in `layers.cu`, with its parameters.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Phi {
    pub(crate) kind: usize,
    pub(crate) a: f32,
    pub(crate) b: f32,
}

/// Samples of a layer, on the device.
pub(crate) struct Values {
    pub(super) data: Buffer<f32>,
    pub(crate) channels: usize,
    pub(crate) count: usize,
    pub(crate) positions: usize,
}

impl Values {
    /// Number of values of a sample.
    pub(crate) fn units(&self) -> usize {
        self.channels * self.positions
    }

    /// Bytes of memory that they take.
    pub(crate) fn bytes(&self) -> u64 {
        4 * (self.units() * self.count) as u64
    }

    fn len(&self) -> usize {
        self.units() * self.count
    }

    fn per_channel(&self) -> u64 {
        (self.count * self.positions) as u64
    }
}

/// Values that are borrowed, or that were made for one use.
pub(crate) enum Operand<'a> {
    There(&'a Values),
    Made(Values),
}

impl std::ops::Deref for Operand<'_> {
    type Target = Values;

    fn deref(&self) -> &Values {
        match self {
            Operand::There(values) => values,
            Operand::Made(values) => values,
        }
    }
}

impl Session {
    fn values(&self, channels: usize, count: usize, positions: usize) -> Result<Values> {
        Ok(Values { data: self.allocate(channels * count * positions)?, channels, count, positions })
    }

    /// Zeros of a shape.
    pub(crate) fn no_values(&self, channels: usize, count: usize, positions: usize) -> Result<Values> {
        let out = self.values(channels, count, positions)?;
        self.clear(&out.data)?;
        Ok(out)
    }

    /// Puts numbers on the device that stay there: weights, factors.
    pub(crate) fn hold(&self, numbers: &[f32]) -> Result<Buffer<f32>> {
        self.uploaded(numbers)
    }

    /// The numbers of a buffer.
    pub(crate) fn numbers(&self, there: &Buffer<f32>) -> Result<Vec<f32>> {
        self.to_host(there)
    }

    /// Values from samples in rows, with `positions` positions per channel.
    pub(crate) fn values_of_rows(&self, rows: &[f32], count: usize, positions: usize) -> Result<Values> {
        let units = rows.len() / count.max(1);
        let host = Values { data: self.uploaded(rows)?, channels: 1, count, positions: units };
        if positions == units { Ok(host) } else { self.relayout(&host, positions) }
    }

    /// The values as samples in rows.
    pub(crate) fn to_rows(&self, values: &Values) -> Result<Vec<f32>> {
        if values.channels == 1 {
            return self.to_host(&values.data);
        }
        self.to_host(&self.relayout(values, values.units())?.data)
    }

    /// Some samples in rows.
    pub(crate) fn some_rows(&self, values: &Values, samples: Range<usize>) -> Result<Vec<f32>> {
        let rows = self.under(values, values.units())?;
        self.to_host_part(&rows.data, samples.start * values.units()..samples.end * values.units())
    }

    /// The same units, grouped into channels of `positions` positions each.
    pub(crate) fn relayout(&self, values: &Values, positions: usize) -> Result<Values> {
        let out = self.values(values.units() / positions.max(1), values.count, positions)?;
        if out.units() != values.units() {
            return Err(Error::shape("channels of a layer", format!("{positions} positions each"), values.units()));
        }
        let n = out.len();
        self.each(
            self.cuda.kernels.relayout,
            n,
            1,
            arguments!(&out.data, &values.data, n as u64, values.count, values.positions, positions),
        )?;
        Ok(out)
    }

    /// New sums that start with a bias per channel.
    pub(crate) fn biased(&self, bias: &Buffer<f32>, channels: usize, count: usize, positions: usize) -> Result<Values> {
        let out = self.values(channels, count, positions)?;
        let n = out.len();
        let per = out.per_channel();
        self.each(self.cuda.kernels.fill_bias, n, 1, arguments!(&out.data, bias, n as u64, per))?;
        Ok(out)
    }

    /// One block of threads for every 256 of `across`, `down` times side by side.
    fn grid(&self, across: usize, down: usize) -> (usize, usize) {
        (across.div_ceil(THREADS), down.min(MOST_BLOCKS))
    }

    /// Number of samples whose windows are laid out at once.
    fn at_once(geometry: &Geometry, count: usize) -> usize {
        (COLUMNS / (geometry.taps() * geometry.positions()).max(1)).clamp(1, count.max(1))
    }

    /// out += W · windows(x): the weights have one row per output channel, over the taps of its own group of
    /// channels.
    pub(crate) fn add_taps(
        &self,
        out: &Values,
        x: &Values,
        weights: &Buffer<f32>,
        geometry: Geometry,
        groups: usize,
    ) -> Result<()> {
        let (count, rows, taps) = (x.count, out.channels, geometry.taps());
        let kernels = &self.cuda.kernels;
        if groups > 1 {
            let grid = self.grid(count * geometry.positions(), rows);
            let arguments = arguments!(&out.data, &x.data, weights, geometry, count, rows, groups);
            return self.launch(kernels.grouped, grid, THREADS, arguments);
        }
        let (weights, whole) = (Panel::new(weights.address(), taps), count * geometry.positions());
        self.each_window(x, geometry, |columns, first, m| {
            let out = Panel::new(out.data.at(first), whole);
            self.product_single(out, 1.0, columns, weights, Sizes(m, rows, taps))
        })
    }

    /// Lays out the windows of some samples at a time, a column per tap: `work` gets the columns, the first place (a sample's
    /// position out) and the number of places. Windows that are the values themselves are not copied.
    fn each_window(
        &self,
        x: &Values,
        geometry: Geometry,
        work: impl Fn(Panel, usize, usize) -> Result<()>,
    ) -> Result<()> {
        let (count, taps) = (x.count, geometry.taps());
        if geometry.is_plain() {
            let whole = count * geometry.positions();
            return work(Panel::new(x.data.address(), whole), 0, whole);
        }
        let samples = Self::at_once(&geometry, count);
        let columns = self.allocate::<f32>(samples * geometry.positions() * taps)?;
        for first in (0..count).step_by(samples) {
            let samples = samples.min(count - first);
            let m = samples * geometry.positions();
            let arguments = arguments!(&columns, &x.data, geometry, first, samples, count);
            self.launch(self.cuda.kernels.windows, self.grid(m, taps), THREADS, arguments)?;
            work(Panel::new(columns.address(), m), first * geometry.positions(), m)?;
        }
        Ok(())
    }

    /// dx += windowsᵀ(Wᵀ · dout): the transpose of [`Session::add_taps`].
    pub(crate) fn add_taps_back(
        &self,
        dx: &Values,
        dout: &Values,
        weights: &Buffer<f32>,
        geometry: Geometry,
        groups: usize,
    ) -> Result<()> {
        let (count, rows, taps) = (dx.count, dout.channels, geometry.taps());
        let kernels = &self.cuda.kernels;
        if groups > 1 {
            let grid = self.grid(count * geometry.pixels(), geometry.channels as usize);
            let arguments = arguments!(&dx.data, &dout.data, weights, geometry, count, rows, groups);
            return self.launch(kernels.grouped_back, grid, THREADS, arguments);
        }
        let weights = Panel::new(weights.address(), taps).t();
        let whole = count * geometry.positions();
        if geometry.is_plain() {
            let (dx, dout) = (Panel::new(dx.data.address(), whole), Panel::new(dout.data.address(), whole));
            return self.product_single(dx, 1.0, dout, weights, Sizes(whole, taps, rows));
        }
        let samples = Self::at_once(&geometry, count);
        let columns = self.allocate::<f32>(samples * geometry.positions() * taps)?;
        for first in (0..count).step_by(samples) {
            let samples = samples.min(count - first);
            let m = samples * geometry.positions();
            let part = Panel::new(dout.data.at(first * geometry.positions()), whole);
            self.product_single(Panel::new(columns.address(), m), 0.0, part, weights, Sizes(m, taps, rows))?;
            let grid = self.grid(samples * geometry.pixels(), geometry.channels as usize);
            let arguments = arguments!(&dx.data, &columns, geometry, first, samples, count);
            self.launch(kernels.fold, grid, THREADS, arguments)?;
        }
        Ok(())
    }

    /// gradient += the derivative by the weights of [`Session::add_taps`], from the cotangent of its result.
    pub(crate) fn add_taps_outer(
        &self,
        gradient: &Buffer<f32>,
        x: &Values,
        dout: &Values,
        geometry: Geometry,
        groups: usize,
    ) -> Result<()> {
        let (count, rows, taps) = (x.count, dout.channels, geometry.taps());
        let kernels = &self.cuda.kernels;
        if groups > 1 {
            let weights = rows * taps / groups;
            for first in (0..weights).step_by(SUMS) {
                let here = SUMS.min(weights - first);
                let parts = self.allocate::<f64>(here * THREADS)?;
                let arguments = arguments!(&parts, &x.data, &dout.data, geometry, first, count, rows, groups);
                self.launch(kernels.grouped_outer, (here, 1), THREADS, arguments)?;
                self.add_parts(gradient.at(first), &parts, here)?;
            }
            return Ok(());
        }
        let (gradient, whole) = (Panel::new(gradient.address(), taps), count * geometry.positions());
        self.each_window(x, geometry, |columns, first, m| {
            let dout = Panel::new(dout.data.at(first), whole);
            self.product_single(gradient, 1.0, columns.t(), dout, Sizes(taps, rows, m))
        })
    }

    /// sums += Σ v of every channel.
    pub(crate) fn add_channel_sums(&self, sums: &Buffer<f32>, v: &Values) -> Result<()> {
        let parts = self.allocate::<f64>(v.channels * THREADS)?;
        let arguments = arguments!(&parts, &v.data, v.per_channel());
        self.launch(self.cuda.kernels.channel_sums, (v.channels, 1), THREADS, arguments)?;
        self.add_parts(sums.address(), &parts, v.channels)
    }

    fn add_parts(&self, sums: Address, parts: &Buffer<f64>, count: usize) -> Result<()> {
        let arguments = arguments!(Argument::Address(sums), parts, count as u64, THREADS);
        self.each(self.cuda.kernels.add_parts, count, 1, arguments)
    }

    /// out += scale · factor · x, with one factor per channel, or with none.
    pub(crate) fn add_scaled(&self, out: &Values, x: &Values, factors: Option<&Buffer<f32>>, scale: f32) -> Result<()> {
        if out.len() != x.len() {
            return Err(Error::shape("values that are added", out.len(), x.len()));
        }
        let n = out.len();
        let address = Argument::Address(factors.map_or(0, Buffer::address));
        let arguments = arguments!(&out.data, &x.data, address, n as u64, out.per_channel(), scale);
        self.each(self.cuda.kernels.add_scaled, n, 1, arguments)
    }

    /// The values after a pooling of every channel.
    pub(crate) fn pooled(&self, x: &Values, geometry: Geometry, kind: PoolKind) -> Result<Values> {
        self.pooled_change(x, x, geometry, kind)
    }

    /// The change after a pooling of every channel, for a change `d` of x.
    pub(crate) fn pooled_change(&self, x: &Values, d: &Values, geometry: Geometry, kind: PoolKind) -> Result<Values> {
        let out = self.values(x.channels, x.count, geometry.positions())?;
        let n = out.len();
        let arguments = arguments!(&out.data, &x.data, &d.data, geometry, n as u64, kind as usize);
        self.each(self.cuda.kernels.pool, n, 1, arguments)?;
        Ok(out)
    }

    /// dx += the pooling's transpose of dout, at x.
    pub(crate) fn pooled_back(
        &self,
        dx: &Values,
        x: &Values,
        dout: &Values,
        geometry: Geometry,
        kind: PoolKind,
    ) -> Result<()> {
        let n = dx.len();
        let arguments = arguments!(&dx.data, &x.data, &dout.data, geometry, n as u64, kind as usize);
        self.each(self.cuda.kernels.pool_back, n, 1, arguments)
    }

    /// φ, in place.
    pub(crate) fn activate(&self, x: &Values, phi: Phi) -> Result<()> {
        let n = x.len();
        self.each(self.cuda.kernels.activate, n, 1, arguments!(&x.data, n as u64, phi.kind, phi.a, phi.b))
    }

    /// w ← φ′(z)·w, the cotangents of pre-activations from those of values.
    pub(crate) fn gate(&self, w: &Values, z: &Values, phi: Phi) -> Result<()> {
        let n = w.len();
        let arguments = arguments!(&w.data, &z.data, n as u64, phi.kind, phi.a, phi.b);
        self.each(self.cuda.kernels.gate, n, 1, arguments)
    }

    /// x ← units · samples · x, with one factor per unit and, if there are any, one per sample.
    pub(crate) fn weigh(&self, x: &Values, units: &Buffer<f32>, samples: Option<&Buffer<f32>>) -> Result<()> {
        let n = x.len();
        let samples = Argument::Address(samples.map_or(0, Buffer::address));
        let arguments = arguments!(&x.data, units, samples, n as u64, x.count, x.positions);
        self.each(self.cuda.kernels.weigh, n, 1, arguments)
    }

    /// The same values with `positions` positions per channel; copied only if that differs.
    pub(crate) fn under<'a>(&self, values: &'a Values, positions: usize) -> Result<Operand<'a>> {
        if values.positions == positions {
            return Ok(Operand::There(values));
        }
        self.relayout(values, positions).map(Operand::Made)
    }

    /// A copy.
    pub(crate) fn copy(&self, x: &Values) -> Result<Values> {
        self.relayout(x, x.positions)
    }

    /// Σ v² of every channel over samples and positions, in f64.
    pub(crate) fn channel_squares(&self, x: &Values) -> Result<Vec<f64>> {
        let partial = self.zeros::<f64>(x.channels * THREADS)?;
        let arguments = arguments!(&partial, &x.data, x.per_channel());
        self.launch(self.cuda.kernels.squares_single, (x.channels, 1), THREADS, arguments)?;
        Ok(self.to_host(&partial)?.chunks(THREADS).map(|part| part.iter().sum()).collect())
    }

    /// Σ a·b of every sample over its units.
    pub(crate) fn sample_products(&self, a: &Values, b: &Values) -> Result<Vec<f64>> {
        if a.len() != b.len() {
            return Err(Error::shape("values that are multiplied", a.len(), b.len()));
        }
        let parts = a.channels.clamp(1, PARTS);
        let out = self.allocate::<f64>(parts * a.count)?;
        let arguments = arguments!(&out, &a.data, &b.data, a.channels, a.count, a.positions);
        self.launch(self.cuda.kernels.sample_products, self.grid(a.count, parts), THREADS, arguments)?;
        let of_parts = self.to_host(&out)?;
        Ok((0..a.count).map(|s| of_parts.iter().skip(s).step_by(a.count).sum()).collect())
    }
}
