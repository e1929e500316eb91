//! Prepared models: the same bits as the reference path, for every batch, number of threads and set of instructions.
#![allow(clippy::unwrap_used, clippy::panic)] // helpers of tests are tests

use simplicit::equilibrium::{Equilibrium, EquilibriumSettings, Prepared};
use simplicit::kernels::{Choice, Instructions};
use simplicit::layout::{Activation, Layer, Layout};
use simplicit::linalg::{Csr, Matrix};
use simplicit::model::{ImplicitModel, ModelParts, TapWeights};
use simplicit::network::Network;
use simplicit::parallel::Threads;
use simplicit::random::Random;

fn bundled(name: &str) -> ImplicitModel {
    let path = format!("{}/../../data/{name}", env!("CARGO_MANIFEST_DIR"));
    ImplicitModel::from_network(&Network::from_onnx(path).unwrap()).unwrap()
}

/// A random share of the weights set to zero, another share per block, so that every kernel is met.
fn pruned(model: &ImplicitModel, seed: u64) -> ImplicitModel {
    let mut r = Random::new(seed);
    let mut parts = model.clone().into_parts();
    let mut thin = |m: &Csr<f32>, keep: f64| {
        Csr::from_rows(m.cols(), (0..m.rows()).map(|i| m.row(i).filter(|_| r.uniform() < keep).collect::<Vec<_>>()))
    };
    for (k, block) in parts.taps.iter_mut().enumerate() {
        if let TapWeights::Taps(taps) = &block.weights {
            block.weights = TapWeights::Taps(thin(taps, [1.0, 0.5, 0.1, 0.8][k % 4]));
        }
    }
    parts.a = thin(&parts.a, 0.3);
    parts.b = thin(&parts.b, 0.1);
    ImplicitModel::new(parts).unwrap()
}

fn first(u: &Matrix<f32>, rows: usize) -> Matrix<f32> {
    Matrix::from_vec(rows, u.cols(), u.as_slice()[..rows * u.cols()].to_vec()).unwrap()
}

#[test]
fn outputs_are_the_reference_paths_whatever_the_batch_threads_and_instructions() {
    for name in ["resnet20_cifar100.onnx", "fashion_cnn.onnx", "fashion_fc.onnx"] {
        let full = bundled(name);
        for model in [pruned(&full, 3), full] {
            let mut r = Random::new(1);
            let u = Matrix::from_fn(35, model.shape().inputs, |_, _| r.normal() as f32);
            let settings = EquilibriumSettings { threads: Threads::one(), ..Default::default() };
            let equilibrium = Equilibrium::new(&model, settings).unwrap();
            let reference = equilibrium.run(&u).unwrap();
            for &instructions in Instructions::available() {
                for batch in [1, 2, 3, 5, 8, 9, 16, 17, 35] {
                    let prepared = Prepared::with_instructions(&model, batch, instructions).unwrap();
                    let few = first(&u, batch);
                    let y = prepared.outputs(&few, Threads::one()).unwrap();
                    for i in 0..batch {
                        if instructions == Instructions::Portable {
                            // Without fused multiply-adds the bits are others; the certified error holds.
                            let apart = y.row(i).iter().zip(reference.y.row(i)).map(|(a, b)| (a - b).abs());
                            let error = reference.diagnostics[i].output_error;
                            assert!(apart.fold(0.0, f32::max) as f64 <= 2.0 * error, "{name} {batch}");
                        } else {
                            assert_eq!(y.row(i), reference.y.row(i), "{name} {batch} {instructions:?}");
                        }
                    }
                    assert_eq!(prepared.outputs(&few, Threads::new(3)).unwrap(), y, "{name} {batch}");
                }
            }
            // Windows that are copied, rows in bundles, panels: whatever a layer could get.
            for choice in [Choice::Dense, Choice::Sparse] {
                for batch in [1, 2, 4, 8, 16, 35] {
                    let prepared = Prepared::only(&model, batch, choice).unwrap();
                    let y = prepared.outputs(&first(&u, batch), Threads::one()).unwrap();
                    assert_eq!(prepared.outputs(&first(&u, batch), Threads::new(3)).unwrap(), y, "{name} {batch}");
                    if Instructions::detect() != Instructions::Portable {
                        assert!((0..batch).all(|i| y.row(i) == reference.y.row(i)), "{name} {batch} {choice:?}");
                    }
                }
            }
            // The way everybody takes, with its certificate.
            for batch in [1, 4, 35] {
                let solution = equilibrium.outputs(&first(&u, batch)).unwrap();
                for i in 0..batch {
                    assert_eq!(solution.y.row(i), reference.y.row(i), "{name} {batch}");
                    let (ours, theirs) = (solution.diagnostics[i], reference.diagnostics[i]);
                    assert!(ours.converged);
                    assert!(ours.output_error <= 1.001 * theirs.output_error, "{name}");
                    assert!(ours.output_error >= 0.5 * theirs.output_error, "{name}");
                    assert_eq!(ours.multiply_adds, theirs.multiply_adds);
                }
            }
        }
    }
}

