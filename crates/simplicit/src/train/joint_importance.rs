//! Row weights for errors that come together.
//!
//! The Fisher diagonal counts the error at every position of every channel as if it were alone. Errors of pruned taps are
//! not: they keep their sign over an image, and whatever averages over a map adds them up. On ResNet-20 the diagonal
//! sees a ninth of what the errors before the global average do, and a search that trusts it prunes there too much.
//!
//! A rough model has errors of the right kind. For every layer, R = E(Σ g·e)² / Σ_i λ_i·E(e_i²), with g = ∂ log p(y|u)/∂z
//! at the baseline and e the layer's errors on the baseline's states, is what the diagonal misses; the layer's weights
//! are multiplied by it.

use super::importance::{draw, softmax};
use super::walk::SAMPLES;
use super::{Run, TrainInput};
use crate::Result;
use crate::equilibrium::{EquilibriumSettings, InputGradient, LayerSum};
use crate::linalg::Matrix;
use crate::model::{ImplicitModel, Target};
use crate::network::Source;
use crate::parallel::{self, Threads};
use crate::random::Random;

/// Draws from the baseline's softmax per sample.
const DRAWS: usize = 2;
/// A ratio beyond this, either way, says more about the samples than about the layer.
const TRUSTED: f64 = 64.0;

/// `weights` (per row of the layout, then per output) with every layer multiplied by what errors like those of `rough`
/// do beyond the diagonal.
pub(super) fn joint_importance(
    input: &TrainInput,
    baseline: &ImplicitModel,
    rough: &ImplicitModel,
    weights: &[f64],
    run: &Run,
) -> Result<Vec<f64>> {
    let settings = EquilibriumSettings { threads: Threads::one(), ..Default::default() };
    let gradient = InputGradient::new(baseline, settings)?;
    let layout = baseline.layout();
    let layers = layout.layers().len();
    let targets: Vec<Target> = (0..layers).map(Target::Layer).chain([Target::Output]).collect();
    let sums: Vec<LayerSum> = targets.iter().map(|&target| LayerSum::new(rough, target)).collect();
    let scale = baseline.metadata().scaling.as_ref().map_or(1.0, |s| s.outputs) as f32;
    let rows: Vec<std::ops::Range<usize>> = (0..layers)
        .map(|k| layout.row_range(k))
        .chain([layout.rows()..layout.rows() + baseline.shape().outputs])
        .collect();
    let samples = input.source.samples();
    let mut together = vec![0.0; targets.len()];
    let mut squares = vec![0.0; weights.len()];
    parallel::fold(
        run.threads,
        samples.div_ceil(SAMPLES),
        |block| {
            run.cancel.check()?;
            let u = input.source.inputs(block * SAMPLES..((block + 1) * SAMPLES).min(samples))?;
            let solution = gradient.equilibrium().run(&u)?;
            let of_layer = |m: &Matrix<f32>, k: usize| {
                let range = layout.range(k);
                Matrix::from_fn(m.rows(), range.len(), |s, i| m[(s, range.start + i)])
            };
            let states: Vec<Matrix<f32>> = (0..layers).map(|k| of_layer(&solution.x, k)).collect();
            let mut errors = Vec::with_capacity(targets.len());
            for (sum, &target) in sums.iter().zip(&targets) {
                let mut z = sum.pre_activations(u.rows(), |source| match source {
                    Source::Input => &u,
                    Source::Layer(k) => &states[k],
                })?;
                let (exact, first) = match target {
                    Target::Layer(k) => (&solution.z, layout.range(k).start),
                    Target::Output => (&solution.y, 0),
                };
                for s in 0..z.rows() {
                    let exact = &exact.row(s)[first..];
                    z.row_mut(s).iter_mut().zip(exact).for_each(|(z, e)| *z -= e);
                }
                errors.push(z);
            }
            let mut squares = vec![0.0; weights.len()];
            for (errors, rows) in errors.iter().zip(&rows) {
                let positions = errors.cols() / rows.len().max(1);
                for s in 0..errors.rows() {
                    for (square, e) in squares[rows.clone()].iter_mut().zip(errors.row(s).chunks(positions.max(1))) {
                        *square += e.iter().map(|e| f64::from(*e).powi(2)).sum::<f64>() / positions as f64;
                    }
                }
            }
            let probabilities =
                softmax(&Matrix::from_fn(u.rows(), solution.y.cols(), |s, k| scale * solution.y[(s, k)]));
            let mut random = Random::new(block as u64);
            let mut together = vec![0.0; targets.len()];
            for _ in 0..DRAWS {
                let mut v = probabilities.clone();
                for s in 0..v.rows() {
                    let drawn = draw(probabilities.row(s), random.uniform());
                    v.row_mut(s)[drawn] -= 1.0;
                    v.row_mut(s).iter_mut().for_each(|v| *v *= scale);
                }
                let cotangents = gradient.pre_activations(&solution.z, &u, &v)?;
                for ((together, errors), &target) in together.iter_mut().zip(&errors).zip(&targets) {
                    for s in 0..errors.rows() {
                        let g = match target {
                            Target::Layer(k) => &cotangents.row(s)[layout.range(k)],
                            Target::Output => v.row(s),
                        };
                        let sum: f64 = errors.row(s).iter().zip(g).map(|(e, g)| f64::from(e * g)).sum();
                        *together += sum * sum / DRAWS as f64;
                    }
                }
            }
            Ok((together, squares))
        },
        |_, (of_layers, of_rows)| {
            together.iter_mut().zip(of_layers).for_each(|(t, v)| *t += v);
            squares.iter_mut().zip(of_rows).for_each(|(t, v)| *t += v);
            Ok(())
        },
    )?;
    let mut out = weights.to_vec();
    for (together, rows) in together.into_iter().zip(rows) {
        let alone: f64 = rows.clone().map(|i| weights[i] * squares[i]).sum();
        let ratio = if alone > 0.0 && together > 0.0 { together / alone } else { 1.0 };
        out[rows].iter_mut().for_each(|w| *w *= ratio.clamp(1.0 / TRUSTED, TRUSTED));
    }
    Ok(out)
}
