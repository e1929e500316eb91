use super::classifier::Loss;
use super::*;
use crate::layout::{Activation, Layer, Layout};
use crate::linalg::{Csr, Matrix};
use crate::model::{ImplicitModel, ModelParts};
use crate::network::{Network, Shape, Window};
use crate::random::Random;

fn plain(features: usize) -> PerFeature {
    PerFeature { scale: 1.0, mean: vec![0.0; features], std: vec![1.0; features] }
}

/// A cyclic model of 9 states on 12 inputs, three classes.
fn cyclic(seed: u64) -> ImplicitModel {
    let mut r = Random::new(seed);
    let n = 9;
    let mut rows = |count: usize, cols: usize, size: f64| -> Vec<Vec<(usize, f32)>> {
        (0..count).map(|_| (0..cols).map(|j| (j, (size * r.normal()) as f32)).collect()).collect()
    };
    ImplicitModel::new(ModelParts {
        a: Csr::from_rows(n, rows(n, n, 0.08)),
        b: Csr::from_rows(12, rows(n, 12, 1.0)),
        c: Csr::from_rows(n, rows(3, n, 1.0)),
        d: Csr::from_rows(12, rows(3, 12, 0.5)),
        state_bias: vec![0.1; n],
        output_bias: vec![0.0, 0.1, -0.1],
        layout: Layout::new(vec![
            Layer::dense("second", 4, Activation::Relu),
            Layer::dense("first", 5, Activation::Tanh),
        ]),
        ..Default::default()
    })
    .unwrap()
}

fn samples(count: usize, seed: u64) -> Matrix<f32> {
    let mut r = Random::new(seed);
    Matrix::from_fn(count, 12, |_, _| r.uniform() as f32)
}

/// Labels that are the model's own predictions, so that all samples are right to begin with.
fn own_labels(target: &Classifier, u: &Matrix<f32>) -> Vec<u32> {
    crate::evaluate::predictions(&target.logits(u).unwrap())
}

fn all_settings(epsilon: Vec<f64>) -> AttackSettings {
    AttackSettings {
        epsilon,
        gradients: vec![Gradient::Model, Gradient::Baseline],
        iterations: 10,
        queries: 60,
        ..AttackSettings::default()
    }
}

fn run(
    target: &Classifier,
    baseline: &Classifier,
    u: &Matrix<f32>,
    settings: &AttackSettings,
    threads: usize,
) -> AttackReport {
    let labels = own_labels(target, u);
    let per_feature = plain(12);
    let input = AttackInput {
        target,
        baseline: Some(baseline),
        inputs: u,
        labels: &labels,
        per_feature: &per_feature,
        sample_shape: &[3, 4],
    };
    attack(&input, settings, Threads::new(threads), &Cancel::new(), |_| {}).unwrap()
}

/// −log softmax in double precision, by its definition.
fn loss(target: &Classifier, u: &Matrix<f32>, label: u32) -> f64 {
    let y = target.logits(u).unwrap();
    let y: Vec<f64> = y.row(0).iter().map(|v| f64::from(*v)).collect();
    y.iter().map(|v| v.exp()).sum::<f64>().ln() - y[label as usize]
}

/// A model whose first operation takes maxima of its 12 inputs; three classes.
fn pooled() -> ImplicitModel {
    let mut r = Random::new(2);
    let mut weights = |rows, cols| Matrix::from_fn(rows, cols, |_, _| r.normal() as f32);
    let network = Network::builder(Shape::map(1, 3, 4))
        .and_then(|b| b.max_pool(Window::square(2, 1, 0)))
        .and_then(|b| b.convolution(weights(4, 4), Window::square(2, 1, 0), None))
        .and_then(|b| b.activation(Activation::Tanh))
        .and_then(|b| b.global_average())
        .and_then(|b| b.linear(weights(3, 4), None))
        .and_then(|b| b.build());
    ImplicitModel::from_network(&network.unwrap()).unwrap()
}

