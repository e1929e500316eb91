//! A block of rows solved side by side, so that every product with Ĝ or an inverse is a matrix–matrix product.
//!
//! 1. **Operator splitting**, accelerated ([`super::splitting`]): a few dozen cheap steps find the support.
//! 2. **Active set** ([`super::active_set`]): from time to time, rows whose signs no longer change are solved on
//!    their support, which is corrected a few times. Most rows are solved here.
//! 3. **Proximal point with semismooth Newton** ([`super::newton`]) for the rows that are left.
//!
//! Every row depends on its own data alone, but is solved in a block of fixed size, so the result does not depend on
//! the number of threads.

use super::active_set::{ActiveSet, correct};
use super::canonical::{Gap, Row};
use super::design::Coordinates;
use super::newton::{Newton, newton};
use super::newton_system::NewtonSystem;
use super::splitting::{Splitting, advance, start};
use super::{RowOutcome, SolverSettings, Status};
use crate::linalg::{Matrix, Scalar, View, gemm, vectorised};
use crate::parallel::Cancel;
use crate::problem::Penalty;

/// Splitting steps from one check of the signs to the next.
const LOOK_EVERY: usize = 5;
/// The step of the first try of the active set (sooner if every row has a start), and the factor from one try to the
/// next.
const FIRST_TRY: usize = 20;
const NEXT_TRY: f64 = 1.25;
/// The largest share of signs that may have changed since the last check; fewer where a system costs as much as many
/// more steps.
const SETTLED_SIGNS: f64 = 0.02;
const SETTLED_SIGNS_OF_COSTLY: f64 = 0.005;
/// About how many Newton systems a row solves at one ε, which share the cost of making an inverse.
const SYSTEMS_AT_A_LEVEL: f64 = 5.0;

/// The best certified point of a row.
#[derive(Debug, Default, Clone)]
pub(super) struct Best(Option<(Gap, Vec<f64>)>);

impl Best {
    /// Keeps w if its gap is smaller.
    pub(super) fn take(&mut self, gap: Gap, w: &[f64]) -> bool {
        let better = self.0.as_ref().is_none_or(|(best, _)| gap.gap < best.gap);
        if better {
            self.0 = Some((gap, w.to_vec()));
        }
        better
    }

    pub(super) fn is_within(&self, tolerance: f64) -> bool {
        self.0.as_ref().is_some_and(|(best, _)| best.relative() <= tolerance)
    }
}

/// Memory that the rows of a block share.
pub(super) struct Workspace {
    pub(super) v: Vec<f64>,
    pub(super) shifted: Vec<f64>,
    pub(super) trial: Vec<f64>,
    pub(super) double: Buffers<f64>,
    pub(super) single: Buffers<f32>,
    pub(super) system: NewtonSystem,
}

/// The operands and the results of a product.
#[derive(Default)]
pub(super) struct Buffers<T> {
    picked: Vec<usize>,
    left: Vec<T>,
    right: Vec<T>,
}

