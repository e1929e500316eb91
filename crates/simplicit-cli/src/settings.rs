//! From the flags of `train` to settings: presets, defaults, and the refusal of what does not fit together.

use std::sync::Arc;

use anyhow::bail;
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use simplicit::arrays::Augment;
use simplicit::problem::penalty::{ElasticNet, L1, Perspective, Ridge};
use simplicit::problem::{Connectivity, Mask, Matching};
use simplicit::train::{AllowedWeights, Bounds, ModelSettings, Objective, RowSettings, TrainSettings, WorkSettings};

use crate::args::Switch;
use crate::baseline::{Baseline, Kind};
use crate::commands::train::TrainArgs;
use crate::exit::not_yet;

/// κ where one is needed and none is given.
pub(crate) const KAPPA: f64 = 0.99;

/// Rounds of the refit in the output metric, where none are given.
pub(crate) const OUTPUT_REFIT: usize = 4;

/// Strengths that apply where neither a strength nor a target is given: in unit-RMS coordinates, and in raw units as
/// in the paper.
struct Strengths {
    beta: f64,
    alpha: f64,
    break_point: f64,
    elastic_alpha: f64,
    price: f64,
}
const NORMALISED: Strengths =
    Strengths { beta: 3e-4, alpha: 1.5e-3, break_point: 0.1, elastic_alpha: 1e-4, price: 2e-6 };
const RAW: Strengths = Strengths { beta: 1e-3, alpha: 1e-3, break_point: 1.0, elastic_alpha: 1e-3, price: 1e-3 };
/// The paper's λ₁ and λ₂.
const PAPER_LAMBDA: f64 = 0.1;

/// What a non-zero weight costs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum PenaltyKind {
    /// β|x|
    L1,
    /// The convex envelope of μ·[x ≠ 0] + αx²: --alpha with --mu or --break
    Perspective,
    /// β|x| + αx²
    ElasticNet,
    /// αx²: no sparsity
    Ridge,
    /// μ for every non-zero
    Cardinality,
}

/// Which connections a model may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum ConnectivityKind {
    /// Everything, as in the paper: feedback and self-loops too
    Full,
    /// Everything but a state's own loop
    NoSelfLoop,
    /// Any earlier layer and the inputs: learned skips, no cycles
    Feedforward,
    /// Only where the baseline has a connection
    Baseline,
    /// The non-zeros of --mask
    Mask,
}

/// How states and outputs are matched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum MatchingKind {
    /// Z = AX + BU and Y = CX + DU
    Exact,
    /// The squared mismatch is penalised
    Relaxed,
}

/// Which cardinality rows get a lower bound.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum BoundsKind {
    /// None
    Off,
    /// Eight of every group of up to 2,048 features
    Sampled,
    /// All, a convex solve each
    All,
}

/// A set of defaults.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Preset {
    /// The paper's: perspective (or l1), full connectivity, raw units, one convex solve
    Paper,
}

/// What is known about the baseline before the settings are decided.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Facts {
    /// Whether the baseline is a network, which has gradients.
    pub(crate) network: bool,
    /// Whether there is a baseline (a network or an implicit model), not only plain states.
    pub(crate) baseline: bool,
    /// Whether some of its layers are feature maps.
    pub(crate) maps: bool,
    /// Whether the baseline's own connections have cycles.
    pub(crate) baseline_cyclic: bool,
}

impl Facts {
    /// The facts about a baseline; plain states have the default.
    pub(crate) fn of(baseline: &Baseline) -> Self {
        let baseline_cyclic = match &baseline.kind {
            Kind::Network(_) => false,
            Kind::Model(model, _) => !model.well_posedness().acyclic,
        };
        let maps = baseline.map().layout().layers().iter().any(|l| l.map.is_some());
        Self { network: baseline.network().is_some(), baseline: true, maps, baseline_cyclic }
    }
}

