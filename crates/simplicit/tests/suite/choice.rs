//! Layers that are left out of training keep the baseline's weights to the bit, are counted as what stays, and are named.
#![allow(clippy::unwrap_used, clippy::panic)] // helpers of tests are tests

use simplicit::Error;
use simplicit::layout::Activation;
use simplicit::linalg::{Csr, Matrix};
use simplicit::model::{ImplicitModel, TapWeights, Target};
use simplicit::network::{Network, Shape};
use simplicit::parallel::{Cancel, Threads};
use simplicit::problem::Connectivity;
use simplicit::problem::penalty::L1;
use simplicit::random::Random;
use simplicit::states::Collected;
use simplicit::train::{
    AllowedWeights, Bounds, Forget, Objective, RowSettings, Run, TrainInput, TrainSettings, Trained, importance, path,
    train,
};

use crate::networks::{SIDE, mobile};

fn normal(rows: usize, cols: usize, scale: f64, seed: u64) -> Matrix<f32> {
    let mut r = Random::new(seed);
    Matrix::from_fn(rows, cols, |_, _| (scale * r.normal()) as f32)
}

fn dense() -> Network {
    let mut builder = Network::builder(Shape::Vector(10)).unwrap();
    for (k, (rows, cols)) in [(14, 10), (12, 14)].into_iter().enumerate() {
        builder = builder.linear(normal(rows, cols, 0.4, k as u64), Some(vec![0.1; rows])).unwrap();
        builder = builder.activation(Activation::Relu).unwrap();
    }
    builder.linear(normal(5, 12, 0.4, 9), None).unwrap().build().unwrap()
}

fn result(network: &Network, u: &Matrix<f32>, settings: &TrainSettings) -> simplicit::Result<Trained> {
    with(network, u, |input, run| train(input, settings, run))
}

fn with<T>(network: &Network, u: &Matrix<f32>, work: impl Fn(&TrainInput, &mut Run) -> T) -> T {
    let baseline = ImplicitModel::from_network(network).unwrap();
    let (cancel, threads) = (Cancel::new(), Threads::new(2));
    let weights = importance(network, u, 2, 0, threads, &cancel).unwrap();
    let source = Collected::new(network, u).unwrap();
    let input = TrainInput {
        source: &source,
        baseline: Some(&baseline),
        importance: Some(&weights),
        preprocessing: Default::default(),
    };
    work(&input, &mut Run { threads, cancel: &cancel, keep: &Forget, progress: &mut |_| {} })
}

/// All weights of a layer, or of the outputs, with their places.
fn weights(model: &ImplicitModel, target: Target) -> Vec<(usize, usize, u32)> {
    let (from_states, from_inputs, rows, biases) = match target {
        Target::Layer(k) => {
            let rows = model.layout().row_range(k);
            (model.a(), model.b(), model.layout().range(k), &model.state_bias()[rows])
        }
        Target::Output => (model.c(), model.d(), 0..model.shape().outputs, model.output_bias()),
    };
    let of = |m: &Csr<f32>, i: usize| m.row(i).map(|(j, v)| (i, j, v.to_bits())).collect::<Vec<_>>();
    let mut all: Vec<(usize, usize, u32)> = Vec::new();
    for i in rows {
        all.extend(of(from_states, i));
        all.extend(of(from_inputs, i));
    }
    for block in model.taps().iter().filter(|b| b.target == target) {
        if let TapWeights::Taps(taps) = &block.weights {
            (0..taps.rows()).for_each(|i| all.extend(of(taps, i)));
        }
    }
    all.extend(biases.iter().enumerate().map(|(i, b)| (i, usize::MAX, b.to_bits())));
    all
}

fn names(model: &ImplicitModel) -> Vec<String> {
    model.layout().layers().iter().map(|l| l.name.clone()).collect()
}

/// Layers named in `kept` are the baseline's to the bit, no other layer with weights is; counts follow.
fn require(trained: &Trained, network: &Network, kept: &[&str]) {
    let (model, baseline) = (&trained.model, ImplicitModel::from_network(network).unwrap());
    let all = (0..names(model).len()).map(Target::Layer).chain([Target::Output]);
    let mut stays = 0;
    for target in all {
        let (now, before) = (weights(model, target), weights(&baseline, target));
        let name = match target {
            Target::Layer(k) => names(model)[k].clone(),
            Target::Output => "output".to_string(),
        };
        let nonzero = |w: &[(usize, usize, u32)]| w.iter().filter(|w| f32::from_bits(w.2) != 0.0).count();
        if kept.contains(&name.as_str()) {
            assert_eq!(now, before, "{name} was left out");
            stays += nonzero(&before);
        } else if nonzero(&before) > 20 {
            assert!(nonzero(&now) < nonzero(&before), "{name} was trained");
        }
    }
    let (sparsity, mut listed) = (model.sparsity(), model.metadata().kept.clone());
    listed.sort();
    assert_eq!(listed, kept);
    let constants: usize = model.layout().layers().iter().map(|l| l.parameters()).sum();
    assert_eq!(sparsity.fixed, (stays + constants) as u64);
    let of_others = (sparsity.nonzeros - sparsity.fixed) as f64 / (sparsity.baseline_nonzeros - sparsity.fixed) as f64;
    assert!((sparsity.trainable_sparsity - (1.0 - of_others)).abs() < 1e-12);
    assert_eq!(&ImplicitModel::from_bytes(&model.to_bytes(), "memory").unwrap(), model);
    assert!(trained.report.training_error.is_finite() && trained.report.training_error > 0.0);
}

