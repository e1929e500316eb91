use super::*;
use crate::attack::{AttackInput, AttackSettings, Classifier, ModelClassifier, attack};
use crate::layout::{Activation, Layer, Layout};
use crate::linalg::Csr;
use crate::model::ModelParts;
use crate::model::unrolled_tests::convolutional;
use crate::random::Random;

const INPUTS: usize = 10;
const STATES: usize = 14;
const CLASSES: usize = 3;

/// Three layers of two activations; `cycles` allows A everywhere, otherwise only from earlier layers (with skips).
fn random_model(r: &mut Random, cycles: bool, size: f64) -> ImplicitModel {
    let layer = |i: usize| {
        if i < 4 {
            0
        } else if i < 9 {
            1
        } else {
            2
        }
    };
    let kinds = [Activation::Relu, Activation::Relu, Activation::Tanh, Activation::leaky_relu(0.2).unwrap()];
    let density = 0.3 + 0.7 * r.uniform();
    let mut rows = |count: usize, cols: usize, size: f64, keep: &dyn Fn(usize, usize) -> bool| {
        (0..count)
            .map(|i| {
                let mut row: Vec<(usize, f32)> = Vec::new();
                for j in (0..cols).filter(|&j| keep(i, j)) {
                    if r.uniform() < density {
                        row.push((j, (size * r.normal()) as f32));
                    }
                }
                row
            })
            .collect::<Vec<_>>()
    };
    let all = |_: usize, _: usize| true;
    let a = if cycles {
        // Every row sum below 0.9.
        let mut a = rows(STATES, STATES, 1.0, &all);
        for row in &mut a {
            let sum: f32 = row.iter().map(|(_, v)| v.abs()).sum();
            row.iter_mut().for_each(|(_, v)| *v *= 0.9 / sum.max(0.9));
        }
        a
    } else {
        rows(STATES, STATES, size, &|i, j| layer(j) > layer(i))
    };
    let b = rows(STATES, INPUTS, size, &all);
    let c = rows(CLASSES, STATES, size, &all);
    let d = rows(CLASSES, INPUTS, 0.3 * size, &all);
    let kind = |r: &mut Random| kinds[r.below(kinds.len())];
    let layout = Layout::new(vec![
        Layer::dense("third", 4, kind(r)),
        Layer::dense("second", 5, Activation::Relu),
        Layer::dense("first", 5, kind(r)),
    ]);
    ImplicitModel::new(ModelParts {
        a: Csr::from_rows(STATES, a),
        b: Csr::from_rows(INPUTS, b),
        c: Csr::from_rows(STATES, c),
        d: Csr::from_rows(INPUTS, d),
        state_bias: (0..STATES).map(|_| (0.3 * r.normal()) as f32).collect(),
        output_bias: vec![0.1, 0.0, -0.1],
        layout,
        ..Default::default()
    })
    .unwrap()
}

fn per_feature() -> PerFeature {
    features(INPUTS)
}

fn features(inputs: usize) -> PerFeature {
    let std = (0..inputs).map(|k| 0.5 + 0.1 * (k % INPUTS) as f64).collect();
    PerFeature { scale: 1.0, mean: vec![0.25; inputs], std }
}

/// u of raw samples in [0, 1], some values at the ends.
fn samples(r: &mut Random, count: usize) -> Matrix<f32> {
    samples_of(r, count, &per_feature())
}

fn samples_of(r: &mut Random, count: usize, p: &PerFeature) -> Matrix<f32> {
    Matrix::from_fn(count, p.std.len(), |_, k| {
        let raw = (1.4 * r.uniform() - 0.2).clamp(0.0, 1.0);
        ((raw - p.mean[k]) / p.std[k]) as f32
    })
}

fn report(model: &ImplicitModel, u: &Matrix<f32>, labels: &[u32], epsilon: &[f64], threads: usize) -> CertifyReport {
    let settings = CertifySettings { epsilon: epsilon.to_vec(), bound: Bound::Linear };
    let features = features(u.cols());
    certify(model, u, labels, &features, &settings, Threads::new(threads), &Cancel::new(), |_| {}).unwrap()
}

