//! The model file: safetensors, specified byte by byte in `docs/format.md`.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize, de::DeserializeOwned};

use super::{ImplicitModel, ModelMetadata, ModelParts};
use crate::files::tensors::{Tensor, Tensors, encode};
use crate::files::{read_capped, write_bytes_atomically};
use crate::layout::Layout;
use crate::linalg::Csr;
use crate::{Error, Result};

const FORMAT: &str = "simplicit-model";
/// Raised whenever an older reader would misread the file; tap blocks will raise it.
const VERSION: &str = "1";
const MAX_FILE: u64 = 4 << 30;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Shape {
    inputs: usize,
    states: usize,
    outputs: usize,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Baseline {
    nonzeros: Option<u64>,
    multiply_adds: Option<u64>,
}

impl ImplicitModel {
    /// Writes the model file, whole or not at all.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        write_bytes_atomically(path, &self.to_bytes())
    }

    /// Reads a model file, trusting nothing in it.
    pub fn load(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        Self::from_bytes(&read_capped(path, MAX_FILE)?, path)
    }

    /// The bytes of the model file; the same model gives the same bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut tensors = BTreeMap::new();
        for (letter, m) in [("A", self.a()), ("B", self.b()), ("C", self.c()), ("D", self.d())] {
            tensors.insert(format!("{letter}.indptr"), Tensor::indices(m.indptr().iter().copied(), m.nonzeros()));
            let columns = m.indices().iter().map(|&j| j as usize);
            tensors.insert(format!("{letter}.indices"), Tensor::indices(columns, m.cols().saturating_sub(1)));
            tensors.insert(format!("{letter}.data"), Tensor::f32(m.data()));
        }
        tensors.insert("b".into(), Tensor::f32(self.state_bias()));
        tensors.insert("d".into(), Tensor::f32(self.output_bias()));
        let (shape, about) = (self.shape(), self.metadata());
        let metadata = BTreeMap::from([
            ("format".to_string(), FORMAT.to_string()),
            ("version".into(), VERSION.into()),
            ("shape".into(), json(&Shape { inputs: shape.inputs, states: shape.states, outputs: shape.outputs })),
            ("layout".into(), self.layout().to_json()),
            ("preprocessing".into(), json(self.preprocessing())),
            ("kappa".into(), json(&about.kappa)),
            ("scaling".into(), json(&about.scaling)),
            (
                "baseline".into(),
                json(&Baseline { nonzeros: about.baseline_nonzeros, multiply_adds: about.baseline_multiply_adds }),
            ),
            ("provenance".into(), json(&about.provenance)),
        ]);
        encode(&metadata, &tensors)
    }

    /// Reads the bytes of a model file; `path` only names it in errors.
    pub fn from_bytes(bytes: &[u8], path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let tensors = Tensors::decode(bytes).map_err(|problem| Error::file(path, problem))?;
        read(&tensors).map_err(|problem| Error::file(path, problem))
    }
}

/// All values written are finite numbers, strings and maps with string keys: this cannot fail.
fn json(value: &impl Serialize) -> String {
    serde_json::to_string(value).unwrap_or_default()
}

fn read(tensors: &Tensors<'_>) -> Result<ImplicitModel, String> {
    let text = |key: &str| {
        tensors.metadata().get(key).ok_or_else(|| format!("metadata {key:?} is missing; is this a simplicit model?"))
    };
    if text("format")? != FORMAT {
        return Err(format!("format {:?}, expected {FORMAT:?}", text("format")?));
    }
    if text("version")? != VERSION {
        return Err(format!(
            "version {:?} of the model format; this program reads version {VERSION}, update it",
            text("version")?
        ));
    }
    let shape: Shape = parsed("shape", text("shape")?)?;
    let Shape { inputs: p, states: n, outputs: q } = shape;
    if [p, n, q].iter().any(|&v| v > i32::MAX as usize) {
        return Err(format!("shape {p} inputs, {n} states, {q} outputs; at most 2^31 − 1 of each"));
    }
    let layout = Layout::from_json(text("layout")?).map_err(|e| e.to_string())?;
    if layout.size() != n {
        return Err(format!("layout of {} units, expected {n} states", layout.size()));
    }
    if let Some(stranger) = tensors.names().find(|name| !is_known(name)) {
        return Err(format!("unknown tensor {stranger:?}; the file is damaged or not ours"));
    }
    let baseline: Baseline = parsed("baseline", text("baseline")?)?;
    let parts = ModelParts {
        a: csr(tensors, "A", n, n)?,
        b: csr(tensors, "B", n, p)?,
        c: csr(tensors, "C", q, n)?,
        d: csr(tensors, "D", q, p)?,
        state_bias: tensors.f32_vector("b", Some(layout.rows()))?,
        output_bias: tensors.f32_vector("d", Some(q))?,
        taps: Vec::new(),
        layout,
        preprocessing: parsed("preprocessing", text("preprocessing")?)?,
        metadata: ModelMetadata {
            kappa: parsed("kappa", text("kappa")?)?,
            scaling: parsed("scaling", text("scaling")?)?,
            provenance: parsed("provenance", text("provenance")?)?,
            baseline_nonzeros: baseline.nonzeros,
            baseline_multiply_adds: baseline.multiply_adds,
        },
    };
    ImplicitModel::new(parts).map_err(|e| e.to_string())
}

fn is_known(name: &str) -> bool {
    matches!(name, "b" | "d")
        || name.split_once('.').is_some_and(|(letter, part)| {
            matches!(letter, "A" | "B" | "C" | "D") && matches!(part, "indptr" | "indices" | "data")
        })
}

fn parsed<T: DeserializeOwned>(key: &str, text: &str) -> Result<T, String> {
    serde_json::from_str(text).map_err(|e| format!("metadata {key:?}: {e}"))
}

fn csr(tensors: &Tensors<'_>, letter: &str, rows: usize, cols: usize) -> Result<Csr<f32>, String> {
    let data = tensors.f32_vector(&format!("{letter}.data"), None)?;
    let columns = tensors.index_vector(&format!("{letter}.indices"), Some(data.len()), cols.saturating_sub(1))?;
    let indptr = tensors.index_vector(&format!("{letter}.indptr"), Some(rows + 1), data.len())?;
    let columns = columns.into_iter().map(|j| j as u32).collect();
    Csr::new(letter, rows, cols, indptr, columns, data).map_err(|e| e.to_string())
}
