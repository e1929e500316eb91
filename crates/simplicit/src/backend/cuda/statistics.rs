//! G and H of a group, accumulated on the device in f64, a block of samples at a time.

use super::dense::{Panel, Sizes};
use super::layers::{Geometry, Values};
use super::memory::Buffer;
use super::{Argument, Cuda, Session, THREADS, arguments};
use crate::linalg::Matrix;
use crate::{Error, Result};

/// The most blocks of a grid along its second axis.
const MOST_BLOCKS: usize = 65_535;

/// The sums of the statistics on the device, to which blocks are added.
pub(crate) struct Accumulator<'s> {
    session: &'s Session,
    d: usize,
    r: usize,
    samples: usize,
    gram: Buffer<f64>,
    cross: Buffer<f64>,
    /// Σ t² of every target over the device's blocks, in [`THREADS`] parts, and over the host's blocks.
    squares: Buffer<f64>,
    energy: Vec<f64>,
}

/// The results of an [`Accumulator`].
pub(crate) struct Sums {
    /// Number of samples added.
    pub(crate) samples: usize,
    /// G, full, d × d.
    pub(crate) gram: Matrix,
    /// H, one row per target.
    pub(crate) cross: Matrix,
    /// Σ t² of every target.
    pub(crate) energy: Vec<f64>,
}

/// Features and targets of some samples on the device; in both a column of numbers for each feature or target.
pub(crate) struct Block {
    pub(crate) samples: usize,
    features: Buffer<f64>,
    targets: Buffer<f64>,
}

/// Places (sample · positions + position) of a chunk at which features and targets are taken.
pub(crate) struct Places {
    data: Buffer<i32>,
    len: usize,
}

impl Cuda {
    /// Runs `feed` with an accumulator for d features and r targets, and returns its sums.
    pub(crate) fn accumulate(
        &'static self,
        d: usize,
        r: usize,
        feed: impl FnOnce(&mut Accumulator) -> Result<()>,
    ) -> Result<Sums> {
        let session = self.session()?;
        let mut sums = session.accumulator(d, r)?;
        feed(&mut sums)?;
        sums.finish()
    }
}

impl Session {
    /// Sums of d features and r targets, all zero.
    pub(crate) fn accumulator(&self, d: usize, r: usize) -> Result<Accumulator<'_>> {
        let (gram, cross, squares) = (self.zeros(d * d)?, self.zeros(d * r)?, self.zeros(r * THREADS)?);
        Ok(Accumulator { session: self, d, r, samples: 0, gram, cross, squares, energy: vec![0.0; r] })
    }

    /// Room for samples of d features and r targets.
    pub(crate) fn block(&self, samples: usize, d: usize, r: usize) -> Result<Block> {
        Ok(Block { samples, features: self.allocate(samples * d)?, targets: self.allocate(samples * r)? })
    }

    pub(crate) fn places(&self, places: &[i32]) -> Result<Places> {
        Ok(Places { data: self.uploaded(places)?, len: places.len() })
    }

    /// Values of all channels at some places, one column per channel.
    pub(crate) fn at_places(&self, z: &Values, places: &Places) -> Result<Values> {
        let out = self.no_values(z.channels, places.len, 1)?;
        let arguments = arguments!(&out.data, &z.data, &places.data, z.channels, places.len, z.positions, z.count);
        self.launch(self.cuda.kernels.gather_targets, grid(places.len, z.channels), THREADS, arguments)?;
        Ok(out)
    }

    /// Writes the features `column..` of a block: the taps of some channels, at the places from `first` on.
    #[allow(clippy::too_many_arguments)]
    pub(crate) fn gather_taps(
        &self,
        block: &Block,
        x: &Values,
        places: &Places,
        first: usize,
        geometry: Geometry,
        channel: usize,
        taps: usize,
        column: usize,
    ) -> Result<()> {
        let (m, f) = (block.samples, &block.features);
        let arguments = arguments!(f, &x.data, &places.data, geometry, channel, taps, column, m, first, x.count);
        self.launch(self.cuda.kernels.gather_taps, grid(m, taps), THREADS, arguments)
    }

    /// Writes the features `column..` of a block: single units, where a place is a sample.
    pub(crate) fn gather_units(
        &self,
        block: &Block,
        x: &Values,
        places: &Places,
        first: usize,
        units: &[i32],
        column: usize,
    ) -> Result<()> {
        let (m, on_device) = (block.samples, self.uploaded(units)?);
        let arguments = arguments!(
            &block.features,
            &x.data,
            &places.data,
            &on_device,
            x.positions,
            units.len(),
            column,
            m,
            first,
            x.count
        );
        self.launch(self.cuda.kernels.gather_units, grid(m, units.len()), THREADS, arguments)
    }

    /// Writes a feature of a block that is always one.
    pub(crate) fn gather_constant(&self, block: &Block, column: usize) -> Result<()> {
        let at = Argument::Address(block.features.at(column * block.samples));
        self.each(self.cuda.kernels.fill_double, block.samples, 1, arguments!(at, block.samples as u64, 1.0))
    }

    /// Writes the targets of a block: `rows` channels of `targets` from `row` on, at its samples from `first` on.
    pub(crate) fn gather_targets(
        &self,
        block: &Block,
        targets: &Values,
        first: usize,
        row: usize,
        rows: usize,
    ) -> Result<()> {
        let (m, all) = (block.samples, targets.count);
        let arguments = arguments!(&block.targets, &targets.data, rows, row, m, first, all);
        self.launch(self.cuda.kernels.targets_double, grid(m, rows), THREADS, arguments)
    }

    /// Subtracts a residual sum from the targets of a block.
    #[allow(clippy::too_many_arguments)]
    pub(crate) fn subtract_residual(
        &self,
        block: &Block,
        x: &Values,
        factors: Option<&Buffer<f32>>,
        places: &Places,
        first: usize,
        row: usize,
        rows: usize,
    ) -> Result<()> {
        let m = block.samples;
        let factors = Argument::Address(factors.map_or(0, Buffer::address));
        let arguments =
            arguments!(&block.targets, &x.data, factors, &places.data, rows, row, m, first, x.positions, x.count);
        self.launch(self.cuda.kernels.subtract_residual, grid(m, rows), THREADS, arguments)
    }

    /// A block as matrices with one sample per row.
    pub(crate) fn block_rows(&self, block: &Block) -> Result<(Matrix, Matrix)> {
        let rows = |columns: Vec<f64>| {
            let width = columns.len() / block.samples.max(1);
            Matrix::from_fn(block.samples, width, |i, j| columns[j * block.samples + i])
        };
        Ok((rows(self.to_host(&block.features)?), rows(self.to_host(&block.targets)?)))
    }
}

