//! The files a command works on, in the same places everywhere: the model first, then the network. The flags `--model` and
//! `--network` say the same.

use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::Args;

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
    use std::io::Read;
    let mut head = Vec::new();
    let file = std::fs::File::open(path).with_context(|| path.display().to_string())?;
    file.take(9).read_to_end(&mut head).with_context(|| path.display().to_string())?;
    Ok(head.get(8) == Some(&b'{'))
}
