//! Puts layers of several models of one network together into another model, bit for bit.

use simplicit::linalg::Csr;
use simplicit::model::{ImplicitModel, TapBlock, TapWeights, Target};

/// The numbers that a layer or the outputs compute with: their rows of A and B (or C and D), their constants and
/// their blocks.
#[derive(Debug, Clone)]
pub struct Piece {
    from_states: Csr<f32>,
    from_inputs: Csr<f32>,
    bias: Vec<f32>,
    /// The blocks with weights; the others belong to the structure of the network.
    taps: Vec<TapBlock>,
}

/// Some rows of a matrix.
fn part(matrix: &Csr<f32>, rows: std::ops::Range<usize>) -> Csr<f32> {
    Csr::from_rows(matrix.cols(), rows.map(|i| matrix.row(i).collect::<Vec<_>>()))
}

fn has_weights(block: &TapBlock) -> bool {
    matches!(block.weights, TapWeights::Taps(_))
}

impl Piece {
    /// The piece of a model that computes a target.
    pub fn of(model: &ImplicitModel, target: Target) -> Self {
        let taps = model.taps().iter().filter(|b| b.target == target && has_weights(b)).cloned().collect();
        match target {
            Target::Layer(k) => {
                let units = model.layout().range(k);
                Self {
                    from_states: part(model.a(), units.clone()),
                    from_inputs: part(model.b(), units),
                    bias: model.state_bias()[model.layout().row_range(k)].to_vec(),
                    taps,
                }
            }
            Target::Output => Self {
                from_states: model.c().clone(),
                from_inputs: model.d().clone(),
                bias: model.output_bias().to_vec(),
                taps,
            },
        }
    }

    /// Number of weights, the constants not counted.
    pub fn weights(&self) -> usize {
        self.from_states.nonzeros()
            + self.from_inputs.nonzeros()
            + self.taps.iter().map(TapBlock::nonzeros).sum::<usize>()
    }
}

/// `base` with some of its layers replaced.
pub fn stitched(base: &ImplicitModel, pieces: &[(Target, &Piece)]) -> simplicit::Result<ImplicitModel> {
    let mut parts = base.clone().into_parts();
    let of = |target: Target| pieces.iter().find(|(t, _)| *t == target).map(|(_, piece)| *piece);
    let layers = 0..parts.layout.layers().len();
    let rows = |whole: &Csr<f32>, piece: fn(&Piece) -> &Csr<f32>| {
        let of_layer = |k: usize| {
            let units = parts.layout.range(k);
            let row = move |i: usize| match of(Target::Layer(k)) {
                Some(p) => piece(p).row(i - units.start).collect::<Vec<_>>(),
                None => whole.row(i).collect(),
            };
            parts.layout.range(k).map(row)
        };
        Csr::from_rows(whole.cols(), layers.clone().flat_map(of_layer))
    };
    let (a, b) = (rows(&parts.a, |p| &p.from_states), rows(&parts.b, |p| &p.from_inputs));
    (parts.a, parts.b) = (a, b);
    for k in layers {
        if let Some(piece) = of(Target::Layer(k)) {
            parts.state_bias[parts.layout.row_range(k)].copy_from_slice(&piece.bias);
        }
    }
    if let Some(piece) = of(Target::Output) {
        (parts.c, parts.d, parts.output_bias) =
            (piece.from_states.clone(), piece.from_inputs.clone(), piece.bias.clone());
    }
    // The blocks of a target have the same order in all models of a network.
    for (target, piece) in pieces {
        let own = parts.taps.iter_mut().filter(|b| b.target == *target && has_weights(b));
        own.zip(&piece.taps).for_each(|(block, found)| *block = found.clone());
    }
    ImplicitModel::new(parts)
}
