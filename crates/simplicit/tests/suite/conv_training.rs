//! Training with shared weights: a small convolutional network on real images, everything recomputed from scratch.
#![allow(clippy::unwrap_used, clippy::panic)] // helpers of tests are tests

use std::path::{Path, PathBuf};
use std::sync::Arc;

use simplicit::arrays::{Array, Inputs, Labels, Preprocessing, Selection};
use simplicit::equilibrium::{Equilibrium, EquilibriumSettings};
use simplicit::evaluate::accuracy;
use simplicit::layout::{Activation, MapShape};
use simplicit::linalg::Matrix;
use simplicit::model::{ImplicitModel, TapBlock, TapWeights, Target};
use simplicit::network::{FixedMap, Network, Shape, Source, Window};
use simplicit::parallel::{Cancel, Threads};
use simplicit::problem::Connectivity;
use simplicit::problem::penalty::L1;
use simplicit::random::Random;
use simplicit::states::{Collected, InputSource, StateMap};
use simplicit::statistics::Statistics;
use simplicit::train::{
    AllowedWeights, Bounds, Forget, Keep, ModelSettings, Objective, RowSettings, Run, TrainInput, TrainSettings,
    Trained, WorkSettings, importance, train, train_to_max_drop,
};

use crate::common::Notes;

fn images(count: usize) -> Matrix<f32> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/fashion_train_images.idx.gz");
    Inputs::new(Array::open(path).unwrap(), Some(Preprocessing::bytes()), &Selection::all())
        .unwrap()
        .rows(0..count)
        .unwrap()
}

fn random(rows: usize, cols: usize, seed: u64) -> Matrix<f32> {
    let mut r = Random::new(seed);
    let scale = (2.0 / cols as f64).sqrt();
    Matrix::from_fn(rows, cols, |_, _| (r.normal() * scale) as f32)
}

fn bias(rows: usize, seed: u64) -> Option<Vec<f32>> {
    let mut r = Random::new(seed);
    Some((0..rows).map(|_| (0.2 * r.normal()) as f32).collect())
}

/// Convolution, average, residual block, maximum, a block with a strided 1 × 1 shortcut, a global average, a classifier.
fn network() -> Network {
    let start = Network::builder(Shape::map(1, 28, 28))
        .unwrap()
        .convolution(
            random(4, 9, 1),
            Window { kernel: [3, 3], stride: [2, 2], padding: [1, 0, 0, 1], dilation: [1; 2] },
            bias(4, 2),
        )
        .unwrap()
        .activation(Activation::Relu)
        .unwrap();
    let skip = start.here();
    let block = start
        .convolution(random(4, 36, 3), Window::square(3, 1, 1), bias(4, 4))
        .unwrap()
        .plus(skip)
        .unwrap()
        .activation(Activation::Relu)
        .unwrap()
        .max_pool(Window::square(2, 2, 0))
        .unwrap();
    let pooled = block.here();
    let block = block
        .convolution(random(6, 36, 5), Window::square(3, 2, 1), bias(6, 6))
        .unwrap()
        .activation(Activation::Relu)
        .unwrap()
        .convolution(random(6, 54, 7), Window::square(3, 1, 1), bias(6, 8))
        .unwrap();
    let inner = block.here();
    block
        .at(pooled)
        .unwrap()
        .convolution(random(6, 4, 9), Window::square(1, 2, 0), None)
        .unwrap()
        .plus(inner)
        .unwrap()
        .activation(Activation::Relu)
        .unwrap()
        .global_average()
        .unwrap()
        .linear(random(10, 6, 11), bias(10, 12))
        .unwrap()
        .build()
        .unwrap()
}

fn trained(network: &Network, u: &Matrix<f32>, settings: &TrainSettings, threads: usize, keep: &dyn Keep) -> Trained {
    let baseline = ImplicitModel::from_network(network).unwrap();
    let cancel = Cancel::new();
    let weights = importance(network, u, 2, 0, Threads::new(threads), &cancel).unwrap();
    let source = Collected::new(network, u).unwrap();
    let input = TrainInput {
        source: &source,
        baseline: Some(&baseline),
        importance: Some(&weights),
        preprocessing: Preprocessing::default(),
    };
    let mut run = Run { threads: Threads::new(threads), cancel: &cancel, keep, progress: &mut |_| {} };
    train(&input, settings, &mut run).unwrap()
}

