//! Back-substitution: linear functions of a node's values become functions of earlier values, and finally of the
//! input.
//!
//! Coefficients are single precision, constants double. A coefficient multiplies the distance of a value from its
//! anchor, the centre of its interval ([`Graph::anchored`]): z_i is its value where everything that it reads is at its
//! anchor, plus weights times distances. So a rounded coefficient costs a share of an interval's width and not of a
//! value's magnitude.
//!
//! Where a coefficient of a pre-activation z_i was rounded, or a run rounded z_i itself, the error of the function is at
//! most |coefficient|·slack_i. That is subtracted from its constant at once, so errors are never multiplied along paths.

use super::backwards::Rows;
use super::block::Packed;
use super::boxes::Bounds;
use super::graph::{Graph, Kind};
use super::region::InputSet;
use super::relaxation::Lines;
use super::slopes::Slopes;
use crate::linalg::vectorised;

/// Functions substituted side by side.
pub(super) const LANES: usize = 32;

/// One number per function.
pub(super) type Lane = [f64; LANES];

/// Memory for the coefficients of `LANES` functions.
pub(super) struct Substitution<'a> {
    graph: &'a Graph,
    /// For every node the coefficients of its values.
    coefficients: Vec<Rows>,
    touched: Vec<bool>,
    /// Coefficients of the values where the last substitution ended, units × lanes.
    ended: Vec<f32>,
    pub(super) constant: Lane,
    /// If functions are bounded from above too, their largest values.
    upper: Option<Lane>,
    pub(super) packed: Packed,
}

/// The place where a substitution ends.
#[derive(Clone, Copy)]
pub(super) enum Until {
    /// At the values that the first node reads, bounded by their boxes.
    Next,
    /// At the first values that this node or an earlier one has, bounded by their boxes.
    Node(usize),
    /// At the input.
    Input,
}

impl Until {
    fn ends_at(self, k: usize) -> bool {
        match self {
            Until::Next => true,
            Until::Node(last) => k <= last,
            Until::Input => false,
        }
    }
}

impl<'a> Substitution<'a> {
    pub(super) fn new(graph: &'a Graph) -> Self {
        let count = graph.nodes.len();
        Self {
            graph,
            coefficients: (0..count).map(|_| Rows::default()).collect(),
            touched: vec![false; count],
            ended: Vec::new(),
            constant: [0.0; LANES],
            upper: None,
            packed: Packed::default(),
        }
    }

    /// Lower and upper bounds of some pre-activations of node `top`, one per lane, in one substitution: both lines of
    /// an activation have the slope of the upper one. The bounds are wider than those of [`Self::lower`] and cost
    /// half.
    pub(super) fn both(
        &mut self,
        top: usize,
        units: &[usize],
        all: &[Bounds],
        input: &InputSet,
        until: Until,
    ) -> (Lane, Lane) {
        self.upper = Some([0.0; LANES]);
        let functions: Vec<Vec<(usize, f32)>> = units.iter().map(|&i| vec![(i, 1.0)]).collect();
        let lower = self.lower(top, &functions, all, input, until, None);
        (lower, self.upper.take().unwrap_or([f64::INFINITY; LANES]))
    }

