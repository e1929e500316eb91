//! The files a command works on, in the same places everywhere: the model first, then the network. The flags `--model` and
//! `--network` say the same.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::Args;
use simplicit::Error;
use simplicit::model::ImplicitModel;

/// A command about one model.
#[derive(Debug, Args)]
pub(crate) struct ModelOperand {
    /// The model (also as --model FILE)
    #[arg(value_name = "MODEL", required_unless_present = "model_flag")]
    model: Option<PathBuf>,
    #[arg(id = "model_flag", long = "model", value_name = "FILE", hide = true, conflicts_with = "model")]
    flag: Option<PathBuf>,
}

impl ModelOperand {
    pub(crate) fn path(&self) -> &Path {
        // clap has already required one of the two.
        self.flag.as_deref().or(self.model.as_deref()).unwrap_or(Path::new(""))
    }
}

/// A command about one network, or a model in its place.
#[derive(Debug, Args)]
pub(crate) struct NetworkOperand {
    /// An ONNX network, or a model, whose equilibrium states then count (also as --network FILE)
    #[arg(value_name = "NETWORK", required_unless_present = "network_flag")]
    network: Option<PathBuf>,
    #[arg(id = "network_flag", long = "network", value_name = "FILE", hide = true, conflicts_with = "network")]
    flag: Option<PathBuf>,
}

impl NetworkOperand {
    pub(crate) fn path(&self) -> &Path {
        self.flag.as_deref().or(self.network.as_deref()).unwrap_or(Path::new(""))
    }
}

/// A command about a model with the network it came from.
#[derive(Debug, Args)]
pub(crate) struct ModelAndBaseline {
    #[command(flatten)]
    model: ModelOperand,
    #[command(flatten)]
    baseline: BaselineOperand,
}

/// The network that a model is compared with.
#[derive(Debug, Args)]
struct BaselineOperand {
    /// The network it came from: ONNX, or another model (also as --network FILE)
    #[arg(value_name = "NETWORK")]
    network: Option<PathBuf>,
    #[arg(id = "network_flag", long = "network", value_name = "FILE", hide = true, conflicts_with = "network")]
    flag: Option<PathBuf>,
}

impl BaselineOperand {
    fn path(&self) -> Option<&Path> {
        self.flag.as_deref().or(self.network.as_deref())
    }
}

impl ModelAndBaseline {
    pub(crate) fn model(&self) -> &Path {
        self.model.path()
    }

    pub(crate) fn network(&self) -> Option<&Path> {
        self.baseline.path()
    }
}

/// A command about a model, a network, or both.
#[derive(Debug, Args)]
pub(crate) struct ModelOrNetwork {
    /// The model, or a network alone (also as --model FILE)
    #[arg(value_name = "MODEL", required_unless_present_any = ["model_flag", "network_flag"])]
    model: Option<PathBuf>,
    #[arg(id = "model_flag", long = "model", value_name = "FILE", hide = true, conflicts_with = "model")]
    flag: Option<PathBuf>,
    #[command(flatten)]
    baseline: BaselineOperand,
}

impl ModelOrNetwork {
    /// The files as they were given, none of them opened.
    pub(crate) fn named(&self) -> [(&'static str, Option<&Path>); 2] {
        [("MODEL", self.flag.as_deref().or(self.model.as_deref())), ("NETWORK", self.baseline.path())]
    }

    /// The paths of the model and the network; a single file is a model or a network by its content.
    pub(crate) fn paths(&self) -> anyhow::Result<(Option<&Path>, Option<&Path>)> {
        let network = self.baseline.path();
        match (self.flag.as_deref(), self.model.as_deref(), network) {
            (None, Some(alone), None) if !is_model(alone)? => Ok((None, Some(alone))),
            (flag, positional, network) => Ok((flag.or(positional), network)),
        }
    }
}

/// Whether a file is one of our models. Its first bytes say so: safetensors begins with a length in eight bytes and
/// then JSON.
pub(crate) fn is_model(path: &Path) -> anyhow::Result<bool> {
    Ok(head(path)?.get(8) == Some(&b'{'))
}

/// The model in a file; of another kind of file it says what it is.
pub(crate) fn load_model(path: &Path) -> anyhow::Result<ImplicitModel> {
    let head = head(path)?;
    if head.get(8) != Some(&b'{') {
        if let Some(kind) = array_kind(&head) {
            bail!("{}: expected a model, got {kind}", path.display());
        }
        if looks_like_onnx(path, &head) {
            bail!(
                "{}: expected a model, got an ONNX network; simplicit convert or simplicit train makes a model of it",
                path.display()
            );
        }
    }
    Ok(ImplicitModel::load(path)?)
}

/// Why a file is no network, in plainer words where what it begins with says what it is.
pub(crate) fn no_network(path: &Path, error: Error) -> anyhow::Error {
    let head = head(path).unwrap_or_default();
    match error {
        Error::File { problem, .. } if problem.starts_with("not an ONNX file") => match array_kind(&head) {
            Some(kind) => anyhow::anyhow!("{}: expected an ONNX network or a model, got {kind}", path.display()),
            None if looks_like_onnx(path, &head) => {
                Error::file(path, format!("{problem}; is the file complete?")).into()
            }
            None => Error::file(path, problem).into(),
        },
        error => error.into(),
    }
}

/// The first bytes of a file.
fn head(path: &Path) -> anyhow::Result<Vec<u8>> {
    use std::io::Read;
    let mut head = Vec::new();
    let file = std::fs::File::open(path).with_context(|| path.display().to_string())?;
    file.take(9).read_to_end(&mut head).with_context(|| path.display().to_string())?;
    Ok(head)
}

/// Arrays that begin with something of their own.
fn array_kind(head: &[u8]) -> Option<&'static str> {
    let kinds: [(&[u8], &str); 3] = [
        (b"\x93NUMPY", "a NumPy array (.npy)"),
        (b"PK\x03\x04", "a zip archive, such as .npz or a PyTorch checkpoint"),
        (b"\x1f\x8b", "a gzipped file"),
    ];
    kinds.iter().find(|(magic, _)| head.starts_with(magic)).map(|(_, kind)| *kind)
}

/// ONNX has no magic: by its name, or by the version of its format, which writers put first.
fn looks_like_onnx(path: &Path, head: &[u8]) -> bool {
    let named = path.extension().is_some_and(|e| e.eq_ignore_ascii_case("onnx"));
    match head {
        [8, version, 0x12 | 0x3a, ..] => *version < 64,
        [first, ..] => named && *first == 8,
        [] => named,
    }
}
