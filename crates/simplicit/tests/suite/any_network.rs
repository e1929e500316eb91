//! Networks with operators between their linear maps: as models they compute the same, have the same gradients, train,
//! and survive a file.
#![allow(clippy::unwrap_used, clippy::panic)] // helpers of tests are tests

use simplicit::equilibrium::{Equilibrium, EquilibriumSettings, InputGradient, Prepared};
use simplicit::layout::Activation;
use simplicit::linalg::Matrix;
use simplicit::model::{ImplicitModel, Ranges, TapWeights};
use simplicit::network::{Network, Shape, Window};
use simplicit::onnx::{OnnxSettings, to_onnx};
use simplicit::parallel::{Cancel, Threads};
use simplicit::random::Random;
use simplicit::states::{Collected, StateMap};
use simplicit::train::{Forget, Run, TrainInput, TrainSettings, Trained, importance, train};

use crate::common::adjoint::slopes;
use crate::networks::{CHANNELS, SIDE, attention, mobile, networks};

fn samples(count: usize, seed: u64) -> Matrix<f32> {
    let mut r = Random::new(seed);
    Matrix::from_fn(count, 3 * SIDE * SIDE, |_, _| r.normal() as f32)
}

#[test]
fn as_a_model_it_computes_the_same_and_has_the_same_gradients() {
    for (name, network) in networks() {
        let model = ImplicitModel::from_network(&network).unwrap();
        let u = samples(21, 31);
        let y = network.forward(&u).unwrap();
        let gradient = InputGradient::new(&model, EquilibriumSettings::default()).unwrap();
        let mut r = Random::new(32);
        let v = Matrix::from_fn(21, 5, |_, _| r.normal() as f32);
        let (solution, found) = gradient.run(&u, &v).unwrap();
        let slopes = slopes(&network, &u, &v);
        let expected = Matrix::from_fn(21, u.cols(), |s, j| slopes[s].du[j] as f32);
        for (what, got, wanted) in [("outputs", &solution.y, &y), ("gradient", &found.gradient, &expected)] {
            let size = wanted.as_slice().iter().fold(0.0f32, |m, v| m.max(v.abs()));
            for (g, w) in got.as_slice().iter().zip(wanted.as_slice()) {
                // Sums of at most some hundred terms, in another order.
                assert!((g - w).abs() <= 2e-5 * size, "{name}, {what}: {g} against {w}");
            }
        }
        assert!(size_of_gradient(&expected) > 0.0);
        // Outputs alone skip what they do not read; the same numbers.
        let alone = Equilibrium::new(&model, EquilibriumSettings::default()).unwrap().outputs(&u).unwrap();
        assert_eq!(alone.y, solution.y);
        // A model that is packed once, operators and dilated windows included: the same bits for every batch.
        for batch in [1, 2, 3, 8, 16, 21] {
            let prepared = Prepared::new(&model, batch).unwrap();
            for threads in [1, 3] {
                assert_eq!(prepared.outputs(&u, Threads::new(threads)).unwrap(), solution.y, "{name} {batch}");
            }
        }
    }
}

#[test]
fn exported_it_reads_back_as_the_same_network() {
    for (name, network) in networks() {
        let model = ImplicitModel::from_network(&network).unwrap();
        let bytes = to_onnx(&model, OnnxSettings::default()).unwrap();
        let again = Network::from_onnx_bytes(&bytes).unwrap_or_else(|e| panic!("{name}: {e}"));
        let u = samples(5, 33);
        let (y, wanted) = (again.forward(&u).unwrap(), network.forward(&u).unwrap());
        let size = wanted.as_slice().iter().fold(0.0f32, |m, v| m.max(v.abs()));
        for (a, b) in y.as_slice().iter().zip(wanted.as_slice()) {
            assert!((a - b).abs() <= 2e-5 * size, "{name}: {a} against {b}");
        }
        // Every weight is in the file and counted as before.
        let read = ImplicitModel::from_network(&again).unwrap();
        assert_eq!(read.sparsity().nonzeros, model.sparsity().nonzeros, "{name}");
    }
}

fn size_of_gradient(m: &Matrix<f32>) -> f32 {
    m.as_slice().iter().map(|v| v.abs()).sum()
}