/// Solves a block of rows in the same coordinates, each from a start if it has one.
pub(crate) fn solve(
    coordinates: &Coordinates,
    penalty: &dyn Penalty,
    settings: &SolverSettings,
    rows: &[(&Row, Option<Vec<f64>>)],
    cancel: &Cancel,
) -> crate::Result<Vec<RowOutcome>> {
    let d = coordinates.gram().rows();
    let mut workspace = Workspace {
        v: vec![0.0; d],
        shifted: vec![0.0; d],
        trial: vec![0.0; d],
        double: Buffers::default(),
        single: Buffers::default(),
        // All rows share the inverse of the active set.
        system: NewtonSystem::new(f64::INFINITY),
    };
    let mut states: Vec<Splitting> = rows.iter().map(|(row, start)| Splitting::new(row, start.as_deref(), d)).collect();
    start(coordinates, penalty, &mut states, &mut workspace);
    let steps = settings.splitting_steps;
    let warm = rows.iter().all(|(_, start)| start.is_some());
    let mut next_try = if warm { LOOK_EVERY } else { FIRST_TRY };
    for step in 1..=steps {
        cancel.check()?;
        advance(coordinates, penalty, &mut states, &mut workspace, |s| !s.solved);
        if step % LOOK_EVERY == 0 || step == steps {
            for s in states.iter_mut().filter(|s| !s.solved) {
                s.look();
            }
        }
        if step < next_try && step < steps {
            continue;
        }
        next_try = (step as f64 * NEXT_TRY).ceil() as usize + LOOK_EVERY - 1;
        next_try -= next_try % LOOK_EVERY;
        let ready = |s: &Splitting| !s.solved && (step == steps || has_settled(s));
        let mut tried: Vec<ActiveSet> = states
            .iter_mut()
            .filter(|s| ready(s))
            .map(|s| ActiveSet::new(s.row, penalty, &s.v, s.theta, std::mem::take(&mut s.best)))
            .collect();
        correct(coordinates, penalty, settings, &mut tried, &mut workspace);
        let mut tried = tried.into_iter();
        for s in states.iter_mut().filter(|s| ready(s)) {
            if let Some(result) = tried.next() {
                s.solved = result.best.is_within(settings.tolerance);
                s.active_set_steps += result.steps;
                s.best = result.best;
            }
        }
        if states.iter().all(|s| s.solved) {
            break;
        }
    }
    let mut left: Vec<Newton> = Vec::new();
    let systems = SYSTEMS_AT_A_LEVEL * states.iter().filter(|s| !s.solved).count() as f64;
    for s in states.iter_mut().filter(|s| !s.solved) {
        let best = std::mem::take(&mut s.best);
        left.push(Newton::new(s.row, s.level, std::mem::take(&mut s.v), std::mem::take(&mut s.y), best, systems));
    }
    newton(coordinates, penalty, settings, &mut left, &mut workspace, cancel)?;
    let mut left = left.into_iter();
    let outcome = |s: Splitting| {
        let rest = if s.solved { None } else { left.next() };
        let (status, best, newton_steps) = match rest {
            Some(n) => (n.done.unwrap_or(Status::Limit), n.best, n.steps),
            None => (Status::Solved, s.best, 0),
        };
        let (gap, weights) = best.0.unwrap_or((Gap { primal: 0.5, gap: 0.5 }, vec![0.0; d]));
        let newton_steps = newton_steps + s.active_set_steps;
        RowOutcome { weights, gap, status, splitting_steps: s.steps, newton_steps }
    };
    Ok(states.into_iter().map(outcome).collect())
}

/// Whether the active set is worth trying.
fn has_settled(s: &Splitting) -> bool {
    let d = s.v.len();
    let used = s.v.iter().filter(|v| **v != 0.0).count();
    // The size of the cheaper form of the system, compared with some products with Ĝ.
    let costly = used.min(d - used).pow(3) / 3 > 20 * d * d;
    let share = if costly { SETTLED_SIGNS_OF_COSTLY } else { SETTLED_SIGNS };
    s.changed_signs <= (share * d as f64).ceil() as usize
}

/// out_i = matrix · in_i for the rows picked, all at once, in the precision of the matrix.
pub(super) fn multiply<S, T: Scalar>(
    matrix: &Matrix<T>,
    states: &mut [S],
    buffers: &mut Buffers<T>,
    pick: impl Fn(&S) -> bool,
    input: impl for<'r> Fn(&'r S) -> &'r [f64],
    mut output: impl FnMut(&mut S, &[T]),
) {
    let d = matrix.rows();
    buffers.left.clear();
    buffers.picked.clear();
    for (k, s) in states.iter().enumerate() {
        if pick(s) {
            buffers.picked.push(k);
            buffers.left.extend(input(s).iter().map(|v| T::from_f64(*v)));
        }
    }
    let rows = buffers.picked.len();
    buffers.right.resize(rows * d, T::default());
    gemm(&mut buffers.right, d, false, T::from_f64(1.0), View::new(&buffers.left, rows, d, d), matrix.view());
    for (&k, out) in buffers.picked.iter().zip(buffers.right.chunks_exact(d.max(1))) {
        output(&mut states[k], out);
    }
}

/// out = Σ_k factor_k · vector_k.
pub(super) fn combine<const K: usize>(out: &mut [f64], terms: &[(f64, &[f64]); K]) {
    let d = out.len();
    let terms = terms.map(|(factor, vector)| (factor, &vector[..d]));
    vectorised(
        #[inline(always)]
        || {
            for j in 0..d {
                let mut sum = 0.0;
                for (factor, vector) in &terms {
                    sum += factor * vector[j];
                }
                out[j] = sum;
            }
        },
    );
}