/// Everything that was decided, under the names of the flags. Written as the effective recipe (with the paths) and
/// as the model's provenance (without).
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Effective {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) samples: Option<usize>,
    pub(crate) seed: u64,
    pub(crate) penalty: PenaltyKind,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) beta: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) alpha: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) mu: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) augment: Option<Augment>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) target_sparsity: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) max_drop: Option<f64>,
    pub(crate) connectivity: ConnectivityKind,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) include: Vec<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) exclude: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) reach: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) kappa: Option<f64>,
    pub(crate) rescale: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) gamma: Option<f64>,
    pub(crate) matching: MatchingKind,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) lambda1: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) lambda2: Option<f64>,
    pub(crate) normalize: Switch,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) rounds: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) refit: Option<Switch>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) reconstruct: Option<usize>,
    pub(crate) output_refit: usize,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) stages: Option<Switch>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) allocate: Option<usize>,
    pub(crate) cascade: Switch,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) robust: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) robust_refit: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) prove: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) positions: Option<usize>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) bounds: Option<BoundsKind>,
    pub(crate) output_aware: Switch,
    pub(crate) bias: Switch,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) activation: Option<String>,
    /// The device, as the flag is written.
    pub(crate) device: String,
    /// Memory to stay within, in bytes; no result depends on it, so neither recipe nor provenance has it.
    #[serde(skip)]
    pub(crate) memory: Option<u64>,
}