#[test]
fn the_gradient_is_the_slope_of_the_outputs() {
    // Central differences of the network's own forward pass, with a step at which neither rounding nor curvature shows.
    for (name, network) in networks() {
        let u = samples(2, 41);
        let mut r = Random::new(42);
        let v = Matrix::from_fn(2, 5, |_, _| r.normal() as f32);
        let model = ImplicitModel::from_network(&network).unwrap();
        let gradient = InputGradient::new(&model, EquilibriumSettings::default()).unwrap();
        let du = gradient.run(&u, &v).unwrap().1.gradient;
        let value = |u: &Matrix<f32>| -> f64 {
            let y = network.forward(u).unwrap();
            y.as_slice().iter().zip(v.as_slice()).map(|(y, v)| f64::from(*y) * f64::from(*v)).sum()
        };
        let scale = du.as_slice().iter().fold(0.0f32, |m, g| m.max(g.abs()));
        let mut close = 0;
        let tried: Vec<usize> = (0..u.as_slice().len()).step_by(7).collect();
        for &k in &tried {
            let h = 1e-2f32;
            let moved = |by: f32| {
                let mut w = u.clone();
                w.as_mut_slice()[k] += by;
                value(&w)
            };
            let slope = (moved(h) - moved(-h)) / f64::from(2.0 * h);
            close += usize::from((slope - f64::from(du.as_slice()[k])).abs() <= 0.02 * f64::from(scale));
        }
        // A kink of a ReLU may lie within a step.
        assert!(close * 10 >= tried.len() * 9, "{name}: {close} of {}", tried.len());
    }
}

/// A map that is the sum of a convolution and of a linear map with a bias for every unit: its model has a row per unit.
fn map_in_part() -> Network {
    let mut r = Random::new(51);
    let mut weights =
        |rows: usize, cols: usize| Matrix::from_fn(rows, cols, |_, _| (r.normal() / (cols as f64).sqrt()) as f32);
    let start = Network::builder(Shape::map(3, SIDE, SIDE)).unwrap();
    let input = start.here();
    let whole = start
        .flatten()
        .and_then(|b| b.linear(weights(2 * 16, 3 * SIDE * SIDE), Some((0..32).map(|k| 0.01 * k as f32).collect())))
        .and_then(|b| b.reshape(Shape::map(2, 4, 4)))
        .unwrap();
    let half = whole.here();
    whole
        .at(input)
        .and_then(|b| b.convolution(weights(2, 27), Window::square(3, 1, 0), Some(vec![0.1, -0.1])))
        .and_then(|b| b.plus(half))
        .and_then(|b| b.activation(Activation::Relu))
        .and_then(|b| b.flatten())
        .and_then(|b| b.linear(weights(5, 32), None))
        .and_then(|b| b.build())
        .unwrap()
}

/// The Fisher diagonal from its definition: every class in turn, gradients by the reference, one number per row of the model.
#[test]
fn row_weights_are_the_fisher_diagonal() {
    let split = map_in_part();
    let model = ImplicitModel::from_network(&split).unwrap();
    assert_eq!((split.layout().rows(), model.layout().rows()), (2, 32), "the model's rows are not the network's");
    for (name, network) in networks().into_iter().chain([("map in part", split)]) {
        let u = samples(40, 52);
        let got = importance(&network, &u, 200, 3, Threads::new(2), &Cancel::new()).unwrap();
        assert_eq!(got, importance(&network, &u, 200, 3, Threads::one(), &Cancel::new()).unwrap(), "{name}");
        let y = network.forward(&u).unwrap();
        let p = Matrix::from_fn(40, 5, |s, c| {
            let of = |k: usize| f64::from(y[(s, k)] - y[(s, c)]).exp();
            (1.0 / (0..5).map(of).sum::<f64>()) as f32
        });
        let model = ImplicitModel::from_network(&network).unwrap();
        let layout = model.layout();
        let mut expected = vec![0.0; layout.rows()];
        for class in 0..5 {
            let v = Matrix::from_fn(40, 5, |s, k| f32::from(u8::from(k == class)) - p[(s, k)]);
            for (s, slopes) in slopes(&network, &u, &v).iter().enumerate() {
                for k in 0..layout.layers().len() {
                    let rows = layout.row_range(k);
                    let each = (layout.range(k).len() / rows.len().max(1)).max(1);
                    for (row, units) in rows.zip(slopes.dz[layout.range(k)].chunks(each)) {
                        let squares: f64 = units.iter().map(|g| g * g).sum();
                        expected[row] += f64::from(p[(s, class)]) * squares / 40.0;
                    }
                }
            }
        }
        assert_eq!(got.len(), expected.len() + 5, "{name}");
        // 8000 random mixtures of the classes: a relative error of some 2 %.
        let largest = expected.iter().fold(0.0f64, |m, e| m.max(*e));
        for (k, (got, expected)) in got.iter().zip(&expected).enumerate() {
            assert!((got - expected).abs() < 0.1 * expected + 1e-6 * largest, "{name} {k}: {got} against {expected}");
        }
    }
}

