//! Evolutionary search for an allocation of a fixed number of weights over layers, in the manner of EvoPress: offspring by
//! level switches, selection in rounds with growing numbers of samples, and the parent among those that may go on.

use std::collections::BTreeSet;

use simplicit::random::Random;

/// A layer keeps about this many steps of weights at the start: a switch moves between a sixteenth and an eighth of
/// what the layer keeps.
const STEPS: usize = 8;
/// The most draws that are made to find an offspring that differs from the others of its generation.
const DRAWS: usize = 20;
/// The most switches of an offspring. The number is the smaller of two draws, so that one switch is the most
/// frequent.
const SWITCHES: usize = 3;

/// One round of selection.
#[derive(Debug, Clone, Copy)]
pub struct Round {
    /// Samples that every candidate is run on.
    pub samples: usize,
    /// How many candidates go on to the next round.
    pub survivors: usize,
}

/// What a search may spend.
#[derive(Debug, Clone)]
pub struct Effort {
    /// Generations: how many times offspring are made.
    pub generations: usize,
    /// Offspring of the parent in each generation.
    pub offspring: usize,
    /// From few samples to many; the last one has the same samples in every generation and compares the parent with
    /// the survivors.
    pub rounds: Vec<Round>,
}

/// A layer of the search.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// The most weights that it can have.
    pub most: usize,
    /// The number of weights that one change moves: the smallest step of all layers times a power of two.
    pub step: usize,
}

/// Weights that every layer keeps.
pub type Counts = Vec<usize>;

/// The fitness of each allocation on the given samples; a smaller number is better.
pub type Fitness<'a> = dyn FnMut(&[Counts], &[usize]) -> anyhow::Result<Vec<f64>> + 'a;

/// The layers of an allocation; the step of each follows from the weights that it keeps at the start. A layer that
/// has most of all weights can change only by what the others can take, so its step is what theirs allow.
pub fn places(most: &[usize], start: &[usize]) -> Vec<Place> {
    let total: usize = start.iter().sum();
    let room = |k: usize| (start[k].min(total - start[k]) / STEPS).max(1);
    let least = (0..start.len()).map(room).min().unwrap_or(1);
    let step = |k: usize| least << (room(k) / least).ilog2();
    (0..start.len()).map(|k| Place { most: most[k], step: step(k) }).collect()
}

/// One layer gains what another loses. The amount is the larger of their two steps, so that both stay at multiples of
/// their steps and the sum does not change. False where there is no room for it.
fn switch(counts: &mut Counts, places: &[Place], gains: usize, loses: usize) -> bool {
    let amount = places[gains].step.max(places[loses].step);
    // Nothing goes through a layer without weights.
    if gains == loses || counts[gains] + amount > places[gains].most || counts[loses] <= amount {
        return false;
    }
    counts[gains] += amount;
    counts[loses] -= amount;
    true
}

/// Offspring that differ from the parent and from each other; fewer than `count` where not as many are found.
fn offspring(parent: &Counts, places: &[Place], count: usize, random: &mut Random) -> Vec<Counts> {
    let mut known = BTreeSet::from([parent.clone()]);
    let mut out = Vec::with_capacity(count);
    for _ in 0..count * DRAWS {
        if out.len() == count {
            break;
        }
        let mut child = parent.clone();
        let switches = 1 + random.below(SWITCHES).min(random.below(SWITCHES));
        for _ in 0..switches {
            let (gains, loses) = (random.below(places.len()), random.below(places.len()));
            switch(&mut child, places, gains, loses);
        }
        if known.insert(child.clone()) {
            out.push(child);
        }
    }
    out
}

