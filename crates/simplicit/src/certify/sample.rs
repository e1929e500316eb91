//! Certifies one sample: up to which ε each bound does so.

use super::boxes::{self, Bounds, Rule};
use super::graph::{Kind, Node};
use super::reach::{CycleBox, Stages};
use super::region::InputSet;
use super::relaxation::Lines;
use super::slopes::Slopes;
use super::substitution::{LANES, Substitution, Until};
use super::{Bound, Certifier};
use crate::Result;
use crate::parallel::Cancel;

pub(super) struct Sample<'a, 'g> {
    pub(super) certifier: &'a Certifier<'a>,
    pub(super) substitution: &'a mut Substitution<'g>,
    pub(super) u: &'a [f32],
    pub(super) label: usize,
    /// The states of the sample, and the stages of a model with cycles.
    pub(super) states: Option<(&'a [f32], &'a Stages<'a>)>,
    pub(super) cancel: &'a Cancel,
    /// Whether narrowing its intervals would have cost more than the settings allow, at some ε.
    pub(super) given_up: bool,
    /// Multiply-adds that narrowing its intervals has cost so far.
    pub(super) spent: u64,
}

/// Stable units are narrowed too if at least one unit in this many looks unstable by intervals,
const MANY: usize = 10;
/// and at most one in this many of these is unstable by linear bounds.
const FEW_LEFT: usize = 5;

/// Which ends of intervals are narrowed, and how.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Narrow {
    Nothing,
    Unstable,
}

impl Sample<'_, '_> {
    /// For every bound up to the one asked for, the number of ε, in ascending order, at which it or an earlier bound
    /// holds.
    pub(super) fn reached(&mut self, ascending: &[f64]) -> Result<Vec<usize>> {
        let settings = self.certifier.settings;
        let mut reached = Vec::new();
        let mut count = 0;
        if self.certifier.graph.non_expansive {
            while count < ascending.len() && self.cheap(ascending[count], Rule::Lipschitz) {
                count += 1;
            }
        }
        reached.push(count);
        if settings.bound >= Bound::Interval {
            while count < ascending.len() && self.cheap(ascending[count], Rule::Interval) {
                count += 1;
            }
            reached.push(count);
        }
        if settings.bound >= Bound::Linear {
            let mut linear = count;
            for (e, &epsilon) in ascending.iter().enumerate().skip(count) {
                let Some(by) = self.linear(epsilon)? else { break };
                // A bound that fails at some ε is not tried at larger ones.
                if by == Bound::Linear && linear == e {
                    linear = e + 1;
                }
                count = e + 1;
            }
            reached.push(linear);
            if settings.bound == Bound::Slopes {
                reached.push(count);
            }
        }
        Ok(reached)
    }

    pub(super) fn input(&self, epsilon: f64) -> InputSet {
        InputSet::new(self.u, self.certifier.per_feature, epsilon, self.certifier.settings.norm)
    }

    /// Whether boxes alone certify the sample, with one substitution from the outputs.
    fn cheap(&mut self, epsilon: f64, rule: Rule) -> bool {
        let input = self.input(epsilon);
        match self.boxes(&input, epsilon, rule, Narrow::Nothing) {
            Ok(Some(all)) => self.margins(&all, &input, Until::Next).iter().all(|(_, least)| *least > 0.0),
            _ => false,
        }
    }

    /// Which of the linear bounds certifies the sample, if one does.
    fn linear(&mut self, epsilon: f64) -> Result<Option<Bound>> {
        let input = self.input(epsilon);
        let Some(all) = self.boxes(&input, epsilon, Rule::Interval, Narrow::Unstable)? else { return Ok(None) };
        let margins = self.margins(&all, &input, Until::Input);
        // A margin that is NaN does not count as above zero.
        let is_open = |least: f64| least.is_nan() || least <= 0.0;
        let open: Vec<usize> = margins.iter().filter(|(_, least)| is_open(*least)).map(|(j, _)| *j).collect();
        if open.is_empty() {
            return Ok(Some(Bound::Linear));
        }
        let steps = self.certifier.settings.slopes;
        Ok((steps > 0 && self.improved(&all, &input, &open, steps)).then_some(Bound::Slopes))
    }

