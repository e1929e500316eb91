//! What `simplicit train` is trained on: a network or a model with inputs, or plain states.

use anyhow::bail;
use simplicit::arrays::{Augmented, InputSource, Preprocessing};
use simplicit::layout::Activation;
use simplicit::network::{LayerSummary, Network};
use simplicit::states::{ArrayStates, StateShape, StateSource};

use super::TrainArgs;
use crate::baseline::Baseline;
use crate::cluster::{Cluster, Trained};
use crate::exit::not_yet;
use crate::settings::{ConnectivityKind, Effective, Facts};
use crate::training::{Samples, moved};

/// What the model is trained on.
pub(super) enum Origin {
    Network(Box<Baseline>, Box<dyn InputSource>, Preprocessing),
    States(Box<ArrayStates>, Preprocessing),
}

/// The number of samples and the sizes of the states.
pub(super) struct Sizes {
    pub(super) samples: usize,
    pub(super) states: usize,
}

impl Origin {
    pub(super) fn open(args: &TrainArgs) -> anyhow::Result<Self> {
        match (&args.network, &args.inputs, &args.states) {
            (Some(network), Some(inputs), None) => {
                if args.activation.is_some() {
                    bail!("--activation: expected --states without a layout, got --network, which has its own");
                }
                let baseline = Baseline::open_selected(network, &args.names.selection()?)?;
                let (own, selection) = (baseline.preprocessing(), args.selection.selection());
                let inputs = args.pictures.open_inputs(inputs, &args.preprocessing, own, &selection)?;
                baseline.require_order(&inputs)?;
                let preprocessing = inputs.preprocessing().clone();
                let source: Box<dyn InputSource> = match args.augment {
                    None => Box::new(inputs),
                    Some(augment) => {
                        let (shape, spread) = (inputs.sample_shape().to_vec(), inputs.per_feature().clone());
                        Box::new(Augmented::new(inputs, &shape, &spread, augment, args.selection.seed)?)
                    }
                };
                Ok(Origin::Network(Box::new(baseline), source, preprocessing))
            }
            (_, _, Some(states)) => {
                if args.selection.samples.is_some() {
                    return Err(not_yet("--samples with --states"));
                }
                if !args.names.given().is_empty() {
                    bail!(
                        "--input, --output, --input-shape, --fill: expected an ONNX network, whose choice they are; got --states"
                    );
                }
                let activation = args.activation.clone().unwrap_or_else(|| "relu".into());
                let states = ArrayStates::open(states, Activation::try_from(activation)?)?;
                if args.activation.is_some() && states.layout_is_declared() {
                    bail!("--activation: expected states without a layout, got a file that declares its own");
                }
                let identity = Preprocessing::identity();
                let preprocessing = args.preprocessing.over(states.preprocessing().unwrap_or(&identity))?;
                Ok(Origin::States(Box::new(states), preprocessing))
            }
            _ => bail!("expected a network with --inputs, or --states; see simplicit train --help"),
        }
    }

    pub(super) fn baseline(&self) -> Option<&Baseline> {
        match self {
            Origin::Network(baseline, ..) => Some(baseline),
            Origin::States(..) => None,
        }
    }

    pub(super) fn preprocessing(&self) -> &Preprocessing {
        match self {
            Origin::Network(_, _, preprocessing) | Origin::States(_, preprocessing) => preprocessing,
        }
    }

    pub(super) fn sizes(&self) -> Sizes {
        match self {
            Origin::Network(baseline, inputs, _) => {
                Sizes { samples: inputs.samples(), states: baseline.map().shape().states }
            }
            Origin::States(states, _) => Sizes { samples: states.samples(), states: states.shape().states },
        }
    }

    /// Inputs, states and outputs.
    pub(super) fn shape(&self) -> StateShape {
        match self {
            Origin::Network(baseline, ..) => baseline.map().shape(),
            Origin::States(states, _) => states.shape(),
        }
    }

    /// The row with the most weights for each position at which a sample speaks for it. Unknown if the connections are
    /// neither the network's nor all, and for a baseline that is a model.
    pub(super) fn widest_row(&self, effective: &Effective) -> Option<Row> {
        let shape = self.shape();
        match effective.connectivity {
            ConnectivityKind::Full | ConnectivityKind::NoSelfLoop => {
                Some(Row { weights: shape.states + shape.inputs, positions: 1 })
            }
            ConnectivityKind::Baseline => {
                widest(self.baseline()?.network()?, effective.positions.unwrap_or(usize::MAX))
            }
            _ => None,
        }
    }

    /// Joins the cluster at an address, which receives what is trained on.
    pub(super) fn join(&self, address: &str, args: &TrainArgs, effective: &Effective) -> anyhow::Result<Cluster> {
        let decided = serde_json::to_string(effective)?;
        match (self, &args.network, &args.states) {
            (Origin::Network(baseline, inputs, _), Some(network), _) => {
                let moved = moved(baseline, effective)?;
                let names = args.names.given();
                let trained = Trained::Network { network, names, moved: moved.as_ref(), inputs: inputs.as_ref() };
                Cluster::join(address, &trained, &decided)
            }
            (Origin::States(..), _, Some(states)) => Cluster::join(address, &Trained::States(states), &decided),
            _ => bail!("--ray: expected a network with --inputs, or --states"),
        }
    }

    pub(super) fn samples(&self) -> Samples<'_> {
        match self {
            Origin::Network(baseline, inputs, _) => Samples::Inputs(baseline, inputs.as_ref()),
            Origin::States(states, _) => Samples::States(states.as_ref()),
        }
    }

    pub(super) fn facts(&self) -> Facts {
        match self {
            Origin::Network(baseline, ..) => Facts::of(baseline),
            Origin::States(..) => Facts::default(),
        }
    }
}

/// The weights of a row, its bias included, and the positions of a feature map at which every sample is fitted.
#[derive(Clone, Copy)]
pub(super) struct Row {
    pub(super) weights: usize,
    pub(super) positions: usize,
}

/// The row with the most weights for each of its positions, of which no more than `most` are used.
fn widest(network: &Network, most: usize) -> Option<Row> {
    let row = |layer: &LayerSummary| {
        let channels = layer.shape.channels().max(1);
        let positions = (layer.shape.size() / channels).min(most).max(1);
        Row { weights: layer.parameters / channels, positions }
    };
    network.summary().iter().filter(|layer| layer.trainable).map(row).max_by_key(|row| row.weights / row.positions)
}
