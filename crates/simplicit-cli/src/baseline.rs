//! What `--network` names: a trained network, or an implicit model in its place.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, bail};
use simplicit::arrays::{Inputs, Preprocessing, content_hash};
use simplicit::equilibrium::{Equilibrium, EquilibriumSettings};
use simplicit::model::ImplicitModel;
use simplicit::network::Network;
use simplicit::onnx::OnnxSelection;
use simplicit::parallel::Threads;
use simplicit::states::StateMap;

use crate::args::NameArgs;
use crate::exit::complain;
use crate::operands::{is_model, load_model, no_network};

/// A baseline and what is known about its file.
pub struct Baseline {
    pub(crate) kind: Kind,
    /// Size of the file in bytes, if there is one.
    pub(crate) bytes: Option<u64>,
}

/// Both kinds compute states; a network also has gradients.
pub(crate) enum Kind {
    Network(Arc<Network>),
    Model(Box<ImplicitModel>, Box<Equilibrium>),
}

impl Baseline {
    /// Opens an ONNX file or a model file; its first bytes say which it is.
    pub(crate) fn open(path: &Path) -> anyhow::Result<Self> {
        Self::open_selected(path, &OnnxSelection::default())
    }

    /// The network beside a model; a note says if the model was made from another one. What an ONNX file leaves open and was not
    /// given is as the model was trained, if it was trained from this file.
    pub(crate) fn open_beside(path: &Path, names: &NameArgs, model: Option<&ImplicitModel>) -> anyhow::Result<Self> {
        let made_from_this = model.and_then(|model| was_made_from(model, path));
        let trained_so = model.filter(|_| made_from_this == Some(true));
        let baseline = Self::open_selected(path, &names.selection_for(trained_so)?)?;
        if made_from_this == Some(false) && !model.is_some_and(|model| baseline.has_same_origin(model)) {
            complain(&format!(
                "note: {} is not the file that the model was made from, by its SHA-256; the figures compare the model with \
                 this one",
                path.display()
            ));
        }
        Ok(baseline)
    }

    /// Whether this is a model, too, and both were made from one file.
    fn has_same_origin(&self, model: &ImplicitModel) -> bool {
        let network = |model: &ImplicitModel| model.metadata().provenance.get("network").cloned();
        match &self.kind {
            Kind::Network(_) => false,
            Kind::Model(own, _) => network(own).is_some() && network(own) == network(model),
        }
    }

    /// As [`Baseline::open`], with a selection for what an ONNX file leaves open.
    pub(crate) fn open_selected(path: &Path, selection: &OnnxSelection) -> anyhow::Result<Self> {
        let bytes = std::fs::metadata(path).with_context(|| path.display().to_string())?.len();
        let kind = if is_model(path)? {
            if *selection != OnnxSelection::default() {
                bail!(
                    "{}: --input, --output, --input-shape and --fill choose in ONNX files; a model has no choice",
                    path.display()
                );
            }
            Kind::of_model(load_model(path)?)?
        } else {
            let network = Network::from_onnx_selected(path, selection).map_err(|e| no_network(path, e))?;
            Kind::Network(Arc::new(network))
        };
        Ok(Self { kind, bytes: Some(bytes) })
    }

    /// A network that is already in memory, with the size of its file where there is one.
    pub fn of_network(network: Arc<Network>, bytes: Option<u64>) -> Self {
        Self { kind: Kind::Network(network), bytes }
    }

    /// An implicit model that is already in memory.
    pub fn of_model(model: ImplicitModel) -> anyhow::Result<Self> {
        let bytes = Some(model.to_bytes().len() as u64);
        Ok(Self { kind: Kind::of_model(model)?, bytes })
    }

    /// The map from inputs to the states of the baseline.
    pub fn map(&self) -> &dyn StateMap {
        match &self.kind {
            Kind::Network(network) => network.as_ref(),
            Kind::Model(_, equilibrium) => equilibrium.as_ref(),
        }
    }

    /// The axes of a sample, without the batch, where they are known.
    pub fn axes(&self) -> Option<Vec<usize>> {
        match &self.kind {
            Kind::Network(network) => network.input_shape().dims().sizes().get(1..).map(<[usize]>::to_vec),
            Kind::Model(model, _) => model.input_axes(),
        }
    }

    /// An error where the inputs have the axes of a sample in another order.
    pub(crate) fn require_order(&self, inputs: &Inputs) -> anyhow::Result<()> {
        require_order(inputs, None, Some(self))
    }

    /// The equivalent implicit model.
    pub fn implicit(&self) -> anyhow::Result<ImplicitModel> {
        Ok(match &self.kind {
            Kind::Network(network) => ImplicitModel::from_network(network)?,
            Kind::Model(model, _) => model.as_ref().clone(),
        })
    }

    /// A model's own preprocessing; a network has none.
    pub(crate) fn preprocessing(&self) -> Option<&Preprocessing> {
        match &self.kind {
            Kind::Network(_) => None,
            Kind::Model(model, _) => Some(model.preprocessing()),
        }
    }

    /// The network, if it is one.
    pub(crate) fn network(&self) -> Option<&Network> {
        match &self.kind {
            Kind::Network(network) => Some(network),
            Kind::Model(..) => None,
        }
    }

    /// Non-zero parameters and multiply-adds.
    pub(crate) fn size(&self) -> (u64, u64) {
        match &self.kind {
            Kind::Network(network) => (network.nonzeros() as u64, network.multiply_adds()),
            Kind::Model(model, _) => {
                let sparsity = model.sparsity();
                (sparsity.nonzeros, sparsity.multiply_adds)
            }
        }
    }
}

/// An error where the inputs have the axes of a sample in another order than a network, or the model in its place, expects.
pub(crate) fn require_order(
    inputs: &Inputs,
    model: Option<&ImplicitModel>,
    baseline: Option<&Baseline>,
) -> anyhow::Result<()> {
    let axes = baseline.and_then(Baseline::axes).or_else(|| model?.input_axes());
    Ok(axes.map_or(Ok(()), |axes| inputs.require_order(&axes))?)
}

/// Whether a model was made from this file; unknown where it stores no hash or the file cannot be read.
pub(crate) fn was_made_from(model: &ImplicitModel, path: &Path) -> Option<bool> {
    let stored = model.metadata().provenance.get("network")?;
    Some(content_hash(path).ok()? == *stored)
}

impl Kind {
    /// A model, run one block per thread by the caller that reads its states.
    pub(crate) fn of_model(model: ImplicitModel) -> anyhow::Result<Self> {
        let settings = EquilibriumSettings { threads: Threads::one(), ..Default::default() };
        let equilibrium = Equilibrium::new(&model, settings)?;
        Ok(Kind::Model(Box::new(model), Box::new(equilibrium)))
    }
}
