//! What an attack needs from a model: logits, and the gradient of a loss with respect to the inputs.

use crate::Result;
use crate::equilibrium::{EquilibriumSettings, InputGradient};
use crate::evaluate::predictions;
use crate::linalg::Matrix;
use crate::model::ImplicitModel;
use crate::network::Network;
use crate::parallel::Threads;
use crate::states::StateMap;

/// The loss that an attack increases.
#[derive(Debug, Clone, Copy)]
pub(super) enum Loss<'a> {
    /// −log softmax(outputs) at the label.
    CrossEntropy,
    /// The output of one other class, given per sample, minus the output of the label.
    Towards(&'a [u32]),
}

/// An implicit model, or a network as one, ready to be attacked on the calling thread: the gradient goes through the
/// equilibrium and is exact.
#[derive(Debug)]
pub struct Classifier {
    gradient: InputGradient,
    /// The factor from stored outputs to those of the original network.
    factor: f64,
}

impl Classifier {
    /// Schedules the model and its adjoint.
    pub fn new(model: &ImplicitModel) -> Result<Self> {
        let settings = EquilibriumSettings { threads: Threads::one(), ..EquilibriumSettings::default() };
        let factor = model.metadata().scaling.as_ref().map_or(1.0, |s| s.outputs);
        Ok(Self { gradient: InputGradient::new(model, settings)?, factor })
    }

    /// The same for a network, through the model that computes the same outputs.
    pub fn of_network(network: &Network) -> Result<Self> {
        Self::new(&ImplicitModel::from_network(network)?)
    }

    /// Number of values per sample.
    pub fn inputs(&self) -> usize {
        self.gradient.equilibrium().shape().inputs
    }

    /// Number of outputs.
    pub fn classes(&self) -> usize {
        self.gradient.equilibrium().shape().outputs
    }

    /// Outputs of a batch, one sample a row.
    pub fn logits(&self, u: &Matrix<f32>) -> Result<Matrix<f32>> {
        Ok(self.gradient.equilibrium().outputs(u)?.y)
    }

    /// Outputs, and the gradient of the loss with respect to the inputs, the gradient of each sample is scaled by a
    /// positive number of its own, so that a saturated softmax does not round the direction to zero.
    pub(super) fn loss_gradient(
        &self,
        u: &Matrix<f32>,
        labels: &[u32],
        loss: Loss<'_>,
    ) -> Result<(Matrix<f32>, Matrix<f32>)> {
        let solution = self.gradient.equilibrium().run(u)?;
        let cotangent = cotangent(&solution.y, labels, loss, self.factor);
        let gradient = self.gradient.at_inputs(u, &solution.z, &cotangent)?.gradient;
        Ok((solution.y, gradient))
    }
}

fn cotangent(logits: &Matrix<f32>, labels: &[u32], loss: Loss<'_>, factor: f64) -> Matrix<f32> {
    let Loss::Towards(classes) = loss else { return cross_entropy_cotangent(logits, labels, factor) };
    let mut out = Matrix::zeros(logits.rows(), logits.cols());
    for (i, (&label, &other)) in labels.iter().zip(classes).enumerate().take(logits.rows()) {
        out[(i, other as usize)] = 1.0;
        out[(i, label as usize)] = -1.0;
    }
    out
}

/// (softmax − one-hot) of every sample, divided by its largest magnitude.
fn cross_entropy_cotangent(logits: &Matrix<f32>, labels: &[u32], factor: f64) -> Matrix<f32> {
    let mut out = Matrix::zeros(logits.rows(), logits.cols());
    let mut others = vec![0.0f64; logits.cols()];
    for (i, &label) in labels.iter().enumerate().take(logits.rows()) {
        let row = logits.row(i);
        let label = label as usize;
        // Relative to the largest of the other outputs, because the direction depends only on their ratios.
        let top = (0..row.len()).filter(|&j| j != label).map(|j| row[j]).fold(f32::NEG_INFINITY, f32::max);
        let mut sum = 0.0;
        for (j, e) in others.iter_mut().enumerate() {
            *e = if j == label { 0.0 } else { (factor * f64::from(row[j] - top)).exp() };
            sum += *e;
        }
        for (d, e) in out.row_mut(i).iter_mut().zip(&others) {
            *d = (e / sum) as f32;
        }
        if sum > 0.0 {
            out.row_mut(i)[label] = -1.0;
        }
    }
    out
}

/// For every sample, whether its largest output is not that of its label.
pub(super) fn fooled(logits: &Matrix<f32>, labels: &[u32]) -> Vec<bool> {
    predictions(logits).into_iter().zip(labels).map(|(p, l)| p != *l).collect()
}
