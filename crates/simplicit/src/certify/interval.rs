//! Eight samples side by side: magnitudes, errors of a run, boxes of states.

use super::Certifier;
use super::reach::{FEW, Stages, add_magnitudes};
use crate::attack::limits;
use crate::equilibrium::{EquilibriumSettings, EquilibriumSolution};
use crate::layout::Activation;
use crate::linalg::{Csr, Matrix, vectorised};

/// Samples side by side.
pub(super) const LANES: usize = 8;
/// One number for each of them.
pub(super) type Lane = [f64; LANES];

/// Unit roundoff of single precision, with room for 1/(1 − t·2⁻²⁴).
const SINGLE: f64 = 1.01 / (1u64 << 24) as f64;
/// Sweeps of the interval iteration in a cycle.
const SWEEPS: usize = 12;
/// Room for what is not yet known when a cycle's magnitudes are guessed.
const ROOM: f64 = 1.0 / 16.0;

/// The equilibrium, and magnitudes and errors over the box of one ε.
pub(super) struct Group {
    z: Vec<Lane>,
    /// No computed pre-activation is further from its exact value.
    z_error: Vec<Lane>,
    /// |A||x| + |B||u| + |b|.
    magnitude: Vec<Lane>,
    /// The same over all paths.
    pub(super) paths: Vec<Lane>,
    /// No run at a point of the box is further off.
    pub(super) output_error: Vec<Lane>,
    /// Rounding of a difference of outputs substituted back, without its number of roundings.
    output_paths: Vec<Lane>,
    roundings: f64,
}