/// The operand of a block for one sample, from the definition.
fn operand(block: &TapBlock, x: &[f32]) -> Vec<f32> {
    block.maps.iter().fold(x.to_vec(), |x, map: &FixedMap| {
        let mut out = vec![0.0; map.output().unwrap().size()];
        map.apply(&x, &mut out);
        out
    })
}

/// Every tap's value at a position, zero outside the map, from the definition.
fn column(block: &TapBlock, x: &[f32], position: usize) -> Vec<f64> {
    let MapShape { channels, height, width } = block.input;
    let (oy, ox) = (position / block.output.width, position % block.output.width);
    let mut out = Vec::new();
    for c in 0..channels {
        for dy in 0..block.window.kernel[0] {
            for dx in 0..block.window.kernel[1] {
                let y = (oy * block.window.stride[0] + dy) as isize - block.window.padding[0] as isize;
                let x_at = (ox * block.window.stride[1] + dx) as isize - block.window.padding[1] as isize;
                let inside = (0..height as isize).contains(&y) && (0..width as isize).contains(&x_at);
                let at = || f64::from(x[(c * height + y as usize) * width + x_at as usize]);
                out.push(if inside { at() } else { 0.0 });
            }
        }
    }
    out
}

/// Features and targets of a layer at all positions of all samples: `x` holds the states that are read, `z` those that
/// are matched, both last layer first.
fn im2col(model: &ImplicitModel, layer: usize, u: &Matrix<f32>, x: &Matrix, z: &Matrix) -> (Matrix, Matrix) {
    let layout = model.layout();
    let map = layout.layers()[layer].map.unwrap();
    let (positions, rows) = (map.positions(), map.channels);
    let (mut features, mut targets, mut width) = (Vec::new(), Vec::new(), 0);
    for sample in 0..u.rows() {
        let value = |source: Source| match source {
            Source::Input => u.row(sample).to_vec(),
            Source::Layer(k) => x.row(sample)[layout.range(k)].iter().map(|v| *v as f32).collect(),
        };
        let blocks: Vec<(&TapBlock, Vec<f32>)> = model
            .taps()
            .iter()
            .filter(|b| b.target == Target::Layer(layer))
            .map(|b| (b, operand(b, &value(b.source))))
            .collect();
        for position in 0..positions {
            let before = features.len();
            for (block, x) in blocks.iter().filter(|(b, _)| matches!(b.weights, TapWeights::Taps(_))) {
                features.extend(column(block, x, position));
            }
            features.push(1.0);
            width = features.len() - before;
            let row = &z.row(sample)[layout.range(layer)];
            for c in 0..rows {
                let unit = c * positions + position;
                let residual: f64 = blocks
                    .iter()
                    .filter(|(b, _)| b.weights == TapWeights::Identity)
                    .map(|(_, x)| f64::from(x[unit]))
                    .sum();
                targets.push(row[unit] - residual);
            }
        }
    }
    let samples = u.rows() * positions;
    (Matrix::from_vec(samples, width, features).unwrap(), Matrix::from_vec(samples, rows, targets).unwrap())
}