    /// Lower bounds of `functions` (unit, coefficient of it) of the pre-activations of node `top`, one per lane.
    pub(super) fn lower(
        &mut self,
        top: usize,
        functions: &[Vec<(usize, f32)>],
        all: &[Bounds],
        input: &InputSet,
        until: Until,
        slopes: Option<&mut Slopes>,
    ) -> Lane {
        self.constant = [0.0; LANES];
        self.ended.clear();
        let size = self.graph.nodes[top].size;
        let mut start = std::mem::take(&mut self.coefficients[top]);
        start.clear(size, self.graph.nodes[top].positions);
        for (lane, function) in functions.iter().enumerate() {
            function.iter().for_each(|&(unit, w)| start.row(unit)[lane] = w);
        }
        self.pass_on(top, &start, all);
        self.coefficients[top] = start;
        let mut slopes = slopes;
        for k in (0..top).rev() {
            if !std::mem::take(&mut self.touched[k]) {
                continue;
            }
            let mut own = std::mem::take(&mut self.coefficients[k]);
            if self.graph.anchored {
                self.leave_anchors(&own, &all[k]);
            }
            match &self.graph.nodes[k].kind {
                Kind::Input => self.end(&own, |constant, own| input.close(constant, own)),
                _ if until.ends_at(k) => self.end(&own, |constant, own| close(constant, own, &all[k])),
                Kind::Free => self.end(&own, |constant, own| close(constant, own, &all[k])),
                Kind::Sum => {
                    if let Some(slopes) = slopes.as_deref_mut() {
                        slopes.keep(k, &own);
                    }
                    self.through_activation(k, &mut own, &all[k], slopes.as_deref());
                    self.pass_on(k, &own, all);
                }
                Kind::Maximum { source, .. } => {
                    if let Some(slopes) = slopes.as_deref_mut() {
                        slopes.keep(k, &own);
                    }
                    self.through_maximum(*source, &own, &all[k], &all[*source]);
                }
            }
            self.coefficients[k] = own;
        }
        self.constant
    }

    /// Coefficients of distances from the anchors become coefficients of the values.
    fn leave_anchors(&mut self, own: &Rows, bounds: &Bounds) {
        self.add_to_constants(own, |i| (-bounds.middle[i], 0.0));
    }

    /// Adds every coefficient times a number to the constants, and takes off its magnitude times a slack; for the upper
    /// constants the slack is added.
    #[inline(always)]
    fn add_to_constants(&mut self, own: &Rows, number_and_slack: impl Fn(usize) -> (f64, f64)) {
        let (constant, mut upper) = (&mut self.constant, self.upper.as_mut());
        vectorised(
            #[inline(always)]
            || {
                own.each(
                    #[inline(always)]
                    |i, row| {
                        let (number, slack) = number_and_slack(i);
                        for l in 0..LANES {
                            let v = f64::from(row[l]);
                            constant[l] += v * number - v.abs() * slack;
                        }
                        if let Some(upper) = upper.as_deref_mut() {
                            for l in 0..LANES {
                                let v = f64::from(row[l]);
                                upper[l] += v * number + v.abs() * slack;
                            }
                        }
                    },
                );
            },
        );
    }

    /// Adds the smallest values of what is left to the constants, and the largest to the upper ones.
    fn end(&mut self, own: &Rows, smallest: impl Fn(&mut Lane, &[f32])) {
        let mut flat = std::mem::take(&mut self.ended);
        own.in_order(&mut flat);
        smallest(&mut self.constant, &flat);
        if let Some(upper) = &mut self.upper {
            let mut least = [0.0; LANES];
            flat.iter_mut().for_each(|v| *v = -*v);
            smallest(&mut least, &flat);
            upper.iter_mut().zip(least).for_each(|(u, l)| *u -= l);
        }
        self.ended = flat;
    }

    /// One step of the slopes, at the input coefficients of the last substitution.
    pub(super) fn improve(&mut self, slopes: &mut Slopes, all: &[Bounds], input: &InputSet, lanes: usize) {
        if !self.ended.is_empty() {
            slopes.step(self.graph, all, (input, &self.ended), lanes, &mut self.packed);
        }
    }

    /// The values of all nodes by the lines of the last substitution, where its functions are smallest: units × lanes.
    pub(super) fn lowest_at(
        &mut self,
        slopes: &mut Slopes,
        all: &[Bounds],
        input: &InputSet,
        lanes: usize,
    ) -> Vec<Vec<f32>> {
        slopes.sweep(self.graph, all, (input, &self.ended), lanes, &mut self.packed, 0.0)
    }

    /// Prepares the coefficients of a node's values; they start at zero when the node is first reached.
    fn reach(&mut self, k: usize) {
        if !std::mem::replace(&mut self.touched[k], true) {
            self.coefficients[k].clear(self.graph.nodes[k].size, self.graph.nodes[k].positions);
        }
    }

