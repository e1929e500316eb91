//! Removes states without changing the outputs: those that nothing reads, that never change and that are always
//! linear.

use std::collections::BTreeMap;

use super::{ImplicitModel, ModelParts, Scaling, reduce_rows};
use crate::layout::{Activation, Layer, Layout};
use crate::linalg::{Csr, toward_zero};
use crate::states::StateShape;
use crate::{Error, Result};

/// What is known about the inputs, and therefore about the states.
#[derive(Debug, Clone, PartialEq)]
pub enum Ranges {
    /// Nothing: the reduced model has the same outputs for every input.
    Unknown,
    /// u_j ∈ [low_j, high_j], one per input: the same outputs for every such input, by interval arithmetic.
    Inputs(Vec<(f64, f64)>),
    /// z_i ∈ [low_i, high_i] as observed on some data, one per state: the same outputs on that data; nothing is
    /// proved for other inputs.
    Observed(Vec<(f64, f64)>),
}

/// A model with fewer states, and how the others were removed (numbers are states of the original).
#[derive(Debug, Clone, PartialEq)]
pub struct Reduced {
    /// A model that computes the same function of u, up to rounding.
    pub model: ImplicitModel,
    /// States that no output depends on.
    pub unread: Vec<usize>,
    /// States with the same value for every input, most often zero; a value that is not zero was added to biases.
    pub constant: Vec<usize>,
    /// States that are linear in what they read, folded into their readers because that costs no more non-zeros.
    pub linear: Vec<usize>,
    /// Inputs whose columns of B and D are empty. They stay, so that the model takes the same samples; see
    /// [`ImplicitModel::without_unread_inputs`].
    pub unread_inputs: Vec<usize>,
}

impl ImplicitModel {
    /// Removes states without changing outputs. The number of non-zeros never grows; ‖A‖∞ ≤ κ and the bound on λ_pf
    /// stay valid. From maps, whole channels are removed at all positions: those of a residual sum together or not at
    /// all, and never all channels of a layer.
    pub fn reduce(&self, ranges: &Ranges) -> Result<Reduced> {
        if !self.taps().is_empty() || self.layout().has_operators() {
            return reduce_rows::reduce(self, ranges);
        }
        let shape = self.shape();
        let z = match ranges {
            Ranges::Unknown => self.state_bounds(&vec![(f64::NEG_INFINITY, f64::INFINITY); shape.inputs])?,
            Ranges::Inputs(inputs) => self.state_bounds(inputs)?,
            Ranges::Observed(z) if z.len() == shape.states => z.clone(),
            Ranges::Observed(z) => return Err(Error::shape("observed ranges", shape.states, z.len())),
        };
        let mut work = Work::new(self, z);
        loop {
            let before = work.alive.iter().filter(|a| **a).count();
            work.drop_unread();
            work.fold_constants();
            work.fold_linear();
            if work.alive.iter().filter(|a| **a).count() == before {
                return work.finish(self);
            }
        }
    }

    /// The model over the inputs that some row reads, and the numbers of these inputs: samples must be cut to the
    /// same columns.
    pub fn without_unread_inputs(&self) -> Result<(Self, Vec<usize>)> {
        self.require_no_taps("removing inputs")?;
        let preprocessing = self.preprocessing();
        if preprocessing.mean.len() > 1 || preprocessing.std.len() > 1 {
            return Err(Error::unsupported(
                "removing inputs of a model with a mean or std per channel",
                "the channels would no longer be equal; preprocess the samples yourself and store none",
            ));
        }
        let read = read_inputs(self.b(), self.d());
        let kept: Vec<usize> = (0..read.len()).filter(|&j| read[j]).collect();
        let mut place = vec![0; read.len()];
        kept.iter().enumerate().for_each(|(k, &j)| place[j] = k);
        let cut = |m: &Csr<f32>| {
            Csr::from_rows(kept.len(), (0..m.rows()).map(|i| m.row(i).map(|(j, v)| (place[j], v)).collect::<Vec<_>>()))
        };
        let (b, d) = (cut(self.b()), cut(self.d()));
        Ok((Self::new(ModelParts { b, d, ..self.clone().into_parts() })?, kept))
    }
}

