//! The key of a kept result: its kind, its group, and the model whose states it was computed from.

use std::fmt;

/// Identifies a kept result. Two results of one training have different keys, and a training that is started again
/// gives each of them the key that it had before. Different keys have different texts.
#[derive(Debug, Clone, PartialEq)]
pub struct Key {
    /// The searches that the result is part of, the outermost first.
    within: Vec<Search>,
    result: Kept,
}

/// One model or step of a search.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Search {
    /// A level of a path.
    Level(f64),
    /// The number of a stage.
    Stage(usize),
}

#[derive(Debug, Clone, PartialEq)]
enum Kept {
    /// Statistics of the inputs and the constant against all rows.
    InputStatistics,
    Statistics(GroupKey),
    /// A block of the solved rows of a group.
    Rows {
        rows: RowsKey,
        block: usize,
    },
    Reconstruction {
        strength: f64,
        segment: usize,
        round: usize,
    },
    OutputRefit {
        strength: f64,
        round: usize,
    },
    Allocation,
}

/// A group of rows, and the states that its statistics are from.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct GroupKey {
    pub(super) states: States,
    /// The number of its linear block, where the network runs elsewhere.
    pub(super) block: Option<usize>,
    pub(super) name: String,
}

/// The states that the features are from.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum States {
    Baseline,
    /// The states of a network that runs elsewhere, on this many samples.
    Original {
        samples: usize,
    },
    /// The states of the model that is being built.
    Own(ModelKey),
}

/// A model that is being built.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct ModelKey {
    pub(super) pricing: Pricing,
    pub(super) strength: f64,
    /// Number of times that weights have been priced by a certificate.
    pub(super) robust_round: usize,
    /// Number of times that a cyclic model has been fitted to its own equilibrium.
    pub(super) turn: usize,
}

/// How the prices of groups are determined.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pricing {
    /// All groups have the same price.
    Common,
    /// Prices follow from the non-zeros that earlier groups have kept.
    Steered,
    /// Every group has a factor of its own.
    Held,
}

/// Rows of a group at a price, from one of its rows on.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct RowsKey {
    pub(super) group: GroupKey,
    pub(super) price: f64,
    pub(super) robust_round: usize,
    pub(super) first: usize,
}

impl Key {
    pub(super) fn input_statistics() -> Self {
        Kept::InputStatistics.into()
    }

    pub(super) fn reconstruct(strength: f64, segment: usize, round: usize) -> Self {
        Kept::Reconstruction { strength, segment, round }.into()
    }

    pub(super) fn output_refit(strength: f64, round: usize) -> Self {
        Kept::OutputRefit { strength, round }.into()
    }

    pub(super) fn allocation() -> Self {
        Kept::Allocation.into()
    }

    /// The same result as part of a search.
    pub(super) fn within(&self, search: Search) -> Self {
        Self { within: [&[search], &self.within[..]].concat(), result: self.result.clone() }
    }

    /// Whether statistics are kept under it.
    pub(crate) fn is_statistics(&self) -> bool {
        matches!(self.result, Kept::InputStatistics | Kept::Statistics(_))
    }

    /// Whether the result depends on a model that is being built, and not only on the baseline and the samples.
    pub fn depends_on_a_model(&self) -> bool {
        match &self.result {
            Kept::InputStatistics | Kept::Allocation => false,
            Kept::Statistics(group) | Kept::Rows { rows: RowsKey { group, .. }, .. } => {
                matches!(group.states, States::Own(_))
            }
            Kept::Reconstruction { .. } | Kept::OutputRefit { .. } => true,
        }
    }
}

impl GroupKey {
    pub(super) fn statistics(&self) -> Key {
        Kept::Statistics(self.clone()).into()
    }
}

impl RowsKey {
    pub(super) fn block(&self, block: usize) -> Key {
        Kept::Rows { rows: self.clone(), block }.into()
    }
}

impl From<Kept> for Key {
    fn from(result: Kept) -> Self {
        Self { within: Vec::new(), result }
    }
}