/// Attacks a model's samples with everything; what is certified, and how many are fooled, per ε.
fn nothing_beats(r: &mut Random, model: &ImplicitModel, epsilon: &[f64], round: usize) -> (Vec<usize>, usize) {
    let target = ModelClassifier::new(model).unwrap();
    let features = features(model.shape().inputs);
    let u = samples_of(r, 24, &features);
    let labels = crate::evaluate::predictions(&target.logits(&u).unwrap());
    let proved = report(model, &u, &labels, epsilon, 1);
    let input = AttackInput {
        target: &target,
        baseline: None,
        inputs: &u,
        labels: &labels,
        per_feature: &features,
        sample_shape: &[u.cols()],
    };
    let settings = AttackSettings { epsilon: epsilon.to_vec(), iterations: 10, queries: 40, ..Default::default() };
    let attacked = attack(&input, &settings, Threads::one(), &Cancel::new(), |_| {}).unwrap();
    let (mut certified, mut fooled) = (vec![0; epsilon.len()], 0);
    for s in 0..u.rows() {
        for (e, &size) in epsilon.iter().enumerate() {
            certified[e] += usize::from(proved.certified[s][e]);
            fooled += usize::from(attacked.fooled[s][e]);
            assert!(!(proved.certified[s][e] && attacked.fooled[s][e]), "round {round} sample {s} ε {size}");
            if !proved.certified[s][e] {
                continue;
            }
            let points = Matrix::from_fn(40, u.cols(), |turn, k| {
                let (low, high) = crate::attack::limits(u[(s, k)], features.mean[k], features.std[k], size);
                let at = if turn < 30 { f64::from(u8::from(r.uniform() < 0.5)) } else { r.uniform() };
                (low + at * (high - low)) as f32
            });
            let wrong = crate::evaluate::predictions(&target.logits(&points).unwrap());
            assert!(wrong.iter().all(|p| *p == labels[s]), "round {round} sample {s} ε {size}");
        }
    }
    (certified, fooled)
}

/// No attack, no corner and no random point of the box beats a certificate.
#[test]
fn nothing_beats_a_certificate() {
    let mut r = Random::new(7);
    let epsilon = [0.004, 0.015, 0.05, 0.15];
    let (mut certified, mut fooled) = ([[0usize; 4]; 3], 0);
    for round in 0..60 {
        let kind = round % 3;
        let model = match kind {
            2 => ImplicitModel::from_network(&convolutional(round as u64, 3.0)).unwrap(),
            _ => random_model(&mut r, kind == 1, 0.7),
        };
        let found = nothing_beats(&mut r, &model, &epsilon, round);
        certified[kind].iter_mut().zip(&found.0).for_each(|(c, f)| *c += f);
        fooled += found.1;
    }
    // The test says something: many are certified, many are fooled, of acyclic, cyclic and convolutional models.
    for kind in certified {
        assert!(kind[0] > 300 && kind[1] > 150 && kind[2] > 20, "{certified:?}");
    }
    assert!(fooled > 300, "{fooled}");
}

/// The global constant from dense matrices, by a Neumann series.
#[test]
fn the_global_bound_is_the_formula() {
    let mut r = Random::new(11);
    for round in 0..10 {
        let model = random_model(&mut r, round % 2 == 1, 0.7);
        let features = per_feature();
        let certifier = Certifier::new(&model, &features).unwrap();
        let (a, b) = (model.a().to_dense(), model.b().to_dense());
        let from_inputs: Vec<f64> =
            (0..STATES).map(|i| (0..INPUTS).map(|k| f64::from(b[(i, k)].abs()) / features.std[k]).sum()).collect();
        let mut t = from_inputs.clone();
        for _ in 0..3000 {
            t = (0..STATES)
                .map(|i| from_inputs[i] + (0..STATES).map(|j| f64::from(a[(i, j)].abs()) * t[j]).sum::<f64>())
                .collect();
        }
        let (c, d) = (model.c().to_dense(), model.d().to_dense());
        for i in 0..CLASSES {
            for j in 0..CLASSES {
                let expected: f64 = (0..STATES).map(|k| f64::from((c[(i, k)] - c[(j, k)]).abs()) * t[k]).sum::<f64>()
                    + (0..INPUTS).map(|k| f64::from((d[(i, k)] - d[(j, k)]).abs()) / features.std[k]).sum::<f64>();
                let got = certifier.reach.of_pair(i, j);
                assert!(got >= expected * (1.0 - 1e-6) && got <= expected * 1.02, "{got} against {expected}");
            }
        }
        // rows ⊗ columns is the derivative: the certificate is homogeneous in B, C, D (each path has one of B or D).
        let found = sensitivity(&model, &features.std).unwrap();
        let mean = |model: &ImplicitModel| {
            let certifier = Certifier::new(model, &features).unwrap();
            (0..CLASSES)
                .flat_map(|i| (0..i).map(move |j| (i, j)))
                .map(|(i, j)| certifier.reach.of_pair(i, j))
                .sum::<f64>()
                / 3.0
        };
        let h = 1e-3;
        for _ in 0..20 {
            let (i, j) = (r.below(STATES), r.below(INPUTS));
            let mut parts = model.clone().into_parts();
            let mut dense = b.clone();
            let sign = if dense[(i, j)] < 0.0 { -1.0 } else { 1.0 };
            dense[(i, j)] += sign * h as f32;
            parts.b = Csr::from_dense(&dense);
            let slope = (mean(&ImplicitModel::new(parts).unwrap()) - mean(&model)) / h;
            let expected = found.rows[i] * found.columns[STATES + j];
            assert!((slope - expected).abs() < 0.02 * expected + 1e-3, "{slope} against {expected}");
        }
    }
}

