//! A network that runs elsewhere, trained through its linear blocks.
#![allow(clippy::unwrap_used, clippy::panic)] // helpers of tests are tests

use std::sync::Arc;

use simplicit::arrays::Preprocessing;
use simplicit::layout::Activation;
use simplicit::linalg::Matrix;
use simplicit::model::ImplicitModel;
use simplicit::network::{Network, Shape};
use simplicit::parallel::{Cancel, Threads};
use simplicit::random::Random;
use simplicit::states::Collected;
use simplicit::statistics::Statistics;
use simplicit::train::{
    AllowedWeights, BlockRows, BlockSource, Forget, LinearBlock, ModelSettings, Run, TrainInput, TrainSettings, train,
    train_blocks,
};
use simplicit::{Error, Result};

const SIZES: [usize; 4] = [9, 14, 12, 4];

/// Layers with ReLU between them, in plain loops.
struct Plain {
    u: Matrix<f32>,
    original: Vec<(Matrix<f32>, Vec<f32>)>,
    present: Vec<(Matrix<f32>, Vec<f32>)>,
    /// (blocks, own) of every pass.
    passes: Vec<(Vec<usize>, bool)>,
    stages: Vec<usize>,
}

impl Plain {
    fn new(samples: usize) -> Self {
        let mut random = Random::new(5);
        let mut draw = |rows: usize, cols: usize, size: f64| {
            Matrix::from_fn(rows, cols, |_, _| ((random.uniform() - 0.5) * size) as f32)
        };
        let original: Vec<_> =
            SIZES.windows(2).map(|w| (draw(w[1], w[0], 2.0), draw(1, w[1], 1.0).row(0).to_vec())).collect();
        let u = draw(samples, SIZES[0], 3.0);
        Self { u, present: original.clone(), original, passes: Vec::new(), stages: vec![0, 1, 2] }
    }

    /// What every layer reads and gives.
    fn run(layers: &[(Matrix<f32>, Vec<f32>)], u: &Matrix<f32>) -> Vec<(Matrix<f32>, Matrix<f32>)> {
        let mut x = u.clone();
        let mut out = Vec::new();
        for (w, b) in layers {
            let z = Matrix::from_fn(x.rows(), w.rows(), |s, i| {
                let sum: f64 = (0..w.cols()).map(|j| f64::from(w[(i, j)]) * f64::from(x[(s, j)])).sum();
                (sum + f64::from(b[i])) as f32
            });
            let next = Matrix::from_fn(z.rows(), z.cols(), |s, i| z[(s, i)].max(0.0));
            out.push((x, z));
            x = next;
        }
        out
    }

    fn network(&self) -> Network {
        let mut builder = Network::builder(Shape::Vector(SIZES[0])).unwrap();
        for (k, (w, b)) in self.original.iter().enumerate() {
            builder = builder.linear(w.clone(), Some(b.clone())).unwrap();
            if k + 1 < self.original.len() {
                builder = builder.activation(Activation::Relu).unwrap();
            }
        }
        builder.build().unwrap()
    }
}

impl BlockSource for Plain {
    fn blocks(&self) -> Arc<[LinearBlock]> {
        let block = |(k, (w, b)): (usize, &(Matrix<f32>, Vec<f32>))| LinearBlock {
            name: format!("layer {k}"),
            groups: 1,
            weights: w.clone(),
            constant: Some(b.clone()),
            counts_constant: true,
            shared: false,
            stage: self.stages[k],
        };
        self.original.iter().enumerate().map(block).collect()
    }

    fn fixed_nonzeros(&self) -> u64 {
        0
    }

    fn samples(&self) -> usize {
        self.u.rows()
    }

    fn statistics(&mut self, blocks: &[usize], samples: usize, own: bool, _: &mut Run) -> Result<Vec<Vec<Statistics>>> {
        self.passes.push((blocks.to_vec(), own));
        let u = Matrix::from_fn(samples, SIZES[0], |s, j| self.u[(s, j)]);
        let original = Self::run(&self.original, &u);
        let present = Self::run(if own { &self.present } else { &self.original }, &u);
        let of = |k: &usize| {
            let (x, z) = (&present[*k].0, &original[*k].1);
            let features =
                Matrix::from_fn(samples, x.cols() + 1, |s, j| if j < x.cols() { f64::from(x[(s, j)]) } else { 1.0 });
            let targets = Matrix::from_fn(samples, z.cols(), |s, i| f64::from(z[(s, i)]));
            Ok(vec![Statistics::of(&features, &targets)?])
        };
        blocks.iter().map(of).collect()
    }

    fn install(&mut self, block: usize, rows: &BlockRows) -> Result<()> {
        self.present[block] = (rows.weights.clone(), rows.constant.clone().unwrap());
        Ok(())
    }

    fn reset(&mut self) -> Result<()> {
        self.present = self.original.clone();
        Ok(())
    }

    fn row_weights(&mut self, _: &mut Run) -> Result<Option<Vec<Vec<f64>>>> {
        Ok(Some(self.original.iter().map(|(w, _)| vec![1.0; w.rows()]).collect()))
    }

    fn joint_errors(&mut self, rows: &[BlockRows], _: &Run) -> Result<Vec<(f64, Vec<f64>)>> {
        Ok(rows.iter().map(|r| (1.0, vec![1.0; r.weights.rows()])).collect())
    }
}