/// The text of a key. Checkpoints name their files by it, so it must not change: their files would not be found
/// again.
impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for search in &self.within {
            match search {
                Search::Level(level) => write!(f, "level {level} ")?,
                Search::Stage(number) => write!(f, "stage {number} ")?,
            }
        }
        match &self.result {
            Kept::InputStatistics => f.write_str("inputs statistics"),
            Kept::Statistics(group) => write!(f, "{group} statistics"),
            Kept::Rows { rows: RowsKey { group, price, robust_round, first }, block } => {
                write!(f, "{group} at {price:e}{}", Numbered("robust", *robust_round))?;
                write!(f, "{} rows {block}", Numbered("from", *first))
            }
            Kept::Reconstruction { strength, segment, round } => {
                write!(f, "strength {strength:e} reconstruction {segment} {round}")
            }
            Kept::OutputRefit { strength, round } => write!(f, "strength {strength:e} output refit {round}"),
            Kept::Allocation => f.write_str("allocation"),
        }
    }
}

impl fmt::Display for GroupKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.states {
            States::Baseline => f.write_str("baseline")?,
            States::Original { samples } => write!(f, "original {samples}")?,
            States::Own(ModelKey { pricing, strength, robust_round, turn }) => {
                f.write_str(match pricing {
                    Pricing::Common => "",
                    Pricing::Steered => "steered ",
                    Pricing::Held => "held ",
                })?;
                let (robust, turn) = (Numbered("robust", robust_round), Numbered("turn", turn));
                write!(f, "strength {strength:e}{robust}{turn}")?;
            }
        }
        if let Some(block) = self.block {
            write!(f, " block {block}")?;
        }
        write!(f, " {}", self.name)
    }
}

/// A word and its number, or nothing for number 0.
struct Numbered(&'static str, usize);

impl fmt::Display for Numbered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.1 == 0 { Ok(()) } else { write!(f, " {} {}", self.0, self.1) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The texts are those of version 0.1, so that its checkpoints can be read.
    #[test]
    fn texts_stay_what_they_are() {
        let group = |states, block| GroupKey { states, block, name: "layer_2".into() };
        let model = ModelKey { pricing: Pricing::Steered, strength: 2.5e-6, robust_round: 0, turn: 0 };
        let own = group(States::Own(model), None);
        let rows = RowsKey { group: own.clone(), price: 3e-6, robust_round: 2, first: 0 };
        let turned = ModelKey { pricing: Pricing::Common, strength: 0.1, robust_round: 1, turn: 3 };
        let block = group(States::Original { samples: 500 }, Some(4));
        let level = rows.block(1).within(Search::Stage(0)).within(Search::Level(0.8));
        for (key, text, of_model) in [
            (Key::input_statistics(), "inputs statistics", false),
            (Key::allocation(), "allocation", false),
            (Key::output_refit(2e-6, 3), "strength 2e-6 output refit 3", true),
            (Key::reconstruct(2e-6, 4, 1), "strength 2e-6 reconstruction 4 1", true),
            (group(States::Baseline, None).statistics(), "baseline layer_2 statistics", false),
            (own.statistics(), "steered strength 2.5e-6 layer_2 statistics", true),
            (level, "level 0.8 stage 0 steered strength 2.5e-6 layer_2 at 3e-6 robust 2 rows 1", true),
            (group(States::Own(turned), None).statistics(), "strength 1e-1 robust 1 turn 3 layer_2 statistics", true),
            (block.statistics(), "original 500 block 4 layer_2 statistics", false),
            (
                RowsKey { group: block, price: 1.0, robust_round: 0, first: 64 }.block(0),
                "original 500 block 4 layer_2 at 1e0 from 64 rows 0",
                false,
            ),
        ] {
            assert_eq!(key.to_string(), text);
            assert_eq!(key.is_statistics(), text.ends_with("statistics"), "{text}");
            assert_eq!(key.depends_on_a_model(), of_model, "{text}");
        }
    }
}