    /// Turns coefficients of pre-activations into coefficients of what the node reads.
    fn pass_on(&mut self, k: usize, own: &Rows, all: &[Bounds]) {
        let graph = self.graph;
        let node = &graph.nodes[k];
        self.add_to_constants(own, |i| (all[k].at_anchors[i], all[k].slack[i]));
        for term in &node.terms {
            self.reach(term.source);
            let into = &mut self.coefficients[term.source];
            term.map.transposed(own, into, &all[term.source].dead, &mut self.packed);
        }
    }

    /// Turns coefficients of values into coefficients of pre-activations: each takes the line that bounds its product
    /// from below.
    fn through_activation(&mut self, k: usize, own: &mut Rows, bounds: &Bounds, slopes: Option<&Slopes>) {
        let constant = &mut self.constant;
        let mut largest = self.upper.as_mut();
        let moved = |i: usize| bounds.moved.get(i).copied().unwrap_or(0.0);
        vectorised(
            #[inline(always)]
            || {
                own.retain(
                    #[inline(always)]
                    |i, row| {
                        let lines: &Lines = &bounds.lines[i];
                        let (moved, centre) = (moved(i), bounds.at_anchors[i]);
                        if lines.exact()
                            && moved == 0.0
                            && lines.below == 0.0
                            && (lines.lower == 0.0 || lines.lower == 1.0)
                        {
                            return lines.lower != 0.0;
                        }
                        if let Some(largest) = largest.as_deref_mut() {
                            // Where slopes differ the unit is an unstable ReLU, leaky or not, and any slope in between goes through zero.
                            let below = if lines.lower == lines.upper { lines.below } else { 0.0 };
                            for l in 0..LANES {
                                let wide = f64::from(row[l]);
                                let (down, up) = if wide >= 0.0 { (below, lines.above) } else { (lines.above, below) };
                                row[l] *= lines.upper;
                                let rounded = (wide * f64::from(lines.upper) - f64::from(row[l])) * centre;
                                constant[l] += wide * down - wide.abs() * moved + rounded;
                                largest[l] += wide * up + wide.abs() * moved + rounded;
                            }
                            return true;
                        }
                        let lower: [f32; LANES] = match slopes.and_then(|s| s.of_unit(k, i)) {
                            Some(own) => *own,
                            None => [lines.lower; LANES],
                        };
                        for l in 0..LANES {
                            let v = row[l];
                            let positive = v >= 0.0;
                            let offset = if positive { lines.below } else { lines.above };
                            let slope = if positive { lower[l] } else { lines.upper };
                            let wide = f64::from(v);
                            row[l] = v * slope;
                            let rounded = (wide * f64::from(slope) - f64::from(row[l])) * centre;
                            constant[l] += wide * offset - wide.abs() * moved + rounded;
                        }
                        true
                    },
                );
            },
        );
    }

    fn through_maximum(&mut self, source: usize, own: &Rows, bounds: &Bounds, before: &Bounds) {
        self.reach(source);
        let anchored = self.graph.anchored;
        let anchor = |i: u32| if anchored { before.middle[i as usize] } else { 0.0 };
        let (constant, into) = (&mut self.constant, &mut self.coefficients[source]);
        own.each(|i, row| {
            let (largest, slack) = (&bounds.largest[i], bounds.slack[i]);
            for (l, &v) in row.iter().enumerate() {
                let wide = f64::from(v);
                constant[l] -= wide.abs() * slack;
                if v > 0.0 {
                    into.row(largest.below as usize)[l] += v;
                    constant[l] += wide * anchor(largest.below);
                } else if v < 0.0 {
                    into.row(largest.above as usize)[l] += v * largest.slope;
                    constant[l] += wide * (largest.offset + f64::from(largest.slope) * anchor(largest.above));
                }
            }
        });
    }
}

/// Adds the smallest value over the boxes of a node's values to the constants.
fn close(constant: &mut Lane, own: &[f32], bounds: &Bounds) {
    let ends = bounds.x_low.iter().zip(&bounds.x_high);
    for (row, (&low, &high)) in own.as_chunks::<LANES>().0.iter().zip(ends) {
        if row.iter().all(|v| *v == 0.0) {
            continue;
        }
        for l in 0..LANES {
            let v = f64::from(row[l]);
            constant[l] += if v >= 0.0 { v * low } else { v * high };
        }
    }
}
