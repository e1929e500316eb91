//! Bounds by back-substitution: a linear function of states becomes one of earlier states, and at last of inputs.

use super::Certifier;
use super::interval::{Boxes, Group};
use super::relaxation::Lines;
use crate::linalg::{Csr, vectorised};

/// Substitutions in a cycle before what is left is bounded by the box.
pub(super) const TURNS: usize = 12;
/// Most intervals of a stage times weights on their way that are narrowed: some seconds for one sample. Larger stages keep
/// their boxes.
const WORK: usize = 1 << 31;
/// Functions substituted side by side.
const WIDTH: usize = 32;

/// Several linear functions λᵀx + μᵀu + constant of one sample, each to be bounded from below.
pub(super) struct Substitution<'a> {
    certifier: &'a Certifier<'a>,
    /// n × width and p × width.
    lambda: Vec<f64>,
    mu: Vec<f64>,
    constant: Vec<f64>,
    /// A row of λ times the slope of the line it takes, and a cycle's rows.
    taken: Vec<f64>,
    held: Vec<f64>,
    /// Of the sample at hand.
    low: Vec<f64>,
    high: Vec<f64>,
    lines: Vec<Lines>,
}

impl<'a> Substitution<'a> {
    pub(super) fn new(certifier: &'a Certifier<'a>) -> Self {
        let shape = certifier.model.shape();
        let (n, p) = (shape.states, shape.inputs);
        Self {
            certifier,
            lambda: vec![0.0; n * WIDTH],
            mu: vec![0.0; p * WIDTH],
            constant: vec![0.0; WIDTH],
            taken: vec![0.0; WIDTH],
            held: vec![0.0; n * WIDTH],
            low: vec![0.0; n],
            high: vec![0.0; n],
            lines: vec![Lines::default(); n],
        }
    }

    /// Whether every other class stays below `label` over the boxes of this lane.
    pub(super) fn certifies(&mut self, group: &Group, boxes: &Boxes, lane: usize, label: usize) -> bool {
        let model = self.certifier.model;
        let stages = &self.certifier.stages;
        for i in 0..self.low.len() {
            (self.low[i], self.high[i]) = (boxes.low[i][lane], boxes.high[i][lane]);
        }
        for (k, stage) in stages.stages.iter().enumerate() {
            // The first layer's intervals are as narrow as can be; an exact line cannot be improved upon.
            let mut open: Vec<usize> = stage.units.iter().copied().filter(|&i| self.may_narrow(i)).collect();
            if open.len().saturating_mul(stages.weights_passed[k]) > WORK {
                open.clear();
            }
            for part in open.chunks(WIDTH / 2) {
                self.clear();
                for (r, &i) in part.iter().enumerate() {
                    for (sign, r) in [(1.0, 2 * r), (-1.0, 2 * r + 1)] {
                        add_row(model.a(), i, sign, &mut self.lambda, r);
                        add_row(model.b(), i, sign, &mut self.mu, r);
                        self.constant[r] = sign * f64::from(model.state_bias()[i]);
                    }
                }
                let from = if stage.cycle.is_some() { k + 1 } else { k };
                self.substitute(from, boxes, lane);
                for (r, &i) in part.iter().enumerate() {
                    let slack = group.slack(i, lane);
                    self.low[i] = self.low[i].max(self.constant[2 * r] - slack);
                    self.high[i] = self.high[i].min(-(self.constant[2 * r + 1] - slack));
                }
            }
            for &i in &stage.units {
                self.lines[i] = Lines::over(stages.activations[i], self.low[i], self.high[i]);
            }
        }
        let others: Vec<usize> = (0..model.shape().outputs).filter(|&j| j != label).collect();
        others.chunks(WIDTH).all(|part| {
            self.clear();
            for (r, &j) in part.iter().enumerate() {
                for (sign, row) in [(1.0, label), (-1.0, j)] {
                    add_row(model.c(), row, sign, &mut self.lambda, r);
                    add_row(model.d(), row, sign, &mut self.mu, r);
                    self.constant[r] += sign * f64::from(model.output_bias()[row]);
                }
            }
            self.substitute(stages.stages.len(), boxes, lane);
            part.iter().enumerate().all(|(r, &j)| self.constant[r] > group.needed(label, j, lane))
        })
    }

