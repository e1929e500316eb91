//! Output-aware weights: how strongly an error in each pre-activation changes the output.

use crate::Result;
use crate::linalg::Matrix;
use crate::network::Network;
use crate::parallel::{self, Cancel, Threads};
use crate::random::Random;
use crate::states::{InputSource, StateMap};

/// Samples in a block of the expectation, at most, and states in one: gradients of feature maps are large.
const BLOCK: usize = 256;
const BLOCK_STATES: usize = 1 << 22;

/// λ_i = E[(∂ log p(y|u)/∂z_i)²] over the inputs, y drawn from the network's own softmax `draws` times: the Fisher
/// diagonal, which needs no labels. One number per row of the layout (last layer first; summed over the positions of a
/// channel), then one per output, where the expectation over y is p(1 − p).
pub fn importance(
    network: &Network,
    inputs: &dyn InputSource,
    draws: usize,
    seed: u64,
    threads: Threads,
    cancel: &Cancel,
) -> Result<Vec<f64>> {
    let shape = network.shape();
    let samples = inputs.samples();
    let layers = network.layout().layers();
    // Of every row its units: a channel has its positions, a unit itself, an operator's layer no rows.
    let mut units: Vec<std::ops::Range<usize>> = Vec::with_capacity(network.layout().rows());
    for (k, layer) in layers.iter().enumerate() {
        let (first, each) = (network.layout().range(k).start, layer.size / layer.rows().max(1));
        units.extend((0..layer.rows()).map(|i| first + i * each..first + (i + 1) * each));
    }
    let size = (BLOCK_STATES / shape.states.max(1)).clamp(1, BLOCK);
    let mut total = vec![0.0; units.len() + shape.outputs];
    parallel::fold(
        threads,
        samples.div_ceil(size),
        |block| {
            cancel.check()?;
            let u = inputs.rows(block * size..((block + 1) * size).min(samples))?;
            let trace = network.trace(&u)?;
            // The stream of a block depends on its number alone, not on who computes it.
            let mut random = Random::new(seed ^ (block as u64).wrapping_mul(0x2545_f491_4f6c_dd1d));
            let probabilities = softmax(trace.outputs());
            let mut sum = vec![0.0; units.len() + shape.outputs];
            let (of_states, of_outputs) = sum.split_at_mut(units.len());
            for i in 0..u.rows() {
                for (sum, &p) in of_outputs.iter_mut().zip(probabilities.row(i)) {
                    *sum += draws as f64 * f64::from(p) * (1.0 - f64::from(p));
                }
            }
            for _ in 0..draws {
                let gradient = trace.backward(&drawn(&probabilities, 1.0, &mut random))?;
                for i in 0..u.rows() {
                    let gradient = gradient.dz.row(i);
                    for (sum, units) in of_states.iter_mut().zip(&units) {
                        *sum += gradient[units.clone()].iter().map(|&g| f64::from(g) * f64::from(g)).sum::<f64>();
                    }
                }
            }
            Ok(sum)
        },
        |_, sum| {
            for (total, sum) in total.iter_mut().zip(sum) {
                *total += sum;
            }
            Ok(())
        },
    )?;
    for value in &mut total {
        *value /= (samples * draws) as f64;
    }
    Ok(total)
}

pub(super) fn softmax(logits: &Matrix<f32>) -> Matrix<f32> {
    let mut out = logits.clone();
    for i in 0..out.rows() {
        let row = out.row_mut(i);
        let top = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let mut sum = 0.0;
        for v in row.iter_mut() {
            *v = (*v - top).exp();
            sum += *v;
        }
        for v in row.iter_mut() {
            *v /= sum;
        }
    }
    out
}

/// −∂ log p(y|u)/∂(outputs) for one y drawn per row, where the logits are `scale` times the outputs.
pub(super) fn drawn(probabilities: &Matrix<f32>, scale: f32, random: &mut Random) -> Matrix<f32> {
    let mut out = probabilities.clone();
    for i in 0..out.rows() {
        let y = draw(probabilities.row(i), random.uniform());
        let row = out.row_mut(i);
        row[y] -= 1.0;
        row.iter_mut().for_each(|v| *v *= scale);
    }
    out
}

fn draw(probabilities: &[f32], uniform: f64) -> usize {
    let mut left = uniform;
    for (k, p) in probabilities.iter().enumerate() {
        left -= f64::from(*p);
        if left < 0.0 {
            return k;
        }
    }
    probabilities.len().saturating_sub(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Activation;
    use crate::network::Shape;

    #[test]
    fn matches_the_definition_on_a_linear_softmax() {
        // One identity layer: ∂ log p(y)/∂z = Wᵀ(p − e_y), so E over y of its square is Σ_y p_y (Wᵀ(p − e_y))².
        let w = Matrix::from_fn(3, 2, |i, j| (i as f32 - 1.0) * 0.7 + j as f32 * 0.4);
        let network = Network::builder(Shape::Vector(2))
            .and_then(|b| b.linear(Matrix::from_fn(2, 2, |i, j| f32::from(u8::from(i == j))), None))
            .and_then(|b| b.activation(Activation::Tanh))
            .and_then(|b| b.linear(w.clone(), None))
            .and_then(|b| b.build())
            .unwrap();
        let u = Matrix::from_fn(600, 2, |i, j| ((i * 7 + j * 3) % 11) as f32 / 11.0 - 0.5);
        let run = |threads| importance(&network, &u, 400, 7, Threads::new(threads), &Cancel::new()).unwrap();
        let got = run(1);
        assert_eq!(got, run(3));
        let p = softmax(&network.forward(&u).unwrap());
        for c in 0..3 {
            let exact: f64 = (0..600).map(|i| f64::from(p[(i, c)]) * (1.0 - f64::from(p[(i, c)])) / 600.0).sum();
            assert!((got[2 + c] - exact).abs() < 1e-9, "{} against {exact}", got[2 + c]);
        }
        for k in 0..2 {
            let mut expected = 0.0;
            for i in 0..600 {
                let slope = 1.0 - f64::from(u[(i, k)]).tanh().powi(2);
                for y in 0..3 {
                    let g: f64 = (0..3)
                        .map(|c| f64::from(w[(c, k)]) * (f64::from(p[(i, c)]) - f64::from(u8::from(c == y))))
                        .sum();
                    expected += f64::from(p[(i, y)]) * (g * slope).powi(2) / 600.0;
                }
            }
            assert!((got[k] - expected).abs() < 0.02 * expected, "{} against {expected}", got[k]);
        }
    }
}