    /// For every other class the smallest difference between the label's output and that of the class, as far as the
    /// bound proves it.
    pub(super) fn margins(&mut self, all: &[Bounds], input: &InputSet, until: Until) -> Vec<(usize, f64)> {
        let graph = &self.certifier.graph;
        let others: Vec<usize> = (0..graph.outputs).filter(|j| *j != self.label).collect();
        let mut out = Vec::with_capacity(others.len());
        for part in others.chunks(LANES) {
            let functions = differences(self.label, part);
            let least = self.substitution.lower(graph.output(), &functions, all, input, until, None);
            out.extend(part.iter().copied().zip(least));
        }
        out
    }

    /// Whether better slopes certify the classes that are still open.
    fn improved(&mut self, all: &[Bounds], input: &InputSet, open: &[usize], steps: usize) -> bool {
        let graph = &self.certifier.graph;
        open.chunks(LANES).all(|part| {
            let functions = differences(self.label, part);
            let mut slopes = Slopes::new(graph, all, graph.output());
            let mut proved = vec![false; part.len()];
            for step in 0..=steps {
                let top = graph.output();
                let least = self.substitution.lower(top, &functions, all, input, Until::Input, Some(&mut slopes));
                proved.iter_mut().zip(least).for_each(|(p, least)| *p |= least > 0.0);
                if proved.iter().all(|p| *p) {
                    return true;
                }
                if step < steps {
                    self.substitution.improve(&mut slopes, all, input, part.len());
                }
            }
            false
        })
    }

    /// Bounds of every node; `None` where they would cost too much.
    pub(super) fn boxes(
        &mut self,
        input: &InputSet,
        epsilon: f64,
        rule: Rule,
        narrow: Narrow,
    ) -> Result<Option<Vec<Bounds>>> {
        let graph = &self.certifier.graph;
        let mut all: Vec<Bounds> = Vec::with_capacity(graph.nodes.len());
        let before = self.spent;
        let mut tight = vec![false; graph.nodes.len()];
        tight[0] = true;
        let mut error = Vec::new();
        for (k, node) in graph.nodes.iter().enumerate() {
            self.cancel.check()?;
            let turn = graph.turns.as_ref().filter(|t| t.contains(&k));
            let last = turn.is_some_and(|t| k + 1 == t.end);
            let bounds = match &node.kind {
                Kind::Input => Bounds::of_values(input.low.clone(), input.high.clone()),
                Kind::Free => {
                    let found = self.cycle_box(input, epsilon);
                    error = found.error;
                    Bounds::of_values(found.low, found.high)
                }
                Kind::Sum if turn.is_some() && rule == Rule::Lipschitz => {
                    let before = &all[k - 1];
                    Bounds::of_values(before.x_low.clone(), before.x_high.clone())
                }
                Kind::Sum if narrow == Narrow::Unstable && (turn.is_none() || last) => {
                    let mut bounds = Bounds::sum(graph, k, &all);
                    if !self.narrow(k, &mut bounds, &mut all, input, (before, &mut tight))? {
                        return Ok(None);
                    }
                    bounds.activate(node, rule);
                    bounds
                }
                Kind::Sum | Kind::Maximum { .. } => boxes::of_node(graph, k, &all, rule),
            };
            all.push(bounds);
            if turn.is_some() {
                // All turns are the same states, so their intervals can be intersected.
                let (before, own) = all.split_at_mut(k);
                own[0].cut(&before[k - 1].x_low, &before[k - 1].x_high);
            }
            if last && let Some(turns) = &graph.turns {
                let states = all[k].clone();
                all[turns.start - 1] = Bounds::of_values(states.x_low.clone(), states.x_high.clone());
                turns.clone().for_each(|t| all[t] = states.clone());
                all[k].move_by(&error);
            }
        }
        Ok(Some(all))
    }