/// The best allocation found and its fitness on the samples of the last round, first at the start, then after every
/// generation. Samples are numbers below `pool`.
pub fn evolve(
    start: Counts,
    places: &[Place],
    pool: usize,
    effort: &Effort,
    random: &mut Random,
    fitness: &mut Fitness<'_>,
) -> anyhow::Result<(Counts, Vec<f64>)> {
    let Some((last, first)) = effort.rounds.split_last() else { return Ok((start, Vec::new())) };
    let same: Vec<usize> = (0..last.samples.min(pool)).collect();
    let mut parent = start;
    let mut value = fitness(std::slice::from_ref(&parent), &same)?[0];
    let mut history = vec![value];
    for _ in 0..effort.generations {
        let mut candidates = offspring(&parent, places, effort.offspring, random);
        for round in first {
            let samples = random.choose(pool, round.samples);
            let values = fitness(&candidates, &samples)?;
            let mut order: Vec<usize> = (0..candidates.len()).collect();
            order.sort_by(|a, b| values[*a].total_cmp(&values[*b]));
            candidates = order.into_iter().take(round.survivors).map(|k| candidates[k].clone()).collect();
        }
        let values = fitness(&candidates, &same)?;
        for (candidate, found) in candidates.into_iter().zip(values) {
            if found < value {
                (parent, value) = (candidate, found);
            }
        }
        history.push(value);
    }
    Ok((parent, history))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// Sizes of ResNet-20's layers, and of a network whose first layer has nearly everything.
    fn networks() -> [Vec<usize>; 2] {
        let residual = [vec![432], vec![2304; 6], vec![4608], vec![9216; 5], vec![18432], vec![36864; 5], vec![6400]];
        [residual.concat(), vec![50176, 2048, 512, 160]]
    }

    #[test]
    fn mutations_keep_the_count_and_every_layer_within_its_size() {
        let mut random = Random::new(3);
        for most in networks() {
            for density in [0.5, 0.1, 0.02] {
                let start: Counts = most.iter().map(|m| (density * *m as f64) as usize).collect();
                let places = places(&most, &start);
                let least = places.iter().map(|p| p.step).min().unwrap();
                assert!(places.iter().all(|p| p.step % least == 0 && (p.step / least).is_power_of_two()), "{places:?}");
                let total: usize = start.iter().sum();
                let mut parent = start;
                let mut moved = vec![false; most.len()];
                for _ in 0..200 {
                    let children = offspring(&parent, &places, 8, &mut random);
                    // The parent may have few switches with room, so the draws do not always find eight.
                    assert!((4..=8).contains(&children.len()), "{} children of {parent:?}", children.len());
                    let different: BTreeSet<&Counts> = children.iter().chain([&parent]).collect();
                    assert_eq!(different.len(), children.len() + 1);
                    for child in &children {
                        assert_eq!(child.iter().sum::<usize>(), total, "{child:?}");
                        assert!(child.iter().zip(&most).all(|(c, m)| (1..=*m).contains(c)), "{child:?}");
                        moved.iter_mut().zip(child.iter().zip(&parent)).for_each(|(m, (a, b))| *m |= a != b);
                    }
                    parent = children[0].clone();
                }
                assert!(moved.iter().all(|m| *m), "every layer can change: {moved:?} of {most:?} at {density}");
            }
        }
    }

    /// Every allocation that switches can reach.
    fn reachable(start: &Counts, places: &[Place]) -> BTreeSet<Counts> {
        let mut all = BTreeSet::from([start.clone()]);
        let mut open = vec![start.clone()];
        while let Some(counts) = open.pop() {
            for (gains, loses) in (0..places.len()).flat_map(|a| (0..places.len()).map(move |b| (a, b))) {
                let mut next = counts.clone();
                if switch(&mut next, places, gains, loses) && all.insert(next.clone()) {
                    open.push(next);
                }
            }
        }
        all
    }

    #[test]
    fn the_best_of_all_allocations_is_found_through_noise_and_nothing_gets_worse() {
        // The error of a layer falls with the weights that it keeps, for some layers faster than for others; samples
        // see it with noise.
        let weights = [1.0, 30.0, 5.0, 0.2];
        let exact = |c: &Counts| -> f64 { c.iter().zip(weights).map(|(c, w)| w / *c as f64).sum() };
        let start: Counts = vec![64, 64, 32, 32];
        let places = places(&[200, 200, 100, 100], &start);
        let all = reachable(&start, &places);
        let best = all.iter().min_by(|a, b| exact(a).total_cmp(&exact(b))).unwrap();
        assert!(all.len() > 500 && best != &start, "{} allocations", all.len());
        let effort = Effort {
            generations: 80,
            offspring: 8,
            rounds: vec![
                Round { samples: 10, survivors: 4 },
                Round { samples: 40, survivors: 2 },
                Round { samples: 400, survivors: 1 },
            ],
        };
        let mut seen = BTreeSet::new();
        let mut noise = Random::new(7);
        let mut fitness = |candidates: &[Counts], samples: &[usize]| -> anyhow::Result<Vec<f64>> {
            seen.insert(samples.len());
            let spread = if samples.len() < 400 { 0.1 / (samples.len() as f64).sqrt() } else { 0.0 };
            Ok(candidates.iter().map(|c| exact(c) + spread * noise.normal()).collect())
        };
        let (found, history) =
            evolve(start.clone(), &places, 1000, &effort, &mut Random::new(1), &mut fitness).unwrap();
        assert_eq!(seen.into_iter().collect::<Vec<_>>(), [10, 40, 400]);
        assert_eq!(&found, best, "{} instead of {}", exact(&found), exact(best));
        assert_eq!(history.len(), 81);
        assert!(history.windows(2).all(|w| w[1] <= w[0]) && history[0] == exact(&start), "{history:?}");
        assert_eq!(*history.last().unwrap(), exact(&found));
        // Where every change is worse than the start, the start stays.
        let mut worse = |candidates: &[Counts], _: &[usize]| -> anyhow::Result<Vec<f64>> {
            Ok(candidates.iter().map(|c| if *c == start { 1.0 } else { 2.0 }).collect())
        };
        let (found, history) = evolve(start.clone(), &places, 1000, &effort, &mut Random::new(1), &mut worse).unwrap();
        assert_eq!(found, start);
        assert!(history.iter().all(|v| *v == 1.0));
    }
}
