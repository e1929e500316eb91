//! In which order rows are solved, and over which features.

use crate::layout::Layout;
use crate::problem::Mask;
use crate::states::StateShape;

/// Rows of M = (A B; C D) that share a design. Rows 0..n are states, n..n+q outputs; columns 0..n are states, n..n+p
/// inputs, n+p the constant.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Group {
    pub(crate) name: String,
    pub(crate) rows: Vec<usize>,
    /// Every column that some row of the group may use, ascending.
    pub(crate) columns: Vec<usize>,
}

/// The groups of state rows in the order they are solved, whether they form cycles, and the output rows, which come last.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Plan {
    pub(crate) states: Vec<Group>,
    pub(crate) outputs: Group,
    pub(crate) cyclic: bool,
}

impl Plan {
    /// Layer by layer from the first if no layer reads itself or a later one; otherwise all states at once. Outputs last.
    pub(crate) fn new(layout: &Layout, shape: StateShape, mask: &Mask, constant: &[bool]) -> Self {
        let n = shape.states;
        let columns_of = |rows: &[usize]| -> Vec<usize> {
            let mut columns: Vec<usize> =
                (0..n + shape.inputs).filter(|&j| rows.iter().any(|&i| mask.allows(i, j))).collect();
            if rows.iter().any(|&i| constant[i]) {
                columns.push(n + shape.inputs);
            }
            columns
        };
        let group = |name: &str, rows: Vec<usize>| Group { name: name.to_string(), columns: columns_of(&rows), rows };
        let layers = layout.layers();
        let cyclic = (0..layers.len()).any(|k| {
            // Layers up to k come later in the network (last layer first).
            let later = 0..layout.range(k).end;
            layout.range(k).any(|i| later.clone().any(|j| mask.allows(i, j)))
        });
        let states = if cyclic {
            vec![group("states", (0..n).collect())]
        } else {
            (0..layers.len()).rev().map(|k| group(&layers[k].name, layout.range(k).collect())).collect()
        };
        Self { states, outputs: group("outputs", (n..n + shape.outputs).collect()), cyclic }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::{Activation, Layer};
    use crate::problem::Connectivity;

    #[test]
    fn layers_in_order_when_acyclic_and_at_once_when_not() {
        let relu = Activation::Relu;
        let layout = Layout::new(vec![Layer::dense("second", 2, relu), Layer::dense("first", 3, relu)]);
        let shape = StateShape { inputs: 4, states: 5, outputs: 1 };
        let plan = |c: Connectivity| {
            Plan::new(&layout, shape, &c.mask(&layout, 4, 1, None).unwrap(), &[false, false, true, true, true, false])
        };
        let feedforward = plan(Connectivity::Feedforward);
        assert!(!feedforward.cyclic);
        let names: Vec<&str> = feedforward.states.iter().map(|g| g.name.as_str()).collect();
        assert_eq!(names, ["first", "second"]);
        assert_eq!(feedforward.outputs.columns, (0..9).collect::<Vec<_>>());
        assert_eq!(feedforward.states[0].columns, [5, 6, 7, 8, 9]);
        assert_eq!(feedforward.states[1].columns, [2, 3, 4, 5, 6, 7, 8]);
        let full = plan(Connectivity::Full);
        assert!(full.cyclic);
        assert_eq!(full.states.len(), 1);
        assert_eq!(full.states[0].rows, [0, 1, 2, 3, 4]);
    }
}