/// Decides everything that the flags leave open; refuses flags that would be ignored.
pub(crate) fn resolve(args: &TrainArgs, facts: Facts, mask_is_cyclic: bool) -> anyhow::Result<Effective> {
    let paper = args.preset == Some(Preset::Paper);
    let matching = args.matching.unwrap_or(MatchingKind::Relaxed);
    let relaxed = matching == MatchingKind::Relaxed;
    let penalty = args.penalty.unwrap_or(match (paper, relaxed) {
        (true, _) => PenaltyKind::Perspective,
        (false, true) => PenaltyKind::Cardinality,
        (false, false) => PenaltyKind::L1,
    });
    let convex = penalty != PenaltyKind::Cardinality;
    let normalise = args.normalize.map_or(!paper, Switch::is_on);
    // One convex solve without refits: the paper's way, and the only one for exact matching.
    let plain = paper || !relaxed;
    if !relaxed {
        refuse_beside_exact(args, penalty)?;
    }
    let default = if paper || !facts.baseline { ConnectivityKind::Full } else { ConnectivityKind::Baseline };
    let connectivity = args.connectivity.unwrap_or(if args.mask.is_some() { ConnectivityKind::Mask } else { default });
    match (connectivity, &args.mask) {
        (ConnectivityKind::Mask, None) => bail!("--connectivity mask: expected --mask FILE as well, got none"),
        (ConnectivityKind::Mask, Some(_)) | (_, None) => {}
        (_, Some(_)) => bail!("--mask: expected --connectivity mask, got another; leave one of them out"),
    }
    let name = |kind: ConnectivityKind| kind.to_possible_value().map_or_else(String::new, |v| v.get_name().to_string());
    let acyclic = matches!(connectivity, ConnectivityKind::Feedforward | ConnectivityKind::Baseline);
    if facts.maps && !acyclic {
        bail!(
            "--connectivity {}: expected baseline or feedforward for a network with convolutions, whose states are too \
             many for more",
            name(connectivity)
        );
    }
    let reaches = facts.maps && connectivity == ConnectivityKind::Feedforward;
    if args.reach.is_some() && !reaches {
        bail!("--reach: expected --connectivity feedforward and a network with convolutions, got another");
    }
    if args.positions.is_some() && !facts.maps {
        bail!("--positions: expected a network with convolutions, got none");
    }
    let cyclic = match connectivity {
        ConnectivityKind::Full | ConnectivityKind::NoSelfLoop => true,
        ConnectivityKind::Feedforward => false,
        ConnectivityKind::Baseline => facts.baseline_cyclic,
        ConnectivityKind::Mask => mask_is_cyclic,
    };
    if !convex && args.rounds.is_some_and(|r| r > 1) {
        bail!(
            "--rounds: expected 1 or nothing with --penalty cardinality, which is not reweighted; got {}",
            args.rounds.unwrap_or(1)
        );
    }
    if convex && args.bounds.is_some() {
        bail!("--bounds: expected --penalty cardinality, got a convex one, whose rows all have their gap");
    }
    if !convex && args.refit == Some(Switch::Off) {
        bail!("--refit off: expected a convex penalty; cardinality always ends in a refit");
    }
    let may_be_aware = facts.network && normalise;
    let output_aware = args.output_aware.map_or(may_be_aware && !plain, Switch::is_on);
    if output_aware && !facts.network {
        return Err(not_yet("--output-aware on without a network's gradients (implicit model or plain states)"));
    }
    if output_aware && !normalise {
        bail!("--output-aware on: expected --normalize on, got off; the weights set the units of every row");
    }
    if args.gamma.is_some() && !facts.network {
        bail!("--gamma: expected an ONNX network, whose layers are scaled; got none");
    }
    if args.gamma.is_some() && args.rescale {
        bail!("--gamma: expected no --rescale; both choose the coordinates of the states");
    }
    if args.prove.is_some() && convex {
        bail!("--prove: expected --penalty cardinality, got a convex penalty, whose rows are certified without it");
    }
    if args.prove.is_some_and(|s| s < 0.0) {
        bail!("--prove: expected seconds a row, zero or more, got {}", args.prove.unwrap_or(0.0));
    }
    if args.robust.is_some() && args.max_drop.is_some() {
        bail!("--robust: expected --target-sparsity or a strength, got --max-drop");
    }
    if args.robust_refit.is_some() && args.max_drop.is_some() {
        bail!("--robust-refit: expected --target-sparsity or a strength, got --max-drop");
    }
    if args.augment.is_some() && args.max_drop.is_some() {
        bail!(
            "--augment: expected --target-sparsity or a strength, got --max-drop, whose held-out images must not be \
             copies of trained ones"
        );
    }
    let lambda = if paper { PAPER_LAMBDA } else { 1.0 };
    let usual = TrainSettings::default();
    // The refit in the output metric is off where it costs more than training (shared weights), where it would undo
    // what robust rounds gained, and where all refits are switched off.
    let unfit = plain || facts.maps || args.robust.is_some() || args.refit == Some(Switch::Off);
    let (beta, alpha, mu) = strengths(args, penalty, normalise, paper)?;
    Ok(Effective {
        samples: args.selection.samples,
        seed: args.selection.seed,
        penalty,
        beta,
        alpha,
        mu,
        augment: args.augment,
        target_sparsity: args.target_sparsity,
        max_drop: args.max_drop,
        connectivity,
        include: args.include.clone(),
        exclude: args.exclude.clone(),
        reach: reaches.then_some(args.reach.unwrap_or(usual.allowed.reach)),
        kappa: args.kappa.or(cyclic.then_some(KAPPA)),
        rescale: args.rescale,
        gamma: args.gamma,
        matching,
        lambda1: relaxed.then_some(args.lambda1.unwrap_or(lambda)),
        lambda2: relaxed.then_some(args.lambda2.unwrap_or(lambda)),
        normalize: normalise.into(),
        rounds: convex.then_some(args.rounds.unwrap_or(if plain { 1 } else { 3 })),
        refit: convex.then_some(args.refit.unwrap_or((!plain).into())),
        reconstruct: args.reconstruct,
        output_refit: args.output_refit.unwrap_or(if unfit { 0 } else { OUTPUT_REFIT }),
        stages: args.stages,
        allocate: args.allocate,
        cascade: args.cascade.unwrap_or((!plain).into()),
        robust: args.robust,
        robust_refit: args.robust_refit,
        prove: args.prove,
        positions: facts.maps.then_some(args.positions.unwrap_or(usual.work.positions)),
        bounds: args.bounds,
        output_aware: output_aware.into(),
        bias: args.bias.unwrap_or(Switch::Off),
        activation: args.activation.clone(),
        device: args.device.unwrap_or_default().to_string(),
        memory: args.memory,
    })
}

