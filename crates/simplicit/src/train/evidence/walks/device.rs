//! The same walk on a GPU: layers are kept there in chunks of samples, and features are gathered there.

use super::{Targets, Walks, by_source};
use crate::Result;
use crate::backend::cuda::{Block, Buffer, Geometry, Operand, Places, Session, Values};
use crate::equilibrium::{DeviceLayer, Sum, device_operand, geometry};
use crate::linalg::Matrix;
use crate::model::{TapWeights, Target};
use crate::network::Source;
use crate::statistics::{Statistics, are_few};
use crate::train::evidence::device_walk::{Chunks, chunk_of, forward};
use crate::train::evidence::positions::Chosen;
use crate::train::plan::{Group, Segment};
use crate::train::{Progress, Run, TrainSettings, layout};

/// The most numbers of a block that is gathered on a GPU.
const MOST_GATHERED: usize = 1 << 27;

impl Walks<'_> {
    /// The baseline's next layer on the GPU: its values, and `rows` targets at the chosen positions.
    pub(super) fn enter_on_gpu(&mut self, sum: Sum, chosen: &Chosen, rows: usize, run: &Run) -> Result<()> {
        let Some((gpu, layers)) = self.baseline.on_gpu() else { return Ok(()) };
        let (mut targets, mut states) = (Chunks::new(gpu), Chunks::new(gpu));
        let session = gpu.cuda.session()?;
        let target = sum.target;
        let layer = DeviceLayer::new(&session, sum, run.threads)?;
        for (number, range) in gpu.chunks(self.baseline.samples()).enumerate() {
            run.cancel.check()?;
            let z = forward(&session, &layer, self.baseline.source(), layers, (number, range.clone()))?;
            if rows > 0 {
                let places = session.places(&chosen.places(self.numbered(range)))?;
                let z = session.under(&z, chosen.positions)?;
                targets.push(&session, session.at_places(&z, &places)?)?;
            }
            if target != Target::Output {
                layer.activate(&session, &z)?;
                states.push(&session, z)?;
            }
        }
        drop(session);
        self.targets = Targets::Device(targets);
        if let Target::Layer(k) = target {
            self.baseline.put_chunks(k, states);
        }
        Ok(())
    }

    /// Statistics of a group, gathered and added up on the device.
    pub(super) fn statistics_on_gpu(
        &self,
        settings: &TrainSettings,
        group: &Group,
        run: &mut Run,
    ) -> Result<Statistics> {
        let walk = self.own.as_ref().unwrap_or(&self.baseline);
        let (Some((gpu, layers)), Targets::Device(targets)) = (walk.on_gpu(), &self.targets) else {
            return Err(crate::Error::shape("targets", "on the device", "on the host"));
        };
        let (d, rows) = (group.features(), group.rows.len());
        let chosen = Chosen::new(settings, group, self.all, self.seed, self.layers_done);
        let total = walk.samples() * chosen.per_sample;
        let (free, _) = gpu.cuda.memory()?;
        let at_once = (free / 4 / (8 * (d + rows))).clamp(1, MOST_GATHERED / (d + rows)).max(256);
        let session = gpu.cuda.session()?;
        // Few samples are kept as they are, so there is nothing to add up.
        let mut few = are_few(self.all * chosen.per_sample, d).then(Vec::new);
        let mut sums = session.accumulator(if few.is_some() { 0 } else { d }, rows)?;
        let mut done = 0;
        for (number, range) in gpu.chunks(walk.samples()).enumerate() {
            run.cancel.check()?;
            let places = chosen.places(self.numbered(range.clone()));
            let on_device = session.places(&places)?;
            let mut operands = Vec::new();
            for source in self.sources_of(group) {
                let chunk = (number, range.clone());
                operands.push((source, chunk_of(&session, walk.source(), layers, source, chunk)?));
            }
            let parts = self.parts(&session, group, &operands)?;
            let targets = targets.get(&session, number)?;
            for first in (0..places.len()).step_by(at_once) {
                let block = session.block(at_once.min(places.len() - first), d, rows)?;
                session.gather_targets(&block, &targets, first, group.first_row, rows)?;
                for part in &parts {
                    part.gather(&session, &block, &on_device, first, (group.first_row, rows))?;
                }
                match &mut few {
                    None => sums.add_block(&block)?,
                    Some(blocks) => blocks.push(session.block_rows(&block)?),
                }
                done += block.samples;
                (run.progress)(Progress::Samples { group: group.name.clone(), done, total });
            }
        }
        match few {
            None => Ok(Statistics::of_sums(sums.finish()?)),
            Some(blocks) => {
                let all = |width: usize, of: &dyn Fn(&(Matrix, Matrix)) -> &Matrix| {
                    Matrix::from_vec(total, width, blocks.iter().flat_map(|b| of(b).as_slice().to_vec()).collect())
                };
                Statistics::of_few(all(d, &|b| &b.0)?, &all(rows, &|b| &b.1)?)
            }
        }
    }

    /// All sources of a group's features and residual sums, each listed once.
    fn sources_of(&self, group: &Group) -> Vec<Source> {
        let mut sources: Vec<Source> = self.residuals(group).iter().map(|block| block.source).collect();
        for segment in &group.segments {
            match segment {
                Segment::Columns(columns) => sources.extend(by_source(layout(self.input), columns).map(|(s, _)| s)),
                Segment::Taps { block, .. } => sources.push(self.blocks[*block].source),
                Segment::Constant => {}
            }
        }
        let mut out = Vec::new();
        for source in sources {
            if !out.contains(&source) {
                out.push(source);
            }
        }
        out
    }

    /// The sources of a group's features, and the residual sums that are subtracted from its targets, for a chunk.
    fn parts<'c>(
        &self,
        session: &Session,
        group: &Group,
        operands: &'c [(Source, Operand<'_>)],
    ) -> Result<Vec<GroupPart<'c>>> {
        let layout = layout(self.input);
        let of = |source: Source| match operands.iter().find(|(known, _)| *known == source) {
            Some((_, operand)) => Ok::<&Values, crate::Error>(operand),
            None => Err(crate::Error::shape("source of a group", "one that it reads", format!("{source:?}"))),
        };
        let mut parts = Vec::new();
        let mut column = 0;
        for segment in &group.segments {
            match segment {
                Segment::Columns(columns) => {
                    for (source, units) in by_source(layout, columns) {
                        let units: Vec<i32> = units.map(|unit| unit as i32).collect();
                        let count = units.len();
                        parts.push(GroupPart::Units(of(source)?, units, column));
                        column += count;
                    }
                }
                Segment::Taps { block, first, columns } => {
                    let block = &self.blocks[*block];
                    let x = device_operand(session, block, of(block.source)?)?;
                    let window = geometry(block.input, block.output, block.window);
                    let channel = first / block.window.area();
                    parts.push(GroupPart::Taps(x, window, channel, *columns, column));
                    column += columns;
                }
                Segment::Constant => {
                    parts.push(GroupPart::Constant(column));
                    column += 1;
                }
            }
        }
        for block in self.residuals(group) {
            let x = device_operand(session, block, of(block.source)?)?;
            let factors = match &block.weights {
                TapWeights::Diagonal(factors) => Some(session.hold(factors)?),
                _ => None,
            };
            parts.push(GroupPart::Residual(session.relayout(&x, group.positions)?, factors));
        }
        Ok(parts)
    }
}

/// A part from which features or targets of a chunk are made, on the device.
enum GroupPart<'a> {
    /// Taps of `columns`, from one channel on, into the columns from one on.
    Taps(Operand<'a>, Geometry, usize, usize, usize),
    /// Single units.
    Units(&'a Values, Vec<i32>, usize),
    Constant(usize),
    /// A residual sum, with its factors.
    Residual(Values, Option<Buffer<f32>>),
}

impl GroupPart<'_> {
    /// Gathers its part of a block, whose samples are the places from `first` on and whose targets are some rows of
    /// the layer.
    fn gather(
        &self,
        session: &Session,
        block: &Block,
        places: &Places,
        first: usize,
        (row, rows): (usize, usize),
    ) -> Result<()> {
        match self {
            GroupPart::Taps(x, window, channel, taps, column) => {
                session.gather_taps(block, x, places, first, *window, *channel, *taps, *column)
            }
            GroupPart::Units(x, units, column) => session.gather_units(block, x, places, first, units, *column),
            GroupPart::Constant(column) => session.gather_constant(block, *column),
            GroupPart::Residual(x, factors) => {
                session.subtract_residual(block, x, factors.as_ref(), places, first, row, rows)
            }
        }
    }
}
