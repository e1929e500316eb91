//! Single moves and least squares on the supports, many rows side by side.
//!
//! Each row of a chunk keeps (Ĝ_SS + ridge)⁻¹ on the device. A move is a rank-one change of it; changes are collected
//! in a few columns and added in one product; between moves only the weights and the diagonal are updated. One
//! product with Ĝ gives the residuals of all rows. A row whose inverse has lost its digits, or that runs out of room,
//! comes again with a fresh one.

use super::dense::{Panel, Sizes};
use super::inverse::{PANEL, padded};
use super::memory::Buffer;
use super::rows::OnDevice;
use super::{Argument, Session, THREADS, arguments};
use crate::Result;
use crate::backend::moves::{DRIFT, RENEWALS};
use crate::parallel::Cancel;

/// Number of entries outside the support that are examined more closely; `kernels.cu` has the same number.
const CANDIDATES: usize = 8;
/// The most moves of a row that may wait to be added to its inverse.
const WAITING: usize = 32;
/// Every move lowers the cost, so none is ever undone; only rounding could make them go on for ever.
const ROUNDS: usize = 1000;
/// The reason to make a row's inverse anew: it has lost its digits; `kernels.cu` has the same number.
const STALE: i32 = 2;
/// How often the weights are corrected by their own residual.
const REFINEMENTS: usize = 2;

/// The rows of a chunk and their data on the device.
struct Chunk {
    rows: usize,
    /// The largest support that has room.
    n: usize,
    /// For every row of the chunk its row in the group, and its row in the chunk.
    group_row: Buffer<i32>,
    own_row: Buffer<i32>,
    set: Buffer<i32>,
    used: Buffer<i32>,
    inverse: Buffer<f64>,
    diagonal: Buffer<f64>,
    weights: Buffer<f64>,
    /// Weights and residuals over all features.
    wide: Buffer<f64>,
    residual: Buffer<f64>,
    /// Numbers on the support of every row.
    gathered: Buffer<f64>,
    step: Buffer<f64>,
}

/// Bytes that a row of a chunk takes on the device.
fn bytes(n: usize, d: usize) -> usize {
    8 * (n * n + n * (2 * PANEL + 2 * WAITING + 2 * CANDIDATES + 4) + PANEL * PANEL + 2 * d) + d + 4 * n
}

impl Session {
    /// Weights of every row over all features, and the largest residual of its least squares.
    pub(super) fn settle(
        &self,
        problem: &OnDevice,
        mut sets: Vec<Vec<i32>>,
        cancel: &Cancel,
    ) -> Result<(Buffer<f64>, Vec<f64>)> {
        let out = self.zeros::<f64>(problem.rows * problem.d)?;
        let mut residuals = vec![0.0; problem.rows];
        let mut renewals = vec![0; problem.rows];
        // Rows with supports of like size go together, the largest first; those that need a new inverse are queued
        // again.
        let mut queue: Vec<usize> = (0..problem.rows).collect();
        while !queue.is_empty() {
            queue.sort_by_key(|&row| sets[row].len());
            let Some(&largest) = queue.last() else { break };
            let size = sets[largest].len();
            let n = padded((size + PANEL.max(size / 8)).min(problem.d));
            let (free, _) = self.memory()?;
            let fit = (free / 10 * 9 / bytes(n, problem.d)).clamp(1, 32_768);
            let like =
                queue.iter().rev().take_while(|&&row| 4 * sets[row].len() >= 3 * size || size <= 4 * PANEL).count();
            let chosen = queue.split_off(queue.len() - fit.min(like));
            cancel.check()?;
            let again = self.settle_chunk(problem, &mut sets, &chosen, n, &renewals, &out, &mut residuals, cancel)?;
            for (row, reason) in again {
                renewals[row] += usize::from(reason == STALE);
                queue.push(row);
            }
        }
        Ok((out, residuals))
    }