/// Exact matching is one convex solve: flags that would give up the exact match for something else are refused.
fn refuse_beside_exact(args: &TrainArgs, penalty: PenaltyKind) -> anyhow::Result<()> {
    let on = |switch: Option<Switch>| switch.is_some_and(Switch::is_on);
    let refused = [
        ("--penalty cardinality", penalty == PenaltyKind::Cardinality),
        ("--lambda1", args.lambda1.is_some()),
        ("--lambda2", args.lambda2.is_some()),
        ("--target-sparsity", args.target_sparsity.is_some()),
        ("--max-drop", args.max_drop.is_some()),
        ("--rounds above 1", args.rounds.is_some_and(|r| r > 1)),
        ("--refit on", on(args.refit)),
        ("--cascade on", on(args.cascade)),
        ("--output-aware on", on(args.output_aware)),
    ];
    match refused.iter().find(|(_, given)| *given) {
        Some((flag, _)) => {
            bail!("{flag}: expected --matching relaxed, got exact, which allows no trade-off")
        }
        None => Ok(()),
    }
}

type Parameters = (Option<f64>, Option<f64>, Option<f64>);

/// β, α and μ of the penalty; a parameter of another penalty is refused.
fn strengths(args: &TrainArgs, penalty: PenaltyKind, normalise: bool, paper: bool) -> anyhow::Result<Parameters> {
    let table = if normalise { NORMALISED } else { RAW };
    let (beta, alpha, mu, break_point) = (args.beta, args.alpha, args.mu, args.break_point);
    let none = |flags: &[(&str, Option<f64>)]| -> anyhow::Result<()> {
        match flags.iter().find(|(_, value)| value.is_some()) {
            Some((flag, _)) => {
                let name = penalty.to_possible_value().map_or_else(String::new, |v| v.get_name().to_string());
                bail!("{flag}: expected another penalty; {name} has no such parameter")
            }
            None => Ok(()),
        }
    };
    Ok(match penalty {
        PenaltyKind::L1 => {
            none(&[("--alpha", alpha), ("--mu", mu), ("--break", break_point)])?;
            (Some(beta.unwrap_or(table.beta)), None, None)
        }
        PenaltyKind::ElasticNet => {
            none(&[("--mu", mu), ("--break", break_point)])?;
            (Some(beta.unwrap_or(table.beta)), Some(alpha.unwrap_or(table.elastic_alpha)), None)
        }
        PenaltyKind::Ridge => {
            none(&[("--beta", beta), ("--mu", mu), ("--break", break_point)])?;
            (None, Some(alpha.unwrap_or(table.alpha)), None)
        }
        PenaltyKind::Perspective => {
            none(&[("--beta", beta)])?;
            // With α alone μ = α, as the paper is read; with neither given, the break point lies inside the range of
            // the weights.
            let alone = alpha.is_some() || paper;
            let alpha = alpha.unwrap_or(table.alpha);
            let mu = match (mu, break_point) {
                (Some(mu), _) => mu,
                (None, Some(at)) => alpha * at * at,
                (None, None) if alone => alpha,
                (None, None) => alpha * table.break_point * table.break_point,
            };
            (None, Some(alpha), Some(mu))
        }
        PenaltyKind::Cardinality => {
            none(&[("--beta", beta), ("--break", break_point)])?;
            if let Some(alpha) = alpha.filter(|a| *a < 0.0) {
                bail!("--alpha: expected zero or a positive number, got {alpha}");
            }
            (None, alpha, Some(mu.unwrap_or(table.price)))
        }
    })
}

