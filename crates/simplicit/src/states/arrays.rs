//! States that were computed elsewhere: the arrays U, Z, X, Y in files or in memory.

use std::ops::Range;
use std::path::Path;

use super::{StateBlock, StateShape, StateSource};
use crate::arrays::{Array, ArrayFile, Preprocessing};
use crate::layout::{Activation, Layer, Layout};
use crate::{Error, Result};

/// Number of samples on which X = φ(Z) is checked at the start.
const CHECKED: usize = 256;
/// |X − φ(Z)| may be this many roundings of max(1, |Z|).
const ROUNDINGS: f64 = 32.0;

/// U (m × p), Z and X (m × n, last layer first), Y (m × q), one sample a row.
///
/// Features that are constant or always zero, and units that never fire, are allowed: they carry no information, and
/// the solver leaves them out. A NaN or an infinity is an error when its block is read.
#[derive(Debug, Clone)]
pub struct ArrayStates {
    u: Array,
    z: Array,
    x: Array,
    y: Array,
    layout: Layout,
    layout_declared: bool,
    baseline_nonzeros: Option<u64>,
    preprocessing: Option<Preprocessing>,
}

impl ArrayStates {
    /// States of a known layout. The shapes are checked here, and X = φ(Z) on the first 256 samples to within
    /// 32·ε·max(1, |Z|), where ε is that of float32 or of the coarser of the two arrays.
    pub fn new(u: Array, z: Array, x: Array, y: Array, layout: Layout) -> Result<Self> {
        let (samples, states) = (u.samples(), z.features());
        if samples == 0 {
            return Err(Error::shape("U", "at least one sample", "0 samples"));
        }
        for (name, array, columns) in
            [("U", &u, u.features()), ("Z", &z, states), ("X", &x, states), ("Y", &y, y.features())]
        {
            if (array.samples(), array.features()) != (samples, columns) || columns == 0 {
                return Err(Error::shape(
                    format!("{name} ({})", array.path().display()),
                    format!("{samples} × {}", columns.max(1)),
                    format!("{} × {}", array.samples(), array.features()),
                ));
            }
        }
        if layout.size() != states {
            return Err(Error::shape(
                "Z",
                format!("{} units, as in the layout", layout.size()),
                format!("{states} units"),
            ));
        }
        let all = Self { u, z, x, y, layout, layout_declared: true, baseline_nonzeros: None, preprocessing: None };
        require_activation(&all, all.z.element().epsilon().max(all.x.element().epsilon()))?;
        Ok(all)
    }

    /// States without known layers: one block of states with one activation.
    pub fn without_layout(u: Array, z: Array, x: Array, y: Array, activation: Activation) -> Result<Self> {
        let layout = Layout::new(vec![Layer::dense("states", z.features(), activation)]);
        Ok(Self { layout_declared: false, ..Self::new(u, z, x, y, layout)? })
    }

    /// A `.safetensors` or `.npz` with arrays U, Z, X, Y, or a folder with `U.npy`, `Z.npy`, `X.npy`, `Y.npy`. A
    /// safetensors file may carry the layout, the baseline's non-zeros and the preprocessing of U; without a layout all
    /// states have `activation`.
    pub fn open(path: impl AsRef<Path>, activation: Activation) -> Result<Self> {
        let path = path.as_ref();
        if path.is_dir() {
            let array = |name: &str| Array::open(path.join(name));
            return Self::without_layout(
                array("U.npy")?,
                array("Z.npy")?,
                array("X.npy")?,
                array("Y.npy")?,
                activation,
            );
        }
        let file = ArrayFile::open(path)?;
        let [u, z, x, y] = [file.array("U")?, file.array("Z")?, file.array("X")?, file.array("Y")?];
        let inside = |e: Error| Error::file(path, format!("its metadata: {e}"));
        let mut states = match file.metadata("layout") {
            Some(text) => Self::new(u, z, x, y, Layout::from_json(text).map_err(inside)?)?,
            None => Self::without_layout(u, z, x, y, activation)?,
        };
        states.baseline_nonzeros =
            match file.metadata("baseline_nonzeros") {
                None => None,
                Some(text) => Some(text.parse().ok().filter(|count| *count > 0).ok_or_else(|| {
                    inside(Error::shape("baseline_nonzeros", "a positive integer", format!("{text:?}")))
                })?),
            };
        states.preprocessing = match file.metadata("preprocessing") {
            None => None,
            Some(text) => Some(
                serde_json::from_str(text)
                    .map_err(|e| inside(Error::shape("preprocessing", "JSON {scale, mean, std}", e.to_string())))?,
            ),
        };
        Ok(states)
    }

    /// Whether the layers are known; without them, `feedforward` and `baseline` connectivity have no meaning.
    pub fn layout_is_declared(&self) -> bool {
        self.layout_declared
    }

    /// Non-zero parameters of the baseline, if the file states them.
    pub fn baseline_nonzeros(&self) -> Option<u64> {
        self.baseline_nonzeros
    }

    /// How U was made from raw inputs, if the file states it.
    pub fn preprocessing(&self) -> Option<&Preprocessing> {
        self.preprocessing.as_ref()
    }
}

/// An error that names the layer unless X = φ(Z) on the first 256 samples to within 32·ε·max(1, |Z|); ε is that of
/// float32, or `epsilon` if Z or X was stored in a coarser type.
pub fn require_activation(source: &dyn StateSource, epsilon: f64) -> Result<()> {
    let samples = 0..source.samples().min(CHECKED);
    let StateBlock { z, x, .. } = source.block(samples)?;
    let epsilon = epsilon.max(f64::from(f32::EPSILON));
    let layout = source.layout();
    for k in 0..layout.layers().len() {
        let layer = &layout.layers()[k];
        // (excess over the tolerance, deviation, row, column)
        let mut worst: Option<(f64, f64, usize, usize)> = None;
        for i in 0..z.rows() {
            for j in layout.range(k) {
                let deviation = (x[(i, j)] - layer.activation.apply_f64(z[(i, j)])).abs();
                let excess = deviation - ROUNDINGS * epsilon * z[(i, j)].abs().max(1.0);
                if excess > 0.0 && worst.is_none_or(|w| excess > w.0) {
                    worst = Some((excess, deviation, i, j));
                }
            }
        }
        if let Some((_, deviation, i, j)) = worst {
            return Err(Error::shape(
                format!("X, layer {}", layer.name),
                format!("{} of Z, as the activation is declared", layer.activation),
                format!(
                    "a deviation of {deviation:.3e} at row {i}, column {j} (Z = {}, X = {}); declare the right \
                     activation, or check the order of the columns",
                    z[(i, j)],
                    x[(i, j)]
                ),
            ));
        }
    }
    Ok(())
}

impl StateSource for ArrayStates {
    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn shape(&self) -> StateShape {
        StateShape { inputs: self.u.features(), states: self.z.features(), outputs: self.y.features() }
    }

    fn samples(&self) -> usize {
        self.u.samples()
    }

    fn block(&self, samples: Range<usize>) -> Result<StateBlock> {
        let block = StateBlock {
            u: self.u.rows(samples.clone())?,
            z: self.z.rows(samples.clone())?,
            x: self.x.rows(samples.clone())?,
            y: self.y.rows(samples.clone())?,
        };
        block.require_finite(samples.start)?;
        Ok(block)
    }

    fn layers_are_known(&self) -> bool {
        self.layout_declared
    }

    fn baseline_nonzeros(&self) -> Option<u64> {
        self.baseline_nonzeros
    }
}
