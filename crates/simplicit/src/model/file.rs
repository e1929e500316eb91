//! The model file: safetensors, specified byte by byte in `docs/format.md`.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize, de::DeserializeOwned};

use super::{ImplicitModel, Letter, ModelMetadata, ModelParts, OUTPUT, TapBlock, TapWeights, Target};
use crate::files::tensors::{Tensor, Tensors, encode};
use crate::files::{read_capped, write_bytes_atomically};
use crate::layout::{Layout, MapShape, Operator};
use crate::linalg::Csr;
use crate::network::{FixedMap, Source, Window};
use crate::{Error, Result};

const FORMAT: &str = "simplicit-model";
/// The version is raised whenever an older reader would misread the file: a model without tap blocks is still written
/// as version 1.
const VERSION: &str = "1";
const VERSION_WITH_TAPS: &str = "2";
/// The version of a model with operators, groups or dilation.
const VERSION_WITH_OPERATORS: &str = "3";
const MAX_FILE: u64 = 4 << 30;
/// Most rows of a matrix that is left out because it has no entries: because its row pointers would take memory for
/// which the file has no bytes.
const MAX_EMPTY_ROWS: usize = 1 << 24;

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

/// The value that a tap block starts from or is added to.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Place {
    Input,
    Output,
    Layer(usize),
}

/// A tap block without its numbers, as it is written in the header.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct TapEntry {
    letter: Letter,
    target: Place,
    source: Place,
    maps: Vec<FixedMap>,
    kernel: [usize; 2],
    stride: [usize; 2],
    padding: [usize; 4],
    #[serde(default = "undilated", skip_serializing_if = "is_undilated")]
    dilation: [usize; 2],
    #[serde(default = "ungrouped", skip_serializing_if = "is_ungrouped")]
    groups: usize,
    input: MapShape,
    output: MapShape,
    weights: WeightsKind,
}

fn undilated() -> [usize; 2] {
    [1; 2]
}

fn is_undilated(dilation: &[usize; 2]) -> bool {
    *dilation == undilated()
}

fn ungrouped() -> usize {
    1
}

fn is_ungrouped(groups: &usize) -> bool {
    *groups == ungrouped()
}

#[derive(Serialize, Deserialize, PartialEq)]
#[serde(rename_all = "snake_case")]
enum WeightsKind {
    Taps,
    Identity,
    Diagonal,
}

impl TapEntry {
    fn of(block: &TapBlock) -> Self {
        Self {
            letter: block.letter(),
            target: match block.target {
                Target::Layer(k) => Place::Layer(k),
                Target::Output => Place::Output,
            },
            source: match block.source {
                Source::Layer(k) => Place::Layer(k),
                Source::Input => Place::Input,
            },
            maps: block.maps.clone(),
            kernel: block.window.kernel,
            stride: block.window.stride,
            padding: block.window.padding,
            dilation: block.window.dilation,
            groups: block.groups,
            input: block.input,
            output: block.output,
            weights: match block.weights {
                TapWeights::Taps(_) => WeightsKind::Taps,
                TapWeights::Identity => WeightsKind::Identity,
                TapWeights::Diagonal(_) => WeightsKind::Diagonal,
            },
        }
    }

    /// The block with its numbers, which [`ImplicitModel::new`] checks further.
    fn block(self, k: usize, tensors: &Tensors<'_>) -> Result<TapBlock, String> {
        let name = format!("taps.{k}");
        let target = match self.target {
            Place::Layer(k) => Target::Layer(k),
            Place::Output => Target::Output,
            Place::Input => return Err(format!("{name}: the input cannot be a target")),
        };
        let source = match self.source {
            Place::Layer(k) => Source::Layer(k),
            Place::Input => Source::Input,
            Place::Output => return Err(format!("{name}: the output cannot be a source")),
        };
        let weights = match self.weights {
            WeightsKind::Identity => TapWeights::Identity,
            WeightsKind::Diagonal => {
                TapWeights::Diagonal(tensors.f32_vector(&format!("{name}.data"), Some(self.output.channels))?)
            }
            WeightsKind::Taps => {
                let columns = self.kernel.iter().try_fold(self.input.channels, |product, &k| product.checked_mul(k));
                let columns = columns.filter(|&c| c <= i32::MAX as usize);
                let columns = columns.ok_or_else(|| format!("{name}: more than 2^31 − 1 taps per row"))?;
                TapWeights::Taps(csr(tensors, &name, self.output.channels, columns)?)
            }
        };
        let Self { kernel, stride, padding, dilation, groups, input, output, maps, .. } = self;
        let window = Window { kernel, stride, padding, dilation };
        let block = TapBlock { target, source, maps, window, input, output, groups, weights };
        if block.letter() != self.letter {
            return Err(format!("{name}: letter {:?}, expected {:?}", self.letter, block.letter()));
        }
        Ok(block)
    }
}