impl Effective {
    /// The library's settings.
    pub(crate) fn settings(&self, mask: Option<Mask>) -> anyhow::Result<TrainSettings> {
        let (beta, alpha, mu) = (self.beta.unwrap_or(0.0), self.alpha.unwrap_or(0.0), self.mu.unwrap_or(0.0));
        let objective = match self.penalty {
            PenaltyKind::L1 => Objective::Convex(Arc::new(L1::new(beta)?)),
            PenaltyKind::Perspective => Objective::Convex(Arc::new(Perspective::new(alpha, mu)?)),
            PenaltyKind::ElasticNet => Objective::Convex(Arc::new(ElasticNet::new(beta, alpha)?)),
            PenaltyKind::Ridge => Objective::Convex(Arc::new(Ridge::new(alpha)?)),
            PenaltyKind::Cardinality => Objective::Cardinality,
        };
        let connectivity = match (self.connectivity, mask) {
            (ConnectivityKind::Full, _) => Connectivity::Full,
            (ConnectivityKind::NoSelfLoop, _) => Connectivity::NoSelfLoop,
            (ConnectivityKind::Feedforward, _) => Connectivity::Feedforward,
            (ConnectivityKind::Mask, Some(mask)) => Connectivity::Mask(mask),
            (ConnectivityKind::Baseline | ConnectivityKind::Mask, _) => Connectivity::Baseline,
        };
        let usual = TrainSettings::default();
        let mut cardinality = usual.rows.cardinality.clone();
        if let (PenaltyKind::Cardinality, Some(alpha)) = (self.penalty, self.alpha) {
            cardinality.ridge = alpha;
        }
        Ok(TrainSettings {
            // A convex penalty carries its own weight; a search scales it from there.
            strength: if matches!(objective, Objective::Cardinality) { mu } else { 1.0 },
            objective,
            target_sparsity: self.target_sparsity,
            allowed: AllowedWeights {
                connectivity,
                include: self.include.clone(),
                exclude: self.exclude.clone(),
                reach: self.reach.unwrap_or(usual.allowed.reach),
                kappa: self.kappa,
                bias: self.bias.is_on(),
            },
            rows: RowSettings {
                matching: match self.matching {
                    MatchingKind::Exact => Matching::Exact,
                    MatchingKind::Relaxed => {
                        Matching::Relaxed { states: self.lambda1.unwrap_or(1.0), outputs: self.lambda2.unwrap_or(1.0) }
                    }
                },
                normalise: self.normalize.is_on(),
                rounds: self.rounds.unwrap_or(1),
                refit: self.refit.is_none_or(Switch::is_on),
                cardinality,
                bounds: self.bounds.map(|b| match b {
                    BoundsKind::Off => Bounds::Off,
                    BoundsKind::Sampled => Bounds::Sampled,
                    BoundsKind::All => Bounds::All,
                }),
                prove: self.prove,
                ..usual.rows
            },
            model: ModelSettings {
                cascade: self.cascade.is_on(),
                stages: self.stages.map(Switch::is_on),
                allocate: self.allocate.unwrap_or(0),
                reconstruct: self.reconstruct.unwrap_or(0),
                output_refit: Some(self.output_refit),
                robust_rounds: self.robust.unwrap_or(0),
                robust_refit: self.robust_refit,
            },
            work: WorkSettings {
                positions: self.positions.unwrap_or(usual.work.positions),
                seed: self.seed,
                device: self.device.parse()?,
                memory: self.memory,
                ..usual.work
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::{Cli, Command};

    const NETWORK: Facts = Facts { network: true, baseline: true, maps: false, baseline_cyclic: false };
    const STATES: Facts = Facts { network: false, baseline: false, maps: false, baseline_cyclic: false };

    fn resolved(flags: &str, facts: Facts) -> serde_json::Value {
        let line = format!("simplicit train --network n --inputs u --out m {flags}");
        let Command::Train(args) = Cli::try_parse_from(line.split_whitespace()).unwrap().command else {
            unreachable!("train was asked for")
        };
        serde_json::to_value(resolve(&args, facts, false).unwrap()).unwrap()
    }

    fn require(got: &serde_json::Value, expected: serde_json::Value) {
        for (key, value) in expected.as_object().unwrap() {
            assert_eq!(got.get(key).unwrap_or(&serde_json::Value::Null), value, "{key} of {got}");
        }
    }

    #[test]
    fn exact_matching_is_one_convex_solve() {
        let exact = resolved("--matching exact", NETWORK);
        for (key, value) in
            [("penalty", "l1"), ("matching", "exact"), ("refit", "off"), ("cascade", "off"), ("output-aware", "off")]
        {
            assert_eq!(exact[key], value, "{key}");
        }
        assert_eq!(exact["rounds"], 1);
        assert!(exact["lambda1"].is_null());
    }

    #[test]
    fn defaults_are_those_of_the_help() {
        let json = serde_json::json!({
            "penalty": "cardinality", "mu": 2e-6, "connectivity": "baseline", "kappa": null, "matching": "relaxed",
            "lambda1": 1.0, "lambda2": 1.0, "normalize": "on", "rounds": null, "refit": null, "cascade": "on",
            "output-refit": 4, "output-aware": "on", "bias": "off", "rescale": false, "seed": 0
        });
        require(&resolved("", NETWORK), json);
        let json = serde_json::json!({ "connectivity": "full", "kappa": 0.99, "output-aware": "off" });
        require(&resolved("", STATES), json);
        let json = serde_json::json!({ "beta": 3e-4, "mu": null, "rounds": 3, "refit": "on" });
        require(&resolved("--penalty l1", NETWORK), json);
        require(&resolved("--connectivity no-self-loop", NETWORK), serde_json::json!({ "kappa": 0.99 }));
        require(&resolved("--connectivity feedforward", NETWORK), serde_json::json!({ "kappa": null }));
        let cyclic = Facts { network: false, baseline_cyclic: true, ..NETWORK };
        require(&resolved("", cyclic), serde_json::json!({ "connectivity": "baseline", "kappa": 0.99 }));
        require(&resolved("--normalize off", NETWORK), serde_json::json!({ "output-aware": "off" }));
    }

    #[test]
    fn convolutions_have_positions_and_a_reach_and_no_cycles() {
        let maps = Facts { maps: true, ..NETWORK };
        require(&resolved("", maps), serde_json::json!({ "positions": 64, "reach": null, "kappa": null }));
        let far = serde_json::json!({ "positions": 9, "reach": 2 });
        require(&resolved("--connectivity feedforward --positions 9", maps), far);
        let refused = |flags: &str, facts: Facts| {
            let line = format!("simplicit train --network n --inputs u --out m {flags}");
            let Command::Train(args) = Cli::try_parse_from(line.split_whitespace()).unwrap().command else {
                unreachable!("train was asked for")
            };
            resolve(&args, facts, false).unwrap_err().to_string()
        };
        assert!(refused("--connectivity full", maps).contains("--connectivity full: expected baseline or feedforward"));
        assert!(refused("--reach 3", maps).contains("--reach: expected --connectivity feedforward"));
        assert!(refused("--positions 3", NETWORK).contains("--positions: expected a network with convolutions"));
    }

    #[test]
    fn the_papers_preset_and_what_overrides_it() {
        let paper = serde_json::json!({
            "penalty": "perspective", "alpha": 1e-3, "mu": 1e-3, "lambda1": 0.1, "lambda2": 0.1, "kappa": 0.99,
            "connectivity": "full", "normalize": "off", "rounds": 1, "refit": "off", "cascade": "off",
            "output-refit": 0, "output-aware": "off"
        });
        require(&resolved("--preset paper", NETWORK), paper);
        let l1 = serde_json::json!({ "penalty": "l1", "beta": 1e-3, "alpha": null, "lambda1": 0.1 });
        require(&resolved("--preset paper --penalty l1", NETWORK), l1);
        let other = serde_json::json!({ "kappa": 0.5, "lambda1": 2.0, "lambda2": 0.1, "refit": "on" });
        require(&resolved("--preset paper --kappa 0.5 --lambda1 2 --refit on", NETWORK), other);
    }

    #[test]
    fn perspective_by_mu_by_break_or_by_alpha_alone() {
        let of = |flags: &str| resolved(&format!("--penalty perspective {flags}"), NETWORK);
        require(&of("--alpha 0.5 --mu 0.25"), serde_json::json!({ "alpha": 0.5, "mu": 0.25 }));
        require(&of("--alpha 0.5 --break 2"), serde_json::json!({ "alpha": 0.5, "mu": 2.0 }));
        require(&of("--alpha 0.5"), serde_json::json!({ "alpha": 0.5, "mu": 0.5 }));
        let mu = of("")["mu"].as_f64().unwrap();
        assert!((mu - 1.5e-5).abs() < 1e-15);
    }
}
