//! One cycle, iterated for a block of samples at once: Anderson acceleration, every result a certified Picard step.
//!
//! Each iteration evaluates g = φ(Ax + w). Whatever x was, g is a Picard step from it, so ‖g − x*‖ ≤ ρ/(1−ρ)·‖g − x‖
//! in the norm that contracts. Anderson acceleration only chooses the next x. If the residual there is not the
//! smallest so far, the sample returns to the best g, which is a plain Picard step and contracts.

use super::program::{Cycle, Norm, StageCode};
use super::run::apply_f64;
use crate::linalg::lanes::Aligned;
use crate::linalg::tiles::{TILE, accumulate};
use crate::linalg::vectorised;

/// The most steps that Anderson acceleration may remember.
pub(super) const MAX_MEMORY: usize = 16;

/// Samples whose numbers are combined in registers; the number of lanes is a multiple of it.
const GROUP: usize = 8;

/// Limits of the iteration.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    pub(super) tolerance: f64,
    pub(super) max_iterations: usize,
    /// Steps that Anderson acceleration remembers; 0 means plain Picard steps.
    pub(super) memory: usize,
}

/// The state of the iteration of one cycle for one sample.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct CycleStatus {
    pub(super) iterations: usize,
    /// ‖g − x‖ of the last step, unweighted.
    pub(super) residual: f64,
    /// The same in the norm in which the cycle contracts.
    pub(super) weighted_residual: f64,
    /// ‖g‖, unweighted.
    pub(super) size: f64,
    pub(super) converged: bool,
}

/// Memory for the largest cycle; feature-major, as all values here.
#[derive(Debug)]
pub(super) struct CycleWorkspace {
    x: Aligned<f64>,
    z: Aligned<f64>,
    g: Vec<f64>,
    previous_f: Vec<f64>,
    previous_g: Vec<f64>,
    best_g: Vec<f64>,
    /// Differences of residuals and of images, `memory` slots each.
    df: Vec<f64>,
    dg: Vec<f64>,
    /// dFᵀdF per sample, `memory × memory`.
    gram: Vec<f64>,
    right: Vec<f64>,
    /// The resulting pre-activations, then the states after the activation.
    pub(super) z_out: Vec<f64>,
    pub(super) x_out: Vec<f64>,
    /// The status of every sample when it stopped.
    pub(super) status: Vec<CycleStatus>,
    /// The status of every sample in this iteration, stopped or not.
    now: Vec<CycleStatus>,
    lanes: Vec<LaneState>,
}

#[derive(Debug, Clone, Copy, Default)]
struct LaneState {
    done: bool,
    best: f64,
    /// Set if the next difference would not be one between steps of the accelerated sequence.
    fresh: bool,
}

impl CycleWorkspace {
    pub(super) fn new(units: usize, lanes: usize, memory: usize) -> Self {
        let n = units * lanes;
        Self {
            x: Aligned::zeros(units.next_multiple_of(TILE) * lanes),
            z: Aligned::zeros(n),
            g: vec![0.0; n],
            previous_f: vec![0.0; n],
            previous_g: vec![0.0; n],
            best_g: vec![0.0; n],
            df: vec![0.0; n * memory],
            dg: vec![0.0; n * memory],
            gram: vec![0.0; memory * memory * lanes],
            right: vec![0.0; memory * lanes],
            z_out: vec![0.0; n],
            x_out: vec![0.0; n],
            status: vec![CycleStatus::default(); lanes],
            now: vec![CycleStatus::default(); lanes],
            lanes: vec![LaneState::default(); lanes],
        }
    }

    /// Solves x = φ(Ax + w) for `count` of `lanes` samples; `w` is units × lanes, `gates` replaces φ in an adjoint.
    /// The answer is in `x_out`, `z_out` and `status`.
    pub(super) fn solve(
        &mut self,
        stage: &StageCode,
        cycle: &Cycle,
        w: &[f64],
        gates: Option<&[f32]>,
        (lanes, count): (usize, usize),
        limits: Limits,
    ) {
        let n = stage.range.len() * lanes;
        let memory = limits.memory;
        self.x[..n].fill(0.0);
        self.df[..n * memory].fill(0.0);
        self.dg[..n * memory].fill(0.0);
        self.gram[..memory * memory * lanes].fill(0.0);
        for (s, lane) in self.lanes[..lanes].iter_mut().enumerate() {
            *lane = LaneState { done: s >= count, best: f64::INFINITY, fresh: true };
        }
        for iteration in 1..=limits.max_iterations.max(1) {
            self.z[..n].copy_from_slice(&w[..n]);
            accumulate(&cycle.inside, &mut self.z[..n], &self.x, lanes);
            apply_f64(&stage.segments, gates, &self.z[..n], &mut self.g[..n], lanes);
            self.measure(cycle, n, lanes);
            let last = iteration == limits.max_iterations.max(1);
            let mut running = false;
            for s in 0..count {
                if self.lanes[s].done {
                    continue;
                }
                let status = &mut self.status[s];
                *status = CycleStatus { iterations: iteration, ..self.now[s] };
                let finite = status.weighted_residual.is_finite() && status.size.is_finite();
                let error = certified(cycle, status.weighted_residual);
                // If nothing contracts, only the size of the step can be judged; the certificate stays infinite.
                let distance = if error.is_finite() { error } else { status.residual };
                status.converged = finite && distance <= limits.tolerance * status.size.max(1.0);
                if status.converged || !finite || last {
                    self.lanes[s].done = true;
                    for at in (s..n).step_by(lanes) {
                        self.x_out[at] = self.g[at];
                        self.z_out[at] = self.z[at];
                    }
                } else {
                    running = true;
                }
            }
            if !running {
                return;
            }
            self.advance(n, lanes, count, memory, (iteration - 1) % memory.max(1));
        }
    }

