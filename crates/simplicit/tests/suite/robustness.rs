//! Attacks and certificates on real models: FashionMNIST's network as it is, made sparse, and made sparse and cyclic.

#![allow(clippy::unwrap_used, clippy::panic)]

use crate::common::data;
use simplicit::arrays::{Array, Inputs, Labels, Selection};
use simplicit::attack::{Attack, AttackInput, AttackReport, AttackSettings, Classifier, Gradient, Method, attack};
use simplicit::certify::{CertifyReport, CertifySettings, certify, sensitivity};
use simplicit::linalg::Matrix;
use simplicit::model::ImplicitModel;
use simplicit::network::Network;
use simplicit::parallel::{Cancel, Threads};
use simplicit::problem::Connectivity;
use simplicit::problem::penalty::L1;
use simplicit::states::{Collected, InputSource};
use simplicit::train::{
    AllowedWeights, Bounds, Forget, ModelSettings, Objective, RowSettings, Run, TrainInput, TrainSettings, train,
};

fn images(name: &str, samples: usize) -> (Inputs, Matrix<f32>) {
    let inputs = Inputs::new(Array::open(data(name)).unwrap(), None, &Selection::all()).unwrap();
    let u = inputs.rows(0..samples).unwrap();
    (inputs, u)
}

struct Setting {
    network: Network,
    inputs: Inputs,
    u: Matrix<f32>,
    labels: Vec<u32>,
}

fn setting(samples: usize) -> Setting {
    setting_of("fashion_fc.onnx", samples)
}

fn setting_of(network: &str, samples: usize) -> Setting {
    let (inputs, u) = images("fashion_test_images.idx.gz", samples);
    let labels = Labels::read(data("fashion_test_labels.idx.gz"), &Selection::all()).unwrap();
    Setting {
        network: Network::from_onnx(data(network)).unwrap(),
        inputs,
        u,
        labels: labels.as_slice()[..samples].to_vec(),
    }
}

impl Setting {
    fn attack(&self, model: &ImplicitModel, settings: &AttackSettings) -> AttackReport {
        let (target, baseline) = (Classifier::new(model).unwrap(), Classifier::of_network(&self.network).unwrap());
        let input = AttackInput {
            target: &target,
            baseline: Some(&baseline),
            inputs: &self.u,
            labels: &self.labels,
            per_feature: self.inputs.per_feature(),
            sample_shape: self.inputs.sample_shape(),
        };
        attack(&input, settings, Threads::new(2), &Cancel::new(), |_| {}).unwrap()
    }

    fn certify(&self, model: &ImplicitModel, epsilon: &[f64]) -> CertifyReport {
        let settings = CertifySettings { epsilon: epsilon.to_vec(), ..CertifySettings::default() };
        let (features, cancel) = (self.inputs.per_feature(), Cancel::new());
        certify(model, &self.u, &self.labels, features, &settings, Threads::new(2), &cancel, |_| {}).unwrap()
    }

    fn train(&self, settings: &TrainSettings) -> ImplicitModel {
        let (_, u) = images("fashion_train_images.idx.gz", 400);
        let baseline = ImplicitModel::from_network(&self.network).unwrap();
        let source = Collected::new(&self.network, &u).unwrap();
        let input = TrainInput {
            source: &source,
            baseline: Some(&baseline),
            importance: None,
            preprocessing: self.inputs.preprocessing().clone(),
        };
        let cancel = Cancel::new();
        let mut run = Run { threads: Threads::new(2), cancel: &cancel, keep: &Forget, progress: &mut |_| {} };
        train(&input, settings, &mut run).unwrap().model
    }
}

fn l1(beta: f64) -> TrainSettings {
    TrainSettings {
        objective: Objective::Convex(std::sync::Arc::new(L1::new(beta).unwrap())),
        strength: 1.0,
        rows: RowSettings { rounds: 1, refit: false, ..Default::default() },
        ..TrainSettings::default()
    }
}