/// The only value of a state whose z lies in an interval, if there is just one.
pub(super) fn one_value(activation: Activation, (low, high): (f64, f64)) -> Option<f64> {
    let never_fires = match activation {
        Activation::Relu => high <= 0.0,
        Activation::LeakyRelu { slope } => slope == 0.0 && high <= 0.0,
        _ => false,
    };
    if never_fires {
        return Some(0.0);
    }
    (low == high && low.is_finite()).then(|| activation.apply_f64(low))
}

fn read_inputs(b: &Csr<f32>, d: &Csr<f32>) -> Vec<bool> {
    let mut read = vec![false; b.cols()];
    b.indices().iter().chain(d.indices()).for_each(|&j| read[j as usize] = true);
    read
}

/// M in f64 with its bounds; columns 0..n are states, n..n+p inputs, n+p the constant.
struct Work {
    shape: StateShape,
    activations: Vec<Activation>,
    rows: Vec<BTreeMap<usize, f64>>,
    z: Vec<(f64, f64)>,
    alive: Vec<bool>,
    unread: Vec<usize>,
    constant: Vec<usize>,
    linear: Vec<usize>,
}

impl Work {
    fn new(model: &ImplicitModel, z: Vec<(f64, f64)>) -> Self {
        let shape = model.shape();
        let StateShape { inputs, states: n, outputs } = shape;
        let row = |from_states: &Csr<f32>, from_inputs: &Csr<f32>, bias: f32, i: usize| {
            let states = from_states.row(i);
            let inputs_and_one = from_inputs.row(i).map(|(j, v)| (n + j, v)).chain([(n + inputs, bias)]);
            states.chain(inputs_and_one).filter(|(_, v)| *v != 0.0).map(|(j, v)| (j, f64::from(v))).collect()
        };
        let top = (0..n).map(|i| row(model.a(), model.b(), model.state_bias()[i], i));
        let bottom = (0..outputs).map(|i| row(model.c(), model.d(), model.output_bias()[i], i));
        Self {
            shape,
            activations: model.layout().activations(),
            rows: top.chain(bottom).collect(),
            z,
            alive: vec![true; n],
            unread: Vec::new(),
            constant: Vec::new(),
            linear: Vec::new(),
        }
    }

    /// The rows that are computed: those of the states that are left, and the outputs.
    fn computed(&self) -> Vec<usize> {
        let n = self.shape.states;
        (0..self.rows.len()).filter(|&i| i >= n || self.alive[i]).collect()
    }

    fn drop_unread(&mut self) {
        let n = self.shape.states;
        let mut read = vec![false; n];
        let mut todo: Vec<usize> = (n..self.rows.len()).collect();
        while let Some(i) = todo.pop() {
            for &j in self.rows[i].range(..n).map(|(j, _)| j) {
                if !std::mem::replace(&mut read[j], true) {
                    todo.push(j);
                }
            }
        }
        for i in (0..n).filter(|&i| !read[i]) {
            if std::mem::replace(&mut self.alive[i], false) {
                self.unread.push(i);
            }
        }
    }

    /// The only value of a state, if there is just one.
    fn value(&self, i: usize) -> Option<f64> {
        let (low, high) = self.z[i];
        let (activation, one) = (self.activations[i], self.shape.states + self.shape.inputs);
        if self.rows[i].keys().all(|&j| j == one) {
            return Some(activation.apply_f64(self.rows[i].get(&one).copied().unwrap_or(0.0)));
        }
        one_value(activation, (low, high))
    }

    fn fold_constants(&mut self) {
        let one = self.shape.states + self.shape.inputs;
        for i in 0..self.shape.states {
            let Some(value) = self.value(i).filter(|_| self.alive[i]) else { continue };
            self.alive[i] = false;
            self.constant.push(i);
            for r in self.computed() {
                if let Some(weight) = self.rows[r].remove(&i)
                    && value != 0.0
                {
                    add(&mut self.rows[r], one, weight * value);
                }
            }
        }
    }

