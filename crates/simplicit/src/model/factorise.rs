//! Uses low rank: a block of rows W = T·P with few rows P becomes extra identity states v = P[x; u], read through T,
//! where that has fewer non-zeros.

use super::{ImplicitModel, ModelParts, Scaling};
use crate::layout::{Activation, Layer, Layout};
use crate::linalg::{Csr, Matrix};
use crate::states::StateShape;
use crate::{Error, Result};

/// A block whose elimination needs more multiplications than this is left as it is.
const LARGEST: f64 = 2e10;

/// A model with factorised blocks.
#[derive(Debug, Clone, PartialEq)]
pub struct Factorised {
    /// A model that computes the same function of u, up to rounding.
    pub model: ImplicitModel,
    /// Name of the block and its rank, for every block that was factorised.
    pub blocks: Vec<(String, usize)>,
}

/// Factors W = T·P, where P consists of some of W's own rows.
struct Factors {
    /// T, rows × rank; the rows that P consists of are unit vectors.
    t: Matrix,
    /// The numbers of the rows of W in P.
    pivots: Vec<usize>,
}

/// Rows of M and, if they were factorised, the place of their first extra state and the factors.
type Placed = (std::ops::Range<usize>, Option<(usize, Factors)>);

impl ImplicitModel {
    /// Factorises the rows of every layer, and of the outputs, where their rank makes the model smaller. Only for
    /// acyclic models: in a cycle T may be larger than κ allows.
    pub fn factorise(&self) -> Result<Factorised> {
        if !self.well_posedness().acyclic {
            return Err(Error::unsupported(
                "factorising a model with cycles",
                "the factors need not satisfy kappa; reduce it without",
            ));
        }
        self.require_no_taps("factorisation")?;
        let StateShape { inputs, states: n, outputs } = self.shape();
        let layers = self.layout().layers();
        // Output rows first: the layout has the last layer on top.
        let blocks =
            [(None, n..n + outputs)].into_iter().chain((0..layers.len()).map(|k| (Some(k), self.layout().range(k))));
        let mut new_layers: Vec<Layer> = Vec::new();
        let mut old_place = vec![0; n];
        let mut named = Vec::new();
        // The rows of the new M are written in the new coordinates when all places are known.
        let mut factors: Vec<Placed> = Vec::new();
        let mut next = 0;
        for (layer, rows) in blocks {
            if let Some(k) = layer {
                rows.clone().enumerate().for_each(|(at, i)| old_place[i] = next + at);
                next += rows.len();
                new_layers.push(layers[k].clone());
            }
            let found = self.factors(rows.clone());
            let placed = found.map(|f| {
                let rank = f.pivots.len();
                let name = layer.map_or("outputs", |k| &layers[k].name).to_string();
                new_layers.push(Layer::dense(format!("{name}.factor"), rank, Activation::Identity));
                named.push((name, rank));
                let first = next;
                next += rank;
                (first, f)
            });
            factors.push((rows, placed));
        }
        let mut top: Vec<Vec<(usize, f32)>> = vec![Vec::new(); next];
        let mut bottom: Vec<Vec<(usize, f32)>> = vec![Vec::new(); outputs];
        let mut state_bias = vec![0.0; next];
        let mut states = vec![1.0; next];
        for (rows, placed) in &factors {
            for (at, i) in rows.clone().enumerate() {
                let entries = match placed {
                    None => self.moved(i, &old_place, next),
                    Some((first, f)) => {
                        let weights = f.t.row(at).iter().enumerate().filter(|(_, v)| **v != 0.0);
                        weights.map(|(k, v)| (first + k, *v as f32)).collect()
                    }
                };
                if i < n {
                    top[old_place[i]] = entries;
                    state_bias[old_place[i]] = self.state_bias()[i];
                    if let Some(scaling) = &self.metadata().scaling {
                        states[old_place[i]] = scaling.states[i];
                    }
                } else {
                    bottom[i - n] = entries;
                }
            }
            if let Some((first, f)) = placed {
                for (k, &pivot) in f.pivots.iter().enumerate() {
                    top[first + k] = self.moved(rows.start + pivot, &old_place, next);
                }
            }
        }
        let cut = |rows: &[Vec<(usize, f32)>], from: usize, cols: usize| {
            let inside = |row: &Vec<(usize, f32)>| -> Vec<(usize, f32)> {
                row.iter().filter(|(j, _)| (from..from + cols).contains(j)).map(|(j, v)| (j - from, *v)).collect()
            };
            Csr::from_rows(cols, rows.iter().map(inside))
        };
        let mut parts = self.clone().into_parts();
        parts.metadata.scaling = parts.metadata.scaling.map(|s| Scaling { states, ..s });
        let model = Self::new(ModelParts {
            a: cut(&top, 0, next),
            b: cut(&top, next, inputs),
            c: cut(&bottom, 0, next),
            d: cut(&bottom, next, inputs),
            state_bias,
            layout: Layout::new(new_layers),
            ..parts
        })?;
        Ok(Factorised { model, blocks: named })
    }

