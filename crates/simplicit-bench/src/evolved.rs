//! What the evolutionary allocation needs of a walk: layers pruned at many levels, and the divergence of their models.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use anyhow::bail;
use simplicit::equilibrium::{Equilibrium, EquilibriumSettings};
use simplicit::evaluate::divergence;
use simplicit::linalg::Matrix;
use simplicit::model::{ImplicitModel, Target};
use simplicit::parallel;
use simplicit::random::Random;

use crate::evolve::{Counts, Effort, Round, evolve, places};
use crate::stitch::{Piece, stitched};
use crate::walk::{Ask, Walk};

/// Samples that selections draw from, the first training samples.
const POOL: usize = 2048;
/// Samples whose outputs of the network are computed at a time.
const BLOCK: usize = 128;

/// The budget of a search. The paper has 64 offspring and a few hundred generations for models of billions of
/// weights.
pub(crate) fn effort() -> Effort {
    let round = |samples, survivors| Round { samples, survivors };
    Effort { generations: 60, offspring: 12, rounds: vec![round(32, 4), round(128, 1), round(512, 1)] }
}

/// A layer that can be pruned.
struct Unit {
    /// The name of its group in the walk.
    name: String,
    target: Target,
    /// Weights that the baseline has in this layer.
    weights: usize,
}

/// Layers pruned on the baseline's states, each by itself; a layer is pruned when it is first asked for.
struct Database<'w, 'a> {
    walk: &'w Walk<'a>,
    units: Vec<Unit>,
    pieces: BTreeMap<(usize, usize), Piece>,
    /// Inputs and the network's outputs that models are judged by.
    u: Matrix<f32>,
    y: Matrix<f32>,
}

impl Walk<'_> {
    /// For each group the number of weights that it keeps at a level, chosen so that the model diverges least from
    /// the network.
    pub(crate) fn evolve(&self, level: f64) -> anyhow::Result<BTreeMap<String, usize>> {
        let mut database = Database::new(self)?;
        let (most, start) = (database.most()?, database.uniform(level));
        let start = within(start, &most);
        let pool = database.u.rows();
        let mut random = Random::new(0);
        let mut fitness = |candidates: &[Counts], samples: &[usize]| database.divergences(candidates, samples);
        let (found, _) = evolve(start.clone(), &places(&most, &start), pool, &effort(), &mut random, &mut fitness)?;
        Ok(database.units.iter().map(|unit| unit.name.clone()).zip(found).collect())
    }
}

/// The same sum, but no layer has more than it can have: other layers take the excess, those with the most room
/// first.
fn within(mut counts: Counts, most: &[usize]) -> Counts {
    let mut over = 0;
    for (count, most) in counts.iter_mut().zip(most) {
        over += count.saturating_sub(*most);
        *count = (*count).min(*most);
    }
    let mut order: Vec<usize> = (0..counts.len()).collect();
    order.sort_by_key(|k| std::cmp::Reverse(most[*k] - counts[*k]));
    for k in order {
        let more = over.min(most[k] - counts[k]);
        counts[k] += more;
        over -= more;
    }
    counts
}

impl<'w, 'a> Database<'w, 'a> {
    fn new(walk: &'w Walk<'a>) -> anyhow::Result<Self> {
        let baseline = walk.baseline;
        if baseline.taps().iter().any(|block| block.groups > 1) {
            bail!("an evolved allocation: expected a network without grouped convolutions");
        }
        let layers = baseline.layout().layers().iter().enumerate();
        let targets = layers.map(|(k, layer)| (layer.name.clone(), Target::Layer(k)));
        let units = targets.chain([("outputs".to_string(), Target::Output)]).map(|(name, target)| Unit {
            name,
            target,
            weights: Piece::of(baseline, target).weights(),
        });
        let units = units.filter(|unit| unit.weights > 0).collect();
        let source = walk.input.source;
        let samples = source.samples().min(POOL);
        let blocks = parallel::map(walk.threads, samples.div_ceil(BLOCK), |block| {
            walk.cancel.check()?;
            source.ends(block * BLOCK..((block + 1) * BLOCK).min(samples))
        })?;
        let mut rows = (Vec::new(), Vec::new());
        for (u, y) in &blocks {
            rows.0.extend_from_slice(u.as_slice());
            rows.1.extend(y.as_slice().iter().map(|v| *v as f32));
        }
        let shape = source.shape();
        let u = Matrix::from_vec(samples, shape.inputs, rows.0)?;
        let y = Matrix::from_vec(samples, shape.outputs, rows.1)?;
        Ok(Self { walk, units, pieces: BTreeMap::new(), u, y })
    }