    /// Residual and size of every sample.
    fn measure(&mut self, cycle: &Cycle, n: usize, lanes: usize) {
        let groups = lanes / GROUP;
        let (x, g) = (self.x[..n].as_chunks::<GROUP>().0, self.g[..n].as_chunks::<GROUP>().0);
        let now = self.now.as_chunks_mut::<GROUP>().0;
        vectorised(
            #[inline(always)]
            || {
                for (group, now) in now.iter_mut().take(groups).enumerate() {
                    let (mut step, mut weighted, mut size) = ([0.0; GROUP], [0.0; GROUP], [0.0; GROUP]);
                    // A maximum loses a NaN, a sum keeps it.
                    let mut total = [0.0; GROUP];
                    for (row, &weight) in cycle.weights.iter().enumerate() {
                        let (x, g) = (&x[row * groups + group], &g[row * groups + group]);
                        for s in 0..GROUP {
                            let (d, v) = ((g[s] - x[s]).abs(), g[s].abs());
                            let w = weight * d;
                            total[s] += d;
                            match cycle.norm {
                                Norm::Max => {
                                    step[s] = if d > step[s] { d } else { step[s] };
                                    weighted[s] = if w > weighted[s] { w } else { weighted[s] };
                                    size[s] = if v > size[s] { v } else { size[s] };
                                }
                                Norm::Sum => {
                                    step[s] += d;
                                    weighted[s] += w;
                                    size[s] += v;
                                }
                            }
                        }
                    }
                    for s in 0..GROUP {
                        now[s] = CycleStatus {
                            iterations: 0,
                            residual: if total[s].is_nan() { total[s] } else { step[s] },
                            weighted_residual: if total[s].is_nan() { total[s] } else { weighted[s] },
                            size: size[s],
                            converged: false,
                        };
                    }
                }
            },
        );
    }

    /// The next x of every sample that still runs.
    fn advance(&mut self, n: usize, lanes: usize, count: usize, memory: usize, slot: usize) {
        if memory == 0 {
            self.x[..n].copy_from_slice(&self.g[..n]);
            return;
        }
        let slot_range = slot * n..(slot + 1) * n;
        let (df, dg) = (&mut self.df[slot_range.clone()], &mut self.dg[slot_range]);
        let (x, g) = (&self.x[..n], &self.g[..n]);
        let (previous_f, previous_g) = (&mut self.previous_f[..n], &mut self.previous_g[..n]);
        vectorised(
            #[inline(always)]
            || {
                for at in 0..n {
                    let f = g[at] - x[at];
                    df[at] = f - previous_f[at];
                    dg[at] = g[at] - previous_g[at];
                    previous_f[at] = f;
                    previous_g[at] = g[at];
                }
            },
        );
        for s in 0..count {
            let (lane, now) = (&mut self.lanes[s], &self.now[s]);
            // A plain step is always accepted: if nothing contracts, there is no better one to return to.
            let rejected = now.weighted_residual >= lane.best && !lane.fresh;
            if lane.fresh || rejected {
                // Columns of zeros have no effect in the small system below.
                let slots = if rejected { 0..memory } else { slot..slot + 1 };
                for at in slots.flat_map(|k| (k * n + s..(k + 1) * n).step_by(lanes)) {
                    self.df[at] = 0.0;
                    self.dg[at] = 0.0;
                }
            }
            lane.fresh = rejected;
            if rejected {
                for pair in 0..memory * memory {
                    self.gram[pair * lanes + s] = 0.0;
                }
            } else {
                lane.best = now.weighted_residual;
            }
        }
        self.correlate(n, lanes, memory, slot);
        for s in 0..count {
            if !self.lanes[s].fresh && !self.lanes[s].done {
                self.small_system(s, lanes, memory);
            }
        }
        self.combine(n, lanes, memory);
    }