    /// x = slope · z, if that always holds.
    fn slope(&self, i: usize) -> Option<f64> {
        let (low, high) = self.z[i];
        match self.activations[i] {
            Activation::Identity => Some(1.0),
            Activation::Relu if low >= 0.0 => Some(1.0),
            Activation::LeakyRelu { .. } if low >= 0.0 => Some(1.0),
            Activation::LeakyRelu { slope } if slope == 1.0 || high <= 0.0 => Some(f64::from(slope)),
            _ => None,
        }
    }

    fn fold_linear(&mut self) {
        for i in 0..self.shape.states {
            let Some(slope) = self.slope(i).filter(|_| self.alive[i] && !self.rows[i].contains_key(&i)) else {
                continue;
            };
            let readers: Vec<usize> = self.computed().into_iter().filter(|&r| self.rows[r].contains_key(&i)).collect();
            let own = &self.rows[i];
            // A reader loses this entry and gains the columns that it does not have yet; the row itself is removed.
            let gained: usize =
                readers.iter().map(|&r| own.keys().filter(|&j| !self.rows[r].contains_key(j)).count()).sum();
            if gained > own.len() + readers.len() {
                continue;
            }
            let own = std::mem::take(&mut self.rows[i]);
            for r in readers {
                if let Some(weight) = self.rows[r].remove(&i) {
                    own.iter().for_each(|(&j, v)| add(&mut self.rows[r], j, weight * slope * v));
                }
            }
            self.alive[i] = false;
            self.linear.push(i);
        }
    }

    fn finish(mut self, model: &ImplicitModel) -> Result<Reduced> {
        let StateShape { inputs, states: n, .. } = self.shape;
        let kept: Vec<usize> = (0..n).filter(|&i| self.alive[i]).collect();
        let mut place = vec![0; n];
        kept.iter().enumerate().for_each(|(k, &i)| place[i] = k);
        let held = model.metadata().kappa.is_some();
        let part = |rows: &[usize], from: usize, to: usize, cols: usize, a: bool| {
            Csr::from_rows(
                cols,
                rows.iter().map(|&i| {
                    let entries = self.rows[i].range(from..to);
                    // Entries are rounded toward zero if ‖A‖∞ is held to a bound.
                    let stored = |v: f64| if a && held { toward_zero(v) } else { v as f32 };
                    entries.map(|(&j, v)| (if from == 0 { place[j] } else { j - from }, stored(*v))).collect::<Vec<_>>()
                }),
            )
        };
        let bottom: Vec<usize> = (n..self.rows.len()).collect();
        let bias = |rows: &[usize]| -> Vec<f32> {
            rows.iter().map(|&i| self.rows[i].get(&(n + inputs)).map_or(0.0, |v| *v as f32)).collect()
        };
        let mut parts = model.clone().into_parts();
        parts.a = part(&kept, 0, n, kept.len(), true);
        parts.b = part(&kept, n, n + inputs, inputs, false);
        parts.c = part(&bottom, 0, n, kept.len(), false);
        parts.d = part(&bottom, n, n + inputs, inputs, false);
        (parts.state_bias, parts.output_bias) = (bias(&kept), bias(&bottom));
        let left = |k: usize| model.layout().range(k).filter(|&i| self.alive[i]).count();
        let layers = model.layout().layers().iter().enumerate();
        let layers = layers.map(|(k, layer)| Layer { size: left(k), ..layer.clone() }).filter(|l| l.size > 0);
        parts.layout = Layout::new(layers.collect());
        if let Some(scaling) = parts.metadata.scaling.take() {
            let states = kept.iter().map(|&i| scaling.states[i]).collect();
            parts.metadata.scaling = Some(Scaling { states, ..scaling });
        }
        let read = read_inputs(&parts.b, &parts.d);
        for list in [&mut self.unread, &mut self.constant, &mut self.linear] {
            list.sort_unstable();
        }
        Ok(Reduced {
            unread_inputs: (0..inputs).filter(|&j| !read[j]).collect(),
            model: ImplicitModel::new(parts)?,
            unread: self.unread,
            constant: self.constant,
            linear: self.linear,
        })
    }
}

fn add(row: &mut BTreeMap<usize, f64>, column: usize, value: f64) {
    let entry = row.entry(column).or_insert(0.0);
    *entry += value;
    if *entry == 0.0 {
        row.remove(&column);
    }
}