#[test]
fn dense_layers_left_out_survive_stages_and_the_refit_of_all_weights() {
    let (network, u) = (dense(), normal(600, 10, 1.0, 3));
    let layers = names(&ImplicitModel::from_network(&network).unwrap());
    let second = layers[0].as_str();
    for (include, exclude, kept) in [
        (vec![], vec![second.to_string()], vec![second]),
        (vec![], vec!["output".to_string()], vec!["output"]),
        (vec![layers[1].clone()], vec![], vec!["output", second]),
    ] {
        let target = if kept.len() == 2 { 0.3 } else { 0.5 };
        let settings = TrainSettings {
            target_sparsity: Some(target),
            allowed: AllowedWeights { include, exclude, ..Default::default() },
            ..Default::default()
        };
        let trained = result(&network, &u, &settings).unwrap();
        let mut kept = kept.clone();
        kept.sort_unstable();
        require(&trained, &network, &kept);
        let sparsity = trained.model.sparsity().sparsity;
        assert!((sparsity - target).abs() <= 0.01, "{kept:?}: {sparsity}");
    }
    // A whole curve, in stages.
    let settings = TrainSettings {
        allowed: AllowedWeights { exclude: vec![second.to_string()], ..Default::default() },
        ..Default::default()
    };
    for trained in with(&network, &u, |input, run| path(input, None, &[0.3, 0.5], &settings, run)).unwrap() {
        require(&trained, &network, &[second]);
    }
}

#[test]
fn convolutions_are_left_out_by_kind_and_by_name() {
    let (network, u) = (mobile(), normal(200, 3 * SIDE * SIDE, 1.0, 4));
    let baseline = ImplicitModel::from_network(&network).unwrap();
    let grouped: Vec<String> = (0..names(&baseline).len())
        .filter(|&k| baseline.taps().iter().any(|b| b.target == Target::Layer(k) && b.groups > 1))
        .map(|k| names(&baseline)[k].clone())
        .collect();
    assert_eq!(grouped.len(), 2);
    let exclude = vec!["grouped convolution".to_string(), "output".to_string()];
    let settings = TrainSettings {
        target_sparsity: Some(0.3),
        allowed: AllowedWeights { exclude, ..Default::default() },
        ..Default::default()
    };
    let trained = result(&network, &u, &settings).unwrap();
    let mut kept: Vec<&str> = grouped.iter().map(String::as_str).chain(["output"]).collect();
    kept.sort_unstable();
    require(&trained, &network, &kept);
    let sparsity = trained.model.sparsity().sparsity;
    assert!((sparsity - 0.3).abs() <= 0.01, "{sparsity}");
    // At a given price there is no search, and the same layers stay.
    let settings = TrainSettings {
        strength: 1e-4,
        allowed: AllowedWeights { include: vec!["convolution".to_string()], ..Default::default() },
        ..Default::default()
    };
    let trained = result(&network, &u, &settings).unwrap();
    assert!(grouped.iter().all(|name| trained.model.metadata().kept.contains(name)));
}

#[test]
fn a_choice_that_makes_no_sense_is_refused_with_what_to_do() {
    let (network, u) = (dense(), normal(50, 10, 1.0, 5));
    let say = |settings: TrainSettings| match result(&network, &u, &settings) {
        Err(error @ Error::Setting { .. }) => error.to_string(),
        other => panic!("{:?}", other.map(|t| t.report)),
    };
    let exclude = |pattern: &str| TrainSettings {
        allowed: AllowedWeights { exclude: vec![pattern.into()], ..Default::default() },
        ..Default::default()
    };
    let message = say(exclude("nothing*"));
    assert!(message.contains("exclude") && message.contains("\"nothing*\", which matches no layer"), "{message}");
    assert!(message.contains("output"), "{message}");
    let message = say(exclude("*"));
    assert!(message.contains("at least one layer to train"), "{message}");
    let message = say(TrainSettings { target_sparsity: Some(0.9), ..exclude("output") });
    assert!(message.contains("target-sparsity") && message.contains("60 parameters stay"), "{message}");
    let message = say(TrainSettings {
        allowed: AllowedWeights { connectivity: Connectivity::Full, ..exclude("output").allowed },
        ..exclude("output")
    });
    assert!(message.contains("solved one by one"), "{message}");
    let message = say(TrainSettings {
        allowed: AllowedWeights { kappa: Some(0.9), ..exclude("output").allowed },
        ..exclude("output")
    });
    assert!(message.contains("kappa"), "{message}");
}

/// What the walk would not look at is refused before it begins.
#[test]
fn settings_that_would_be_ignored_are_refused() {
    let (network, u) = (dense(), normal(50, 10, 1.0, 5));
    let say = |settings: TrainSettings| result(&network, &u, &settings).unwrap_err().to_string();
    let l1 = || Objective::Convex(std::sync::Arc::new(L1::new(1e-3).unwrap()));
    let rows = |rows: RowSettings| TrainSettings { rows, ..Default::default() };
    let message = say(rows(RowSettings { refit: false, ..Default::default() }));
    assert!(message.starts_with("refit: expected on with cardinality"), "{message}");
    for bounds in [Bounds::Sampled, Bounds::All] {
        let settings = rows(RowSettings { bounds: Some(bounds), ..Default::default() });
        let message = say(TrainSettings { objective: l1(), ..settings });
        assert!(message.starts_with("bounds: expected none or off without cardinality"), "{message}");
    }
    let message = say(rows(RowSettings { normalise: false, ..Default::default() }));
    assert!(message.starts_with("normalise: expected on with row weights"), "{message}");
}