impl Group {
    pub(super) fn new(
        certifier: &Certifier,
        u: &Matrix<f32>,
        solution: &EquilibriumSolution,
        samples: &[usize],
        epsilon: f64,
    ) -> Self {
        let stages = &certifier.stages;
        let model = stages.model;
        let rounded = stages.magnitudes.as_ref().unwrap_or(model);
        let shape = model.shape();
        let n = shape.states;
        let tolerance = EquilibriumSettings::default().tolerance;
        let of = |m: &Matrix<f32>, k: usize| lanes(samples, |s| f64::from(m[(s, k)]));
        let inputs: Vec<Lane> =
            (0..shape.inputs).map(|k| of(u, k).map(|v| v.abs() + epsilon / certifier.per_feature.std[k])).collect();
        let z: Vec<Lane> = (0..n).map(|i| of(&solution.z, i)).collect();
        // Bounds of |x| over the box, of the computed x too; errors of x and of z; magnitudes of a row and of its paths.
        let mut x: Vec<Lane> = vec![[0.0; LANES]; n];
        let (mut error, mut z_error, mut magnitude, mut paths) = (x.clone(), x.clone(), x.clone(), x.clone());
        for (k, stage) in stages.stages.iter().enumerate() {
            let moved = |i: usize| {
                let reach = epsilon * certifier.reach.states[i];
                of(&solution.x, i).map(|v| v.abs() + reach)
            };
            if stage.cycle.is_some() {
                stage.units.iter().for_each(|&i| x[i] = moved(i).map(|v| v + ROOM * (1.0 + v)));
            }
            for &i in &stage.units {
                magnitude[i] = [f64::from(model.state_bias()[i]).abs(); LANES];
            }
            add_magnitudes(rounded.b(), &stage.units, |_| true, &inputs, &mut magnitude);
            add_magnitudes(rounded.a(), &stage.units, |_| true, &x, &mut magnitude);
            let single = if stage.cycle.is_some() { 2.0 * f64::EPSILON } else { SINGLE };
            for &i in &stage.units {
                let terms = stages.terms(i);
                let tiny = terms * f64::from(f32::MIN_POSITIVE);
                z_error[i] = magnitude[i].map(|m| (terms + 2.0) * single * m + tiny);
                paths[i] = magnitude[i];
            }
            stages.add_from_states(k, false, &error, &mut z_error);
            stages.add_from_states(k, false, &paths.clone(), &mut paths);
            stages.close(k, &mut z_error, FEW);
            stages.close(k, &mut paths, FEW);
            if stage.cycle.is_some() {
                let mut largest = [1.0f64; LANES];
                stage.units.iter().for_each(|&i| (0..LANES).for_each(|l| largest[l] = largest[l].max(x[i][l])));
                for &i in &stage.units {
                    let sizes = moved(i);
                    for l in 0..LANES {
                        // Iterated to the tolerance, handed on in single precision.
                        z_error[i][l] += tolerance * largest[l] + SINGLE * magnitude[i][l];
                        error[i][l] = z_error[i][l];
                        // The guess must have left room for what was found.
                        if 2.0 * error[i][l] > 0.999 * (x[i][l] - sizes[l]) {
                            error[i][l] = f64::INFINITY;
                        }
                    }
                }
                continue;
            }
            for &i in &stage.units {
                let size = moved(i);
                let reach = epsilon * certifier.reach.states[i];
                for l in 0..LANES {
                    let off = stages.activations[i] == Activation::Relu && z[i][l] + reach + 2.0 * z_error[i][l] < 0.0;
                    let rounded = match stages.activations[i] {
                        Activation::Relu | Activation::Identity => 0.0,
                        _ => 8.0 * SINGLE * (1.0 + size[l]),
                    };
                    error[i][l] = if off { 0.0 } else { z_error[i][l] + rounded };
                    x[i][l] = if off { 0.0 } else { size[l] + 2.0 * error[i][l] };
                }
            }
        }
        let outputs: Vec<usize> = (0..shape.outputs).collect();
        let through = |states: &[Lane], inputs: Option<&[Lane]>| {
            let mut out = vec![[0.0; LANES]; shape.outputs];
            add_magnitudes(rounded.c(), &outputs, |_| true, states, &mut out);
            if let Some(inputs) = inputs {
                add_magnitudes(rounded.d(), &outputs, |_| true, inputs, &mut out);
                let bias = model.output_bias();
                out.iter_mut().zip(bias).for_each(|(o, b)| o.iter_mut().for_each(|o| *o += f64::from(b.abs())));
            }
            out
        };
        let mut output_error = through(&error, None);
        for ((i, e), m) in outputs.iter().zip(&mut output_error).zip(through(&x, Some(&inputs))) {
            let terms = stages.output_terms(*i);
            for l in 0..LANES {
                e[l] += (terms + 2.0) * SINGLE * m[l] + terms * f64::from(f32::MIN_POSITIVE);
                e[l] *= 1.0 + 1e-9;
            }
        }
        let output_paths = through(&paths, Some(&inputs));
        let turns = if stages.stages.iter().any(|s| s.cycle.is_some()) { 1 + super::linear::TURNS } else { 1 };
        let roundings = 4.0 * ((turns * n + shape.inputs) as f64 + 16.0) * f64::EPSILON;
        Self { z, z_error, magnitude, paths, output_error, output_paths, roundings }
    }

    /// What an exact difference of two outputs must exceed: the errors of the run, and the rounding of the bound.
    pub(super) fn needed(&self, i: usize, j: usize, lane: usize) -> f64 {
        let paths = self.output_paths[i][lane] + self.output_paths[j][lane];
        self.output_error[i][lane] + self.output_error[j][lane] + self.roundings * paths
    }

    /// Rounding of a bound on one pre-activation.
    pub(super) fn slack(&self, i: usize, lane: usize) -> f64 {
        self.roundings * self.paths[i][lane]
    }
}

/// Boxes of inputs, pre-activations and states at one ε.
pub(super) struct Boxes {
    pub(super) input_centre: Vec<Lane>,
    pub(super) input_radius: Vec<Lane>,
    pub(super) low: Vec<Lane>,
    pub(super) high: Vec<Lane>,
    pub(super) state_centre: Vec<Lane>,
    pub(super) state_radius: Vec<Lane>,
}