#[test]
fn each_bound_adds_to_the_one_before_and_threads_do_not_matter() {
    let mut r = Random::new(3);
    let epsilon = [0.05, 0.002, 0.01];
    let mut totals = [0.0; 3];
    for round in 0..12 {
        let model = random_model(&mut r, round % 3 == 1, 0.7);
        let u = samples(&mut r, 70);
        let target = ModelClassifier::new(&model).unwrap();
        let mut labels = crate::evaluate::predictions(&target.logits(&u).unwrap());
        labels[0] = (labels[0] + 1) % 3;
        let proved = report(&model, &u, &labels, &epsilon, 1);
        assert_eq!(proved, report(&model, &u, &labels, &epsilon, 3));
        assert!((proved.clean_accuracy - 69.0 / 70.0).abs() < 1e-12 && !proved.certified[0].contains(&true));
        for (k, (_, accuracy)) in proved.by_bound.iter().enumerate() {
            totals[k] += accuracy.iter().sum::<f64>();
            assert!(accuracy[1] >= accuracy[2] && accuracy[2] >= accuracy[0], "falls with ε: {accuracy:?}");
        }
        for pair in proved.by_bound.windows(2) {
            assert!(pair[0].1.iter().zip(&pair[1].1).all(|(a, b)| a <= b));
        }
    }
    assert!(totals[0] < totals[1] && totals[1] < totals[2], "{totals:?}");
}

#[test]
fn a_model_not_shown_to_be_well_posed_is_refused() {
    let model = ImplicitModel::new(ModelParts {
        a: Csr::from_rows(1, [vec![(0, 1.5f32)]]),
        b: Csr::from_rows(1, [vec![(0, 1.0f32)]]),
        c: Csr::from_rows(1, [vec![(0, 1.0f32)], vec![]]),
        d: Csr::empty(2, 1),
        state_bias: vec![0.0],
        output_bias: vec![0.0; 2],
        layout: Layout::new(vec![Layer::dense("l", 1, Activation::Relu)]),
        ..Default::default()
    })
    .unwrap();
    let u = Matrix::zeros(1, 1);
    let features = PerFeature { scale: 1.0, mean: vec![0.0], std: vec![1.0] };
    let run = |labels: &[u32]| {
        let settings = CertifySettings::default();
        certify(&model, &u, labels, &features, &settings, Threads::one(), &Cancel::new(), |_| {})
            .unwrap_err()
            .to_string()
    };
    assert!(run(&[0]).contains("λ_pf(|A|) only shown to be at most 1.5"), "{}", run(&[0]));
    assert!(run(&[2]).contains("classes below 2, got 2"));
    assert!(run(&[]).contains("expected 1, one for each input, got 0"));
}

/// Expansive or decreasing activations: no certificate, no cycle; the message names the layer.
#[test]
fn activations_that_prove_nothing_are_refused_by_the_name_of_their_layer() {
    let mut r = Random::new(77);
    let with = |model: ImplicitModel, activation: Activation| {
        let mut parts = model.into_parts();
        let mut layers = parts.layout.layers().to_vec();
        layers[1].activation = activation;
        layers[1].name = "middle".into();
        parts.layout = Layout::new(layers);
        ImplicitModel::new(parts)
    };
    for activation in [Activation::Gelu, Activation::Selu, Activation::leaky_relu(-0.5).unwrap()] {
        let model = with(random_model(&mut r, false, 0.3), activation).unwrap();
        let message = sensitivity(&model, &[1.0; INPUTS]).unwrap_err().to_string();
        assert!(message.contains("\"middle\"") && message.contains(&activation.to_string()), "{message}");
    }
    let message = with(random_model(&mut r, true, 0.05), Activation::Gelu).unwrap_err().to_string();
    assert!(message.contains("cycle through layer \"middle\" with activation gelu"), "{message}");
    let clip = Activation::Clip { low: 0.0, high: 6.0 };
    assert!(sensitivity(&with(random_model(&mut r, true, 0.05), clip).unwrap(), &[1.0; INPUTS]).is_ok());
}