    /// Whether back-substitution can give a narrower interval that also gives better lines.
    fn may_narrow(&self, i: usize) -> bool {
        let stages = &self.certifier.stages;
        let bent = !Lines::over(stages.activations[i], self.low[i], self.high[i]).exact();
        bent && stages.model.a().row(i).next().is_some()
    }

    fn clear(&mut self) {
        self.lambda.fill(0.0);
        self.mu.fill(0.0);
        self.constant.fill(0.0);
    }

    /// Through the stages before `end`, last first, and then over the box of inputs; the bounds are in `constant`.
    fn substitute(&mut self, end: usize, boxes: &Boxes, lane: usize) {
        let stages = &self.certifier.stages;
        for k in (0..end).rev() {
            let units = &stages.stages[k].units;
            if stages.stages[k].cycle.is_none() {
                for &i in units {
                    self.taken.copy_from_slice(&self.lambda[i * WIDTH..(i + 1) * WIDTH]);
                    self.lambda[i * WIDTH..(i + 1) * WIDTH].fill(0.0);
                    self.push(i);
                }
                continue;
            }
            // Before its own lines are known, a cycle's states take those of its intervals.
            for &i in units {
                self.lines[i] = Lines::over(stages.activations[i], self.low[i], self.high[i]);
            }
            for _ in 0..TURNS {
                for (r, &i) in units.iter().enumerate() {
                    let row = &mut self.lambda[i * WIDTH..(i + 1) * WIDTH];
                    self.held[r * WIDTH..(r + 1) * WIDTH].copy_from_slice(row);
                    row.fill(0.0);
                }
                for (r, &i) in units.iter().enumerate() {
                    self.taken.copy_from_slice(&self.held[r * WIDTH..(r + 1) * WIDTH]);
                    self.push(i);
                }
            }
            for &i in units {
                let (centre, radius) = (boxes.state_centre[i][lane], boxes.state_radius[i][lane]);
                close(&mut self.constant, &mut self.lambda[i * WIDTH..(i + 1) * WIDTH], centre, radius);
            }
        }
        for (row, k) in self.mu.chunks_exact_mut(WIDTH).zip(0..) {
            let (centre, radius) = (boxes.input_centre[k][lane], boxes.input_radius[k][lane]);
            close(&mut self.constant, row, centre, radius);
        }
    }

    /// λ_i x_i, with λ_i in `taken`, becomes λ_i times the line that bounds it from below, and that its row of A, B, b.
    fn push(&mut self, i: usize) {
        if self.taken.iter().all(|t| *t == 0.0) {
            return;
        }
        let model = self.certifier.model;
        let lines = self.lines[i];
        let bias = f64::from(model.state_bias()[i]);
        for (t, constant) in self.taken.iter_mut().zip(&mut self.constant) {
            let (slope, offset) = if *t >= 0.0 { (lines.lower, lines.below) } else { (lines.upper, lines.above) };
            *constant += *t * offset;
            *t *= slope;
            *constant += *t * bias;
        }
        if lines.lower == 0.0 && lines.upper == 0.0 {
            return;
        }
        spread(model.a(), i, &self.taken, &mut self.lambda);
        spread(model.b(), i, &self.taken, &mut self.mu);
    }
}

/// Column r of `out` gains sign times row i.
fn add_row(m: &Csr<f32>, i: usize, sign: f64, out: &mut [f64], r: usize) {
    m.row(i).for_each(|(j, w)| out[j * WIDTH + r] += sign * f64::from(w));
}

/// Every row j of `out` gains m_ij times `taken`.
fn spread(m: &Csr<f32>, i: usize, taken: &[f64], out: &mut [f64]) {
    let Some(taken) = taken.first_chunk::<WIDTH>() else { return };
    vectorised(
        #[inline(always)]
        || {
            for (j, w) in m.row(i) {
                let w = f64::from(w);
                let Some(row) = out[j * WIDTH..].first_chunk_mut::<WIDTH>() else { continue };
                for r in 0..WIDTH {
                    row[r] += w * taken[r];
                }
            }
        },
    );
}

/// The smallest value over an interval goes to the constants; the coefficients are used up.
fn close(constant: &mut [f64], row: &mut [f64], centre: f64, radius: f64) {
    for (c, w) in constant.iter_mut().zip(row) {
        *c += *w * centre - w.abs() * radius;
        *w = 0.0;
    }
}