#[test]
fn tap_statistics_are_those_of_im2col_at_the_models_own_states() {
    let (network, u) = (network(), images(40));
    let settings = TrainSettings {
        strength: 1e-3,
        work: WorkSettings { positions: usize::MAX, ..Default::default() },
        ..TrainSettings::default()
    };
    let notes = Notes::default();
    let Trained { model, .. } = trained(&network, &u, &settings, 2, &notes);
    assert!(model.sparsity().sparsity > 0.1, "{}", model.sparsity().sparsity);
    let baseline = ImplicitModel::from_network(&network).unwrap();
    let theirs = network.states(&u).unwrap();
    // The finished model's own states are those the cascade saw: a layer's states never change after it is solved.
    let own = Equilibrium::new(&model, EquilibriumSettings::default()).unwrap().states(&u).unwrap();
    let kept = notes.0.lock().unwrap();
    let mut seen = 0;
    for (k, layer) in model.layout().layers().iter().enumerate() {
        let (features, targets) = im2col(&baseline, k, &u, &own.x, &theirs.z);
        let expected = Statistics::of(&features, &targets).unwrap();
        let wanted = format!(" {} statistics", layer.name);
        let bytes = kept.iter().find(|(key, _)| key.ends_with(&wanted)).unwrap().1;
        let got = Statistics::from_bytes(bytes, features.cols(), targets.cols()).unwrap();
        assert_eq!(got.samples(), features.rows());
        let close = |a: f64, b: f64, scale: f64| (a - b).abs() <= 1e-5 * scale;
        for i in 0..features.cols() {
            for j in 0..features.cols() {
                let scale = (expected.gram()[(i, i)] * expected.gram()[(j, j)]).sqrt().max(1.0);
                assert!(close(got.gram()[(i, j)], expected.gram()[(i, j)], scale), "{} G {i} {j}", layer.name);
            }
            for r in 0..targets.cols() {
                let scale = (expected.gram()[(i, i)] * expected.energy(r)).sqrt().max(1.0);
                assert!(close(got.cross(r)[i], expected.cross(r)[i], scale), "{} H {r} {i}", layer.name);
            }
        }
        seen += 1;
    }
    assert_eq!(seen, 4);
}

#[test]
fn a_subset_of_positions_is_seeded_and_stands_for_all() {
    let (network, u) = (network(), images(60));
    let gram = |positions: usize, seed: u64| {
        let settings = TrainSettings {
            strength: 1e-3,
            work: WorkSettings { positions, seed, ..Default::default() },
            ..TrainSettings::default()
        };
        let notes = Notes::default();
        trained(&network, &u, &settings, 1, &notes);
        let kept = notes.0.lock().unwrap();
        let first = network.layout().layers().last().unwrap().name.clone();
        let bytes = kept.iter().find(|(key, _)| key.ends_with(&format!(" {first} statistics"))).unwrap().1;
        Statistics::from_bytes(bytes, 10, 4).unwrap()
    };
    let (all, some, again, other) = (gram(usize::MAX, 0), gram(20, 0), gram(20, 0), gram(20, 1));
    assert_eq!(some, again);
    assert_ne!(some, other);
    assert_eq!((all.samples(), some.samples()), (60 * 14 * 14, 60 * 20));
    for j in 0..10 {
        assert!((some.rms(j) / all.rms(j) - 1.0).abs() < 0.1, "{j}: {} against {}", some.rms(j), all.rms(j));
    }
}

#[test]
fn a_target_is_hit_the_count_is_right_and_threads_do_not_matter() {
    let (network, u) = (network(), images(300));
    let settings = TrainSettings { target_sparsity: Some(0.4), ..TrainSettings::default() };
    let Trained { model, report } = trained(&network, &u, &settings, 2, &Forget);
    let counted = model.taps().iter().map(|b| match &b.weights {
        TapWeights::Taps(taps) => taps.data().iter().filter(|v| **v != 0.0).count(),
        _ => 0,
    });
    let biases = model.state_bias().iter().chain(model.output_bias()).filter(|v| **v != 0.0).count();
    let nonzeros = counted.sum::<usize>() + biases;
    let sparsity = 1.0 - nonzeros as f64 / network.nonzeros() as f64;
    assert_eq!(sparsity, model.sparsity().sparsity);
    // A weight of 720 is 0.14 points: the target cannot be met closer than that.
    assert!((sparsity - 0.4).abs() <= 0.003, "{sparsity} {:?}", report.path);
    assert_eq!(report.rows.len(), 4 + 4 + 6 + 6 + 10);
    assert!(report.rows.iter().all(|r| r.bound_distance.is_some_and(|d| (0.0..=1.0).contains(&d))));
    assert_eq!(report.rows.iter().map(|r| r.nonzeros).sum::<usize>(), nonzeros);
    // Its outputs are the network's, nearly; without refit and cascade they would not be.
    let y = Equilibrium::new(&model, EquilibriumSettings::default()).unwrap().outputs(&u).unwrap().y;
    let error = simplicit::evaluate::equilibrium_error(&y, &network.forward(&u).unwrap()).unwrap();
    assert!(error < 0.1, "{error}");
    assert!((error - report.training_error).abs() < 1e-4, "{error} {}", report.training_error);
    assert_eq!(trained(&network, &u, &settings, 1, &Forget).model.to_bytes(), model.to_bytes());
}