    /// Row i of M without its bias; states at their new places, inputs after `states` of them.
    fn moved(&self, i: usize, place: &[usize], states: usize) -> Vec<(usize, f32)> {
        let n = self.shape().states;
        let (from_states, from_inputs, i) = if i < n { (self.a(), self.b(), i) } else { (self.c(), self.d(), i - n) };
        let moved = from_states.row(i).map(|(j, v)| (place[j], v));
        moved.chain(from_inputs.row(i).map(|(j, v)| (states + j, v))).collect()
    }

    /// The factors of some rows of M, if they have fewer non-zeros than the rows.
    fn factors(&self, rows: std::ops::Range<usize>) -> Option<Factors> {
        let n = self.shape().states;
        let identity: Vec<usize> = (0..n).collect();
        let entries: Vec<Vec<(usize, f32)>> = rows.map(|i| self.moved(i, &identity, n)).collect();
        let before: usize = entries.iter().map(Vec::len).sum();
        let mut columns: Vec<usize> = entries.iter().flatten().map(|(j, _)| *j).collect();
        columns.sort_unstable();
        columns.dedup();
        let (r, c) = (entries.len(), columns.len());
        if r < 2 || (r * c) as f64 * r.min(c) as f64 > LARGEST {
            return None;
        }
        let mut w = Matrix::zeros(r, c);
        for (i, row) in entries.iter().enumerate() {
            for (j, v) in row {
                if let Ok(at) = columns.binary_search(j) {
                    w[(i, at)] = f64::from(*v);
                }
            }
        }
        let factors = eliminate(w)?;
        let after = factors.t.as_slice().iter().filter(|v| **v != 0.0).count()
            + factors.pivots.iter().map(|&i| entries[i].len()).sum::<usize>();
        (after < before).then_some(factors)
    }
}

/// Gaussian elimination with complete pivoting, until the remainder is rounding of f32; `None` at full rank.
fn eliminate(mut w: Matrix) -> Option<Factors> {
    let (r, c) = (w.rows(), w.cols());
    let largest = w.as_slice().iter().fold(0.0f64, |m, v| m.max(v.abs()));
    let rounding = r.max(c) as f64 * f64::from(f32::EPSILON) * largest;
    // l has the multipliers, one column per pivot; W = L·U, where U consists of the rows at their pivots.
    let mut l: Vec<Vec<f64>> = Vec::new();
    let mut pivots: Vec<usize> = Vec::new();
    while pivots.len() < r.min(c) {
        let free = (0..r).filter(|i| !pivots.contains(i));
        let best = free.flat_map(|i| (0..c).map(move |j| (i, j))).max_by(|a, b| w[*a].abs().total_cmp(&w[*b].abs()));
        let Some((p, q)) = best.filter(|at| w[*at].abs() > rounding) else { break };
        let row = w.row(p).to_vec();
        let mut multipliers = vec![0.0; r];
        multipliers[p] = 1.0;
        for i in (0..r).filter(|&i| i != p && !pivots.contains(&i)) {
            let factor = w[(i, q)] / row[q];
            if factor != 0.0 {
                multipliers[i] = factor;
                w.row_mut(i).iter_mut().zip(&row).for_each(|(v, u)| *v -= factor * u);
            }
        }
        l.push(multipliers);
        pivots.push(p);
    }
    let k = pivots.len();
    if k == 0 || k == r {
        return None;
    }
    // Row i of W is Σ_k l_k[i] U_k, and the pivot rows P = L_P U with L_P unit lower triangular: t_i = l_i L_P⁻¹.
    let mut t = Matrix::zeros(r, k);
    for i in 0..r {
        if let Some(at) = pivots.iter().position(|p| *p == i) {
            t[(i, at)] = 1.0;
            continue;
        }
        for a in (0..k).rev() {
            let mut value = l[a][i];
            for b in a + 1..k {
                value -= t[(i, b)] * l[a][pivots[b]];
            }
            t[(i, a)] = value;
        }
        // A number of the size of the products' rounding errors is not stored as a weight.
        let size = t.row(i).iter().fold(0.0f64, |m, v| m.max(v.abs()));
        t.row_mut(i).iter_mut().filter(|v| v.abs() < f64::from(f32::EPSILON) * size).for_each(|v| *v = 0.0);
    }
    Some(Factors { t, pivots })
}