    #[allow(clippy::too_many_arguments)]
    fn settle_chunk(
        &self,
        problem: &OnDevice,
        sets: &mut [Vec<i32>],
        chosen: &[usize],
        n: usize,
        renewals: &[usize],
        out: &Buffer<f64>,
        residuals: &mut [f64],
        cancel: &Cancel,
    ) -> Result<Vec<(usize, i32)>> {
        let chunk = self.chunk(problem, sets, chosen, n)?;
        // A row for which fresh inverses do not help keeps its support.
        let given_up: Vec<i32> = chosen.iter().map(|&row| STALE * i32::from(renewals[row] >= RENEWALS)).collect();
        let reasons = self.moves(problem, &chunk, &given_up, cancel)?;
        let again: Vec<usize> = (0..chunk.rows).filter(|&b| reasons[b] != 0 && given_up[b] == 0).collect();
        if !again.is_empty() {
            let set = self.to_host(&chunk.set)?;
            for &b in &again {
                let mut own: Vec<i32> = set[b * n..(b + 1) * n].iter().copied().filter(|j| *j >= 0).collect();
                own.sort_unstable();
                sets[chosen[b]] = own;
            }
        }
        for _ in 0..REFINEMENTS {
            self.residual(problem, &chunk, problem.ridge)?;
            self.apply_inverse(&chunk, &chunk.residual, &chunk.own_row, &chunk.step, problem.d)?;
            let count = Argument::Size((chunk.rows * n) as u64);
            self.each(self.cuda.kernels.add_to, chunk.rows * n, 1, arguments!(&chunk.weights, &chunk.step, count))?;
        }
        self.residual(problem, &chunk, problem.ridge)?;
        let kernels = &self.cuda.kernels;
        let gathered = arguments!(&chunk.residual, &chunk.own_row, &chunk.set, &chunk.gathered, problem.d, n);
        self.each(kernels.gather, n, chunk.rows, gathered)?;
        let largest = self.allocate::<f64>(chunk.rows)?;
        self.launch(kernels.largest, (chunk.rows, 1), THREADS, arguments!(&chunk.gathered, &largest, n))?;
        let scattered = arguments!(&chunk.weights, &chunk.group_row, &chunk.set, out, problem.d, n);
        self.each(kernels.scatter, n, chunk.rows, scattered)?;
        // Nothing is kept of the rows that are queued again, because their supports will change.
        for &b in &again {
            self.clear_part(out, chosen[b] * problem.d..(chosen[b] + 1) * problem.d)?;
        }
        for (&row, value) in chosen.iter().zip(self.to_host(&largest)?) {
            residuals[row] = value;
        }
        Ok(again.into_iter().map(|b| (chosen[b], reasons[b])).collect())
    }

    /// The inverses on the supports, and the weights that follow from them.
    fn chunk(&self, problem: &OnDevice, sets: &[Vec<i32>], chosen: &[usize], n: usize) -> Result<Chunk> {
        let (d, rows, kernels) = (problem.d, chosen.len(), &self.cuda.kernels);
        let mut set = vec![-1; rows * n];
        for (own, &row) in set.chunks_mut(n).zip(chosen) {
            own[..sets[row].len()].copy_from_slice(&sets[row]);
        }
        let numbers = |numbers: &mut dyn Iterator<Item = usize>| numbers.map(|n| n as i32).collect::<Vec<i32>>();
        let chunk = Chunk {
            rows,
            n,
            group_row: self.uploaded(&numbers(&mut chosen.iter().copied()))?,
            own_row: self.uploaded(&numbers(&mut (0..rows)))?,
            set: self.uploaded(&set)?,
            used: self.uploaded(&numbers(&mut chosen.iter().map(|&row| sets[row].len())))?,
            inverse: self.allocate(rows * n * n)?,
            diagonal: self.allocate(rows * n)?,
            weights: self.allocate(rows * n)?,
            wide: self.allocate(rows * d)?,
            residual: self.allocate(rows * d)?,
            gathered: self.allocate(rows * n)?,
            step: self.allocate(rows * n)?,
        };
        let fill = arguments!(&chunk.inverse, &problem.gram, &chunk.set, &chunk.used, problem.ridge, d, n);
        self.each(kernels.fill_supports, n * n, rows, fill)?;
        self.invert(&chunk.inverse, n, rows)?;
        let clear = arguments!(&chunk.inverse, &chunk.diagonal, &chunk.used, n);
        self.each(kernels.clear_padding, n, rows, clear)?;
        self.apply_inverse(&chunk, &problem.h, &chunk.group_row, &chunk.weights, d)?;
        Ok(chunk)
    }

    /// out = inverse · (entries of `wide` on the support), row by row.
    fn apply_inverse(
        &self,
        chunk: &Chunk,
        wide: &Buffer<f64>,
        row: &Buffer<i32>,
        out: &Buffer<f64>,
        d: usize,
    ) -> Result<()> {
        let n = chunk.n;
        let gather = arguments!(wide, row, &chunk.set, &chunk.gathered, d, n);
        self.each(self.cuda.kernels.gather, n, chunk.rows, gather)?;
        let inverse = Panel::batch(chunk.inverse.address(), n, n * n);
        let [out, of] = [out, &chunk.gathered].map(|v| Panel::batch(v.address(), n, n));
        self.products(out, 0.0, 1.0, inverse, of, Sizes(n, 1, n), chunk.rows)
    }