#[test]
fn stages_start_from_the_refitted_model_and_match_the_networks_outputs() {
    let (network, u) = (network(), images(200));
    let at_once = TrainSettings {
        target_sparsity: Some(0.7),
        model: ModelSettings { output_refit: Some(1), ..Default::default() },
        ..TrainSettings::default()
    };
    let staged =
        TrainSettings { model: ModelSettings { stages: Some(true), ..at_once.model.clone() }, ..at_once.clone() };
    let notes = Notes::default();
    let Trained { model, report } = trained(&network, &u, &staged, 2, &notes);
    let sparsity = model.sparsity().sparsity;
    assert!((sparsity - 0.7).abs() <= 0.003, "{sparsity} {:?}", report.path);
    assert!(report.output_refit.is_some());
    let y = Equilibrium::new(&model, EquilibriumSettings::default()).unwrap().outputs(&u).unwrap().y;
    let error = simplicit::evaluate::equilibrium_error(&y, &network.forward(&u).unwrap()).unwrap();
    assert!((error - report.training_error).abs() < 1e-4, "{error} {}", report.training_error);

    // What the second stage matched, by the energy of its targets: the network's outputs, but not its states.
    let kept = notes.0.lock().unwrap();
    let energies = |stage: usize, layer: &str, rows: usize| -> Vec<f64> {
        let found = |(key, _): &(&String, &Vec<u8>)| {
            key.starts_with(&format!("stage {stage} ")) && key.ends_with(&format!(" {layer} statistics"))
        };
        let (_, bytes) = kept.iter().find(found).unwrap();
        let statistics = (1..=37).find_map(|features| Statistics::from_bytes(bytes, features, rows)).unwrap();
        (0..rows).map(|k| statistics.energy(k) / statistics.samples() as f64).collect()
    };
    let theirs = network.states(&u).unwrap();
    let energy = |values: &Matrix, k: usize| (0..200).map(|s| values[(s, k)].powi(2)).sum::<f64>() / 200.0;
    for (k, got) in energies(1, "outputs", 10).into_iter().enumerate() {
        let expected = energy(&theirs.y, k);
        assert!((got - expected).abs() <= 1e-5 * expected, "output {k}: {got}, from scratch {expected}");
    }
    let first = &network.layout().layers().last().unwrap().name;
    let (network_s, models) = (energies(0, first, 4), energies(1, first, 4));
    assert!(network_s.iter().zip(&models).any(|(a, b)| (a / b - 1.0).abs() > 1e-4), "{network_s:?} {models:?}");
    assert!(kept.keys().all(|key| !key.starts_with("stage 2 ")), "0.65 and 0.7 are two stages");
    drop(kept);

    assert_eq!(trained(&network, &u, &staged, 1, &Forget).model.to_bytes(), model.to_bytes());
    // Where nothing is said a network with feature maps goes to its target at once.
    let notes = Notes::default();
    let one = trained(&network, &u, &at_once, 2, &notes);
    assert!(notes.0.lock().unwrap().keys().all(|key| key.starts_with("stage 0 ")));
    let off = TrainSettings { model: ModelSettings { stages: Some(false), ..at_once.model.clone() }, ..at_once };
    assert_eq!(trained(&network, &u, &off, 2, &Forget).model.to_bytes(), one.model.to_bytes());
}