#[test]
fn no_attack_beats_a_certificate_of_a_real_model() {
    let setting = setting(160);
    let epsilon: Vec<f64> = [0.25, 1.0, 2.0, 4.0, 8.0].iter().map(|k| k / 255.0).collect();
    let cyclic = TrainSettings {
        allowed: AllowedWeights { connectivity: Connectivity::NoSelfLoop, kappa: Some(0.5), ..l1(3e-3).allowed },
        ..l1(3e-3)
    };
    let models =
        [ImplicitModel::from_network(&setting.network).unwrap(), setting.train(&l1(1e-3)), setting.train(&cyclic)];
    assert!(models[1].well_posedness().acyclic && !models[2].well_posedness().acyclic);
    certificates_hold(&setting, &models, &epsilon);
}

#[test]
fn no_attack_beats_a_certificate_of_real_convolutions() {
    let setting = setting_of("fashion_cnn.onnx", 160);
    let epsilon: Vec<f64> = [0.25, 1.0, 4.0].iter().map(|k| k / 255.0).collect();
    let models = [ImplicitModel::from_network(&setting.network).unwrap(), setting.train(&l1(1e-3))];
    assert!(models[1].sparsity().sparsity > 0.1, "{:?}", models[1].sparsity());
    certificates_hold(&setting, &models, &epsilon);
}

fn certificates_hold(setting: &Setting, models: &[ImplicitModel], epsilon: &[f64]) {
    for (k, model) in models.iter().enumerate() {
        let proved = setting.certify(model, epsilon);
        let settings = AttackSettings {
            epsilon: epsilon.to_vec(),
            gradients: vec![Gradient::Baseline, Gradient::Model],
            iterations: 10,
            queries: 50,
            ..AttackSettings::default()
        };
        let attacked = setting.attack(model, &settings);
        assert_eq!(proved.clean_accuracy, attacked.clean_accuracy);
        let mut certified = 0;
        for (proved, fooled) in proved.certified.iter().zip(&attacked.fooled) {
            for (proved, fooled) in proved.iter().zip(fooled) {
                certified += usize::from(*proved);
                assert!(!(*proved && *fooled), "model {k}: certified and fooled");
            }
        }
        assert!(certified > 100, "model {k}: {:?}", proved.by_bound);
        // From cheap to tight, never less; and the tight one is worth its time.
        for e in 0..epsilon.len() {
            let accuracies: Vec<f64> = proved.by_bound.iter().map(|(_, a)| a[e]).collect();
            assert!(accuracies.is_sorted(), "{accuracies:?}");
            if (0.05..=0.95).contains(&accuracies[0]) {
                assert!(accuracies[2] > accuracies[0], "model {k}: {accuracies:?}");
            }
        }
        orderings(&attacked);
    }
}

fn orderings(report: &AttackReport) {
    let find = |method, gradient| -> &Attack {
        report.attacks.iter().find(|a| a.method == method && a.gradient == Some(gradient)).unwrap()
    };
    let below = |a: &Attack, b: &Attack| a.accuracy.iter().zip(&b.accuracy).all(|(a, b)| a <= b);
    for attack in &report.attacks {
        assert!(attack.accuracy.is_sorted_by(|a, b| a >= b), "falls with ε: {attack:?}");
        assert!(attack.accuracy.iter().zip(&report.attacked_accuracy).all(|(a, worst)| worst <= a));
    }
    for method in [Method::Fgsm, Method::Pgd] {
        assert!(below(find(method, Gradient::Model), find(method, Gradient::Baseline)));
    }
    for gradient in [Gradient::Model, Gradient::Baseline] {
        assert!(below(find(Method::Pgd, gradient), find(Method::Fgsm, gradient)));
    }
}