fn grid(across: usize, down: usize) -> (usize, usize) {
    (across.div_ceil(THREADS), down.min(MOST_BLOCKS))
}

impl Accumulator<'_> {
    /// Adds a block from the host: features and targets with one sample per row.
    pub(crate) fn add(&mut self, features: &Matrix, targets: &Matrix) -> Result<()> {
        let (samples, d, r) = (features.rows(), self.d, self.r);
        if features.cols() != d || targets.cols() != r || targets.rows() != samples {
            return Err(Error::shape(
                "a block of samples",
                format!("{samples} × {d} features and {samples} × {r} targets"),
                format!("{:?} and {:?}", (samples, features.cols()), (targets.rows(), targets.cols())),
            ));
        }
        let (f, t) = (self.session.uploaded(features.as_slice())?, self.session.uploaded(targets.as_slice())?);
        // A matrix with a sample per row, read by columns, has a sample per column.
        self.add_panels(Panel::new(f.address(), d), Panel::new(t.address(), r.max(1)).t(), samples)?;
        for row in 0..samples {
            self.energy.iter_mut().zip(targets.row(row)).for_each(|(e, t)| *e += t * t);
        }
        Ok(())
    }

    /// Adds a block from the device.
    pub(crate) fn add_block(&mut self, block: &Block) -> Result<()> {
        let m = block.samples;
        self.add_panels(Panel::new(block.features.address(), m).t(), Panel::new(block.targets.address(), m), m)?;
        let arguments = arguments!(&self.squares, &block.targets, m as u64);
        self.session.launch(self.session.cuda.kernels.squares_double, (self.r, 1), THREADS, arguments)
    }

    /// Adds F (d × m) times its transpose, and times the targets (m × r).
    fn add_panels(&mut self, f: Panel, t: Panel, m: usize) -> Result<()> {
        let (d, r) = (self.d, self.r);
        self.session.add_square(Panel::new(self.gram.address(), d), f, d, m)?;
        if r > 0 {
            let cross = Panel::new(self.cross.address(), d);
            self.session.product(cross, 1.0, 1.0, f, t, Sizes(d, r, m))?;
        }
        self.samples += m;
        Ok(())
    }

    /// The sums; an error if any of them is not finite.
    pub(crate) fn finish(self) -> Result<Sums> {
        let (d, r) = (self.d, self.r);
        self.session.each(self.session.cuda.kernels.mirror, d * d, 1, arguments!(&self.gram, d))?;
        let (gram, cross) = (self.session.to_host(&self.gram)?, self.session.to_host(&self.cross)?);
        let squares = self.session.to_host(&self.squares)?;
        let on_device = squares.chunks(THREADS).map(|part| part.iter().sum::<f64>());
        let energy: Vec<f64> = self.energy.iter().zip(on_device).map(|(a, b)| a + b).collect();
        let (gram, cross) = (Matrix::from_vec(d, d, gram)?, Matrix::from_vec(r, d, cross)?);
        // The square of a feature or target shows whether one of its values is not finite.
        if let Some(row) = (0..d).find(|&j| !gram[(j, j)].is_finite()) {
            return Err(Error::NotFinite { array: "features".into(), row, column: row, value: gram[(row, row)] });
        }
        if let Some(row) = energy.iter().position(|e| !e.is_finite()) {
            return Err(Error::NotFinite { array: "targets".into(), row, column: row, value: energy[row] });
        }
        Ok(Sums { samples: self.samples, gram, cross, energy })
    }
}