#[test]
fn stages_that_cannot_be_taken_are_refused_before_any_work() {
    let (network, u) = (network(), images(20));
    let baseline = ImplicitModel::from_network(&network).unwrap();
    let source = Collected::new(&network, &u).unwrap();
    let input =
        TrainInput { source: &source, baseline: Some(&baseline), importance: None, preprocessing: Default::default() };
    let on = TrainSettings {
        target_sparsity: Some(0.7),
        model: ModelSettings { stages: Some(true), output_refit: Some(1), ..Default::default() },
        ..TrainSettings::default()
    };
    let convex = Objective::Convex(Arc::new(L1::new(1e-3).unwrap()));
    for (settings, expected) in [
        (
            TrainSettings { model: ModelSettings { output_refit: None, ..on.model.clone() }, ..on.clone() },
            "off without a refit in the output metric",
        ),
        (TrainSettings { objective: convex, ..on.clone() }, "off without the penalty cardinality"),
        (
            TrainSettings { model: ModelSettings { robust_rounds: 1, ..on.model.clone() }, ..on.clone() },
            "off with robust rounds",
        ),
        (TrainSettings { target_sparsity: None, ..on.clone() }, "off without a target sparsity"),
    ] {
        let mut worked = false;
        let mut progress = |_| worked = true;
        let mut run = Run { progress: &mut progress, ..Run::default() };
        let message = train(&input, &settings, &mut run).unwrap_err().to_string();
        assert!(message.starts_with(&format!("stages: expected {expected}")), "{message}");
        assert!(!worked, "{expected}");
    }
    let untargeted = TrainSettings { target_sparsity: None, ..on };
    let message = train_to_max_drop(&input, &source, 1.0, &untargeted, &mut Run::default()).unwrap_err().to_string();
    assert!(message.starts_with("stages: expected off where a drop decides"), "{message}");
}

#[test]
fn convex_rows_are_certified_and_a_second_run_finds_what_the_first_kept() {
    let (network, u) = (network(), images(200));
    let objective = Objective::Convex(Arc::new(L1::new(1e-3).unwrap()));
    let settings = TrainSettings {
        objective,
        strength: 1.0,
        rows: RowSettings { rounds: 2, ..Default::default() },
        ..TrainSettings::default()
    };
    let notes = Notes::default();
    let first = trained(&network, &u, &settings, 2, &notes);
    assert_eq!(first.report.rows_at_limit(), 0);
    assert!(first.report.max_relative_gap().unwrap() <= 1e-6);
    assert!(first.model.sparsity().sparsity > 0.05);
    let second = trained(&network, &u, &settings, 1, &notes);
    assert_eq!(first.model.to_bytes(), second.model.to_bytes());
}