    /// The new row and column of the Gram matrix dFᵀdF, and dFᵀf.
    fn correlate(&mut self, n: usize, lanes: usize, memory: usize, slot: usize) {
        let groups = lanes / GROUP;
        let f = self.previous_f[..n].as_chunks::<GROUP>().0;
        let new = self.df[slot * n..(slot + 1) * n].as_chunks::<GROUP>().0;
        for k in 0..memory {
            let old = self.df[k * n..(k + 1) * n].as_chunks::<GROUP>().0;
            for group in 0..groups {
                let (pair, right) = vectorised(
                    #[inline(always)]
                    || {
                        let (mut pair, mut right) = ([0.0; GROUP], [0.0; GROUP]);
                        let rows = old.iter().zip(new).zip(f).skip(group).step_by(groups);
                        for ((old, new), f) in rows {
                            for s in 0..GROUP {
                                pair[s] += old[s] * new[s];
                                right[s] += old[s] * f[s];
                            }
                        }
                        (pair, right)
                    },
                );
                let at = |row: usize| row * lanes + group * GROUP;
                self.gram[at(k * memory + slot)..][..GROUP].copy_from_slice(&pair);
                self.gram[at(slot * memory + k)..][..GROUP].copy_from_slice(&pair);
                self.right[at(k)..][..GROUP].copy_from_slice(&right);
            }
        }
    }

    /// x = g − dG·γ, or the best g if the last step was rejected; otherwise g may become the best.
    fn combine(&mut self, n: usize, lanes: usize, memory: usize) {
        let groups = lanes / GROUP;
        let g = self.g[..n].as_chunks::<GROUP>().0;
        let x = self.x[..n].as_chunks_mut::<GROUP>().0;
        let best = self.best_g[..n].as_chunks_mut::<GROUP>().0;
        let (dg, gamma) = (&self.dg, self.right.as_chunks::<GROUP>().0);
        let states = self.lanes.as_chunks::<GROUP>().0;
        vectorised(
            #[inline(always)]
            || {
                for (at, ((x, g), best)) in x.iter_mut().zip(g).zip(best).enumerate() {
                    let group = at % groups;
                    let mut next = *g;
                    for k in 0..memory {
                        let gamma = &gamma[k * groups + group];
                        let Some(dg) = dg[k * n + at * GROUP..].first_chunk::<GROUP>() else { continue };
                        for s in 0..GROUP {
                            next[s] -= gamma[s] * dg[s];
                        }
                    }
                    for s in 0..GROUP {
                        let back = states[group][s].fresh;
                        x[s] = if back { best[s] } else { next[s] };
                        best[s] = if back { best[s] } else { g[s] };
                    }
                }
            },
        );
    }

    /// min ‖f − dF·γ‖ with a small ridge, by Cholesky; γ replaces the right-hand side.
    fn small_system(&mut self, s: usize, lanes: usize, memory: usize) {
        let m = memory;
        let mut a = [[0.0; MAX_MEMORY]; MAX_MEMORY];
        let mut b = [0.0; MAX_MEMORY];
        let trace: f64 = (0..m).map(|k| self.gram[(k * memory + k) * lanes + s]).sum();
        for i in 0..m {
            for (j, entry) in a[i][..m].iter_mut().enumerate() {
                *entry = self.gram[(i * memory + j) * lanes + s];
            }
            a[i][i] += 1e-14 * trace + f64::MIN_POSITIVE;
            b[i] = self.right[i * lanes + s];
        }
        for j in 0..m {
            for k in 0..j {
                for i in j..m {
                    a[i][j] -= a[i][k] * a[j][k];
                }
            }
            // If the pivot is not positive, the columns are dependent up to rounding; its column is dropped.
            let pivot = if a[j][j] > 0.0 { a[j][j].sqrt() } else { f64::INFINITY };
            for row in a[j..m].iter_mut() {
                row[j] /= pivot;
            }
            a[j][j] = pivot;
        }
        for i in 0..m {
            for k in 0..i {
                b[i] -= a[i][k] * b[k];
            }
            b[i] /= a[i][i];
        }
        for i in (0..m).rev() {
            for k in i + 1..m {
                b[i] -= a[k][i] * b[k];
            }
            b[i] /= a[i][i];
        }
        let usable = b[..m].iter().all(|v| v.is_finite());
        for (k, gamma) in b[..m].iter().enumerate() {
            self.right[k * lanes + s] = if usable { *gamma } else { 0.0 };
        }
    }
}

/// The error of a Picard step, in the unweighted norm; infinite if nothing contracts.
pub(super) fn certified(cycle: &Cycle, weighted_residual: f64) -> f64 {
    if cycle.rho < 1.0 {
        let lightest = cycle.weights.iter().copied().fold(f64::INFINITY, f64::min);
        cycle.rho / (1.0 - cycle.rho) * weighted_residual / lightest
    } else {
        f64::INFINITY
    }
}
