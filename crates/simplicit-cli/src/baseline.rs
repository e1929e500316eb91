//! What `--network` names: a trained network, or an implicit model in its place.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, bail};
use simplicit::arrays::{Preprocessing, content_hash};
use simplicit::equilibrium::{Equilibrium, EquilibriumSettings};
use simplicit::model::ImplicitModel;
use simplicit::network::Network;
use simplicit::onnx::OnnxSelection;
use simplicit::parallel::Threads;
use simplicit::states::StateMap;

use crate::args::NameArgs;
use crate::operands::is_model;

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

    /// The network that a model is compared with. Choices that an ONNX file leaves open and no flag makes are those
    /// of the model's training, if it was trained from this file.
    pub(crate) fn open_beside(path: &Path, names: &NameArgs, model: Option<&ImplicitModel>) -> anyhow::Result<Self> {
        let trained_so = |model: &&ImplicitModel| {
            let provenance = &model.metadata().provenance;
            let chosen = NameArgs::FLAGS.iter().any(|flag| provenance.contains_key(*flag));
            chosen && content_hash(path).is_ok_and(|hash| provenance.get("network") == Some(&hash))
        };
        Self::open_selected(path, &names.selection_for(model.filter(trained_so))?)
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
            Kind::of_model(ImplicitModel::load(path)?)?
        } else {
            Kind::Network(Arc::new(Network::from_onnx_selected(path, selection)?))
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

impl Kind {
    /// A model, run one block per thread by the caller that reads its states.
    pub(crate) fn of_model(model: ImplicitModel) -> anyhow::Result<Self> {
        let settings = EquilibriumSettings { threads: Threads::one(), ..Default::default() };
        let equilibrium = Equilibrium::new(&model, settings)?;
        Ok(Kind::Model(Box::new(model), Box::new(equilibrium)))
    }
}