fn settings() -> TrainSettings {
    TrainSettings { model: ModelSettings { output_refit: Some(0), ..Default::default() }, ..TrainSettings::default() }
}

fn run_on<T>(work: impl FnOnce(&mut Run) -> T) -> T {
    let cancel = Cancel::new();
    work(&mut Run { threads: Threads::new(2), cancel: &cancel, keep: &Forget, progress: &mut |_| {} })
}

#[test]
fn the_same_rows_as_from_the_network_itself() {
    let mut plain = Plain::new(900);
    let settings = TrainSettings { strength: 4e-3, ..settings() };
    let trained = run_on(|run| train_blocks(&mut plain, &settings, false, run)).unwrap();
    let network = plain.network();
    let source = Collected::new(&network, &plain.u).unwrap();
    let baseline = ImplicitModel::from_network(&network).unwrap();
    let input = TrainInput {
        source: &source,
        baseline: Some(&baseline),
        importance: None,
        preprocessing: Preprocessing::identity(),
    };
    let model = run_on(|run| train(&input, &settings, run)).unwrap().model;
    assert_eq!(trained.nonzeros, model.sparsity().nonzeros);
    assert_eq!(trained.baseline_nonzeros, model.sparsity().baseline_nonzeros);
    // Last layer first in the model: its second layer begins at state 0, its first at state 12.
    let near = |a: f32, b: f32| (a == 0.0) == (b == 0.0) && (a - b).abs() <= 1e-4 * a.abs().max(1e-2);
    let mut pruned = 0;
    for (k, first) in [(0, SIZES[2]), (1, 0), (2, 0)] {
        let rows = &trained.blocks[k];
        for i in 0..rows.weights.rows() {
            for j in 0..rows.weights.cols() {
                let stored = match k {
                    0 => model.b().row(first + i).find(|e| e.0 == j),
                    1 => model.a().row(i).find(|e| e.0 == SIZES[2] + j),
                    _ => model.c().row(i).find(|e| e.0 == j),
                };
                let (ours, theirs) = (rows.weights[(i, j)], stored.map_or(0.0, |e| e.1));
                assert!(near(ours, theirs), "layer {k}, {i}, {j}: {ours} against {theirs}");
                pruned += usize::from(ours == 0.0);
            }
        }
    }
    assert!(pruned > 60, "{pruned}");
    // The source has what was returned, and every layer saw the ones before it pruned.
    for (present, rows) in plain.present.iter().zip(&trained.blocks) {
        assert_eq!((&present.0, Some(&present.1)), (&rows.weights, rows.constant.as_ref()));
    }
    assert_eq!(plain.passes, [(vec![0], false), (vec![1], true), (vec![2], true)]);
    assert!(trained.report.rows.iter().all(|r| r.bound_distance.is_some()));
    assert_eq!(trained.report.rows[14].name, "layer 1[0]");
}

#[test]
fn a_target_is_hit_and_stages_are_gathered_together() {
    let mut plain = Plain::new(700);
    plain.stages = vec![0, 1, 1];
    let settings = TrainSettings { target_sparsity: Some(0.4), ..settings() };
    let trained = run_on(|run| train_blocks(&mut plain, &settings, true, run)).unwrap();
    assert!((trained.sparsity() - 0.4).abs() < 0.006, "{}", trained.sparsity());
    let counted: usize =
        plain.present.iter().map(|(w, b)| w.as_slice().iter().chain(b).filter(|v| **v != 0.0).count()).sum();
    assert_eq!(trained.nonzeros, counted as u64);
    assert!(plain.passes.contains(&(vec![1, 2], true)));
    // A rough pass over everything, once.
    assert_eq!(plain.passes.iter().filter(|p| **p == (vec![0, 1, 2], false)).count(), 1);
    let mut none = Plain::new(400);
    let settings = TrainSettings { model: ModelSettings { cascade: false, ..settings.model.clone() }, ..settings };
    let trained = run_on(|run| train_blocks(&mut none, &settings, true, run)).unwrap();
    assert!((trained.sparsity() - 0.4).abs() < 0.006, "{}", trained.sparsity());
    assert_eq!(none.passes, [(vec![0, 1, 2], false)]);
}

#[test]
fn what_a_module_cannot_do_is_refused() {
    let refused = |settings: TrainSettings| {
        let mut plain = Plain::new(50);
        match run_on(|run| train_blocks(&mut plain, &settings, false, run)) {
            Err(Error::Setting { setting, .. }) => setting,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(
        refused(TrainSettings { allowed: AllowedWeights { kappa: Some(0.9), ..settings().allowed }, ..settings() }),
        "kappa"
    );
    assert_eq!(
        refused(TrainSettings { model: ModelSettings { output_refit: Some(2), ..settings().model }, ..settings() }),
        "output-refit"
    );
    assert_eq!(
        refused(TrainSettings { model: ModelSettings { stages: Some(true), ..settings().model }, ..settings() }),
        "stages"
    );
    assert_eq!(
        refused(TrainSettings { allowed: AllowedWeights { bias: true, ..settings().allowed }, ..settings() }),
        "bias"
    );
    assert_eq!(refused(TrainSettings { target_sparsity: Some(1.5), ..settings() }), "target-sparsity");
    assert_eq!(
        refused(TrainSettings {
            allowed: AllowedWeights { connectivity: simplicit::problem::Connectivity::Full, ..settings().allowed },
            ..settings()
        }),
        "connectivity"
    );
}