#[test]
fn a_prepared_model_is_shared_and_refuses_what_it_cannot_run() {
    fn shared<T: Send + Sync>(_: &T) {}
    let model = bundled("fashion_fc.onnx");
    let prepared = Prepared::new(&model, 4).unwrap();
    shared(&prepared);
    assert_eq!(prepared.kernels().len(), 4);
    assert!(prepared.kernels().iter().all(|k| k.density > 0.9 && k.kernel == "dense"), "{:?}", prepared.kernels());
    let (u, mut y, mut workspace) = (vec![0.5; 9 * 784], vec![0.0; 90], prepared.workspace());
    prepared.run_in(&u, &mut y, &mut workspace).unwrap();
    let whole = prepared.outputs(&Matrix::from_vec(9, 784, u.clone()).unwrap(), Threads::one()).unwrap();
    assert_eq!(whole.as_slice(), y);
    assert!(prepared.run_in(&u, &mut y[1..], &mut workspace).is_err());
    assert!(Prepared::new(&model, 64).unwrap().run_in(&u, &mut y, &mut workspace).is_err());
    assert!(prepared.outputs(&Matrix::zeros(2, 5), Threads::one()).is_err());
    let mut bad = Matrix::zeros(3, 784);
    bad[(1, 300)] = f32::INFINITY;
    let message = prepared.outputs(&bad, Threads::one()).unwrap_err().to_string();
    assert!(message.contains("row 1, column 300"), "{message}");
    assert_eq!(prepared.outputs(&Matrix::zeros(0, 784), Threads::one()).unwrap().rows(), 0);
    // A state that reads itself.
    let cyclic = ImplicitModel::new(ModelParts {
        a: Csr::from_rows(1, [vec![(0, 0.5f32)]]),
        b: Csr::from_rows(1, [vec![(0, 1.0f32)]]),
        c: Csr::from_rows(1, [vec![(0, 1.0f32)]]),
        d: Csr::empty(1, 1),
        state_bias: vec![0.0],
        output_bias: vec![0.0],
        layout: Layout::new(vec![Layer::dense("x", 1, Activation::Relu)]),
        ..Default::default()
    })
    .unwrap();
    assert!(Prepared::new(&cyclic, 1).unwrap_err().to_string().contains("Equilibrium"));
}

#[test]
fn an_input_that_nobody_reads_may_be_anything() {
    let rows = vec![vec![(0, 1.0f32), (2, -1.0)], vec![(2, 2.0)]];
    let model = ImplicitModel::new(ModelParts {
        a: Csr::empty(2, 2),
        b: Csr::from_rows(3, rows),
        c: Csr::from_rows(2, [vec![(0, 1.0f32), (1, 1.0)]]),
        d: Csr::empty(1, 3),
        state_bias: vec![0.5, 0.0],
        output_bias: vec![0.0],
        layout: Layout::new(vec![Layer::dense("x", 2, Activation::Relu)]),
        ..Default::default()
    })
    .unwrap();
    for batch in [1, 5, 16] {
        let prepared = Prepared::new(&model, batch).unwrap();
        let u = Matrix::from_fn(batch, 3, |_, j| [1.0, f32::NAN, 0.25][j]);
        let y = prepared.outputs(&u, Threads::one()).unwrap();
        assert!(y.as_slice().iter().all(|y| *y == 1.75), "{y:?}");
    }
}