fn trained(network: &Network, u: &Matrix<f32>, target: f64, threads: usize) -> Trained {
    let baseline = ImplicitModel::from_network(network).unwrap();
    let (cancel, threads) = (Cancel::new(), Threads::new(threads));
    let weights = importance(network, u, 2, 0, threads, &cancel).unwrap();
    let source = Collected::new(network, u).unwrap();
    let input = TrainInput {
        source: &source,
        baseline: Some(&baseline),
        importance: Some(&weights),
        preprocessing: Default::default(),
    };
    let settings = TrainSettings { target_sparsity: Some(target), ..Default::default() };
    let mut run = Run { threads, cancel: &cancel, keep: &Forget, progress: &mut |_| {} };
    train(&input, &settings, &mut run).unwrap()
}

fn error(model: &ImplicitModel, network: &Network, u: &Matrix<f32>) -> f64 {
    let y = network.forward(u).unwrap();
    let own = Equilibrium::new(model, EquilibriumSettings::default()).unwrap().outputs(u).unwrap().y;
    let pairs = || own.as_slice().iter().zip(y.as_slice());
    let difference: f64 = pairs().map(|(a, b)| f64::from(a - b).powi(2)).sum();
    (difference / pairs().map(|(_, b)| f64::from(*b).powi(2)).sum::<f64>()).sqrt()
}

#[test]
fn it_trains_to_its_target_and_survives_a_file() {
    for (name, network) in networks() {
        let u = samples(300, 51);
        let found = trained(&network, &u, 0.4, 2);
        let model = &found.model;
        let sparsity = model.sparsity();
        assert!((sparsity.sparsity - 0.4).abs() <= 0.02, "{name}: {}", sparsity.sparsity);
        assert_eq!(sparsity.baseline_nonzeros, network.nonzeros() as u64);
        // Closer to the network than the same number of largest weights, on samples that were not seen.
        let fresh = samples(200, 52);
        let magnitude = by_magnitude(&ImplicitModel::from_network(&network).unwrap(), sparsity.nonzeros);
        let (own, plain) = (error(model, &network, &fresh), error(&magnitude, &network, &fresh));
        assert!(own < 0.8 * plain, "{name}: {own} against {plain} by magnitude");
        let again = ImplicitModel::from_bytes(&model.to_bytes(), "memory").unwrap();
        assert_eq!(&again, model);
        assert_eq!(trained(&network, &u, 0.4, 1).model, *model, "{name}: the same for any number of threads");
    }
}

/// The largest weights of all blocks and matrices, so many non-zeros in all.
fn by_magnitude(model: &ImplicitModel, nonzeros: u64) -> ImplicitModel {
    let mut parts = model.clone().into_parts();
    let sparsity = model.sparsity();
    let weights = sparsity.letters.a + sparsity.letters.b + sparsity.letters.c + sparsity.letters.d;
    let keep = weights - (sparsity.nonzeros - nonzeros) as usize;
    let mut sizes: Vec<f32> = parts.c.data().iter().chain(parts.a.data()).map(|v| v.abs()).collect();
    for block in &parts.taps {
        if let TapWeights::Taps(taps) = &block.weights {
            sizes.extend(taps.data().iter().map(|v| v.abs()));
        }
    }
    sizes.sort_by(|a, b| b.total_cmp(a));
    let least = sizes[keep.min(sizes.len()) - 1];
    let cut = |m: &simplicit::linalg::Csr<f32>| {
        let row = |i| m.row(i).filter(|(_, v)| v.abs() >= least).collect::<Vec<_>>();
        simplicit::linalg::Csr::from_rows(m.cols(), (0..m.rows()).map(row))
    };
    parts.c = cut(&parts.c);
    parts.a = cut(&parts.a);
    for block in &mut parts.taps {
        if let TapWeights::Taps(taps) = &block.weights {
            block.weights = TapWeights::Taps(cut(taps));
        }
    }
    ImplicitModel::new(parts).unwrap()
}

#[test]
fn depthwise_rows_use_their_own_channel_alone() {
    let network = mobile();
    let u = samples(200, 61);
    let model = trained(&network, &u, 0.3, 2).model;
    let block = model.taps().iter().find(|b| b.groups == CHANNELS).unwrap();
    let TapWeights::Taps(taps) = &block.weights else { panic!("a depthwise block has taps") };
    assert!(taps.nonzeros() > 0);
    for o in 0..CHANNELS {
        assert!(taps.row(o).all(|(j, _)| j / 9 == o));
    }
}

#[test]
fn what_needs_more_than_sums_is_refused_by_name() {
    let model = ImplicitModel::from_network(&attention()).unwrap();
    let message = model.rescale(0.9).unwrap_err().to_string();
    assert!(message.contains("layer"), "{message}");
    // What attention reads and gives stays.
    assert_eq!(model.reduce(&Ranges::Unknown).unwrap().model, model);
    assert!(model.well_posedness().acyclic);
}