#[test]
fn the_gradient_points_where_the_loss_grows() {
    // Inputs of the maxima are far enough from each other for differences to stay on one side of every switch.
    let apart = Matrix::from_fn(1, 12, |_, k| (5 * k % 12) as f32 / 12.0);
    for (model, u, label) in [(cyclic(1), samples(1, 4)), (pooled(), apart)]
        .into_iter()
        .flat_map(|(model, u)| (0..3).map(move |label| (model.clone(), u.clone(), label)))
    {
        let target = Classifier::new(&model).unwrap();
        let (_, gradient) = target.loss_gradient(&u, &[label], Loss::CrossEntropy).unwrap();
        let h = 1e-2f32;
        let differences: Vec<f64> = (0..12)
            .map(|k| {
                let (mut up, mut down) = (u.clone(), u.clone());
                up[(0, k)] += h;
                down[(0, k)] -= h;
                loss(&target, &up, label) - loss(&target, &down, label)
            })
            .collect();
        // The gradients are equal up to a positive factor.
        let norm = |v: &mut dyn Iterator<Item = f64>| v.map(|x| x * x).sum::<f64>().sqrt();
        let (a, b) = (norm(&mut gradient.row(0).iter().map(|g| f64::from(*g))), norm(&mut differences.iter().copied()));
        for (g, d) in gradient.row(0).iter().zip(&differences) {
            assert!((f64::from(*g) / a - d / b).abs() < 0.02, "{g} {d}");
        }
    }
}

#[test]
fn a_saturated_softmax_still_has_a_direction() {
    let model = ImplicitModel::new(ModelParts {
        a: Csr::empty(0, 0),
        b: Csr::empty(0, 2),
        c: Csr::empty(2, 0),
        d: Csr::from_rows(2, [vec![(0, 4000.0f32)], vec![(1, 4000.0f32)]]),
        output_bias: vec![0.0; 2],
        ..Default::default()
    })
    .unwrap();
    let u = Matrix::from_vec(1, 2, vec![0.9f32, 0.1]).unwrap();
    let (_, gradient) = Classifier::new(&model).unwrap().loss_gradient(&u, &[0], Loss::CrossEntropy).unwrap();
    assert!(gradient[(0, 0)] < 0.0 && gradient[(0, 1)] > 0.0);
}

/// y = (w·u, 0): class 0 falls at exactly ε = w·u / ‖w‖₁, and every attack must find that.
#[test]
fn a_planted_adversarial_example_is_found_and_nothing_else() {
    let w = [0.5f32, -0.25, 1.0, -0.75, 0.3, 0.2];
    let model = ImplicitModel::new(ModelParts {
        a: Csr::empty(0, 0),
        b: Csr::empty(0, 6),
        c: Csr::empty(2, 0),
        d: Csr::from_rows(6, [w.iter().copied().enumerate().collect::<Vec<_>>(), vec![]]),
        output_bias: vec![0.0; 2],
        ..Default::default()
    })
    .unwrap();
    let target = Classifier::new(&model).unwrap();
    let u = Matrix::from_vec(1, 6, vec![0.6f32, 0.5, 0.5, 0.4, 0.5, 0.5]).unwrap();
    let margin: f64 = w.iter().zip(u.row(0)).map(|(w, u)| f64::from(w * u)).sum();
    let planted = margin / w.iter().map(|w| f64::from(w.abs())).sum::<f64>();
    let per_feature = plain(6);
    let input = AttackInput {
        target: &target,
        baseline: None,
        inputs: &u,
        labels: &[0],
        per_feature: &per_feature,
        sample_shape: &[6],
    };
    let settings = AttackSettings { epsilon: vec![1.01 * planted, 0.99 * planted], ..AttackSettings::default() };
    let report = attack(&input, &settings, Threads::one(), &Cancel::new(), |_| {}).unwrap();
    assert_eq!(report.attacks.len(), 3);
    for attack in &report.attacks {
        assert_eq!(attack.accuracy, [0.0, 1.0], "{attack:?}");
    }
    // Changing two of six pixels is not enough.
    let half = AttackSettings { pixels: 0.34, ..settings };
    let report = attack(&input, &half, Threads::one(), &Cancel::new(), |_| {}).unwrap();
    assert_eq!(report.attacked_accuracy, [1.0, 1.0]);
}

