//! The order in which states are computed: acyclic states level by level in one pass; only true cycles iterate.

use crate::linalg::Csr;
use crate::model::components;

/// States that are computed together, each reading only earlier stages (or, in a cycle, itself).
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Stage {
    /// The states, as rows of A.
    pub(crate) units: Vec<usize>,
    /// Whether they read each other and must be iterated.
    pub(crate) cyclic: bool,
}

/// The stages, in an order in which they can be computed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Schedule {
    /// The stages; every state of interest is in exactly one of them.
    pub(crate) stages: Vec<Stage>,
}

impl Schedule {
    /// Strongly connected components in topological order; the acyclic states of one depth form one stage. States that
    /// are not `wanted` are left out; a state that is wanted needs everything it reads to be wanted.
    pub(crate) fn new(a: &Csr<f32>, wanted: impl Fn(usize) -> bool) -> Self {
        let parts = components(a);
        let mut depth = vec![0usize; a.rows()];
        let mut levels: Vec<(Stage, Vec<Stage>)> = Vec::new();
        for (members, cyclic) in parts.members.into_iter().zip(parts.cyclic) {
            let units: Vec<usize> = members.into_iter().filter(|&i| wanted(i)).collect();
            if units.is_empty() {
                continue;
            }
            // States of the component itself still have depth 0, so they do not count.
            let level = units.iter().flat_map(|&i| a.row(i)).map(|(j, _)| depth[j]).max().unwrap_or(0);
            for &i in &units {
                depth[i] = level + 1;
            }
            while levels.len() <= level {
                levels.push((Stage { units: Vec::new(), cyclic: false }, Vec::new()));
            }
            if cyclic {
                levels[level].1.push(Stage { units, cyclic: true });
            } else {
                levels[level].0.units.extend(units);
            }
        }
        let mut stages = Vec::new();
        for (mut acyclic, cycles) in levels {
            if !acyclic.units.is_empty() {
                acyclic.units.sort_unstable();
                stages.push(acyclic);
            }
            stages.extend(cycles);
        }
        Self { stages }
    }

    /// Which states an output depends on, directly or through others.
    pub(crate) fn read_by_outputs(a: &Csr<f32>, c: &Csr<f32>) -> Vec<bool> {
        let mut live = vec![false; a.rows()];
        let mut todo: Vec<usize> = c.indices().iter().map(|&j| j as usize).collect();
        while let Some(i) = todo.pop() {
            if !std::mem::replace(&mut live[i], true) {
                todo.extend(a.row(i).map(|(j, _)| j).filter(|&j| !live[j]));
            }
        }
        live
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_cycles_and_states_nobody_reads() {
        // 4 → 3 → {1 ⇄ 2} → 0, and 5 reads 4 but no state reads 5.
        let rows =
            [vec![(1, 1.0f32)], vec![(2, 1.0), (3, 1.0)], vec![(1, 1.0)], vec![(4, 1.0)], vec![], vec![(4, 1.0)]];
        let a = Csr::from_rows(6, rows);
        let stage = |units: &[usize], cyclic| Stage { units: units.to_vec(), cyclic };
        let all = Schedule::new(&a, |_| true);
        assert_eq!(all.stages, [stage(&[4], false), stage(&[3, 5], false), stage(&[1, 2], true), stage(&[0], false)]);
        let live = Schedule::read_by_outputs(&a, &Csr::from_rows(6, [vec![(0, 2.0f32)]]));
        assert_eq!(live, [true, true, true, true, true, false]);
        assert_eq!(Schedule::new(&a, |i| live[i]).stages[1], stage(&[3], false));
    }
}