    /// Narrows the intervals of the units of node k that gain by it; false where that would cost too much. `tight`
    /// says for each earlier node whether all of its intervals come from linear bounds.
    fn narrow(
        &mut self,
        k: usize,
        bounds: &mut Bounds,
        all: &mut Vec<Bounds>,
        input: &InputSet,
        (before, tight): (u64, &mut Vec<bool>),
    ) -> Result<bool> {
        let graph = &self.certifier.graph;
        let node = &graph.nodes[k];
        // Over a box the plain intervals of the first layer are as narrow as possible.
        if k == graph.output() || (node.first && input.is_box()) {
            tight[k] = true;
            return Ok(true);
        }
        let most = before + self.certifier.settings.work;
        let cost = |units: usize, lanes: u64| units as u64 * lanes * node.work;
        let mut open = open(node, bounds);
        // Most units can be shown to be stable by a substitution that ends at the boxes of a node shortly before,
        // where these are narrow.
        if let Some(stop) = self.near(k, tight) {
            self.spent += open.len() as u64 * 2 * (node.work - graph.nodes[stop].work);
            self.narrow_units(k, &open, bounds, all, input, Until::Node(stop))?;
            open = self::open(node, bounds);
        }
        // Both ends in one substitution cost half. Where that settles most units of a sample of them, it is tried for
        // all.
        let both = open.len() > LANES / 2 && graph.nodes[..k].iter().all(|n| !matches!(n.kind, Kind::Maximum { .. }));
        let mut left = open.clone();
        if both {
            let probed: Vec<usize> = open.iter().copied().step_by(open.len().div_ceil(LANES)).collect();
            self.narrow_both(k, &probed, bounds, all, input)?;
            let settled = open.len() - self::open(node, bounds).len();
            if 2 * settled >= probed.len() {
                self.spent += cost(open.len(), 1);
                if self.spent > most {
                    self.given_up = true;
                    return Ok(false);
                }
                self.narrow_both(k, &open, bounds, all, input)?;
            }
            left = self::open(node, bounds);
        }
        self.spent += cost(left.len(), 2);
        if self.spent > most {
            self.given_up = true;
            return Ok(false);
        }
        self.narrow_units(k, &left, bounds, all, input, Until::Input)?;
        // Where intervals are much wider than linear bounds, those of stable units would make all later ones wide: one node with
        // narrow intervals throughout costs less than narrowing every unit behind it.
        let bent = self::open(node, bounds).len();
        let lanes = if both { 1 } else { 2 };
        let rest = cost(node.size - open.len(), lanes);
        if MANY * open.len() >= node.size && FEW_LEFT * bent <= open.len() && self.spent + rest <= most {
            let mut is_open = vec![false; node.size];
            open.iter().for_each(|&i| is_open[i] = true);
            let others: Vec<usize> =
                (0..node.size).filter(|&i| !is_open[i] && bounds.high[i] > bounds.low[i]).collect();
            self.spent += cost(others.len(), lanes);
            if both {
                self.narrow_both(k, &others, bounds, all, input)?;
            } else {
                self.narrow_units(k, &others, bounds, all, input, Until::Input)?;
            }
            tight[k] = true;
        }
        Ok(true)
    }

    /// The last node at which a substitution from node k meets nothing but nodes with narrow intervals, if that is less than half
    /// of the way to the input.
    fn near(&self, k: usize, tight: &[bool]) -> Option<usize> {
        let nodes = &self.certifier.graph.nodes;
        let reads = |j: usize| {
            let maximum = match nodes[j].kind {
                Kind::Maximum { source, .. } => Some(source),
                _ => None,
            };
            nodes[j].terms.iter().map(|t| t.source).chain(maximum)
        };
        let closed = |stop: usize| (stop + 1..=k).flat_map(reads).all(|s| s > stop || tight[s]);
        (1..k).rev().find(|&stop| tight[stop] && closed(stop)).filter(|&stop| 2 * nodes[stop].work > nodes[k].work)
    }