#[test]
fn feedforward_may_reach_further_and_kappa_binds_channels() {
    let (network, u) = (network(), images(200));
    let connectivity = Connectivity::Feedforward;
    let far = TrainSettings {
        strength: 1e-5,
        allowed: AllowedWeights { connectivity, reach: 3, ..Default::default() },
        ..TrainSettings::default()
    };
    let notes = Notes::default();
    let Trained { model, report } = trained(&network, &u, &far, 2, &notes);
    let baseline = ImplicitModel::from_network(&network).unwrap();
    // The second layer reads the first (36 taps) and now the input too, by a stride of 2 (9 taps); from the input to
    // the third it would be a stride of 7, which the network does not use.
    let kept = notes.0.lock().unwrap();
    for (layer, features, channels) in [(2, 36 + 9 + 1, 4), (1, 36 + 1, 6)] {
        let name = format!(" {} statistics", network.layout().layers()[layer].name);
        let bytes = kept.iter().find(|(key, _)| key.ends_with(&name)).unwrap().1;
        assert!(Statistics::from_bytes(bytes, features, channels).is_some(), "{name}");
    }
    for block in model.taps() {
        let Target::Layer(k) = block.target else { continue };
        // Layers are last first: a source comes earlier in the network, at most three maps back for a new skip.
        let Source::Layer(j) = block.source else { continue };
        assert!(j > k && j <= k + 3, "{k} from {j}");
    }
    assert!(report.training_error < 0.2, "{}", report.training_error);
    let held = TrainSettings {
        allowed: AllowedWeights { kappa: Some(0.9), ..Default::default() },
        ..TrainSettings::default()
    };
    let source = Collected::new(&network, &u).unwrap();
    let input = TrainInput {
        source: &source,
        baseline: Some(&baseline),
        importance: None,
        preprocessing: Preprocessing::default(),
    };
    let cancel = Cancel::new();
    let mut run = Run { threads: Threads::one(), cancel: &cancel, keep: &Forget, progress: &mut |_| {} };
    let message = train(&input, &held, &mut run).unwrap_err().to_string();
    assert!(message.contains("residual"), "{message}");
    let full = TrainSettings {
        allowed: AllowedWeights { connectivity: Connectivity::Full, ..Default::default() },
        ..TrainSettings::default()
    };
    let message = train(&input, &full, &mut run).unwrap_err().to_string();
    assert!(message.contains("expected baseline or feedforward"), "{message}");
    // Without a residual the ball holds in the stored numbers.
    let plain = Network::builder(Shape::map(1, 28, 28))
        .unwrap()
        .convolution(random(4, 9, 1), Window::square(3, 2, 1), bias(4, 2))
        .unwrap()
        .activation(Activation::Relu)
        .unwrap()
        .convolution(random(5, 36, 3), Window::square(3, 2, 1), bias(5, 4))
        .unwrap()
        .activation(Activation::Relu)
        .unwrap()
        .flatten()
        .unwrap()
        .linear(random(3, 5 * 49, 5), bias(3, 6))
        .unwrap()
        .activation(Activation::Relu)
        .unwrap()
        .linear(random(2, 3, 7), None)
        .unwrap()
        .build()
        .unwrap();
    let Trained { model, report } = trained(&plain, &u, &held, 2, &Forget);
    assert_eq!(report.rows.len(), 4 + 5 + 3 + 2);
    let norm = |rows: &simplicit::linalg::Csr<f32>| {
        let sums = (0..rows.rows()).map(|i| rows.row(i).map(|(_, v)| f64::from(v).abs()).sum::<f64>());
        sums.fold(0.0, f64::max)
    };
    let of_states = model.taps().iter().filter(|b| b.source != Source::Input && b.target != Target::Output);
    let largest = of_states.map(|b| match &b.weights {
        TapWeights::Taps(taps) => norm(taps),
        _ => 1.0,
    });
    let largest = largest.fold(norm(model.a()), f64::max);
    assert!(largest <= 0.9 && largest > 0.5, "{largest}");
}

