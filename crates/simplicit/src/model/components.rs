//! Strongly connected components of the graph of A: an edge from state j to state i where A_ij ≠ 0.

use crate::linalg::Csr;

/// The components in topological order: a component reads only itself and earlier ones.
#[derive(Debug, Clone, PartialEq)]
pub struct Components {
    /// The states of every component, ascending.
    pub members: Vec<Vec<usize>>,
    /// Whether the component is a cycle (two or more states, or one that reads itself).
    pub cyclic: Vec<bool>,
}

/// Finds the components with Tarjan's algorithm and a stack of its own, because a deep network would overflow the
/// program's.
pub fn components(a: &Csr<f32>) -> Components {
    const UNSEEN: usize = usize::MAX;
    let n = a.rows();
    let (indptr, indices) = (a.indptr(), a.indices());
    let mut order = vec![UNSEEN; n];
    let mut low = vec![0usize; n];
    let mut on_stack = vec![false; n];
    let mut stack = Vec::new();
    let mut calls: Vec<(usize, usize)> = Vec::new();
    let mut counter = 0;
    let (mut members, mut cyclic) = (Vec::new(), Vec::new());
    for root in 0..n {
        if order[root] != UNSEEN {
            continue;
        }
        calls.push((root, indptr[root]));
        while let Some(&mut (i, ref mut next)) = calls.last_mut() {
            if order[i] == UNSEEN {
                order[i] = counter;
                low[i] = counter;
                counter += 1;
                stack.push(i);
                on_stack[i] = true;
            }
            // To follow a state to the states that it reads finishes sources first, which is the order needed here.
            if *next < indptr[i + 1] {
                let j = indices[*next] as usize;
                *next += 1;
                if order[j] == UNSEEN {
                    calls.push((j, indptr[j]));
                } else if on_stack[j] {
                    low[i] = low[i].min(order[j]);
                }
                continue;
            }
            calls.pop();
            if let Some(&(parent, _)) = calls.last() {
                low[parent] = low[parent].min(low[i]);
            }
            if low[i] == order[i] {
                let mut component = Vec::new();
                while let Some(j) = stack.pop() {
                    on_stack[j] = false;
                    component.push(j);
                    if j == i {
                        break;
                    }
                }
                component.sort_unstable();
                cyclic.push(component.len() > 1 || a.row(i).any(|(j, _)| j == i));
                members.push(component);
            }
        }
    }
    Components { members, cyclic }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    /// Reachability by Warshall: i and j are together if each reaches the other.
    #[test]
    fn agrees_with_reachability_on_random_graphs() {
        let mut r = Random::new(1);
        for round in 0..200 {
            let n = 1 + r.below(12);
            let density = r.uniform() * 0.4;
            let mut reaches = vec![vec![false; n]; n];
            let rows: Vec<Vec<(usize, f32)>> =
                (0..n).map(|_| (0..n).filter(|_| r.uniform() < density).map(|j| (j, 1.0)).collect()).collect();
            for (i, row) in rows.iter().enumerate() {
                for &(j, _) in row {
                    reaches[j][i] = true;
                }
            }
            for k in 0..n {
                for i in 0..n {
                    for j in 0..n {
                        reaches[i][j] |= reaches[i][k] && reaches[k][j];
                    }
                }
            }
            let found = components(&Csr::from_rows(n, rows));
            let mut place = vec![usize::MAX; n];
            for (k, members) in found.members.iter().enumerate() {
                for &i in members {
                    assert_eq!(place[i], usize::MAX);
                    place[i] = k;
                }
                assert_eq!(found.cyclic[k], reaches[members[0]][members[0]], "round {round}");
            }
            for i in 0..n {
                for j in 0..n {
                    assert_eq!(place[i] == place[j], i == j || (reaches[i][j] && reaches[j][i]));
                    assert!(!reaches[i][j] || place[i] <= place[j], "a source comes first");
                }
            }
        }
    }

    #[test]
    fn a_long_chain_does_not_overflow_the_stack() {
        let n = 200_000;
        let rows = (0..n).map(|i| (i + 1 < n).then_some((i + 1, 1.0f32)));
        let found = components(&Csr::from_rows(n, rows));
        assert_eq!(found.members[0], [n - 1]);
        assert!(found.cyclic.iter().all(|c| !c));
    }
}