impl ImplicitModel {
    /// Writes the model file, whole or not at all.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        write_bytes_atomically(path, &self.to_bytes())
    }

    /// Reads a model file; nothing in it is trusted before it is checked.
    pub fn load(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        Self::from_bytes(&read_capped(path, MAX_FILE)?, path)
    }

    /// The bytes of the model file; the same model gives the same bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut tensors = BTreeMap::new();
        let mut insert = |name: &str, m: &Csr<f32>| {
            tensors.insert(format!("{name}.indptr"), Tensor::indices(m.indptr().iter().copied(), m.nonzeros()));
            let columns = m.indices().iter().map(|&j| j as usize);
            tensors.insert(format!("{name}.indices"), Tensor::indices(columns, m.cols().saturating_sub(1)));
            tensors.insert(format!("{name}.data"), Tensor::f32(m.data()));
        };
        let version = self.file_version();
        for (letter, m) in [("A", self.a()), ("B", self.b()), ("C", self.c()), ("D", self.d())] {
            if version == VERSION || m.nonzeros() > 0 || m.rows() > MAX_EMPTY_ROWS {
                insert(letter, m);
            }
        }
        for (k, block) in self.taps().iter().enumerate() {
            if let TapWeights::Taps(taps) = &block.weights {
                insert(&format!("taps.{k}"), taps);
            }
        }
        for (k, block) in self.taps().iter().enumerate() {
            if let TapWeights::Diagonal(factors) = &block.weights {
                tensors.insert(format!("taps.{k}.data"), Tensor::f32(factors));
            }
        }
        for (k, layer) in self.layout().layers().iter().enumerate() {
            if let Some(Operator::Constant { values, .. }) = &layer.operator {
                tensors.insert(format!("constants.{k}"), Tensor::f32(values));
            }
        }
        tensors.insert("b".into(), Tensor::f32(self.state_bias()));
        tensors.insert("d".into(), Tensor::f32(self.output_bias()));
        let (shape, about) = (self.shape(), self.metadata());
        let mut metadata = BTreeMap::from([
            ("format".to_string(), FORMAT.to_string()),
            ("version".into(), version.into()),
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
        if !about.kept.is_empty() {
            metadata.insert("kept".into(), json(&about.kept));
        }
        if version != VERSION {
            metadata.insert("taps".into(), json(&self.taps().iter().map(TapEntry::of).collect::<Vec<_>>()));
        }
        encode(&metadata, &tensors)
    }

    /// The lowest version of the format that can hold the model.
    fn file_version(&self) -> &'static str {
        let new = |b: &TapBlock| !is_ungrouped(&b.groups) || !is_undilated(&b.window.dilation);
        if self.layout().has_operators() || self.taps().iter().any(new) {
            VERSION_WITH_OPERATORS
        } else if self.taps().is_empty() {
            VERSION
        } else {
            VERSION_WITH_TAPS
        }
    }

    /// Reads the bytes of a model file; errors refer to it as `path`.
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
    let version = text("version")?.as_str();
    if ![VERSION, VERSION_WITH_TAPS, VERSION_WITH_OPERATORS].contains(&version) {
        return Err(format!(
            "version {version:?} of the model format; this program reads versions {VERSION} to {VERSION_WITH_OPERATORS}, \
             update it"
        ));
    }
    let with_taps = version != VERSION;
    let shape: Shape = parsed("shape", text("shape")?)?;
    let Shape { inputs: p, states: n, outputs: q } = shape;
    if [p, n, q].iter().any(|&v| v > i32::MAX as usize) {
        return Err(format!("shape {p} inputs, {n} states, {q} outputs; at most 2^31 − 1 of each"));
    }
    let mut layout = Layout::from_json(text("layout")?).map_err(|e| e.to_string())?;
    if layout.size() != n {
        return Err(format!("layout of {} units, expected {n} states", layout.size()));
    }
    if layout.has_operators() && version != VERSION_WITH_OPERATORS {
        return Err(format!("version {version} with operators; such a model is written as version 3"));
    }
    layout.fill_constants(|k, size| tensors.f32_vector(&format!("constants.{k}"), Some(size)))?;
    let entries: Vec<TapEntry> = if with_taps { parsed("taps", text("taps")?)? } else { Vec::new() };
    if version == VERSION_WITH_TAPS && entries.is_empty() {
        return Err("version 2 without a tap block; such a model is written as version 1".into());
    }
    if let Some(stranger) = tensors.names().find(|name| !is_known(name, &entries, &layout)) {
        return Err(format!("unknown tensor {stranger:?}; the file is damaged or not ours"));
    }
    let matrix = |letter: &str, rows: usize, cols: usize| {
        let left_out =
            ["indptr", "indices", "data"].iter().all(|part| tensors.get(&format!("{letter}.{part}")).is_none());
        if with_taps && left_out && rows <= MAX_EMPTY_ROWS {
            return Ok(Csr::empty(rows, cols));
        }
        let read = csr(tensors, letter, rows, cols)?;
        if with_taps && read.nonzeros() == 0 && rows <= MAX_EMPTY_ROWS {
            return Err(format!("{letter} has no entries; version {version} leaves such a matrix out"));
        }
        Ok(read)
    };
    let baseline: Baseline = parsed("baseline", text("baseline")?)?;
    let kept: Vec<String> = tensors.metadata().get("kept").map_or(Ok(Vec::new()), |names| parsed("kept", names))?;
    let is_layer = |name: &String| name == OUTPUT || layout.layers().iter().any(|l| l.name == *name);
    if let Some(stranger) = kept.iter().find(|name| !is_layer(name)) {
        return Err(format!("layer {stranger:?} that training kept is none of the model's"));
    }
    let parts = ModelParts {
        a: matrix("A", n, n)?,
        b: matrix("B", n, p)?,
        c: matrix("C", q, n)?,
        d: matrix("D", q, p)?,
        state_bias: tensors.f32_vector("b", Some(layout.rows()))?,
        output_bias: tensors.f32_vector("d", Some(q))?,
        taps: entries.into_iter().enumerate().map(|(k, e)| e.block(k, tensors)).collect::<Result<_, String>>()?,
        layout,
        preprocessing: parsed("preprocessing", text("preprocessing")?)?,
        metadata: ModelMetadata {
            kappa: parsed("kappa", text("kappa")?)?,
            scaling: parsed("scaling", text("scaling")?)?,
            provenance: parsed("provenance", text("provenance")?)?,
            baseline_nonzeros: baseline.nonzeros,
            baseline_multiply_adds: baseline.multiply_adds,
            kept,
        },
    };
    let model = ImplicitModel::new(parts).map_err(|e| e.to_string())?;
    if model.file_version() != version {
        return Err(format!("version {version} of a model that is written as version {}", model.file_version()));
    }
    Ok(model)
}

/// A number without leading zeros or signs, so that everything has exactly one name.
fn plain_number(text: &str) -> Option<usize> {
    text.parse().ok().filter(|_| text == "0" || !text.starts_with(['0', '+']))
}

fn is_known(name: &str, taps: &[TapEntry], layout: &Layout) -> bool {
    let Some((place, part)) = name.rsplit_once('.') else { return matches!(name, "b" | "d") };
    if place == "constants" {
        let layer = plain_number(part).and_then(|k| layout.layers().get(k));
        return layer.is_some_and(|l| matches!(l.operator, Some(Operator::Constant { .. })));
    }
    if !matches!(part, "indptr" | "indices" | "data") {
        return false;
    }
    let block = || {
        let entry = taps.get(plain_number(place.strip_prefix("taps.")?)?)?;
        Some(entry.weights == WeightsKind::Taps || entry.weights == WeightsKind::Diagonal && part == "data")
    };
    matches!(place, "A" | "B" | "C" | "D") || block().unwrap_or(false)
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