    /// ĥ − (Ĝ + ridge)w over all features.
    fn residual(&self, problem: &OnDevice, chunk: &Chunk, ridge: f64) -> Result<()> {
        let (d, n, kernels) = (problem.d, chunk.n, &self.cuda.kernels);
        self.clear(&chunk.wide)?;
        let scatter = arguments!(&chunk.weights, &chunk.own_row, &chunk.set, &chunk.wide, d, n);
        self.each(kernels.scatter, n, chunk.rows, scatter)?;
        let start = arguments!(&problem.h, &chunk.group_row, &chunk.wide, &chunk.residual, ridge, d);
        self.each(kernels.start_residual, d, chunk.rows, start)?;
        let [out, gram, wide] =
            [&chunk.residual, &problem.gram, &chunk.wide].map(|matrix| Panel::new(matrix.address(), d));
        self.product(out, 1.0, -1.0, gram, wide, Sizes(d, chunk.rows, d))
    }

    /// Moves entries until no move pays, except in rows that are to rest. Returns for every row whether it rests at
    /// the end, and why.
    fn moves(&self, problem: &OnDevice, chunk: &Chunk, rest: &[i32], cancel: &Cancel) -> Result<Vec<i32>> {
        let (d, n, rows, kernels) = (problem.d, chunk.n, chunk.rows, &self.cuda.kernels);
        let (u, signed) = (self.zeros::<f64>(rows * n * WAITING)?, self.zeros::<f64>(rows * n * WAITING)?);
        let sign = self.zeros::<f64>(rows * WAITING)?;
        let (waiting, changed, again) = (self.zeros::<i32>(rows)?, self.zeros::<i32>(rows)?, self.uploaded(rest)?);
        let (inside, candidates) = (self.allocate::<u8>(rows * d)?, self.allocate::<i32>(rows * CANDIDATES)?);
        let (g, y) = (self.allocate::<f64>(rows * n * CANDIDATES)?, self.allocate::<f64>(rows * n * CANDIDATES)?);
        let inverse = Panel::batch(chunk.inverse.address(), n, n * n);
        for _ in 0..ROUNDS {
            cancel.check()?;
            self.launch(
                kernels.leave,
                (rows, 1),
                THREADS,
                arguments!(
                    &chunk.inverse,
                    &chunk.set,
                    &chunk.used,
                    &chunk.weights,
                    &chunk.diagonal,
                    &u,
                    &sign,
                    &waiting,
                    &problem.prices,
                    &chunk.group_row,
                    &changed,
                    &again,
                    d,
                    n,
                    WAITING,
                ),
            )?;
            self.each(kernels.sign_columns, n * WAITING, rows, arguments!(&u, &signed, &sign, &waiting, n, WAITING))?;
            let [columns, others] = [&signed, &u].map(|v| Panel::batch(v.address(), n, n * WAITING));
            self.products(inverse, 1.0, 1.0, columns, others.t(), Sizes(n, n, WAITING), rows)?;
            self.clear(&waiting)?;
            self.residual(problem, chunk, 0.0)?;
            let check = arguments!(
                &problem.h,
                &chunk.residual,
                &chunk.group_row,
                &chunk.set,
                &chunk.used,
                &chunk.weights,
                &chunk.diagonal,
                &again,
                problem.ridge,
                DRIFT,
                d,
                n
            );
            self.launch(kernels.check, (rows, 1), THREADS, check)?;
            let choose = arguments!(
                &chunk.residual,
                &problem.prices,
                &chunk.group_row,
                &chunk.set,
                &chunk.used,
                &inside,
                &candidates,
                d,
                n
            );
            self.launch(kernels.choose, (rows, 1), THREADS, choose)?;
            let gather = arguments!(&problem.gram, &chunk.set, &candidates, &g, d, n);
            self.each(kernels.gather_candidates, n * CANDIDATES, rows, gather)?;
            let [solved, columns] = [&y, &g].map(|v| Panel::batch(v.address(), n, n * CANDIDATES));
            self.products(solved, 0.0, 1.0, inverse, columns, Sizes(n, CANDIDATES, n), rows)?;
            self.launch(
                kernels.enter,
                (rows, 1),
                THREADS,
                arguments!(
                    &problem.gram,
                    &chunk.residual,
                    &problem.prices,
                    &chunk.group_row,
                    &candidates,
                    &g,
                    &y,
                    &chunk.set,
                    &chunk.used,
                    &chunk.weights,
                    &chunk.diagonal,
                    &u,
                    &sign,
                    &waiting,
                    &changed,
                    &again,
                    problem.ridge,
                    d,
                    n,
                    WAITING,
                ),
            )?;
            if self.to_host(&changed)?.iter().all(|moves| *moves == 0) {
                break;
            }
        }
        self.to_host(&again)
    }
}