#[test]
fn orderings_hold_and_threads_do_not_matter() {
    let target = Classifier::new(&cyclic(2)).unwrap();
    let baseline = Classifier::new(&cyclic(3)).unwrap();
    let u = samples(150, 5);
    let settings = all_settings(vec![0.2, 0.02, 0.05, 0.1]);
    let report = run(&target, &baseline, &u, &settings, 1);
    assert_eq!(report, run(&target, &baseline, &u, &settings, 3));
    assert_eq!(report.clean_accuracy, 1.0);
    let of = |method, gradient| {
        let found = report.attacks.iter().find(|a| a.method == method && a.gradient == gradient);
        found.unwrap().accuracy.clone()
    };
    let ascending = [1, 2, 3, 0];
    let falls = |a: &[f64]| ascending.windows(2).all(|w| a[w[1]] <= a[w[0]]);
    let below = |a: &[f64], b: &[f64]| a.iter().zip(b).all(|(a, b)| a <= b);
    for attack in &report.attacks {
        assert!(falls(&attack.accuracy) && below(&report.attacked_accuracy, &attack.accuracy), "{attack:?}");
    }
    for method in [Method::Fgsm, Method::Pgd] {
        assert!(below(&of(method, Some(Gradient::Model)), &of(method, Some(Gradient::Baseline))));
    }
    for gradient in [Gradient::Model, Gradient::Baseline] {
        assert!(below(&of(Method::Pgd, Some(gradient)), &of(Method::Fgsm, Some(gradient))));
    }
    // The attacks are effective: white box finds more than transfer, and all find something.
    assert!(of(Method::Pgd, Some(Gradient::Model))[2] < of(Method::Pgd, Some(Gradient::Baseline))[2]);
    assert!(report.attacks.iter().all(|a| a.accuracy[0] < 1.0), "{report:?}");
    // An ε alone gives what it gives in a longer list, except that points from smaller ε are not tried.
    let alone = run(&target, &baseline, &u, &all_settings(vec![0.02]), 2);
    assert_eq!(alone.attacked_accuracy[0], report.attacked_accuracy[1]);
}

#[test]
fn what_does_not_fit_is_refused() {
    let target = Classifier::new(&cyclic(2)).unwrap();
    let u = samples(2, 5);
    let per_feature = plain(12);
    let input = AttackInput {
        target: &target,
        baseline: None,
        inputs: &u,
        labels: &[0, 1],
        per_feature: &per_feature,
        sample_shape: &[12],
    };
    let message = |input: &AttackInput, settings: &AttackSettings| {
        attack(input, settings, Threads::one(), &Cancel::new(), |_| {}).unwrap_err().to_string()
    };
    let ok = AttackSettings::default();
    assert!(message(&AttackInput { labels: &[0], ..input }, &ok).contains("expected 2, one for each input, got 1"));
    assert!(message(&AttackInput { labels: &[0, 3], ..input }, &ok).contains("classes below 3, got 3"));
    for bad in [
        AttackSettings { epsilon: vec![], ..ok.clone() },
        AttackSettings { epsilon: vec![-0.1], ..ok.clone() },
        AttackSettings { epsilon: vec![f64::NAN], ..ok.clone() },
        AttackSettings { pixels: 0.0, ..ok.clone() },
        AttackSettings { iterations: 0, ..ok.clone() },
        AttackSettings { gradients: vec![Gradient::Baseline], ..ok.clone() },
    ] {
        assert!(message(&input, &bad).contains("expected"));
    }
    let ignored = AttackSettings { step: Some(0.1), methods: vec![Method::Fgsm, Method::Square], ..ok.clone() };
    assert!(message(&input, &ignored).contains("step: expected none without PGD"));
    let cancel = Cancel::new();
    cancel.cancel();
    assert!(matches!(attack(&input, &ok, Threads::one(), &cancel, |_| {}), Err(Error::Cancelled)));
}