#[test]
fn an_unlimited_attacker_brings_accuracy_below_chance() {
    let setting = setting(200);
    let model = ImplicitModel::from_network(&setting.network).unwrap();
    let settings = AttackSettings {
        epsilon: vec![1.0],
        gradients: vec![Gradient::Baseline, Gradient::Model],
        ..AttackSettings::default()
    };
    let report = setting.attack(&model, &settings);
    assert!(report.clean_accuracy > 0.8);
    assert!(report.attacked_accuracy[0] < 0.1, "{report:?}");
    // Also the search without gradients, which would see through masked ones.
    let square = report.attacks.iter().find(|a| a.method == Method::Square).unwrap();
    assert!(square.accuracy[0] < 0.1, "{square:?}");
    assert_eq!(setting.certify(&model, &[1.0]).certified_accuracy, [0.0]);
}

#[test]
fn robust_rounds_lower_the_certificates_constant() {
    let setting = setting(50);
    let constant = |settings: &TrainSettings| {
        let model = setting.train(settings);
        let found = sensitivity(&model, &[1.0; 784]).unwrap();
        // The mean constant over pairs: every path crosses B (D is empty here), so Σ over B of rows·|w|·columns.
        let mut total = 0.0;
        for i in 0..model.shape().states {
            total += model.b().row(i).map(|(_, w)| found.rows[i] * f64::from(w.abs())).sum::<f64>();
        }
        (total, model.sparsity().sparsity)
    };
    let settings = TrainSettings { target_sparsity: Some(0.8), ..l1(1e-3) };
    let (plain, sparsity) = constant(&settings);
    let (robust, other) =
        constant(&TrainSettings { model: ModelSettings { robust_rounds: 2, ..settings.model.clone() }, ..settings });
    assert!((sparsity - other).abs() < 0.005);
    assert!(robust < 0.8 * plain, "{robust} against {plain}");
}

/// The same for convolutions: prices by the certificate lower the constant at the same sparsity.
#[test]
fn robust_rounds_lower_the_constant_of_convolutions() {
    let setting = setting_of("fashion_cnn.onnx", 20);
    let constant = |settings: &TrainSettings| {
        let model = setting.train(settings);
        let found = sensitivity(&model, &[1.0; 784]).unwrap();
        // Every path crosses the one block that reads the input.
        let first = model.taps().iter().zip(&found.taps).find(|(b, _)| b.source == simplicit::network::Source::Input);
        let (block, price) = first.unwrap();
        let simplicit::model::TapWeights::Taps(taps) = &block.weights else { panic!("no taps") };
        let rows = (0..taps.rows()).flat_map(|o| taps.row(o).map(move |(j, w)| (o, j, w)));
        let total: f64 = rows.map(|(o, j, w)| f64::from(w.abs()) * price[(o, j)]).sum();
        (total, model.sparsity().sparsity)
    };
    let settings = TrainSettings { target_sparsity: Some(0.6), ..l1(1e-3) };
    let (plain, sparsity) = constant(&settings);
    let (robust, other) =
        constant(&TrainSettings { model: ModelSettings { robust_rounds: 1, ..settings.model.clone() }, ..settings });
    assert!((sparsity - other).abs() < 0.01, "{sparsity} {other}");
    assert!(robust < 0.9 * plain, "{robust} against {plain}");
}

/// Refitted by linear bounds, a sparse model has more certified on images that it did not see, at the same sparsity.
#[test]
fn a_refit_by_linear_bounds_certifies_more() {
    let epsilon = 4.0 / 255.0;
    let setting = setting(400);
    let settings = TrainSettings {
        target_sparsity: Some(0.8),
        rows: RowSettings { bounds: Some(Bounds::Off), ..Default::default() },
        model: ModelSettings { output_refit: Some(0), ..Default::default() },
        ..TrainSettings::default()
    };
    let plain = setting.train(&settings);
    let sturdy = setting.train(&TrainSettings {
        model: ModelSettings { robust_refit: Some(epsilon), ..settings.model.clone() },
        ..settings
    });
    assert_eq!(plain.sparsity().sparsity, sturdy.sparsity().sparsity);
    let certified = |model: &ImplicitModel| setting.certify(model, &[epsilon]).certified_accuracy[0];
    let (before, after) = (certified(&plain), certified(&sturdy));
    assert!(after > before + 0.03, "{after} against {before}");
}
