//! The implicit model x = φ(Ax + Bu + b), ŷ = Cx + Du + d: its parts, whether it is well-posed, and its file.

mod bounds;
mod components;
mod factorise;
mod file;
mod groups;
mod layered;
mod layers;
mod metadata;
mod reduce;
mod reduce_rows;
mod rescale;
mod sparsity;
mod taps;
mod unroll;
mod well_posedness;

pub use components::{Components, components};
pub use factorise::Factorised;
pub use layered::{Block, DenseLayer, Target};
pub use metadata::{ModelMetadata, OUTPUT, Scaling};
pub use reduce::{Ranges, Reduced};
pub use rescale::Rescaled;
pub use sparsity::{LayerCount, LetterCounts, Sparsity};
pub use taps::{Letter, TapBlock, TapWeights};
pub use well_posedness::{Contraction, WellPosedness};

pub(crate) use well_posedness::component_contraction;

use crate::arrays::Preprocessing;
use crate::layout::{Layout, Source};
use crate::linalg::Csr;
use crate::states::StateShape;
use crate::{Error, Result};

/// The pieces of an [`ImplicitModel`], not yet checked against each other.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelParts {
    /// A, n × n: states from states.
    pub a: Csr<f32>,
    /// B, n × p: states from inputs.
    pub b: Csr<f32>,
    /// C, q × n: outputs from states.
    pub c: Csr<f32>,
    /// D, q × p: outputs from inputs.
    pub d: Csr<f32>,
    /// The vector b, one per row of the layout: a channel of a map, a unit of a dense layer.
    pub state_bias: Vec<f32>,
    /// The vector d, q.
    pub output_bias: Vec<f32>,
    /// Shared weights, poolings and residual sums; they add to A, B, C and D.
    pub taps: Vec<TapBlock>,
    /// φ and the name of every layer, last layer first.
    pub layout: Layout,
    /// How raw inputs become u.
    pub preprocessing: Preprocessing,
    /// Where the model comes from.
    pub metadata: ModelMetadata,
}

impl Default for ModelParts {
    fn default() -> Self {
        Self {
            a: Csr::empty(0, 0),
            b: Csr::empty(0, 0),
            c: Csr::empty(0, 0),
            d: Csr::empty(0, 0),
            state_bias: Vec::new(),
            output_bias: Vec::new(),
            taps: Vec::new(),
            layout: Layout::default(),
            preprocessing: Preprocessing::default(),
            metadata: ModelMetadata::default(),
        }
    }
}

/// The implicit model x = φ(Ax + Bu + b), ŷ = Cx + Du + d, with every shape checked.
///
/// ```
/// use simplicit::layout::Activation;
/// use simplicit::linalg::Matrix;
/// use simplicit::model::{DenseLayer, ImplicitModel};
///
/// let hidden = DenseLayer::new("hidden", Matrix::from_fn(3, 2, |i, j| (i + j) as f32), Activation::Relu);
/// let output = DenseLayer::new("output", Matrix::from_fn(1, 3, |_, j| j as f32 - 1.0), Activation::Identity);
/// let model = ImplicitModel::from_layers(&[hidden], &output)?;
/// assert_eq!((model.shape().inputs, model.shape().states, model.shape().outputs), (2, 3, 1));
/// assert!(model.well_posedness().acyclic);
/// # Ok::<(), simplicit::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct ImplicitModel {
    parts: ModelParts,
    shape: StateShape,
}