impl Boxes {
    pub(super) fn new(certifier: &Certifier, group: &Group, u: &Matrix<f32>, samples: &[usize], epsilon: f64) -> Self {
        let stages = &certifier.stages;
        let model = stages.model;
        let (n, p) = (model.shape().states, model.shape().inputs);
        let zero: Lane = [0.0; LANES];
        let mut boxes = Self {
            input_centre: vec![zero; p],
            input_radius: vec![zero; p],
            low: vec![zero; n],
            high: vec![zero; n],
            state_centre: vec![zero; n],
            state_radius: vec![zero; n],
        };
        for k in 0..p {
            let (mean, std) = (certifier.per_feature.mean[k], certifier.per_feature.std[k]);
            for (lane, &s) in samples.iter().enumerate() {
                let (low, high) = limits(u[(s, k)], mean, std, epsilon);
                boxes.input_centre[k][lane] = f64::midpoint(low, high);
                // Half of the last place for the centre, and as much for the limits.
                boxes.input_radius[k][lane] = 0.5 * (high - low) + 4.0 * f64::EPSILON * (low.abs() + high.abs());
            }
        }
        let (mut centre, mut radius) = (vec![zero; n], vec![zero; n]);
        for (k, stage) in stages.stages.iter().enumerate() {
            for &i in &stage.units {
                let reach = epsilon * certifier.reach.states[i];
                for l in 0..LANES {
                    let far = reach + group.z_error[i][l];
                    boxes.low[i][l] = group.z[i][l] - far;
                    boxes.high[i][l] = group.z[i][l] + far;
                }
            }
            boxes.activate(stages, k);
            // Later sweeps see the states of the sweep before.
            let sweeps = if stage.cycle.is_some() { SWEEPS } else { 1 };
            for _ in 0..sweeps {
                for &i in &stage.units {
                    centre[i] = [f64::from(model.state_bias()[i]); LANES];
                    let terms = stages.terms(i) + 8.0;
                    radius[i] = group.magnitude[i].map(|m| terms * f64::EPSILON * m);
                }
                add_both(model.b(), &stage.units, &boxes.input_centre, &boxes.input_radius, &mut centre, &mut radius);
                add_both(model.a(), &stage.units, &boxes.state_centre, &boxes.state_radius, &mut centre, &mut radius);
                for &i in &stage.units {
                    for l in 0..LANES {
                        boxes.low[i][l] = boxes.low[i][l].max(centre[i][l] - radius[i][l]);
                        boxes.high[i][l] = boxes.high[i][l].min(centre[i][l] + radius[i][l]);
                    }
                }
                boxes.activate(stages, k);
            }
        }
        boxes
    }

    /// States from pre-activations, for the units of a stage.
    fn activate(&mut self, stages: &Stages, stage: usize) {
        for &i in &stages.stages[stage].units {
            for l in 0..LANES {
                let (low, high) = image(stages.activations[i], self.low[i][l], self.high[i][l]);
                self.state_centre[i][l] = f64::midpoint(low, high);
                self.state_radius[i][l] = 0.5 * (high - low) + 2.0 * f64::EPSILON * (low.abs() + high.abs());
            }
        }
    }
}

/// φ of an interval, rounded outwards.
pub(super) fn image(activation: Activation, low: f64, high: f64) -> (f64, f64) {
    let (a, b) = (activation.apply_f64(low), activation.apply_f64(high));
    match activation {
        Activation::Relu | Activation::Identity => (a, b),
        _ => (a - 8.0 * f64::EPSILON * (1.0 + a.abs()), b + 8.0 * f64::EPSILON * (1.0 + b.abs())),
    }
}

/// A value of every lane; lanes without a sample repeat the first.
fn lanes(samples: &[usize], value: impl Fn(usize) -> f64) -> Lane {
    std::array::from_fn(|l| samples.get(l).or(samples.first()).map_or(0.0, |&s| value(s)))
}

/// Centres by the matrix, radii by its magnitudes.
fn add_both(
    m: &Csr<f32>,
    rows: &[usize],
    centre: &[Lane],
    radius: &[Lane],
    centre_out: &mut [Lane],
    radius_out: &mut [Lane],
) {
    vectorised(
        #[inline(always)]
        || {
            for &i in rows {
                let (mut c, mut r) = (centre_out[i], radius_out[i]);
                for (j, w) in m.row(i) {
                    let w = f64::from(w);
                    for l in 0..LANES {
                        c[l] += w * centre[j][l];
                        r[l] += w.abs() * radius[j][l];
                    }
                }
                (centre_out[i], radius_out[i]) = (c, r);
            }
        },
    );
}