#[test]
fn prices_of_layers_may_differ_and_a_second_run_finds_what_the_first_kept() {
    let u = images(400);
    let common = TrainSettings {
        target_sparsity: Some(0.5),
        rows: RowSettings { bounds: Some(Bounds::Off), ..Default::default() },
        ..TrainSettings::default()
    };
    let settings = TrainSettings { model: ModelSettings { allocate: 2, ..common.model.clone() }, ..common.clone() };
    let dense = Network::from_onnx(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/fashion_fc.onnx")).unwrap();
    // Five layers with weights, the shortcut being a part of the layer that it is added to; and four dense ones.
    for (network, layers) in [(&network(), 5), (&dense, 4)] {
        let notes = Notes::default();
        let Trained { model, report } = trained(network, &u, &settings, 2, &notes);
        let sparsity = model.sparsity().sparsity;
        assert!((sparsity - 0.5).abs() <= 0.003, "{sparsity} {:?}", report.path);
        let found = report.allocation.unwrap();
        assert!(0.0 < found.after && found.after <= found.before, "{found:?}");
        assert_eq!(found.factors.len(), layers, "{found:?}");
        assert_eq!(found.after < found.before, found.factors.iter().any(|(_, factor)| *factor != 1.0), "{found:?}");
        assert!(found.factors.iter().all(|(_, factor)| (0.1..10.0).contains(factor)), "{found:?}");
        // Of what was tried the answer alone is kept, and it is enough.
        assert_eq!(notes.0.lock().unwrap().keys().filter(|key| key.contains("allocation")).count(), 1);
        for keep in [&notes as &dyn Keep, &Forget] {
            let again = trained(network, &u, &settings, 1, keep);
            assert_eq!(again.report.allocation.as_ref(), Some(&found));
            assert_eq!(again.model.to_bytes(), model.to_bytes());
        }
    }
    let network = network();
    let refused = |u: &Matrix<f32>, settings: TrainSettings| {
        let baseline = ImplicitModel::from_network(&network).unwrap();
        let source = Collected::new(&network, u).unwrap();
        let preprocessing = Preprocessing::default();
        let input = TrainInput { source: &source, baseline: Some(&baseline), importance: None, preprocessing };
        train(&input, &settings, &mut Run::default()).unwrap_err().to_string()
    };
    let message = refused(&u, TrainSettings { target_sparsity: None, ..settings.clone() });
    assert!(message.contains("allocate") && message.contains("target sparsity"), "{message}");
    assert!(
        refused(
            &u,
            TrainSettings { model: ModelSettings { cascade: false, ..settings.model.clone() }, ..settings.clone() }
        )
        .contains("cascade")
    );
    assert!(
        refused(
            &u,
            TrainSettings { model: ModelSettings { robust_rounds: 1, ..settings.model.clone() }, ..settings.clone() }
        )
        .contains("robust")
    );
    let connectivity = Connectivity::Full;
    let cyclic = TrainSettings { allowed: AllowedWeights { connectivity, ..Default::default() }, ..settings.clone() };
    assert!(refused(&u, cyclic).contains("move between layers"));
    assert!(refused(&images(99), settings.clone()).contains("100 samples"));
}

/// Three groups of rows: too few for prices that are steered from group to group to make up for what the first ones missed.
#[test]
fn a_network_of_few_groups_hits_low_and_high_targets() {
    let network =
        Network::from_onnx(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/fashion_cnn.onnx")).unwrap();
    let u = images(500);
    for target in [0.3, 0.5, 0.8] {
        let settings = TrainSettings {
            target_sparsity: Some(target),
            rows: RowSettings { bounds: Some(Bounds::Off), ..Default::default() },
            ..TrainSettings::default()
        };
        let sparsity = trained(&network, &u, &settings, 2, &Forget).model.sparsity().sparsity;
        assert!((sparsity - target).abs() <= 0.002, "{sparsity} for {target}");
    }
}

/// Where the user's CIFAR-100 is: `train.bin` and `test.bin`, gzipped or not.
fn cifar() -> Option<[PathBuf; 2]> {
    let folder = PathBuf::from(std::env::var_os("SIMPLICIT_CIFAR100")?);
    let find = |name: &str| {
        [format!("{name}.bin"), format!("{name}.bin.gz")].map(|n| folder.join(n)).into_iter().find(|p| p.exists())
    };
    Some([find("train")?, find("test")?])
}

#[test]
fn resnet_20_on_cifar_100() {
    let Some([train_file, test_file]) = cifar() else {
        eprintln!("skipped: set SIMPLICIT_CIFAR100 to the folder with train.bin and test.bin");
        return;
    };
    let network =
        Network::from_onnx(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/resnet20_cifar100.onnx")).unwrap();
    let preprocessing = Preprocessing {
        scale: 1.0 / 255.0,
        mean: vec![0.50707516, 0.48654887, 0.44091784],
        std: vec![0.26733429, 0.25643846, 0.27615047],
    };
    let open =
        |path: &Path| Inputs::new(Array::open(path).unwrap(), Some(preprocessing.clone()), &Selection::all()).unwrap();
    let u = open(&train_file).rows(0..1000).unwrap();
    let settings = TrainSettings { target_sparsity: Some(0.5), ..TrainSettings::default() };
    let Trained { model, .. } = trained(&network, &u, &settings, 2, &Forget);
    assert!((model.sparsity().sparsity - 0.5).abs() <= 0.002, "{}", model.sparsity().sparsity);
    let test = open(&test_file).rows(0..2000).unwrap();
    let labels = Labels::read(&test_file, &Selection::all()).unwrap();
    let settings = EquilibriumSettings { threads: Threads::new(2), ..Default::default() };
    let y = Equilibrium::new(&model, settings).unwrap().outputs(&test).unwrap().y;
    let of_model = accuracy(&y, &labels.as_slice()[..2000]).unwrap();
    let of_network = accuracy(&network.forward(&test).unwrap(), &labels.as_slice()[..2000]).unwrap();
    assert!(of_model > of_network - 0.015, "{of_model} against {of_network}");
}