impl ImplicitModel {
    /// Checks that the parts fit together and that every number is finite.
    pub fn new(parts: ModelParts) -> Result<Self> {
        let shape = StateShape { inputs: parts.b.cols(), states: parts.layout.size(), outputs: parts.c.rows() };
        let (n, p, q) = (shape.states, shape.inputs, shape.outputs);
        for (name, matrix, rows, cols) in
            [("A", &parts.a, n, n), ("B", &parts.b, n, p), ("C", &parts.c, q, n), ("D", &parts.d, q, p)]
        {
            if (matrix.rows(), matrix.cols()) != (rows, cols) {
                return Err(Error::shape(
                    name,
                    format!("{rows} × {cols}"),
                    format!("{} × {}", matrix.rows(), matrix.cols()),
                ));
            }
            require_finite_csr(name, matrix)?;
        }
        for (name, vector, length) in [("b", &parts.state_bias, parts.layout.rows()), ("d", &parts.output_bias, q)] {
            if vector.len() != length {
                return Err(Error::shape(name, format!("{length} values"), format!("{} values", vector.len())));
            }
            if let Some(k) = vector.iter().position(|v| !v.is_finite()) {
                return Err(Error::NotFinite { array: name.into(), row: k, column: 0, value: f64::from(vector[k]) });
            }
        }
        for (k, block) in parts.taps.iter().enumerate() {
            block.check(k, &parts.layout, p, q)?;
        }
        for layer in parts.layout.layers() {
            if let Some(operator) = &layer.operator {
                let size_of = |source: Source| match source {
                    Source::Input => Some(p),
                    Source::Layer(k) => parts.layout.layers().get(k).map(|l| l.size),
                };
                operator.check(layer.size, size_of).map_err(|e| e.within(&format!("layer {:?}", layer.name)))?;
            }
        }
        require_no_sums(&parts)?;
        layers::require_acyclic_taps(&parts)?;
        parts.preprocessing.check_inputs(p)?;
        parts.metadata.check(n)?;
        let model = Self { parts, shape };
        model.require_non_expansive_cycles()?;
        Ok(model)
    }

    /// The parts, to change them and build another model.
    pub fn into_parts(self) -> ModelParts {
        self.parts
    }

    /// The sizes p, n and q.
    pub fn shape(&self) -> StateShape {
        self.shape
    }

    /// A, n × n.
    pub fn a(&self) -> &Csr<f32> {
        &self.parts.a
    }

    /// B, n × p.
    pub fn b(&self) -> &Csr<f32> {
        &self.parts.b
    }

    /// C, q × n.
    pub fn c(&self) -> &Csr<f32> {
        &self.parts.c
    }

    /// D, q × p.
    pub fn d(&self) -> &Csr<f32> {
        &self.parts.d
    }

    /// Shared weights, poolings and residual sums, which add to A, B, C and D; empty for a dense model.
    pub fn taps(&self) -> &[TapBlock] {
        &self.parts.taps
    }

    /// The vector b, one per row of the layout.
    pub fn state_bias(&self) -> &[f32] {
        &self.parts.state_bias
    }

    /// The vector d, q.
    pub fn output_bias(&self) -> &[f32] {
        &self.parts.output_bias
    }

    /// φ and the name of every layer, last layer first.
    pub fn layout(&self) -> &Layout {
        &self.parts.layout
    }

    /// How raw inputs become u.
    pub fn preprocessing(&self) -> &Preprocessing {
        &self.parts.preprocessing
    }

    /// Where the model comes from.
    pub fn metadata(&self) -> &ModelMetadata {
        &self.parts.metadata
    }

    /// For every row of the layout and then every output, whether its layer was left out of training.
    pub(crate) fn kept_rows(&self) -> Vec<bool> {
        let is_kept = |name: &str| self.metadata().kept.iter().any(|kept| kept == name);
        let layers = self.layout().layers().iter().map(|l| (is_kept(&l.name), l.rows()));
        let all = layers.chain([(is_kept(OUTPUT), self.shape().outputs)]);
        all.flat_map(|(kept, rows)| std::iter::repeat_n(kept, rows)).collect()
    }

    /// Non-zeros, sparsity, multiply-adds and bytes: the one count that every command prints.
    pub fn sparsity(&self) -> Sparsity {
        Sparsity::of(self)
    }
}

/// An error if something is added to a layer that an operator computes.
fn require_no_sums(parts: &ModelParts) -> Result<()> {
    for (k, layer) in parts.layout.layers().iter().enumerate().filter(|(_, l)| l.operator.is_some()) {
        let units = parts.layout.range(k);
        let entries = |m: &Csr<f32>| m.indptr()[units.end] - m.indptr()[units.start];
        if entries(&parts.a) + entries(&parts.b) > 0 || parts.taps.iter().any(|b| b.target == Target::Layer(k)) {
            return Err(Error::shape(format!("layer {:?}", layer.name), "no weights: an operator computes it", "some"));
        }
    }
    Ok(())
}

fn require_finite_csr(name: &str, matrix: &Csr<f32>) -> Result<()> {
    if matrix.data().iter().all(|v| v.is_finite()) {
        return Ok(());
    }
    for i in 0..matrix.rows() {
        if let Some((column, value)) = matrix.row(i).find(|(_, v)| !v.is_finite()) {
            return Err(Error::NotFinite { array: name.into(), row: i, column, value: f64::from(value) });
        }
    }
    Ok(())
}