    /// Narrows the intervals of some units of node k by linear bounds, where these are narrower.
    fn narrow_units(
        &mut self,
        k: usize,
        units: &[usize],
        bounds: &mut Bounds,
        all: &mut Vec<Bounds>,
        input: &InputSet,
        until: Until,
    ) -> Result<()> {
        self.narrowed(units, LANES / 2, bounds, all, |substitution, part, all| {
            let functions: Vec<Vec<(usize, f32)>> =
                part.iter().flat_map(|&i| [vec![(i, 1.0)], vec![(i, -1.0)]]).collect();
            let least = substitution.lower(k, &functions, all, input, until, None);
            (0..part.len()).map(|r| (least[2 * r], -least[2 * r + 1])).collect()
        })
    }

    /// The same in half the time, with wider intervals.
    fn narrow_both(
        &mut self,
        k: usize,
        units: &[usize],
        bounds: &mut Bounds,
        all: &mut Vec<Bounds>,
        input: &InputSet,
    ) -> Result<()> {
        self.narrowed(units, LANES, bounds, all, |substitution, part, all| {
            let (low, high) = substitution.both(k, part, all, input, Until::Input);
            (0..part.len()).map(|r| (low[r], high[r])).collect()
        })
    }

    /// Takes some units at a time, each with the ends that `ends` finds, where these are narrower.
    fn narrowed(
        &mut self,
        units: &[usize],
        at_once: usize,
        bounds: &mut Bounds,
        all: &mut Vec<Bounds>,
        mut ends: impl FnMut(&mut Substitution, &[usize], &[Bounds]) -> Vec<(f64, f64)>,
    ) -> Result<()> {
        // The substitution starts at the node itself, which needs its own slacks.
        all.push(bounds.clone());
        for part in units.chunks(at_once) {
            self.cancel.check()?;
            for (&i, (low, high)) in part.iter().zip(ends(self.substitution, part, all)) {
                bounds.low[i] = bounds.low[i].max(low);
                bounds.high[i] = bounds.high[i].min(high);
            }
        }
        all.pop();
        Ok(())
    }

    fn cycle_box(&self, input: &InputSet, epsilon: f64) -> CycleBox {
        let n = self.states.map_or(0, |(x, _)| x.len());
        let (Some((x, stages)), Some(cycle)) = (self.states, &self.certifier.cycle) else {
            return CycleBox { low: vec![f64::NEG_INFINITY; n], high: vec![f64::INFINITY; n], error: Vec::new() };
        };
        let moved: Vec<f64> = cycle.reach.iter().map(|r| r * (epsilon + 2.0 * f64::from(f32::EPSILON))).collect();
        let sizes: Vec<f64> = input.low.iter().zip(&input.high).map(|(l, h)| l.abs().max(h.abs())).collect();
        CycleBox::new(stages, x, &moved, &sizes)
    }
}

/// The units of a node that gain from narrower intervals of their own: unstable ones, and those that a maximum reads.
fn open(node: &Node, bounds: &Bounds) -> Vec<usize> {
    let mut open: Vec<usize> = Vec::new();
    for (range, activation) in &node.activations {
        open.extend(range.clone().filter(|&i| {
            let (low, high) = (bounds.low[i], bounds.high[i]);
            let bent = !Lines::over(*activation, low, high).exact();
            bent || (node.before_maximum && high > 0.0 && high > low)
        }));
    }
    open
}

/// Output `label` minus every one of `others`.
pub(super) fn differences(label: usize, others: &[usize]) -> Vec<Vec<(usize, f32)>> {
    others.iter().map(|&j| vec![(label, 1.0), (j, -1.0)]).collect()
}