    /// The most weights that each layer can have: those of features that are always zero are removed in any case.
    fn most(&mut self) -> anyhow::Result<Vec<usize>> {
        let all: Counts = self.units.iter().map(|unit| unit.weights).collect();
        self.fill(std::slice::from_ref(&all))?;
        Ok(all.iter().enumerate().map(|(k, count)| self.pieces[&(k, *count)].weights()).collect())
    }

    /// The same share of every layer, so that the whole model is at the level; the largest layer makes up for rounding.
    fn uniform(&self, level: f64) -> Counts {
        let sparsity = self.walk.baseline.sparsity();
        let stays = 1.0 - self.walk.share(level);
        let mut counts: Counts = self.units.iter().map(|unit| (stays * unit.weights as f64).round() as usize).collect();
        let wanted = ((1.0 - level) * sparsity.nonzeros as f64).round() as usize;
        let wanted = wanted.saturating_sub(self.walk.constants());
        let largest = (0..counts.len()).max_by_key(|k| self.units[*k].weights);
        let others = |k: usize| counts.iter().sum::<usize>() - counts[k];
        if let Some((k, own)) = largest.map(|k| (k, wanted.saturating_sub(others(k)))) {
            counts[k] = own;
        }
        counts
    }

    /// Makes those layers of some allocations that have not been made yet. A layer depends on its own statistics and
    /// weights alone, so one model can make a new layer in each of its groups.
    fn fill(&mut self, candidates: &[Counts]) -> anyhow::Result<()> {
        let asked = candidates.iter().flat_map(|counts| counts.iter().copied().enumerate());
        let mut missing: BTreeSet<(usize, usize)> = asked.filter(|key| !self.pieces.contains_key(key)).collect();
        while !missing.is_empty() {
            let next: BTreeMap<usize, usize> = missing.iter().copied().collect();
            let counts = next.iter().map(|(k, count)| (self.units[*k].name.clone(), *count)).collect();
            let model = self.walk.fit(Ask::Counts(Arc::new(counts)), false)?.model;
            for (k, count) in next {
                self.pieces.insert((k, count), Piece::of(&model, self.units[k].target));
                missing.remove(&(k, count));
            }
        }
        Ok(())
    }

    /// The model of an allocation whose layers have all been made.
    fn model(&self, counts: &Counts) -> anyhow::Result<ImplicitModel> {
        let piece = |(k, count): (usize, &usize)| (self.units[k].target, &self.pieces[&(k, *count)]);
        let pieces: Vec<(Target, &Piece)> = counts.iter().enumerate().map(piece).collect();
        Ok(stitched(self.walk.baseline, &pieces)?)
    }

    /// Mean divergences from the network on some samples of the pool.
    fn divergences(&mut self, candidates: &[Counts], samples: &[usize]) -> anyhow::Result<Vec<f64>> {
        self.fill(candidates)?;
        let some = |m: &Matrix<f32>| Matrix::from_fn(samples.len(), m.cols(), |s, j| m[(samples[s], j)]);
        let (u, y) = (some(&self.u), some(&self.y));
        let settings = EquilibriumSettings { threads: self.walk.threads, certified: false, ..Default::default() };
        let of = |counts: &Counts| -> anyhow::Result<f64> {
            self.walk.cancel.check()?;
            let outputs = Equilibrium::new(&self.model(counts)?, settings)?.outputs(&u)?.y;
            Ok(divergence(&outputs, &y)?)
        };
        candidates.iter().map(of).collect()
    }
}
